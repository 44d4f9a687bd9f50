"""What suspended runs may hold of vLLM's cache, so that nobody waits for it for ever.

vLLM keeps the blocks of a session that waits for its next chunk, and its place among the sequences,
and takes them from it for nobody. The same goes for one that has got its chunk and waits for its
turn. These two *hold* their blocks. All others either run, and then vLLM may preempt them, or they
wait and have nothing. So it is enough to bound what is held:

*   At most as many blocks as leave room for a run of the longest context. Then whoever is the first
    to wait gets in as soon as nobody runs, and who runs alone gets to its end.
*   At most half of the sequences, and never all of them.

vLLM does not end a session by itself. Over the bounds, we end those that are least worth it (the
policy of ``suspension_policy``; there is no swap here). Their runs go on in a new request, of all
of their tokens, which holds nothing while it waits.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sampler.suspension_policy import Parked, SuspensionPolicy

_NEVER_SECONDS = 1e9


@dataclass(frozen=True)
class Room:
    """What there is of vLLM's cache, and what of it may be held."""

    block_size: int
    """Positions."""
    num_blocks: int
    """What the cache of one engine has; with data parallelism there are several."""
    max_context: int
    """The most tokens of a run."""
    max_held_blocks: int
    max_held_sequences: int

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold ``num_tokens`` positions, one at least."""
        return max(-(-num_tokens // self.block_size), 1)


def room_of(vllm_config: Any, held_fraction: float) -> Room:
    """Return the room of an engine that has started.

    Engines that share the load (data parallelism) have one bound together, that of one of them: who
    is sent where is vLLM's business.

    Args:
        vllm_config: the engine's, which has measured its memory.
        held_fraction: the most of the cache that may be held.
    """
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    size = cache.block_size
    # vLLM counts the blocks of all engines. One block of each holds nothing.
    num_blocks = cache.num_gpu_blocks // vllm_config.parallel_config.data_parallel_size - 1
    if cache.kv_cache_size_tokens is not None:  # less where layers have caches of several kinds
        num_blocks = min(num_blocks, cache.kv_cache_size_tokens // size)
    max_context = min(vllm_config.model_config.max_model_len, num_blocks * size)
    room = num_blocks - -(-max_context // size)
    return Room(
        block_size=size,
        num_blocks=num_blocks,
        max_context=max_context,
        max_held_blocks=min(int(num_blocks * held_fraction), room),
        max_held_sequences=scheduler.max_num_seqs // 2,
    )


def new_policy(prefill_chunk: int) -> SuspensionPolicy:
    """Return a policy for caches that can only be kept or discarded."""
    policy = SuspensionPolicy(prefill_chunk=prefill_chunk)
    policy.costs.observe_swap(1, _NEVER_SECONDS, is_in=False)
    return policy


@dataclass(frozen=True)
class Held:
    """What one session holds."""

    cache: Parked
    can_end: bool
    """Whether it waits for tools, and not for its turn."""


def surplus(
    held: Iterable[Held],
    room: Room,
    policy: SuspensionPolicy,
    now: float,
    num_running_tokens: int,
) -> Iterator[Parked]:
    """Yield what has to end so that the bounds are kept, the least worth first."""
    caches = list(held)
    num_blocks = sum(one.cache.num_blocks for one in caches) - room.max_held_blocks
    num_sequences = len(caches) - room.max_held_sequences
    if num_blocks <= 0 and num_sequences <= 0:
        return
    parked = {one.cache.key: one.cache for one in caches if one.can_end}
    for eviction in policy.eviction_order(parked.values(), now, num_running_tokens):
        if num_blocks <= 0 and num_sequences <= 0:
            return
        num_blocks -= eviction.num_blocks
        num_sequences -= 1
        yield parked[eviction.key]
