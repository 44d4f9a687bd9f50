import inspect
import re

import msgspec
import pytest

from protocol import errors
from protocol.codec import decode_object, encode, sse
from protocol.errors import ProtocolError

EVERY_KIND = [
    errors.invalid_json("truncated"),
    errors.binary_frame(),
    errors.payload_too_large(10),
    errors.unsupported_content_encoding("br"),
    errors.invalid_body("gzip"),
    errors.unsupported_event_type("response.cancel"),
    errors.invalid_api_key(),
    errors.forbidden_origin("https://example.org"),
    errors.forbidden_host("example.org"),
    errors.missing_required_parameter("model"),
    errors.unknown_parameter("stream_id"),
    errors.invalid_type("model", "got an int"),
    errors.invalid_value("top_p", "got 2"),
    errors.unexpected_value("top_p", 2, "at most 1"),
    errors.unsupported_parameter("prompt", "not stored"),
    errors.unsupported_content("input_image", "input[0].content[0]"),
    errors.model_not_found("gpt-9"),
    errors.response_not_found("resp_0"),
    errors.previous_response_not_found("resp_0"),
    errors.item_not_found("msg_0", "input[0]"),
    errors.invalid_prompt("abuse", "input[0]"),
    errors.context_length_exceeded(9, 8),
    errors.orphan_output("call_0"),
    errors.unanswered_call("call_0"),
    errors.unknown_call_id("call_0", "input[0].call_id"),
    errors.duplicate_call_id("call_0", "input[0].call_id"),
    errors.no_suspended_run(),
    errors.suspension_expired(),
    errors.response_in_progress("resp_0"),
    errors.response_already_completed("resp_0"),
    errors.response_not_background("resp_0"),
    errors.invalid_input("expected a string", "input"),
    errors.too_many_pending_steers(32),
    errors.successor_creation_failed("no such model"),
    errors.invalid_stream_id(),
    errors.websocket_stream_limit_reached(32),
    errors.websocket_connection_limit_reached(60),
    errors.too_many_queued(8),
    errors.too_many_connections(100),
    errors.unknown_path("/v1/response"),
    errors.upgrade_required(),
    errors.server_error("the server made a mistake"),
    errors.shutting_down(),
]
MAY_PASS = {"server_error", "rate_limit_exceeded"}


def test_the_table_lists_exactly_the_codes_in_use() -> None:
    listed = set(re.findall(r"^\| `(\w+)`", errors.__doc__ or "", flags=re.MULTILINE))

    assert listed == {error.code for error in EVERY_KIND if error.code}


def test_every_constructor_is_tried_here() -> None:
    constructors = [
        name
        for name, function in inspect.getmembers(errors, inspect.isfunction)
        if function.__annotations__.get("return") is ProtocolError
    ]

    assert len(constructors) == len(EVERY_KIND) + len(["from_validation", "failure"])


@pytest.mark.parametrize(
    ("code", "status", "error_type"),
    [
        ("rate_limit_exceeded", 429, "rate_limit_error"),
        ("context_length_exceeded", 400, "invalid_request_error"),
        ("invalid_prompt", 400, "invalid_request_error"),
        ("suspension_expired", 500, "server_error"),
        ("server_error", 500, "server_error"),
    ],
)
def test_a_failure_says_whose_doing_it_was(code: str, status: int, error_type: str) -> None:
    error = errors.failure(code, "so it is")

    assert (error.status, error.error_type, error.message) == (status, error_type, "so it is")
    assert error.code == ("server_error" if status == 500 else code)


@pytest.mark.parametrize("error", EVERY_KIND, ids=lambda error: error.code)
def test_only_what_may_pass_tells_a_client_to_try_again(error: ProtocolError) -> None:
    may_pass = error.code in MAY_PASS

    assert (error.status in (429, 500, 503)) == may_pass
    assert may_pass or error.status in (400, 401, 403, 404, 415, 426)
    assert (error.error_type != "invalid_request_error") == may_pass


def test_an_http_body_has_all_four_members() -> None:
    assert errors.error_body(errors.binary_frame()) == {
        "error": {
            "message": "expected a text frame, got a binary frame",
            "type": "invalid_request_error",
            "param": None,
            "code": "binary_frame",
        }
    }


def test_a_websocket_frame_nests_the_error_and_has_status_and_number() -> None:
    error = errors.model_not_found("gpt-9")

    frame = decode_object(encode(errors.error_event(error, 3)))

    assert frame == {"type": "error", "status": 404, "sequence_number": 3} | errors.error_body(
        error
    )


def test_a_websocket_frame_names_its_lane_if_that_has_a_name() -> None:
    frame = decode_object(encode(errors.error_event(errors.binary_frame(), 0, "lane")))

    assert frame["stream_id"] == "lane"


def test_a_stream_event_has_the_error_flat_and_nested() -> None:
    error = errors.model_not_found("gpt-9")
    flat = {"message": error.message, "code": "model_not_found", "param": "model"}

    head, data, *_ = sse(errors.sse_error_event(error, 3)).split(b"\n")

    assert head == b"event: error"
    assert decode_object(data.removeprefix(b"data: ")) == (
        {"type": "error", "sequence_number": 3} | flat | errors.error_body(error)
    )


def test_a_long_value_is_not_sent_back_in_full() -> None:
    assert len(errors.unknown_call_id("x" * 10_000, "input").message) < 200


@pytest.mark.parametrize(
    ("text", "root", "code", "param"),
    [
        ("Expected `str`, got `int` - at `$.a[0].b`", "", "invalid_type", "a[0].b"),
        ("Expected `str`, got `int` - at `$.b`", "input[2]", "invalid_type", "input[2].b"),
        ("Expected `array`, got `int`", "input", "invalid_type", "input"),
        ("Expected `float` <= 2.0 - at `$.t`", "", "invalid_value", "t"),
        ("Expected `str` of length <= 4 - at `$.m[...]`", "", "invalid_value", "m"),
        ("Expected `str` of length <= 3 - at `key` in `$.m`", "", "invalid_value", "m"),
        (
            "Object missing required field `c` - at `$.b`",
            "a",
            "missing_required_parameter",
            "a.b.c",
        ),
        ("Object missing required field `c`", "", "missing_required_parameter", "c"),
        ("Object contains unknown field `c` - at `$.b`", "a", "unknown_parameter", "a.b.c"),
        ("Invalid enum value ' - at `$.x`' - at `$.role`", "", "invalid_value", "role"),
    ],
)
def test_the_place_of_a_validation_error_becomes_the_param(
    text: str, root: str, code: str, param: str
) -> None:
    error = errors.from_validation(msgspec.ValidationError(text), root)

    assert (error.code, error.param) == (code, param)
