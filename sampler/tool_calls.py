"""Find the tool calls in a model's text while it is being sampled.

The syntax is the one that Hermes 2 Pro introduced and Qwen 2.5 and 3, SmolLM3 and others share:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>

The markers may be split over tokens in any way, so the parser works on characters. It holds back
the longest tail of text that may still become a marker, and never more. Arguments are passed on as
they come: the pieces concatenate to exactly what the model wrote. A marker inside a JSON string
means nothing.
"""

import json
import re
from dataclasses import dataclass

BEGIN = "<tool_call>"
END = "</tool_call>"

# Without "<" in the name, so that the head of a call cannot contain the end marker, which is looked
# for while the head is not complete.
_NAME = r'"(?:[^"\\<\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*"'
_HEAD = re.compile(rf'\s*\{{\s*"name"\s*:\s*({_NAME})\s*,\s*"arguments"\s*:\s*(?=\{{)')


@dataclass(frozen=True)
class Text:
    """Text outside any call."""

    text: str


@dataclass(frozen=True)
class CallBegan:
    """A call whose function name is complete."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """A piece of the current call's arguments."""

    text: str


@dataclass(frozen=True)
class CallEnded:
    """The current call's arguments are complete."""


Parsed = Text | CallBegan | Arguments | CallEnded


class ToolCallParser:
    """The streaming parser of one segment.

    White space is dropped between calls and where a turn has nothing else before its first call.
    A call that is not of the expected form is given back as the text it is.
    """

    def __init__(self) -> None:
        self._buffer = ""
        self._step = self._in_text
        self._wrote_text = False
        self._scanner = _ObjectScanner()

    @property
    def is_in_call(self) -> bool:
        """True from the begin marker to the end marker."""
        return self._step != self._in_text

    def feed(self, text: str) -> list[Parsed]:
        """Take the next characters and return what they decide."""
        self._buffer += text
        parsed: list[Parsed] = []
        while self._step(parsed):
            pass
        return parsed

    def flush(self) -> list[Parsed]:
        """Return what was held back; the text is over."""
        held, self._buffer = self._buffer, ""
        if self._step == self._in_head:
            held = BEGIN + held
        elif self._step == self._in_tail:
            return []
        return [Text(held)] if held.strip() or (held and self._wrote_text) else []

    # Each step eats from the buffer and returns whether another step may be able to go on.

    def _in_text(self, parsed: list[Parsed]) -> bool:
        before, marker, after = self._buffer.partition(BEGIN)
        if marker:
            self._emit_text(before, parsed)
            self._buffer, self._step = after, self._in_head
            return True
        held = _overlap(self._buffer, BEGIN)
        text = self._buffer[: len(self._buffer) - held]
        if text.strip() or self._wrote_text:
            self._emit_text(text, parsed)
            self._buffer = self._buffer[len(text) :]
        return False

    def _in_head(self, parsed: list[Parsed]) -> bool:
        if head := _HEAD.match(self._buffer):
            parsed.append(CallBegan(json.loads(head[1])))
            self._buffer, self._step = self._buffer[head.end() :], self._in_arguments
            self._scanner = _ObjectScanner()
            return True
        body, marker, after = self._buffer.partition(END)
        if marker:
            self._emit_text(BEGIN + body + END, parsed)
            self._buffer, self._step = after, self._in_text
        return bool(marker)

    def _in_arguments(self, parsed: list[Parsed]) -> bool:
        length = self._scanner.feed(self._buffer)
        if length:
            parsed.append(Arguments(self._buffer[:length]))
            self._buffer = self._buffer[length:]
        if self._scanner.is_complete:
            parsed.append(CallEnded())
            self._step = self._in_tail
        return self._scanner.is_complete

    def _in_tail(self, parsed: list[Parsed]) -> bool:
        _, marker, after = self._buffer.partition(END)
        if marker:
            # What follows a call is text only if it is more than the line break before the next.
            self._buffer, self._step, self._wrote_text = after, self._in_text, False
        return bool(marker)

    def _emit_text(self, text: str, parsed: list[Parsed]) -> None:
        if text.strip() or (text and self._wrote_text):
            parsed.append(Text(text))
            self._wrote_text = True


class _ObjectScanner:
    """Finds where a JSON object ends, character by character, without parsing it."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self.is_complete = False

    def feed(self, text: str) -> int:
        """Return how many characters of ``text`` belong to the object."""
        for index, character in enumerate(text):
            self._take(character)
            if self.is_complete:
                return index + 1
        return len(text)

    def _take(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif self._in_string:
            self._is_escaped = character == "\\"
            self._in_string = character != '"'
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.is_complete = self._depth == 0


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest tail of ``text`` that begins ``marker``."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
