"""Output items while the model writes them: each knows the events of its own life.

``numbers`` is the response's counter of sequence numbers, shared by all its events.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from protocol.items import OutputFunctionCall, OutputItem, OutputMessage, OutputText, Status
from protocol.server_events import (
    ContentPartAdded,
    ContentPartDone,
    FunctionCallArgumentsDelta,
    FunctionCallArgumentsDone,
    OutputItemAdded,
    OutputItemDone,
    OutputTextDelta,
    OutputTextDone,
    ServerEvent,
)


@dataclass
class OpenMessage:
    """A message that the model is writing. It has one part."""

    id: str
    output_index: int
    numbers: Iterator[int]
    deltas: list[str] = field(default_factory=list)

    def opened(self) -> list[ServerEvent]:
        """Return the events that open the message and its part."""
        return [
            OutputItemAdded(
                sequence_number=next(self.numbers),
                output_index=self.output_index,
                item=OutputMessage(self.id, "in_progress"),
            ),
            ContentPartAdded(
                sequence_number=next(self.numbers),
                item_id=self.id,
                output_index=self.output_index,
                content_index=0,
                part=OutputText(""),
            ),
        ]

    def written(self, text: str) -> ServerEvent:
        """Add ``text`` and return its event."""
        self.deltas.append(text)
        return OutputTextDelta(
            sequence_number=next(self.numbers),
            item_id=self.id,
            output_index=self.output_index,
            content_index=0,
            delta=text,
        )

    def closed(self, status: Status) -> tuple[OutputItem, list[ServerEvent]]:
        """Return the finished item and the events that close it."""
        part = OutputText("".join(self.deltas))
        item = OutputMessage(self.id, status, (part,))
        return item, [
            OutputTextDone(
                sequence_number=next(self.numbers),
                item_id=self.id,
                output_index=self.output_index,
                content_index=0,
                text=part.text,
            ),
            ContentPartDone(
                sequence_number=next(self.numbers),
                item_id=self.id,
                output_index=self.output_index,
                content_index=0,
                part=part,
            ),
            OutputItemDone(
                sequence_number=next(self.numbers), output_index=self.output_index, item=item
            ),
        ]


@dataclass
class OpenCall:
    """A function call whose arguments the model is writing."""

    id: str
    output_index: int
    numbers: Iterator[int]
    call_id: str
    name: str
    deltas: list[str] = field(default_factory=list)

    def opened(self) -> ServerEvent:
        """Return the event that opens the call."""
        return OutputItemAdded(
            sequence_number=next(self.numbers),
            output_index=self.output_index,
            item=OutputFunctionCall(self.id, self.call_id, self.name, "", "in_progress"),
        )

    def written(self, delta: str) -> ServerEvent:
        """Add ``delta`` to the arguments and return its event."""
        self.deltas.append(delta)
        return FunctionCallArgumentsDelta(
            sequence_number=next(self.numbers),
            item_id=self.id,
            output_index=self.output_index,
            delta=delta,
        )

    def closed(self, status: Status) -> tuple[OutputItem, list[ServerEvent]]:
        """Return the finished item and the events that close it."""
        arguments = "".join(self.deltas)
        item = OutputFunctionCall(self.id, self.call_id, self.name, arguments, status)
        return item, [
            FunctionCallArgumentsDone(
                sequence_number=next(self.numbers),
                item_id=self.id,
                output_index=self.output_index,
                name=self.name,
                arguments=arguments,
            ),
            OutputItemDone(
                sequence_number=next(self.numbers), output_index=self.output_index, item=item
            ),
        ]
