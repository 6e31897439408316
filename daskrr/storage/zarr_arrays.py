"""Zarr arrays as we write them: float64 unless said otherwise, NaN where nothing is, a checksum on every chunk.

Arrays of an unfinished job have no metadata on storage, so that no Zarr reader finds them; :func:`array_at` makes one
from metadata that are kept elsewhere.
"""

import itertools
import json
import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import zarr
from numcodecs.zstd import Zstd
from numpy.typing import NDArray
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import LocalStore, MemoryStore, ObjectStore, StorePath

from daskrr.errors import DaskrrError
from daskrr.numerics.checksum import crc32c
from daskrr.storage.local import files_below
from daskrr.storage.medium import Medium
from daskrr.storage.retry import failure, insist, patiently
from daskrr.storage.s3 import connect, listed
from daskrr.storage.several import begin, finish
from daskrr.storage.urls import is_local, is_s3, redact

METADATA = "zarr.json"
# Of Zstandard; what is written are digits of results, which higher levels pack no better.
LEVEL = 1


def zarr_store(address: str) -> Any:
    """What Zarr opens an address by; a path is none of a URL, whatever characters it has."""
    if is_s3(address):
        return ObjectStore(connect(address))
    return LocalStore(address, read_only=True) if is_local(address) else address


def listing(store: Any, prefix: str) -> dict[str, tuple[int, str]] | None:
    """Size of all keys below a prefix, and what changes with their content; None of stores that do not tell."""
    if isinstance(store, LocalStore):
        return insist(partial(files_below, str(store.root), prefix), f"list {prefix or 'all'} of {store.root}")
    if isinstance(store, ObjectStore):
        return patiently(partial(listed, store.store, prefix), f"list {prefix or 'all'} of the bucket")
    return None


def blueprint(
    shapes: Mapping[str, tuple[int, ...]], chunk_rows: int, second: str = "ridge", **dtypes: str
) -> zarr.Group:
    """A group in memory, for its metadata: named arrays, one chunk per block; ``second`` names columns."""
    group = zarr.open_group(MemoryStore(), mode="w")
    for name, shape in shapes.items():
        group.create_array(
            name,
            shape=shape,
            chunks=(max(1, min(chunk_rows, shape[0])), *(max(1, size) for size in shape[1:])),
            dtype=dtypes.get(name, "float64"),
            fill_value=-1 if name in dtypes else np.nan,
            compressors=(ZstdCodec(level=LEVEL), Crc32cCodec()),
            dimension_names=("row", second)[: len(shape)],
        )
    return group


def small_group(arrays: Mapping[str, NDArray], attributes: Mapping[str, Any]) -> dict[str, bytes]:
    """All files of a group of small arrays of any shape, each one chunk: factors, which cannot be packed."""
    store = MemoryStore()
    group = zarr.open_group(store, mode="w", attributes=dict(attributes))
    for name, values in arrays.items():
        group.create_array(
            name,
            data=np.asarray(values),
            chunks=tuple(max(1, size) for size in np.shape(values)),
            fill_value=np.nan if np.asarray(values).dtype.kind == "f" else -1,
            compressors=Crc32cCodec(),
            config={"write_empty_chunks": True},
        )
    return {key: value.to_bytes() for key, value in store._store_dict.items()}


def array_at(store: Any, path: str, like: Any) -> zarr.Array:
    """An array with the metadata of another, none of which are on storage."""
    return zarr.Array(zarr.AsyncArray(metadata=like.metadata, store_path=StorePath(store, path)))


def metadata_of(node: Any) -> str:
    """What is stored as the metadata of an array or group."""
    return node.metadata.to_buffer_dict(default_buffer_prototype())[METADATA].to_bytes().decode()


def keys_of(metadata: Mapping[str, str]) -> list[str]:
    """Keys of all that metadata of ours, by key, tell of: themselves and every chunk; no list of a store is asked."""
    keys = [*metadata]
    for key, text in metadata.items():
        told = json.loads(text)
        if told["node_type"] == "array":
            sizes = zip(told["shape"], told["chunk_grid"]["configuration"]["chunk_shape"], strict=True)
            places = itertools.product(*(range(math.ceil(size / chunk)) for size, chunk in sizes))
            keys += ["/".join([key.removesuffix(f"/{METADATA}"), "c", *map(str, place)]) for place in places]
    return keys


def checksum(values: NDArray) -> int:
    """Of the bytes of an array in row order."""
    return zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def chunk_key(array: zarr.Array, start: int) -> str:
    """Key of the chunk that begins with row ``start``; chunks hold all columns."""
    place = (start // array.chunks[0], *(0 for _ in array.shape[1:]))
    return f"{array.path}/{array.metadata.encode_chunk_key(place)}"


@dataclass(frozen=True)
class Staged:
    """Arrays of an unfinished generation, and the medium that they are on; travels without what is being written."""

    medium: Medium
    arrays: dict[str, zarr.Array]
    _begun: dict[int, list[Future[object]]] = field(default_factory=dict, compare=False, repr=False)

    def __reduce__(self) -> tuple[Callable[..., "Staged"], tuple[Medium, dict[str, zarr.Array]]]:
        return Staged, (self.medium, self.arrays)

    def settle(self, starts: Iterable[int], only_end: bool = False) -> None:
        """Have the chunks of the blocks from ``starts`` reach the disk, so that a record of them does not come first.

        That is tried once: what a disk has lost when it failed to, it does not have the next time, and may not say so.
        With ``only_end`` nothing is tried but to wait until none of them is being written.

        Raises
        ------
        StoreFailed
            They may not have, or the store is full, or refused several times; the blocks have to be written again.
        """
        starts = list(starts)
        begun = [one for start in starts for one in self._begun.get(start, ())]
        wait(begun)
        for start in starts:  # whoever settles the same blocks meanwhile has waited, too
            self._begun.pop(start, None)
        if only_end:
            return
        finish(begun)
        try:
            self.medium.settle(chunk_key(array, start) for start in starts for array in self.arrays.values())
        except OSError as error:
            named = f"the rows from {min(starts)} on of {redact(self.medium.address)}"
            raise failure(f"synchronize {named}", error) from None

    def write(self, columns: Mapping[str, NDArray], start: int) -> None:
        """Begin to write the rows from ``start`` of each named array, for which :meth:`settle` waits.

        They must be whole chunks.

        Raises
        ------
        RuntimeError
            They are not: two writers of one chunk would lose rows.
        """
        for name, values in columns.items():
            self._check_whole_chunks(self.arrays[name], start, start + len(values))
        block, whole = sum(one.nbytes for one in columns.values()), sum(one.nbytes for one in self.arrays.values())
        needs = f"This block needs up to {block:,} bytes, the whole output up to {whole:,}. "
        begun = self._begun.setdefault(start, [])
        begun += begin(partial(self._write, name, values, start, needs) for name, values in columns.items())

    def _check_whole_chunks(self, array: zarr.Array, start: int, stop: int) -> None:
        height = array.chunks[0]
        if start % height or (stop % height and stop != array.shape[0]):
            raise RuntimeError(f"rows {start}–{stop} are not whole chunks of {height} rows")

    def _write(self, name: str, values: NDArray, start: int, needs: str) -> None:
        array = self.arrays[name]
        stop, height = start + len(values), array.chunks[0]
        what = f"write rows {start}–{stop - 1} of {redact(str(array.store_path))}"
        try:
            for first in range(start, stop, height):
                chunk = _encoded(array, values[first - start : first - start + height])
                patiently(partial(self.medium.place, chunk_key(array, first), chunk), what)
        except DaskrrError:
            raise
        except Exception as error:  # stores raise errors of many kinds
            raise failure(what, error, needs) from None

    def read(self, start: int) -> dict[str, Any]:
        """The block from ``start`` of every array."""
        return {name: array[start : start + array.chunks[0]] for name, array in self.arrays.items()}

    def complete(self, starts: Iterable[int]) -> set[int]:
        """Those of the blocks whose chunks are all there, as far as names and sizes tell."""
        there: set[str] = set()
        for array in self.arrays.values():
            found = patiently(partial(self.medium.keys, array.path), f"list {array.path}")
            there |= {key for key, (size, _) in found.items() if size}
        return {start for start in starts if there.issuperset(chunk_key(one, start) for one in self.arrays.values())}


def _encoded(array: zarr.Array, values: NDArray) -> NDArray[np.uint8]:
    """A chunk as Zarr would store it, which takes five times as long to: of the codecs of :func:`blueprint`."""
    chunk = np.full(array.chunks, array.fill_value, array.dtype.newbyteorder("<"))
    chunk[: len(values)] = values
    packed = np.frombuffer(Zstd(level=LEVEL).encode(chunk), np.uint8)
    return np.concatenate([packed, np.array([crc32c(packed)], "<u4").view(np.uint8)])
