"""Pass 2 on one block of rows: their scores, estimates and certified intervals."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.errors import CheckFailed, SourceChanged
from daskrr.kernels import compiled, products
from daskrr.kernels.device import current, here, scratch
from daskrr.kernels.lanes import Lanes
from daskrr.numerics import blas, bounds
from daskrr.numerics.bounds import Certainty, Interval, RowFacts
from daskrr.numerics.pass1 import NO_RESIDUAL, KeptResiduals, Whitener, no_less_than_residual
from daskrr.numerics.tiles import (
    LEGAL_OVERFLOW,
    BlockReader,
    Columns,
    Diagonal,
    Pieces,
    check_overflow,
    kernel_tiles,
    tile_rows,
)

# Bounds are computed of so many rows times ridges together: enough that Python costs little, and few for the memory.
BOUNDED_AT_ONCE = 2**14


@dataclass(frozen=True)
class Probe:
    """A few rows a drawn by weights w, by which pass 2 sees how much of its residual a row shares with others.

    E_ia = k(x_i, x_a) − c_i·coefficients_a, and ``scale``·Σ_a E_ia²/w_a estimates the square norm of row i of E.
    """

    columns: Columns
    coefficients: NDArray
    rows: NDArray[np.int64]
    inverse_weights: NDArray[np.float64]
    scale: float

    def squares(self, X: NDArray, C: NDArray, most: NDArray[np.float64], first_row: int | None) -> NDArray[np.float64]:
        """Σ_a E_ia²/w_a (m,) of the rows X (m, d) with kernel columns C, both on the device.

        No term is more than the residual of its row can be, ``most`` (m,). A row shares nothing with itself; rows
        without numbers are none of the data, whatever their points.
        """
        shape = (len(X), len(self.rows))
        values, explained = scratch("probe", shape, C.dtype), scratch("explained", shape, C.dtype)
        self.columns(X, values)
        products.times(C, self.coefficients, out=explained)
        if first_row is not None:
            itself = np.flatnonzero((self.rows >= first_row) & (self.rows < first_row + len(X)))
            for column, row in zip(itself.tolist(), (self.rows[itself] - first_row).tolist(), strict=True):
                values[row, column] = explained[row, column]
        limits = current().put(most)
        return compiled.row_sums(_capped_square, [values, explained], here(self.inverse_weights), limits)

    def shared(
        self, squares: NDArray[np.float64], residual: NDArray[np.float64], clear: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """(E²)_ii/E_ii − E_ii (m,), or 0 where the residual is none."""
        return np.where(clear, self.scale * squares / np.where(clear, residual, 1.0), 0.0)


def _capped_square(found: list[Lanes], weight: Callable[[], Lanes], limit: Callable[[], Lanes]) -> Lanes:
    difference = found[0] - found[1]
    return (difference * difference * weight()).at_most(limit())


@dataclass(frozen=True)
class Leading:
    """Coordinates along the eigenvectors of G with eigenvalues above n·λ: nearly all that ``captured`` consists of."""

    coordinates: NDArray
    eigenvalues: NDArray[np.float64]
    largest_left: float

    def sums(self, C: NDArray, shift: float) -> NDArray[np.float64]:
        """Σ_j z_j²/(S_j + n·λ) and Σ_j z_j² S_j/(S_j + n·λ)² (m, 2) of rows with kernel columns C."""
        squares = np.square(C @ here(self.coordinates).T, dtype=np.float64)
        whole = self.eigenvalues + shift
        weights = np.column_stack([1.0 / whole, self.eigenvalues / whole**2])
        return current().get(squares @ current().put(weights))

    def captured(
        self, sums: NDArray[np.float64], scores: NDArray[np.float64], shift: float, error: float
    ) -> NDArray[np.float64]:
        """Upper bound (m,) of Σ_j z_j² S_j/(S_j + n·λ)², given the scores; what is left counts as at most its share."""
        left = np.maximum(scores * (1.0 + error) - sums[:, 0] * (1.0 - error), 0.0)
        return sums[:, 1] + self.largest_left / (self.largest_left + shift) * left


@dataclass(frozen=True)
class Subset:
    """The landmarks as data of their own: a row's score among them and itself bounds its score among all rows."""

    factors: tuple[NDArray, ...]
    rows: NDArray[np.int64]

    def norms(self, C: NDArray) -> NDArray[np.float64]:
        """(m, L) what the landmarks explain of rows with kernel columns C."""
        norms = np.empty((len(C), len(self.factors)))
        for column, factor in enumerate(self.factors):
            V = scratch("subset", C.shape, C.dtype)
            np.copyto(V, C)
            norms[:, column] = blas.rows_and_norms(factor, V)[1]
        return norms

    def bounds(
        self, norms: NDArray, diagonal: NDArray, error: NDArray, first_row: int | None, shifts: NDArray, dtype: np.dtype
    ) -> NDArray[np.float64]:
        """(m, L) upper bounds."""
        numbers = np.full(len(norms), -1) if first_row is None else np.arange(first_row, first_row + len(norms))
        among = np.isin(numbers, self.rows)[:, None]
        # The difference is divided by the shift: a few units of round-off, even of one landmark, count.
        spare = 4.0 * error + 32.0 * np.finfo(dtype).eps * diagonal
        variance = np.maximum(diagonal[:, None] - norms, 0.0) + spare[:, None]
        return np.where(among, variance / shifts, variance / (variance + shifts))


@dataclass(frozen=True)
class Scorer:
    """What pass 2 applies to a tile of kernel columns, and what it reads off.

    Attributes
    ----------
    factors
        Applied in turn: lower triangular ones, and for a path of ridges a full one last.
    readings
        For a path, (r, L) or, with ``captured`` and ``shifted``, (r, 3L): what the squares of the result are multiplied
        by. None for one ridge, where their sum is the score.
    shifts
        (L,) n·λ.
    repeats, residual_unit
        How many repeats each row stands for, if rows have weights; see :class:`ScoredRows`.
    """

    columns: Columns
    diagonal: Diagonal
    factors: tuple[NDArray, ...]
    readings: NDArray | None
    shifts: NDArray[np.float64]
    residual_error: float
    probe: Probe | None = None
    leading: Leading | None = None
    subset: Subset | None = None
    certainty: Certainty | None = None
    repeats: Callable[[NDArray], NDArray[np.float64]] | None = None
    residual_unit: float = 1.0

    def read(self, C: NDArray) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What the factors make of a tile of kernel columns, which is overwritten, and the sums of ``leading``.

        The former is (m, 1), the squared norms, or for a path of ridges (m, L) or (m, 3L).
        """
        sums = np.empty((len(C), 0)) if self.leading is None else self.leading.sums(C, float(self.shifts[0]))
        if self.readings is None:
            *others, last = self.factors
            for factor in others:
                C = blas.multiply_rows(factor, C)
            return blas.rows_and_norms(last, C)[1][:, None], sums
        *triangular, rotation = self.factors
        for factor in triangular:
            C = blas.multiply_rows(factor, C)
        squares = np.matmul(C, here(rotation).T, out=scratch("rotated", C.shape, C.dtype))
        np.multiply(squares, squares, out=squares)
        return current().get((squares @ here(self.readings)).astype(np.float64, copy=False)), sums


@dataclass(frozen=True)
class TileReading:
    """What is read off the kernel columns of m rows, (m, …), with no columns where nothing is asked.

    See :meth:`Scorer.read`, :meth:`Probe.squares` and :meth:`Subset.norms`.
    """

    products: NDArray[np.float64]
    leading: NDArray[np.float64]
    probe: NDArray[np.float64]
    subset: NDArray[np.float64]


@dataclass(frozen=True)
class ScoredRows:
    """What pass 2 found out about some rows; arrays (m, L) for L ridges, and checksums of the chunks they are in.

    New rows have a ``leverage_function`` b(G + n·λ)⁻¹b as well, which may exceed 1. Weighted rows stand for so many
    ``repeats`` (m,): facts, guess and interval are those of the whole, with a residual of ``residual_unit`` times as
    many, and what is told of a row is that of one repeat.
    """

    facts: RowFacts
    guess: NDArray[np.float64]
    interval: Interval | None
    checksums: NDArray[np.uint32] | None = None
    leverage_function: NDArray[np.float64] | None = None
    repeats: NDArray[np.float64] | None = None
    residual_unit: float = 1.0

    def whole(self, name: str) -> NDArray[np.float64]:
        """``scores``, ``estimate``, ``lower`` or ``upper`` of all repeats of a row together, never above 1."""
        if name in ("lower", "upper") and self.interval is None:
            raise RuntimeError("these rows were scored without certainty")
        found = {"scores": self.facts.scores, "estimate": self.guess}
        return found[name] if name in found else getattr(self.interval, name)

    def of_one(self, whole: NDArray[np.float64]) -> NDArray[np.float64]:
        """The share (m, L) of one repeat."""
        return whole if self.repeats is None else whole / self.repeats[:, None]

    @property
    def scores(self) -> NDArray[np.float64]:
        """Approximate scores l̃."""
        return self.of_one(self.whole("scores"))

    @property
    def estimate(self) -> NDArray[np.float64]:
        """The best points between."""
        return self.of_one(self.whole("estimate"))

    @property
    def lower(self) -> NDArray[np.float64]:
        """Certified lower ends."""
        return self.of_one(self.whole("lower"))

    @property
    def upper(self) -> NDArray[np.float64]:
        """Certified upper ends."""
        return self.of_one(self.whole("upper"))

    @property
    def relative_weights(self) -> NDArray[np.float64] | float:
        """(m,) sample weights over their mean."""
        return 1.0 if self.repeats is None else self.repeats * self.residual_unit

    @property
    def residual(self) -> NDArray[np.float64]:
        """(m,) k_ii − L_ii."""
        return self.facts.residual / self.relative_weights


@LEGAL_OVERFLOW
@blas.one_thread()
def score_block(scorer: Scorer, pieces: Pieces, first_row: int, kept: KeptResiduals) -> ScoredRows:
    """Pass 2 on one block (Algorithm, step 5): scores, estimates and, with a certainty, intervals of its rows.

    Raises
    ------
    SourceChanged
        The block is not the one that pass 1 saw.
    """
    reader = BlockReader(pieces, first_row)
    parts: list[ScoredRows] = []
    for piece in reader:
        start = reader.n_rows - len(piece)
        residual = kept.residual[start : start + len(piece)]
        if len(residual) < len(piece):
            continue  # More rows than pass 1 saw: named below.
        parts += _score_piece(scorer, piece, residual, first_row + start)
    _check_unchanged(reader, kept, first_row)
    return replace(_joined(parts, len(scorer.shifts)), checksums=kept.checksums)


def drawn_rows_block(whitener: Whitener, scorer: Scorer, pieces: Pieces) -> ScoredRows:
    """Pass 2 on rows of the data, drawn from anywhere, of which pass 1 has not kept the residuals."""
    return _whiten_and_score(whitener, scorer, pieces, 0, is_new=False)


def new_rows_block(whitener: Whitener, scorer: Scorer, pieces: Pieces, first_row: int) -> ScoredRows:
    """Scores, estimates and intervals that new rows have among the data, each appended to it for itself."""
    return _whiten_and_score(whitener, scorer, pieces, first_row, is_new=True)


@LEGAL_OVERFLOW
@blas.one_thread()
def _whiten_and_score(
    whitener: Whitener, scorer: Scorer, pieces: Pieces, first_row: int, is_new: bool
) -> ScoredRows:  # fmt: skip
    reader = BlockReader(pieces, first_row)
    parts: list[ScoredRows] = []
    for piece in reader:
        start = first_row + reader.n_rows - len(piece)
        residual = np.array(whitener.diagonal(piece), np.float64)
        with current().turn():
            for rows, _, C in kernel_tiles(whitener.columns, piece, len(whitener.inverse), whitener.inverse.dtype):
                residual[rows] -= blas.rows_and_norms(whitener.inverse, C)[1]
        check_overflow(residual, start)
        parts += _score_piece(scorer, piece, residual, start, is_new)
    checksums = np.array(reader.checksums, np.uint32)
    return replace(_joined(parts, len(scorer.shifts)), checksums=checksums)


def _score_piece(
    scorer: Scorer, X: NDArray, residual: NDArray, first_row: int, is_new: bool = False
) -> Iterator[ScoredRows]:
    """A few whole tiles at a time, so that what the bounds of many ridges compute meanwhile takes little memory."""
    tile = tile_rows(scorer.factors[0].shape[1])
    height = tile * max(1, BOUNDED_AT_ONCE // (tile * len(scorer.shifts)))
    for start in range(0, len(X), height):
        rows = slice(start, start + height)
        yield _score_rows(scorer, X[rows], residual[rows], first_row + start, is_new)


def _read_tiles(scorer: Scorer, X: NDArray, most: NDArray, clear: NDArray, first_row: int | None) -> TileReading:
    """All that takes the kernel columns of the rows X (m, d), tile by tile; the probe where a residual is ``clear``."""
    rank, dtype = scorer.factors[0].shape[1], scorer.factors[0].dtype
    found = []
    with current().turn():
        for rows, points, C in kernel_tiles(scorer.columns, X, rank, dtype):
            number = None if first_row is None else first_row + rows.start
            probe = subset = np.empty((len(C), 0))
            if scorer.probe is not None:
                probe = scorer.probe.squares(points, C, most[rows], number) if clear[rows].any() else np.zeros(len(C))
            if scorer.subset is not None:
                subset = scorer.subset.norms(C)
            products, leading = scorer.read(C)
            found.append(TileReading(products, leading, probe, subset))
    return TileReading(**{name: _stacked(found, name) for name in _names(TileReading)})


def _score_rows(scorer: Scorer, X: NDArray, residual: NDArray, first_row: int, is_new: bool = False) -> ScoredRows:
    """Everything about the rows X (m, d); new ones are none of the data."""
    shifts, diagonal, certainty = scorer.shifts, scorer.diagonal(X), scorer.certainty
    error, number = scorer.residual_error * diagonal, None if is_new else first_row
    clear = residual > NO_RESIDUAL * error
    read = _read_tiles(scorer, X, no_less_than_residual(residual, error), clear, number)
    shared = 0.0 if scorer.probe is None else scorer.probe.shared(read.probe, residual, clear)
    subset = None
    if scorer.subset is not None:
        subset = scorer.subset.bounds(read.subset, diagonal, error, number, shifts, scorer.factors[0].dtype)
    # What one row can have: ‖b‖²/(‖b‖² + n·λ), or ‖b‖²/(n·λ) if G is without it, with ‖b‖² = k_ii − e up to its last
    # digit.
    explained = np.maximum(diagonal - residual, 0.0) + np.finfo(np.float64).eps * diagonal
    cap = explained[:, None] / (shifts if is_new else explained[:, None] + shifts)
    scores, captured, shifted = _scores(scorer, read, cap)
    check_overflow(scores, first_row)
    check_overflow(read.probe, first_row)
    facts = RowFacts(scores, captured, shifted, subset, residual, diagonal)
    errors = np.zeros_like(shifts)
    if certainty is not None:
        errors = certainty.appended_errors if is_new else certainty.score_errors
    if is_new:
        facts = bounds.append(facts, errors)
    interval = None
    if certainty is not None:
        facts = _tightened(facts, explained + error, shifts, errors)
        interval = _certify(facts, shifts, certainty, first_row, is_new)
    guess = bounds.estimate(facts.scores, np.where(clear, residual, 0.0), shared, shifts)
    if interval is not None:
        guess = np.clip(guess, interval.lower, interval.upper)
    return ScoredRows(
        facts=facts,
        guess=guess,
        interval=interval,
        leverage_function=scores if is_new else None,
        # A new row is one.
        repeats=None if scorer.repeats is None else np.ones(len(X)) if is_new else scorer.repeats(X),
        residual_unit=scorer.residual_unit,
    )


def _scores(
    scorer: Scorer, read: TileReading, cap: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64] | None]:
    """Scores, ``captured`` and ``shifted`` (m, L), of which no score is above its ``cap``."""
    scores, *more = np.split(read.products, read.products.shape[1] // len(scorer.shifts), axis=1)
    scores = np.minimum(scores, cap)
    if more:
        return scores, more[0], more[1]
    leading, certainty = scorer.leading, scorer.certainty
    if leading is None or certainty is None:
        return scores, scores, None
    shift, error = float(scorer.shifts[0]), float(certainty.score_errors[0])
    return scores, leading.captured(read.leading, scores[:, 0], shift, error)[:, None], None


def _tightened(facts: RowFacts, explained: NDArray, shifts: NDArray, errors: NDArray) -> RowFacts:
    """``captured`` is at most l̃ − n·λ·l̃²/‖b‖², by Cauchy and Schwarz."""
    low = facts.scores * (1.0 - errors)
    # With ‖b‖² ≥ n·λ·l̃ the last factor is not negative but for round-off.
    share = shifts * low / np.maximum(explained, np.finfo(np.float64).tiny)[:, None]
    most = facts.scores * np.clip(1.0 - share + errors, 0.0, 1.0)
    return replace(facts, captured=np.minimum(facts.captured, most))


def _certify(facts: RowFacts, shifts: NDArray, certainty: Certainty, first_row: int, is_new: bool) -> Interval:
    try:
        return (bounds.certify_appended if is_new else bounds.certify)(facts, shifts, certainty)
    except ArithmeticError as error:
        raise CheckFailed(
            f"{error}, in the {'new ' if is_new else ''}rows from {first_row}: round-off is larger than its budget. "
            "Nothing can be certified; use dtype='float64', a larger ridge, or fewer landmarks."
        ) from None


def _joined(parts: list[ScoredRows], n_ridges: int) -> ScoredRows:
    """One object of the rows of many."""
    if not parts:
        none, row = np.empty((0, n_ridges)), np.empty(0)
        return ScoredRows(RowFacts(none, none, None, None, row, row), none, None, leverage_function=none)
    facts = [part.facts for part in parts]
    intervals = [part.interval for part in parts if part.interval is not None]
    return ScoredRows(
        RowFacts(**{name: _stacked(facts, name) for name in _names(RowFacts)}),
        _stacked(parts, "guess"),
        Interval(**{name: _stacked(intervals, name) for name in _names(Interval)}) if intervals else None,
        leverage_function=_stacked(parts, "leverage_function"),
        repeats=_stacked(parts, "repeats"),
        residual_unit=parts[0].residual_unit,
    )


def _names(kind: type) -> list[str]:
    return [one.name for one in fields(kind)]


def _stacked(parts: list[Any], name: str) -> Any:
    arrays = [getattr(part, name) for part in parts]
    return arrays[0] if arrays[0] is None or len(arrays) == 1 else np.concatenate(arrays)


def _check_unchanged(reader: BlockReader, kept: KeptResiduals, first_row: int) -> None:
    """Compare what was read with what pass 1 read, chunk by chunk."""
    advice = "Score a source that does not change while it is read (store a lazy array first)."
    if reader.n_rows != len(kept.residual) or len(reader.checksums) != len(kept.checksums):
        raise SourceChanged(
            f"the block of rows from {first_row} changed between the passes: pass 1 read {len(kept.residual)} rows, "
            f"pass 2 {reader.n_rows}. {advice}"
        )
    for number, (before, now) in enumerate(zip(kept.checksums.tolist(), reader.checksums, strict=True)):
        if before != now:
            raise SourceChanged(
                f"{reader.name(number)} changed between the passes: their checksum was {before:08x} in pass 1 and is "
                f"{now:08x} in pass 2. {advice}"
            )
