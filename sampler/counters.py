"""Exact counts of the work an engine has done, since it was made.

Comparisons of designs and tests read these: a count has no noise. Only the thread that does the
work adds to its count, so plain integers suffice.
"""

from dataclasses import dataclass, field


@dataclass
class Counters:
    """Monotonic counts."""

    tokens_forwarded: int = 0
    """Positions that went through the model."""
    tokens_reforwarded: int = 0
    """Those of them that had been through it before, for the same run or warm-up."""
    tokens_sampled: int = 0
    forward_passes: int = 0
    """Times the model was run; sequences that share a pass count once."""
    steps: int = 0
    """Steps of the model thread, each of which takes all runs on that are to go on: in one pass
    where the model can."""
    swaps_out: int = 0
    """Caches that were written to a file."""
    swaps_in: int = 0
    """Caches that were read back."""
    tokens_swapped: int = 0
    """Positions that were swapped out."""
    discards: int = 0
    """Caches of suspended runs that were given up, to be computed again."""
    kept_discards: int = 0
    """Caches that were kept for others to start from, and were given up."""
    preemptions: int = 0
    """Caches of runs that were being sampled that were given up, to be computed again."""
    template_renders: int = 0
    """Times a conversation was laid out as turns."""
    encodes: int = 0
    """Texts given to the tokenizer."""
    tokens_encoded: int = 0
    """Tokens that they came to."""
    encode_seconds: float = field(default=0.0, compare=False)
    """How long that took."""


@dataclass
class TextWork:
    """What of it was done for one request. Written by the text thread while it is waited for."""

    renders: int = 0
    encodes: int = 0
    render_seconds: float = 0.0
    """Laying out, without the encoding."""
    encode_seconds: float = 0.0
