"""Formulas that are compiled: Python functions of :class:`Lanes`, several numbers side by side.

A formula is written once for both dtypes, and for processors and GPUs. Every operation is rounded as IEEE 754 says,
whatever it runs on, so that values do not depend on it.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from llvmlite import ir

WIDE = np.dtype(np.float64)
INTEGER = ir.IntType(64)
SCALARS = {np.dtype(np.float64): ir.DoubleType(), np.dtype(np.float32): ir.FloatType()}
_NUMBERS = itertools.count()


class Builder(ir.IRBuilder):
    """Makes a function of numbers and pointers, which computes with so many ``lanes`` side by side."""

    def __init__(self, kind: str, arguments: list[ir.Type], lanes: int) -> None:
        name = f"{kind}{next(_NUMBERS)}"
        function = ir.Function(ir.Module(name), ir.FunctionType(ir.VoidType(), arguments), name)
        super().__init__(function.append_basic_block())
        self.lanes = lanes


def same(constant: ir.Constant, lanes: int) -> ir.Constant:
    """A constant in every lane."""
    return ir.VectorType(constant.type, lanes)([constant] * lanes)


def declared(builder: ir.IRBuilder, name: str, signature: ir.FunctionType, *kinds: ir.Type) -> ir.Function:
    """An operation of LLVM for some types."""
    full = ".".join(["llvm", name, *map(_type_name, kinds)])
    return builder.module.globals.get(full) or ir.Function(builder.module, signature, full)


def _type_name(kind: ir.Type) -> str:
    if isinstance(kind, ir.PointerType):
        return "p0"
    return f"v{kind.count}f{64 if isinstance(kind.element, ir.DoubleType) else 32}"


class Lanes:
    """Numbers side by side of a function that is being made, which are computed with like arrays."""

    def __init__(self, builder: "Builder", value: ir.Value, dtype: np.dtype[Any]) -> None:
        self.builder = builder
        self.value = value
        self.dtype = dtype

    def _like(self, value: ir.Value) -> "Lanes":
        return Lanes(self.builder, value, self.dtype)

    def constant(self, number: float) -> "Lanes":
        """The same number in every lane."""
        return self._like(same(SCALARS[self.dtype](float(number)), self.builder.lanes))

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

    def power_of_two(self) -> "Lanes":
        """2ᵏ, where k is in the last bits."""
        about = np.finfo(self.dtype)
        integers = ir.VectorType(ir.IntType(about.bits), self.builder.lanes)
        shift, bias = (integers([n] * self.builder.lanes) for n in (about.nmant, (about.maxexp - 1) << about.nmant))
        shifted = self.builder.shl(self.builder.bitcast(self.value, integers), shift)
        return self._like(self.builder.bitcast(self.builder.add(shifted, bias), self.value.type))

    def astype(self, dtype: np.dtype[Any]) -> "Lanes":
        """Rounded to another dtype."""
        if dtype == self.dtype:
            return self
        change = self.builder.fptrunc if dtype.itemsize < self.dtype.itemsize else self.builder.fpext
        return Lanes(self.builder, change(self.value, ir.VectorType(SCALARS[dtype], self.builder.lanes)), dtype)

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
        return self._like(self.builder.call(declared(self.builder, name, signature, kind), [self.value, *others]))


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
    square = r * r
    # What is added to 1 is multiplied with it, so that nothing is rounded twice.
    more = _polynomial(_EXP[x.dtype], r, square).times(square, plus=r)
    scale = rounded.power_of_two()
    return more.times(scale, plus=scale).zero_unless(x, above=math.log(float(about.tiny)) + 1.0)


def _polynomial(coefficients: tuple[float, ...], r: Lanes, square: Lanes) -> Lanes:
    """Even and odd terms, each by Horner's rule: few operations, and half of them need not wait for the others."""
    even, odd = (_by_horner(coefficients[parity::2], square) for parity in (0, 1))
    return odd.times(r, plus=even)


def _by_horner(coefficients: tuple[float, ...], r: Lanes) -> Lanes:
    total = r.constant(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total.times(r, plus=coefficient)
    return total
