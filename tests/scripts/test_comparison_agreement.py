"""Designs are compared token by token, up to where they begin to differ."""

import msgspec
import pytest

from scripts.comparison import agreement
from scripts.comparison.agents import CompareError, Endpoint, Heard
from scripts.comparison.agreement import (
    DESIGNS,
    GREEDY,
    KEEP_TOKENS,
    WARM,
    Difference,
    Plan,
    SampledTurn,
    difference,
    disagrees,
    measure_agreement,
)
from scripts.comparison.results import Agreement, Design
from server.settings import Settings
from tests.server.running import serving
from tests.tiny_model import tiny_engine


def turn(*token_ids: int, context: str = "c") -> SampledTurn:
    return SampledTurn(token_ids, context)


def test_the_same_tokens_are_no_difference() -> None:
    run = [turn(1, 2), turn(3)]

    assert difference(run, run) == Difference(2, 3, True, 0, 0)


def test_a_context_in_other_tokens_has_drifted_even_if_all_else_is_the_same() -> None:
    found = difference([turn(1), turn(2, context="d")], [turn(1), turn(2)])

    assert found == Difference(2, 2, True, 1, 0)


def test_nothing_is_compared_after_the_first_turn_that_differs() -> None:
    run = [turn(1), turn(2, 9, 4, 5), turn(7, context="d")]

    found = difference(run, [turn(1), turn(2, 3, 4), turn(8)])

    assert found == Difference(2, 5, False, 0, 2)


def test_runs_of_a_design_are_summed_up() -> None:
    found = agreement.agreement(
        Design.STATELESS, WARM, [Difference(3, 30, True, 1, 0), Difference(2, 20, False, 2, 4)]
    )

    assert found == Agreement(
        design="stateless",
        sampler="temperature 0.7",
        num_runs=2,
        num_turns=5,
        num_tokens=50,
        equal_runs=1,
        drifted_turns=3,
        differing_tokens=4,
    )


SAME = Agreement(
    design="chained",
    sampler="greedy",
    num_runs=3,
    num_turns=6,
    num_tokens=300,
    equal_runs=3,
    drifted_turns=0,
    differing_tokens=0,
)


def test_designs_that_keep_their_tokens_are_all_but_one() -> None:
    assert set(KEEP_TOKENS) == {
        *(Design.SUSPENDED_AGAIN, Design.SUSPENDED_INJECT),
        *(Design.CHAINED, Design.STATELESS_CACHE),
    }
    assert set(DESIGNS) == {*KEEP_TOKENS, Design.STATELESS}


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize(
    "members", [{"equal_runs": 2, "differing_tokens": 1}, {"drifted_turns": 1}]
)
def test_only_a_design_that_keeps_nothing_may_differ(
    design: Design, members: dict[str, int]
) -> None:
    same = msgspec.structs.replace(SAME, design=design)

    assert not disagrees(same)
    assert disagrees(msgspec.structs.replace(same, **members)) == (design != Design.STATELESS)


def test_a_plan_is_greedy_first() -> None:
    plan = Plan(num_turns=2, num_greedy=1, num_warm=2)

    assert list(plan.runs()) == [(GREEDY, 0), (WARM, 0), (WARM, 1)]
    assert plan.num_runs([Design.CHAINED]) == 6
    assert plan.num_runs([Design.CHAINED, Design.SUSPENDED_INJECT]) == 12


@pytest.mark.slow
async def test_designs_that_keep_tokens_sample_the_same() -> None:
    engine = tiny_engine(max_context=4096)

    async with serving(engine=engine, settings=Settings(recent_responses=16)) as running:
        found = await measure_agreement(Endpoint(running.url, "tiny"), Plan(2, 0, 1))

    assert [each.design for each in found] == list(DESIGNS)
    for each in found:
        assert each.sampler == WARM.name
        assert each.num_runs == 1
        assert each.num_turns == 2
        assert each.num_tokens > 80
        if each.design != Design.STATELESS:
            assert each.equal_runs == 1
            assert each.drifted_turns == each.differing_tokens == 0


async def test_a_server_that_tells_no_tokens_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        async def ask(self, question: object) -> Heard:
            call = {"type": "function_call", "call_id": "call_1"}
            return Heard(sent_at=0.0, items=[call], response={"suspend:run": {"turns": [{}]}})

        async def __aenter__(self) -> "Silent":
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(agreement, "client_of", lambda *_: Silent())

    with pytest.raises(CompareError, match="tells no tokens"):
        await measure_agreement(Endpoint("http://127.0.0.1:1", "tiny"), Plan(1, 1, 0))


@pytest.mark.slow
async def test_a_model_that_never_comes_to_an_end_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agreement, "_MOST_FREE_TURNS", 1)
    engine = tiny_engine(max_context=4096)

    async with serving(engine=engine, settings=Settings()) as running:
        with pytest.raises(CompareError, match="calls in each of 1 turns"):
            await measure_agreement(
                Endpoint(running.url, "tiny"), Plan(2, 1, 0), [Design.SUSPENDED_INJECT]
            )
