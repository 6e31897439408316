"""The tasks that apply a fitted regression to blocks of rows."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.kernels import Kernel
from daskrr.numerics.factorize import residual_error
from daskrr.numerics.ridge import RESOLUTION
from daskrr.numerics.smoother import (
    LeftOutSums,
    Predictor,
    Smoother,
    diagnose_block,
    left_out_block,
    predict_block,
    spread_block,
    with_weights,
)
from daskrr.nystrom.reading import columns_of
from daskrr.regression.factors import Coefficients, SmootherFactors
from daskrr.regression.moments import read_targets
from daskrr.runtime.rows import pieces
from daskrr.storage.zarr_arrays import Staged, checksum

F64 = np.dtype(np.float64)


def smoother_of(
    payload: SmootherFactors,
    kernel: Kernel,
    dtype: np.dtype,
    ridges: tuple[float, ...],
    weighted: bool = False,
    repeat: float = math.inf,
) -> Smoother:
    """What maps rows to their coordinates, and those that carry weights to what is said of one repeat."""
    spectrum = payload.spectrum
    return Smoother(
        columns=columns_of(payload.landmarks, kernel, dtype),
        diagonal=kernel.diagonal,
        factors=tuple(factor.astype(dtype, copy=False) for factor in payload.factors),
        spectrum=spectrum,
        shifts=spectrum.weight * np.array(ridges),
        weighted=weighted,
        repeat=repeat,
        residual_error=residual_error(payload.n_landmarks, payload.kernel_error),
    )


def predict_task(kernel: Kernel, payload: Coefficients, source: Any, start: int) -> NDArray[np.float64]:
    """Predictions (m, t)."""
    columns = columns_of(payload.landmarks, kernel, F64)
    predictor = Predictor(columns, payload.coefficients, payload.intercepts)
    return predict_block(predictor, pieces(source), start)


def score_task(
    kernel: Kernel,
    weighted: bool,
    origin: NDArray[np.float64],
    payload: Coefficients,
    source: Any,
    start: int,
    targets: Any,
) -> NDArray[np.float64]:
    """Weighted sums (4, t) over rows: of 1, of targets and their squares about ``origin``, of squared residuals."""
    X, w = with_weights(np.concatenate(list(pieces(source))), weighted)
    y = read_targets(targets, start)
    residuals = y - predict_task(kernel, payload, X, start)
    # Roots first: what has no weight may be too large to be squared.
    roots = np.sqrt(w)[:, None]
    y, residuals = roots * (y - origin), roots * residuals
    columns = np.broadcast_to(roots**2, y.shape), roots * y, y**2, residuals**2
    return np.stack([values.sum(axis=0) for values in columns])


def r_squared(sums: NDArray[np.float64]) -> float:
    """R², averaged over targets, from the sums of all rows; for constant targets as scikit-learn has it."""
    weight, total, squares, residuals = sums
    spread = np.maximum(squares - total**2 / weight, 0.0)
    constant = spread <= RESOLUTION * squares
    found = np.where(constant, np.where(residuals <= RESOLUTION * squares, 1.0, 0.0), 0.0)
    return float(np.mean(np.where(constant, found, 1.0 - residuals / np.where(constant, 1.0, spread))))


def spread_task(
    kernel: Kernel, ridge: float, noise: NDArray[np.float64], payload: SmootherFactors, source: Any, start: int
) -> NDArray[np.float64]:
    """Predictions and their standard errors (m, 2·t)."""
    return spread_block(smoother_of(payload, kernel, F64, (ridge,)), noise, pieces(source), start)


def diagnose_task(
    kernel: Kernel,
    ridge: float,
    weighted: bool,
    repeat: float,
    noise: NDArray[np.float64],
    dimension: float,
    payload: SmootherFactors,
    source: Any,
    start: int,
    targets: Any,
) -> NDArray[np.float64]:
    """Diagnostics (m, 1 + 7·t) of training rows."""
    smoother = smoother_of(payload, kernel, F64, (ridge,), weighted, repeat)
    return diagnose_block(smoother, noise, dimension, pieces(source), start, read_targets(targets, start))


def diagnose_and_then(
    then: Callable[..., Any],
    diagnose: Callable[..., NDArray[np.float64]],
    payload: SmootherFactors,
    source: Any,
    start: int,
    targets: Any,
) -> Any:
    """What ``then`` makes of the diagnostics of a block."""
    return then(diagnose(payload, source, start, targets), start)


def left_out_task(
    kernel: Kernel,
    dtype: np.dtype,
    ridges: tuple[float, ...],
    weighted: bool,
    repeat: float,
    landmark_rows: NDArray[np.int64],
    payload: SmootherFactors,
    source: Any,
    start: int,
    targets: Any,
) -> LeftOutSums:
    """Sums of squared leave-one-out residuals."""
    smoother = smoother_of(payload, kernel, dtype, ridges, weighted, repeat)
    return left_out_block(smoother, pieces(source), start, read_targets(targets, start), landmark_rows)


def write_task(work: Any, staged: Staged, payload: Any, source: Any, start: int) -> dict[str, int]:
    """Write what ``work`` finds about a block to the arrays, side by side; checksums of what was written."""
    arrays = staged.arrays
    found = np.hsplit(work(payload, source, start), len(arrays))
    columns = {
        name: values[:, 0] if arrays[name].ndim == 1 else values
        for name, values in zip(arrays, found, strict=True)
    }  # fmt: skip
    staged.write(columns, start)
    return {name: checksum(values) for name, values in columns.items()}
