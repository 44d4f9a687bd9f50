"""What the sampling loop gives its caller, one by one."""

from dataclasses import dataclass
from enum import Enum

from protocol.items import FunctionCall
from sampler.run import Segment
from sampler.suspension import Suspension


class StopReason(Enum):
    """Why a segment ended."""

    END_OF_TURN = "end_of_turn"
    TOOL_CALLS = "tool_calls"
    MAX_OUTPUT_TOKENS = "max_output_tokens"
    CONTEXT_LENGTH = "context_length"


@dataclass(frozen=True)
class SegmentStarted:
    """A new run begins, or a suspended one goes on."""

    segment: Segment


@dataclass(frozen=True)
class TextDelta:
    """Text for the reader; never a part of a character, never a part of a tool call."""

    text: str


@dataclass(frozen=True)
class CallStarted:
    """The model began a call and its function is known."""

    call_id: str
    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """A piece of the arguments; the pieces concatenate to what was sampled, byte for byte."""

    text: str


@dataclass(frozen=True)
class CallDone:
    """The call is complete."""

    call: FunctionCall


@dataclass(frozen=True)
class SegmentEnded:
    """Sampling stopped: for good, or until the tools' outputs come."""

    reason: StopReason
    segment: Segment
    suspension: Suspension | None = None
    """Set when the run is suspended and will go on."""


Output = SegmentStarted | TextDelta | CallStarted | ArgumentsDelta | CallDone | SegmentEnded
