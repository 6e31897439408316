"""Back from scores to the table: the values and identifiers of rows, and what sets them apart."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from daskrr.errors import InvalidData
from daskrr.kernels import Kernel
from daskrr.nystrom.factors import new_rows
from daskrr.nystrom.sketch import NystromSketch
from daskrr.storage.urls import locate
from daskrr.storage.zarr_input import POINTS, ROW_IDS, ROW_NUMBERS, open_zarr
from daskrr.tables.features import Features
from daskrr.tables.recipe import Recipe

# Landmarks that a row is compared with, and columns that are named at most, each with this share of the distance.
NEAREST, MOST_COLUMNS, LEAST_SHARE = 5, 3, 0.1


@dataclass(frozen=True)
class RowValues:
    """The rows of a store of points, as those who made it know them.

    Attributes
    ----------
    features
        What its columns are; names are positions where that is not recorded.
    numbers, ids
        (n,) of the rows in the table, and (n, w) bytes that identify them; None where they are not kept.
    """

    points: zarr.Array
    features: Features
    numbers: zarr.Array | None = None
    ids: zarr.Array | None = None

    @classmethod
    def at(cls, path: str | os.PathLike) -> "RowValues":
        """Those of a path or URL.

        Raises
        ------
        InvalidData
            There are no rows there.
        """
        place = locate(path)
        points = open_zarr(place)
        if points.ndim != 2:
            raise InvalidData(f"{place} has the shape {points.shape}, and rows of features are needed")
        known = Features.of(dict(points.attrs), points.shape[1], place)
        features = known or Features(tuple(str(number) for number in range(points.shape[1])))
        if points.path.rpartition("/")[2] != POINTS:
            return cls(points, features)
        return cls(points, features, _member(place, ROW_NUMBERS), _member(place, ROW_IDS))

    @property
    def dropped(self) -> int:
        """How many rows of the table are not among the points."""
        read = self.points.attrs.get("rows_read")
        return read - self.points.shape[0] if isinstance(read, int) else 0

    @cached_property
    def recipe(self) -> Recipe | None:
        """What became of the columns of the table, if there was one."""
        return None if self.features.recipe is None else Recipe.from_record(self.features.recipe)

    def table_rows(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of rows in the table."""
        return rows if self.numbers is None else _taken(self.numbers, rows)

    def identifiers(self, rows: NDArray[np.int64]) -> list[str] | None:
        """What identifies rows, if that is kept."""
        return None if self.ids is None else [_text(word) for word in _taken(self.ids, rows)]

    def columns(self, rows: NDArray[np.int64]) -> dict[str, list[Any]]:
        """The values of rows, by column."""
        decoded = [self.values_of(x) for x in _taken(self.points, rows).astype(np.float64)]
        return {name: [one[name] for one in decoded] for name in decoded[0]} if decoded else {}

    def of(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """``table_row``, ``id`` if there is one, and ``values`` by column, of every one of some rows."""
        values = [self.values_of(np.asarray(self.points[row], np.float64)) for row in rows]
        return [one | {"values": found} for one, found in zip(self.named(rows), values, strict=True)]

    def named(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """``table_row`` and, if there is one, ``id`` of every one of some rows."""
        places = np.asarray(rows, np.int64)
        ids, numbers = self.identifiers(places), self.table_rows(places).tolist()
        return [
            {"table_row": number} | ({} if ids is None else {"id": ids[place]}) for place, number in enumerate(numbers)
        ]

    def values_of(self, x: NDArray[np.float64]) -> dict[str, Any]:
        """What features (d,) were in the table."""
        plain, recipe = self.features.unscaled(x[None])[0], self.recipe
        if recipe is None:
            return dict(zip(self.features.names, plain.tolist(), strict=True))
        return recipe.decode(plain)

    def reasons(self, rows: Sequence[int], sketch: NystromSketch) -> list[list[dict[str, Any]]]:
        """Of every row, the columns in which it is farthest from the landmarks that are nearest to it.

        Each has the ``share`` of the squared distance that it makes up, the ``value`` of the row and the median, or
        the commonest value, of the ``nearest`` landmarks.
        """
        landmarks = sketch.algebra.fetch(new_rows).landmarks[:, : sketch.n_features]
        scale = length_scales(sketch.kernel, sketch.n_features)
        return [self._reason(np.asarray(self.points[row], np.float64), landmarks, scale) for row in rows]

    def _reason(
        self, x: NDArray[np.float64], landmarks: NDArray[np.float64], scale: NDArray[np.float64]
    ) -> list[dict[str, Any]]:
        squares = ((landmarks - x) / scale) ** 2
        distances = squares.sum(axis=1)
        # The row itself may be a landmark.
        others = np.flatnonzero(distances > 0)
        if not others.size:
            return []
        near = others[np.argsort(distances[others], kind="stable")[:NEAREST]]
        parts = self._by_column(squares[near].mean(axis=0))
        total = sum(parts.values())
        ranked = sorted(parts.items(), key=lambda one: -one[1])[:MOST_COLUMNS]
        mine, others_values = self.values_of(x), [self.values_of(landmarks[one]) for one in near]
        nearest = {name: _usual([one[name] for one in others_values]) for name in mine}
        return [
            {"column": name, "share": part / total, "value": mine[name], "nearest": nearest[name]}
            for name, part in ranked
            if part >= LEAST_SHARE * total and mine[name] != nearest[name]
        ]

    def _by_column(self, squares: NDArray[np.float64]) -> dict[str, float]:
        recipe = self.recipe
        if recipe is None:
            return dict(zip(self.features.names, squares.tolist(), strict=True))
        names = [column.name for column in recipe.columns for _ in column.features]
        found: dict[str, float] = dict.fromkeys(names, 0.0)
        for name, square in zip(names, squares.tolist(), strict=True):
            found[name] += square
        return found


def length_scales(kernel: Kernel, n_features: int) -> NDArray[np.float64]:
    """(d,) by which the kernel divides features; ones where it has no length scales."""
    found = getattr(kernel, "length_scale", None)
    return np.ones(n_features) if found is None else np.broadcast_to(np.asarray(found, np.float64), (n_features,))


def _usual(values: list[Any]) -> Any:
    """The median of numbers; of other values the commonest, the first of several."""
    if all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in values):
        return float(np.median(values))
    return Counter(values).most_common(1)[0][0]


def _taken(array: zarr.Array, rows: NDArray[np.int64]) -> NDArray[Any]:
    """Some rows of an array; a slice where they follow each other."""
    if len(rows) and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
        return np.asarray(array[int(rows[0]) : int(rows[-1]) + 1])
    return np.asarray(array.oindex[rows])


def _member(group: str, name: str) -> zarr.Array | None:
    try:
        return open_zarr(f"{group}/{name}")
    except InvalidData:
        return None


def _text(word: NDArray[np.uint8]) -> str:
    return word.tobytes().rstrip(b"\0").decode("utf-8", errors="replace")
