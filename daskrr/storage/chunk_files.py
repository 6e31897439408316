"""Chunks in files of the local disk, decoded by the very thread that asks for them.

Zarr hands every chunk through its one event loop to other threads and back, and copies what it gets. Where many threads
read at once they wait for that, and not for the disk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numcodecs import Blosc, GZip, Zstd
from numpy.typing import NDArray
from zarr.codecs import BytesCodec
from zarr.storage import LocalStore

from daskrr.numerics.checksum import crc32c

CHECKSUM_BYTES = 4

Content = bytes | NDArray[np.uint8]
Decode = Callable[[Content], Content]


def _has_whole_rows(array: zarr.Array) -> bool:
    try:
        return array.chunks[1:] == array.shape[1:]
    except NotImplementedError:  # of a grid that is not regular
        return False


def _checked(packed: Content) -> Content:
    content, end = np.split(np.frombuffer(packed, np.uint8), [-CHECKSUM_BYTES])
    found, stored = crc32c(content), int.from_bytes(end.tobytes(), "little")
    if len(end) < CHECKSUM_BYTES or found != stored:
        raise ValueError(f"the checksum of a chunk is {found:08x}, and {stored:08x} is stored with it")
    return content


DECODERS: dict[str, Decode] = {
    "zstd": Zstd().decode, "blosc": Blosc().decode, "gzip": GZip().decode, "crc32c": _checked,
}  # fmt: skip


@dataclass(frozen=True)
class ChunkFiles:
    """The files of an array whose chunks have whole rows, each behind codecs that are known here."""

    array: zarr.Array
    folder: Path
    stored: np.dtype
    decoders: tuple[Decode, ...]

    @classmethod
    def of(cls, array: zarr.Array) -> "ChunkFiles | None":
        """Those of an array, or None if Zarr has to read it: from another store, in shards, or by other codecs."""
        metadata, store = array.metadata, array.store
        # Of no kind that was made of it: that may have found more to do than to read a file.
        if type(store) is not LocalStore or metadata.zarr_format != 3:
            return None
        layout, *packing = metadata.codecs
        names = [str(codec.to_dict()["name"]) for codec in packing]
        if not isinstance(layout, BytesCodec) or not DECODERS.keys() >= set(names) or not _has_whole_rows(array):
            return None
        about: Any = layout.to_dict()
        stored = array.dtype.newbyteorder(about.get("configuration", {}).get("endian", "little"))
        return cls(array, Path(store.root) / array.path, stored, tuple(DECODERS[name] for name in reversed(names)))

    def read(self, start: int, stop: int) -> NDArray:
        """Rows ``start`` to ``stop``, which cannot be written to.

        Raises
        ------
        FileNotFoundError
            A chunk was never written.
        """
        unit = self.array.chunks[0]
        parts = [
            self._decoded(first // unit)[max(start - first, 0) : stop - first]
            for first in range(start - start % unit, stop, unit)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _decoded(self, number: int) -> NDArray:
        place = (number, *(0 for _ in self.array.shape[1:]))
        content: Content = (self.folder / self.array.metadata.encode_chunk_key(place)).read_bytes()
        for decode in self.decoders:
            content = decode(content)
        chunk = np.frombuffer(content, self.stored).reshape(self.array.chunks)
        return chunk.astype(self.array.dtype, copy=False)
