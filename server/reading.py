"""What a client asks for: parsed, and with the model that it means."""

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from protocol import errors
from protocol.client_events import (
    AppendParams,
    CompactParams,
    CreateParams,
    InjectParams,
    Transport,
    parse_append,
    parse_compact,
    parse_create,
    parse_inject,
    parse_input_tokens,
)
from protocol.tools import Tool
from protocol.validation import JsonObject
from server.memory import Memory
from server.work import Stage, Work

Request = TypeVar("Request", CreateParams, CompactParams, AppendParams)


async def model_of_parent(body: JsonObject, memory: Memory, work: Work) -> str | None:
    """Return the model of the response that ``body`` follows, as far as it is known here, and of
    use: where the name of a model means one thing only, it means that."""
    name, parent_id = body.get("model"), body.get("previous_response_id")
    if not isinstance(name, str | None) or not isinstance(parent_id, str):
        return None
    if not memory.models.is_split(name):
        return None
    with work.stage(Stage.RESOLVE, runs=0, items=0):
        return await memory.model_of(parent_id)


def read_create(
    body: JsonObject,
    memory: Memory,
    work: Work,
    transport: Transport,
    parent_model: str | None = None,
) -> CreateParams:
    """Return what ``body`` asks for, of the model that it means.

    Args:
        body: as it came.
        memory: what the names of models were found to mean.
        work: takes note of what is done.
        transport: how it came.
        parent_model: see ``model_of_parent``.

    Raises:
        ProtocolError: it is no create, or there is no such model.
    """
    parse = partial(parse_create, transport=transport)
    return _read(parse, _resolved(body, memory, work, parent_model), work)


def read_input_tokens(
    body: JsonObject, memory: Memory, work: Work, parent_model: str | None = None
) -> CreateParams:
    """Return what ``body`` wants to have counted; raises as ``read_create`` does."""
    return _read(parse_input_tokens, _resolved(body, memory, work, parent_model), work)


def read_compact(
    body: JsonObject, memory: Memory, work: Work, parent_model: str | None = None
) -> CompactParams:
    """Return what ``body`` wants to have compacted; raises as ``read_create`` does.

    Its model has to be named (Open Responses, compact): there may be no parent that has one.
    """
    if body.get("model") is None:
        raise errors.missing_required_parameter("model")
    resolved = _resolved(body, memory, work, parent_model)
    # What it leaves out is the parent's, and no default.
    return _read(parse_compact, body | {"model": resolved.get("model")}, work)


def read_append(frame: JsonObject, tools: Iterable[Tool], work: Work) -> AppendParams:
    """Return what ``frame`` appends to a response with ``tools``.

    Raises:
        ProtocolError: it is no append.
    """
    return _read(partial(parse_append, tools=tools), frame, work)


def read_inject(frame: JsonObject, work: Work) -> InjectParams:
    """Return what ``frame`` injects.

    Raises:
        ProtocolError: it is no inject.
    """
    with work.stage(Stage.PARSE, items=0) as done:
        params = parse_inject(frame)
        done.items = len(params.outputs)
    return params


def _read(parse: Callable[[JsonObject], Request], body: JsonObject, work: Work) -> Request:
    with work.stage(Stage.PARSE, items=0) as done:
        params = parse(body)
        done.items = len(params.input)
    return params


def _resolved(body: JsonObject, memory: Memory, work: Work, parent_model: str | None) -> JsonObject:
    """Return ``body`` with the model that its own is a name of. What is known already of a
    connection's names, or of a key's, is not resolved again."""
    name = body.get("model")
    if name == "" or not isinstance(name, str | None):
        return body  # which the parser refuses
    models = memory.models
    num_misses, began_at = models.num_misses, time.perf_counter()
    config = models.resolve(name, _sticky(body), parent_model)
    num_resolved = models.num_misses - num_misses
    work.add(Stage.RESOLVE, time.perf_counter() - began_at, runs=num_resolved, items=num_resolved)
    work.requested_model = config.requested
    return config.applied_to(body)


def _sticky(body: JsonObject) -> str | None:
    """Return what is the same in all requests of one conversation, where there is such a thing."""
    members = ("prompt_cache_key", "safety_identifier", "user")
    said = (body.get(member) for member in members)
    return next((value for value in said if value and isinstance(value, str)), None)
