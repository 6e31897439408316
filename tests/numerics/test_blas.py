"""BLAS and LAPACK primitives against NumPy."""

import sys
import threading

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from daskrr.numerics import blas

SIZES = [0, 1, 2, 7, 70]
DTYPES = [np.float64, np.float32]


def positive(p, dtype=np.float64, seed=0):
    factor = np.random.default_rng(seed).standard_normal((p, p + 3))
    return (factor @ factor.T + np.eye(p)).astype(dtype)


def lower(p, dtype=np.float64):
    return np.linalg.cholesky(positive(p)).astype(dtype)


def tolerance(dtype):
    return 200 * np.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", SIZES)
def test_cholesky__reproduces_the_matrix_from_its_lower_triangle(p, dtype):
    A = positive(p, dtype)
    factor = A.copy()
    factor[np.triu_indices(p, 1)] = np.nan
    assert blas.cholesky(factor) == 0
    L = np.tril(factor)
    np.testing.assert_allclose(L @ L.T, A, rtol=tolerance(dtype), atol=tolerance(dtype) * p)
    assert np.isnan(factor[np.triu_indices(p, 1)]).all()


def test_cholesky__tells_the_first_bad_pivot():
    A = np.diag([1.0, 2.0, -1.0, -5.0])
    assert blas.cholesky(A) == 3


@pytest.mark.parametrize("rank", [0, 1, 3, 9])
def test_pivoted_cholesky__finds_rank_and_factor(rank):
    factor = np.random.default_rng(1).standard_normal((9, rank))
    A = factor @ factor.T
    R = A.copy()
    pivots, found = blas.pivoted_cholesky(R, 1e-10)
    assert found == rank
    assert sorted(pivots) == list(range(9))
    L = np.tril(R)[:, :rank]
    np.testing.assert_allclose(L @ L.T, A[np.ix_(pivots, pivots)], atol=1e-9)
    assert np.all(np.diff(np.diagonal(L)) <= 0)


def test_pivoted_cholesky__stops_at_the_tolerance():
    A = np.diag([1e-3, 4.0, 1.0, 1e-6])
    pivots, rank = blas.pivoted_cholesky(A, 1e-2)
    assert (list(pivots[:2]), rank) == ([1, 2], 2)


def test_pivoted_cholesky__takes_an_empty_matrix():
    pivots, rank = blas.pivoted_cholesky(np.empty((0, 0)), 0.0)
    assert (len(pivots), rank) == (0, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", SIZES)
def test_invert_lower__gives_the_inverse(p, dtype):
    L = lower(p, dtype)
    inverse = L.copy()
    blas.invert_lower(inverse)
    np.testing.assert_allclose(inverse @ L, np.eye(p), atol=tolerance(dtype))


def test_invert_lower__refuses_a_singular_matrix():
    with pytest.raises(ZeroDivisionError, match="singular"):
        blas.invert_lower(np.diag([1.0, 0.0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 3), (5, 0), (1, 1), (6, 4), (3, 70)])
def test_multiply_rows__applies_the_lower_triangle_to_every_row(shape, dtype):
    rng = np.random.default_rng(2)
    A, B = rng.standard_normal((shape[1], shape[1])).astype(dtype), rng.standard_normal(shape).astype(dtype)
    expected = B.astype(float) @ np.tril(A).T.astype(float)
    A[np.triu_indices(len(A), 1)] = np.nan
    blas.multiply_rows(A, B)
    np.testing.assert_allclose(B, expected, rtol=0, atol=tolerance(dtype) * 10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_gram__adds_to_the_lower_triangle_alone(dtype):
    rng = np.random.default_rng(3)
    B, G = rng.standard_normal((9, 4)).astype(dtype), rng.standard_normal((4, 4)).astype(dtype)
    before = G.copy()
    blas.add_gram(B, G)
    np.testing.assert_allclose(np.tril(G), np.tril(before + B.T @ B), rtol=0, atol=tolerance(dtype))
    np.testing.assert_array_equal(np.triu(G, 1), np.triu(before, 1))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_add_gram__takes_empty_tiles(shape):
    G = np.ones((shape[1], shape[1]))
    blas.add_gram(np.empty(shape), G)
    np.testing.assert_array_equal(G, np.ones_like(G))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: blas.cholesky(np.eye(3)[:, ::-1]), "C-contiguous square"),
        (lambda: blas.cholesky(np.ones((2, 3))), "C-contiguous square"),
        (lambda: blas.invert_lower(np.asfortranarray(lower(3))), "C-contiguous square"),
        (lambda: blas.multiply_rows(np.eye(3), np.ones((4, 2))), r"\(4, 2\)"),
        (lambda: blas.multiply_rows(np.eye(3), np.ones((4, 3), np.float32)), "float32"),
        (lambda: blas.multiply_rows(np.eye(3), np.ones((4, 6))[:, ::2]), "in place"),
        (lambda: blas.add_gram(np.ones((4, 3)), np.eye(2)), r"\(2, 2\)"),
        (lambda: blas.add_gram(np.ones((4, 3)), np.eye(3, dtype=np.float32)), "float32"),
        (lambda: blas.add_gram(np.ones((3, 4)).T, np.eye(3)), "Gram"),
    ],
)
def test_primitives__refuse_what_they_cannot_do_in_place(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_add_outer__adds_the_product_of_two_vectors(dtype):
    generator = np.random.default_rng(0)
    B, x, y = (
        generator.standard_normal((7, 4)).astype(dtype),
        generator.standard_normal(7),
        generator.standard_normal(4),
    )
    expected = B + np.outer(x, y)
    blas.add_outer(B, x, y)
    np.testing.assert_allclose(B, expected, rtol=100 * np.finfo(dtype).eps)
    with pytest.raises(ValueError, match="cannot add the product"):
        blas.add_outer(B, y, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_norms__are_float64_squares(dtype):
    B = np.random.default_rng(4).standard_normal((5, 33)).astype(dtype)
    norms = blas.row_norms(B)
    assert norms.dtype == np.float64
    np.testing.assert_allclose(norms, np.sum(B.astype(float) ** 2, axis=1), rtol=10 * np.finfo(dtype).eps)


def test_mirror_lower__is_symmetric_and_a_copy():
    A = np.arange(9.0).reshape(3, 3)
    full = blas.mirror_lower(A)
    np.testing.assert_array_equal(full, full.T)
    np.testing.assert_array_equal(np.tril(full), np.tril(A))
    assert not np.shares_memory(full, A)


def pool_sizes():
    return [info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas"]


def test_one_thread__is_one_inside_and_restored_by_the_last_to_leave():
    before = pool_sizes()
    inside, leave, entered = [], threading.Event(), threading.Event()

    def other():
        with blas.one_thread():
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with blas.one_thread():
        thread.start()
        entered.wait(30)
        inside.append(pool_sizes())
    inside.append(pool_sizes())
    leave.set()
    thread.join()
    assert inside == [[1] * len(before)] * 2
    assert pool_sizes() == before


def test_one_thread__is_restored_after_an_error():
    before = pool_sizes()
    with pytest.raises(KeyError, match="inside"), blas.one_thread():
        raise KeyError("inside")
    assert pool_sizes() == before


@pytest.mark.parametrize(
    "call",
    [
        lambda: blas.cholesky(positive(600)),
        lambda: blas.pivoted_cholesky(positive(600), 1e-9),
        lambda: blas.invert_lower(np.eye(900)),
        lambda: blas.multiply_rows(np.eye(1100), np.ones((900, 1100))),
        lambda: blas.add_gram(np.ones((900, 1100)), np.eye(1100)),
    ],
)
def test_primitives__let_other_threads_run(call, monkeypatch):
    # No thread is ever forced to yield here: another one runs during the call only if the call lets it.
    seen = []
    name = blas._call
    monkeypatch.setattr(blas, "_call", lambda *arguments: seen.append(_others_run(lambda: name(*arguments))))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        for _ in range(30):
            call()
            if any(seen):
                break
    finally:
        sys.setswitchinterval(interval)
    assert any(seen)


def _others_run(call):
    go, ran = threading.Event(), []
    thread = threading.Thread(target=lambda: (go.wait(60), ran.append(True)))
    thread.start()
    go.set()
    call()
    during = bool(ran)
    thread.join()
    return during


class Library:
    """A BLAS that has nothing but its settings."""

    def __init__(self, get: str, put: str) -> None:
        self.threads = 8
        setattr(self, get, lambda: self.threads)
        setattr(self, put, lambda number: setattr(self, "threads", number))


LIBRARIES = {
    "openblas": Library("openblas_get_num_threads64_", "openblas_set_num_threads64_"),
    "mkl": Library("MKL_Get_Max_Threads", "MKL_Set_Num_Threads"),
    "blis": Library("bli_thread_get_num_threads", "bli_thread_set_num_threads"),
}


@pytest.fixture
def loaded(monkeypatch):
    """Have only certain libraries loaded."""

    def load(found):
        infos = [{"user_api": "blas", "filepath": name} for name in found]
        monkeypatch.setattr(blas, "threadpool_info", lambda: [*infos, {"user_api": "openmp", "filepath": "none"}])
        monkeypatch.setattr(blas.ctypes, "CDLL", found.__getitem__)
        blas._thread_settings.cache_clear()

    yield load
    blas._thread_settings.cache_clear()


@pytest.mark.parametrize("name", LIBRARIES)
def test_one_thread__is_told_to_every_library(name, loaded):
    loaded({"other": Library("unknown_get", "unknown_set"), name: LIBRARIES[name]})
    with blas.one_thread():
        assert LIBRARIES[name].threads == 1
    assert LIBRARIES[name].threads == 8


def test_one_thread__does_nothing_where_no_library_can_be_told(loaded):
    loaded({})
    with blas.one_thread():
        assert blas._thread_settings() == []
