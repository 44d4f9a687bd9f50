"""Who holds which block of the KV cache. Ids and counts only; the tensors are elsewhere.

A block has room for ``BLOCK_SIZE`` positions. A sequence is a list of blocks, its *table*; the last
one may be partly filled. Sequences that begin alike share blocks by reference: full ones for good,
a partly filled one until somebody writes to it, who then gets a copy (copy-on-write).

What a sequence has filled can be found by its content. Published blocks form a trie: each hangs
below the block that it follows, under its own ``BLOCK_SIZE`` token ids. Finding a prefix compares
ids, not hashes of them, so no two prefixes are ever mistaken for each other. A published block that
nobody holds counts as free, and keeps its content until there is no other block to give away.

Everything belongs to the model thread, except ``BlockPool.release``: the garbage collector ends a
table on any thread, and at any point of any method of the pool.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

BLOCK_SIZE = 16
"""Positions in a block."""


class OutOfBlocksError(Exception):
    """There are fewer free blocks than are wanted."""


def blocks_for(num_tokens: int) -> int:
    """Return how many blocks hold ``num_tokens`` positions."""
    return -(-num_tokens // BLOCK_SIZE)


@dataclass(eq=False, slots=True)
class _Prefix:
    """A published block, or the place of one: blocks that follow it may be published still."""

    parent: "_Prefix | None"
    key: Hashable
    """What it is called among its parent's children: its token ids, or a salt."""
    block: int | None = None
    children: "dict[Hashable, _Prefix]" = field(default_factory=dict)

    def child(self, key: Hashable) -> "_Prefix":
        """Return the child of that key, made where there was none."""
        if (child := self.children.get(key)) is None:
            child = self.children[key] = _Prefix(self, key)
        return child

    def prune(self) -> None:
        """Remove it, and those above it, as far as there is no block at or below them."""
        prefix = self
        while prefix.parent is not None and prefix.block is None and not prefix.children:
            del prefix.parent.children[prefix.key]
            prefix = prefix.parent


@dataclass(frozen=True)
class MemoryUse:
    """What the blocks of the pool are used for."""

    num_blocks: int
    num_used: int
    """Those that somebody holds."""
    num_cached: int
    """Those that nobody holds, but that can be found by their content."""
    num_swapped: int
    """Those whose content is in files; not of the pool."""

    @property
    def num_free(self) -> int:
        """Those that can be had now, the cached ones included."""
        return self.num_blocks - self.num_used


class BlockPool:
    """Counts the holders of each of ``num_blocks`` blocks, and finds free and published ones."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_holders: list[int] = []
        """Of each block that was ever given away. The memory of the others is untouched."""
        self._freed: list[int] = []
        """Free and not published; the last one was freed last."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Free but published; the first one is to be given away first."""
        self._root = _Prefix(None, None)
        self._prefix_of: dict[int, _Prefix] = {}
        # A lock here would be taken by a collector that runs while its own thread holds it.
        self._released: deque[tuple[int, ...]] = deque()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, published ones that nobody holds included."""
        self._drain()
        return self._count_free()

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds, but that can be found by their content."""
        self._drain()
        return len(self._cached)

    def is_shared(self, block: int) -> bool:
        """Tell whether ``block`` has more than one holder."""
        self._drain()
        return self._num_holders[block] > 1

    def num_shared(self, blocks: Sequence[int]) -> int:
        """Return how many of ``blocks`` have more than one holder."""
        self._drain()
        return sum(self._num_holders[block] > 1 for block in blocks)

    def allocate(self, num_blocks: int) -> list[int]:
        """Return that many blocks, held once each.

        Those freed last come first, as their memory is most likely in a processor's cache; then
        those never used; then published ones, least recently used first.

        Raises:
            OutOfBlocksError: there are fewer; nothing has changed.
        """
        if num_blocks > (num_free := self.num_free):
            raise OutOfBlocksError(
                f"{num_blocks} blocks wanted, {num_free} of {self.num_blocks} are free"
            )
        blocks = [self._take() for _ in range(num_blocks)]
        for block in blocks:
            self._num_holders[block] = 1
        return blocks

    def acquire(self, blocks: Sequence[int]) -> None:
        """Hold ``blocks``, which are held already or published, once more."""
        self._drain()
        for block in blocks:
            if self._num_holders[block] == 0:
                del self._cached[block]
            self._num_holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Hold ``blocks``, in the order of their sequence, once less. Any thread may call this.

        They are free from the next call on the model thread on.
        """
        if blocks:
            self._released.append(tuple(blocks))

    def publish(self, salt: Hashable, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        """Let the full blocks of a sequence be found by their content.

        Whoever holds them must not write to them any more. Where the same content has been
        published before, that block stays.

        Args:
            salt: only those who know it find them.
            token_ids: of the sequence, from its first on.
            blocks: those that hold them, in order.
        """
        self._drain()
        prefix = self._root.child(salt)
        for key, block in zip(_keys(token_ids), blocks, strict=False):
            prefix = prefix.child(key)
            if prefix.block is None and block not in self._prefix_of:
                prefix.block = block
                self._prefix_of[block] = prefix
        prefix.prune()

    def unpublish(self, block: int) -> None:
        """Let ``block`` be found no more, so that its only holder may write to it."""
        if (prefix := self._prefix_of.pop(block, None)) is not None:
            prefix.block = None
            prefix.prune()

    def match(self, salt: Hashable, token_ids: Sequence[int]) -> list[int]:
        """Return the published blocks that ``token_ids`` begin with, in order; hold each once."""
        blocks: list[int] = []
        prefix = self._root.children.get(salt)
        for key in _keys(token_ids):
            prefix = prefix and prefix.children.get(key)
            if prefix is None or prefix.block is None:
                break
            blocks.append(prefix.block)
        self.acquire(blocks)
        return blocks

    def check(self) -> None:
        """Assert that the books agree. For tests."""
        self._drain()
        used = [block for block, holders in enumerate(self._num_holders) if holders]
        touched = list(range(len(self._num_holders)))
        assert len(touched) <= self.num_blocks
        assert sorted([*self._freed, *self._cached, *used]) == touched, "each is in one place"
        assert self.num_blocks - self._count_free() == len(used)
        assert set(self._cached) == self._prefix_of.keys() - set(used)
        found = dict(_published(self._root))
        assert found == self._prefix_of, "the trie and its index agree"

    def holders(self) -> dict[int, int]:
        """Return how many hold each block that anybody holds. For tests."""
        self._drain()
        return {block: holders for block, holders in enumerate(self._num_holders) if holders}

    def published(self) -> set[int]:
        """Return the blocks that can be found by their content. For tests."""
        return set(self._prefix_of)

    def _count_free(self) -> int:
        """Return how many there were when what was released was last looked at."""
        num_untouched = self.num_blocks - len(self._num_holders)
        return num_untouched + len(self._freed) + len(self._cached)

    def _take(self) -> int:
        if self._freed:
            return self._freed.pop()
        if len(self._num_holders) < self.num_blocks:
            self._num_holders.append(0)
            return len(self._num_holders) - 1
        block, _ = self._cached.popitem(last=False)
        self.unpublish(block)
        return block

    def _drain(self) -> None:
        while self._released:
            # From the end, so that what is found only by way of another block goes before it.
            for block in reversed(self._released.popleft()):
                self._num_holders[block] -= 1
                assert self._num_holders[block] >= 0, "released more often than acquired"
                if self._num_holders[block] == 0:
                    self._put_back(block)

    def _put_back(self, block: int) -> None:
        if block in self._prefix_of:
            self._cached[block] = None
        else:
            self._freed.append(block)


def _keys(token_ids: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Return the ids of each full block."""
    for end in range(BLOCK_SIZE, len(token_ids) + 1, BLOCK_SIZE):
        yield tuple(token_ids[end - BLOCK_SIZE : end])


def _published(root: _Prefix) -> Iterator[tuple[int, _Prefix]]:
    prefixes = list(root.children.values())
    while prefixes:
        prefix = prefixes.pop()
        assert prefix.children or prefix.block is not None, "what holds nothing is pruned"
        prefixes += prefix.children.values()
        if prefix.block is not None:
            yield prefix.block, prefix


class BlockTable:
    """The blocks of one sequence. They are given back when it is collected."""

    def __init__(self, pool: BlockPool, blocks: Sequence[int] = (), num_tokens: int = 0) -> None:
        """Own ``blocks``, which are held for it already; ``num_tokens`` positions are filled."""
        self.pool = pool
        self.blocks = list(blocks)
        self.num_tokens = num_tokens
        """Positions that are filled; there may be room for more."""

    def needed(self, num_new: int) -> int:
        """Return how many blocks must be free so that ``num_new`` positions can be appended."""
        return self._num_missing(num_new) + (num_new > 0 and self._has_shared_tail())

    def grow(self, num_new: int) -> tuple[int, int] | None:
        """Make room for ``num_new`` more positions.

        Returns:
            ``(source, copy)`` where the partly filled block was shared: the caller must copy what
            it holds, before anything else is done to the pool.

        Raises:
            OutOfBlocksError: nothing has changed.
        """
        if num_new == 0:
            return None
        has_shared_tail = self._has_shared_tail()
        new = self.pool.allocate(self._num_missing(num_new) + has_shared_tail)
        copied = self._replace_tail(new.pop(0)) if has_shared_tail else None
        self.blocks += new
        if copied is None and (tail := self._tail()) is not None:
            self.pool.unpublish(self.blocks[tail])
        return copied

    def advance(self, num_new: int) -> None:
        """Count ``num_new`` positions, for which there is room, as filled."""
        assert self.num_tokens + num_new <= len(self.blocks) * BLOCK_SIZE, "grow comes first"
        self.num_tokens += num_new

    def fork(self, num_tokens: int) -> "BlockTable":
        """Return a table of the first ``num_tokens`` positions; it shares all their blocks."""
        assert 0 <= num_tokens <= self.num_tokens
        blocks = self.blocks[: blocks_for(num_tokens)]
        self.pool.acquire(blocks)
        return BlockTable(self.pool, blocks, num_tokens)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` positions only, and no room for more than their blocks."""
        assert 0 <= num_tokens <= self.num_tokens
        num_kept = blocks_for(num_tokens)
        dropped = self.blocks[num_kept:]
        del self.blocks[num_kept:]
        self.num_tokens = num_tokens
        self.pool.release(dropped)

    def drop(self) -> None:
        """Give all blocks back."""
        self.truncate(0)

    def __del__(self) -> None:
        self.pool.release(self.blocks)

    def _num_missing(self, num_new: int) -> int:
        return max(0, blocks_for(self.num_tokens + num_new) - len(self.blocks))

    def _tail(self) -> int | None:
        """Return the index of the block that is partly filled, if there is one."""
        index, num_filled = divmod(self.num_tokens, BLOCK_SIZE)
        return index if num_filled else None

    def _has_shared_tail(self) -> bool:
        tail = self._tail()
        return tail is not None and self.pool.is_shared(self.blocks[tail])

    def _replace_tail(self, copy: int) -> tuple[int, int]:
        tail = self.num_tokens // BLOCK_SIZE
        source, self.blocks[tail] = self.blocks[tail], copy
        self.pool.release([source])
        return source, copy
