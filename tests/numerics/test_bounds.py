"""Bounds and estimates of a score against dense problems, and the deviation bound against its equation."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskrr.numerics.bounds import (
    LOWER_BOUNDS,
    ROUNDING,
    UPPER_BOUNDS,
    Certainty,
    RowFacts,
    certify,
    deviation_bound,
    estimate,
)

SHIFTS = np.array([1e-3, 0.1, 3.0])
SLACK = 1e-9


class Dense:
    """Rows as features, the part of them in the span of some, and all that the bounds speak of.

    With K = F Fᵀ the Nyström approximation by rows J is F P Fᵀ, P the projection onto the span of those rows. Singular
    values give every figure to its last digits.
    """

    def __init__(self, seed, isolated=False, everything=False):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(2, 14))
        F = rng.standard_normal((n, int(rng.integers(1, n + 3)))) * 10.0 ** rng.uniform(-1, 1, (n, 1))
        F[rng.random(n) < 0.15] = 0.0
        if isolated:
            F = np.block([[F, np.zeros((n, 1))], [np.zeros((1, F.shape[1])), 1.7]])
        J = rng.permutation(n)[: n if everything else int(rng.integers(0, n + 1))]
        _, values, directions = np.linalg.svd(F[J])
        rank = int(np.sum(values > 1e-12 * max(values.max(initial=0.0), 1e-300)))
        B, rest = F @ directions[:rank].T, F @ directions[rank:].T
        self.diagonal, self.delta = np.sum(F**2, axis=1), float(np.linalg.norm(rest, 2) ** 2) if rest.size else 0.0
        self.exact, _ = read(F, SHIFTS)
        scores, captured = read(B, SHIFTS)
        self.facts = RowFacts(
            scores, captured, read(B, SHIFTS + self.delta)[0], None, np.sum(rest**2, axis=1), self.diagonal
        )

    def certainty(self, factor=1.0, noise=0.0, residual_error=1e-12, score_error=1e-12):
        delta = factor * self.delta * (1 + 1e-12) + noise
        return Certainty(delta, noise, residual_error, np.full(len(SHIFTS), score_error))


def read(F, shifts):
    """Scores (n, L) of F Fᵀ, and what else is read off its singular values."""
    U, values, _ = np.linalg.svd(F, full_matrices=False)
    S = values[:, None] ** 2
    return U**2 @ (S / (S + shifts)), U**2 @ (S / (S + shifts)) ** 2


def without_roundoff(delta, n_ridges=3):
    return Certainty(delta, 0.0, 0.0, np.zeros(n_ridges))


def kl(x, y):
    """Divergence of coins, the plain formula."""
    first = 0.0 if x == 0 else x * math.log(x / y)
    return first + (0.0 if x == 1 else (1 - x) * math.log((1 - x) / (1 - y)))


# --- Intervals ----------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32), captured=st.booleans(), shifted=st.booleans(), isolated=st.booleans())
@settings(max_examples=250)
def test_certify__contains_the_exact_scores_of_dense_problems(seed, captured, shifted, isolated):
    dense = Dense(seed, isolated)
    facts = dense.facts if captured else replace(dense.facts, captured=dense.facts.scores)
    facts = facts if shifted else replace(facts, shifted=None)
    found = certify(facts, SHIFTS, dense.certainty())
    assert np.all(found.lower <= dense.exact + SLACK)
    assert np.all(dense.exact <= found.upper + SLACK)
    assert np.all((found.lower >= 0) & (found.lower <= found.upper) & (found.upper <= 1))
    assert np.all(found.lower >= dense.facts.scores - SLACK)


@given(seed=st.integers(0, 2**32), factor=st.floats(1.0, 100.0))
@settings(max_examples=80)
def test_certify__is_wider_for_larger_deviations(seed, factor):
    dense = Dense(seed)
    facts = replace(dense.facts, shifted=None)
    tight, wide = certify(facts, SHIFTS, dense.certainty()), certify(facts, SHIFTS, dense.certainty(factor))
    assert np.all(wide.lower <= tight.lower + 1e-15)
    assert np.all(wide.upper >= tight.upper - 1e-15)


@given(seed=st.integers(0, 2**32), error=st.floats(0, 0.05), noise=st.floats(0, 1e-2), residual=st.floats(0, 1e-2))
@settings(max_examples=60)
def test_certify__is_wider_with_round_off(seed, error, noise, residual):
    dense = Dense(seed)
    bare = certify(dense.facts, SHIFTS, dense.certainty())
    # A residual may then be larger than delta by its budget, and delta has to allow for it.
    budget = dense.certainty(1.0, noise + residual * dense.diagonal.max(), residual + 1e-12, error + 1e-12)
    wide = certify(replace(dense.facts, shifted=None), SHIFTS, budget)
    assert np.all(wide.lower <= bare.lower + 1e-15)
    assert np.all(wide.upper >= bare.upper - 1e-15)
    assert np.all((wide.lower >= 0) & (wide.upper <= 1))


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60)
def test_certify__with_the_exact_parts_is_no_wider(seed):
    dense = Dense(seed)
    bare = replace(dense.facts, captured=dense.facts.scores, shifted=None)
    wide, tight = certify(bare, SHIFTS, dense.certainty()), certify(dense.facts, SHIFTS, dense.certainty())
    assert np.all(tight.upper <= wide.upper + 1e-12)
    assert np.all(tight.lower >= wide.lower - 1e-12)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=30)
def test_certify__without_deviation_or_residual_is_a_point(seed):
    dense = Dense(seed, everything=True)
    facts = replace(dense.facts, residual=np.zeros_like(dense.diagonal))
    found = certify(facts, SHIFTS, without_roundoff(0.0))
    np.testing.assert_allclose(found.lower, facts.scores, rtol=0, atol=1e-14)
    np.testing.assert_allclose(found.upper, facts.scores, rtol=0, atol=1e-14)


def test_certify__of_rows_where_the_kernel_vanishes_is_zero():
    zero = np.zeros((4, 3))
    found = certify(RowFacts(zero, zero, zero, None, np.zeros(4), np.zeros(4)), SHIFTS, without_roundoff(5.0))
    np.testing.assert_array_equal(found.lower, 0)
    np.testing.assert_array_equal(found.upper, 0)


@pytest.mark.parametrize("explained", [0.0, 1.0])
def test_certify__holds_the_score_of_a_row_that_is_alone_to_the_last_digit(explained):
    rng = np.random.default_rng(0)
    k, shifts = 10.0 ** rng.uniform(-3, 3, 300), 10.0 ** rng.uniform(-9, 3, 50)
    score, residual = k[:, None] / (k[:, None] + shifts) * explained, k * (1.0 - explained)
    error = np.full(len(shifts), 4 * np.finfo(np.float64).eps)
    for row, one in enumerate(k):
        facts = RowFacts(score[[row]], score[[row]] ** 2, None, None, residual[[row]], k[[row]])
        found = certify(facts, shifts, Certainty(float(residual[row]), 0.0, 0.0, error))
        for shift, low, high in zip(shifts, found.lower[0], found.upper[0], strict=True):
            truth = Fraction(one) / (Fraction(one) + Fraction(shift))
            assert Fraction(low) <= truth <= Fraction(high)


@pytest.mark.parametrize("e", [1e-6, 0.3, 50.0])
def test_certify__is_tight_on_a_row_that_is_alone(e):
    """With nothing captured and no other row, both ends are the score of a single row."""
    zero, own = np.zeros((1, 3)), np.array([e])
    found = certify(RowFacts(zero, zero, None, None, own, own), SHIFTS, without_roundoff(e))
    np.testing.assert_allclose(found.upper[0], e / (e + SHIFTS), rtol=1e-12)
    np.testing.assert_allclose(found.lower[0], e / (e + SHIFTS), rtol=1e-12)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60)
def test_certify__names_the_bound_that_won(seed):
    dense = Dense(seed)
    subset = np.minimum(dense.exact * 1.01, 1.0)
    facts = replace(dense.facts, subset=subset)
    found = certify(facts, SHIFTS, dense.certainty())
    assert set(np.unique(found.upper_winner)) <= set(range(len(UPPER_BOUNDS)))
    assert set(np.unique(found.lower_winner)) <= set(range(len(LOWER_BOUNDS)))
    by_subset = found.upper_winner == UPPER_BOUNDS.index("subset")
    np.testing.assert_allclose(found.upper[by_subset], subset[by_subset], rtol=2 * ROUNDING)
    assert np.all(found.upper <= subset * (1 + 2 * ROUNDING))
    by_diagonal = found.upper_winner == UPPER_BOUNDS.index("diagonal")
    expected = dense.diagonal[:, None] / (dense.diagonal[:, None] + SHIFTS)
    np.testing.assert_allclose(found.upper[by_diagonal], expected[by_diagonal], rtol=1e-12)
    by_score = found.lower_winner == LOWER_BOUNDS.index("score")
    np.testing.assert_allclose(found.lower[by_score], facts.scores[by_score], rtol=1e-9, atol=1e-15)
    x, share = facts.shifted, dense.delta / (dense.delta + SHIFTS)
    by_deviation = found.upper_winner == UPPER_BOUNDS.index("deviation")
    np.testing.assert_allclose(found.upper[by_deviation], (x + share * (1 - x))[by_deviation], rtol=1e-9, atol=1e-12)


def test_certify__refuses_ends_that_cross():
    one = np.full((2, 1), 0.9)
    facts = RowFacts(one, one, None, None, np.zeros(2), np.full(2, 0.1))
    with pytest.raises(ArithmeticError, match=r"lower end is 0\.4 above its upper end"):
        certify(facts, np.array([0.1]), without_roundoff(0.0, 1))


def test_certainty__without_roundoff_keeps_the_deviation_alone():
    bare = Certainty(3.0, 1.0, 0.5, np.array([0.1, 0.2])).without_roundoff()
    assert (bare.delta, bare.noise, bare.residual_error, bare.score_errors.tolist()) == (2.0, 0.0, 0.0, [0.0, 0.0])
    assert Certainty(0.5, 1.0, 0.0, np.zeros(1)).without_roundoff().delta == 0.0


# --- Estimates ----------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60)
def test_estimate__is_exact_where_one_row_alone_has_a_residual(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 10))
    A = rng.standard_normal((n, int(rng.integers(1, 6))))
    L, row, e = A @ A.T, int(rng.integers(0, n)), 10.0 ** rng.uniform(-3, 3)
    K = L.copy()
    K[row, row] += e
    residual = np.zeros(n)
    residual[row] = e
    exact, scores = (
        np.stack([np.diagonal(np.linalg.solve(M + mu * np.eye(n), M)) for mu in SHIFTS], axis=1) for M in (K, L)
    )
    found = estimate(np.clip(scores, 0, 1), residual, 0.0, SHIFTS)
    np.testing.assert_allclose(found[row], exact[row], rtol=1e-8)
    others = np.arange(n) != row
    np.testing.assert_array_equal(found[others], np.clip(scores, 0, 1)[others])


@given(seed=st.integers(0, 2**32), shared=st.floats(0, 100))
@settings(max_examples=40)
def test_estimate__lies_between_the_score_and_one(seed, shared):
    rng = np.random.default_rng(seed)
    scores, residual = rng.random((20, 3)), rng.exponential(size=20)
    found = estimate(scores, residual, np.full(20, shared), SHIFTS)
    assert np.all((found >= scores) & (found <= 1))
    assert np.all(found <= estimate(scores, residual, 0.0, SHIFTS))
    np.testing.assert_array_equal(estimate(scores, 0 * residual, shared, SHIFTS), scores)


def test_estimate__of_equal_neighbours_is_exact_with_what_they_share():
    """m equal rows with nothing captured: (E²)_ii/e − e = (m − 1)·e, and the estimate is the exact score."""
    m, e = 7, 2.5
    found = estimate(np.zeros((m, 3)), np.full(m, e), np.full(m, (m - 1) * e), SHIFTS)
    np.testing.assert_allclose(found, np.broadcast_to(e / (m * e + SHIFTS), (m, 3)), rtol=1e-12)


# --- Deviation ----------------------------------------------------------------------------------------


@given(x=st.floats(0, 0.99), total=st.floats(1e-6, 1e6), size=st.integers(1, 10**5), exponent=st.floats(-12, -0.01))
@settings(max_examples=200)
def test_deviation_bound__solves_its_equation(x, total, size, exponent):
    rho = 10**exponent
    found = deviation_bound(x * total, total, size, rho)
    assert x * total <= found <= total
    y, allowed = found / total, math.log(1 / rho) / size
    if y < 1 - 1e-6:
        x = x * total / total
        # Bisection from above: never too small, and too large by its resolution alone.
        assert kl(x, y) >= allowed * (1 - 1e-9) - 1e-12
        assert kl(x, max(x, y - 1e-9)) <= allowed * (1 + 1e-9) + 1e-12


@given(x=st.floats(0, 1), total=st.floats(1e-3, 1e3), size=st.integers(1, 10**5), exponent=st.floats(-12, -1))
@settings(max_examples=80)
def test_deviation_bound__is_monotone(x, total, size, exponent):
    rho, mean = 10**exponent, x * total
    found, slack = deviation_bound(mean, total, size, rho), 1e-12 * total
    assert deviation_bound(mean, total, 2 * size, rho) <= found + slack
    assert deviation_bound(mean, total, size, rho / 10) >= found - slack
    assert deviation_bound(min(mean * 1.1, total), total, size, rho) >= found - slack


@pytest.mark.parametrize("mean", [0.0, 0.3, 2.0])
def test_deviation_bound__of_certainty_is_the_total(mean):
    assert deviation_bound(mean, 2.0, 1000, 0.0) == 2.0
    assert deviation_bound(mean, 2.0, 0, 1e-3) == 2.0
    assert deviation_bound(2.0, 2.0, 1000, 1e-3) == 2.0
    assert deviation_bound(0.0, 0.0, 1000, 1e-3) == 0.0


def test_deviation_bound__of_nothing_seen_is_the_rule_of_three():
    for size in (10, 1000):
        assert deviation_bound(0.0, 1.0, size, 0.05) == pytest.approx(1 - 0.05 ** (1 / size), rel=1e-9)
    assert deviation_bound(-1e-18, 1.0, 10, 0.05) == deviation_bound(0.0, 1.0, 10, 0.05)


@pytest.mark.parametrize("p", [0.001, 0.02, 0.3, 0.9])
@pytest.mark.parametrize("size", [20, 500])
def test_deviation_bound__fails_no_more_often_than_it_says(p, size):
    rho, trials = 0.05, 4000
    means = np.random.default_rng(int(1000 * p) + size).binomial(size, p, trials) / size
    bounds = {mean: deviation_bound(float(mean), 1.0, size, rho) for mean in np.unique(means)}
    failed = np.mean([bounds[mean] < p for mean in means])
    assert failed <= rho + 4 * math.sqrt(rho * (1 - rho) / trials)


@pytest.mark.parametrize("error", [1e-6, 1e-3])
@pytest.mark.parametrize("shift", [1e-3, 1.0, 50.0])
def test_certify__allows_for_the_round_off_of_residuals_and_scores(error, shift):
    """One row: without landmarks the bound by its residual is attained, with itself as landmark that by its score."""
    k, shifts = np.array([2.0]), np.array([shift])
    exact, zero = (k / (k + shifts))[:, None], np.zeros((1, 1))
    certainty = Certainty(2.0, 0.0, error, np.array([error]))
    for residual in (k * (1.0 - error), k, k * (1.0 + error)):
        found = certify(RowFacts(zero, zero, None, None, residual, k), shifts, certainty)
        assert (found.lower <= exact).all()
        assert (exact <= found.upper).all()
    certainty = Certainty(0.0, 0.0, 1e-12, np.array([error]))
    for scores in (exact / (1.0 + error), exact, exact / (1.0 - error)):
        # Of a larger row, so that its diagonal alone bounds nothing.
        found = certify(RowFacts(scores, scores**2, None, None, np.zeros(1), 9.0 * k), shifts, certainty)
        assert (found.lower <= exact).all()
        assert (exact <= found.upper).all()
