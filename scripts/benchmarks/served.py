"""A server in a process of its own, and what that process uses, seen from outside."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from urllib.parse import urlsplit

import httpx2
import psutil
from prometheus_client.parser import text_string_to_metric_families

from scripts.local_server import ServerError, server_command

_READY = "listening on "
_STOP_SECONDS = 10
_LOOK_SECONDS = 0.02
_PATIENCE_SECONDS = 120


class Served:
    """A server that was started on this machine."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.pid = process.pid

    @cached_property
    def port(self) -> int:
        """Where it listens, as soon as it does.

        Raises:
            ServerError: it ended before; it has said why on standard error.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_READY):
                port = urlsplit(line.removeprefix(_READY).strip()).port
                assert port is not None, "the server names its port"
                return port
        status = self._process.wait()
        raise ServerError(f"the server did not start (it ended with status {status})")

    def cpu_seconds(self) -> float:
        """Return the processor time of all its threads so far."""
        if sys.platform == "linux":
            # To the nanosecond, where others count ticks of 10 ms: clock_getcpuclockid(3).
            return time.clock_gettime((~self.pid << 3) | 2)
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)

    def resident_bytes(self) -> int:
        """Return how much of it is in memory now."""
        return int(psutil.Process(self.pid).memory_info().rss)

    def metric(self, name: str, **labels: str) -> float:
        """Return a metric of the server as it is now.

        Raises:
            KeyError: it has none like that.
        """
        url = f"http://127.0.0.1:{self.port}/metrics"
        # What it says of memory is of a moment ago, and asking brings it up to date.
        httpx2.get(url, timeout=_PATIENCE_SECONDS)
        time.sleep(_LOOK_SECONDS)
        text = httpx2.get(url, timeout=_PATIENCE_SECONDS).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return float(sample.value)
        raise KeyError(name)


@contextmanager
def serving(options: Sequence[str]) -> Iterator[Served]:
    """Run the server of this project with ``options``, as ``running`` does."""
    with running(server_command(options)) as served:
        yield served


@contextmanager
def running(command: Sequence[str]) -> Iterator[Served]:
    """Run ``command``, which says where it listens as the server does, and stop it in the end.

    It is not waited for, so several can be started at once.
    """
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, process_group=0
    ) as process:
        try:
            yield Served(process)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
