"""Streams to test with: a response, ids that count, a run of two segments and one of everything."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from protocol.client_events import parse_create
from protocol.codec import decode_object, encode
from protocol.errors import response_already_completed, too_many_pending_steers
from protocol.output_items import Logprob, OutputCustomToolCall, OutputFunctionCall, TopLogprob
from protocol.response import ResponseResource, Usage, build_response
from protocol.response_stream import ResponseStream
from protocol.sealed import seal
from protocol.server_events import ServerEvent, output_stub

USAGE = Usage.of(5, 2, cached_tokens=1)
LOGPROB = Logprob("a", -0.5, (97,), (TopLogprob("a", -0.5, (97,)), TopLogprob("é", -2.0, (195,))))
OUTPUTS = [{"type": "function_call_output", "call_id": "call_3", "output": "Rain."}]
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


def new_response(*, store: bool = False, **members: Any) -> ResponseResource:
    params = parse_create(BODY | members, transport="websocket")
    return build_response(params, id="resp_1", created_at=1, store=store)


def new_stream(**options: Any) -> ResponseStream:
    return ResponseStream(new_response(), counted_ids(), **options)


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


def everything(stream: ResponseStream) -> list[ServerEvent]:
    """Play every kind of item, of part and of acknowledgement, in two segments."""
    return [
        *stream.queue(),
        *stream.start(),
        stream.steer_accepted("steer_1"),
        *stream.reasoning_delta("They want "),
        *stream.reasoning_delta("two things."),
        *stream.reasoning_done(),
        *stream.text_delta("First", (LOGPROB,)),
        *stream.text_delta(" this.", (LOGPROB, LOGPROB)),
        stream.steer_failed(too_many_pending_steers(1), "Faster!"),
        *stream.refusal_delta("Not "),
        *stream.refusal_delta("that."),
        *stream.call_started("call_1", "weather", namespace="sky"),
        *stream.arguments_delta("{}"),
        *stream.call_done(),
        *stream.call_started("call_2", "exec", is_custom=True),
        *stream.arguments_delta("print"),
        *stream.arguments_delta("(1)"),
        *stream.call_done(),
        *stream.suspend(USAGE),
        stream.inject_created(),
        *stream.compaction(seal("They talked.")),
        *stream.call_started("call_3", "weather"),
        *stream.call_done(),
        *stream.complete(USAGE, None, 9),
        stream.inject_failed(response_already_completed("resp_1"), OUTPUTS),
        stream.steer_pending("steer_1", tuple(map(output_stub, calls(stream)[2:]))),
        stream.steer_failed(response_already_completed("resp_1"), "Shorter!", "steer_1"),
    ]


def calls(stream: ResponseStream) -> list[OutputFunctionCall | OutputCustomToolCall]:
    """Return the calls among the finished items."""
    return [
        item
        for item in stream.output
        if isinstance(item, OutputFunctionCall | OutputCustomToolCall)
    ]
