"""Faults of lanes."""

from collections.abc import Iterator

from protocol import errors
from protocol.conformance.rules import Rule
from protocol.conformance.shapes import Event
from protocol.errors import ProtocolError
from tests.protocol.conformance.faults.fault import Faults, without
from tests.protocol.conformance.model_server import Connection, Lane, ModelServer, Run, Told

faults = Faults()


@faults.doing(Rule.DEFAULT_LANE, "default-lane-has-no-name")
class NamesTheDefaultLane(ModelServer):
    """Events of the default lane have a null stream_id."""

    def lane_member(self, lane: str | None) -> Event:
        return {"stream_id": lane}


@faults.doing(Rule.LANE_NAMES, "wrong-names-are-refused")
class AnyName(ModelServer):
    """A lane may have any name."""

    def lane_name(self, frame: Event) -> str | None:
        return frame.get("stream_id")


@faults.doing(Rule.LANE_NAMES, "wrong-names-are-refused")
class NamesByNumbers(ModelServer):
    """The name of a lane need not be a string."""

    def lane_name(self, frame: Event) -> str | None:
        name = frame.get("stream_id")
        return super().lane_name(
            frame | {"stream_id": str(name)} if isinstance(name, int) else frame
        )


@faults.doing(Rule.LANE_NAMES, "wrong-names-are-refused")
class EmptyIsDefault(ModelServer):
    """A lane of no name is the default lane."""

    def lane_name(self, frame: Event) -> str | None:
        return super().lane_name(frame) if frame.get("stream_id") else None


@faults.doing(Rule.LANE_NAMES, "longest-name-is-taken")
class ShortNames(ModelServer):
    """A lane may have a name of 64 letters."""

    def lane_name(self, frame: Event) -> str | None:
        name = super().lane_name(frame)
        if name is not None and len(name) > 64:
            raise errors.invalid_stream_id()
        return name


@faults.doing(Rule.LANE_ORDER, "creates-of-one-lane-keep-their-order")
class AllAtOnce(ModelServer):
    """Responses of a lane are told all at once."""

    turn = 0

    def speaking(self, lane: Lane) -> Iterator[Told] | None:
        self.turn += 1
        return lane.queue[self.turn % len(lane.queue)] if lane.queue else None


faults.telling(
    "an end on no lane", Rule.ONE_LANE, "lanes-are-told-apart", without("completed", "stream_id")
)


@faults.doing(Rule.SEQUENCE_NUMBERS, "lanes-are-told-apart")
class NumbersByConnection(ModelServer):
    """Events are numbered by the connection."""

    num_told = -1

    def numbered(self, run: Run, event: Event) -> Event:
        self.num_told += 1
        return event | {"sequence_number": self.num_told}


@faults.doing(Rule.LANES_OVERLAP, "lanes-do-not-wait")
class OneLaneAtATime(ModelServer):
    """A lane waits until the others are silent."""

    busy: Lane | None = None

    def speaking(self, lane: Lane) -> Iterator[Told] | None:
        if self.busy is None or not self.busy.queue:
            self.busy = lane
        return super().speaking(lane) if lane is self.busy else None


@faults.doing(Rule.CREATES_QUEUE, "seventeenth-create-waits")
class RefusesTheSeventeenth(ModelServer):
    """More creates than may be in flight are refused."""

    def take_event(self, connection: Connection, kind: str, frame: Event) -> None:
        if sum(len(lane.queue) for lane in connection.lanes.values()) >= 16:
            raise errors.too_many_queued(16)
        super().take_event(connection, kind, frame)


@faults.doing(Rule.LANE_ERRORS, "errors-name-their-lane")
class ErrorsOfNoLane(ModelServer):
    """Errors name no lane."""

    def error_frame(self, error: ProtocolError, lane: str | None) -> Event:
        return super().error_frame(error, None)


@faults.doing(Rule.LANE_ERRORS, "errors-name-their-lane")
class RepeatsBadNames(ModelServer):
    """The error about the name of a lane is of that lane."""

    def refuse(self, connection: Connection, error: ProtocolError, frame: Event) -> None:
        error.code = None
        super().refuse(connection, error, frame)


@faults.doing(Rule.LANES_ARE_INDEPENDENT, "failing-fork-evicts-nothing")
class ForksEvict(ModelServer):
    """A fork that fails evicts its parent."""

    def evict(self, lane: Lane, frame: Event) -> None:
        for connection in self.connections.values():
            for other in connection.lanes.values():
                super().evict(other, frame)


@faults.doing(Rule.LANES_ARE_INDEPENDENT, "failure-leaves-other-lanes-alone")
class FailsAltogether(ModelServer):
    """What fails on one lane silences the others."""

    def evict(self, lane: Lane, frame: Event) -> None:
        for connection in self.connections.values():
            for other in connection.lanes.values():
                if other is not lane:
                    other.queue.clear()


@faults.doing(Rule.FORKS_ARE_PINNED, "fork-keeps-its-parent")
class LosesParents(ModelServer):
    """A fork loses what came before it when the lane of its parent goes on."""

    def abandon(self, lane: Lane) -> Iterator[Told]:
        for connection in self.connections.values():
            for run in connection.runs.values():
                if lane.latest and run.params.previous_response_id == lane.latest.id:
                    run.context = list(run.params.input)
                    run.num_read = run.length
        return super().abandon(lane)
