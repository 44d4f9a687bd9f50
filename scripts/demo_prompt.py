"""What the demo tells the model, and the questions it asks by default.

The default model has 135 million parameters. It never begins a call by itself, so the first call
is forced, and it learns what to do with tools from examples alone: they are earlier turns, each a
whole cycle of question, call, output and answer. Their number, order and wording, and the names of
the tools, were chosen by trying them on 24 questions: all 24 picked the right tool and quoted its
output. So did 11 of 12 fresh ones. The default questions are three of the 24.
"""

import json
from typing import Any

INSTRUCTIONS = "Answer with the result of the tool."

DEFAULT_QUESTIONS = (
    "What is 4173 * 29?",
    "What does todo.txt say?",
    "What is the weather in Oslo?",
)


def input_items(question: str) -> list[dict[str, Any]]:
    """Return the examples, then ``question``."""
    return [*_EXAMPLES, _message("user", question)]


def _message(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


def _cycle(
    question: str, tool: str, arguments: dict[str, str], output: str, answer: str
) -> list[dict[str, Any]]:
    call_id = f"example {question}"
    call = {"type": "function_call", "call_id": call_id, "name": tool}
    return [
        _message("user", question),
        call | {"arguments": json.dumps(arguments)},
        {"type": "function_call_output", "call_id": call_id, "output": output},
        _message("assistant", answer),
    ]


_EXAMPLES = [
    *_cycle(
        "What is the weather in Rome?",
        "weather",
        {"city": "Rome"},
        "Rome: 25 degrees, sunny",
        "It is 25 degrees and sunny in Rome.",
    ),
    *_cycle(
        "Read notes.txt.",
        "file",
        {"path": "notes.txt"},
        "Water the plants.",
        "The file says: Water the plants.",
    ),
    *_cycle(
        "What is 1312 - 75?",
        "math",
        {"expression": "1312 - 75"},
        "1237",
        "The result is 1237.",
    ),
    *_cycle(
        "What does plan.txt say?",
        "file",
        {"path": "plan.txt"},
        "Ship on Monday.",
        "The file says: Ship on Monday.",
    ),
]
