"""What the peer did wrong, and the three shapes in which it is told.

| code                                 | is used when                                              |
| ------------------------------------ | --------------------------------------------------------- |
| `invalid_json`                       | a body or frame is not one JSON object of valid Unicode   |
| `binary_frame`                       | a WebSocket frame is binary                               |
| `payload_too_large`                  | a body or frame is longer than the server reads           |
| `unsupported_content_encoding`       | a body is compressed in a way that is not read here (415) |
| `invalid_body`                       | a body is not compressed in the way that its header says  |
| `unsupported_event_type`             | a frame's `type` names no client event                    |
| `invalid_api_key`                    | the key is absent or wrong (401)                          |
| `forbidden_origin`                   | a web page of another origin asks (403)                   |
| `forbidden_host`                     | the `Host` is not a name of this server (403)             |
| `missing_required_parameter`         | a member that must be there is absent, null or empty      |
| `unknown_parameter`                  | a member that may not be there, where none else may       |
| `invalid_type`                       | a member has the wrong JSON type                          |
| `invalid_value`                      | a member has the right type and a value that cannot be    |
| `unsupported_parameter`              | a constraint that this server cannot keep                 |
| `unsupported_content`                | images, files, audio: the models read text only           |
| `model_not_found`                    | no such model (404)                                       |
| `response_not_found`                 | no such response, here or on this connection (404)        |
| `previous_response_not_found`        | `previous_response_id` names nothing that is still known  |
| `item_not_found`                     | an `item_reference` names nothing that is still known     |
| `invalid_prompt`                     | what is said may not be: a safety classifier's verdict    |
| `context_length_exceeded`            | the input does not fit the context window                 |
| `no_suspended_response`              | an append, and no response is suspended here              |
| `suspension_expired`                 | a suspended response waited too long for its outputs      |
| `response_in_progress`               | a response is to be followed before it has ended          |
| `response_already_completed`         | an inject or steer comes after the end of its response    |
| `response_not_background`            | a cancel of a response that is not in the background      |
| `unknown_call_id`                    | an output for a call that this response never made        |
| `duplicate_call_id`                  | a call or its output is given twice                       |
| `invalid_input`                      | a steer of another shape than a steer's                   |
| `too_many_pending_steers`            | more steers wait than are kept                            |
| `successor_creation_failed`          | what a steer asked for could not be started               |
| `invalid_stream_id`                  | a lane's name is not 1 to 256 of `A-Za-z0-9_.-`           |
| `websocket_stream_limit_reached`     | more named lanes than a connection may have               |
| `websocket_connection_limit_reached` | the connection is as old as it may get                    |
| `rate_limit_exceeded`                | more is waiting, or open, than the server holds (429)     |
| `upgrade_required`                   | a GET where only a WebSocket is spoken (426)              |
| `server_error`                       | our own doing, where no response is there to fail (500)   |
| none                                 | a call without output, an output without call; a path     |
|                                      | with nothing at it (404)                                  |

Where no status is given it is 400, which is final for every client. 409, 422, 429 and 5xx make the
SDKs and Codex send the same request again, so they are not for what would fail again. Nor is 404
where it can be helped, which Codex repeats too.
"""

import re
from reprlib import Repr
from typing import Any

import msgspec

INVALID_PROMPT = "invalid_prompt"

_short = Repr()
_short.maxstring = _short.maxother = 80
_quote = _short.repr


class ProtocolError(Exception):
    """A request that breaks the protocol. Nothing was changed by it."""

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        status: int = 400,
        error_type: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param
        self.status = status
        self.error_type = error_type


# --- The bytes and the frame ---------------------------------------------------------------------


def invalid_json(detail: str) -> ProtocolError:
    return ProtocolError(f"expected one JSON object: {detail}", code="invalid_json")


def binary_frame() -> ProtocolError:
    return ProtocolError("expected a text frame, got a binary frame", code="binary_frame")


def payload_too_large(limit: int) -> ProtocolError:
    return ProtocolError(f"expected at most {limit} bytes", code="payload_too_large")


def unsupported_content_encoding(encoding: str) -> ProtocolError:
    return ProtocolError(
        f"unsupported content encoding {_quote(encoding)}",
        code="unsupported_content_encoding",
        status=415,
    )


def invalid_body(encoding: str) -> ProtocolError:
    return ProtocolError(
        f"expected a whole body in the content encoding {_quote(encoding)}", code="invalid_body"
    )


def unsupported_event_type(event_type: str) -> ProtocolError:
    return ProtocolError(
        f"unsupported event type {_quote(event_type)}", code="unsupported_event_type", param="type"
    )


# --- Who asks, and from where --------------------------------------------------------------------


def invalid_api_key() -> ProtocolError:
    return ProtocolError(
        "expected a valid API key in the Authorization header", code="invalid_api_key", status=401
    )


def forbidden_origin(origin: str) -> ProtocolError:
    return ProtocolError(
        f"origin {_quote(origin)} is not allowed", code="forbidden_origin", status=403
    )


def forbidden_host(host: str) -> ProtocolError:
    return ProtocolError(f"host {_quote(host)} is not allowed", code="forbidden_host", status=403)


# --- One member ----------------------------------------------------------------------------------


def missing_required_parameter(param: str) -> ProtocolError:
    return ProtocolError(
        f"missing required parameter {_quote(param)}",
        code="missing_required_parameter",
        param=param,
    )


def unknown_parameter(param: str) -> ProtocolError:
    return ProtocolError(
        f"unknown parameter {_quote(param)}", code="unknown_parameter", param=param
    )


def invalid_type(param: str, detail: str) -> ProtocolError:
    return ProtocolError(
        f"invalid type for {_quote(param)}: {detail}", code="invalid_type", param=param
    )


def invalid_value(param: str, detail: str) -> ProtocolError:
    return ProtocolError(
        f"invalid value for {_quote(param)}: {detail}", code="invalid_value", param=param
    )


def unsupported_parameter(param: str, why: str) -> ProtocolError:
    return ProtocolError(
        f"unsupported parameter {_quote(param)}: {why}", code="unsupported_parameter", param=param
    )


def unsupported_content(part_type: str, param: str) -> ProtocolError:
    return ProtocolError(
        f"unsupported content {_quote(part_type)}: the models of this server read text only",
        code="unsupported_content",
        param=param,
    )


def unexpected_value(param: str, value: object, expected: str) -> ProtocolError:
    """Say what was expected at ``param`` and what came, the latter cut to a line."""
    return invalid_value(param, f"expected {expected}, got {_quote(value)}")


_VALIDATION = re.compile(r"(?s)(.*?)(?: - at (?:`key` in )?`\$([^`]*)`)?")
_MISSING = re.compile(r"Object missing required field `(.*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")


def from_validation(error: msgspec.ValidationError, root: str = "") -> ProtocolError:
    """Translate msgspec's ``... - at `$.a[0].b` ``, where ``$`` is the value at ``root``."""
    found = _VALIDATION.fullmatch(str(error))
    assert found is not None  # both parts may be empty, so it matches everything
    detail, path = found.groups(default="")
    path = root + path.partition("[...]")[0]  # msgspec does not name the keys of a map
    if missing := _MISSING.fullmatch(detail):
        return missing_required_parameter(f"{path}.{missing[1]}".lstrip("."))
    if unknown := _UNKNOWN.fullmatch(detail):
        return unknown_parameter(f"{path}.{unknown[1]}".lstrip("."))
    kind = invalid_type if ", got `" in detail else invalid_value
    return kind(path.lstrip("."), detail[:1].lower() + detail[1:200])


# --- What the request names ----------------------------------------------------------------------


def model_not_found(model: str) -> ProtocolError:
    return ProtocolError(
        f"model {_quote(model)} not found", code="model_not_found", param="model", status=404
    )


def response_not_found(response_id: str) -> ProtocolError:
    return ProtocolError(
        f"response {_quote(response_id)} not found", code="response_not_found", status=404
    )


def previous_response_not_found(response_id: str) -> ProtocolError:
    return ProtocolError(
        f"previous response {_quote(response_id)} not found",
        code="previous_response_not_found",
        param="previous_response_id",
    )


def item_not_found(item_id: str, param: str) -> ProtocolError:
    return ProtocolError(f"item {_quote(item_id)} not found", code="item_not_found", param=param)


def invalid_prompt(label: str, param: str) -> ProtocolError:
    return ProtocolError(
        f"this input is not allowed here: it was classified as {_quote(label)}",
        code=INVALID_PROMPT,
        param=param,
    )


def context_length_exceeded(needed: int, limit: int) -> ProtocolError:
    return ProtocolError(
        f"the input needs {needed} tokens, the context window holds {limit}",
        code="context_length_exceeded",
        param="input",
    )


# --- Calls and their outputs ---------------------------------------------------------------------


def orphan_output(call_id: str, param: str = "input") -> ProtocolError:
    return ProtocolError(
        f"No tool call found for function call output with call_id {_quote(call_id)}.",
        param=param,
    )


def unanswered_call(call_id: str, param: str = "input") -> ProtocolError:
    return ProtocolError(f"No tool output found for function call {_quote(call_id)}.", param=param)


def unknown_call_id(call_id: str, param: str) -> ProtocolError:
    return ProtocolError(
        f"this response made no call {_quote(call_id)}", code="unknown_call_id", param=param
    )


def duplicate_call_id(call_id: str, param: str) -> ProtocolError:
    return ProtocolError(
        f"call {_quote(call_id)} is given twice", code="duplicate_call_id", param=param
    )


# --- The lane ------------------------------------------------------------------------------------


def no_suspended_run() -> ProtocolError:
    return ProtocolError(
        "no response is suspended on this connection", code="no_suspended_response"
    )


def suspension_expired() -> ProtocolError:
    return ProtocolError("the outputs of the calls did not come in time", code="suspension_expired")


def response_in_progress(response_id: str) -> ProtocolError:
    return ProtocolError(
        f"response {_quote(response_id)} is still in progress",
        code="response_in_progress",
        param="previous_response_id",
    )


def response_already_completed(response_id: str) -> ProtocolError:
    return ProtocolError(
        f"response {_quote(response_id)} is already completed", code="response_already_completed"
    )


def response_not_background(response_id: str) -> ProtocolError:
    return ProtocolError(
        f"response {_quote(response_id)} does not run in the background",
        code="response_not_background",
    )


# --- Steering ------------------------------------------------------------------------------------


def invalid_input(detail: str, param: str | None) -> ProtocolError:
    return ProtocolError(detail, code="invalid_input", param=param)


def too_many_pending_steers(limit: int) -> ProtocolError:
    return ProtocolError(
        f"expected at most {limit} steers that wait", code="too_many_pending_steers"
    )


def successor_creation_failed(detail: str) -> ProtocolError:
    return ProtocolError(
        f"the successor could not be created: {detail}", code="successor_creation_failed"
    )


# --- The connection ------------------------------------------------------------------------------


def invalid_stream_id() -> ProtocolError:
    return ProtocolError(
        "expected 1 to 256 letters, digits, '_', '-' or '.'",
        code="invalid_stream_id",
        param="stream_id",
    )


def websocket_stream_limit_reached(limit: int) -> ProtocolError:
    return ProtocolError(
        f"expected at most {limit} different stream ids on a connection",
        code="websocket_stream_limit_reached",
        param="stream_id",
    )


def websocket_connection_limit_reached(minutes: float) -> ProtocolError:
    return ProtocolError(
        f"a connection is closed after {minutes:g} minutes; connect again to go on",
        code="websocket_connection_limit_reached",
    )


# --- The load ------------------------------------------------------------------------------------


def too_many_queued(limit: int) -> ProtocolError:
    return ProtocolError(
        f"expected at most {limit} messages that wait on this lane",
        code="rate_limit_exceeded",
        status=429,
        error_type="rate_limit_error",
    )


def too_many_connections(limit: int) -> ProtocolError:
    return ProtocolError(
        f"expected at most {limit} open connections",
        code="rate_limit_exceeded",
        status=429,
        error_type="rate_limit_error",
    )


# --- The server ----------------------------------------------------------------------------------


def unknown_path(path: str) -> ProtocolError:
    return ProtocolError(
        f"there is nothing at {_quote(path)}; the API is at /v1/responses and /v1/models",
        status=404,
    )


def upgrade_required() -> ProtocolError:
    return ProtocolError("expected a WebSocket upgrade", code="upgrade_required", status=426)


def server_error(message: str) -> ProtocolError:
    """Return what a client is told of a mistake of ours; it may try again."""
    return ProtocolError(message, code="server_error", status=500, error_type="server_error")


_FAILURES = {
    "rate_limit_exceeded": (429, "rate_limit_error"),
    "context_length_exceeded": (400, "invalid_request_error"),
    INVALID_PROMPT: (400, "invalid_request_error"),
}
"""Statuses and types of those that are not our doing, by their codes."""


def failure(code: str, message: str) -> ProtocolError:
    """Return what a client is told, who waits for the whole response, of why it failed."""
    if code not in _FAILURES:
        return server_error(message)
    status, error_type = _FAILURES[code]
    return ProtocolError(message, code=code, status=status, error_type=error_type)


def shutting_down() -> ProtocolError:
    """Return what a client is told that asks for more while the server ends: it may try again.

    Codex tries again after this code, and not after ``server_is_overloaded``.
    """
    return ProtocolError(
        "the server is shutting down", code="server_error", status=503, error_type="server_error"
    )


# --- On the wire ---------------------------------------------------------------------------------


class ErrorPayload(msgspec.Struct, frozen=True):
    """The four members that clients look for, all present, null allowed."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEvent(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """A WebSocket error frame (OpenAI reference, WebSocket events).

    Codex recognises it by ``status``, the AI SDK by ``sequence_number``.
    """

    status: int
    sequence_number: int
    error: ErrorPayload
    stream_id: str | msgspec.UnsetType = msgspec.UNSET  # where the lane has a name


class SseErrorEvent(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """An error in an event stream, flat and nested.

    OpenAI reference, Streaming events: flat. Open Responses 2026-04-24: nested. With the flat form
    alone the Python SDK ends without a word; with the nested form alone the AI SDK finds no schema.
    """

    sequence_number: int
    message: str
    param: str | None
    code: str | None
    error: ErrorPayload


def error_payload(error: ProtocolError) -> ErrorPayload:
    return ErrorPayload(error.message, error.error_type, error.param, error.code)


def error_body(error: ProtocolError) -> dict[str, Any]:
    """Return the body of an HTTP error answer (OpenAI reference, error codes)."""
    return {"error": msgspec.structs.asdict(error_payload(error))}


def error_event(
    error: ProtocolError, sequence_number: int, stream_id: str | None = None
) -> ErrorEvent:
    """Return the WebSocket frame for ``error``, which belongs to the lane ``stream_id``."""
    lane = msgspec.UNSET if stream_id is None else stream_id
    return ErrorEvent(error.status, sequence_number, error_payload(error), lane)


def sse_error_event(error: ProtocolError, sequence_number: int) -> SseErrorEvent:
    """Return the stream event for ``error``, to be followed by ``response.failed``."""
    return SseErrorEvent(
        sequence_number, error.message, error.param, error.code, error_payload(error)
    )
