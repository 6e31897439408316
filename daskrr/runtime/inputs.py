"""What may be passed as rows: told from what would be pulled into memory unasked, or lose something."""

import os
from typing import Any

import dask.array as da
import numpy as np
import zarr
from dask.array.utils import meta_from_array
from numpy.typing import NDArray

from daskrr.errors import InvalidData
from daskrr.storage.zarr_input import check_opened

# Modules of matrices that store only some of their values.
SPARSE = ("scipy.sparse", "sparse", "cupyx.scipy.sparse")

# What arrays have that are not in memory, and that NumPy would read as a whole at once.
LAZY_MARKS = ("chunks", "chunking", "chunk_layout", "__dask_graph__", "compute", "collect")


def readable(X: Any, name: str) -> Any:
    """``X`` as it is, or the Dask array inside it, once it is known that nothing of it would be lost or pulled in here.

    A masked array without masked values is accepted.

    Raises
    ------
    InvalidData
        It is sparse, masks values, is lazy in a way that cannot be read in pieces, or is stored by codecs that are not
        read.
    """
    what = f"{type(X).__module__}.{type(X).__qualname__}"
    if isinstance(X, da.Array):
        inside = type(meta_from_array(X))
        if inside is not np.ndarray:
            raise InvalidData(
                f"{name} is a Dask array of {inside.__module__}.{inside.__qualname__}, and only chunks that are plain "
                "NumPy arrays are read. Map its blocks to dense arrays; fill masked values with dask.array.ma.filled."
            )
    elif isinstance(X, zarr.Array):
        check_opened(X, name)
    elif isinstance(X, (zarr.Group, str, os.PathLike)):
        pass
    elif isinstance(X, np.ma.MaskedArray) and np.ma.is_masked(X):
        raise InvalidData(
            f"{name} is a masked array, and {np.ma.count_masked(X)} of its {X.size} values are masked; a mask is never "
            "ignored. Drop the rows with masked values, or fill them: X.filled(value)."
        )
    elif what.startswith(tuple(f"{module}." for module in SPARSE)):
        raise InvalidData(
            f"{name} is sparse ({what}), which is not supported. Pass a dense array, such as X.toarray()."
        )
    elif what.startswith("xarray.") and isinstance(getattr(X, "chunks", None), tuple) and X.chunks:
        return readable(X.data, name)
    elif what.startswith("xarray.") or any(hasattr(type(X), mark) for mark in LAZY_MARKS):
        raise InvalidData(
            f"{name} is a {what}, all of which would be read into this process. Pass a Dask array: "
            "X.to_dask_array(lengths=True) of a Dask Series, X.chunk() of an xarray.DataArray, "
            "dask.array.from_array(X) of other arrays; or numpy.asarray(X) if it is small."
        )
    return X


def as_array(X: Any, name: str) -> NDArray:
    """What is in memory, as NumPy has it."""
    try:
        return np.asarray(X.to_pandas() if type(X).__module__.startswith("pyarrow.") else X)
    except ValueError as error:
        raise InvalidData(
            f"{name} cannot be made an array: {error}. Give every row the same number of features."
        ) from None
