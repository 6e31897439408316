from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from posing import PosingDevice
from variants import slow_but

from daskrr.kernels import products
from daskrr.kernels.cuda import cuda_device
from daskrr.kernels.device import HOST, using
from daskrr.numerics import blas, panels

SIZES = [1, 63, 300, 1024, 1301]


def positive(p, seed=0):
    X = np.random.default_rng(seed).standard_normal((p + 20, p))
    return X.T @ X / p + np.eye(p)


@pytest.fixture(params=[1, 3])
def cores(request, monkeypatch):
    with ThreadPoolExecutor(request.param) as pool:
        monkeypatch.setattr(panels, "_cores", lambda: pool)
        yield request.param


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("p", slow_but(SIZES, 63, 1301))
def test_panels__are_as_good_as_lapack(p):
    G = positive(p)
    L = panels.lower(np.where(np.tri(p, dtype=bool), G, np.nan))
    assert panels.cholesky(L) == 0
    assert not np.triu(L, 1).any()
    np.testing.assert_allclose(L @ L.T, G, rtol=0, atol=1e-13 * np.abs(G).max())
    inverse = L.copy()
    panels.invert_lower(inverse)
    assert not np.triu(inverse, 1).any()
    reference = L.copy()
    blas.invert_lower(reference)
    worst = max(np.abs(reference @ L - np.eye(p)).max(), 1e-15)
    assert np.abs(inverse @ L - np.eye(p)).max() < 4 * worst
    assert np.abs(L @ inverse - np.eye(p)).max() < 1e-12


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("p", SIZES)
def test_products__are_those_of_numpy(p):
    rng = np.random.default_rng(1)
    A, B = (np.tril(rng.standard_normal((p, p))) for _ in range(2))
    G, x, size = positive(p), rng.standard_normal(p), 1e-12 * p
    np.testing.assert_allclose(panels.lower_product(A, B), A @ B, atol=size)
    np.testing.assert_allclose(panels.gram(A), np.tril(A @ A.T), atol=size)
    np.testing.assert_allclose(panels.times(G, x), G @ x, atol=size)
    np.testing.assert_allclose(panels.times(A[:5], G), A[:5] @ G, atol=size)
    assert panels.times(A[:0], G).shape == (0, p)
    np.testing.assert_array_equal(panels.mirrored(np.where(np.tri(p, dtype=bool), G, np.nan)), blas.mirror_lower(G))
    assert panels.trace_of_form(A, G) == pytest.approx(np.trace(A @ G @ A.T), rel=1e-12)


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("p", [0, *SIZES])
def test_lower_triangles__are_packed_without_what_is_above(p):
    inside, values = np.tri(p, dtype=bool), np.random.default_rng(2).standard_normal((p, p))
    packed = panels.packed_lower(np.where(inside, values, np.nan))
    np.testing.assert_array_equal(packed, values[inside])
    np.testing.assert_array_equal(panels.unpacked_lower(packed), np.tril(values))


KINDS = ["host", "posing", pytest.param("cuda", marks=pytest.mark.gpu)]


def device_of(kind):
    return {"host": lambda: HOST, "posing": PosingDevice, "cuda": cuda_device}[kind]()


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p", [0, *SIZES])
def test_sums__are_those_of_a_matrix_and_become_it_again(kind, p):
    G, device = np.random.default_rng(3).standard_normal((p, p)), device_of(kind)
    with using(device):
        sums = device.get(products.sums_of(device.put(G)))
    assert len(sums) == products.n_sums(p)
    np.testing.assert_array_equal(np.tril(panels.matrix_of(sums, p)), np.tril(G))
    np.testing.assert_array_equal(sums[products.diagonal_places(p)], np.diagonal(G))


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("shape", [(0,), (5,), (3, 700), (2**20 + 3,), (2, 2**20 + 3)])
def test_add__adds_all_numbers(shape):
    first, second = (np.random.default_rng(seed).standard_normal(shape) for seed in (0, 1))
    total = first.copy()
    panels.add(total, second)
    np.testing.assert_array_equal(total, first + second)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p", [1, 7, 300, 1100])
def test_inverse_root__and_products_are_found_where_the_matrix_is(kind, p):
    A = positive(p)
    device = device_of(kind)
    with using(device):
        there = device.put(A)
        M, bad = panels.inverse_root(there, 0.5)
        products = device.get(panels.lower_product(M, M)), device.get(panels.times(there, M))
        trace, inverse = panels.trace_of_form(M, there), device.get(M)
        assert bad == 0
        assert panels.inverse_root(device.put(A - 2 * np.linalg.norm(A) * np.eye(p)))[1] == 1
    np.testing.assert_array_equal(np.triu(inverse, 1), 0.0)
    np.testing.assert_allclose(inverse @ (A + 0.5 * np.eye(p)) @ inverse.T, np.eye(p), atol=1e-9)
    np.testing.assert_allclose(products[0], inverse @ inverse, atol=1e-9 * np.abs(inverse).max() ** 2)
    np.testing.assert_allclose(products[1], A @ inverse, atol=1e-9 * np.abs(A).max() * np.abs(inverse).max())
    np.testing.assert_allclose(trace, np.trace(inverse @ A @ inverse.T), rtol=1e-9)
    np.testing.assert_array_equal(device.get(there) if kind != "host" else A, positive(p))


def test_symmetric__is_the_mean_with_the_transpose():
    A = np.random.default_rng(0).standard_normal((600, 600))
    np.testing.assert_array_equal(panels.symmetric(A), 0.5 * (A + A.T))


def test_bits__do_not_depend_on_the_number_of_cores(monkeypatch):
    found = []
    for cores in (1, 2, 5):
        with ThreadPoolExecutor(cores) as pool:
            monkeypatch.setattr(panels, "_cores", lambda pool=pool: pool)
            L = panels.lower(positive(1100))
            panels.cholesky(L)
            inverse = L.copy()
            panels.invert_lower(inverse)
            found.append((L, inverse, panels.lower_product(inverse, L), panels.trace_of_form(inverse, positive(1100))))
    for one in found[1:]:
        for here, there in zip(found[0], one, strict=True):
            np.testing.assert_array_equal(here, there)


@pytest.mark.parametrize("bad", [0, 700, 1100])
def test_cholesky__tells_the_first_bad_pivot(bad):
    A = np.tril(positive(1101))
    A[bad, bad] = -1.0
    assert panels.cholesky(A) == bad + 1


def test_inverse__of_a_singular_matrix_is_told():
    L = np.eye(1100)
    L[600, 600] = 0.0
    with pytest.raises(ZeroDivisionError, match="singular"):
        panels.invert_lower(L)
