"""Dense references against extended precision, linear solves and closed forms."""

import re

import numpy as np
import pytest
from extended import scores_extended, scores_of_matrix
from hypothesis import given, settings
from hypothesis import strategies as st

from daskrr import exact
from daskrr.errors import InvalidData, InvalidParameter, KernelNotPositive, RidgeTooSmall
from daskrr.kernels import Cosine, Function, Gaussian, Laplacian, Linear, Matern, Polynomial

U64 = 2.0**-53
KERNELS = [
    Linear(),
    Gaussian(1.5),
    Laplacian(2.0),
    Matern(1.0, 2.5),
    Polynomial(3),
    Cosine(),
    Linear() + Gaussian(0.5),
]


def indefinite(X, Z):
    return -(X @ Z.T)


def rows(seed=0, n=24, d=3):
    return np.random.default_rng(seed).standard_normal((n, d))


def solved_scores(matrix, mu):
    return np.diagonal(np.linalg.solve(matrix + mu * np.eye(len(matrix)), matrix))


# --- Leverage scores ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [Linear(), Gaussian(1.5), Polynomial(2), Matern(1.0, 0.5)])
@pytest.mark.parametrize("ridge", [1e-6, 1e-2, 10.0])
def test_leverage_scores__agree_with_extended_precision(kernel, ridge):
    X = rows()
    norm = np.linalg.norm(kernel(X, X), 2) / (len(X) * ridge)
    expected = scores_extended(X, kernel, ridge)
    np.testing.assert_allclose(exact.leverage_scores(X, kernel, ridge), expected, rtol=0, atol=8 * U64 * (4 + norm))


def test_leverage_scores__keep_their_accuracy_down_to_the_smallest_ridge():
    X, kernel = rows(1, 30, 2), Gaussian(3.0)
    smallest = 1001 * U64 * np.linalg.norm(kernel(X, X), 2)
    expected = scores_of_matrix(kernel(X, X), smallest)
    np.testing.assert_allclose(exact.leverage_scores(X, kernel, smallest), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("kernel", KERNELS)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 30), ridge=st.floats(1e-4, 1e4))
@settings(max_examples=20)
def test_leverage_scores__agree_with_a_linear_solve(kernel, seed, n, ridge):
    X = rows(seed, n, 2)
    scores = exact.leverage_scores(X, kernel, ridge)
    np.testing.assert_allclose(scores, solved_scores(kernel(X, X), n * ridge), rtol=0, atol=1e-7)
    assert np.all((scores >= 0) & (scores <= 1 + 1e-12))


def test_leverage_scores__of_equal_rows_share_one_closed_form():
    scores = exact.leverage_scores(np.ones((8, 2)), Gaussian(1.0), 0.25)
    np.testing.assert_allclose(scores, 1 / (8 + 8 * 0.25), rtol=1e-14)


@pytest.mark.parametrize("ridge", [1e-30, 1e-12, 1.0])
@pytest.mark.parametrize("shape", [(20, 3), (6, 15)])
def test_leverage_scores__of_the_linear_kernel_resolve_tiny_ridges(shape, ridge):
    X = rows(2, *shape)
    expected = scores_extended(X, Linear(), ridge, digits=90)
    np.testing.assert_allclose(exact.leverage_scores(X, Linear(), ridge), expected, rtol=0, atol=1e-13)


def test_leverage_scores__of_dependent_features_are_refused_below_the_round_off_of_singular_values():
    X = rows(3, 20, 3)
    X[:, 2] = X[:, 0] + X[:, 1]
    expected = scores_extended(X[:, :2] @ np.linalg.cholesky([[2, 1], [1, 2]]), Linear(), 1e-18, digits=90)
    np.testing.assert_allclose(exact.leverage_scores(X, Linear(), 1e-18), expected, rtol=0, atol=1e-3)
    with pytest.raises(RidgeTooSmall, match="smallest that works"):
        exact.leverage_scores(X, Linear(), 1e-30)


@pytest.mark.parametrize("kernel", [Linear(), Gaussian(2.0)])
def test_leverage_scores__name_the_smallest_ridge_that_works(kernel):
    X = np.repeat(rows(4, 10, 2), 3, axis=1)
    with pytest.raises(RidgeTooSmall, match="smallest that works") as caught:
        exact.leverage_scores(X, kernel, 1e-40)
    smallest = float(re.search(r"works is (\S+)", str(caught.value))[1])
    assert np.all(exact.leverage_scores(X, kernel, smallest) > 0)
    with pytest.raises(RidgeTooSmall, match="smallest that works"):
        exact.leverage_scores(X, kernel, 0.97 * smallest)


def test_leverage_scores__of_zero_rows_are_zero():
    np.testing.assert_array_equal(exact.leverage_scores(np.zeros((4, 2)), Linear(), 1.0), 0.0)
    np.testing.assert_array_equal(exact.leverage_scores(np.zeros((4, 2)), Cosine(), 1.0), 0.0)


def test_leverage_scores__take_specs_and_any_real_dtype():
    X = np.random.default_rng(5).integers(0, 2, (12, 3)).astype(bool)
    expected = exact.leverage_scores(X.astype(float), Gaussian(1.0), 0.1)
    spec = {"kernel": "gaussian", "length_scale": 1.0}
    np.testing.assert_array_equal(exact.leverage_scores(X, spec, 0.1), expected)
    np.testing.assert_array_equal(exact.leverage_scores(X.tolist(), spec, 0.1), expected)


@pytest.mark.parametrize("ridge", [0.0, -1.0, np.inf, np.nan, "1", None])
def test_leverage_scores__refuse_a_ridge_that_is_not_positive(ridge):
    with pytest.raises(InvalidParameter, match="ridge must be a positive finite number"):
        exact.leverage_scores(rows(), Gaussian(1.0), ridge)


@pytest.mark.parametrize(
    ("X", "match"),
    [
        (np.array([[1.0, np.nan]]), "NaN or infinity"),
        (np.array([[1.0, np.inf]]), "NaN or infinity"),
        (np.ones(3), "shape"),
        (np.ones((0, 3)), "shape"),
        (np.ones((3, 0)), "shape"),
        (np.ones((2, 2), complex), "real numbers, not complex128"),
        (np.array([["a", "b"]]), "real numbers"),
        (np.array([[None, 1.0]]), "real numbers, not object"),
        (np.array([[1e300, 1.0]]), "overflows"),
    ],
)
def test_leverage_scores__refuse_what_are_not_finite_rows(X, match):
    with pytest.raises(InvalidData, match=match):
        exact.leverage_scores(X, Polynomial(2), 1.0)


def test_leverage_scores__refuse_more_rows_than_allowed_with_the_bytes():
    with pytest.raises(InvalidParameter, match="11 rows take about 3872 bytes"):
        exact.leverage_scores(rows(0, 11), Gaussian(1.0), 1.0, max_rows=10)


def test_leverage_scores__refuse_a_kernel_with_negative_eigenvalues():
    with pytest.raises(KernelNotPositive, match="eigenvalue -"):
        exact.leverage_scores(rows(), Function(indefinite), 1.0)


def test_effective_dimension__is_the_sum_and_falls_with_the_ridge():
    X, kernel = rows(6), Gaussian(1.0)
    dimensions = [exact.effective_dimension(X, kernel, ridge) for ridge in (1e-8, 1e-3, 1.0)]
    assert dimensions == sorted(dimensions, reverse=True)
    values = np.linalg.eigvalsh(kernel(X, X))
    np.testing.assert_allclose(dimensions[1], np.sum(values / (values + len(X) * 1e-3)), rtol=1e-12)


# --- Nyström ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
def test_nystrom_scores__with_every_row_a_landmark_are_exact(kernel):
    X = rows(7)
    expected = exact.leverage_scores(X, kernel, 1e-2)
    np.testing.assert_allclose(exact.nystrom_scores(X, kernel, 1e-2, np.arange(24)), expected, rtol=0, atol=1e-9)


def test_nystrom_scores__agree_with_the_small_solve():
    X, kernel, mu = rows(8), Gaussian(1.0), 24 * 1e-2
    indices = [3, 1, 20, 7]
    C = kernel(X, X[indices])
    small = C.T @ C + mu * kernel(X[indices], X[indices])
    expected = np.sum(C * np.linalg.solve(small, C.T).T, axis=1)
    np.testing.assert_allclose(exact.nystrom_scores(X, kernel, 1e-2, indices), expected, rtol=0, atol=1e-12)


def test_nystrom_scores__with_weights_agree_with_the_regularised_solve():
    X, kernel = rows(9), Matern(1.0)
    indices, weights = [0, 5, 9], [0.1, 0.0, 2.0]
    C = kernel(X, X[indices])
    L = C @ np.linalg.solve(kernel(X[indices], X[indices]) + np.diag(weights), C.T)
    scores = exact.nystrom_scores(X, kernel, 1e-2, indices, weights)
    np.testing.assert_allclose(scores, solved_scores(L, 24 * 1e-2), rtol=0, atol=1e-12)
    assert np.all(scores <= exact.nystrom_scores(X, kernel, 1e-2, indices) + 1e-12)


def test_nystrom_scores__do_not_count_a_landmark_twice():
    X, kernel = rows(10), Gaussian(1.0)
    once = exact.nystrom_scores(X, kernel, 1e-2, [2, 4])
    np.testing.assert_allclose(exact.nystrom_scores(X, kernel, 1e-2, [2, 4, 2, 2]), once, rtol=0, atol=1e-12)


@given(seed=st.integers(0, 10**6), p=st.integers(1, 12))
@settings(max_examples=25)
def test_residual__is_the_schur_complement_and_vanishes_on_landmarks(seed, p):
    X, kernel = rows(seed), Laplacian(2.0)
    indices = np.random.default_rng(seed).choice(24, p, replace=False)
    C = kernel(X, X[indices])
    expected = 1 - np.sum(C * np.linalg.solve(kernel(X[indices], X[indices]), C.T).T, axis=1)
    found = exact.residual(X, kernel, indices)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11)
    np.testing.assert_allclose(found[indices], 0, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("indices", "match"),
    [
        ([], "at least one row number"),
        ([[0]], "at least one row number"),
        ([0.5], "at least one row number"),
        (np.ones(24, bool), "at least one row number"),
        ([24], "from 0 to 23"),
        ([-1], "from 0 to 23"),
    ],
)
def test_residual__refuses_indices_that_are_no_rows(indices, match):
    with pytest.raises(InvalidParameter, match=match):
        exact.residual(rows(), Linear(), indices)


@pytest.mark.parametrize("weights", [[1.0], [-1.0, 1.0], [np.inf, 1.0], [np.nan, 1.0], [[1.0, 1.0]]])
def test_nystrom_scores__refuse_weights_that_do_not_fit(weights):
    with pytest.raises(InvalidParameter, match="2 finite numbers, none negative"):
        exact.nystrom_scores(rows(), Linear(), 1.0, [0, 1], weights)
