"""What compiled functions do: loops over arrays that apply a formula, for processors and for GPUs.

A loop is made for a *schedule*, which says how its rows and columns are shared out: one after the other in strips of
lanes on a processor, between thousands of threads on a GPU.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
from llvmlite import ir

from daskrr.kernels.lanes import INTEGER, SCALARS, WIDE, Builder, Formula, Lanes, Step, Term, declared, same

_ZERO, _ONE = INTEGER(0), INTEGER(1)


@dataclass
class Turn:
    """A loop whose body is being made: its index, totals that it carries, and what these become in the next turn."""

    index: ir.Value
    totals: list[Any]
    next: list[Any] = field(default_factory=list)


class Schedule(Protocol):
    """How the turns of a loop are shared out."""

    lanes: int

    @property
    def rows_at_once(self) -> int:
        """Rows whose pairs with a landmark are worth summing side by side."""

    def rows(self, builder: Builder, stop: ir.Value, by: int = 1) -> AbstractContextManager[Turn]:
        """The rows of one thread, or the first of every so many."""

    def strips(self, builder: Builder, stop: ir.Value) -> Iterator[tuple[ir.Value, ir.Value | None]]:
        """Where each strip of lanes of one thread begins, and which lanes there are, unless all are.

        What the caller makes after each is the body of a loop.
        """

    def add_up(self, builder: Builder, stop: ir.Value, add: Callable[..., Lanes]) -> ir.Value:
        """A sum over the columns of a row; ``add`` makes the next sum of the last, a place and its lanes."""


class Loop(Protocol):
    """A function to be compiled, of arrays and of sizes; equal ones are compiled once."""

    @property
    def by_rows(self) -> bool:
        """Whether its threads on a GPU come in teams that have a row each."""

    def build(self, schedule: Schedule) -> Builder:
        """The function."""

    def extent(self, *sizes: int) -> tuple[int, int]:
        """How many rows and columns there are to be shared out."""

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Sweep:
    """Applies a formula to every number of an array, in place; its size."""

    formula: Formula
    dtype: np.dtype[Any]
    by_rows = False

    def build(self, schedule: Schedule) -> Builder:
        """Of the array and its size."""
        builder = Builder("sweep", [SCALARS[self.dtype].as_pointer(), INTEGER], schedule.lanes)
        values, size = builder.function.args
        for first, mask in schedule.strips(builder, size):
            found = self.formula(lanes_at(builder, values, first, self.dtype, mask))
            store(found, values, first, mask)
        return builder

    def extent(self, *sizes: int) -> tuple[int, int]:
        """One row."""
        return 1, sizes[0]


@dataclass(frozen=True)
class Pairs:
    """Fills a tile (m, p) with a formula of sums over features, to which each adds by a step.

    With ``mends``, the tile has sums already, and those of a row that are not below its limit are made anew. A weight
    that features ``share`` multiplies the sum instead of what each of them adds.
    """

    step: Step
    start: float
    formula: Formula
    dtype: np.dtype[Any]
    mends: bool = False
    share: bool = False
    by_rows = False

    def build(self, schedule: Schedule) -> Builder:
        """Of rows (m, d), landmarks (d, padded p), weights (d,) or (1,), tile, limits (m,), and m, d, p, padded p."""
        wide = SCALARS[WIDE].as_pointer()
        kinds = [wide, wide, wide, SCALARS[self.dtype].as_pointer(), wide, *[INTEGER] * 4]
        builder = Builder("pairs", kinds, schedule.lanes)
        _, _, _, tile, limits, n_rows, _, n_columns, _ = builder.function.args
        at_once = 1 if self.mends else schedule.rows_at_once
        with schedule.rows(builder, n_rows, by=at_once) as row:
            rows = [row.index] + [_row_or_last(builder, row.index, more, n_rows) for more in range(1, at_once)]
            limit = splat(builder, limits, row.index) if self.mends else None
            for first, mask in schedule.strips(builder, n_columns):
                places = [builder.add(builder.mul(one, n_columns), first) for one in rows]
                if limit is None:
                    totals = self._summed(builder, rows, first)
                else:
                    known = lanes_at(builder, tile, places[0], self.dtype, mask)
                    totals = [self._mended(builder, known, limit, row.index, first)]
                for total, place in zip(totals, places, strict=True):
                    store(self.formula(total), tile, place, mask)
        return builder

    def _summed(self, builder: Builder, numbers: list[ir.Value], first: ir.Value) -> list[Lanes]:
        rows, landmarks, weights, _, _, _, n_features, _, padded = builder.function.args
        begin = [same(SCALARS[WIDE](self.start), builder.lanes)] * len(numbers)
        starts = [builder.mul(number, n_features) for number in numbers]
        with turns(builder, n_features, begin=begin) as feature:
            landmark = lanes_at(builder, landmarks, builder.add(builder.mul(feature.index, padded), first), WIDE)
            weight = landmark.constant(1.0) if self.share else splat(builder, weights, feature.index)
            for start, total in zip(starts, feature.totals, strict=True):
                difference = splat(builder, rows, builder.add(start, feature.index)) - landmark
                feature.next.append(self.step(Lanes(builder, total, WIDE), difference, weight).value)
        totals = [Lanes(builder, total, WIDE) for total in feature.totals]
        if self.share:
            totals = [total * splat(builder, weights, _ZERO) for total in totals]
        return [total.astype(self.dtype) for total in totals]

    def _mended(self, builder: Builder, known: Lanes, limit: Lanes, row: ir.Value, first: ir.Value) -> Lanes:
        # Not-less instead of greater, so that what overflowed to NaN is caught as well.
        bad = builder.fcmp_unordered(">=", known.astype(WIDE).value, limit.value)
        before = builder.block
        with builder.if_then(_any(builder, bad)):
            anew = builder.select(bad, self._summed(builder, [row], first)[0].value, known.value)
            there = builder.block
        found = builder.phi(known.value.type)
        found.add_incoming(known.value, before)
        found.add_incoming(anew, there)
        return Lanes(builder, found, self.dtype)

    def extent(self, *sizes: int) -> tuple[int, int]:
        """Those of the tile."""
        return sizes[0], sizes[2]


@dataclass(frozen=True)
class RowSums:
    """Sums, in float64, what a term makes of the numbers that some tiles (m, p) have at a place.

    A term that asks for them is given the weight of the column, and the limit of the row.
    """

    term: Term
    dtype: np.dtype[Any]
    n_tiles: int
    by_rows = True

    def build(self, schedule: Schedule) -> Builder:
        """Of the tiles, sums (m,), weights (p,), limits (m,), and m, p."""
        wide = SCALARS[WIDE].as_pointer()
        kinds = [*[SCALARS[self.dtype].as_pointer()] * self.n_tiles, *[wide] * 3, INTEGER, INTEGER]
        builder = Builder("row_sums", kinds, schedule.lanes)
        *tiles, sums, weights, limits, n_rows, n_columns = builder.function.args
        with schedule.rows(builder, n_rows) as row:
            first = builder.mul(row.index, n_columns)
            limit = partial(splat, builder, limits, row.index)

            def add(total: ir.Value, at: ir.Value, mask: ir.Value | None = None) -> Lanes:
                place = builder.add(first, at)
                found = [lanes_at(builder, tile, place, self.dtype, mask).astype(WIDE) for tile in tiles]
                weight = partial(lanes_at, builder, weights, at, WIDE, mask)
                return Lanes(builder, total, WIDE) + self.term(found, weight, limit)

            builder.store(schedule.add_up(builder, n_columns, add), builder.gep(sums, [row.index]))
        return builder

    def extent(self, *sizes: int) -> tuple[int, int]:
        """Those of the tiles."""
        return sizes[0], sizes[1]


@dataclass(frozen=True)
class Lift:
    """Centres and scales rows, and appends minus half of their squared norms, and ones.

    All is computed in float64, but the norms are those of rows that were rounded to the dtype.
    """

    source: np.dtype[Any]
    dtype: np.dtype[Any]
    by_rows = True

    def build(self, schedule: Schedule) -> Builder:
        """Of rows (m, d), their centre (d,), factors (d,), the lifted rows (m, d + 2), squared norms (m,), and m, d."""
        wide, number = SCALARS[WIDE].as_pointer(), SCALARS[self.dtype]
        kinds = [SCALARS[self.source].as_pointer(), wide, wide, number.as_pointer(), wide, INTEGER, INTEGER]
        builder = Builder("lift", kinds, schedule.lanes)
        rows, centre, factors, lifted, squares, n_rows, n_features = builder.function.args
        with schedule.rows(builder, n_rows) as row:
            first = builder.mul(row.index, n_features)
            into = builder.add(first, builder.mul(row.index, INTEGER(2)))

            def add(total: ir.Value, at: ir.Value, mask: ir.Value | None = None) -> Lanes:
                found = lanes_at(builder, rows, builder.add(first, at), self.source, mask).astype(WIDE)
                centred = found - lanes_at(builder, centre, at, WIDE, mask)
                scaled = (centred * lanes_at(builder, factors, at, WIDE, mask)).astype(self.dtype)
                store(scaled, lifted, builder.add(into, at), mask)
                exact = scaled.astype(WIDE)
                return exact.times(exact, plus=Lanes(builder, total, WIDE))

            square = schedule.add_up(builder, n_features, add)
            builder.store(square, builder.gep(squares, [row.index]))
            half = builder.fmul(square, SCALARS[WIDE](-0.5))
            last = builder.add(into, n_features)
            rounded = half if number == SCALARS[WIDE] else builder.fptrunc(half, number)
            builder.store(rounded, builder.gep(lifted, [last]))
            builder.store(number(1.0), builder.gep(lifted, [builder.add(last, _ONE)]))
        return builder

    def extent(self, *sizes: int) -> tuple[int, int]:
        """Those of the rows."""
        return sizes[0], sizes[1]


# --- Parts of functions -------------------------------------------------------------------------------


@contextmanager
def turns(
    builder: ir.IRBuilder,
    stop: ir.Value,
    by: ir.Value = _ONE,
    first: ir.Value = _ZERO,
    begin: Sequence[ir.Value] = (),
) -> Iterator[Turn]:
    """A loop from ``first`` on, whose totals are ``begin`` at first."""
    before = builder.block
    head, body, after = (builder.append_basic_block(name) for name in ("head", "body", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    loop = Turn(builder.phi(INTEGER), [builder.phi(one.type) for one in begin])
    builder.cbranch(builder.icmp_signed("<", loop.index, stop), body, after)
    builder.position_at_end(body)
    yield loop
    carried = [(loop.index, first, builder.add(loop.index, by)), *zip(loop.totals, begin, loop.next, strict=True)]
    for phi, start, following in carried:
        phi.add_incoming(start, before)
        phi.add_incoming(following, builder.block)
    builder.branch(head)
    builder.position_at_end(after)


def _row_or_last(builder: Builder, first: ir.Value, more: int, n_rows: ir.Value) -> ir.Value:
    """The row so many after the first; the last row, once more, where there is none."""
    row, last = builder.add(first, INTEGER(more)), builder.sub(n_rows, _ONE)
    return builder.select(builder.icmp_signed("<", row, n_rows), row, last)


def repeated(builder: Builder, value: ir.Value) -> ir.Value:
    """A vector of the same value in every lane."""
    kind = ir.VectorType(value.type, builder.lanes)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), builder.lanes), None))


def _any(builder: Builder, bits: ir.Value) -> ir.Value:
    """Whether a bit is set in any lane."""
    number = ir.IntType(builder.lanes)
    return builder.icmp_unsigned("!=", builder.bitcast(bits, number), number(0))


def splat(builder: Builder, numbers: ir.Value, place: ir.Value, dtype: np.dtype[Any] = WIDE) -> Lanes:
    """The number at a place in every lane."""
    return Lanes(builder, repeated(builder, builder.load(builder.gep(numbers, [place]))), dtype)


def _vector_at(builder: Builder, numbers: ir.Value, place: ir.Value) -> ir.Value:
    kind = ir.VectorType(numbers.type.pointee, builder.lanes)
    return builder.bitcast(builder.gep(numbers, [place]), kind.as_pointer())


def lanes_at(
    builder: Builder, numbers: ir.Value, place: ir.Value, dtype: np.dtype[Any], mask: ir.Value | None = None
) -> Lanes:
    pointer, bytes_each = _vector_at(builder, numbers, place), dtype.itemsize
    if mask is None:
        return Lanes(builder, builder.load(pointer, align=bytes_each), dtype)
    kind = pointer.type.pointee
    signature = ir.FunctionType(kind, [pointer.type, ir.IntType(32), mask.type, kind])
    load = declared(builder, "masked.load", signature, kind, pointer.type)
    return Lanes(
        builder, builder.call(load, [pointer, ir.IntType(32)(bytes_each), mask, ir.Constant(kind, None)]), dtype
    )


def store(lanes: Lanes, numbers: ir.Value, place: ir.Value, mask: ir.Value | None) -> None:
    builder, value = lanes.builder, lanes.value
    pointer, bytes_each = _vector_at(builder, numbers, place), lanes.dtype.itemsize
    if mask is None:
        builder.store(value, pointer, align=bytes_each)
        return
    signature = ir.FunctionType(ir.VoidType(), [value.type, pointer.type, ir.IntType(32), mask.type])
    store = declared(builder, "masked.store", signature, value.type, pointer.type)
    builder.call(store, [value, pointer, ir.IntType(32)(bytes_each), mask])
