"""A device whose arrays refuse to be mixed with those of NumPy, as those of a GPU do; its memory is that of NumPy."""

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from daskrr.kernels.device import HOST, Accelerator, Companions, using
from daskrr.kernels.loops import Loop
from daskrr.kernels.native import code_of
from daskrr.numerics import blas

# Functions of NumPy that CuPy answers, of those that daskrr calls; all ufuncs are answered.
ANSWERED = (
    np.any, np.max, np.einsum, np.copyto, np.empty_like, np.zeros_like, np.diagonal, np.where, np.linalg.inv,
    np.linalg.eigvalsh, np.linalg.eigh,
)  # fmt: skip


class Elsewhere(NDArrayOperatorsMixin):
    """An array on the device; only arrays that are there too, and numbers, can be computed with."""

    def __init__(self, inner: np.ndarray) -> None:
        self.inner = inner

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = (), **more: Any) -> Any:
        given = [_inside(one) for one in inputs]
        targets = tuple(_inside(one) for one in out)
        found = getattr(ufunc, method)(*given, **({"out": targets} if targets else {}), **more)
        return out[0] if targets else _outside(found)

    def __array_function__(self, function: Any, kinds: Any, given: Any, more: Any) -> Any:
        if function not in ANSWERED:
            return NotImplemented
        found = function(*map(_inside, given), **{name: _inside(one) for name, one in more.items()})
        return tuple(map(_outside, found)) if isinstance(found, tuple) else _outside(found)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError("an array of the device becomes one of NumPy by get() alone")

    def __getitem__(self, place: Any) -> "Elsewhere":
        return type(self)(np.asarray(self.inner[_place(place)]))

    def __setitem__(self, place: Any, value: Any) -> None:
        self.inner[_place(place)] = _inside(value)

    def __len__(self) -> int:
        return len(self.inner)

    def __bool__(self) -> bool:
        return bool(self.inner)

    def __float__(self) -> float:
        return float(self.inner)

    shape = property(lambda self: self.inner.shape)
    dtype = property(lambda self: self.inner.dtype)
    flags = property(lambda self: self.inner.flags)
    nbytes = property(lambda self: self.inner.nbytes)
    size = property(lambda self: self.inner.size)
    ndim = property(lambda self: self.inner.ndim)
    T = property(lambda self: type(self)(self.inner.T))

    def copy(self) -> "Elsewhere":
        return type(self)(self.inner.copy())

    def astype(self, dtype: Any, copy: bool = True) -> "Elsewhere":
        return type(self)(self.inner.astype(dtype, copy=copy))

    def view(self, dtype: Any) -> "Elsewhere":
        return type(self)(self.inner.view(dtype))

    def reshape(self, shape: tuple[int, ...]) -> "Elsewhere":
        return type(self)(self.inner.reshape(shape))

    def fill(self, value: float) -> None:
        self.inner.fill(value)

    def all(self) -> "Elsewhere":
        return Elsewhere(np.asarray(self.inner.all()))


def _inside(value: Any) -> Any:
    if isinstance(value, Elsewhere):
        return value.inner
    if isinstance(value, np.ndarray):
        raise TypeError(f"an array of NumPy, of shape {value.shape}, where one of the device is needed")
    return value


def _outside(value: Any) -> Any:
    return Elsewhere(np.asarray(value)) if isinstance(value, np.ndarray | np.generic) else value


def _place(place: Any) -> Any:
    return tuple(map(_inside, place)) if isinstance(place, tuple) else _inside(place)


class PosingDevice(Accelerator):
    """Takes the place of a GPU; counts what goes there and back, by shape."""

    name = "cuda"

    def __init__(self, height: int = 48) -> None:
        self.height = height
        self.brought, self.fetched = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
        self.kept = 0
        self.threads: set[int] = set()
        self._companions = Companions()

    def holds(self, array: Any) -> bool:
        return isinstance(array, Elsewhere)

    def empty(self, shape: Any, dtype: Any) -> Elsewhere:
        # What is used before it is written shows.
        return Elsewhere(np.full(shape, 0xFF, np.uint8) if dtype == np.uint8 else np.full(shape, np.nan, dtype))

    def zeros(self, shape: tuple[int, ...]) -> Elsewhere:
        return Elsewhere(np.zeros(shape))

    def put(self, array: np.ndarray) -> Elsewhere:
        assert isinstance(array, np.ndarray), "it is there already"
        self.brought[array.shape] += 1
        self.threads.add(threading.get_ident())
        return Elsewhere(np.array(array, order="C"))

    def keep(self, constant: np.ndarray) -> Elsewhere:
        return self._companions.of(constant, None, lambda: self._kept(constant))

    def _kept(self, constant: np.ndarray) -> Elsewhere:
        self.kept += 1
        return self.put(constant)

    def get(self, array: Elsewhere) -> np.ndarray:
        self.fetched[array.shape] += 1
        return array.inner.copy()

    def run(self, loop: Loop, arrays: Sequence[Elsewhere], sizes: Sequence[int]) -> None:
        code_of(loop)(*(one.inner.ctypes.data for one in arrays), *sizes)

    def tile_rows(self, n_columns: int) -> int:
        return self.height

    def multiply_rows(self, A: np.ndarray, B: Elsewhere) -> Elsewhere:
        product, there = B.copy(), self.keep(A)
        with using(HOST):
            blas.multiply_rows(there.inner, product.inner)
        B.inner[...] = np.nan  # what nobody may look at any more
        return product

    def inverse_root(self, A: Elsewhere) -> Elsewhere | None:
        L = np.tril(A.inner)
        if blas.cholesky(L):
            return None
        blas.invert_lower(L)
        return Elsewhere(L)

    def add_gram(self, B: Elsewhere, G: Elsewhere) -> None:
        with using(HOST):
            blas.add_gram(B.inner, G.inner)
        G.inner[np.triu_indices(len(G.inner), 1)] = np.nan  # the same
