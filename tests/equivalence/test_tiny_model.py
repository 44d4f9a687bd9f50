"""The claim of the project, in every dialect: however a dialogue is held, its tokens are the same.

It is held with random weights here, in float32 and over real sockets. So small a model takes the
same path as a large one and is as exact, and there is more to get wrong with it: turns of several
calls, calls and text that are cut short, and hardly a turn that encoding would give the same ids.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from tests.equivalence import claims
from tests.equivalence.dialogues import Dialogue
from tests.equivalence.models import Subject
from tests.equivalence.ways import WAYS, Stage

pytestmark = pytest.mark.slow

MESSAGES = ("What is the weather?", "And in Lima?")
FORCED = Dialogue("forced", MESSAGES, forced_rounds=1, max_output_tokens=48)
FREE = Dialogue("free", MESSAGES, temperature=1, is_parallel=True, max_output_tokens=40)
DIALOGUES = {
    "greedy": FORCED,
    "calls at once": replace(FREE, name="calls at once", seed=58),
    "calls one by one": replace(FREE, name="calls one by one", seed=98),
}
ONE_MESSAGE = replace(FORCED, messages=MESSAGES[:1])
TEN_CALLS = replace(ONE_MESSAGE, name="ten calls", temperature=1, seed=1, forced_rounds=10)
LONG_OUTPUT = replace(ONE_MESSAGE, name="long", outputs=["The wind went west. " * 60, "", ""])
CUT_CALLS = replace(FORCED, name="cut calls", max_output_tokens=5)


@pytest.mark.parametrize("name", DIALOGUES)
@pytest.mark.parametrize("way", WAYS)
async def test_a_dialogue_is_as_uninterrupted(
    tiny_model: Subject, way: str, name: str, tmp_path: Path
) -> None:
    stage = Stage(tiny_model, DIALOGUES[name], tmp_path)

    await claims.check_as_uninterrupted(WAYS[way], stage)


@pytest.mark.parametrize("name", DIALOGUES)
async def test_a_history_sent_again_has_the_sampled_tokens_where_encoding_it_has_not(
    tiny_model: Subject,
    name: str,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    stage = Stage(tiny_model, DIALOGUES[name], tmp_path)

    record_property("re-tokenising", await claims.check_histories_over_http(stage))


def test_the_dialogues_have_turns_that_are_hard_to_keep(tiny_model: Subject) -> None:
    references = map(tiny_model.reference, DIALOGUES.values())
    rounds = list(chain.from_iterable(reference.rounds for reference in references))

    assert any(len(each.calls) > 1 for each in rounds)
    assert any(each.is_cut_short for each in rounds)
    assert sum(not each.is_canonical for each in rounds) > len(rounds) / 2


@pytest.mark.parametrize("way", ["suspended", "chained"])
async def test_a_long_output_is_prefilled_in_chunks(
    tiny_model: Subject, way: str, tmp_path: Path
) -> None:
    await claims.check_as_uninterrupted(WAYS[way], Stage(tiny_model, LONG_OUTPUT, tmp_path))


@pytest.mark.parametrize("way", [way for way in WAYS if way != "resent"])
async def test_a_call_that_was_cut_short_stays_where_it_was_sampled(
    tiny_model: Subject, way: str, tmp_path: Path
) -> None:
    """A client that sends all again has nothing to send of it."""
    await claims.check_as_uninterrupted(WAYS[way], Stage(tiny_model, CUT_CALLS, tmp_path))


@pytest.mark.parametrize("temperature", [0, 1], ids=["greedy", "seeded"])
async def test_a_fork_and_its_trunk_go_on_by_themselves(
    tiny_model: Subject, temperature: int, tmp_path: Path
) -> None:
    trunk, fork = (
        replace(FORCED, name=f"{text} {temperature}", temperature=temperature, outputs=[text])
        for text in ("dry", "rather wet")
    )

    await claims.check_a_fork_and_its_trunk_side_by_side(Stage(tiny_model, trunk, tmp_path), fork)
    await claims.check_a_fork_after_its_trunk(Stage(tiny_model, trunk, tmp_path), fork)


async def test_the_token_log_of_ten_calls_tells_who_put_each_token_there(
    tiny_model: Subject, tmp_path: Path
) -> None:
    stage = Stage(tiny_model, TEN_CALLS, tmp_path)

    await claims.check_the_log_tells_who_put_each_token_there(stage)
