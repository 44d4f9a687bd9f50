"""Vectors and the matrix product, each called from a small kernel of its own.

These are compiled anew each time: numba's cache would not notice that ``simd`` has changed.
"""

from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit
from numpy.typing import NDArray

from sampler import simd
from sampler.cpu_decoder import FORMATS, input_dtype, line_size, pack
from sampler.cpu_kernels import TILE
from sampler.simd import GROUP, LANES, MAX_TILE_ROWS
from tests.sampler.cpu_decoders import USUAL_WAYS, Way, unpacked

Floats = NDArray[np.float32]


def random_floats(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def as_bfloat16(values: Floats) -> NDArray[np.uint16]:
    """Return the bits, as torch rounds them."""
    return torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()


# --- Vectors -------------------------------------------------------------------------------------


@njit
def copied(source: Any, start: int, target: Any, to: int) -> None:
    simd.store(target, to, simd.load(source, start))


@njit
def elementwise(a: Any, b: Any, c: Any, results: Any) -> None:
    x, y, z = simd.load(a, 0), simd.load(b, 0), simd.load(c, 0)
    simd.store(results, 0, simd.add(x, y))
    simd.store(results, 16, simd.subtract(x, y))
    simd.store(results, 32, simd.multiply(x, y))
    simd.store(results, 48, simd.divide(x, y))
    simd.store(results, 64, simd.maximum(x, y))
    simd.store(results, 80, simd.fused_multiply_add(x, y, z))
    simd.store(results, 96, simd.splat(a[3]))


@njit
def lanes_sum(values: Any) -> Any:
    return simd.lane_sum(simd.load(values, 0))


@njit
def lanes_max(values: Any) -> Any:
    return simd.lane_max(simd.load(values, 0))


@njit
def exp_of(values: Any, results: Any) -> None:
    for i in range(0, len(values), LANES):
        simd.store(results, i, simd.exp(simd.load(values, i)))


def exp(*values: float) -> Floats:
    """Return the powers of ``values``, of which there may be any number."""
    padded = np.zeros(-(-len(values) // LANES) * LANES, np.float32)
    padded[: len(values)] = values
    results = np.empty_like(padded)
    exp_of(padded, results)
    return results[: len(values)]


@pytest.mark.parametrize(("start", "to"), [(0, 0), (1, 3), (7, 13)])
def test_vectors_lie_at_any_index(start: int, to: int) -> None:
    source, target = random_floats(40), np.zeros(40, np.float32)

    copied(source, start, target, to)

    assert (target[to : to + LANES] == source[start : start + LANES]).all()
    assert np.count_nonzero(target) == LANES, "and nothing beside them is touched"


def test_bfloat16_is_read_as_the_floats_that_it_is() -> None:
    bits = as_bfloat16(random_floats(40))
    target = np.zeros(LANES, np.float32)

    copied(bits, 5, target, 0)

    expected = torch.from_numpy(bits).view(torch.bfloat16)[5 : 5 + LANES].float()
    assert torch.from_numpy(target).equal(expected)


def test_lanes_are_computed_each_by_itself() -> None:
    a, b, c = (random_floats(LANES, seed=seed) for seed in range(3))
    results = np.empty(7 * LANES, np.float32)

    elementwise(a, b, c, results)

    fused = (a.astype(np.float64) * b + c).astype(np.float32)
    splat = np.full(LANES, a[3])
    expected = np.stack([a + b, a - b, a * b, a / b, np.maximum(a, b), fused, splat])
    assert (results.reshape(7, LANES) == expected).all()


def test_the_sum_of_lanes_is_that_of_halves() -> None:
    values = random_floats(LANES)

    folded = values
    while len(folded) > 1:
        folded = folded[: len(folded) // 2] + folded[len(folded) // 2 :]
    assert lanes_sum(values) == folded[0]


@pytest.mark.parametrize("greatest", range(LANES))
def test_the_greatest_lane_is_found_wherever_it_is(greatest: int) -> None:
    values = -np.abs(random_floats(LANES))
    values[greatest] = 1.0
    values[(greatest + 1) % LANES] = -np.inf

    assert lanes_max(values) == 1.0


def test_minus_infinity_in_all_lanes_is_the_greatest() -> None:
    assert lanes_max(np.full(LANES, -np.inf, np.float32)) == -np.inf


# --- Powers --------------------------------------------------------------------------------------


def test_powers_are_exact_to_two_units_in_the_last_place() -> None:
    generator = np.random.default_rng(0)
    wide = generator.uniform(-87, 88, 100_000)
    near = generator.uniform(-1, 1, 50_000)
    values = np.concatenate([wide, near]).astype(np.float32)

    expected = np.exp(values.astype(np.float64))

    units = np.abs(exp(*values) - expected) / np.spacing(expected.astype(np.float32))
    assert units.max() < 2


def test_the_power_of_nothing_is_one() -> None:
    # What is merged with nothing stays as it is, to the bit.
    assert exp(0.0, -0.0).tolist() == [1.0, 1.0]


def test_powers_stay_finite_and_above_zero() -> None:
    least, greatest = exp(-87.0, 88.0)

    assert exp(-np.inf, -1e30, -87.1, 88.1, 1e30, np.inf).tolist() == [
        *[least] * 3,
        *[greatest] * 3,
    ]
    assert least == pytest.approx(np.exp(-87.0), rel=1e-6)
    assert greatest == pytest.approx(np.exp(88.0), rel=1e-6)


def test_the_power_of_what_is_no_number_is_none() -> None:
    powers = exp(0.0, np.nan, 1.0, -np.nan)

    assert np.isnan(powers).tolist() == [False, True, False, True]


# --- Inputs and packed weights -------------------------------------------------------------------


def bfloat16_cases() -> Floats:
    """Return whole groups of numbers that lie between two of bfloat16, and others."""
    ties = [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, -1 - 3 * 2**-8]
    beside = [
        float(np.nextafter(np.float32(tie), np.float32(side))) for tie in ties for side in (-9, 9)
    ]
    extremes = [0.0, -0.0, 3.4028235e38, -3.4028235e38, 1e-40, np.inf, -np.inf]
    chosen = [*ties, *beside, *extremes]
    return np.array([*chosen, *random_floats(3 * GROUP - len(chosen))], np.float32)


def _products_of(accumulates: bool) -> Any:
    """Return a kernel that multiplies with 1 row, with 2, and so on up to 8."""

    @njit
    def products(
        weights: Any, at: int, line: int, inputs: Any, stride: int, length: int, outputs: Any
    ) -> None:
        # Each is (rows, 40), of which the first three columns and the last five are not its own.
        step = 40
        simd.multiply_tile(
            weights, at, line, LANES, 1024, LANES, inputs, GROUP, stride, length,
            outputs, 3, step, 1, 2, accumulates, "matrix",
        )  # fmt: skip
        simd.multiply_tile(
            weights, at, line, LANES, 1024, LANES, inputs, GROUP, stride, length,
            outputs, 8 * step + 3, step, 2, 2, accumulates, "matrix",
        )  # fmt: skip
        simd.multiply_tile(
            weights, at, line, LANES, 1024, LANES, inputs, GROUP, stride, length,
            outputs, 16 * step + 3, step, 3, 2, accumulates, "matrix",
        )  # fmt: skip
        simd.multiply_tile(
            weights, at, line, LANES, 1024, LANES, inputs, GROUP, stride, length,
            outputs, 24 * step + 3, step, 4, 2, accumulates, "matrix",
        )  # fmt: skip
        simd.multiply_tile(
            weights, at, line, LANES, 1024, LANES, inputs, GROUP, stride, length,
            outputs, 32 * step + 3, step, 5, 2, accumulates, "matrix",
        )  # fmt: skip
        simd.multiply_tile(
            weights, at, line, LANES, 1024, LANES, inputs, GROUP, stride, length,
            outputs, 40 * step + 3, step, 6, 2, accumulates, "matrix",
        )  # fmt: skip
        simd.multiply_tile(
            weights, at, line, LANES, 1024, LANES, inputs, GROUP, stride, length,
            outputs, 48 * step + 3, step, 7, 2, accumulates, "matrix",
        )  # fmt: skip
        simd.multiply_tile(
            weights, at, line, LANES, 1024, LANES, inputs, GROUP, stride, length,
            outputs, 56 * step + 3, step, 8, 2, accumulates, "matrix",
        )  # fmt: skip

    return products


products = _products_of(False)
products_added = _products_of(True)


@njit
def narrow_product(weights: Any, line: int, inputs: Any, length: int, outputs: Any) -> None:
    """One vector of columns of a matrix whose lines are longer."""
    simd.multiply_tile(
        weights, 0, line, LANES, 0, 0, inputs, 0, length, length,
        outputs, 0, LANES, 3, 1, False, "matrix",
    )  # fmt: skip


@njit
def far_product(weights: Any, apart: int, inputs: Any, length: int, outputs: Any) -> None:
    """Two vectors of columns, the second one ``apart`` from the first."""
    simd.multiply_tile(
        weights, 100, LANES, apart, 0, 0, inputs, 0, length, length,
        outputs, 0, 2 * LANES, 3, 2, False, "matrix",
    )  # fmt: skip


@njit
def stored_inputs(values: Any, target: Any) -> None:
    for i in range(0, len(values), GROUP):
        simd.store_inputs(target, i, simd.load(values, i), simd.load(values, i + LANES))


def as_inputs(values: Floats, form: str, pairs: bool) -> NDArray[Any]:
    """Return ``values``, whole groups, as products with weights of ``form`` take them."""
    dtype = input_dtype(form, in_pairs=pairs)
    target: NDArray[Any] = np.zeros(values.size // GROUP * simd.input_group_size(dtype), dtype)
    stored_inputs(values.reshape(-1), target)
    return target


def inputs_in(stored: NDArray[Any]) -> NDArray[np.float64]:
    """Return the numbers that inputs stand for."""
    if stored.dtype == np.float32:
        return stored.astype(np.float64)
    if stored.dtype == np.uint16:
        return torch.from_numpy(stored).view(torch.bfloat16).double().numpy()
    groups = stored.reshape(-1, GROUP + 4)
    scales = np.ascontiguousarray(groups[:, GROUP : GROUP + 2]).view(np.float32)
    return (groups[:, :GROUP] * scales.astype(np.float64)).reshape(-1)


@pytest.mark.parametrize("magnitude", [1e-37, 1e-30, 1.0, 1e37])
def test_inputs_in_16_bits_are_near_the_greatest_of_their_group(magnitude: float) -> None:
    values = random_floats(6, GROUP)
    values *= np.float32(magnitude) / np.abs(values).max()
    values[3] = 0

    stored = as_inputs(values, "int8", True)

    step = np.abs(values).max(1, keepdims=True) / 32767
    limit = np.maximum(step * 0.501, 1.5e-36)  # what is smaller counts as nothing
    assert (np.abs(inputs_in(stored).reshape(values.shape) - values) <= limit).all()
    groups = stored.reshape(-1, GROUP + 4)
    sums = np.ascontiguousarray(groups[:, GROUP + 2 :]).view(np.float32)[:, 0]
    assert sums == pytest.approx(inputs_in(stored).reshape(-1, GROUP).sum(1), rel=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_leaves_its_mark_on_inputs_in_16_bits(value: float) -> None:
    values = random_floats(2, GROUP)
    values[0, 5] = value

    with np.errstate(invalid="ignore"):
        first, second = inputs_in(as_inputs(values, "int8", True)).reshape(2, GROUP)

    assert not np.isfinite(first).any()
    assert np.isfinite(second).all()


def test_inputs_in_bfloat16_are_rounded_to_the_nearest_even() -> None:
    values = bfloat16_cases()

    stored = as_inputs(values, "bfloat16", True)

    assert (stored == as_bfloat16(values)).all()
    as_floats = torch.from_numpy(stored).view(torch.bfloat16).float()
    assert as_floats[:4].tolist() == [1.0, 1 + 2**-6, -1.0, -1 - 2**-6]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("pairs", [False, True])
def test_packed_weights_are_as_near_as_their_format_allows(form: str, pairs: bool) -> None:
    matrix = random_floats(3 * TILE, 4 * GROUP)

    packed = pack(torch.from_numpy(matrix), form, in_pairs=pairs)

    in_pairs = pairs and form != "float32"
    values = unpacked(packed, form, 4 * GROUP, in_pairs=in_pairs)

    groups = matrix.reshape(len(matrix), -1, GROUP)
    step = {
        "float32": 0.0,
        "bfloat16": np.abs(groups) * 2.0**-7,
        "int8": np.abs(groups).max(2, keepdims=True) / 127,
        "int4": (groups.max(2, keepdims=True) - groups.min(2, keepdims=True)) / 15,
    }[form]
    # Half a step, and what rounding scales and minima to float16 moves.
    limit = np.broadcast_to(
        np.asarray(step) / 2 * 1.02 + (2e-3 if form == "int4" else 0), groups.shape
    )
    assert (np.abs(values.reshape(groups.shape) - groups) <= limit).all()


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("value", [0.0, 0.75, -0.75, 1e-9])
def test_groups_of_equal_weights_are_kept(form: str, value: float) -> None:
    matrix = torch.full((TILE, 2 * GROUP), value)

    values = unpacked(pack(matrix, form), form, 2 * GROUP)

    assert np.abs(values - value).max() < 1e-3 * abs(value) + 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("way", USUAL_WAYS, ids=str)
@pytest.mark.parametrize("adds", [False, True])
def test_products_are_those_of_the_weights_whatever_the_number_of_rows(
    way: Way, adds: bool
) -> None:
    form, pairs, _ = way
    length, stride = 5 * GROUP, 6 * GROUP
    packed = pack(torch.from_numpy(random_floats(2 * TILE, length)), form, in_pairs=pairs)
    second = unpacked(packed, form, length, in_pairs=pairs)[TILE:].T  # (length, 32)
    line = line_size(form)
    inputs = as_inputs(random_floats(GROUP + 8 * stride, seed=1), form, pairs)
    rows = inputs_in(inputs)[GROUP:].reshape(8, stride)[:, :length]
    outputs = random_floats(8 * 8, 40, seed=2)
    before = outputs.copy()

    kernel = products_added if adds else products
    kernel(packed, length * line, line, inputs, stride, length, outputs.reshape(-1))

    expected = before.reshape(8, 8, 40)[:, :, 3:35] * adds + rows @ second
    results, untouched = outputs.reshape(8, 8, 40), before.reshape(8, 8, 40)
    for num_rows in range(1, MAX_TILE_ROWS + 1):
        mine = results[num_rows - 1, :num_rows, 3:35]
        assert np.abs(mine - expected[num_rows - 1, :num_rows]).max() < 2e-5
        beside = np.ones((8, 40), bool)
        beside[:num_rows, 3:35] = False
        assert (results[num_rows - 1][beside] == untouched[num_rows - 1][beside]).all()
    if not adds:
        alone = results[-1]
        for num_rows in range(1, MAX_TILE_ROWS):
            mine = results[num_rows - 1, :num_rows]
            assert (mine[:, 3:35] == alone[:num_rows, 3:35]).all(), "to the bit"


def test_a_tile_may_be_one_vector_wide_and_its_lines_longer() -> None:
    weights, inputs = random_floats(7, 40), random_floats(3, 7, seed=1)
    outputs = np.empty((3, LANES), np.float32)

    narrow_product(weights.reshape(-1), 40, inputs.reshape(-1), 7, outputs.reshape(-1))

    assert np.abs(outputs - inputs.astype(np.float64) @ weights[:, :LANES]).max() < 1e-5


@pytest.mark.parametrize("apart", [0, 50, -70])
def test_the_second_vector_of_columns_may_lie_anywhere(apart: int) -> None:
    weights, inputs = random_floats(300), random_floats(3, 4, seed=1)
    outputs = np.empty((3, 2 * LANES), np.float32)

    far_product(weights, apart, inputs.reshape(-1), 4, outputs.reshape(-1))

    starts = (100, 100 + apart)
    columns = np.hstack([weights[start : start + 4 * LANES].reshape(4, LANES) for start in starts])
    assert np.abs(outputs - inputs.astype(np.float64) @ columns).max() < 1e-5


def test_sums_begin_with_the_first_element_and_go_on_to_the_last() -> None:
    # In any other order, or in several sums, more or less than the one is left.
    inputs = np.array([[1.0, 1e8, -1e8, 1.0], [1e8, -1e8, 1.0, 0.0], [0.0, 1e8, -1e8, 1.0]])
    outputs = np.empty((3, LANES), np.float32)
    ones = np.ones(4 * LANES, np.float32)

    narrow_product(ones, LANES, inputs.astype(np.float32).reshape(-1), 4, outputs.reshape(-1))

    assert (outputs == 1.0).all()


# --- Keys and values -----------------------------------------------------------------------------

KV_DTYPES = [np.float32, np.uint16, np.int8]
IN_PAIRS = [False, True] if simd.processor_has("avx512vnni") else [False]
BESIDE = 64
"""Elements before a group, and behind it."""


@njit
def stored_keys(values: Any, slot: int, target: Any, at: int) -> None:
    simd.store_position(target, at, slot, simd.load(values, 0), simd.load(values, LANES), "keys")


@njit
def stored_values(values: Any, slot: int, target: Any, at: int) -> None:
    simd.store_position(target, at, slot, simd.load(values, 0), simd.load(values, LANES), "values")


@njit
def scores_of(keys: Any, apart: int, queries: Any, length: int, outputs: Any) -> None:
    """Three queries and the keys of two blocks; then five queries."""
    simd.multiply_tile(
        keys, 0, LANES, apart, 0, 0, queries, 0, length, length,
        outputs, 0, 2 * LANES, 3, 2, False, "keys",
    )  # fmt: skip
    simd.multiply_tile(
        keys, 0, LANES, apart, 0, 0, queries, 3 * length, length, length,
        outputs, 6 * LANES, 2 * LANES, 5, 2, False, "keys",
    )  # fmt: skip


@njit
def sums_of_values(values: Any, at: int, weights: Any, length: int, outputs: Any) -> None:
    simd.multiply_tile(
        values, at, GROUP, LANES, 0, 0, weights, 0, LANES, length,
        outputs, 0, 2 * LANES, 3, 2, True, "values",
    )  # fmt: skip


@njit
def scaled(weights: Any, group: Any, results: Any) -> None:
    simd.store(results, 0, simd.scale_weights(simd.load(weights, 0), group, 0))


STORES = {"keys": stored_keys, "values": stored_values}


def group_of(dtype: type, of: str, positions: Floats) -> NDArray[Any]:
    """Return a group that holds ``positions``, ``(up to 16, 32)``, and all bits elsewhere."""
    target: NDArray[Any] = np.zeros(simd.kv_group_size(dtype), dtype)
    target.view(np.uint8)[:] = 0xFF
    for slot, numbers in enumerate(positions):
        STORES[of](numbers, slot, target, 0)
    return target


def positions_in(group: NDArray[Any], of: str) -> NDArray[np.float64]:
    """Return the ``(16, 32)`` numbers of a group, read as its layout is described."""
    shape = (GROUP, LANES) if of == "keys" else (LANES, GROUP)
    if group.dtype == np.int8:
        scales, integers = group[: 2 * LANES].view(np.float16), group[2 * LANES :]
        if of == "keys":
            integers = integers.reshape(GROUP // 2, LANES, 2).swapaxes(1, 2)
        lines = integers.reshape(shape).astype(np.float64)
        lines = lines.T if of == "keys" else lines
        with np.errstate(invalid="ignore"):
            return lines * scales.astype(np.float64)[:, None]
    if group.dtype == np.uint16:
        group = torch.from_numpy(group).view(torch.bfloat16).float().numpy()
    lines = group.reshape(shape).astype(np.float64)
    return lines.T if of == "keys" else lines


@pytest.mark.parametrize("of", STORES)
@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("slot", [0, 1, 6, 15])
def test_a_position_lies_in_its_place_and_nothing_beside_it_is_touched(
    of: str, dtype: type, slot: int
) -> None:
    size = simd.kv_group_size(dtype)
    whole = np.random.default_rng(3).integers(0, 127, size + 2 * BESIDE)
    before: NDArray[Any] = whole.astype(dtype)
    target, numbers = before.copy(), random_floats(GROUP, seed=1)

    STORES[of](numbers, slot, target, BESIDE)

    kept = positions_in(target[BESIDE:-BESIDE], of)
    untouched = positions_in(before[BESIDE:-BESIDE], of)
    limits: dict[type, float] = {np.float32: 0.0, np.uint16: 2.0**-8, np.int8: 0.51 / 127}
    scale = np.abs(numbers) if dtype is np.uint16 else np.abs(numbers).max()
    assert (np.abs(kept[slot] - numbers) <= limits[dtype] * scale).all()
    others = np.arange(LANES) != slot
    assert np.array_equal(kept[others], untouched[others])
    assert (target[:BESIDE] == before[:BESIDE]).all()
    assert (target[-BESIDE:] == before[-BESIDE:]).all()


@pytest.mark.parametrize("of", STORES)
def test_what_is_kept_of_a_position_is_rounded_to_the_nearest(of: str) -> None:
    positions = bfloat16_cases().reshape(3, GROUP)

    kept = positions_in(group_of(np.uint16, of, positions), of)[:3]

    expected = torch.from_numpy(positions).bfloat16().double().numpy()
    assert np.array_equal(kept, expected)


@pytest.mark.parametrize("of", STORES)
@pytest.mark.parametrize("magnitude", [0.0, 1e-38, 1e-4, 1.0, 8e6])
def test_bytes_are_near_the_greatest_of_their_group(of: str, magnitude: float) -> None:
    positions = random_floats(4, GROUP)
    positions *= np.float32(magnitude) / np.abs(positions).max(1, keepdims=True)
    positions[3] = 0.0

    kept = positions_in(group_of(np.int8, of, positions), of)[:4]

    # Half a step of the scale, which is a float16: they are some 6e-8 apart where it is small.
    limit = (magnitude / 127 * 0.501 + 128 * 2.0**-25) * 1.001
    assert np.abs(kept - positions).max() <= limit
    assert not kept[3].any()


@pytest.mark.parametrize("of", STORES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e7])
def test_a_position_of_what_is_no_number_is_none_and_no_other_is(of: str, value: float) -> None:
    positions = random_floats(LANES, GROUP)
    positions[5, 7] = value

    kept = positions_in(group_of(np.int8, of, positions), of)

    others = np.arange(LANES) != 5
    assert not np.isfinite(kept[5]).any()
    assert np.isfinite(kept[others]).all()
    alone = positions_in(group_of(np.int8, of, np.where(others[:, None], positions, 0.0)), of)
    assert np.array_equal(kept[others], alone[others])


@pytest.mark.parametrize("in_pairs", IN_PAIRS)
def test_scores_are_those_of_the_keys_that_are_kept(in_pairs: bool) -> None:
    blocks = random_floats(2, 2, LANES, GROUP)  # (block, group, position, coordinate)
    blocks[1, 1, 4, 3] = np.nan
    groups = [group_of(np.int8, "keys", group) for block in blocks for group in block]
    kept = np.stack([positions_in(group, "keys") for group in groups]).reshape(blocks.shape)
    queries = as_inputs(random_floats(8, 2 * GROUP, seed=1), "int8", in_pairs)
    outputs = np.empty((8, 2 * LANES), np.float32)

    scores_of(np.concatenate(groups), 2 * len(groups[0]), queries, 2 * GROUP, outputs.reshape(-1))

    columns = kept.swapaxes(1, 2).reshape(2 * LANES, 2 * GROUP)
    expected = inputs_in(queries).reshape(8, 2 * GROUP) @ columns.T
    is_number = np.arange(2 * LANES) != LANES + 4
    assert np.isnan(outputs[:, ~is_number]).all()
    assert np.abs(outputs - expected)[:, is_number].max() < 2e-5


def test_sums_are_those_of_the_values_that_are_kept() -> None:
    positions, weights = random_floats(LANES, GROUP), np.abs(random_floats(3, LANES, seed=1))
    positions[9:, 2] = np.nan
    weights[:, 9:] = 0.0
    group = group_of(np.int8, "values", positions)
    inputs, outputs = np.empty_like(weights), random_floats(3, GROUP, seed=2)
    before = outputs.copy()

    for row, kept in zip(weights, inputs, strict=True):
        scaled(row, group, kept)
    sums_of_values(group, 2 * LANES, inputs.reshape(-1), LANES, outputs.reshape(-1))

    expected = before + weights[:, :9] @ positions_in(group, "values")[:9]
    assert np.abs(outputs - expected).max() < 2e-5


def test_a_weight_of_what_is_no_number_is_none() -> None:
    positions, results = random_floats(LANES, GROUP), np.empty(LANES, np.float32)
    positions[5, 7] = np.inf

    scaled(np.ones(LANES, np.float32), group_of(np.int8, "values", positions), results)

    assert np.isfinite(results).tolist() == [slot != 5 for slot in range(LANES)]


# --- Compiling -----------------------------------------------------------------------------------


def test_where_machine_code_cannot_be_kept_it_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_directory = tmp_path / "file"
    no_directory.touch()
    monkeypatch.setenv("SUSPENDED_SAMPLING_CACHE", str(no_directory))
    # What is not in a file of its own has no other place that Numba could think of.
    namespace: dict[str, Any] = {}
    exec("def double(number):\n    return 2 * number", namespace)

    assert simd.entry_point(namespace["double"])(21) == 42


# --- Threads -------------------------------------------------------------------------------------


@njit(nogil=True)
def draw(counter: Any, drawn: Any, times: int) -> None:
    for _ in range(times):
        drawn[simd.fetch_add(counter, 1, 1)] += 1


@njit(nogil=True)
def wait_until(counter: Any, value: int) -> Any:
    while simd.load_shared(counter, 0) < value:
        simd.yield_thread()
    return simd.load_shared(counter, 0)


@njit(nogil=True)
def add_to(counter: Any, amount: int) -> Any:
    return simd.fetch_add(counter, 0, amount)


@pytest.mark.slow
def test_threads_never_draw_the_same_ticket() -> None:
    counter, drawn = np.zeros(3, np.int64), np.zeros(400_000, np.int8)
    draw(counter, drawn, 0)  # compiled before there are threads

    threads = [Thread(target=draw, args=(counter, drawn, 100_000)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert counter.tolist() == [0, 400_000, 0]
    assert (drawn == 1).all()


def test_a_thread_sees_what_another_has_added() -> None:
    counter = np.zeros(1, np.int64)
    add_to(counter, 0)
    seen: list[int] = []
    waiting = Thread(target=lambda: seen.append(wait_until(counter, 5)))
    waiting.start()

    before = add_to(counter, 7)
    waiting.join()

    assert (before, seen) == (0, [7])
