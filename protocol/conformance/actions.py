"""What a scenario asks for, and what may come of it.

| action       | what came                                                                  |
| ------------ | -------------------------------------------------------------------------- |
| `Connect`    | `Opened`, or the `Answer` that refuses the upgrade                          |
| `Send`       | `Sent`                                                                     |
| `SendBytes`  | `Sent`                                                                     |
| `Receive`    | `Frame`, `Closed`, or `Silence`                                            |
| `Close`      | `Sent`                                                                     |
| `Request`    | `Answer`, `Closed`, or `Silence`                                           |
| `Together`   | each scenario's return value, in order; it is for ``play`` to play them    |

Of any of them may come ``Unreachable``. A connection is known by the name that its scenario gives
it; after `Closed`, nothing more can be asked of it.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")


# --- Asked for -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Connect:
    """Open a WebSocket.

    Credentials are the performer's to add, unless there is an ``Authorization`` among the headers;
    one that is empty is not sent.
    """

    socket: str
    query: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    path: str = "/responses"


@dataclass(frozen=True)
class Send:
    """Send a frame as it is: text, or binary where it is bytes."""

    socket: str
    data: str | bytes


@dataclass(frozen=True)
class Receive:
    """Wait for the next frame."""

    socket: str
    is_patient: bool = True
    """False: for a moment only, to see that nothing comes."""


class Manner(Enum):
    """How a connection is ended."""

    CLOSED = "closed"
    """With a closing handshake."""
    DROPPED = "dropped"
    """Without a word, as by clients that are killed."""


@dataclass(frozen=True)
class Close:
    """End a connection."""

    socket: str
    manner: Manner = Manner.CLOSED


@dataclass(frozen=True)
class Request:
    """Make an HTTP request, of a path below the base URL, and read the whole answer.

    Credentials are as in ``Connect``.
    """

    method: str
    path: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    max_events: int | None = None
    """Go away, with a stream unread, after so many of its events."""


Action: TypeAlias = Connect | Send | Receive | Close | Request


@dataclass(frozen=True)
class Together:
    """Play several scenarios at the same time."""

    scenarios: tuple["Steps[Any]", ...]


# --- What came -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Opened:
    """The upgrade was granted."""


@dataclass(frozen=True)
class Sent:
    """It is on its way; whether it arrived is not known."""


@dataclass(frozen=True)
class Frame:
    """A frame came: text, or binary where it is bytes."""

    data: str | bytes


@dataclass(frozen=True)
class Closed:
    """The server has ended the connection; 1006 where it did so without a word (RFC 6455, 7.4), or
    where what it sent made us do so, as the reason says then."""

    code: int
    reason: str = ""


@dataclass(frozen=True)
class Silence:
    """Nothing came for as long as the performer waits."""

    seconds: float


@dataclass(frozen=True)
class Answer:
    """An HTTP answer. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Unreachable:
    """There is nobody to do it with; the reason is for a person."""

    reason: str


Outcome: TypeAlias = Opened | Sent | Frame | Closed | Silence | Answer | Unreachable

Steps: TypeAlias = Generator[Action | Together, Any, T]
"""A part of a scenario that comes to a ``T``; to be used with ``yield from``."""

Scenario: TypeAlias = Steps[None]
