"""The model in this process, behind the sampling loop.

The model thread (``executor``) owns the model, and the job of each run that is being sampled. The
event loop knows of all caches, and who may start from them, by weak reference.
"""

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from weakref import WeakSet

from sampler.cache_pool import BLOCK_SIZE, MemoryUse
from sampler.capabilities import Capabilities
from sampler.counters import Counters
from sampler.engine_error import EngineError
from sampler.executor import Executor, Pace
from sampler.job import Decoding, Filling, Sharing
from sampler.kv_cache import KVCache
from sampler.matcher import Matcher
from sampler.model_loading import LoadedModel
from sampler.parked_caches import ParkedCaches
from sampler.prompt import Prompt
from sampler.run import Run
from sampler.scheduler import Limits
from sampler.snapshot import Snapshot, Sources
from sampler.stepper import Stepper
from sampler.suspension import Suspension
from sampler.suspension_policy import Mode, SuspensionPolicy
from sampler.token_backend import Session, TokenBackend
from sampler.token_engine import TokenEngine

PATIENCE_SECONDS = 0.1
"""How long a run wants the model while its consumer does not come back for the next output."""

WINDOW = 64
"""How many tokens the model may be ahead of a run's consumer, if its caches can be cut back. Where
the model is as fast as the event loop, the two threads change places each time that it is used up,
which with 8 cost as much as all else that is done for a token."""


class LocalEngine(TokenEngine):
    """Samples runs on the model thread of this process."""

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
        window: int = WINDOW,
        parks: Callable[
            [SuspensionPolicy, Counters, Path | None, int | None], ParkedCaches
        ] = ParkedCaches,
    ) -> None:
        """Sample with ``model``.

        Args:
            model: what to run.
            max_forced_string: see ``GrammarCompiler``.
            prefill_chunk: the most tokens of prompts in one step; None for what suits the runner.
            max_rows: the most runs that sample in one step; where there are more, they take turns.
            suspend_policy: what becomes of the caches of suspended runs.
            swap_directory: where they are swapped out to; by default a temporary one.
            swap_bytes: the most that is swapped out.
            reuse_prefixes: whether prompts that begin alike are computed once.
            gathering_seconds: how long runs whose tokens are sampled one at a time wait for one
                another, so that they share steps.
            window: how many tokens the model may be ahead of a run's consumer; what it has sampled
                when that wants to stop it is undone. (One, where caches cannot be cut back.)
            parks: makes what caches are parked in: for who wants to see what becomes of them.
        """
        prefill_chunk = prefill_chunk or model.runner.prefill_chunk
        policy = SuspensionPolicy(suspend_policy, prefill_chunk)
        parked = parks(policy, model.runner.counters, swap_directory, swap_bytes)
        limits = Limits(prefill_chunk, max_rows, token_budget=prefill_chunk)
        stepper = Stepper(model.runner, limits, policy, parked, PATIENCE_SECONDS)
        pace = Pace(PATIENCE_SECONDS, gathering_seconds)
        window = window if model.runner.runs_ahead else 1
        executor = Executor(stepper, policy, parked, pace, window)
        backend = _LocalBackend(model, executor, reuses_prefixes=reuse_prefixes)
        super().__init__(
            model, backend, max_forced_string=max_forced_string, is_simulated=model.is_simulated
        )
        self._executor = executor

    @property
    def model(self) -> LoadedModel:
        """What it samples with."""
        assert isinstance(self._model, LoadedModel), "it was made with one"
        return self._model

    @model.setter
    def model(self, model: LoadedModel) -> None:
        self._model = model

    def snapshot(self, run: Run) -> Snapshot:
        return _kept(super().snapshot(run))

    def new_snapshot(self, prompt: Prompt | Sequence[int]) -> Snapshot:
        return _kept(super().new_snapshot(prompt))

    async def measure_memory(self) -> MemoryUse:
        """Return what the blocks of the cache pool are used for, after the step in flight."""
        return await self._executor.measure_memory()


class _LocalBackend(TokenBackend):
    """The model thread, and what it needs for each run."""

    capabilities = Capabilities(
        keeps_kv=True, token_exact=True, drops_pending_token=False, grammar=True
    )

    def __init__(self, model: LoadedModel, executor: Executor, *, reuses_prefixes: bool) -> None:
        self.executor = executor
        self.counters = model.runner.counters
        self._runner = model.runner
        self._stop_ids = model.tokenizer.stop_ids
        self._reuses_prefixes = reuses_prefixes
        self._max_context = min(model.runner.max_context, executor.memory.num_blocks * BLOCK_SIZE)
        self._orders = count()
        self._caches: WeakSet[KVCache] = WeakSet()

    @property
    def max_context(self) -> int:
        """What the model was made for, and what there is memory for."""
        return self._max_context

    @property
    def kv_tokens(self) -> int:
        return sum(cache.num_tokens for cache in self._caches)

    @property
    def memory(self) -> MemoryUse:
        return self.executor.memory

    def new_session(self, run: Run, sources: Sources) -> "_LocalSession":
        decoding = Decoding(
            run,
            next(self._orders),
            self._new_cache(),
            self._stop_ids,
            self.max_context,
            self._sharing(sources),
        )
        return _LocalSession(run, decoding, self.executor, next(iter(sources.snapshots), None))

    def new_snapshot(self, token_ids: Sequence[int]) -> Snapshot:
        return Snapshot(tuple(token_ids), self._new_cache())

    async def warm_up(self, snapshot: Snapshot, sources: Sources) -> None:
        filling = Filling(
            next(self._orders), snapshot.token_ids, snapshot.cache, self._sharing(sources)
        )
        filling.channel = self.executor.new_channel()
        self.executor.start(filling, next(iter(sources.snapshots), None))
        try:
            await filling.channel.receive()
        except asyncio.CancelledError:
            await self.executor.stop(filling)
            raise
        except EngineError:
            filling.let_go()  # the traceback may outlive it, and holds it
            raise
        finally:
            del filling  # the traceback of an error that is kept must not keep the cache

    async def start(self) -> None:
        self.executor.prepare()  # the model is loaded

    async def stop(self) -> None:
        pass  # the thread needs no event loop to end

    def close(self) -> None:
        self.executor.shut_down()

    def _sharing(self, sources: Sources) -> Sharing | None:
        shares = sources.reuses_prefixes and self._reuses_prefixes
        return Sharing(sources.salt) if shares else None

    def _new_cache(self) -> KVCache:
        cache = self._runner.new_cache()
        self._caches.add(cache)
        return cache


class _LocalSession(Session):
    """A run's job, and its cache."""

    def __init__(
        self, run: Run, decoding: Decoding, executor: Executor, source: Snapshot | None
    ) -> None:
        self._run = run
        self._decoding = decoding
        self._executor = executor
        self._source = source

    def expect(self) -> None:
        self.channel = self._executor.new_channel()
        self._executor.open(self.channel)

    def start(self, matcher: Matcher | None) -> None:
        self._decoding.begin_segment(self.channel, matcher)
        self._executor.start(self._decoding, self._source)
        self._source = None

    def took(self, num_messages: int) -> None:
        self._executor.took(self.channel, num_messages)

    async def stop(self, num_tokens: int) -> None:
        await self._executor.stop(self._decoding, num_tokens)

    def end_segment(self) -> None:
        # A run that follows this one at once says so before that.
        asyncio.get_running_loop().call_soon(self._executor.close, self.channel)

    def suspend(self, suspension: Suspension) -> None:
        tools = _tools(suspension)
        self._executor.suspend(self._decoding.cache, tools, suspension.since)

    def resume(self, suspension: Suspension, seconds: float) -> None:
        self._executor.observe_tools(_tools(suspension), seconds)

    def snapshot(self) -> Snapshot:
        return Snapshot(self._run.tokens.ids, self._decoding.cache)

    def let_go(self) -> None:
        self._source = None
        self._executor.keep(self._decoding.cache)
        self._decoding.let_go()


def _kept(snapshot: Snapshot | None) -> Snapshot:
    assert snapshot is not None, "all caches are kept here"
    return snapshot


def _tools(suspension: Suspension) -> tuple[str, ...]:
    return tuple(call.qualified_name for call in suspension.calls)
