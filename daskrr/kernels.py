"""Kernels: a formula, its accurate values, and its fast columns against fixed landmarks.

A kernel is a frozen dataclass. Calling it evaluates the formula from the differences of rows, which is
accurate everywhere and slow. `Kernel.columns` prepares the same formula for a fixed set of landmarks:
one matrix product and a few sweeps over a tile, with the few pairs that a matrix product cannot resolve
evaluated again from their differences.
"""

from __future__ import annotations

import importlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from fractions import Fraction
from functools import lru_cache, reduce
from numbers import Integral, Real
from operator import attrgetter
from typing import Any, ClassVar, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray
from scipy.spatial.distance import cdist, pdist

from daskrr.errors import InvalidData, InvalidParameter

__all__ = [
    "KINDS",
    "Bernoulli",
    "Columns",
    "Cosine",
    "Function",
    "Gaussian",
    "Kernel",
    "Laplacian",
    "Linear",
    "Matern",
    "Polynomial",
    "Product",
    "Scaled",
    "Sum",
    "as_kernel",
    "from_spec",
]

Array: TypeAlias = NDArray[Any]
LengthScale: TypeAlias = float | tuple[float, ...] | Literal["median"]

# Values may be wrong by this many unit roundoffs before a pair is evaluated again from its differences.
_TOLERANCE = 64.0
# From this share of a row on, evaluating the whole row again is cheaper than gathering its pairs.
_DENSE = 0.1
# Scratch elements for pairs evaluated again: 2 MiB, so that they stay in cache next to the tile.
_SCRATCH = 1 << 18
_MAX_BERNOULLI_ORDER = 10

# Overflow to infinity and underflow to zero are the right answers for far pairs and huge rows.
_quiet = np.errstate(over="ignore", under="ignore", invalid="ignore")


class Columns(ABC):
    """The columns of a kernel against fixed landmarks, ready to be evaluated panel by panel.

    Objects of this class come from `Kernel.columns`. They can be pickled and hold no scratch memory, so
    that several threads may share one. Values of the distance kernels are right to about 100 unit
    roundoffs of the tile's dtype, and zero where they would not be normal numbers.

    Examples
    --------
    >>> import numpy as np
    >>> columns = Linear().columns(np.eye(3), np.float64)
    >>> out = np.empty((1, 3))
    >>> columns(np.array([[1, 2, 3]]), out)
    >>> out
    array([[1., 2., 3.]])
    """

    @abstractmethod
    def __call__(self, X: Array, out: Array) -> None:
        """Fill ``out`` with the kernel between a panel of rows and the landmarks.

        Parameters
        ----------
        X
            (m, d) rows of any real dtype.
        out
            (m, p) C-contiguous tile of the dtype the columns were prepared for; overwritten.
        """


class Kernel(ABC):
    """A symmetric positive semi-definite function of two rows.

    Kernels can be multiplied by positive numbers, added and multiplied with each other.

    Examples
    --------
    >>> 2.0 * Gaussian(3.0) + Linear()
    Sum(parts=(Scaled(factor=2.0, part=Gaussian(length_scale=3.0)), Linear()))
    """

    name: ClassVar[str]

    @_quiet
    def __call__(self, X: ArrayLike, Z: ArrayLike) -> NDArray[np.float64]:
        """Evaluate the kernel between two sets of rows, accurately.

        Parameters
        ----------
        X
            (m, d) rows of any real dtype.
        Z
            (p, d) rows of any real dtype.

        Returns
        -------
        values
            (m, p) kernel values.

        Raises
        ------
        InvalidData
            If the rows are not two-dimensional and real, or differ in their number of features.
        InvalidParameter
            If the length scale is not resolved or has another number of features.
        """
        rows, others = _rows(X), _rows(Z)
        if rows.shape[1] != others.shape[1]:
            raise InvalidData(f"rows with {rows.shape[1]} and {others.shape[1]} features cannot be compared")
        self._check_ready(rows.shape[1])
        return self._matrix(rows, others)

    @_quiet
    def diagonal(self, X: ArrayLike) -> NDArray[np.float64]:
        """Evaluate the kernel of every row with itself.

        Parameters
        ----------
        X
            (m, d) rows of any real dtype.

        Returns
        -------
        values
            (m,) kernel values.

        Raises
        ------
        InvalidData
            If the rows are not two-dimensional and real.
        InvalidParameter
            If the length scale is not resolved or has another number of features.
        """
        rows = _rows(X)
        self._check_ready(rows.shape[1])
        return self._diagonal(rows)

    @_quiet
    def columns(self, Z: ArrayLike, dtype: DTypeLike) -> Columns:
        """Prepare fast columns against fixed landmarks.

        Parameters
        ----------
        Z
            (p, d) landmarks of any real dtype, at least one.
        dtype
            Dtype of the tiles to fill: float64 or float32.

        Raises
        ------
        InvalidData
            If the landmarks are not two-dimensional, real and finite, or if there are none.
        InvalidParameter
            If the dtype is neither, or the length scale is not resolved or has another number of features.
        """
        landmarks, tile = _rows(Z), np.dtype(dtype)
        if tile not in (np.dtype(np.float64), np.dtype(np.float32)):
            raise InvalidParameter(f"kernel columns are float64 or float32, not {tile}")
        if len(landmarks) == 0 or not np.isfinite(landmarks).all():
            raise InvalidData("kernel columns need at least one landmark, and finite ones")
        self._check_ready(landmarks.shape[1])
        return self._columns(landmarks, tile)

    @property
    def constant_diagonal(self) -> bool:
        """Whether the kernel of a row with itself is the same for every row."""
        return False

    @property
    def needs_sample(self) -> bool:
        """Whether `resolve` must replace a length scale before the kernel can be evaluated."""
        return any(part.needs_sample for part in self._parts)

    def check_features(self, n_features: int) -> None:
        """Check that the kernel can take rows with this many features.

        Raises
        ------
        InvalidParameter
            If a length scale per feature has another length.
        """
        for part in self._parts:
            part.check_features(n_features)

    def resolve(self, sample: ArrayLike) -> Kernel:
        """Replace every length scale ``"median"`` by the median distance between rows of a sample.

        Parameters
        ----------
        sample
            (m, d) rows; all m (m - 1) / 2 distances are computed.

        Raises
        ------
        InvalidData
            If there are fewer than two rows, or the median is zero or not finite.

        Examples
        --------
        >>> Gaussian("median").resolve([[0.0], [1.0], [3.0]])
        Gaussian(length_scale=2.0)
        """
        return self

    def to_spec(self) -> dict[str, Any]:
        """Describe the kernel by JSON values, from which `from_spec` makes it again.

        Examples
        --------
        >>> Gaussian(5.0).to_spec()
        {'kernel': 'gaussian', 'length_scale': 5.0}
        """
        values = {f.name: _plain(getattr(self, f.name)) for f in fields(cast(Any, self))}
        return {"kernel": self.name, **values}

    def __mul__(self, other: Kernel | float) -> Kernel:
        if isinstance(other, Kernel):
            return Product((self, other))
        return Scaled(other, self) if isinstance(other, Real) else NotImplemented

    def __rmul__(self, other: float) -> Kernel:
        return Scaled(other, self) if isinstance(other, Real) else NotImplemented

    def __add__(self, other: Kernel) -> Kernel:
        return Sum((self, other)) if isinstance(other, Kernel) else NotImplemented

    @property
    def _parts(self) -> tuple[Kernel, ...]:
        return ()

    def _check_ready(self, n_features: int) -> None:
        if self.needs_sample:
            raise InvalidParameter(f"{self!r} has a length scale to be resolved: call resolve(sample) first")
        self.check_features(n_features)

    @classmethod
    def _from_values(cls, values: dict[str, Any], allow_functions: Collection[str]) -> Kernel:
        return cls(**values)

    @abstractmethod
    def _matrix(self, X: Array, Z: Array) -> Array: ...

    @abstractmethod
    def _diagonal(self, X: Array) -> Array: ...

    @abstractmethod
    def _columns(self, Z: Array, dtype: np.dtype[Any]) -> Columns: ...


# --- Kernels of the inner product ---------------------------------------------------------------------


class _DotKernel(Kernel):
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
        return _DotColumns(self, Z, dtype)


class _DotColumns(Columns):
    def __init__(self, kernel: _DotKernel, Z: Array, dtype: np.dtype[Any]) -> None:
        self._kernel = kernel
        self._landmarks = kernel._lift_landmarks(Z).T.astype(dtype, order="C")

    @_quiet
    def __call__(self, X: Array, out: Array) -> None:
        np.matmul(self._kernel._lift(X).astype(out.dtype, copy=False), self._landmarks, out=out)
        self._kernel._finish(out)


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
        return _squares(X)


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

    Raises
    ------
    InvalidParameter
        If a parameter is outside its range.

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
        _set(self, degree=_integer("degree", self.degree, 1, None))
        _set(self, offset=_number("offset", self.offset, zero=True), scale=_number("scale", self.scale))

    def _lift_landmarks(self, Z: Array) -> Array:
        return Z * self.scale

    def _finish(self, out: Array) -> None:
        np.add(out, self.offset, out=out)
        _raise_to(self.degree, out)

    def _diagonal(self, X: Array) -> Array:
        return np.power(self.scale * _squares(X) + self.offset, self.degree)


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
        largest = np.max(np.abs(X.astype(np.float64, copy=False)), axis=1, keepdims=True, initial=0.0)
        unit = X / np.where(largest == 0.0, 1.0, largest)
        norms = np.sqrt(_squares(unit))[:, None]
        return unit / np.where(norms == 0.0, 1.0, norms)

    def _diagonal(self, X: Array) -> Array:
        return np.any(X != 0, axis=1).astype(np.float64)


# --- Kernels of the distance --------------------------------------------------------------------------


@dataclass(frozen=True)
class _DistanceKernel(Kernel):
    length_scale: LengthScale
    _metric: ClassVar[str] = "euclidean"

    def __post_init__(self) -> None:
        _set(self, length_scale=_length_scale(self.length_scale))

    @property
    def constant_diagonal(self) -> bool:
        return True

    @property
    def needs_sample(self) -> bool:
        return self.length_scale == "median"

    def check_features(self, n_features: int) -> None:
        if isinstance(self.length_scale, tuple) and len(self.length_scale) != n_features:
            given = len(self.length_scale)
            raise InvalidParameter(f"length_scale has {given} entries, the rows have {n_features} features")

    def resolve(self, sample: ArrayLike) -> Kernel:
        if not self.needs_sample:
            return self
        rows = _rows(sample)
        if len(rows) < 2:
            raise InvalidData("the median distance needs at least two rows: give length_scale as a number")
        median = float(np.median(pdist(rows, self._metric)))
        if not 0 < median < math.inf:
            raise InvalidData(f"the median distance of the sample is {median}: give length_scale as a number")
        return replace(self, length_scale=median)

    def _diagonal(self, X: Array) -> Array:
        return np.ones(len(X))

    def _scales(self, n_features: int) -> Array:
        return np.broadcast_to(np.asarray(self.length_scale, np.float64), (n_features,))


class _RadialKernel(_DistanceKernel):
    """A function of eta = gain |x - z|²/l², where every subclass chooses its gain."""

    # Below this ratio of the error of eta to the tolerance, no distance is too short for a matrix product.
    _harmless: ClassVar[float]

    @property
    @abstractmethod
    def _gain(self) -> float: ...

    @abstractmethod
    def _profile(self, out: Array) -> None:
        """Turn -eta into kernel values in place."""

    @abstractmethod
    def _cutoff(self, ratio: Array) -> Array:
        """Bound eta beyond which an error of ``ratio`` tolerances in eta is within tolerance in value.

        It solves ratio |dk/d eta| <= 1 from above; ratios are larger than `_harmless`.
        """

    def _matrix(self, X: Array, Z: Array) -> Array:
        out = np.empty((len(X), len(Z)))
        _DifferenceColumns(self, Z)(X, out)
        return out

    def _columns(self, Z: Array, dtype: np.dtype[Any]) -> Columns:
        # Rows of few features have many near pairs; differences of all pairs cost less than mending those.
        return _RadialColumns(self, Z, dtype) if Z.shape[1] > 4 else _DifferenceColumns(self, Z)


class _DifferenceColumns(Columns):
    """Radial columns from the differences of rows."""

    def __init__(self, kernel: _RadialKernel, Z: Array) -> None:
        self._kernel = kernel
        # Powers of two scale without rounding, so that differences lose nothing; what remains of the
        # length scales weighs the squares.
        mantissas, self._exponents = np.frexp(kernel._scales(Z.shape[1]))
        self._weights = kernel._gain / np.square(mantissas)
        self._landmarks = self._scaled(Z)

    @_quiet
    def __call__(self, X: Array, out: Array) -> None:
        self.exponents(X, out)
        self._kernel._profile(out)

    def exponents(self, X: Array, out: Array) -> None:
        """Compute -eta of all pairs."""
        squares = cdist(self._scaled(X), self._landmarks, "sqeuclidean", w=self._weights)
        np.negative(squares, out=out, casting="same_kind")

    def mend(self, X: Array, i: Array, j: Array, out: Array) -> None:
        """Compute -eta of single pairs."""
        rows = self._scaled(X)
        step = max(1, _SCRATCH // max(1, X.shape[1]))
        for start in range(0, i.size, step):
            a, b = i[start : start + step], j[start : start + step]
            differences = rows[a] - self._landmarks[b]
            out[a, b] = -np.matmul(np.square(differences, out=differences), self._weights)

    def _scaled(self, X: Array) -> Array:
        return np.ldexp(_as_float64(X), -self._exponents)


class _RadialColumns(Columns):
    def __init__(self, kernel: _RadialKernel, Z: Array, dtype: np.dtype[Any]) -> None:
        n_landmarks, n_features = Z.shape
        self._kernel = kernel
        self._differences = _DifferenceColumns(kernel, Z)
        # Dividing before the sum, since the sum of huge rows would overflow.
        self._centre = np.sum(Z / n_landmarks, axis=0)
        self._scales = kernel._scales(n_features) / math.sqrt(2 * kernel._gain)
        lifted, squares = self._lift(Z, np.empty((0, 0), dtype))
        lifted[:, -2:] = lifted[:, [-1, -2]]
        self._landmarks = np.ascontiguousarray(lifted.T)
        self._largest = float(np.max(squares))
        # Error of the squared distance in units of u (|x|² + |z|²): rounding of the rows and of their
        # norms, and the random walk of the rounding errors along the sum over features.
        self._growth = 4.0 + 0.5 * math.sqrt(n_features)

    @_quiet
    def __call__(self, X: Array, out: Array) -> None:
        lifted, squares = self._lift(X, out)
        np.matmul(lifted, self._landmarks, out=out)
        self._mend(X, squares, out)
        self._kernel._profile(out)

    def _lift(self, X: Array, like: Array) -> tuple[Array, Array]:
        """Centre and scale rows, and append the two features that complete the square.

        With landmarks [z, 1, -|z|²/2], rows [x, -|x|²/2, 1] have inner products -|x - z|²/2.
        """
        n_rows, n_features = X.shape
        lifted = np.empty_like(like, shape=(n_rows, n_features + 2))
        rows = lifted[:, :n_features]
        # In float64 until the centre is gone: a common offset must not cost float32 its digits.
        np.divide(np.subtract(X, self._centre), self._scales, out=rows, casting="same_kind")
        squares = _squares(rows)
        np.multiply(squares, -0.5, out=lifted[:, n_features], casting="same_kind")
        lifted[:, n_features + 1] = 1.0
        return lifted, squares

    def _mend(self, X: Array, squares: Array, out: Array) -> None:
        """Evaluate pairs again, from differences, whose values the matrix product leaves wrong."""
        ratio = (squares + self._largest) * (self._growth / (2 * _TOLERANCE))
        if not np.any(~(ratio <= self._kernel._harmless)):
            return
        bound = self._bounds(ratio, out.dtype)
        # Not-less instead of greater, so that rows which overflowed to NaN are caught as well.
        rows = np.flatnonzero(~(np.max(out, axis=1) < -bound))
        if rows.size == 0:
            return
        i, j = np.nonzero(~(out[rows] < -bound[rows, None]))
        if i.size > _DENSE * rows.size * out.shape[1]:
            tile = np.empty_like(out, shape=(rows.size, out.shape[1]))
            self._differences.exponents(X[rows], tile)
            out[rows] = tile
        else:
            self._differences.mend(X, rows[i], j, out)

    def _bounds(self, ratio: Array, dtype: np.dtype[Any]) -> Array:
        harmless = self._kernel._harmless
        error = ratio * (_TOLERANCE * np.finfo(dtype).eps / 2)
        # The computed distance may itself be off by the error.
        bound = self._kernel._cutoff(np.maximum(ratio, harmless)) + error
        bound[ratio <= harmless] = -np.inf
        return bound


@dataclass(frozen=True)
class Gaussian(_RadialKernel):
    """The Gaussian exp(-|x - z|² / (2 l²)).

    Parameters
    ----------
    length_scale
        The scale l: a positive number, one per feature, or ``"median"``.

    Raises
    ------
    InvalidParameter
        If the length scale is none of these.

    Examples
    --------
    >>> Gaussian(1.0)([[0.0]], [[0.0], [1.0]]).round(4)
    array([[1.    , 0.6065]])
    """

    name: ClassVar[str] = "gaussian"
    _harmless: ClassVar[float] = 1.0

    @property
    def _gain(self) -> float:
        return 0.5

    def _profile(self, out: Array) -> None:
        # Round-off above zero is rare, and looking for it costs a third of clipping.
        if np.max(out, initial=0.0) > 0.0:
            np.minimum(out, 0.0, out=out)
        _exponentiate(out)

    def _cutoff(self, ratio: Array) -> Array:
        return np.log(ratio)


@dataclass(frozen=True)
class Matern(_RadialKernel):
    """The Matérn kernel of smoothness 1/2, 3/2 or 5/2.

    With a = sqrt(2 nu) |x - z| / l it is exp(-a), (1 + a) exp(-a) or (1 + a + a²/3) exp(-a).

    Parameters
    ----------
    length_scale
        The scale l: a positive number, one per feature, or ``"median"``.
    nu
        The smoothness: 0.5, 1.5 or 2.5.

    Raises
    ------
    InvalidParameter
        If the length scale or the smoothness is none of these.

    Examples
    --------
    >>> Matern(1.0, nu=0.5)([[0.0]], [[0.0], [1.0]]).round(4)
    array([[1.    , 0.3679]])
    """

    name: ClassVar[str] = "matern"
    nu: float = 1.5

    def __post_init__(self) -> None:
        super().__post_init__()
        _set(self, nu=_number("nu", self.nu))
        if self.nu not in (0.5, 1.5, 2.5):
            raise InvalidParameter(f"nu must be 0.5, 1.5 or 2.5, not {self.nu!r}")

    @property
    def _gain(self) -> float:
        return 2 * self.nu

    @property
    def _harmless(self) -> float:  # type: ignore[override]
        return {0.5: 0.0, 1.5: 2.0, 2.5: 6.0}[self.nu]

    def _profile(self, out: Array) -> None:
        # The magnitude, not a clip: a negative square within its error is as near to zero either way. The
        # bound keeps infinity times zero out; beyond it the values are zero.
        np.minimum(np.abs(out, out=out), 1e6, out=out)
        if self.nu == 0.5:
            _exponentiate(np.negative(np.sqrt(out, out=out), out=out))
            return
        a = np.sqrt(out)
        np.add(np.multiply(out, 1 / 3 if self.nu == 2.5 else 0.0, out=out), a, out=out)
        np.add(out, 1.0, out=out)
        _exponentiate(np.negative(a, out=a))
        np.multiply(out, a, out=out)

    def _cutoff(self, ratio: Array) -> Array:
        if self.nu == 0.5:
            # |dk/d eta| = exp(-a)/(2a), and a exp(a) >= r/2 holds at a = log(1 + r/2).
            return np.square(np.log1p(ratio / 2))
        if self.nu == 1.5:
            return np.square(np.log(ratio / 2))
        # |dk/d eta| = (1 + a) exp(-a)/6, and 1 + a <= 2 exp((a - 1)/2) bounds a; a step of the fixed-point
        # iteration a = log(r/6) + log(1 + a) from a bound gives a closer bound.
        excess = np.log(ratio / 6)
        return np.square(excess + np.log1p(2 * (excess + math.log(2) - 0.5)))


@dataclass(frozen=True)
class Laplacian(_DistanceKernel):
    """The Laplacian exp(-|x - z|₁ / l), of the sum of absolute differences.

    Parameters
    ----------
    length_scale
        The scale l: a positive number, one per feature, or ``"median"``.

    Raises
    ------
    InvalidParameter
        If the length scale is none of these.

    Examples
    --------
    >>> Laplacian(2.0)([[0.0, 0.0]], [[1.0, -1.0]]).round(4)
    array([[0.3679]])
    """

    name: ClassVar[str] = "laplacian"
    _metric: ClassVar[str] = "cityblock"

    def _matrix(self, X: Array, Z: Array) -> Array:
        out = np.empty((len(X), len(Z)))
        _LaplacianColumns(self, Z)(X, out)
        return out

    def _columns(self, Z: Array, dtype: np.dtype[Any]) -> Columns:
        return _LaplacianColumns(self, Z)


class _LaplacianColumns(Columns):
    def __init__(self, kernel: Laplacian, Z: Array) -> None:
        mantissas, self._exponents = np.frexp(kernel._scales(Z.shape[1]))
        self._weights = 1 / mantissas
        self._landmarks = np.ldexp(Z, -self._exponents)

    @_quiet
    def __call__(self, X: Array, out: Array) -> None:
        rows = np.ldexp(_as_float64(X), -self._exponents)
        # cdist releases the interpreter lock, as the ufuncs do.
        distances = cdist(rows, self._landmarks, "cityblock", w=self._weights)
        np.negative(distances, out=out, casting="same_kind")
        _exponentiate(out)


# --- The periodic kernel ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bernoulli(Kernel):
    """The periodic spline kernel of Bernoulli polynomials, a product over features of period 1.

    A feature contributes (-1)^(b-1) B_2b(frac(x - z)) / (2b)!, where b is the order.

    Parameters
    ----------
    order
        The order b, from 1 to 10.

    Raises
    ------
    InvalidParameter
        If the order is outside its range.

    Examples
    --------
    >>> Bernoulli()([[0.25]], [[0.25], [1.25], [0.75]]).round(4)
    array([[ 0.0833,  0.0833, -0.0417]])
    """

    name: ClassVar[str] = "bernoulli"
    order: int = 1

    def __post_init__(self) -> None:
        _set(self, order=_integer("order", self.order, 1, _MAX_BERNOULLI_ORDER))

    @property
    def constant_diagonal(self) -> bool:
        return True

    def _matrix(self, X: Array, Z: Array) -> Array:
        out = np.empty((len(X), len(Z)))
        _BernoulliColumns(self, Z)(X, out)
        return out

    def _diagonal(self, X: Array) -> Array:
        number = abs(_bernoulli_number(2 * self.order)) / math.factorial(2 * self.order)
        return np.full(len(X), float(number) ** X.shape[1])

    def _columns(self, Z: Array, dtype: np.dtype[Any]) -> Columns:
        return _BernoulliColumns(self, Z)


class _BernoulliColumns(Columns):
    def __init__(self, kernel: Bernoulli, Z: Array) -> None:
        self._coefficients = _centred_bernoulli(kernel.order)
        # The remainder is exact, so that huge coordinates keep the digits of their fraction.
        self._landmarks = np.fmod(Z, 1.0)

    @_quiet
    def __call__(self, X: Array, out: Array) -> None:
        rows = np.fmod(_as_float64(X), 1.0)
        t = np.empty(out.shape)
        values = np.empty(out.shape)
        out[...] = 1.0
        for k in range(rows.shape[1]):
            np.subtract(rows[:, k, None], self._landmarks[None, :, k], out=t)
            self._polynomial(t, values)
            np.multiply(out, values, out=out, casting="same_kind")

    def _polynomial(self, t: Array, values: Array) -> None:
        """Evaluate the polynomial at the fractions of differences by Horner's rule; overwrites ``t``."""
        # An even function of the difference, and of the distance to 1/2: symmetric to the last bit.
        np.abs(t, out=t)
        np.subtract(t, np.floor(t, out=values), out=t)
        np.square(np.subtract(t, 0.5, out=t), out=t)
        values[...] = self._coefficients[-1]
        for coefficient in self._coefficients[-2::-1]:
            np.multiply(values, t, out=values)
            np.add(values, coefficient, out=values)


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


# --- Compositions -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scaled(Kernel):
    """A kernel multiplied by a positive number.

    Parameters
    ----------
    factor
        Positive and finite.
    part
        The kernel to multiply; the factor of a scaled kernel is merged.

    Raises
    ------
    InvalidParameter
        If the factor is not positive and finite, or the part is not a kernel.

    Examples
    --------
    >>> 2 * Linear() * 3
    Scaled(factor=6.0, part=Linear())
    """

    name: ClassVar[str] = "scaled"
    factor: float
    part: Kernel

    def __post_init__(self) -> None:
        part = _kernels("part", [self.part])[0]
        if isinstance(part, Scaled):
            _set(self, factor=self.factor * part.factor, part=part.part)
        _set(self, factor=_number("factor", self.factor))

    @property
    def constant_diagonal(self) -> bool:
        return self.part.constant_diagonal

    @property
    def _parts(self) -> tuple[Kernel, ...]:
        return (self.part,)

    def resolve(self, sample: ArrayLike) -> Kernel:
        return Scaled(self.factor, self.part.resolve(sample))

    @classmethod
    def _from_values(cls, values: dict[str, Any], allow_functions: Collection[str]) -> Kernel:
        return cls(values["factor"], from_spec(values["part"], allow_functions))

    def _matrix(self, X: Array, Z: Array) -> Array:
        return self.factor * self.part._matrix(X, Z)

    def _diagonal(self, X: Array) -> Array:
        return self.factor * self.part._diagonal(X)

    def _columns(self, Z: Array, dtype: np.dtype[Any]) -> Columns:
        return _ScaledColumns(self.factor, self.part._columns(Z, dtype))


class _ScaledColumns(Columns):
    def __init__(self, factor: float, part: Columns) -> None:
        self._factor = factor
        self._part = part

    @_quiet
    def __call__(self, X: Array, out: Array) -> None:
        self._part(X, out)
        np.multiply(out, self._factor, out=out)


@dataclass(frozen=True)
class _Combination(Kernel):
    parts: tuple[Kernel, ...]
    _combine: ClassVar[np.ufunc]

    def __post_init__(self) -> None:
        flat: list[Kernel] = []
        for part in _kernels("parts", self.parts):
            flat.extend(part.parts if isinstance(part, type(self)) else (part,))
        if len(flat) < 2:
            raise InvalidParameter(f"a {self.name} needs at least two kernels, not {len(flat)}")
        _set(self, parts=tuple(flat))

    @property
    def constant_diagonal(self) -> bool:
        return all(part.constant_diagonal for part in self.parts)

    @property
    def _parts(self) -> tuple[Kernel, ...]:
        return self.parts

    def resolve(self, sample: ArrayLike) -> Kernel:
        return type(self)(tuple(part.resolve(sample) for part in self.parts))

    @classmethod
    def _from_values(cls, values: dict[str, Any], allow_functions: Collection[str]) -> Kernel:
        if not isinstance(values["parts"], list | tuple):
            raise InvalidParameter(f"parts must be a list of kernel specs, not {values['parts']!r}")
        return cls(tuple(from_spec(part, allow_functions) for part in values["parts"]))

    def _matrix(self, X: Array, Z: Array) -> Array:
        return reduce(self._combine, (part._matrix(X, Z) for part in self.parts))

    def _diagonal(self, X: Array) -> Array:
        return reduce(self._combine, (part._diagonal(X) for part in self.parts))

    def _columns(self, Z: Array, dtype: np.dtype[Any]) -> Columns:
        return _CombinedColumns(self._combine, [part._columns(Z, dtype) for part in self.parts])


class _CombinedColumns(Columns):
    def __init__(self, combine: np.ufunc, parts: list[Columns]) -> None:
        self._combine = combine
        self._parts = parts

    @_quiet
    def __call__(self, X: Array, out: Array) -> None:
        self._parts[0](X, out)
        scratch = np.empty_like(out)
        for part in self._parts[1:]:
            part(X, scratch)
            self._combine(out, scratch, out=out)


@dataclass(frozen=True)
class Sum(_Combination):
    """The sum of two or more kernels.

    Parameters
    ----------
    parts
        The kernels to add; sums among them are flattened.

    Raises
    ------
    InvalidParameter
        If there are fewer than two parts, or one is not a kernel.

    Examples
    --------
    >>> (Linear() + Cosine() + Linear())([[2.0]], [[3.0]])
    array([[13.]])
    """

    name: ClassVar[str] = "sum"
    _combine: ClassVar[np.ufunc] = np.add


@dataclass(frozen=True)
class Product(_Combination):
    """The product of two or more kernels.

    Parameters
    ----------
    parts
        The kernels to multiply; products among them are flattened.

    Raises
    ------
    InvalidParameter
        If there are fewer than two parts, or one is not a kernel.

    Examples
    --------
    >>> (Linear() * Cosine() * Linear())([[2.0]], [[3.0]])
    array([[36.]])
    """

    name: ClassVar[str] = "product"
    _combine: ClassVar[np.ufunc] = np.multiply


# --- Kernels of the user ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Function(Kernel):
    """A kernel computed by an importable Python function.

    Parameters
    ----------
    function
        Takes (m, d) and (p, d) float64 rows and the parameters, returns (m, p) kernel values. It may have
        an attribute ``diagonal``, a function of (m, d) rows and the parameters that returns (m,) values.
    parameters
        Keyword arguments of the function; JSON values.

    Raises
    ------
    InvalidParameter
        If the function cannot be imported by its name, or the parameters are not JSON values.

    Examples
    --------
    >>> Function(np.inner)([[1.0, 2.0]], [[3.0, 4.0]])
    array([[11.]])
    """

    name: ClassVar[str] = "function"
    function: Callable[..., Any]
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        name = _function_name(self.function)
        if not isinstance(self.parameters, Mapping) or not all(isinstance(k, str) for k in self.parameters):
            raise InvalidParameter(f"parameters of {name} must be a mapping of names, not {self.parameters!r}")
        try:
            # What is evaluated here must be what a spec read elsewhere evaluates.
            _set(self, parameters=json.loads(json.dumps(dict(self.parameters), allow_nan=False)))
        except (TypeError, ValueError) as error:
            raise InvalidParameter(f"parameters of {name} must be JSON values: {error}") from None

    @classmethod
    def _from_values(cls, values: dict[str, Any], allow_functions: Collection[str]) -> Kernel:
        name = values["function"]
        if not isinstance(name, str) or name.count(":") != 1:
            raise InvalidParameter(f"function must be named 'package.module:function', not {name!r}")
        if name not in allow_functions:
            raise InvalidParameter(f"the kernel would import {name!r}: list it in allow_functions to allow this")
        return cls(_import(name), values.get("parameters", {}))

    def _matrix(self, X: Array, Z: Array) -> Array:
        return self._checked(self.function(X, Z, **self.parameters), (len(X), len(Z)))

    def _diagonal(self, X: Array) -> Array:
        diagonal = getattr(self.function, "diagonal", None)
        if callable(diagonal):
            return self._checked(diagonal(X, **self.parameters), (len(X),))
        # Small blocks: all but their diagonals is thrown away.
        blocks = [X[start : start + 16] for start in range(0, len(X), 16)]
        return np.concatenate([np.zeros(0), *(np.diagonal(self._matrix(block, block)) for block in blocks)])

    def _columns(self, Z: Array, dtype: np.dtype[Any]) -> Columns:
        return _FunctionColumns(self, Z)

    def _checked(self, values: Any, shape: tuple[int, ...]) -> Array:
        array = np.asarray(values)
        name = _function_name(self.function)
        if array.shape != shape:
            raise InvalidParameter(f"{name} returned values of shape {array.shape} instead of {shape}")
        if array.dtype.kind not in "biuf":
            raise InvalidParameter(f"{name} returned {array.dtype} instead of real numbers")
        return _as_float64(array)


class _FunctionColumns(Columns):
    def __init__(self, kernel: Function, Z: Array) -> None:
        self._kernel = kernel
        self._landmarks = Z.copy()

    @_quiet
    def __call__(self, X: Array, out: Array) -> None:
        out[...] = self._kernel._matrix(_as_float64(X), self._landmarks)


def _function_name(function: Any) -> str:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not callable(function) or not module or not name or "<" in name or module == "__main__":
        raise InvalidParameter(
            f"{function!r} has no name to import it by: define it at the top of an importable module"
        )
    full = f"{module}:{name}"
    if _import(full) is not function:
        raise InvalidParameter(f"{full} is another object than {function!r}: workers would import the wrong one")
    return full


def _import(name: str) -> Callable[..., Any]:
    module, _, path = name.partition(":")
    try:
        found = attrgetter(path)(importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidParameter(f"{name!r} cannot be imported: {error}") from error
    if not callable(found):
        raise InvalidParameter(f"{name!r} is not a function")
    return cast(Callable[..., Any], found)


# --- Specs --------------------------------------------------------------------------------------------

_ALL: tuple[type[Kernel], ...] = (
    Linear,
    Gaussian,
    Laplacian,
    Matern,
    Polynomial,
    Cosine,
    Bernoulli,
    Scaled,
    Sum,
    Product,
    Function,
)
KINDS: dict[str, type[Kernel]] = {kind.name: kind for kind in _ALL}
"""Every kernel class by the name its specs carry."""


def from_spec(spec: Mapping[str, Any], allow_functions: Collection[str] = ()) -> Kernel:
    """Make a kernel from the description that `Kernel.to_spec` gives.

    Parameters
    ----------
    spec
        The description.
    allow_functions
        Names ``"package.module:function"`` which the description may import and call.

    Raises
    ------
    InvalidParameter
        If the description is not one of a kernel, or names a function that is not allowed.

    Examples
    --------
    >>> from_spec({"kernel": "matern", "length_scale": 2.0, "nu": 0.5})
    Matern(length_scale=2.0, nu=0.5)
    """
    if not isinstance(spec, Mapping):
        raise InvalidParameter(f"a kernel spec is a mapping with the key 'kernel', not {spec!r}")
    values = dict(spec)
    kind = values.pop("kernel", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise InvalidParameter(f"unknown kernel {kind!r}: choose one of {', '.join(KINDS)}")
    known = {f.name: f for f in fields(cast(Any, KINDS[kind]))}
    if unknown := [key for key in values if key not in known]:
        raise InvalidParameter(f"kernel {kind!r} has no parameter {unknown[0]!r}, only {', '.join(known)}")
    for key, parameter in known.items():
        if key not in values and parameter.default is MISSING and parameter.default_factory is MISSING:
            raise InvalidParameter(f"kernel {kind!r} needs the parameter {key!r}")
    return KINDS[kind]._from_values(values, allow_functions)


def as_kernel(obj: Kernel | Mapping[str, Any] | Callable[..., Any], allow_functions: Collection[str] = ()) -> Kernel:
    """Make a kernel from a kernel, a description of one, or an importable function.

    Parameters
    ----------
    obj
        A kernel, a spec, or a function of (m, d) and (p, d) rows.
    allow_functions
        Names ``"package.module:function"`` which a spec may import and call.

    Raises
    ------
    InvalidParameter
        If it is none of these.

    Examples
    --------
    >>> as_kernel({"kernel": "linear"})
    Linear()
    """
    if isinstance(obj, Kernel):
        return obj
    if isinstance(obj, Mapping):
        return from_spec(obj, allow_functions)
    if isinstance(obj, type) or not callable(obj):
        raise InvalidParameter(f"{obj!r} is not a kernel, a kernel spec or a function of two sets of rows")
    return Function(obj)


def _plain(value: Any) -> Any:
    if isinstance(value, Kernel):
        return value.to_spec()
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict):
        return json.loads(json.dumps(value))
    return _function_name(value) if callable(value) else value


# --- Parameters and rows ------------------------------------------------------------------------------


def _set(kernel: Kernel, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(kernel, name, value)


def _number(name: str, value: Any, *, zero: bool = False) -> float:
    if isinstance(value, Real) and not isinstance(value, bool):
        number = float(value)
        if math.isfinite(number) and (number > 0 or (zero and number == 0)):
            return number
    kind = "finite number that is not negative" if zero else "positive finite number"
    raise InvalidParameter(f"{name} must be a {kind}, not {value!r}")


def _integer(name: str, value: Any, low: int, high: int | None) -> int:
    valid = isinstance(value, Integral) and not isinstance(value, bool)
    if valid and low <= value and (high is None or value <= high):
        return int(value)
    bounds = f"at least {low}" if high is None else f"from {low} to {high}"
    raise InvalidParameter(f"{name} must be an integer {bounds}, not {value!r}")


def _length_scale(value: Any) -> LengthScale:
    if isinstance(value, str) and value == "median":
        return "median"
    if isinstance(value, np.ndarray) and value.ndim == 1:
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes) and len(value) > 0:
        return tuple(_number("every length_scale", entry) for entry in value)
    if isinstance(value, Real):
        return _number("length_scale", value)
    raise InvalidParameter(f"length_scale must be a number, one per feature or 'median', not {value!r}")


def _kernels(name: str, values: Any) -> list[Kernel]:
    if not isinstance(values, list | tuple) or not all(isinstance(value, Kernel) for value in values):
        raise InvalidParameter(f"{name} must be made of kernels, not {values!r}")
    return list(values)


def _rows(X: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(X)
    if array.ndim != 2:
        raise InvalidData(f"rows must be a two-dimensional array, not one of shape {array.shape}")
    if array.dtype.kind not in "biuf":
        raise InvalidData(f"rows must be real numbers, not {array.dtype}")
    return _as_float64(array)


def _as_float64(X: Array) -> NDArray[np.float64]:
    return X.astype(np.float64, copy=False)


def _squares(X: Array, weights: Array | None = None) -> Array:
    """Return the squared norms of rows, summed in float64."""
    if weights is None:
        return np.einsum("ij,ij->i", X, X, dtype=np.float64)
    return np.einsum("ij,ij,j->i", X, X, weights, dtype=np.float64)


def _exponentiate(out: Array) -> None:
    """Take exponentials of numbers up to zero in place, with zero instead of subnormal numbers.

    A subnormal result takes a hundred times as long, here and in every product it enters.
    """
    lowest = math.log(float(np.finfo(out.dtype).tiny)) + 1.0
    if not np.min(out, initial=0.0) < lowest:
        np.exp(out, out=out)
        return
    np.exp(np.maximum(out, lowest, out=out), out=out)
    np.copyto(out, 0.0, where=out < 1.01 * math.exp(lowest))


def _raise_to(degree: int, out: Array) -> None:
    """Raise to an integer power in place by repeated squaring, which is faster than a general power."""
    bits = bin(degree)[3:]
    base = out.copy() if "1" in bits else out
    for bit in bits:
        np.square(out, out=out)
        if bit == "1":
            np.multiply(out, base, out=out)
