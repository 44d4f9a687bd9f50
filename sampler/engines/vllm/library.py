"""vLLM, as far as it is used here; it is imported when it is asked for.

It lives in an environment of its own (``scripts/vllm-env``), with an older transformers than this
project is made for.
"""

import os
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol


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
        VllmError: it is not installed, or cannot be imported.
    """
    if find_spec("vllm") is None:
        raise VllmError("vLLM is not installed here; scripts/vllm-env makes an environment with it")
    _set_environment()
    try:
        llm = import_module("vllm.v1.engine.async_llm").AsyncLLM
        arguments = import_module("vllm.engine.arg_utils").AsyncEngineArgs
        params = import_module("vllm.sampling_params")
        inputs = import_module("vllm.engine.protocol")
    except (ImportError, AttributeError, RuntimeError) as error:
        raise VllmError(f"vLLM cannot be imported: {error}") from error
    return Library(
        lambda values: llm.from_engine_args(arguments(**values)),
        params.SamplingParams,
        inputs.StreamingInput,
        params.RequestOutputKind.DELTA,
    )


def _set_environment() -> None:
    """Set what vLLM reads when it is imported, in this process and in those that it starts."""
    # The newer model runner has another interface for logits processors.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # Standard output is for the address that the server listens on.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
