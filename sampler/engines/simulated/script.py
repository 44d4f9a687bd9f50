"""What a simulated model says.

It says scripted turns in their order, and then from the first on again: which of them is due
follows from how many turns of the assistant the context has begun. A turn is a number of words,
chosen by the hash of the context, and then text that is said as it is, a tool call for instance.

**Where a grammar forbids that**, as when a call is forced, it says what is closest: such tokens as
begin what comes next in the script, or else such as bring the turn to an end, by closing quotes and
brackets. What it was about to say it says as soon as it may, in a string argument perhaps.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from protocol.items import FunctionCall
from sampler.conversation import call_text
from sampler.tokenizer import Tokenizer
from sampler.tool_calls import INPUT_END

_WORDS = """
    the of and to in a is that it for was on are as with they be at one have this from by but some
    what there we can out other were all your when up use word how said each she which do their time
    if will way about many then them would write like so these her long make thing see him two has
    look more day could go come did my no most who over know than call first people may down side
    been now find any new work part take get place made where after back little only round man year
    came show every good me our under name very through just form great think say help low line
""".split()  # noqa: SIM905 - as a list it would fill a page


@dataclass(frozen=True)
class ScriptedTurn:
    """One turn of the assistant."""

    num_words: int = 0
    """Tokens of ordinary words that it begins with."""
    text: str = ""
    """What follows them. Tool calls are written as ``sampler.tool_calls`` parses them."""


@dataclass(frozen=True)
class Script:
    """The turns of a conversation. One that is longer begins the script again."""

    turns: tuple[ScriptedTurn, ...] = (ScriptedTurn(num_words=64),)

    def __post_init__(self) -> None:
        if not self.turns:
            raise ValueError("expected a script of one turn at least")

    @classmethod
    def of_calls(
        cls,
        num_calls: int,
        name: str,
        arguments: str = "{}",
        *,
        num_words_before: int = 0,
        num_words: int = 64,
    ) -> "Script":
        """Return a script of that many turns that make one call each, and an answer.

        Args:
            num_calls: turns that call.
            name: of the function.
            arguments: JSON.
            num_words_before: what each of them says before it calls, in tokens.
            num_words: what the answer is, in tokens.
        """
        text = call_text(FunctionCall("", name, arguments))
        calling = ScriptedTurn(num_words_before, text)
        return cls((calling,) * num_calls + (ScriptedTurn(num_words),))


class Place(NamedTuple):
    """Where in its script a model is."""

    num_turns: int = 0
    """Turns of the assistant that have begun."""
    num_matched: int = 0
    """Tokens of the header of such a turn that the latest tokens are."""
    progress: int = 0
    """How much of the turn has been said: tokens of words, and then bytes of text as well."""

    def pack(self) -> int:
        """Return it in 64 bits."""
        return self.num_turns << 40 | self.num_matched << 32 | self.progress

    @staticmethod
    def unpack(packed: int) -> "Place":
        """Return what ``pack`` was called on."""
        return Place(packed >> 40, packed >> 32 & 0xFF, packed & 0xFFFF_FFFF)


# Scores of tokens, apart by far more than the noise of sampling at any usual temperature.
_CERTAIN = 1e6
_ON_SCRIPT = 2000.0
_ENDS_TURN = 1000.0
_ENDS_INPUT = 800.0
_BEGINS_END = 600.0
_CLOSES = 400.0
_IS_SPACE = -400.0
_IS_NO_ASCII = -800.0
_IS_NO_TEXT = -2000.0

_CLOSING = re.compile(rb'["\]}]+')
_SPACE = re.compile(rb"\s+")
_ASCII = re.compile(rb"[\x20-\x7e\s]+")


class Speaker:
    """Says a script in the tokens of one tokenizer."""

    def __init__(
        self, tokenizer: Tokenizer, script: Script, header: Sequence[int], end_of_turn: int
    ) -> None:
        """Say ``script``.

        Args:
            tokenizer: whose words are to be had as single tokens.
            script: what is said.
            header: what a turn of the assistant begins with. Its first token is nowhere else in it.
            end_of_turn: what a turn ends with.
        """
        self._tokenizer = tokenizer
        self._header = tuple(header)
        self._end_of_turn = end_of_turn
        encoded = [tokenizer.encode_text(f" {word}") for word in _WORDS]
        self._words = [ids[0] for ids in encoded if len(ids) == 1]
        assert self._words, "the vocabulary has words"
        self._turns = [_Speech(turn, tokenizer) for turn in script.turns]
        self._end_of_input = tokenizer.encode_text(INPUT_END)

    def after(self, place: Place, token_id: int) -> Place:
        """Return where it is once ``token_id`` has been read or said."""
        num_turns, num_matched, progress = place
        if token_id == self._header[num_matched]:
            if num_matched + 1 == len(self._header):
                return Place(num_turns + 1)
            return Place(num_turns, num_matched + 1, progress)
        num_matched = int(token_id == self._header[0])
        if num_turns:
            progress += self._speech(place).advance(progress, token_id)
        return Place(num_turns, num_matched, progress)

    def next(self, place: Place, chain: int) -> int:
        """Return what it says at ``place``; ``chain`` picks the words."""
        if not place.num_turns:
            return self._word(chain)
        speech = self._speech(place)
        if place.progress < speech.num_words:
            return self._word(chain)
        token_id = speech.token_at(place.progress)
        if token_id is not None:
            return token_id
        return next(self._on_script(place), self._end_of_turn)

    def logits(self, place: Place, chain: int, last_id: int) -> Tensor:
        """Return logits ``(vocab,)`` whose largest is that of ``next``, and the others such that
        any grammar comes to an end."""
        noise = np.random.Generator(np.random.Philox(key=chain))
        scores = self._ranks + noise.random(len(self._ranks), dtype=np.float32)
        begins_end, *_ = self._end_of_input
        if chain >> 60 & 3 == 0:
            scores[begins_end] = _BEGINS_END  # now and then: not all white space ends something
        for token_id, following in zip(self._end_of_input, self._end_of_input[1:], strict=False):
            if token_id == last_id:
                scores[following] = _ENDS_INPUT
        for token_id in self._on_script(place):
            scores[token_id] = _ON_SCRIPT + len(self._tokenizer.token_bytes(token_id))
        scores[self.next(place, chain)] = _CERTAIN
        return torch.from_numpy(scores)

    def _word(self, chain: int) -> int:
        return self._words[(chain >> 16) % len(self._words)]

    def _speech(self, place: Place) -> "_Speech":
        return self._turns[(place.num_turns - 1) % len(self._turns)]

    def _on_script(self, place: Place) -> Iterator[int]:
        """Return tokens that begin what comes next in the text of the script, longest first."""
        if not place.num_turns:
            return
        rest = self._speech(place).rest(place.progress)
        for length in range(min(len(rest), self._longest), 0, -1):
            if (token_id := self._ids.get(rest[:length])) is not None:
                yield token_id

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        """Ids by what they stand for."""
        size = self._tokenizer.vocab_size
        ids = {self._tokenizer.token_bytes(token_id): token_id for token_id in range(size)}
        ids.pop(b"", None)
        return ids

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids))

    @cached_property
    def _ranks(self) -> np.ndarray:
        """``(vocab,)`` float32: how much each token does to end a turn."""
        size = self._tokenizer.vocab_size
        texts = map(self._tokenizer.token_bytes, range(size))
        ranks = np.fromiter(map(_rank, texts), dtype=np.float32, count=size)
        ranks[self._end_of_turn] = _ENDS_TURN
        return ranks


def _rank(text: bytes) -> float:
    if not text:
        return _IS_NO_TEXT
    if _CLOSING.fullmatch(text):
        return _CLOSES
    if _SPACE.fullmatch(text):
        return _IS_SPACE
    return 0.0 if _ASCII.fullmatch(text) else _IS_NO_ASCII


class _Speech:
    """A scripted turn in tokens."""

    def __init__(self, turn: ScriptedTurn, tokenizer: Tokenizer) -> None:
        self.num_words = turn.num_words
        self._bytes_of = tokenizer.token_bytes
        self._text = b""  # what the vocabulary lacks is not said
        self._tokens = dict[int, int]()
        for token_id in tokenizer.encode_text(turn.text):
            self._tokens[turn.num_words + len(self._text)] = token_id
            self._text += tokenizer.token_bytes(token_id)

    def token_at(self, progress: int) -> int | None:
        """Return what is said then, if that is where a token of the text begins."""
        return self._tokens.get(progress)

    def rest(self, progress: int) -> bytes:
        """Return what is left of the text, once it has begun."""
        return self._text[progress - self.num_words :] if progress >= self.num_words else b""

    def advance(self, progress: int, token_id: int) -> int:
        """Return by how much the turn is further with ``token_id``: by nothing, where that is not
        what was to be said."""
        if progress < self.num_words:
            return 1
        if self._tokens.get(progress) != token_id:
            said = self._bytes_of(token_id)
            return len(said) if self.rest(progress).startswith(said) else 0
        return len(self._bytes_of(token_id))
