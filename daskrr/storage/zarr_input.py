"""Zarr arrays as input: opened, chunks that are missing told from chunks of fill values, and rows read in pieces."""

import contextlib
import dataclasses
import functools
import itertools
import math
import operator
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.abc.store import RangeByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, StorePath
from zarr.storage._common import make_store_path  # not public; tests hold it

from daskrr.errors import DaskrrError, InvalidData, MissingChunks, SourceUnreachable, UnreadableData
from daskrr.storage.chunk_files import ChunkFiles
from daskrr.storage.pieces import KeptPieces, TaskReads
from daskrr.storage.retry import patiently
from daskrr.storage.trust import INPUTS, MOST_BYTES, check_metadata, parse_json
from daskrr.storage.urls import excerpt, redact
from daskrr.storage.zarr_arrays import zarr_store

# A decoded piece is one chunk, or as many small ones as fit in this.
PIECE_BYTES = 16 * 2**20

# A shard is read whole up to this size; beyond it, by its inner chunks.
SHARD_BYTES = 64 * 2**20

# Arrays of a group that a message names at most.
MOST_NAMES = 20

# A group of rows and of what tells them apart: their numbers in the table they come from, identifiers as bytes.
POINTS, ROW_NUMBERS, ROW_IDS, RESPONSES = "points", "row", "id", "response"


def open_zarr(path: str) -> zarr.Array:
    """The array at a path or URL; see :func:`open_stored`.

    Raises
    ------
    InvalidData
        There is none, or what is there is not read.
    SourceUnreachable
        The store does not answer.
    """
    name = redact(path)
    try:
        return open_stored(sync(make_store_path(zarr_store(path), mode="r")), name)
    except DaskrrError:
        raise
    except (FileNotFoundError, ValueError, KeyError, NotADirectoryError) as error:
        raise InvalidData(
            f"there is no readable Zarr array at {name}: {type(error).__name__}: {redact(str(error), path)}"
        ) from None
    except Exception as error:  # stores raise errors of many kinds
        raise SourceUnreachable(
            f"cannot open the Zarr array at {name}: {type(error).__name__}: {redact(str(error), path)}. "
            "Check that its store is up and the credentials are right."
        ) from None


def open_stored(place: StorePath, name: str) -> zarr.Array:
    """The array at a place of a store, made from the very metadata that were found to be harmless.

    Raises
    ------
    InvalidData
        There is none, or its metadata are not those of an array of numbers (:mod:`daskrr.storage.trust`).
    """
    what = f"the metadata of {name}"
    version_3, version_2 = _read_metadata(place, "zarr.json"), _read_metadata(place, ".zarray")
    found = version_2 if version_3 is None else version_3
    if found is None and _read_metadata(place, ".zgroup") is None:
        raise InvalidData(f"there is no readable Zarr array at {name}: neither zarr.json nor .zarray is there.")
    metadata = {"node_type": "group"} if found is None else parse_json(found, what)
    if isinstance(metadata, dict) and metadata.get("node_type") == "group":
        if isinstance(about := metadata.get("attributes"), dict) and about.get("daskrr") == POINTS:
            return open_stored(place / POINTS, name)
        raise InvalidData(
            f"{name} is a Zarr group, not an array; name one of its arrays, such as {name}/NAME "
            f"with NAME one of {_array_names(place)}."
        )
    checked = check_metadata(metadata, INPUTS, what)
    if version_3 is None:
        checked["attributes"] = parse_json(_read_metadata(place, ".zattrs") or "{}", f"what {name}/.zattrs holds")
    try:
        return zarr.Array(zarr.AsyncArray(metadata=cast(Any, checked), store_path=place))
    except Exception as error:  # Zarr has no one error for metadata that contradict themselves
        raise InvalidData(f"{what} is not that of an array: {type(error).__name__}: {excerpt(error, 300)}") from None


def check_opened(array: zarr.Array, name: str) -> None:
    """Hold an array that was opened elsewhere to the same rules.

    Raises
    ------
    InvalidData
        Its dtype or one of its codecs is not read.
    """
    stored = array.metadata.to_buffer_dict(default_buffer_prototype())
    key = "zarr.json" if array.metadata.zarr_format == 3 else ".zarray"
    check_metadata(stored[key].to_bytes(), INPUTS, f"the metadata of {name}")


def _read_metadata(place: StorePath, key: str) -> bytes | None:
    """The beginning of a file, long enough to see that it is too long."""
    whole = RangeByteRequest(0, MOST_BYTES + 1)
    found = sync((place / key).get(default_buffer_prototype(), byte_range=whole))
    return None if found is None else found.to_bytes()


def _array_names(group: StorePath) -> list[str]:
    """Names of arrays in a group, for messages; not more than a few, and none of a store that does not tell."""

    async def names() -> list[str]:
        return [name async for name in group.store.list_dir(group.path)]

    try:
        listed = sorted(sync(names()))[:MOST_NAMES]
        return [name for name in listed if _is_array(group / name)]
    except Exception:
        return []


def _is_array(place: StorePath) -> bool:
    version_3 = _read_metadata(place, "zarr.json")
    if version_3 is None:
        return _read_metadata(place, ".zarray") is not None
    return parse_json(version_3, "metadata").get("node_type") == "array"


def absolute(array: zarr.Array) -> zarr.Array:
    """The same array with an absolute local path, since workers have their own working directory."""
    store = array.store
    if not isinstance(store, LocalStore) or Path(store.root).is_absolute():
        return array
    place = StorePath(LocalStore(Path(store.root).absolute(), read_only=True), array.path)
    return zarr.Array(zarr.AsyncArray(metadata=array.metadata, store_path=place))


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
    """List the store once: a chunk or shard that was never written would be read as fill values.

    The work goes with what is stored, not with how many chunks the metadata promise.
    """
    grid = _stored_grid(array)
    if grid is None:
        return
    unit, counts = grid
    stored, total = _stored_places(array, counts), math.prod(counts)
    if len(stored) < total:
        places = (tuple(map(int, np.unravel_index(number, counts))) for number in range(total))
        place = next(one for one in places if one not in stored)
        first = place[0] * unit[0]
        raise _missing_error(
            f"{total - len(stored)} of {total} chunks of {origin} were never written; the first is "
            f"{array.metadata.encode_chunk_key(place)!r} (rows {first}–{min(first + unit[0], array.shape[0]) - 1})"
        )


def _missing_error(found: str) -> MissingChunks:
    return MissingChunks(
        f"{found}. Zarr would read them as fill values. Complete the store; or, if its writer left out chunks that "
        "hold only the fill value, pass missing_chunks='fill' (--missing-chunks fill)."
    )


def _stored_places(array: zarr.Array, counts: tuple[int, ...]) -> set[tuple[int, ...]]:
    """Places in the grid whose chunk or shard is stored."""
    prefix = f"{array.path}/" if array.path else ""

    async def collect() -> list[str]:
        return [key.removeprefix(prefix) async for key in array.store.list_prefix(prefix)]

    places = set()
    for key in sync(collect()):
        place = tuple(map(int, re.findall(r"\d{1,19}", key)))
        inside = len(place) == len(counts) and all(map(operator.lt, place, counts))
        if inside and array.metadata.encode_chunk_key(place) == key:
            places.add(place)
    return places


@dataclasses.dataclass(frozen=True)
class ZarrBlock:
    """Rows ``start`` to ``stop`` of a Zarr array, decoded a few chunks at a time."""

    array: zarr.Array
    start: int
    stop: int
    unit_rows: int
    refuse_missing: bool
    of_task: TaskReads | None = dataclasses.field(default=None, compare=False, repr=False)
    kept: KeptPieces | None = dataclasses.field(default=None, compare=False, repr=False)

    def __iter__(self) -> Iterator[NDArray]:
        step = piece_rows(self.array, self.unit_rows)
        for start in range(self.start, self.stop, step):
            stop = min(start + step, self.stop)
            if stop - start < self.unit_rows:
                yield self._cut_out(start, stop)
            else:
                end = self.stop if stop < self.stop else 2 * self.stop - self.start  # of the next block, most likely
                yield self._read(start, stop, min(stop + step, end))

    def between(self, first: int, last: int) -> "ZarrBlock":
        """Some of its rows, numbered from its first."""
        return dataclasses.replace(self, start=self.start + first, stop=self.start + last)

    def remembering(self, ahead: bool, kept: KeptPieces | None = None) -> "ZarrBlock":
        """The same for one task: what one part of it has decoded, the next need not; what comes next is read ahead.

        The task has that for itself, since others may read the same block at the same time, and no longer than it runs.
        What is ``kept`` is for all tasks.
        """
        return dataclasses.replace(self, of_task=TaskReads(self.stop if ahead else self.start), kept=kept or self.kept)

    @functools.cached_property
    def _files(self) -> ChunkFiles | None:
        return ChunkFiles.of(self.array)

    def _cut_out(self, start: int, stop: int) -> NDArray:
        """Rows that are a part of a chunk, or of two."""
        last, parts, unit = self.of_task or TaskReads(stop), [], self.unit_rows
        for first in range(start - start % unit, stop, unit):
            if last.last_start != first:
                last.last_chunk, last.last_start = self._read(first, first + unit, first + 2 * unit), first
            parts.append(last.last_chunk[max(start - first, 0) : stop - first])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read(self, start: int, stop: int, then: int) -> NDArray:
        """Rows, those at the end of the array at most; the task will then read on to row ``then``, most likely."""
        n_rows = self.array.shape[0]
        stop, then = min(stop, n_rows), min(then, n_rows)
        return self._decode(start, stop) if self.of_task is None else self.of_task.read(self._decode, start, stop, then)

    def _decode(self, start: int, stop: int) -> NDArray:
        """Rows; pieces as whole as all who read them have them are kept, if any are."""
        is_whole = stop - start == piece_rows(self.array, self.unit_rows) or stop == self.array.shape[0]
        if self.kept is None or not is_whole:
            return self._decode_anew(start, stop)
        return self.kept.read((str(self.array.store_path), start, stop), self._decode_anew)

    def _decode_anew(self, start: int, stop: int) -> NDArray:
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
        if self._files is not None:
            with contextlib.suppress(FileNotFoundError):  # Zarr knows what is read then
                return self._files.read(start, stop)
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


class PackedBlock:
    """What becomes a :class:`ZarrBlock` where it is unpickled; an array is pickled once for all of its blocks."""

    def __init__(self, array: bytes, *place: Any) -> None:
        self._arguments = (array, *place)

    def __reduce__(self) -> tuple[Callable[..., ZarrBlock], tuple[Any, ...]]:
        return _unpacked_block, self._arguments


def _unpacked_block(array: bytes, *place: Any) -> ZarrBlock:
    return ZarrBlock(_unpacked_array(array), *place)


@functools.lru_cache(maxsize=8)
def _unpacked_array(array: bytes) -> zarr.Array:
    return pickle.loads(array)


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
