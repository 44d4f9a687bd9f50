"""Faults in what is kept, in the background, and after clients that went away."""

from typing import Any

import msgspec

from protocol import errors
from protocol.client_events import CreateParams
from protocol.conformance.actions import Action, Answer, Close, Outcome, Request
from protocol.conformance.rules import Rule
from protocol.conformance.shapes import Event
from protocol.errors import ProtocolError
from protocol.response import ResponseResource
from tests.protocol.conformance.faults.fault import Faults
from tests.protocol.conformance.model_server import Connection, Lane, ModelServer, Run

faults = Faults()

ITEMS = "input-items-*"
CANCEL = "background-response-can-be-cancelled"
RESUME = "background-stream-is-resumed"
UNKNOWN = "unknown-response-is-not-found"
COUNT = "input-tokens-are-those-of-the-response"
MODELS = "models-are-listed"


# --- What is stored ------------------------------------------------------------------------------


@faults.doing(Rule.CONTINUES_FROM_PARENT, "stored-response-is-a-parent*")
class ForgetsWhatItStores(ModelServer):
    """What is stored can be retrieved, and not continued."""

    def parent(self, response_id: str | None, connection: Connection | None) -> Run | None:
        if response_id in self.stored:
            raise errors.previous_response_not_found(response_id)
        return super().parent(response_id, connection)


@faults.doing(Rule.CONTINUES_FROM_PARENT, "chained/stored-response-is-a-parent-on-sockets")
class KeepsTransportsApart(ModelServer):
    """A WebSocket knows only what was made on one."""

    def begin(
        self, body: Event, connection: Connection | None = None, lane: Lane | None = None
    ) -> Run:
        is_known = any(body.get("previous_response_id") in c.runs for c in self._connections())
        if connection is not None and body.get("previous_response_id") and not is_known:
            raise errors.previous_response_not_found(body["previous_response_id"])
        return super().begin(body, connection, lane)

    def _connections(self) -> list[Connection]:
        return list(self.connections.values())


@faults.doing(Rule.CONTINUES_FROM_PARENT, "stored-response-outlives-its-connection")
class StoresWithTheConnection(ModelServer):
    """What is stored is gone with its connection."""

    def perform(self, action: Action) -> Outcome:
        if isinstance(action, Close):
            self.stored.clear()
        return super().perform(action)


@faults.doing(Rule.CONTINUES_FROM_PARENT, "http/stored-response-is-a-parent")
class NamesNoParent(ModelServer):
    """A response over HTTP does not name its parent."""

    def resource(self, response: Event) -> Event:
        return response | {"previous_response_id": None}


@faults.doing(Rule.STORED_RESPONSES, "deleted-response-is-no-parent")
class ContinuesWhatIsDeleted(ModelServer):
    """A response that was deleted is still continued."""

    def __init__(self) -> None:
        super().__init__()
        self.deleted: dict[str, Run] = {}

    def delete(self, run: Run) -> None:
        super().delete(run)
        self.deleted[run.id] = run

    def parent(self, response_id: str | None, connection: Connection | None) -> Run | None:
        if response_id in self.deleted:
            return self.deleted[response_id]
        return super().parent(response_id, connection)


@faults.doing(Rule.STORED_RESPONSES, UNKNOWN)
class UnknownIsWrong(ModelServer):
    """A response that is not known is a 400."""

    def find(self, response_id: str) -> Run:
        try:
            return super().find(response_id)
        except ProtocolError as error:
            error.status = 400
            raise


@faults.doing(Rule.STORED_RESPONSES, UNKNOWN)
class DeletesAnything(ModelServer):
    """What never was is deleted with success."""

    def route(self, request: Request) -> Answer:
        if request.method == "DELETE":
            return self.json({"object": "response", "deleted": True})
        return super().route(request)


@faults.doing(Rule.INPUT_ITEMS, ITEMS)
class ListsOutput(ModelServer):
    """Listed is what the model said."""

    def input_items(self, run: Run, asked: dict[str, str]) -> Event:
        return super().input_items(run, asked) | {"data": list(run.stream.output)}


@faults.doing(Rule.INPUT_ITEMS, "input-items-are-listed")
class ListsTheFirstFirst(ModelServer):
    """The first item comes first, unless it is asked for otherwise."""

    def input_items(self, run: Run, asked: dict[str, str]) -> Event:
        return super().input_items(run, {"order": "asc"} | asked)


@faults.doing(Rule.INPUT_ITEMS, "input-items-come-in-pages")
class OnePageForAll(ModelServer):
    """All items are on one page."""

    def input_items(self, run: Run, asked: dict[str, str]) -> Event:
        return super().input_items(run, asked | {"limit": "100"})


@faults.doing(Rule.INPUT_ITEMS, "input-items-come-in-pages")
class BeginsAnewOnEachPage(ModelServer):
    """Each page is the first."""

    def input_items(self, run: Run, asked: dict[str, str]) -> Event:
        asked = {name: value for name, value in asked.items() if name != "after"}
        return super().input_items(run, asked)


@faults.doing(Rule.INPUT_ITEMS, ITEMS)
class NeverAtTheEnd(ModelServer):
    """There are always more pages."""

    def input_items(self, run: Run, asked: dict[str, str]) -> Event:
        return super().input_items(run, asked) | {"has_more": True}


@faults.doing(Rule.INPUT_ITEMS, "input-items-are-listed")
class PagesWithoutEnds(ModelServer):
    """A page does not say where it ends."""

    def input_items(self, run: Run, asked: dict[str, str]) -> Event:
        return super().input_items(run, asked) | {"last_id": "in_9"}


# --- In the background ---------------------------------------------------------------------------


@faults.doing(Rule.BACKGROUND, CANCEL)
class ReturnsWhenItIsOver(ModelServer):
    """A response in the background is returned when it is over."""

    def post(self, body: bytes, max_events: int | None = None) -> Answer:
        super().post(body, max_events)
        (run,) = self.stored.values()
        self.replay(run, -1)
        return self.json(run.stream.response)


@faults.doing(Rule.BACKGROUND, CANCEL)
class FindsNoneThatRuns(ModelServer):
    """A response in the background is not found before it is over."""

    def find(self, response_id: str) -> Run:
        run = super().find(response_id)
        if not run.stream.is_finished:
            raise errors.response_not_found(response_id)
        return run


@faults.doing(Rule.BACKGROUND, CANCEL)
class CancelsNothing(ModelServer):
    """A response that is cancelled goes on."""

    def leave(self, run: Run) -> None:
        pass


@faults.doing(Rule.BACKGROUND, CANCEL)
class CancelsForTheMoment(ModelServer):
    """A response that was cancelled is in progress again when it is polled."""

    def find(self, response_id: str) -> Run:
        run = super().find(response_id)
        return run if not run.stream.is_finished else self.begin({"input": "Hi"})


@faults.doing(Rule.BACKGROUND, CANCEL)
class ForgetsThatItIsBehind(ModelServer):
    """A response in the background does not say that it is."""

    def json(self, value: Any, status: int = 200) -> Answer:
        if isinstance(value, ResponseResource):
            value = msgspec.structs.replace(value, background=False)
        return super().json(value, status)


@faults.doing(Rule.BACKGROUND, "others-are-not-cancelled")
class CancelsAnything(ModelServer):
    """A response that is over is cancelled with success."""

    def cancel(self, run: Run) -> ResponseResource:
        return run.stream.response


@faults.doing(Rule.BACKGROUND, "background-has-to-be-stored")
class RunsUnseen(ModelServer):
    """What is not stored runs in the background."""

    def parse(self, body: Event, transport: Any) -> CreateParams:
        return super().parse(body | {"store": True}, transport)


@faults.doing(Rule.STREAM_RESUMES, RESUME)
class BeginsAgain(ModelServer):
    """A stream that is read on begins again."""

    def replay(self, run: Run, after: int) -> Answer:
        return super().replay(run, -1)


@faults.doing(Rule.STREAM_RESUMES, RESUME)
class SkipsOne(ModelServer):
    """A stream that is read on leaves an event out."""

    def replay(self, run: Run, after: int) -> Answer:
        return super().replay(run, after + 1)


@faults.doing(Rule.STREAM_RESUMES, RESUME)
class TellsTheRestNever(ModelServer):
    """A stream that is read on ends as far as it has come."""

    def replay(self, run: Run, after: int) -> Answer:
        return self.event_stream(run.told[after : after + 2], b"")


@faults.doing(Rule.STREAM_RESUMES, RESUME)
class KeepsNoOutput(ModelServer):
    """What was streamed is not what is kept."""

    def json(self, value: Any, status: int = 200) -> Answer:
        if isinstance(value, ResponseResource):
            value = msgspec.structs.replace(value, output=())
        return super().json(value, status)


# --- Clients that go away ------------------------------------------------------------------------


@faults.doing(Rule.CLIENT_MAY_LEAVE, "client-that-leaves-harms-nobody")
class WaitsForTheGone(ModelServer):
    """While a response is not read to its end, no other begins."""

    is_busy = False

    def begin(
        self, body: Event, connection: Connection | None = None, lane: Lane | None = None
    ) -> Run:
        if self.is_busy:
            raise errors.server_error("busy")
        return super().begin(body, connection, lane)

    def leave(self, run: Run) -> None:
        self.is_busy = True

    def perform(self, action: Action) -> Outcome:
        if isinstance(action, Close):
            self.is_busy = True
        return super().perform(action)


@faults.doing(Rule.SEQUENCE_NUMBERS, "chained/client-that-leaves-harms-nobody")
class TellsTheNextOne(ModelServer):
    """What was not read any more is told to the next client."""

    left: Lane | None = None

    def perform(self, action: Action) -> Outcome:
        if isinstance(action, Close):
            self.left = self.connections[action.socket].lanes[None]
        came = super().perform(action)
        if self.left and self.connections:
            for connection in self.connections.values():
                connection.lanes[None] = self.left
        return came


@faults.doing(Rule.ONE_TERMINAL, "response-that-nobody-reads-ends")
class LosesTheUnread(ModelServer):
    """A response that nobody reads is a failure of the server."""

    def leave(self, run: Run) -> None:
        self.stored[run.id].params = None  # type: ignore[assignment]

    def find(self, response_id: str) -> Run:
        run = super().find(response_id)
        if run.params is None:
            raise errors.server_error("oops")
        return run


@faults.doing(Rule.TERMINAL_STATUS, "response-that-nobody-reads-ends")
class BreaksTheUnread(ModelServer):
    """A response that nobody reads is incomplete for no reason."""

    def json(self, value: Any, status: int = 200) -> Answer:
        if isinstance(value, ResponseResource):
            value = msgspec.structs.replace(value, status="incomplete")
        return super().json(value, status)


# --- Beside responses ----------------------------------------------------------------------------


@faults.doing(Rule.INPUT_TOKENS, COUNT)
class CountsTheInputOnly(ModelServer):
    """Counted is the input, without tools and instructions."""

    def input_tokens(self, body: Event) -> Event:
        return super().input_tokens({"input": body["input"]})


@faults.doing(Rule.INPUT_TOKENS, COUNT)
class CountsAsAResponse(ModelServer):
    """What is counted is called a response."""

    def input_tokens(self, body: Event) -> Event:
        return super().input_tokens(body) | {"object": "response"}


@faults.doing(Rule.MODELS, MODELS)
class ListsNoModel(ModelServer):
    """No model is listed."""

    def models(self) -> list[Event]:
        return []


@faults.doing(Rule.MODELS, MODELS)
class ListsAnotherModel(ModelServer):
    """The model that answers is not listed."""

    def models(self) -> list[Event]:
        return [model | {"id": "other"} for model in super().models()]


@faults.doing(Rule.MODELS, MODELS)
class FindsNoModel(ModelServer):
    """A model that is listed is not found."""

    def model(self, name: str) -> Event:
        raise errors.model_not_found(name)
