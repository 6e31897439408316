"""Objects of an S3-compatible store as a medium; endpoint, region and credentials come from the environment alone.

An object appears whole or not at all. Conditional requests, ``If-None-Match: *`` and ``If-Match``, create and replace;
a store that ignores them is found out before anything relies on it.
"""

import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from zarr.storage import ObjectStore

from daskrr.errors import InvalidParameter, StoreFailed, install
from daskrr.storage.local import PART, SUFFIX
from daskrr.storage.record_format import Bytes, Frame, identity_of

ADDRESS = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])((?:/[\w.=,+:-]+)*)/?", re.ASCII)
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
# A heartbeat that hangs must fail early enough for another one within the usual lease of a minute.
REQUEST_SECONDS = 30


class Bucket:
    """What is below ``s3://bucket/prefix``; see :class:`daskrr.storage.medium.Medium`."""

    def __init__(self, address: str) -> None:
        self.address = address
        # Without tries of its own, so that a heartbeat that fails is told at once.
        self._objects = connect(address, retry_config={"max_retries": 0})
        self._library = import_obstore()
        self._checked = False
        errors = self._library.exceptions
        self._refusals = (errors.AlreadyExistsError, errors.PreconditionError)

    def __reduce__(self) -> tuple[type["Bucket"], tuple[str]]:
        return Bucket, (self.address,)

    @property
    def store(self) -> ObjectStore:
        """A store of objects, each written whole."""
        return ObjectStore(self._objects)

    def get(self, name: str) -> tuple[Bytes, str] | None:
        """The stored bytes and their version."""
        try:
            found = self._library.get(self._objects, name + SUFFIX)
            return np.array(np.frombuffer(found.bytes(), np.uint8)), found.meta["e_tag"]
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise
            return None

    def put(self, name: str, frame: Frame) -> None:
        """Replace the record, whatever is there."""
        self._send(name, frame, "overwrite")

    def put_new(self, name: str, frame: Frame) -> bool:
        """Write the record if there is none."""
        self._require_conditions()
        return self._settle(name, frame, "create", None)

    def put_over(self, name: str, frame: Frame, expected: str) -> bool:
        """Replace the record if it has the expected version still."""
        self._require_conditions()
        return self._settle(name, frame, {"e_tag": expected}, expected)

    def names(self, prefix: str) -> list[str]:
        """Names of the record ``prefix`` and of all below it."""
        itself = [prefix] if prefix and self._has(prefix) else []
        return sorted([*itself, *self._names_below(prefix)])

    def drop(self, prefix: str) -> None:
        """Delete the record ``prefix`` and all below it."""
        own = [prefix + SUFFIX] if prefix else []
        self.delete([*(f"{name}{SUFFIX}" for name in self._names_below(prefix)), *own])

    def stored(self, prefix: str) -> dict[str, Bytes]:
        """All objects that records below a prefix consist of."""
        found = {key: self.read(key) for key in self.keys(prefix) if key.endswith(SUFFIX)}
        return {key: np.frombuffer(content, np.uint8) for key, content in found.items() if content is not None}

    def write(self, key: str, content: bytes, named: bool = True) -> None:
        """Write an object."""
        self._library.put(self._objects, key, content, use_multipart=False)

    def place(self, key: str, content: Bytes) -> None:
        """Write an object."""
        self._library.put(self._objects, key, content, use_multipart=False)

    def read(self, key: str) -> bytes | None:
        """The content of an object."""
        try:
            return bytes(self._library.get(self._objects, key).bytes())
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise
            return None

    def keys(self, prefix: str) -> dict[str, tuple[int, str]]:
        """Sizes and tags of all objects below a prefix."""
        return listed(self._objects, prefix)

    def below(self, prefix: str) -> list[str]:
        """First parts of all keys below a prefix."""
        found = self._library.list_with_delimiter(self._objects, prefix or None)
        keys = [*found["common_prefixes"], *(one["path"] for one in found["objects"])]
        return sorted(key.removeprefix(f"{prefix}/") for key in keys)

    def copy(self, source: str, target: str) -> None:
        """Have the store copy an object."""
        self._library.copy(self._objects, source, target)

    def move(self, source: str, target: str) -> bool:
        """Objects cannot be moved."""
        return False

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, in this order."""
        doomed = list(keys)
        if doomed:
            self._library.delete(self._objects, doomed)

    def settle(self, keys: Iterable[str]) -> None:
        """An object that was written is there for good."""

    def settle_tree(self, prefix: str) -> None:
        """There are no folders."""

    def has_links(self, folder: str) -> bool:
        """There are no links."""
        return False

    def point(self, name: str, target: str) -> None:
        """There are no links."""
        raise NotImplementedError

    def pointed(self, name: str) -> None:
        """There are no links."""

    def remove_state(self, name: str, is_ours: Callable[[str], bool]) -> None:
        """Delete all objects, the lease after all others, so that nobody takes it before."""
        keys = self.keys(name)
        if not is_ours(name):
            return
        last = {key for key in keys if key.endswith(f"/lease{SUFFIX}")}
        self.delete(keys.keys() - last)
        self.delete(last)

    def remove_root(self) -> None:
        """A prefix without objects is none."""

    def clean(self, prefix: str) -> None:
        """Killed writers leave nothing."""

    def _has(self, name: str) -> bool:
        try:
            self._library.head(self._objects, name + SUFFIX)
        except FileNotFoundError:
            return False
        return True

    def _send(self, name: str, frame: Frame, mode: Any) -> None:
        self._library.put(self._objects, name + SUFFIX, frame.parts, mode=mode, use_multipart=False)

    def _settle(self, name: str, frame: Frame, mode: Any, expected: str | None) -> bool:
        """Send on a condition; if refused, look whether a try before, whose answer got lost, was not."""
        try:
            self._send(name, frame, mode)
        except (FileNotFoundError, *self._refusals):
            stored = self.get(name)
            if stored is None and expected is not None:
                return False
            if stored is None or stored[1] == expected:  # refused for a request under way that came to nothing
                raise
            return identity_of(stored[0]) == frame.identity
        return True

    def _names_below(self, prefix: str) -> Iterator[str]:
        for batch in self._library.list(self._objects, prefix or None):
            for found in batch:
                name = found["path"].removesuffix(SUFFIX)
                if name != found["path"] and all(PART.fullmatch(part) for part in name.split("/")):
                    yield name

    def _require_conditions(self) -> None:
        """Try out, once, that the store refuses to create what is there."""
        if self._checked:
            return
        key = f"probe-{secrets.token_hex(8)}"
        try:
            self._library.put(self._objects, key, b"", mode="create", use_multipart=False)
            self._library.put(self._objects, key, b"", mode="create", use_multipart=False)
        except self._refusals:
            self._checked = True
        finally:
            self._library.delete(self._objects, key)
        if not self._checked:
            raise StoreFailed(
                "the store ignores conditional requests (If-None-Match), by which alone two jobs can be kept apart. "
                "Put the output on a local or shared folder, or on a store that heeds them."
            )


def listed(objects: Any, prefix: str) -> dict[str, tuple[int, str]]:
    """Sizes and tags of all objects below a prefix."""
    batches = import_obstore().list(objects, prefix or None)
    return {one["path"]: (one["size"], str(one["e_tag"])) for batch in batches for one in batch}


def connect(url: str, **settings: Any) -> Any:
    """The objects below ``s3://bucket/prefix``; pickled, they are their address without any credentials.

    Raises
    ------
    InvalidParameter
        The address is of another kind, or holds a user name, password or query.
    """
    match = ADDRESS.fullmatch(url)
    if match is None or {".", ".."} & set(url.split("/")):
        # The address is not repeated: what is wrong with it may be that it holds a secret.
        raise InvalidParameter(
            "an address on S3 looks like s3://bucket/prefix, of plain letters, digits and ._=,+:-, without user name, "
            "password or query. Credentials are read from the environment (AWS_ACCESS_KEY_ID, ...)."
        )
    plain = any(os.environ.get(name, "").startswith("http://") for name in ENDPOINTS)
    options = {"allow_http": plain, "timeout": f"{REQUEST_SECONDS}s"}
    prefix = match[2].strip("/") or None
    return import_obstore().store.S3Store(match[1], prefix=prefix, client_options=options, **settings)


def import_obstore() -> Any:
    """The library that speaks to the store.

    Raises
    ------
    InvalidParameter
        It is not installed.
    """
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError:
        raise InvalidParameter(f"s3:// needs obstore, which is not installed: {install('s3')}") from None
    return obstore
