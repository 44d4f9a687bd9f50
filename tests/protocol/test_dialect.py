import pytest

from protocol.dialect import APPEND_BETA, INJECT_BETA, Dialect, negotiate
from protocol.errors import ProtocolError


@pytest.mark.parametrize(
    ("beta_header", "query", "dialect"),
    [
        ("", None, Dialect.CHAINED),
        ("responses_websockets=2026-02-06", None, Dialect.CHAINED),
        (APPEND_BETA, None, Dialect.APPEND),
        (f"other=1, {APPEND_BETA}", None, Dialect.APPEND),
        (INJECT_BETA, None, Dialect.INJECT),
        (f"{INJECT_BETA},{APPEND_BETA}", None, Dialect.INJECT),
        ("", "append", Dialect.APPEND),
        ("", "inject", Dialect.INJECT),
        (APPEND_BETA, "chained", Dialect.CHAINED),
    ],
)
def test_the_handshake_names_the_dialect_and_the_query_wins(
    beta_header: str, query: str | None, dialect: Dialect
) -> None:
    assert negotiate(beta_header, query) is dialect


def test_a_dialect_that_nobody_speaks_is_refused() -> None:
    with pytest.raises(ProtocolError) as caught:
        negotiate("", "latin")

    assert (caught.value.code, caught.value.param) == ("invalid_value", "dialect")
