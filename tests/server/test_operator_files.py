"""What the operator names is read once, and served as it was read."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

from sampler.traces import Trace, TraceTurn, write_traces
from server import command
from server.access import add_api_key
from server.command import main
from server.operator_files import OperatorFiles
from tests.server.test_command import logging_as_before as logging_as_before
from tests.tiny_model import tiny_model

TRACE = Trace(name="walk", input="Walk!", turns=(TraceTurn(text="Done."),))
MODELS = """
[alias]
ours = "tiny"

[price.tiny]
input = 0.1
output = 0.2
"""


@contextmanager
def piped(path: Path) -> Iterator[Path]:
    """Give a pipe in the place of a file, out of which what was in it can be read once."""
    content = path.read_bytes()
    path.unlink()
    os.mkfifo(path)
    writer = Thread(target=path.write_bytes, args=[content])
    writer.start()
    yield path
    writer.join()


def test_pipes_are_read_once_and_served(tmp_path: Path, monkeypatch: Any) -> None:
    keys, models, traces = (tmp_path / name for name in ("keys", "models", "traces"))
    key = add_api_key(keys, "alice")
    models.write_text(MODELS)
    write_traces(traces, [TRACE])
    served = list[OperatorFiles]()
    monkeypatch.setattr(command, "name_of", lambda _: "tiny")
    monkeypatch.setattr(command, "_load", lambda *_: tiny_model())
    monkeypatch.setattr(command, "_serve", lambda _, __, files, ___: served.append(files))

    with piped(keys), piped(models), piped(traces):
        main(api_key_file=keys, models=models, replay=[traces], store=False, port=0)

    [files] = served
    assert files.keys is not None
    assert files.keys.authenticate(f"Bearer {key}") == "alice"
    assert files.routes.resolve("ours", None).model == "tiny"
    assert files.prices.keys() == {"tiny"}
    assert files.traces == [TRACE]
