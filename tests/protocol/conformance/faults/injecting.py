"""Faults of the inject dialect."""

from collections.abc import Sequence
from typing import Any

from protocol import errors
from protocol.client_events import InjectParams
from protocol.conformance.rules import Rule
from protocol.conformance.shapes import Event
from protocol.items import CallOutput, InputItem
from protocol.server_events import ServerEvent
from tests.protocol.conformance.faults.fault import Faults, without, wrong
from tests.protocol.conformance.model_server import Connection, Lane, ModelServer, Run

faults = Faults()


@faults.doing(Rule.INJECT_RESUMES, "inject/output-resumes-the-response")
class SaysNothingOfInjects(ModelServer):
    """Injects are not acknowledged."""

    def tell(self, connection: Connection, run: Run, event: ServerEvent, lane: str | None) -> None:
        pass


faults.telling(
    "an inject that is acknowledged to another response",
    Rule.ACKNOWLEDGEMENTS,
    "inject/output-resumes-the-response",
    wrong("inject.created", "response_id", value="resp_0"),
)


@faults.doing(Rule.INJECT_IS_ATOMIC, "output-of-no-call-comes-back")
class TakesWhatItCan(ModelServer):
    """Of an inject that fails, what can be used is."""

    def append(self, run: Run, items: Sequence[InputItem]) -> None:
        for item in items:
            if isinstance(item, CallOutput):
                super().append(run, [item])


@faults.doing(Rule.INJECT_IS_ATOMIC, "output-of-no-call-comes-back")
class KeepsTheInput(ModelServer):
    """What cannot be injected comes back in part."""

    def returned(self, params: InjectParams) -> Any:
        return params.raw_input[:1]


@faults.doing(Rule.INJECT_IS_ATOMIC, "inject-into-nothing-comes-back")
class LosesTheInput(ModelServer):
    """What is injected into nothing does not come back."""

    def returned(self, params: InjectParams) -> Any:
        return None


@faults.doing(Rule.INJECT_AFTER_END, "inject-after-the-end-comes-back")
class ForgetsWhatEnded(ModelServer):
    """What ended was never there."""

    def commit(self, run: Run, params: InjectParams) -> None:
        if run.stream.is_finished:
            raise errors.response_not_found(run.id)
        super().commit(run, params)


@faults.doing(Rule.INJECT_MALFORMED, "malformed-inject-ends-the-connection")
class StaysOpen(ModelServer):
    """A malformed inject leaves the connection open."""

    def close_after_malformed_inject(self, connection: Connection) -> None:
        pass


@faults.doing(Rule.INJECT_MALFORMED, "malformed-inject-ends-the-connection")
class ReadsOverMembers(ModelServer):
    """Members that an inject may not have are read over."""

    def parse_inject(self, frame: Event) -> InjectParams:
        return super().parse_inject({k: v for k, v in frame.items() if k != "extra"})


@faults.doing(Rule.SEQUENCE_NUMBERS, "inject/output-resumes-the-response")
class NumbersInjectsApart(ModelServer):
    """Injects are not numbered with what they are injected into."""

    def numbered(self, run: Run, event: Event) -> Event:
        if event["type"].startswith("response.inject."):
            return event | {"sequence_number": 0}
        return super().numbered(run, event)


@faults.doing(Rule.INJECT_RESUMES, "outputs-come-one-by-one")
class WantsAllAtOnce(ModelServer):
    """All outputs have to be injected at once."""

    def append(self, run: Run, items: Sequence[InputItem]) -> None:
        if len(items) < len(run.awaited):
            raise errors.invalid_value("input", "expected all outputs")
        super().append(run, items)


@faults.doing(Rule.INJECT_IS_ATOMIC, "output-is-taken-once")
class TakesOutputsTwice(ModelServer):
    """An output is taken as often as it is injected."""

    def append(self, run: Run, items: Sequence[InputItem]) -> None:
        if run.awaited:
            super().append(run, items)


@faults.doing(Rule.INJECT_IS_LOCAL, "other-connection-cannot-inject")
class SaysThatItIsOver(ModelServer):
    """What another connection injects into is said to be over."""

    def inject(self, connection: Connection, frame: Event) -> None:
        try:
            super().inject(connection, frame)
        finally:
            said = connection.out and connection.out[-1]
            if isinstance(said, str):
                connection.out[-1] = said.replace("_not_found", "_already_completed")


@faults.doing(Rule.INJECT_IS_LOCAL, "other-connection-cannot-inject")
class InjectsAnywhere(ModelServer):
    """Any connection may inject into a response."""

    def inject(self, connection: Connection, frame: Event) -> None:
        for other in self.connections.values():
            if frame["response_id"] in other.runs:
                super().inject(other, frame)


@faults.doing(Rule.SOCKET_SURVIVES, "wrong-create-leaves-the-response-open")
class ClosesAtWrongCreates(ModelServer):
    """While a response is open a wrong create ends the connection."""

    def evict(self, lane: Lane, frame: Event) -> None:
        for connection in self.connections.values():
            self.close_after_malformed_inject(connection)


@faults.doing(Rule.INJECT_MALFORMED, "inject-without-target-ends-the-connection")
class InjectsIntoTheLatest(ModelServer):
    """An inject without a target reaches the response that is open."""

    def parse_inject(self, frame: Event) -> InjectParams:
        latest = next(iter(self.connections.values())).runs
        return super().parse_inject({"response_id": [*latest][-1], **frame})


faults.telling(
    "an inject that is acknowledged on no lane",
    Rule.ONE_LANE,
    "inject-stays-on-its-lane",
    without("inject.created", "stream_id"),
)
