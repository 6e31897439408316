"""Many equal rows: round-off of equal addends has one sign, and intervals contain the exact scores all the same."""

import dask
import numpy as np
import pytest
from extended import scores_of_repeats
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import KERNELS, extended_scores

import daskrr
from benchmarks.clouds import KERNELS_OF_FEW_FEATURES, repeated_rows
from benchmarks.validity import REPEATED_RIDGES, SCHEMES, Problem, check_validity
from daskrr.kernels import Gaussian, Laplacian, Matern, Polynomial
from daskrr.nystrom.strategies import Certify

# --- The oracle ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_scores_of_repeats__are_those_of_all_rows(kernel):
    points, counts, ridges = np.random.default_rng(0).standard_normal((3, 2)), [1, 5, 2], [1e-9, 1e-2]
    found = scores_of_repeats(points, counts, kernel, ridges)
    for column, ridge in enumerate(ridges):
        every = extended_scores(np.repeat(points, counts, axis=0), kernel, ridge)
        np.testing.assert_allclose(np.repeat(found[:, column], counts), every, rtol=1e-15)


def score_of_a_lone_row(k, n, ridge):
    """Its exact score among n - 1 rows that are equal, with the kernel k to them and 1 to itself, as theirs."""
    c, mu = n - 1, n * ridge
    return 1 - mu * (c + mu) / ((c + mu) * (1 + mu) - k**2 * c)


@pytest.mark.parametrize("ridge", [1e-3, 1.0])
def test_scores_of_repeats__of_a_lone_row_have_a_closed_form(ridge):
    points, kernel = np.array([[-0.4, -0.6], [-0.3, 1.0]]), Gaussian(1.9)
    found = scores_of_repeats(points, [1, 4095], kernel, [ridge])[0, 0]
    assert found == pytest.approx(score_of_a_lone_row(kernel(points, points)[0, 1], 4096, ridge), rel=1e-12)


# --- Intervals ----------------------------------------------------------------------------------------


def intervals(X, kernel, ridges, dtype):
    result = daskrr.leverage_scores(
        X, kernel, ridges, 100, dtype=dtype, certify=Certify(failure_probability=0), random_state=0, progress=False
    )
    return dask.compute(result.lower, result.upper)


@pytest.mark.parametrize("ridge", [1e-4, 2e-4, 5e-4])
def test_interval__contains_the_score_of_a_row_beside_thousands_of_equal_ones(ridge):
    X = np.tile(np.array([-0.3, 1.0], np.float32), (4096, 1))
    X[0] = -0.4, -0.6
    lower, upper = intervals(X, Gaussian(1.9), ridge, "float32")
    ((lone,), (other,)) = scores_of_repeats(X[:2], [1, 4095], Gaussian(1.9), [ridge])
    assert lower[0] <= lone <= upper[0]
    assert np.all((lower[1:] <= other) & (other <= upper[1:]))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("kernel", [Gaussian(1.0), Laplacian(1.0), Matern(1.0, 2.5), Polynomial(2)], ids=repr)
def test_interval__contains_the_scores_of_lone_rows_at_many_ridges(kernel, dtype):
    rng, ridges = np.random.default_rng(0), np.geomspace(*((1e-4, 1e-2) if dtype == "float32" else (1e-10, 1e-7)), 6)
    for _ in range(4):
        points = rng.uniform(-1, 1, (2, 2)).astype(dtype)
        X = np.repeat(points, [1, 4095], axis=0)
        lower, upper = intervals(X, kernel, ridges.tolist(), dtype)
        expected = scores_of_repeats(points, [1, 4095], kernel, ridges)
        assert np.all((lower[:2] <= expected) & (expected <= upper[:2]))


@st.composite
def repeats(draw, dtype, row_counts):
    """Copies of few points and how to score them; a ridge that is refused is raised to the smallest that works."""
    n, m = draw(row_counts), draw(st.sampled_from([2, 2, 3, 5, 9]))
    X = repeated_rows(n, draw(st.integers(1, 4)), m, np.random.default_rng(draw(st.integers(0, 10**6)))).astype(dtype)
    name, scale = draw(st.sampled_from(list(KERNELS_OF_FEW_FEATURES))), draw(st.floats(0.3, 3))
    mean = float(np.mean(KERNELS_OF_FEW_FEATURES[name](scale).diagonal(X)))
    (least, _), (_, most) = REPEATED_RIDGES[dtype]
    exponents = draw(st.lists(st.floats(least, most), min_size=1, max_size=5, unique=True))
    block_rows = draw(st.sampled_from([None, None, 700, 5000]))
    return Problem(
        family="repeats", number=draw(st.integers(0, 1000)), rows=f"{m} points", kernel=name, n_rows=n,
        n_features=X.shape[1], length_scale=scale, ridges=tuple(mean * 10**exponent for exponent in exponents),
        n_landmarks=draw(st.sampled_from([2, 10, 100])), dtype=dtype,
        sampling=draw(st.sampled_from([*SCHEMES, "residual", "residual"])), certainty={"audit_rows": 200},
        block_rows=block_rows,
    ), X  # fmt: skip


def check_intervals(dtype, row_counts, count):
    """Hold the intervals of some problems against exact scores; how many are refused still has a limit."""
    refused = []

    @given(repeats(dtype, row_counts))
    @settings(max_examples=count)
    def holds(drawn):
        (run,) = check_validity(*drawn, probabilities=[0.0])
        assert run.get("refused") in (None, "RidgeTooSmall"), run
        assert not run.get("outside"), run
        refused.append("refused" in run)

    holds()
    assert np.mean(refused) < 0.2


@pytest.mark.parametrize("dtype", [pytest.param("float64", marks=pytest.mark.slow), "float32"])
def test_interval__contains_the_exact_scores_of_repeated_rows(dtype):
    check_intervals(dtype, st.integers(4096, 9000), 30)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_interval__contains_the_exact_scores_of_very_many_repeated_rows(dtype):
    check_intervals(dtype, st.integers(4096, 200_000), 100)
