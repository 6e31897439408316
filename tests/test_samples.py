"""Weighted samples of rows: their probabilities, where they come from, and what is refused."""

import dask.array as da
import numpy as np
import pytest
import zarr
from strategies import as_zarr

import daskrr
from daskrr.errors import InvalidData, InvalidParameter, OutputExists
from daskrr.kernels import Gaussian, Linear

KERNEL = Gaussian(1.0)


def rows(n=120, d=2, seed=0):
    X = np.random.default_rng(seed).standard_normal((n, d))
    X[::10] *= 6
    return X


def scored(X, ridge=1e-2, n_landmarks=25, **options):
    options = {"random_state": 0, "progress": False, "certify": True, "block_rows": 50} | options
    return daskrr.leverage_scores(X, KERNEL, ridge, n_landmarks, **options)


def sampled(result, size=80, **options):
    return daskrr.sample_rows(result, size, **{"random_state": 0, "progress": False} | options)


@pytest.fixture(scope="module")
def result():
    return scored(rows())


# --- Probabilities ------------------------------------------------------------------------------------


def test_probabilities__are_in_proportion_to_the_upper_ends(result):
    sample, upper = sampled(result), result.upper.compute()
    assert sample.by == "upper"
    np.testing.assert_allclose(sample.probabilities, (upper / upper.sum())[sample.indices], rtol=1e-12)
    np.testing.assert_array_equal(sample.weights, 1 / np.sqrt(80 * sample.probabilities))
    np.testing.assert_array_equal(sample.points, rows()[sample.indices])
    assert len(sample) == len(sample.indices) == 80
    assert np.all(np.diff(sample.indices) >= 0)


def test_probabilities__of_all_rows_sum_to_one(result):
    sample, upper = sampled(result, 5000), result.upper.compute()
    indices, first = np.unique(sample.indices, return_index=True)
    assert len(indices) == 120
    assert sample.probabilities[first].sum() == pytest.approx(1, rel=1e-12)
    counts = np.bincount(sample.indices, minlength=120)
    expected = 5000 * upper / upper.sum()
    assert np.sum((counts - expected) ** 2 / expected) < 119 + 6 * np.sqrt(2 * 119)


@pytest.mark.parametrize("n_landmarks", [4, 25])
def test_probabilities__without_certificate_are_half_uniform(n_landmarks):
    plain = scored(rows(), n_landmarks=n_landmarks, certify=False)
    sample, estimate = sampled(plain), plain.estimate.compute()
    assert sample.by == "estimate"
    expected = 0.5 * estimate / estimate.sum() + 0.5 / 120
    np.testing.assert_allclose(sample.probabilities, expected[sample.indices], rtol=1e-9)


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
        expected = upper[:, column] / upper[:, column].sum()
        np.testing.assert_allclose(sample.probabilities, expected[sample.indices], rtol=1e-12)
    with pytest.raises(InvalidParameter, match=r"ridge=0\.5 is none of those that were scored: 0\.1, 0\.001"):
        sampled(several, ridge=0.5)


def test_weights__make_sums_right_on_average(result):
    X, n = rows(), 120
    f = np.stack([np.ones(n), X[:, 0], X[:, 0] ** 2, np.arange(n) % 7, result.upper.compute()], axis=1)
    sums = np.array(
        [
            (sample.weights[:, None] ** 2 * f[sample.indices]).sum(axis=0)
            for sample in (sampled(result, 30, random_state=seed) for seed in range(80))
        ]
    )
    error = sums.std(axis=0) / np.sqrt(80)
    assert np.all(np.abs(sums.mean(axis=0) - f.sum(axis=0)) <= 5 * error + 1e-9 * np.abs(f).sum(axis=0))
    # What the rows were drawn by has no variance at all.
    np.testing.assert_allclose(sums[:, -1], f[:, -1].sum(), rtol=1e-9)


# --- What it depends on -------------------------------------------------------------------------------


def check_same(one, other):
    np.testing.assert_array_equal(one.indices, other.indices)
    np.testing.assert_array_equal(one.probabilities, other.probabilities)
    np.testing.assert_array_equal(one.points, other.points)
    assert (one.by, one.random_state) == (other.by, other.random_state)


@pytest.mark.parametrize("certify", [True, False])
@pytest.mark.parametrize("ridge", [1e-2, [1e-2, 1e-3]], ids=["one ridge", "two ridges"])
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
    drawn = daskrr.sample_rows(result, 20, progress=False)
    check_same(sampled(result, 20, random_state=drawn.random_state), drawn)


def test_sample__is_not_the_landmarks(result):
    """Its random numbers are its own."""
    chosen = scored(rows(), sampling="uniform", n_landmarks=25).sketch.landmarks.indices
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
    with pytest.raises(OutputExists, match="is not a result of daskrr"):
        sampled(result, 10, output=tmp_path / "other", overwrite=True)


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
