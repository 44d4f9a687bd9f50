"""A server that takes one response at a time is told from one that is only fast."""

from collections.abc import Callable

import pytest

from scripts.conformance.overlap import Overlap

CREATE = '{"type": "response.create"}'
BEGINS = '{"type": "response.output_item.added"}'
ENDS = '{"type": "response.completed"}'

Happening = tuple[float, Callable[[Overlap], None]]
Telling = Callable[[int, float, float, float], list[Happening]]


def overlap(*happenings: Happening) -> Overlap:
    """Return what is known once all that has happened, each at so many seconds."""
    now = 0.0
    seen = Overlap(clock=lambda: now)
    for seconds, happen in sorted(happenings, key=lambda happening: happening[0]):
        now = seconds
        happen(seen)
    return seen


def on_socket(connection: int, asked: float, begins: float, ends: float) -> list[Happening]:
    return [
        (asked, lambda seen: seen.sent(connection, CREATE)),
        (begins, lambda seen: seen.received(connection, BEGINS)),
        (ends, lambda seen: seen.received(connection, ENDS)),
    ]


def streamed(connection: int, asked: float, begins: float, ends: float) -> list[Happening]:
    return [
        (asked, lambda seen: seen.asked(connection)),
        (begins, lambda seen: seen.received(connection, BEGINS)),
        (ends, lambda seen: seen.received(connection, ENDS)),
        (ends, lambda seen: seen.answered(connection, b"data: [DONE]")),
    ]


def answered(
    connection: int, asked: float, ends: float, body: bytes = b'{"status": "completed"}'
) -> list[Happening]:
    return [
        (asked, lambda seen: seen.asked(connection)),
        (ends, lambda seen: seen.answered(connection, body)),
    ]


either = pytest.mark.parametrize("told", [on_socket, streamed])


@either
def test_responses_that_wait_for_one_another_are_serial(told: Telling) -> None:
    seen = overlap(*told(1, 0, 0.5, 3), *told(2, 0.1, 3.5, 6), *told(3, 0.2, 6.5, 9))

    assert seen.is_serial


@either
def test_responses_that_are_told_side_by_side_are_not(told: Telling) -> None:
    seen = overlap(*told(1, 0, 0.5, 3), *told(2, 0.1, 0.6, 3.1), *told(3, 0.2, 3.5, 6))

    assert not seen.is_serial


@either
def test_responses_that_are_asked_for_one_by_one_are_not(told: Telling) -> None:
    seen = overlap(*told(1, 0, 0.5, 3), *told(2, 3.1, 3.5, 6), *told(3, 6.1, 6.5, 9))

    assert not seen.is_serial


@either
def test_responses_that_are_told_in_no_time_are_not(told: Telling) -> None:
    seen = overlap(*told(1, 0, 2.9, 3), *told(2, 0.1, 5.9, 6), *told(3, 0.2, 8.9, 9))

    assert not seen.is_serial


def test_time_that_goes_to_others_is_not_missing() -> None:
    seen = overlap(
        *streamed(1, 0, 0.5, 2),
        *answered(2, 0.1, 9),
        *streamed(3, 0.2, 9.5, 11),
        *answered(4, 0.3, 20),
        *streamed(5, 0.4, 20.5, 22),
    )

    assert seen.is_serial


@pytest.mark.parametrize(
    ("body", "is_serial"),
    [
        (b'{"status": "completed"}', False),
        (b'{"status": "queued"}', True),
        (b'{"error": {"message": "no"}}', True),
        (b"", True),
    ],
)
def test_a_response_that_ends_while_another_is_told_is_not_serial(
    body: bytes, is_serial: bool
) -> None:
    seen = overlap(
        *streamed(1, 0, 0.5, 3),
        *answered(2, 0.1, 1, body),
        *streamed(3, 0.1, 3.5, 6),
        *streamed(4, 0.2, 6.5, 9),
    )

    assert seen.is_serial is is_serial


@pytest.mark.parametrize("num_streams", [0, 2])
def test_few_streams_among_many_answers_say_nothing(num_streams: int) -> None:
    streams = [
        happening for i in range(num_streams) for happening in streamed(i, 0, i + 0.2, i + 1)
    ]
    answers = [happening for i in range(num_streams, 6) for happening in answered(i, 0, i + 1)]

    assert not overlap(*streams, *answers).is_serial


def test_one_of_many_may_be_read_late() -> None:
    told = [happening for i in range(10) for happening in streamed(i, 0, i + 0.2, i + 1)]

    assert overlap(*told, *streamed(10, 0, 9.9, 11)).is_serial
    assert not overlap(*told, *streamed(10, 0, 9.9, 11), *streamed(11, 0, 10.9, 12)).is_serial


def test_what_is_no_event_is_read_over() -> None:
    seen = Overlap()

    seen.sent(1, b"\xff")
    seen.sent(1, "[" * 100_000)
    seen.received(1, "[DONE]")
    seen.received(1, ENDS)
    seen.answered(1, b'{"status": 5}')

    assert not seen.is_serial
