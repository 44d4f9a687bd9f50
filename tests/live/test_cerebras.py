"""A suspended run at the real Cerebras API. It takes a key, and costs a fraction of a cent."""

import os

import pytest

from protocol.items import Message
from sampler.engines.chat.chunk import says_something
from sampler.engines.chat.dialect import CEREBRAS
from sampler.engines.chat.engine import PATH, ChatEngine
from sampler.engines.chat.messages import messages_of, request_body
from sampler.engines.endpoint.client import Endpoint, EndpointSettings
from sampler.params import Constraint, SamplingParams
from server.engine_choice import CEREBRAS_CACHE_SECONDS, CEREBRAS_URL
from tests.server.running import TOOL, calls_in, output, serving, text_in

MODEL = os.environ.get("CEREBRAS_MODEL", "gpt-oss-120b")
KEY = os.environ.get("CEREBRAS_API_KEY")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not KEY, reason="CEREBRAS_API_KEY is not set"),
]

LONG = "You answer questions about the weather, in one short sentence. " * 40
"""Of more than one block of the endpoint's prompt cache."""


def open_endpoint() -> Endpoint:
    return Endpoint(EndpointSettings(os.environ.get("CEREBRAS_BASE_URL") or CEREBRAS_URL, KEY))


async def test_a_run_is_suspended_at_its_call_and_resumed() -> None:
    engine = ChatEngine(MODEL, open_endpoint(), CEREBRAS, cache_seconds=CEREBRAS_CACHE_SECONDS)
    await engine.start()
    asked = {"instructions": LONG, "max_output_tokens": 1000, "reasoning": {"effort": "low"}}
    async with serving(engine=engine) as server, server.connect("append") as client:
        first = await client.create(input="Is it dry in Oslo? Look it up.", tools=[TOOL], **asked)
        (call,) = calls_in(first)
        last = await client.append(output(call, '{"weather": "dry", "celsius": 7}'))

    for events in (first, last):
        response = events[-1]["response"]
        (turn,) = response["suspend:run"]["turns"]
        assert turn["endpoint"]["time_info"]["total_time"] > 0
        assert "usage_is_estimated" not in turn["endpoint"]
        assert 0 <= turn["cached_tokens"] < turn["input_tokens"]
        assert response["usage"]["output_tokens"] > 0
    assert first[-1]["type"] == "response.done"
    assert call["name"] == "get_weather"
    assert "oslo" in call["arguments"].lower()
    assert last[-1]["type"] == "response.completed"
    assert text_in(last[-1]["response"])
    usage = last[-1]["response"]["usage"]
    assert usage["input_tokens"] > first[-1]["response"]["usage"]["input_tokens"]


async def test_what_was_cached_is_reported() -> None:
    """Where it were not, a run would be told that nothing was."""
    asked = request_body(
        messages_of([Message("user", "Hello?")], LONG, CEREBRAS),
        model=MODEL,
        tools=[],
        constraint=Constraint(),
        params=SamplingParams(),
        dialect=CEREBRAS,
        max_tokens=1000,
    )
    endpoint = open_endpoint()
    async with endpoint.stream(PATH, asked, says_something) as events:
        usages = [event["usage"] async for event in events if event.get("usage")]
    await endpoint.close()

    assert isinstance(usages[-1]["prompt_tokens_details"]["cached_tokens"], int)
