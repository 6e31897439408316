"""Landmarks chosen in rounds: what a round keeps, what it adds, and when it stops."""

import itertools
from functools import partial

import numpy as np
import pytest
from strategies import SOURCES, as_zarr, score
from variants import slow_but

from daskrr import exact
from daskrr.errors import InvalidParameter, RidgeTooSmall
from daskrr.kernels import Gaussian, Laplacian, Linear, Polynomial
from daskrr.nystrom.growing import n_candidates, round_sizes
from daskrr.nystrom.sampling import BY_NAME, Diagonal, Leverage, Probabilities, Residual, Uniform


def rows(n=60, d=3, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d))


def landmarks(X, kernel, n_landmarks, ridge=1e-2, **options):
    return score(X, kernel, ridge, n_landmarks, **options).result.sketch.landmarks


# --- Sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "rounds"), [(1, 1), (1, 5), (2, 3), (7, 3), (30, 3), (100, 7), (5, 5)])
def test_round_sizes__grow_in_equal_steps_to_the_size(size, rounds):
    found = round_sizes(size, rounds)
    assert found[-1] == size
    assert found[0] >= 1
    assert len(found) == min(size, rounds)
    steps = np.diff([0, *found])
    assert np.all(steps >= 1)
    assert steps.max() - steps.min() <= 1


# --- Residual -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [Gaussian(0.7), Linear() + Gaussian(0.7)], ids=repr)
def test_residual__keeps_the_landmarks_of_earlier_rounds(kernel):
    X = rows(120)
    found = [
        set(landmarks(X, kernel, 10 * n, sampling=Residual(rounds=n), block_rows=32).indices) for n in (1, 2, 3, 4)
    ]
    for fewer, more in itertools.pairwise(found):
        assert fewer < more
    assert [len(one) for one in found] == [10, 20, 30, 40]


def test_residual__draws_distinct_rows_once():
    found = landmarks(rows(100), Gaussian(0.5), 70, sampling=Residual(rounds=4))
    assert found.probabilities is None
    np.testing.assert_array_equal(found.counts, 1)
    assert len(found.indices) == 70


@pytest.mark.parametrize("rounds", [2, 5])
def test_residual__adds_rows_with_a_residual_alone(rounds):
    """Half of the rows are twins: no round after the first adds the twin of a landmark."""
    X = np.repeat(rows(50), 2, axis=0)
    first = set(landmarks(X, Laplacian(1.0), 10, sampling=Residual(rounds=1)).indices)
    found = landmarks(X, Laplacian(1.0), 10 * rounds, sampling=Residual(rounds=rounds)).indices
    added = np.array(sorted(set(found) - first))
    assert len(added) == 10 * (rounds - 1)
    assert not {row // 2 for row in added} & {row // 2 for row in first}


def test_residual__stops_when_nothing_is_left():
    X = np.repeat(rows(5), 20, axis=0)
    result = score(X, Gaussian(1.0), 1e-2, 90, sampling=Residual(rounds=9)).result
    assert result.rank == 5
    assert len(result.sketch.landmarks.indices) < 90
    np.testing.assert_allclose(result.scores.compute(), exact.leverage_scores(X, Gaussian(1.0), 1e-2), atol=1e-9)
    few = score(rows(50, 3), Linear(), 1e-2, 40, sampling=Residual(rounds=4)).result.sketch.landmarks
    assert len(few.indices) == 10


def test_residual__takes_no_more_rows_than_there_are():
    found = landmarks(rows(20), Gaussian(0.1), 60)
    assert found.indices.tolist() == list(range(20))
    assert found.counts.tolist() == [1] * 20


def test_residual__finds_rows_that_nothing_is_near():
    X = np.concatenate([0.01 * rows(500), 30 * np.eye(3)])
    for seed in range(5):
        found = landmarks(X, Gaussian(1.0), 12, random_state=seed).indices
        assert {500, 501, 502} <= set(found)


def test_residual__explains_more_than_one_draw():
    X = np.concatenate([0.3 * rows(300), 3 * rows(40, seed=1)])
    left = {
        sampling: np.mean(
            [
                score(X, Gaussian(1.0), 1e-2, 60, sampling=sampling, random_state=seed).residual.sum()
                for seed in range(3)
            ]
        )
        for sampling in ("residual", "uniform", "leverage")
    }
    assert left["residual"] < 0.7 * left["uniform"]
    assert left["leverage"] < left["uniform"]


def test_residual__with_replacement_may_repeat_rows():
    X = rows(40)
    repeated = [
        landmarks(X, Linear() + Gaussian(1.0), 60, sampling=Residual(replacement=True), random_state=seed).counts.max()
        for seed in range(4)
    ]
    assert max(repeated) > 1
    for seed in range(4):
        found = landmarks(X, Linear() + Gaussian(1.0), 60, sampling=Residual(replacement=True), random_state=seed)
        assert found.n_draws <= 60


@pytest.mark.parametrize("source", slow_but(["dask ragged", "zarr sharded", "path"], "zarr sharded"))
@pytest.mark.parametrize("kernel", slow_but([Gaussian(0.7), Polynomial(2)], Gaussian(0.7)), ids=repr)
def test_residual__does_not_depend_on_chunks(kernel, source, tmp_path):
    X = rows(83)
    ridge = 1e-2 * float(kernel.diagonal(X).mean())
    plain = landmarks(X, kernel, 30, ridge)
    for block_rows in (10, 45):
        other = landmarks(SOURCES[source](X, tmp_path), kernel, 30, ridge, block_rows=block_rows)
        assert other.indices.tolist() == plain.indices.tolist()
        assert other.counts.tolist() == plain.counts.tolist()


@pytest.mark.slow
def test_residual__has_the_same_landmarks_on_a_cluster(request, tmp_path):
    X = rows(90)
    plain = landmarks(X, Gaussian(0.7), 30, block_rows=20)
    as_zarr(X, (20, 3), tmp_path / "X.zarr")
    request.getfixturevalue("client")
    other = landmarks(tmp_path / "X.zarr", Gaussian(0.7), 30, block_rows=20)
    assert other.indices.tolist() == plain.indices.tolist()


def test_residual__depends_on_the_seed():
    found = [landmarks(rows(100), Gaussian(0.5), 20, random_state=seed).indices.tolist() for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("rounds", [0, 1.5, "3", True])
def test_rounds__must_be_a_positive_number(rounds):
    with pytest.raises(InvalidParameter, match="rounds must be an int of at least 1"):
        Residual(rounds)


# --- Leverage -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("kernel", [Gaussian(0.7), Linear() + Gaussian(0.7)], ids=repr)
def test_leverage__keeps_its_first_round(kernel, replacement):
    X = rows(100)
    first = landmarks(X, kernel, 10, sampling=Diagonal(replacement=False))
    found = landmarks(X, kernel, 40, sampling=Leverage(replacement=replacement))
    assert set(first.indices) < set(found.indices)
    assert found.n_draws == 40
    assert found.probabilities is None


@pytest.mark.parametrize("kernel", [Gaussian(0.7), Linear() + Gaussian(0.7)], ids=repr)
def test_leverage__with_a_sketch_ridge_draws_anew(kernel):
    X, n = rows(100), 100
    found = score(X, kernel, 0.02, 40, sampling=Leverage(sketch_ridge=1e-3))
    drawn = found.result.sketch.landmarks
    assert drawn.n_draws == 40
    assert np.all(drawn.probabilities > 0)
    weights = n * 1e-3 * np.diag(40 * drawn.probabilities / drawn.counts)
    C = kernel(X, X[drawn.indices])
    L = C @ np.linalg.solve(C[drawn.indices] + weights, C.T)
    np.testing.assert_allclose(found.scores, np.diagonal(np.linalg.solve(L + n * 0.02 * np.eye(n), L)), atol=1e-8)


def test_leverage__without_replacement_repeats_no_row_of_a_round():
    found = landmarks(rows(30), Gaussian(0.3), 40, sampling=Leverage(replacement=False))
    assert found.counts.max() <= 2  # once in either round
    assert len(found.indices) <= 30


@pytest.mark.parametrize("replacement", [True, False])
def test_leverage__works_with_one_landmark(replacement):
    found = landmarks(rows(12), Gaussian(1.0), 1, sampling=Leverage(replacement=replacement))
    assert len(found.indices) == 1


@pytest.mark.parametrize("n_landmarks", [2, 3, 5, 7])
def test_leverage__works_with_few_landmarks(n_landmarks):
    assert landmarks(rows(12), Gaussian(1.0), n_landmarks, sampling="leverage").n_draws == n_landmarks


def test_leverage__draws_no_row_where_the_kernel_vanishes():
    X = np.concatenate([np.zeros((50, 3)), rows(50)])
    assert landmarks(X, Linear(), 60, sampling="leverage").indices.min() >= 50


def test_leverage__draws_in_proportion_to_upper_ends():
    """Rows that nothing is near have the highest ends, whether the first round saw them or not."""
    X = np.concatenate([0.01 * rows(400), 30 * np.arange(1, 21)[:, None] * np.ones(3)])
    for seed in range(3):
        found = landmarks(X, Gaussian(1.0), 120, 1e-2, sampling=Leverage(sketch_ridge=1e-3), random_state=seed)
        alone = found.indices >= 400
        assert alone.sum() >= 5
        assert found.probabilities[alone].min() >= found.probabilities[~alone].max()


def test_leverage__names_the_ridge_that_its_first_round_cannot_resolve():
    with pytest.raises(RidgeTooSmall, match="sampling='leverage' draws by scores at ridge·epsilon"):
        landmarks(rows(), Gaussian(1.0), 20, 1e-3, sampling=Leverage(epsilon=1e-14))


@pytest.mark.parametrize("epsilon", [0, -1.0, np.nan, "x"])
def test_leverage__needs_a_positive_epsilon(epsilon):
    with pytest.raises(InvalidParameter, match="epsilon must be"):
        Leverage(epsilon)


# --- Without replacement ------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["uniform", "diagonal", "probabilities"])
@pytest.mark.parametrize("kernel", slow_but([Gaussian(0.7), Linear() + Gaussian(0.7)], Gaussian(0.7)), ids=repr)
def test_replacement__decides_whether_rows_repeat(kernel, sampling):
    X = rows(40)
    scheme = np.full(40, 1 / 40) if sampling == "probabilities" else sampling
    once = Probabilities(scheme, False) if sampling == "probabilities" else BY_NAME[sampling](replacement=False)
    without = landmarks(X, kernel, 30, sampling=once)
    assert (len(without.indices), without.counts.max(), without.probabilities) == (30, 1, None)
    replaced = landmarks(X, kernel, 30, sampling=scheme)
    assert (replaced.n_draws, replaced.counts.max() > 1) == (30, True)
    assert replaced.probabilities is not None
    for block_rows in (7, 40):
        again = landmarks(X, kernel, 30, sampling=once, block_rows=block_rows)
        assert again.indices.tolist() == without.indices.tolist()
    everything = landmarks(X, kernel, 90, sampling=once)
    assert everything.indices.tolist() == list(range(40))


@pytest.mark.parametrize("kind", [Leverage, Diagonal, Uniform, partial(Probabilities, np.full(60, 1 / 60))])
def test_sketch_ridge__needs_draws_with_replacement(kind):
    assert kind(sketch_ridge=1e-2).sketch_ridge == 1e-2
    assert kind(replacement=False, sketch_ridge=0).sketch_ridge == 0.0
    with pytest.raises(InvalidParameter, match=r"sketch_ridge weighs .* without replacement do not have"):
        kind(replacement=False, sketch_ridge=1e-2)
    for bad in (-0.1, np.nan, np.inf, "x", None, True):
        with pytest.raises(InvalidParameter, match="sketch_ridge must be"):
            kind(sketch_ridge=bad)


@pytest.mark.parametrize("n_rows", [1, 300, 10**4, 10**7])
@pytest.mark.parametrize(("size", "n_landmarks"), [(1, 2), (50, 100), (500, 1000), (3000, 5000)])
def test_n_candidates__are_enough_and_affordable(size, n_landmarks, n_rows):
    found = n_candidates(size, n_landmarks, n_rows)
    assert 2 * size <= found <= max(6 * size, 2 * size)
    if found > 2 * size:
        assert size * found**2 <= n_rows * n_landmarks**2
    assert n_candidates(size, n_landmarks, 10 * n_rows) >= found
