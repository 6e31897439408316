"""Where bytes are kept: one backend for files, one for S3, each under records and arrays alike."""

import os
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from daskrr.errors import InvalidParameter
from daskrr.storage.local import Files
from daskrr.storage.record_format import Bytes, Frame
from daskrr.storage.s3 import Bucket
from daskrr.storage.urls import is_local, is_s3, locate, redact


class Medium(Protocol):
    """Keys and bytes below one address; travels by its address alone.

    Whatever is written appears whole or not at all. A *record* has a version, by which it is created and replaced by
    one writer only; its name is no key.
    """

    address: str

    @property
    def store(self) -> Any:
        """As Zarr sees it."""

    def get(self, name: str) -> tuple[Bytes, str] | None:
        """The bytes of a record, and their version."""

    def put(self, name: str, frame: Frame) -> None:
        """Replace a record, whatever is there."""

    def put_new(self, name: str, frame: Frame) -> bool:
        """Write a record if there is none."""

    def put_over(self, name: str, frame: Frame, expected: str) -> bool:
        """Replace a record if it has the expected version still."""

    def names(self, prefix: str) -> list[str]:
        """Names of the record ``prefix`` and of all below it."""

    def drop(self, prefix: str) -> None:
        """Delete the record ``prefix``, all below it and what killed writers left; other files stay."""

    def stored(self, prefix: str) -> dict[str, Bytes]:
        """Everything that is kept of the records below a prefix, old versions too, by key."""

    def write(self, key: str, content: bytes, named: bool = True) -> None:
        """Write a few bytes for good; without ``named``, their name may be lost until :meth:`settle_tree`."""

    def place(self, key: str, content: Bytes) -> None:
        """Write bytes that a loss of power may take until :meth:`settle`."""

    def read(self, key: str) -> bytes | None:
        """What is stored under a key."""

    def keys(self, prefix: str) -> dict[str, tuple[int, str]]:
        """Sizes of all keys below a prefix, and what changes with their content."""

    def below(self, prefix: str) -> list[str]:
        """First parts of all keys below a prefix."""

    def copy(self, source: str, target: str) -> None:
        """Give the bytes of one key to another."""

    def move(self, source: str, target: str) -> bool:
        """Give a folder another name, which is free; False where it would have to be copied."""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete these keys, and folders that are empty then; those that are not there are no matter."""

    def settle(self, keys: Iterable[str]) -> None:
        """Have what was written reach the disk."""

    def settle_tree(self, prefix: str) -> None:
        """Have the names of all that is below a prefix reach the disk."""

    def has_links(self, folder: str) -> bool:
        """Whether a name can stand for another, tried out in a folder of ours."""

    def point(self, name: str, target: str) -> None:
        """Make a name stand for another, at once for all readers, in place of a link or a file."""

    def pointed(self, name: str) -> str | None:
        """What a name stands for; None if it is no link."""

    def remove_state(self, name: str, is_ours: Callable[[str], bool]) -> None:
        """Remove a folder of ours at once; ``is_ours`` is asked about it when nobody finds it any more."""

    def remove_root(self) -> None:
        """Remove the address itself, if nothing is there."""

    def clean(self, prefix: str) -> None:
        """Remove what killed writers left."""


def open_medium(address: str | os.PathLike) -> Medium:
    """The medium of an address.

    Raises
    ------
    InvalidParameter
        It is neither a path nor on S3.
    """
    name = locate(address)
    if is_local(name):
        return Files(name)
    if not is_s3(name):
        raise InvalidParameter(
            f"an output cannot be written to {redact(name)}: daskrr keeps two jobs apart on local or shared folders "
            "and on s3:// alone, where something can be written only if nobody else has. Name an output there."
        )
    return Bucket(name)


def can_hold(address: str) -> bool:
    """Whether an output can be at an address."""
    return is_local(address) or is_s3(address)
