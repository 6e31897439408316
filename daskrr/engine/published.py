"""Published scores as a store of one generation: whoever reads while they are exchanged is told so."""

import zarr
from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.storage import WrapperStore

from daskrr.engine.places import METADATA, read_key
from daskrr.errors import InvalidData


class Published(WrapperStore[Store]):
    """A store that refuses to read on once the metadata of its group is gone or another.

    A job takes that away before it touches any chunk, and no two jobs write the same.
    """

    def __init__(self, store: Store, metadata: bytes, name: str) -> None:
        super().__init__(store)
        self._metadata, self._name = metadata, name

    def _with_store(self, store: Store) -> "Published":
        return Published(store, self._metadata, self._name)

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:  # fmt: skip
        """Read one key, of the generation that was opened."""
        found = await self._store.get(key, prototype, byte_range)
        now = await self._store.get(METADATA, default_buffer_prototype())
        if now is None or now.to_bytes() != self._metadata:
            raise InvalidData(f"the scores at {self._name} were exchanged for others meanwhile. Open them again.")
        if found is None and "/c/" in key:
            raise InvalidData(f"the chunk {key} of {self._name} is gone. daskrr verify tells what else is.")
        return found


def of_one_generation(group: zarr.Group, name: str) -> zarr.Group:
    """The group as it is now, from which nothing else is ever read.

    Raises
    ------
    InvalidData
        It is being exchanged for another.
    """
    metadata = read_key(group.store, METADATA)
    if metadata is None:
        raise InvalidData(f"the scores at {name} are being exchanged for others. Open them again.")
    return zarr.open_group(Published(group.store, metadata, name), mode="r")
