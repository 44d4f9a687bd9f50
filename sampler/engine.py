"""The asyncio sampling loop: one coroutine per run, from its first token to its last.

It samples until the model ends its turn. If the turn made tool calls, the run is suspended and the
loop awaits their outputs like any other callee: who runs the tools, the server or a client at the
other end of a WebSocket, is the business of the ``ToolCaller`` it was given. When they come, what
they add to the conversation is added, and the loop goes on.

The loop is the same whatever samples. What differs is how a conversation becomes a prompt, and
where a segment comes from:

*   ``token_engine``: from a back-end that takes tokens and gives tokens. The one in this process
    (``local_engine``) keeps the cache of a suspended run.
*   ``engines.chat``: from an endpoint that takes messages and gives pieces of text.

``capabilities`` says what each can be relied on for.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import assert_never
from weakref import WeakSet

from protocol.client_events import TextFormat
from protocol.items import InputItem
from protocol.tools import CallableTool
from sampler.cache_pool import MemoryUse
from sampler.capabilities import Capabilities
from sampler.conversation import Conversation
from sampler.counters import Counters, TextWork
from sampler.engine_error import EngineError as EngineError
from sampler.outputs import Output, SegmentEnded, SegmentStarted
from sampler.params import Constraint, SamplingParams
from sampler.prompt import Prompt
from sampler.recorded_turn import Call
from sampler.run import Run, RunEvent, Segment, StopReason
from sampler.sampled_turn import TurnOutput
from sampler.snapshot import Snapshot, Sources
from sampler.suspension import Suspension


class ContextLengthExceededError(ValueError):
    """More tokens than the model's context holds."""

    def __init__(self, num_tokens: int, limit: int) -> None:
        super().__init__(f"{num_tokens} tokens do not fit the context of {limit}")
        self.num_tokens = num_tokens
        self.limit = limit


@dataclass(frozen=True)
class Resumption:
    """What a suspended run goes on with."""

    prompt: Prompt
    """The conversation so far, with what was appended to it."""
    requested_at: float
    """When the append arrived, in monotonic seconds."""
    constraint: Constraint
    pre_inference_seconds: float = 0.0
    """How much of the time since then was work on it."""


ToolCaller = Callable[[Suspension], Awaitable[Resumption | None]]
"""Waits until someone has made a suspended run's calls; None where there will be no outputs."""


class SegmentStream(ABC):
    """One segment while it is sampled, as the loop reads it."""

    reason: StopReason | None = None
    """Why there is nothing more to read."""

    @property
    @abstractmethod
    def calls(self) -> Sequence[Call]:
        """The complete calls so far, in the order sampled."""

    @abstractmethod
    async def read(self) -> Sequence[TurnOutput]:
        """Return what has been decided since the last time, as soon as something is. Whoever reads
        again is done with it.

        Raises:
            EngineError: the back-end failed.
        """

    @abstractmethod
    def finish(self) -> Sequence[TurnOutput]:
        """Return what was held back; there is a reason to stop, which is final then.

        Raises:
            EngineError: the turn is not one.
        """


class Engine(ABC):
    """Samples runs on one model."""

    def __init__(
        self,
        name: str,
        capabilities: Capabilities,
        counters: Counters,
        *,
        is_simulated: bool = False,
    ) -> None:
        """Begin without runs.

        Args:
            name: what clients call the model.
            capabilities: what can be relied on.
            counters: where the work is counted.
            is_simulated: whether there is no model, and what it says is made up.
        """
        self.name = name
        self.capabilities = capabilities
        self.counters = counters
        self.is_simulated = is_simulated
        self._opened: WeakSet[Run] = WeakSet()

    @property
    def runs(self) -> Sequence[Run]:
        """The runs that are not over: waiting to be sampled, being sampled, or suspended."""
        return tuple(run for run in self._opened if not run.is_finished)

    @property
    @abstractmethod
    def max_context(self) -> int:
        """The most tokens of a run."""

    @property
    def failure(self) -> str | None:
        """Why no run can be sampled any more; None if they can, as far as is known."""
        return None

    @property
    def kv_tokens(self) -> int:
        """Positions held in caches here; what several caches share counts for each."""
        return 0

    @property
    def memory(self) -> MemoryUse:
        """What the blocks of caches here were used for a moment ago."""
        return MemoryUse(0, 0, 0, 0)

    @abstractmethod
    async def start(self) -> None:
        """Make sure that runs can be sampled, before the first one comes.

        Raises:
            EngineError: they cannot.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Let go of what takes the event loop to let go of. Runs must be over."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything else."""

    # --- Text -------------------------------------------------------------------------------------

    @abstractmethod
    async def lay_out(
        self,
        conversation: Conversation,
        known: Prompt | None = None,
        work: TextWork | None = None,
    ) -> Prompt:
        """Return the prompt that ``conversation`` makes, however long it is, going on from
        ``known`` where it can. What that takes is added to ``work``.

        Raises:
            ConversationError: the model cannot be told the conversation.
        """

    async def lay_out_beginning(
        self,
        conversation: Conversation,
        known: Prompt | None = None,
        work: TextWork | None = None,
    ) -> Prompt:
        """Return what the prompt begins with of whatever ``conversation`` becomes.

        Raises:
            ConversationError: the model cannot be told the conversation.
        """
        return await self.lay_out(conversation, known, work)

    async def encode(
        self,
        conversation: Conversation,
        known: Prompt | None = None,
        work: TextWork | None = None,
    ) -> Prompt:
        """Return what ``lay_out`` does, if it can be sampled from.

        Raises:
            ContextLengthExceededError: it leaves no room for a single token.
            ConversationError: the model cannot be told the conversation.
        """
        prompt = await self.lay_out(conversation, known, work)
        self.check_length(prompt.num_tokens)
        return prompt

    @abstractmethod
    async def encode_truncated(
        self,
        conversation: Conversation,
        known: Prompt | None = None,
        *,
        coda: Sequence[InputItem] = (),
        room: int = 1,
    ) -> Prompt:
        """Return the prompt of ``conversation`` without its oldest turns where it is too long.

        Args:
            conversation: what may lose its oldest turns.
            known: see ``lay_out``.
            coda: follows it, whatever it loses.
            room: how many tokens there has to be room for.

        Raises: as ``encode`` does, if even the last turn is too long.
        """

    @abstractmethod
    async def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Return how many tokens each of ``texts`` is, at least about."""

    @abstractmethod
    def thinks(self, conversation: Conversation) -> bool:
        """Tell whether a turn may begin with thoughts that we tell from the rest by their text."""

    @abstractmethod
    def opens_thinking(self, prompt: Prompt) -> bool:
        """Tell whether ``prompt`` has begun them, so that the turn begins inside them."""

    @abstractmethod
    async def check_tool(self, tool: CallableTool) -> None:
        """Make sure that calls of ``tool`` can be constrained.

        Raises:
            GrammarError: its schema or grammar cannot be compiled.
        """

    @abstractmethod
    async def check_text_format(self, text_format: TextFormat) -> None:
        """Make sure that a final message can be held to ``text_format``.

        Raises:
            GrammarError: its schema cannot be compiled.
        """

    @abstractmethod
    async def check_constraint(self, constraint: Constraint) -> None:
        """Make sure that everything in ``constraint`` together can be constrained.

        Raises:
            GrammarError: together it is more than a grammar can hold.
        """

    # --- Runs -------------------------------------------------------------------------------------

    def open_run(
        self,
        run_id: str,
        prompt: Prompt,
        params: SamplingParams,
        constraint: Constraint,
        sources: Sources = Sources(),  # noqa: B008 - frozen
        *,
        requested_at: float | None = None,
        pre_inference_seconds: float = 0.0,
    ) -> Run:
        """Return a queued run; ``sample`` does the rest.

        Args:
            run_id: its id.
            prompt: what it starts from.
            params: how it is sampled.
            constraint: what its first segment may be.
            sources: what it starts from; held until the run begins.
            requested_at: when it was asked for, in monotonic seconds; by default now.
            pre_inference_seconds: how much of the time since then was work on the request.

        Raises:
            ContextLengthExceededError: the prompt leaves no room for a single token.
        """
        self.check_length(prompt.num_tokens)
        run = Run(run_id, params, constraint)
        self._opened.add(run)
        if requested_at is None:
            requested_at = time.monotonic()
        run.segments.append(Segment(prompt.num_tokens, 0, requested_at, pre_inference_seconds))
        self._begin(run, prompt, sources)
        return run

    def check_length(self, num_tokens: int) -> None:
        """Make sure that a prompt of ``num_tokens`` can be sampled from.

        Raises:
            ContextLengthExceededError: it leaves no room for a single token.
        """
        if num_tokens >= self.max_context:
            raise ContextLengthExceededError(num_tokens, self.max_context)

    def snapshot(self, run: Run) -> Snapshot | None:
        """Return what others can start from, if there is anything but the prompt. ``run`` is
        suspended, or has just ended a segment."""
        return None

    def new_snapshot(self, prompt: Prompt) -> Snapshot | None:
        """Return ``prompt`` with an empty cache, to be warmed up; None where that is of no use."""
        return None

    async def warm_up(
        self,
        snapshot: Snapshot,
        sources: Sources = Sources(),  # noqa: B008 - frozen
    ) -> None:
        """Fill the cache of ``snapshot``, which is new, while no run wants the model.

        It starts from ``sources``, as a run does, and adds to what is found by their salt.

        Raises:
            EngineError: a model step failed; the snapshot is of no more use.
        """
        raise EngineError(f"{self.name} keeps no caches that could be filled")

    async def sample(
        self, run: Run, call_tools: ToolCaller | None = None
    ) -> AsyncGenerator[Output, None]:
        """Sample ``run`` to its end and give its outputs as they come: the sampling loop.

        Without ``call_tools`` the run completes where it would be suspended. Close the generator
        (``contextlib.aclosing``) to cancel the run: the step in flight is waited for, and all that
        the run holds is freed. It is freed on every other way out too, but for what a snapshot
        keeps.

        Raises:
            EngineError: the back-end failed.
        """
        run.apply(RunEvent.PREFILL)
        try:
            while True:
                async with self._segment(run) as stream:
                    # What is said of that is said while the model reads.
                    yield SegmentStarted(run.segments[-1])
                    while stream.reason is None:
                        for output in await stream.read():
                            yield output
                for output in stream.finish():
                    yield output
                ended = self._end_segment(run, stream, can_suspend=call_tools is not None)
                yield ended
                if ended.suspension is None or call_tools is None:
                    return
                resumption = await call_tools(ended.suspension)
                if resumption is None:
                    return
                self._resume(run, resumption)
        except EngineError:
            run.apply(RunEvent.FAIL)
            raise
        finally:
            self._let_go(run)
            if not run.is_finished:
                run.apply(RunEvent.CANCEL)

    def _end_segment(self, run: Run, stream: SegmentStream, *, can_suspend: bool) -> SegmentEnded:
        segment = run.segments[-1]
        segment.ended_at = time.monotonic()
        segment.stop_reason = stream.reason
        assert segment.stop_reason is not None, "the turn is over"
        self._account(run)
        match segment.stop_reason:
            case StopReason.TOOL_CALLS if can_suspend:
                calls = tuple(stream.calls)
                run.suspension = Suspension(calls, len(run.tokens), segment.ended_at)
                run.apply(RunEvent.SUSPEND)
                self._suspended(run, run.suspension)
            case StopReason.TOOL_CALLS | StopReason.END_OF_TURN:
                run.apply(RunEvent.COMPLETE)
            case (
                StopReason.MAX_OUTPUT_TOKENS
                | StopReason.CONTEXT_LENGTH
                | StopReason.CONTENT_FILTER
                | StopReason.STEERED
            ):
                run.apply(RunEvent.TRUNCATE)
            case StopReason.CANCELLED:
                run.apply(RunEvent.CANCEL)
            case _:
                assert_never(segment.stop_reason)
        return SegmentEnded(segment.stop_reason, segment, run.suspension, self._turn_ids(run))

    def _resume(self, run: Run, resumption: Resumption) -> None:
        suspension = run.suspension
        assert suspension is not None, "only a suspended run resumes"
        # What is injected may come before the turn has ended.
        requested_at = max(resumption.requested_at, suspension.since)
        seconds = requested_at - suspension.since
        run.suspended_seconds += seconds
        run.suspension = None
        if run.wanted_stop is StopReason.STEERED:
            run.wanted_stop = None  # the turn did end, and what the client has to say came now
        run.constraint = resumption.constraint
        self._extend(run, resumption.prompt)
        num_tokens = resumption.prompt.num_tokens
        run.segments.append(Segment(num_tokens, 0, requested_at, resumption.pre_inference_seconds))
        run.apply(RunEvent.RESUME)
        self._resumed(run, suspension, seconds)

    # --- What engines differ in -------------------------------------------------------------------

    @abstractmethod
    def _begin(self, run: Run, prompt: Prompt, sources: Sources) -> None:
        """Take note that ``run`` is to begin with ``prompt``."""

    @abstractmethod
    def _segment(self, run: Run) -> AbstractAsyncContextManager[SegmentStream]:
        """Have the model go on with ``run``, or begin with it. Whatever of that goes on when the
        context is left is stopped, and has stopped then."""

    @abstractmethod
    def _account(self, run: Run) -> None:
        """Complete the counts of the segment of ``run`` that has ended."""

    @abstractmethod
    def _turn_ids(self, run: Run) -> tuple[int, ...]:
        """Return the tokens of the turn that ``run`` has ended, whole; none if they are unknown."""

    @abstractmethod
    def _extend(self, run: Run, prompt: Prompt) -> None:
        """Have ``run`` go on with ``prompt``, which its conversation has become."""

    @abstractmethod
    def _suspended(self, run: Run, suspension: Suspension) -> None:
        """Take note that ``run`` wants nothing now."""

    @abstractmethod
    def _resumed(self, run: Run, suspension: Suspension, seconds: float) -> None:
        """Take note that ``run`` goes on, after so many ``seconds`` of ``suspension``."""

    @abstractmethod
    def _let_go(self, run: Run) -> None:
        """Hold nothing of ``run``, which is over."""
