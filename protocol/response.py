"""The response resource: what every lifecycle event carries."""

from typing import Any, Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType, field

from protocol.client_events import CreateParams, Reasoning
from protocol.items import JsonObject, OutputItem
from protocol.tools import FunctionTool, echo_tools

ResponseStatus: TypeAlias = Literal["in_progress", "completed", "incomplete", "failed"]
IncompleteReason: TypeAlias = Literal["max_output_tokens", "content_filter"]


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
    top_logprobs: int = 0
    presence_penalty: float
    frequency_penalty: float
    text: JsonObject
    reasoning: Reasoning | None
    truncation: Literal["auto", "disabled"]
    store: bool = False
    background: bool = False
    service_tier: str = "default"
    metadata: dict[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    suspend_run: JsonObject | UnsetType = field(default=UNSET, name="suspend:run")


def build_response(params: CreateParams, *, id: str, created_at: int) -> ResponseResource:
    """Return the response to ``params`` as it is before anything was sampled.

    It repeats the values in effect: ``store`` is false whatever was asked, as nothing is stored,
    and there is one service tier.
    """
    return ResponseResource(
        id=id,
        created_at=created_at,
        model=params.model,
        instructions=params.instructions,
        tools=echo_tools(params.tools),
        tool_choice=params.tool_choice.echo(),
        parallel_tool_calls=params.parallel_tool_calls,
        max_output_tokens=params.max_output_tokens,
        max_tool_calls=params.max_tool_calls,
        temperature=params.temperature,
        top_p=params.top_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        text=_text(params.verbosity),
        reasoning=params.reasoning,
        truncation=params.truncation,
        metadata=params.metadata,
        user=params.user,
        safety_identifier=params.safety_identifier,
        prompt_cache_key=params.prompt_cache_key,
    )


def _text(verbosity: str | None) -> JsonObject:
    text: dict[str, Any] = {"format": {"type": "text"}}
    return text if verbosity is None else text | {"verbosity": verbosity}
