"""The judge itself: it accepts what is right and notices every way to be wrong."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import pytest

from protocol.conformance.rules import NonconformityError, Rule
from protocol.conformance.shapes import Event
from protocol.conformance.stream_grammar import check_stream
from protocol.response_stream import ResponseStream
from protocol.server_events import FunctionCallOutputStub, ServerEvent
from tests.protocol.streams import USAGE, everything, frames, new_stream, two_segments


@cache
def _played(as_summary: bool) -> list[Event]:
    return frames(everything(new_stream(reasoning_as_summary=as_summary, seals_reasoning=True)))


def good_stream(*, as_summary: bool = False) -> list[Event]:
    return deepcopy(_played(as_summary))


def renumbered(events: list[Event]) -> list[Event]:
    return [event | {"sequence_number": number} for number, event in enumerate(events)]


def is_acknowledgement(event: Event) -> bool:
    return any(event["type"].startswith(f"response.{of}.") for of in ("steer", "inject"))


def without_acknowledgements() -> list[Event]:
    return renumbered([e for e in good_stream() if not is_acknowledgement(e)])


EVENTS = [*enumerate(event["type"].removeprefix("response.") for event in good_stream())]


# --- What is accepted ----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"reasoning_as_summary": True}, {"padding": lambda: "x"}])
@pytest.mark.parametrize("play", [two_segments, everything])
def test_what_the_server_says_is_accepted(
    play: Callable[[ResponseStream], list[ServerEvent]], options: dict[str, Any]
) -> None:
    check_stream(frames(play(new_stream(**options))))


def test_the_same_stream_without_done_is_accepted() -> None:
    check_stream(renumbered([e for e in good_stream() if e["type"] != "response.done"]))


def test_the_same_stream_without_acknowledgements_is_accepted() -> None:
    check_stream(without_acknowledgements())


def test_the_same_stream_on_a_lane_is_accepted() -> None:
    check_stream([event | {"stream_id": "lane"} for event in good_stream()])


@pytest.mark.parametrize(
    "end",
    [
        lambda s: s.complete(USAGE, None, 2),
        lambda s: s.incomplete("max_output_tokens", USAGE),
        lambda s: s.incomplete("steered", USAGE),
        lambda s: s.cancel(USAGE),
        lambda s: s.fail("server_error", "oops"),
    ],
)
def test_every_end_is_accepted(end: Callable[[ResponseStream], list[ServerEvent]]) -> None:
    stream = new_stream()

    check_stream(frames([*stream.start(), *stream.text_delta("a"), *end(stream)]))


def test_an_end_before_the_start_is_accepted() -> None:
    stream = new_stream()

    check_stream(frames([*stream.queue(), *stream.cancel()]))


def test_a_steer_may_be_pending_at_a_silent_pause() -> None:
    stream = new_stream()
    stub = FunctionCallOutputStub("call_1", "weather")

    events = [
        *stream.start(),
        stream.steer_accepted("steer_1"),
        *stream.call_started("call_1", "weather"),
        *stream.pause(),
        stream.steer_pending("steer_1", (stub,)),
        *stream.complete(USAGE, None, 2),
    ]

    check_stream(frames(events))


@pytest.mark.parametrize("as_summary", [False, True])
@pytest.mark.parametrize("num_told", range(1, len(EVENTS)))
def test_every_beginning_is_accepted_as_such(num_told: int, as_summary: bool) -> None:
    events = good_stream(as_summary=as_summary)[:num_told]
    is_whole = any(event["type"] == "response.completed" for event in events)

    check_stream(events, is_whole=is_whole)


def test_items_may_be_told_side_by_side() -> None:
    check_stream(side_by_side())


def side_by_side() -> list[Event]:
    """Return a response of two calls, of which the first is done last."""
    stream = new_stream()
    begun = stream.start()
    first, second = (
        [*stream.call_started(name, "weather"), *stream.arguments_delta("{}"), *stream.call_done()]
        for name in ("call_1", "call_2")
    )
    told = [*begun, *first[:2], *second, *first[2:], *stream.complete(USAGE, None, 2)]
    return renumbered(frames(told))


# --- The sentence --------------------------------------------------------------------------------


@pytest.mark.parametrize(("index", "name"), EVENTS)
def test_no_event_can_be_missing(index: int, name: str) -> None:
    events = good_stream()

    del events[index]

    if index < len(events):
        with pytest.raises(NonconformityError, match="numbered"):
            check_stream(events)
    if not name.startswith(("steer", "inject")) and name not in ("queued", "done"):
        wrong = "differs" if name.endswith(".delta") else "no sentence|starts with"
        with pytest.raises(NonconformityError, match=wrong):
            check_stream(renumbered(events))


@pytest.mark.parametrize(("index", "name"), EVENTS)
def test_no_event_can_come_twice(index: int, name: str) -> None:
    events = good_stream()

    events.insert(index, events[index])

    with pytest.raises(NonconformityError, match="numbered"):
        check_stream(events)
    is_about_nothing = name == "steer.failed" and "id" not in events[index]["steer"]
    if not name.startswith("inject") and not is_about_nothing:
        with pytest.raises(NonconformityError):
            check_stream(renumbered(events))


@pytest.mark.parametrize("index", range(len(without_acknowledgements()) - 1))
def test_no_two_neighbours_of_one_item_can_change_places(index: int) -> None:
    events = without_acknowledgements()
    are_of_two = [events[i].get("output_index") for i in (index, index + 1)] in _PAIRS

    events[index], events[index + 1] = events[index + 1], events[index]

    if are_of_two:
        check_stream(renumbered(events))
        return
    with pytest.raises(NonconformityError):
        check_stream(renumbered(events))


_PAIRS = [[number, number + 1] for number in range(len(EVENTS))]
"""The indexes of items of which one follows the other."""


@pytest.mark.parametrize(
    ("edit", "rule"),
    [
        (lambda events: events.insert(3, events[2]), Rule.ITEMS_CLOSE),  # added twice
        (lambda events: events.insert(8, events[5]), Rule.ITEMS_CLOSE),  # told once it is done
        (lambda events: events.pop(-2), Rule.ITEMS_CLOSE),  # never done
        (lambda events: events.pop(3), Rule.DELTAS_ADD_UP),
        (lambda events: events.pop(5), Rule.DELTAS_ADD_UP),
        (lambda events: events.insert(4, events.pop(2)), Rule.ITEMS_CLOSE),  # told before
        (lambda events: events[-1]["response"]["output"].reverse(), Rule.TERMINAL_OUTPUT),
        (lambda events: events[2].update(output_index=2), Rule.ITEMS_ARE_DENSE),
    ],
)
def test_each_of_two_items_side_by_side_is_judged(
    edit: Callable[[list[Event]], Any], rule: Rule
) -> None:
    events = side_by_side()

    edit(events)

    with pytest.raises(NonconformityError) as caught:
        check_stream(renumbered(events))
    assert caught.value.rule is rule


def beginning(*told: str) -> list[Event]:
    """Return the first three events of a good stream, and then the first of each of those types."""
    events = good_stream()
    first = {event["type"].removeprefix("response."): event for event in events[::-1]}
    return renumbered([*events[:3], *(deepcopy(first[name]) for name in told)])


@pytest.mark.parametrize(
    "told",
    [
        ("function_call_arguments.delta",),
        ("done", "done"),
        ("in_progress",),
        ("output_item.added", "done"),
        ("output_item.added", "output_text.delta"),
        ("output_item.added", "output_item.added"),
        ("output_item.added", "reasoning_text.delta"),
        ("output_item.added", "content_part.added", "content_part.done"),
    ],
)
def test_what_is_no_beginning_is_noticed(told: tuple[str, ...]) -> None:
    with pytest.raises(NonconformityError, match="no sentence"):
        check_stream(beginning(*told), is_whole=False)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["item", "content"], [1]),
        (["item", "status"], "completed"),
        (["item", "id"], "rs_9"),
    ],
)
def test_an_item_that_is_not_done_is_judged(path: list[str], value: Any) -> None:
    names = ("output_item.added", "content_part.added", "reasoning_text.delta")
    events = beginning(*names)
    check_stream(events, is_whole=False)

    set_in(events, names[0], path, value)

    with pytest.raises(NonconformityError):
        check_stream(events, is_whole=False)


def test_a_part_of_an_item_that_is_not_done_is_judged() -> None:
    events = good_stream()
    names = [event["type"] for event in events]
    del events[names.index("response.content_part.done") + 1 :]
    check_stream(events, is_whole=False)

    set_in(events, "content_part.done", ["part", "text"], "Hm.")

    with pytest.raises(NonconformityError, match="differs"):
        check_stream(events, is_whole=False)


def test_an_end_is_none_of_a_beginning() -> None:
    with pytest.raises(NonconformityError, match="ends once"):
        check_stream(good_stream(), is_whole=False)


def test_an_unknown_event_is_noticed() -> None:
    events = good_stream()

    events.insert(5, {"type": "response.telemetry"})

    with pytest.raises(NonconformityError, match="no event of the reference"):
        check_stream(renumbered(events))


def test_an_acknowledgement_before_the_response_is_noticed() -> None:
    events = good_stream()
    index = next(i for i, event in enumerate(events) if is_acknowledgement(event))

    events.insert(0, events.pop(index))

    with pytest.raises(NonconformityError, match="starts with"):
        check_stream(renumbered(events))


# --- What the events carry -----------------------------------------------------------------------


def set_in(events: list[Event], event_type: str, path: list[Any], value: Any) -> None:
    """Overwrite a member in the last event of ``event_type``."""
    place: Any = [event for event in events if event["type"] == f"response.{event_type}"][-1]
    for step in path[:-1]:
        place = place[step]
    assert place.get(path[-1]) != value
    place[path[-1]] = value


@pytest.mark.parametrize(
    ("event_type", "path", "value"),
    [
        ("created", ["response", "status"], "in_progress"),
        ("created", ["response", "output"], [1]),
        ("queued", ["response", "status"], "in_progress"),
        ("in_progress", ["response", "status"], "queued"),
        ("in_progress", ["response", "usage"], {}),
        ("in_progress", ["response", "id"], "resp_2"),
        ("completed", ["response", "id"], "resp_2"),
        ("completed", ["stream_id"], "lane"),
        ("done", ["response", "status"], "completed"),
        ("done", ["response", "usage"], None),
        ("done", ["response", "output"], []),
        ("output_item.added", ["item", "type"], "new"),
        ("output_item.added", ["item", "status"], "completed"),
        ("output_item.added", ["item", "arguments"], "{}"),
        ("output_item.added", ["output_index"], 7),
        ("output_item.done", ["item", "id"], "fc_9"),
        ("output_item.done", ["item", "status"], "in_progress"),
        ("output_item.done", ["item", "arguments"], "{}"),
        ("output_item.done", ["item", "namespace"], "sea"),
        ("output_item.done", ["obfuscation"], "x"),
        ("content_part.added", ["part", "refusal"], "Not "),
        ("content_part.added", ["content_index"], 0),
        ("content_part.done", ["part", "refusal"], "Not"),
        ("content_part.done", ["output_index"], 0),
        ("output_text.delta", ["item_id"], "msg_9"),
        ("output_text.delta", ["delta"], "Last"),
        ("output_text.delta", ["logprobs"], []),
        ("output_text.done", ["text"], "Last"),
        ("output_text.done", ["logprobs"], []),
        ("refusal.delta", ["delta"], "this."),
        ("refusal.done", ["refusal"], "Not this."),
        ("refusal.done", ["content_index"], 0),
        ("reasoning_text.delta", ["delta"], "one thing."),
        ("reasoning_text.done", ["text"], ""),
        ("function_call_arguments.delta", ["delta"], "[]"),
        ("function_call_arguments.done", ["arguments"], "{}"),
        ("function_call_arguments.done", ["name"], "f"),
        ("custom_tool_call_input.delta", ["delta"], "(2)"),
        ("custom_tool_call_input.done", ["input"], ""),
        ("compaction.compacting", ["item_id"], "cmp_9"),
        ("completed", ["response", "status"], "failed"),
        ("completed", ["response", "completed_at"], None),
        ("completed", ["response", "error"], {"code": "x"}),
        ("completed", ["response", "incomplete_details"], {"reason": "x"}),
        ("completed", ["response", "usage"], None),
        ("completed", ["response", "usage", "total_tokens"], 1),
        ("completed", ["response", "output"], []),
        ("completed", ["sequence_number"], 9),
        ("steer.accepted", ["steer", "previous_response_id"], "resp_2"),
        ("steer.accepted", ["steer", "id"], "steer_2"),
        ("steer.pending", ["steer", "id"], "steer_2"),
        ("steer.pending", ["required_input"], []),
        ("steer.pending", ["required_input"], [{"type": "message"}]),
        ("steer.failed", ["steer", "id"], "steer_2"),
        ("inject.created", ["response_id"], "resp_2"),
        ("inject.failed", ["response_id"], "resp_2"),
    ],
)
def test_a_wrong_member_is_noticed(event_type: str, path: list[Any], value: Any) -> None:
    events = good_stream()

    set_in(events, event_type, path, value)

    with pytest.raises(NonconformityError):
        check_stream(events)


@pytest.mark.parametrize(
    ("event_type", "path", "value"),
    [
        ("reasoning_summary_part.added", ["part", "text"], "They"),
        ("reasoning_summary_part.added", ["part", "type"], "reasoning_text"),
        ("reasoning_summary_part.added", ["summary_index"], 1),
        ("reasoning_summary_part.done", ["part", "text"], "They"),
        ("reasoning_summary_text.delta", ["delta"], "one thing."),
        ("reasoning_summary_text.done", ["text"], "They"),
    ],
)
def test_a_wrong_member_of_a_summary_is_noticed(
    event_type: str, path: list[Any], value: Any
) -> None:
    events = good_stream(as_summary=True)

    set_in(events, event_type, path, value)

    with pytest.raises(NonconformityError):
        check_stream(events)


@pytest.mark.parametrize("kind", ["message", "reasoning", "compaction"])
def test_an_item_that_is_not_empty_when_added_is_noticed(kind: str) -> None:
    events = good_stream()
    added = next(e["item"] for e in events if e.get("item", {}).get("type") == kind)

    added |= {"content": [1], "encrypted_content": "x"}

    with pytest.raises(NonconformityError):
        check_stream(events)


@pytest.mark.parametrize("kind", ["reasoning", "compaction"])
def test_a_seal_on_nothing_is_noticed(kind: str) -> None:
    events = good_stream()

    for item in items(events):
        if item["type"] == kind and "encrypted_content" in item:
            item["encrypted_content"] = ""

    with pytest.raises(NonconformityError, match="seal that is empty"):
        check_stream(events)


@pytest.mark.parametrize("member", ["id", "call_id"])
def test_a_repeated_id_is_noticed(member: str) -> None:
    events = good_stream()
    calls = [e["item"] for e in events if e.get("item", {}).get("type") == "function_call"]
    first, last = calls[0][member], calls[-1][member]

    for item in items(events):
        if item.get(member) == last:
            item[member] = first
    for event in events:
        if event.get("item_id") == last:
            event["item_id"] = first

    with pytest.raises(NonconformityError, match="repeat"):
        check_stream(events)


def test_a_steer_that_is_pending_while_the_model_speaks_is_noticed() -> None:
    events = good_stream()
    index, pending = next(
        (i, event) for i, event in enumerate(events) if event["type"] == "response.steer.pending"
    )
    call = max(i for i, e in enumerate(events) if e["type"] == "response.output_item.added")

    del events[index]
    events.insert(call + 1, pending)

    with pytest.raises(NonconformityError, match="at a stop only"):
        check_stream(renumbered(events))


def items(events: list[Event]) -> list[Event]:
    """Return every item in ``events``, those in the snapshots of the response too."""
    single = [event["item"] for event in events if "item" in event]
    return single + [i for event in events for i in event.get("response", {}).get("output", ())]


# --- The end -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "path", "value"),
    [
        (lambda s: s.incomplete("steered", USAGE), ["incomplete_details"], None),
        (lambda s: s.incomplete("steered", USAGE), ["incomplete_details", "reason"], "max_tokens"),
        (lambda s: s.incomplete("steered", USAGE), ["usage"], None),
        (lambda s: s.incomplete("steered", USAGE), ["completed_at"], 2),
        (lambda s: s.incomplete("steered", USAGE), ["status"], "completed"),
        (lambda s: s.cancel(), ["incomplete_details"], {"reason": "steered"}),
        (lambda s: s.cancel(), ["status"], "incomplete"),
        (lambda s: s.fail("server_error", "oops"), ["error"], None),
        (lambda s: s.fail("server_error", "oops"), ["status"], "cancelled"),
    ],
)
def test_an_end_that_contradicts_itself_is_noticed(
    end: Callable[[ResponseStream], list[ServerEvent]], path: list[str], value: Any
) -> None:
    stream = new_stream()
    events = frames([*stream.start(), *end(stream)])
    check_stream(events)

    set_in(events, events[-1]["type"].removeprefix("response."), ["response", *path], value)

    with pytest.raises(NonconformityError):
        check_stream(events)


@pytest.mark.parametrize(
    "ending",
    [
        lambda s: [*s.call_started("c", "f"), *s.complete(USAGE, None, 2)],
        lambda s: [
            *s.call_started("c", "f"),
            *s.call_done(),
            *s.text_delta("a"),
            *s.incomplete("steered", USAGE),
        ],
    ],
)
def test_a_torn_item_elsewhere_than_at_an_early_end_is_noticed(
    ending: Callable[[ResponseStream], list[ServerEvent]],
) -> None:
    stream = new_stream()
    events = frames([*stream.start(), *ending(stream)])
    call_ids = [item["id"] for item in items(events) if item["type"] == "function_call"]

    for event in events:
        finished = [event["item"]] if event["type"] == "response.output_item.done" else []
        for item in [*finished, *event.get("response", {}).get("output", ())]:
            if item["id"] in call_ids:
                item["status"] = "incomplete"

    with pytest.raises(NonconformityError, match="torn"):
        check_stream(events)


# --- What other servers say ----------------------------------------------------------------------


def test_a_warm_up_need_not_be_in_progress() -> None:
    stream = new_stream()
    events = frames([*stream.start(), *stream.complete(USAGE, None, 2)])

    del events[1]

    check_stream(renumbered(events))


def test_reasoning_of_which_nothing_is_told_is_accepted() -> None:
    events = good_stream()
    added, done = (
        next(i for i, e in enumerate(events) if e["type"] == kind and "rs_1" in str(e["item"]))
        for kind in ("response.output_item.added", "response.output_item.done")
    )

    del events[added + 1 : done]
    for item in items(events):
        if item["type"] == "reasoning":
            item["content"] = []

    check_stream(renumbered(events))


def test_reasoning_may_be_told_as_open_responses_calls_it() -> None:
    check_stream(
        [e | {"type": e["type"].replace("reasoning_text", "reasoning")} for e in good_stream()]
    )


def test_annotations_are_those_that_were_told() -> None:
    events = good_stream()
    index = next(i for i, e in enumerate(events) if e["type"] == "response.output_text.done")
    note = {"type": "url_citation", "url": "http://a.test"}
    place = {name: events[index][name] for name in ("item_id", "output_index", "content_index")}
    told = {"type": "response.output_text.annotation.added", "annotation": note}

    events.insert(index, told | place | {"annotation_index": 0})
    with pytest.raises(NonconformityError, match=r"part\.done differs"):
        check_stream(renumbered(events))
    done = next(e["part"] for e in events[index:] if e["type"] == "response.content_part.done")
    said = [i["content"][0] for i in items(events) if i["id"] == place["item_id"] and i["content"]]
    for part in [done, *said]:
        part["annotations"] = [note]

    check_stream(renumbered(events))


def test_events_of_an_extension_are_numbered_and_not_judged() -> None:
    events = good_stream()

    events.insert(5, {"type": "acme:cache_stats"})

    check_stream(renumbered(events))


def test_an_event_of_an_extension_may_come_before_a_steer_is_pending() -> None:
    events = good_stream()
    types = [event["type"] for event in events]

    events.insert(types.index("response.steer.pending"), {"type": "acme:trace"})

    check_stream(renumbered(events))


def test_an_event_names_the_rule_that_is_broken() -> None:
    with pytest.raises(NonconformityError) as caught:
        check_stream(renumbered(good_stream()[1:]))

    assert caught.value.rule is Rule.LIFECYCLE_BEGINS


def without_logprobs(value: Any, *, nothing: list[Any] | None) -> Any:
    """Return ``value`` with ``nothing`` in the place of each list of log-probabilities."""
    if isinstance(value, list):
        return [without_logprobs(member, nothing=nothing) for member in value]
    if isinstance(value, dict):
        return {
            name: nothing if name == "logprobs" else without_logprobs(member, nothing=nothing)
            for name, member in value.items()
        }
    return value


def test_log_probabilities_that_are_null_where_a_part_ends_are_none() -> None:
    events: list[Event] = without_logprobs(good_stream(), nothing=[])
    for event in events:
        if event["type"] == "response.content_part.done":
            event["part"] = without_logprobs(event["part"], nothing=None)

    assert events != without_logprobs(good_stream(), nothing=[])
    check_stream(events)
