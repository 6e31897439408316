"""The effective dimension at many ridges, from the eigenvalues of a sketch: no pass is run."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.errors import check_positive
from daskrr.numerics.bounds import kernel_noise
from daskrr.numerics.factorize import gram_errors, gram_ridge, shift_of
from daskrr.nystrom.audit import Audit
from daskrr.nystrom.certificate import dimension_interval
from daskrr.nystrom.sketch import NystromSketch

# How far beyond those that were scored ridges are drawn, and how many.
RIDGE_RANGE = 100.0
RIDGES_DRAWN = 61
# A multiple n·λ of the identity that can still be computed with.
LARGEST_SHIFT = 1e300


def path_of(
    sketch: NystromSketch, eigenvalues: NDArray[np.float64], audit: Audit | None, ridges: Sequence[float]
) -> dict[str, Any]:
    """Effective dimension of the sketch at some ridges, and by an audit, if any, what the exact one is between.

    Raises
    ------
    RidgeTooSmall
        Round-off would decide the result.
    """
    S, n_rows = eigenvalues, sketch.n_rows
    chosen = [check_positive("ridge", ridge) for ridge in ridges]
    errors = gram_errors(len(S), float(S.max(initial=0.0)), sketch.gram_error, n_rows, chosen, sketch.dtype)
    shifts = [shift_of(n_rows, ridge) for ridge in chosen]
    dimensions = [float(np.sum(S / (S + shift))) for shift in shifts]
    path: dict[str, Any] = {"ridges": chosen, "sketch_dimension": dimensions, "lower": None, "upper": None}
    if audit is not None:
        figures = zip(shifts, errors, dimensions, strict=True)
        ends = [dimension_interval(audit, n_rows, *one) for one in figures]
        path |= {"lower": [low for low, _ in ends], "upper": [high for _, high in ends]}
    return path


def ridge_range(sketch: NystromSketch, eigenvalues: NDArray[np.float64], mean_diagonal: float) -> list[float]:
    """Ridges about those that were scored, none of which is too small for :func:`path_of`."""
    rank, norm = len(eigenvalues), float(eigenvalues.max(initial=0.0))
    least = 2.0 * kernel_noise(sketch.kernel_error, mean_diagonal)
    low = min(max(min(sketch.ridges) / RIDGE_RANGE, least), min(sketch.ridges))
    low = max(low, 1.01 * gram_ridge(rank, norm, sketch.gram_error, sketch.n_rows, sketch.dtype))
    high = min(RIDGE_RANGE * max(sketch.ridges), LARGEST_SHIFT / sketch.n_rows)
    return np.geomspace(low, max(low, high), RIDGES_DRAWN).tolist()
