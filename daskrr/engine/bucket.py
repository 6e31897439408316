"""Records as objects of an S3-compatible store; endpoint, region and credentials come from the environment alone.

An object appears whole or not at all. Conditional requests, ``If-None-Match: *`` and ``If-Match``, create and replace;
a store that ignores them is found out before anything relies on it.
"""

import os
import re
import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np

from daskrr.engine.addresses import redact
from daskrr.engine.folder import PART, SUFFIX
from daskrr.engine.frames import Bytes, Frame, identity_of
from daskrr.errors import InvalidParameter, StoreFailed

ADDRESS = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])((?:/[\w.=,+:-]+)*)/?", re.ASCII)
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
# A heartbeat that hangs must fail early enough for another one within the usual lease of a minute.
REQUEST_SECONDS = 30
# Requests that time out and too many at once; all other answers of this kind stay the same.
PASSING_REFUSALS = {"408", "409", "425", "429"}


class Bucket:
    """Records below ``s3://bucket/prefix``."""

    def __init__(self, url: str) -> None:
        # Without tries of its own, so that a heartbeat that fails is told at once.
        self._store = connect(url, retry_config={"max_retries": 0})
        self._library = import_obstore()
        self._checked = False
        errors = self._library.exceptions
        self.failures: tuple[type[Exception], ...] = (OSError, errors.BaseError)
        self._refusals = (errors.AlreadyExistsError, errors.PreconditionError)

    def get(self, name: str) -> tuple[Bytes, str] | None:
        """The stored bytes and their version."""
        try:
            found = self._library.get(self._store, name + SUFFIX)
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

    def delete(self, prefix: str) -> None:
        """Delete the record ``prefix`` and all below it."""
        keys = [f"{name}{SUFFIX}" for name in self._names_below(prefix)]
        keys += [prefix + SUFFIX] if prefix else []
        if keys:
            self._library.delete(self._store, keys)

    def may_pass(self, error: Exception) -> bool:
        """Whether trying again may help."""
        errors = self._library.exceptions
        if isinstance(error, self._refusals):
            return True
        refused = re.search(r"status code: (4\d\d)", str(error))
        return isinstance(error, (errors.GenericError, errors.JoinError)) and (
            refused is None or refused[1] in PASSING_REFUSALS
        )

    def reason(self, error: Exception) -> str:
        """What went wrong, in words; the answer of the store may quote the request and its key."""
        text = str(error)
        status = re.search(r"status code: (\d+[\w ]*)", text)
        code = re.search(r"<Code>(\w+)</Code>", text)
        if status:
            return f"{status[1].strip()} ({code[1]})" if code else status[1].strip()
        return redact(text.partition("\n")[0])[:300]

    def _has(self, name: str) -> bool:
        try:
            self._library.head(self._store, name + SUFFIX)
        except FileNotFoundError:
            return False
        return True

    def _send(self, name: str, frame: Frame, mode: Any) -> None:
        self._library.put(self._store, name + SUFFIX, frame.parts, mode=mode, use_multipart=False)

    def _settle(self, name: str, frame: Frame, mode: Any, expected: str | None) -> bool:
        """Send on a condition; if refused, look whether a try before, whose answer got lost, was not."""
        try:
            self._send(name, frame, mode)
        except (FileNotFoundError, *self._refusals):
            found = self.get(name)
            if found is None and expected is not None:
                return False
            if found is None or found[1] == expected:  # refused for a request under way that came to nothing
                raise
            return identity_of(found[0]) == frame.identity
        return True

    def _names_below(self, prefix: str) -> Iterator[str]:
        for batch in self._library.list(self._store, prefix or None):
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
            self._library.put(self._store, key, b"", mode="create", use_multipart=False)
            self._library.put(self._store, key, b"", mode="create", use_multipart=False)
        except self._refusals:
            self._checked = True
        finally:
            self._library.delete(self._store, key)
        if not self._checked:
            raise StoreFailed(
                "the store ignores conditional requests (If-None-Match), by which alone two jobs can be kept apart. "
                "Put the records on a local or shared folder, or on a store that heeds them."
            )


def connect(url: str, **settings: Any) -> Any:
    """The objects below ``s3://bucket/prefix``; pickled, they are their address without any credentials.

    Raises
    ------
    InvalidParameter
        The address is of another kind, or holds a user name, password or query.
    """
    found = ADDRESS.fullmatch(url)
    if found is None or {".", ".."} & set(url.split("/")):
        # The address is not repeated: what is wrong with it may be that it holds a secret.
        raise InvalidParameter(
            "an address on S3 looks like s3://bucket/prefix, of plain letters, digits and ._=,+:-, without user name, "
            "password or query. Credentials are read from the environment (AWS_ACCESS_KEY_ID, ...)."
        )
    plain = any(os.environ.get(name, "").startswith("http://") for name in ENDPOINTS)
    options = {"allow_http": plain, "timeout": f"{REQUEST_SECONDS}s"}
    prefix = found[2].strip("/") or None
    return import_obstore().store.S3Store(found[1], prefix=prefix, client_options=options, **settings)


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
        raise InvalidParameter("s3:// needs obstore, which is not installed: pip install 'daskrr[s3]'") from None
    return obstore
