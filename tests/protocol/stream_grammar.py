"""An independent judge of event streams, for captured wire frames as well as for our own structs.

The order of events is a regular language, so it is checked as one: every event becomes a letter and
the stream a word. What the letters carry is compared afterwards. Nothing here is shared with the
implementation.
"""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any, TypeAlias

Event: TypeAlias = dict[str, Any]

_LETTERS = {
    "response.created": "C",
    "response.in_progress": "I",
    "response.done": "D",
    "response.completed": "T",
    "response.incomplete": "T",
    "response.failed": "T",
    "response.content_part.added": "p",
    "response.output_text.delta": "t",
    "response.output_text.done": "u",
    "response.content_part.done": "q",
    "response.function_call_arguments.delta": "g",
    "response.function_call_arguments.done": "h",
    "response.output_item.done": "o",
}
_MESSAGE = "Mpt*uqo"
_CALL = "Fg*ho"
_STREAM = re.compile(f"CI(?:{_MESSAGE}|{_CALL}|D(?!D))*T")
_PART = {"type": "output_text", "annotations": [], "logprobs": []}


def check_stream(events: Sequence[Event]) -> None:
    """Check the whole stream of one response, with or without ``response.done`` between segments.

    Raises:
        AssertionError: which says what is wrong.
    """
    word = "".join(map(_letter, events))
    assert _STREAM.fullmatch(word), f"no sentence of the grammar: {word}"
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(len(events))), f"not numbered from 0 in steps of 1: {numbers}"
    _check_beginning(events)
    _check_output(events)
    _check_terminal(events[-1]["type"], events[-1]["response"])


def _letter(event: Event) -> str:
    if event["type"] == "response.output_item.added":
        return {"message": "M", "function_call": "F"}.get(event["item"]["type"], "?")
    return _LETTERS.get(event["type"], "?")


def _check_beginning(events: Sequence[Event]) -> None:
    for event in events[:2]:
        response = event["response"]
        assert response["status"] == "in_progress", "a response starts in progress"
        assert response["output"] == [], "a response starts without output"
        assert response["usage"] is None, "a response starts without usage"
    ids = {event["response"]["id"] for event in events if "response" in event}
    assert len(ids) == 1, f"one response, one id: {ids}"


def _check_output(events: Sequence[Event]) -> None:
    """Check that items are dense in order and that every snapshot holds those finished by then."""
    finished: list[Event] = []
    for index, group in groupby(events[2:], key=lambda event: event.get("output_index")):
        if index is None:
            for event in group:
                assert event["response"]["output"] == finished, "output differs from the done items"
                assert event["type"] != "response.done" or _is_pause(event["response"])
        else:
            assert index == len(finished), f"output_index {index} after {len(finished)} items"
            finished.append(_check_item(list(group)))
    ids = [item["id"] for item in finished]
    assert len(set(ids)) == len(ids), f"item ids repeat: {ids}"
    call_ids = [item["call_id"] for item in finished if item["type"] == "function_call"]
    assert len(set(call_ids)) == len(call_ids), f"call ids repeat: {call_ids}"


def _is_pause(response: Event) -> bool:
    return response["status"] == "in_progress" and response["usage"] is not None


def _check_item(events: Sequence[Event]) -> Event:
    """Check the events from ``added`` to ``done`` of one item and return the finished item."""
    added: Event = events[0]["item"]
    done: Event = events[-1]["item"]
    assert added["status"] == "in_progress", "an added item is in progress"
    assert done["status"] in ("completed", "incomplete"), "a done item is not in progress"
    assert all(event["item_id"] == added["id"] for event in events[1:-1]), "foreign item_id"
    deltas = "".join(event["delta"] for event in events if event["type"].endswith(".delta"))
    check = _check_message if added["type"] == "message" else _check_call
    check(events, added, done, deltas)
    return done


def _check_message(events: Sequence[Event], added: Event, done: Event, deltas: str) -> None:
    part = _PART | {"text": deltas}
    assert added["content"] == [], "an added message is empty"
    assert done == added | {"status": done["status"], "content": [part]}, "message differs"
    assert events[1]["part"] == _PART | {"text": ""}, "an added part is empty"
    assert events[-3]["text"] == deltas, "output_text.done differs from its deltas"
    assert events[-2]["part"] == part, "content_part.done differs from its deltas"
    assert all(event["content_index"] == 0 for event in events[1:-1]), "a message has one part"


def _check_call(events: Sequence[Event], added: Event, done: Event, deltas: str) -> None:
    assert added["arguments"] == "", "an added call has no arguments"
    assert done == added | {"status": done["status"], "arguments": deltas}, "call differs"
    assert events[-2]["arguments"] == deltas, "arguments.done differs from its deltas"
    assert events[-2]["name"] == added["name"], "arguments.done names another function"


def _check_terminal(event_type: str, response: Event) -> None:
    status = event_type.removeprefix("response.")
    assert response["status"] == status, f"{event_type} with status {response['status']}"
    for member, has_it in (
        ("completed_at", status == "completed"),
        ("incomplete_details", status == "incomplete"),
        ("error", status == "failed"),
    ):
        assert (response[member] is not None) == has_it, f"{member} does not go with {status}"
    if status != "failed":
        usage = response["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    statuses = [item["status"] for item in response["output"]]
    assert status != "completed" or "incomplete" not in statuses, "completed with a torn item"
    assert "incomplete" not in statuses[:-1], "only the last item can be torn"
