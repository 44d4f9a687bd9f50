"""One check being played, without a socket: ask for the next action, and say what came of it.

::

    play = Play(check, target)
    while (asked := play.asked) is not None:
        play.give(perform(asked))       # or play all of asked.plays at once, and then give None
    play.verdict
"""

import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from protocol.conformance.actions import (
    Action,
    Answer,
    Connect,
    Frame,
    Outcome,
    Receive,
    Request,
    Send,
    Together,
    Unreachable,
)
from protocol.conformance.captured import CapturedSocket
from protocol.conformance.check import Check, Target
from protocol.conformance.rules import NonconformityError, NotSupportedError, Rule, UnusableError
from protocol.conformance.transcript import Line, Transcript
from protocol.errors import ProtocolError


class Result(StrEnum):
    """What a check came to."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_SUPPORTED = "not supported"
    ERROR = "error"
    """The server could not be checked, or the check itself is broken."""
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Verdict:
    """What a check came to, and why."""

    check: Check
    result: Result
    message: str = ""
    rule: Rule | None = None
    """The rule that is broken: the check's, or one that every stream has to keep."""
    lines: tuple[Line, ...] = ()
    """What went over the wire."""
    num_requests: int = 0


_LOCKED = (401, 403, 429)
"""What is no answer to what was asked: not this client, or not now."""
_MAX_TOLD = 200
# Whoever reads what the server sent stumbles over what is not as it should be.
_Malformed: TypeAlias = LookupError | TypeError | AttributeError | ValueError | ProtocolError


class _Wire:
    """What the scenarios of a check share: the transcript and the streams of each connection."""

    def __init__(self) -> None:
        self.transcript = Transcript()
        self.sockets: dict[str, CapturedSocket] = {}
        self.num_requests = 0

    def take(self, action: Action, outcome: Outcome) -> object:
        """Keep what came, and return it as a scenario reads it: a frame as its event.

        Raises:
            NonconformityError: it is no right event.
            UnusableError: nobody is there, or nobody is let in.
        """
        self.transcript.record(action, outcome)
        if isinstance(action, Request | Send):
            self.num_requests += 1
        match outcome:
            case Unreachable(reason):
                raise UnusableError(reason)
            case Answer(status, _, body) if not _brings_a_key(action):
                _raise_if_locked(status, body.decode(errors="replace"))
            case Frame(data) if isinstance(action, Receive):
                event = self.sockets.setdefault(action.socket, CapturedSocket()).take(data)
                if event is not None and event["type"] == "error":
                    _raise_if_locked(event["status"], event["error"]["message"])
                return event
            case _:
                pass
        return outcome


def _brings_a_key(action: Action) -> bool:
    """Tell whether a scenario says itself who asks, and so may be told that nobody is let in."""
    headers = dict(action.headers) if isinstance(action, Connect | Request) else {}
    return "Authorization" in headers


def _raise_if_locked(status: int, told: str) -> None:
    if status in _LOCKED:
        raise UnusableError(f"nobody is let in: {status} {told[:_MAX_TOLD]}".rstrip())


class Branch:
    """One scenario being played."""

    def __init__(self, steps: Generator[Action | Together, Any, Any], wire: _Wire) -> None:
        self._steps = steps
        self._wire = wire
        self._asked: Action | Branches | None = None
        self.value: Any = None
        self.failure: Exception | None = None
        self._advance(partial(next, steps))

    @property
    def asked(self) -> "Action | Branches | None":
        """What is to be done next; None once it is over."""
        return self._asked

    def give(self, outcome: Outcome | None) -> None:
        """Go on with what came of the action; with None once all branches are over."""
        match self._asked:
            case None:
                raise AssertionError("it is over")
            case Branches(branches):
                failures = [b.failure for b in branches if b.failure is not None]
                if failures:
                    self._fail(failures[0])
                else:
                    came = [branch.value for branch in branches]
                    self._advance(partial(self._steps.send, came))
            case action:
                assert outcome is not None, "of an action something comes"
                try:
                    taken = self._wire.take(action, outcome)
                except Exception as failure:  # noqa: BLE001  # the verdict tells whose it is
                    self._advance(partial(self._steps.throw, failure))
                    return
                if taken is None:  # a frame that says nothing
                    return
                self._advance(partial(self._steps.send, taken))

    def give_up(self, message: str) -> None:
        """End it as failed, because the server does not come to an end."""
        self._fail(NonconformityError(message, Rule.ONE_TERMINAL))

    def _advance(self, step: Callable[[], Action | Together]) -> None:
        """Go on with the scenario up to what it asks for next."""
        try:
            asked = step()
        except StopIteration as end:
            self._asked, self.value = None, end.value
        except Exception as failure:  # noqa: BLE001  # the verdict tells whose it is
            self._fail(failure)
        else:
            if isinstance(asked, Together):
                self._asked = Branches(tuple(Branch(s, self._wire) for s in asked.scenarios))
            else:
                self._asked = asked

    def _fail(self, failure: Exception) -> None:
        self._steps.close()
        self._asked, self.failure = None, failure


@dataclass(frozen=True)
class Branches:
    """Scenarios to be played at the same time."""

    branches: tuple[Branch, ...]


class Play(Branch):
    """A check being played."""

    def __init__(self, check: Check, target: Target) -> None:
        self._check = check
        self._everything = _Wire()
        super().__init__(check.scenario(target), self._everything)

    @property
    def verdict(self) -> Verdict:
        """What the check came to. Streams are judged now, where the scenario has no fault to find.

        It is over, or was broken off: then it counts as not run.
        """
        if self.asked is not None:
            return self._verdict(Result.NOT_RUN, "broken off")
        match self._judged():
            case None:
                return self._verdict(Result.PASSED)
            case NonconformityError(message=message, rule=rule):
                return self._verdict(Result.FAILED, message, rule or self._check.rule)
            case NotSupportedError() as reason:
                return self._verdict(Result.NOT_SUPPORTED, str(reason))
            case UnusableError() as reason:
                return self._verdict(Result.ERROR, str(reason))
            case error if isinstance(error, _Malformed):
                message = f"what came cannot be read: {_in_words(error)}"
                return self._verdict(Result.FAILED, message, self._check.rule)
            case error:
                return self._verdict(Result.ERROR, as_bug(error))

    def _judged(self) -> Exception | None:
        """Return what is wrong. A broken stream explains what a scenario stumbles over, so it
        counts for more, unless it was left because the scenario had found something."""
        if self.failure is None or isinstance(self.failure, NonconformityError | _Malformed):
            has_left = isinstance(self.failure, NonconformityError)
            try:
                for socket in self._everything.sockets.values():
                    socket.judge(only_whole=has_left)
            except Exception as failure:  # noqa: BLE001  # the verdict tells whose it is
                return failure
        return self.failure

    def _verdict(self, result: Result, message: str = "", rule: Rule | None = None) -> Verdict:
        lines = tuple(self._everything.transcript.lines)
        return Verdict(self._check, result, message, rule, lines, self._everything.num_requests)


def _in_words(error: Exception) -> str:
    match error:
        case ProtocolError(message=message):
            return message
        case KeyError():
            return f"it has no member {error}"
        case _:
            return f"{type(error).__name__}: {error}"


def as_bug(error: Exception) -> str:
    """Return what is said of an error that no server can be blamed for."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    told = f"{type(error).__name__}: {error}".rstrip(": ")
    return f"the check itself broke, at {Path(place.filename).name}:{place.lineno}: {told}"
