"""The asyncio sampling loop and the one thread that owns the model.

A run is one coroutine from its first token to its last. It samples until the model ends its turn.
If the turn made tool calls, the run is suspended and the loop awaits their outputs like any other
callee: who runs the tools, the server or a client at the other end of a WebSocket, is the business
of the ``ToolCaller`` it was given. When they come, the suffix they make goes on top of the cache.

All model work runs on one thread, step by step, so runs interleave at steps: a long prefill is cut
into chunks, and delays the others by one chunk at most. Steps of one run never overlap.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from traceback import clear_frames
from typing import ParamSpec, TypeVar, assert_never
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor

from protocol.client_events import TextFormat
from protocol.items import InputItem
from protocol.tools import CallableTool
from sampler.conversation import Conversation
from sampler.detokenizer import Detokenizer
from sampler.grammar import GrammarCompiler
from sampler.kv_cache import KVCache
from sampler.matcher import Matcher
from sampler.model_loading import LoadedModel
from sampler.outputs import Output, ReasoningDone, SegmentEnded, SegmentStarted
from sampler.params import Constraint, SamplingParams
from sampler.prompt import Prompt, encode, encode_beginning, fit
from sampler.run import Origin, Run, RunEvent, Segment, StopReason
from sampler.sampled_turn import SampledTurn, TurnOutput
from sampler.sampling import Sampled, sample
from sampler.snapshot import Snapshot
from sampler.suspension import Suspension
from sampler.worker_thread import WorkerThread

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

PATIENCE_SECONDS = 0.1
"""How long a run wants the model while its consumer does not come back for the next output."""


class EngineError(RuntimeError):
    """The engine failed to do its part; the run it hit is over, other runs go on."""


class ContextLengthExceededError(ValueError):
    """More tokens than the model's context holds."""

    def __init__(self, num_tokens: int, limit: int) -> None:
        super().__init__(f"{num_tokens} tokens do not fit the context of {limit}")
        self.num_tokens = num_tokens
        self.limit = limit


@dataclass(frozen=True)
class Resumption:
    """What a suspended run goes on with."""

    suffix_ids: Sequence[int]
    requested_at: float
    """When the append arrived, in monotonic seconds."""
    constraint: Constraint


ToolCaller = Callable[[Suspension], Awaitable[Resumption | None]]
"""Waits until someone has made a suspended run's calls; None where there will be no outputs."""


def _closest(token_ids: tuple[int, ...], snapshots: Iterable[Snapshot]) -> Snapshot | None:
    """Return that of ``snapshots`` which shares most with ``token_ids``, if there are any."""
    return max(snapshots, key=lambda snapshot: snapshot.num_shared(token_ids), default=None)


def _share(start: Snapshot, snapshot: Snapshot) -> None:
    """Model thread: let the cache of ``snapshot`` begin with what ``start`` holds of it."""
    num_shared = start.num_shared(snapshot.token_ids)
    if num_shared > snapshot.cache.num_tokens and (forked := start.cache.fork(num_shared)):
        snapshot.cache.become(forked)


class Engine:
    """Samples runs on one model."""

    def __init__(
        self, model: LoadedModel, *, max_forced_string: int = 64, prefill_chunk: int = 512
    ) -> None:
        """Sample with ``model``.

        Args:
            model: what to run.
            max_forced_string: see ``GrammarCompiler``.
            prefill_chunk: the most tokens one step prefills.
        """
        self.model = model
        self.counters = model.runner.counters
        self._grammars = GrammarCompiler(model.tokenizer, max_forced_string)
        self._prefill_chunk = prefill_chunk
        # A run that comes while one is being filled waits for it.
        self._warm_up_chunk = min(prefill_chunk, 64)
        self._opened: WeakSet[Run] = WeakSet()
        self._caches: WeakSet[KVCache] = WeakSet()
        # Nothing else holds a run's cache for long: what an exception's traceback holds would live
        # on after the run.
        self._cache_of: WeakKeyDictionary[Run, KVCache] = WeakKeyDictionary()
        self._start_of: WeakKeyDictionary[Run, Snapshot] = WeakKeyDictionary()
        self._active: set[Run] = set()  # those that want the model now
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._warm_up_turn = asyncio.Lock()
        self._model_thread = WorkerThread("model")
        # Rendering, encoding and compiling grammars take milliseconds that the event loop must not
        # wait for. One thread, so that their counts are exact.
        self._text_thread = WorkerThread("text")

    @property
    def runs(self) -> Sequence[Run]:
        """The runs that are not over: waiting to be sampled, being sampled, or suspended."""
        return tuple(run for run in self._opened if not run.is_finished)

    @property
    def kv_tokens(self) -> int:
        """Positions held in all caches; what several caches share counts for each."""
        return sum(cache.num_tokens for cache in self._caches)

    def close(self) -> None:
        """Stop the threads, after the step in flight. Runs must be over."""
        self._model_thread.close()
        self._text_thread.close()

    # --- Text -------------------------------------------------------------------------------------

    async def lay_out(self, conversation: Conversation, known: Prompt | None = None) -> Prompt:
        """Return the prompt that ``conversation`` makes, however long it is, going on from
        ``known`` where it can.

        Raises:
            ConversationError: the model's chat template refuses the conversation.
        """
        return await self._text_thread.run(encode, self.model.chat_format, conversation, known)

    async def lay_out_beginning(
        self, conversation: Conversation, known: Prompt | None = None
    ) -> Prompt:
        """Return what the prompt begins with of whatever ``conversation`` becomes.

        Raises:
            ConversationError: the model's chat template refuses the conversation.
        """
        return await self._text_thread.run(
            encode_beginning, self.model.chat_format, conversation, known
        )

    async def encode(self, conversation: Conversation, known: Prompt | None = None) -> Prompt:
        """Return what ``lay_out`` does, if it can be sampled from.

        Raises:
            ContextLengthExceededError: it leaves no room for a single token.
            ConversationError: the model's chat template refuses the conversation.
        """
        prompt = await self.lay_out(conversation, known)
        self.check_length(len(prompt.token_ids))
        return prompt

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
        limit = self.model.runner.max_context - room
        prompt = await self._text_thread.run(
            fit, self.model.chat_format, conversation, limit, known, coda
        )
        self.check_length(len(prompt.token_ids) + room - 1)
        return prompt

    async def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Return how many tokens each of ``texts`` is."""
        return await self._text_thread.run(self._count_tokens, texts)

    def _count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Text thread."""
        return [len(self.model.tokenizer.encode_text(text)) for text in texts]

    async def check_tool(self, tool: CallableTool) -> None:
        """Make sure that calls of ``tool`` can be constrained.

        Raises:
            GrammarError: its schema or grammar cannot be compiled.
        """
        await self._text_thread.run(self._grammars.check, tool)

    async def check_text_format(self, text_format: TextFormat) -> None:
        """Make sure that a final message can be held to ``text_format``.

        Raises:
            GrammarError: its schema cannot be compiled.
        """
        await self._text_thread.run(self._grammars.check_text_format, text_format)

    async def check_constraint(self, constraint: Constraint) -> None:
        """Make sure that everything in ``constraint`` together can be constrained.

        Raises:
            GrammarError: together it is more than a grammar can hold.
        """
        await self._text_thread.run(self._grammars.matcher, constraint)

    # --- Runs -------------------------------------------------------------------------------------

    def open_run(
        self,
        run_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        constraint: Constraint,
        snapshots: Iterable[Snapshot] = (),
    ) -> Run:
        """Return a queued run; ``sample`` does the rest.

        Args:
            run_id: its id.
            prompt_ids: what it starts from.
            params: how it is sampled.
            constraint: what its first segment may be.
            snapshots: of these, the one that shares most with the prompt is started from. It is
                held until the run begins.

        Raises:
            ContextLengthExceededError: the prompt leaves no room for a single token.
        """
        self.check_length(len(prompt_ids))
        run = Run(run_id, params, constraint)
        self._opened.add(run)
        run.tokens.append(prompt_ids, Origin.PROMPT)
        run.segments.append(Segment(len(prompt_ids), 0, requested_at=time.monotonic()))
        if start := _closest(run.tokens.ids, snapshots):
            self._start_of[run] = start
        return run

    def snapshot(self, run: Run) -> Snapshot:
        """Return what others can start from. ``run`` is suspended, or has just ended a segment."""
        return Snapshot(run.tokens.ids, self._cache_of[run])

    async def warm_up(self, snapshot: Snapshot, others: Iterable[Snapshot] = ()) -> None:
        """Fill the cache of ``snapshot``, which is new, while no run wants the model, chunk by
        chunk.

        What one of ``others`` holds of it is taken from there. Others that are being filled take
        turns with it, so a run that comes waits for one chunk. On cancellation what has been filled
        stays, and can be shared; to go on filling it is no mistake.

        Raises:
            EngineError: a model step failed; the snapshot is of no more use.
        """
        cache = snapshot.cache
        if start := _closest(snapshot.token_ids, others):
            await self._model_thread.run(_share, start, snapshot)
        while cache.num_tokens < len(snapshot.token_ids):
            async with self._warm_up_turn:
                while self._active:  # another run may have come since the last one went
                    await self._is_idle.wait()
                # One that was cancelled may have filled on until now.
                if missing := snapshot.token_ids[cache.num_tokens :]:
                    await self._warm_up_step(missing[: self._warm_up_chunk], cache)

    async def _warm_up_step(self, token_ids: Sequence[int], cache: KVCache) -> None:
        try:
            await self._model_thread.run(self.model.runner.extend, token_ids, cache)
        except Exception as error:
            logger.exception("a warm-up failed")
            raise _failed_step(error) from error

    def new_snapshot(self, token_ids: Sequence[int]) -> Snapshot:
        """Return ``token_ids`` with an empty cache, to be warmed up."""
        return Snapshot(tuple(token_ids), self._new_cache())

    def _new_cache(self) -> KVCache:
        cache = self.model.runner.new_cache()
        self._caches.add(cache)
        return cache

    @contextmanager
    def _wanting_the_model(self, run: Run) -> Iterator[None]:
        self._want(run)
        try:
            yield
        finally:
            self._rest(run)

    @contextmanager
    def _giving(self, run: Run) -> Iterator[None]:
        """While ``run`` gives an output: it goes on wanting the model, so that no warm-up comes
        between two of its steps, unless its consumer takes its time."""
        timer = asyncio.get_running_loop().call_later(PATIENCE_SECONDS, self._rest, run)
        try:
            yield
        finally:
            timer.cancel()
            self._want(run)

    def _want(self, run: Run) -> None:
        self._active.add(run)
        self._is_idle.clear()

    def _rest(self, run: Run) -> None:
        self._active.discard(run)
        if not self._active:
            self._is_idle.set()

    def check_length(self, num_tokens: int) -> None:
        """Make sure that a prompt of ``num_tokens`` can be sampled from.

        Raises:
            ContextLengthExceededError: it leaves no room for a single token.
        """
        limit = self.model.runner.max_context
        if num_tokens >= limit:
            raise ContextLengthExceededError(num_tokens, limit)

    async def sample(
        self, run: Run, call_tools: ToolCaller | None = None
    ) -> AsyncGenerator[Output, None]:
        """Sample ``run`` to its end and give its outputs as they come: the sampling loop.

        Without ``call_tools`` the run completes where it would be suspended. Close the generator
        (``contextlib.aclosing``) to cancel the run: the step in flight is waited for, and all that
        the run holds is freed. It is freed on every other way out too, but for what a snapshot
        keeps.

        Raises:
            EngineError: a model step failed.
        """
        run.apply(RunEvent.PREFILL)
        try:
            while True:
                yield SegmentStarted(run.segments[-1])
                with self._wanting_the_model(run):
                    if run not in self._cache_of:
                        await self._begin(run)
                    turn = await self._work(run, self._text_thread, self._begin_turn, run)
                    async with aclosing(self._sample_turn(run, turn)) as outputs:
                        async for output in outputs:
                            with self._giving(run):
                                yield output
                ended = self._end_segment(run, turn, can_suspend=call_tools is not None)
                yield ended
                if ended.suspension is None or call_tools is None:
                    return
                resumption = await call_tools(ended.suspension)
                if resumption is None:
                    return
                self._resume(run, resumption)
        finally:
            self._cache_of.pop(run, None)
            self._start_of.pop(run, None)
            if not run.is_finished:
                run.apply(RunEvent.CANCEL)

    async def _begin(self, run: Run) -> None:
        """Give a new run its cache, with as much of its prompt as is to be had."""
        start = self._start_of.pop(run, None)
        cache = await self._work(run, self._model_thread, self._first_cache, run.tokens.ids, start)
        self._caches.add(cache)
        self._cache_of[run] = cache
        run.segments[-1].cached_tokens = run.num_inherited = cache.num_tokens

    def _first_cache(self, token_ids: tuple[int, ...], start: Snapshot | None) -> KVCache:
        """Model thread: return a cache with as much of ``token_ids`` as ``start`` holds.

        One token at least is left to be forwarded, as its logits are wanted.
        """
        forked = None
        if start is not None:
            forked = start.cache.fork(min(start.num_shared(token_ids), len(token_ids) - 1))
        return forked or self.model.runner.new_cache()

    async def _sample_turn(self, run: Run, turn: SampledTurn) -> AsyncGenerator[TurnOutput, None]:
        """Prefill what the cache lacks, then decode to the end of the turn or of the budget."""
        sampled = await self._prefill(run, turn)
        run.apply(RunEvent.DECODE)
        while True:
            run.tokens.append([sampled.token_id], Origin.SAMPLED)
            run.segments[-1].output_tokens += 1
            self.counters.tokens_sampled += 1
            outputs = list(turn.feed(sampled.token_id, sampled.logprobs))
            for output in outputs:
                yield output
            is_between_items = bool(outputs) and isinstance(outputs[-1], ReasoningDone)
            if reason := self._stop_reason(run, turn, is_between_items=is_between_items):
                break
            sampled = await self._step(run, [sampled.token_id], turn)
        if run.tokens.last in self.model.tokenizer.stop_ids and turn.is_in_call:
            run.apply(RunEvent.FAIL)
            raise EngineError("a call was not finished: its schema may admit no arguments")
        for output in turn.flush():
            yield output
        run.segments[-1].stop_reason = reason
        run.segments[-1].reasoning_tokens = turn.num_reasoning_tokens

    def _begin_turn(self, run: Run) -> SampledTurn:
        constraint = run.constraint
        return SampledTurn(
            Detokenizer(self.model.tokenizer),
            self._grammars.matcher(constraint),
            may_call=constraint.allows_calls,
            thinks=constraint.thinks,
            think_is_open=constraint.think_is_open,
        )

    async def _prefill(self, run: Run, turn: SampledTurn) -> Sampled:
        """Forward what the log has and the cache lacks, and sample the next token.

        That is the prompt in a new run, and the pending token with the suffix in a resumed one.
        """
        missing = run.tokens.since(self._cache_of[run].num_tokens)
        while len(missing) > self._prefill_chunk:
            chunk, missing = missing[: self._prefill_chunk], missing[self._prefill_chunk :]
            await self._work(run, self._model_thread, self._forward, run, chunk)
        return await self._step(run, missing, turn)

    async def _step(self, run: Run, token_ids: Sequence[int], turn: SampledTurn) -> Sampled:
        return await self._work(
            run, self._model_thread, self._forward_and_sample, run, token_ids, turn.matcher
        )

    async def _work(
        self,
        run: Run,
        thread: WorkerThread,
        function: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Do a step of ``run``'s work on ``thread``; if it fails, the run has failed."""
        try:
            return await thread.run(function, *args, **kwargs)
        except Exception as error:  # whatever a step raises ends this run only
            logger.exception("run %s: %s failed", run.id, function.__name__)
            run.apply(RunEvent.FAIL)
            raise _failed_step(error) from error

    def _forward(self, run: Run, token_ids: Sequence[int]) -> Tensor:
        """Model thread: extend the cache and account for it. Returns ``(vocab,)`` logits."""
        segment = run.segments[-1]
        segment.started_at = segment.started_at or time.monotonic()
        cache = self._cache_of[run]
        start = cache.num_tokens
        logits = self.model.runner.extend(token_ids, cache)
        self.counters.tokens_reforwarded += run.record_forward(start, cache.num_tokens)
        return logits

    def _forward_and_sample(
        self, run: Run, token_ids: Sequence[int], matcher: Matcher | None
    ) -> Sampled:
        """Model thread: extend the cache and sample the token that follows."""
        logits = self._forward(run, token_ids)
        position = self._cache_of[run].num_tokens
        assert position == len(run.tokens), "every logged token is in the cache now"
        mask = matcher.mask() if matcher else None
        counts = Counter(run.sampled_in_segment()) if run.params.has_penalties else None
        sampled = sample(logits, run.params, position, mask, counts)
        if matcher:
            matcher.accept(sampled.token_id)
        segment = run.segments[-1]
        segment.first_token_at = segment.first_token_at or time.monotonic()
        return sampled

    def _stop_reason(
        self, run: Run, turn: SampledTurn, *, is_between_items: bool
    ) -> StopReason | None:
        """Return why sampling stops after the log's last token, or None where it goes on."""
        if run.tokens.last in self.model.tokenizer.stop_ids:
            return StopReason.TOOL_CALLS if turn.calls else StopReason.END_OF_TURN
        if run.wanted_stop is StopReason.CANCELLED:
            return StopReason.CANCELLED
        if run.wanted_stop is StopReason.STEERED and is_between_items:
            return StopReason.STEERED
        limit = run.params.max_output_tokens
        if limit is not None and run.segments[-1].output_tokens >= limit:
            return StopReason.MAX_OUTPUT_TOKENS
        if len(run.tokens) >= self.model.runner.max_context:
            return StopReason.CONTEXT_LENGTH
        return None

    def _end_segment(self, run: Run, turn: SampledTurn, *, can_suspend: bool) -> SegmentEnded:
        segment = run.segments[-1]
        segment.ended_at = time.monotonic()
        assert segment.stop_reason is not None, "the turn is over"
        match segment.stop_reason:
            case StopReason.TOOL_CALLS if can_suspend:
                num_cached = self._cache_of[run].num_tokens
                assert num_cached == len(run.tokens) - 1, "the last token is pending"
                run.suspension = Suspension(tuple(turn.calls), len(run.tokens), segment.ended_at)
                run.apply(RunEvent.SUSPEND)
            case StopReason.TOOL_CALLS | StopReason.END_OF_TURN:
                run.apply(RunEvent.COMPLETE)
            case StopReason.MAX_OUTPUT_TOKENS | StopReason.CONTEXT_LENGTH | StopReason.STEERED:
                run.apply(RunEvent.TRUNCATE)
            case StopReason.CANCELLED:
                run.apply(RunEvent.CANCEL)
            case _:
                assert_never(segment.stop_reason)
        return SegmentEnded(segment.stop_reason, segment, run.suspension, self._turn_ids(run))

    def _turn_ids(self, run: Run) -> tuple[int, ...]:
        """Return what was sampled in the segment, ended where it was cut short."""
        sampled = run.sampled_in_segment()
        if sampled[-1] not in self.model.tokenizer.stop_ids:
            sampled.append(self.model.chat_format.end_of_turn)
        return tuple(sampled)

    def _resume(self, run: Run, resumption: Resumption) -> None:
        assert run.suspension is not None, "only a suspended run resumes"
        run.suspended_seconds += resumption.requested_at - run.suspension.since
        run.suspension = None
        if run.wanted_stop is StopReason.STEERED:
            run.wanted_stop = None  # the turn did end, and what the client has to say came now
        run.tokens.append(resumption.suffix_ids, Origin.APPENDED)
        run.constraint = resumption.constraint
        run.segments.append(
            Segment(
                len(run.tokens),
                self._cache_of[run].num_tokens,
                requested_at=resumption.requested_at,
            )
        )
        run.apply(RunEvent.RESUME)


def _failed_step(error: Exception) -> EngineError:
    """Return what a step is said to have failed with.

    However long someone keeps ``error``, it does not keep what the step worked on.
    """
    clear_frames(error.__traceback__)
    return EngineError("the engine failed to take a step")
