"""Untyped JSON to typed values, with the path of what is wrong."""

from typing import Any, TypeAlias, TypeVar

import msgspec

from protocol import errors

JsonObject: TypeAlias = dict[str, Any]
T = TypeVar("T")


def convert(value: Any, type_: type[T], root: str = "") -> T:
    """Validate ``value``, which stands at the path ``root`` of the request, as ``type_``.

    Raises:
        ProtocolError: with the path of the offending member as its ``param``.
    """
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        raise errors.from_validation(error, root) from None


def without_nulls(value: JsonObject) -> JsonObject:
    """Return ``value`` without its null members: for an optional member, null means absent."""
    return {key: member for key, member in value.items() if member is not None}
