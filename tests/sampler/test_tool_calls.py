import json
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol.items import CustomToolCall, FunctionCall
from sampler import conversation
from sampler.tool_calls import (
    BEGIN,
    END,
    Arguments,
    CallBegan,
    CallEnded,
    Parsed,
    Text,
    Thought,
    ThoughtEnded,
    TurnParser,
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
            case [*_, Thought(before)], Thought(after):
                whole[-1] = Thought(before + after)
            case [*_, Arguments(before)], Arguments(after):
                whole[-1] = Arguments(before + after)
            case _:
                whole.append(event)
    return whole


def parse(*pieces: str, parser: TurnParser | None = None) -> list[Parsed]:
    parser = parser or TurnParser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined(events + parser.flush())


def thinking(*, may_call: bool = True) -> TurnParser:
    return TurnParser(may_call=may_call, thinks=True)


def cut(text: str, at: list[int]) -> list[str]:
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in at)})
    return [text[a:b] for a, b in pairwise(places)]


def call(name: str, arguments: str) -> list[Parsed]:
    return [CallBegan(name), Arguments(arguments), CallEnded()]


def custom_text(name: str, text: str) -> str:
    return conversation.call_text(CustomToolCall("call_1", name, text))


def custom(name: str, *text: str) -> list[Parsed]:
    return [CallBegan(name, is_custom=True), *map(Arguments, text), CallEnded()]


OSLO_CALL = call("get_weather", '{"city": "Oslo"}')
PATCH = "*** Begin Patch\n*** Add File: a\n+1\n*** End Patch"

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
    "a body that never ends": (f'{BEGIN}\n{{"nam', []),
    "an input": (custom_text("apply_patch", PATCH), custom("apply_patch", PATCH)),
    "inputs and arguments": (
        f"Hi.\n{custom_text('run', 'a()')}\n{OSLO}\n{custom_text('run', 'b()')}",
        [Text("Hi.\n"), *custom("run", "a()"), *OSLO_CALL, *custom("run", "b()")],
    ),
    "an input of nothing": (custom_text("f", ""), custom("f")),
    "an input of not even a line": (f'{BEGIN}\n{{"name": "f"}}\n{END}', custom("f")),
    "an input of line breaks": (custom_text("f", "\n\n"), custom("f", "\n\n")),
    "an input with line breaks around": (custom_text("f", "\na\n"), custom("f", "\na\n")),
    "an input with markers in it": (
        custom_text("f", f"a{END}\n {END}\n{BEGIN}\n{{"),
        custom("f", f"a{END}\n {END}\n{BEGIN}\n{{"),
    ),
    "an input that begins like the marker": (
        custom_text("f", "</tool_calls>\n</tool"),
        custom("f", "</tool_calls>\n</tool"),
    ),
    "an input that is JSON": (custom_text("f", '{"a": 1}'), custom("f", '{"a": 1}')),
    "an input written loosely": (
        f'{BEGIN}{{ "name":"f" }}\na\n{END}',
        custom("f", "a"),
    ),
    "white space after a name": (
        f'{BEGIN}\n{{"name": "f"}} \na\n{END}',
        [Text(f'{BEGIN}\n{{"name": "f"}} \na\n{END}')],
    ),
    "thoughts where there are none": ("<think>a</think>b", [Text("<think>a</think>b")]),
    "a marker, then a call": (f"{BEGIN}\n{OSLO}", [Text(f"{BEGIN}\n"), *OSLO_CALL]),
    "a marker in JSON": (f'{{"a": "{BEGIN}", "b": 1}}', [Text(f'{{"a": "{BEGIN}", "b": 1}}')]),
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
PIECES += ['{"name": "', "f", '", "arguments": ', '{"a": [', '"}', "\n</", "<think>", "</think>"]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    text=st.lists(st.sampled_from(PIECES), max_size=10).map("".join),
    at=st.lists(st.integers(0, 10**6), max_size=6),
)
@example(text='<tool_call>{"name": "</tool_call>", "arguments": {', at=list(range(60)))
@example(text='<tool_call>{"name": "f"}\n\n</tool\n</tool_call>', at=list(range(60)))
@pytest.mark.parametrize("may_call", [True, False])
@pytest.mark.parametrize(("thinks", "think_is_open"), [(0, 0), (1, 0), (1, 1)])
def test_whatever_the_text_the_cuts_do_not_matter(
    text: str, at: list[int], may_call: bool, thinks: int, think_is_open: int
) -> None:
    def new_parser() -> TurnParser:
        return TurnParser(may_call=may_call, thinks=bool(thinks), think_is_open=bool(think_is_open))

    assert parse(*cut(text, at), parser=new_parser()) == parse(text, parser=new_parser())


# --- Thoughts ------------------------------------------------------------------------------------

THOUGHTS: dict[str, tuple[str, list[Parsed]]] = {
    "thoughts and text": (
        "<think>\nHm.\n\nWell.\n</think>\n\nHi.\n",
        [Thought("Hm.\n\nWell."), ThoughtEnded(), Text("Hi.\n")],
    ),
    "without line breaks": (
        "<think>Hm.</think>Hi.",
        [Thought("Hm."), ThoughtEnded(), Text("Hi.")],
    ),
    "after white space": (" \n<think>Hm.</think>", [Thought("Hm."), ThoughtEnded()]),
    "with spaces at the ends": (
        "<think>\n Hm. \n</think>\n  Hi.",
        [Thought(" Hm. "), ThoughtEnded(), Text("  Hi.")],
    ),
    "and a call": (
        f"<think>Hm.</think>\n\n{OSLO}",
        [Thought("Hm."), ThoughtEnded(), *OSLO_CALL],
    ),
    "and an input": (
        f"<think>Hm.</think>{custom_text('f', 'a')}",
        [Thought("Hm."), ThoughtEnded(), *custom("f", "a")],
    ),
    "of a call": (
        f"<think>I call\n{OSLO}\n</think>\nHi.",
        [Thought(f"I call\n{OSLO}"), ThoughtEnded(), Text("Hi.")],
    ),
    "of their own marker": (
        "<think><think></think>Hi.",
        [Thought("<think>"), ThoughtEnded(), Text("Hi.")],
    ),
    "that begin the end marker": (
        "<think>a </thin\n</</think>",
        [Thought("a </thin\n</"), ThoughtEnded()],
    ),
    "of nothing": ("<think>\n\n</think>\n\nHi.", [Text("Hi.")]),
    "twice": (
        "<think>a</think><think>b</think>",
        [Thought("a"), ThoughtEnded(), Text("<think>b</think>")],
    ),
    "that do not come first": ("Hi. <think>a</think>", [Text("Hi. <think>a</think>")]),
    "that never end": ("<think>\na\n\nb\n", [Thought("a\n\nb")]),
    "that never end, in a marker": ("<think>a\n</thi", [Thought("a\n</thi")]),
    "that do not begin": ("\n<thin", [Text("\n<thin")]),
    "none": ("Hi.", [Text("Hi.")]),
    "none, but white space": (" \n Hi.", [Text(" \n Hi.")]),
    "none, but a call": (f"\n{OSLO}", OSLO_CALL),
}


@pytest.mark.parametrize(("text", "events"), THOUGHTS.values(), ids=THOUGHTS)
def test_thoughts_come_apart_from_the_rest(text: str, events: list[Parsed]) -> None:
    assert parse(text, parser=thinking()) == events


@pytest.mark.parametrize(("text", "events"), THOUGHTS.values(), ids=THOUGHTS)
def test_thoughts_cut_in_two_anywhere_give_the_same(text: str, events: list[Parsed]) -> None:
    for at in range(len(text) + 1):
        assert parse(text[:at], text[at:], parser=thinking()) == events
    assert parse(*text, parser=thinking()) == events


def test_a_turn_may_begin_inside_thoughts() -> None:
    parser = TurnParser(thinks=True, think_is_open=True)

    events = parse("\nHm.\n</think>\n\n", OSLO, parser=parser)

    assert events == [Thought("Hm."), ThoughtEnded(), *OSLO_CALL]


def test_thoughts_come_before_text_that_cannot_call() -> None:
    events = parse(f"<think>Hm.</think>\n\n{OSLO}\n", parser=thinking(may_call=False))

    assert events == [Thought("Hm."), ThoughtEnded(), Text(f"{OSLO}\n")]


def test_thoughts_come_as_they_are_sampled_without_the_line_break_at_their_end() -> None:
    parser = thinking()

    assert parser.feed("<think>\nHm") == [Thought("Hm")]
    assert parser.feed(".\n") == [Thought(".")]
    assert parser.feed("So\n\n</thi") == [Thought("\nSo")]
    assert parser.feed("nk>") == [ThoughtEnded()]
    assert parser.feed("\n") == []
    assert parser.feed("\nHi") == [Text("Hi")]


def test_a_parser_knows_whether_it_is_in_thoughts() -> None:
    parser = thinking()

    known = []
    for piece in ["\n<thi", "nk>", "a <tool_call>", "</think", ">", "\n", "a"]:
        parser.feed(piece)
        known.append(parser.is_in_thought)

    assert known == [False, True, True, True, False, False, False]


# --- Holding back --------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(1, len(BEGIN)))
def test_what_may_become_a_marker_is_held_back_and_nothing_else(length: int) -> None:
    parser = TurnParser()

    events = parser.feed("text " + BEGIN[:length])

    assert events == [Text("text ")]


@pytest.mark.parametrize("length", range(1, len(BEGIN)))
def test_a_begun_marker_that_turns_out_to_be_prose_is_released_whole(length: int) -> None:
    parser = TurnParser()
    parser.feed(BEGIN[:length])

    assert parser.feed("~") == [Text(BEGIN[:length] + "~")]


def test_the_longest_tail_that_may_become_a_marker_is_held() -> None:
    parser = TurnParser()

    events = parser.feed("<tool_<tool_c")

    assert events == [Text("<tool_")]


def test_arguments_come_as_they_are_sampled() -> None:
    parser = TurnParser()
    parser.feed('<tool_call>\n{"name": "f", "arguments": ')

    assert parser.feed('{"city"') == [CallBegan("f"), Arguments('{"city"')]
    assert parser.feed(': "O') == [Arguments(': "O')]
    assert parser.feed('slo"}') == [Arguments('slo"}'), CallEnded()]


def test_a_call_is_announced_when_its_name_is_known_and_its_arguments_begin() -> None:
    parser = TurnParser()

    assert parser.feed('<tool_call>\n{"name": "get_weather", "arguments": ') == []
    assert parser.feed("{") == [CallBegan("get_weather"), Arguments("{")]


@pytest.mark.parametrize("length", range(1, len(END) + 1))
def test_of_an_input_what_may_become_the_end_marker_is_held_back(length: int) -> None:
    parser = TurnParser()
    parser.feed(f'{BEGIN}\n{{"name": "f"}}\n')

    assert parser.feed("a" + f"\n{END}~"[:length]) == [Arguments("a")]
    assert parser.feed("~") == [Arguments(f"\n{END}"[:length] + "~")]


def test_an_input_comes_as_it_is_sampled() -> None:
    parser = TurnParser()

    assert parser.feed('<tool_call>\n{"name": "f"') == []
    assert parser.feed("}") == []
    assert parser.feed("\n") == [CallBegan("f", is_custom=True)]
    assert parser.feed("a </tool_call>") == [Arguments("a </tool_call>")]
    assert parser.feed("\n") == []
    assert parser.feed("b\n</tool_call>") == [Arguments("\nb"), CallEnded()]


@pytest.mark.parametrize(
    ("head", "wrong"),
    [
        ("", "~"),
        ("\n", "hm"),
        ("\n{", "}"),
        ('{"', "b"),
        ('{"name"', "}"),
        ('{"name": ', "f"),
        ('{"name": "a', "\n"),
        ('{"name": "a\\', "x"),
        (r'{"name": "a\u12', "g"),
        ('{"name": "a"', "~"),
        ('{"name": "a", "', "b"),
        ('{"name": "a", "arguments": ', "["),
        ('{"name": "a"}', "~"),
    ],
)
def test_a_marker_is_released_as_soon_as_no_call_can_follow(head: str, wrong: str) -> None:
    parser = TurnParser()

    assert parser.feed(BEGIN + head) == []
    assert joined(parser.feed(wrong)) == [Text(BEGIN + head + wrong)]


def test_a_parser_knows_whether_it_is_in_a_call() -> None:
    parser = TurnParser()

    known = []
    for piece in ["a <tool_call", ">", '\n{"name": "f", "arguments": {', "}}", "\n", END, "a"]:
        parser.feed(piece)
        known.append(parser.is_in_call)

    assert known == [False, True, True, True, True, False, False]


def test_a_parser_knows_whether_it_is_in_a_call_of_a_free_form_tool() -> None:
    parser = TurnParser()

    known = []
    for piece in ["<tool_call>", '\n{"name": "f"}', "\n", "a", "\n", END, "a"]:
        parser.feed(piece)
        known.append(parser.is_in_call)

    assert known == [True, True, True, True, True, False, False]


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


@pytest.mark.slow
@settings(deadline=None)
@given(
    text=st.lists(st.sampled_from([*PIECES, "\n"]), max_size=8).map("".join),
    at=st.lists(st.integers(0, 10**6), max_size=8),
)
def test_any_input_comes_through_as_it_is(text: str, at: list[int]) -> None:
    said = f"\n{text}".partition(f"\n{END}")[0][1:]  # up to the end marker, if it has one

    events = parse(*cut(custom_text("f", text), at))

    expected = custom("f", said) if said else custom("f")
    assert events[: len(expected)] == expected


@pytest.mark.parametrize("name", ["f", "server.get-weather_2"])
@pytest.mark.parametrize("namespace", [None, "codex"])
def test_a_call_is_read_as_it_is_written(name: str, namespace: str | None) -> None:
    qualified = name if namespace is None else f"{namespace}.{name}"
    written = conversation.call_text(FunctionCall("call_1", name, '{"a": 1}', namespace))
    written_custom = conversation.call_text(CustomToolCall("call_1", name, "a\nb", namespace))

    assert written == call_text(qualified, '{"a": 1}')
    assert parse(written) == call(qualified, '{"a": 1}')
    assert parse(written_custom) == custom(qualified, "a\nb")


# --- Where text is -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        f"\n Let me see.\n{OSLO}\nand {BEGIN}hm\n{custom_text('f', 'x')}\n\nyes <tool",
        f"<think>\na\n</think>\n\n b <{OSLO}{OSLO} c",
    ],
)
@pytest.mark.parametrize("length", [1, 2, 7, 1000])
def test_text_knows_where_it_was(text: str, length: int) -> None:
    parser = thinking()
    pieces = [text[at : at + length] for at in range(0, len(text), length)]

    events = [event for piece in pieces for event in parser.feed(piece)] + parser.flush()

    texts = [event for event in events if isinstance(event, Text)]
    assert texts
    assert all(text[t.start :].startswith(t.text) for t in texts)


# --- Bodies that are no calls --------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        "",
        "get_weather(city='Oslo')",
        '[{"name": "f", "arguments": {}}]',
        '{"name": "f"} and more',
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
        case Thought() | ThoughtEnded():
            raise AssertionError("there are no thoughts in these texts")


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
        _, _, begun = text[:end].rpartition(BEGIN)
        # Of a call whose arguments are complete, what is still to be sampled is known; a call of
        # which not even the tool is known was never made.
        if CallEnded() in events:
            assert told.startswith(text[:end])
        elif told != text[:end]:
            assert told + BEGIN + begun == text[:end]
            assert CallBegan not in map(type, parse(BEGIN + begun))


def test_a_call_that_is_cut_off_stays_unfinished() -> None:
    events = parse('<tool_call>\n{"name": "f", "arguments": {"a": "</tool')

    assert events == [CallBegan("f"), Arguments('{"a": "</tool')]


@pytest.mark.parametrize("tail", ["", "}", "}\n", "}\n</tool_cal", "}\n</tool_call>"])
def test_a_call_whose_arguments_are_complete_is_complete(tail: str) -> None:
    events = parse(f'<tool_call>\n{{"name": "f", "arguments": {{}}{tail}')

    assert events == call("f", "{}")


def test_a_call_that_is_cut_off_before_its_name_is_known_was_never_made() -> None:
    assert parse('Hm.\n<tool_call>\n{"name": "get_') == [Text("Hm.\n")]


@pytest.mark.parametrize("end", ["", "\n", "\n</tool_cal"])
def test_an_input_that_is_cut_off_stays_unfinished(end: str) -> None:
    events = parse(f'{BEGIN}\n{{"name": "f"}}\na{end}')

    assert events == [CallBegan("f", is_custom=True), Arguments(f"a{end}")]


def test_the_end_of_nothing_is_nothing() -> None:
    assert parse() == []
    assert parse("") == []


# --- A turn that ends inside a call --------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hm.<tool_call>", [Text("Hm.<tool_call>")]),
        ('<tool_call>\n{"name": "get_w', [Text('<tool_call>\n{"name": "get_w')]),
        (OSLO.partition('lo"')[0], call("get_weather", '{"city": "Os')),
        (OSLO.partition("}")[0], call("get_weather", '{"city": "Oslo"')),
        (OSLO.partition("</")[0], call("get_weather", '{"city": "Oslo"}')),
        (f"{OSLO}\n<tool_ca", [*call("get_weather", '{"city": "Oslo"}'), Text("\n<tool_ca")]),
        ('<tool_call>\n{"name": "sh"}\nls', [CallBegan("sh", True), Arguments("ls"), CallEnded()]),
        ('<tool_call>\n{"name": "sh"}\n', [CallBegan("sh", True), CallEnded()]),
        ("Hm.", [Text("Hm.")]),
    ],
)
def test_where_a_model_ends_its_turn_what_it_began_is_what_it_is(
    text: str, expected: list[Parsed]
) -> None:
    parser = TurnParser()

    events = [event for letter in text for event in parser.feed(letter)] + parser.end()

    assert joined(events) == expected
