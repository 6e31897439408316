"""Kernels against scikit-learn, extended precision and identities."""

import json
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from extended import kernel_extended
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.gaussian_process import kernels as gp
from sklearn.metrics import pairwise

import daskrr
from daskrr.errors import InvalidData, InvalidParameter
from daskrr.kernels import (
    KINDS,
    Bernoulli,
    Cosine,
    Function,
    Gaussian,
    Kernel,
    Laplacian,
    Linear,
    Matern,
    Polynomial,
    Product,
    Scaled,
    Sum,
    as_kernel,
    base,
    from_spec,
)

U64 = 2.0**-53


def inner(X, Z, power=1):
    return (X @ Z.T) ** power


def inner_with_diagonal(X, Z):
    return X @ Z.T


inner_with_diagonal.diagonal = lambda X: np.full(len(X), 7.0)


def wrong_shape(X, Z):
    return X @ X.T


def complex_values(X, Z):
    return X @ Z.T + 0j


BOUNDED = [
    Gaussian(1.5),
    Laplacian(1.5),
    Matern(1.5, 0.5),
    Matern(1.5, 1.5),
    Matern(1.5, 2.5),
    Cosine(),
    Bernoulli(1),
    Bernoulli(3),
    Gaussian(0.7) + 2.0 * Cosine(),
    Matern(2.0) * Laplacian(3.0) * 0.5,
]
DOTS = [Linear(), Polynomial(), Polynomial(3, 0.5, 2.0), Polynomial(1, 0.0), Function(inner, {"power": 2})]
EVERY = BOUNDED + DOTS


def unit(dtype):
    return float(np.finfo(dtype).eps) / 2


def evaluate(kernel, X, Z, dtype):
    out = np.full((len(X), len(Z)), np.nan, dtype)
    kernel.columns(Z, dtype)(X, out)
    return out


def ident(kernel):
    return json.dumps(kernel.to_spec())


# --- Reference values ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "oracle"),
    [
        (Gaussian(1.5), lambda X, Z: pairwise.rbf_kernel(X, Z, gamma=1 / (2 * 1.5**2))),
        (Laplacian(1.5), lambda X, Z: pairwise.laplacian_kernel(X, Z, gamma=1 / 1.5)),
        (Matern(1.5, 0.5), gp.Matern(1.5, nu=0.5)),
        (Matern(1.5, 1.5), gp.Matern(1.5, nu=1.5)),
        (Matern((1.5, 2.0, 3.0), 2.5), gp.Matern([1.5, 2.0, 3.0], nu=2.5)),
        (Linear(), pairwise.linear_kernel),
        (Polynomial(3, 0.5, 2.0), lambda X, Z: pairwise.polynomial_kernel(X, Z, 3, 2.0, 0.5)),
        (Cosine(), pairwise.cosine_similarity),
    ],
)
def test_call__agrees_with_scikit_learn(kernel, oracle):
    rng = np.random.default_rng(0)
    X, Z = rng.standard_normal((20, 3)), rng.standard_normal((9, 3))
    np.testing.assert_allclose(kernel(X, Z), oracle(X, Z), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize(
    "kernel",
    [
        Gaussian(0.7),
        Gaussian((0.3, 4.0)),
        Laplacian((0.3, 4.0)),
        Matern(0.7, 0.5),
        Matern(0.7, 1.5),
        Matern(3.0, 2.5),
    ],
)
def test_call__agrees_with_extended_precision(kernel, offset):
    rng = np.random.default_rng(1)
    X, Z = rng.standard_normal((8, 2)) + offset, rng.standard_normal((6, 2)) + offset
    Z[0] = X[0] + [1e-3, 0.0]
    expected = np.array(kernel_extended(X, Z, kernel).tolist(), dtype=float)
    np.testing.assert_allclose(kernel(X, Z), expected, rtol=0, atol=4 * U64)


@pytest.mark.parametrize("order", range(1, 11))
def test_call__is_the_bernoulli_polynomial(order):
    t = [Fraction(k, 64) for k in range(-80, 81, 7)]
    values = Bernoulli(order)(np.array([[float(x)] for x in t]), np.zeros((1, 1)))[:, 0]
    with mpmath.workdps(40):
        exact = [(-1) ** (order - 1) * mpmath.bernpoly(2 * order, mpmath.mpf(float(x % 1))) for x in t]
        expected = np.array([float(value / mpmath.factorial(2 * order)) for value in exact])
    np.testing.assert_allclose(values, expected, rtol=0, atol=16 * U64 * np.max(np.abs(expected)))


def test_call__of_bernoulli_is_periodic_and_symmetric_to_the_bit():
    X = np.random.default_rng(2).uniform(-3, 3, (12, 2)).round(6)
    values = Bernoulli(2)(X, X)
    np.testing.assert_array_equal(values, values.T)
    np.testing.assert_allclose(Bernoulli(2)(X + 5, X - 7), values, rtol=0, atol=1e-16)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int8, np.uint8, np.uint64, bool])
@pytest.mark.parametrize("kernel", EVERY, ids=ident)
def test_call__upcasts_before_any_arithmetic(kernel, dtype):
    rng = np.random.default_rng(3)
    X, Z = rng.integers(0, 120, (6, 3)).astype(dtype), rng.integers(0, 120, (4, 3)).astype(dtype)
    expected = kernel(X.astype(np.float64), Z.astype(np.float64))
    np.testing.assert_array_equal(kernel(X, Z), expected)
    np.testing.assert_array_equal(evaluate(kernel, X, Z, np.float64), evaluate(kernel, X.astype(float), Z, float))


@pytest.mark.parametrize("kernel", EVERY, ids=ident)
def test_call__is_positive_semidefinite(kernel):
    X = np.random.default_rng(4).standard_normal((40, 2))
    values = np.linalg.eigvalsh(kernel(X, X))
    assert values[0] > -1e-13 * values[-1]


@pytest.mark.parametrize("kernel", EVERY, ids=ident)
def test_diagonal__is_the_diagonal_of_the_matrix(kernel):
    X = np.random.default_rng(5).standard_normal((40, 3))
    X[7] = 0
    diagonal = kernel.diagonal(X)
    np.testing.assert_allclose(diagonal, np.diagonal(kernel(X, X)), rtol=1e-14)
    assert diagonal.dtype == np.float64
    if kernel.constant_diagonal:
        assert np.all(diagonal == diagonal[0])


def test_constant_diagonal__holds_only_where_every_part_has_one():
    assert [kernel.constant_diagonal for kernel in BOUNDED] == [True] * 5 + [False, True, True, False, True]
    assert not any(kernel.constant_diagonal for kernel in DOTS)


@pytest.mark.parametrize("kernel", [Gaussian(1.0), Linear()])
@pytest.mark.parametrize(
    ("X", "match"),
    [
        (np.zeros(3), "two-dimensional"),
        (np.zeros((2, 3), complex), "real numbers, not complex128"),
        (np.array([["a"]]), "real numbers"),
        (np.zeros((2, 4)), "4 and 3 features"),
    ],
)
def test_call__refuses_what_are_not_rows(kernel, X, match):
    with pytest.raises(InvalidData, match=match):
        kernel(X, np.zeros((2, 3)))


# --- Columns ------------------------------------------------------------------------------------------


def test_panel_rows__fit_the_cache_or_are_few():
    assert all(8 * p * base.panel_rows(p) <= base.PANEL_BYTES or base.panel_rows(p) == 16 for p in range(1, 20000))
    assert max(base.panel_rows(p) for p in range(100)) <= 1024


@pytest.mark.parametrize("n", [0, 1, 1024, 1025, 2500])
def test_columns__are_filled_panel_by_panel_or_at_once(n):
    rng = np.random.default_rng(3)
    X, Z = rng.standard_normal((n, 4)), rng.standard_normal((3, 4))
    for at_once in (False, True):
        heights, tile = [], np.full((n, 3), np.nan)

        def fill(rows, out, heights=heights):
            heights.append(len(rows))
            np.matmul(rows, Z.T, out=out)

        base.Columns(fill, at_once=at_once)(X, tile)
        np.testing.assert_allclose(tile, X @ Z.T, rtol=1e-13, atol=1e-14)
        assert sum(heights) == n
        assert max(heights, default=0) <= (n if at_once else base.panel_rows(3))
        assert len(heights) <= 1 or not at_once


def test_columns__of_wide_rows_are_never_filled_at_once():
    X, heights = np.ones((100, base.PANEL_INPUT_BYTES // 8 // 40)), []
    base.Columns(lambda rows, out: heights.append(len(rows)), at_once=True)(X, np.empty((100, 1)))
    assert heights == [40, 40, 20]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("kernel", [Gaussian(1.0), Matern(1.0, 1.5)], ids=ident)
def test_columns__of_a_row_have_the_same_bits_beside_rows_that_are_mended(kernel, dtype):
    rng = np.random.default_rng(8)
    Z, X = 0.1 * rng.standard_normal((300, 12)), 0.1 * rng.standard_normal((2000, 12))
    X[5::9] *= 300.0
    tile = evaluate(kernel, X, Z, dtype)
    near = np.delete(np.arange(2000), np.arange(5, 2000, 9))
    np.testing.assert_array_equal(evaluate(kernel, X[near], Z, dtype), tile[near])
    np.testing.assert_allclose(tile, kernel(X, Z), rtol=0, atol=100 * unit(dtype))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("kernel", [Gaussian(1.0), Matern(1.0, 1.5)], ids=ident)
def test_columns__that_are_mended_have_the_same_bits_however_rows_are_cut(kernel, dtype):
    rng = np.random.default_rng(9)
    Z = rng.standard_normal((300, 12)) * rng.uniform(0.0, 8.0, (300, 1))
    X = Z[rng.integers(0, 300, 2000)] + 0.3 * rng.standard_normal((2000, 12))
    tile = evaluate(kernel, X, Z, dtype)
    parts = [evaluate(kernel, part, Z, dtype) for part in np.split(X, [1, 400, 950, 951, 1300])]
    np.testing.assert_array_equal(np.concatenate(parts), tile)
    np.testing.assert_allclose(tile, kernel(X, Z), rtol=0, atol=100 * unit(dtype))


def panel(seed, m, p, d, offset, spread):
    """Rows and landmarks with duplicates and near duplicates of landmarks among the rows."""
    rng = np.random.default_rng(seed)
    Z, X = rng.standard_normal((p, d)) * spread, rng.standard_normal((m, d)) * spread
    twins = rng.integers(0, p, m)
    kind = rng.integers(0, 3, m)[:, None]
    near = Z[twins] + spread * 10.0 ** rng.uniform(-12, 0, (m, 1)) * rng.standard_normal((m, d))
    return np.where(kind == 0, X, np.where(kind == 1, Z[twins], near)) + offset, Z + offset


SHAPES = {
    "seed": st.integers(0, 2**32),
    "m": st.integers(0, 40),
    "p": st.integers(1, 30),
    "d": st.sampled_from([1, 4, 5, 8, 9, 17, 60]),
    "offset": st.sampled_from([0.0, 1e4, 1e6]),
    "spread": st.sampled_from([1e-3, 0.3, 1.0, 5.0, 1e3]),
    "dtype": st.sampled_from([np.float64, np.float32]),
    "source": st.sampled_from([np.float64, np.float32, np.int64]),
}


@given(kernel=st.sampled_from(BOUNDED), **SHAPES)
@settings(max_examples=400)
def test_columns__agree_with_differences(kernel, seed, m, p, d, offset, spread, dtype, source):
    X, Z = (rows.astype(source) for rows in panel(seed, m, p, d, offset, spread))
    expected = kernel(X, Z)
    scale = float(kernel.diagonal(np.ones((1, d)))[0])
    bound = 100 * unit(dtype) * scale + float(np.finfo(dtype).tiny)
    np.testing.assert_allclose(evaluate(kernel, X, Z, dtype), expected, rtol=0, atol=bound)


@given(kernel=st.sampled_from(DOTS), **SHAPES)
@settings(max_examples=150)
def test_columns__agree_with_inner_products(kernel, seed, m, p, d, offset, spread, dtype, source):
    X, Z = (np.abs(rows).astype(source) for rows in panel(seed, m, p, d, offset, spread))
    expected = kernel(X, Z)
    inside = expected < 1e37
    bound = 4 * (d + 10) * unit(dtype) * np.abs(expected) + float(np.finfo(dtype).tiny)
    error = np.abs(evaluate(kernel, X, Z, dtype)[inside] - expected[inside])
    assert np.all(error <= bound[inside])


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("kernel", [Gaussian(1.5), *BOUNDED[2:5]], ids=ident)
@pytest.mark.parametrize("n_features", [5, 32, 300])
def test_columns__resolve_clusters_a_million_length_scales_apart(kernel, n_features, dtype):
    rng = np.random.default_rng(6)
    centres = rng.standard_normal((4, n_features)) * 1e6
    X = centres[rng.integers(0, 4, 80)] + rng.standard_normal((80, n_features)) / np.sqrt(n_features)
    Z = np.vstack([X[:20], centres])
    expected = kernel(X, Z)
    assert np.count_nonzero(expected > 0.1) > 80
    np.testing.assert_allclose(evaluate(kernel, X, Z, dtype), expected, rtol=0, atol=100 * unit(dtype))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("kernel", [Gaussian(1.0), Matern(1.0, 0.5), Matern(1.0, 1.5), Matern(1.0, 2.5)], ids=ident)
@pytest.mark.parametrize("norm", [1.0, 5.0, 15.0, 50.0, 300.0, 1e4, 1e7])
def test_columns__are_right_at_every_distance_from_landmarks_of_every_norm(kernel, norm, dtype):
    rng = np.random.default_rng(14)
    Z = rng.standard_normal((30, 24))
    Z *= norm / np.linalg.norm(Z, axis=1, keepdims=True)
    steps = rng.standard_normal((900, 24))
    steps *= np.geomspace(1e-9, 30, 900)[:, None] / np.linalg.norm(steps, axis=1, keepdims=True)
    X = np.repeat(Z, 30, axis=0) + rng.permutation(steps)
    error = np.abs(evaluate(kernel, X, Z, dtype) - kernel(X, Z))
    assert error.max() <= 100 * unit(dtype)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize("kernel", [Gaussian(3.0), Matern(3.0, 1.5), Matern(3.0, 2.5)], ids=ident)
def test_columns__need_no_differences_on_ordinary_rows(kernel, offset, dtype, monkeypatch):
    X, Z = panel(13, 50, 20, 12, offset, 1.0)
    expected = kernel(X, Z)
    monkeypatch.setattr("daskrr.kernels.radial._add_square", lambda total, difference, weight: total * math.nan)
    np.testing.assert_allclose(evaluate(kernel, X, Z, dtype), expected, rtol=0, atol=100 * unit(dtype))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("kernel", [Gaussian(1.5), Matern(1.5, 0.5), Laplacian(1.5)], ids=ident)
def test_columns__of_a_landmark_with_itself_are_at_most_one(kernel, dtype):
    Z = np.random.default_rng(7).standard_normal((50, 20)) + 1e4
    values = evaluate(kernel, Z, Z, dtype)
    assert values.max() <= 1.0
    np.testing.assert_allclose(np.diagonal(values), 1.0, rtol=0, atol=100 * unit(dtype))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("kernel", BOUNDED[:6], ids=ident)
@pytest.mark.parametrize("size", [1e-300, 1e-30, 1e20, 1e160, 1.7e308])
def test_columns__stay_finite_on_tiny_and_huge_rows(kernel, dtype, size):
    X = size * np.vstack([np.eye(6), -np.eye(6), np.zeros((1, 6))])
    with np.errstate(all="raise"):
        values, expected = evaluate(kernel, X, X, dtype), kernel(X, X)
    np.testing.assert_allclose(values, expected, rtol=0, atol=100 * unit(dtype))
    np.testing.assert_allclose(np.diagonal(values)[:12], 1.0, rtol=0, atol=100 * unit(dtype))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("kernel", BOUNDED[:5], ids=ident)
def test_columns__hold_no_subnormal_numbers(kernel, dtype):
    X = np.linspace(0, 3000, 4000)[:, None] * np.full((1, 6), 0.2)
    values = evaluate(kernel, X, X[:1], dtype)
    assert np.all((values == 0) | (values >= np.finfo(dtype).tiny))
    assert values[-1] == 0
    assert values[0] == 1


def test_columns__of_polynomials_overflow_to_infinity_in_silence():
    with np.errstate(all="raise"):
        values = evaluate(Polynomial(5), np.full((2, 3), 1e9), np.full((2, 3), 1e9), np.float32)
    assert np.all(np.isposinf(values))


def laid_out(X):
    """The same rows, as they may lie in memory."""
    wide = np.zeros((2 * len(X), 3 * X.shape[1]), X.dtype)
    wide[1::2, ::3] = X
    return [np.asfortranarray(X), wide[1::2, ::3], np.ascontiguousarray(X[::-1, ::-1])[::-1, ::-1]]


@pytest.mark.parametrize("kernel", EVERY, ids=ident)
@pytest.mark.parametrize("n_features", [1, 3, 12])
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_values__do_not_depend_on_how_rows_lie_in_memory(kernel, n_features, offset):
    """With the offset, rows and single pairs are evaluated again from their differences."""
    X = offset + np.random.default_rng(0).standard_normal((40, n_features))
    Z = X[:21]
    matrix = kernel(X, Z)
    tiles = [evaluate(kernel, X, Z, dtype) for dtype in (np.float64, np.float32)]
    for view in laid_out(X):
        landmarks = view[:21]
        np.testing.assert_array_equal(view, X)
        np.testing.assert_allclose(kernel(view, landmarks), matrix, rtol=1e-12, atol=1e-14 * np.abs(matrix).max())
        for tile in tiles:
            found = evaluate(kernel, view, landmarks, tile.dtype)
            np.testing.assert_allclose(found, tile, rtol=0, atol=200 * unit(tile.dtype) * np.abs(tile).max())


@pytest.mark.parametrize("kernel", EVERY, ids=ident)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_columns__survive_pickling_and_serve_several_threads(kernel, dtype):
    X, Z = panel(8, 64, 16, 6, 0.0, 1.0)
    columns = pickle.loads(pickle.dumps(kernel.columns(Z, dtype)))
    outs = [np.empty((16, 16), dtype) for _ in range(4)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(columns, np.split(X, 4), outs))
    expected = [evaluate(kernel, part, Z, dtype) for part in np.split(X, 4)]
    np.testing.assert_array_equal(np.vstack(outs), np.vstack(expected))


def test_columns__with_a_length_per_feature_weigh_the_features():
    X, Z = panel(9, 30, 10, 8, 100.0, 1.0)
    scales = np.geomspace(0.1, 10, 8)
    for kind in (Gaussian, Laplacian, Matern):
        expected = kind(1.0)(X / scales, Z / scales)
        np.testing.assert_allclose(evaluate(kind(scales), X, Z, np.float64), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("Z", "dtype", "error", "match"),
    [
        (np.zeros((2, 3)), np.float16, InvalidParameter, "float64 or float32, not float16"),
        (np.zeros((0, 3)), np.float64, InvalidData, "at least one landmark"),
        (np.full((1, 3), np.nan), np.float64, InvalidData, "finite"),
        (np.zeros((2, 2)), np.float64, InvalidParameter, "3 entries"),
    ],
)
def test_columns__refuse_what_they_cannot_prepare(Z, dtype, error, match):
    with pytest.raises(error, match=match):
        Gaussian((1.0, 2.0, 3.0)).columns(Z, dtype)


# --- Parameters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1.0, np.inf, np.nan, True, "mean", None, (), (1.0, 0.0), [[1.0]], 1j])
@pytest.mark.parametrize("kind", [Gaussian, Laplacian, Matern])
def test_length_scale__refuses_what_is_no_scale(kind, value):
    with pytest.raises(InvalidParameter, match="length_scale"):
        kind(value)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Matern(1.0, 2.0), "nu must be 0.5, 1.5 or 2.5"),
        (lambda: Polynomial(0), "degree must be an integer at least 1"),
        (lambda: Polynomial(2.0), "degree must be an integer"),
        (lambda: Polynomial(2, -1.0), "offset must be a finite number that is not negative"),
        (lambda: Polynomial(2, 1.0, 0.0), "scale must be a positive"),
        (lambda: Bernoulli(11), "order must be an integer from 1 to 10"),
        (lambda: 0.0 * Linear(), "factor must be a positive"),
        (lambda: Linear() * np.inf, "factor must be a positive"),
        (lambda: Scaled(2.0, "linear"), "part must be made of kernels"),
        (lambda: Sum((Linear(),)), "at least two kernels"),
        (lambda: Product("ab"), "parts must be made of kernels"),
    ],
)
def test_kernels__refuse_parameters_outside_their_range(make, match):
    with pytest.raises(InvalidParameter, match=match):
        make()


def test_length_scale__becomes_floats_that_hash():
    assert Gaussian(np.array([1, 2])) == Gaussian((1.0, 2.0))
    assert hash(Gaussian([1, 2])) == hash(Gaussian((1.0, 2.0)))
    assert isinstance(Gaussian(np.float32(2)).length_scale, float)


def test_check_features__looks_inside_compositions():
    kernel = Linear() + 2.0 * (Cosine() * Matern((1.0, 2.0)))
    kernel.check_features(2)
    with pytest.raises(InvalidParameter, match="2 entries, the rows have 3 features"):
        kernel.check_features(3)


def test_resolve__takes_the_median_of_the_distance_of_each_kernel():
    X = np.random.default_rng(10).standard_normal((31, 4))
    pairs = np.triu_indices(31, 1)
    euclidean = np.median(np.linalg.norm(X[pairs[0]] - X[pairs[1]], axis=1))
    manhattan = np.median(np.abs(X[pairs[0]] - X[pairs[1]]).sum(axis=1))
    kernel = (Gaussian("median") + 2.0 * (Matern("median", 2.5) * Laplacian("median"))).resolve(X)
    gaussian, scaled = kernel.parts
    matern, laplacian = scaled.part.parts
    assert not kernel.needs_sample
    assert matern.nu == 2.5
    np.testing.assert_allclose(
        [gaussian.length_scale, matern.length_scale, laplacian.length_scale],
        [euclidean, euclidean, manhattan],
        rtol=1e-14,
    )


def test_resolve__leaves_other_kernels_alone():
    assert all(kernel.resolve(np.zeros((1, 1))) == kernel for kernel in EVERY)


@pytest.mark.parametrize("sample", [np.zeros((5, 2)), np.zeros((1, 2))])
def test_resolve__refuses_a_sample_without_distances(sample):
    with pytest.raises(InvalidData, match="give length_scale as a number"):
        Gaussian("median").resolve(sample)


def test_call__refuses_an_unresolved_length_scale():
    kernel = 2.0 * (Linear() + Gaussian("median"))
    assert kernel.needs_sample
    for use in (lambda X: kernel(X, X), kernel.diagonal, lambda X: kernel.columns(X, np.float64)):
        with pytest.raises(InvalidParameter, match="call resolve"):
            use(np.ones((2, 2)))


# --- Compositions -------------------------------------------------------------------------------------


def test_operators__flatten_and_merge():
    a, b, c = Linear(), Cosine(), Gaussian(1.0)
    assert (a + b) + (c + a) == Sum((a, b, c, a))
    assert (a * b) * c == Product((a, b, c))
    assert 2 * (a * 3.0) == Scaled(6.0, a)
    assert a + b * c == Sum((a, Product((b, c))))


@pytest.mark.parametrize("use", [lambda k: k + 1.0, lambda k: k * "2", lambda k: "2" * k])
def test_operators__refuse_other_objects(use):
    with pytest.raises(TypeError, match=r"unsupported operand|can't multiply"):
        use(Linear())


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_columns__of_compositions_are_compositions_of_columns(dtype):
    X, Z = panel(11, 20, 7, 6, 0.0, 1.0)
    a, b = Gaussian(1.0), Polynomial(2)
    first, second = evaluate(a, X, Z, dtype), evaluate(b, X, Z, dtype)
    np.testing.assert_array_equal(evaluate(a + b, X, Z, dtype), first + second)
    np.testing.assert_array_equal(evaluate(a * b, X, Z, dtype), first * second)
    np.testing.assert_array_equal(evaluate(3 * a, X, Z, dtype), 3 * first)


# --- Functions ----------------------------------------------------------------------------------------


def test_function__uses_its_own_diagonal_where_it_has_one():
    X = np.random.default_rng(12).standard_normal((40, 3))
    np.testing.assert_allclose(Function(inner).diagonal(X), Linear().diagonal(X), rtol=1e-14)
    np.testing.assert_array_equal(Function(inner_with_diagonal).diagonal(X), 7.0)
    assert Function(inner).diagonal(X[:0]).shape == (0,)


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (wrong_shape, r"wrong_shape returned values of shape \(3, 3\) instead of \(3, 2\)"),
        (complex_values, "complex128"),
    ],
)
def test_function__refuses_results_that_are_no_kernel(function, match):
    with pytest.raises(InvalidParameter, match=match):
        Function(function)(np.ones((3, 2)), np.ones((2, 2)))
    with pytest.raises(InvalidParameter, match=match):
        evaluate(Function(function), np.ones((3, 2)), np.ones((2, 2)), np.float32)


def test_function__refuses_functions_without_an_importable_name(monkeypatch):
    def local(X, Z):
        return X @ Z.T

    for function in (local, lambda X, Z: X @ Z.T, "inner", mpmath.mp):
        with pytest.raises(InvalidParameter, match=r"no name to import it by|cannot be imported"):
            Function(function)
    monkeypatch.setattr(local, "__qualname__", "inner")
    with pytest.raises(InvalidParameter, match="workers would import the wrong"):
        Function(local)
    monkeypatch.setattr(local, "__module__", "__main__")
    with pytest.raises(InvalidParameter, match="no name to import it by"):
        Function(local)


@pytest.mark.parametrize("parameters", [{"power": np.eye(2)}, {"power": np.nan}, {1: 2}, [1]])
def test_function__refuses_parameters_that_are_not_json(parameters):
    with pytest.raises(InvalidParameter, match=r"parameters of .*inner must be"):
        Function(inner, parameters)


# --- Specs --------------------------------------------------------------------------------------------


def test_kinds__hold_every_kernel_by_name():
    words = "linear gaussian laplacian matern polynomial cosine bernoulli scaled sum product function"
    assert list(KINDS) == words.split()
    assert all(kind.name == name for name, kind in KINDS.items())


SCALES = st.one_of(
    st.floats(1e-300, 1e300),
    st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=4),
    st.just("median"),
)
LEAVES = st.one_of(
    st.sampled_from([Linear(), Cosine(), Function(inner, {"power": 3})]),
    st.builds(Gaussian, SCALES),
    st.builds(Laplacian, SCALES),
    st.builds(Matern, SCALES, st.sampled_from([0.5, 1.5, 2.5])),
    st.builds(Polynomial, st.integers(1, 9), st.floats(0, 1e9), st.floats(1e-9, 1e9)),
    st.builds(Bernoulli, st.integers(1, 10)),
)
TREES = st.recursive(
    LEAVES,
    lambda parts: st.one_of(
        st.builds(Scaled, st.floats(1e-9, 1e9), parts),
        st.builds(Kernel.__add__, parts, parts),
        st.builds(Kernel.__mul__, parts, parts),
    ),
    max_leaves=5,
)


@given(TREES)
def test_from_spec__inverts_to_spec(kernel):
    spec = json.loads(json.dumps(kernel.to_spec()))
    again = from_spec(spec, allow_functions=[f"{__name__}:inner"])
    assert again == kernel
    assert hash(again) == hash(kernel)
    assert again.to_spec() == spec


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("gaussian", "is a mapping with the key 'kernel'"),
        ({}, "unknown kernel None"),
        ({"kernel": "sigmoid"}, "unknown kernel 'sigmoid': choose one of linear, .*, rbf, poly"),
        ({"kernel": ["linear"]}, "unknown kernel"),
        ({"kernel": "scaled", "factor": 2.0}, "needs the parameter 'part'"),
        ({"kernel": "rbf", "gamma": None}, "gamma must be a positive finite number, not None"),
        ({"kernel": "rbf", "gamma": 0.0}, "gamma must be a positive finite number"),
        ({"kernel": "rbf", "gamma": 1.0, "length_scale": 1.0}, "takes 'gamma' or 'length_scale', not both"),
        ({"kernel": "poly", "coef0": -1.0}, "coef0 must be a finite number that is not negative"),
        ({"kernel": "matern", "gamma": 1.0}, "no parameter 'gamma', only length_scale, nu"),
        ({"kernel": "linear", "gamma": 1.0}, "no parameter 'gamma'"),
        ({"kernel": "gaussian", "length_scale": "1"}, "length_scale must be"),
        ({"kernel": "polynomial", "degree": "2"}, "degree must be"),
        ({"kernel": "sum", "parts": {"kernel": "linear"}}, "parts must be a list"),
        ({"kernel": "sum", "parts": [{"kernel": "linear"}]}, "at least two"),
        ({"kernel": "scaled", "factor": "2", "part": {"kernel": "linear"}}, "factor must be"),
        ({"kernel": "scaled", "factor": 2, "part": "linear"}, "is a mapping"),
        ({"kernel": "function", "function": "inner"}, "named 'package.module:function'"),
        ({"kernel": "function", "function": "os:getcwd"}, "list it in allow_functions"),
        ({"kernel": "function", "function": "os:nothing"}, "cannot be imported"),
        ({"kernel": "function", "function": "os:sep"}, "not a function"),
    ],
)
def test_from_spec__refuses_what_is_no_kernel(spec, match):
    with pytest.raises(InvalidParameter, match=match):
        from_spec(spec, allow_functions=["os:nothing", "os:sep"])


def test_as_kernel__takes_kernels_names_specs_and_functions():
    assert as_kernel(Linear()) == Linear()
    assert as_kernel("linear") == Linear()
    assert as_kernel("rbf") == as_kernel("gaussian") == Gaussian("median")
    assert as_kernel("matern") == Matern("median", nu=1.5)
    assert as_kernel("poly") == as_kernel("polynomial") == Polynomial()
    assert as_kernel({"kernel": "linear"}) == Linear()
    assert as_kernel(inner) == Function(inner)


@pytest.mark.parametrize("obj", [Gaussian, 3.0, None])
def test_as_kernel__refuses_other_objects(obj):
    with pytest.raises(InvalidParameter, match="is not a kernel"):
        as_kernel(obj)


@settings(max_examples=50)
@given(
    st.sampled_from(["rbf", "laplacian", "polynomial", "poly", "linear", "cosine"]),
    st.floats(1e-3, 1e2),
    st.integers(1, 4),
    st.floats(0, 10),
    st.integers(0, 10**6),
)
def test_as_kernel__translates_what_scikit_learn_means(name, gamma, degree, coef0, seed):
    takes = {
        "rbf": {"gamma": gamma},
        "laplacian": {"gamma": gamma},
        "polynomial": {"gamma": gamma, "degree": degree, "coef0": coef0},
        "poly": {"gamma": gamma, "degree": degree, "coef0": coef0},
    }
    generator = np.random.default_rng(seed)
    X, Z = generator.standard_normal((7, 3)), generator.standard_normal((4, 3))
    given_parameters = takes.get(name, {})
    kernel = as_kernel({"kernel": name, **given_parameters})
    theirs = pairwise.pairwise_kernels(X, Z, metric=name, **given_parameters)
    np.testing.assert_allclose(kernel(X, Z), theirs, rtol=1e-9, atol=1e-300)
    assert from_spec(kernel.to_spec()) == kernel


def test_as_kernel__translates_the_parts_of_sums():
    spec = {"kernel": "sum", "parts": [{"kernel": "rbf", "gamma": 0.5}, {"kernel": "poly", "coef0": 0.0}]}
    assert as_kernel(spec) == Gaussian(1.0) + Polynomial(offset=0.0)


def test_names__serve_where_a_kernel_is_asked_for(tmp_path):
    X = np.random.default_rng(0).standard_normal((60, 2))
    options = {"ridge": 1e-2, "landmarks": 20, "random_state": 0}
    expected = daskrr.leverage_scores(X, Gaussian("median"), **options).scores.compute()
    for name in ("gaussian", "rbf"):
        np.testing.assert_array_equal(daskrr.leverage_scores(X, name, **options).scores.compute(), expected)
    spec = {"kernel": "rbf", "gamma": 0.5}
    assert daskrr.plan(X, spec, 1e-2, 20) == daskrr.plan(X, Gaussian(1.0), 1e-2, 20)
    daskrr.score_to_zarr(X, tmp_path / "scores.zarr", spec, **options)
    assert daskrr.load(tmp_path / "scores.zarr").kernel == Gaussian(1.0)


# --- Parameters by name -------------------------------------------------------------------------------


def test_get_params__names_what_is_inside():
    found = (2.0 * Gaussian(1.0) + Matern(3.0) * Function(inner, {"power": 3})).get_params()
    assert found["parts__0__part__length_scale"] == 1.0
    assert found["parts__1__parts__0__nu"] == 1.5
    assert found["parts__1__parts__1__parameters__power"] == 3
    assert Gaussian((1.0, 2.0)).get_params() == {"length_scale": (1.0, 2.0)}
    assert Linear().get_params() == {}
    assert list((2.0 * Gaussian(1.0)).get_params(deep=False)) == ["factor", "part"]


@given(TREES)
def test_set_params__of_what_get_params_gives_is_the_kernel_itself(kernel):
    parameters = kernel.get_params()
    again = kernel.set_params(**parameters)
    assert again == kernel
    assert hash(again) == hash(kernel)
    assert clone(kernel) is kernel
    for name, value in parameters.items():
        if name.endswith("length_scale"):
            changed = kernel.set_params(**{name: 7.25})
            assert changed.get_params()[name] == 7.25
            assert changed.set_params(**{name: value}) == kernel


def test_set_params__leaves_the_kernel_as_it_is_and_sets_what_is_inside_last():
    kernel = 2.0 * Gaussian(1.0)
    assert kernel.set_params(part=Matern(1.0), part__nu=0.5, factor=3) == 3.0 * Matern(1.0, nu=0.5)
    assert kernel == 2.0 * Gaussian(1.0)
    assert Function(inner, {"power": 3}).set_params(parameters__power=2) == Function(inner, {"power": 2})


@pytest.mark.parametrize(
    ("parameters", "match"),
    [
        ({"part__gamma": 1.0}, r"Gaussian\(length_scale=1.0\) has no parameter 'gamma', only length_scale"),
        ({"nu": 1.0}, "has no parameter 'nu', only factor, part"),
        ({"factor__x": 1.0}, "factor of .* is 2.0, which has no parameters of its own"),
        ({"part__length_scale": -1.0}, "length_scale must be a positive finite number"),
    ],
)
def test_set_params__refuses_what_there_is_not(parameters, match):
    with pytest.raises(InvalidParameter, match=match):
        (2.0 * Gaussian(1.0)).set_params(**parameters)
