"""Our own forward pass of a Llama-like decoder over blocks of keys and values, in torch operations.

The same on every device and in every dtype. All pieces of a step go through the linear layers as
one matrix, one row per token, whichever sequence it is of. In attention each row sees its own
sequence: rows that are a whole piece (decoding) read their blocks side by side, padded to the
longest; longer pieces (prefill) one after the other.

A block is read as a whole. So what lies behind the last position must be finite, although it is
masked, because nothing times NaN is NaN: a block is set to zero when its first position is written.

**Exact mode.** Matrix products of different sizes add up in different orders, so a token's logits
depend on how many rows share its step. In exact mode everything is computed in parts of one size:
``_EXACT_ROWS`` rows for what is done to each row by itself, ``_EXACT_QUERIES`` queries against
``_EXACT_KEYS`` keys at a time in attention, padded where there are fewer. What a row gives then
depends neither on the others, nor on how its sequence was cut into pieces. In float32 on the CPU
this holds bit for bit (tried with MKL from SSE 4.2 to AVX-512 on one to three threads; the tests
check it). What it costs: 1.3 to 3 times the time of a step. Other devices choose their algorithms
by size too, so there it is as good as their libraries are.

**Graphs.** Where steps can be recorded (``step_graphs``), those that only decode are laid out from
one tensor, by operations on the device alone, so that all of it can be recorded.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from sampler.cache_pool import BLOCK_SIZE, blocks_for
from sampler.counters import Counters
from sampler.decoder_weights import DecoderShape, DecoderWeights, LayerWeights
from sampler.kv_cache import KVCache, PagedCache, PagedStorage
from sampler.model_runner import ModelRunner, Piece, groups_of_like_length
from sampler.step_graphs import Capture, DecodingRow, StepGraphs, padded, sent

# Fewer rows than 4 take a path of their own in MKL. The weights are read once for all of them, and
# a step that decodes is bound by that up to about 8; prefill would like more (8 take 49 us a row
# where 64 take 34).
_EXACT_ROWS = 8
# So that what a thread works with is aligned as it is in other threads, on which bits depend.
_EXACT_QUERIES = 16
# As many keys as torch's kernel for the CPU takes at a time. Of those all masked, nothing is left.
_EXACT_KEYS = 512


class TorchDecoder(ModelRunner):
    """Runs a decoder whose weights are known, on any number of sequences at once.

    If a pass fails, the caches are as they were: positions count once all of it is written.
    """

    runs_ahead = True

    def __init__(
        self,
        weights: DecoderWeights,
        storage: PagedStorage,
        counters: Counters | None = None,
        *,
        is_exact: bool = False,
        capture: Capture | None = None,
    ) -> None:
        """Run the model of ``weights``.

        Args:
            weights: not changed.
            storage: of the same dtype and on the same device, for the model's layers and heads.
            counters: where the work is counted.
            is_exact: see above.
            capture: records steps that decode, if they are to be; not in exact mode.
        """
        super().__init__(counters)
        shape = weights.shape
        assert storage.tensor.dtype == weights.dtype
        assert storage.shape == (shape.num_layers, shape.num_kv_heads, shape.head_dim)
        assert not (is_exact and capture), "a graph has all rows in one product"
        self._weights = weights
        self._storage = storage
        self._slabs = _Slabs(storage.tensor, shape)
        self._is_exact = is_exact
        self._graphs = capture and StepGraphs(
            self._decoded,
            capture,
            block_bytes=storage.shape.block_bytes(weights.dtype) // shape.num_layers,
            dtype=weights.dtype,
            device=weights.device,
        )

    @property
    def device(self) -> torch.device:
        return self._weights.device

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.dtype

    @property
    def vocab_size(self) -> int:
        return self._weights.shape.vocab_size

    @property
    def max_context(self) -> int:
        return self._weights.shape.max_context

    def new_cache(self) -> PagedCache:
        return self._storage.new_cache()

    def reserve_memory(self) -> None:
        self._storage.reserve()

    def find_prefix(self, salt: Hashable, token_ids: Sequence[int]) -> PagedCache | None:
        cache = self._storage.match(salt, token_ids, max(0, len(token_ids) - 1))
        return cache if cache.num_tokens else None

    def publish(self, salt: Hashable, token_ids: Sequence[int], cache: KVCache) -> None:
        _paged(cache).publish(salt, token_ids)

    @torch.inference_mode()
    def forward(self, pieces: Sequence[Piece]) -> list[Tensor | None]:
        if not pieces:
            return []
        caches = [_paged(piece.cache) for piece in pieces]
        for piece, cache in zip(pieces, caches, strict=True):
            cache.extend_to(len(piece.token_ids))
        logits = iter(_in_main_memory(self._step(pieces)))
        for piece, cache in zip(pieces, caches, strict=True):
            cache.advance(len(piece.token_ids))
            self.counters.tokens_forwarded += len(piece.token_ids)
        self.counters.forward_passes += 1
        return [next(logits) if piece.wants_logits else None for piece in pieces]

    def _step(self, pieces: Sequence[Piece]) -> Tensor:
        """Take a step and return ``(wanted, vocab)`` float32, in the order of the pieces."""
        spans = [_Span.of(piece) for piece in pieces]
        if begun := [span.blocks[-1] for span in spans if span.begins_its_last_block]:
            self._slabs.clear(self._sent(begun))
        ordinary = partial(self._ordinary_step, pieces, spans)
        if self._graphs is None or not all(map(_only_decodes, pieces)):
            return ordinary()
        rows = [DecodingRow(span.token_ids[0], span.start, span.blocks) for span in spans]
        return self._graphs.logits(rows, ordinary)

    def _ordinary_step(self, pieces: Sequence[Piece], spans: Sequence["_Span"]) -> Tensor:
        return self._logits_of(self._lay_out(pieces, spans))

    def _decoded(self, table: Tensor) -> Tensor:
        """Take the step that ``table`` tells of; see ``StepGraphs``."""
        return self._logits_of(self._laid_out(table))

    # --- The network ------------------------------------------------------------------------------

    def _logits_of(self, step: "_Step") -> Tensor:
        """Run the network and return ``(wanted, vocab)`` float32."""
        weights, slabs = self._weights, self._slabs
        rotation = self._by_rows(self._rotation, step.positions)  # (rows, 2, head_dim)
        hidden = functional.embedding(step.token_ids, weights.embed)  # (rows, hidden)
        for index, layer in enumerate(weights.layers):
            project, finish = _bind(self._project, layer), _bind(self._finish, layer)
            heads = self._by_rows(project, hidden, rotation)
            query, new = heads.tensor_split([weights.shape.num_heads], dim=1)
            slabs.write(index, step.places, new)
            attended = _joined(
                [attention(query, slabs, index) for attention in step.attentions]
            )  # (rows, num_heads * head_dim)
            hidden = self._by_rows(finish, hidden, attended)
        return self._by_rows(self._head, hidden[step.wanted_rows])

    def _by_rows(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Return ``function`` of ``tensors``, whose rows have nothing to do with each other."""
        if not self._is_exact:
            return function(*tensors)
        num_rows = len(tensors[0])
        parts = zip(
            *(torch.split(_padded(t, _EXACT_ROWS), _EXACT_ROWS) for t in tensors), strict=True
        )
        return torch.cat([function(*part) for part in parts])[:num_rows]

    def _rotation(self, positions: Tensor) -> Tensor:
        """Return cosines and sines as ``(rows, 2, head_dim)``, worked out in float32."""
        weights = self._weights
        angles = positions[:, None].float() * weights.inv_freq  # (rows, head_dim / 2)
        both = torch.stack((angles.cos(), angles.sin()), dim=1) * weights.attention_scaling
        return torch.cat((both, both), dim=-1).to(self.dtype)

    def _project(self, layer: LayerWeights, hidden: Tensor, rotation: Tensor) -> Tensor:
        """Return queries, keys and values as ``(rows, num_heads + 2 * num_kv_heads, head_dim)``."""
        shape = self._weights.shape
        normed = self._norm(hidden, layer.input_norm)
        qkv = functional.linear(normed, layer.qkv, layer.qkv_bias)
        sizes = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        query, key, value = torch.split(qkv.view(len(hidden), -1, shape.head_dim), sizes, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = self._norm(query, layer.q_norm), self._norm(key, layer.k_norm)
        cos, sin = rotation[:, :1], rotation[:, 1:]  # (rows, 1, head_dim)
        straight = torch.cat((query, key), dim=1)
        first, second = straight.chunk(2, dim=-1)
        rotated = straight * cos + torch.cat((-second, first), dim=-1) * sin
        return torch.cat((rotated, value), dim=1)

    def _finish(self, layer: LayerWeights, hidden: Tensor, attended: Tensor) -> Tensor:
        """Return the ``(rows, hidden)`` that the next layer is given."""
        hidden = hidden + functional.linear(attended, layer.o)
        normed = self._norm(hidden, layer.post_norm)
        gate, up = functional.linear(normed, layer.gate_up).chunk(2, dim=-1)
        return hidden + functional.linear(functional.silu(gate) * up, layer.down)

    def _head(self, hidden: Tensor) -> Tensor:
        weights = self._weights
        return functional.linear(self._norm(hidden, weights.norm), weights.head).float()

    def _norm(self, tensor: Tensor, weight: Tensor) -> Tensor:
        # Adds up in float32 whatever the dtype.
        return functional.rms_norm(tensor, weight.shape, weight, self._weights.shape.rms_norm_eps)

    # --- What is where ----------------------------------------------------------------------------

    def _lay_out(self, pieces: Sequence[Piece], spans: Sequence["_Span"]) -> "_Step":
        """Say which token is which row, where it is written, and which rows attend together."""
        groups = self._groups(spans)
        order = [index for group in groups for index in group]
        rows = sent(np.concatenate([spans[i].rows() for i in order], axis=1), self.device)
        token_ids, positions, blocks, offsets = rows.unbind()
        stops = itertools.accumulate(spans[index].num_tokens for index in order)
        last_row_of = {index: stop - 1 for index, stop in zip(order, stops, strict=True)}
        wanted = [last_row_of[i] for i, piece in enumerate(pieces) if piece.wants_logits]
        return _Step(
            token_ids=token_ids,
            positions=positions,
            places=self._slabs.places(blocks, offsets),
            wanted_rows=self._sent(wanted),
            attentions=self._attentions([[spans[i] for i in group] for group in groups], positions),
        )

    def _laid_out(self, table: Tensor) -> "_Step":
        """Say the same of single tokens, in the order of their logits, which all are wanted.

        Args:
            table: ``(rows, 2 + width)``: of each its id, its position, and the blocks of its
                sequence, padded.
        """
        token_ids, positions, blocks = table[:, 0], table[:, 1], table[:, 2:]
        written = blocks.gather(1, positions[:, None] // BLOCK_SIZE)[:, 0]
        return _Step(
            token_ids=token_ids,
            positions=positions,
            places=self._slabs.places(written, positions % BLOCK_SIZE),
            wanted_rows=slice(None),
            attentions=[
                _DecodeAttention(slice(None), blocks, positions, self._weights.shape, self.dtype)
            ],
        )

    def _sent(self, numbers: Sequence[int]) -> Tensor:
        return sent(np.array(numbers, np.int64), self.device)

    def _groups(self, spans: Sequence["_Span"]) -> list[list[int]]:
        """Return the indices of ``spans``, grouped as they attend: alone, or several together."""
        alone = [[i] for i, span in enumerate(spans) if self._attends_alone(span)]
        others = [i for i, span in enumerate(spans) if not self._attends_alone(span)]
        grouped = groups_of_like_length([spans[i].stop for i in others])
        return [*alone, *([others[i] for i in group] for group in grouped)]

    def _attends_alone(self, span: "_Span") -> bool:
        return self._is_exact or span.num_tokens > 1

    def _attentions(
        self, groups: Iterable[Sequence["_Span"]], positions: Tensor
    ) -> list["_Attention"]:
        attentions: list[_Attention] = []
        start = 0
        for group in groups:
            stop = start + sum(span.num_tokens for span in group)
            attentions.append(self._attention(slice(start, stop), group, positions))
            start = stop
        return attentions

    def _attention(self, rows: slice, group: Sequence["_Span"], positions: Tensor) -> "_Attention":
        shape, dtype = self._weights.shape, self.dtype
        if self._is_exact:
            return _ExactAttention(rows, group[0], shape, dtype, self.device)
        if self._attends_alone(group[0]):
            return _ChunkAttention(rows, group[0], shape, dtype, self.device)
        longest = max(len(span.blocks) for span in group)
        blocks = sent(padded([span.blocks for span in group], longest), self.device)
        return _DecodeAttention(rows, blocks, positions[rows], shape, dtype)


@dataclass(frozen=True)
class _Step:
    """One pass. Integers are int64; all is on the model's device."""

    token_ids: Tensor
    """``(rows,)``."""
    positions: Tensor
    """``(rows,)``: each in its own sequence."""
    places: Tensor
    """``(rows, 2 * num_kv_heads)``: where keys and values are written; see ``_Slabs``."""
    wanted_rows: Tensor | slice
    """The last rows of the pieces that want logits, in the order of the pieces."""
    attentions: Sequence["_Attention"]
    """Of all rows, in their order."""


@dataclass(frozen=True)
class _Span:
    """A piece: positions ``start`` to ``stop`` of a sequence that is in ``blocks``."""

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]

    @classmethod
    def of(cls, piece: Piece) -> "_Span":
        start = piece.cache.num_tokens
        num_blocks = blocks_for(start + len(piece.token_ids))
        return cls(piece.token_ids, start, piece.cache.table.blocks[:num_blocks])

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @property
    def begins_its_last_block(self) -> bool:
        """Whether that is partly filled, and held nothing before."""
        num_in_last = self.stop % BLOCK_SIZE
        return 0 < num_in_last <= self.num_tokens

    def rows(self) -> NDArray[np.int64]:
        """Return ``(4, num_tokens)``: ids, positions, blocks and places in them."""
        token_ids, positions = np.array(self.token_ids), np.arange(self.start, self.stop)
        first = self.start // BLOCK_SIZE
        blocks = np.array(self.blocks[first:])[positions // BLOCK_SIZE - first]
        return np.stack((token_ids, positions, blocks, positions % BLOCK_SIZE)).astype(np.int64)


class _Slabs:
    """The storage, seen as the slabs of which it consists.

    A slab is ``(BLOCK_SIZE, head_dim)``: what one head keeps, as keys or as values, of the
    positions of one block in one layer.
    """

    def __init__(self, storage: Tensor, shape: DecoderShape) -> None:
        self._storage = storage
        self._shape = shape
        self._slabs = storage.view(-1, BLOCK_SIZE * shape.head_dim)
        self._places = storage.view(-1, shape.head_dim)  # each position of each slab

    def clear(self, blocks: Tensor) -> None:
        """Set ``blocks`` to zero."""
        self._storage.index_fill_(0, blocks, 0)

    def places(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        """Return the places of positions in the first layer, as ``(rows, 2 * num_kv_heads)``.

        Args:
            blocks: ``(rows,)``: in which block each position is.
            offsets: ``(rows,)``: where in its block.
        """
        slabs = _slabs_of(blocks[:, None], self._shape)
        return slabs * BLOCK_SIZE + offsets[:, None]

    def write(self, layer: int, places: Tensor, new: Tensor) -> None:
        """Write keys and values, ``(rows, 2 * num_kv_heads, head_dim)``, of one layer."""
        own = places + layer * 2 * self._shape.num_kv_heads * BLOCK_SIZE
        self._places.index_copy_(0, own.flatten(), new.flatten(0, 1))

    def read(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, each as ``(rows, num_kv_heads, seq, head_dim)``, copied.

        Args:
            layer: which.
            table: of ``_slab_table``, for several sequences of the same number of blocks.
        """
        _, num_rows, num_kv_heads, _ = table.shape
        own = table + layer * 2 * num_kv_heads
        size = (2, num_rows, num_kv_heads, _num_keys(table), self._shape.head_dim)
        keys, values = self._slabs.index_select(0, own.flatten()).view(size)
        return keys, values


def _slabs_of(blocks: Tensor, shape: DecoderShape) -> Tensor:
    """Return the slabs of ``blocks``, ``(..., 1)``, in the first layer: ``(..., heads)``.

    Those of the keys come first, and then those of the values.
    """
    heads = torch.arange(2 * shape.num_kv_heads, device=blocks.device)
    return blocks * (2 * shape.num_layers * shape.num_kv_heads) + heads


def _slab_table(blocks: Tensor, shape: DecoderShape) -> Tensor:
    """Return the slabs of ``(rows, blocks)`` in the first layer.

    Returns:
        ``(2, rows, num_kv_heads, blocks)``: those of the keys, and those of the values.
    """
    slabs = _slabs_of(blocks[..., None], shape)  # (rows, blocks, 2 * num_kv_heads)
    by_kind = slabs.view(*blocks.shape, 2, shape.num_kv_heads)
    return by_kind.permute(2, 0, 3, 1).contiguous()


def _num_keys(table: Tensor) -> int:
    return table.shape[-1] * BLOCK_SIZE


# --- Attention ------------------------------------------------------------------------------------


class _Attention(ABC):
    """How some rows of a step, which lie next to each other, attend to their sequences.

    Query heads are grouped by the KV head that serves them, instead of repeating that.
    """

    def __init__(self, rows: slice, shape: DecoderShape) -> None:
        self._rows = rows
        self._shape = shape
        self._group = shape.num_heads // shape.num_kv_heads

    def __call__(self, query: Tensor, slabs: _Slabs, layer: int) -> Tensor:
        """Return ``(rows, num_heads * head_dim)``; ``query`` holds all rows of the step."""
        shape = self._shape
        own = query[self._rows].view(-1, shape.num_kv_heads, self._group, shape.head_dim)
        return self._attend(own, slabs, layer).reshape(len(own), -1)

    @abstractmethod
    def _attend(self, query: Tensor, slabs: _Slabs, layer: int) -> Tensor:
        """Return what ``(rows, num_kv_heads, group, head_dim)`` see, in the same shape."""


class _DecodeAttention(_Attention):
    """Single tokens, each of a sequence of its own, padded to the longest."""

    def __init__(
        self,
        rows: slice,
        blocks: Tensor,
        positions: Tensor,
        shape: DecoderShape,
        dtype: torch.dtype,
    ) -> None:
        """Have ``rows`` attend to their ``blocks``, ``(rows, blocks)``, up to their ``positions``,
        ``(rows,)``."""
        super().__init__(rows, shape)
        self._table = _slab_table(blocks, shape)
        self._mask = _causal_mask(positions[:, None, None, None], _num_keys(self._table), dtype)

    def _attend(self, query: Tensor, slabs: _Slabs, layer: int) -> Tensor:
        keys, values = slabs.read(layer, self._table)
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=self._mask)


class _ChunkAttention(_Attention):
    """Several tokens of one sequence."""

    def __init__(
        self,
        rows: slice,
        span: _Span,
        shape: DecoderShape,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(rows, shape)
        self._table = _slab_table(sent(np.array([span.blocks]), device), shape)
        self._num_keys = span.stop
        # Where nothing comes before it, the kernels know the mask, and skip what it hides.
        self._is_first = span.start == 0
        positions = torch.arange(span.start, span.stop, device=device)
        mask = _causal_mask(positions[:, None], self._num_keys, dtype)  # (seq, keys)
        self._mask = None if self._is_first else mask

    def _attend(self, query: Tensor, slabs: _Slabs, layer: int) -> Tensor:
        both = slabs.read(layer, self._table)
        keys, values = (
            # (num_kv_heads, group, keys, head_dim), of which the group is a repetition
            part[0, :, None, : self._num_keys].expand(-1, self._group, -1, -1)
            for part in both
        )
        attended = functional.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),  # (num_kv_heads, group, seq, head_dim)
            keys,
            values,
            attn_mask=self._mask,
            is_causal=self._is_first,
        )
        return attended.permute(2, 0, 1, 3)


class _ExactAttention(_Attention):
    """One piece, ``_EXACT_QUERIES`` queries of a KV head at a time."""

    def __init__(
        self,
        rows: slice,
        span: _Span,
        shape: DecoderShape,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(rows, shape)
        # How many positions share a product, and how many queries that makes; the rest is padding.
        self._num_positions = max(1, _EXACT_QUERIES // self._group)
        self._num_queries = -(-self._num_positions * self._group // _EXACT_QUERIES) * _EXACT_QUERIES
        padding = [span.blocks[0]] * (-len(span.blocks) % (_EXACT_KEYS // BLOCK_SIZE))
        blocks = sent(np.array([[*span.blocks, *padding]]), device)
        self._table = _slab_table(blocks, shape)
        positions = torch.arange(span.start, span.stop, device=device)
        grouped = positions[:, None, None, None].expand(-1, 1, self._group, 1)
        self._mask = _causal_mask(self._folded(grouped), _num_keys(self._table), dtype)

    def _attend(self, query: Tensor, slabs: _Slabs, layer: int) -> Tensor:
        shape = self._shape
        folded = self._folded(query)
        both = slabs.read(layer, self._table)
        keys, values = (part.expand(len(folded), -1, -1, -1) for part in both)
        attended = functional.scaled_dot_product_attention(
            folded, keys, values, attn_mask=self._mask
        )[:, :, : self._num_positions * self._group]
        size = (len(folded), shape.num_kv_heads, self._num_positions, self._group, shape.head_dim)
        return attended.reshape(size).transpose(1, 2).flatten(0, 1)[: len(query)]

    def _folded(self, rows: Tensor) -> Tensor:
        """Fold ``(rows, heads, group, dim)`` to ``(folds, heads, queries, dim)``, padded by 0."""
        _, num_heads, group, dim = rows.shape
        padded = _padded(rows, self._num_positions)
        by_fold = padded.view(-1, self._num_positions, num_heads, group, dim).transpose(1, 2)
        folded = by_fold.reshape(-1, num_heads, self._num_positions * group, dim)
        num_missing = self._num_queries - self._num_positions * group
        return functional.pad(folded, (0, 0, 0, num_missing))


def _causal_mask(positions: Tensor, num_keys: int, dtype: torch.dtype) -> Tensor:
    """Return what is to be added to scores: 0 at keys up to a position and -inf beyond.

    Args:
        positions: of queries, with a last dimension of size 1, which becomes that of the keys.
        num_keys: from position 0 on.
        dtype: that of the scores.
    """
    is_hidden = torch.arange(num_keys, device=positions.device) > positions
    mask = torch.zeros(is_hidden.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(is_hidden, -torch.inf)


# --- Small things ---------------------------------------------------------------------------------


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    """Return ``tensor`` with rows of zeros behind it, up to a multiple."""
    num_missing = -len(tensor) % multiple
    return torch.cat((tensor, tensor.new_zeros(num_missing, *tensor.shape[1:])))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return all rows of ``parts``; they are copied only where there are several."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _in_main_memory(logits: Tensor) -> Tensor:
    """Return ``logits`` where they are sampled: one copy for all rows, and not one for each."""
    is_cuda = logits.device.type == "cuda"
    if not (is_cuda or logits.device.type == "mps") or not len(logits):
        return logits
    here = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=is_cuda)
    return here.copy_(logits)  # and wait for it


def _only_decodes(piece: Piece) -> bool:
    return len(piece.token_ids) == 1 and piece.wants_logits


def _bind(function: Callable[..., Tensor], layer: LayerWeights) -> Callable[..., Tensor]:
    return lambda *tensors: function(layer, *tensors)


def _paged(cache: KVCache) -> PagedCache:
    assert isinstance(cache, PagedCache), "a cache comes from the runner that it is used by"
    return cache
