"""What is read out of one trial: each measure is one number, or none where it was not measured."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from scripts.comparison.results import Split, Trial, Turn

Measure = Callable[[Trial], float | None]


def end_to_end(trial: Trial) -> float | None:
    """Return the seconds of an agent run, without those of its tools; the median of several."""
    return _median(run.seconds for run in trial.runs)


def wall(trial: Trial) -> float | None:
    """Return the seconds of an agent run with those of its tools; the median of several."""
    return _median(run.wall_seconds for run in trial.runs)


def turn(trial: Trial) -> float | None:
    """Return the median seconds of a turn, as the client saw them."""
    return _median(turn.seconds for turn in turns(trial))


def first_token(trial: Trial) -> float | None:
    """Return the median seconds from a request or append to the first token, by the server."""
    return _median(turn.first_token_seconds for turn in turns(trial))


def first_event(trial: Trial) -> float | None:
    """Return the median seconds from a request or append to the first output, by the client."""
    return _median(turn.first_event_seconds for turn in turns(trial))


def resume(trial: Trial) -> float | None:
    """Return the median seconds from tool outputs sent to the first output, by the client."""
    return _median(turn.first_event_seconds for run in trial.runs for turn in run.turns[1:])


def pre_inference(trial: Trial) -> float | None:
    """Return the median seconds of a turn that are spent before the model is asked."""
    return _median(split.pre_inference for split in splits(trial))


def overhead_share(trial: Trial) -> float | None:
    """Return the fraction of the turns' time that is neither prefill nor decode."""
    total = sum(total_seconds(split) for split in splits(trial))
    inference = sum(split.prefill + split.decode for split in splits(trial))
    return None if total <= 0 else 1 - inference / total


def num_calls(trial: Trial) -> float | None:
    """Return after how many turns of an agent run tools ran; the median of several runs."""
    return _median(len(run.turns) - 1 for run in trial.runs)


def cached_share(trial: Trial) -> float | None:
    """Return the fraction of the turns' input that was not prefilled again."""
    read = sum(turn.input_tokens for turn in turns(trial))
    return None if read == 0 else sum(turn.cached_tokens for turn in turns(trial)) / read


def bytes_sent(trial: Trial) -> float | None:
    """Return the bytes that the client of an agent run sends."""
    return _per_run(trial, sum(turn.bytes_sent for turn in turns(trial)))


def bytes_received(trial: Trial) -> float | None:
    """Return the bytes that the client of an agent run receives."""
    return _per_run(trial, sum(turn.bytes_received for turn in turns(trial)))


def cpu(trial: Trial) -> float | None:
    """Return the seconds of processor time that the server spends on an agent run."""
    return _per_run(trial, trial.cpu_seconds)


def items_classified(trial: Trial) -> float | None:
    """Return the items of an agent run that a classifier of content looked at."""
    both = [counted(f"stage_items:classify_{what}")(trial) for what in ("input", "output")]
    known = [items for items in both if items is not None]
    return sum(known) if known else None


def is_at_endpoint(trial: Trial) -> bool:
    """Tell whether an endpoint sampled it, and not the server."""
    return any(turn.endpoint is not None for turn in turns(trial))


def input_tokens(trial: Trial) -> float | None:
    """Return the sum of the contexts of an agent run's turns."""
    return _per_run(trial, sum(turn.input_tokens for turn in turns(trial)))


def output_tokens(trial: Trial) -> float | None:
    """Return the tokens that were sampled in an agent run."""
    return _per_run(trial, sum(turn.output_tokens for turn in turns(trial)))


def forwarded(trial: Trial) -> float | None:
    """Return the tokens of an agent run that went through the model, turn by turn."""
    told = [turn.tokens_forwarded for turn in turns(trial)]
    known = [tokens for tokens in told if tokens is not None]
    return _per_run(trial, sum(known)) if known else None


def read_again(trial: Trial) -> float | None:
    """Return the tokens of an agent run that were read or sampled in the turn before, and were not
    cached in the next: by turns, so in all designs alike."""
    total = 0
    for run in trial.runs:
        for before, turn in pairwise(run.turns):
            known = min(before.input_tokens + before.output_tokens, turn.input_tokens)
            total += max(0, known - turn.cached_tokens)
    return _per_run(trial, total)


def asked_again(trial: Trial) -> float | None:
    """Return how often in an agent run an endpoint was asked for what it had not answered."""
    told = [turn.endpoint for turn in turns(trial) if turn.endpoint is not None]
    return _per_run(trial, sum(endpoint.tries - 1 for endpoint in told)) if told else None


@cache
def counted(name: str) -> Measure:
    """Return the measure of a counter of the server, per agent run: the same one for a name."""
    return lambda trial: _per_run(trial, trial.counts.get(name))


# --- The parts of a turn --------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One part of a turn's time."""

    name: str
    """As ``Split`` has it."""
    title: str

    @property
    def is_inference(self) -> bool:
        """Whether the model computes meanwhile."""
        return self.name in ("prefill", "decode")


PARTS = (
    Part("prefill", "prefill"),
    Part("decode", "decode"),
    Part("network", "network and client"),
    Part("pre_inference", "pre-inference"),
    Part("queue", "queue"),
    Part("post_inference", "post-inference"),
    Part("upstream", "to the endpoint and back"),
)
"""Inference first, then what is overhead; the last there is at an endpoint only."""


@cache
def mean_part(name: str) -> Measure:
    """Return the measure of the mean seconds of a part of a turn: means add up, medians do not."""

    def measure(trial: Trial) -> float | None:
        seconds = [float(getattr(split, name)) for split in splits(trial)]
        return statistics.fmean(seconds) if seconds else None

    return measure


def total_seconds(split: Split) -> float:
    """Return the turn's time."""
    return sum(float(getattr(split, part.name)) for part in PARTS)


def turns(trial: Trial) -> list[Turn]:
    """Return the turns of all runs."""
    return [turn for run in trial.runs for turn in run.turns]


def splits(trial: Trial) -> list[Split]:
    """Return where the time of the turns went, for those that tell."""
    return [turn.split for turn in turns(trial) if turn.split is not None]


def _median(samples: Iterable[float | None]) -> float | None:
    known = [sample for sample in samples if sample is not None]
    return statistics.median(known) if known else None


def _per_run(trial: Trial, total: float | None) -> float | None:
    return None if total is None or not trial.runs else total / len(trial.runs)
