"""What clients send back, in the ways in which real ones do, against what was recorded.

A turn's token ids are made up, so that two turns that say the same can be told apart.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.items import (
    AdditionalTools,
    CallOutput,
    Compaction,
    CustomToolCall,
    FunctionCall,
    InputItem,
    Message,
    ReasoningItem,
    UnknownItem,
)
from protocol.tools import FunctionTool
from sampler.echoes import TurnIndex, is_said, without_echoes
from sampler.recorded_turn import Call, Item, RecordedTurn, TurnItem, calls_in

ItemT = TypeVar("ItemT", bound=msgspec.Struct)

ASK = Message("user", "Weather in Oslo?")
THANKS = Message("user", "Thanks.")
OSLO = FunctionCall("call_1", "get_weather", '{"city": "Oslo", "days": 1}', None, "fc_1")
ROME = FunctionCall("call_2", "get_weather", '{"city": "Rome", "days": 1}', None, "fc_2")
PATCH = CustomToolCall("call_3", "apply_patch", "*** Begin Patch\n", None, "ctc_3")
HM = Message("assistant", "Hm.", "msg_1")
THOUGHT = ReasoningItem("Let me look.", "rs_1")


def turn(*items: TurnItem, tokens: Sequence[int] = (7, 2)) -> RecordedTurn:
    return RecordedTurn(items, tuple(tokens))


def indexed(*conversations: Sequence[Item], instructions: str | None = None) -> TurnIndex:
    """Return an index that was told of conversations turn by turn, as they were sampled."""
    index = TurnIndex()
    for items in conversations:
        for end, item in enumerate(items, 1):
            if isinstance(item, RecordedTurn):
                index.add(items[:end], instructions)
    return index


def without_ids(item: ItemT) -> ItemT:
    return replaced(item, id=None) if hasattr(item, "id") else item


def replaced(item: ItemT, **members: object) -> ItemT:
    return msgspec.structs.replace(item, **members)


# --- One turn ------------------------------------------------------------------------------------

CALLED = turn(THOUGHT, HM, OSLO)
SUNNY = CallOutput("call_1", "sunny")

ECHOES: dict[str, list[InputItem]] = {
    "as it was": [THOUGHT, HM, OSLO],
    "without thoughts": [HM, OSLO],
    "without ids": [without_ids(HM), without_ids(OSLO)],
    "with thoughts that have no id": [without_ids(THOUGHT), without_ids(HM), without_ids(OSLO)],
    "with thoughts of which the text is sealed": [ReasoningItem("", "rs_1"), HM, OSLO],
    "with thoughts in other words": [ReasoningItem("Looked."), HM, OSLO],
    "with thoughts at each item": [THOUGHT, HM, without_ids(THOUGHT), OSLO],
    "with ids that the client made up": [replaced(HM, id="x"), replaced(OSLO, id="y")],
    "with arguments written anew": [HM, replaced(OSLO, arguments='{"days":1,"city":"Oslo"}')],
    "with a number as another language writes it": [
        HM,
        replaced(OSLO, arguments='{"city": "\\u004fslo", "days": 1.0}'),
    ],
    "with an id of the call alone": [without_ids(HM), without_ids(OSLO)],
    "with an id of the message alone": [HM, replaced(without_ids(OSLO), call_id="call_1")],
}


@pytest.mark.parametrize("echo", ECHOES.values(), ids=ECHOES.keys())
def test_an_echo_is_the_turn(echo: list[InputItem]) -> None:
    index = indexed([ASK, CALLED])

    assert index.recognise([ASK, *echo, SUNNY]) == [ASK, CALLED, SUNNY]


OTHERS: dict[str, list[InputItem]] = {
    "another text": [replaced(HM, text="Hm!"), OSLO],
    "a text with a blank more": [replaced(HM, text="Hm. "), OSLO],
    "another speaker": [replaced(HM, role="developer"), OSLO],
    "another argument": [HM, replaced(OSLO, arguments='{"city": "Rome", "days": 1}')],
    "an argument more": [HM, replaced(OSLO, arguments='{"city": "Oslo", "days": 1, "a": 1}')],
    "a truth for a number": [HM, replaced(OSLO, arguments='{"city": "Oslo", "days": true}')],
    "a string for a number": [HM, replaced(OSLO, arguments='{"city": "Oslo", "days": "1"}')],
    "another function": [HM, replaced(OSLO, name="get_news")],
    "another namespace": [HM, replaced(OSLO, namespace="weather")],
    "another kind of call": [HM, CustomToolCall("call_1", "get_weather", OSLO.arguments)],
    "no message": [OSLO],
    "no call": [HM],
    "another order": [OSLO, HM],
    "a message more at the end": [HM, OSLO, Message("assistant", "Hm.")],
    "a message more at the beginning": [Message("assistant", "Oh."), HM, OSLO],
    "a call more at the end": [HM, OSLO, ROME],
    "a call more at the beginning": [ROME, HM, OSLO],
    "a call more in between": [HM, ROME, OSLO],
    "a word of the user's in between": [HM, THANKS, OSLO],
    "a summary in between": [HM, Compaction("so far"), OSLO],
    "somebody else's output in between": [HM, CallOutput("call_2", "dry"), OSLO],
    "nothing but its thoughts": [THOUGHT],
}


@pytest.mark.parametrize("items", OTHERS.values(), ids=OTHERS.keys())
def test_what_says_something_else_is_left_as_it_is(items: list[InputItem]) -> None:
    index = indexed([ASK, CALLED])

    assert index.recognise([ASK, *items, SUNNY]) == [ASK, *items, SUNNY]


def test_what_was_edited_early_does_not_keep_later_turns_from_being_known_by_their_ids() -> None:
    later = turn(Message("assistant", "Sunny.", "msg_2"))
    index = indexed([ASK, CALLED, SUNNY, later])
    edited: list[InputItem] = [ASK, replaced(HM, text="Oh."), OSLO, SUNNY]

    assert index.recognise([*edited, *later.items, THANKS]) == [*edited, later, THANKS]


@pytest.mark.parametrize(
    ("sampled", "echoed"),
    [
        ("{}", ""),
        ("", "{}"),
        ('{"a": 1e2}', '{"a":100}'),
        ('{"a": -0.0}', '{"a":0}'),
        ('{"a": 1e22}', '{"a":1e+22}'),
        ('{"a": 0.10}', '{"a":0.1}'),
        ('{"a": "\\u00e9"}', '{"a":"é"}'),
        ('{"a": 1, "b": [1, {"c": null}]}', '{"b":[1.0,{"c":null}],"a":1}'),
        ('{"a": 1', '{"a": 1'),
        ('{"a": 1e999}', '{"a": 1e999}'),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_that_are_the_same_value_are_the_same(sampled: str, echoed: str) -> None:
    recorded = turn(replaced(OSLO, arguments=sampled))
    index = indexed([ASK, recorded])

    assert index.recognise([ASK, replaced(OSLO, arguments=echoed)]) == [ASK, recorded]


@pytest.mark.parametrize(
    ("sampled", "echoed"),
    [
        ('{"a": 12345678901234567890}', '{"a": 12345678901234567000}'),
        ('{"a": 1}', '{"a": 1.5}'),
        ('{"a": 1e999}', '{"a": 2e999}'),
        ('{"a": NaN}', '{"a": null}'),
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ('{"a": 1', '{"a":1'),
        ("{}", "null"),
    ],
)
def test_arguments_that_are_another_value_are_not_the_same(sampled: str, echoed: str) -> None:
    echo = replaced(OSLO, arguments=echoed)

    assert indexed([ASK, turn(replaced(OSLO, arguments=sampled))]).recognise([ASK, echo]) == [
        ASK,
        echo,
    ]


@pytest.mark.parametrize(
    "call",
    [
        PATCH,
        replaced(PATCH, namespace="files"),
        replaced(OSLO, namespace="weather"),
        replaced(PATCH, input='{"a": 1}'),
    ],
)
def test_calls_of_every_kind_are_known_with_ids_and_without(call: Call) -> None:
    recorded = turn(call)
    index = indexed([ASK, recorded])
    renamed = replaced(without_ids(call), call_id="call_x")

    assert index.recognise([ASK, without_ids(call)]) == [ASK, recorded]
    assert index.recognise([ASK, renamed])[1] == RecordedTurn(
        (replaced(call, call_id="call_x"),), recorded.token_ids
    )


def test_free_form_input_is_no_json() -> None:
    call = replaced(PATCH, input='{"a": 1}')
    echo = replaced(PATCH, input='{"a":1}')

    assert indexed([ASK, turn(call)]).recognise([ASK, echo]) == [ASK, echo]


def test_a_namespace_is_a_part_of_the_name() -> None:
    recorded = turn(replaced(OSLO, namespace="weather", name="get"))
    echo = replaced(OSLO, name="weather.get")

    assert indexed([ASK, recorded]).recognise([ASK, echo]) == [ASK, recorded]


# --- Calls side by side --------------------------------------------------------------------------

BOTH = turn(HM, OSLO, ROME, PATCH)
OUTPUTS = [CallOutput("call_1", "sunny"), CallOutput("call_2", "dry"), CallOutput("call_3", "ok")]


def test_outputs_between_the_calls_of_a_turn_come_after_it() -> None:
    index = indexed([ASK, BOTH])
    echo: list[InputItem] = [ASK, HM, OSLO, OUTPUTS[0], ROME, OUTPUTS[1], PATCH, OUTPUTS[2]]

    assert index.recognise(echo) == [ASK, BOTH, *OUTPUTS]


def test_calls_one_after_the_other_are_turns_of_their_own() -> None:
    turns = [turn(call, tokens=[i, 2]) for i, call in enumerate(BOTH.calls, 3)]
    sampled: list[Item] = [ASK, turns[0], OUTPUTS[0], turns[1], OUTPUTS[1], turns[2], OUTPUTS[2]]
    echo: list[InputItem] = [ASK, OSLO, OUTPUTS[0], ROME, OUTPUTS[1], PATCH, OUTPUTS[2]]

    assert indexed(sampled).recognise(echo) == sampled
    assert indexed([ASK, turn(OSLO, ROME, PATCH)]).recognise(echo) != sampled


def test_calls_that_were_made_one_after_the_other_are_not_known_side_by_side() -> None:
    sampled: list[Item] = [ASK, turn(OSLO), OUTPUTS[0], turn(ROME), OUTPUTS[1]]
    echo: list[InputItem] = [ASK, OSLO, ROME, *OUTPUTS[:2]]

    assert indexed(sampled).recognise(echo) == echo


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_a_client_may_call_the_calls_something_else(is_interleaved: bool) -> None:
    index = indexed([ASK, BOTH])
    renamed = [replaced(call, call_id=f"x{i}", id=None) for i, call in enumerate(BOTH.calls)]
    outputs = [CallOutput(f"x{i}", "?") for i in range(3)]
    pairs = zip(renamed, outputs, strict=True)
    calls = [item for pair in pairs for item in pair] if is_interleaved else [*renamed, *outputs]

    recognised = index.recognise([ASK, without_ids(HM), *calls])

    assert recognised[0] == ASK
    assert recognised[2:] == outputs
    known = recognised[1]
    assert isinstance(known, RecordedTurn)
    assert known.token_ids == BOTH.token_ids
    assert [call.call_id for call in known.calls] == ["x0", "x1", "x2"]
    assert [item.id for item in known.items] == [item.id for item in BOTH.items]


def test_renamed_calls_keep_the_thoughts_of_their_turn() -> None:
    index = indexed([ASK, CALLED])

    known = index.recognise([ASK, without_ids(HM), replaced(OSLO, call_id="x", id=None)])[1]

    assert known == turn(THOUGHT, HM, replaced(OSLO, call_id="x"))


# --- The same words elsewhere --------------------------------------------------------------------

SECRET = ReasoningItem("The customer is called Ada.", "rs_2")
YES = Message("assistant", "Yes.", "msg_2")


@pytest.mark.parametrize(
    "before",
    [
        [Message("user", "Is it?")],
        [Message("system", "Be brief."), ASK],
        [ASK, Message("user", "Well?")],
        [ASK, Message("assistant", "No."), Message("user", "Sure?")],
        [Compaction("so far"), ASK],
        [],
    ],
)
def test_the_same_words_after_other_words_are_not_the_turn(before: list[InputItem]) -> None:
    """Its tokens hold thoughts, which belong to another conversation."""
    index = indexed([ASK, turn(SECRET, YES)])
    items: list[InputItem] = [*before, without_ids(YES), THANKS]

    assert index.recognise(items) == items


def test_the_same_words_under_other_instructions_are_not_the_turn() -> None:
    index = indexed([ASK, turn(SECRET, YES)], instructions="You serve Ada.")
    items: list[InputItem] = [ASK, without_ids(YES), THANKS]

    assert index.recognise(items, "You serve Bob.") == items
    assert index.recognise(items) == items
    assert isinstance(index.recognise(items, "You serve Ada.")[1], RecordedTurn)


@pytest.mark.parametrize("instructions", [None, "You serve Bob."])
def test_an_id_is_known_wherever_it_stands(instructions: str | None) -> None:
    recorded = turn(SECRET, YES)
    index = indexed([ASK, recorded], instructions="You serve Ada.")

    recognised = index.recognise([THANKS, YES, ASK], instructions)

    assert recognised == [THANKS, recorded, ASK]


def test_two_turns_of_the_same_text_are_told_apart_by_what_was_said_before() -> None:
    one, two, three = (turn(replaced(YES, id=f"msg_{i}"), tokens=[i, 2]) for i in (4, 5, 6))
    sampled: list[Item] = [ASK, one, ASK, two, ASK, three]
    index = indexed(sampled)
    echo: list[InputItem] = [ASK, without_ids(YES)] * 3

    assert index.recognise([*echo, THANKS]) == [*sampled, THANKS]
    assert index.recognise([*echo[:4], THANKS]) == [*sampled[:4], THANKS]


def test_an_output_tells_conversations_apart() -> None:
    wet, dry = turn(YES, tokens=[4, 2]), turn(replaced(YES, id="msg_3"), tokens=[5, 2])
    conversations: list[list[Item]] = [
        [ASK, turn(OSLO), CallOutput("call_1", output), said]
        for output, said in (("wet", wet), ("dry", dry))
    ]
    index = indexed(*conversations)

    for items in conversations:
        echo = [ASK, OSLO, items[2], without_ids(YES)]
        assert index.recognise(echo) == items


def test_outputs_that_are_swapped_are_another_conversation() -> None:
    said = turn(SECRET, YES)
    index = indexed([ASK, turn(OSLO, ROME), *OUTPUTS[:2], said])
    swapped = [CallOutput("call_1", "dry"), CallOutput("call_2", "sunny")]

    recognised = index.recognise([ASK, OSLO, ROME, *swapped, without_ids(YES)])

    assert recognised[-1] == without_ids(YES)


def test_of_turns_that_say_the_same_in_the_same_place_the_latest_is_meant() -> None:
    first, again = turn(YES, tokens=[4, 2]), turn(replaced(YES, id="msg_3"), tokens=[5, 2])
    index = indexed([ASK, first], [ASK, again])

    assert index.recognise([ASK, without_ids(YES)]) == [ASK, again]
    assert index.recognise([ASK, YES]) == [ASK, first]


def test_turns_from_the_same_place_that_go_on_differently_are_told_apart_by_their_calls() -> None:
    first, again = turn(HM, OSLO), turn(replaced(HM, id="msg_3"), ROME)
    index = indexed([ASK, first], [ASK, again])

    assert index.recognise([ASK, without_ids(HM), without_ids(OSLO)]) == [ASK, first]
    assert index.recognise([ASK, without_ids(HM), without_ids(ROME)]) == [ASK, again]


# --- Turns that follow one another ---------------------------------------------------------------


@pytest.mark.parametrize("strip", [lambda item: item, without_ids], ids=["ids", "no ids"])
def test_turns_with_nothing_in_between_are_known(strip: Callable[[InputItem], InputItem]) -> None:
    """A turn that was cut short may be gone on from without a word."""
    turns = [turn(HM, tokens=[4, 2]), turn(THOUGHT, YES, OSLO, tokens=[5, 2])]

    echo: list[InputItem] = [ASK, strip(HM), strip(YES), strip(OSLO), SUNNY]

    assert indexed([ASK, *turns]).recognise(echo) == [ASK, *turns, SUNNY]


def test_a_turn_of_thoughts_alone_is_known_by_their_id() -> None:
    cut, steered = turn(THOUGHT, tokens=[4, 2]), turn(SECRET, YES, tokens=[5, 2])
    index = indexed([ASK, cut, THANKS, steered])

    assert index.recognise([ASK, THOUGHT, THANKS, SECRET, YES]) == [ASK, cut, THANKS, steered]


def test_thoughts_that_were_left_out_do_not_keep_what_follows_from_being_known() -> None:
    cut, steered = turn(THOUGHT, tokens=[4, 2]), turn(SECRET, YES, tokens=[5, 2])
    index = indexed([ASK, cut, THANKS, steered])

    assert index.recognise([ASK, THANKS, without_ids(YES)]) == [ASK, THANKS, steered]


def test_a_turn_that_said_nothing_is_nowhere() -> None:
    index = indexed([ASK, turn(), THANKS, turn(YES)])

    assert index.recognise([ASK, THANKS]) == [ASK, THANKS]


def test_turns_that_are_in_their_place_already_stay_there() -> None:
    items: list[Item] = [ASK, turn(HM, OSLO), SUNNY, turn(YES)]

    assert indexed(items).recognise(items) == items
    assert indexed(items).recognise([*items[:3], without_ids(YES)]) == items


# --- What no model sees --------------------------------------------------------------------------

TOOLS = AdditionalTools((FunctionTool("now"),))
SEARCH = UnknownItem("web_search_call")


@pytest.mark.parametrize("unseen", [TOOLS, SEARCH])
@pytest.mark.parametrize("position", range(5))
def test_what_no_model_sees_may_stand_anywhere_and_is_kept(
    unseen: InputItem, position: int
) -> None:
    index = indexed([ASK, CALLED])
    echo: list[InputItem] = [ASK, without_ids(HM), without_ids(OSLO), SUNNY]

    recognised = index.recognise([*echo[:position], unseen, *echo[position:]])

    assert unseen in recognised
    assert [item for item in recognised if item != unseen] == [ASK, CALLED, SUNNY]


def test_what_no_model_saw_makes_no_other_conversation() -> None:
    index = indexed([TOOLS, ASK, SEARCH, CALLED])

    assert index.recognise([ASK, without_ids(HM), without_ids(OSLO)]) == [ASK, CALLED]


class Counted(list[InputItem]):
    """Counts how often its items are looked at."""

    num_looks = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_looks += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(
    "stretch",
    [
        [THOUGHT],
        [HM],
        [SEARCH],
        [THOUGHT, SEARCH],
        [HM, THOUGHT],
        [HM, SEARCH],
        [HM, THANKS],
        [OSLO, SUNNY],
        [OSLO, ROME],
    ],
)
def test_a_history_that_never_ends_is_looked_at_once(stretch: list[InputItem]) -> None:
    items = Counted(stretch * 500)
    index = indexed([ASK, CALLED], [ASK, turn(HM, OSLO, ROME)])

    index.recognise(items)

    assert items.num_looks < 10 * len(items)


# --- What is remembered --------------------------------------------------------------------------


def test_items_are_found_by_their_ids() -> None:
    index = indexed([ASK, CALLED, SUNNY, turn(YES)])

    found = [index.item(item_id) for item_id in ("rs_1", "msg_1", "fc_1", "msg_2")]

    assert found == [THOUGHT, HM, OSLO, YES]
    assert index.item("msg_3") is None
    assert index.item("call_1") is None


def test_the_oldest_turns_are_forgotten() -> None:
    index = TurnIndex(max_keys=10)
    turns = [turn(Message("assistant", "Yes.", f"msg_{i}"), tokens=[i, 2]) for i in range(3, 13)]

    for said in turns:
        index.add([ASK, said])

    known = [index.recognise(said.items) == [said] for said in turns]
    assert known == sorted(known)
    assert known[-1]
    assert not known[0]
    assert index.item("msg_3") == turns[0].items[0]
    index.add([ASK, turn(Message("assistant", "No.", "msg_x"))])
    assert index.item("msg_3") is None


def test_what_comes_up_again_is_not_the_oldest_any_more() -> None:
    index = TurnIndex(max_keys=4)
    first, second, third = (turn(replaced(YES, id=f"msg_{i}"), tokens=[i, 2]) for i in (4, 5, 6))

    for said in (first, second, first, third):
        index.add([THANKS if said is second else ASK, said])

    known = [index.recognise(said.items) == [said] for said in (first, second, third)]
    assert known == [True, False, True]


def test_a_conversation_is_remembered_alike_at_once_and_turn_by_turn() -> None:
    items: list[Item] = [ASK, CALLED, SUNNY, turn(YES), THANKS, turn(HM, PATCH)]
    at_once = TurnIndex()
    at_once.add(items)
    echo: list[InputItem] = [without_ids(part) for item in items for part in parts_of(item)]

    assert at_once.recognise(echo) == indexed(items).recognise(echo) == items


def test_conversations_that_take_turns_are_kept_apart() -> None:
    first: list[Item] = [
        ASK,
        turn(YES, tokens=[4, 2]),
        ASK,
        turn(replaced(YES, id="msg_5"), tokens=[5, 2]),
    ]
    other: list[Item] = [THANKS, turn(replaced(YES, id="msg_6"), tokens=[6, 2]), ASK]
    other += [turn(replaced(YES, id="msg_7"), tokens=[7, 2])]
    index = TurnIndex()
    for end in (2, 4):
        index.add(first[:end], "Be brief.")
        index.add(other[:end])

    assert index.recognise([ASK, without_ids(YES)] * 2, "Be brief.") == first
    assert index.recognise([THANKS, without_ids(YES), ASK, without_ids(YES)]) == other


# --- All the ways of clients ---------------------------------------------------------------------


def parts_of(item: Item) -> Sequence[InputItem]:
    return item.items if isinstance(item, RecordedTurn) else [item]


@dataclass(frozen=True)
class Style:
    """How a client sends back what it was sent."""

    ids: str
    thoughts: str
    is_written_anew: bool = False
    is_interleaved: bool = False
    renames_calls: bool = False
    has_junk: bool = False

    def echo(self, items: Iterable[Item]) -> list[InputItem]:
        """Return a conversation as the client sends it."""
        echoed: list[InputItem] = []
        for item in items:
            echoed += [self._part(part) for part in parts_of(item) if self._keeps(part)]
        if self.is_interleaved:
            echoed = interleaved(echoed)
        if self.has_junk:
            echoed = [part for item in echoed for part in (SEARCH, item)]
        return echoed

    def renamed(self, items: Iterable[Item]) -> list[Item]:
        """Return a conversation with the call ids of the client, its outputs where it puts them."""
        return [
            RecordedTurn(tuple(map(self._with_call_id, item.items)), item.token_ids)
            if isinstance(item, RecordedTurn)
            else self._with_call_id(item)
            for item in items
        ]

    def _keeps(self, item: InputItem) -> bool:
        return not (isinstance(item, ReasoningItem) and self.thoughts == "dropped")

    def _part(self, part: InputItem) -> InputItem:
        part = self._with_call_id(part)
        if isinstance(part, FunctionCall) and self.is_written_anew:
            value = json.loads(part.arguments)
            part = replaced(part, arguments=json.dumps(value, separators=(",", ":")))
        if isinstance(part, ReasoningItem):
            return part if self.thoughts == "kept" else without_ids(part)
        if not is_said(part) or self.ids == "kept":
            return part
        return replaced(part, id=None if self.ids == "dropped" else f"made_up_{part.id}")

    def _with_call_id(self, part: ItemT) -> ItemT:
        if self.renames_calls and isinstance(part, Call | CallOutput):
            return replaced(part, call_id=f"x_{part.call_id}")
        return part


def interleaved(items: Sequence[InputItem]) -> list[InputItem]:
    """Return ``items`` with each output right after its call."""
    outputs = {item.call_id: item for item in items if isinstance(item, CallOutput)}
    placed: list[InputItem] = []
    for item in items:
        if not isinstance(item, CallOutput):
            placed.append(item)
        if isinstance(item, Call) and item.call_id in outputs:
            placed.append(outputs[item.call_id])
    return placed


CLIENTS = {
    "Codex over HTTP": Style("dropped", "anonymous"),
    "Codex 0.171 over HTTP": Style("made up", "anonymous"),
    "agents": Style("kept", "kept"),
    "AI SDK": Style("dropped", "kept", is_written_anew=True),
    "AI SDK open-responses, pi": Style("kept", "kept", is_written_anew=True),
    "opencode": Style("dropped", "anonymous", is_written_anew=True),
    "Cline": Style("dropped", "dropped", is_written_anew=True),
    "llm": Style("dropped", "kept"),
}
styles = st.builds(
    Style,
    st.sampled_from(["kept", "dropped", "made up"]),
    st.sampled_from(["kept", "anonymous", "dropped"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
_WORDS = st.sampled_from(["", "Yes.", "No."])
_ARGUMENTS = st.sampled_from(["{}", '{"b": 1.0, "a": [true, null]}', '{"a": "\\u00e9"}'])


@st.composite
def _turns(draw: st.DrawFn, name: str) -> RecordedTurn:
    items: list[TurnItem] = []
    if draw(st.booleans()):
        items.append(ReasoningItem(draw(_WORDS), f"rs_{name}"))
    if draw(st.booleans()):
        items.append(Message("assistant", draw(_WORDS), f"msg_{name}"))
    num_calls = draw(st.integers(0 if any(map(is_said, items)) else 1, 3))
    for i in range(num_calls):
        ids = {"call_id": f"call_{name}_{i}", "id": f"fc_{name}_{i}"}
        namespace = draw(st.sampled_from([None, "ns"]))
        if draw(st.booleans()):
            items.append(
                FunctionCall(name="f", arguments=draw(_ARGUMENTS), namespace=namespace, **ids)
            )
        else:
            items.append(CustomToolCall(name="g", input=draw(_WORDS), namespace=namespace, **ids))
    return RecordedTurn(tuple(items), (*name.encode(), 2))


@st.composite
def dialogues(draw: st.DrawFn, name: str = "a") -> list[Item]:
    """Draw a conversation in which much is said more than once."""
    items: list[Item] = [Message("system", name), Message("user", draw(_WORDS))]
    for i in range(draw(st.integers(1, 5))):
        said = draw(_turns(f"{name}{i}"))
        items += [said, *(CallOutput(call.call_id, draw(_WORDS)) for call in said.calls)]
        heard = st.lists(_WORDS.map(lambda text: Message("user", text)), max_size=2)
        items += draw(heard)
    return items


@pytest.mark.slow
@given(dialogues(), dialogues("b"), styles)
def test_whatever_the_client_its_echo_is_what_was_sampled(
    items: list[Item], other: list[Item], style: Style
) -> None:
    index = indexed(items, other)

    for conversation in (items, other):
        recognised = index.recognise(style.echo(conversation))

        assert [item for item in recognised if item != SEARCH] == style.renamed(conversation)


@pytest.mark.parametrize("style", CLIENTS.values(), ids=CLIENTS.keys())
def test_clients_that_are_known_are_understood(style: Style) -> None:
    items: list[Item] = [
        ASK,
        CALLED,
        SUNNY,
        turn(YES),
        THANKS,
        turn(BOTH.items[0], *BOTH.calls[1:]),
    ]
    items += [*OUTPUTS[1:], turn(replaced(YES, id="msg_9"), tokens=[9, 2]), THANKS]

    assert indexed(items).recognise(style.echo(items)) == items


# --- Whatever a client says ----------------------------------------------------------------------


_EXTRAS: list[InputItem] = [HM, without_ids(YES), THANKS, THOUGHT, Compaction("so far")]


@st.composite
def _edited(draw: st.DrawFn) -> tuple[list[Item], list[InputItem]]:
    """Draw a dialogue, and what a client has made of it."""
    items = draw(dialogues())
    echoed = draw(styles).echo(items)
    for _ in range(draw(st.integers(1, 3))):
        index = draw(st.integers(0, len(echoed) - 1))
        extra = draw(st.sampled_from(_EXTRAS))
        match draw(st.sampled_from(["insert", "drop", "swap", "say", "call"])):
            case "insert":
                echoed.insert(index, extra)
            case "drop" if len(echoed) > 1:
                del echoed[index]
            case "swap" if index:
                echoed[index - 1 : index + 1] = echoed[index - 1 : index + 1][::-1]
            case "say" if isinstance(echoed[index], Message):
                echoed[index] = replaced(echoed[index], text=draw(_WORDS))
            case "call" if isinstance(echoed[index], FunctionCall):
                echoed[index] = replaced(echoed[index], arguments=draw(_ARGUMENTS))
            case _:
                pass
    return items, echoed


def heard(items: Iterable[Item]) -> list[object]:
    """Return what a model hears, apart from outputs, which it hears right after their calls."""
    meanings: list[object] = []
    for part in (part for item in items for part in parts_of(item)):
        match part:
            case FunctionCall():
                value = json.loads(part.arguments)
                meanings.append((part.call_id, part.qualified_name, value))
            case CustomToolCall() | Message() | Compaction():
                meanings.append(without_ids(part))
            case _:
                pass
    return meanings


@pytest.mark.slow
@given(_edited())
def test_recognising_changes_nothing_of_what_is_said(
    drawn: tuple[list[Item], list[InputItem]],
) -> None:
    items, echoed = drawn

    recognised = indexed(items).recognise(echoed)

    assert heard(recognised) == heard(echoed)
    outputs = [item for item in echoed if isinstance(item, CallOutput)]
    assert [item for item in recognised if isinstance(item, CallOutput)] == outputs
    unseen = [item for item in echoed if item == SEARCH]
    assert [item for item in recognised if item == SEARCH] == unseen


@pytest.mark.slow
@given(_edited())
def test_what_is_recognised_was_recorded_and_is_a_turn_of_its_own(
    drawn: tuple[list[Item], list[InputItem]],
) -> None:
    items, echoed = drawn
    recorded = {item.token_ids: item for item in items if isinstance(item, RecordedTurn)}

    recognised = indexed(items).recognise(echoed)

    for before, item in zip([None, *recognised], recognised, strict=False):
        if isinstance(item, RecordedTurn):
            said = [part.id for part in recorded[item.token_ids].items]
            assert [part.id for part in item.items] == said
            assert before is None or not is_said(before)


# --- Behind a known history ----------------------------------------------------------------------

HISTORY: list[Item] = [ASK, CALLED]


@pytest.mark.parametrize("echo", ECHOES.values(), ids=ECHOES.keys())
def test_what_the_model_said_last_is_not_said_again(echo: list[InputItem]) -> None:
    added = without_echoes([*echo, SUNNY, THANKS], HISTORY)

    assert [item for item in added if not isinstance(item, ReasoningItem)] == [SUNNY, THANKS]


@pytest.mark.parametrize(
    "echo",
    [[], [HM], [OSLO], [THOUGHT], [THOUGHT, HM], [SEARCH, HM, SEARCH, OSLO]],
    ids=["nothing", "the message", "the call", "the thoughts", "all but the call", "more"],
)
def test_any_part_of_it_may_be_echoed(echo: list[InputItem]) -> None:
    unseen = [item for item in echo if item == SEARCH]

    assert without_echoes([*echo, SUNNY], HISTORY) == [*unseen, SUNNY]


def test_outputs_between_echoed_calls_are_kept() -> None:
    echo: list[InputItem] = [HM, OSLO, OUTPUTS[0], ROME, OUTPUTS[1], PATCH, OUTPUTS[2]]

    assert without_echoes(echo, [ASK, BOTH]) == OUTPUTS


def test_a_call_of_an_earlier_turn_is_an_echo_wherever_it_stands() -> None:
    history: list[Item] = [ASK, turn(OSLO), SUNNY, turn(YES)]
    items: list[InputItem] = [THANKS, OSLO, Message("user", "And now?")]

    assert without_echoes(items, history) == [THANKS, Message("user", "And now?")]


def test_a_call_is_an_echo_by_its_id_whatever_the_client_has_made_of_it() -> None:
    """A call cannot be made twice, and what the server has recorded was made."""
    edited = replaced(OSLO, arguments='{"city": "Rome"}', name="get_news", id=None)

    assert without_echoes([edited, SUNNY], HISTORY) == [SUNNY]


def test_calls_of_the_client_are_kept() -> None:
    own = replaced(OSLO, call_id="call_own")

    assert without_echoes([OSLO, own, SUNNY], HISTORY) == [own, SUNNY]


@pytest.mark.parametrize(
    "items",
    [
        [THANKS, without_ids(YES)],
        [Message("assistant", "No.", None), without_ids(YES)],
        [Compaction("so far"), without_ids(YES)],
        [CallOutput("call_9", "x"), without_ids(YES)],
        [replaced(OSLO, call_id="call_9"), without_ids(YES)],
    ],
    ids=["the user", "the assistant", "a summary", "an output", "a call"],
)
def test_words_that_come_after_something_new_are_the_clients_own(items: list[InputItem]) -> None:
    """Examples of what the assistant is to say may well be what it said last."""
    assert without_echoes([*items, THANKS], [ASK, turn(YES)]) == [*items, THANKS]


def test_what_is_said_twice_is_an_echo_once() -> None:
    assert without_echoes([YES, without_ids(YES), THANKS], [ASK, turn(YES)]) == [
        without_ids(YES),
        THANKS,
    ]


@pytest.mark.parametrize("text", ["Yes", "yes.", ""])
def test_other_words_are_kept_even_under_an_id_that_is_known(text: str) -> None:
    edited = replaced(YES, text=text)

    assert without_echoes([edited, THANKS], [ASK, turn(YES)]) == [edited, THANKS]


def test_words_of_a_turn_before_the_last_are_no_echo() -> None:
    history: list[Item] = [ASK, turn(YES), THANKS, turn(HM)]

    assert without_echoes([without_ids(YES)], history) == [without_ids(YES)]


@pytest.mark.parametrize("history", [[], [ASK], [ASK, turn(YES), THANKS], [ASK, turn(OSLO), SUNNY]])
def test_nothing_is_an_echo_of_a_history_that_does_not_end_with_the_model(
    history: list[Item],
) -> None:
    assert without_echoes([without_ids(YES), THANKS], history) == [without_ids(YES), THANKS]


def test_a_user_who_says_what_the_model_said_is_heard() -> None:
    said = Message("user", YES.text)

    assert without_echoes([said], [ASK, turn(YES)]) == [said]


def test_what_was_not_recorded_is_known_again_too() -> None:
    """The tokens of another model mean nothing here."""
    history: list[Item] = [ASK, Message("assistant", "Old."), THANKS, THOUGHT, HM, OSLO]

    assert without_echoes([THOUGHT, without_ids(HM), OSLO, SUNNY], history) == [SUNNY]
    old = Message("assistant", "Old.")
    assert without_echoes([old, SUNNY], history) == [old, SUNNY]


def test_a_summary_that_stands_in_the_history_is_an_echo() -> None:
    history: list[Item] = [ASK, Compaction("so far", "cmp_1"), THANKS, turn(YES)]
    other = Compaction("so far, so good")

    assert without_echoes([Compaction("so far"), YES, other, ASK], history) == [other, ASK]


@pytest.mark.slow
@given(_edited(), st.integers(0, 5))
def test_nothing_that_is_new_is_lost(
    drawn: tuple[list[Item], list[InputItem]], num_known: int
) -> None:
    items, echoed = drawn
    history = items[: num_known + 2]
    known_calls = {call.call_id for call in calls_in(history)}

    added = without_echoes(echoed, history)

    new = iter(echoed)
    assert all(item in new for item in added), "it is what the client said, in its order"
    own = [item for item in echoed if not is_said(item) and not isinstance(item, ReasoningItem)]
    rest = [item for item in added if not is_said(item) and not isinstance(item, ReasoningItem)]
    assert rest == own
    assert [c.call_id for c in calls_in(added)] == [
        call.call_id for call in calls_in(echoed) if call.call_id not in known_calls
    ]


@pytest.mark.slow
@given(dialogues(), styles, st.data())
def test_whatever_the_client_it_adds_nothing_by_repeating_the_last_turn(
    items: list[Item], style: Style, data: st.DataObject
) -> None:
    ends = [i for i, item in enumerate(items, 1) if isinstance(item, RecordedTurn)]
    end = data.draw(st.sampled_from(ends))
    calls = {call.call_id for call in calls_in(items[end - 1 : end])}
    outputs = [i for i in items if isinstance(i, CallOutput) and i.call_id in calls]
    style = Style(style.ids, style.thoughts, style.is_written_anew)
    following: list[InputItem] = [*outputs, THANKS]

    added = without_echoes([*style.echo(items[end - 1 : end]), *following], items[:end])

    assert added == following
