"""What a program does to the files of a folder, noted operation by operation, and what a loss of power makes of it.

The model of the disk is that of a journaling file system that promises no more than POSIX does:

- Content that was written reaches the disk when the file is synchronized. Before, the power may leave all of it, none
  of it, the first half, or as many zeros.
- A change of names (a file or folder created, renamed, linked, removed) reaches the disk when the folder of the new
  name is synchronized. Before, each change by itself may be lost or not, whatever became of those before and after it;
  a rename is lost as a whole and leaves the old names.
- Synchronizing a file says nothing about its name, and synchronizing a folder nothing about the name of that folder.
"""

import builtins
import contextlib
import io
import itertools
import math
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

# What is at a path: the bytes of a file, the target of a link, or a folder.
FOLDER = None
Tree = dict[str, bytes | str | None]
TORN = ("kept", "empty", "half", "zeros")


class Watched:
    """A file that is written; its content is noted when it is closed or synchronized."""

    def __init__(self, file: Any, note: Callable[[], None]) -> None:
        self._file, self._note = file, note

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if not self._file.closed:
            self._file.flush()
            self._note()
            self._file.close()


class Recorder:
    """Notes what is done below a folder while it is installed; one operation at a time, so that their order is known.

    Nothing is synchronized for real meanwhile, which only costs time.
    """

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.before = read_tree(root)
        self.operations: list[tuple[Any, ...]] = []
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def installed(self) -> Iterator["Recorder"]:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("replace", "rename", "link"):
                patch.setattr(os, name, self._moving(getattr(os, name), "link" if name == "link" else "rename"))
            for name in ("unlink", "remove", "mkdir", "rmdir"):
                patch.setattr(os, name, self._changing(getattr(os, name), "unlink" if name == "remove" else name))
            patch.setattr(os, "symlink", self._symlinking(os.symlink))
            patch.setattr(os, "fsync", self._sync)
            for module in (builtins, io):
                patch.setattr(module, "open", self._opening(io.open))
            yield self

    def _inside(self, path: Any, dir_fd: int | None = None) -> str | None:
        """A path below the root, by which it is noted; None of others."""
        if isinstance(path, int):
            return None
        folder = os.getcwd() if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
        whole = os.path.join(folder, os.fspath(path))
        return os.path.relpath(whole, self.root) if whole.startswith(f"{self.root}/") else None

    def _moving(self, work: Callable[..., None], kind: str) -> Callable[..., None]:
        def moved(source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
            with self._lock:
                work(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
                names = self._inside(source, src_dir_fd), self._inside(target, dst_dir_fd)
                if names != (None, None):
                    self.operations.append((kind, *names))

        return moved

    def _changing(self, work: Callable[..., None], kind: str) -> Callable[..., None]:
        def changed(path: Any, *more: Any, dir_fd: int | None = None, **options: Any) -> None:
            with self._lock:
                work(path, *more, dir_fd=dir_fd, **options)
                name = self._inside(path, dir_fd)
                if name is not None:
                    self.operations.append((kind, name))

        return changed

    def _symlinking(self, work: Callable[..., None]) -> Callable[..., None]:
        def linked(target: Any, path: Any, *more: Any, **options: Any) -> None:
            with self._lock:
                work(target, path, *more, **options)
                name = self._inside(path)
                if name is not None:
                    self.operations.append(("symlink", name, os.fspath(target)))

        return linked

    def _opening(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def opened(path: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
            name = self._inside(path) if set(mode) & set("wxa+") else None
            if name is None:
                return work(path, mode, *more, **options)
            with self._lock:
                file = work(path, mode, *more, **options)
                self.operations.append(("create", name))
            return Watched(file, lambda: self._note_content(name))

        return opened

    def _note_content(self, name: str) -> None:
        with self._lock, io.FileIO(os.path.join(self.root, name)) as file:
            self.operations.append(("write", name, file.readall()))

    def _sync(self, descriptor: int) -> None:
        with self._lock:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            name = "." if path == self.root else self._inside(path)
            if name is None:
                return
            if os.path.isfile(path):
                self._note_content(name)
            self.operations.append(("sync", name))


def read_tree(root: Path) -> Tree:
    """All that is below a folder."""
    found: Tree = {}
    for folder, inner, names in os.walk(root):
        for name in (*inner, *names):
            path = Path(folder, name)
            key = path.relative_to(root).as_posix()
            if path.is_symlink():
                found[key] = os.readlink(path)
            else:
                found[key] = FOLDER if path.is_dir() else path.read_bytes()
    return found


def write_tree(tree: Tree, root: Path) -> None:
    """Make a folder of what :func:`read_tree` found."""
    root.mkdir()
    for name in sorted(tree):
        content = tree[name]
        if content is FOLDER:
            (root / name).mkdir()
        elif isinstance(content, str):
            (root / name).symlink_to(content)
        else:
            (root / name).write_bytes(content)


@dataclass
class Change:
    """One change of names or of content, and when it began to be safe."""

    at: int
    settled_by: int  # the folder or file that is synchronized
    names: list[tuple[int, str, int | None]] = field(default_factory=list)
    content: tuple[int, bytes] | None = None
    settled_at: float = math.inf


class Disk:
    """The operations of a recorder as changes of nodes, by which any loss of power can be played."""

    def __init__(self, recorder: Recorder) -> None:
        self.operations = recorder.operations
        self.changes: list[Change] = []
        self._nodes = itertools.count(1)
        self._folders: dict[int, dict[str, int]] = {0: {}}
        self._contents: dict[int, bytes | str] = {}
        for name in sorted(recorder.before):
            self._plant(name, recorder.before[name])
        self._start = {node: dict(names) for node, names in self._folders.items()}
        self._first = dict(self._contents)
        for at, (kind, *given) in enumerate(recorder.operations):
            getattr(self, f"_{kind}")(at, *given)

    def _plant(self, name: str, content: bytes | str | None) -> int:
        folder, last = self._place(name)
        self._folders[folder][last] = node = next(self._nodes)
        if content is FOLDER:
            self._folders[node] = {}
        else:
            self._contents[node] = content
        return node

    def _place(self, name: str) -> tuple[int, str]:
        """The folder that a name is in, and the last part of it."""
        folder = 0
        *above, last = name.split("/")
        for part in above:
            folder = self._folders[folder][part]
        return folder, last

    def _node(self, name: str) -> int:
        folder, last = self._place(name)
        return 0 if name == "." else self._folders[folder][last]

    def _renamed(self, at: int, new: str, node: int | None, old: str | None = None) -> None:
        folder, last = self._place(new)
        change = Change(at, settled_by=folder, names=[(folder, last, node)])
        if old is not None:
            change.names.insert(0, (*self._place(old), None))
        self.changes.append(change)
        for place, name, found in change.names:
            self._folders[place].pop(name, None)
            if found is not None:
                self._folders[place][name] = found

    def _made(self, at: int, name: str, content: bytes | str | None) -> None:
        node = self._plant(name, content)
        if content is FOLDER:
            self._start[node] = {}
        else:
            self._first[node] = content
        self._renamed(at, name, node)

    def _create(self, at: int, name: str) -> None:
        folder, last = self._place(name)
        if last in self._folders[folder]:
            self._write(at, name, b"")
        else:
            self._made(at, name, b"")

    def _mkdir(self, at: int, name: str) -> None:
        self._made(at, name, FOLDER)

    def _symlink(self, at: int, name: str, target: str) -> None:
        self._made(at, name, target)

    def _write(self, at: int, name: str, content: bytes) -> None:
        node = self._node(name)
        if self._contents[node] != content:
            self._contents[node] = content
            self.changes.append(Change(at, settled_by=node, content=(node, content)))

    def _rename(self, at: int, source: str, target: str) -> None:
        self._renamed(at, target, self._node(source), old=source)

    def _link(self, at: int, source: str, target: str) -> None:
        self._renamed(at, target, self._node(source))

    def _unlink(self, at: int, name: str) -> None:
        self._renamed(at, name, None)

    _rmdir = _unlink

    def _sync(self, at: int, name: str) -> None:
        node = self._node(name)
        for change in self.changes:
            if change.settled_by == node and change.settled_at == math.inf:
                change.settled_at = at

    @property
    def length(self) -> int:
        """How many operations there were."""
        return len(self.operations)

    def unsettled(self, moment: int) -> list[Change]:
        """Changes among the first ``moment`` operations that a loss of power after them may undo."""
        return [one for one in self.changes if one.at < moment <= one.settled_at]

    def after_loss(self, moment: int, fates: dict[int, str]) -> Tree:
        """What is there if the power is lost after so many operations; fates of those unsettled by their numbers."""
        folders = {node: dict(names) for node, names in self._start.items()}
        contents = dict(self._first)
        for change in self.changes:
            fate = fates.get(change.at, "kept")
            if change.at >= moment or (fate != "kept" and change.content is None):
                continue
            for folder, name, node in change.names:
                folders[folder].pop(name, None)
                if node is not None:
                    folders[folder][name] = node
            if change.content is not None:
                node, content = change.content
                contents[node] = {
                    "kept": content,
                    "half": content[: len(content) // 2],
                    "zeros": bytes(len(content)),
                }.get(fate, contents[node])
        return _listed(folders, contents, 0, "")

    def losses(self, moment: int, dice: random.Random, count: int) -> Iterator[dict[int, str]]:
        """Fates to play at a moment: all kept, all lost, and some by chance; every choice where there are few."""
        pending = [one.at for one in self.unsettled(moment)]
        yield {}
        yield dict.fromkeys(pending, "empty")
        if len(pending) <= math.log2(max(count, 1)):
            for kept in itertools.product((True, False), repeat=len(pending)):
                lost = (at for at, is_kept in zip(pending, kept, strict=True) if not is_kept)
                yield {at: dice.choice(TORN[1:]) for at in lost}
            return
        for _ in range(count):
            share = dice.random()
            yield {at: dice.choice(TORN[1:]) for at in pending if dice.random() < share}


def _listed(folders: dict[int, Any], contents: dict[int, Any], node: int, start: str) -> Tree:
    found: Tree = {}
    for name, inner in folders[node].items():
        found[start + name] = contents.get(inner, FOLDER)
        if inner not in contents:
            found |= _listed(folders, contents, inner, f"{start}{name}/")
    return found
