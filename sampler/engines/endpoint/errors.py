"""What an endpoint's errors are to us.

An endpoint says no in many shapes: a body that is flat ``{message, type, param, code}`` (Cerebras),
nested ``{"error": {...}}`` (OpenAI; everywhere inside a stream), ``{"detail": ...}`` (FastAPI),
text or a page. Of all that, its status decides what becomes of the run, and its message is repeated
as far as it is of use to the client: shortened, and without what only the operator may know.
"""

import html
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from protocol.codec import decode_object
from protocol.errors import ProtocolError
from protocol.validation import JsonObject
from sampler.engine_error import EngineError
from sampler.engines.endpoint.rate_limits import retry_after

MAX_MESSAGE_CHARACTERS = 300
"""How much of an endpoint's own words is repeated."""

SERVER_ERROR = "server_error"
RATE_LIMIT_EXCEEDED = "rate_limit_exceeded"
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
INVALID_PROMPT = "invalid_prompt"

_TRANSIENT_REFUSALS = frozenset({408, 409, 425, 429})
_LASTING_FAILURES = frozenset({501, 505})
"""Not implemented, and no such version of HTTP: that does not change in time."""


class EndpointError(EngineError):
    """The endpoint did not answer, or not with what it was asked for."""

    def __init__(
        self,
        message: str,
        *,
        code: str = SERVER_ERROR,
        status: int | None = None,
        is_transient: bool = False,
        retry_after_seconds: float | None = None,
    ) -> None:
        """Fail with ``message``; ``code`` is one of the four above."""
        super().__init__(message, code)
        self.status = status
        """The HTTP status, also of an error inside of a stream; None where there was no answer."""
        self.is_transient = is_transient
        """Whether the same request may succeed later."""
        self.retry_after_seconds = retry_after_seconds
        """When it may, where the endpoint has said so."""


class _Meaning(NamedTuple):
    code: str
    says: str
    repeats_endpoint: bool = True


_MEANINGS = {
    # What the endpoint says of the key may hold a part of it.
    401: _Meaning(SERVER_ERROR, "the endpoint refused the API key", repeats_endpoint=False),
    402: _Meaning(SERVER_ERROR, "the endpoint's account has no credit", repeats_endpoint=False),
    403: _Meaning(SERVER_ERROR, "the endpoint refused the API key", repeats_endpoint=False),
    404: _Meaning(SERVER_ERROR, "the endpoint does not know the model or the path"),
    429: _Meaning(RATE_LIMIT_EXCEEDED, "the endpoint's rate limit is reached"),
    **dict.fromkeys(
        (400, 413, 422), _Meaning(INVALID_PROMPT, "the endpoint does not take the request")
    ),
}
_TOO_LONG = _Meaning(CONTEXT_LENGTH_EXCEEDED, "the endpoint's context window is too short")

_IS_TOO_LONG = re.compile(
    r"context[ _-]?(length|window|size)|reduce the length|prompt is too long|too many tokens"
    r"|max_model_len",
    re.IGNORECASE,
)
_STATUS_BY_WORD = {
    "rate_limit": 429,
    "too_many_requests": 429,
    "overloaded": 503,
    "unavailable": 503,
    "context_length": 400,
    "invalid_request": 400,
    "badrequest": 400,
}
"""For errors inside of a stream that have no status: what their code or type has in it."""

_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.IGNORECASE | re.DOTALL)


class _Said(NamedTuple):
    """What an error says, whatever its shape."""

    message: str = ""
    code: str = ""
    type: str = ""


def error_of_answer(
    status: int, headers: Mapping[str, str], body: bytes, secrets: Collection[str]
) -> EndpointError:
    """Return the error that an HTTP answer is.

    Args:
        status: other than 200.
        headers: with their names in lower case, or of any case where the mapping does not mind.
        body: of the answer, or its beginning.
        secrets: what no message may hold.
    """
    return _error(status, _said_in(body), secrets, retry_after(headers))


def error_in_stream(event: JsonObject, secrets: Collection[str]) -> EndpointError | None:
    """Return the error that ``event``, out of a stream, is, or None for one that is none.

    It is nested, or else flat: a message with its code or type, where an answer has choices.
    """
    if not event.get("error"):
        if "message" not in event or "choices" in event or not event.keys() & {"code", "type"}:
            return None
        event = {**event, "error": event}
    said = _said_by(event)
    return _error(_status_in(event, said), said, secrets, None)


def _error(
    status: int, said: _Said, secrets: Collection[str], retry_after_seconds: float | None
) -> EndpointError:
    meaning = _MEANINGS.get(status, _Meaning(SERVER_ERROR, f"the endpoint answered {status}"))
    if meaning.code == INVALID_PROMPT and _IS_TOO_LONG.search(f"{said.code} {said.message}"):
        meaning = _TOO_LONG
    message = meaning.says
    if meaning.repeats_endpoint and (detail := _shortened(said.message, secrets)):
        message += f": {detail}"
    if retry_after_seconds is not None and meaning.code == RATE_LIMIT_EXCEEDED:
        # Codex reads it out of the text, and waits as long.
        message += f" (try again in {retry_after_seconds:.3g}s)"
    return EndpointError(
        message,
        code=meaning.code,
        status=status,
        # An account without credit is told as a rate limit by some, and stays without.
        is_transient=_may_pass(status) and said.code != "insufficient_quota",
        retry_after_seconds=retry_after_seconds,
    )


def _may_pass(status: int) -> bool:
    """Tell whether the same request may succeed later.

    OpenAI's SDK tries again after 408, 409, 429 and whatever is 500 or more: proxies and content
    networks have statuses of their own there, like 524 and 529.
    """
    return status in _TRANSIENT_REFUSALS or (status >= 500 and status not in _LASTING_FAILURES)


def _shortened(message: str, secrets: Collection[str]) -> str:
    for secret in secrets:
        message = message.replace(secret, "***")
    message = " ".join(message.split())
    if len(message) <= MAX_MESSAGE_CHARACTERS:
        return message
    return message[: MAX_MESSAGE_CHARACTERS - 1] + "…"


def _said_in(body: bytes) -> _Said:
    try:
        return _said_by(decode_object(body))
    except ProtocolError:
        text = body.decode(errors="replace")
    if text.lstrip().startswith("<"):
        title = _TITLE.search(text)
        text = html.unescape(title[1]) if title else ""
    return _Said(text)


def _said_by(value: JsonObject) -> _Said:
    """Return what an error object says; a list of errors, as FastAPI makes it, as it stands."""
    error = value.get("error") or value.get("detail") or value
    if not isinstance(error, dict):
        return _Said(str(error))
    message = error.get("message") or error.get("detail") or ""
    return _Said(str(message), _word(error.get("code")), _word(error.get("type")))


def _word(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _status_in(event: JsonObject, said: _Said) -> int:
    """Return the status of an error inside of a stream; 500 where it cannot be told."""
    error = event["error"]
    members = error if isinstance(error, dict) else {}
    for value in (event.get("status_code"), members.get("status"), members.get("code")):
        if isinstance(value, int) and 400 <= value < 600:
            return value
    words = f"{said.code} {said.type}".lower()
    return next((status for word, status in _STATUS_BY_WORD.items() if word in words), 500)
