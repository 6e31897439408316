"""Tables in memory, or lazy: frames of pandas, polars, Arrow and Dask."""

import os
from typing import Any

FRAMES = ("pandas.", "polars.", "pyarrow.", "dask.", "dask_expr.")
LAZY = ("dask.", "dask_expr.")


def is_frame(X: Any) -> bool:
    """Whether something is a table of named columns; no package is loaded to find out."""
    return type(X).__name__ in ("DataFrame", "Table", "RecordBatch") and _module(X).startswith(FRAMES)


def column_names(frame: Any) -> list[str]:
    """Of a frame."""
    return [str(name) for name in getattr(frame, "column_names", None) or frame.columns]


def is_lazy_frame(X: Any) -> bool:
    """Whether it is a Dask DataFrame."""
    return type(X).__name__ == "DataFrame" and _module(X).startswith(LAZY)


def may_be_table(X: Any) -> bool:
    """Whether something may be a table that is not in memory: a Dask DataFrame, an Arrow data set, a path."""
    return is_lazy_frame(X) or isinstance(X, (str, os.PathLike)) or is_dataset(X)


def is_dataset(X: Any) -> bool:
    """Whether it is an Arrow data set."""
    return _module(X).startswith("pyarrow._dataset.")


def _module(X: Any) -> str:
    return f"{type(X).__module__}."
