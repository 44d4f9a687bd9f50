"""How many processor cores this process may compute on."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def num_usable_cores() -> int:
    """Return how many, which in a container may be fewer than the machine has.

    Of a quota, such as Docker's ``--cpus``, whole cores count: a thread more would use it up
    early, and all would stand still for the rest of each period.
    """
    if sys.platform != "linux":
        return os.cpu_count() or 1
    return max(1, int(min(len(os.sched_getaffinity(0)), cpu_quota())))


def cpu_quota(root: Path = Path("/")) -> float:
    """Return how many cores' worth of time the control groups of this process allow it together.

    Infinity if they set no bound, or cannot be read. (man 7 cgroups, both versions.)

    Args:
        root: where ``/proc`` and ``/sys`` are.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return float("inf")
    return min((quota for line in lines for quota in _quotas(root, line)), default=float("inf"))


def _quotas(root: Path, line: str) -> Iterator[float]:
    """Yield the bounds on the group that ``line`` names, and on those that it is in."""
    _, controllers, group = line.split(":", 2)
    if controllers and "cpu" not in controllers.split(","):
        return
    hierarchy = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
    # What is above a container's own group may not be visible in it, nor be where this says.
    for path in (PurePosixPath(group), *PurePosixPath(group).parents):
        directory = hierarchy / path.relative_to("/")
        try:
            if controllers:
                quota = int((directory / "cpu.cfs_quota_us").read_text())
                period = int((directory / "cpu.cfs_period_us").read_text())
            else:
                first, second = (directory / "cpu.max").read_text().split()
                quota, period = -1 if first == "max" else int(first), int(second)
        except OSError:  # the root has none, nor has a group without this controller
            continue
        if quota > 0:
            yield quota / period
