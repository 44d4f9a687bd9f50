"""Whether a server takes several responses at once, or one after the other."""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
from msgspec import Struct

from protocol.conformance.shapes import TERMINAL_TYPES

_BUSY = 0.5
"""The part of the time in which something is being said, from which a server counts as busy: the
streams of one that is faster than it is asked do not overlap either."""


class _Typed(Struct):
    type: str = ""


_decoder = msgspec.json.Decoder(_Typed)


@dataclass
class Overlap:
    """Takes note of when each WebSocket's response is asked for, begins to speak, and ends."""

    clock: Callable[[], float] = time.monotonic
    _asked: dict[Hashable, float] = field(default_factory=dict)
    _began: dict[Hashable, float] = field(default_factory=dict)
    _waits: list[tuple[float, float]] = field(default_factory=list)
    _speeches: list[tuple[float, float]] = field(default_factory=list)

    def sent(self, connection: Hashable, data: str | bytes) -> None:
        """Take note of what a client sends."""
        if _type_of(data) == "response.create":
            self._asked[connection] = self.clock()

    def received(self, connection: Hashable, data: str | bytes) -> None:
        """Take note of what a server sends."""
        kind = _type_of(data)
        if kind == "response.output_item.added":
            self._began.setdefault(connection, self.clock())
        elif kind in TERMINAL_TYPES or kind == "response.done":
            now = self.clock()
            if connection in self._began and connection in self._asked:
                self._speeches.append((self._began[connection], now))
                self._waits.append((self._asked[connection], now))
            self._began.pop(connection, None)
            self._asked.pop(connection, None)

    @property
    def is_serial(self) -> bool:
        """True if responses that were asked for at once were told one after the other."""
        if len(self._speeches) < 3:
            return False
        whole = max(end for _, end in self._waits) - min(begin for begin, _ in self._waits)
        told = sum(end - begin for begin, end in self._speeches)
        are_many = _num_overlaps(self._waits) > len(self._waits) // 2
        return are_many and not _num_overlaps(self._speeches) and told > _BUSY * whole


def _type_of(data: str | bytes) -> str:
    try:
        return _decoder.decode(data).type
    except (msgspec.MsgspecError, RecursionError):  # some frames are made to be no event
        return ""


def _num_overlaps(intervals: list[tuple[float, float]]) -> int:
    return sum(before[1] > after[0] for before, after in pairwise(sorted(intervals)))
