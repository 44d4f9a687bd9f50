"""What a simulated model keeps of each position, in the blocks of the cache.

A hash of all tokens so far, chained from position to position, in the place of keys and values. The
next token depends on it and on nothing else. So a cache that was swapped, forked, shared or copied
wrongly has another chain in its last position, and what is said then is something else; and where
two positions do not follow from one another, somebody finds out:

*   At each step: the last position, and one earlier one.
*   Before a prompt is read: all positions.

Four words of 64 bits at each position: the chain, the place in the script, the token, and a seal of
the three. Where the cache is larger than that, the rest is filled with a pattern that follows from
the seal, of which samples are compared.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from sampler.cache_pool import BLOCK_SIZE, blocks_for
from sampler.kv_cache import PagedCache, PagedStorage

_WORD = 8
"""Bytes."""
_ALL_ONES = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15
_ROOT = 0x243F6A8885A308D3
"""The chain where there are no tokens yet."""
_SEAL = 0x13198A2E03707344
_NUM_FIXED = 4
_SAMPLED = (0, 16, 32)
"""Bits of the seal from which on it says which word of the pattern is compared."""

_Words = TypeVar("_Words", int, NDArray[Any])
"""A word, or many."""


class CorruptCacheError(RuntimeError):
    """A cache does not hold what was written to it."""


class Link(NamedTuple):
    """What is kept of a position."""

    chain: int
    """64 bits that depend on all tokens up to here."""
    place: int
    """Where in its script the model is; 64 bits."""
    token_id: int
    """The token at the position."""

    def chain_after(self, token_id: int) -> int:
        """Return the chain of the next position, if it holds ``token_id``."""
        return _chained(self.chain, token_id)


ROOT = Link(_ROOT, 0, 0)
"""What comes before the first position."""


def _chained(chain: _Words, token_id: _Words) -> _Words:
    """Return the chain after ``token_id``: two that differ in either differ thereafter."""
    mixed: _Words = ((chain ^ (token_id + 1)) * _MULTIPLIER) & _ALL_ONES
    chained: _Words = mixed ^ (mixed >> 32)
    return chained


def _sealed(chain: _Words, place: _Words, token_id: _Words) -> _Words:
    return _chained(chain ^ place ^ _SEAL, token_id)


class ChainedBlocks:
    """Reads and writes links in the blocks of a storage, which is in main memory."""

    def __init__(self, storage: PagedStorage) -> None:
        """Use ``storage``, which has room for four words at each position."""
        flat = storage.tensor.view(-1).view(torch.uint8).numpy()
        row_bytes = storage.shape.head_dim * storage.tensor.dtype.itemsize
        width, remainder = divmod(row_bytes, _WORD)
        assert remainder == 0, "a head is whole words"
        num_rows = 2 * storage.shape.num_layers * storage.shape.num_kv_heads
        assert num_rows * width >= _NUM_FIXED, "a link has a place"
        self._array = flat.view(np.uint64)
        self._slabs = self._array.reshape(-1, num_rows, BLOCK_SIZE, width)
        # The same memory. To get at a word of it takes a third of the time.
        self._words = self._array.data
        self._width = width
        self._block_words = num_rows * BLOCK_SIZE * width
        # Where the words of a position are, from its first one on.
        index = np.arange(num_rows * width)
        self._offset_array = index // width * BLOCK_SIZE * width + index % width
        self._offsets: list[int] = self._offset_array.tolist()
        salts = np.random.Generator(np.random.Philox(key=0)).bytes(index.nbytes)
        self._salt_array = np.frombuffer(salts, dtype=np.uint64)
        self._salt_slab = self._salt_array.reshape(num_rows, 1, width)
        offsets_and_salts = zip(self._offsets, self._salt_array.tolist(), strict=True)
        self._patterned: list[tuple[int, int]] = list(offsets_and_salts)[_NUM_FIXED:]
        """Of each word of the pattern: where it is, and how it differs from the seal."""

    def last(self, cache: PagedCache) -> Link:
        """Return the link of the last position of ``cache``.

        Raises:
            CorruptCacheError: it is not what was written, or does not follow from the one before;
                or an earlier one does not.
        """
        num_tokens = cache.num_tokens
        if num_tokens == 0:
            return ROOT
        blocks = cache.table.blocks
        link = self._link(blocks, num_tokens - 1)
        for position in (num_tokens - 1, (link.chain >> 20) % num_tokens):
            if not self._follows(blocks, position):
                raise _corrupt(position)
        return link

    def check_all(self, cache: PagedCache) -> None:
        """Make sure that all positions of ``cache`` are what was written, and follow one another.

        Raises:
            CorruptCacheError: they are not, or do not.
        """
        num_tokens = cache.num_tokens
        if num_tokens == 0:
            return
        blocks = np.array(cache.table.blocks[: blocks_for(num_tokens)])
        starts = np.arange(BLOCK_SIZE) * self._width
        at = (blocks[:, None] * self._block_words + starts).ravel()[:num_tokens]
        chain, place, token_id, seal = (
            self._array[at + offset] for offset in self._offsets[:_NUM_FIXED]
        )
        before = np.concatenate((np.array([_ROOT], dtype=np.uint64), chain[:-1]))
        whole = (_sealed(chain, place, token_id) == seal) & (_chained(before, token_id) == chain)
        if self._patterned:
            sample = _NUM_FIXED + (seal % len(self._patterned)).astype(np.intp)
            found = self._array[at + self._offset_array[sample]]
            whole &= found == seal ^ self._salt_array[sample]
        if not whole.all():
            raise _corrupt(int(np.argmin(whole)))

    def write(self, cache: PagedCache, links: Sequence[Link]) -> None:
        """Write what comes behind the last position of ``cache``, which has room for it."""
        words, blocks, start = self._words, cache.table.blocks, cache.num_tokens
        if self._patterned:
            self._write_patterns(blocks, start, [_sealed(*link) for link in links])
        _, to_place, to_token, to_seal = self._offsets[:_NUM_FIXED]
        for position, link in enumerate(links, start):
            at = self._address(blocks, position)
            words[at], words[at + to_place], words[at + to_token] = link
            words[at + to_seal] = _sealed(*link)

    def _write_patterns(self, blocks: Sequence[int], start: int, seals: Sequence[int]) -> None:
        """Fill positions from ``start`` on, the fixed words included."""
        done = 0
        while done < len(seals):
            index, offset = divmod(start + done, BLOCK_SIZE)
            some = np.array(seals[done : done + BLOCK_SIZE - offset], dtype=np.uint64)
            slab = self._slabs[blocks[index], :, offset : offset + len(some)]
            np.bitwise_xor(self._salt_slab, some[:, None], out=slab)  # (rows, some, width)
            done += len(some)

    def _address(self, blocks: Sequence[int], position: int) -> int:
        return (
            blocks[position // BLOCK_SIZE] * self._block_words + position % BLOCK_SIZE * self._width
        )

    def _link(self, blocks: Sequence[int], position: int) -> Link:
        """Return the link at ``position``, if its words agree."""
        words, offsets = self._words, self._offsets
        at = self._address(blocks, position)
        link = Link(words[at], words[at + offsets[1]], words[at + offsets[2]])
        seal = words[at + offsets[3]]
        if seal != _sealed(*link) or not self._has_pattern(at, seal):
            raise _corrupt(position)
        return link

    def _has_pattern(self, at: int, seal: int) -> bool:
        """Tell whether some words of the pattern are as they are to be; which ones, varies."""
        if patterned := self._patterned:
            for shift in _SAMPLED:
                offset, salt = patterned[(seal >> shift) % len(patterned)]
                if self._words[at + offset] != seal ^ salt:
                    return False
        return True

    def _follows(self, blocks: Sequence[int], position: int) -> bool:
        """Tell whether the chain at ``position`` is that of the one before and the token."""
        words, at = self._words, self._address(blocks, position)
        before = words[self._address(blocks, position - 1)] if position else _ROOT
        return _chained(before, words[at + self._offsets[2]]) == words[at]


def _corrupt(position: int) -> CorruptCacheError:
    return CorruptCacheError(
        f"the cache does not hold what was written to it, at position {position}"
    )
