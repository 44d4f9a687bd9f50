"""A refusal, as HTTP tells it; also where a WebSocket was asked for, in place of the upgrade."""

from starlette.responses import Response

from protocol import errors
from protocol.codec import encode
from protocol.errors import ProtocolError
from server.request_body import CONTENT_ENCODINGS

_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    415: {"Accept-Encoding": ", ".join(CONTENT_ENCODINGS)},
    426: {"Upgrade": "websocket"},
    503: {"Connection": "close"},
}
"""What must or should come with a status (RFC 9110, 15.5 and 12.5.3)."""


def error_response(error: ProtocolError) -> Response:
    """Return the HTTP answer for ``error``."""
    return Response(
        encode(errors.error_body(error)),
        status_code=error.status,
        headers=_HEADERS.get(error.status),
        media_type="application/json",
    )
