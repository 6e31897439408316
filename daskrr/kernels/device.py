"""The device that a thread computes tiles on: the processor itself, or a GPU.

Rows, and what is found out about each of them, are NumPy arrays wherever they are computed. Tiles of kernel columns,
what they are multiplied by, and sums of their products are arrays of the device, which NumPy's own functions take:
CuPy's answer them. :func:`current` brings arrays there and back, and has memory for those that a thread uses again.
"""

import math
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from daskrr.kernels.loops import Loop
from daskrr.kernels.native import code_of

T = TypeVar("T")


class Device:
    """The processor, whose memory is that of NumPy; others bring arrays to theirs.

    Its routines may add the products of ``chain_rows`` rows in one chain, in whatever order they do that: as many as a
    block has by default, so that only a larger one needs a second p × p matrix.
    """

    name = "cpu"
    chain_rows = 8192

    @property
    def is_host(self) -> bool:
        """Whether it is the processor."""
        return not isinstance(self, Accelerator)

    def active(self) -> AbstractContextManager[None]:
        """What the calling thread does meanwhile is done on the device."""
        return nullcontext()

    def turn(self) -> AbstractContextManager[Any]:
        """Have the calling thread compute tiles meanwhile, as soon as few enough others do."""
        return nullcontext()

    def holds(self, array: Any) -> bool:
        """Whether an array is in the memory of the device."""
        return True

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Any:
        """An uninitialised array."""
        return np.empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...]) -> Any:
        """Zeros of float64."""
        return np.zeros(shape)

    def put(self, array: NDArray) -> Any:
        """The array on the device."""
        return array

    def keep(self, constant: NDArray) -> Any:
        """The array on the device, which is brought there once and stays as long as its owner does."""
        return constant

    def get(self, array: Any) -> NDArray:
        """The array in the memory of NumPy, where it is complete."""
        return array

    def run(self, loop: Loop, arrays: Sequence[Any], sizes: Sequence[int]) -> None:
        """Run a loop over arrays of the device."""
        code_of(loop)(*(array.ctypes.data for array in arrays), *sizes)

    def tile_rows(self, n_columns: int) -> int | None:
        """Rows of a tile, if the device has a wish of its own."""
        return None


class Accelerator(Device, ABC):
    """A device with memory and with routines of its own."""

    @abstractmethod
    def multiply_rows(self, A: NDArray, B: Any) -> Any:
        """A b of each row b of B (m, p), for a constant A (p, p) of NumPy, in the memory of B or of the thread.

        Of A the lower triangle alone is looked at; the device keeps it.
        """

    @abstractmethod
    def add_gram(self, B: Any, G: Any) -> None:
        """Add BᵀB to the lower triangle of G (p, p), for B (m, p); what is above it is of no use then."""

    @abstractmethod
    def inverse_root(self, A: Any) -> Any | None:
        """L⁻¹ with L Lᵀ = A (p, p), which is symmetric; None if it is not positive definite."""


HOST = Device()


class _Current(threading.local):
    device: Device = HOST


_CURRENT = _Current()


def current() -> Device:
    """The device of the calling thread."""
    return _CURRENT.device


@contextmanager
def using(device: Device) -> Iterator[None]:
    """Have the calling thread compute on a device."""
    before, _CURRENT.device = _CURRENT.device, device
    try:
        with device.active():
            yield
    finally:
        _CURRENT.device = before


def home(array: Any) -> Device:
    """The device whose memory an array is in: that of the calling thread, or the processor."""
    device = _CURRENT.device
    return device if device.holds(array) else HOST


def here(constant: NDArray) -> Any:
    """A constant where the calling thread computes; see :meth:`Device.keep`."""
    return _CURRENT.device.keep(constant)


class Companions:
    """What was made of objects, which is forgotten with them."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, Any], Any] = {}

    def of(self, owner: Any, purpose: Any, make: Callable[[], T]) -> T:
        """What was made of the object for a purpose; two threads may make it twice, and get the same."""
        place = id(owner), purpose
        if place not in self._made:
            made = self._made.setdefault(place, make())
            weakref.finalize(owner, self._made.pop, place, None).atexit = False
            return made
        return self._made[place]


# --- Memory that is used again -------------------------------------------------------------------------


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.memory: dict[tuple[Device, str], Any] = {}


_SCRATCH = _Scratch()


def scratch(use: str, shape: tuple[int, ...], dtype: DTypeLike, device: Device | None = None) -> Any:
    """An uninitialised array that is valid until this thread asks for the next of the same ``use``.

    It is in the memory of the device that the thread computes on, or of another. A thread keeps the memory from tile to
    tile: new pages cost as much as the arithmetic.
    """
    device, dtype = device or _CURRENT.device, np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = _SCRATCH.memory.get((device, use))
    if memory is None or memory.nbytes < size:
        memory = _SCRATCH.memory[device, use] = device.empty(size, np.uint8)
    return memory[:size].view(dtype).reshape(shape)
