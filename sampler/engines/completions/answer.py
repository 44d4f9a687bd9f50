"""What an endpoint for completions answers, chunk by chunk: ids in, sampled tokens out.

The ids are taken as they are, and checked for being all there is. There is no clock, socket or run
in here.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from protocol.validation import JsonObject
from sampler.engine_error import EngineError
from sampler.engines.completions.dialect import CompletionsDialect
from sampler.engines.endpoint.errors import EndpointError
from sampler.run import StopReason
from sampler.sampling import Sampled, TokenLogprobs
from sampler.tokenizer import Tokenizer

_ID_PREFIX = "token_id:"
"""What vLLM spells a token with, by its id."""


_STOP_REASONS = {
    "stop": StopReason.END_OF_TURN,
    "length": StopReason.CONTEXT_LENGTH,  # before it was as long as it might be here
    "content_filter": StopReason.CONTENT_FILTER,
}
"""What the reasons to finish mean. With any other the endpoint has failed."""


class _Logprobs(Struct):
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(Struct):
    text: str | None = None
    tokens: list[int] | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _PromptDetails(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    time_info: Any = None


def says_something(event: JsonObject) -> bool:
    """Tell whether ``event`` has tokens, text, or a reason to end.

    Raises:
        EngineError: it is no chunk of a completion.
        EndpointError: there is nothing but the end, and it is no good one.
    """
    choices = _chunk(event).choices
    choice = choices[0] if choices else _Choice()
    if choice.text or choice.tokens or choice.token_ids:
        return True
    if choice.finish_reason is not None and choice.finish_reason not in _STOP_REASONS:
        raise _no_good_end(choice.finish_reason)
    return choice.finish_reason is not None


def _chunk(event: JsonObject) -> _Chunk:
    try:
        return msgspec.convert(event, _Chunk)
    except (msgspec.ValidationError, RecursionError) as error:
        raise EngineError(f"expected a chunk of a completion: {error}"[:300]) from None


def _no_good_end(finish_reason: str) -> EndpointError:
    message = f"the endpoint's answer ended with {finish_reason[:80]!r}"
    return EndpointError(message, is_transient=True)


class CompletionsAnswer:
    """The answer to one request, as far as it has come."""

    def __init__(
        self,
        dialect: CompletionsDialect,
        tokenizer: Tokenizer,
        end_of_turn: int,
        *,
        num_prompt: int,
        max_tokens: int,
        limit: StopReason,
        num_top: int | None,
    ) -> None:
        """Begin to read.

        Args:
            dialect: how ids are given.
            tokenizer: knows which ids there are, and which end a turn.
            end_of_turn: what ends a turn where the endpoint does not tell what did.
            num_prompt: how many tokens the endpoint was sent.
            max_tokens: how many were asked for.
            limit: why there are no more than so many.
            num_top: how many log-probabilities come with each token, besides its own; None: none.
        """
        self.max_tokens = max_tokens
        """How many tokens are wanted at most."""
        self.num_sampled = 0
        """Tokens, the end of the turn included."""
        self.reason: StopReason | None = None
        """Why nothing that follows is wanted."""
        self.is_overrun = False
        """Whether the endpoint goes on nevertheless."""
        self.time_info: JsonObject | None = None
        """What it tells of its times, in seconds (Cerebras)."""
        self._dialect = dialect
        self._tokenizer = tokenizer
        self._end_of_turn = end_of_turn
        self._num_prompt = num_prompt
        self._limit = limit
        self._num_top = num_top
        self._usage = _Usage()

    @property
    def cached_tokens(self) -> int:
        """How many tokens of the prompt were not computed again; 0 if the endpoint does not say."""
        details = self._usage.prompt_tokens_details or _PromptDetails()
        return min(max(details.cached_tokens or 0, 0), self._num_prompt)

    def feed(self, event: JsonObject) -> list[Sampled]:
        """Take the next event, and return the tokens in it that are wanted.

        Raises:
            EngineError: it is no chunk of a completion, or text without its ids, or has ids that
                the model does not have; or the completion ends for no good reason.
        """
        chunk = _chunk(event)
        self._usage = chunk.usage or self._usage
        if isinstance(chunk.time_info, dict):
            self.time_info = chunk.time_info
        return list(self._read(chunk.choices[0])) if chunk.choices else []

    def check(self) -> None:
        """Make sure that nothing is missing, now that no more comes.

        Raises:
            EngineError: no reason was given to end, or the endpoint has counted other tokens than
                those that it was sent, and has sent.
        """
        if self.reason is None:
            raise EngineError("the endpoint's answer ended without a reason to")
        read, said = self._usage.prompt_tokens, self._usage.completion_tokens
        if read is not None and read != self._num_prompt:
            raise EngineError(f"the endpoint was sent {self._num_prompt} tokens and read {read}")
        if said is not None and said > self.num_sampled and not self.is_overrun:
            raise EngineError(
                f"the endpoint sampled {said} tokens and gave the ids of {self.num_sampled}"
            )

    def _read(self, choice: _Choice) -> Iterator[Sampled]:
        token_ids = self._ids_in(choice)
        logprobs = self._logprobs_in(choice, token_ids)
        for sampled in map(Sampled, token_ids, logprobs):
            if self.reason is not None:
                self.is_overrun = True
                return
            self.num_sampled += 1
            yield sampled
            self.reason = self._reason_after(sampled.token_id)
        if self.reason is None and choice.finish_reason is not None:
            yield from self._finish(choice.finish_reason)

    def _ids_in(self, choice: _Choice) -> Sequence[int]:
        token_ids: Sequence[int] = getattr(choice, self._dialect.ids_member) or ()
        # Characters that were never completed may be all that the last chunk has.
        is_rest = bool(self.num_sampled) and choice.finish_reason is not None
        if choice.text and not token_ids and self.reason is None and not is_rest:
            raise EngineError("the endpoint gives no token ids")
        for token_id in token_ids:
            if not self._is_token(token_id):
                raise EngineError(f"the endpoint sampled {token_id}, which is no token here")
        return token_ids

    def _is_token(self, token_id: int) -> bool:
        return 0 <= token_id < self._tokenizer.vocab_size

    def _reason_after(self, token_id: int) -> StopReason | None:
        if token_id in self._tokenizer.stop_ids:
            return StopReason.END_OF_TURN
        return self._limit if self.num_sampled >= self.max_tokens else None

    def _finish(self, finish_reason: str) -> Iterator[Sampled]:
        if finish_reason not in _STOP_REASONS:
            raise _no_good_end(finish_reason)
        self.reason = _STOP_REASONS[finish_reason]
        if self.reason is StopReason.END_OF_TURN:
            self.num_sampled += 1
            yield Sampled(self._end_of_turn)
        if not self.num_sampled:
            raise EngineError(f"the endpoint sampled nothing, and ended with {finish_reason!r}")

    def _logprobs_in(
        self, choice: _Choice, token_ids: Sequence[int]
    ) -> Sequence[TokenLogprobs | None]:
        """Return the log-probabilities of each of ``token_ids``; None where they are not known."""
        unknown = [None] * len(token_ids)
        told = choice.logprobs or _Logprobs()
        values = told.token_logprobs or ()
        if self._num_top is None or len(values) != len(token_ids):
            return unknown
        tops = told.top_logprobs or ()
        return [
            None if value is None else TokenLogprobs(token_id, value, self._likeliest(top or {}))
            for token_id, value, top in zip(
                token_ids, values, tops if len(tops) == len(values) else unknown, strict=True
            )
        ]

    def _likeliest(self, top: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
        """Return the likeliest tokens of ``top``, if they are spelled as ids."""
        spelled = ((_id_spelled(token), value) for token, value in top.items())
        known = [
            (token_id, value)
            for token_id, value in spelled
            if token_id is not None and self._is_token(token_id)
        ]
        known.sort(key=lambda pair: -pair[1])
        return tuple(known[: self._num_top])


def _id_spelled(token: str) -> int | None:
    """Return the id that ``token`` is spelled as, by vLLM; None if it is spelled as text."""
    digits = token.removeprefix(_ID_PREFIX)
    return int(digits) if digits != token and digits.isdecimal() else None
