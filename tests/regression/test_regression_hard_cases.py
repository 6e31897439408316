"""Models on targets, weights, stores and clusters that are not as one would wish."""

import gc
import json
import shutil
import time

import dask.array as da
import mpmath
import numpy as np
import pandas as pd
import pytest
from distributed import Client, LocalCluster
from extended import kernel_extended
from hypothesis import strategies as st
from sklearn.exceptions import NotFittedError
from strategies import as_zarr, forge
from variants import examples, slow_but

import daskrr
from daskrr import NystromKernelRidge, NystromKernelRidgeCV, NystromTransformer
from daskrr.errors import CheckFailed, InvalidData, RidgeTooSmall, SourceUnreachable
from daskrr.kernels import Gaussian, Linear, Polynomial
from daskrr.numerics.ridge import Sums, fold_errors, middle, solve
from daskrr.nystrom.strategies import Certify
from daskrr.regression import cross_validation

KERNEL, RIDGES = Gaussian(1.0), [1e-5, 1e-4, 1e-3, 1e-2]


def data(n=300, d=2, seed=0):
    generator = np.random.default_rng(seed)
    X = generator.standard_normal((n, d))
    return X, np.sin(X[:, 0]) + generator.standard_normal(n)


def fitted(X, y, w=None, kernel=KERNEL, ridge=1e-3, **options):
    options = {"landmarks": 40, "random_state": 0} | options
    return NystromKernelRidge(kernel, ridge, **options).fit(X, y, w)


def selected(X, y, w=None, kernels=(KERNEL,), ridges=RIDGES, **options):
    options = {"landmarks": 40, "random_state": 0} | options
    return NystromKernelRidgeCV(list(kernels), ridges, **options).fit(X, y, w)


# --- Targets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", slow_but([1e3, 1e6, 1e9, -1e9], -1e9))
def test_offset__of_the_targets_changes_the_intercept_alone(offset):
    X, y = data()
    plain, moved = fitted(X, y, fit_intercept=True), fitted(X, y + offset, fit_intercept=True)
    tolerance = max(1e-9, 1e-15 * abs(offset))
    for name in ("residual_squares_", "target_squares_", "noise_variance_"):
        np.testing.assert_allclose(getattr(moved, name), getattr(plain, name), rtol=100 * tolerance)
    assert moved.intercept_ == pytest.approx(plain.intercept_ + offset, rel=1e-12)
    mean, std = plain.predict(X, return_std=True)
    np.testing.assert_allclose(moved.predict(X) - offset, mean, atol=1e-5)
    np.testing.assert_allclose(moved.predict(X, return_std=True)[1], std, rtol=1e-5)
    for scoring in ("loo", "gcv", "kfold"):
        errors = [
            selected(X, one, scoring=scoring, fit_intercept=True).cv_results_["errors"] for one in (y, y + offset)
        ]
        np.testing.assert_allclose(*errors, rtol=100 * tolerance)
    later = fitted(X[:200], y[:200] + offset, fit_intercept=True).partial_fit(X[200:], y[200:] + offset)
    expected = fitted(X[:200], y[:200], fit_intercept=True).partial_fit(X[200:], y[200:])
    np.testing.assert_allclose(later.residual_squares_, expected.residual_squares_, rtol=100 * tolerance)


def test_residual_squares__are_never_below_what_can_be_told():
    X, y = data()
    model = fitted(X, y + 1e9)
    actual = np.sum((y + 1e9 - model.predict(X)) ** 2)
    assert model.residual_squares_[0] >= 0.5 * min(actual, 1e-12 * np.sum((y + 1e9) ** 2))
    assert model.noise_variance_ > 0


@pytest.mark.parametrize("mask", [1e8, 1e15, 1e200])
def test_targets__of_no_weight_may_be_anything(mask):
    X, y = data(200)
    w, masked = np.where(np.arange(200) < 20, 0.0, 1.0), np.where(np.arange(200) < 20, mask, y)
    options = {"landmarks": None, "sampling": np.arange(20, 200, 5), "fit_intercept": True}
    model, expected = fitted(X, masked, w, **options), fitted(X, y, w, **options)
    np.testing.assert_allclose(model.predict(X, return_std=True), expected.predict(X, return_std=True), rtol=1e-9)
    errors = [selected(X, one, w, scoring="kfold", **options).cv_results_["errors"] for one in (masked, y)]
    np.testing.assert_allclose(*errors, rtol=1e-9)
    found = model.score(da.from_array(X, chunks=(50, 2)), masked, sample_weight=w)
    assert found == pytest.approx(expected.score(X, y, sample_weight=w))


def test_targets__that_cannot_be_squared_are_named():
    X, y = data()
    with pytest.raises(InvalidData, match=r"overflow\. Scale y down"):
        fitted(X, y * 1e200)


def test_selection__names_errors_that_are_not_finite():
    X, y = data(30)
    w = np.ones(30)
    w[3] = 1e20
    with pytest.raises(InvalidData, match=r"error by loo is not finite|has all rows, or all of their weight"):
        selected(X, y, w, fit_intercept=True, landmarks=10, weight_meaning="precision")


def test_folds__that_leave_nothing_are_refused():
    X, y = data(4)
    with pytest.raises(InvalidData, match="has all rows, or all of their weight"):
        selected(X, y, kernels=[KERNEL], landmarks=1, scoring=cross_validation.KFold(2), random_state=2)


def test_folds__are_not_drowned_by_one_that_outweighs_them():
    gram = np.array([1e13, 0.03, 0.0501])[:, None, None]
    features = np.array([[1e13, 2e13], [3.0, 4.0], [5.0, 6.0]])[:, None, :]
    targets = np.array([[[3.0, 3.0], [3.0, 9.0]], [[2.0, 1.0], [1.0, 8.0]], [[2.0, 1.0], [1.0, 9.0]]])
    sums = Sums(gram, features, targets, np.zeros(1), np.zeros(1), height=0)
    errors = fold_errors(sums, [0.01], np.dtype(float), intercept=False)
    theta = 10.0 / (0.0801 + 0.01 * 4.0)
    assert errors[0, 0] == pytest.approx(theta * (theta - 4.0) * 1e13 / 7.0, rel=1e-6)


# --- Rows far from zero -------------------------------------------------------------------------------


def exactly_fitted(X, y, w, kernel, ridge):
    """Weighted squares of the residuals and the smoother's trace in 50 digits: all rows, all columns, an intercept."""
    n = len(X)
    with mpmath.workdps(50):
        roots = [mpmath.sqrt(mpmath.mpf(float(one))) for one in w]
        shift, system = mpmath.fsum(root**2 for root in roots) * mpmath.mpf(ridge), mpmath.zeros(n + 1)
        system[:n, :n] = kernel_extended(X, X, kernel)
        for i, root in enumerate(roots):
            system[i, i] += shift / root**2
            system[i, n] = system[n, i] = 1
        inverse = mpmath.inverse(system)
        dual = inverse * mpmath.matrix([*map(float, y), 0])
        squares = mpmath.fsum((shift * dual[i] / root) ** 2 for i, root in enumerate(roots))
        trace = n - mpmath.fsum(shift * inverse[i, i] / root**2 for i, root in enumerate(roots))
        return float(squares), float(trace)


OFFSET_CASES = ((Linear(), 7.0), (Polynomial(2), 3.0), (Gaussian(1.5), 7.0))


@examples(5, 15, st.integers(0, 10**6), st.sampled_from(OFFSET_CASES), st.booleans())
def test_offset__of_the_rows_leaves_an_intercept_that_is_exact_or_refused(seed, case, weighted):
    (kernel, farthest), n, generator = case, 25, np.random.default_rng(seed)
    offset, ridge = 10 ** generator.uniform(0, farthest), 10 ** generator.uniform(-4, 1)
    X, w = generator.standard_normal((n, 2)) + offset, generator.uniform(0.3, 3.0, n) if weighted else np.ones(n)
    y = np.sin(X[:, 0] - offset) + X[:, 1] - offset + 0.1 * generator.standard_normal(n)
    options = {"landmarks": None, "sampling": np.arange(n), "fit_intercept": True, "weight_meaning": "precision"}
    try:
        model = fitted(X, y, w if weighted else None, kernel, ridge, **options)
    except RidgeTooSmall:
        return
    w = w / w.mean()
    # What the entries of the kernel leave open of the ridge itself, of which at most half may be round-off.
    share = 2.0 * model._facts.kernel_error * np.mean(w * kernel.diagonal(X)) / ridge
    assert share <= 1.0
    own = np.sum(w * (y - model.predict(X)) ** 2)
    assert model.residual_squares_[0] == pytest.approx(own, rel=1e-9 + 0.1 * share)
    squares, trace = exactly_fitted(X, y, w, kernel, ridge)
    # The shift of the landmarks' kernel matrix is 8·p times that.
    assert model.residual_squares_[0] == pytest.approx(squares, rel=1e-9 + 8 * n * share)
    assert model.effective_dimension_ + 1 == pytest.approx(trace, rel=1e-9 + 8 * n * share)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offset", "tolerance"),
    [(1e3, 1e-7), (1e5, 3e-4), (1e6, 2e-2)],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_offset__of_the_rows_changes_nothing_of_a_line(offset, tolerance, weighted, tmp_path):
    generator = np.random.default_rng(0)
    X = generator.standard_normal((1500, 3)) + offset
    near = X - offset
    y = near @ [1.0, 2.0, 3.0] + 0.1 * generator.standard_normal(1500)
    w = generator.uniform(0.2, 3.0, 1500) if weighted else None
    options = {"kernel": Linear(), "ridge": 0.03, "landmarks": 20, "fit_intercept": True}
    far, plain = fitted(X, y, w, **options), fitted(near, y, w, **options)
    assert far.noise_variance_ == pytest.approx(plain.noise_variance_, rel=tolerance)
    assert far.effective_dimension_ == pytest.approx(plain.effective_dimension_, rel=tolerance)
    far.save(tmp_path / "model.zarr")
    later = fitted(X[:500], y[:500], None if w is None else w[:500], **options)
    later.partial_fit(X[500:], y[500:], None if w is None else w[500:])
    for model in (far, later, daskrr.load(tmp_path / "model.zarr")):
        found, expected = model.diagnose(X, y, w), plain.diagnose(near, y, w)
        np.testing.assert_allclose(model.predict(X), plain.predict(near), atol=tolerance)
        np.testing.assert_allclose(found.leverage, expected.leverage, atol=tolerance)
        np.testing.assert_allclose(found.studentized, expected.studentized, atol=10 * tolerance)
        # The part that no landmark explains is less than nothing but for round-off, and never forgotten.
        std, least = model.predict(X, return_std=True)[1], plain.predict(near, return_std=True)[1]
        assert (std >= least * (1 - tolerance)).all()
    # Which rows are landmarks, and left out of the error that is judged by, depends on the offset.
    for scoring, judged in (("loo", "errors_all_rows"), ("gcv", "errors"), ("kfold", "errors")):
        errors = [
            selected(rows, y, w, [Linear()], [0.03, 0.1, 1.0], landmarks=20, scoring=scoring, fit_intercept=True)
            for rows in (X, near)
        ]
        np.testing.assert_allclose(*(one.cv_results_[judged] for one in errors), rtol=tolerance)


def test_solve__judges_a_centred_sum_by_what_was_summed():
    mean, n = np.array([1e6, 0.0]), 1000.0
    sums = Sums(
        gram=n * (np.outer(mean, mean) + np.eye(2)), features=n * np.column_stack([mean, [0.0, 1.0]]),
        targets=n * np.eye(2), origin=np.zeros(1), row_origin=np.zeros(2), height=1,
    )  # fmt: skip
    with pytest.raises(RidgeTooSmall, match="round-off may change scores"):
        solve(sums, [1e-3], np.dtype(float), intercept=True)
    assert solve(sums, [1e-2], np.dtype(float), intercept=True).theta.shape == (1, 2, 1)


def test_middle__is_amid_the_landmarks_whatever_the_outliers():
    generator = np.random.default_rng(0)
    X = generator.standard_normal((50, 3)) + 100.0
    X[:10] *= 1e5
    column = middle(X @ X.T, np.ones(50))
    # All columns of the linear kernel are X·x for some x.
    assert np.linalg.norm(np.linalg.lstsq(X, column)[0] - 100.0) < 10.0
    np.testing.assert_array_equal(middle(np.zeros((3, 3)), np.zeros(3)), 0.0)


# --- Weights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scoring", ["loo", "gcv", "kfold"])
def test_rows__of_weight_zero_count_for_nothing(scoring):
    X, y = data(100)
    w = np.where(np.arange(100) < 50, 1.0, 0.0)
    landmarks = np.arange(0, 50, 3)
    options = {"landmarks": None, "sampling": landmarks, "fit_intercept": True}
    model, kept = fitted(X, y, w, **options), fitted(X[:50], y[:50], **options)
    np.testing.assert_allclose(model.predict(X, return_std=True), kept.predict(X, return_std=True), rtol=1e-8)
    found, expected = model.diagnose(X, y, w), kept.diagnose(X[:50], y[:50])
    np.testing.assert_allclose(found.cooks_distance[:50], expected.cooks_distance, rtol=1e-7, atol=1e-15)
    if scoring != "kfold":
        errors = [
            selected(*rows, scoring=scoring, **options).cv_results_["errors"] for rows in ((X, y, w), (X[:50], y[:50]))
        ]
        np.testing.assert_allclose(*errors, rtol=1e-7)


@pytest.mark.parametrize("kernel", [KERNEL, Linear()], ids=repr)
def test_landmarks__of_no_weight_leave_the_intercept(kernel):
    X, y = data(60)
    w = np.where(np.arange(60) < 2, 0.0, 1.0)
    model = fitted(X, y, w, kernel, landmarks=None, sampling=[0, 1], fit_intercept=True, certify=False)
    mean, std = model.predict(X, return_std=True)
    np.testing.assert_allclose(mean, y[2:].mean(), rtol=1e-12)
    assert np.isfinite(std).all()
    assert np.isfinite(model.diagnose(X, y, w).cooks_distance).all()
    assert selected(X, y, w, [kernel], landmarks=None, sampling=[0, 1], certify=False).score(X, y) == pytest.approx(
        0.0, abs=0.1
    )


# --- Ridges -------------------------------------------------------------------------------------------


def test_selection__goes_on_without_a_kernel_that_round_off_decides(caplog):
    X, y = data(100)
    model = selected(1000 * X, y, kernels=[Linear(), Gaussian(1000.0)], ridges=np.logspace(-8, 0, 9), dtype="float32")
    assert model.kernel_ == Gaussian(1000.0)
    assert np.isnan(model.cv_results_["errors"][0]).all()
    assert "Linear(): ridges below" in caplog.text
    model = selected(1e6 * X, y, kernels=[Linear(), Gaussian(1e6)], sampling="leverage", ridges=RIDGES)
    assert "Linear() is left out" in caplog.text
    model = selected(X, y, ridges=[1e-25, 1e-20, 1e-2])
    assert model.ridge_ == 1e-2
    json.dumps(model.summary(), allow_nan=False)


def test_selection__notices_rows_that_change_between_the_passes(tmp_path, monkeypatch):
    X, y = data(200)
    store = as_zarr(X, (50, 2), str(tmp_path / "X"))
    look = cross_validation.left_out_errors

    def meddled(*arguments):
        store[:50] = 100.0
        return look(*arguments)

    monkeypatch.setattr(cross_validation, "left_out_errors", meddled)
    with pytest.raises(CheckFailed, match="the rows changed between the passes"):
        selected(store, y)


# --- Scores -------------------------------------------------------------------------------------------


def test_score__out_of_core_is_that_in_memory_on_odd_input():
    X, y = data(60)
    model, lazy = fitted(X, y, fit_intercept=True), da.from_array(X, chunks=(20, 2))
    for odd in (np.full(60, 3.0), y + 1e8):
        with np.errstate(all="ignore"):
            expected = model.score(X, odd)
        assert model.score(lazy, da.from_array(odd, chunks=13)) == pytest.approx(expected, rel=1e-5)
    constant = fitted(X, np.full(60, 3.0), fit_intercept=True)
    assert constant.score(lazy, da.from_array(np.full(60, 3.0), chunks=13)) == 1.0
    assert model.score(lazy, y, sample_weight=2.0) == pytest.approx(model.score(X, y))
    with pytest.raises(InvalidData, match=r"fitted to 1 target\(s\), and y has shape \(60, 3\)"):
        model.score(lazy, da.ones((60, 3)))
    with pytest.raises(InvalidData, match="of y hold NaN"):
        model.score(lazy, np.where(np.arange(60) == 5, np.nan, y))
    with pytest.raises(InvalidData, match="X has 60 rows and sample_weight has 59"):
        model.score(lazy, y, sample_weight=np.ones(59))
    with pytest.raises(InvalidData, match="call its compute_chunk_sizes"):
        model.score(lazy, da.from_array(y, chunks=10)[da.from_array(y, chunks=10) > -1e9])


# --- State --------------------------------------------------------------------------------------------


def test_fit__that_fails_changes_nothing():
    X, y = data(60, 3)
    model = fitted(X, y)
    expected = model.predict(X)
    with pytest.raises(RidgeTooSmall, match="smallest ridge"):
        model.set_params(ridge=1e-25).fit(X[:, :2], y)
    np.testing.assert_array_equal(model.predict(X), expected)
    with pytest.raises(InvalidData, match="hold NaN"):
        model.partial_fit(da.from_array(X, chunks=(20, 3)), da.from_array(np.where(np.arange(60) == 59, np.nan, y)))
    np.testing.assert_array_equal(model.predict(X), expected)
    features = NystromTransformer(KERNEL, 10, random_state=0).fit(X)
    with pytest.raises(ValueError, match="NaN"):
        features.fit(np.full((5, 2), np.nan))
    assert features.transform(X).shape == (60, 10)
    fresh = NystromKernelRidge(KERNEL, 1e-3, 10)
    fresh.check(X, y)
    assert not hasattr(fresh, "n_features_in_")


def test_parameters__set_after_a_fit_do_not_change_it(tmp_path):
    X, y = data(60)
    model = fitted(X, y + 5.0)
    expected = model.predict(X, return_std=True)
    model.set_params(fit_intercept=True, dtype="float32", ridge=1.0)
    np.testing.assert_array_equal(model.predict(X, return_std=True), expected)
    model.save(tmp_path / "model.zarr")
    np.testing.assert_array_equal(daskrr.load(tmp_path / "model.zarr").predict(X, return_std=True), expected)


def test_feature_names__are_those_of_the_last_fit(tmp_path):
    X, y = data(60)
    frame = pd.DataFrame(X, columns=["a", "b"])
    model = fitted(frame, da.from_array(y, chunks=20))
    assert list(model.feature_names_in_) == ["a", "b"]
    model.save(tmp_path / "model.zarr")
    np.testing.assert_array_equal(daskrr.load(tmp_path / "model.zarr").predict(frame), model.predict(frame))
    model.fit(da.from_array(X), y)
    assert not hasattr(model, "feature_names_in_")
    model.predict(X)


def test_unfitted__models_say_so(tmp_path):
    for model in (NystromKernelRidge(), NystromKernelRidgeCV()):
        for use in (lambda m: m.save(tmp_path / "m.zarr"), lambda m: m.summary(), lambda m: m.dual_coef_):
            with pytest.raises(NotFittedError, match="not fitted yet"):
                use(model)
    with pytest.raises(NotFittedError, match="not fitted yet"):
        NystromTransformer().landmarks_  # noqa: B018


def test_seeds__of_numpy_can_be_saved(tmp_path):
    X, y = data(60)
    fitted(X, y, random_state=np.int64(3)).save(tmp_path / "model.zarr")
    assert daskrr.load(tmp_path / "model.zarr").random_state == 3


def test_load__keeps_how_certain_a_model_shall_be(tmp_path):
    X, y = data(100)
    model = fitted(X[:60], y[:60], certify=Certify(failure_probability=0))
    model.save(tmp_path / "model.zarr")
    loaded = daskrr.load(tmp_path / "model.zarr").partial_fit(X[60:], y[60:])
    assert loaded.risk_inflation_ == model.partial_fit(X[60:], y[60:]).risk_inflation_
    assert loaded.risk_inflation_.failure_probability == 0


def test_partial_fit__with_other_weights_has_the_figures_of_one_fit():
    X, y = data(100)
    w = np.where(np.arange(100) < 60, 1.0, 9.0)
    options = {"landmarks": None, "sampling": np.arange(0, 60, 3)}
    model, whole = (
        fitted(X[:60], y[:60], w[:60], **options).partial_fit(X[60:], y[60:], w[60:]),
        fitted(X, y, w, **options),
    )
    for name in ("residual_squares_", "target_squares_", "noise_variance_"):
        np.testing.assert_allclose(getattr(model, name), getattr(whole, name), rtol=1e-9)
    np.testing.assert_allclose(model.predict(X, return_std=True), whole.predict(X, return_std=True), rtol=1e-8)
    one, other = (each.diagnose(X, y, w) for each in (model, whole))
    np.testing.assert_allclose(one.cooks_distance, other.cooks_distance, rtol=1e-7)


def test_diagnose__refuses_rows_that_were_not_fitted():
    X, y = data(60)
    model = fitted(X, y, kernel=Linear(), ridge=1e-6, landmarks=3)
    with pytest.raises(InvalidData, match="give the rows and weights that the model was fitted to"):
        model.diagnose(1e3 * X, y)


def test_kernels__may_be_any_sequence():
    X, y = data(60)
    kernels = np.empty(2, object)
    kernels[:] = [Gaussian(1.0), Gaussian(2.0)]
    for sequence in (kernels, (Gaussian(1.0), {"kernel": "gaussian", "length_scale": 2.0})):
        model = NystromKernelRidgeCV(sequence, RIDGES, 20, random_state=0).fit(X, y)
        assert len(model.cv_results_["kernels"]) == 2


def test_selection__of_tiny_targets_in_float32_is_that_of_ordinary_ones():
    X, y = data(100)
    ordinary, tiny = (selected(X, one, dtype="float32", ridges=[1e-3, 1e-2]) for one in (y, 1e-40 * y))
    expected = ordinary.cv_results_["errors"] * 1e-80
    np.testing.assert_allclose(tiny.cv_results_["errors"], expected, rtol=1e-3)


# --- Stores -------------------------------------------------------------------------------------------


def _missing_chunk(folder):
    shutil.rmtree(folder / "inverse" / "c")


def _missing_array(folder):
    shutil.rmtree((folder / "gram").resolve())


def _flipped_bit(folder):
    chunk = next(path for path in (folder / "theta" / "c").rglob("*") if path.is_file())
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 1
    chunk.write_bytes(bytes(content))


def _other_shape(folder):
    def swap(manifest):
        metadata = manifest["metadata"]
        metadata["features/zarr.json"] = metadata["targets/zarr.json"]

    forge(folder, swap)


def _missing_attribute(folder):
    forge(folder, lambda manifest: manifest["summary"].pop("ridge"))


@pytest.mark.parametrize("damage", [_missing_attribute, _missing_chunk, _missing_array, _flipped_bit, _other_shape])
def test_load__refuses_a_damaged_model(damage, tmp_path):
    X, y = data(60)
    fitted(X, y).save(tmp_path / "model.zarr")
    daskrr.load(tmp_path / "model.zarr")
    damage(tmp_path / "model.zarr")
    with pytest.raises(InvalidData, match="the model is damaged"):
        daskrr.load(tmp_path / "model.zarr")


# --- Clusters -----------------------------------------------------------------------------------------


def runs_of(client):
    return client.run_on_scheduler(lambda dask_scheduler: sorted(dask_scheduler.plugins["daskrr"].runs))


@pytest.mark.slow
def test_factors__are_freed_with_their_model(client, tmp_path):
    X, y = data(200)
    before = set()
    if "daskrr" in client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.plugins)):
        before = set(runs_of(client))
    model = selected(as_zarr(X, (50, 2), str(tmp_path / "X")), y, kernels=[Gaussian(0.5), Gaussian(1.0)])
    model.partial_fit(X[:50], y[:50])
    assert len(set(runs_of(client)) - before) == 1
    del model
    gc.collect()
    deadline = time.monotonic() + 60
    while set(runs_of(client)) - before:
        assert time.monotonic() < deadline


def test_models__of_a_cluster_that_is_gone_say_so(tmp_path):
    X, y = data(100)
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None) as own,
        Client(own),
    ):
        model = fitted(X, y)
        lazy = model.predict(da.from_array(X, chunks=(50, 2)))
    uses = (
        lambda: model.predict(X),
        lambda: model.predict(X, return_std=True),
        lambda: model.diagnose(X, y),
        lambda: model.partial_fit(X, y),
        lambda: model.score(X, y),
        lambda: model.save(tmp_path / "model.zarr"),
        lambda: model.predict_to_zarr(X, tmp_path / "out.zarr"),
        lambda: model.landmarks_,
        lazy.compute,
    )
    for use in uses:
        with pytest.raises(SourceUnreachable, match="are gone with the scheduler that held them"):
            use()
