import pytest

from protocol.codec import MAX_DEPTH, SSE_DONE, decode_client_event, decode_object, encode, sse
from protocol.errors import ProtocolError
from protocol.server_events import OutputTextDelta

DELTA = OutputTextDelta(
    sequence_number=4, item_id="msg_1", output_index=0, content_index=0, delta="Grüße"
)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"a": "\xff"}',
        rb'{"a": "\ud800"}',
        rb'{"\udc00": 1}',
        rb'{"a": "\ud800\u0041"}',
        '{"a": "\ud800"}',
        b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
        b'{"a": 1}{"b": 2}',
        b'{"a": ' + b"1" * 5_000 + b"}",
    ],
)
def test_what_is_not_one_object_of_valid_unicode_is_invalid_json(data: bytes | str) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_object(data)

    assert caught.value.code == "invalid_json"
    assert caught.value.message


@pytest.mark.parametrize(("opening", "closing"), [(b'{"a":', b"}"), (b"[", b"]")])
def test_json_may_nest_so_deep_and_no_deeper(opening: bytes, closing: bytes) -> None:
    def nested(depth: int) -> bytes:
        return b'{"a":' + opening * (depth - 1) + b"1" + closing * (depth - 1) + b"}"

    value = decode_object(nested(MAX_DEPTH))

    assert encode(value) == nested(MAX_DEPTH)
    with pytest.raises(ProtocolError) as caught:
        decode_object(nested(MAX_DEPTH + 1))
    assert caught.value.code == "invalid_json"


def test_a_surrogate_pair_is_one_character() -> None:
    assert decode_object(rb'{"a": "\ud83d\ude00"}') == {"a": "😀"}


def test_the_type_may_be_the_last_member_of_a_frame() -> None:
    event_type, frame = decode_client_event('{"input": [], "type": "response.append"}')

    assert event_type == "response.append"
    assert frame["input"] == []


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ("{}", "missing_required_parameter"),
        ('{"type": null}', "missing_required_parameter"),
        ('{"type": 1}', "invalid_type"),
    ],
)
def test_a_frame_without_a_type_is_refused(frame: str, code: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_client_event(frame)

    assert (caught.value.code, caught.value.param) == (code, "type")


def test_the_type_is_the_first_member_on_the_wire() -> None:
    assert encode(DELTA).startswith(b'{"type":"response.output_text.delta","sequence_number":4,')


def test_sse_repeats_the_type_and_ends_with_an_empty_line() -> None:
    head, data, *end = sse(DELTA).split(b"\n")

    assert head == b"event: response.output_text.delta"
    assert data == b"data: " + encode(DELTA)
    assert end == [b"", b""]


def test_sse_keeps_one_event_on_one_line_whatever_the_text() -> None:
    delta = OutputTextDelta(
        sequence_number=0, item_id="m", output_index=0, content_index=0, delta="a\n\nb\r\ndata: c"
    )

    assert sse(delta).count(b"\n") == 3
    assert b"\r" not in sse(delta)


def test_the_end_of_an_event_stream_is_done() -> None:
    assert SSE_DONE == b"data: [DONE]\n\n"
