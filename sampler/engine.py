"""The asyncio sampling loop and the one thread that owns the model.

A run is one coroutine from its first token to its last. It samples until the model ends its turn.
If the turn made tool calls, the run is suspended and the loop awaits their outputs like any other
callee: who runs the tools, the server or a client at the other end of a WebSocket, is the business
of the ``ToolCaller`` it was given. When they come, the suffix they make goes on top of the cache.

All model work runs on one thread, step by step, so runs interleave at steps: a long prefill is cut
into chunks, and delays the others by one chunk at most. Steps of one run never overlap.
"""

import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import ParamSpec, TypeVar, assert_never
from weakref import WeakSet

from torch import Tensor

from protocol.tools import FunctionTool
from sampler.conversation import Conversation
from sampler.detokenizer import Detokenizer
from sampler.grammar import GrammarCompiler, Matcher
from sampler.kv_cache import KVCache
from sampler.model_loading import LoadedModel
from sampler.outputs import Output, SegmentEnded, SegmentStarted, StopReason
from sampler.params import SamplingParams, ToolConstraint
from sampler.run import Origin, Run, RunEvent, Segment
from sampler.sampled_turn import SampledTurn, TurnOutput
from sampler.sampling import sample
from sampler.suspension import Suspension
from sampler.worker_thread import WorkerThread

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


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
    constraint: ToolConstraint


ToolCaller = Callable[[Suspension], Awaitable[Resumption | None]]
"""Has a suspended run's calls made by someone, and returns what to await their outputs by.

It is called before the suspension is told, so that no answer can come too early. None in the place
of outputs means that there will be none.
"""


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
        self._opened: WeakSet[Run] = WeakSet()
        self._caches: dict[Run, KVCache] = {}
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
        """Positions held in all caches."""
        return sum(cache.num_tokens for cache in self._caches.values())

    def close(self) -> None:
        """Stop the threads, after the step in flight. Runs must be over."""
        self._model_thread.close()
        self._text_thread.close()

    async def encode_prompt(self, conversation: Conversation) -> list[int]:
        """Return the ids of a prompt.

        Raises:
            ConversationError: the model's chat template refuses the conversation.
        """
        return await self._text_thread.run(self.model.chat_format.prompt_ids, conversation)

    async def check_function(self, function: FunctionTool) -> None:
        """Make sure that calls of ``function`` can be constrained.

        Raises:
            GrammarError: its parameters schema cannot be compiled.
        """
        await self._text_thread.run(self._grammars.check, function)

    async def check_constraint(self, constraint: ToolConstraint) -> None:
        """Make sure that all functions of ``constraint`` together can be constrained.

        Raises:
            GrammarError: together they are more than a grammar can hold.
        """
        await self._text_thread.run(self._grammars.matcher, constraint)

    def open_run(
        self, run_id: str, prompt_ids: Sequence[int], params: SamplingParams, tools: ToolConstraint
    ) -> Run:
        """Return a queued run; ``sample`` does the rest.

        Raises:
            ContextLengthExceededError: the prompt leaves no room for a single token.
        """
        self._check_length(len(prompt_ids))
        run = Run(run_id, params, tools)
        self._opened.add(run)
        run.tokens.append(prompt_ids, Origin.PROMPT)
        run.segments.append(Segment(len(prompt_ids), 0, requested_at=time.monotonic()))
        return run

    async def encode_suffix(self, run: Run, suspension: Suspension) -> list[int]:
        """Return the ids that what ``suspension`` holds adds to ``run``. Changes nothing.

        Raises:
            ContextLengthExceededError: they do not fit.
            ConversationError: the model's chat template refuses them.
        """
        suffix = await self._text_thread.run(
            self.model.chat_format.suffix_ids,
            suspension.calls,
            suspension.outputs_in_call_order(),
            suspension.messages,
        )
        self._check_length(len(run.tokens) + len(suffix))
        return suffix

    def _check_length(self, num_tokens: int) -> None:
        limit = self.model.runner.max_context
        if num_tokens >= limit:
            raise ContextLengthExceededError(num_tokens, limit)

    async def sample(
        self, run: Run, call_tools: ToolCaller | None = None
    ) -> AsyncGenerator[Output, None]:
        """Sample ``run`` to its end and give its outputs as they come: the sampling loop.

        Without ``call_tools`` the run completes where it would be suspended. Close the generator
        (``contextlib.aclosing``) to cancel the run: the step in flight is waited for, and all that
        the run holds is freed. It is freed on every other way out too.

        Raises:
            EngineError: a model step failed.
        """
        cache = self._caches[run] = self.model.runner.new_cache()
        run.apply(RunEvent.PREFILL)
        try:
            while True:
                yield SegmentStarted(run.segments[-1])
                turn = await self._work(run, self._text_thread, self._begin_turn, run)
                async with aclosing(self._sample_turn(run, cache, turn)) as outputs:
                    async for output in outputs:
                        yield output
                ended = self._end_segment(run, cache, turn, can_suspend=call_tools is not None)
                if ended.suspension is None or call_tools is None:
                    yield ended
                    return
                called = call_tools(ended.suspension)
                yield ended
                resumption = await called
                if resumption is None:
                    return
                self._resume(run, cache, resumption)
        finally:
            del self._caches[run]
            if not run.is_finished:
                run.apply(RunEvent.CANCEL)

    async def _sample_turn(
        self, run: Run, cache: KVCache, turn: SampledTurn
    ) -> AsyncGenerator[TurnOutput, None]:
        """Prefill what the cache lacks, then decode to the end of the turn or of the budget."""
        token_id = await self._prefill(run, cache, turn.matcher)
        run.apply(RunEvent.DECODE)
        while True:
            run.tokens.append([token_id], Origin.SAMPLED)
            run.segments[-1].output_tokens += 1
            self.counters.tokens_sampled += 1
            for output in turn.feed(token_id):
                yield output
            if self._stop_reason(run, turn):
                break
            token_id = await self._step(run, cache, [token_id], turn.matcher)
        if run.tokens.last in self.model.tokenizer.stop_ids and turn.is_in_call:
            run.apply(RunEvent.FAIL)
            raise EngineError("a call was not finished: its schema may admit no arguments")
        for output in turn.flush():
            yield output

    def _begin_turn(self, run: Run) -> SampledTurn:
        return SampledTurn(
            Detokenizer(self.model.tokenizer),
            self._grammars.matcher(run.constraint),
            may_call=run.constraint.allows_calls,
        )

    async def _prefill(self, run: Run, cache: KVCache, matcher: Matcher | None) -> int:
        """Forward what the log has and the cache lacks, and sample the next token.

        That is the prompt in a new run, and the pending token with the suffix in a resumed one.
        """
        missing = run.tokens.since(cache.num_tokens)
        while len(missing) > self._prefill_chunk:
            chunk, missing = missing[: self._prefill_chunk], missing[self._prefill_chunk :]
            await self._work(run, self._model_thread, self._forward, run, cache, chunk)
        return await self._step(run, cache, missing, matcher)

    async def _step(
        self, run: Run, cache: KVCache, token_ids: Sequence[int], matcher: Matcher | None
    ) -> int:
        return await self._work(
            run, self._model_thread, self._forward_and_sample, run, cache, token_ids, matcher
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
            raise EngineError("the engine failed to take a step") from error

    def _forward(self, run: Run, cache: KVCache, token_ids: Sequence[int]) -> Tensor:
        """Model thread: extend the cache and account for it. Returns ``(vocab,)`` logits."""
        segment = run.segments[-1]
        segment.started_at = segment.started_at or time.monotonic()
        start = cache.num_tokens
        logits = self.model.runner.extend(token_ids, cache)
        self.counters.tokens_reforwarded += run.record_forward(start, cache.num_tokens)
        return logits

    def _forward_and_sample(
        self, run: Run, cache: KVCache, token_ids: Sequence[int], matcher: Matcher | None
    ) -> int:
        """Model thread: extend the cache and sample the token that follows."""
        logits = self._forward(run, cache, token_ids)
        assert cache.num_tokens == len(run.tokens), "every logged token is in the cache now"
        mask = matcher.mask() if matcher else None
        token_id = sample(logits, run.params, cache.num_tokens, mask)
        if matcher:
            matcher.accept(token_id)
        segment = run.segments[-1]
        segment.first_token_at = segment.first_token_at or time.monotonic()
        return token_id

    def _stop_reason(self, run: Run, turn: SampledTurn) -> StopReason | None:
        """Return why sampling stops after the log's last token, or None where it goes on."""
        if run.tokens.last in self.model.tokenizer.stop_ids:
            return StopReason.TOOL_CALLS if turn.calls else StopReason.END_OF_TURN
        limit = run.params.max_output_tokens
        if limit is not None and run.segments[-1].output_tokens >= limit:
            return StopReason.MAX_OUTPUT_TOKENS
        if len(run.tokens) >= self.model.runner.max_context:
            return StopReason.CONTEXT_LENGTH
        return None

    def _end_segment(
        self, run: Run, cache: KVCache, turn: SampledTurn, *, can_suspend: bool
    ) -> SegmentEnded:
        reason = self._stop_reason(run, turn)
        assert reason is not None, "the turn is over"
        now = time.monotonic()
        run.segments[-1].ended_at = now
        match reason:
            case StopReason.TOOL_CALLS if can_suspend:
                assert cache.num_tokens == len(run.tokens) - 1, "the last token is pending"
                run.suspension = Suspension(tuple(turn.calls), len(run.tokens), now)
                run.apply(RunEvent.SUSPEND)
            case StopReason.TOOL_CALLS | StopReason.END_OF_TURN:
                run.apply(RunEvent.COMPLETE)
            case StopReason.MAX_OUTPUT_TOKENS | StopReason.CONTEXT_LENGTH:
                run.apply(RunEvent.TRUNCATE)
            case _:
                assert_never(reason)
        return SegmentEnded(reason, run.segments[-1], run.suspension)

    def _resume(self, run: Run, cache: KVCache, resumption: Resumption) -> None:
        assert run.suspension is not None, "only a suspended run resumes"
        run.suspended_seconds += resumption.requested_at - run.suspension.since
        run.suspension = None
        run.tokens.append(resumption.suffix_ids, Origin.APPENDED)
        run.constraint = resumption.constraint
        run.segments.append(
            Segment(len(run.tokens), cache.num_tokens, requested_at=resumption.requested_at)
        )
        run.apply(RunEvent.RESUME)
