"""The model: token ids and caches in, next-token logits out.

Everything here runs on the model thread.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from sampler.cache_pool import BLOCK_SIZE, BlockPool
from sampler.counters import Counters
from sampler.kv_cache import GenericCache, KVCache
from sampler.sampling import Logits


@dataclass(frozen=True)
class Piece:
    """What one sequence brings to a step: a chunk of its prompt, or the token sampled last."""

    token_ids: Sequence[int]
    """At least one. Their positions continue from ``cache.num_tokens``."""
    cache: KVCache
    """No other piece of the step has the same."""
    wants_logits: bool = True
    """False for a chunk that another one follows."""


class ModelRunner(ABC):
    """Runs one model, on any number of sequences at once."""

    runs_ahead: bool
    """Whether caches can be truncated, so that more may be sampled than is asked for yet."""
    prefill_chunk = 512
    """How many tokens of prompts make a good step: more are hardly faster, and hold others up."""
    is_simulated = False
    """Whether there is no model, and what it says is made up."""

    def __init__(self, counters: Counters | None = None) -> None:
        self.counters = counters or Counters()

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the model is."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """In what it computes."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Logits per position."""

    @property
    @abstractmethod
    def max_context(self) -> int:
        """The most positions that the model was made for; recurrent models have no bound."""

    @abstractmethod
    def new_cache(self) -> KVCache:
        """Return an empty cache for one sequence."""

    @abstractmethod
    def forward(self, pieces: Sequence[Piece]) -> Sequence[Logits | None]:
        """Run the model over ``pieces``, each on top of its own cache.

        Returns:
            For each piece the logits of the token that follows it, ``(vocab,)`` float32 on the
            model's device or in main memory, or a token that is certain; None where they are not
            wanted.

        Raises:
            OutOfBlocksError: the pool has no room for all of them. Whatever is raised, each cache
                holds its piece, or holds what it held before, or ``is_broken``.
        """

    def torch_threads(self, num_threads: int) -> int:
        """Return how many threads torch is to use, where ``num_threads`` may compute."""
        return num_threads

    def reserve_memory(self) -> None:
        """Take the memory of all caches from the system now, where it is set aside at all."""
        return

    def find_prefix(self, salt: Hashable, token_ids: Sequence[int]) -> KVCache | None:
        """Return a cache that holds what ``token_ids`` begin with, if such was published.

        It leaves at least the last token to be forwarded, for the logits that follow it.
        """
        return None

    def publish(self, salt: Hashable, token_ids: Sequence[int], cache: KVCache) -> None:
        """Let others with ``salt`` start from what ``cache`` holds, which is ``token_ids``."""
        return


class RunnerWrapper(ModelRunner):
    """Does what another runner does. For subclasses that watch, or change, what goes through it."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner.counters)
        self.runs_ahead = runner.runs_ahead
        self.prefill_chunk = runner.prefill_chunk
        self.is_simulated = runner.is_simulated
        self._runner = runner

    @property
    def device(self) -> torch.device:
        return self._runner.device

    @property
    def dtype(self) -> torch.dtype:
        return self._runner.dtype

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def max_context(self) -> int:
        return self._runner.max_context

    def torch_threads(self, num_threads: int) -> int:
        return self._runner.torch_threads(num_threads)

    def reserve_memory(self) -> None:
        self._runner.reserve_memory()

    def new_cache(self) -> KVCache:
        return self._runner.new_cache()

    def find_prefix(self, salt: Hashable, token_ids: Sequence[int]) -> KVCache | None:
        return self._runner.find_prefix(salt, token_ids)

    def publish(self, salt: Hashable, token_ids: Sequence[int], cache: KVCache) -> None:
        self._runner.publish(salt, token_ids, cache)

    def forward(self, pieces: Sequence[Piece]) -> Sequence[Logits | None]:
        return self._runner.forward(pieces)


def groups_of_like_length(lengths: Sequence[int]) -> list[list[int]]:
    """Return the indices of ``lengths`` in groups, each to be padded to its longest.

    Padding is read, masked and thrown away. In each group it is at most as much again as there is,
    and a little more, so that short contexts do not pay for a long one.
    """
    groups: list[list[int]] = []
    limit = -1
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if lengths[index] > limit:
            groups.append([])
            limit = 2 * lengths[index] + 64
        groups[-1].append(index)
    return groups


# Copying a byte of a cache in and out of a shared pass, and what attention does to it under a mask,
# takes about as long as reading this many bytes of weights. With SmolLM2 135M on one thread, eight
# rows together take 0.3 of the time of eight alone at 100 positions each, 0.7 at 1,000, 1 at 2,000.
_COST_OF_SHARING = 6

# Blocks of a pool that is there for the sake of counting: 4 million positions.
_PLENTY = 1 << 18


@dataclass(frozen=True)
class Handling:
    """How a model's own class is to be handled. ``load_check`` finds out what is right."""

    takes_positions: bool = True
    """Whether it is told the positions of what it reads; otherwise it counts them itself."""
    shares_passes: bool = True
    """Whether it can tell rows of different lengths apart in one pass."""
    num_state_blocks: int = 0
    """Blocks that a sequence takes however long it is."""
    max_positions: int | None = None
    """How many its table of positions has; None where it has no such table."""


class GenericRunner(ModelRunner):
    """Runs any causal LM of the transformers library, with the cache class that it asks for.

    Pieces go through the model one by one. Only single tokens on top of plain caches share a
    pass: other caches (windows, recurrent states) mix with padding in ways of their own.
    """

    runs_ahead = False

    def __init__(
        self,
        model: "transformers.PreTrainedModel",
        counters: Counters | None = None,
        *,
        pool: BlockPool | None = None,
        is_exact: bool = False,
        handling: Handling = Handling(),
    ) -> None:
        """Run ``model``.

        Args:
            model: as it was loaded.
            counters: where its work is counted.
            pool: what the caches are accounted for in; None is one of its own, without a bound
                that could be reached.
            is_exact: never share a pass, so that logits do not depend on who else is served. (What
                is computed again because others took its memory is so in longer pieces, and may be
                rounded otherwise.)
            handling: what its class needs.
        """
        super().__init__(counters)
        self._model = model
        self._pool = pool or BlockPool(_PLENTY)
        self._handling = handling
        self._num_bytes = sum(weights.nbytes for weights in model.parameters())
        # Their frequencies are those of the longest sequence of a pass, for all of its rows.
        self._can_batch = (
            handling.shares_passes and not is_exact and not _rope_depends_on_length(model)
        )

    @property
    def device(self) -> torch.device:
        device: torch.device = self._model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._model.dtype
        return dtype

    @property
    def vocab_size(self) -> int:
        return int(self._model.config.get_text_config().vocab_size)

    @property
    def max_context(self) -> int:
        config = self._model.config.get_text_config()
        made_for = int(getattr(config, "max_position_embeddings", None) or sys.maxsize)
        in_tables = self._handling.max_positions or sys.maxsize
        # Whoever knows the pool sees how many positions fill it, but not what comes on top of them.
        num_blocks = self._pool.num_blocks - self._handling.num_state_blocks
        return min(made_for, in_tables, num_blocks * BLOCK_SIZE)

    def new_cache(self) -> GenericCache:
        return GenericCache(self._model.config, self._pool, self._handling.num_state_blocks)

    @torch.inference_mode()
    def forward(self, pieces: Sequence[Piece]) -> list[Tensor | None]:
        logits: list[Tensor | None] = [None] * len(pieces)
        shared = self._in_shared_passes(pieces)
        for rows in shared:
            token_ids = [pieces[row].token_ids[0] for row in rows]
            together = self._extend_rows(token_ids, [_generic(pieces[row]) for row in rows])
            for row, row_logits in zip(rows, together, strict=True):
                logits[row] = row_logits
        alone = set(range(len(pieces))).difference(*shared)
        for index in sorted(alone):
            logits[index] = self.extend(pieces[index].token_ids, _generic(pieces[index]))
        return [
            piece_logits if piece.wants_logits else None
            for piece, piece_logits in zip(pieces, logits, strict=True)
        ]

    @torch.inference_mode()
    def extend(self, token_ids: Sequence[int], cache: GenericCache) -> Tensor:
        """Run the model over ``token_ids`` on top of ``cache`` and return the next-token logits.

        Positions continue from ``cache.num_tokens``. If the pass fails, the cache is no longer
        whole and must be dropped. Where this is overridden, everything goes by way of it.

        Returns:
            ``(vocab,)`` float32, on the model's device.

        Raises:
            OutOfBlocksError: there is no room in the pool; the cache is as it was.
        """
        cache.grow(len(token_ids))
        input_ids = torch.tensor([token_ids], device=self.device)  # (1, seq)
        start, stop = cache.num_tokens, cache.num_tokens + len(token_ids)
        position_ids = torch.arange(start, stop, device=self.device)[None]  # (1, seq)
        try:
            outputs = self._model(
                input_ids=input_ids,
                **self._told(position_ids),
                cache=cache.layers,
                use_cache=True,
                logits_to_keep=1,
            )
        except BaseException:
            cache.is_broken = True
            raise
        cache.advance(len(token_ids))
        self._count(len(token_ids))
        return outputs.logits[0, -1].float()  # type: ignore[no-any-return]  # (vocab,)

    def _told(self, position_ids: Tensor) -> dict[str, Tensor]:
        """Return what the model is told of ``position_ids``."""
        return {"position_ids": position_ids} if self._handling.takes_positions else {}

    @property
    def _extends_by_itself(self) -> bool:
        """Whether ``extend`` is the one defined here, in the class and in this object."""
        return getattr(self.extend, "__func__", None) is GenericRunner.extend

    def _in_shared_passes(self, pieces: Sequence[Piece]) -> list[list[int]]:
        """Return the indices of those that are to share a pass, in groups of more than one."""
        if not (self._can_batch and self._extends_by_itself):
            return []
        rows = [index for index, piece in enumerate(pieces) if _can_share_a_pass(piece)]
        lengths = [pieces[row].cache.num_tokens for row in rows]
        groups = [[rows[i] for i in group] for group in groups_of_like_length(lengths)]
        return [group for group in groups if self._is_worth_sharing([pieces[i] for i in group])]

    def _is_worth_sharing(self, pieces: Sequence[Piece]) -> bool:
        """Tell whether reading the weights only once saves more than the copying costs."""
        longest = max((_generic(piece) for piece in pieces), key=lambda cache: cache.num_tokens)
        num_copied = len(pieces) * sum(
            _tensor(layer.keys).nbytes + _tensor(layer.values).nbytes
            for layer in longest.layers.layers
            if isinstance(layer, DynamicLayer)
        )
        return _COST_OF_SHARING * num_copied < (len(pieces) - 1) * self._num_bytes

    def _extend_rows(self, token_ids: Sequence[int], caches: Sequence[GenericCache]) -> Tensor:
        """Run the model over one token of each row.

        Each cache is given its new tensors after the pass: if it fails, they are as they were.

        Returns:
            ``(rows, vocab)`` float32.
        """
        for cache in caches:
            cache.grow(1)
        lengths = [cache.num_tokens for cache in caches]
        per_layer = list(zip(*(cache.layers.layers for cache in caches), strict=True))
        padded_layers = [_PaddedLayer(layers, lengths) for layers in per_layer]
        padded = DynamicCache(config=self._model.config)
        padded.layers = list(padded_layers)
        positions = torch.tensor(lengths, device=self.device)[:, None]  # (rows, 1)
        columns = torch.arange(max(lengths) + 1, device=self.device)
        outputs = self._model(
            input_ids=torch.tensor(token_ids, device=self.device)[:, None],  # (rows, 1)
            **self._told(positions),
            attention_mask=(columns >= max(lengths) - positions).long(),  # (rows, longest + 1)
            cache=padded,
            use_cache=True,
            logits_to_keep=1,
        )
        for layers, padded_layer in zip(per_layer, padded_layers, strict=True):
            padded_layer.give_back(layers)
        for cache in caches:
            cache.advance(1)
        self._count(len(caches))
        return outputs.logits[:, -1].float()  # type: ignore[no-any-return]

    def _count(self, num_tokens: int) -> None:
        self.counters.tokens_forwarded += num_tokens
        self.counters.forward_passes += 1


class _PaddedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer of several caches, padded on the left, with room for one more position."""

    def __init__(self, layers: Sequence[Any], lengths: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True
        self._lengths = lengths
        self.keys = _padded([_tensor(layer.keys) for layer in layers], max(lengths) + 1)
        self.values = _padded([_tensor(layer.values) for layer in layers], max(lengths) + 1)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = _tensor(self.keys), _tensor(self.values)
        keys[..., -1:, :] = key_states
        values[..., -1:, :] = value_states
        return keys, values

    def get_seq_length(self) -> int:
        return max(self._lengths)

    def give_back(self, layers: Sequence[Any]) -> None:
        """Give each row, without its padding and as a copy, to the layer that it came from."""
        keys, values = _tensor(self.keys), _tensor(self.values)
        for row, (layer, length) in enumerate(zip(layers, self._lengths, strict=True)):
            start = max(self._lengths) - length
            layer.keys = keys[row : row + 1, :, start:].clone()
            layer.values = values[row : row + 1, :, start:].clone()


def _padded(rows: Sequence[Tensor], width: int) -> Tensor:
    """Return ``rows``, each ``(1, heads, seq, dim)``, so that one position is left on the right."""
    _, num_heads, _, dim = rows[0].shape
    padded = rows[0].new_empty(len(rows), num_heads, width, dim)
    for row, tensor in enumerate(rows):
        start = width - 1 - tensor.shape[-2]
        padded[row, :, :start] = 0  # not just any bits: nothing times NaN is NaN
        padded[row, :, start:-1] = tensor[0]
    return padded


def _tensor(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "a layer that holds positions has tensors"
    return tensor


def _generic(piece: Piece) -> GenericCache:
    assert isinstance(piece.cache, GenericCache), "a cache comes from the runner that it is used by"
    return piece.cache


def _can_share_a_pass(piece: Piece) -> bool:
    num_tokens = piece.cache.num_tokens
    return len(piece.token_ids) == 1 and all(
        # In some models a layer uses the keys and values of another, and never gets its own.
        type(layer) is DynamicLayer and layer.get_seq_length() == num_tokens > 0
        for layer in _generic(piece).layers.layers
    )


def _rope_depends_on_length(model: "transformers.PreTrainedModel") -> bool:
    parameters = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    per_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    types = [str(one.get("rope_type")) for one in (parameters, *per_layer_type)]
    return any(kind == "longrope" or "dynamic" in kind for kind in types)
