"""A decoder's forward pass as one compiled function that several threads run together.

A step is a list of phases, one after the other; a phase is a number of units that do not depend on
each other. Threads draw units like tickets, and go on to the next phase when all units of the last
one are done, by whomever. No thread is waited for that has not drawn a unit: one that the operating
system lets wait joins late, or never, and the others do its share. So a busy neighbour costs a step
what it takes from the cores, not a barrier's worth of waiting. One that has drawn a unit must
finish it, or the others would wait for ever: so nothing here may raise. Numbers do not, and what
Numba would check (whether a row has as many elements as there are names, a step of ``range`` that
it does not know, a shape) is not written; a test looks for it in the compiled code.

What is computed for a row depends on that row, its sequence and nothing else, bit for bit. Products
add up in one order (``simd``), attention goes over a sequence in chunks that begin at multiples of
``CHUNK_TOKENS``, and their results are merged from the first to the last (flash decoding, as in Dao
et al. 2023), whether one unit went through them or several did. So what is NaN in one sequence
stays in it, and with the tokens that read it.

Layout, in elements of flat arrays: a matrix is cut into tiles of 32 outputs, each tile a line of 32
for every input (``pack`` in ``cpu_decoder``). Keys of one head in a block are groups of 32
coordinates, each ``(32, 16)``, so that one line holds one coordinate of 16 tokens; values are
groups of ``(16, 32)``. In int8 a group begins with the scales of its 16 tokens
(``simd.kv_group_size``).
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sampler.cache_pool import BLOCK_SIZE
from sampler.simd import (
    GROUP,
    LANES,
    PREFETCHED_BYTES,
    add,
    compiled,
    divide,
    entry_point,
    exp,
    fetch_add,
    fused_multiply_add,
    lane_max,
    lane_sum,
    load,
    load_shared,
    maximum,
    multiply,
    multiply_tile,
    prefetch,
    scale_weights,
    splat,
    store,
    store_inputs,
    store_position,
    subtract,
    yield_thread,
)

TILE = 2 * LANES
"""Outputs of one tile of a matrix."""
CHUNK_TOKENS = 256
"""Tokens of a sequence that one softmax goes over; results of chunks are merged."""
ROWS_PER_UNIT = 64
"""Rows of a product that one unit computes."""
ROWS_PER_JOB = 8
"""Rows of a prefilled sequence that attend together, so that keys are read once for all."""
DRAWS_PER_THREAD = 4
"""In about how many units a product of few rows is divided, for each thread."""
JOBS_PER_THREAD = 4
"""How many jobs of single rows there are for each thread where one unit takes all heads."""
BLOCKS_AHEAD = 4
"""How far ahead of the block that is multiplied keys and values are fetched, in blocks."""
_NORM_ROWS = 4
_SPINS = 2000
"""How often a thread looks whether a phase is over before it lets others have its core."""

Array = NDArray[Any]


class Shape(NamedTuple):
    """The dimensions of the network."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    """Rounded up to whole tiles."""
    epsilon: float
    linear_line: int
    """Elements of a tile of a layer's matrices for each input."""
    head_line: int
    """The same for the output head."""
    kv_group: int
    """Elements of 32 coordinates of the keys, or values, of a block: ``simd.kv_group_size``."""


class Weights(NamedTuple):
    """All weights, flat."""

    linear: Array
    """The matrices of all layers."""
    starts: Array
    """``(num_layers, 4)`` int64: where a layer's qkv, o, gate_up and down begin."""
    head: Array
    embedding: Array
    """``(vocab * hidden,)`` float32, or bfloat16 as uint16."""
    norms: Array
    """``(num_layers * 2 + 1, hidden)`` float32: before attention and MLP of each layer; last."""
    qkv_bias: Array
    """``(num_layers, qkv)`` float32; empty where there is none."""
    qk_norms: Array
    """``(num_layers * 2, head_dim)`` float32, of queries and keys; empty where there are none."""
    cosines: Array
    """``(max_context, head_dim / 2)`` float32."""
    sines: Array


class Batch(NamedTuple):
    """What one step is to compute. Integers are int64."""

    token_ids: Array
    """``(rows,)``."""
    positions: Array
    """``(rows,)``: in its sequence."""
    sequences: Array
    """``(rows,)``: which line of ``tables`` is its."""
    tables: Array
    """``(sequences, blocks)``."""
    jobs: Array
    """``(jobs, 5)``: first row, number of rows, first chunk, number of chunks, and the slot for the
    result, or -1: the job goes through all chunks and gives the attention's output itself."""
    merges: Array
    """``(merges, 3)``: a row, its first slot, and the number of its slots."""
    wanted: Array
    """``(wanted,)``: the rows whose logits are wanted."""


class Scratch(NamedTuple):
    """Where results lie between phases: float32, or where it says so inputs of products, which are
    float32 or of 16 bits (``store_inputs``)."""

    progress: Array
    """``(2 * phases,)`` int64 zeros: tickets drawn, and units done, of each phase."""
    hidden: Array
    """``(rows, hidden)``: the residual stream."""
    normed: Array
    """``(rows, hidden)`` inputs."""
    qkv: Array
    """``(rows, (num_heads + 2 * num_kv_heads) * head_dim)``."""
    attended: Array
    """``(rows, num_heads * head_dim)`` inputs."""
    gated: Array
    """``(rows, intermediate)`` inputs."""
    parts: Array
    """``(slots, num_heads, head_dim + LANES)``: attention over one chunk: see ``_merge``."""
    last: Array
    """``(wanted, hidden)`` inputs."""
    logits: Array
    """``(wanted, vocab)``."""
    local: Array
    """``(threads, local_size)``."""
    queries: Array
    """``(threads, num_queries * head_dim)`` inputs: float32, or int16 with keys in int8."""


def num_phases(num_layers: int) -> int:
    """Return how many phases a step has."""
    return 1 + 9 * num_layers + 2


def queries_per_job(num_heads: int, num_kv_heads: int) -> int:
    """Return how many queries a job has at most."""
    return ROWS_PER_JOB * (num_heads // num_kv_heads)


def local_size(shape: Shape) -> int:
    """Return how many floats a thread needs for itself."""
    queries = num_queries(shape)
    attention = queries * (2 * shape.head_dim + CHUNK_TOKENS + 3 * LANES)
    return max(attention, 2 * TILE * ROWS_PER_UNIT)


def num_queries(shape: Shape) -> int:
    """Return how many queries a thread has at once, at most."""
    return max(queries_per_job(shape.num_heads, shape.num_kv_heads), shape.num_heads)


# --- Threads --------------------------------------------------------------------------------------


@compiled
def _draw(progress: Array, phase: int) -> int:
    return fetch_add(progress, 2 * phase, 1)  # type: ignore[no-any-return]


@compiled
def _done(progress: Array, phase: int) -> None:
    fetch_add(progress, 2 * phase + 1, 1)


@compiled
def _wait(progress: Array, phase: int, num_units: int) -> None:
    """Wait until all units of the phase are done."""
    spins = 0
    while load_shared(progress, 2 * phase + 1) < num_units:
        spins += 1
        if spins > _SPINS:
            yield_thread()


# --- Products -------------------------------------------------------------------------------------


def _product(accumulates: bool, of: str) -> Any:
    """Return a function that multiplies any number of rows with one tile of weights, which are
    those of a "matrix", or "keys" or "values"."""

    @compiled
    def product(
        weights: Array, at: int, stride: int, apart: int, ahead: int, ahead_apart: int,
        inputs: Array, first: int, input_stride: int, length: int,
        outputs: Array, to: int, output_stride: int, num_rows: int,
    ) -> None:  # fmt: skip
        row = 0
        while num_rows - row >= 8:
            multiply_tile(
                weights, at, stride, apart, ahead, ahead_apart,
                inputs, first + row * input_stride, input_stride, length,
                outputs, to + row * output_stride, output_stride, 8, 2, accumulates, of,
            )  # fmt: skip
            row += 8
        # What is left goes in tiles of 4, 3, 2 and 1: each size of tile is code to be compiled.
        if num_rows - row >= 4:
            multiply_tile(
                weights, at, stride, apart, ahead, ahead_apart,
                inputs, first + row * input_stride, input_stride, length,
                outputs, to + row * output_stride, output_stride, 4, 2, accumulates, of,
            )  # fmt: skip
            row += 4
        first += row * input_stride
        to += row * output_stride
        if num_rows - row == 3:
            multiply_tile(
                weights, at, stride, apart, ahead, ahead_apart,
                inputs, first, input_stride, length,
                outputs, to, output_stride, 3, 2, accumulates, of,
            )  # fmt: skip
        if num_rows - row == 2:
            multiply_tile(
                weights, at, stride, apart, ahead, ahead_apart,
                inputs, first, input_stride, length,
                outputs, to, output_stride, 2, 2, accumulates, of,
            )  # fmt: skip
        if num_rows - row == 1:
            multiply_tile(
                weights, at, stride, apart, ahead, ahead_apart,
                inputs, first, input_stride, length,
                outputs, to, output_stride, 1, 2, accumulates, of,
            )  # fmt: skip

    return product


_product_of_tiles = _product(accumulates=False, of="matrix")
_product_added = _product(accumulates=True, of="matrix")
_product_of_keys = _product(accumulates=False, of="keys")
_product_of_values_added = _product(accumulates=True, of="values")


@compiled
def _tile_product(
    weights: Array, at: int, line: int, inputs: Array, first: int, length: int,
    outputs: Array, to: int, output_stride: int, num_rows: int,
) -> None:  # fmt: skip
    """outputs = inputs, of which each row is ``length``, times a tile of a matrix."""
    ahead = PREFETCHED_BYTES // weights.itemsize
    _product_of_tiles(
        weights, at, line, LANES, ahead, LANES, inputs, first, length, length,
        outputs, to, output_stride, num_rows,
    )  # fmt: skip


@compiled
def _tile_product_added(
    weights: Array, at: int, line: int, inputs: Array, first: int, length: int,
    outputs: Array, to: int, output_stride: int, num_rows: int,
) -> None:  # fmt: skip
    """The same for outputs += ..."""
    ahead = PREFETCHED_BYTES // weights.itemsize
    _product_added(
        weights, at, line, LANES, ahead, LANES, inputs, first, length, length,
        outputs, to, output_stride, num_rows,
    )  # fmt: skip


@compiled
def _num_row_units(num_rows: int) -> int:
    return (num_rows + ROWS_PER_UNIT - 1) // ROWS_PER_UNIT


@compiled
def _num_spans(num_tiles: int, row_units: int, num_threads: int) -> int:
    """Return into how many spans of tiles, one after the other in memory, a product is divided.

    With few rows a tile is half a microsecond of work, and to draw it takes nearly as long; and
    what a thread has had fetched ahead is then another one's tile.
    """
    return min(num_tiles, DRAWS_PER_THREAD * num_threads) if row_units == 1 else num_tiles


@compiled
def _span_start(span: int, num_spans: int, num_tiles: int) -> int:
    """Return the first tile of a span. They are as long as one another, or the first ones are
    longer by one: then threads that draw in turns come to the end together."""
    return span * (num_tiles // num_spans) + min(span, num_tiles % num_spans)


@compiled
def _linear(
    progress: Array, phase: int, weights: Array, start: int, line: int,
    inputs: Array, length: int, outputs: Array, width: int, num_rows: int, adds: bool,
    num_threads: int,
) -> None:  # fmt: skip
    """One phase: outputs = inputs times a matrix, or with ``adds`` outputs += ..."""
    num_tiles, row_units = width // TILE, _num_row_units(num_rows)
    num_spans = _num_spans(num_tiles, row_units, num_threads)
    num_units = row_units * num_spans
    unit = _draw(progress, phase)
    while unit < num_units:
        span = unit // row_units
        first_tile = _span_start(span, num_spans, num_tiles)
        first_row = (unit % row_units) * ROWS_PER_UNIT
        rows = min(ROWS_PER_UNIT, num_rows - first_row)
        first = first_row * length
        for tile in range(first_tile, _span_start(span + 1, num_spans, num_tiles)):
            at = start + tile * length * line
            to = first_row * width + tile * TILE
            if adds:
                _tile_product_added(
                    weights, at, line, inputs, first, length, outputs, to, width, rows
                )
            else:
                _tile_product(weights, at, line, inputs, first, length, outputs, to, width, rows)
        _done(progress, phase)
        unit = _draw(progress, phase)
    _wait(progress, phase, num_units)


@compiled
def _gate(
    progress: Array, phase: int, weights: Array, start: int, line: int,
    inputs: Array, length: int, outputs: Array, width: int, num_rows: int,
    local: Array, num_threads: int,
) -> None:  # fmt: skip
    """One phase: silu of the gate, times what it gates. Their tiles take turns in the matrix."""
    num_tiles, row_units = width // TILE, _num_row_units(num_rows)
    num_spans = _num_spans(num_tiles, row_units, num_threads)
    num_units = row_units * num_spans
    up = ROWS_PER_UNIT * TILE
    unit = _draw(progress, phase)
    while unit < num_units:
        span = unit // row_units
        first_tile = _span_start(span, num_spans, num_tiles)
        first_row = (unit % row_units) * ROWS_PER_UNIT
        rows = min(ROWS_PER_UNIT, num_rows - first_row)
        first = first_row * length
        for tile in range(first_tile, _span_start(span + 1, num_spans, num_tiles)):
            at = start + 2 * tile * length * line
            _tile_product(weights, at, line, inputs, first, length, local, 0, TILE, rows)
            at += length * line
            _tile_product(weights, at, line, inputs, first, length, local, up, TILE, rows)
            _gate_tile(local, up, outputs, first_row * width + tile * TILE, width, rows)
        _done(progress, phase)
        unit = _draw(progress, phase)
    _wait(progress, phase, num_units)


@compiled
def _gate_tile(
    local: Array, gated: int, outputs: Array, to: int, width: int, num_rows: int
) -> None:
    one = splat(np.float32(1.0))
    minus_one = splat(np.float32(-1.0))
    for row in range(num_rows):
        for lane in range(0, TILE, LANES):
            gate = load(local, row * TILE + lane)
            sigmoid = divide(one, add(one, exp(multiply(gate, minus_one))))
            product = multiply(multiply(gate, sigmoid), load(local, gated + row * TILE + lane))
            store(local, row * TILE + lane, product)
        low = load(local, row * TILE)
        store_inputs(outputs, to + row * width, low, load(local, row * TILE + LANES))


# --- Rows -----------------------------------------------------------------------------------------


@compiled
def _norm(
    inputs: Array, first: int, gain: Array, gain_at: int,
    outputs: Array, to: int, length: int, epsilon: float,
) -> None:  # fmt: skip
    """RMSNorm (Zhang and Sennrich, 2019) of one row."""
    total = splat(np.float32(0.0))
    for lane in range(0, length, LANES):
        value = load(inputs, first + lane)
        total = fused_multiply_add(value, value, total)
    mean = lane_sum(total) / np.float32(length)
    factor = splat(np.float32(1.0) / np.sqrt(mean + np.float32(epsilon)))
    for group in range(0, length, GROUP):
        low = multiply(load(inputs, first + group), factor)
        high = multiply(load(inputs, first + group + LANES), factor)
        low = multiply(low, load(gain, gain_at + group))
        high = multiply(high, load(gain, gain_at + group + LANES))
        store_inputs(outputs, to + group, low, high)


@compiled
def _norm_rows(
    progress: Array, phase: int, inputs: Array, gain: Array, gain_at: int,
    outputs: Array, width: int, num_rows: int, epsilon: float,
) -> None:  # fmt: skip
    num_units = (num_rows + _NORM_ROWS - 1) // _NORM_ROWS
    unit = _draw(progress, phase)
    while unit < num_units:
        for row in range(unit * _NORM_ROWS, min((unit + 1) * _NORM_ROWS, num_rows)):
            at = row * width
            _norm(inputs, at, gain, gain_at, outputs, at, width, epsilon)
        _done(progress, phase)
        unit = _draw(progress, phase)
    _wait(progress, phase, num_units)


@compiled
def _embed(
    progress: Array, phase: int, weights: Weights, batch: Batch, hidden: Array, width: int
) -> None:
    num_rows = len(batch.token_ids)
    num_units = (num_rows + _NORM_ROWS - 1) // _NORM_ROWS
    unit = _draw(progress, phase)
    while unit < num_units:
        for row in range(unit * _NORM_ROWS, min((unit + 1) * _NORM_ROWS, num_rows)):
            at = batch.token_ids[row] * width
            for lane in range(0, width, LANES):
                store(hidden, row * width + lane, load(weights.embedding, at + lane))
        _done(progress, phase)
        unit = _draw(progress, phase)
    _wait(progress, phase, num_units)


@compiled
def _rotate(vector: Array, at: int, weights: Weights, position: int, head_dim: int) -> None:
    """Rotary embedding (Su et al., 2021): each element turns with the one half a head away."""
    half = head_dim // 2
    turn = position * half
    minus_one = splat(np.float32(-1.0))
    for lane in range(0, half, LANES):
        cosine, sine = load(weights.cosines, turn + lane), load(weights.sines, turn + lane)
        first, second = load(vector, at + lane), load(vector, at + half + lane)
        turned = multiply(multiply(second, minus_one), sine)
        store(vector, at + lane, fused_multiply_add(first, cosine, turned))
        store(vector, at + half + lane, fused_multiply_add(second, cosine, multiply(first, sine)))


@compiled
def _place(
    row: int, layer: int, shape: Shape, weights: Weights, batch: Batch, qkv: Array, kv: Array
) -> None:
    """Finish one row's queries, and put its keys and values where they are kept."""
    head_dim, kv_heads = shape.head_dim, shape.num_kv_heads
    num_rotated = shape.num_heads + kv_heads
    width = (num_rotated + kv_heads) * head_dim
    mine = row * width
    position = batch.positions[row]
    if weights.qkv_bias.size:
        for lane in range(0, width, LANES):
            bias = load(weights.qkv_bias, layer * width + lane)
            store(qkv, mine + lane, add(load(qkv, mine + lane), bias))
    for head in range(num_rotated):
        at = mine + head * head_dim
        if weights.qk_norms.size:
            gain = (2 * layer + (head >= shape.num_heads)) * head_dim
            _norm(qkv, at, weights.qk_norms, gain, qkv, at, head_dim, shape.epsilon)
        _rotate(qkv, at, weights, position, head_dim)
    block = batch.tables[batch.sequences[row], position // BLOCK_SIZE]
    slot = position % BLOCK_SIZE
    slab = head_dim // GROUP * shape.kv_group
    keys = ((block * shape.num_layers + layer) * 2) * kv_heads * slab
    values = keys + kv_heads * slab
    for head in range(kv_heads):
        key = mine + (shape.num_heads + head) * head_dim
        value = mine + (num_rotated + head) * head_dim
        for lane in range(0, head_dim, GROUP):
            at = head * slab + lane // GROUP * shape.kv_group
            low, high = load(qkv, key + lane), load(qkv, key + lane + LANES)
            store_position(kv, keys + at, slot, low, high, "keys")
            low, high = load(qkv, value + lane), load(qkv, value + lane + LANES)
            store_position(kv, values + at, slot, low, high, "values")


@compiled
def _place_rows(
    progress: Array, phase: int, layer: int, shape: Shape, weights: Weights, batch: Batch,
    qkv: Array, kv: Array,
) -> None:  # fmt: skip
    num_units = len(batch.token_ids)
    unit = _draw(progress, phase)
    while unit < num_units:
        _place(unit, layer, shape, weights, batch, qkv, kv)
        _done(progress, phase)
        unit = _draw(progress, phase)
    _wait(progress, phase, num_units)


# --- Attention ------------------------------------------------------------------------------------


@compiled
def _merge(into: Array, at: int, part: Array, first: int, head_dim: int) -> None:
    """Add attention over one chunk to that over the chunks before it.

    Each is ``head_dim`` sums of values, weighted by e to the power of score minus the greatest
    score; then that greatest score, the sum of the weights, and what fills a vector.
    """
    greatest, weight = at + head_dim, at + head_dim + 1
    top = max(into[greatest], part[first + head_dim])
    old = exp(splat(into[greatest] - top))
    new = exp(splat(part[first + head_dim] - top))
    for lane in range(0, head_dim, LANES):
        kept = multiply(load(into, at + lane), old)
        store(into, at + lane, fused_multiply_add(load(part, first + lane), new, kept))
    old_weight = into[weight] * lane_max(old)
    into[weight] = old_weight + part[first + head_dim + 1] * lane_max(new)
    into[greatest] = top


@compiled
def _clear(into: Array, at: int, head_dim: int) -> None:
    for lane in range(0, head_dim + LANES, LANES):
        store(into, at + lane, splat(np.float32(0.0)))
    into[at + head_dim] = -np.inf
    into[at + head_dim + 1] = 0.0


@compiled
def _finish(part: Array, first: int, outputs: Array, to: int, head_dim: int) -> None:
    factor = splat(np.float32(1.0) / part[first + head_dim + 1])
    for group in range(0, head_dim, GROUP):
        low = multiply(load(part, first + group), factor)
        high = multiply(load(part, first + group + LANES), factor)
        store_inputs(outputs, to + group, low, high)


@compiled
def _softmax(local: Array, at: int, limit: int, num_scores: int) -> tuple[float, float]:
    """Turn ``limit`` scores into weights, and the rest into zeros.

    Returns the greatest score and the sum of the weights.
    """
    for i in range(limit, num_scores):
        local[at + i] = -np.inf
    top_lanes = load(local, at)
    for lane in range(LANES, num_scores, LANES):
        top_lanes = maximum(top_lanes, load(local, at + lane))
    top = lane_max(top_lanes)
    for lane in range(0, num_scores, LANES):
        store(local, at + lane, exp(subtract(load(local, at + lane), splat(top))))
    for i in range(limit, num_scores):
        local[at + i] = 0.0
    total = splat(np.float32(0.0))
    for lane in range(0, num_scores, LANES):
        total = add(total, load(local, at + lane))
    return top, lane_sum(total)


@compiled
def _prefetch_slab(kv: Array, at: int, size: int) -> None:
    """Have a slab brought near. Blocks lie anywhere, so the processor cannot foresee the next."""
    per_line = 64 // kv.itemsize
    for line in range(size // per_line):
        prefetch(kv, at + line * per_line)


@compiled
def _slab_at(i: int, blocks: Array, block_size: int, keys_at: int, values_at: int) -> int:
    """Return where the ``i``-th slab is that one chunk goes through: all keys, then all values."""
    if i < len(blocks):
        return blocks[i] * block_size + keys_at  # type: ignore[no-any-return]
    i = min(i - len(blocks), len(blocks) - 1)
    return blocks[i] * block_size + values_at  # type: ignore[no-any-return]


@compiled
def _add_values(
    kv: Array, blocks: Array, block_size: int, keys_at: int, values_at: int, slab: int,
    shape: Shape, num_heads: int, per_head: int,
    local: Array, scores: int, parts: int, scaled: int, positions: Array, start: int,
) -> None:  # fmt: skip
    """Add to each query's part the values of one chunk, times their weights.

    Where not all rows see the whole of a block, each takes what it sees by itself: a weight of zero
    does not keep out what is no number. Integers are always numbers, and their scales go into the
    weights: there all rows take all.
    """
    num_blocks, num_rows, head_dim = len(blocks), len(positions), shape.head_dim
    end = positions[num_rows - 1] + 1
    part_size = head_dim + LANES
    num_scales = shape.kv_group - GROUP * BLOCK_SIZE  # in elements
    for i in range(num_blocks):
        block_start = start + i * BLOCK_SIZE
        block_end = min(block_start + BLOCK_SIZE, end)
        see_all = num_scales > 0 or positions[0] + 1 >= block_end
        num_parts = 1 if see_all else num_rows
        rows_each, queries_each = num_rows // num_parts, per_head // num_parts
        values = blocks[i] * block_size + values_at
        later = _slab_at(num_blocks + i + BLOCKS_AHEAD, blocks, block_size, keys_at, values_at)
        for part in range(num_heads * num_parts):
            head, query = part // num_parts, part * queries_each
            last_row = (part % num_parts + 1) * rows_each - 1
            seen = min(positions[last_row] + 1, block_end) - block_start
            for lane in range(0, head_dim if seen > 0 else 0, TILE):
                at = values + head * slab + lane // TILE * shape.kv_group
                weights, step = scores + query * CHUNK_TOKENS + i * BLOCK_SIZE, CHUNK_TOKENS
                if num_scales:
                    for row in range(queries_each):
                        weight = load(local, weights + row * step)
                        store(local, scaled + row * LANES, scale_weights(weight, kv, at))
                    weights, step = scaled, LANES
                _product_of_values_added(
                    kv, at + num_scales, TILE, LANES, later - values, LANES,
                    local, weights, step, seen,
                    local, parts + query * part_size + lane, part_size, queries_each,
                )  # fmt: skip


@compiled
def _attend(
    job: int, first_head: int, num_heads: int, layer: int, shape: Shape, batch: Batch,
    scratch: Scratch, kv: Array, thread: int,
) -> None:  # fmt: skip
    """Let some rows attend to some chunks of their sequence, with the queries of some KV heads."""
    head_dim, kv_heads = shape.head_dim, shape.num_kv_heads
    group = shape.num_heads // kv_heads
    first_row, num_rows = batch.jobs[job, 0], batch.jobs[job, 1]
    first_chunk, num_chunks, slot = batch.jobs[job, 2], batch.jobs[job, 3], batch.jobs[job, 4]
    per_head = num_rows * group
    num_queries = num_heads * per_head
    width = (shape.num_heads + 2 * kv_heads) * head_dim
    part_size = head_dim + LANES

    local, queries = scratch.local[thread], scratch.queries[thread]
    scores = 0
    parts = scores + num_queries * CHUNK_TOKENS
    totals = parts + num_queries * part_size
    scaled = totals + num_queries * part_size

    scale = splat(np.float32(1.0 / np.sqrt(head_dim)))
    for query in range(num_queries):
        row = first_row + query % per_head // group
        head = (first_head + query // per_head) * group + query % group
        at = row * width + head * head_dim
        for lane in range(0, head_dim, GROUP):
            low = multiply(load(scratch.qkv, at + lane), scale)
            high = multiply(load(scratch.qkv, at + lane + LANES), scale)
            store_inputs(queries, query * head_dim + lane, low, high)
        _clear(local, totals + query * part_size, head_dim)

    end = batch.positions[first_row + num_rows - 1] + 1
    table = batch.tables[batch.sequences[first_row]]
    slab = head_dim // GROUP * shape.kv_group
    block_size = shape.num_layers * 2 * kv_heads * slab
    keys_at = (layer * 2 * kv_heads + first_head) * slab  # in a block
    values_at = keys_at + kv_heads * slab
    for chunk in range(first_chunk, first_chunk + num_chunks):
        start = chunk * CHUNK_TOKENS
        num_tokens = min(end - start, CHUNK_TOKENS)
        num_blocks = (num_tokens + BLOCK_SIZE - 1) // BLOCK_SIZE
        blocks = table[start // BLOCK_SIZE : start // BLOCK_SIZE + num_blocks]
        for i in range(min(BLOCKS_AHEAD, 2 * num_blocks)):
            at = _slab_at(i, blocks, block_size, keys_at, values_at)
            _prefetch_slab(kv, at, num_heads * slab)
        for i in range(0, num_blocks, 2):
            # Two blocks at a time: one of them would be a wait for each sum. Without another one
            # it is multiplied twice, and what that gives lies where no scores are.
            apart = (blocks[min(i + 1, num_blocks - 1)] - blocks[i]) * block_size
            keys = blocks[i] * block_size + keys_at
            later = _slab_at(i + BLOCKS_AHEAD, blocks, block_size, keys_at, values_at)
            last = _slab_at(i + BLOCKS_AHEAD + 1, blocks, block_size, keys_at, values_at)
            for head in range(num_heads):
                query = head * per_head
                _product_of_keys(
                    kv, keys + head * slab, BLOCK_SIZE, apart, later - keys, last - later,
                    queries, query * head_dim, head_dim, head_dim,
                    local, scores + query * CHUNK_TOKENS + i * BLOCK_SIZE, CHUNK_TOKENS, per_head,
                )  # fmt: skip
        for query in range(num_queries):
            limit = batch.positions[first_row + query % per_head // group] + 1 - start
            at = parts + query * part_size
            _clear(local, at, head_dim)
            if limit > 0:
                top, weight = _softmax(
                    local, scores + query * CHUNK_TOKENS,
                    min(limit, num_tokens), num_blocks * BLOCK_SIZE,
                )  # fmt: skip
                local[at + head_dim], local[at + head_dim + 1] = top, weight
        _add_values(
            kv, blocks, block_size, keys_at, values_at, slab, shape, num_heads, per_head,
            local, scores, parts, scaled, batch.positions[first_row : first_row + num_rows], start,
        )  # fmt: skip
        for query in range(num_queries):
            if batch.positions[first_row + query % per_head // group] >= start:
                part = parts + query * part_size
                _merge(local, totals + query * part_size, local, part, head_dim)

    for query in range(num_queries):
        row = first_row + query % per_head // group
        head = (first_head + query // per_head) * group + query % group
        part = totals + query * part_size
        if slot < 0:
            to = (row * shape.num_heads + head) * head_dim
            _finish(local, part, scratch.attended, to, head_dim)
        else:
            part = parts + query * part_size  # one chunk: others merge it
            to = (slot * shape.num_heads + head) * part_size
            for lane in range(0, part_size, LANES):
                store(scratch.parts, to + lane, load(local, part + lane))


@compiled
def _attend_jobs(
    progress: Array, phase: int, layer: int, shape: Shape, batch: Batch, scratch: Scratch,
    kv: Array, thread: int,
) -> None:  # fmt: skip
    num_jobs = len(batch.jobs)
    # Many jobs of single rows take all heads at once, whose keys lie next to each other.
    are_single = len(batch.merges) == len(batch.token_ids)
    are_many = num_jobs >= JOBS_PER_THREAD * len(scratch.local)
    num_heads = shape.num_kv_heads if are_single and are_many else 1
    num_units = num_jobs * (shape.num_kv_heads // num_heads)
    unit = _draw(progress, phase)
    while unit < num_units:
        # All jobs of one head one after the other: their keys are in the cache then.
        job, head = unit % num_jobs, unit // num_jobs
        _attend(job, head, num_heads, layer, shape, batch, scratch, kv, thread)
        _done(progress, phase)
        unit = _draw(progress, phase)
    _wait(progress, phase, num_units)


@compiled
def _merge_rows(
    progress: Array, phase: int, shape: Shape, batch: Batch, scratch: Scratch, thread: int
) -> None:
    head_dim = shape.head_dim
    part_size = head_dim + LANES
    local, total = scratch.local[thread], 0
    num_units = len(batch.merges)
    unit = _draw(progress, phase)
    while unit < num_units:
        row, first_slot, num_slots = (
            batch.merges[unit, 0], batch.merges[unit, 1], batch.merges[unit, 2],
        )  # fmt: skip
        for head in range(shape.num_heads):
            _clear(local, total, head_dim)
            for slot in range(first_slot, first_slot + num_slots):
                part = (slot * shape.num_heads + head) * part_size
                _merge(local, total, scratch.parts, part, head_dim)
            to = (row * shape.num_heads + head) * head_dim
            _finish(local, total, scratch.attended, to, head_dim)
        _done(progress, phase)
        unit = _draw(progress, phase)
    _wait(progress, phase, num_units)


# --- The step -------------------------------------------------------------------------------------


@entry_point
def step(
    thread: int, shape: Shape, weights: Weights, batch: Batch, scratch: Scratch, kv: Array
) -> None:
    """Run one forward pass, together with all threads that call this with the same arguments.

    Args:
        thread: which of the parts of ``scratch.local`` is this thread's.
        shape: of the network.
        weights: of the network.
        batch: what is to be computed; the blocks of its sequences have room for it.
        scratch: ``progress`` is new zeros for each step; the rest may hold anything.
        kv: ``(blocks, layers, 2, kv_heads, head_dim / 32 * kv_group)``, flat: float32, bfloat16 as
            uint16, or int8.
    """
    progress, hidden = scratch.progress, scratch.hidden
    rows, width = len(batch.token_ids), shape.hidden
    attended = shape.num_heads * shape.head_dim
    qkv = attended + 2 * shape.num_kv_heads * shape.head_dim
    line, threads = shape.linear_line, len(scratch.local)
    _embed(progress, 0, weights, batch, hidden, width)
    phase = 1
    for layer in range(shape.num_layers):
        starts = weights.starts[layer]
        gain = 2 * layer * width
        _norm_rows(
            progress, phase, hidden, weights.norms, gain, scratch.normed, width, rows,
            shape.epsilon,
        )  # fmt: skip
        _linear(
            progress, phase + 1, weights.linear, starts[0], line,
            scratch.normed, width, scratch.qkv, qkv, rows, False, threads,
        )  # fmt: skip
        _place_rows(progress, phase + 2, layer, shape, weights, batch, scratch.qkv, kv)
        _attend_jobs(progress, phase + 3, layer, shape, batch, scratch, kv, thread)
        _merge_rows(progress, phase + 4, shape, batch, scratch, thread)
        _linear(
            progress, phase + 5, weights.linear, starts[1], line,
            scratch.attended, attended, hidden, width, rows, True, threads,
        )  # fmt: skip
        _norm_rows(
            progress, phase + 6, hidden, weights.norms, gain + width, scratch.normed, width, rows,
            shape.epsilon,
        )  # fmt: skip
        _gate(
            progress, phase + 7, weights.linear, starts[2], line, scratch.normed, width,
            scratch.gated, shape.intermediate, rows, scratch.local[thread], threads,
        )  # fmt: skip
        _linear(
            progress, phase + 8, weights.linear, starts[3], line,
            scratch.gated, shape.intermediate, hidden, width, rows, True, threads,
        )  # fmt: skip
        phase += 9
    num_wanted = len(batch.wanted)
    unit = _draw(progress, phase)
    while unit < num_wanted:
        first, gain = batch.wanted[unit] * width, 2 * shape.num_layers * width
        _norm(hidden, first, weights.norms, gain, scratch.last, unit * width, width, shape.epsilon)
        _done(progress, phase)
        unit = _draw(progress, phase)
    _wait(progress, phase, num_wanted)
    _linear(
        progress, phase + 1, weights.head, 0, shape.head_line,
        scratch.last, width, scratch.logits, shape.vocab, num_wanted, False, threads,
    )  # fmt: skip
