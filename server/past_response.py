"""What is kept of a response so that others can follow it."""

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
from msgspec import Struct

from protocol.client_events import CreateParams
from protocol.items import (
    AdditionalTools,
    CallOutput,
    Compaction,
    CustomToolCall,
    FunctionCall,
    Message,
    ReasoningItem,
    UnknownItem,
)
from protocol.tools import echo_tools, parse_tools
from protocol.validation import JsonObject
from sampler.prompt import Prompt
from sampler.recorded_turn import Item, RecordedTurn
from sampler.snapshot import Snapshot

_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "compaction": "cmp",
}


@dataclass(frozen=True, eq=False)
class PastResponse:
    """A response that has come to rest: finished, suspended, or only warmed up.

    With a prompt and a snapshot another response goes on where this one stopped; with the items
    alone (when it was read back from the store) it has to be prefilled anew.
    """

    id: str
    items: Sequence[Item]
    """The whole conversation: what it saw, and what it said."""
    wire_items: Sequence[JsonObject]
    """The same as clients see it."""
    params: CreateParams | None = None
    prompt: Prompt | None = None
    """The conversation and its token ids, as they were prefilled and sampled."""
    snapshot: Snapshot | None = None
    is_warm_up: bool = False
    """Whether nothing was sampled yet."""
    has_failed: bool = False
    """Whether it failed when it went on from here: it can be followed, and takes no appends."""
    rested_at: float = field(default_factory=time.monotonic)


def new_id(prefix: str) -> str:
    """Return a fresh id such as ``resp_4f...``."""
    return f"{prefix}_{secrets.token_hex(16)}"


def with_ids(items: Iterable[JsonObject]) -> list[JsonObject]:
    """Return wire items, each with an id and a type."""
    named = []
    for item in items:
        item_type = item.get("type", "message")
        prefix = _ID_PREFIXES.get(item_type, "item")
        named.append({"type": item_type, **item, "id": item.get("id") or new_id(prefix)})
    return named


# --- In the store --------------------------------------------------------------------------------


class _StoredTools(Struct, frozen=True, tag_field="kind", tag="StoredTools"):
    """Tools as they were declared; they are parsed again when they are read."""

    definitions: list[JsonObject]


_Storable: TypeAlias = (
    _StoredTools
    | RecordedTurn
    | Message
    | FunctionCall
    | CustomToolCall
    | CallOutput
    | ReasoningItem
    | Compaction
    | UnknownItem
)


def pack(items: Iterable[Item]) -> bytes:
    """Return a conversation as bytes that ``unpack`` reads."""
    return msgspec.msgpack.encode([_storable(item) for item in items])


def _storable(item: Item) -> Item | _StoredTools:
    if isinstance(item, AdditionalTools):
        return _StoredTools([msgspec.to_builtins(tool) for tool in echo_tools(item.tools)])
    return item


def unpack(data: bytes) -> list[Item]:
    """Return the conversation that ``pack`` put into ``data``."""
    return [_restored(item) for item in _decoder.decode(data)]


def _restored(item: _Storable) -> Item:
    if isinstance(item, _StoredTools):
        return AdditionalTools(tuple(parse_tools(item.definitions)))
    return item


_decoder = msgspec.msgpack.Decoder(list[_Storable])
