"""The model thread: continuous batching of whatever wants the model.

One thread owns the model and all caches. It takes steps (``stepper``): in each, every run that is
being sampled has a row, and one prompt has a chunk. Between two steps it obeys commands, which are
functions in a queue.

Who owns what:

*   A job (``job``), with its token ids, its cache and its grammar, is the model thread's from
    ``start`` to its last message. In between nobody is asked: the thread samples, sees by itself
    where a turn ends, and goes on as long as the job's channel has credit.
*   What there is to tell goes to the event loop once a step, for all jobs together. The event loop
    gives credit back by counting up, without a lock or a command, and rings only if the thread
    sleeps.
*   A cache on which nobody works is parked (``parked_caches``), by weak reference. So the memory of
    suspended runs, and of what is kept for followers, can always be had for those that want the
    model; and who lets go of a cache frees it.

The event loop never waits for the thread but where it is told to, in ``stop``.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from weakref import ref

import torch

from sampler.cache_pool import MemoryUse
from sampler.cancellation import ended
from sampler.engine_error import EngineError, failure_of
from sampler.job import Job
from sampler.kv_cache import KVCache
from sampler.parked_caches import ParkedCaches
from sampler.sampling import Sampled
from sampler.snapshot import Snapshot
from sampler.stepper import Stepper
from sampler.suspension_policy import SuspensionPolicy
from sampler.token_channel import Mailbox, TokenChannel, Told

logger = logging.getLogger(__name__)

_LOOK_AGAIN_SECONDS = 0.05
"""How soon to look again where there is work that cannot be done now: what a consumer or the
garbage collector gives back makes no sound."""


@dataclass(frozen=True)
class Pace:
    """For how long the model thread waits for consumers, in seconds."""

    patience: float = 0.1
    """How long a run wants the model while its consumer does not come back for what was sampled."""
    gathering: float = 0.002
    """How long those that go in lockstep with their consumers wait for one another after a step, so
    that they share the next one."""


class Executor:
    """Runs jobs on a thread of its own."""

    def __init__(
        self,
        stepper: Stepper,
        policy: SuspensionPolicy,
        parked: ParkedCaches,
        pace: Pace,
        window: int,
    ) -> None:
        """Run jobs with ``stepper``. The thread starts when there is something to do.

        Args:
            stepper: takes the steps.
            policy: learns how long tools take.
            parked: where the caches of suspended runs go.
            pace: for how long consumers are waited for.
            window: how many tokens a job may be ahead of its consumer.
        """
        self._stepper = stepper
        self._policy = policy
        self._parked = parked
        self._pace = pace
        self._window = window
        self._mailbox: Mailbox | None = None
        self._thread: Thread | None = None
        self._commands: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._is_closed = False
        # The rest is the model thread's, but the event loop looks at the first two.
        self._is_asleep = False
        self._memory = stepper.memory
        self._segments: dict[TokenChannel, None] = {}
        """Channels of the runs that want the model, or will in a moment: no background work."""
        self._lockstep: Sequence[TokenChannel] = ()
        """Those of the last step that go on only when their consumer has come back."""

    # --- In the event loop -----------------------------------------------------------------------

    @property
    def memory(self) -> MemoryUse:
        """What blocks were used for a moment ago."""
        self._ring()  # for the next time: what is freed makes no sound
        return self._memory

    async def measure_memory(self) -> MemoryUse:
        """Return what blocks are used for, after the step in flight."""
        await self._ask(self._note_memory)
        return self._memory

    def new_channel(self) -> TokenChannel:
        """Return a channel to the running event loop."""
        if self._mailbox is None or self._mailbox.loop is not asyncio.get_running_loop():
            self._mailbox = Mailbox()
        return TokenChannel(self._mailbox, self._window)

    def prepare(self) -> None:
        """Have everything ready that a step would wait for: where caches are swapped out to."""
        self._tell(self._parked.prepare)

    def open(self, channel: TokenChannel) -> None:
        """Let no background work begin until ``channel`` is closed, or its consumer is slow."""
        self._tell(partial(self._segments.setdefault, channel))

    def close(self, channel: TokenChannel) -> None:
        """Take it that the segment of ``channel`` wants nothing any more."""
        self._tell(partial(self._segments.pop, channel, None))

    def start(self, job: Job, source: Snapshot | None = None) -> None:
        """Hand ``job`` over. What ``source`` holds of its tokens is taken from there."""
        self._tell(partial(self._start, job, source))

    async def stop(self, job: Job, num_tokens: int | None = None) -> None:
        """Take ``job`` back: no step is taken for it any more.

        A step in flight is waited for, even on cancellation. (Background work that does not take
        part in it is given up at once.)

        Args:
            job: what is not over.
            num_tokens: how many of its tokens are to stay; None for all.
        """
        job.is_stopped = True
        stopped = self._ask(partial(self._stepper.remove, job, num_tokens))
        if not job.is_background or job in self._stepper.in_flight:
            await _outlasting_cancellation(stopped)

    def suspend(self, cache: KVCache, tools: Sequence[str], since: float) -> None:
        """Park ``cache``, whose run waits for ``tools`` since then, in monotonic seconds."""
        park = partial(self._parked.suspend, tools=tools, since=since)
        self._tell(partial(_if_alive, ref(cache), park))

    def keep(self, cache: KVCache) -> None:
        """Park ``cache``, whose run is over, for others."""
        self._tell(partial(_if_alive, ref(cache), self._parked.keep))

    def observe_tools(self, tools: Sequence[str], seconds: float) -> None:
        """Learn that ``tools``, called together, were answered after ``seconds``."""
        self._tell(partial(self._policy.tool_times.observe, tools, seconds))

    def took(self, channel: TokenChannel, num_messages: int) -> None:
        """Give the credits of what was received back."""
        channel.num_taken += num_messages
        # Only where there was no credit left: else the thread did not stop for want of it. The
        # counter is raised before, so a thread that is about to fall asleep sees it.
        had_none = channel.num_sent - channel.num_taken >= channel.window - num_messages
        if self._is_asleep and had_none:
            self._commands.put(_nothing)

    def shut_down(self) -> None:
        """End the thread after the step in flight. Whoever waits for a job is cancelled."""
        if self._is_closed:
            return
        self._is_closed = True
        self._commands.put(_nothing)
        if self._thread is not None:
            self._thread.join()
        self._parked.close()

    def _ring(self) -> None:
        if self._is_asleep:
            self._commands.put(_nothing)

    def _tell(self, command: Callable[[], object]) -> None:
        """Have ``command`` obeyed between two steps."""
        if self._is_closed:
            return
        if self._thread is None:
            self._thread = Thread(target=self._run, name="model", daemon=True)
            self._thread.start()
        self._commands.put(command)

    def _ask(self, command: Callable[[], object]) -> "asyncio.Future[None]":
        """Do so, and return what is done once it has been obeyed."""
        loop = asyncio.get_running_loop()
        obeyed: asyncio.Future[None] = loop.create_future()
        if self._is_closed:
            obeyed.cancel()
        self._tell(partial(_obey_and_say_so, command, loop, obeyed))
        return obeyed

    # --- The model thread ------------------------------------------------------------------------
    #
    # Whoever is told that a run is over may look at once whether its memory is free. So what tells
    # or sleeps here has no job and no cache in its variables.

    def _run(self) -> None:
        with torch.inference_mode():
            self._obey()
            while not self._is_closed:  # seen after the command that comes with it
                self._gather()
                told = self._stepper.step(may_warm_up=not self._is_wanted())
                if told is None:
                    self._note_memory()
                    self._sleep(_LOOK_AGAIN_SECONDS if self._stepper.has_work else None)
                elif told:
                    self._lockstep = _in_lockstep(told)
                    _tell_all(told)
                self._obey()
        for channel in self._stepper.remove_all():
            _call_soon(channel.mailbox.loop, channel.cancel)

    def _obey(self) -> None:
        while not self._commands.empty():
            _obey(self._commands.get())

    def _sleep(self, seconds: float | None) -> None:
        """Obey the next command, if one comes within ``seconds``."""
        self._is_asleep = True
        try:
            # Who gave credit before this thread was seen to be asleep has not rung.
            if seconds is not None or not self._stepper.has_work:
                _obey(self._commands.get(timeout=seconds))
        except Empty:
            pass
        finally:
            self._is_asleep = False

    def _gather(self) -> None:
        """Give those that go in lockstep the time to come back for the next step."""
        if not self._lockstep:
            return
        deadline = time.monotonic() + self._pace.gathering
        while not all(channel.has_credit or channel.is_over for channel in self._lockstep):
            seconds = deadline - time.monotonic()
            if seconds <= 0 or not self._stepper.has_foreground:
                break
            self._sleep(seconds)

    def _is_wanted(self) -> bool:
        """Tell whether a run wants the model, or will in a moment."""
        if not self._segments:
            return False
        impatient_since = time.monotonic() - self._pace.patience
        return any(
            channel.stalled_since is None
            or (channel.has_credit and not channel.is_over)
            or channel.stalled_since > impatient_since
            for channel in self._segments
        )

    def _start(self, job: Job, source: Snapshot | None) -> None:
        _tell_all(self._stepper.add(job, source))

    def _note_memory(self) -> None:
        self._memory = self._stepper.memory


def _obey(command: Callable[[], object]) -> None:
    try:
        command()
    except Exception:
        logger.exception("the model thread made a mistake")


def _if_alive(reference: "ref[KVCache]", park: Callable[[KVCache], object]) -> None:
    """Park a cache, which is not to live on only because a command to park it is in the queue."""
    if (cache := reference()) is not None:
        park(cache)


def _in_lockstep(told: Told) -> Sequence[TokenChannel]:
    """Return those that cannot go on before what they were told has been taken."""
    return [
        channel for channel, message in told if channel.window == 1 and isinstance(message, Sampled)
    ]


def _tell_all(told: Told) -> None:
    for mailbox in {channel.mailbox for channel, _ in told}:
        mailbox.post([one for one in told if one[0].mailbox is mailbox])


def _obey_and_say_so(
    command: Callable[[], object],
    loop: asyncio.AbstractEventLoop,
    obeyed: "asyncio.Future[None]",
) -> None:
    error: EngineError | None = None
    try:
        command()
    except Exception as raised:
        logger.exception("the model thread failed to do what it was asked for")
        error = failure_of(raised)
    _call_soon(loop, partial(_settle, obeyed, error))


def _settle(obeyed: "asyncio.Future[None]", error: EngineError | None) -> None:
    if obeyed.done():
        return
    if error is None:
        obeyed.set_result(None)
    else:
        obeyed.set_exception(error)


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # the loop is closed, and those who wanted to know are gone
        loop.call_soon_threadsafe(function)


def _nothing() -> None:
    """Wake the thread."""


async def _outlasting_cancellation(done: "asyncio.Future[None]") -> None:
    """Wait until it is ``done``. A cancellation is raised only then."""
    await ended(done)
    if not done.cancelled():
        done.result()
