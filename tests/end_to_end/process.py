"""``python -m server`` as a person starts it: a process, seen from outside."""

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from server.engine_choice import kind_of

START_SECONDS = 240  # with nothing compiled yet, on a machine that does other things
STOP_SECONDS = 15


class ServerProcess:
    """A server that says where it listens."""

    def __init__(self, process: "subprocess.Popen[str]", stderr: Path) -> None:
        self._process = process
        self._stderr = stderr
        self._stdout = ""

    @property
    def stdout(self) -> str:
        """All that was printed so far."""
        return self._stdout

    @property
    def stderr(self) -> str:
        """All that was logged so far."""
        return self._stderr.read_text()

    @property
    def url(self) -> str:
        """Where it listens, ``http://host:port``."""
        (line,) = self._stdout.splitlines()
        found = re.fullmatch(r"listening on (http://127\.0\.0\.1:\d+)", line)
        assert found is not None, line
        return found[1]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def wait_until_it_logs(self, text: str) -> None:
        """Wait for a text in the log, or in what else it says on standard error."""
        deadline = time.monotonic() + START_SECONDS
        while text not in self.stderr:
            assert time.monotonic() < deadline, f"no {text!r} on standard error: {self.stderr}"
            assert self._process.poll() is None, self.stderr
            time.sleep(0.005)  # a file tells nobody that it has grown

    def wait_until_it_listens(self) -> None:
        """Wait for the first line."""
        stdout = self._pipe()
        ready, _, _ = select.select([stdout], [], [], START_SECONDS)
        self._stdout = stdout.readline() if ready else ""
        assert self._stdout, f"no line on standard output; standard error: {self.stderr}"

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def wait(self, seconds: float = STOP_SECONDS) -> int:
        """Return the exit status."""
        status = self._process.wait(seconds)
        self._stdout += self._pipe().read()
        return status

    def _pipe(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout


@contextmanager
def started(
    stderr: Path, *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    """Start a server on a free port, if ``options`` name none. On the way out it is killed.

    What it stores is put next to ``stderr``.
    """
    # With as many threads as cores, torch's wait for each other when others compute.
    threads = [] if any(map(kind_of, options)) else ["--threads", "1"]
    arguments = ["--port", "0", *threads, "--log-level", "info"]
    arguments += ["--data-dir", str(stderr.with_suffix(".data")), *options]
    with (
        stderr.open("w") as log,
        subprocess.Popen(
            [sys.executable, "-m", "server", *arguments],
            stdout=subprocess.PIPE,
            stderr=log,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=Path(__file__).parents[2],
            env=os.environ | (environment or {}),
        ) as process,
    ):
        try:
            yield ServerProcess(process, stderr)
        finally:
            process.kill()
