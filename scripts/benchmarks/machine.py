"""The machine and the versions, without which figures mean nothing; and who else used it."""

import os
import platform
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = ("suspended-sampling", "torch", "transformers", "numba", "llvmlite", "numpy")
_THREADING = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_PROC_BIND")
_VECTORS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")


def machine() -> dict[str, Any]:
    """Return what the machine is."""
    return {
        "processor": _processor(),
        "vectors": [flag for flag in _VECTORS if flag in _processor_flags()],
        "cores": psutil.cpu_count(logical=False),
        "hardware_threads": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(terse=True),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "environment": {name: os.environ[name] for name in _THREADING if name in os.environ},
    }


def versions() -> dict[str, str]:
    """Return the versions of what computes."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _processor() -> str:
    for line in _cpuinfo():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _processor_flags() -> set[str]:
    for line in _cpuinfo():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return []


class Neighbours:
    """How busy other programs have kept the machine since this was made."""

    def __init__(self) -> None:
        self._began_at = time.monotonic()
        self._busy_before = _seconds_of_others()

    def busy_cores(self) -> float:
        """Return how many cores they used, on average."""
        elapsed = time.monotonic() - self._began_at
        return max(0.0, (_seconds_of_others() - self._busy_before) / max(elapsed, 0.001))


def _seconds_of_others() -> float:
    """Return the processor time of all but this process and its children, living and gone."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # What guests used is in the user's time already.
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    this = psutil.Process()
    own = sum(this.cpu_times()[:4])
    for child in this.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            own += sum(child.cpu_times()[:4])
    return float(sum(times) - idle - guests - own)
