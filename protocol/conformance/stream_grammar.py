"""An independent judge of event streams, for captured wire frames as well as for our own structs.

The order of events is a regular language, so it is checked as one: every event becomes a word, and
the words of each item are a sentence. Items may be told side by side: their events say by their
``output_index`` which is meant. What the events carry is compared afterwards. Nothing here is
shared with the implementation.

Acknowledgements (``response.steer.*``, ``response.inject.*``) belong to the response, whose numbers
they take, but not to its sentences: they are judged by themselves.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from protocol.conformance.rules import Rule, require
from protocol.conformance.shapes import (
    EVENTS,
    TERMINAL_TYPES,
    Event,
    check_event,
    is_extension,
)

_WORDS = {
    "response.created": "created",
    "response.queued": "queued",
    "response.in_progress": "in_progress",
    "response.done": "done",
    **dict.fromkeys(TERMINAL_TYPES, "end"),
    "response.output_item.done": "item_done",
    "response.content_part.done": "part_done",
    "response.output_text.delta": "text",
    "response.output_text.annotation.added": "annotation",
    "response.output_text.done": "text_done",
    "response.refusal.delta": "refusal",
    "response.refusal.done": "refusal_done",
    "response.reasoning_text.delta": "reasoning",
    "response.reasoning_text.done": "reasoning_done",
    "response.reasoning.delta": "reasoning",
    "response.reasoning.done": "reasoning_done",
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


class _Sentence(NamedTuple):
    """What is said of an item between ``added`` and ``done``."""

    words: "re.Pattern[str]"
    rule: Rule
    shortest: tuple[str, ...]
    """The shortest of it. An end of one of them makes a whole of each beginning."""


_TEXT = "part:output_text (?:(?:text|annotation) )*text_done part_done "
_REFUSAL = "part:refusal (?:refusal )*refusal_done part_done "
_THOUGHTS = "part:reasoning_text (?:reasoning )*reasoning_done part_done "
_SUMMARY = "summary:summary_text (?:summary )*summary_done summary_part_done "
_SENTENCES = {
    "message": _Sentence(
        re.compile(f"(?:{_TEXT}|{_REFUSAL})+"),
        Rule.MESSAGE_EVENTS,
        ("part:output_text text_done part_done ", "part:refusal refusal_done part_done "),
    ),
    # Hosted models that tell nothing of their thoughts say that they had some.
    "reasoning": _Sentence(
        re.compile(f"(?:{_THOUGHTS})*|(?:{_SUMMARY})*"),
        Rule.REASONING_EVENTS,
        ("reasoning_done part_done ", "summary_done summary_part_done "),
    ),
    "function_call": _Sentence(
        re.compile("(?:arguments )*arguments_done "), Rule.CALL_EVENTS, ("arguments_done ",)
    ),
    "custom_tool_call": _Sentence(
        re.compile("(?:input )*input_done "), Rule.CUSTOM_CALL_EVENTS, ("input_done ",)
    ),
    "compaction": _Sentence(re.compile("compacting "), Rule.COMPACTION_EVENTS, ("compacting ",)),
}
# A warm-up may end without having been in progress.
_BEGINNING = re.compile(r"created (?:queued )?in_progress |created (?:queued )?(?=end |\Z)")
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
_REASONS = ("max_output_tokens", "content_filter", "max_messages", "steered")


def check_stream(events: Sequence[Event], *, is_whole: bool = True) -> None:
    """Check the stream of one response, with or without ``response.done`` between segments.

    Args:
        events: of the response, in the order in which they came. Over HTTP an ``error`` may be
            among them.
        is_whole: False if the end has not come: then it has to be how a right stream begins.

    Raises:
        NonconformityError: which says what is wrong, and names the rule.
    """
    for event in events:
        check_event(event)
    numbers = [event["sequence_number"] for event in events if "sequence_number" in event]
    require(
        numbers == list(range(len(numbers))),
        Rule.SEQUENCE_NUMBERS,
        f"not numbered from 0 in steps of 1: {numbers}",
    )
    events = [event for event in events if event["type"] != "error"]
    lanes = {event.get("stream_id") for event in events}
    require(len(lanes) == 1, Rule.ONE_LANE, f"one response on several lanes: {lanes}")
    padded = {event["type"] for event in events if "obfuscation" in event}
    is_right = all(name.endswith(".delta") for name in padded)
    require(is_right, Rule.PADDING, f"not only deltas are padded: {padded}")
    begins = bool(events) and events[0]["type"] == "response.created"
    require(begins, Rule.LIFECYCLE_BEGINS, "a stream starts with response.created")
    events = [event for event in events if not is_extension(event)]
    told = [_with_lists(event) for event in events if not is_acknowledgement(event)]
    _check_order(told, is_whole)
    _check_lifecycle(told)
    _check_items(told)
    if is_whole:
        check_end(told[-1]["response"], told[-1]["type"])
    _check_acknowledgements(events)


def is_acknowledgement(event: Event) -> bool:
    """Tell whether ``event`` answers a steer or an inject."""
    event_type: str = event["type"]
    return event_type.startswith(("response.steer.", "response.inject."))


def target_of(acknowledgement: Event) -> str | None:
    """Return the id of the response that was steered, or injected into; None if none is named."""
    steer: Event = acknowledgement.get("steer", {})
    target: str | None = acknowledgement.get("response_id") or steer.get("previous_response_id")
    return target


# --- The order of the events ---------------------------------------------------------------------


def _is_of_item(event: Event) -> bool:
    return "output_index" in EVENTS[event["type"]]


def _word(event: Event) -> str:
    if event["type"] in _OPENINGS:
        word, member = _OPENINGS[event["type"]]
        return f"{word}:{event[member]['type']}"
    return _WORDS[event["type"]]


def _check_order(events: Sequence[Event], is_whole: bool) -> None:
    words = list(map(_word, events))
    sentence = "".join(f"{word} " for word in words)
    ends = [i for i, word in enumerate(words) if word == "end"]
    is_right = ends == ([len(words) - 1] if is_whole else [])
    require(is_right, Rule.ONE_TERMINAL, f"no sentence that ends once, at its end: {sentence}")
    beginning = _BEGINNING.match(sentence)
    if beginning is None:
        require(False, Rule.LIFECYCLE_BEGINS, f"no sentence that begins so: {sentence}")
        return
    num_begun = len(beginning[0].split())
    _check_items_are_told(events[num_begun:], words[num_begun:])


def _check_items_are_told(events: Sequence[Event], words: Sequence[str]) -> None:
    """Check the sentences of the items, and that nothing is said beside them but their end."""
    said: dict[int, list[str]] = {}  # of the items that are open
    num_added, before = 0, ""
    for event, word in zip(events, words, strict=True):
        index = event["output_index"] if _is_of_item(event) else -1
        if word.startswith("item:"):
            is_new = index not in said
            require(is_new, Rule.ITEMS_CLOSE, f"no sentence, with item {index} added twice")
            message = f"output_index {index} after {num_added} items"
            require(index == num_added, Rule.ITEMS_ARE_DENSE, message)
            said[index] = [word]
            num_added += 1
        elif index in said and word == "item_done":
            _check_sentence(said.pop(index))
        elif index in said:
            said[index].append(word)
        else:
            is_right = not said and (word == "end" or (word == "done" and before != "done"))
            rule = Rule.SUSPENSION if word == "done" else Rule.ITEMS_CLOSE
            place = f"while {len(said)} items are open" if said else "outside an item"
            require(is_right, rule, f"no sentence, with `{word}` {place}: {' '.join(words)}")
        before = word
    for begun in said.values():
        _check_sentence(begun, is_whole=False)


def _check_sentence(words: Sequence[str], *, is_whole: bool = True) -> None:
    """Check what is said of an item, from its first word on."""
    kind = words[0].removeprefix("item:")
    sentence = _SENTENCES.get(kind)
    require(sentence is not None, Rule.KNOWN_EVENT, f"no sentence about an item `{kind}` is known")
    assert sentence is not None
    said = "".join(f"{word} " for word in words[1:])
    ends = [""] if is_whole else _ends(sentence)
    is_right = any(sentence.words.fullmatch(said + end) for end in ends)
    require(is_right, sentence.rule, f"no sentence about a {kind}: {said or 'nothing'}")


def _ends(sentence: _Sentence) -> Iterator[str]:
    for shortest in sentence.shortest:
        words = shortest.split()
        yield from ("".join(f"{word} " for word in words[i:]) for i in range(len(words) + 1))


# --- Lifecycle events ----------------------------------------------------------------------------


def _check_lifecycle(events: Sequence[Event]) -> None:
    responses = [event["response"] for event in events if "response" in event]
    ids = {response["id"] for response in responses if "id" in response}
    require(len(ids) == 1, Rule.ONE_RESPONSE_ID, f"one response, several ids: {ids}")
    second = events[1]["type"] if len(events) > 1 else f"response.{responses[0]['status']}"
    is_queued = second == "response.queued"
    _check_beginning(events[: 2 if is_queued else 1], "queued" if is_queued else "in_progress")
    _check_beginning(
        [event for event in events if event["type"] == "response.in_progress"], "in_progress"
    )
    for event in events:
        if event["type"] == "response.done":
            status = event.get("response", {}).get("status", "in_progress")
            require(status == "in_progress", Rule.SUSPENSION, f"suspended with status {status}")
            usage = event.get("response", {}).get("usage", {})
            require(usage is not None, Rule.SEGMENT_USAGE, "a segment without its usage")


def _check_beginning(events: Iterable[Event], status: str) -> None:
    for event in events:
        for member, value in (("status", status), ("output", []), ("usage", None)):
            found = event["response"].get(member)
            is_right = found == value
            require(is_right, Rule.LIFECYCLE_BEGINS, f"{event['type']} with {member} {found!r}")


def _with_lists(value: Any) -> Any:
    """Return ``value`` with empty lists for log-probabilities that are null: to clients' types
    they are the same."""
    match value:
        case dict():
            return {
                name: [] if name == "logprobs" and member is None else _with_lists(member)
                for name, member in value.items()
            }
        case list():
            return [_with_lists(member) for member in value]
        case _:
            return value


def check_end(response: Event, event_type: str | None = None) -> None:
    """Check that a response that ended agrees with itself, and with its terminal event.

    Raises:
        NonconformityError: which says what is wrong, and names the rule.
    """
    status = response["status"]
    types = [event_type] if event_type else list(_ENDS)
    is_right = any(status in _ENDS[name] for name in types)
    require(is_right, Rule.TERMINAL_STATUS, f"{event_type or 'an end'} with status {status}")
    for member, has_it in (
        # Of an older reference than the others: it may be absent, but not wrong.
        *([("completed_at", status == "completed")] if "completed_at" in response else []),
        ("incomplete_details", status == "incomplete"),
        ("error", status == "failed"),
    ):
        is_right = (response.get(member) is not None) == has_it
        require(is_right, Rule.TERMINAL_STATUS, f"{member} does not go with {status}")
    if status == "incomplete":
        reason = response["incomplete_details"].get("reason")
        require(reason in _REASONS, Rule.TERMINAL_STATUS, f"unknown reason: {reason}")
    has_usage = response.get("usage") is not None or status in ("failed", "cancelled")
    require(has_usage, Rule.TERMINAL_STATUS, f"{status} without usage")
    statuses = [item.get("status") for item in response["output"]]
    is_right = status != "completed" or "incomplete" not in statuses
    require(is_right, Rule.TORN_ITEM, "completed with a torn item")
    require("incomplete" not in statuses[:-1], Rule.TORN_ITEM, "only the last item can be torn")


# --- Items and their parts -----------------------------------------------------------------------


def _check_items(events: Sequence[Event]) -> None:
    """Check each item, and that every snapshot holds those finished by then."""
    told: defaultdict[int, list[Event]] = defaultdict(list)
    finished: dict[int, Event] = {}
    for event in events:
        if not _is_of_item(event):
            output = event.get("response", {}).get("output")
            done = _in_order(finished)
            require(output in (None, done), Rule.TERMINAL_OUTPUT, _differs(output, done))
            continue
        index = event["output_index"]
        told[index].append(event)
        if event["type"] == "response.output_item.done":
            finished[index] = _check_item(told.pop(index))
    for unfinished in told.values():
        _check_unfinished(unfinished)
    for member in ("id", "call_id"):
        values = [item[member] for item in _in_order(finished) if member in item]
        is_right = len(set(values)) == len(values)
        require(is_right, Rule.ITEM_IDENTITY, f"values of {member} repeat: {values}")


def _in_order(finished: Mapping[int, Event]) -> list[Event]:
    return [finished[index] for index in sorted(finished)]


def _differs(output: object, finished: Sequence[Event]) -> str:
    return f"output differs from the done items: {output!r}, done were {list(finished)!r}"


def _check_item(events: Sequence[Event]) -> Event:
    """Check the events from ``added`` to ``done`` of one item and return the finished item."""
    added: Event = events[0]["item"]
    done: Event = events[-1]["item"]
    inner = events[1:-1]
    kind = added["type"]
    _check_begun(added, inner)
    is_over = done.get("status", "completed") in ("completed", "incomplete")
    require(is_over, Rule.TERMINAL_STATUS, f"a done {kind} with status {done.get('status')}")
    for member in ("id", "call_id"):
        is_same = added.get(member) == done.get(member)
        require(is_same, Rule.ITEM_IDENTITY, f"{member} of {added} and of {done}")
    status = {"status": done["status"]} if "status" in done else {}
    expected = added | status | _written(added, done, inner)
    require(
        done == expected,
        Rule.DELTAS_ADD_UP,
        f"the {kind} differs from what was told of it: {done}, told was {expected}",
    )
    return done


def _check_unfinished(events: Sequence[Event]) -> None:
    """Check what was told so far of an item that is not done."""
    added: Event = events[0]["item"]
    inner = events[1:]
    _check_begun(added, inner)
    if added["type"] in ("message", "reasoning"):
        _check_parts(inner, _index_of_parts(inner))


def _check_begun(added: Event, inner: Sequence[Event]) -> None:
    """Check how an item begins, and that the events in it are its own."""
    kind = added["type"]
    is_empty = _is_empty(added, _EMPTY_ITEMS[kind])
    require(is_empty, Rule.ITEM_BEGINS_EMPTY, f"an added {kind} that is not empty: {added}")
    begins = added.get("status", "in_progress") == "in_progress"
    require(begins, Rule.ITEM_BEGINS_EMPTY, f"an added {kind} with status {added.get('status')}")
    ids = {event["item_id"] for event in inner} - {added["id"]}
    require(not ids, Rule.ITEM_IDENTITY, f"foreign ids in {added['id']}: {ids}")


def _is_empty(value: Event, empty: Event) -> bool:
    return all(value.get(member, nothing) == nothing for member, nothing in empty.items())


def _written(added: Event, done: Event, inner: Sequence[Event]) -> Event:
    """Return the members that the finished item has to have got since it was added."""
    sealed = {"encrypted_content": done["encrypted_content"]} if "encrypted_content" in done else {}
    is_sealed = all(value != "" for value in sealed.values())
    require(is_sealed, Rule.DELTAS_ADD_UP, "a finished seal that is empty")
    match added["type"]:
        case "message":
            return {"content": _check_parts(inner, "content_index")}
        case "reasoning" if not inner:
            return sealed
        case "reasoning":
            index = _index_of_parts(inner)
            return sealed | {index.removesuffix("_index"): _check_parts(inner, index)}
        case "compaction":
            return sealed
        case "function_call":
            name = inner[-1].get("name", added["name"])
            require(name == added["name"], Rule.CALL_EVENTS, f"arguments.done names {name}")
            return {"arguments": _check_done(inner, "arguments")}
        case _:
            return {"input": _check_done(inner, "input")}


def _index_of_parts(inner: Sequence[Event]) -> str:
    """Return the member that counts the parts of an item, which are all of one kind."""
    is_summary = any("summary_index" in EVENTS[event["type"]] for event in inner)
    return "summary_index" if is_summary else "content_index"


def _check_parts(events: Sequence[Event], index: str) -> list[Event]:
    """Check the parts of an item and return those that are finished."""
    finished: list[Event] = []
    of_part: list[Event] = []
    for event in events:
        is_right = event[index] == len(finished)
        message = f"{index} {event[index]} after {len(finished)} parts"
        require(is_right, Rule.ITEMS_ARE_DENSE, message)
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
    is_empty = _is_empty(added, empty)
    require(is_empty, Rule.ITEM_BEGINS_EMPTY, f"an added part that is not empty: {added}")
    text = "refusal" if "refusal" in empty else "text"
    part = added | {text: _check_done(told, text)}
    if notes := [event["annotation"] for event in told if "annotation" in event]:
        part["annotations"] = notes
    if "logprobs" in added:
        deltas = [event for event in told if event["type"].endswith(".delta")]
        part["logprobs"] = [entry for event in deltas for entry in event["logprobs"]]
        is_right = told[-1]["logprobs"] == part["logprobs"]
        require(is_right, Rule.DELTAS_ADD_UP, "logprobs differ from those of the deltas")
    is_right = done["part"] == part
    require(is_right, Rule.DELTAS_ADD_UP, f"part.done differs from its deltas: {done['part']}")
    return part


def _check_done(events: Sequence[Event], member: str) -> str:
    """Check that the deltas among ``events`` add up to what the last event says is done."""
    text = "".join(event["delta"] for event in events if event["type"].endswith(".delta"))
    last = events[-1]
    is_right = last[member] == text
    message = f"{last['type']} differs from its deltas: {last[member]!r}, not {text!r}"
    require(is_right, Rule.DELTAS_ADD_UP, message)
    return text


# --- Acknowledgements ----------------------------------------------------------------------------


def _check_acknowledgements(events: Sequence[Event]) -> None:
    response_id = events[0]["response"]["id"]
    lives: defaultdict[str, str] = defaultdict(str)
    told: list[Event] = []
    for event in events:
        if not is_acknowledgement(event):
            told.append(event)
            continue
        target = target_of(event)
        is_right = target == response_id
        require(is_right, Rule.ACKNOWLEDGEMENTS, f"acknowledges what was sent to {target}")
        if event["type"] == "response.steer.pending":
            _check_pending(event, told)
        if steer_id := event.get("steer", {}).get("id"):
            lives[steer_id] += event["type"].removeprefix("response.steer") + " "
    for steer_id, life in lives.items():
        is_right = _STEER.fullmatch(life) is not None
        require(is_right, Rule.ACKNOWLEDGEMENTS, f"no life of a steer: {steer_id}: {life}")


def _check_pending(pending: Event, told: Sequence[Event]) -> None:
    """Check what a steer waits for when ``told`` is what the client knows of the response.

    Where outputs are injected, no event says that the response has stopped for them.
    """
    is_at_stop = _word(told[-1]) in ("item_done", "done", "end")
    require(is_at_stop, Rule.ACKNOWLEDGEMENTS, "a steer is pending at a stop only")
    done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    calls = [_stub(item) for item in done if "call_id" in item]
    required = pending["required_input"]
    require(bool(required), Rule.ACKNOWLEDGEMENTS, "a pending steer waits for nothing")
    is_right = all(stub in calls for stub in required)
    require(is_right, Rule.ACKNOWLEDGEMENTS, f"no calls of the response: {required}")


def _stub(call: Event) -> Event:
    """Return what ``call`` asks the client for."""
    stub = {"type": f"{call['type']}_output", "call_id": call["call_id"]}
    return stub | {"name": call["name"]} if call["type"] == "function_call" else stub
