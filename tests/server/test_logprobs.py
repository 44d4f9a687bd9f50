"""Log probabilities: of the tokens that are text, and of those only."""

from itertools import pairwise
from math import exp

import pytest

from protocol.client_events import LOGPROBS
from sampler.local_engine import LocalEngine
from tests.server.http_client import post, post_refused, post_streamed
from tests.server.models import OSLO, THOUGHT, scripted_engine
from tests.server.refusals import Refusal
from tests.server.running import Event, serving, text_in
from tests.tiny_model import tiny_model

ASKED: Event = {"include": [LOGPROBS]}


def logprobs_in(response: Event) -> list[Event]:
    """Return all log probabilities in the text of ``response``."""
    return [
        entry
        for item in response["output"]
        if item["type"] == "message"
        for part in item["content"]
        for entry in part["logprobs"]
    ]


def spelled(entries: list[Event]) -> str:
    """Return the text whose tokens ``entries`` are of."""
    return bytes(byte for entry in entries for byte in entry["bytes"]).decode()


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("Sun.", "Sun."),
        ("Æ ☀ 🌧", "Æ ☀ 🌧"),
        (f"Rain. Æ{OSLO}", "Rain. Æ"),
        (f"{THOUGHT}Sun.{OSLO}", "Sun."),
        (OSLO, ""),
    ],
)
async def test_they_are_those_of_the_text(said: str, text: str) -> None:
    async with serving(engine=scripted_engine(said, thinks=True)) as server:
        response = await post(server, **ASKED)

        entries = logprobs_in(response)
        assert text_in(response) == text
        assert spelled(entries) == text
        assert all(entry["logprob"] <= 0 and entry["top_logprobs"] == [] for entry in entries)


async def test_there_is_one_for_each_token() -> None:
    async with serving("Sun.Sun.Rain.") as server:
        response = await post(server, **ASKED)

        assert [entry["token"] for entry in logprobs_in(response)] == ["Sun.", "Sun.", "Rain."]


async def test_what_was_told_piece_by_piece_is_told_again_at_the_end() -> None:
    async with serving(f"Æ Sun.{OSLO}") as server:
        events = await post_streamed(server, **ASKED, top_logprobs=2)

        of_kind = {event["type"]: event for event in events}
        deltas = [e for e in events if e["type"] == "response.output_text.delta"]
        in_deltas = [entry for event in deltas for entry in event["logprobs"]]
        assert in_deltas == logprobs_in(events[-1]["response"])
        assert in_deltas == of_kind["response.output_text.done"]["logprobs"]
        assert in_deltas == of_kind["response.content_part.done"]["part"]["logprobs"]
        for event in deltas:
            # A token that ends within a character is told with it.
            assert spelled(event["logprobs"]) == event["delta"]


@pytest.mark.parametrize("include", [[], [LOGPROBS]])
@pytest.mark.parametrize("number", [1, 20])
async def test_the_most_likely_tokens_come_with_each(number: int, include: list[str]) -> None:
    async with serving(engine=LocalEngine(tiny_model())) as server:
        response = await post(
            server,
            tools=[],
            include=include,
            top_logprobs=number,
            max_output_tokens=8,
            temperature=0,
            seed=0,
        )

        assert response["top_logprobs"] == number
        for entry in logprobs_in(response):
            top = entry["top_logprobs"]
            assert len(top) == number
            assert all(one["logprob"] >= other["logprob"] for one, other in pairwise(top))
            assert sum(exp(each["logprob"]) for each in top) <= 1 + 1e-6
            assert top[0]["logprob"] == entry["logprob"]  # the likeliest was taken


async def test_nothing_is_told_that_was_not_asked_for() -> None:
    async with serving("Sun.") as server:
        events = await post_streamed(server)

        assert logprobs_in(events[-1]["response"]) == []
        assert all(event.get("logprobs", []) == [] for event in events)


@pytest.mark.parametrize("number", [-1, 21])
async def test_their_number_is_bounded(number: int) -> None:
    async with serving("Sun.") as server:
        refused = await post_refused(server, top_logprobs=number)

        assert refused == Refusal(400, "invalid_value", "top_logprobs")
