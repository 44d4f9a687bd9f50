"""What is wrong with the command line is told in one line, before a model is loaded."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sampler.embedded_model import EMBEDDED_MODEL_NAME
from sampler.local_engine import LocalEngine
from sampler.model_loading import LoadedModel
from server import command
from server.command import main
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
    main(max_forced_string=chosen, store=False)

    assert bounds == [bound]


def test_choices_that_make_no_sense_are_told(tmp_path: Path) -> None:
    assert "data directory" in ending_of(store=False, ledger=False, data_dir=tmp_path)
    assert "'app.example'" in ending_of(allow_origin=["https://a.example", "app.example"])
    assert "'box:80'" in ending_of(allow_host=["box:80"])


def test_a_bad_key_file_is_told_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# Ours.\nsk-in-clear\n")

    assert ending_of(api_key_file=path).startswith(f"server: {path}, line 2: ")
    assert "No such file" in ending_of(api_key_file=tmp_path / "nowhere")


def test_what_is_dangerous_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    ending_of(host="0.0.0.0", allow_origin=["*"])

    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2
    assert "without API keys" in warnings[0]
    assert "without API keys" in warnings[1]


def test_what_is_not_dangerous_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    ending_of()

    assert "WARNING" not in caplog.text
