from typing import Any

import pytest

from protocol.client_events import (
    CreateParams,
    Reasoning,
    ResolvedAppend,
    parse_append,
    parse_create,
    resolve_append,
)
from protocol.errors import ProtocolError
from protocol.items import FunctionCall, FunctionCallOutput, InputItem, Message, UnknownItem
from protocol.tools import FunctionTool, ToolChoice, ToolChoiceMode

BODY: dict[str, Any] = {"model": "m", "input": "Hi"}
WEATHER = {"type": "function", "name": "weather"}


def create(**members: Any) -> CreateParams:
    return parse_create(BODY | members, transport="http")


def refusal(**members: Any) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        create(**members)
    assert caught.value.message
    return caught.value


# --- response.create -----------------------------------------------------------------------------


def test_the_smallest_body_gets_the_defaults() -> None:
    params = create()

    assert params.input == [Message("user", "Hi")]
    assert (params.model, params.temperature, params.top_p) == ("m", 1.0, 1.0)
    assert (params.tools, params.tool_choice) == ([], ToolChoice())
    assert (params.stream, params.parallel_tool_calls, params.store) == (False, True, True)
    assert (params.max_output_tokens, params.seed, params.instructions) == (None, None, None)
    assert (params.metadata, params.include) == ({}, [])


def test_null_is_the_default_everywhere() -> None:
    nulls = dict.fromkeys(CreateParams.__struct_fields__)

    assert create(**nulls | BODY, text=None, conversation=None, stream_id=None) == create()


def test_every_member_is_taken_over() -> None:
    members: dict[str, Any] = {
        "instructions": "Be brief.",
        "parallel_tool_calls": False,
        "temperature": 0,
        "top_p": 0.5,
        "max_output_tokens": 1,
        "seed": 2**63 - 1,
        "stream": True,
        "metadata": {"k": "v"},
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "p",
        "service_tier": "flex",
        "truncation": "auto",
        "include": ["reasoning.encrypted_content"],
        "store": False,
        "max_tool_calls": 3,
        "presence_penalty": -2,
        "frequency_penalty": 2,
    }

    params = create(**members)

    assert {name: getattr(params, name) for name in members} == members


def test_reasoning_and_verbosity_are_taken_over() -> None:
    params = create(reasoning={"effort": "low"}, text={"verbosity": "high", "format": None})

    assert params.reasoning == Reasoning("low", None)
    assert params.verbosity == "high"


def test_tools_and_choice_are_parsed_together() -> None:
    params = create(tools=[WEATHER], tool_choice=WEATHER)

    assert params.tools == [FunctionTool("weather")]
    assert params.tool_choice == ToolChoice(ToolChoiceMode.FUNCTION, "weather")


@pytest.mark.parametrize("stream", [True, False, None])
def test_a_websocket_always_streams(stream: bool | None) -> None:
    assert parse_create(BODY | {"stream": stream}, transport="websocket").stream


@pytest.mark.parametrize("model", [{}, {"model": None}])
def test_the_default_model_stands_in_for_a_missing_one(model: dict[str, Any]) -> None:
    body = {"input": "Hi"} | model

    assert parse_create(body, transport="http", default_model="d").model == "d"


def test_the_named_model_wins_over_the_default() -> None:
    assert parse_create(BODY, transport="http", default_model="d").model == "m"


@pytest.mark.parametrize("model", [None, ""])
def test_without_a_model_and_a_default_the_model_is_missing(model: Any) -> None:
    error = refusal(model=model)

    assert (error.code, error.param) == ("missing_required_parameter", "model")


@pytest.mark.parametrize("value", [None, []])
def test_an_empty_input_is_missing_even_with_instructions(value: Any) -> None:
    error = refusal(input=value, instructions="Be brief.")

    assert (error.status, error.code, error.param) == (400, "missing_required_parameter", "input")


def test_an_input_of_nothing_the_model_can_see_is_refused() -> None:
    error = refusal(input=[{"type": "reasoning", "summary": []}])

    assert (error.code, error.param) == ("invalid_value", "input")


def test_what_clients_send_besides_is_ignored() -> None:
    extra = {
        "type": "response.create",
        "client_metadata": {"turn": "1"},
        "stream_options": {"include_obfuscation": False},
        "context_management": [{"type": "compaction", "compact_threshold": 1000}],
        "prompt_cache_options": {"prewarm": False},
        "prompt_cache_retention": "24h",
        "background": False,
        "generate": True,
        "top_logprobs": 0,
        "text": {"format": {"type": "text"}},
        "nobody_knows": [1, 2],
    }

    assert create(**extra) == create()


def test_a_previous_response_is_not_found() -> None:
    error = refusal(previous_response_id="resp_0")

    assert (error.code, error.param) == ("previous_response_not_found", "previous_response_id")


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"stream_id": "lane"}, "stream_id"),
        ({"background": True}, "background"),
        ({"generate": False}, "generate"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text.format"),
    ],
)
def test_a_constraint_that_cannot_be_kept_is_refused(members: dict[str, Any], param: str) -> None:
    error = refusal(**members)

    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", param)


@pytest.mark.parametrize(
    ("members", "code", "param"),
    [
        ({"model": 4}, "invalid_type", "model"),
        ({"input": {}}, "invalid_type", "input"),
        ({"instructions": ["x"]}, "invalid_type", "instructions"),
        ({"tools": {}}, "invalid_type", "tools"),
        ({"parallel_tool_calls": "yes"}, "invalid_type", "parallel_tool_calls"),
        ({"temperature": "hot"}, "invalid_type", "temperature"),
        ({"temperature": 2.1}, "invalid_value", "temperature"),
        ({"temperature": 10**400}, "invalid_value", "temperature"),
        ({"top_p": 0}, "invalid_value", "top_p"),
        ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
        ({"max_output_tokens": True}, "invalid_type", "max_output_tokens"),
        ({"max_output_tokens": 2.5}, "invalid_type", "max_output_tokens"),
        ({"seed": -1}, "invalid_value", "seed"),
        ({"seed": 2**63}, "invalid_value", "seed"),
        ({"metadata": {"k" * 65: "v"}}, "invalid_value", "metadata"),
        ({"metadata": {"k": "v" * 513}}, "invalid_value", "metadata"),
        ({"metadata": {"k": 1}}, "invalid_type", "metadata"),
        ({"metadata": {str(i): "v" for i in range(17)}}, "invalid_value", "metadata"),
        ({"truncation": "middle"}, "invalid_value", "truncation"),
        ({"reasoning": {"effort": 4}}, "invalid_type", "reasoning.effort"),
        ({"text": {"verbosity": "loud"}}, "invalid_value", "text.verbosity"),
        ({"text": {"format": "text"}}, "invalid_type", "text.format"),
        ({"include": [4]}, "invalid_type", "include[0]"),
        ({"stream": 1}, "invalid_type", "stream"),
        ({"background": "no"}, "invalid_type", "background"),
        ({"previous_response_id": 4}, "invalid_type", "previous_response_id"),
        ({"presence_penalty": 3}, "invalid_value", "presence_penalty"),
    ],
)
def test_an_ill_typed_member_is_named_by_its_path(
    members: dict[str, Any], code: str, param: str
) -> None:
    error = refusal(**members)

    assert (error.status, error.code, error.param) == (400, code, param)


def test_an_output_without_its_call_is_refused() -> None:
    error = refusal(input=[{"type": "function_call_output", "call_id": "c", "output": "4"}])

    assert (error.code, error.param) == (None, "input")
    assert error.message.startswith("No tool call found for function call output")


# --- response.append -----------------------------------------------------------------------------


def test_an_append_holds_items_and_no_choice_of_its_own() -> None:
    frame = {"type": "response.append", "input": [WEATHER | {"type": "new"}], "client_metadata": {}}

    params = parse_append(frame, [])

    assert params.input == [UnknownItem("new")]
    assert params.tool_choice is None


def test_an_append_may_choose_among_the_tools_of_its_response() -> None:
    frame = {"input": "Hurry.", "tool_choice": "required"}

    params = parse_append(frame, [FunctionTool("weather")])

    assert params.input == [Message("user", "Hurry.")]
    assert params.tool_choice == ToolChoice(ToolChoiceMode.REQUIRED)


@pytest.mark.parametrize(
    ("frame", "code", "param"),
    [
        ({}, "missing_required_parameter", "input"),
        ({"input": []}, "missing_required_parameter", "input"),
        ({"input": None}, "missing_required_parameter", "input"),
        ({"input": 4}, "invalid_type", "input"),
        ({"input": "x", "stream_id": "lane"}, "unsupported_parameter", "stream_id"),
        ({"input": "x", "tool_choice": "required"}, "invalid_value", "tool_choice"),
    ],
)
def test_a_bad_append_is_refused(frame: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        parse_append(frame, [])

    assert (caught.value.code, caught.value.param) == (code, param)


def resolve(*items: InputItem, answered: dict[str, str] | None = None) -> ResolvedAppend:
    """Resolve for a response that made ``old``, whose output came, and now waits for two calls."""
    return resolve_append(items, ["one", "two"], answered or {}, ["old", "one", "two"])


def test_outputs_come_in_any_order() -> None:
    resolved = resolve(FunctionCallOutput("two", "2"), FunctionCallOutput("one", "1"))

    assert resolved == ResolvedAppend({"two": "2", "one": "1"}, [])


def test_outputs_may_come_one_at_a_time() -> None:
    resolved = resolve(FunctionCallOutput("two", "2"), answered={"one": "1"})

    assert resolved.outputs == {"two": "2"}


def test_what_the_model_wrote_is_dropped_when_it_comes_back() -> None:
    resolved = resolve(
        UnknownItem("reasoning"),
        Message("assistant", "Let me look."),
        FunctionCall("one", "weather", "written anew"),
        FunctionCallOutput("one", "1"),
    )

    assert resolved == ResolvedAppend({"one": "1"}, [])


def test_messages_ride_along_in_order() -> None:
    messages = [
        Message("user", "Hurry."),
        Message("system", "Be brief."),
        Message("developer", "!"),
    ]

    resolved = resolve(messages[0], FunctionCallOutput("one", "1"), *messages[1:])

    assert resolved.messages == messages


@pytest.mark.parametrize(
    ("items", "answered", "code", "param"),
    [
        ([FunctionCallOutput("x", "")], {}, "unknown_call_id", "input[0].call_id"),
        ([FunctionCall("x", "f", "")], {}, "unknown_call_id", "input[0].call_id"),
        ([FunctionCallOutput("old", "")], {}, "duplicate_call_id", "input[0].call_id"),
        ([FunctionCallOutput("one", "")], {"one": ""}, "duplicate_call_id", "input[0].call_id"),
        (
            [FunctionCallOutput("one", ""), FunctionCallOutput("one", "")],
            {},
            "duplicate_call_id",
            "input[1].call_id",
        ),
    ],
)
def test_unknown_and_repeated_calls_are_refused_and_change_nothing(
    items: list[InputItem], answered: dict[str, str], code: str, param: str
) -> None:
    before = dict(answered)

    with pytest.raises(ProtocolError) as caught:
        resolve(*items, answered=answered)

    assert (caught.value.code, caught.value.param) == (code, param)
    assert answered == before
