"""Our sampling loop over the real vLLM on a processor, with the embedded model."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

from protocol.items import FunctionCall, Message
from protocol.tools import FunctionTool
from sampler.conversation import Conversation
from sampler.embedded_model import EMBEDDED_MODEL_NAME, ensure_embedded_model
from sampler.engine import Resumption
from sampler.engines.vllm.backend import vllm_engine
from sampler.engines.vllm.library import Llm, load_library
from sampler.language import load_language
from sampler.outputs import CallDone, Output
from sampler.params import Constraint, SamplingParams
from sampler.prompt import TokenPrompt
from sampler.recorded_turn import RecordedTurn
from sampler.run import Run
from sampler.snapshot import Sources
from sampler.suspension import Suspension
from sampler.token_engine import TokenEngine
from sampler.tokenizer import Tokenizer
from tests.vllm.real_engine import Counts

WEATHER = FunctionTool(
    "get_weather",
    "Current weather in a city",
    {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome", "Lima"]}},
        "required": ["city"],
    },
)
FORCED = Constraint((WEATHER,), min_calls=1, max_calls=1)
ARGUMENTS: Mapping[str, object] = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "max_num_seqs": 8,
    "max_model_len": 1024,
    "num_gpu_blocks_override": 129,  # one of them holds nothing
}
COUNTED = {"enable_logging_iteration_details": True, "disable_log_stats": False}
TTL_SECONDS = 1.0
APART = Sources(reuses_prefixes=False)
"""Of a run that finds nothing that was computed before."""


@dataclass(frozen=True)
class Real:
    """An engine over the real vLLM."""

    engine: TokenEngine
    tokenizer: Tokenizer
    counts: Counts

    async def open(
        self, prompt: Sequence[int], params: SamplingParams, constraint: Constraint
    ) -> Run:
        """Return a queued run that shares nothing with others."""
        return self.engine.open_run(f"run-{time.monotonic_ns()}", prompt, params, constraint, APART)

    async def prompt(self, text: str) -> TokenPrompt:
        """Return what a conversation of one message begins with."""
        return await self.engine.encode(Conversation([Message("user", text)], tools=[WEATHER]))

    async def play(
        self,
        run: Run,
        answers: Sequence[str] = (),
        constraints: Sequence[Constraint] = (),
        tool_seconds: float = 0.0,
    ) -> list[Output]:
        """Sample ``run`` to its end, each call answered by the next of ``answers``."""
        left, bounds = list(answers), list(constraints)

        async def call_tools(suspension: Suspension) -> Resumption | None:
            if not left:
                return None
            await asyncio.sleep(tool_seconds)
            outputs = dict.fromkeys(suspension.awaited, left.pop(0))
            answered = suspension.answer(outputs)
            turn = RecordedTurn(answered.calls, tuple(run.sampled_in_segment()))
            known = TokenPrompt(Conversation([turn]), run.tokens.ids)
            prompt = await self.engine.encode(Conversation([turn, *answered.items()]), known)
            return Resumption(prompt, time.monotonic(), bounds.pop(0))

        async with aclosing(self.engine.sample(run, call_tools if answers else None)) as outputs:
            return [output async for output in outputs]


@asynccontextmanager
async def real_runs() -> AsyncIterator[Real]:
    """Run an engine over the real vLLM; what it keeps of suspended runs it keeps for a second."""
    location, counts, library = ensure_embedded_model(), Counts(), load_library()
    language = replace(load_language(location), name=EMBEDDED_MODEL_NAME)

    def make_llm(arguments: Mapping[str, object]) -> Llm:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        settings = AsyncEngineArgs(**{**arguments, **COUNTED})
        llm: Llm = AsyncLLM.from_engine_args(settings, stat_loggers=[counts.logger])
        return llm

    engine = vllm_engine(
        location,
        language,
        engine_args=ARGUMENTS,
        suspend_ttl_seconds=TTL_SECONDS,
        library=replace(library, make_llm=make_llm),
    )
    await engine.start()
    try:
        yield Real(engine, language.tokenizer, counts)
    finally:
        await engine.stop()
        engine.close()


def calls_of(outputs: Sequence[Output]) -> list[str]:
    """Return the arguments of all calls."""
    calls = [output.call for output in outputs if isinstance(output, CallDone)]
    return [call.arguments for call in calls if isinstance(call, FunctionCall)]
