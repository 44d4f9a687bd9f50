"""Steps of scenarios over HTTP: what a client asks for, and what it expects."""

from collections.abc import Mapping
from typing import Any

from protocol.codec import encode
from protocol.conformance.actions import Answer, Closed, Request, Silence, Steps
from protocol.conformance.captured import read_event, read_event_stream, read_response
from protocol.conformance.check import Target
from protocol.conformance.refusals import Refusal, refusal
from protocol.conformance.rules import NonconformityError, Rule, expect, require
from protocol.conformance.shapes import Event

_NO_HEADERS: Mapping[str, str] = {}
_JSON = {"Content-Type": "application/json"}
_ERROR_MEMBERS = {"message", "type", "param", "code"}


def ask(
    method: str,
    path: str,
    body: bytes | None = None,
    max_events: int | None = None,
    headers: Mapping[str, str] = _NO_HEADERS,
) -> Steps[Answer]:
    """Make a request and return the answer, whatever it is. A body is JSON unless a header says
    otherwise.

    Raises:
        NonconformityError: there is none.
    """
    kind = _NO_HEADERS if body is None else _JSON
    match (yield Request(method, path, body, {**kind, **headers}, max_events)):
        case Closed(code, reason):
            raise NonconformityError(f"the server closed: {code} {reason}".rstrip())
        case Silence(seconds):
            raise NonconformityError(f"no answer in {seconds:g} s")
        case answer:
            assert isinstance(answer, Answer)
            return answer


def post(target: Target, path: str = "/responses", **members: Any) -> Steps[Event]:
    """Return the response to a create.

    Raises:
        NonconformityError: it is refused, or not as a response should be.
        NotSupportedError: the refusal says that the server does not do it.
    """
    answer = yield from ask("POST", path, encode(target.body(**members)))
    _expect_success(answer)
    return read_response(answer.body)


def post_streamed(target: Target, **members: Any) -> Steps[list[Event]]:
    """Return the events of the response to a create, judged by the grammar."""
    body = encode(target.body(stream=True, **members))
    answer = yield from ask("POST", "/responses", body)
    _expect_success(answer)
    kind = answer.headers.get("content-type", "")
    require(kind.startswith("text/event-stream"), Rule.SSE_FRAMES, f"a stream of type {kind!r}")
    return read_event_stream(answer.body, judges_frames=False)


def post_refused(target: Target, raw: bytes | None = None, **members: Any) -> Steps[Refusal]:
    """Return why a create, or the body ``raw``, is refused.

    Raises:
        NonconformityError: it is not, or the body does not say why.
    """
    answer = yield from ask("POST", "/responses", raw or encode(target.body(**members)))
    expect(answer.status >= 400, f"expected a refusal, got {answer.status}")
    return refusal_of(answer)


def refusal_of(answer: Answer) -> Refusal:
    """Return what the body of a refusal says.

    Raises:
        NonconformityError: it has not the four members.
    """
    error = read_event(answer.body).get("error")
    is_right = (
        isinstance(error, dict)
        and set(error) >= _ERROR_MEMBERS
        and isinstance(error["param"], str | None)
    )
    require(is_right, Rule.ERROR_BODY, f"a {answer.status} with the error {error}")
    assert error is not None
    return refusal(answer.status, error)


def _expect_success(answer: Answer) -> None:
    if answer.status == 200:
        return
    refused = refusal_of(answer)
    refused.raise_unless_it_is_a_fault()
    raise NonconformityError(f"refused: {refused}")
