"""What clients are told of the work behind a response: in numbers."""

from collections.abc import Sequence
from typing import Any

from protocol.response import Usage
from sampler.run import Run, Segment


def usage_of(segments: Sequence[Segment]) -> Usage:
    """Return what ``segments`` took together."""
    return Usage.of(
        input_tokens=sum(segment.input_tokens for segment in segments),
        cached_tokens=sum(segment.cached_tokens for segment in segments),
        output_tokens=sum(segment.output_tokens for segment in segments),
        reasoning_tokens=sum(segment.reasoning_tokens for segment in segments),
    )


def run_report(
    runs: Sequence[Run],
    pre_inference_seconds: float,
    post_inference_seconds: float,
    *,
    is_simulated: bool,
) -> dict[str, Any]:
    """Return the content of ``suspend:run``: totals so far, times in seconds.

    Args:
        runs: of one response. The last one answers; before it there may be one that compacts the
            conversation, whose work counts in the totals.
        pre_inference_seconds: what was done before the first.
        post_inference_seconds: what was done after the last.
        is_simulated: whether there was no model. Then the report says so.
    """
    run = runs[-1]
    segments = [segment for run in runs for segment in run.segments]
    usage = usage_of(segments)
    report = {
        "id": run.id,
        "seed": run.params.seed,
        "segments": len(run.segments),
        "usage": {
            "input_tokens": usage.input_tokens,
            "cached_tokens": usage.input_tokens_details.cached_tokens,
            "output_tokens": usage.output_tokens,
            "total_tokens": usage.total_tokens,
        },
        "tokens_forwarded": sum(
            run.num_forwarded - run.num_inherited + run.tokens_reforwarded for run in runs
        ),
        "tokens_reforwarded": sum(run.tokens_reforwarded for run in runs),
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
    return {**report, "simulated": True} if is_simulated else report
