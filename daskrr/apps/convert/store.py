"""The Zarr store that rows are written to: an array, or a group of it and of what tells its rows apart.

Rows are written beyond the end of the array first; that it is longer, and what was read, is told by one change of its
metadata, so that an append that is killed changes nothing that anybody reads.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import BloscCodec, Crc32cCodec
from zarr.storage import LocalStore

from daskrr.errors import InvalidData
from daskrr.storage.zarr_input import POINTS, RESPONSES, ROW_IDS, ROW_NUMBERS

# Bytes of an identifier at first; longer ones make their array wider, up to a width that memory bears for all rows.
ID_BYTES, MOST_ID_BYTES = 16, 256


class PointStore:
    """Rows being written to a new store, or after those of one that is there."""

    def __init__(
        self, path: Path, array: "zarr.Array[Any]", beside: dict[str, "zarr.Array[Any]"], is_group: bool
    ) -> None:
        self._path, self.array, self._beside, self._is_group = path, array, beside, is_group
        self.n_rows = array.shape[0]

    @classmethod
    def made(cls, path: Path, *, is_group: bool, dtype: np.dtype[Any], shape: tuple[int, int]) -> "PointStore":
        """A new one, of chunks of this shape."""
        if is_group:
            zarr.create_group(LocalStore(path), attributes={"daskrr": POINTS})
        return cls(path, create(path / POINTS if is_group else path, (0, shape[1]), shape, dtype), {}, is_group)

    @classmethod
    def reopened(cls, path: Path) -> "PointStore":
        """One that is there, to be longer."""
        if is_array(path):
            return cls(path, opened(path), {}, is_group=False)
        names = [name for name in (ROW_NUMBERS, ROW_IDS, RESPONSES) if (path / name).is_dir()]
        return cls(path, opened(path / POINTS), {name: opened(path / name) for name in names}, is_group=True)

    def write(
        self,
        values: NDArray[Any],
        rows: NDArray[np.int64],
        ids: Sequence[str] | None,
        targets: NDArray[np.float64] | None,
    ) -> None:
        """Write rows after the last; their numbers, identifiers and targets beside them in a group."""
        stop = self.n_rows + len(values)
        if self._is_group:
            self._write_beside(ROW_NUMBERS, rows, stop)
        if ids is not None:
            self._write_beside(ROW_IDS, self._as_wide(encoded_ids(ids)), stop)
        if targets is not None:
            self._write_beside(RESPONSES, targets, stop)
        _longer(self.array, stop)[self.n_rows : stop] = values
        self.n_rows = stop

    def _write_beside(self, name: str, values: NDArray[Any], stop: int) -> None:
        if name not in self._beside:
            inner = values.shape[1:]
            self._beside[name] = create(self._path / name, (0, *inner), (self.array.chunks[0], *inner), values.dtype)
        _longer(self._beside[name], stop)[self.n_rows : stop] = values

    def _as_wide(self, ids: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Identifiers as wide as those before them, which become as wide as these."""
        known = self._beside.get(ROW_IDS)
        if known is None:
            return ids
        width = max(ids.shape[1], known.shape[1])
        if width > known.shape[1]:
            known.resize((known.shape[0], width))
        return np.pad(ids, ((0, 0), (0, width - ids.shape[1])))

    def finish(self, attributes: dict[str, Any]) -> "zarr.Array[Any]":
        """Tell that all that was written is there."""
        for one in self._beside.values():
            one.resize((self.n_rows, *one.shape[1:]))
        whole = _longer(self.array, self.n_rows)
        whole.update_attributes(attributes)
        return whole


def create(path: Path, shape: tuple[int, ...], chunks: tuple[int, ...], dtype: np.dtype[Any]) -> "zarr.Array[Any]":
    """A new array of checksummed chunks."""
    return zarr.create_array(
        LocalStore(path),
        shape=shape,
        chunks=chunks,
        dtype=dtype,
        # A chunk of zeros must exist on disk, or it could not be told from one that was never written.
        config={"write_empty_chunks": True},
        compressors=(BloscCodec(cname="lz4", shuffle="shuffle"), Crc32cCodec()),
    )


def is_array(path: Path) -> bool:
    """Whether a store is an array, and not a group of arrays."""
    return isinstance(zarr.open(LocalStore(path), mode="r"), zarr.Array)


def opened(path: Path) -> "zarr.Array[Any]":
    """An array that is there, to write to."""
    found = zarr.open_array(LocalStore(path), mode="r+")
    return _array(found.metadata, found.store_path)


def _longer(array: "zarr.Array[Any]", n_rows: int) -> "zarr.Array[Any]":
    """The array as it will be, when its metadata say so."""
    return _array(array.metadata.update_shape((n_rows, *array.shape[1:])), array.store_path)


def _array(metadata: Any, place: Any) -> "zarr.Array[Any]":
    config = dataclasses.replace(zarr.core.array_spec.ArrayConfig.from_dict({}), write_empty_chunks=True)
    return zarr.Array(zarr.AsyncArray(metadata=metadata, store_path=place, config=config))


def encoded_ids(ids: Sequence[str]) -> NDArray[np.uint8]:
    """Texts as rows of UTF-8 bytes, with zeros after them.

    Raises
    ------
    InvalidData
        One is too long.
    """
    words = [word.encode() for word in ids]
    width = max(ID_BYTES, *map(len, words)) if words else ID_BYTES
    if width > MOST_ID_BYTES:
        longest = max(ids, key=lambda word: len(word.encode()))
        raise InvalidData(
            f"the identifier {longest[:40]!r}… has {width} bytes, and {MOST_ID_BYTES} at most are kept: choose another "
            "column (--id)"
        )
    return np.frombuffer(b"".join(word.ljust(width, b"\0") for word in words), np.uint8).reshape(len(words), width)
