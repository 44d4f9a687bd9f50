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
    Request,
    Scenario,
    Send,
    Sent,
    Silence,
    Steps,
    Together,
    Unreachable,
)
from protocol.conformance.captured import CapturedSocket
from protocol.conformance.catalogue import CHECKS, chosen
from protocol.conformance.check import Check, Checks, Target, Way
from protocol.conformance.play import Branches, Play, Result
from protocol.conformance.rules import Rule, expect
from protocol.conformance.shapes import Event
from protocol.conformance.socket_steps import connect
from protocol.dialect import Dialect
from protocol.errors import ProtocolError
from protocol.tools import CallableTool
from tests.protocol.conformance.faults.fault import missing, wrong
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
    assert verdict.message == "what came cannot be read: it has no member 'nothing'"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("no number"), "ValueError: no number"),
        (errors.invalid_json("cut"), "expected one JSON object: cut"),
    ],
)
def test_what_a_scenario_cannot_read_is_said_in_words(error: Exception, said: str) -> None:
    def reads(target: Target, way: Way) -> Scenario:
        """It reads."""
        yield from connect(target, way)
        raise error

    verdict = played(check_of(reads))

    assert (verdict.result, verdict.rule) == (Result.FAILED, Rule.SOCKET_SURVIVES)
    assert verdict.message == f"what came cannot be read: {said}"


def breaks(target: Target, way: Way) -> Scenario:
    """It breaks."""
    yield from connect(target, way)
    raise AssertionError("never so")


def breaks_inside(target: Target, way: Way) -> Scenario:
    """It breaks in one of two scenarios."""
    yield Together((greets(target, way), breaks(target, way)))


@pytest.mark.parametrize("scenario", [breaks, breaks_inside])
def test_a_check_that_is_broken_is_an_error_and_no_fault_of_the_server(scenario: Any) -> None:
    verdict = played(check_of(scenario))

    assert verdict.result is Result.ERROR
    place, told = verdict.message.split(": ", 1)
    assert place.startswith("the check itself broke, at test_play.py:")
    assert told == "AssertionError: never so"
    assert verdict.lines


def test_a_judge_that_is_broken_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(self: CapturedSocket, *, only_whole: bool = False) -> None:
        raise RuntimeError("oops")

    monkeypatch.setattr(CapturedSocket, "judge", judge)

    verdict = played(check_of(greets))

    assert verdict.result is Result.ERROR
    assert verdict.message.endswith("RuntimeError: oops")


@pytest.mark.parametrize(
    ("event_type", "member", "value", "message"),
    [
        ("done", "response", None, "the response is no object: None"),
        ("created", "response", 5, "response.created with 5 as `response`"),
        ("in_progress", "stream_id", ["a"], "response.in_progress with ['a'] as `stream_id`"),
        ("output_item.added", "output_index", True, "with True as `output_index`"),
    ],
)
def test_what_is_malformed_is_told(event_type: str, member: str, value: Any, message: str) -> None:
    server = ModelServer(wrong(event_type, member, value=value))

    verdict = played(named("append/suspension-is-no-end"), server)

    assert verdict.result is Result.FAILED
    assert message in verdict.message


def test_arguments_that_are_no_json_are_a_fault() -> None:
    class WritesNoJson(ModelServer):
        def arguments(self, tool: CallableTool) -> str:
            return "Oslo"

    for name in ("named-tool-is-called", "strict-arguments-match-their-schema"):
        verdict = played(named(f"chained/{name}"), WritesNoJson())

        assert verdict.result is Result.FAILED
        assert "expected one JSON object" in verdict.message


def test_a_response_that_is_left_is_judged() -> None:
    def leaves(target: Target, way: Way) -> Scenario:
        """It leaves."""
        socket = yield from connect(target, way)
        yield from socket.send_create()
        yield from socket.up_to("response.output_text.delta")

    verdict = played(check_of(leaves), ModelServer(missing("in_progress")))

    assert (verdict.result, verdict.rule) == (Result.FAILED, Rule.LIFECYCLE_BEGINS)


def test_a_server_that_is_not_there_is_an_error() -> None:
    play = Play(check_of(greets), TARGET)

    play.give(Unreachable("connection refused"))

    assert (play.verdict.result, play.verdict.message) == (Result.ERROR, "connection refused")


# --- What is not supported -----------------------------------------------------------------------


class Sends(ModelServer):
    """Answers all with one status, and the words of a server that does not do it."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status

    def connect(self, socket: str, query: str, headers: dict[str, str]) -> Outcome:
        return Answer(self.status, {}, b"not supported")

    def answer(self, request: Request) -> Answer:
        error = ProtocolError("it is not supported", code="unsupported_value", status=self.status)
        return self.json(self.error_body(error), self.status)


class SaysSo(ModelServer):
    """Refuses all creates with one status."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status

    def parse(self, body: Event, transport: Any) -> CreateParams:
        raise ProtocolError("it is not supported", status=self.status)


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
    verdict = played(check_of(greets, way), Sends(426))

    assert verdict.result is Result.NOT_SUPPORTED
    assert verdict.message == "the WebSocket upgrade is refused with 426"


@pytest.mark.parametrize(
    ("status", "result"),
    [
        *((status, Result.NOT_SUPPORTED) for status in (400, 404, 405, 426, 501)),
        *((status, Result.ERROR) for status in (401, 403, 429)),
        *((status, Result.FAILED) for status in (200, 302, 418, 500, 502, 503)),
    ],
)
def test_an_upgrade_may_be_refused_in_some_ways(status: int, result: Result) -> None:
    verdict = played(check_of(greets), Sends(status))

    assert verdict.result is result
    assert str(status) in verdict.message


@pytest.mark.parametrize(
    ("status", "result"),
    [
        *((status, Result.NOT_SUPPORTED) for status in (400, 404, 422, 501)),
        *((status, Result.ERROR) for status in (401, 403, 429)),
        *((status, Result.FAILED) for status in (500, 502, 503)),
    ],
)
@pytest.mark.parametrize("name", ["http/text-is-told-in-order", "chained/text-is-told-in-order"])
def test_a_server_that_breaks_does_not_say_what_it_supports(
    name: str, status: int, result: Result
) -> None:
    server = Sends(status) if name.startswith("http") else SaysSo(status)

    assert played(named(name), server).result is result


OF_KEYS = ("wrong-key-lets-nobody-in", "no-key-lets-nobody-in")


@pytest.mark.parametrize("status", [401, 403, 429])
@pytest.mark.parametrize(
    "check",
    [check for check in CHECKS if check.name.partition("/")[2] not in OF_KEYS],
    ids=lambda check: check.name,
)
def test_a_server_that_lets_nobody_in_is_an_error_of_each_check(check: Check, status: int) -> None:
    verdict = played(check, Sends(status))

    assert verdict.result is Result.ERROR, verdict
    assert f"nobody is let in: {status}" in verdict.message


@pytest.mark.parametrize("status", [401, 403, 429])
@pytest.mark.parametrize("name", ["wrong-types-are-named", "binary-frame-is-answered"])
def test_a_frame_that_lets_nobody_in_is_an_error(name: str, status: int) -> None:
    class Frames(ModelServer):
        def error_frame(self, error: ProtocolError, lane: str | None) -> Event:
            return super().error_frame(error, lane) | {"status": status}

    assert played(named(f"chained/{name}"), Frames()).result is Result.ERROR


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
