"""Vectors of 16 floats for compiled kernels, and the one matrix product that they are made of.

Numba compiles Python loops well, but leaves to LLVM which of them become vector instructions, and
in which order sums are taken. Here both are written down: a ``float32x16`` is one AVX-512 register,
two of AVX2, or four of NEON, and each lane of a product is a chain of fused multiply-adds over the
inner dimension, from its first element to its last. So a result depends on its own row and column
only: not on how many rows are computed beside it, nor on how work is split over threads. That is
what makes what is sampled independent of the neighbours in a batch.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import config, extending, njit
from numba.core import cgutils, types
from numba.extending import models, register_model

from sampler.user_cache import user_cache

# What is decorated has another signature for its callers: without the first argument.
intrinsic: Any = extending.intrinsic
_config: Any = config
_njit: Any = njit  # its stubs lack two options


def compiled(function: Callable[..., Any]) -> Any:
    """Have ``function`` compiled, to be called from other compiled functions only."""
    return _compiled(function, no_cpython_wrapper=True)


def entry_point(function: Callable[..., Any]) -> Any:
    """Have ``function`` compiled when it is first called; it does not hold Python's lock."""
    return _compiled(function)


def _compiled(function: Callable[..., Any], **options: bool) -> Any:
    """Compile, and keep machine code for other processes.

    Numba sees that it is stale by the source of the function's own module only; so each version of
    the others has a directory of its own.
    """
    before = _config.CACHE_DIR
    _config.CACHE_DIR = str(user_cache() / "kernels" / _version())
    options |= {"nogil": True, "no_cfunc_wrapper": True}
    try:
        return _njit(cache=True, **options)(function)
    except RuntimeError:  # nowhere to write, as in some containers: each process compiles anew
        return _njit(**options)(function)
    finally:
        _config.CACHE_DIR = before


@cache
def _version() -> str:
    sources = (Path(__file__).with_name(name) for name in ("simd.py", "cache_pool.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]


LANES = 16
MAX_TILE_ROWS = 8

_FLOAT = ir.FloatType()
_INT = ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_INTS = ir.VectorType(_INT, LANES)


class Float32x16(types.Type):
    """Numba's type of a vector."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


float32x16 = Float32x16()


@register_model(Float32x16)
class _Float32x16Model(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, _VECTOR)  # type: ignore[no-untyped-call]


# --- What is generated ----------------------------------------------------------------------------


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


def _read(builder: Any, address: Any, element: Any) -> Any:
    vector = ir.VectorType(element, LANES)
    return builder.load(builder.bitcast(address, vector.as_pointer()), align=1)


def _load(builder: Any, address: Any, dtype: Any) -> Any:
    """Read 16 numbers as floats: float32, or bfloat16 as uint16."""
    if dtype == types.float32:
        return _read(builder, address, _FLOAT)
    assert dtype == types.uint16, f"no vectors of {dtype}"
    bits = builder.zext(_read(builder, address, ir.IntType(16)), _INTS)
    return builder.bitcast(builder.shl(bits, _ints(16)), _VECTOR)


def _ints(value: int) -> Any:
    return ir.Constant(_INTS, [value] * LANES)


def _floats(value: float) -> Any:
    return ir.Constant(_VECTOR, [value] * LANES)


def _splat(builder: Any, scalar: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, undefined, _ints(0))


def _call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    function_type = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, function_type, name)
    return builder.call(function, arguments)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _call(builder, "llvm.fma.v16f32", _VECTOR, a, b, c)


# --- Vectors --------------------------------------------------------------------------------------


@intrinsic
def load(context: Any, array: Any, index: Any) -> Any:
    """Return ``array[index : index + 16]`` as floats."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _address(target, builder, signature.args[0], *arguments)
        return _load(builder, address, signature.args[0].dtype)

    return float32x16(array, types.intp), generate


@intrinsic
def store(context: Any, array: Any, index: Any, vector: Any) -> Any:
    """Let ``array[index : index + 16]``, of float32, be ``vector``."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, index, vector = arguments
        address = _address(target, builder, signature.args[0], array, index)
        builder.store(vector, builder.bitcast(address, _VECTOR.as_pointer()), align=1)
        return target.get_dummy_value()

    return types.void(array, types.intp, vector), generate


@intrinsic
def store_element(context: Any, array: Any, index: Any, value: Any) -> Any:
    """Let ``array[index]`` be ``value``; in uint16 as bfloat16, rounded to the nearest even."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, index, value = arguments
        address = _address(target, builder, signature.args[0], array, index)
        if signature.args[0].dtype == types.uint16:
            bits = builder.bitcast(value, _INT)
            odd = builder.and_(builder.lshr(bits, ir.Constant(_INT, 16)), ir.Constant(_INT, 1))
            rounded = builder.add(builder.add(bits, ir.Constant(_INT, 0x7FFF)), odd)
            value = builder.trunc(builder.lshr(rounded, ir.Constant(_INT, 16)), ir.IntType(16))
        builder.store(value, address)
        return target.get_dummy_value()

    return types.void(array, types.intp, types.float32), generate


@intrinsic
def prefetch(context: Any, array: Any, index: Any) -> Any:
    """Have the line of memory that ``array[index]`` is in brought to the nearest cache."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _prefetch(builder, _address(target, builder, signature.args[0], *arguments))
        return target.get_dummy_value()

    return types.void(array, types.intp), generate


@intrinsic
def splat(context: Any, scalar: Any) -> Any:
    """Return ``scalar`` in all lanes."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _splat(builder, arguments[0])

    return float32x16(types.float32), generate


def _elementwise(build: Callable[..., Any], doc: str) -> Any:
    def function(context: Any, a: Any, b: Any) -> Any:
        def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return build(builder, *arguments)

        return float32x16(float32x16, float32x16), generate

    function.__doc__ = doc
    return intrinsic(function)


add = _elementwise(lambda builder, a, b: builder.fadd(a, b), "Return ``a + b``.")
subtract = _elementwise(lambda builder, a, b: builder.fsub(a, b), "Return ``a - b``.")
multiply = _elementwise(lambda builder, a, b: builder.fmul(a, b), "Return ``a * b``.")
divide = _elementwise(lambda builder, a, b: builder.fdiv(a, b), "Return ``a / b``.")
maximum = _elementwise(
    lambda builder, a, b: _call(builder, "llvm.maxnum.v16f32", _VECTOR, a, b),
    "Return the greater one, lane by lane.",
)


@intrinsic
def fused_multiply_add(context: Any, a: Any, b: Any, c: Any) -> Any:
    """Return ``a * b + c``, rounded once."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _fma(builder, *arguments)

    return float32x16(float32x16, float32x16, float32x16), generate


def _halves(builder: Any, vector: Any, combine: Callable[..., Any]) -> Any:
    """Fold a vector in halves down to one number: always the same tree."""
    width = LANES
    while width > 1:
        width //= 2
        lanes = [ir.Constant(_INT, lane) for lane in range(2 * width)]
        type_ = ir.VectorType(_INT, width)
        low, high = (
            builder.shuffle_vector(
                vector, vector, ir.Constant(type_, [int(c.constant) for c in half])
            )
            for half in (lanes[:width], lanes[width:])
        )
        vector = combine(builder, low, high)
    return builder.extract_element(vector, ir.Constant(_INT, 0))


@intrinsic
def lane_sum(context: Any, vector: Any) -> Any:
    """Return the sum of all lanes."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _halves(builder, arguments[0], lambda b, low, high: b.fadd(low, high))

    return types.float32(float32x16), generate


@intrinsic
def lane_max(context: Any, vector: Any) -> Any:
    """Return the greatest lane."""

    def greater(builder: Any, low: Any, high: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", low, high), low, high)

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _halves(builder, arguments[0], greater)

    return types.float32(float32x16), generate


# e**x is 2**n * 2**f for n + f = x / ln 2 with |f| <= 1/2, and 2**f its Taylor series: terms beyond
# the seventh are less than half a unit in the last place.
_LOG2_E = 1.4426950408889634
_LN2 = 0.6931471805599453
_SERIES = [1.0]
for _power in range(1, 8):
    _SERIES.append(_SERIES[-1] * _LN2 / _power)
_LEAST, _GREATEST = -87.0, 88.0


@intrinsic
def exp(context: Any, vector: Any) -> Any:
    """Return e to the power of each lane, to about two units in the last place.

    Lanes below -87 count as -87 (1.6e-38), above 88 as 88 (1.7e38).
    """

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x = _call(builder, "llvm.maxnum.v16f32", _VECTOR, arguments[0], _floats(_LEAST))
        x = _call(builder, "llvm.minnum.v16f32", _VECTOR, x, _floats(_GREATEST))
        scaled = builder.fmul(x, _floats(_LOG2_E))
        whole = _call(builder, "llvm.rint.v16f32", _VECTOR, scaled)
        # x - n ln 2 in two steps, so that no bits are lost, is still a multiple of 1 / log2 e.
        rest = _fma(builder, whole, _floats(-0.693359375), x)
        rest = _fma(builder, whole, _floats(2.12194440e-4), rest)
        fraction = builder.fmul(rest, _floats(_LOG2_E))
        result = _floats(_SERIES[-1])
        for coefficient in reversed(_SERIES[:-1]):
            result = _fma(builder, result, fraction, _floats(coefficient))
        exponent = builder.add(builder.fptosi(whole, _INTS), _ints(127))
        power = builder.bitcast(builder.shl(exponent, _ints(23)), _VECTOR)
        return builder.fmul(result, power)

    return float32x16(float32x16), generate


# --- The matrix product ---------------------------------------------------------------------------

GROUP = 32
"""How many successive weights of a column share a scale, where weights are integers."""


def _columns_of_floats(builder: Any, line: Any, vectors: int, dtype: Any) -> list[Any]:
    """Return one line of a tile: the weights of all columns at one inner position."""
    return [
        _load(builder, builder.gep(line, [_index(vector * LANES)]), dtype)
        for vector in range(vectors)
    ]


_PREFETCHED_BYTES = 4096
"""How far ahead weights are fetched: eight rows at once take half the time for it (measured)."""


def _prefetch_ahead(builder: Any, line: Any) -> None:
    """Have what lies ahead of ``line`` brought to the nearest cache."""
    address = builder.bitcast(line, ir.IntType(8).as_pointer())
    _prefetch(builder, builder.gep(address, [_index(_PREFETCHED_BYTES)]))


def _prefetch(builder: Any, address: Any) -> None:
    address = builder.bitcast(address, ir.IntType(8).as_pointer())
    function_type = ir.FunctionType(ir.VoidType(), [address.type, _INT, _INT, _INT])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    to_read, all_caches, data = (ir.Constant(_INT, value) for value in (0, 3, 1))
    builder.call(function, [address, to_read, all_caches, data])


def _index(value: int) -> Any:
    return ir.Constant(ir.IntType(64), value)


class _Group:
    """One group of quantised weights.

    Scales, and for 4 bits minima, of all columns as float16; then a line of integers for each inner
    position, or for 4 bits for each two.
    """

    def __init__(self, builder: Any, address: Any, vectors: int, *, is_packed: bool) -> None:
        self._builder, self._vectors, self._is_packed = builder, vectors, is_packed
        width = vectors * LANES
        self._scales = self._halves_at(address, 0)
        self._minima = self._halves_at(address, 2 * width) if is_packed else []
        self._lines = builder.gep(address, [_index(2 * width * (1 + is_packed))])

    @staticmethod
    def num_bytes(vectors: int, *, is_packed: bool) -> int:
        """Return the size of a group."""
        width = vectors * LANES
        return width * (4 + GROUP // 2) if is_packed else width * (2 + GROUP)

    def _halves_at(self, address: Any, offset: int) -> list[Any]:
        builder = self._builder
        found = []
        for vector in range(self._vectors):
            place = builder.gep(address, [_index(offset + 2 * LANES * vector)])
            found.append(builder.fpext(_read(builder, place, ir.HalfType()), _VECTOR))
        return found

    def lines(self, number: Any) -> list[list[Any]]:
        """Return line ``number`` as floats: the columns at one inner position, or at two."""
        builder = self._builder
        line = builder.gep(self._lines, [builder.mul(number, _index(self._vectors * LANES))])
        _prefetch_ahead(builder, line)
        whole = [
            _read(builder, builder.gep(line, [_index(v * LANES)]), ir.IntType(8))
            for v in range(self._vectors)
        ]
        if not self._is_packed:
            floats = [builder.sitofp(builder.sext(w, _INTS), _VECTOR) for w in whole]
            return [[builder.fmul(f, s) for f, s in zip(floats, self._scales, strict=True)]]
        wide = [builder.zext(w, _INTS) for w in whole]
        low = [builder.and_(w, _ints(15)) for w in wide]
        high = [builder.lshr(w, _ints(4)) for w in wide]
        return [
            [
                _fma(builder, builder.uitofp(part, _VECTOR), scale, minimum)
                for part, scale, minimum in zip(half, self._scales, self._minima, strict=True)
            ]
            for half in (low, high)
        ]


@intrinsic(prefer_literal=True)
def multiply_tile(
    context: Any,
    weights: Any,
    weights_index: Any,
    weights_stride: Any,
    inputs: Any,
    inputs_index: Any,
    inputs_stride: Any,
    length: Any,
    outputs: Any,
    outputs_index: Any,
    outputs_stride: Any,
    num_rows: Any,
    num_vectors: Any,
    accumulates: Any,
    prefetches: Any,
) -> Any:
    """Let a tile of ``outputs`` be a product, or with ``accumulates`` add the product to it.

    ``outputs[r, c] = sum over k < length of inputs[r, k] * weights[k, c]`` for ``num_rows`` rows
    and ``16 * num_vectors`` columns; both are literals, so the sums stay in registers. Indices and
    strides are in elements of flat arrays. Weights are

    * float32, or uint16 for bfloat16: a line of columns every ``weights_stride``;
    * int8 or, for 4 bits, uint8: groups of 32 lines, one after the other, each led by its scales;
      4-bit weights come in pairs, the even line in the lower bits, and are scaled from a minimum.

    ``prefetches`` is for weights that follow each other in memory; the grouped ones always do.
    """
    rows, vectors = num_rows.literal_value, num_vectors.literal_value
    begins_with_outputs = bool(accumulates.literal_value)
    is_grouped = weights.dtype in (types.int8, types.uint8)
    is_packed = weights.dtype == types.uint8
    looks_ahead = bool(prefetches.literal_value)

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, at, stride, inputs, from_, input_stride, length, outputs, to, step, *_ = arguments

        def moved(address: Any, count: Any, times: Any) -> Any:
            return builder.gep(address, [builder.mul(count, times)])

        first_weight = _address(target, builder, signature.args[0], weights, at)
        first_input = _address(target, builder, signature.args[3], inputs, from_)
        first_output = _address(target, builder, signature.args[7], outputs, to)
        cells = [(row, vector) for row in range(rows) for vector in range(vectors)]
        places = {}
        for row, vector in cells:
            line = moved(first_output, step, _index(row))
            place = builder.gep(line, [_index(vector * LANES)])
            places[row, vector] = builder.bitcast(place, _VECTOR.as_pointer())
        sums = {cell: cgutils.alloca_once(builder, _VECTOR) for cell in cells}
        for cell in cells:
            begin = builder.load(places[cell], align=1) if begins_with_outputs else _floats(0.0)
            builder.store(begin, sums[cell])
        row_inputs = [moved(first_input, input_stride, _index(row)) for row in range(rows)]

        def accumulate(position: Any, columns: list[Any]) -> None:
            for row in range(rows):
                value = _splat(builder, builder.load(builder.gep(row_inputs[row], [position])))
                for vector, column in enumerate(columns):
                    total = builder.load(sums[row, vector])
                    builder.store(_fma(builder, column, value, total), sums[row, vector])

        if is_grouped:
            size = _Group.num_bytes(vectors, is_packed=is_packed)
            positions_per_line = 1 + is_packed
            with cgutils.for_range(builder, builder.sdiv(length, _index(GROUP))) as groups:
                address = moved(first_weight, groups.index, _index(size))
                group = _Group(builder, address, vectors, is_packed=is_packed)
                first = builder.mul(groups.index, _index(GROUP))
                with cgutils.for_range(builder, _index(GROUP // positions_per_line)) as lines:
                    offset = builder.mul(lines.index, _index(positions_per_line))
                    position = builder.add(first, offset)
                    for number, columns in enumerate(group.lines(lines.index)):
                        accumulate(builder.add(position, _index(number)), columns)
        else:
            with cgutils.for_range(builder, length) as loop:
                line = moved(first_weight, stride, loop.index)
                dtype = signature.args[0].dtype
                if looks_ahead:
                    _prefetch_ahead(builder, line)
                accumulate(loop.index, _columns_of_floats(builder, line, vectors, dtype))
        for cell in cells:
            builder.store(builder.load(sums[cell]), places[cell], align=1)
        return target.get_dummy_value()

    signature = types.void(
        weights, types.intp, types.intp, inputs, types.intp, types.intp, types.intp,
        outputs, types.intp, types.intp, num_rows, num_vectors, accumulates, prefetches,
    )  # fmt: skip
    return signature, generate


# --- Threads --------------------------------------------------------------------------------------


@intrinsic
def fetch_add(context: Any, array: Any, index: Any, amount: Any) -> Any:
    """Add to ``array[index]``, of int64, as one step for all threads; return what was there."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, index, amount = arguments
        address = _address(target, builder, signature.args[0], array, index)
        return builder.atomic_rmw("add", address, amount, "acq_rel")

    return types.int64(array, types.intp, types.int64), generate


@intrinsic
def load_shared(context: Any, array: Any, index: Any) -> Any:
    """Return ``array[index]``, of int64, as other threads have left it."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _address(target, builder, signature.args[0], *arguments)
        return builder.load_atomic(address, "acquire", 8)

    return types.int64(array, types.intp), generate


@intrinsic
def yield_thread(context: Any) -> Any:
    """Let another thread have the core (POSIX ``sched_yield``)."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _call(builder, "sched_yield", _INT)

    return types.int32(), generate
