"""New rows: the scores that they have among the data, as row n + 1 with n·λ kept, and their certified intervals."""

import dask
import mpmath
import numpy as np
import pytest
from extended import kernel_extended
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from strategies import CASES, problems
from threadpoolctl import threadpool_limits
from variants import slow_but

import daskrr
from daskrr import exact
from daskrr.errors import CheckFailed, InvalidData, NotCertified, RidgeTooSmall
from daskrr.kernels import Gaussian, Linear, Matern, Polynomial
from daskrr.nystrom.strategies import Certify


@pytest.fixture(autouse=True)
def _one_thread():
    with threadpool_limits(1):
        yield


def rows(n=60, d=3, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d))


def fitted(X, kernel, ridge, landmarks=None, **options):
    options = {"random_state": 0, "progress": False, "certify": True} | options
    return daskrr.leverage_scores(X, kernel, ridge, landmarks, **options).sketch


def evaluated(sketch, new, *names):
    """Quantities of new rows, with a column for each ridge."""
    found = dask.compute(*(getattr(sketch, name)(new) for name in names))
    return [array.reshape(len(new), -1) for array in found]


def appended(X, new, kernel, ridge):
    """Exact scores of new rows, each as the last of n + 1 with n·λ kept."""
    n = len(X)
    return np.array([exact.leverage_scores(np.vstack([X, x]), kernel, ridge * n / (n + 1))[-1] for x in new])


def extended_appended(X, new, kernel, ridges):
    """The same (m, L) in extended precision."""
    n, found = len(X), np.empty((len(new), len(ridges)))
    with mpmath.workdps(60):
        rows = np.vstack([X, new])
        K = kernel_extended(rows, rows, kernel)
        for column, ridge in enumerate(ridges):
            mu = n * mpmath.mpf(float(ridge))
            inverse = mpmath.inverse(K[:n, :n] + mu * mpmath.eye(n))
            for row in range(len(new)):
                k = K[:n, n + row]
                q = (K[n + row, n + row] - (k.T * inverse * k)[0, 0]) / mu
                found[row, column] = float(q / (1 + q))
    return found


def hard_rows(X, rng, farthest=6):
    """New rows beside data: like it, rows of it, between, at zero, and up to so many powers of ten away."""
    near = X[rng.integers(0, len(X), 2)] + 1e-6 * rng.standard_normal((2, X.shape[1]))
    far = X.mean(axis=0) + (10.0 ** rng.uniform(0, farthest, (2, 1))) * rng.standard_normal((2, X.shape[1]))
    found = [X[rng.integers(0, len(X), 2)], near, far, X[:2].mean(axis=0, keepdims=True), np.zeros((1, X.shape[1]))]
    return np.concatenate([*found, rng.standard_normal((2, X.shape[1])) * X.std(axis=0) + X.mean(axis=0)])


def check_interval(sketch, new, expected, slack):
    scores, estimate, lower, upper = evaluated(sketch, new, "scores", "estimate", "lower", "upper")
    assert np.all((lower >= 0) & (lower <= upper) & (upper <= 1))
    assert np.all((lower <= estimate) & (estimate <= upper))
    assert np.max(lower - expected) <= slack
    assert np.max(expected - upper) <= slack
    # Whatever the residual adds to the lower end, the score itself is above the exact one by round-off only.
    certainty = sketch.certainty
    noise = certainty.noise + 2.0 * certainty.kernel_error * sketch.kernel.diagonal(new)[:, None]
    low = scores * (1.0 - certainty.appended_errors)
    assert np.max(low - (1.0 - low) * noise / np.array(sketch.shifts) - expected) <= slack
    return scores, estimate, lower, upper


@pytest.mark.parametrize(
    ("tiles", "count"),
    [("float64", 12), *(pytest.param(tiles, 40, marks=pytest.mark.slow) for tiles in ("float64", "float32"))],
)
def test_interval__contains_the_exact_scores_of_new_rows(tiles, count):
    smallest = -8 if tiles == "float64" else -3

    @given(
        problem=problems(max_rows=9, dtypes=["float64", "float32"]),
        exponents=st.lists(st.floats(smallest, 1), min_size=1, max_size=2, unique_by=lambda one: round(one, 3)),
        share=st.sampled_from([0.2, 0.5, 1.0]),
        sampling=st.sampled_from(["uniform", "diagonal", "residual"]),
        failure_probability=st.sampled_from([1e-6, 0.0]),
        subset_bound=st.booleans(),
        seed=st.integers(0, 10**6),
    )
    @settings(max_examples=count, suppress_health_check=list(HealthCheck))
    def holds(problem, exponents, share, sampling, failure_probability, subset_bound, seed):
        X, kernel = problem.X.astype(np.float64), problem.kernel
        new = hard_rows(X, np.random.default_rng(seed))
        assume(0 < np.max(problem.diagonal) < 1e30)
        ridges = [problem.ridge(10**exponent) for exponent in exponents]
        try:
            sketch = fitted(
                X,
                kernel,
                ridges if len(ridges) > 1 or seed % 2 else ridges[0],
                max(1, int(share * len(X))),
                sampling=sampling,
                dtype=tiles,
                random_state=seed,
                certify=Certify(failure_probability=failure_probability, subset_bound=subset_bound, audit_rows=60),
            )
            evaluated(sketch, new, "upper")
        except RidgeTooSmall:
            return
        except (CheckFailed, InvalidData) as error:
            assert tiles == "float32"
            assert "use dtype='float64'" in str(error)  # noqa: PT017
            return
        check_interval(sketch, new, extended_appended(X, new, kernel, ridges), 1e-13)

    holds()


@pytest.mark.parametrize("tiles", slow_but(["float64", "float32"], "float32"))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n_ridges", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_interval__contains_the_exact_scores_of_new_rows_beside_hard_data(case, tiles, n_ridges):
    for kernel in (Gaussian(1.5), Polynomial(2)):
        rng = np.random.default_rng(5)
        X = CASES[case](rng, rng.standard_normal((120, 4)))
        new = hard_rows(X, rng, farthest=1.5)
        ridges = [share * float(kernel.diagonal(X).mean()) for share in (1e-3, 1e-1, 1e-2)[:n_ridges]]
        sketch = fitted(
            X, kernel, ridges if n_ridges > 1 else ridges[0], 40, dtype=tiles, certify=Certify(audit_rows=200)
        )
        expected = np.stack([appended(X, new, kernel, ridge) for ridge in ridges], axis=1)
        norm = np.linalg.norm(kernel(np.vstack([X, new]), np.vstack([X, new])), 2)
        check_interval(sketch, new, expected, 1e-12 + 2.0**-51 * norm / (len(X) * min(ridges)))


@pytest.mark.parametrize("ridge", [1e-1, [1e-3, 1e-1]], ids=["one ridge", "two ridges"])
@pytest.mark.parametrize("tiles", ["float64", "float32"])
def test_interval__is_narrow_where_the_landmarks_explain_the_row(tiles, ridge):
    X = rows(300, 2)
    sketch = fitted(X, Gaussian(1.0), ridge, 150, dtype=tiles)
    inside = X[np.abs(X).max(axis=1) < 1] + 0.01
    lower, upper = evaluated(sketch, inside, "lower", "upper")
    assert np.median(upper / lower) < (1.001 if tiles == "float64" else 1.1)


@pytest.mark.parametrize("certify", [False, True])
def test_scores__of_all_rows_as_landmarks_are_exact(certify):
    X, new, kernel = rows(), 1.5 * rows(31, seed=1), Matern(1.0, 0.5)
    sketch = fitted(np.vstack([X, new]), kernel, 0.05, sampling=np.arange(91), certify=certify)
    # Rows of the data that come a second time, so that L is all of the appended kernel matrix too.
    expected = appended(np.vstack([X, new]), new, kernel, 0.05)
    np.testing.assert_allclose(sketch.scores(new).compute(), expected, rtol=1e-9)
    np.testing.assert_allclose(sketch.estimate(new).compute(), expected, rtol=1e-9)


def test_scores__are_not_those_of_a_row_of_the_data():
    """b(G + μ)⁻¹b, cut at what a row of the data can have, is neither of the two usual quantities."""
    X, kernel = np.array([[0.0], [3.0]]), Gaussian(1.0)
    sketch = fitted(X, kernel, 0.5, sampling=[0, 1])
    new = np.array([[0.0], [3.0], [1.5], [30.0]])
    scores, function = evaluated(sketch, new, "scores", "leverage_function")
    exact_scores = appended(X, new, kernel, 0.5)
    np.testing.assert_allclose(scores[:2, 0], exact_scores[:2], rtol=1e-9)
    np.testing.assert_allclose(function / (1 + function), scores, rtol=1e-12)
    assert np.all(scores[:, 0] <= exact_scores * (1 + 1e-12))


def test_leverage_function__is_that_of_the_sketch_and_may_exceed_one():
    X, new, kernel, ridge = rows(40, 2), 100.0 * rows(5, 2, seed=1), Linear(), 1e-3
    sketch = fitted(X, kernel, [ridge, 1.0], sampling=[0, 1])
    found = sketch.leverage_function(new).compute()
    for column, mu in enumerate((40 * ridge, 40.0)):
        # Two landmarks span all of the plane, so that the function is that of the data itself.
        expected = np.sum(new * np.linalg.solve(X.T @ X + mu * np.eye(2), new.T).T, axis=1)
        np.testing.assert_allclose(found[:, column], expected, rtol=1e-8)
    assert found.max() > 100


def test_estimate__sees_rows_of_the_data_that_share_the_residual():
    """A new row at the point of forty that no landmark explains shares its residual with all of them."""
    X = np.vstack([rows(40, 2), np.full((40, 2), 30.0)])
    sketch = fitted(X, Gaussian(1.0), 1e-2, sampling=np.arange(40), certify=False)
    new = np.array([[30.0, 30.0], [-30.0, 30.0]])
    found = sketch.estimate(new).compute()
    np.testing.assert_allclose(found, appended(X, new, Gaussian(1.0), 1e-2), rtol=0.05)


def test_scores__of_a_sketch_without_landmarks_are_zero():
    X, new = np.zeros((5, 2)), rows(7, 2)
    sketch = fitted(X, Linear(), 0.1, sampling=[0, 1])
    assert sketch.rank == 0
    scores, lower, upper, residual = evaluated(sketch, new, "scores", "lower", "upper", "residual")
    np.testing.assert_array_equal(scores, 0)
    np.testing.assert_allclose(residual[:, 0], np.sum(new**2, axis=1), rtol=1e-14)
    expected = appended(X, new, Linear(), 0.1)
    np.testing.assert_allclose(lower[:, 0], expected, rtol=1e-9)
    np.testing.assert_allclose(upper[:, 0], expected, rtol=1e-9)


def test_quantities__do_not_depend_on_what_is_asked_together():
    sketch, new = fitted(rows(200), Gaussian(1.0), 1e-2, 40), rows(9, seed=1)
    for name in ("scores", "estimate", "lower", "upper", "residual", "leverage_function"):
        (together,) = evaluated(sketch, new, name)
        alone = np.concatenate([evaluated(sketch, new[row : row + 1], name)[0] for row in range(9)])
        np.testing.assert_allclose(together, alone, rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("end", ["lower", "upper"])
def test_ends__of_a_sketch_without_certificate_are_refused(end):
    sketch = fitted(rows(), Gaussian(1.0), 1e-2, 10, certify=False)
    with pytest.raises(NotCertified, match=f"the sketch has no {end}: it was fitted without certify=True"):
        getattr(sketch, end)(rows())


def test_interval__of_a_kernel_that_is_not_positive_on_a_new_row_is_refused():
    X = np.vstack([np.eye(3), 0.5 * np.eye(3)])
    sketch = fitted(X, lopsided, 1e-2, sampling=[0, 1, 2])
    with pytest.raises(CheckFailed, match=r"a residual is below zero by .* in the new rows from 0"):
        sketch.lower(np.array([[5.0, 5.0, 0.0]])).compute()


def lopsided(X, Z):
    """The linear kernel, but for rows beyond 4, whose own is too small."""
    K = X @ Z.T
    return np.where((np.abs(X).max(axis=1) > 4)[:, None] & (np.abs(Z).max(axis=1) > 4), 0.1 * K, K)
