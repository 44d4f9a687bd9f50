"""The real vLLM on a processor, with the embedded model."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sampler.embedded_model import ensure_embedded_model
from tests.sampler.engines.vllm_contract import NUM_BLOCKS, SETTINGS, Engine

# vLLM hands its counts over a moment after the outputs that they belong to.
_COUNTS_SECONDS = 0.2


@asynccontextmanager
async def real_engine(**settings: Any) -> AsyncIterator[Engine]:
    """Run it with ``settings``; the others are those of the contract."""
    from vllm.engine.arg_utils import (
        AsyncEngineArgs,
    )
    from vllm.engine.protocol import (
        StreamingInput,
    )
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import (
        RequestOutputKind,
        SamplingParams,
    )
    from vllm.v1.engine.async_llm import (
        AsyncLLM,
    )
    from vllm.v1.engine.exceptions import (
        EngineDeadError,
        EngineGenerateError,
    )

    counts = Counts()
    arguments = AsyncEngineArgs(
        model=str(ensure_embedded_model()),
        dtype="float32",
        enforce_eager=True,
        num_gpu_blocks_override=NUM_BLOCKS + 1,  # one of them holds nothing
        enable_logging_iteration_details=True,
        **{**SETTINGS, **settings},
    )
    llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[counts.logger])
    try:
        yield Engine(
            llm,
            SamplingParams,
            StreamingInput,
            RequestOutputKind.DELTA,
            VLLMValidationError,
            (EngineDeadError, EngineGenerateError),
            counts.prefilled,
            is_patient=True,
        )
    finally:
        llm.shutdown()


class Counts:
    """What vLLM counted of what it forwarded."""

    def __init__(self) -> None:
        self._prefilled: list[int] = []

    async def prefilled(self) -> list[int]:
        """Return the tokens that were forwarded as prompts since it was called last, by step."""
        await asyncio.sleep(_COUNTS_SECONDS)
        prefilled, self._prefilled = self._prefilled, []
        return prefilled

    def logger(self, vllm_config: Any, engine_index: int = 0) -> Any:
        """Return what vLLM gives its counts to."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        def record(_: Any, scheduler_stats: Any, *others: Any, **more: Any) -> None:
            details = scheduler_stats and scheduler_stats.iteration_details
            if details and details.num_ctx_tokens:
                self._prefilled.append(details.num_ctx_tokens)

        def ignore(*_: Any, **__: Any) -> None:
            pass

        methods = {"__init__": ignore, "log_engine_initialized": ignore, "record": record}
        return type("Counts", (StatLoggerBase,), methods)()
