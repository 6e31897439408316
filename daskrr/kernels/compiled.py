"""Machine code for kernel columns, made in milliseconds when a process first needs it.

A kernel's formula is a Python function of :class:`Lanes`, several numbers side by side, and is written once for both
dtypes. :func:`sweep` applies one to all numbers of a tile while they are in cache. :func:`pairs` goes through rows,
landmarks and features, and applies it to what it has summed of each pair. :func:`row_sums` adds up what it makes of
the numbers of a row. None holds the interpreter lock. Every operation is rounded as IEEE 754 says, whatever the
processor, so that values do not depend on it.
"""

import ctypes
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np
from llvmlite import binding, ir

from daskrr.kernels.common import Array

# Numbers that are computed side by side: several vectors of any processor, so that one need not wait for the other.
# Landmarks of `pairs` are padded to a multiple of it.
LANES = 16

_WIDE = np.dtype(np.float64)
_INTEGER = ir.IntType(64)
_SCALARS = {np.dtype(np.float64): ir.DoubleType(), np.dtype(np.float32): ir.FloatType()}
_NUMBERS = itertools.count()
_NONE = np.empty(0)
_COMPILING = threading.Lock()


class Lanes:
    """Numbers side by side of a function that is being made, which are computed with like arrays."""

    def __init__(self, builder: ir.IRBuilder, value: ir.Value, dtype: np.dtype[Any]) -> None:
        self.builder = builder
        self.value = value
        self.dtype = dtype

    def _like(self, value: ir.Value) -> "Lanes":
        return Lanes(self.builder, value, self.dtype)

    def constant(self, number: float) -> "Lanes":
        """The same number in every lane."""
        return self._like(_same(_SCALARS[self.dtype](float(number))))

    def _operand(self, other: "Lanes | float") -> ir.Value:
        return other.value if isinstance(other, Lanes) else self.constant(other).value

    def __add__(self, other: "Lanes | float") -> "Lanes":
        return self._like(self.builder.fadd(self.value, self._operand(other)))

    def __sub__(self, other: "Lanes | float") -> "Lanes":
        return self._like(self.builder.fsub(self.value, self._operand(other)))

    def __mul__(self, other: "Lanes | float") -> "Lanes":
        return self._like(self.builder.fmul(self.value, self._operand(other)))

    def __neg__(self) -> "Lanes":
        return self._like(self.builder.fneg(self.value))

    def times(self, factor: "Lanes | float", plus: "Lanes | float") -> "Lanes":
        """The product and the sum, rounded once."""
        return self._intrinsic("fma", self._operand(factor), self._operand(plus))

    def sqrt(self) -> "Lanes":
        """Roots."""
        return self._intrinsic("sqrt")

    def floor(self) -> "Lanes":
        """Largest integers that are not larger."""
        return self._intrinsic("floor")

    def __abs__(self) -> "Lanes":
        return self._intrinsic("fabs")

    def at_most(self, number: "Lanes | float") -> "Lanes":
        """The number where a lane is larger; NaN stays."""
        limit = self._operand(number)
        return self._like(self.builder.select(self.builder.fcmp_ordered(">", self.value, limit), limit, self.value))

    def zero_unless(self, key: "Lanes", above: float) -> "Lanes":
        """Zero where the key is not above a number; a key that is NaN is as good as above."""
        is_above = self.builder.fcmp_unordered(">", key.value, key.constant(above).value)
        return self._like(self.builder.select(is_above, self.value, self.constant(0.0).value))

    def times_power_of_two(self, bits_of: "Lanes") -> "Lanes":
        """Multiplied by 2ᵏ, where k is in the last bits of the other lanes."""
        about = np.finfo(self.dtype)
        integers = ir.VectorType(ir.IntType(about.bits), LANES)
        shift, bias = (integers([n] * LANES) for n in (about.nmant, (about.maxexp - 1) << about.nmant))
        shifted = self.builder.shl(self.builder.bitcast(bits_of.value, integers), shift)
        return self * self._like(self.builder.bitcast(self.builder.add(shifted, bias), self.value.type))

    def astype(self, dtype: np.dtype[Any]) -> "Lanes":
        """Rounded to another dtype."""
        if dtype == self.dtype:
            return self
        change = self.builder.fptrunc if dtype.itemsize < self.dtype.itemsize else self.builder.fpext
        return Lanes(self.builder, change(self.value, ir.VectorType(_SCALARS[dtype], LANES)), dtype)

    def total(self) -> ir.Value:
        """The sum of all lanes, of halves that are added to each other again and again."""
        value = self.value
        while (n := value.type.count) > 1:
            halves = [ir.VectorType(ir.IntType(32), n // 2)([*range(at, at + n // 2)]) for at in (0, n // 2)]
            value = self.builder.fadd(*(self.builder.shuffle_vector(value, value, half) for half in halves))
        return self.builder.extract_element(value, ir.IntType(32)(0))

    def _intrinsic(self, name: str, *others: ir.Value) -> "Lanes":
        kind = self.value.type
        signature = ir.FunctionType(kind, [kind] * (1 + len(others)))
        return self._like(self.builder.call(_declared(self.builder, name, signature, kind), [self.value, *others]))


Formula: TypeAlias = Callable[[Lanes], Lanes]
# What one feature adds to a sum: the sum so far, the difference of row and landmark, and the feature's weight.
Step: TypeAlias = Callable[[Lanes, Lanes, Lanes], Lanes]
# What a sum of a row has of a place: the numbers there, and ways to ask for the column's weight and the row's limit.
Term: TypeAlias = Callable[[list[Lanes], Callable[[], Lanes], Callable[[], Lanes]], Lanes]


# (exp(r) - 1 - r)/r² for |r| <= log(2)/2, interpolated at Chebyshev's points: off by a sixth of a unit roundoff.
_EXP = {
    np.dtype(np.float64): (
        0.5000000000000001, 0.16666666666666669, 0.04166666666662413, 0.008333333333330062, 0.0013888888917213717,
        0.00019841269863053618, 2.4801521295954376e-05, 2.7557268459997064e-06, 2.7620088445409746e-07,
        2.510038549551032e-08,
    ),
    np.dtype(np.float32): (
        0.5, 0.16666576989698775, 0.041666554617204574, 0.008363179052722578, 0.0013926183587713494,
    ),
}  # fmt: skip
# log(2) in two parts, of which the first has so few digits that its products with exponents are exact.
_LOG2 = {
    np.dtype(np.float64): (6.93147180369123816490e-01, 1.90821492927058770002e-10),
    np.dtype(np.float32): (0.693359375, -2.12194440e-4),
}


def exp(x: Lanes) -> Lanes:
    """Exponentials of numbers up to zero, with zero instead of subnormal numbers.

    A subnormal result takes a hundred times as long in every product it enters.
    """
    about = np.finfo(x.dtype)
    first, rest = _LOG2[x.dtype]
    # Adding and taking away a number whose last digit is one rounds to an integer, left in its last bits.
    rounder = 1.5 * 2.0**about.nmant
    rounded = x.times(1.0 / math.log(2.0), plus=rounder)
    k = rounded - rounder
    r = k.times(-rest, plus=k.times(-first, plus=x))
    value = (_polynomial(_EXP[x.dtype], r) * r).times(r, plus=r) + 1.0
    return value.times_power_of_two(rounded).zero_unless(x, above=math.log(float(about.tiny)) + 1.0)


def _polynomial(coefficients: tuple[float, ...], r: Lanes) -> Lanes:
    """Pairs of terms at a time, which wait less for each other than those of Horner's rule."""
    terms = [r.constant(coefficient) for coefficient in coefficients]
    while len(terms) > 1:
        paired = [high.times(r, plus=low) for low, high in zip(terms[::2], terms[1::2], strict=False)]
        terms = paired + terms[len(paired) * 2 :]
        r = r * r
    return terms[0]


@cache
def sweep(formula: Formula, dtype: np.dtype[Any]) -> Callable[[Array], None]:
    """A function that applies a formula to every number of a C-contiguous array in place."""
    builder = _function("sweep", _SCALARS[dtype].as_pointer(), _INTEGER)
    values, size = builder.function.args
    for first, mask in _strips(builder, size):
        found = formula(_lanes_at(builder, values, first, dtype, mask))
        _store(found, values, first, mask)
    code = _compiled(builder)

    def apply(array: Array) -> None:
        _check(array, dtype)
        code(array.ctypes.data, array.size)

    return apply


@cache
def pairs(step: Step, start: float, formula: Formula, dtype: np.dtype[Any]) -> Callable[..., None]:
    """A function of rows (m, d), landmarks (d, padded p) and weights (d,), all float64, and the array (m, p) to fill.

    Rows may lie in memory in any order. Features add to ``start`` one after the other. The sum is rounded to ``dtype``,
    and the formula applied to it.
    """
    pointer = _SCALARS[_WIDE].as_pointer()
    builder = _function("pairs", pointer, pointer, pointer, _SCALARS[dtype].as_pointer(), *[_INTEGER] * 4)
    rows, landmarks, weights, out, n_rows, n_features, n_columns, padded = builder.function.args
    begin = _same(_SCALARS[_WIDE](start))
    with _loop(builder, n_rows) as row:
        for first, mask in _strips(builder, n_columns):
            with _loop(builder, n_features, begin=begin) as feature:
                x = _splat(builder, rows, builder.add(builder.mul(row.index, n_features), feature.index))
                place = builder.add(builder.mul(feature.index, padded), first)
                difference = x - _lanes_at(builder, landmarks, place, _WIDE)
                weight = _splat(builder, weights, feature.index)
                feature.next = step(Lanes(builder, feature.total, _WIDE), difference, weight).value
            found = formula(Lanes(builder, feature.total, _WIDE).astype(dtype))
            _store(found, out, builder.add(builder.mul(row.index, n_columns), first), mask)
    code = _compiled(builder)

    def fill(X: Array, Z: Array, w: Array, tile: Array) -> None:
        X = np.ascontiguousarray(X)
        for array, kind in ((X, _WIDE), (Z, _WIDE), (w, _WIDE), (tile, dtype)):
            _check(array, kind)
        n, d, p = *X.shape, tile.shape[1]
        if Z.shape[0] != d or Z.shape[1] % LANES or Z.shape[1] < p or w.shape != (d,) or tile.shape != (n, p):
            raise ValueError(f"rows {X.shape}, landmarks {Z.shape}, weights {w.shape}, tile {tile.shape} do not fit")
        code(X.ctypes.data, Z.ctypes.data, w.ctypes.data, tile.ctypes.data, n, d, p, Z.shape[1])

    return fill


@cache
def row_sums(term: Term, dtype: np.dtype[Any], n_tiles: int) -> Callable[..., None]:
    """A function of as many tiles (m, p) of ``dtype`` in a list, and of the sums (m,) to fill.

    It sums, in float64, what ``term`` makes of the numbers that the tiles have at a place. A term that asks for them is
    given the weight of the column, of ``weights`` (p,), and the limit of the row, of ``limits`` (m,).
    """
    wide = _SCALARS[_WIDE].as_pointer()
    builder = _function("row_sums", *[_SCALARS[dtype].as_pointer()] * n_tiles, *[wide] * 3, _INTEGER, _INTEGER)
    *tiles, sums, weights, limits, n_rows, n_columns = builder.function.args
    with _loop(builder, n_rows) as row:
        first = builder.mul(row.index, n_columns)
        limit = partial(_splat, builder, limits, row.index)

        def added(total: ir.Value, at: ir.Value, mask: ir.Value | None = None) -> ir.Value:
            found = [_lanes_at(builder, tile, builder.add(first, at), dtype, mask).astype(_WIDE) for tile in tiles]
            weight = partial(_lanes_at, builder, weights, at, _WIDE, mask)
            return (Lanes(builder, total, _WIDE) + term(found, weight, limit)).value

        rest = builder.srem(n_columns, _INTEGER(LANES))
        whole = builder.sub(n_columns, rest)
        with _loop(builder, whole, by=LANES, begin=_same(_SCALARS[_WIDE](0.0))) as strip:
            strip.next = added(strip.total, strip.index)
        total = added(strip.total, whole, _mask(builder, rest))
        builder.store(Lanes(builder, total, _WIDE).total(), builder.gep(sums, [row.index]))
    code = _compiled(builder)

    def fill(tiles: Sequence[Array], sums: Array, weights: Array = _NONE, limits: Array = _NONE) -> None:
        for array, kind in [*((tile, dtype) for tile in tiles), *((one, _WIDE) for one in (sums, weights, limits))]:
            _check(array, kind)
        shapes = {tile.shape for tile in tiles} | {(*sums.shape, tiles[0].shape[1])}
        if weights is not _NONE:
            shapes |= {(*limits.shape, *weights.shape)}
        if len(tiles) != n_tiles or len(shapes) > 1:
            raise ValueError(f"{len(tiles)} tiles, sums, weights and limits of shapes {shapes} do not fit")
        code(*(array.ctypes.data for array in (*tiles, sums, weights, limits)), *tiles[0].shape)

    return fill


def padded_columns(Z: Array) -> Array:
    """Landmarks (p, d) as :func:`pairs` takes them: (d, padded p) of float64, zero beyond p."""
    columns = np.zeros((Z.shape[1], -(-len(Z) // LANES) * LANES))
    columns[:, : len(Z)] = Z.T
    return columns


def _check(array: Array, dtype: np.dtype[Any]) -> None:
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"a C-contiguous array of {dtype} is needed, not one of {array.dtype}")


# --- Parts of functions -------------------------------------------------------------------------------


@dataclass
class _Loop:
    """A loop whose body is being made: its index, a total that it carries, and what this becomes in the next turn."""

    index: ir.Value
    total: Any
    next: Any = None


@contextmanager
def _loop(builder: ir.IRBuilder, stop: ir.Value, by: int = 1, begin: ir.Value | None = None) -> Iterator[_Loop]:
    before = builder.block
    head, body, after = (builder.append_basic_block(name) for name in ("head", "body", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    loop = _Loop(builder.phi(_INTEGER), None if begin is None else builder.phi(begin.type))
    builder.cbranch(builder.icmp_signed("<", loop.index, stop), body, after)
    builder.position_at_end(body)
    yield loop
    turns = [(loop.index, _INTEGER(0), builder.add(loop.index, _INTEGER(by)))]
    turns += [] if begin is None else [(loop.total, begin, loop.next)]
    for phi, first, following in turns:
        phi.add_incoming(first, before)
        phi.add_incoming(following, builder.block)
    builder.branch(head)
    builder.position_at_end(after)


def _strips(builder: ir.IRBuilder, size: ir.Value) -> Iterator[tuple[ir.Value, ir.Value | None]]:
    """Where each strip of lanes begins, and in the last, which may be shorter, which lanes there are.

    What the caller makes after each of the two is the body of a loop, and the end of what does not fill the lanes.
    """
    rest = builder.srem(size, _INTEGER(LANES))
    whole = builder.sub(size, rest)
    with _loop(builder, whole, by=LANES) as strip:
        yield strip.index, None
    with builder.if_then(builder.icmp_signed(">", rest, _INTEGER(0))):
        yield whole, _mask(builder, rest)


def _mask(builder: ir.IRBuilder, count: ir.Value) -> ir.Value:
    """Which lanes are among the first so many."""
    numbers = ir.VectorType(_INTEGER, LANES)(list(range(LANES)))
    return builder.icmp_signed("<", numbers, _repeated(builder, count))


def _same(constant: ir.Constant) -> ir.Constant:
    return ir.VectorType(constant.type, LANES)([constant] * LANES)


def _repeated(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """A vector of the same value in every lane."""
    kind = ir.VectorType(value.type, LANES)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), LANES), None))


def _splat(builder: ir.IRBuilder, numbers: ir.Value, place: ir.Value) -> Lanes:
    return Lanes(builder, _repeated(builder, builder.load(builder.gep(numbers, [place]))), _WIDE)


def _vector_at(builder: ir.IRBuilder, numbers: ir.Value, place: ir.Value) -> ir.Value:
    kind = ir.VectorType(numbers.type.pointee, LANES)
    return builder.bitcast(builder.gep(numbers, [place]), kind.as_pointer())


def _lanes_at(
    builder: ir.IRBuilder, numbers: ir.Value, place: ir.Value, dtype: np.dtype[Any], mask: ir.Value | None = None
) -> Lanes:
    pointer, bytes_each = _vector_at(builder, numbers, place), dtype.itemsize
    if mask is None:
        return Lanes(builder, builder.load(pointer, align=bytes_each), dtype)
    kind = pointer.type.pointee
    signature = ir.FunctionType(kind, [pointer.type, ir.IntType(32), mask.type, kind])
    load = _declared(builder, "masked.load", signature, kind, pointer.type)
    return Lanes(
        builder, builder.call(load, [pointer, ir.IntType(32)(bytes_each), mask, ir.Constant(kind, None)]), dtype
    )


def _store(lanes: Lanes, numbers: ir.Value, place: ir.Value, mask: ir.Value | None) -> None:
    builder, value = lanes.builder, lanes.value
    pointer, bytes_each = _vector_at(builder, numbers, place), lanes.dtype.itemsize
    if mask is None:
        builder.store(value, pointer, align=bytes_each)
        return
    signature = ir.FunctionType(ir.VoidType(), [value.type, pointer.type, ir.IntType(32), mask.type])
    store = _declared(builder, "masked.store", signature, value.type, pointer.type)
    builder.call(store, [value, pointer, ir.IntType(32)(bytes_each), mask])


def _declared(builder: ir.IRBuilder, name: str, signature: ir.FunctionType, *kinds: ir.Type) -> ir.Function:
    """An operation of LLVM for some types."""
    full = ".".join(["llvm", name, *map(_type_name, kinds)])
    return builder.module.globals.get(full) or ir.Function(builder.module, signature, full)


def _type_name(kind: ir.Type) -> str:
    if isinstance(kind, ir.PointerType):
        return "p0"
    return f"v{kind.count}f{64 if isinstance(kind.element, ir.DoubleType) else 32}"


def _function(kind: str, *arguments: ir.Type) -> ir.IRBuilder:
    name = f"{kind}{next(_NUMBERS)}"
    function = ir.Function(ir.Module(name), ir.FunctionType(ir.VoidType(), arguments), name)
    return ir.IRBuilder(function.append_basic_block())


def _compiled(builder: ir.IRBuilder) -> Callable[..., None]:
    """The finished function as one of ctypes, which releases the interpreter lock."""
    builder.ret_void()
    function = builder.function
    with _COMPILING:
        engine = _engine()
        engine.add_module(binding.parse_assembly(str(function.module)))
        engine.finalize_object()
        address = engine.get_function_address(function.name)
    kinds = [ctypes.c_int64 if kind == _INTEGER else ctypes.c_void_p for kind in function.type.pointee.args]
    return ctypes.CFUNCTYPE(None, *kinds)(address)


@cache
def _engine() -> Any:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=_features(), opt=3
    )
    return binding.create_mcjit_compiler(binding.parse_assembly(""), machine)


def _features() -> str:
    """What the processor has besides what its name says; nothing where LLVM cannot tell."""
    try:
        found = binding.get_host_cpu_features()
    except RuntimeError:
        return ""
    # By default LLVM leaves half the width of these processors unused.
    return found.flatten() + (",-prefer-256-bit" if found.get("avx512f") else "")
