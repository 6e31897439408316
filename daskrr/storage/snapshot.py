"""One generation of an output as a Zarr store: what its manifest says, and chunks; nothing else is believed."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import zarr
from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.storage import WrapperStore

from daskrr.errors import InvalidData
from daskrr.storage.zarr_arrays import METADATA


class Snapshot(WrapperStore[Store]):
    """A store that has the metadata that were committed, whatever is stored beside the chunks.

    Parameters
    ----------
    store
        Where the chunks are.
    folder
        Key of the generation there.
    metadata
        What was committed, by key.
    groups
        Folders of groups that have another name there.
    name
        The output, for people.
    """

    def __init__(
        self, store: Store, folder: str, metadata: Mapping[str, str], groups: Mapping[str, str], name: str
    ) -> None:
        super().__init__(store)
        self._folder, self._metadata, self._groups, self._name = folder, dict(metadata), dict(groups), name

    def _with_store(self, store: Store) -> "Snapshot":
        return Snapshot(store, self._folder, self._metadata, self._groups, self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        return Snapshot, (self._store, self._folder, self._metadata, self._groups, self._name)

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Read one key of the generation that was opened."""
        prototype = default_buffer_prototype() if prototype is None else prototype
        if key.rpartition("/")[2] == METADATA:
            text = self._metadata.get(key)
            return None if text is None else prototype.buffer.from_bytes(text.encode())
        if "c" not in key.split("/"):
            return None
        first, _, rest = key.partition("/")
        chunk = await self._store.get(f"{self._folder}/{self._groups.get(first, first)}/{rest}", prototype, byte_range)
        if chunk is None:
            raise InvalidData(
                f"the chunk {key} of {self._name} is gone: its generation is no longer kept, since others have been "
                "published, or it is damaged. Open it again; daskrr verify tells what is damaged."
            )
        return chunk

    async def exists(self, key: str) -> bool:
        """Whether something is stored under a key."""
        return key in self._metadata if key.endswith(METADATA) else await self._store.exists(f"{self._folder}/{key}")

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Names of the arrays and groups in a group."""
        start = f"{prefix.rstrip('/')}/" if prefix else ""
        for name in sorted(
            {key.removeprefix(start).partition("/")[0] for key in self._metadata if key.startswith(start)}
        ):
            yield name


def open_snapshot(
    store: Store, folder: str, metadata: Mapping[str, str], groups: Mapping[str, str], name: str
) -> zarr.Group:
    """The group of one generation."""
    return zarr.open_group(Snapshot(store, folder, metadata, groups, name), mode="r", zarr_format=3)
