"""Tool schemas made fit for constraining a model: what it admits, the tool's schema admits too."""

from collections.abc import Callable, Mapping
from typing import Any

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
    schema = _rewritten(schema, _without_remarks)
    if max_string:
        schema = bound_strings(schema, max_string)
    return {**schema, "x-guidance": _JSON_STYLE}


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


def _without_remarks(schema: dict[str, Any]) -> dict[str, Any]:
    """Drop keywords that say nothing and that llguidance does not know."""
    if schema.get("format") not in (None, *_KNOWN_FORMATS):
        del schema["format"]
    if schema.get("propertyNames") == {"type": "string"}:  # zod says so of any record
        del schema["propertyNames"]
    return schema


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
