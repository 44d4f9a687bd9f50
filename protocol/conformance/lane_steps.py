"""Steps of scenarios on named lanes, which a server need not have.

Open Responses 2026-04-24 allows one response at a time on a connection. A server that keeps to it
may ignore ``stream_id``: then it tells everything on one lane, which has no name.
"""

from typing import Any

from protocol.conformance.actions import Steps
from protocol.conformance.rules import NotSupportedError
from protocol.conformance.shapes import Event
from protocol.conformance.socket_steps import Socket


def create_on(socket: Socket, lane: str, **members: Any) -> Steps[list[Event]]:
    """Ask for a response on ``lane``, and return the events of its first segment.

    Raises:
        NotSupportedError: there are no lanes.
    """
    events = yield from socket.create(stream_id=lane, **members)
    raise_unless_on_a_lane(events[0])
    return events


def raise_unless_on_a_lane(first: Event) -> None:
    """Raise if the first event of a named lane has no name.

    Raises:
        NotSupportedError: there are no lanes.
    """
    if "stream_id" not in first:
        raise NotSupportedError("stream_id is ignored")
