"""What went over the wire while a check was played: the evidence of its verdict."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from protocol.conformance.actions import (
    Action,
    Answer,
    Close,
    Closed,
    Connect,
    Frame,
    Opened,
    Outcome,
    Receive,
    Request,
    Send,
    Silence,
)
from protocol.conformance.server_sent_events import lines_of


class Direction(Enum):
    """Which way it went."""

    OUT = "→"
    IN = "←"
    NOTE = "·"


@dataclass(frozen=True)
class Line:
    """One frame, request or answer, as text."""

    direction: Direction
    place: str
    """The connection's name, or ``http``."""
    text: str

    def __str__(self) -> str:
        return f"{self.direction.value} {self.place}  {self.text}"


@dataclass
class Transcript:
    """Grows as a check is played."""

    lines: list[Line] = field(default_factory=list)

    def record(self, action: Action, outcome: Outcome) -> None:
        """Take note of what was done and of what came of it."""
        self.lines.extend(_lines(action, outcome))


def _lines(action: Action, outcome: Outcome) -> Iterator[Line]:
    match action:
        case Connect(socket, query, headers, path):
            asked = "".join(f" {name}: {value}" for name, value in headers)
            yield Line(Direction.OUT, socket, f"GET {path}{query} upgrade{asked}")
        case Send(socket, data):
            yield Line(Direction.OUT, socket, _text(data))
        case Close(socket, manner):
            yield Line(Direction.OUT, socket, manner.value)
        case Request(method, path, body):
            text = f"{method} {path} {_text(body or b'')}".rstrip()
            yield Line(Direction.OUT, "http", text)
        case Receive():
            pass
    place = "http" if isinstance(action, Request) else action.socket
    match outcome:
        case Frame(data):
            yield Line(Direction.IN, place, _text(data))
        case Closed(code, reason):
            yield Line(Direction.IN, place, f"closed {code} {reason}".rstrip())
        case Answer(status, _, body):
            yield Line(Direction.IN, place, str(status))
            for text in filter(None, lines_of(_text(body))):
                yield Line(Direction.IN, place, text)
        case Opened():
            yield Line(Direction.IN, place, "101")
        case Silence(seconds):
            yield Line(Direction.NOTE, place, f"nothing for {seconds:g} s")
        case _:
            pass


def _text(data: str | bytes) -> str:
    return data if isinstance(data, str) else data.decode(errors="backslashreplace")
