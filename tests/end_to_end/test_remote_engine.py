"""``python -m server --model cerebras:NAME`` as a process, at an endpoint that is a fake."""

import asyncio
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from protocol.codec import decode_object, encode
from tests.end_to_end.process import START_SECONDS, ServerProcess, started
from tests.sampler.engines.fake_endpoint import (
    API_KEY,
    MODEL,
    FakeEndpoint,
    Script,
    calls,
    fake_endpoint,
    says,
    silence,
    thinks,
)
from tests.server.running import BODY, CLOSING, Event, calls_in, output, text_in

pytestmark = pytest.mark.slow

T = TypeVar("T")

CALL = [*thinks("Hm."), *calls(("get_weather", '{"city":"Oslo"}'))]
SUN = says("It is sunny.")


@contextmanager
def faking(*scripts: Script, port: int = 0) -> Iterator[FakeEndpoint]:
    """Serve a fake endpoint from a thread of its own, as processes are waited for in this one."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    stack = AsyncExitStack()

    def run(coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(START_SECONDS)

    try:
        yield run(stack.enter_async_context(fake_endpoint(*scripts, port=port)))
    finally:
        run(stack.aclose())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def serving_at(
    url: str, stderr: Path, *options: str, model: str = MODEL, key: str = API_KEY
) -> Iterator[ServerProcess]:
    """Start a server that samples at ``url``."""
    options = ("--model", f"cerebras:{model}", "--endpoint", url, *options)
    with started(stderr, *options, environment={"CEREBRAS_API_KEY": key}) as server:
        yield server


@contextmanager
def connected(server: ServerProcess) -> Iterator[Connection]:
    url = f"ws://127.0.0.1:{server.port}/v1/responses?dialect=append"
    with connect(url, proxy=None, open_timeout=START_SECONDS) as socket:
        yield socket


def asked(socket: Connection, event_type: str, **members: Any) -> list[Event]:
    """Send an event and return what it is answered with, up to the end of the segment."""
    socket.send(encode({"type": event_type, **members}).decode())
    return up_to(socket, *CLOSING)


def up_to(socket: Connection, *event_types: str) -> list[Event]:
    """Return the events up to the first of these types."""
    events: list[Event] = []
    while not events or events[-1]["type"] not in event_types:
        events.append(decode_object(socket.recv(timeout=START_SECONDS)))
        assert events[-1]["type"] != "error", events[-1]
    return events


def last_line(server: ServerProcess) -> str:
    """Return what the log ends with, which is all that it says."""
    (line,) = server.stderr.splitlines()
    return line


def test_what_is_wrong_with_the_choice_ends_it_with_one_line(tmp_path: Path) -> None:
    quiet = ("--log-level", "warning")
    with faking() as fake, ExitStack() as stack:
        no_key, no_model, wrong_key = servers = [
            stack.enter_context(serving_at(fake.url, tmp_path / name, *quiet, model=model, key=key))
            for name, model, key in (
                ("no key", MODEL, ""),
                ("no model", "llama-9", API_KEY),
                ("wrong key", MODEL, "csk-wrong-0123456789"),
            )
        ]
        statuses = [server.wait(START_SECONDS) for server in servers]

    assert statuses == [1, 1, 1]
    assert [server.stdout for server in servers] == [""] * 3
    assert "CEREBRAS_API_KEY" in last_line(no_key)
    assert "'llama-9'" in last_line(no_model)
    assert MODEL in last_line(no_model)
    assert "refused the API key" in last_line(wrong_key)
    assert "csk-wrong" not in last_line(wrong_key)


def test_a_run_is_suspended_and_resumed_and_the_process_ends_well(tmp_path: Path) -> None:
    scripts = (CALL, SUN, [*says("Well, "), *silence()])
    options = [
        *("--drain", "0.2", "--max-output-tokens", "77"),
        *("--endpoint-omit", "seed", "--endpoint-omit", "prompt_cache_key"),
        *("--endpoint-max-tokens-member", "max_tokens"),
    ]
    with faking(*scripts) as fake, serving_at(fake.url, tmp_path / "server", *options) as server:
        server.wait_until_it_listens()
        with connected(server) as socket:
            (call,) = calls_in(asked(socket, "response.create", **BODY))
            last = asked(socket, "response.append", input=[output(call)])
            socket.send(encode({"type": "response.create", **BODY}).decode())
            up_to(socket, "response.output_text.delta")
            server.send(signal.SIGTERM)
            ended = up_to(socket, *CLOSING)
            status = server.wait()

    assert text_in(last[-1]["response"]) == "It is sunny."
    for request in fake.requests:
        assert request.body["max_tokens"] == 77
        assert not request.body.keys() & {"seed", "prompt_cache_key"}
    assert ended[-1]["response"]["error"]["message"] == "the server is shutting down"
    assert status == 0
    assert "Traceback" not in server.stderr
    assert "shutdown 4/4" in server.stderr
    assert API_KEY not in server.stderr


def test_an_endpoint_that_is_down_at_the_start_is_used_when_it_is_up(tmp_path: Path) -> None:
    with faking() as gone:
        pass
    options = ("--endpoint-patience", "0.2")
    with serving_at(gone.url, tmp_path / "server", *options) as server:
        server.wait_until_it_listens()
        server.wait_until_it_logs("could not be reached")
        with connected(server) as socket:
            failed = asked(socket, "response.create", **BODY)
            with faking(CALL, SUN, port=gone.port):
                (call,) = calls_in(asked(socket, "response.create", **BODY))
                last = asked(socket, "response.append", input=[output(call)])
            server.send(signal.SIGTERM)
            status = server.wait()

    assert failed[-1]["type"] == "response.failed"
    assert text_in(last[-1]["response"]) == "It is sunny."
    assert status == 0
    assert "Traceback" not in server.stderr
