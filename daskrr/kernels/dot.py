"""Kernels of the inner product of two rows."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from daskrr.kernels import products
from daskrr.kernels.base import Columns, Kernel
from daskrr.kernels.common import (
    Array,
    as_float64,
    checked_integer,
    checked_number,
    contiguous,
    set_fields,
    squared_norms,
)


class _DotKernel(Kernel):
    @property
    def landmark_copies(self) -> int:
        """Lifted, and transposed."""
        return 2

    def _lift(self, X: Array) -> Array:
        return X

    def _lift_landmarks(self, Z: Array) -> Array:
        return self._lift(Z)

    def _finish(self, out: Array) -> None:
        """Turn inner products into kernel values in place."""

    def _matrix(self, X: Array, Z: Array) -> Array:
        out = np.matmul(self._lift(X), self._lift_landmarks(Z).T)
        self._finish(out)
        return out

    def _columns(self, Z: Array, dtype: np.dtype[Any]) -> Columns:
        return Columns(self._fill, self._lift_landmarks(Z).T.astype(dtype, order="C"))

    def _fill(self, landmarks: Array, X: Array, out: Array) -> None:
        products.times(contiguous(self._lift(X).astype(out.dtype, copy=False)), landmarks, out)
        self._finish(out)


@dataclass(frozen=True)
class Linear(_DotKernel):
    """The inner product x·z.

    Examples
    --------
    >>> Linear()([[1, 2]], [[3, 4]])
    array([[11.]])
    """

    name: ClassVar[str] = "linear"

    def _diagonal(self, X: Array) -> Array:
        return squared_norms(X)


@dataclass(frozen=True)
class Polynomial(_DotKernel):
    """The power (scale x·z + offset)^degree.

    Parameters
    ----------
    degree
        At least 1.
    offset
        At least 0.
    scale
        Positive.

    Examples
    --------
    >>> Polynomial(degree=2)([[1, 2]], [[3, 4]])
    array([[144.]])
    """

    name: ClassVar[str] = "polynomial"
    degree: int = 2
    offset: float = 1.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        set_fields(self, degree=checked_integer("degree", self.degree, 1))
        set_fields(self, offset=checked_number("offset", self.offset, zero=True))
        set_fields(self, scale=checked_number("scale", self.scale))

    def _lift_landmarks(self, Z: Array) -> Array:
        return Z * self.scale

    def _finish(self, out: Array) -> None:
        np.add(out, self.offset, out=out)
        # Repeated squaring, which is faster than a general power.
        bits = bin(self.degree)[3:]
        base = out.copy() if "1" in bits else out
        for bit in bits:
            np.square(out, out=out)
            if bit == "1":
                np.multiply(out, base, out=out)

    def _diagonal(self, X: Array) -> Array:
        return np.power(self.scale * squared_norms(X) + self.offset, self.degree)


@dataclass(frozen=True)
class Cosine(_DotKernel):
    """The cosine of the angle between two rows, zero for rows of zeros.

    Examples
    --------
    >>> Cosine()([[2, 0], [0, 0]], [[3, 0], [0, 7]])
    array([[1., 0.],
           [0., 0.]])
    """

    name: ClassVar[str] = "cosine"

    def _lift(self, X: Array) -> Array:
        # Dividing by the largest entry first keeps the squares of tiny and huge rows in range.
        largest = np.max(np.abs(as_float64(X)), axis=1, keepdims=True)
        unit = X / np.where(largest == 0.0, 1.0, largest)
        norms = np.sqrt(squared_norms(unit))[:, None]
        unit /= np.where(norms == 0.0, 1.0, norms)
        return unit

    def _diagonal(self, X: Array) -> Array:
        return np.any(X != 0, axis=1).astype(np.float64)
