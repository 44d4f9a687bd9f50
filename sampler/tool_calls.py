"""Find thoughts and tool calls in a model's text while it is being sampled.

The syntax is the one that Hermes 2 Pro introduced and Qwen 2.5 and 3, SmolLM3 and others share:

    <think>
    The user wants the weather.
    </think>

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Free-form tools are our addition. No model's template has them, and JSON would bury their input in
escapes, which no grammar of the client's could describe. So the input stands there as it is:

    <tool_call>
    {"name": "apply_patch"}
    *** Begin Patch
    ...
    </tool_call>

It begins on the line after the name and ends before the line break that the end marker follows.

The markers may be split over tokens in any way, so the parser works on characters. It holds back
the longest tail of text that may still become a marker, or a line break next to one, and never
more. Arguments are passed on as they come: the pieces concatenate to exactly what the model wrote.
A marker inside a JSON string or inside thoughts means nothing.
"""

import json
import re
from dataclasses import dataclass, field

BEGIN = "<tool_call>"
END = "</tool_call>"
THINK_BEGIN = "<think>"
THINK_END = "</think>"

INPUT_END = f"\n{END}"
"""Where the input of a free-form tool ends."""

# What may stand before the begin marker of the thoughts.
_SPACE = " \t\r\n"


def call_head(name: str) -> str:
    """Return what a call of a function begins with, up to its arguments."""
    return f'{BEGIN}\n{{"name": {_quoted(name)}, "arguments": '


def custom_call_head(name: str) -> str:
    """Return what a call of a free-form tool begins with, up to its input."""
    return f'{BEGIN}\n{{"name": {_quoted(name)}}}\n'


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


# --- What the parser finds -----------------------------------------------------------------------


@dataclass(frozen=True)
class Thought:
    """A piece of what the model thinks, without the line breaks around the whole."""

    text: str


@dataclass(frozen=True)
class ThoughtEnded:
    """The thoughts are complete; there were some."""


@dataclass(frozen=True)
class Text:
    """Text outside thoughts and calls."""

    text: str
    start: int = field(default=0, compare=False)
    """How many characters the parser had been fed before it."""


@dataclass(frozen=True)
class CallBegan:
    """A call whose tool is known."""

    name: str
    is_custom: bool = False


@dataclass(frozen=True)
class Arguments:
    """A piece of the current call's arguments, or of its input."""

    text: str


@dataclass(frozen=True)
class CallEnded:
    """The current call is complete."""


Parsed = Thought | ThoughtEnded | Text | CallBegan | Arguments | CallEnded


# --- The head of a call --------------------------------------------------------------------------


_CHARACTER = r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})'
_NAME = rf'"{_CHARACTER}*"'
_HEAD = re.compile(
    rf'{BEGIN}\s*\{{\s*"name"\s*:\s*(?P<name>{_NAME})\s*'
    r'(?:,\s*"arguments"\s*:\s*(?=\{)|(?P<is_custom>\}(?=\n)))'
)


def _beginning_of(*parts: str) -> str:
    """Return a pattern that matches what ``parts`` match one after the other, and whatever may
    become that once one of them is complete."""
    pattern = ""
    for part in reversed(parts):
        pattern = f"(?:{part}{pattern})?"
    return pattern


_BEGUN_NAME = rf'"{_CHARACTER}*(?:\\(?:u[0-9a-fA-F]{{0,3}})?)?'
_BEGUN_ARGUMENTS = _beginning_of(",", r"\s*", *'"arguments"', r"\s*", ":", r"\s*")
_BEGUN_HEAD = re.compile(
    _beginning_of(
        *(BEGIN, r"\s*", r"\{", r"\s*", *'"name"', r"\s*", ":", r"\s*"),
        rf"(?:{_BEGUN_NAME}|{_NAME}\s*(?:\}}|{_BEGUN_ARGUMENTS}))",
    )
)


# --- The parser ----------------------------------------------------------------------------------


class TurnParser:
    """The streaming parser of one turn.

    White space is dropped between calls and where a turn has nothing else before its first call. A
    call that is not of the expected form is given back as the text it is.
    """

    def __init__(
        self, *, may_call: bool = True, thinks: bool = False, think_is_open: bool = False
    ) -> None:
        """Begin a turn.

        Args:
            may_call: whether there may be calls; if not, their markers are text.
            thinks: whether thoughts may come first; if not, their markers are text.
            think_is_open: whether the turn begins inside thoughts.
        """
        self._may_call = may_call
        self._buffer = ""
        self._position = 0  # where the buffer begins in all that was fed
        self._wrote_thought = False
        self._wrote_input = False
        # Where no call can come, white space is text like any other.
        self._wrote_text = not may_call
        self._scanner = _ObjectScanner()
        self._step = self._in_text
        if think_is_open:
            self._step = self._in_thought
        elif thinks:
            self._step = self._at_start

    @property
    def is_in_thought(self) -> bool:
        """True from the begin marker of the thoughts to their end marker."""
        return self._step == self._in_thought

    @property
    def may_think(self) -> bool:
        """True until the thoughts are over, or it is clear that there are none."""
        return self._step in (self._at_start, self._in_thought)

    @property
    def is_in_call(self) -> bool:
        """True from the begin marker of a call to its end marker."""
        in_call = (self._in_head, self._in_arguments, self._in_tail, self._in_input)
        return self._step in in_call

    def feed(self, text: str) -> list[Parsed]:
        """Take the next characters and return what they decide."""
        self._buffer += text
        parsed: list[Parsed] = []
        while self._step(parsed):
            pass
        return parsed

    def flush(self) -> list[Parsed]:
        """Return what was held back; the turn was cut here.

        A call that was cut before its tool was known is nothing: it was never made, and its marker
        is no text for a reader.
        """
        parsed: list[Parsed] = []
        if self._step == self._in_thought:
            self._give_thought(len(self._buffer.rstrip("\n")), parsed)
        elif self._step == self._in_input:
            self._give_input(len(self._buffer), parsed)
        elif self._step not in (self._after_thought, self._in_head, self._in_tail):
            self._give_text(len(self._buffer), parsed)
        self._buffer = ""
        return parsed

    def end(self) -> list[Parsed]:
        """Return what was held back; the model has ended its turn.

        Where no grammar forbids it, it may do so inside a call. Then the call is what it is, and if
        its tool is not known yet, it is text.
        """
        parsed: list[Parsed] = []
        if self._step == self._in_head:
            self._give_text(len(self._buffer), parsed)
        is_open = self._step in (self._in_arguments, self._in_input)
        parsed += self.flush()
        return [*parsed, CallEnded()] if is_open else parsed

    # Each step eats from the buffer and returns whether another step may be able to go on.

    def _at_start(self, parsed: list[Parsed]) -> bool:
        begun = self._buffer.lstrip(_SPACE)
        if begun.startswith(THINK_BEGIN):
            self._take(len(self._buffer) - len(begun) + len(THINK_BEGIN))
            self._step = self._in_thought
        elif not THINK_BEGIN.startswith(begun):
            self._step = self._in_text
        return self._step != self._at_start

    def _in_thought(self, parsed: list[Parsed]) -> bool:
        length, is_over = self._find(THINK_END)
        # The line break before the marker is no thought.
        self._give_thought(len(self._buffer[:length].rstrip("\n")), parsed)
        if is_over:
            self._take_through(THINK_END)
            self._step = self._after_thought
            if self._wrote_thought:
                parsed.append(ThoughtEnded())
        return is_over

    def _after_thought(self, parsed: list[Parsed]) -> bool:
        self._take(len(self._buffer) - len(self._buffer.lstrip("\n")))
        if self._buffer:
            self._step = self._in_text
        return bool(self._buffer)

    def _in_text(self, parsed: list[Parsed]) -> bool:
        length, is_over = self._find(BEGIN) if self._may_call else (len(self._buffer), False)
        if is_over or self._wrote_text or self._buffer[:length].strip():
            self._give_text(length, parsed)
        if is_over:
            self._step = self._in_head
        return is_over

    def _in_head(self, parsed: list[Parsed]) -> bool:
        if head := _HEAD.match(self._buffer):
            self._take(head.end())
            is_custom = head["is_custom"] is not None
            parsed.append(CallBegan(json.loads(head["name"]), is_custom))
            self._step = self._in_input if is_custom else self._in_arguments
            self._scanner, self._wrote_input = _ObjectScanner(), False
        elif not _BEGUN_HEAD.fullmatch(self._buffer):
            self._give_text(len(BEGIN), parsed)
            self._step = self._in_text
        return self._step != self._in_head

    def _in_arguments(self, parsed: list[Parsed]) -> bool:
        if length := self._scanner.feed(self._buffer):
            parsed.append(Arguments(self._take(length)))
        if self._scanner.is_complete:
            parsed.append(CallEnded())
            self._step = self._in_tail
        return self._scanner.is_complete

    def _in_tail(self, parsed: list[Parsed]) -> bool:
        _, is_over = self._find(END)
        if is_over:
            self._end_call(END)
        return is_over

    def _in_input(self, parsed: list[Parsed]) -> bool:
        length, is_over = self._find(INPUT_END)
        self._give_input(length, parsed)
        if is_over:
            parsed.append(CallEnded())
            self._end_call(INPUT_END)
        return is_over

    def _end_call(self, marker: str) -> None:
        self._take_through(marker)
        # What follows a call is text only if it is more than the line break before the next.
        self._step, self._wrote_text = self._in_text, False

    def _give_thought(self, length: int, parsed: list[Parsed]) -> None:
        thought = self._take(length)
        if not self._wrote_thought:
            thought = thought.lstrip("\n")
        if thought:
            parsed.append(Thought(thought))
            self._wrote_thought = True

    def _give_text(self, length: int, parsed: list[Parsed]) -> None:
        start, text = self._position, self._take(length)
        if text.strip() or (text and self._wrote_text):
            parsed.append(Text(text, start))
            self._wrote_text = True

    def _give_input(self, length: int, parsed: list[Parsed]) -> None:
        text = self._take(length)
        if text and not self._wrote_input:
            text, self._wrote_input = text[1:], True  # the line break after the name is no input
        if text:
            parsed.append(Arguments(text))

    def _find(self, marker: str) -> tuple[int, bool]:
        """Return where ``marker`` is in the buffer, or may begin; and whether it is there."""
        index = self._buffer.find(marker)
        if index >= 0:
            return index, True
        return len(self._buffer) - _overlap(self._buffer, marker), False

    def _take_through(self, marker: str) -> None:
        self._take(self._buffer.index(marker) + len(marker))

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        self._position += length
        return taken


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
    start = max(0, len(text) - len(marker) + 1)
    while (start := text.find(marker[0], start)) >= 0:
        if marker.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
