"""What other people's types say of our events: the openai package's and openresponses-types'.

Open Responses knows no custom tools, no ``response.done``, no acknowledgements and no event while a
conversation is compacted. Its events of raw reasoning have other names and the same members.
"""

from collections import defaultdict
from functools import cache
from typing import Any

import openresponses_types
import pytest
from openai.types.beta.beta_responses_server_event import BetaResponsesServerEvent
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.responses_server_event import ResponsesServerEvent
from pydantic import BaseModel, TypeAdapter

from protocol.codec import decode_object, encode
from protocol.conformance.shapes import Event
from protocol.errors import error_event, model_not_found, response_not_found, sse_error_event
from protocol.server_events import inject_failed, output_stub, steer_failed
from tests.protocol.streams import (
    USAGE,
    calls,
    everything,
    frames,
    new_response,
    new_stream,
    two_segments,
)

SSE: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEBSOCKET: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)
WEBSOCKET_BETA: TypeAdapter[Any] = TypeAdapter(BetaResponsesServerEvent)


# --- Everything the server says ------------------------------------------------------------------


def told() -> list[Event]:
    return [
        *frames(two_segments(new_stream())),
        *frames(everything(new_stream(seals_reasoning=True, padding=lambda: "x"))),
        *frames(everything(new_stream(reasoning_as_summary=True))),
        *ended("incomplete"),
        *ended("steered"),
        *ended("cancelled"),
        *ended("failed"),
        *custom_call_is_pending(),
        *target_is_unknown(),
    ]


def ended(end: str) -> list[Event]:
    """Return a stream that ends in the middle of a call."""
    stream = new_stream()
    begun = [
        *stream.start(),
        *stream.reasoning_delta("a"),
        *stream.reasoning_done(),
        *stream.refusal_delta("b"),
        *stream.compaction("sealed"),
        *stream.call_started("c", "weather"),
    ]
    match end:
        case "incomplete":
            return frames([*begun, *stream.incomplete("max_output_tokens", USAGE)])
        case "steered":
            return frames([*begun, *stream.incomplete("steered", USAGE)])
        case "cancelled":
            return frames([*begun, *stream.cancel(USAGE)])
        case _:
            return frames([*begun, *stream.fail("server_error", "oops")])


def custom_call_is_pending() -> list[Event]:
    stream = new_stream()
    stream.start()
    stream.call_started("c", "exec", is_custom=True)
    stream.complete(USAGE, None, 2)
    return frames([stream.steer_pending("steer_1", tuple(map(output_stub, calls(stream))))])


def target_is_unknown() -> list[Event]:
    error = response_not_found("resp_9")
    message = {"type": "message", "role": "user", "content": "Faster!"}
    return frames(
        [steer_failed(error, [message], "resp_9", 0), inject_failed(error, [], "resp_9", 1)]
    )


def by_type(events: list[Event]) -> dict[str, list[Event]]:
    types = defaultdict(list)
    for event in events:
        types[event["type"]].append(event)
    return types


EVENTS = by_type(told())
LIFECYCLE = [name for name in EVENTS if "response" in EVENTS[name][0]]
ACKNOWLEDGEMENTS = {name for name in EVENTS if ".steer." in name or ".inject." in name}
PROTOTYPE = {"response.done"}


# --- The openai package --------------------------------------------------------------------------


@pytest.mark.parametrize("event_type", sorted(EVENTS.keys() - PROTOTYPE - ACKNOWLEDGEMENTS))
def test_the_openai_package_accepts_every_event_of_a_stream(event_type: str) -> None:
    for event in EVENTS[event_type]:
        assert SSE.validate_python(event).type == event_type


@pytest.mark.parametrize("event_type", sorted(EVENTS.keys() - PROTOTYPE))
def test_the_openai_package_accepts_every_event_on_a_lane(event_type: str) -> None:
    adapter = WEBSOCKET_BETA if ".inject." in event_type else WEBSOCKET

    for event in EVENTS[event_type]:
        assert adapter.validate_python(event | {"stream_id": "lane"}).stream_id == "lane"


@pytest.mark.parametrize(
    ("adapter", "event"),
    [
        (SSE, sse_error_event(model_not_found("m"), 0)),
        (WEBSOCKET, error_event(model_not_found("m"), 0)),
        (WEBSOCKET, error_event(model_not_found("m"), 0, "lane")),
    ],
)
def test_the_openai_package_accepts_errors(adapter: TypeAdapter[Any], event: Any) -> None:
    assert adapter.validate_python(decode_object(encode(event))).type == "error"


@pytest.mark.parametrize("event_type", LIFECYCLE)
def test_the_openai_package_accepts_the_response_in_every_state(event_type: str) -> None:
    for event in EVENTS[event_type]:
        Response.model_validate(event["response"])


@pytest.mark.parametrize(
    "members",
    [
        {"tools": [{"type": "web_search"}]},
        {"tools": [{"type": "custom", "name": "exec"}]},
        {
            "text": {
                "format": {"type": "json_schema", "name": "city", "schema": {"type": "object"}},
                "verbosity": "low",
            }
        },
    ],
)
def test_the_openai_package_accepts_what_open_responses_lacks(members: dict[str, Any]) -> None:
    Response.model_validate(decode_object(encode(new_response(**members))))


# --- openresponses-types -------------------------------------------------------------------------


@cache
def open_responses_types() -> dict[str, type[BaseModel]]:
    classes = [
        getattr(openresponses_types, name)
        for name in dir(openresponses_types)
        if name.endswith("StreamingEvent")
    ]
    return {
        values[0].value: cls
        for cls in classes
        if (values := list(cls.model_fields["type"].annotation or ()))
    }


def known_to_open_responses(events: list[Event]) -> list[Event]:
    return [
        event | {"type": event["type"].replace(".reasoning_text.", ".reasoning.")}
        for event in events
        if b"custom_tool_call" not in encode(event)
    ]


@pytest.mark.parametrize(
    "event_type",
    sorted(
        name
        for name in EVENTS.keys() - PROTOTYPE - ACKNOWLEDGEMENTS
        if not name.startswith(("response.custom_tool_call_input.", "response.compaction."))
    ),
)
def test_open_responses_accepts_every_event_it_knows(event_type: str) -> None:
    events = known_to_open_responses(EVENTS[event_type])

    assert events
    for event in events:
        open_responses_types()[event["type"]].model_validate(event)


def test_open_responses_accepts_an_error_in_a_stream() -> None:
    event = decode_object(encode(sse_error_event(model_not_found("m"), 0)))

    open_responses_types()["error"].model_validate(event)


@pytest.mark.parametrize("event_type", LIFECYCLE)
def test_open_responses_accepts_the_response_in_every_state(event_type: str) -> None:
    events = known_to_open_responses(EVENTS[event_type])

    assert events
    for event in events:
        openresponses_types.ResponseResource.model_validate(event["response"])


def test_both_accept_a_response_that_echoes_everything() -> None:
    response = decode_object(
        encode(
            new_response(
                store=True,
                instructions="Be brief.",
                previous_response_id="resp_0",
                tool_choice={"type": "function", "name": "weather"},
                reasoning={"effort": "low"},
                text={"format": {"type": "json_object"}, "verbosity": "low"},
                top_logprobs=3,
                metadata={"k": "v"},
                truncation="auto",
                max_output_tokens=16,
                user="u",
            )
        )
    )

    Response.model_validate(response)
    openresponses_types.ResponseResource.model_validate(response)
