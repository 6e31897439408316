"""Tables as those who write arrays of them see them: named features, rows in blocks, values to check and to scale."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.errors import InvalidData
from daskrr.runtime.progress import Reporter, Stage
from daskrr.tables.features import Features
from daskrr.tables.files import Tabular
from daskrr.tables.recipe import Encoded, Recipe, learn, select
from daskrr.tables.survey import TableOptions

Columns = Sequence[str | int] | None
# Rows that are looked at together, before it is known what becomes of them.
SURVEY_ROWS = 2**16


class Table(ABC):
    """A table that can be read more than once.

    Attributes
    ----------
    names
        Of the features, in their order.
    units
        What features are divided by where they are standardized, instead of what is measured; None to measure.
    dtype
        Of the values.
    expected_rows
        Number of rows, estimated from the lines where the table is text.
    files
        What it is read from.
    recipe
        What becomes of cells that are not all numbers.
    rows_read
        How many rows of the source the blocks so far were made of, with those that were dropped.
    """

    names: list[str]
    units: list[float | None]
    dtype: np.dtype[Any]
    expected_rows: int
    files: Sequence[Path]
    recipe: Recipe | None = None
    rows_read: int = 0

    def blocks(self, rows: int) -> Iterator[Encoded]:
        """Yield the features from the first row on, in blocks of exactly ``rows`` rows, the last one excepted."""
        held: list[Encoded] = []
        count = 0
        for block in self._read(rows):
            held.append(block)
            count += len(block.values)
            if count >= rows:
                joined = _joined(held)
                cut = count - count % rows
                yield from (_part(joined, start, start + rows) for start in range(0, cut, rows))
                held, count = [_part(joined, cut, count)], count - cut
        if count:
            yield _joined(held)

    @abstractmethod
    def _read(self, rows: int) -> Iterator[Encoded]:
        """Yield the features in blocks of any length, best at most ``rows``."""


def _joined(parts: list[Encoded]) -> Encoded:
    if len(parts) == 1:
        return parts[0]
    ids = None if parts[0].ids is None else [one for part in parts for one in part.ids or ()]
    values, rows = (np.concatenate([getattr(one, name) for one in parts]) for name in ("values", "rows"))
    targets = [one.targets for one in parts if one.targets is not None]
    return Encoded(values, rows, ids, np.concatenate(targets) if targets else None)


def _part(block: Encoded, start: int, stop: int) -> Encoded:
    ids = None if block.ids is None else block.ids[start:stop]
    targets = None if block.targets is None else block.targets[start:stop]
    return Encoded(block.values[start:stop], block.rows[start:stop], ids, targets)


class ArrayTable(Table):
    """Numbers alone, whose columns have no names but their positions."""

    def __init__(self, path: Path, dtype: np.dtype[Any], shape: tuple[int, int], columns: Columns) -> None:
        self.files, self.dtype, self.expected_rows = [path], dtype, shape[0]
        names = [str(index) for index in range(shape[1])]
        positions = select(columns, names)
        self.names, self.units = [names[index] for index in positions], [None] * len(positions)
        # A view where all columns are kept, since a list would copy every block.
        self._cut = slice(None) if columns is None else positions

    def _read(self, rows: int) -> Iterator[Encoded]:
        self.rows_read = 0
        for block in self._arrays(rows):
            start, self.rows_read = self.rows_read, self.rows_read + len(block)
            yield Encoded(block[:, self._cut], np.arange(start, self.rows_read))

    @abstractmethod
    def _arrays(self, rows: int) -> Iterator[NDArray[Any]]:
        """Yield all columns in blocks of any length."""


class CellTable(Table):
    """Cells of any kind, by a recipe."""

    def __init__(self, cells: Tabular, recipe: Recipe, what: str) -> None:
        recipe.check_names(cells.names, what)
        self._cells, self.recipe = cells, recipe
        self.names, self.units, self.dtype = recipe.features, recipe.units, recipe.dtype
        self.expected_rows, self.files = cells.expected_rows, cells.files

    @classmethod
    def learned(
        cls, cells: Tabular, reading: TableOptions, what: str, report: Reporter
    ) -> tuple["CellTable", dict[str, int]]:
        """The table by a recipe of its own, and how many values every column lacks that is kept."""
        with Stage(report, "look at columns", *sized(cells.expected_rows, SURVEY_ROWS)) as stage:
            recipe, lacking = learn(_watched(cells.batches(SURVEY_ROWS), stage), cells.names, reading)
        return cls(cells, recipe, what), lacking

    def _read(self, rows: int) -> Iterator[Encoded]:
        assert self.recipe is not None
        self.rows_read = 0
        for batch in self._cells.batches(min(rows, SURVEY_ROWS), self.recipe.names):
            start, self.rows_read = self.rows_read, self.rows_read + batch.num_rows
            yield self.recipe.encode(batch, start)


def _watched(batches: Iterator[Any], stage: Stage) -> Iterator[Any]:
    for batch in batches:
        yield batch
        stage.advance(rows=batch.num_rows)


def sized(n_rows: int, height: int) -> tuple[int, int]:
    """How many blocks and rows there are, for who watches."""
    return math.ceil(n_rows / height), n_rows


class Scaling:
    """Mean and standard deviation of every feature, gathered block by block."""

    def __init__(self, names: list[str], units: list[float | None]) -> None:
        width = len(names)
        self._names, self._units = names, units
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

    def features(self, recipe: Recipe | None) -> Features:
        """The features of these rows, all of which are in.

        Raises
        ------
        InvalidData
            A spread overflows.
        """
        # The mean of equal numbers need not be that number in floating point.
        mean = np.where(self._constant, self._low, self.mean)
        std = np.where(self._constant, 0.0, np.sqrt(self._squares / max(self.rows, 1)))
        bad = np.flatnonzero(~np.isfinite(std) | ~np.isfinite(mean))
        if bad.size:
            raise InvalidData(f"cannot standardize column {self._names[bad[0]]!r}: its spread overflows float64")
        for place, unit in enumerate(self._units):
            if unit is not None:
                mean[place], std[place] = 0.0, unit
        record = None if recipe is None else recipe.to_record()
        return Features(tuple(self._names), tuple(mean.tolist()), tuple(std.tolist()), record)

    @property
    def constant_columns(self) -> list[str]:
        """Names of the columns that hold a single value."""
        return [self._names[index] for index in np.flatnonzero(self._constant) if self._units[index] is None]

    @property
    def _constant(self) -> NDArray[np.bool_]:
        return self._low == self._high


def require_finite(block: NDArray[Any], rows: NDArray[np.int64], names: Sequence[str], note: str = "") -> None:
    """Raise :class:`~daskrr.errors.InvalidData` about the first value that is not finite, by the number of its row."""
    if block.dtype.kind != "f":
        return
    bad = np.argwhere(~np.isfinite(block))
    if len(bad):
        row, column = bad[0]
        raise InvalidData(
            f"row {rows[row]}, column {names[column]!r} is {block[row, column]}{note}: "
            "every value must be a finite number; remove or fill the row first"
        )
