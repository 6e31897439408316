"""What one worker does to one block of rows, tile by tile: pure functions, no Dask.

A block arrives as an iterable of *pieces*, each a NumPy array of some of its rows in order (one decoded input
chunk, say). Pieces are cut into tiles whose height depends on the number of landmarks and the device alone, because it
changes bits. A tile of kernel columns is computed on the device, then transformed in place.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from daskrr.errors import InvalidData
from daskrr.kernels.device import current, scratch
from daskrr.numerics.checksum import crc32c

Columns = Callable[[NDArray, NDArray], None]
Diagonal = Callable[[NDArray], NDArray]
Pieces = Iterable[NDArray]

# What Python does for a tile takes a millisecond, since its own memory has left the caches by then: rows enough that
# this is little, and that adding their Gram matrix to a p × p sum is worth reading that sum, but no more numbers than
# are still near their core (several processes share the way to memory). One product on a tile is far below half a
# second on one core, so that a worker stays responsive.
TILE_ELEMENTS = 2**21
WORTHWHILE_ROWS = 2048
MOST_ROWS = 8192
TILE_FLOPS = 1e10

# An overflow is found in the results and named there.
LEGAL_OVERFLOW = np.errstate(over="ignore", invalid="ignore")


def tile_rows(n_columns: int) -> int:
    """Rows of a tile, a power of two and a function of the number of landmarks and the device alone."""
    if (wished := current().tile_rows(n_columns)) is not None:
        return wished
    p = max(n_columns, 1)
    rows = min(max(TILE_ELEMENTS // p, WORTHWHILE_ROWS), MOST_ROWS, int(TILE_FLOPS / p**2))
    return max(32, 1 << (max(rows, 1).bit_length() - 1))


@dataclass
class BlockReader:
    """Hands out the pieces of a block: checks that every value is finite and takes checksums.

    There is one for each chunk of the input that the block has rows of, if the pieces know the rows of a chunk as
    ``unit_rows``, or one for the whole block; it does not matter how the block is cut into pieces.
    """

    pieces: Pieces
    first_row: int
    checksums: list[int] = field(default_factory=list, init=False)
    n_rows: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[NDArray]:
        for piece in self.pieces:
            piece = np.ascontiguousarray(piece)
            check_finite(piece, self.first_row + self.n_rows)
            self._add(piece)
            self.n_rows += len(piece)
            if len(piece):
                yield piece

    @property
    def _unit(self) -> int:
        """Rows of a chunk; where chunks have one row or none is known, as good as endless."""
        unit = getattr(self.pieces, "unit_rows", 1)
        return unit if unit > 1 else sys.maxsize

    def _add(self, piece: NDArray) -> None:
        """Add a piece to the checksums of its chunks."""
        first, unit, done = self.first_row + self.n_rows, self._unit, 0
        while done < len(piece):
            place = (first + done) % unit
            if place == 0 or not self.checksums:
                self.checksums.append(0)
            stop = min(done + unit - place, len(piece))
            self.checksums[-1] = crc32c(piece[done:stop], self.checksums[-1])
            done = stop

    def name(self, number: int) -> str:
        """The rows that a checksum is of, for messages, and their chunks, if the pieces can ``describe`` them."""
        unit, stop = self._unit, self.first_row + self.n_rows
        begin = (self.first_row // unit + number) * unit
        describe = getattr(self.pieces, "describe", "rows {}–{} of the input".format)
        return describe(max(begin, self.first_row), min(begin + unit, stop) - 1)


def check_finite(piece: NDArray, first_row: int, name: str = "the input") -> None:
    """Raise :class:`InvalidData` naming the first rows of ``piece`` (m, d) that hold NaN or infinity."""
    if piece.dtype.kind not in "fc" or _all_finite(piece):
        return
    bad = np.flatnonzero(~np.isfinite(piece).all(axis=1))
    named = ", ".join(str(first_row + row) for row in bad[:5]) + (", …" if len(bad) > 5 else "")
    raise InvalidData(
        f"rows {first_row}–{first_row + len(piece) - 1} of {name} hold NaN or infinity in {len(bad)} rows: "
        f"{named}. Remove or impute them."
    )


def kernel_tiles(
    columns: Columns, X: NDArray, n_columns: int, dtype: np.dtype
) -> Iterator[tuple[slice, NDArray, NDArray]]:
    """Which of the rows X (m, d), these rows on the device, and their kernel columns there.

    The columns are in memory that is used again for the next of them.
    """
    height, device = tile_rows(n_columns), current()
    for start in range(0, len(X), height):
        rows = slice(start, min(start + height, len(X)))
        C, there = scratch("tile", (rows.stop - start, n_columns), dtype), device.put(X[rows])
        columns(there, C)
        yield rows, there, C


def check_overflow(values: NDArray, first_row: int) -> None:
    """Raise :class:`InvalidData` if what was computed from a block's kernel values is not finite."""
    if not _all_finite(values):
        raise InvalidData(
            f"kernel values of the block of rows from {first_row}, or sums of them, overflow the dtype of the tiles. "
            "Scale the features, or use dtype='float64'."
        )


@LEGAL_OVERFLOW
def _all_finite(values: NDArray) -> bool:
    """Whether all are: a finite sum has no NaN and no infinity in it, and takes one look at each."""
    return bool(np.isfinite(values.sum()) or np.isfinite(values).all())
