"""Faults in steering."""

from collections.abc import Iterator

from protocol import errors
from protocol.client_events import SteerParams
from protocol.conformance.rules import Rule
from protocol.conformance.shapes import Event
from protocol.errors import ProtocolError
from protocol.items import InputItem
from protocol.server_events import ServerEvent
from tests.protocol.conformance.faults.fault import Faults, missing, without, wrong
from tests.protocol.conformance.model_server import Connection, Lane, ModelServer, Run, Told

faults = Faults()


@faults.doing(Rule.STEER_IS_TAKEN_UP, "successor-takes-up-a-steer")
class HasNoSuccessors(ModelServer):
    """No successor takes up a steer."""

    def take_up_steers(
        self, connection: Connection, lane: Lane, run: Run, frame: Event
    ) -> Iterator[Told]:
        yield from ()


@faults.doing(Rule.STEER_IS_TAKEN_UP, "successor-takes-up-a-steer")
class SucceedsNobody(ModelServer):
    """The successor begins anew."""

    def take_up_steers(
        self, connection: Connection, lane: Lane, run: Run, frame: Event
    ) -> Iterator[Told]:
        return self.respond(connection, lane, frame) if run.steers else iter(())


faults.telling(
    "a successor without parent",
    Rule.STEER_IS_TAKEN_UP,
    "successor-takes-up-a-steer",
    wrong("created", "response", "previous_response_id", value=None),
)


class ForgetsSteers(ModelServer):
    """What was steered is never said."""

    def steered(self, run: Run) -> list[InputItem]:
        super().steered(run)
        return []


@faults.doing(Rule.STEER_IS_TAKEN_UP, "successor-takes-up-a-steer")
class SucceedsForNothing(ForgetsSteers):
    """The successor is not told what was steered."""


@faults.doing(Rule.STEER_IS_PENDING, "steer-waits-for-outputs")
class WaitsForNothing(ForgetsSteers):
    """A steer that was pending is not said."""


faults.telling(
    "steers that wait in silence",
    Rule.STEER_IS_PENDING,
    "steer-waits-for-outputs",
    missing("steer.pending"),
)
faults.telling(
    "a steer that waits for nothing",
    Rule.ACKNOWLEDGEMENTS,
    "steer-waits-for-outputs",
    wrong("steer.pending", "required_input", value=[]),
)
faults.telling(
    "a steer that waits for another reason",
    Rule.STEER_IS_PENDING,
    "steer-waits-for-outputs",
    wrong("steer.pending", "reason", value="waiting"),
)


@faults.doing(Rule.SEQUENCE_NUMBERS, "successor-takes-up-a-steer")
class NumbersSteersApart(ModelServer):
    """Steers are not numbered with what they steer."""

    def numbered(self, run: Run, event: Event) -> Event:
        if event["type"].startswith("response.steer."):
            return event | {"sequence_number": 0}
        return super().numbered(run, event)


@faults.doing(Rule.STEER_COMES_BACK, "wrong-steers-come-back")
class ReadsOverMembers(ModelServer):
    """Members that a steer may not have are read over."""

    def parse_steer(self, frame: Event) -> SteerParams:
        return super().parse_steer({k: v for k, v in frame.items() if k != "stream_id"})


@faults.doing(Rule.STEER_COMES_BACK, "one-steer-too-many-comes-back")
class HasManySteers(ModelServer):
    """A steer too many is an invalid one."""

    def check_steers(self, run: Run | None) -> None:
        try:
            super().check_steers(run)
        except ProtocolError as error:
            raise errors.invalid_input(error.message, None) from None


@faults.doing(Rule.STEER_COMES_BACK, "one-steer-too-many-comes-back")
class KeepsOneSteer(ModelServer):
    """A steer takes the place of the one before it, without a word."""

    def steer(self, connection: Connection, frame: Event) -> None:
        run = connection.runs.get(frame["previous_response_id"])
        if run is not None and len(run.steers) == 1:
            return
        super().steer(connection, frame)


@faults.doing(Rule.STEER_COMES_BACK, "steer-of-nothing-comes-back")
class SaysCompleted(ModelServer):
    """What never was is completed."""

    def check_target(self, run: Run | None, target: str) -> None:
        if run is None:
            raise errors.response_already_completed(target)
        super().check_target(run, target)


@faults.doing(Rule.STEER_COMES_BACK, "steer-after-the-end-comes-back")
class SteersWhatEnded(ModelServer):
    """A response that is over may be steered."""

    def check_target(self, run: Run | None, target: str) -> None:
        if run is None:
            super().check_target(run, target)


faults.telling(
    "steers that do not come back",
    Rule.STEER_COMES_BACK,
    "steer-after-the-end-comes-back",
    without("steer.failed", "steer", "input"),
)


@faults.doing(Rule.ACKNOWLEDGEMENTS, "other-connection-cannot-steer")
class SteersAnything(ModelServer):
    """Any connection may steer a response."""

    def steer(self, connection: Connection, frame: Event) -> None:
        for other in self.connections.values():
            connection.runs |= other.runs
            connection.lanes |= other.lanes
        super().steer(connection, frame)


@faults.doing(Rule.STEER_IS_PENDING, "steer-waits-for-outputs")
class SteersByStrings(ModelServer):
    """A steer has to be a string."""

    def parse_steer(self, frame: Event) -> SteerParams:
        if not isinstance(frame.get("input"), str):
            raise errors.invalid_input("expected a string", "input")
        return super().parse_steer(frame)


@faults.doing(Rule.ONE_LANE, "steer-stays-on-its-lane")
class SucceedsOnNoLane(ModelServer):
    """A successor is on no lane."""

    def events(self, run: Run | None, event: ServerEvent | Event, lane: str | None) -> list[Event]:
        is_successor = run is not None and run.params.previous_response_id is not None
        return super().events(run, event, None if is_successor else lane)


faults.telling(
    "a steer that is accepted on no lane",
    Rule.ONE_LANE,
    "steer-stays-on-its-lane",
    without("steer.accepted", "stream_id"),
)
