"""Calls of free-form tools that bring a grammar for their input."""

import re

import numpy as np
import pytest

from protocol.tools import CustomTool
from sampler.grammar import GrammarCompiler, GrammarError
from sampler.params import Constraint
from sampler.tool_calls import BEGIN, END
from tests.sampler.matching import (
    BYTE_LEVEL,
    STOP_IDS,
    WideTokenizer,
    admits,
    admits_text,
    cut_otherwise,
    free_form_tool,
    input_text,
    may_end,
    new_matcher,
    num_accepted,
    refused,
)
from tests.sampler.smollm2 import smollm2_tokenizer
from tests.tiny_model import WEATHER, call_text

# The grammars that Codex declares, apply_patch from 0.87 on and exec from 0.171 on.
APPLY_PATCH = r"""start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
EXEC = r"""start: pragma_source | plain_source
pragma_source: PRAGMA_LINE NEWLINE SOURCE
plain_source: SOURCE

PRAGMA_LINE: /[ \t]*\/\/ @exec:[^\r\n]*/
NEWLINE: /\r?\n/
SOURCE: /[\s\S]+/
"""
# All names are ours as well.
SUM = r"""start: turn
turn: call ("+" call)*
call: TEXT | "(" turn ")"
TEXT: /[0-9]+/
%ignore / /
"""
TOOLS = {
    "apply_patch": free_form_tool("apply_patch", "lark", APPLY_PATCH),
    "exec": free_form_tool("exec", "lark", EXEC),
    "sum": free_form_tool("sum", "lark", SUM),
    "day": free_form_tool("day", "regex", r"^\d{4}-\d\d(/\d\d)?$"),
    "lines": free_form_tool("lines", "regex", r"([a-z]+\n?)*"),
}
ANY_TOOL = Constraint((WEATHER, *TOOLS.values()))

ADMITTED = {
    "apply_patch": [
        "*** Begin Patch\n*** Add File: a\n+x = 1\n+\n*** End Patch",
        "*** Begin Patch\n*** Delete File: é🎉\n*** End Patch\n",
        "*** Begin Patch\n*** Update File: a\n*** Move to: b\n@@ def f():\n-x\n+y\n*** End Patch",
        f"*** Begin Patch\n*** Add File: {END}\n+{END}\n+{BEGIN}\n*** End Patch",
    ],
    "exec": [
        "f();\ng();",
        "f();\n",
        "\n\n",
        "// @exec: {}\nf('</tool_call>');\n</tool_cal\n",
        " </tool_call>\n<tool_call>\n{",
    ],
    "sum": ["1", "1 +(2+ 3)", "((10))"],
    "day": ["2026-11", "2026-11/29"],
    "lines": ["", "a", "a\n", "a\nb", "a\nb\n"],
}
REFUSED = {
    "apply_patch": [
        "",
        "x",
        "*** Begin Patch\n*** End Patch",
        "*** Begin Patch\n*** Add File: a\n+",
    ],
    "exec": ["", f"f();\n{END}\ng();", f"{END} f();"],
    "sum": ["", "1+", "(1", "1\n", "one"],
    "day": ["", "2026", "2026-11\n", "on 2026-11", "2026-11/"],
    "lines": ["\n", "a\n\nb", "A"],
}


def cases(table: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(name, text) for name, texts in table.items() for text in texts]


@pytest.fixture(scope="module")
def byte_compiler() -> GrammarCompiler:
    return GrammarCompiler(BYTE_LEVEL)


@pytest.fixture(scope="module")
def smollm2_compiler() -> GrammarCompiler:
    return GrammarCompiler(smollm2_tokenizer())


# --- What is admitted ----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "text"), cases(ADMITTED))
def test_an_input_that_the_tool_s_grammar_admits_is_admitted(
    byte_compiler: GrammarCompiler, name: str, text: str
) -> None:
    assert admits_text(byte_compiler, ANY_TOOL, input_text(name, text))


@pytest.mark.parametrize(("name", "text"), cases(ADMITTED))
def test_it_is_admitted_in_a_real_vocabulary(
    smollm2_compiler: GrammarCompiler, name: str, text: str
) -> None:
    matcher = new_matcher(smollm2_compiler, ANY_TOOL)
    # Where only one text is possible, the mask gives its own tokens and no others.
    parts = [*input_text(name, "\0").partition("\0")]
    parts[1] = text

    assert admits(matcher, [i for part in parts for i in smollm2_tokenizer().encode_text(part)])


@pytest.mark.parametrize(("name", "text"), cases(ADMITTED))
@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_it_is_accepted_however_it_is_cut_into_tokens(
    smollm2_compiler: GrammarCompiler, name: str, text: str, length: int
) -> None:
    matcher = new_matcher(smollm2_compiler, ANY_TOOL)

    # No token reaches over the beginning of an input.
    head, tail = input_text(name, "\0").split("\0")

    for token_id in cut_otherwise(head, length) + cut_otherwise(text + tail, length):
        matcher.accept(token_id)

    assert may_end(matcher)


@pytest.mark.parametrize(("name", "text"), cases(REFUSED))
def test_any_other_input_is_refused(byte_compiler: GrammarCompiler, name: str, text: str) -> None:
    assert not admits_text(byte_compiler, ANY_TOOL, input_text(name, text))


@pytest.mark.parametrize(("name", "text"), cases(REFUSED))
def test_any_other_input_is_refused_in_a_real_vocabulary(
    smollm2_compiler: GrammarCompiler, name: str, text: str
) -> None:
    matcher = new_matcher(smollm2_compiler, ANY_TOOL)

    assert not admits(matcher, smollm2_tokenizer().encode_text(input_text(name, text)))


@pytest.mark.parametrize(
    ("name", "legal", "illegal"),
    [
        ("day", "2026-1", "x"),
        ("day", "2026-11", "-29"),
        ("sum", "1", "\n2"),
        ("apply_patch", "*** Begin Patch\n", "hm"),
        ("exec", f"f();\n{END}"[:-1], ">> 1"),
    ],
)
def test_an_input_is_refused_where_it_goes_wrong(
    byte_compiler: GrammarCompiler, name: str, legal: str, illegal: str
) -> None:
    matcher = new_matcher(byte_compiler, ANY_TOOL)
    head = input_text(name, "\0").split("\0")[0]

    left = refused(matcher, head + legal + illegal)

    assert illegal.endswith(left)
    assert left


def test_each_input_is_held_to_the_grammar_of_its_own_tool(byte_compiler: GrammarCompiler) -> None:
    calls = [
        input_text("day", "2026-11"),
        call_text("get_weather", '{"city": "Oslo"}'),
        input_text("sum", "1+1"),
        input_text("day", "2026-12"),
    ]

    assert admits_text(byte_compiler, ANY_TOOL, "Hm.\n" + "\n".join(calls))
    assert not admits_text(byte_compiler, ANY_TOOL, input_text("day", "1+1"))


@pytest.mark.parametrize("name", TOOLS)
def test_forced_calls_of_every_kind_can_be_made(byte_compiler: GrammarCompiler, name: str) -> None:
    constraint = Constraint((TOOLS[name],), 1, 1, thinks=True)

    assert admits_text(byte_compiler, constraint, input_text(name, ADMITTED[name][0]))
    assert not admits_text(byte_compiler, constraint, "Hm.")


def test_thoughts_may_hold_what_looks_like_a_call(byte_compiler: GrammarCompiler) -> None:
    thought = input_text("day", "tomorrow")
    constraint = Constraint((TOOLS["day"],), 1, 1, thinks=True)

    turn = f"<think>{thought}</think>{input_text('day', '2026-11')}"

    assert admits_text(byte_compiler, constraint, turn)


def test_a_turn_may_end_after_the_end_marker_and_nowhere_in_the_input(
    byte_compiler: GrammarCompiler,
) -> None:
    matcher = new_matcher(byte_compiler, Constraint((TOOLS["exec"],), 1, 1))

    for token_id in BYTE_LEVEL.encode_text(input_text("exec", "f();\ng();\n")):
        assert not may_end(matcher)
        matcher.accept(token_id)

    assert np.flatnonzero(matcher.mask()).tolist() == STOP_IDS


def test_control_tokens_are_never_input(smollm2_compiler: GrammarCompiler) -> None:
    tokenizer = smollm2_tokenizer()
    matcher = new_matcher(smollm2_compiler, Constraint((TOOLS["exec"],), 1, 1))

    for token_id in tokenizer.encode_text(input_text("exec", "f();\ng();\n")):
        assert not matcher.mask()[list(tokenizer.added_tokens.values())].any()
        matcher.accept(token_id)


def test_matchers_of_one_grammar_move_apart(byte_compiler: GrammarCompiler) -> None:
    ahead, behind = new_matcher(byte_compiler, ANY_TOOL), new_matcher(byte_compiler, ANY_TOOL)
    ids = BYTE_LEVEL.encode_text(input_text("day", "2026-11"))

    assert admits(ahead, ids)

    assert admits(behind, ids)


def test_a_token_that_the_mask_does_not_allow_is_an_error(byte_compiler: GrammarCompiler) -> None:
    matcher = new_matcher(byte_compiler, ANY_TOOL)
    num_accepted(matcher, BYTE_LEVEL.encode_text(f'{BEGIN}\n{{"name": "day"}}\n'))
    (token_id,) = BYTE_LEVEL.encode_text("x")

    with pytest.raises(RuntimeError, match="grammar refused"):
        matcher.accept(token_id)


# --- Grammars that cannot be compiled ------------------------------------------------------------


@pytest.mark.parametrize(
    ("syntax", "definition", "reason"),
    [
        ("regex", "(", "unclosed group"),
        ("regex", "a(?=b)", "look-ahead and look-behind"),
        ("regex", r"\bfoo\b", "lookarounds not supported"),
        ("regex", "[z-a]", "invalid character class range"),
        ("lark", "", "no start rule"),
        ("lark", 'begin: "a"', "no start rule"),
        ("lark", "start: x", 'unknown name: "x"'),
        ("lark", "start: A\nA: B\nB: A", "circular reference"),
        ("lark", "start: 'a'", "lexer error"),
        ("lark", "start: {", "Expected value"),
        ("lark", "start: @turn", "unknown grammar"),
        ("lark", "start: call_0_arguments", "unknown name"),
        ("lark", "%import python.NAME\nstart: NAME", "Unknown common regex"),
        ("lark", '{"grammars": []}', "expecting rule"),
        ("lark", '{"grammars": [{"lark_grammar": "start: /a/"}]}', "expecting rule"),
        ("lark", "start: <[1]>", "special tokens"),
        ("lark", 'start: "<" /<a>/ // <b>\n| <|im_end|>', "special tokens"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_an_error_that_says_why_in_one_line(
    byte_compiler: GrammarCompiler, syntax: str, definition: str, reason: str
) -> None:
    tool = free_form_tool("f", syntax, definition)

    with pytest.raises(GrammarError) as caught:
        byte_compiler.check(tool)

    message = str(caught.value)
    assert reason in message
    assert "\n" not in message
    assert "tool_call" not in message  # nothing of our own grammar
    assert not re.match(r"(at )?\d", message)


@pytest.mark.parametrize("tool", [*TOOLS.values(), free_form_tool("f")], ids=lambda tool: tool.name)
def test_a_tool_whose_grammar_can_be_compiled_passes_the_check(
    byte_compiler: GrammarCompiler, tool: CustomTool
) -> None:
    byte_compiler.check(tool)


@pytest.mark.parametrize(
    ("definition", "text"),
    [
        ('start: "<" A ">"\nA: /<a>/ // <b>', "<<a>>"),
        ('%llguidance {"no_forcing": true}\nstart: "a"', "a"),
        (r'start: "\"<" /\/</', '"</<'),
        ('start: %json {"type": "string"}', '"<a>"'),
        ('# <a>\nstart: "a" -> b', "a"),
    ],
)
def test_what_is_quoted_or_said_in_passing_is_no_special_token(
    byte_compiler: GrammarCompiler, definition: str, text: str
) -> None:
    constraint = Constraint((free_form_tool("f", "lark", definition),))

    assert admits_text(byte_compiler, constraint, input_text("f", text))


# --- Tokens over the ends of an input ------------------------------------------------------------

HEAD = f'{BEGIN}\n{{"name": "exec"}}\n'
WIDE = [")\n", ")\n</", "\n\n", "\n</", "\n</tool", INPUT_END := f"\n{END}", f"){INPUT_END}"]
WIDE += ['"}\n', '"}\nf', f"{INPUT_END}\n", ">\n", "\n</tool_call>\n<", "_call>"]


@pytest.fixture(scope="module")
def wide_tokenizer() -> WideTokenizer:
    """Bytes, and tokens that reach over the ends of an input."""
    return WideTokenizer(WIDE)


@pytest.mark.parametrize(
    "pieces",
    [
        ["f(", ")\n", END],
        ["f(", ")\n", "</tool", "_call>"],
        ["f(", ")\n</", "tool_call>"],
        ["f()", "\n</", "tool_call>"],
        ["f()", "\n</tool", "_call>"],
        ["f()", INPUT_END],
        ["f()", "\n\n", END],
        ["f(", ")\n", ")\n", "\n\n", "\n</tool", "_call>"],
        ["f(", ")\n</", "f", ")\n</", "tool_call>"],
        ["f()", "\n</tool", "\n</tool", "_call>"],
    ],
)
def test_a_token_may_end_an_input_and_begin_the_end_marker(
    wide_tokenizer: WideTokenizer, pieces: list[str]
) -> None:
    matcher = new_matcher(GrammarCompiler(wide_tokenizer), ANY_TOOL)

    for token_id in wide_tokenizer.ids_of([HEAD, *pieces]):
        matcher.accept(token_id)

    assert may_end(matcher)


@pytest.mark.parametrize("end", [INPUT_END, f"{INPUT_END}\n", "\n</tool_call>\n<"])
def test_a_token_may_hold_the_end_marker_and_more(wide_tokenizer: WideTokenizer, end: str) -> None:
    matcher = new_matcher(GrammarCompiler(wide_tokenizer), ANY_TOOL)
    call = f"{HEAD}f(){INPUT_END}\n{HEAD}g(){INPUT_END}"
    before, after = call.split(end, maxsplit=1)

    for token_id in wide_tokenizer.ids_of([before, end, after]):
        matcher.accept(token_id)

    assert may_end(matcher)


@pytest.mark.parametrize(
    ("pieces", "wrong"),
    [
        ([HEAD.removesuffix('"}\n')], '"}\nf'),
        ([HEAD, "f("], f"){INPUT_END}"),
        ([HEAD, "f()\n</tool"], "_call>"),
    ],
)
def test_where_nobody_could_tell_input_from_its_end_a_token_is_masked(
    wide_tokenizer: WideTokenizer, pieces: list[str], wrong: str
) -> None:
    matcher = new_matcher(GrammarCompiler(wide_tokenizer), ANY_TOOL)
    ids = wide_tokenizer.ids_of(pieces)
    assert num_accepted(matcher, ids) == len(ids)

    assert not matcher.mask()[wide_tokenizer.ids_of([wrong])[0]]
