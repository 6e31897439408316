"""Frames that are made what a table was made before."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.tables.features import Features
from daskrr.tables.files import FrameTable
from daskrr.tables.frames import is_lazy_frame
from daskrr.tables.recipe import Recipe

ROWS_AT_ONCE = 2**16


def made_like(frame: Any, features: Features) -> Any:
    """The rows of a frame as features are that were made of a table.

    Rows that lack a value are refused, whatever was done then: nobody would know which prediction is whose.
    """
    if is_lazy_frame(frame):
        return frame.map_partitions(_encoded, features, meta=np.empty((0, len(features.names)))).compute_chunk_sizes()
    return _encoded(frame, features)


def _encoded(frame: Any, features: Features) -> NDArray[np.float64]:
    recipe = Recipe.from_record(features.recipe)
    if recipe.missing == "drop":
        recipe = replace(recipe, missing="refuse")
    recipe, table = replace(recipe, id=None, response=None), FrameTable(frame)
    recipe.check_names(table.names, "the table")
    start, found = 0, [np.empty((0, len(features.names)))]
    for batch in table.batches(ROWS_AT_ONCE, recipe.names):
        found.append(features.scaled(recipe.encode(batch, start).values))
        start += batch.num_rows
    return np.concatenate(found)
