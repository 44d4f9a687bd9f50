"""Whatever a peer sends, it is understood or told why not; nothing else may happen."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.client_events import (
    parse_append,
    parse_compact,
    parse_create,
    parse_inject,
    parse_input_tokens,
    parse_steer,
    parse_stream_id,
    resolve_tool_choice,
)
from protocol.codec import MAX_DEPTH, decode_client_event, encode
from protocol.errors import ProtocolError, error_event
from protocol.items import UnknownItem, check_calls_are_answered, parse_items, tools_in_effect
from protocol.response import build_response


def one_of(names: str) -> st.SearchStrategy[str]:
    return st.sampled_from(names.split())


WORDS = one_of(
    "message function_call custom_tool_call function_call_output custom_tool_call_output reasoning"
    " compaction item_reference additional_tools function custom namespace user assistant"
    " input_text output_text refusal input_image auto required none allowed_tools object grammar"
    " lark text json_schema incomplete f c"
)
MEMBERS = one_of(
    "type role content text refusal call_id name namespace arguments input output id status summary"
    " encrypted_content tools parameters format syntax definition schema strict mode allowed_tools"
    " effort verbosity compact_threshold include_obfuscation prewarm"
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(MEMBERS, inner, max_size=4),
    max_leaves=12,
)
FIELDS = one_of(
    "model input instructions tools tool_choice parallel_tool_calls temperature top_p seed text"
    " max_output_tokens stream metadata reasoning truncation include top_logprobs stream_id"
    " conversation prompt background generate service_tier user previous_response_id response_id"
    " stream_options context_management prompt_cache_options store type"
)
BODIES = st.fixed_dictionaries(
    {}, optional={"model": st.just("m") | JUNK, "input": st.just("Hi") | JUNK}
)


def check_it_can_be_told(error: ProtocolError) -> None:
    assert error.message
    assert encode(error_event(error, 0))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(body=BODIES, junk=st.dictionaries(FIELDS, JUNK, max_size=3))
def test_a_create_is_understood_or_refused_with_a_message(
    body: dict[str, Any], junk: dict[str, Any]
) -> None:
    try:
        params = parse_create(junk | body, transport="websocket")
        resolve_tool_choice(params, tools_in_effect(params.tools, params.input))
        check_calls_are_answered(params.input)
    except ProtocolError as error:
        check_it_can_be_told(error)
    else:
        assert encode(build_response(params, id="resp_1", created_at=1, store=False))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize(
    "parse",
    [
        lambda frame: parse_append(frame, []),
        parse_inject,
        parse_steer,
        parse_compact,
        parse_input_tokens,
        parse_stream_id,
    ],
    ids=["append", "inject", "steer", "compact", "input_tokens", "stream_id"],
)
@given(frame=st.dictionaries(FIELDS, JUNK, max_size=5))
def test_whatever_else_is_sent_is_understood_or_refused_with_a_message(
    parse: Callable[[dict[str, Any]], object], frame: dict[str, Any]
) -> None:
    try:
        parse(frame)
    except ProtocolError as error:
        check_it_can_be_told(error)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(item=st.dictionaries(MEMBERS, JUNK, max_size=5))
def test_an_item_of_unknown_type_may_hold_anything(item: dict[str, Any]) -> None:
    assert parse_items([item | {"type": "new"}]) == [UnknownItem("new")]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=40) | st.text(max_size=40))
def test_a_frame_is_understood_or_refused_with_a_message(data: bytes | str) -> None:
    try:
        decode_client_event(data)
    except ProtocolError as error:
        check_it_can_be_told(error)


@pytest.mark.parametrize("member", ["tools", "input", "tool_choice", "text", "metadata", "new"])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"type":"function","a":', "}")])
def test_a_body_nested_as_deep_as_json_can_be_read_crashes_nothing(
    member: str, opening: str, closing: str
) -> None:
    value = opening * (MAX_DEPTH - 2) + "1" + closing * (MAX_DEPTH - 2)
    frame = f'{{"type":"response.create","model":"m","input":"x","{member}":[{value}]}}'

    _, body = decode_client_event(frame)

    try:
        params = parse_create(body, transport="websocket")
    except ProtocolError as error:
        check_it_can_be_told(error)
    else:
        assert encode(build_response(params, id="resp_1", created_at=1, store=False))


def test_a_schema_nested_as_deep_as_json_can_be_read_is_echoed() -> None:
    levels = MAX_DEPTH - 4
    schema = '{"properties":' * levels + "{}" + "}" * levels
    tool = f'{{"type":"function","name":"f","parameters":{schema}}}'
    frame = f'{{"type":"response.create","model":"m","input":"x","tools":[{tool}]}}'

    _, body = decode_client_event(frame)

    response = build_response(
        parse_create(body, transport="websocket"), id="resp_1", created_at=1, store=False
    )
    assert schema.encode() in encode(response)
