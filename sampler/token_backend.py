"""What samples tokens behind the sampling loop: the model in this process, or another engine.

A back-end makes a session for each run. The run's token log is the truth: it holds the whole
context, and a session reads from it what it has not yet got. Everything here is called in the event
loop, and nothing in it waits.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from sampler.cache_pool import MemoryUse
from sampler.capabilities import Capabilities
from sampler.counters import Counters
from sampler.engine_error import EngineError
from sampler.matcher import Matcher
from sampler.run import Run
from sampler.snapshot import Snapshot, Sources
from sampler.suspension import Suspension
from sampler.token_channel import TokenChannel


class Session(ABC):
    """One run in a back-end, from its first segment to its end."""

    channel: TokenChannel
    """Where the messages of the segment come from: tokens, and last why there are no more."""

    @abstractmethod
    def expect(self) -> None:
        """Open the channel of a new segment. The run will want the model in a moment."""

    @abstractmethod
    def start(self, matcher: Matcher | None) -> None:
        """Have the model go on with what the log has, to another end of a turn.

        Args:
            matcher: where the segment is in its grammar, if it has one.
        """

    @abstractmethod
    def took(self, num_messages: int) -> None:
        """Take note that the consumer of the channel is done with so many messages."""

    @abstractmethod
    async def stop(self, num_tokens: int) -> None:
        """Stop what was started and is not over, and forget what was sampled behind the first
        ``num_tokens`` tokens of the run. What goes on meanwhile is waited for, even on
        cancellation."""

    @abstractmethod
    def end_segment(self) -> None:
        """Take it that the segment wants nothing any more."""

    @abstractmethod
    def suspend(self, suspension: Suspension) -> None:
        """Take it that the run wants nothing until the calls are answered."""

    @abstractmethod
    def resume(self, suspension: Suspension, seconds: float) -> None:
        """Take it that they were, after so many seconds; the log has the suffix."""

    @abstractmethod
    def snapshot(self) -> Snapshot | None:
        """Return what others can start from, if anything of it is to be had here."""

    @abstractmethod
    def let_go(self) -> None:
        """Hold nothing of the run, which is over."""


class TokenBackend(ABC):
    """Tokens in, tokens out."""

    capabilities: Capabilities
    counters: Counters

    @property
    @abstractmethod
    def max_context(self) -> int:
        """The most tokens of a run."""

    @property
    def failure(self) -> str | None:
        """Why no run can be sampled any more; None if they can, as far as is known."""
        return None

    @property
    def kv_tokens(self) -> int:
        """Positions held in caches here; what several caches share counts for each."""
        return 0

    @property
    def memory(self) -> MemoryUse:
        """What the blocks of caches here were used for a moment ago."""
        return MemoryUse(0, 0, 0, 0)

    @abstractmethod
    def new_session(self, run: Run, sources: Sources) -> Session:
        """Return a session of ``run``, which is new, and may start from ``sources``: of their
        snapshots there is one at most."""

    def new_snapshot(self, token_ids: Sequence[int]) -> Snapshot | None:
        """Return ``token_ids`` with an empty cache, to be warmed up, if caches are kept here."""
        return None

    async def warm_up(self, snapshot: Snapshot, sources: Sources) -> None:
        """Fill the cache of ``snapshot`` while no run wants the model. It may start from
        ``sources``: of their snapshots there is one at most.

        Raises:
            EngineError: a model step failed.
        """
        raise EngineError("there are no caches here that could be filled")

    @abstractmethod
    async def start(self) -> None:
        """Make sure that runs can be sampled.

        Raises:
            EngineError: they cannot.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Let go of what takes the event loop to let go of. Runs must be over."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything else."""


def closest(token_ids: tuple[int, ...], snapshots: Iterable[Snapshot]) -> Snapshot | None:
    """Return that of ``snapshots`` which shares most with ``token_ids``, if there are any."""
    return max(snapshots, key=lambda snapshot: snapshot.num_shared(token_ids), default=None)
