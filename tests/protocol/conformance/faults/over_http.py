"""Faults over HTTP."""

from protocol import errors
from protocol.codec import encode
from protocol.conformance.actions import Answer, Request
from protocol.conformance.rules import Rule
from protocol.conformance.shapes import Event
from protocol.errors import ProtocolError
from tests.protocol.conformance.faults.fault import Faults
from tests.protocol.conformance.model_server import Connection, Lane, ModelServer, Run

faults = Faults()

FRAMED = "events-are-framed"


@faults.doing(Rule.SSE_FRAMES, FRAMED)
class NoDone(ModelServer):
    """No [DONE] at the end."""

    def sse_end(self) -> bytes:
        return b""


@faults.doing(Rule.SSE_FRAMES, FRAMED)
class FramesWithIds(ModelServer):
    """Events with an id line."""

    def sse(self, event: Event) -> bytes:
        return b"id: 1\n" + super().sse(event)


@faults.doing(Rule.SSE_FRAMES, FRAMED)
class AllAreMessages(ModelServer):
    """Event lines that all say message."""

    def sse(self, event: Event) -> bytes:
        return b"event: message\ndata: " + encode(event) + b"\n\n"


@faults.doing(Rule.SSE_FRAMES, FRAMED)
class StreamsAsJson(ModelServer):
    """A stream that says it is JSON."""

    def answer(self, request: Request) -> Answer:
        found = super().answer(request)
        return Answer(found.status, {"content-type": "application/json"}, found.body)


@faults.doing(Rule.ONE_PATH, "one-path-takes-both-methods")
class FailsAtGet(ModelServer):
    """A plain GET is a failure of the server."""

    def answer(self, request: Request) -> Answer:
        if request.method == "GET":
            return Answer(500, {}, b"")
        return super().answer(request)


@faults.doing(Rule.OPEN_RESPONSE_MEMBERS, "response-has-all-members")
class LeavesNullsOut(ModelServer):
    """Members that are null are left out."""

    def resource(self, response: Event) -> Event:
        return {name: value for name, value in response.items() if value is not None}


@faults.doing(Rule.STREAM_IS_THE_RESPONSE, "stream-ends-as-the-response")
class TellsMoreAtOnce(ModelServer):
    """Without a stream a response has one member more."""

    def resource(self, response: Event) -> Event:
        return response | {"output_text": "Hm."}


@faults.doing(Rule.REFUSED_BEFORE_STREAM, "wrong-request-gets-no-stream")
class ErrorsInStreams(ModelServer):
    """A wrong request gets 200, and a stream with an error."""

    def answer(self, request: Request) -> Answer:
        found = super().answer(request)
        if found.status < 400:
            return found
        body = b"event: error\ndata: " + found.body + b"\n\n"
        return Answer(200, {"content-type": "text/event-stream"}, body)


@faults.doing(Rule.ERROR_BODY, "body-that-is-no-json-is-refused")
class TerseErrors(ModelServer):
    """Errors have no param."""

    def error_body(self, error: ProtocolError) -> Event:
        body = super().error_body(error)
        del body["error"]["param"]
        return body


@faults.doing(Rule.STORED_RESPONSES, "stored-response-is-kept-until-deleted")
class StoresNothing(ModelServer):
    """What it says is stored is not."""

    def find(self, response_id: str) -> Run:
        raise errors.response_not_found(response_id)


@faults.doing(Rule.STORED_RESPONSES, "stored-response-is-kept-until-deleted")
class DeletesNothing(ModelServer):
    """A response that was deleted is still there."""

    def delete(self, run: Run) -> None:
        pass


@faults.doing(Rule.STORE_FALSE_IS_LOCAL, "what-is-not-stored-is-no-parent")
class StoresEverything(ModelServer):
    """What is not to be stored is."""

    def begin(
        self, body: Event, connection: Connection | None = None, lane: Lane | None = None
    ) -> Run:
        run = super().begin(body, connection, lane)
        self.stored[run.id] = run
        return run


@faults.doing(Rule.ONE_RESPONSE_ID, "requests-at-once-are-apart")
class OneIdForAll(ModelServer):
    """All responses have one id."""

    def fresh_id(self, prefix: str) -> str:
        return "resp_1" if prefix == "resp" else super().fresh_id(prefix)
