"""What a fault is: one thing that a server does wrong, and the check that is there to catch it.

A fault in what is told is an edit of events (``telling``); a fault in what is done is a class that
overrides a method of the model server (``doing``). A module of faults begins with
``faults = Faults()``.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from protocol.conformance.rules import Rule
from protocol.conformance.shapes import Event
from tests.protocol.conformance.model_server import Distort, ModelServer


@dataclass(frozen=True)
class Fault:
    """One thing that a server does wrong."""

    name: str
    rule: Rule
    caught_by: str
    """The name of a check, or without its way that of several."""
    server: Callable[[], ModelServer]


@dataclass
class Faults:
    """The faults of one module."""

    _faults: list[Fault] = field(default_factory=list)

    def telling(self, name: str, rule: Rule, caught_by: str, distort: Distort) -> None:
        """Add a fault in what is told."""
        self._faults.append(Fault(name, rule, caught_by, lambda: ModelServer(distort)))

    def doing(self, rule: Rule, caught_by: str) -> Callable[[type[ModelServer]], type[ModelServer]]:
        """Add the decorated class as a fault in what is done; it is called by its docstring."""

        def add(server: type[ModelServer]) -> type[ModelServer]:
            name = (server.__doc__ or "").partition("\n")[0].removesuffix(".").lower()
            self._faults.append(Fault(name, rule, caught_by, server))
            return server

        return add

    def __iter__(self) -> Iterator[Fault]:
        return iter(self._faults)


# --- Edits ---------------------------------------------------------------------------------------


def missing(event_type: str) -> Distort:
    """Leave an event out."""
    return lambda event: [] if event["type"] == f"response.{event_type}" else [event]


def twice(event_type: str) -> Distort:
    """Tell an event twice."""
    return lambda event: [event, event] if event["type"] == f"response.{event_type}" else [event]


def after(event_type: str, another: Event) -> Distort:
    """Tell another event after each of a type."""
    return lambda event: [event, another] if event["type"] == f"response.{event_type}" else [event]


def wrong(event_type: str, *path: Any, value: Any) -> Distort:
    """Give a member, at a path in the events of a type, another value."""

    def distort(event: Event) -> list[Event]:
        if event["type"] == f"response.{event_type}":
            event = deepcopy(event)
            _place(event, path)[path[-1]] = value
        return [event]

    return distort


def without(event_type: str, *path: Any) -> Distort:
    """Leave a member, at a path in the events of a type, out."""

    def distort(event: Event) -> list[Event]:
        if event["type"] == f"response.{event_type}":
            event = deepcopy(event)
            _place(event, path).pop(path[-1], None)
        return [event]

    return distort


def _place(event: Event, path: Sequence[Any]) -> Any:
    place: Any = event
    for step in path[:-1]:
        place = place[step]
    return place
