"""What a classifier finds, as each client of the server is told of it."""

import asyncio
import json
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from protocol.dialect import APPEND_BETA
from sampler.run import RunState
from server.ledger import LEDGER_FILE
from server.safety import PASSED, Direction, Verdict
from server.settings import Settings
from tests.server.http_client import post, post_refused, post_streamed
from tests.server.models import OSLO, context_text, held_at, scripted_engine, steps_of
from tests.server.refusals import Refusal, refusal
from tests.server.running import (
    BODY,
    CLOSING,
    DEADLINE_SECONDS,
    Client,
    Event,
    Running,
    calls_in,
    output,
    parse_sse,
    serving,
    text_in,
    until,
)
from tests.tiny_model import call_text

DIALECTS = ["append", "inject", "chained"]

FORBIDDEN = "This is forbidden."
ODD = "This is odd."
FORBIDDEN_CALL = call_text("get_weather", '{"city": "forbidden"}')
FORBIDDEN_THOUGHT = "<think>\nforbidden\n</think>\n\n"

# What a model says that may not say it, and the types of the items that are told whole.
BLOCKED_TURNS: dict[str, tuple[str, list[str]]] = {
    "a message": (FORBIDDEN, []),
    "the arguments of a call": (FORBIDDEN_CALL, []),
    "a thought": (f"{FORBIDDEN_THOUGHT}Sun.", []),
    "a message before a call": (f"{FORBIDDEN}{OSLO}", []),
    "a message after a thought": (f"<think>\nHm.\n</think>\n\n{FORBIDDEN}", ["reasoning"]),
    "a call after a message": (f"Let me look.{FORBIDDEN_CALL}", ["message"]),
    "a second call": (f"{OSLO}\n{FORBIDDEN_CALL}", ["function_call"]),
}


# --- Classifiers ---------------------------------------------------------------------------------


class WordClassifier:
    """Blocks what is forbidden, and tells of what is odd."""

    name = "words"

    def classify(self, texts: Sequence[str], direction: Direction) -> Sequence[Verdict]:
        return [self._verdict(text) for text in texts]

    def _verdict(self, text: str) -> Verdict:
        if "forbidden" in text:
            return Verdict("forbidden", 1.0, blocks=True)
        return Verdict("odd", 0.5) if "odd" in text else PASSED


class BreakableClassifier(WordClassifier):
    """Raises where a text is broken."""

    def _verdict(self, text: str) -> Verdict:
        if "broken" in text:
            raise RuntimeError(f"cannot judge {text}")
        return super()._verdict(text)


class HeldClassifier(WordClassifier):
    """Takes its time with a word, until it is released."""

    word = "Rain."
    reached = threading.Event()
    released = threading.Event()

    def _verdict(self, text: str) -> Verdict:
        if self.word in text:
            self.reached.set()
            assert self.released.wait(DEADLINE_SECONDS), "nobody released the classifier"
        return super()._verdict(text)


@contextmanager
def held_classifier() -> Iterator[type[HeldClassifier]]:
    """Give the class of a held classifier, which is released on the way out."""
    HeldClassifier.reached.clear()
    HeldClassifier.released.clear()
    try:
        yield HeldClassifier
    finally:
        HeldClassifier.released.set()


# --- The server, and what it has counted ---------------------------------------------------------


@asynccontextmanager
async def guarded(
    *script: str,
    classifier: str = f"{__name__}:WordClassifier",
    thinks: bool = False,
    data_dir: Path | None = None,
    **options: Any,
) -> AsyncIterator[Running]:
    """Serve a model that says ``script`` to clients that a classifier listens to."""
    settings = Settings(safety=classifier, data_dir=data_dir, recent_responses=0, **options)
    async with serving(engine=scripted_engine(*script, thinks=thinks), settings=settings) as server:
        yield server


def statuses_in(folder: Path) -> list[str]:
    """Return the status of each run that is in the books."""
    return [status for status, _, _ in rows_in(folder)]


def rows_in(folder: Path) -> list[tuple[str, int, int]]:
    """Return the status, the segments and the sampled tokens of each run that is in the books."""
    with closing(sqlite3.connect(folder / LEDGER_FILE)) as database:
        columns = "status, num_segments, output_tokens"
        return database.execute(f"SELECT {columns} FROM runs ORDER BY rowid").fetchall()


def user(text: str) -> Event:
    return {"type": "message", "role": "user", "content": text}


def types(events: Sequence[Event]) -> list[str]:
    return [event["type"] for event in events]


def failure_of(events: Sequence[Event]) -> str:
    """Return the code with which a response that was announced has failed."""
    assert types(events) == ["response.created", "response.in_progress", "response.failed"]
    return str(events[-1]["response"]["error"]["code"])


def safety_of(event: Event) -> Event:
    """Return what a closing event says of the classifier."""
    safety: Event = event["response"]["suspend:run"]["safety"]
    return safety


def flags_of(event: Event) -> list[str]:
    """Return the labels that a closing event tells of."""
    return [flag["label"] for flag in safety_of(event)["flagged"]]


def done_items(events: Sequence[Event]) -> list[Event]:
    return [event["item"] for event in events if event["type"] == "response.output_item.done"]


async def refused(client: Client) -> Refusal:
    """Return what the error frame says that must come next."""
    frame = await client.error()
    return refusal(frame["status"], frame["error"])


def states(server: Running) -> list[RunState]:
    return [run.state for run in server.engine.runs]


async def open_call(client: Client, **members: Any) -> Event:
    """Ask for a response that stops for a call, and return the call."""
    await client.send("response.create", **(BODY | members))
    (call,) = await client.calls(1)
    return call


async def answer(client: Client, dialect: str, *items: Event, **members: Any) -> list[Event]:
    """Bring what the latest response waits for, and return the events of what follows."""
    response = client.streams[-1][0]["response"]
    match dialect:
        case "append":
            return await client.append(*items)
        case "inject":
            await client.send("response.inject", response_id=response["id"], input=list(items))
            return await client.segment()
        case _:
            return await client.follow(response, *items, **members)


# --- Input that is blocked -----------------------------------------------------------------------


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_create_that_says_what_is_forbidden_is_announced_and_fails(
    dialect: str, generate: bool, tmp_path: Path
) -> None:
    async with guarded("Sun.", data_dir=tmp_path) as server, server.connect(dialect) as client:
        events = await client.create(input=FORBIDDEN, generate=generate)
        await server.until_free()

        assert failure_of(events) == "invalid_prompt"
        assert events[-1]["response"]["usage"] is None
        assert steps_of(server.engine) == []
    assert rows_in(tmp_path) == []


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_what_comes_after_a_refusal_is_answered(dialect: str) -> None:
    async with guarded("Sun.") as server, server.connect(dialect) as client:
        await client.create(input=FORBIDDEN)
        again = await client.create()

        assert text_in(again[-1]["response"]) == "Sun."


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_refused_create_leaves_the_latest_response_to_be_followed(dialect: str) -> None:
    async with guarded("Rain.", "Sun.") as server, server.connect(dialect) as client:
        first = await client.create(store=False)
        await client.create(input=FORBIDDEN, store=False)
        last = await client.follow(first[-1]["response"], user("Really?"))

        assert text_in(last[-1]["response"]) == "Sun."


async def test_a_refused_continuation_has_its_parent_forgotten_as_any_that_fails() -> None:
    async with guarded("Rain.", "Sun.") as server, server.connect() as client:
        first = await client.create(store=False)
        failed = await client.follow(first[-1]["response"], user(FORBIDDEN))
        following = {"previous_response_id": first[-1]["response"]["id"], "store": False}
        await client.send("response.create", **(BODY | following))
        error = await refused(client)

        assert failure_of(failed) == "invalid_prompt"
        assert error == Refusal(400, "previous_response_not_found", "previous_response_id")


async def test_the_parent_of_a_refused_continuation_can_be_followed_where_it_is_stored() -> None:
    async with guarded("Rain.", "Sun.") as server, server.connect() as client:
        first = await client.create()
        await client.follow(first[-1]["response"], user(FORBIDDEN))
        last = await client.follow(first[-1]["response"], user("Really?"))

        assert text_in(last[-1]["response"]) == "Sun."


@pytest.mark.parametrize("store", [True, False])
async def test_what_was_refused_cannot_be_followed(store: bool) -> None:
    async with guarded("Sun.") as server, server.connect() as client:
        failed = await client.create(input=FORBIDDEN, store=store)
        following = {"previous_response_id": failed[-1]["response"]["id"]}
        await client.send("response.create", **(BODY | following))
        error = await refused(client)
        over_http = await post_refused(server, **following)

        unknown = Refusal(400, "previous_response_not_found", "previous_response_id")
        assert error == over_http == unknown
        assert steps_of(server.engine) == []


async def test_a_refusal_says_which_item_it_is_about() -> None:
    items = [user("Hello."), user(FORBIDDEN)]
    async with guarded("Sun.") as server:
        first = await post_refused(server, input=FORBIDDEN)
        second = await post_refused(server, input=items)
        await server.until_free()

        assert first == Refusal(400, "invalid_prompt", "input[0]")
        assert second == Refusal(400, "invalid_prompt", "input[1]")
        assert steps_of(server.engine) == []


async def test_the_history_that_a_client_sends_is_read_too() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"}
    history = [user("Hi."), call, output(call, FORBIDDEN), user("And now?")]
    async with guarded("Sun.") as server:
        error = await post_refused(server, input=history)

        assert error == Refusal(400, "invalid_prompt", "input[2]")


async def test_an_event_stream_tells_of_a_refusal_as_of_any_failure() -> None:
    async with guarded("Sun.") as server, server.http() as http:
        answer = await http.post("/v1/responses", json={"input": FORBIDDEN, "stream": True})

        *frames, done = parse_sse(answer.text)
        events = [json.loads(data) for _, data in frames]
        assert answer.status_code == 200
        assert types(events) == [
            "response.created", "response.in_progress", "error", "response.failed",
        ]  # fmt: skip
        assert events[-1]["response"]["error"]["code"] == "invalid_prompt"
        assert done == ("", "[DONE]")
        assert steps_of(server.engine) == []


async def test_a_refusal_in_the_background_is_found_as_a_failed_response() -> None:
    async with guarded("Sun.") as server, server.http() as http:
        queued = await http.post("/v1/responses", json={"input": FORBIDDEN, "background": True})
        response_id = queued.json()["id"]
        async with asyncio.timeout(DEADLINE_SECONDS):
            found = queued.json()
            while found["status"] in ("queued", "in_progress"):
                found = (await http.get(f"/v1/responses/{response_id}")).json()

        assert found["status"] == "failed"
        assert found["error"]["code"] == "invalid_prompt"
        assert steps_of(server.engine) == []


async def test_what_is_to_be_compacted_is_read_before() -> None:
    async with guarded("Sun.") as server, server.http() as http:
        answer = await http.post(
            "/v1/responses/compact", json={"model": "tiny", "input": FORBIDDEN}
        )

        error = refusal(answer.status_code, answer.json()["error"])
        assert error == Refusal(400, "invalid_prompt", "input[0]")
        assert steps_of(server.engine) == []


# --- Input that is blocked while a response is suspended -----------------------------------------


@asynccontextmanager
async def guarded_suspended(
    *script: str, dialect: str = "append", **options: Any
) -> AsyncIterator[tuple[Running, Client, Event]]:
    """Serve a model whose response waits for the output of a call, which is given."""
    async with (
        guarded(*(script or (OSLO, "Sun.")), **options) as server,
        server.connect(dialect) as client,
    ):
        if dialect == "append":
            (call,) = calls_in(await client.create())
        else:
            call = await open_call(client)
            await until(lambda: states(server) == [RunState.SUSPENDED])
        yield server, client, call


@pytest.mark.parametrize("place", ["the output", "a message", "an output after an echo"])
async def test_an_append_that_is_forbidden_is_refused_and_the_response_goes_on(place: str) -> None:
    async with guarded_suspended() as (server, client, call):
        items, param = {
            "the output": ([output(call, FORBIDDEN)], "input[0]"),
            "a message": ([output(call), user(FORBIDDEN)], "input[1]"),
            "an output after an echo": ([call, output(call, FORBIDDEN)], "input[1]"),
        }[place]
        await client.send("response.append", input=items)
        error = await refused(client)
        while_refused = states(server)
        last = await client.append(output(call))

        assert error == Refusal(400, "invalid_prompt", param)
        assert while_refused == [RunState.SUSPENDED]
        assert text_in(last[-1]["response"]) == "Sun."
        assert "forbidden" not in context_text(server.engine)


async def test_a_forbidden_append_closes_the_connection_of_who_cannot_be_told() -> None:
    async with guarded(OSLO) as server, server.connect(betas=[APPEND_BETA]) as client:
        (call,) = calls_in(await client.create())
        await client.send("response.append", input=[output(call, FORBIDDEN)])
        close = await client.closed()
        await server.until_free()

        assert close.code == 1011
        assert close.reason.startswith("invalid_prompt: ")


async def test_a_forbidden_injection_is_given_back_and_the_response_goes_on() -> None:
    async with guarded_suspended(dialect="inject") as (server, client, call):
        target = client.streams[-1][0]["response"]["id"]
        forbidden = [output(call, FORBIDDEN)]
        await client.send("response.inject", response_id=target, input=forbidden)
        given_back = await client.receive()
        while_refused = states(server)
        last = await answer(client, "inject", output(call))

        assert given_back["type"] == "response.inject.failed"
        assert given_back["error"]["code"] == "invalid_prompt"
        assert given_back["input"] == forbidden
        assert while_refused == [RunState.SUSPENDED]
        assert text_in(last[-1]["response"]) == "Sun."
        assert "forbidden" not in context_text(server.engine)


@pytest.mark.parametrize("dialect", ["append", "inject"])
@pytest.mark.parametrize("follows", [True, False])
async def test_a_forbidden_create_does_not_take_the_place_of_a_suspended_response(
    dialect: str, follows: bool
) -> None:
    async with guarded_suspended(dialect=dialect) as (server, client, call):
        parent = client.streams[-1][0]["response"]["id"]
        members = {"previous_response_id": parent} if follows else {}
        items = [output(call, FORBIDDEN)] if follows else FORBIDDEN
        await client.send("response.create", **(BODY | members | {"input": items}))
        error = await refused(client)
        while_refused = states(server)
        last = await answer(client, dialect, output(call))

        assert error == Refusal(400, "invalid_prompt", "input[0]")
        assert while_refused == [RunState.SUSPENDED]
        assert last[-1]["response"]["id"] == parent
        assert text_in(last[-1]["response"]) == "Sun."


@pytest.mark.parametrize("dialect", ["append", "inject"])
async def test_a_forbidden_steer_is_given_back_and_a_suspended_response_goes_on(
    dialect: str,
) -> None:
    async with guarded_suspended(dialect=dialect) as (server, client, call):
        target = client.streams[-1][0]["response"]["id"]
        for text in (FORBIDDEN, "Be brief."):
            await client.send("response.steer", previous_response_id=target, input=text)
        await client.until_taken()
        last = await answer(client, dialect, output(call))

        failed = [event for event in client.streams[-1] if event["type"] == "response.steer.failed"]
        assert text_in(last[-1]["response"]) == "Sun."
        assert [event["error"]["code"] for event in failed] == ["invalid_prompt"]
        assert failed[0]["steer"]["input"] == FORBIDDEN
        assert "forbidden" not in context_text(server.engine)
        assert "Be brief." in context_text(server.engine)


async def test_a_forbidden_steer_is_given_back_and_the_response_is_heard_out() -> None:
    async with (
        guarded("<think>\nHm.\n</think>\n\nRain.", thinks=True) as server,
        server.connect() as client,
    ):
        with held_at(2, server.engine) as model:
            await client.send("response.create", **BODY)
            await model.reached.wait()
            target = (await client.receive())["response"]["id"]
            await client.send("response.steer", previous_response_id=target, input=FORBIDDEN)
            await client.until_taken()
            model.release()
            events = await client.segment()

        (failed,) = [event for event in events if event["type"] == "response.steer.failed"]
        assert failed["error"]["code"] == "invalid_prompt"
        assert failed["steer"]["input"] == FORBIDDEN
        assert text_in(events[-1]["response"]) == "Rain."


# --- Output that is blocked ----------------------------------------------------------------------


def check_filtered(events: Sequence[Event], whole: list[str]) -> None:
    """Check that a stream ends where something forbidden was said, and that of its items only those
    of the types ``whole`` were told as whole."""
    last = events[-1]["response"]
    assert events[-1]["type"] == "response.incomplete"
    assert last["incomplete_details"] == {"reason": "content_filter"}
    items = done_items(events)
    assert [item["status"] for item in items] == ["completed"] * len(whole) + ["incomplete"]
    assert [item["type"] for item in items[:-1]] == whole
    assert last["output"] == items
    assert flags_of(events[-1]) == ["forbidden"]
    assert safety_of(events[-1])["flagged"][0]["blocked"] is True


@pytest.mark.parametrize("name", BLOCKED_TURNS)
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_response_ends_where_it_says_what_is_forbidden(
    dialect: str, name: str, tmp_path: Path
) -> None:
    turn, whole = BLOCKED_TURNS[name]
    async with (
        guarded(turn, "Sun.", thinks=True, data_dir=tmp_path) as server,
        server.connect(dialect) as client,
    ):
        events = await client.create(store=False)
        await server.until_free()
        num_steps = len(steps_of(server.engine))
        await client.until_taken()

        check_filtered(events, whole)
        assert "response.done" not in types(events)
        assert len(steps_of(server.engine)) == num_steps
    told = events[-1]["response"]
    assert rows_in(tmp_path) == [(told["status"], 1, told["usage"]["output_tokens"])]


@pytest.mark.parametrize("name", BLOCKED_TURNS)
async def test_over_http_it_ends_in_the_same_way(name: str, tmp_path: Path) -> None:
    turn, whole = BLOCKED_TURNS[name]
    async with guarded(turn, thinks=True, data_dir=tmp_path) as server:
        response = await post(server)
        events = await post_streamed(server)

        check_filtered(events, whole)
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "content_filter"}
        assert [item["status"] for item in response["output"]][-1] == "incomplete"
    assert rows_in(tmp_path) == [
        ("incomplete", 1, told["usage"]["output_tokens"])
        for told in (response, events[-1]["response"])
    ]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_forbidden_turn_that_is_cut_short_is_filtered_all_the_same(dialect: str) -> None:
    async with guarded(f"{FORBIDDEN} And so on.") as server, server.connect(dialect) as client:
        events = await client.create(max_output_tokens=len(FORBIDDEN))

        check_filtered(events, [])


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_later_turn_is_filtered_as_the_first(dialect: str, tmp_path: Path) -> None:
    async with guarded(OSLO, FORBIDDEN, data_dir=tmp_path) as server:
        async with server.connect(dialect) as client:
            call = await open_call(client, store=False)
            if dialect != "inject":
                await client.segment()
            events = await answer(client, dialect, output(call))

            closings = [
                event for stream in client.streams for event in stream if event["type"] in CLOSING
            ]
            assert events[-1]["response"]["incomplete_details"] == {"reason": "content_filter"}
            assert done_items(events)[-1]["status"] == "incomplete"
            await until(lambda: not server.engine.runs)
        await server.until_free()
    rows = rows_in(tmp_path)
    assert rows[-1][0] == "incomplete"
    assert sum(row[1] for row in rows) == 2
    told = [event["response"]["usage"]["output_tokens"] for event in closings]
    assert sum(row[2] for row in rows) == sum(told)


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_who_follows_a_filtered_response_goes_on_from_what_was_said_before(
    dialect: str, store: bool
) -> None:
    async with guarded(OSLO, FORBIDDEN) as server, server.connect(dialect) as client:
        call = await open_call(client, store=store)
        if dialect != "inject":
            await client.segment()
        filtered = await answer(client, dialect, output(call), store=store)
        await client.follow(filtered[-1]["response"], user("Really?"))

        before, _, _ = context_text(server.engine).partition("Really?")
        assert filtered[-1]["type"] == "response.incomplete"
        assert "sunny" in before
        assert "forbidden" not in before


async def test_a_call_that_was_filtered_cannot_be_answered() -> None:
    async with guarded(FORBIDDEN_CALL) as server, server.connect("append") as client:
        events = await client.create(store=False)
        call = events[-1]["response"]["output"][0]
        await client.send("response.append", input=[output(call)])
        error = await refused(client)

        assert error.status == 400


async def test_in_the_background_output_is_filtered_too() -> None:
    async with guarded(FORBIDDEN) as server:
        events = await post_streamed(server, background=True)
        async with server.http() as http:
            found = (await http.get(f"/v1/responses/{events[-1]['response']['id']}")).json()

        assert found["status"] == "incomplete"
        assert found["incomplete_details"] == {"reason": "content_filter"}


# --- What is told of what passes -----------------------------------------------------------------


async def test_what_has_a_label_is_told_of_all_along_the_response() -> None:
    async with (
        guarded(OSLO, f"Let me look.{OSLO}", ODD) as server,
        server.connect("append") as client,
    ):
        first = await client.create(input=[user("Hello."), user(ODD)])
        second = await client.append(output(calls_in(first)[0]), user("And then?"))
        last = await client.append(output(calls_in(second)[0], ODD))

        assert safety_of(first[-1]) == {
            "classifier": "words",
            "items": 3,  # with the arguments of the call
            "flagged": [{"label": "odd", "score": 0.5, "blocked": False}],
        }
        assert safety_of(second[-1])["items"] == 7
        assert flags_of(second[-1]) == ["odd"]
        assert safety_of(last[-1])["items"] == 9
        assert flags_of(last[-1]) == ["odd"] * 3


@pytest.mark.parametrize("dialect", ["append", "inject"])
async def test_what_comes_in_several_messages_counts_as_in_one(dialect: str) -> None:
    async with guarded(f"{OSLO}\n{OSLO}", "Sun.") as server, server.connect(dialect) as client:
        await client.send("response.create", **BODY)
        calls = await client.calls(2)
        target = client.streams[-1][0]["response"]["id"]
        event = f"response.{dialect}"
        members = {} if dialect == "append" else {"response_id": target}
        for call in calls:
            await client.send(event, input=[output(call, ODD)], **members)
        last = await client.up_to("response.completed")

        assert safety_of(last[-1])["items"] == 6  # the question, two calls, two outputs, the answer
        assert flags_of(last[-1]) == ["odd", "odd"]


async def test_over_http_what_has_a_label_is_told() -> None:
    async with guarded(ODD) as server:
        response = await post(server, input=[user(ODD), user("Well?")])

        assert response["suspend:run"]["safety"]["items"] == 3
        assert [flag["label"] for flag in response["suspend:run"]["safety"]["flagged"]] == [
            "odd", "odd",
        ]  # fmt: skip


async def test_without_a_classifier_nothing_is_told() -> None:
    async with serving(FORBIDDEN) as server:
        response = await post(server, input=FORBIDDEN)

        assert response["status"] == "completed"
        assert "safety" not in response["suspend:run"]


# --- A classifier that fails ---------------------------------------------------------------------

BREAKABLE = f"{__name__}:BreakableClassifier"


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_input_that_nobody_can_judge_is_an_error_of_the_server(dialect: str) -> None:
    async with (
        guarded("Sun.", classifier=BREAKABLE) as server,
        server.connect(dialect) as client,
    ):
        await client.send("response.create", **(BODY | {"input": "broken"}))
        error = await client.error()
        over_http = await post_refused(server, input="broken")
        again = await client.create()

        assert refusal(error["status"], error["error"]) == over_http
        assert over_http == Refusal(500, "server_error")
        assert "broken" not in error["error"]["message"]
        assert text_in(again[-1]["response"]) == "Sun."


async def test_an_append_that_nobody_can_judge_leaves_the_response_suspended() -> None:
    async with guarded_suspended(classifier=BREAKABLE) as (server, client, call):
        await client.send("response.append", input=[output(call, "broken")])
        error = await refused(client)
        while_refused = states(server)
        last = await client.append(output(call))

        assert error == Refusal(500, "server_error")
        assert while_refused == [RunState.SUSPENDED]
        assert text_in(last[-1]["response"]) == "Sun."


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_output_that_nobody_can_judge_fails_its_response_and_no_other(
    dialect: str, tmp_path: Path
) -> None:
    async with (
        guarded("broken", "Sun.", classifier=BREAKABLE, data_dir=tmp_path) as server,
        server.connect(dialect) as client,
        server.connect(dialect) as other,
    ):
        with held_at(2, server.engine) as model:
            await client.send("response.create", **BODY)
            said = {"role": "assistant", "content": "Rain."}
            await other.send("response.create", input=[user("Hi."), said, user("And now?")])
            await model.reached.wait()
            await until(lambda: len(server.engine.runs) == 2)
            model.release()
            failed = await client.segment()
            fine = await other.segment()

        assert failed[-1]["type"] == "response.failed"
        assert failed[-1]["response"]["error"]["code"] == "server_error"
        assert "broken" not in failed[-1]["response"]["error"]["message"]
        assert failed[-1]["response"]["status"] == "failed"
        assert done_items(failed)[-1]["status"] == "incomplete"
        assert text_in(fine[-1]["response"]) == "Sun."
    sampled = [event["response"]["usage"]["output_tokens"] for event in (failed[-1], fine[-1])]
    assert sorted(row[2] for row in rows_in(tmp_path)) == sorted(sampled)
    assert sorted(statuses_in(tmp_path)) == ["completed", "failed"]


# --- A classifier that takes its time ------------------------------------------------------------

HELD = f"{__name__}:HeldClassifier"


async def test_who_waits_for_a_verdict_holds_up_no_other_response() -> None:
    sun = "Sun." * 30
    said = {"role": "assistant", "content": "Hm."}
    async with guarded("Rain.", sun, classifier=HELD) as server:
        with held_classifier() as classifier:
            async with server.connect() as client, server.connect() as other:
                with held_at(1, server.engine) as model:
                    await other.send("response.create", input=[user("Hi."), said, user("And?")])
                    await client.send("response.create", **BODY)
                    await until(lambda: len(server.engine.runs) == 2)
                    model.release()
                    own = await client.up_to("response.output_text.delta")
                    told = [await other.receive()]
                    while types(told).count("response.output_text.delta") < 30:
                        told.append(await other.receive())
                await until(classifier.reached.is_set)
                was_released = classifier.released.is_set()
                classifier.released.set()
                own += await client.segment()
                told += await other.segment()

                assert not was_released
                assert text_in(own[-1]["response"]) == "Rain."
                assert text_in(told[-1]["response"]) == sun


async def test_what_was_said_is_told_while_an_item_waits_for_its_verdict() -> None:
    async with guarded(f"Rain.{OSLO}", classifier=HELD) as server:
        with held_classifier() as classifier:
            async with server.connect("append") as client:
                await client.send("response.create", **BODY)
                before = await client.up_to("response.output_text.delta")
                await until(classifier.reached.is_set)
                await client.until_taken()
                classifier.released.set()
                after = await client.segment()

                assert "response.output_item.done" not in types(before)
                assert before[-1]["delta"] == "Rain."
                assert [item["type"] for item in done_items(after)] == ["message", "function_call"]


async def test_a_client_that_goes_away_while_a_verdict_is_awaited_leaves_nothing() -> None:
    async with guarded("Rain.", classifier=HELD) as server:
        with held_classifier() as classifier:
            async with server.connect() as client:
                await client.send("response.create", **BODY)
                await until(classifier.reached.is_set)
                client.abort()
            classifier.released.set()
            await server.until_free()


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_answer_does_not_wait_for_what_another_client_said(dialect: str) -> None:
    async with guarded(f"Sun.{OSLO}", classifier=HELD) as server:
        with held_classifier() as classifier:
            async with server.connect(dialect) as client, server.connect(dialect) as other:
                with held_at(2, server.engine) as model:
                    await client.send("response.create", **BODY)
                    await model.reached.wait()
                    await other.send("response.create", **(BODY | {"input": "Rain."}))
                    await until(classifier.reached.is_set)
                    model.release()
                    items = [
                        (await client.up_to("response.output_item.done"))[-1]["item"]
                        for _ in range(2)
                    ]
                was_released = classifier.released.is_set()
                classifier.released.set()
                await other.calls(1)

                assert not was_released
                assert [item["type"] for item in items] == ["message", "function_call"]


# --- The classifier that comes along -------------------------------------------------------------


@pytest.mark.slow
async def test_the_embedded_classifier_refuses_abuse_and_filters_a_secret() -> None:
    key = "AKIA" + "Q2W3E4R5T6Y7U8I9"
    async with guarded(f"Your key is {key}", classifier="embedded") as server:
        abuse = await post_refused(server, input="You are a stupid idiot, fuck you!")
        secret = await post(server)

        assert abuse == Refusal(400, "invalid_prompt", "input[0]")
        assert secret["incomplete_details"] == {"reason": "content_filter"}
        (flag,) = secret["suspend:run"]["safety"]["flagged"]
        assert flag["label"].startswith("secret:AWS")
        assert flag["blocked"] is True
