"""Whatever a server sends, each check comes to a verdict, and the server is blamed for it."""

import random
from typing import Any

import pytest

from protocol.codec import decode_object, encode
from protocol.conformance.actions import Action, Answer, Closed, Frame, Outcome, Receive
from protocol.conformance.catalogue import CHECKS
from protocol.conformance.check import Check
from protocol.conformance.play import Result
from protocol.errors import ProtocolError
from tests.protocol.conformance.model_server import ModelServer
from tests.protocol.conformance.playing import played

JUNK: tuple[Any, ...] = (None, True, -1, 1.5, 10**18, "", "junk", [], [None], {}, {"x": [1]})
NUM_SERVERS = 4
RARITIES = (5, 50, 200)
"""What is said is right but for one in so many: what is rare comes late in a scenario."""
BLAMED = (Result.PASSED, Result.FAILED, Result.NOT_SUPPORTED)


class Junks(ModelServer):
    """Puts junk, or nothing, in the place of members of what a correct server says."""

    def __init__(self, seed: str) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.rarity = self.random.choice(RARITIES)

    def perform(self, action: Action) -> Outcome:
        try:
            outcome = super().perform(action)
        except (LookupError, TypeError, ValueError):  # it is given its own junk back
            return Closed(1011) if isinstance(action, Receive) else Answer(400, {}, b"{}")
        match outcome:
            case Frame(str(data)):
                return Frame(self.junked(data.encode()).decode())
            case Answer(status, headers, body):
                pieces = [
                    line if line.startswith(b"event") else self.junked(line)
                    for line in body.split(b"\n")
                ]
                return Answer(status, headers, b"\n".join(pieces))
            case _:
                return outcome

    def junked(self, line: bytes) -> bytes:
        """Return an object, in a line or in a field, with one member changed, or as it is."""
        name, _, data = line.rpartition(b"data: ")
        try:
            value = decode_object(data)
        except ProtocolError:
            return line
        if self.random.randrange(self.rarity):
            return line
        self.change(value)
        return (b"data: " if b"data: " in line else name) + encode(value)

    def change(self, value: Any) -> None:
        """Change one member of ``value``, or of what is in it, at any depth."""
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = self.random.choice(keys) if keys else None
        if key is None:
            return
        if isinstance(value[key], dict | list) and value[key] and self.random.randrange(4):
            self.change(value[key])
        elif self.random.randrange(3):
            value[key] = self.random.choice(JUNK)
        else:
            del value[key]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_what_is_malformed_is_a_fault_of_the_server(check: Check) -> None:
    for number in range(NUM_SERVERS):
        verdict = played(check, Junks(f"{check.name} {number}"))

        assert verdict.result in BLAMED, verdict
        assert verdict.message or verdict.result is Result.PASSED
