"""What a suspended run costs: memory that does no useful work, in token-seconds.

While a run waits for a tool, its cache can stay (preserve), move to a file (swap) or go and be
computed again (discard). InferCept brings the three to one unit: positions of cache that serve
nobody, times the seconds for which they do so. (Times the bytes of a position it would be
byte-seconds; that factor is the same everywhere, so it is left out.) With

    C    tokens in the cache of the suspended run that no other cache shares
    b    blocks of the cache, the shared ones included: all are written
    R    tokens in the caches of the runs that are sampling meanwhile
    T    seconds that the tool takes
    Q    seconds that a run without a cache waits, when it is back, before there is room for it
    F    seconds to forward C tokens in chunks: ceil(C / chunk) * fixed + C * per_token
    S    seconds to write b blocks and to read them back

the waste of one suspension is

    preserve   C * T
    swap       S * (C + R) + Q * C
    discard    F * C / 2 + per_token * C * R + Q * C

A preserved cache lies there for the whole call. A swapped one is held while it is copied, and all
others stand still meanwhile, for the model thread does the copying. A discarded one grows from
nothing to C while it is computed again, so half of it is held on average; the others are held up by
its tokens, not by the fixed cost of a step, which they would have paid anyway.

Q is no waste of memory, it is Continuum's correction: who gave up the cache queues for blocks
when the outputs come, and would not have if it had stayed.

A policy may also change its mind: preserve for a while, then evict. That wastes ``C * min(T,
held)`` and, if the tool took longer, the price of the eviction."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto


class Disposition(Enum):
    """What becomes of the cache of a suspended run."""

    PRESERVE = auto()
    SWAP = auto()
    DISCARD = auto()


@dataclass(frozen=True)
class Rates:
    """What this machine and model take for the work that an eviction causes."""

    step_seconds: float
    """The fixed part of a forward pass, which does not depend on its tokens."""
    token_seconds: float
    """What each token adds to a forward pass."""
    swap_out_seconds: float
    """To write one block."""
    swap_in_seconds: float
    """To read one block back."""
    requeue_seconds: float = 0.0
    """How long a run whose cache is gone waits for room when it is back."""
    prefill_chunk: int = 256
    """Tokens of a prefill in one forward pass."""

    def forward_seconds(self, num_tokens: int) -> float:
        """Return how long it takes to compute a cache of ``num_tokens`` from nothing."""
        num_chunks = math.ceil(num_tokens / self.prefill_chunk)
        return num_chunks * self.step_seconds + num_tokens * self.token_seconds

    def swap_seconds(self, num_blocks: int) -> float:
        """Return how long it takes to write ``num_blocks`` and to read them back."""
        return num_blocks * (self.swap_out_seconds + self.swap_in_seconds)


@dataclass(frozen=True)
class Suspended:
    """The facts of one suspension on which its waste depends."""

    num_tokens: int
    """Positions in its cache that no other one shares."""
    num_blocks: int
    """All blocks of it, the shared ones included."""
    num_running_tokens: int = 0
    """Positions in the caches of the runs that sample meanwhile."""


def preserve_waste(suspended: Suspended, seconds: float) -> float:
    """Return the token-seconds of a cache that is held for ``seconds``."""
    return suspended.num_tokens * seconds


def swap_waste(suspended: Suspended, rates: Rates) -> float:
    """Return the token-seconds of moving the cache out and back."""
    held = suspended.num_tokens + suspended.num_running_tokens
    return rates.swap_seconds(suspended.num_blocks) * held + _requeue_waste(suspended, rates)


def discard_waste(suspended: Suspended, rates: Rates) -> float:
    """Return the token-seconds of computing the cache again."""
    own = rates.forward_seconds(suspended.num_tokens) * suspended.num_tokens / 2
    others = suspended.num_tokens * rates.token_seconds * suspended.num_running_tokens
    return own + others + _requeue_waste(suspended, rates)


def cheapest_eviction(suspended: Suspended, rates: Rates) -> tuple[Disposition, float]:
    """Return the way to give up the cache that wastes less, and its token-seconds."""
    swap, discard = swap_waste(suspended, rates), discard_waste(suspended, rates)
    return (Disposition.SWAP, swap) if swap < discard else (Disposition.DISCARD, discard)


def waste(
    suspended: Suspended,
    rates: Rates,
    disposition: Disposition,
    tool_seconds: float,
    held_seconds: float = 0.0,
) -> float:
    """Return what a decision wasted, in token-seconds, now that the tool's time is known.

    The decision: hold the cache for ``held_seconds`` and, should the outputs not be there by then,
    do ``disposition``. ``PRESERVE`` holds it to the end.
    """
    if disposition is Disposition.PRESERVE or tool_seconds <= held_seconds:
        return preserve_waste(suspended, tool_seconds)
    eviction_waste = swap_waste if disposition is Disposition.SWAP else discard_waste
    return preserve_waste(suspended, held_seconds) + eviction_waste(suspended, rates)


def oracle_waste(suspended: Suspended, rates: Rates, tool_seconds: float) -> float:
    """Return the least that any decision could have wasted, had it known the tool's time.

    To hold the cache for a while and then to evict it is never the best in hindsight.
    """
    _, evicted = cheapest_eviction(suspended, rates)
    return min(preserve_waste(suspended, tool_seconds), evicted)


def regret(decisions: Iterable[tuple[float, float]]) -> float:
    """Return by which share a policy wasted more than the oracle, over pairs of (its waste, the
    oracle's): 0.15 is 15 % more."""
    wasted, least = map(math.fsum, zip(*decisions, strict=True))
    return wasted / least - 1.0


def _requeue_waste(suspended: Suspended, rates: Rates) -> float:
    return suspended.num_tokens * rates.requeue_seconds
