"""The ways in which clients repeat what a model said, as they were recorded."""

import json
from collections.abc import Callable
from typing import TypeAlias

from tests.server.running import CALLS, Event

Spelling: TypeAlias = Callable[[Event], Event | None]
"""How an item of the model's comes back; None where it does not."""


def as_it_came(item: Event) -> Event:
    return item


def without_ids(item: Event) -> Event:
    return {key: value for key, value in item.items() if key not in ("id", "status")}


def rewritten(item: Event) -> Event:
    """Write the arguments of a call anew."""
    if item["type"] != "function_call":
        return item
    arguments = json.dumps(json.loads(item["arguments"]), separators=(",", ":"))
    return item | {"arguments": arguments}


def rewritten_without_ids(item: Event) -> Event:
    return without_ids(rewritten(item))


def without_thoughts(item: Event) -> Event | None:
    return None if item["type"] == "reasoning" else rewritten_without_ids(item)


def as_easy_messages(item: Event) -> Event:
    """Leave out the type and the parts of a message."""
    if item["type"] != "message":
        return without_ids(item)
    return {"role": "assistant", "content": item["content"][0]["text"]}


def by_reference(item: Event) -> Event:
    return {"type": "item_reference", "id": item["id"]}


def by_reference_but_calls(item: Event) -> Event:
    return rewritten_without_ids(item) if item["type"] in CALLS else by_reference(item)


def by_untyped_reference(item: Event) -> Event:
    return {"id": item["id"]}


def with_the_type_last(item: Event) -> Event:
    return {key: item[key] for key in sorted(item, key=lambda key: key == "type")}


def with_more_members(item: Event) -> Event:
    return item | {"phase": "commentary", "status": "completed", "internal": {"x": 1}}
