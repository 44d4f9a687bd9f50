"""Measurements in turns: A B C A B C ..., so that a slow minute of the machine hits all of them.

Before each one, all that was measured before has to have come to rest: OpenMP's threads go on
spinning for milliseconds after their work, and on a small machine that is felt by the next one.
"""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import psutil

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

_LOOK_SECONDS = 0.03
_IDLE_SECONDS = 0.01
"""Of a process's time in one look: the resolution of other processes' times."""


def alternate(
    measurements: Mapping[Key, Callable[[], Value]],
    repeats: int,
    *,
    settle: Callable[[], object],
    warm_ups: int = 0,
) -> dict[Key, list[Value]]:
    """Return the samples of each of ``measurements``, taken in turns.

    Args:
        measurements: each measures once and returns the value.
        repeats: rounds.
        settle: called before each measurement.
        warm_ups: rounds before those, whose values are thrown away.
    """
    samples: dict[Key, list[Value]] = {key: [] for key in measurements}
    for round_number in range(-warm_ups, repeats):
        for key, measure in measurements.items():
            settle()
            value = measure()
            if round_number >= 0:
                samples[key].append(value)
    return samples


def again(name: str) -> str:
    """Return the name of the A/A row: the same thing, measured once more in each round."""
    return f"{name}, again"


def wait_until_idle(pids: Sequence[int] = (), patience_seconds: float = 2.0) -> bool:
    """Wait until neither this process nor ``pids`` compute; False if they went on for so long."""
    deadline = time.monotonic() + patience_seconds
    others = [psutil.Process(pid) for pid in pids]
    while True:
        before = _processor_seconds(others)
        time.sleep(_LOOK_SECONDS)
        if _processor_seconds(others) - before <= _IDLE_SECONDS:
            return True
        if time.monotonic() > deadline:
            return False


def _processor_seconds(others: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in others]
    return time.process_time() + sum(each.user + each.system for each in times)
