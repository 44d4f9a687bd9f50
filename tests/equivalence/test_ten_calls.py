"""The claim of the project, over ten tool calls in one run."""

from collections.abc import Callable

import pytest

from tests.equivalence.claims import (
    check_tokens_are_those_of_an_uninterrupted_loop,
    check_tokens_are_those_of_the_stateless_design,
)
from tests.equivalence.conftest import RealServer
from tests.equivalence.dialogues import GREEDY, SEEDED, TEN_CALLS, JsonObject

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_suspended_run_has_the_tokens_of_an_uninterrupted_one(
    real_server: RealServer, sampling: JsonObject
) -> None:
    check_tokens_are_those_of_an_uninterrupted_loop(real_server, TEN_CALLS, sampling)


def test_the_stateless_design_has_the_same_tokens_wherever_its_history_encodes_to_them(
    real_server: RealServer, record_property: Callable[[str, object], None]
) -> None:
    drift = check_tokens_are_those_of_the_stateless_design(real_server, TEN_CALLS, GREEDY)

    record_property("re-tokenising", drift)
