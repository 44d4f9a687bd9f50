"""Tokens: how many requests may make a model read, and how many a server says were used."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from protocol.conformance.actions import Connect, Opened, Request, Send
from protocol.conformance.check import Check, Target
from protocol.conformance.play import Branch, Branches, Play
from protocol.conformance.shapes import Event
from protocol.conformance.transcript import Direction, Line

_CHARACTERS_PER_TOKEN = 4
"""As is usual for English, and about right for JSON."""


# --- Before --------------------------------------------------------------------------------------


def estimated_input(checks: Iterable[Check], target: Target) -> int:
    """Return about how many tokens ``checks`` may make the model read.

    What a check sends later depends on what comes, so each of its requests counts as the first.
    """
    return sum(check.num_requests * _num_tokens(_first_sent(check, target)) for check in checks)


def _first_sent(check: Check, target: Target) -> str | bytes:
    """Return the first frame or body of a check, without sending it; it is empty if none comes."""
    branch: Branch = Play(check, target)
    while (asked := branch.asked) is not None:
        match asked:
            case Connect():
                branch.give(Opened())
            case Branches(branches):
                branch = branches[0]
            case Send(_, data):
                return data
            case Request(body=bytes(body)):
                return body
            case _:
                break
    return b""


def _num_tokens(sent: str | bytes) -> int:
    """Return about how many tokens are read of a frame or body: none, if it has no input."""
    value = _read(sent)
    if not isinstance(value, dict) or "input" not in value:
        return 0
    return max(-(-len(sent) // _CHARACTERS_PER_TOKEN), len(sent.split()))


# --- After ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """Tokens that were read and written."""

    num_input_tokens: int = 0
    num_output_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.num_input_tokens + other.num_input_tokens,
            self.num_output_tokens + other.num_output_tokens,
        )

    def __str__(self) -> str:
        return f"{self.num_input_tokens:,} input and {self.num_output_tokens:,} output tokens"


def reported(lines: Sequence[Line]) -> Usage:
    """Return the sum of what a server says was used, in what went over the wire.

    A response that is shown more than once, as one that is stored, counts once.
    """
    usages: dict[Any, Usage] = {}
    for told in _objects(lines):
        # A response that waits tells what its segment used, and the next one what that does.
        segment = told.get("sequence_number") if told.get("type") == "response.done" else None
        response = told.get("response", told)
        if isinstance(response, dict) and (usage := _usage(response.get("usage"))) is not None:
            usages[str(response.get("id")), str(segment)] = usage
    return sum(usages.values(), Usage())


def _objects(lines: Sequence[Line]) -> Iterator[Event]:
    """Return the events and resources in which a server tells of usage."""
    for (direction, place), group in groupby(lines, lambda line: (line.direction, line.place)):
        texts = [line.text for line in group]
        if direction is not Direction.IN or not any('"usage"' in text for text in texts):
            continue
        if place == "http" and isinstance(whole := _read("\n".join(texts[1:])), dict):
            texts = []  # a resource, which may be on several lines; a status is before it
            yield whole
        for text in texts:
            event = _read(text.removeprefix("data:"))
            if isinstance(event, dict):
                yield event


def _usage(value: Any) -> Usage | None:
    match value:
        case {"input_tokens": int(num_input), "output_tokens": int(num_output)}:
            return Usage(num_input, num_output)
        case _:
            return None


def _read(text: str | bytes) -> Any:
    """Return the value in JSON; None if it is none."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
