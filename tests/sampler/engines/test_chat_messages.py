"""Conversations and tools to requests."""

import json
import re
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.client_events import TextFormat, TextFormatKind
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
)
from protocol.tools import CallableTool, CustomFormat, CustomTool, FunctionTool
from sampler.conversation import ConversationError, summary_text
from sampler.engines.chat.dialect import CEREBRAS, OPENAI_CHAT, ChatDialect
from sampler.engines.chat.messages import (
    messages_after,
    messages_of,
    messages_of_turn,
    request_body,
)
from sampler.engines.chat.tools import ToolNames, input_in, sent_name, tools_json
from sampler.params import Constraint, SamplingParams
from sampler.recorded_turn import Call, Item, RecordedTurn
from tests.sampler.dialogues import Dialogue, dialogues
from tests.sampler.templates import answers

OSLO = FunctionCall("call_1", "get_weather", '{"city":  "Oslo"}')
BERGEN = FunctionCall("call_2", "get_weather", '{"city": "Bergen"}')
PATCH = CustomToolCall("call_3", "apply_patch", 'a "quoted"\nline')
CALLS: list[Call] = [OSLO, BERGEN, PATCH]

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = FunctionTool("get_weather", "Weather", CITY, strict=True)
TIME = FunctionTool("get_time")
LARK = 'start: "a"+'
PATCHES = CustomTool("apply_patch", "Edit files.", CustomFormat("lark", LARK))
TOOLS: list[CallableTool] = [WEATHER, TIME, PATCHES]


def laid_out(
    items: Sequence[Item], instructions: str | None = None, dialect: ChatDialect = CEREBRAS
) -> list[dict[str, Any]]:
    return [json.loads(message) for message in messages_of(items, instructions, dialect)]


def as_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def as_output(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


OSLO_SENT = as_call("call_1", "get_weather", '{"city":  "Oslo"}')
BERGEN_SENT = as_call("call_2", "get_weather", '{"city": "Bergen"}')
PATCH_SENT = as_call("call_3", "apply_patch", '{"input": "a \\"quoted\\"\\nline"}')


# --- Messages ------------------------------------------------------------------------------------


def test_instructions_come_first_and_developers_speak_as_the_system() -> None:
    items = [Message("developer", "b"), Message("user", "c"), Message("user", "d")]

    assert laid_out(items, "a") == [
        {"role": "system", "content": "a"},
        {"role": "system", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "user", "content": "d"},
    ]


def test_what_an_assistant_thinks_says_and_calls_is_one_message() -> None:
    items: list[Item] = [
        Message("user", "Hi."),
        ReasoningItem("Hm."),
        Message("assistant", "Let me see."),
        OSLO,
        PATCH,
        *answers([OSLO, PATCH], ["4", "Done."]),
        ReasoningItem("So."),
        Message("assistant", "Cold."),
    ]

    assert laid_out(items)[1:] == [
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning": "Hm.",
            "tool_calls": [OSLO_SENT, PATCH_SENT],
        },
        as_output("call_1", "4"),
        as_output("call_3", "Done."),
        {"role": "assistant", "content": "Cold.", "reasoning": "So."},
    ]


def test_who_speaks_next_begins_a_message() -> None:
    items: list[Item] = [
        Message("assistant", "a"),
        Message("user", "b"),
        Message("assistant", "c"),
        Compaction("d"),
        Message("assistant", "e"),
    ]

    assert [(message["role"], message["content"][-1]) for message in laid_out(items)] == [
        ("assistant", "a"),
        ("user", "b"),
        ("assistant", "c"),
        ("user", "d"),
        ("assistant", "e"),
    ]


@pytest.mark.parametrize(
    ("field", "thoughts"),
    [("reasoning_content", {"reasoning_content": "Hm."}), (None, {})],
)
def test_thoughts_go_back_where_the_endpoint_takes_them(
    field: str | None, thoughts: dict[str, str]
) -> None:
    dialect = ChatDialect(field)
    turn = RecordedTurn((ReasoningItem("Hm."), Message("assistant", "Yes.")), ())

    assert laid_out([turn], dialect=dialect) == [
        {"role": "assistant", "content": "Yes.", **thoughts}
    ]


def test_a_turn_cut_after_its_thoughts_is_a_message_where_they_can_be_told() -> None:
    turn = RecordedTurn((ReasoningItem("Hm."),), ())

    assert laid_out([turn]) == [{"role": "assistant", "content": "", "reasoning": "Hm."}]
    assert laid_out([turn], dialect=OPENAI_CHAT) == []


def test_thoughts_of_another_sampler_without_words_are_no_message() -> None:
    items: list[Item] = [Message("user", "a"), ReasoningItem("Hm."), Message("user", "b")]

    assert [message["role"] for message in laid_out(items)] == ["user", "user"]


def test_a_call_without_text_has_null_as_its_content() -> None:
    assert laid_out([OSLO]) == [{"role": "assistant", "content": None, "tool_calls": [OSLO_SENT]}]


@pytest.mark.parametrize(
    "arguments", ['{"a" :1e400,\n "b": "é\\u00e9"}', '{"a": ', "[1]", "nothing"]
)
def test_arguments_go_back_as_they_were_sampled(arguments: str) -> None:
    [message] = laid_out([RecordedTurn((FunctionCall("c", "f", arguments),), ())])

    assert message["tool_calls"][0]["function"]["arguments"] == arguments


def test_empty_arguments_go_back_as_an_empty_object() -> None:
    [message] = laid_out([FunctionCall("c", "f", "")])

    assert message["tool_calls"] == [as_call("c", "f", "{}")]


@pytest.mark.parametrize("order", list(permutations(answers(CALLS, ["1", "2", "3"]))))
def test_outputs_follow_their_calls_in_the_order_of_the_calls(order: Sequence[InputItem]) -> None:
    turn = RecordedTurn(tuple(CALLS), ())

    messages = laid_out([Message("user", "Hi."), turn, Message("user", "Hm?"), *order])

    assert messages[1]["tool_calls"] == [OSLO_SENT, BERGEN_SENT, PATCH_SENT]
    assert messages[2:] == [
        as_output("call_1", "1"),
        as_output("call_2", "2"),
        as_output("call_3", "3"),
        {"role": "user", "content": "Hm?"},
    ]


def test_an_output_that_comes_a_turn_late_stands_where_it_came() -> None:
    items: list[Item] = [
        RecordedTurn((OSLO,), ()),
        Message("user", "Hello?"),
        RecordedTurn((BERGEN,), ()),
        *answers([BERGEN, OSLO], ["2", "1"]),
    ]

    assert laid_out(items)[3:] == [as_output("call_1", "1"), as_output("call_2", "2")]


@pytest.mark.parametrize("head", [[], [RecordedTurn((OSLO,), ())]])
def test_an_output_that_answers_no_call_is_an_error(head: list[Item]) -> None:
    with pytest.raises(ConversationError, match="'call_9' answers no call"):
        messages_of([*head, CallOutput("call_9", "1")], None, CEREBRAS)


def test_a_user_tells_what_was_said_before() -> None:
    compaction = Compaction("It is cold.")

    assert laid_out([compaction]) == [{"role": "user", "content": summary_text(compaction)}]


def test_what_a_model_cannot_see_is_no_message_and_ends_none() -> None:
    items: list[Item] = [
        Message("assistant", "a"),
        UnknownItem("web_search_call"),
        ItemReference("x", "input[0]"),
        AdditionalTools((WEATHER,)),
        Message("assistant", "b"),
        Message("user", "c"),
        Message("assistant", ""),
    ]

    assert laid_out(items) == [
        {"role": "assistant", "content": "ab"},
        {"role": "user", "content": "c"},
    ]


def test_half_a_surrogate_pair_is_a_replacement_character() -> None:
    call = FunctionCall("c", "f", '"\ud800"')

    messages = laid_out([Message("user", "a\udc00"), call, CallOutput("c", "é\ud83d")])

    assert messages[0]["content"].strip("\ufffd") == "a"
    assert messages[1]["tool_calls"][0]["function"]["arguments"].replace("\ufffd", "") == '""'
    assert messages[2]["content"].strip("\ufffd") == "é"


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(dialogues(), st.sampled_from([None, "Be brief."]), st.sampled_from([CEREBRAS, OPENAI_CHAT]))
def test_the_messages_of_a_conversation_grow_at_their_end(
    dialogue: Dialogue, instructions: str | None, dialect: ChatDialect
) -> None:
    items = dialogue.items(len(dialogue.exchanges))
    whole = messages_of(items, instructions, dialect)
    ends = [i + 1 for i, item in enumerate(items) if isinstance(item, RecordedTurn)]

    for end, turn in ((i, items[i - 1]) for i in ends):
        assert isinstance(turn, RecordedTurn)
        before = messages_of(items[: end - 1], instructions, dialect)
        known = messages_of(items[:end], instructions, dialect)
        assert (*before, *messages_of_turn(turn, dialect)) == known
        assert (*known, *messages_after(items[:end], items[end:], dialect)) == whole


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(dialogues(), st.data())
def test_messages_grow_whatever_comes_in_how_many_pieces(
    dialogue: Dialogue, data: st.DataObject
) -> None:
    items = dialogue.items(len(dialogue.exchanges))
    ends = [i + 1 for i, item in enumerate(items) if isinstance(item, RecordedTurn)]
    stops = sorted(data.draw(st.sets(st.sampled_from([*ends, len(items)]))) | {len(items)})
    if ends:
        messages = messages_of(items[: ends[0]], None, CEREBRAS)
        start = ends[0]
        for stop in [stop for stop in stops if stop > start]:
            messages += messages_after(items[:start], items[start:stop], CEREBRAS)
            start = stop

        assert messages == messages_of(items, None, CEREBRAS)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(dialogues())
def test_every_output_is_told_once_behind_its_call(dialogue: Dialogue) -> None:
    items = dialogue.items(len(dialogue.exchanges))
    outputs = [item.call_id for item in items if isinstance(item, CallOutput)]

    called: list[str] = []
    told: list[str] = []
    for message in laid_out(items):
        called += [call["id"] for call in message.get("tool_calls", ())]
        if message["role"] == "tool":
            assert message["tool_call_id"] in called
            told.append(message["tool_call_id"])

    assert sorted(told) == sorted(outputs)


# --- Names ---------------------------------------------------------------------------------------

ENDPOINT_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def test_a_name_that_endpoints_take_is_sent_as_it_is() -> None:
    assert sent_name("mcp__files__read-1") == "mcp__files__read-1"


@pytest.mark.parametrize("name", ["crm.get_customer", "a" * 64 + ".b", "é", "", "a b", "x\n"])
def test_a_name_that_endpoints_refuse_is_replaced_and_found_again(name: str) -> None:
    sent = sent_name(name)

    assert ENDPOINT_NAME.fullmatch(sent)
    assert ToolNames([FunctionTool(name)]).qualified(sent) == name


def test_names_that_read_alike_are_not_the_same() -> None:
    names = ["a.b", "a_b", "a-b", "a.b.c", "a_b.c", "a.b_c", sent_name("a.b")]

    assert len({sent_name(name) for name in names}) == len(names)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.sets(st.text("ab._-é", max_size=70) | st.text(max_size=5)))
def test_names_are_mapped_without_collisions_and_back(names: set[str]) -> None:
    # What was replaced once may itself be the name of a tool.
    known = names | {sent_name(name) for name in names}

    mapping = ToolNames(FunctionTool(name) for name in known)

    assert all(ENDPOINT_NAME.fullmatch(sent_name(name)) for name in known)
    assert {mapping.qualified(sent_name(name)) for name in known} == known


def test_a_name_that_nobody_declared_is_its_own() -> None:
    assert ToolNames(TOOLS).qualified("rm") == "rm"


def test_calls_of_namespaced_tools_go_back_by_the_name_they_were_declared_with() -> None:
    call = FunctionCall("c", "find", "{}", "crm")
    [declared] = json.loads(tools_json([FunctionTool("crm.find")], CEREBRAS))

    [message] = laid_out([call])

    assert message["tool_calls"][0]["function"]["name"] == declared["function"]["name"]


# --- Tools ---------------------------------------------------------------------------------------


def declared(tools: Sequence[CallableTool], dialect: ChatDialect) -> list[dict[str, Any]]:
    wire = json.loads(tools_json(tools, dialect))
    assert all(tool["type"] == "function" for tool in wire)
    return [tool["function"] for tool in wire]


def test_functions_are_declared_as_they_were() -> None:
    loose = FunctionTool("f", None, CITY, strict=False)

    assert declared([WEATHER, loose], OPENAI_CHAT) == [
        {"name": "get_weather", "description": "Weather", "parameters": CITY, "strict": True},
        {"name": "f", "parameters": CITY, "strict": False},
    ]


def test_a_function_without_schema_takes_no_arguments() -> None:
    [function] = declared([TIME], CEREBRAS)

    assert function["parameters"] == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }


def test_a_free_form_tool_is_a_function_of_one_string_that_tells_its_grammar() -> None:
    [function] = declared([PATCHES], CEREBRAS)

    assert function["name"] == "apply_patch"
    assert function["parameters"]["required"] == ["input"]
    assert function["parameters"]["properties"]["input"]["type"] == "string"
    assert function["description"].startswith("Edit files.\n\n")
    assert LARK in function["description"]
    assert "strict" not in function


@pytest.mark.parametrize("text", ["", "a", '"\\\n\t', "é🎉", '{"input": "x"}', "\u2028"])
def test_free_text_comes_back_out_of_the_arguments_it_was_put_in(text: str) -> None:
    [message] = laid_out([CustomToolCall("c", "g", text)])

    assert input_in(message["tool_calls"][0]["function"]["arguments"]) == text


def test_cerebras_is_told_of_strict_tools_only_if_all_are() -> None:
    strict = FunctionTool("f", None, CITY, strict=True)

    assert [tool.get("strict") for tool in declared([WEATHER, strict, PATCHES], CEREBRAS)] == [
        True,
        True,
        True,
    ]
    assert not any("strict" in tool for tool in declared([WEATHER, TIME, PATCHES], CEREBRAS))
    assert [tool.get("strict") for tool in declared([WEATHER, TIME], OPENAI_CHAT)] == [True, None]


# --- Requests ------------------------------------------------------------------------------------


def body_of(
    *,
    messages: Sequence[bytes] = (b'{"role":"user","content":"Hi."}',),
    tools: Sequence[CallableTool] = TOOLS,
    constraint: Constraint | None = None,
    params: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
    dialect: ChatDialect = CEREBRAS,
    cache_key: str | None = None,
    effort: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    body = request_body(
        messages,
        model="gpt-oss-120b",
        tools=tools,
        constraint=constraint or Constraint(tools=tuple(tools)),
        params=params,
        dialect=dialect,
        max_tokens=100,
        cache_key=cache_key,
        effort=effort,
        **settings,
    )
    members = json.loads(body, object_pairs_hook=list)
    names = [name for name, _ in members]
    assert len(set(names)) == len(names), "each member stands there once"
    value: dict[str, Any] = msgspec.json.decode(body)
    return value


def test_a_request_is_streamed_bounded_and_counted() -> None:
    body = body_of(tools=[], params=SamplingParams(0.5, 0.9, 7))

    assert body == {
        "model": "gpt-oss-120b",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 100,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "clear_thinking": False,
        "messages": [{"role": "user", "content": "Hi."}],
    }


def test_what_an_endpoint_does_not_take_is_renamed_or_left_out() -> None:
    body = body_of(
        max_tokens_member="max_tokens",
        omitted={"seed", "prompt_cache_key", "stream_options", "clear_thinking", "tool_choice"},
        cache_key="run_1",
    )

    assert body["max_tokens"] == 100
    assert body.keys() == {
        "model",
        "stream",
        "max_tokens",
        "temperature",
        "top_p",
        "tools",
        "messages",
    }


def test_a_request_says_what_differs_from_the_defaults() -> None:
    body = body_of(
        params=SamplingParams(presence_penalty=0.5, frequency_penalty=-1, top_logprobs=3),
        dialect=ChatDialect(None, {"top_k": 1, "temperature": 0}),
        cache_key="run_1",
        effort="high",
    )

    assert body["presence_penalty"] == 0.5
    assert body["frequency_penalty"] == -1
    assert (body["logprobs"], body["top_logprobs"]) == (True, 3)
    assert (body["top_k"], body["temperature"]) == (1, 0)
    assert body["prompt_cache_key"] == "run_1"
    assert body["reasoning_effort"] == "high"


def test_log_probabilities_without_alternatives_are_asked_for_by_themselves() -> None:
    body = body_of(params=SamplingParams(top_logprobs=0))

    assert body["logprobs"] is True
    assert "top_logprobs" not in body


def test_a_seed_has_31_bits() -> None:
    assert body_of(params=SamplingParams(seed=2**63 - 1))["seed"] == 2**31 - 1
    assert body_of(params=SamplingParams(seed=42))["seed"] == 42


@pytest.mark.parametrize(
    ("effort", "sent"),
    [("none", "none"), ("minimal", "low"), ("low", "low"), ("xhigh", "high"), ("odd", "odd")],
)
def test_efforts_are_those_that_endpoints_know(effort: str, sent: str) -> None:
    assert body_of(effort=effort)["reasoning_effort"] == sent


ALL = tuple(TOOLS)
NAMED_TIME = {"type": "function", "function": {"name": "get_time"}}
NAMED_PATCHES = {"type": "function", "function": {"name": "apply_patch"}}


@pytest.mark.parametrize(
    ("constraint", "choice"),
    [
        (Constraint(ALL), "auto"),
        (Constraint(ALL, min_calls=1), "required"),
        (Constraint(ALL, max_calls=0), "none"),
        (Constraint(()), "none"),
        (Constraint((TIME,), 1, 1), NAMED_TIME),
        (Constraint((PATCHES,), 1), NAMED_PATCHES),
    ],
)
def test_the_choice_is_told_and_all_tools_stay_declared(
    constraint: Constraint, choice: object
) -> None:
    body = body_of(constraint=constraint)

    assert body["tool_choice"] == choice
    assert body["tools"] == json.loads(tools_json(TOOLS, CEREBRAS))


@pytest.mark.parametrize(("max_calls", "choice"), [(1, NAMED_TIME), (None, "required")])
def test_the_only_tool_is_named_where_it_is_to_be_called_once(
    max_calls: int | None, choice: object
) -> None:
    body = body_of(tools=[TIME], constraint=Constraint((TIME,), 1, max_calls))

    assert body["tool_choice"] == choice


def test_one_call_at_most_is_told_as_calls_that_are_not_parallel() -> None:
    assert body_of(constraint=Constraint(ALL, max_calls=1))["parallel_tool_calls"] is False
    assert "parallel_tool_calls" not in body_of(constraint=Constraint(ALL))
    assert "parallel_tool_calls" not in body_of(constraint=Constraint(ALL, max_calls=0))


@pytest.mark.parametrize(("min_calls", "mode"), [(0, "auto"), (1, "required")])
def test_a_part_of_the_tools_is_told_as_such_or_else_declared_alone(
    min_calls: int, mode: str
) -> None:
    some = Constraint((TIME, PATCHES), min_calls)

    told = body_of(constraint=some, dialect=OPENAI_CHAT)
    alone = body_of(constraint=some)

    allowed = {"mode": mode, "tools": [NAMED_TIME, NAMED_PATCHES]}
    assert told["tool_choice"] == {"type": "allowed_tools", "allowed_tools": allowed}
    assert len(told["tools"]) == len(TOOLS)
    assert alone["tool_choice"] == mode
    assert alone["tools"] == json.loads(tools_json([TIME, PATCHES], CEREBRAS))


def test_nothing_is_said_of_tools_where_there_are_none() -> None:
    body = body_of(tools=[])

    assert not {"tools", "tool_choice", "parallel_tool_calls"} & body.keys()


SCHEMA = TextFormat(TextFormatKind.JSON_SCHEMA, "answer", CITY, strict=True, description="d")


@pytest.mark.parametrize(
    ("text_format", "sent"),
    [
        (TextFormat(TextFormatKind.JSON_OBJECT), {"type": "json_object"}),
        (
            SCHEMA,
            {
                "type": "json_schema",
                "json_schema": {
                    "name": "answer",
                    "description": "d",
                    "schema": CITY,
                    "strict": True,
                },
            },
        ),
        (TextFormat(), None),
    ],
)
def test_the_form_of_the_answer_is_told(text_format: TextFormat, sent: object) -> None:
    body = body_of(constraint=Constraint(ALL, text_format=text_format))

    assert body.get("response_format") == sent


def test_no_form_is_told_where_the_turn_has_to_make_a_call() -> None:
    body = body_of(constraint=Constraint(ALL, 1, text_format=SCHEMA))

    assert "response_format" not in body


def test_messages_are_sent_as_the_bytes_they_are() -> None:
    messages = [b'{"role": "user",  "content":"a"}', b'{"role":"user","content":"\\u0062"}']

    body = request_body(
        messages,
        model="m",
        tools=[],
        constraint=Constraint(),
        params=SamplingParams(),
        dialect=OPENAI_CHAT,
        max_tokens=1,
    )

    assert b",".join(messages) in body
    assert [message["content"] for message in json.loads(body)["messages"]] == ["a", "b"]
