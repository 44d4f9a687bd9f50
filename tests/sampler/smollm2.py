"""The tokenizer of the embedded model, where a test needs real merges. The model stays unloaded."""

from functools import cache
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from sampler.embedded_model import ensure_embedded_model
from sampler.tokenizer import Tokenizer

VOCAB_SIZE = 49152
END_OF_TEXT, IM_START, IM_END = 0, 1, 2


@cache
def smollm2_directory() -> Path:
    return ensure_embedded_model()


@cache
def smollm2_tokenizer() -> Tokenizer:
    """Return the one tokenizer that all tests share. Do not look at its counters."""
    fast = FastTokenizer.from_file(str(smollm2_directory() / "tokenizer.json"))
    return Tokenizer(fast, [END_OF_TEXT, IM_END], VOCAB_SIZE)
