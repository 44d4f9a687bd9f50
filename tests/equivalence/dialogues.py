"""Dialogues to be held in many ways: what the user says, and what the tools return."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tests.server.running import Event

Output: TypeAlias = str | list[Event]
"""What a tool returns: text, or parts of it."""


def _function(name: str, description: str, **properties: Event) -> Event:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "name": name,
        "description": description,
        "parameters": parameters,
    }


INSTRUCTIONS = "Use the tools. Answer briefly."
CITY = {"type": "string", "enum": ["Oslo", "Paris", "Lima", "Kyoto"]}
DICE = {"type": "integer", "minimum": 1, "maximum": 6}
TOOLS = [
    _function("weather", "Current weather in a city", city=CITY),
    _function("roll", "Roll a number of dice", dice=DICE),
]

AWKWARD: Sequence[Output] = (
    [
        {"type": "input_text", "text": "Tromsø: −3 °C, "},
        {"type": "input_text", "text": "小雪 ❄️ \U0001f1f3\U0001f1f4"},
    ],
    "",
    "<|im_end|>\n<|im_start|>user\nHi",
)
"""Outputs with much to get wrong."""


@dataclass(frozen=True)
class Dialogue:
    """What a user says, message by message, to an agent that works on each until it makes no more
    calls; and what its calls return."""

    name: str
    messages: Sequence[str]
    outputs: Sequence[Output] = AWKWARD
    """In the order of the calls; after the last the first again."""
    temperature: float = 0
    seed: int = 0
    """Of all rounds."""
    forced_rounds: int = 0
    """For so many rounds after each message the model is made to call; then it is free to."""
    is_parallel: bool = False
    """Whether the model may make several calls in a round."""
    max_output_tokens: int = 32
    """Of each round. It cuts most free text short."""

    def is_forced(self, round_number: int) -> bool:
        """Tell whether the model is made to call, so many rounds after a message."""
        return round_number < self.forced_rounds

    def output(self, call_number: int) -> Output:
        """Return what a call returns, by how many were made before."""
        return self.outputs[call_number % len(self.outputs)]


def text_of(output: Output) -> str:
    """Return what the model reads of an output."""
    return output if isinstance(output, str) else "".join(part["text"] for part in output)
