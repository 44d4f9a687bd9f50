import tomllib
from decimal import Decimal
from typing import Any

import pytest

from server.prices import MAX_PRICE, Price, PriceError, parse_prices


def parse(text: str) -> Any:
    return parse_prices(tomllib.loads(text).get("price", {}))


def test_prices_are_what_is_written_to_the_last_digit() -> None:
    prices = parse("""
        [price."a model/with.odd name"]
        input = 0.1
        cached_input = 0.01
        output = 12
        [price.free]
        input = 0
        output = 0
    """)

    assert prices == {
        "a model/with.odd name": Price(Decimal("0.1"), Decimal("0.01"), Decimal(12)),
        "free": Price(Decimal(0), Decimal(0), Decimal(0)),
    }


def test_cached_input_costs_as_much_as_other_if_nothing_else_is_said() -> None:
    assert parse("price.m = {input = 0.3, output = 1}")["m"].cached_input == Decimal("0.3")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("price.m = 1", r'price\."m": expected a table, got 1'),
        ("price.m = {output = 1}", r'price\."m"\.input: expected a price, got none'),
        ("price.m = {input = 1}", r'price\."m"\.output: expected a price, got none'),
        ("price.m = {input = 1, output = 1, cached = 1}", r'"m"\.cached: expected one of input'),
        ("price.m = {input = -0.1, output = 1}", r'"m"\.input: expected .* got -0\.1'),
        ("price.m = {input = 1, output = 1000001}", r'"m"\.output: expected .* got 1000001'),
        ("price.m = {input = 1, output = nan}", r'"m"\.output: expected .* got nan'),
        ("price.m = {input = 1, output = inf}", r'"m"\.output: expected .* got inf'),
        ("price.m = {input = true, output = 1}", r'"m"\.input: expected .* got True'),
        ('price.m = {input = "1", output = 1}', r"\"m\"\.input: expected .* got '1'"),
    ],
)
def test_what_is_no_price_is_refused_by_its_place(text: str, message: str) -> None:
    with pytest.raises(PriceError, match=message):
        parse(text)


def test_each_kind_of_token_costs_what_it_costs() -> None:
    price = Price(Decimal("0.1"), Decimal("0.01"), Decimal("0.4"))

    cost = price.cost(input_tokens=1000, cached_tokens=900, output_tokens=50)

    assert cost == 100 * 100 + 900 * 10 + 50 * 400


def test_a_cost_is_rounded_once_and_half_to_even() -> None:
    price = Price(Decimal("0.0005"), Decimal("0.0001"), Decimal("0.0001"))

    assert [price.cost(tokens, 0, 0) for tokens in (1, 2, 3, 5)] == [0, 1, 2, 2]
    assert price.cost(3, 3, 2) == 0  # of 0.3 and 0.2
    assert price.cost(4, 3, 2) == 1


def test_a_cost_is_exact_beyond_the_digits_of_a_float() -> None:
    price = Price(Decimal("123.456789012"), Decimal(0), MAX_PRICE)

    cost = price.cost(10**9, 0, 9 * 10**9)

    assert cost == 123456789012000 + 9 * 10**18
    assert cost < 2**63
