"""Weighted random orders of rows, of which the first few are kept while the rows stream by.

Every row gets the key E/w, with E an exponential random number that belongs to the row's number alone and w its weight.
The rows in ascending order of their keys are drawn without replacement, each time in proportion to the weights of those
left. The order depends on the seed and the weights, never on how rows are grouped or who looks at them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Order:
    """A random order of all rows: ``keys`` of any of them, given their weights."""

    seed: tuple[int, int]

    @classmethod
    def of(cls, sequence: np.random.SeedSequence) -> "Order":
        """The order that belongs to a seed."""
        first, second = sequence.generate_state(2, np.uint64)
        return cls((int(first), int(second)))

    def keys(self, weights: NDArray[np.float64], start: int) -> NDArray[np.float64]:
        """Keys of the rows from number ``start`` on; infinite where the weight is zero."""
        uniform = ((self._numbers(start, len(weights)) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        with np.errstate(divide="ignore", over="ignore"):
            return np.where(weights > 0, -np.log1p(-uniform) / weights, np.inf)

    def folds(self, n_folds: int, start: int, size: int) -> NDArray[np.int64]:
        """In which of ``n_folds`` parts each of ``size`` rows from number ``start`` on is."""
        return (self._numbers(start, size) % np.uint64(n_folds)).astype(np.int64)

    def _numbers(self, start: int, size: int) -> NDArray[np.uint64]:
        """A random number that belongs to each row."""
        generator = np.random.Philox(key=np.array(self.seed, np.uint64))
        generator.advance(start // 4)  # one step of the counter makes four numbers
        return generator.random_raw(start % 4 + size)[start % 4 :]


@dataclass(frozen=True)
class Reservoir:
    """The rows that come first in an order, ascending by key.

    Attributes
    ----------
    size
        How many are kept at most.
    keys, rows, weights
        (k,) keys, row numbers and weights.
    X
        (k, d) the rows themselves, in the dtype that they came in.
    total
        Sum of the weights of all rows seen, kept or not.
    """

    size: int
    keys: NDArray[np.float64]
    rows: NDArray[np.int64]
    weights: NDArray[np.float64]
    X: NDArray
    total: float

    @classmethod
    def of(cls, order: Order, size: int, weights: NDArray[np.float64], start: int, X: NDArray) -> "Reservoir":
        """The first of the rows X (m, d), which are numbered from ``start``."""
        keys = order.keys(weights, start)
        first = np.flatnonzero(keys < np.inf)
        if len(first) > size:
            first = first[np.argpartition(keys[first], size - 1)[:size]] if size else first[:0]
        first = first[np.argsort(keys[first], kind="stable")]
        return cls(size, keys[first], start + first, weights[first], X[first], float(weights.sum()))

    def __len__(self) -> int:
        return len(self.keys)

    def __sizeof__(self) -> int:
        return self.X.nbytes + 24 * len(self.keys)

    def candidates(self) -> tuple["Reservoir", NDArray[np.float64]]:
        """All rows but the last, and how many rows of the data each stands for.

        Given the last key, each of the others is there with a probability that its weight decides, independently; the
        inverse of that is what it stands for. A reservoir that holds every row keeps its last one.
        """
        if len(self) < self.size:
            return self, np.ones(len(self))
        found = replace(
            self, keys=self.keys[:-1], rows=self.rows[:-1], weights=self.weights[:-1], X=self.X[:-1]
        )  # fmt: skip
        return found, -1.0 / np.expm1(-found.weights * self.keys[-1])

    def draw(self, size: int, generator: np.random.Generator) -> NDArray[np.intp]:
        """Positions of ``size`` ≤ self.size draws with replacement, in proportion to the weights of all rows seen.

        Rows that appear for the first time do so in the order without replacement, so that each draw either repeats
        one of those seen, with the share that they have of the total weight, or takes the next of the order.
        """
        if not len(self):
            return np.empty(0, np.intp)
        ends = np.cumsum(self.weights)
        complete = len(self) < self.size
        total = ends[-1] if complete else max(self.total, ends[-1])
        drawn = np.empty(size, np.intp)
        seen = 0
        for i, where in enumerate(total * generator.random(size)):
            if seen < len(self) and (seen == 0 or where >= ends[seen - 1]):
                drawn[i] = seen
                seen += 1
            else:
                drawn[i] = min(np.searchsorted(ends[:seen], where, side="right"), seen - 1)
        return drawn


def merge(parts: Sequence[Reservoir]) -> Reservoir:
    """The first rows of several reservoirs of one order."""
    keys = np.concatenate([part.keys for part in parts])
    first = np.argsort(keys, kind="stable")[: parts[0].size]
    return Reservoir(
        parts[0].size,
        keys[first],
        np.concatenate([part.rows for part in parts])[first],
        np.concatenate([part.weights for part in parts])[first],
        _rows_of(parts, first),
        sum(part.total for part in parts),
    )


def _rows_of(parts: Sequence[Reservoir], positions: NDArray[np.intp]) -> NDArray:
    """The rows at some positions of all parts one after another, which are never brought together: rows may be wide."""
    rows = np.empty((len(positions), parts[0].X.shape[1]), parts[0].X.dtype)
    start = 0
    for part in parts:
        here = np.flatnonzero((positions >= start) & (positions < start + len(part)))
        rows[here] = part.X[positions[here] - start]
        start += len(part)
    return rows
