"""What is kept of one run between its passes, and the steps of the p × p algebra that make it.

A step is a function of what is kept and of what the workers have computed; it returns what is to be kept, and a small
summary. What the tasks of a pass need is picked from it by a function too. Where all this happens is no matter here:
:mod:`daskrr.runtime.scheduler` decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.numerics import panels
from daskrr.numerics.factorize import (
    RidgeFactor,
    gram_eigenvalues,
    ridge_factor,
    shift_of,
    subset_factor,
    sum_error,
)
from daskrr.numerics.whitening import Whitening
from daskrr.numerics.whitening import whiten as factor_landmarks


@dataclass(frozen=True)
class ProbeRows:
    """Rows (a, d) drawn by their residuals, from which the part is estimated that other rows share with them.

    ``coefficients`` (r, a) are those of the landmarks' kernel columns; ``rows`` and ``weights`` say which rows they are
    and what they were drawn by.
    """

    X: NDArray[np.float64]
    coefficients: NDArray[np.float64]
    rows: NDArray[np.int64]
    weights: NDArray[np.float64]
    scale: float


@dataclass(frozen=True)
class Factors:
    """Of the landmarks' kernel matrix first, of the ridge once the Gram matrix is known; then with the probe, if any.

    A regression with an intercept has the ``row_origin`` (r,) that is subtracted from rows of B.
    """

    landmarks: NDArray[np.float64]
    n_landmarks: int
    whitening: Whitening
    row_origin: NDArray[np.float64] | None = None
    kernel_matrix: NDArray[np.float64] | None = None
    ridge: RidgeFactor | None = None
    subset: tuple[NDArray[np.float64], ...] = ()
    probe: ProbeRows | None = None

    @property
    def known_ridge(self) -> RidgeFactor:
        """The factor of the ridge."""
        if self.ridge is None:
            raise RuntimeError("the ridge of this run was not added")
        return self.ridge


@dataclass(frozen=True)
class LandmarkMatrix:
    """W (p, p) of the landmarks X (p, d), the tile kernel's error on it, and the penalty of the sketch, if any.

    For an intercept, also the kernel column in the ``middle`` of the landmarks.
    """

    W: NDArray[np.float64]
    X: NDArray[np.float64]
    error: float
    penalty: NDArray[np.float64] | None
    middle: NDArray[np.float64] | None


@dataclass(frozen=True)
class GramMatrix:
    """The lower triangle of G, or of several, as pass 1 has summed it; the height of its sum, and what else was summed.

    There may be nothing else.
    """

    sums: NDArray[np.float64]
    height: int
    moments: Any = None

    def matrix(self, rank: int) -> NDArray[np.float64]:
        """G (r, r), or several (k, r, r), of which the lower triangles count."""
        if self.sums.ndim > 1:
            return np.array([panels.matrix_of(one, rank) for one in self.sums])
        return panels.matrix_of(self.sums, rank)


@dataclass(frozen=True)
class Whitened:
    """What is known of the landmarks once they are factored."""

    pivots: NDArray[np.int64]
    shift: float
    kernel_error: float
    smallest_pivot: float


@dataclass(frozen=True)
class Ridged:
    """What is known of the ridges once they are factored, and of the Gram matrix."""

    effective_dimensions: list[float]
    score_errors: list[float]
    gram_norm: float
    gram_error: float
    combined: bool


@dataclass(frozen=True)
class TileFactors:
    """What tasks apply to tiles of kernel columns: ``factors`` in turn, and what pass 2 reads off."""

    landmarks: NDArray[np.float64]
    n_landmarks: int
    kernel_error: float
    factors: tuple[NDArray[np.float64], ...]
    row_origin: NDArray[np.float64] | None = None
    eigenvalues: NDArray[np.float64] | None = None
    leading: tuple[NDArray[np.float64], NDArray[np.float64], float] | None = None
    subset: tuple[NDArray[np.float64], ...] = ()
    probe: ProbeRows | None = None


# --- Steps -----------------------------------------------------------------------------------------------


def whiten(before: None, inputs: LandmarkMatrix, *, dtype: np.dtype, subset: bool) -> tuple[Factors, Whitened]:
    """Factor W (Algorithm, step 2); for a ``subset`` bound, W is kept."""
    whitening = factor_landmarks(inputs.W, inputs.error, dtype, inputs.penalty)
    pivots, origin = whitening.pivots, None
    if inputs.middle is not None:
        with np.errstate(over="ignore"):  # found in the first block, like that of any row
            origin = (whitening.inverse @ inputs.middle[pivots]).astype(dtype).astype(np.float64)
    factors = Factors(
        landmarks=inputs.X[pivots],
        n_landmarks=len(inputs.W),
        whitening=whitening,
        row_origin=origin,
        kernel_matrix=inputs.W[np.ix_(pivots, pivots)] if subset else None,
    )
    return factors, Whitened(
        pivots=pivots,
        shift=whitening.shift,
        kernel_error=whitening.kernel_error,
        smallest_pivot=whitening.smallest_pivot,
    )


def add_ridge(
    factors: Factors, inputs: GramMatrix, *, dtype: np.dtype, n_rows: int, ridges: Sequence[float], leading: bool
) -> tuple[Factors, Ridged]:
    """Factor G + n·λ·I for every ridge (Algorithm, step 4)."""
    G = inputs.matrix(len(factors.whitening.inverse))
    error = sum_error(float(np.trace(G)), inputs.height)
    ridge = ridge_factor(G, factors.whitening, n_rows, ridges, dtype, error, leading)
    subset = factors.subset
    if factors.kernel_matrix is not None:
        subset = tuple(subset_factor(factors.kernel_matrix, shift_of(n_rows, one)) for one in ridges)
    return replace(factors, ridge=ridge, subset=subset), Ridged(
        effective_dimensions=ridge.effective_dimensions.tolist(),
        score_errors=ridge.score_errors.tolist(),
        gram_norm=ridge.gram_norm,
        gram_error=ridge.gram_error,
        combined=ridge.combined is not None,
    )


def add_probe(factors: Factors, probe: ProbeRows | None) -> tuple[Factors, None]:
    """Keep it with the factors: on workers it would be lost with them, and need pass 1 to be made again."""
    return replace(factors, probe=probe), None


def eigenvalues(factors: Factors, found: None, *, shift: float) -> tuple[Factors, NDArray[np.float64]]:
    """Of G, in descending order."""
    return factors, gram_eigenvalues(factors.known_ridge, shift)


def ridge_inverse(factors: Factors) -> NDArray[np.float64]:
    """What :func:`eigenvalues` are found from."""
    return factors.known_ridge.inverse


# --- What tasks need -------------------------------------------------------------------------------------


def whitener(factors: Factors) -> TileFactors:
    """The factor of W."""
    return TileFactors(
        landmarks=factors.landmarks,
        n_landmarks=factors.n_landmarks,
        kernel_error=factors.whitening.kernel_error,
        factors=(factors.whitening.inverse,),
        row_origin=factors.row_origin,
    )


def drawn_rows(factors: Factors) -> TileFactors:
    """The factor of W and the ridge's apart, for rows that pass 1 has not kept the residuals of."""
    ridge = factors.known_ridge
    both = (factors.whitening.inverse, ridge.inverse)
    return replace(
        whitener(factors), factors=both, row_origin=None, eigenvalues=ridge.eigenvalues, leading=ridge.leading
    )


def new_rows(factors: Factors) -> TileFactors:
    """The same for rows that pass 1 has not seen."""
    return replace(drawn_rows(factors), subset=factors.subset, probe=factors.probe)


def scorer(factors: Factors) -> TileFactors:
    """What pass 2 applies: one product of both factors, where that is exact enough."""
    found, combined = new_rows(factors), factors.known_ridge.combined
    return found if combined is None else replace(found, factors=(combined,))
