"""How many suspended runs a machine has room for, and what is made of what they came to."""

from pathlib import Path

import pytest

from scripts.benchmarks.suspended_sockets import (
    WrongAnswerError,
    check,
    create,
    file_system,
    fitting,
    in_turns,
    memory_a_run,
    times,
)


def test_as_many_runs_are_made_as_are_asked_for_where_there_is_room() -> None:
    assert fitting(50, {"disk": 50.0, "open files": 1000}) == (50, [])


def test_fewer_runs_are_made_where_there_is_less_room_and_it_says_of_what() -> None:
    number, notes = fitting(1000, {"disk": 400.7, "open files": 744})

    assert number == 400
    assert notes == ["400 runs instead of 1,000: disk"]


def test_without_room_for_one_there_is_nothing_to_measure() -> None:
    with pytest.raises(RuntimeError, match="disk"):
        fitting(1000, {"disk": 0.9})


def test_the_file_system_of_a_path_is_the_innermost_one() -> None:
    types = {"/": "ext4", "/tmp": "tmpfs", "/tm": "xfs"}

    assert file_system(Path("/tmp/a"), types) == "tmpfs"
    assert file_system(Path("/tmp"), types) == "tmpfs"
    assert file_system(Path("/tmpest"), types) == "ext4"
    assert file_system(Path("/a"), {}) is None


def test_memory_is_told_a_run() -> None:
    row = memory_a_run(resident=11 * 10240, kv=10 * 10240, number=10)

    assert row["resident"].median == 11.0
    assert row["keys and values"].median == 10.0
    assert row["beside them"].median == 1.0
    assert row["resident / keys and values"].median == 1.1


def test_runs_in_memory_and_in_files_take_turns_and_those_in_memory_are_measured_twice() -> None:
    events: list[float] = []

    def measure(milliseconds: float) -> float:
        events.append(milliseconds)
        return milliseconds

    taken = in_turns(
        list(range(12)), list(range(100, 120)), measure, settle=lambda: events.append(-1)
    )

    assert events == [
        *(-1, 0, 1, 2, 3, -1, 100, 101, 102, 103, -1, 6, 7, 8, 9),
        *(-1, 4, 5, -1, 104, 105, -1, 10, 11),
    ]
    # The first of a batch waits for nobody.
    assert taken == {
        "in memory": [1, 2, 3, 5],
        "in files": [101, 102, 103, 105],
        "in memory, again": [7, 8, 9, 11],
    }


def test_swapping_is_what_files_take_beyond_memory() -> None:
    suspend = {"in memory": [1.0, 3.0], "in files": [10.0], "in memory, again": [2.5]}
    resume = {"in memory": [1.0], "in files": [5.0], "in memory, again": [1.5]}

    rows = times(suspend, resume)

    assert rows["swapping, by the medians"]["suspend"].median == 8.0
    assert rows["swapping, by the medians"]["resume"].median == 4.0
    assert rows["in memory, again"]["suspend"].median == 2.5


def test_answers_are_compared() -> None:
    check(["a", "b"], ["a", "b"])

    with pytest.raises(WrongAnswerError, match="1 of 3 runs, the first of them 1"):
        check(["a", "x", "c"], ["a", "b", "c"])


def test_answers_that_are_all_alike_show_nothing() -> None:
    with pytest.raises(WrongAnswerError, match="same"):
        check(["a", "a"], ["a", "a"])


def test_runs_differ_from_their_first_words_on() -> None:
    assert create(1)["instructions"][0] != create(2)["instructions"][0]
    assert create(1)["input"] == create(2)["input"]
