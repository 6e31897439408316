"""Kernels of the Euclidean distance, whose columns take one matrix product.

The distance of a near pair drowns in the rounding of |x|² + |z|² - 2 x·z when the rows are long. Where this
shows in the value of the kernel, the pair is evaluated again from the difference of its rows.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from scipy.spatial.distance import cdist

from daskrr.errors import InvalidParameter
from daskrr.kernels import compiled, products
from daskrr.kernels.base import Columns, panels
from daskrr.kernels.common import Array, checked_number, set_fields
from daskrr.kernels.device import here, home
from daskrr.kernels.distance import DistanceKernel
from daskrr.kernels.lanes import Formula, Lanes, exp

# Up to so many features, differences of all pairs, which are of float64, cost less than a matrix product and mending.
_FEW_FEATURES = {np.dtype(np.float64): 8, np.dtype(np.float32): 4}
# Values may be wrong by this many unit roundoffs before a pair is evaluated again from its differences.
_TOLERANCE = 64.0
# Elements of landmarks that are lifted at a time.
_LIFTED_AT_ONCE = 1 << 18


class _RadialKernel(DistanceKernel):
    """A function of eta = gain |x - z|²/l²."""

    _gain: ClassVar[float]
    # Below this ratio of the error of eta to the tolerance, no distance is too short for a matrix product.
    _harmless: ClassVar[float]

    @property
    def landmark_copies(self) -> int:
        """Scaled for differences, and lifted for the matrix product."""
        return 2

    @property
    @abstractmethod
    def _profile(self) -> Formula:
        """Kernel values of -eta; the same function for all kernels that differ in length scales alone."""

    @abstractmethod
    def _cutoff(self, ratio: Array) -> Array:
        """Bound eta beyond which an error of ``ratio`` tolerances in eta is within tolerance in value.

        It solves ratio |dk/d eta| <= 1 from above; ratios are larger than `_harmless`.
        """

    @abstractmethod
    def _slope(self, squares: Array) -> Array:
        """Derivative of the kernel by the squared distance in length scales; zero where that is not finite."""

    def scale_gradient(self, X: Array, V: Array) -> Array:
        # Squared differences, weighted and summed: Σ_ij M_ij (z_i - z_j)² = 2 Σ_i (Σ_j M_ij) z_i² - 2 zᵀ M z.
        Z = (X - X.mean(axis=0)) / self._scales(X.shape[1])
        M = -2.0 * V * self._slope(cdist(Z, Z, "sqeuclidean"))
        return 2.0 * (M.sum(axis=1) @ np.square(Z) - np.einsum("if,if->f", Z, M @ Z))

    def _matrix(self, X: Array, Z: Array) -> Array:
        out = np.empty((len(X), len(Z)))
        _Differences(self, Z).columns(X, out)
        return out

    def _columns(self, Z: Array, dtype: np.dtype[Any]) -> Columns:
        few = Z.shape[1] <= _FEW_FEATURES[dtype]
        return _Differences(self, Z).columns if few else _MatrixProduct(self, Z, dtype).columns


class _Differences:
    """Columns from the differences of rows."""

    def __init__(self, kernel: _RadialKernel, Z: Array) -> None:
        self._kernel = kernel
        self._powers, rest = kernel._units(Z.shape[1])
        self._weights = -kernel._gain / np.square(rest)
        self._landmarks = compiled.padded_columns(Z * self._powers)

    @property
    def columns(self) -> Columns:
        return Columns(self._fill, at_once=True)

    def _fill(self, X: Array, out: Array) -> None:
        compiled.pairs(_add_square, 0.0, self._kernel._profile, *self._given(X), out)

    def finish(self, X: Array, limits: Array, out: Array) -> None:
        """Turn -eta into values, after those of a row that are not below its limit were evaluated again."""
        compiled.mended_sweep(_add_square, self._kernel._profile, out, limits, *self._given(X))

    def _given(self, X: Array) -> tuple[Array, Array, Array]:
        scaled = np.multiply(X, here(self._powers), dtype=np.float64)
        return scaled, here(self._landmarks), here(self._weights)


def _add_square(total: Lanes, difference: Lanes, weight: Lanes) -> Lanes:
    return (difference * weight).times(difference, plus=total)


class _MatrixProduct:
    """Columns from a matrix product, mended where that is not accurate enough."""

    def __init__(self, kernel: _RadialKernel, Z: Array, dtype: np.dtype[Any]) -> None:
        n_landmarks, n_features = Z.shape
        self._kernel = kernel
        self._differences = _Differences(kernel, Z)
        # Dividing before the sum, since the sum of huge rows would overflow.
        self._centre = np.full(n_landmarks, 1 / n_landmarks) @ Z
        self._rates = np.broadcast_to(math.sqrt(2 * kernel._gain) / kernel._scales(n_features), n_features).copy()
        self._landmarks = np.empty((n_features + 2, n_landmarks), dtype)
        squares = np.empty(n_landmarks)
        # A few at a time: the landmarks of wide rows take much room.
        height = max(1, _LIFTED_AT_ONCE // n_features)
        for few in (slice(start, start + height) for start in range(0, n_landmarks, height)):
            lifted, squares[few] = compiled.lift(Z[few], self._centre, self._rates, dtype)
            lifted[:, -2:] = lifted[:, [-1, -2]]
            self._landmarks[:, few] = lifted.T
        self._largest = float(np.max(squares))
        # Error of the squared distance in units of u (|x|² + |z|²): rounding of the rows and of their
        # norms, and the random walk of the rounding errors along the sum over features.
        self._growth = 4.0 + 0.5 * math.sqrt(n_features)

    @property
    def columns(self) -> Columns:
        return Columns(self._fill, at_once=products.are_own(self._landmarks))

    def _fill(self, X: Array, out: Array) -> None:
        # With landmarks [z, 1, -|z|²/2], rows [x, -|x|²/2, 1] have inner products -|x - z|²/2.
        lifted, squares = compiled.lift(X, self._centre, self._rates, out.dtype)
        # Rows that overflowed to NaN count as well.
        if self._ratio(float(np.max(home(squares).get(squares)))) <= self._kernel._harmless:
            products.times(lifted, self._landmarks, out, self._kernel._profile)
            return
        limits = -self._bounds(self._ratio(squares), out.dtype)
        for rows in panels(X, out):
            products.times(lifted[rows], self._landmarks, out[rows])
            self._differences.finish(X[rows], limits[rows], out[rows])

    def _ratio(self, squares: Any) -> Any:
        """Of the error of eta to the tolerance, for rows of such squared norms."""
        return (squares + self._largest) * (self._growth / (2 * _TOLERANCE))

    def _bounds(self, ratio: Array, dtype: np.dtype[Any]) -> Array:
        """Distances up to which the matrix product leaves values wrong, -inf where it leaves none."""
        harmless = self._kernel._harmless
        error = ratio * (_TOLERANCE * np.finfo(dtype).eps / 2)
        # The computed distance may itself be off by the error.
        bound = self._kernel._cutoff(np.maximum(ratio, harmless)) + error
        bound[ratio <= harmless] = -np.inf
        return bound


def _gaussian(v: Lanes) -> Lanes:
    return exp(v.at_most(0.0))


def _matern_distance(v: Lanes) -> Lanes:
    # The magnitude, not a clip: a negative square within its error is as near to zero either way. The
    # bound keeps infinity times zero out; beyond it the values are zero.
    return abs(v).at_most(1e6).sqrt()


def _matern_half(v: Lanes) -> Lanes:
    return exp(-_matern_distance(v))


def _matern_three_halves(v: Lanes) -> Lanes:
    a = _matern_distance(v)
    return (a + 1.0) * exp(-a)


def _matern_five_halves(v: Lanes) -> Lanes:
    a = _matern_distance(v)
    return (a * (1 / 3)).times(a, plus=a + 1.0) * exp(-a)


@dataclass(frozen=True)
class Gaussian(_RadialKernel):
    """The Gaussian exp(-|x - z|² / (2 l²)).

    Parameters
    ----------
    length_scale
        The scale l: a positive number, one per feature, ``"median"``, the median distance of rows, or ``"learn"``, one
        per feature that a regression learns from its targets.

    Examples
    --------
    >>> Gaussian(1.0)([[0.0]], [[0.0], [1.0]]).round(4)
    array([[1.    , 0.6065]])
    """

    name: ClassVar[str] = "gaussian"
    _gain: ClassVar[float] = 0.5
    _harmless: ClassVar[float] = 1.0

    @property
    def _profile(self) -> Formula:
        return _gaussian

    def _cutoff(self, ratio: Array) -> Array:
        return np.log(ratio)

    def _slope(self, squares: Array) -> Array:
        return -0.5 * np.exp(-0.5 * squares)


@dataclass(frozen=True)
class Matern(_RadialKernel):
    """The Matérn kernel of smoothness 1/2, 3/2 or 5/2.

    With a = sqrt(2 nu) |x - z| / l it is exp(-a), (1 + a) exp(-a) or (1 + a + a²/3) exp(-a).

    Parameters
    ----------
    length_scale
        The scale l: a positive number, one per feature, ``"median"``, the median distance of rows, or ``"learn"``, one
        per feature that a regression learns from its targets.
    nu
        The smoothness: 0.5, 1.5 or 2.5.

    Examples
    --------
    >>> Matern(1.0, nu=0.5)([[0.0]], [[0.0], [1.0]]).round(4)
    array([[1.    , 0.3679]])
    """

    name: ClassVar[str] = "matern"
    nu: float = 1.5

    def __post_init__(self) -> None:
        super().__post_init__()
        set_fields(self, nu=checked_number("nu", self.nu))
        if self.nu not in (0.5, 1.5, 2.5):
            raise InvalidParameter(f"nu must be 0.5, 1.5 or 2.5, not {self.nu!r}")

    @property
    def _gain(self) -> float:  # type: ignore[override]
        return 2 * self.nu

    @property
    def _harmless(self) -> float:  # type: ignore[override]
        return {0.5: 0.0, 1.5: 2.0, 2.5: 6.0}[self.nu]

    @property
    def _profile(self) -> Formula:
        return {0.5: _matern_half, 1.5: _matern_three_halves, 2.5: _matern_five_halves}[self.nu]

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

    def _slope(self, squares: Array) -> Array:
        a = np.sqrt(2 * self.nu * squares)
        if self.nu == 0.5:
            return -0.5 * np.divide(np.exp(-a), a, out=np.zeros_like(a), where=a > 0)
        return -1.5 * np.exp(-a) if self.nu == 1.5 else -5 / 6 * (1.0 + a) * np.exp(-a)
