"""Tables that are not in memory as lazy arrays: Dask DataFrames, Arrow data sets, and paths of Parquet files.

Arrow is loaded where it is needed: every worker imports this module.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
from numpy.typing import NDArray

from daskrr.errors import InvalidData
from daskrr.tables.frames import is_dataset, is_lazy_frame

ADVICE = "Choose columns of numbers, or convert the table (daskrr convert), which makes features of the others."


def lazy_table(X: Any, name: str) -> tuple[da.Array, list[str]] | None:
    """Values (n, d) of a table and the names of its columns; None of anything else.

    Rows are counted where Dask computes; nothing else is read.

    Raises
    ------
    InvalidData
        A column is not one of numbers, or the file cannot be read.
    """
    if is_lazy_frame(X):
        kinds = {str(column): kind if isinstance(kind, np.dtype) else None for column, kind in X.dtypes.items()}
        _check_kinds(kinds, {str(column): str(kind) for column, kind in X.dtypes.items()}, name)
        return X.to_dask_array(lengths=True), list(kinds)
    if isinstance(X, (str, os.PathLike)):
        place = os.fspath(X)
        if not is_parquet(place):
            return None
        X = _opened(place)
    return _of_dataset(X, name) if is_dataset(X) else None


def is_parquet(place: str) -> bool:
    """Whether a path is that of a Parquet file, or of a folder of such."""
    if "://" in place:
        return False
    path = Path(place)
    return path.suffix.lower() == ".parquet" or (
        path.is_dir() and not any((path / name).exists() for name in ("zarr.json", ".zarray", ".zgroup"))
        and any(path.glob("*.parquet"))
    )  # fmt: skip


def _opened(place: str) -> Any:
    import pyarrow.dataset

    try:
        return pyarrow.dataset.dataset(os.path.abspath(place), format="parquet")
    except (OSError, ValueError) as error:
        raise InvalidData(f"cannot read {place}: {error}") from None


def _of_dataset(table: Any, name: str) -> tuple[da.Array, list[str]]:
    kinds = {one.name: _numpy_kind(one.type) for one in table.schema}
    _check_kinds(kinds, {one.name: str(one.type) for one in table.schema}, name)
    dtype = np.result_type(*(kind for kind in kinds.values() if kind is not None))
    parts = [part for fragment in table.get_fragments() for part in _groups(fragment)]
    read = dask.delayed(_read, pure=True)
    blocks = [
        da.from_delayed(read(part, list(kinds), dtype), (_n_rows(part), len(kinds)), dtype=dtype) for part in parts
    ]
    if not blocks:
        raise InvalidData(f"{name} is a table of no files")
    return da.concatenate(blocks), list(kinds)


def _groups(fragment: Any) -> list[Any]:
    return list(fragment.split_by_row_group()) if hasattr(fragment, "split_by_row_group") else [fragment]


def _n_rows(fragment: Any) -> int:
    # A part of a file counts the rows of the whole.
    groups = getattr(fragment, "row_groups", None)
    return sum(group.num_rows for group in groups) if groups else fragment.count_rows()


def _read(fragment: Any, names: Sequence[str], dtype: Any) -> NDArray[Any]:
    return numbers_of(fragment.to_table(columns=list(names)), dtype, "the table")


def numbers_of(table: Any, dtype: Any, what: str) -> NDArray[Any]:
    """The columns of an Arrow table as an array (n, d).

    Raises
    ------
    InvalidData
        A value is missing.
    """
    found = np.empty((table.num_rows, table.num_columns), dtype)
    for place, name in enumerate(table.column_names):
        column = table.column(place)
        if column.null_count:
            raise InvalidData(f"{what}: {column.null_count} values of column {name!r} are missing. Drop or fill them.")
        found[:, place] = column.to_numpy()
    return found


def _numpy_kind(kind: Any) -> np.dtype | None:
    import pyarrow as pa

    if pa.types.is_boolean(kind):
        return np.dtype(bool)
    return np.dtype(kind.to_pandas_dtype()) if pa.types.is_integer(kind) or pa.types.is_floating(kind) else None


def _check_kinds(kinds: dict[str, np.dtype | None], words: dict[str, str], name: str) -> None:
    for column, kind in kinds.items():
        if kind is None or kind.kind not in "biuf":
            raise InvalidData(f"column {column!r} of {name} holds {words[column]}, not numbers. {ADVICE}")
