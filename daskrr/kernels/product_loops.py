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

# Rows whose Gram matrix is found at a time, copied to panels, and panels that are used again and again: one of them
# stays in the first cache of a core, and all in the second one.
PACKED_ROWS = 96
USED_PANELS = 8

# While their Gram matrix is found, the rows after these are brought to that cache too, if so many bytes are enough for
# the copies of both.
MOST_COPIED_BYTES = 2**20

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
    """Multiplies the rows of a tile, in place, and finds their squared norms while they are in registers.

    The last panel comes first, since no other one needs the numbers that it replaces.
    """

    dtype: np.dtype[Any]
    by_rows = False

    def build(self, schedule: Schedule) -> Builder:
        """Of the tile (m, p), the packed factor, room for what is summed of some rows, norms (m,), and sizes.

        These are m, p, and how many rows a panel is applied to before the next one: they stay in a cache meanwhile.
        """
        builder = _builder("multiply", [self.dtype, self.dtype, WIDE, WIDE], n_sizes=3, lanes=lanes_of(self.dtype))
        *_, n_rows, n_columns, at_once = builder.function.args
        width = INTEGER(width_of(self.dtype))
        with turns(builder, n_rows, by=at_once) as block:
            left = _least(builder, builder.sub(n_rows, block.index), at_once)
            self._begin_norms(builder, left)
            with turns(builder, n_columns, by=width, begin=[INTEGER(0)]) as panel:
                stop = builder.sub(n_columns, panel.index)
                following = builder.add(panel.totals[0], builder.mul(stop, width))
                with turns(builder, left, by=INTEGER(ROWS)) as group:
                    row = builder.add(block.index, group.index)
                    ahead = self._ahead(builder, row, group.index, stop, following)
                    sums = self._sums(builder, row, panel.totals[0], stop, ahead)
                    begin = _most(builder, builder.sub(stop, width), INTEGER(0))
                    _put(builder, sums, builder.function.args[0], (row, n_rows), (begin, stop), n_columns)
                    self._add_squares(builder, sums, group.index)
                panel.next.append(following)
            self._end_norms(builder, block.index, left)
        return builder

    def _begin_norms(self, builder: Builder, count: ir.Value) -> None:
        """Begin the sums of the squares of so many rows, or a few more."""
        (zero,) = _zeros(builder, 1, WIDE)[0]
        with turns(builder, count, by=INTEGER(ROWS)) as group:
            for row in range(ROWS):
                place = builder.mul(builder.add(group.index, INTEGER(row)), INTEGER(builder.lanes))
                store(zero, builder.function.args[2], place, None)

    def _add_squares(self, builder: Builder, sums: Sums, group: ir.Value) -> None:
        """Add the squares of a panel and a group of rows, lane by lane."""
        squares = builder.function.args[2]
        for row, found in enumerate(sums):
            place = builder.mul(builder.add(group, INTEGER(row)), INTEGER(builder.lanes))
            total = lanes_at(builder, squares, place, WIDE)
            for wide in (one.astype(WIDE) for one in found):
                total = wide.times(wide, plus=total)
            store(total, squares, place, None)

    def _end_norms(self, builder: Builder, first: ir.Value, count: ir.Value) -> None:
        """Add the lanes of so many rows."""
        _, _, squares, norms, *_ = builder.function.args
        with turns(builder, count) as row:
            total = lanes_at(builder, squares, builder.mul(row.index, INTEGER(builder.lanes)), WIDE).total()
            builder.store(total, builder.gep(norms, [builder.add(first, row.index)]))

    def _ahead(
        self, builder: Builder, row: ir.Value, group: ir.Value, stop: ir.Value, following: ir.Value
    ) -> Callable[[ir.Value], None]:
        """Brings what is needed next, a part of it with every term: the next group of rows, or the next panel.

        The first panel, which has a term for every column, brings rows; others, while all groups are multiplied by
        them, the panel that follows, and the last one the first.
        """
        tile, packed, *_, n_columns, at_once = builder.function.args
        is_first = builder.icmp_signed("==", stop, n_columns)
        rows = builder.gep(tile, [builder.mul(builder.add(row, INTEGER(ROWS)), n_columns)])
        numbers, width = INTEGER(ROWS * width_of(self.dtype)), INTEGER(width_of(self.dtype))
        each = builder.sdiv(builder.add(numbers, builder.sub(at_once, INTEGER(1))), at_once)
        terms_before = builder.mul(builder.sdiv(group, INTEGER(ROWS)), stop)
        begin = builder.select(builder.icmp_signed("<=", stop, width), INTEGER(0), following)
        panel = builder.gep(packed, [builder.add(begin, builder.mul(terms_before, each))])
        source = builder.select(is_first, rows, panel)
        pace = builder.select(is_first, INTEGER(ROWS), each)
        return lambda term: _bring(builder, source, builder.mul(term, pace))

    def _sums(
        self,
        builder: Builder,
        row: ir.Value,
        before: ir.Value,
        stop: ir.Value,
        ahead: Callable[[ir.Value], None],
    ) -> Sums:
        """Those of a panel and a group of rows; how many numbers of the factor are before it, and where it ends.

        The factor is triangular: a panel has terms up to where it ends, and one of its vectors ends before another.
        """
        tile, packed, *_, n_rows, n_columns, _ = builder.function.args
        width, places = INTEGER(width_of(self.dtype)), _rows_or_last(builder, row, n_rows, n_columns)

        def vectors(k: ir.Value) -> ir.Value:
            ahead(k)
            return builder.add(before, builder.mul(k, width))

        def numbers(k: ir.Value) -> list[ir.Value]:
            return [builder.add(place, k) for place in places]

        first, sums, ended = INTEGER(0), _zeros(builder, VECTORS, self.dtype), _zeros(builder, 0, self.dtype)
        begin = _most(builder, builder.sub(stop, width), INTEGER(0))
        for vector in range(VECTORS):
            end = _least(builder, builder.add(begin, INTEGER((vector + 1) * builder.lanes)), stop)
            sums = _with_terms(sums, (first, end), (packed, vector, vectors), (tile, numbers))
            for row_sums, found in zip(ended, sums, strict=True):
                row_sums.append(found.pop(0))
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
        width = INTEGER(width_of(self.dtype, self.n_vectors))
        with turns(builder, n_rows, by=INTEGER(ROWS)) as group:
            places = _rows_or_last(builder, group.index, n_rows, n_terms)
            following = builder.mul(builder.add(group.index, INTEGER(ROWS)), n_terms)
            with turns(builder, n_columns, by=width) as panel:
                begin, zeros = builder.mul(panel.index, n_terms), _zeros(builder, self.n_vectors, self.dtype)

                def vectors(k: ir.Value, begin: ir.Value = begin, following: ir.Value = following) -> ir.Value:
                    _bring(builder, tile, builder.add(following, builder.mul(k, INTEGER(ROWS))))
                    return builder.add(begin, builder.mul(k, width))

                def numbers(k: ir.Value, places: list[ir.Value] = places) -> list[ir.Value]:
                    return [builder.add(place, k) for place in places]

                sums = _with_terms(zeros, (INTEGER(0), n_terms), (packed, 0, vectors), (tile, numbers))
                if self.formula is not None:
                    sums = [[self.formula(one) for one in row] for row in sums]
                _put(builder, sums, target, (group.index, n_rows), (panel.index, n_columns), n_columns)
        return builder

    def extent(self, *sizes: int) -> tuple[int, int]:
        """Those of the product."""
        return sizes[0], sizes[2]


@dataclass(frozen=True)
class AddGram:
    """Adds the Gram matrix of the columns of a tile, in float64, to sums in the order in which they are found.

    That is panel by panel, and in each from its own first column on all rows of the matrix, which are as many as its
    columns and up to a multiple of those that are summed at a time.
    """

    dtype: np.dtype[Any]
    by_rows = False

    def build(self, schedule: Schedule) -> Builder:
        """Of the tile (m, p), the sums, room for panels, and m, p."""
        builder = _builder("gram", [self.dtype, WIDE, WIDE], n_sizes=2, lanes=lanes_of(WIDE))
        *_, n_rows, n_columns = builder.function.args
        packed, used = INTEGER(PACKED_ROWS), INTEGER(USED_PANELS * width_of(WIDE))
        with turns(builder, n_rows, by=packed) as block:
            count = _least(builder, builder.sub(n_rows, block.index), packed)
            self._pack(builder, block.index, count)
            ahead = self._ahead(builder, block.index)
            with turns(builder, n_columns, by=used) as part:
                stop = _least(builder, builder.add(part.index, used), n_columns)
                with turns(builder, stop, by=_GRAM_WIDTH) as panel:
                    below = _most(builder, builder.add(panel.index, INTEGER((VECTORS - 1) * ROWS)), part.index)
                    with turns(builder, stop, by=INTEGER(ROWS), first=below) as group:
                        self._add(builder, count, panel.index, group.index, VECTORS, ahead)
                    with builder.if_then(builder.icmp_signed(">=", panel.index, part.index)):
                        self._add_corner(builder, count, panel.index, ahead)
        return builder

    def _ahead(self, builder: Builder, first: ir.Value) -> Callable[[ir.Value], None]:
        """Brings the next rows: as far through them as a place is through the sums."""
        tile, *_, n_columns = builder.function.args
        # Numbers of rows for 1024 sums, of which there are p²/2.
        pace = builder.sdiv(INTEGER(PACKED_ROWS * 2 * 1024), n_columns)
        most = MOST_COPIED_BYTES // (2 * PACKED_ROWS * WIDE.itemsize)
        pace = builder.select(builder.icmp_signed("<=", n_columns, INTEGER(most)), pace, INTEGER(0))
        rows = builder.gep(tile, [builder.mul(builder.add(first, INTEGER(PACKED_ROWS)), n_columns)])
        return lambda place: _bring(builder, rows, builder.ashr(builder.mul(place, pace), INTEGER(10)))

    def _add_corner(
        self, builder: Builder, count: ir.Value, panel: ir.Value, ahead: Callable[[ir.Value], None]
    ) -> None:
        """Add products of a panel with its first groups, those that are in the lower triangle."""
        for number in range(VECTORS - 1):
            group = builder.add(panel, INTEGER(number * ROWS))
            with builder.if_then(builder.icmp_signed("<", group, builder.function.args[-1])):
                self._add(builder, count, panel, group, number + 1, ahead)

    def _add(
        self,
        builder: Builder,
        count: ir.Value,
        panel: ir.Value,
        group: ir.Value,
        n_vectors: int,
        ahead: Callable[[ir.Value], None],
    ) -> None:
        """Add products of a group of columns and the first vectors of a panel."""
        _, target, room, _, _ = builder.function.args
        inside = builder.srem(group, _GRAM_WIDTH)  # no group of columns is in two panels
        begin, other = (self._begin(builder, count, one) for one in (panel, builder.sub(group, inside)))
        places = [builder.add(builder.add(other, inside), INTEGER(row)) for row in range(ROWS)]
        first = self._place(builder, panel, group)
        brought_each = INTEGER(ROWS * width_of(WIDE) // PACKED_ROWS)

        def vectors(k: ir.Value) -> ir.Value:
            brought = builder.add(first, builder.mul(k, brought_each))
            _bring(builder, target, brought, nearest=True)
            ahead(brought)
            return builder.add(begin, builder.mul(k, _GRAM_WIDTH))

        def numbers(k: ir.Value) -> list[ir.Value]:
            return [builder.add(place, builder.mul(k, _GRAM_WIDTH)) for place in places]

        sums = _with_terms(_zeros(builder, n_vectors, WIDE), (INTEGER(0), count), (room, 0, vectors), (room, numbers))
        for row, found in enumerate(sums):
            for number, one in enumerate(found):
                place = builder.add(first, INTEGER((row * VECTORS + number) * builder.lanes))
                store(lanes_at(builder, target, place, WIDE) + one, target, place, None)

    def _place(self, builder: Builder, panel: ir.Value, group: ir.Value) -> ir.Value:
        """Where the sums of the panel from a column on, and of the row ``group`` of the matrix, begin."""
        rows, up = INTEGER(ROWS), INTEGER(ROWS - 1)
        n_lines = builder.mul(builder.sdiv(builder.add(builder.function.args[-1], up), rows), rows)
        number = builder.sdiv(panel, _GRAM_WIDTH)
        # Panels before have all lines but as many as columns are before each of them.
        missing = builder.sdiv(builder.mul(panel, builder.sub(number, INTEGER(1))), INTEGER(2))
        lines = builder.sub(builder.mul(number, n_lines), missing)
        return builder.mul(_GRAM_WIDTH, builder.add(lines, builder.sub(group, panel)))

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
    stride: ir.Value,
) -> None:
    """Store sums from a row and a column on, as far as there are rows and columns; the numbers from row to row."""
    (first, n_rows), (column, n_columns), lanes = rows, columns, builder.lanes
    lines = [builder.add(first, INTEGER(row)) for row in range(ROWS)]
    shifts = [INTEGER(number * lanes) for number in range(len(sums[0]))]
    places = [builder.add(builder.mul(line, stride), column) for line in lines]

    def move(masks: Callable[[ir.Value], list[ir.Value | None]]) -> None:
        for line, place, found in zip(lines, places, sums, strict=True):
            for one, shift, mask in zip(found, shifts, masks(line), strict=True):
                store(one, target, builder.add(place, shift), mask)

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


def _rows_or_last(builder: Builder, first: ir.Value, n_rows: ir.Value, stride: ir.Value) -> list[ir.Value]:
    """Where the rows from the first on begin; the last row stands for those that there are not."""
    last = builder.sub(n_rows, INTEGER(1))
    rows = [_least(builder, builder.add(first, INTEGER(row)), last) for row in range(ROWS)]
    return [builder.mul(row, stride) for row in rows]


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
