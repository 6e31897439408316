"""Weights of rows: a weight m counts a row as m repeats of it would."""

import os
from typing import Any

import dask.array as da
import numpy as np
import zarr
from numpy.typing import NDArray

from daskrr.errors import InvalidData
from daskrr.kernels.weighted import Weighted
from daskrr.nystrom.drawing import of_blocks, weigh
from daskrr.nystrom.landmarks import check_weights
from daskrr.runtime.blocks import block_rows
from daskrr.runtime.inputs import readable
from daskrr.runtime.map_blocks import Run, map_blocks
from daskrr.runtime.rows import ConstantRows, JoinedRows, Rows, open_rows, pieces


def open_weights(rows: Rows, sample_weight: Any, missing_chunks: str) -> Rows:
    """View weights (n,) of the rows, or one number for all of them."""
    sample_weight = readable(sample_weight, "sample_weight")
    if not is_lazy(sample_weight):
        sample_weight = np.asarray(sample_weight, np.float64)
        if sample_weight.ndim == 0:
            return ConstantRows(rows.n_rows, float(sample_weight))
    weights = open_rows(sample_weight, ndim=1, missing_chunks=missing_chunks, name="sample_weight")
    if weights.n_rows != rows.n_rows:
        raise InvalidData(f"X has {rows.n_rows} rows and sample_weight has {weights.n_rows}: one per row is needed.")
    return weights


def is_lazy(array: Any) -> bool:
    """Whether an array is not in memory and must not be brought there."""
    return isinstance(array, (da.Array, zarr.Array, Rows, str, os.PathLike))


def sum_weights(weights: Rows) -> tuple[float, int]:
    """The sum of all weights, and how many are above zero."""
    run = Run.over(weights, block_rows(1, weights))
    weighed = weigh(map_blocks(run, "check-weights", _check_block, weights))
    if not weighed.total > 0:
        raise InvalidData("every sample weight is zero: there is nothing to fit.")
    counts = of_blocks(run.executor, "count-weights", np.count_nonzero, weighed.handles)
    return weighed.total, int(sum(counts))


def _check_block(source: Any, start: int) -> NDArray[np.float64]:
    found = np.concatenate([np.asarray(piece, np.float64) for piece in pieces(source)])
    check_weights(found, start, "sample weight")
    return found


def with_unit_mean(rows: JoinedRows, kernel: Weighted) -> tuple[JoinedRows, Weighted]:
    """The same weighted rows, and their kernel, with weights scaled to a mean of 1, so that n·λ is λ·Σw.

    One light pass checks the weights.

    Raises
    ------
    InvalidData
        A weight is not finite or not above zero.
    """
    total, n_counted = sum_weights(rows.column)
    if n_counted < rows.n_rows:
        raise InvalidData(
            f"{rows.n_rows - n_counted} of {rows.n_rows} sample weights are 0: such rows are not among the data, and "
            "have no score. Leave them out, or ask a sketch for their scores as new rows."
        )
    scale = rows.n_rows / total
    return JoinedRows(rows.rows, rows.column, scale), Weighted(kernel.part, scale)
