"""Weighted orders of rows: what they depend on, and the law of the rows that come first."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskrr.numerics.reservoir import Order, Reservoir, merge


def order_of(seed):
    return Order.of(np.random.SeedSequence(seed))


def some_weights(seed, n):
    """Weights over many scales, about a fifth of them zero."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(n) < 0.2, 0.0, 10.0 ** rng.uniform(-3, 3, n))


def filled(order, size, weights, start=0):
    return Reservoir.of(order, size, weights, start, np.arange(start, start + len(weights))[:, None])


def check_same(one, other):
    """Equal reservoirs; the sum of weights up to round-off."""
    for name in ("keys", "rows", "weights", "X"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert one.total == pytest.approx(other.total, rel=1e-12)


def chi_square(counts, probabilities):
    expected = counts.sum() * probabilities
    return float(np.sum((counts - expected) ** 2 / expected))


# --- Keys ---------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 10**6), n=st.integers(1, 60), start=st.integers(0, 60))
@settings(max_examples=60)
def test_keys__depend_on_row_number_and_seed_alone(seed, n, start):
    order, weights = order_of(seed), some_weights(seed, start + n)
    np.testing.assert_array_equal(order.keys(weights[start:], start), order.keys(weights, 0)[start:])
    assert np.all(order.keys(np.ones(n), start) != order_of(seed + 1).keys(np.ones(n), start))


@pytest.mark.parametrize("start", [2**31 - 2, 2**40 + 3, 2**62 + 1])
def test_keys__of_distant_rows_agree(start):
    order = order_of(0)
    keys = order.keys(np.ones(9), start)
    for i in range(9):
        np.testing.assert_array_equal(order.keys(np.ones(1), start + i), keys[i])
    assert len(np.unique(keys)) == 9


def test_keys__are_divided_by_the_weights():
    weights = some_weights(0, 50)
    expected = np.divide(order_of(3).keys(np.ones(50), 7), weights, out=np.full(50, np.inf), where=weights > 0)
    np.testing.assert_allclose(order_of(3).keys(weights, 7), expected, rtol=1e-15)


def test_keys__are_exponential():
    keys = np.sort(order_of(5).keys(np.ones(20_000), 0))
    distance = np.abs(1 - np.exp(-keys) - (np.arange(20_000) + 0.5) / 20_000).max()
    assert distance < 2.0 / np.sqrt(20_000)  # Kolmogorov and Smirnov: 7e-4 of all seeds are farther
    assert keys[0] > 0


@pytest.mark.parametrize("seeds", [((2**63 + 1, 5), (2**63 + 3, 5)), ((5, 2**64 - 1), (5, 2**64 - 3))])
def test_keys__use_every_bit_of_the_seed(seeds):
    one, other = (Order(seed).keys(np.ones(8), 0) for seed in seeds)
    assert np.all(one != other)


# --- Merging ------------------------------------------------------------------------------------------


@given(data=st.data(), seed=st.integers(0, 10**6), n=st.integers(1, 50), size=st.integers(0, 60))
@settings(max_examples=80)
def test_merge__gives_the_same_rows_for_any_split_in_any_order(data, seed, n, size):
    order, weights = order_of(seed), some_weights(seed, n)
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, n), max_size=6))), n]
    parts = [filled(order, size, weights[a:b], a) for a, b in itertools.pairwise(cuts)]
    whole = filled(order, size, weights)
    check_same(merge(data.draw(st.permutations(parts))), whole)
    while len(parts) > 1:
        place = data.draw(st.integers(0, len(parts) - 2))
        parts[place : place + 2] = [merge(parts[place : place + 2])]
    check_same(parts[0], whole)
    assert len(whole) == min(size, np.count_nonzero(weights))
    assert whole.total == pytest.approx(weights.sum(), rel=1e-12)


@given(seed=st.integers(0, 10**6), n=st.integers(1, 50), size=st.integers(1, 60))
@settings(max_examples=40)
def test_of__keeps_the_rows_with_the_smallest_keys(seed, n, size):
    weights = some_weights(seed, n)
    found, keys = filled(order_of(seed), size, weights, 11), order_of(seed).keys(weights, 11)
    expected = [row for row in np.argsort(keys, kind="stable") if weights[row] > 0][:size]
    assert found.rows.tolist() == [11 + row for row in expected]
    np.testing.assert_array_equal(found.X[:, 0], found.rows)
    np.testing.assert_array_equal(found.weights, weights[expected])
    assert np.all(np.diff(found.keys) > 0)
    assert found.X.dtype == np.int64


def test_of__larger_reservoirs_begin_with_smaller_ones():
    weights = some_weights(1, 100)
    large = filled(order_of(0), 50, weights)
    for size in (0, 1, 10, 49):
        np.testing.assert_array_equal(filled(order_of(0), size, weights).rows, large.rows[:size])


@pytest.mark.parametrize("weights", [np.zeros(5), np.empty(0)])
def test_of__without_any_weight_is_empty(weights):
    found = filled(order_of(0), 3, weights)
    assert (len(found), found.total) == (0, 0.0)
    assert len(found.draw(3, np.random.default_rng(0))) == 0


# --- The law of the first rows ------------------------------------------------------------------------


WEIGHTS = np.array([0.0, 1.0, 2.0, 5.0, 0.0, 0.5, 11.5])
SEEDS = 4000


def test_of__first_rows_have_the_odds_of_their_weights():
    first = [filled(order_of(seed), 1, WEIGHTS).rows[0] for seed in range(SEEDS)]
    drawn, shares = np.flatnonzero(WEIGHTS), WEIGHTS[WEIGHTS > 0] / WEIGHTS.sum()
    counts = np.bincount(first, minlength=len(WEIGHTS))
    assert counts[WEIGHTS == 0].sum() == 0
    assert chi_square(counts[drawn], shares) < 25  # 4 degrees of freedom: 5e-5 of all seeds


def test_of__second_rows_have_the_odds_of_those_left():
    pairs = np.array([filled(order_of(seed), 2, WEIGHTS).rows for seed in range(SEEDS)])
    drawn = np.flatnonzero(WEIGHTS)
    pair = [(a, b) for a in drawn for b in drawn if a != b]
    total = WEIGHTS.sum()
    shares = np.array([WEIGHTS[a] / total * WEIGHTS[b] / (total - WEIGHTS[a]) for a, b in pair])
    counts = np.array([np.sum((pairs == one).all(axis=1)) for one in pair])
    assert shares.sum() == pytest.approx(1)
    assert counts.sum() == SEEDS
    assert chi_square(counts, shares) < 19 + 6 * np.sqrt(2 * 19)


# --- Draws with replacement ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 40], ids=["partial", "complete"])
def test_draw__is_independent_and_with_replacement(size):
    triples = np.empty((SEEDS, 3), int)
    for seed in range(SEEDS):
        found = filled(order_of(seed), size, WEIGHTS)
        triples[seed] = found.rows[found.draw(3, np.random.default_rng(seed))]
    drawn, shares = np.flatnonzero(WEIGHTS), WEIGHTS / WEIGHTS.sum()
    for position in range(3):
        counts = np.bincount(triples[:, position], minlength=len(WEIGHTS))
        assert counts[WEIGHTS == 0].sum() == 0
        assert chi_square(counts[drawn], shares[drawn]) < 25
    pair = np.array(list(itertools.product(drawn, drawn)))
    for one, other in ((0, 1), (0, 2), (1, 2)):
        counts = np.array([np.sum((triples[:, [one, other]] == both).all(axis=1)) for both in pair])
        assert chi_square(counts, shares[pair].prod(axis=1)) < 24 + 6 * np.sqrt(2 * 24)


def test_draw__repeats_rows_as_often_as_independent_draws_do():
    weights = 1.0 / np.arange(1, 41)
    shares = weights / weights.sum()
    distinct = [
        len(np.unique(filled(order_of(seed), 20, weights).draw(20, np.random.default_rng(seed))))
        for seed in range(1500)
    ]
    expected = np.sum(1 - (1 - shares) ** 20)
    assert np.mean(distinct) == pytest.approx(expected, abs=5 * np.std(distinct) / np.sqrt(1500))


def test_draw__takes_new_rows_in_their_order():
    found = filled(order_of(0), 30, some_weights(0, 200))
    drawn = found.draw(30, np.random.default_rng(1))
    _, first = np.unique(drawn, return_index=True)
    assert drawn[np.sort(first)].tolist() == list(range(len(first)))
    assert len(found.draw(0, np.random.default_rng(0))) == 0


@given(seed=st.integers(0, 10**6), n=st.integers(1, 20))
@settings(max_examples=30)
def test_draw__of_more_than_there_is_repeats_what_there_is(seed, n):
    weights = np.maximum(some_weights(seed, n), 1e-3)
    found = filled(order_of(seed), 300, weights)
    drawn = found.draw(300, np.random.default_rng(seed))
    assert len(drawn) == 300
    assert 0 <= drawn.min() <= drawn.max() < n
    heaviest = np.mean(found.rows[drawn] == np.argmax(weights))
    share = weights.max() / weights.sum()
    assert abs(heaviest - share) <= 6 * np.sqrt(share * (1 - share) / 300) + 0.02


def test_draw__of_exactly_all_rows_that_weigh_is_complete():
    found = filled(order_of(0), 5, WEIGHTS)
    assert len(found) == 5
    rows = np.concatenate([found.rows[found.draw(5, np.random.default_rng(seed))] for seed in range(2000)])
    assert set(rows) == set(np.flatnonzero(WEIGHTS))


def test_draw__depends_on_the_generator_alone():
    found = filled(order_of(0), 30, some_weights(0, 200))
    one, same, other = (found.draw(30, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert one.tolist() == same.tolist() != other.tolist()
