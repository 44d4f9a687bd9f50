"""Where things are in a request: each member of an object, and element of a list, has a place."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

LIMIT = "max_output_tokens"
"""A member that is left alone: without it an answer might take minutes, and cost accordingly."""


@dataclass(frozen=True)
class Place:
    """Where a member or an element is, in what is made of objects and lists."""

    path: tuple[Any, ...]

    @property
    def depth(self) -> int:
        return len(self.path)

    def container_in(self, value: Any) -> Any:
        """Return the object or list that it is in."""
        for key in self.path[:-1]:
            value = value[key]
        return value

    def find_in(self, value: Any) -> Any:
        """Return what is there."""
        return self.container_in(value)[self.path[-1]]

    def put_into(self, value: Any, new: Any) -> None:
        """Put ``new`` there."""
        self.container_in(value)[self.path[-1]] = new

    def remove_from(self, value: Any) -> None:
        """Leave out what is there."""
        del self.container_in(value)[self.path[-1]]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[Place]:
    """Return the place of each member and element within ``value``, but for limits of output."""
    keys: Iterable[Any] = ()
    if isinstance(value, dict):
        keys = [key for key in value if key != LIMIT]
    elif isinstance(value, list):
        keys = range(len(value))
    for key in keys:
        yield Place((*path, key))
        yield from places(value[key], (*path, key))
