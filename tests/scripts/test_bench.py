"""The command: which sections it runs, and its last line, which is for programs."""

import asyncio
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from typer.testing import CliRunner

from scripts import bench as command
from scripts.benchmarks.bench import Bench
from scripts.benchmarks.figures import figure
from scripts.benchmarks.section import Grid, Section
from tests.server.sockets import listening

app = typer.Typer()
app.command()(command.main)


@pytest.fixture
def section(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns what puts a function in the place of a section's."""

    def replace(name: str, run: Callable[[Bench], Section]) -> None:
        module = SimpleNamespace(run=run)
        monkeypatch.setitem(sys.modules, f"scripts.benchmarks.{name}", module)

    return replace


def a_section(bench: Bench) -> Section:
    grid = Grid("decode, tokens/s", {"ours": {"at 128": figure([bench.repeats(3, 2)] * 2, "x")}})
    return Section("speed", "how fast", [grid], {"our_threads": bench.threads})


def report_of(output: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(output.splitlines()[-1])
    return report


def test_the_last_line_is_one_object_with_all_there_is_to_know(
    section: Callable[..., None],
) -> None:
    section("speed", a_section)

    result = CliRunner().invoke(app, ["speed", "--quick", "--threads", "1"])

    assert result.exit_code == 0
    assert "how fast" in result.output
    report = report_of(result.output)
    assert report.keys() == {"quick", "machine", "versions", "sections", "failed"}
    assert report["quick"] is True
    assert report["failed"] == {}
    speed = report["sections"]["speed"]
    assert speed["settings"] == {"our_threads": 1}
    assert speed["grids"]["decode, tokens/s"]["ours"]["at 128"]["median"] == 2.0
    assert speed["grids"]["decode, tokens/s"]["ours"]["at 128"]["repeats"] == 2
    assert {"seconds", "busy_cores_of_others"} <= speed.keys()


def test_a_section_that_fails_does_not_take_the_others_with_it(
    section: Callable[..., None],
) -> None:
    def fail(bench: Bench) -> Section:
        raise RuntimeError("no model")

    section("resume", fail)
    section("speed", a_section)

    result = CliRunner().invoke(app, ["resume", "speed"])

    assert result.exit_code == 1
    report = report_of(result.stdout)
    assert report["failed"] == {"resume": "RuntimeError: no model"}
    assert list(report["sections"]) == ["speed"]


def test_repeats_can_be_set(section: Callable[..., None]) -> None:
    section("speed", a_section)

    result = CliRunner().invoke(app, ["speed", "--repeats", "9"])

    rows = report_of(result.output)["sections"]["speed"]["grids"]["decode, tokens/s"]
    assert rows["ours"]["at 128"]["median"] == 9.0


def test_an_unknown_section_is_refused() -> None:
    result = CliRunner().invoke(app, ["sped"])

    assert result.exit_code == 2


@pytest.mark.parametrize("name", command.SECTIONS)
def test_every_section_has_its_module(name: str) -> None:
    module = __import__(f"scripts.benchmarks.{name.replace('-', '_')}", fromlist=["run"])

    assert callable(module.run)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["designs", "--url", ""], "expected a URL"),
        (["designs", "--url", "host:1"], "expected a URL"),
        (["designs", "--url", "http://127.0.0.1:99999"], "expected a URL"),
        (["designs", "--url", "http://127.0.0.1:1"], "cannot connect to"),
    ],
)
def test_a_server_that_is_not_there_is_told_before_anything_is_measured(
    options: list[str], says: str, section: Callable[..., None]
) -> None:
    section("designs", a_section)

    result = CliRunner().invoke(app, options)

    assert result.exit_code == 2
    assert says in result.output


async def healthy(request: Request) -> Response:
    return Response()


OURS = Starlette(routes=[Route("/health", healthy)])


@pytest.mark.parametrize("spelled", ["http://{}", "http://{}/", "http://{}/v1", "ws://{}/v1/"])
async def test_a_server_may_be_named_by_its_api_too(
    spelled: str, section: Callable[..., None]
) -> None:
    measured = list[str | None]()

    def run(bench: Bench) -> Section:
        measured.append(bench.url)
        return a_section(bench)

    section("designs", run)
    async with listening(OURS) as port:
        options = ["designs", "--url", spelled.format(f"127.0.0.1:{port}")]
        result = await asyncio.to_thread(CliRunner().invoke, app, options)

    assert result.exit_code == 0
    assert measured == [f"http://127.0.0.1:{port}"]


async def test_another_server_is_told(section: Callable[..., None]) -> None:
    section("designs", a_section)
    async with listening(Starlette()) as port:
        options = ["designs", "--url", f"http://127.0.0.1:{port}"]
        result = await asyncio.to_thread(CliRunner().invoke, app, options)

    assert result.exit_code == 2
    assert "answered 404" in result.output


async def test_a_server_of_another_section_is_told(section: Callable[..., None]) -> None:
    section("speed", a_section)
    async with listening(OURS) as port:
        options = ["speed", "--url", f"http://127.0.0.1:{port}"]
        result = await asyncio.to_thread(CliRunner().invoke, app, options)

    assert result.exit_code == 2
    assert "'designs' only" in result.output
