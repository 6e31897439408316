"""Dense references for small data: exact scores, and the Nyström scores they are compared with.

Everything here goes through eigenvalues of full matrices. It takes n² memory and n³ time, and shares no
algebra with the scores of large data, so that the two can be held against each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import eigh, svd

from daskrr.errors import InvalidData, InvalidParameter, KernelNotPositive, RidgeTooSmall
from daskrr.kernels import Kernel, Linear, as_kernel

__all__ = ["effective_dimension", "leverage_scores", "nystrom_scores", "residual"]

_UNIT_ROUNDOFF = 2.0**-53
# Largest part of the ridge that round-off may take, and so the largest error of a score.
_TOLERANCE = 1e-3
_DENSE_COPIES = 4

Scores = NDArray[np.float64]


def leverage_scores(
    X: ArrayLike, kernel: Kernel | Mapping[str, Any], ridge: float, *, max_rows: int = 10_000
) -> Scores:
    """Compute the ridge leverage scores diag(K (K + n ridge I)⁻¹) of all rows.

    The linear kernel goes through the singular values of X, which resolves far smaller ridges.

    Parameters
    ----------
    X
        (n, d) rows of any real dtype.
    kernel
        A kernel or its description.
    ridge
        Positive; multiplied by n.
    max_rows
        Largest n to accept.

    Returns
    -------
    scores
        (n,) numbers from 0 to 1.

    Raises
    ------
    InvalidData
        If the rows are not a finite real matrix, or their kernel overflows.
    InvalidParameter
        If the ridge is not positive and finite, or there are more than ``max_rows`` rows.
    KernelNotPositive
        If K has a negative eigenvalue that is not round-off.
    RidgeTooSmall
        If round-off of K decides the scores.

    Examples
    --------
    >>> leverage_scores([[1.0], [2.0]], Linear(), ridge=2.5)
    array([0.1, 0.4])
    """
    rows, mu = _checked(X, ridge, max_rows)
    kernel = as_kernel(kernel)
    if isinstance(kernel, Linear):
        return _linear_scores(rows, mu)
    return _scores(_kernel_matrix(rows, kernel), mu)


def effective_dimension(
    X: ArrayLike, kernel: Kernel | Mapping[str, Any], ridge: float, *, max_rows: int = 10_000
) -> float:
    """Compute the effective dimension, which is the sum of the leverage scores.

    Parameters
    ----------
    X
        (n, d) rows of any real dtype.
    kernel
        A kernel or its description.
    ridge
        Positive; multiplied by n.
    max_rows
        Largest n to accept.

    Raises
    ------
    DaskrrError
        As `leverage_scores`.

    Examples
    --------
    >>> round(effective_dimension([[1.0], [2.0]], Linear(), ridge=2.5), 12)
    0.5
    """
    return float(np.sum(leverage_scores(X, kernel, ridge, max_rows=max_rows)))


def nystrom_scores(
    X: ArrayLike,
    kernel: Kernel | Mapping[str, Any],
    ridge: float,
    indices: ArrayLike,
    sketch_ridge_weights: ArrayLike | None = None,
    *,
    max_rows: int = 10_000,
) -> Scores:
    """Compute diag(L (L + n ridge I)⁻¹) of the Nyström approximation L = C W⁺ Cᵀ.

    C holds the kernel of all rows with the landmarks, W that of the landmarks. With weights w it is
    L = C (W + diag(w))⁻¹ Cᵀ.

    Parameters
    ----------
    X
        (n, d) rows of any real dtype.
    kernel
        A kernel or its description.
    ridge
        Positive; multiplied by n.
    indices
        (p,) numbers of the rows that are landmarks.
    sketch_ridge_weights
        (p,) numbers to add to the diagonal of W, none negative.
    max_rows
        Largest n to accept.

    Returns
    -------
    scores
        (n,) numbers from 0 to 1.

    Raises
    ------
    InvalidParameter
        If the indices are not rows, or the weights not one per landmark.
    DaskrrError
        As `leverage_scores`.

    Examples
    --------
    >>> nystrom_scores([[1.0], [2.0]], Linear(), ridge=2.5, indices=[1]).round(12)
    array([0.1, 0.4])
    """
    rows, mu = _checked(X, ridge, max_rows)
    factor = _nystrom_factor(rows, as_kernel(kernel), indices, sketch_ridge_weights)
    return _scores(factor @ factor.T, mu)


def residual(X: ArrayLike, kernel: Kernel | Mapping[str, Any], indices: ArrayLike) -> Scores:
    """Compute what the Nyström approximation leaves of the diagonal, k(x, x) - L(x, x).

    Parameters
    ----------
    X
        (n, d) rows of any real dtype.
    kernel
        A kernel or its description.
    indices
        (p,) numbers of the rows that are landmarks.

    Returns
    -------
    residuals
        (n,) numbers, negative only by round-off.

    Raises
    ------
    InvalidData
        If the rows are not a finite real matrix.
    InvalidParameter
        If the indices are not rows.

    Examples
    --------
    >>> residual([[1.0, 0.0], [0.0, 3.0]], Linear(), indices=[0])
    array([0., 9.])
    """
    rows, kernel = _finite_rows(X), as_kernel(kernel)
    factor = _nystrom_factor(rows, kernel, indices, None)
    return kernel.diagonal(rows) - np.sum(np.square(factor), axis=1)


def _checked(X: ArrayLike, ridge: float, max_rows: int) -> tuple[NDArray[np.float64], float]:
    rows = _finite_rows(X)
    if not isinstance(ridge, int | float | np.number) or not 0 < ridge < math.inf:
        raise InvalidParameter(f"ridge must be a positive finite number, not {ridge!r}")
    n_rows = len(rows)
    if n_rows > max_rows:
        needed = _DENSE_COPIES * 8 * n_rows**2
        raise InvalidParameter(
            f"dense scores of {n_rows} rows take about {needed} bytes: raise max_rows={max_rows} to allow it"
        )
    return rows, n_rows * float(ridge)


def _finite_rows(X: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(X)
    if array.ndim != 2 or 0 in array.shape:
        raise InvalidData(f"rows must be a matrix with rows and features, not of shape {array.shape}")
    if array.dtype.kind not in "biuf":
        raise InvalidData(f"rows must be real numbers, not {array.dtype}")
    rows = array.astype(np.float64)
    if not np.isfinite(rows).all():
        raise InvalidData("rows must be finite, but there is NaN or infinity")
    return rows


def _checked_indices(indices: ArrayLike, n_rows: int) -> NDArray[np.intp]:
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


def _scores(K: NDArray[np.float64], mu: float) -> Scores:
    values, vectors = eigh(K, driver="evd", overwrite_a=True)
    norm = max(abs(values[0]), abs(values[-1]))
    if len(K) * _UNIT_ROUNDOFF * norm > _TOLERANCE * mu:
        _refuse_ridge(mu / len(K), _UNIT_ROUNDOFF * norm / _TOLERANCE)
    if values[0] < -_TOLERANCE * mu:
        raise KernelNotPositive(f"the kernel matrix has the eigenvalue {values[0]:.3g}")
    values = np.maximum(values, 0.0)
    return np.square(vectors) @ (values / (values + mu))


def _linear_scores(rows: NDArray[np.float64], mu: float) -> Scores:
    left, values, _ = svd(rows, full_matrices=False)
    noise = max(rows.shape) * _UNIT_ROUNDOFF * values[0]
    # Noise moves the scores by noise/sqrt(mu) at most, and by noise/smallest when the rows have full rank:
    # then even a vanishing ridge is resolved.
    if noise > _TOLERANCE * math.hypot(math.sqrt(mu), values[-1]):
        _refuse_ridge(mu / len(rows), (noise / _TOLERANCE) ** 2 / len(rows))
    return np.square(left) @ np.square(values / np.hypot(values, math.sqrt(mu)))


def _refuse_ridge(ridge: float, smallest: float) -> None:
    # A little more than the limit, so that the number printed works after rounding.
    raise RidgeTooSmall(
        f"round-off would decide the scores at ridge {ridge:.3g}; the smallest that works is {1.01 * smallest:.3g}"
    )


def _nystrom_factor(
    rows: NDArray[np.float64], kernel: Kernel, indices: ArrayLike, weights: ArrayLike | None
) -> NDArray[np.float64]:
    """Return the (n, p) factor F of L = F Fᵀ."""
    chosen = _checked_indices(indices, len(rows))
    W = _kernel_matrix(rows[chosen], kernel)
    W[np.diag_indices_from(W)] += _checked_weights(weights, len(chosen))
    values, vectors = eigh(W)
    kept = values > len(W) * _UNIT_ROUNDOFF * values[-1]
    return (kernel(rows, rows[chosen]) @ vectors[:, kept]) / np.sqrt(values[kept])
