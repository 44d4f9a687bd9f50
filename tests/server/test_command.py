"""What is wrong with the command line is told in one line, before a model is loaded."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer import BadParameter, Typer
from typer.testing import CliRunner

from sampler.embedded_model import EMBEDDED_MODEL_NAME
from sampler.local_engine import LocalEngine
from sampler.model_loading import LoadedModel
from sampler.runner_choice import RunnerOptions
from server import command
from server.command import main
from server.command_options import DialectName, parse_threads
from server.engine_choice import EngineChoiceError, RemoteOptions
from tests.tiny_model import tiny_model

NO_MODEL = "/nowhere"


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Undo what the command does to the loggers of the process."""
    uvicorn = logging.getLogger("uvicorn.error")
    level, filters = uvicorn.level, list(uvicorn.filters)
    yield
    uvicorn.setLevel(level)
    uvicorn.filters[:] = filters


def ending_of(**options: Any) -> str:
    """Return the line with which the command ends. There is no model, which would be told last."""
    with pytest.raises(SystemExit) as ended:
        main(model=NO_MODEL, **options)
    assert isinstance(ended.value.code, str)
    return ended.value.code


def test_a_model_that_is_not_there_is_told() -> None:
    assert ending_of().startswith("server: ")
    assert NO_MODEL in ending_of()


@pytest.mark.parametrize(
    ("name", "chosen", "bound"),
    [
        (EMBEDDED_MODEL_NAME, None, 64),
        (EMBEDDED_MODEL_NAME, 0, 0),
        ("another", None, 0),
        ("another", 5, 5),
    ],
)
def test_only_the_embedded_model_has_the_strings_of_forced_calls_bounded_by_default(
    name: str, chosen: int | None, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = []

    def engine(model: LoadedModel, **options: Any) -> LocalEngine:
        bounds.append(options["max_forced_string"])
        return LocalEngine(model, **options)

    monkeypatch.setattr(command, "_load", lambda *_: replace(tiny_model(), name=name))
    monkeypatch.setattr(command, "LocalEngine", engine)
    monkeypatch.setattr(command, "_serve", lambda *_: None)
    main(max_forced_string=chosen, store=False, port=0)

    assert bounds == [bound]


# What is chosen, and what the engine is told.
REMOTE: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "endpoint": ({"endpoint": "http://a/v1"}, {"endpoint": "http://a/v1"}),
    "dialect": (
        {"model": "openai-completions:m", "endpoint_dialect": DialectName.CEREBRAS},
        {"dialect": "cerebras"},
    ),
    "reasoning": ({"endpoint_reasoning": "thoughts"}, {"reasoning_field": "thoughts"}),
    "omit": ({"endpoint_omit": ["seed", "a"]}, {"omitted": frozenset({"a", "seed"})}),
    "member": ({"endpoint_max_tokens_member": "most"}, {"max_tokens_member": "most"}),
    "tokenizer": ({"model": "vllm:m", "tokenizer": "org/name"}, {"tokenizer": "org/name"}),
    "concurrency": ({"endpoint_concurrency": 3}, {"max_concurrent": 3}),
    "patience": ({"endpoint_patience": 0.0}, {"patience_seconds": 0.0}),
    "silence": ({"endpoint_silence": 9.0}, {"silence_seconds": 9.0}),
    "most": ({"max_output_tokens": 77}, {"max_tokens": 77}),
    "engine args": (
        {"model": "vllm:m", "engine_arg": ["a=1", "b=2"]},
        {"engine_args": ("a=1", "b=2")},
    ),
    "suspended": ({"suspend_ttl": 3.0}, {"suspend_ttl_seconds": 3.0}),
    "strings": ({"model": "vllm:m", "max_forced_string": 5}, {"max_forced_string": 5}),
}


@pytest.mark.parametrize(("chosen", "told"), REMOTE.values(), ids=REMOTE)
def test_an_engine_that_is_elsewhere_is_told_what_was_chosen(
    chosen: dict[str, Any], told: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    model = chosen.get("model", "openai-chat:m")
    where = {} if model.startswith("vllm:") else {"endpoint": "http://b/v1"}

    def remote_engine(model: str, options: RemoteOptions, _: Any) -> Any:
        asked.append((model, options))
        raise EngineChoiceError("enough")

    monkeypatch.setattr(command, "remote_engine", remote_engine)
    with pytest.raises(SystemExit, match="enough"):
        main(**{"model": model, "port": 0, "store": False, **where, **chosen})

    assert asked == [(model, RemoteOptions(**(where | told)))]


@pytest.mark.parametrize("model", [NO_MODEL, "vllm:m", "openai-chat:m"])
def test_what_means_nothing_to_an_engine_is_told_before_it_is_made(model: str) -> None:
    with pytest.raises(SystemExit, match="server: --endpoint-dialect goes with"):
        main(model=model, endpoint_dialect=DialectName.CEREBRAS)


@pytest.mark.parametrize(
    "option",
    [
        "--endpoint-silence=0",
        "--endpoint-dialect=french",
        "--kv-memory=inf",
        "--swap-limit=1e300",
        "--simulate-calls=99999999999",
    ],
)
def test_what_an_option_cannot_be_is_told_with_its_name(option: str) -> None:
    app = Typer()
    app.command()(main)

    result = CliRunner().invoke(app, ["--model=openai-chat:m", option])

    assert result.exit_code == 2
    assert option.partition("=")[0] in result.output


def test_threads_are_a_number_or_left_to_be_chosen() -> None:
    assert parse_threads("auto") is None
    assert parse_threads("3") == 3


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "all", ""])
def test_threads_that_are_neither_are_told(text: str) -> None:
    with pytest.raises(BadParameter, match=f"^expected auto, or a number .* not {text!r}$"):
        parse_threads(text)


@pytest.mark.parametrize(
    ("options", "told"),
    [([], True), (["--cuda-graphs"], True), (["--no-cuda-graphs"], False)],
)
def test_graphs_are_left_out_where_they_are_not_wanted(
    options: list[str], told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load(model: object, device: object, runner_options: RunnerOptions) -> LoadedModel:
        asked.append(runner_options.cuda_graphs)
        return tiny_model()

    monkeypatch.setattr(command, "_load", load)
    monkeypatch.setattr(command, "_serve", lambda *_: None)
    app = Typer()
    app.command()(main)

    result = CliRunner().invoke(app, ["--port=0", "--no-store", *options])

    assert result.exit_code == 0
    assert asked == [told]


@pytest.mark.parametrize("options", [["--threads", "auto"], ["--threads", "2"]])
def test_the_command_takes_either(options: list[str]) -> None:
    app = Typer()
    app.command()(main)

    result = CliRunner().invoke(app, ["--model", NO_MODEL, *options])

    assert NO_MODEL in str(result.exception)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chosen", "spins"),
    [({}, "0"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "30000000000")],
    ids=["nothing", "to spin"],
)
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch has another OpenMP")
def test_threads_of_torch_sleep_where_they_wait_if_nothing_else_was_chosen(
    chosen: dict[str, str], spins: str
) -> None:
    others = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}

    ended = subprocess.run(
        [sys.executable, "-m", "server", "--help"],
        env=others | chosen | {"OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert f"GOMP_SPINCOUNT = '{spins}'" in ended.stderr


def test_choices_that_make_no_sense_are_told(tmp_path: Path) -> None:
    assert "data directory" in ending_of(store=False, ledger=False, data_dir=tmp_path)
    assert "'app.example'" in ending_of(allow_origin=["https://a.example", "app.example"])
    assert "'box:80'" in ending_of(allow_host=["box:80"])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory is promised all the same")
def test_more_memory_than_there_is_is_told(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(simulate=0.0, kv_memory=1e7, port=0, data_dir=tmp_path)

    assert str(ended.value).startswith("server: there are no 10737418")


def test_too_little_memory_for_a_simulation_is_told() -> None:
    with pytest.raises(SystemExit, match=r"^server: --kv-memory: 0 bytes do not hold a block"):
        main(simulate=0.0, kv_memory=0.0, port=0, store=False)


def test_classes_of_models_are_not_loaded_before_there_is_a_model() -> None:
    """They take a second or two, which a server without a model of its own need not wait for."""
    check = "import sys, server.command; sys.exit('transformers.modeling_utils' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_what_is_dangerous_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    ending_of(host="0.0.0.0", allow_origin=["*"])

    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2
    assert "without API keys" in warnings[0]
    assert "without API keys" in warnings[1]


def test_what_is_not_dangerous_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    ending_of()

    assert "WARNING" not in caplog.text
