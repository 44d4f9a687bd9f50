"""A server that takes one response at a time is told from one that is only fast."""

from collections.abc import Iterator

from scripts.conformance.overlap import Overlap

CREATE = '{"type": "response.create"}'
BEGINS = '{"type": "response.output_item.added"}'
ENDS = '{"type": "response.completed"}'


def overlap(*happenings: tuple[float, int, str]) -> Overlap:
    """Return what is known after frames of so many connections, at so many seconds."""
    times = sorted(happenings)
    clock: Iterator[float] = iter([seconds for seconds, _, _ in times])
    seen = Overlap(clock=lambda: next(clock))
    for _, connection, frame in times:
        (seen.sent if frame == CREATE else seen.received)(connection, frame)
    return seen


def told(connection: int, asked: float, begins: float, ends: float) -> list[tuple[float, int, str]]:
    return [(asked, connection, CREATE), (begins, connection, BEGINS), (ends, connection, ENDS)]


def test_responses_that_wait_for_one_another_are_serial() -> None:
    seen = overlap(*told(1, 0, 0.5, 3), *told(2, 0.1, 3.5, 6), *told(3, 0.2, 6.5, 9))

    assert seen.is_serial


def test_responses_that_are_told_side_by_side_are_not() -> None:
    seen = overlap(*told(1, 0, 0.5, 3), *told(2, 0.1, 0.6, 3.1), *told(3, 0.2, 3.5, 6))

    assert not seen.is_serial


def test_responses_that_are_asked_for_one_by_one_are_not() -> None:
    seen = overlap(*told(1, 0, 0.5, 3), *told(2, 3.1, 3.5, 6), *told(3, 6.1, 6.5, 9))

    assert not seen.is_serial


def test_responses_that_are_told_in_no_time_are_not() -> None:
    seen = overlap(*told(1, 0, 2.9, 3), *told(2, 0.1, 5.9, 6), *told(3, 0.2, 8.9, 9))

    assert not seen.is_serial


def test_what_is_no_event_is_read_over() -> None:
    seen = Overlap()

    seen.sent(1, b"\xff")
    seen.sent(1, "[" * 100_000)
    seen.received(1, "[DONE]")
    seen.received(1, ENDS)

    assert not seen.is_serial
