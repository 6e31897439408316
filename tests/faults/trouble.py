"""Calls of the operating system that fail as those of a full or a broken disk do, by a rule."""

import builtins
import contextlib
import io
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

# Which error a call fails with, if any, by what is done and the path that it is done to.
Rule = Callable[[str, str], int | None]


class Failing:
    """A file that takes half of what is written, and then no more."""

    def __init__(self, file: Any, error: OSError) -> None:
        self._file, self._error = file, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "Failing":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, content: Any) -> int:
        self._file.write(memoryview(content).cast("B")[: memoryview(content).nbytes // 2])
        raise self._error

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(map(bytes, parts)))


class Trouble:
    """Has calls fail by a rule, while it is installed; what it was asked about, and what failed.

    Kinds of calls are ``read`` and ``write`` (of a file), ``rename``, ``link``, ``symlink``, ``mkdir`` and ``fsync``.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule, self.failed = rule, list[tuple[str, str]]()

    @contextlib.contextmanager
    def installed(self) -> Iterator["Trouble"]:
        with pytest.MonkeyPatch.context() as patch:
            for name, kind in (("replace", "rename"), ("rename", "rename"), ("link", "link"), ("symlink", "symlink")):
                patch.setattr(os, name, self._judged(getattr(os, name), kind, place=1))
            patch.setattr(os, "mkdir", self._judged(os.mkdir, "mkdir", place=0))
            patch.setattr(os, "fsync", self._synchronizing(os.fsync))
            for module in (builtins, io):
                patch.setattr(module, "open", self._opening(io.open))
            yield self

    def _error(self, kind: str, path: str) -> OSError | None:
        code = self.rule(kind, path)
        if code is None:
            return None
        self.failed.append((kind, path))
        return OSError(code, os.strerror(code), path)

    def _judged(self, work: Callable[..., Any], kind: str, place: int) -> Callable[..., Any]:
        def judged(*given: Any, **options: Any) -> Any:
            error = self._error(kind, os.fspath(given[place]))
            if error is not None:
                raise error
            return work(*given, **options)

        return judged

    def _synchronizing(self, work: Callable[[int], None]) -> Callable[[int], None]:
        def synchronized(descriptor: int) -> None:
            error = self._error("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
            if error is not None:
                raise error
            work(descriptor)

        return synchronized

    def _opening(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def opened(path: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
            if isinstance(path, int):
                return work(path, mode, *more, **options)
            writes = bool(set(mode) & set("wxa+"))
            error = self._error("write" if writes else "read", os.fspath(path))
            if error is not None and not writes:
                raise error
            file = work(path, mode, *more, **options)
            return file if error is None else Failing(file, error)

        return opened
