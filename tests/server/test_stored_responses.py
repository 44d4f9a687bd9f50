import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, TypeAlias

import httpx2
import pytest
from openai import AsyncOpenAI
from openai.types.responses import ResponseInputMessageItem
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from protocol.codec import encode
from protocol.conformance.stream_grammar import check_stream
from protocol.errors import ProtocolError
from server.background import BackgroundRuns, LiveResponse
from server.error_response import error_response
from server.response_store import ResponseStore
from server.stored_responses import StoredResponsesApi
from tests.protocol.streams import USAGE, frames, new_response, new_stream, two_segments
from tests.sampler.runs import let_the_loop_turn
from tests.server.played_runs import (
    DEADLINE_SECONDS,
    PlayedRun,
    message,
    stored,
)
from tests.server.sockets import listening

Event: TypeAlias = dict[str, Any]

URL = "/v1/responses/resp_1"


class Server:
    """The routes behind a real socket, with a store on disk and runs that are played."""

    def __init__(self, path: Path) -> None:
        self.store = ResponseStore(path, 1000.0)
        self.background = BackgroundRuns()
        self.http = httpx2.AsyncClient()
        self.port = 0

    def begin(self, response_id: str = "resp_1", key: str = "") -> PlayedRun:
        """Begin a run in the background."""
        run = PlayedRun(response_id, store=self.store, key=key)
        self.background.start(key, run.response, run.events(), run.cancel)
        return run

    def live(self, response_id: str = "resp_1") -> LiveResponse:
        live = self.background.get("", response_id)
        assert live is not None
        return live

    async def finish(self, run: PlayedRun) -> None:
        """Have ``run`` say something and come to its end."""
        run.start()
        run.say("It ", "rains.")
        run.complete()
        async for _ in self.live(run.response.id).follow():
            pass

    async def get(self, url: str = URL, key: str = "") -> Any:
        """Return what is found at ``url``."""
        answer = await self.http.get(url, headers={"X-Key": key})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/json"
        return answer.json()

    async def replay(self, query: str = "", url: str = URL) -> list[Event]:
        """Return the events of a stream that comes to its end."""
        async with self.stream(query, url) as stream:
            return await stream.rest()

    @asynccontextmanager
    async def stream(self, query: str = "", url: str = URL) -> AsyncIterator["Stream"]:
        """Ask for the events of a response."""
        async with self.http.stream("GET", f"{url}?stream=true{query}") as answer:
            assert answer.status_code == 200, await answer.aread()
            assert answer.headers["content-type"].startswith("text/event-stream")
            yield Stream(answer.aiter_lines())


class Stream:
    """An event stream that is read event by event."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines

    async def next(self) -> Event | None:
        """Return the next event, or None at ``[DONE]``."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            line = await anext(self._lines)
            if line == "data: [DONE]":
                assert [line async for line in self._lines] == [""]
                return None
            data = await anext(self._lines)
            assert await anext(self._lines) == ""
        event: Event = json.loads(data.removeprefix("data: "))
        assert line == f"event: {event['type']}"
        return event

    async def take(self, number: int) -> list[Event]:
        """Return the next events."""
        events = [await self.next() for _ in range(number)]
        return [event for event in events if event is not None]

    async def rest(self) -> list[Event]:
        """Return all events that are left."""
        events = []
        while (event := await self.next()) is not None:
            events.append(event)
        return events


@asynccontextmanager
async def serving(path: Path) -> AsyncIterator[Server]:
    server = Server(path)
    api = StoredResponsesApi(server.store, server.background)

    async def create(request: Request) -> Response:
        run = server.begin()
        return JSONResponse({"id": run.response.id})

    app = Starlette(
        routes=[Route("/v1/responses", create, methods=["POST"]), *api.routes()],
        exception_handlers={ProtocolError: refuse},
    )
    async with listening(with_key(app)) as port:
        server.port = port
        async with httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            verify=False,
            trust_env=False,
            timeout=DEADLINE_SECONDS,
        ) as server.http:
            yield server
        await server.background.close()
    server.store.close()


def with_key(app: ASGIApp) -> ASGIApp:
    """Return ``app`` with the key that a request names; without a name it says so by None."""

    async def named(scope: Scope, receive: Receive, send: Send) -> None:
        name = dict(scope["headers"]).get(b"x-key", b"").decode()
        scope.setdefault("state", {})["key_id"] = name or None
        await app(scope, receive, send)

    return named


async def refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProtocolError)
    return error_response(error)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "responses.db"


@pytest.fixture
async def server(path: Path) -> AsyncIterator[Server]:
    async with serving(path) as server:
        yield server


def refusal(answer: httpx2.Response) -> tuple[int, str | None, str | None]:
    """Return the status, the code and the param of a refusal."""
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    return answer.status_code, error["code"], error["param"]


NOT_FOUND = (404, "response_not_found", None)


def numbers(events: Sequence[Event]) -> list[int]:
    return [event["sequence_number"] for event in events]


# --- Looking up ----------------------------------------------------------------------------------


async def test_a_stored_response_is_given_byte_by_byte(server: Server) -> None:
    two_segments(stream := new_stream())
    await server.store.put(stored(stream.response))

    answer = await server.http.get(URL)

    assert answer.content == encode(stream.response)
    assert answer.headers["content-type"] == "application/json"


async def test_what_to_include_is_accepted(server: Server) -> None:
    await server.store.put(stored(new_response()))

    for query in (
        "include[]=message.output_text.logprobs&include[]=reasoning.encrypted_content",
        "include=reasoning.encrypted_content",
        "stream=false&include_obfuscation=false&starting_after=7",
    ):
        assert (await server.get(f"{URL}?{query}"))["id"] == "resp_1"


async def test_a_background_response_is_polled_to_its_end(server: Server) -> None:
    run = server.begin()
    statuses = []
    async with server.stream() as stream:
        await stream.take(2)
        statuses.append((await server.get())["status"])
        run.start()
        await stream.take(1)
        statuses.append((await server.get())["status"])
        run.complete()
        await stream.rest()
    response = await server.get()

    assert [*statuses, response["status"]] == ["queued", "in_progress", "completed"]
    assert encode(response) == encode(run.response)


async def test_a_request_begins_a_run_that_outlives_it(server: Server) -> None:
    created = (await server.http.post("/v1/responses")).json()

    response = (await server.http.post(f"/v1/responses/{created['id']}/cancel")).json()

    assert response["status"] == "cancelled"


async def test_what_is_forgotten_by_the_runs_is_found_in_the_store(server: Server) -> None:
    run = server.begin()
    await server.finish(run)
    live = await server.get()
    live_events = await server.replay()

    server.background.forget("", "resp_1")

    assert await server.get() == live
    assert await server.replay() == live_events


# --- Events over again ---------------------------------------------------------------------------


async def test_the_events_of_a_stored_response_are_told_over_again(server: Server) -> None:
    events = two_segments(stream := new_stream())
    await server.store.put(stored(stream.response, events))

    told = await server.replay()

    assert told == frames(events)
    check_stream(told)


@pytest.mark.parametrize("starting_after", [-1, 0, 1, 10, 22, 23, 24, 10**9])
async def test_only_events_after_the_one_named_are_told(
    server: Server, starting_after: int
) -> None:
    events = two_segments(stream := new_stream())
    await server.store.put(stored(stream.response, events))

    told = await server.replay(f"&starting_after={starting_after}")

    assert told == frames(events)[starting_after + 1 :]


async def test_a_cancelled_response_is_told_over_again(server: Server) -> None:
    stream = new_stream()
    events = [*stream.start(), *stream.text_delta("It "), *stream.cancel(USAGE)]
    await server.store.put(stored(stream.response, events))

    told = await server.replay()

    assert told == frames(events)
    assert told[-1]["response"]["status"] == "cancelled"


async def test_a_failure_is_told_as_an_error_and_a_failed_response(server: Server) -> None:
    stream = new_stream()
    events = [*stream.start(), *stream.fail("server_error", "the model thread died")]
    await server.store.put(stored(stream.response, events))

    *_, error, failed = told = await server.replay()

    assert numbers(told) == [0, 1, 2, 3]
    assert error["type"] == "error"
    assert error["message"] == error["error"]["message"] == "the model thread died"
    assert failed == frames(events)[-1] | {"sequence_number": 3}
    for starting_after in range(4):
        rest = await server.replay(f"&starting_after={starting_after}")
        assert rest == told[starting_after + 1 :]


async def test_a_live_failure_is_told_like_a_stored_one(server: Server) -> None:
    run = server.begin()
    run.start()
    run.fail("the model thread died")
    live = await server.replay()
    rests = [await server.replay(f"&starting_after={number}") for number in range(5)]

    server.background.forget("", "resp_1")

    assert [event["type"] for event in live[-2:]] == ["error", "response.failed"]
    assert await server.replay() == live
    assert [await server.replay(f"&starting_after={number}") for number in range(5)] == rests
    assert rests == [live[number + 1 :] for number in range(5)]


async def test_a_response_that_is_suspended_elsewhere_is_no_stream(server: Server) -> None:
    stream = new_stream()
    events = [*stream.start(), *stream.suspend(USAGE)]
    await server.store.put(stored(stream.response, events))

    answer = await server.http.get(f"{URL}?stream=true")

    assert refusal(answer) == (400, "invalid_value", "stream")
    assert (await server.get())["status"] == "in_progress"


# --- Events as they happen -----------------------------------------------------------------------


async def test_a_background_response_is_followed_as_it_is_made(server: Server) -> None:
    run = server.begin()
    async with server.stream() as stream:
        events = await stream.take(2)
        run.start()
        events += await stream.take(1)
        run.say("It ")
        events += await stream.take(3)
        run.say("rains.")
        events += await stream.take(1)
        run.complete()
        events += await stream.rest()

    assert events == frames(run.said)
    check_stream(events)


async def test_who_was_cut_off_goes_on_where_it_was(server: Server) -> None:
    run = server.begin()
    run.start()
    async with server.stream() as stream:
        events = await stream.take(3)
    run.say("It ")
    for text in ("rains ", "in ", "Oslo.", ""):
        async with server.stream(f"&starting_after={events[-1]['sequence_number']}") as stream:
            run.say(text)
            events += await stream.take(1)
    run.complete()

    events += await server.replay(f"&starting_after={events[-1]['sequence_number']}")

    assert events == frames(run.said)
    check_stream(events)


async def test_many_follow_one_response_and_each_is_told_all(server: Server) -> None:
    run = server.begin()
    replays = [asyncio.ensure_future(server.replay()) for _ in range(20)]
    await let_the_loop_turn()
    run.start()
    run.say(*"It rains in Oslo, and nobody minds.")
    run.complete()

    told = await asyncio.gather(*replays)

    assert told == [frames(run.said)] * 20


async def test_who_does_not_read_holds_up_nobody(server: Server) -> None:
    run = server.begin()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
    writer.write(f"GET {URL}?stream=true HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    await reader.readline()

    run.start()
    run.say(*["x" * 100_000] * 30)
    run.complete()
    async with asyncio.timeout(DEADLINE_SECONDS):
        told = [event async for event in server.live().follow()]

    assert told == run.said
    writer.transport.abort()


async def test_two_responses_are_made_side_by_side(server: Server) -> None:
    one, two = server.begin("resp_1"), server.begin("resp_2")
    replays = [
        asyncio.ensure_future(server.replay(url=f"/v1/responses/{run.response.id}"))
        for run in (one, two)
    ]
    for step in (PlayedRun.start, lambda run: run.say("It rains."), PlayedRun.complete):
        for run in (one, two):
            step(run)
            await let_the_loop_turn()

    assert await asyncio.gather(*replays) == [frames(one.said), frames(two.said)]


# --- Cancelling ----------------------------------------------------------------------------------


async def test_a_background_response_is_cancelled_with_what_it_has(server: Server) -> None:
    run = server.begin()
    run.start()
    run.say("It ")
    replay = asyncio.ensure_future(server.replay())

    response = (await server.http.post(f"{URL}/cancel")).json()

    assert response["status"] == "cancelled"
    assert response["output"][0]["content"][0]["text"] == "It "
    assert (await replay)[-1]["response"] == response
    assert await server.get() == response
    server.background.forget("", "resp_1")
    assert await server.get() == response


async def test_cancels_that_race_all_get_the_same_response(server: Server) -> None:
    run = server.begin()
    run.start()
    run.say("It ")

    answers = await asyncio.gather(*(server.http.post(f"{URL}/cancel") for _ in range(10)))

    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["status"] for answer in answers} == {"cancelled"}
    assert len({answer.content for answer in answers}) == 1
    assert run.num_cancels == 1


async def test_a_cancel_that_races_with_the_end_gets_what_came_of_it(server: Server) -> None:
    for number in range(10):
        run = server.begin(f"resp_{number}")
        run.start()
        cancelling = asyncio.ensure_future(server.http.post(f"/v1/responses/resp_{number}/cancel"))
        await let_the_loop_turn()
        run.complete()

        response = (await cancelling).json()

        assert response["status"] in ("cancelled", "completed")
        assert await server.get(f"/v1/responses/resp_{number}") == response


async def test_a_finished_background_response_stays_what_it_is(server: Server) -> None:
    run = server.begin()
    await server.finish(run)

    live = await server.http.post(f"{URL}/cancel")
    server.background.forget("", "resp_1")
    later = await server.http.post(f"{URL}/cancel")

    assert live.status_code == later.status_code == 200
    assert live.json() == later.json()
    assert live.json()["status"] == "completed"


async def test_only_background_responses_can_be_cancelled(server: Server) -> None:
    await server.store.put(stored(new_response()))

    answer = await server.http.post(f"{URL}/cancel")

    assert refusal(answer) == (400, "response_not_background", None)


# --- Deleting ------------------------------------------------------------------------------------


async def test_a_deleted_response_is_gone(server: Server) -> None:
    await server.store.put(stored(new_response(), item_ids=("msg_1",)))

    answer = await server.http.delete(URL)

    assert answer.status_code == 200
    assert answer.json() == {"id": "resp_1", "object": "response", "deleted": True}
    assert refusal(await server.http.get(URL)) == NOT_FOUND
    assert refusal(await server.http.get(f"{URL}/input_items")) == NOT_FOUND
    assert refusal(await server.http.delete(URL)) == NOT_FOUND
    assert await server.store.get_by_item("", "msg_1") is None


async def test_deleting_a_background_response_ends_its_run(server: Server) -> None:
    run = server.begin()
    run.start()
    replay = asyncio.ensure_future(server.replay())
    await let_the_loop_turn()

    answer = await server.http.delete(URL)

    assert answer.json()["deleted"]
    assert run.is_over
    assert refusal(await server.http.get(URL)) == NOT_FOUND
    assert await server.store.get("", "resp_1") is None
    check_stream(await replay)


async def test_of_many_deletes_one_succeeds(server: Server) -> None:
    await server.store.put(stored(new_response()))

    answers = await asyncio.gather(*(server.http.delete(URL) for _ in range(10)))

    assert sorted(answer.status_code for answer in answers) == [200] + [404] * 9


# --- Input items ---------------------------------------------------------------------------------


IDS = [f"msg_{number}" for number in range(45)]


@pytest.fixture
async def with_input(server: Server) -> Server:
    items = [message(item_id, f"Text {item_id}") for item_id in IDS]
    await server.store.put(stored(new_response(), input_items=items))
    return server


async def test_input_items_are_listed_as_they_were_stored(server: Server) -> None:
    items = [
        message("msg_a", "Tromsø?"),
        {"id": "fc_b", "type": "function_call", "call_id": "call_1", "name": "f"},
    ]
    await server.store.put(stored(new_response(), input_items=items))

    page = await server.get(f"{URL}/input_items?order=asc")

    assert page == {
        "object": "list",
        "data": items,
        "first_id": "msg_a",
        "last_id": "fc_b",
        "has_more": False,
    }


async def test_no_input_items_are_an_empty_page(server: Server) -> None:
    await server.store.put(stored(new_response(), input_items=[]))

    page = await server.get(f"{URL}/input_items")

    assert page == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }


@pytest.mark.parametrize(
    ("query", "ids", "has_more"),
    [
        ("", IDS[:24:-1], True),
        ("order=desc", IDS[:24:-1], True),
        ("order=asc", IDS[:20], True),
        ("limit=100", IDS[::-1], False),
        ("order=asc&limit=45", IDS, False),
        ("order=asc&limit=44", IDS[:44], True),
        ("order=asc&limit=1", IDS[:1], True),
        ("order=asc&after=msg_19", IDS[20:40], True),
        ("order=asc&after=msg_39", IDS[40:], False),
        ("order=asc&after=msg_44", [], False),
        ("after=msg_0", [], False),
        ("after=msg_5&limit=3", ["msg_4", "msg_3", "msg_2"], True),
        ("after=msg_3&limit=3", ["msg_2", "msg_1", "msg_0"], False),
        ("after=&include[]=message.input_image.image_url&limit=1", IDS[-1:], True),
    ],
)
async def test_input_items_come_in_pages(
    with_input: Server, query: str, ids: list[str], has_more: bool
) -> None:
    page = await with_input.get(f"{URL}/input_items?{query}")

    assert [item["id"] for item in page["data"]] == ids
    assert page["first_id"] == (ids[0] if ids else None)
    assert page["last_id"] == (ids[-1] if ids else None)
    assert page["has_more"] == has_more


async def test_the_input_of_a_running_response_is_listed(server: Server) -> None:
    server.begin()
    async with server.stream() as stream:
        await stream.take(2)
    await let_the_loop_turn()

    page = await server.get(f"{URL}/input_items")

    assert page["first_id"] == "msg_in_1"


# --- Refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=101", "limit"),
        ("/input_items?limit=-5", "limit"),
        ("/input_items?limit=ten", "limit"),
        ("/input_items?limit=", "limit"),
        ("/input_items?limit=1e400", "limit"),
        (f"/input_items?limit={'9' * 5000}", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?order=", "order"),
        ("/input_items?after=msg_99", "after"),
        ("/input_items?after=resp_1", "after"),
        ("?stream=maybe", "stream"),
        ("?stream=", "stream"),
        ("?stream=true&starting_after=x", "starting_after"),
        ("?stream=true&starting_after=", "starting_after"),
        ("?starting_after=1.5", "starting_after"),
    ],
)
async def test_what_cannot_be_asked_for_is_refused_by_name(
    with_input: Server, query: str, param: str
) -> None:
    answer = await with_input.http.get(f"{URL}{query}")

    status, code, named = refusal(answer)
    assert (status, named) == (400, param)
    assert code in ("invalid_type", "invalid_value")


STRANGE_IDS = [
    "resp_2",
    "RESP_1",
    "resp_1%00",
    "resp_1%20",
    "%00",
    "%ff%fe",
    "%F0%9F%8C%A7",
    "'%20OR%20'1'='1",
    "%25",
    "*",
    "x" * 5000,
    "..%5c..%5cetc",
    "input_items",
    "null",
    "None",
]


@pytest.mark.parametrize("id_", STRANGE_IDS)
async def test_an_id_that_names_nothing_is_not_found(server: Server, id_: str) -> None:
    await server.store.put(stored(new_response()))
    url = f"/v1/responses/{id_}"

    for answer in (
        await server.http.get(url),
        await server.http.get(f"{url}?stream=true"),
        await server.http.delete(url),
        await server.http.post(f"{url}/cancel"),
        await server.http.get(f"{url}/input_items"),
    ):
        assert refusal(answer) == NOT_FOUND


@pytest.mark.parametrize(
    "target",
    [
        "/v1/responses/..%2f..%2fetc%2fpasswd",
        "/v1/responses/resp_1/../resp_1",
        "/v1/responses/%2e%2e/resp_1",
        "/v1/responses/resp_1%2finput_items%2fx",
        "/v1/responses//resp_1",
        "/v1/responses/resp_1/cancel/cancel",
    ],
)
async def test_a_path_that_leads_elsewhere_leads_nowhere(server: Server, target: str) -> None:
    await server.store.put(stored(new_response()))
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    with closing(writer):
        writer.write(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())

        status_line = await reader.readline()

    assert b" 404 " in status_line


@pytest.mark.parametrize("key", ["", "bob"])
async def test_a_response_of_another_key_is_not_found(server: Server, key: str) -> None:
    await server.store.put(stored(new_response(), key="ada"))
    run = server.begin("resp_2", key="ada")
    headers = {"X-Key": key}

    for url in (URL, "/v1/responses/resp_2"):
        for answer in (
            await server.http.get(url, headers=headers),
            await server.http.get(f"{url}?stream=true", headers=headers),
            await server.http.delete(url, headers=headers),
            await server.http.post(f"{url}/cancel", headers=headers),
            await server.http.get(f"{url}/input_items", headers=headers),
        ):
            assert refusal(answer) == NOT_FOUND
    assert run.num_cancels == 0
    assert (await server.get(URL, "ada"))["id"] == "resp_1"
    assert (await server.get("/v1/responses/resp_2", "ada"))["id"] == "resp_2"


async def test_without_a_store_only_background_responses_are_found() -> None:
    background = BackgroundRuns()
    run = PlayedRun()
    background.start("", run.response, run.events(), run.cancel)
    app = Starlette(
        routes=StoredResponsesApi(None, background).routes(),
        exception_handlers={ProtocolError: refuse},
    )
    async with (
        listening(app) as port,
        httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", verify=False, trust_env=False
        ) as http,
    ):
        assert (await http.get(URL)).json()["id"] == "resp_1"
        assert refusal(await http.get(f"{URL}/input_items")) == NOT_FOUND
        assert refusal(await http.get("/v1/responses/resp_2")) == NOT_FOUND
        assert (await http.post(f"{URL}/cancel")).json()["status"] == "cancelled"
        assert (await http.delete(URL)).json()["deleted"]
        assert refusal(await http.delete(URL)) == NOT_FOUND
    await background.close()


# --- Restarts ------------------------------------------------------------------------------------


async def test_a_finished_response_survives_a_restart(path: Path) -> None:
    async with serving(path) as server:
        await server.finish(server.begin())
        response, events = await server.get(), await server.replay()

    async with serving(path) as server:
        assert await server.get() == response
        assert await server.replay() == events
        assert (await server.get(f"{URL}/input_items"))["first_id"] == "msg_in_1"
        assert (await server.http.post(f"{URL}/cancel")).json() == response


async def test_a_run_that_a_restart_cut_off_is_told_as_failed(path: Path) -> None:
    async with serving(path) as server:
        run = server.begin()
        run.start()
        run.say("It ")
        async with server.stream() as stream:
            events = await stream.take(6)

    async with serving(path) as server:
        response = await server.get()
        told = await server.replay()
        rest = await server.replay(f"&starting_after={events[-1]['sequence_number']}")

    assert response["status"] == "failed"
    assert response["error"]["code"] == "server_error"
    assert [event["type"] for event in told[-2:]] == ["error", "response.failed"]
    assert numbers(told) == list(range(len(told)))
    assert told[-1]["response"] == response
    # It has more events than were stored, and is told the end all the same.
    assert [event["type"] for event in rest] == ["error", "response.failed"]
    assert numbers(rest) == [6, 7]


async def test_followers_are_told_that_the_server_stops(server: Server) -> None:
    server.begin().start()
    async with server.stream() as stream:
        await stream.take(3)

        await server.background.close()

        error, failed = await stream.rest()
    assert error["type"] == "error"
    assert failed["response"]["error"]["message"].startswith("the server stopped")


# --- Somebody else's client ----------------------------------------------------------------------


@pytest.fixture
async def openai_client(server: Server) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="x", max_retries=0
    ) as client:
        yield client


@pytest.mark.slow
async def test_the_sdk_looks_up_follows_cancels_and_deletes(
    server: Server, openai_client: AsyncOpenAI
) -> None:
    responses = openai_client.responses
    run = server.begin()
    run.start()
    run.say("It rains.")

    async with await responses.retrieve("resp_1", stream=True) as stream:
        first = [await anext(stream) for _ in range(3)]
    follow = await responses.retrieve("resp_1", stream=True, starting_after=2)
    cancelled = await responses.cancel("resp_1")
    rest = [event async for event in follow]
    found = await responses.retrieve("resp_1", include=["message.output_text.logprobs"])
    await responses.delete("resp_1")

    assert [event.sequence_number for event in [*first, *rest]] == list(range(len(run.said)))
    assert rest[-1].type == "response.incomplete"
    assert cancelled.status == found.status == "cancelled"
    assert found.output_text == "It rains."
    assert await server.store.get("", "resp_1") is None


async def test_the_sdk_walks_through_all_input_items(
    with_input: Server, openai_client: AsyncOpenAI
) -> None:
    items = [item async for item in openai_client.responses.input_items.list("resp_1", limit=7)]

    assert [item.id for item in items] == IDS[::-1]
    assert all(isinstance(item, ResponseInputMessageItem) for item in items)
