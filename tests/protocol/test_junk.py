"""Whatever a peer sends, it is understood or told why not; nothing else may happen."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.client_events import parse_append, parse_create
from protocol.codec import decode_client_event, encode
from protocol.errors import ProtocolError, error_event
from protocol.response import build_response


def one_of(names: str) -> st.SearchStrategy[str]:
    return st.sampled_from(names.split())


WORDS = one_of(
    "message function_call function_call_output function reasoning item_reference user assistant"
    " input_text output_text refusal input_image auto required none allowed_tools object f c"
)
MEMBERS = one_of(
    "type role content text refusal call_id name arguments output id parameters strict format"
    " effort verbosity"
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
    " conversation prompt background generate service_tier user"
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
    except ProtocolError as error:
        check_it_can_be_told(error)
    else:
        encode(build_response(params, id="resp_1", created_at=1))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(frame=st.dictionaries(st.sampled_from(["input", "tool_choice", "type"]), JUNK))
def test_an_append_is_understood_or_refused_with_a_message(frame: dict[str, Any]) -> None:
    try:
        assert parse_append(frame, []).input
    except ProtocolError as error:
        check_it_can_be_told(error)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=40) | st.text(max_size=40))
def test_a_frame_is_understood_or_refused_with_a_message(data: bytes | str) -> None:
    try:
        decode_client_event(data)
    except ProtocolError as error:
        check_it_can_be_told(error)


def test_a_tool_nested_as_deep_as_json_can_be_read_is_refused_not_crashed_upon() -> None:
    depth = 700
    schema = b'{"a":' * depth + b"1" + b"}" * depth
    frame = b'{"type":"response.create","model":"m","input":"x","tools":[{"type":"t","a":%b}]}'

    _, body = decode_client_event(frame % schema)

    with pytest.raises(ProtocolError, match="levels of nesting"):
        parse_create(body, transport="websocket")


def test_content_nested_deeply_is_refused_not_crashed_upon() -> None:
    depth = 700
    frame = b'{"type":"response.create","model":"m","input":%b}'

    _, body = decode_client_event(frame % (b"[" * depth + b"]" * depth))

    with pytest.raises(ProtocolError):
        parse_create(body, transport="websocket")
