"""Decoded pieces of the input: those that a task will need next, and those that a process keeps."""

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

# While a task computes, it has no larger piece than this read for it.
AHEAD_BYTES = 32 * 2**20
_READERS = ThreadPoolExecutor(thread_name_prefix="daskrr-read-ahead")


def ahead_bytes(n_bytes: int) -> int:
    """What is in memory of a piece of so many bytes that is read while a task computes: as stored, and decoded."""
    return 2 * n_bytes if n_bytes <= AHEAD_BYTES else 0


class KeptPieces:
    """Pieces that a process has decoded, up to so many bytes, for those who read them again; it is sent without any."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = self._left = most_bytes
        self._pieces: dict[tuple[str, int, int], NDArray] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type["KeptPieces"], tuple[int]]:
        return KeptPieces, (self._most_bytes,)

    def read(self, place: tuple[str, int, int], read: Callable[[int, int], NDArray]) -> NDArray:
        """The rows of a place: of which array, and from where to where."""
        if place in self._pieces:
            return self._pieces[place]
        rows = read(*place[1:])
        with self._lock:
            if place not in self._pieces and rows.nbytes <= self._left:
                rows.flags.writeable = False
                self._pieces[place] = rows
                self._left -= rows.nbytes
        return rows


@dataclasses.dataclass
class TaskReads:
    """What one task reads, up to row ``stop``: the chunk that it decoded last, and the piece that it will need next.

    The blocks of a task may have parts of one chunk. The next piece is read while the task computes, since a store may
    take as long to answer.
    """

    stop: int
    last_start: int = -1
    last_chunk: NDArray = dataclasses.field(default_factory=lambda: np.empty(0))
    _coming: dict[tuple[int, int], Future[NDArray]] = dataclasses.field(default_factory=dict)

    def read(self, read: Callable[[int, int], NDArray], start: int, stop: int, then: int) -> NDArray:
        """The rows from ``start`` to ``stop``; those from there to ``then`` are likely to be next."""
        coming = self._coming.pop((start, stop), None)
        rows = read(start, stop) if coming is None else coming.result()
        self._coming.clear()
        if stop < min(then, self.stop) and (then - stop) * rows[:1].nbytes <= AHEAD_BYTES:
            self._coming[stop, then] = _READERS.submit(read, stop, then)
        return rows
