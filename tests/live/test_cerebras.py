"""A suspended run at the real Cerebras API. It takes a key, and costs a fraction of a cent."""

import os

import pytest

from sampler.engines.chat.dialect import CEREBRAS
from sampler.engines.chat.engine import ChatEngine
from sampler.engines.endpoint.client import Endpoint, EndpointSettings
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


async def test_a_run_is_suspended_at_its_call_and_resumed() -> None:
    url = os.environ.get("CEREBRAS_BASE_URL") or CEREBRAS_URL
    endpoint = Endpoint(EndpointSettings(url, KEY))
    engine = ChatEngine(MODEL, endpoint, CEREBRAS, cache_seconds=CEREBRAS_CACHE_SECONDS)
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
        assert response["usage"]["output_tokens"] > 0
    assert first[-1]["type"] == "response.done"
    assert call["name"] == "get_weather"
    assert "oslo" in call["arguments"].lower()
    assert last[-1]["type"] == "response.completed"
    assert text_in(last[-1]["response"])
    usage = last[-1]["response"]["usage"]
    assert usage["input_tokens"] > first[-1]["response"]["usage"]["input_tokens"]
