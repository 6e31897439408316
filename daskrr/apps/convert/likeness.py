"""What was done to the columns of data that something was made of, and tables that are brought into the same form."""

import os
from pathlib import Path
from typing import Any

from daskrr.apps.convert import convert, features_of
from daskrr.errors import DaskrrError, InvalidData, OutputExists
from daskrr.nystrom.sketch import load_sketch
from daskrr.regression.persistence import MODEL, read_model
from daskrr.storage.saving import kind_of
from daskrr.storage.urls import redact
from daskrr.storage.zarr_input import open_zarr
from daskrr.tables.features import Features
from daskrr.tables.files import is_table


def features_at(path: str | os.PathLike[str]) -> Features:
    """Those of a store of rows, of scores, a sketch or a model.

    Raises
    ------
    InvalidData
        Nothing there says what was done to columns.
    """
    try:
        return features_of(path)
    except InvalidData as error:
        found = _features_of_fitted(path)
        if found is None:
            raise InvalidData(f"{redact(os.fspath(path))} has no record of the columns that it was made of") from error
        return found


def _features_of_fitted(path: str | os.PathLike[str]) -> Features | None:
    try:
        if kind_of(path) != MODEL:
            return load_sketch(path).features
        _, saved = read_model(path, ())
        return Features.of(saved["features"] or {}, saved["n_features"], "the model")
    except DaskrrError:
        return None


def stem(path: str | os.PathLike[str]) -> str:
    """What files that belong to a table or a store are named after."""
    name = Path(path).name
    return name.partition(".")[0] or name


def is_a_table(points: str) -> bool:
    """Whether points are a table of cells, which has to be converted first."""
    return "://" not in points and is_table(Path(points))


def stored_points(
    table: str,
    output: str,
    *,
    like: Features | None = None,
    overwrite: bool = False,
    progress: bool = True,
    **options: Any,
) -> str:
    """The store of the rows of a table, NAME.points.zarr beside an output: made, made longer by new files, or as it is.

    Raises
    ------
    OutputExists
        It is there and was made otherwise, or by somebody else: what is not ours is not replaced.
    SourceChanged
        A file that it was made of has changed.
    """
    beside = Path(table.rstrip("/")) if "://" in output else Path(output)
    target = beside.with_name(f"{stem(table.rstrip('/'))}.points.zarr")
    given = {name: value for name, value in options.items() if value is not None}
    like = None if like is None else like.without_response()
    wanted = {"standardize": like is None} | given
    asked = open_zarr(str(target)).attrs.get("asked") if target.exists() else None
    if target.exists() and asked is None:
        raise OutputExists(f"{target} is where the rows of {table} go, and was not made of a table: move it elsewhere")
    if overwrite or asked is None:
        convert(table, target, like=like, overwrite=overwrite, progress=progress, **wanted)
        return str(target)
    if asked != wanted | ({} if like is None else {"like": like.to_attributes()}):
        raise OutputExists(
            f"{target} was made of a table with other options: remove it, or pass --overwrite to replace it"
        )
    convert(table, target, append=True, progress=progress)
    return str(target)
