"""The command: its options, what it prints, and one run of the whole on the real model."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from scripts import demo
from scripts.demo import as_document, main, server_options
from scripts.demo_agent import Agent, AgentOptions
from scripts.demo_record import Run
from scripts.demo_screen import Screen
from scripts.demo_tools import BUNDLED_FOLDER, toolbox
from server.command_options import DeviceName, DtypeName
from tests.scripts.canned import one_call

ROOT = Path(__file__).resolve().parents[2]


def demo_command(*options: str) -> list[str]:
    return [sys.executable, "-P", str(ROOT / "scripts" / "demo.py"), *options]


def invoke(*options: str) -> Result:
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, options)


# ---- options


def test_options_of_the_model_are_passed_on_to_the_server() -> None:
    assert server_options(None, None, None, None) == []
    assert server_options("m", "cpu", "float32", 2) == [
        *("--model", "m", "--device", "cpu", "--dtype", "float32", "--threads", "2")
    ]


@pytest.mark.parametrize(
    "options",
    [
        ["--folder", "/nowhere/at/all"],
        ["--device", "abacus"],
        ["--dtype", "int1"],
        ["--threads", "0"],
        ["--threads", "all"],
        ["--max-calls", "0"],
        ["--temperature", "3"],
        ["--seed", "-1"],
        ["--url", "http://127.0.0.1:1", "--threads", "1"],
        ["--url", "http://127.0.0.1:1", "--device", "cpu"],
        ["question"],
    ],
)
def test_wrong_options_are_usage_errors(options: Sequence[str]) -> None:
    assert invoke(*options).exit_code == 2


def test_a_url_that_is_empty_is_none() -> None:
    with pytest.raises(SystemExit, match="expected a URL like"):
        main(url="", question=["Hi"])


def test_a_refused_connection_is_one_line_and_not_on_stdout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(url="http://127.0.0.1:1", as_json=True)

    # Python prints such a code on standard error and ends with status 1.
    assert raised.value.code == "demo: cannot connect to http://127.0.0.1:1: connection refused"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("option", ["device", "dtype"])
def test_what_the_server_takes_is_taken(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[Sequence[str]] = []

    async def run_demo(*_: object, **__: object) -> list[Run]:
        return []

    monkeypatch.setattr(demo, "run_demo", run_demo)
    monkeypatch.setattr(demo, "running_server", commands.append)
    names = [*(DeviceName if option == "device" else DtypeName)]
    for name in names:
        assert invoke("--json", f"--{option}", name).exit_code == 0

    assert [command[-2:] for command in commands] == [[f"--{option}", name] for name in names]


def test_the_environments_key_is_for_the_server_that_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys: list[str | None] = []

    async def run_demo(*_: object, api_key: str | None) -> list[Run]:
        keys.append(api_key)
        return []

    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    monkeypatch.setattr(demo, "run_demo", run_demo)
    for options in ([], ["--url", "http://there"], ["--url", "http://there", "--api-key", "sk-2"]):
        assert invoke("--json", *options).exit_code == 0

    assert keys == [None, "sk-mine", "sk-2"]


# ---- the document


async def test_the_document_has_every_run_and_the_total() -> None:
    agent = Agent(one_call(), toolbox(BUNDLED_FOLDER), Screen(Console(quiet=True)), AgentOptions())
    run = await agent.ask("What is 6 * 7?")

    document = json.loads(as_document([run, run]))

    first = document["runs"][0]
    assert (first["question"], first["text"], first["status"]) == (
        *("What is 6 * 7?", "It is 42.", "completed"),
    )
    assert first["segments"][0]["calls"] == [
        {
            "call_id": "call_1",
            "name": "math",
            "arguments": '{"expression": "6 * 7"}',
            "output": "42",
        }
    ]
    assert [segment["tokens_held"] for segment in first["segments"]] == [119, None]
    assert document["total"]["tokens_decoded"] == 2 * first["tokens_decoded"] == 50
    assert len(document["total"]["resume_seconds"]) == 2


# ---- the process


@pytest.mark.slow
def test_ctrl_c_ends_it_quietly() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        process = subprocess.Popen(
            demo_command("--url", url, "--json"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with listener.accept()[0]:  # it is connected, and waits for an answer
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=30)

    assert (process.returncode, output, errors) == (130, "", "")


@pytest.mark.slow
def test_the_demo_suspends_and_resumes_on_the_embedded_model() -> None:
    finished = subprocess.run(
        demo_command("--json", "--threads", "1", "--question", "What is 4173 * 29?"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert finished.returncode == 0, finished.stderr
    (run,) = json.loads(finished.stdout)["runs"]
    assert run["suspensions"] >= 1
    assert run["tokens_reforwarded"] == 0
    assert run["tokens_forwarded"] == run["final_tokens"] - 1
    _check_the_cache_was_kept(run["segments"])
    assert run["segments"][0]["calls"][0]["output"] == "121017"
    assert "121017" in run["text"]


def _check_the_cache_was_kept(segments: Sequence[dict[str, Any]]) -> None:
    for before, after in pairwise(segments):
        assert after["cached_tokens"] == before["tokens_held"]
        assert after["cached_tokens"] == before["input_tokens"] + before["output_tokens"] - 1
