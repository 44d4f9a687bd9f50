"""The asyncio sampling loop: one coroutine per run, from its first token to its last.

It samples until the model ends its turn. If the turn made tool calls, the run is suspended and the
loop awaits their outputs like any other callee: who runs the tools, the server or a client at the
other end of a WebSocket, is the business of the ``ToolCaller`` it was given. When they come, the
suffix they make goes on top of the cache.

Who owns what:

*   The event loop: the runs, their token logs and states, and the text that their tokens become
    (``turn_reader``). Of all caches, and who may start from them, it knows by weak reference.
*   The model thread (``executor``): the model, and the job of each run that is being sampled.
*   The text thread: rendering, encoding and grammars, which take milliseconds.

A segment goes through all three: its grammar is compiled, its job handed over, and its tokens come
back through a channel, a few at once where the model is faster than the event loop.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import ParamSpec, TypeVar, assert_never
from weakref import WeakKeyDictionary, WeakSet

from protocol.client_events import TextFormat
from protocol.items import InputItem
from protocol.tools import CallableTool
from sampler.cache_pool import BLOCK_SIZE
from sampler.chat_template import ChatFormat
from sampler.conversation import Conversation, num_characters
from sampler.counters import TextWork
from sampler.detokenizer import Detokenizer
from sampler.engine_error import EngineError as EngineError
from sampler.engine_error import failure_of
from sampler.executor import Executor, Pace
from sampler.grammar import GrammarCompiler
from sampler.job import Decoding, Filling, Sharing
from sampler.kv_cache import KVCache
from sampler.model_loading import LoadedModel
from sampler.outputs import Output, SegmentEnded, SegmentStarted
from sampler.params import Constraint, SamplingParams
from sampler.parked_caches import ParkedCaches
from sampler.prompt import Prompt, encode, encode_beginning, fit
from sampler.run import Origin, Run, RunEvent, Segment, StopReason
from sampler.sampled_turn import SampledTurn
from sampler.scheduler import Limits
from sampler.snapshot import Snapshot, Sources
from sampler.stepper import MemoryUse, Stepper
from sampler.suspension import Suspension
from sampler.suspension_policy import Mode, SuspensionPolicy
from sampler.token_channel import TokenChannel
from sampler.turn_reader import TurnReader
from sampler.worker_thread import WorkerThread

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_FEW_CHARACTERS = 2000
"""Encoded in about a third of a millisecond."""

PATIENCE_SECONDS = 0.1
"""How long a run wants the model while its consumer does not come back for the next output."""

WINDOW = 8
"""How many tokens the model may be ahead of a run's consumer, if its caches can be cut back."""


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
    pre_inference_seconds: float = 0.0
    """How much of the time since then was work on it."""


ToolCaller = Callable[[Suspension], Awaitable[Resumption | None]]
"""Waits until someone has made a suspended run's calls; None where there will be no outputs."""


@dataclass(frozen=True)
class _Beginning:
    """What a run that was opened can start from."""

    snapshot: Snapshot | None
    sharing: Sharing | None


def _closest(token_ids: tuple[int, ...], snapshots: Iterable[Snapshot]) -> Snapshot | None:
    """Return that of ``snapshots`` which shares most with ``token_ids``, if there are any."""
    return max(snapshots, key=lambda snapshot: snapshot.num_shared(token_ids), default=None)


class Engine:
    """Samples runs on one model."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        max_forced_string: int = 64,
        prefill_chunk: int | None = None,
        max_rows: int = 64,
        suspend_policy: Mode = Mode.AUTO,
        swap_directory: Path | None = None,
        swap_bytes: int | None = None,
        reuse_prefixes: bool = True,
        gathering_seconds: float = 0.002,
    ) -> None:
        """Sample with ``model``.

        Args:
            model: what to run.
            max_forced_string: see ``GrammarCompiler``.
            prefill_chunk: the most tokens of prompts in one step; None for what suits the runner.
            max_rows: the most runs that sample in one step; others wait for the next one.
            suspend_policy: what becomes of the caches of suspended runs.
            swap_directory: where they are swapped out to; by default a temporary one.
            swap_bytes: the most that is swapped out.
            reuse_prefixes: whether prompts that begin alike are computed once.
            gathering_seconds: how long runs whose tokens are sampled one at a time wait for one
                another, so that they share steps.
        """
        self.model = model
        self.counters = model.runner.counters
        prefill_chunk = prefill_chunk or model.runner.prefill_chunk
        policy = SuspensionPolicy(suspend_policy, prefill_chunk)
        parked = ParkedCaches(policy, self.counters, swap_directory, swap_bytes)
        limits = Limits(prefill_chunk, max_rows, token_budget=prefill_chunk)
        stepper = Stepper(model.runner, limits, policy, parked, PATIENCE_SECONDS)
        pace = Pace(PATIENCE_SECONDS, gathering_seconds)
        window = WINDOW if model.runner.runs_ahead else 1
        self._executor = Executor(stepper, policy, parked, pace, window)
        self.max_context = min(model.runner.max_context, self.memory.num_blocks * BLOCK_SIZE)
        """The most tokens of a run: what the model was made for, and what there is memory for."""
        self._reuse_prefixes = reuse_prefixes
        self._grammars = GrammarCompiler(model.tokenizer, max_forced_string)
        self._opened: WeakSet[Run] = WeakSet()
        self._beginnings: WeakKeyDictionary[Run, _Beginning] = WeakKeyDictionary()
        self._orders = count()
        self._caches: WeakSet[KVCache] = WeakSet()
        # Nothing else holds a run's cache for long: what an exception's traceback holds would live
        # on after the run.
        self._decodings: dict[Run, Decoding] = {}
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

    @property
    def memory(self) -> MemoryUse:
        """What the blocks of the cache pool were used for a moment ago."""
        return self._executor.memory

    async def measure_memory(self) -> MemoryUse:
        """Return what they are used for, after the step in flight."""
        return await self._executor.measure_memory()

    def close(self) -> None:
        """Stop the threads, after the step in flight. Runs must be over."""
        self._executor.shut_down()
        self._text_thread.close()

    # --- Text -------------------------------------------------------------------------------------

    async def lay_out(
        self,
        conversation: Conversation,
        known: Prompt | None = None,
        work: TextWork | None = None,
    ) -> Prompt:
        """Return the prompt that ``conversation`` makes, however long it is, going on from
        ``known`` where it can. What that takes is added to ``work``.

        Raises:
            ConversationError: the model's chat template refuses the conversation.
        """
        return await self._lay_out(work, encode, conversation, known)

    async def lay_out_beginning(
        self,
        conversation: Conversation,
        known: Prompt | None = None,
        work: TextWork | None = None,
    ) -> Prompt:
        """Return what the prompt begins with of whatever ``conversation`` becomes.

        Raises:
            ConversationError: the model's chat template refuses the conversation.
        """
        return await self._lay_out(work, encode_beginning, conversation, known)

    async def _lay_out(
        self,
        work: TextWork | None,
        function: Callable[[ChatFormat, Conversation, Prompt | None], Prompt],
        conversation: Conversation,
        known: Prompt | None,
    ) -> Prompt:
        lay_out = partial(
            self._measured,
            work or TextWork(),
            function,
            self.model.chat_format,
            conversation,
            known,
        )
        is_short = known is not None and _num_new_characters(conversation, known) <= _FEW_CHARACTERS
        return await self._on_text(lay_out, is_short=is_short)

    async def _on_text(self, function: Callable[[], T], *, is_short: bool) -> T:
        """Have the text thread call ``function``. What is short, and would be its only work, is
        done here and now: to hand it over takes longer, and the event loop does not miss it."""
        if is_short and self._text_thread.is_idle:
            return function()
        return await self._text_thread.run(function)

    def _measured(
        self, work: TextWork, function: Callable[P, Prompt], *args: P.args, **kwargs: P.kwargs
    ) -> Prompt:
        """Text thread: nobody else encodes meanwhile, so all that was counted was for this."""
        before, began_at = replace(self.counters), time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            encode_seconds = self.counters.encode_seconds - before.encode_seconds
            work.renders += self.counters.template_renders - before.template_renders
            work.encodes += self.counters.encodes - before.encodes
            work.encode_seconds += encode_seconds
            work.render_seconds += time.perf_counter() - began_at - encode_seconds

    async def encode(
        self,
        conversation: Conversation,
        known: Prompt | None = None,
        work: TextWork | None = None,
    ) -> Prompt:
        """Return what ``lay_out`` does, if it can be sampled from.

        Raises:
            ContextLengthExceededError: it leaves no room for a single token.
            ConversationError: the model's chat template refuses the conversation.
        """
        prompt = await self.lay_out(conversation, known, work)
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
        limit = self.max_context - room
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
        if not self._grammars.has_checked(tool):
            await self._text_thread.run(self._grammars.check, tool)

    async def check_text_format(self, text_format: TextFormat) -> None:
        """Make sure that a final message can be held to ``text_format``.

        Raises:
            GrammarError: its schema cannot be compiled.
        """
        if not self._grammars.is_ready(Constraint(text_format=text_format)):
            await self._text_thread.run(self._grammars.check_text_format, text_format)

    async def check_constraint(self, constraint: Constraint) -> None:
        """Make sure that everything in ``constraint`` together can be constrained.

        Raises:
            GrammarError: together it is more than a grammar can hold.
        """
        if not self._grammars.is_ready(constraint):
            await self._text_thread.run(self._grammars.matcher, constraint)

    # --- Runs -------------------------------------------------------------------------------------

    def open_run(
        self,
        run_id: str,
        prompt_ids: Sequence[int],
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
            prompt_ids: what it starts from.
            params: how it is sampled.
            constraint: what its first segment may be.
            sources: what it starts from; held until the run begins.
            requested_at: when it was asked for, in monotonic seconds; by default now.
            pre_inference_seconds: how much of the time since then was work on the request.

        Raises:
            ContextLengthExceededError: the prompt leaves no room for a single token.
        """
        self.check_length(len(prompt_ids))
        run = Run(run_id, params, constraint)
        self._opened.add(run)
        run.tokens.append(prompt_ids, Origin.PROMPT)
        if requested_at is None:
            requested_at = time.monotonic()
        run.segments.append(Segment(len(prompt_ids), 0, requested_at, pre_inference_seconds))
        self._beginnings[run] = _Beginning(
            _closest(run.tokens.ids, sources.snapshots),
            Sharing(sources.salt) if sources.reuses_prefixes and self._reuse_prefixes else None,
        )
        return run

    def check_length(self, num_tokens: int) -> None:
        """Make sure that a prompt of ``num_tokens`` can be sampled from.

        Raises:
            ContextLengthExceededError: it leaves no room for a single token.
        """
        if num_tokens >= self.max_context:
            raise ContextLengthExceededError(num_tokens, self.max_context)

    def snapshot(self, run: Run) -> Snapshot:
        """Return what others can start from. ``run`` is suspended, or has just ended a segment."""
        return Snapshot(run.tokens.ids, self._decodings[run].cache)

    def new_snapshot(self, token_ids: Sequence[int]) -> Snapshot:
        """Return ``token_ids`` with an empty cache, to be warmed up."""
        return Snapshot(tuple(token_ids), self._new_cache())

    async def warm_up(self, snapshot: Snapshot, others: Iterable[Snapshot] = ()) -> None:
        """Fill the cache of ``snapshot``, which is new, while no run wants the model, chunk by
        chunk.

        What one of ``others`` holds of it is taken from there. One cache is filled after the other,
        and a run that comes waits for one chunk. On cancellation what has been filled stays, and
        can be shared; to go on filling it is no mistake.

        Raises:
            EngineError: a model step failed; the snapshot is of no more use.
        """
        filling = Filling(next(self._orders), snapshot.token_ids, snapshot.cache)
        filling.channel = self._executor.new_channel()
        self._executor.start(filling, _closest(snapshot.token_ids, others))
        try:
            await filling.channel.receive()
        except asyncio.CancelledError:
            await self._executor.stop(filling)
            raise
        except EngineError:
            filling.let_go()  # the traceback may outlive it, and holds it
            raise
        finally:
            del filling  # the traceback of an error that is kept must not keep the cache

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
                with self._channel() as channel:
                    turn = await self._begin_turn(run)
                    reader = TurnReader(run, turn, self.model.tokenizer.stop_ids, self.counters)
                    decoding = self._hand_over(run, turn, channel)
                    try:
                        # What is said of that is said while the model reads.
                        yield SegmentStarted(run.segments[-1])
                        # One loop, without a generator of its own for the turn: this is where all
                        # tokens pass.
                        while reader.reason is None:
                            messages = deque(await channel.receive())
                            while messages and reader.reason is None:
                                num_unread = len(messages)
                                for output in reader.read(messages):
                                    yield output
                                self._executor.took(channel, num_unread - len(messages))
                                if run.wanted_stop is not None and reader.heed_wish():
                                    break
                    finally:
                        if not reader.is_over:
                            await self._executor.stop(decoding, len(run.tokens))
                        del decoding
                    for output in reader.finish():
                        yield output
                ended = self._end_segment(run, turn, can_suspend=call_tools is not None)
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

    @contextmanager
    def _channel(self) -> Iterator[TokenChannel]:
        """Give the channel of a segment, and hold warm-ups back meanwhile."""
        channel = self._executor.new_channel()
        self._executor.open(channel)
        try:
            yield channel
        finally:
            # A run that follows this one at once says so before that.
            asyncio.get_running_loop().call_soon(self._executor.close, channel)

    async def _begin_turn(self, run: Run) -> SampledTurn:
        began_at = time.monotonic()
        try:
            is_short = self._grammars.is_ready(run.constraint)
            turn = await self._on_text(partial(self._new_turn, run), is_short=is_short)
            run.segments[-1].pre_inference_seconds += time.monotonic() - began_at
            return turn
        except Exception as error:  # whatever a step raises ends this run only
            logger.exception("run %s: its grammar failed", run.id)
            raise failure_of(error) from error

    def _new_turn(self, run: Run) -> SampledTurn:
        """Text thread."""
        constraint = run.constraint
        return SampledTurn(
            Detokenizer(self.model.tokenizer),
            self._grammars.matcher(constraint),
            may_call=constraint.allows_calls,
            thinks=constraint.thinks,
            think_is_open=constraint.think_is_open,
        )

    def _hand_over(self, run: Run, turn: SampledTurn, channel: TokenChannel) -> Decoding:
        """Have the model go on with ``run``, or begin with it."""
        snapshot = None
        decoding = self._decodings.get(run)
        if decoding is None:
            beginning = self._beginnings.pop(run)
            snapshot = beginning.snapshot
            decoding = self._decodings[run] = self._new_decoding(run, beginning.sharing)
        decoding.begin_segment(channel, turn.matcher)
        run.segments[-1].handed_at = time.monotonic()
        self._executor.start(decoding, snapshot)
        return decoding

    def _new_decoding(self, run: Run, sharing: Sharing | None) -> Decoding:
        return Decoding(
            run,
            next(self._orders),
            self._new_cache(),
            self.model.tokenizer.stop_ids,
            self.max_context,
            sharing,
        )

    def _new_cache(self) -> KVCache:
        cache = self.model.runner.new_cache()
        self._caches.add(cache)
        return cache

    def _let_go(self, run: Run) -> None:
        """Hold nothing of ``run``, which is over."""
        self._beginnings.pop(run, None)
        if decoding := self._decodings.pop(run, None):
            self._executor.keep(decoding.cache)
            decoding.let_go()

    def _end_segment(self, run: Run, turn: SampledTurn, *, can_suspend: bool) -> SegmentEnded:
        segment = run.segments[-1]
        segment.ended_at = time.monotonic()
        segment.tokens_forwarded = run.tokens_forwarded - run.tokens_told
        run.tokens_told = run.tokens_forwarded
        assert segment.stop_reason is not None, "the turn is over"
        match segment.stop_reason:
            case StopReason.TOOL_CALLS if can_suspend:
                self._suspend(run, Suspension(tuple(turn.calls), len(run.tokens), segment.ended_at))
            case StopReason.TOOL_CALLS | StopReason.END_OF_TURN:
                run.apply(RunEvent.COMPLETE)
            case StopReason.MAX_OUTPUT_TOKENS | StopReason.CONTEXT_LENGTH | StopReason.STEERED:
                run.apply(RunEvent.TRUNCATE)
            case StopReason.CANCELLED:
                run.apply(RunEvent.CANCEL)
            case _:
                assert_never(segment.stop_reason)
        return SegmentEnded(segment.stop_reason, segment, run.suspension, self._turn_ids(run))

    def _suspend(self, run: Run, suspension: Suspension) -> None:
        cache = self._decodings[run].cache
        run.suspension = suspension
        run.apply(RunEvent.SUSPEND)
        self._executor.suspend(cache, _tools(suspension), suspension.since)

    def _turn_ids(self, run: Run) -> tuple[int, ...]:
        """Return what was sampled in the segment, ended where it was cut short."""
        sampled = run.sampled_in_segment()
        if sampled[-1] not in self.model.tokenizer.stop_ids:
            sampled.append(self.model.chat_format.end_of_turn)
        return tuple(sampled)

    def _resume(self, run: Run, resumption: Resumption) -> None:
        assert run.suspension is not None, "only a suspended run resumes"
        # What is injected may come before the turn has ended.
        requested_at = max(resumption.requested_at, run.suspension.since)
        seconds = requested_at - run.suspension.since
        self._executor.observe_tools(_tools(run.suspension), seconds)
        run.suspended_seconds += seconds
        run.suspension = None
        if run.wanted_stop is StopReason.STEERED:
            run.wanted_stop = None  # the turn did end, and what the client has to say came now
        run.tokens.append(resumption.suffix_ids, Origin.APPENDED)
        run.constraint = resumption.constraint
        run.segments.append(
            Segment(len(run.tokens), 0, requested_at, resumption.pre_inference_seconds)
        )
        run.apply(RunEvent.RESUME)


def _num_new_characters(conversation: Conversation, known: Prompt) -> int:
    """Return how much ``conversation``, which goes on from ``known``, has to have encoded."""
    new = conversation.items[len(known.conversation.items) :]
    return sum(num_characters(item) for item in new)


def _tools(suspension: Suspension) -> tuple[str, ...]:
    return tuple(call.qualified_name for call in suspension.calls)
