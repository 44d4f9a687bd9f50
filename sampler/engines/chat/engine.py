"""The sampling loop over an endpoint for chat completions: messages in, pieces of text out.

A run is suspended here and nowhere else: the endpoint forgets it with each answer. What stays is
its messages, encoded, and the key of its prompt cache. To resume is to send them again, with what
was appended, and it is the endpoint's luck whether its prefix cache still has them; what it says of
that is told (``cached_tokens``), and a warning is logged where the suspension was longer than the
endpoint promises to keep them.

Nothing is constrained here, and no token is seen. Tools, ``tool_choice`` and ``text.format`` are
passed on; how long a prompt is can only be guessed until the endpoint has counted it.
"""

import asyncio
import logging
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import takewhile
from weakref import WeakKeyDictionary

from protocol.client_events import TextFormat
from protocol.items import InputItem
from protocol.tools import CallableTool
from protocol.validation import JsonObject
from sampler.cancellation import ended
from sampler.capabilities import Capabilities
from sampler.conversation import Conversation
from sampler.counters import Counters, TextWork
from sampler.engine import Engine, SegmentStream
from sampler.engine_error import EngineError, failure_of
from sampler.engines.chat.chunk import ChatUsage, says_something
from sampler.engines.chat.dialect import ChatDialect
from sampler.engines.chat.messages import (
    messages_after,
    messages_of,
    messages_of_turn,
    request_body,
)
from sampler.engines.chat.tools import ToolNames
from sampler.engines.chat.turn import ChatTurn
from sampler.engines.endpoint.client import Endpoint, EventStream
from sampler.engines.endpoint.errors import EndpointError
from sampler.outputs import ReasoningDone
from sampler.params import Constraint
from sampler.prompt import Prompt, goes_on_from
from sampler.recorded_turn import Call, RecordedTurn, calls_in
from sampler.run import Run, RunEvent, RunState, StopReason
from sampler.sampled_turn import TurnOutput
from sampler.snapshot import Sources
from sampler.suspension import Suspension
from sampler.turn_reader import joined

logger = logging.getLogger(__name__)

PATH = "/chat/completions"

_BYTES_PER_TOKEN = 4
"""About what it is in English and in JSON, with the tokenizers of today."""

_MAX_UNREAD = 256
"""How many outputs may wait for a slow client before the endpoint has to."""

_REST_SECONDS = 2.0
"""How long is waited for more once an answer has said why it ends."""


@dataclass(frozen=True)
class ChatPrompt(Prompt):
    """A conversation as the messages that tell it."""

    messages: tuple[bytes, ...]
    """Each encoded once; they are sent again as the same bytes."""
    dialect: ChatDialect = field(repr=False)

    @property
    def num_tokens(self) -> int:
        """About how long it is. Only the endpoint can count, and counts what it is sent."""
        return _tokens_in(sum(map(len, self.messages)))

    def after(self, turn: RecordedTurn) -> "ChatPrompt":
        messages = self.messages + messages_of_turn(turn, self.dialect)
        return replace(self, conversation=self.conversation.after(turn), messages=messages)


@dataclass
class _Chat:
    """What is kept of a run."""

    prompt: ChatPrompt
    cache_key: str
    """The same for whatever begins like it, in any dialect: so it finds the endpoint's cache."""
    num_told: int = 0
    """How long the context was, by the endpoint's count, when the last segment ended."""
    cache_may_be_gone: bool = False


class ChatEngine(Engine):
    """Samples runs at an endpoint for chat completions."""

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        dialect: ChatDialect,
        *,
        max_tokens: int = 8192,
        cache_seconds: float | None = None,
    ) -> None:
        """Sample at ``endpoint``.

        Args:
            name: of the model, there and to clients.
            endpoint: where it is; the engine closes it.
            dialect: what it takes.
            max_tokens: of a segment, where the request says nothing. Endpoints count it against
                their rate limits beforehand, and where it is missing, all of the context.
            cache_seconds: how long the endpoint promises to keep what it has read; None: it
                promises nothing.
        """
        capabilities = Capabilities(
            keeps_kv=False, token_exact=False, drops_pending_token=False, grammar=False
        )
        super().__init__(name, capabilities, Counters())
        self._endpoint = endpoint
        self._dialect = dialect
        self._max_tokens = max_tokens
        self._cache_seconds = cache_seconds
        self._chats: WeakKeyDictionary[Run, _Chat] = WeakKeyDictionary()

    @property
    def max_context(self) -> int:
        """Whatever the endpoint takes: it refuses what is too long, and nobody else can tell."""
        return sys.maxsize

    async def start(self) -> None:
        await self._endpoint.check_model(self.name)

    async def stop(self) -> None:
        await self._endpoint.close()

    def close(self) -> None:
        pass  # connections end with their event loop

    # --- Text -------------------------------------------------------------------------------------

    async def lay_out(
        self,
        conversation: Conversation,
        known: Prompt | None = None,
        work: TextWork | None = None,
    ) -> ChatPrompt:
        work = work or TextWork()
        began_at = time.perf_counter()
        items = conversation.items
        if known is not None and goes_on_from(known.conversation, conversation):
            before = _of_chat(known).messages
            num_known = len(known.conversation.items)
            added = messages_after(items[:num_known], items[num_known:], self._dialect)
        else:
            before = ()
            added = messages_of(items, conversation.instructions, self._dialect)
        self.counters.template_renders += 1
        work.renders += 1
        work.render_seconds += time.perf_counter() - began_at
        return ChatPrompt(conversation, before + added, self._dialect)

    async def encode_truncated(
        self,
        conversation: Conversation,
        known: Prompt | None = None,
        *,
        coda: Sequence[InputItem] = (),
        room: int = 1,
    ) -> ChatPrompt:
        """Return the prompt of ``conversation`` and ``coda``: nothing is known to be too long."""
        return await self.lay_out(replace(conversation, items=[*conversation.items, *coda]), known)

    async def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [_tokens_in(len(text.encode())) for text in texts]

    def thinks(self, conversation: Conversation) -> bool:
        return False  # thoughts have a place of their own, and no marker in the text

    def opens_thinking(self, prompt: Prompt) -> bool:
        return False

    async def check_tool(self, tool: CallableTool) -> None:
        pass  # the endpoint may have its own opinion, of which nobody knows before it is asked

    async def check_text_format(self, text_format: TextFormat) -> None:
        pass

    async def check_constraint(self, constraint: Constraint) -> None:
        pass

    # --- Runs -------------------------------------------------------------------------------------

    def _begin(self, run: Run, prompt: Prompt, sources: Sources) -> None:
        prompt = _of_chat(prompt)
        self._chats[run] = _Chat(prompt, _cache_key(prompt))

    @asynccontextmanager
    async def _segment(self, run: Run) -> AsyncGenerator[SegmentStream, None]:
        chat = self._chats[run]
        conversation = chat.prompt.conversation
        turn = ChatTurn(
            ToolNames(conversation.tools),
            taken_call_ids={call.call_id for call in calls_in(conversation.items)},
            wants_logprobs=run.params.top_logprobs is not None,
        )
        stream = _ChatStream(run, self._endpoint, self._body(run, chat), turn)
        run.segments[-1].handed_at = time.monotonic()
        reading = asyncio.create_task(stream.run(), name=f"chat {run.id}")
        run.on_wish = stream.wake
        try:
            yield stream
        finally:
            run.on_wish = None
            reading.cancel()
            await ended(reading)
            self._take_note(run, chat, stream)

    def _body(self, run: Run, chat: _Chat) -> bytes:
        params = run.params
        return request_body(
            chat.prompt.messages,
            model=self.name,
            tools=chat.prompt.conversation.tools,
            constraint=run.constraint,
            params=params,
            dialect=self._dialect,
            max_tokens=params.max_output_tokens or self._max_tokens,
            max_tokens_member=self._endpoint.settings.max_tokens_member,
            omitted=self._endpoint.settings.omitted,
            cache_key=chat.cache_key,
            effort=params.reasoning_effort,
        )

    def _take_note(self, run: Run, chat: _Chat, stream: "_ChatStream") -> None:
        """Put down what the endpoint told of the segment, and about how long what it did not count
        was."""
        segment, turn, events = run.segments[-1], stream.turn, stream.events
        told: JsonObject = {}
        if events is not None:
            told |= {"tries": events.tries, "admission": events.queued_seconds}
        if turn.time_info is not None:
            told["time_info"] = dict(turn.time_info)
        if chat.cache_may_be_gone:
            told["cache_may_be_gone"] = True
        usage = turn.usage or ChatUsage()
        # No prompt is empty, and what was said was sampled.
        if not usage.completion_tokens and turn.num_bytes:
            told["usage_is_estimated"] = True
            usage = replace(
                usage,
                completion_tokens=_tokens_in(turn.num_bytes),
                reasoning_tokens=_tokens_in(turn.num_thought_bytes),
            )
        if not usage.prompt_tokens:
            told["usage_is_estimated"] = True
            usage = replace(usage, prompt_tokens=segment.input_tokens)
        segment.endpoint = told
        segment.input_tokens = usage.prompt_tokens
        segment.cached_tokens = usage.cached_tokens
        segment.output_tokens = usage.completion_tokens
        segment.reasoning_tokens = usage.reasoning_tokens
        self.counters.tokens_sampled += usage.completion_tokens

    def _account(self, run: Run) -> None:
        """Count, from what the endpoint says, what it forwarded, and forwarded again."""
        chat, segment = self._chats[run], run.segments[-1]
        if len(run.segments) == 1:
            run.num_inherited = segment.cached_tokens
        again = max(0, min(chat.num_told, segment.input_tokens) - segment.cached_tokens)
        chat.num_told = segment.input_tokens + segment.output_tokens
        run.num_forwarded = max(run.num_forwarded, chat.num_told)
        run.tokens_reforwarded += again
        segment.tokens_forwarded = run.tokens_forwarded - run.tokens_told
        run.tokens_told = run.tokens_forwarded
        self.counters.tokens_reforwarded += again
        self.counters.tokens_forwarded += segment.tokens_forwarded

    def _turn_ids(self, run: Run) -> tuple[int, ...]:
        return ()  # nobody has told

    def _extend(self, run: Run, prompt: Prompt) -> None:
        self._chats[run].prompt = _of_chat(prompt)

    def _suspended(self, run: Run, suspension: Suspension) -> None:
        pass  # there is nothing here that would be of use to others

    def _resumed(self, run: Run, suspension: Suspension, seconds: float) -> None:
        chat = self._chats[run]
        chat.cache_may_be_gone = self._cache_seconds is not None and seconds > self._cache_seconds
        if chat.cache_may_be_gone:
            logger.warning(
                "run %s was suspended for %.0f s, and the endpoint keeps what it has read for"
                " %.0f s: it may read it all again",
                run.id,
                seconds,
                self._cache_seconds,
            )

    def _let_go(self, run: Run) -> None:
        self._chats.pop(run, None)


class _ChatStream(SegmentStream):
    """A segment, as an endpoint streams it.

    A task of its own reads what comes, so that a client that wants no more need not wait for the
    endpoint to say something.
    """

    def __init__(self, run: Run, endpoint: Endpoint, body: bytes, turn: ChatTurn) -> None:
        self.turn = turn
        self.events: EventStream | None = None
        """How the answer came about, once it has begun."""
        self._run = run
        self._segment = run.segments[-1]
        self._endpoint = endpoint
        self._body = body
        self._unread: deque[TurnOutput] = deque()
        self._error: EngineError | None = None
        self._is_over = False
        self._ends_item = False
        self._news = asyncio.Event()
        self._room = asyncio.Event()

    @property
    def calls(self) -> Sequence[Call]:
        return self.turn.calls

    # --- The task that reads ----------------------------------------------------------------------

    async def run(self) -> None:
        """Read the segment to its end."""
        try:
            await self._read_answer()
        except EngineError as error:
            self._error = error
        except Exception as error:
            logger.exception("run %s: the endpoint's answer could not be read", self._run.id)
            self._error = failure_of(error, "the endpoint's answer could not be read")
        self._is_over = True
        self._news.set()

    async def _read_answer(self) -> None:
        async with self._endpoint.stream(PATH, self._body, says_something) as events:
            self.events = events
            self._segment.started_at = events.sent_at
            await self._read_all(events)
            if self.turn.stop_reason is None:
                raise EndpointError("the endpoint's answer ended without a reason to")

    async def _read_all(self, events: EventStream) -> None:
        """Read ``events`` to their end, for which is waited a little once the turn is over: what
        comes then is the usage, and nothing that the client waits for. What goes wrong then is no
        fault."""
        try:
            async with asyncio.timeout(None) as deadline:
                async for event in events:
                    await self._give(self.turn.feed(event))
                    if self.turn.stop_reason is not None and deadline.when() is None:
                        now = asyncio.get_running_loop().time()
                        deadline.reschedule(now + _REST_SECONDS)
        except TimeoutError:
            pass
        except EngineError as error:
            if self.turn.stop_reason is None:
                raise
            logger.info("run %s: %s, when all was said", self._run.id, error)

    async def _give(self, outputs: Collection[TurnOutput]) -> None:
        if not outputs:
            return
        if self._segment.first_token_at is None:
            self._segment.first_token_at = time.monotonic()
        self._unread += outputs
        self._news.set()
        if len(self._unread) > _MAX_UNREAD:
            self._room.clear()
            await self._room.wait()

    def wake(self) -> None:
        """Have the loop look again."""
        self._news.set()

    # --- The loop ---------------------------------------------------------------------------------

    async def read(self) -> Sequence[TurnOutput]:
        while not self._heeds_wish():
            if self._unread:
                return self._take()
            if self._is_over:
                return self._end()
            self._news.clear()
            await self._news.wait()
        return ()

    def _heeds_wish(self) -> bool:
        """Stop here, if that is what the client wants and it can be done."""
        wanted = self._run.wanted_stop
        if wanted is StopReason.CANCELLED or (wanted is StopReason.STEERED and self._ends_item):
            self.reason = wanted
            self._begin_decoding()
        return self.reason is not None

    def _take(self) -> Sequence[TurnOutput]:
        """Return what has come, pieces of one text as one, up to where a client may steer."""
        self._begin_decoding()
        outputs: list[TurnOutput] = []
        self._ends_item = False
        while self._unread and not self._ends_item:
            output = self._unread.popleft()
            if outputs and (longer := joined(outputs[-1], output)) is not None:
                outputs[-1] = longer
            else:
                outputs.append(output)
            self._ends_item = isinstance(output, ReasoningDone)
        self._room.set()
        return outputs

    def _end(self) -> Sequence[TurnOutput]:
        if self._error is not None:
            raise self._error
        self._begin_decoding()
        self.reason = self.turn.stop_reason
        return ()

    def _begin_decoding(self) -> None:
        if self._run.state is RunState.PREFILLING:
            self._run.apply(RunEvent.DECODE)

    def finish(self) -> Sequence[TurnOutput]:
        if self.reason is self._run.wanted_stop:
            return ()  # what has come since then is not wanted
        outputs = self.turn.finish()
        if self.reason is StopReason.END_OF_TURN and self.turn.calls:
            self.reason = StopReason.TOOL_CALLS
        return outputs


def _of_chat(prompt: Prompt) -> ChatPrompt:
    assert isinstance(prompt, ChatPrompt), "a prompt goes to the engine that made it"
    return prompt


def _tokens_in(num_bytes: int) -> int:
    """Return about how many tokens so much text is."""
    return -(-num_bytes // _BYTES_PER_TOKEN)


def _cache_key(prompt: ChatPrompt) -> str:
    """Return what stays the same however the conversation of ``prompt`` goes on: instructions and
    the user's first words."""
    beginning = list(takewhile(_is_system, prompt.messages))
    beginning += filter(_is_user, prompt.messages[len(beginning) : len(beginning) + 1])
    return blake2b(b"\n".join(beginning), digest_size=16).hexdigest()


def _is_system(message: bytes) -> bool:
    return message.startswith(b'{"role":"system"')


def _is_user(message: bytes) -> bool:
    return message.startswith(b'{"role":"user"')
