"""Blocks are counted here; what they hold is played by lists of token ids."""

import gc
import sys
from collections.abc import Callable
from itertools import count
from threading import Thread

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sampler.cache_pool import BLOCK_SIZE, BlockPool, BlockTable, OutOfBlocksError, blocks_for

IDS = list(range(100, 200))


def table_of(pool: BlockPool, num_tokens: int) -> BlockTable:
    table = BlockTable(pool)
    table.grow(num_tokens)
    table.advance(num_tokens)
    return table


def published(pool: BlockPool, num_tokens: int, salt: str = "salt") -> BlockTable:
    """Return a table that holds the first of ``IDS``, which are published."""
    table = table_of(pool, num_tokens)
    pool.publish(salt, IDS[:num_tokens], table.blocks)
    return table


def in_another_thread(function: Callable[[], object]) -> None:
    thread = Thread(target=function)
    thread.start()
    thread.join()


# --- Counting ------------------------------------------------------------------------------------


def test_blocks_are_those_that_hold_the_positions() -> None:
    assert [blocks_for(n) for n in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


def test_what_is_used_and_what_is_free_is_all_there_is() -> None:
    pool = BlockPool(4)

    blocks = pool.allocate(3)

    assert (pool.num_used, pool.num_free, pool.num_cached) == (3, 1, 0)
    pool.release(blocks[:2])
    assert (pool.num_used, pool.num_free, pool.num_cached) == (1, 3, 0)


def test_too_few_free_blocks_are_not_given_away_at_all() -> None:
    pool = BlockPool(4)
    pool.allocate(3)

    with pytest.raises(OutOfBlocksError, match="2 blocks wanted, 1 of 4 are free"):
        pool.allocate(2)

    assert pool.num_free == 1
    pool.check()


def test_a_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.acquire(blocks)

    pool.release(blocks)
    assert pool.num_free == 0

    pool.release(blocks)
    assert pool.num_free == 2


def test_freed_blocks_are_given_away_before_those_never_used() -> None:
    """Memory that was never touched takes up none."""
    pool = BlockPool(8)
    first, second = pool.allocate(2), pool.allocate(2)
    assert first + second == [0, 1, 2, 3]
    pool.release(first)
    pool.release(second)

    assert pool.allocate(5) == [2, 3, 0, 1, 4]


def test_released_too_often_is_noticed() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    pool.release(blocks)

    with pytest.raises(AssertionError, match="released more often"):
        pool.check()


# --- Prefixes ------------------------------------------------------------------------------------


def test_the_longest_published_prefix_is_found_and_held() -> None:
    pool = BlockPool(8)
    table = published(pool, 40)

    found = pool.match("salt", [*IDS[:32], 0, 0])

    assert found == table.blocks[:2]
    table.drop()
    assert pool.num_used == 2


@pytest.mark.parametrize(
    ("salt", "token_ids"),
    [
        ("other", IDS[:32]),
        ("salt", IDS[:15]),
        ("salt", [0, *IDS[1:32]]),
        ("salt", IDS[16:48]),  # the second block alone is no prefix
    ],
)
def test_what_is_not_published_is_not_found(salt: str, token_ids: list[int]) -> None:
    pool = BlockPool(8)
    published(pool, 48)

    assert pool.match(salt, token_ids) == []
    pool.check()


def test_ids_of_equal_hash_are_told_apart() -> None:
    pool = BlockPool(8)
    assert hash(-1) == hash(-2)
    pool.publish("salt", [-1] * 16, pool.allocate(1))

    assert pool.match("salt", [-2] * 16) == []


def test_a_published_block_that_nobody_holds_is_free_and_can_be_found() -> None:
    pool = BlockPool(4)
    table = published(pool, 32)
    blocks = list(table.blocks)
    table.drop()
    assert (pool.num_free, pool.num_cached, pool.num_used) == (4, 2, 0)

    assert pool.match("salt", IDS[:32]) == blocks

    assert (pool.num_free, pool.num_cached, pool.num_used) == (2, 0, 2)


def test_published_blocks_are_given_away_last_and_the_least_recently_used_first() -> None:
    pool = BlockPool(4)
    one, other = published(pool, 16, "one"), published(pool, 16, "other")
    first, second = one.blocks[0], other.blocks[0]
    one.drop()
    other.drop()
    pool.release(pool.match("one", IDS))  # used again

    assert pool.allocate(4) == [2, 3, second, first]
    assert pool.match("one", IDS) == []
    pool.check()


def test_of_a_prefix_the_end_is_given_away_first() -> None:
    """Without its beginning the rest could not be found."""
    pool = BlockPool(3)
    published(pool, 48).drop()

    pool.allocate(1)

    assert len(pool.match("salt", IDS)) == 2


def test_the_first_to_publish_a_prefix_wins() -> None:
    pool = BlockPool(8)
    first = published(pool, 16)
    second = published(pool, 32)

    assert pool.match("salt", IDS[:32]) == [first.blocks[0], second.blocks[1]]
    pool.check()


def test_a_prefix_whose_beginning_was_given_away_is_found_once_that_is_published_again() -> None:
    pool = BlockPool(3)
    first = published(pool, 16)
    second = published(pool, 32)
    first.drop()
    taken = pool.allocate(1)
    assert pool.match("salt", IDS[:32]) == []

    pool.publish("salt", IDS[:32], second.blocks)

    assert pool.match("salt", IDS[:32]) == second.blocks
    pool.release(taken)
    pool.check()


def test_the_same_block_is_published_only_once() -> None:
    pool = BlockPool(2)
    table = published(pool, 32, "one")

    pool.publish("other", IDS[:32], table.blocks)

    assert pool.match("other", IDS[:32]) == []
    pool.check()


# --- Tables --------------------------------------------------------------------------------------


def test_a_table_grows_by_whole_blocks() -> None:
    table = BlockTable(BlockPool(8))

    assert [table.needed(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    table.grow(17)
    assert table.num_tokens == 0
    table.advance(17)

    assert len(table.blocks) == 2
    assert [table.needed(n) for n in (0, 1, 15, 16)] == [0, 0, 0, 1]


def test_no_position_is_filled_without_room_for_it() -> None:
    table = table_of(BlockPool(8), 16)

    with pytest.raises(AssertionError):
        table.advance(1)


def test_room_that_was_made_is_not_made_again() -> None:
    """A forward pass that fails leaves it."""
    pool = BlockPool(8)
    table = BlockTable(pool)
    table.grow(40)

    assert table.needed(40) == 0
    table.grow(48)

    assert len(table.blocks) == 3


def test_a_table_that_cannot_grow_is_as_it_was() -> None:
    pool = BlockPool(3)
    table = table_of(pool, 20)
    fork = table.fork(20)

    assert table.needed(20) == 2
    with pytest.raises(OutOfBlocksError):
        table.grow(20)

    assert table.blocks == fork.blocks
    assert pool.num_free == 1


def test_a_fork_takes_no_blocks() -> None:
    pool = BlockPool(8)
    table = table_of(pool, 40)

    fork = table.fork(20)

    assert fork.blocks == table.blocks[:2]
    assert fork.num_tokens == 20
    assert pool.num_used == 3


def test_who_writes_to_a_shared_block_first_copies_it() -> None:
    pool = BlockPool(8)
    table = table_of(pool, 20)
    fork = table.fork(20)
    full, partial = table.blocks
    assert table.needed(1) == 1

    copied = table.grow(1)

    assert copied == (partial, table.blocks[1])
    assert fork.blocks == [full, partial]
    assert table.blocks[0] == full
    assert fork.needed(1) == 0
    assert fork.grow(1) is None, "it is alone now"


def test_a_block_is_not_copied_when_its_other_holders_are_gone() -> None:
    pool = BlockPool(8)
    table = table_of(pool, 20)
    fork = table.fork(20)

    in_another_thread(fork.drop)

    assert table.needed(1) == 0
    assert table.grow(1) is None


def test_full_blocks_are_never_copied() -> None:
    table = table_of(BlockPool(8), 32)
    fork = table.fork(32)

    assert fork.grow(1) is None

    assert fork.blocks[:2] == table.blocks


def test_a_truncated_table_keeps_no_more_blocks_than_it_fills() -> None:
    pool = BlockPool(8)
    table = table_of(pool, 40)
    table.grow(60)

    table.truncate(16)

    assert len(table.blocks) == 1
    assert table.num_tokens == 16
    assert pool.num_used == 1


def test_a_published_block_is_not_found_any_more_once_it_is_written_to() -> None:
    pool = BlockPool(8)
    table = published(pool, 32)
    table.truncate(20)

    assert table.grow(1) is None

    assert pool.match("salt", IDS[:32]) == table.blocks[:1]
    pool.check()


def test_a_dropped_table_can_be_used_again() -> None:
    pool = BlockPool(2)
    table = table_of(pool, 32)

    table.drop()

    assert pool.num_free == 2
    table.grow(32)
    assert pool.num_free == 0


def test_a_table_that_nobody_needs_gives_its_blocks_back_on_any_thread() -> None:
    pool = BlockPool(8)
    tables = [table_of(pool, 20) for _ in range(3)]

    in_another_thread(tables.clear)

    assert pool.num_free == 8


def test_blocks_come_back_from_a_cycle_that_is_collected_in_the_midst_of_an_allocation() -> None:
    """The collector runs on the thread that allocates, wherever it happens to be."""
    pool = BlockPool(400)
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(300):
            table = table_of(pool, 20)
            table.itself = table  # type: ignore[attr-defined]
            del table
    finally:
        gc.set_threshold(*threshold)

    gc.collect()
    pool.check()
    assert pool.num_used == 0


@pytest.mark.parametrize("number", range(1, 40))
def test_the_books_agree_where_blocks_come_back_while_they_are_checked(number: int) -> None:
    """Another thread gives them back at any point: here at one call or return after the other."""
    pool = BlockPool(8)
    tables = [table_of(pool, 20)]
    events = count(1)
    sys.setprofile(lambda *_: tables.clear() if next(events) == number else None)
    try:
        pool.check()
    finally:
        sys.setprofile(None)

    tables.clear()
    assert pool.num_used == 0


# --- All of it, in any order ---------------------------------------------------------------------

NUM_BLOCKS = 10


class Sequences(RuleBasedStateMachine):
    """Sequences that fork, grow and end, on a pool that is too small for them.

    A block's contents are a list of ids, written by the rules of the docstrings. Whatever happens,
    each sequence must read from its blocks what it wrote.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.contents = [[-1] * BLOCK_SIZE for _ in range(NUM_BLOCKS)]
        self.sequences: list[tuple[BlockTable, list[int]]] = []

    # Few different ids, so that many sequences begin alike.
    @rule(
        salt=st.sampled_from("ab"),
        token_id=st.integers(0, 1),
        num_tokens=st.integers(1, 4 * BLOCK_SIZE),
        num_more=st.integers(0, BLOCK_SIZE),
    )
    def begin(self, salt: str, token_id: int, num_tokens: int, num_more: int) -> None:
        blocks = self.pool.match(salt, [token_id] * num_tokens)
        num_found = len(blocks) * BLOCK_SIZE
        table = BlockTable(self.pool, blocks, num_found)
        self.sequences.append((table, [token_id] * num_found))
        self._grow(table, self.sequences[-1][1], num_tokens - num_found, token_id)
        self._grow(table, self.sequences[-1][1], num_more, 1 - token_id)

    @precondition(lambda self: self.sequences)
    @rule(
        which=st.integers(0, 9), num_new=st.integers(0, 2 * BLOCK_SIZE), token_id=st.integers(0, 1)
    )
    def grow(self, which: int, num_new: int, token_id: int) -> None:
        self._grow(*self._sequence(which), num_new, token_id)

    def _grow(self, table: BlockTable, ids: list[int], num_new: int, token_id: int) -> None:
        before, num_free = list(table.blocks), self.pool.num_free
        if table.needed(num_new) > num_free:
            with pytest.raises(OutOfBlocksError):
                table.grow(num_new)
            assert (table.blocks, self.pool.num_free) == (before, num_free)
            return
        if copied := table.grow(num_new):
            source, copy = copied
            self.contents[copy] = list(self.contents[source])
        for position in range(len(ids), len(ids) + num_new):
            block = table.blocks[position // BLOCK_SIZE]
            self.contents[block][position % BLOCK_SIZE] = token_id
        table.advance(num_new)
        ids.extend([token_id] * num_new)

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 9), num_new=st.integers(1, BLOCK_SIZE))
    def fail_half_way(self, which: int, num_new: int) -> None:
        table, _ = self._sequence(which)
        if table.needed(num_new) <= self.pool.num_free and (copied := table.grow(num_new)):
            source, copy = copied
            self.contents[copy] = list(self.contents[source])

    @precondition(lambda self: self.sequences)
    @rule(
        which=st.integers(0, 9),
        dropped=st.integers(0, 2 * BLOCK_SIZE),
        num_new=st.integers(0, 2 * BLOCK_SIZE),
    )
    def fork(self, which: int, dropped: int, num_new: int) -> None:
        table, ids = self._sequence(which)
        num_tokens = max(0, len(ids) - dropped)
        self.sequences.append((table.fork(num_tokens), ids[:num_tokens]))
        self._grow(*self.sequences[-1], num_new, 1)

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 9), dropped=st.integers(0, 2 * BLOCK_SIZE))
    def truncate(self, which: int, dropped: int) -> None:
        table, ids = self._sequence(which)
        del ids[max(0, len(ids) - dropped) :]
        table.truncate(len(ids))

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 9))
    def drop(self, which: int) -> None:
        table, ids = self._sequence(which)
        table.drop()
        ids.clear()

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 9), salt=st.sampled_from("ab"), elsewhere=st.booleans())
    def publish_and_end(self, which: int, salt: str, elsewhere: bool) -> None:
        self.publish(which, salt)
        held = [self.sequences.pop(which % len(self.sequences))]
        if elsewhere:
            in_another_thread(held.clear)

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 9), salt=st.sampled_from("ab"))
    def publish(self, which: int, salt: str) -> None:
        table, ids = self._sequence(which)
        self.pool.publish(salt, ids, table.blocks)

    def _sequence(self, which: int) -> tuple[BlockTable, list[int]]:
        return self.sequences[which % len(self.sequences)]

    @invariant()
    def the_books_agree(self) -> None:
        self.pool.check()
        held = {block for table, _ in self.sequences for block in table.blocks}
        assert self.pool.num_used == len(held)

    @invariant()
    def each_sequence_reads_what_it_wrote(self) -> None:
        for table, ids in self.sequences:
            read = [token_id for block in table.blocks for token_id in self.contents[block]]
            assert table.num_tokens == len(ids)
            assert read[: len(ids)] == ids

    def teardown(self) -> None:
        self.sequences.clear()
        self.pool.check()
        assert self.pool.num_used == 0


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
