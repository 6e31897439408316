"""Records as files of a folder, replaced atomically and durably, also between hosts that share the file system.

A record that is only written is one file, ``NAME.record``: a complete temporary file beside it is synchronized and
renamed. There is no rename that fails if the target has changed meanwhile, and locks of a file die, hang or stay on one
host. So a record that is created or replaced conditionally is a folder of numbered versions, of which the highest
counts; ``link``, which fails if the name exists and is atomic over NFS too, puts the next number in its place. Exactly
one of many writers that know version 7 becomes version 8, there is no moment in which a process may die or be stopped
and leave something locked, and a writer that wakes late finds its number taken.
"""

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator

import numpy as np

from daskrr.engine.frames import IDENTITY, Bytes, Frame, identity_of
from daskrr.errors import StoreFailed

SUFFIX = ".record"
# No name of a record has a plus sign, so nothing below is ever taken for one.
VERSIONS = "+versions"
PART = re.compile(r"(?!\.{1,2}$)(?!.*\.record$)[a-z0-9._-]{1,200}")
OURS = re.compile(r"[a-z0-9._-]+\.record(\+versions|\+[0-9a-f]{16})?")
# Old versions stay until this many have followed, so that a writer between its link and its check still sees them.
KEPT = 16
PASSING = {errno.ENOENT, errno.ESTALE, errno.EIO, errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT}
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS}


class Folder:
    """Records below a local path."""

    failures: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, root: str) -> None:
        self.root = root

    def get(self, name: str) -> tuple[Bytes, str] | None:
        """The stored bytes and their version."""
        while (current := self._current(name)) is not None:
            number, path = current
            with contextlib.suppress(FileNotFoundError):  # deleted, or followed by many, since we looked
                stored = _read(path)
                return stored, _version(number, identity_of(stored))
        return None

    def put(self, name: str, frame: Frame) -> None:
        """Replace the record, whatever is there."""
        path = self._path(name)
        if not _exists(path + VERSIONS):
            with _written(path, frame) as temporary:
                os.replace(temporary, path)
                sync_folder(os.path.dirname(path))
        # Looked at again: whoever makes the first version reads the file only after this folder is there.
        while _exists(path + VERSIONS):
            number, identity = self._current_version(name)
            if self._link(name, frame, number + 1, identity):
                return

    def put_new(self, name: str, frame: Frame) -> bool:
        """Write the record if there is none."""
        if self._current(name) is None:
            _make_folder(self._path(name) + VERSIONS)
        if self._current(name) is not None:
            return self._is_first(name, frame)
        return self._link(name, frame, 1, "")

    def put_over(self, name: str, frame: Frame, expected: str) -> bool:
        """Replace the record if it has the expected version still."""
        if self._current(name) is None:
            return False
        _make_folder(self._path(name) + VERSIONS)
        number, identity = self._current_version(name)
        if expected != _version(number, identity):
            return identity == frame.identity
        return self._link(name, frame, number + 1, identity)

    def names(self, prefix: str) -> list[str]:
        """Names of the record ``prefix`` and of all below it."""
        itself = {prefix} if prefix and self._current(prefix) else set()
        return sorted(itself | set(_names_below(self.root, prefix)))

    def delete(self, prefix: str) -> None:
        """Delete the record ``prefix``, all below it and what killed writers left."""
        path = os.path.join(self.root, prefix)
        if prefix:
            stem = os.path.basename(path) + SUFFIX
            _discard([one for one in _entries(os.path.dirname(path)) if one.name.partition("+")[0] == stem])
        _clear(path)

    def may_pass(self, error: Exception) -> bool:
        """Whether trying again may help."""
        return isinstance(error, OSError) and error.errno in PASSING

    def reason(self, error: Exception) -> str:
        """What went wrong, in words."""
        return str(getattr(error, "strerror", None) or error)

    def _path(self, name: str) -> str:
        return os.path.join(self.root, *name.split("/")) + SUFFIX

    def _current(self, name: str) -> tuple[int, str] | None:
        """Number and path of the version that counts; 0 is the file that was only written."""
        path = self._path(name)
        numbers = _numbers(path + VERSIONS)
        if numbers:
            return numbers[-1], _numbered(path, numbers[-1])
        return (0, path) if _exists(path) else None

    def _current_version(self, name: str) -> tuple[int, str]:
        """Number and identity of the version that counts; 0 and nothing if there is none."""
        while (current := self._current(name)) is not None:
            with contextlib.suppress(FileNotFoundError):
                return current[0], _identity(current[1])
        return 0, ""

    def _is_first(self, name: str, frame: Frame) -> bool:
        """Whether this very frame was created here by a try whose answer got lost."""
        with contextlib.suppress(FileNotFoundError):
            return _identity(_numbered(self._path(name), 1)) == frame.identity
        return False

    def _link(self, name: str, frame: Frame, number: int, follows: str) -> bool:
        """Make the frame the version ``number``, if nobody else has and it follows the version that it should."""
        path = self._path(name)
        target = _numbered(path, number)
        with _written(path, frame) as temporary:
            if not _link_new(temporary, target):
                return _identity(target) == frame.identity
            sync_folder(path + VERSIONS)
        if number > 1 and not _follows(_numbered(path, number - 1), follows):
            _remove(target)
            return False
        _forget_old(path, number)
        return True


def _version(number: int, identity: str) -> str:
    return f"{number}-{identity}"


def _numbered(path: str, number: int) -> str:
    return os.path.join(path + VERSIONS, f"{number:012d}")


def _numbers(folder: str) -> list[int]:
    return sorted(int(entry.name) for entry in _entries(folder) if entry.name.isdecimal())


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """What a folder holds, in the order of names; nothing if it is not there."""
    try:
        return sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:
        return []


def _exists(path: str) -> bool:
    """Whether something is there; unlike ``os.path.exists``, a store that fails is not a store without it."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True


def _read(path: str) -> Bytes:
    with open(path, "rb", buffering=0) as file:
        stored = np.empty(os.fstat(file.fileno()).st_size, np.uint8)
        done = 0
        while done < stored.nbytes and (count := file.readinto(stored[done:].data)):
            done += count
    return stored[:done]


def _identity(path: str) -> str:
    with open(path, "rb", buffering=0) as file:
        return identity_of(np.frombuffer(file.read(IDENTITY.stop), np.uint8))


def _follows(predecessor: str, identity: str) -> bool:
    """Whether the version before is there.

    They are removed from the lowest on. If it is gone, our number may have been taken, followed and removed long ago,
    and what we linked is no successor of anything.
    """
    try:
        return _identity(predecessor) == identity
    except FileNotFoundError:
        return False


def _forget_old(path: str, newest: int) -> None:
    """Remove old versions from the lowest on; the first is emptied, since its name says that the record was created."""
    for number in _numbers(path + VERSIONS):
        if number > newest - KEPT:
            return
        old = _numbered(path, number)
        if number > 1:
            _remove(old)
        elif os.path.getsize(old):
            _empty(old)


def _empty(path: str) -> None:
    temporary = f"{path}+{secrets.token_hex(8)}"
    with open(temporary, "xb"):
        os.replace(temporary, path)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


@contextlib.contextmanager
def _written(path: str, frame: Frame) -> Iterator[str]:
    """A complete and synchronized file beside ``path``, for as long as the block lasts."""
    _make_folder(os.path.dirname(path))
    temporary = f"{path}+{secrets.token_hex(8)}"
    try:
        with open(temporary, "xb") as file:
            file.writelines(part.data for part in frame.parts)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        _remove(temporary)


def write_file(path: str, content: bytes) -> None:
    """Write a small file durably and whole, in place of any other."""
    temporary = f"{path}+{secrets.token_hex(8)}"
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        _remove(temporary)
    sync_folder(os.path.dirname(path))


def _link_new(existing: str, target: str) -> bool:
    """Give a file one more name unless the name is taken."""
    try:
        os.link(existing, target)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        raise StoreFailed(
            f"the file system of {target} has no hard links, by which alone two jobs can be kept apart. "
            "Put the records on another."
        ) from None
    return True


def _make_folder(folder: str) -> None:
    """Make a folder and those above it, durably."""
    if os.path.isdir(folder):
        return
    above = os.path.dirname(folder)
    _make_folder(above)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
    sync_folder(above)


def sync_folder(folder: str | os.PathLike) -> None:
    """Make the names in a folder durable, where the file system can."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def _names_below(root: str, folder: str) -> Iterator[str]:
    for entry in _entries(os.path.join(root, folder)):
        stored = entry.name.removesuffix(VERSIONS)
        name = stored.removesuffix(SUFFIX)
        if not PART.fullmatch(name):
            continue
        inside = entry.is_dir(follow_symlinks=False)
        if (name, inside) == (entry.name, True):
            yield from _names_below(root, os.path.join(folder, name))
        elif name != stored and (_numbers(entry.path) if stored != entry.name else not inside):
            yield os.path.join(folder, name)


def _clear(folder: str) -> None:
    """Delete what is ours below a folder, and the folders that are empty then; other files stay."""
    entries = _entries(folder)
    _discard([entry for entry in entries if OURS.fullmatch(entry.name)])
    for entry in entries:
        if PART.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            _clear(entry.path)
            with contextlib.suppress(OSError):
                os.rmdir(entry.path)


def _discard(entries: list[os.DirEntry[str]]) -> None:
    """Delete records; versions all at once, and after the file that they hide."""
    for entry in entries:
        if not entry.is_dir(follow_symlinks=False):
            _remove(entry.path)
        elif "+" in entry.name:
            aside = f"{entry.path.rpartition('+')[0]}+{secrets.token_hex(8)}"
            with contextlib.suppress(FileNotFoundError):
                os.rename(entry.path, aside)
            shutil.rmtree(aside, ignore_errors=True)
    if entries:
        sync_folder(os.path.dirname(entries[0].path))
