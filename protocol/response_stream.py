"""The event grammar of one response.

A response is a sentence in a small language (OpenAI reference, Streaming events; Open Responses
2026-04-24, Streaming)::

    stream   = created [ queued ] in_progress { item | done } terminal
             | created queued terminal                                 (ended before its turn came)
    item     = added part { part } item_done                           (a message)
             | added part item_done                                    (reasoning)
             | added { delta } arguments_done item_done                (a function call)
             | added { delta } input_done item_done                    (a custom tool call)
             | added compacting item_done                              (a compaction)
    part     = part_added { delta } text_done part_done
    terminal = completed | incomplete | failed

``done`` is the prototype's ``response.done``: the sampler is suspended, the response goes on. The
caller says what was sampled; this module owns the numbers, the ids and the brackets, so that no
path through the server can leave an item open or end a response twice.

Acknowledgements of ``response.steer`` and ``response.inject`` answer the client rather than tell of
the response, so they may stand anywhere after ``created``, even after the terminal event. They are
numbered with the rest.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, Struct

from protocol.errors import ProtocolError
from protocol.open_items import (
    OpenCompaction,
    OpenCustomToolCall,
    OpenFunctionCall,
    OpenItem,
    OpenMessage,
    OpenReasoning,
)
from protocol.open_parts import Stamps
from protocol.output_items import Logprob, OutputItem, Status
from protocol.response import (
    IncompleteDetails,
    IncompleteReason,
    ResponseError,
    ResponseResource,
    Usage,
)
from protocol.server_events import (
    InjectCreated,
    LifecycleEvent,
    OutputStub,
    ResponseCompleted,
    ResponseCreated,
    ResponseDone,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseQueued,
    ServerEvent,
    Steer,
    SteerAccepted,
    SteerPending,
    inject_failed,
    steer_failed,
)
from protocol.transitions import next_state
from protocol.validation import JsonObject

Extension: TypeAlias = JsonObject | Struct
"""The content of ``suspend:run``. It is copied, so the caller may go on counting in it."""


# Strings, because each delta looks up its step, and other enums are hashed by a Python function.


class StreamState(StrEnum):
    NEW = "new"
    QUEUED = "queued"
    BETWEEN_ITEMS = "between_items"
    IN_MESSAGE = "in_message"
    IN_REASONING = "in_reasoning"
    IN_CALL = "in_call"
    SUSPENDED = "suspended"
    FINISHED = "finished"


class Step(StrEnum):
    QUEUE = "queue"
    START = "start"
    TEXT = "text"  # or refusal, which is another part of the message
    REASONING = "reasoning"
    REASONING_DONE = "reasoning_done"
    CALL = "call"
    ARGUMENTS = "arguments"
    CALL_DONE = "call_done"
    COMPACTION = "compaction"
    SUSPEND = "suspend"
    ACKNOWLEDGE = "acknowledge"
    FINISH = "finish"


TRANSITIONS: dict[StreamState, dict[Step, StreamState]] = {
    StreamState.NEW: {
        Step.QUEUE: StreamState.QUEUED,
        Step.START: StreamState.BETWEEN_ITEMS,
    },
    StreamState.QUEUED: {
        Step.START: StreamState.BETWEEN_ITEMS,
        Step.ACKNOWLEDGE: StreamState.QUEUED,
        Step.FINISH: StreamState.FINISHED,
    },
    StreamState.BETWEEN_ITEMS: {
        Step.TEXT: StreamState.IN_MESSAGE,
        Step.REASONING: StreamState.IN_REASONING,
        Step.CALL: StreamState.IN_CALL,
        Step.COMPACTION: StreamState.BETWEEN_ITEMS,
        Step.SUSPEND: StreamState.SUSPENDED,
        Step.ACKNOWLEDGE: StreamState.BETWEEN_ITEMS,
        Step.FINISH: StreamState.FINISHED,
    },
    StreamState.IN_MESSAGE: {
        Step.TEXT: StreamState.IN_MESSAGE,
        Step.REASONING: StreamState.IN_REASONING,
        Step.CALL: StreamState.IN_CALL,
        Step.COMPACTION: StreamState.BETWEEN_ITEMS,
        Step.SUSPEND: StreamState.SUSPENDED,
        Step.ACKNOWLEDGE: StreamState.IN_MESSAGE,
        Step.FINISH: StreamState.FINISHED,
    },
    StreamState.IN_REASONING: {
        Step.REASONING: StreamState.IN_REASONING,
        Step.REASONING_DONE: StreamState.BETWEEN_ITEMS,
        Step.SUSPEND: StreamState.SUSPENDED,
        Step.ACKNOWLEDGE: StreamState.IN_REASONING,
        Step.FINISH: StreamState.FINISHED,
    },
    StreamState.IN_CALL: {
        Step.ARGUMENTS: StreamState.IN_CALL,
        Step.CALL_DONE: StreamState.BETWEEN_ITEMS,
        Step.SUSPEND: StreamState.SUSPENDED,
        Step.ACKNOWLEDGE: StreamState.IN_CALL,
        Step.FINISH: StreamState.FINISHED,
    },
    StreamState.SUSPENDED: {
        Step.TEXT: StreamState.IN_MESSAGE,
        Step.REASONING: StreamState.IN_REASONING,
        Step.CALL: StreamState.IN_CALL,
        Step.COMPACTION: StreamState.BETWEEN_ITEMS,
        Step.ACKNOWLEDGE: StreamState.SUSPENDED,
        Step.FINISH: StreamState.FINISHED,
    },
    StreamState.FINISHED: {
        Step.ACKNOWLEDGE: StreamState.FINISHED,
    },
}


class ResponseStream:
    """The events of one response, in order. A step that the table lacks raises, changes nothing.

    Args:
        response: the response before anything was sampled.
        ids: makes a fresh id from a prefix: ``ids("msg")`` gives ``"msg_..."``.
        padding: makes the ``obfuscation`` of one delta; without it there is none.
        reasoning_as_summary: tell reasoning in the events of a summary, not in those of raw text.
        seals_reasoning: give finished reasoning its ``encrypted_content``.
    """

    def __init__(
        self,
        response: ResponseResource,
        ids: Callable[[str], str],
        *,
        padding: Callable[[], str] | None = None,
        reasoning_as_summary: bool = False,
        seals_reasoning: bool = False,
    ) -> None:
        self._response = response
        self._ids = ids
        self._state = StreamState.NEW
        self._stamps = Stamps(padding)
        self._reasoning_as_summary = reasoning_as_summary
        self._seals_reasoning = seals_reasoning
        self._output: list[OutputItem] = []  # the finished items
        self._open: OpenItem | None = None

    @property
    def state(self) -> StreamState:
        return self._state

    @property
    def is_finished(self) -> bool:
        return self._state is StreamState.FINISHED

    @property
    def response(self) -> ResponseResource:
        """The response as its latest lifecycle event shows it."""
        return self._response

    @property
    def output(self) -> tuple[OutputItem, ...]:
        """The items that are finished."""
        return tuple(self._output)

    @property
    def has_items(self) -> bool:
        """Whether there is any item, finished or open."""
        return bool(self._output) or self._open is not None

    def is_latest(self, event: ServerEvent) -> bool:
        """Tell whether there is nothing after ``event``: an acknowledgement would come next."""
        return event.sequence_number == self._stamps.latest

    # --- The beginning ---

    def queue(self) -> list[ServerEvent]:
        """Announce the response, whose turn is yet to come."""
        self._take(Step.QUEUE)
        self._response = msgspec.structs.replace(self._response, status="queued")
        return [self._lifecycle(ResponseCreated), self._lifecycle(ResponseQueued)]

    def start(self) -> list[ServerEvent]:
        """Announce that sampling begins, and the response if it was not queued first."""
        is_new = self._state is StreamState.NEW
        self._take(Step.START)
        self._response = msgspec.structs.replace(self._response, status="in_progress")
        created = [self._lifecycle(ResponseCreated)] if is_new else []
        return [*created, self._lifecycle(ResponseInProgress)]

    # --- The items ---

    def text_delta(self, text: str, logprobs: tuple[Logprob, ...] = ()) -> list[ServerEvent]:
        """Say that the model wrote ``text``, in the open message or else in a new one."""
        self._take(Step.TEXT)
        message, events = self._message()
        return [*events, *message.text(text, logprobs)]

    def empty_message(self) -> list[ServerEvent]:
        """Say that the model wrote nothing, as the hosted API does: clients that find no item at
        all in a response ask again."""
        self._take(Step.TEXT)
        message, events = self._message()
        return [*events, *message.empty_text()]

    def refusal_delta(self, text: str) -> list[ServerEvent]:
        """Say that the model declined in the words ``text``."""
        self._take(Step.TEXT)
        message, events = self._message()
        return [*events, *message.refusal(text)]

    def reasoning_delta(self, text: str) -> list[ServerEvent]:
        """Say that the model thought ``text``; an open message ends here."""
        self._take(Step.REASONING)
        if isinstance(self._open, OpenReasoning):
            return [self._open.written(text)]
        events = self._close("completed")
        self._open = OpenReasoning(
            self._ids("rs"),
            len(self._output),
            self._stamps,
            self._reasoning_as_summary,
            self._seals_reasoning,
        )
        return [*events, *self._open.opened(), self._open.written(text)]

    def reasoning_done(self) -> list[ServerEvent]:
        """Say that the model has thought enough."""
        self._take(Step.REASONING_DONE)
        return self._close("completed")

    def call_started(
        self, call_id: str, name: str, namespace: str | None = None, is_custom: bool = False
    ) -> list[ServerEvent]:
        """Say that the model calls ``name``; an open message ends here."""
        self._take(Step.CALL)
        events = self._close("completed")
        kind, prefix = (OpenCustomToolCall, "ctc") if is_custom else (OpenFunctionCall, "fc")
        self._open = kind(
            self._ids(prefix),
            len(self._output),
            self._stamps,
            call_id,
            name,
            UNSET if namespace is None else namespace,
        )
        return [*events, *self._open.opened()]

    def arguments_delta(self, delta: str) -> list[ServerEvent]:
        """Say that the model wrote ``delta`` of the open call's arguments, or of its input."""
        self._take(Step.ARGUMENTS)
        assert isinstance(self._open, OpenFunctionCall | OpenCustomToolCall)
        return [self._open.written(delta)]

    def call_done(self) -> list[ServerEvent]:
        """Say that the open call is whole."""
        self._take(Step.CALL_DONE)
        return self._close("completed")

    def compaction(self, encrypted_content: str, item_id: str | None = None) -> list[ServerEvent]:
        """Say that what was said so far was summarised; an open message ends here.

        Args:
            encrypted_content: the sealed summary.
            item_id: what it is known by already, if it is.
        """
        self._take(Step.COMPACTION)
        events = self._close("completed")
        item_id = item_id or self._ids("cmp")
        compaction = OpenCompaction(item_id, len(self._output), self._stamps)
        opening = compaction.opened()
        item, closing = compaction.closed(encrypted_content)
        self._output.append(item)
        return [*events, *opening, *closing]

    # --- The end of a segment, the end of the response ---

    def pause(self) -> list[ServerEvent]:
        """Close the segment without a word: the client sees that a call waits for its output."""
        self._take(Step.SUSPEND)
        return self._close("completed")

    def suspend(self, usage: Usage, extension: Extension | None = None) -> list[ServerEvent]:
        """Close the segment: the sampler waits for tool outputs, then the response goes on.

        Args:
            usage: of this segment alone, since clients add up the segments.
            extension: the content of ``suspend:run``.
        """
        events = self.pause()
        self._snapshot(usage=usage, extension=extension)
        return [*events, self._lifecycle(ResponseDone)]

    def complete(
        self, usage: Usage, extension: Extension | None, completed_at: int
    ) -> list[ServerEvent]:
        """End the response as the model meant it to end.

        Args:
            usage: of the last segment; of all of them where none was told before.
            extension: the content of ``suspend:run``.
            completed_at: unix seconds.
        """
        return self._finish(
            ResponseCompleted,
            "completed",
            status="completed",
            usage=usage,
            extension=extension,
            completed_at=completed_at,
        )

    def incomplete(
        self, reason: IncompleteReason, usage: Usage, extension: Extension | None = None
    ) -> list[ServerEvent]:
        """End the response early. What was written of the open item is delivered.

        There is no ``completed_at``: the OpenAI reference has it for completed responses only.
        """
        return self._finish(
            ResponseIncomplete,
            "incomplete",
            status="incomplete",
            usage=usage,
            extension=extension,
            incomplete_details=IncompleteDetails(reason),
        )

    def cancel(
        self, usage: Usage | None = None, extension: Extension | None = None
    ) -> list[ServerEvent]:
        """End the response because the client asked for it.

        The reference has a status for this and no event. ``response.incomplete`` says that there
        will be no more, and every client knows it.
        """
        return self._finish(
            ResponseIncomplete,
            "incomplete",
            status="cancelled",
            usage=usage,
            extension=extension,
        )

    def fail(
        self,
        code: str,
        message: str,
        usage: Usage | None = None,
        extension: Extension | None = None,
    ) -> list[ServerEvent]:
        """End the response because the server could not go on."""
        return self._finish(
            ResponseFailed,
            "incomplete",
            status="failed",
            usage=usage,
            extension=extension,
            error=ResponseError(code, message),
        )

    # --- Acknowledgements ---

    def steer_accepted(self, steer_id: str) -> ServerEvent:
        """Say that the server has the steering input and will use it."""
        return SteerAccepted(
            sequence_number=self._acknowledge(), steer=Steer(steer_id, self._response.id)
        )

    def steer_pending(self, steer_id: str, required_input: tuple[OutputStub, ...]) -> ServerEvent:
        """Say that accepted input waits, as the response stopped for the outputs of its calls."""
        return SteerPending(
            sequence_number=self._acknowledge(),
            steer=Steer(steer_id, self._response.id),
            required_input=required_input,
        )

    def steer_failed(
        self, error: ProtocolError, raw_input: Any, steer_id: str | None = None
    ) -> ServerEvent:
        """Give steering input back to the client, with its id if it had been accepted."""
        number = self._acknowledge()
        return steer_failed(error, raw_input, self._response.id, number, steer_id)

    def inject_created(self) -> ServerEvent:
        """Say that injected items were committed."""
        return InjectCreated(sequence_number=self._acknowledge(), response_id=self._response.id)

    def inject_failed(self, error: ProtocolError, raw_input: Any) -> ServerEvent:
        """Give injected items back to the client."""
        return inject_failed(error, raw_input, self._response.id, self._acknowledge())

    # --- Inside ---

    def _take(self, step: Step) -> None:
        self._state = next_state(TRANSITIONS, self._state, step)

    def _acknowledge(self) -> int:
        self._take(Step.ACKNOWLEDGE)
        return self._stamps.number()

    def _message(self) -> tuple[OpenMessage, list[ServerEvent]]:
        """Return the open message, or else a new one with the events that open it."""
        if isinstance(self._open, OpenMessage):
            return self._open, []
        self._open = OpenMessage(self._ids("msg"), len(self._output), self._stamps)
        return self._open, self._open.opened()

    def _close(self, status: Status) -> list[ServerEvent]:
        """Finish the open item, if there is one, as ``status``."""
        if self._open is None:
            return []
        item, events = self._open.closed(status)
        self._output.append(item)
        self._open = None
        return events

    def _finish(
        self, event: type[LifecycleEvent], item_status: Status, **changes: Any
    ) -> list[ServerEvent]:
        self._take(Step.FINISH)
        events = self._close(item_status)
        self._snapshot(**changes)
        return [*events, self._lifecycle(event)]

    def _snapshot(
        self, *, usage: Usage | None, extension: Extension | None, **changes: Any
    ) -> None:
        self._response = msgspec.structs.replace(
            self._response,
            output=self.output,
            usage=usage,
            suspend_run=UNSET if extension is None else msgspec.to_builtins(extension),
            **changes,
        )

    def _lifecycle(self, event: type[LifecycleEvent]) -> ServerEvent:
        return event(sequence_number=self._stamps.number(), response=self._response)
