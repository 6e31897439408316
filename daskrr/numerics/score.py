"""Pass 2 on one block of rows: their scores, estimates and certified intervals."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.errors import CheckFailed, SourceChanged
from daskrr.numerics import blas, bounds
from daskrr.numerics.bounds import Certainty, Interval, RowFacts
from daskrr.numerics.gram import NO_RESIDUAL, Kept, Whitener
from daskrr.numerics.tiles import (
    LEGAL_OVERFLOW,
    BlockReader,
    Columns,
    Diagonal,
    Pieces,
    check_overflow,
    fill_tile,
    scratch_tile,
    tiles_of,
)


@dataclass(frozen=True)
class Probe:
    """A few rows a drawn by weights w, by which pass 2 sees how much of its residual a row shares with others.

    E_ia = k(x_i, x_a) − c_i·coefficients_a, and ``scale``·Σ_a E_ia²/w_a estimates the square norm of row i of E.
    """

    columns: Columns
    coefficients: NDArray
    rows: NDArray[np.int64]
    weights: NDArray[np.float64]
    scale: float

    def shared(
        self, X: NDArray, C: NDArray, residual: NDArray[np.float64], error: NDArray[np.float64], first_row: int | None
    ) -> NDArray[np.float64]:
        """(E²)_ii/E_ii − E_ii of the rows X (m, d) with kernel columns C, or 0 where the residual is none.

        A row shares nothing with itself; rows without numbers are none of the data, whatever their points.
        """
        clear = residual > NO_RESIDUAL * error
        if not clear.any():
            return np.zeros(len(X))
        E = scratch_tile(len(X), len(self.rows), C.dtype, other=True)
        fill_tile(self.columns, X, E)
        E -= C @ self.coefficients
        squares = np.square(E, dtype=np.float64)
        np.minimum(squares, (np.maximum(residual, 0.0) + error)[:, None] * self.weights, out=squares)
        if first_row is not None:
            itself = np.flatnonzero((self.rows >= first_row) & (self.rows < first_row + len(X)))
            squares[self.rows[itself] - first_row, itself] = 0.0
        return np.where(clear, self.scale * (squares @ (1.0 / self.weights)) / np.where(clear, residual, 1.0), 0.0)


@dataclass(frozen=True)
class Leading:
    """Coordinates along the eigenvectors of G with eigenvalues above n·λ: nearly all that ``captured`` consists of."""

    coordinates: NDArray
    eigenvalues: NDArray[np.float64]
    largest_left: float

    def captured(
        self, coordinates: NDArray, scores: NDArray[np.float64], shift: float, error: float
    ) -> NDArray[np.float64]:
        """Upper bound (m,) of Σ_j z_j² S_j/(S_j + n·λ)², given the scores; what is left counts as at most its share."""
        squares = np.square(coordinates, dtype=np.float64)
        whole = self.eigenvalues + shift
        left = np.maximum(scores * (1.0 + error) - squares @ (1.0 / whole) * (1.0 - error), 0.0)
        return squares @ (self.eigenvalues / whole**2) + self.largest_left / (self.largest_left + shift) * left


@dataclass(frozen=True)
class Subset:
    """The landmarks as data of their own: a row's score among them and itself bounds its score among all rows."""

    factors: tuple[NDArray, ...]
    rows: NDArray[np.int64]

    def bounds(
        self, C: NDArray, diagonal: NDArray, error: NDArray, first_row: int | None, shifts: NDArray
    ) -> NDArray[np.float64]:
        """(m, L) upper bounds from kernel columns C."""
        numbers = np.full(len(C), -1) if first_row is None else np.arange(first_row, first_row + len(C))
        among = np.isin(numbers, self.rows)
        # The difference is divided by the shift: a few units of round-off, even of one landmark, count.
        spare = 4.0 * error + 32.0 * np.finfo(C.dtype).eps * diagonal
        found = np.empty((len(C), len(shifts)))
        for column, (factor, shift) in enumerate(zip(self.factors, shifts, strict=True)):
            V = C.copy()
            blas.multiply_rows(factor, V)
            variance = np.maximum(diagonal - blas.row_norms(V), 0.0) + spare
            found[:, column] = np.where(among, variance / shift, variance / (variance + shift))
        return found


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
def score_block(scorer: Scorer, pieces: Pieces, first_row: int, kept: Kept) -> ScoredRows:
    """Pass 2 on one block (Algorithm, step 5): scores, estimates and, with a certainty, intervals of its rows.

    Raises
    ------
    SourceChanged
        The block is not the one that pass 1 saw.
    """
    rank, dtype = scorer.factors[0].shape[1], scorer.factors[0].dtype
    reader = BlockReader(pieces, first_row)
    found: list[ScoredRows] = []
    for piece in reader:
        start = reader.n_rows - len(piece)
        for rows in tiles_of(piece, rank):
            residual = kept.residual[start + rows.start : start + rows.stop]
            if len(residual) < rows.stop - rows.start:
                break  # More rows than pass 1 saw: named below.
            C = scratch_tile(rows.stop - rows.start, rank, dtype)
            fill_tile(scorer.columns, piece[rows], C)
            found.append(_score_tile(scorer, piece[rows], C, residual, first_row + start + rows.start))
    _check_unchanged(reader, kept, first_row)
    return replace(_joined(found, len(scorer.shifts)), checksums=kept.checksums)


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
    rank, dtype = len(whitener.inverse), whitener.inverse.dtype
    reader = BlockReader(pieces, first_row)
    found: list[ScoredRows] = []
    for piece in reader:
        start = first_row + reader.n_rows - len(piece)
        for rows in tiles_of(piece, rank):
            B = scratch_tile(rows.stop - rows.start, rank, dtype)
            fill_tile(whitener.columns, piece[rows], B)
            blas.multiply_rows(whitener.inverse, B)
            residual = whitener.diagonal(piece[rows]) - blas.row_norms(B)
            check_overflow(residual, start)
            fill_tile(scorer.columns, piece[rows], B)
            found.append(_score_tile(scorer, piece[rows], B, residual, start + rows.start, is_new))
    checksums = np.array(reader.checksums, np.uint32)
    return replace(_joined(found, len(scorer.shifts)), checksums=checksums)


def _score_tile(
    scorer: Scorer, X: NDArray, C: NDArray, residual: NDArray, first_row: int, is_new: bool = False
) -> ScoredRows:
    """Everything about the rows X (m, d), whose kernel columns C are overwritten; new ones are none of the data."""
    shifts, diagonal, certainty = scorer.shifts, scorer.diagonal(X), scorer.certainty
    error, number = scorer.residual_error * diagonal, None if is_new else first_row
    shared = 0.0 if scorer.probe is None else scorer.probe.shared(X, C, residual, error, number)
    subset = None if scorer.subset is None else scorer.subset.bounds(C, diagonal, error, number, shifts)
    # What one row can have: ‖b‖²/(‖b‖² + n·λ), or ‖b‖²/(n·λ) if G is without it, with ‖b‖² = k_ii − e up to its last
    # digit.
    explained = np.maximum(diagonal - residual, 0.0) + np.finfo(np.float64).eps * diagonal
    cap = explained[:, None] / (shifts if is_new else explained[:, None] + shifts)
    found, captured, shifted = _read(scorer, C, cap)
    check_overflow(found, first_row)
    facts = RowFacts(found, captured, shifted, subset, residual, diagonal)
    errors = np.zeros_like(shifts)
    if certainty is not None:
        errors = certainty.appended_errors if is_new else certainty.score_errors
    if is_new:
        facts = bounds.append(facts, errors)
    interval = None
    if certainty is not None:
        facts = _tightened(facts, explained + error, shifts, errors)
        interval = _certify(facts, shifts, certainty, first_row, is_new)
    e = np.where(residual > NO_RESIDUAL * error, residual, 0.0)
    guess = bounds.estimate(facts.scores, e, shared, shifts)
    if interval is not None:
        guess = np.clip(guess, interval.lower, interval.upper)
    return ScoredRows(
        facts=facts,
        guess=guess,
        interval=interval,
        leverage_function=found if is_new else None,
        # A new row is one.
        repeats=None if scorer.repeats is None else np.ones(len(X)) if is_new else scorer.repeats(X),
        residual_unit=scorer.residual_unit,
    )


def _read(
    scorer: Scorer, C: NDArray, cap: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64] | None]:
    """Scores, ``captured`` and ``shifted`` (m, L) of a tile of kernel columns, which is overwritten."""
    if scorer.readings is not None:
        *triangular, rotation = scorer.factors
        for factor in triangular:
            blas.multiply_rows(factor, C)
        squares = np.matmul(C, rotation.T, out=scratch_tile(C.shape[0], C.shape[1], C.dtype, other=True))
        np.multiply(squares, squares, out=squares)
        found = (squares @ scorer.readings).astype(np.float64, copy=False)
        scores, *more = np.split(found, found.shape[1] // len(scorer.shifts), axis=1)
        scores = np.minimum(scores, cap)
        return scores, more[0] if more else scores, more[1] if more else None
    leading, certainty = scorer.leading, scorer.certainty
    coordinates = C[:, :0] if leading is None else C @ leading.coordinates.T
    for factor in scorer.factors:
        blas.multiply_rows(factor, C)
    scores = np.minimum(blas.row_norms(C)[:, None], cap)
    if leading is None or certainty is None:
        return scores, scores, None
    shift, error = float(scorer.shifts[0]), float(certainty.score_errors[0])
    return scores, leading.captured(coordinates, scores[:, 0], shift, error)[:, None], None


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


def _joined(found: list[ScoredRows], n_ridges: int) -> ScoredRows:
    """One object of the rows of many tiles."""
    if not found:
        none, row = np.empty((0, n_ridges)), np.empty(0)
        return ScoredRows(RowFacts(none, none, None, None, row, row), none, None, leverage_function=none)
    facts = [one.facts for one in found]
    intervals = [one.interval for one in found if one.interval is not None]
    return ScoredRows(
        RowFacts(**{name: _stacked(facts, name) for name in _names(RowFacts)}),
        _stacked(found, "guess"),
        Interval(**{name: _stacked(intervals, name) for name in _names(Interval)}) if intervals else None,
        leverage_function=_stacked(found, "leverage_function"),
        repeats=_stacked(found, "repeats"),
        residual_unit=found[0].residual_unit,
    )


def _names(kind: type) -> list[str]:
    return [one.name for one in fields(kind)]


def _stacked(parts: list[Any], name: str) -> Any:
    arrays = [getattr(part, name) for part in parts]
    return None if arrays[0] is None else np.concatenate(arrays)


def _check_unchanged(reader: BlockReader, kept: Kept, first_row: int) -> None:
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
