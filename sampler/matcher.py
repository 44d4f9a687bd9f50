"""Where a turn is in what it may be, token by token: in a grammar, or in tokens known beforehand.

A free-form tool may bring a grammar for its input. To the tool's author an input is over when the
model says so, and a grammar such as ``start: /[\\s\\S]+/`` relies on that: nested in the grammar of
the turn, it would take the end marker for input like any other text, and the call would never end.
So the turn's grammar has a hole in the place of the input, and the tool's grammar is followed
beside it, over the input alone. Wherever the input may be over, the turn's grammar may go on with
the end marker. Both ways stay open until a token decides: the line break that belongs to the
marker may also be input.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import llguidance
import numpy as np

from sampler.tokenizer import Tokenizer
from sampler.tool_calls import INPUT_END


class Matcher(Protocol):
    """Where one segment is. While a step is in flight it is the model thread's."""

    @property
    def only_token(self) -> int | None:
        """The one token that may come next, if that is known without looking at the vocabulary."""

    def mask(self) -> np.ndarray:
        """Return ``(vocab,)`` bool: which tokens may come next. End-of-turn tokens are among them
        where the turn may end."""

    def allows(self, token_id: int) -> bool:
        """Tell whether ``token_id`` may come next, in a fraction of the time that a mask takes."""

    def accept(self, token_id: int) -> None:
        """Move past ``token_id``, which may come next."""


class ForcedMatcher:
    """Where a segment is in tokens that are known beforehand."""

    def __init__(self, token_ids: Sequence[int], vocab_size: int) -> None:
        """Begin a turn that is ``token_ids``, the last of which ends it."""
        self._token_ids = token_ids
        self._vocab_size = vocab_size
        self._num_accepted = 0

    @property
    def only_token(self) -> int:
        """The token that comes next."""
        return self._token_ids[self._num_accepted]

    def mask(self) -> np.ndarray:
        """Return ``(vocab,)`` bool: true for the token that comes next."""
        allowed = np.zeros(self._vocab_size, dtype=bool)
        allowed[self.only_token] = True
        return allowed

    def allows(self, token_id: int) -> bool:
        """Tell whether ``token_id`` is what comes next."""
        return token_id == self.only_token

    def accept(self, token_id: int) -> None:
        """Move past ``token_id``, which comes next."""
        assert self.allows(token_id), "nothing else may be sampled"
        self._num_accepted += 1


class GrammarMatcher:
    """Where a segment is in its grammar."""

    only_token: int | None = None
    """Where a grammar leaves a single token, it takes a mask to tell."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        turn: llguidance.LLMatcher,
        inputs: Mapping[bytes, Sequence[llguidance.LLMatcher]],
    ) -> None:
        """Begin a turn.

        Args:
            tokenizer: the one that the grammars were compiled for.
            turn: the grammar of the turn.
            inputs: the grammars of what goes into its holes, by the text before the hole. All of
                them have to admit an input.
        """
        self._tokenizer = tokenizer
        self._turn = _Position(tokenizer, turn.deep_copy())
        self._inputs = inputs
        self._input: _Input | None = None
        self._text = bytearray()  # but for inputs

    def mask(self) -> np.ndarray:
        """Return ``(vocab,)`` bool: which tokens may come next. End-of-turn tokens are among them
        where the turn may end."""
        return self._input.mask() if self._input else self._turn.mask()

    def allows(self, token_id: int) -> bool:
        """Tell whether ``token_id`` may come next, in a fraction of the time that a mask takes."""
        if self._input:
            return bool(self._input.mask()[token_id])
        if token_id in self._tokenizer.stop_ids:
            return self._turn.may_end
        return self._turn.allows([token_id])

    def accept(self, token_id: int) -> None:
        """Move past ``token_id``, which the mask allowed."""
        if self._input is None:
            self._turn.accept(token_id)
        elif after := self._input.accept(token_id):
            self._turn, self._input = after, None
        if self._input is None:
            self._text += self._tokenizer.token_bytes(token_id)
            self._enter_hole()

    def _enter_hole(self) -> None:
        hole = self._tokenizer.hole_id
        if self._inputs and self._turn.allows([hole]):
            self._turn.accept(hole)
            grammars = next(g for head, g in self._inputs.items() if self._text.endswith(head))
            self._input = _Input(self._tokenizer, grammars, self._turn)


class _Input:
    """The input of one call."""

    def __init__(
        self, tokenizer: Tokenizer, grammars: Sequence[llguidance.LLMatcher], end: "_Position"
    ) -> None:
        self._tokenizer = tokenizer
        self._grammars = [_Position(tokenizer, grammar.deep_copy()) for grammar in grammars]
        self._end = end  # before the end marker
        self._ending: _Position | None = None  # inside it, if that is what was sampled

    def mask(self) -> np.ndarray:
        """Return ``(vocab,)`` bool: which tokens may come next."""
        allowed: np.ndarray = np.logical_and.reduce([grammar.mask() for grammar in self._grammars])
        allowed[list(self._tokenizer.stop_ids)] = False
        if _may_end(self._grammars):
            allowed |= self._end.mask()
        if self._ending:
            allowed |= self._ending.mask()
        return allowed

    def accept(self, token_id: int) -> "_Position | None":
        """Move past ``token_id`` and, if the input is over, return where the turn is."""
        ending = self._ending_after(token_id)
        if not all(grammar.allows([token_id]) for grammar in self._grammars):
            if ending is None:
                raise RuntimeError("grammar refused a token it allowed: it is no input")
            return ending
        for grammar in self._grammars:
            grammar.accept(token_id)
        self._ending = ending
        return None

    def _ending_after(self, token_id: int) -> "_Position | None":
        """Return where ``token_id`` gets in the end marker, if it may be a piece of it."""
        if self._ending and self._ending.allows([token_id]):
            return self._ending.after([token_id])
        if _may_end(self._grammars) and self._end.allows([token_id]):
            return self._end.after([token_id])
        return self._ending_inside(self._tokenizer.token_bytes(token_id))

    def _ending_inside(self, token: bytes) -> "_Position | None":
        """Do so for a token that ends the input and begins the marker, such as ``)\\n``."""
        cut = token.rfind(b"\n")
        if cut <= 0 or not INPUT_END.encode().startswith(token[cut:]):
            return None
        before, marker = map(self._tokenizer.guidance.tokenize_bytes, (token[:cut], token[cut:]))
        if not all(grammar.allows(before) for grammar in self._grammars):
            return None
        over = _may_end([grammar.after(before) for grammar in self._grammars])
        return self._end.after(marker) if over else None


class _Position:
    """Where one is in one grammar."""

    def __init__(self, tokenizer: Tokenizer, matcher: llguidance.LLMatcher) -> None:
        self._tokenizer = tokenizer
        self._matcher = matcher

    @property
    def may_end(self) -> bool:
        return bool(self._matcher.is_accepting())

    def mask(self) -> np.ndarray:
        """Return ``(vocab,)`` bool: which tokens may come next."""
        words = np.zeros((self._tokenizer.guidance.vocab_size + 31) // 32, dtype=np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        return bits[: self._tokenizer.vocab_size].astype(bool)

    def allows(self, token_ids: Sequence[int]) -> bool:
        """Tell whether ``token_ids`` may come next, one after the other."""
        return bool(self._matcher.validate_tokens(list(token_ids)) == len(token_ids))

    def accept(self, token_id: int) -> None:
        """Move past ``token_id``, which may come next."""
        if not self._matcher.consume_token(token_id):
            raise RuntimeError(f"grammar refused a token it allowed: {self._matcher.get_error()}")

    def after(self, token_ids: Sequence[int]) -> "_Position":
        """Return where one is after ``token_ids``; this position stays where it is."""
        after = _Position(self._tokenizer, self._matcher.deep_copy())
        for token_id in token_ids:
            after.accept(token_id)
        return after


def _may_end(grammars: Sequence[_Position]) -> bool:
    return all(grammar.may_end for grammar in grammars)
