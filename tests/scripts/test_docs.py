"""What the README and the documentation tell people to do can be done."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import typer

from sampler.embedded_model import EMBEDDED_MODEL_NAME
from sampler.engines.simulated.model import simulated_model
from sampler.engines.simulated.script import Script
from sampler.local_engine import LocalEngine
from sampler.traces import read_traces, write_traces
from scripts import api_key, bench, compare, conform, demo, usage
from server import command
from server.model_routes import ModelRoutes
from server.prices import parse_prices
from server.safety import Direction, load_classifier
from tests.server.running import serving

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])

COMMANDS = {
    "serve": command,
    "demo": demo,
    "usage": usage,
    "api-key": api_key,
    "bench": bench,
    "compare": compare,
    "conform": conform,
}
PAGES_OF_THEIR_OWN = {"conform": "conformance.md", "compare": "comparison.md"}
OF_OTHER_PROGRAMS = {
    "--router-mode",
    "--router-session-affinity-ttl-secs",
    "--routing-key-override",
}
SWITCHED_OFF = {"--store"}
"""What is so if nothing is said: the docs name what is not."""

_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
_COMMAND = re.compile(r"scripts/(?P<name>[a-z-]+)(?![\w./-])(?P<arguments>[^|;#]*)")


class Block(NamedTuple):
    """A block of code."""

    page: Path
    line: int
    """Where it begins, from 1."""
    language: str
    text: str

    @property
    def id(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def lines(self) -> list[str]:
        """Its lines, those that go on in the next one joined to it."""
        return self.text.replace("\\\n", " ").split("\n")


def blocks(*languages: str) -> list[Block]:
    """Return the blocks in these languages, or in all."""
    found = [block for page in PAGES for block in _blocks(page)]
    return [block for block in found if not languages or block.language in languages]


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, found.start()) + 1
        yield Block(page, line, found[1], found[2])


def options_of(module: ModuleType) -> set[str]:
    app = typer.Typer(add_completion=False)
    app.command()(module.main)
    params = typer.main.get_command(app).params
    words = [word for param in params for word in (*param.opts, *param.secondary_opts)]
    return {word for word in words if word.startswith("--")}


OPTIONS = {name: options_of(module) for name, module in COMMANDS.items()}


def commands_in(text: str) -> Iterator[tuple[str, set[str]]]:
    """Give the scripts that ``text`` has people run, each with the options that it is given."""
    for found in _COMMAND.finditer(text):
        options = set(_OPTION.findall(found["arguments"]))
        yield "serve" if "-m server" in found["arguments"] else found["name"], options


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def text_about(name: str) -> str:
    """Return what the documentation says of a command: for the server, that is all of it."""
    if name == "serve":
        return "\n".join(page.read_text() for page in PAGES)
    text = (ROOT / "docs" / "commands.md").read_text()
    [section] = re.findall(
        rf"^## `scripts/{name}`\n(.*?)(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL
    )
    page = PAGES_OF_THEIR_OWN.get(name)
    return str(section) + ((ROOT / "docs" / page).read_text() if page else "")


# --- Commands ------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", blocks("sh"), ids=lambda block: block.id)
def test_a_line_that_goes_on_ends_with_its_backslash(block: Block) -> None:
    assert not re.search(r"\\[ \t]", block.text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_there_and_have_the_options_that_they_are_given(page: Path) -> None:
    text = page.read_text()
    lines = [line for block in blocks() if block.page == page for line in block.lines]

    for code in [*spans(text), *lines]:
        for name, options in commands_in(code):
            assert (ROOT / "scripts" / name).exists(), code
            assert options <= OPTIONS.get(name, options) | {"--help"}, code


def test_every_option_that_is_named_is_one() -> None:
    named = {option for span in spans(text_about("serve")) for option in _OPTION.findall(span)}

    assert named <= set().union(*OPTIONS.values()) | OF_OTHER_PROGRAMS | {"--help"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_told_of(name: str) -> None:
    assert OPTIONS[name] <= set(_OPTION.findall(text_about(name))) | SWITCHED_OFF


# --- Files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", blocks("toml"), ids=lambda block: block.id)
def test_files_of_models_are_read(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(block.text)

    assert parse_prices(ModelRoutes.from_file(path, [EMBEDDED_MODEL_NAME]).price_table)


@pytest.mark.parametrize("block", blocks("json"), ids=lambda block: block.id)
def test_traces_are_read(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text(block.text)

    assert read_traces(path)


# --- Code ----------------------------------------------------------------------------------------


def code_of(page: str) -> str:
    [block] = [block for block in blocks("python") if block.page.name == page]
    return block.text


@pytest.mark.parametrize("num_calls", [1, 3])
async def test_the_client_in_twenty_lines_answers_all_calls(num_calls: int) -> None:
    script = Script.of_calls(num_calls, "weather", num_words=5)
    engine = LocalEngine(simulated_model(script=script, kv_memory=1 << 24))
    printed = list[dict[str, Any]]()
    code = code_of("README.md")

    async with serving(engine=engine) as server:
        here = code.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
        await asyncio.to_thread(exec, here, {"print": printed.append})

    [event] = printed
    kinds = [item["type"] for item in event["response"]["output"]]
    assert here != code
    assert event["type"] == "response.completed"
    assert kinds == [*["function_call"] * num_calls, "message"]


def test_the_classifier_of_ones_own_is_loaded_and_classifies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_classifier.py").write_text(code_of("safety.md"))
    monkeypatch.syspath_prepend(tmp_path)

    classifier = load_classifier("my_classifier:Classifier")
    assert classifier is not None
    verdicts = classifier.classify(["Bluebird flies.", "Hello."], Direction.OUTPUT)

    assert [verdict.blocks for verdict in verdicts] == [True, False]


def test_a_transcript_becomes_a_trace(tmp_path: Path) -> None:
    names = dict[str, Any]()
    exec(code_of("traces.md"), names)
    request = {"input": "Look.", "tools": [{"type": "function", "name": "look"}]}
    call = {"type": "function_call", "name": "look", "call_id": "call_1", "arguments": "{}"}
    answer = {"type": "message", "role": "assistant", "content": [{"text": "A tree."}]}
    output = {"type": "function_call_output", "call_id": "call_1", "output": "a tree"}

    trace = names["trace_of"]("looking", request, [call, output, answer])
    write_traces(tmp_path / "traces.jsonl", [trace])

    [read] = read_traces(tmp_path / "traces.jsonl")
    assert [turn.text for turn in read.turns] == ["", "A tree."]
    assert read.turns[0].calls[0].output == "a tree"
