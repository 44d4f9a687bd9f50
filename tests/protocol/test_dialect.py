import pytest

from protocol.dialect import APPEND_BETA, Dialect, negotiate
from protocol.errors import ProtocolError


@pytest.mark.parametrize(
    ("beta_header", "query", "dialect"),
    [
        ("", None, Dialect.COMPLETED),
        ("responses_websockets=2026-02-06", None, Dialect.COMPLETED),
        (APPEND_BETA, None, Dialect.APPEND),
        (f"other=1, {APPEND_BETA}", None, Dialect.APPEND),
        ("", "append", Dialect.APPEND),
        (APPEND_BETA, "completed", Dialect.COMPLETED),
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
