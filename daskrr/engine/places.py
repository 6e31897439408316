"""Where arrays are kept: below a local path, or below ``s3://bucket/prefix``.

Arrays of an unfinished job have no metadata on storage, so that no Zarr reader finds them; :func:`array_at` makes one
from metadata that are kept elsewhere. What is finished is moved to where readers look for it.
"""

import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import zarr
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore, ObjectStore, StorePath

from daskrr.engine.addresses import is_local, is_s3, locate, redact
from daskrr.engine.bucket import connect, import_obstore
from daskrr.engine.folder import sync_folder, write_file
from daskrr.engine.patience import patiently
from daskrr.errors import InvalidData, InvalidParameter

METADATA = "zarr.json"


class Place(Protocol):
    """Keys and bytes below one address; travels by its address alone."""

    address: str

    @property
    def store(self) -> Any:
        """As Zarr sees it."""

    def move(self, source: str, target: str) -> None:
        """Make what is below ``source`` all that is below ``target``; harmless if it was done before."""

    def delete(self, name: str) -> None:
        """Delete a key or all below it."""

    def write(self, key: str, content: bytes) -> None:
        """Write a few bytes, whole and for good."""

    def write_new(self, key: str, content: bytes) -> None:
        """Write a few bytes unless there are some."""

    def below(self, prefix: str) -> list[str]:
        """First parts of all keys below a prefix."""

    def remove_empty(self) -> None:
        """Remove the place itself, if nothing is there."""

    def settle(self, keys: Iterable[str]) -> None:
        """Have what was written reach the disk."""


class FolderPlace:
    """A local folder."""

    def __init__(self, address: str) -> None:
        self.address = address

    @property
    def store(self) -> LocalStore:
        """A store of files, each written whole."""
        return LocalStore(self.address)

    def _path(self, name: str) -> Path:
        """Where a name is; it may come from a record or a listing, and neither dots nor links may lead out of here.

        Raises
        ------
        InvalidData
            They do.
        """
        path = Path(self.address, name)
        if ".." in Path(name).parts or not path.parent.resolve().is_relative_to(Path(self.address).resolve()):
            raise InvalidData(f"{name!r} leads out of {self.address}. Remove it there, or name another output.")
        return path

    def move(self, source: str, target: str) -> None:
        """Rename the folder; the one that it replaces is moved aside first."""
        new, old = self._path(source), self._path(target)
        if not new.exists():
            return
        aside = new.parent / f"replaced-{uuid.uuid4().hex}"
        if old.exists():
            os.replace(old, aside)
        os.replace(new, old)
        sync_folder(old.parent)
        shutil.rmtree(aside, ignore_errors=True)

    def delete(self, name: str) -> None:
        """Delete a file or folder."""
        path = self._path(name)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            # Below a file there is nothing: one killed while it wrote leaves files that are no arrays.
            with suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()

    def write(self, key: str, content: bytes) -> None:
        """Write a file and put it in its place by a rename."""
        write_file(str(self._path(key)), content)

    def write_new(self, key: str, content: bytes) -> None:
        """Write a file unless there is one."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            self.write(key, content)

    def below(self, prefix: str) -> list[str]:
        """Names in the folder."""
        folder = Path(self.address, prefix)
        return sorted(os.listdir(folder)) if folder.is_dir() else []

    def remove_empty(self) -> None:
        """Remove the folder."""
        with suppress(OSError):
            os.rmdir(self.address)

    def settle(self, keys: Iterable[str]) -> None:
        """Synchronize files and the folders that name them."""
        for key in keys:
            path = Path(self.address, key)
            with path.open("rb") as file:
                os.fsync(file.fileno())
            sync_folder(path.parent)


class BucketPlace:
    """A prefix of an S3-compatible store."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._objects = connect(address)
        self._library = import_obstore()

    def __reduce__(self) -> tuple[type["BucketPlace"], tuple[str]]:
        return BucketPlace, (self.address,)

    @property
    def store(self) -> ObjectStore:
        """A store of objects, each written whole."""
        return ObjectStore(self._objects)

    def move(self, source: str, target: str) -> None:
        """Copy all objects; those of the source stay until they are deleted, so that this can be repeated."""
        new = {key.removeprefix(f"{source}/") for key in self._keys(source)}
        if not new:
            return
        self._drop(key for key in self._keys(target) if key.removeprefix(f"{target}/") not in new)
        for key in sorted(new):
            copy = partial(self._library.copy, self._objects, f"{source}/{key}", f"{target}/{key}")
            patiently(copy, f"copy {key}")

    def delete(self, name: str) -> None:
        """Delete an object, or all below the name."""
        self._drop([name, *self._keys(name)])

    def write(self, key: str, content: bytes) -> None:
        """Write an object."""
        patiently(partial(self._library.put, self._objects, key, content), f"write {key}")

    def write_new(self, key: str, content: bytes) -> None:
        """Write an object; what would be there already is the same."""
        self.write(key, content)

    def below(self, prefix: str) -> list[str]:
        """First parts of all keys below a prefix."""
        look = partial(self._library.list_with_delimiter, self._objects, prefix or None)
        found = patiently(look, f"list {prefix or 'all'} of the bucket")
        keys = [*found["common_prefixes"], *(one["path"] for one in found["objects"])]
        return sorted(key.removeprefix(f"{prefix}/") for key in keys)

    def remove_empty(self) -> None:
        """Nothing to do: a prefix without objects is none."""

    def settle(self, keys: Iterable[str]) -> None:
        """An object that was written is there for good."""

    def _keys(self, prefix: str) -> list[str]:
        return list(patiently(partial(_listed, self._objects, prefix), f"list {prefix}"))

    def _drop(self, keys: Iterable[str]) -> None:
        doomed = list(keys)
        if doomed:
            patiently(partial(self._library.delete, self._objects, doomed), f"delete {doomed[0]} and others")


def open_place(address: str | os.PathLike) -> Place:
    """The place of an address.

    Raises
    ------
    InvalidParameter
        It is neither a path nor on S3.
    """
    name = locate(address)
    if is_local(name):
        return FolderPlace(name)
    if not holds_jobs(name):
        raise InvalidParameter(
            f"a job cannot be written to {redact(name)}: daskrr keeps two jobs apart on local or shared folders and "
            "on s3:// alone. Name an output there."
        )
    return BucketPlace(name)


def holds_jobs(address: str) -> bool:
    """Whether a job can be kept at an address: something there must be written only if nobody else has."""
    return is_local(address) or is_s3(address)


def zarr_store(address: str) -> Any:
    """What Zarr opens an address by."""
    return ObjectStore(connect(address)) if is_s3(address) else address


def read_key(store: Any, key: str) -> bytes | None:
    """What a store holds under a key; None if nothing."""
    found = sync(store.get(key, default_buffer_prototype()))
    return None if found is None else found.to_bytes()


def listing(store: Any, prefix: str) -> dict[str, tuple[int, str]] | None:
    """Size of all keys below a prefix, and what changes with their content; None of stores that do not tell."""
    if isinstance(store, LocalStore):
        root = Path(store.root)
        found = {str(path.relative_to(root)): path.stat() for path in (root / prefix).rglob("*") if path.is_file()}
        return {key: (about.st_size, str(about.st_mtime_ns)) for key, about in found.items()}
    if isinstance(store, ObjectStore):
        return patiently(partial(_listed, store.store, prefix), f"list {prefix or 'all'} of the bucket")
    return None


def _listed(objects: Any, prefix: str) -> dict[str, tuple[int, str]]:
    batches = import_obstore().list(objects, prefix or None)
    return {one["path"]: (one["size"], str(one["e_tag"])) for batch in batches for one in batch}


def blueprint(
    shapes: Mapping[str, tuple[int, ...]], chunk_rows: int, second: str = "ridge", store: Any = None, **dtypes: str
) -> zarr.Group:
    """A group with named arrays, one chunk per block; float64 unless said otherwise, ``second`` names columns.

    Without a store it is in memory, for its metadata alone.
    """
    group = zarr.open_group(MemoryStore() if store is None else store, mode="w")
    for name, shape in shapes.items():
        group.create_array(
            name,
            shape=shape,
            chunks=(min(chunk_rows, shape[0]), *shape[1:]),
            dtype=dtypes.get(name, "float64"),
            fill_value=-1 if name in dtypes else np.nan,
            compressors=(ZstdCodec(level=1), Crc32cCodec()),
            dimension_names=("row", second)[: len(shape)],
        )
    return group


def array_at(store: Any, path: str, like: Any) -> zarr.Array:
    """An array with the metadata of another, none of which are on storage."""
    return zarr.Array(zarr.AsyncArray(metadata=like.metadata, store_path=StorePath(store, path)))


def metadata_of(node: Any) -> str:
    """What is stored as the metadata of an array or group."""
    return node.metadata.to_buffer_dict(default_buffer_prototype())[METADATA].to_bytes().decode()


def chunk_key(array: zarr.Array, start: int) -> str:
    """Key of the chunk that begins with row ``start``; chunks hold all columns."""
    place = (start // array.chunks[0], *(0 for _ in array.shape[1:]))
    return f"{array.path}/{array.metadata.encode_chunk_key(place)}"


@dataclass(frozen=True)
class Staged:
    """Arrays of an unfinished job, and the place that they are in."""

    place: Place
    arrays: dict[str, zarr.Array]

    def settle(self, start: int) -> None:
        """Have the chunks of the block from ``start`` reach the disk, so that a record of them does not come first."""
        self.place.settle(chunk_key(array, start) for array in self.arrays.values())

    def read(self, start: int) -> dict[str, Any]:
        """The block from ``start`` of every array."""
        return {name: array[start : start + array.chunks[0]] for name, array in self.arrays.items()}

    def complete(self, starts: Iterable[int]) -> set[int]:
        """Those of the blocks whose chunks are all there, as far as names and sizes tell."""
        found: dict[str, tuple[int, str]] = {}
        for array in self.arrays.values():
            found |= listing(self.place.store, array.path) or {}
        there = {key for key, (size, _) in found.items() if size}
        return {start for start in starts if there.issuperset(chunk_key(one, start) for one in self.arrays.values())}
