"""What the model is to do with one sequence of tokens.

A job is handed over. Between ``Executor.start`` and its last message (or the return of
``Executor.stop``) it belongs to the model thread, and at all other times to the event loop. So it
needs no lock, and the model thread needs nobody's answer to go from one token to the next: a job
knows by itself when its turn is over.

It has a list of token ids of its own. The run's log is what the client has been told; the job may
be ahead of it by the window of the channel.
"""

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass

import numpy as np

from sampler.kv_cache import KVCache
from sampler.matcher import Matcher
from sampler.model_runner import Piece
from sampler.run import Run, StopReason
from sampler.sampling import Certain, Logits, Sampled, forced, sample
from sampler.token_channel import Message, TokenChannel


@dataclass(frozen=True)
class Sharing:
    """With whom the cache of a prompt is shared: with all that have the same salt."""

    salt: Hashable


class Job(ABC):
    """Tokens, the cache that they go into, and the channel that tells of it."""

    is_background = False
    """Whether it can wait for all those that are not."""

    def __init__(
        self, order: int, token_ids: Iterable[int], cache: KVCache, sharing: Sharing | None = None
    ) -> None:
        """Prepare a job.

        Args:
            order: by arrival; the lower goes first.
            token_ids: what is to be in the cache.
            cache: what may hold some of it already.
            sharing: with whom it shares what it reads; by default with nobody.
        """
        self.order = order
        self.token_ids = list(token_ids)
        self.cache = cache
        self.sharing = sharing
        self.is_stopped = False
        """Set by the event loop: nothing more is to be done."""
        self.is_over = False
        """Set by the model thread: there is nothing more to do."""
        self.channel: TokenChannel

    @property
    def is_resumed(self) -> bool:
        """Whether it goes on where it was suspended."""
        return False

    @property
    def may_suspend(self) -> bool:
        """Whether its cache may be wanted again by itself, now that it is over."""
        return False

    @property
    def may_find_prefix(self) -> bool:
        """Whether it can start from what others publish: it has forwarded nothing yet, or has lost
        what it had."""
        return self.sharing is not None and not self.cache.has_advanced

    @property
    def num_missing(self) -> int:
        """Tokens that have to be forwarded before the next one can be sampled."""
        return len(self.token_ids) - self.cache.num_tokens

    @property
    def is_ready(self) -> bool:
        """Whether there is something to do now."""
        return not self.is_stopped

    def piece(self, num_tokens: int) -> Piece:
        """Return the next ``num_tokens`` tokens to be forwarded."""
        start = self.cache.num_tokens
        stop = start + num_tokens
        wants_logits = stop == len(self.token_ids) and not self.is_background
        return Piece(self.token_ids[start:stop], self.cache, wants_logits)

    def lose_cache(self) -> None:
        """Give the memory up. What is missing then, which is all, is forwarded again."""
        self.cache.drop()

    def undo(self, num_tokens: int) -> None:
        """Forget what was sampled behind the first ``num_tokens`` tokens: nobody has seen it.

        The last of those that stay is pending then, as it is wherever sampling stops. (A cache that
        cannot be cut back was ahead by that one token at most, which is what others may start from
        as well.)
        """
        cache = self.cache
        if cache.num_tokens >= num_tokens and cache.can_truncate and not cache.is_broken:
            if cache.is_swapped:
                cache.drop()  # to bring it back only to cut it may be impossible now
            else:
                cache.truncate(num_tokens - 1)
        del self.token_ids[num_tokens:]

    def let_go(self) -> None:
        """Hold the cache no longer. The job is over, and the event loop's."""
        del self.cache

    @abstractmethod
    def forwarded(self, start: int, began_at: float) -> int:
        """Take note that the cache holds what comes from position ``start`` on.

        Args:
            start: what the cache held before.
            began_at: when the step began, in monotonic seconds.

        Returns:
            How many of the tokens had been forwarded before.
        """

    @abstractmethod
    def advance(self, logits: Logits | None) -> list[Message]:
        """Go on from the ``logits`` of the last token, if it was forwarded, and return what there
        is to tell."""


class Filling(Job):
    """Fills a cache ahead of those that will start from it. It samples nothing."""

    is_background = True
    _num_forwarded = 0
    """Positions that it has forwarded, or started from, at least once."""

    def forwarded(self, start: int, began_at: float) -> int:
        stop = self.cache.num_tokens
        reforwarded = max(0, min(stop, self._num_forwarded) - start)
        self._num_forwarded = max(self._num_forwarded, stop)
        return reforwarded

    def advance(self, logits: Logits | None) -> list[Message]:
        self.is_over = self.num_missing == 0
        return [None] if self.is_over else []


class Decoding(Job):
    """Samples a run, segment by segment.

    Of the run it writes the counts of what was forwarded, and the times at which its last segment
    was begun and had its first token; the rest is the event loop's.
    """

    def __init__(
        self,
        run: Run,
        order: int,
        cache: KVCache,
        stop_ids: Collection[int],
        max_tokens: int,
        sharing: Sharing | None = None,
    ) -> None:
        """Prepare to sample ``run``, which ends at each of ``stop_ids`` a segment, and at
        ``max_tokens`` tokens for good."""
        super().__init__(order, run.tokens.ids, cache, sharing)
        self._run = run
        self._stop_ids = stop_ids
        self._max_tokens = max_tokens
        self._matcher: Matcher | None = None
        self._num_sampled = 0
        self._counts: Counter[int] | None = None
        self._has_begun = False

    def begin_segment(self, channel: TokenChannel, matcher: Matcher | None) -> None:
        """Event loop: go on with what the log has, to another end of a turn."""
        self.channel = channel
        self.is_stopped = self.is_over = False
        self.token_ids += self._run.tokens.since(len(self.token_ids))
        self._matcher = matcher
        self._num_sampled = 0
        self._counts = Counter() if self._run.params.has_penalties else None
        self._has_begun = False

    @property
    def may_suspend(self) -> bool:
        return (
            self.is_over
            and not self.is_stopped
            and self.token_ids[-1] in self._stop_ids
            and self._run.constraint.allows_calls
        )

    @property
    def is_resumed(self) -> bool:
        return len(self._run.segments) > 1

    @property
    def is_ready(self) -> bool:
        return not self.is_stopped and self.channel.has_credit

    def forwarded(self, start: int, began_at: float) -> int:
        if not self._has_begun:
            self._has_begun = True
            segment = self._run.segments[-1]
            segment.started_at = began_at
            segment.cached_tokens = start
        # What it starts from beyond what it has forwarded itself is another's.
        self._run.num_inherited += max(0, start - self._run.num_forwarded)
        return self._run.record_forward(start, self.cache.num_tokens)

    def advance(self, logits: Logits | None) -> list[Message]:
        if logits is None:
            return []
        assert self.num_missing == 0, "every token is in the cache now"
        sampled = self._sample(logits)
        token_id = sampled.token_id
        if self._matcher:
            self._matcher.accept(token_id)
        if self._counts is not None:
            self._counts[token_id] += 1
        self.token_ids.append(token_id)
        if not self._num_sampled:
            self._run.segments[-1].first_token_at = time.monotonic()
        self._num_sampled += 1
        self.channel.num_sent += 1
        reason = self._reason_to_stop(token_id)
        self.is_over = reason is not None
        return [sampled, reason] if reason else [sampled]

    def _sample(self, logits: Logits) -> Sampled:
        params = self._run.params
        if self._matcher and params.top_logprobs is None:
            only_token = self._matcher.only_token
            if only_token is not None:
                return forced(logits, only_token)
        mask = self._mask(logits)
        return sample(logits, params, len(self.token_ids), mask, self._counts)

    def _mask(self, logits: Logits) -> np.ndarray | None:
        """Return which tokens may come next; None if the grammar makes no difference."""
        if self._matcher is None:
            return None
        if isinstance(logits, Certain) and self._matcher.allows(logits.token_id):
            return None
        return self._matcher.mask()

    def _reason_to_stop(self, token_id: int) -> StopReason | None:
        if token_id in self._stop_ids:
            return StopReason.END_OF_TURN
        limit = self._run.params.max_output_tokens
        if limit is not None and self._num_sampled >= limit:
            return StopReason.MAX_OUTPUT_TOKENS
        if len(self.token_ids) >= self._max_tokens:
            return StopReason.CONTEXT_LENGTH
        return None
