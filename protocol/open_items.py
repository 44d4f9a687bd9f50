"""Output items while the model writes them: each knows the events of its own life.

``opened`` gives the events that open the item, ``closed`` the finished item and the events that
close it; what comes between depends on the kind of item.
"""

from dataclasses import dataclass, field
from typing import TypeAlias, TypedDict

from msgspec import UNSET, UnsetType

from protocol.open_parts import (
    OpenReasoningText,
    OpenRefusal,
    OpenSummary,
    OpenText,
    Stamps,
)
from protocol.output_items import (
    Logprob,
    MessagePart,
    OutputCompaction,
    OutputCustomToolCall,
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    ReasoningText,
    Status,
)
from protocol.sealed import seal
from protocol.server_events import (
    CompactionCompacting,
    CustomToolCallInputDelta,
    CustomToolCallInputDone,
    FunctionCallArgumentsDelta,
    FunctionCallArgumentsDone,
    OutputItemAdded,
    OutputItemDone,
    ServerEvent,
)

Closed: TypeAlias = tuple[OutputItem, list[ServerEvent]]


class _ItemStamp(TypedDict):
    sequence_number: int
    item_id: str
    output_index: int


@dataclass
class _OpenItem:
    id: str
    output_index: int
    stamps: Stamps

    def _added(self, item: OutputItem) -> ServerEvent:
        return OutputItemAdded(
            sequence_number=self.stamps.number(), output_index=self.output_index, item=item
        )

    def _done(self, item: OutputItem) -> ServerEvent:
        return OutputItemDone(
            sequence_number=self.stamps.number(), output_index=self.output_index, item=item
        )


@dataclass
class OpenMessage(_OpenItem):
    """A message. It gets a new part where text turns into refusal, or back."""

    parts: list[MessagePart] = field(default_factory=list)  # the finished ones
    part: OpenText | OpenRefusal | None = None

    def opened(self) -> list[ServerEvent]:
        return [self._added(OutputMessage(self.id, "in_progress"))]

    def text(self, text: str, logprobs: tuple[Logprob, ...]) -> list[ServerEvent]:
        """Add ``text`` and return its events."""
        part, events = self._text_part()
        return [*events, part.written(text, logprobs)]

    def empty_text(self) -> list[ServerEvent]:
        """Add text that is empty, unless there is some, and return its events."""
        return self._text_part()[1]

    def refusal(self, text: str) -> list[ServerEvent]:
        """Add ``text``, in which the model declines, and return its events."""
        if isinstance(self.part, OpenRefusal):
            return [self.part.written(text)]
        events = self._close_part()
        self.part = OpenRefusal(self.id, self.output_index, len(self.parts), self.stamps)
        return [*events, self.part.opened(), self.part.written(text)]

    def closed(self, status: Status) -> Closed:
        events = self._close_part()
        item = OutputMessage(self.id, status, tuple(self.parts))
        return item, [*events, self._done(item)]

    def _text_part(self) -> tuple[OpenText, list[ServerEvent]]:
        """Return the open text, or else a new one with the events that open it."""
        if isinstance(self.part, OpenText):
            return self.part, []
        events = self._close_part()
        self.part = OpenText(self.id, self.output_index, len(self.parts), self.stamps)
        return self.part, [*events, self.part.opened()]

    def _close_part(self) -> list[ServerEvent]:
        if self.part is None:
            return []
        part, events = self.part.closed()
        self.parts.append(part)
        self.part = None
        return events


@dataclass
class OpenReasoning(_OpenItem):
    """What the model thinks, told in one part: as it is, or as a summary."""

    as_summary: bool
    is_sealed: bool
    """Whether the finished item brings the text sealed as well."""

    def __post_init__(self) -> None:
        kind = OpenSummary if self.as_summary else OpenReasoningText
        self.part: OpenSummary | OpenReasoningText = kind(
            self.id, self.output_index, 0, self.stamps
        )

    def opened(self) -> list[ServerEvent]:
        return [self._added(OutputReasoning(self.id, "in_progress")), self.part.opened()]

    def written(self, text: str) -> ServerEvent:
        """Add ``text`` and return its event."""
        return self.part.written(text)

    def closed(self, status: Status) -> Closed:
        part, events = self.part.closed()
        item = OutputReasoning(
            self.id,
            status,
            content=(part,) if isinstance(part, ReasoningText) else (),
            summary=() if isinstance(part, ReasoningText) else (part,),
            encrypted_content=seal(part.text) if self.is_sealed else UNSET,
        )
        return item, [*events, self._done(item)]


@dataclass
class _OpenCall(_OpenItem):
    call_id: str
    name: str
    namespace: str | UnsetType
    deltas: list[str] = field(default_factory=list)

    def _stamp(self) -> _ItemStamp:
        return {
            "sequence_number": self.stamps.number(),
            "item_id": self.id,
            "output_index": self.output_index,
        }


class OpenFunctionCall(_OpenCall):
    """A function call whose arguments the model is writing."""

    def opened(self) -> list[ServerEvent]:
        return [self._added(self._item("", "in_progress"))]

    def written(self, delta: str) -> ServerEvent:
        """Add ``delta`` to the arguments and return its event."""
        self.deltas.append(delta)
        return FunctionCallArgumentsDelta(
            **self._stamp(), delta=delta, obfuscation=self.stamps.obfuscation()
        )

    def closed(self, status: Status) -> Closed:
        item = self._item("".join(self.deltas), status)
        return item, [
            FunctionCallArgumentsDone(**self._stamp(), name=item.name, arguments=item.arguments),
            self._done(item),
        ]

    def _item(self, arguments: str, status: Status) -> OutputFunctionCall:
        return OutputFunctionCall(
            self.id, self.call_id, self.name, arguments, status, self.namespace
        )


class OpenCustomToolCall(_OpenCall):
    """A call of a free-form tool whose input the model is writing."""

    def opened(self) -> list[ServerEvent]:
        return [self._added(self._item("", "in_progress"))]

    def written(self, delta: str) -> ServerEvent:
        """Add ``delta`` to the input and return its event."""
        self.deltas.append(delta)
        return CustomToolCallInputDelta(
            **self._stamp(), delta=delta, obfuscation=self.stamps.obfuscation()
        )

    def closed(self, status: Status) -> Closed:
        item = self._item("".join(self.deltas), status)
        return item, [CustomToolCallInputDone(**self._stamp(), input=item.input), self._done(item)]

    def _item(self, input_: str, status: Status) -> OutputCustomToolCall:
        return OutputCustomToolCall(
            self.id, self.call_id, self.name, input_, status, self.namespace
        )


class OpenCompaction(_OpenItem):
    """A summary that takes the place of what was said so far."""

    def opened(self) -> list[ServerEvent]:
        compacting = OutputCompaction(self.id, "", "in_progress")
        return [
            self._added(compacting),
            CompactionCompacting(
                sequence_number=self.stamps.number(),
                item_id=self.id,
                output_index=self.output_index,
            ),
        ]

    def closed(self, encrypted_content: str) -> Closed:
        item = OutputCompaction(self.id, encrypted_content, "completed")
        return item, [self._done(item)]


OpenCall: TypeAlias = OpenFunctionCall | OpenCustomToolCall
OpenItem: TypeAlias = OpenMessage | OpenReasoning | OpenCall
