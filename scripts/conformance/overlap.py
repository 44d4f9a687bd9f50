"""Whether a server takes several responses at once, or one after the other."""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from protocol.conformance.shapes import TERMINAL_TYPES

_BUSY = 0.5
"""The part of the time in which something is being said, from which a server counts as busy: the
streams of one that is faster than it is asked do not overlap either."""
_STRAYS = 10
"""Of so many responses one may seem to overlap with another: what is sent in order on several
connections need not be read in order."""
_LEAST = 3
"""So many streams have to be seen."""


class _Told(Struct):
    """What is read of an event, or of a response that is not streamed."""

    type: str = ""
    status: Any = None


_decoder = msgspec.json.Decoder(_Told)


class _Response(NamedTuple):
    """When a response was asked for, began to speak, and ended."""

    asked: float
    began: float
    """As it ended where it is not streamed, and nobody knows."""
    ended: float


@dataclass
class Overlap:
    """Takes note of when each response is asked for, begins to speak, and ends."""

    clock: Callable[[], float] = time.monotonic
    _asked: dict[Hashable, float] = field(default_factory=dict)
    _began: dict[Hashable, float] = field(default_factory=dict)
    _responses: list[_Response] = field(default_factory=list)

    def sent(self, connection: Hashable, data: str | bytes) -> None:
        """Take note of a frame that a client sends."""
        if _told(data).type == "response.create":
            self.asked(connection)

    def asked(self, connection: Hashable) -> None:
        """Take note that a response is asked for: over HTTP, each time as of another connection."""
        self._asked[connection] = self.clock()

    def received(self, connection: Hashable, data: str | bytes) -> None:
        """Take note of an event that a server sends."""
        kind = _told(data).type
        if kind == "response.output_item.added":
            self._began.setdefault(connection, self.clock())
        elif kind in TERMINAL_TYPES or kind == "response.done":
            if connection in self._began:
                self._end(connection)
            self._forget(connection)

    def answered(self, connection: Hashable, body: bytes) -> None:
        """Take note that an HTTP answer is over; what is streamed has ended before."""
        if _told(body).status in ("completed", "incomplete"):
            self._end(connection)
        self._forget(connection)

    def _end(self, connection: Hashable) -> None:
        if connection in self._asked:
            now = self.clock()
            began = self._began.get(connection, now)
            self._responses.append(_Response(self._asked[connection], began, now))

    def _forget(self, connection: Hashable) -> None:
        self._began.pop(connection, None)
        self._asked.pop(connection, None)

    @property
    def is_serial(self) -> bool:
        """True if responses that were asked for at once were told one after the other."""
        waits = [(response.asked, response.ended) for response in self._responses]
        speeches = [(response.began, response.ended) for response in self._responses]
        if sum(began < ended for began, ended in speeches) < _LEAST:
            return False
        are_many = _num_overlaps(waits) > len(waits) // 2
        are_told_apart = _num_overlaps(speeches) <= len(speeches) // _STRAYS
        return are_many and are_told_apart and self._is_busy()

    def _is_busy(self) -> bool:
        """Tell whether streams are told for most of the time that they take, if each begins to be
        made when the response before it has ended."""
        told, made, free = 0.0, 0.0, 0.0
        for asked, began, ended in sorted(self._responses, key=lambda response: response.ended):
            if began < ended:
                told += ended - began
                made += ended - max(asked, free)
            free = ended
        return told > _BUSY * made


def _told(data: str | bytes) -> _Told:
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError):  # some frames are made to be no event
        return _Told()


def _num_overlaps(intervals: list[tuple[float, float]]) -> int:
    return sum(before[1] > after[0] for before, after in pairwise(sorted(intervals)))
