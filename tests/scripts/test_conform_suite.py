"""Checks over real sockets, several at a time, come to what they come to without."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from protocol.conformance.actions import (
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
from scripts.conformance.address import address_of
from scripts.conformance.overlap import Overlap
from scripts.conformance.suite import Played, Suite
from scripts.conformance.wires import Wires, http_client
from tests.protocol.conformance.model_server import ModelServer
from tests.scripts.conform_server import served
from tests.server.sockets import DEADLINE_SECONDS

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
    async with http_client(address, patience_seconds) as http:
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
            for number in range(1_000_000):
                event = f'{{"type": "acme:beat", "sequence_number": {number}}}'
                await socket.send(event)
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
