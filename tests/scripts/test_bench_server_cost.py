"""The arithmetic of what the server costs."""

import json

import pytest

from scripts.benchmarks.figures import figure
from scripts.benchmarks.raw_socket import SocketError
from scripts.benchmarks.server_cost import (
    Trip,
    called,
    difference,
    percentile,
    resume_rows,
    summary,
    time_info,
    trip_rows,
    words,
)


def test_a_percentile_is_one_of_the_values() -> None:
    values = list(range(100, 0, -1))

    assert percentile(values, 0.99) == 99
    assert percentile(values, 0.5) == 50
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([1.0, 2.0], 0.99) == 2.0


def test_a_summary_has_a_sample_for_each_round() -> None:
    rows = summary([[1, 2, 9], [2, 3, 4]], "ms")

    assert rows["median"].samples == (2, 3)
    assert rows["p99"].samples == (9, 4)


def test_a_difference_is_taken_round_by_round() -> None:
    assert difference(figure([5, 9], "µs"), figure([1, 2], "µs")).samples == (4, 7)


def test_the_models_step_is_left_out_of_a_round_trip() -> None:
    bare = [[Trip(40), Trip(50), Trip(60)]]
    trips = [[Trip(400, 100, 250), Trip(300, 90, 100), Trip(200, 80, 50)]]

    rows = trip_rows(bare, trips, [[Trip(310)]])

    assert rows["bare"]["median"].samples == (50,)
    assert rows["server"]["median"].samples == (300,)
    assert rows["server, again"]["median"].samples == (310,)
    assert rows["of which to the model's step"]["median"].samples == (90,)
    assert rows["server, without that step"]["median"].samples == (150,)
    assert rows["the same / bare"]["median"].samples == (3,)


def test_resumes_are_measured_twice_in_each_round() -> None:
    rows = resume_rows([([1, 2, 3], [5]), ([4], [6])], [([7], [8]), ([9], [10])])

    handed, handed_again, stepped, stepped_again = rows.values()
    assert "to the step that begins with it, again" in rows
    assert handed["median"].samples == (2, 4)
    assert handed_again["median"].samples == (7, 9)
    assert stepped["median"].samples == (5, 6)
    assert stepped_again["median"].samples == (8, 10)


def test_the_latest_call_is_the_one_that_is_answered() -> None:
    output = [
        {"type": "function_call", "call_id": "call_1"},
        {"type": "function_call", "call_id": "call_2"},
        {"type": "message"},
    ]

    assert called(json.dumps({"response": {"output": output}}).encode()) == "call_2"


def test_a_response_without_a_call_is_a_mistake() -> None:
    with pytest.raises(SocketError, match="no call"):
        called(b'{"response": {"output": []}}')


def test_the_servers_own_times_are_read_from_its_report() -> None:
    closing = b'{"response": {"suspend:run": {"time_info": {"queue": 0.5, "prefill": 0.25}}}}'

    assert time_info(closing) == {"queue": 0.5, "prefill": 0.25}


def test_words_are_asked_for_with_the_call_made_already() -> None:
    request = words(100)

    assert request["max_output_tokens"] == 100
    assert [item.get("type", "message") for item in request["input"]] == [
        "message",
        "function_call",
        "function_call_output",
    ]
