"""The members that events, items and responses must have.

OpenAI reference, Streaming events, WebSocket events, and the response object; where it and Open
Responses differ, what both have. More members than these are always allowed.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from protocol.conformance.rules import Rule, require

Event: TypeAlias = dict[str, Any]
Shape: TypeAlias = Mapping[str, type | tuple[type, ...]]

TERMINAL_TYPES = ("response.completed", "response.incomplete", "response.failed")

_NUMBER = (int, float)
_OF_ITEM: Shape = {"item_id": str, "output_index": int}
_OF_PART: Shape = {**_OF_ITEM, "content_index": int}
_OF_SUMMARY: Shape = {**_OF_ITEM, "summary_index": int}
_STEER: Shape = {"steer": dict}

EVENTS: dict[str, Shape] = {
    "response.created": {"response": dict},
    "response.in_progress": {"response": dict},
    "response.queued": {"response": dict},
    "response.completed": {"response": dict},
    "response.incomplete": {"response": dict},
    "response.failed": {"response": dict},
    "response.done": {},
    "error": {},
    "response.output_item.added": {"item": dict, "output_index": int},
    "response.output_item.done": {"item": dict, "output_index": int},
    "response.content_part.added": {**_OF_PART, "part": dict},
    "response.content_part.done": {**_OF_PART, "part": dict},
    "response.output_text.delta": {**_OF_PART, "delta": str, "logprobs": list},
    "response.output_text.done": {**_OF_PART, "text": str, "logprobs": list},
    "response.output_text.annotation.added": {
        **_OF_PART,
        "annotation_index": int,
        "annotation": dict,
    },
    "response.refusal.delta": {**_OF_PART, "delta": str},
    "response.refusal.done": {**_OF_PART, "refusal": str},
    "response.function_call_arguments.delta": {**_OF_ITEM, "delta": str},
    "response.function_call_arguments.done": {**_OF_ITEM, "arguments": str},
    "response.custom_tool_call_input.delta": {**_OF_ITEM, "delta": str},
    "response.custom_tool_call_input.done": {**_OF_ITEM, "input": str},
    "response.reasoning_summary_part.added": {**_OF_SUMMARY, "part": dict},
    "response.reasoning_summary_part.done": {**_OF_SUMMARY, "part": dict},
    "response.reasoning_summary_text.delta": {**_OF_SUMMARY, "delta": str},
    "response.reasoning_summary_text.done": {**_OF_SUMMARY, "text": str},
    "response.reasoning_text.delta": {**_OF_PART, "delta": str},
    "response.reasoning_text.done": {**_OF_PART, "text": str},
    # What Open Responses calls the two above.
    "response.reasoning.delta": {**_OF_PART, "delta": str},
    "response.reasoning.done": {**_OF_PART, "text": str},
    "response.compaction.compacting": _OF_ITEM,
    "response.steer.accepted": _STEER,
    "response.steer.pending": {**_STEER, "reason": str, "required_input": list},
    "response.steer.failed": {**_STEER, "error": dict},
    "response.inject.created": {"response_id": str},
    "response.inject.failed": {"response_id": str, "input": object, "error": dict},
}

ITEMS: dict[str, Shape] = {
    "message": {"id": str, "status": str, "role": str, "content": list},
    "function_call": {
        "id": str,
        "status": str,
        "call_id": str,
        "name": str,
        "arguments": str,
    },
    "custom_tool_call": {"id": str, "call_id": str, "name": str, "input": str},
    "reasoning": {"id": str, "summary": list},
    "compaction": {"id": str, "encrypted_content": str},
}
"""Those that a model without hosted tools makes."""

PARTS: dict[str, Shape] = {
    "output_text": {"text": str, "annotations": list},
    "refusal": {"refusal": str},
    "reasoning_text": {"text": str},
    "summary_text": {"text": str},
}

RESPONSE: Shape = {
    "id": str,
    "object": str,
    "created_at": _NUMBER,
    "status": str,
    "model": str,
    "output": list,
    "parallel_tool_calls": bool,
    "tool_choice": (str, dict),
    "tools": list,
}
"""What the types of the OpenAI SDKs require, and ``status``."""

_NULLABLE_STR = (str, type(None))
_OPTIONAL_OF_EVENT: Shape = {"sequence_number": int, "stream_id": _NULLABLE_STR}
_OPTIONAL_OF_STEER: Shape = {"id": _NULLABLE_STR, "previous_response_id": _NULLABLE_STR}
_OPTIONAL_OF_ITEM: Shape = {"id": _NULLABLE_STR, "call_id": _NULLABLE_STR}
_OPTIONAL_OF_RESPONSE: Shape = {
    "incomplete_details": (dict, type(None)),
    "error": (dict, type(None)),
}
_UNNUMBERED = ("response.done", "error")
"""Types of events that need no number."""

USAGE: Shape = {"input_tokens": int, "output_tokens": int, "total_tokens": int}

OPEN_RESPONSE = frozenset(
    [
        "id",
        "object",
        "created_at",
        "completed_at",
        "status",
        "incomplete_details",
        "model",
        "previous_response_id",
        "instructions",
        "output",
        "error",
        "tools",
        "tool_choice",
        "truncation",
        "parallel_tool_calls",
        "text",
        "top_p",
        "presence_penalty",
        "frequency_penalty",
        "top_logprobs",
        "temperature",
        "reasoning",
        "usage",
        "max_output_tokens",
        "max_tool_calls",
        "store",
        "background",
        "service_tier",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
    ]
)
"""All that Open Responses wants present, null or not."""


def check_event(event: Event) -> None:
    """Check that ``event`` is of a known type and has that type's members.

    Raises:
        NonconformityError: it names the member.
    """
    name = event.get("type")
    require(isinstance(name, str), Rule.EVENT_MEMBERS, f"an event without a type: {event}")
    _check(event, {} if name in _UNNUMBERED else {"sequence_number": int}, f"{name}")
    _check_optional(event, _OPTIONAL_OF_EVENT, f"{name}")
    if is_extension(event):
        return
    require(name in EVENTS, Rule.KNOWN_EVENT, f"no event of the reference: {name}")
    _check(event, EVENTS[str(name)], str(name))
    if "response" in event:
        (check_segment if name == "response.done" else check_response)(event["response"])
    if "item" in event:
        check_item(event["item"])
    if "part" in event:
        check_part(event["part"])
    if "steer" in event:
        _check_optional(event["steer"], _OPTIONAL_OF_STEER, "a steer")


def is_extension(event: Event) -> bool:
    """Tell whether ``event`` is of somebody's own type, which Open Responses has them mark."""
    return ":" in event["type"]


def check_response(response: Any) -> None:
    """Check that ``response`` and the items in it have the members that clients read."""
    _check(response, RESPONSE, "the response", Rule.RESPONSE_MEMBERS)
    check_segment(response)


def check_segment(response: Any) -> None:
    """Check the members that there are of a response that is suspended: it needs none of them."""
    shape = {**RESPONSE, **_OPTIONAL_OF_RESPONSE}
    _check_optional(response, shape, "the response", Rule.RESPONSE_MEMBERS)
    for item in response.get("output", ()):
        check_item(item)
    if (usage := response.get("usage")) is not None:
        check_usage(usage)


def check_usage(usage: Any) -> None:
    """Check that ``usage`` has its three counts, and that they add up."""
    _check(usage, USAGE, "usage", Rule.RESPONSE_MEMBERS)
    total = usage["input_tokens"] + usage["output_tokens"]
    require(usage["total_tokens"] == total, Rule.USAGE_ADDS_UP, f"{usage}")


def check_item(item: Any) -> None:
    """Check that ``item`` has the members of its type; types that nobody knows are let pass."""
    _check(item, {"type": str}, "an item", Rule.ITEM_MEMBERS)
    name = f"a {item['type']} item"
    _check(item, ITEMS.get(item["type"], {}), name, Rule.ITEM_MEMBERS)
    _check_optional(item, _OPTIONAL_OF_ITEM, name, Rule.ITEM_MEMBERS)
    for part in _parts(item):
        check_part(part)


def _parts(item: Event) -> Iterable[Any]:
    return item["content"] if item["type"] == "message" else ()


def check_part(part: Any) -> None:
    """Check that ``part`` of an item has the members of its type."""
    _check(part, {"type": str}, "a part", Rule.ITEM_MEMBERS)
    _check(part, PARTS.get(part["type"], {}), f"a part {part['type']}", Rule.ITEM_MEMBERS)


def check_error(event: Event) -> None:
    """Check that an error frame says what is wrong."""
    _check(event, {"status": int, "error": dict}, "an error frame", Rule.ERROR_FRAME)
    _check_optional(event, _OPTIONAL_OF_EVENT, "an error frame", Rule.ERROR_FRAME)
    _check(event["error"], {"type": str, "message": str}, "error", Rule.ERROR_FRAME)
    _check_optional(event["error"], {"param": _NULLABLE_STR}, "error", Rule.ERROR_FRAME)


def _check(value: Any, shape: Shape, what: str, rule: Rule = Rule.EVENT_MEMBERS) -> None:
    """Check that ``value`` is an object with the members of ``shape``."""
    require(isinstance(value, dict), rule, f"{what} is no object: {value!r}")
    for member in shape:
        require(member in value, rule, f"{what} without `{member}`")
    _check_optional(value, shape, what, rule)


def _check_optional(value: Any, shape: Shape, what: str, rule: Rule = Rule.EVENT_MEMBERS) -> None:
    """Check that ``value`` is an object, and of ``shape`` the members that it has."""
    require(isinstance(value, dict), rule, f"{what} is no object: {value!r}")
    for member, kind in shape.items():
        if member not in value:
            continue
        found = value[member]
        # In Python a truth value is a number; in JSON it is none.
        is_it = isinstance(found, kind) and (kind is not int or not isinstance(found, bool))
        require(is_it, rule, f"{what} with {found!r} as `{member}`")
