"""What a regression sums in pass 1 besides the Gram matrix: products of rows with targets, fold by fold."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.errors import InvalidData
from daskrr.kernels.device import current
from daskrr.numerics import blas
from daskrr.numerics.pass1 import GramSum
from daskrr.numerics.reservoir import Order
from daskrr.numerics.tiles import check_finite
from daskrr.nystrom.factors import TileFactors
from daskrr.runtime.rows import Rows, pieces


@dataclass(frozen=True)
class Folds:
    """Rows in ``number`` parts, at random but by their number alone."""

    number: int
    order: Order


@dataclass(frozen=True)
class TargetRows:
    """What is to be predicted: y, one or several per row, about an origin (t,).

    With folds, the sums of each are kept apart. ``weighted`` rows carry the root of their weight.
    """

    rows: Rows
    origin: NDArray[np.float64]
    weighted: bool
    folds: Folds | None = None

    @property
    def begin(self) -> Callable[[TileFactors, int, Any], "TargetSums"]:
        """What makes the sums of a block where it is, of the factor of W, the block's first row and its targets."""
        return partial(_begin_sums, self.weighted, self.origin, self.folds)


def _begin_sums(
    weighted: bool, origin: NDArray[np.float64], folds: Folds | None, payload: TileFactors, start: int, source: Any
) -> "TargetSums":
    targets = Targets(read_targets(source, start) - origin, weighted, row_origin=payload.row_origin)
    if folds is not None:
        numbers = folds.order.folds(folds.number, start, len(targets.values))
        targets = replace(targets, n_folds=folds.number, folds=numbers)
    return TargetSums(len(payload.factors[0]), targets)


def read_targets(source: Any, start: int) -> NDArray[np.float64]:
    """Targets (m, t) of the block of rows from ``start`` on."""
    values = np.concatenate([np.asarray(piece, np.float64) for piece in pieces(source)])
    values = values.reshape(len(values), -1)
    check_finite(values, start, "y")
    return values


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

    def groups(self, start: int, size: int) -> list[NDArray[np.intp] | None]:
        """Which of ``size`` rows from ``start`` on are summed together; None stands for all."""
        if self.folds is None:
            return [None]
        folds = self.folds[start : start + size]
        return [np.flatnonzero(folds == number) for number in range(self.n_folds)]


@dataclass(frozen=True)
class Moments:
    """Sums for regression: Bᵀ[1, Y] (r, 1 + t) and [1, Y]ᵀ[1, Y] (1 + t, 1 + t); of every fold, if there are folds."""

    features: NDArray[np.float64]
    targets: NDArray[np.float64]

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(self.features + other.features, self.targets + other.targets)


class TargetSums:
    """Gram matrices and moments of rows with targets, of every fold, if there are folds."""

    def __init__(self, rank: int, targets: Targets) -> None:
        n_sums, n_columns = max(1, targets.n_folds), 1 + targets.values.shape[1]
        self._targets, self._grams = targets, [GramSum(rank) for _ in range(n_sums)]
        self._features = np.zeros((n_sums, rank, n_columns))
        self._products = np.zeros((n_sums, n_columns, n_columns))

    @property
    def height(self) -> int:
        """Additions that a term has gone through at most."""
        return max(one.height for one in self._grams)

    def add(self, B: NDArray, X: NDArray, start: int) -> None:
        """Add the rows B (m, r), which start at ``start`` in their block, to the sums of their folds."""
        T, device = self._targets.design(X, start), current()
        if self._targets.row_origin is not None:
            blas.add_outer(B, -T[:, 0], self._targets.row_origin)
        for number, chosen in enumerate(self._targets.groups(start, len(B))):
            b, t = B if chosen is None else B[device.put(chosen)], T if chosen is None else T[chosen]
            self._grams[number].add(b)
            # BLAS would first copy B in another order if that came first.
            self._features[number] += device.get(device.put(t).T @ b.astype(np.float64, copy=False)).T
            self._products[number] += t.T @ t

    def sums(self) -> NDArray[np.float64]:
        """Those of all rows, or of each fold."""
        found = [one.sums() for one in self._grams]
        return np.array(found) if self._targets.n_folds else found[0]

    def moments(self, first_row: int) -> Moments:
        """The sums of products with targets."""
        if not (np.isfinite(self._products).all() and np.isfinite(self._features).all()):
            raise InvalidData(f"sums of the targets of the block of rows from {first_row} overflow. Scale y down.")
        if self._targets.n_folds:
            return Moments(self._features, self._products)
        return Moments(self._features[0], self._products[0])
