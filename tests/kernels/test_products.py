"""Products of tiles by machine code of our own, against NumPy with numbers whose sums are exact."""

import gc
import weakref

import numpy as np
import pytest

from daskrr.kernels import native, products
from daskrr.kernels.device import Device, using
from daskrr.numerics import blas, panels

COLUMNS = [1, 7, 8, 23, 24, 25, 48, 61, 97, 193, 257, 512, 1024]
ROWS = [1, 7, 8, 9, 63, 64, 65, 129, 300]
DTYPES = [np.float64, np.float32]


def integers(rng, *shape):
    return rng.integers(-9, 10, shape).astype(float)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_columns", COLUMNS)
def test_rows__times_a_lower_matrix(n_columns, dtype):
    rng = np.random.default_rng(0)
    A = integers(rng, n_columns, n_columns).astype(dtype)
    for n_rows in ROWS:
        B = integers(rng, n_rows, n_columns)
        memory = np.full((n_rows + 2, n_columns), np.nan, dtype)
        memory[1:-1] = B
        norms = products.multiply_rows(A, memory[1:-1])
        expected = B @ np.tril(A).T
        np.testing.assert_array_equal(memory[1:-1], expected, err_msg=f"{n_rows} rows")
        np.testing.assert_array_equal(norms, np.square(expected).sum(axis=1), err_msg=f"{n_rows} rows")
        assert np.isnan(memory[[0, -1]]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_columns", [1, 15, 16, 17, 32, 40])
@pytest.mark.parametrize("n_terms", [1, 48, 257])
def test_rows__times_few_columns(n_terms, n_columns, dtype):
    rng = np.random.default_rng(5)
    A = integers(rng, n_terms, n_columns).astype(dtype)
    for n_rows in ROWS:
        B = integers(rng, n_rows, n_terms).astype(dtype)
        memory = np.full((n_rows + 2, n_columns), np.nan, dtype)
        products.rows_times(A, B, memory[1:-1])
        np.testing.assert_array_equal(memory[1:-1], B @ A, err_msg=f"{n_rows} rows")
        assert np.isnan(memory[[0, -1]]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_columns", COLUMNS)
def test_gram_matrices__are_added_to_their_sums(n_columns, dtype):
    rng = np.random.default_rng(1)
    for n_rows in [*ROWS, 2000]:
        B, C = (integers(rng, rows, n_columns).astype(dtype) for rows in (n_rows, 5))
        memory = np.full(products.n_sums(n_columns) + 2 * 8, np.nan)
        sums = memory[8:-8]
        sums[:] = products.no_sums(n_columns)
        products.add_gram(B, sums)
        products.add_gram(C, sums)
        found = np.tril(panels.matrix_of(sums, n_columns))
        np.testing.assert_array_equal(found, np.tril(B.T @ B + C.T @ C), err_msg=f"{n_rows} rows")
        assert np.isnan(memory[[*range(8), *range(-8, 0)]]).all()


def test_sums__take_half_the_memory_of_a_matrix_and_are_aligned():
    sums = products.no_sums(1000)
    assert 1000 * 1001 / 2 <= len(sums) <= 1.05 * 1000 * 1001 / 2
    assert sums.ctypes.data % products.REGISTER_BYTES == 0


def test_gram_matrix_of_float32__is_summed_exactly_in_float64():
    B = np.full((1000, 60), 1.0 + 2.0**-20, np.float32)
    G = blas.no_sums(60)
    blas.add_gram(B, G)
    found = panels.matrix_of(blas.packed_sums(G), 60)
    np.testing.assert_array_equal(np.tril(found), np.tril(np.full((60, 60), 1000 * (1.0 + 2.0**-20) ** 2)))


def test_sums__of_other_columns_are_refused():
    for n_columns in (50, 70):
        with pytest.raises(ValueError, match=r"Gram matrix of \(9, 60\)"):
            blas.add_gram(np.ones((9, 60)), products.no_sums(n_columns))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows__have_the_same_bits_wherever_they_are(dtype):
    rng = np.random.default_rng(2)
    A, B = rng.standard_normal((100, 100)).astype(dtype), rng.standard_normal((150, 100)).astype(dtype)
    alone, together = B.copy(), B.copy()
    products.multiply_rows(A, together)
    for row in range(len(B)):
        products.multiply_rows(A, alone[row : row + 1])
    np.testing.assert_array_equal(alone, together)


def squared_and_one(lanes):
    return lanes * lanes + 1.0


@pytest.mark.parametrize("wide", [True, False])
def test_times__is_our_own_or_that_of_numpy(wide, monkeypatch):
    monkeypatch.setattr(native, "has_wide_registers", lambda: wide)
    rng, own = np.random.default_rng(7), []
    monkeypatch.setattr(products, "rows_times", lambda *given, done=products.rows_times: own.append(done(*given)))
    for n_columns in (40, products.MOST_FACTOR_BYTES // 8 // 30 + 1):
        A, B = integers(rng, 30, n_columns), integers(rng, 9, 30)
        out = np.empty((9, n_columns))
        products.times(B, A, out)
        np.testing.assert_array_equal(out, B @ A)
        products.times(B, A, out, squared_and_one)
        np.testing.assert_array_equal(out, np.square(B @ A) + 1.0)
    assert len(own) == 2 * (native.has_wide_registers() and wide)


def test_times__refuses_what_does_not_fit():
    A, B, out = np.ones((3, 4)), np.ones((5, 3)), np.ones((5, 4))
    for wrong in [(B[:, :2], A, out), (B, A[:, :2], out), (B, A, out[:4]), (B, A.astype(np.float32), out)]:
        with pytest.raises(ValueError, match="cannot multiply"):
            products.times(*wrong)
    for wrong in [(np.ones((3, 5)).T, A, out), (B, A, np.ones((4, 5)).T)]:
        with pytest.raises(ValueError, match="one after the other"):
            products.times(*wrong)


class Elsewhere(Device):
    """A device whose memory is not that of NumPy."""

    def holds(self, array):
        return False

    def empty(self, shape, dtype):
        raise AssertionError("memory of the device was asked for")


def test_host_arrays__are_multiplied_here_whatever_the_device():
    rng = np.random.default_rng(4)
    A, B, sums = integers(rng, 60, 60), integers(rng, 9, 60), blas.no_sums(60)
    with using(Elsewhere()):
        blas.add_gram(B, sums)
        found = blas.multiply_rows(A, B.copy())
    np.testing.assert_array_equal(np.tril(panels.matrix_of(blas.packed_sums(sums), 60)), np.tril(B.T @ B))
    np.testing.assert_array_equal(found, B @ np.tril(A).T)


def test_factor__is_packed_once_and_forgotten_with_it(monkeypatch):
    packed = []
    pack = products._pack_lower
    monkeypatch.setattr(products, "_pack_lower", lambda A: packed.append(pack(A)) or packed[-1])
    A, B = np.eye(50), np.ones((3, 50))
    for _ in range(2):
        products.multiply_rows(A, B)
    (memory,) = packed
    assert memory.ctypes.data % products.REGISTER_BYTES == 0
    left = weakref.ref(memory)
    del A, memory
    packed.clear()
    gc.collect()
    assert left() is None


@pytest.mark.parametrize("n_columns", [products.LEAST_COLUMNS - 1, products.LEAST_COLUMNS, products.MOST_COLUMNS + 1])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_others__are_left_to_blas_and_agree_with_it(n_columns, wide, dtype, monkeypatch):
    monkeypatch.setattr(native, "has_wide_registers", lambda: wide)
    own = []
    for name in ("multiply_rows", "add_gram"):
        done = getattr(products, name)
        monkeypatch.setattr(products, name, lambda *given, done=done, name=name: own.append(name) or done(*given))
    rng = np.random.default_rng(3)
    A, B = (integers(rng, size, n_columns).astype(dtype) for size in (n_columns, 40))
    sums = blas.no_sums(n_columns)
    blas.add_gram(B, sums)
    np.testing.assert_array_equal(np.tril(panels.matrix_of(blas.packed_sums(sums), n_columns)), np.tril(B.T @ B))
    found = blas.multiply_rows(A, B.copy())
    np.testing.assert_array_equal(found, B @ np.tril(A).T)
    ours = wide and n_columns == products.LEAST_COLUMNS
    assert own == (["add_gram", "multiply_rows"] if ours else [])
