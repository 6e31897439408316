"""Weighted samples of rows: their probabilities, where they come from, and what is refused."""

import dask.array as da
import numpy as np
import pytest
import zarr
from hypothesis import assume
from hypothesis import strategies as st
from strategies import as_zarr, problems
from variants import examples, slow_but

import daskrr
from daskrr.errors import InvalidData, InvalidParameter, OutputExists
from daskrr.jobs.verification import verify
from daskrr.kernels import Gaussian, Linear

KERNEL = Gaussian(1.0)


def rows(n=120, d=2, seed=0):
    X = np.random.default_rng(seed).standard_normal((n, d))
    X[::10] *= 6
    return X


def scored(X, ridge=1e-2, landmarks=25, **options):
    options = {"random_state": 0, "progress": False, "certify": True, "block_rows": 50} | options
    return daskrr.leverage_scores(X, KERNEL, ridge, landmarks, **options)


def sampled(result, size=80, **options):
    return daskrr.jobs.sample_rows(result, size, **{"random_state": 0, "progress": False} | options)


@pytest.fixture(scope="module")
def result():
    return scored(rows())


def mixed(values, uniform_share):
    """Probabilities in proportion to values, but for a share that is uniform."""
    return (1 - uniform_share) * values / values.sum() + uniform_share / len(values)


# --- Probabilities ------------------------------------------------------------------------------------


def test_probabilities__are_by_the_upper_ends_but_for_one_tenth(result):
    sample, upper = sampled(result), result.upper.compute()
    assert sample.by == "upper"
    np.testing.assert_allclose(sample.probabilities, mixed(upper, 0.1)[sample.indices], rtol=1e-12)
    np.testing.assert_allclose(sample.weights, 1 / (80 * sample.probabilities), rtol=1e-15)
    np.testing.assert_allclose(sample.sketch_scales**2, sample.weights, rtol=1e-15)
    np.testing.assert_array_equal(sample.points, rows()[sample.indices])
    assert len(sample) == len(sample.indices) == 80
    assert np.all(np.diff(sample.indices) >= 0)


def test_probabilities__of_all_rows_sum_to_one(result):
    sample, upper = sampled(result, 5000), result.upper.compute()
    indices, first = np.unique(sample.indices, return_index=True)
    assert len(indices) == 120
    assert sample.probabilities[first].sum() == pytest.approx(1, rel=1e-12)
    counts = np.bincount(sample.indices, minlength=120)
    expected = 5000 * mixed(upper, 0.1)
    assert np.sum((counts - expected) ** 2 / expected) < 119 + 6 * np.sqrt(2 * 119)


@pytest.mark.parametrize("n_landmarks", [4, 25])
def test_probabilities__without_certificate_are_half_uniform(n_landmarks):
    plain = scored(rows(), landmarks=n_landmarks, certify=False)
    sample, estimate = sampled(plain), plain.estimate.compute()
    assert sample.by == "estimate"
    np.testing.assert_allclose(sample.probabilities, mixed(estimate, 0.5)[sample.indices], rtol=1e-9)


def test_probabilities__without_certificate_overlook_no_row():
    plain = daskrr.leverage_scores(
        np.concatenate([np.zeros((20, 2)), rows(30)]), Linear(), 1e-2, 2, random_state=0, progress=False
    )
    assert sampled(plain, 2000).indices.min() < 20
    assert sampled(plain, 2000).probabilities.min() >= 0.5 / 50 * (1 - 1e-9)


def test_probabilities__follow_the_ridge_that_is_named():
    several = scored(rows(), [1e-1, 1e-3])
    upper = several.upper.compute()
    for ridge, column in ((None, 1), (1e-3, 1), (1e-1, 0)):
        sample = sampled(several, ridge=ridge)
        expected = mixed(upper[:, column], 0.1)
        np.testing.assert_allclose(sample.probabilities, expected[sample.indices], rtol=1e-12)
    with pytest.raises(InvalidParameter, match=r"ridge=0\.5 is none of those that were scored: 0\.1, 0\.001"):
        sampled(several, ridge=0.5)


# --- Weights ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_weights__make_sums_right_on_average(result):
    X, n = rows(), 120
    drawn_by = mixed(result.upper.compute(), 0.1)
    f = np.stack([np.ones(n), X[:, 0], X[:, 0] ** 2, np.arange(n) % 7, drawn_by], axis=1)
    sums = np.array(
        [
            (sample.weights[:, None] * f[sample.indices]).sum(axis=0)
            for sample in (sampled(result, 30, random_state=seed) for seed in range(80))
        ]
    )
    error = sums.std(axis=0) / np.sqrt(80)
    assert np.all(np.abs(sums.mean(axis=0) - f.sum(axis=0)) <= 5 * error + 1e-9 * np.abs(f).sum(axis=0))
    # What the rows were drawn by has no variance at all.
    np.testing.assert_allclose(sums[:, -1], 1, rtol=1e-9)


def largest_error(f, probabilities, size):
    """What a sum over a sample, Σ f/(size·p), misses Σ f by at most, except with probability 1e-9 (Bernstein).

    It is the mean of independent f/p of variance σ² and within R of their mean: P(|error| > t) is at most
    2 exp(−size·t²/(2σ² + 2Rt/3)), which is 1e-9 where t solves size·t² = L(2σ² + 2Rt/3), L = log(2e9).
    """
    one = f / probabilities
    variance, reach = probabilities @ (one - f.sum()) ** 2, np.abs(one - f.sum()).max()
    share = np.log(2e9) / size
    return share * reach / 3 + np.sqrt((share * reach / 3) ** 2 + 2 * share * variance) + 1e-9 * np.abs(f).sum()


@examples(
    20,
    60,
    problem=problems(max_rows=40, dtypes=["float64"]),
    certify=st.booleans(),
    seed=st.integers(0, 99),
    derandomize=True,
)
def test_weights__give_the_sums_and_means_of_all_rows(problem, certify, seed):
    X, size = problem.X, 4000
    assume(problem.diagonal.any())
    result = daskrr.leverage_scores(
        X, problem.kernel, problem.ridge(1e-2), 10, certify=certify, random_state=seed, progress=False
    )
    sample = sampled(result, size, random_state=seed)
    chances = mixed((result.upper if certify else result.estimate).compute(), 0.1 if certify else 0.5)
    total, missed = sample.weights.sum(), largest_error(np.ones(len(X)), chances, size)
    assert abs(total - len(X)) <= missed
    for column, found in zip(X.T, np.average(sample.points, axis=0, weights=sample.weights), strict=True):
        # The weighted mean misses the mean by Σ w·(x − mean)/Σ w, whose numerator is zero over all rows.
        allowed = largest_error(column - column.mean(), chances, size) / (len(X) - missed)
        assert missed < len(X) / 2
        assert abs(found - column.mean()) <= allowed + 1e-9 * np.abs(column).max()


def test_weights__count_rows_of_score_zero():
    X = np.concatenate([np.zeros((20, 2)), rows(40)])
    zeros = daskrr.leverage_scores(X, Linear(), 1e-2, 30, certify=True, random_state=0, progress=False)
    assert not zeros.upper.compute()[:20].any()
    sample = sampled(zeros, 5000)
    assert sample.weights.sum() == pytest.approx(60, rel=0.2)
    assert sample.weights.max() <= 10 * 60 / 5000 * (1 + 1e-9)


def test_sketch_scales__make_products_right_on_average(result):
    """E[Xᵀ·S·Sᵀ·X] = Xᵀ·X of the paper's sampling matrix S, which has K in place of X."""
    X = rows()
    sample = sampled(result, 50_000)
    scaled = sample.sketch_scales[:, None] * sample.points
    found, products = scaled.T @ scaled, X[:, :, None] * X[:, None, :]
    chances = mixed(result.upper.compute(), 0.1)
    for i, j in ((0, 0), (0, 1), (1, 1)):
        allowed = largest_error(products[:, i, j], chances, 50_000)
        assert abs(found[i, j] - products[:, i, j].sum()) <= allowed < 0.2 * np.abs(products[:, i, j]).sum()


# --- What it depends on -------------------------------------------------------------------------------


def check_same(one, other):
    np.testing.assert_array_equal(one.indices, other.indices)
    np.testing.assert_array_equal(one.probabilities, other.probabilities)
    np.testing.assert_array_equal(one.points, other.points)
    assert (one.by, one.random_state) == (other.by, other.random_state)


@pytest.mark.parametrize("certify", slow_but([True, False], True))
@pytest.mark.parametrize("ridge", slow_but([1e-2, [1e-2, 1e-3]], [1e-2, 1e-3]), ids=["one ridge", "two ridges"])
def test_sample__of_a_store_is_the_one_of_its_result(ridge, certify, tmp_path):
    as_zarr(rows(), (30, 2), tmp_path / "X.zarr")
    made = scored(str(tmp_path / "X.zarr"), ridge, certify=certify)
    made.store(tmp_path / "scores.zarr", progress=False)
    expected = sampled(made, 60, random_state=3)
    check_same(sampled(tmp_path / "scores.zarr", 60, random_state=3), expected)
    check_same(sampled(str(tmp_path / "scores.zarr"), 60, random_state=3, X=rows()), expected)
    if not isinstance(ridge, float):
        check_same(
            sampled(tmp_path / "scores.zarr", 60, random_state=3, ridge=1e-2),
            sampled(made, 60, random_state=3, ridge=1e-2),
        )


def test_sample__depends_on_the_seed_alone(result):
    check_same(sampled(result, random_state=5), sampled(result, random_state=5))
    assert sampled(result, random_state=5).indices.tolist() != sampled(result, random_state=6).indices.tolist()
    drawn = daskrr.jobs.sample_rows(result, 20, progress=False)
    check_same(sampled(result, 20, random_state=drawn.random_state), drawn)


def test_sample__is_not_the_landmarks(result):
    """Its random numbers are its own."""
    chosen = scored(rows(), sampling="uniform", landmarks=25).sketch.landmarks.indices
    assert sampled(result, 25).indices.tolist() != chosen.tolist()


def test_sample__may_be_larger_than_the_data(result):
    sample = sampled(result, 1000)
    assert sample.points.shape == (1000, 2)
    assert len(np.unique(sample.indices)) <= 120


def test_sample__of_a_cluster_is_the_same(request, result, tmp_path):
    expected = sampled(result)
    as_zarr(rows(), (30, 2), tmp_path / "X.zarr")
    result.store(tmp_path / "scores.zarr", progress=False)
    request.getfixturevalue("client")
    check_same(sampled(tmp_path / "scores.zarr", X=tmp_path / "X.zarr"), expected)


# --- Output -------------------------------------------------------------------------------------------


def test_output__is_plain_zarr(result, tmp_path):
    sample = sampled(result, output=tmp_path / "sample.zarr")
    group = zarr.open_group(tmp_path / "sample.zarr", mode="r")
    assert sorted(group.array_keys()) == ["indices", "points", "probabilities", "weights"]
    for name in group.array_keys():
        np.testing.assert_array_equal(group[name][...], getattr(sample, name))
    assert group["indices"].dtype == np.int64
    assert group.attrs["daskrr"]["by"] == "upper"
    assert group.attrs["daskrr"]["random_state"] == 0
    assert sorted(one.name for one in tmp_path.iterdir()) == ["sample.zarr"]


def test_output__that_exists_is_replaced_only_when_asked(result, tmp_path):
    sampled(result, 10, output=tmp_path / "sample.zarr")
    with pytest.raises(OutputExists, match="overwrite=True"):
        sampled(result, 20, output=tmp_path / "sample.zarr")
    assert zarr.open_group(tmp_path / "sample.zarr", mode="r")["indices"].shape == (10,)
    sampled(result, 20, output=tmp_path / "sample.zarr", overwrite=True)
    assert zarr.open_group(tmp_path / "sample.zarr", mode="r")["indices"].shape == (20,)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    with pytest.raises(OutputExists, match="is not a result of daskrr"):
        sampled(result, 10, output=tmp_path / "other", overwrite=True)


def test_output__leaves_what_is_beside_the_sample_alone(result, tmp_path):
    for size in (10, 20):
        sampled(result, size, output=tmp_path / "sample.zarr", overwrite=True)
        (tmp_path / "sample.zarr" / f"notes-{size}.txt").write_text("mine")
    as_zarr(rows(), (30, 2), tmp_path / "sample.zarr" / "labels")
    sample = sampled(result, 30, output=tmp_path / "sample.zarr", overwrite=True)
    group = zarr.open_group(tmp_path / "sample.zarr", mode="r")
    np.testing.assert_array_equal(group["indices"][...], sample.indices)
    np.testing.assert_array_equal(group["labels"][...], rows())
    assert {(tmp_path / "sample.zarr" / f"notes-{size}.txt").read_text() for size in (10, 20)} == {"mine"}
    assert verify(tmp_path / "sample.zarr") == []


def test_output__whose_names_others_have_taken_is_refused(result, tmp_path):
    sampled(result, 10, output=tmp_path / "sample.zarr")
    (tmp_path / "sample.zarr" / "points").unlink()
    as_zarr(rows(), (30, 2), tmp_path / "sample.zarr" / "points")
    with pytest.raises(OutputExists, match="has points already, which daskrr has not written and leaves alone"):
        sampled(result, 20, output=tmp_path / "sample.zarr", overwrite=True)
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "sample.zarr" / "points", mode="r")[...], rows())


def test_output__is_checked_before_any_work(tmp_path):
    with pytest.raises(InvalidParameter, match="there is no folder"):
        sampled(tmp_path / "nothing.zarr", output=tmp_path / "no" / "sample.zarr")


# --- Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1, 2.0, "3", True, None])
def test_size__must_be_a_positive_number(size, result):
    with pytest.raises(InvalidParameter, match="size must be an int of at least 1"):
        sampled(result, size)


@pytest.mark.parametrize("X", [rows(119), rows(121), rows(120, 3), rows()[:, 0]])
def test_rows__of_another_shape_are_refused(X, result, tmp_path):
    result.store(tmp_path / "scores.zarr", progress=False)
    with pytest.raises(InvalidData, match=r"the scores are of 120 rows × 2 features|must have 2 dimension"):
        sampled(tmp_path / "scores.zarr", X=X)


def test_rows__are_given_with_a_store_alone(result):
    with pytest.raises(InvalidParameter, match="X is known to a result in memory"):
        sampled(result, X=rows())


def test_store__that_holds_no_scores_is_refused(result, tmp_path):
    with pytest.raises(InvalidData, match="there are no scores at"):
        sampled(tmp_path / "nothing.zarr")
    sampled(result, 10, output=tmp_path / "sample.zarr")
    with pytest.raises(InvalidData, match="holds a sample"):
        sampled(tmp_path / "sample.zarr")


@pytest.mark.parametrize("random_state", [-1, 0.5, "x"])
def test_random_state__must_be_a_seed(random_state, result):
    with pytest.raises(InvalidParameter, match="random_state must be a non-negative int or None"):
        sampled(result, random_state=random_state)


@pytest.mark.parametrize(
    ("X", "origin"),
    [(rows(), "NumPy array"), (da.from_array(rows(), chunks=(50, 2)), "Dask array of 3 chunks")],
    ids=["NumPy", "Dask"],
)
def test_store__of_rows_in_memory_needs_them_again(X, origin, tmp_path):
    made = scored(X)
    made.store(tmp_path / "scores.zarr", progress=False)
    wanted = rf"made from an array in memory \({origin}\).* Give the rows that were scored with X= \(--points\)"
    with pytest.raises(InvalidData, match=wanted):
        sampled(tmp_path / "scores.zarr")
    check_same(sampled(tmp_path / "scores.zarr", X=X), sampled(made))


@pytest.mark.parametrize("certify", [True, False])
def test_sample__of_scores_that_are_all_zero_is_refused_by_name(certify):
    zero = daskrr.leverage_scores(
        np.zeros((10, 2)), Linear(), 1e-3, 3, sampling="uniform", certify=certify, random_state=0, progress=False
    )
    with pytest.raises(InvalidData, match=r"nothing to sample|zero"):
        sampled(zero, 3)
