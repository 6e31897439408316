"""Kernels on a device whose arrays are not NumPy's, and the code that GPUs are given."""

import ctypes
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from llvmlite import binding
from posing import Elsewhere, PosingDevice

from daskrr.errors import DoesNotFit
from daskrr.kernels import (
    Bernoulli,
    Cosine,
    Function,
    Gaussian,
    Laplacian,
    Linear,
    Matern,
    Polynomial,
    compiled,
    cuda,
    ptx,
)
from daskrr.kernels.bernoulli import _multiply_polynomial
from daskrr.kernels.cuda import (
    COPIES_AT_ONCE,
    LEAST_TILE_ROWS,
    MOST_TILE_ELEMENTS,
    MOST_TILE_ROWS,
    PINNED_BYTES,
    CudaDevice,
    cuda_device,
    tile_rows,
)
from daskrr.kernels.device import HOST, Companions, current, here, home, scratch, using
from daskrr.kernels.lanes import exp
from daskrr.kernels.loops import Lift, Pairs, RowSums, Sweep
from daskrr.kernels.native import LANES, _engine, code_of
from daskrr.kernels.radial import _add_square, _matern_half
from daskrr.kernels.weighted import Weighted
from daskrr.machine import Gpu
from daskrr.numerics import blas
from daskrr.numerics.pass2 import _capped_square

F8, F4 = np.dtype(np.float64), np.dtype(np.float32)


def products(X, Z):
    return X @ Z.T


products.takes_cupy = True


def plain_products(X, Z):
    return X @ Z.T


KERNELS = [
    Gaussian(1.5), Gaussian((1.0, 2.0, 3.0)), Laplacian(1.5), Matern(1.5, 0.5), Matern(1.5, 1.5), Matern(1.5, 2.5),
    Cosine(), Bernoulli(2), Linear(), Polynomial(3, 0.5, 2.0), Gaussian(0.7) + 2.0 * Cosine(),
    Matern(2.0) * Laplacian(3.0) * 0.5, Weighted(Gaussian(1.0)), Function(products),
]  # fmt: skip


# --- Columns on the device -----------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS, ids=range(len(KERNELS)))
@pytest.mark.parametrize("n_features", [3, 12])
@pytest.mark.parametrize("dtype", [F8, F4], ids=str)
@pytest.mark.parametrize("offset", [0.0, 1e5])
@pytest.mark.parametrize("kind", ["posing", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_columns__are_those_of_the_processor(kernel, n_features, dtype, offset, kind):
    """To the bit, but for matrix products of a real GPU, and sums in another order."""
    if kernel == Gaussian((1.0, 2.0, 3.0)) and n_features != 3:
        kernel = Gaussian(tuple(np.linspace(1, 2, n_features)))
    X = offset + np.random.default_rng(0).standard_normal((60, n_features))
    X, columns = X.astype(np.float32), kernel.columns(X[:37].astype(np.float32), dtype)
    expected = np.empty((60, 37), dtype)
    columns(X, expected)
    device = PosingDevice() if kind == "posing" else cuda_device()
    with using(device):
        out = device.empty((60, 37), dtype)
        columns(device.put(X), out)
        found = device.get(out)
    if kind == "posing":
        np.testing.assert_array_equal(found, expected)
    else:
        largest = max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(found, expected, rtol=0, atol=200 * np.finfo(dtype).eps / 2 * largest)


@pytest.mark.parametrize("dtype", [F8, F4], ids=str)
@pytest.mark.parametrize("source", ["f8", "f4", "f2", ">f8", "i2"])
@pytest.mark.parametrize("n_features", [1, 15, 16, 37])
@pytest.mark.parametrize("kind", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_lift__completes_the_square(dtype, source, n_features, kind):
    rng, device = np.random.default_rng(n_features), HOST if kind == "host" else cuda_device()
    X = (10 * rng.standard_normal((23, n_features))).astype(source)
    centre, factors = rng.standard_normal(n_features), rng.random(n_features)
    with using(device):
        lifted, squares = (device.get(one) for one in compiled.lift(device.put(X), centre, factors, dtype))
    rows = ((X.astype(float) - centre) * factors).astype(dtype)
    np.testing.assert_array_equal(lifted[:, :n_features], rows)
    np.testing.assert_allclose(squares, np.square(rows.astype(float)).sum(axis=1), rtol=1e-14)
    np.testing.assert_array_equal(lifted[:, n_features], (-0.5 * squares).astype(dtype))
    np.testing.assert_array_equal(lifted[:, n_features + 1], 1.0)


def test_constants__are_brought_once():
    device, X = PosingDevice(), np.random.default_rng(0).standard_normal((60, 12))
    for kernel in (Gaussian(1.5), Laplacian(1.0) * Linear(), Weighted(Bernoulli(1))):
        columns, counts = kernel.columns(X[:37], F8), []
        with using(device):
            for _ in range(3):
                columns(device.put(X), device.empty((60, 37), F8))
                counts.append(device.kept)
        assert counts[0] == counts[2]
    assert not [shape for shape in device.fetched if len(shape) > 1]


def test_columns__and_matrices_are_prepared_by_the_processor():
    device, X = PosingDevice(), np.random.default_rng(1).standard_normal((20, 12))
    with using(device):
        values = [kernel(X, X) for kernel in KERNELS if kernel.constant_diagonal and "1.0, 2.0" not in repr(kernel)]
        Gaussian(1.0).columns(X, F8)
    assert not device.brought
    assert all(isinstance(one, np.ndarray) for one in values)


@pytest.mark.parametrize(
    ("kernel", "takes"),
    [
        (Gaussian(1.0) + 2.0 * Linear(), True),
        (Function(products) * Gaussian(1.0), True),
        (Function(plain_products), False),
        (2.0 * Function(plain_products) + Linear(), False),
        (Weighted(Function(plain_products)), False),
    ],
)
def test_functions__must_say_that_they_take_arrays_of_a_gpu(kernel, takes):
    assert kernel.takes_gpu_arrays is takes


def test_device__is_that_of_the_thread_and_of_the_array():
    device, array = PosingDevice(), np.arange(6.0)
    assert current() is HOST
    assert here(array) is array
    with using(device):
        assert home(array) is HOST
        assert home(device.put(array)) is device
        assert here(array) is here(array)
        memory = scratch("test", (2, 3), F8)
        assert isinstance(memory, Elsewhere)
        with using(HOST):
            assert isinstance(scratch("test", (2, 3), F8), np.ndarray)
        assert scratch("test", (3, 2), F8).inner.base is memory.inner.base
    assert current() is HOST


def test_companions__go_with_their_owner():
    companions, owner, made = Companions(), np.arange(3.0), []
    for _ in range(3):
        companions.of(owner, "once", lambda: made.append(1))
    assert len(made) == 1
    assert len(companions._made) == 1
    del owner
    assert not companions._made


def test_posing__refuses_what_a_gpu_would():
    """The tests here are worth what this is."""
    device, host = PosingDevice(), np.ones(3)
    there = device.put(host)
    mixtures = [
        lambda: there + host,
        lambda: np.multiply(host, there),
        lambda: np.copyto(there, host),
        lambda: there[np.array([0])],
        lambda: np.asarray(there),
        lambda: np.concatenate([there, there]),
    ]
    for mixed in mixtures:
        with pytest.raises(TypeError):
            mixed()
    with pytest.raises(TypeError):
        there[:] = host


# --- Memory --------------------------------------------------------------------------------------------


def test_tile_rows__are_a_power_of_two_that_fits_or_none():
    assert tile_rows(1024, 139 * 2**30) == MOST_TILE_ROWS
    assert tile_rows(4096, 16 * 2**30) == 4096
    assert tile_rows(4096, 139 * 2**30) == MOST_TILE_ELEMENTS // 4096
    assert tile_rows(10**6, 8 * 2**30) == 0
    sizes = [tile_rows(p, 24 * 2**30) for p in (1, 100, 1000, 5000, 20000, 40000)]
    assert sizes == sorted(sizes, reverse=True)
    assert all(one >= LEAST_TILE_ROWS and one & (one - 1) == 0 for one in sizes)


def test_cuda__without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr("daskrr.machine.gpu", lambda: None)
    with pytest.raises(ValueError, match="no GPU of NVIDIA is found here"):
        CudaDevice()


class Library:
    """cuBLAS, of which NumPy does the work; it is given addresses."""

    def __init__(self):
        self.streams = []
        self.is_loaded = False
        for name in ("gemm", "syrk", "trsm"):
            setattr(self, f"cublasD{name}_v2", Routine(getattr(self, name)))

    def handle(self):
        """Asked of CuPy, which loads the library then."""
        self.is_loaded = True
        return 7

    def loaded(self):
        assert self.is_loaded
        return self

    def cublasSetStream_v2(self, handle, stream):
        assert handle.value == 7
        self.streams.append(stream.value)
        return 0

    def gemm(self, first, second, m, n, k, alpha, A, lda, B, ldb, beta, C, ldc):
        left, right = (k, m) if first.value else (m, k), (n, k) if second.value else (k, n)
        factors = [within(*one) for one in ((A, left, lda), (B, right, ldb))]
        turned = [one.T if turn.value else one for one, turn in zip(factors, (first, second), strict=True)]
        product = within(C, (m, n), ldc)
        product[...] = number(alpha) * turned[0] @ turned[1] + (number(beta) * product if number(beta) else 0)
        return 13 if second.value and k.value == 1 else 0

    def syrk(self, uplo, trans, p, m, alpha, B, ldb, beta, G, ldg):
        assert [one.value for one in (uplo, trans)] == [1, 0]
        rows, gram = within(B, (p, m), ldb), within(G, (p, p), ldg)
        gram[...] = number(beta) * gram + np.triu(number(alpha) * rows @ rows.T)
        return 13 if m.value == 1 else 0

    def trsm(self, side, uplo, trans, diagonal, m, n, alpha, A, lda, B, ldb):
        assert [one.value for one in (side, uplo, trans, diagonal)] == [0, 1, 0, 0]
        factor, right = np.triu(within(A, (m, m), lda)), within(B, (m, n), ldb)
        right[...] = number(alpha) * np.linalg.solve(factor, right)
        return 0


class Routine:
    """A function of C, which is given what its ``argtypes`` say."""

    argtypes: list

    def __init__(self, function):
        self.function = function

    def __call__(self, *given):
        handle, *rest = (kind(one) for kind, one in zip(self.argtypes, given, strict=True))
        assert handle.value == 7
        return self.function(*rest)


def number(address):
    return ctypes.c_double.from_address(address.value).value


def within(address, shape, lead):
    """A matrix in Fortran's order, a part of one whose columns are as long as ``lead``."""
    n_rows, n_columns = (one.value for one in shape)
    numbers = at(address, ((n_columns - 1) * lead.value + n_rows,))
    return np.lib.stride_tricks.as_strided(numbers, (n_rows, n_columns), (8, 8 * lead.value))


def at(address, shape):
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_double)), shape)


class OnGpu(Elsewhere):
    """An array with what CuPy's have besides."""

    @property
    def data(self):
        address = self.inner.ctypes.data
        return SimpleNamespace(
            ptr=address, copy_from_host_async=lambda source, n_bytes: ctypes.memmove(address, source, n_bytes)
        )

    def get(self, out=None):
        if out is None:
            return self.inner.copy()
        PINNED.append(out)
        out[...] = self.inner
        return out


class Stream:
    """One for each thread."""

    made = 0

    def __init__(self, non_blocking):
        assert non_blocking
        Stream.made += 1
        self.ptr = 100 + Stream.made

    def __enter__(self):
        STREAMS.append(self)

    def __exit__(self, *_):
        STREAMS.pop()

    def synchronize(self):
        pass


class Event:
    """Of a copy; pages are written to again only when it has been waited for."""

    def __init__(self, disable_timing):
        assert disable_timing
        self.pending = False

    def record(self):
        assert not self.pending
        self.pending = True

    def synchronize(self):
        self.pending = False


STREAMS: list[Stream] = []
PINNED: list[np.ndarray] = []


class FullGpu(MemoryError):
    pass


@contextmanager
def errstate(linalg):
    assert linalg == "raise"
    yield


@pytest.fixture
def stub(monkeypatch):
    """A GPU, CuPy and cuBLAS as far as they are called."""
    library = Library()
    cupy = SimpleNamespace(
        ndarray=OnGpu,
        empty=lambda shape, dtype: OnGpu(np.empty(shape, dtype)),
        zeros=lambda shape: OnGpu(np.zeros(shape)),
        tril=lambda array: OnGpu(np.tril(array.inner)),
        eye=lambda size: OnGpu(np.eye(size)),
        linalg=SimpleNamespace(cholesky=lambda array: OnGpu(np.linalg.cholesky(array.inner))),
        cuda=SimpleNamespace(
            Stream=Stream,
            Event=Event,
            memory=SimpleNamespace(OutOfMemoryError=FullGpu),
            device=SimpleNamespace(get_cublas_handle=library.handle),
            get_current_stream=lambda: STREAMS[-1],
        ),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupyx", SimpleNamespace(empty_pinned=np.empty, errstate=errstate))
    monkeypatch.setattr("daskrr.machine.gpu", lambda: Gpu("stub", 2**34))
    monkeypatch.setattr(cuda, "find_spec", lambda name: cupy)
    monkeypatch.setattr(cuda, "_cublas", lambda: library.loaded())
    cuda._routine.cache_clear()
    yield CudaDevice(), library
    cuda._routine.cache_clear()


@pytest.mark.parametrize(("small", "routine"), [(1, "syrk"), (5, "gemm")])
@pytest.mark.parametrize("panel", [1, 2, 256])
@pytest.mark.parametrize("corner", [2, 3, 256])
def test_cuda__calls_cublas_in_the_stream_of_the_thread(corner, panel, small, routine, stub, monkeypatch):
    device, library = stub
    for name in ("CORNER_COLUMNS", "GRAM_CORNER_COLUMNS"):
        monkeypatch.setattr(cuda, name, corner)
    for name in ("PANEL_COLUMNS", "GRAM_PANEL_COLUMNS"):
        monkeypatch.setattr(cuda, name, panel)
    monkeypatch.setattr(cuda, "SMALL_GRAM_COLUMNS", small)
    rng = np.random.default_rng(4)
    B, A = rng.standard_normal((9, 5)), rng.standard_normal((5, 5))
    product = B @ np.tril(A).T
    with using(device):
        there, gram = blas.multiply_rows(A, device.put(B)), device.zeros((5, 5))
        blas.add_gram(there, gram)
        blas.add_gram(there, gram)
        np.testing.assert_allclose(device.get(there), product, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(np.tril(device.get(gram)), 2 * np.tril(product.T @ product), rtol=1e-12)
        assert library.streams == [STREAMS[-1].ptr]
        with pytest.raises(RuntimeError, match=f"cuBLAS {routine} failed with status 13"):
            blas.add_gram(device.put(B[:1]), gram)
    assert not STREAMS


def test_cuda__finds_inverse_roots_or_that_there_is_none(stub):
    device, _ = stub
    A = np.random.default_rng(5).standard_normal((9, 5))
    A = A.T @ A
    with using(device):
        found = device.get(device.inverse_root(device.put(A)))
        assert device.inverse_root(device.put(-A)) is None
    np.testing.assert_allclose(found, np.linalg.inv(np.linalg.cholesky(A)), rtol=1e-9, atol=1e-12)


def test_cuda__brings_arrays_there_and_back_in_pages_that_stay(stub):
    device, _ = stub
    PINNED.clear()
    with using(device):
        small, large = (np.arange(float(n)) for n in (10, PINNED_BYTES // 8 + 5))
        for one in (small, large):
            np.testing.assert_array_equal(device.get(device.put(one)), one)
    assert [one.size for one in PINNED] == [10, PINNED_BYTES // 8, 5]
    assert len({one.ctypes.data for one in PINNED}) <= COPIES_AT_ONCE


def test_cuda__brings_numbers_that_cupy_knows(stub):
    device, _ = stub
    with using(device):
        for dtype in (">f8", ">i4", np.longdouble):
            found = device.put(np.arange(5).astype(dtype))
            assert found.dtype == np.float64
            np.testing.assert_array_equal(device.get(found), np.arange(5))
        assert device.put(np.arange(5, dtype=np.int8)).dtype == np.int8


def test_cuda__has_a_stream_for_each_thread(stub):
    device, _ = stub
    seen = []

    def look(_):
        with using(device):
            seen.append(STREAMS[-1].ptr)

    for _ in range(2):
        with ThreadPoolExecutor(1) as one:
            list(one.map(look, range(3)))
    assert len(set(seen)) == 2
    assert seen[0] == seen[2]


def test_cuda__that_is_full_says_what_to_do(stub):
    device, _ = stub

    def fill():
        with using(device):
            raise FullGpu("16 GiB")

    with pytest.raises(DoesNotFit, match=r"ran out of memory \(16 GiB\).*fewer landmarks"):
        fill()
    assert current() is HOST


# --- Code for GPUs -------------------------------------------------------------------------------------

LOOPS = [
    Sweep(exp, F8), Sweep(exp, F4), Pairs(_add_square, 0.0, exp, F8), Pairs(_add_square, 0.0, _matern_half, F4),
    Pairs(_add_square, 0.0, exp, F8, mends=True), Pairs(_multiply_polynomial(2), 1.0, exp, F4, mends=True),
    RowSums(blas._square, F4, 1), RowSums(_capped_square, F8, 2), Lift(F8, F8), Lift(F8, F4), Lift(F4, F8),
]  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS, ids=range(len(LOOPS)))
def test_code__rounds_every_operation_as_a_processor_does(loop):
    """Without a word on rounding, the driver may fuse a product with a sum."""
    name, text = ptx.text_of(loop)
    assert f".visible .entry {name}(" in text
    operations = re.findall(r"\t((?:add|sub|mul|fma|sqrt|div)\.\S*f(?:32|64))", text)
    assert operations
    assert all(".rn." in one for one in operations)
    assert "approx" not in text
    assert "ftz" not in text


def played(loop, arrays, sizes, threads=(3, 2), blocks=(2, 2)):
    """Run the code for a GPU on this processor, one thread after the other."""
    builder = loop.build(ptx.Shared())
    builder.ret_void()
    text, places = str(builder.module), {}
    for kind in ("tid", "ntid", "ctaid", "nctaid"):
        for axis in "xy":
            full = f"llvm.nvvm.read.ptx.sreg.{kind}.{axis}"
            places[kind, axis] = f"{builder.function.name}.{kind}.{axis}"
            body = (
                f'define i32 @"{places[kind, axis]}.get"() {{ %1 = load i32, ptr @"{places[kind, axis]}" ret i32 %1 }}'
            )
            text = text.replace(f'declare i32 @"{full}"()', body).replace(f'@"{full}"', f'@"{places[kind, axis]}.get"')
            text += f'\n@"{places[kind, axis]}" = global i32 0\n'
    engine = _engine()
    engine.add_module(binding.parse_assembly(text))
    engine.finalize_object()
    set_places = {
        key: ctypes.c_int32.from_address(engine.get_global_value_address(name)) for key, name in places.items()
    }
    code = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * len(arrays), *[ctypes.c_int64] * len(sizes))(
        engine.get_function_address(builder.function.name)
    )
    for axis, n_threads, n_blocks in (("x", threads[0], blocks[0]), ("y", threads[1], blocks[1])):
        set_places["ntid", axis].value, set_places["nctaid", axis].value = n_threads, n_blocks
    for place in np.ndindex(*threads, *blocks):
        for (kind, axis), number in zip(
            (("tid", "x"), ("tid", "y"), ("ctaid", "x"), ("ctaid", "y")), place, strict=True
        ):
            set_places[kind, axis].value = number
        code(*(array.ctypes.data for array in arrays), *sizes)


@pytest.mark.parametrize("dtype", [F8, F4], ids=str)
@pytest.mark.parametrize("mends", [False, True])
def test_code__shares_out_rows_and_columns_and_has_the_bits_of_a_processor(dtype, mends):
    rng = np.random.default_rng(2)
    X, Z, w = rng.standard_normal((11, 4)), np.zeros((4, 2 * LANES)), -rng.random(4)
    Z[:, :19] = rng.standard_normal((4, 19))
    tiles = np.tile(-5.0 * rng.random((11, 19)).astype(dtype), (2, 1, 1))
    limits = np.where(np.arange(11) % 3 == 0, np.inf, -2.5)
    loop, sizes = Pairs(_add_square, 0.0, exp, dtype, mends), [11, 4, 19, 2 * LANES]
    code_of(loop)(*(one.ctypes.data for one in (X, Z, w, tiles[0], limits)), *sizes)
    played(loop, (X, Z, w, tiles[1], limits), sizes, threads=(3, 1) if mends else (3, 2))
    np.testing.assert_array_equal(*tiles)


def test_code__sweeps_every_number_once():
    values = np.tile(-np.arange(37.0), (2, 1))
    code_of(Sweep(exp, F8))(values[0].ctypes.data, 37)
    played(Sweep(exp, F8), (values[1],), [37], threads=(4, 1), blocks=(3, 1))
    np.testing.assert_array_equal(*values)


@pytest.mark.parametrize("loop", LOOPS, ids=range(len(LOOPS)))
@pytest.mark.parametrize("extent", [(1, 1), (1, 10**9), (10**9, 3), (65_536, 4096)])
def test_grid__is_one_that_gpus_take(loop, extent):
    blocks, threads = ptx.grid_of(loop, *extent)
    assert all(1 <= one <= ptx.MOST_BLOCKS for one in blocks)
    assert threads[0] * threads[1] <= 1024
    assert not loop.by_rows or (threads[0], blocks[0]) == (ptx.WARP, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F8, F4], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (33, 70), (1000, 257), (3000, 2049), (5000, 4096)])
def test_gpu__multiplies_sums_and_adds_up_as_the_processor_does(shape, dtype):
    rng, device = np.random.default_rng(3), cuda_device()
    B, A = rng.standard_normal(shape).astype(dtype), rng.standard_normal((shape[1], shape[1])).astype(dtype)
    expected = B.astype(float) @ np.tril(A).astype(float).T
    with using(device):
        there = blas.multiply_rows(A, device.put(B))
        norms = blas.row_norms(there)
        found, gram = device.get(there), device.zeros((shape[1], shape[1]))
        blas.add_gram(there.astype(np.float64), gram)
        gram = device.get(gram)
    size = 4 * shape[1] * np.finfo(dtype).eps * (np.abs(B) @ np.abs(A.T)).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=size)
    np.testing.assert_allclose(norms, np.square(found.astype(float)).sum(axis=1), rtol=1e-13)
    wide = found.astype(float)
    np.testing.assert_allclose(np.tril(gram), np.tril(wide.T @ wide), rtol=0, atol=1e-12 * np.abs(wide.T @ wide).max())
