"""The p × p algebra: factor once, apply many times.

:func:`daskrr.numerics.whitening.whiten` has turned the kernel matrix W of the landmarks into the matrix that maps a row
of kernel columns to a row of B; :func:`ridge_factor` adds the ridge. Everything is float64, whatever the dtype of the
tiles, and calls nothing that holds the GIL for long. What takes p³ operations is done on the device of the calling
thread.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.errors import RidgeTooSmall
from daskrr.kernels.device import current, home
from daskrr.numerics import panels
from daskrr.numerics.bounds import kernel_noise
from daskrr.numerics.whitening import UNIT_ROUNDOFF, Whitening

# Largest relative error of a score, and largest share of the ridge, that round-off may have.
MAX_SCORE_ERROR = 0.1
MAX_RIDGE_SHARE = 0.5

# So many products with a vector find a largest eigenvalue to 4 % whatever the others are (8192 of them were tried), and
# to the last digits where these fall fast.
LANCZOS_STEPS = 12

# Above this relative error the combined factor is given up for two products, one for L and one for the ridge.
COMBINED_LIMIT = {np.dtype(np.float64): 1e-7, np.dtype(np.float32): 1e-3}


def shift_of(n_rows: float, ridge: float) -> float:
    """The multiple of the identity that the ridge λ adds to the kernel matrix: n·λ."""
    return n_rows * ridge


@dataclass(frozen=True)
class Decomposition:
    """Eigenvalues (r,) of G in ascending order, and eigenvectors (k, r) of the last k of them, as rows, there."""

    eigenvalues: NDArray[np.float64]
    vectors: Any


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
    device = current()
    there = device.put(panels.mirrored(G))
    norm = largest_eigenvalue(there)
    shifts = [shift_of(n_rows, ridge) for ridge in ridges]
    errors = gram_errors(len(G), norm, gram_error, n_rows, ridges, tile_dtype)
    together = [combining_error(len(G), norm, shift, tile_dtype) for shift in shifts]
    combine = whitening is not None and max(together) <= COMBINED_LIMIT[tile_dtype]
    if combine:
        errors = [one + other for one, other in zip(errors, together, strict=True)]
    root = None if whitening is None else device.put(whitening.inverse)
    inner, leading, spectrum = root if combine else None, None, None
    if len(shifts) > 1:
        inverse, combined, eigenvalues, dimensions = _rotation(decompose(there, -math.inf), inner, shifts)
        spectrum = eigenvalues
    else:
        inverse, combined, eigenvalues, dimensions = _triangular(there, inner, shifts[0])
        if root is not None and with_leading:
            found = decompose(there, shifts[0])
            leading, spectrum = _leading(found, root), found.eigenvalues
    return RidgeFactor(
        inverse=device.get(inverse),
        combined=None if combined is None else device.get(combined),
        eigenvalues=eigenvalues,
        leading=leading,
        spectrum=spectrum,
        effective_dimensions=np.array(dimensions),
        score_errors=np.array(errors, np.float64),
        gram_norm=norm,
        gram_error=gram_error,
    )


def decompose(G: Any, least: float) -> Decomposition:
    """Eigenvalues of G (r, r), and eigenvectors of those above ``least``, found where it is."""
    eigenvalues, vectors = np.linalg.eigh(G)
    eigenvalues = home(G).get(eigenvalues)
    first = int(np.searchsorted(eigenvalues, least, side="right"))
    return Decomposition(eigenvalues, vectors[:, first:].T.copy())


def gram_eigenvalues(factor: RidgeFactor, shift: float) -> NDArray[np.float64]:
    """Eigenvalues (r,) of G in descending order, from what is kept of it; ``shift`` is n·λ of the first ridge."""
    if factor.spectrum is not None:
        return np.maximum(factor.spectrum[::-1], 0.0)
    return shifted_eigenvalues(factor.inverse, shift)


def shifted_eigenvalues(inverse: NDArray[np.float64], shift: float) -> NDArray[np.float64]:
    """The same from M⁻¹ with M Mᵀ = G + shift·I, found on the device of the calling thread."""
    device = current()
    if device.is_host:
        M = inverse.copy()
        panels.invert_lower(M)
        found = np.linalg.eigvalsh(panels.gram(M))
    else:
        M = np.linalg.inv(device.keep(inverse))
        found = device.get(np.linalg.eigvalsh(M @ M.T))
    return np.maximum(found[::-1] - shift, 0.0)


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


def _triangular(G: Any, root: Any | None, shift: float) -> tuple[Any, ...]:
    """M⁻¹ with M Mᵀ = G + shift·I, its product with the factor of W, and the effective dimension."""
    M, bad = panels.inverse_root(G, shift)
    if bad:
        raise RidgeTooSmall(f"the Gram matrix plus {shift:.3g} is not positive: pivot {bad} of {len(G)} failed.")
    combined = None if root is None else panels.lower_product(M, root)
    return M, combined, None, [panels.trace_of_form(M, G)]


def _rotation(found: Decomposition, root: Any | None, shifts: list[float]) -> tuple[Any, ...]:
    """Eigenvectors of G as rows, their product with the factor of W, the eigenvalues, and effective dimensions."""
    eigenvalues = np.maximum(found.eigenvalues, 0.0)
    dimensions = [float(np.sum(eigenvalues / (eigenvalues + shift))) for shift in shifts]
    combined = None if root is None else panels.times(found.vectors, root)
    return found.vectors, combined, eigenvalues, dimensions


def _leading(found: Decomposition, root: Any) -> tuple[NDArray, NDArray, float]:
    """Coordinates along the eigenvectors above the shift, as :class:`RidgeFactor` has them."""
    first = len(found.eigenvalues) - len(found.vectors)
    left = max(float(found.eigenvalues[first - 1]), 0.0) if first else 0.0
    return home(root).get(panels.times(found.vectors, root)), found.eigenvalues[first:], left


def subset_factor(W: NDArray[np.float64], shift: float) -> NDArray[np.float64]:
    """Lower triangular inverse of the Cholesky factor of W + shift·I, for scores among the landmarks alone."""
    device = current()
    M, bad = panels.inverse_root(device.put(W), shift)
    if bad:
        raise RidgeTooSmall(f"the landmarks' kernel matrix plus {shift:.3g} is not positive: pivot {bad} failed.")
    return device.get(M)


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


def largest_eigenvalue(G: Any) -> float:
    """The largest eigenvalue of G (r, r), positive semi-definite, or a little less, by Lanczos from a fixed start."""
    trace = float(np.einsum("ii->", G))
    if not 0.0 < trace < math.inf:
        return trace
    vector = home(G).put(np.random.default_rng(0).standard_normal(len(G)))
    vector /= math.sqrt(float(vector @ vector))
    before, beside = vector, 0.0
    tridiagonal = np.zeros((LANCZOS_STEPS, LANCZOS_STEPS))
    for step in range(LANCZOS_STEPS):
        product = panels.times(G, vector) / trace - beside * before
        tridiagonal[step, step] = along = float(vector @ product)
        product -= along * vector
        beside = math.sqrt(float(product @ product))
        if not beside or step + 1 == LANCZOS_STEPS:
            break
        tridiagonal[step + 1, step] = beside
        before, vector = vector, product / beside
    return trace * float(np.linalg.eigvalsh(tridiagonal)[-1])


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
