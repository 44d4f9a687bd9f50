"""vLLM's ``AsyncLLM``, as a fake: what one calls, in front of ``fake_engine_core``.

    async with fake_async_llm(num_blocks=8) as llm:
        llm.core.turns += [[5, 6, STOP]]  # what is said next; after that, and else, hashes decide
        async for output in llm.generate(chunks(), params, "run-1"):
            ...
        assert llm.prefilled("run-1") == [120, 15]  # tokens, by chunk

Known of the real one, and the same here:

- It refuses sessions with stop strings, ``n > 1``, ``FINAL_ONLY``, or an empty chunk; if that is
  seen at a later chunk, the session is over.
- Outputs that nobody has taken yet become one. So does the end of a turn with the beginning of the
  next one, and its finish reason is lost: a chunk should not be sent before its turn.
- ``stop_reason`` may be that of an earlier turn.
- A session that asks for ``logprobs`` and did not at first kills the engine.
- Whoever stops iterating, by ``aclose`` or by cancellation, aborts the request. ``abort`` ends it
  with an output that says so.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from types import SimpleNamespace
from typing import Any

from tests.sampler.engines.fake_engine_core import (
    Chunk,
    CoreOutput,
    FakeEngineCore,
    Model,
    hash_model,
)
from tests.sampler.engines.vllm_types import (
    CompletionOutput,
    EngineDeadError,
    LogitsProcessor,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StreamingInput,
    VLLMValidationError,
)


class FakeAsyncLLM:
    """Requests and sessions in, outputs out, in the running event loop."""

    def __init__(
        self,
        *,
        vocab_size: int = 256,
        model: Model | None = None,
        num_blocks: int = 64,
        block_size: int = 16,
        max_num_seqs: int = 8,
        max_model_len: int = 1024,
        max_num_batched_tokens: int = 2048,
        logits_processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self.core = FakeEngineCore(
            model or hash_model(vocab_size),
            num_blocks,
            block_size,
            max_num_seqs,
            max_model_len,
            max_num_batched_tokens,
            logits_processors,
        )
        # One block holds nothing, as in the real one.
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(
                num_gpu_blocks=num_blocks + 1,
                block_size=block_size,
                kv_cache_size_tokens=num_blocks * block_size,
            ),
            parallel_config=SimpleNamespace(data_parallel_size=1),
            scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
            model_config=SimpleNamespace(
                max_model_len=max_model_len, get_vocab_size=lambda: vocab_size
            ),
        )
        self.may_step = asyncio.Event()
        """Cleared to have the model stand still."""
        self.may_step.set()
        self.errored = False
        self._vocab_size = vocab_size
        self._numbers = count()
        self._collectors: dict[str, _Collector] = {}
        self._ids: defaultdict[str, list[str]] = defaultdict(list)
        self._has_work = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    @property
    def num_unfinished(self) -> int:
        """How many requests and sessions there are."""
        return len(self._collectors)

    def prefilled(self, request_id: str) -> list[int]:
        """Return how many tokens of each chunk were forwarded, the last time that id was used."""
        return self.core.prefilled[self._ids[request_id][-1]]

    async def generate(
        self,
        prompt: dict[str, Any] | AsyncGenerator[StreamingInput, None],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield what is sampled.

        Raises:
            VLLMValidationError: the request, or a chunk of it, is refused.
            EngineDeadError: the engine is no more.
        """
        if self.errored:
            raise EngineDeadError
        if self._loop is None:
            self._loop = asyncio.create_task(self._run())
        collector = _Collector(request_id, f"{request_id}-{next(self._numbers):08x}")
        try:
            if isinstance(prompt, AsyncGenerator):
                _check_session(sampling_params)
                inputs = self._take(prompt, sampling_params, collector)
                collector.inputs = asyncio.create_task(inputs)
            else:
                self._add(collector, prompt, sampling_params, is_resumable=False)
            while True:
                output = await collector.get()
                if output is None:
                    return
                yield output
                if output.finished:
                    return
        finally:
            self._forget(collector)

    async def abort(self, request_id: str) -> None:
        """End the requests of that id, and say so to those who iterate."""
        for collector in list(self._collectors.values()):
            if collector.request_id == request_id:
                self._forget(collector)
                collector.put(_output(collector, [], "abort", is_finished=True))

    async def reset_prefix_cache(self) -> bool:
        """Have no prefix found any more, and tell whether that could be done."""
        return self.core.forget_prefixes()

    def shutdown(self) -> None:
        """Stop the engine."""
        if self._loop is not None:
            self._loop.cancel()

    async def wait_closed(self) -> None:
        """Wait until it has stopped."""
        if self._loop is not None:
            with suppress(asyncio.CancelledError):
                await self._loop

    def die(self) -> None:
        """Kill the engine, as a bug in it would."""
        self.errored = True
        for collector in self._collectors.values():
            collector.fail(EngineDeadError())

    async def _take(
        self,
        inputs: AsyncGenerator[StreamingInput, None],
        params: SamplingParams,
        collector: "_Collector",
    ) -> None:
        """Take the chunks of a session as they come."""
        try:
            async for chunk in inputs:
                if chunk.sampling_params:
                    _check_session(chunk.sampling_params)
                chunk_params = chunk.sampling_params or params
                self._add(collector, chunk.prompt, chunk_params, is_resumable=True)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised to the consumer
            collector.fail(error)
        else:
            self._end(collector)

    def _add(
        self,
        collector: "_Collector",
        prompt: dict[str, Any],
        params: SamplingParams,
        is_resumable: bool,
    ) -> None:
        token_ids = tuple(prompt["prompt_token_ids"])
        if not token_ids:
            raise VLLMValidationError("The decoder prompt cannot be empty")
        if not all(0 <= token_id < self._vocab_size for token_id in token_ids):
            raise VLLMValidationError("Token id is out of vocabulary")
        if len(token_ids) >= self.vllm_config.model_config.max_model_len:
            raise VLLMValidationError("The decoder prompt is longer than the maximum model length")
        if collector.id not in self._collectors:
            self._collectors[collector.id] = collector
            self._ids[collector.request_id].append(collector.id)
            collector.has_logprobs = params.logprobs is not None
        salt = prompt.get("cache_salt", "")
        self.core.add(collector.id, Chunk(token_ids, params, is_resumable, salt))
        collector.is_paused = False
        self._has_work.set()

    def _end(self, collector: "_Collector") -> None:
        """There are no more chunks."""
        is_known = collector.id in self._collectors
        if not is_known or collector.is_paused:
            collector.end()
        if is_known:
            self.core.add(collector.id, None)
            self._has_work.set()

    def _forget(self, collector: "_Collector") -> None:
        if collector.inputs is not None:
            collector.inputs.cancel()
        if self._collectors.pop(collector.id, None):
            self.core.abort(collector.id)
            self._has_work.set()

    async def _run(self) -> None:
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            while True:
                await self.may_step.wait()
                try:
                    outputs = self.core.step()
                    if outputs is None:
                        break
                    for output in outputs:
                        self._deliver(output)
                except EngineDeadError:
                    return self.die()
                await asyncio.sleep(0)

    def _deliver(self, output: CoreOutput) -> None:
        collector = self._collectors[output.request_id]
        if output.logprobs is not None and not collector.has_logprobs:
            raise EngineDeadError  # an assertion of the front end's fails
        collector.is_paused = output.finish_reason is not None and not output.is_finished
        collector.put(
            _output(
                collector,
                [output.token_id],
                output.finish_reason,
                is_finished=output.is_finished,
                core_output=output,
            )
        )


@asynccontextmanager
async def fake_async_llm(**settings: Any) -> AsyncIterator[FakeAsyncLLM]:
    """Run a fake of these ``settings``, those of ``FakeAsyncLLM``."""
    llm = FakeAsyncLLM(**settings)
    try:
        yield llm
    finally:
        llm.shutdown()
        await llm.wait_closed()


class _Collector:
    """What one consumer has not taken yet."""

    def __init__(self, request_id: str, internal_id: str) -> None:
        self.request_id = request_id
        self.id = internal_id
        self.inputs: asyncio.Task[None] | None = None
        self.has_logprobs = False
        self.is_paused = False
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._is_over = False
        self._ready = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        if self._output is None:
            self._output = output
        else:
            _merge(self._output, output)
        self._ready.set()

    def fail(self, error: Exception) -> None:
        self._output, self._error = None, error
        self._ready.set()

    def end(self) -> None:
        self._is_over = True
        self._ready.set()

    async def get(self) -> RequestOutput | None:
        """Return what there is as soon as there is something, or None if there will be nothing."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            if self._error is not None:
                raise self._error
            output, self._output = self._output, None
            if self._is_over:
                self._ready.set()
            if output is not None or self._is_over:
                return output


def _output(
    collector: _Collector,
    token_ids: list[int],
    finish_reason: str | None,
    is_finished: bool,
    core_output: CoreOutput | None = None,
) -> RequestOutput:
    completion = CompletionOutput(0, "", token_ids, finish_reason=finish_reason)
    if core_output is not None:
        completion.stop_reason = core_output.stop_reason
        if core_output.logprobs is not None:
            completion.logprobs = [core_output.logprobs]
    return RequestOutput(
        collector.request_id,
        [completion],
        is_finished,
        core_output.num_cached_tokens if core_output else None,
    )


def _merge(earlier: RequestOutput, later: RequestOutput) -> None:
    one, other = earlier.outputs[0], later.outputs[0]
    one.token_ids += other.token_ids
    if one.logprobs is not None:
        one.logprobs += other.logprobs or []
    one.finish_reason, one.stop_reason = other.finish_reason, other.stop_reason
    earlier.finished |= later.finished


def _check_session(params: SamplingParams) -> None:
    is_refused = params.n > 1 or params.stop
    if is_refused or params.output_kind is RequestOutputKind.FINAL_ONLY:
        raise VLLMValidationError(
            "Input streaming not currently supported for pooling models, n > 1, "
            "request_kind = FINAL_ONLY or with stop strings."
        )
