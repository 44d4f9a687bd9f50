"""What the sampling loop gives its caller, one by one."""

from dataclasses import dataclass

from protocol.items import CustomToolCall, FunctionCall
from protocol.output_items import Logprob
from sampler.run import Segment, StopReason
from sampler.suspension import Suspension


@dataclass(frozen=True)
class SegmentStarted:
    """A new run begins, or a suspended one goes on."""

    segment: Segment


@dataclass(frozen=True)
class ReasoningDelta:
    """A piece of what the model thinks before it speaks."""

    text: str


@dataclass(frozen=True)
class ReasoningDone:
    """The thoughts are complete. They never are where the turn ends inside them."""


@dataclass(frozen=True)
class TextDelta:
    """Text for the reader; never a part of a character, never a part of a tool call."""

    text: str
    logprobs: tuple[Logprob, ...] = ()
    """Of the tokens that end in this text, if they were asked for."""


@dataclass(frozen=True)
class CallStarted:
    """The model began a call and its tool is known, by its qualified name."""

    call_id: str
    name: str
    is_custom: bool = False
    """True for a free-form tool, whose input is any text; False for a function."""


@dataclass(frozen=True)
class ArgumentsDelta:
    """A piece of a function's arguments or of a free-form tool's input.

    The pieces concatenate to what was sampled, byte for byte.
    """

    text: str


@dataclass(frozen=True)
class CallDone:
    """The call is complete."""

    call: FunctionCall | CustomToolCall


@dataclass(frozen=True)
class SegmentEnded:
    """Sampling stopped: for good, or until the tools' outputs come."""

    reason: StopReason
    segment: Segment
    suspension: Suspension | None = None
    """Set when the run is suspended and will go on."""
    token_ids: tuple[int, ...] = ()
    """What the segment sampled, with an end of the turn where it was cut short."""


Output = (
    SegmentStarted
    | ReasoningDelta
    | ReasoningDone
    | TextDelta
    | CallStarted
    | ArgumentsDelta
    | CallDone
    | SegmentEnded
)
