"""Tables as those who read them see them: named columns, rows in blocks, and values to check and to scale."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.errors import InvalidData, InvalidParameter

Columns = Sequence[str | int] | None


class Table(ABC):
    """A table that can be read more than once.

    Attributes
    ----------
    names
        Of the columns that are kept, in their order.
    dtype
        Of the values.
    expected_rows
        Number of rows, estimated from the lines where the table is text.
    """

    names: list[str]
    dtype: np.dtype[Any]
    expected_rows: int

    def __init__(self, path: Path) -> None:
        self._path = path

    def blocks(self, rows: int) -> Iterator[NDArray[Any]]:
        """Yield the kept columns from the first row on, in blocks of exactly ``rows`` rows, the last one excepted."""
        held: list[NDArray[Any]] = []
        count = 0
        for block in self._read(rows):
            held.append(block)
            count += len(block)
            if count >= rows:
                joined = np.concatenate(held) if len(held) > 1 else block
                cut = count - count % rows
                yield from (joined[start : start + rows] for start in range(0, cut, rows))
                held, count = [joined[cut:]], count - cut
        if count:
            yield np.concatenate(held)

    @abstractmethod
    def _read(self, rows: int) -> Iterator[NDArray[Any]]:
        """Yield the kept columns in blocks of any length, best at most ``rows``."""

    def _keep(self, columns: Columns, names: list[str]) -> list[int]:
        """Positions of the wanted columns among all; sets ``names``."""
        positions = select(columns, names)
        self.names = [names[index] for index in positions]
        return positions


def select(columns: Columns, names: list[str]) -> list[int]:
    """Find the positions of the wanted columns.

    Parameters
    ----------
    columns
        Names or zero-based positions. Text that is no name but a number is a position. None means all.
    names
        Of the columns there are.

    Examples
    --------
    >>> select(["b", 0], ["a", "b", "c"])
    [1, 0]
    """
    if columns is None:
        return list(range(len(names)))
    positions = [_position(column, names) for column in columns]
    if not positions or len(set(positions)) < len(positions):
        raise InvalidParameter(f"the columns {list(columns)} must be at least one, and each only once")
    return positions


def _position(column: str | int, names: list[str]) -> int:
    if isinstance(column, str) and column in names:
        if names.count(column) > 1:
            raise InvalidParameter(f"several columns are called {column!r}: give the position instead")
        return names.index(column)
    text = str(column)
    if text.isdecimal() and int(text) < len(names):
        return int(text)
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    raise InvalidParameter(f"there is no column {column!r} among the {len(names)} columns {shown}")


class Scaling:
    """Mean and standard deviation of every column, gathered block by block."""

    def __init__(self, names: list[str]) -> None:
        width = len(names)
        self._names = names
        self.rows = 0
        self.mean = np.zeros(width)
        self._squares = np.zeros(width)
        self._low = np.full(width, np.inf)
        self._high = np.full(width, -np.inf)

    def add(self, block: NDArray[Any]) -> None:
        """Take in more rows."""
        values = block.astype(np.float64)
        total = self.rows + len(values)
        with np.errstate(over="ignore", invalid="ignore"):
            mean = values.mean(axis=0)
            step = mean - self.mean
            between = step**2 * (self.rows * len(values) / total)
            self._squares += ((values - mean) ** 2).sum(axis=0) + between
            self.mean += step * (len(values) / total)
        self.rows = total
        self._low = np.minimum(self._low, values.min(axis=0))
        self._high = np.maximum(self._high, values.max(axis=0))

    def finish(self) -> None:
        """Check the result once all rows are in."""
        # The mean of equal numbers need not be that number in floating point.
        self.mean = np.where(self._constant, self._low, self.mean)
        bad = np.flatnonzero(~np.isfinite(self.std) | ~np.isfinite(self.mean))
        if bad.size:
            raise InvalidData(f"cannot standardize column {self._names[bad[0]]!r}: its spread overflows float64")

    def apply(self, block: NDArray[Any]) -> NDArray[np.float64]:
        """Standardize rows."""
        std = self.std
        return (block.astype(np.float64) - self.mean) / np.where(std > 0, std, 1.0)

    def attributes(self) -> dict[str, list[Any]]:
        """What a standardized array has to say about its columns."""
        return {"mean": self.mean.tolist(), "std": self.std.tolist(), "constant_columns": self.constant_columns}

    @property
    def std(self) -> NDArray[np.float64]:
        """Population standard deviation of every column."""
        return np.where(self._constant, 0.0, np.sqrt(self._squares / self.rows))

    @property
    def constant_columns(self) -> list[str]:
        """Names of the columns that hold a single value."""
        return [self._names[index] for index in np.flatnonzero(self._constant)]

    @property
    def _constant(self) -> NDArray[np.bool_]:
        return self._low == self._high


def require_finite(block: NDArray[Any], start: int, names: list[str], note: str = "") -> None:
    """Raise :class:`~daskrr.errors.InvalidData` about the first value of the rows from ``start`` that is not finite."""
    if block.dtype.kind != "f":
        return
    bad = np.argwhere(~np.isfinite(block))
    if len(bad):
        row, column = bad[0]
        raise InvalidData(
            f"row {start + row}, column {names[column]!r} is {block[row, column]}{note}: "
            "every value must be a finite number; remove or fill the row first"
        )
