from typing import Any

import pytest

from protocol.client_events import (
    LOGPROBS,
    CreateParams,
    ReasoningOptions,
    ResolvedAppend,
    TextFormat,
    TextFormatKind,
    parse_append,
    parse_compact,
    parse_create,
    parse_inject,
    parse_input_tokens,
    parse_steer,
    parse_stream_id,
    resolve_append,
    resolve_tool_choice,
)
from protocol.errors import ProtocolError
from protocol.items import (
    AdditionalTools,
    CallOutput,
    CustomToolCall,
    FunctionCall,
    InputItem,
    ItemReference,
    Message,
    ReasoningItem,
    UnknownItem,
)
from protocol.tools import FunctionTool, ToolChoice, ToolChoiceMode, tools_digest

BODY: dict[str, Any] = {"model": "m", "input": "Hi"}
WEATHER = {"type": "function", "name": "weather"}
SCHEMA = {"type": "json_schema", "name": "answer", "schema": {"type": "object"}}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "4"}
CUSTOM_OUTPUT = {"type": "custom_tool_call_output", "call_id": "d", "output": "5"}


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
    assert (params.previous_response_id, params.generate, params.background) == (None, True, False)
    assert (params.text_format, params.verbosity) == (TextFormat(), None)
    assert (params.top_logprobs, params.wants_logprobs) == (0, False)
    assert (params.compact_threshold, params.include_obfuscation) == (None, False)


def test_null_is_the_default_everywhere() -> None:
    nulls = dict.fromkeys(CreateParams.__struct_fields__)
    nested = {
        "text": {"format": None, "verbosity": None},
        "stream_options": {"include_obfuscation": None},
        "prompt_cache_options": {"prewarm": None},
        "context_management": None,
    }

    assert create(**nulls | BODY, text=None, conversation=None, stream_id=None) == create()
    assert create(**nested) == create()


def test_every_member_is_taken_over() -> None:
    members: dict[str, Any] = {
        "instructions": "Be brief.",
        "previous_response_id": "resp_0",
        "parallel_tool_calls": False,
        "temperature": 0,
        "top_p": 0.5,
        "top_logprobs": 20,
        "max_output_tokens": 1,
        "seed": 2**63 - 1,
        "stream": True,
        "generate": False,
        "background": True,
        "store": True,
        "metadata": {"k": "v"},
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "p",
        "service_tier": "flex",
        "truncation": "auto",
        "include": ["reasoning.encrypted_content", "one.that.nobody.knows"],
        "max_tool_calls": 3,
        "presence_penalty": -2,
        "frequency_penalty": 2,
    }

    params = create(**members)

    assert {name: getattr(params, name) for name in members} == members


def test_reasoning_and_verbosity_are_taken_over() -> None:
    params = create(
        reasoning={"effort": "beyond_max", "context": "all_turns"}, text={"verbosity": "high"}
    )

    assert params.reasoning == ReasoningOptions("beyond_max", None)
    assert params.verbosity == "high"


@pytest.mark.parametrize(
    ("members", "wants"),
    [
        ({"top_logprobs": 1}, True),
        ({"include": [LOGPROBS]}, True),
        ({"include": [LOGPROBS], "top_logprobs": 0}, True),
        ({"include": ["other"], "top_logprobs": 0}, False),
    ],
)
def test_log_probabilities_come_for_a_number_of_them_or_by_inclusion(
    members: dict[str, Any], wants: bool
) -> None:
    assert create(**members).wants_logprobs is wants


@pytest.mark.parametrize(
    ("text_format", "expected"),
    [
        ({"type": "text"}, TextFormat()),
        ({"type": "json_object"}, TextFormat(TextFormatKind.JSON_OBJECT)),
        (SCHEMA, TextFormat(TextFormatKind.JSON_SCHEMA, "answer", {"type": "object"})),
        (
            SCHEMA | {"strict": True, "description": "d"},
            TextFormat(TextFormatKind.JSON_SCHEMA, "answer", {"type": "object"}, True, "d"),
        ),
    ],
)
def test_the_format_of_the_text_is_understood_and_echoed(
    text_format: dict[str, Any], expected: TextFormat
) -> None:
    parsed = create(text={"format": text_format}).text_format

    assert parsed == expected
    defaults = {"strict": False, "description": None} if "schema" in text_format else {}
    assert parsed.echo() == defaults | text_format


@pytest.mark.parametrize(
    ("entries", "threshold"),
    [
        ([], None),
        ([{"type": "compaction", "compact_threshold": 1000}], 1000),
        ([{"type": "compaction"}], None),
        ([{"type": "compaction", "compact_threshold": 2000}, {"type": "compaction"}], 2000),
        ([{"type": "new", "compact_threshold": "x"}, {}], None),
    ],
)
def test_the_context_may_be_compacted_beyond_a_threshold(
    entries: list[Any], threshold: int | None
) -> None:
    assert create(context_management=entries).compact_threshold == threshold


@pytest.mark.parametrize("asked", [True, False])
def test_obfuscation_is_asked_for_with_the_stream_over_either_transport(asked: bool) -> None:
    body = BODY | {"stream_options": {"include_obfuscation": asked, "new": 1}}

    assert parse_create(body, transport="http").include_obfuscation is asked
    assert parse_create(body, transport="websocket").include_obfuscation is asked


def test_tools_are_parsed_and_known_again_by_their_digest() -> None:
    params = create(tools=[WEATHER], client_metadata={"turn": "1"})

    assert params.tools == [FunctionTool("weather")]
    assert params.tools_digest == tools_digest([WEATHER])
    assert (
        params.tools_digest == create(tools=[WEATHER], client_metadata={"turn": "2"}).tools_digest
    )


def test_a_choice_is_honoured_by_tools_that_another_request_brought() -> None:
    params = create(tool_choice=WEATHER)

    choice = resolve_tool_choice(params, [FunctionTool("weather")])

    assert choice == ToolChoice(ToolChoiceMode.NAMED, ("weather",), WEATHER)
    with pytest.raises(ProtocolError) as caught:
        resolve_tool_choice(params, params.tools)
    assert caught.value.param == "tool_choice.name"


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


# --- Its input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, []])
def test_an_empty_input_is_missing_even_with_instructions(value: Any) -> None:
    error = refusal(input=value, instructions="Be brief.")

    assert (error.status, error.code, error.param) == (400, "missing_required_parameter", "input")


@pytest.mark.parametrize("item_type", ["web_search_call", "reasoning", "additional_tools"])
def test_an_input_of_nothing_that_could_be_answered_is_refused(item_type: str) -> None:
    error = refusal(input=[{"type": item_type, "tools": []}])

    assert (error.code, error.param) == ("invalid_value", "input")


@pytest.mark.parametrize(
    "members",
    [
        {"generate": False},
        {"prompt_cache_options": {"prewarm": True}},
        {"previous_response_id": "resp_0"},
    ],
)
@pytest.mark.parametrize(
    ("value", "expected"), [(None, []), ([], []), ([{"type": "new"}], [UnknownItem("new")])]
)
def test_a_warm_up_and_a_continuation_may_have_nothing_to_add(
    members: dict[str, Any], value: Any, expected: list[InputItem]
) -> None:
    assert create(**members, input=value).input == expected


def test_prewarming_samples_nothing_whatever_else_is_asked() -> None:
    assert not create(prompt_cache_options={"prewarm": True}, generate=True).generate
    assert create(prompt_cache_options={"prewarm": False}).generate


def test_the_input_is_kept_as_it_came() -> None:
    item = {"role": "user", "content": "Hi", "id": None, "new": 1}

    assert create(input=[item]).input_json == [item]
    assert create(generate=False, input=None).input_json == []


def test_an_input_of_one_string_is_kept_as_the_message_it_is() -> None:
    content = [{"type": "input_text", "text": "Hi"}]

    assert create(input="Hi").input_json == [
        {"type": "message", "role": "user", "content": content}
    ]


def test_calls_are_left_unchecked_as_an_earlier_response_may_hold_the_rest() -> None:
    params = create(previous_response_id="resp_0", input=[OUTPUT])

    assert params.input == [CallOutput("c", "4")]


def test_references_and_tools_in_the_input_are_left_to_be_resolved() -> None:
    items = [{"type": "additional_tools", "tools": [WEATHER]}, {"id": "msg_1"}]

    assert create(input=items).input == [
        AdditionalTools((FunctionTool("weather"),)),
        ItemReference("msg_1", "input[1]"),
    ]


# --- What is ignored and what is refused ---------------------------------------------------------


def test_what_clients_send_besides_is_ignored() -> None:
    extra = {
        "type": "response.create",
        "client_metadata": {"turn": "1"},
        "stream_options": {"include_obfuscation": False},
        "prompt_cache_options": {"prewarm": False},
        "prompt_cache_retention": "24h",
        "stream_id": "lane",
        "moderation": {},
        "text": {"format": {"type": "text"}},
        "nobody_knows": [1, 2],
    }

    assert create(**extra) == create()


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"background": True, "store": False}, "background"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
    ],
)
def test_a_constraint_that_cannot_be_kept_is_refused(members: dict[str, Any], param: str) -> None:
    error = refusal(**members)

    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", param)


def test_nothing_runs_in_the_background_of_a_websocket() -> None:
    with pytest.raises(ProtocolError) as caught:
        parse_create(BODY | {"background": True}, transport="websocket")

    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "background")


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
        ({"text": {"format": {}}}, "missing_required_parameter", "text.format.type"),
        ({"text": {"format": {"type": "xml"}}}, "invalid_value", "text.format.type"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x"}}},
            "missing_required_parameter",
            "text.format.schema",
        ),
        (
            {"text": {"format": {"type": "json_schema", "schema": {}}}},
            "missing_required_parameter",
            "text.format.name",
        ),
        ({"text": {"format": SCHEMA | {"name": "a b"}}}, "invalid_value", "text.format.name"),
        ({"text": {"format": SCHEMA | {"schema": []}}}, "invalid_type", "text.format.schema"),
        ({"text": {"format": SCHEMA | {"strict": 1}}}, "invalid_type", "text.format.strict"),
        ({"include": [4]}, "invalid_type", "include[0]"),
        ({"stream": 1}, "invalid_type", "stream"),
        ({"background": "no"}, "invalid_type", "background"),
        ({"previous_response_id": 4}, "invalid_type", "previous_response_id"),
        ({"presence_penalty": 3}, "invalid_value", "presence_penalty"),
        ({"top_logprobs": 21}, "invalid_value", "top_logprobs"),
        ({"generate": "no"}, "invalid_type", "generate"),
        ({"tool_choice": "any"}, "invalid_value", "tool_choice"),
        ({"context_management": {}}, "invalid_type", "context_management"),
        (
            {
                "context_management": [
                    {"type": "new"},
                    {"type": "compaction", "compact_threshold": 1},
                ]
            },
            "invalid_value",
            "context_management[1].compact_threshold",
        ),
        (
            {"stream_options": {"include_obfuscation": 1}},
            "invalid_type",
            "stream_options.include_obfuscation",
        ),
        (
            {"prompt_cache_options": {"prewarm": "yes"}},
            "invalid_type",
            "prompt_cache_options.prewarm",
        ),
        ({"generate": False, "input": 4}, "invalid_type", "input"),
    ],
)
def test_an_ill_typed_member_is_named_by_its_path(
    members: dict[str, Any], code: str, param: str
) -> None:
    error = refusal(**members)

    assert (error.status, error.code, error.param) == (400, code, param)


# --- The other routes ----------------------------------------------------------------------------


def test_input_tokens_are_counted_of_a_create_that_samples_nothing() -> None:
    params = parse_input_tokens({"tools": [WEATHER], "generate": True}, default_model="d")

    assert (params.model, params.input, params.generate) == ("d", [], False)
    assert params.tools == [FunctionTool("weather")]


def test_what_to_compact_is_in_the_input() -> None:
    params = parse_compact(BODY | {"instructions": "Be brief.", "prompt_cache_key": "p"})

    assert (params.model, params.input) == ("m", [Message("user", "Hi")])
    assert (params.previous_response_id, params.instructions) == (None, "Be brief.")


@pytest.mark.parametrize("value", [{}, {"input": None}, {"input": []}])
def test_what_to_compact_may_be_in_an_earlier_response_alone(value: dict[str, Any]) -> None:
    params = parse_compact({"previous_response_id": "resp_0"} | value, default_model="d")

    assert (params.model, params.input, params.previous_response_id) == ("d", [], "resp_0")


@pytest.mark.parametrize(
    ("members", "code", "param"),
    [
        ({"model": None}, "missing_required_parameter", "model"),
        ({"input": None}, "missing_required_parameter", "input"),
        ({"input": 4}, "invalid_type", "input"),
        ({"previous_response_id": 4}, "invalid_type", "previous_response_id"),
        ({"instructions": 4}, "invalid_type", "instructions"),
    ],
)
def test_a_bad_compact_is_refused(members: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        parse_compact(BODY | members)

    assert (caught.value.code, caught.value.param) == (code, param)


# --- The lane ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream_id", ["a", "A-z_0.9", "x" * 256])
def test_a_frame_may_name_its_lane(stream_id: str) -> None:
    assert parse_stream_id({"stream_id": stream_id}) == stream_id


@pytest.mark.parametrize("frame", [{}, {"stream_id": None}])
def test_the_default_lane_has_no_name(frame: dict[str, Any]) -> None:
    assert parse_stream_id(frame) is None


@pytest.mark.parametrize("stream_id", ["", "x" * 257, "a b", "a/b", "a\n", "é", "１", 4, ["a"]])
def test_a_bad_name_of_a_lane_is_refused(stream_id: Any) -> None:
    with pytest.raises(ProtocolError) as caught:
        parse_stream_id({"stream_id": stream_id})

    assert (caught.value.code, caught.value.param) == ("invalid_stream_id", "stream_id")


# --- response.append -----------------------------------------------------------------------------


def test_an_append_holds_items_and_no_choice_of_its_own() -> None:
    frame = {"type": "response.append", "input": [WEATHER | {"type": "new"}], "client_metadata": {}}

    params = parse_append(frame, [])

    assert params.input == [UnknownItem("new")]
    assert params.input_json == frame["input"]
    assert params.tool_choice is None


def test_an_append_may_choose_among_the_tools_of_its_response() -> None:
    frame = {"input": "Hurry.", "tool_choice": "required"}

    params = parse_append(frame, [FunctionTool("weather")])

    assert params.input == [Message("user", "Hurry.")]
    assert params.tool_choice == ToolChoice(ToolChoiceMode.REQUIRED, None, "required")


def test_an_append_may_name_the_lane_it_goes_to() -> None:
    assert parse_append({"input": "x", "stream_id": "lane"}, []).input == [Message("user", "x")]


@pytest.mark.parametrize(
    ("frame", "code", "param"),
    [
        ({}, "missing_required_parameter", "input"),
        ({"input": []}, "missing_required_parameter", "input"),
        ({"input": None}, "missing_required_parameter", "input"),
        ({"input": 4}, "invalid_type", "input"),
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
    resolved = resolve(CallOutput("two", "2"), CallOutput("one", "1"))

    assert resolved == ResolvedAppend({"two": "2", "one": "1"}, [])


def test_outputs_may_come_one_at_a_time() -> None:
    resolved = resolve(CallOutput("two", "2"), answered={"one": "1"})

    assert resolved.outputs == {"two": "2"}


def test_what_the_model_wrote_is_dropped_when_it_comes_back() -> None:
    resolved = resolve(
        ReasoningItem("Hm."),
        Message("assistant", "Let me look."),
        ItemReference("msg_1", "input[2]"),
        FunctionCall("one", "weather", "written anew"),
        CustomToolCall("two", "exec", "ls"),
        CallOutput("one", "1"),
        UnknownItem("new"),
    )

    assert resolved == ResolvedAppend({"one": "1"}, [])


def test_messages_ride_along_in_order() -> None:
    messages = [
        Message("user", "Hurry."),
        Message("system", "Be brief."),
        Message("developer", "!"),
    ]

    resolved = resolve(messages[0], CallOutput("one", "1"), *messages[1:])

    assert resolved.messages == messages


@pytest.mark.parametrize(
    ("items", "answered", "code", "param"),
    [
        ([CallOutput("x", "")], {}, "unknown_call_id", "input[0].call_id"),
        ([FunctionCall("x", "f", "")], {}, "unknown_call_id", "input[0].call_id"),
        ([CustomToolCall("x", "f", "")], {}, "unknown_call_id", "input[0].call_id"),
        ([AdditionalTools(())], {}, "unsupported_parameter", "input[0]"),
        ([CallOutput("old", "")], {}, "duplicate_call_id", "input[0].call_id"),
        ([CallOutput("one", "")], {"one": ""}, "duplicate_call_id", "input[0].call_id"),
        (
            [CallOutput("one", ""), CallOutput("one", "")],
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


# --- response.inject -----------------------------------------------------------------------------

INJECT: dict[str, Any] = {"type": "response.inject", "response_id": "resp_1", "input": [OUTPUT]}


def test_an_inject_holds_outputs_and_its_input_as_it_came() -> None:
    params = parse_inject(INJECT | {"input": [OUTPUT, CUSTOM_OUTPUT]})

    assert params.response_id == "resp_1"
    assert params.outputs == [CallOutput("c", "4"), CallOutput("d", "5")]
    assert params.raw_input == [OUTPUT, CUSTOM_OUTPUT]


@pytest.mark.parametrize(
    ("members", "code", "param"),
    [
        ({"response_id": 4}, "invalid_type", "response_id"),
        ({"input": None}, "invalid_type", "input"),
        ({"input": "4"}, "invalid_type", "input"),
        ({"input": []}, "missing_required_parameter", "input"),
        ({"input": [OUTPUT, {"role": "user", "content": "x"}]}, "invalid_value", "input"),
        ({"input": [OUTPUT | {"call_id": 4}]}, "invalid_type", "input[0].call_id"),
        ({"stream_id": "lane"}, "unknown_parameter", "stream_id"),
        ({"tool_choice": "auto"}, "unknown_parameter", "tool_choice"),
    ],
)
def test_an_inject_of_another_shape_is_refused(
    members: dict[str, Any], code: str, param: str
) -> None:
    with pytest.raises(ProtocolError) as caught:
        parse_inject(INJECT | members)

    assert (caught.value.code, caught.value.param) == (code, param)


@pytest.mark.parametrize("member", ["response_id", "input"])
def test_an_inject_has_all_its_members(member: str) -> None:
    frame = {name: value for name, value in INJECT.items() if name != member}

    with pytest.raises(ProtocolError) as caught:
        parse_inject(frame)

    assert (caught.value.code, caught.value.param) == ("missing_required_parameter", member)


# --- response.steer ------------------------------------------------------------------------------

USER = {"role": "user", "content": [{"type": "input_text", "text": "Hurry."}]}
STEER: dict[str, Any] = {
    "type": "response.steer",
    "previous_response_id": "resp_1",
    "input": "Hurry.",
}


@pytest.mark.parametrize("value", ["Hurry.", [USER], [USER | {"type": "message"}]])
def test_a_steer_is_what_a_user_says(value: Any) -> None:
    params = parse_steer(STEER | {"input": value})

    assert params.previous_response_id == "resp_1"
    assert params.messages == [Message("user", "Hurry.")]
    assert params.raw_input == value


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"previous_response_id": None}, "previous_response_id"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [USER, USER | {"role": "developer"}]}, "input"),
        ({"input": [OUTPUT]}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"stream_id": "lane"}, "stream_id"),
    ],
)
def test_a_steer_of_another_shape_is_invalid_input(members: dict[str, Any], param: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        parse_steer(STEER | members)

    assert (caught.value.code, caught.value.param) == ("invalid_input", param)
    assert caught.value.message
