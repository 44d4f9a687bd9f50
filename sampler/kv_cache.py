"""The keys and values of one run.

``GenericCache`` holds them in the model's own cache class. Nearly any causal LM of the transformers
library works: sliding-window and hybrid caches too, because a run only ever appends. What does not
(as of transformers 5.24) is Mamba 1 and Jamba, whose scan forgets its state at each piece of more
than one token, RWKV and RecurrentGemma, which keep their state elsewhere, and MiniMax (not M2 and
M3) and xLSTM, which want caches that are no layers of this one: loading refuses them.

``PagedCache`` holds them in blocks of one large tensor, which caches share where they begin alike.

Both count as blocks of a pool, which bounds their memory. Everything is done on the model thread,
except that a cache that nobody needs any more gives back its blocks, or its swap file, on whatever
thread collects it.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from sampler import main_memory
from sampler.cache_pool import BLOCK_SIZE, BlockPool, BlockTable, blocks_for
from sampler.swap import SwapEntry, SwapStore

# Layers that grow by making new tensors, so that old ones can be shared.
_SHAREABLE = (DynamicLayer, DynamicSlidingWindowLayer)


SCALED_TOGETHER = 32
"""Coordinates of a position's key or value that share a scale where they are integers."""


class _SwappedOut(NamedTuple):
    entry: SwapEntry
    num_tokens: int


class _Place(NamedTuple):
    """Where a tensor was, and what it was like."""

    container: Any
    """A mapping or a list."""
    key: Any
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class KVShape(NamedTuple):
    """What a model keeps of each position."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def slab_size(self, dtype: torch.dtype) -> int:
        """Return how many elements of ``dtype`` keep the keys, or values, of one head in a block.

        In int8, for which ``head_dim`` is whole groups, each group has a scale in float16.
        """
        num_numbers = BLOCK_SIZE * self.head_dim
        if dtype is not torch.int8:
            return num_numbers
        return num_numbers + torch.float16.itemsize * num_numbers // SCALED_TOGETHER

    def block_bytes(self, dtype: torch.dtype) -> int:
        """Return how many bytes a block takes, scales included."""
        return 2 * self.num_layers * self.num_kv_heads * self.slab_size(dtype) * dtype.itemsize


class KVCache(ABC):
    """One run's cache: a table of blocks, and what a subclass keeps in them."""

    def __init__(self, pool: BlockPool) -> None:
        self.table = BlockTable(pool)
        self.is_broken = False
        """True once a forward pass has failed on it half way: some layers may hold more positions
        than others. Only ``drop`` mends it."""
        self.has_advanced = False
        """Whether it holds what was forwarded on it, and not only what it has from other caches."""
        self._swapped_out: _SwappedOut | None = None

    @property
    def num_tokens(self) -> int:
        """Positions held, resident or swapped out; also the position of the next input."""
        return self._swapped_out.num_tokens if self._swapped_out else self.table.num_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks held in the pool, those that are shared included; 0 while swapped out."""
        return len(self.table.blocks)

    @property
    def num_own_blocks(self) -> int:
        """Blocks that would be free if it were dropped: those that are not shared."""
        return self.num_blocks - self.table.pool.num_shared(self.table.blocks)

    @property
    def num_blocks_alone(self) -> int:
        """Blocks that it would hold if it shared none; as many as it does where it is swapped
        out."""
        return self._empty_table().needed(self.num_tokens)

    @property
    def num_own_tokens(self) -> int:
        """Positions in blocks that are not shared, of a cache that is not swapped out."""
        return self.num_tokens_in_last(self.num_own_blocks)

    def num_tokens_in_last(self, num_blocks: int) -> int:
        """Return how many positions are in its last ``num_blocks`` blocks."""
        return max(0, self.num_tokens - (self.num_blocks - num_blocks) * BLOCK_SIZE)

    @property
    def is_swapped(self) -> bool:
        """Whether the contents are in a file, and must come back before they are used."""
        return self._swapped_out is not None

    @property
    @abstractmethod
    def can_truncate(self) -> bool:
        """Whether the newest positions of such a cache can be dropped by themselves.

        A state that has seen more (a window, a recurrence) cannot be cut back.
        """

    def needed(self, num_new: int) -> int:
        """Return how many blocks must be free to append ``num_new`` positions.

        While it is swapped out, those that it needs to come back are included, as if it could
        share none.
        """
        num_to_come_back = self.num_tokens if self.is_swapped else 0
        return self.table.needed(num_to_come_back + num_new)

    def advance(self, num_new: int) -> None:
        """Count ``num_new`` positions, for which there is room, as filled."""
        assert not self.is_swapped
        self.table.advance(num_new)
        self.has_advanced = True

    def can_fork(self, num_tokens: int) -> bool:
        """Tell whether the first ``num_tokens`` positions, at most all, can be had by themselves.

        What is swapped out must come back first.
        """
        return not self.is_broken and (num_tokens == self.num_tokens or self.can_truncate)

    def needed_to_fork(self, num_tokens: int) -> int:
        """Return how many blocks must be free to ``fork``, and to come back before that."""
        return self.num_blocks_alone if self.is_swapped else 0

    def fork(self, num_tokens: int) -> Self | None:
        """Return a cache that holds the first ``num_tokens`` positions, or None where it cannot.

        Raises:
            OutOfBlocksError: a fork of this kind takes blocks of its own. Nothing has changed.
        """
        assert not self.is_swapped
        if not self.can_fork(num_tokens):
            return None
        forked = copy.copy(self)
        forked.table = self._forked_table(num_tokens)
        forked.has_advanced = False
        return forked

    def become(self, other: Self) -> None:
        """Hold what ``other`` holds, which is left empty."""
        self.drop()
        self.__dict__, other.__dict__ = other.__dict__, self.__dict__

    def truncate(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` positions only, of a cache that can and is not swapped."""
        assert self.can_truncate
        assert not self.is_swapped
        assert not self.is_broken
        self.table.truncate(num_tokens)

    def drop(self) -> None:
        """Forget everything and give all blocks back. It is as good as new."""
        if self._swapped_out:
            self._swapped_out.entry.delete()
        self._swapped_out = None
        self.table.drop()
        self.is_broken = self.has_advanced = False

    def swap_out(self, store: SwapStore) -> None:
        """Move the contents to a file of ``store`` and give all blocks back.

        Raises:
            SwapError: it cannot be written. Nothing has changed.
        """
        assert not self.is_swapped
        assert not self.is_broken, "what is broken is to be dropped"
        entry = store.put(map(_bytes_of, self._contents()), self.num_blocks_alone)
        self._swapped_out = _SwappedOut(entry, self.num_tokens)
        self.table.drop()

    def swap_in(self, beginning: "KVCache | None" = None) -> None:
        """Move the contents back to new blocks.

        Args:
            beginning: a cache of the same kind that holds what this one begins with. Its full
                blocks are shared.

        Raises:
            OutOfBlocksError: nothing has changed.
            SwapError: what was written is lost. Nothing has changed; all that is left is ``drop``.
        """
        assert self._swapped_out
        entry, num_tokens = self._swapped_out
        num_shared = beginning.num_tokens // BLOCK_SIZE if beginning else 0
        table = self._empty_table()
        if beginning is not None:
            table = beginning.table.fork(num_shared * BLOCK_SIZE)
        try:
            _fill(table, num_tokens)
            self._restore(entry, table.blocks, num_shared)
        except BaseException:
            table.drop()  # now: the traceback holds it
            raise
        self.table = table
        self._swapped_out = None
        entry.delete()

    def _forked_table(self, num_tokens: int) -> BlockTable:
        return self.table.fork(num_tokens)

    def _filled_table(self, num_tokens: int) -> BlockTable:
        """Return a table of ``num_tokens`` positions that shares nothing."""
        table = self._empty_table()
        _fill(table, num_tokens)
        return table

    def _empty_table(self) -> BlockTable:
        return BlockTable(self.table.pool)

    @abstractmethod
    def _contents(self) -> Iterable[Tensor]:
        """Return what is to be written when it is swapped out."""

    @abstractmethod
    def _restore(self, entry: SwapEntry, blocks: Sequence[int], num_shared: int) -> None:
        """Take back what was written, from ``entry`` to ``blocks``, of which the first
        ``num_shared`` hold it already.

        Raises:
            SwapError: nothing has changed.
        """


class _TableWithState(BlockTable):
    """A table that shares no block, and has some more than its positions take.

    They are for what a cache keeps of a sequence however long it is, like the state of a
    recurrence. It holds them as soon as it holds a position.
    """

    def __init__(self, pool: BlockPool, num_state_blocks: int) -> None:
        super().__init__(pool)
        self._num_state_blocks = num_state_blocks

    def _num_missing(self, num_new: int) -> int:
        num_tokens = self.num_tokens + num_new
        num_wanted = self._num_state_blocks + blocks_for(num_tokens) if num_tokens else 0
        return max(0, num_wanted - len(self.blocks))


class GenericCache(KVCache):
    """A cache of a model's own class. Its blocks are counted, but are nowhere in particular.

    Forks share tensors by reference, yet count in full: it cannot be foreseen for how long.
    """

    def __init__(
        self, config: PreTrainedConfig, pool: BlockPool, num_state_blocks: int = 0
    ) -> None:
        """Make an empty cache for a model with ``config``.

        Args:
            config: says of which kind each layer is.
            pool: what it is accounted for in.
            num_state_blocks: what it takes as soon as it holds anything, beside its positions.
        """
        super().__init__(pool)
        self._config = config
        self._num_state_blocks = num_state_blocks
        self.table = self._empty_table()
        self.layers = DynamicCache(config=config)
        self._vacated: list[_Place] = []

    @property
    def can_truncate(self) -> bool:
        return all(type(layer) is DynamicLayer for layer in self.layers.layers)

    @property
    def num_bytes(self) -> int:
        """What its tensors take in memory."""
        return sum(container[key].nbytes for container, key in self._places())

    def grow(self, num_new: int) -> None:
        """Make room for ``num_new`` more positions.

        Raises:
            OutOfBlocksError: nothing has changed.
        """
        assert not self.is_swapped
        self.table.grow(num_new)

    def needed_to_fork(self, num_tokens: int) -> int:
        return super().needed_to_fork(num_tokens) + self._empty_table().needed(num_tokens)

    def fork(self, num_tokens: int) -> Self | None:
        forked = super().fork(num_tokens)
        if forked is not None:
            num_dropped = self.num_tokens - num_tokens
            forked.layers = copy.copy(self.layers)
            forked.layers.layers = [_forked(layer, num_dropped) for layer in self.layers.layers]
            forked._vacated = []
        return forked

    def truncate(self, num_tokens: int) -> None:
        num_dropped = self.num_tokens - num_tokens
        super().truncate(num_tokens)
        for layer in self.layers.layers:
            assert isinstance(layer, DynamicLayer)
            layer.crop(-num_dropped)

    def drop(self) -> None:
        super().drop()
        self.layers = DynamicCache(config=self._config)
        self._vacated = []

    def swap_out(self, store: SwapStore) -> None:
        super().swap_out(store)
        for container, key in self._places():
            tensor = container[key]
            self._vacated.append(_Place(container, key, tensor.shape, tensor.dtype, tensor.device))
            container[key] = None

    def _forked_table(self, num_tokens: int) -> BlockTable:
        return self._filled_table(num_tokens)

    def _empty_table(self) -> BlockTable:
        return _TableWithState(self.table.pool, self._num_state_blocks)

    def _contents(self) -> Iterable[Tensor]:
        return (container[key] for container, key in self._places())

    def _restore(self, entry: SwapEntry, blocks: Sequence[int], num_shared: int) -> None:
        assert num_shared == 0, "it is nowhere in particular"
        tensors = [torch.empty(place.shape, dtype=place.dtype) for place in self._vacated]
        entry.read_into(map(_bytes_of, tensors))
        for place, tensor in zip(self._vacated, tensors, strict=True):
            place.container[place.key] = tensor.to(place.device)
        self._vacated = []

    def _places(self) -> list[tuple[Any, Any]]:
        """Return, as containers and keys, where all tensors of all layers are."""
        return [place for layer in self.layers.layers for place in _tensor_places(vars(layer))]


class PagedStorage:
    """The memory of a pool's blocks."""

    def __init__(
        self,
        pool: BlockPool,
        shape: KVShape,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.pool = pool
        self.shape = shape
        # (blocks, layers, keys and values, kv heads, slab_size), on ``device``. Not set to zero: so
        # the memory of blocks that were never used is not resident.
        outer = (pool.num_blocks, shape.num_layers, 2, shape.num_kv_heads)
        size = (*outer, shape.slab_size(dtype))
        if torch.device(device).type == "cpu":
            num_bytes = pool.num_blocks * shape.block_bytes(dtype)
            memory = main_memory.empty(num_bytes, np.uint8)
            self.tensor = torch.from_numpy(memory).view(dtype).view(size)
        else:
            self.tensor = torch.empty(size, dtype=dtype, device=device)

    def reserve(self) -> None:
        """Have the system hand over all of it now: else it does so page by page, at the first use
        of each block, and whoever uses it first waits for that."""
        if self.tensor.device.type == "cpu":
            self.tensor.zero_()

    def new_cache(self) -> "PagedCache":
        """Return an empty cache."""
        return PagedCache(self)

    def match(self, salt: Hashable, token_ids: Sequence[int], limit: int) -> "PagedCache":
        """Return a cache with the longest published prefix of ``token_ids``; it may be empty.

        Args:
            salt: the one it was published with.
            token_ids: of a sequence, from its first on.
            limit: the most positions that the cache is to hold; none where it is negative.
        """
        blocks = self.pool.match(salt, token_ids[: blocks_for(limit) * BLOCK_SIZE])
        cache = self.new_cache()
        cache.table = BlockTable(self.pool, blocks, len(blocks) * BLOCK_SIZE)
        cache.truncate(max(0, min(limit, cache.num_tokens)))
        return cache

    def copy_block(self, source: int, copy: int) -> None:
        """Let block ``copy`` hold what ``source`` holds."""
        self.tensor[copy].copy_(self.tensor[source])

    def host_buffers(self, blocks: Sequence[int]) -> Iterator[Tensor]:
        """Return for each block a tensor in main memory to be filled before the next is taken."""
        for block in blocks:
            there = self.tensor[block]
            here = torch.empty_like(there, device="cpu") if there.device.type != "cpu" else there
            yield here
            if here is not there:
                there.copy_(here)


class PagedCache(KVCache):
    """A cache whose contents are in the blocks of a storage."""

    def __init__(self, storage: PagedStorage) -> None:
        super().__init__(storage.pool)
        self.storage = storage

    @property
    def can_truncate(self) -> bool:
        return True

    def extend_to(self, num_new: int) -> None:
        """Make room for ``num_new`` more positions, in blocks that no other cache sees.

        Raises:
            OutOfBlocksError: nothing has changed.
        """
        assert not self.is_swapped
        if copied := self.table.grow(num_new):
            self.storage.copy_block(*copied)

    def publish(self, salt: Hashable, token_ids: Sequence[int]) -> None:
        """Let others find what it holds of ``token_ids``, in full blocks.

        Args:
            salt: only those who know it find it.
            token_ids: those it holds, from the first on; there may be more of them.
        """
        assert not self.is_swapped
        self.table.pool.publish(salt, token_ids[: self.num_tokens], self.table.blocks)

    def _contents(self) -> Iterable[Tensor]:
        filled = self.table.blocks[: blocks_for(self.num_tokens)]
        return (self.storage.tensor[block] for block in filled)

    def _restore(self, entry: SwapEntry, blocks: Sequence[int], num_shared: int) -> None:
        # What is shared is read all the same, for the checksum, and thrown away.
        unused = torch.empty_like(self.storage.tensor[0], device="cpu")
        buffers = chain(repeat(unused, num_shared), self.storage.host_buffers(blocks[num_shared:]))
        entry.read_into(map(_bytes_of, buffers))


def _fill(table: BlockTable, num_tokens: int) -> None:
    """Let ``table``, whose last block is full, hold ``num_tokens`` positions.

    Raises:
        OutOfBlocksError: nothing has changed.
    """
    num_new = num_tokens - table.num_tokens
    table.grow(num_new)
    table.advance(num_new)


def _forked(layer: Any, num_dropped: int) -> Any:
    if type(layer) not in _SHAREABLE:
        return copy.deepcopy(layer)
    forked = copy.copy(layer)
    if num_dropped:
        forked.crop(-num_dropped)
    return forked


def _tensor_places(container: Any) -> Iterator[tuple[Any, Any]]:
    """Return the mapping or list, and the key, of each tensor at any depth below ``container``."""
    for key, value in container.items() if isinstance(container, dict) else enumerate(container):
        if isinstance(value, Tensor):
            yield container, key
        elif isinstance(value, (dict, list)):
            yield from _tensor_places(value)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of ``tensor``, or of a copy where it is not contiguous in main memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
