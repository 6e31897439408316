"""A GPU of NVIDIA as the device of tiles, by way of CuPy, which is asked for here alone.

Every thread has a stream of its own, so that what one copies overlaps with what others compute. Sums are added in a
fixed order, and float32 stays float32: two runs on the same kind of GPU have the same bits.
"""

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from daskrr import machine
from daskrr.errors import DoesNotFit, InvalidParameter, install
from daskrr.kernels import ptx
from daskrr.kernels.device import Accelerator, Companions, scratch
from daskrr.kernels.loops import Loop

# Tiles of so many numbers and rows keep all of a GPU busy; fewer rows than the least are not worth starting.
MOST_TILE_ELEMENTS = 2**27
MOST_TILE_ROWS, LEAST_TILE_ROWS = 65_536, 512

# What tiles may take of the memory of a GPU, how many threads have some at a time, and how many each of them has. A
# core takes ten times as long to read, decode and check rows as a GPU to compute what is asked of them. More threads do
# nothing but read and decode.
SHARE_OF_TILES = 0.5
BLOCKS_AT_ONCE, PARTS_AT_ONCE = 12, 16
TILES_OF_A_THREAD = 4

# So few threads compute at a time, while others read, check and write: enough that the GPU always has something to do.
# More of them would be in each other's way.
TURNS = 2

# What is copied to and from a GPU at a time, and how many such copies a thread has under way.
PINNED_BYTES, COPIES_AT_ONCE = 2**24, 2

# Triangles are cut into corners of so many columns, what is beside a corner is one plain product, and a corner is made
# of such products by panels. That of a Gram matrix is as fast by cuBLAS's own routine, unless it is small.
CORNER_COLUMNS, PANEL_COLUMNS = 1024, 128
GRAM_CORNER_COLUMNS, SMALL_GRAM_COLUMNS, GRAM_PANEL_COLUMNS = 2048, 1024, 256

# Of cuBLAS, in its order.
_UPPER, _AS_IT_IS, _TRANSPOSED, _LEFT, _NOT_UNIT = 1, 0, 1, 0, 0
_SCALAR = {"d": ctypes.c_double, "f": ctypes.c_float}
_PREFIX = {"d": "D", "f": "S"}
# What its routines are given: integers, and addresses of numbers and arrays.
_KINDS = {"i": ctypes.c_int, "p": ctypes.c_void_p}
_GIVEN = {"gemm": "iiiiippipippi", "syrk": "iiiippippi", "trsm": "iiiiiippipi"}


def tile_rows(n_columns: int, memory: int) -> int:
    """Rows of a tile on a GPU with so many bytes of memory, a power of two, or 0 if none that are worth it fit."""
    p = max(1, n_columns)
    rows = int(SHARE_OF_TILES * memory / BLOCKS_AT_ONCE / (TILES_OF_A_THREAD * 8 * p))
    most = max(LEAST_TILE_ROWS, min(MOST_TILE_ROWS, MOST_TILE_ELEMENTS // p))
    return 0 if rows < LEAST_TILE_ROWS else 1 << (min(rows, most).bit_length() - 1)


class CudaDevice(Accelerator):
    """The first GPU that this process may use."""

    name = "cuda"
    chain_rows = MOST_TILE_ROWS  # of a tile in one go, since every part of it would be some dozens of calls

    def __init__(self) -> None:
        found = machine.gpu()
        if found is None or find_spec("cupy") is None:
            missing = "no GPU of NVIDIA is found here" if found is None else f"CuPy is missing: {install('cuda')}"
            raise InvalidParameter(f"device 'cuda' was asked for, but {missing}")
        self.memory = found.memory
        self._cupy, self._cupyx = import_module("cupy"), import_module("cupyx")
        self._companions = Companions()
        self._threads = threading.local()
        self._turns = threading.BoundedSemaphore(TURNS)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Have what the calling thread asks for go to a stream of its own.

        Raises
        ------
        DoesNotFit
            The memory of the GPU is full.
        """
        if not hasattr(self._threads, "stream"):
            self._threads.stream = self._cupy.cuda.Stream(non_blocking=True)
        self._threads.handle = None
        try:
            with self._threads.stream:
                yield
        except self._cupy.cuda.memory.OutOfMemoryError as error:
            raise DoesNotFit(
                f"the GPU ran out of memory ({error}). Nothing that was stored is lost: use fewer landmarks, free what "
                "else is on the GPU, or use device='cpu', and run the same again to go on."
            ) from None

    def turn(self) -> AbstractContextManager[Any]:
        """One of a few."""
        return self._turns

    def holds(self, array: Any) -> bool:
        """Whether CuPy made it."""
        return isinstance(array, self._cupy.ndarray)

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Any:
        """An uninitialised array."""
        return self._cupy.empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...]) -> Any:
        """Zeros of float64."""
        return self._cupy.zeros(shape)

    def put(self, array: NDArray) -> Any:
        """The array on the GPU; the copy is made while the thread goes on.

        By way of pages of the thread, since CuPy would ask for new ones, for which all that the GPU does is waited for.
        """
        if not array.dtype.isnative or array.dtype.itemsize > 8:  # CuPy knows none of these
            array = array.astype(np.float64)
        found = self._cupy.empty(array.shape, array.dtype)
        source, target = np.asarray(array, order="C").reshape(-1), found.reshape(-1)
        for part in _parts(source):
            pages, copied = next(self._pages)
            copied.synchronize()
            pinned = pages.view(array.dtype)[: part.stop - part.start]
            pinned[...] = source[part]
            target[part].data.copy_from_host_async(pinned.ctypes.data, pinned.nbytes)
            copied.record()
        return found

    @property
    def _pages(self) -> Iterator[tuple[NDArray, Any]]:
        """Pages of the thread that stay where they are, in turn, with an event after the last copy from them."""
        if not hasattr(self._threads, "pages"):
            pages = [self._cupyx.empty_pinned(PINNED_BYTES, np.uint8) for _ in range(COPIES_AT_ONCE)]
            self._threads.pages = cycle([(one, self._cupy.cuda.Event(disable_timing=True)) for one in pages])
        return self._threads.pages

    def keep(self, constant: NDArray) -> Any:
        """The array on the GPU, which other threads may use as well when this returns."""
        return self._companions.of(constant, None, lambda: self._brought(constant))

    def _brought(self, constant: NDArray) -> Any:
        found = self.put(constant)
        self._cupy.cuda.get_current_stream().synchronize()
        return found

    def get(self, array: Any) -> NDArray:
        """The array in the memory of NumPy, where it is complete.

        By way of pages that stay where they are, which the GPU writes to ten times as fast.
        """
        if not array.flags.c_contiguous:
            return array.get()
        found = np.empty(array.shape, array.dtype)
        source, target = array.reshape(-1), found.reshape(-1)
        for part in _parts(target):
            pages, copied = next(self._pages)
            copied.synchronize()
            target[part] = source[part].get(out=pages.view(array.dtype)[: part.stop - part.start])
        return found

    def run(self, loop: Loop, arrays: Sequence[Any], sizes: Sequence[int]) -> None:
        """Start a loop over arrays of the GPU."""
        n_rows, n_columns = loop.extent(*sizes)
        if n_rows and (n_columns or loop.by_rows):
            blocks, threads = ptx.grid_of(loop, n_rows, n_columns)
            _kernel(self, loop)((*blocks, 1), (*threads, 1), (*arrays, *map(np.int64, sizes)))

    def load(self, loop: Loop) -> Any:
        """The loop as a function of the GPU."""
        name, text = ptx.text_of(loop)
        module = self._cupy.cuda.function.Module()
        module.load(text.encode() + b"\0")
        return module.get_function(name)

    def tile_rows(self, n_columns: int) -> int:
        """As many as keep it busy, if there is room; a function of the kind of GPU."""
        return tile_rows(n_columns, self.memory) or LEAST_TILE_ROWS

    def multiply_rows(self, A: NDArray, B: Any) -> Any:
        """A b of each row b of B (m, p), where A (p, p) is lower triangular and never changes, in other memory.

        That takes four fifths of the time of cuBLAS's triangular product.
        """
        m, p = B.shape
        lower = self._companions.of(A, "lower", lambda: self._brought_lower(A))
        uses = (scratch(use, B.shape, B.dtype) for use in ("product", "next product"))
        product = next(one for one in uses if one.data.ptr != B.data.ptr)
        for begin, end in _cut(0, p, CORNER_COLUMNS):
            if begin:
                sizes = end - begin, m, begin
                self._gemm(p, _TRANSPOSED, _AS_IT_IS, sizes, lower[begin:], B, 0.0, product[:, begin:])
            for first, stop in _cut(begin, end, PANEL_COLUMNS):
                corner, known = (stop - first, m, stop - begin), 1.0 if begin else 0.0
                factor, rows = lower[first:, begin:], B[:, begin:]
                self._gemm(p, _TRANSPOSED, _AS_IT_IS, corner, factor, rows, known, product[:, first:])
        return product

    def _brought_lower(self, A: NDArray) -> Any:
        found = self._cupy.tril(self.put(A))
        self._cupy.cuda.get_current_stream().synchronize()
        return found

    def add_gram(self, B: Any, G: Any) -> None:
        """Add BᵀB to the lower triangle of G (p, p), for B (m, p); what is above it is of no use then."""
        m, p = B.shape
        for begin, end in _cut(0, p, GRAM_CORNER_COLUMNS):
            some, rows = B[:, begin:], G[begin:]
            if begin:
                self._gemm(p, _AS_IT_IS, _TRANSPOSED, (begin, end - begin, m), B, some, 1.0, rows)
            if end - begin > SMALL_GRAM_COLUMNS:
                self._call("syrk", B.dtype, _UPPER, _AS_IT_IS, end - begin, m, 1.0, some, p, 1.0, rows[:, begin:], p)
                continue
            for first, stop in _cut(begin, end, GRAM_PANEL_COLUMNS):
                corner = stop - begin, stop - first, m
                self._gemm(p, _AS_IT_IS, _TRANSPOSED, corner, some, B[:, first:], 1.0, G[first:, begin:])

    def inverse_root(self, A: Any) -> Any | None:
        """L⁻¹ with L Lᵀ = A (p, p), which is symmetric; None if it is not positive definite."""
        p, found = len(A), self._cupy.eye(len(A))
        try:
            with self._cupyx.errstate(linalg="raise"):
                L = self._cupy.linalg.cholesky(A)
        except np.linalg.LinAlgError:
            return None
        self._call("trsm", A.dtype, _LEFT, _UPPER, _AS_IT_IS, _NOT_UNIT, p, p, 1.0, L, p, found, p)
        return found

    def _gemm(
        self, width: int, first: int, second: int, sizes: tuple[int, int, int], A: Any, B: Any, kept: float, C: Any
    ) -> None:
        """C = A B + ``kept`` C, as Fortran has them, of parts of matrices that all have ``width`` columns."""
        self._call("gemm", C.dtype, first, second, *sizes, 1.0, A, width, B, width, kept, C, width)

    def _call(self, name: str, dtype: np.dtype, *arguments: Any) -> None:
        """Call a routine of cuBLAS: ints are integers, floats scalars of ``dtype``, arrays their addresses.

        There are dozens of calls for a tile, which the threads of a process take turns at making.
        """
        kind = dtype.char
        given = [
            one if isinstance(one, int) else _address(one, kind) if isinstance(one, float) else one.data.ptr
            for one in arguments
        ]
        handle = self._handle  # by which the library is loaded
        if status := _routine(name, kind)(handle, *given):
            raise RuntimeError(f"cuBLAS {name} failed with status {status}")

    @property
    def _handle(self) -> int:
        """That of the thread, for its stream; with the first of them CuPy loads the library."""
        if self._threads.handle is None:
            handle = self._cupy.cuda.device.get_cublas_handle()
            stream = ctypes.c_void_p(self._threads.stream.ptr)
            if status := _cublas().cublasSetStream_v2(ctypes.c_void_p(handle), stream):
                raise RuntimeError(f"cuBLAS takes no stream: status {status}")
            self._threads.handle = handle
        return self._threads.handle


def _parts(array: NDArray) -> Iterator[slice]:
    """Parts of a vector that are copied at a time."""
    return (slice(*ends) for ends in _cut(0, len(array), PINNED_BYTES // array.dtype.itemsize))


def _cut(begin: int, end: int, n_columns: int) -> Iterator[tuple[int, int]]:
    """First columns, or whatever is cut, of parts, and those after the last."""
    return ((first, min(first + n_columns, end)) for first in range(begin, end, n_columns))


_LOADING = threading.Lock()
_LOADED: dict[Loop, Any] = {}


def _kernel(device: CudaDevice, loop: Loop) -> Any:
    with _LOADING:
        if loop not in _LOADED:
            _LOADED[loop] = device.load(loop)
        return _LOADED[loop]


@cache
def _routine(name: str, kind: str) -> Any:
    routine = getattr(_cublas(), f"cublas{_PREFIX[kind]}{name}_v2")
    routine.argtypes = [ctypes.c_void_p, *(_KINDS[one] for one in _GIVEN[name])]
    return routine


_NUMBERS: dict[tuple[float, str], Any] = {}


def _address(number: float, kind: str) -> int:
    """Of a number that stays where it is."""
    return ctypes.addressof(_NUMBERS.setdefault((number, kind), _SCALAR[kind](number)))


@cache
def _cublas() -> ctypes.PyDLL:
    """The library that CuPy has loaded.

    Its calls only begin something, so a thread keeps the interpreter meanwhile: to get it back takes longer.
    """
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split()[-1] for line in lines if "/libcublas.so" in line}
    if not paths:
        raise RuntimeError("CuPy has loaded no cuBLAS")
    return ctypes.PyDLL(min(paths))


@cache
def cuda_device() -> CudaDevice:
    """The one GPU of this process."""
    return CudaDevice()
