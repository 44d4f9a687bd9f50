"""Events are cut out of a stream as WHATWG HTML, 9.2.6, has it."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sampler.engines.endpoint import server_sent_events
from sampler.engines.endpoint.server_sent_events import (
    EventParser,
    EventTooLongError,
    ServerSentEvent,
)

STREAM = (
    b"\xef\xbb\xbf: a comment\n\n"
    b'data: {"a": 1}\n\n'
    b"event: error\r\ndata:two\r\ndata: lines\r\n\r\n"
    b"id: 7\nretry: 10\n\n"
    b"data: \xc3\xa9\r\rdata\n\ndata: [DONE]\n\n"
    b"data: without an end\n"
)
EVENTS = [
    ServerSentEvent("message", b'{"a": 1}'),
    ServerSentEvent("error", b"two\nlines"),
    ServerSentEvent("message", "é".encode()),
    ServerSentEvent("message", b""),
    ServerSentEvent("message", b"[DONE]"),
]


@settings(deadline=None)
@given(st.lists(st.integers(1, len(STREAM)), unique=True).map(sorted))
def test_events_are_the_same_however_the_stream_is_cut(cuts: list[int]) -> None:
    parser = EventParser()
    bounds = [0, *cuts, len(STREAM)]

    events = [event for begin, end in pairwise(bounds) for event in parser.feed(STREAM[begin:end])]

    assert events == EVENTS


def test_an_event_comes_with_its_last_byte() -> None:
    parser = EventParser()

    assert parser.feed(b"data: 1\n") == []
    assert parser.feed(b"\n") == [ServerSentEvent("message", b"1")]


def test_an_event_without_end_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_sent_events, "MAX_EVENT_BYTES", 100)
    parser = EventParser()
    parser.feed(b"data: " + 90 * b"x")

    with pytest.raises(EventTooLongError):
        parser.feed(10 * b"x")
