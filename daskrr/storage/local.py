"""Files of a folder as a medium: each is replaced atomically and durably, also between hosts that share the folder.

A record that is only written is one file, ``NAME.record``: a complete temporary file beside it is synchronized and
renamed. There is no rename that fails if the target has changed meanwhile, and locks of a file die, hang or stay on one
host. So a record that is created or replaced conditionally is a folder of numbered versions, of which the highest
counts; ``link``, which fails if the name exists and is atomic over NFS too, puts the next number in its place. Exactly
one of many writers that know version 7 becomes version 8, there is no moment in which a process may die or be stopped
and leave something locked, and a writer that wakes late finds its number taken.
"""

import contextlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from zarr.storage import LocalStore

from daskrr import machine
from daskrr.errors import InvalidData, StoreFailed
from daskrr.storage.record_format import Bytes, Frame, identity_of
from daskrr.storage.versions import (
    VERSIONS,
    entries_of,
    follows,
    forget_old,
    identity_at,
    numbered,
    numbers_in,
    version_of,
)

SUFFIX = ".record"
PART = re.compile(r"(?!\.{1,2}$)(?!.*\.record$)[a-z0-9._-]{1,200}")
OURS = re.compile(r"[a-z0-9._-]+\.record(\+versions|\+[0-9a-f]{16})?")
# What writers of ours and of Zarr write to before they rename it.
TEMPORARY = re.compile(r".*(\+[0-9a-f]{16}|\.[0-9a-f]{32}\.partial)")

# A disk takes several files, and frees the room of several, in the time of one.
AT_ONCE = 16
_SEVERAL = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="daskrr-files")


class Files:
    """A local folder; see :class:`daskrr.storage.medium.Medium`."""

    def __init__(self, address: str) -> None:
        self.address = address

    @property
    def store(self) -> LocalStore:
        """A store of files, each written whole."""
        return LocalStore(self.address)

    def get(self, name: str) -> tuple[Bytes, str] | None:
        """The stored bytes and their version."""
        while (current := self._current(name)) is not None:
            number, path = current
            with contextlib.suppress(FileNotFoundError):  # deleted, or followed by many, since we looked
                stored = _read(path)
                return stored, version_of(number, identity_of(stored))
        return None

    def put(self, name: str, frame: Frame) -> None:
        """Replace the record, whatever is there."""
        path = self._path(name)
        if not _exists(path + VERSIONS):
            with _written(path, frame.parts) as temporary:
                os.replace(temporary, path)
                machine.sync_folder(os.path.dirname(path))
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
        if expected != version_of(number, identity):
            return identity == frame.identity
        return self._link(name, frame, number + 1, identity)

    def names(self, prefix: str) -> list[str]:
        """Names of the record ``prefix`` and of all below it."""
        itself = {prefix} if prefix and self._current(prefix) else set()
        return sorted(itself | set(_names_below(self.address, prefix)))

    def drop(self, prefix: str) -> None:
        """Delete the record ``prefix``, all below it and what killed writers left."""
        path = os.path.join(self.address, prefix)
        if prefix:
            stem = os.path.basename(path) + SUFFIX
            _discard([one for one in entries_of(os.path.dirname(path)) if one.name.partition("+")[0] == stem])
        if not os.path.islink(path):  # what a link leads to is not ours
            _clear(path)
            with contextlib.suppress(OSError):
                os.rmdir(path)

    def stored(self, prefix: str) -> dict[str, Bytes]:
        """All files that records below a prefix consist of, but for a first version that was emptied."""
        files = {}
        for key, (size, _) in self.keys(prefix).items():
            emptied = not size and key.endswith(numbered("", 1)) and len(self.below(os.path.dirname(key))) > 1
            ours = key.endswith(SUFFIX) or f"{SUFFIX}{VERSIONS}/" in key
            if ours and not emptied and not any(map(TEMPORARY.fullmatch, key.split("/"))):
                with contextlib.suppress(FileNotFoundError):
                    files[key] = _read(os.path.join(self.address, key))
        return files

    def write(self, key: str, content: bytes, named: bool = True) -> None:
        """Write a file and put it in its place by a rename."""
        path = str(self._inside(key))
        if not named:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        with _written(path, [np.frombuffer(content, np.uint8)]) as temporary:
            os.replace(temporary, path)
            if named:
                machine.sync_folder(os.path.dirname(path))

    def place(self, key: str, content: Bytes) -> None:
        """Write a file and rename it; nothing is synchronized."""
        path = str(self._inside(key))
        temporary = f"{path}+{secrets.token_hex(8)}"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            with open(temporary, "xb") as file:
                file.write(content.data)
            os.replace(temporary, path)
        except BaseException:
            _remove(temporary)
            raise

    def read(self, key: str) -> bytes | None:
        """The content of a file."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return self._inside(key).read_bytes()
        return None

    def keys(self, prefix: str) -> dict[str, tuple[int, str]]:
        """Sizes and times of all files below a folder; links among them are not followed."""
        return files_below(self.address, prefix)

    def below(self, prefix: str) -> list[str]:
        """Names in the folder."""
        folder = Path(self.address, prefix)
        return sorted(os.listdir(folder)) if folder.is_dir() else []

    def copy(self, source: str, target: str) -> None:
        """Copy a file."""
        content = self.read(source)
        if content is None:
            raise FileNotFoundError(source)
        self.write(target, content)

    def move(self, source: str, target: str) -> bool:
        """Rename a folder."""
        for folder, _, _ in os.walk(self._inside(target), topdown=False):
            with contextlib.suppress(OSError):  # folders that a loss of power has emptied
                os.rmdir(folder)
        if self._inside(source).exists():
            os.replace(self._inside(source), self._inside(target))
        return True

    def delete(self, keys: Iterable[str]) -> None:
        """Delete files and links, and folders that are empty then."""
        folders = set()
        for key in keys:
            path = self._inside(key)
            if any(Path(self.address, above).is_symlink() for above in Path(key).parents):
                raise InvalidData(f"{key!r} of {self.address} is behind a link, and nothing there is deleted.")
            # Below a file there is nothing: one killed while it wrote leaves files that are no folders.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()
            folders |= {folder.as_posix() for folder in Path(key).parents if folder != Path(".")}
        for name in sorted(folders, key=len, reverse=True):
            with contextlib.suppress(OSError):
                os.rmdir(self._inside(name))

    def settle(self, keys: Iterable[str]) -> None:
        """Synchronize files, several at a time, and then the folders that name them."""
        paths = [os.path.join(self.address, key) for key in keys]
        _for_several(_sync_content, paths)
        for folder in sorted({os.path.dirname(path) for path in paths}):
            machine.sync_folder(folder)

    def settle_tree(self, prefix: str) -> None:
        """Synchronize all folders below one, and those above it."""
        for folder, _, _ in os.walk(Path(self.address, prefix), topdown=False):
            machine.sync_folder(folder)
        for above in (*Path(prefix).parents, Path("..")):
            machine.sync_folder(Path(self.address, above))

    def has_links(self, folder: str) -> bool:
        """Whether symbolic links can be made."""
        link = os.path.join(self.address, folder, f"link+{secrets.token_hex(8)}")
        made = machine.make_link(self.address, link)
        _remove(link)
        return made

    def point(self, name: str, target: str) -> None:
        """Put a link in place of another, or of a file."""
        if self.pointed(name) != target:
            link = str(self._inside(name))
            machine.make_link(os.path.join(self.address, target), link)
            machine.sync_folder(os.path.dirname(link))

    def pointed(self, name: str) -> str | None:
        """Where a link leads to."""
        path = self._inside(name)
        if not path.is_symlink():
            return None
        return os.path.relpath(os.path.join(path.parent, os.readlink(path)), self.address)

    def remove_state(self, name: str, is_ours: Callable[[str], bool]) -> None:
        """Move the folder aside, so that it is gone at once, and delete it then; back, should it be another's."""
        path = self._inside(name)
        aside = path.with_name(f"{name}+{secrets.token_hex(8)}")
        try:
            path.rename(aside)
        except FileNotFoundError:
            return
        if is_ours(aside.name):
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.rename(path)

    def remove_root(self) -> None:
        """Remove the folder, if it is empty."""
        with contextlib.suppress(OSError):
            os.rmdir(self.address)

    def clean(self, prefix: str) -> None:
        """Remove temporary files and links, and what was moved aside to be deleted."""
        self.delete([key for key in self.keys(prefix) if any(map(TEMPORARY.fullmatch, key.split("/")))])
        for folder, inner, _ in os.walk(Path(self.address, prefix)):
            for name in inner:
                if TEMPORARY.fullmatch(name) and os.path.islink(os.path.join(folder, name)):
                    _remove(os.path.join(folder, name))
        for name in filter(TEMPORARY.fullmatch, self.below("")):
            if (self.pointed(name) or "").startswith(f"{prefix}/"):
                _remove(os.path.join(self.address, name))
            elif name.startswith(f"{prefix}+"):
                shutil.rmtree(self._inside(name), ignore_errors=True)

    def _inside(self, key: str) -> Path:
        """Where a key is; it may come from a record or a listing, and neither dots nor links may lead out of here.

        Raises
        ------
        InvalidData
            They do.
        """
        path = Path(self.address, key)
        if ".." in Path(key).parts or not path.parent.resolve().is_relative_to(Path(self.address).resolve()):
            raise InvalidData(f"{key!r} leads out of {self.address}. Remove it there, or name another output.")
        return path

    def _path(self, name: str) -> str:
        return os.path.join(self.address, *name.split("/")) + SUFFIX

    def _current(self, name: str) -> tuple[int, str] | None:
        """Number and path of the version that counts; 0 is the file that was only written."""
        path = self._path(name)
        numbers = numbers_in(path + VERSIONS)
        if numbers:
            return numbers[-1], numbered(path, numbers[-1])
        return (0, path) if _exists(path) else None

    def _current_version(self, name: str) -> tuple[int, str]:
        """Number and identity of the version that counts; 0 and nothing if there is none."""
        while (current := self._current(name)) is not None:
            with contextlib.suppress(FileNotFoundError):
                return current[0], identity_at(current[1])
        return 0, ""

    def _is_first(self, name: str, frame: Frame) -> bool:
        """Whether this very frame was created here by a try whose answer got lost."""
        with contextlib.suppress(FileNotFoundError):
            return identity_at(numbered(self._path(name), 1)) == frame.identity
        return False

    def _link(self, name: str, frame: Frame, number: int, predecessor: str) -> bool:
        """Make the frame the version ``number``, if nobody else has and it follows the version that it should."""
        path = self._path(name)
        target = numbered(path, number)
        with _written(path, frame.parts) as temporary:
            if not _link_new(temporary, target):
                return identity_at(target) == frame.identity
            machine.sync_folder(path + VERSIONS)
        if number > 1 and not follows(numbered(path, number - 1), predecessor):
            _remove(target)
            return False
        forget_old(path, number)
        return True


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


def _sync_content(path: str) -> None:
    with open(path, "rb") as file:
        machine.sync_file(file.fileno())


def _for_several(work: Callable[[str], None], paths: Iterable[str]) -> None:
    """Do it to files, several at a time, each thread to its share: handing one over takes as long as deleting it."""
    every = list(paths)
    for done in [_SEVERAL.submit(_for_each, work, every[first::AT_ONCE]) for first in range(min(AT_ONCE, len(every)))]:
        done.result()


def _for_each(work: Callable[[str], None], paths: Iterable[str]) -> None:
    for path in paths:
        work(path)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


@contextlib.contextmanager
def _written(path: str, parts: Iterable[Bytes]) -> Iterator[str]:
    """A complete file beside ``path``, on the disk, for as long as the block lasts."""
    _make_folder(os.path.dirname(path))
    temporary = f"{path}+{secrets.token_hex(8)}"
    try:
        with open(temporary, "xb") as file:
            file.writelines(part.data for part in parts)
            file.flush()
            machine.sync_file(file.fileno())
        yield temporary
    finally:
        _remove(temporary)


def _link_new(existing: str, target: str) -> bool:
    """Give a file one more name unless the name is taken."""
    try:
        return machine.link_new(existing, target)
    except machine.NoHardLinks:
        raise StoreFailed(
            f"the file system of {target} has no hard links, by which alone two jobs can be kept apart. "
            "Put the output on another."
        ) from None


def _make_folder(folder: str) -> None:
    """Make a folder and those above it, durably."""
    if os.path.isdir(folder):
        return
    above = os.path.dirname(folder)
    _make_folder(above)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
    machine.sync_folder(above)


def files_below(root: str, prefix: str) -> dict[str, tuple[int, str]]:
    """Sizes and times of all files below a folder of ``root``, by their keys; links to folders are not followed."""
    found: dict[str, tuple[int, str]] = {}
    start = f"{prefix.rstrip('/')}/" if prefix else ""
    folder = os.path.join(root, prefix)
    for entry in entries_of(folder) if os.path.isdir(folder) else ():
        if entry.is_dir(follow_symlinks=False):
            found |= files_below(root, f"{start}{entry.name}")
            continue
        with contextlib.suppress(FileNotFoundError):
            about = entry.stat()
            if stat.S_ISREG(about.st_mode):
                found[f"{start}{entry.name}"] = (about.st_size, str(about.st_mtime_ns))
    return found


def _names_below(root: str, folder: str) -> Iterator[str]:
    for entry in entries_of(os.path.join(root, folder)):
        stored = entry.name.removesuffix(VERSIONS)
        name = stored.removesuffix(SUFFIX)
        if not PART.fullmatch(name):
            continue
        inside = entry.is_dir(follow_symlinks=False)
        if (name, inside) == (entry.name, True):
            yield from _names_below(root, os.path.join(folder, name))
        elif name != stored and (numbers_in(entry.path) if stored != entry.name else not inside):
            yield os.path.join(folder, name)


def _clear(folder: str) -> None:
    """Delete what is ours below a folder, and the folders that are empty then; other files stay."""
    entries = entries_of(folder)
    _discard([entry for entry in entries if OURS.fullmatch(entry.name)])
    for entry in entries:
        if PART.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            _clear(entry.path)
            with contextlib.suppress(OSError):
                os.rmdir(entry.path)


def _discard(entries: list[os.DirEntry[str]]) -> None:
    """Delete records; versions all at once, and after the file that they hide."""
    _for_several(_remove, [entry.path for entry in entries if not entry.is_dir(follow_symlinks=False)])
    for entry in entries:
        if "+" in entry.name and entry.is_dir(follow_symlinks=False):
            aside = f"{entry.path.rpartition('+')[0]}+{secrets.token_hex(8)}"
            with contextlib.suppress(FileNotFoundError):
                os.rename(entry.path, aside)
            shutil.rmtree(aside, ignore_errors=True)
    if entries:
        machine.sync_folder(os.path.dirname(entries[0].path))
