"""Recognise what the model said earlier in what a client sends back.

Clients send the history again: with ids or without, with arguments written anew, with the thoughts
left out, call by call or all calls first. Where a stretch of it means exactly what a recorded turn
said, the turn takes its place, and with it the very tokens that were sampled. What differs in
meaning is left as it is: the client has rewritten history, and may.

The same words are not yet the same turn. Its tokens may hold more than it said, such as thoughts,
and these belong where they were thought. So a turn is known by an id that was made for it, or else
by all that was said before it.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import islice, takewhile
from typing import Any, TypeAlias, TypeGuard, TypeVar

import msgspec

from protocol.items import (
    AdditionalTools,
    CallOutput,
    Compaction,
    CustomToolCall,
    FunctionCall,
    InputItem,
    ItemReference,
    Message,
    ReasoningItem,
    UnknownItem,
)
from sampler.recorded_turn import Call, Item, RecordedTurn, TurnItem, calls_in

Said: TypeAlias = Message | Call
"""What a client has to repeat of a turn; thoughts may be left out."""
T = TypeVar("T")

_MAX_KEYS = 16384


def is_said(item: Item) -> TypeGuard[Said]:
    """Tell whether ``item`` is something an assistant said or called."""
    return isinstance(item, Call) or (isinstance(item, Message) and item.role == "assistant")


def _is_by_model(item: Item) -> bool:
    """Tell whether ``item`` is something an assistant said, called or thought."""
    return is_said(item) or isinstance(item, ReasoningItem)


def _is_unheard(item: Item) -> bool:
    """Tell whether no model ever reads ``item``, so that it may stand anywhere."""
    return isinstance(item, ReasoningItem | UnknownItem | AdditionalTools | ItemReference)


# --- Which turn it is ----------------------------------------------------------------------------


class TurnIndex:
    """Recorded turns, to be found by what they said; the oldest are forgotten."""

    def __init__(self, max_keys: int = _MAX_KEYS) -> None:
        """Begin with none.

        Args:
            max_keys: how much is remembered; a turn has one key, and one for each of its ids.
        """
        self._max_keys = max_keys
        self._turns: dict[str, RecordedTurn] = {}
        self._items: dict[str, TurnItem] = {}
        self._read: tuple[Item, ...] = ()  # the conversation that was added last
        self._instructions: str | None = None
        self._context = _Context(None)

    def add(self, items: Sequence[Item], instructions: str | None = None) -> None:
        """Remember the turns of a conversation.

        Where it goes on from the one that was added last, nothing of that is read again.
        """
        num_read = len(self._read)
        if instructions != self._instructions or tuple(items[:num_read]) != self._read:
            self._context, num_read = _Context(instructions), 0
        for item in items[num_read:]:
            if isinstance(item, RecordedTurn):
                self._remember(item, self._context)
            self._context.add(item)
        self._read, self._instructions = tuple(items), instructions

    def _remember(self, turn: RecordedTurn, context: "_Context") -> None:
        for item in turn.items:
            if item.id is not None:
                self._put(self._items, item.id, item)
            for key in _ids(item):
                self._put(self._turns, key, turn)
        for first in filter(is_said, turn.items):
            self._put(self._turns, context.followed_by(first), turn)
            break

    def _put(self, table: dict[str, T], key: str, value: T) -> None:
        table.pop(key, None)
        table[key] = value
        if len(table) > self._max_keys:
            del table[next(iter(table))]

    def item(self, item_id: str) -> InputItem | None:
        """Return the item with this id, or None."""
        return self._items.get(item_id)

    def recognise(self, items: Sequence[Item], instructions: str | None = None) -> list[Item]:
        """Return a conversation with recorded turns in the place of their echoes."""
        recognised: list[Item] = []
        context = _Context(instructions)
        in_other_turn = False  # one that was not recorded, or not like this
        start = 0
        while start < len(items):
            item = items[start]
            may_begin = _is_by_model(item) and not in_other_turn
            echo = self._echo_at(items, start, context) if may_begin else None
            if echo is not None:
                new, start = echo.replacement, echo.stop
            else:
                new, start = [item], start + 1
                in_other_turn = _is_by_model(item) or (in_other_turn and _is_unheard(item))
            context.add(*new)
            recognised += new
        return recognised

    def _echo_at(self, items: Sequence[Item], start: int, context: "_Context") -> "_Echo | None":
        """Return the echo that begins at ``start``, if one does."""
        for key in _clues(items, start, context):
            turn = self._turns.get(key)
            echo = _match(turn, items, start) if turn else None
            if echo and self._is_whole(echo, items, context):
                return echo
        return None

    def _is_whole(self, echo: "_Echo", items: Sequence[Item], context: "_Context") -> bool:
        """Tell whether the assistant says no more after ``echo``, or says it in another turn.

        If not, this is not the turn that was sampled, but a longer one.
        """
        heard = (i for i in range(echo.stop, len(items)) if not _is_unheard(items[i]))
        following = next(heard, None)
        if following is None or not is_said(items[following]):
            return True
        if echo.turn.calls:
            return False  # another turn could begin only after their outputs
        longer = context.copy()
        longer.add(*echo.replacement)
        return any(key in self._turns for key in _clues(items, following, longer))


def _ids(item: TurnItem) -> Iterator[str]:
    if item.id is not None:
        yield f"id {item.id}"
    if isinstance(item, Call):
        yield f"call {item.call_id}"


def _clues(items: Sequence[Item], start: int, context: "_Context") -> Iterator[str]:
    """Give what a turn that begins at ``start`` may be known by, the surest first.

    A turn's text has no id with some clients, but the call after it has.
    """
    first = items[start]
    if isinstance(first, ReasoningItem):
        yield from _ids(first)
    said: list[Said] = []
    heard = (items[i] for i in range(start, len(items)) if not _is_unheard(items[i]))
    for item in islice(heard, 2):
        if not is_said(item):
            break
        yield from _ids(item)
        said.append(item)
    if said:
        yield context.followed_by(said[0])


class _Context:
    """All that was said so far, whatever ids its calls have and wherever their outputs stand."""

    def __init__(self, instructions: str | None) -> None:
        self._said = blake2b(_packed(instructions or ""), digest_size=16)
        self._outputs = 0
        self._numbers: dict[str, int] = {}  # of the calls

    def copy(self) -> "_Context":
        """Return a context that goes on by itself."""
        copied = _Context(None)
        copied._said = self._said.copy()
        copied._outputs = self._outputs
        copied._numbers = dict(self._numbers)
        return copied

    def add(self, *items: Item) -> None:
        """Take in what comes next."""
        for item in items:
            match item:
                case RecordedTurn():
                    self.add(*item.items)
                case CallOutput():
                    told = _packed((self._numbers.get(item.call_id), item.output))
                    self._outputs += int.from_bytes(blake2b(told, digest_size=16).digest())
                case Message() | FunctionCall() | CustomToolCall() | Compaction():
                    if isinstance(item, Call):
                        self._numbers[item.call_id] = len(self._numbers)
                    self._said.update(_packed(_meaning(item)))
                case _:
                    pass

    def followed_by(self, first: Said) -> str:
        """Return a key of what follows and begins with ``first``."""
        said = self._said.copy()
        said.update(_packed((hex(self._outputs), *_meaning(first))))
        return f"after {said.hexdigest()}"


def _packed(value: Any) -> bytes:
    """Return bytes that no other value has, and that no other bytes begin with."""
    return msgspec.msgpack.encode(value)


# --- Whether it says the same --------------------------------------------------------------------


@dataclass(frozen=True)
class _Echo:
    """A stretch of what a client sent, and what it stands for."""

    turn: RecordedTurn
    others: Sequence[Item]
    """What stood in the stretch and is not the turn's own; it comes after the turn."""
    stop: int
    """Where the stretch ends."""

    @property
    def replacement(self) -> list[Item]:
        """What takes the place of the stretch."""
        return [self.turn, *self.others]


def _match(turn: RecordedTurn, items: Sequence[Item], start: int) -> _Echo | None:
    """Return the echo of ``turn`` that begins at ``start``; None where something differs.

    Outputs may stand between the calls, and thoughts anywhere. A turn that consists of nothing but
    thoughts is echoed by them.
    """
    wanted = list(filter(is_said, turn.items)) or turn.items
    echoed: list[Item] = []
    others: list[Item] = []
    stop = start
    while len(echoed) < len(wanted):
        if stop == len(items):
            return None
        item = items[stop]
        stop += 1
        if _means_the_same(item, wanted[len(echoed)]):
            echoed.append(item)
        elif isinstance(item, ReasoningItem):
            pass
        elif _is_unheard(item) or _is_output_of(item, echoed):
            others.append(item)
        else:
            return None
    return _Echo(_with_call_ids(turn, echoed), others, stop)


def _is_output_of(item: Item, calls: Sequence[Item]) -> bool:
    return isinstance(item, CallOutput) and any(
        call.call_id == item.call_id for call in calls_in(calls)
    )


def _means_the_same(one: Item, other: Item) -> bool:
    return _meaning(one) == _meaning(other)


def _meaning(item: Item) -> tuple[str, ...]:
    """Return the same for items that say the same, whatever their ids are."""
    match item:
        case Message():
            return item.role, item.text
        case FunctionCall():
            return "function_call", item.qualified_name, _canonical(item.arguments)
        case CustomToolCall():
            return "custom_tool_call", item.qualified_name, item.input
        case ReasoningItem():
            return "reasoning", item.text
        case Compaction():
            return "compaction", item.summary
        case _:
            return (type(item).__name__,)


@lru_cache(1024)  # the same calls come with every request of a conversation
def _canonical(arguments: str) -> str:
    """Return the same text for arguments that are the same value, as clients write them anew."""
    try:
        value = json.loads(arguments or "{}", parse_float=_number, parse_constant=_number)
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _number(text: str) -> int | float:
    """Return a whole number as an integer: JavaScript writes 1.0 as 1.

    Raises:
        ValueError: it is not finite; JavaScript writes that as null.
    """
    value = float(text)
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError(text)
    return int(value) if value.is_integer() else value


def _with_call_ids(turn: RecordedTurn, echoed: Sequence[Item]) -> RecordedTurn:
    """Return ``turn``, with the call ids of the client where it has renamed them."""
    ids = [call.call_id for call in calls_in(echoed)]
    if ids == [call.call_id for call in turn.calls]:
        return turn
    renamed = iter(ids)
    items = tuple(
        msgspec.structs.replace(item, call_id=next(renamed)) if isinstance(item, Call) else item
        for item in turn.items
    )
    return RecordedTurn(items, turn.token_ids)


# --- Behind a known history ----------------------------------------------------------------------


def without_echoes(items: Sequence[InputItem], history: Sequence[Item]) -> list[InputItem]:
    """Return what ``items`` add to a ``history`` that ends with what the model said last.

    Some clients repeat that before they go on. A call is known by its id and a summary by its text,
    wherever they stand. Words are an echo only where they come before anything new: later on they
    are the client's own, be they the same.
    """
    call_ids = {call.call_id for call in calls_in(history)}
    summaries = {item.summary for item in history if isinstance(item, Compaction)}
    unrepeated = _words_at_the_end(history)
    added: list[InputItem] = []
    for item in items:
        if isinstance(item, Call) and item.call_id in call_ids:
            continue
        if isinstance(item, Compaction) and item.summary in summaries:
            continue
        repeated = [i for i, words in enumerate(unrepeated) if _means_the_same(item, words)]
        if repeated:
            unrepeated = unrepeated[repeated[0] + 1 :]
            continue
        if not _is_unheard(item):
            unrepeated = []
        added.append(item)
    return added


def _words_at_the_end(history: Sequence[Item]) -> Sequence[Item]:
    """Return the messages and thoughts of the turn that ``history`` ends with, recorded or not."""
    if history and isinstance(turn := history[-1], RecordedTurn):
        return [item for item in turn.items if not isinstance(item, Call)]
    turn_items = takewhile(_is_by_model, reversed(history))
    return [item for item in turn_items if not isinstance(item, Call)][::-1]
