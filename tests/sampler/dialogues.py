"""Dialogues that were sampled, for tests of what is made of them later."""

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from protocol.items import (
    CallOutput,
    Compaction,
    CustomToolCall,
    FunctionCall,
    InputItem,
    Message,
    ReasoningItem,
    UnknownItem,
)
from sampler.recorded_turn import Call, Item, RecordedTurn, TurnItem
from tests.tiny_model import IM_END


@dataclass(frozen=True)
class Exchange:
    """A turn as it was sampled, and what followed it."""

    turn: RecordedTurn
    following: Sequence[InputItem]


@dataclass(frozen=True)
class Dialogue:
    """What began it, and what was sampled then."""

    head: Sequence[InputItem]
    exchanges: Sequence[Exchange]

    def items(self, num_exchanges: int) -> list[Item]:
        """Return the conversation after as many turns."""
        items: list[Item] = list(self.head)
        for exchange in self.exchanges[:num_exchanges]:
            items += [exchange.turn, *exchange.following]
        return items


_TEXTS = st.sampled_from(["", "a", "Hi.\n", "é 🎉", "<|im_end|>", "</think>x", "<tool_call>"])
# Any ids: what was sampled need not be what encoding its text would give.
_SAMPLED = st.lists(st.integers(3, 258), max_size=4).map(lambda ids: (*ids, IM_END))


@st.composite
def _calls(draw: st.DrawFn, turn: int) -> list[Call]:
    calls: list[Call] = []
    for index in range(draw(st.integers(0, 3))):
        call_id = f"call_{turn}_{index}"
        if draw(st.booleans()):
            calls.append(
                FunctionCall(call_id, "f", '{"a": 1}', draw(st.sampled_from([None, "ns"])))
            )
        else:
            calls.append(CustomToolCall(call_id, "g", draw(_TEXTS)))
    return calls


@st.composite
def _heard(draw: st.DrawFn) -> list[InputItem]:
    """Draw what may be said to a model, in any number and order."""
    kinds: list[InputItem] = [
        Message("user", "more"),
        Message("developer", "quick"),
        Compaction("so far"),
        UnknownItem("web_search_call"),
        ReasoningItem("not sampled here"),
    ]
    return draw(st.lists(st.sampled_from(kinds), max_size=3))


@st.composite
def _exchanges(draw: st.DrawFn, turn: int) -> Exchange:
    calls = draw(_calls(turn))
    said: list[TurnItem] = [ReasoningItem("hm"), Message("assistant", draw(_TEXTS))]
    said = said[: draw(st.integers(0, 2))]
    outputs: list[InputItem] = [CallOutput(call.call_id, draw(_TEXTS)) for call in calls]
    following = draw(st.permutations([*outputs, *draw(_heard())]))
    if draw(st.booleans()):  # a turn that was sampled elsewhere
        following += [Message("user", "b"), Message("assistant", "c"), Message("user", "d")]
    return Exchange(RecordedTurn((*said, *calls), draw(_SAMPLED)), following)


@st.composite
def dialogues(draw: st.DrawFn) -> Dialogue:
    """Draw a dialogue that every chat template takes."""
    heads: list[list[InputItem]] = [
        [Message("user", "Hi.")],
        [Message("system", "a"), Message("developer", "b"), Message("user", "c")],
        [Message("user", "a"), Message("assistant", "b"), Compaction("c"), Message("user", "d")],
    ]
    exchanges = [draw(_exchanges(turn)) for turn in range(draw(st.integers(0, 4)))]
    return Dialogue(draw(st.sampled_from(heads)), exchanges)
