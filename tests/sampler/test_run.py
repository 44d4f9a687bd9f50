from itertools import product

import pytest

from protocol.transitions import InvalidTransitionError
from sampler.params import Constraint, SamplingParams
from sampler.run import TRANSITIONS, Origin, Run, RunEvent, RunState, Segment, Span, TokenLog

WAY_TO: dict[RunState, list[RunEvent]] = {
    RunState.QUEUED: [],
    RunState.PREFILLING: [RunEvent.PREFILL],
    RunState.DECODING: [RunEvent.PREFILL, RunEvent.DECODE],
    RunState.SUSPENDED: [RunEvent.PREFILL, RunEvent.DECODE, RunEvent.SUSPEND],
    RunState.COMPLETED: [RunEvent.PREFILL, RunEvent.DECODE, RunEvent.COMPLETE],
    RunState.INCOMPLETE: [RunEvent.PREFILL, RunEvent.DECODE, RunEvent.TRUNCATE],
    RunState.FAILED: [RunEvent.FAIL],
    RunState.CANCELLED: [RunEvent.CANCEL],
}
FINISHED = {RunState.COMPLETED, RunState.INCOMPLETE, RunState.FAILED, RunState.CANCELLED}


def new_run() -> Run:
    return Run("run", SamplingParams(), Constraint())


def run_in(state: RunState) -> Run:
    run = new_run()
    for event in WAY_TO[state]:
        run.apply(event)
    assert run.state is state
    return run


def log_of(*spans: tuple[list[int], Origin]) -> TokenLog:
    log = TokenLog()
    for token_ids, origin in spans:
        log.append(token_ids, origin)
    return log


# --- Life cycle ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "event"), [(state, event) for state in TRANSITIONS for event in TRANSITIONS[state]]
)
def test_a_legal_event_leads_to_the_state_of_the_table(state: RunState, event: RunEvent) -> None:
    run = run_in(state)

    run.apply(event)

    assert run.state is TRANSITIONS[state][event]


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (state, event)
        for state, event in product(RunState, RunEvent)
        if event not in TRANSITIONS[state]
    ],
)
def test_an_illegal_event_raises_and_changes_nothing(state: RunState, event: RunEvent) -> None:
    run = run_in(state)
    run.tokens.append([1, 2], Origin.PROMPT)
    run.record_forward(0, 2)
    before = {**vars(run), "tokens": run.tokens.ids, "spans": run.tokens.spans}

    with pytest.raises(InvalidTransitionError, match=f"{event.value}.*{state.value}"):
        run.apply(event)

    assert {**vars(run), "tokens": run.tokens.ids, "spans": run.tokens.spans} == before


def test_every_state_has_a_row() -> None:
    assert TRANSITIONS.keys() == set(RunState)


@pytest.mark.parametrize("state", RunState)
def test_a_run_is_finished_where_no_event_leads_on(state: RunState) -> None:
    assert run_in(state).is_finished is (state in FINISHED)


@pytest.mark.parametrize("state", [state for state in RunState if state not in FINISHED])
@pytest.mark.parametrize("event", [RunEvent.FAIL, RunEvent.CANCEL])
def test_every_unfinished_run_can_fail_and_be_cancelled(state: RunState, event: RunEvent) -> None:
    run = run_in(state)

    run.apply(event)

    assert run.is_finished


def test_a_suspended_run_prefills_again_when_it_resumes() -> None:
    run = run_in(RunState.SUSPENDED)

    run.apply(RunEvent.RESUME)

    assert run.state is RunState.PREFILLING


def test_two_runs_of_one_id_are_different_runs() -> None:
    assert new_run() != new_run()
    assert len({new_run(), new_run()}) == 2


# --- Token log -----------------------------------------------------------------------------------


def test_a_log_keeps_the_ids_in_the_order_appended() -> None:
    log = log_of(([1, 2], Origin.PROMPT), ([3], Origin.SAMPLED), ([4, 5], Origin.APPENDED))

    assert log.ids == (1, 2, 3, 4, 5)
    assert len(log) == 5
    assert log.last == 5


def test_adjoining_spans_of_one_origin_are_one() -> None:
    log = log_of(
        ([1, 2], Origin.PROMPT),
        ([3], Origin.SAMPLED),
        ([4], Origin.SAMPLED),
        ([5], Origin.SAMPLED),
        ([6, 7], Origin.APPENDED),
        ([8], Origin.SAMPLED),
    )

    assert log.spans == (
        Span(0, 2, Origin.PROMPT),
        Span(2, 5, Origin.SAMPLED),
        Span(5, 7, Origin.APPENDED),
        Span(7, 8, Origin.SAMPLED),
    )


@pytest.mark.parametrize("origins", [*product(Origin, repeat=4)])
def test_spans_cover_the_whole_log_once_and_never_touch_their_like(
    origins: tuple[Origin, ...],
) -> None:
    log = log_of(*(([7] * length, origin) for length, origin in enumerate(origins)))

    positions = [p for span in log.spans for p in range(span.start, span.stop)]
    assert positions == list(range(len(log)))
    assert all(a.origin is not b.origin for a, b in zip(log.spans, log.spans[1:], strict=False))


def test_appending_nothing_makes_no_span() -> None:
    log = log_of(([1], Origin.PROMPT), ([], Origin.APPENDED), ([2], Origin.PROMPT))

    assert log.spans == (Span(0, 2, Origin.PROMPT),)


def test_since_gives_the_ids_from_a_position_on() -> None:
    log = log_of(([1, 2, 3], Origin.PROMPT))

    assert log.since(0) == [1, 2, 3]
    assert log.since(2) == [3]
    assert log.since(3) == []


def test_what_a_log_gave_out_does_not_change_with_it() -> None:
    log = log_of(([1], Origin.PROMPT))
    ids, spans, since = log.ids, log.spans, log.since(0)
    since.append(9)

    log.append([2], Origin.PROMPT)

    assert (ids, spans) == ((1,), (Span(0, 1, Origin.PROMPT),))
    assert log.ids == (1, 2)


def test_a_log_takes_any_iterable_once() -> None:
    log = log_of(([1], Origin.PROMPT))

    log.append(iter([2, 3]), Origin.SAMPLED)

    assert log.ids == (1, 2, 3)
    assert log.spans[-1] == Span(1, 3, Origin.SAMPLED)


def test_what_a_segment_has_sampled_follows_what_it_was_given() -> None:
    run = new_run()
    run.tokens.append([1, 2, 3], Origin.PROMPT)
    run.segments.append(Segment(3, 0, requested_at=0.0))
    before = run.sampled_in_segment()
    run.tokens.append([4, 5], Origin.SAMPLED)
    first = run.sampled_in_segment()
    run.tokens.append([6, 7], Origin.APPENDED)
    run.segments.append(Segment(7, 4, requested_at=0.0))
    run.tokens.append([8], Origin.SAMPLED)

    assert (before, first, run.sampled_in_segment()) == ([], [4, 5], [8])


# --- Forward accounting --------------------------------------------------------------------------


def test_positions_that_follow_each_other_are_never_reforwarded() -> None:
    run = new_run()

    reforwarded = [
        run.record_forward(0, 10),
        run.record_forward(10, 11),
        run.record_forward(11, 30),
    ]

    assert reforwarded == [0, 0, 0]
    assert run.num_forwarded == 30
    assert run.tokens_reforwarded == 0


@pytest.mark.parametrize(
    ("start", "stop", "reforwarded", "high_water"),
    [
        (0, 10, 10, 10),  # all of it, after a discard
        (0, 4, 4, 10),  # a first chunk of it
        (4, 7, 3, 10),  # a chunk in the middle
        (0, 15, 10, 15),  # all of it and the suffix
        (8, 12, 2, 12),  # across the high-water mark
        (10, 10, 0, 10),  # nothing
    ],
)
def test_positions_below_the_high_water_mark_are_reforwarded(
    start: int, stop: int, reforwarded: int, high_water: int
) -> None:
    run = new_run()
    run.record_forward(0, 10)

    assert run.record_forward(start, stop) == reforwarded
    assert run.num_forwarded == high_water
    assert run.tokens_reforwarded == reforwarded


def test_reforwarded_positions_add_up_over_a_discard_in_chunks() -> None:
    run = new_run()
    run.record_forward(0, 10)

    counts = [run.record_forward(start, start + 4) for start in (0, 4, 8)]

    assert counts == [4, 4, 2]
    assert run.tokens_reforwarded == 10
    assert run.num_forwarded == 12


# --- Segments ------------------------------------------------------------------------------------


def test_durations_of_a_segment_add_up_from_request_to_end() -> None:
    segment = Segment(
        10, 3, requested_at=100.0, started_at=101.0, first_token_at=103.5, ended_at=110.0
    )

    assert segment.queue_seconds == 1.0
    assert segment.prefill_seconds == 2.5
    assert segment.decode_seconds == 6.5
    assert segment.time_to_first_token == 3.5


def test_a_segment_that_has_not_come_so_far_took_no_time_there() -> None:
    queued = Segment(10, 0, requested_at=100.0)
    prefilling = Segment(10, 0, requested_at=100.0, started_at=101.0)

    assert (queued.queue_seconds, queued.prefill_seconds, queued.decode_seconds) == (0, 0, 0)
    assert queued.time_to_first_token is None
    assert (prefilling.queue_seconds, prefilling.prefill_seconds) == (1.0, 0)
    assert prefilling.time_to_first_token is None


def test_a_segment_at_time_zero_has_durations() -> None:
    segment = Segment(1, 0, requested_at=0.0, started_at=0.0, first_token_at=0.0, ended_at=2.0)

    assert segment.decode_seconds == 2.0
    assert segment.time_to_first_token == 0.0
