"""One view of the input over NumPy arrays, Dask arrays, Zarr arrays and their paths or URLs.

A :class:`Rows` knows its shape and dtype, in which multiples of rows it is best read, and hands out the *source* of
a block: a small object that becomes the block's rows on the worker (see :func:`pieces`). Nothing is read before.
"""

import dataclasses
import math
import os
import pickle
import uuid
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import dask.array as da
import distributed
import numpy as np
import zarr
from dask._task_spec import convert_legacy_graph  # not public; tests hold it
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph
from numpy.typing import NDArray
from zarr.storage import MemoryStore, StorePath

from daskrr.errors import InvalidData, InvalidParameter, SourceUnreachable
from daskrr.runtime.inputs import as_array, readable
from daskrr.runtime.lazy_tables import lazy_table
from daskrr.runtime.sealing import seal, sealed_task, unseal
from daskrr.storage.pieces import KeptPieces
from daskrr.storage.retry import patiently
from daskrr.storage.urls import locate, redact
from daskrr.storage.zarr_input import (
    PackedBlock,
    ZarrBlock,
    absolute,
    open_stored,
    open_zarr,
    piece_rows,
    refuse_missing_chunks,
    unit_rows,
)
from daskrr.tables.features import Features
from daskrr.tables.frames import column_names, is_frame, may_be_table


class Rows:
    """A two-dimensional array of rows that may be larger than memory.

    Attributes
    ----------
    shape
        (n_rows, n_features).
    dtype
        As stored; values are brought to float64 before any sum.
    unit_rows
        Rows of the chunks that it is stored in (1: no preference).
    origin
        What it is and where it comes from, for messages.
    features
        What its columns are, where that is known.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    unit_rows: int
    origin: str
    features: Features | None = None

    def piece_rows(self, height: int) -> int:
        """How many rows of a block of ``height`` rows are in memory at a time."""
        return height

    def source(self, start: int, stop: int) -> Any:
        """What a task needs to read the rows from ``start`` to ``stop``; see :func:`pieces`."""
        raise TypeError(f"{type(self).__name__} has no source")  # pragma: no cover

    def anew(self, purpose: str) -> "Rows":
        """The same rows for one more reading, named by its purpose."""
        return self

    @property
    def in_memory(self) -> bool:
        """Whether the rows are in the memory of this process."""
        return False

    @property
    def is_stored(self) -> bool:
        """Whether a task reads the rows itself, a piece at a time."""
        return False

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, decoded."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, decoded."""
        return self.n_rows * self.row_bytes


def viewed(X: Any, name: str) -> Any:
    """Rows of a table that is not in memory; anything else as :func:`daskrr.runtime.inputs.readable` has it."""
    if isinstance(X, Rows):
        return X
    found = lazy_table(X, name) if may_be_table(X) else None
    if found is None:
        return readable(X, name)
    rows = DaskRows(found[0])
    rows.features = Features(tuple(found[1]))
    return rows


def open_rows(X: Any, *, ndim: int | None = 2, missing_chunks: str = "refuse", name: str = "X") -> Rows:
    """View ``X`` as rows: NumPy array, Dask array, Zarr array, or path or URL of a Zarr array.

    So is what converts to a NumPy array, if it is in memory, an xarray.DataArray of a Dask array, and tables of
    numbers: frames, Dask DataFrames, Arrow data sets and paths of Parquet files, whose columns keep their names. An
    ``ndim`` of None allows one and two dimensions. Rows are returned as they are.

    Raises
    ------
    InvalidData
        Wrong number of dimensions, no rows or features, a dtype that is not real, nothing there; sparse or masked
        values, or columns of other things than numbers.
    MissingChunks
        Chunks were never written, and ``missing_chunks`` is ``"refuse"``.
    """
    if missing_chunks not in ("refuse", "fill"):
        raise InvalidParameter(f"missing_chunks must be 'refuse' or 'fill', got {missing_chunks!r}")
    X = viewed(X, name)
    if isinstance(X, Rows):
        return X
    origin = ""
    if isinstance(X, (str, os.PathLike)):
        origin = locate(X)
        X = open_zarr(origin)
    if isinstance(X, zarr.Array):
        _check_array(X.shape, X.dtype, ndim, name)
        return ZarrRows(X, missing_chunks == "refuse", origin)
    if isinstance(X, da.Array):
        _check_array(X.shape, X.dtype, ndim, name)
        return DaskRows(X)
    if isinstance(X, (zarr.Group,)):
        raise InvalidData(f"{name} is a Zarr group; pass one of its arrays: {sorted(X.array_keys())}")
    array = as_array(X, name)
    _check_array(array.shape, array.dtype, ndim, name)
    rows = NumpyRows(array)
    if array.ndim == 2 and is_frame(X):
        rows.features = Features(tuple(column_names(X)))
    return rows


def _check_array(shape: tuple[int, ...], dtype: Any, ndim: int | None, name: str) -> None:
    if ndim is None:
        ndim = 1 if len(shape) == 1 else 2
    if len(shape) != ndim:
        wanted = "(n_rows, n_features)" if ndim == 2 else "(n_rows,)"
        raise InvalidData(f"{name} must have {ndim} dimension(s), {wanted}; its shape is {shape}. Reshape it.")
    if not isinstance(dtype, np.dtype) or dtype.kind not in "fiub" or dtype.itemsize > 8:
        raise InvalidData(f"{name} must be real (float16/32/64, integer or bool); its dtype is {dtype}. Convert it.")
    if any(math.isnan(size) for size in shape):
        raise InvalidData(f"{name} is a Dask array of unknown size; call its compute_chunk_sizes() first.")
    if 0 in shape:
        raise InvalidData(f"{name} is empty: its shape is {shape}. At least one row and one feature are needed.")


def has_no_path(origin: str) -> bool:
    """Whether :attr:`Rows.origin` tells of an array in memory, which cannot be opened again."""
    return origin.startswith(("NumPy array", "Dask array"))


class NumpyRows(Rows):
    """Rows in the memory of this process; each block travels with its task."""

    def __init__(self, array: NDArray) -> None:
        self.array = array
        self.shape, self.dtype, self.unit_rows, self.origin = array.shape, array.dtype, 1, "NumPy array"

    @property
    def in_memory(self) -> bool:
        """They are."""
        return True

    def source(self, start: int, stop: int) -> Any:
        """The rows themselves."""
        return np.ascontiguousarray(self.array[start:stop])


class ConstantRows(Rows):
    """A column (n,) of one value, which is made where it is needed."""

    def __init__(self, n_rows: int, value: float) -> None:
        self.value, self.shape, self.dtype = value, (n_rows,), np.dtype(np.float64)
        self.unit_rows, self.origin = 1, "NumPy array"

    @property
    def in_memory(self) -> bool:
        """As good as."""
        return True

    @property
    def is_stored(self) -> bool:
        """As good as."""
        return True

    def source(self, start: int, stop: int) -> bytes:
        """How many, sealed."""
        return seal(ConstantBlock(stop - start, self.value))


class MadeBlock:
    """Rows that a worker makes when they are iterated over, an array at a time."""


@dataclasses.dataclass(frozen=True)
class ConstantBlock(MadeBlock):
    """So many times the same value."""

    n_rows: int
    value: float

    def __iter__(self) -> Iterator[NDArray]:
        yield np.full(self.n_rows, self.value)

    def between(self, first: int, last: int) -> "ConstantBlock":
        """Some of them."""
        return ConstantBlock(last - first, self.value)


class DaskRows(Rows):
    """A lazy Dask array: evaluated anew in every pass that reads it."""

    def __init__(self, array: da.Array) -> None:
        self.array = array.rechunk({1: -1}) if array.ndim == 2 else array
        self.shape, self.dtype = array.shape, array.dtype
        heights = set(self.array.chunks[0][:-1]) - {0}
        self.unit_rows = heights.pop() if len(heights) == 1 else 1
        self.origin = f"Dask array of {self.array.npartitions} chunks"

    def source(self, start: int, stop: int) -> Any:
        """A Dask object that becomes the rows."""
        rows = self.array[start:stop].rechunk(-1)
        return rows.to_delayed(optimize_graph=False).ravel()[0]

    def anew(self, purpose: str) -> "DaskRows":
        """A copy that shares no key with another reading.

        Dask optimises the graph of each reading in its own way, and a scheduler that still knows one form of a key
        may hang on the other. ``dask.graph_manipulation.clone`` would do, but loses keys of rechunked arrays.
        """
        array = self.array
        computed = {future.key for future in distributed.futures_of(array)}
        layer = dict(array.__dask_graph__())
        graph = convert_legacy_graph({key: node for key, node in layer.items() if key not in computed})
        names = {key: _prefixed(purpose, key) for key in graph}
        renamed = {names[key]: node.substitute(names, key=names[key]) for key, node in graph.items()}
        renamed |= {_prefixed(purpose, key): layer[key] for key in computed}
        renamed |= {key: layer[key] for key in computed}
        name = f"{purpose}-{array.name}"
        layers = HighLevelGraph.from_collections(name, renamed, dependencies=())
        return DaskRows(da.Array(layers, name, array.chunks, dtype=array.dtype))


def _prefixed(purpose: str, key: Any) -> Any:
    return (f"{purpose}-{key[0]}", *key[1:]) if isinstance(key, tuple) else f"{purpose}-{key}"


class ZarrRows(Rows):
    """A Zarr array on storage that every worker can reach."""

    def __init__(self, array: zarr.Array, refuse_missing: bool, origin: str) -> None:
        self.array = absolute(array)
        self.refuse_missing = refuse_missing
        self.shape, self.dtype = array.shape, array.dtype
        self.unit_rows = unit_rows(array)
        self.origin = redact(origin or str(self.array.store_path))
        if array.ndim == 2:
            self.features = Features.of(dict(array.attrs), array.shape[1], self.origin)
        if refuse_missing:
            patiently(lambda: refuse_missing_chunks(self.array, self.origin), f"find all chunks of {self.origin}")

    def piece_rows(self, height: int) -> int:
        """A chunk, which is decoded as a whole, or some small ones."""
        return min(piece_rows(self.array, self.unit_rows), self.n_rows)

    @property
    def is_stored(self) -> bool:
        """They are."""
        return True

    def source(self, start: int, stop: int) -> bytes:
        """The array's address and the rows, sealed."""
        place = (start, stop, self.unit_rows, self.refuse_missing)
        return seal(ZarrBlock(self.array, *place), PackedBlock(self._pickled, *place))

    @cached_property
    def _pickled(self) -> bytes:
        return pickle.dumps(self.array)


class JoinedRows(Rows):
    """Rows with one more feature: the root of a multiple of a column that is read from elsewhere, chunked otherwise."""

    def __init__(self, rows: Rows, column: Rows, scale: float) -> None:
        self.rows, self.column, self.scale = rows, column, scale
        self.shape, self.dtype = (rows.n_rows, rows.shape[1] + 1), np.dtype(np.float64)
        self.unit_rows, self.origin, self.features = rows.unit_rows, rows.origin, rows.features

    def piece_rows(self, height: int) -> int:
        """As of the rows."""
        return self.rows.piece_rows(height)

    @property
    def in_memory(self) -> bool:
        """If both are."""
        return self.rows.in_memory and self.column.in_memory

    @property
    def is_stored(self) -> bool:
        """If both are."""
        return self.rows.is_stored and self.column.is_stored

    def source(self, start: int, stop: int) -> Any:
        """Both sources, sealed; or a task that joins them, where one is a Dask object."""
        rows, column = self.rows.source(start, stop), self.column.source(start, stop)
        if isinstance(rows, Delayed) or isinstance(column, Delayed):
            return sealed_task(f"join-rows-{uuid.uuid4().hex}", _joined, rows, column, self.scale)
        return seal(JoinedBlock(opened(rows), opened(column), self.scale))

    def anew(self, purpose: str) -> "JoinedRows":
        """Both anew."""
        return JoinedRows(self.rows.anew(purpose), self.column.anew(f"{purpose}-column"), self.scale)


@dataclasses.dataclass(frozen=True)
class JoinedBlock(MadeBlock):
    """Rows of a block with one more feature."""

    rows: Any
    column: Any
    scale: float

    def __iter__(self) -> Iterator[NDArray]:
        column = np.concatenate([np.asarray(piece, np.float64) for piece in pieces(self.column)])
        start = 0
        for piece in pieces(self.rows):
            stop = start + len(piece)
            yield np.column_stack([piece.astype(np.float64), np.sqrt(self.scale * column[start:stop])])
            start = stop

    def between(self, first: int, last: int) -> "JoinedBlock":
        """Some of them."""
        return JoinedBlock(narrowed(self.rows, first, last), narrowed(self.column, first, last), self.scale)

    def remembering(self, ahead: bool, kept: KeptPieces | None = None) -> "JoinedBlock":
        """Both for one task."""
        return JoinedBlock(for_one_task(self.rows, ahead, kept), for_one_task(self.column, ahead, kept), self.scale)


def _joined(rows: Any, column: Any, scale: float) -> NDArray[np.float64]:
    return np.concatenate(list(JoinedBlock(rows, column, scale)))


def opened(source: Any) -> Any:
    """What a source is on the worker."""
    return unseal(source) if isinstance(source, bytes) else source


def for_one_task(source: Any, ahead: bool = True, kept: KeptPieces | None = None) -> Any:
    """The same, with a memory of what was read last where that helps to read several parts of it.

    What comes next is read meanwhile, unless others of the task are under way and keep the device busy. What other
    tasks of the process have ``kept`` is not read again.
    """
    rows = opened(source)
    return rows.remembering(ahead, kept) if hasattr(rows, "remembering") else rows


def pieces(source: Any) -> Iterable[NDArray]:
    """The rows of a block's source, on the worker, as arrays in row order."""
    rows = opened(source)
    made = isinstance(rows, (ZarrBlock, MadeBlock))
    return rows if made else (np.asarray(readable(rows, "a block of the input")),)


def narrowed(source: Any, first: int, last: int) -> Any:
    """The source of its rows from ``first`` to ``last``, on the worker."""
    rows = opened(source)
    return rows.between(first, last) if hasattr(rows, "between") else rows[first:last]


def is_process_bound(rows: Rows) -> bool:
    """Whether the rows live in a Zarr store in this process's memory, which no other process can read."""
    return isinstance(rows, ZarrRows) and isinstance(rows.array.store, MemoryStore)


def check_reachable(rows: Rows) -> None:
    """Open the stored metadata anew, as a worker will, and compare it with what the caller saw.

    Raises
    ------
    SourceUnreachable
        The array is not there, or is another one.
    """
    if not isinstance(rows, ZarrRows):
        return
    try:
        stored = patiently(
            lambda: open_stored(StorePath(rows.array.store, rows.array.path), rows.origin), f"open {rows.origin}"
        )
    except Exception as error:
        raise SourceUnreachable(
            f"cannot open {rows.origin}: {type(error).__name__}: {redact(str(error))}. "
            "Put the input where every worker can read it."
        ) from None
    if stored.shape != rows.shape or stored.dtype != rows.dtype:
        raise SourceUnreachable(
            f"{rows.origin} has shape {stored.shape} and dtype {stored.dtype} here, "
            f"but {rows.shape} and {rows.dtype} where the run was started."
        )
