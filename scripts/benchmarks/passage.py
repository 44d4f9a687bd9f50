"""A fixed text to judge a model's formats by, and to have runs go on from.

It is the second chapter of William Morris, *News from Nowhere* (1890), which is in the public
domain: old enough to be free, odd enough not to be known by heart.
"""

from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

_FILE = Path(__file__).with_name("data") / "news_from_nowhere.txt"


def text() -> str:
    """Return the passage, a paragraph a line."""
    return _FILE.read_text()


@cache
def token_ids(model_directory: Path) -> tuple[int, ...]:
    """Return the passage in the tokens of a model."""
    tokenizer = Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    return tuple(tokenizer.encode(text(), add_special_tokens=False).ids)


def windows(
    model_directory: Path, number: int, num_tokens: int, *, overlap: bool = False
) -> list[list[int]]:
    """Return ``number`` different pieces of ``num_tokens`` each, evenly over the passage.

    Args:
        model_directory: whose tokens.
        number: of pieces.
        num_tokens: of each.
        overlap: whether they may share tokens, where the passage is too short.

    Raises:
        ValueError: the passage is too short.
    """
    ids = token_ids(model_directory)
    step = (len(ids) - num_tokens) // max(1, number - 1)
    if step < (1 if overlap else num_tokens):
        raise ValueError(f"{len(ids)} tokens do not hold {number} windows of {num_tokens}")
    return [list(ids[i * step : i * step + num_tokens]) for i in range(number)]


def excerpts(number: int, num_characters: int) -> list[str]:
    """Return ``number`` different pieces of the passage, evenly over it."""
    whole = text()
    step = (len(whole) - num_characters) // max(1, number - 1)
    assert step > 0, "the passage is long enough"
    return [whole[i * step : i * step + num_characters] for i in range(number)]
