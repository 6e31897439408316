"""Dense references for small data: what the paper defines, exactly, and the same of Nyström approximations.

Everything here goes through eigenvalues of full matrices. It takes n² memory and n³ time, and shares no
algebra with the scores of large data, so that the two can be held against each other. A :class:`Spectrum` answers
for any number of ridges; the functions make one for a single answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from daskrr.errors import InvalidParameter
from daskrr.kernels import Kernel, as_kernel
from daskrr.spectra import (
    Risk,
    Scores,
    Spectrum,
    check_indices,
    check_ridge,
    finite_rows,
    nystrom_factor,
    nystrom_spectrum,
    spectrum,
)

__all__ = [
    "Risk", "Spectrum", "deviation", "deviation_matrix", "effective_dimension", "leverage_scores",
    "max_degrees_of_freedom", "nystrom_scores", "nystrom_spectrum", "residual", "risk", "spectrum",
]  # fmt: skip


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
    >>> from daskrr.kernels import Linear
    >>> leverage_scores([[1.0], [2.0]], Linear(), ridge=2.5)
    array([0.1, 0.4])
    """
    check_ridge(ridge)
    return spectrum(X, kernel, max_rows=max_rows).scores(ridge)


def effective_dimension(
    X: ArrayLike, kernel: Kernel | Mapping[str, Any], ridge: float, *, max_rows: int = 10_000
) -> float:
    """Compute the effective dimension, which is the sum of the leverage scores.

    Parameters and errors are those of `leverage_scores`.

    Examples
    --------
    >>> from daskrr.kernels import Linear
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
    X, kernel, ridge, max_rows
        As of `leverage_scores`.
    indices
        (p,) numbers of the rows that are landmarks.
    sketch_ridge_weights
        (p,) numbers to add to the diagonal of W, none negative.

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
    >>> from daskrr.kernels import Linear
    >>> nystrom_scores([[1.0], [2.0]], Linear(), ridge=2.5, indices=[1]).round(12)
    array([0.1, 0.4])
    """
    check_ridge(ridge)
    return nystrom_spectrum(X, kernel, indices, sketch_ridge_weights, max_rows=max_rows).scores(ridge)


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
    >>> from daskrr.kernels import Linear
    >>> residual([[1.0, 0.0], [0.0, 3.0]], Linear(), indices=[0])
    array([0., 9.])
    """
    rows, kernel = finite_rows(X), as_kernel(kernel)
    chosen = check_indices(indices, len(rows))
    factor = nystrom_factor(rows, kernel, chosen, np.zeros(len(chosen)))
    return kernel.diagonal(rows) - np.sum(np.square(factor), axis=1)


def max_degrees_of_freedom(
    X: ArrayLike, kernel: Kernel | Mapping[str, Any], ridge: float, *, max_rows: int = 10_000
) -> float:
    """Compute the maximal degrees of freedom, n times the largest leverage score.

    Parameters and errors are those of `leverage_scores`.

    Examples
    --------
    >>> from daskrr.kernels import Linear
    >>> round(max_degrees_of_freedom([[1.0], [2.0]], Linear(), ridge=2.5), 12)
    0.8
    """
    return len(np.asarray(X)) * float(np.max(leverage_scores(X, kernel, ridge, max_rows=max_rows)))


def risk(
    X: ArrayLike,
    kernel: Kernel | Mapping[str, Any],
    ridge: float,
    truth: ArrayLike,
    noise_variance: float,
    indices: ArrayLike | None = None,
    sketch_ridge_weights: ArrayLike | None = None,
    *,
    max_rows: int = 10_000,
) -> Risk:
    """Compute the risk of kernel ridge regression of targets f* + noise, as squared bias and variance.

    Parameters
    ----------
    X, kernel, ridge, max_rows
        As of `leverage_scores`.
    truth
        (n,) f* at the rows.
    noise_variance
        Of every target.
    indices, sketch_ridge_weights
        Landmarks: the risk with the Nyström approximation in place of K, see `nystrom_scores`.

    Raises
    ------
    DaskrrError
        As `leverage_scores`; InvalidData if ``truth`` is not one finite number per row.

    Examples
    --------
    >>> from daskrr.kernels import Linear
    >>> found = risk([[1.0], [2.0]], Linear(), ridge=2.5, truth=[1.0, 2.0], noise_variance=4.0)
    >>> round(found.bias_squared, 12), round(found.variance, 12), round(found.total, 12)
    (0.625, 0.5, 1.125)
    """
    if indices is None:
        found = spectrum(X, kernel, max_rows=max_rows)
    else:
        found = nystrom_spectrum(X, kernel, indices, sketch_ridge_weights, max_rows=max_rows)
    return found.risk(ridge, truth, noise_variance)


def deviation_matrix(
    X: ArrayLike,
    kernel: Kernel | Mapping[str, Any],
    sketch_ridge: float,
    indices: ArrayLike,
    probabilities: ArrayLike,
    *,
    max_rows: int = 10_000,
) -> NDArray[np.float64]:
    """Compute D = Φ - Φ^½ Uᵀ S Sᵀ U Φ^½ of Theorem 1, Φ = Σ (Σ + nγI)⁻¹, for given landmarks.

    K = U Σ Uᵀ, and S has 1/√(p·p_j) at row j of the column of a draw of j.

    Parameters
    ----------
    X, kernel, max_rows
        As of `leverage_scores`.
    sketch_ridge
        γ, positive; multiplied by n.
    indices
        (p,) numbers of the rows drawn, as often as each was drawn.
    probabilities
        (p,) with which each of them was drawn.

    Returns
    -------
    matrix
        (r, r) along the eigenvectors whose eigenvalues are not 0 by construction: n of them, as a rule.

    Raises
    ------
    DaskrrError
        As `leverage_scores`; InvalidParameter if a probability is not above 0 and at most 1.

    Examples
    --------
    >>> from daskrr.kernels import Linear
    >>> deviation_matrix([[1.0], [2.0]], Linear(), 2.5, indices=[1], probabilities=[0.8]).round(12)
    array([[0.]])
    """
    decomposition = spectrum(X, kernel, max_rows=max_rows)
    chosen = check_indices(indices, len(decomposition.vectors))
    shares = np.asarray(probabilities, np.float64)
    if shares.shape != chosen.shape or not np.all((shares > 0) & (shares <= 1)):
        raise InvalidParameter(f"probabilities must be {len(chosen)} numbers above 0 and at most 1, one for each draw")
    roots = np.sqrt(decomposition.filter(sketch_ridge))
    drawn = decomposition.vectors[chosen] * roots / np.sqrt(len(chosen) * shares)[:, None]
    return np.diag(np.square(roots)) - drawn.T @ drawn


def deviation(
    X: ArrayLike,
    kernel: Kernel | Mapping[str, Any],
    sketch_ridge: float,
    indices: ArrayLike,
    probabilities: ArrayLike,
    *,
    max_rows: int = 10_000,
) -> float:
    """Compute the largest eigenvalue of D of Theorem 1, see `deviation_matrix`.

    Below 1 it is the t of :func:`daskrr.theory.bias_inflation`.

    Examples
    --------
    >>> from daskrr.kernels import Linear
    >>> round(deviation([[1.0], [2.0]], Linear(), 2.5, indices=[0], probabilities=[0.8]), 12)
    0.375
    """
    D = deviation_matrix(X, kernel, sketch_ridge, indices, probabilities, max_rows=max_rows)
    largest = float(np.linalg.eigvalsh(D)[-1])
    return largest if len(D) == len(np.asarray(X)) else max(0.0, largest)
