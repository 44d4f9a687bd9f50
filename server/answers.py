"""What a client has brought so far for the calls of a suspended response."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from protocol import errors
from protocol.client_events import resolve_append
from protocol.items import InputItem
from protocol.tools import ToolChoice
from protocol.validation import JsonObject
from sampler.suspension import Suspension


@dataclass(frozen=True)
class Answers:
    """A suspension, and what an append or inject said besides the outputs.

    Frozen: what does not fit changes nothing.
    """

    suspension: Suspension
    wire_items: tuple[JsonObject, ...] = ()
    """The same as clients see it."""
    choice: ToolChoice | None = None
    """What the next segment may call, where an append says so."""

    @property
    def is_complete(self) -> bool:
        return not self.suspension.awaited

    def plus(
        self,
        items: Sequence[InputItem],
        wire_items: Iterable[JsonObject],
        sampled_call_ids: Collection[str],
        choice: ToolChoice | None = None,
    ) -> "Answers":
        """Return these answers with what ``items`` add.

        Raises:
            ProtocolError: they name calls that are not awaited, or add nothing.
        """
        suspension = self.suspension
        added = resolve_append(items, suspension.awaited, suspension.outputs, sampled_call_ids)
        if not added.outputs and not added.messages:
            raise errors.invalid_value("input", "expected outputs of the calls, or messages")
        return replace(
            self,
            suspension=suspension.answer(added.outputs, added.messages),
            wire_items=(*self.wire_items, *filter(_is_new, wire_items)),
            choice=choice or self.choice,
        )

    def supposing_the_rest(self) -> Suspension:
        """Return the suspension with empty text in the place of outputs that are still to come:
        what is held already must leave room for them."""
        return self.suspension.answer(dict.fromkeys(self.suspension.awaited, ""))


def _is_new(item: JsonObject) -> bool:
    """Tell whether a wire item is the client's own, not an echo of what the model said."""
    item_type = item.get("type", "message")
    if item_type == "message":
        return item.get("role") != "assistant"
    return str(item_type).endswith("_output")
