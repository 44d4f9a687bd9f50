"""One generation from create to finish, across suspensions.

A run owns a token log and, while it is being sampled or waits for a tool, a KV cache. The log is
append-only and is the truth: what the model sampled stays as the ids it sampled, and text is a
one-way projection of it. The cache lags the log by exactly one token whenever nobody is computing,
the *pending token*: it was sampled, but has not been an input yet. So the first input after a
suspension is the pending token followed by the suffix.

Nothing here knows tensors or the event loop.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

from protocol.transitions import next_state
from protocol.validation import JsonObject
from sampler.params import Constraint, SamplingParams
from sampler.suspension import Suspension


class RunState(Enum):
    """Where a run is in its life."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    SUSPENDED = "suspended"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    CANCELLED = "cancelled"


class RunEvent(Enum):
    """What may happen to a run."""

    PREFILL = "prefill"
    DECODE = "decode"
    SUSPEND = "suspend"
    RESUME = "resume"
    COMPLETE = "complete"
    TRUNCATE = "truncate"
    FAIL = "fail"
    CANCEL = "cancel"


class StopReason(Enum):
    """Why a segment ended."""

    END_OF_TURN = "end_of_turn"
    TOOL_CALLS = "tool_calls"
    MAX_OUTPUT_TOKENS = "max_output_tokens"
    CONTEXT_LENGTH = "context_length"
    CONTENT_FILTER = "content_filter"
    """Whoever samples would say no more of it."""
    STEERED = "steered"
    """The client has something to say: the turn ends between two items."""
    CANCELLED = "cancelled"
    """The client wants no more."""


_ABORT = {RunEvent.FAIL: RunState.FAILED, RunEvent.CANCEL: RunState.CANCELLED}

TRANSITIONS: dict[RunState, dict[RunEvent, RunState]] = {
    RunState.QUEUED: {RunEvent.PREFILL: RunState.PREFILLING, **_ABORT},
    RunState.PREFILLING: {RunEvent.DECODE: RunState.DECODING, **_ABORT},
    RunState.DECODING: {
        RunEvent.SUSPEND: RunState.SUSPENDED,
        RunEvent.COMPLETE: RunState.COMPLETED,
        RunEvent.TRUNCATE: RunState.INCOMPLETE,
        **_ABORT,
    },
    RunState.SUSPENDED: {RunEvent.RESUME: RunState.PREFILLING, **_ABORT},
    RunState.COMPLETED: {},
    RunState.INCOMPLETE: {},
    RunState.FAILED: {},
    RunState.CANCELLED: {},
}


class Origin(Enum):
    """Who put a span of tokens into the log."""

    PROMPT = "prompt"
    SAMPLED = "sampled"
    APPENDED = "appended"


@dataclass(frozen=True)
class Span:
    """The log's tokens ``[start, stop)``, all of one origin."""

    start: int
    stop: int
    origin: Origin


class TokenLog:
    """The append-only token ids of one run, with the origin of each span."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._starts: list[tuple[int, Origin]] = []
        """Of each span. Where it stops is not kept, so that a token more changes nothing here."""

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> tuple[int, ...]:
        """All token ids, oldest first."""
        return tuple(self._ids)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Maximal spans of one origin, in order, covering the whole log."""
        stops = [*(start for start, _ in self._starts), len(self._ids)][1:]
        return tuple(
            Span(start, stop, origin)
            for (start, origin), stop in zip(self._starts, stops, strict=True)
        )

    @property
    def last(self) -> int:
        """The newest token id."""
        return self._ids[-1]

    def since(self, position: int) -> list[int]:
        """Return the ids from ``position`` to the end."""
        return self._ids[position:]

    def append(self, token_ids: Iterable[int], origin: Origin) -> None:
        """Add ``token_ids`` at the end."""
        start = len(self._ids)
        self._ids.extend(token_ids)
        if len(self._ids) > start and (not self._starts or self._starts[-1][1] is not origin):
            self._starts.append((start, origin))


@dataclass
class Segment:
    """What was done between two suspensions. Times are monotonic seconds, durations seconds."""

    input_tokens: int
    """The whole context when the segment began, the suffix included."""
    cached_tokens: int
    """Those of them whose keys and values were in the cache already."""
    requested_at: float
    """When the segment was asked for: the request or the append arrived."""
    pre_inference_seconds: float = 0.0
    """How much of the time since then was work on the request, before it wanted the model."""
    handed_at: float | None = None
    """When it was ready for the model: encoded, with its grammar compiled."""
    started_at: float | None = None
    """When the first forward pass began."""
    first_token_at: float | None = None
    ended_at: float | None = None
    output_tokens: int = 0
    reasoning_tokens: int = 0
    """Those of them that were thoughts."""
    stop_reason: StopReason | None = None
    tokens_forwarded: int = 0
    """Positions that went through the model for it."""
    post_inference_seconds: float = 0.0
    """How long the client was kept waiting by work on what was sampled."""
    interrupted_seconds: float = 0.0
    """How much of that was before its end."""
    endpoint: JsonObject | None = None
    """What somebody else, who sampled it, told of it: times in seconds, and how often he had to be
    asked."""

    @property
    def queue_seconds(self) -> float:
        """What it waited for: others before it, and the model."""
        if self.started_at is None:
            return 0.0
        return self.started_at - self.requested_at - self.pre_inference_seconds

    @property
    def prefill_seconds(self) -> float:
        return _elapsed(self.started_at, self.first_token_at)

    @property
    def decode_seconds(self) -> float:
        if self.ended_at is None:
            return 0.0
        return _elapsed(self.first_token_at, self.ended_at) - self.interrupted_seconds

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from the request to the first new token; None before it."""
        return None if self.first_token_at is None else self.first_token_at - self.requested_at


def _elapsed(start: float | None, stop: float | None) -> float:
    return 0.0 if start is None or stop is None else stop - start


@dataclass(eq=False)
class Run:
    """The state of one run. Only ``apply`` moves its life cycle."""

    id: str
    params: SamplingParams
    constraint: Constraint
    """What the segment being sampled may call."""
    tokens: TokenLog = field(default_factory=TokenLog)
    segments: list[Segment] = field(default_factory=list)
    suspension: Suspension | None = None
    on_wish: Callable[[], object] | None = None
    """Called when ``wanted_stop`` is set: who waits for someone else's tokens looks only then."""
    num_inherited: int = 0
    """Positions whose keys and values came from another run."""
    num_forwarded: int = 0
    """Positions that have been through the model at least once: the high-water mark."""
    tokens_reforwarded: int = 0
    tokens_told: int = 0
    """Of those forwarded, what the segments that have ended say."""
    suspended_seconds: float = 0.0
    _wanted_stop: StopReason | None = None
    _state: RunState = RunState.QUEUED

    @property
    def wanted_stop(self) -> StopReason | None:
        """Set to ``STEERED`` or ``CANCELLED`` to have sampling end early."""
        return self._wanted_stop

    @wanted_stop.setter
    def wanted_stop(self, reason: StopReason | None) -> None:
        self._wanted_stop = reason
        if self.on_wish is not None:
            self.on_wish()

    @property
    def state(self) -> RunState:
        return self._state

    @property
    def is_finished(self) -> bool:
        return not TRANSITIONS[self._state]

    def apply(self, event: RunEvent) -> None:
        """Move along the transition table.

        Raises:
            InvalidTransitionError: the run's state has no such step; nothing changes.
        """
        self._state = next_state(TRANSITIONS, self._state, event)

    @property
    def tokens_forwarded(self) -> int:
        """Positions that went through the model for this run, those that did again included."""
        return self.num_forwarded - self.num_inherited + self.tokens_reforwarded

    def sampled_in_segment(self) -> list[int]:
        """Return the token ids sampled since the segment began."""
        return self.tokens.since(self.segments[-1].input_tokens)

    def record_forward(self, start: int, stop: int) -> int:
        """Note that positions ``[start, stop)`` went through the model.

        Returns:
            How many of them had been through it before.
        """
        reforwarded = max(0, min(stop, self.num_forwarded) - start)
        self.num_forwarded = max(self.num_forwarded, stop)
        self.tokens_reforwarded += reforwarded
        return reforwarded
