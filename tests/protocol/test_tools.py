from typing import Any

import msgspec
import pytest

from protocol.codec import decode_object, encode
from protocol.errors import ProtocolError
from protocol.tools import (
    CustomFormat,
    CustomTool,
    FunctionTool,
    NamespaceTool,
    OpaqueTool,
    Tool,
    ToolChoice,
    ToolChoiceMode,
    callable_tools,
    check_tool_choice,
    echo_tools,
    grammar_paths,
    parse_tool_choice,
    parse_tools,
    qualified,
    split_name,
    tools_digest,
)

WEATHER = {"type": "function", "name": "weather"}
SEARCH = {"type": "web_search", "filters": {"allowed_domains": ["example.org"]}}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "d", "format": GRAMMAR}
CLOCK = {"type": "namespace", "name": "clock", "description": "", "tools": [WEATHER, SEARCH, PATCH]}


def refusal(error: pytest.ExceptionInfo[ProtocolError]) -> tuple[str | None, str | None]:
    assert error.value.message
    return error.value.code, error.value.param


# --- Functions -----------------------------------------------------------------------------------


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


def test_a_function_whose_loading_is_deferred_can_be_called_all_the_same() -> None:
    tools = parse_tools([WEATHER | {"defer_loading": True}])

    assert callable_tools(tools) == [FunctionTool("weather")]


def test_a_schema_may_name_its_language_and_have_wide_bounds() -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1}},
    }

    assert parse_tools([WEATHER | {"parameters": schema}]) == [
        FunctionTool("weather", parameters=schema)
    ]


# --- Free-form tools, namespaces and tools of other kinds ----------------------------------------


@pytest.mark.parametrize(
    ("text_format", "expected"),
    [
        ({}, CustomFormat()),
        ({"format": None}, CustomFormat()),
        ({"format": {"type": "text"}}, CustomFormat()),
        ({"format": GRAMMAR}, CustomFormat("lark", "start: /a+/")),
        ({"format": GRAMMAR | {"syntax": "regex"}}, CustomFormat("regex", "start: /a+/")),
    ],
)
def test_the_input_of_a_custom_tool_is_any_text_or_has_a_grammar(
    text_format: dict[str, Any], expected: CustomFormat
) -> None:
    definition = {"type": "custom", "name": "exec"} | text_format

    assert parse_tools([definition]) == [CustomTool("exec", None, expected, definition)]


def test_the_model_sees_the_tools_of_a_namespace_by_their_qualified_names() -> None:
    tools = parse_tools([CLOCK, WEATHER])

    assert [(type(tool), tool.name) for tool in callable_tools(tools)] == [
        (FunctionTool, "clock.weather"),
        (CustomTool, "clock.apply_patch"),
        (FunctionTool, "weather"),
    ]


def test_where_the_grammar_of_a_tool_stands_is_known_by_its_qualified_name() -> None:
    tools = parse_tools([SEARCH, WEATHER, PATCH, CLOCK])

    assert grammar_paths(tools) == {
        "weather": "tools[1].parameters",
        "apply_patch": "tools[2].format",
        "clock.weather": "tools[3].tools[0].parameters",
        "clock.apply_patch": "tools[3].tools[2].format",
    }


def test_a_namespace_may_be_empty() -> None:
    definition = {"type": "namespace", "name": "clock"}

    tools = parse_tools([definition])

    assert tools == [NamespaceTool("clock", (), definition)]
    assert callable_tools(tools) == []


@pytest.mark.parametrize("namespace", [None, "clock", "a.b"])
def test_a_qualified_name_can_be_split_again(namespace: str | None) -> None:
    assert split_name(qualified(namespace, "weather")) == (namespace, "weather")


def test_tools_of_other_types_are_kept_for_the_echo_and_hidden_from_the_model() -> None:
    tools = parse_tools([SEARCH, WEATHER])

    assert tools == [OpaqueTool(SEARCH), FunctionTool("weather")]
    assert callable_tools(tools) == [FunctionTool("weather")]


def test_the_echo_of_a_function_has_all_members_and_that_of_another_tool_is_verbatim() -> None:
    tools = parse_tools([WEATHER, SEARCH, PATCH, CLOCK])

    echo = decode_object(encode({"tools": echo_tools(tools)}))

    whole = WEATHER | {"description": None, "parameters": None, "strict": None}
    assert echo["tools"] == [whole, SEARCH, PATCH, CLOCK]


def test_tools_can_be_stored_and_read_back() -> None:
    tools = parse_tools([WEATHER, SEARCH, PATCH, CLOCK])

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(tools), type=list[Tool]) == tools


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
        ([WEATHER | {"name": "a.b"}], "invalid_value", "tools[0].name"),
        ([WEATHER | {"name": "a\n"}], "invalid_value", "tools[0].name"),
        ([WEATHER | {"name": "a" * 65}], "invalid_value", "tools[0].name"),
        ([WEATHER | {"parameters": []}], "invalid_type", "tools[0].parameters"),
        (
            [WEATHER | {"parameters": {"type": "array"}}],
            "invalid_value",
            "tools[0].parameters.type",
        ),
        ([WEATHER | {"strict": "yes"}], "invalid_type", "tools[0].strict"),
        ([WEATHER, SEARCH, WEATHER], "invalid_value", "tools[2].name"),
        ([WEATHER, PATCH | {"name": "weather"}], "invalid_value", "tools[1].name"),
        ([{"type": "custom"}], "missing_required_parameter", "tools[0].name"),
        ([PATCH | {"format": "lark"}], "invalid_type", "tools[0].format"),
        ([PATCH | {"format": {}}], "missing_required_parameter", "tools[0].format.type"),
        ([PATCH | {"format": {"type": "x"}}], "invalid_value", "tools[0].format.type"),
        (
            [PATCH | {"format": GRAMMAR | {"syntax": "peg"}}],
            "invalid_value",
            "tools[0].format.syntax",
        ),
        (
            [PATCH | {"format": {"type": "grammar", "syntax": "lark"}}],
            "missing_required_parameter",
            "tools[0].format.definition",
        ),
        ([{"type": "namespace"}], "missing_required_parameter", "tools[0].name"),
        ([CLOCK | {"name": "a b"}], "invalid_value", "tools[0].name"),
        ([CLOCK | {"tools": 4}], "invalid_type", "tools[0].tools"),
        ([CLOCK | {"tools": [{}]}], "missing_required_parameter", "tools[0].tools[0].type"),
        (
            [CLOCK | {"tools": [SEARCH, PATCH | {"name": 4}]}],
            "invalid_type",
            "tools[0].tools[1].name",
        ),
        ([CLOCK | {"tools": [WEATHER, WEATHER]}], "invalid_value", "tools[0].name"),
        ([CLOCK, CLOCK], "invalid_value", "tools[1].name"),
    ],
)
def test_a_bad_tool_is_named_by_its_path(value: Any, code: str, param: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        parse_tools(value)

    assert refusal(caught) == (code, param)


def test_the_same_tools_have_the_same_digest_however_they_are_spaced() -> None:
    compact = decode_object(b'{"tools":[{"type":"function","name":"f"}]}')["tools"]
    spaced = decode_object(b'{"tools": [ {"type": "function", "name": "f"} ]}')["tools"]

    assert tools_digest(compact) == tools_digest(spaced)


def test_what_the_model_would_read_differently_has_another_digest() -> None:
    values = [None, [], [WEATHER], [{"name": "weather", "type": "function"}], [WEATHER, SEARCH]]

    assert len({tools_digest(value) for value in values}) == len(values)


# --- The choice among them -----------------------------------------------------------------------


def allowed(*tools: Any, mode: str = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": list(tools)}


IN_CLOCK = {"type": "custom", "name": "apply_patch", "namespace": "clock"}
NESTED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [WEATHER]}}


@pytest.mark.parametrize(
    ("value", "mode", "names", "is_forced"),
    [
        ("auto", ToolChoiceMode.AUTO, None, False),
        ("none", ToolChoiceMode.NONE, None, False),
        ("required", ToolChoiceMode.REQUIRED, None, True),
        (WEATHER, ToolChoiceMode.NAMED, ("weather",), True),
        (WEATHER | {"namespace": None}, ToolChoiceMode.NAMED, ("weather",), True),
        (IN_CLOCK, ToolChoiceMode.NAMED, ("clock.apply_patch",), True),
        (
            allowed(WEATHER, {"type": "web_search"}, IN_CLOCK),
            ToolChoiceMode.AUTO,
            ("weather", "clock.apply_patch"),
            False,
        ),
        (allowed({"type": "web_search"}), ToolChoiceMode.AUTO, (), False),
        (allowed(WEATHER, mode="required"), ToolChoiceMode.REQUIRED, ("weather",), True),
        (NESTED, ToolChoiceMode.REQUIRED, ("weather",), True),
    ],
)
def test_a_choice_is_understood_and_echoed_as_it_came(
    value: Any, mode: ToolChoiceMode, names: tuple[str, ...] | None, is_forced: bool
) -> None:
    choice = parse_tool_choice(value)

    check_tool_choice(choice, parse_tools([SEARCH, WEATHER, CLOCK]))
    assert (choice.mode, choice.names, choice.is_forced) == (mode, names, is_forced)
    assert choice.echo() == value


def test_no_choice_is_auto() -> None:
    assert parse_tool_choice(None) == parse_tool_choice("auto") == ToolChoice()
    assert ToolChoice().echo() == "auto"


@pytest.mark.parametrize(
    ("value", "code", "param"),
    [
        ("any", "invalid_value", "tool_choice"),
        (4, "invalid_value", "tool_choice"),
        ({}, "invalid_value", "tool_choice"),
        ({"type": "function"}, "missing_required_parameter", "tool_choice.name"),
        ({"type": "custom", "name": None}, "missing_required_parameter", "tool_choice.name"),
        ({"type": "function", "name": 4}, "invalid_type", "tool_choice.name"),
        (WEATHER | {"namespace": 4}, "invalid_type", "tool_choice.namespace"),
        ({"type": "web_search"}, "unsupported_parameter", "tool_choice"),
        ({"type": "allowed_tools"}, "missing_required_parameter", "tool_choice.mode"),
        (allowed(mode="none"), "invalid_value", "tool_choice.mode"),
        (allowed("weather"), "invalid_type", "tool_choice.tools[0]"),
        (allowed({"name": "f"}), "missing_required_parameter", "tool_choice.tools[0].type"),
        (
            allowed(WEATHER, {"type": "function"}),
            "missing_required_parameter",
            "tool_choice.tools[1].name",
        ),
        (
            allowed({"type": "namespace", "name": "clock"}),
            "unsupported_parameter",
            "tool_choice.tools[0]",
        ),
        (
            {"type": "allowed_tools", "allowed_tools": 4},
            "invalid_type",
            "tool_choice.allowed_tools",
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}},
            "missing_required_parameter",
            "tool_choice.allowed_tools.tools",
        ),
    ],
)
def test_a_choice_that_cannot_be_read_is_refused(value: Any, code: str, param: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        parse_tool_choice(value)

    assert refusal(caught) == (code, param)


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("required", "tool_choice"),
        (allowed(mode="required"), "tool_choice"),
        (allowed({"type": "web_search"}, mode="required"), "tool_choice"),
        (WEATHER, "tool_choice.name"),
        (IN_CLOCK, "tool_choice.name"),
        (allowed({"type": "web_search"}, WEATHER), "tool_choice.tools[1].name"),
        (NESTED, "tool_choice.allowed_tools.tools[0].name"),
    ],
)
def test_a_choice_that_the_tools_cannot_honour_is_refused(value: Any, param: str) -> None:
    choice = parse_tool_choice(value)

    with pytest.raises(ProtocolError) as caught:
        check_tool_choice(choice, parse_tools([SEARCH]))

    assert refusal(caught) == ("invalid_value", param)
