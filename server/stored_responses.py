"""The routes of responses that were made before, or are being made in the background."""

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from protocol import errors
from protocol.codec import SSE_DONE, encode, sse_frame
from protocol.response import ResponseError
from protocol.validation import JsonObject
from server.background import BackgroundRuns, LiveResponse
from server.event_stream import EventStream, Frame, failure_frames, sse_frames
from server.response_store import ResponseStore, StoredResponse
from server.settings import Settings

Q = TypeVar("Q", bound=Struct)

TERMINAL_EVENTS = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",  # there is no event of that name
    "failed": "response.failed",
}
"""By the status of the response; the others go on."""


class _Retrieval(Struct, frozen=True):
    """What ``GET`` may ask for. ``include`` and ``include_obfuscation`` are read over: a response
    is given as it was made."""

    stream: bool = False
    starting_after: int = -1


class _Page(Struct, frozen=True):
    """Which items to list; ``include`` is read over."""

    after: str = ""
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"


class _Outcome(Struct, frozen=True):
    """What matters here of a stored response."""

    status: str
    background: bool = False
    error: ResponseError | None = None


class _Event(Struct, frozen=True):
    """What matters here of a stored event."""

    type: str
    sequence_number: int


class StoredResponsesApi:
    """The endpoints. A response of another key is not found, like one that never was.

    Args:
        store: None where nothing is stored.
        background: the responses that are being made.
        forget: called with the key and the id of a response that is deleted.
        send_timeout_seconds: how long a client may read nothing of a stream.
    """

    def __init__(
        self,
        store: ResponseStore | None,
        background: BackgroundRuns,
        forget: Callable[[str, str], None] = lambda key, response_id: None,
        send_timeout_seconds: float = Settings.send_timeout_seconds,
    ) -> None:
        self._store = store
        self._background = background
        self._forget = forget
        self._send_timeout_seconds = send_timeout_seconds

    def routes(self) -> list[Route]:
        """Return the routes, to be put into an application."""
        path = "/v1/responses/{response_id}"
        return [
            Route(path, self.get_response, methods=["GET"]),
            Route(path, self.delete_response, methods=["DELETE"]),
            Route(f"{path}/cancel", self.cancel_response, methods=["POST"]),
            Route(f"{path}/input_items", self.list_input_items, methods=["GET"]),
        ]

    async def get_response(self, request: Request) -> Response:
        """``GET /v1/responses/{response_id}``: the response, or its events once more."""
        wanted = _query(request, _Retrieval)
        if (live := self._live(request)) is not None:
            if wanted.stream:
                return self._stream(sse_frames(live.follow(), wanted.starting_after))
            return _json(encode(live.response))
        stored = await self._stored(request)
        if wanted.stream:
            return self._stream(_replay(stored, wanted.starting_after))
        return _json(stored.response)

    async def delete_response(self, request: Request) -> Response:
        """``DELETE /v1/responses/{response_id}``: also ends a run in the background."""
        key, response_id = key_id(request), _response_id(request)
        if (live := self._live(request)) is not None:
            await live.cancel()
            self._background.forget(key, response_id)
        self._forget(key, response_id)
        is_stored = self._store is not None and await self._store.delete(key, response_id)
        if live is None and not is_stored:
            raise errors.response_not_found(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel_response(self, request: Request) -> Response:
        """``POST /v1/responses/{response_id}/cancel``: ends a run in the background, and gives the
        response as it is after that; one that has ended stays what it is."""
        if (live := self._live(request)) is not None:
            return _json(encode(await live.cancel()))
        stored = await self._stored(request)
        if not _outcome(stored).background:
            raise errors.response_not_background(stored.id)
        return _json(stored.response)

    async def list_input_items(self, request: Request) -> Response:
        """``GET /v1/responses/{response_id}/input_items``: a page of the input in effect."""
        page = _query(request, _Page)
        stored = await self._stored(request)
        return _json(encode(_listed(stored.input_items, page)))

    def _stream(self, frames: AsyncGenerator[bytes, None]) -> EventStream:
        return EventStream(frames, self._send_timeout_seconds)

    def _live(self, request: Request) -> LiveResponse | None:
        return self._background.get(key_id(request), _response_id(request))

    async def _stored(self, request: Request) -> StoredResponse:
        response_id = _response_id(request)
        if self._store is not None:
            stored = await self._store.get(key_id(request), response_id)
            if stored is not None:
                return stored
        raise errors.response_not_found(response_id)


def key_id(request: Request) -> str:
    """Return the id of the API key that ``request`` came with; empty where none is asked for."""
    return getattr(request.state, "key_id", None) or ""


def _response_id(request: Request) -> str:
    return str(request.path_params["response_id"])


def _query(request: Request, type_: type[Q]) -> Q:
    try:
        return msgspec.convert(dict(request.query_params), type_, strict=False)
    except msgspec.ValidationError as error:
        raise errors.from_validation(error) from None


def _json(data: bytes) -> Response:
    return Response(data, media_type="application/json")


def _outcome(stored: StoredResponse) -> _Outcome:
    return msgspec.json.decode(stored.response, type=_Outcome)


# --- A page of input items -----------------------------------------------------------------------


def _listed(items: Sequence[JsonObject], page: _Page) -> JsonObject:
    ordered = items if page.order == "asc" else items[::-1]
    first = _index_after(ordered, page.after)
    data = ordered[first : first + page.limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": first + len(data) < len(ordered),
    }


def _index_after(items: Sequence[JsonObject], item_id: str) -> int:
    """Return where the page begins that follows the item."""
    if not item_id:
        return 0
    for index, item in enumerate(items):
        if item["id"] == item_id:
            return index + 1
    raise errors.unexpected_value("after", item_id, "the id of an input item of this response")


# --- The events of a stored response -------------------------------------------------------------


def _replay(stored: StoredResponse, starting_after: int) -> AsyncGenerator[bytes, None]:
    """Return the frames of the events that follow the one with that number.

    The terminal event is made of the response: where the process died, it was never told.
    """
    outcome = _outcome(stored)
    if outcome.status not in TERMINAL_EVENTS:
        raise errors.invalid_value(
            "stream", "expected false, as the response goes on elsewhere than in the background"
        )
    return _resumed(_stored_frames(stored, outcome, starting_after), starting_after)


async def _resumed(frames: Iterable[Frame], starting_after: int) -> AsyncGenerator[bytes, None]:
    for number, data in frames:
        if number > starting_after:
            yield data
    yield SSE_DONE


def _stored_frames(
    stored: StoredResponse, outcome: _Outcome, starting_after: int
) -> Iterator[Frame]:
    number = 0
    for data in stored.events:
        event = msgspec.json.decode(data, type=_Event)
        if event.type in TERMINAL_EVENTS.values():
            yield from _terminal_frames(stored, outcome, event.sequence_number)
            return
        yield Frame(event.sequence_number, sse_frame(event.type, data))
        number = event.sequence_number + 1
    # Not all events were stored, so the client may have more of them than we.
    yield from _terminal_frames(stored, outcome, max(number, starting_after + 1))


def _terminal_frames(
    stored: StoredResponse, outcome: _Outcome, sequence_number: int
) -> Sequence[Frame]:
    response = msgspec.Raw(stored.response)
    if outcome.error is not None:
        return failure_frames(sequence_number, outcome.error, response)
    event_type = TERMINAL_EVENTS[outcome.status]
    event = {"type": event_type, "sequence_number": sequence_number, "response": response}
    return [Frame(sequence_number, sse_frame(event_type, encode(event)))]
