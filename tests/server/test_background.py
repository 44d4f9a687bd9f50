import asyncio
import gc
import logging
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import pytest

from protocol.conformance.stream_grammar import check_stream
from protocol.response import ResponseError
from protocol.server_events import ResponseFailed, ResponseIncomplete, ServerEvent
from server.background import MISTAKE, BackgroundRuns, LiveResponse
from server.response_store import STOPPED
from tests.protocol.streams import frames
from tests.sampler.runs import let_the_loop_turn
from tests.server.played_runs import DEADLINE_SECONDS, PlayedRun


@pytest.fixture
async def runs() -> AsyncIterator[BackgroundRuns]:
    async with BackgroundRuns() as runs:
        yield runs


def begin(runs: BackgroundRuns, run: PlayedRun, key: str = "") -> LiveResponse:
    return runs.start(key, run.response, run.events(), run.cancel)


async def told(live: LiveResponse) -> list[ServerEvent]:
    """Return all events that a follower is told."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        return [event async for event in live.follow()]


async def take(events: AsyncGenerator[ServerEvent, None], number: int) -> list[ServerEvent]:
    """Return the next events that a follower is told."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        return [await anext(events) for _ in range(number)]


def error_of(live: LiveResponse) -> ResponseError | None:
    """Return why the response failed, or None."""
    assert live.is_finished
    assert (live.response.status == "failed") == (live.response.error is not None)
    return live.response.error


# --- Following -----------------------------------------------------------------------------------


async def test_a_follower_is_told_all_events_to_the_terminal_one(runs: BackgroundRuns) -> None:
    live = begin(runs, run := PlayedRun())
    following = asyncio.ensure_future(told(live))
    run.start()
    run.say("It ", "rains.")
    await let_the_loop_turn()
    run.complete()

    events = await following

    assert events == run.said
    check_stream(frames(events))


async def test_a_follower_is_told_each_event_when_it_happens(runs: BackgroundRuns) -> None:
    live = begin(runs, run := PlayedRun())
    async with aclosing(live.follow()) as events:
        assert await take(events, 2) == run.said
        run.start()
        assert await take(events, 1) == run.said[2:]
        run.say("It ")
        assert await take(events, 3) == run.said[3:]
        assert not live.is_finished
        run.complete()
        rest = [event async for event in events]

    assert rest == run.said[6:]


async def test_who_comes_late_is_told_all_from_the_beginning(runs: BackgroundRuns) -> None:
    live = begin(runs, run := PlayedRun())
    run.start()
    run.say("It ")
    await let_the_loop_turn()
    during = asyncio.ensure_future(told(live))
    run.say("rains.")
    run.complete()
    assert await during == run.said

    afterwards = await told(live)

    assert afterwards == run.said


async def test_followers_do_not_wait_for_one_another(runs: BackgroundRuns) -> None:
    live = begin(runs, run := PlayedRun())
    async with aclosing(live.follow()) as slow:
        first = await take(slow, 1)
        followers = [asyncio.ensure_future(told(live)) for _ in range(50)]
        run.start()
        run.say(*"It rains.")
        run.complete()

        assert await asyncio.gather(*followers) == [run.said] * 50
        assert live.is_finished

        assert [*first, *[event async for event in slow]] == run.said


async def test_a_follower_that_goes_away_ends_nothing(runs: BackgroundRuns) -> None:
    live = begin(runs, run := PlayedRun())
    async with aclosing(live.follow()) as events:
        await take(events, 1)
    waiting = asyncio.ensure_future(told(live))
    await let_the_loop_turn()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)

    run.start()
    run.complete()

    assert await told(live) == run.said
    assert run.num_cancels == 0


async def test_a_run_outlives_the_task_that_started_it(runs: BackgroundRuns) -> None:
    run = PlayedRun()

    async def request() -> LiveResponse:
        return begin(runs, run)

    live = await asyncio.create_task(request())
    run.start()
    run.complete()

    assert await told(live) == run.said


async def test_the_response_is_as_its_latest_event_shows_it(runs: BackgroundRuns) -> None:
    live = begin(runs, run := PlayedRun())
    assert live.response == run.response
    statuses = []
    async with aclosing(live.follow()) as events:
        async for _ in events:
            statuses.append(live.response.status)
            if len(statuses) == 2:
                run.start()
            elif len(statuses) == 3:
                run.complete()

    assert statuses == ["queued", "queued", "in_progress", "completed"]
    assert live.response == run.response


async def test_the_end_is_told_when_the_run_is_over(runs: BackgroundRuns) -> None:
    live = begin(runs, run := PlayedRun())
    run.start()
    run.complete()

    async with aclosing(live.follow()) as events:
        was_over = [run.is_over async for _ in events]

    assert was_over[-1]


# --- Cancelling ----------------------------------------------------------------------------------


async def test_a_cancelled_response_ends_with_what_it_has(runs: BackgroundRuns) -> None:
    live = begin(runs, run := PlayedRun())
    run.start()
    run.say("It ")
    await let_the_loop_turn()

    response = await live.cancel()

    assert response.status == "cancelled"
    assert response == live.response == run.response
    assert run.is_over
    events = await told(live)
    assert events == run.said
    assert isinstance(events[-1], ResponseIncomplete)
    assert [item.status for item in response.output] == ["incomplete"]


async def test_a_response_is_cancelled_before_it_began(runs: BackgroundRuns) -> None:
    live = begin(runs, run := PlayedRun())

    response = await live.cancel()

    assert response.status == "cancelled"
    assert run.has_begun
    assert await told(live) == run.said


async def test_many_cancel_at_once_and_the_run_is_asked_once(runs: BackgroundRuns) -> None:
    live = begin(runs, run := PlayedRun())
    run.start()

    responses = await asyncio.gather(*(live.cancel() for _ in range(20)))

    assert {response.status for response in responses} == {"cancelled"}
    assert run.num_cancels == 1


async def test_a_finished_response_stays_what_it_is(runs: BackgroundRuns) -> None:
    live = begin(runs, run := PlayedRun())
    run.start()
    run.complete()
    await told(live)

    response = await live.cancel()

    assert response.status == "completed"
    assert run.num_cancels == 0


async def test_a_cancel_that_comes_too_late_gets_the_finished_response(
    runs: BackgroundRuns,
) -> None:
    live = begin(runs, run := PlayedRun())
    run.start()
    run.complete()

    response = await live.cancel()  # asked before the run got to its end

    assert response.status == "completed"
    assert run.num_cancels == 1
    assert len({type(event) for event in run.said if "response" in event.__struct_fields__}) == 4


async def test_a_run_ends_also_if_nobody_waits_for_the_cancel(runs: BackgroundRuns) -> None:
    live = begin(runs, run := PlayedRun())
    run.start()
    cancelling = asyncio.ensure_future(live.cancel())
    await asyncio.sleep(0)

    cancelling.cancel()

    assert (await told(live))[-1].response.status == "cancelled"  # type: ignore[union-attr]
    assert run.is_over


# --- What goes wrong -----------------------------------------------------------------------------


async def test_a_run_that_breaks_fails_its_response_and_no_other(
    runs: BackgroundRuns, caplog: pytest.LogCaptureFixture
) -> None:
    broken, whole = PlayedRun("resp_1"), PlayedRun("resp_2")
    live, other = begin(runs, broken), begin(runs, whole)
    broken.start()
    broken.say("It ")
    broken.break_off(ZeroDivisionError("a secret"))

    events = await told(live)

    assert events[:-1] == broken.said
    assert isinstance(events[-1], ResponseFailed)
    assert events[-1].sequence_number == len(broken.said)
    assert error_of(live) == MISTAKE
    assert "ZeroDivisionError: a secret" in caplog.text
    whole.start()
    whole.complete()
    assert await told(other) == whole.said


async def test_a_failed_response_keeps_the_items_it_finished(runs: BackgroundRuns) -> None:
    live = begin(runs, run := PlayedRun())
    run.start()
    run.say("Let me look.")
    run.call("call_1", "weather")
    run.break_off(ValueError())

    await told(live)

    assert [item.id for item in live.response.output] == ["msg_1"]


async def test_a_run_that_ends_without_a_word_fails_its_response(runs: BackgroundRuns) -> None:
    live = begin(runs, run := PlayedRun())
    run.start()
    run.stop_short()

    events = await told(live)

    assert error_of(live) == MISTAKE
    check_stream(frames(events))


async def test_a_run_that_is_cancelled_from_within_fails_its_response(
    runs: BackgroundRuns,
) -> None:
    broken, whole = PlayedRun("resp_1"), PlayedRun("resp_2")
    live, other = begin(runs, broken), begin(runs, whole)
    broken.break_off(asyncio.CancelledError())

    await told(live)

    assert error_of(live) == STOPPED
    whole.start()
    whole.complete()
    assert await told(other) == whole.said


async def test_a_mistake_after_the_end_leaves_the_end_as_it_was(
    runs: BackgroundRuns, caplog: pytest.LogCaptureFixture
) -> None:
    run = PlayedRun()

    async def events() -> AsyncGenerator[ServerEvent, None]:
        async with aclosing(run.events()) as events:
            async for event in events:
                yield event
        raise ZeroDivisionError

    live = runs.start("", run.response, events(), run.cancel)
    run.start()
    run.complete()

    assert await told(live) == run.said
    assert live.response.status == "completed"
    assert "ZeroDivisionError" in caplog.text


# --- Finding and forgetting ----------------------------------------------------------------------


async def test_a_response_is_found_by_its_key_alone(runs: BackgroundRuns) -> None:
    of_ada = begin(runs, PlayedRun(), "ada")
    of_bob = begin(runs, PlayedRun(), "bob")

    assert runs.get("ada", "resp_1") is of_ada
    assert runs.get("bob", "resp_1") is of_bob
    assert runs.get("", "resp_1") is None
    assert runs.get("ada", "resp_2") is None


async def test_a_finished_response_is_had_for_a_while() -> None:
    async with BackgroundRuns(linger_seconds=0) as brief, BackgroundRuns() as long:
        short_lived = begin(brief, run := PlayedRun())
        long_lived = begin(long, other := PlayedRun())
        for played in (run, other):
            played.start()
            played.complete()
        await told(short_lived)
        await told(long_lived)

        await asyncio.sleep(0.001)  # a turn of the clock, for what is due at once

        assert brief.get("", "resp_1") is None
        assert long.get("", "resp_1") is long_lived
        assert await told(short_lived) == run.said


async def test_nothing_is_held_of_a_response_that_is_not_had_any_more() -> None:
    async with BackgroundRuns(linger_seconds=0) as runs:
        live = begin(runs, run := PlayedRun())
        run.start()
        run.complete()
        await told(live)
        await asyncio.sleep(0.001)
        held = weakref.ref(live)

        del live
        gc.collect()
        assert held() is None


async def test_a_broken_response_is_had_for_good() -> None:
    async with BackgroundRuns(linger_seconds=0) as runs:
        live = begin(runs, run := PlayedRun())
        run.stop_short()
        await told(live)

        await asyncio.sleep(0.001)

        assert runs.get("", "resp_1") is live


async def test_a_forgotten_response_is_told_to_its_end(runs: BackgroundRuns) -> None:
    live = begin(runs, run := PlayedRun())
    following = asyncio.ensure_future(told(live))
    run.start()

    runs.forget("", "resp_1")
    runs.forget("", "resp_1")

    assert runs.get("", "resp_1") is None
    run.complete()
    assert await following == run.said


# --- Closing -------------------------------------------------------------------------------------


async def test_closing_ends_all_runs_and_their_responses_fail(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runs = BackgroundRuns()
    played = [PlayedRun(f"resp_{number}") for number in range(3)]
    lives = [begin(runs, run) for run in played]
    following = [asyncio.ensure_future(told(live)) for live in lives]
    played[0].start()
    played[1].start()
    played[1].complete()
    await let_the_loop_turn()

    await runs.close()

    assert [live.response.status for live in lives] == ["failed", "completed", "failed"]
    assert error_of(lives[0]) == error_of(lives[2]) == STOPPED
    assert all(run.is_over for run in played)
    for live, events in zip(lives, await asyncio.gather(*following), strict=True):
        assert events[-1].response == live.response  # type: ignore[union-attr]
    assert runs.get("", "resp_0") is None
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_run_that_did_not_begin_is_begun_so_that_it_can_be_closed() -> None:
    runs = BackgroundRuns()
    live = begin(runs, run := PlayedRun())

    await runs.close()

    assert run.has_begun
    assert run.is_over
    assert error_of(live) == STOPPED


async def test_closing_waits_for_what_runs_have_to_do_at_their_end() -> None:
    runs = BackgroundRuns()
    may_end = asyncio.Event()
    run = PlayedRun()

    async def events() -> AsyncGenerator[ServerEvent, None]:
        try:
            async with aclosing(run.events()) as events:
                async for event in events:
                    yield event
        finally:
            await may_end.wait()

    live = runs.start("", run.response, events(), run.cancel)
    await let_the_loop_turn()
    closing = asyncio.ensure_future(runs.close())
    await let_the_loop_turn()
    assert not closing.done()
    assert not live.is_finished

    may_end.set()
    await closing

    assert live.is_finished


async def test_closed_runs_take_no_other() -> None:
    runs = BackgroundRuns()
    await runs.close()
    await runs.close()

    with pytest.raises(RuntimeError, match="closed"):
        begin(runs, PlayedRun())


async def test_runs_that_were_never_closed_end_with_the_loop() -> None:
    """A server without life-span events is never told to close."""
    begin(BackgroundRuns(), PlayedRun())
    await let_the_loop_turn()
