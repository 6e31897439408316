"""One view of the input over NumPy arrays, Dask arrays, Zarr arrays and their paths or URLs.

A :class:`Rows` knows its shape and dtype, in which multiples of rows it is best read, and hands out the *source* of
a block: a small object that becomes the block's rows on the worker (see :func:`pieces`). Nothing is read before.
"""

import dataclasses
import itertools
import math
import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import dask.array as da
import distributed
import numpy as np
import zarr
from dask._task_spec import convert_legacy_graph  # not public; tests hold it
from dask.delayed import Delayed, delayed
from dask.highlevelgraph import HighLevelGraph
from numpy.typing import NDArray
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore

from daskrr.engine.addresses import locate, redact
from daskrr.engine.opaque import call_sealed, seal, unseal
from daskrr.engine.patience import patiently
from daskrr.engine.places import zarr_store
from daskrr.errors import DaskrrError, InvalidData, InvalidParameter, MissingChunks, SourceUnreachable, UnreadableData

# A decoded piece is one chunk, or as many small ones as fit in this.
PIECE_BYTES = 16 * 2**20

# A shard is read whole up to this size; beyond it, by its inner chunks.
SHARD_BYTES = 64 * 2**20


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
    piece_bytes
        Largest number of bytes that a block decodes at a time.
    origin
        What it is and where it comes from, for messages.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    unit_rows: int
    piece_bytes: int
    origin: str

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


def open_rows(X: Any, *, ndim: int | None = 2, missing_chunks: str = "refuse", name: str = "X") -> Rows:
    """View ``X`` as rows: NumPy array, Dask array, Zarr array, or path or URL of a Zarr array.

    An ``ndim`` of None allows one and two dimensions. Rows are returned as they are.

    Raises
    ------
    InvalidData
        Wrong number of dimensions, no rows or features, a dtype that is not real, or nothing there.
    MissingChunks
        Chunks were never written, and ``missing_chunks`` is ``"refuse"``.
    """
    if missing_chunks not in ("refuse", "fill"):
        raise InvalidParameter(f"missing_chunks must be 'refuse' or 'fill', got {missing_chunks!r}")
    if isinstance(X, Rows):
        return X
    origin = ""
    if isinstance(X, (str, os.PathLike)):
        origin = locate(X)
        X = _open_zarr(origin)
    if isinstance(X, zarr.Array):
        _check_array(X.shape, X.dtype, ndim, name)
        return ZarrRows(X, missing_chunks == "refuse", origin)
    if isinstance(X, da.Array):
        _check_array(X.shape, X.dtype, ndim, name)
        return DaskRows(X)
    if isinstance(X, (zarr.Group,)):
        raise InvalidData(f"{name} is a Zarr group; pass one of its arrays: {sorted(X.array_keys())}")
    array = np.asarray(X)
    _check_array(array.shape, array.dtype, ndim, name)
    return NumpyRows(array)


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


def _open_zarr(path: str) -> zarr.Array:
    try:
        found = zarr.open(zarr_store(path), mode="r")
    except (FileNotFoundError, ValueError, KeyError, NotADirectoryError) as error:
        raise InvalidData(
            f"there is no readable Zarr array at {redact(path)}: {type(error).__name__}: {redact(str(error), path)}"
        ) from None
    except DaskrrError:
        raise
    except Exception as error:  # stores raise errors of many kinds
        raise SourceUnreachable(
            f"cannot open the Zarr array at {redact(path)}: {type(error).__name__}: {redact(str(error), path)}. "
            "Check that its store is up and the credentials are right."
        ) from None
    if isinstance(found, zarr.Group):
        raise InvalidData(
            f"{redact(path)} is a Zarr group, not an array; name one of its arrays, such as {redact(path)}/NAME "
            f"with NAME one of {sorted(found.array_keys())}."
        )
    return found


class NumpyRows(Rows):
    """Rows in the memory of this process; each block travels with its task."""

    def __init__(self, array: NDArray) -> None:
        self.array = array
        self.shape, self.dtype, self.unit_rows = array.shape, array.dtype, 1
        self.piece_bytes, self.origin = 0, "NumPy array"

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
        self.unit_rows, self.piece_bytes, self.origin = 1, 0, "NumPy array"

    @property
    def in_memory(self) -> bool:
        """As good as."""
        return True

    def source(self, start: int, stop: int) -> bytes:
        """How many, sealed."""
        return seal(ConstantBlock(stop - start, self.value))


@dataclasses.dataclass(frozen=True)
class ConstantBlock:
    """So many times the same value."""

    n_rows: int
    value: float

    def __iter__(self) -> Iterator[NDArray]:
        yield np.full(self.n_rows, self.value)


class DaskRows(Rows):
    """A lazy Dask array: evaluated anew in every pass that reads it."""

    def __init__(self, array: da.Array) -> None:
        self.array = array.rechunk({1: -1}) if array.ndim == 2 else array
        self.shape, self.dtype = array.shape, array.dtype
        heights = set(self.array.chunks[0][:-1]) - {0}
        self.unit_rows = heights.pop() if len(heights) == 1 else 1
        self.piece_bytes = max(self.array.chunks[0]) * self.row_bytes
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
        self.array = _absolute(array)
        self.refuse_missing = refuse_missing
        self.shape, self.dtype = array.shape, array.dtype
        self.unit_rows = _unit_rows(array)
        per_piece = max(1, PIECE_BYTES // (self.unit_rows * self.row_bytes))
        self.piece_bytes = min(self.unit_rows * per_piece, self.n_rows) * self.row_bytes
        self.origin = redact(origin or str(self.array.store_path))
        if refuse_missing:
            patiently(lambda: _refuse_missing_chunks(self.array, self.origin), f"find all chunks of {self.origin}")

    def source(self, start: int, stop: int) -> bytes:
        """The array's address and the rows, sealed."""
        return seal(ZarrBlock(self.array, start, stop, self.unit_rows, self.refuse_missing))


class JoinedRows(Rows):
    """Rows with one more feature: the root of a multiple of a column that is read from elsewhere, chunked otherwise."""

    def __init__(self, rows: Rows, column: Rows, scale: float) -> None:
        self.rows, self.column, self.scale = rows, column, scale
        self.shape, self.dtype = (rows.n_rows, rows.shape[1] + 1), np.dtype(np.float64)
        self.unit_rows, self.origin = rows.unit_rows, rows.origin
        self.piece_bytes = max(rows.piece_bytes, 1) * 3

    @property
    def in_memory(self) -> bool:
        """If both are."""
        return self.rows.in_memory and self.column.in_memory

    def source(self, start: int, stop: int) -> Any:
        """Both sources, sealed; or a task that joins them, where one is a Dask object."""
        both = self.rows.source(start, stop), self.column.source(start, stop)
        if any(isinstance(one, Delayed) for one in both):
            name = f"join-rows-{uuid.uuid4().hex}"
            return delayed(call_sealed, pure=False, traverse=False)(
                seal(_joined), *both, self.scale, dask_key_name=name
            )  # fmt: skip
        return seal(JoinedBlock(*both, self.scale))

    def anew(self, purpose: str) -> "JoinedRows":
        """Both anew."""
        return JoinedRows(self.rows.anew(purpose), self.column.anew(f"{purpose}-column"), self.scale)


@dataclasses.dataclass(frozen=True)
class JoinedBlock:
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


def _joined(rows: Any, column: Any, scale: float) -> NDArray[np.float64]:
    return np.concatenate(list(JoinedBlock(rows, column, scale)))


def _absolute(array: zarr.Array) -> zarr.Array:
    """The same array with an absolute local path, since workers have their own working directory."""
    store = array.store
    if not isinstance(store, LocalStore) or Path(store.root).is_absolute():
        return array
    return zarr.open_array(LocalStore(Path(store.root).absolute(), read_only=True), path=array.path, mode="r")


def _unit_rows(array: zarr.Array) -> int:
    """Rows of a shard, of an inner chunk when shards are huge, or 1 for a grid that is not regular."""
    try:
        shards, chunks = array.shards, array.chunks
    except NotImplementedError:
        return 1
    row_bytes = math.prod(array.shape[1:]) * array.dtype.itemsize
    if shards is not None and shards[0] * row_bytes <= SHARD_BYTES:
        return min(int(shards[0]), array.shape[0])
    return min(int(chunks[0]), array.shape[0])


def _stored_grid(array: zarr.Array) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shape of one stored object and how many there are along each axis; None for a grid that is not regular."""
    try:
        unit = array.shards or array.chunks
    except NotImplementedError:
        return None
    return tuple(unit), tuple(-(-size // step) for size, step in zip(array.shape, unit, strict=True))


def _chunks_between(array: zarr.Array, start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Place in the grid, and extent, of every stored object with some of the rows; none if the grid is not regular."""
    grid = _stored_grid(array)
    if grid is None:
        return
    unit, counts = grid
    places = itertools.product(range(start // unit[0], -(-stop // unit[0])), *map(range, counts[1:]))
    for place in places:
        lows = [number * step for number, step in zip(place, unit, strict=True)]
        highs = [min(low + step, size) for low, step, size in zip(lows, unit, array.shape, strict=True)]
        yield place, tuple(map(slice, lows, highs))


def _refuse_missing_chunks(array: zarr.Array, origin: str) -> None:
    """List the store once: a chunk or shard that was never written would be read as fill values."""
    grid = _stored_grid(array)
    if grid is None:
        return
    unit, counts = grid
    stored = _stored_keys(array)
    expected = ((place, array.metadata.encode_chunk_key(place)) for place in itertools.product(*map(range, counts)))
    missing = [(place, key) for place, key in expected if key not in stored]
    if missing:
        place, key = missing[0]
        first = place[0] * unit[0]
        raise _missing_error(
            f"{len(missing)} of {math.prod(counts)} chunks of {origin} were never written; the first is {key!r} "
            f"(rows {first}–{min(first + unit[0], array.shape[0]) - 1})"
        )


def _missing_error(found: str) -> MissingChunks:
    return MissingChunks(
        f"{found}. Zarr would read them as fill values. Complete the store; or, if its writer left out chunks that "
        "hold only the fill value, pass missing_chunks='fill' (--missing-chunks fill)."
    )


def _stored_keys(array: zarr.Array) -> set[str]:
    prefix = f"{array.path}/" if array.path else ""

    async def collect() -> set[str]:
        return {key async for key in array.store.list_prefix(prefix)}

    return {key.removeprefix(prefix) for key in sync(collect())}


@dataclasses.dataclass(frozen=True)
class ZarrBlock:
    """Rows ``start`` to ``stop`` of a Zarr array, decoded a few chunks at a time."""

    array: zarr.Array
    start: int
    stop: int
    unit_rows: int
    refuse_missing: bool

    def __iter__(self) -> Iterator[NDArray]:
        row_bytes = math.prod(self.array.shape[1:]) * self.array.dtype.itemsize
        step = self.unit_rows * max(1, PIECE_BYTES // (self.unit_rows * row_bytes))
        for start in range(self.start, self.stop, step):
            yield self._read(start, min(start + step, self.stop))

    def _read(self, start: int, stop: int) -> NDArray:
        what = f"read rows {start}–{stop - 1} of {redact(str(self.array.store_path))}"
        try:
            return patiently(lambda: self._read_once(start, stop), what)
        except MissingChunks:
            raise
        except Exception as error:  # codecs and stores raise errors of many kinds
            raise UnreadableData(
                f"cannot read {self._unreadable(start, stop)}: {type(error).__name__}: {redact(str(error))}. "
                "The chunk is damaged or unreachable."
            ) from None

    def _read_once(self, start: int, stop: int) -> NDArray:
        piece = np.asarray(self.array[start:stop])
        if self.refuse_missing:
            self._check_written(piece, start)
        return piece

    def _unreadable(self, start: int, stop: int) -> str:
        """The first chunk of some rows that cannot be read, or all of them, should that have passed."""
        for place, (rows, *columns) in _chunks_between(self.array, start, stop):
            try:
                self.array[(rows, *columns)]
            except Exception:
                return self._named(rows.start, rows.stop - 1, [place])
        return self.describe(start, stop - 1)

    def describe(self, first: int, last: int) -> str:
        """Rows and the names of their chunks, for messages."""
        return self._named(first, last, [place for place, _ in _chunks_between(self.array, first, last + 1)])

    def _named(self, first: int, last: int, places: list[tuple[int, ...]]) -> str:
        keys = [repr(self.array.metadata.encode_chunk_key(place)) for place in places[:3]]
        more = ", …" if len(places) > len(keys) else ""
        chunks = f" (chunk {', '.join(keys)}{more})" if keys else ""
        return f"rows {first}–{last} of {redact(str(self.array.store_path))}{chunks}"

    def _check_written(self, piece: NDArray, start: int) -> None:
        """Tell chunks of fill values from chunks that are not there: only the latter follow the fill value."""
        suspects = list(_chunks_of_fill(self.array, piece, start))
        if not suspects:
            return
        other = _with_other_fill(self.array)
        for region in suspects:
            # All of it, since a store may find this time what it did not find before.
            if not _is_fill(other[region], self.array.fill_value):
                raise _missing_error(
                    f"the chunk with row {region[0].start} of {redact(str(self.array.store_path))} was never written"
                )


def _is_fill(value: Any, fill: Any) -> bool:
    return bool(np.all(value == fill) or (np.all(value != value) and fill != fill))


def _chunks_of_fill(array: zarr.Array, piece: NDArray, start: int) -> Iterator[tuple[slice, ...]]:
    """Where (inner) chunks within ``piece``, whose first row is ``start``, hold fill values alone."""
    try:
        chunks = array.chunks
    except NotImplementedError:
        chunks = (1, *array.shape[1:])
    starts = [range(start - start % chunks[0], start + len(piece), chunks[0])]
    starts += [range(0, size, step) for size, step in zip(array.shape[1:], chunks[1:], strict=True)]
    for corner in itertools.product(*starts):
        rows = slice(max(corner[0], start), min(corner[0] + chunks[0], start + len(piece)))
        rest = [slice(low, low + step) for low, step in zip(corner[1:], chunks[1:], strict=True)]
        inside = piece[(slice(rows.start - start, rows.stop - start), *rest)]
        if _is_fill(inside.flat[0], array.fill_value) and _is_fill(inside, array.fill_value):
            yield (rows, *rest)


def _with_other_fill(array: zarr.Array) -> zarr.Array:
    """The same stored chunks behind another fill value."""
    fill = np.zeros((), array.dtype) if array.fill_value else np.ones((), array.dtype)
    metadata = dataclasses.replace(array.metadata, fill_value=fill.item())
    return zarr.Array(zarr.AsyncArray(metadata=metadata, store_path=array.store_path))


def pieces(source: Any) -> Iterable[NDArray]:
    """The rows of a block's source, on the worker, as arrays in row order."""
    return unseal(source) if isinstance(source, bytes) else (np.asarray(source),)


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
        found = patiently(
            lambda: zarr.open_array(rows.array.store, path=rows.array.path, mode="r"), f"open {rows.origin}"
        )
    except Exception as error:
        raise SourceUnreachable(
            f"cannot open {rows.origin}: {type(error).__name__}: {redact(str(error))}. "
            "Put the input where every worker can read it."
        ) from None
    if found.shape != rows.shape or found.dtype != rows.dtype:
        raise SourceUnreachable(
            f"{rows.origin} has shape {found.shape} and dtype {found.dtype} here, "
            f"but {rows.shape} and {rows.dtype} where the run was started."
        )
