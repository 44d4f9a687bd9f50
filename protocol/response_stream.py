"""The event grammar of one response.

A response is a sentence in a small language (OpenAI reference, Streaming events; Open Responses
2026-04-24, Streaming)::

    stream   = created in_progress { item | done } terminal
    item     = added { part_added { delta } text_done part_done } item_done      (a message)
             | added { delta } arguments_done item_done                          (a function call)
    terminal = completed | incomplete | failed

``done`` is the prototype's ``response.done``: the sampler is suspended, the response goes on. The
caller says what was sampled; this module owns the numbers, the ids and the brackets, so that no
path through the server can leave an item open or end a response twice.
"""

from collections.abc import Callable
from enum import Enum
from itertools import count
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, Struct

from protocol.items import JsonObject, OutputItem, Status
from protocol.open_items import OpenCall, OpenMessage
from protocol.response import (
    IncompleteDetails,
    IncompleteReason,
    ResponseError,
    ResponseResource,
    Usage,
)
from protocol.server_events import (
    ResponseCompleted,
    ResponseCreated,
    ResponseDone,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ServerEvent,
)
from protocol.transitions import next_state

Extension: TypeAlias = JsonObject | Struct
"""The content of ``suspend:run``. It is copied, so the caller may go on counting in it."""


class StreamState(Enum):
    NEW = "new"
    BETWEEN_ITEMS = "between_items"
    IN_MESSAGE = "in_message"
    IN_CALL = "in_call"
    SUSPENDED = "suspended"
    FINISHED = "finished"


class Step(Enum):
    START = "start"
    TEXT = "text"
    CALL = "call"
    ARGUMENTS = "arguments"
    CALL_DONE = "call_done"
    SUSPEND = "suspend"
    ACKNOWLEDGE = "acknowledge"
    FINISH = "finish"


TRANSITIONS: dict[StreamState, dict[Step, StreamState]] = {
    StreamState.NEW: {
        Step.START: StreamState.BETWEEN_ITEMS,
    },
    StreamState.BETWEEN_ITEMS: {
        Step.TEXT: StreamState.IN_MESSAGE,
        Step.CALL: StreamState.IN_CALL,
        Step.SUSPEND: StreamState.SUSPENDED,
        Step.ACKNOWLEDGE: StreamState.BETWEEN_ITEMS,
        Step.FINISH: StreamState.FINISHED,
    },
    StreamState.IN_MESSAGE: {
        Step.TEXT: StreamState.IN_MESSAGE,
        Step.CALL: StreamState.IN_CALL,
        Step.SUSPEND: StreamState.SUSPENDED,
        Step.ACKNOWLEDGE: StreamState.IN_MESSAGE,
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
        Step.CALL: StreamState.IN_CALL,
        Step.ACKNOWLEDGE: StreamState.SUSPENDED,
        Step.FINISH: StreamState.FINISHED,
    },
    StreamState.FINISHED: {},
}


class ResponseStream:
    """The events of one response, in order. A step that the table lacks raises, changes nothing.

    Args:
        response: the response before anything was sampled.
        ids: makes a fresh id from a prefix: ``ids("msg")`` gives ``"msg_..."``.
    """

    def __init__(self, response: ResponseResource, ids: Callable[[str], str]) -> None:
        self._response = response
        self._ids = ids
        self._state = StreamState.NEW
        self._numbers = count()
        self._output: list[OutputItem] = []  # the finished items
        self._open: OpenMessage | OpenCall | None = None

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

    def next_sequence_number(self) -> int:
        """Take the number of an event that is not of this grammar, an acknowledgement."""
        self._take(Step.ACKNOWLEDGE)
        return next(self._numbers)

    def start(self) -> list[ServerEvent]:
        """Announce the response."""
        self._take(Step.START)
        return [
            ResponseCreated(sequence_number=next(self._numbers), response=self._response),
            ResponseInProgress(sequence_number=next(self._numbers), response=self._response),
        ]

    def text_delta(self, text: str) -> list[ServerEvent]:
        """Say that the model wrote ``text``, in the open message or else in a new one."""
        self._take(Step.TEXT)
        events: list[ServerEvent] = []
        if not isinstance(self._open, OpenMessage):
            self._open = OpenMessage(self._ids("msg"), len(self._output), self._numbers)
            events = self._open.opened()
        return [*events, self._open.written(text)]

    def call_started(self, call_id: str, name: str) -> list[ServerEvent]:
        """Say that the model calls ``name``; an open message ends here."""
        self._take(Step.CALL)
        events = self._close("completed")
        self._open = OpenCall(self._ids("fc"), len(self._output), self._numbers, call_id, name)
        return [*events, self._open.opened()]

    def arguments_delta(self, delta: str) -> list[ServerEvent]:
        """Say that the model wrote ``delta`` of the open call's arguments."""
        self._take(Step.ARGUMENTS)
        assert isinstance(self._open, OpenCall)
        return [self._open.written(delta)]

    def call_done(self) -> list[ServerEvent]:
        """Say that the open call is whole."""
        self._take(Step.CALL_DONE)
        return self._close("completed")

    def suspend(self, usage: Usage, extension: Extension | None = None) -> list[ServerEvent]:
        """Close the segment: the sampler waits for tool outputs, then the response goes on.

        Args:
            usage: of this segment alone, since clients add up the segments.
            extension: the content of ``suspend:run``.
        """
        self._take(Step.SUSPEND)
        events = self._close("completed")
        response = self._snapshot(usage=usage, extension=extension)
        return [*events, ResponseDone(sequence_number=next(self._numbers), response=response)]

    def complete(
        self, usage: Usage, extension: Extension | None, completed_at: int
    ) -> list[ServerEvent]:
        """End the response as the model meant it to end; ``usage`` is the last segment's."""
        self._take(Step.FINISH)
        events = self._close("completed")
        response = self._snapshot(
            status="completed", usage=usage, extension=extension, completed_at=completed_at
        )
        return [*events, ResponseCompleted(sequence_number=next(self._numbers), response=response)]

    def incomplete(
        self, reason: IncompleteReason, usage: Usage, extension: Extension | None = None
    ) -> list[ServerEvent]:
        """End the response early. What was written of the open item is delivered.

        There is no ``completed_at``: the OpenAI reference has it for completed responses only.
        """
        self._take(Step.FINISH)
        events = self._close("incomplete")
        response = self._snapshot(
            status="incomplete",
            usage=usage,
            extension=extension,
            incomplete_details=IncompleteDetails(reason),
        )
        return [*events, ResponseIncomplete(sequence_number=next(self._numbers), response=response)]

    def fail(
        self,
        code: str,
        message: str,
        usage: Usage | None = None,
        extension: Extension | None = None,
    ) -> list[ServerEvent]:
        """End the response because the server could not go on."""
        self._take(Step.FINISH)
        events = self._close("incomplete")
        response = self._snapshot(
            status="failed", usage=usage, extension=extension, error=ResponseError(code, message)
        )
        return [*events, ResponseFailed(sequence_number=next(self._numbers), response=response)]

    def _take(self, step: Step) -> None:
        self._state = next_state(TRANSITIONS, self._state, step)

    def _close(self, status: Status) -> list[ServerEvent]:
        """Finish the open item, if there is one, as ``status``."""
        if self._open is None:
            return []
        item, events = self._open.closed(status)
        self._output.append(item)
        self._open = None
        return events

    def _snapshot(
        self, *, usage: Usage | None, extension: Extension | None, **changes: Any
    ) -> ResponseResource:
        self._response = msgspec.structs.replace(
            self._response,
            output=tuple(self._output),
            usage=usage,
            suspend_run=UNSET if extension is None else msgspec.to_builtins(extension),
            **changes,
        )
        return self._response
