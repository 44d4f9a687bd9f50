"""Junk is drawn, is answered by a correct server, and finds what a faulty one does not survive."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from protocol import errors
from protocol.conformance.actions import Action, Answer, Closed, Outcome, Request
from protocol.conformance.check import Check, Target, Way
from protocol.conformance.play import Result, Verdict
from protocol.conformance.rules import Rule
from protocol.conformance.shapes import Event
from sampler.engines.simulated.model import simulated_model
from sampler.engines.simulated.script import Script, ScriptedTurn
from sampler.local_engine import LocalEngine
from scripts.conformance.address import address_of
from scripts.conformance.fuzz import Fuzz, fuzz_checks, fuzzed
from scripts.conformance.junk import MAX_FRAMES, Body, drawn
from scripts.conformance.places import places
from scripts.conformance.report import usage_of
from scripts.conformance.shrinking import shown, smaller
from scripts.conformance.suite import Suite
from scripts.conformance.tokens import estimated_input, reported
from server.settings import Settings
from tests.protocol.conformance.model_server import Connection, ModelServer
from tests.protocol.conformance.playing import TARGET, played
from tests.scripts.test_conform_suite import Watching
from tests.server.running import serving

FEW = 40
SOME = 300


def check_of(way: Way, num_frames: int = FEW) -> Fuzz:
    (check,) = [check for check in fuzz_checks(num_frames) if check.way is way]
    return check


async def verdict_on(server: Callable[[], ModelServer], way: Way, num_frames: int = FEW) -> Verdict:
    async def play(check: Check) -> Verdict:
        return played(check, server())

    return await fuzzed(check_of(way, num_frames), TARGET, play)


# --- What is drawn -------------------------------------------------------------------------------


@pytest.mark.parametrize("way", Way)
def test_the_same_is_drawn_again(way: Way) -> None:
    assert list(drawn(TARGET, way, 120)) == list(drawn(TARGET, way, 120))


@pytest.mark.parametrize("way", Way)
def test_fewer_are_the_first_of_more(way: Way) -> None:
    few, more = ([frame for sent in drawn(TARGET, way, num) for frame in sent] for num in (30, 55))

    assert more[: len(few)] == few
    assert len(few) <= 30 < len(more) <= 55


def test_what_is_drawn_is_distinct() -> None:
    frames = [repr(frame) for sent in drawn(TARGET, Way.CHAINED, 150) for frame in sent]

    assert len(set(frames)) == len(frames)


def test_each_way_has_its_own_frames() -> None:
    def text(way: Way) -> str:
        return repr(list(drawn(TARGET, way, 40)))

    assert "response.append" in text(Way.APPEND)
    assert "response.inject" in text(Way.INJECT)
    assert "response.create" in text(Way.CHAINED)
    assert all(isinstance(body, Body) for sent in drawn(TARGET, Way.HTTP, 20) for body in sent)


def test_what_is_drawn_asks_for_little() -> None:
    for way in (Way.CHAINED, Way.APPEND):
        for sent in drawn(TARGET, way, 100):
            for frame in sent:
                assert not isinstance(frame, Body)
                try:
                    event = json.loads(frame)
                except (ValueError, RecursionError):
                    continue
                if isinstance(event, dict) and event.get("type") == "response.create":
                    assert "max_output_tokens" in event


def test_members_of_the_target_are_in_what_is_drawn() -> None:
    target = Target("one", members={"reasoning": {"effort": "none"}})

    assert '{"effort":"none"}' in "".join(map(str, drawn(target, Way.CHAINED, 20)))


# --- A correct server ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("way", Way)
async def test_a_correct_server_answers_whatever_is_sent(way: Way) -> None:
    verdict = await verdict_on(ModelServer, way, FEW)

    assert verdict.result is Result.PASSED, verdict.message
    assert "frames" in verdict.message
    assert 0 < verdict.num_requests <= check_of(way, FEW).num_requests
    assert usage_of(verdict).num_input_tokens > reported(verdict.lines).num_input_tokens


@pytest.mark.slow
async def test_our_server_answers_whatever_is_sent() -> None:
    script = Script((ScriptedTurn(num_words=24),))
    engine = LocalEngine(simulated_model(script=script, kv_memory=1 << 26))
    watching = Watching()
    async with serving(engine=engine, settings=Settings()) as server:
        suite = Suite(address_of(server.url), Target(), watching, patience_seconds=60)
        await suite.play(fuzz_checks(FEW))

    verdicts = [played.verdict for played in watching.played]
    assert [verdict.message for verdict in verdicts if verdict.result is not Result.PASSED] == []
    assert len(verdicts) == len(Way)


# --- Faulty ones ---------------------------------------------------------------------------------


class Crashing(ModelServer):
    """Ends a connection at a member that it stumbles over; over HTTP it is a 500."""

    def stumbles(self, event: Event) -> bool:
        kinds = (
            ("input", str | list),
            ("tools", list),
            ("stream", bool),
            ("tool_choice", str | dict),
        )
        return any(not isinstance(event[name], kind) for name, kind in kinds if name in event)

    def take_event(self, connection: Connection, kind: str, frame: Event) -> None:
        if self.stumbles(frame):
            connection.out.append(Closed(1011))
            return
        super().take_event(connection, kind, frame)

    def post(self, body: bytes, *rest: Any) -> Answer:
        try:
            event = json.loads(body)
        except (ValueError, RecursionError):
            event = {}
        if isinstance(event, dict) and self.stumbles(event):
            return self.json({"error": None}, 500)
        return super().post(body, *rest)


class HangingUp(ModelServer):
    """Ends a connection at a body that is no JSON."""

    def perform(self, action: Action) -> Outcome:
        if isinstance(action, Request):
            try:
                json.loads(action.body or b"")
            except (ValueError, RecursionError):
                return Closed(1006)
        return super().perform(action)


class Garbled(ModelServer):
    """Answers an append with what no client can read, which has the client close."""

    def take_event(self, connection: Connection, kind: str, frame: Event) -> None:
        if kind == "response.append":
            connection.out.append(Closed(1006, "we closed: 1007 invalid start byte"))
            return
        super().take_event(connection, kind, frame)


class Silent(ModelServer):
    """Says nothing to what is no JSON."""

    def take(self, connection: Connection, data: str | bytes) -> None:
        try:
            json.loads(data)
        except (ValueError, RecursionError):
            return
        super().take(connection, data)


class Lenient(ModelServer):
    """Reads no further than the first object, whatever follows."""

    def take(self, connection: Connection, data: str | bytes) -> None:
        if isinstance(data, str):
            try:
                event, _ = json.JSONDecoder().raw_decode(data)
                data = json.dumps(event)
            except (ValueError, RecursionError):
                pass
        super().take(connection, data)


class Blaming(ModelServer):
    """Takes a client's mistake for its own."""

    def error_frame(self, error: errors.ProtocolError, lane: str | None) -> Event:
        told = super().error_frame(error, lane)
        return told | {"status": 500} if error.code == "invalid_type" else told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "way", "says"),
    [
        (Crashing, Way.HTTP, "a 500 with the error None"),
        (HangingUp, Way.HTTP, "the server closed: 1006"),
        (Crashing, Way.CHAINED, "the server closed: 1011"),
        (Crashing, Way.INJECT, "the server closed: 1011"),
        (Silent, Way.CHAINED, "nothing came"),
        (Silent, Way.APPEND, "nothing came"),
        (Garbled, Way.APPEND, "the server closed: 1006 we closed: 1007"),
        (Lenient, Way.CHAINED, "what is no JSON object is answered with"),
        (Blaming, Way.CHAINED, "refused as an error of the server"),
    ],
)
async def test_a_fault_is_found_and_shown_as_small_as_it_is(
    server: type[ModelServer], way: Way, says: str
) -> None:
    verdict = await verdict_on(server, way, SOME)

    assert verdict.result is Result.FAILED
    assert verdict.message.startswith(says)
    (_, _, told) = verdict.message.partition("the smallest that does it: ")
    assert len(told) < 400, told
    assert " then " not in told, "one frame is enough"
    assert verdict.lines, "the frames show it"
    assert verdict.check.name == check_of(way).name
    assert verdict.num_requests <= check_of(way, SOME).num_requests


async def test_a_server_without_the_dialect_does_not_support_it() -> None:
    class Chained(ModelServer):
        def connect(self, socket: str, query: str, headers: dict[str, str]) -> Any:
            return super().connect(socket, "", {})

    for way in (Way.APPEND, Way.INJECT):
        verdict = await verdict_on(Chained, way)

        assert verdict.result is Result.NOT_SUPPORTED, verdict


async def test_a_server_that_lets_nobody_in_cannot_be_fuzzed() -> None:
    class Locked(ModelServer):
        def answer(self, request: Request) -> Answer:
            return self.json(self.error_body(errors.invalid_api_key()), 401)

    verdict = await verdict_on(Locked, Way.HTTP)

    assert verdict.result is Result.ERROR
    assert verdict.num_requests == 1


# --- What it costs -------------------------------------------------------------------------------


def test_no_junk_is_sent_unless_it_is_asked_for() -> None:
    assert fuzz_checks(0) == ()


@pytest.mark.parametrize("num_frames", [1, 4, 5, 20])
def test_no_more_frames_are_drawn_than_asked_for(num_frames: int) -> None:
    for check in fuzz_checks(num_frames):
        exchanges = list(drawn(TARGET, check.way, num_frames))

        assert 0 < sum(map(len, exchanges)) <= num_frames
        assert max(map(len, exchanges)) <= MAX_FRAMES
        assert check.num_requests > num_frames
        assert check.is_alone, "others are not to suffer from it"


@pytest.mark.parametrize("way", Way)
def test_junk_is_estimated_to_be_as_long_as_a_request_that_is_right(way: Way) -> None:
    check = check_of(way)

    assert 50 < estimated_input([check], TARGET) / check.num_requests < 200


# --- Smaller -------------------------------------------------------------------------------------


def test_one_thing_is_left_out_at_a_time_the_largest_first() -> None:
    less = list(smaller(['{"a": {"b": [1]}}', "{}"]))

    assert less == [
        ["{}"],
        ['{"a": {"b": [1]}}'],
        ["{}", "{}"],
        ['{"a": {}}', "{}"],
        ['{"a": {"b": []}}', "{}"],
    ]


def test_the_limit_of_a_create_is_never_left_out() -> None:
    event = {"type": "response.create", "max_output_tokens": 16, "input": [{"a": 1}]}

    paths = [place.path for place in places(event)]

    assert paths == [("type",), ("input",), ("input", 0), ("input", 0, "a")]


def test_what_is_no_json_is_cut_into_pieces() -> None:
    less = [sent[0] for sent in smaller(['{"ab']) if isinstance(sent[0], str)]

    assert less[:2] == ["ab", '{"']
    assert all(len(text) < 4 for text in less)


def test_what_follows_json_is_left_out_before_its_members() -> None:
    first, *_, last = smaller(['{"a": 1} x'])

    assert (first, last) == (['{"a": 1}x'], ["{} x"])


def test_headers_of_a_body_are_left_out_first() -> None:
    body = Body(b"\xff\xfe", {"Content-Encoding": "gzip"})

    assert next(smaller([body])) == [Body(b"\xff\xfe")]


def test_what_is_long_is_shown_as_far_as_it_is_of_use() -> None:
    assert shown(["{}", b"\xff"]) == "{} then b'\\xff'"
    assert shown(["x" * 10_000]).endswith("… of 10,000 characters")


def test_rules_of_the_ways() -> None:
    assert {check.rule for check in fuzz_checks(1)} == {
        Rule.SOCKET_SURVIVES,
        Rule.REFUSED_BEFORE_STREAM,
    }
