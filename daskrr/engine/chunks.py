"""Zarr arrays as input: opened, chunks that are missing told from chunks of fill values, and rows read in pieces."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.core.sync import sync
from zarr.storage import LocalStore

from daskrr.engine.addresses import redact
from daskrr.engine.patience import patiently
from daskrr.engine.places import zarr_store
from daskrr.errors import DaskrrError, InvalidData, MissingChunks, SourceUnreachable, UnreadableData

# A decoded piece is one chunk, or as many small ones as fit in this.
PIECE_BYTES = 16 * 2**20

# A shard is read whole up to this size; beyond it, by its inner chunks.
SHARD_BYTES = 64 * 2**20


def open_zarr(path: str) -> zarr.Array:
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


def absolute(array: zarr.Array) -> zarr.Array:
    """The same array with an absolute local path, since workers have their own working directory."""
    store = array.store
    if not isinstance(store, LocalStore) or Path(store.root).is_absolute():
        return array
    return zarr.open_array(LocalStore(Path(store.root).absolute(), read_only=True), path=array.path, mode="r")


def unit_rows(array: zarr.Array) -> int:
    """Rows of a shard, of an inner chunk when shards are huge, or 1 for a grid that is not regular.

    There may be fewer rows yet: where blocks begin must not depend on how many rows there are.
    """
    try:
        shards, chunks = array.shards, array.chunks
    except NotImplementedError:
        return 1
    if shards is not None and shards[0] * _row_bytes(array) <= SHARD_BYTES:
        return int(shards[0])
    return int(chunks[0])


def piece_rows(array: zarr.Array, unit: int) -> int:
    """How many rows to decode at a time: one unit, or as many small ones as make a piece."""
    return unit * max(1, PIECE_BYTES // (unit * _row_bytes(array)))


def _row_bytes(array: zarr.Array) -> int:
    return math.prod(array.shape[1:]) * array.dtype.itemsize


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


def refuse_missing_chunks(array: zarr.Array, origin: str) -> None:
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
        step = piece_rows(self.array, self.unit_rows)
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
