"""Checks, played against a server over real sockets, several at a time."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from protocol.conformance.check import Check, Target
from protocol.conformance.play import Branch, Branches, Play, Result, Verdict, as_bug
from scripts.conformance.address import Address
from scripts.conformance.fuzz import Fuzz, fuzzed
from scripts.conformance.overlap import Overlap
from scripts.conformance.wires import Http, Wires, http_to

_PATIENCES = 5
"""After so many times what it may wait for one thing, a check is given up."""


@dataclass(frozen=True)
class Played:
    """A verdict, and how long it took."""

    verdict: Verdict
    seconds: float


class Observer(Protocol):
    """Who is told how far it is."""

    def began(self, check: Check) -> None:
        """Take note that a check is played now."""

    def ended(self, played: Played) -> None:
        """Take note of what it came to."""


@dataclass
class Suite:
    """Checks that a server is put to."""

    address: Address
    target: Target
    observer: Observer
    jobs: int = 8
    patience_seconds: float = 30.0

    def __post_init__(self) -> None:
        self.overlap = Overlap()

    async def play(self, checks: Sequence[Check]) -> None:
        """Play ``checks``, in order as far as that goes; the observer is told what they come to.

        On cancellation those that are being played are broken off.
        """
        side_by_side = iter([check for check in checks if not check.is_alone])
        async with http_to(self.address, self.patience_seconds) as http:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self.jobs):
                    tasks.create_task(self._play_all(side_by_side, http))
            await self._play_all(iter([check for check in checks if check.is_alone]), http)

    async def _play_all(self, checks: Iterator[Check], http: Http) -> None:
        """Play what is left of ``checks``, which others may share."""
        for check in checks:
            self.observer.began(check)
            began_at = time.monotonic()
            try:
                verdict = await self._verdict(check, http)
            except Exception as error:  # noqa: BLE001  # the other checks can do nothing for it
                verdict = Verdict(check, Result.ERROR, as_bug(_first(error)))
            self.observer.ended(Played(verdict, time.monotonic() - began_at))

    async def _verdict(self, check: Check, http: Http) -> Verdict:
        if isinstance(check, Fuzz):
            return await fuzzed(check, self.target, partial(self._play_one, http=http))
        return await self._play_one(check, http)

    async def _play_one(self, check: Check, http: Http) -> Verdict:
        play = Play(check, self.target)
        wires = Wires(self.address, http, self.patience_seconds, self.overlap)
        seconds = _PATIENCES * self.patience_seconds
        try:
            async with asyncio.timeout(seconds):
                await _play_branch(play, wires)
        except TimeoutError:
            play.give_up(f"not over in {seconds:g} s")
        finally:
            await wires.close()
        return play.verdict


async def _play_branch(branch: Branch, wires: Wires) -> None:
    while (asked := branch.asked) is not None:
        if isinstance(asked, Branches):
            async with asyncio.TaskGroup() as tasks:
                for inner in asked.branches:
                    tasks.create_task(_play_branch(inner, wires))
            branch.give(None)
        else:
            branch.give(await wires.perform(asked))


def _first(error: Exception) -> Exception:
    """Return what went wrong in a group of tasks: the others were cancelled."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def not_run(check: Check, why: str) -> Played:
    """Return what becomes of a check that is not played."""
    return Played(Verdict(check, Result.NOT_RUN, why), 0.0)
