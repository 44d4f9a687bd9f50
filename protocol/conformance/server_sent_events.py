"""Server-sent events, as clients read them: the bytes of a stream in, its events out.

The format is that of WHATWG HTML, 9.2.6. A line ends with CRLF, LF or CR and with nothing else, and
what the stream ends with before a blank line is no event. Of an event all fields are kept: some are
of no use to a client, and still say something about the server.
"""

import codecs
import re
from typing import NamedTuple

_LINE_END = re.compile("\r\n|\n|\r")


class ServerSentEvent(NamedTuple):
    """What is sent up to a blank line, if it has data."""

    fields: tuple[tuple[str, str], ...]
    """Names and values, in order. Comments are none."""

    def values(self, name: str) -> list[str]:
        """Return the values of the fields of that name."""
        return [value for known, value in self.fields if known == name]

    @property
    def data(self) -> str:
        """What is said, in one or several lines."""
        return "\n".join(self.values("data"))


def lines_of(text: str) -> list[str]:
    """Return the lines of ``text``, the last of them without a line end."""
    return _LINE_END.split(text)


def sent_events(body: bytes) -> list[ServerSentEvent]:
    """Return the events that are complete in ``body``."""
    return EventReader().feed(body)


class EventReader:
    """Cuts a stream into its events."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._line = ""  # as far as it came
        self._fields: list[tuple[str, str]] = []
        self._is_after_return = False

    def feed(self, data: bytes) -> list[ServerSentEvent]:
        """Return the events that are complete with ``data``."""
        text = self._decoder.decode(data)
        if not text:
            return []
        # A carriage return ends a line at once, and may yet be half of a line end.
        rest = text.removeprefix("\n") if self._is_after_return else text
        self._is_after_return = text.endswith("\r")
        *lines, self._line = lines_of(self._line + rest)
        return [event for line in lines if (event := self._take(line)) is not None]

    def _take(self, line: str) -> ServerSentEvent | None:
        """Take a line, and return the event that it ends."""
        if line:
            name, _, value = line.partition(":")
            self._fields += [(name, value.removeprefix(" "))] if name else []
            return None
        event = ServerSentEvent(tuple(self._fields))
        self._fields = []
        return event if event.values("data") else None
