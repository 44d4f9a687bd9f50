"""Streams to test with: a response, ids that count, and a run of two segments."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from protocol.client_events import parse_create
from protocol.codec import decode_object, encode
from protocol.response import ResponseResource, Usage, build_response
from protocol.response_stream import ResponseStream
from protocol.server_events import ServerEvent

USAGE = Usage.of(5, 2, cached_tokens=1)
BODY: dict[str, Any] = {
    "model": "smollm2",
    "input": "What is the weather in Oslo?",
    "tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}}],
}


def counted_ids() -> Callable[[str], str]:
    counter = Counter[str]()

    def fresh(prefix: str) -> str:
        counter[prefix] += 1
        return f"{prefix}_{counter[prefix]}"

    return fresh


def new_response(**members: Any) -> ResponseResource:
    params = parse_create(BODY | members, transport="websocket")
    return build_response(params, id="resp_1", created_at=1)


def new_stream() -> ResponseStream:
    return ResponseStream(new_response(), counted_ids())


def frames(events: Iterable[ServerEvent]) -> list[dict[str, Any]]:
    """Return the events as a client reads them."""
    return [decode_object(encode(event)) for event in events]


def two_segments(stream: ResponseStream) -> list[ServerEvent]:
    """Play text, two calls, a suspension and a final answer."""
    return [
        *stream.start(),
        *stream.text_delta("Let me "),
        *stream.text_delta("look."),
        *stream.call_started("call_1", "weather"),
        *stream.arguments_delta('{"city": '),
        *stream.arguments_delta('"Oslo"}'),
        *stream.call_done(),
        *stream.call_started("call_2", "weather"),
        *stream.call_done(),
        *stream.suspend(USAGE, {"segments": 1}),
        *stream.text_delta("Rain."),
        *stream.complete(USAGE, {"segments": 2}, 9),
    ]
