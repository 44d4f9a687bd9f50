"""Hard constraints on what the model may sample, by llguidance.

What a turn may be becomes a Lark grammar over its text. Thoughts may come first where the model
thinks, and anything may be thought. Then:

- Where the turn may call, free text may come first, and from the moment that the text contains the
  begin marker the rest must be well-formed calls: of functions, with arguments that match the JSON
  schema; of free-form tools, with an input that matches the tool's own grammar (``matcher``).
- Where it must call, there are the calls and nothing else.
- Where it may not, the marker cannot be completed at all.
- Where the text has to be JSON, there are the calls or the JSON and nothing else. So a schema binds
  the last message of a run and never stands in the way of a call.

So calls and JSON that reach a client always parse and validate, in ``auto`` as in ``required``;
only the end of the token budget can cut them short. The schema of a function that is not ``strict``
need not be one that can be enforced: then arguments validate as far as it can be.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard, TypeVar

import llguidance
import msgspec

from protocol.client_events import TextFormat
from protocol.tools import CallableTool, CustomFormat, CustomTool, FunctionTool
from protocol.validation import JsonObject
from sampler.json_schema import arguments_schema, message_schema, relaxed
from sampler.matcher import ForcedMatcher, GrammarMatcher, Matcher
from sampler.params import Constraint
from sampler.tokenizer import Tokenizer
from sampler.tool_calls import (
    BEGIN,
    END,
    INPUT_END,
    THINK_BEGIN,
    THINK_END,
    call_head,
    custom_call_head,
)

_K = TypeVar("_K")
_T = TypeVar("_T")


class GrammarError(ValueError):
    """A JSON schema, a regular expression or a Lark grammar that cannot be made a constraint."""


_ANY_ARGUMENTS: JsonObject = {"type": "object", "additionalProperties": True}


class GrammarCompiler:
    """Compiles constraints for one tokenizer; equal grammars are compiled once."""

    def __init__(self, tokenizer: Tokenizer, max_forced_string: int = 64) -> None:
        """Compile for ``tokenizer``.

        Args:
            tokenizer: gives the vocabulary and the ids that end a turn.
            max_forced_string: the bound, in characters, on strings of forced calls whose schema
                sets none, and on forced inputs of any text; 0 for no bound. Small models that are
                made to call may otherwise never end a string.
        """
        self._tokenizer = tokenizer
        self._max_forced_string = max_forced_string
        self._compiled: dict[str, llguidance.LLMatcher] = {}
        self._enforced: dict[str, JsonObject] = {}  # by the parameters that a tool declares
        # To write a grammar down takes longer than to look it up by what it is written from.
        self._grammars: dict[bytes, _Grammar] = {}
        self._checked: dict[bytes, CallableTool] = {}

    def check(self, tool: CallableTool) -> None:
        """Make sure that calls of ``tool`` can be constrained, forced or not.

        A function that is not ``strict`` always passes.

        Raises:
            GrammarError: its schema or its grammar cannot be compiled; says why.
        """
        if not self.has_checked(tool):
            for min_calls in (0, 1):
                self.matcher(Constraint((tool,), min_calls, 1))
            _remember(self._checked, _key(tool), tool)

    def has_checked(self, tool: CallableTool) -> bool:
        """Tell whether ``tool`` is known to pass, on any thread."""
        return _key(tool) in self._checked

    def is_ready(self, constraint: Constraint) -> bool:
        """Tell whether a matcher for ``constraint`` takes no time, on any thread."""
        return not _needs_grammar(constraint) or _key(constraint) in self._grammars

    def check_text_format(self, text_format: TextFormat) -> None:
        """Make sure that a message can be held to ``text_format``.

        Raises:
            GrammarError: its schema cannot be compiled; says why.
        """
        self.matcher(Constraint(text_format=text_format))

    def matcher(self, constraint: Constraint) -> Matcher | None:
        """Return a fresh matcher for one segment, or None where there is nothing to constrain.

        Raises:
            GrammarError: the constraint is more than a grammar can hold.
        """
        if constraint.forced_ids is not None:
            return ForcedMatcher(constraint.forced_ids, self._tokenizer.vocab_size)
        if not _needs_grammar(constraint):
            return None
        key = _key(constraint)
        if (grammar := self._grammars.get(key)) is None:
            grammar = self._grammar(constraint)
            _remember(self._grammars, key, grammar)
        return GrammarMatcher(self._tokenizer, grammar.turn, grammar.inputs)

    def _grammar(self, constraint: Constraint) -> "_Grammar":
        constraint = replace(constraint, tools=tuple(map(self._held_to, constraint.tools)))
        inputs = {
            custom_call_head(tool.name).encode(): self._compile_all(_input_grammars(tool.format))
            for tool in constraint.tools
            if _has_hole(tool)
        }
        return _Grammar(self._compile(self._turn_grammar(constraint)), inputs)

    def _held_to(self, tool: CallableTool) -> CallableTool:
        """Return ``tool`` with the schema that its arguments are held to."""
        if not isinstance(tool, FunctionTool) or tool.strict or tool.parameters is None:
            return tool
        declared = json.dumps(tool.parameters)
        if (enforced := self._enforced.get(declared)) is None:
            enforced = self._enforceable(tool, tool.parameters)
            _remember(self._enforced, declared, enforced)
        return msgspec.structs.replace(tool, parameters=enforced)

    def _enforceable(self, tool: FunctionTool, parameters: JsonObject) -> JsonObject:
        """Return ``parameters``, or what of them can be enforced."""
        for form in (dict, relaxed):
            candidate = form(parameters)
            try:
                self.check(msgspec.structs.replace(tool, parameters=candidate, strict=True))
            except GrammarError:
                continue
            return candidate
        return _ANY_ARGUMENTS

    def _compile_all(self, grammars: Iterable[str]) -> list[llguidance.LLMatcher]:
        return [self._compile(grammar) for grammar in grammars]

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        if (compiled := self._compiled.get(grammar)) is None:
            compiled = llguidance.LLMatcher(self._tokenizer.guidance, grammar, log_level=0)
            if compiled.is_error():
                raise GrammarError(_reason(compiled.get_error()))
            _remember(self._compiled, grammar, compiled)
        return compiled

    def _turn_grammar(self, constraint: Constraint) -> str:
        bound = self._max_forced_string if constraint.is_forced else 0
        calls = _calls(constraint, bound, self._tokenizer.hole_id)
        rules = [*_turn(constraint), *(calls if constraint.allows_calls else ())]
        return "\n".join(["%llguidance {}", *rules, ""])


@dataclass(frozen=True)
class _Grammar:
    """What a matcher is made of."""

    turn: llguidance.LLMatcher
    inputs: Mapping[bytes, Sequence[llguidance.LLMatcher]]


def _needs_grammar(constraint: Constraint) -> bool:
    return constraint.forced_ids is None and bool(constraint.tools or constraint.wants_json)


def _key(value: CallableTool | Constraint) -> bytes:
    """Return the same for what is equal."""
    return msgspec.json.encode(value)


def _remember(memory: dict[_K, _T], key: _K, value: _T) -> None:
    if len(memory) >= 256:
        memory.pop(next(iter(memory)))
    memory[key] = value


def _reason(error: str) -> str:
    """Return what llguidance says is wrong, in one line, without where that is in our grammar."""
    said = re.split(r"\n +\d+ \| ", error)[0]
    lines = [line.strip() for line in said.splitlines() if line.strip(" ^")]
    return re.sub(r"^(at )?\d+\(\d+\): ", "", " ".join(lines)) or "unknown error"


# --- The turn ------------------------------------------------------------------------------------

_ANY = "/(?s:.*)/"
_CALLING = f"/(?s:.*){BEGIN}(?s:.*)/"
_THINKING = rf"/[ \t\r\n]*{THINK_BEGIN}(?s:.*)/"


def _turn(constraint: Constraint) -> Iterator[str]:
    """Give the rules of a turn, but for those of its ``calls``."""
    if constraint.wants_json or (constraint.is_forced and constraint.allows_calls):
        # Models leave an empty line after their thoughts.
        yield from _start(constraint, without_thoughts="turn", after_thoughts='("\\n"){0,2} turn')
        yield from _calls_or_json(constraint)
    else:
        yield from _start(constraint, without_thoughts="plain", after_thoughts="turn")
        yield from _text_or_calls(constraint, "turn", _ANY)
        if constraint.thinks:
            yield from _text_or_calls(constraint, "plain", f"{_ANY} & ~{_THINKING}")


def _start(constraint: Constraint, without_thoughts: str, after_thoughts: str) -> Iterator[str]:
    if constraint.think_is_open:
        yield f"start: thoughts {after_thoughts}"
        yield f"thoughts[lazy]: {_ANY} {_literal(THINK_END)}"
    elif constraint.thinks:
        yield f"start: {without_thoughts} | thoughts {after_thoughts}"
        yield f"thoughts[lazy]: {_THINKING} {_literal(THINK_END)}"
    else:
        yield "start: turn"


def _calls_or_json(constraint: Constraint) -> Iterator[str]:
    choices = []
    if constraint.allows_calls:
        choices.append(f"{_literal(BEGIN)} calls")
    if constraint.wants_json and not constraint.is_forced:
        choices.append(f"%json {json.dumps(message_schema(constraint.text_format))}")
    yield f"turn: {' | '.join(choices)}"


def _text_or_calls(constraint: Constraint, name: str, text: str) -> Iterator[str]:
    terminal = name.upper()
    if constraint.allows_calls:
        yield f"{name}: {terminal} | {name}_begin calls"
        # Lazy: the marker ends the text as soon as it is complete.
        yield f"{name}_begin[lazy]: {terminal} {_literal(BEGIN)}"
        yield f"{terminal}: {text}"
    else:
        yield f"{name}: {terminal}"
        yield f"{terminal}: {text} & ~{_CALLING}"


# --- Calls ---------------------------------------------------------------------------------------


def _calls(constraint: Constraint, max_string: int, hole_id: int) -> Iterator[str]:
    """Give the rules of one or more calls, from after the first begin marker on."""
    # The first call is spelled out, the others repeat.
    least = max(constraint.min_calls - 1, 0)
    most = "" if constraint.max_calls is None else constraint.max_calls - 1
    more = "" if most == 0 else f" ({_literal(f'{chr(10)}{BEGIN}')} call){{{least},{most}}}"
    yield f"calls: call{more}"
    yield "call: " + " | ".join(f"call_{index}" for index in range(len(constraint.tools)))
    for index, tool in enumerate(constraint.tools):
        if isinstance(tool, FunctionTool):
            yield from _function_call(f"call_{index}", tool, max_string)
        else:
            yield from _custom_call(f"call_{index}", tool, max_string, hole_id)


def _function_call(name: str, tool: FunctionTool, max_string: int) -> Iterator[str]:
    head = call_head(tool.name).removeprefix(BEGIN)
    schema = json.dumps(arguments_schema(tool.parameters, max_string))
    yield f"{name}: {_literal(head)} {name}_arguments {_literal(f'}}{chr(10)}{END}')}"
    yield f"{name}_arguments: %json {schema}"


def _custom_call(name: str, tool: CustomTool, max_string: int, hole_id: int) -> Iterator[str]:
    head = custom_call_head(tool.name).removeprefix(BEGIN)
    if _has_hole(tool):
        yield f"{name}: {_literal(head)} <[{hole_id}]> {_literal(INPUT_END)}"
    else:
        # The line break that ends the head may be the one before the end marker.
        length = f"{{0,{max_string}}}" if max_string else "*"
        yield f"{name}: {_literal(head.removesuffix(chr(10)))} {name}_input"
        yield f"{name}_input[lazy]: /(?s:\\n.{length})?/ {_literal(INPUT_END)}"


def _literal(text: str) -> str:
    return json.dumps(text)


# --- Inputs of free-form tools -------------------------------------------------------------------

# Text in which no line is, or begins with, the end marker.
_ANY_INPUT = rf"""%llguidance {{}}
start: INPUT
INPUT: {_ANY} & ~(/(?s:.*\n)?/ {_literal(END)} {_ANY})
"""

# Strings, comments and regular expressions of Lark, in which "<" is a character like any other.
_LARK_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|(?://|#)[^\n]*|/(?:\\.|[^/\\\n])+/')


def _has_hole(tool: CallableTool) -> TypeGuard[CustomTool]:
    """Tell whether what the tool takes has a grammar of its own."""
    return isinstance(tool, CustomTool) and tool.format.syntax != "text"


def _input_grammars(custom_format: CustomFormat) -> list[str]:
    """Return the grammars that an input has to match, all of them.

    Raises:
        GrammarError: the client's grammar asks for control tokens.
    """
    definition = custom_format.definition
    if custom_format.syntax == "regex":
        return [llguidance.LLMatcher.grammar_from_regex(definition), _ANY_INPUT]
    if "<" in _LARK_LITERAL.sub("", definition):
        raise GrammarError("a grammar of text cannot refer to special tokens")
    # With a line of ours before it, it is read as Lark whatever it looks like.
    return [f"%llguidance {{}}\n{definition}", _ANY_INPUT]
