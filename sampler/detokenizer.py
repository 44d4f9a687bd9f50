"""Token ids to text, token by token.

A character may lie across several tokens, and across a suspension. The decoder gives out whole
characters only; bytes that can never become one are replaced by U+FFFD at once, and a tail that
still may is kept until the end. It looks at each byte once, so a long run costs no more per token
than a short one.
"""

import codecs

from sampler.tokenizer import Tokenizer

_Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The incremental decoder of one run."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._decoder = _Decoder(errors="replace")

    @property
    def is_in_character(self) -> bool:
        """True if the last token has begun a character that it does not complete."""
        held, _ = self._decoder.getstate()
        return bool(held)

    def feed(self, token_id: int) -> str:
        """Return the characters that ``token_id`` completes: often one word, sometimes none."""
        return self._decoder.decode(self.tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """Return U+FFFD for a character that was begun and will not be finished, else nothing."""
        return self._decoder.decode(b"", final=True)
