"""One check being played, without a socket: ask for the next action, and say what came of it.

::

    play = Play(check, target)
    while (asked := play.asked) is not None:
        play.give(perform(asked))       # or play all of asked.plays at once, and then give None
    play.verdict
"""

from collections.abc import Generator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from protocol.conformance.actions import (
    Action,
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


class Result(StrEnum):
    """What a check came to."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_SUPPORTED = "not supported"
    ERROR = "error"
    """The server could not be checked."""
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


_Failing: TypeAlias = NonconformityError | NotSupportedError | UnusableError
# A scenario reads what the server sent: that its members are not there is the server's doing.
_MALFORMED = (LookupError, TypeError, AttributeError)


class _Wire:
    """What the scenarios of a check share: the transcript and the streams of each connection."""

    def __init__(self) -> None:
        self.transcript = Transcript()
        self.sockets: dict[str, CapturedSocket] = {}
        self.num_requests = 0

    def take(self, action: Action, outcome: Outcome) -> object:
        """Keep what came, and return it as a scenario reads it: a frame as its event."""
        self.transcript.record(action, outcome)
        if isinstance(action, Request | Send):
            self.num_requests += 1
        if isinstance(outcome, Unreachable):
            raise UnusableError(outcome.reason)
        if isinstance(action, Receive) and isinstance(outcome, Frame):
            return self.sockets.setdefault(action.socket, CapturedSocket()).take(outcome.data)
        return outcome


class Branch:
    """One scenario being played."""

    def __init__(self, steps: Generator[Action | Together, Any, Any], wire: _Wire) -> None:
        self._steps = steps
        self._wire = wire
        self._asked: Action | Branches | None = None
        self.value: Any = None
        self.failure: _Failing | None = None
        self._advance(None)

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
                    self._advance([branch.value for branch in branches])
            case action:
                assert outcome is not None, "of an action something comes"
                try:
                    came = self._wire.take(action, outcome)
                except (NonconformityError, UnusableError) as failure:
                    self._fail(failure)
                    return
                if came is None:  # a frame that says nothing
                    return
                self._advance(came)

    def give_up(self, message: str) -> None:
        """End it as failed, because the server does not come to an end."""
        self._fail(NonconformityError(message, Rule.ONE_TERMINAL))

    def _advance(self, came: object) -> None:
        try:
            asked = self._steps.send(came)
        except StopIteration as end:
            self._asked, self.value = None, end.value
        except (NonconformityError, NotSupportedError, UnusableError) as failure:
            self._fail(failure)
        except _MALFORMED as error:
            message = f"what came cannot be read: {type(error).__name__}: {error}"
            self._fail(NonconformityError(message))
        else:
            if isinstance(asked, Together):
                self._asked = Branches(tuple(Branch(s, self._wire) for s in asked.scenarios))
            else:
                self._asked = asked

    def _fail(self, failure: _Failing) -> None:
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

    def _judged(self) -> _Failing | None:
        """Return what is wrong. A broken stream explains what a scenario stumbles over, so it
        counts for more."""
        if self.failure is None or isinstance(self.failure, NonconformityError):
            try:
                for socket in self._everything.sockets.values():
                    socket.judge()
            except NonconformityError as fault:
                return fault
        return self.failure

    def _verdict(self, result: Result, message: str = "", rule: Rule | None = None) -> Verdict:
        lines = tuple(self._everything.transcript.lines)
        return Verdict(self._check, result, message, rule, lines, self._everything.num_requests)
