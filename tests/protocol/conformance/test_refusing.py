"""What the checks of refusals count as no fault, and which ends of a connection they accept."""

from collections.abc import Sequence

import pytest

from protocol.conformance.actions import Closed
from protocol.conformance.catalogue import CHECKS, chosen
from protocol.conformance.check import Check, Target
from protocol.conformance.play import Play, Result
from protocol.conformance.shapes import Event
from protocol.errors import ProtocolError
from protocol.items import InputItem
from tests.protocol.conformance.model_server import Connection, ModelServer
from tests.protocol.conformance.playing import played


def named(pattern: str) -> list[Check]:
    return chosen(CHECKS, patterns=[pattern])


class Closes(ModelServer):
    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code

    def refuse(self, connection: Connection, error: ProtocolError, frame: Event) -> None:
        connection.out.append(Closed(self.code))


class ReadsLittle(ModelServer):
    def check_length(self, context: Sequence[InputItem]) -> None:
        try:
            super().check_length(context)
        except ProtocolError as error:
            error.code, error.status = "payload_too_large", 413
            raise


class HasNoLanes(ModelServer):
    def lane_name(self, frame: Event) -> str | None:
        return None


@pytest.mark.parametrize("check", named("*-key-lets-nobody-in"), ids=lambda check: check.name)
def test_where_no_key_is_given_none_is_wrong(check: Check) -> None:
    play = Play(check, Target())

    assert play.asked is None
    assert play.verdict.result is Result.NOT_SUPPORTED


@pytest.mark.parametrize(
    ("pattern", "server"),
    [
        ("longer-input-than-the-context-is-refused", ReadsLittle()),
        ("one-lane-too-many-is-refused", HasNoLanes()),
    ],
)
def test_what_a_server_does_not_do_is_no_fault(pattern: str, server: ModelServer) -> None:
    for check in named(pattern):
        verdict = played(check, server)

        assert verdict.result is Result.NOT_SUPPORTED, verdict


@pytest.mark.parametrize(
    ("pattern", "code", "result"),
    [
        ("binary-frame-is-answered", 1003, Result.PASSED),
        ("binary-frame-is-answered", 1007, Result.PASSED),
        ("binary-frame-is-answered", 1011, Result.FAILED),
        ("long-message-is-answered", 1009, Result.PASSED),
        ("long-message-is-answered", 1006, Result.FAILED),
        ("frames-that-are-no-event-are-refused", 1008, Result.FAILED),
    ],
)
def test_a_connection_may_end_as_rfc_6455_says(pattern: str, code: int, result: Result) -> None:
    (check,) = named(pattern)

    assert played(check, Closes(code)).result is result


def test_all_members_that_are_not_refused_right_are_told() -> None:
    class NamesNoParam(ModelServer):
        def error_body(self, error: ProtocolError) -> Event:
            error.param = None
            return super().error_body(error)

    (check,) = named("http/missing-members-are-named")

    verdict = played(check, NamesNoParam())

    assert verdict.num_requests == check.num_requests
    assert all(
        f"expected a 400 of param {p}," in verdict.message for p in ("input", "tools", "text")
    )
