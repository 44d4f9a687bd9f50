"""The stateless design samples the tokens of a suspended run wherever its history lets it.

It encodes the text of what was sampled again, and that need not give the ids that were sampled.
Where it does, the tokens are the same; where it does not, the drift is counted and shown.
"""

import pytest

from tests.equivalence.conftest import RealServer
from tests.equivalence.dialogues import (
    GREEDY,
    ONE_CALL,
    SEEDED,
    TEN_CALLS,
    THREE_CALLS,
    Dialogue,
    JsonObject,
    hold_stateless,
    hold_suspended,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("dialogue", "sampling"),
    [(ONE_CALL, SEEDED), (THREE_CALLS, GREEDY), (THREE_CALLS, SEEDED), (TEN_CALLS, GREEDY)],
    ids=["one call, seeded", "three calls, greedy", "three calls, seeded", "ten calls, greedy"],
)
def test_the_stateless_design_samples_the_same_tokens_wherever_its_history_encodes_to_them(
    real_server: RealServer,
    dialogue: Dialogue,
    sampling: JsonObject,
    capsys: pytest.CaptureFixture[str],
) -> None:
    held = hold_suspended(real_server.url, dialogue, sampling)
    suspended = real_server.run_of(held.segments[0]["id"])

    responses = hold_stateless(real_server.url, dialogue, sampling, held)

    drifted = 0
    for segment, response in zip(suspended.segments, responses, strict=True):
        stateless = real_server.run_of(response["id"])
        start, stop = segment.input_tokens, segment.input_tokens + segment.output_tokens
        prompt = stateless.tokens.ids[: stateless.segments[0].input_tokens]
        if prompt == suspended.tokens.ids[:start]:
            assert stateless.tokens.ids == suspended.tokens.ids[:stop]
        else:
            drifted += 1
    with capsys.disabled():
        print(f"\nre-tokenising drift: {drifted} of {len(responses)} histories")  # noqa: T201
    # The first prompt holds nothing sampled, so it can never drift.
    assert drifted < len(responses)
