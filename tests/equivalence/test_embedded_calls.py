"""The claim of the project on a real model: calls at once, and many one after the other."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.equivalence import claims
from tests.equivalence.dialogues import Dialogue
from tests.equivalence.models import Subject
from tests.equivalence.ways import Stage, Way, injected, suspended

pytestmark = pytest.mark.slow

TWO_CALLS = Dialogue(
    "two calls",
    ["What is the weather in Oslo and in Paris?"],
    forced_rounds=1,
    is_parallel=True,
    max_output_tokens=60,
)
FOUR_KILOBYTES = ("The wind went north-west, and the fog lifted. " * 90)[:4096]
TEN_CALLS = Dialogue(
    "ten calls",
    ["Roll some dice, again and again."],
    [FOUR_KILOBYTES, *(f"roll {n}: {n % 6 + 1}" for n in range(1, 10))],
    temperature=1,
    seed=2,
    forced_rounds=10,
)


@pytest.mark.parametrize("way", [suspended, injected], ids=["suspended", "injected"])
async def test_calls_at_once_are_answered_in_any_order(
    embedded_model: Subject, way: Way, tmp_path: Path
) -> None:
    stage = Stage(embedded_model, TWO_CALLS, tmp_path)
    assert len(stage.reference.rounds[0].calls) == 2

    await claims.check_as_uninterrupted(way, stage)


async def test_a_history_sent_again_has_the_sampled_tokens(
    embedded_model: Subject, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    stage = Stage(embedded_model, TWO_CALLS, tmp_path)

    record_property("re-tokenising", await claims.check_histories_over_http(stage))


async def test_ten_calls_and_a_long_output_are_one_run(
    embedded_model: Subject, tmp_path: Path
) -> None:
    stage = Stage(embedded_model, TEN_CALLS, tmp_path)

    await claims.check_as_uninterrupted(suspended, stage)
