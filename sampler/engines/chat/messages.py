"""A conversation as a request to a chat-completions endpoint.

Messages are laid out as ``sampler.prompt`` lays out tokens, in pieces that never touch one another:
what comes before the first turn that was sampled here, each such turn, and what follows each. So
the messages of a conversation grow at their end only, however the conversation goes on. Each is
encoded once and sent again as the same bytes, and the endpoint finds its own cache again.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from protocol.client_events import TextFormat, TextFormatKind
from protocol.items import (
    AdditionalTools,
    CallOutput,
    Compaction,
    CustomToolCall,
    FunctionCall,
    InputItem,
    ItemReference,
    Message,
    ReasoningItem,
    UnknownItem,
)
from protocol.tools import CallableTool
from protocol.validation import JsonObject
from sampler.conversation import ConversationError, summary_text
from sampler.engines.chat.dialect import ChatDialect
from sampler.engines.chat.json_text import encoded
from sampler.engines.chat.tools import (
    arguments_of,
    choice_members,
    sent_name,
    tools_json,
    tools_to_declare,
)
from sampler.params import Constraint, SamplingParams
from sampler.recorded_turn import (
    Call,
    Item,
    RecordedTurn,
    TurnItem,
    answerable_calls,
    next_turn,
    plain_items,
    turn_at,
)

# --- Messages ------------------------------------------------------------------------------------


@dataclass
class _Spoken:
    """What one speaker says in a row."""

    role: str
    text: str = ""
    thoughts: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, item: TurnItem) -> None:
        match item:
            case Message():
                self.text += item.text
            case ReasoningItem():
                self.thoughts += item.text
            case FunctionCall() | CustomToolCall():
                self.calls.append(item)
            case _:
                assert_never(item)


def messages_of(
    items: Sequence[Item], instructions: str | None, dialect: ChatDialect
) -> tuple[bytes, ...]:
    """Return the messages of a conversation, the instructions first, each encoded.

    An assistant's thoughts, text and calls that follow one another are one message. The outputs of
    its calls come right after it, in the order of the calls, and what came in between after them.
    A turn that says nothing is no message. Thoughts without anything said are one only where they
    were sampled here: a turn may end there because the user had something to say.

    Raises:
        ConversationError: an output answers no call.
    """
    start = next_turn(items, 0)
    head = plain_items(items[:start])
    spoken = [_Spoken("system", instructions)] if instructions else []
    messages = _with_outputs(
        [(_message(said, dialect), said.calls) for said in [*spoken, *_spoken(head)]], head
    )
    return (*messages, *_messages_from_turn(items, start, dialect))


def messages_after(
    items: Sequence[Item], added: Sequence[Item], dialect: ChatDialect
) -> tuple[bytes, ...]:
    """Return the messages that ``added`` brings to the conversation of ``items``.

    ``messages_of([*items, *added], ...)`` are those of ``items``, and then these.

    Args:
        items: they end in a recorded turn.
        added: what follows it.
        dialect: the endpoint's.

    Raises:
        ConversationError: an output answers no call.
    """
    start = len(items) - 1
    [*known, turn] = items
    assert isinstance(turn, RecordedTurn), "the conversation goes on from a recorded turn"
    messages = _messages_from_turn([*known, turn, *added], start, dialect)
    return tuple(messages[len(messages_of_turn(turn, dialect)) :])


def messages_of_turn(turn: RecordedTurn, dialect: ChatDialect) -> tuple[bytes, ...]:
    """Return the message that ``turn`` brings to any conversation; none if it says nothing."""
    message = _message(_sampled(turn), dialect, may_only_think=True)
    return () if message is None else (message,)


def _messages_from_turn(items: Sequence[Item], start: int, dialect: ChatDialect) -> list[bytes]:
    """Return the messages from the recorded turn at ``start`` on, if there is one."""
    messages: list[bytes] = []
    while start < len(items):
        turn, stop = turn_at(items, start), next_turn(items, start + 1)
        following = plain_items(items[start + 1 : stop])
        messages += messages_of_turn(turn, dialect)
        messages += _with_outputs(
            [
                (None, answerable_calls(items[:start], turn, following)),
                *((_message(said, dialect), said.calls) for said in _spoken(following)),
            ],
            following,
        )
        start = stop
    return messages


def _with_outputs(
    said: Iterable[tuple[bytes | None, Sequence[Call]]], items: Iterable[InputItem]
) -> list[bytes]:
    """Return the messages in ``said``, and behind each the outputs among ``items`` that answer the
    calls beside it."""
    outputs = {item.call_id: item.output for item in items if isinstance(item, CallOutput)}
    messages: list[bytes] = []
    for message, calls in said:
        if message is not None:
            messages.append(message)
        messages += [
            _output_message(call.call_id, outputs.pop(call.call_id))
            for call in calls
            if call.call_id in outputs
        ]
    if outputs:
        raise ConversationError(f"the output of {next(iter(outputs))!r} answers no call")
    return messages


def _spoken(items: Iterable[InputItem]) -> list[_Spoken]:
    """Return what is said, thought and called in ``items``; an output ends what comes before it."""
    spoken: list[_Spoken] = []
    is_open = False  # the assistant may go on in the last of them
    for item in items:
        match item:
            case Message(role="assistant") | ReasoningItem() | FunctionCall() | CustomToolCall():
                if not is_open:
                    spoken.append(_Spoken("assistant"))
                spoken[-1].add(item)
                is_open = True
            case Message():
                role = "system" if item.role == "developer" else item.role
                spoken.append(_Spoken(role, item.text))
                is_open = False
            case Compaction():
                spoken.append(_Spoken("user", summary_text(item)))
                is_open = False
            case CallOutput():
                is_open = False
            case ItemReference() | AdditionalTools() | UnknownItem():
                pass  # nothing of it is for the model to read
            case _:
                assert_never(item)
    return spoken


def _sampled(turn: RecordedTurn) -> _Spoken:
    sampled = _Spoken("assistant")
    for item in turn.items:
        sampled.add(item)
    return sampled


# --- One message ---------------------------------------------------------------------------------


def _message(said: _Spoken, dialect: ChatDialect, *, may_only_think: bool = False) -> bytes | None:
    """Return the message that says ``said``, or None if there is nothing for a model to read."""
    if said.role != "assistant":
        return encoded({"role": said.role, "content": said.text})
    thoughts = said.thoughts if dialect.reasoning_field else ""
    if not (said.text or said.calls or (thoughts and may_only_think)):
        return None
    content = said.text or (None if said.calls else "")
    message: JsonObject = {"role": "assistant", "content": content}
    if dialect.reasoning_field and thoughts:
        message[dialect.reasoning_field] = thoughts
    if said.calls:
        message["tool_calls"] = [_call_json(call) for call in said.calls]
    return encoded(message)


def _call_json(call: Call) -> JsonObject:
    function = {"name": sent_name(call.qualified_name), "arguments": arguments_of(call)}
    return {"id": call.call_id, "type": "function", "function": function}


def _output_message(call_id: str, output: str) -> bytes:
    return encoded({"role": "tool", "tool_call_id": call_id, "content": output})


# --- The request ---------------------------------------------------------------------------------

_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
"""Efforts that few endpoints know, and the closest that most do."""

_MAX_SEED = 2**31 - 1
"""Gemini's endpoint reads a seed as 32 bits, one of them the sign."""


def request_body(
    messages: Iterable[bytes],
    *,
    model: str,
    tools: Sequence[CallableTool],
    constraint: Constraint,
    params: SamplingParams,
    dialect: ChatDialect,
    max_tokens: int,
    max_tokens_member: str = "max_completion_tokens",
    omitted: Collection[str] = (),
    cache_key: str | None = None,
    effort: str | None = None,
) -> bytes:
    """Return the body of a request for a turn that is streamed.

    Args:
        messages: encoded.
        model: by the endpoint's name.
        tools: all that the run has, by their qualified names.
        constraint: what the turn may be; of its grammar, what can be said here.
        params: how it is sampled. Of a seed, the endpoint gets the low 31 bits.
        dialect: the endpoint's.
        max_tokens: always sent, as endpoints count it against their rate limits beforehand, and
            where there is none the rest of the context.
        max_tokens_member: what the endpoint calls that.
        omitted: members that are left out.
        cache_key: the same for all requests of a run, to find the cache of its prefix.
        effort: how much the model is to think; None leaves it to the endpoint.
    """
    members: JsonObject = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        max_tokens_member: max_tokens,
        **_sampling_members(params),
    }
    if cache_key is not None:
        members["prompt_cache_key"] = cache_key
    if effort is not None:
        members["reasoning_effort"] = _EFFORTS.get(effort, effort)
    if constraint.wants_json and not constraint.is_forced:
        members["response_format"] = _response_format(constraint.text_format)
    if tools:
        members |= choice_members(tools, constraint, dialect)
    members |= dialect.extra
    parts = [encoded({name: members[name] for name in members if name not in omitted})[:-1]]
    if tools:
        declared = tools_json(tools_to_declare(tools, constraint, dialect), dialect)
        parts += [b',"tools":', declared]
    return b"".join([*parts, b',"messages":[', b",".join(messages), b"]}"])


def _sampling_members(params: SamplingParams) -> dict[str, object]:
    members: dict[str, object] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": params.seed & _MAX_SEED,
    }
    if params.presence_penalty:
        members["presence_penalty"] = params.presence_penalty
    if params.frequency_penalty:
        members["frequency_penalty"] = params.frequency_penalty
    if params.top_logprobs is not None:
        members["logprobs"] = True
    if params.top_logprobs:
        members["top_logprobs"] = params.top_logprobs
    return members


def _response_format(text_format: TextFormat) -> JsonObject:
    if text_format.kind is not TextFormatKind.JSON_SCHEMA:
        return {"type": text_format.kind.value}
    members = {
        "name": text_format.name,
        "description": text_format.description,
        "schema": text_format.schema,
        "strict": text_format.strict,
    }
    schema = {name: member for name, member in members.items() if member is not None}
    return {"type": text_format.kind.value, "json_schema": schema}
