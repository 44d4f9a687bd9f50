"""What the server says: one struct per event, ``type`` its first member on the wire.

OpenAI reference, Streaming events and WebSocket events. ``response.done`` is the exception: it
belongs to the ``response.append`` prototype of February 2026 and is sent only to clients that asked
for it, because all others wait for ever after it.

``stream_id`` names the lane that an event belongs to; the connection sets it, for the default lane
never. ``obfuscation`` is padding of random length, which hides the length of the ``delta`` beside
it from whoever watches encrypted traffic.
"""

from typing import Any, Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from protocol.errors import ErrorEvent, ProtocolError, SseErrorEvent
from protocol.output_items import (
    Logprob,
    MessagePart,
    OutputCall,
    OutputFunctionCall,
    OutputItem,
    ReasoningText,
    SummaryText,
)
from protocol.response import ResponseResource


class _Event(Struct, frozen=True, kw_only=True, tag_field="type"):
    sequence_number: int
    stream_id: str | UnsetType = UNSET


# --- The life of the response --------------------------------------------------------------------


class _Lifecycle(_Event, frozen=True, kw_only=True):
    response: ResponseResource


class ResponseCreated(_Lifecycle, frozen=True, kw_only=True, tag="response.created"):
    pass


class ResponseQueued(_Lifecycle, frozen=True, kw_only=True, tag="response.queued"):
    """The response waits for its turn, in the background."""


class ResponseInProgress(_Lifecycle, frozen=True, kw_only=True, tag="response.in_progress"):
    pass


class ResponseDone(_Lifecycle, frozen=True, kw_only=True, tag="response.done"):
    """The segment is over and the sampler suspended: the client may append."""


class ResponseCompleted(_Lifecycle, frozen=True, kw_only=True, tag="response.completed"):
    pass


class ResponseIncomplete(_Lifecycle, frozen=True, kw_only=True, tag="response.incomplete"):
    """The response ended early, or was cancelled: there is no event of that name."""


class ResponseFailed(_Lifecycle, frozen=True, kw_only=True, tag="response.failed"):
    pass


LifecycleEvent: TypeAlias = (
    ResponseCreated
    | ResponseQueued
    | ResponseInProgress
    | ResponseDone
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
)


# --- Items ---------------------------------------------------------------------------------------


class OutputItemAdded(_Event, frozen=True, kw_only=True, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class OutputItemDone(_Event, frozen=True, kw_only=True, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class _OfItem(_Event, frozen=True, kw_only=True):
    item_id: str
    output_index: int


class FunctionCallArgumentsDelta(
    _OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    delta: str
    obfuscation: str | UnsetType = UNSET


class FunctionCallArgumentsDone(
    _OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.done"
):
    name: str
    arguments: str


class CustomToolCallInputDelta(
    _OfItem, frozen=True, kw_only=True, tag="response.custom_tool_call_input.delta"
):
    delta: str
    obfuscation: str | UnsetType = UNSET


class CustomToolCallInputDone(
    _OfItem, frozen=True, kw_only=True, tag="response.custom_tool_call_input.done"
):
    input: str


class CompactionCompacting(
    _OfItem, frozen=True, kw_only=True, tag="response.compaction.compacting"
):
    """The summary is being written; the event holds none of it."""


# --- Parts of messages and of reasoning ----------------------------------------------------------


class _OfPart(_OfItem, frozen=True, kw_only=True):
    content_index: int


class ContentPartAdded(_OfPart, frozen=True, kw_only=True, tag="response.content_part.added"):
    part: MessagePart | ReasoningText


class ContentPartDone(_OfPart, frozen=True, kw_only=True, tag="response.content_part.done"):
    part: MessagePart | ReasoningText


class OutputTextDelta(_OfPart, frozen=True, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: tuple[Logprob, ...] = ()  # the Python SDK's type wants the member
    obfuscation: str | UnsetType = UNSET


class OutputTextDone(_OfPart, frozen=True, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: tuple[Logprob, ...] = ()


class RefusalDelta(_OfPart, frozen=True, kw_only=True, tag="response.refusal.delta"):
    delta: str
    obfuscation: str | UnsetType = UNSET


class RefusalDone(_OfPart, frozen=True, kw_only=True, tag="response.refusal.done"):
    refusal: str


class ReasoningTextDelta(_OfPart, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str
    obfuscation: str | UnsetType = UNSET


class ReasoningTextDone(_OfPart, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    text: str


# --- Parts of a summary of reasoning -------------------------------------------------------------


class _OfSummary(_OfItem, frozen=True, kw_only=True):
    summary_index: int


class ReasoningSummaryPartAdded(
    _OfSummary, frozen=True, kw_only=True, tag="response.reasoning_summary_part.added"
):
    part: SummaryText


class ReasoningSummaryPartDone(
    _OfSummary, frozen=True, kw_only=True, tag="response.reasoning_summary_part.done"
):
    part: SummaryText


class ReasoningSummaryTextDelta(
    _OfSummary, frozen=True, kw_only=True, tag="response.reasoning_summary_text.delta"
):
    delta: str
    obfuscation: str | UnsetType = UNSET


class ReasoningSummaryTextDone(
    _OfSummary, frozen=True, kw_only=True, tag="response.reasoning_summary_text.done"
):
    text: str


# --- Acknowledgements of what a client sent to a response ----------------------------------------


class FunctionCallOutputStub(Struct, frozen=True, tag_field="type", tag="function_call_output"):
    """The output that a call waits for, without the output."""

    call_id: str
    name: str


class CustomToolCallOutputStub(
    Struct, frozen=True, tag_field="type", tag="custom_tool_call_output"
):
    """The output that a call of a free-form tool waits for, without the output."""

    call_id: str


OutputStub: TypeAlias = FunctionCallOutputStub | CustomToolCallOutputStub


def output_stub(call: OutputCall) -> OutputStub:
    """Return what ``call`` asks the client for."""
    if isinstance(call, OutputFunctionCall):
        return FunctionCallOutputStub(call.call_id, call.name)
    return CustomToolCallOutputStub(call.call_id)


class Steer(Struct, frozen=True):
    """Steering input that the server has taken over."""

    id: str
    previous_response_id: str


class RejectedSteer(Struct, frozen=True):
    """Steering input given back; it has an id if it was accepted first."""

    previous_response_id: str
    input: Any
    id: str | UnsetType = UNSET


class SteerError(Struct, frozen=True):
    code: str
    message: str
    type: Literal["invalid_request_error"] = "invalid_request_error"


class SteerAccepted(_Event, frozen=True, kw_only=True, tag="response.steer.accepted"):
    """The server has the input; the successor's ``response.created`` says that it is used."""

    steer: Steer


class SteerPending(_Event, frozen=True, kw_only=True, tag="response.steer.pending"):
    """Accepted input waits for tool outputs, to be sent with the next ``response.create``."""

    steer: Steer
    required_input: tuple[OutputStub, ...]
    reason: Literal["waiting_for_required_input"] = "waiting_for_required_input"


class SteerFailed(_Event, frozen=True, kw_only=True, tag="response.steer.failed"):
    error: SteerError
    steer: RejectedSteer


class InjectError(Struct, frozen=True):
    code: str
    message: str


class InjectCreated(_Event, frozen=True, kw_only=True, tag="response.inject.created"):
    """All injected items were committed to the response."""

    response_id: str


class InjectFailed(_Event, frozen=True, kw_only=True, tag="response.inject.failed"):
    """None of the injected items was committed; they come back as they came."""

    response_id: str
    input: Any
    error: InjectError


def steer_failed(
    error: ProtocolError,
    raw_input: Any,
    previous_response_id: str,
    sequence_number: int,
    steer_id: str | None = None,
) -> SteerFailed:
    """Give ``raw_input``, as it came, back to the client; it has an id if it was accepted first."""
    return SteerFailed(
        sequence_number=sequence_number,
        error=SteerError(error.code or "invalid_input", error.message),
        steer=RejectedSteer(
            previous_response_id, raw_input, UNSET if steer_id is None else steer_id
        ),
    )


def inject_failed(
    error: ProtocolError, raw_input: Any, response_id: str, sequence_number: int
) -> InjectFailed:
    """Give ``raw_input``, as it came, back to the client."""
    return InjectFailed(
        sequence_number=sequence_number,
        response_id=response_id,
        input=raw_input,
        error=InjectError(error.code or "invalid_input", error.message),
    )


# --- All of them ---------------------------------------------------------------------------------


ServerEvent: TypeAlias = (
    LifecycleEvent
    | OutputItemAdded
    | OutputItemDone
    | FunctionCallArgumentsDelta
    | FunctionCallArgumentsDone
    | CustomToolCallInputDelta
    | CustomToolCallInputDone
    | CompactionCompacting
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | RefusalDelta
    | RefusalDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | ReasoningSummaryPartAdded
    | ReasoningSummaryPartDone
    | ReasoningSummaryTextDelta
    | ReasoningSummaryTextDone
    | SteerAccepted
    | SteerPending
    | SteerFailed
    | InjectCreated
    | InjectFailed
    | ErrorEvent
    | SseErrorEvent
)


def event_type(event: ServerEvent) -> str:
    """Return the event's ``type`` as it stands on the wire."""
    return str(event.__struct_config__.tag)
