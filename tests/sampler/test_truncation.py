"""What is left of a conversation, part by part."""

import pytest
from hypothesis import given, settings

from protocol.items import (
    AdditionalTools,
    CallOutput,
    Compaction,
    FunctionCall,
    Message,
    ReasoningItem,
    UnknownItem,
)
from sampler.recorded_turn import Item, RecordedTurn, calls_in
from sampler.truncation import truncations
from tests.sampler.dialogues import Dialogue, dialogues

CALL = FunctionCall("call_1", "f", "{}")
OUTPUT = CallOutput("call_1", "x")


def user(text: str) -> Message:
    return Message("user", text)


def said(text: str) -> RecordedTurn:
    return RecordedTurn((Message("assistant", text),), (1, 2))


def step(number: int) -> list[Item]:
    call = FunctionCall(f"step_{number}", "f", "{}")
    return [RecordedTurn((call,), (1, 2)), CallOutput(call.call_id, "x")]


def test_exchanges_go_one_after_the_other() -> None:
    items: list[Item] = [user("a"), said("b"), user("c"), Message("assistant", "d"), user("e")]

    assert truncations(items) == [items[2:], items[4:]]


def test_what_several_say_in_a_row_begins_one_exchange() -> None:
    items: list[Item] = [
        Compaction("a"),
        Message("developer", "b"),
        user("c"),
        said("d"),
        user("e"),
    ]

    assert truncations(items) == [items[4:]]


@pytest.mark.parametrize("first", [Message("system", "a"), AdditionalTools(())])
def test_what_comes_before_the_first_exchange_stays(first: Item) -> None:
    items: list[Item] = [first, Message("developer", "b"), user("c"), said("d"), user("e")]

    assert truncations(items) == [[*items[:2], items[4]]]


def test_a_system_message_in_an_exchange_goes_with_it() -> None:
    items: list[Item] = [
        user("a"),
        said("b"),
        Message("system", "c"),
        user("d"),
        said("e"),
        user("f"),
    ]

    assert truncations(items) == [items[2:], items[5:]]


def test_in_the_last_exchange_steps_go_but_not_what_the_user_said() -> None:
    items: list[Item] = [user("a"), said("b"), user("c"), *step(1), *step(2), *step(3)]

    assert truncations(items) == [
        [user("c"), *step(1), *step(2), *step(3)],
        [user("c"), *step(2), *step(3)],
        [user("c"), *step(3)],
    ]


def test_a_step_that_was_not_recorded_goes_with_its_thoughts_and_all_its_calls() -> None:
    other = FunctionCall("call_2", "f", "{}")
    unrecorded: list[Item] = [
        ReasoningItem("hm"),
        Message("assistant", "b"),
        CALL,
        other,
        CallOutput("call_2", "y"),
        OUTPUT,
    ]

    assert truncations([user("a"), *unrecorded, *step(1)]) == [[user("a"), *step(1)]]


def test_nothing_comes_between_a_call_and_its_output() -> None:
    items: list[Item] = [user("a"), CALL, user("b"), said("c"), OUTPUT, user("d")]

    assert truncations(items) == [[user("d")]]


def test_what_the_user_said_last_stays_with_the_step_it_stands_in() -> None:
    asked: list[Item] = [CALL, user("b"), OUTPUT]
    items: list[Item] = [user("a"), *asked, *step(1), *step(2)]

    assert truncations(items) == [[*asked, *step(1), *step(2)], [*asked, *step(2)]]


def test_a_call_that_has_no_output_yet_stays_with_the_last_step() -> None:
    items: list[Item] = [user("a"), *step(1), CALL]

    assert truncations(items) == [[user("a"), CALL]]


@pytest.mark.parametrize(
    "items",
    [
        [],
        [Message("system", "a")],
        [user("a")],
        [user("a"), said("b")],
        [user("a"), *step(1)],
        [UnknownItem("x")],
    ],
)
def test_of_the_last_step_nothing_can_be_left_out(items: list[Item]) -> None:
    assert truncations(items) == []


def test_without_a_user_the_last_step_alone_stays() -> None:
    assert truncations([*step(1), *step(2), *step(3)]) == [[*step(2), *step(3)], step(3)]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(dialogues())
def test_what_is_left_is_a_conversation(dialogue: Dialogue) -> None:
    items = dialogue.items(len(dialogue.exchanges))
    previous = items

    for left in truncations(items):
        remaining = iter(previous)
        assert all(any(item is other for other in remaining) for item in left)
        assert len(left) < len(previous)
        called: set[str] = set()
        for item in left:
            assert not isinstance(item, CallOutput) or item.call_id in called
            called |= {call.call_id for call in calls_in([item])}
        outputs = {item.call_id for item in left if isinstance(item, CallOutput)}
        assert called == outputs
        said_last = [i for i in items if isinstance(i, Message) and i.role == "user"][-1]
        assert said_last in left
        assert left[-1] is items[-1]
        previous = left
