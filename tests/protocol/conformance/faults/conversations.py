"""Faults in how one conversation is told."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from protocol import errors
from protocol.codec import decode_object
from protocol.conformance.actions import Action, Answer, Close, Outcome, Request
from protocol.conformance.rules import Rule
from protocol.conformance.shapes import Event
from protocol.items import CallOutput, InputItem, Message
from tests.protocol.conformance.faults.fault import Faults
from tests.protocol.conformance.model_server import Connection, Lane, ModelServer, Run, Told

faults = Faults()


@faults.doing(Rule.SAME_CONTEXT, "[hc]*/whole-conversation-is-answered-alike")
class KeepsOutputsOnly(ModelServer):
    """The input of a parent is forgotten."""

    def begin(
        self, body: Event, connection: Connection | None = None, lane: Lane | None = None
    ) -> Run:
        run = super().begin(body, connection, lane)
        if run.params.previous_response_id is not None:
            run.context = list(run.params.input)
        return run


@faults.doing(Rule.SAME_CONTEXT, "[ai]*/whole-conversation-is-answered-alike")
class ReadsNoOutputs(ModelServer):
    """What is appended, or injected, is not read."""

    def append(self, run: Run, items: Sequence[InputItem]) -> None:
        before = list(run.context)
        super().append(run, items)
        unread = [i for i in run.context if i not in before and isinstance(i, CallOutput)]
        run.context = [*before, *(CallOutput(item.call_id, "") for item in unread)]


@faults.doing(Rule.SAME_CONTEXT, "empty-output-is-answered-alike")
class SkipsEmptyOutputs(ModelServer):
    """An output that is empty is left out where a conversation goes on."""

    def begin(
        self, body: Event, connection: Connection | None = None, lane: Lane | None = None
    ) -> Run:
        run = super().begin(body, connection, lane)
        if run.params.previous_response_id is not None:
            run.context = with_words(run.context)
        return run

    def append(self, run: Run, items: Sequence[InputItem]) -> None:
        super().append(run, items)
        run.context = with_words(run.context)


def with_words(context: Sequence[InputItem]) -> list[InputItem]:
    """Return ``context`` without the outputs that are empty."""
    return [item for item in context if not isinstance(item, CallOutput) or item.output]


@faults.doing(Rule.ANY_OUTPUT, "outputs-are-read")
class DropsEmptyOutputs(ModelServer):
    """A call to which the output is empty is left out with it."""

    def begin(
        self, body: Event, connection: Connection | None = None, lane: Lane | None = None
    ) -> Run:
        run = super().begin(body, connection, lane)
        if with_words(run.context) != run.context:
            run.context = [item for item in run.context if isinstance(item, Message)]
        return run


class ReadsOther(ModelServer):
    """Some outputs are read as others."""

    def take_event(self, connection: Connection, kind: str, frame: Event) -> None:
        super().take_event(connection, kind, self.as_read(frame))

    def begin(
        self, body: Event, connection: Connection | None = None, lane: Lane | None = None
    ) -> Run:
        return super().begin(self.as_read(body), connection, lane)

    def as_read(self, body: Event) -> Event:
        items = body.get("input")
        return body | {"input": [*map(self.item, items)]} if isinstance(items, list) else body

    def item(self, item: Event) -> Event:
        parts = item.get("output")
        return item | {"output": self.parts(parts)} if isinstance(parts, list) else item

    def parts(self, parts: list[Event]) -> Any:
        raise NotImplementedError


@faults.doing(Rule.ANY_OUTPUT, "outputs-are-read")
class BlanksLists(ReadsOther):
    """An output that is a list is empty to the model."""

    def parts(self, parts: list[Event]) -> Any:
        return ""


@faults.doing(Rule.ANY_OUTPUT, "listed-output-is-taken")
class ReadsTheFirstPart(ReadsOther):
    """Of an output that is a list the first part is read."""

    def parts(self, parts: list[Event]) -> Any:
        return parts[:1]


class Picky(ModelServer):
    """Some outputs are refused."""

    is_wrong: Callable[[Any], bool]

    def take_event(self, connection: Connection, kind: str, frame: Event) -> None:
        self.check_outputs(frame)
        super().take_event(connection, kind, frame)

    def route(self, request: Request) -> Answer:
        self.check_outputs(decode_object(request.body or b"{}"))
        return super().route(request)

    def check_outputs(self, body: Event) -> None:
        items = body.get("input")
        outputs = [i["output"] for i in items if "output" in i] if isinstance(items, list) else []
        if any(map(self.is_wrong, outputs)):
            raise errors.invalid_value("input", "expected something else as an output")


@faults.doing(Rule.ANY_OUTPUT, "empty-output-is-taken")
class WantsWords(Picky):
    """An output may not be empty."""

    is_wrong = staticmethod(lambda output: output == "")


@faults.doing(Rule.ANY_OUTPUT, "output-of-any-script-is-taken")
class WantsAscii(Picky):
    """An output has to be of ASCII letters."""

    is_wrong = staticmethod(lambda output: not str(output).isascii())


@faults.doing(Rule.ANY_OUTPUT, "listed-output-is-taken")
class WantsStrings(Picky):
    """An output has to be a string."""

    is_wrong = staticmethod(lambda output: isinstance(output, list))


@faults.doing(Rule.ABANDONMENT, "dropped-connection-is-forgotten")
class WaitsForever(ModelServer):
    """A call that nobody answers any more occupies the server."""

    is_stuck = False

    def perform(self, action: Action) -> Outcome:
        if isinstance(action, Close):
            runs = self.connections[action.socket].runs.values()
            self.is_stuck = any(run.awaited for run in runs)
        return super().perform(action)

    def respond(self, connection: Connection, lane: Lane, frame: Event) -> Iterator[Told]:
        if self.is_stuck:
            yield None, self.error_frame(errors.response_in_progress("resp_1"), None)
        else:
            yield from super().respond(connection, lane, frame)


@faults.doing(Rule.ECHOES, "echoed-call-is-no-other")
class RefusesEchoes(ModelServer):
    """A call that a continuation repeats is a call too many."""

    def without_echoes(
        self, items: Sequence[InputItem], before: Sequence[InputItem]
    ) -> list[InputItem]:
        return list(items)
