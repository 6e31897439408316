"""Products of tiles with some hundred columns, by machine code of our own; wider and narrower ones are left to BLAS.

BLAS spends much of its time on these to bring both factors into an order that suits it. Here the constant factor of all
rows is brought into it once, and rows are copied next to each other, a few at a time, where they stay in cache; what is
needed next of the factor is on its way meanwhile. Every number is a sum in a fixed order, of products that are not
rounded before they are added.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from daskrr.kernels import native
from daskrr.kernels.device import HOST, Companions, scratch
from daskrr.kernels.lanes import INTEGER, SCALARS, WIDE, Builder, Lanes, declared, same
from daskrr.kernels.loops import Schedule, lanes_at, repeated, splat, store, turns

# Columns from which on and up to which this is faster than BLAS.
LEAST_COLUMNS, MOST_COLUMNS = 48, 768

# Sums of so many rows and vectors are in registers at a time, of which there are 32 of so many numbers. A panel has the
# columns of these vectors.
ROWS, VECTORS, LANES = 8, 3, 8
WIDTH = VECTORS * LANES
REGISTER_BYTES = 8 * LANES

# Rows that are copied at a time, of a product and of a Gram matrix, and columns of the latter that are used again and
# again: they stay in the cache of a core.
COPIED_ROWS = 64
PACKED_ROWS = 128
USED_COLUMNS = 8 * WIDTH

# While a panel is applied to the copied rows, the next one is brought, so many of its numbers with every term.
BROUGHT = WIDTH * ROWS // COPIED_ROWS

Matrix = NDArray[np.float64]
Sums = list[list[Lanes]]  # of every row and vector

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
    HOST.run(AddGram(), [B, G, _aligned(_kept, (PACKED_ROWS + 1) * _padded(p))], [m, p])


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
        builder = _builder("multiply", n_sizes=3)
        tile, _, _, n_rows, n_columns, _ = builder.function.args
        copied = INTEGER(COPIED_ROWS)
        with turns(builder, n_rows, by=copied) as block:
            left = _least(builder, builder.sub(n_rows, block.index), copied)
            self._copy(builder, block.index, left)
            with (
                turns(builder, n_columns, by=_WIDTH) as panel,
                turns(builder, left, by=INTEGER(ROWS)) as group,
            ):
                sums = self._sums(builder, panel.index, group.index)
                rows = builder.add(block.index, group.index), n_rows
                _put(builder, sums, tile, rows, (panel.index, n_columns))
        return builder

    def _copy(self, builder: Builder, first: ir.Value, count: ir.Value) -> None:
        """Copy rows to the room."""
        tile, _, room, _, n_columns, stride = builder.function.args
        with turns(builder, count) as row, turns(builder, n_columns, by=INTEGER(LANES)) as strip:
            source = builder.add(builder.mul(builder.add(first, row.index), n_columns), strip.index)
            mask = _within(builder, strip.index, n_columns)
            found = lanes_at(builder, tile, source, WIDE, mask)
            store(found, room, builder.add(builder.mul(row.index, stride), strip.index), None)

    def _sums(self, builder: Builder, panel: ir.Value, group: ir.Value) -> Sums:
        """Those of a panel and a group of copied rows.

        The panels before it are 1, 2, … times as long as they are wide. The factor is triangular, so that one vector of
        a panel ends before another.
        """
        _, packed, room, _, n_columns, stride = builder.function.args
        before = builder.sdiv(builder.mul(panel, builder.add(panel, _WIDTH)), INTEGER(2))
        count = _least(builder, builder.add(panel, _WIDTH), n_columns)
        following = builder.add(before, builder.mul(count, _WIDTH))
        terms_before = builder.mul(builder.sdiv(group, INTEGER(ROWS)), count)
        places = [builder.mul(builder.add(group, INTEGER(row)), stride) for row in range(ROWS)]

        def vectors(k: ir.Value) -> ir.Value:
            brought = builder.mul(builder.add(terms_before, k), INTEGER(BROUGHT))
            _bring(builder, packed, builder.add(following, brought))
            return builder.add(before, builder.mul(k, _WIDTH))

        def numbers(k: ir.Value) -> list[ir.Value]:
            return [builder.add(place, k) for place in places]

        first, sums, ended = INTEGER(0), _zeros(builder, VECTORS), _zeros(builder, 0)
        for number in range(VECTORS):
            stop = _least(builder, builder.add(panel, INTEGER((number + 1) * LANES)), n_columns)
            sums = _with_terms(sums, (first, stop), (packed, number, vectors), (room, numbers))
            for row, found in zip(ended, sums, strict=True):
                row.append(found.pop(0))
            first = stop
        return ended

    def extent(self, *sizes: int) -> tuple[int, int]:
        """Those of the tile."""
        return sizes[0], sizes[1]


@dataclass(frozen=True)
class AddGram:
    """Adds the Gram matrix of the columns of a tile to the lower triangle of a matrix."""

    by_rows = False

    def build(self, schedule: Schedule) -> Builder:
        """Of the tile (m, p), the matrix (p, p), room for panels, and m, p."""
        builder = _builder("gram", n_sizes=2)
        _, _, _, n_rows, n_columns = builder.function.args
        packed, used = INTEGER(PACKED_ROWS), INTEGER(USED_COLUMNS)
        with turns(builder, n_rows, by=packed) as block:
            count = _least(builder, builder.sub(n_rows, block.index), packed)
            self._pack(builder, block.index, count)
            with turns(builder, n_columns, by=used) as part:
                stop = _least(builder, builder.add(part.index, used), n_columns)
                with turns(builder, stop, by=_WIDTH) as panel:
                    below = _most(builder, builder.add(panel.index, INTEGER((VECTORS - 1) * ROWS)), part.index)
                    with turns(builder, stop, by=INTEGER(ROWS), first=below) as group:
                        self._add(builder, count, panel.index, group.index, VECTORS)
                    with builder.if_then(builder.icmp_signed(">=", panel.index, part.index)):
                        self._add_corner(builder, count, panel.index)
        return builder

    def _add_corner(self, builder: Builder, count: ir.Value, panel: ir.Value) -> None:
        """Add products of a panel with its first groups, those that are in the lower triangle."""
        for number in range(VECTORS - 1):
            group = builder.add(panel, INTEGER(number * ROWS))
            with builder.if_then(builder.icmp_signed("<", group, builder.function.args[-1])):
                self._add(builder, count, panel, group, number + 1)

    def _add(self, builder: Builder, count: ir.Value, panel: ir.Value, group: ir.Value, n_vectors: int) -> None:
        """Add products of a group of columns and the first vectors of a panel."""
        _, matrix, room, _, n_columns = builder.function.args
        inside = builder.srem(group, _WIDTH)  # no group of columns is in two panels
        begin, other = (self._begin(builder, count, one) for one in (panel, builder.sub(group, inside)))
        places = [builder.add(builder.add(other, inside), INTEGER(row)) for row in range(ROWS)]

        def vectors(k: ir.Value) -> ir.Value:
            return builder.add(begin, builder.mul(k, _WIDTH))

        def numbers(k: ir.Value) -> list[ir.Value]:
            return [builder.add(place, builder.mul(k, _WIDTH)) for place in places]

        sums = _with_terms(_zeros(builder, n_vectors), (INTEGER(0), count), (room, 0, vectors), (room, numbers))
        _put(builder, sums, matrix, (group, n_columns), (panel, n_columns), added=True)

    def _begin(self, builder: Builder, count: ir.Value, panel: ir.Value) -> ir.Value:
        """Where the panel from a column on begins: after as many columns of all rows, and a vector for every panel.

        Without these, numbers of a row would be so far apart that they get into each other's way in a cache.
        """
        return builder.add(builder.mul(panel, count), builder.sdiv(panel, INTEGER(VECTORS)))

    def _pack(self, builder: Builder, first: ir.Value, count: ir.Value) -> None:
        """Copy rows to panels of some columns, with zeros where there are no more columns."""
        tile, _, room, _, n_columns = builder.function.args
        with turns(builder, count) as row, turns(builder, n_columns, by=_WIDTH) as panel:
            source = builder.mul(builder.add(first, row.index), n_columns)
            target = builder.add(self._begin(builder, count, panel.index), builder.mul(row.index, _WIDTH))
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


def _builder(kind: str, n_sizes: int) -> Builder:
    return Builder(kind, [SCALARS[WIDE].as_pointer()] * 3 + [INTEGER] * n_sizes, LANES)


def _zeros(builder: Builder, n_vectors: int) -> Sums:
    zero = Lanes(builder, same(SCALARS[WIDE](0.0), LANES), WIDE)
    return [[zero] * n_vectors for _ in range(ROWS)]


def _with_terms(
    sums: Sums,
    terms: tuple[ir.Value, ir.Value],
    vectors: tuple[ir.Value, int, Callable[[ir.Value], ir.Value]],
    numbers: tuple[ir.Value, Callable[[ir.Value], list[ir.Value]]],
) -> Sums:
    """The sums after terms from the first on and before the last: products of vectors and of a number for every row.

    Vectors, from which number on, and where those of a term begin; numbers, and where those of a term are.
    """
    builder, n_vectors = sums[0][0].builder, len(sums[0])
    (first, stop), (factor, skipped, begin), (source, places) = terms, vectors, numbers
    with turns(builder, stop, first=first, begin=[one.value for row in sums for one in row]) as term:
        place = begin(term.index)
        found = [
            lanes_at(builder, factor, builder.add(place, INTEGER((skipped + number) * LANES)), WIDE)
            for number in range(n_vectors)
        ]
        totals = [Lanes(builder, total, WIDE) for total in term.totals]
        for row, at in enumerate(places(term.index)):
            number, before = splat(builder, source, at), totals[row * n_vectors : (row + 1) * n_vectors]
            term.next += [number.times(one, plus=total).value for one, total in zip(found, before, strict=True)]
    return [totals[row * n_vectors : (row + 1) * n_vectors] for row in range(ROWS)]


def _put(
    builder: Builder,
    sums: Sums,
    target: ir.Value,
    rows: tuple[ir.Value, ir.Value],
    columns: tuple[ir.Value, ir.Value],
    added: bool = False,
) -> None:
    """Store sums from a row and a column on, as far as there are rows and columns, or add them to what is there.

    All is read before anything is written: rows may be so far apart that a processor takes their places for the same.
    """
    (first, n_rows), (column, n_columns) = rows, columns
    lines = [builder.add(first, INTEGER(row)) for row in range(ROWS)]
    shifts = [builder.add(column, INTEGER(number * LANES)) for number in range(len(sums[0]))]
    places = [builder.add(builder.mul(line, n_columns), shift) for line in lines for shift in shifts]

    def move(masks: list[ir.Value | None]) -> None:
        found = [one for row in sums for one in row]
        if added:
            known = [lanes_at(builder, target, place, WIDE, mask) for place, mask in zip(places, masks, strict=True)]
            found = [one + other for one, other in zip(known, found, strict=True)]
        for one, place, mask in zip(found, places, masks, strict=True):
            store(one, target, place, mask)

    all_rows = builder.icmp_signed("<", lines[-1], n_rows)
    all_columns = builder.icmp_signed("<=", builder.add(shifts[-1], INTEGER(LANES)), n_columns)
    with builder.if_else(builder.and_(all_rows, all_columns)) as (whole, cut):
        with whole:
            move([None] * len(places))
        with cut:
            stops = [builder.select(builder.icmp_signed("<", line, n_rows), n_columns, INTEGER(0)) for line in lines]
            move([_within(builder, shift, stop) for stop in stops for shift in shifts])


def _bring(builder: Builder, numbers: ir.Value, place: ir.Value) -> None:
    """Have what is at a place brought to the cache of the core, if there is anything."""
    kind, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    signature = ir.FunctionType(ir.VoidType(), [kind, number, number, number])
    reading, second_cache, data = number(0), number(2), number(1)
    address = builder.bitcast(builder.gep(numbers, [place]), kind)
    builder.call(declared(builder, "prefetch", signature, kind), [address, reading, second_cache, data])


def _within(builder: Builder, first: ir.Value, stop: ir.Value) -> ir.Value:
    """Which lanes from ``first`` on are before ``stop``."""
    numbers = ir.VectorType(INTEGER, LANES)(list(range(LANES)))
    return builder.icmp_signed("<", numbers, repeated(builder, builder.sub(stop, first)))


def _least(builder: Builder, one: ir.Value, other: ir.Value) -> ir.Value:
    return builder.select(builder.icmp_signed("<", one, other), one, other)


def _most(builder: Builder, one: ir.Value, other: ir.Value) -> ir.Value:
    return builder.select(builder.icmp_signed(">", one, other), one, other)
