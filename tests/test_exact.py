"""Dense references against extended precision, linear solves and closed forms."""

import re

import numpy as np
import pytest
from extended import scores_extended, scores_of_matrix
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import LinAlgError
from variants import slow_but

from daskrr import exact, spectra, theory
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
@pytest.mark.parametrize("ridge", slow_but([1e-6, 1e-2, 10.0], 1e-6))
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


def test_nystrom_scores__of_landmarks_that_vanish_are_zero():
    X = np.vstack([np.zeros((2, 3)), rows(11, 5)])
    for kernel in (Linear(), Cosine()):
        np.testing.assert_array_equal(exact.nystrom_scores(X, kernel, 1.0, [0, 1]), 0.0)


@pytest.mark.parametrize("weights", [None, [1e-3, 2.0, 0.5, 1.0]])
def test_nystrom_scores__of_the_linear_kernel_are_those_of_the_same_polynomial(weights):
    X = rows(12)
    found = exact.nystrom_scores(X, Linear(), 1e-2, [1, 4, 2, 9], weights)
    expected = exact.nystrom_scores(X, Polynomial(1, offset=0.0), 1e-2, [1, 4, 2, 9], weights)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


def test_spectrum__survives_the_fast_driver(monkeypatch):
    def fails_if_fast(B, full_matrices, lapack_driver="gesdd"):
        if lapack_driver == "gesdd":
            raise LinAlgError("SVD did not converge")
        return real(B, full_matrices=full_matrices, lapack_driver=lapack_driver)

    real, X = spectra.svd, rows()
    expected = exact.spectrum(X, Linear())
    monkeypatch.setattr(spectra, "svd", fails_if_fast)
    np.testing.assert_allclose(exact.spectrum(X, Linear()).values, expected.values)


# --- What the paper defines ---------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
def test_max_degrees_of_freedom__is_its_definition(kernel):
    X = rows(13)
    K = kernel(X, X)
    smoother = K @ np.linalg.inv(K + 24 * 0.1 * np.eye(24))
    expected = 24 * np.abs(np.diagonal(smoother)).max()
    assert exact.max_degrees_of_freedom(X, kernel, 0.1) == pytest.approx(expected, rel=1e-9)
    assert exact.effective_dimension(X, kernel, 0.1) <= expected


def dense_risk(K, ridge, truth, noise):
    n = len(K)
    inverse = np.linalg.inv(K + n * ridge * np.eye(n))
    return n * ridge**2 * np.sum((inverse @ truth) ** 2), noise / n * np.trace(K @ K @ inverse @ inverse)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("indices", [None, [0, 3, 8, 9, 15]])
def test_risk__is_its_definition(kernel, indices):
    X, truth = rows(14), rows(15)[:, 0]
    K = kernel(X, X)
    if indices is not None:
        C = kernel(X, X[indices])
        K = C @ np.linalg.pinv(kernel(X[indices], X[indices]), rcond=1e-12) @ C.T
    found = exact.risk(X, kernel, 1e-2, truth, 0.3, indices)
    np.testing.assert_allclose(found, dense_risk(K, 1e-2, truth, 0.3), rtol=1e-7)
    assert found.total == found.bias_squared + found.variance
    assert found.bias**2 == pytest.approx(found.bias_squared)


def test_risk__is_the_error_of_simulated_fits():
    X, truth, kernel = rows(16), rows(17)[:, 0], Gaussian(1.0)
    noise = 0.5 * np.random.default_rng(0).standard_normal((20_000, 24))
    whole = exact.spectrum(X, kernel)
    errors = np.mean([np.mean((whole.smooth(1e-2, truth + one) - truth) ** 2) for one in noise])
    assert exact.risk(X, kernel, 1e-2, truth, 0.25).total == pytest.approx(errors, rel=0.02)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"truth": np.ones(23)}, InvalidData, "truth must be 24 finite numbers"),
        ({"truth": np.full(24, np.nan)}, InvalidData, "truth must be 24 finite numbers"),
        ({"noise_variance": -1.0}, InvalidParameter, "noise_variance must be a finite number"),
        ({"ridge": 0.0}, InvalidParameter, "ridge must be a positive"),
        ({"indices": [24]}, InvalidParameter, "from 0 to 23"),
    ],
)
def test_risk__refuses_bad_input(change, error, message):
    given = {"ridge": 0.1, "truth": np.ones(24), "noise_variance": 1.0} | change
    with pytest.raises(error, match=message):
        exact.risk(rows(), Gaussian(1.0), **given)


def drawn(scores, p, seed):
    shares = scores / scores.sum()
    indices = np.random.default_rng(seed).choice(len(scores), p, p=shares)
    return indices, shares[indices]


@pytest.mark.parametrize("kernel", [Gaussian(1.5), Linear(), Laplacian(2.0)])
def test_deviation_matrix__is_that_of_theorem_1(kernel):
    X, gamma = rows(18), 1e-2
    indices, shares = drawn(exact.leverage_scores(X, kernel, gamma), 30, 0)
    values, U = np.linalg.eigh(kernel(X, X))
    phi = np.maximum(values, 0.0) / (np.maximum(values, 0.0) + 24 * gamma)
    S = np.zeros((24, 30))
    S[indices, np.arange(30)] = 1 / np.sqrt(30 * shares)
    expected = np.diag(phi) - np.sqrt(phi)[:, None] * (U.T @ S @ S.T @ U) * np.sqrt(phi)
    found = exact.deviation_matrix(X, kernel, gamma, indices, shares)
    eigenvalues = np.linalg.eigvalsh(found)
    # Of the linear kernel, the rest is zero.
    eigenvalues = np.sort(np.concatenate([eigenvalues, np.zeros(24 - len(found))]))
    np.testing.assert_allclose(eigenvalues, np.linalg.eigvalsh(expected), atol=1e-7)
    largest = exact.deviation(X, kernel, gamma, indices, shares)
    assert largest == pytest.approx(np.linalg.eigvalsh(expected)[-1], abs=1e-7)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from([Gaussian(1.5), Linear(), Laplacian(2.0)]), st.booleans())
def test_deviation__bounds_the_bias_as_theorem_1_says(seed, kernel, uniform):
    X, generator = rows(seed), np.random.default_rng(seed)
    gamma, ridge, truth = 10 ** generator.uniform(-2, 0), 10 ** generator.uniform(-2, 1), generator.standard_normal(24)
    scores = np.ones(24) if uniform else exact.leverage_scores(X, kernel, gamma)
    indices, shares = drawn(scores, 120, seed)
    t = exact.deviation(X, kernel, gamma, indices, shares)
    whole, columns = (exact.risk(X, kernel, ridge, truth, 1.0, given) for given in (None, np.unique(indices)))
    assert columns.variance <= whole.variance * (1 + 1e-9)
    if 0 < t < 1:
        promised = theory.bias_inflation(sketch_ridge=gamma, ridge=ridge, deviation=t).factor
        assert columns.bias <= promised * whole.bias * (1 + 1e-9)


def test_deviation__refuses_probabilities_that_are_none():
    for shares in ([0.5], [0.5, 0.0], [0.5, 1.5], [np.nan, 0.5]):
        with pytest.raises(InvalidParameter, match="2 numbers above 0 and at most 1"):
            exact.deviation(rows(), Linear(), 0.1, [0, 1], shares)
