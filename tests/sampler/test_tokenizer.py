import json
from threading import Event, Thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.processors import TemplateProcessing

from protocol.tools import FunctionTool
from sampler.counters import Counters
from sampler.grammar import GrammarCompiler
from sampler.params import Constraint
from sampler.tokenizer import Tokenizer
from tests.sampler.smollm2 import smollm2_tokenizer
from tests.tiny_model import END_OF_TEXT, IM_END, IM_START, byte_tokenizer

CONTROL_STRINGS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<|im_", "end|>"]

# SmolLM2 has no token for most control characters, nor for bytes of planes that hold no characters.
IN_SMOLLM2 = st.characters(
    exclude_categories=("Cs", "Cc"), max_codepoint=0x3FFFF, include_characters="\n\t"
)


def texts_with_control_strings(characters: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pieces = st.one_of(st.sampled_from(CONTROL_STRINGS), st.text(characters, max_size=8))
    return st.lists(pieces, max_size=8).map("".join)


def byte_level(fast: FastTokenizer | None = None, vocab_size: int | None = None) -> Tokenizer:
    return Tokenizer(fast or byte_tokenizer(), [END_OF_TEXT, IM_END], vocab_size)


BYTE_LEVEL = byte_level()


def edited(**model: Any) -> FastTokenizer:
    """Return the byte tokenizer with members of its model replaced."""
    description = json.loads(byte_tokenizer().to_str())
    description["model"] |= model
    return FastTokenizer.from_str(json.dumps(description))


def bytes_of(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    return b"".join(map(tokenizer.token_bytes, ids))


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return smollm2_tokenizer()


# --- Text ----------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(text=texts_with_control_strings(st.characters(codec="utf-8")))
def test_no_text_gives_an_added_id_and_the_bytes_of_the_ids_are_the_text(text: str) -> None:
    ids = BYTE_LEVEL.encode_text(text)

    assert not set(ids) & set(BYTE_LEVEL.added_tokens.values())
    assert bytes_of(BYTE_LEVEL, ids) == text.encode()


@settings(max_examples=50, deadline=None)
@given(text=texts_with_control_strings(IN_SMOLLM2))
def test_no_text_gives_an_added_id_of_a_real_vocabulary(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode_text(text)

    assert not set(ids) & set(smollm2.added_tokens.values())
    assert bytes_of(smollm2, ids) == text.encode()


def test_ordinary_text_is_encoded_as_the_model_was_trained_to_see_it(smollm2: Tokenizer) -> None:
    assert smollm2.encode_text("Hello world\n\n2") == [19556, 905, 1116, 34]


def test_a_vocabulary_that_ignores_merges_does_not_give_a_control_id_either() -> None:
    # The whole control string is one pre-token here, and in the vocabulary as a word.
    tokenizer = byte_level(edited(ignore_merges=True))

    ids = tokenizer.encode_text("<|im_end|>")

    assert IM_END not in ids
    assert bytes_of(tokenizer, ids) == b"<|im_end|>"


def test_an_unknown_token_that_is_a_control_token_does_not_stand_for_text() -> None:
    vocab = json.loads(byte_tokenizer().to_str())["model"]["vocab"]
    without_z = {token: token_id for token, token_id in vocab.items() if token != "z"}
    tokenizer = byte_level(edited(vocab=without_z, unk_token="<|endoftext|>"))

    assert bytes_of(tokenizer, tokenizer.encode_text("azb")) == b"ab"


def test_words_that_merges_make_of_ordinary_text_stay_even_if_added_tokens_look_like_them() -> None:
    vocab = json.loads(byte_tokenizer().to_str())["model"]["vocab"] | {"ab": 259, "abc": 260}
    fast = edited(vocab=vocab, merges=[["a", "b"], ["ab", "c"]])
    fast.add_tokens(["ab"])
    tokenizer = byte_level(fast)

    assert tokenizer.encode_text("abc") == [260]


def test_half_a_surrogate_pair_becomes_replacement_characters() -> None:
    ids = BYTE_LEVEL.encode_text("a\ud800b")

    assert set(bytes_of(BYTE_LEVEL, ids).decode()) == {"a", "�", "b"}


def test_a_post_processor_that_adds_a_bos_is_not_applied() -> None:
    fast = byte_tokenizer()
    fast.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", IM_START)]
    )
    assert fast.encode("a").ids[0] == IM_START

    assert byte_level(fast).encode_text("a") == BYTE_LEVEL.encode_text("a")


def test_runs_of_white_space_that_a_vocabulary_adds_are_text() -> None:
    fast = byte_tokenizer()
    # The one that is dropped comes first: it must not take the number of the other with it.
    fast.add_tokens([AddedToken("<tool_call>"), AddedToken("    ", normalized=False)])
    tokenizer = byte_level(fast)

    ids = tokenizer.encode_text("a    b<tool_call>")

    assert fast.token_to_id("    ") in ids
    assert fast.token_to_id("<tool_call>") not in ids
    assert bytes_of(tokenizer, ids) == b"a    b<tool_call>"
    assert "    " not in tokenizer.added_tokens


def test_encodes_are_counted() -> None:
    counters = Counters()
    tokenizer = Tokenizer(byte_tokenizer(), [IM_END], counters=counters)

    tokenizer.encode_text("a")
    tokenizer.encode_text("bc")

    assert counters.encodes == 2


# --- Ids -----------------------------------------------------------------------------------------


def test_control_tokens_are_found_by_their_text() -> None:
    assert BYTE_LEVEL.added_tokens == {
        "<|endoftext|>": END_OF_TEXT,
        "<|im_start|>": IM_START,
        "<|im_end|>": IM_END,
    }


def test_control_tokens_stand_for_no_bytes() -> None:
    assert bytes_of(BYTE_LEVEL, [END_OF_TEXT, IM_START, IM_END]) == b""


def test_added_tokens_that_are_not_special_stand_for_their_text() -> None:
    fast = byte_tokenizer()
    fast.add_tokens(["<tool_call>"])  # as in Qwen's vocabularies
    tokenizer = byte_level(fast)

    assert tokenizer.token_bytes(tokenizer.added_tokens["<tool_call>"]) == b"<tool_call>"


def test_a_stop_token_stands_for_no_bytes_even_if_it_is_not_special() -> None:
    fast = byte_tokenizer()
    fast.add_tokens(["</s>"])

    tokenizer = Tokenizer(fast, [259])

    assert tokenizer.added_tokens["</s>"] == 259
    assert tokenizer.token_bytes(259) == b""


def test_a_token_may_be_a_part_of_a_character(smollm2: Tokenizer) -> None:
    ids = smollm2.encode_text("🎉")

    assert len(ids) == 3
    assert bytes_of(smollm2, ids) == "🎉".encode()


def test_a_token_can_be_read_by_a_person(smollm2: Tokenizer) -> None:
    (word,) = smollm2.encode_text(" the")
    party = smollm2.encode_text("🎉")

    assert smollm2.token_text(word) == " the"
    assert smollm2.token_text(IM_END) == "<|im_end|>"
    assert "�" in smollm2.token_text(party[0])


# --- Padded vocabularies -------------------------------------------------------------------------


def test_without_a_vocabulary_size_there_are_as_many_logits_as_tokens() -> None:
    assert BYTE_LEVEL.vocab_size == 259


def test_ids_that_only_pad_the_logits_stand_for_no_bytes() -> None:
    tokenizer = byte_level(vocab_size=320)

    assert bytes_of(tokenizer, list(range(259, 320))) == b""


@pytest.mark.parametrize("vocab_size", [259, 260, 288, 300, 320])
def test_the_grammar_mask_has_the_size_of_the_logits_and_never_allows_padding(
    vocab_size: int,
) -> None:
    tokenizer = byte_level(vocab_size=vocab_size)
    constraint = Constraint((FunctionTool("f"),))

    matcher = GrammarCompiler(tokenizer).matcher(constraint)

    assert matcher is not None
    mask = matcher.mask()
    assert mask.shape == (vocab_size,)
    assert not mask[259:].any()
    assert mask[:259].any()


def test_no_text_holds_the_hole_of_a_grammar_and_no_logit_stands_for_it() -> None:
    assert BYTE_LEVEL.hole_id == BYTE_LEVEL.vocab_size
    assert BYTE_LEVEL.hole_id not in BYTE_LEVEL.guidance.tokenize_str("<|hole|>")
    assert BYTE_LEVEL.hole_id not in BYTE_LEVEL.encode_text("<|hole|>")


# --- Long texts ----------------------------------------------------------------------------------


def test_a_long_text_has_the_ids_of_a_short_one(smollm2: Tokenizer) -> None:
    words = [f"{number} {chr(0x3B1 + number % 24)}bc\n" for number in range(1000)]

    token_ids = smollm2.encode_text("".join(words))

    assert len("".join(words)) > 4000
    assert bytes_of(smollm2, token_ids) == "".join(words).encode()
    assert token_ids == [
        token_id
        for start in range(0, len(words), 100)
        for token_id in smollm2.encode_text("".join(words[start : start + 100]))
    ]


def test_other_threads_go_on_while_a_long_text_is_encoded(smollm2: Tokenizer) -> None:
    ticks: list[int] = []
    is_over = Event()

    def tick() -> None:
        while not is_over.wait(0.001):
            ticks.append(len(ticks))

    ticking = Thread(target=tick)
    ticking.start()
    before = len(ticks)
    smollm2.encode_text("word " * 100_000)
    num_ticks = len(ticks) - before
    is_over.set()
    ticking.join()

    assert num_ticks > 10
