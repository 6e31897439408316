"""The theorems as calculators: inverses, limits, conditions, and draws that keep what is promised."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from daskrr import exact, theory
from daskrr.errors import InvalidParameter
from daskrr.kernels import Gaussian, Laplacian, Linear

SCORES = {"trace": 400.0, "n_rows": 400, "ridge": 0.5, "failure_probability": 0.01}
RISK = {"n_rows": 300, "failure_probability": 0.01}
MATRIX = {"frobenius_squared": 3.0, "largest": 1.0, "n_rows": 20}

probabilities = st.floats(1e-12, 0.999)
small_probabilities = st.floats(1e-12, 0.499)
row_counts = st.integers(2, 10**9)
fidelities = st.floats(1e-3, 1.0)
problems = st.fixed_dictionaries(
    {
        "trace": st.floats(1e-2, 1e6),
        "n_rows": st.integers(1, 10**7),
        "ridge": st.floats(1e-4, 1e3),
        "failure_probability": probabilities,
    }
)
matrices = st.builds(
    lambda top, n, share: {"largest": top, "n_rows": n, "frobenius_squared": top * (1 + share * (n - 1))},
    st.floats(1e-3, 1e3),
    st.integers(1, 10**5),
    st.floats(0, 1),
)


@pytest.fixture
def one_thread():
    """Small dense algebra is fastest on one thread, above all on a busy machine."""
    with threadpool_limits(1):
        yield


def test_properties__are_not_timed():
    assert settings().deadline is None


def test_columns_for_scores__are_the_formula():
    found = theory.columns_for_scores(**SCORES, epsilon=0.25)
    assert found.n_landmarks == math.ceil(8 * (400 / (400 * 0.5 * 0.25) + 1 / 6) * math.log(400 / 0.01))
    assert found.additive_error == 0.5


@given(problem=problems, n_landmarks=st.integers(1, 10**9))
def test_score_accuracy__is_undone_by_columns_for_scores(problem, n_landmarks):
    found = theory.score_accuracy(**problem, n_landmarks=n_landmarks)
    if found.promises:
        again = theory.columns_for_scores(**problem, epsilon=found.epsilon)
        assert n_landmarks * (1 - 1e-9) <= again.n_landmarks <= n_landmarks


@given(problem=problems, epsilon=st.floats(1e-4, 0.499))
def test_columns_for_scores__are_the_fewest(problem, epsilon):
    found = theory.columns_for_scores(**problem, epsilon=epsilon)
    assert theory.score_accuracy(**problem, n_landmarks=found.n_landmarks).epsilon <= epsilon * (1 + 1e-9)
    assume(1 < found.n_landmarks < 1e9)
    assert theory.score_accuracy(**problem, n_landmarks=found.n_landmarks - 1).epsilon > epsilon


@given(problem=problems, n_landmarks=st.integers(1, 10**7))
def test_score_accuracy__promises_something_from_the_least_number_of_columns(problem, n_landmarks):
    least = theory.score_accuracy(**problem, n_landmarks=n_landmarks).least_landmarks
    assume(least < 1e9)
    assert theory.score_accuracy(**problem, n_landmarks=n_landmarks).promises == (n_landmarks >= least)
    assert theory.score_accuracy(**problem, n_landmarks=least).epsilon < 0.5


def test_score_accuracy__says_that_too_few_columns_are_promised_nothing():
    too_few = math.floor(4 / 3 * math.log(400 / 0.01))
    found = theory.score_accuracy(**SCORES, n_landmarks=too_few)
    assert not found.promises
    assert found.additive_error == math.inf
    assert f"none with fewer than {found.least_landmarks} draws" in str(found)
    assert "failure" not in str(found)
    np.testing.assert_array_equal(found.largest_score([0.0, 0.5, 1.0]), 1.0)
    assert theory.score_accuracy(**SCORES, n_landmarks=1, smallest_eigenvalue=0.5).multiplicative_factor == 0


@given(epsilon=st.floats(1e-4, 0.499), score=st.floats(0, 1))
def test_score_guarantee__largest_score_is_the_sharper_form_turned_round(epsilon, score):
    found = theory.columns_for_scores(**SCORES, epsilon=epsilon)
    lowest = score - found.additive_error * (1 - score)
    assert found.largest_score(lowest) == pytest.approx(score, abs=1e-12)


def test_multiplicative_factor__is_the_formula():
    found = theory.columns_for_scores(
        trace=400.0, n_rows=400, ridge=1e-3, epsilon=0.25, failure_probability=0.01, smallest_eigenvalue=0.7
    )
    assert found.multiplicative_factor == pytest.approx((0.7 - 0.1) / (0.7 + 0.1))
    assert "0.75 l ≤ l̃" in str(found)


@given(problem=problems, share=st.floats(0, 1), epsilon=st.floats(1e-4, 0.499))
def test_multiplicative_factor__says_something_only_for_more_columns_than_rows(problem, share, epsilon):
    smallest = share * problem["trace"] / problem["n_rows"]
    found = theory.columns_for_scores(**problem, epsilon=epsilon, smallest_eigenvalue=smallest)
    assert 0 <= found.multiplicative_factor <= 1
    limit = 8 * problem["n_rows"] * math.log(problem["n_rows"] / problem["failure_probability"])
    assert found.multiplicative_factor < 1e-9 or found.n_landmarks > limit


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("kernel", "ridge", "epsilon"), [(Gaussian(0.5), 1.0, 0.4), (Linear(), 0.5, 0.2)])
def test_theorem_4__holds_for_low_scores_and_for_scores_above_its_error(kernel, ridge, epsilon, seed):
    rng, linear = np.random.default_rng(seed), isinstance(kernel, Linear)
    X = rng.standard_normal((300, 400)) / 20 if linear else rng.standard_normal((300, 5))
    X[0] *= 15 if linear else 1
    diagonal = kernel.diagonal(X)
    found = theory.columns_for_scores(
        trace=diagonal.sum(), n_rows=300, ridge=ridge, epsilon=epsilon, failure_probability=1e-3
    )
    drawn = np.unique(np.random.default_rng(seed).choice(300, found.n_landmarks, p=diagonal / diagonal.sum()))
    scores, approximation = exact.leverage_scores(X, kernel, ridge), exact.nystrom_scores(X, kernel, ridge, drawn)
    assert np.all(approximation <= scores + 1e-9)
    assert np.all(scores - approximation <= found.additive_error * (1 - scores) + 1e-9)
    assert np.all(scores <= found.largest_score(approximation) + 1e-9)
    assert np.max(scores - approximation) > 1e-4, "the draw left something out"
    assert len(drawn) < (300 if linear else 200)
    assert scores[0] > 0.4 or not linear


def test_columns_for_risk__are_the_formula():
    found = theory.columns_for_risk(**RISK, effective_dimension=12.0, epsilon=0.2, score_fidelity=0.5)
    assert found.n_landmarks == math.ceil(8 * (12 / 0.5 + 1 / 6) * math.log(300 / 0.01))
    assert found.risk_ratio == pytest.approx(1.4**2)
    assert found.failure_probability == 0.01
    assert found.published_failure_probability == 0.02


@given(dimension=st.floats(0.01, 300), beta=fidelities)
def test_columns_for_risk_by_upper_ends__need_the_sum_of_these_alone(dimension, beta):
    found = theory.columns_for_risk_by_upper_ends(**RISK, upper_sum=dimension / beta, epsilon=0.1)
    expected = theory.columns_for_risk(**RISK, effective_dimension=dimension, epsilon=0.1, score_fidelity=beta)
    assert abs(found.n_landmarks - expected.n_landmarks) <= 1 + 1e-9 * expected.n_landmarks
    assert found.risk_ratio == expected.risk_ratio
    assert "β u / Σ u, β = 1" in str(found)


@given(n_rows=row_counts, rho=small_probabilities, beta=fidelities, n_landmarks=st.integers(1, 10**9))
def test_effective_dimension_covered__is_undone_by_columns_for_risk(n_rows, rho, beta, n_landmarks):
    draw = {"n_rows": n_rows, "failure_probability": rho, "score_fidelity": beta}
    covered = theory.effective_dimension_covered(n_landmarks=n_landmarks, **draw)
    if 0 < covered <= n_rows / 1.001:
        enough = theory.columns_for_risk(effective_dimension=covered, epsilon=0.1, **draw).n_landmarks
        more = theory.columns_for_risk(effective_dimension=covered * 1.001, epsilon=0.1, **draw).n_landmarks
        assert enough <= n_landmarks
        assert more > n_landmarks * (1 - 1e-12)


@given(share=st.floats(0.01, 1), most=st.floats(0.01, 1))
def test_columns_for_risk_uniform__need_the_maximal_degrees_of_freedom(share, most):
    dimension = share * most * 300
    uniform = theory.columns_for_risk_uniform(
        **RISK, effective_dimension=dimension, max_degrees_of_freedom=most * 300, epsilon=0.1
    )
    assert uniform.score_fidelity == pytest.approx(share)
    replaced = theory.columns_for_risk(**RISK, effective_dimension=most * 300, epsilon=0.1)
    assert abs(uniform.n_landmarks - replaced.n_landmarks) <= 1


@pytest.mark.parametrize(
    ("given_numbers", "condition", "text"),
    [
        ({}, "unknown", "unknown; failure probability then 0.02"),
        ({"ridge": 1.0}, "unknown", "unknown; "),
        ({"largest_eigenvalue": 30.0, "smallest_score": 0.25}, "unknown", "unknown: ridge ≥ 1;"),
        ({"ridge": 1.0, "largest_eigenvalue": 30.0, "smallest_score": 0.25}, "met", "met: ridge ≥ 1;"),
        ({"ridge": 0.99, "largest_eigenvalue": 30.0, "smallest_score": 0.25}, "not met", "not met: ridge ≥ 1;"),
        ({"ridge": 9.0, "largest_eigenvalue": 30.0, "smallest_score": 0.0}, "not met", "not met: ridge ≥ inf;"),
    ],
)
def test_columns_for_risk__report_the_published_condition(given_numbers, condition, text):
    found = theory.columns_for_risk(**RISK, effective_dimension=5.0, epsilon=0.1, **given_numbers)
    assert found.ridge_condition == condition
    assert text in str(found)


@given(spectrum=st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=40), n_landmarks=st.integers(1, 5000))
def test_risk_inflation__is_undone_by_columns_for_risk(spectrum, n_landmarks):
    values, n_rows = np.array(spectrum), len(spectrum)

    def dimension(ridge):
        return float(np.sum(values / (values + n_rows * ridge)))

    draw = {"n_rows": n_rows, "failure_probability": 0.1}
    found = theory.risk_inflation(effective_dimension=dimension, ridge=0.1, n_landmarks=n_landmarks, **draw)
    covered = theory.effective_dimension_covered(n_landmarks=n_landmarks, **draw)
    assert found.promises == (dimension(0.1 * 2.0**40) <= covered)
    if found.promises:
        again = theory.columns_for_risk(effective_dimension=found.effective_dimension, epsilon=found.epsilon, **draw)
        assert again.n_landmarks <= n_landmarks
        assert again.risk_ratio == found.risk_ratio
        assert found.epsilon == 2.0**-40 or dimension(0.1 * found.epsilon * (1 - 1e-5)) > covered


def test_risk_inflation__of_too_few_columns_is_infinite():
    found = theory.risk_inflation(effective_dimension=lambda ridge: 1 / ridge, ridge=0.1, n_landmarks=3, **RISK)
    assert not found.promises
    assert found.risk_ratio == math.inf
    assert "none: too few draws" in str(found)
    flat = theory.risk_inflation(effective_dimension=lambda ridge: 2.0, ridge=0.1, n_landmarks=1000, **RISK)
    assert flat.epsilon == 2.0**-40
    assert theory.effective_dimension_covered(n_landmarks=3, **RISK) == 0


def nystrom(K, indices):
    values, vectors = np.linalg.eigh(K[np.ix_(indices, indices)])
    kept = values > 1e-12 * values[-1]
    factor = K[:, indices] @ vectors[:, kept] / np.sqrt(values[kept])
    return factor @ factor.T


def risk(matrix, truth, mu, noise):
    values, vectors = np.linalg.eigh(matrix)
    shrunk = mu / (np.maximum(values, 0) + mu)
    return np.mean((shrunk * (vectors.T @ truth)) ** 2) + noise * np.mean((1 - shrunk) ** 2)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_theorem_3__holds_with_and_without_its_published_condition(seed, published):
    rng = np.random.default_rng(seed)
    X, kernel = rng.uniform(-1, 1, (200, 2)), Laplacian(1.0)
    K = kernel(X, X)
    top = np.linalg.eigvalsh(K)[-1]
    epsilon, ridge = (1e-4, 20 * top) if published else (0.5, 0.5)
    scores = exact.leverage_scores(X, kernel, ridge * epsilon)
    found = theory.columns_for_risk(
        effective_dimension=scores.sum(), n_rows=200, epsilon=epsilon, failure_probability=1e-3, ridge=ridge,
        largest_eigenvalue=top, smallest_score=scores.min(),
    )  # fmt: skip
    assert found.ridge_condition == ("met" if published else "not met")
    L = nystrom(K, np.unique(rng.choice(200, found.n_landmarks, p=scores / scores.sum())))
    values, vectors = np.linalg.eigh(K - L)
    assert 1e-3 < values[-1] <= 2 * 200 * ridge * epsilon
    for truth in (np.sin(3 * X[:, 0]), rng.standard_normal(200), 20 * vectors[:, -1]):
        assert risk(L, truth, 200 * ridge, 0.01) <= found.risk_ratio * risk(K, truth, 200 * ridge, 0.01)


@given(gamma=st.floats(1e-6, 1e6), ridge=st.floats(1e-6, 1e6), t=st.floats(1e-6, 0.999999))
def test_bias_inflation__is_undone_by_sketch_ridge_for_bias(gamma, ridge, t):
    found = theory.bias_inflation(sketch_ridge=gamma, ridge=ridge, deviation=t)
    assert found.factor >= 1
    assume(found.factor > 1 + 1e-6)
    again = theory.sketch_ridge_for_bias(factor=found.factor, ridge=ridge, deviation=t)
    assert again.sketch_ridge == pytest.approx(gamma, rel=1e-8)


@given(matrix=matrices, beta=fidelities, t=st.floats(1e-3, 1e3), rho=probabilities)
def test_columns_for_deviation__are_the_fewest(matrix, beta, t, rho):
    case = matrix | {"score_fidelity": beta, "deviation": t}
    count = theory.columns_for_deviation(**case, failure_probability=rho).n_landmarks
    assert theory.deviation_probability(**case, n_landmarks=count).failure_probability <= rho * (1 + 1e-9)
    assume(1 < count < 1e8)
    assert theory.deviation_probability(**case, n_landmarks=count - 1).failure_probability > rho


@given(share=st.floats(0.01, 1), rho=small_probabilities)
def test_columns_for_deviation__of_a_half_are_those_of_theorem_3(share, rho):
    case = {"n_rows": 50, "failure_probability": rho, "score_fidelity": 0.5}
    dimension = 1 + share * 49
    found = theory.columns_for_deviation(**case, frobenius_squared=dimension, largest=1.0, deviation=0.5)
    assert found.n_landmarks == theory.columns_for_risk(**case, effective_dimension=dimension, epsilon=0.1).n_landmarks


@pytest.mark.parametrize("chances", [[0.25, 0.25, 0.25, 0.25], [0.4, 0.2, 0.2, 0.2]])
def test_theorem_2__bounds_how_often_a_product_is_too_small(chances):
    # The columns are those of the identity, so the deviation is that of the least drawn one.
    found = theory.deviation_probability(
        n_landmarks=60, frobenius_squared=4.0, largest=1.0, n_rows=4, deviation=0.6,
        score_fidelity=theory.score_fidelity(chances, np.ones(4)),
    )  # fmt: skip
    counts = np.random.default_rng(0).multinomial(60, chances, size=20_000)
    deviations = 1 - np.min(counts / (60 * np.array(chances)), axis=1)
    assert 0 < np.mean(deviations >= 0.6) <= found.failure_probability < 1


@given(seed=st.integers(0, 10**6), n=st.integers(1, 50))
def test_score_fidelity__is_the_largest_factor_that_fits(seed, n):
    rng = np.random.default_rng(seed)
    scores, chances = rng.random(n) * (rng.random(n) < 0.7), rng.dirichlet(np.ones(n))
    assume(scores.any())
    beta = theory.score_fidelity(chances, scores)
    assert 0 <= beta <= 1
    assert np.all(chances >= beta * scores / scores.sum() * (1 - 1e-12))
    assert beta == 1 or np.any(chances < 1.000001 * beta * scores / scores.sum())


def test_score_fidelity__survives_scores_at_the_end_of_the_range():
    assert theory.score_fidelity([0.0, 1.0], [0.1, 0.9]) == 0
    assert theory.score_fidelity([0.0, 1.0], [0.0, 0.9]) == 1
    assert theory.score_fidelity([0.5, 0.5], [1e308, 1e308]) == 1
    assert theory.score_fidelity([0.5, 0.5], [1.0, 5e-324]) == 0.5


CASES = {
    theory.columns_for_scores: SCORES | {"epsilon": 0.1},
    theory.score_accuracy: SCORES | {"n_landmarks": 10},
    theory.columns_for_risk: RISK | {"effective_dimension": 5.0, "epsilon": 0.1},
    theory.columns_for_risk_uniform: RISK | {"effective_dimension": 5.0, "epsilon": 0.1},
    theory.columns_for_risk_by_upper_ends: RISK | {"upper_sum": 5.0, "epsilon": 0.1},
    theory.bias_inflation: {"sketch_ridge": 1.0, "ridge": 1.0, "deviation": 0.5},
    theory.sketch_ridge_for_bias: {"factor": 2.0, "ridge": 1.0, "deviation": 0.5},
    theory.columns_for_deviation: MATRIX | {"deviation": 0.5, "failure_probability": 0.01},
    theory.score_fidelity: {"probabilities": [0.5, 0.5], "scores": [1.0, 1.0]},
}
GUARANTEES = [theory.bias_inflation, theory.columns_for_deviation, theory.columns_for_risk, theory.columns_for_scores]


@pytest.mark.parametrize(
    ("calculator", "changes", "message"),
    [
        (theory.columns_for_scores, {"epsilon": 0.5}, "epsilon must be a number above 0 and below 0.5, got 0.5"),
        (theory.columns_for_scores, {"epsilon": "0.1"}, "epsilon must be a number above 0 and below 0.5, got '0.1'"),
        (theory.columns_for_scores, {"epsilon": True}, "epsilon must be a number"),
        (theory.columns_for_scores, {"failure_probability": math.nan}, "failure_probability .* below 1, got nan"),
        (theory.columns_for_scores, {"ridge": math.inf}, "ridge must be a number above 0 and below inf, got inf"),
        (theory.columns_for_scores, {"n_rows": 0}, "n_rows must be an int of at least 1, got 0"),
        (theory.columns_for_scores, {"smallest_eigenvalue": -1.0}, "smallest_eigenvalue must be"),
        (theory.columns_for_scores, {"trace": 1e300, "ridge": 1e-300}, "more columns than a float can count"),
        (theory.score_accuracy, {"n_landmarks": 10.0}, "n_landmarks must be an int of at least 1"),
        (theory.columns_for_risk, {"failure_probability": 0.5}, "failure_probability must be .* below 0.5"),
        (theory.columns_for_risk, {"n_rows": 1}, "Theorem 3 needs n_rows of at least 2, got 1"),
        (theory.columns_for_risk, {"effective_dimension": 301.0}, "effective_dimension .* at most 300, got 301"),
        (theory.columns_for_risk, {"score_fidelity": 1.1}, "score_fidelity must be a number above 0 and at most 1"),
        (theory.columns_for_risk, {"largest_eigenvalue": 1.0, "smallest_score": 1.5}, "smallest_score .* at most 1"),
        (theory.columns_for_risk_uniform, {"max_degrees_of_freedom": 4.0}, "effective_dimension must be .* at most 4"),
        (theory.columns_for_risk_by_upper_ends, {"upper_sum": 0.0}, "upper_sum must be a number above 0"),
        (theory.bias_inflation, {"deviation": 1.0}, "deviation must be a number above 0 and below 1"),
        (theory.sketch_ridge_for_bias, {"factor": 1.0}, "factor must be a number above 1"),
        (theory.columns_for_deviation, {"largest": 3.1}, "largest must be a number above 0 and at most 3, got 3.1"),
        (theory.score_fidelity, {"scores": [1.0]}, "one probability per score is needed, got 2 for 1"),
        (theory.score_fidelity, {"probabilities": [0.5, 0.6]}, "probabilities must sum to 1, got 1.1: divide them"),
        (theory.score_fidelity, {"scores": [1.0, math.nan]}, "scores must be a list of finite numbers"),
        (theory.score_fidelity, {"scores": [0.0, 0.0]}, "scores must be .* not all 0"),
        (theory.score_fidelity, {"scores": ["a", "b"]}, "scores must be a list"),
    ],
)
def test_calculators__refuse(calculator, changes, message):
    with pytest.raises(InvalidParameter, match=message):
        calculator(**CASES[calculator] | changes)


@pytest.mark.parametrize(("number", "calculator"), list(enumerate(GUARANTEES, 1)))
def test_guarantees__are_frozen_and_name_their_theorem(number, calculator):
    found = calculator(**CASES[calculator])
    assert f"El Alaoui & Mahoney, Theorem {number}\n" in str(found)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign"):
        found.failure_probability = 0.5
