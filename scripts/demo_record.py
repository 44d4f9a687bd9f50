"""What the demo keeps of its runs, and the sums it shows of them.

All counts of tokens are the server's: a segment's usage, and the totals over the whole run that
stand in ``suspend:run``. Only the latencies were measured on this side of the socket.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Call:
    """A call the model made, and what the tool said."""

    call_id: str
    name: str
    arguments: str
    output: str = ""


@dataclass
class Segment:
    """What was sampled between two suspensions."""

    first_event_seconds: float
    """From sending the create or the append to the first event that shows a new token."""
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    response: dict[str, Any] = field(default_factory=dict)
    """As the event that closed the segment shows it."""
    is_suspended: bool = False

    @property
    def input_tokens(self) -> int:
        return int(self.response["usage"]["input_tokens"])

    @property
    def cached_tokens(self) -> int:
        return int(self.response["usage"]["input_tokens_details"]["cached_tokens"])

    @property
    def output_tokens(self) -> int:
        return int(self.response["usage"]["output_tokens"])

    @property
    def report(self) -> dict[str, Any]:
        """The state of the whole run when the segment ended."""
        report: dict[str, Any] = self.response["suspend:run"]
        return report

    @property
    def tokens_held(self) -> int:
        """Positions in the KV cache, whoever forwarded them: all but the pending token."""
        return self.input_tokens + self.output_tokens - 1

    @property
    def server_seconds(self) -> float:
        """From the create or the append to the first token, as the server measured it."""
        return float(self.report["time_to_first_token"] or 0)

    def as_json(self) -> dict[str, Any]:
        return {
            "input_tokens": self.input_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "tokens_held": self.tokens_held if self.is_suspended else None,
            "first_token_seconds": self.first_event_seconds,
            "server_first_token_seconds": self.server_seconds,
            "text": self.text,
            "calls": [vars(call) for call in self.calls],
        }


@dataclass
class Run:
    """One question and all that came of it."""

    question: str
    segments: list[Segment] = field(default_factory=list)

    @property
    def calls(self) -> list[Call]:
        return [call for segment in self.segments for call in segment.calls]

    @property
    def text(self) -> str:
        """The answer: what the model said last."""
        return self.segments[-1].text

    @property
    def status(self) -> str:
        return str(self.segments[-1].response["status"])

    @property
    def model(self) -> str:
        return str(self.segments[-1].response["model"])

    def as_json(self) -> dict[str, Any]:
        return {
            "question": self.question,
            "text": self.text,
            "status": self.status,
            "model": self.model,
            "segments": [segment.as_json() for segment in self.segments],
            **totals_of(self).as_json(),
            "suspend:run": self.segments[-1].report,
        }


@dataclass(frozen=True)
class Totals:
    """The numbers of one run, or of several."""

    tokens_prefilled: int = 0
    """Prompts, and with each resumption the new tokens and the one that was pending."""
    tokens_decoded: int = 0
    tokens_forwarded: int = 0
    tokens_reforwarded: int = 0
    final_tokens: int = 0
    """Length of the contexts at their ends; the last token of each is never an input."""
    stateless_tokens_prefilled: int = 0
    """What the same requests cost where each sends the whole context and nothing is kept."""
    suspensions: int = 0
    suspended_seconds: float = 0.0
    resume_seconds: tuple[float, ...] = ()
    """Append sent to first new token seen, for each resumption."""
    server_resume_seconds: tuple[float, ...] = ()
    """The same from where the server stands: append received to token sampled."""

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


def totals_of(run: Run) -> Totals:
    """Return the numbers of one finished run."""
    last, resumed = run.segments[-1], run.segments[1:]
    return Totals(
        tokens_prefilled=sum(s.input_tokens - s.cached_tokens for s in run.segments),
        tokens_decoded=sum(s.output_tokens for s in run.segments),
        tokens_forwarded=int(last.report["tokens_forwarded"]),
        tokens_reforwarded=int(last.report["tokens_reforwarded"]),
        final_tokens=last.input_tokens + last.output_tokens,
        stateless_tokens_prefilled=sum(s.input_tokens for s in run.segments),
        suspensions=sum(s.is_suspended for s in run.segments),
        suspended_seconds=float(last.report["time_info"]["suspended"]),
        resume_seconds=tuple(s.first_event_seconds for s in resumed),
        server_resume_seconds=tuple(s.server_seconds for s in resumed),
    )


def sum_of(parts: Sequence[Totals]) -> Totals:
    """Return the numbers of several runs together."""
    return Totals(
        **{name: _joined([vars(part)[name] for part in parts]) for name in vars(Totals())}
    )


def _joined(values: Sequence[Any]) -> Any:
    if any(isinstance(value, tuple) for value in values):
        return tuple(member for value in values for member in value)
    return sum(values)
