"""The small algebra of a regression: steps on the sums of pass 1, and what its tasks need."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from daskrr.numerics import blas, ridge
from daskrr.numerics.factorize import combining_error, shift_of
from daskrr.numerics.ridge import GramSpectrum, Solution, Sums
from daskrr.nystrom.factors import Factors, GramMatrix

# Relative error of a diagonal entry of the smoother that a sum over all rows may have.
QUICK_LIMIT = 1e-4


@dataclass(frozen=True, kw_only=True)
class FitFactors(Factors):
    """The landmarks' factors with the sums of pass 1, of all rows and for a while of folds, and what is made of them.

    ``coefficients`` (L, r, t) are those of kernel columns; ``quick`` maps them to coordinates in one product.
    """

    sums: Sums
    folds: Sums | None = None
    solution: Solution | None = None
    coefficients: NDArray[np.float64] | None = None
    spectrum: GramSpectrum | None = None
    quick: NDArray[np.float64] | None = None

    @property
    def known_spectrum(self) -> GramSpectrum:
        """The eigenvalues and eigenvectors of the centred Gram matrix."""
        if self.spectrum is None:
            raise RuntimeError("the regression of this run was not diagonalised")
        return self.spectrum


@dataclass(frozen=True)
class Regressed:
    """What is known of a solution at every ridge, and the weight of all rows."""

    intercepts: NDArray[np.float64]
    residual_squares: NDArray[np.float64]
    effective_dimensions: NDArray[np.float64]
    target_squares: NDArray[np.float64]
    weight: float


@dataclass(frozen=True)
class Coefficients:
    """What predicts: of the landmarks' kernel columns (r, t), and the intercepts (t,)."""

    landmarks: NDArray[np.float64]
    coefficients: NDArray[np.float64]
    intercepts: NDArray[np.float64]


@dataclass(frozen=True)
class SmootherFactors:
    """What maps kernel columns to coordinates: ``factors`` in turn, and the spectrum."""

    landmarks: NDArray[np.float64]
    n_landmarks: int
    kernel_error: float
    factors: tuple[NDArray[np.float64], ...]
    spectrum: GramSpectrum


# --- Steps -----------------------------------------------------------------------------------------------


def add_sums(
    factors: Factors, inputs: GramMatrix, *, weighted: bool, origin: NDArray[np.float64]
) -> tuple[FitFactors, float]:
    """Add the sums of some more rows, the first time also their folds'; the weight of all rows.

    The landmarks of weighted rows are kept without their factors, so that B is that of rows of weight 1.
    """
    if weighted and not isinstance(factors, FitFactors):
        factors = _without_weights(factors)
    sums = Sums(
        gram=inputs.matrix(len(factors.whitening.inverse)),
        features=inputs.moments.features,
        targets=inputs.moments.targets,
        origin=origin,
        row_origin=np.zeros(len(factors.landmarks)) if factors.row_origin is None else factors.row_origin,
        height=inputs.height,
    )
    folds = None
    if sums.gram.ndim == 3:
        folds, sums = sums, sums.over_folds()
    if isinstance(factors, FitFactors):
        more = replace(factors, sums=factors.sums + sums, folds=folds or factors.folds, spectrum=None, quick=None)
    else:
        known = {one.name: getattr(factors, one.name) for one in fields(factors)}
        more = FitFactors(**known, sums=sums, folds=folds)
    return more, more.sums.weight


def _without_weights(factors: Factors) -> Factors:
    roots, whitening = factors.landmarks[:, -1], factors.whitening
    landmarks = np.ascontiguousarray(factors.landmarks[:, :-1])
    return replace(factors, landmarks=landmarks, whitening=replace(whitening, inverse=whitening.inverse * roots))


def find_least_ridge(factors: FitFactors, found: None, *, dtype: np.dtype) -> tuple[FitFactors, float]:
    """The smallest ridge that the sums allow, those without a fold too."""
    others = () if factors.folds is None else ridge.without_folds(factors.folds)
    return factors, max(ridge.least_ridge(sums, dtype) for sums in (factors.sums, *others))


def regress(
    factors: FitFactors, found: None, *, dtype: np.dtype, ridges: Sequence[float], intercept: bool
) -> tuple[FitFactors, Regressed]:
    """Solve the ridge regression for every ridge."""
    solution = ridge.solve(factors.sums, ridges, dtype, intercept)
    return with_solution(factors, solution), Regressed(
        intercepts=solution.intercepts,
        residual_squares=solution.residual_squares,
        effective_dimensions=solution.effective_dimensions,
        target_squares=solution.target_squares,
        weight=factors.sums.weight,
    )


def with_solution(factors: FitFactors, solution: Solution) -> FitFactors:
    """The factors with a solution, and the coefficients of kernel columns."""
    with blas.one_thread():
        return replace(factors, solution=solution, coefficients=factors.whitening.inverse.T @ solution.theta)


def diagonalise(
    factors: FitFactors, found: None, *, dtype: np.dtype, ridges: Sequence[float], intercept: bool
) -> tuple[FitFactors, NDArray[np.float64]]:
    """Make ready for smoothers; the effective dimensions."""
    spectrum = factors.spectrum or ridge.spectrum(factors.sums, intercept)
    # Factors are multiplied before anything is centred.
    norm = spectrum.eigenvalues.max(initial=0.0) + spectrum.weight * float(spectrum.centre @ spectrum.centre)
    error = combining_error(len(spectrum.eigenvalues), norm, shift_of(spectrum.weight, min(ridges)), dtype)
    quick = spectrum.rotation @ factors.whitening.inverse if error < QUICK_LIMIT else None
    return replace(factors, spectrum=spectrum, quick=quick), spectrum.effective_dimensions(ridges)


def cross_validate(
    factors: FitFactors, found: None, *, dtype: np.dtype, ridges: Sequence[float], intercept: bool
) -> tuple[FitFactors, NDArray[np.float64]]:
    """Mean squared error of every fold predicted from the others, at every ridge; folds are forgotten."""
    if factors.folds is None:
        raise RuntimeError("the sums of this run have no folds")
    return replace(factors, folds=None), ridge.fold_errors(factors.folds, ridges, dtype, intercept)


# --- What tasks need -------------------------------------------------------------------------------------


def predictor(factors: FitFactors) -> Coefficients:
    """What predicts at the first ridge."""
    if factors.solution is None or factors.coefficients is None:
        raise RuntimeError("the regression of this run was not solved")
    return Coefficients(factors.landmarks, factors.coefficients[0], factors.solution.intercepts[0])


def smoother(factors: FitFactors) -> SmootherFactors:
    """What maps rows to their coordinates."""
    return SmootherFactors(
        landmarks=factors.landmarks,
        n_landmarks=factors.n_landmarks,
        kernel_error=factors.whitening.kernel_error,
        factors=(factors.whitening.inverse, factors.known_spectrum.rotation),
        spectrum=factors.known_spectrum,
    )


def quick_smoother(factors: FitFactors) -> SmootherFactors:
    """The same, exact enough for sums over rows."""
    found = smoother(factors)
    return found if factors.quick is None else replace(found, factors=(factors.quick,))
