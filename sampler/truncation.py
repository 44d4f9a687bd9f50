"""What of a conversation can be left out where all of it is too long.

The oldest goes first, and never a part of something: an exchange, from what the user says to where
the user speaks again, goes as a whole. So does, in the last exchange, a step: what the model said
and called, with the outputs. What the conversation begins with (a system's messages), what the user
said last, and the last step are always kept.
"""

from collections.abc import Iterator, Sequence
from itertools import compress, pairwise, takewhile

from protocol.items import (
    AdditionalTools,
    CallOutput,
    Compaction,
    CustomToolCall,
    FunctionCall,
    Message,
    ReasoningItem,
)
from sampler.recorded_turn import Item, RecordedTurn, calls_in


def truncations(items: Sequence[Item]) -> list[list[Item]]:
    """Return what is left of ``items`` without the oldest part, without the two oldest, and so on.

    It is a list of ever shorter conversations, empty where nothing can be left out.
    """
    said_last = max((i for i, item in enumerate(items) if _is_by_user(item)), default=-1)
    is_kept = [True] * len(items)
    shorter = []
    for start, stop in pairwise(_part_starts(items)):
        if not start <= said_last < stop:
            is_kept[start:stop] = [False] * (stop - start)
            shorter.append(list(compress(items, is_kept)))
    return shorter


def _part_starts(items: Sequence[Item]) -> list[int]:
    """Return where the parts begin: exchanges, and from the last exchange on steps."""
    head = len(list(takewhile(_is_preliminary, items)))
    joints = [i for i in _joints(items) if i >= head]
    exchanges = [i for i in joints if i == head or _begins_exchange(items, i)]
    last = exchanges[-1] if exchanges else head
    return exchanges + [i for i in joints if i > last and _begins_step(items, i)]


def _joints(items: Sequence[Item]) -> Iterator[int]:
    """Give the indices that no call stands before whose output stands after."""
    output_at = {item.call_id: i for i, item in enumerate(items) if isinstance(item, CallOutput)}
    last_output = -1
    for i, item in enumerate(items):
        if i > last_output:
            yield i
        answers = (output_at.get(call.call_id, -1) for call in calls_in([item]))
        last_output = max(last_output, *answers, -1)


def _is_preliminary(item: Item) -> bool:
    match item:
        case Message(role="system" | "developer") | AdditionalTools():
            return True
        case _:
            return False


def _is_by_user(item: Item) -> bool:
    return isinstance(item, Message) and item.role == "user"


def _begins_exchange(items: Sequence[Item], index: int) -> bool:
    return _is_heard(items[index]) and not _is_heard(items[index - 1])


def _is_heard(item: Item) -> bool:
    """Return whether the model is told this by somebody else than its tools."""
    match item:
        case Message():
            return item.role != "assistant"
        case _:
            return isinstance(item, Compaction)


def _begins_step(items: Sequence[Item], index: int) -> bool:
    if isinstance(items[index], RecordedTurn):
        return True
    return _is_spoken(items[index]) and not _is_spoken(items[index - 1])


def _is_spoken(item: Item) -> bool:
    """Return whether this is a part of a turn of the model that was not recorded."""
    match item:
        case Message():
            return item.role == "assistant"
        case _:
            return isinstance(item, FunctionCall | CustomToolCall | ReasoningItem)
