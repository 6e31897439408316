"""The compiled functions that kernels and numerics call, on the device of the calling thread.

:func:`sweep` applies a formula to all numbers of a tile while they are in cache. :func:`pairs` goes through rows,
landmarks and features, and applies it to what it has summed of each pair; :func:`mended_sweep` does so where a sum that
is known already is too coarse. :func:`row_sums` adds up what a term makes of the numbers of a row, and :func:`lift`
prepares rows for a product. None holds the interpreter lock.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from daskrr.kernels import device
from daskrr.kernels.common import Array, as_float64, contiguous
from daskrr.kernels.lanes import SCALARS, WIDE, Formula, Step, Term
from daskrr.kernels.loops import Lift, Pairs, RowSums, Sweep
from daskrr.kernels.native import LANES


def sweep(formula: Formula, array: Array) -> None:
    """Apply a formula to every number of a C-contiguous array in place."""
    _check((array, array.dtype))
    device.home(array).run(Sweep(formula, array.dtype), [array], [array.size])


def pairs(step: Step, start: float, formula: Formula, X: Array, Z: Array, w: Array, tile: Array) -> None:
    """Fill the tile (m, p) from rows X (m, d), landmarks Z (d, padded p) and weights w (d,), all three float64.

    Rows may lie in memory in any order. Features add to ``start`` one after the other; a single weight (1,) is shared
    by them, and multiplies the sum. It is rounded to the dtype of the tile, and the formula applied to it.
    """
    _run_pairs(Pairs(step, start, formula, tile.dtype, share=len(w) == 1), X, Z, w, tile, w)


def mended_sweep(step: Step, formula: Formula, tile: Array, limits: Array, X: Array, Z: Array, w: Array) -> None:
    """Apply a formula to the sums in a tile (m, p), after those of a row that are not below its limit are made anew.

    ``limits`` (m,) are float64; the sums, which start at 0, are those of :func:`pairs`.
    """
    if limits.shape != tile.shape[:1]:
        raise ValueError(f"limits {limits.shape} and tile {tile.shape} do not fit")
    _run_pairs(Pairs(step, 0.0, formula, tile.dtype, mends=True, share=len(w) == 1), X, Z, w, tile, limits)


def _run_pairs(loop: Pairs, X: Array, Z: Array, w: Array, tile: Array, limits: Array) -> None:
    X = contiguous(X)
    _check((X, WIDE), (Z, WIDE), (w, WIDE), (tile, loop.dtype), (limits, WIDE))
    n, d, p = *X.shape, tile.shape[1]
    if Z.shape[0] != d or Z.shape[1] % LANES or Z.shape[1] < p or w.shape not in {(d,), (1,)} or tile.shape != (n, p):
        raise ValueError(f"rows {X.shape}, landmarks {Z.shape}, weights {w.shape}, tile {tile.shape} do not fit")
    device.home(tile).run(loop, [X, Z, w, tile, limits], [n, d, p, Z.shape[1]])


def row_sums(term: Term, tiles: Sequence[Array], weights: Array | None = None, limits: Array | None = None) -> Array:
    """Sums (m,), a NumPy array of float64, of what ``term`` makes of the numbers that the tiles (m, p) have at a place.

    A term that asks for them is given the weight of the column, of ``weights`` (p,), and the limit of the row, of
    ``limits`` (m,).
    """
    where, (n_rows, n_columns) = device.home(tiles[0]), tiles[0].shape
    more = [one for one in (weights, limits) if one is not None]
    _check(*((tile, tiles[0].dtype) for tile in tiles), *((one, WIDE) for one in more))
    shapes = {tile.shape for tile in tiles}
    if weights is not None and limits is not None:
        shapes |= {(*limits.shape, *weights.shape)}
    if len(shapes) > 1:
        raise ValueError(f"tiles, weights and limits of shapes {shapes} do not fit")
    sums = where.empty(n_rows, WIDE)
    given = [sums if one is None else one for one in (weights, limits)]
    where.run(RowSums(term, tiles[0].dtype, len(tiles)), [*tiles, sums, *given], [n_rows, n_columns])
    return where.get(sums)


def lift(X: Array, centre: Array, factors: Array, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Rows (X - centre)·factors (m, d), with -|x|²/2 and 1 appended to each; and |x|² (m,), of float64.

    The former are in memory that the thread uses again.
    """
    where, (n_rows, n_features) = device.home(X), X.shape
    X = contiguous(X if X.dtype in SCALARS else as_float64(X))
    lifted, squares = device.scratch("lifted", (n_rows, n_features + 2), dtype, where), where.empty(n_rows, WIDE)
    if centre.shape != (n_features,) or factors.shape != (n_features,):
        raise ValueError(f"rows {X.shape}, centre {centre.shape} and factors {factors.shape} do not fit")
    _check((centre, WIDE), (factors, WIDE))
    given = [X, where.keep(centre), where.keep(factors), lifted, squares]
    where.run(Lift(X.dtype, dtype), given, [n_rows, n_features])
    return lifted, squares


def padded_columns(Z: Array) -> Array:
    """Landmarks (p, d) as :func:`pairs` takes them: (d, padded p) of float64, zero beyond p."""
    columns = np.zeros((Z.shape[1], -(-len(Z) // LANES) * LANES))
    columns[:, : len(Z)] = Z.T
    return columns


def _check(*arrays: tuple[Array, Any]) -> None:
    for array, dtype in arrays:
        if array.dtype != dtype or not array.flags.c_contiguous:
            raise ValueError(f"a C-contiguous array of {dtype} is needed, not one of {array.dtype}")
