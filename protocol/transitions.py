"""Life cycles as tables.

Every life cycle of the project is one literal, ``dict[State, dict[Event, State]]``, and this
function is the only thing that reads it. A step that the table lacks does not exist; asking for it
is a bug, whose report names both ends (after h11's ``_state.py``).
"""

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

StateT = TypeVar("StateT", bound=Enum)
EventT = TypeVar("EventT", bound=Enum)


class InvalidTransitionError(RuntimeError):
    """A life cycle was asked for a step that its table does not have."""


def next_state(
    table: Mapping[StateT, Mapping[EventT, StateT]], state: StateT, event: EventT
) -> StateT:
    """Return the state that ``event`` leads to from ``state``.

    Raises:
        InvalidTransitionError: the table has no such step.
    """
    try:
        return table[state][event]
    except KeyError:
        raise InvalidTransitionError(f"{event.value} is not possible in {state.value}") from None
