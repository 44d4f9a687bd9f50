"""An independent judge of event streams, for captured wire frames as well as for our own structs.

The order of events is a regular language, so it is checked as one: every event becomes a word and
the stream a sentence. What the events carry is compared afterwards. Nothing here is shared with the
implementation.

Acknowledgements (``response.steer.*``, ``response.inject.*``) belong to the response, whose numbers
they take, but not to its sentence: they are judged by themselves.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

Event: TypeAlias = dict[str, Any]

_WORDS = {
    "response.created": "created",
    "response.queued": "queued",
    "response.in_progress": "in_progress",
    "response.done": "done",
    "response.completed": "end",
    "response.incomplete": "end",
    "response.failed": "end",
    "response.output_item.done": "item_done",
    "response.content_part.done": "part_done",
    "response.output_text.delta": "text",
    "response.output_text.done": "text_done",
    "response.refusal.delta": "refusal",
    "response.refusal.done": "refusal_done",
    "response.reasoning_text.delta": "reasoning",
    "response.reasoning_text.done": "reasoning_done",
    "response.reasoning_summary_part.done": "summary_part_done",
    "response.reasoning_summary_text.delta": "summary",
    "response.reasoning_summary_text.done": "summary_done",
    "response.function_call_arguments.delta": "arguments",
    "response.function_call_arguments.done": "arguments_done",
    "response.custom_tool_call_input.delta": "input",
    "response.custom_tool_call_input.done": "input_done",
    "response.compaction.compacting": "compacting",
}
_OPENINGS = {
    "response.output_item.added": ("item", "item"),
    "response.content_part.added": ("part", "part"),
    "response.reasoning_summary_part.added": ("summary", "part"),
}
_TEXT = "part:output_text (?:text )*text_done part_done "
_REFUSAL = "part:refusal (?:refusal )*refusal_done part_done "
_THOUGHTS = "part:reasoning_text (?:reasoning )*reasoning_done part_done "
_SUMMARY = "summary:summary_text (?:summary )*summary_done summary_part_done "
_ITEMS = (
    f"item:message (?:{_TEXT}|{_REFUSAL})+item_done ",
    f"item:reasoning (?:(?:{_THOUGHTS})+|(?:{_SUMMARY})+)item_done ",
    "item:function_call (?:arguments )*arguments_done item_done ",
    "item:custom_tool_call (?:input )*input_done item_done ",
    "item:compaction compacting item_done ",
)
_STARTED = f"in_progress (?:{'|'.join(_ITEMS)}|done (?!done ))*end "
_STREAM = re.compile(f"created (?:{_STARTED}|queued (?:{_STARTED}|end ))")
_STEER = re.compile(r"\.accepted (?:\.pending )?(?:\.failed )?")

_EMPTY_PARTS: dict[str, Event] = {
    "output_text": {"text": "", "annotations": [], "logprobs": []},
    "refusal": {"refusal": ""},
    "reasoning_text": {"text": ""},
    "summary_text": {"text": ""},
}
_EMPTY_ITEMS: dict[str, Event] = {
    "message": {"role": "assistant", "content": []},
    "reasoning": {"content": [], "summary": []},
    "function_call": {"arguments": ""},
    "custom_tool_call": {"input": ""},
    "compaction": {"encrypted_content": ""},
}
_ENDS = {
    "response.completed": ("completed",),
    "response.incomplete": ("incomplete", "cancelled"),  # no event says cancelled
    "response.failed": ("failed",),
}
_REASONS = ("max_output_tokens", "content_filter", "steered")


def check_stream(events: Sequence[Event]) -> None:
    """Check the whole stream of one response, with or without ``response.done`` between segments.

    Raises:
        AssertionError: which says what is wrong.
    """
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(len(events))), f"not numbered from 0 in steps of 1: {numbers}"
    lanes = {event.get("stream_id") for event in events}
    assert len(lanes) == 1, f"one response, one lane: {lanes}"
    assert events[0]["type"] == "response.created", "a stream starts with response.created"
    padded = {event["type"] for event in events if "obfuscation" in event}
    assert all(name.endswith(".delta") for name in padded), f"only deltas are padded: {padded}"
    told = [event for event in events if not _is_acknowledgement(event)]
    sentence = "".join(f"{_word(event)} " for event in told)
    assert _STREAM.fullmatch(sentence), f"no sentence of the grammar: {sentence}"
    _check_lifecycle(told)
    _check_items(told)
    _check_terminal(told[-1]["type"], told[-1]["response"])
    _check_acknowledgements(events)


def _is_acknowledgement(event: Event) -> bool:
    event_type: str = event["type"]
    return event_type.startswith(("response.steer.", "response.inject."))


def _word(event: Event) -> str:
    if event["type"] in _OPENINGS:
        word, member = _OPENINGS[event["type"]]
        return f"{word}:{event[member]['type']}"
    return _WORDS.get(event["type"], f"?{event['type']}")


# --- Lifecycle events ----------------------------------------------------------------------------


def _check_lifecycle(events: Sequence[Event]) -> None:
    ids = {event["response"]["id"] for event in events if "response" in event}
    assert len(ids) == 1, f"one response, one id: {ids}"
    is_queued = events[1]["type"] == "response.queued"
    _check_beginning(events[: 2 if is_queued else 1], "queued" if is_queued else "in_progress")
    _check_beginning(
        [event for event in events if event["type"] == "response.in_progress"], "in_progress"
    )
    for event in events:
        if event["type"] == "response.done":
            response = event["response"]
            assert response["status"] == "in_progress", "a suspended response is in progress"
            assert response["usage"] is not None, "a segment has its usage"


def _check_beginning(events: Iterable[Event], status: str) -> None:
    for event in events:
        response = event["response"]
        assert response["status"] == status, f"{event['type']} with status {response['status']}"
        assert response["output"] == [], "a response starts without output"
        assert response["usage"] is None, "a response starts without usage"


def _check_terminal(event_type: str, response: Event) -> None:
    status = response["status"]
    assert status in _ENDS[event_type], f"{event_type} with status {status}"
    for member, has_it in (
        ("completed_at", status == "completed"),
        ("incomplete_details", status == "incomplete"),
        ("error", status == "failed"),
    ):
        assert (response[member] is not None) == has_it, f"{member} does not go with {status}"
    if status == "incomplete":
        reason = response["incomplete_details"]["reason"]
        assert reason in _REASONS, f"unknown reason: {reason}"
    usage = response["usage"]
    assert usage or status in ("failed", "cancelled"), f"{status} without usage"
    assert not usage or usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    statuses = [item["status"] for item in response["output"]]
    assert status != "completed" or "incomplete" not in statuses, "completed with a torn item"
    assert "incomplete" not in statuses[:-1], "only the last item can be torn"


# --- Items and their parts -----------------------------------------------------------------------


def _check_items(events: Sequence[Event]) -> None:
    """Check that items are dense in order and that every snapshot holds those finished by then."""
    finished: list[Event] = []
    of_item: list[Event] = []
    for event in events:
        if "response" in event:
            assert event["response"]["output"] == finished, "output differs from the done items"
            continue
        index = event["output_index"]
        assert index == len(finished), f"output_index {index} after {len(finished)} items"
        of_item.append(event)
        if event["type"] == "response.output_item.done":
            finished.append(_check_item(of_item))
            of_item = []
    for member in ("id", "call_id"):
        values = [item[member] for item in finished if member in item]
        assert len(set(values)) == len(values), f"values of {member} repeat: {values}"


def _check_item(events: Sequence[Event]) -> Event:
    """Check the events from ``added`` to ``done`` of one item and return the finished item."""
    added: Event = events[0]["item"]
    done: Event = events[-1]["item"]
    inner = events[1:-1]
    assert added | _EMPTY_ITEMS[added["type"]] == added, f"an added {added['type']} is empty"
    assert added["status"] == "in_progress", "an added item is in progress"
    assert done["status"] in ("completed", "incomplete"), "a done item is not in progress"
    assert all(event["item_id"] == added["id"] for event in inner), "foreign item_id"
    written = _written(added, done, inner)
    assert done == added | {"status": done["status"]} | written, f"{added['type']} differs"
    return done


def _written(added: Event, done: Event, inner: Sequence[Event]) -> Event:
    """Return the members that the finished item has to have got since it was added."""
    sealed = {"encrypted_content": done["encrypted_content"]} if "encrypted_content" in done else {}
    assert all(sealed.values()), "a finished seal is not empty"
    match added["type"]:
        case "message":
            return {"content": _check_parts(inner, "content_index")}
        case "reasoning" if "summary_index" in inner[0]:
            return sealed | {"summary": _check_parts(inner, "summary_index")}
        case "reasoning":
            return sealed | {"content": _check_parts(inner, "content_index")}
        case "compaction":
            return sealed
        case "function_call":
            assert inner[-1]["name"] == added["name"], "arguments.done names another function"
            return {"arguments": _check_done(inner, "arguments")}
        case _:
            return {"input": _check_done(inner, "input")}


def _check_parts(events: Sequence[Event], index: str) -> list[Event]:
    """Check the parts of an item and return them finished."""
    finished: list[Event] = []
    of_part: list[Event] = []
    for event in events:
        assert event[index] == len(finished), f"{index} {event[index]} after {len(finished)} parts"
        of_part.append(event)
        if event["type"].endswith("part.done"):
            finished.append(_check_part(of_part))
            of_part = []
    return finished


def _check_part(events: Sequence[Event]) -> Event:
    """Check the events from ``added`` to ``done`` of one part and return the finished part."""
    *told, done = events
    added: Event = told[0]["part"]
    empty = _EMPTY_PARTS[added["type"]]
    assert added == {"type": added["type"]} | empty, "an added part is empty"
    text = "refusal" if "refusal" in empty else "text"
    part = added | {text: _check_done(told, text)}
    if "logprobs" in empty:
        part["logprobs"] = [entry for event in told[1:-1] for entry in event["logprobs"]]
        assert told[-1]["logprobs"] == part["logprobs"], "logprobs differ from those of the deltas"
    assert done["part"] == part, "part.done differs from its deltas"
    return part


def _check_done(events: Sequence[Event], member: str) -> str:
    """Check that the deltas among ``events`` add up to what the last event says is done."""
    text = "".join(event["delta"] for event in events if event["type"].endswith(".delta"))
    assert events[-1][member] == text, f"{events[-1]['type']} differs from its deltas"
    return text


# --- Acknowledgements ----------------------------------------------------------------------------


def _check_acknowledgements(events: Sequence[Event]) -> None:
    response_id = events[0]["response"]["id"]
    lives: defaultdict[str, str] = defaultdict(str)
    told: list[Event] = []
    for event in events:
        if not _is_acknowledgement(event):
            told.append(event)
            continue
        target = event.get("response_id") or event["steer"]["previous_response_id"]
        assert target == response_id, f"acknowledges what was sent to {target}"
        if event["type"] == "response.steer.pending":
            _check_pending(event, told)
        if steer_id := event.get("steer", {}).get("id"):
            lives[steer_id] += event["type"].removeprefix("response.steer") + " "
    for steer_id, life in lives.items():
        assert _STEER.fullmatch(life), f"no life of a steer: {steer_id}: {life}"


def _check_pending(pending: Event, told: Sequence[Event]) -> None:
    """Check what a steer waits for when ``told`` is what the client knows of the response.

    Where outputs are injected, no event says that the response has stopped for them.
    """
    assert _word(told[-1]) in ("item_done", "done", "end"), "a steer is pending at a stop only"
    done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    calls = [_stub(item) for item in done if "call_id" in item]
    required = pending["required_input"]
    assert required, "a pending steer waits for something"
    assert all(stub in calls for stub in required), f"no calls of the response: {required}"


def _stub(call: Event) -> Event:
    """Return what ``call`` asks the client for."""
    stub = {"type": f"{call['type']}_output", "call_id": call["call_id"]}
    return stub | {"name": call["name"]} if call["type"] == "function_call" else stub
