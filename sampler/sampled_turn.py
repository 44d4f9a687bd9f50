"""One assistant turn while it is being sampled: tokens in, outputs out."""

import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from typing import assert_never

from protocol.items import CustomToolCall, FunctionCall
from protocol.output_items import Logprob, TopLogprob
from protocol.tools import split_name
from sampler.detokenizer import Detokenizer
from sampler.matcher import Matcher
from sampler.outputs import (
    ArgumentsDelta,
    CallDone,
    CallStarted,
    ReasoningDelta,
    ReasoningDone,
    TextDelta,
)
from sampler.sampling import Sampled, TokenLogprobs
from sampler.tokenizer import Tokenizer
from sampler.tool_calls import (
    Arguments,
    CallBegan,
    CallEnded,
    Parsed,
    Text,
    Thought,
    ThoughtEnded,
    TurnParser,
)

TurnOutput = ReasoningDelta | ReasoningDone | TextDelta | CallStarted | ArgumentsDelta | CallDone


def new_call_id() -> str:
    """Return a fresh ``call_id``, well under the 64 characters that clients can store."""
    return f"call_{secrets.token_hex(12)}"


class SampledTurn:
    """What has been sampled since the turn began, as the client sees it."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        matcher: Matcher | None,
        *,
        may_call: bool,
        thinks: bool = False,
        think_is_open: bool = False,
    ) -> None:
        """Begin a turn.

        Args:
            detokenizer: a fresh one.
            matcher: the constraint on the turn's tokens, if there is one.
            may_call: whether the turn may make tool calls; if not, their markers are text.
            thinks: whether it may begin with thoughts; if not, their markers are text.
            think_is_open: whether it begins inside thoughts.
        """
        self.matcher = matcher
        self.calls: list[FunctionCall | CustomToolCall] = []
        """The complete calls, in the order sampled."""
        self.num_reasoning_tokens = 0
        """How many of the tokens were thoughts, their markers included."""
        self._detokenizer = detokenizer
        self._parser = TurnParser(may_call=may_call, thinks=thinks, think_is_open=think_is_open)
        self._num_tokens = 0
        self._num_characters = 0
        self._logprobs = _PendingLogprobs(detokenizer.tokenizer)
        self._call: _Call | None = None

    @property
    def is_in_call(self) -> bool:
        """True from a call's begin marker to its end marker."""
        return self._parser.is_in_call

    @property
    def may_think(self) -> bool:
        """True until the thoughts are over, or it is clear that there are none."""
        return self._parser.may_think

    def feed(self, tokens: Sequence[Sampled]) -> list[TurnOutput]:
        """Take the next sampled tokens and return what they decide.

        While the turn ``may_think`` they come one by one, or those that are thoughts could not be
        told from the others.
        """
        text = "".join(map(self._spell, tokens))
        self._num_tokens += len(tokens)
        was_in_thought = self._parser.is_in_thought
        parsed = self._parser.feed(text)
        if was_in_thought or self._parser.is_in_thought:
            self.num_reasoning_tokens = self._num_tokens  # thoughts come before all else
        return self._outputs(parsed)

    def _spell(self, token: Sampled) -> str:
        text = self._detokenizer.feed(token.token_id)
        self._num_characters += len(text)
        if token.logprobs is not None:
            end = self._num_characters + self._detokenizer.is_in_character
            self._logprobs.add(token.logprobs, end)
        return text

    def end(self) -> list[TurnOutput]:
        """Return what was held back; the model has ended the turn."""
        tail = self._detokenizer.flush()
        return self._outputs([*self._parser.feed(tail), *self._parser.end()])

    def flush(self) -> list[TurnOutput]:
        """Return what was held back; the turn was cut here."""
        tail = self._detokenizer.flush()
        return self._outputs([*self._parser.feed(tail), *self._parser.flush()])

    def _outputs(self, parsed: Iterable[Parsed]) -> list[TurnOutput]:
        return [self._output(part) for part in parsed]

    def _output(self, part: Parsed) -> TurnOutput:
        match part:
            case Thought(text):
                return ReasoningDelta(text)
            case ThoughtEnded():
                return ReasoningDone()
            case Text(text, start):
                return TextDelta(text, self._logprobs.take(start, start + len(text)))
            case CallBegan(name, is_custom):
                self._call = _Call(new_call_id(), name, is_custom=is_custom)
                return CallStarted(self._call.call_id, name, is_custom)
            case Arguments(text):
                assert self._call, "arguments belong to a call"
                self._call.pieces.append(text)
                return ArgumentsDelta(text)
            case CallEnded():
                assert self._call, "only a call that began can end"
                call = self._call.done()
                self.calls.append(call)
                return CallDone(call)
            case _:
                assert_never(part)


class _Call:
    """The call that is being sampled."""

    def __init__(self, call_id: str, name: str, *, is_custom: bool) -> None:
        self.call_id = call_id
        self.pieces: list[str] = []
        self._name = name
        self._is_custom = is_custom

    def done(self) -> FunctionCall | CustomToolCall:
        namespace, name = split_name(self._name)
        kind = CustomToolCall if self._is_custom else FunctionCall
        return kind(self.call_id, name, "".join(self.pieces), namespace)


class _PendingLogprobs:
    """Logprobs of tokens whose text has not been given out yet, by where in the text they end.

    A token that completes no character ends where the character will.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pending: deque[tuple[int, TokenLogprobs]] = deque()

    def add(self, logprobs: TokenLogprobs, end: int) -> None:
        """Note a token that ends in the character before ``end``."""
        if self._tokenizer.token_bytes(logprobs.token_id):
            self._pending.append((end, logprobs))

    def take(self, start: int, stop: int) -> tuple[Logprob, ...]:
        """Return those of the tokens that end in the text from ``start`` to ``stop``, and forget
        the tokens before it, of which nothing is text."""
        taken = []
        while self._pending and self._pending[0][0] <= stop:
            end, logprobs = self._pending.popleft()
            if end > start:
                taken.append(self._spelled(logprobs))
        return tuple(taken)

    def _spelled(self, logprobs: TokenLogprobs) -> Logprob:
        top = tuple(
            TopLogprob(*self._spelling(token_id, value)) for token_id, value in logprobs.top
        )
        return Logprob(*self._spelling(logprobs.token_id, logprobs.logprob), top_logprobs=top)

    def _spelling(self, token_id: int, logprob: float) -> tuple[str, float, tuple[int, ...]]:
        text = self._tokenizer.token_text(token_id)
        return text, logprob, tuple(self._tokenizer.token_bytes(token_id))
