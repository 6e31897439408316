"""Pass 1 on one block of rows: kernel columns, rows of B, their Gram matrix, residuals, and rows drawn by these."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.errors import InvalidData, KernelNotPositive
from daskrr.numerics import blas, reservoir
from daskrr.numerics.reservoir import Order, Reservoir
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

# A residual of so many times its round-off budget or less is taken for none.
NO_RESIDUAL = 8.0

# A residual below zero by so many times its round-off budget is no round-off. The worst ever seen was 0.9 times.
NOT_POSITIVE = 100.0

# Rows whose products BLAS may add in one chain, in whatever order it does that: as many as a block has by default, so
# that only a larger one needs a second p × p matrix.
CHAIN_ROWS = 8192
CHAIN_ROWS_PER_LANDMARK = 8


@dataclass(frozen=True)
class Whitener:
    """Maps rows of X to rows of B: prepared kernel columns of the kept landmarks, and the factor of W."""

    columns: Columns
    diagonal: Diagonal
    inverse: NDArray
    residual_error: float


@dataclass(frozen=True)
class Kept:
    """What pass 1 keeps of a block for pass 2: 8 bytes a row, and a checksum (crc32c) of each chunk of the input."""

    residual: NDArray[np.float64]
    checksums: NDArray[np.uint32]

    def __sizeof__(self) -> int:
        return self.residual.nbytes + self.checksums.nbytes


@dataclass(frozen=True)
class Totals:
    """Sums over rows: of k_ii, of residuals above zero; the extreme residuals; and how the sums were added.

    ``height`` is the largest number of additions that a term of these sums, or of the Gram matrix beside them, has gone
    through: what the round-off of a sum is bounded by.
    """

    diagonal: float
    residual: float
    largest: float
    smallest: float
    height: int

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(
            diagonal=self.diagonal + other.diagonal,
            residual=self.residual + other.residual,
            largest=max(self.largest, other.largest),
            smallest=min(self.smallest, other.smallest),
            height=max(self.height, other.height) + 1,
        )


@dataclass(frozen=True)
class Targets:
    """What is to be predicted of a block of rows, (m, t); the last feature of weighted rows is the root of a weight.

    An origin is subtracted from them already; ``row_origin`` (r,), if any, is to be subtracted from the rows of B.
    ``folds`` (m,) says in which of ``n_folds`` each row is, if the sums of folds are to be apart.
    """

    values: NDArray[np.float64]
    weighted: bool
    n_folds: int = 0
    folds: NDArray[np.int64] | None = None
    row_origin: NDArray[np.float64] | None = None

    def design(self, X: NDArray, start: int) -> NDArray[np.float64]:
        """(m, 1 + t): ones and targets of the rows X from ``start`` on, times the roots of their weights."""
        found = np.column_stack([np.ones(len(X)), self.values[start : start + len(X)]])
        return found * X[:, -1:].astype(np.float64) if self.weighted else found

    def groups(self, start: int, size: int) -> list[Any]:
        """Which of ``size`` rows from ``start`` on are summed together."""
        if self.folds is None:
            return [slice(None)]
        folds = self.folds[start : start + size]
        return [np.flatnonzero(folds == number) for number in range(self.n_folds)]


@dataclass(frozen=True)
class Moments:
    """Sums for regression: Bᵀ[1, Y] (r, 1 + t) and [1, Y]ᵀ[1, Y] (1 + t, 1 + t); of every fold, if there are folds."""

    features: NDArray[np.float64]
    targets: NDArray[np.float64]

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(self.features + other.features, self.targets + other.targets)


@dataclass(frozen=True)
class GramPart:
    """Result of pass 1 on some rows: the lower triangle of their Gram matrix, sums, and rows drawn by name.

    With folds there is a Gram matrix of each, (folds, r, r).
    """

    gram: NDArray[np.float64]
    kept: Kept | None
    totals: Totals
    drawn: dict[str, Reservoir]
    moments: Moments | None = None

    def to_record(self, whole: bool = False) -> dict[str, Any]:
        """The sums as numbers and arrays, of the symmetric matrix one triangle, which takes half the room, or all."""
        gram = {"gram": self.gram} if whole else {"triangle": self.gram[np.tril_indices(len(self.gram))]}
        return gram | {
            "totals": asdict(self.totals),
            "drawn": {name: vars(one) for name, one in self.drawn.items()},
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "GramPart":
        """What :meth:`to_record` made."""
        gram = record.get("gram")
        if gram is None:
            triangle = record["triangle"]
            rank = (math.isqrt(8 * len(triangle) + 1) - 1) // 2
            gram = np.zeros((rank, rank))
            gram[np.tril_indices(rank)] = triangle
        drawn = {name: Reservoir(**one) for name, one in record["drawn"].items()}
        return cls(gram, None, Totals(**record["totals"]), drawn)

    def __sizeof__(self) -> int:
        kept = 0 if self.kept is None else self.kept.__sizeof__()
        return self.gram.nbytes + kept + sum(one.__sizeof__() for one in self.drawn.values())


def chain_rows(rank: int) -> int:
    """Rows that are added in one chain, a function of the number of landmarks alone, since it changes bits."""
    return max(CHAIN_ROWS, CHAIN_ROWS_PER_LANDMARK * rank)


def most_additions(n_rows: int, rank: int) -> int:
    """At most how many additions a term of a Gram matrix of ``n_rows`` rows goes through in a :class:`GramSum`.

    A chain that has ended has more than half its rows, since no tile is higher than the other half.
    """
    longest = chain_rows(rank)
    return min(n_rows, longest) + (2 * n_rows // longest if n_rows > longest else 0)


class GramSum:
    """The Gram matrix BᵀB of rows that arrive in tiles, added in chains that are short enough.

    The round-off of a sum grows with the longest chain of its additions, to the full if the addends are equal, as those
    of repeated rows are. So a chain ends after :func:`chain_rows` rows, and its sum is added to those before. Products
    and sums are float64, whatever the tiles are: those of float32 numbers are exact then.
    """

    def __init__(self, rank: int) -> None:
        self._chain = np.zeros((rank, rank))
        self._before: NDArray[np.float64] | None = None
        self._n_rows = self._longest = self._n_joined = 0

    @property
    def height(self) -> int:
        """Additions that a term has gone through at most: BLAS may add the rows of a chain in any order."""
        return max(self._longest, self._n_rows) + self._n_joined

    def add(self, B: NDArray) -> None:
        """Add the rows B (m, r)."""
        if self._n_rows + len(B) > chain_rows(len(self._chain)):
            self._end_chain()
        self._n_rows += len(B)
        if B.dtype != np.float64:
            wide = scratch_tile(len(B), B.shape[1], np.dtype(np.float64), other=True)
            np.copyto(wide, B)
            B = wide
        blas.add_gram(B, self._chain)

    def matrix(self) -> NDArray[np.float64]:
        """The sum, of which the lower triangle counts; nothing can be added any more."""
        if self._before is not None:
            self._end_chain()
        return self._chain if self._before is None else self._before

    def _end_chain(self) -> None:
        if self._before is None:
            self._before, self._chain = self._chain, np.zeros_like(self._chain)
        else:
            np.add(self._before, self._chain, out=self._before)
            self._chain[...] = 0.0
            self._n_joined += 1
        self._longest, self._n_rows = max(self._longest, self._n_rows), 0


def no_less_than_residual(residual: NDArray[np.float64], error: NDArray[np.float64]) -> NDArray[np.float64]:
    """The residual, but never less than the true one, whatever round-off did to it."""
    return np.maximum(residual, 0.0) + error


def clear_residual(residual: NDArray[np.float64], error: NDArray[np.float64]) -> NDArray[np.float64]:
    """The residual where it is not mere round-off."""
    return np.where(residual > NO_RESIDUAL * error, residual, 0.0)


@dataclass(frozen=True)
class Draw:
    """Rows to draw while they pass by: the first ``size`` of an order, weighted by residual and its round-off."""

    order: Order
    size: int
    weigh: Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]]


@LEGAL_OVERFLOW
@blas.one_thread()
def gram_block(
    whitener: Whitener,
    pieces: Pieces,
    first_row: int,
    draws: dict[str, Draw] | None = None,
    with_gram: bool = True,
    targets: Targets | None = None,
) -> GramPart:
    """Pass 1 on one block (Algorithm, step 3): C → B → G += BᵀB, and the residual k_ii − ‖b_i‖².

    Raises
    ------
    InvalidData
        NaN or infinity in the rows, or in their kernel values.
    """
    rank, dtype = len(whitener.inverse), whitener.inverse.dtype
    reader = BlockReader(pieces, first_row)
    n_sums = max(1, targets.n_folds) if targets else 1
    sums = [GramSum(rank if with_gram else 0) for _ in range(n_sums)]
    residuals: list[NDArray] = [np.empty(0)]
    diagonals: list[NDArray] = [np.empty(0)]
    drawn: dict[str, Reservoir] = {}
    moments = None if targets is None else _no_moments(rank, targets, n_sums)
    for piece in reader:
        diagonal = whitener.diagonal(piece)
        found: list[NDArray] = []
        for rows in tiles_of(piece, rank):
            B = scratch_tile(rows.stop - rows.start, rank, dtype)
            fill_tile(whitener.columns, piece[rows], B)
            blas.multiply_rows(whitener.inverse, B)
            found.append(diagonal[rows] - blas.row_norms(B))
            if targets is not None and moments is not None:
                _add_tile(B, piece[rows], targets, reader.n_rows - len(piece) + rows.start, sums, moments)
            elif with_gram:
                sums[0].add(B)
        residual = np.concatenate(found) if found else np.empty(0)
        start = first_row + reader.n_rows - len(piece)
        check_overflow(residual, start)
        _check_positive(residual, diagonal, whitener.residual_error, start)
        drawn = _draw_on(drawn, draws or {}, piece, start, residual, whitener.residual_error * diagonal)
        residuals.append(residual)
        diagonals.append(diagonal)
    residual, diagonal = np.concatenate(residuals), np.concatenate(diagonals)
    grams = [one.matrix() for one in sums]
    check_overflow(np.array([np.diagonal(gram) for gram in grams]), first_row)
    totals = Totals(
        diagonal=float(diagonal.sum()),
        residual=float(np.maximum(residual, 0.0).sum()),
        largest=float(residual.max(initial=-np.inf)),
        smallest=float(residual.min(initial=np.inf)),
        height=max(one.height for one in sums),
    )
    _check_moments(moments, first_row)
    kept = Kept(residual, np.array(reader.checksums, np.uint32))
    if not (targets and targets.n_folds):
        gram, moments = grams[0], moments and Moments(moments.features[0], moments.targets[0])
        return GramPart(gram, kept, totals, drawn, moments)
    return GramPart(np.array(grams), kept, totals, drawn, moments)


def _check_moments(moments: Moments | None, first_row: int) -> None:
    if moments is not None and not (np.isfinite(moments.targets).all() and np.isfinite(moments.features).all()):
        raise InvalidData(f"sums of the targets of the block of rows from {first_row} overflow. Scale y down.")


def _no_moments(rank: int, targets: Targets, n_sums: int) -> Moments:
    n_columns = 1 + targets.values.shape[1]
    return Moments(np.zeros((n_sums, rank, n_columns)), np.zeros((n_sums, n_columns, n_columns)))


def _add_tile(B: NDArray, X: NDArray, targets: Targets, start: int, sums: list[GramSum], moments: Moments) -> None:
    """Add the rows B (m, r), which start at ``start`` in their block, to the sums of their folds."""
    T = targets.design(X, start)
    if targets.row_origin is not None:
        blas.add_outer(B, -T[:, 0], targets.row_origin)
    for number, chosen in enumerate(targets.groups(start, len(B))):
        b, t = B[chosen], T[chosen]
        sums[number].add(b)
        moments.features[number] += b.T.astype(np.float64, copy=False) @ t
        moments.targets[number] += t.T @ t


@LEGAL_OVERFLOW
@blas.one_thread()
def whitened_rows(whitener: Whitener, X: NDArray) -> NDArray[np.float64]:
    """Rows of B (m, r) of a few rows X (m, d), as pass 1 computes them."""
    B = np.empty((len(X), len(whitener.inverse)))
    for rows in tiles_of(X, B.shape[1]):
        tile = scratch_tile(rows.stop - rows.start, B.shape[1], whitener.inverse.dtype)
        fill_tile(whitener.columns, X[rows], tile)
        blas.multiply_rows(whitener.inverse, tile)
        B[rows] = tile
    return B


def _draw_on(
    drawn: dict[str, Reservoir], draws: dict[str, Draw], X: NDArray, start: int, residual: NDArray, error: NDArray
) -> dict[str, Reservoir]:
    """Every draw after some more rows."""
    found = {
        name: Reservoir.of(draw.order, draw.size, draw.weigh(residual, error), start, X) for name, draw in draws.items()
    }
    return {name: reservoir.merge([drawn[name], one]) for name, one in found.items()} if drawn else found


def _check_positive(residual: NDArray, diagonal: NDArray, error: float, first_row: int) -> None:
    """Refuse a kernel for which landmarks explain more of a row than there is of it, far beyond round-off."""
    excess = -residual - NOT_POSITIVE * error * diagonal
    if len(excess) and excess.max() > 0:
        worst = int(excess.argmax())
        raise KernelNotPositive(
            f"the kernel is not positive semi-definite: the landmarks explain {diagonal[worst] - residual[worst]:.6g} "
            f"of row {first_row + worst}, whose own k(x, x) is {diagonal[worst]:.6g}. Correct its formula or diagonal."
        )
