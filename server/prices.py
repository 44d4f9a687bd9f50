"""What models cost, and what that makes of tokens: exactly, in whole nano-dollars.

Prices are decimal numbers in dollars per million tokens, as providers publish them. They are never
floats, and what they are multiplied to is rounded once, at the end.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any, TypeAlias

MAX_PRICE = Decimal(1_000_000)
"""In dollars per million tokens. Costs of runs that are dearer might not fit into 64 bits."""

_NANODOLLARS_PER_TOKEN = 1000
"""At a price of one dollar per million tokens."""

_MEMBERS = ("input", "cached_input", "output")


class PriceError(ValueError):
    """A price that is none; the message says where it stands."""


@dataclass(frozen=True)
class Price:
    """What a model costs, in dollars per million tokens."""

    input: Decimal
    """Of input that had to be computed."""
    cached_input: Decimal
    """Of input that had not."""
    output: Decimal

    def cost(self, input_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        """Return what the tokens cost in nano-dollars, rounded half to even.

        Args:
            input_tokens: all of them.
            cached_tokens: how many of these were cached.
            output_tokens: all of them, reasoning included.
        """
        dollars_per_million = (
            (input_tokens - cached_tokens) * Fraction(self.input)
            + cached_tokens * Fraction(self.cached_input)
            + output_tokens * Fraction(self.output)
        )
        return round(dollars_per_million * _NANODOLLARS_PER_TOKEN)


Prices: TypeAlias = Mapping[str, Price]
"""By the name of the model. One that is not in it costs what nobody knows, which is not nothing."""


def parse_prices(table: Mapping[str, Any]) -> Prices:
    """Return the prices in the table ``price`` of a TOML file.

    It holds a table for each model, with ``input``, ``output`` and, where it differs from
    ``input``, ``cached_input``.

    Raises:
        PriceError: something is missing, unknown, or not a number from 0 to ``MAX_PRICE``.
    """
    return {model: _price(f'price."{model}"', members) for model, members in table.items()}


def _price(path: str, members: Any) -> Price:
    if not isinstance(members, Mapping):
        raise PriceError(f"{path}: expected a table, got {members!r}")
    for name in members:
        if name not in _MEMBERS:
            raise PriceError(f"{path}.{name}: expected one of {', '.join(_MEMBERS)}")
    for name in ("input", "output"):
        if name not in members:
            raise PriceError(f"{path}.{name}: expected a price, got none")
    parsed = {name: _amount(f"{path}.{name}", value) for name, value in members.items()}
    return Price(
        input=parsed["input"],
        cached_input=parsed.get("cached_input", parsed["input"]),
        output=parsed["output"],
    )


def _amount(path: str, value: Any) -> Decimal:
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
            raise InvalidOperation
        amount = Decimal(str(value))  # of a float, the digits that were written
        if not 0 <= amount <= MAX_PRICE:  # invalid, too, for what is not a number
            raise InvalidOperation
    except InvalidOperation:
        raise PriceError(
            f"{path}: expected dollars per million tokens, from 0 to {MAX_PRICE}, got {value!r}"
        ) from None
    return amount
