"""Codex 0.87 to 0.107, which continue by ``response.append`` and never name a response.

Up to 0.98 they negotiate nothing, append whatever the end of a segment was called, and repeat what
the model said. From 0.99 on they ask for ``response.done`` and append outputs only.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

from protocol.dialect import APPEND_BETA
from sampler.run import RunState
from tests.server.models import BOTH, OSLO, THOUGHT, context_of, failing_at, scripted_engine
from tests.server.running import (
    BODY,
    TOOL,
    Client,
    Event,
    Running,
    calls_in,
    output,
    serving,
    text_in,
)
from tests.server.spellings import without_ids

QUESTION: Event = {
    "type": "message",
    "role": "user",
    "content": [{"type": "input_text", "text": BODY["input"]}],
}
CODEX: Event = {
    "instructions": "You are Codex.",
    "input": [QUESTION],
    "tools": [TOOL, {"type": "web_search", "external_web_access": True}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "9a1f",
}


def says(text: str) -> Event:
    return QUESTION | {"content": [{"type": "input_text", "text": text}]}


def cached_tokens(response: Event) -> int:
    return int(response["usage"]["input_tokens_details"]["cached_tokens"])


@asynccontextmanager
async def old_codex(*script: str, **options: Any) -> AsyncIterator[tuple[Running, Client]]:
    """Serve ``script`` to a client that negotiates nothing."""
    async with (
        serving(engine=scripted_engine(*script, **options)) as server,
        server.connect(headers=[("x-oai-web-search-eligible", "true")]) as client,
    ):
        yield server, client


async def context_after(*texts: str, script: tuple[str, ...], **options: Any) -> tuple[int, ...]:
    """Return what the model knows when outputs come to a response by its id, without echoes."""
    members = {member: CODEX[member] for member in ("instructions", "tools", "reasoning")}
    async with old_codex(*script, **options) as (server, client):
        first = await client.create(**CODEX)
        answered = [output(call, text) for call, text in zip(calls_in(first), texts, strict=True)]
        last = await client.follow(first[-1]["response"], *answered, **members)
        assert last[-1]["type"] == "response.completed"
        return context_of(server.engine)


# --- Up to 0.98: whatever was said, and what is new ----------------------------------------------


async def test_each_append_is_answered_by_a_response_of_its_own() -> None:
    async with old_codex(OSLO, OSLO, "Sun.") as (_, client):
        events = await client.create(**CODEX)
        for _ in range(2):
            (call,) = calls_in(events)
            events = await client.append(without_ids(call), output(call))

        responses = [stream[-1]["response"] for stream in client.streams]
        assert [stream[0]["type"] for stream in client.streams] == ["response.created"] * 3
        assert [response["status"] for response in responses] == ["completed"] * 3
        assert len({response["id"] for response in responses}) == 3
        assert text_in(responses[-1]) == "Sun."


async def test_a_call_is_known_in_its_echo() -> None:
    async with old_codex(OSLO, "Sun.") as (server, client):
        (call,) = calls_in(await client.create(**CODEX))
        await client.append(without_ids(call), output(call, "dry"))

        assert context_of(server.engine) == await context_after("dry", script=(OSLO, "Sun."))


async def test_all_that_a_turn_said_is_known_in_its_echo() -> None:
    script = (f"{THOUGHT}Let me look.{BOTH}", "Sun.")
    async with old_codex(*script, thinks=True) as (server, client):
        first = (await client.create(**CODEX))[-1]["response"]
        kinds = [item["type"] for item in first["output"]]
        calls = first["output"][2:]
        outputs = map(output, calls, ["dry", "wet"])
        await client.append(*map(without_ids, first["output"]), *outputs)

        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        assert context_of(server.engine) == await context_after(
            "dry", "wet", script=script, thinks=True
        )


async def test_the_next_thing_the_user_says_follows_the_echo_of_the_answer() -> None:
    async with old_codex("Sun.", "Rain.") as (server, client):
        first = (await client.create(**CODEX))[-1]["response"]
        answer = {"type": "message", "role": "assistant", "content": first["output"][0]["content"]}
        events = await client.append(answer, says("And tomorrow?"))

        read = b"".join(map(server.engine.model.tokenizer.token_bytes, context_of(server.engine)))
        assert events[0]["type"] == "response.created"
        assert text_in(events[-1]["response"]) == "Rain."
        assert cached_tokens(events[-1]["response"]) == first["usage"]["total_tokens"] - 1
        assert read.count(b"Sun.") == 1


async def test_nothing_is_computed_twice_however_long_it_goes_on() -> None:
    async with old_codex(*[OSLO] * 5, "Sun.") as (server, client):
        events = await client.create(**CODEX)
        while calls := calls_in(events):
            events = await client.append(without_ids(calls[0]), output(calls[0]))

        responses = [stream[-1]["response"] for stream in client.streams]
        for before, after in pairwise(responses):
            assert cached_tokens(after) == before["usage"]["total_tokens"] - 1
        forwarded = server.engine.counters.tokens_forwarded
        assert forwarded == responses[-1]["usage"]["total_tokens"] - 1


async def test_instructions_and_tools_hold_on() -> None:
    async with old_codex(OSLO, "Sun.") as (_, client):
        (call,) = calls_in(await client.create(**CODEX))
        last = await client.append(without_ids(call), output(call))

        response = last[-1]["response"]
        assert response["instructions"] == CODEX["instructions"]
        assert [tool["type"] for tool in response["tools"]] == ["function", "web_search"]
        assert response["store"] is False


# --- When something is wrong ---------------------------------------------------------------------


async def test_an_append_on_a_new_connection_closes_it() -> None:
    async with old_codex("Sun.") as (_, client):
        await client.send("response.append", input=[says("And tomorrow?")])
        close = await client.closed()

        assert close.code == 1011
        assert close.reason == "no_suspended_response: no response is suspended on this connection"


async def test_an_append_to_a_response_that_failed_closes_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with old_codex(OSLO) as (server, client):
        with failing_at(3, server.engine):
            failed = await client.create(**CODEX)
        await client.send("response.append", input=[says("And tomorrow?")])
        close = await client.closed()

        assert failed[-1]["type"] == "response.failed"
        assert close.code == 1011


@pytest.mark.parametrize("betas", [[], [APPEND_BETA]], ids=["0.98", "0.107"])
async def test_after_a_closure_all_is_sent_again_and_the_turn_goes_on(betas: list[str]) -> None:
    async with serving(OSLO, "Sun.") as server:
        async with server.connect(betas=betas) as client:
            (call,) = calls_in(await client.create(**CODEX))
            await client.send("response.append", input=[without_ids(call), output("call_0")])
            await client.closed()
        async with server.connect(betas=betas) as client:
            history = [QUESTION, without_ids(call), output(call)]
            last = await client.create(**(CODEX | {"input": history}))

        assert text_in(last[-1]["response"]) == "Sun."


# --- 0.100 to 0.107: a create with everything ----------------------------------------------------


async def test_a_create_with_the_whole_history_goes_on_from_the_suspended_run() -> None:
    """It is sent instead of an append where any other member of the request has changed."""
    async with serving(OSLO, "Sun.") as server, server.connect(betas=[APPEND_BETA]) as client:
        first = await client.create(**CODEX)
        (call,) = calls_in(first)
        (run,) = server.engine.runs
        last = await client.create(
            **(CODEX | {"input": [QUESTION, without_ids(call), output(call)], "reasoning": None})
        )

        assert run.state is RunState.CANCELLED
        assert last[-1]["type"] == "response.completed"
        assert last[-1]["response"]["id"] != first[-1]["response"]["id"]
        assert text_in(last[-1]["response"]) == "Sun."
        usage = first[-1]["response"]["usage"]
        assert cached_tokens(last[-1]["response"]) == usage["total_tokens"] - 1


async def test_a_create_with_the_whole_history_goes_on_from_a_completed_run() -> None:
    async with (
        serving(OSLO, "Sun.", "Rain.") as server,
        server.connect(betas=[APPEND_BETA]) as client,
    ):
        (call,) = calls_in(await client.create(**CODEX))
        answered = (await client.append(output(call)))[-1]["response"]
        answer = without_ids(answered["output"][-1])
        history = [QUESTION, without_ids(call), output(call), answer, says("And tomorrow?")]
        last = await client.create(**(CODEX | {"input": history}))

        assert text_in(last[-1]["response"]) == "Rain."
        assert cached_tokens(last[-1]["response"]) == answered["usage"]["total_tokens"] - 1


async def test_usages_add_up_to_those_of_the_run() -> None:
    async with (
        serving(OSLO, OSLO, "Sun.") as server,
        server.connect(betas=[APPEND_BETA]) as client,
    ):
        events = await client.create(**CODEX)
        while calls := calls_in(events):
            events = await client.append(output(calls[0]), client_metadata={"turn": "7"})

        told = [event["response"] for event in client.streams[0] if "response" in event]
        usages = [response["usage"] for response in told if response["usage"]]
        total = told[-1]["suspend:run"]["usage"]
        assert len(usages) == 3
        for member in ("input_tokens", "output_tokens", "total_tokens"):
            assert sum(usage[member] for usage in usages) == total[member]


async def test_a_response_that_was_appended_holds_no_cache_but_its_own() -> None:
    async with old_codex("Sun.", OSLO) as (server, client):
        await client.create(**CODEX)
        client_events = await client.append(says("And in Bergen?"))

        usage = client_events[-1]["response"]["usage"]
        assert server.engine.kv_tokens == usage["total_tokens"] - 1
