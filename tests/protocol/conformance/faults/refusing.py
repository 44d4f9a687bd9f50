"""Faults in refusing, or in not refusing."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from protocol import errors
from protocol.client_events import CreateParams
from protocol.conformance.actions import Answer, Closed, Request
from protocol.conformance.rules import Rule
from protocol.conformance.shapes import Event
from protocol.errors import ProtocolError
from protocol.items import CallOutput, FunctionCall, InputItem
from tests.protocol.conformance.faults.fault import Faults
from tests.protocol.conformance.model_server import MODEL, Connection, ModelServer

faults = Faults()

MEMBERS = "*-are-named"


# --- Members -------------------------------------------------------------------------------------


@faults.doing(Rule.WRONG_MEMBERS, MEMBERS)
class NamesNoParam(ModelServer):
    """Of what is wrong the param is not told."""

    def parse(self, body: Event, transport: Any) -> CreateParams:
        try:
            return super().parse(body, transport)
        except ProtocolError as error:
            error.param = None
            raise


@faults.doing(Rule.WRONG_MEMBERS, MEMBERS)
class Unprocessable(ModelServer):
    """What is wrong is a 422, which clients send again."""

    def parse(self, body: Event, transport: Any) -> CreateParams:
        try:
            return super().parse(body, transport)
        except ProtocolError as error:
            error.status = 422
            raise


@faults.doing(Rule.WRONG_MEMBERS, MEMBERS)
class DropsWhatIsWrong(ModelServer):
    """Members that are wrong are left out."""

    def parse(self, body: Event, transport: Any) -> CreateParams:
        try:
            return super().parse(body, transport)
        except ProtocolError as error:
            wrong = str(error.param).partition(".")[0].partition("[")[0]
            rest = {name: value for name, value in body.items() if name != wrong}
            return super().parse({"input": "Hi", **rest}, transport)


@faults.doing(Rule.WRONG_MEMBERS, "create-without-input-is-refused")
class SaysSomethingAnyway(ModelServer):
    """A create without input is answered."""

    def parse(self, body: Event, transport: Any) -> CreateParams:
        return super().parse({"input": "Hi", **body}, transport)


@faults.doing(Rule.ERROR_TYPE, "type-says-whose-mistake-it-is")
class BlamesItself(ModelServer):
    """A mistake of the client is of type server_error, so that it is sent again."""

    def parse(self, body: Event, transport: Any) -> CreateParams:
        try:
            return super().parse(body, transport)
        except ProtocolError as error:
            error.error_type = "server_error"
            raise


# --- What a request names ------------------------------------------------------------------------


@faults.doing(Rule.MODEL_NOT_FOUND, "unknown-model-is-not-found")
class AnyModel(ModelServer):
    """A model may be called anything."""

    def check_model(self, model: str) -> None:
        pass


@faults.doing(Rule.MODEL_NOT_FOUND, "unknown-model-is-not-found")
class ModelIsAValue(ModelServer):
    """An unknown model is an invalid value."""

    def check_model(self, model: str) -> None:
        if model != MODEL:
            raise errors.invalid_value("model", "expected one that is here")


@faults.doing(Rule.CONVERSATIONS, "*-conversation-is-refused")
class IgnoresConversations(ModelServer):
    """A conversation is ignored."""

    def parse(self, body: Event, transport: Any) -> CreateParams:
        rest = {name: value for name, value in body.items() if name != "conversation"}
        return super().parse(rest, transport)


@faults.doing(Rule.CONVERSATIONS, "conversation-excludes-a-parent")
class PrefersConversations(ModelServer):
    """Beside a conversation a parent is ignored."""

    def parse(self, body: Event, transport: Any) -> CreateParams:
        members = ("conversation", "previous_response_id")
        rest = {name: value for name, value in body.items() if name not in members}
        return super().parse(rest, transport)


@faults.doing(Rule.CALLS_ARE_ANSWERED, "orphan-output-is-refused")
class TakesOrphans(ModelServer):
    """An output needs no call."""

    def check_calls(self, context: Sequence[InputItem]) -> None:
        super().check_calls([item for item in context if not isinstance(item, CallOutput)])


@faults.doing(Rule.CALLS_ARE_ANSWERED, "call-without-output-is-refused")
class TakesOpenCalls(ModelServer):
    """A call needs no output."""

    def check_calls(self, context: Sequence[InputItem]) -> None:
        super().check_calls([item for item in context if not isinstance(item, FunctionCall)])


@faults.doing(Rule.CALLS_ARE_ANSWERED, "*-output-is-refused")
class BlamesTheTools(ModelServer):
    """Calls and outputs without each other are the fault of the tools."""

    def check_calls(self, context: Sequence[InputItem]) -> None:
        try:
            super().check_calls(context)
        except ProtocolError as error:
            error.param = "tools"
            raise


@faults.doing(Rule.CONTEXT_LENGTH, "longer-input-than-the-context-is-refused")
class Truncates(ModelServer):
    """What is too long is cut, although truncation is disabled."""

    def check_length(self, context: Sequence[InputItem]) -> None:
        pass


@faults.doing(Rule.CONTEXT_LENGTH, "longer-input-than-the-context-is-refused")
class LengthIsAValue(ModelServer):
    """An input that is too long is an invalid value."""

    def check_length(self, context: Sequence[InputItem]) -> None:
        try:
            super().check_length(context)
        except ProtocolError as error:
            raise errors.invalid_value("input", error.message) from None


# --- Images --------------------------------------------------------------------------------------


@faults.doing(Rule.IMAGES, "broken-image-is-refused")
class SeesAnything(ModelServer):
    """An image may be of any bytes."""

    def check_image(self, url: str) -> None:
        pass


@faults.doing(Rule.IMAGES, "broken-image-is-refused")
class FailsAtImages(ModelServer):
    """The response to a broken image fails by the server's doing."""

    code = "server_error"
    is_broken = False

    def check_image(self, url: str) -> None:
        try:
            super().check_image(url)
        except ProtocolError:
            self.is_broken = True

    def resource(self, response: Event) -> Event:
        if not self.is_broken:
            return response
        error = {"code": self.code, "message": "expected an image"}
        return response | {"status": "failed", "error": error, "completed_at": None}


@faults.doing(Rule.IMAGES, "broken-image-is-refused")
class BreaksAtImages(ModelServer):
    """A broken image breaks the server."""

    def check_image(self, url: str) -> None:
        try:
            super().check_image(url)
        except ProtocolError:
            raise errors.server_error("oops") from None


# --- Who asks ------------------------------------------------------------------------------------


@faults.doing(Rule.API_KEY, "*-key-lets-nobody-in")
class AdmitsAll(ModelServer):
    """Keys are not looked at."""

    def admit(self, headers: Mapping[str, str]) -> None:
        pass


@faults.doing(Rule.API_KEY, "*-key-lets-nobody-in")
class Forbids(ModelServer):
    """A key that is wrong, or not there, is a 403."""

    def admit(self, headers: Mapping[str, str]) -> None:
        try:
            super().admit(headers)
        except ProtocolError as error:
            error.status = 403
            raise


@faults.doing(Rule.API_KEY, "no-key-lets-nobody-in")
class AdmitsTheUnknown(ModelServer):
    """Only who sends a key has it looked at."""

    def admit(self, headers: Mapping[str, str]) -> None:
        if headers.get("Authorization"):
            super().admit(headers)


# --- Bodies and frames ---------------------------------------------------------------------------


@faults.doing(Rule.REFUSED_BEFORE_STREAM, "bodies-that-are-no-object-are-refused")
class BreaksAtLists(ModelServer):
    """A body that is no object breaks the server."""

    def answer(self, request: Request) -> Answer:
        found = super().answer(request)
        return replace(found, status=500) if b'"invalid_json"' in found.body else found


@faults.doing(Rule.SOCKET_SURVIVES, "frames-that-are-no-event-are-refused")
class IgnoresTheUntyped(ModelServer):
    """Frames without a type are ignored."""

    def refuse(self, connection: Connection, error: ProtocolError, frame: Event) -> None:
        if error.param != "type":
            super().refuse(connection, error, frame)


@faults.doing(Rule.BINARY_FRAMES, "binary-frame-is-answered")
class IgnoresBinaryFrames(ModelServer):
    """Binary frames are ignored."""

    def take(self, connection: Connection, data: str | bytes) -> None:
        if isinstance(data, str):
            super().take(connection, data)


@faults.doing(Rule.BINARY_FRAMES, "binary-frame-is-answered")
class BreaksAtBinaryFrames(ModelServer):
    """Binary frames break the connection."""

    def check_frame(self, data: str | bytes) -> None:
        if isinstance(data, bytes):
            raise errors.server_error("oops")


@faults.doing(Rule.MESSAGE_SIZE, "long-message-is-answered")
class DropsAtLongMessages(ModelServer):
    """A message that is too long ends the connection without a word."""

    def refuse(self, connection: Connection, error: ProtocolError, frame: Event) -> None:
        if error.code == "payload_too_large":
            connection.out.append(Closed(1006))
        else:
            super().refuse(connection, error, frame)


@faults.doing(Rule.BACKGROUND_OVER_HTTP, "background-is-refused")
class IgnoresBackground(ModelServer):
    """Over WebSocket nothing is in the background, whatever is asked."""

    def parse(self, body: Event, transport: Any) -> CreateParams:
        return super().parse(body | {"background": False}, transport)


@faults.doing(Rule.LANE_LIMIT, "one-lane-too-many-is-refused")
class LanesWithoutEnd(ModelServer):
    """A connection has any number of lanes."""

    def check_lanes(self, connection: Connection) -> None:
        pass


@faults.doing(Rule.LANE_LIMIT, "one-lane-too-many-is-refused")
class SixteenLanes(ModelServer):
    """A connection has as many lanes as responses in flight."""

    def check_lanes(self, connection: Connection) -> None:
        if len(connection.lanes) >= 16:
            raise errors.websocket_stream_limit_reached(16)
