"""A resumable request: what a run is to vLLM, from its first chunk to where it is ended.

A task reads what comes out. The request is fed one chunk for each segment, and never before the end
of the turn was seen: vLLM would put the outputs of both together, and lose the end between them.

The last token of a turn was never an input, and vLLM forgets it. So each chunk but the first one
begins with it.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from enum import Enum
from typing import Any

from protocol.transitions import next_state
from sampler.engine_error import EngineError, failure_of
from sampler.engines.vllm.library import Library, Llm
from sampler.run import Run, Segment, StopReason
from sampler.sampling import Sampled, TokenLogprobs
from sampler.token_channel import Message, TokenChannel

logger = logging.getLogger(__name__)

_LEAST_LOGPROB = -9999.0  # in the place of anything less, as in ``sampling``


class RequestState(Enum):
    """Where a request is in its life."""

    SAMPLED = "sampled"
    """It waits with nothing, or runs; vLLM may preempt it."""
    PAUSED = "paused"
    """It waits for a chunk, and keeps what it has."""
    RESUMED = "resumed"
    """It has got one, and waits for its turn with what it has."""
    ENDED = "ended"


class RequestEvent(Enum):
    """What may happen to a request."""

    PAUSE = "pause"
    RESUME = "resume"
    SAMPLE = "sample"
    END = "end"


TRANSITIONS: dict[RequestState, dict[RequestEvent, RequestState]] = {
    RequestState.SAMPLED: {
        RequestEvent.SAMPLE: RequestState.SAMPLED,
        RequestEvent.PAUSE: RequestState.PAUSED,
        RequestEvent.END: RequestState.ENDED,
    },
    RequestState.PAUSED: {
        RequestEvent.RESUME: RequestState.RESUMED,
        RequestEvent.END: RequestState.ENDED,
    },
    RequestState.RESUMED: {
        RequestEvent.SAMPLE: RequestState.SAMPLED,
        RequestEvent.END: RequestState.ENDED,
    },
    RequestState.ENDED: {},
}


@dataclass(frozen=True)
class Chunk:
    """What a segment is asked for with."""

    token_ids: Sequence[int]
    params: Any
    """vLLM's sampling params."""
    salt: str | None
    """Only those who have the same share a prefix cache; None: all who have none."""

    def prompt(self) -> dict[str, Any]:
        """Return what vLLM takes."""
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": list(self.token_ids)}
        return prompt if self.salt is None else {**prompt, "cache_salt": self.salt}


class Turn:
    """A segment while it is sampled."""

    def __init__(
        self,
        run: Run,
        channel: TokenChannel,
        limit: StopReason,
        failure_id: int | None,
        num_cached: int | None,
    ) -> None:
        """Begin.

        Args:
            run: whose log has all that comes before.
            channel: where the tokens go.
            limit: why it ends where the model does not end it.
            failure_id: what is sampled in the place of a token that could not be; None where any
                token may be.
            num_cached: how much of the log the request has read; None if it is a new one.
        """
        self.run = run
        self.channel = channel
        self.limit = limit
        self.num_cached = num_cached
        self.num_sampled = 0
        self._num_before = len(run.tokens)
        self._failure_id = failure_id

    @property
    def segment(self) -> Segment:
        """What is told of it."""
        return self.run.segments[-1]

    @property
    def num_forwarded(self) -> int:
        """Positions that the cache holds: all but the last token."""
        return self._num_before + self.num_sampled - 1

    def take(self, output: Any) -> None:
        """Take what vLLM has sampled.

        Raises:
            EngineError: it could not be sampled.
        """
        (completion,) = output.outputs
        if not completion.token_ids:
            return
        if self.num_cached is None:
            self.num_cached = output.num_cached_tokens or 0
        if self.segment.first_token_at is None:
            self.segment.first_token_at = time.monotonic()
        logprobs = completion.logprobs or [None] * len(completion.token_ids)
        for token_id, values in zip(completion.token_ids, logprobs, strict=True):
            if self._is_failure(token_id):
                raise EngineError(
                    "a token could not be sampled; the log of vLLM's process says why"
                )
            self._deliver(token_id, values)

    def _is_failure(self, token_id: int) -> bool:
        known = self.run.constraint.forced_ids
        if known is None:
            return token_id == self._failure_id
        return known[self.num_sampled : self.num_sampled + 1] != (token_id,)

    def _deliver(self, token_id: int, values: Any) -> None:
        self.num_sampled += 1
        self.channel.num_sent += 1
        self.channel.deliver(Sampled(token_id, self._logprobs(token_id, values)))

    def _logprobs(self, token_id: int, values: Any) -> TokenLogprobs | None:
        """Return what vLLM tells of a token and of the likeliest ones, which it numbers."""
        num_top = self.run.params.top_logprobs
        if values is None or num_top is None:
            return None
        told = {id_: max(value.logprob, _LEAST_LOGPROB) for id_, value in values.items()}
        top = sorted(told.items(), key=lambda pair: -pair[1])[:num_top]
        return TokenLogprobs(token_id, told[token_id], tuple(top))

    def end(self, last: Message) -> None:
        """Say why there is no more."""
        self.channel.deliver(last)


class ResumableRequest:
    """A request of vLLM's that may have any number of turns, one after the other."""

    def __init__(
        self,
        request_id: str,
        llm: Llm,
        library: Library,
        stop_ids: frozenset[int],
        on_end_of_turn: Callable[["ResumableRequest", Turn], object],
        on_end: Callable[["ResumableRequest"], object],
    ) -> None:
        """Prepare it; ``start`` begins it.

        Args:
            request_id: a new one.
            llm: where it goes.
            library: what to speak to it with.
            stop_ids: what ends a turn.
            on_end_of_turn: called with each turn that is over, before its consumer is told.
            on_end: called when the request is, whoever has ended it.
        """
        self.id = request_id
        self.paused_at = 0.0
        """When its last turn ended, in monotonic seconds."""
        self.num_tokens = 0
        """Positions in its cache, at the end of its last turn."""
        self._state = RequestState.SAMPLED
        self._llm = llm
        self._library = library
        self._stop_ids = stop_ids
        self._on_end_of_turn = on_end_of_turn
        self._on_end = on_end
        self._chunks: asyncio.Queue[Chunk] = asyncio.Queue()
        self._turn: Turn | None = None
        self._task: asyncio.Task[None]

    @property
    def state(self) -> RequestState:
        """Where it is in its life."""
        return self._state

    @property
    def num_positions(self) -> int:
        """Positions in its cache now, at most."""
        return self.num_tokens if self._turn is None else self._turn.num_forwarded

    def start(self, chunk: Chunk, turn: Turn) -> "asyncio.Task[None]":
        """Begin, and return the task that reads."""
        self._turn = turn
        self._chunks.put_nowait(chunk)
        self._task = asyncio.create_task(self._read(chunk.params), name=f"vllm {self.id}")
        return self._task

    def resume(self, chunk: Chunk, turn: Turn) -> None:
        """Go on, with a chunk that begins with the pending token."""
        self._apply(RequestEvent.RESUME)
        self._turn = turn
        self._chunks.put_nowait(chunk)

    def end(self) -> None:
        """Have vLLM give it up, whatever it is doing; nobody is told."""
        if self._state is not RequestState.ENDED:
            self._is_over()
            self._task.cancel()

    def _apply(self, event: RequestEvent) -> None:
        self._state = next_state(TRANSITIONS, self._state, event)

    def _is_over(self) -> Turn | None:
        self._apply(RequestEvent.END)
        turn, self._turn = self._turn, None
        if turn is not None:
            self._on_end_of_turn(self, turn)
        self._on_end(self)
        return turn

    # --- The task ---------------------------------------------------------------------------------

    async def _read(self, params: Any) -> None:
        last: EngineError
        try:
            outputs = self._llm.generate(self._inputs(), params, self.id)
            async with aclosing(outputs):
                async for output in outputs:
                    self._take(output)
            last = EngineError("vLLM ended the request")
        except EngineError as error:
            last = error.with_traceback(None)
        except Exception as error:  # whatever is wrong ends this run only, if vLLM is still there
            logger.exception("request %s: vLLM failed", self.id)
            said = (
                "vLLM's engine has died" if self._llm.errored else "vLLM failed to sample the run"
            )
            last = failure_of(error, said)
        if self._state is not RequestState.ENDED and (turn := self._is_over()) is not None:
            turn.end(last)

    async def _inputs(self) -> AsyncGenerator[Any, None]:
        while True:
            chunk = await self._chunks.get()
            yield self._library.streaming_input(chunk.prompt(), chunk.params)

    def _take(self, output: Any) -> None:
        turn = self._turn
        if turn is None:
            raise EngineError("vLLM said something between two turns")
        (completion,) = output.outputs
        self._apply(RequestEvent.SAMPLE)
        turn.take(output)
        if completion.finish_reason is not None:
            reason = self._reason(turn, completion)
            self._pause(turn)
            turn.end(reason)

    def _reason(self, turn: Turn, completion: Any) -> StopReason:
        # Its stop_reason may be that of an earlier turn.
        match completion.finish_reason:
            case "stop" if completion.token_ids and completion.token_ids[-1] in self._stop_ids:
                return StopReason.END_OF_TURN
            case "length" if turn.num_sampled:
                return turn.limit
            case other:
                raise EngineError(f"vLLM ended the turn with {str(other)[:80]!r}")

    def _pause(self, turn: Turn) -> None:
        self.num_tokens = turn.num_forwarded
        self.paused_at = time.monotonic()
        self._turn = None
        self._apply(RequestEvent.PAUSE)
        self._on_end_of_turn(self, turn)
