"""Schemas made fit for constraining a model.

What ``arguments_schema`` or ``message_schema`` admits, the client's schema admits too. A tool that
does not insist on its schema (``strict``) may be held to a ``relaxed`` one instead.
"""

import json
from collections.abc import Callable, Mapping
from math import copysign, floor, log10
from typing import Any

from llguidance import LLMatcher

from protocol.client_events import TextFormat

Schema = Mapping[str, Any]

# Models write JSON the way Python's json.dumps does. With one spelling of white space a model
# cannot loop in it, and arguments that a client parses and writes again come back as the same text.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# Keywords that put further schemas on the very value that their own schema describes.
_COMBINATORS = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
# Keywords by which an object says that it has members.
_MEMBERS = _COMBINATORS | {"properties", "patternProperties", "required", "minProperties"}
# Formats that llguidance checks. JSON Schema 2020-12 (Validation, 7.2.1) makes any other a remark.
_KNOWN_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
# Keywords, with values by which they say nothing. Pydantic, zod and others write some of them.
_REMARKS: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
}
# Keywords that say nothing unless one of some others is there.
_COMPANIONS: Mapping[str, frozenset[str]] = {
    "if": frozenset({"then", "else"}),
    "then": frozenset({"if"}),
    "else": frozenset({"if"}),
    "minContains": frozenset({"contains"}),
    "maxContains": frozenset({"contains"}),
}
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


def arguments_schema(parameters: Schema | None, max_string: int) -> dict[str, Any]:
    """Return the schema that llguidance is to hold a function's arguments to.

    Args:
        parameters: as the tool declares them; None takes no arguments.
        max_string: the bound of ``bound_strings``; 0 for none.
    """
    schema: dict[str, Any] = {"type": "object", **(parameters or {})}
    if not any(schema.get(key) for key in _MEMBERS):
        # A function that declares nothing takes nothing; JSON Schema would let the model invent.
        schema.setdefault("additionalProperties", False)
    schema = _rewritten(schema, _compilable)
    if max_string:
        schema = bound_strings(schema, max_string)
    return {**schema, "x-guidance": _JSON_STYLE}


def message_schema(text_format: TextFormat) -> dict[str, Any]:
    """Return the schema that llguidance is to hold a message in JSON to; ``strict`` or not."""
    schema = {"type": "object"} if text_format.schema is None else text_format.schema
    return {**_rewritten(schema, _compilable), "x-guidance": _JSON_STYLE}


def relaxed(parameters: Schema) -> dict[str, Any]:
    """Return ``parameters`` without what llguidance cannot enforce; they admit all that they did.

    That takes most of what it cannot compile away, but not all: a ``$ref`` that leads nowhere, say.
    """
    schema: dict[str, Any] = _rewritten(parameters, _enforceable)
    return schema


def bound_strings(schema: Any, max_length: int) -> Any:
    """Return ``schema`` narrowed so that no string it admits is open-ended.

    Strings that no keyword bounds get ``maxLength``; objects that list properties admit no others.
    What the narrowed schema admits, the original admits too, provided that the branches of a
    ``oneOf`` exclude each other, and llguidance compiles no others. Where several schemas describe
    one value (``properties`` beside ``anyOf``, say), it is left as it is: what remained of each
    might exclude the others.
    """
    if _combines(schema):
        return schema
    return _rewritten(schema, lambda inner: _bounded(inner, max_length))


def _rewritten(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return ``schema`` with ``change`` made to it and to every schema in it, inside first."""
    if isinstance(schema, list):
        return [_rewritten(item, change) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    rewritten = dict(schema)
    for key in schema.keys() & set(_SCHEMA_MAPS):
        if isinstance(schema[key], Mapping):
            rewritten[key] = {
                name: _rewritten(value, change) for name, value in schema[key].items()
            }
    for key in schema.keys() & set(_SUBSCHEMAS):
        rewritten[key] = _rewritten(schema[key], change)
    return change(rewritten)


def _compilable(schema: dict[str, Any]) -> dict[str, Any]:
    """Drop keywords that say nothing and that llguidance does not know; mend what it gets wrong."""
    if schema.get("format") not in (None, *_KNOWN_FORMATS):
        del schema["format"]
    telling = {key: value for key, value in schema.items() if not _is_remark(schema, key)}
    return telling | _tighter_bounds(telling)


def _is_remark(schema: Schema, keyword: str) -> bool:
    """Tell whether ``keyword`` of ``schema`` says nothing."""
    companions = _COMPANIONS.get(keyword)
    if companions is not None and not companions & schema.keys():
        return True
    return schema[keyword] in _REMARKS.get(keyword, ())


def _enforceable(schema: dict[str, Any]) -> dict[str, Any]:
    """Drop what llguidance does not know; what is left admits no less.

    The schemas in it have been through this already.
    """
    if "oneOf" in schema:  # it compiles only where the branches are seen to exclude each other
        schema.setdefault("anyOf", schema.pop("oneOf"))
    kept = {key: value for key, value in schema.items() if _is_known(key, value)}
    if "patternProperties" in schema.keys() - kept.keys():
        kept["additionalProperties"] = True  # what was said of these does not go for those
    return kept


def _is_known(keyword: str, value: Any) -> bool:
    """Tell whether llguidance understands ``keyword`` with ``value``."""
    if keyword == "patternProperties" and isinstance(value, Mapping):
        return _compiles({keyword: dict.fromkeys(value, True)})
    if keyword in _SCHEMA_MAPS or keyword in _SUBSCHEMAS:
        return True
    if keyword == "$ref" and isinstance(value, str) and value.startswith("#"):
        return True  # by itself it leads nowhere
    return _compiles({keyword: value})


def _compiles(schema: Schema) -> bool:
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    try:
        return not LLMatcher.validate_grammar(grammar)
    except BaseException as error:
        # Where llguidance 1.9 would cut the text of an error inside a character, it panics.
        if type(error).__name__ != "PanicException":
            raise
        return False


def _tighter_bounds(schema: Mapping[str, Any]) -> dict[str, float]:
    """Return bounds to put in the place of those that llguidance 1.9 gets wrong.

    Between an integer and a number less than 1 further from zero, it admits the integer, even where
    the bound excludes it. So that bound moves away from zero, by a thousandth of the way at most.
    """
    least, above = _number(schema, "minimum"), _number(schema, "exclusiveMinimum")
    most, below = _number(schema, "maximum"), _number(schema, "exclusiveMaximum")
    bounds = {}
    for keyword, integer, others in (
        ("exclusiveMinimum", above, (most, below)),
        ("exclusiveMaximum", below, (least, above)),
    ):
        if integer is None or integer % 1:
            continue
        for other in others:
            if other is not None and abs(integer) < abs(other) and abs(other - integer) < 1:
                step = 10.0 ** (floor(log10(abs(other - integer))) - 3)
                bounds[keyword] = integer + copysign(step, other)
    return bounds


def _number(schema: Mapping[str, Any], keyword: str) -> float | None:
    value = schema.get(keyword)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    # Further out, floats have no fractions, and integers may be too large for one.
    return value if abs(value) < 2**53 else None


def _bounded(schema: dict[str, Any], max_length: int) -> dict[str, Any]:
    if _is_open_string(schema):
        schema["maxLength"] = max(max_length, schema.get("minLength", 0))
    if _lists_its_members(schema):
        schema.setdefault("additionalProperties", False)
    return schema


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
