"""The choice of landmarks among candidates, against the greedy choice by dense algebra."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskrr.kernels import Gaussian, Matern
from daskrr.numerics.greedy import most_explaining


def candidates(n=40, d=2, seed=0, kernel=None):
    X = np.random.default_rng(seed).standard_normal((n, d))
    return (kernel or Matern(1.0, 0.5))(X, X)


def greedy(E, weights, size):
    """Each time the candidate that reduces the weighted trace most, from scratch."""
    E, chosen = E.copy(), []
    for _ in range(size):
        left = np.diagonal(E)
        gains = np.where(left > 1e-5, weights @ E**2 / np.maximum(left, 1e-5), -1.0)
        gains[chosen] = -1.0
        j = int(np.argmax(gains))
        E = E - np.outer(E[:, j], E[:, j]) / E[j, j]
        chosen.append(j)
    return np.array(chosen)


@pytest.mark.parametrize("seed", range(4))
def test_most_explaining__reduces_the_weighted_trace_as_the_dense_greedy_choice_does(seed):
    E, weights = candidates(seed=seed), np.random.default_rng(seed).uniform(0.1, 2.0, 40)

    def left(chosen):
        columns = E[:, chosen]
        return weights @ np.diagonal(E - columns @ np.linalg.solve(E[np.ix_(chosen, chosen)], columns.T))

    found = most_explaining(E.astype(np.float32), weights, 12)
    expected = greedy(E, weights, 12)
    np.testing.assert_array_equal(found[:4], expected[:4])
    assert left(found) == pytest.approx(left(expected), rel=0.02)
    assert left(found) < 0.9 * left(np.arange(12))


@given(n=st.integers(1, 30), size=st.integers(1, 40), seed=st.integers(0, 100), rank=st.integers(1, 30))
@settings(max_examples=60)
def test_most_explaining__takes_different_candidates_and_as_many_as_there_are(n, size, seed, rank):
    B = np.random.default_rng(seed).standard_normal((n, rank))
    found = most_explaining((B @ B.T).astype(np.float32), np.ones(n), size)
    assert len(found) == len(set(found.tolist())) == min(n, size)
    assert found.min() >= 0
    assert found.max() < n


def test_most_explaining__prefers_what_stands_for_many():
    E = np.eye(5)
    np.testing.assert_array_equal(most_explaining(E.astype(np.float32), np.array([1.0, 5, 2, 4, 3]), 3), [1, 3, 4])


def test_most_explaining__leaves_copies_to_the_end():
    X = np.random.default_rng(0).standard_normal((6, 2))
    E = Gaussian(1.0)(np.repeat(X, 3, axis=0), np.repeat(X, 3, axis=0))
    found = most_explaining(E.astype(np.float32), np.ones(18), 18)
    assert {number // 3 for number in found[:6]} == set(range(6))


@pytest.mark.parametrize("seed", range(3))
def test_most_explaining__explains_as_much_where_several_are_taken_before_gains_are_computed_anew(seed):
    rng = np.random.default_rng(seed)
    X = np.repeat(rng.standard_normal((300, 4)), 2, axis=0) + 0.05 * rng.standard_normal((600, 4))
    E, weights = Gaussian(1.0)(X, X), rng.uniform(0.1, 2.0, 600)
    E += 1e-6 * np.eye(600)

    def left(chosen):
        columns = E[:, chosen]
        return weights @ np.diagonal(E - columns @ np.linalg.solve(E[np.ix_(chosen, chosen)], columns.T))

    found = most_explaining(E.astype(np.float32), weights, 128)
    assert left(found) <= 1.02 * left(greedy(E, weights, 128))
    assert left(found) < 0.8 * left(rng.choice(600, 128, replace=False))
