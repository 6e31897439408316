"""Dense matrices of small data by their eigenvalues: the kernel matrix, and Nyström approximations of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import LinAlgError, eigh, svd

from daskrr.errors import InvalidData, InvalidParameter, KernelNotPositive, RidgeTooSmall
from daskrr.kernels import Kernel, Linear, as_kernel

_UNIT_ROUNDOFF = 2.0**-53
# Largest part of the ridge that round-off may take, and so the largest error of a score.
_TOLERANCE = 1e-3
_DENSE_COPIES = 4

Scores = NDArray[np.float64]


class Risk(NamedTuple):
    """The expected mean squared error over the rows of a fit to f* + noise, in its two parts."""

    bias_squared: float
    variance: float

    @property
    def bias(self) -> float:
        """The root of its first part."""
        return math.sqrt(self.bias_squared)

    @property
    def total(self) -> float:
        """Both parts."""
        return self.bias_squared + self.variance


@dataclass(frozen=True)
class Spectrum:
    """A positive semi-definite n × n matrix K, or L in its place, by its eigenvalues and eigenvectors.

    Attributes
    ----------
    values, vectors
        (r,) none negative, and (n, r); all other eigenvalues are 0.
    lowest
        Least eigenvalue that was found, below zero by round-off alone.
    resolved
        Least multiple of the identity, n·λ, beside which round-off is nothing.
    """

    values: NDArray[np.float64]
    vectors: NDArray[np.float64]
    lowest: float
    resolved: float

    def filter(self, ridge: float) -> NDArray[np.float64]:
        """(r,) eigenvalues of the smoother K (K + n ridge I)⁻¹.

        Raises
        ------
        InvalidParameter
            If the ridge is not positive and finite.
        KernelNotPositive
            If K has a negative eigenvalue that is not round-off.
        RidgeTooSmall
            If round-off of K decides the result.
        """
        n = len(self.vectors)
        mu = n * check_ridge(ridge)
        if mu < self.resolved:
            # A little more than the limit, so that the number printed works after rounding.
            raise RidgeTooSmall(
                f"round-off would decide the scores at ridge {ridge:.3g}; "
                f"the smallest that works is {1.01 * self.resolved / n:.3g}"
            )
        if self.lowest < -_TOLERANCE * mu:
            raise KernelNotPositive(f"the kernel matrix has the eigenvalue {self.lowest:.3g}")
        return self.values / (self.values + mu)

    def scores(self, ridge: float) -> Scores:
        """(n,) ridge leverage scores: the diagonal of the smoother."""
        return np.square(self.vectors) @ self.filter(ridge)

    def smooth(self, ridge: float, y: ArrayLike) -> NDArray[np.float64]:
        """(n,) fitted values of kernel ridge regression."""
        return self.vectors @ (self.filter(ridge) * (self.vectors.T @ self._targets("y", y)))

    def risk(self, ridge: float, truth: ArrayLike, noise_variance: float) -> Risk:
        """Squared bias n λ² ‖(K + nλI)⁻¹f*‖² and variance (σ²/n) tr K²(K + nλI)⁻² of kernel ridge regression."""
        values = self._targets("truth", truth)
        if not 0 <= noise_variance < math.inf:
            raise InvalidParameter(f"noise_variance must be a finite number, none below zero, not {noise_variance!r}")
        # By what is left of each coordinate, which is exact where almost nothing is.
        kept, coordinates = self.filter(ridge), self.vectors.T @ values
        outside = values - self.vectors @ coordinates
        bias_squared = (np.sum(np.square((1.0 - kept) * coordinates)) + np.sum(np.square(outside))) / len(values)
        return Risk(float(bias_squared), float(noise_variance * np.sum(np.square(kept)) / len(values)))

    def _targets(self, name: str, values: ArrayLike) -> NDArray[np.float64]:
        array = np.asarray(values, np.float64)
        if array.shape != (len(self.vectors),) or not np.isfinite(array).all():
            raise InvalidData(f"{name} must be {len(self.vectors)} finite numbers, one per row, not {array.shape}")
        return array


def spectrum(X: ArrayLike, kernel: Kernel | Mapping[str, Any], *, max_rows: int = 10_000) -> Spectrum:
    """Diagonalise the kernel matrix of all rows; of the linear kernel by the singular values of X.

    Parameters and errors are those of `leverage_scores`.

    Examples
    --------
    >>> spectrum([[1.0], [2.0]], Linear()).values.round(12)
    array([5.])
    """
    rows, kernel = _checked(X, max_rows), as_kernel(kernel)
    if isinstance(kernel, Linear):
        return _of_factor(rows)
    return _of_matrix(_kernel_matrix(rows, kernel))


def nystrom_spectrum(
    X: ArrayLike,
    kernel: Kernel | Mapping[str, Any],
    indices: ArrayLike,
    sketch_ridge_weights: ArrayLike | None = None,
    *,
    max_rows: int = 10_000,
) -> Spectrum:
    """Diagonalise the Nyström approximation L = C W⁺ Cᵀ, or C (W + diag(w))⁻¹ Cᵀ; see `nystrom_scores`.

    Examples
    --------
    >>> nystrom_spectrum([[1.0], [2.0]], Linear(), indices=[1]).values.round(12)
    array([5.])
    """
    rows, kernel = _checked(X, max_rows), as_kernel(kernel)
    chosen = check_indices(indices, len(rows))
    weights = _checked_weights(sketch_ridge_weights, len(chosen))
    if isinstance(kernel, Linear) and (sketch_ridge_weights is None or np.all(weights > 0)):
        return _of_factor(_linear_factor(rows, rows[chosen], None if sketch_ridge_weights is None else weights))
    factor = nystrom_factor(rows, kernel, chosen, weights)
    values, vectors = _singular(factor)
    squares = np.square(values)
    return Spectrum(squares, vectors, 0.0, len(rows) * _UNIT_ROUNDOFF * squares.max(initial=0.0) / _TOLERANCE)


def check_ridge(value: float) -> float:
    """A ridge that is positive and finite."""
    if not isinstance(value, int | float | np.number) or not 0 < value < math.inf:
        raise InvalidParameter(f"ridge must be a positive finite number, not {value!r}")
    return float(value)


def _checked(X: ArrayLike, max_rows: int) -> NDArray[np.float64]:
    rows = finite_rows(X)
    n_rows = len(rows)
    if n_rows > max_rows:
        needed = _DENSE_COPIES * 8 * n_rows**2
        raise InvalidParameter(
            f"dense scores of {n_rows} rows take about {needed} bytes: raise max_rows={max_rows} to allow it"
        )
    return rows


def finite_rows(X: ArrayLike) -> NDArray[np.float64]:
    """Rows (n, d) as float64."""
    array = np.asarray(X)
    if array.ndim != 2 or 0 in array.shape:
        raise InvalidData(f"rows must be a matrix with rows and features, not of shape {array.shape}")
    if array.dtype.kind not in "biuf":
        raise InvalidData(f"rows must be real numbers, not {array.dtype}")
    rows = array.astype(np.float64)
    if not np.isfinite(rows).all():
        raise InvalidData("rows must be finite, but there is NaN or infinity")
    return rows


def check_indices(indices: ArrayLike, n_rows: int) -> NDArray[np.intp]:
    """Numbers of rows."""
    array = np.asarray(indices)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise InvalidParameter("indices must be a list of at least one row number")
    if np.min(array) < 0 or np.max(array) >= n_rows:
        raise InvalidParameter(f"indices must be from 0 to {n_rows - 1}")
    return array.astype(np.intp)


def _checked_weights(weights: ArrayLike | None, n_landmarks: int) -> Scores:
    if weights is None:
        return np.zeros(n_landmarks)
    array = np.asarray(weights, np.float64)
    if array.shape != (n_landmarks,) or not np.all((array >= 0) & (array < np.inf)):
        raise InvalidParameter(f"sketch_ridge_weights must be {n_landmarks} finite numbers, none negative")
    return array


def _kernel_matrix(rows: NDArray[np.float64], kernel: Kernel) -> NDArray[np.float64]:
    K = kernel(rows, rows)
    K = 0.5 * (K + K.T)
    np.fill_diagonal(K, kernel.diagonal(rows))
    if not np.isfinite(K).all():
        raise InvalidData("the kernel overflows on these rows: scale the rows or change its parameters")
    return K


def _of_matrix(K: NDArray[np.float64]) -> Spectrum:
    values, vectors = eigh(K, driver="evd", overwrite_a=True)
    norm = max(abs(values[0]), abs(values[-1]))
    return Spectrum(np.maximum(values, 0.0), vectors, float(values[0]), len(K) * _UNIT_ROUNDOFF * norm / _TOLERANCE)


def _of_factor(B: NDArray[np.float64]) -> Spectrum:
    """Diagonalise B Bᵀ; squaring B first would cost half of the digits."""
    values, vectors = _singular(B)
    noise = max(B.shape) * _UNIT_ROUNDOFF * values.max(initial=0.0)
    least = values.min(initial=np.inf)
    # Noise moves the scores by noise/sqrt(mu) at most, and by noise/smallest when the rows have full rank:
    # then even a vanishing ridge is resolved.
    return Spectrum(np.square(values), vectors, 0.0, max(0.0, (noise / _TOLERANCE) ** 2 - least**2))


def _singular(B: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Singular values and left vectors."""
    if not B.size:
        return np.zeros(0), np.zeros((len(B), 0))
    try:
        vectors, values, _ = svd(B, full_matrices=False)
    except LinAlgError:
        # The fast driver fails on some matrices with clustered singular values; this one takes ten times as long.
        vectors, values, _ = svd(B, full_matrices=False, lapack_driver="gesvd")
    return values, vectors


def nystrom_factor(
    rows: NDArray[np.float64], kernel: Kernel, chosen: NDArray[np.intp], weights: Scores
) -> NDArray[np.float64]:
    """Return the (n, p) factor F of L = F Fᵀ."""
    W = _kernel_matrix(rows[chosen], kernel)
    W[np.diag_indices_from(W)] += weights
    values, vectors = eigh(W)
    kept = values > len(W) * _UNIT_ROUNDOFF * values[-1]
    return (kernel(rows, rows[chosen]) @ vectors[:, kept]) / np.sqrt(values[kept])


def _linear_factor(
    rows: NDArray[np.float64], landmarks: NDArray[np.float64], weights: Scores | None
) -> NDArray[np.float64]:
    """The same of the linear kernel by the singular vectors of the landmarks, which keeps all digits."""
    scaled = landmarks if weights is None else landmarks / np.sqrt(weights)[:, None]
    _, sizes, right = svd(scaled, full_matrices=False)
    kept = sizes > max(scaled.shape) * _UNIT_ROUNDOFF * 2 * sizes[0]
    gains = np.ones_like(sizes) if weights is None else sizes / np.hypot(1.0, sizes)
    return rows @ (right[kept].T * gains[kept])
