"""Measurements are taken in turns, each after all others have come to rest."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from scripts.benchmarks.machine import Neighbours, machine, versions
from scripts.benchmarks.pairing import again, alternate, wait_until_idle


def test_measurements_take_turns_and_each_is_preceded_by_rest() -> None:
    events: list[str] = []

    def measuring(name: str) -> Callable[[], float]:
        def measure() -> float:
            events.append(name)
            return float(len(events))

        return measure

    samples = alternate(
        {"a": measuring("a"), "b": measuring("b")}, 2, settle=lambda: events.append("rest")
    )

    assert events == ["rest", "a", "rest", "b"] * 2
    assert samples == {"a": [2.0, 6.0], "b": [4.0, 8.0]}


def test_rounds_to_warm_up_leave_no_samples() -> None:
    values = iter([100.0, 1.0, 2.0])

    samples = alternate({"a": lambda: next(values)}, 2, settle=lambda: None, warm_ups=1)

    assert samples == {"a": [1.0, 2.0]}


def test_the_noise_row_is_named_after_what_is_measured_again() -> None:
    assert again("ours int4") == "ours int4, again"


def test_who_does_nothing_is_idle() -> None:
    assert wait_until_idle()


@pytest.mark.slow
def test_who_goes_on_computing_is_not_idle() -> None:
    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as spinning:
        assert spinning.stdout is not None
        spinning.stdout.readline()
        try:
            # On a full machine it may not get a core in one look.
            looks = (wait_until_idle([spinning.pid], patience_seconds=0.0) for _ in range(50))
            assert not all(looks)
        finally:
            spinning.kill()


def test_the_machine_and_the_versions_are_told() -> None:
    facts = machine()

    assert facts["processor"]
    assert facts["memory_gib"] > 0
    assert {"python", "torch", "transformers"} <= versions().keys()
    assert Neighbours().busy_cores() >= 0.0
