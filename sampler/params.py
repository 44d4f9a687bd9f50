"""How a run is to be sampled."""

from dataclasses import dataclass

from protocol.tools import FunctionTool


@dataclass(frozen=True)
class SamplingParams:
    """The knobs of one run."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    seed: int = 0
    """Together with the position and the logits it decides every token."""
    max_output_tokens: int | None = None
    """Per segment; None leaves the context length as the only bound."""


@dataclass(frozen=True)
class ToolConstraint:
    """Which functions the model may call in a segment, and how many times.

    ``auto`` is 0 to any number, ``required`` 1 to any number, a named function exactly 1, ``none``
    exactly 0; ``parallel_tool_calls: false`` lowers the upper end to 1.
    """

    functions: tuple[FunctionTool, ...] = ()
    min_calls: int = 0
    max_calls: int | None = None
    """None: any number."""

    @property
    def is_forced(self) -> bool:
        return self.min_calls > 0

    @property
    def allows_calls(self) -> bool:
        return bool(self.functions) and self.max_calls != 0
