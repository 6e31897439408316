"""Memory for intermediate results that a thread keeps from tile to tile: new pages cost as much as the arithmetic."""

import math
import threading

import numpy as np
from numpy.typing import DTypeLike, NDArray


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.memory: dict[str, NDArray[np.uint8]] = {}


_SCRATCH = _Scratch()


def scratch(use: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray:
    """An uninitialised array that is valid until this thread asks for the next of the same ``use``."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = _SCRATCH.memory.get(use)
    if memory is None or memory.nbytes < size:
        memory = _SCRATCH.memory[use] = np.empty(size, np.uint8)
    return memory[:size].view(dtype).reshape(shape)
