"""What the operator chose."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """How the server is to behave; what it runs on is the engine's business."""

    seed: int | None = None
    """Of requests that bring none; None draws a fresh one for each."""
    max_frame_bytes: int = 128 * 1024 * 1024
    """The longest frame or body that is read."""
    max_queued_creates: int = 16
    """How many creates may wait on one connection while a response is being sampled."""
