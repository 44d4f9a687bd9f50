"""Token ids in, token ids out, at an endpoint for completions (``/v1/completions``).

Each segment is one request whose prompt is the run's whole token log, as ids. What is sampled comes
back as ids and goes into the log as it is, so nothing is ever encoded twice: a run that was
suspended is sampled from the very tokens of one that was not. Where it resumes, the endpoint reads
them again, as far as its prefix cache has lost them. What it says of that is told, and nothing is
claimed. (vLLM says it if it was started with ``--enable-prompt-tokens-details``.)

Exactness ends where the endpoint keeps something to itself:

*   Without ids there is no run: text is never encoded in their stead. If the endpoint counts other
    tokens than those that it was sent and has sent, the run fails too.
*   Some endpoints leave the token out that ended the turn. Then the log has the one that ends turns
    in the chat format. That is what the model sampled, but for a model with several stop tokens,
    which may have sampled another one.
*   Seeds are the endpoint's business, and so is whether the same logits come out twice.

Nothing is constrained here. Log-probabilities are given where the endpoint gives them, and left out
where it does not; the likeliest tokens besides the sampled one only where they are spelled as ids
(vLLM), for several tokens may have one text.
"""

import asyncio
import logging
import time
from collections.abc import Collection
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace

from sampler.cancellation import ended
from sampler.capabilities import Capabilities
from sampler.engine_error import EngineError, failure_of
from sampler.engines.completions.answer import CompletionsAnswer, says_something
from sampler.engines.completions.dialect import DIALECTS, CompletionsDialect, request_body
from sampler.engines.endpoint.client import Endpoint, EventStream
from sampler.engines.endpoint.errors import EndpointError
from sampler.language import LoadedLanguage
from sampler.matcher import Matcher
from sampler.run import Run, StopReason
from sampler.sampling import Sampled
from sampler.snapshot import Sources
from sampler.suspension import Suspension
from sampler.token_backend import Session, TokenBackend
from sampler.token_channel import Mailbox, Message, TokenChannel
from sampler.token_engine import TokenEngine

logger = logging.getLogger(__name__)

PATH = "/completions"

WINDOW = 64
"""How many tokens may wait for a slow client before the endpoint has to."""

_REST_SECONDS = 1.0
"""How long what follows the last token is waited for: the counts, and the end of the stream."""


def completions_engine(
    model: str,
    endpoint: Endpoint,
    language: LoadedLanguage,
    *,
    dialect: str = "cerebras",
    max_context: int | None = None,
    max_tokens: int = 8192,
) -> TokenEngine:
    """Return an engine that samples ``model`` at ``endpoint``.

    Args:
        model: its name, there and to clients.
        endpoint: where it is; the engine closes it.
        language: how it is spoken to (``load_language``). It has to be that of the very model.
        dialect: one of ``DIALECTS``.
        max_context: the most tokens of a run; by default what the model's config says.
        max_tokens: of a segment, where the request says nothing. Endpoints count it against their
            rate limits beforehand.

    Raises:
        ValueError: there is no such dialect, or nothing says how long the context is.
    """
    if dialect not in DIALECTS:
        raise ValueError(f"the dialect is one of {', '.join(DIALECTS)}, not {dialect!r}")
    max_context = max_context or language.max_context
    if max_context is None:
        raise ValueError(f"nothing says how many tokens the context of {model!r} holds")
    language = replace(language, name=model)
    backend = CompletionsBackend(endpoint, language, DIALECTS[dialect], max_context, max_tokens)
    return TokenEngine(language, backend)


class CompletionsBackend(TokenBackend):
    """An endpoint that completes token ids."""

    capabilities = Capabilities(
        keeps_kv=False, token_exact=True, drops_pending_token=False, grammar=False
    )

    def __init__(
        self,
        endpoint: Endpoint,
        language: LoadedLanguage,
        dialect: CompletionsDialect,
        max_context: int,
        max_tokens: int,
    ) -> None:
        """Sample at ``endpoint``, which is closed with this.

        Args:
            endpoint: where the model is.
            language: how it is spoken to; its name is the model's name there.
            dialect: what the endpoint takes.
            max_context: the most tokens of a run.
            max_tokens: of a segment, where nothing else is said.
        """
        self.counters = language.tokenizer.counters
        self._endpoint = endpoint
        self._language = language
        self._dialect = dialect
        self._max_context = max_context
        self._max_tokens = max_tokens

    @property
    def max_context(self) -> int:
        return self._max_context

    def new_session(self, run: Run, sources: Sources) -> "_CompletionsSession":
        return _CompletionsSession(run, self)

    async def start(self) -> None:
        await self._endpoint.check_model(self._language.name)

    async def stop(self) -> None:
        await self._endpoint.close()

    def close(self) -> None:
        pass  # connections end with their event loop

    def new_answer(self, run: Run) -> CompletionsAnswer:
        """Return what takes in the answer to the next request for ``run``."""
        room = max(self._max_context - len(run.tokens), 1)
        wanted = run.params.max_output_tokens or self._max_tokens
        return CompletionsAnswer(
            self._dialect,
            self._language.tokenizer,
            self._language.chat_format.end_of_turn,
            num_prompt=len(run.tokens),
            max_tokens=min(wanted, room),
            limit=StopReason.CONTEXT_LENGTH if wanted > room else StopReason.MAX_OUTPUT_TOKENS,
            num_top=run.params.top_logprobs,
        )

    def ask(self, run: Run, answer: CompletionsAnswer) -> AbstractAsyncContextManager[EventStream]:
        """Send the request for what follows the log of ``run``, and give the events that answer it.

        Raises:
            EndpointError: as ``Endpoint.stream``.
        """
        body = request_body(
            run.tokens.ids,
            model=self._language.name,
            params=run.params,
            max_tokens=answer.max_tokens,
            stop_ids=self._language.tokenizer.stop_ids,
            dialect=self._dialect,
            omitted=self._endpoint.settings.omitted,
        )
        return self._endpoint.stream(PATH, body, says_something)


class _CompletionsSession(Session):
    """A run, each segment of which is one request.

    A task reads the answer, as a consumer of the channel reads what comes out of it. It is over
    with the last message, or when ``stop`` has returned.
    """

    def __init__(self, run: Run, backend: CompletionsBackend) -> None:
        self._run = run
        self._backend = backend
        self._reading: asyncio.Task[None]
        self._has_room = asyncio.Event()

    def expect(self) -> None:
        self.channel = TokenChannel(Mailbox(), WINDOW)

    def start(self, matcher: Matcher | None) -> None:
        assert matcher is None, "nothing is constrained here"
        self._reading = asyncio.create_task(self._sample(), name=f"completion {self._run.id}")

    def took(self, num_messages: int) -> None:
        self.channel.num_taken += num_messages
        self._has_room.set()

    async def stop(self, num_tokens: int) -> None:
        self._reading.cancel()
        await ended(self._reading)

    def end_segment(self) -> None:
        pass  # nobody waits for that

    def suspend(self, suspension: Suspension) -> None:
        pass  # the endpoint has forgotten the run already

    def resume(self, suspension: Suspension, seconds: float) -> None:
        pass  # and is sent all of it again

    def snapshot(self) -> None:
        return None

    def let_go(self) -> None:
        pass  # nothing is held

    # --- The task ---------------------------------------------------------------------------------

    async def _sample(self) -> None:
        answer = self._backend.new_answer(self._run)
        last: Message
        try:
            await self._read(answer)
            last = answer.reason
        except EngineError as error:
            last = error.with_traceback(None)
        except Exception as error:  # whatever is wrong ends this run only
            logger.exception("run %s: the endpoint's answer could not be read", self._run.id)
            last = failure_of(error, "the endpoint's answer could not be read")
        finally:
            self._account(answer)
        self.channel.deliver(last)

    async def _read(self, answer: CompletionsAnswer) -> None:
        segment = self._run.segments[-1]
        async with self._backend.ask(self._run, answer) as events:
            segment.started_at = events.sent_at
            segment.endpoint = {"tries": events.tries, "admission": events.queued_seconds}
            async for event in events:
                self._deliver(answer.feed(event))
                if answer.reason is not None:
                    await _read_rest(events, answer)
                    break
                await self._until_there_is_room()
            answer.check()

    def _deliver(self, sampled: Collection[Sampled]) -> None:
        segment = self._run.segments[-1]
        if sampled and segment.first_token_at is None:
            segment.first_token_at = time.monotonic()
        self.channel.num_sent += len(sampled)
        for message in sampled:
            self.channel.deliver(message)

    async def _until_there_is_room(self) -> None:
        while not self.channel.has_credit:
            self._has_room.clear()
            await self._has_room.wait()

    def _account(self, answer: CompletionsAnswer) -> None:
        """Put down what the endpoint has computed, as far as it tells."""
        if not answer.num_sampled:
            return
        run, segment, counters = self._run, self._run.segments[-1], self._backend.counters
        start = segment.cached_tokens = answer.cached_tokens
        stop = segment.input_tokens + answer.num_sampled - 1
        run.num_inherited += max(start - run.num_forwarded, 0)
        counters.tokens_reforwarded += run.record_forward(start, stop)
        counters.tokens_forwarded += stop - start
        if answer.time_info is not None and segment.endpoint is not None:
            segment.endpoint["time_info"] = answer.time_info


async def _read_rest(events: EventStream, answer: CompletionsAnswer) -> None:
    """Read what follows the last token, unless that takes long: nothing of it is needed.

    An endpoint that does not know that it was the last one is left, so that it learns of it.
    """
    with suppress(TimeoutError, EndpointError):
        async with asyncio.timeout(_REST_SECONDS):
            while not answer.is_overrun and (event := await anext(events, None)) is not None:
                answer.feed(event)
