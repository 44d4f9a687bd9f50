"""The claim of the project: suspending changes nothing.

In float32 on the real model, a run that is suspended at each tool call and resumed by an append has
the very tokens of a loop that was never interrupted; and those of the stateless design, wherever
encoding the history again gives the ids that were sampled.
"""

import time
from collections.abc import Callable

import pytest

from protocol.items import Message
from protocol.tools import function_tools, parse_tools
from sampler.conversation import Conversation
from sampler.engine import Engine, Resumption
from sampler.params import SamplingParams, ToolConstraint
from sampler.run import Origin
from sampler.suspension import Suspension
from tests.equivalence.claims import (
    check_tokens_are_those_of_an_uninterrupted_loop,
    check_tokens_are_those_of_the_stateless_design,
    suspended,
)
from tests.equivalence.conftest import RealServer
from tests.equivalence.dialogues import (
    FOUR_KILOBYTES,
    GREEDY,
    ONE_CALL,
    SEEDED,
    THREE_CALLS,
    TOOLS,
    Dialogue,
    JsonObject,
)
from tests.equivalence.reference import Turn

pytestmark = pytest.mark.slow

DIALOGUES = {"one call": ONE_CALL, "three calls": THREE_CALLS, "four kilobytes": FOUR_KILOBYTES}


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("dialogue", DIALOGUES.values(), ids=DIALOGUES.keys())
def test_a_suspended_run_has_the_tokens_of_an_uninterrupted_one(
    real_server: RealServer, dialogue: Dialogue, sampling: JsonObject
) -> None:
    check_tokens_are_those_of_an_uninterrupted_loop(real_server, dialogue, sampling)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("dialogue", [ONE_CALL, THREE_CALLS], ids=["one call", "three calls"])
def test_the_stateless_design_has_the_same_tokens_wherever_its_history_encodes_to_them(
    real_server: RealServer,
    dialogue: Dialogue,
    sampling: JsonObject,
    record_property: Callable[[str, object], None],
) -> None:
    drift = check_tokens_are_those_of_the_stateless_design(real_server, dialogue, sampling)

    record_property("re-tokenising", drift)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "seeded"])
async def test_parallel_outputs_in_reverse_order_give_the_tokens_of_an_uninterrupted_run(
    real_server: RealServer, temperature: float
) -> None:
    functions = tuple(function_tools(parse_tools(TOOLS)))
    # No tool_choice demands two calls in a turn, and the model may not want them.
    two_calls, no_calls = ToolConstraint(functions, 2, 2), ToolConstraint(functions, 0, 0)
    engine = Engine(real_server.engine.model)
    question = Message("user", "What is the weather in Oslo and in Paris?")
    prompt_ids = await engine.encode_prompt(Conversation([question], None, functions))
    params = SamplingParams(temperature, seed=5, max_output_tokens=64)
    outputs = ["Oslo: 7 degrees", "Paris: 18 degrees"]

    async def append_in_reverse(suspension: Suspension) -> Resumption:
        first, second = suspension.calls
        held = suspension.answer({second.call_id: outputs[1]}).answer({first.call_id: outputs[0]})
        suffix_ids = await engine.encode_suffix(run, held)
        return Resumption(suffix_ids, time.monotonic(), no_calls)

    run = engine.open_run("parallel", prompt_ids, params, two_calls)
    async for _ in engine.sample(run, append_in_reverse):
        pass

    turns = [Turn(two_calls, outputs), Turn(no_calls)]
    assert run.tokens.ids == tuple(real_server.reference.sample(prompt_ids, params, turns))
    assert run.num_forwarded == len(run.tokens) - 1
    engine.close()


def test_the_token_log_tells_who_put_each_token_there(real_server: RealServer) -> None:
    held = suspended(real_server, ONE_CALL, GREEDY)

    run = real_server.run_of(held.segments[0]["id"])
    origins = [span.origin for span in run.tokens.spans]
    assert origins == [Origin.PROMPT, Origin.SAMPLED, Origin.APPENDED, Origin.SAMPLED]
