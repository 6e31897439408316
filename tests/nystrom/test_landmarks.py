"""Draws: exact location, frequencies, and independence of how the rows are stored."""

import dask.array as da
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from strategies import SOURCES, as_zarr, score
from variants import slow_but

import daskrr
from daskrr.errors import InvalidData, InvalidParameter
from daskrr.kernels import Gaussian, Linear
from daskrr.nystrom import landmarks
from daskrr.nystrom.sampling import as_sampling

WEIGHTS = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-300, 1e300), st.floats(0.0, 1.0)), min_size=1, max_size=40
).filter(any)


def rows(n=47, d=2, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d))


LINEAR = Linear()


def drawn(X, kernel=LINEAR, size=20, **options):
    """What was drawn: rows and how often."""
    options = {"random_state": 5, "progress": False} | options
    landmarks = daskrr.leverage_scores(X, kernel, 1.0, size, **options).sketch.landmarks
    return landmarks.indices.tolist(), landmarks.counts.tolist()


# --- Seeds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", ["a", 1.5, True, -1, np.random.default_rng(0)])
def test_check_seed__refuses_what_cannot_be_recorded(seed):
    with pytest.raises(InvalidParameter, match="random_state must be a non-negative int or None"):
        landmarks.check_seed(seed)


def test_check_seed__draws_one_where_none_is_given():
    assert landmarks.check_seed(np.int32(3)) == 3
    assert len({landmarks.check_seed(None) for _ in range(8)}) == 8


def test_stream__differs_by_seed_purpose_and_round():
    keys = [(seed, purpose, number) for seed in (0, 1) for purpose in landmarks.PURPOSES for number in (0, 1)]
    first = {landmarks.stream(*key).integers(0, 2**62) for key in keys}
    assert len(first) == len(keys)
    assert landmarks.stream(0, "audit").integers(0, 2**62) in first


# --- Integer weights ----------------------------------------------------------------------------------


@given(weights=WEIGHTS)
def test_integer_weights__keep_zeros_and_never_overflow(weights):
    weights = np.array(weights)
    scale = landmarks.binary_scale(weights.max(), len(weights))
    integers = landmarks.integer_weights(weights, scale)
    assert np.array_equal(integers == 0, weights == 0)
    assert np.all(integers >= 0)
    assert sum(map(int, integers)) < 2**62
    np.testing.assert_allclose(integers / float(integers.max()), weights / weights.max(), rtol=0, atol=1e-15)


@pytest.mark.parametrize("n_rows", [1, 2**20, 10**12])
def test_binary_scale__leaves_room_for_every_row(n_rows):
    for largest in (5e-324, 0.5, 1.0, 1.7e308):
        most = int(landmarks.integer_weights(np.array([largest]), landmarks.binary_scale(largest, n_rows))[0])
        assert 2**58 < n_rows * most < 2**62


@given(weights=st.lists(st.integers(0, 6), min_size=1, max_size=30).filter(any), cuts=st.sets(st.integers(1, 29)))
def test_locate__finds_the_same_row_through_blocks_as_by_counting(weights, cuts):
    every = np.arange(sum(weights))
    expected = np.repeat(np.arange(len(weights)), weights)
    blocks = np.split(np.array(weights), sorted(cut for cut in cuts if cut < len(weights)))
    places, offsets = landmarks.locate(every, np.array([block.sum() for block in blocks]))
    starts = np.cumsum([0, *map(len, blocks)])
    found = [starts[place] + landmarks.locate(offsets[[i]], blocks[place])[0][0] for i, place in enumerate(places)]
    np.testing.assert_array_equal(found, expected)


def test_draw_integers__are_sorted_and_in_range():
    found = landmarks.draw_integers(7, 500, np.random.default_rng(0))
    assert np.all(np.diff(found) >= 0)
    assert set(found) == set(range(7))


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_check_weights__names_the_row(bad):
    with pytest.raises(InvalidData, match=r"weight of row 12 is (-1.0|nan|inf).*2 rows of this block"):
        landmarks.check_weights(np.array([1.0, 0.0, bad, bad]), 10)


# --- Landmarks ----------------------------------------------------------------------------------------


def test_merge__counts_repetitions():
    merged = landmarks.merge(np.array([4, 1, 4, 4]), np.array([0.3, 0.1, 0.3, 0.3]))
    assert (merged.indices.tolist(), merged.counts.tolist(), merged.n_draws) == ([1, 4], [1, 3], 4)
    assert merged.probabilities.tolist() == [0.1, 0.3]


def test_penalty__weighs_by_probability_and_count():
    merged = landmarks.merge(np.array([1, 4, 4, 4]), np.array([0.1, 0.3, 0.3, 0.3]))
    np.testing.assert_allclose(merged.penalty(50, 0.2), 50 * 0.2 * 4 * np.array([0.1 / 1, 0.3 / 3]))


def test_penalty__needs_probabilities():
    with pytest.raises(InvalidParameter, match=r"sketch_ridge .* landmarks given by number"):
        landmarks.given(np.arange(3), 5, None).penalty(5, 0.1)


@pytest.mark.parametrize(
    ("indices", "size", "message"),
    [
        ([3, 10], None, "landmark index 10 is out of range: X has 10 rows"),
        ([-1, 3], None, "landmark index -1 is out of range"),
        ([[1], [2]], None, r"1-D integer array, got shape \(2, 1\)"),
        ([1, 2], 3, "landmarks=3, but sampling gives 2"),
    ],
)
def test_given__refuses_indices_that_are_not_rows(indices, size, message):
    with pytest.raises(InvalidParameter, match=message):
        landmarks.given(np.array(indices), 10, size)


@pytest.mark.parametrize(
    "bad", [np.ones(5, bool), np.ones(4), np.ones((5, 1)), [], [[1, 2]], np.ones(5, complex), ["a"] * 5]
)
def test_as_sampling__names_both_readings_of_an_array(bad):
    with pytest.raises(InvalidParameter, match=r"either 5 probabilities .* or the row numbers"):
        as_sampling(bad, 5)


@pytest.mark.parametrize("word", ["leverages", "Uniform", ""])
def test_as_sampling__names_the_schemes(word):
    with pytest.raises(InvalidParameter, match=f"residual, leverage, diagonal, uniform, .* or an array, got '{word}'"):
        as_sampling(word, 5)


# --- Draws of a run -----------------------------------------------------------------------------------


def probabilities(n=47):
    weights = np.random.default_rng(3).random(n)
    weights[::5] = 0.0
    return weights / weights.sum()


STORED = {
    "numpy": lambda p: p,
    "list": lambda p: p.tolist(),
    "dask": lambda p: da.from_array(p, chunks=11),
    "zarr": lambda p: as_zarr(p, (9,)),
    "zarr sharded": lambda p: as_zarr(p, (3,), shards=(9,)),
}


@pytest.mark.parametrize("source", slow_but(SOURCES, "dask ragged", "zarr by features", "zarr sharded", "path"))
@pytest.mark.parametrize("scheme", [pytest.param("uniform", marks=pytest.mark.slow), "diagonal", "probabilities"])
def test_draws__do_not_depend_on_the_source(source, scheme, tmp_path):
    X = rows()
    choice = probabilities() if scheme == "probabilities" else scheme
    reference = drawn(X, sampling=choice)
    for block_rows in (None, 10):
        assert drawn(SOURCES[source](X, tmp_path), sampling=choice, block_rows=block_rows) == reference


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("block_rows", slow_but([1, 7, 64], 7))
def test_draws__do_not_depend_on_how_probabilities_are_stored(stored, block_rows):
    found = drawn(rows(), sampling=STORED[stored](probabilities()), block_rows=block_rows)
    assert found == drawn(rows(), sampling=probabilities())


def test_draws__of_a_constant_diagonal_are_uniform_draws():
    X = rows()
    assert drawn(X, Gaussian(1.0), sampling="diagonal") == drawn(X, Gaussian(1.0), sampling="uniform")
    assert drawn(X, sampling="diagonal") != drawn(X, sampling="uniform")


@pytest.mark.parametrize("scheme", ["uniform", "diagonal", "probabilities"])
def test_draws__follow_their_probabilities(scheme):
    X, n = rows(20, 1), 20
    expected = {"uniform": np.full(n, 1 / n), "diagonal": X[:, 0] ** 2 / np.sum(X**2), "probabilities": None}[scheme]
    expected = probabilities(n) if expected is None else expected
    choice = expected if scheme == "probabilities" else scheme
    landmarks = score(X, Linear(), 1.0, 20000, sampling=choice, block_rows=3).result.sketch.landmarks
    counts = np.bincount(landmarks.indices, landmarks.counts, n)
    np.testing.assert_allclose(landmarks.probabilities, expected[landmarks.indices], rtol=1e-12)
    assert not counts[expected == 0].any()
    drawable = expected > 1e-3
    observed, wanted = counts[drawable], expected[drawable]
    assert landmarks.n_draws == 20000
    assert chisquare(observed, wanted / wanted.sum() * observed.sum()).pvalue > 1e-4


@given(seed=st.integers(0, 2**63))
@settings(max_examples=8)
def test_draws__never_take_rows_of_no_weight(seed):
    X = rows()
    X[::2] = 0.0
    indices, counts = drawn(X, size=60, sampling="diagonal", random_state=seed, block_rows=9)
    assert np.all(np.array(indices) % 2 == 1)
    assert sum(counts) == 60


def test_draws__need_a_kernel_that_is_not_zero_everywhere():
    with pytest.raises(InvalidData, match="zero on every row"):
        drawn(np.zeros((6, 2)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: np.where(np.arange(47) == 31, -p, p), "weight of row 31 is -"),
        (lambda p: np.where(np.arange(47) == 31, np.nan, p), "weight of row 31 is nan"),
        (lambda p: np.where(np.arange(47) == 31, np.inf, p), "weight of row 31 is inf"),
        (lambda p: 2 * p, "probabilities sum to 2, not to 1"),
        (lambda p: p + 1e-6, r"probabilities sum to 1.000047, not to 1"),
        (lambda p: 0 * p, "probabilities sum to 0, not to 1"),
    ],
)
@pytest.mark.parametrize("stored", ["numpy", "dask", "zarr"])
def test_draws__refuse_numbers_that_are_no_probabilities(change, message, stored):
    with pytest.raises((InvalidData, InvalidParameter), match=message):
        drawn(rows(), sampling=STORED[stored](change(probabilities())), block_rows=10)


def test_draws__name_the_row_whose_diagonal_cannot_be_weighed():
    X = rows()
    X[33, 1] = np.nan
    with pytest.raises(InvalidData, match=r"rows 30–39 .* in 1 rows: 33"):
        drawn(X, block_rows=10)
    X[33] = 1e200
    with pytest.raises(InvalidData, match="weight of row 33 is inf"):
        drawn(X, block_rows=10)
