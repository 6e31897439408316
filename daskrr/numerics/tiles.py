"""What one worker does to one block of rows, tile by tile: pure functions, no Dask.

A block arrives as an iterable of *pieces*, each a NumPy array of some of its rows in order (one decoded input
chunk, say). Pieces are cut into tiles whose height depends on the number of landmarks alone, because it changes
bits. A tile of kernel columns is computed in panels that stay in cache, then transformed in place.
"""

import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from daskrr.errors import InvalidData, KernelNotPositive, SourceChanged
from daskrr.numerics import blas

Columns = Callable[[NDArray, NDArray], None]
Diagonal = Callable[[NDArray], NDArray]
Pieces = Iterable[NDArray]

# A tile should stay in the caches of its core (several processes share the way to memory), yet hold rows enough that
# adding its Gram matrix to a p × p sum is worth reading that sum. One product on it is far below half a second on one
# core, so that a worker stays responsive. A panel is computed and exponentiated in a core's own cache.
TILE_ELEMENTS = 2**19
WORTHWHILE_ROWS = 512
TILE_FLOPS = 1e10
PANEL_BYTES = 2**20

# A residual below zero by so many times its round-off budget is no round-off. The worst ever seen was 0.9 times.
NOT_POSITIVE = 100.0

# An overflow is found in the results and named there.
_LEGAL_OVERFLOW = np.errstate(over="ignore", invalid="ignore")


def tile_rows(n_columns: int) -> int:
    """Rows of a tile, a power of two and a function of the number of landmarks alone."""
    p = max(n_columns, 1)
    rows = max(TILE_ELEMENTS // p, min(WORTHWHILE_ROWS, int(TILE_FLOPS / p**2)))
    return max(32, 1 << (min(rows, 4096).bit_length() - 1))


def panel_rows(n_columns: int) -> int:
    """Rows of a panel of kernel columns that fits in cache."""
    return max(16, min(1024, PANEL_BYTES // (8 * max(n_columns, 1))))


@dataclass(frozen=True)
class Whitener:
    """Maps rows of X to rows of B: prepared kernel columns of the kept landmarks, and the factor of W."""

    columns: Columns
    diagonal: Diagonal
    inverse: NDArray
    residual_error: float


@dataclass(frozen=True)
class Kept:
    """What pass 1 keeps of a block for pass 2: 8 bytes a row and a few numbers."""

    residual: NDArray[np.float64]
    diagonal_sum: float
    checksum: int

    def __sizeof__(self) -> int:
        return self.residual.nbytes


@dataclass(frozen=True)
class GramPart:
    """Result of pass 1 on one block: the lower triangle of its Gram matrix, and what is kept."""

    gram: NDArray[np.float64]
    kept: Kept

    def __sizeof__(self) -> int:
        return self.gram.nbytes + self.kept.__sizeof__()


@dataclass(frozen=True)
class Scorer:
    """What pass 2 applies: one combined factor, or the factor of W followed by that of the ridge."""

    columns: Columns
    diagonal: Diagonal
    factors: tuple[NDArray, ...]
    shift: float
    residual_error: float


@dataclass
class BlockReader:
    """Hands out the pieces of a block: checks that every value is finite and takes the block's checksum."""

    pieces: Pieces
    first_row: int
    checksum: int = field(default=0, init=False)
    n_rows: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[NDArray]:
        for piece in self.pieces:
            piece = np.ascontiguousarray(piece)
            check_finite(piece, self.first_row + self.n_rows)
            self.checksum = zlib.crc32(piece.data.cast("B"), self.checksum)
            self.n_rows += len(piece)
            yield piece


def check_finite(piece: NDArray, first_row: int) -> None:
    """Raise :class:`InvalidData` naming the first rows of ``piece`` (m, d) that hold NaN or infinity."""
    if piece.dtype.kind not in "fc" or np.isfinite(piece).all():
        return
    bad = np.flatnonzero(~np.isfinite(piece).all(axis=1))
    named = ", ".join(str(first_row + row) for row in bad[:5]) + (", …" if len(bad) > 5 else "")
    raise InvalidData(
        f"rows {first_row}–{first_row + len(piece) - 1} of the input hold NaN or infinity in {len(bad)} rows: "
        f"{named}. Remove or impute them before scoring."
    )


def fill_tile(columns: Columns, X: NDArray, tile: NDArray) -> None:
    """Fill ``tile`` (m, p) with the kernel columns of the rows X (m, d), panel by panel."""
    height = panel_rows(tile.shape[1])
    for start in range(0, len(X), height):
        columns(X[start : start + height], tile[start : start + height])


def _tiles(X: NDArray, n_columns: int) -> Iterator[slice]:
    height = tile_rows(n_columns)
    return (slice(start, min(start + height, len(X))) for start in range(0, len(X), height))


class _Scratch(threading.local):
    """Memory for the tiles of one thread, kept from task to task: new pages cost a few percent of the work."""

    memory = np.empty(0, np.uint8)


_SCRATCH = _Scratch()


def _tile(n_rows: int, n_columns: int, dtype: np.dtype) -> NDArray:
    """An array (n_rows, n_columns) that is valid until this thread asks for the next."""
    size = n_rows * n_columns * dtype.itemsize
    if _SCRATCH.memory.nbytes < size:
        _SCRATCH.memory = np.empty(size, np.uint8)
    return _SCRATCH.memory[:size].view(dtype).reshape(n_rows, n_columns)


@_LEGAL_OVERFLOW
@blas.one_thread()
def gram_block(whitener: Whitener, pieces: Pieces, first_row: int) -> GramPart:
    """Pass 1 on one block (Algorithm, step 3): C → B → G += BᵀB, and the residual k_ii − ‖b_i‖².

    Raises
    ------
    InvalidData
        NaN or infinity in the rows, or in their kernel values.
    """
    rank, dtype = len(whitener.inverse), whitener.inverse.dtype
    reader = BlockReader(pieces, first_row)
    gram = np.zeros((rank, rank))
    part = gram if dtype == np.float64 else np.empty((rank, rank), dtype)
    residuals: list[NDArray] = []
    diagonals: list[NDArray] = []
    for piece in reader:
        diagonal = whitener.diagonal(piece)
        diagonals.append(diagonal)
        for rows in _tiles(piece, rank):
            B = _tile(rows.stop - rows.start, rank, dtype)
            fill_tile(whitener.columns, piece[rows], B)
            blas.multiply_rows(whitener.inverse, B)
            residuals.append(diagonal[rows] - blas.row_norms(B))
            _add_gram(B, gram, part)
    residual = np.concatenate(residuals) if residuals else np.empty(0)
    check_overflow(residual, first_row)
    check_overflow(np.diagonal(gram), first_row)
    diagonal = np.concatenate(diagonals) if diagonals else np.empty(0)
    _check_positive(residual, diagonal, whitener.residual_error, first_row)
    return GramPart(gram, Kept(residual, float(diagonal.sum()), reader.checksum))


def _check_positive(residual: NDArray, diagonal: NDArray, error: float, first_row: int) -> None:
    """Refuse a kernel for which landmarks explain more of a row than there is of it, far beyond round-off."""
    excess = -residual - NOT_POSITIVE * error * diagonal
    if len(excess) and excess.max() > 0:
        worst = int(excess.argmax())
        raise KernelNotPositive(
            f"the kernel is not positive semi-definite: the landmarks explain {diagonal[worst] - residual[worst]:.6g} "
            f"of row {first_row + worst}, whose own k(x, x) is {diagonal[worst]:.6g}. Correct its formula or diagonal."
        )


def _add_gram(B: NDArray, gram: NDArray, part: NDArray) -> None:
    """Add BᵀB to the float64 ``gram``; a float32 tile sums into ``part`` first."""
    if part is gram:
        blas.add_gram(B, gram)
        return
    part[...] = 0
    blas.add_gram(B, part)
    np.add(gram, part, out=gram)


def check_overflow(values: NDArray, first_row: int) -> None:
    """Raise :class:`InvalidData` if what was computed from a block's kernel values is not finite."""
    if not np.isfinite(values).all():
        raise InvalidData(
            f"kernel values of the block of rows from {first_row}, or sums of them, overflow the dtype of the tiles. "
            "Scale the features, or use dtype='float64'."
        )


@_LEGAL_OVERFLOW
@blas.one_thread()
def score_block(scorer: Scorer, pieces: Pieces, first_row: int, kept: Kept) -> NDArray[np.float64]:
    """Pass 2 on one block (Algorithm, step 5): the scores and the estimate of its rows, (m, 2).

    Raises
    ------
    SourceChanged
        The block is not the one that pass 1 saw.
    """
    rank, dtype = len(scorer.factors[0]), scorer.factors[0].dtype
    reader = BlockReader(pieces, first_row)
    norms: list[NDArray] = []
    diagonals: list[NDArray] = []
    for piece in reader:
        diagonals.append(scorer.diagonal(piece))
        for rows in _tiles(piece, rank):
            B = _tile(rows.stop - rows.start, rank, dtype)
            fill_tile(scorer.columns, piece[rows], B)
            for factor in scorer.factors:
                blas.multiply_rows(factor, B)
            norms.append(blas.row_norms(B))
    diagonal = np.concatenate(diagonals) if diagonals else np.empty(0)
    _check_unchanged(reader, kept, first_row)
    raw = np.concatenate(norms) if norms else np.empty(0)
    check_overflow(raw, first_row)
    return _scores_and_estimate(scorer, raw, diagonal, kept.residual)


@_LEGAL_OVERFLOW
@blas.one_thread()
def new_rows_block(whitener: Whitener, scorer: Scorer, pieces: Pieces, first_row: int) -> NDArray[np.float64]:
    """Scores, estimate and residual (m, 3) of rows that pass 1 has never seen."""
    rank, dtype = len(whitener.inverse), whitener.inverse.dtype
    outputs: list[NDArray] = []
    for piece in BlockReader(pieces, first_row):
        for rows in _tiles(piece, rank):
            B = _tile(rows.stop - rows.start, rank, dtype)
            fill_tile(whitener.columns, piece[rows], B)
            blas.multiply_rows(whitener.inverse, B)
            diagonal = whitener.diagonal(piece[rows])
            residual = diagonal - blas.row_norms(B)
            blas.multiply_rows(scorer.factors[-1], B)
            check_overflow(residual, first_row)
            both = _scores_and_estimate(scorer, blas.row_norms(B), diagonal, residual)
            outputs.append(np.column_stack([both, residual]))
    return np.concatenate(outputs) if outputs else np.empty((0, 3))


def _check_unchanged(reader: BlockReader, kept: Kept, first_row: int) -> None:
    if reader.n_rows != len(kept.residual) or reader.checksum != kept.checksum:
        raise SourceChanged(
            f"the block of rows from {first_row} changed between the passes: pass 1 read {len(kept.residual)} rows "
            f"with checksum {kept.checksum:08x}, pass 2 {reader.n_rows} rows with {reader.checksum:08x}. "
            "Score a source that does not change while it is read (store a lazy array first)."
        )


def _scores_and_estimate(scorer: Scorer, raw: NDArray, diagonal: NDArray, residual: NDArray) -> NDArray[np.float64]:
    """Cap the raw scores by what a single row can have, and correct each by its own residual.


    A row's score is at most ‖b‖²/(‖b‖² + n·λ), with ‖b‖² = k_ii − e up to its last digit. If it were the only row with
    a residual e, its exact score would be 1 − o/(1 + g) = score + o·g/(1 + g), o = 1 − score and g = e·o/(n·λ), of
    which the second form loses no digits; a residual below its own round-off corrects nothing.
    """
    explained = np.maximum(diagonal - residual, 0.0) + np.finfo(np.float64).eps * diagonal
    scores = np.minimum(raw, explained / (explained + scorer.shift))
    others = 1.0 - scores
    e = np.where(residual > 8.0 * scorer.residual_error * diagonal, residual, 0.0)
    gain = e * others / scorer.shift
    estimate = np.minimum(scores + others * (gain / (1.0 + gain)), 1.0)
    return np.column_stack([scores, estimate])
