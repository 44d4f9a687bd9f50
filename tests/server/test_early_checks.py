"""What the operator names is read before a model is loaded, and what is wrong with it is told."""

import logging
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from sampler.suspension_policy import Mode
from server import command
from server.command import main
from server.command_options import DeviceName, DtypeName, KVDtypeName
from server.ledger import JOURNAL_FILE, LEDGER_FILE, Ledger
from server.process import bound_sockets
from server.response_store import ResponseStore
from server.services import STORE_FILE
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


def test_a_bad_key_file_is_told_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# Ours.\nsk-in-clear\n")

    assert ending_of(api_key_file=path).startswith(f"{path}, line 2: ")
    assert "No such file" in ending_of(api_key_file=tmp_path / "nowhere")


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
    options: dict[str, Any], served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CEREBRAS_API_KEY", "csk-fake")
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


# --- What is kept --------------------------------------------------------------------------------


def damaged_tables(path: Path) -> None:
    """Leave the first page of a file, which says what is in it, and spoil the others."""
    data = path.read_bytes()
    path.write_bytes(data[:4096] + b"\xff" * (len(data) - 4096))


def no_database(path: Path) -> None:
    path.write_text("Dear diary, " * 100)


def nothing_but_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_link_to_nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent / "nowhere" / path.name)


@pytest.fixture(params=[STORE_FILE, LEDGER_FILE])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return one of the files that a server has left; the other is beside it."""
    ResponseStore(tmp_path / STORE_FILE, 60.0).close()
    Ledger(tmp_path, {}).close()
    path: Path = tmp_path / request.param
    return path


@pytest.mark.parametrize(
    "spoiled", [damaged_tables, no_database, nothing_but_a_folder, a_link_to_nowhere]
)
def test_what_is_kept_and_cannot_be_used_is_told(
    spoiled: Callable[[Path], None], kept: Path
) -> None:
    spoiled(kept)

    assert str(kept) in ending_of(store=True, data_dir=kept.parent)


def test_a_file_of_a_later_version_is_told(kept: Path) -> None:
    with closing(sqlite3.connect(kept)) as database:
        database.execute("PRAGMA user_version = 99")

    assert "it is of version 99" in ending_of(store=True, data_dir=kept.parent)


def test_a_file_that_another_uses_is_told_with_what_helps(kept: Path) -> None:
    store = ResponseStore(kept.parent / STORE_FILE, 60.0)
    with closing(Ledger(kept.parent, {}) if kept.name == LEDGER_FILE else store):
        told = ending_of(store=kept.name == STORE_FILE, ledger=True, data_dir=kept.parent)
    store.close()

    assert str(kept.parent) in told
    assert "--data-dir" in told


def test_a_file_that_is_not_ours_to_write_is_told(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite opens such a file all the same, to read it."""
    connect = sqlite3.connect

    def read_only(address: str, **options: Any) -> Any:
        if kept.name in address:
            address = address.replace("mode=rw", "mode=ro")
        return connect(address, **options)

    monkeypatch.setattr(sqlite3, "connect", read_only)

    assert "readonly" in ending_of(store=True, data_dir=kept.parent)


def test_a_journal_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / JOURNAL_FILE).mkdir()

    assert str(tmp_path / JOURNAL_FILE) in ending_of(data_dir=tmp_path)


@pytest.mark.parametrize("options", [{"store": True, "ledger": False}, {"ledger": True}])
def test_a_folder_that_cannot_be_made_is_told(options: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    told = ending_of(data_dir=tmp_path / "file" / "below", **options)

    assert f"{tmp_path / 'file'} is no folder" in told


def test_a_link_to_no_folder_is_told(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")

    assert f"{link} is no folder" in ending_of(data_dir=link)
    assert f"{link} is no folder" in ending_of(swap_dir=link / "below")


def test_a_ledger_that_another_is_writing_to_is_waited_for(tmp_path: Path) -> None:
    Ledger(tmp_path, {}).close()
    database = sqlite3.connect(
        tmp_path / LEDGER_FILE, isolation_level=None, check_same_thread=False
    )
    with closing(database), bound_sockets("127.0.0.1", 0) as (taken,):
        taken.listen()
        database.execute("BEGIN IMMEDIATE")
        letting_go = Timer(0.1, database.execute, ["ROLLBACK"])
        letting_go.start()
        told = ending_of(data_dir=tmp_path, port=taken.getsockname()[1])
        letting_go.join()

    assert "address already in use" in told


def test_a_folder_that_is_not_ours_to_write_in_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path)

    assert f"{tmp_path} is not ours to write in" in ending_of(data_dir=tmp_path / "new")


def test_what_can_be_used_is_left_as_it_was(tmp_path: Path) -> None:
    """Neither are files made for a server that will not be, nor is anybody kept out by it."""
    new, old = tmp_path / "new", tmp_path / "old"
    ResponseStore(old / STORE_FILE, 60.0).close()
    Ledger(old, {}).close()
    before = {path.name: path.read_bytes() for path in old.iterdir()}

    with bound_sockets("127.0.0.1", 0) as (taken,):
        taken.listen()
        for folder in (new, old):
            ending_of(data_dir=folder, store=True, port=taken.getsockname()[1])

    assert not new.exists()
    assert {path.name: path.read_bytes() for path in old.iterdir()} == before
    ResponseStore(old / STORE_FILE, 60.0).close()
    Ledger(old, {}).close()


# --- What is chosen ------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("cerebras:", "--model cerebras: needs the name"),
        ("vllm:", "--model vllm: needs the name"),
        ("openai-chat:m", "--model openai-chat:m needs an --endpoint"),
    ],
)
def test_what_is_wrong_with_a_model_elsewhere_is_told_before_what_is_wrong_with_names_of_models(
    model: str, told: str, tmp_path: Path
) -> None:
    assert ending_of(model=model, models=tmp_path / "nowhere").startswith(told)


def test_a_model_without_a_name_is_told() -> None:
    assert ending_of(model="") == "the name of a model is empty"
    assert ending_of(model="/") == "the directory '/' has no name"


def test_a_model_that_cannot_be_looked_for_is_told() -> None:
    assert ending_of(model=f"./{'x' * 300}").startswith("cannot look for './xxx")


OF_MODEL = [
    ("device", DeviceName.CPU),
    ("dtype", DtypeName.INT4),
    ("kv_dtype", KVDtypeName.INT8),
    ("exact", True),
    ("cuda_graphs", False),
]
OF_PROCESS = [
    ("threads", 1),
    ("kv_memory", 0.0),
    ("reserve_kv", True),
    ("suspend_policy", Mode.SWAP),
    ("swap_dir", Path("/")),
    ("swap_limit", 0.0),
    ("prefill_chunk", 1),
    ("max_forced_string", 0),
    ("replay", [Path("traces")]),
]


def spelled(option: str) -> str:
    name = "no_cuda_graphs" if option == "cuda_graphs" else option
    return f"--{name.replace('_', '-')}"


@pytest.mark.parametrize(("option", "value"), OF_MODEL + OF_PROCESS)
def test_what_is_chosen_of_a_model_here_means_nothing_to_one_elsewhere(
    option: str, value: Any
) -> None:
    told = ending_of(model="openai-chat:m", endpoint="http://b/v1", **{option: value})

    assert told.startswith(f"{spelled(option)} goes with a model of this process, not ")


@pytest.mark.parametrize(("option", "value"), OF_MODEL)
def test_how_a_model_is_run_means_nothing_to_what_is_simulated(option: str, value: Any) -> None:
    told = ending_of(simulate=0, **{option: value})

    assert told == f"{spelled(option)} goes with a model, not with --simulate"


@pytest.mark.parametrize("folder", ["file", "file/below", "x" * 300])
def test_a_folder_that_nothing_can_be_swapped_out_to_is_told(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert ending_of(swap_dir=tmp_path / folder).startswith("--swap-dir: cannot swap out to ")
