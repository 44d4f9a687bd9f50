"""A server process is started without being waited for, looked at, and always stopped."""

import sys

import psutil
import pytest

from scripts.benchmarks.served import running
from scripts.local_server import ServerError


def script(code: str) -> list[str]:
    return [sys.executable, "-c", code]


LISTENING = "import time; print('hello'); print('listening on http://[::1]:4711', flush=True);"


@pytest.mark.slow
def test_a_server_is_where_it_says_and_is_stopped_in_the_end() -> None:
    with running(script(f"{LISTENING} time.sleep(60)")) as served:
        assert served.port == 4711
        assert served.resident_bytes() > 0

    assert not psutil.pid_exists(served.pid)


@pytest.mark.slow
def test_its_processor_time_goes_up_as_it_computes() -> None:
    computing = "end = time.process_time() + 0.05\nwhile time.process_time() < end: pass\n"
    with running(script(f"{LISTENING}\n{computing}print('done')\ntime.sleep(60)")) as served:
        assert served.port
        before = served.cpu_seconds()
        while served.cpu_seconds() < before + 0.02:
            pass


@pytest.mark.slow
def test_one_that_ends_before_it_listens_is_told() -> None:
    with running(script("raise SystemExit(3)")) as served, pytest.raises(ServerError, match="3"):
        _ = served.port
