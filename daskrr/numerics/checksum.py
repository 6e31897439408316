"""CRC-32C of memory, without the interpreter lock: threads that read chunks side by side all take some."""

import ctypes
from collections.abc import Callable
from functools import cache
from importlib import import_module

import google_crc32c
import numpy as np
from numpy.typing import NDArray


def crc32c(content: bytes | NDArray, before: int = 0) -> int:
    """The checksum of ``content``, C-contiguous, or of what has the checksum ``before`` with ``content`` after it."""
    memory = np.frombuffer(content, np.uint8) if isinstance(content, bytes) else content
    extend = _library()
    if extend is None:
        return google_crc32c.extend(before, memory)
    if not memory.flags.c_contiguous:
        raise ValueError("the checksum of memory that is not C-contiguous was asked for")
    return extend(before, memory.ctypes.data, memory.nbytes)


@cache
def _library() -> Callable[[int, int, int], int] | None:
    """The function that google_crc32c itself calls, and holds the lock meanwhile; None where it has no such library."""
    try:
        library = ctypes.CDLL(import_module("google_crc32c._crc32c").__file__)
        return ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)(
            ("crc32c_extend", library)
        )
    except (ImportError, OSError, AttributeError):
        return None
