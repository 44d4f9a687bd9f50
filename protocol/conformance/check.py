"""Checks: what a server is put to, declared beside the scenario that does it.

A module of checks begins with ``checks = Checks()``, and each scenario in it is decorated::

    @checks.over(Way.CHAINED, Way.APPEND, rule=Rule.OUTPUT_LIMIT, requests=1)
    def limit_is_kept(target: Target, way: Way) -> Scenario:
        \"\"\"At its limit a response is incomplete and its item is delivered.\"\"\"
        socket = yield from connect(target, way)
        events = yield from socket.create(max_output_tokens=16)
        expect(events[-1]["type"] == "response.incomplete", "the limit was not kept")
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from protocol.conformance.actions import Scenario
from protocol.conformance.rules import Rule


class Way(StrEnum):
    """The ways in which a client may speak to a server, and go on at a call."""

    HTTP = "http"
    CHAINED = "chained"
    """One WebSocket, and ``previous_response_id``."""
    APPEND = "append"
    INJECT = "inject"


@dataclass(frozen=True)
class Target:
    """What is to be known of the server that is checked."""

    model: str | None = None
    """Named in each request, where it is not None."""
    max_output_tokens: int = 128
    """The limit of each response, unless a check is about limits."""
    members: dict[str, Any] = field(default_factory=dict)
    """Members that the model needs in each create."""
    has_api_key: bool = False
    """True if a key is sent with each request: then there are wrong ones."""

    def body(self, **members: Any) -> dict[str, Any]:
        """Return the members of a create that asks for little; those that are None are left out."""
        model = {} if self.model is None else {"model": self.model}
        usual = {"input": "Say hello.", "max_output_tokens": self.max_output_tokens, "store": False}
        asked = {**usual, **model, **self.members, **members}
        return {name: value for name, value in asked.items() if value is not None}


Play: TypeAlias = Callable[[Target, Way], Scenario]


@dataclass(frozen=True)
class Check:
    """Something that a server is put to."""

    name: str
    """With the way it is done in before it: ``append/outputs-in-any-order``."""
    says: str
    """What has to hold, in a sentence."""
    way: Way
    rule: Rule
    num_requests: int
    """How often it asks the server for something, at most."""
    num_responses: int
    """How many of these may make the model write up to the target's limit."""
    is_alone: bool
    """True if other checks would disturb it, or it them."""
    play: Play

    def scenario(self, target: Target) -> Scenario:
        """Return the scenario, ready to be played."""
        return self.play(target, self.way)


@dataclass
class Checks:
    """The checks of one module, in order."""

    _checks: list[Check] = field(default_factory=list)

    def over(
        self,
        *ways: Way,
        rule: Rule,
        requests: int,
        responses: int | None = None,
        alone: bool = False,
    ) -> Callable[[Play], Play]:
        """Declare the decorated scenario as a check in each of ``ways``.

        Its name is the function's, and what it says the first line of the docstring.

        Args:
            ways: in which it is played.
            rule: that it is about.
            requests: creates, appends, injects and HTTP requests it makes.
            responses: those of them that the model answers; all, if it is not said.
            alone: whether no other check may be played meanwhile.
        """

        def declare(play: Play) -> Play:
            says = (play.__doc__ or "").strip().splitlines()[0]
            name = play.__name__.replace("_", "-")
            self._checks.extend(
                Check(
                    name=f"{way.value}/{name}",
                    says=says,
                    way=way,
                    rule=rule,
                    num_requests=requests,
                    num_responses=requests if responses is None else responses,
                    is_alone=alone,
                    play=play,
                )
                for way in ways
            )
            return play

        return declare

    def __iter__(self) -> Iterator[Check]:
        return iter(self._checks)


@dataclass(frozen=True)
class Cost:
    """What checks may spend, at most."""

    num_requests: int
    num_output_tokens: int

    @classmethod
    def of(cls, checks: Sequence[Check], target: Target) -> "Cost":
        """Return the cost of ``checks``."""
        num_responses = sum(check.num_responses for check in checks)
        return cls(
            sum(check.num_requests for check in checks), num_responses * target.max_output_tokens
        )


def affordable(checks: Sequence[Check], max_requests: int) -> list[Check]:
    """Return ``checks`` from the first on, as many as ``max_requests`` pay for."""
    spent, chosen = 0, []
    for check in checks:
        spent += check.num_requests
        if spent > max_requests:
            break
        chosen.append(check)
    return chosen
