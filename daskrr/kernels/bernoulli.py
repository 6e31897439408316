"""The periodic kernel of Bernoulli polynomials."""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from daskrr.kernels import compiled
from daskrr.kernels.base import Columns, Kernel
from daskrr.kernels.common import Array, as_float64, checked_integer, set_fields
from daskrr.kernels.device import here
from daskrr.kernels.lanes import Lanes, Step

_MAX_ORDER = 10


@dataclass(frozen=True)
class Bernoulli(Kernel):
    """The periodic spline kernel of Bernoulli polynomials, a product over features of period 1.

    A feature contributes (-1)^(b-1) B_2b(frac(x - z)) / (2b)!, where b is the order.

    Parameters
    ----------
    order
        The order b, from 1 to 10.

    Examples
    --------
    >>> Bernoulli()([[0.25]], [[0.25], [1.25], [0.75]]).round(4)
    array([[ 0.0833,  0.0833, -0.0417]])
    """

    name: ClassVar[str] = "bernoulli"
    order: int = 1

    def __post_init__(self) -> None:
        set_fields(self, order=checked_integer("order", self.order, 1, _MAX_ORDER))

    @property
    def constant_diagonal(self) -> bool:
        return True

    def _diagonal(self, X: Array) -> Array:
        number = abs(_bernoulli_number(2 * self.order)) / math.factorial(2 * self.order)
        return np.full(len(X), float(number) ** X.shape[1])

    def _columns(self, Z: Array, dtype: np.dtype[Any]) -> Columns:
        # The remainder is exact, so that huge coordinates keep the digits of their fraction.
        return Columns(self._fill, compiled.padded_columns(np.fmod(Z, 1.0)), np.ones(Z.shape[1]))

    def _fill(self, landmarks: Array, weights: Array, X: Array, out: Array) -> None:
        step, fractions = _multiply_polynomial(self.order), np.fmod(as_float64(X), 1.0)
        compiled.pairs(step, 1.0, _as_it_is, fractions, here(landmarks), here(weights), out)


def _as_it_is(product: Lanes) -> Lanes:
    return product


@lru_cache
def _multiply_polynomial(order: int) -> Step:
    """What a feature multiplies by: the polynomial at the fraction of its difference."""
    *coefficients, last = _centred_bernoulli(order)

    def multiply(product: Lanes, difference: Lanes, weight: Lanes) -> Lanes:
        # An even function of the difference, and of the distance to 1/2: symmetric to the last bit.
        t = abs(difference)
        s = t - t.floor() - 0.5
        square, value = s * s, s.constant(last)
        for coefficient in reversed(coefficients):
            value = value.times(square, plus=coefficient)
        return product * value

    return multiply


@lru_cache
def _bernoulli_number(n: int) -> Fraction:
    if n == 0:
        return Fraction(1)
    return -sum((math.comb(n + 1, k) * _bernoulli_number(k) for k in range(n)), Fraction(0)) / (n + 1)


@lru_cache
def _centred_bernoulli(order: int) -> tuple[float, ...]:
    """Return the coefficients of (-1)^(b-1) B_2b(1/2 + s) / (2b)! in rising powers of s²."""
    n = 2 * order
    sign = (-1) ** (order - 1)

    def coefficient(power: int) -> Fraction:
        rest = n - power
        at_half = (Fraction(2, 2**rest) - 1) * _bernoulli_number(rest)
        return sign * math.comb(n, power) * at_half / math.factorial(n)

    return tuple(float(coefficient(power)) for power in range(0, n + 1, 2))
