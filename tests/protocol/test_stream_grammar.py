"""The judge itself: it accepts what is right and notices every way to be wrong."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from protocol.response_stream import ResponseStream
from tests.protocol.stream_grammar import Event, check_stream
from tests.protocol.streams import USAGE, frames, new_stream, two_segments


def good_stream() -> list[Event]:
    return frames(two_segments(new_stream()))


def renumbered(events: list[Event]) -> list[Event]:
    return [event | {"sequence_number": number} for number, event in enumerate(events)]


def test_a_stream_of_two_segments_is_accepted() -> None:
    check_stream(good_stream())


def test_the_same_stream_without_done_is_accepted() -> None:
    check_stream(renumbered([e for e in good_stream() if e["type"] != "response.done"]))


@pytest.mark.parametrize(
    "end",
    [
        lambda s: s.complete(USAGE, None, 2),
        lambda s: s.incomplete("max_output_tokens", USAGE),
        lambda s: s.fail("server_error", "oops"),
    ],
)
def test_every_end_is_accepted(end: Callable[[ResponseStream], Any]) -> None:
    stream = new_stream()

    check_stream(frames([*stream.start(), *stream.text_delta("a"), *end(stream)]))


@pytest.mark.parametrize("index", range(22))
def test_no_event_can_be_missing(index: int) -> None:
    events = good_stream()
    optional = (".delta", "response.done")

    del events[index]

    with pytest.raises(AssertionError):
        check_stream(events)
    if not good_stream()[index]["type"].endswith(optional):
        with pytest.raises(AssertionError, match="no sentence"):
            check_stream(renumbered(events))


@pytest.mark.parametrize("index", range(22))
def test_no_event_can_come_twice(index: int) -> None:
    events = good_stream()

    events.insert(index, events[index])

    with pytest.raises(AssertionError):
        check_stream(renumbered(events))


def set_in(events: list[Event], event_type: str, path: list[Any], value: Any) -> None:
    """Overwrite a member in the last event of ``event_type``."""
    place: Any = [event for event in events if event["type"] == f"response.{event_type}"][-1]
    for step in path[:-1]:
        place = place[step]
    assert place[path[-1]] != value
    place[path[-1]] = value


@pytest.mark.parametrize(
    ("event_type", "path", "value"),
    [
        ("created", ["response", "status"], "completed"),
        ("created", ["response", "output"], [1]),
        ("in_progress", ["response", "usage"], {}),
        ("in_progress", ["response", "id"], "resp_2"),
        ("completed", ["response", "id"], "resp_2"),
        ("done", ["response", "status"], "completed"),
        ("done", ["response", "usage"], None),
        ("done", ["response", "output"], []),
        ("output_item.added", ["item", "type"], "new"),
        ("output_item.added", ["item", "status"], "completed"),
        ("output_item.added", ["item", "content"], [1]),
        ("output_item.added", ["output_index"], 7),
        ("output_item.done", ["item", "id"], "msg_9"),
        ("output_item.done", ["item", "status"], "in_progress"),
        ("output_item.done", ["item", "content", 0, "text"], "Sun."),
        ("content_part.added", ["part", "text"], "Rain."),
        ("content_part.added", ["content_index"], 1),
        ("content_part.done", ["part", "text"], "Sun."),
        ("output_text.delta", ["item_id"], "msg_9"),
        ("output_text.delta", ["delta"], "Sun."),
        ("output_text.done", ["text"], "Sun."),
        ("function_call_arguments.done", ["arguments"], "{}"),
        ("function_call_arguments.done", ["name"], "f"),
        ("function_call_arguments.delta", ["delta"], "{}"),
        ("completed", ["response", "status"], "failed"),
        ("completed", ["response", "completed_at"], None),
        ("completed", ["response", "error"], {"code": "x"}),
        ("completed", ["response", "incomplete_details"], {"reason": "x"}),
        ("completed", ["response", "usage", "total_tokens"], 1),
        ("completed", ["response", "output", 0, "content"], []),
        ("completed", ["sequence_number"], 9),
    ],
)
def test_a_wrong_member_is_noticed(event_type: str, path: list[Any], value: Any) -> None:
    events = good_stream()

    set_in(events, event_type, path, value)

    with pytest.raises(AssertionError):
        check_stream(events)


@pytest.mark.parametrize("member", ["id", "call_id"])
def test_a_repeated_id_is_noticed(member: str) -> None:
    events = deepcopy(good_stream())
    calls = [e["item"] for e in events if e.get("item", {}).get("type") == "function_call"]
    finished = [item for e in events for item in e.get("response", {}).get("output", ())]
    first, second = calls[0]["id"], calls[-1]["id"]
    for item in [*calls, *finished]:
        if item["id"] == second:
            item[member] = calls[0][member]
    for event in events:
        if event.get("item_id") == second and member == "id":
            event["item_id"] = first

    with pytest.raises(AssertionError, match="repeat"):
        check_stream(events)
