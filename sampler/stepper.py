"""Steps of the model: who takes part, with which memory, and what comes of it.

A step takes all jobs on that the scheduler has picked, in one go: their caches are brought back,
other ones are evicted to make room, the model is run, and of each row the next token is sampled.

**Memory** is had, in this order, from what is free, from parked caches, and from jobs. Where that
would take the cache of a run that has just ended a turn, those who need it wait until it is known
whether it is suspended or over, for then nothing has to be saved. The cache of a job is swapped
out, or dropped if that is cheaper: the job stays where it is in the queue, and as all its tokens
are missing then, later steps forward them again.

**A step that fails** is taken again row by row, by those whose caches it left whole. So only those
fail that fail by themselves. If it ran out of memory, all parked caches go before that. A mistake
in the planning of a step ends those that wanted to take part in it.

Everything here belongs to the model thread, but for ``in_flight``.
"""

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from sampler.cache_pool import MemoryUse, OutOfBlocksError
from sampler.engine_error import failure_of, forget_frames
from sampler.job import Job
from sampler.kv_cache import KVCache
from sampler.model_runner import ModelRunner
from sampler.parked_caches import ParkedCaches
from sampler.sampling import Logits
from sampler.scheduler import Demand, Limits, SchedulerState, StepPlan, schedule
from sampler.snapshot import Snapshot
from sampler.suspension_policy import Eviction, SuspensionPolicy
from sampler.token_channel import TokenChannel, Told

logger = logging.getLogger(__name__)

WARM_UP_CHUNK = 64
"""Tokens that a cache is filled with in one step: a run that comes meanwhile waits for it."""


class _Row(NamedTuple):
    """What one job does in a step."""

    job: Job
    num_tokens: int
    start: int
    """How much its cache holds before."""


_Outcome = Logits | Exception | None
"""Of a row: its logits, if it wants any, or why it failed."""


class Stepper:
    """Takes steps for jobs."""

    def __init__(
        self,
        runner: ModelRunner,
        limits: Limits,
        policy: SuspensionPolicy,
        parked: ParkedCaches,
        patience_seconds: float,
    ) -> None:
        """Take steps on ``runner``.

        Args:
            runner: the model.
            limits: of one step.
            policy: learns what steps cost.
            parked: the caches that may have to make room.
            patience_seconds: how long a job whose consumer does not come back keeps its memory,
                if others want it.
        """
        self.pool = runner.new_cache().table.pool
        self.in_flight: Sequence[Job] = ()
        """Those that take part in the step that is being taken. Any thread may look."""
        self._runner = runner
        self._limits = limits
        self._costs = policy.costs
        self._parked = parked
        self._patience_seconds = patience_seconds
        self._counters = runner.counters
        self._jobs: dict[Job, None] = {}
        self._queued_since: dict[Job, float] = {}
        """Of those that are back without the cache that they had when they were suspended, and wait
        to be served."""
        self._next_row = 0
        """See ``StepPlan.next_row``."""
        self._num_published = 0
        self._seen_by: dict[Job, int] = {}
        """How much had been published when jobs that hold nothing of their own looked for their
        prefix."""

    @property
    def memory(self) -> MemoryUse:
        """What the blocks are used for."""
        return MemoryUse(
            self.pool.num_blocks,
            self.pool.num_used,
            self.pool.num_cached,
            self._parked.num_swapped_blocks,
        )

    @property
    def has_foreground(self) -> bool:
        """Whether a job that is not in the background can go on."""
        return any(job.is_ready and not job.is_background for job in self._jobs)

    @property
    def has_work(self) -> bool:
        """Whether any job can go on."""
        return any(job.is_ready for job in self._jobs)

    def add(self, job: Job, source: Snapshot | None = None) -> Told:
        """Take steps for ``job`` from now on. What ``source`` holds of it is taken from there."""
        self._parked.take(job.cache)
        self._jobs[job] = None
        if job.is_resumed and not job.cache.num_blocks:
            self._queued_since[job] = time.monotonic()
        if source is not None:
            try:
                # If the job samples, the logits of one token at least are wanted.
                limit = len(job.token_ids) - (not job.is_background)
                self._share(source, job.cache, tuple(job.token_ids[:limit]))
            except Exception as error:  # noqa: BLE001  as in a step
                return self._fail(job, error)
        return []

    def remove(self, job: Job, num_tokens: int | None = None) -> None:
        """Take no more steps for ``job``, and undo what it did beyond its first ``num_tokens``."""
        for by_job in (self._jobs, self._queued_since, self._seen_by):
            by_job.pop(job, None)
        job.channel.is_over = True
        if num_tokens is not None:
            job.undo(num_tokens)
        if job.may_suspend:
            self._parked.hold(job.cache)
        else:
            self._parked.keep(job.cache)

    def remove_all(self) -> list[TokenChannel]:
        """Take no more steps; return the channels of all jobs."""
        channels = [job.channel for job in self._jobs]
        self._jobs.clear()
        return channels

    def step(self, *, may_warm_up: bool) -> Told | None:
        """Take a step and return what there is to tell; None if nobody could take part.

        Args:
            may_warm_up: whether jobs in the background may take part, if nobody else does.
        """
        ready = self._ready(may_warm_up=may_warm_up)
        try:
            return self._step(ready)
        except Exception as error:  # noqa: BLE001  a mistake made here would be made for ever
            failed = [job for job in ready if job in self._jobs]
            return [told for job in failed for told in self._fail(job, error)]
        finally:
            self.in_flight = ()

    def _step(self, ready: Sequence[Job]) -> Told | None:
        told, rows = self._prepare(ready)
        # Whoever stops a job says so and then looks here, so it has to be the other way round.
        self.in_flight = [row.job for row in rows]
        rows = [row for row in rows if not row.job.is_stopped]
        if rows:
            told += self._take(rows)
        return told if rows or told else None

    # --- Who takes part --------------------------------------------------------------------------

    def _ready(self, *, may_warm_up: bool) -> Sequence[Job]:
        """Return the jobs that want to take part in the next step, and may."""
        ready = [job for job in self._jobs if job.is_ready]
        foreground = [job for job in ready if not job.is_background]
        return foreground if foreground or not may_warm_up else ready

    def _prepare(self, ready: Sequence[Job]) -> tuple[Told, list[_Row]]:
        """Return the rows of the next step, their memory at hand, and what there is to tell of
        those that can never take part."""
        for job in ready:
            if job.may_find_prefix:
                self._find_prefix(job)
        if not ready or self._is_plain(ready):
            return [], [_Row(job, 1, job.cache.num_tokens) for job in ready]
        if filled := [job for job in ready if not job.num_missing]:
            return [told for job in filled for told in self._go_on(job, None)], []
        plan = self._plan(ready)
        self._note_served([_job(chunk.key) for chunk in plan.chunks])
        rows = [
            _Row(job, _size(job, chunk.num_tokens), job.cache.num_tokens)
            for chunk in plan.chunks
            if self._is_resident(job := _job(chunk.key))
        ]
        return self._refuse(map(_job, plan.too_large)), rows

    def _note_served(self, jobs: Sequence[Job]) -> None:
        """Learn how long those of ``jobs`` waited that are back without their caches.

        Their caches are not yet read back: that is no waiting.
        """
        now = time.monotonic()
        for job in jobs:
            if (since := self._queued_since.pop(job, None)) is not None:
                self._costs.observe_requeue(now - since)

    def _is_plain(self, jobs: Sequence[Job]) -> bool:
        """Tell whether there is nothing to decide: all of ``jobs`` have a row, and it has room.

        In steady decoding that is so at nearly every step, and planning one would take longer than
        all else that is done for it here.
        """
        # A token takes a new block at most, and a copy of one that is shared; where the cache holds
        # no blocks, being empty or swapped out, more.
        return (
            not self._queued_since
            and len(jobs) <= self._limits.max_rows
            and 2 * len(jobs) <= self.pool.num_free
            and all(job.num_missing == 1 and job.cache.num_blocks for job in jobs)
        )

    def _plan(self, ready: Sequence[Job]) -> StepPlan:
        """Return a plan for which there is room."""
        while True:
            plan = schedule(self._state(ready))
            for eviction in plan.evict:
                self._parked.evict(eviction, self._num_running_tokens())
            for key in plan.preempt:
                self._preempt(_job(key))
            # What was evicted may have shared blocks with others, which are not free then.
            if plan.num_blocks <= self.pool.num_free or not (plan.evict or plan.preempt):
                self._next_row = plan.next_row
                return plan

    def _state(self, ready: Sequence[Job]) -> SchedulerState:
        demands = [_demand(job, job.num_missing) for job in ready]
        idle = [job for job in self._jobs if job not in ready and self._is_idle(job)]
        demands += [_demand(job, 0) for job in idle]
        evictions = partial(
            self._parked.evictions,
            self._num_running_tokens(),
            kept_only=all(job.is_background for job in ready),
        )
        return SchedulerState(
            demands,
            self.pool.num_free,
            self.pool.num_blocks,
            self._limits,
            evictions,
            self._next_row,
        )

    def _is_idle(self, job: Job) -> bool:
        """Tell whether ``job``, which cannot go on, will not in a moment."""
        if job.is_stopped or job.is_background:
            return not job.is_stopped
        stalled_since = job.channel.stalled_since
        is_slow = (
            stalled_since is not None and time.monotonic() - stalled_since >= self._patience_seconds
        )
        return is_slow and not job.channel.has_credit

    def _preempt(self, job: Job) -> None:
        self._counters.preemptions += 1
        self._seen_by.pop(job, None)  # it may find again what it has to give back
        if not self._parked.set_aside(job.cache, self._num_running_tokens()):
            job.lose_cache()

    def _num_running_tokens(self) -> int:
        return sum(job.cache.num_tokens for job in self._jobs if not job.is_stopped)

    def _is_resident(self, job: Job) -> bool:
        """Bring its cache back, if it is swapped out; False if the job has to wait for a step."""
        try:
            return self._parked.swap_in(job.cache, self._beginning_of(job))
        except OutOfBlocksError:
            return False

    def _beginning_of(self, job: Job) -> KVCache | None:
        """Return a cache that has what ``job`` has swapped out, or its beginning, if others do."""
        if not job.cache.is_swapped or job.sharing is None:
            return None
        token_ids = job.token_ids[: job.cache.num_tokens]
        return self._runner.find_prefix(job.sharing.salt, token_ids)

    def _refuse(self, jobs: Iterable[Job]) -> Told:
        error = OutOfBlocksError(f"it needs more than all {self.pool.num_blocks} blocks")
        return [told for job in jobs for told in self._fail(job, error)]

    # --- What is known already -------------------------------------------------------------------

    def _share(self, source: Snapshot, cache: KVCache, token_ids: tuple[int, ...]) -> None:
        """Let ``cache`` hold what ``source`` does of ``token_ids``, if that is more than now."""
        num_shared = source.num_shared(token_ids)
        if num_shared > cache.num_tokens and (forked := self._fork(source.cache, num_shared)):
            cache.become(forked)

    def _find_prefix(self, job: Job) -> None:
        """Let ``job`` start from what others have published, if that is more than it has."""
        assert job.sharing
        if self._seen_by.get(job) == self._num_published:
            return
        self._seen_by[job] = self._num_published
        found = self._runner.find_prefix(job.sharing.salt, job.token_ids)
        if found is not None and found.num_tokens > job.cache.num_tokens:
            job.cache.become(found)

    def _publish(self, job: Job) -> None:
        if job.sharing:
            self._num_published += 1
            token_ids = job.token_ids[: job.cache.num_tokens]
            self._runner.publish(job.sharing.salt, token_ids, job.cache)

    def _fork(self, cache: KVCache, num_tokens: int) -> KVCache | None:
        """Return a fork of ``cache``, if it can be had at the price of what is only kept."""
        evictions: deque[Eviction] | None = None
        while True:
            try:
                return cache.fork(num_tokens) if self._parked.swap_in(cache) else None
            except OutOfBlocksError:
                needed = cache.needed_to_fork(num_tokens)
                if evictions is None:
                    others = self._parked.evictions(0, kept_only=True)
                    evictions = deque(one for one in others if not _is_of(one, cache))
                reclaimable = sum(eviction.num_blocks for eviction in evictions)
                if not evictions or needed > self.pool.num_free + reclaimable:
                    return None
                self._parked.evict(evictions.popleft())

    # --- What comes of it ------------------------------------------------------------------------

    def _take(self, rows: Sequence[_Row]) -> Told:
        began_at = time.monotonic()
        outcomes = self._forward(rows, began_at)
        now = time.monotonic()
        self._counters.steps += 1
        self._costs.observe_forward(sum(row.num_tokens for row in rows), now - began_at)
        told: Told = []
        for row, outcome in zip(rows, outcomes, strict=True):
            told += self._advance(row, outcome, began_at)
        return told

    def _advance(self, row: _Row, outcome: _Outcome, began_at: float) -> Told:
        job = row.job
        if isinstance(outcome, Exception):
            return self._fail(job, outcome)
        try:
            self._account(row, began_at)
            told = self._go_on(job, outcome)
            # Not before: where the model gave no numbers, nobody else is to have them.
            if row.num_tokens > 1 and outcome is not None and not job.is_over:
                self._publish(job)
            return told
        except Exception as error:  # noqa: BLE001  a grammar may fail
            return self._fail(job, error)

    def _go_on(self, job: Job, logits: Logits | None) -> Told:
        messages = job.advance(logits)
        channel = job.channel
        if job.is_over:
            self._publish(job)
            self.remove(job)
        if messages and (job.is_over or not channel.has_credit):
            channel.stalled_since = time.monotonic()
        return [(channel, message) for message in messages]

    def _account(self, row: _Row, began_at: float) -> None:
        job = row.job
        self._counters.tokens_reforwarded += job.forwarded(row.start, began_at)
        self._seen_by.pop(job, None)

    def _forward(self, rows: Sequence[_Row], began_at: float) -> Sequence[_Outcome]:
        """Run the model for ``rows``: together and, if that fails, one by one."""
        outcomes = self._attempt(rows)
        if not isinstance(outcomes, Exception):
            return outcomes
        error = outcomes
        forget_frames(error)
        if _is_out_of_memory(error):
            logger.warning("out of memory: all caches that nobody works on go")
            self._parked.evict_all()
        elif len(rows) == 1:
            return [error]
        return [self._attempt_again(row, error, began_at) for row in rows]

    def _attempt(self, rows: Sequence[_Row]) -> Sequence[_Outcome] | Exception:
        try:
            return self._runner.forward([row.job.piece(row.num_tokens) for row in rows])
        except Exception as error:  # noqa: BLE001  it ends the runs that it hit, at most
            return error

    def _attempt_again(self, row: _Row, error: Exception, began_at: float) -> _Outcome:
        """Take the step again for ``row`` alone, after an ``error``."""
        job = row.job
        if job.cache.is_broken:
            return error
        if job.cache.num_tokens > row.start:
            # It was done, but its logits are lost.
            self._account(row, began_at)
            if not job.cache.can_truncate:
                job.lose_cache()
                return None
            job.cache.truncate(row.start)
        outcomes = self._attempt([row])
        if isinstance(outcomes, Exception):
            forget_frames(outcomes)
            return outcomes
        return outcomes[0]

    def _fail(self, job: Job, error: Exception) -> Told:
        """Be done with ``job``, because of ``error``."""
        forget_frames(error)
        logger.error("a step failed", exc_info=error)
        if job.cache.is_broken:
            job.cache.drop()
        self.remove(job)
        job.channel.stalled_since = time.monotonic()
        if _is_out_of_memory(error):
            return [(job.channel, failure_of(error, f"out of memory: {error}"))]
        return [(job.channel, failure_of(error))]


def _job(key: object) -> Job:
    assert isinstance(key, Job)
    return key


def _demand(job: Job, num_missing: int) -> Demand:
    return Demand(
        job,
        job.order,
        num_missing,
        job.cache.num_blocks,
        job.cache.needed,
        is_background=job.is_background,
    )


def _size(job: Job, num_tokens: int) -> int:
    return min(num_tokens, WARM_UP_CHUNK) if job.is_background else num_tokens


def _is_of(eviction: Eviction, cache: KVCache) -> bool:
    return eviction.key() is cache  # type: ignore[operator]


def _is_out_of_memory(error: Exception) -> bool:
    """Tell whether ``error`` says so. Where the CPU has none, torch raises a plain RuntimeError."""
    kinds = (MemoryError, OutOfBlocksError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "DefaultCPUAllocator" in str(error)
