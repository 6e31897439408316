"""Small durable records of a job: written whole or not at all, checksummed, created and replaced by one process only.

:class:`Records` names, encodes and checks; where the bytes go is the business of :mod:`daskrr.engine.folder` for local
paths and of :mod:`daskrr.engine.bucket` for ``s3://``. Failures that may pass are tried again here.
"""

import logging
import os
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from daskrr.engine.addresses import is_local, locate, redact
from daskrr.engine.bucket import Bucket
from daskrr.engine.folder import PART, Folder
from daskrr.engine.frames import Bytes, Frame, decode, encode
from daskrr.errors import DamagedRecord, DaskrrError, InvalidData, InvalidParameter, StoreFailed

LOGGER = logging.getLogger("daskrr.records")
PAUSES = (0.1, 0.4, 1.6)
# Of its own, so that the caller's random numbers stay as they are.
JITTER = random.SystemRandom()

T = TypeVar("T")


class Store(Protocol):
    """Where records are kept, as bytes."""

    failures: tuple[type[Exception], ...]

    def get(self, name: str) -> tuple[Bytes, str] | None: ...
    def put(self, name: str, frame: Frame) -> None: ...
    def put_new(self, name: str, frame: Frame) -> bool: ...
    def put_over(self, name: str, frame: Frame, expected: str) -> bool: ...
    def names(self, prefix: str) -> list[str]: ...
    def delete(self, prefix: str) -> None: ...
    def may_pass(self, error: Exception) -> bool: ...
    def reason(self, error: Exception) -> str: ...


class Records:
    """Records below a local path or an ``s3://`` address; nothing is created before the first is written.

    A record is a dict of nested dicts, lists, str, int, float, bool, None and real NumPy arrays. It is read as it was
    written, to the bit and in the same memory order; only tuples come back as lists. Names are plain words
    (``a-z 0-9 . _ -``) separated by slashes. Pickled, this is its address alone.

    Parameters
    ----------
    root
        A path, or ``s3://bucket/prefix``, whose credentials and endpoint the ``AWS_*`` variables hold.

    Raises
    ------
    InvalidParameter
        The address is of another kind, or holds a user name, password or query.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     records = Records(folder)
    ...     records.create("pass1/block-0", {"rows": [0, 100]}), records.create("pass1/block-0", {})
    ...     records.read("pass1/block-0"), records.names("pass1")
    (True, False)
    ({'rows': [0, 100]}, ['pass1/block-0'])
    """

    def __init__(self, root: str | os.PathLike) -> None:
        self.root = locate(root)
        self._store = _open_store(self.root)

    def __repr__(self) -> str:
        return f"Records({redact(self.root)!r})"

    def __reduce__(self) -> tuple[type["Records"], tuple[str]]:
        return Records, (self.root,)

    def write(self, name: str, content: Mapping[str, Any]) -> int:
        """Write a record in place of any other of this name; return its bytes.

        When this returns, the record survives a loss of power. Whenever the process dies, either the record that was
        there before is there, or this one.
        """
        frame = encode(content)
        self._attempt(f"write the {frame.nbytes} bytes of", name, lambda: self._store.put(name, frame))
        return frame.nbytes

    def read(self, name: str) -> dict[str, Any] | None:
        """Read a record; None if there is none.

        Raises
        ------
        DamagedRecord
            A byte is missing or not as it was written.
        """
        found = self.read_version(name)
        return None if found is None else found[0]

    def read_version(self, name: str) -> tuple[dict[str, Any], str] | None:
        """Read a record and what :meth:`replace` needs to know of it; None if there is none."""
        found = self._attempt("read", name, lambda: self._store.get(name))
        if found is None:
            return None
        stored, version = found
        try:
            return decode(stored), version
        except InvalidData as error:
            raise InvalidData(f"the record {name!r} of {redact(self.root)}: {error}") from None
        except ValueError as error:
            raise DamagedRecord(
                f"the record {name!r} of {redact(self.root)} is damaged: {error}. "
                "Restore it, or delete it and run again."
            ) from None

    def create(self, name: str, content: Mapping[str, Any]) -> bool:
        """Write a record unless there is one; whether this call did. Of many that try at once, one does."""
        frame = encode(content)
        return self._attempt("create", name, lambda: self._store.put_new(name, frame))

    def replace(self, name: str, content: Mapping[str, Any], expected: str) -> bool:
        """Write a record if nobody has since ``expected`` was read; whether this call did.

        Of many that expect the same version, one succeeds, on one host, on hosts that share a file system with hard
        links, and on S3. False says that this content does not count now: either it never did, or the answer of the
        store got lost and others have replaced it since. A host that sees a shared folder late (NFS, for as long as
        attributes are cached) may read an old version, but not replace by it. A record that is replaced must not be
        deleted at the same time.
        """
        frame = encode(content)
        return self._attempt("replace", name, lambda: self._store.put_over(name, frame, expected))

    def names(self, prefix: str = "") -> list[str]:
        """Names of the record ``prefix`` and of those below it, sorted; all of them by default."""
        prefix = prefix.removesuffix("/")
        return self._attempt("list", prefix, lambda: self._store.names(prefix))

    def delete(self, prefix: str) -> None:
        """Delete the record ``prefix`` and all below it, and what killed writers left; other files stay."""
        prefix = prefix.removesuffix("/")
        self._attempt("delete", prefix, lambda: self._store.delete(prefix))

    def _attempt(self, what: str, name: str, work: Callable[[], T]) -> T:
        """Do ``work``, a few times if the store fails in a way that may pass."""
        if name or what not in ("list", "delete"):
            check_name(name)
        place = f"{name!r} in {redact(self.root)}"
        pauses = iter(PAUSES)
        while True:
            try:
                return work()
            except DaskrrError:
                raise
            except self._store.failures as error:
                pause = next(pauses, None)
                if pause is None or not self._store.may_pass(error):
                    raise self._failure(what, place, error) from None
                LOGGER.warning("cannot %s %s, trying again: %s", what, place, self._store.reason(error))
                time.sleep(pause * JITTER.uniform(0.5, 1.5))

    def _failure(self, what: str, place: str, error: Exception) -> StoreFailed:
        failure = StoreFailed(f"cannot {what} {place}: {self._store.reason(error)}")
        failure.errno = getattr(error, "errno", None)
        return failure


def check_name(name: str) -> None:
    """Refuse names that are not plain words separated by slashes.

    Raises
    ------
    InvalidParameter
        An empty part, ``.`` or ``..``, other letters, more than 200 of them, or the ending ``.record``.
    """
    if not isinstance(name, str) or not all(PART.fullmatch(part) for part in name.split("/")):
        raise InvalidParameter(
            f"a record's name must be plain words (a-z 0-9 . _ -) separated by slashes, got {name!r}"
        )


def _open_store(root: str) -> Store:
    if is_local(root):
        return Folder(root)
    scheme = root.partition("://")[0]
    if scheme != "s3":
        raise InvalidParameter(
            f"records cannot be kept on {scheme}://: daskrr knows no way there to write one only if it is absent, so "
            "two jobs could share an output. Use a local or shared folder, or s3://bucket/prefix."
        )
    return Bucket(root)
