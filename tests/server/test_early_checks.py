"""What the operator names is read before a model is loaded, and what is wrong with it is told."""

import logging
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from server import command
from server.command import main
from server.ledger import Ledger
from server.process import bound_sockets
from tests.server.test_command import logging_as_before as logging_as_before

PRICED = """
[price."smollm2-135m-instruct"]
input = 0.1
"""


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """See that no model is loaded, nor one simulated."""

    def load(*_: object) -> None:
        raise AssertionError("the mistake is told before")

    for name in ("_load", "_load_simulated", "remote_engine"):
        monkeypatch.setattr(command, name, load)


def ending_of(**options: Any) -> str:
    """Return the line with which the command ends, without what all begin with."""
    with pytest.raises(SystemExit) as ended:
        main(**{"port": 0, "store": False} | options)
    assert isinstance(ended.value.code, str)
    return ended.value.code.removeprefix("server: ")


def test_traces_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"

    assert ending_of(replay=[path]) == f"cannot read {path}: No such file or directory"
    path.write_text("{}\n")
    assert ending_of(replay=[path]).startswith(f"{path}:1: ")


@pytest.mark.parametrize("option", ["models", "api_key_file", "replay"])
def test_what_could_be_read_only_once_is_refused(option: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    value = [pipe] if option == "replay" else pipe

    assert ending_of(**{option: value}) == f"cannot read {pipe}: it is no file"


def test_a_classifier_that_is_not_there_is_told_and_where_it_is_looked_for() -> None:
    told = ending_of(safety="nobodys_module:Classifier")

    assert told.startswith("cannot import the classifier nobodys_module:Classifier: ")
    assert "PYTHONPATH" in told


@pytest.mark.parametrize(
    ("options", "served"),
    [
        ({}, "smollm2-135m-instruct"),
        ({"simulate": 0}, "simulated-unlimited"),
        ({"simulate": 40}, "simulated-40"),
        ({"model": "tests"}, "tests"),
        ({"model": "hub/id"}, "hub/id"),
        ({"model": "cerebras:big"}, "big"),
        ({"model": "vllm:hub/id"}, "hub/id"),
    ],
)
def test_names_of_models_are_checked_beside_the_one_that_will_be_served(
    options: dict[str, Any], served: str, tmp_path: Path
) -> None:
    path = tmp_path / "models.toml"
    path.write_text('[model.mild]\nof = "nobody"\n')

    told = ending_of(models=path, **options)

    assert told.startswith(f"{path}: model.mild.of: ")
    assert f"({served!r})" in told


def test_a_price_that_is_none_is_told_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(PRICED)

    assert ending_of(models=path).startswith(f"{path}: price.")


def test_a_port_in_use_is_told() -> None:
    with bound_sockets("127.0.0.1", 0) as (taken,):
        taken.listen()
        port = taken.getsockname()[1]

        assert f"port {port}: address already in use" in ending_of(port=port)


def test_a_data_directory_in_use_is_told_with_what_helps(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path, {})):
        told = ending_of(data_dir=tmp_path)

    assert str(tmp_path) in told
    assert "--data-dir" in told


def test_what_is_said_of_a_download_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    library = logging.getLogger("huggingface_hub")
    monkeypatch.setattr(library, "handlers", [logging.StreamHandler()])

    ending_of(simulate_calls=1)

    assert library.propagate
    assert library.handlers == []


@pytest.mark.parametrize("member", ["prefill", "calls", "tool", "words"])
def test_what_a_simulation_is_to_do_needs_one(member: str) -> None:
    assert f"--simulate-{member} " in ending_of(**{f"simulate_{member}": 1})


def test_a_model_is_not_simulated() -> None:
    assert "--model" in ending_of(model="m", simulate=0)
