"""How the process starts and ends."""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import CloseCode
from websockets.sync.client import ClientConnection, connect
from websockets.sync.connection import Connection

from protocol.codec import decode_object
from protocol.dialect import APPEND_BETA
from server.access import add_api_key
from tests.end_to_end.process import START_SECONDS, ServerProcess, started

pytestmark = pytest.mark.slow

SHUTDOWN = ["shutdown 1/4", "shutdown 2/4", "shutdown 3/4", "shutdown 4/4"]
SHORT = {"input": "Tell me a story.", "max_output_tokens": 40, "seed": 1}
ENDLESS = {"input": "Tell me a very long story.", "seed": 1}
CALL = {
    "input": "Ping!",
    "tools": [{"type": "function", "name": "ping"}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    """Four servers, which start side by side. The third gives its responses no time to end."""
    folder = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:
        servers = [
            stack.enter_context(started(folder / f"server{i}", "--drain", drain))
            for i, drain in enumerate(("100", "100", "0.5", "100"))
        ]
        for server in servers:
            server.wait_until_it_listens()
        yield servers


# --- The start -----------------------------------------------------------------------------------


def test_it_says_once_where_it_listens(servers: list[ServerProcess]) -> None:
    assert servers[0].stdout == f"listening on http://127.0.0.1:{servers[0].port}\n"


def test_a_port_in_use_and_an_unknown_model_end_it_with_one_line(
    servers: list[ServerProcess], tmp_path: Path
) -> None:
    port = str(servers[0].port)
    with (
        started(tmp_path / "port", "--log-level", "warning", "--port", port) as no_port,
        started(tmp_path / "model", "--model", str(tmp_path / "nowhere")) as no_model,
    ):
        statuses = no_port.wait(START_SECONDS), no_model.wait(START_SECONDS)

    assert statuses == (1, 1)
    assert no_port.stdout == no_model.stdout == ""
    (line,) = no_port.stderr.splitlines()
    assert line.startswith("server: cannot listen on ")
    assert "address already in use" in line
    assert port in line
    (line,) = no_model.stderr.splitlines()
    assert line.startswith("server: ")
    assert str(tmp_path / "nowhere") in line


def test_interrupted_before_it_listens_it_leaves_no_traceback(tmp_path: Path) -> None:
    with started(tmp_path / "server", environment={"PYTHONPROFILEIMPORTTIME": "1"}) as server:
        server.wait_until_it_logs(" torch.")
        server.send(signal.SIGINT)
        status = server.wait()

    assert status == -signal.SIGINT
    assert "Traceback" not in server.stderr
    assert "KeyboardInterrupt" not in server.stderr


def test_with_a_key_it_lets_in_and_logs_no_key_at_any_level(tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    key = add_api_key(key_file, "alice")
    options = ("--api-key-file", str(key_file), "--log-level", "debug")
    with started(tmp_path / "server", *options) as server:
        server.wait_until_it_listens()
        with _connected(server, key) as socket:
            _create(socket, SHORT)
            _read_to(socket, "response.incomplete")
        with pytest.raises(InvalidStatus) as refused, _connected(server, "sk-mallory"):
            pass
        status, _ = _end(server, signal.SIGTERM)

    assert status == 0
    assert refused.value.response.status_code == 401
    assert key not in server.stderr
    assert "sk-mallory" not in server.stderr
    _check_ended_well(server)


# --- The end -------------------------------------------------------------------------------------


def test_a_run_that_is_suspended_is_not_waited_for(servers: list[ServerProcess]) -> None:
    with _connected(servers[0]) as socket:
        _create(socket, CALL)
        _read_to(socket, "response.done")
        status, seconds = _end(servers[0], signal.SIGTERM)
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=5)

    assert status == 0
    assert seconds < 5
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == CloseCode.SERVICE_RESTART
    _check_ended_well(servers[0])


def test_what_is_being_sampled_ends_by_itself_on_sigterm(servers: list[ServerProcess]) -> None:
    with _streamed(servers[1], SHORT) as events, _connected(servers[1]) as socket:
        _create(socket, SHORT)
        _read_to(socket, "response.output_text.delta")
        next(events)
        servers[1].send(signal.SIGTERM)
        last_of_stream = list(events)[-1]
        _read_to(socket, "response.incomplete")
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=5)
        status = servers[1].wait()

    assert last_of_stream["type"] == "response.incomplete"
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == CloseCode.SERVICE_RESTART
    assert status == 0
    _check_ended_well(servers[1])


def test_what_takes_too_long_fails_on_sigint(servers: list[ServerProcess]) -> None:
    with _streamed(servers[2], ENDLESS) as events, _connected(servers[2]) as socket:
        _create(socket, ENDLESS)
        _read_to(socket, "response.output_text.delta")
        next(events)
        servers[2].send(signal.SIGINT)
        last_of_stream = list(events)[-1]
        failed = _read_to(socket, "response.failed")
        status = servers[2].wait()

    assert last_of_stream["type"] == "response.failed"
    assert last_of_stream["response"]["error"]["code"] == "server_error"
    assert failed["response"]["error"]["code"] == "server_error"
    assert status == 0
    _check_ended_well(servers[2])


def test_asked_twice_it_ends_at_once(servers: list[ServerProcess]) -> None:
    with _connected(servers[3]) as socket:
        _create(socket, ENDLESS)
        _read_to(socket, "response.output_text.delta")
        servers[3].send(signal.SIGINT)
        servers[3].wait_until_it_logs(SHUTDOWN[0])
        status, seconds = _end(servers[3], signal.SIGINT)

    assert status == -signal.SIGINT
    assert seconds < 0.5
    assert "Traceback" not in servers[3].stderr


def _connected(server: ServerProcess, key: str = "x") -> ClientConnection:
    url = f"ws://127.0.0.1:{server.port}/v1/responses"
    headers = {"OpenAI-Beta": APPEND_BETA, "Authorization": f"Bearer {key}"}
    return connect(url, additional_headers=headers)


def _create(socket: Connection, body: dict[str, Any]) -> None:
    socket.send(json.dumps({"type": "response.create"} | body))


def _read_to(socket: Connection, event_type: str) -> dict[str, Any]:
    while (event := decode_object(socket.recv(timeout=60)))["type"] != event_type:
        assert event["type"] != "error", event
    return event


@contextmanager
def _streamed(server: ServerProcess, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
    """Ask for a response over HTTP, and give its events up to the terminal one."""
    with (
        httpx2.Client(base_url=server.url, verify=False, trust_env=False, timeout=60) as client,
        client.stream("POST", "/v1/responses", json=body | {"stream": True}) as answer,
    ):
        yield _events(answer.iter_lines())


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield decode_object(line.removeprefix("data: "))
    raise AssertionError("the stream has no end")


def _end(server: ServerProcess, number: signal.Signals) -> tuple[int, float]:
    started_at = time.monotonic()
    server.send(number)
    return server.wait(), time.monotonic() - started_at


def _check_ended_well(server: ServerProcess) -> None:
    """Check that the log has the phases in order and no failure, and that nothing more was said."""
    log = server.stderr
    phases = [line for line in log.splitlines() if "shutdown " in line.lower()]
    found = [phase for line in phases for phase in SHUTDOWN if phase in line]
    assert found == SHUTDOWN
    assert "ERROR" not in log
    assert "Traceback" not in log
    assert len(server.stdout.splitlines()) == 1
