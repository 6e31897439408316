"""Ridge regression on the rows b of B from sums alone: everything about a fit that does not grow with n.

Rows and targets enter as G = BᵀB, Bᵀ[1, Y] and [1, Y]ᵀ[1, Y], each row times the root of its weight. Y is taken about
an origin amid the targets, since the squares of large numbers would drown their differences; with an intercept so is B,
and what is left of the means is taken off in the sums. The ridge λ adds λ·Σw to the diagonal of G.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from daskrr.errors import InvalidData
from daskrr.numerics import blas
from daskrr.numerics.factorize import (
    RidgeFactor,
    gram_errors,
    gram_ridge,
    largest_eigenvalue,
    ridge_factor,
    shift_of,
    sum_error,
)

# Less than this share of the rows left over is no base for an estimate of anything.
LEAST_SHARE_LEFT = 1e-8

# Sums of squared residuals are differences of sums of squares, and known no better than to this share of them.
RESOLUTION = 1e-14

# Steps towards the middle of the landmarks, of which any point near them is as good.
MEDIAN_STEPS = 10


@dataclass(frozen=True)
class Sums:
    """Sums over rows: G (r, r), of which the lower triangle counts, Bᵀ[1, Y] (r, 1 + t), [1, Y]ᵀ[1, Y].

    ``origin`` (t,) was subtracted from every row of Y, and ``row_origin`` (r,) from every row of B: zero without an
    intercept. Sums of folds have one more axis, the first. No term of G went through more than ``height`` additions.
    """

    gram: NDArray[np.float64]
    features: NDArray[np.float64]
    targets: NDArray[np.float64]
    origin: NDArray[np.float64]
    row_origin: NDArray[np.float64]
    height: int

    @property
    def weight(self) -> float:
        """Sum of the weights of all rows."""
        return float(self.targets[0, 0])

    def __add__(self, other: "Sums") -> "Sums":
        return replace(
            self,
            gram=self.gram + other.gram,
            features=self.features + other.features,
            targets=self.targets + other.targets,
            height=max(self.height, other.height) + 1,
        )

    def folds(self) -> "list[Sums]":
        """The sums of every fold."""
        return [
            replace(self, gram=gram, features=features, targets=targets)
            for gram, features, targets in zip(self.gram, self.features, self.targets, strict=True)
        ]

    def over_folds(self) -> "Sums":
        """The sums of all folds together."""
        return replace(
            self,
            gram=self.gram.sum(axis=0),
            features=self.features.sum(axis=0),
            targets=self.targets.sum(axis=0),
            height=self.height + len(self.gram),
        )


@dataclass(frozen=True)
class Centred:
    """Sums about the means, or about zero without an intercept.

    Attributes
    ----------
    gram, features
        (r, r) symmetric, and BᵀY (r, t).
    mean, target_mean
        (r,) and (t,), zero without an intercept.
    target_squares, least
        (t,) sums of squares of the targets, and the least that is known of a part of them.
    summed_norm
        Largest eigenvalue of G before it was centred, in units of whose round-off the centred one errs.
    weight
        Sum of the weights.
    """

    gram: NDArray[np.float64]
    features: NDArray[np.float64]
    mean: NDArray[np.float64]
    target_mean: NDArray[np.float64]
    target_squares: NDArray[np.float64]
    least: NDArray[np.float64]
    summed_norm: float
    weight: float


def centre(sums: Sums, intercept: bool) -> Centred:
    """Move the sums to the means of rows and targets, if there is an intercept."""
    total, gram, origin = sums.weight, blas.mirror_lower(sums.gram), sums.origin
    norm = largest_eigenvalue(gram)
    features, target_sums, squares = sums.features[:, 1:], sums.targets[0, 1:], np.diagonal(sums.targets)[1:]
    if not intercept:
        features = features + np.outer(sums.features[:, 0], origin)
        squares = squares + origin * (2.0 * target_sums + total * origin)
        return Centred(
            gram=gram, features=features, mean=np.zeros(len(gram)), target_mean=np.zeros_like(origin),
            target_squares=squares, least=RESOLUTION * squares, summed_norm=norm, weight=total,
        )  # fmt: skip
    mean, target_mean = sums.features[:, 0] / total, target_sums / total
    gram -= total * np.outer(mean, mean)
    features = features - total * np.outer(mean, target_mean)
    centred = np.maximum(squares - total * target_mean**2, 0.0)
    return Centred(
        gram=gram, features=features, mean=sums.row_origin + mean, target_mean=origin + target_mean,
        target_squares=centred, least=RESOLUTION * squares, summed_norm=norm, weight=total,
    )  # fmt: skip


def middle(W: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """(p,) mean kernel column about which the landmarks with the kernel matrix W lie: nearly their geometric median.

    A mean would follow outliers, of which landmarks have many. ``weights`` (p,) are none below zero.
    """
    diagonal, part = np.diagonal(W), weights
    for _ in range(MEDIAN_STEPS):
        part = part / (part.sum() or 1.0)
        columns = W @ part
        squares = diagonal - 2.0 * columns + part @ columns
        part = weights / np.sqrt(np.maximum(squares, RESOLUTION * diagonal.max(initial=0.0) or 1.0))
    return W @ (part / (part.sum() or 1.0))


@dataclass(frozen=True)
class Solution:
    """Regression on B at L ridges, t targets: a row b is predicted as b·theta + intercept.

    Attributes
    ----------
    theta
        (L, r, t).
    intercepts
        (L, t).
    residual_squares
        (L, t) weighted sums of squared residuals, or the least of which one can tell.
    effective_dimensions
        (L,) trace of the smoother, the intercept not counted.
    target_squares
        (t,) weighted sums of squares of the targets about their mean, or about 0 without an intercept.
    """

    theta: NDArray[np.float64]
    intercepts: NDArray[np.float64]
    residual_squares: NDArray[np.float64]
    effective_dimensions: NDArray[np.float64]
    target_squares: NDArray[np.float64]


def solve(sums: Sums, ridges: Sequence[float], tile_dtype: np.dtype, intercept: bool) -> Solution:
    """Ridge regression of the targets on the rows of B, at every ridge.

    Raises
    ------
    RidgeTooSmall
        Round-off in G would decide the result.
    """
    centred = centre(sums, intercept)
    error = sum_error(float(np.trace(sums.gram)), sums.height)
    gram_errors(len(centred.gram), centred.summed_norm, error, centred.weight, ridges, tile_dtype)
    factor = ridge_factor(centred.gram, None, centred.weight, ridges, tile_dtype, error)
    return _solve(centred, factor, ridges)


def _solve(centred: Centred, factor: RidgeFactor, ridges: Sequence[float]) -> Solution:
    V, S = centred.features, factor.eigenvalues
    U = factor.inverse @ V
    theta, intercepts, residuals = [], [], []
    for ridge in ridges:
        shift = shift_of(centred.weight, ridge)
        coefficients = factor.inverse.T @ (U if S is None else U / (S + shift)[:, None])
        theta.append(coefficients)
        intercepts.append(centred.target_mean - centred.mean @ coefficients)
        # ‖y − Bθ‖² with (G + shift·I)θ = V
        squares = centred.target_squares - np.sum(coefficients * (V + shift * coefficients), axis=0)
        residuals.append(np.maximum(squares, centred.least))
    return Solution(
        np.array(theta), np.array(intercepts), np.array(residuals), factor.effective_dimensions, centred.target_squares
    )  # fmt: skip


def generalized_errors(
    mean_squares: NDArray[np.float64], dimensions: NDArray[np.float64], n_rows: float, intercept: bool
) -> NDArray[np.float64]:
    """GCV (L, t): the mean squared residual over the square of the share of degrees of freedom left; NaN for none."""
    left = 1.0 - (dimensions + intercept) / n_rows
    left = np.where(left > LEAST_SHARE_LEFT, left, np.nan)
    return mean_squares / left[:, None] ** 2


def noise_variance(
    squares: NDArray[np.float64], dimension: float, n_rows: float, intercept: bool
) -> NDArray[np.float64]:
    """Sums of squared residuals (t,) over the degrees of freedom left; NaN if none are."""
    left = n_rows - dimension - intercept
    return squares / (left if left > LEAST_SHARE_LEFT * n_rows else np.nan)


def least_ridge(sums: Sums, tile_dtype: np.dtype) -> float:
    """The smallest ridge at which round-off in the sums does not decide the result, with a hair to spare."""
    norm = largest_eigenvalue(blas.mirror_lower(sums.gram))
    error = sum_error(float(np.trace(sums.gram)), sums.height)
    return 1.001 * gram_ridge(len(sums.gram), norm, error, sums.weight, tile_dtype)


def without_folds(folds: Sums) -> Iterator[Sums]:
    """For every fold the sums of all others.

    Raises
    ------
    InvalidData
        One fold has all the weight.
    """
    parts, whole = folds.folds(), folds.over_folds().weight
    for number in range(len(parts)):
        # Added anew: a difference would carry the round-off of a fold that outweighs the others.
        rest = reduce(operator.add, [part for other, part in enumerate(parts) if other != number])
        if not rest.weight > RESOLUTION * whole:
            raise InvalidData(
                f"fold {number} of {len(parts)} has all rows, or all of their weight, so that nothing is left to "
                "predict it from. Use another scoring or random_state, or more rows."
            )
        yield rest


def fold_errors(folds: Sums, ridges: Sequence[float], tile_dtype: np.dtype, intercept: bool) -> NDArray[np.float64]:
    """Mean squared error (L, t) of each row predicted from the folds that it is not in, from the folds' sums alone.

    Raises
    ------
    InvalidData
        One fold has all the weight.
    """
    whole, errors = folds.over_folds(), np.zeros((len(ridges), folds.targets.shape[-1] - 1))
    for fold, rest in zip(folds.folds(), without_folds(folds), strict=True):
        found = solve(rest, ridges, tile_dtype, intercept)
        gram, targets = blas.mirror_lower(fold.gram), fold.targets
        for column, (theta, intercepts) in enumerate(zip(found.theta, found.intercepts, strict=True)):
            # Σ w·(y − b·θ − c)², in which every product of [b, 1, y] about their origins is known as a sum.
            constant = intercepts + folds.row_origin @ theta - folds.origin
            model, weight = theta.T @ fold.features, targets[0, 0]
            squares = np.diagonal(targets)[1:] + np.sum(theta * (gram @ theta), axis=0) + weight * constant**2
            cross = np.diagonal(model[:, 1:]) + constant * (targets[0, 1:] - model[:, 0])
            errors[column] += np.maximum(squares - 2.0 * cross, RESOLUTION * squares)
    return errors / whole.weight


@dataclass(frozen=True)
class GramSpectrum:
    """The regression along the eigenvectors of the centred G.

    Attributes
    ----------
    rotation
        (r, r) eigenvectors as rows: ``rotation @ b - centre`` are the coordinates z of a row b.
    eigenvalues
        (r,) S.
    centre
        (r,) rotated mean of the rows, zero without an intercept.
    projections
        (r, t): at the ridge λ the coefficient of z is projections/(S + λ·Σw).
    target_mean
        (t,) what is added to the prediction.
    constant
        What the intercept adds to the smoother's diagonal for a row of weight 1: 1/Σw, or 0.
    weight
        Σw.
    """

    rotation: NDArray[np.float64]
    eigenvalues: NDArray[np.float64]
    centre: NDArray[np.float64]
    projections: NDArray[np.float64]
    target_mean: NDArray[np.float64]
    constant: float
    weight: float

    def effective_dimensions(self, ridges: Sequence[float]) -> NDArray[np.float64]:
        """(L,) trace of the smoother, the intercept not counted."""
        shifts = np.array([shift_of(self.weight, ridge) for ridge in ridges])
        return np.sum(self.eigenvalues[:, None] / (self.eigenvalues[:, None] + shifts), axis=0)


def spectrum(sums: Sums, intercept: bool) -> GramSpectrum:
    """Diagonalise the centred G."""
    centred = centre(sums, intercept)
    eigenvalues, vectors = np.linalg.eigh(centred.gram)
    rotation = np.ascontiguousarray(vectors.T)
    return GramSpectrum(
        rotation, np.maximum(eigenvalues, 0.0), rotation @ centred.mean, rotation @ centred.features,
        centred.target_mean, 1.0 / centred.weight if intercept else 0.0, centred.weight,
    )  # fmt: skip
