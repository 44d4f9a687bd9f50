"""What other people's types say of our events: the openai package's and openresponses-types'."""

from functools import cache
from typing import Any

import openresponses_types
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from protocol.codec import decode_object, encode
from protocol.errors import model_not_found, sse_error_event
from protocol.response_stream import ResponseStream
from tests.protocol.streams import USAGE, frames, new_response, new_stream, two_segments

OPENAI: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


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


def torn(stream: ResponseStream, end: str) -> list[dict[str, Any]]:
    events = [*stream.start(), *stream.text_delta("a"), *stream.call_started("c", "weather")]
    if end == "failed":
        return frames([*events, *stream.fail("server_error", "oops")])
    return frames([*events, *stream.incomplete("max_output_tokens", USAGE)])


def every_kind_of_event() -> list[dict[str, Any]]:
    error = decode_object(encode(sse_error_event(model_not_found("m"), 0)))
    return [
        *frames(two_segments(new_stream())),
        *torn(new_stream(), "failed"),
        *torn(new_stream(), "incomplete"),
        error,
    ]


EVENTS = {event["type"]: event for event in every_kind_of_event()}


@pytest.mark.parametrize("event_type", sorted(EVENTS.keys() - {"response.done"}))
def test_the_openai_package_accepts_every_event(event_type: str) -> None:
    event = OPENAI.validate_python(EVENTS[event_type])

    assert event.type == event_type


@pytest.mark.parametrize("event_type", sorted(EVENTS.keys() - {"response.done"}))
def test_open_responses_accepts_every_event(event_type: str) -> None:
    open_responses_types()[event_type].model_validate(EVENTS[event_type])


@pytest.mark.parametrize(
    "event_type",
    ["created", "in_progress", "done", "completed", "incomplete", "failed"],
)
def test_both_accept_the_response_in_every_state(event_type: str) -> None:
    response = EVENTS[f"response.{event_type}"]["response"]

    Response.model_validate(response)
    openresponses_types.ResponseResource.model_validate(response)


def test_both_accept_a_response_that_echoes_everything() -> None:
    response = decode_object(
        encode(
            new_response(
                instructions="Be brief.",
                tool_choice={"type": "function", "name": "weather"},
                reasoning={"effort": "low"},
                text={"verbosity": "low"},
                metadata={"k": "v"},
                truncation="auto",
                max_output_tokens=16,
                user="u",
            )
        )
    )

    Response.model_validate(response)
    openresponses_types.ResponseResource.model_validate(response)


def test_the_openai_package_accepts_our_echo_of_a_hosted_tool() -> None:
    response = decode_object(encode(new_response(tools=[{"type": "web_search"}])))

    assert Response.model_validate(response).tools[0].type == "web_search"
