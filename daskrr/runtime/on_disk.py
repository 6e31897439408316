"""Results that wait for the next pass in a file of their worker, and not in its memory."""

import logging
import os
import pickle
import tempfile
import weakref
import zlib
from collections import deque
from contextlib import suppress
from typing import Any

import distributed

from daskrr.errors import CheckFailed

log = logging.getLogger("daskrr")

# Less is no load, and a file would take longer than the task that makes it.
WORTH_A_FILE = 2**16

# Where the worker of this process, if it is one, has its files.
_FOLDERS: deque[str] = deque(maxlen=1)


class OnDisk:
    """A result in a file, which is removed with this object; sent to another worker, it is in a file there."""

    def __init__(self, content: Any, folder: str) -> None:
        stored = pickle.dumps(content, protocol=5)
        self._checksum = zlib.crc32(stored)
        handle, self._path = tempfile.mkstemp(prefix="daskrr-", dir=folder)
        weakref.finalize(self, _remove, self._path)
        with os.fdopen(handle, "wb") as file:
            file.write(stored)

    def read(self) -> Any:
        """What it was.

        Raises
        ------
        CheckFailed
            The file is not what was written.
        """
        with open(self._path, "rb") as file:
            stored = file.read()
        if zlib.crc32(stored) != self._checksum:
            raise CheckFailed(
                f"{self._path}, where a worker keeps what pass 1 has found of some rows, was changed or damaged. "
                "Run it again, with sound disks."
            )
        return pickle.loads(stored)

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.read(),)


def put_aside(content: Any, n_bytes: int) -> Any:
    """A result of so many bytes as :class:`OnDisk`, if it was made on a worker of Dask and is worth it."""
    if n_bytes < WORTH_A_FILE:
        return content
    with suppress(ValueError):  # this is no worker
        folder = distributed.get_worker().local_directory
        _FOLDERS.append(folder)
        try:
            return OnDisk(content, folder)
        except OSError as error:
            log.warning("what a task leaves for the next pass stays in memory, since its worker has no disk: %s", error)
    return content


def _arrived(content: Any) -> Any:
    """What another worker has sent, in a file again: Dask keeps it here until the run ends. Elsewhere, itself.

    Nothing that runs while a result arrives knows of which worker; a task of this one has left where its files are.
    """
    with suppress(IndexError, OSError):
        return OnDisk(content, _FOLDERS[-1])
    return content


def _remove(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)
