"""The fake endpoint is as the real one is, where that is documented."""

import asyncio
from typing import Any

import httpx2
import pytest

from protocol.codec import decode_object
from protocol.validation import JsonObject
from tests.sampler.engines.fake_endpoint import (
    API_KEY,
    BLOCK_TOKENS,
    BYTES_PER_TOKEN,
    FakeEndpoint,
    calls,
    chat_request,
    ends,
    fake_endpoint,
    says,
    thinks,
)

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


async def post(
    fake: FakeEndpoint, body: JsonObject, *, path: str = "/chat/completions", key: str = API_KEY
) -> httpx2.Response:
    """Return the whole answer to ``body``."""
    async with httpx2.AsyncClient(verify=False, trust_env=False) as http:
        return await http.post(
            fake.url + path, json=body, headers={"authorization": f"Bearer {key}"}
        )


async def chunks_of(fake: FakeEndpoint, body: JsonObject, **options: Any) -> list[JsonObject]:
    """Return the chunks of the answer to ``body``."""
    *events, done, rest = (await post(fake, body, **options)).text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [decode_object(event.removeprefix("data: ")) for event in events]


async def usage_of(fake: FakeEndpoint, body: JsonObject) -> JsonObject:
    """Return the usage of the answer to ``body``."""
    usage: JsonObject = (await chunks_of(fake, body))[-1]["usage"]
    return usage


async def test_a_turn_is_streamed_in_chunks() -> None:
    script = [*thinks("Hm, so."), *calls(("f", '{"a": 1}'), ("g", "{}"), ids=["c1", "c2"])]
    async with fake_endpoint(script) as fake:
        first, *middle, last = await chunks_of(fake, chat_request())

    assert first["choices"][0]["delta"] == {"role": "assistant"}
    deltas = [chunk["choices"][0]["delta"] for chunk in middle]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Hm, so."
    pieces = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert [piece["index"] for piece in pieces] == [0, 1, 0, 1, 0]
    assert [piece.get("id") for piece in pieces] == ["c1", "c2", None, None, None]
    arguments = [piece["function"]["arguments"] for piece in pieces if piece["index"] == 0]
    assert "".join(arguments) == '{"a": 1}'
    assert last["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "tool_calls"}
    assert last["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2
    assert last["time_info"]["total_time"] > 0


async def test_a_turn_that_is_too_long_is_ended() -> None:
    async with fake_endpoint(says("one two three four")) as fake:
        *_, last = await chunks_of(fake, chat_request(max_completion_tokens=2))

    assert last["choices"][0]["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == 2


async def test_a_completion_continues_token_ids() -> None:
    body = {"model": "gpt-oss-120b", "prompt": [1, 2, 3], "max_tokens": 9, "stream": True}
    async with fake_endpoint([*says("Hello"), *ends("stop")]) as fake:
        chunks = await chunks_of(fake, body, path="/completions")

    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello"
    assert chunks[-1]["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("members", "status", "code"),
    [
        ({"model": "gpt-9"}, 404, "model_not_found"),
        (
            {"messages": [{"role": "assistant", "content": "x", "reasoning_content": "y"}]},
            400,
            "wrong_api_format",
        ),
        (
            {"messages": [{"role": "tool", "content": "x", "tool_call_id": "c1"}]},
            400,
            "wrong_api_format",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": None, "tool_calls": [CALL]},
                    {"role": "tool", "content": "x", "tool_call_id": "c2"},
                ]
            },
            400,
            "wrong_api_format",
        ),
        ({"messages": []}, 422, "validation_error"),
        ({"max_completion_tokens": 131_072}, 400, "context_length_exceeded"),
    ],
)
async def test_what_cerebras_refuses_is_refused_in_the_flat_form(
    members: JsonObject, status: int, code: str
) -> None:
    async with fake_endpoint(says("Hi")) as fake:
        answer = await post(fake, chat_request(**members))

    error = answer.json()
    assert (answer.status_code, error["code"]) == (status, code)
    assert set(error) == {"message", "type", "param", "code"}


async def test_a_wrong_key_is_refused() -> None:
    async with fake_endpoint() as fake:
        answer = await post(fake, chat_request(), key="wrong")

    assert (answer.status_code, answer.json()["code"]) == (401, "wrong_api_key")


async def test_outputs_that_answer_calls_are_taken() -> None:
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "reasoning": "y", "tool_calls": [CALL]},
        {"role": "tool", "content": "x", "tool_call_id": "c1"},
    ]
    async with fake_endpoint(says("Hi")) as fake:
        assert (await post(fake, chat_request(messages=messages))).status_code == 200


async def test_what_has_no_bound_is_charged_the_whole_context() -> None:
    async with fake_endpoint(says("Hi"), says("Hi")) as fake:
        await post(fake, chat_request(max_completion_tokens=None))
        await post(fake, chat_request(max_completion_tokens=10))

        unbounded, bounded = fake.requests
        assert unbounded.pre_charge == fake.max_context
        assert bounded.pre_charge == bounded.prompt_tokens + 10
        assert fake.num_unbounded == 1


async def test_the_blocks_that_a_prompt_shares_with_an_earlier_one_are_cached() -> None:
    long = 3 * BLOCK_TOKENS * BYTES_PER_TOKEN * "x"
    history: list[JsonObject] = [{"role": "user", "content": long}]
    longer = [*history, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "?"}]
    changed = [{"role": "system", "content": "now"}, *history]
    async with fake_endpoint() as fake:
        fake.answer = lambda body: says("Hi")

        async def cached(messages: list[JsonObject], key: str = "a") -> int:
            body = chat_request(messages=messages, prompt_cache_key=key)
            usage = await usage_of(fake, body)
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert await cached(history) == 0
        assert await cached(longer) == 3 * BLOCK_TOKENS
        assert await cached(changed) == 0
        assert await cached(history, "b") == 0
        fake.cache.seconds = 0.01
        await asyncio.sleep(0.02)
        assert await cached(history) == 0


async def test_it_speaks_at_a_rate() -> None:
    async with fake_endpoint(says("one two three four")) as fake:
        fake.tokens_per_second = 100.0
        *_, last = await chunks_of(fake, chat_request())

    assert last["usage"]["completion_tokens"] == 5
    assert last["time_info"]["completion_time"] >= 0.05
