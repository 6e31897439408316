"""Length scales that regressions learn: which they are, from which rows, and who refuses them."""

import dask.array as da
import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from strategies import as_zarr

import daskrr
from daskrr import NystromKernelRidge, NystromKernelRidgeClassifier, NystromKernelRidgeCV, NystromTransformer
from daskrr.apps.cli import main
from daskrr.errors import InvalidData, InvalidParameter
from daskrr.kernels import Gaussian, Linear, Matern
from daskrr.numerics.evidence import learn_scales
from daskrr.regression import learning

LEARN = Gaussian("learn")


def data(n=200, d=6, seed=0):
    """Rows of which two features matter."""
    generator = np.random.default_rng(seed)
    X = generator.standard_normal((n, d))
    return X, np.sin(2 * X[:, 0]) + np.cos(X[:, 1]) + 0.1 * generator.standard_normal(n), generator.uniform(0.5, 2.0, n)


def fitted(X, y, w=None, kernel=LEARN, **options):
    return NystromKernelRidge(kernel, 1e-4, 60, random_state=0, **options).fit(X, y, w)


@pytest.mark.parametrize("weighted", [False, True])
def test_fit__learns_from_all_rows_where_they_are_few(weighted):
    X, y, w = data()
    w = w if weighted else None
    model = fitted(X, y, w)
    np.testing.assert_allclose(model.kernel_.length_scale, learn_scales(LEARN, X, y[:, None], w).scales, rtol=1e-2)
    assert max(model.kernel_.length_scale[:2]) < min(model.kernel_.length_scale[2:]) / 3
    assert model.kernel == LEARN


def test_fit__predicts_better_than_with_one_length_scale():
    X, y, _ = data(400)
    learned, measured = (fitted(X[:300], y[:300], kernel=Gaussian(scale)) for scale in ("learn", "median"))
    assert 1 - learned.score(X[300:], y[300:]) < 0.5 * (1 - measured.score(X[300:], y[300:]))


def test_fit__learns_from_a_sample_that_the_seed_decides(monkeypatch, tmp_path):
    monkeypatch.setattr(learning, "LEARNING_SAMPLE", 90)
    X, y, w = data()
    model = fitted(X, y, w)
    assert model.kernel_ == fitted(X, y, w).kernel_
    assert model.kernel_ != fitted(X, y, w, kernel=Matern("learn")).kernel_
    other = NystromKernelRidge(LEARN, 1e-4, 60, random_state=1).fit(X, y, w)
    assert other.kernel_ != model.kernel_
    lazy = fitted(da.from_array(X, chunks=(70, 6)), da.from_array(y, chunks=33), da.from_array(w, chunks=50))
    stored = [as_zarr(one, (30, *one.shape[1:]), str(tmp_path / name)) for name, one in (("X", X), ("y", y), ("w", w))]
    for one in (lazy, fitted(*stored), fitted(X, y[:, None], w)):
        np.testing.assert_allclose(one.kernel_.length_scale, model.kernel_.length_scale, rtol=1e-6)


def test_fit__records_what_was_learned(tmp_path):
    X, y, _ = data()
    model = fitted(X, y)
    model.save(tmp_path / "model.zarr")
    loaded = daskrr.load(tmp_path / "model.zarr")
    assert (loaded.kernel, loaded.kernel_) == (LEARN, model.kernel_)
    assert model.summary()["kernel"]["length_scale"] == list(model.kernel_.length_scale)
    more = model.partial_fit(X[:50], y[:50])
    assert more.kernel_ == loaded.kernel_


def test_select__judges_learned_kernels_beside_others():
    X, y, _ = data()
    kernels = [Gaussian(2.0), LEARN, {"kernel": "matern", "length_scale": "learn"}]
    model = NystromKernelRidgeCV(kernels, np.logspace(-6, -1, 6), 60, random_state=0).fit(X, y)
    found = model.cv_results_["kernels"]
    assert [type(one.length_scale) for one in found] == [float, tuple, tuple]
    assert model.kernel_ in found[1:]


def test_classifier__learns_from_its_targets():
    X, y, _ = data(300)
    found = NystromKernelRidgeClassifier(LEARN, 1e-3, 60, random_state=0).fit(X, np.where(y > 1, "high", "low")).kernel_
    assert max(found.length_scale[:2]) < min(found.length_scale[2:])


@pytest.mark.parametrize(
    "ask",
    [
        lambda X: daskrr.leverage_scores(X, LEARN, 1e-3, 20),
        lambda X: daskrr.plan(X, {"kernel": "gaussian", "length_scale": "learn"}, 1e-3, 20),
        lambda X: daskrr.score_to_zarr(X, "nowhere.zarr", LEARN, 1e-3, 20),
        lambda X: NystromTransformer(LEARN, 20).fit(X),
        lambda X: daskrr.leverage_scores(X, LEARN, 1e-3, 20, sample_weight=np.ones(len(X))),
    ],
)
def test_learn__is_refused_where_there_are_no_targets(ask):
    with pytest.raises(InvalidParameter, match="learns from targets, and there are none here"):
        ask(data(50)[0])


def test_fit__names_the_target_that_is_none():
    X, y, _ = data()
    y[17] = np.nan
    with pytest.raises(InvalidData, match=r"rows 17–17 of y hold NaN or infinity in 1 rows: 17"):
        fitted(X, da.from_array(y, chunks=50))


def test_learn__is_refused_inside_other_kernels():
    X, y, _ = data(50)
    for model in (NystromKernelRidge(LEARN + Linear()), NystromKernelRidgeCV([2.0 * LEARN])):
        for call in (model.check, model.fit):
            with pytest.raises(InvalidParameter, match="is for a kernel by itself, not inside"):
                call(X, y)
    with pytest.raises(InvalidParameter, match="is to be learned from targets, and a sample of rows has none"):
        LEARN.resolve(X)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["fit", "select"])
def test_commands__learn(command, tmp_path):
    X, y, _ = data()
    paths = [str(tmp_path / name) for name in ("X", "y", "model.zarr")]
    as_zarr(X, (100, 6), paths[0])
    as_zarr(y, (100,), paths[1])
    options = {
        "fit": ["--kernel", "gaussian", "--length-scale", "learn", "--ridge", "1e-4"],
        "select": ["--kernel", "gaussian", "--length-scales", "learn", "--ridges", "1e-4"],
    }
    more = ["--landmarks", "60", "--seed", "0", "--workers", "1", "--quiet"]
    found = CliRunner().invoke(main, [command, *paths, *options[command], *more])
    assert found.exit_code == 0, found.output
    np.testing.assert_allclose(
        daskrr.load(paths[2]).kernel_.length_scale, fitted(zarr.open_array(paths[0]), y).kernel_.length_scale, rtol=1e-4
    )
