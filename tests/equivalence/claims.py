"""What is claimed of a dialogue, in whatever way it is held."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from sampler.run import Origin
from tests.equivalence.dialogues import Dialogue
from tests.equivalence.reference import Reference, Round
from tests.equivalence.ways import (
    KEEPING,
    Stage,
    Way,
    injected,
    message,
    resent_over_http,
    stored,
    suspended,
    whole,
)
from tests.server.http_client import cached_tokens, context_length, post
from tests.server.running import TERMINAL, Client, Event, output


@dataclass
class Held:
    """What came of a dialogue."""

    responses: list[Event] = field(default_factory=list)
    """As each closing event has it."""
    asked: list[tuple[list[Event], str]] = field(default_factory=list)
    """Of each round all that was said before, as it came, and the tool choice."""


async def hold(way: Way, stage: Stage) -> Held:
    """Hold a dialogue to its end. After its first round something else is sampled."""
    held = Held()
    history: list[Event] = []
    num_calls = 0
    async with way(stage) as ask:
        for text in stage.dialogue.messages:
            new_items = [message(text)]
            round_number = 0
            while new_items:
                tool_choice = "required" if stage.dialogue.is_forced(round_number) else "auto"
                history += new_items
                held.asked.append(([*history], tool_choice))
                answer = await ask(new_items, tool_choice)
                if len(held.asked) == 1:
                    await stage.interfere()
                held.responses += [answer.response] if answer.response else []
                said = whole(answer.items)
                history += said
                calls = [item for item in said if item["type"] == "function_call"]
                outputs = [
                    output(call, stage.dialogue.output(num_calls + index))
                    for index, call in enumerate(calls)
                ]
                new_items = outputs[::-1]  # they may come in any order
                num_calls += len(calls)
                round_number += 1
    return held


# --- However it is held --------------------------------------------------------------------------


async def check_as_uninterrupted(way: Way, stage: Stage) -> None:
    """Check all token ids and what each was drawn from; and that nothing was computed twice, but
    for a server that was started anew."""
    held = await hold(way, stage)

    _check_log(stage, held.responses[-1])
    if way is not stored:
        _check_nothing_was_computed_twice(stage, held.responses)
    if way not in (stored, injected):
        assert len(held.responses) == len(stage.reference.rounds)
        for response, following in pairwise(held.responses):
            assert cached_tokens(following) == context_length(response)


def _check_log(stage: Stage, last: Event) -> None:
    assert stage.run_of(last).tokens.ids == stage.reference.token_ids
    for each in stage.reference.rounds:
        _check_logits(stage, stage.reference, each)


def _check_logits(stage: Stage, reference: Reference, each: Round) -> None:
    """Check what the tokens of a round were drawn from: a token can be the right one by chance.

    The tolerance is for what a new server computes again, in pieces of other sizes.
    """
    for position in range(each.start, each.stop):
        found = stage.logits_after(reference.token_ids[:position])
        torch.testing.assert_close(found, reference.logits[position], atol=1e-3, rtol=0)


def _check_nothing_was_computed_twice(stage: Stage, responses: Sequence[Event]) -> None:
    reports = {response["id"]: response["suspend:run"] for response in responses}
    num_forwarded = sum(report["tokens_forwarded"] for report in reports.values())
    # The last token is sampled and never read.
    assert num_forwarded == len(stage.reference.token_ids) - 1
    assert not any(report["tokens_reforwarded"] for report in reports.values())


async def check_the_log_tells_who_put_each_token_there(stage: Stage) -> None:
    """Check the log of a dialogue that is one run."""
    held = await hold(suspended, stage)

    spans = stage.run_of(held.responses[-1]).tokens.spans
    rounds = stage.reference.rounds
    sampled = [(span.start, span.stop) for span in spans if span.origin is Origin.SAMPLED]
    others = [span.origin for span in spans if span.origin is not Origin.SAMPLED]
    assert sampled == [(each.start, each.stop) for each in rounds]
    assert others == [Origin.PROMPT, *[Origin.APPENDED] * (len(rounds) - 1)]


# --- The whole history over HTTP -----------------------------------------------------------------


async def check_histories_over_http(stage: Stage) -> str:
    """Check what comes of the whole history in each request.

    Where recent responses are kept, all is as uninterrupted. Where nothing is, a response has the
    same tokens if its history encodes to the ids that were sampled. Encoding the text of what was
    sampled need not give its ids: returns a line that says for how many histories it does not.
    """
    held = await hold(resent_over_http, stage)
    _check_log(stage, held.responses[-1])
    _check_nothing_was_computed_twice(stage, held.responses)

    ids = stage.reference.token_ids
    num_drifted = 0
    async with stage.serving() as server:
        for (history, tool_choice), each in zip(held.asked, stage.reference.rounds, strict=True):
            response = await post(server, **stage.members, input=history, tool_choice=tool_choice)
            found = stage.run_of(response).tokens.ids
            assert cached_tokens(response) == 0
            if found[: response["usage"]["input_tokens"]] == ids[: each.start]:
                assert found == ids[: each.stop]
            else:
                num_drifted += 1
    # The first prompt holds nothing sampled, so it can never drift.
    assert num_drifted < len(held.asked)
    return f"{num_drifted} of {len(held.asked)} histories drift where nothing is kept, else none"


# --- Forks ---------------------------------------------------------------------------------------


async def check_a_fork_and_its_trunk_side_by_side(stage: Stage, fork: Dialogue) -> None:
    """Check two lanes that follow one response at the same time.

    The dialogues begin alike, with a call, whose output differs.
    """
    async with stage.serving() as server, server.connect() as client:
        events = await client.create(
            **stage.members, input=[message(fork.messages[0])], tool_choice="required"
        )
        first = events[-1]["response"]
        (call,) = first["output"]
        for lane, dialogue in (("b", fork), (None, stage.dialogue)):
            body: Event = {
                "previous_response_id": first["id"],
                "input": [output(call, dialogue.output(0))],
                "stream_id": lane,
            }
            await client.send("response.create", **stage.members, **body)
            if lane == "b":  # which keeps its parent from now on
                while (await client.receive())["type"] != "response.in_progress":
                    pass
        ends = await _ends_of(client, 2)

    for lane, dialogue in (("b", fork), (None, stage.dialogue)):
        _check_second_round(stage, ends[lane], dialogue)
        assert cached_tokens(ends[lane]) == context_length(first)


async def _ends_of(client: Client, number: int) -> dict[str | None, Event]:
    """Return the responses that end next, by lane."""
    ends: dict[str | None, Event] = {}
    while len(ends) < number:
        event = await client.receive()
        assert event["type"] != "error", event
        if event["type"] in TERMINAL:
            ends[event.get("stream_id")] = event["response"]
    return ends


async def check_a_fork_after_its_trunk(stage: Stage, fork: Dialogue) -> None:
    """Check a history that is taken up once more, over HTTP, in another way."""
    async with stage.serving(KEEPING) as server:
        said = [message(fork.messages[0])]
        first = await post(server, **stage.members, input=said, tool_choice="required")
        (call,) = first["output"]
        for dialogue in (stage.dialogue, fork):
            outputs = [output(call, dialogue.output(0))]
            response = await post(server, **stage.members, input=[*said, call, *outputs])
            _check_second_round(stage, response, dialogue)

            # The beginning of the trunk's output is in the cache too.
            assert cached_tokens(response) >= context_length(first)


def _check_second_round(stage: Stage, response: Event, dialogue: Dialogue) -> None:
    reference = stage.subject.reference(dialogue)
    second = reference.rounds[1]
    assert stage.run_of(response).tokens.ids == reference.token_ids[: second.stop]
    _check_logits(stage, reference, second)
