"""Loops of products of tiles: sums of a few rows and vectors in registers, for processors that have many and wide ones.

A *panel* is what a few vectors have side by side. Every number is a sum in a fixed order, of products that are not
rounded before they are added.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir

from daskrr.kernels.lanes import INTEGER, SCALARS, WIDE, Builder, Formula, Lanes, declared, same
from daskrr.kernels.loops import Schedule, lanes_at, repeated, splat, store, turns

# Sums of so many rows and vectors are in registers at a time, of which there are 32 of so many bytes.
ROWS, VECTORS, REGISTER_BYTES = 8, 3, 64

# Rows that are copied at a time, of a product and of a Gram matrix, and panels of the latter that are used again and
# again: they stay in the cache of a core.
COPIED_ROWS = 64
PACKED_ROWS = 128
USED_PANELS = 8

Sums = list[list[Lanes]]  # of every row and vector


def lanes_of(dtype: np.dtype[Any]) -> int:
    """Numbers of a register."""
    return REGISTER_BYTES // dtype.itemsize


def width_of(dtype: np.dtype[Any], n_vectors: int = VECTORS) -> int:
    """Columns of a panel."""
    return n_vectors * lanes_of(dtype)


_GRAM_WIDTH = INTEGER(width_of(WIDE))


@dataclass(frozen=True)
class RowsTimesLower:
    """Multiplies the rows of a tile, in place, and finds their squared norms while they are in registers."""

    dtype: np.dtype[Any]
    by_rows = False

    def build(self, schedule: Schedule) -> Builder:
        """Of the tile (m, p), the packed factor, room for a few rows and for what is summed of each, norms (m,), sizes.

        These are m, p, and the numbers from row to row of the room.
        """
        builder = _builder("multiply", [*[self.dtype] * 3, WIDE, WIDE], n_sizes=3, lanes=lanes_of(self.dtype))
        tile, *_, n_rows, n_columns, _ = builder.function.args
        copied, width = INTEGER(COPIED_ROWS), INTEGER(width_of(self.dtype))
        rest = builder.srem(n_columns, width)
        lead = builder.select(builder.icmp_signed("==", rest, INTEGER(0)), width, rest)
        with turns(builder, n_rows, by=copied) as block:
            left = _least(builder, builder.sub(n_rows, block.index), copied)
            self._copy(builder, block.index, left)
            with (
                turns(builder, builder.add(n_columns, INTEGER(1)), by=width, first=lead) as stop,
                turns(builder, left, by=INTEGER(ROWS)) as group,
            ):
                sums = self._sums(builder, (lead, stop.index), group.index)
                rows, column = builder.add(block.index, group.index), self._begin(builder, stop.index)
                # What a first panel that is not full has too much, the next one replaces.
                _put(builder, sums, tile, (rows, n_rows), (column, n_columns))
                self._add_squares(builder, sums, group.index)
            self._end_norms(builder, block.index, left)
        return builder

    def _copy(self, builder: Builder, first: ir.Value, count: ir.Value) -> None:
        """Copy rows to the room, and begin the sums of their squares."""
        tile, _, room, squares, _, _, n_columns, stride = builder.function.args
        (zero,) = _zeros(builder, 1, WIDE)[0]
        with turns(builder, INTEGER(COPIED_ROWS)) as row:
            store(zero, squares, builder.mul(row.index, INTEGER(builder.lanes)), None)
        with turns(builder, count) as row, turns(builder, n_columns, by=INTEGER(builder.lanes)) as strip:
            source = builder.add(builder.mul(builder.add(first, row.index), n_columns), strip.index)
            mask = _within(builder, strip.index, n_columns)
            found = lanes_at(builder, tile, source, self.dtype, mask)
            store(found, room, builder.add(builder.mul(row.index, stride), strip.index), None)

    def _add_squares(self, builder: Builder, sums: Sums, group: ir.Value) -> None:
        """Add the squares of a panel and a group of rows, lane by lane."""
        _, _, _, squares, *_ = builder.function.args
        for row, found in enumerate(sums):
            place = builder.mul(builder.add(group, INTEGER(row)), INTEGER(builder.lanes))
            total = lanes_at(builder, squares, place, WIDE)
            for wide in (one.astype(WIDE) for one in found):
                total = wide.times(wide, plus=total)
            store(total, squares, place, None)

    def _end_norms(self, builder: Builder, first: ir.Value, count: ir.Value) -> None:
        """Add the lanes of the rows that were copied."""
        _, _, _, squares, norms, *_ = builder.function.args
        with turns(builder, count) as row:
            total = lanes_at(builder, squares, builder.mul(row.index, INTEGER(builder.lanes)), WIDE).total()
            builder.store(total, builder.gep(norms, [builder.add(first, row.index)]))

    def _begin(self, builder: Builder, stop: ir.Value) -> ir.Value:
        """The first column of the panel that ends before ``stop``."""
        return _most(builder, builder.sub(stop, INTEGER(width_of(self.dtype))), INTEGER(0))

    def _sums(self, builder: Builder, ends: tuple[ir.Value, ir.Value], group: ir.Value) -> Sums:
        """Those of a panel and a group of copied rows; where the first panel ends, and this one.

        The factor is triangular: a panel has terms up to where it ends, and one of its vectors ends before another.
        """
        _, packed, room, *_, stride = builder.function.args
        (lead, stop), lanes, width = ends, builder.lanes, INTEGER(width_of(self.dtype))
        # Each of the panels before has as many terms as its end says, (lead + stop - width)/2 of them on average.
        number = builder.sdiv(builder.sub(stop, lead), width)
        twice = builder.mul(number, builder.sub(builder.add(lead, stop), width))
        before = builder.mul(builder.sdiv(twice, INTEGER(2)), width)
        # While a panel is applied to the copied rows, the next one is brought, so many of its numbers with every term.
        brought_each = INTEGER(width_of(self.dtype) * ROWS // COPIED_ROWS)
        following = builder.add(before, builder.mul(stop, width))
        terms_before = builder.mul(builder.sdiv(group, INTEGER(ROWS)), stop)
        places = [builder.mul(builder.add(group, INTEGER(row)), stride) for row in range(ROWS)]

        def vectors(k: ir.Value) -> ir.Value:
            brought = builder.mul(builder.add(terms_before, k), brought_each)
            _bring(builder, packed, builder.add(following, brought))
            return builder.add(before, builder.mul(k, width))

        def numbers(k: ir.Value) -> list[ir.Value]:
            return [builder.add(place, k) for place in places]

        first, sums, ended = INTEGER(0), _zeros(builder, VECTORS, self.dtype), _zeros(builder, 0, self.dtype)
        for vector in range(VECTORS):
            end = _least(builder, builder.add(self._begin(builder, stop), INTEGER((vector + 1) * lanes)), stop)
            sums = _with_terms(sums, (first, end), (packed, vector, vectors), (room, numbers))
            for row, found in zip(ended, sums, strict=True):
                row.append(found.pop(0))
            first = end
        return ended

    def extent(self, *sizes: int) -> tuple[int, int]:
        """Those of the tile."""
        return sizes[0], sizes[1]


@dataclass(frozen=True)
class RowsTimes:
    """Multiplies the rows of a tile by columns, panels of so many vectors, and applies a formula to the products."""

    dtype: np.dtype[Any]
    n_vectors: int
    formula: Formula | None = None
    by_rows = False

    def build(self, schedule: Schedule) -> Builder:
        """Of the tile (m, p), the packed columns, the product (m, a), and m, p, a."""
        builder = _builder("times", [self.dtype] * 3, n_sizes=3, lanes=lanes_of(self.dtype))
        tile, packed, target, n_rows, n_terms, n_columns = builder.function.args
        last, width = builder.sub(n_rows, INTEGER(1)), INTEGER(width_of(self.dtype, self.n_vectors))
        with turns(builder, n_rows, by=INTEGER(ROWS)) as group:
            rows = [_least(builder, builder.add(group.index, INTEGER(row)), last) for row in range(ROWS)]
            places = [builder.mul(row, n_terms) for row in rows]
            with turns(builder, n_columns, by=width) as panel:
                begin, zeros = builder.mul(panel.index, n_terms), _zeros(builder, self.n_vectors, self.dtype)

                def vectors(k: ir.Value, begin: ir.Value = begin) -> ir.Value:
                    return builder.add(begin, builder.mul(k, width))

                def numbers(k: ir.Value, places: list[ir.Value] = places) -> list[ir.Value]:
                    return [builder.add(place, k) for place in places]

                sums = _with_terms(zeros, (INTEGER(0), n_terms), (packed, 0, vectors), (tile, numbers))
                if self.formula is not None:
                    sums = [[self.formula(one) for one in row] for row in sums]
                _put(builder, sums, target, (group.index, n_rows), (panel.index, n_columns))
        return builder

    def extent(self, *sizes: int) -> tuple[int, int]:
        """Those of the product."""
        return sizes[0], sizes[2]


@dataclass(frozen=True)
class AddGram:
    """Adds the Gram matrix of the columns of a tile, in float64, to the lower triangle of a matrix."""

    dtype: np.dtype[Any]
    by_rows = False

    def build(self, schedule: Schedule) -> Builder:
        """Of the tile (m, p), the matrix (p, p), room for panels, and m, p."""
        builder = _builder("gram", [self.dtype, WIDE, WIDE], n_sizes=2, lanes=lanes_of(WIDE))
        _, _, _, n_rows, n_columns = builder.function.args
        packed, used = INTEGER(PACKED_ROWS), INTEGER(USED_PANELS * width_of(WIDE))
        with turns(builder, n_rows, by=packed) as block:
            count = _least(builder, builder.sub(n_rows, block.index), packed)
            self._pack(builder, block.index, count)
            with turns(builder, n_columns, by=used) as part:
                stop = _least(builder, builder.add(part.index, used), n_columns)
                with turns(builder, stop, by=_GRAM_WIDTH) as panel:
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
        inside = builder.srem(group, _GRAM_WIDTH)  # no group of columns is in two panels
        begin, other = (self._begin(builder, count, one) for one in (panel, builder.sub(group, inside)))
        places = [builder.add(builder.add(other, inside), INTEGER(row)) for row in range(ROWS)]

        def vectors(k: ir.Value) -> ir.Value:
            return builder.add(begin, builder.mul(k, _GRAM_WIDTH))

        def numbers(k: ir.Value) -> list[ir.Value]:
            return [builder.add(place, builder.mul(k, _GRAM_WIDTH)) for place in places]

        for line in _rows_from(builder, group, panel, n_columns):
            for number in range(n_vectors):
                _bring(builder, matrix, builder.add(line, INTEGER(number * builder.lanes)), nearest=True)
        sums = _with_terms(_zeros(builder, n_vectors, WIDE), (INTEGER(0), count), (room, 0, vectors), (room, numbers))
        _put(builder, sums, matrix, (group, n_columns), (panel, n_columns), added=True)

    def _begin(self, builder: Builder, count: ir.Value, panel: ir.Value) -> ir.Value:
        """Where the panel from a column on begins: after as many columns of all rows, and a vector for every panel.

        Without these, numbers of a row would be so far apart that they get into each other's way in a cache.
        """
        return builder.add(builder.mul(panel, count), builder.sdiv(panel, INTEGER(VECTORS)))

    def _pack(self, builder: Builder, first: ir.Value, count: ir.Value) -> None:
        """Copy rows to panels of some columns, with zeros where there are no more columns."""
        tile, _, room, _, n_columns = builder.function.args
        with turns(builder, count) as row, turns(builder, n_columns, by=_GRAM_WIDTH) as panel:
            source = builder.mul(builder.add(first, row.index), n_columns)
            target = builder.add(self._begin(builder, count, panel.index), builder.mul(row.index, _GRAM_WIDTH))
            for number in range(VECTORS):
                shift = INTEGER(number * builder.lanes)
                column = builder.add(panel.index, shift)
                mask = _within(builder, column, n_columns)
                found = lanes_at(builder, tile, builder.add(source, column), self.dtype, mask)
                store(found.astype(WIDE), room, builder.add(target, shift), None)

    def extent(self, *sizes: int) -> tuple[int, int]:
        """Those of the matrix."""
        return sizes[1], sizes[1]


# --- Parts of both ------------------------------------------------------------------------------------


def _builder(kind: str, dtypes: list[np.dtype[Any]], n_sizes: int, lanes: int) -> Builder:
    """Of arrays and sizes."""
    return Builder(kind, [SCALARS[dtype].as_pointer() for dtype in dtypes] + [INTEGER] * n_sizes, lanes)


def _zeros(builder: Builder, n_vectors: int, dtype: np.dtype[Any]) -> Sums:
    zero = Lanes(builder, same(SCALARS[dtype](0.0), builder.lanes), dtype)
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
    builder, dtype, n_vectors = sums[0][0].builder, sums[0][0].dtype, len(sums[0])
    (first, stop), (factor, skipped, begin), (source, places) = terms, vectors, numbers
    with turns(builder, stop, first=first, begin=[one.value for row in sums for one in row]) as term:
        place = begin(term.index)
        found = [
            lanes_at(builder, factor, builder.add(place, INTEGER((skipped + number) * builder.lanes)), dtype)
            for number in range(n_vectors)
        ]
        totals = [Lanes(builder, total, dtype) for total in term.totals]
        for row, at in enumerate(places(term.index)):
            number, before = splat(builder, source, at, dtype), totals[row * n_vectors : (row + 1) * n_vectors]
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
    """Store sums from a row and a column on, as far as there are rows and columns, or add them to what is there."""
    (first, n_rows), (column, n_columns), lanes, dtype = rows, columns, builder.lanes, sums[0][0].dtype
    lines = [builder.add(first, INTEGER(row)) for row in range(ROWS)]
    shifts = [INTEGER(number * lanes) for number in range(len(sums[0]))]
    places = _rows_from(builder, first, column, n_columns)

    def move(masks: Callable[[ir.Value], list[ir.Value | None]]) -> None:
        for line, place, found in zip(lines, places, sums, strict=True):
            for one, shift, mask in zip(found, shifts, masks(line), strict=True):
                at = builder.add(place, shift)
                store(lanes_at(builder, target, at, dtype, mask) + one if added else one, target, at, mask)

    def within(line: ir.Value) -> list[ir.Value | None]:
        stop = builder.select(builder.icmp_signed("<", line, n_rows), n_columns, INTEGER(0))
        return [_within(builder, builder.add(column, shift), stop) for shift in shifts]

    all_rows = builder.icmp_signed("<", lines[-1], n_rows)
    all_columns = builder.icmp_signed("<=", builder.add(column, INTEGER(len(shifts) * lanes)), n_columns)
    with builder.if_else(builder.and_(all_rows, all_columns)) as (whole, cut):
        with whole:
            move(lambda line: [None] * len(shifts))
        with cut:
            move(within)


def _rows_from(builder: Builder, first: ir.Value, column: ir.Value, n_columns: ir.Value) -> list[ir.Value]:
    """Where the rows from the first on have a column."""
    places = [builder.add(builder.mul(first, n_columns), column)]
    while len(places) < ROWS:
        places.append(builder.add(places[-1], n_columns))
    return places


def _bring(builder: Builder, numbers: ir.Value, place: ir.Value, nearest: bool = False) -> None:
    """Have what is at a place brought to the nearest cache of the core or to the second one, if there is anything."""
    kind, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    signature = ir.FunctionType(ir.VoidType(), [kind, number, number, number])
    reading, cache, data = number(0), number(3 if nearest else 2), number(1)
    address = builder.bitcast(builder.gep(numbers, [place]), kind)
    builder.call(declared(builder, "prefetch", signature, kind), [address, reading, cache, data])


def _within(builder: Builder, first: ir.Value, stop: ir.Value) -> ir.Value:
    """Which lanes from ``first`` on are before ``stop``."""
    numbers = ir.VectorType(INTEGER, builder.lanes)(list(range(builder.lanes)))
    return builder.icmp_signed("<", numbers, repeated(builder, builder.sub(stop, first)))


def _least(builder: Builder, one: ir.Value, other: ir.Value) -> ir.Value:
    return builder.select(builder.icmp_signed("<", one, other), one, other)


def _most(builder: Builder, one: ir.Value, other: ir.Value) -> ir.Value:
    return builder.select(builder.icmp_signed(">", one, other), one, other)
