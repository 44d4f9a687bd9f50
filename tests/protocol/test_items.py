from typing import Any

import msgspec
import pytest

from protocol.errors import ProtocolError
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
    check_calls_are_answered,
    parse_items,
    tools_in_effect,
)
from protocol.sealed import seal
from protocol.tools import CustomTool, FunctionTool, NamespaceTool

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "4"}
CUSTOM_CALL = {"type": "custom_tool_call", "call_id": "c", "name": "exec", "input": "ls"}
CUSTOM_OUTPUT = OUTPUT | {"type": "custom_tool_call_output"}
SEALED = seal("sealed thought")
MEDIA = ["input_image", "input_file", "input_audio", "input_video"]


def refusal(value: Any) -> tuple[str | None, str | None]:
    with pytest.raises(ProtocolError) as caught:
        parse_items(value)
    assert caught.value.message
    return caught.value.code, caught.value.param


# --- Messages ------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("role", "kept"), [("assistant", "msg_1"), ("user", None)])
def test_only_what_the_assistant_said_keeps_its_id(role: str, kept: str | None) -> None:
    items = parse_items([{"role": role, "content": "Hi", "id": "msg_1", "status": "completed"}])

    assert [item.id for item in items if isinstance(item, Message)] == [kept]


@pytest.mark.parametrize("part_type", MEDIA)
def test_anything_but_text_is_refused_with_its_place(part_type: str) -> None:
    content = [{"type": "input_text", "text": "See:"}, {"type": part_type}]

    found = refusal([{"role": "user", "content": content}])

    assert found == ("unsupported_content", "input[0].content[1]")


# --- Calls and their outputs ---------------------------------------------------------------------


def test_calls_keep_their_namespace_and_id() -> None:
    origin = {"namespace": "clock", "id": "fc_1", "status": "completed"}

    items = parse_items([CALL | origin, CUSTOM_CALL | origin])

    assert items == [
        FunctionCall("c", "f", "{}", "clock", "fc_1"),
        CustomToolCall("c", "exec", "ls", "clock", "fc_1"),
    ]


def test_the_qualified_name_of_a_call_is_that_of_its_tool() -> None:
    assert FunctionCall("c", "f", "{}", "clock").qualified_name == "clock.f"
    assert CustomToolCall("c", "exec", "ls").qualified_name == "exec"


@pytest.mark.parametrize("output", [OUTPUT, CUSTOM_OUTPUT])
def test_an_output_may_be_a_list_of_parts(output: dict[str, Any]) -> None:
    parts = [{"type": "input_text", "text": "4"}, {"type": "output_text", "text": "2"}]

    assert parse_items([output | {"output": parts, "id": "fco_1"}]) == [CallOutput("c", "42")]


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ([{"type": "input_text", "text": "a"}, {"type": "new", "n": 1}], 'a{"type":"new","n":1}'),
        ([{"rows": []}], '{"rows":[]}'),
        (["x", 4, None], '"x"4null'),
        ({"content": "x", "success": True}, '{"content":"x","success":true}'),
        ([], ""),
    ],
)
def test_what_a_tool_answers_in_no_known_shape_is_read_as_json(output: Any, text: str) -> None:
    assert parse_items([OUTPUT | {"output": output}]) == [CallOutput("c", text)]


@pytest.mark.parametrize("part_type", MEDIA)
def test_anything_but_text_is_refused_in_an_output_too(part_type: str) -> None:
    found = refusal([OUTPUT | {"output": [{"type": part_type}]}])

    assert found == ("unsupported_content", "input[0].output[0]")


@pytest.mark.parametrize("call", [CALL, CUSTOM_CALL])
def test_a_call_that_was_cut_short_is_seen_only_with_its_output(call: dict[str, Any]) -> None:
    cut_short = call | {"status": "incomplete"}

    assert parse_items([cut_short]) == [UnknownItem(call["type"])]
    assert parse_items([cut_short, OUTPUT]) == parse_items([call, OUTPUT])


# --- Reasoning and compaction --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({}, ""),
        ({"content": None, "summary": None, "encrypted_content": None}, ""),
        ({"content": [{"type": "reasoning_text", "text": "a"}, {"text": "b"}]}, "ab"),
        ({"content": [], "summary": [{"type": "summary_text", "text": "s"}]}, "s"),
        ({"summary": [{"text": "s"}], "content": [{"text": "c"}]}, "c"),
        ({"summary": [{"text": "s"}], "encrypted_content": SEALED}, "s"),
        ({"summary": [], "encrypted_content": SEALED}, "sealed thought"),
        ({"encrypted_content": "from another server"}, ""),
        ({"content": [{"type": "new", "text": 4}, {}]}, ""),
    ],
)
def test_a_thought_has_the_fullest_text_there_is(members: dict[str, Any], text: str) -> None:
    item = {"type": "reasoning", "id": "rs_1", "status": "completed"} | members

    assert parse_items([item]) == [ReasoningItem(text, "rs_1")]


@pytest.mark.parametrize("item_type", ["compaction", "compaction_summary"])
def test_a_compaction_has_the_summary_that_was_sealed_in_it(item_type: str) -> None:
    item = {"type": item_type, "id": "cmp_1", "encrypted_content": seal("We spoke of Oslo.")}

    assert parse_items([item]) == [Compaction("We spoke of Oslo.", "cmp_1")]


# --- Items of other kinds ------------------------------------------------------------------------


@pytest.mark.parametrize("item_type", ["web_search_call", "compaction_trigger", "new"])
def test_items_of_unknown_type_are_tolerated_whatever_they_hold(item_type: str) -> None:
    item = {"type": item_type, "content": 4, "call_id": [], "role": "user", "output": None}

    assert parse_items([item]) == [UnknownItem(item_type)]


@pytest.mark.parametrize("item", [{"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}])
def test_a_reference_says_where_it_stands(item: dict[str, Any]) -> None:
    assert parse_items([CALL, item])[1] == ItemReference("msg_1", "input[1]")


def test_tools_may_be_declared_in_the_input() -> None:
    definition = {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}
    item = {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": [definition]}

    tools = (NamespaceTool("n", (FunctionTool("f"),), definition),)
    assert parse_items([item]) == [AdditionalTools(tools)]


def test_the_tools_in_effect_are_those_of_the_request_and_of_the_conversation() -> None:
    namespace = NamespaceTool("n", (FunctionTool("f"), CustomTool("g")), {})
    declared = AdditionalTools((namespace, FunctionTool("f", "the later")))

    tools = tools_in_effect([FunctionTool("f", "the earlier")], [Message("user", "x"), declared])

    assert tools == [FunctionTool("f", "the later"), FunctionTool("n.f"), CustomTool("n.g")]


def test_a_conversation_can_be_stored_and_read_back() -> None:
    tools = (FunctionTool("f"), CustomTool("g"), NamespaceTool("n", (FunctionTool("f"),), {}))
    items: list[InputItem] = [
        Message("assistant", "Hi", "msg_1"),
        FunctionCall("a", "f", "{}", "n", "fc_1"),
        CustomToolCall("b", "g", "x"),
        CallOutput("a", "4"),
        ReasoningItem("Hm.", "rs_1"),
        Compaction("We spoke."),
        ItemReference("msg_0", "input[0]"),
        AdditionalTools(tools),
        UnknownItem("new"),
    ]

    assert msgspec.json.decode(msgspec.json.encode(items), type=list[InputItem]) == items


# --- What cannot be read -------------------------------------------------------------------------


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
        (CALL | {"namespace": 4}, "invalid_type", ".namespace"),
        (CUSTOM_CALL | {"input": None}, "missing_required_parameter", ".input"),
        (OUTPUT | {"output": None}, "missing_required_parameter", ".output"),
        (
            OUTPUT | {"output": [{"type": "input_text"}]},
            "missing_required_parameter",
            ".output[0].text",
        ),
        ({"type": "item_reference"}, "missing_required_parameter", ".id"),
        ({"type": "reasoning", "summary": 4}, "invalid_type", ".summary"),
        ({"type": "compaction"}, "missing_required_parameter", ".encrypted_content"),
        (
            {"type": "compaction", "encrypted_content": "from another server"},
            "invalid_value",
            ".encrypted_content",
        ),
        ({"type": "additional_tools"}, "missing_required_parameter", ".tools"),
        (
            {"type": "additional_tools", "tools": [{"type": "function"}]},
            "missing_required_parameter",
            ".tools[0].name",
        ),
    ],
)
def test_a_bad_member_is_named_by_its_path(item: Any, code: str, path: str) -> None:
    assert refusal([{"role": "user", "content": "x"}, item]) == (code, f"input[1]{path}")


@pytest.mark.parametrize("value", [4, {}, None])
def test_an_input_is_a_string_or_a_list(value: Any) -> None:
    assert refusal(value) == ("invalid_type", "input")


# --- A whole conversation ------------------------------------------------------------------------


def test_calls_may_be_answered_in_any_order() -> None:
    check_calls_are_answered(
        [
            FunctionCall("a", "f", ""),
            CustomToolCall("b", "g", ""),
            CallOutput("b", ""),
            Message("user", "x"),
            CallOutput("a", ""),
        ]
    )


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (
            [CallOutput("a", "")],
            "No tool call found for function call output with call_id 'a'.",
        ),
        (
            [CallOutput("a", ""), FunctionCall("a", "f", "")],
            "No tool call found for function call output with call_id 'a'.",
        ),
        ([FunctionCall("a", "f", "")], "No tool output found for function call 'a'."),
        ([CustomToolCall("a", "f", "")], "No tool output found for function call 'a'."),
        (
            [FunctionCall("a", "f", ""), CustomToolCall("a", "f", "")],
            "call 'a' is given twice",
        ),
        (
            [FunctionCall("a", "f", ""), CallOutput("a", ""), CallOutput("a", "")],
            "call 'a' is given twice",
        ),
    ],
)
@pytest.mark.parametrize("param", ["input", "previous_response_id"])
def test_every_call_has_one_output_and_every_output_its_call(
    items: list[InputItem], message: str, param: str
) -> None:
    with pytest.raises(ProtocolError) as caught:
        check_calls_are_answered(items, param)

    assert (caught.value.message, caught.value.param) == (message, param)
