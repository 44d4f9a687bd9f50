"""What suspended runs may hold of vLLM's cache, and which of them goes first."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from sampler.engines.vllm.held import Held, Room, new_policy, room_of, surplus
from sampler.suspension_policy import Kind, Parked


def config(
    num_gpu_blocks: int = 101,
    *,
    max_model_len: int = 320,
    max_num_seqs: int = 8,
    data_parallel_size: int = 1,
    kv_cache_size_tokens: int | None = None,
) -> Any:
    """Return vLLM's, with blocks of 16 tokens."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            num_gpu_blocks=num_gpu_blocks, block_size=16, kv_cache_size_tokens=kv_cache_size_tokens
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        model_config=SimpleNamespace(max_model_len=max_model_len),
        parallel_config=SimpleNamespace(data_parallel_size=data_parallel_size),
    )


@pytest.mark.parametrize(
    ("vllm_config", "fraction", "num_blocks", "max_held_blocks"),
    [
        (config(), 0.5, 100, 50),
        (config(), 1.0, 100, 80),  # one run of 320 tokens has room
        (config(202, data_parallel_size=2), 0.5, 100, 50),  # of one engine
        (config(kv_cache_size_tokens=640), 0.25, 40, 10),  # caches of several kinds
        (config(max_model_len=10_000), 0.5, 100, 0),
    ],
)
def test_what_may_be_held(
    vllm_config: Any, fraction: float, num_blocks: int, max_held_blocks: int
) -> None:
    room = room_of(vllm_config, fraction)

    assert (room.num_blocks, room.max_held_blocks) == (num_blocks, max_held_blocks)


@pytest.mark.parametrize(("max_num_seqs", "most"), [(1, 0), (2, 1), (3, 1), (256, 128)])
def test_half_of_the_sequences_may_be_held(max_num_seqs: int, most: int) -> None:
    assert room_of(config(max_num_seqs=max_num_seqs), 0.5).max_held_sequences == most


def test_a_run_is_no_longer_than_what_there_is_memory_for() -> None:
    assert room_of(config(), 0.5).max_context == 320
    assert room_of(config(11), 0.5).max_context == 160


def test_a_block_holds_so_many_positions() -> None:
    room = room_of(config(), 0.5)

    assert [room.blocks_for(number) for number in (0, 1, 16, 17)] == [1, 1, 1, 2]


ROOM = Room(16, 100, 320, max_held_blocks=20, max_held_sequences=3)


def held(
    key: str, num_blocks: int, since: float = 0.0, *, can_end: bool = True, tool: str = "f"
) -> Held:
    """Return what a session holds."""
    parked = Parked(key, Kind.SUSPENDED, num_blocks * 16, num_blocks, since, (tool,))
    return Held(parked, can_end)


def ends(*sessions: Held, times: Sequence[tuple[str, float]] = ()) -> list[object]:
    """Return which of them end, a hundred seconds after zero, where tools took such times."""
    policy = new_policy(256)
    policy.costs.observe_forward(256, 0.5)
    for tool, seconds in times:
        policy.tool_times.observe((tool,), seconds)
    return [parked.key for parked in surplus(sessions, ROOM, policy, 100.0, 0)]


def test_within_the_bounds_none_ends() -> None:
    assert ends(held("a", 10), held("b", 9), held("c", 1)) == []


def test_so_many_end_that_the_blocks_are_few_enough() -> None:
    assert ends(held("a", 10, 10.0), held("b", 10, 90.0), held("c", 10, 50.0)) == ["a"]


def test_so_many_end_that_the_sequences_are_few_enough() -> None:
    sessions = [held(str(number), 1, float(number)) for number in range(5)]

    assert ends(*sessions) == ["0", "1"]


def test_whose_tool_takes_long_ends_before_one_whose_tool_is_about_to_answer() -> None:
    slow, quick = held("slow", 11, 99.0, tool="slow"), held("quick", 11, 98.0, tool="quick")

    assert ends(slow, quick, times=[("slow", 900.0), ("quick", 2.1)]) == ["slow"]


def test_who_waits_for_its_turn_is_counted_and_stays() -> None:
    resumed = held("resumed", 18, 1.0, can_end=False)

    assert ends(resumed, held("a", 3, 99.0)) == ["a"]
    assert ends(resumed, held("a", 2, 1.0)) == []
