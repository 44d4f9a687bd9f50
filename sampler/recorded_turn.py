"""An assistant turn as it was sampled."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from msgspec import Struct

from protocol.items import (
    CallOutput,
    CustomToolCall,
    FunctionCall,
    InputItem,
    Message,
    ReasoningItem,
)

Call: TypeAlias = FunctionCall | CustomToolCall
TurnItem: TypeAlias = Message | Call | ReasoningItem
"""What an assistant's turn is made of."""


class RecordedTurn(Struct, frozen=True, tag_field="kind", tag=True):
    """What a turn said, and the very tokens that said it.

    A prompt is made of these tokens wherever the turn comes up again, however a client spells the
    items when it sends them back: what was sampled is never encoded again.
    """

    items: tuple[TurnItem, ...]
    token_ids: tuple[int, ...]
    """From after the generation prompt up to and including the end-of-turn token, which is added
    where the turn was cut short."""

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls the turn made, in the order sampled."""
        return tuple(calls_in(self.items))


Item: TypeAlias = InputItem | RecordedTurn
"""What a conversation is made of."""


def calls_in(items: Iterable[Item]) -> Iterator[Call]:
    """Give the calls that are made in ``items``, in order."""
    for item in items:
        match item:
            case FunctionCall() | CustomToolCall():
                yield item
            case RecordedTurn():
                yield from item.calls
            case _:
                pass


def expanded(items: Iterable[Item]) -> list[InputItem]:
    """Return the items that turns consist of in the place of the turns."""
    flat: list[InputItem] = []
    for item in items:
        flat += item.items if isinstance(item, RecordedTurn) else [item]
    return flat


def next_turn(items: Sequence[Item], start: int) -> int:
    """Return the index of the first recorded turn from ``start`` on, or the number of items."""
    turns = (i for i in range(start, len(items)) if isinstance(items[i], RecordedTurn))
    return next(turns, len(items))


def turn_at(items: Sequence[Item], index: int) -> RecordedTurn:
    """Return the recorded turn that is at ``index``."""
    turn = items[index]
    assert isinstance(turn, RecordedTurn), "another item is there"
    return turn


def plain_items(items: Iterable[Item]) -> list[InputItem]:
    """Return those of ``items`` that are no recorded turns."""
    return [item for item in items if not isinstance(item, RecordedTurn)]


def answerable_calls(
    before: Sequence[Item], turn: RecordedTurn, following: Sequence[InputItem]
) -> list[Call]:
    """Return the calls of ``turn``, after those made ``before`` that are answered only now."""
    own = {call.call_id for call in [*turn.calls, *calls_in(following)]}
    late = {item.call_id for item in following if isinstance(item, CallOutput)} - own
    if not late:
        return list(turn.calls)
    return [*(call for call in calls_in(before) if call.call_id in late), *turn.calls]
