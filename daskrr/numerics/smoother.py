"""What a fitted regression says of a block of rows: predictions, their spread, and how much each row decides.

A row b of B has the coordinates z = Q(b − b̄) along the eigenvectors of the centred Gram matrix. If its weight is w, its
diagonal entry of the smoother is h = w·(1/Σw + Σ_j z_j²/(S_j + λ·Σw)), the first term with an intercept only. Where a
weight counts repeats, what is said of a row is said of one of them, whose own weight stands in for w.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from daskrr.errors import InvalidData
from daskrr.kernels.device import current, here, scratch
from daskrr.numerics import blas
from daskrr.numerics.pass1 import clear_residual
from daskrr.numerics.ridge import GramSpectrum
from daskrr.numerics.tiles import (
    LEGAL_OVERFLOW,
    BlockReader,
    Columns,
    Diagonal,
    Pieces,
    check_overflow,
    kernel_tiles,
)

F64 = np.dtype(np.float64)

# Of a training row, round-off included.
MAX_LEVERAGE = 1.01


@dataclass(frozen=True)
class Predictor:
    """Maps kernel columns of the landmarks to predictions: coefficients (r, t) and intercept (t,)."""

    columns: Columns
    coefficients: NDArray[np.float64]
    intercept: NDArray[np.float64]


@LEGAL_OVERFLOW
@blas.one_thread()
def predict_block(predictor: Predictor, pieces: Pieces, first_row: int) -> NDArray[np.float64]:
    """k(x, landmarks) · coefficients + intercept (m, t) of all rows.

    In float64 whatever the fit used: coefficients are large and of both signs.
    """
    rank, n_targets = predictor.coefficients.shape
    predictions = [np.empty((0, n_targets))]
    for piece in BlockReader(pieces, first_row):
        with current().turn():
            for _, _, C in kernel_tiles(predictor.columns, piece, rank, F64):
                predictions.append(current().get(C @ here(predictor.coefficients)) + predictor.intercept)
                check_overflow(predictions[-1], first_row)
    return np.concatenate(predictions)


@dataclass(frozen=True)
class Smoother:
    """Maps rows to their coordinates z, and reads them at L ridges.

    ``factors`` are applied to kernel columns in turn; all but the last are lower triangular. ``weighted`` rows have the
    root of their weight as their last feature, which the kernel does not see. ``repeat`` is the weight of one repeat of
    a row, infinite where weights are no repeats.
    """

    columns: Columns
    diagonal: Diagonal
    factors: tuple[NDArray, ...]
    spectrum: GramSpectrum
    shifts: NDArray[np.float64]
    weighted: bool
    repeat: float
    residual_error: float

    @property
    def coefficients(self) -> NDArray[np.float64]:
        """(r, L·t) of z, all targets of a ridge side by side."""
        whole = self.spectrum.eigenvalues[:, None] + self.shifts
        return np.hstack([self.spectrum.projections / one[:, None] for one in whole.T])

    @property
    def readings(self) -> NDArray[np.float64]:
        """(r, 2·L + 1): by what squares of coordinates add up to diagonals of the smoother, of its square, to ‖z‖²."""
        S = self.spectrum.eigenvalues[:, None]
        whole = S + self.shifts
        return np.hstack([1.0 / whole, S / whole**2, np.ones_like(S)])


@dataclass(frozen=True)
class SmoothedRows:
    """Some rows as the smoother sees them.

    Attributes
    ----------
    first
        Position of the first row in its block.
    weights, parts
        (m,) of the rows, and of what is spoken of: one of the repeats of a row, or all of it.
    fitted
        (m, L, t).
    diagonal, square
        (m, L) of the smoother and of its square, for such a part.
    left
        (m, L) 1 − diagonal, never less than it can be.
    variance
        (m, L) of the fitted function, in units of the noise variance, what no landmark explains included.
    """

    first: int
    weights: NDArray[np.float64]
    parts: NDArray[np.float64]
    fitted: NDArray[np.float64]
    diagonal: NDArray[np.float64]
    square: NDArray[np.float64]
    left: NDArray[np.float64]
    variance: NDArray[np.float64]

    @property
    def traces(self) -> NDArray[np.float64]:
        """(m, L) what all repeats of a row add to the trace of the smoother."""
        times = np.divide(self.weights, self.parts, out=np.ones_like(self.weights), where=self.parts > 0)
        return times[:, None] * self.diagonal

    def residuals(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """(m, L, t), given the targets (m', t) of the block."""
        return values[self.first : self.first + len(self.weights), None, :] - self.fitted

    def left_out(self, residuals: NDArray[np.float64]) -> NDArray[np.float64]:
        """Residuals of predictions that are made without the part itself; NaN where nothing else is left."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.left[..., None] > 0, residuals / self.left[..., None], np.nan)


def smoothed_tiles(smoother: Smoother, pieces: Pieces, first_row: int) -> Iterator[SmoothedRows]:
    """The rows of a block, tile by tile."""
    rank, dtype = len(smoother.spectrum.eigenvalues), smoother.factors[-1].dtype
    # In units of the largest, since float32 has no small numbers.
    coefficients = smoother.coefficients
    unit = float(np.abs(coefficients).max(initial=0.0)) or 1.0
    coefficients = (coefficients / unit).astype(dtype)
    readings = smoother.readings.astype(dtype)
    reader = BlockReader(pieces, first_row)
    for piece in reader:
        X, weights = with_weights(piece, smoother.weighted)
        for rows, _, C in kernel_tiles(smoother.columns, X, rank, dtype):
            start = reader.n_rows - len(piece) + rows.start
            found = _smoothed(smoother, (coefficients, unit), readings, X[rows], weights[rows], C, start)
            check_overflow(found.variance, first_row)
            yield found


def with_weights(X: NDArray, weighted: bool) -> tuple[NDArray, NDArray[np.float64]]:
    """Rows X (m, d), and the weights (m,) that they may carry."""
    if not weighted:
        return np.ascontiguousarray(X), np.ones(len(X))
    return np.ascontiguousarray(X[:, :-1]), X[:, -1].astype(np.float64) ** 2


def _smoothed(
    smoother: Smoother,
    scaled: tuple[NDArray, float],
    readings: NDArray,
    X: NDArray,
    weights: NDArray[np.float64],
    C: NDArray,
    start: int,
) -> SmoothedRows:
    spectrum, shifts = smoother.spectrum, smoother.shifts
    *triangular, rotation = smoother.factors
    explained = None
    for factor in triangular:
        C, explained = blas.rows_and_norms(factor, C)
    device, Z = current(), scratch("rotated", (len(X), len(rotation)), C.dtype)
    np.matmul(C, here(rotation).T, out=Z)
    if explained is None:
        explained = blas.row_norms(Z)
    Z -= device.put(spectrum.centre.astype(Z.dtype))
    coefficients, unit = scaled
    fitted = unit * device.get(Z @ here(coefficients)).astype(np.float64, copy=False)
    fitted = fitted.reshape(len(X), len(shifts), len(spectrum.target_mean)) + spectrum.target_mean
    np.multiply(Z, Z, out=Z)
    products = device.get(Z @ here(readings)).astype(np.float64, copy=False)
    own, square = products[:, : len(shifts)] + spectrum.constant, products[:, len(shifts) : -1] + spectrum.constant
    prior = smoother.diagonal(X)
    unexplained = clear_residual(prior - explained, smoother.residual_error * prior)[:, None]
    parts = np.minimum(weights, smoother.repeat)
    share = np.divide(parts, weights, out=np.ones_like(weights), where=weights > 0)[:, None]
    # All of a row has at most 1 − least of itself, and a part its share of that.
    least = 1.0 - share * (1.0 - _least_left(spectrum, shifts, weights, products[:, -1]))
    diagonal = parts[:, None] * own
    return SmoothedRows(
        first=start, weights=weights, parts=parts, fitted=fitted, diagonal=diagonal, square=parts[:, None] * square,
        left=np.maximum(1.0 - diagonal, least), variance=own + unexplained / shifts,
    )  # fmt: skip


def _least_left(
    spectrum: GramSpectrum, shifts: NDArray[np.float64], weights: NDArray[np.float64], distance: NDArray[np.float64]
) -> NDArray[np.float64]:
    """What 1 − h is at least, from ‖z‖² of every row: all others might be at the centre."""
    with np.errstate(divide="ignore", invalid="ignore"):
        # The centre and the constant of the others, where there is an intercept.
        others = 1.0 / (1.0 - weights * spectrum.constant)
        most = weights * spectrum.constant * others + (weights * distance * others**2) / shifts[:, None]
        return np.nan_to_num(1.0 / (1.0 + most), nan=0.0, posinf=0.0, neginf=0.0).T.clip(0.0, 1.0)


@dataclass(frozen=True)
class LeftOutSums:
    """Weighted sums over rows of squared leave-one-out residuals (2, L, t), and the weights (2,): all, no landmarks.

    ``diagonal`` (L,) is the sum of the smoother's diagonal.
    """

    squares: NDArray[np.float64]
    weights: NDArray[np.float64]
    diagonal: NDArray[np.float64]

    def __add__(self, other: "LeftOutSums") -> "LeftOutSums":
        return LeftOutSums(
            self.squares + other.squares, self.weights + other.weights, self.diagonal + other.diagonal
        )  # fmt: skip


@LEGAL_OVERFLOW
@blas.one_thread()
def left_out_block(
    smoother: Smoother,
    pieces: Pieces,
    first_row: int,
    values: NDArray[np.float64],
    landmark_rows: NDArray[np.int64],
) -> LeftOutSums:
    """Squared leave-one-out residuals of a block, summed: over all rows, and over those that are no landmarks."""
    n_ridges, n_targets = len(smoother.shifts), values.shape[1]
    sums = LeftOutSums(np.zeros((2, n_ridges, n_targets)), np.zeros(2), np.zeros(n_ridges))
    for rows in smoothed_tiles(smoother, pieces, first_row):
        squares = rows.weights[:, None, None] * rows.left_out(rows.residuals(values)) ** 2
        # Rows of no weight are not part of the fit.
        squares[rows.weights == 0] = 0.0
        start = first_row + rows.first
        apart = ~np.isin(np.arange(start, start + len(squares)), landmark_rows)
        sums += LeftOutSums(
            np.stack([squares.sum(axis=0), squares[apart].sum(axis=0)]),
            np.array([rows.weights.sum(), rows.weights[apart].sum()]),
            rows.traces.sum(axis=0),
        )
    return sums


@LEGAL_OVERFLOW
@blas.one_thread()
def spread_block(smoother: Smoother, noise: NDArray[np.float64], pieces: Pieces, first_row: int) -> NDArray[np.float64]:
    """Predictions and their standard errors (m, 2·t), given the noise variance (t,)."""
    found = [np.empty((0, 2 * len(noise)))]
    for rows in smoothed_tiles(smoother, pieces, first_row):
        found.append(np.hstack([rows.fitted[:, 0], np.sqrt(rows.variance[:, :1] * noise)]))
    return np.concatenate(found)


def _check_training(diagonal: NDArray[np.float64], first_row: int) -> None:
    """Refuse rows that no fit can have had among its own."""
    if len(diagonal) and diagonal.max() > MAX_LEVERAGE:
        raise InvalidData(
            f"row {first_row + int(diagonal.argmax())} has a leverage of {diagonal.max():.3g}, and no training row has "
            "more than 1: give the rows and weights that the model was fitted to."
        )


@LEGAL_OVERFLOW
@blas.one_thread()
def diagnose_block(
    smoother: Smoother,
    noise: NDArray[np.float64],
    dimension: float,
    pieces: Pieces,
    first_row: int,
    values: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Diagnostics (m, 1 + 7·t) of training rows, each of one repeat if weights count them.

    The smoother's diagonal; then, of every target: fitted values, residuals, leave-one-out residuals, studentized
    residuals, Cook's distances, influences, and residuals studentized for a fixed function.
    """
    diagnostics = [np.empty((0, 1 + 7 * values.shape[1]))]
    for rows in smoothed_tiles(smoother, pieces, first_row):
        residuals = rows.residuals(values)
        left_out, residuals = rows.left_out(residuals)[:, 0], residuals[:, 0]
        diagonal, square, left = rows.diagonal[:, :1], rows.square[:, :1], rows.left[:, :1]
        w = rows.parts[:, None]
        _check_training(rows.traces[:, 0], first_row + rows.first)
        with np.errstate(divide="ignore", invalid="ignore"):
            studentized = residuals * np.sqrt(w / (noise * left))
            # [(I − H)²]_ii, which is never less than its part from the diagonal.
            fixed = residuals * np.sqrt(w / (noise * np.maximum(1.0 - 2.0 * diagonal + square, left**2)))
            cook = square * w * left_out**2 / (dimension * noise)
        columns = (diagonal, rows.fitted[:, 0], residuals, left_out, studentized, cook, diagonal * left_out, fixed)
        diagnostics.append(np.hstack(columns))
    return np.concatenate(diagnostics)
