"""The claim of the project: suspending changes nothing.

In float32 on the real model, a run that is suspended at each tool call and resumed by an append has
the very tokens of a loop that was never interrupted.
"""

import time

import httpx2
import pytest

from protocol.items import Message
from protocol.tools import ToolChoice, ToolChoiceMode, function_tools, parse_tools
from sampler.conversation import Conversation
from sampler.engine import Engine, Resumption
from sampler.params import SamplingParams, ToolConstraint
from sampler.run import Origin, Run
from sampler.suspension import Suspension
from server.pre_inference import constraint_of
from tests.equivalence.conftest import RealServer
from tests.equivalence.dialogues import (
    FOUR_KILOBYTES,
    GREEDY,
    ONE_CALL,
    SEEDED,
    TEN_CALLS,
    THREE_CALLS,
    TOOLS,
    Dialogue,
    JsonObject,
    hold_suspended,
)
from tests.equivalence.reference import Turn

pytestmark = pytest.mark.slow

DIALOGUES = {
    "one call": ONE_CALL,
    "three calls": THREE_CALLS,
    "ten calls": TEN_CALLS,
    "four kilobytes": FOUR_KILOBYTES,
}


def uninterrupted_tokens(server: RealServer, run: Run, dialogue: Dialogue) -> tuple[int, ...]:
    """Sample the same dialogue in one go."""
    tools = parse_tools(TOOLS)
    forced = constraint_of(tools, ToolChoice(ToolChoiceMode.REQUIRED), parallel=False)
    free = constraint_of(tools, ToolChoice(ToolChoiceMode.NONE), parallel=False)
    turns = [Turn(forced, outputs) for outputs in dialogue.outputs] + [Turn(free)]
    prompt_ids = run.tokens.ids[: run.segments[0].input_tokens]
    return tuple(server.reference.sample(prompt_ids, run.params, turns))


def sample_something_else(server: RealServer) -> None:
    body = {"input": "Tell me a story.", "max_output_tokens": 3}
    assert httpx2.post(f"{server.url}/v1/responses", json=body, timeout=60).status_code == 200


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("dialogue", DIALOGUES.values(), ids=DIALOGUES.keys())
def test_a_suspended_run_has_the_tokens_of_an_uninterrupted_one(
    real_server: RealServer, dialogue: Dialogue, sampling: JsonObject
) -> None:
    held = hold_suspended(
        real_server.url, dialogue, sampling, lambda: sample_something_else(real_server)
    )

    run = real_server.run_of(held.segments[0]["id"])
    assert run.tokens.ids == uninterrupted_tokens(real_server, run, dialogue)
    assert len(run.segments) == len(dialogue.outputs) + 1
    assert run.num_forwarded == len(run.tokens) - 1
    assert run.tokens_reforwarded == 0


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
    held = hold_suspended(real_server.url, ONE_CALL, GREEDY)

    run = real_server.run_of(held.segments[0]["id"])
    origins = [span.origin for span in run.tokens.spans]
    assert origins == [Origin.PROMPT, Origin.SAMPLED, Origin.APPENDED, Origin.SAMPLED]
