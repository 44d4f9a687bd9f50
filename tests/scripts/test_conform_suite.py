"""Checks over real sockets, several at a time, come to what they come to without."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from websockets.asyncio.server import ServerConnection, serve

from protocol.codec import decode_object, encode
from protocol.conformance.actions import (
    Action,
    Answer,
    Close,
    Closed,
    Connect,
    Frame,
    Manner,
    Opened,
    Outcome,
    Receive,
    Request,
    Send,
    Sent,
    Silence,
    Unreachable,
)
from protocol.conformance.catalogue import CHECKS, chosen
from protocol.conformance.check import Check, Target
from protocol.conformance.play import Result
from protocol.conformance.server_sent_events import sent_events
from scripts.conformance.address import address_of
from scripts.conformance.overlap import Overlap
from scripts.conformance.suite import Played, Suite
from scripts.conformance.wires import Wires, http_to
from tests.protocol.conformance.model_server import ModelServer
from tests.protocol.streams import new_stream
from tests.scripts.conform_server import Talk, served, talking
from tests.server.sockets import DEADLINE_SECONDS, listening

Handler = Callable[[ServerConnection], Any]


class Watching:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.played: list[Played] = []
        self.num_running = 0
        self.most_running = 0

    def began(self, check: Check) -> None:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)

    def ended(self, played: Played) -> None:
        self.num_running -= 1
        self.played.append(played)


async def results(
    url: str, checks: Sequence[Check], api_key: str | None = None, **options: Any
) -> dict[str, Result]:
    watching = Watching()
    options = {"patience_seconds": DEADLINE_SECONDS} | options
    target = Target("made-up", has_api_key=api_key is not None)
    await Suite(address_of(url, api_key), target, watching, **options).play(checks)
    return {played.verdict.check.name: played.verdict.result for played in watching.played}


async def outcomes(
    url: str, *actions: Any, patience_seconds: float = 20.0, api_key: str | None = None
) -> list[Outcome]:
    """Perform ``actions`` one after the other."""
    address = address_of(url, api_key)
    async with http_to(address, patience_seconds) as http:
        wires = Wires(address, http, patience_seconds, Overlap())
        try:
            return [await wires.perform(action) for action in actions]
        finally:
            await wires.close()


# --- A suite -------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_correct_server_passes_every_check() -> None:
    async with served(ModelServer(), "sk-made-up") as url:
        found = await results(url, CHECKS, "sk-made-up")

    assert found == dict.fromkeys((check.name for check in CHECKS), Result.PASSED)


async def test_a_faulty_one_fails_over_sockets_too() -> None:
    checks = chosen(CHECKS, patterns=["text-is-told-in-order"])
    async with served(ModelServer(lambda event: [event | {"obfuscation": "x"}])) as url:
        found = await results(url, checks)

    assert set(found.values()) == {Result.FAILED}


async def test_a_server_that_is_not_there_is_an_error_of_each_check() -> None:
    found = await results("http://127.0.0.1:1", CHECKS[:2])

    assert set(found.values()) == {Result.ERROR}


async def test_what_breaks_is_an_error_and_the_other_checks_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    perform = Wires.perform

    async def breaks_at_get(self: Wires, action: Action) -> Outcome:
        if isinstance(action, Request) and (action.method, action.path) == ("GET", "/responses"):
            raise RuntimeError("oops")
        return await perform(self, action)

    monkeypatch.setattr(Wires, "perform", breaks_at_get)
    checks = chosen(CHECKS, patterns=["http/one-path-*", "http/basic-response"])
    watching = Watching()
    async with served(ModelServer()) as url:
        suite = Suite(address_of(url), Target("made-up"), watching, jobs=1)
        await suite.play(checks)

    broken, other = watching.played
    assert (broken.verdict.result, other.verdict.result) == (Result.ERROR, Result.PASSED)
    assert broken.verdict.message.endswith("RuntimeError: oops")


async def test_what_breaks_among_scenarios_at_once_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def breaks(self: Wires, action: Action) -> Outcome:
        raise RuntimeError("oops")

    monkeypatch.setattr(Wires, "perform", breaks)
    watching = Watching()
    checks = chosen(CHECKS, patterns=["http/requests-at-once-are-apart"])
    await Suite(address_of("http://127.0.0.1:1"), Target(), watching).play(checks)

    (played,) = watching.played
    assert played.verdict.result is Result.ERROR
    assert played.verdict.message.endswith("RuntimeError: oops")


async def test_no_more_checks_run_at_once_than_there_are_jobs() -> None:
    watching = Watching()
    async with served(ModelServer()) as url:
        suite = Suite(address_of(url), Target("made-up"), watching, jobs=2)
        await suite.play(CHECKS[:6])

    assert watching.most_running == 2
    assert len(watching.played) == 6


async def test_what_was_found_before_an_interruption_is_known() -> None:
    async def silent(socket: ServerConnection) -> None:
        await socket.wait_closed()

    watching = Watching()
    async with serve(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        suite = Suite(address_of(f"http://127.0.0.1:{port}"), Target(), watching)
        checks = chosen(CHECKS, patterns=["chained/text-*", "http/wrong-request-*"])
        async with asyncio.timeout(DEADLINE_SECONDS):
            task = asyncio.ensure_future(suite.play(checks))
            while not watching.played:  # noqa: ASYNC110  # it is the other's doing
                await asyncio.sleep(0.002)
        task.cancel()
        await asyncio.wait([task])

    assert task.cancelled()
    assert [played.verdict.check.name for played in watching.played] == [checks[1].name]


async def test_a_check_that_never_ends_is_given_up() -> None:
    async def chatty(socket: ServerConnection) -> None:
        async for _ in socket:
            for event in new_stream().start():
                await socket.send(encode(event), text=True)
            for number in range(2, 1_000_000):
                beat = f'{{"type": "acme:beat", "sequence_number": {number}}}'
                await socket.send(beat)
                await asyncio.sleep(0)

    watching = Watching()
    async with serve(chatty, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        suite = Suite(
            address_of(f"http://127.0.0.1:{port}"), Target(), watching, patience_seconds=0.1
        )
        await suite.play(chosen(CHECKS, patterns=["chained/text-*"]))

    (played,) = watching.played
    assert played.verdict.result is Result.FAILED
    assert played.verdict.message == "not over in 0.5 s"


# --- The wires -----------------------------------------------------------------------------------


async def over(handler: Handler, *actions: Any, **options: Any) -> list[Outcome]:
    """Perform ``actions`` where ``handler`` answers a WebSocket."""
    async with serve(handler, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        return await outcomes(f"http://127.0.0.1:{port}", *actions, **options)


async def test_frames_go_and_come_as_they_are() -> None:
    async def echo(socket: ServerConnection) -> None:
        async for data in socket:
            await socket.send(data)

    found = await over(
        echo,
        Connect("a"),
        Send("a", "é"),
        Receive("a"),
        Send("a", b"\xff"),
        Receive("a"),
        Receive("a", is_patient=False),
        Close("a"),
        Connect("a"),
        Close("a", Manner.DROPPED),
    )

    assert found == [
        Opened(),
        Sent(),
        Frame("é"),
        Sent(),
        Frame(b"\xff"),
        Silence(0.3),
        Sent(),
        Opened(),
        Sent(),
    ]


async def test_a_close_says_why() -> None:
    async def close(socket: ServerConnection) -> None:
        await socket.close(1008, "no")

    found = await over(close, Connect("a"), Receive("a"), Send("a", "{}"), Receive("a"))

    assert found == [Opened(), Closed(1008, "no"), Sent(), Closed(1008, "no")]


async def test_a_connection_that_is_dropped_is_closed_without_a_word() -> None:
    async def drop(socket: ServerConnection) -> None:
        socket.transport.abort()

    assert await over(drop, Connect("a"), Receive("a")) == [Opened(), Closed(1006)]


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (b"\x81\x02\xff\xfe", "we closed: 1007 invalid start byte"),
        (b"\xf1\x02{}", "we closed: 1002 reserved bits"),
    ],
)
async def test_a_frame_that_no_client_can_read_is_told(frame: bytes, says: str) -> None:
    async def garble(socket: ServerConnection) -> None:
        socket.transport.write(frame)
        await socket.wait_closed()

    _, closed = await over(garble, Connect("a"), Receive("a"))

    assert isinstance(closed, Closed)
    assert closed.code == 1006
    assert closed.reason.startswith(says)


async def test_a_server_that_says_nothing_is_waited_for() -> None:
    async def silent(socket: ServerConnection) -> None:
        await socket.wait_closed()

    found = await over(silent, Connect("a"), Receive("a"), patience_seconds=0.05)

    assert found == [Opened(), Silence(0.05)]


async def test_a_refused_upgrade_is_an_answer() -> None:
    class Refuses(ModelServer):
        def connect(self, socket: str, query: str, headers: dict[str, str]) -> Outcome:
            return Answer(404, {}, b'{"error": null}')

    async with served(Refuses()) as url:
        (found,) = await outcomes(url, Connect("a"))

    assert isinstance(found, Answer)
    assert (found.status, found.body) == (404, b'{"error": null}')


async def test_a_request_is_answered() -> None:
    async with served(ModelServer()) as url:
        (found,) = await outcomes(url, Request("GET", "/responses"))

    assert isinstance(found, Answer)
    assert found.status == 426
    assert found.headers["content-type"] == "application/json"


class Encodes(ModelServer):
    """Sends bodies that are not encoded as it says."""

    def answer(self, request: Request) -> Answer:
        found = super().answer(request)
        return Answer(found.status, {**found.headers, "content-encoding": "gzip"}, found.body)


async def test_a_body_that_cannot_be_decoded_is_none() -> None:
    async with served(Encodes()) as url:
        (found,) = await outcomes(url, Request("GET", "/responses"))

    assert isinstance(found, Answer)
    assert (found.status, found.body) == (426, b"")


async def request_of(talk: Talk, patience_seconds: float = DEADLINE_SECONDS) -> Outcome:
    """Make a request of a server that reads it and then goes on with ``talk``."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await talk(reader, writer)

    async with talking(answer) as host:
        (found,) = await outcomes(
            f"http://{host}", Request("GET", "/responses"), patience_seconds=patience_seconds
        )
    return found


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    pass


async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(
        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
    )
    writer.transport.abort()


@pytest.mark.parametrize("talk", [hang_up, reset])
async def test_a_request_that_a_server_ends_without_an_answer_is_closed(talk: Talk) -> None:
    found = await request_of(talk)

    assert isinstance(found, Closed)
    assert found.code == 1006


async def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
    await writer.drain()


async def begin_and_reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await begin(reader, writer)
    await asyncio.sleep(0.05)  # a reset throws away what has not been read
    await reset(reader, writer)


async def begin_and_stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await begin(reader, writer)
    await reader.read()


@pytest.mark.parametrize("talk", [begin, begin_and_reset, begin_and_stall])
async def test_of_a_body_that_breaks_off_is_kept_what_came(talk: Talk) -> None:
    found = await request_of(talk, patience_seconds=0.1)

    assert isinstance(found, Answer)
    assert found.body == b"half"


async def answer_well(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")


async def answer_junk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"Well, hello there!\r\n\r\n")


async def answer_too_much(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhello")


async def answer_with_a_body_that_is_none(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.write(b"HTTP/1.1 204 No Content\r\n\r\nhello")


@asynccontextmanager
async def answering(*connections: Sequence[Talk]) -> AsyncIterator[tuple[str, list[int]]]:
    """Answer one request after the other with what is given for its connection, the last of which
    ends it. Gives the URL, and the number of the connection of each request that came."""
    numbers, came = count(), list[int]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = next(numbers)
        with suppress(OSError, asyncio.IncompleteReadError):
            for talk in connections[number]:
                await reader.readuntil(b"\r\n\r\n")
                came.append(number)
                await talk(reader, writer)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", came


GET = Request("GET", "/responses")


async def test_requests_share_a_connection() -> None:
    async with answering([answer_well] * 3) as (url, came):
        found = await outcomes(url, *[GET] * 3)

    assert [outcome.status for outcome in found if isinstance(outcome, Answer)] == [204] * 3
    assert came == [0, 0, 0]


@pytest.mark.parametrize("end", [hang_up, reset])
async def test_a_request_is_made_again_where_an_idle_connection_is_closed_meanwhile(
    end: Talk,
) -> None:
    async with answering([answer_well, end], [answer_well]) as (url, came):
        found = await outcomes(url, GET, GET)

    assert [outcome.status for outcome in found if isinstance(outcome, Answer)] == [204, 204]
    assert came == [0, 0, 1]


@pytest.mark.parametrize("end", [hang_up, reset])
async def test_it_is_not_made_again_where_the_connection_was_a_new_one(end: Talk) -> None:
    async with answering([end], [answer_well]) as (url, came):
        (found,) = await outcomes(url, GET)

    assert isinstance(found, Closed)
    assert came == [0]


@pytest.mark.parametrize("end", [hang_up, reset])
async def test_it_is_made_again_once_and_over_a_new_connection(end: Talk) -> None:
    async with answering([answer_well, end], [end]) as (url, came):
        _, found = await outcomes(url, GET, GET)

    assert isinstance(found, Closed)
    assert came == [0, 0, 1]


@pytest.mark.parametrize("talk", [answer_too_much, answer_with_a_body_that_is_none])
async def test_what_is_said_beyond_an_answer_is_not_held_against_the_next_request(
    talk: Talk,
) -> None:
    async with answering([talk, answer_well], [answer_well]) as (url, came):
        _, found = await outcomes(url, GET, GET)

    assert isinstance(found, Answer)
    assert found.status == 204
    assert came == [0, 0, 1]


async def test_junk_is_told_where_it_comes_over_a_new_connection_too() -> None:
    async with answering([answer_well, answer_junk], [answer_junk]) as (url, came):
        _, found = await outcomes(url, GET, GET)

    assert isinstance(found, Closed)
    assert found.reason.startswith("illegal status line")
    assert came == [0, 0, 1]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
async def test_a_client_goes_away_after_so_many_events(end: bytes) -> None:
    async def answer(request: HttpRequest) -> Response:
        return StreamingResponse(beats(), media_type="text/event-stream")

    async def beats() -> AsyncIterator[bytes]:
        for number in count():
            yield b": a beat\n\ndata: %d\n\n".replace(b"\n", end) % number
            await asyncio.sleep(0)

    async with listening(Starlette(routes=[Route("/v1/responses", answer)])) as port:
        request = Request("GET", "/responses", max_events=3)
        (found,) = await outcomes(f"http://127.0.0.1:{port}", request)

    assert isinstance(found, Answer)
    assert [event.data for event in sent_events(found.body)][:3] == ["0", "1", "2"]


class Log(Overlap):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def asked(self, connection: Hashable) -> None:
        self.told.append("asked")

    def received(self, connection: Hashable, data: str | bytes) -> None:
        self.told.append(str(data) if data == "[DONE]" else decode_object(data)["type"])

    def answered(self, connection: Hashable, body: bytes) -> None:
        self.told.append("answered")


async def test_responses_over_http_are_noted_as_they_come() -> None:
    log = Log()
    body = encode({"input": "Hi.", "stream": True, "max_output_tokens": 1})
    async with served(ModelServer()) as url, http_to(address_of(url), 20.0) as http:
        wires = Wires(address_of(url), http, 20.0, log)
        await wires.perform(Request("POST", "/responses", body))
        await wires.perform(Request("POST", "/responses/input_tokens", body))
        await wires.perform(Request("GET", "/models"))

    assert log.told[:3] == ["asked", "response.created", "response.in_progress"]
    assert log.told[-3:] == ["answered"] * 3
    assert log.told[-5:-3] == ["response.incomplete", "[DONE]"]


async def test_a_scenario_may_bring_a_wrong_key_or_none() -> None:
    async with served(ModelServer(), "sk-right") as url:
        *asked, opened, wrong, without = await outcomes(
            url,
            Request("GET", "/responses"),
            Request("GET", "/responses", headers={"authorization": "Bearer sk-wrong"}),
            Request("GET", "/responses", headers={"Authorization": ""}),
            Connect("a"),
            Connect("b", "", (("Authorization", "Bearer sk-wrong"),)),
            Connect("c", "", (("Authorization", ""),)),
            api_key="sk-right",
        )

    statuses = [answer.status for answer in (*asked, wrong, without) if isinstance(answer, Answer)]
    assert statuses == [426, 401, 401, 401, 401]
    assert opened == Opened()


async def test_nobody_is_there() -> None:
    connected, asked = await outcomes("http://127.0.0.1:1", Connect("a"), Request("GET", "/models"))

    assert isinstance(connected, Unreachable)
    assert isinstance(asked, Unreachable)
