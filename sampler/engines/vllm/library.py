"""vLLM, as far as it is used here; it is imported when it is asked for.

It lives in an environment of its own (``scripts/vllm-env``), with an older transformers than this
project is made for.
"""

import os
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

TESTED_VERSION = "0.32"
"""Of vLLM. Another release may have moved what is used of it, or changed it."""

_MODULES_OF_STREAMING_INPUT = (
    "vllm.engine.protocol",  # 0.32
    "vllm.inputs",  # 0.16
    "vllm.inputs.data",
    "vllm.v1.engine.async_llm",  # 0.15
)


class VllmError(ValueError):
    """vLLM cannot be had, or not like that; the message says why."""


class Llm(Protocol):
    """What is used of ``AsyncLLM``."""

    vllm_config: Any

    @property
    def errored(self) -> bool:
        """Whether the engine is no more."""

    def generate(
        self, prompt: AsyncGenerator[Any, None], sampling_params: Any, request_id: str
    ) -> AsyncGenerator[Any, None]:
        """Yield what is sampled after the chunks of ``prompt``."""

    def shutdown(self) -> None:
        """End its processes."""


@dataclass(frozen=True)
class Library:
    """What is called of vLLM."""

    make_llm: Callable[[Mapping[str, object]], Llm]
    """Makes an engine of engine arguments, and waits until it is there. On any thread."""
    sampling_params: Callable[..., Any]
    streaming_input: Callable[[Any, Any], Any]
    delta: Any
    """The kind of outputs that hold what is new."""


def load_library() -> Library:
    """Return vLLM.

    Raises:
        VllmError: it is not installed, cannot be imported, or lacks what is used of it.
    """
    if find_spec("vllm") is None:
        raise VllmError("vLLM is not installed here; scripts/vllm-env makes an environment with it")
    _set_environment()
    try:
        make_llm = import_module("vllm.v1.engine.async_llm").AsyncLLM.from_engine_args
        arguments = import_module("vllm.engine.arg_utils").AsyncEngineArgs
        params = import_module("vllm.sampling_params")
        return Library(
            lambda values: make_llm(arguments(**values)),
            params.SamplingParams,
            _streaming_input(),
            params.RequestOutputKind.DELTA,
        )
    except (ImportError, AttributeError, RuntimeError) as error:
        raise VllmError(
            f"vLLM cannot be used: {error} (vLLM {TESTED_VERSION} is what this was tested with)"
        ) from error


def _streaming_input() -> Callable[[Any, Any], Any]:
    """Return the type of a chunk of a session, which vLLM has moved from release to release."""
    for name in _MODULES_OF_STREAMING_INPUT:
        with suppress(ImportError, AttributeError):
            found: Callable[[Any, Any], Any] = import_module(name).StreamingInput
            return found
    raise ImportError(f"no StreamingInput in {', '.join(_MODULES_OF_STREAMING_INPUT)}")


def _set_environment() -> None:
    """Set what vLLM reads when it is imported, in this process and in those that it starts."""
    # The newer model runner has another interface for logits processors.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # A fork would hold the port of the server, which would then seem to listen when it has ended.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    # Standard output is for the address that the server listens on.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
