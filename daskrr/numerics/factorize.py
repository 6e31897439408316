"""The p × p algebra: factor once, apply many times.

:func:`whiten` turns the kernel matrix W of the landmarks into the lower triangular matrix that maps a row of
kernel columns to a row of B, with B Bᵀ = L, the Nyström approximation. :func:`ridge_factor` adds the ridge.
Everything is float64, whatever the dtype of the tiles, and calls nothing that holds the GIL for long.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.errors import KernelNotPositive, RidgeTooSmall
from daskrr.numerics import blas
from daskrr.numerics.bounds import kernel_noise

UNIT_ROUNDOFF = {np.dtype(np.float64): 2.0**-53, np.dtype(np.float32): 2.0**-24}

# Least error of a kernel's entries, in unit roundoffs.
LEAST_ROUNDOFFS = 4.0

# Largest relative error of a score, and largest share of the ridge, that round-off may have.
MAX_SCORE_ERROR = 0.1
MAX_RIDGE_SHARE = 0.5

# Above this relative error the combined factor is given up for two products, one for L and one for the ridge.
COMBINED_LIMIT = {np.dtype(np.float64): 1e-7, np.dtype(np.float32): 1e-3}


def shift_of(n_rows: float, ridge: float) -> float:
    """The multiple of the identity that the ridge λ adds to the kernel matrix: n·λ."""
    return n_rows * ridge


@dataclass(frozen=True)
class Whitening:
    """Factor of W: ``inverse @ c`` is the row of B that belongs to the row c of kernel columns.

    Attributes
    ----------
    pivots
        Positions of the kept landmarks among those given, in the order of the columns c.
    inverse
        Lower triangular (r, r): R⁻¹ D⁻¹ with D the square roots of the diagonal of W.
    shift
        What was added to the unit diagonal of D⁻¹ W D⁻¹ so that rounding cannot lift L above the kernel matrix.
    kernel_error
        Measured error of an entry of the tile kernel, relative to the diagonal.
    smallest_pivot
        Smallest pivot that was kept (NaN when none was).
    """

    pivots: NDArray[np.intp]
    inverse: NDArray[np.float64]
    shift: float
    kernel_error: float
    smallest_pivot: float

    @property
    def rank(self) -> int:
        """Number of landmarks kept."""
        return len(self.pivots)


@dataclass(frozen=True)
class RidgeFactor:
    """What pass 2 applies: factors in turn to a row c of kernel columns, then a reading of the result's squares.

    For one ridge the factors are triangular and the score is the squared norm of the result. For a path of ridges the
    last factor is the full matrix that turns b into its coordinates z along the eigenvectors of G, and the score at the
    ridge λ is Σ_j z_j²/(S_j + n·λ).

    Attributes
    ----------
    inverse
        (r, r) applied to a row b of B: lower triangular M⁻¹ with M Mᵀ = G + n·λ·I, or the eigenvectors of G as rows.
    combined
        The same applied to a row of kernel columns, which saves one product per row, or None where it would cost too
        much accuracy.
    eigenvalues
        (r,) S of G in ascending order, for a path; None for one ridge.
    leading
        (k, r) and (k,): applied to kernel columns, the coordinates along the eigenvectors of G whose eigenvalues exceed
        n·λ, and those eigenvalues; the last number is the largest eigenvalue left. None unless asked for.
    spectrum
        (r,) S of G in ascending order, where it was found on the way.
    effective_dimensions
        (L,) tr(G (G + n·λ·I)⁻¹), the sum of all scores, for each ridge.
    score_errors
        (L,) bounds on the relative error that round-off leaves in a score.
    gram_norm, gram_error
        Estimate of the largest eigenvalue of G, and bound of that of its error as a sum over rows.
    """

    inverse: NDArray[np.float64]
    combined: NDArray[np.float64] | None
    eigenvalues: NDArray[np.float64] | None
    leading: tuple[NDArray[np.float64], NDArray[np.float64], float] | None
    spectrum: NDArray[np.float64] | None
    effective_dimensions: NDArray[np.float64]
    score_errors: NDArray[np.float64]
    gram_norm: float
    gram_error: float


def residual_error(n_landmarks: int, error: float) -> float:
    """Round-off that the residual of a row may carry, as a multiple of its k_ii, given the tile kernel's error."""
    return 2.0 * (n_landmarks + 8) * error


def kernel_error(tile: NDArray, W: NDArray, tile_dtype: np.dtype) -> float:
    """Entry error of the tile kernel on the landmarks: twice the largest seen, and no less than a few roundoffs.

    A few landmarks may be exact by luck, and what is computed from their columns is rounded in any case.
    """
    least = LEAST_ROUNDOFFS * UNIT_ROUNDOFF[tile_dtype]
    scale = np.sqrt(np.maximum(np.diagonal(W), 0.0))
    kept = scale > 0
    if not kept.any():
        return least
    difference = np.abs(tile.astype(np.float64) - W)[np.ix_(kept, kept)]
    difference /= scale[kept, None]
    difference /= scale[kept]
    return max(least, 2.0 * float(difference.max()))


def whiten(
    W: NDArray[np.float64],
    error: float,
    tile_dtype: np.dtype,
    penalty: NDArray[np.float64] | None = None,
) -> Whitening:
    """Factor the kernel matrix of the landmarks (Algorithm, steps 2 and 3).

    Parameters
    ----------
    W
        (p, p), symmetric, its diagonal exactly k(x_j, x_j).
    error
        Entry error of the tile kernel, see :func:`kernel_error`.
    tile_dtype
        dtype of the tiles that the factor will be applied to.
    penalty
        (p,) added to the diagonal of W: the regularised approximation L_γ.

    Raises
    ------
    KernelNotPositive
        W has a negative pivot beyond round-off.
    """
    p = len(W)
    diagonal = np.diagonal(W).copy()
    kept = _positive_landmarks(W, diagonal)
    scale = np.sqrt(diagonal[kept])
    unit = W[np.ix_(kept, kept)] / scale[:, None] / scale
    np.fill_diagonal(unit, 1.0)
    shift = (8.0 if tile_dtype == np.float64 else 2.0) * p * error
    unit.flat[:: len(unit) + 1] += shift
    if penalty is not None:
        unit.flat[:: len(unit) + 1] += penalty[kept] / diagonal[kept]
    # A landmark that another one repeats has the pivot 2·shift: it must fall, whatever its last bits are.
    R = unit.copy()
    pivots, rank = blas.pivoted_cholesky(R, 3.0 * shift)
    _check_positive(unit, R, pivots, rank, shift, kept)
    R = np.tril(R[:rank, :rank])
    smallest = float(np.diagonal(R).min() ** 2) if rank else float("nan")
    blas.invert_lower(R)
    R /= scale[pivots[:rank]]
    return Whitening(kept[pivots[:rank]], R, shift, error, smallest)


def _positive_landmarks(W: NDArray, diagonal: NDArray) -> NDArray[np.intp]:
    """Positions with k(x, x) > 0; a zero diagonal entry is dropped, its row must be zero too."""
    worst = int(np.argmin(diagonal)) if len(diagonal) else 0
    if len(diagonal) and not diagonal[worst] >= 0:
        raise _not_positive(worst, diagonal[worst])
    zero = np.flatnonzero(diagonal == 0)
    if len(zero) and np.abs(W[zero]).max() > 0:
        raise _not_positive(int(zero[np.abs(W[zero]).max(axis=1).argmax()]), 0.0)
    return np.flatnonzero(diagonal > 0)


def _check_positive(unit: NDArray, R: NDArray, pivots: NDArray, rank: int, shift: float, kept: NDArray) -> None:
    """What is left of W after the kept pivots must vanish up to the tolerance: a positive matrix has no more."""
    dropped = pivots[rank:]
    if not len(dropped):
        return
    left = unit[np.ix_(dropped, dropped)] - R[rank:, :rank] @ R[rank:, :rank].T
    position = int(np.abs(left).max(axis=1).argmax())
    if np.abs(left[position]).max() > 6.0 * shift:
        raise _not_positive(int(kept[dropped[position]]), float(left[position].min()))


def _not_positive(position: int, pivot: float) -> KernelNotPositive:
    return KernelNotPositive(
        f"the kernel is not positive semi-definite on the landmarks: landmark number {position} has the pivot "
        f"{pivot:.3g} in units of its diagonal entry, where at least 0 was expected. "
        "Use a positive semi-definite kernel, or correct its formula."
    )


def ridge_factor(
    G: NDArray[np.float64],
    whitening: Whitening | None,
    n_rows: float,
    ridges: Sequence[float],
    tile_dtype: np.dtype,
    gram_error: float,
    with_leading: bool = False,
) -> RidgeFactor:
    """Factor G + n·λ·I, G given by its lower triangle (r, r), and form what pass 2 applies (Algorithm, step 4).

    ``gram_error`` bounds the norm of the error of G, see :func:`sum_error`. Without a ``whitening``, what is applied to
    kernel columns is left out.

    Raises
    ------
    RidgeTooSmall
        Round-off in G would decide the scores.
    """
    G = blas.mirror_lower(G)
    norm = largest_eigenvalue(G)
    shifts = [shift_of(n_rows, ridge) for ridge in ridges]
    errors = gram_errors(len(G), norm, gram_error, n_rows, ridges, tile_dtype)
    together = [combining_error(len(G), norm, shift, tile_dtype) for shift in shifts]
    combine = whitening is not None and max(together) <= COMBINED_LIMIT[tile_dtype]
    if combine:
        errors = [one + other for one, other in zip(errors, together, strict=True)]
    make = _triangular if len(shifts) == 1 else _rotation
    inverse, combined, eigenvalues, dimensions = make(G, whitening if combine else None, shifts)
    leading, spectrum = None, eigenvalues
    if whitening and with_leading and len(shifts) == 1:
        leading, spectrum = _leading(G, whitening, shifts[0])
    return RidgeFactor(
        inverse=inverse,
        combined=combined,
        eigenvalues=eigenvalues,
        leading=leading,
        spectrum=spectrum,
        effective_dimensions=np.array(dimensions),
        score_errors=np.array(errors, np.float64),
        gram_norm=norm,
        gram_error=gram_error,
    )


def gram_eigenvalues(factor: RidgeFactor, shift: float) -> NDArray[np.float64]:
    """Eigenvalues (r,) of G in descending order, from what is kept of it; ``shift`` is n·λ of the first ridge."""
    if factor.spectrum is not None:
        return np.maximum(factor.spectrum[::-1], 0.0)
    M = factor.inverse.copy()
    blas.invert_lower(M)
    return np.maximum(np.linalg.eigvalsh(M @ M.T)[::-1] - shift, 0.0)


def sum_error(trace: float, height: int) -> float:
    """Bound of the norm of the error of G = BᵀB, a sum of products no term of which goes through more additions.

    Entry by entry a computed sum of products is off by at most γ·(|B|ᵀ|B|), γ = hu/(1 − hu) for a height h, in whatever
    order it is added; the norm of |B|ᵀ|B| is at most its trace, which is that of G. Equal rows come near the bound.
    """
    relative = height * UNIT_ROUNDOFF[np.dtype(np.float64)]
    return relative / (1.0 - relative) * trace


def gram_errors(
    rank: int, norm: float, gram_error: float, n_rows: float, ridges: Sequence[float], tile_dtype: np.dtype
) -> list[float]:
    """Relative errors that the rounding of G leaves at every ridge, none of which may decide the result.

    Raises
    ------
    RidgeTooSmall
        One does.
    """
    errors = [_separate_error(rank, norm, gram_error, shift_of(n_rows, ridge), tile_dtype) for ridge in ridges]
    worst = int(np.argmax(errors))
    if errors[worst] > MAX_SCORE_ERROR:
        works = _rounded_up(gram_ridge(rank, norm, gram_error, n_rows, tile_dtype))
        raise RidgeTooSmall(
            f"ridge={ridges[worst]:.3g} is too small: {tile_dtype} round-off may change scores by "
            f"{min(errors[worst], 1.0):.2g} of their value. The smallest ridge that works is {works}"
            + (" (float64 tiles allow less)." if tile_dtype == np.float32 else ".")
        )
    return errors


def gram_ridge(rank: int, norm: float, gram_error: float, n_rows: float, tile_dtype: np.dtype) -> float:
    """The smallest ridge that :func:`gram_errors` allows."""
    return _least_shift(rank, norm, gram_error, tile_dtype) / n_rows


def _triangular(G: NDArray, whitening: Whitening | None, shifts: list[float]) -> tuple[Any, ...]:
    """M⁻¹ with M Mᵀ = G + shift·I, its product with the factor of W, and the effective dimension."""
    M = G.copy()
    M.flat[:: len(M) + 1] += shifts[0]
    if bad := blas.cholesky(M):
        raise RidgeTooSmall(f"the Gram matrix plus {shifts[0]:.3g} is not positive: pivot {bad} of {len(G)} failed.")
    M = np.tril(M)
    blas.invert_lower(M)
    product = G.copy()
    blas.multiply_rows(M, product)  # G M⁻ᵀ
    combined = None
    if whitening:
        transposed = whitening.inverse.T.copy()
        blas.multiply_rows(M, transposed)  # R⁻ᵀ M⁻ᵀ
        combined = np.ascontiguousarray(transposed.T)
    return M, combined, None, [float(np.einsum("ij,ji->", M, product))]


def _rotation(G: NDArray, whitening: Whitening | None, shifts: list[float]) -> tuple[Any, ...]:
    """Eigenvectors of G as rows, their product with the factor of W, the eigenvalues, and effective dimensions."""
    eigenvalues, vectors = np.linalg.eigh(G)
    eigenvalues = np.maximum(eigenvalues, 0.0)
    rotation = np.ascontiguousarray(vectors.T)
    dimensions = [float(np.sum(eigenvalues / (eigenvalues + shift))) for shift in shifts]
    return rotation, rotation @ whitening.inverse if whitening else None, eigenvalues, dimensions


def _leading(
    G: NDArray, whitening: Whitening, shift: float
) -> tuple[tuple[NDArray, NDArray, float], NDArray[np.float64]]:
    """Coordinates along the eigenvectors above the shift, as :class:`RidgeFactor` has them, and all eigenvalues."""
    eigenvalues, vectors = np.linalg.eigh(G)
    first = int(np.searchsorted(eigenvalues, shift, side="right"))
    left = max(float(eigenvalues[first - 1]), 0.0) if first else 0.0
    leading = np.ascontiguousarray(vectors[:, first:].T) @ whitening.inverse, eigenvalues[first:], left
    return leading, eigenvalues


def subset_factor(W: NDArray[np.float64], shift: float) -> NDArray[np.float64]:
    """Lower triangular inverse of the Cholesky factor of W + shift·I, for scores among the landmarks alone."""
    M = W.copy()
    M.flat[:: len(M) + 1] += shift
    if bad := blas.cholesky(M):
        raise RidgeTooSmall(f"the landmarks' kernel matrix plus {shift:.3g} is not positive: pivot {bad} failed.")
    M = np.tril(M)
    blas.invert_lower(M)
    return M


def _separate_error(rank: int, norm: float, gram_error: float, shift: float, tile_dtype: np.dtype) -> float:
    """Relative error of a score from the rounding of G, of its factors, and of what these are applied to.

    If G is off by a matrix of norm ε, bᵀ(G + nλ)⁻¹b is by at most ε/(nλ − ε) of its value. What factors and products
    add to ε is measured, not proved.
    """
    if shift <= gram_error:
        return math.inf
    return _norm_error(rank, tile_dtype) + _noise(rank, norm, gram_error, tile_dtype) / (shift - gram_error)


def _norm_error(rank: int, tile_dtype: np.dtype) -> float:
    """Relative error of a squared norm of r numbers, each of which has a few roundings of its own."""
    return (rank + 8.0) * UNIT_ROUNDOFF[tile_dtype] if rank else 0.0


def _noise(rank: int, norm: float, gram_error: float, tile_dtype: np.dtype) -> float:
    """What a matrix that has the effect of all round-off in G, factors and products has for a norm."""
    rounded = rank * UNIT_ROUNDOFF[np.dtype(np.float64)] * norm
    if tile_dtype == np.float32:
        rounded += 8.0 * UNIT_ROUNDOFF[tile_dtype] * norm
    return gram_error + rounded


def _least_shift(rank: int, norm: float, gram_error: float, tile_dtype: np.dtype) -> float:
    """The multiple n·λ of the identity at which :func:`_separate_error` is as large as may be."""
    allowed = MAX_SCORE_ERROR - _norm_error(rank, tile_dtype)
    return gram_error + _noise(rank, norm, gram_error, tile_dtype) / allowed


def combining_error(rank: int, norm: float, shift: float, tile_dtype: np.dtype) -> float:
    """Relative error of a score if R⁻¹ and the factor of the ridge are multiplied first, instead of applied in turn."""
    return float(np.sqrt(UNIT_ROUNDOFF[tile_dtype] * norm / (max(rank, 1) * shift)))


def largest_eigenvalue(G: NDArray, iterations: int = 30) -> float:
    """Largest eigenvalue of G (r, r), positive semi-definite, by power iteration from a fixed start."""
    if not len(G):
        return 0.0
    vector = np.random.default_rng(0).standard_normal(len(G))
    value = 0.0
    for _ in range(iterations):
        vector = G @ vector
        value = float(np.linalg.norm(vector))
        if value == 0.0:
            return 0.0
        vector /= value
    return value


def _rounded_up(value: float) -> str:
    """``value`` with three digits, never less than itself."""
    step = 10.0 ** (np.floor(np.log10(value)) - 2)
    return f"{np.ceil(value / step * (1 + 1e-12)) * step:.3g}"


def smallest_ridge(error: float, mean_diagonal: float, rank: int, height: int, tile_dtype: np.dtype) -> float:
    """The smallest ridge that :func:`check_resolution` and :func:`ridge_factor` allow, whatever G is."""
    # Norm and trace of G are at most n times the mean diagonal.
    least = _least_shift(rank, mean_diagonal, sum_error(mean_diagonal, height), tile_dtype)
    return max(kernel_noise(error, mean_diagonal), least)


def check_resolution(
    error: float, mean_diagonal: float, ridge: float, rank: int, height: int, tile_dtype: np.dtype
) -> float:
    """Share of the ridge that round-off in the kernel entries may take; refuse when it is more than half.

    ``height`` is that of the sum of G, at most (:class:`daskrr.numerics.pass1.Totals`).

    Raises
    ------
    RidgeTooSmall
        With a ridge that this dtype resolves.
    """
    noise = kernel_noise(error, mean_diagonal)
    share = noise / (noise + ridge)
    if share > MAX_RIDGE_SHARE:
        works = smallest_ridge(error, mean_diagonal, rank, height, tile_dtype)
        raise RidgeTooSmall(
            f"ridge={ridge:.3g} is below what {tile_dtype} tiles resolve: entries of this kernel carry an error of "
            f"{error:.2g} of their diagonal, whose mean is {mean_diagonal:.3g}. The smallest ridge that works is "
            f"{_rounded_up(works)}" + (" (float64 tiles allow less)." if tile_dtype == np.float32 else ".")
        )
    return share
