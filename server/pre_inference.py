"""The work before inference: from a request to a run that is ready to be sampled. Once per run."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec

from protocol import errors
from protocol.client_events import (
    CompactParams,
    CreateParams,
    resolve_tool_choice,
)
from protocol.errors import ProtocolError
from protocol.items import (
    AdditionalTools,
    InputItem,
    check_calls_are_answered,
    tools_in_effect,
)
from protocol.tools import CallableTool, ToolChoice, ToolChoiceMode, grammar_paths
from protocol.validation import JsonObject
from sampler.conversation import Conversation, ConversationError
from sampler.counters import TextWork
from sampler.echoes import without_echoes
from sampler.engine import ContextLengthExceededError, Engine
from sampler.grammar import GrammarError
from sampler.params import Constraint, SamplingParams
from sampler.prompt import Prompt, longest_known
from sampler.recorded_turn import Item, expanded
from sampler.replay import ReplayError, Replays, num_turns_said
from sampler.run import Run
from sampler.snapshot import Sources
from server.compaction import Compacting, Compactor, as_compacted, settled
from server.memory import Memory
from server.past_response import PastResponse, new_id, with_ids
from server.safety import ClassificationError, Findings, Safety
from server.settings import Settings
from server.telemetry import Telemetry
from server.work import Stage, Work

History = Sequence[Item]
T = TypeVar("T")
U = TypeVar("U")

REPLAY = "replay"
"""The key of a request's metadata that names the trace to be replayed."""

_NO_THINKING = ("none", "minimal")


@contextmanager
def refused(param: str) -> Iterator[None]:
    """Turn the engine's refusal of ``param`` into the protocol's."""
    try:
        yield
    except ContextLengthExceededError as error:
        raise errors.context_length_exceeded(error.num_tokens, error.limit) from error
    except (GrammarError, ConversationError) as error:
        raise errors.invalid_value(param, str(error)) from error


@dataclass(frozen=True)
class Prepared:
    """A response that can begin, and what was asked for."""

    id: str
    params: CreateParams
    tools: Sequence[CallableTool]
    """Those of the request and those that the conversation brought."""
    choice: ToolChoice
    prompt: Prompt
    wire_items: Sequence[JsonObject]
    """The conversation so far as clients see it."""
    work: Work
    """What was done for it, and will be."""
    findings: Findings = field(default_factory=Findings)
    """What was found in the input."""
    run: Run | None = None
    """None for a warm-up, which samples nothing, and before the conversation is compacted."""
    compacting: Compacting | None = None
    """Set where that is to be done first."""
    refusal: ProtocolError | None = None
    """Set where it may not be answered: it fails before anything is sampled."""

    @property
    def is_to_be_sampled(self) -> bool:
        """Whether there is a run to begin with."""
        return self.run is not None or self.compacting is not None


class PreInference:
    """Classifies, renders and encodes what was read (``reading``), and opens its run."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        telemetry: Telemetry,
        compactor: Compactor,
        safety: Safety,
        replays: Replays | None = None,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._telemetry = telemetry
        self._compactor = compactor
        self._safety = safety
        self._replays = replays

    async def prepare(self, params: CreateParams, memory: Memory, work: Work) -> Prepared:
        """Return the response that ``params`` ask for; nothing is sampled yet.

        Raises:
            ProtocolError: something is wrong; nothing was changed.
        """
        # Their lanes may go on meanwhile, and forget them.
        prompts, sources = memory.prompts, memory.sources
        lay_out = self._engine.lay_out if params.generate else self._engine.lay_out_beginning
        # Both take their time elsewhere, the one on a thread of its own, the other on another.
        findings, prepared = await _both(
            self.classify_input(params.input, work),
            self._prepare(params, memory, prompts, lay_out, work),
        )
        prepared = replace(prepared, findings=findings)
        if refusal := refusal_of(findings, "input"):
            return replace(prepared, refusal=refusal)
        return await self._with_run(prepared, prompts, sources)

    async def count_tokens(self, params: CreateParams, memory: Memory, work: Work) -> int:
        """Return how long the context would be of the response that ``params`` ask for, whether or
        not it fits: that is what one wants to know.

        Raises:
            ProtocolError: something is wrong; nothing was changed.
        """
        prepared = await self._prepare(params, memory, memory.prompts, self._engine.lay_out, work)
        return prepared.prompt.num_tokens

    async def classify_input(self, items: Sequence[InputItem], work: Work) -> Findings:
        """Return what a classifier says of ``items``; without one, nothing.

        Raises:
            ProtocolError: it failed.
        """
        if not self._safety.is_on or not items:
            return Findings()
        with work.stage(Stage.CLASSIFY_INPUT, items=0) as done, classified():
            findings = await self._safety.classify_input(items)
            done.items = findings.num_items
        return findings

    async def _prepare(
        self,
        params: CreateParams,
        memory: Memory,
        prompts: Iterable[Prompt],
        lay_out: Callable[[Conversation, Prompt | None, TextWork | None], Awaitable[Prompt]],
        work: Work,
    ) -> Prepared:
        """Return the response that ``params`` ask for, before anything is opened for it.

        Args:
            params: what is asked for.
            memory: where what it goes on from is found.
            prompts: what its prompt may go on from.
            lay_out: makes the prompt.
            work: takes note of what is done.
        """
        params = self._capped(params)
        parent = await self._parent(params.previous_response_id, memory)
        history = await self._history(params.input, params.instructions, parent, memory)
        check_calls_are_answered(expanded(history))
        tools = tools_in_effect(params.tools, history)  # no turn declares any
        choice = resolve_tool_choice(params, tools)
        await self._check_grammars(params, tools, parent)
        conversation = _conversation(params, history, tools)
        with refused("input"), work.text() as text:
            prompt = await lay_out(conversation, longest_known(conversation, prompts), text)
        await self.check_choice(params, tools, choice, prompt)
        before = parent.wire_items if parent else ()
        wire_items = [*before, *with_ids(params.input_json)]
        return Prepared(new_id("resp"), params, tools, choice, prompt, wire_items, work)

    async def prepare_compaction(
        self, params: CompactParams, memory: Memory, work: Work
    ) -> Compacting:
        """Return what is to be summarised for ``params``; nothing is sampled yet.

        Where it follows a response, it is summarised as that response had it, with its tools and,
        if the request has none, its instructions: so its cache is of use.

        Raises:
            ProtocolError: something is wrong; nothing was changed.
        """
        if refusal := refusal_of(await self.classify_input(params.input, work), "input"):
            raise refusal
        parent = await self._parent(params.previous_response_id, memory)
        prompts, sources = memory.prompts, memory.sources
        history = await self._history(params.input, params.instructions, parent, memory)
        check_calls_are_answered(expanded(settled(history)))
        read = parent.prompt.conversation if parent and parent.prompt else Conversation(())
        tools = tools_in_effect(parent.params.tools if parent and parent.params else (), history)
        conversation = Conversation(
            history, params.instructions or read.instructions, tools, read.enable_thinking
        )
        with refused("input"):
            return await self._compactor.begin(new_id("resp"), conversation, prompts, sources)

    async def _parent(self, response_id: str | None, memory: Memory) -> PastResponse | None:
        return None if response_id is None else await memory.parent(response_id)

    def _capped(self, params: CreateParams) -> CreateParams:
        cap, asked = self._settings.max_output_tokens, params.max_output_tokens
        if cap is None or (asked is not None and asked <= cap):
            return params
        return msgspec.structs.replace(params, max_output_tokens=cap)

    async def _history(
        self,
        added: Sequence[InputItem],
        instructions: str | None,
        parent: PastResponse | None,
        memory: Memory,
    ) -> History:
        """Return the whole conversation, with what was sampled here as the turns it was."""
        items = await memory.resolve(added)
        if parent:
            return as_compacted([*parent.items, *without_echoes(items, parent.items)])
        return await memory.recognise(as_compacted(items), instructions)

    async def _check_grammars(
        self, params: CreateParams, tools: Sequence[CallableTool], parent: PastResponse | None
    ) -> None:
        """Make sure that all can be constrained. What the parent had too, is known to be."""
        with refused("text.format.schema"):
            await self._engine.check_text_format(params.text_format)
        if parent and parent.params and parent.params.tools_digest == params.tools_digest:
            tools = tools_in_effect((), params.input)
        paths = _grammar_paths(params)
        for tool in tools:
            with refused(paths.get(tool.name, "input")):
                await self._engine.check_tool(tool)

    async def check_choice(
        self,
        params: CreateParams,
        tools: Sequence[CallableTool],
        choice: ToolChoice,
        prompt: Prompt,
    ) -> None:
        """Make sure that the turn that ``prompt`` asks for can be held to all it may be.

        Raises:
            ProtocolError: together the tools are too much, or nothing can be forced here.
        """
        # Where nothing is constrained, tools and formats that bind were refused one by one before.
        with refused("tools" if self._engine.capabilities.grammar else "tool_choice"):
            await self._engine.check_constraint(self.constraint(params, tools, choice, prompt))

    async def _with_run(
        self, prepared: Prepared, prompts: Sequence[Prompt], sources: Sources
    ) -> Prepared:
        """Return ``prepared`` with what is to be sampled first, if anything is."""
        work = prepared.work
        if compacting := await self._compacting(prepared, prompts, sources):
            first = compacting.run.segments[0]
            first.requested_at, first.pre_inference_seconds = work.received_at, work.seconds
            return replace(prepared, compacting=compacting)
        prompt = await self._fitting(prepared.prompt, prepared.params)
        run = self.open_run(prepared, prompt, sources, work) if prepared.params.generate else None
        return replace(prepared, prompt=prompt, run=run)

    async def _compacting(
        self, prepared: Prepared, prompts: Sequence[Prompt], sources: Sources
    ) -> Compacting | None:
        """Return how the conversation is to be compacted, if it is to be and can be."""
        params, prompt = prepared.params, prepared.prompt
        threshold = params.compact_threshold
        if not params.generate or threshold is None or prompt.num_tokens <= threshold:
            return None
        return await self._compactor.begin_where_it_saves(
            prepared.id, prompt, prompts, sources, max_tokens=threshold
        )

    async def _fitting(self, prompt: Prompt, params: CreateParams) -> Prompt:
        """Return ``prompt``, without its oldest turns if it is too long and the request allows."""
        with refused("input"):
            try:
                self._engine.check_length(prompt.num_tokens)
                return prompt
            except ContextLengthExceededError:
                if params.truncation == "disabled":
                    raise
                return await self._engine.encode_truncated(prompt.conversation)

    async def go_on(self, prompt: Prompt, items: Sequence[InputItem], work: Work) -> Prompt:
        """Return ``prompt``, which ends with a sampled turn, followed by ``items``.

        Raises:
            ProtocolError: they do not fit; nothing was changed.
        """
        conversation = prompt.conversation
        longer = replace(conversation, items=[*conversation.items, *items])
        with refused("input"), work.text() as text:
            return await self._engine.encode(longer, prompt, text)

    def constraint(
        self,
        params: CreateParams,
        tools: Sequence[CallableTool],
        choice: ToolChoice,
        prompt: Prompt,
    ) -> Constraint:
        """Return what the turn that ``prompt`` asks for may be."""
        least, most = _num_calls(choice, is_parallel=params.parallel_tool_calls)
        return Constraint(
            tools=tuple(
                tool for tool in tools if choice.names is None or tool.name in choice.names
            ),
            min_calls=least,
            max_calls=most,
            text_format=params.text_format,
            thinks=self._engine.thinks(prompt.conversation),
            think_is_open=self._engine.opens_thinking(prompt),
            forced_ids=self._replayed(params, prompt),
        )

    def _replayed(self, params: CreateParams, prompt: Prompt) -> tuple[int, ...] | None:
        """Return the turn that comes next in the trace that the request replays, if it does."""
        name = params.metadata.get(REPLAY)
        if self._replays is None or name is None:
            return None
        try:
            return self._replays.turn_ids(name, num_turns_said(prompt.conversation))
        except ReplayError as error:
            raise errors.invalid_value(f"metadata.{REPLAY}", str(error)) from error

    def open_run(
        self, prepared: Prepared, prompt: Prompt, sources: Sources, work: Work | None = None
    ) -> Run:
        """Return the run of ``prepared``, which is to go on from ``prompt``.

        Args:
            prepared: the response.
            prompt: its own, or what that was compacted to.
            sources: what the run may start from.
            work: what went before, if the run is the first thing that comes of it.

        Raises:
            ProtocolError: the prompt is too long.
        """
        params = prepared.params
        sampling = SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            seed=self._seed(params),
            max_output_tokens=params.max_output_tokens,
            top_logprobs=params.top_logprobs if params.wants_logprobs else None,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            reasoning_effort=params.reasoning.effort if params.reasoning else None,
        )
        constraint = self.constraint(params, prepared.tools, prepared.choice, prompt)
        with refused("input"):
            run = self._engine.open_run(
                prepared.id,
                prompt,
                sampling,
                constraint,
                sources,
                requested_at=work.received_at if work else None,
                pre_inference_seconds=work.seconds if work else 0.0,
            )
        self._telemetry.pre_inference.inc()
        return run

    def _seed(self, params: CreateParams) -> int:
        if params.seed is not None:
            return params.seed
        return secrets.randbits(63) if self._settings.seed is None else self._settings.seed


@contextmanager
def classified() -> Iterator[None]:
    """Turn a classifier's failure into the server's: what nobody has judged does not pass."""
    try:
        yield
    except ClassificationError as error:
        raise errors.server_error(str(error)) from error


def refusal_of(
    findings: Findings, param: str, places: Sequence[int] | None = None
) -> ProtocolError | None:
    """Return what to tell where something among ``findings`` may not pass.

    Args:
        findings: of some items.
        param: the list that they are in.
        places: theirs in the list, if they are not all of it.
    """
    if (blocked := findings.blocked) is None:
        return None
    index, verdict = blocked
    place = index if places is None else places[index]
    return errors.invalid_prompt(verdict.label, f"{param}[{place}]")


async def _both(first: Awaitable[T], second: Awaitable[U]) -> tuple[T, U]:
    """Return what both give, side by side. Where one fails, the other is waited for."""
    one, other = await asyncio.gather(first, second, return_exceptions=True)
    try:
        # What is wrong with a request is told before what could not be found out of it.
        if isinstance(other, BaseException):
            raise other
        if isinstance(one, BaseException):
            raise one
        return one, other
    finally:
        del one, other  # an error must not hold itself: its traceback holds caches


def _conversation(
    params: CreateParams, history: History, tools: Sequence[CallableTool]
) -> Conversation:
    effort = params.reasoning.effort if params.reasoning else None
    enable_thinking = False if effort in _NO_THINKING else None
    return Conversation(history, params.instructions, tools, enable_thinking)


def _grammar_paths(params: CreateParams) -> dict[str, str]:
    """Return where the request declares the tools that are in effect."""
    paths = grammar_paths(params.tools)
    for i, item in enumerate(params.input):
        if isinstance(item, AdditionalTools):
            paths |= grammar_paths(item.tools, f"input[{i}].tools")
    return paths


def _num_calls(choice: ToolChoice, *, is_parallel: bool) -> tuple[int, int | None]:
    """Return how many calls a turn makes: at least, and at most (None is no bound)."""
    most = None if is_parallel else 1
    match choice.mode:
        case ToolChoiceMode.AUTO:
            return 0, most
        case ToolChoiceMode.NONE:
            return 0, 0
        case ToolChoiceMode.REQUIRED:
            return 1, most
        case ToolChoiceMode.NAMED:
            return 1, 1


def choice_after_calls(first: ToolChoice, chosen: ToolChoice | None) -> ToolChoice:
    """Return the choice of a segment that follows tool outputs.

    A forced choice binds once, until the first call was sampled: otherwise a run could never end.

    Args:
        first: what the response was created with.
        chosen: what the append says, if it does; it binds the next segment.
    """
    if chosen is not None:
        return chosen
    match first.mode:
        case ToolChoiceMode.NAMED:
            return ToolChoice()
        case ToolChoiceMode.REQUIRED:
            return msgspec.structs.replace(first, mode=ToolChoiceMode.AUTO)
        case ToolChoiceMode.AUTO | ToolChoiceMode.NONE:
            return first
