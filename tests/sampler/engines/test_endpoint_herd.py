"""Many runs at one endpoint: they share what it allows, and none is lost."""

import asyncio
import time
from collections import Counter
from typing import Any

import pytest

from protocol.validation import JsonObject
from tests.sampler.engines.fake_endpoint import (
    DEADLINE_SECONDS,
    FakeEndpoint,
    Script,
    breaks,
    deltas,
    refuses,
    says,
    waits,
)
from tests.sampler.engines.test_endpoint import events_of, talking, text_in

NUM_RUNS = 50
NUM_PLACES = 8


class BusyEndpoint:
    """What a fake says that answers few at a time, and refuses all others."""

    def __init__(self, fake: FakeEndpoint, refusal: Script) -> None:
        self.in_flight: list[int] = []
        """How many requests were there when each came, itself included."""
        self.num_refused = 0
        self._fake = fake
        self._refusal = refusal

    def __call__(self, body: JsonObject) -> Script:
        self.in_flight.append(self._fake.in_flight)
        if self._fake.in_flight > NUM_PLACES:
            self.num_refused += 1
            return self._refusal
        return [*waits(0.01), *says(name_of(body))]


def name_of(body: JsonObject) -> str:
    """Return which run it is that asks."""
    return str(body["messages"][0]["content"])


async def test_no_more_are_in_flight_than_allowed_and_the_first_come_is_served_first() -> None:
    async with talking(max_concurrent=4) as (fake, endpoint):
        fake.answer = lambda body: [*waits(0.002), *says(name_of(body))]
        names = [f"run {number}" for number in range(20)]
        answers = await asyncio.gather(*(events_of(endpoint, name) for name in names))

        assert [text_in(answer) for answer in answers] == names
        assert fake.max_in_flight == 4
        # Four at once race for their connections, and come in order by and large.
        came = [names.index(name_of(request.body)) for request in fake.requests]
        assert all(abs(number - place) < 4 for place, number in enumerate(came))


REFUSALS = {
    "for a while": refuses(429, retry_after_ms="60"),
    "for who knows how long": refuses(429),
    "in the stream": breaks(429),
    "in the stream after a role": [*deltas({"role": "assistant"}), *breaks(429)],
}


@pytest.mark.slow
@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
async def test_a_storm_of_refusals_loses_nobody_and_does_not_come_again(refusal: Script) -> None:
    async with talking(
        max_concurrent=64, patience_seconds=DEADLINE_SECONDS, backoff_seconds=0.1
    ) as (fake, endpoint):
        busy = fake.answer = BusyEndpoint(fake, refusal)
        names = [f"run {number}" for number in range(NUM_RUNS)]
        answers = await asyncio.wait_for(
            asyncio.gather(*(events_of(endpoint, name) for name in names)), DEADLINE_SECONDS
        )

        assert [text_in(answer) for answer in answers] == names
        assert busy.num_refused > NUM_RUNS / 2, "there was a storm"
        assert len(fake.requests) < 3 * NUM_RUNS
        assert max(busy.in_flight[NUM_RUNS:]) <= NUM_RUNS / 2, "no second herd"
        assert endpoint.rate_limited == endpoint.retries == busy.num_refused
        assert endpoint.failures == 0


@pytest.mark.slow
@pytest.mark.parametrize("told", [{"retry_after": "0"}, {"retry_after_ms": "0"}])
async def test_a_herd_that_may_come_again_at_once_does_not(told: dict[str, Any]) -> None:
    opens_at = time.monotonic() + 1.0
    async with talking(patience_seconds=DEADLINE_SECONDS, backoff_seconds=0.2) as (fake, endpoint):
        fake.answer = lambda body: (
            refuses(429, **told) if time.monotonic() < opens_at else says("Hi")
        )
        names = [f"run {number}" for number in range(NUM_PLACES)]
        await asyncio.gather(*(events_of(endpoint, name) for name in names))

        assert NUM_PLACES <= endpoint.rate_limited < 4 * NUM_PLACES
        assert endpoint.failures == 0


async def test_a_refusal_of_one_holds_all_until_its_time() -> None:
    refusal = refuses(429, retry_after_ms="100")
    async with talking(refusal, says("one"), says("two"), max_concurrent=1) as (fake, endpoint):
        answers = await asyncio.gather(events_of(endpoint, "first"), events_of(endpoint, "second"))

    assert [text_in(answer) for answer in answers] == ["one", "two"]
    assert [name_of(request.body) for request in fake.requests] == ["first", "first", "second"]
    assert fake.requests[1].received_at - fake.requests[0].received_at >= 0.1


async def test_where_all_are_refused_once_each_asks_twice() -> None:
    tried = Counter[str]()

    def answer(body: JsonObject) -> Script:
        tried[name_of(body)] += 1
        if tried[name_of(body)] == 1:
            return refuses(429, retry_after_ms="20")
        return says("Hi")

    async with talking() as (fake, endpoint):
        fake.answer = answer
        names = [f"run {number}" for number in range(20)]
        await asyncio.gather(*(events_of(endpoint, name) for name in names))

    assert set(tried.values()) == {2}


async def test_the_trouble_of_one_does_not_hold_the_others() -> None:
    def answer(body: JsonObject) -> Script:
        return refuses(503, retry_after="3600") if name_of(body) == "bad" else says("Hi")

    async with talking(max_concurrent=1) as (fake, endpoint):
        fake.answer = answer
        bad, *good = await asyncio.gather(
            *(events_of(endpoint, name) for name in ["bad", "a", "b"]), return_exceptions=True
        )

    assert isinstance(bad, Exception)
    assert [text_in(events) for events in good if isinstance(events, list)] == ["Hi", "Hi"]


async def test_others_go_while_one_waits_to_be_tried_again() -> None:
    tried = Counter[str]()

    def answer(body: JsonObject) -> Script:
        tried[name_of(body)] += 1
        is_refused = name_of(body) == "first" and tried["first"] == 1
        return refuses(503, retry_after_ms="100") if is_refused else says("Hi")

    async with talking(max_concurrent=1) as (fake, endpoint):
        fake.answer = answer
        await asyncio.gather(events_of(endpoint, "first"), events_of(endpoint, "second"))

    assert [name_of(request.body) for request in fake.requests] == ["first", "second", "first"]
