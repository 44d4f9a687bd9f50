"""llama.cpp is measured by a process that is asked line by line. Here a library takes its place
that computes nothing and writes down what it was asked for."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from scripts.benchmarks.llama_cpp import LlamaCpp, LlamaCppError

FAKE_LIBRARY = """
import ctypes, json, os, sys
from types import SimpleNamespace

__version__ = "0.0.0"
LLAMA_FTYPE_MOSTLY_Q8_0, LLAMA_FTYPE_MOSTLY_BF16 = 7, 32
LLAMA_FLASH_ATTN_TYPE_ENABLED = 1
llama_log_callback = llama_log_set = llama_model_get_vocab = lambda *arguments: None
_LOGITS = (ctypes.c_float * 8)(*range(8))
_num_held = {}

def _note(*what):
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(json.dumps(what) + "\\n")

def llama_backend_init():
    print("this is not a reply")  # nor does it get in their way

class QuantizeParameters(ctypes.Structure):
    _fields_ = [("ftype", ctypes.c_int), ("nthread", ctypes.c_int),
                ("allow_requantize", ctypes.c_bool)]

llama_print_system_info = lambda: b"AVX512 = 1"
llama_model_default_params = llama_context_default_params = SimpleNamespace
llama_model_quantize_default_params = QuantizeParameters
llama_vocab_n_tokens = lambda vocab: 8
llama_get_memory = lambda context: context

def llama_model_load_from_file(path, parameters):
    return path if path.startswith(b"/") else None

def llama_init_from_model(model, parameters):
    _note("context", parameters.n_threads, parameters.n_threads_batch, parameters.flash_attn_type)
    return SimpleNamespace(n_batch=parameters.n_batch)

def llama_batch_get_one(tokens, length):
    return list(tokens[:length])

def llama_decode(context, batch):
    _note("decode", len(batch), batch[0])
    return 0 if len(batch) <= context.n_batch else 1

def llama_get_logits_ith(context, index):
    return ctypes.cast(_LOGITS, ctypes.POINTER(ctypes.c_float))

def llama_memory_seq_rm(memory, sequence, start, stop):
    _note("remove", start)

def llama_model_quantize(source, target, parameters):
    with open(target, "w") as file:
        file.write("weights")
    return 0
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LlamaCpp]:
    (tmp_path / "llama_cpp.py").write_text(FAKE_LIBRARY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.setenv("SUSPENDED_SAMPLING_CACHE", str(tmp_path / "cache"))
    with closing(LlamaCpp(Path(sys.executable), num_threads=2)) as process:
        yield process


def notes() -> list[list[object]]:
    """Return what the library was asked for since the last time."""
    path = Path(os.environ["NOTES"])
    lines = path.read_text().splitlines() if path.exists() else []
    path.write_text("")
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_the_process_says_what_it_runs(library: LlamaCpp) -> None:
    assert (library.version, library.system) == ("0.0.0", "AVX512 = 1")


@pytest.mark.slow
def test_a_contender_leaves_its_context_as_it_was(library: LlamaCpp) -> None:
    model = library.contender("Q4_1")
    assert notes() == [["context", 2, 2, 1]] * 2

    model.hold(10)
    assert model.decode(3) > 0
    assert model.append(4) > 0
    model.hold(10)

    assert notes() == [
        ["decode", 10, 31 % 8],
        ["decode", 1, 3],
        *[["decode", 1, 7]] * 2,  # the greedy choice
        ["remove", 10],
        ["decode", 4, (7919 * 10 + 31) % 8],
        ["remove", 10],
    ]


@pytest.mark.slow
def test_a_prefill_begins_with_nothing_and_in_batches(library: LlamaCpp) -> None:
    model = library.contender("Q4_1")
    notes()

    model.prefill(3000)

    decoded = [note[1] for note in notes() if note[0] == "decode"]
    assert decoded == [2048, 952]


@pytest.mark.slow
def test_other_formats_are_made_once(library: LlamaCpp, tmp_path: Path) -> None:
    library.contender("Q8_0")

    [made] = (tmp_path / "cache" / "bench").iterdir()
    assert made.name == "SmolLM2-135M-Instruct.Q8_0.gguf"


@pytest.mark.slow
def test_what_fails_there_is_raised_here(library: LlamaCpp) -> None:
    with pytest.raises(LlamaCppError, match="cannot load nowhere"):
        library.ask("load", name="x", path="nowhere", num_threads=1, room=64)

    assert library.ask("hello")["version"] == "0.0.0"


@pytest.mark.slow
def test_a_process_that_ends_is_an_error() -> None:
    with pytest.raises(LlamaCppError, match="has ended"):
        LlamaCpp(Path(sys.executable), 1, [sys.executable, "-c", ""])
