"""Hard constraints on what the model may sample, by llguidance.

A tool constraint becomes a Lark grammar over the text of one assistant turn. Where calls are
allowed, free text may come first, and from the moment the text contains the begin marker the rest
must be well-formed calls whose arguments match the function's JSON schema. Where they are not, the
marker cannot be completed at all. So arguments that reach a client always parse and validate, in
``auto`` as in ``required``; only the end of the token budget can cut a call short.
"""

import json
from collections.abc import Mapping
from typing import Any

import llguidance
import numpy as np

from protocol.tools import FunctionTool
from sampler.params import ToolConstraint
from sampler.tokenizer import Tokenizer
from sampler.tool_calls import BEGIN, END

# Models write JSON the way Python's json.dumps does. With one spelling of white space a model
# cannot loop in it, and arguments that a client parses and writes again come back as the same text.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarError(ValueError):
    """A JSON schema that cannot be turned into a grammar."""


class Matcher:
    """Where one segment is in its grammar. While a step is in flight it is the model thread's."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._bits = np.zeros((vocab_size + 31) // 32, dtype=np.uint32)

    def mask(self) -> np.ndarray:
        """Return ``(vocab,)`` bool: which tokens may come next. End-of-turn tokens are among them
        where the turn may end."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")
        return bits[: self._vocab_size].astype(bool)

    def accept(self, token_id: int) -> None:
        """Move past ``token_id``, which the mask allowed."""
        if not self._matcher.consume_token(token_id):
            raise RuntimeError(f"grammar refused a token it allowed: {self._matcher.get_error()}")


class GrammarCompiler:
    """Compiles constraints for one tokenizer; equal grammars are compiled once."""

    def __init__(self, tokenizer: Tokenizer, max_forced_string: int = 64) -> None:
        """Compile for ``tokenizer``.

        Args:
            tokenizer: gives the vocabulary and the ids that end a turn.
            max_forced_string: the bound, in characters, on strings of forced calls whose schema
                sets none; 0 for no bound. Small models that are made to call may otherwise never
                end a string.
        """
        self._tokenizer = tokenizer
        self._max_forced_string = max_forced_string
        self._compiled: dict[str, llguidance.LLMatcher] = {}

    def check(self, function: FunctionTool) -> None:
        """Make sure that calls of ``function`` can be constrained.

        Raises:
            GrammarError: its parameters schema cannot be compiled; says why.
        """
        self._compile(self._grammar(ToolConstraint((function,), 1, 1)))

    def matcher(self, constraint: ToolConstraint) -> Matcher | None:
        """Return a fresh matcher for one segment, or None where there is nothing to constrain."""
        if not constraint.functions:
            return None
        return Matcher(
            self._compile(self._grammar(constraint)).deep_copy(), self._tokenizer.vocab_size
        )

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        if (compiled := self._compiled.get(grammar)) is None:
            compiled = llguidance.LLMatcher(self._tokenizer.guidance, grammar, log_level=0)
            if compiled.is_error():
                raise GrammarError(_first_line(compiled.get_error()))
            if len(self._compiled) >= 64:
                self._compiled.pop(next(iter(self._compiled)))
            self._compiled[grammar] = compiled
        return compiled

    def _grammar(self, constraint: ToolConstraint) -> str:
        if not constraint.allows_calls:
            return _text_without_calls()
        bound = self._max_forced_string if constraint.is_forced else 0
        return _calls(constraint, bound)


def _text_without_calls() -> str:
    return f"%llguidance {{}}\nstart: TEXT\nTEXT: /(?s:.*)/ & ~/(?s:.*){BEGIN}(?s:.*)/\n"


def _calls(constraint: ToolConstraint, max_string: int) -> str:
    more = "" if constraint.max_calls == 1 else f" ({_literal(f'{chr(10)}{BEGIN}')} body)*"
    forced = f"{_literal(BEGIN)} body{more}"
    lines = ["%llguidance {}"]
    if constraint.is_forced:
        lines.append(f"start: {forced}")
    else:
        lines += [
            f"start: TEXT | begin body{more}",
            "TEXT: /(?s:.*)/",
            # Lazy: the marker ends the text as soon as it is complete.
            f"begin[lazy]: TEXT {_literal(BEGIN)}",
        ]
    functions = constraint.functions
    lines.append("body: " + " | ".join(f"body_{index}" for index in range(len(functions))))
    for index, function in enumerate(functions):
        head = f'\n{{"name": {json.dumps(function.name)}, "arguments": '
        schema = json.dumps(_arguments_schema(function, max_string))
        lines.append(
            f"body_{index}: {_literal(head)} arguments_{index} {_literal('}' + chr(10) + END)}"
        )
        lines.append(f"arguments_{index}: %json {schema}")
    return "\n".join(lines) + "\n"


def _literal(text: str) -> str:
    return json.dumps(text)


def _arguments_schema(function: FunctionTool, max_string: int) -> dict[str, Any]:
    schema = dict(function.parameters or {})
    schema.setdefault("type", "object")
    if not schema.get("properties"):
        # A function that declares nothing takes nothing; JSON Schema would let the model invent.
        schema.setdefault("additionalProperties", False)
    if max_string:
        schema = bound_strings(schema, max_string)
    return {**schema, "x-guidance": _JSON_STYLE}


# Keywords that bound a string already, or name the very strings allowed.
_STRING_BOUNDS = ("maxLength", "enum", "const", "pattern", "format")
# Keywords whose value maps names to schemas.
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
# Keywords whose value is a schema or a list of schemas, each of which stands for itself.
_SUBSCHEMAS = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf")
# Beside these an object's own properties may not be all of its properties.
_COMBINATORS = ("allOf", "anyOf", "oneOf", "$ref", "if", "patternProperties")


def bound_strings(schema: Any, max_length: int) -> Any:
    """Return ``schema`` narrowed so that no string it admits is open-ended.

    Strings that no keyword bounds get ``maxLength``; objects that list properties admit no others.
    What the narrowed schema admits, the original admits too.
    """
    if isinstance(schema, list):
        return [bound_strings(item, max_length) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    bounded = dict(schema)
    for key in schema.keys() & set(_SCHEMA_MAPS):
        if isinstance(schema[key], Mapping):
            bounded[key] = {
                name: bound_strings(value, max_length) for name, value in schema[key].items()
            }
    for key in schema.keys() & set(_SUBSCHEMAS):
        bounded[key] = bound_strings(schema[key], max_length)
    if _admits(schema, "string") and not any(key in schema for key in _STRING_BOUNDS):
        bounded["maxLength"] = max(max_length, int(schema.get("minLength", 0)))
    if schema.get("properties") and not any(key in schema for key in _COMBINATORS):
        bounded.setdefault("additionalProperties", False)
    return bounded


def _admits(schema: Mapping[str, Any], kind: str) -> bool:
    declared = schema.get("type")
    return declared == kind or (isinstance(declared, list) and kind in declared)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "unknown error"
