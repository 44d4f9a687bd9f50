import zlib
from base64 import urlsafe_b64encode

import pytest

from protocol import sealed
from protocol.sealed import PREFIX, seal, unseal


def envelope(data: bytes) -> str:
    return PREFIX + urlsafe_b64encode(data).decode()


@pytest.mark.parametrize("text", ["", "Grüße, 世界 😀", "a" * 100_000])
def test_a_text_comes_out_as_it_went_in(text: str) -> None:
    assert unseal(seal(text)) == text


def test_an_envelope_is_ascii_on_one_line_and_smaller_than_a_long_text() -> None:
    sealed_text = seal("Let me think. " * 1_000)

    assert sealed_text.isascii()
    assert sealed_text.isprintable()
    assert len(sealed_text) < 1_000


@pytest.mark.parametrize(
    "foreign",
    [
        "",
        "gAAAAABo",
        "suspend0." + seal("x").removeprefix(PREFIX),
        PREFIX,
        PREFIX + "é",
        PREFIX + "a",
        seal("x")[:-8],
        envelope(b"no zlib"),
        envelope(zlib.compress(b"\xff")),
        envelope(zlib.compress(b"cut short")[:-2]),
    ],
)
def test_what_was_not_sealed_here_is_told_apart(foreign: str) -> None:
    with pytest.raises(ValueError):
        unseal(foreign)


def test_an_envelope_of_a_text_that_no_request_could_hold_is_not_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sealed, "MAX_TEXT_BYTES", 9)
    assert unseal(seal("a" * 9)) == "a" * 9

    with pytest.raises(ValueError):
        unseal(seal("a" * 10_000))
