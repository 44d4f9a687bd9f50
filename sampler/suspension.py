"""What a suspended run waits for.

A suspension is a frozen record. Outputs may arrive in several appends; each gives a new record, and
the run resumes from the one that awaits nothing any more.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from protocol.items import CallOutput, CustomToolCall, FunctionCall, Message


@dataclass(frozen=True)
class Suspension:
    """Sampled calls that wait for their outputs."""

    calls: tuple[FunctionCall | CustomToolCall, ...]
    """In the order in which they were sampled."""
    num_tokens: int
    """Length of the token log; the cache holds one less."""
    since: float
    """When sampling stopped, in monotonic seconds."""
    outputs: Mapping[str, str] = field(default_factory=dict)
    """What came so far, by call id."""
    messages: tuple[Message, ...] = ()
    """What the user added so far; it enters the context after the outputs."""

    @property
    def awaited(self) -> tuple[str, ...]:
        """The call ids that have no output yet, in call order."""
        return tuple(call.call_id for call in self.calls if call.call_id not in self.outputs)

    def answer(self, outputs: Mapping[str, str], messages: Iterable[Message] = ()) -> "Suspension":
        """Return the record that also holds ``outputs``, which must answer awaited calls."""
        assert set(outputs) <= set(self.awaited), "only awaited calls can be answered"
        return replace(
            self,
            outputs={**self.outputs, **outputs},
            messages=(*self.messages, *messages),
        )

    def items(self) -> list[CallOutput | Message]:
        """Return what enters the context: the outputs in call order, however they came, and then
        the messages."""
        assert not self.awaited, "some calls have no output yet"
        outputs = [CallOutput(call.call_id, self.outputs[call.call_id]) for call in self.calls]
        return [*outputs, *self.messages]
