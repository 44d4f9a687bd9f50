"""Parts of output items while the model writes them: each knows the events of its own life."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypedDict

from msgspec import UNSET, UnsetType

from protocol.output_items import (
    Logprob,
    OutputRefusal,
    OutputText,
    ReasoningText,
    SummaryText,
)
from protocol.server_events import (
    ContentPartAdded,
    ContentPartDone,
    OutputTextDelta,
    OutputTextDone,
    ReasoningSummaryPartAdded,
    ReasoningSummaryPartDone,
    ReasoningSummaryTextDelta,
    ReasoningSummaryTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    RefusalDelta,
    RefusalDone,
    ServerEvent,
)


@dataclass
class Stamps:
    """What the events of one response are stamped with: numbers in order, padding on deltas."""

    padding: Callable[[], str] | None = None
    latest: int = -1
    """The sequence number taken last."""

    def number(self) -> int:
        """Take the next sequence number."""
        self.latest += 1
        return self.latest

    def obfuscation(self) -> str | UnsetType:
        """Return the padding of one delta."""
        return UNSET if self.padding is None else self.padding()


class _ContentStamp(TypedDict):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int


class _SummaryStamp(TypedDict):
    sequence_number: int
    item_id: str
    output_index: int
    summary_index: int


@dataclass
class _OpenPart:
    item_id: str
    output_index: int
    index: int  # among the parts of the item
    stamps: Stamps
    deltas: list[str] = field(default_factory=list)


class _OpenContent(_OpenPart):
    def _stamp(self) -> _ContentStamp:
        return {
            "sequence_number": self.stamps.number(),
            "item_id": self.item_id,
            "output_index": self.output_index,
            "content_index": self.index,
        }


@dataclass
class OpenText(_OpenContent):
    """Text for the user."""

    logprobs: list[Logprob] = field(default_factory=list)

    def opened(self) -> ServerEvent:
        """Return the event that opens the part."""
        return ContentPartAdded(**self._stamp(), part=OutputText(""))

    def written(self, text: str, logprobs: tuple[Logprob, ...]) -> ServerEvent:
        """Add ``text`` and return its event."""
        self.deltas.append(text)
        self.logprobs += logprobs
        padding = self.stamps.obfuscation()
        return OutputTextDelta(**self._stamp(), delta=text, logprobs=logprobs, obfuscation=padding)

    def closed(self) -> tuple[OutputText, list[ServerEvent]]:
        """Return the finished part and the events that close it."""
        part = OutputText("".join(self.deltas), logprobs=tuple(self.logprobs))
        return part, [
            OutputTextDone(**self._stamp(), text=part.text, logprobs=part.logprobs),
            ContentPartDone(**self._stamp(), part=part),
        ]


class OpenRefusal(_OpenContent):
    """Words in which the model declines."""

    def opened(self) -> ServerEvent:
        """Return the event that opens the part."""
        return ContentPartAdded(**self._stamp(), part=OutputRefusal(""))

    def written(self, text: str) -> ServerEvent:
        """Add ``text`` and return its event."""
        self.deltas.append(text)
        return RefusalDelta(**self._stamp(), delta=text, obfuscation=self.stamps.obfuscation())

    def closed(self) -> tuple[OutputRefusal, list[ServerEvent]]:
        """Return the finished part and the events that close it."""
        part = OutputRefusal("".join(self.deltas))
        return part, [
            RefusalDone(**self._stamp(), refusal=part.refusal),
            ContentPartDone(**self._stamp(), part=part),
        ]


class OpenReasoningText(_OpenContent):
    """The model's thoughts, told as they are."""

    def opened(self) -> ServerEvent:
        """Return the event that opens the part."""
        return ContentPartAdded(**self._stamp(), part=ReasoningText(""))

    def written(self, text: str) -> ServerEvent:
        """Add ``text`` and return its event."""
        self.deltas.append(text)
        return ReasoningTextDelta(
            **self._stamp(), delta=text, obfuscation=self.stamps.obfuscation()
        )

    def closed(self) -> tuple[ReasoningText, list[ServerEvent]]:
        """Return the finished part and the events that close it."""
        part = ReasoningText("".join(self.deltas))
        return part, [
            ReasoningTextDone(**self._stamp(), text=part.text),
            ContentPartDone(**self._stamp(), part=part),
        ]


class OpenSummary(_OpenPart):
    """The model's thoughts, told as a summary."""

    def opened(self) -> ServerEvent:
        """Return the event that opens the part."""
        return ReasoningSummaryPartAdded(**self._stamp(), part=SummaryText(""))

    def written(self, text: str) -> ServerEvent:
        """Add ``text`` and return its event."""
        self.deltas.append(text)
        return ReasoningSummaryTextDelta(
            **self._stamp(), delta=text, obfuscation=self.stamps.obfuscation()
        )

    def closed(self) -> tuple[SummaryText, list[ServerEvent]]:
        """Return the finished part and the events that close it."""
        part = SummaryText("".join(self.deltas))
        return part, [
            ReasoningSummaryTextDone(**self._stamp(), text=part.text),
            ReasoningSummaryPartDone(**self._stamp(), part=part),
        ]

    def _stamp(self) -> _SummaryStamp:
        return {
            "sequence_number": self.stamps.number(),
            "item_id": self.item_id,
            "output_index": self.output_index,
            "summary_index": self.index,
        }
