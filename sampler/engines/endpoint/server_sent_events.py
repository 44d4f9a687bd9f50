"""Event streams, as endpoints send them: bytes in, events out.

The format is that of WHATWG HTML, 9.2.6. Of an event, its name and its data are kept; ``id`` and
``retry`` are for clients that connect again, which one that has POSTed must not.
"""

import re
from typing import NamedTuple

MAX_EVENT_BYTES = 16 << 20
"""What one event may take, so that a stream without line ends does not fill the memory."""

_BLANK_LINE = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")
_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"
_MOST_OF_BLANK_LINE = 3
"""Bytes at the end of a chunk that the next may make a blank line of."""


class ServerSentEvent(NamedTuple):
    """What was said."""

    name: str
    """``message`` where the stream gives none."""
    data: bytes


class EventTooLongError(ValueError):
    """An event goes on for more than ``MAX_EVENT_BYTES``."""


class EventParser:
    """Cuts a stream into its events."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._is_first = True

    def feed(self, data: bytes) -> list[ServerSentEvent]:
        """Return the events that are complete with ``data``.

        What the stream ends with before a blank line is no event.

        Raises:
            EventTooLongError: an event is too long.
        """
        searched = max(len(self._buffer) - _MOST_OF_BLANK_LINE, 0)
        self._buffer += data
        events = []
        begin = 0
        # A carriage return at the end may be half of a line end.
        end = len(self._buffer) - self._buffer.endswith(b"\r")
        while blank := _BLANK_LINE.search(self._buffer, max(searched, begin), end):
            event = self._event(bytes(self._buffer[begin : blank.start()]))
            events += [] if event is None else [event]
            begin = blank.end()
        del self._buffer[:begin]
        if len(self._buffer) > MAX_EVENT_BYTES:
            raise EventTooLongError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return events

    def _event(self, block: bytes) -> ServerSentEvent | None:
        if self._is_first:
            block, self._is_first = block.removeprefix(_BOM), False
        name, data = "message", []
        for line in _LINE_END.split(block):
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if field == b"data":
                data.append(value)
            elif field == b"event":
                name = value.decode(errors="replace")
        return ServerSentEvent(name, b"\n".join(data)) if data else None
