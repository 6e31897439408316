"""Scores of weighted rows: a weight m counts a row as m repeats of it would, in all that is told of it."""

import dask.array as da
import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from hypothesis import strategies as st
from strategies import as_zarr
from variants import examples

import daskrr
from daskrr import exact
from daskrr.apps.cli import main
from daskrr.errors import InvalidData
from daskrr.kernels import Gaussian, Laplacian, Linear, Matern, Polynomial
from daskrr.nystrom.strategies import Certify

KERNELS = [Gaussian(1.0), Laplacian(0.7), Matern(1.0, nu=2.5), Linear(), Polynomial(2), Gaussian(0.5) + Linear()]


def rows(n, d, seed):
    return np.random.default_rng(seed).standard_normal((n, d))


@examples(
    12,
    40,
    st.sampled_from(KERNELS),
    st.integers(2, 40),
    st.integers(1, 3),
    st.integers(0, 10**6),
    st.sampled_from(["float64", "float32"]),
    st.sampled_from([[1e-3], [1e-1], [1e-3, 1e-1]]),
    st.sampled_from(["residual", "leverage", "diagonal", "uniform"]),
)
def test_leverage_scores__of_weighted_rows_hold_the_scores_of_repeats(kernel, n, d, seed, dtype, ridges, sampling):
    X = rows(n, d, seed)
    counts = np.random.default_rng(seed).integers(1, 9, n)
    found = daskrr.leverage_scores(
        X,
        kernel,
        ridges,
        max(1, n // 2),
        sampling=sampling,
        sample_weight=counts,
        dtype=dtype,
        certify=Certify(failure_probability=0),
        random_state=0,
    )
    repeated = np.repeat(X, counts, axis=0)
    first = np.concatenate([[0], np.cumsum(counts)[:-1]])
    lower, upper, scores, estimate = (
        np.asarray(getattr(found, name)) for name in ("lower", "upper", "scores", "estimate")
    )
    assert ((lower <= estimate) & (estimate <= upper)).all()
    for column, ridge in enumerate(ridges):
        truth = exact.leverage_scores(repeated, kernel, ridge)[first]
        assert (lower[:, column] <= truth * (1 + 1e-9)).all()
        assert (truth <= upper[:, column] * (1 + 1e-9)).all()
        assert counts @ scores[:, column] == pytest.approx(found.sketch_dimension[column], rel=1e-3)
        low, high = found.certificate.effective_dimension[column]
        assert low <= truth @ counts * (1 + 1e-9)
        assert truth @ counts <= high * (1 + 1e-9)
        low, high = found.certificate.max_degrees_of_freedom[column]
        assert low <= counts.sum() * truth.max() * (1 + 1e-9)
        assert counts.sum() * truth.max() <= high * (1 + 1e-9)


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_leverage_scores__of_weights_are_those_of_repeats_with_the_same_landmarks(kernel):
    X, counts = rows(60, 2, 0), np.random.default_rng(1).integers(1, 6, 60)
    first = np.concatenate([[0], np.cumsum(counts)[:-1]])
    chosen = np.arange(0, 60, 3)
    options = {"certify": Certify(failure_probability=0), "random_state": 0}
    weighted = daskrr.leverage_scores(X, kernel, 1e-2, sampling=chosen, sample_weight=counts, **options)
    repeated = daskrr.leverage_scores(np.repeat(X, counts, axis=0), kernel, 1e-2, sampling=first[chosen], **options)
    for name in ("scores", "residual"):
        ours, theirs = (np.asarray(getattr(one, name)) for one in (weighted, repeated))
        np.testing.assert_allclose(ours, theirs[first], rtol=1e-6, atol=1e-9)
    new = rows(7, 2, 5)
    for name in ("scores", "leverage_function", "residual"):
        ours, theirs = (np.asarray(getattr(one.sketch, name)(new)) for one in (weighted, repeated))
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-9)


def test_leverage_scores__do_not_mind_the_unit_of_weights_of_mean_one_up_to_the_ridge():
    X, weights = rows(80, 2, 0), np.random.default_rng(1).uniform(0.2, 3, 80)
    chosen = np.arange(0, 80, 4)
    one, other = (
        daskrr.leverage_scores(X, Gaussian(1.0), 1e-2, sampling=chosen, sample_weight=unit * weights).scores.compute()
        for unit in (1.0, 7.0)
    )
    np.testing.assert_allclose(one, 7.0 * other, rtol=1e-9)


@pytest.mark.parametrize("wrap", [np.asarray, lambda w: da.from_array(w, 17), lambda w: as_zarr(w, (13,))])
def test_leverage_scores__read_weights_from_anywhere(wrap):
    X, weights = rows(60, 2, 0), np.random.default_rng(1).uniform(0.5, 3, 60)
    options = {"sampling": np.arange(20), "random_state": 0, "certify": True}
    given, plain = (
        daskrr.leverage_scores(X, Gaussian(1.0), 1e-2, sample_weight=one, **options) for one in (wrap(weights), weights)
    )
    for name in ("scores", "upper", "residual"):
        assert (np.asarray(getattr(given, name)) == np.asarray(getattr(plain, name))).all()


def test_leverage_scores__of_weights_that_are_equal_are_those_without():
    X = rows(60, 2, 0)
    plain, equal = (
        daskrr.leverage_scores(X, Gaussian(1.0), 1e-2, sampling=np.arange(20), sample_weight=one).scores.compute()
        for one in (None, 1.0)
    )
    np.testing.assert_allclose(plain, equal, rtol=1e-12)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.r_[np.ones(59), 0.0], "1 of 60 sample weights are 0"),
        (np.r_[np.ones(59), -1.0], "sample weight"),
        (np.r_[np.ones(59), np.nan], "sample weight"),
        (np.ones(59), "X has 60 rows and sample_weight has 59"),
        (np.ones((60, 1)), "sample_weight must have 1 dimension"),
    ],
)
def test_leverage_scores__refuse_weights_that_are_none(weights, message):
    with pytest.raises(InvalidData, match=message):
        daskrr.leverage_scores(rows(60, 2, 0), Gaussian(1.0), 1e-2, 10, sample_weight=weights)


def test_plan__does_not_count_a_weight_as_a_feature():
    assert daskrr.plan(rows(60, 2, 0), Gaussian(1.0), 1e-2, 20, sample_weight=np.ones(60)).n_features == 2


def test_score_to_zarr__keeps_weights_with_the_job_and_its_sketch(tmp_path):
    X, weights = rows(60, 2, 0), np.random.default_rng(1).integers(1, 5, 60)
    options = {"landmarks": 20, "random_state": 0, "certify": True}
    summary = daskrr.score_to_zarr(
        X, tmp_path / "out.zarr", Gaussian(1.0), 1e-2, sample_weight=weights, **options
    )  # fmt: skip
    lazy = daskrr.leverage_scores(X, Gaussian(1.0), 1e-2, sample_weight=weights, **options)
    stored = daskrr.open_scores(tmp_path / "out.zarr")
    assert (stored["scores"][:] == lazy.scores.compute()).all()
    np.testing.assert_allclose(stored["residual"][:], lazy.residual.compute(), rtol=1e-12)
    assert summary["n_features"] == 2
    assert summary["sum_of_scores"] == pytest.approx(weights @ stored["scores"][:])
    assert summary["parameters"]["kernel"] == Gaussian(1.0).to_spec()
    again = daskrr.score_to_zarr(X, tmp_path / "out.zarr", Gaussian(1.0), 1e-2, sample_weight=weights, **options)
    assert again["versions"] == summary["versions"]
    with pytest.raises(daskrr.errors.OutputExists, match="differ in input, sample_weight"):
        daskrr.score_to_zarr(X, tmp_path / "out.zarr", Gaussian(1.0), 1e-2, sample_weight=weights + 1, **options)
    with pytest.raises(InvalidData, match="scores of weighted rows"):
        daskrr.update_scores(X, tmp_path / "out.zarr")
    with pytest.raises(InvalidData, match="does not hold the weights"):
        daskrr.jobs.sample_rows(tmp_path / "out.zarr", size=5, X=X)
    new = rows(5, 2, 9)
    assert (daskrr.load(tmp_path / "out.zarr").upper(new).compute() == lazy.sketch.upper(new).compute()).all()


@pytest.mark.slow
def test_command__takes_weights(tmp_path):
    X, weights = rows(60, 2, 0), np.random.default_rng(1).integers(1, 5, 60).astype(float)
    as_zarr(X, (20, 2), str(tmp_path / "x.zarr"))
    as_zarr(weights, (60,), str(tmp_path / "w.zarr"))
    points, weights_path, output = (str(tmp_path / name) for name in ("x.zarr", "w.zarr", "out.zarr"))
    model = ["--kernel", "gaussian", "--length-scale", "1", "--ridge", "1e-2", "--landmarks", "20", "--seed", "0"]
    line = ["score", points, output, *model, "--weights", weights_path, "--quiet", "--workers", "1"]
    result = CliRunner().invoke(main, line, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    expected = daskrr.leverage_scores(
        tmp_path / "x.zarr", Gaussian(1.0), 1e-2, 20, sample_weight=weights, random_state=0
    ).scores.compute()  # fmt: skip
    assert (zarr.open_array(tmp_path / "out.zarr" / "scores")[:] == expected).all()


def test_sample_rows__of_weighted_rows_draws_by_their_whole_weight():
    X = np.zeros((2, 1))
    found = daskrr.leverage_scores(X, Gaussian(1.0), 1e-2, 1, sample_weight=[1.0, 99.0], certify=True, random_state=0)
    sample = daskrr.jobs.sample_rows(found, size=400, random_state=0)
    assert np.count_nonzero(sample.indices == 1) > 350
    assert (sample.points == X[sample.indices]).all()
