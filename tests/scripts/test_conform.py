"""The command: its options, what it prints, and its exit status."""

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from xml.etree.ElementTree import parse

import pytest
import typer
from typer.testing import CliRunner, Result
from websockets.asyncio.server import ServerConnection, serve

from protocol.conformance.catalogue import CHECKS
from scripts.conform import INTERRUPTED, main
from tests.protocol.conformance.faults.fault import missing
from tests.protocol.conformance.model_server import ModelServer
from tests.scripts.conform_server import served
from tests.server.sockets import DEADLINE_SECONDS

ROOT = Path(__file__).resolve().parents[2]
NOBODY = "http://127.0.0.1:1"


def invoke(*options: str) -> Result:
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, options)


@asynccontextmanager
async def started(*options: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start the command."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "scripts.conform",
        *options,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def run(*options: str) -> tuple[int | None, str, str]:
    """Return the exit status of the command and what it prints."""
    async with started(*options) as process:
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["127.0.0.1:8000"],
        [NOBODY, "--only", "nothing-like-it"],
        [NOBODY, "--dialect", "klingon"],
        [NOBODY, "--with", "[]"],
        [NOBODY, "--with", "{"],
        [NOBODY, "--with", "null"],
        [NOBODY, "--with", '{"a": ' + "[" * 100_000],
        [NOBODY, "--with", '{"a": ' + "[" * 500 + "]" * 500 + "}"],
        [NOBODY, "--with", '{"a": "\\ud800"}'],
        [NOBODY, "--api-key", "sk-a\n"],
        [NOBODY, "--jobs", "0"],
        [NOBODY, "--max-requests", "0"],
        [NOBODY, "--junit", "no/such/folder/report.xml"],
        [NOBODY, "--junit", str(ROOT)],
    ],
)
def test_wrong_options_are_usage_errors(options: Sequence[str]) -> None:
    result = invoke(*options, "--list")

    assert result.exit_code == 2
    assert len(result.output) < 2000


def test_checks_are_listed_without_a_server() -> None:
    result = invoke(NOBODY, "--list")

    assert result.exit_code == 0
    for check in CHECKS:
        assert check.name in result.stdout
        assert check.rule.source in result.stdout
    assert "about 2,000,001 input tokens" in result.stdout


def test_an_older_report_stays_where_nothing_is_checked(tmp_path: Path) -> None:
    junit = tmp_path / "conform.xml"
    junit.write_text("<older/>")

    result = invoke(NOBODY, "--list", "--junit", str(junit))

    assert result.exit_code == 0
    assert junit.read_text() == "<older/>"


@pytest.mark.parametrize("model", [None, "made-up"])
def test_a_server_that_is_not_there_is_one_line_and_not_on_stdout(
    model: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(NOBODY, model)

    # Python prints such a code on standard error and ends with status 1.
    assert str(raised.value.code).startswith(f"conform: cannot connect to {NOBODY}/v1: ")
    assert capsys.readouterr().out == ""


@pytest.mark.slow
async def test_a_correct_server_has_status_0_and_the_cost_is_told_first(tmp_path: Path) -> None:
    junit = tmp_path / "conform.xml"
    junit.write_text("<older/>")
    async with served(ModelServer()) as url:
        status, out, err = await run(url, "--only", "text-is-told-in-order", "--junit", str(junit))

    assert status == 0, err
    assert f"2 checks of made-up at {url}/v1: at most 2 requests and 256 output tokens" in err
    assert re.search(r" output tokens, about \d\d input tokens$", err, re.MULTILINE)
    assert "2 passed, 2 requests made, 32 input and 48 output tokens reported" in out
    assert parse(junit).getroot().get("tests") == "2"


@pytest.mark.slow
async def test_a_faulty_server_has_status_1_and_a_document(tmp_path: Path) -> None:
    async with served(ModelServer(missing("in_progress"))) as url:
        options = ("--only", "text-is-told-in-order", "--max-requests", "1", "--json")
        status, out, err = await run(url, *options)

    assert status == 1
    assert "1 checks are beyond --max-requests" in err
    failed, left_out = json.loads(out)["checks"]
    assert failed["rule"]["id"] == "lifecycle-begins"
    assert failed["frames"]
    assert left_out["result"] == "not run"


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--json",)])
async def test_status_0_is_only_where_something_passed(options: Sequence[str]) -> None:
    async with served(ModelServer()) as url:
        only = ("--only", "seventeenth-create-waits", "--max-requests", "3")
        status, out, _ = await run(url, *only, *options)

    assert status == 1
    assert "not run" in out
    assert "no check passed" in out


@pytest.mark.slow
async def test_what_is_wrong_with_the_address_is_said_before_and_after() -> None:
    async with serve(refuse, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        status, out, err = await run(url, "--only", "chained/text-is-told-in-order", "--json")

    note = f"{url}/v1/models lists no models: 426 Upgrade Required"
    assert status == 1
    assert err.startswith(note)
    assert json.loads(out)["notes"][0].startswith(note)


async def refuse(socket: ServerConnection) -> None:
    await socket.close(1008, "no")


@pytest.mark.slow
async def test_a_report_that_cannot_be_written_leaves_what_is_printed() -> None:
    async with served(ModelServer()) as url:
        options = ("--only", "http/text-is-told-in-order", "--junit", "/dev/full")
        status, out, err = await run(url, *options)

    assert status == 1
    assert "1 passed" in out
    assert err.endswith("conform: cannot write /dev/full: No space left on device\n")


@pytest.mark.slow
async def test_a_report_is_written_where_nobody_reads_what_is_printed(tmp_path: Path) -> None:
    junit = tmp_path / "conform.xml"
    async with served(ModelServer()) as url:
        options = ("--only", "http/text-is-told-in-order", "--junit", str(junit))
        async with started(url, *options) as process:
            assert process.stdout is not None
            process.stdout._transport.close()  # type: ignore[attr-defined]
            await process.wait()

    assert parse(junit).getroot().get("tests") == "1"


MANY = ("junk-is-answered", "--fuzz", "20000", "--max-requests", "1000000")
"""They would take minutes to draw."""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("only", [("text-is-told-in-order",), MANY])
async def test_an_interruption_prints_what_is_known(
    number: signal.Signals, only: Sequence[str]
) -> None:
    connected = asyncio.Event()

    async def silent(socket: ServerConnection) -> None:
        connected.set()
        await socket.wait_closed()

    async with serve(silent, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        options = ("--dialect", "chained", "--model", "m", "--only", *only)
        async with started(url, *options) as process, asyncio.timeout(DEADLINE_SECONDS):
            await connected.wait()
            process.send_signal(number)
            out, _ = await process.communicate()

    assert process.returncode == INTERRUPTED
    assert f"chained/{only[0]}" in out.decode()
    assert "interrupted" in out.decode()
