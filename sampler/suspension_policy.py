"""What to do with the cache of a suspended run, when somebody else needs the memory.

While there is room, nothing: a cache that lies in memory nobody wants costs nothing, and to
resume from it is free. The policy speaks when a run that wants the model does not find blocks.
Then it puts the parked caches in the order in which they are to go.

1.  Caches that are only KEPT, in case a later request continues them, go first, the least
    recently used before the others, and are discarded: nobody waits for them. Those that share
    all of their blocks go after the rest, for by itself none of them frees any.

2.  Then those of SUSPENDED runs, which will be needed for certain, but not known when. What a
    cache costs is counted in token-seconds (`sampler.waste`). To evict it costs ``e``, the
    cheaper of swap and discard. To keep it for another ``t`` seconds, and to evict it if the tool
    is still not done by then, is expected to cost

        keep(t) = C * E[min(T, t)] + e * P(T > t)

    where ``T`` is how much longer the tool takes. The ``t`` that makes this least is the cache's
    **time to live**, Continuum's idea. It is short for a tool that takes minutes, long enough for
    the usual case of a tool that mostly answers at once, and sinks to zero as a call outlives
    every call before it. The caches go by what their eviction adds to the waste for each block
    that it frees,

        (e - min keep(t)) / blocks

    the smallest first. It is zero for all whose time to live is over; of these the one that is
    expected to lie there longest goes first. What is shared with other caches counts neither as
    freed nor as wasted: it stays, with those who use it, and whoever was discarded finds it there
    again. A cache that shares all of its blocks goes last.

3.  Last those of runs that have ENDED a turn, of which it will be known in a moment whether they
    are suspended, or over and wanted by nobody.

How a cache goes is decided when it does, for it may have shared with those that went before it.

``T`` is learned for each tool from its past calls, given how long this one has taken already
(`sampler.tool_times`). For a tool never seen, or a call longer than any before, the rule above
becomes the one for hiring skis: keep until that has cost what eviction costs, which is never much
worse than twice the best.

What forwarding, writing and reading take is measured as the engine runs (`sampler.costs`).

A forced mode does one thing at once, at every suspension: for comparison, and for who knows
better. Even then a parked cache goes when there is no room left, so that no set of suspended runs
can keep the others from running.

Everything here belongs to the model thread. There is no clock: time comes in as a parameter, in
monotonic seconds.
"""

import math
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from sampler.costs import Costs
from sampler.tool_times import RemainingTime, ToolTimes
from sampler.waste import Disposition, Rates, Suspended, cheapest_eviction, preserve_waste

TIME_LIMIT_SECONDS = 3600.0
"""No tool is expected to take longer than this from now."""


class Mode(StrEnum):
    """How the policy decides: by cost, or always the same."""

    AUTO = "auto"
    PRESERVE = "preserve"
    SWAP = "swap"
    DISCARD = "discard"


class Kind(Enum):
    """Why a cache is parked."""

    SUSPENDED = auto()
    """Its run waits for tools, and will want it."""
    KEPT = auto()
    """Its run is over; a request that continues it may come, or not."""
    ENDED = auto()
    """Its run has ended a turn; which of the two it is will be said in a moment."""


@dataclass(frozen=True)
class Parked:
    """A cache in memory that no run which wants the model is using."""

    key: Hashable
    kind: Kind
    num_tokens: int
    """Positions in it that no other cache shares."""
    num_blocks: int
    """Blocks that it holds, and that are written if it is swapped out."""
    since: float
    """When it was suspended, or last used."""
    tools: tuple[str, ...] = ()
    """Names of the tools its run waits for."""
    num_shared_blocks: int = 0
    """Blocks of it that do not become free when it goes, because others hold them too."""

    @property
    def num_own_blocks(self) -> int:
        """Blocks that become free when it goes."""
        return self.num_blocks - self.num_shared_blocks


@dataclass(frozen=True)
class Eviction:
    """A parked cache that may go."""

    key: Hashable
    num_blocks: int
    """At most so many blocks become free by it, and by those before it that share them."""
    is_premature: bool = False
    """It will be known in a moment whether anybody wants the cache: that is to be waited for."""


class SuspensionPolicy:
    """Decides which parked caches go, and how; learns what that takes."""

    def __init__(self, mode: Mode = Mode.AUTO, prefill_chunk: int = 256) -> None:
        self._mode = mode
        self.costs = Costs(prefill_chunk)
        self.tool_times = ToolTimes()

    def on_suspend(self) -> Disposition:
        """Return what is to be done with a cache when its run is suspended, room or not."""
        match self._mode:
            case Mode.SWAP:
                return Disposition.SWAP
            case Mode.DISCARD:
                return Disposition.DISCARD
            case Mode.AUTO | Mode.PRESERVE:
                return Disposition.PRESERVE

    def way_out(self, facts: Suspended) -> Disposition:
        """Return how a cache that a run will want goes, if it has to."""
        at_suspension = self.on_suspend()
        if at_suspension is not Disposition.PRESERVE:
            return at_suspension
        disposition, _ = cheapest_eviction(facts, self.costs.rates)
        return disposition

    def eviction_order(
        self, parked: Iterable[Parked], now: float, num_running_tokens: int = 0
    ) -> list[Eviction]:
        """Return all parked caches that hold blocks, the first to go first.

        ``num_running_tokens`` are the positions in the caches of the runs that are sampling.
        """
        holders = [cache for cache in parked if cache.num_blocks]
        kept, suspended, ended = (
            [cache for cache in holders if cache.kind is kind]
            for kind in (Kind.KEPT, Kind.SUSPENDED, Kind.ENDED)
        )
        order = [
            *_by_age(kept),
            *self._suspended_order(suspended, now, num_running_tokens),
            *_by_age(ended),
        ]
        return [Eviction(c.key, c.num_blocks, c.kind is Kind.ENDED) for c in order]

    def time_to_live(self, cache: Parked, now: float, num_running_tokens: int = 0) -> float:
        """Return for how many more seconds to keep the cache of a suspended run is expected to
        waste less than to evict it: 0 if its time is over."""
        outlook = _Outlook(cache, self._remaining(cache, now), self.costs.rates, num_running_tokens)
        return outlook.time_to_live

    def _suspended_order(
        self, suspended: list[Parked], now: float, num_running_tokens: int
    ) -> list[Parked]:
        if self._mode is not Mode.AUTO:
            return _by_age(suspended)
        rates = self.costs.rates
        outlooks = [
            _Outlook(cache, self._remaining(cache, now), rates, num_running_tokens)
            for cache in suspended
        ]
        outlooks.sort(key=lambda outlook: outlook.rank)
        return [outlook.cache for outlook in outlooks]

    def _remaining(self, cache: Parked, now: float) -> RemainingTime:
        return self.tool_times.remaining(cache.tools, max(0.0, now - cache.since))


def _by_age(parked: list[Parked]) -> list[Parked]:
    """Return the least recently used before the others, but first all that free something."""
    return sorted(parked, key=lambda cache: (not cache.num_own_blocks, cache.since))


class _Outlook:
    """What is to be expected of one suspended cache; the formulas are at the top."""

    def __init__(
        self, cache: Parked, remaining: RemainingTime, rates: Rates, num_running_tokens: int
    ) -> None:
        self.cache = cache
        self._remaining = remaining
        facts = Suspended(cache.num_tokens, cache.num_blocks, num_running_tokens)
        self._waste_per_second = max(1.0, preserve_waste(facts, 1.0))
        _, self._eviction_waste = cheapest_eviction(facts, rates)
        self._keep_waste, self.time_to_live = min(self._choices())

    @property
    def rank(self) -> tuple[float, float]:
        """What evicting it adds to the waste, for each block that it frees, and then the longest
        wait first."""
        added = self._eviction_waste - self._keep_waste
        num_freed = self.cache.num_own_blocks
        return added / num_freed if num_freed else math.inf, -self._remaining.expected(
            TIME_LIMIT_SECONDS
        )

    def _choices(self) -> Iterator[tuple[float, float]]:
        """Yield the waste and the seconds of each time to live that can be the best.

        The waste rises between two values that the call may have and falls at each: so it is
        least at once, at one of them, or never; or, where only the tail is left, at the time
        from which keeping costs more than it promises.
        """
        yield self._eviction_waste, 0.0
        for seconds, expected, exceeds in self._remaining.at_values():
            yield self._waste(expected, exceeds), seconds
        break_even = self._eviction_waste / self._waste_per_second - self._remaining.tail_scale
        for seconds in (min(max(0.0, break_even), TIME_LIMIT_SECONDS), TIME_LIMIT_SECONDS):
            expected, exceeds = self._remaining.expected(seconds), self._remaining.exceeds(seconds)
            yield self._waste(expected, exceeds), seconds

    def _waste(self, expected_seconds: float, eviction_probability: float) -> float:
        held = self._waste_per_second * expected_seconds
        return held + self._eviction_waste * eviction_probability
