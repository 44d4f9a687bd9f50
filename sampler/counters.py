"""Exact counts of the work an engine has done, since it was made.

Comparisons of designs and tests read these: a count has no noise. Only the thread that does the
work adds to its count, so plain integers suffice.
"""

from dataclasses import dataclass


@dataclass
class Counters:
    """Monotonic counts."""

    tokens_forwarded: int = 0
    """Positions that went through the model."""
    tokens_reforwarded: int = 0
    """Those of them that had been through it before, for the same run."""
    tokens_sampled: int = 0
    forward_passes: int = 0
    template_renders: int = 0
    """Times a conversation was laid out as turns."""
    encodes: int = 0
    """Texts given to the tokenizer."""
