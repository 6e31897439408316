"""The p × p algebra on all cores, in panels of a fixed size, each on one core: bits do not depend on their number.

Matrices are C-contiguous and of float64. Small ones are left to LAPACK, and those of another device to its own
routines.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from daskrr.kernels import products
from daskrr.kernels.device import Accelerator, home
from daskrr.numerics import blas

T = TypeVar("T")

# Rows of a panel that is factored, and of one that is multiplied, of which there are more than cores.
PANEL_ROWS, PRODUCT_ROWS = 256, 64

# Numbers that are added, and panels of sums that become a part of a matrix.
ADDED_AT_ONCE, PANELS_AT_ONCE = 2**18, 16

# To hand so few to others would take longer than to do them.
FEW_PANELS = 4

# Smaller matrices are done with before other cores have begun.
SMALLEST = 4 * PANEL_ROWS

Matrix = NDArray[np.float64]


def mirrored(A: Matrix) -> Matrix:
    """Copy of A (p, p) with the upper triangle replaced by the mirrored lower one."""
    full = np.empty_like(A)

    def fill(rows: slice) -> None:
        full[rows, rows] = blas.mirror_lower(A[rows, rows])
        full[rows, : rows.start] = A[rows, : rows.start]
        full[: rows.start, rows] = A[rows, : rows.start].T

    side_by_side(fill, cut(0, len(A)))
    return full


def symmetric(A: Matrix) -> Matrix:
    """(A + Aᵀ)/2, for A (p, p)."""
    mean = np.empty_like(A)

    def fill(rows: slice) -> None:
        mean[rows] = 0.5 * (A[rows] + A[:, rows].T)

    side_by_side(fill, cut(0, len(A)))
    return mean


def lower(A: Matrix) -> Matrix:
    """Copy of the lower triangle of A (p, p), with zeros above."""
    full = np.zeros(A.shape)

    def fill(rows: slice) -> None:
        full[rows, : rows.stop] = np.tril(A[rows, : rows.stop], rows.start)

    side_by_side(fill, cut(0, len(A)))
    return full


def add(A: NDArray[np.float64], B: NDArray[np.float64]) -> None:
    """Add B to A, both (…, n)."""

    def add_some(part: slice) -> None:
        A[..., part] += B[..., part]

    side_by_side(add_some, cut(0, A.shape[-1], ADDED_AT_ONCE))


def matrix_of(sums: NDArray[np.float64], p: int) -> Matrix:
    """The matrix (p, p) whose lower triangle sums are of, in their order; what is above it is of no use."""
    full, some = np.zeros((p, p)), list(products.panels(sums, p))

    def fill(part: slice) -> None:
        for first, panel in some[part]:
            full[first:, first : first + panel.shape[1]] = panel

    side_by_side(fill, cut(0, len(some), PANELS_AT_ONCE))
    return full


def packed_lower(A: Matrix) -> NDArray[np.float64]:
    """The lower triangle of A (p, p), row after row."""
    return np.concatenate([A[:0].reshape(-1), *(row[: number + 1] for number, row in enumerate(A))])


def unpacked_lower(triangle: NDArray[np.float64]) -> Matrix:
    """What :func:`packed_lower` made a vector of, with zeros above."""
    size = (math.isqrt(8 * len(triangle) + 1) - 1) // 2
    full = np.zeros((size, size))
    for number, row in enumerate(full):
        first = number * (number + 1) // 2
        row[: number + 1] = triangle[first : first + number + 1]
    return full


def times(A: NDArray[Any], B: NDArray[Any]) -> NDArray[Any]:
    """A B, for A (m, p) and B (p, …), of any floating dtype."""
    if not home(A).is_host:
        return A @ B
    return np.concatenate([A[:0] @ B, *side_by_side(lambda rows: A[rows] @ B, cut(0, len(A)))])


def lower_product(A: Matrix, B: Matrix) -> Matrix:
    """A B of two lower triangular matrices (p, p)."""
    if not home(A).is_host:
        return A @ B
    product = np.zeros(A.shape)

    def fill(rows: slice) -> None:
        before = slice(0, rows.stop)
        product[rows, before] = np.tril(A[rows, before] @ B[before, before], rows.start)

    side_by_side(fill, cut(0, len(A), PRODUCT_ROWS))
    return product


def gram(A: Matrix) -> Matrix:
    """The lower triangle of A Aᵀ, for a lower triangular A (p, p), with zeros above."""
    product = np.zeros(A.shape)

    def fill(rows: slice) -> None:
        product[rows, : rows.stop] = np.tril(A[rows, : rows.stop] @ A[: rows.stop, : rows.stop].T, rows.start)

    side_by_side(fill, cut(0, len(A), PRODUCT_ROWS))
    return product


def trace_of_form(A: Matrix, G: Matrix) -> float:
    """tr(A G Aᵀ) of a lower triangular A and a symmetric G, both (p, p)."""
    if not home(A).is_host:
        return float(np.einsum("ij,ij->", A @ G, A))

    def add_up(rows: slice) -> float:
        some = A[rows, : rows.stop]
        return float(np.einsum("ij,ij->", some @ G[: rows.stop, : rows.stop], some))

    return math.fsum(side_by_side(add_up, cut(0, len(A), PRODUCT_ROWS)))


def inverse_root(A: Matrix, shift: float = 0.0) -> tuple[Matrix, int]:
    """L⁻¹ with L Lᵀ = A + shift·I, for a symmetric A (p, p), and 0; or something, and the first bad pivot's number."""
    if isinstance(where := home(A), Accelerator):
        shifted = A.copy()
        shifted.reshape(-1)[:: len(A) + 1] += shift
        if (found := where.inverse_root(shifted)) is not None:
            return found, 0
        A = where.get(A)  # which pivot it was, the processor tells
    M = lower(A)
    M.flat[:: len(M) + 1] += shift
    bad = cholesky(M)
    if not bad:
        invert_lower(M)
    return M, bad


def cholesky(A: Matrix) -> int:
    """Overwrite A (p, p), zero above the diagonal, by L with A = L Lᵀ; return 0, or the first bad pivot's number."""
    if len(A) < SMALLEST:
        return blas.cholesky(A)
    for done in cut(0, len(A)):
        corner = A[done, done].copy()
        if bad := blas.cholesky(corner):
            return done.start + bad
        A[done, done] = np.tril(corner)
        side_by_side(partial(_solve, A, corner, done), cut(done.stop, len(A), PRODUCT_ROWS))
        side_by_side(partial(_subtract_products, A, done), cut(done.stop, len(A), PRODUCT_ROWS))
    return 0


def _solve(A: Matrix, corner: Matrix, done: slice, rows: slice) -> None:
    left = A[rows, done].copy()
    blas.solve_rows(corner, left)
    A[rows, done] = left


def _subtract_products(A: Matrix, done: slice, rows: slice) -> None:
    """What the columns that are done explain of some rows, up to the diagonal."""
    A[rows, done.stop : rows.stop] -= A[rows, done] @ A[done.stop : rows.stop, done].T


def invert_lower(L: Matrix) -> None:
    """Overwrite the lower triangular L (p, p) by its inverse.

    The inverse of [[A, 0], [B, C]] is [[A⁻¹, 0], [-C⁻¹ B A⁻¹, C⁻¹]]: corners of a panel first, then of twice as much.
    """
    if len(L) < SMALLEST:
        return blas.invert_lower(L)
    side_by_side(partial(_invert_corner, L), cut(0, len(L)))
    size = PANEL_ROWS
    while size < len(L):
        for start in range(0, len(L) - size, 2 * size):
            middle, stop = start + size, min(start + 2 * size, len(L))
            first, below = slice(start, middle), list(cut(middle, stop, PRODUCT_ROWS))
            product = np.concatenate(side_by_side(partial(_times, L, first), below))
            side_by_side(partial(_finish, L, product, first, middle), below)
        size *= 2
    return None


def _invert_corner(L: Matrix, rows: slice) -> None:
    corner = L[rows, rows].copy()
    blas.invert_lower(corner)
    L[rows, rows] = corner


def _times(L: Matrix, corner: slice, rows: slice) -> Matrix:
    return L[rows, corner] @ L[corner, corner]


def _finish(L: Matrix, product: Matrix, columns: slice, middle: int, rows: slice) -> None:
    """-C⁻¹ (B A⁻¹) of some rows, where C⁻¹ ends with the diagonal."""
    L[rows, columns] = -(L[rows, middle : rows.stop] @ product[: rows.stop - middle])


def cut(start: int, stop: int, height: int = PANEL_ROWS) -> Iterator[slice]:
    """Rows ``start`` to ``stop`` in panels."""
    for first in range(start, stop, height):
        yield slice(first, min(first + height, stop))


def side_by_side(work: Callable[[slice], T], panels: Iterable[slice]) -> list[T]:
    """What is made of each; the last ones, which are the longest, are begun first, and few are done in turn."""
    last_first = list(panels)[::-1]
    with blas.one_thread():
        share = map if len(last_first) <= FEW_PANELS else _cores().map
        return [*share(work, last_first)][::-1]


@cache
def _cores() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
