from typing import Any

import pytest

from protocol.codec import decode_object, encode
from protocol.errors import ProtocolError
from protocol.tools import (
    MAX_NESTING,
    FunctionTool,
    OpaqueTool,
    ToolChoice,
    ToolChoiceMode,
    echo_tools,
    function_tools,
    parse_tool_choice,
    parse_tools,
)

WEATHER = {"type": "function", "name": "weather"}
SEARCH = {"type": "web_search", "filters": {"allowed_domains": ["example.org"]}}


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": [value]}
    return value


@pytest.mark.parametrize("value", [None, []])
def test_no_tools_is_an_empty_list(value: Any) -> None:
    assert parse_tools(value) == []


def test_a_function_keeps_its_members() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = WEATHER | {"description": "d", "parameters": schema, "strict": True, "new_member": 1}

    assert parse_tools([tool]) == [FunctionTool("weather", "d", schema, True)]


def test_null_members_of_a_function_are_absent() -> None:
    tool = WEATHER | {"description": None, "parameters": None, "strict": None}

    assert parse_tools([tool]) == [FunctionTool("weather")]


def test_tools_of_other_types_are_kept_for_the_echo_and_hidden_from_the_model() -> None:
    tools = parse_tools([SEARCH, WEATHER])

    assert tools == [OpaqueTool(SEARCH), FunctionTool("weather")]
    assert function_tools(tools) == [FunctionTool("weather")]


def test_the_echo_of_a_function_has_all_members_and_that_of_another_tool_is_verbatim() -> None:
    echo = decode_object(encode({"tools": echo_tools(parse_tools([WEATHER, SEARCH]))}))

    assert echo["tools"] == [
        WEATHER | {"description": None, "parameters": None, "strict": None},
        SEARCH,
    ]


@pytest.mark.parametrize(
    ("value", "code", "param"),
    [
        ({}, "invalid_type", "tools"),
        (["x"], "invalid_type", "tools[0]"),
        ([{}], "missing_required_parameter", "tools[0].type"),
        ([{"type": 4}], "invalid_type", "tools[0].type"),
        ([{"type": "function"}], "missing_required_parameter", "tools[0].name"),
        ([WEATHER | {"name": ""}], "invalid_value", "tools[0].name"),
        ([WEATHER | {"name": "a b"}], "invalid_value", "tools[0].name"),
        ([WEATHER | {"name": "a\n"}], "invalid_value", "tools[0].name"),
        ([WEATHER | {"name": "a" * 65}], "invalid_value", "tools[0].name"),
        ([WEATHER | {"parameters": []}], "invalid_type", "tools[0].parameters"),
        (
            [WEATHER | {"parameters": {"type": "array"}}],
            "invalid_value",
            "tools[0].parameters.type",
        ),
        ([WEATHER | {"strict": "yes"}], "invalid_type", "tools[0].strict"),
        ([WEATHER | {"parameters": nested(MAX_NESTING)}], "invalid_value", "tools[0]"),
        ([SEARCH | {"filters": nested(MAX_NESTING)}], "invalid_value", "tools[0]"),
        ([WEATHER, SEARCH, WEATHER], "invalid_value", "tools[2].name"),
    ],
)
def test_a_bad_tool_is_named_by_its_path(value: Any, code: str, param: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        parse_tools(value)

    assert (caught.value.code, caught.value.param) == (code, param)


@pytest.mark.parametrize(
    ("value", "choice", "echo", "is_forced"),
    [
        (None, ToolChoice(), "auto", False),
        ("auto", ToolChoice(), "auto", False),
        ("none", ToolChoice(ToolChoiceMode.NONE), "none", False),
        ("required", ToolChoice(ToolChoiceMode.REQUIRED), "required", True),
        (WEATHER, ToolChoice(ToolChoiceMode.FUNCTION, "weather"), WEATHER, True),
    ],
)
def test_a_choice_is_understood_and_echoed(
    value: Any, choice: ToolChoice, echo: Any, is_forced: bool
) -> None:
    parsed = parse_tool_choice(value, parse_tools([SEARCH, WEATHER]))

    assert parsed == choice
    assert parsed.echo() == echo
    assert parsed.is_forced is is_forced


@pytest.mark.parametrize(
    ("value", "code", "param"),
    [
        ("required", "invalid_value", "tool_choice"),
        ("any", "invalid_value", "tool_choice"),
        (4, "invalid_value", "tool_choice"),
        ({}, "invalid_value", "tool_choice"),
        (WEATHER, "invalid_value", "tool_choice.name"),
        ({"type": "function"}, "missing_required_parameter", "tool_choice.name"),
        ({"type": "function", "name": 4}, "invalid_type", "tool_choice.name"),
        ({"type": "allowed_tools", "mode": "auto"}, "unsupported_parameter", "tool_choice"),
        ({"type": "custom", "name": "x"}, "unsupported_parameter", "tool_choice"),
        ({"type": "web_search"}, "unsupported_parameter", "tool_choice"),
    ],
)
def test_a_choice_that_cannot_be_honoured_is_refused(value: Any, code: str, param: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        parse_tool_choice(value, parse_tools([SEARCH]))

    assert (caught.value.code, caught.value.param) == (code, param)
