"""The state table of one lane: an ordered stream of responses on one connection.

At any moment a lane is idle, samples, or holds one response whose sampler waits for tool outputs.
"""

from enum import Enum

from protocol.transitions import next_state


class LaneState(Enum):
    IDLE = "idle"
    SAMPLING = "sampling"
    SUSPENDED = "suspended"


class LaneEvent(Enum):
    CREATE = "create"
    APPEND = "append"  # with the last awaited output: the response resumes
    HOLD = "hold"  # an append that leaves outputs to be awaited
    SUSPEND = "suspend"
    FINISH = "finish"
    ABANDON = "abandon"  # a create without parent arrived, or the connection is gone


TRANSITIONS: dict[LaneState, dict[LaneEvent, LaneState]] = {
    LaneState.IDLE: {
        LaneEvent.CREATE: LaneState.SAMPLING,
    },
    LaneState.SAMPLING: {
        LaneEvent.SUSPEND: LaneState.SUSPENDED,
        LaneEvent.FINISH: LaneState.IDLE,
        LaneEvent.ABANDON: LaneState.IDLE,
    },
    LaneState.SUSPENDED: {
        LaneEvent.APPEND: LaneState.SAMPLING,
        LaneEvent.HOLD: LaneState.SUSPENDED,
        LaneEvent.ABANDON: LaneState.IDLE,
    },
}


class Lane:
    """One lane. Nothing but ``apply`` changes its state."""

    def __init__(self) -> None:
        self._state = LaneState.IDLE

    @property
    def state(self) -> LaneState:
        return self._state

    def apply(self, event: LaneEvent) -> LaneState:
        """Take one step of the table and return the new state; an illegal one changes nothing."""
        self._state = next_state(TRANSITIONS, self._state, event)
        return self._state
