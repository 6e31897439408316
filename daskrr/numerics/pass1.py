"""Pass 1 on one block of rows: kernel columns, rows of B, their Gram matrix, residuals, and rows drawn by these."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from daskrr.errors import KernelNotPositive
from daskrr.kernels import products
from daskrr.kernels.device import current
from daskrr.numerics import blas, panels, reservoir
from daskrr.numerics.reservoir import Order, Reservoir
from daskrr.numerics.tiles import (
    LEGAL_OVERFLOW,
    BlockReader,
    Columns,
    Diagonal,
    Pieces,
    check_overflow,
    kernel_tiles,
)

# A residual of so many times its round-off budget or less is taken for none.
NO_RESIDUAL = 8.0

# A residual below zero by so many times its round-off budget is no round-off. The worst ever seen was 0.9 times.
NOT_POSITIVE = 100.0

# A chain of additions has at least so many rows for every landmark.
CHAIN_ROWS_PER_LANDMARK = 8


@dataclass(frozen=True)
class Whitener:
    """Maps rows of X to rows of B: prepared kernel columns of the kept landmarks, and the factor of W."""

    columns: Columns
    diagonal: Diagonal
    inverse: NDArray
    residual_error: float


@dataclass(frozen=True)
class KeptResiduals:
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
class GramPart:
    """Result of pass 1 on some rows: the lower triangle of their Gram matrix, sums, and rows drawn by name.

    ``gram`` is in the order of :mod:`daskrr.kernels.products`, one (n,) or of several matrices (k, n). ``kept`` is what
    there is of each block, unless that is kept elsewhere. ``moments`` are what else was summed, if anything, and can be
    added.
    """

    gram: NDArray[np.float64]
    kept: tuple[KeptResiduals, ...]
    totals: Totals
    drawn: dict[str, Reservoir]
    moments: Any = None

    def to_record(self) -> dict[str, Any]:
        """The sums as numbers and arrays."""
        return {
            "gram": self.gram,
            "totals": asdict(self.totals),
            "drawn": {name: vars(one) for name, one in self.drawn.items()},
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "GramPart":
        """What :meth:`to_record` made."""
        drawn = {name: Reservoir(**one) for name, one in record["drawn"].items()}
        return cls(record["gram"], (), Totals(**record["totals"]), drawn)

    def __sizeof__(self) -> int:
        return self.gram.nbytes + sum(one.__sizeof__() for one in (*self.kept, *self.drawn.values()))

    def __add__(self, other: "GramPart") -> "GramPart":
        """The sum of this part, which is used up, and the one after it."""
        panels.add(self.gram, other.gram)
        return GramPart(
            gram=self.gram,
            kept=self.kept + other.kept,
            totals=self.totals + other.totals,
            drawn={name: reservoir.merge([one, other.drawn[name]]) for name, one in self.drawn.items()},
            moments=None if self.moments is None else self.moments + other.moments,
        )


def chain_rows(rank: int, least: int) -> int:
    """Rows that are added in one chain, a function of the number of landmarks and the device, since it changes bits."""
    return max(least, CHAIN_ROWS_PER_LANDMARK * rank)


def most_additions(n_rows: int, rank: int, least: int) -> int:
    """At most how many additions a term of a Gram matrix of ``n_rows`` rows goes through in a :class:`GramSum`.

    ``least`` is what the device adds in one chain. Two chains in turn have more rows than one may have.
    """
    longest = chain_rows(rank, least)
    return min(n_rows, longest) + (2 * n_rows // longest if n_rows > longest else 0)


class GramSum:
    """The Gram matrix BᵀB of rows that arrive in tiles, added in chains that are short enough.

    The round-off of a sum grows with the longest chain of its additions, to the full if the addends are equal, as those
    of repeated rows are. So a chain ends after :func:`chain_rows` rows, and its sum is added to those before. Products
    and sums are float64, whatever the tiles are: those of float32 numbers are exact then.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._chain = rank, blas.no_sums(rank)
        self._before: NDArray[np.float64] | None = None
        self._n_rows = self._longest = self._n_joined = 0
        self._most = chain_rows(rank, current().chain_rows)

    @property
    def height(self) -> int:
        """Additions that a term has gone through at most: BLAS may add the rows of a chain in any order."""
        return max(self._longest, self._n_rows) + self._n_joined

    def add(self, B: NDArray, X: NDArray | None = None, start: int = 0) -> None:
        """Add the rows B (m, r)."""
        for few in (B[first : first + self._most] for first in range(0, len(B), self._most)):
            if self._n_rows + len(few) > self._most:
                self._end_chain()
            self._n_rows += len(few)
            blas.add_gram(few, self._chain)

    def sums(self) -> NDArray[np.float64]:
        """The lower triangle as :class:`GramPart` has it; nothing can be added any more."""
        if self._before is not None:
            self._end_chain()
        return blas.packed_sums(self._chain if self._before is None else self._before)

    def moments(self, first_row: int) -> None:
        """Nothing else is summed."""

    def _end_chain(self) -> None:
        if self._before is None:
            self._before, self._chain = self._chain, blas.no_sums(self._rank)
        else:
            self._before += self._chain
            self._chain.fill(0.0)
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


class BlockSums(Protocol):
    """What is summed of the rows B of a block; :class:`GramSum` is the plain one."""

    @property
    def height(self) -> int:
        """Additions that a term has gone through at most."""

    def add(self, B: NDArray, X: NDArray, start: int) -> None:
        """Add the rows B (m, r) of the rows X, of which the first is number ``start`` of its block."""

    def sums(self) -> NDArray[np.float64]:
        """The Gram matrix, or several, as :class:`GramPart` has them."""

    def moments(self, first_row: int) -> Any:
        """What else was summed of the block of rows from ``first_row`` on."""


@LEGAL_OVERFLOW
@blas.one_thread()
def gram_block(
    whitener: Whitener,
    pieces: Pieces,
    first_row: int,
    draws: dict[str, Draw] | None = None,
    sums: BlockSums | None = None,
) -> GramPart:
    """Pass 1 on one block (Algorithm, step 3): C → B → G += BᵀB, and the residual k_ii − ‖b_i‖².

    Without ``sums`` there are the residuals alone.

    Raises
    ------
    InvalidData
        NaN or infinity in the rows, or in their kernel values.
    """
    rank, dtype = len(whitener.inverse), whitener.inverse.dtype
    reader = BlockReader(pieces, first_row)
    residuals: list[NDArray] = [np.empty(0)]
    diagonals: list[NDArray] = [np.empty(0)]
    drawn: dict[str, Reservoir] = {}
    for piece in reader:
        diagonal, before = whitener.diagonal(piece), reader.n_rows - len(piece)
        tile_residuals = [np.empty(0)]
        with current().turn():
            for rows, _, C in kernel_tiles(whitener.columns, piece, rank, dtype):
                B, norms = blas.rows_and_norms(whitener.inverse, C)
                tile_residuals.append(diagonal[rows] - norms)
                if sums is not None:
                    sums.add(B, piece[rows], before + rows.start)
        residual = np.concatenate(tile_residuals)
        check_overflow(residual, first_row + before)
        _check_positive(residual, diagonal, whitener.residual_error, first_row + before)
        error = whitener.residual_error * diagonal
        drawn = _draw_on(drawn, draws or {}, piece, first_row + before, residual, error)
        residuals.append(residual)
        diagonals.append(diagonal)
    residual, diagonal = np.concatenate(residuals), np.concatenate(diagonals)
    gram = np.empty(0)
    if sums is not None:
        gram = sums.sums()
        check_overflow(gram[..., products.diagonal_places(rank)], first_row)
    totals = Totals(
        diagonal=float(diagonal.sum()),
        residual=float(np.maximum(residual, 0.0).sum()),
        largest=float(residual.max(initial=-np.inf)),
        smallest=float(residual.min(initial=np.inf)),
        height=0 if sums is None else sums.height,
    )
    kept = KeptResiduals(residual, np.array(reader.checksums, np.uint32))
    return GramPart(gram, (kept,), totals, drawn, None if sums is None else sums.moments(first_row))


@LEGAL_OVERFLOW
@blas.one_thread()
def whitened_rows(whitener: Whitener, X: NDArray) -> NDArray[np.float64]:
    """Rows of B (m, r) of a few rows X (m, d), as pass 1 computes them."""
    B = np.empty((len(X), len(whitener.inverse)))
    for rows, _, C in kernel_tiles(whitener.columns, X, B.shape[1], whitener.inverse.dtype):
        B[rows] = current().get(blas.multiply_rows(whitener.inverse, C))
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
