"""Faults in the order of a stream."""

from copy import deepcopy
from typing import Any

from protocol.conformance.rules import Rule
from protocol.conformance.shapes import Event
from tests.protocol.conformance.faults.fault import Faults, after, missing, twice, wrong
from tests.protocol.conformance.model_server import ModelServer, Run

faults = Faults()

TEXT = "text-is-told-in-order"
CALL = "call-is-told-in-order"
END = "end-repeats-the-items"

for kind in ("created", "in_progress"):
    faults.telling(f"no {kind}", Rule.LIFECYCLE_BEGINS, TEXT, missing(kind))
faults.telling(
    "a response that begins completed",
    Rule.LIFECYCLE_BEGINS,
    TEXT,
    wrong("created", "response", "status", value="completed"),
)
faults.telling(
    "a response that begins with usage",
    Rule.LIFECYCLE_BEGINS,
    TEXT,
    wrong(
        "created",
        "response",
        "usage",
        value={"input_tokens": 0, "output_tokens": 0, "total_tokens": 0},
    ),
)
faults.telling(
    "usage of one count",
    Rule.RESPONSE_MEMBERS,
    TEXT,
    wrong("completed", "response", "usage", value={"total_tokens": 0}),
)
faults.telling("in_progress twice", Rule.ITEMS_CLOSE, TEXT, twice("in_progress"))
faults.telling("an item added twice", Rule.ITEMS_CLOSE, TEXT, twice("output_item.added"))
faults.telling("an item that is never done", Rule.ITEMS_CLOSE, TEXT, missing("output_item.done"))
for kind in ("content_part.added", "content_part.done", "output_text.done"):
    faults.telling(f"no {kind}", Rule.MESSAGE_EVENTS, TEXT, missing(kind))
faults.telling(
    "another text when it is done",
    Rule.DELTAS_ADD_UP,
    TEXT,
    wrong("output_text.done", "text", value="Hm."),
)
faults.telling(
    "another text when its part is done",
    Rule.DELTAS_ADD_UP,
    TEXT,
    wrong("content_part.done", "part", "text", value="Hm."),
)
faults.telling(
    "another text when its item is done",
    Rule.DELTAS_ADD_UP,
    TEXT,
    wrong("output_item.done", "item", "content", 0, "text", value="Hm."),
)
faults.telling("a delta told twice", Rule.DELTAS_ADD_UP, TEXT, twice("output_text.delta"))
faults.telling("no end", Rule.ONE_TERMINAL, TEXT, missing("completed"))
faults.telling("two ends", Rule.ONE_TERMINAL, "nothing-follows-the-end", twice("completed"))
faults.telling(
    "an item after the end",
    Rule.ONE_TERMINAL,
    "nothing-follows-the-end",
    after(
        "completed",
        {"type": "response.compaction.compacting", "item_id": "cmp_1", "output_index": 1},
    ),
)
faults.telling(
    "no output at the end",
    Rule.TERMINAL_OUTPUT,
    END,
    wrong("completed", "response", "output", value=[]),
)
faults.telling(
    "other ids at the end",
    Rule.TERMINAL_OUTPUT,
    END,
    wrong("completed", "response", "output", 0, "id", value="fc_0"),
)
faults.telling(
    "another response at the end",
    Rule.ONE_RESPONSE_ID,
    TEXT,
    wrong("completed", "response", "id", value="resp_0"),
)
_CONTRADICTIONS: dict[str, Any] = {
    "status": "in_progress",
    "completed_at": None,
    "error": {"code": "x", "message": "x"},
    "incomplete_details": {"reason": "steered"},
    "usage": None,
}
for member, value in _CONTRADICTIONS.items():
    faults.telling(
        f"completed with another {member}",
        Rule.TERMINAL_STATUS,
        TEXT,
        wrong("completed", "response", member, value=value),
    )
faults.telling(
    "a total that is none",
    Rule.USAGE_ADDS_UP,
    TEXT,
    wrong("completed", "response", "usage", "total_tokens", value=1),
)
faults.telling(
    "a foreign item_id", Rule.ITEM_IDENTITY, TEXT, wrong("output_text.delta", "item_id", value="x")
)
faults.telling(
    "another call_id when done",
    Rule.ITEM_IDENTITY,
    CALL,
    wrong("output_item.done", "item", "call_id", value="call_0"),
)
for kind, member in (
    ("output_item.added", "output_index"),
    ("output_text.delta", "content_index"),
):
    faults.telling(f"{member} from 1", Rule.ITEMS_ARE_DENSE, TEXT, wrong(kind, member, value=1))
faults.telling(
    "an item that begins completed",
    Rule.ITEM_BEGINS_EMPTY,
    TEXT,
    wrong("output_item.added", "item", "status", value="completed"),
)
faults.telling(
    "an item that begins with its text",
    Rule.ITEM_BEGINS_EMPTY,
    TEXT,
    wrong(
        "output_item.added",
        "item",
        "content",
        value=[{"type": "output_text", "text": "Hm.", "annotations": []}],
    ),
)
faults.telling(
    "a torn item in a whole response",
    Rule.TORN_ITEM,
    TEXT,
    lambda event: [_torn(event)],
)
faults.telling(
    "padding where nothing hides",
    Rule.PADDING,
    TEXT,
    wrong("output_text.done", "obfuscation", value="xx"),
)
faults.telling("no arguments.done", Rule.CALL_EVENTS, CALL, missing("function_call_arguments.done"))
faults.telling(
    "arguments.done of another function",
    Rule.CALL_EVENTS,
    CALL,
    wrong("function_call_arguments.done", "name", value="f"),
)
faults.telling(
    "a call in text",
    Rule.CALL_EVENTS,
    CALL,
    after(
        "function_call_arguments.done",
        {
            "type": "response.output_text.done",
            "item_id": "fc_1",
            "output_index": 0,
            "content_index": 0,
            "text": "",
            "logprobs": [],
        },
    ),
)
faults.telling(
    "no arguments in the end",
    Rule.DELTAS_ADD_UP,
    CALL,
    wrong("output_item.done", "item", "arguments", value=""),
)


def _torn(event: Event) -> Event:
    event = deepcopy(event)
    items = [event.get("item", {}), *event.get("response", {}).get("output", [])]
    for item in items:
        if item.get("status") == "completed":
            item["status"] = "incomplete"
    return event


@faults.doing(Rule.SEQUENCE_NUMBERS, "each-response-is-numbered-from-0")
class NumbersOfTheConnection(ModelServer):
    """Numbers go on from response to response."""

    num_told = 0

    def numbered(self, run: Run, event: Event) -> Event:
        self.num_told += 1
        return event | {"sequence_number": self.num_told - 1}


@faults.doing(Rule.SEQUENCE_NUMBERS, TEXT)
class AllNumbersAreOne(ModelServer):
    """All numbers are 1, as in the examples of the reference."""

    def numbered(self, run: Run, event: Event) -> Event:
        return event | {"sequence_number": 1}


@faults.doing(Rule.SEQUENCE_NUMBERS, TEXT)
class NumbersSkip(ModelServer):
    """Numbers rise by two."""

    def numbered(self, run: Run, event: Event) -> Event:
        run.num_told += 2
        return event | {"sequence_number": run.num_told - 2}
