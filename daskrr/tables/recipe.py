"""A recipe: what became of every column of a table, so that the same can be done to other rows."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from daskrr.errors import InvalidData, InvalidParameter
from daskrr.tables import cells
from daskrr.tables.columns import Column, Number, from_record
from daskrr.tables.survey import Looked, TableOptions, look

# Columns that a message names at most.
MOST_NAMES = 12


@dataclass(frozen=True)
class Encoded:
    """Rows of a table as features (m, d), their numbers in the table (m,), what identifies them and their targets."""

    values: NDArray[Any]
    rows: NDArray[np.int64]
    ids: list[str] | None = None
    targets: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class Recipe:
    """Columns in the order of their features, why others are left out, and what is done where values are missing."""

    columns: tuple[Column, ...]
    left_out: Mapping[str, str]
    missing: str
    id: str | None = None
    response: str | None = None

    @property
    def features(self) -> list[str]:
        """Names of all features."""
        return [name for column in self.columns for name in column.features]

    @property
    def units(self) -> list[float | None]:
        """(d,) what features are divided by where the table is standardized; None to measure it."""
        return [column.unit for column in self.columns for _ in column.features]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the features."""
        return np.result_type(*(column.dtype for column in self.columns))

    @property
    def names(self) -> list[str]:
        """Of the columns of the table that are read."""
        return [column.name for column in self.columns] + [one for one in (self.id, self.response) if one is not None]

    @property
    def keeps_more(self) -> bool:
        """Whether something is kept beside the features, or rows are left out."""
        return self.id is not None or self.response is not None or self.missing == "drop"

    def check_names(self, names: Sequence[str], what: str) -> None:
        """Refuse a table that lacks a column.

        Raises
        ------
        InvalidData
            With its name.
        """
        lacking = [name for name in self.names if name not in names]
        if lacking:
            raise InvalidData(
                f"{what} has no column {', '.join(map(repr, lacking[:MOST_NAMES]))}, and was to be read as "
                f"{', '.join(map(repr, self.names[:MOST_NAMES]))}; its columns are "
                f"{', '.join(map(repr, list(names)[:MOST_NAMES]))}."
            )

    def encode(self, batch: Any, start: int) -> Encoded:
        """The rows of a record batch, whose first is row ``start`` of the table, without those that are dropped."""
        encoded = [self._encode_column(column, batch.column(column.name), start) for column in self.columns]
        values = np.empty((batch.num_rows, len(self.features)), np.result_type(*(found.dtype for found, _ in encoded)))
        gaps = np.zeros(batch.num_rows, bool)
        first = 0
        for column, (found, missing) in zip(self.columns, encoded, strict=True):
            width = len(column.features)
            values[:, first : first + width] = found.reshape(-1, width)
            gaps |= missing
            first += width
        targets = None
        if self.response is not None:
            targets, missing = self._encode_column(Number(self.response), batch.column(self.response), start)
            gaps |= missing
        kept = np.flatnonzero(~gaps)
        ids = None if self.id is None else identifiers(batch.column(self.id).take(pa.array(kept)))
        targets = None if targets is None else targets[kept]
        return Encoded(values if len(kept) == len(values) else values[kept], start + kept, ids, targets)

    def _encode_column(self, column: Column, given: Any, start: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        if pa.types.is_null(given.type):
            given = given.cast(pa.string())
        try:
            found, missing = column.encode(given)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise InvalidData(
                f"rows {start}–{start + len(given) - 1}, column {column.name!r} was to be read as "
                f"{column.describe()}: {error}"
            ) from None
        if self.missing != "drop" and missing.any():
            row = start + int(np.argmax(missing))
            raise InvalidData(f"row {row}, column {column.name!r} has no value; {missing_advice(self.missing)}")
        return found, missing

    def decode(self, features: NDArray[np.float64]) -> dict[str, Any]:
        """The values of a row of features (d,), as they were before they were scaled."""
        found, first = {}, 0
        for column in self.columns:
            width = len(column.features)
            found[column.name] = column.decode(features[first : first + width])
            first += width
        return found

    def describe(self) -> list[tuple[str, str]]:
        """Every column, and what is done to it."""
        kept = [(column.name, column.describe()) for column in self.columns]
        return [*kept, *((name, f"left out: {why}") for name, why in self.left_out.items())]

    def to_record(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "columns": [column.to_record() for column in self.columns],
            "left_out": dict(self.left_out),
            "missing": self.missing,
            "id": self.id,
            "response": self.response,
        }

    @classmethod
    def from_record(cls, record: Any) -> "Recipe":
        """What :meth:`to_record` made.

        Raises
        ------
        InvalidData
            It made something else.
        """
        try:
            columns = tuple(map(from_record, record["columns"]))
            return cls(columns, dict(record["left_out"]), str(record["missing"]), record["id"], record["response"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidData(f"the record of the columns of a table is damaged: {error!r}") from None


def identifiers(column: Any) -> list[str]:
    """What tells rows apart, as text; empty where there is nothing."""
    words = column.cast(pa.string()) if not cells.is_text(column.type) else column
    return ["" if word is None else str(word) for word in words.to_pylist()]


def missing_advice(missing: str) -> str:
    """What can be done about values that are missing."""
    known = "" if missing == "refuse" else "the column had none missing when it was measured; "
    return (
        f"{known}drop such rows (--missing drop), take the mean or median of the column (--missing mean, --missing "
        "median), or leave the column out (--columns)."
    )


def learn(batches: Iterator[Any], names: Sequence[str], reading: TableOptions) -> tuple[Recipe, dict[str, int]]:
    """The recipe of a table of such columns, and how many values each column that is kept lacks.

    Raises
    ------
    InvalidData
        There are no rows, no columns to keep, or values are missing and were to be refused; all of them are counted.
    """
    asked = _asked(names, reading)
    found = look(batches, asked, reading.columns is not None)
    if not found or not next(iter(found.values())).rows:
        raise InvalidData("the source has no rows")
    decided = {name: one.decided(reading) for name, one in found.items()}
    if reading.prunes:
        decided |= _repeats(found, decided)
    columns = tuple(one for one in decided.values() if isinstance(one, Column))
    left_out = {name: why for name, why in decided.items() if isinstance(why, str)}
    if not columns or (reading.columns is not None and left_out):
        told = "; ".join(f"{name!r}: {why}" for name, why in list(left_out.items())[:MOST_NAMES])
        raise InvalidData(f"no features can be made of the columns {told}. Choose others (--columns).")
    lacking = {column.name: found[column.name].missing for column in columns if found[column.name].missing}
    if lacking and reading.missing == "refuse":
        n_rows = next(iter(found.values())).rows
        told = ", ".join(f"{name!r} ({count})" for name, count in list(lacking.items())[:MOST_NAMES])
        raise InvalidData(
            f"values are missing in {len(lacking)} of {len(columns)} columns of {n_rows} rows: {told}; "
            f"{missing_advice('refuse')}"
        )
    return Recipe(columns, left_out, reading.missing, reading.id, reading.response), lacking


def _asked(names: Sequence[str], reading: TableOptions) -> list[str]:
    """Names of the columns to look at."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    asked = [names[place] for place in select(reading.columns, list(names))]
    for name, use in ((reading.id, "to identify rows by"), (reading.response, "to predict")):
        if name is not None and name not in names:
            raise InvalidParameter(f"there is no column {name!r} {use}, only {', '.join(names[:20])}")
    if reading.response is not None and reading.columns is not None and reading.response in asked:
        raise InvalidParameter(f"the column {reading.response!r} is to be predicted, so that it is no feature")
    beside = {reading.id, reading.response}
    for name in twice:
        if name in asked or name in beside:
            raise InvalidParameter(f"several columns are called {name!r}: rename them")
    return asked if reading.columns is not None else [name for name in asked if name not in beside]


def select(columns: Sequence[str | int] | None, names: list[str]) -> list[int]:
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


def _repeats(found: Mapping[str, Looked], decided: Mapping[str, Column | str]) -> dict[str, str]:
    """Columns that are left out since another one is the same."""
    seen: dict[Any, str] = {}
    repeats = {}
    for name, column in decided.items():
        if isinstance(column, Column):
            mark = found[name].digest, str(found[name].kind)
            if mark in seen:
                repeats[name] = f"it is the same as {seen[mark]!r}"
            seen.setdefault(mark, name)
    return repeats
