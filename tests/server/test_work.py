"""How the work around inference is counted and timed, and how late the event loop is."""

import asyncio
import threading
import time
from contextlib import closing

import pytest

from sampler.counters import TextWork
from server.loop_lag import LoopLag
from server.work import Stage, Tallies, Tally, Work
from tests.server.running import until


@pytest.fixture
def totals() -> Tallies:
    return Tallies()


@pytest.fixture
def work(totals: Tallies) -> Work:
    return Work(totals)


class Clock:
    """A clock that is set by hand, in the place of the monotonic one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


# --- Stages --------------------------------------------------------------------------------------


def test_nothing_was_done_at_first(work: Work) -> None:
    assert [tally for _, tally in work.tallies] == [Tally()] * len(Stage)
    assert work.tallies.as_json() == {}


def test_what_is_done_for_a_request_is_done_by_the_server(work: Work, totals: Tallies) -> None:
    work.add(Stage.STORE, 0.5)
    Work(totals).add(Stage.STORE, 0.25, items=3)

    assert work.tallies[Stage.STORE] == Tally(1, 1, 0.5)
    assert totals[Stage.STORE] == Tally(2, 4, 0.75)


def test_a_stage_is_counted_once_and_timed(work: Work, totals: Tallies) -> None:
    began_at = time.perf_counter()
    with work.stage(Stage.RENDER):
        pass
    most = time.perf_counter() - began_at

    tally = work.tallies[Stage.RENDER]
    assert (tally.runs, tally.items) == (1, 1)
    assert 0 < tally.seconds <= most
    assert totals[Stage.RENDER] == tally


def test_a_stage_may_have_any_number_of_items(work: Work) -> None:
    with work.stage(Stage.PARSE, items=0):
        pass
    work.add(Stage.PARSE, 0, runs=0, items=7)

    tally = work.tallies[Stage.PARSE]
    assert (tally.runs, tally.items) == (1, 7)


def test_a_stage_that_fails_was_gone_through(work: Work) -> None:
    with pytest.raises(ValueError, match="no"), work.stage(Stage.PARSE, items=2):
        raise ValueError("no")

    tally = work.tallies[Stage.PARSE]
    assert (tally.runs, tally.items) == (1, 2)
    assert tally.seconds > 0


def test_what_text_takes_is_two_stages(work: Work, totals: Tallies) -> None:
    with work.text() as text:
        text.renders, text.render_seconds = 1, 0.5
        text.encodes, text.encode_seconds = 4, 0.25

    assert work.tallies[Stage.RENDER] == totals[Stage.RENDER] == Tally(1, 1, 0.5)
    assert work.tallies[Stage.ENCODE] == totals[Stage.ENCODE] == Tally(4, 4, 0.25)


def test_text_that_is_refused_was_worked_on(work: Work) -> None:
    def refuse(text: TextWork) -> None:
        text.renders = 1
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), work.text() as text:
        refuse(text)

    assert work.tallies[Stage.RENDER].runs == 1


def test_only_what_was_done_is_told(work: Work) -> None:
    work.add(Stage.LEDGER, 0.5, items=2)
    work.add(Stage.RESOLVE, 0.25, runs=0, items=0)

    assert work.tallies.as_json() == {"ledger": {"runs": 1, "items": 2, "seconds": 0.5}}


def test_work_that_becomes_a_part_of_another_is_not_counted_twice(totals: Tallies) -> None:
    run, append = Work(totals), Work(totals)
    run.add(Stage.PARSE, 1.0)
    append.add(Stage.PARSE, 0.5, items=2)
    append.add(Stage.ENCODE, 0.25)

    run.absorb(append)

    assert run.tallies[Stage.PARSE] == totals[Stage.PARSE] == Tally(2, 3, 1.5)
    assert run.tallies[Stage.ENCODE] == totals[Stage.ENCODE] == Tally(1, 1, 0.25)
    assert append.tallies[Stage.PARSE] == Tally(1, 2, 0.5)


def test_what_goes_on_behind_the_back_of_requests_is_only_timed(totals: Tallies) -> None:
    began_at = time.perf_counter()
    with pytest.raises(ValueError, match="no"), totals.timed(Stage.STORE):
        raise ValueError("no")
    most = time.perf_counter() - began_at

    tally = totals[Stage.STORE]
    assert (tally.runs, tally.items) == (0, 0)
    assert 0 < tally.seconds <= most


class Interrupted(float):
    """Seconds that are added slowly: another thread may come in between."""

    meanwhile: threading.Thread

    def __radd__(self, seconds: float) -> float:
        self.meanwhile.start()
        self.meanwhile.join(0.02)  # it has to wait, or else it has come and gone
        return seconds + float(self)


def test_what_two_threads_do_is_counted_to_the_last(totals: Tallies) -> None:
    seconds = Interrupted(0.5)
    seconds.meanwhile = threading.Thread(target=totals.add, args=(Stage.STORE, 1, 2, 0.25))

    totals.add(Stage.STORE, 1, 1, seconds)
    seconds.meanwhile.join()

    assert totals[Stage.STORE] == Tally(2, 3, 0.75)


# --- Time ----------------------------------------------------------------------------------------


def test_what_a_request_waits_behind_others_is_no_work_on_it(
    monkeypatch: pytest.MonkeyPatch, totals: Tallies
) -> None:
    clock = Clock(monkeypatch)
    work = Work(totals)

    clock.now += 1
    work.queued()
    clock.now += 10
    work.taken()
    clock.now += 2

    assert work.received_at == 1000.0
    assert work.waited_seconds == 10
    assert work.seconds == 3


def test_a_request_may_wait_more_than_once(
    monkeypatch: pytest.MonkeyPatch, totals: Tallies
) -> None:
    clock = Clock(monkeypatch)
    work = Work(totals)

    for _ in range(2):
        work.queued()
        clock.now += 10
        work.taken()
        clock.now += 1

    assert work.waited_seconds == 20
    assert work.seconds == 2


def test_what_never_waited_can_be_taken(monkeypatch: pytest.MonkeyPatch, totals: Tallies) -> None:
    clock = Clock(monkeypatch)
    work = Work(totals)
    clock.now += 1

    work.taken()

    assert work.waited_seconds == 0
    assert work.seconds == 1


# --- The event loop ------------------------------------------------------------------------------

INTERVAL_SECONDS = 0.001


def hold_up(seconds: float) -> None:
    """Let the event loop do nothing else for a while."""
    until_when = time.monotonic() + seconds
    while time.monotonic() < until_when:
        pass


async def test_the_loop_is_looked_at_again_and_again() -> None:
    lags: list[float] = []

    with closing(LoopLag(lags.append, INTERVAL_SECONDS)):
        await until(lambda: len(lags) >= 3)

    assert min(lags) > -INTERVAL_SECONDS  # a timer may be early by the clock's resolution


async def test_a_loop_that_is_held_up_is_late_by_as_much() -> None:
    lags: list[float] = []

    began_at = time.monotonic()
    with closing(LoopLag(lags.append, INTERVAL_SECONDS)):
        hold_up(0.02)
        await until(lambda: bool(lags))
        most = time.monotonic() - began_at

    assert 0.02 - INTERVAL_SECONDS <= lags[0] <= most


async def test_a_delay_is_told_once() -> None:
    lags: list[float] = []

    began_at = time.monotonic()
    with closing(LoopLag(lags.append, INTERVAL_SECONDS)):
        hold_up(0.02)
        await until(lambda: len(lags) >= 2)
        most = time.monotonic() - began_at

    assert sum(lags) <= most


async def test_a_loop_is_looked_at_no_more_after_the_end() -> None:
    lags: list[float] = []
    lag = LoopLag(lags.append, INTERVAL_SECONDS)

    lag.close()

    hold_up(2 * INTERVAL_SECONDS)
    for _ in range(3):
        await asyncio.sleep(0)
    assert lags == []
