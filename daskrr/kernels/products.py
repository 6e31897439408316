"""Products of tiles with some hundred columns, by machine code of our own; wider and narrower ones are left to BLAS.

BLAS spends much of its time on these to bring both factors into an order that suits it. Here the constant factor of all
rows is brought into it once, and rows are copied next to each other, a few at a time, where they stay in cache. Every
number is a sum in a fixed order, of products that are not rounded before they are added.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from daskrr.kernels import native
from daskrr.kernels.device import HOST, Companions, scratch
from daskrr.kernels.lanes import INTEGER, SCALARS, WIDE, Builder, Lanes, same
from daskrr.kernels.loops import Schedule, lanes_at, repeated, splat, store, turns

# Columns from which on and up to which this is faster than BLAS, measured with 1 and with 16 cores at work.
LEAST_COLUMNS, MOST_COLUMNS = 48, 512

# Sums of so many rows and vectors are in registers at a time, of which there are 32 of so many numbers. A panel has the
# columns of these vectors.
ROWS, VECTORS, LANES = 8, 3, 8
WIDTH = VECTORS * LANES
REGISTER_BYTES = 8 * LANES

# Rows that are copied at a time, of a product and of a Gram matrix; as many numbers of the latter fit in a cache.
COPIED_ROWS = 64
PACKED_NUMBERS = 2**16

Matrix = NDArray[np.float64]

_PACKED = Companions()
_WIDTH = INTEGER(WIDTH)


def suit(tile: NDArray) -> bool:
    """Whether a tile (m, p) is to be multiplied here, on this processor; BLAS is as fast in float32."""
    return LEAST_COLUMNS <= tile.shape[1] <= MOST_COLUMNS and tile.dtype == WIDE and native.has_wide_registers()


def multiply_rows(A: Matrix, B: Matrix) -> None:
    """Overwrite each row b of B (m, p) by A b, where A (p, p) is lower triangular and never changes."""
    m, p = B.shape
    packed = _PACKED.of(A, "packed", lambda: _pack(A))
    stride = _padded(p) + LANES
    HOST.run(RowsTimesLower(), [B, packed, _aligned(_kept, COPIED_ROWS * stride)], [m, p, stride])


def add_gram(B: Matrix, G: Matrix) -> None:
    """Add BᵀB to the lower triangle of G (p, p), for B (m, p); what is above it is of no use then."""
    m, p = B.shape
    n_packed = max(ROWS, PACKED_NUMBERS // _padded(p))
    HOST.run(AddGram(), [B, G, _aligned(_kept, n_packed * _padded(p))], [m, p, n_packed])


def _padded(n_columns: int) -> int:
    """Columns of whole panels."""
    return -(-n_columns // WIDTH) * WIDTH


def _pack(A: Matrix) -> Matrix:
    """The rows of A (p, p) in panels, each with as many columns as its last row has, transposed, one after another."""
    rows = np.zeros((_padded(len(A)), len(A)))
    rows[: len(A)] = np.tril(A)
    panels = [rows[first : first + WIDTH, : first + WIDTH].T.ravel() for first in range(0, len(A), WIDTH)]
    return np.concatenate(panels, out=_aligned(np.empty, sum(map(len, panels))))


def _kept(size: int) -> Matrix:
    """Of the thread, also of one that has other things computed on a GPU."""
    return scratch("packed", (size,), WIDE, HOST)


def _aligned(allocate: Callable[[int], Matrix], size: int) -> Matrix:
    """Memory for so many numbers that begins where a register is read at once."""
    memory = allocate(size + LANES)
    first = -memory.ctypes.data % REGISTER_BYTES // WIDE.itemsize
    return memory[first : first + size]


@dataclass(frozen=True)
class RowsTimesLower:
    """Multiplies the rows of a tile, in place."""

    by_rows = False

    def build(self, schedule: Schedule) -> Builder:
        """Of the tile (m, p), the packed factor, room for a few rows, and m, p, numbers from row to row of the room."""
        builder = _builder("multiply")
        tile, packed, room, n_rows, n_columns, stride = builder.function.args
        copied = INTEGER(COPIED_ROWS)
        with turns(builder, n_rows, by=copied) as block:
            left = _least(builder, builder.sub(n_rows, block.index), copied)
            self._copy(builder, block.index, left)
            with turns(builder, n_columns, by=_WIDTH) as panel:
                # The panels before this one, of 1, 2, … times their width.
                before = builder.sdiv(builder.mul(panel.index, builder.add(panel.index, _WIDTH)), INTEGER(2))
                count = _least(builder, builder.add(panel.index, _WIDTH), n_columns)
                with turns(builder, left, by=INTEGER(ROWS)) as group:
                    rows = [builder.add(group.index, INTEGER(row)) for row in range(ROWS)]
                    places = [builder.mul(row, stride) for row in rows]
                    sums = _sums(
                        builder, count, packed, lambda k: builder.add(before, builder.mul(k, _WIDTH)),
                        room, lambda k: [builder.add(place, k) for place in places],
                    )  # fmt: skip
                    for row, found in zip(rows, sums, strict=True):
                        with builder.if_then(builder.icmp_signed("<", row, left)):
                            place = builder.mul(builder.add(block.index, row), n_columns)
                            _put(builder, found, tile, place, panel.index, n_columns)
        return builder

    def _copy(self, builder: Builder, first: ir.Value, count: ir.Value) -> None:
        """Copy rows to the room."""
        tile, _, room, _, n_columns, stride = builder.function.args
        with turns(builder, count) as row, turns(builder, n_columns, by=INTEGER(LANES)) as strip:
            source = builder.add(builder.mul(builder.add(first, row.index), n_columns), strip.index)
            mask = _within(builder, strip.index, n_columns)
            found = lanes_at(builder, tile, source, WIDE, mask)
            store(found, room, builder.add(builder.mul(row.index, stride), strip.index), None)

    def extent(self, *sizes: int) -> tuple[int, int]:
        """Those of the tile."""
        return sizes[0], sizes[1]


@dataclass(frozen=True)
class AddGram:
    """Adds the Gram matrix of the columns of a tile to the lower triangle of a matrix."""

    by_rows = False

    def build(self, schedule: Schedule) -> Builder:
        """Of the tile (m, p), the matrix (p, p), room for panels, and m, p, rows that have room."""
        builder = _builder("gram")
        _, matrix, room, n_rows, n_columns, most_rows = builder.function.args
        with turns(builder, n_rows, by=most_rows) as block:
            count = _least(builder, builder.sub(n_rows, block.index), most_rows)
            self._pack(builder, block.index, count)
            with (
                turns(builder, n_columns, by=_WIDTH) as panel,
                turns(builder, n_columns, by=INTEGER(ROWS), first=panel.index) as group,
            ):
                # A panel begins after as many columns of all rows; no group of columns is in two of them.
                begin, inside = builder.mul(panel.index, count), builder.srem(group.index, _WIDTH)
                other = builder.add(builder.mul(builder.sub(group.index, inside), count), inside)
                places = [builder.add(other, INTEGER(row)) for row in range(ROWS)]
                sums = _sums(
                    builder, count, room, lambda k: builder.add(begin, builder.mul(k, _WIDTH)),
                    room, lambda k: [builder.add(place, builder.mul(k, _WIDTH)) for place in places],
                )  # fmt: skip
                for number, found in enumerate(sums):
                    row = builder.add(group.index, INTEGER(number))
                    with builder.if_then(builder.icmp_signed("<", row, n_columns)):
                        _put(builder, found, matrix, builder.mul(row, n_columns), panel.index, n_columns, added=True)
        return builder

    def _pack(self, builder: Builder, first: ir.Value, count: ir.Value) -> None:
        """Copy rows to panels of some columns, with zeros where there are no more columns."""
        tile, _, room, _, n_columns, _ = builder.function.args
        with turns(builder, n_columns, by=_WIDTH) as panel, turns(builder, count) as row:
            source = builder.mul(builder.add(first, row.index), n_columns)
            target = builder.add(builder.mul(panel.index, count), builder.mul(row.index, _WIDTH))
            for number in range(VECTORS):
                shift = INTEGER(number * LANES)
                column = builder.add(panel.index, shift)
                mask = _within(builder, column, n_columns)
                found = lanes_at(builder, tile, builder.add(source, column), WIDE, mask)
                store(found, room, builder.add(target, shift), None)

    def extent(self, *sizes: int) -> tuple[int, int]:
        """Those of the matrix."""
        return sizes[1], sizes[1]


# --- Parts of both ------------------------------------------------------------------------------------


def _builder(kind: str) -> Builder:
    return Builder(kind, [SCALARS[WIDE].as_pointer()] * 3 + [INTEGER] * 3, LANES)


def _sums(
    builder: Builder,
    count: ir.Value,
    vectors: ir.Value,
    begin: Callable[[ir.Value], ir.Value],
    numbers: ir.Value,
    places: Callable[[ir.Value], list[ir.Value]],
) -> list[list[Lanes]]:
    """Sums over ``count`` terms of vectors, from where the term begins, times numbers, at its place for every row."""
    zero = same(SCALARS[WIDE](0.0), LANES)
    with turns(builder, count, begin=[zero] * (ROWS * VECTORS)) as term:
        totals = [Lanes(builder, total, WIDE) for total in term.totals]
        first = begin(term.index)
        factors = [
            lanes_at(builder, vectors, builder.add(first, INTEGER(number * LANES)), WIDE) for number in range(VECTORS)
        ]
        for row, place in enumerate(places(term.index)):
            number = splat(builder, numbers, place)
            before = totals[row * VECTORS : (row + 1) * VECTORS]
            term.next += [number.times(one, plus=total).value for one, total in zip(factors, before, strict=True)]
    return [totals[row * VECTORS : (row + 1) * VECTORS] for row in range(ROWS)]


def _put(
    builder: Builder,
    found: list[Lanes],
    target: ir.Value,
    row_start: ir.Value,
    column: ir.Value,
    n_columns: ir.Value,
    added: bool = False,
) -> None:
    """Store vectors of a row from a column on, as far as it has columns, or add them to what is there."""
    for number, one in enumerate(found):
        at = builder.add(column, INTEGER(number * LANES))
        place, mask = builder.add(row_start, at), _within(builder, at, n_columns)
        store(lanes_at(builder, target, place, WIDE, mask) + one if added else one, target, place, mask)


def _within(builder: Builder, first: ir.Value, stop: ir.Value) -> ir.Value:
    """Which lanes from ``first`` on are before ``stop``."""
    numbers = ir.VectorType(INTEGER, LANES)(list(range(LANES)))
    return builder.icmp_signed("<", numbers, repeated(builder, builder.sub(stop, first)))


def _least(builder: Builder, one: ir.Value, other: ir.Value) -> ir.Value:
    return builder.select(builder.icmp_signed("<", one, other), one, other)
