"""JSON in and out.

Reading has two stages: first any JSON object, so that a frame with its ``type`` as the last member
or with members nobody knows is no trouble; then the modules of this package validate what they know
of it. msgspec refuses lone surrogates, NaN and infinities, so what was read can always be written.
"""

from typing import Any

import msgspec

from protocol import errors
from protocol.server_events import ServerEvent, event_type
from protocol.validation import JsonObject, convert

SSE_DONE = b"data: [DONE]\n\n"

MAX_DEPTH = 128
"""How deep JSON may nest, itself the first level. Whoever walks through what was read, to validate,
render or write it again, does so by recursion, which Python ends at about a thousand calls."""

_decoder = msgspec.json.Decoder()
_encoder = msgspec.json.Encoder()


def decode_object(data: bytes | str) -> JsonObject:
    """Decode one JSON object.

    Raises:
        ProtocolError: ``invalid_json``, also for what is nested deeper than ``MAX_DEPTH``.
    """
    try:
        value = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise errors.invalid_json(str(error)) from None
    except RecursionError:
        raise errors.invalid_json("nested too deeply") from None
    if not isinstance(value, dict):
        raise errors.invalid_json(f"got `{type(value).__name__}`")
    _check_depth(value)
    return value


def _check_depth(value: JsonObject) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            member
            for container in level
            for member in (container.values() if isinstance(container, dict) else container)
            if isinstance(member, dict | list)
        ]
        if not level:
            return
    raise errors.invalid_json(f"nested deeper than {MAX_DEPTH} levels")


def decode_client_event(data: bytes | str) -> tuple[str, JsonObject]:
    """Decode a WebSocket frame and return its ``type`` beside the whole of it."""
    frame = decode_object(data)
    if frame.get("type") is None:
        raise errors.missing_required_parameter("type")
    return convert(frame["type"], str, "type"), frame


def encode(value: Any) -> bytes:
    """Encode an event, a response or a plain value as JSON."""
    return _encoder.encode(value)


def sse(event: ServerEvent) -> bytes:
    """Frame ``event`` for an event stream."""
    return sse_frame(event_type(event), encode(event))


def sse_frame(name: str, data: bytes) -> bytes:
    """Frame an event that is JSON already; its ``event`` line repeats the ``type`` in ``data``.

    Open Responses 2026-04-24, Streaming; it forbids the ``id`` line.
    """
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
