"""Speaks for a run: turns what the sampling loop gives into the events of its response.

In the append dialect a run is one response, from ``response.created`` to ``response.completed``,
with a ``response.done`` at each suspension. Otherwise each segment is a response of its own.
"""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, assert_never

from protocol.dialect import Dialect
from protocol.response import ResponseResource, Usage, build_response
from protocol.response_stream import ResponseStream, StreamState
from protocol.server_events import ServerEvent
from sampler.engine import Engine, EngineError, ToolCaller
from sampler.outputs import (
    ArgumentsDelta,
    CallDone,
    CallStarted,
    Output,
    SegmentEnded,
    SegmentStarted,
    StopReason,
    TextDelta,
)
from sampler.run import Run
from server.post_inference import PostInference
from server.pre_inference import PreparedRun, new_id
from server.telemetry import Telemetry


class Responder:
    """Gives the events of one run."""

    def __init__(
        self,
        prepared: PreparedRun,
        dialect: Dialect,
        engine: Engine,
        post_inference: PostInference,
        telemetry: Telemetry,
    ) -> None:
        self._prepared = prepared
        self._run = prepared.run
        self._dialect = dialect
        self._engine = engine
        self._post_inference = post_inference
        self._telemetry = telemetry
        self._post_inference_seconds: float | None = None
        self._stream = self._new_stream(self._run.id)

    @property
    def response(self) -> ResponseResource:
        """The response as its latest lifecycle event shows it."""
        return self._stream.response

    async def events(
        self, call_tools: ToolCaller | None = None
    ) -> AsyncGenerator[ServerEvent, None]:
        """Sample the run and give the events of its response, the terminal one last.

        Close the generator to cancel the run. A run whose client abandons it while it is suspended
        gives no terminal event: its last segment was closed, and nobody listens.
        """
        try:
            async with aclosing(self._engine.sample(self._run, call_tools)) as outputs:
                async for output in outputs:
                    for event in self._speak(output):
                        yield event
        except EngineError as error:
            self._finish()
            for event in self._stream.fail(
                "server_error", str(error), self._usage(), self._report()
            ):
                yield event
        finally:
            self._finish()

    def _speak(self, output: Output) -> list[ServerEvent]:
        match output:
            case SegmentStarted():
                return self._start()
            case TextDelta(text):
                return self._stream.text_delta(text)
            case CallStarted(call_id, name):
                return self._stream.call_started(call_id, name)
            case ArgumentsDelta(text):
                return self._stream.arguments_delta(text)
            case CallDone():
                return self._stream.call_done()
            case SegmentEnded():
                return self._end(output)
            case _:
                assert_never(output)

    def _start(self) -> list[ServerEvent]:
        if self._stream.is_finished:
            self._stream = self._new_stream(new_id("resp"))
        # In the append dialect a resumed response has been announced already.
        return self._stream.start() if self._stream.state is StreamState.NEW else []

    def _end(self, ended: SegmentEnded) -> list[ServerEvent]:
        self._telemetry.observe_segment(ended.segment, is_resumed=len(self._run.segments) > 1)
        if ended.suspension is None:
            self._finish()
        elif self._dialect is Dialect.APPEND:
            return self._stream.suspend(self._usage(), self._report())
        match ended.reason:
            case StopReason.END_OF_TURN | StopReason.TOOL_CALLS:
                return self._stream.complete(self._usage(), self._report(), int(time.time()))
            case StopReason.MAX_OUTPUT_TOKENS | StopReason.CONTEXT_LENGTH:
                # The wire has one word for both limits.
                return self._stream.incomplete("max_output_tokens", self._usage(), self._report())
            case _:
                assert_never(ended.reason)

    def _finish(self) -> None:
        if self._post_inference_seconds is None:
            self._post_inference_seconds = self._post_inference.finish(self._run)

    def _new_stream(self, response_id: str) -> ResponseStream:
        response = build_response(
            self._prepared.params, id=response_id, created_at=int(time.time())
        )
        return ResponseStream(response, new_id)

    def _usage(self) -> Usage:
        segment = self._run.segments[-1]
        return Usage.of(
            input_tokens=segment.input_tokens,
            cached_tokens=segment.cached_tokens,
            output_tokens=segment.output_tokens,
        )

    def _report(self) -> dict[str, Any]:
        post = self._post_inference_seconds or 0.0
        return run_report(self._run, self._prepared.pre_inference_seconds, post)


def run_report(
    run: Run, pre_inference_seconds: float, post_inference_seconds: float
) -> dict[str, Any]:
    """Return the content of ``suspend:run``: totals over the run's segments so far, in seconds."""
    segments = run.segments
    input_tokens = sum(segment.input_tokens for segment in segments)
    output_tokens = sum(segment.output_tokens for segment in segments)
    return {
        "id": run.id,
        "seed": run.params.seed,
        "segments": len(segments),
        "usage": {
            "input_tokens": input_tokens,
            "cached_tokens": sum(segment.cached_tokens for segment in segments),
            "output_tokens": output_tokens,
            "total_tokens": input_tokens + output_tokens,
        },
        "tokens_forwarded": run.num_forwarded + run.tokens_reforwarded,
        "tokens_reforwarded": run.tokens_reforwarded,
        "time_to_first_token": segments[-1].time_to_first_token,
        "time_info": {
            "queue": sum(segment.queue_seconds for segment in segments),
            "pre_inference": pre_inference_seconds,
            "prefill": sum(segment.prefill_seconds for segment in segments),
            "decode": sum(segment.decode_seconds for segment in segments),
            "suspended": run.suspended_seconds,
            "post_inference": post_inference_seconds,
        },
    }
