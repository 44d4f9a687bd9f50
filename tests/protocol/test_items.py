from typing import Any

import pytest

from protocol.codec import decode_object, encode
from protocol.errors import ProtocolError
from protocol.items import (
    FunctionCall,
    FunctionCallOutput,
    InputItem,
    Message,
    OutputFunctionCall,
    OutputMessage,
    OutputText,
    UnknownItem,
    check_calls_are_answered,
    parse_items,
)

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "4"}


def refusal(value: Any) -> tuple[str | None, str | None]:
    with pytest.raises(ProtocolError) as caught:
        parse_items(value)
    assert caught.value.message
    return caught.value.code, caught.value.param


def test_a_string_is_one_user_message() -> None:
    assert parse_items("Hi") == [Message("user", "Hi")]


@pytest.mark.parametrize("role", ["user", "assistant", "system", "developer"])
@pytest.mark.parametrize("extra", [{}, {"type": "message"}, {"type": None, "phase": None}])
@pytest.mark.parametrize("content", ["Hi", [{"type": "input_text", "text": "Hi"}]])
def test_a_message_may_leave_out_its_type_and_its_parts(
    role: str, extra: dict[str, Any], content: Any
) -> None:
    items = parse_items([{"role": role, "content": content} | extra])

    assert [(item.role, item.text) for item in items if isinstance(item, Message)] == [(role, "Hi")]


def test_text_parts_are_joined_with_nothing_between() -> None:
    parts = [
        {"type": "input_text", "text": "a"},
        {"type": "output_text", "text": "b", "annotations": []},
        {"type": "refusal", "refusal": "c"},
        {"type": "text", "text": "d"},
    ]

    assert parse_items([{"role": "assistant", "content": parts}]) == [Message("assistant", "abcd")]


def test_ids_and_statuses_of_calls_and_outputs_are_read_over() -> None:
    items = [CALL | {"id": "fc_1", "status": "completed"}, OUTPUT | {"id": "fco_1", "status": None}]

    assert parse_items(items) == [FunctionCall("c", "f", "{}"), FunctionCallOutput("c", "4")]


def test_an_output_may_be_a_list_of_parts() -> None:
    parts = [{"type": "input_text", "text": "4"}, {"type": "input_text", "text": "2"}]

    assert parse_items([OUTPUT | {"output": parts}]) == [FunctionCallOutput("c", "42")]


@pytest.mark.parametrize("item_type", ["reasoning", "compaction", "custom_tool_call", "new"])
def test_items_of_unknown_type_are_tolerated(item_type: str) -> None:
    assert parse_items([{"type": item_type, "content": 4}]) == [UnknownItem(item_type)]


@pytest.mark.parametrize("item", [{"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}])
def test_a_reference_to_an_item_is_not_found(item: dict[str, Any]) -> None:
    assert refusal([item]) == ("item_not_found", "input[0]")


@pytest.mark.parametrize("part_type", ["input_image", "input_file", "input_audio", "input_video"])
def test_anything_but_text_is_refused_with_its_place(part_type: str) -> None:
    content = [{"type": "input_text", "text": "See:"}, {"type": part_type}]

    found = refusal(["x", {"role": "user", "content": content}][1:])

    assert found == ("unsupported_content", "input[0].content[1]")


@pytest.mark.parametrize(
    ("item", "code", "path"),
    [
        (4, "invalid_type", ""),
        ({}, "missing_required_parameter", ".type"),
        ({"type": 4}, "invalid_type", ".type"),
        ({"role": "user"}, "missing_required_parameter", ".content"),
        ({"role": "user", "content": None}, "missing_required_parameter", ".content"),
        ({"role": "tool", "content": "x"}, "invalid_value", ".role"),
        ({"type": "message", "content": "x"}, "missing_required_parameter", ".role"),
        ({"role": "user", "content": 4}, "invalid_type", ".content"),
        ({"role": "user", "content": ["x"]}, "invalid_type", ".content[0]"),
        ({"role": "user", "content": [{}]}, "missing_required_parameter", ".content[0].type"),
        ({"role": "user", "content": [{"type": "new"}]}, "invalid_value", ".content[0].type"),
        ({"role": "user", "content": [{"type": []}]}, "invalid_value", ".content[0].type"),
        (
            {"role": "user", "content": [{"type": "input_text"}]},
            "missing_required_parameter",
            ".content[0].text",
        ),
        (
            {"role": "user", "content": [{"type": "input_text", "text": 4}]},
            "invalid_type",
            ".content[0].text",
        ),
        (CALL | {"call_id": None}, "missing_required_parameter", ".call_id"),
        (CALL | {"call_id": ""}, "invalid_value", ".call_id"),
        (CALL | {"arguments": {}}, "invalid_type", ".arguments"),
        (OUTPUT | {"output": 4}, "invalid_type", ".output"),
        (OUTPUT | {"output": [{"type": "x"}]}, "invalid_value", ".output[0].type"),
        ({"type": "item_reference"}, "missing_required_parameter", ".id"),
    ],
)
def test_a_bad_member_is_named_by_its_path(item: Any, code: str, path: str) -> None:
    assert refusal([{"role": "user", "content": "x"}, item]) == (code, f"input[1]{path}")


@pytest.mark.parametrize("value", [4, {}, None])
def test_an_input_is_a_string_or_a_list(value: Any) -> None:
    assert refusal(value) == ("invalid_type", "input")


def test_calls_may_be_answered_in_any_order() -> None:
    check_calls_are_answered(
        [
            FunctionCall("a", "f", ""),
            FunctionCall("b", "f", ""),
            FunctionCallOutput("b", ""),
            Message("user", "x"),
            FunctionCallOutput("a", ""),
        ]
    )


@pytest.mark.parametrize(
    ("items", "message", "param"),
    [
        (
            [FunctionCallOutput("a", "")],
            "No tool call found for function call output with call_id 'a'.",
            "input",
        ),
        (
            [FunctionCallOutput("a", ""), FunctionCall("a", "f", "")],
            "No tool call found for function call output with call_id 'a'.",
            "input",
        ),
        (
            [FunctionCall("a", "f", "")],
            "No tool output found for function call 'a'.",
            "input",
        ),
        (
            [FunctionCall("a", "f", ""), FunctionCall("a", "f", "")],
            "call 'a' is given twice",
            "input[1].call_id",
        ),
        (
            [FunctionCall("a", "f", ""), FunctionCallOutput("a", ""), FunctionCallOutput("a", "")],
            "call 'a' is given twice",
            "input[2].call_id",
        ),
    ],
)
def test_every_call_has_one_output_and_every_output_its_call(
    items: list[InputItem], message: str, param: str
) -> None:
    with pytest.raises(ProtocolError) as caught:
        check_calls_are_answered(items)

    assert (caught.value.message, caught.value.param) == (message, param)


def test_an_output_message_has_all_its_members_on_the_wire() -> None:
    message = OutputMessage("msg_1", "completed", (OutputText("Hi"),))

    assert decode_object(encode(message)) == {
        "type": "message",
        "id": "msg_1",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Hi", "annotations": [], "logprobs": []}],
    }


def test_an_output_call_has_all_its_members_on_the_wire() -> None:
    call = OutputFunctionCall("fc_1", "call_1", "f", "{}", "completed")

    assert decode_object(encode(call)) == {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "call_1",
        "name": "f",
        "arguments": "{}",
        "status": "completed",
    }


def test_an_output_item_sent_back_is_an_input_item() -> None:
    message = OutputMessage("msg_1", "completed", (OutputText("Hi"),))
    call = OutputFunctionCall("fc_1", "call_1", "f", "{}", "completed")

    items = parse_items([decode_object(encode(item)) for item in (message, call)])

    assert items == [Message("assistant", "Hi"), FunctionCall("call_1", "f", "{}")]
