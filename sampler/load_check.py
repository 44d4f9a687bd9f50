"""How a model's own class is to be handled, found out by trying.

The classes of the transformers library make different things of a cache. Most work positions out of
what it holds; some start anew at 0 unless they are told them, and some count them from elsewhere,
so that what they are told is wrong. Some take the longest of several rows for the length of all. A
few forget what they have read. Some have fewer positions than their configuration says, for the
first rows of their tables stand for none. None of that is said in a configuration.

So a few tokens are read in pieces, as runs bring them, and held against one plain pass of the
class: without a cache, and with nothing that is ours. What the pieces leave in a cache tells what a
sequence takes, too; and where the plain pass begins in a table of positions, how many it has.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sampler.cache_pool import BLOCK_SIZE
from sampler.kv_cache import GenericCache
from sampler.language import first_line
from sampler.model_runner import GenericRunner, Handling, Piece

_FIRST_ID = 3
"""Those below have meanings of their own in many vocabularies."""
_SHORT, _LONG, _WHOLE = 11, 15, 16
"""How many tokens have been read after each piece: two chunks and a single token."""
_MAX_STATE_BLOCKS = 1024
"""More would take longer to count. Where a state is as large as so many blocks of positions, what
positions take hardly matters."""


class UnfitModelError(ValueError):
    """The model's own class cannot be used, however it is handled; the message says why."""


class Checked(NamedTuple):
    """What was found."""

    handling: Handling
    block_bytes: int
    """What a block takes, be it of positions or of a state."""


def check_model(model: "transformers.PreTrainedModel") -> Checked:
    """Return how ``model`` is to be handled.

    That takes five passes of few tokens, and at most four more where the first attempt fails.

    Raises:
        UnfitModelError: it fails, or what it makes of pieces is not what it makes of the whole.
    """
    text_config = model.config.get_text_config()
    ids = reversed(range(_FIRST_ID, _FIRST_ID + _WHOLE))  # not in the order of positions
    token_ids = [token_id % text_config.vocab_size for token_id in ids]
    tables = _PositionTables()
    try:
        with tables:
            plain = _plain_logits(model, token_ids)
    except Exception as error:
        raise UnfitModelError(f"its own class fails: {first_line(error)}") from error
    failures: list[Exception] = []
    for takes_positions in (True, False):
        try:
            if found := _Attempt(model, takes_positions, token_ids, plain).result():
                handling = replace(found.handling, max_positions=tables.max_positions)
                return found._replace(handling=handling)
        except Exception as error:  # noqa: BLE001  each class has errors of its own
            failures.append(error)
    if len(failures) == 2:
        reason = first_line(failures[0])
        raise UnfitModelError(f"its own class fails on a cache: {reason}") from failures[0]
    raise UnfitModelError("it does not go on where its cache ends, so it cannot suspend")


class _PositionTables(TorchFunctionMode):
    """Watches which tables are looked up row after row, one for each token, as only positions are.

    To try the last row itself would not do: beyond it, a GPU gives up all that the process has
    there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.max_positions: int | None = None
        """From the first row that stands for a position; None where there is no such table."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.nn.functional.embedding:
            self._take_note_of(*args[:2])
        return func(*args, **(kwargs or {}))

    def _take_note_of(self, rows: Tensor, table: Tensor) -> None:
        first, *_ = read = rows.flatten().tolist()
        if read == list(range(first, first + _WHOLE)):
            num_positions = table.shape[0] - first
            self.max_positions = min(self.max_positions or num_positions, num_positions)


class _Attempt:
    """One way to handle a model, tried."""

    def __init__(
        self,
        model: "transformers.PreTrainedModel",
        takes_positions: bool,
        token_ids: Sequence[int],
        plain: Tensor,
    ) -> None:
        """Try ``model`` on ``token_ids``, after each of which it should say what ``plain`` does."""
        self._takes_positions = takes_positions
        self._runner = GenericRunner(model, handling=Handling(takes_positions))
        self._token_ids = token_ids
        self._plain = plain

    def result(self) -> Checked | None:
        """Return what is to be known, or None where this way is wrong."""
        short = self._runner.new_cache()
        if not self._goes_on(short, _SHORT):
            return None
        long = _forked(short)
        if not self._goes_on(long, _LONG):
            return None
        num_bytes = short.num_bytes, long.num_bytes
        if not self._goes_on(_forked(long), _WHOLE):
            return None
        num_state_blocks, block_bytes = _blocks_of(*num_bytes)
        shares_passes = self._can_share(short, long)
        return Checked(
            Handling(self._takes_positions, shares_passes, num_state_blocks), block_bytes
        )

    def _goes_on(self, cache: GenericCache, stop: int) -> bool:
        """Tell whether reading on from ``cache`` as far as ``stop`` gives the logits it should."""
        logits = self._runner.extend(self._token_ids[cache.num_tokens : stop], cache)
        return self._is_right(logits, stop)

    def _can_share(self, *caches: GenericCache) -> bool:
        """Tell whether one token on top of each of ``caches`` can go through one pass."""
        stops = [cache.num_tokens + 1 for cache in caches]
        pieces = [
            Piece([self._token_ids[stop - 1]], cache)
            for cache, stop in zip(caches, stops, strict=True)
        ]
        num_passes = self._runner.counters.forward_passes
        try:
            rows = self._runner.forward(pieces)
        except Exception:  # noqa: BLE001  as above; by themselves they go through
            return False
        # Where the runner does not let such short ones share a pass, nor does it let others.
        is_shared = self._runner.counters.forward_passes == num_passes + 1
        return is_shared and all(map(self._is_right, rows, stops))

    def _is_right(self, logits: Tensor | None, num_read: int) -> bool:
        assert logits is not None
        expected = self._plain[num_read - 1]
        # What rounding may move, as a share of the logits' spread.
        tolerance = 1e-3 if self._runner.dtype == torch.float32 else 0.1
        distance = (logits - expected).abs().max() / (expected.max() - expected.min())
        return bool(distance < tolerance)


@torch.inference_mode()
def _plain_logits(model: "transformers.PreTrainedModel", token_ids: Sequence[int]) -> Tensor:
    """Return what the model says after each of ``token_ids``: ``(seq, vocab)`` float32."""
    input_ids = torch.tensor([token_ids], device=model.device)  # (1, seq)
    return model(input_ids=input_ids, use_cache=False).logits[0].float()  # type: ignore[no-any-return]


def _forked(cache: GenericCache) -> GenericCache:
    forked = cache.fork(cache.num_tokens)
    assert forked is not None, "all of what is whole can be forked"
    return forked


def _blocks_of(short_bytes: int, long_bytes: int) -> tuple[int, int]:
    """Return how many blocks a state takes, and what a block takes in bytes.

    Args:
        short_bytes: what a cache of ``_SHORT`` tokens takes.
        long_bytes: what one of ``_LONG`` takes.
    """
    position_bytes = max(0, long_bytes - short_bytes) / (_LONG - _SHORT)
    state_bytes = max(0, long_bytes - _LONG * position_bytes)
    if state_bytes <= position_bytes:
        # A block of its own would be many times that, so it goes with each.
        return 0, ceil(BLOCK_SIZE * position_bytes + state_bytes)
    block_bytes = max(ceil(BLOCK_SIZE * position_bytes), ceil(state_bytes / _MAX_STATE_BLOCKS))
    return ceil(state_bytes / block_bytes), block_bytes
