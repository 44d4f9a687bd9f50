"""How a run is to be sampled, and what a turn of it may be."""

from dataclasses import dataclass, field

from protocol.client_events import TextFormat, TextFormatKind
from protocol.tools import CallableTool


@dataclass(frozen=True)
class SamplingParams:
    """The knobs of one run."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    seed: int = 0
    """Together with the position, the logits and, where there are penalties, what the segment has
    sampled so far, it decides every token."""
    max_output_tokens: int | None = None
    """Per segment; None leaves the context length as the only bound."""
    top_logprobs: int | None = None
    """How many log-probabilities come with each token, besides its own; None: not even that."""
    presence_penalty: float = 0.0
    """What the logit of a token loses once the segment has sampled it."""
    frequency_penalty: float = 0.0
    """What the logit of a token loses each time that the segment samples it."""
    reasoning_effort: str | None = None
    """How much the model is to think, where it can be told so in a word; None: as it likes."""

    @property
    def has_penalties(self) -> bool:
        """True if what the segment has sampled so far makes a difference."""
        return bool(self.presence_penalty or self.frequency_penalty)


@dataclass(frozen=True)
class Constraint:
    """What a turn may be: calls, and how many, or text, and of which form; and thoughts first.

    ``auto`` is 0 to any number of calls, ``required`` 1 to any number, a named tool exactly 1,
    ``none`` exactly 0; ``parallel_tool_calls: false`` lowers the upper end to 1.
    """

    tools: tuple[CallableTool, ...] = ()
    """Those that may be called, by their qualified names."""
    min_calls: int = 0
    max_calls: int | None = None
    """None: any number."""
    text_format: TextFormat = field(default_factory=TextFormat)
    """Binds the final message only: calls may be made whatever it is."""
    thinks: bool = False
    """Whether the model may think in a ``<think>`` block before all else."""
    think_is_open: bool = False
    """Whether the prompt has begun that block, so that the turn begins inside it."""
    forced_ids: tuple[int, ...] | None = None
    """All of the turn, its end-of-turn id included, where it is known already and only to be said
    again: then no grammar binds it. What it says is read as of any other turn."""

    @property
    def is_forced(self) -> bool:
        """True if the turn has to make a call."""
        return self.min_calls > 0

    @property
    def allows_calls(self) -> bool:
        """True if the turn may make a call."""
        return bool(self.tools) and self.max_calls != 0

    @property
    def wants_json(self) -> bool:
        """True if a turn without calls is one JSON value."""
        return self.text_format.kind is not TextFormatKind.TEXT
