"""Products of tiles with up to a thousand columns, by machine code of our own; other ones are left to BLAS.

BLAS spends much of its time on these to bring both factors into an order that suits it. Here the constant factor of all
rows is brought into it once, a few rows at a time stay in cache, and what is needed next is on its way meanwhile. Sums
of Gram matrices are kept in the order in which they are found, *panels* of the lower triangle one after another, which
takes half the memory of a matrix. Those that BLAS or a GPU has found travel so too.
"""

from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.kernels import compiled, native
from daskrr.kernels.device import HOST, Companions, here, home, scratch
from daskrr.kernels.lanes import WIDE, Formula
from daskrr.kernels.product_loops import (
    PACKED_ROWS,
    REGISTER_BYTES,
    ROWS,
    VECTORS,
    AddGram,
    RowsTimes,
    RowsTimesLower,
    lanes_of,
    width_of,
)

# Columns from which on and up to which this is faster than BLAS.
LEAST_COLUMNS, MOST_COLUMNS = 48, 1024

# Of a product with few columns so many vectors are: with more, one with the 32 of a probe would have some in vain.
FEW_VECTORS, FEW_COLUMNS = 2, 32

# A constant that is larger does not stay in the cache of a core, and BLAS is faster.
MOST_FACTOR_BYTES = 2**20

# Rows that are multiplied by a panel before the next one, whose bytes have room in that cache beside it.
MOST_ROWS, MOST_ROW_BYTES = 128, 2**19

Tile = NDArray[Any]
Sums = NDArray[np.float64]

_PACKED = Companions()


def suit(n_columns: int) -> bool:
    """Whether products of tiles with so many columns are to be made here, on this processor."""
    return LEAST_COLUMNS <= n_columns <= MOST_COLUMNS and native.has_wide_registers()


def multiply_rows(A: Tile, B: Tile) -> NDArray[np.float64]:
    """Overwrite each row b of B (m, p) by A b, where A (p, p) is lower triangular and never changes.

    The squared norms (m,) of what they are then, summed in float64, come with that.
    """
    (m, p), norms = B.shape, np.empty(len(B))
    packed = _PACKED.of(A, "lower", lambda: _pack_lower(A))
    at_once = min(MOST_ROWS, MOST_ROW_BYTES // (p * B.itemsize) // ROWS * ROWS)
    sums = _kept("norms", at_once * lanes_of(B.dtype), WIDE)
    HOST.run(RowsTimesLower(B.dtype), [B, packed, sums, norms], [m, p, at_once])
    return norms


def are_own(A: Tile) -> bool:
    """Whether products with a constant (p, a) are made here, on this processor."""
    return native.has_wide_registers() and A.nbytes <= MOST_FACTOR_BYTES


def times(B: Any, A: Tile, out: Any, formula: Formula | None = None) -> None:
    """Fill ``out`` (m, a) with B A, for B (m, p), where A (p, a) never changes, and apply a formula to each number.

    Both tiles are on one device.
    """
    if (B.shape[1], *out.shape) != (len(A), len(B), A.shape[1]) or not B.dtype == A.dtype == out.dtype:
        raise ValueError(f"cannot multiply {B.shape} {B.dtype} by {A.shape} {A.dtype} into {out.shape} {out.dtype}")
    if not (B.flags.c_contiguous and out.flags.c_contiguous):
        raise ValueError("rows that are multiplied, and those that they become, must lie one after the other")
    if home(out).is_host and are_own(A):
        rows_times(A, B, out, formula)
        return
    np.matmul(B, here(A), out=out)
    if formula is not None:
        compiled.sweep(formula, out)


def rows_times(A: Tile, B: Tile, out: Tile, formula: Formula | None = None) -> None:
    """The same by machine code of our own, for C-contiguous arrays."""
    n_vectors = FEW_VECTORS if A.shape[1] <= FEW_COLUMNS else VECTORS
    packed = _PACKED.of(A, "columns", lambda: _pack_columns(A, width_of(A.dtype, n_vectors)))
    HOST.run(RowsTimes(B.dtype, n_vectors, formula), [B, packed, out], [*B.shape, A.shape[1]])


def no_sums(n_columns: int) -> Sums:
    """Zeros, to which :func:`add_gram` adds the Gram matrices of that many columns."""
    return _aligned(np.zeros, n_sums(n_columns), WIDE)


def n_sums(n_columns: int) -> int:
    """Numbers of which those sums are."""
    return sum(len(lines) * width_of(WIDE) for lines in _lines(n_columns))


def add_gram(B: Tile, sums: Sums) -> None:
    """Add BᵀB to sums, for B (m, p)."""
    m, p = B.shape
    room = _kept("rows", (PACKED_ROWS + 1) * (p + width_of(WIDE)), WIDE)
    HOST.run(AddGram(B.dtype), [B, sums, room], [m, p])


def sums_of(gram: Any) -> Any:
    """The lower triangle of a matrix (p, p) in their order, and something beside it, where the matrix is."""
    where, p = home(gram), len(gram)
    if not where.is_host:
        return gram.reshape(-1)[where.keep(_places(p))]
    sums = np.zeros(n_sums(p))
    for first, panel in panels(sums, p):
        panel[...] = gram[first:, first : first + panel.shape[1]]
    return sums


@lru_cache(maxsize=4)
def _places(n_columns: int) -> NDArray[np.int32]:
    """Where in a matrix each of those numbers is, for a device that is told so in one go."""
    places = np.zeros(n_sums(n_columns), np.int32)
    for first, panel in panels(places, n_columns):
        rows, columns = (first + np.arange(size, dtype=np.int32) for size in panel.shape)
        panel[...] = rows[:, None] * n_columns + columns
    return places


def panels(sums: Any, n_columns: int) -> Iterator[tuple[int, Any]]:
    """The first column of each panel, and the part of it that is of the matrix: from that row on, some columns."""
    width, done = width_of(WIDE), 0
    for lines in _lines(n_columns):
        left, size = n_columns - lines.start, len(lines) * width
        yield lines.start, sums[done : done + size].reshape((-1, width))[:left, :left]
        done += size


@cache
def diagonal_places(n_columns: int) -> NDArray[np.int64]:
    """Where in those sums the diagonal is."""
    places = np.arange(n_sums(n_columns))
    return np.concatenate([places[:0], *(np.diagonal(panel) for _, panel in panels(places, n_columns))])


def _lines(n_columns: int) -> Iterator[range]:
    """Rows of a Gram matrix that each of its panels has sums of."""
    stop = -(-n_columns // ROWS) * ROWS
    return (range(start, stop) for start in range(0, n_columns, width_of(WIDE)))


def _pack_lower(A: Tile) -> Tile:
    """The rows of A (p, p) in panels, the last one first, each with as many columns as its last row has, transposed.

    The panel of the first rows is the one that need not be full: zeros follow them.
    """
    p, width, panels = len(A), width_of(A.dtype), []
    for stop in range(p, 0, -width):
        start, panel = max(stop - width, 0), np.zeros((width, stop), A.dtype)
        panel[: stop - start] = np.tril(A[start:stop, :stop], start)
        panels.append(panel.T.ravel())
    return np.concatenate(panels, out=_aligned(np.empty, sum(map(len, panels)), A.dtype))


def _pack_columns(A: Tile, width: int) -> Tile:
    """The columns of A (p, a) in panels of so many, one after another, zeros after the last."""
    p, n_columns = A.shape
    padded = np.zeros((p, -(-n_columns // width) * width), A.dtype)
    padded[:, :n_columns] = A
    packed = _aligned(np.empty, padded.size, A.dtype)
    packed.reshape(-1, p, width)[...] = padded.reshape(p, -1, width).transpose(1, 0, 2)
    return packed


def _kept(use: str, size: int, dtype: np.dtype[Any]) -> Tile:
    """Memory of the thread, also of one that has other things computed on a GPU."""
    return _aligned(lambda size, dtype: scratch(f"products {use}", (size,), dtype, HOST), size, dtype)


def _aligned(allocate: Callable[..., Tile], size: int, dtype: np.dtype[Any]) -> Tile:
    """Memory for so many numbers that begins where a register is read at once."""
    memory = allocate(size + lanes_of(dtype), dtype)
    first = -memory.ctypes.data % REGISTER_BYTES // dtype.itemsize
    return memory[first : first + size]
