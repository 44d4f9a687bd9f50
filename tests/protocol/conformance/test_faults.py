"""The checks pass on a correct server, and each fault is caught by the check meant for it."""

from collections import Counter

import pytest

from protocol.conformance.catalogue import CHECKS, chosen
from protocol.conformance.check import Check
from protocol.conformance.play import Result
from protocol.conformance.rules import Rule
from tests.protocol.conformance.faults.catalogue import FAULTS
from tests.protocol.conformance.faults.fault import Fault
from tests.protocol.conformance.playing import played

NO_MODEL_HERE = {Rule.CUSTOM_CALL_EVENTS, Rule.REASONING_EVENTS, Rule.COMPACTION_EVENTS}
"""Rules about what the model server never says; ``test_stream_grammar`` sees that they are kept."""


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_correct_server_passes(check: Check) -> None:
    verdict = played(check)

    assert verdict.result is Result.PASSED, verdict
    assert verdict.num_requests == check.num_requests, "the budget is told right"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_fault_is_caught_by_the_check_meant_for_it(fault: Fault) -> None:
    meant = chosen(CHECKS, patterns=[fault.caught_by])
    assert meant, f"no check is called {fault.caught_by}"

    for check in meant:
        verdict = played(check, fault.server())

        assert (verdict.result, verdict.rule) == (Result.FAILED, fault.rule), verdict
        assert verdict.message
        assert verdict.lines, "the frames show it"


def test_names_are_used_once() -> None:
    assert max(Counter(check.name for check in CHECKS).values()) == 1
    assert max(Counter(fault.name for fault in FAULTS).values()) == 1


def test_there_is_a_fault_for_every_rule() -> None:
    told = {fault.rule for fault in FAULTS}

    cited = {check.rule for check in CHECKS}
    assert cited <= told
    assert set(Rule) - told <= NO_MODEL_HERE


def test_every_check_is_able_to_fail() -> None:
    able = {check.name for fault in FAULTS for check in chosen(CHECKS, patterns=[fault.caught_by])}

    assert {check.name for check in CHECKS} <= able
