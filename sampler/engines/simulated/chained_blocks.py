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

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from sampler.cache_pool import BLOCK_SIZE, blocks_for
from sampler.kv_cache import PagedCache, PagedStorage
from sampler.simd import brief_entry_point, compiled, entry_point

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


_FEW = 64
"""Positions that are written in microseconds: as many as rows decode together."""


@compiled
def _fill(
    array: NDArray[Any], salts: NDArray[Any], addresses: NDArray[Any], words: NDArray[Any]
) -> None:
    """Write positions: ``words`` at each of ``addresses``, and the pattern that follows from the
    last one.

    Args:
        array: (words,) uint64, the memory of all blocks.
        salts: (words of a position,) uint64, how each word of the pattern differs from the seal.
        addresses: (positions,) int64, where the first word of each is.
        words: (positions, 4) uint64.
    """
    for index in range(len(addresses)):
        position = array[addresses[index] : addresses[index] + len(salts)]
        seal = words[index, _NUM_FIXED - 1]
        for number in range(len(salts)):
            position[number] = seal ^ salts[number]
        for number in range(_NUM_FIXED):
            position[number] = words[index, number]


@brief_entry_point
def _write_few(
    array: NDArray[Any], salts: NDArray[Any], addresses: NDArray[Any], words: NDArray[Any]
) -> None:
    _fill(array, salts, addresses, words)


@entry_point
def _write_many(
    array: NDArray[Any], salts: NDArray[Any], addresses: NDArray[Any], words: NDArray[Any]
) -> None:
    _fill(array, salts, addresses, words)


class ChainedBlocks:
    """Reads and writes links in the blocks of a storage, which is in main memory.

    There are no layers and heads here: the words of a position lie one behind the other.
    """

    def __init__(self, storage: PagedStorage) -> None:
        """Use ``storage``, which has room for four words at each position."""
        flat = storage.tensor.view(-1).view(torch.uint8).numpy()
        block_bytes = storage.shape.block_bytes(storage.tensor.dtype)
        self._width, remainder = divmod(block_bytes, BLOCK_SIZE * _WORD)
        assert remainder == 0, "a position is whole words"
        assert self._width >= _NUM_FIXED, "a link has a place"
        self._array = flat.view(np.uint64)
        # The same memory. To get at a word of it takes a third of the time.
        self._words = self._array.data
        salts = np.random.Generator(np.random.Philox(key=0)).bytes(self._width * _WORD)
        self._salt_array = np.frombuffer(salts, dtype=np.uint64)
        self._salts: list[int] = self._salt_array.tolist()

    def last(self, cache: PagedCache) -> Link:
        """Return the link of the last position of ``cache``.

        Raises:
            CorruptCacheError: it is not what was written, or does not follow from the one before;
                or an earlier one does not.
        """
        num_tokens = cache.num_tokens
        if num_tokens == 0:
            return ROOT
        blocks, words = cache.table.blocks, self._words
        at = self._address(blocks, num_tokens - 1)
        link = Link(words[at], words[at + 1], words[at + 2])
        seal = words[at + 3]
        is_whole = seal == _sealed(*link) and self._has_pattern(at, seal)
        if not (is_whole and self._chain_at(blocks, num_tokens - 1, link.token_id) == link.chain):
            raise _corrupt(num_tokens - 1)
        earlier = (link.chain >> 20) % num_tokens
        at = self._address(blocks, earlier)
        if self._chain_at(blocks, earlier, words[at + 2]) != words[at]:
            raise _corrupt(earlier)
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
        positions = (blocks[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).ravel()[:num_tokens]
        at = positions * self._width
        chain, place, token_id, seal = (self._array[at + number] for number in range(_NUM_FIXED))
        before = np.concatenate((np.array([_ROOT], dtype=np.uint64), chain[:-1]))
        whole = (_sealed(chain, place, token_id) == seal) & (_chained(before, token_id) == chain)
        if num_patterned := self._width - _NUM_FIXED:
            sample = _NUM_FIXED + (seal % num_patterned).astype(np.intp)
            whole &= self._array[at + sample] == seal ^ self._salt_array[sample]
        if not whole.all():
            raise _corrupt(int(np.argmin(whole)))

    def write(self, written: Iterable[tuple[PagedCache, Sequence[Link]]]) -> None:
        """Write what comes behind the last position of each cache, which has room for it."""
        addresses: list[int] = []
        words: list[tuple[int, ...]] = []
        for cache, links in written:
            blocks, start = cache.table.blocks, cache.num_tokens
            for position, link in enumerate(links, start):
                addresses.append(self._address(blocks, position))
                words.append((*link, _sealed(*link)))
        at = np.array(addresses, dtype=np.int64)
        write = _write_few if len(at) <= _FEW else _write_many
        write(self._array, self._salt_array, at, np.array(words, dtype=np.uint64))

    def _address(self, blocks: Sequence[int], position: int) -> int:
        return (blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE) * self._width

    def _has_pattern(self, at: int, seal: int) -> bool:
        """Tell whether some words of the pattern are as they are to be; which ones, varies."""
        if num_patterned := self._width - _NUM_FIXED:
            for shift in _SAMPLED:
                number = _NUM_FIXED + (seal >> shift) % num_patterned
                if self._words[at + number] != seal ^ self._salts[number]:
                    return False
        return True

    def _chain_at(self, blocks: Sequence[int], position: int, token_id: int) -> int:
        """Return the chain of ``position``, if it holds ``token_id``."""
        before = self._words[self._address(blocks, position - 1)] if position else _ROOT
        return _chained(before, token_id)


def _corrupt(position: int) -> CorruptCacheError:
    return CorruptCacheError(
        f"the cache does not hold what was written to it, at position {position}"
    )
