"""The kernel matrix W of the landmarks: how exact the kernel of tiles is on it, and the inverse of its factor.

:func:`whiten` turns W into the lower triangular matrix that maps a row of kernel columns to a row of B, with B Bᵀ = L,
the Nyström approximation.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from daskrr.errors import KernelNotPositive
from daskrr.kernels.device import current
from daskrr.numerics import blas, panels

UNIT_ROUNDOFF = {np.dtype(np.float64): 2.0**-53, np.dtype(np.float32): 2.0**-24}

# Least error of a kernel's entries, in unit roundoffs.
LEAST_ROUNDOFFS = 4.0

# Of many landmarks a multiple of this is kept: rows of an odd number of them lie across the lines of memory, and a GPU
# takes twice as long to multiply them.
EVEN_RANK = 4


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
        Smallest pivot that was kept, or what all others leave of a landmark, if that is more than enough; NaN for none.
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


def kernel_error(tile: NDArray, W: NDArray, tile_dtype: np.dtype) -> float:
    """Entry error of the tile kernel on the landmarks: twice the largest seen, and no less than a few roundoffs.

    A few landmarks may be exact by luck, and what is computed from their columns is rounded in any case.
    """
    least = LEAST_ROUNDOFFS * UNIT_ROUNDOFF[tile_dtype]
    scale = np.sqrt(np.maximum(np.diagonal(W), 0.0))
    kept = scale > 0
    if not kept.any():
        return least
    scale = np.where(kept, scale, np.inf)

    def largest(rows: slice) -> float:
        difference = np.abs(tile[rows].astype(np.float64) - W[rows])
        difference /= scale[rows, None]
        difference /= scale
        return float(difference.max())

    return max(least, 2.0 * max(panels.side_by_side(largest, panels.cut(0, len(W), panels.PRODUCT_ROWS))))


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
    unit = _scaled(W if len(kept) == p else W[np.ix_(kept, kept)], scale)
    np.fill_diagonal(unit, 1.0)
    shift = (8.0 if tile_dtype == np.float64 else 2.0) * p * error
    unit.flat[:: len(unit) + 1] += shift
    if penalty is not None:
        unit.flat[:: len(unit) + 1] += penalty[kept] / diagonal[kept]
    pivots, inverse, smallest = _inverse_root(unit, shift, kept)
    if len(pivots) >= panels.SMALLEST and (few := len(pivots) % EVEN_RANK):
        pivots, inverse = pivots[:-few], inverse[:-few, :-few].copy()
    inverse /= scale[pivots]
    return Whitening(kept[pivots], inverse, shift, error, smallest)


def _scaled(W: NDArray, scale: NDArray) -> NDArray[np.float64]:
    """W with rows and columns divided by ``scale``."""
    found = np.empty(W.shape)

    def fill(rows: slice) -> None:
        np.divide(W[rows], scale[rows, None], out=found[rows])
        found[rows] /= scale

    panels.side_by_side(fill, panels.cut(0, len(W)))
    return found


def _inverse_root(unit: NDArray, shift: float, kept: NDArray) -> tuple[NDArray[np.intp], NDArray[np.float64], float]:
    """Pivots, the inverse of the Cholesky factor of ``unit`` by them, and the smallest of what they leave.

    A landmark that another one repeats has the pivot 2·shift: it must fall, whatever its last bits are.
    """
    least = 3.0 * shift
    if len(unit) >= panels.SMALLEST and (found := _without_pivots(unit, least)):
        return np.arange(len(unit)), *found
    R = unit.copy()
    pivots, rank = blas.pivoted_cholesky(R, least)
    _check_positive(unit, R, pivots, rank, shift, kept)
    R = np.tril(R[:rank, :rank])
    smallest = float(np.diagonal(R).min() ** 2) if rank else float("nan")
    panels.invert_lower(R)
    return pivots[:rank], R, smallest


def _without_pivots(unit: NDArray, least: float) -> tuple[NDArray[np.float64], float] | None:
    """The same if all landmarks are kept in any order, which all cores or a device find together; else None.

    What all others leave of landmark j is 1/(unit⁻¹)_jj, and no pivot of it is smaller.
    """
    device = current()
    R, bad = panels.inverse_root(device.put(unit))
    if bad:
        return None
    left = 1.0 / float(np.max(np.einsum("ij,ij->j", R, R)))
    return (device.get(R), left) if left > least else None


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
