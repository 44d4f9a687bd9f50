"""The response resource: what every lifecycle event carries."""

from collections.abc import Iterable
from typing import Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType, field

from protocol.client_events import CreateParams, ReasoningOptions
from protocol.output_items import OutputItem
from protocol.tools import FunctionTool, echo_tools
from protocol.validation import JsonObject

ResponseStatus: TypeAlias = Literal[
    "queued", "in_progress", "completed", "incomplete", "failed", "cancelled"
]
IncompleteReason: TypeAlias = Literal["max_output_tokens", "content_filter", "steered"]


class InputTokensDetails(Struct, frozen=True):
    cached_tokens: int = 0  # not prefilled again
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, frozen=True):
    reasoning_tokens: int = 0


class Usage(Struct, frozen=True):
    """Tokens of one response, or of one segment where a response has several.

    ``input_tokens`` counts the whole context in effect, however little of it was prefilled.
    """

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int  # without it Codex fails the turn

    @classmethod
    def of(
        cls,
        input_tokens: int,
        output_tokens: int,
        *,
        cached_tokens: int = 0,
        cache_write_tokens: int = 0,
        reasoning_tokens: int = 0,
    ) -> "Usage":
        """Return the usage with its total."""
        return cls(
            input_tokens,
            InputTokensDetails(cached_tokens, cache_write_tokens),
            output_tokens,
            OutputTokensDetails(reasoning_tokens),
            input_tokens + output_tokens,
        )

    @classmethod
    def sum(cls, usages: Iterable["Usage"]) -> "Usage":
        """Return the usage of a response whose segments are not told apart on the wire."""
        segments = tuple(usages)
        inputs = [segment.input_tokens_details for segment in segments]
        outputs = [segment.output_tokens_details for segment in segments]
        return cls.of(
            sum(segment.input_tokens for segment in segments),
            sum(segment.output_tokens for segment in segments),
            cached_tokens=sum(details.cached_tokens for details in inputs),
            cache_write_tokens=sum(details.cache_write_tokens for details in inputs),
            reasoning_tokens=sum(details.reasoning_tokens for details in outputs),
        )


class IncompleteDetails(Struct, frozen=True):
    reason: IncompleteReason


class ResponseError(Struct, frozen=True):
    code: str
    message: str


class ResponseResource(Struct, frozen=True, kw_only=True, tag_field="object", tag="response"):
    """A response (Open Responses 2026-04-24: all members are present, null where it allows null).

    ``user`` is the OpenAI reference's, ``suspend:run`` our extension. A resource never changes;
    a later state of the response is another resource.
    """

    id: str
    created_at: int  # unix seconds
    completed_at: int | None = None
    status: ResponseStatus = "in_progress"
    incomplete_details: IncompleteDetails | None = None
    error: ResponseError | None = None
    model: str
    previous_response_id: str | None = None
    instructions: str | None
    output: tuple[OutputItem, ...] = ()
    usage: Usage | None = None
    tools: tuple[FunctionTool | JsonObject, ...]
    tool_choice: str | JsonObject
    parallel_tool_calls: bool
    max_output_tokens: int | None
    max_tool_calls: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    presence_penalty: float
    frequency_penalty: float
    text: JsonObject
    reasoning: ReasoningOptions | None
    truncation: Literal["auto", "disabled"]
    store: bool
    background: bool
    service_tier: str = "default"
    metadata: dict[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    suspend_run: JsonObject | UnsetType = field(default=UNSET, name="suspend:run")


class CompactionResource(Struct, frozen=True, tag_field="object", tag="response.compaction"):
    """What a conversation comes to when it is compacted: the input of a new one. It is not stored,
    so nothing follows it by its id."""

    id: str
    created_at: int  # unix seconds
    output: list[OutputItem | JsonObject]
    """Also what the client's side said, so they are not all output items."""
    usage: Usage
    suspend_run: JsonObject | UnsetType = field(default=UNSET, name="suspend:run")


def build_response(
    params: CreateParams,
    *,
    id: str,
    created_at: int,
    store: bool,
    extension: JsonObject | None = None,
) -> ResponseResource:
    """Return the response to ``params`` as it is before anything was sampled.

    It repeats the values in effect, not the wishes: ``store`` says whether the response will be
    found again, and there is one service tier. ``extension`` is the content of ``suspend:run``.
    """
    return ResponseResource(
        id=id,
        created_at=created_at,
        model=params.model,
        previous_response_id=params.previous_response_id,
        instructions=params.instructions,
        tools=echo_tools(params.tools),
        tool_choice=params.tool_choice.echo(),
        parallel_tool_calls=params.parallel_tool_calls,
        max_output_tokens=params.max_output_tokens,
        max_tool_calls=params.max_tool_calls,
        temperature=params.temperature,
        top_p=params.top_p,
        top_logprobs=params.top_logprobs,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        text=_text(params),
        reasoning=params.reasoning,
        truncation=params.truncation,
        store=store,
        background=params.background,
        metadata=params.metadata,
        user=params.user,
        safety_identifier=params.safety_identifier,
        prompt_cache_key=params.prompt_cache_key,
        suspend_run=UNSET if extension is None else extension,
    )


def _text(params: CreateParams) -> JsonObject:
    text: JsonObject = {"format": params.text_format.echo()}
    return text if params.verbosity is None else text | {"verbosity": params.verbosity}
