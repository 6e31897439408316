"""The few BLAS and LAPACK primitives of daskrr, in place and without the GIL.

SciPy's own wrappers hold the GIL for the whole call, which freezes a scheduler's event loop and a worker's
heartbeat. The same routines are exported by ``scipy.linalg.cython_blas`` and ``cython_lapack``; a ctypes
call to them releases it. Tiles may be arrays of another device (:mod:`daskrr.kernels.device`), whose own routines are
called then; factors are brought there.

All matrices are C-contiguous. A row-major lower triangle is Fortran's upper one, hence ``"U"`` throughout.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import scipy.linalg.cython_blas as cython_blas
import scipy.linalg.cython_lapack as cython_lapack
from numpy.typing import NDArray
from threadpoolctl import threadpool_info

from daskrr.kernels import compiled, device, products
from daskrr.kernels.device import Accelerator
from daskrr.kernels.lanes import Lanes

_PREFIX = {np.dtype(np.float64): "d", np.dtype(np.float32): "s"}
_SCALAR = {np.dtype(np.float64): ctypes.c_double, np.dtype(np.float32): ctypes.c_float}

# How OpenBLAS, MKL and BLIS are asked for the threads of the whole process, and told.
_SETTINGS = [
    *((f"{name}_get_num_threads{size}", f"{name}_set_num_threads{size}")
      for name in ("scipy_openblas", "openblas") for size in ("", "64_")),
    ("MKL_Get_Max_Threads", "MKL_Set_Num_Threads"),
    ("bli_thread_get_num_threads", "bli_thread_set_num_threads"),
]  # fmt: skip

_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype, _capsule_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class _OneThread:
    """Counts who needs BLAS on one thread; the setting belongs to the process, so the last one restores it."""

    def __init__(self) -> None:
        self.lock, self.users = threading.Lock(), 0
        self.before: list[int] = []

    def enter(self) -> None:
        with self.lock:
            if not self.users:
                self.before = [get() for get, _ in _thread_settings()]
                self._set([1] * len(self.before))
            self.users += 1

    def leave(self) -> None:
        with self.lock:
            self.users -= 1
            if not self.users:
                self._set(self.before)

    def _set(self, numbers: list[int]) -> None:
        for (_, put), number in zip(_thread_settings(), numbers, strict=True):
            put(number)


@cache
def _thread_settings() -> list[tuple[Callable[[], int], Callable[[int], None]]]:
    """Getter and setter of every loaded BLAS; threadpoolctl finds them, but lets one Python thread alone set."""
    libraries = [ctypes.CDLL(info["filepath"]) for info in threadpool_info() if info["user_api"] == "blas"]
    names = [next((pair for pair in _SETTINGS if hasattr(one, pair[0])), None) for one in libraries]
    return [(getattr(one, pair[0]), getattr(one, pair[1])) for one, pair in zip(libraries, names, strict=True) if pair]


_ONE_THREAD = _OneThread()


@contextmanager
def one_thread() -> Iterator[None]:
    """Run BLAS on the calling thread alone: its bits depend on the number of threads, and tiles run in parallel.

    OpenBLAS, MKL and BLIS can be told so. Accelerate cannot: it reads VECLIB_MAXIMUM_THREADS when a process begins,
    which the workers that daskrr starts have set. Where that is not 1, bits may depend on the machine's load.
    """
    _ONE_THREAD.enter()
    try:
        yield
    finally:
        _ONE_THREAD.leave()


@cache
def _routine(module: Any, name: str) -> Callable[..., None]:
    capsule = module.__pyx_capi__[name]
    signature: bytes = _capsule_name(capsule)
    n_arguments = signature.count(b",") + 1
    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * n_arguments)
    return prototype(_capsule_pointer(capsule, signature))


def _call(module: Any, name: str, dtype: np.dtype, *arguments: Any) -> None:
    """Call a Fortran routine: strings become characters, ints integers, floats scalars of ``dtype``."""
    kept = [_reference(argument, dtype) for argument in arguments]
    _routine(module, _PREFIX[dtype] + name)(*kept)


def _reference(argument: Any, dtype: np.dtype) -> Any:
    if isinstance(argument, np.ndarray):
        return argument.ctypes.data_as(ctypes.c_void_p)
    if isinstance(argument, str):
        return ctypes.byref(ctypes.c_char(argument.encode()))
    if isinstance(argument, int):
        return ctypes.byref(ctypes.c_int(argument))
    return ctypes.byref(_SCALAR[dtype](argument))


def _lapack(name: str, A: NDArray, *arguments: Any) -> int:
    """Call a LAPACK routine and return its ``info``; a negative one is a programming error."""
    info = np.zeros(1, np.intc)
    _call(cython_lapack, name, A.dtype, *arguments, info)
    if info[0] < 0:
        raise RuntimeError(f"LAPACK {name}: argument {-info[0]} is illegal")
    return int(info[0])


def _check_square(A: NDArray) -> int:
    if A.ndim != 2 or A.shape[0] != A.shape[1] or not A.flags.c_contiguous:
        raise ValueError(f"a C-contiguous square matrix is needed, got shape {A.shape}")
    return len(A)


def cholesky(A: NDArray) -> int:
    """Overwrite the lower triangle of A (p, p) by L with A = L Lᵀ; return 0, or the first bad pivot's number."""
    p = _check_square(A)
    return _lapack("potrf", A, "U", p, A, max(p, 1)) if p else 0


def pivoted_cholesky(A: NDArray, tolerance: float) -> tuple[NDArray[np.intp], int]:
    """Overwrite the lower triangle of A (p, p) by L with A[pivots][:, pivots] = L Lᵀ up to ``tolerance``.

    Returns the pivots and the rank r; only the first r columns of L are meaningful.
    """
    p = _check_square(A)
    if p == 0:
        return np.empty(0, np.intp), 0
    pivots, rank, work = np.zeros(p, np.intc), np.zeros(1, np.intc), np.empty(2 * p, A.dtype)
    _lapack("pstrf", A, "U", p, A, p, pivots, rank, float(tolerance), work)
    return pivots.astype(np.intp) - 1, int(rank[0])


def invert_lower(L: NDArray) -> None:
    """Overwrite the lower triangular L (p, p) by its inverse."""
    p = _check_square(L)
    if p and _lapack("trtri", L, "U", "N", p, L, p):
        raise ZeroDivisionError("the triangular matrix is singular")


def multiply_rows(A: NDArray, B: NDArray) -> NDArray:
    """A b of each row b of B (m, p), where A (p, p) is lower triangular and never changes.

    On the processor they replace B itself. On a device they may be elsewhere, in memory that the next product of the
    thread but one uses again.
    """
    return _multiplied(A, B)[0]


def rows_and_norms(A: NDArray, B: NDArray) -> tuple[NDArray, NDArray[np.float64]]:
    """What :func:`multiply_rows` returns, and its :func:`row_norms`, which may come with the product."""
    product, norms = _multiplied(A, B)
    return product, row_norms(product) if norms is None else norms


def _multiplied(A: NDArray, B: NDArray) -> tuple[NDArray, NDArray[np.float64] | None]:
    m, p = B.shape
    if _check_square(A) != p or A.dtype != B.dtype or not B.flags.c_contiguous:
        raise ValueError(f"cannot multiply rows of {B.shape} {B.dtype} by {A.shape} {A.dtype} in place")
    if not m or not p:
        return B, None
    if isinstance(where := device.home(B), Accelerator):
        return where.multiply_rows(A, B), None
    if products.suit(p):
        return B, products.multiply_rows(A, B)
    _call(cython_blas, "trmm", B.dtype, "L", "U", "T", "N", p, m, 1.0, A, p, B, p)
    return B, None


def solve_rows(A: NDArray, B: NDArray) -> None:
    """Overwrite each row b of B (m, p) by A⁻¹ b, where A (p, p) is lower triangular."""
    m, p = B.shape
    if _check_square(A) != p or A.dtype != B.dtype or not B.flags.c_contiguous:
        raise ValueError(f"cannot solve for rows of {B.shape} {B.dtype} with {A.shape} {A.dtype} in place")
    if m and p:
        _call(cython_blas, "trsm", B.dtype, "L", "U", "T", "N", p, m, 1.0, A, p, B, p)


def no_sums(p: int) -> NDArray[np.float64]:
    """What :func:`add_gram` adds to on the device at hand: a p × p matrix, or, if products are our own, a vector.

    :func:`packed_sums` makes the same of either.
    """
    where = device.current()
    return products.no_sums(p) if where.is_host and products.suit(p) else where.zeros((p, p))


def add_gram(B: NDArray, sums: NDArray) -> None:
    """Add BᵀB to sums, for B (m, p); what is above the diagonal of a matrix is of no use then.

    Numbers of float32 are widened where the sums are of float64: their products are exact then.
    """
    (m, p), own = B.shape, sums.ndim == 1
    fits = len(sums) == products.n_sums(p) if own else _check_square(sums) == p
    if not fits or not np.can_cast(B.dtype, sums.dtype) or not B.flags.c_contiguous:
        raise ValueError(f"cannot add the Gram matrix of {B.shape} {B.dtype} to {sums.shape} {sums.dtype}")
    if not m or not p:
        return
    if own:
        products.add_gram(B, sums)
        return
    if B.dtype != sums.dtype:
        wide = device.scratch("wide", B.shape, sums.dtype, device.home(B))
        np.copyto(wide, B)
        B = wide
    if isinstance(where := device.home(B), Accelerator):
        where.add_gram(B, sums)
    else:
        _call(cython_blas, "syrk", B.dtype, "U", "N", p, m, 1.0, B, p, 1.0, sums, p)


def packed_sums(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """The lower triangle that was summed, in the order of :mod:`daskrr.kernels.products`, in the memory of NumPy."""
    return sums if sums.ndim == 1 else device.current().get(products.sums_of(sums))


def add_outer(B: NDArray, x: NDArray, y: NDArray) -> None:
    """Add x yᵀ to B (m, p), for x (m,) and y (p,) of any dtype."""
    m, p = B.shape
    if x.shape != (m,) or y.shape != (p,) or not B.flags.c_contiguous:
        raise ValueError(f"cannot add the product of {x.shape} and {y.shape} to {B.shape}")
    if not m or not p:
        return
    x, y = np.ascontiguousarray(x, B.dtype), np.ascontiguousarray(y, B.dtype)
    if (where := device.home(B)).is_host:
        _call(cython_blas, "ger", B.dtype, p, m, 1.0, y, 1, x, 1, B, p)
    else:
        B += where.put(x)[:, None] * where.put(y)


def row_norms(B: NDArray) -> NDArray[np.float64]:
    """Squared Euclidean norms of the rows of B (m, p), C-contiguous, summed in float64; always a NumPy array."""
    return compiled.row_sums(_square, [B])


def _square(found: list[Lanes], weight: Any, limit: Any) -> Lanes:
    return found[0] * found[0]


def mirror_lower(A: NDArray) -> NDArray:
    """Copy of A (p, p) with the upper triangle replaced by the mirrored lower one."""
    full = np.tril(A)
    full += np.tril(A, -1).T
    return full
