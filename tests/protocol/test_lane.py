from itertools import product

import pytest

from protocol.lane import TRANSITIONS, Lane, LaneEvent, LaneState
from protocol.transitions import InvalidTransitionError

WAY_TO: dict[LaneState, list[LaneEvent]] = {
    LaneState.IDLE: [],
    LaneState.SAMPLING: [LaneEvent.CREATE],
    LaneState.SUSPENDED: [LaneEvent.CREATE, LaneEvent.SUSPEND],
}


def lane_in(state: LaneState) -> Lane:
    lane = Lane()
    for event in WAY_TO[state]:
        lane.apply(event)
    return lane


@pytest.mark.parametrize(("state", "event"), [*product(LaneState, LaneEvent)])
def test_a_lane_takes_the_steps_of_the_table_and_an_illegal_one_changes_nothing(
    state: LaneState, event: LaneEvent
) -> None:
    lane = lane_in(state)

    if event in TRANSITIONS[state]:
        assert lane.apply(event) is TRANSITIONS[state][event]
        assert lane.state is TRANSITIONS[state][event]
    else:
        with pytest.raises(InvalidTransitionError):
            lane.apply(event)
        assert lane.state is state


def test_every_state_has_a_row() -> None:
    assert TRANSITIONS.keys() == set(LaneState)


def test_a_partial_append_holds_and_the_last_one_resumes() -> None:
    lane = lane_in(LaneState.SUSPENDED)

    assert lane.apply(LaneEvent.HOLD) is LaneState.SUSPENDED
    assert lane.apply(LaneEvent.APPEND) is LaneState.SAMPLING


def test_an_abandoned_response_leaves_the_lane_free() -> None:
    lane = lane_in(LaneState.SUSPENDED)

    lane.apply(LaneEvent.ABANDON)

    assert lane.apply(LaneEvent.CREATE) is LaneState.SAMPLING
