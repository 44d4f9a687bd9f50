"""Make a conversation shorter: the model says in its own words what has to be remembered of it.

What the system and the user said stays word for word. One summary takes the place of all else: what
the model said, thought and called, what the calls returned, and earlier summaries. A user's words
are few, and they are what any answer is measured by; a model's work is long, and its result is what
counts. The OpenAI reference cuts in the same place (Compact a response: "all user messages,
followed by a single compaction item"), and a client can tell what became of its conversation. Where
the user's messages alone take more than half of what there may be, the oldest of them go, and live
on in the summary.

The summary stands where the last of what it replaces stood, so what the user has said since comes
after it: a model answers what it read last. Calls that have no output yet stay, with all that
follows them. A client may send the conversation as it was with a compaction in it, or only what the
compaction left: both are the same conversation.

The model that had the conversation summarises it. It is asked to in one more message, so whatever
is in a cache is used again. The summary is sampled greedily, without calls, in a run like any
other; thoughts are not a part of it. What does not fit the context is summarised without its oldest
turns.

A response compacts its conversation where the request sets a ``compact_threshold`` and the prompt
is longer; an entry of ``context_management`` without one asks for nothing. It does so before it
says anything, never between two segments, and does not try where a summary might save nothing. The
tokens of the summary count in the usage of the response: in a dialect that tells usage by segments,
in that of the first.
"""

from collections.abc import Container, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Generic, TypeGuard, TypeVar

import msgspec
from msgspec import UNSET

from protocol.items import (
    AdditionalTools,
    CallOutput,
    Compaction,
    CustomToolCall,
    InputItem,
    ItemReference,
    Message,
    UnknownItem,
)
from protocol.output_items import OutputItem, as_output
from protocol.response import CompactionResource
from protocol.tools import echo_tools
from protocol.validation import JsonObject
from sampler.conversation import Conversation, ConversationError
from sampler.engine import ContextLengthExceededError, Engine
from sampler.grammar import GrammarError
from sampler.outputs import SegmentEnded, TextDelta
from sampler.params import Constraint, SamplingParams
from sampler.prompt import Prompt, longest_known
from sampler.recorded_turn import Item, calls_in, expanded
from sampler.run import Run, StopReason
from sampler.snapshot import Snapshot, Sources
from server.past_response import new_id, with_ids
from server.run_report import usage_of
from server.telemetry import Telemetry

MAX_SUMMARY_TOKENS = 256
MAX_THOUGHT_TOKENS = 768
"""What a model that thinks may sample besides."""

REQUEST = Message(
    "user",
    "Summarize our conversation so far in a few sentences, with all facts that are needed to "
    "continue it.",
)
"""Few words: the smallest models answer more of them by repeating what they were told last."""


# --- What is left of a conversation --------------------------------------------------------------


AnyItem = TypeVar("AnyItem", bound=Item)


@dataclass(frozen=True)
class Outline(Generic[AnyItem]):
    """What is left of a conversation, with a gap where the summary goes."""

    before: Sequence[AnyItem]
    after: Sequence[AnyItem]

    def filled(self, compaction: Compaction) -> list[AnyItem | Compaction]:
        """Return the compacted conversation."""
        return [*self.before, compaction, *self.after]


def outline(items: Sequence[AnyItem]) -> Outline[AnyItem]:
    """Return what is left of ``items``."""
    num_settled = len(settled(items))
    replaced = [i for i, item in enumerate(items[:num_settled]) if _is_replaced(item)]
    end = replaced[-1] + 1 if replaced else num_settled
    return Outline([item for item in items[:end] if _is_kept(item)], items[end:])


def settled(items: Sequence[AnyItem]) -> Sequence[AnyItem]:
    """Return ``items`` up to the first call that has no output: what can be summarised.

    An output that came for another call of the same turn is not settled either.
    """
    output_at = {item.call_id: i for i, item in enumerate(items) if isinstance(item, CallOutput)}
    end = next((i for i, item in enumerate(items) if _is_open(item, output_at)), len(items))
    while any(output_at[call.call_id] >= end for call in calls_in(items[:end])):
        end -= 1
    return items[:end]


def _is_open(item: Item, answered: Iterable[str]) -> bool:
    return any(call.call_id not in answered for call in calls_in([item]))


def _is_kept(item: Item) -> bool:
    return isinstance(item, AdditionalTools) or (
        isinstance(item, Message) and item.role != "assistant"
    )


def _is_replaced(item: Item) -> bool:
    return not _is_kept(item) and not isinstance(item, UnknownItem)


def as_compacted(items: Sequence[AnyItem]) -> Sequence[AnyItem | Compaction]:
    """Return ``items`` without what the latest compaction among them stands for.

    Clients that keep the history themselves append the compaction like any other output, and need
    not drop what came before (OpenAI guide, Compaction).
    """
    for i in reversed(range(len(items))):
        if isinstance(compaction := items[i], Compaction):
            return [*outline(items[:i]).filled(compaction), *items[i + 1 :]]
    return items


# --- Compacting it -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compacting:
    """A conversation that is to be compacted."""

    items: Sequence[Item]
    """The conversation as it is."""
    outline: Outline[Item]
    run: Run
    """Samples the summary."""

    def cancel(self) -> None:
        """Have sampling end after the token in flight: nobody wants the summary any more."""
        self.run.wanted_stop = StopReason.CANCELLED

    @property
    def is_cancelled(self) -> bool:
        return self.run.wanted_stop is StopReason.CANCELLED


@dataclass(frozen=True)
class Summary:
    """What the model made of a conversation."""

    text: str
    """Empty where it said nothing but thoughts."""
    snapshots: Sequence[Snapshot]
    """The whole conversation, for others to start from; none where the engine keeps no cache."""


@dataclass(frozen=True)
class Compacted:
    """What has become of a prompt."""

    prompt: Prompt
    compaction: Compaction | None
    """None where there was nothing to gain: the prompt is what it was."""
    snapshots: Sequence[Snapshot]
    """The conversation before, for others to start from."""


class Compactor:
    """Has conversations summarised."""

    def __init__(self, engine: Engine, telemetry: Telemetry) -> None:
        self._engine = engine
        self._telemetry = telemetry

    async def begin(
        self,
        run_id: str,
        conversation: Conversation,
        prompts: Iterable[Prompt],
        sources: Sources,
    ) -> Compacting:
        """Return what ``summarise`` goes on with; nothing is sampled yet.

        Args:
            run_id: the id of the run that will sample the summary.
            conversation: may be longer than the context.
            prompts: what may be known of its ids.
            sources: what to start from.

        Raises:
            ContextLengthExceededError: even its last turn is too long.
            ConversationError: the chat template refuses it.
            GrammarError: its tools are more than a grammar can hold.
        """
        left = await self._bounded(outline(conversation.items), self._max_context)
        run = await self._open_run(run_id, conversation, prompts, sources)
        return Compacting(conversation.items, left, run)

    async def begin_where_it_saves(
        self,
        run_id: str,
        prompt: Prompt,
        prompts: Iterable[Prompt],
        sources: Sources,
        *,
        max_tokens: int,
    ) -> Compacting | None:
        """Return what ``compact`` goes on with, or None where some summary would save nothing.

        Args:
            run_id: the id of the run that will sample the summary.
            prompt: of the conversation; may be longer than the context.
            prompts: what may be known of its ids.
            sources: what to start from.
            max_tokens: how long the conversation should be.
        """
        conversation = prompt.conversation
        left = await self._bounded(outline(conversation.items), max_tokens)
        try:
            least = await self._filled(conversation, left, Compaction(""))
            if least.num_tokens + MAX_SUMMARY_TOKENS >= prompt.num_tokens:
                return None
            run = await self._open_run(run_id, conversation, prompts, sources)
            return Compacting(conversation.items, left, run)
        except (ContextLengthExceededError, ConversationError, GrammarError):
            return None

    async def summarise(self, compacting: Compacting) -> Summary:
        """Return the summary.

        Raises:
            EngineError: a model step failed.
        """
        run, pieces = compacting.run, list[str]()
        snapshots: list[Snapshot] = []
        async with aclosing(self._engine.sample(run)) as outputs:
            async for output in outputs:
                if isinstance(output, TextDelta):
                    pieces.append(output.text)
                elif isinstance(output, SegmentEnded):
                    self._telemetry.observe_segment(output.segment, is_resumed=False)
                    if snapshot := self._engine.snapshot(run):
                        snapshots.append(snapshot)
        return Summary("".join(pieces).strip(), snapshots)

    async def compact(self, compacting: Compacting, prompt: Prompt) -> Compacted:
        """Return what becomes of ``prompt``.

        Raises:
            EngineError: a model step failed.
        """
        summary = await self.summarise(compacting)
        if summary.text and not compacting.is_cancelled:
            compaction = Compaction(summary.text, new_id("cmp"))
            shorter = await self._filled(prompt.conversation, compacting.outline, compaction)
            if shorter.num_tokens < prompt.num_tokens:
                return Compacted(shorter, compaction, summary.snapshots)
        return Compacted(prompt, None, summary.snapshots)

    @property
    def _max_context(self) -> int:
        return self._engine.max_context

    async def _bounded(self, left: Outline[Item], max_tokens: int) -> Outline[Item]:
        """Return ``left`` without the oldest of the user's messages, if they are too long."""
        said = [(i, item.text) for i, item in enumerate(left.before) if _is_by_user(item)]
        counts = await self._engine.count_tokens([text for _, text in said])
        num_dropped = 0
        while sum(counts[num_dropped:]) > max_tokens // 2:
            num_dropped += 1
        dropped = {i for i, _ in said[:num_dropped]}
        kept = [item for i, item in enumerate(left.before) if i not in dropped]
        return replace(left, before=kept)

    async def _filled(
        self, conversation: Conversation, left: Outline[Item], compaction: Compaction
    ) -> Prompt:
        return await self._engine.lay_out(replace(conversation, items=left.filled(compaction)))

    async def _open_run(
        self,
        run_id: str,
        conversation: Conversation,
        prompts: Iterable[Prompt],
        sources: Sources,
    ) -> Run:
        """Return the run that samples the summary of ``conversation``."""
        thinks = self._engine.thinks(conversation)
        budget = MAX_SUMMARY_TOKENS + (MAX_THOUGHT_TOKENS if thinks else 0)
        budget = min(budget, self._max_context // 4)
        summarised = replace(conversation, items=settled(conversation.items))
        known = longest_known(summarised, prompts)
        prompt = await self._engine.encode_truncated(summarised, known, coda=[REQUEST], room=budget)
        constraint = Constraint(
            tuple(conversation.tools),
            max_calls=0,
            thinks=thinks,
            think_is_open=self._engine.opens_thinking(prompt),
        )
        await self._engine.check_constraint(constraint)
        params = SamplingParams(temperature=0, max_output_tokens=budget)
        self._telemetry.pre_inference.inc()
        return self._engine.open_run(run_id, prompt, params, constraint, sources)


def _is_by_user(item: Item) -> TypeGuard[Message]:
    return isinstance(item, Message) and item.role == "user"


# --- As clients see it ---------------------------------------------------------------------------


def compaction_resource(
    compacting: Compacting, summary: Summary, created_at: int, extension: JsonObject | None
) -> CompactionResource:
    """Return the answer to a request to compact a conversation, with ``extension`` as its
    ``suspend:run``.

    Where the model gave no summary, that is the conversation as it was, as it is within a response.
    An error would not help: a server error is tried again, the model says the same again, and with
    a client error an agent could not go on at all.
    """
    items = compacting.items
    if summary.text:
        items = compacting.outline.filled(Compaction(summary.text))
    return CompactionResource(
        compacting.run.id,
        created_at,
        wire_items(items),
        usage_of(compacting.run.segments),
        UNSET if extension is None else extension,
    )


def wire_items(items: Iterable[Item]) -> list[OutputItem | JsonObject]:
    """Return ``items`` as they stand on the wire. What was not understood is left out."""
    flat = expanded(items)
    custom_calls = {item.call_id for item in flat if isinstance(item, CustomToolCall)}
    return [_wire_item(item, custom_calls) for item in flat if not isinstance(item, UnknownItem)]


def _wire_item(item: InputItem, custom_calls: Container[str]) -> OutputItem | JsonObject:
    match item:
        case Message(role="system" | "developer" | "user"):
            content = [{"type": "input_text", "text": item.text}]
            return _named({"type": "message", "role": item.role, "content": content})
        case CallOutput(call_id, output):
            call = "custom_tool_call" if call_id in custom_calls else "function_call"
            return _named({"type": f"{call}_output", "call_id": call_id, "output": output})
        case AdditionalTools():
            tools = [msgspec.to_builtins(tool) for tool in echo_tools(item.tools)]
            return _named({"type": "additional_tools", "role": "developer", "tools": tools})
        case ItemReference() | UnknownItem():
            raise AssertionError("it was resolved, or left out")
        case _:
            return as_output(item, new_id)


def _named(item: JsonObject) -> JsonObject:
    (named,) = with_ids([item])
    return {**named, "status": "completed"}
