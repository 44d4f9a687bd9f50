"""Event streams are read as WHATWG HTML, 9.2.6, has it: what is legal there is no fault."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.conformance.server_sent_events import EventReader, sent_events

STREAM = (
    b"\xef\xbb\xbf: a comment\n\n"
    b"event: one\r\ndata:two\r\ndata: lines\r\n: a comment\r\n\r\n"
    b"id: 7\nretry: 10\n\n"
    b"data: \xc3\xa9\xe2\x80\xa8\xc2\x85\r\rdata\n\ndata: [DONE]\n\n"
    b"data: without an end\n"
)
EVENTS = [
    (("event", "one"), ("data", "two"), ("data", "lines")),
    (("data", "é\u2028\u0085"),),
    (("data", ""),),
    (("data", "[DONE]"),),
]


@settings(deadline=None)
@given(st.lists(st.integers(1, len(STREAM)), unique=True).map(sorted))
def test_events_are_the_same_however_the_stream_is_cut(cuts: list[int]) -> None:
    reader = EventReader()
    bounds = [0, *cuts, len(STREAM)]

    events = [event for begin, end in pairwise(bounds) for event in reader.feed(STREAM[begin:end])]

    assert [event.fields for event in events] == EVENTS


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_an_event_comes_as_soon_as_its_last_line_ends(end: bytes) -> None:
    reader = EventReader()

    assert reader.feed(b"data: 1" + end) == []
    assert [event.data for event in reader.feed(end[:1])] == ["1"]


def test_a_line_end_is_one_though_nothing_comes_between_its_halves() -> None:
    reader = EventReader()

    assert reader.feed(b"data: 1\r") == reader.feed(b"") == reader.feed(b"\n") == []
    assert [event.data for event in reader.feed(b"data: 2\r\n\r\n")] == ["1\n2"]


@pytest.mark.parametrize(
    ("body", "data"),
    [
        (b"data: 1\r\n\r\ndata: 2\r\n\r\n", ["1", "2"]),
        (b"data: 1\r\rdata: 2\r\r", ["1", "2"]),
        (b"data: 1\n\r\n", ["1"]),
        (
            "data: a\u2028\n\ndata: b\u0085\n\ndata: c\x0b\x0c\n\n".encode(),
            ["a\u2028", "b\u0085", "c\x0b\x0c"],
        ),
        (b"retry: 1000\n\nretry: 1\ndata: 1\n\n", ["1"]),
        (b": beat\n\n:\ndata: 1\n: beat\n\n", ["1"]),
        (b"\xef\xbb\xbfdata: 1\n\n", ["1"]),
        (b"data: {\ndata: }\n\n", ["{\n}"]),
        (b"data:1\n\ndata:  1\n\n", ["1", " 1"]),
        (b"data: 1\n", []),
        (b"data: 1", []),
        (b"data: 1\n\ndata: 2\n", ["1"]),
        (b"event: x\n\ndata: \xff\n\n", ["\ufffd"]),
    ],
)
def test_what_is_legal_is_read(body: bytes, data: list[str]) -> None:
    assert [event.data for event in sent_events(body)] == data
