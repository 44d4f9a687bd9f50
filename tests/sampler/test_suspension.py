from dataclasses import FrozenInstanceError

import pytest

from protocol.items import CallOutput, CustomToolCall, FunctionCall, Message
from sampler.suspension import Suspension

CALLS = tuple(FunctionCall(f"call_{name}", "get_weather", "{}") for name in ("a", "b", "c"))


def suspended() -> Suspension:
    return Suspension(CALLS, num_tokens=42, since=1.5)


def test_a_new_suspension_awaits_every_call_in_call_order() -> None:
    assert suspended().awaited == ("call_a", "call_b", "call_c")


def test_an_answer_leaves_the_other_calls_awaited() -> None:
    partly = suspended().answer({"call_b": "rain"})

    assert partly.awaited == ("call_a", "call_c")


def test_an_answer_leaves_the_record_it_was_given_to_as_it_was() -> None:
    before = suspended()
    given = {"call_a": "sun"}

    after = before.answer(given, [Message("user", "hurry")])
    given["call_a"] = "changed"

    assert before == suspended()
    assert (before.outputs, before.messages) == ({}, ())
    assert after.outputs == {"call_a": "sun"}


def test_what_was_suspended_stays_the_same_through_answers() -> None:
    after = suspended().answer({"call_a": "sun"})

    assert (after.calls, after.num_tokens, after.since) == (CALLS, 42, 1.5)


@pytest.mark.parametrize(
    "appends",
    [
        [{"call_a": "1", "call_b": "2", "call_c": "3"}],
        [{"call_c": "3", "call_b": "2", "call_a": "1"}],
        [{"call_c": "3"}, {"call_a": "1"}, {"call_b": "2"}],
        [{"call_b": "2", "call_a": "1"}, {}, {"call_c": "3"}],
    ],
)
def test_outputs_enter_the_context_in_call_order_however_they_came(
    appends: list[dict[str, str]],
) -> None:
    suspension = suspended()

    for outputs in appends:
        suspension = suspension.answer(outputs)

    assert suspension.awaited == ()
    assert suspension.items() == [
        CallOutput("call_a", "1"),
        CallOutput("call_b", "2"),
        CallOutput("call_c", "3"),
    ]


def test_messages_gather_in_the_order_they_came() -> None:
    first, second, third = (Message("user", text) for text in ("one", "two", "three"))

    suspension = suspended().answer({}, [first, second]).answer({"call_a": "1"}, [third])

    assert suspension.messages == (first, second, third)


def test_messages_enter_the_context_after_the_outputs() -> None:
    message = Message("user", "hurry")

    suspension = suspended().answer({"call_c": "3"}, [message]).answer({"call_b": "", "call_a": ""})

    *outputs, last = suspension.items()
    assert [type(output) for output in outputs] == [CallOutput] * 3
    assert last == message


def test_an_empty_output_is_an_output() -> None:
    assert suspended().answer({"call_a": ""}).awaited == ("call_b", "call_c")


@pytest.mark.parametrize("call_id", ["call_x", "call_a"])
def test_a_call_that_is_not_awaited_cannot_be_answered(call_id: str) -> None:
    suspension = suspended().answer({"call_a": "sun"})
    before = dict(suspension.outputs)

    with pytest.raises(AssertionError, match="only awaited calls"):
        suspension.answer({"call_b": "rain", call_id: "again"})

    assert suspension.outputs == before


def test_free_form_calls_are_answered_like_functions() -> None:
    calls = (CustomToolCall("call_p", "apply_patch", "*** Begin"), CALLS[0])
    suspension = Suspension(calls, num_tokens=42, since=1.5)

    answered = suspension.answer({"call_a": "sun", "call_p": "done"})

    assert suspension.awaited == ("call_p", "call_a")
    assert answered.items() == [CallOutput("call_p", "done"), CallOutput("call_a", "sun")]


def test_nothing_enters_the_context_while_outputs_are_awaited() -> None:
    with pytest.raises(AssertionError, match="no output yet"):
        suspended().answer({"call_a": "sun"}).items()


def test_a_suspension_is_frozen() -> None:
    suspension = suspended()

    with pytest.raises(FrozenInstanceError):
        suspension.num_tokens = 0  # type: ignore[misc]
