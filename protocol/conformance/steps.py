"""Steps that are the same over every transport."""

from typing import Any

from protocol.conformance.actions import Steps
from protocol.conformance.check import Target, Way
from protocol.conformance.http_steps import post_refused, post_streamed
from protocol.conformance.refusals import Refusal
from protocol.conformance.shapes import Event
from protocol.conformance.socket_steps import connect


def streamed(target: Target, way: Way, **members: Any) -> Steps[list[Event]]:
    """Return the events of one response, up to its end or suspension."""
    if way is Way.HTTP:
        return (yield from post_streamed(target, **members))
    socket = yield from connect(target, way)
    events = yield from socket.create(**members)
    yield from socket.close()
    return events


def refused(target: Target, way: Way, **members: Any) -> Steps[Refusal]:
    """Return why a create is refused, which it has to be."""
    if way is Way.HTTP:
        return (yield from post_refused(target, **members))
    socket = yield from connect(target, way)
    found = yield from socket.refuse(**members)
    yield from socket.close()
    return found
