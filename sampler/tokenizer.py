"""Text to token ids and token ids to bytes, with control ids out of reach of text.

A chat format is made of control tokens (``<|im_end|>``) and of text. Text is data: a tool result
may well contain the characters ``<|im_end|>``. So the two are encoded apart. Control tokens are
looked up by name, and text goes through a copy of the tokenizer that has no added tokens (but for
runs of white space, which some vocabularies add), and so cannot give a control id whatever the text
says.
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import llguidance
from tokenizers import Tokenizer as FastTokenizer

from sampler.counters import Counters

_MANY_CHARACTERS = 2000
"""What takes longer to encode than another thread, the event loop's say, likes to stand still."""


class Tokenizer:
    """Wraps a Hugging Face fast tokenizer for one model."""

    def __init__(
        self,
        fast: FastTokenizer,
        stop_ids: Iterable[int],
        vocab_size: int | None = None,
        counters: Counters | None = None,
    ) -> None:
        """Wrap ``fast`` for a model.

        Args:
            fast: the tokenizer.
            stop_ids: the ids that end a turn.
            vocab_size: the number of logits, which models often pad; default: the tokenizer's.
            counters: where encodes are counted.
        """
        self.stop_ids = frozenset(stop_ids)
        self.counters = counters or Counters()
        self.vocab_size = vocab_size or fast.get_vocab_size(with_added_tokens=True)
        description = json.loads(fast.to_str())
        self._added = {
            token["content"]: token["id"]
            for token in description["added_tokens"]
            if token["content"].strip()
        }
        self._control_names: dict[int, str] = {
            token["id"]: token["content"]
            for token in description["added_tokens"]
            if token["special"]
        }
        special_ids = set(self._control_names)
        # Logits that only pad the vocabulary belong to no token.
        padding_ids = set(range(self.vocab_size)).difference(fast.get_vocab().values())
        self._silent_ids = self.stop_ids | special_ids | padding_ids
        self._text = FastTokenizer.from_str(json.dumps(_without_added_tokens(description)))
        known = llguidance.LLTokenizer(json.dumps(description), n_vocab=self.vocab_size)
        self._bytes = [known.decode_bytes([token_id]) for token_id in range(self.vocab_size)]
        self.hole_id = self.vocab_size
        """A token of llguidance's alone, which a grammar may have in the place of something that
        another grammar describes. The model cannot sample it."""
        vocabulary = _GuidanceVocabulary(
            [*self._bytes, b"<|hole|>"],
            sorted(special_ids | padding_ids | {self.hole_id}),
            min(self.stop_ids),
            self._encode,
        )
        self.guidance = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(vocabulary),
            n_vocab=self.vocab_size + 1,
            eos_token=sorted(self.stop_ids),
        )
        """The same vocabulary as llguidance sees it."""

    @property
    def added_tokens(self) -> dict[str, int]:
        """The ids of the added tokens (control tokens among them) by their text."""
        return self._added

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of ``text``, none of them an added token's.

        Text that looks like a control token (``"<|im_end|>"``) is encoded as its characters. Half a
        surrogate pair, which JSON can smuggle into a string, is no character and becomes U+FFFD.
        """
        began_at = time.perf_counter()
        text = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        token_ids = self._encode(text)
        self.counters.encodes += 1
        self.counters.tokens_encoded += len(token_ids)
        self.counters.encode_seconds += time.perf_counter() - began_at
        return token_ids

    def _encode(self, text: str) -> list[int]:
        if len(text) < _MANY_CHARACTERS:
            return self._text.encode(text, add_special_tokens=False).ids
        # Only a batch lets other Python threads go on meanwhile.
        (encoding,) = self._text.encode_batch_fast([text], add_special_tokens=False)
        return encoding.ids

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that ``token_id`` stands for in text; control tokens stand for none."""
        if token_id in self._silent_ids:
            return b""
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """Return the characters of ``token_id``, for a person to read; control tokens have names.

        A token that is a part of a character reads U+FFFD.
        """
        if name := self._control_names.get(token_id):
            return name
        return self.token_bytes(token_id).decode("utf-8", "replace")


@dataclass(frozen=True)
class _GuidanceVocabulary:
    """What llguidance asks of a tokenizer that it cannot read itself.

    llguidance encodes what a grammar leaves no choice about, and grammars hold text that clients
    wrote. So ``encode`` must have no control ids to give.
    """

    tokens: Sequence[bytes]
    special_token_ids: Sequence[int]
    eos_token_id: int
    encode: Callable[[str], list[int]]
    bos_token_id: int | None = None

    def __call__(self, text: str) -> list[int]:
        return self.encode(text)


def _without_added_tokens(description: dict[str, Any]) -> dict[str, Any]:
    """Drop the added tokens, and what a post-processor would add on its own (a BOS, say)."""
    spaces = [token for token in description["added_tokens"] if not token["content"].strip()]
    words = {token["content"] for token in description["added_tokens"]}
    model = description["model"]
    if model["type"] == "BPE":
        model = _without_words(model, words)
        # An added token that the vocabulary lacks would be numbered anew.
        model["vocab"] |= {token["content"]: token["id"] for token in spaces}
    return {**description, "added_tokens": spaces, "post_processor": None, "model": model}


def _without_words(model: dict[str, Any], words: Set[str]) -> dict[str, Any]:
    """Drop ``words`` from a BPE vocabulary, unless merges make them of ordinary text.

    With ``ignore_merges`` a piece of text that is in the vocabulary gets its id, merges or not.
    """
    merged = {part for merge in model["merges"] for part in (*merge, "".join(merge))}
    words = words - merged
    vocab = {word: token_id for word, token_id in model["vocab"].items() if word not in words}
    unknown = None if model["unk_token"] in words else model["unk_token"]
    return {**model, "vocab": vocab, "unk_token": unknown}
