"""An agent run as the chat completions that hold it, and how much room that takes.

The embedded model's template has no place for tools. They are told in the system message, and calls
and outputs in the text of messages, in the words of our own server: so the prompts have the same
tokens on all servers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from protocol.items import parse_items
from protocol.tools import callable_tools, parse_tools
from sampler.conversation import (
    Conversation,
    ToolOutput,
    Turn,
    role_of,
    text_of,
    turns_of,
    with_tools_told,
)
from sampler.embedded_model import ensure_embedded_model
from sampler.traces import Trace, TraceTurn
from scripts.comparison.workloads import Workload

_NUMBER_TOKENS = 32
"""More than what tells agent runs apart takes."""


@dataclass(frozen=True)
class Step:
    """One request of an agent run."""

    messages: list[dict[str, str]]
    """The whole history."""
    input_tokens: int
    output_tokens: int
    """How many the trace's turn has, with the one that ends it."""
    tool_seconds: float
    """How long the tools then run."""


def steps_of(trace: Trace, tokenizer: Tokenizer) -> list[Step]:
    """Return the requests that hold ``trace``, in ChatML, with tools and calls told as text."""
    history = _beginning(trace)
    steps = []
    for turn in trace.turns:
        said = Turn("assistant", turn.text, turn.call_items())
        steps.append(
            Step(
                messages=[{"role": role_of(each), "content": text_of(each)} for each in history],
                input_tokens=_num_tokens(tokenizer, _rendered(history)),
                output_tokens=_num_tokens(tokenizer, text_of(said)) + 1,
                tool_seconds=max((call.seconds for call in turn.calls), default=0.0),
            )
        )
        history += [said, *_answers(turn)]
    return steps


def _beginning(trace: Trace) -> list[Turn]:
    given = trace.input if isinstance(trace.input, str) else list(trace.input)
    turns = turns_of(Conversation(parse_items(given), trace.instructions))
    return with_tools_told(turns, callable_tools(parse_tools(list(trace.tools))))


def _answers(turn: TraceTurn) -> Iterator[Turn]:
    """Give what follows the turn: the outputs of its calls, then what users said meanwhile."""
    if turn.calls:
        called = zip(turn.call_items(), turn.calls, strict=True)
        yield Turn("tool", outputs=tuple(ToolOutput(item, call.output) for item, call in called))
    yield from turns_of(Conversation(parse_items(list(turn.messages))))


_DEFAULT_SYSTEM = Turn(
    "system", "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
)
"""What SmolLM2's template writes where there is no system message."""


def _rendered(turns: Sequence[Turn]) -> str:
    """Return the prompt as SmolLM2's template has it."""
    whole = turns if turns[0].role == "system" else [_DEFAULT_SYSTEM, *turns]
    said = (f"<|im_start|>{role_of(turn)}\n{text_of(turn)}<|im_end|>\n" for turn in whole)
    return "".join(said) + "<|im_start|>assistant\n"


def _num_tokens(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


@dataclass(frozen=True)
class Load:
    """How much a server has to have room for."""

    concurrency: int
    num_tokens: int
    """Of the contexts of all runs in the end, and of one more."""


def load_of(workload: Workload) -> Load:
    """Return the load of ``workload``."""
    last = steps_of(workload.trace, embedded_tokenizer())[-1]
    num_tokens = last.input_tokens + last.output_tokens + _NUMBER_TOKENS
    return Load(workload.concurrency, (workload.concurrency + 1) * num_tokens)


def embedded_tokenizer() -> Tokenizer:
    """Return the tokenizer of the embedded model, with its control tokens in reach of text."""
    return Tokenizer.from_file(str(ensure_embedded_model() / "tokenizer.json"))
