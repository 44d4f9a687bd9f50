"""Faults in continuing."""

from collections.abc import Sequence
from typing import Any

from protocol import errors
from protocol.client_events import CreateParams
from protocol.conformance.rules import Rule
from protocol.conformance.shapes import Event
from protocol.errors import ProtocolError
from protocol.items import FunctionCall, InputItem
from tests.protocol.conformance.faults.fault import Faults, wrong
from tests.protocol.conformance.model_server import Connection, Lane, ModelServer, Run

faults = Faults()


@faults.doing(Rule.CONTINUES_FROM_PARENT, "message-continues-a-response")
class KeepsNothing(ModelServer):
    """A response that is not stored cannot be continued."""

    def parent(self, response_id: str | None, connection: Connection | None) -> Run | None:
        return super().parent(response_id, None)


faults.telling(
    "a child without parent",
    Rule.CONTINUES_FROM_PARENT,
    "message-continues-a-response",
    wrong("completed", "response", "previous_response_id", value=None),
)


@faults.doing(Rule.CALLS_ARE_ANSWERED, "output-continues-a-call")
class ForgetsCalls(ModelServer):
    """Outputs are orphans, as the calls of the parent are forgotten."""

    def check_calls(self, context: Sequence[InputItem]) -> None:
        super().check_calls([item for item in context if not isinstance(item, FunctionCall)])


@faults.doing(Rule.CALLS_ARE_ANSWERED, "call-has-to-be-answered")
class LeavesCallsOpen(ModelServer):
    """Calls may be left without outputs."""

    def check_calls(self, context: Sequence[InputItem]) -> None:
        pass


@faults.doing(Rule.PARENT_NOT_FOUND, "unknown-parent-is-not-found")
class StartsAnew(ModelServer):
    """An unknown parent is no parent."""

    def parent(self, response_id: str | None, connection: Connection | None) -> Run | None:
        try:
            return super().parent(response_id, connection)
        except ProtocolError:
            return None


@faults.doing(Rule.PARENT_NOT_FOUND, "unknown-parent-is-not-found")
class OtherCode(ModelServer):
    """An unknown parent is an invalid value."""

    def parent(self, response_id: str | None, connection: Connection | None) -> Run | None:
        try:
            return super().parent(response_id, connection)
        except ProtocolError:
            raise errors.invalid_value("previous_response_id", "not known") from None


@faults.doing(Rule.PARENT_NOT_FOUND, "unknown-parent-is-not-found")
class NotFoundAsInHttp(ModelServer):
    """An unknown parent is a 404, which Codex repeats."""

    def parent(self, response_id: str | None, connection: Connection | None) -> Run | None:
        try:
            return super().parent(response_id, connection)
        except ProtocolError as error:
            error.status = 404
            raise


@faults.doing(Rule.STORE_FALSE_IS_LOCAL, "other-connection-knows-no-parent")
class SharesItsCache(ModelServer):
    """Connections see each other's responses."""

    def parent(self, response_id: str | None, connection: Connection | None) -> Run | None:
        for other in self.connections.values():
            if response_id in other.runs:
                return other.runs[response_id]
        return super().parent(response_id, connection)


@faults.doing(Rule.STORE_FALSE_IS_LOCAL, "http-knows-nothing-of-a-connection")
class ServesItsCache(ModelServer):
    """What is in the cache of a connection is found over HTTP."""

    def find(self, response_id: str) -> Run:
        for connection in self.connections.values():
            if response_id in connection.runs:
                return connection.runs[response_id]
        return super().find(response_id)


@faults.doing(Rule.STORE_FALSE_IS_LOCAL, "http-knows-nothing-of-a-connection")
class ContinuesItsCache(ModelServer):
    """What is in the cache of a connection is continued over HTTP."""

    def parent(self, response_id: str | None, connection: Connection | None) -> Run | None:
        if connection is None:
            for other in self.connections.values():
                if response_id in other.runs:
                    return other.runs[response_id]
        return super().parent(response_id, connection)


@faults.doing(Rule.STORE_FALSE_IS_LOCAL, "http-knows-nothing-of-a-connection")
class TellsOfItsCache(ModelServer):
    """Over HTTP it is told that a connection is in the way."""

    def parent(self, response_id: str | None, connection: Connection | None) -> Run | None:
        if connection is None and any(response_id in c.runs for c in self.connections.values()):
            raise errors.invalid_value("previous_response_id", "expected one of no connection")
        return super().parent(response_id, connection)


@faults.doing(Rule.FAILED_CONTINUATION_EVICTS, "failed-continuation-evicts-its-parent")
class EvictsNothing(ModelServer):
    """A parent survives the continuation that failed."""

    def evict(self, lane: Lane, frame: Event) -> None:
        pass


@faults.doing(Rule.SOCKET_SURVIVES, "errors-leave-the-connection-open")
class EndsAtErrors(ModelServer):
    """Any mistake ends the connection."""

    def refuse(self, connection: Connection, error: ProtocolError, frame: Event) -> None:
        super().refuse(connection, error, frame)
        self.close_after_malformed_inject(connection)


@faults.doing(Rule.ERROR_FRAME, "chained/unknown-parent-is-not-found")
class ErrorsWithoutStatus(ModelServer):
    """Error frames have no status."""

    def error_frame(self, error: ProtocolError, lane: str | None) -> Event:
        frame = super().error_frame(error, lane)
        del frame["status"]
        return frame


@faults.doing(Rule.ERROR_FRAME, "chained/unknown-parent-is-not-found")
class FlatErrors(ModelServer):
    """Error frames are flat, as in event streams."""

    def error_frame(self, error: ProtocolError, lane: str | None) -> Event:
        frame = super().error_frame(error, lane)
        payload: Event = frame.pop("error")
        return payload | frame


@faults.doing(Rule.WARM_UP, "warm-up-is-a-parent-twice")
class SpeaksAtWarmUps(ModelServer):
    """A warm-up is answered."""

    def parse(self, body: Event, transport: Any) -> CreateParams:
        params = super().parse(body, transport)
        return (
            super().parse(body | {"generate": True, "input": "Hi"}, transport)
            if (not params.generate)
            else params
        )


@faults.doing(Rule.WARM_UP, "warm-up-is-a-parent-twice")
class WarmsUpOnce(ModelServer):
    """A warm-up can be continued from once."""

    def begin(
        self, body: Event, connection: Connection | None = None, lane: Lane | None = None
    ) -> Run:
        run = super().begin(body, connection, lane)
        if connection is not None and "previous_response_id" in body:
            for other in connection.lanes.values():
                other.latest = None
        return run


@faults.doing(Rule.CACHED_TOKENS, "parent-is-not-prefilled-again")
class CachesHalf(ModelServer):
    """Half of what came before is prefilled again."""

    def num_cached(self, parent: Run) -> int:
        return super().num_cached(parent) // 2


@faults.doing(Rule.CACHED_TOKENS, "parent-is-not-prefilled-again")
class CachesTooMuch(ModelServer):
    """More tokens are cached than there are."""

    def num_cached(self, parent: Run) -> int:
        return super().num_cached(parent) * 2
