"""Small durable records of a job: written whole or not at all, checksummed, created and replaced by one process only.

:class:`Records` names, encodes and checks; where the bytes go is the business of :mod:`daskrr.storage.medium`.
"""

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from daskrr.errors import DamagedRecord, InvalidData, InvalidParameter
from daskrr.storage.local import PART, SUFFIX
from daskrr.storage.medium import open_medium
from daskrr.storage.record_format import Bytes, decode, encode
from daskrr.storage.retry import insist
from daskrr.storage.urls import locate, redact

log = logging.getLogger("daskrr.records")

T = TypeVar("T")


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
        self._medium = open_medium(self.root)

    def __repr__(self) -> str:
        return f"Records({redact(self.root)!r})"

    def __reduce__(self) -> tuple[type["Records"], tuple[str]]:
        return Records, (self.root,)

    def write(self, name: str, content: Mapping[str, Any]) -> int:
        """Write a record in place of any other of this name; return its bytes.

        When this returns, the record survives a loss of power. Whenever the process dies, either the record that was
        there before is there, or this one.
        """
        frame = encode(name, content)
        self._attempt(f"write the {frame.nbytes} bytes of", name, lambda: self._medium.put(name, frame))
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
        found = self.peek(name)
        if found is None:
            return None
        stored, version = found
        try:
            return decode(name, stored), version
        except InvalidData as error:
            raise InvalidData(f"the record {name!r} of {redact(self.root)}: {error}") from None
        except ValueError as error:
            raise DamagedRecord(f"the record {name!r} of {redact(self.root)} is damaged: {error}.", name) from None

    def peek(self, name: str) -> tuple[Bytes, str] | None:
        """The bytes of a record, whole or not, and what :meth:`replace` needs to know of it."""
        return self._attempt("read", name, lambda: self._medium.get(name))

    def find(self, name: str) -> dict[str, Any] | None:
        """Read a record; None if there is none, or one that is damaged, which is logged."""
        try:
            return self.read(name)
        except DamagedRecord as error:
            log.warning("%s It counts as none.", error)
            return None

    def has(self, name: str) -> bool:
        """Whether there is a record, and it is whole."""
        return self.find(name) is not None

    def create(self, name: str, content: Mapping[str, Any]) -> bool:
        """Write a record unless there is one; whether this call did. Of many that try at once, one does."""
        frame = encode(name, content)
        return self._attempt(f"create the {frame.nbytes} bytes of", name, lambda: self._medium.put_new(name, frame))

    def replace(self, name: str, content: Mapping[str, Any], expected: str) -> bool:
        """Write a record if nobody has since ``expected`` was read; whether this call did.

        Of many that expect the same version, one succeeds, on one host, on hosts that share a file system with hard
        links, and on S3. False says that this content does not count now: either it never did, or the answer of the
        store got lost and others have replaced it since. A host that sees a shared folder late (NFS, for as long as
        attributes are cached) may read an old version, but not replace by it. A record that is replaced must not be
        deleted at the same time.
        """
        frame = encode(name, content)
        what = f"write the {frame.nbytes} bytes of a new"
        return self._attempt(what, name, lambda: self._medium.put_over(name, frame, expected))

    def write_while(self, condition: Callable[[], None], name: str, content: Mapping[str, Any]) -> None:
        """Write a record as long as ``condition`` does not raise, also if this process is stopped after it was asked.

        Whoever makes it untrue has to write the record then: that makes this too late.
        """
        done = False
        while not done:
            found = self.peek(name)
            condition()
            done = self.create(name, content) if found is None else self.replace(name, content, found[1])

    def names(self, prefix: str = "") -> list[str]:
        """Names of the record ``prefix`` and of those below it, sorted; all of them by default."""
        prefix = prefix.removesuffix("/")
        return self._attempt_all("list", prefix, lambda: self._medium.names(prefix))

    def delete(self, prefix: str) -> None:
        """Delete the record ``prefix`` and all below it, and what killed writers left; other files stay."""
        prefix = prefix.removesuffix("/")
        self._attempt_all("delete", prefix, lambda: self._medium.drop(prefix))

    def damaged(self, prefix: str = "") -> dict[str, str]:
        """What is wrong with records below a prefix, old versions of them too, by key."""
        stored = self._attempt_all("read all below", prefix, lambda: self._medium.stored(prefix))
        found = {key: _fault(name_of(key), content) for key, content in stored.items()}
        return {key: fault for key, fault in sorted(found.items()) if fault}

    def _attempt(self, what: str, name: str, work: Callable[[], T]) -> T:
        """Do ``work`` with a record, a few times if the store fails in a way that may pass."""
        check_name(name)
        return insist(work, f"{what} {name!r} in {redact(self.root)}")

    def _attempt_all(self, what: str, prefix: str, work: Callable[[], T]) -> T:
        """Do ``work`` with all records below a prefix, which may be none."""
        if prefix:
            check_name(prefix)
        return insist(work, f"{what} {prefix!r} in {redact(self.root)}")


def name_of(key: str) -> str:
    """Of the record that a key belongs to."""
    return key.partition(SUFFIX)[0]


def _fault(name: str, stored: Bytes) -> str:
    """What is wrong with a record; an old version that is empty has done its duty."""
    try:
        decode(name, stored)
    except (ValueError, InvalidData) as error:
        return str(error)
    return ""


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
