"""What is claimed of a suspended run, checked for any dialogue."""

import httpx2

from protocol.tools import ToolChoice, ToolChoiceMode, parse_tools
from server.pre_inference import constraint_of
from tests.equivalence.conftest import RealServer
from tests.equivalence.dialogues import (
    TOOLS,
    Dialogue,
    Held,
    JsonObject,
    hold_stateless,
    hold_suspended,
)
from tests.equivalence.reference import Turn


def suspended(server: RealServer, dialogue: Dialogue, sampling: JsonObject) -> Held:
    """Hold ``dialogue`` as a suspended run, or return what came of it before.

    Another run is sampled while it is suspended for the first time.
    """
    key = (dialogue.question, str(sampling))
    if key not in server.held:
        server.held[key] = hold_suspended(
            server.url, dialogue, sampling, lambda: sample_something_else(server)
        )
    return server.held[key]


def sample_something_else(server: RealServer) -> None:
    body = {"input": "Tell me a story.", "max_output_tokens": 3}
    assert httpx2.post(f"{server.url}/v1/responses", json=body, timeout=60).status_code == 200


def check_tokens_are_those_of_an_uninterrupted_loop(
    server: RealServer, dialogue: Dialogue, sampling: JsonObject
) -> None:
    run = server.run_of(suspended(server, dialogue, sampling).segments[0]["id"])

    tools = parse_tools(TOOLS)
    forced = constraint_of(tools, ToolChoice(ToolChoiceMode.REQUIRED), parallel=False)
    free = constraint_of(tools, ToolChoice(ToolChoiceMode.NONE), parallel=False)
    turns = [Turn(forced, outputs) for outputs in dialogue.outputs] + [Turn(free)]
    prompt_ids = run.tokens.ids[: run.segments[0].input_tokens]
    assert run.tokens.ids == tuple(server.reference.sample(prompt_ids, run.params, turns))
    assert len(run.segments) == len(dialogue.outputs) + 1
    assert run.num_forwarded == len(run.tokens) - 1
    assert run.tokens_reforwarded == 0


def check_tokens_are_those_of_the_stateless_design(
    server: RealServer, dialogue: Dialogue, sampling: JsonObject
) -> str:
    """Check each segment whose history encodes to the ids that were sampled.

    Encoding the text of what was sampled need not give its ids. Returns a line that says how many
    histories drifted so.
    """
    held = suspended(server, dialogue, sampling)
    run = server.run_of(held.segments[0]["id"])
    responses = hold_stateless(server.url, dialogue, sampling, held)

    drifted = 0
    for segment, response in zip(run.segments, responses, strict=True):
        stateless = server.run_of(response["id"])
        start, stop = segment.input_tokens, segment.input_tokens + segment.output_tokens
        prompt = stateless.tokens.ids[: stateless.segments[0].input_tokens]
        if prompt == run.tokens.ids[:start]:
            assert stateless.tokens.ids == run.tokens.ids[:stop]
        else:
            drifted += 1
    # The first prompt holds nothing sampled, so it can never drift.
    assert drifted < len(responses)
    return f"{drifted} of {len(responses)} histories drifted"
