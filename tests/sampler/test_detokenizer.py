from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sampler.detokenizer import Detokenizer
from sampler.tokenizer import Tokenizer
from tests.sampler.smollm2 import smollm2_tokenizer
from tests.tiny_model import END_OF_TEXT, IM_END, IM_START, byte_tokenizer

BYTE_LEVEL = Tokenizer(byte_tokenizer(), [END_OF_TEXT, IM_END])
ID_OF_BYTE = {BYTE_LEVEL.token_bytes(i): i for i in range(IM_END + 1, BYTE_LEVEL.vocab_size)}


class PiecesTokenizer(Tokenizer):
    """A vocabulary of exactly the given pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.looked_up: list[int] = []
        self._pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        self.looked_up.append(token_id)
        return self._pieces[token_id]


def ids_of(data: bytes) -> list[int]:
    return [ID_OF_BYTE[bytes([byte])] for byte in data]


def outputs(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Return what each token gives, and what the end gives."""
    detokenizer = Detokenizer(tokenizer)
    return [*map(detokenizer.feed, ids), detokenizer.flush()]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return smollm2_tokenizer()


@pytest.mark.parametrize("character", ["é", "ह", "🎉"])
def test_a_character_is_given_whole_with_the_last_of_its_bytes(character: str) -> None:
    ids = ids_of(character.encode())

    *before, last, flushed = outputs(BYTE_LEVEL, ids)

    assert before == [""] * (len(ids) - 1)
    assert (last, flushed) == (character, "")


@pytest.mark.parametrize("cuts", [[1], [2], [3], [1, 2], [1, 3], [2, 3], [1, 2, 3]])
def test_a_character_may_be_split_over_tokens_anywhere(cuts: list[int]) -> None:
    data = "🎉".encode()
    pieces = [data[a:b] for a, b in pairwise([0, *cuts, 4])]
    pieces[0] = b"a" + pieces[0]
    pieces[-1] += b"z"

    given_out = outputs(PiecesTokenizer(pieces), list(range(len(pieces))))

    assert given_out == ["a", *[""] * (len(pieces) - 2), "🎉z", ""]


def test_real_merges_that_split_characters_give_whole_characters(smollm2: Tokenizer) -> None:
    text = "日本 🎉 naïve 👩‍👩‍👧"
    ids = smollm2.encode_text(text)
    assert any(smollm2.token_bytes(i).decode(errors="ignore") == "" for i in ids)

    given_out = outputs(smollm2, ids)

    assert "".join(given_out) == text
    assert not any("�" in part for part in given_out)


@pytest.mark.parametrize("data", [b"\xff", b"\xc0", b"\x80", b"\xf8"])
def test_bytes_that_cannot_begin_a_character_are_replaced_at_once(data: bytes) -> None:
    assert outputs(PiecesTokenizer([data, b"a"]), [0, 1]) == ["�", "a", ""]


def test_a_character_that_is_broken_off_is_replaced_when_the_next_begins() -> None:
    assert outputs(BYTE_LEVEL, ids_of(b"\xe2\x82a")) == ["", "", "�a", ""]
    assert outputs(BYTE_LEVEL, ids_of(b"\xf0\x9f\xc3\xa9")) == ["", "", "�", "é", ""]


def test_an_incomplete_tail_is_held_until_the_end() -> None:
    assert outputs(BYTE_LEVEL, ids_of(b"a\xf0\x9f\x8e")) == ["a", "", "", "", "�"]


def test_a_detokenizer_knows_whether_it_is_inside_a_character() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)

    known = []
    for token_id in [*ids_of("aé".encode()), IM_END, *ids_of(b"\xe2\x82a")]:
        detokenizer.feed(token_id)
        known.append(detokenizer.is_in_character)

    assert known == [False, True, False, False, True, True, False]


def test_nothing_is_held_after_a_whole_character() -> None:
    assert outputs(BYTE_LEVEL, ids_of("aé".encode()))[-1] == ""
    assert Detokenizer(BYTE_LEVEL).flush() == ""


@given(data=st.binary(max_size=40))
def test_all_that_is_given_is_what_decoding_all_the_bytes_gives(data: bytes) -> None:
    pieces = [bytes([byte]) for byte in data]

    given_out = outputs(PiecesTokenizer(pieces), list(range(len(pieces))))

    assert "".join(given_out) == data.decode("utf-8", "replace")


@settings(max_examples=50)
@given(pieces=st.lists(st.binary(max_size=5), max_size=12))
def test_the_text_does_not_depend_on_how_the_bytes_are_cut_into_tokens(pieces: list[bytes]) -> None:
    given_out = outputs(PiecesTokenizer(pieces), list(range(len(pieces))))

    assert "".join(given_out) == b"".join(pieces).decode("utf-8", "replace")


@settings(max_examples=50, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=20))
def test_any_ids_of_a_real_vocabulary_give_the_text_of_their_bytes(
    smollm2: Tokenizer, ids: list[int]
) -> None:
    given_out = outputs(smollm2, ids)

    whole = b"".join(map(smollm2.token_bytes, ids))
    assert "".join(given_out) == whole.decode("utf-8", "replace")


@pytest.mark.parametrize("token_id", [END_OF_TEXT, IM_START, IM_END])
def test_control_tokens_give_no_text_not_even_inside_a_character(token_id: int) -> None:
    first, last = ids_of("é".encode())

    assert outputs(BYTE_LEVEL, [first, token_id, last]) == ["", "", "é", ""]


def test_each_token_is_looked_at_once_however_long_the_run() -> None:
    pieces = [bytes([byte]) for byte in "añ🎉".encode() * 500]
    tokenizer = PiecesTokenizer(pieces)

    outputs(tokenizer, list(range(len(pieces))))

    assert tokenizer.looked_up == list(range(len(pieces)))
