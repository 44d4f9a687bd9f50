"""JSON as it goes to endpoints and comes from models, neither of which is under our control."""

from typing import Any

import msgspec

from protocol.validation import JsonObject


def well_formed(text: str) -> str:
    """Return ``text`` with U+FFFD for half surrogate pairs, as ``Tokenizer.encode_text`` has it."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def encoded(value: Any) -> bytes:
    """Return ``value`` as JSON, its strings well-formed."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_repaired(value))


def object_in(text: str) -> JsonObject | None:
    """Return the JSON object that ``text`` is; None where it is anything else."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _repaired(value: Any) -> Any:
    match value:
        case str():
            return well_formed(value)
        case dict():
            return {_repaired(key): _repaired(member) for key, member in value.items()}
        case list() | tuple():
            return [_repaired(member) for member in value]
        case _:
            return value
