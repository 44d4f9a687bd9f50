"""One assistant turn while it is being sampled: tokens in, outputs out."""

import secrets
from collections.abc import Iterable, Iterator

from protocol.items import FunctionCall
from sampler.detokenizer import Detokenizer
from sampler.grammar import Matcher
from sampler.outputs import ArgumentsDelta, CallDone, CallStarted, TextDelta
from sampler.tool_calls import Arguments, CallBegan, CallEnded, Parsed, Text, ToolCallParser

TurnOutput = TextDelta | CallStarted | ArgumentsDelta | CallDone


def new_call_id() -> str:
    """Return a fresh ``call_id``, well under the 64 characters that clients can store."""
    return f"call_{secrets.token_hex(12)}"


class SampledTurn:
    """What has been sampled since the turn began, as the client sees it."""

    def __init__(
        self, detokenizer: Detokenizer, matcher: Matcher | None, *, may_call: bool
    ) -> None:
        """Begin a turn.

        Args:
            detokenizer: a fresh one.
            matcher: the constraint on the turn's tokens, if there is one.
            may_call: whether the turn may make tool calls; if not, all of it is text.
        """
        self.matcher = matcher
        self.calls: list[FunctionCall] = []
        """The complete calls, in the order sampled."""
        self._detokenizer = detokenizer
        self._parser = ToolCallParser() if may_call else None
        self._call_id = ""
        self._name = ""
        self._arguments: list[str] = []

    @property
    def is_in_call(self) -> bool:
        """True from a call's begin marker to its end marker."""
        return self._parser is not None and self._parser.is_in_call

    def feed(self, token_id: int) -> Iterator[TurnOutput]:
        """Take the next sampled token and give what it decides."""
        text = self._detokenizer.feed(token_id)
        if not text:
            return iter(())
        parsed = self._parser.feed(text) if self._parser else [Text(text)]
        return self._outputs(parsed)

    def flush(self) -> Iterator[TurnOutput]:
        """Give what was held back; the turn is over."""
        tail = self._detokenizer.flush()
        if not self._parser:
            return self._outputs([Text(tail)] if tail else [])
        return self._outputs([*self._parser.feed(tail), *self._parser.flush()])

    def _outputs(self, parsed: Iterable[Parsed]) -> Iterator[TurnOutput]:
        for part in parsed:
            match part:
                case Text(text):
                    yield TextDelta(text)
                case CallBegan(name):
                    self._call_id, self._name, self._arguments = new_call_id(), name, []
                    yield CallStarted(self._call_id, name)
                case Arguments(text):
                    self._arguments.append(text)
                    yield ArgumentsDelta(text)
                case CallEnded():
                    call = FunctionCall(self._call_id, self._name, "".join(self._arguments))
                    self.calls.append(call)
                    yield CallDone(call)
