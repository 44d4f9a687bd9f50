"""What the server says: one struct per event, ``type`` its first member on the wire.

OpenAI reference, Streaming events and WebSocket events. ``response.done`` is the exception: it
belongs to the ``response.append`` prototype of February 2026 and is sent only to clients that asked
for it, because all others wait for ever after it.
"""

from typing import TypeAlias

from msgspec import Struct

from protocol.errors import ErrorEvent, SseErrorEvent
from protocol.items import OutputItem, OutputText
from protocol.response import ResponseResource


class _Event(Struct, frozen=True, kw_only=True, tag_field="type"):
    sequence_number: int


# --- The life of the response --------------------------------------------------------------------


class ResponseCreated(_Event, frozen=True, kw_only=True, tag="response.created"):
    response: ResponseResource


class ResponseInProgress(_Event, frozen=True, kw_only=True, tag="response.in_progress"):
    response: ResponseResource


class ResponseDone(_Event, frozen=True, kw_only=True, tag="response.done"):
    """The segment is over and the sampler suspended: the client may append."""

    response: ResponseResource


class ResponseCompleted(_Event, frozen=True, kw_only=True, tag="response.completed"):
    response: ResponseResource


class ResponseIncomplete(_Event, frozen=True, kw_only=True, tag="response.incomplete"):
    response: ResponseResource


class ResponseFailed(_Event, frozen=True, kw_only=True, tag="response.failed"):
    response: ResponseResource


# --- Items and their parts -----------------------------------------------------------------------


class OutputItemAdded(_Event, frozen=True, kw_only=True, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class OutputItemDone(_Event, frozen=True, kw_only=True, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class ContentPartAdded(_Event, frozen=True, kw_only=True, tag="response.content_part.added"):
    item_id: str
    output_index: int
    content_index: int
    part: OutputText


class ContentPartDone(_Event, frozen=True, kw_only=True, tag="response.content_part.done"):
    item_id: str
    output_index: int
    content_index: int
    part: OutputText


class OutputTextDelta(_Event, frozen=True, kw_only=True, tag="response.output_text.delta"):
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: tuple[()] = ()  # the Python SDK's type wants the member


class OutputTextDone(_Event, frozen=True, kw_only=True, tag="response.output_text.done"):
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: tuple[()] = ()


class FunctionCallArgumentsDelta(
    _Event, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    item_id: str
    output_index: int
    delta: str


class FunctionCallArgumentsDone(
    _Event, frozen=True, kw_only=True, tag="response.function_call_arguments.done"
):
    item_id: str
    output_index: int
    name: str
    arguments: str


ServerEvent: TypeAlias = (
    ResponseCreated
    | ResponseInProgress
    | ResponseDone
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | FunctionCallArgumentsDelta
    | FunctionCallArgumentsDone
    | ErrorEvent
    | SseErrorEvent
)


def event_type(event: ServerEvent) -> str:
    """Return the event's ``type`` as it stands on the wire."""
    return str(event.__struct_config__.tag)
