"""Items to turns, and turns to text."""

from collections.abc import Sequence
from itertools import permutations

import pytest

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
from protocol.validation import JsonObject
from sampler.conversation import (
    Conversation,
    ConversationError,
    ToolOutput,
    Turn,
    call_text,
    text_of,
    turns_after,
    turns_of,
    with_tools_told,
)
from sampler.recorded_turn import RecordedTurn
from tests.sampler.templates import answers
from tests.tiny_model import WEATHER

OSLO = FunctionCall("call_1", "get_weather", '{"city": "Oslo"}')
BERGEN = FunctionCall("call_2", "get_weather", '{"city": "Bergen"}')
TIME = FunctionCall("call_3", "get_time", "{}")
PATCH = CustomToolCall("call_4", "apply_patch", "*** Begin Patch\n*** End Patch")
CALLS = [OSLO, BERGEN, TIME]

# --- Turns ---------------------------------------------------------------------------------------


def test_items_of_one_speaker_are_one_turn() -> None:
    items: list[InputItem] = [
        Message("user", "Hi."),
        Message("assistant", "Let me see."),
        OSLO,
        PATCH,
        *answers([OSLO, PATCH], ["4", "Done."]),
        Message("assistant", "Cold."),
    ]

    assert turns_of(Conversation(items)) == [
        Turn("user", "Hi."),
        Turn("assistant", "Let me see.", calls=(OSLO, PATCH)),
        Turn("tool", outputs=(ToolOutput(OSLO, "4"), ToolOutput(PATCH, "Done."))),
        Turn("assistant", "Cold."),
    ]


def test_messages_of_a_user_stay_apart() -> None:
    items: list[InputItem] = [Message("user", "a"), Message("user", "b")]

    assert turns_of(Conversation(items)) == [Turn("user", "a"), Turn("user", "b")]


def test_instructions_come_first_and_developers_speak_as_the_system() -> None:
    items: list[InputItem] = [
        Message("system", "b"),
        Message("developer", "c"),
        Message("user", "d"),
    ]

    assert turns_of(Conversation(items, "a")) == [
        Turn("system", "a"),
        Turn("system", "b"),
        Turn("system", "c"),
        Turn("user", "d"),
    ]


def test_a_user_tells_the_summary_of_what_was_said_before() -> None:
    items: list[InputItem] = [Compaction("They greeted."), Message("user", "Go on.")]

    assert turns_of(Conversation(items)) == [
        Turn("user", "Summary of the conversation so far:\nThey greeted."),
        Turn("user", "Go on."),
    ]


@pytest.mark.parametrize(
    "item",
    [
        ReasoningItem("Hm."),
        ItemReference("msg_1", "input[0]"),
        AdditionalTools((WEATHER,)),
        UnknownItem("web_search_call"),
    ],
    ids=lambda item: type(item).__name__,
)
def test_items_that_are_not_for_the_model_leave_no_trace(item: InputItem) -> None:
    said: list[InputItem] = [Message("user", "a"), Message("assistant", "b"), OSLO]

    turns = turns_of(Conversation([said[0], item, said[1], item, said[2], item]))

    assert turns == turns_of(Conversation(said))


def test_a_recorded_turn_is_never_laid_out_again() -> None:
    turn = RecordedTurn((Message("assistant", "Ho."),), (1, 2))

    with pytest.raises(AssertionError, match="never laid out again"):
        turns_of(Conversation([turn]))


# --- Outputs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_outputs_are_put_in_the_order_of_their_calls(order: Sequence[int]) -> None:
    outputs = answers(CALLS, ["a", "b", "c"])
    items: list[InputItem] = [Message("user", "Hi."), *CALLS, *(outputs[i] for i in order)]

    turns = turns_of(Conversation(items))

    assert [output.text for output in turns[-1].outputs] == ["a", "b", "c"]


def test_an_output_ends_the_turn_of_its_call() -> None:
    items: list[InputItem] = [OSLO, CallOutput("call_1", "4"), BERGEN, CallOutput("call_2", "5")]

    assert turns_of(Conversation(items)) == [
        Turn("assistant", calls=(OSLO,)),
        Turn("tool", outputs=(ToolOutput(OSLO, "4"),)),
        Turn("assistant", calls=(BERGEN,)),
        Turn("tool", outputs=(ToolOutput(BERGEN, "5"),)),
    ]


def test_what_comes_between_a_call_and_its_output_comes_after_both() -> None:
    items: list[InputItem] = [OSLO, BERGEN, CallOutput("call_2", "5"), Message("user", "Quick!")]

    turns = turns_of(Conversation([*items, CallOutput("call_1", "4")]))

    assert turns == [
        Turn("assistant", calls=(OSLO, BERGEN)),
        Turn("tool", outputs=(ToolOutput(OSLO, "4"), ToolOutput(BERGEN, "5"))),
        Turn("user", "Quick!"),
    ]


def test_a_call_may_stay_without_output() -> None:
    items: list[InputItem] = [OSLO, BERGEN, CallOutput("call_2", "5"), TIME]

    assert turns_of(Conversation(items)) == [
        Turn("assistant", calls=(OSLO, BERGEN)),
        Turn("tool", outputs=(ToolOutput(BERGEN, "5"),)),
        Turn("assistant", calls=(TIME,)),
    ]


def test_an_output_that_answers_no_call_is_an_error() -> None:
    with pytest.raises(ConversationError, match="the output of 'call_1' answers no call"):
        turns_of(Conversation([Message("user", "Hi."), CallOutput("call_1", "4")]))


def test_the_outputs_of_a_sampled_turn_come_at_once_and_in_the_order_of_its_calls() -> None:
    items: list[InputItem] = [
        Message("user", "Quick!"),
        *reversed(answers([OSLO, PATCH], ["4", "Done."])),
    ]

    assert turns_after([OSLO, PATCH], items) == [
        Turn("tool", outputs=(ToolOutput(OSLO, "4"), ToolOutput(PATCH, "Done."))),
        Turn("user", "Quick!"),
    ]


def test_what_an_assistant_says_after_a_sampled_turn_is_a_turn_of_its_own() -> None:
    items: list[InputItem] = [Message("assistant", "Also:"), TIME, CallOutput("call_3", "noon")]

    assert turns_after([], items) == [
        Turn("assistant", "Also:", calls=(TIME,)),
        Turn("tool", outputs=(ToolOutput(TIME, "noon"),)),
    ]


def test_an_output_after_a_sampled_turn_that_made_no_such_call_is_an_error() -> None:
    with pytest.raises(ConversationError, match="'call_2' answers no call"):
        turns_after([OSLO], [CallOutput("call_2", "5")])


# --- Calls as text -------------------------------------------------------------------------------


def test_a_call_of_a_function_is_json_between_markers() -> None:
    assert call_text(OSLO) == (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    )


def test_a_call_without_arguments_has_an_empty_object() -> None:
    assert '"arguments": {}}' in call_text(FunctionCall("call_1", "now", ""))


def test_a_call_with_free_text_has_it_as_it_is() -> None:
    call = CustomToolCall("call_1", "say", 'a "b"\n\n<c>\\n')

    assert call_text(call) == '<tool_call>\n{"name": "say"}\na "b"\n\n<c>\\n\n</tool_call>'


@pytest.mark.parametrize(
    "call",
    [
        FunctionCall("call_1", "read", "{}", namespace="files"),
        CustomToolCall("call_1", "read", "x", namespace="files"),
    ],
)
def test_a_tool_of_a_namespace_is_called_by_its_qualified_name(call: InputItem) -> None:
    assert isinstance(call, FunctionCall | CustomToolCall)
    assert '{"name": "files.read"' in call_text(call)


def test_calls_follow_the_text_of_their_turn_in_the_order_made() -> None:
    turn = Turn("assistant", "Well.\n", calls=(PATCH, TIME))

    assert text_of(turn) == f"Well.\n{call_text(PATCH)}\n{call_text(TIME)}"


# --- Tools as text -------------------------------------------------------------------------------

SEARCH = FunctionTool(
    "search",
    "Search the web",
    {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to look for"},
            "kind": {"enum": ["news", "all"]},
            "limit": {"type": "integer"},
        },
        "required": ["query"],
    },
)


def free_form(name: str, description: str | None = None) -> CustomTool:
    return CustomTool(name, description, CustomFormat(), {"type": "custom", "name": name})


def told(*tools: CallableTool) -> str:
    turns = with_tools_told([Turn("system", "Be terse."), Turn("user", "Hi.")], tools)
    assert turns[1:] == [Turn("user", "Hi.")]
    return turns[0].text


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"properties": []}, "f()"),
        ({"properties": "city"}, "f()"),
        ({"properties": {"city": {}}, "required": -1}, "f(city?: any)"),
        ({"properties": {"city": {}}, "required": "city"}, "f(city?: any)"),
        ({"properties": {"city": False}, "required": [["city"], "city"]}, "f(city: false)"),
        ({"properties": {"city": {"description": 5}}}, "f(city?: any):  city: 5."),
    ],
)
def test_what_is_no_schema_is_not_told(parameters: JsonObject, told: str) -> None:
    (system,) = with_tools_told([], [FunctionTool("f", parameters=parameters)])

    assert f"\n{told}\n" in system.text


def test_functions_are_told_as_signatures() -> None:
    text = told(WEATHER, SEARCH, FunctionTool("now"))

    assert text == (
        """\
Be terse.

You can call these tools:
get_weather(city: string): Current weather in a city
search(query: string, kind?: {"enum": ["news", "all"]}, limit?: integer): Search the web \
query: What to look for.
now()

To call a tool, write:
<tool_call>
{"name": "tool name", "arguments": {"argument": "value"}}
</tool_call>"""
    )


def test_tools_that_take_free_text_are_told_apart() -> None:
    text = told(free_form("apply_patch", "Edit files"), FunctionTool("now"), free_form("say"))

    assert text == (
        """\
Be terse.

You can call these tools:
now()

To call a tool, write:
<tool_call>
{"name": "tool name", "arguments": {"argument": "value"}}
</tool_call>

You can call these tools with free text:
apply_patch: Edit files
say

To call a tool with free text, write:
<tool_call>
{"name": "tool name"}
free text
</tool_call>"""
    )


def test_of_a_kind_of_tool_that_there_is_none_of_nothing_is_told() -> None:
    assert "free text" not in told(WEATHER)
    assert "arguments" not in told(free_form("say"))
    assert told() == "Be terse."


def test_without_a_system_turn_the_tools_are_the_system_turn() -> None:
    turns = with_tools_told([Turn("user", "Hi.")], [WEATHER])

    assert [turn.role for turn in turns] == ["system", "user"]
    assert turns[0].text.startswith("You can call these tools:")
