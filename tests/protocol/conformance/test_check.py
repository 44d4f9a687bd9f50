"""Checks are declared in a few lines, chosen by name, way or rule, and paid for."""

from protocol.conformance.actions import Close, Scenario
from protocol.conformance.catalogue import CHECKS, chosen
from protocol.conformance.check import Checks, Cost, Target, Way, affordable
from protocol.conformance.rules import Rule


def two_checks() -> Checks:
    checks = Checks()

    @checks.over(Way.HTTP, Way.APPEND, rule=Rule.WARM_UP, requests=3, responses=2, alone=True)
    def water_is_wet(target: Target, way: Way) -> Scenario:
        """Water is wet.

        It has always been.
        """
        yield Close(way.value)

    return checks


def test_a_scenario_is_a_check_in_each_of_its_ways() -> None:
    http, append = two_checks()

    assert (http.name, append.name) == ("http/water-is-wet", "append/water-is-wet")
    assert http.says == append.says == "Water is wet."
    assert append.rule is Rule.WARM_UP
    assert append.is_alone
    assert next(append.scenario(Target())) == Close("append")


def test_the_cost_is_what_all_checks_may_spend() -> None:
    cost = Cost.of([*two_checks()], Target(max_output_tokens=10))

    assert (cost.num_requests, cost.num_output_tokens) == (6, 40)


def test_only_what_can_be_paid_for_is_chosen() -> None:
    checks = [*two_checks()]

    assert affordable(checks, 6) == checks
    assert affordable(checks, 5) == checks[:1]
    assert affordable(checks, 2) == []


def test_checks_are_chosen_by_way_name_and_rule() -> None:
    checks = [*two_checks()]

    assert chosen(checks, [Way.HTTP]) == checks[:1]
    for pattern in ("water-is-wet", "*/water-*", "warm-up"):
        assert chosen(checks, (), [pattern]) == checks
    assert chosen(checks, (), ["append/*"]) == checks[1:]
    assert chosen(checks, (), ["fire"]) == []
    assert len(chosen(CHECKS)) == len(CHECKS)


def test_a_body_has_what_the_model_needs() -> None:
    target = Target("m", 20, {"reasoning": {"effort": "none"}})

    assert target.body(input="Hi", store=None) == {
        "input": "Hi",
        "max_output_tokens": 20,
        "model": "m",
        "reasoning": {"effort": "none"},
    }
    assert "model" not in Target().body()


def test_each_check_cites_a_rule_that_has_a_source() -> None:
    for check in CHECKS:
        assert check.says.endswith(".")
        assert check.rule.text
        assert check.rule.source
        assert check.num_responses <= check.num_requests
