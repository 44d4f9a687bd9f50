"""The sampling loop over a back-end that takes tokens and gives tokens.

Who owns what:

*   The event loop: the runs, their token logs and states, and the text that their tokens become
    (``turn_reader``).
*   The text thread: rendering, encoding and grammars, which take milliseconds.
*   The back-end: whatever samples, and the caches.

A segment goes through all three: its grammar is compiled, its session is started, and its tokens
come back through a channel, a few at once where the model is faster than the event loop.
"""

import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import ParamSpec, Protocol, TypeVar
from weakref import WeakKeyDictionary

from protocol.client_events import TextFormat
from protocol.items import InputItem
from protocol.tools import CallableTool, CustomTool, FunctionTool
from sampler.cache_pool import MemoryUse
from sampler.chat_template import ChatFormat
from sampler.conversation import Conversation, num_characters
from sampler.counters import TextWork
from sampler.detokenizer import Detokenizer
from sampler.engine import Engine, SegmentStream
from sampler.engine_error import failure_of
from sampler.grammar import GrammarCompiler, GrammarError
from sampler.params import Constraint, SamplingParams
from sampler.prompt import Prompt, TokenPrompt, encode, encode_beginning, fit
from sampler.recorded_turn import Call
from sampler.run import Origin, Run
from sampler.sampled_turn import SampledTurn, TurnOutput
from sampler.snapshot import Snapshot, Sources
from sampler.suspension import Suspension
from sampler.token_backend import Session, TokenBackend, closest
from sampler.token_channel import Token
from sampler.tokenizer import Tokenizer
from sampler.turn_reader import TurnReader
from sampler.worker_thread import WorkerThread

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_FEW_CHARACTERS = 2000
"""Encoded in about a third of a millisecond."""


class Language(Protocol):
    """How a model is spoken to."""

    @property
    def name(self) -> str:
        """What clients call it."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def chat_format(self) -> ChatFormat: ...


class TokenEngine(Engine):
    """Samples runs token by token."""

    def __init__(
        self,
        model: Language,
        backend: TokenBackend,
        *,
        max_forced_string: int = 64,
        is_simulated: bool = False,
    ) -> None:
        """Sample with ``backend``.

        Args:
            model: how it is spoken to.
            backend: what samples.
            max_forced_string: see ``GrammarCompiler``.
            is_simulated: whether there is no model, and what it says is made up.
        """
        super().__init__(
            model.name, backend.capabilities, backend.counters, is_simulated=is_simulated
        )
        self._model = model
        self._backend = backend
        self._grammars = (
            GrammarCompiler(model.tokenizer, max_forced_string)
            if backend.capabilities.grammar
            else _NoGrammars()
        )
        self._sources: WeakKeyDictionary[Run, Sources] = WeakKeyDictionary()
        # Nothing else holds a run's session, and so its cache, for long: what an exception's
        # traceback holds would live on after the run.
        self._sessions: dict[Run, Session] = {}
        # Rendering, encoding and compiling grammars take milliseconds that the event loop must not
        # wait for. One thread, so that their counts are exact.
        self._text_thread = WorkerThread("text")

    @property
    def max_context(self) -> int:
        return self._backend.max_context

    @property
    def failure(self) -> str | None:
        return self._backend.failure

    @property
    def kv_tokens(self) -> int:
        return self._backend.kv_tokens

    @property
    def memory(self) -> MemoryUse:
        return self._backend.memory

    async def start(self) -> None:
        await self._backend.start()

    async def stop(self) -> None:
        await self._backend.stop()

    def close(self) -> None:
        """Stop the threads, after the step in flight. Runs must be over."""
        self._backend.close()
        self._text_thread.close()

    # --- Text -------------------------------------------------------------------------------------

    async def lay_out(
        self,
        conversation: Conversation,
        known: Prompt | None = None,
        work: TextWork | None = None,
    ) -> TokenPrompt:
        return await self._lay_out(work, encode, conversation, known)

    async def lay_out_beginning(
        self,
        conversation: Conversation,
        known: Prompt | None = None,
        work: TextWork | None = None,
    ) -> TokenPrompt:
        return await self._lay_out(work, encode_beginning, conversation, known)

    async def _lay_out(
        self,
        work: TextWork | None,
        function: Callable[[ChatFormat, Conversation, TokenPrompt | None], TokenPrompt],
        conversation: Conversation,
        known: Prompt | None,
    ) -> TokenPrompt:
        lay_out = partial(
            self._measured,
            work or TextWork(),
            function,
            self._model.chat_format,
            conversation,
            None if known is None else _of_tokens(known),
        )
        is_short = known is not None and _num_new_characters(conversation, known) <= _FEW_CHARACTERS
        return await self._on_text(lay_out, is_short=is_short)

    async def _on_text(self, function: Callable[[], T], *, is_short: bool) -> T:
        """Have the text thread call ``function``. What is short, and would be its only work, is
        done here and now: to hand it over takes longer, and the event loop does not miss it."""
        if is_short and self._text_thread.is_idle:
            return function()
        return await self._text_thread.run(function)

    def _measured(
        self, work: TextWork, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Text thread: nobody else encodes meanwhile, so all that was counted was for this."""
        before, began_at = replace(self.counters), time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            encode_seconds = self.counters.encode_seconds - before.encode_seconds
            work.renders += self.counters.template_renders - before.template_renders
            work.encodes += self.counters.encodes - before.encodes
            work.encode_seconds += encode_seconds
            work.render_seconds += time.perf_counter() - began_at - encode_seconds

    async def encode(
        self,
        conversation: Conversation,
        known: Prompt | None = None,
        work: TextWork | None = None,
    ) -> TokenPrompt:
        return _of_tokens(await super().encode(conversation, known, work))

    async def encode_truncated(
        self,
        conversation: Conversation,
        known: Prompt | None = None,
        *,
        coda: Sequence[InputItem] = (),
        room: int = 1,
    ) -> TokenPrompt:
        limit = self.max_context - room
        known_ids = None if known is None else _of_tokens(known)
        prompt = await self._text_thread.run(
            fit, self._model.chat_format, conversation, limit, known_ids, coda
        )
        self.check_length(prompt.num_tokens + room - 1)
        return prompt

    async def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return await self._text_thread.run(self._count_tokens, texts)

    def _count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Text thread."""
        return [len(self._model.tokenizer.encode_text(text)) for text in texts]

    def thinks(self, conversation: Conversation) -> bool:
        return self._model.chat_format.thinks and conversation.enable_thinking is not False

    def opens_thinking(self, prompt: Prompt) -> bool:
        return self._model.chat_format.opens_thinking(_of_tokens(prompt).token_ids)

    async def check_tool(self, tool: CallableTool) -> None:
        if not self._grammars.has_checked(tool):
            await self._text_thread.run(self._grammars.check, tool)

    async def check_text_format(self, text_format: TextFormat) -> None:
        if not self._grammars.is_ready(Constraint(text_format=text_format)):
            await self._text_thread.run(self._grammars.check_text_format, text_format)

    async def check_constraint(self, constraint: Constraint) -> None:
        if not self._grammars.is_ready(constraint):
            await self._text_thread.run(self._grammars.matcher, constraint)

    # --- Runs -------------------------------------------------------------------------------------

    def open_run(
        self,
        run_id: str,
        prompt: Prompt | Sequence[int],
        params: SamplingParams,
        constraint: Constraint,
        sources: Sources = Sources(),  # noqa: B008 - frozen
        *,
        requested_at: float | None = None,
        pre_inference_seconds: float = 0.0,
    ) -> Run:
        """Return a queued run, as any engine does; here tokens without a conversation will do."""
        return super().open_run(
            run_id,
            prompt if isinstance(prompt, Prompt) else TokenPrompt(Conversation(()), tuple(prompt)),
            params,
            constraint,
            sources,
            requested_at=requested_at,
            pre_inference_seconds=pre_inference_seconds,
        )

    def snapshot(self, run: Run) -> Snapshot | None:
        return self._sessions[run].snapshot()

    def new_snapshot(self, prompt: Prompt | Sequence[int]) -> Snapshot | None:
        """Return what any engine does; here tokens without a conversation will do."""
        return self._backend.new_snapshot(
            _of_tokens(prompt).token_ids if isinstance(prompt, Prompt) else prompt
        )

    async def warm_up(
        self,
        snapshot: Snapshot,
        sources: Sources = Sources(),  # noqa: B008 - frozen
    ) -> None:
        """Fill the cache of ``snapshot``, which is new, while no run wants the model, chunk by
        chunk.

        It starts from ``sources``, as a run does. One cache is filled after the other,
        and a run that comes waits for one chunk. On cancellation what has been filled stays, and
        can be shared; to go on filling it is no mistake.

        Raises:
            EngineError: a model step failed; the snapshot is of no more use.
        """
        source = closest(snapshot.token_ids, sources.snapshots)
        only = replace(sources, snapshots=[source] if source else [])
        await self._backend.warm_up(snapshot, only)

    def _begin(self, run: Run, prompt: Prompt, sources: Sources) -> None:
        token_ids = _of_tokens(prompt).token_ids
        run.tokens.append(token_ids, Origin.PROMPT)
        source = closest(token_ids, sources.snapshots)
        self._sources[run] = replace(sources, snapshots=[source] if source else [])

    @asynccontextmanager
    async def _segment(self, run: Run) -> AsyncGenerator[SegmentStream, None]:
        session = self._session_of(run)
        session.expect()
        try:
            turn = await self._begin_turn(run)
            reader = TurnReader(run, turn, self._model.tokenizer.stop_ids, self.counters)
            session.start(turn.matcher)
            run.segments[-1].handed_at = time.monotonic()
            try:
                yield _TokenStream(run, turn, reader, session)
            finally:
                if not reader.is_over:
                    await session.stop(len(run.tokens))
        finally:
            session.end_segment()

    def _session_of(self, run: Run) -> Session:
        if (session := self._sessions.get(run)) is None:
            session = self._backend.new_session(run, self._sources.pop(run))
            self._sessions[run] = session
        return session

    async def _begin_turn(self, run: Run) -> SampledTurn:
        began_at = time.monotonic()
        try:
            is_short = self._grammars.is_ready(run.constraint)
            turn = await self._on_text(partial(self._new_turn, run), is_short=is_short)
            run.segments[-1].pre_inference_seconds += time.monotonic() - began_at
            return turn
        except Exception as error:  # whatever a step raises ends this run only
            logger.exception("run %s: its grammar failed", run.id)
            raise failure_of(error) from error

    def _new_turn(self, run: Run) -> SampledTurn:
        """Text thread."""
        constraint = run.constraint
        return SampledTurn(
            Detokenizer(self._model.tokenizer),
            self._grammars.matcher(constraint),
            may_call=constraint.allows_calls,
            thinks=constraint.thinks,
            think_is_open=constraint.think_is_open,
        )

    def _account(self, run: Run) -> None:
        segment = run.segments[-1]
        segment.tokens_forwarded = run.tokens_forwarded - run.tokens_told
        run.tokens_told = run.tokens_forwarded

    def _turn_ids(self, run: Run) -> tuple[int, ...]:
        sampled = run.sampled_in_segment()
        if sampled[-1] not in self._model.tokenizer.stop_ids:
            sampled.append(self._model.chat_format.end_of_turn)
        return tuple(sampled)

    def _extend(self, run: Run, prompt: Prompt) -> None:
        suffix_ids = _of_tokens(prompt).token_ids[len(run.tokens) :]
        run.tokens.append(suffix_ids, Origin.APPENDED)

    def _suspended(self, run: Run, suspension: Suspension) -> None:
        self._sessions[run].suspend(suspension)

    def _resumed(self, run: Run, suspension: Suspension, seconds: float) -> None:
        self._sessions[run].resume(suspension, seconds)

    def _let_go(self, run: Run) -> None:
        self._sources.pop(run, None)
        if session := self._sessions.pop(run, None):
            session.let_go()


class _TokenStream(SegmentStream):
    """A segment of tokens."""

    def __init__(self, run: Run, turn: SampledTurn, reader: TurnReader, session: Session) -> None:
        self._run = run
        self._turn = turn
        self._reader = reader
        self._session = session
        self._unread: deque[Token] = deque()
        self._num_read = 0  # of the last time

    @property
    def calls(self) -> Sequence[Call]:
        return self._turn.calls

    async def read(self) -> Sequence[TurnOutput]:
        reader, unread = self._reader, self._unread
        if self._num_read:
            self._session.took(self._num_read)
            if self._run.wanted_stop is not None and reader.heed_wish():
                self.reason = reader.reason
                return ()
        if not unread:
            unread.extend(await self._session.channel.receive())
        num_unread = len(unread)
        outputs = reader.read(unread)
        self._num_read = num_unread - len(unread)
        self.reason = reader.reason
        return outputs

    def finish(self) -> Sequence[TurnOutput]:
        outputs = self._reader.finish()
        self.reason = self._reader.reason
        return outputs


class _NoGrammars:
    """In the place of the compiler where nothing can be constrained: refuses what would have to be.

    What remains is up to the model: whether it calls a tool, and whether the arguments are JSON.
    """

    def check(self, tool: CallableTool) -> None:
        """Refuse calls that have to match a schema or a grammar.

        Raises:
            GrammarError: they have to.
        """
        self.matcher(Constraint((tool,)))

    def has_checked(self, tool: CallableTool) -> bool:
        """Tell whether calls of ``tool`` may be anything."""
        return self.is_ready(Constraint((tool,)))

    def check_text_format(self, text_format: TextFormat) -> None:
        """Refuse any form but text.

        Raises:
            GrammarError: it is another one.
        """
        self.matcher(Constraint(text_format=text_format))

    def is_ready(self, constraint: Constraint) -> bool:
        """Tell whether the turn may be anything."""
        return _bound_by(constraint) is None

    def matcher(self, constraint: Constraint) -> None:
        """Return None: there is no matcher.

        Raises:
            GrammarError: there would have to be one.
        """
        if (bound_by := _bound_by(constraint)) is not None:
            raise GrammarError(f"this model cannot be held to {bound_by}")


def _bound_by(constraint: Constraint) -> str | None:
    """Return what a turn has to be; None if whatever is sampled will do.

    A turn with more calls than are wanted breaks nothing, so that does not count.
    """
    if constraint.forced_ids is not None:
        return "a turn that is known already"
    if constraint.is_forced:
        return "calling a tool"
    if constraint.wants_json:
        return "JSON"
    for tool in constraint.tools:
        if isinstance(tool, FunctionTool) and tool.strict:
            return f"the schema of `{tool.name}`, which is strict"
        if isinstance(tool, CustomTool) and tool.format.syntax != "text":
            return f"the grammar of `{tool.name}`"
    return None


def _of_tokens(prompt: Prompt) -> TokenPrompt:
    assert isinstance(prompt, TokenPrompt), "a prompt goes to the engine that made it"
    return prompt


def _num_new_characters(conversation: Conversation, known: Prompt) -> int:
    """Return how much ``conversation``, which goes on from ``known``, has to have encoded."""
    new = conversation.items[len(known.conversation.items) :]
    return sum(num_characters(item) for item in new)
