"""A process that keeps a ledger, and kills itself at each step there is, one after the other.

A step is whatever may change a file: a call of the system, or a statement of SQLite. The process
dies just before it, and once more in the middle of each write. What it had done by then, it has
told in a file of its own: that is what a client could have heard of.

    python -m tests.server.ledger_process FOLDER [LEFT_BY_ANOTHER]

makes ``FOLDER/0``, ``FOLDER/1`` and so on, each as it was left by a process that died one step
later than the one before; the last one was not killed. Beside each is a file ``told``.
"""

import asyncio
import multiprocessing
import os
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from server.ledger import Ledger, RunOpened, SegmentUsage
from server.prices import Price

PRICES = {"cheap": Price(Decimal("0.1"), Decimal("0.01"), Decimal("0.4"))}

FORK = multiprocessing.get_context("fork")  # no process has to import anything again

JOURNAL_BYTES = 1500
"""So short that a few runs fill it."""


@dataclass(frozen=True)
class Act:
    """Something that is told to the ledger."""

    run_id: str
    usage: SegmentUsage | None
    """Of a segment; None ends the run."""


def acts_of(prefix: str) -> list[Act]:
    """Return what a process tells its ledger of runs whose names begin with ``prefix``: one that is
    suspended while others come and go, and one that has no end."""
    first = [Act(f"{prefix}_long", _usage(0)), Act(f"{prefix}_endless", _usage(1))]
    short = [
        Act(f"{prefix}_short_{number}", usage)
        for number in range(3)
        for usage in (_usage(2 * number), _usage(2 * number + 1), None)
    ]
    return [*first, *short, Act(f"{prefix}_long", _usage(7)), Act(f"{prefix}_long", None)]


def _usage(number: int) -> SegmentUsage:
    return SegmentUsage(
        index=number,
        input_tokens=1000 + number,
        cached_tokens=10 * number,
        output_tokens=50 + number,
        reasoning_tokens=number,
        seconds=number / 8,
    )


def run_of(act: Act) -> RunOpened:
    """Return the run it is about."""
    return RunOpened(
        run_id=act.run_id,
        key="ada",
        model="cheap",
        requested_model="default",
        design="append",
        created_at=1_000_000,
    )


@dataclass(frozen=True)
class Told:
    """What a process said before it died."""

    num_acts: int
    """How many were done for sure."""
    step: str | None
    """At which it died; None if it did not."""


def read_told(folder: Path) -> Told:
    """Return what the process said that left ``folder``."""
    text = _told_path(folder).read_text()
    return Told(text.count("."), text.replace(".", "") or None)


def _told_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.told")


async def _keep(folder: Path, prefix: str, say: Callable[[str], None]) -> None:
    with closing(Ledger(folder, PRICES, journal_bytes=JOURNAL_BYTES)) as ledger:
        for act in acts_of(prefix):
            if act.usage is not None:
                ledger.segment(run_of(act), act.usage)
                say(".")
            else:
                ledger.finish(run_of(act), "completed")
                say(".")
                await ledger.settled()


def _keep_until(last_step: int, folder: Path, prefix: str) -> None:
    """Keep a ledger, and die at a step."""
    real_write = os.write
    told = os.open(_told_path(folder), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    steps = count()

    def say(text: str) -> None:
        real_write(told, text.encode())

    def step(name: str) -> None:
        if next(steps) == last_step:
            say(name)
            os.kill(os.getpid(), signal.SIGKILL)

    def stepping(name: str) -> Any:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            step(name)
            return real(*args, **kwargs)

        return patch.object(os, name, call)

    def write(descriptor: int, data: bytes) -> int:
        step("write")
        if next(steps) == last_step:
            real_write(descriptor, data[: len(data) // 2])
            say("half a write")
            os.kill(os.getpid(), signal.SIGKILL)
        return real_write(descriptor, data)

    real_connect = sqlite3.connect

    def connect(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        database: sqlite3.Connection = real_connect(*args, **kwargs)
        database.set_trace_callback(lambda statement: step(statement.split()[0]))
        return database

    with (
        patch.object(os, "write", write),
        patch.object(sqlite3, "connect", connect),
        ExitStack() as patches,
    ):
        for name in ("open", "close", "fsync", "replace", "unlink"):
            patches.enter_context(stepping(name))
        asyncio.run(_keep(folder, prefix, say))


def main(parent: Path, left_by_another: Path | None) -> None:
    """Make the folders."""
    prefix = "first" if left_by_another is None else "second"
    for step in count():
        folder = parent / str(step)
        if left_by_another is not None:
            shutil.copytree(left_by_another, folder)
        process = FORK.Process(target=_keep_until, args=(step, folder, prefix))
        process.start()
        process.join()
        if process.exitcode != -signal.SIGKILL:
            sys.exit(process.exitcode)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
