"""Kernels of a distance with a length scale, and the one of them that sums absolute differences."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, ClassVar, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike
from scipy.spatial.distance import cdist, pdist

from daskrr.errors import InvalidData, InvalidParameter
from daskrr.kernels import compiled
from daskrr.kernels.base import Columns, Kernel
from daskrr.kernels.common import Array, as_rows, checked_number, set_fields
from daskrr.kernels.device import here
from daskrr.kernels.lanes import Lanes, exp

LengthScale: TypeAlias = float | tuple[float, ...] | Literal["median", "learn"]


@dataclass(frozen=True)
class DistanceKernel(Kernel):
    """A function of the distance of two rows in units of a length scale, one at distance zero."""

    length_scale: LengthScale = "median"
    metric: ClassVar[str] = "euclidean"

    def __post_init__(self) -> None:
        set_fields(self, length_scale=_checked_length_scale(self.length_scale))

    @property
    def constant_diagonal(self) -> bool:
        return True

    @property
    def needs_sample(self) -> bool:
        return isinstance(self.length_scale, str)

    @property
    def needs_targets(self) -> bool:
        return self.length_scale == "learn"

    def check_features(self, n_features: int) -> None:
        if isinstance(self.length_scale, tuple) and len(self.length_scale) != n_features:
            given = len(self.length_scale)
            raise InvalidParameter(f"length_scale has {given} entries, the rows have {n_features} features")

    def resolve(self, sample: ArrayLike) -> Kernel:
        if not self.needs_sample:
            return self
        if self.needs_targets:
            raise InvalidParameter(f"{self!r} is to be learned from targets, and a sample of rows has none")
        rows = as_rows(sample)
        if len(rows) < 2:
            raise InvalidData("the median distance needs at least two rows: give length_scale as a number")
        median = float(np.median(pdist(rows, self.metric)))
        if not 0 < median < math.inf:
            raise InvalidData(f"the median distance of the sample is {median}: give length_scale as a number")
        return replace(self, length_scale=median)

    @abstractmethod
    def scale_gradient(self, X: Array, V: Array) -> Array:
        """(d,) sums Σ_ij V_ij·∂k(x_i, x_j)/∂log l_f over rows X (m, d), with symmetric V (m, m)."""

    def _diagonal(self, X: Array) -> Array:
        return np.ones(len(X))

    def _scales(self, n_features: int) -> Array:
        return np.broadcast_to(np.asarray(self.length_scale, np.float64), (n_features,))

    def _units(self, n_features: int) -> tuple[Array, Array]:
        """The length scales in two factors, see :func:`powers_of_two`; one of each where all features have the same."""
        scales = self._scales(n_features)
        return powers_of_two(scales[:1] if np.all(scales == scales[:1]) else scales)


@dataclass(frozen=True)
class Laplacian(DistanceKernel):
    """The Laplacian exp(-|x - z|₁ / l), of the sum of absolute differences.

    Parameters
    ----------
    length_scale
        The scale l: a positive number, one per feature, ``"median"``, the median distance of rows, or ``"learn"``, one
        per feature that a regression learns from its targets.

    Examples
    --------
    >>> Laplacian(2.0)([[0.0, 0.0]], [[1.0, -1.0]]).round(4)
    array([[0.3679]])
    """

    name: ClassVar[str] = "laplacian"
    metric: ClassVar[str] = "cityblock"

    def scale_gradient(self, X: Array, V: Array) -> Array:
        Z = X / self._scales(X.shape[1])
        M = V * np.exp(-cdist(Z, Z, "cityblock"))
        return np.array([np.sum(M * np.abs(np.subtract.outer(z, z))) for z in Z.T])

    def _columns(self, Z: Array, dtype: np.dtype[Any]) -> Columns:
        powers, rest = self._units(Z.shape[1])
        return Columns(self._fill, compiled.padded_columns(Z * powers), powers, -1 / rest)

    def _fill(self, landmarks: Array, powers: Array, weights: Array, X: Array, out: Array) -> None:
        scaled = np.multiply(X, here(powers), dtype=np.float64)
        compiled.pairs(_add_magnitude, 0.0, exp, scaled, here(landmarks), here(weights), out)


def _add_magnitude(total: Lanes, difference: Lanes, weight: Lanes) -> Lanes:
    return abs(difference).times(weight, plus=total)


def powers_of_two(scales: Array) -> tuple[Array, Array]:
    """Powers of two to multiply features by, and what remains of their length scales after that.

    Powers of two scale without rounding, so that differences lose nothing; what remains weighs them.
    """
    exponents = np.clip(np.frexp(scales)[1], -1000, 1000)
    return np.ldexp(1.0, -exponents), np.ldexp(scales, -exponents)


def _checked_length_scale(value: Any) -> LengthScale:
    if isinstance(value, str) and value in ("median", "learn"):
        return cast(LengthScale, value)
    if isinstance(value, np.ndarray) and value.ndim == 1:
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes) and len(value) > 0:
        return tuple(checked_number("every length_scale", entry) for entry in value)
    if isinstance(value, Real):
        return checked_number("length_scale", value)
    raise InvalidParameter(f"length_scale must be a number, one per feature 'median' or 'learn', not {value!r}")
