"""What clients are told of the work behind a response: in numbers."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from protocol.response import Usage
from protocol.validation import JsonObject
from sampler.run import Run, Segment
from server.safety import PASSED, Verdict
from server.work import Work


def usage_of(segments: Sequence[Segment]) -> Usage:
    """Return what ``segments`` took together."""
    return Usage.of(
        input_tokens=sum(segment.input_tokens for segment in segments),
        cached_tokens=sum(segment.cached_tokens for segment in segments),
        output_tokens=sum(segment.output_tokens for segment in segments),
        reasoning_tokens=sum(segment.reasoning_tokens for segment in segments),
    )


class RunReport:
    """Tells of one response: totals so far, and one by one the segments that it has not told of,
    which are added up only then."""

    def __init__(self, work: Work, *, tells_tokens: bool, is_simulated: bool) -> None:
        """Begin with nothing told.

        Args:
            work: what is done around the segments.
            tells_tokens: whether the client wants to know which tokens there are.
            is_simulated: whether there is no model. Then each report says so.
        """
        self._work = work
        self._tells_tokens = tells_tokens
        self._is_simulated = is_simulated
        self._num_told = 0
        self._totals: dict[str, Any] = dict.fromkeys(_SUMMED, 0)

    def in_advance(self) -> JsonObject | None:
        """Return the content of ``suspend:run`` of a response of which nothing was sampled: None
        where there is nothing to say."""
        return mark_of(is_simulated=self._is_simulated)

    def told_of(self, runs: Sequence[Run]) -> JsonObject:
        """Return the content of ``suspend:run``, with times in seconds.

        Args:
            runs: of the response. The last one answers; before it there may be one that compacts
                the conversation, whose work counts in the totals.
        """
        run = runs[-1]
        segments = [(each, segment) for each in runs for segment in each.segments]
        turns = [self._turn(each, segment) for each, segment in segments[self._num_told :]]
        self._num_told = len(segments)
        totals = self._totals
        for turn in turns:
            for name in _SUMMED:
                totals[name] += turn[name]
        report = {
            "id": run.id,
            "seed": run.params.seed,
            "segments": len(run.segments),
            "usage": {
                "input_tokens": totals["input_tokens"],
                "cached_tokens": totals["cached_tokens"],
                "output_tokens": totals["output_tokens"],
                "total_tokens": totals["input_tokens"] + totals["output_tokens"],
            },
            "tokens_forwarded": sum(run.tokens_forwarded for run in runs),
            "tokens_reforwarded": sum(run.tokens_reforwarded for run in runs),
            "time_to_first_token": run.segments[-1].time_to_first_token,
            "time_info": {name: totals[name] for name in _TIMES}
            | {"suspended": run.suspended_seconds},
            "turns": turns,
            "stages": self._work.tallies.as_json(),
        }
        return report | (self.in_advance() or {})

    def _turn(self, run: Run, segment: Segment) -> dict[str, Any]:
        turn = _figures(segment)
        if segment.endpoint is not None:
            turn["endpoint"] = segment.endpoint
        if self._tells_tokens:
            turn["token_ids"] = _token_ids(run, segment)
        return turn


def mark_of(*, is_simulated: bool) -> JsonObject | None:
    """Return what ``suspend:run`` says where nothing else is to be told: that there is no model."""
    return {"simulated": True} if is_simulated else None


_TIMES = ("queue", "pre_inference", "prefill", "decode", "post_inference")
_SUMMED = ("input_tokens", "cached_tokens", "output_tokens", *_TIMES)


def safety_report(classifier: str, findings: Sequence[tuple[int, Verdict]]) -> dict[str, Any]:
    """Return what a classifier said of a response, and of what it was asked: how much was
    classified, and what has a label."""
    return {
        "classifier": classifier,
        "items": len(findings),
        "flagged": [
            {"label": verdict.label, "score": verdict.score, "blocked": verdict.blocks}
            for _, verdict in findings
            if verdict.label != PASSED.label
        ],
    }


def _figures(segment: Segment) -> dict[str, Any]:
    return {
        "input_tokens": segment.input_tokens,
        "cached_tokens": segment.cached_tokens,
        "output_tokens": segment.output_tokens,
        "tokens_forwarded": segment.tokens_forwarded,
        "time_to_first_token": segment.time_to_first_token,
        "queue": segment.queue_seconds,
        "pre_inference": segment.pre_inference_seconds,
        "prefill": segment.prefill_seconds,
        "decode": segment.decode_seconds,
        "post_inference": segment.post_inference_seconds,
    }


def _token_ids(run: Run, segment: Segment) -> dict[str, Any]:
    """Return what ``segment`` sampled, and what tells whether two did so from the same."""
    ids, num_read = run.tokens.ids, segment.input_tokens
    read = array("I", ids[:num_read])
    return {
        "sampled": ids[num_read : num_read + segment.output_tokens],
        "context_digest": blake2b(read.tobytes(), digest_size=16).hexdigest(),
    }
