"""Hard constraints on what the model may sample, by llguidance.

A tool constraint becomes a Lark grammar over the text of one assistant turn. Where calls are
allowed, free text may come first, and from the moment the text contains the begin marker the rest
must be well-formed calls whose arguments match the function's JSON schema. Where they are not, the
marker cannot be completed at all. So arguments that reach a client always parse and validate, in
``auto`` as in ``required``; only the end of the token budget can cut a call short.
"""

import json
import re
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
        """Make sure that calls of ``function`` can be constrained, forced or not.

        Raises:
            GrammarError: its parameters schema cannot be compiled; says why.
        """
        for min_calls in (0, 1):
            self._compile(self._grammar(ToolConstraint((function,), min_calls, 1)))

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
                raise GrammarError(_reason(compiled.get_error()))
            if len(self._compiled) >= 256:
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
    # The first call is spelled out, the others repeat.
    least = max(constraint.min_calls - 1, 0)
    most = "" if constraint.max_calls is None else constraint.max_calls - 1
    more = "" if most == 0 else f" ({_literal(f'{chr(10)}{BEGIN}')} body){{{least},{most}}}"
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
    if not any(schema.get(key) for key in _MEMBERS):
        # A function that declares nothing takes nothing; JSON Schema would let the model invent.
        schema.setdefault("additionalProperties", False)
    if max_string:
        schema = bound_strings(schema, max_string)
    return {**schema, "x-guidance": _JSON_STYLE}


# Keywords that put further schemas on the very value that their own schema describes.
_COMBINATORS = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
# Keywords by which an object says that it has members.
_MEMBERS = _COMBINATORS | {"properties", "patternProperties", "required", "minProperties"}
# Keywords that bound a string already, or name the very strings allowed.
_STRING_BOUNDS = frozenset({"maxLength", "enum", "const", "pattern", "format"})
# Keywords whose value maps names to schemas.
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
# Keywords whose value is a schema or a list of schemas, each of which stands for itself.
_SUBSCHEMAS = ("items", "prefixItems", "additionalProperties", "allOf", "anyOf", "oneOf")
# Keywords that leave what a combinator says as it is.
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"type", "nullable", "discriminator", "$defs", "definitions", "$schema", "$id", "$comment"}
)


def bound_strings(schema: Any, max_length: int) -> Any:
    """Return ``schema`` narrowed so that no string it admits is open-ended.

    Strings that no keyword bounds get ``maxLength``; objects that list properties admit no others.
    What the narrowed schema admits, the original admits too, provided that the branches of a
    ``oneOf`` exclude each other, and llguidance compiles no others. Where several schemas describe
    one value (``properties`` beside ``anyOf``, say), it is left as it is: what remained of each
    might exclude the others.
    """
    return schema if _combines(schema) else _bounded(schema, max_length)


def _combines(schema: Any) -> bool:
    """Tell whether several schemas describe one value, here or further in."""
    if isinstance(schema, list):
        return any(map(_combines, schema))
    if not isinstance(schema, Mapping):
        return False
    combinators = schema.keys() & _COMBINATORS
    if combinators and len(schema.keys() - _ANNOTATIONS) > 1:
        return True
    if "allOf" in schema and not (isinstance(schema["allOf"], list) and len(schema["allOf"]) == 1):
        return True
    inner = [schema[key] for key in schema.keys() & set(_SUBSCHEMAS)]
    for key in schema.keys() & set(_SCHEMA_MAPS):
        inner += schema[key].values() if isinstance(schema[key], Mapping) else []
    return any(map(_combines, inner))


def _bounded(schema: Any, max_length: int) -> Any:
    if isinstance(schema, list):
        return [_bounded(item, max_length) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    bounded = dict(schema)
    for key in schema.keys() & set(_SCHEMA_MAPS):
        if isinstance(schema[key], Mapping):
            bounded[key] = {
                name: _bounded(value, max_length) for name, value in schema[key].items()
            }
    for key in schema.keys() & set(_SUBSCHEMAS):
        bounded[key] = _bounded(schema[key], max_length)
    if _is_open_string(schema):
        bounded["maxLength"] = max(max_length, schema.get("minLength", 0))
    if _lists_its_members(schema):
        bounded.setdefault("additionalProperties", False)
    return bounded


def _is_open_string(schema: Mapping[str, Any]) -> bool:
    declared = schema.get("type")
    admits_strings = declared == "string" or (isinstance(declared, list) and "string" in declared)
    has_length = isinstance(schema.get("minLength", 0), int)  # if not, llguidance says so
    return admits_strings and has_length and not schema.keys() & (_STRING_BOUNDS | _COMBINATORS)


def _lists_its_members(schema: Mapping[str, Any]) -> bool:
    """Tell whether an object can do with the properties that it lists."""
    listed, required = schema.get("properties"), schema.get("required", [])
    if not (isinstance(listed, Mapping) and isinstance(required, list)):
        return False
    names = list(listed)
    return bool(names) and all(name in names for name in required) and "minProperties" not in schema


def _reason(error: str) -> str:
    """Return what llguidance says is wrong, in one line, without where that is in our grammar."""
    said = re.split(r"\n +\d+ \| ", error)[0]
    lines = [line.strip() for line in said.splitlines() if line.strip(" ^")]
    return re.sub(r"^at \d+\(\d+\): ", "", " ".join(lines)) or "unknown error"
