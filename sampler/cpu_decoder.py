"""The decoder's forward pass on processors, as compiled kernels over the block pool.

One set of weights serves prefill and decode: float32, bfloat16, or integers of 8 or 4 bits that
share a scale in groups of 32 (the grids of GGUF's Q8_0 and Q4_1). Activations are float32, but for
the inputs of products where the processor multiplies them two at a time: these are rounded to
bfloat16 in its format, and with integers to 16 bits with a scale for each 32. Keys and values are
float32, bfloat16, or integers of 8 bits of which, in each position, 32 coordinates share a scale: a
position is rounded when it is written, by itself, and never again. A row's logits do not
depend on the rows beside it (``cpu_kernels``), so what is sampled does not depend on who else is in
the batch, in any of the formats.
"""

import logging
import threading
from collections.abc import Hashable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sampler import cpu_kernels as kernels
from sampler import main_memory
from sampler.counters import Counters
from sampler.cpu_kernels import CHUNK_TOKENS, ROWS_PER_JOB, TILE
from sampler.decoder_weights import DecoderWeights
from sampler.kv_cache import KVCache, PagedCache, PagedStorage
from sampler.model_runner import ModelRunner, Piece
from sampler.simd import GROUP, LANES, input_group_size, kv_group_size, processor_has

logger = logging.getLogger(__name__)

FORMATS = ("float32", "bfloat16", "int8", "int4")
"""How weights may be kept. Integers share a float16 scale, 4-bit ones a minimum too, in groups."""


def nearest_lossless_format(weights: DecoderWeights) -> str:
    """Return ``int4`` where the weights are on its grid already, as a model's are that was
    published in it, and otherwise ``int8``. All matrices are looked at until one is not."""
    matrices = (
        matrix
        for layer in weights.layers
        for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down)
    )
    return "int4" if all(map(_is_on_int4_grid, matrices)) else "int8"


_NO_ERROR = 1e-3
"""A share of the root mean square of weights that rounding scales to float16 can explain."""
_ROWS_TRIED = 64
"""Of each matrix. Formats are published of whole tensors, and rows all over it are of all of which
it was made; to try every row would take as long as to pack them."""


def _is_on_int4_grid(matrix: Tensor) -> bool:
    """Tell whether 4 bits change nothing of ``matrix``."""
    matrix = matrix[:: -(-len(matrix) // _ROWS_TRIED)]
    groups = matrix.float().reshape(-1, GROUP, 1).unsqueeze(1)  # (group, 1, line, column)
    scales, minima, pairs = _int4_parts(groups)
    integers = torch.stack([pairs & 15, pairs >> 4], dim=3).flatten(2, 3)
    kept = integers * scales.float()[:, :, None] + minima.float()[:, :, None]
    return bool((kept - groups).norm() <= _NO_ERROR * groups.norm())


_PAIRS = {"bfloat16": "avx512bf16", "int8": "avx512vnni", "int4": "avx512vnni"}


def can_multiply_pairs(form: str) -> bool:
    """Tell whether this processor has an instruction that multiplies weights of ``form`` with
    inputs two at a time: with bfloat16 if they are, integers with int16."""
    return form in _PAIRS and processor_has(_PAIRS[form])


def covers(weights: DecoderWeights) -> bool:
    """Tell whether the dimensions are whole tiles, as the kernels want them."""
    shape = weights.shape
    wide = (shape.hidden_size, shape.intermediate_size, shape.head_dim)
    return weights.device.type == "cpu" and all(size % TILE == 0 for size in wide)


class CPUDecoder(ModelRunner):
    """Our own decoder, compiled, on one or several threads."""

    runs_ahead = True
    prefill_chunk = 128

    def __init__(
        self,
        weights: DecoderWeights,
        storage: PagedStorage,
        counters: Counters | None = None,
        *,
        weight_format: str = "float32",
        num_threads: int = 1,
        multiplies_pairs: bool | None = None,
    ) -> None:
        """Pack the weights.

        Args:
            weights: ``covers`` them; not needed any more afterwards.
            storage: of the blocks of all caches, float32, bfloat16 or int8.
            counters: where the work is counted.
            weight_format: one of ``FORMATS``.
            num_threads: how many compute together, the model thread among them.
            multiplies_pairs: whether products take inputs in 16 bits, two at a time; None: where
                the processor has an instruction for it. Never in float32.
        """
        super().__init__(counters)
        assert covers(weights), "the kernels do not cover this network"
        self._network = network = weights.shape
        assert storage.shape == (network.num_layers, network.num_kv_heads, network.head_dim)
        if multiplies_pairs is None:
            multiplies_pairs = can_multiply_pairs(weight_format)
        assert not multiplies_pairs or can_multiply_pairs(weight_format), "no such instruction"
        self._storage = storage
        self._kv = _flat(storage.tensor)  # the same memory
        kv_group = kv_group_size(self._kv.dtype.type)
        # Who allots the memory and who addresses it each say how a block is laid out.
        in_slab = network.head_dim // GROUP * kv_group
        assert storage.shape.slab_size(storage.tensor.dtype) == in_slab, "another layout of blocks"
        self._shape, self._weights = _packed(
            weights, weight_format, in_pairs=multiplies_pairs, kv_group=kv_group
        )
        self._weight_format = weight_format
        self._crew = _Crew(num_threads)
        inputs = input_dtype(weight_format, in_pairs=multiplies_pairs)
        queries: type = np.float32
        if self._kv.dtype == np.int8:
            queries = input_dtype("int8", in_pairs=multiplies_pairs and can_multiply_pairs("int8"))
        self._scratch = _Scratch(self._shape, num_threads, inputs, queries)

    def __repr__(self) -> str:
        kv = str(self.dtype).removeprefix("torch.")
        return f"compiled, {self._weight_format}, {kv} cache, {self._crew.num_threads} threads"

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return self._storage.tensor.dtype

    @property
    def vocab_size(self) -> int:
        return self._network.vocab_size

    @property
    def max_context(self) -> int:
        return self._network.max_context

    def new_cache(self) -> PagedCache:
        return self._storage.new_cache()

    def reserve_memory(self) -> None:
        self._storage.reserve()

    def forward(self, pieces: Sequence[Piece]) -> list[Tensor | None]:
        for piece in pieces:
            # The kernels would read beyond the embedding, and beyond the rotations.
            assert 0 <= min(piece.token_ids) <= max(piece.token_ids) < self.vocab_size
            assert piece.cache.num_tokens + len(piece.token_ids) <= self.max_context
            _cache_of(piece).extend_to(len(piece.token_ids))
        batch = _batch(pieces)
        scratch, logits = self._scratch.views(batch)
        self._crew.run(self._shape, self._weights, batch, scratch, self._kv)
        for piece in pieces:
            piece.cache.advance(len(piece.token_ids))
        self.counters.tokens_forwarded += len(batch.token_ids)
        self.counters.forward_passes += 1
        wanted = iter(torch.from_numpy(logits)[:, : self.vocab_size])
        return [next(wanted) if piece.wants_logits else None for piece in pieces]

    def find_prefix(self, salt: Hashable, token_ids: Sequence[int]) -> KVCache | None:
        cache = self._storage.match(salt, token_ids, len(token_ids) - 1)
        return cache if cache.num_tokens else None

    def publish(self, salt: Hashable, token_ids: Sequence[int], cache: KVCache) -> None:
        assert isinstance(cache, PagedCache)
        cache.publish(salt, token_ids)

    def torch_threads(self, num_threads: int) -> int:
        """Torch is left with the sampling: more threads of it would spin on cores wanted here."""
        return 1

    def warm_up(self) -> None:
        """Compile the kernels, or find them compiled: seconds the first time, then a moment."""
        cache = self.new_cache()
        counters, self.counters = self.counters, Counters()
        self.forward([Piece([0, 0], cache)])
        self.counters = counters


def _cache_of(piece: Piece) -> PagedCache:
    assert isinstance(piece.cache, PagedCache)
    return piece.cache


# --- Threads --------------------------------------------------------------------------------------


class _Crew:
    """Threads that take part in steps. One that comes late finds its work done by the others.

    For one that the system does not let run, only the newest step waits: it holds what a step is
    computed in. They end when the crew is collected.
    """

    def __init__(self, num_threads: int) -> None:
        self._queues: list[SimpleQueue[tuple[Any, ...] | None]] = []
        for number in range(1, num_threads):
            queue = SimpleQueue[tuple[Any, ...] | None]()
            self._queues.append(queue)
            thread = threading.Thread(target=_take_part, args=(number, queue), daemon=True)
            thread.name = f"model-{number}"
            thread.start()
        finalize(self, _dismiss, self._queues)

    @property
    def num_threads(self) -> int:
        """How many take part, the one that calls ``run`` among them."""
        return 1 + len(self._queues)

    def run(self, *arguments: Any) -> None:
        for queue in self._queues:
            if not queue.empty():
                with suppress(Empty):  # or it was taken just now
                    queue.get_nowait()
            queue.put(arguments)
        kernels.step(0, *arguments)


def _dismiss(queues: "Sequence[SimpleQueue[tuple[Any, ...] | None]]") -> None:
    for queue in queues:
        queue.put(None)


def _take_part(number: int, queue: "SimpleQueue[tuple[Any, ...] | None]") -> None:
    while (arguments := queue.get()) is not None:
        try:
            kernels.step(number, *arguments)
        except Exception:
            # A step that has begun raises nothing (a test looks), so others do not wait for this.
            logger.exception("thread %d takes no part in a step", number)
        del arguments


# --- What a step is given -------------------------------------------------------------------------


def _batch(pieces: Sequence[Piece]) -> kernels.Batch:
    """Lay out the rows of ``pieces``, and who attends to what.

    A single row attends chunk by chunk, each a job, so that threads can share a long context. Rows
    of a prefill attend in small tiles, each a job over all chunks.
    """
    lengths = np.array([len(piece.token_ids) for piece in pieces])
    starts = np.array([piece.cache.num_tokens for piece in pieces])
    first_rows = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    tables = [_cache_of(piece).table.blocks for piece in pieces]
    padded = np.zeros((len(pieces), max(map(len, tables))), np.int64)
    for line, table in zip(padded, tables, strict=True):
        line[: len(table)] = table
    jobs, merges = [], []
    slot = 0
    for first_row, start, length in zip(first_rows, starts, lengths, strict=True):
        if length == 1:
            num_chunks = -(-(start + 1) // CHUNK_TOKENS)
            merges.append((first_row, slot, num_chunks))
            jobs += [(first_row, 1, chunk, 1, slot + chunk) for chunk in range(num_chunks)]
            slot += num_chunks
            continue
        for offset in range(0, length, ROWS_PER_JOB):
            num_rows = min(ROWS_PER_JOB, length - offset)
            num_chunks = -(-(start + offset + num_rows) // CHUNK_TOKENS)
            jobs.append((first_row + offset, num_rows, 0, num_chunks, -1))
    wants = np.array([piece.wants_logits for piece in pieces])
    offsets = np.arange(lengths.sum()) - np.repeat(first_rows, lengths)
    return kernels.Batch(
        token_ids=np.concatenate([np.asarray(piece.token_ids, np.int64) for piece in pieces]),
        positions=np.repeat(starts, lengths) + offsets,
        sequences=np.repeat(np.arange(len(pieces)), lengths),
        tables=padded,
        jobs=np.array(jobs, np.int64).reshape(-1, 5),
        merges=np.array(merges, np.int64).reshape(-1, 3),
        wanted=(first_rows + lengths - 1)[wants],
    )


class _Scratch:
    """Buffers that grow with the largest batch so far."""

    def __init__(
        self, shape: kernels.Shape, num_threads: int, input_dtype: type, query_dtype: type
    ) -> None:
        self._shape, self._input_dtype = shape, input_dtype
        size = kernels.local_size(shape)
        self._local = main_memory.empty(num_threads * size, np.float32).reshape(num_threads, size)
        size = kernels.num_queries(shape) * shape.head_dim // GROUP * input_group_size(query_dtype)
        queries = main_memory.empty(num_threads * size, query_dtype)
        self._queries = queries.reshape(num_threads, size)
        self._buffers: dict[str, NDArray[Any]] = {}

    def views(self, batch: kernels.Batch) -> tuple[kernels.Scratch, NDArray[np.float32]]:
        """Return the buffers for ``batch``, and the logits: these are new each time."""
        shape, rows = self._shape, len(batch.token_ids)
        attended = shape.num_heads * shape.head_dim
        qkv = attended + 2 * shape.num_kv_heads * shape.head_dim
        slots = int(batch.merges[:, 2].sum())
        logits = torch.empty(len(batch.wanted), shape.vocab).numpy()
        scratch = kernels.Scratch(
            progress=np.zeros(2 * kernels.num_phases(shape.num_layers), np.int64),
            hidden=self._at_least("hidden", rows * shape.hidden),
            normed=self._inputs("normed", rows * shape.hidden),
            qkv=self._at_least("qkv", rows * qkv),
            attended=self._inputs("attended", rows * attended),
            gated=self._inputs("gated", rows * shape.intermediate),
            parts=self._at_least("parts", slots * shape.num_heads * (shape.head_dim + LANES)),
            last=self._inputs("last", len(batch.wanted) * shape.hidden),
            logits=logits.reshape(-1),
            local=self._local,
            queries=self._queries,
        )
        return scratch, logits

    def _inputs(self, name: str, num_inputs: int) -> NDArray[Any]:
        """Return room for the inputs of products."""
        size = num_inputs // GROUP * input_group_size(self._input_dtype)
        return self._at_least(name, size, self._input_dtype)

    def _at_least(self, name: str, size: int, dtype: type = np.float32) -> NDArray[Any]:
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name] = main_memory.empty(max(size, 1), dtype)
        return buffer


# --- Weights --------------------------------------------------------------------------------------


def input_dtype(form: str, *, in_pairs: bool) -> type:
    """Return what inputs are kept in for products with weights of ``form``."""
    if not in_pairs or form == "float32":
        return np.float32
    return np.uint16 if form == "bfloat16" else np.int16


def _packed(
    weights: DecoderWeights, form: str, *, in_pairs: bool, kv_group: int
) -> tuple[kernels.Shape, kernels.Weights]:
    network = weights.shape
    head_form = "int8" if form == "int4" else form
    matrices, starts, end = [], [], 0
    for layer in weights.layers:
        for matrix in (layer.qkv, layer.o, _interleaved(layer.gate_up), layer.down):
            matrices.append(pack(matrix, form, in_pairs=in_pairs))
            starts.append(end)
            end += len(matrices[-1])
    linear = np.concatenate(matrices, out=main_memory.empty(end, matrices[0].dtype))
    head = main_memory.copy_of(pack(_padded(weights.head), head_form, in_pairs=in_pairs))
    shape = kernels.Shape(
        num_layers=network.num_layers,
        hidden=network.hidden_size,
        num_heads=network.num_heads,
        num_kv_heads=network.num_kv_heads,
        head_dim=network.head_dim,
        intermediate=network.intermediate_size,
        vocab=-(-network.vocab_size // TILE) * TILE,
        epsilon=network.rms_norm_eps,
        linear_line=line_size(form),
        head_line=line_size(head_form),
        kv_group=kv_group,
    )
    norms = [norm for layer in weights.layers for norm in (layer.input_norm, layer.post_norm)]
    cosines, sines = _rotations(weights)
    packed = kernels.Weights(
        linear=linear,
        starts=np.array(starts, np.int64).reshape(-1, 4),
        head=head,
        embedding=_flat(weights.embed if form == "bfloat16" else weights.embed.float()),
        norms=_stacked([*norms, weights.norm]),
        qkv_bias=_stacked([layer.qkv_bias for layer in weights.layers]),
        qk_norms=_stacked(
            [norm for layer in weights.layers for norm in (layer.q_norm, layer.k_norm)]
        ),
        cosines=cosines,
        sines=sines,
    )
    return shape, packed


def line_size(form: str) -> int:
    """Return how many elements of the packed array one line of a tile takes, scales included."""
    match form:
        case "int8":
            return TILE + 2 * TILE // GROUP
        case "int4":
            return TILE // 2 + 4 * TILE // GROUP
        case _:
            return TILE


def pack(matrix: Tensor, form: str, *, in_pairs: bool = False) -> NDArray[Any]:
    """Return ``matrix``, ``(out, in)``, cut into tiles as ``multiply_tile`` reads them, flat.

    ``in_pairs`` puts them in the order that products of pairs read, but for float32. ``out`` is a
    multiple of 32, and so is ``in`` where weights are integers.
    """
    num_out, num_in = matrix.shape
    tiles = matrix.float().reshape(num_out // TILE, TILE, num_in).transpose(1, 2)
    if form == "float32":
        return _flat(tiles)
    if form == "bfloat16":
        tiles = tiles.to(torch.bfloat16)
        return _flat(_side_by_side(tiles) if in_pairs else tiles)
    groups = tiles.reshape(len(tiles), num_in // GROUP, GROUP, TILE)  # (tile, group, line, column)
    parts = _int8_parts(groups) if form == "int8" else _int4_parts(groups)
    if in_pairs:
        *scales, integers = parts
        parts = (*scales, _side_by_side(integers) if form == "int8" else _words(integers))
    packed = torch.cat([part.contiguous().view(torch.int8).flatten(2) for part in parts], dim=-1)
    return _flat(packed if form == "int8" else packed.view(torch.uint8))


def _int8_parts(groups: Tensor) -> tuple[Tensor, ...]:
    scales = (groups.abs().amax(2) / 127).half()  # (tile, group, column)
    integers = groups / _divisor(scales)[:, :, None]
    return scales, integers.round().clamp(-127, 127).to(torch.int8)


def _int4_parts(groups: Tensor) -> tuple[Tensor, ...]:
    minima = groups.amin(2).half()
    scales = ((groups.amax(2) - minima.float()) / 15).half()
    integers = (groups - minima.float()[:, :, None]) / _divisor(scales)[:, :, None]
    integers = integers.round().clamp(0, 15).to(torch.uint8)
    return scales, minima, integers[:, :, 0::2] | integers[:, :, 1::2] << 4


def _side_by_side(lines: Tensor) -> Tensor:
    """Return each two of ``lines``, ``(..., line, column)``, with their columns taking turns."""
    *outer, num_lines, num_columns = lines.shape
    return lines.reshape(*outer, num_lines // 2, 2, num_columns).transpose(-1, -2)


def _words(pairs: Tensor) -> Tensor:
    """Return bytes that hold two lines each, ``(..., 16, column)``, as words that hold eight.

    In a word's lower half are the even lines, from the lowest bits up; in the upper half the odd.
    """
    *outer, num_bytes, num_columns = pairs.shape
    eights = pairs.reshape(*outer, num_bytes // 4, 4, num_columns)
    even, odd = eights & 15, eights >> 4
    words = [half[..., 0::2, :] | half[..., 1::2, :] << 4 for half in (even, odd)]
    return torch.cat(words, dim=-2).transpose(-1, -2)  # (..., word, column, byte)


def _divisor(scales: Tensor) -> Tensor:
    """Return ``scales`` as float32, without zeros: where all weights are equal, any will do."""
    return torch.where(scales == 0, 1.0, scales.float())


def _interleaved(gate_up: Tensor) -> Tensor:
    """Return the tiles of the gate and of what it gates in turns."""
    return gate_up.reshape(2, -1, TILE, gate_up.shape[1]).transpose(0, 1).reshape(gate_up.shape)


def _padded(matrix: Tensor) -> Tensor:
    missing = -len(matrix) % TILE
    return torch.nn.functional.pad(matrix, (0, 0, 0, missing)) if missing else matrix


def _stacked(vectors: Sequence[Tensor | None]) -> NDArray[Any]:
    given = [vector.float() for vector in vectors if vector is not None]
    return _flat(torch.stack(given)) if given else np.empty(0, np.float32)


def _rotations(weights: DecoderWeights) -> tuple[NDArray[Any], NDArray[Any]]:
    positions = torch.arange(weights.shape.max_context, dtype=torch.float32)
    angles = torch.outer(positions, weights.inv_freq)  # (max_context, head_dim / 2)
    scaling = weights.attention_scaling
    return _flat(angles.cos() * scaling), _flat(angles.sin() * scaling)


def _flat(tensor: Tensor) -> NDArray[Any]:
    """Return the elements as an array; bfloat16 as its bits."""
    flat = tensor.detach().contiguous().reshape(-1)
    return (flat.view(torch.uint16) if flat.dtype == torch.bfloat16 else flat).numpy()
