"""Faults of the append dialect."""

from collections.abc import Iterator, Sequence

import msgspec

from protocol import errors
from protocol.conformance.rules import Rule
from protocol.conformance.shapes import Event
from protocol.dialect import Dialect
from protocol.items import CallOutput, FunctionCall, InputItem, Message
from protocol.response import Usage
from protocol.server_events import ServerEvent
from tests.protocol.conformance.faults.fault import Faults, twice, wrong
from tests.protocol.conformance.model_server import Connection, Lane, ModelServer, Run, Told

faults = Faults()

faults.telling(
    "a suspended response that is completed",
    Rule.SUSPENSION,
    "suspension-is-no-end",
    wrong("done", "response", "status", value="completed"),
)
faults.telling(
    "segments that are told once more",
    Rule.SUSPENSION,
    "suspension-is-no-end",
    twice("done"),
)
faults.telling(
    "a segment without usage",
    Rule.SEGMENT_USAGE,
    "append/output-resumes-the-response",
    wrong("done", "response", "usage", value=None),
)


@faults.doing(Rule.APPEND_RESUMES, "append/output-resumes-the-response")
class ForgetsItsItems(ModelServer):
    """An append begins a new response, of another id."""

    def go_on(self, run: Run, dialect: Dialect) -> Iterator[Told]:
        anew = self.begin({"input": "Hi"})
        for event in self.speak(anew, anew.stream.start(), dialect):
            yield anew, event


@faults.doing(Rule.SEGMENT_USAGE, "usage-is-of-the-segment")
class AddsUpUsage(ModelServer):
    """Usage is that of all segments."""

    def go_on(self, run: Run, dialect: Dialect) -> Iterator[Told]:
        first = run.usage
        for told, event in super().go_on(run, dialect):
            if hasattr(event, "response") and event.response.usage is not None:
                usage = Usage.sum([first, event.response.usage])
                event = _with_usage(event, usage)
            yield told, event


def _with_usage(event: ServerEvent | Event, usage: Usage) -> Event:
    told: Event = msgspec.to_builtins(event)
    told["response"]["usage"] = msgspec.to_builtins(usage)
    return told


@faults.doing(Rule.APPEND_IN_ANY_ORDER, "outputs-come-in-any-order")
class WantsCallOrder(ModelServer):
    """Outputs have to come in the order of the calls."""

    def append(self, run: Run, items: Sequence[InputItem]) -> None:
        for item in items:
            if isinstance(item, CallOutput) and [*run.awaited][:1] != [item.call_id]:
                raise errors.invalid_value("input", "expected the first output first")
        super().append(run, items)


@faults.doing(Rule.APPEND_IN_ANY_ORDER, "outputs-come-in-any-order")
class DoesNotWait(ModelServer):
    """A response goes on before all its outputs have come."""

    def append(self, run: Run, items: Sequence[InputItem]) -> None:
        super().append(run, items)
        run.awaited.clear()


@faults.doing(Rule.APPEND_ECHOES, "echoed-call-is-dropped")
class RefusesEchoes(ModelServer):
    """A call that is repeated is there twice."""

    def append(self, run: Run, items: Sequence[InputItem]) -> None:
        for item in items:
            if isinstance(item, FunctionCall):
                raise errors.duplicate_call_id(item.call_id, "input")
        super().append(run, items)


@faults.doing(Rule.APPEND_RESUMES, "message-may-ride-along")
class OutputsOnly(ModelServer):
    """Only outputs may be appended."""

    def append(self, run: Run, items: Sequence[InputItem]) -> None:
        if any(isinstance(item, Message) for item in items):
            raise errors.invalid_value("input", "expected outputs")
        super().append(run, items)


@faults.doing(Rule.APPEND_MISUSE, "output-of-no-call-is-answered")
class TakesAnyOutput(ModelServer):
    """An output of no call is taken."""

    def append(self, run: Run, items: Sequence[InputItem]) -> None:
        run.awaited.clear()


@faults.doing(Rule.APPEND_MISUSE, "append-to-nothing-is-answered")
class IgnoresAppends(ModelServer):
    """An append to nothing is not answered."""

    def resume(self, connection: Connection, lane: Lane, frame: Event) -> Iterator[Told]:
        if lane.suspended is not None:
            yield from super().resume(connection, lane, frame)


@faults.doing(Rule.CREATE_ABANDONS, "create-abandons-the-suspended-run")
class InsistsOnOutputs(ModelServer):
    """A create while a run is suspended is refused."""

    def respond(self, connection: Connection, lane: Lane, frame: Event) -> Iterator[Told]:
        if lane.suspended is None:
            yield from super().respond(connection, lane, frame)
        else:
            yield None, self.error_frame(errors.response_in_progress("resp_1"), None)


@faults.doing(Rule.APPEND_IN_ANY_ORDER, "parallel-outputs-come-together")
class WantsTheFirstFirst(ModelServer):
    """In one append outputs have to come in the order of the calls."""

    def append(self, run: Run, items: Sequence[InputItem]) -> None:
        told = [item.call_id for item in items if isinstance(item, CallOutput)]
        if told != [call_id for call_id in run.awaited if call_id in told]:
            raise errors.invalid_value("input", "expected the first output first")
        super().append(run, items)


@faults.doing(Rule.JUNK_TOLERANCE, "metadata-may-ride-along")
class StrictAppends(ModelServer):
    """Members of an append that are not needed are refused."""

    def take_event(self, connection: Connection, kind: str, frame: Event) -> None:
        if kind == "response.append" and (others := frame.keys() - {"type", "input"}):
            raise errors.invalid_value(min(others), "expected nothing more")
        super().take_event(connection, kind, frame)


@faults.doing(Rule.APPEND_MISUSE, "append-while-speaking-is-answered")
class DropsWhatIsLate(ModelServer):
    """An append while the model speaks is dropped."""

    def take_event(self, connection: Connection, kind: str, frame: Event) -> None:
        is_speaking = any(lane.queue for lane in connection.lanes.values())
        if kind != "response.append" or not is_speaking:
            super().take_event(connection, kind, frame)


@faults.doing(Rule.APPEND_MISUSE, "output-given-twice-is-answered")
class TakesTheLast(ModelServer):
    """Of two outputs of one call the last is taken."""

    def append(self, run: Run, items: Sequence[InputItem]) -> None:
        super().append(run, items[-1:])


@faults.doing(Rule.APPEND_MISUSE, "second-append-is-answered")
class AppendsInSilence(ModelServer):
    """An append is not answered where nothing waits for it."""

    def resume(self, connection: Connection, lane: Lane, frame: Event) -> Iterator[Told]:
        return super().resume(connection, lane, frame) if lane.suspended else iter(())


@faults.doing(Rule.APPEND_MISUSE, "other-connection-cannot-append")
class OneRunForAll(ModelServer):
    """An append reaches whatever is suspended anywhere."""

    def resume(self, connection: Connection, lane: Lane, frame: Event) -> Iterator[Told]:
        runs = [run for other in self.connections.values() for run in other.runs.values()]
        lane.suspended = next((run for run in runs if run.awaited), None)
        yield from super().resume(connection, lane, frame)


@faults.doing(Rule.APPEND_MISUSE, "turn-goes-on-after-misuse")
class BearsAGrudge(ModelServer):
    """After an append that is wrong everything is refused."""

    has_erred = False

    def append(self, run: Run, items: Sequence[InputItem]) -> None:
        self.has_erred = True
        super().append(run, items)

    def respond(self, connection: Connection, lane: Lane, frame: Event) -> Iterator[Told]:
        if self.has_erred:
            yield None, self.error_frame(errors.no_suspended_run(), None)
        else:
            yield from super().respond(connection, lane, frame)


@faults.doing(Rule.CREATE_ABANDONS, "whole-conversation-takes-its-place")
class KnowsTheCalls(ModelServer):
    """A create that tells of the calls of the suspended run is refused."""

    def take_event(self, connection: Connection, kind: str, frame: Event) -> None:
        known = {call_id for run in connection.runs.values() for call_id in run.awaited}
        items = frame["input"] if kind == "response.create" else []
        for item in items if isinstance(items, list) else []:
            if item["type"] == "function_call" and item["call_id"] in known:
                raise errors.duplicate_call_id(item["call_id"], "input")
        super().take_event(connection, kind, frame)
