from enum import Enum

import pytest

from protocol.transitions import InvalidTransitionError, next_state


class Door(Enum):
    OPEN = "open"
    SHUT = "shut"


class Push(Enum):
    PUSH = "push"


TABLE = {Door.OPEN: {Push.PUSH: Door.SHUT}}


def test_a_step_of_the_table_leads_to_its_state() -> None:
    assert next_state(TABLE, Door.OPEN, Push.PUSH) is Door.SHUT


def test_a_missing_step_raises_and_names_both_ends() -> None:
    with pytest.raises(InvalidTransitionError, match=r"push.*shut"):
        next_state(TABLE, Door.SHUT, Push.PUSH)
