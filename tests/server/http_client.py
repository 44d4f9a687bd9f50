"""Requests to ``POST /v1/responses``, with all that comes back checked."""

import json
from collections.abc import Mapping
from typing import Any

from protocol.codec import decode_object
from tests.server.refusals import Refusal, refusal
from tests.server.running import (
    BODY,
    Event,
    Running,
    check_events,
    check_response,
    parse_sse,
)


async def post(
    server: Running, *, headers: Mapping[str, str] | None = None, **members: Any
) -> Event:
    """Return the response to a request."""
    async with server.http() as http:
        answer = await http.post("/v1/responses", json=BODY | members, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    response = decode_object(answer.content)
    check_response(response)
    return response


async def post_streamed(server: Running, **members: Any) -> list[Event]:
    """Return the events of a streamed response."""
    async with server.http() as http:
        answer = await http.post("/v1/responses", json=BODY | {"stream": True} | members)
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    events = [json.loads(data) for event, data in parse_sse(answer.text) if event]
    check_events(events)
    return events


async def post_refused(
    server: Running, *, headers: Mapping[str, str] | None = None, **members: Any
) -> Refusal:
    """Return why a request is refused."""
    async with server.http() as http:
        answer = await http.post("/v1/responses", json=BODY | members, headers=headers)
    assert answer.status_code >= 400, answer.text
    return refusal(answer.status_code, answer.json()["error"])


def cached_tokens(response: Event) -> int:
    """Return how many tokens of its context a response did not have to prefill."""
    count = response["usage"]["input_tokens_details"]["cached_tokens"]
    assert isinstance(count, int)
    return count


def context_length(response: Event) -> int:
    """Return how many tokens a response leaves in a cache: all but the last, which it sampled and
    never read."""
    usage = response["usage"]
    return int(usage["input_tokens"]) + int(usage["output_tokens"]) - 1
