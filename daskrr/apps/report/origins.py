"""What the report says of the table behind the scores: the values of the highest rows, and what was done to columns."""

import os
from collections.abc import Sequence
from typing import Any

from daskrr.apps import table_text
from daskrr.apps.report import html
from daskrr.errors import DaskrrError
from daskrr.jobs.export import points_of
from daskrr.jobs.reader import ScoreStore
from daskrr.jobs.row_values import RowValues
from daskrr.nystrom.sketch import load_sketch
from daskrr.tables.recipe import Recipe

# Columns of the table that are shown at most.
MOST_COLUMNS = 12


def values_of_rows(path: str | os.PathLike, store: ScoreStore, rows: Sequence[int]) -> list[str]:
    """The values of rows and what sets them apart, where the points are still there."""
    try:
        points = points_of(store, None, needed=True)
        assert points is not None
        return [_values(points, rows), _reasons(points, rows, path)]
    except (DaskrrError, OSError):
        return []


def _values(points: RowValues, rows: Sequence[int]) -> str:
    found = points.of(rows)
    names = list(found[0]["values"])[:MOST_COLUMNS]
    left = len(found[0]["values"]) - len(names)
    differs = any(one["table_row"] != row for one, row in zip(found, rows, strict=True))
    heads = ["row", *(["row of the table"] * differs), *(["identifier"] if "id" in found[0] else []), *names]
    lines = [
        [str(row), *([str(one["table_row"])] * differs), *([one["id"]] if "id" in one else [])]
        + [_shown(one["values"][name]) for name in names]
        for row, one in zip(rows, found, strict=True)
    ]
    more = f"; {left} more columns are not shown" if left > 0 else ""
    return html.table(f"Their values{more}", heads, lines)


def _reasons(points: RowValues, rows: Sequence[int], path: str | os.PathLike) -> str:
    why = points.reasons(rows, load_sketch(path))
    lines = [(f"row {number}", table_text.reasons(one) or "–") for number, one in zip(rows, why, strict=True)]
    caption = "In what each is farthest from the landmarks that are nearest to it; in brackets its value, and theirs"
    return html.facts(caption, lines)


def treatment_of_columns(store: ScoreStore) -> list[str]:
    """What became of the columns of the table, if there was one."""
    recipe = (store.summary.get("features") or {}).get("recipe")
    if recipe is None:
        return []
    return [html.section("Columns", html.facts("What was made of the table", Recipe.from_record(recipe).describe()))]


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
