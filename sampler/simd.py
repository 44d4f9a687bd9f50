"""Vectors of 16 floats for compiled kernels, and the one matrix product that they are made of.

Numba compiles Python loops well, but leaves to LLVM which of them become vector instructions, and
in which order sums are taken. Here both are written down: a ``float32x16`` is one AVX-512 register,
two of AVX2, or four of NEON, and each lane of a product is a chain of fused multiply-adds over the
inner dimension, from its first element to its last. So a result depends on its own row and column
only: not on how many rows are computed beside it, nor on how work is split over threads. That is
what makes what is sampled independent of the neighbours in a batch.

Where the processor can, products take two elements at a time in 16 bits (``store_inputs``): a chain
then goes on in pairs of bfloat16, or, with integers, in groups that are summed exactly.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, extending, njit
from numba.core import cgutils, types
from numba.core.codegen import get_host_cpu_features
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


def brief_entry_point(function: Callable[..., Any]) -> Any:
    """Have ``function`` compiled, to be called where it takes microseconds: it keeps Python's lock.

    Where that is let go another thread may take it, and to get it back takes longer than this.
    """
    return _compiled(function, nogil=False)


def _compiled(function: Callable[..., Any], **options: Any) -> Any:
    """Compile, and keep machine code for other processes.

    Numba sees that it is stale by the source of the function's own module only; so each version of
    the others has a directory of its own.
    """
    before = _config.CACHE_DIR
    _config.CACHE_DIR = str(user_cache() / "kernels" / _version())
    # Without counts of references: all threads would write to those of one array. And a division
    # by zero is infinite, or no number: what raised amid a step would leave others waiting for it.
    options = {
        "nogil": True, "no_cfunc_wrapper": True, "_nrt": False, "error_model": "numpy", **options,
    }  # fmt: skip
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
    """Read 16 numbers as floats: float32, bfloat16 as uint16, or int8."""
    if dtype == types.float32:
        return _read(builder, address, _FLOAT)
    if dtype == types.int8:
        return builder.sitofp(builder.sext(_read(builder, address, _BYTE), _INTS), _VECTOR)
    assert dtype == types.uint16, f"no vectors of {dtype}"
    bits = builder.zext(_read(builder, address, ir.IntType(16)), _INTS)
    return builder.bitcast(builder.shl(bits, _ints(16)), _VECTOR)


def _ints(value: int) -> Any:
    return ir.Constant(_INTS, [value] * LANES)


def _floats(value: float) -> Any:
    return ir.Constant(_VECTOR, [value] * LANES)


def _splat(builder: Any, scalar: Any) -> Any:
    undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
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

    Lanes below -87 count as -87 (1.6e-38), above 88 as 88 (1.7e38); of NaN the power is NaN.
    """

    def bounded(builder: Any, x: Any, comparison: str, bound: float) -> Any:
        is_beyond = builder.fcmp_ordered(comparison, _floats(bound), x)  # NaN never is
        return builder.select(is_beyond, _floats(bound), x)

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x = bounded(builder, arguments[0], ">", _LEAST)
        x = bounded(builder, x, "<", _GREATEST)
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


# --- The inputs of products -----------------------------------------------------------------------

GROUP = 32
"""How many successive weights of a column share a scale, where weights are integers; and how many
successive inputs do, where they are."""

_BYTE, _SHORT = ir.IntType(8), ir.IntType(16)
_SHORTS = ir.VectorType(_SHORT, 2 * LANES)
_BYTES = ir.VectorType(_BYTE, 2 * LANES)
_HALF = ir.HalfType()
_GREATEST_INPUT = 32767.0
_LEAST_DIVISOR = 0x0400_0000
"""The bits of 1.5e-36: 32767 divided by less may be infinite."""


def processor_has(feature: str) -> bool:
    """Tell whether code is compiled for a processor with ``feature``, which LLVM names."""
    features = _config.CPU_FEATURES
    features = get_host_cpu_features() if features is None else features
    return f"+{feature}" in features.split(",")


def input_group_size(dtype: type) -> int:
    """Return how many elements a group of 32 inputs takes in an array of ``dtype``.

    In float32, and in bfloat16 as uint16, it is 32; in int16 the 32 integers, then, each as the
    bits of a float32, their scale and their sum times it.
    """
    return GROUP + 4 if dtype is np.int16 else GROUP


def _input_index(builder: Any, dtype: Any, number: Any) -> Any:
    """Return the index of the element where input ``number`` is, in int16 the first of a group."""
    if dtype != types.int16:
        return number
    return builder.mul(builder.sdiv(number, _index(GROUP)), _index(input_group_size(np.int16)))


@intrinsic
def store_inputs(context: Any, array: Any, index: Any, low: Any, high: Any) -> Any:
    """Let a group of inputs be the 32 numbers of ``low`` and ``high``.

    ``index`` counts inputs, in whichever form they are. In bfloat16 each is rounded to the nearest
    even; in int16 the one of greatest magnitude becomes 32767, and the others what is nearest to
    them on that scale.
    """

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, index, *halves = arguments
        dtype = signature.args[0].dtype
        index = _input_index(builder, dtype, index)
        address = _address(target, builder, signature.args[0], array, index)
        if dtype == types.int16:
            _store_integers(builder, address, halves)
        else:
            for number, half in enumerate(halves):
                value = _bfloat_bits(builder, half) if dtype == types.uint16 else half
                _write(builder, value, address, number * LANES)
        return target.get_dummy_value()

    return types.void(array, types.intp, float32x16, float32x16), generate


def _bfloat_bits(builder: Any, vector: Any) -> Any:
    bits = builder.bitcast(vector, _INTS)
    odd = builder.and_(builder.lshr(bits, _ints(16)), _ints(1))
    rounded = builder.add(builder.add(bits, _ints(0x7FFF)), odd)
    return builder.trunc(builder.lshr(rounded, _ints(16)), ir.VectorType(_SHORT, LANES))


def _greatest_bits(builder: Any, halves: list[Any]) -> Any:
    """Return the bits of the greatest magnitude in two vectors."""
    # Bits without the sign are in the order of magnitudes, and above them all is what is no number:
    # of it the scale is none either, nor are the products.
    bits = [builder.and_(builder.bitcast(half, _INTS), _ints(0x7FFF_FFFF)) for half in halves]
    both = _call(builder, "llvm.umax.v16i32", _INTS, *bits)
    return _call(builder, "llvm.vector.reduce.umax.v16i32", _INT, both)


def _store_integers(builder: Any, address: Any, halves: list[Any]) -> None:
    top = _greatest_bits(builder, halves)
    is_tiny = builder.icmp_unsigned("<", top, ir.Constant(_INT, _LEAST_DIVISOR))
    magnitude = builder.bitcast(top, _FLOAT)
    factor = builder.fdiv(ir.Constant(_FLOAT, _GREATEST_INPUT), magnitude)
    factor = builder.select(is_tiny, ir.Constant(_FLOAT, 0.0), factor)
    scale = builder.fmul(magnitude, ir.Constant(_FLOAT, 1 / _GREATEST_INPUT))
    integers = []
    for number, half in enumerate(halves):
        scaled = builder.fmul(half, _splat(builder, factor))
        whole = _call(builder, "llvm.rint.v16f32", _VECTOR, scaled)
        integers.append(builder.fptosi(whole, _INTS))
        shorts = builder.trunc(integers[-1], ir.VectorType(_SHORT, LANES))
        _write(builder, shorts, address, number * LANES)
    total = _call(builder, "llvm.vector.reduce.add.v16i32", _INT, builder.add(*integers))
    _write(builder, scale, address, GROUP)
    _write(builder, builder.fmul(builder.sitofp(total, _FLOAT), scale), address, GROUP + 2)


def _write(builder: Any, value: Any, address: Any, offset: Any) -> None:
    """Store ``value`` where the element is that is ``offset`` elements after ``address``."""
    place = builder.gep(address, [_index(offset) if isinstance(offset, int) else offset])
    builder.store(value, builder.bitcast(place, value.type.as_pointer()), align=1)


# --- Keys and values ------------------------------------------------------------------------------

_SCALES_BYTES = 2 * LANES
_GREATEST_BYTE = 127.0


def kv_group_size(dtype: type) -> int:
    """Return how many elements of ``dtype`` keep 32 coordinates of 16 positions.

    Of keys there is a line of 16 positions for each coordinate, of values one of 32 coordinates for
    each position. In int8 there are 16 scales before them, as float16, of each position one; and
    each two lines of keys are one, in which the two coordinates of a position are side by side.
    That is 8.5 lines of the processor's cache, and what is read at once, at most half of one, lies
    in one of them wherever groups follow each other from the beginning of one on.
    """
    return GROUP * LANES + (_SCALES_BYTES if dtype is np.int8 else 0)


@intrinsic(prefer_literal=True)
def store_position(
    context: Any, array: Any, index: Any, slot: Any, low: Any, high: Any, of: Any
) -> Any:
    """Let 32 coordinates of position ``slot`` be the numbers of ``low`` and ``high``.

    Their group begins at ``index``, and is ``of`` "keys" or "values". In bfloat16 they are rounded
    to the nearest even. In int8 the one of greatest magnitude becomes 127 or -127, and the others
    what is nearest to them on that scale; if one of them is infinite or no number, or the scale
    beyond float16 (from 8.3 million on), all become so. Nothing of other positions is touched.
    """
    are_keys = of.literal_value == "keys"

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, index, slot, *halves, _ = arguments
        dtype = signature.args[0].dtype
        address = _address(target, builder, signature.args[0], array, index)
        if dtype == types.int8:
            _store_bytes(builder, address, slot, halves, are_keys=are_keys)
        else:
            first = builder.mul(slot, _index(1 if are_keys else GROUP))
            address = builder.gep(address, [first])
            for number, half in enumerate(halves):
                value = _bfloat_bits(builder, half) if dtype == types.uint16 else half
                if are_keys:
                    _scatter(builder, value, address, number * LANES, LANES)
                else:
                    _write(builder, value, address, number * LANES)
        return target.get_dummy_value()

    index_type = types.intp
    return types.void(array, index_type, index_type, low, high, of), generate


def _scatter(builder: Any, vector: Any, address: Any, first: int, step: int) -> None:
    """Store the lanes of ``vector`` every ``step`` elements, the first as number ``first``."""
    for lane in range(LANES):
        element = builder.extract_element(vector, ir.Constant(_INT, lane))
        _write(builder, element, address, (first + lane) * step)


def _store_bytes(
    builder: Any, address: Any, slot: Any, halves: list[Any], *, are_keys: bool
) -> None:
    top = _greatest_bits(builder, halves)
    magnitude = builder.bitcast(top, _FLOAT)
    scaled = builder.fmul(magnitude, ir.Constant(_FLOAT, 1 / _GREATEST_BYTE))
    scale = builder.fptrunc(scaled, _HALF)
    kept = builder.fpext(scale, _FLOAT)
    is_zero = builder.fcmp_ordered("==", kept, ir.Constant(_FLOAT, 0.0))
    factor = builder.fdiv(ir.Constant(_FLOAT, 1.0), kept)
    factor = _splat(builder, builder.select(is_zero, ir.Constant(_FLOAT, 0.0), factor))
    _write(builder, scale, builder.bitcast(address, _HALF.as_pointer()), slot)
    integers = [_as_bytes(builder, builder.fmul(half, factor)) for half in halves]
    lines = builder.gep(address, [_index(_SCALES_BYTES)])
    if are_keys:
        # Two coordinates of a position lie side by side.
        pairs = builder.bitcast(
            builder.gep(lines, [builder.mul(slot, _index(2))]), _SHORT.as_pointer()
        )
        for number, half in enumerate(integers):
            words = builder.bitcast(half, ir.VectorType(_SHORT, LANES // 2))
            for pair in range(LANES // 2):
                word = builder.extract_element(words, ir.Constant(_INT, pair))
                _write(builder, word, pairs, (number * LANES // 2 + pair) * LANES)
    else:
        line = builder.gep(lines, [builder.mul(slot, _index(GROUP))])
        for number, half in enumerate(integers):
            _write(builder, half, line, number * LANES)


def _as_bytes(builder: Any, vector: Any) -> Any:
    """Round to the nearest of -127 to 127; what is no number becomes one of them."""
    for name, bound in (("minnum", _GREATEST_BYTE), ("maxnum", -_GREATEST_BYTE)):
        vector = _call(builder, f"llvm.{name}.v16f32", _VECTOR, vector, _floats(bound))
    whole = _call(builder, "llvm.rint.v16f32", _VECTOR, vector)
    return builder.trunc(builder.fptosi(whole, _INTS), ir.VectorType(_BYTE, LANES))


@intrinsic
def scale_weights(context: Any, weights: Any, array: Any, index: Any) -> Any:
    """Return the weights of the 16 positions of a group of values times their scales.

    A weight of 0 stays 0, whatever the scale: it may be that of a position that is not there.
    In floats there are no scales, and weights are returned as they are.
    """

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, array, index = arguments
        if signature.args[1].dtype != types.int8:
            return weights
        address = _address(target, builder, signature.args[1], array, index)
        scales = _half_scales(builder, address)
        is_zero = builder.fcmp_ordered("==", weights, _floats(0.0))
        return builder.select(is_zero, _floats(0.0), builder.fmul(weights, scales))

    return float32x16(float32x16, array, types.intp), generate


# --- The matrix product ---------------------------------------------------------------------------

_STEP = 8
"""How many inner positions of packed integers are gone through at once: 4 bits each of a word."""
_CACHE_LINE_BYTES = 64
PREFETCHED_BYTES = 4096
"""How far ahead weights are fetched: eight rows at once take half the time for it (measured)."""


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's type, for which llvmlite has no name."""

    def __str__(self) -> str:
        return "bfloat"


_BFLOATS = ir.VectorType(_BFloat(), 2 * LANES)


def _prefetch_ahead(builder: Any, line: Any, num_bytes: int = 1) -> None:
    """Have what lies ahead of the bytes from ``line`` on brought to the nearest cache."""
    address = builder.bitcast(line, _BYTE.as_pointer())
    for offset in range(0, num_bytes, _CACHE_LINE_BYTES):
        _prefetch(builder, builder.gep(address, [_index(PREFETCHED_BYTES + offset)]))


def _prefetch(builder: Any, address: Any) -> None:
    address = builder.bitcast(address, _BYTE.as_pointer())
    function_type = ir.FunctionType(ir.VoidType(), [address.type, _INT, _INT, _INT])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    to_read, all_caches, data = (ir.Constant(_INT, value) for value in (0, 3, 1))
    builder.call(function, [address, to_read, all_caches, data])


def _index(value: int) -> Any:
    return ir.Constant(ir.IntType(64), value)


def _moved(builder: Any, address: Any, count: Any, times: Any) -> Any:
    return builder.gep(address, [builder.mul(count, times)])


def _vector_at(builder: Any, address: Any, num_bytes: int, vector: Any) -> Any:
    """Read a ``vector`` that begins ``num_bytes`` after ``address``."""
    place = builder.gep(builder.bitcast(address, _BYTE.as_pointer()), [_index(num_bytes)])
    return builder.load(builder.bitcast(place, vector.as_pointer()), align=1)


def _splats(builder: Any, row_inputs: list[Any], position: Any, kind: Any) -> list[Any]:
    """Return for each row the number of type ``kind`` at ``position``, in all lanes."""
    found = []
    for row_input in row_inputs:
        place = builder.bitcast(builder.gep(row_input, [position]), kind.as_pointer())
        found.append(_splat(builder, builder.load(place, align=1)))
    return found


class _Group:
    """One group of quantised weights.

    Scales, and for 4 bits minima, of all columns as float16; then the integers.
    """

    def __init__(self, builder: Any, address: Any, vectors: int, *, is_packed: bool) -> None:
        self._builder, self._vectors, self._is_packed = builder, vectors, is_packed
        width = vectors * LANES
        self.scales = self._halves_at(address, 0)
        self.minima = self._halves_at(address, 2 * width) if is_packed else []
        self._integers = builder.gep(address, [_index(2 * width * (1 + is_packed))])

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
            found.append(builder.fpext(_read(builder, place, _HALF), _VECTOR))
        return found

    def lines(self, number: Any) -> list[list[Any]]:
        """Return line ``number`` as floats: the columns at one inner position, or at two."""
        builder = self._builder
        line = _moved(builder, self._integers, number, _index(self._vectors * LANES))
        _prefetch_ahead(builder, line)
        whole = [
            _read(builder, builder.gep(line, [_index(v * LANES)]), _BYTE)
            for v in range(self._vectors)
        ]
        if not self._is_packed:
            floats = [builder.sitofp(builder.sext(w, _INTS), _VECTOR) for w in whole]
            return [[builder.fmul(f, s) for f, s in zip(floats, self.scales, strict=True)]]
        wide = [builder.zext(w, _INTS) for w in whole]
        low = [builder.and_(w, _ints(15)) for w in wide]
        high = [builder.lshr(w, _ints(4)) for w in wide]
        return [
            [
                _fma(builder, builder.uitofp(part, _VECTOR), scale, minimum)
                for part, scale, minimum in zip(half, self.scales, self.minima, strict=True)
            ]
            for half in (low, high)
        ]

    def pairs(self, step: Any) -> list[list[Any]]:
        """Return the integers of 8 inner positions in 16 bits: the columns at each two of them."""
        builder, vectors = self._builder, self._vectors
        num_bytes = _STEP * vectors * LANES // (1 + self._is_packed)
        first = _moved(builder, self._integers, step, _index(num_bytes))
        _prefetch_ahead(builder, first, num_bytes)
        if not self._is_packed:
            return [
                [
                    builder.sext(_vector_at(builder, first, 2 * LANES * place, _BYTES), _SHORTS)
                    for place in range(pair * vectors, (pair + 1) * vectors)
                ]
                for pair in range(_STEP // 2)
            ]
        words = [_vector_at(builder, first, 4 * LANES * v, _SHORTS) for v in range(vectors)]
        return [
            [builder.and_(builder.lshr(w, _shorts(4 * pair)), _shorts(15)) for w in words]
            for pair in range(_STEP // 2)
        ]


def _shorts(value: int) -> Any:
    return ir.Constant(_SHORTS, [value] * 2 * LANES)


def _half_scales(builder: Any, address: Any) -> Any:
    """Return the 16 scales that begin at ``address``, as floats."""
    return builder.fpext(_vector_at(builder, address, 0, ir.VectorType(_HALF, LANES)), _VECTOR)


def _separated(builder: Any, line: Any, num_bytes: int) -> tuple[Any, Any]:
    """Return two lines of bytes as floats that lie side by side ``num_bytes`` after ``line``."""
    both = _vector_at(builder, line, num_bytes, ir.VectorType(_SHORT, LANES))
    wide = builder.sext(both, _INTS)
    first = builder.ashr(builder.shl(wide, _ints(24)), _ints(24))
    second = builder.ashr(wide, _ints(8))
    return builder.sitofp(first, _VECTOR), builder.sitofp(second, _VECTOR)


class _Tile:
    """Writes the code that adds a product to the sums of a tile, which lie in registers."""

    def __init__(self, builder: Any, rows: int, vectors: int) -> None:
        self._builder, self._vectors = builder, vectors
        self.cells = [(row, vector) for row in range(rows) for vector in range(vectors)]
        self.sums = self._new_sums(_VECTOR)

    def _new_sums(self, vector: Any) -> dict[tuple[int, int], Any]:
        return {cell: cgutils.alloca_once(self._builder, vector) for cell in self.cells}

    def _accumulate(
        self,
        sums: dict[tuple[int, int], Any],
        columns: list[Any],
        inputs: list[Any],
        multiply_add: Callable[..., Any],
    ) -> None:
        """Add to each sum what its column's weights and its row's inputs give."""
        builder = self._builder
        for row, vector in self.cells:
            total = builder.load(sums[row, vector])
            total = multiply_add(builder, columns[vector], inputs[row], total)
            builder.store(total, sums[row, vector])

    def add_lines(
        self,
        weights: Any,
        stride: Any,
        apart: Any,
        ahead: tuple[Any, Any],
        row_inputs: list[Any],
        length: Any,
        dtype: Any,
    ) -> None:
        """Multiply lines of floats with inputs in float32."""
        builder = self._builder
        numbers = [_index(vector) for vector in range(self._vectors)]
        with cgutils.for_range(builder, length) as loop:
            line = _moved(builder, weights, stride, loop.index)
            later = builder.gep(line, [ahead[0]])
            # In int8 all vectors of a line are in one line of the cache.
            for number in numbers[:1] if dtype == types.int8 else numbers:
                _prefetch(builder, _moved(builder, later, ahead[1], number))
            places = [_moved(builder, line, apart, number) for number in numbers]
            columns = [_load(builder, place, dtype) for place in places]
            inputs = _splats(builder, row_inputs, loop.index, _FLOAT)
            self._accumulate(self.sums, columns, inputs, _fma)

    def add_bfloat_pairs(
        self, weights: Any, stride: Any, row_inputs: list[Any], length: Any
    ) -> None:
        """Multiply bfloat16 with inputs in it."""
        builder = self._builder
        width = 4 * LANES  # of a vector, in bytes
        with cgutils.for_range(builder, builder.sdiv(length, _index(2))) as pairs:
            position = builder.mul(pairs.index, _index(2))
            line = _moved(builder, weights, stride, position)
            _prefetch_ahead(builder, line, self._vectors * width)
            columns = [_vector_at(builder, line, v * width, _BFLOATS) for v in range(self._vectors)]
            inputs = _splats(builder, row_inputs, position, _INT)
            self._accumulate(self.sums, columns, inputs, _add_bfloat_products)

    def add_groups(
        self, weights: Any, row_inputs: list[Any], length: Any, *, is_packed: bool
    ) -> None:
        """Multiply integers with inputs in float32."""
        builder = self._builder
        per_line = 1 + is_packed
        with self._groups(weights, length, is_packed=is_packed) as (number, group):
            first = builder.mul(number, _index(GROUP))
            with cgutils.for_range(builder, _index(GROUP // per_line)) as lines:
                position = builder.add(first, builder.mul(lines.index, _index(per_line)))
                for offset, columns in enumerate(group.lines(lines.index)):
                    at = builder.add(position, _index(offset))
                    inputs = _splats(builder, row_inputs, at, _FLOAT)
                    self._accumulate(self.sums, columns, inputs, _fma)

    def add_integer_pairs(
        self, weights: Any, row_inputs: list[Any], length: Any, *, is_packed: bool
    ) -> None:
        """Multiply integers with inputs in int16. The sum over a group is exact, then scaled."""
        builder = self._builder
        sums = self._new_sums(_INTS)
        with self._groups(weights, length, is_packed=is_packed) as (number, group):
            for place in sums.values():
                builder.store(_ints(0), place)
            first = builder.mul(number, _index(input_group_size(np.int16)))
            with cgutils.for_range(builder, _index(GROUP // _STEP)) as steps:
                position = builder.add(first, builder.mul(steps.index, _index(_STEP)))
                for pair, columns in enumerate(group.pairs(steps.index)):
                    at = builder.add(position, _index(2 * pair))
                    inputs = _splats(builder, row_inputs, at, _INT)
                    self._accumulate(sums, columns, inputs, _add_integer_products)
            scale_at, total_at = (builder.add(first, _index(GROUP + n)) for n in (0, 2))
            scales = _splats(builder, row_inputs, scale_at, _FLOAT)
            totals = _splats(builder, row_inputs, total_at, _FLOAT)
            for row, vector in self.cells:
                whole = builder.sitofp(builder.load(sums[row, vector]), _VECTOR)
                product = builder.fmul(whole, scales[row])
                total = builder.load(self.sums[row, vector])
                total = _fma(builder, product, group.scales[vector], total)
                if is_packed:
                    total = _fma(builder, totals[row], group.minima[vector], total)
                builder.store(total, self.sums[row, vector])

    def add_byte_keys(
        self, blocks: list[Any], later: list[Any], row_inputs: list[Any], length: Any, dtype: Any
    ) -> None:
        """Multiply keys in int8, of a block for each vector, with inputs of ``dtype``.

        The sum over a group, which is exact where inputs are integers too, is scaled for each
        position. As much as is multiplied is brought near of what is ``later``.
        """
        builder, in_pairs = self._builder, dtype == types.int16
        kind = _INTS if in_pairs else _VECTOR
        sums = self._new_sums(kind)
        size = _index(kv_group_size(np.int8))
        per_group = input_group_size(np.int16 if in_pairs else np.float32)
        with cgutils.for_range(builder, builder.sdiv(length, _index(GROUP))) as loop:
            for place in sums.values():
                builder.store(ir.Constant(kind, [0] * LANES), place)
            groups = [_moved(builder, block, loop.index, size) for block in blocks]
            ahead = [_moved(builder, block, loop.index, size) for block in later]
            first = builder.mul(loop.index, _index(per_group))
            self._add_byte_lines(sums, groups, ahead, row_inputs, first, in_pairs=in_pairs)
            scales = [_half_scales(builder, group) for group in groups]
            at = builder.add(first, _index(GROUP))
            input_scales = _splats(builder, row_inputs, at, _FLOAT) if in_pairs else []
            for row, vector in self.cells:
                group_sum = builder.load(sums[row, vector])
                if in_pairs:
                    whole = builder.sitofp(group_sum, _VECTOR)
                    group_sum = builder.fmul(whole, input_scales[row])
                total = builder.load(self.sums[row, vector])
                total = _fma(builder, group_sum, scales[vector], total)
                builder.store(total, self.sums[row, vector])

    def _add_byte_lines(
        self,
        sums: dict[tuple[int, int], Any],
        groups: list[Any],
        later: list[Any],
        row_inputs: list[Any],
        first: Any,
        *,
        in_pairs: bool,
    ) -> None:
        """Add up one group of each block, by coordinates; its inputs begin at ``first``."""
        builder = self._builder
        num_steps = GROUP // _STEP
        size = kv_group_size(np.int8) // num_steps
        with cgutils.for_range(builder, _index(num_steps)) as steps:
            for group in later:
                ahead = _moved(builder, group, steps.index, _index(size))
                for offset in range(0, size, _CACHE_LINE_BYTES):
                    _prefetch(builder, builder.gep(ahead, [_index(offset)]))
            moved = builder.mul(steps.index, _index(_STEP * LANES))
            lines = [
                builder.gep(group, [builder.add(moved, _index(_SCALES_BYTES))]) for group in groups
            ]
            position = builder.add(first, builder.mul(steps.index, _index(_STEP)))
            for pair in range(_STEP // 2):
                at = builder.add(position, _index(2 * pair))
                offset = 2 * LANES * pair
                if in_pairs:
                    columns = [
                        builder.sext(_vector_at(builder, line, offset, _BYTES), _SHORTS)
                        for line in lines
                    ]
                    inputs = _splats(builder, row_inputs, at, _INT)
                    self._accumulate(sums, columns, inputs, _add_integer_products)
                    continue
                halves = [_separated(builder, line, offset) for line in lines]
                for number, coordinate in enumerate(zip(*halves, strict=True)):
                    place = builder.add(at, _index(number))
                    inputs = _splats(builder, row_inputs, place, _FLOAT)
                    self._accumulate(sums, list(coordinate), inputs, _fma)

    @contextmanager
    def _groups(
        self, weights: Any, length: Any, *, is_packed: bool
    ) -> Iterator[tuple[Any, _Group]]:
        """Loop over the groups: the body is for the number of one, and for what is in it."""
        builder = self._builder
        size = _Group.num_bytes(self._vectors, is_packed=is_packed)
        with cgutils.for_range(builder, builder.sdiv(length, _index(GROUP))) as groups:
            address = _moved(builder, weights, groups.index, _index(size))
            yield groups.index, _Group(builder, address, self._vectors, is_packed=is_packed)


def _add_bfloat_products(builder: Any, weights: Any, inputs: Any, total: Any) -> Any:
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    return _call(builder, name, _VECTOR, total, weights, builder.bitcast(inputs, _BFLOATS))


def _add_integer_products(builder: Any, weights: Any, inputs: Any, total: Any) -> Any:
    # With the addition it becomes one instruction (vpdpwssd).
    name = "llvm.x86.avx512.pmaddw.d.512"
    products = _call(builder, name, _INTS, weights, builder.bitcast(inputs, _SHORTS))
    return builder.add(total, products)


@intrinsic(prefer_literal=True)
def multiply_tile(
    context: Any,
    weights: Any,
    weights_index: Any,
    weights_stride: Any,
    weights_apart: Any,
    ahead: Any,
    ahead_apart: Any,
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
    of: Any,
) -> Any:
    """Let a tile of ``outputs`` be a product, or with ``accumulates`` add the product to it.

    ``outputs[r, c] = sum over k < length of inputs[r, k] * weights[k, c]`` for ``num_rows`` rows
    and ``16 * num_vectors`` columns; both are literals, so the sums stay in registers. Indices and
    strides are in elements of flat arrays, of inputs in numbers. For inputs in float32 weights are

    * float32, or uint16 for bfloat16: a line of columns every ``weights_stride``, each 16 of them
      ``weights_apart`` from the last; what lies ``ahead`` of them is brought near, where they are
      ``ahead_apart``;
    * int8 or, for 4 bits, uint8: groups of 32 lines, one after the other, each led by its scales;
      4-bit weights come in pairs, the even line in the lower bits, and are scaled from a minimum.

    Where they are ``of`` "keys" or "values", not of a "matrix", int8 is what ``kv_group_size``
    says: of keys groups one after the other, from their scales on, and the second 16 columns, of
    another block, ``weights_apart`` from the first; of values the lines of one group, whose scales
    are in the inputs already (``scale_weights``). Queries may be float32 or int16.

    For inputs in bfloat16 they are bfloat16, and each two lines are one, in which the two numbers
    of a column are side by side. For inputs in int16 they are integers in groups as above, but in
    another order: 8 bits as bfloat16 is; 4 bits in words of eight lines, the even ones in a word's
    lower half, from the lowest bits up, and the odd ones in its upper half.
    """
    rows, vectors = num_rows.literal_value, num_vectors.literal_value
    begins_with_outputs = bool(accumulates.literal_value)
    is_packed = weights.dtype == types.uint8

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, at, stride, apart, ahead, ahead_apart, inputs, from_, *rest = arguments
        input_stride, length, outputs, to, step, *_ = rest
        weights_type, inputs_type, outputs_type = (signature.args[n] for n in (0, 6, 10))
        from_, input_stride = (
            _input_index(builder, inputs_type.dtype, number) for number in (from_, input_stride)
        )
        first_weight = _address(target, builder, weights_type, weights, at)
        first_input = _address(target, builder, inputs_type, inputs, from_)
        first_output = _address(target, builder, outputs_type, outputs, to)
        tile = _Tile(builder, rows, vectors)
        places = {}
        for row, vector in tile.cells:
            line = _moved(builder, first_output, step, _index(row))
            place = builder.gep(line, [_index(vector * LANES)])
            places[row, vector] = builder.bitcast(place, _VECTOR.as_pointer())
        for cell, place in places.items():
            begin = builder.load(place, align=1) if begins_with_outputs else _floats(0.0)
            builder.store(begin, tile.sums[cell])
        row_inputs = [_moved(builder, first_input, input_stride, _index(r)) for r in range(rows)]
        if of.literal_value == "keys" and weights_type.dtype == types.int8:
            next_weight = builder.gep(first_weight, [ahead])
            blocks = [_moved(builder, first_weight, apart, _index(v)) for v in range(vectors)]
            later = [_moved(builder, next_weight, ahead_apart, _index(v)) for v in range(vectors)]
            tile.add_byte_keys(blocks, later, row_inputs, length, inputs_type.dtype)
        elif inputs_type.dtype == types.uint16:
            tile.add_bfloat_pairs(first_weight, stride, row_inputs, length)
        elif inputs_type.dtype == types.int16:
            tile.add_integer_pairs(first_weight, row_inputs, length, is_packed=is_packed)
        elif of.literal_value == "matrix" and weights_type.dtype in (types.int8, types.uint8):
            tile.add_groups(first_weight, row_inputs, length, is_packed=is_packed)
        else:
            places_ahead = ahead, ahead_apart
            dtype = weights_type.dtype
            tile.add_lines(first_weight, stride, apart, places_ahead, row_inputs, length, dtype)
        for cell, place in places.items():
            builder.store(builder.load(tile.sums[cell]), place, align=1)
        return target.get_dummy_value()

    index = types.intp
    signature = types.void(
        weights, index, index, index, index, index, inputs, index, index, index,
        outputs, index, index, num_rows, num_vectors, accumulates, of,
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
