"""How the process starts and ends."""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.sync.client import ClientConnection, connect

from protocol.codec import decode_object
from protocol.dialect import APPEND_BETA
from tests.end_to_end.process import START_SECONDS, ServerProcess, started

pytestmark = pytest.mark.slow

SHUTDOWN = ["shutdown 1/3", "shutdown 2/3", "shutdown 3/3"]
ENDLESS = {"type": "response.create", "input": "Tell me a very long story.", "seed": 1}
CALL = {
    "type": "response.create",
    "input": "Ping!",
    "tools": [{"type": "function", "name": "ping"}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    """Two servers, which start side by side."""
    folder = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:
        servers = [stack.enter_context(started(folder / f"stderr{i}")) for i in range(2)]
        for server in servers:
            server.wait_until_it_listens()
        yield servers


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

    assert 0 not in statuses
    assert no_port.stdout == no_model.stdout == ""
    (line,) = no_port.stderr.splitlines()
    assert "address already in use" in line
    assert port in line
    (line,) = no_model.stderr.splitlines()
    assert line.startswith("server: ")
    assert str(tmp_path / "nowhere") in line


def test_sigterm_ends_it_with_a_run_suspended(servers: list[ServerProcess]) -> None:
    with _connected(servers[0]) as socket:
        socket.send(json.dumps(CALL))
        _read_to(socket, "response.done")
        status, seconds = _end(servers[0], signal.SIGTERM)
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=5)

    assert status == 0
    assert seconds < 5
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == CloseCode.SERVICE_RESTART
    _check_ended_well(servers[0])


def test_sigint_ends_it_while_it_samples(servers: list[ServerProcess]) -> None:
    with _connected(servers[1]) as socket:
        socket.send(json.dumps(ENDLESS))
        _read_to(socket, "response.output_text.delta")
        status, seconds = _end(servers[1], signal.SIGINT)
        with pytest.raises(ConnectionClosed):
            _read_to(socket, "response.completed")

    assert status == 0
    assert seconds < 5
    _check_ended_well(servers[1])


def _connected(server: ServerProcess) -> ClientConnection:
    url = f"ws://127.0.0.1:{server.port}/v1/responses"
    return connect(url, additional_headers={"OpenAI-Beta": APPEND_BETA})


def _read_to(socket: ClientConnection, event_type: str) -> dict[str, Any]:
    while (event := decode_object(socket.recv(timeout=60)))["type"] != event_type:
        assert event["type"] != "error", event
    return event


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
