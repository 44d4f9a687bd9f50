"""The claim of the project on a real model: one dialogue, in every dialect.

It is sampled at temperature 1. The model makes a call; says something with emoji, cut short inside
one, to which encoding would give other ids; makes another call when it is asked again; and ends by
itself.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.equivalence import claims
from tests.equivalence.dialogues import Dialogue
from tests.equivalence.models import Subject
from tests.equivalence.ways import WAYS, Stage

pytestmark = pytest.mark.slow

DIALOGUE = Dialogue(
    "two cities",
    ("What is the weather in Oslo?", "And is it warmer in Lima?"),
    temperature=1,
    seed=1,
    forced_rounds=1,
)


@pytest.mark.parametrize("way", WAYS)
async def test_a_dialogue_is_as_uninterrupted(
    embedded_model: Subject, way: str, tmp_path: Path
) -> None:
    await claims.check_as_uninterrupted(WAYS[way], Stage(embedded_model, DIALOGUE, tmp_path))


async def test_a_history_sent_again_has_the_sampled_tokens_where_encoding_it_has_not(
    embedded_model: Subject, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    stage = Stage(embedded_model, DIALOGUE, tmp_path)

    record_property("re-tokenising", await claims.check_histories_over_http(stage))
