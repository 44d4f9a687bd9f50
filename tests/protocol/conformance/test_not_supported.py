"""What a server says that it does not do is no fault of it."""

from itertools import product

import pytest

from protocol import errors
from protocol.client_events import SteerParams
from protocol.conformance.actions import Outcome
from protocol.conformance.catalogue import chosen
from protocol.conformance.check import Check, Way
from protocol.conformance.checks import appending, conversations, injecting, steering
from protocol.conformance.play import Result
from protocol.conformance.shapes import Event
from protocol.errors import ProtocolError
from tests.protocol.conformance.model_server import Connection, Lane, ModelServer, Run
from tests.protocol.conformance.playing import played


class ChainsOnly(ModelServer):
    def connect(self, socket: str, query: str, headers: dict[str, str]) -> Outcome:
        return super().connect(socket, query, {})


class KnowsNoSteers(ModelServer):
    def steer(self, connection: Connection, frame: Event) -> None:
        raise errors.unsupported_event_type("response.steer")


class SteersNoSuchModel(ModelServer):
    def parse_steer(self, frame: Event) -> SteerParams:
        raise ProtocolError("not with this model", code="steering_not_supported")


class RefusesTemperature(ModelServer):
    def begin(
        self, body: Event, connection: Connection | None = None, lane: Lane | None = None
    ) -> Run:
        if "temperature" in body:
            raise errors.unsupported_parameter("temperature", "not with this model")
        return super().begin(body, connection, lane)


class AnswersAtRandom(ModelServer):
    def words(self, run: Run) -> list[str]:
        return [self.fresh_id("word"), *super().words(run)]


OF_DIALECTS = [
    check
    for module in (appending, injecting, conversations)
    for check in module.checks
    if check.way in (Way.APPEND, Way.INJECT)
]
OF_NO_CHANCE = chosen(conversations.checks, patterns=["whole-conversation-is-answered-alike"])
CASES: list[tuple[Check, type[ModelServer]]] = [
    *product(OF_DIALECTS, (ChainsOnly,)),
    *product(steering.checks, (KnowsNoSteers, SteersNoSuchModel)),
    *product(OF_NO_CHANCE, (RefusesTemperature, AnswersAtRandom)),
]


@pytest.mark.parametrize(
    ("check", "server"), CASES, ids=[f"{check.name}-{server.__name__}" for check, server in CASES]
)
def test_what_is_not_there_is_not_supported(check: Check, server: type[ModelServer]) -> None:
    verdict = played(check, server())

    assert verdict.result is Result.NOT_SUPPORTED, verdict
    assert verdict.message
