import json
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sampler.tool_calls import (
    BEGIN,
    END,
    Arguments,
    CallBegan,
    CallEnded,
    Parsed,
    Text,
    ToolCallParser,
)
from tests.tiny_model import call_text

OSLO = call_text("get_weather", '{"city": "Oslo"}')
MARKERS_IN_A_STRING = call_text("say", '{"text": "</tool_call> <tool_call>\\n{\\"}", "n": {}}')


def joined(events: list[Parsed]) -> list[Parsed]:
    """Join pieces of one text, and pieces of one call's arguments."""
    whole: list[Parsed] = []
    for event in events:
        match whole, event:
            case [*_, Text(before)], Text(after):
                whole[-1] = Text(before + after)
            case [*_, Arguments(before)], Arguments(after):
                whole[-1] = Arguments(before + after)
            case _:
                whole.append(event)
    return whole


def parse(*pieces: str, flush: bool = True) -> list[Parsed]:
    parser = ToolCallParser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined(events + (parser.flush() if flush else []))


def cut(text: str, at: list[int]) -> list[str]:
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in at)})
    return [text[a:b] for a, b in pairwise(places)]


def call(name: str, arguments: str) -> list[Parsed]:
    return [CallBegan(name), Arguments(arguments), CallEnded()]


OSLO_CALL = call("get_weather", '{"city": "Oslo"}')

TURNS: dict[str, tuple[str, list[Parsed]]] = {
    "text": ("Hello, world.\n", [Text("Hello, world.\n")]),
    "white space and text": ("\n\n  Hello", [Text("\n\n  Hello")]),
    "a call": (OSLO, OSLO_CALL),
    "white space and a call": (f" \n\t{OSLO}", OSLO_CALL),
    "text and a call": (f"Let me see.\n{OSLO}", [Text("Let me see.\n"), *OSLO_CALL]),
    "text with a space and a call": (f"Let me see. {OSLO}", [Text("Let me see. "), *OSLO_CALL]),
    "two calls": (f"{OSLO}\n{call_text('f', '{}')}", [*OSLO_CALL, *call("f", "{}")]),
    "two calls with nothing between": (OSLO + OSLO, OSLO_CALL + OSLO_CALL),
    "text after a call": (f"{OSLO}\nDone.", [*OSLO_CALL, Text("\nDone.")]),
    "text between calls": (
        f"{OSLO}\nand \n{OSLO}",
        [*OSLO_CALL, Text("\nand \n"), *OSLO_CALL],
    ),
    "white space after a call": (f"{OSLO}\n\n ", OSLO_CALL),
    "a call without line breaks": (
        '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>',
        call("f", '{"a":1}'),
    ),
    "a call with many line breaks": (
        '<tool_call>\n {\n "name" :\t"f" ,\n "arguments" : {"a" : 1} \n}\n\n</tool_call>',
        call("f", '{"a" : 1}'),
    ),
    "an escaped name": (call_text(r"get\u005fweather\"\\", "{}"), call('get_weather"\\', "{}")),
    "markers in a string": (
        MARKERS_IN_A_STRING,
        call("say", '{"text": "</tool_call> <tool_call>\\n{\\"}", "n": {}}'),
    ),
    "a doubled bracket": (f"<{OSLO}", [Text("<"), *OSLO_CALL]),
    "a marker begun twice": (f"<tool_<tool{OSLO}", [Text("<tool_<tool"), *OSLO_CALL]),
    "prose that begins a marker": ("a <tool b", [Text("a <tool b")]),
    "prose that ends in a begun marker": ("a <tool_call", [Text("a <tool_call")]),
    "only a begun marker": ("<tool", [Text("<tool")]),
    "an end marker": (f"a {END} b", [Text(f"a {END} b")]),
    "a body that is no call": (f"{BEGIN}\nhm{END} b", [Text(f"{BEGIN}\nhm{END} b")]),
    "a body that is no call, then a call": (
        f"{BEGIN}{END}\n{OSLO}",
        [Text(f"{BEGIN}{END}\n"), *OSLO_CALL],
    ),
    "a body that never ends": (f'{BEGIN}\n{{"nam', [Text(f'{BEGIN}\n{{"nam')]),
    "a name with an end marker in it": (
        call_text(f"a{END}b", "{}"),
        [Text(call_text(f"a{END}b", "{}"))],
    ),
}


@pytest.mark.parametrize(("text", "events"), TURNS.values(), ids=TURNS)
def test_a_turn_fed_whole_gives_its_text_and_calls(text: str, events: list[Parsed]) -> None:
    assert parse(text) == events


@pytest.mark.parametrize(("text", "events"), TURNS.values(), ids=TURNS)
def test_a_turn_fed_by_the_character_gives_the_same(text: str, events: list[Parsed]) -> None:
    assert parse(*text) == events


@pytest.mark.parametrize(("text", "events"), TURNS.values(), ids=TURNS)
def test_a_turn_cut_in_two_anywhere_gives_the_same(text: str, events: list[Parsed]) -> None:
    for at in range(len(text) + 1):
        assert parse(text[:at], text[at:]) == events


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(turn=st.sampled_from(list(TURNS.values())), at=st.lists(st.integers(0, 10**6), max_size=12))
def test_a_turn_cut_anyhow_gives_the_same(turn: tuple[str, list[Parsed]], at: list[int]) -> None:
    text, events = turn

    assert parse(*cut(text, at)) == events


PIECES = [BEGIN, END, OSLO, "<tool", "_call>", "</", "\n", " ", "a", "{", "}", '"', "\\", "<", "🎉"]
PIECES += ['{"name": "', "f", '", "arguments": ', '{"a": [']


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    text=st.lists(st.sampled_from(PIECES), max_size=10).map("".join),
    at=st.lists(st.integers(0, 10**6), max_size=6),
)
@example(text='<tool_call>{"name": "</tool_call>", "arguments": {', at=list(range(60)))
def test_whatever_the_text_the_cuts_do_not_matter(text: str, at: list[int]) -> None:
    assert parse(*cut(text, at)) == parse(text)


# --- Holding back --------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(1, len(BEGIN)))
def test_what_may_become_a_marker_is_held_back_and_nothing_else(length: int) -> None:
    parser = ToolCallParser()

    events = parser.feed("text " + BEGIN[:length])

    assert events == [Text("text ")]


@pytest.mark.parametrize("length", range(1, len(BEGIN)))
def test_a_begun_marker_that_turns_out_to_be_prose_is_released_whole(length: int) -> None:
    parser = ToolCallParser()
    parser.feed(BEGIN[:length])

    assert parser.feed("~") == [Text(BEGIN[:length] + "~")]


def test_the_longest_tail_that_may_become_a_marker_is_held() -> None:
    parser = ToolCallParser()

    events = parser.feed("<tool_<tool_c")

    assert events == [Text("<tool_")]


def test_arguments_come_as_they_are_sampled() -> None:
    parser = ToolCallParser()
    parser.feed('<tool_call>\n{"name": "f", "arguments": ')

    assert parser.feed('{"city"') == [CallBegan("f"), Arguments('{"city"')]
    assert parser.feed(': "O') == [Arguments(': "O')]
    assert parser.feed('slo"}') == [Arguments('slo"}'), CallEnded()]


def test_a_call_is_announced_when_its_name_is_known_and_its_arguments_begin() -> None:
    parser = ToolCallParser()

    assert parser.feed('<tool_call>\n{"name": "get_weather", "arguments": ') == []
    assert parser.feed("{") == [CallBegan("get_weather"), Arguments("{")]


def test_a_parser_knows_whether_it_is_in_a_call() -> None:
    parser = ToolCallParser()

    known = []
    for piece in ["a <tool_call", ">", '\n{"name": "f", "arguments": {', "}}", "\n", END, "a"]:
        parser.feed(piece)
        known.append(parser.is_in_call)

    assert known == [False, True, True, True, True, False, False]


# --- Arguments, byte for byte --------------------------------------------------------------------

ARGUMENTS = {
    "nothing": "{}",
    "a number too large for a float": '{"n": 1e400, "m": -0.0, "k": 1.0}',
    "nested quotes": r'{"s": "he said \"{\\\"a\\\": 1}\" }"}',
    "a string that ends in backslashes": r'{"a": "\\", "b": "\\\\"}',
    "escapes": r'{"s": "\u003c/tool_call\u003e \n\t\/ \ud83c\udf89"}',
    "characters of three and four bytes": '{"城市": "奥斯陆 🎉"}',
    "braces and brackets in strings": '{"a": "}", "b": "{[", "}": ["]", {"{": "\\"}"}]}',
    "nested objects and lists": '{"a": {"b": [1, [2, {"c": []}], {}]}, "d": null}',
    "spacing of its own": '{ "b" :1,\n\t"a":  [ ] }',
    "markers in a key": '{"</tool_call>": {"<tool_call>": "</tool_call>"}}',
}


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
def test_the_pieces_concatenate_to_what_was_sampled(arguments: str) -> None:
    text = call_text("f", arguments)

    assert parse(*text) == call("f", arguments)
    assert parse(text) == call("f", arguments)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.sampled_from([BEGIN, END]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@settings(deadline=None)
@given(
    arguments=st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=4),
    plain=st.booleans(),
    at=st.lists(st.integers(0, 10**6), max_size=8),
)
def test_any_object_comes_through_as_it_is(
    arguments: dict[str, object], plain: bool, at: list[int]
) -> None:
    written = json.dumps(arguments, ensure_ascii=plain)

    assert parse(*cut(call_text("f", written), at)) == call("f", written)


# --- Bodies that are no calls --------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        "",
        "get_weather(city='Oslo')",
        '[{"name": "f", "arguments": {}}]',
        '{"name": "f"}',
        '{"name": "f", "arguments": null}',
        '{"name": "f", "arguments": "{}"}',
        '{"name": "f", "parameters": {}}',
        '{"arguments": {}, "name": "f"}',
        '{"name": f, "arguments": {}}',
        '{"name": "a\nb", "arguments": {}}',
        r'{"name": "a\xb", "arguments": {}}',
        r'{"name": "a\u12g4", "arguments": {}}',
        '{"name": "f" "arguments": {}}',
    ],
)
def test_a_body_of_another_form_comes_back_as_the_text_it_is(body: str) -> None:
    text = f"{BEGIN}\n{body}\n{END}"

    assert parse(text) == [Text(text)]
    assert parse(*text) == [Text(text)]


# --- The end of the text -------------------------------------------------------------------------


def written_by(event: Parsed) -> str:
    """Return the text of ``event``, of a call's ends as ``call_text`` writes them."""
    match event:
        case Text(text) | Arguments(text):
            return text
        case CallBegan(name):
            return f'<tool_call>\n{{"name": "{name}", "arguments": '
        case CallEnded():
            return "}\n</tool_call>"


@pytest.mark.parametrize(
    "text",
    [f"Let me see.\n{OSLO}", f"a{MARKERS_IN_A_STRING}", f"{BEGIN}\nno call{END} <tool", "a <tool"],
)
@pytest.mark.parametrize("by_character", [False, True])
def test_the_end_may_come_anywhere_and_nothing_is_lost_or_invented(
    text: str, by_character: bool
) -> None:
    for end in range(1, len(text) + 1):
        events = parse(*text[:end]) if by_character else parse(text[:end])

        told = "".join(map(written_by, events))
        # Of a call whose arguments are complete, what is still to be sampled is known.
        assert told.startswith(text[:end]) if CallEnded() in events else told == text[:end]


def test_a_call_that_is_cut_off_stays_unfinished() -> None:
    events = parse('<tool_call>\n{"name": "f", "arguments": {"a": "</tool')

    assert events == [CallBegan("f"), Arguments('{"a": "</tool')]


@pytest.mark.parametrize("tail", ["", "}", "}\n", "}\n</tool_cal", "}\n</tool_call>"])
def test_a_call_whose_arguments_are_complete_is_complete(tail: str) -> None:
    events = parse(f'<tool_call>\n{{"name": "f", "arguments": {{}}{tail}')

    assert events == call("f", "{}")


def test_a_call_that_is_cut_off_before_its_name_is_known_is_text() -> None:
    assert parse('<tool_call>\n{"name": "get_') == [Text('<tool_call>\n{"name": "get_')]


def test_the_end_of_nothing_is_nothing() -> None:
    assert parse() == []
    assert parse("") == []
