"""A check is played action by action, and its verdict says what came of it and shows the frames."""

from typing import Any

import pytest

from protocol import errors
from protocol.client_events import CreateParams
from protocol.conformance.actions import (
    Answer,
    Closed,
    Connect,
    Frame,
    Opened,
    Outcome,
    Receive,
    Scenario,
    Send,
    Sent,
    Silence,
    Steps,
    Together,
    Unreachable,
)
from protocol.conformance.catalogue import CHECKS, chosen
from protocol.conformance.check import Check, Checks, Target, Way
from protocol.conformance.play import Branches, Play, Result
from protocol.conformance.rules import Rule, expect
from protocol.conformance.shapes import Event
from protocol.conformance.socket_steps import connect
from protocol.dialect import Dialect
from tests.protocol.conformance.model_server import ModelServer
from tests.protocol.conformance.playing import TARGET, played


def check_of(scenario: Any, way: Way = Way.CHAINED, rule: Rule = Rule.SOCKET_SURVIVES) -> Check:
    checks = Checks()
    checks.over(way, rule=rule, requests=1)(scenario)
    (check,) = checks
    return check


def named(name: str) -> Check:
    (check,) = chosen(CHECKS, patterns=[name])
    return check


def greets(target: Target, way: Way) -> Scenario:
    """It greets."""
    socket = yield from connect(target, way)
    yield from socket.create()


# --- Action by action ----------------------------------------------------------------------------


def test_actions_are_asked_for_one_by_one() -> None:
    play = Play(check_of(greets), TARGET)
    asked = []
    for outcome in (Opened(), Sent(), Silence(1)):
        asked.append(play.asked)
        play.give(outcome)

    body = '{"type":"response.create","input":"Say hello.","max_output_tokens":128,"store":false,'
    assert asked == [
        Connect("socket"),
        Send("socket", body + '"model":"made-up"}'),
        Receive("socket"),
    ]
    assert play.asked is None


def test_a_handshake_asks_for_its_dialect() -> None:
    asked = {way: Play(check_of(greets, way), TARGET).asked for way in Way}

    assert asked[Way.CHAINED] == Connect("socket")
    assert asked[Way.APPEND] == Connect(
        "socket", headers=(("OpenAI-Beta", "responses_websockets=2026-02-04"),)
    )
    assert asked[Way.INJECT] == Connect(
        "socket", headers=(("OpenAI-Beta", "responses_multi_agent=v1"),)
    )


def test_what_went_over_the_wire_is_kept() -> None:
    verdict = played(check_of(greets))

    lines = list(map(str, verdict.lines))
    assert lines[:2] == ["→ socket  GET /responses upgrade", "← socket  101"]
    assert lines[2].startswith('→ socket  {"type":"response.create"')
    assert lines[3].startswith('← socket  {"type":"response.created"')
    assert verdict.num_requests == 1


def test_an_answer_is_kept_line_by_line() -> None:
    lines = list(map(str, played(named("http/text-is-told-in-order")).lines))

    assert lines[0].startswith("→ http  POST /responses {")
    assert lines[1:3] == ["← http  200", "← http  event: response.created"]
    assert lines[-1] == "← http  data: [DONE]"


def test_a_check_that_is_broken_off_was_not_run() -> None:
    play = Play(check_of(greets), TARGET)

    assert play.verdict.result is Result.NOT_RUN


def test_a_check_that_is_given_up_has_failed() -> None:
    play = Play(check_of(greets), TARGET)

    play.give_up("not over in 5 s")

    assert play.asked is None
    assert (play.verdict.result, play.verdict.rule) == (Result.FAILED, Rule.ONE_TERMINAL)


def test_scenarios_that_are_played_together_share_the_verdict() -> None:
    def greet(number: int) -> Steps[int]:
        socket = yield from connect(TARGET, Way.CHAINED, f"socket {number}")
        yield from socket.create()
        return number

    def greets_twice(target: Target, way: Way) -> Scenario:
        """It greets twice."""
        came = yield Together((greet(1), greet(2)))
        expect(came == [2, 1], f"{came}")

    check = check_of(greets_twice)
    play = Play(check, TARGET)
    asked = play.asked
    assert isinstance(asked, Branches)
    assert [branch.asked for branch in asked.branches] == [
        Connect("socket 1"),
        Connect("socket 2"),
    ]
    assert played(check).message == "[1, 2]"


# --- Verdicts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("came", "message"),
    [
        (Closed(1011, "oops"), "the server closed: 1011 oops"),
        (Closed(1006), "the server closed: 1006"),
        (Silence(30), "nothing came for 30 s"),
        (Frame("{"), "expected one JSON object: Input data was truncated; it begins with '{'"),
        (Frame("[]"), "expected one JSON object: got `list`; it begins with '[]'"),
        (Frame('{"type": "response.created"}'), "response.created without `sequence_number`"),
        (Frame('{"type": "error", "error": {}}'), "an error frame without `status`"),
    ],
)
def test_what_should_not_come_is_told(came: Outcome, message: str) -> None:
    play = Play(check_of(greets), TARGET)
    for outcome in (Opened(), Sent(), came):
        play.give(outcome)

    assert play.asked is None
    assert (play.verdict.result, play.verdict.message) == (Result.FAILED, message)


def test_a_done_frame_says_nothing() -> None:
    play = Play(check_of(greets), TARGET)
    for outcome in (Opened(), Sent(), Frame("[DONE]")):
        play.give(outcome)

    assert play.asked == Receive("socket")


def test_a_scenario_cites_its_own_rule() -> None:
    def expects(target: Target, way: Way) -> Scenario:
        """It expects."""
        yield from connect(target, way)
        expect(False, "it was not so")

    verdict = played(check_of(expects, rule=Rule.WARM_UP))

    assert (verdict.result, verdict.rule) == (Result.FAILED, Rule.WARM_UP)
    assert verdict.message == "it was not so"


def test_what_a_scenario_cannot_read_is_the_servers_doing() -> None:
    def reads(target: Target, way: Way) -> Scenario:
        """It reads."""
        socket = yield from connect(target, way)
        events = yield from socket.create()
        expect(events[-1]["response"]["nothing"] == 1, "it is not 1")

    verdict = played(check_of(reads))

    assert verdict.result is Result.FAILED
    assert verdict.message == "what came cannot be read: KeyError: 'nothing'"


def test_a_server_that_is_not_there_is_an_error() -> None:
    play = Play(check_of(greets), TARGET)

    play.give(Unreachable("connection refused"))

    assert (play.verdict.result, play.verdict.message) == (Result.ERROR, "connection refused")


# --- What is not supported -----------------------------------------------------------------------


class Refuses(ModelServer):
    """Refuses the upgrade."""

    status = 426

    def connect(self, socket: str, query: str, headers: dict[str, str]) -> Outcome:
        return Answer(self.status, {}, b"")


class OneDialect(ModelServer):
    """Knows of no dialects."""

    def connect(self, socket: str, query: str, headers: dict[str, str]) -> Outcome:
        return super().connect(socket, f"?dialect={Dialect.CHAINED.value}", {})


class Chooses(ModelServer):
    """Cannot be told which tool to call."""

    def parse(self, body: Event, transport: Any) -> CreateParams:
        if body.get("tool_choice", "auto") != "auto":
            raise errors.unsupported_parameter("tool_choice", "it is left to the model")
        return super().parse(body, transport)


@pytest.mark.parametrize("way", [Way.CHAINED, Way.APPEND, Way.INJECT])
def test_a_refused_upgrade_is_not_supported(way: Way) -> None:
    verdict = played(check_of(greets, way), Refuses())

    assert verdict.result is Result.NOT_SUPPORTED
    assert verdict.message == "the WebSocket upgrade is refused with 426"


def test_a_server_that_lets_nobody_in_cannot_be_checked() -> None:
    server = Refuses()
    server.status = 401

    assert played(check_of(greets), server).result is Result.ERROR


@pytest.mark.parametrize(
    "name", [check.name for check in CHECKS if check.way in (Way.APPEND, Way.INJECT)]
)
def test_a_dialect_that_is_ignored_is_not_supported(name: str) -> None:
    verdict = played(named(name), OneDialect())

    assert verdict.result is Result.NOT_SUPPORTED, verdict
    assert "the dialect is ignored" in verdict.message


@pytest.mark.parametrize("name", ["http/named-tool-is-called", "append/suspension-is-no-end"])
def test_a_tool_choice_that_is_refused_as_such_is_not_supported(name: str) -> None:
    verdict = played(named(name), Chooses())

    assert verdict.result is Result.NOT_SUPPORTED
    assert "tool_choice" in verdict.message
