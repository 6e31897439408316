"""Kernel ridge regression against dense solutions, scikit-learn, and itself on other sources."""

import dask.array as da
import numpy as np
import pytest
from sklearn.base import clone
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from strategies import as_zarr, forge
from variants import slow_but

import daskrr
from daskrr import NystromKernelRidge
from daskrr.errors import InvalidData, OutputExists, RidgeTooSmall, SourceUnreachable
from daskrr.kernels import Gaussian, Laplacian, Linear, Matern, Polynomial
from daskrr.kernels.weighted import Weighted
from daskrr.numerics.ridge import Sums, solve
from daskrr.nystrom.sampling import BY_NAME, Probabilities, Uniform
from daskrr.nystrom.strategies import Certify, Tolerance
from daskrr.regression.cross_validation import KFold
from daskrr.regression.loading import load_model as load

KERNEL, RIDGE = Matern(1.5, 1.5), 1e-3


def rows(n=80, d=3, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d))


def targets(X, t=None, seed=0):
    noise = 0.1 * np.random.default_rng(seed).standard_normal((len(X), t or 1))
    found = np.sin(X[:, :1] * np.arange(1, (t or 1) + 1)) + 3.0 + noise
    return found if t else found[:, 0]


def weights(n, seed=1):
    return np.random.default_rng(seed).uniform(0.1, 3.0, n)


def fitted(X, y, kernel=KERNEL, ridge=RIDGE, landmarks=30, sample_weight=None, **options):
    options = {"random_state": 0} | options
    return NystromKernelRidge(kernel, ridge, landmarks, **options).fit(X, y, sample_weight)


def everything(X, y, **options):
    return fitted(X, y, landmarks=None, sampling=np.arange(len(X)), **options)


def dense(X, y, new, kernel, ridge, intercept, w):
    """Weighted kernel ridge regression from its normal equations."""
    K, n, mu = kernel(X, X), len(X), ridge * w.sum()
    if not intercept:
        return kernel(new, X) @ np.linalg.solve(K + mu * np.diag(1 / w), y)
    centre = np.eye(n) - np.outer(np.ones(n), w / w.sum())
    alpha = np.linalg.solve(centre @ K + mu * np.diag(1 / w), centre @ y)
    f = K @ alpha
    return kernel(new, X) @ alpha + (w @ (y - f)) / w.sum()


# --- Identities ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kernel", [Matern(1.5, 1.5), Laplacian(2.0), Polynomial(2)], ids=repr)
def test_fit__with_every_row_as_a_landmark_is_exact(kernel, weighted, intercept):
    X, new = rows(), rows(20, seed=5)
    y, w = targets(X, 2), weights(len(X)) if weighted else np.ones(len(X))
    model = everything(X, y, kernel=kernel, fit_intercept=intercept, sample_weight=w if weighted else None)
    expected = dense(X, y, new, kernel, RIDGE, intercept, w)
    np.testing.assert_allclose(model.predict(new), expected, atol=1e-6)


@pytest.mark.parametrize("intercept", [False, True])
def test_fit__with_the_linear_kernel_is_ridge_regression(intercept):
    X, w = rows(), weights(80)
    y = targets(X)
    for sample_weight, total in ((None, 80.0), (w, w.sum())):
        model = fitted(X, y, Linear(), 0.01, 10, sample_weight, fit_intercept=intercept)
        ridge = Ridge(0.01 * total, fit_intercept=intercept).fit(X, y, sample_weight)
        np.testing.assert_allclose(model.predict(X), ridge.predict(X), rtol=1e-9)
        assert model.intercept_ == pytest.approx(ridge.intercept_, rel=1e-9)


@pytest.mark.parametrize("intercept", [False, True])
def test_fit__with_integer_weights_equals_repeated_rows(intercept):
    X = rows(40)
    y, repeats = targets(X), np.random.default_rng(3).integers(1, 4, 40)
    options = {"landmarks": None, "fit_intercept": intercept, "sampling": np.arange(40)}
    model = fitted(X, y, sample_weight=repeats, **options)
    first = np.flatnonzero(np.diff(np.repeat(np.arange(40), repeats), prepend=-1))
    again = fitted(np.repeat(X, repeats, axis=0), np.repeat(y, repeats), **options | {"sampling": first})
    np.testing.assert_allclose(model.predict(X), again.predict(X), atol=1e-8)
    assert model.residual_squares_[0] == pytest.approx(again.residual_squares_[0], rel=1e-7)


def test_fit__leaves_rows_of_weight_zero_out():
    X = rows()
    y, w = targets(X), np.where(np.arange(80) < 50, 1.0, 0.0)
    kept = everything(X[:50], y[:50], ridge=RIDGE)
    np.testing.assert_allclose(everything(X, y, sample_weight=w).predict(X), kept.predict(X), atol=1e-8)


def test_fit__of_several_targets_fits_each():
    X = rows()
    y = targets(X, 3)
    together = fitted(X, y, fit_intercept=True)
    assert (together.dual_coef_.shape, together.intercept_.shape) == ((30, 3), (3,))
    for column in range(3):
        alone = fitted(X, y[:, column], fit_intercept=True)
        assert alone.dual_coef_.shape == (30,)
        np.testing.assert_allclose(together.predict(X)[:, column], alone.predict(X), rtol=1e-9)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("intercept", [False, True])
def test_residual_squares__are_those_of_the_training_rows(intercept, weighted):
    X = rows()
    y, w = targets(X, 2), weights(80) if weighted else np.ones(80)
    model = fitted(X, y, fit_intercept=intercept, sample_weight=w if weighted else None)
    squares = w @ (y - model.predict(X)) ** 2
    np.testing.assert_allclose(model.residual_squares_, squares, rtol=1e-7)


def test_effective_dimension__is_that_of_the_scores():
    X = rows()
    model = fitted(X, targets(X))
    result = daskrr.leverage_scores(X, KERNEL, RIDGE, 30, random_state=0, progress=False)
    assert model.effective_dimension_ == pytest.approx(result.sketch_dimension, rel=1e-9)


# --- Certificate --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_risk_inflation__bounds_the_exact_risk(seed):
    X, n, sigma = rows(200, 2, seed), 200, 0.3
    truth, kernel, mu = np.sin(2 * X[:, 0]) * X[:, 1], Gaussian(0.7), 200 * 1e-3
    model = fitted(X, truth, kernel, 1e-3, 90, random_state=seed)
    K = kernel(X, X)
    C, W = kernel(X, model.landmarks_), kernel(model.landmarks_, model.landmarks_)
    L = C @ np.linalg.solve(W + 1e-12 * np.eye(len(W)), C.T)

    def risk(M):
        smoother = np.linalg.solve(M + mu * np.eye(n), M).T
        return np.sum((truth - smoother @ truth) ** 2) + sigma**2 * np.sum(smoother**2)

    inflation = model.risk_inflation_
    assert inflation.failure_probability == 1e-6
    assert risk(L) <= inflation.factor * risk(K)
    assert 1.0 <= inflation.factor < 10.0


def test_risk_inflation__shrinks_with_landmarks_and_is_none_unless_asked():
    X = rows(200)
    y = targets(X)
    factors = [fitted(X, y, landmarks=p).risk_inflation_.factor for p in (20, 80, 180)]
    assert factors == sorted(factors, reverse=True)
    assert fitted(X, y, certify=Certify(failure_probability=0)).risk_inflation_.failure_probability == 0
    assert fitted(X, y, certify=False).risk_inflation_ is None


def test_tolerance__chooses_the_landmarks():
    X = rows(300, 2)
    model = fitted(X, targets(X), landmarks=Tolerance(0.2, most=300))
    assert model.risk_inflation_.factor < 1.5
    assert 128 <= len(model.landmarks_) <= 300


@pytest.mark.parametrize("sampling", ["uniform", "diagonal", "leverage"])
def test_sampling__schemes_and_sketch_ridge_serve_the_model(sampling):
    X = rows(200)
    plain = fitted(X, targets(X), sampling=sampling, fit_intercept=True)
    other = fitted(X, targets(X), sampling=BY_NAME[sampling](sketch_ridge=1e-6), fit_intercept=True)
    assert plain.score(X, targets(X)) > 0.7
    assert other.score(X, targets(X)) > 0.7
    assert not np.array_equal(plain.predict(X), other.predict(X))


# --- Sources ------------------------------------------------------------------------------------------


def sources(X, y, w, folder):
    yield da.from_array(X, chunks=(30, 2)), da.from_array(y, chunks=17), da.from_array(w, chunks=11)
    yield as_zarr(X, (25, 3)), as_zarr(y, (7,)), as_zarr(w, (80,))
    paths = []
    for name, values, chunks in (("X", X, (25, 3)), ("y", y, (7,)), ("w", w, (9,))):
        as_zarr(values, chunks, str(folder / name))
        paths.append(str(folder / name))
    yield tuple(paths)
    yield X, da.from_array(y, chunks=17), w


@pytest.mark.parametrize("weighted", [False, True])
def test_fit__takes_every_source_in_chunks_of_its_own(weighted, tmp_path):
    X, w = rows(), weights(80)
    y = targets(X)
    expected = fitted(X, y, sample_weight=w if weighted else None).predict(X)
    for data, y_data, w_data in sources(X, y, w, tmp_path):
        model = fitted(data, y_data, sample_weight=w_data if weighted else None)
        np.testing.assert_allclose(model.predict(X), expected, atol=1e-8)
        lazy = model.predict(data)
        if data is not X:
            assert isinstance(lazy, da.Array)
            lazy = lazy.compute()
        np.testing.assert_allclose(lazy, expected, atol=1e-8)


def test_score__is_out_of_core_what_it_is_in_memory(tmp_path):
    X = rows()
    y = targets(X, 2)
    model = fitted(X, y)
    expected = model.score(X, y)
    assert model.score(da.from_array(X, chunks=(30, 3)), da.from_array(y, chunks=(17, 1))) == pytest.approx(expected)
    as_zarr(X, (25, 3), str(tmp_path / "X"))
    as_zarr(y, (7, 2), str(tmp_path / "y"))
    assert model.score(tmp_path / "X", tmp_path / "y") == pytest.approx(expected)
    w = weights(80)
    as_zarr(w, (9,), str(tmp_path / "w"))
    expected = model.score(X, y, sample_weight=w)
    for given in (w, tmp_path / "w", da.from_array(w, chunks=13)):
        assert model.score(tmp_path / "X", tmp_path / "y", sample_weight=given) == pytest.approx(expected)


def test_fit__has_the_same_bits_on_a_cluster(request, tmp_path):
    X, w = rows(600), weights(600)
    store, y = as_zarr(X, (100, 3), str(tmp_path / "X")), targets(X)
    local = fitted(store, y, sample_weight=w)
    expected = local.predict(store).compute()
    request.getfixturevalue("client")
    remote = fitted(store, y, sample_weight=w)
    np.testing.assert_array_equal(remote.dual_coef_, local.dual_coef_)
    np.testing.assert_array_equal(remote.predict(store).compute(), expected)
    assert remote.risk_inflation_ == local.risk_inflation_


# --- Saving -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("several", [False, True])
def test_save__keeps_what_predicts(several, tmp_path):
    X = rows()
    model = fitted(X, targets(X, 2 if several else None), fit_intercept=True)
    model.save(tmp_path / "model.zarr")
    loaded = daskrr.load(tmp_path / "model.zarr")
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))
    assert loaded.risk_inflation_ == model.risk_inflation_
    assert (loaded.ridge, loaded.kernel_, loaded.n_features_in_) == (RIDGE, KERNEL, 3)
    assert loaded.fit(X, targets(X)).predict(X).shape == (80,)
    with pytest.raises(OutputExists, match="holds a model already"):
        model.save(tmp_path / "model.zarr")
    model.save(tmp_path / "model.zarr", overwrite=True)


def same(one, other):
    """Whether two parameters are equal, arrays and what they are in included."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return isinstance(one, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, Probabilities):
        return type(one) is type(other) and same(one.values, other.values) and one.replacement == other.replacement
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


MODELS = [
    NystromKernelRidge(landmarks=20, random_state=3),
    NystromKernelRidge(
        {"kernel": "gaussian", "length_scale": "median"},
        1e-2,
        landmarks=Tolerance(0.9, absolute=0.5, most=100),
        certify=Certify(failure_probability=1e-3),
        block_rows=40,
        progress=None,
        random_state=np.int64(4),
    ),
    NystromKernelRidge(Laplacian((1.0, 2.0, 3.0)), 1e-2, sampling=np.arange(25), fit_intercept=True, dtype=np.float32),
    NystromKernelRidge(
        2.0 * Linear() + Gaussian(1.0),
        np.float64(0.5),
        15,
        sampling=Probabilities(np.full(80, 1 / 80), sketch_ridge=1e-3),
        missing_chunks="fill",
    ),
    NystromKernelRidge(KERNEL, 1e-2, sampling=[1, 5, 3, 7], dtype=np.dtype("float64")),
    daskrr.NystromKernelRidgeCV(
        [Gaussian(1.0), {"kernel": "matern", "length_scale": 2.0}],
        np.logspace(-4, 0, 3),
        20,
        scoring=KFold(3),
        sampling=Uniform(replacement=False),
        random_state=1,
    ),
    daskrr.NystromKernelRidgeCV(ridges=(1e-3, 1e-2), landmarks=20, scoring="loo", random_state=1),
    daskrr.NystromKernelRidgeCV(ridges=(1e-3, 1e-2), landmarks=20, scoring="kfold", random_state=1),
]


@pytest.mark.parametrize("model", slow_but(MODELS, MODELS[0], MODELS[-1]), ids=range(len(MODELS)))
def test_load__gives_back_every_parameter(model, tmp_path):
    X = rows()
    model = clone(model).fit(X, targets(X))
    model.save(tmp_path / "model.zarr")
    loaded = daskrr.load(tmp_path / "model.zarr")
    assert type(loaded) is type(model)
    found, expected = loaded.get_params(), model.get_params()
    assert found.keys() == expected.keys()
    assert all(same(found[name], expected[name]) for name in expected), (found, expected)
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))
    assert clone(loaded).fit(X, targets(X)).n_features_in_ == 3
    if isinstance(model, daskrr.NystromKernelRidgeCV):
        assert loaded.best_score_ == model.best_score_
        assert loaded.cv_results_["kernels"] == model.cv_results_["kernels"]
        np.testing.assert_array_equal(loaded.cv_results_["errors"], model.cv_results_["errors"])


def test_load__gives_back_the_values_of_lazy_probabilities_and_no_function_of_progress(tmp_path):
    X, lazy = rows(), da.full(80, 1 / 80, chunks=30)
    fitted(X, targets(X), sampling=lazy, progress=lambda event: None).save(tmp_path / "model.zarr")
    loaded = daskrr.load(tmp_path / "model.zarr")
    np.testing.assert_array_equal(loaded.sampling, lazy.compute())
    assert loaded.progress is None


def test_load__refuses_an_estimator_that_it_does_not_know(tmp_path):
    fitted(rows(), targets(rows())).save(tmp_path / "model.zarr")
    forge(tmp_path / "model.zarr", lambda manifest: manifest["summary"].update(estimator="Oracle"))
    with pytest.raises(InvalidData, match="the model is a Oracle, and this daskrr reads NystromKernelRidge"):
        daskrr.load(tmp_path / "model.zarr")


def test_load__refuses_what_is_no_model_of_its_version(tmp_path):
    X = rows()
    with pytest.raises(InvalidData, match="there is not a model at"):
        load(tmp_path / "nothing.zarr")
    daskrr.score_to_zarr(X, tmp_path / "scores.zarr", KERNEL, RIDGE, 20, progress=False)
    with pytest.raises(InvalidData, match="holds scores, not a model"):
        load(tmp_path / "scores.zarr")
    fitted(X, targets(X)).save(tmp_path / "model.zarr")
    forge(tmp_path / "model.zarr", lambda manifest: manifest["summary"].update(model_version=99))
    with pytest.raises(InvalidData, match="the model has version 99, and this daskrr reads version 3"):
        daskrr.load(tmp_path / "model.zarr")


# --- Bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": targets(rows(79))}, "inconsistent numbers of samples|80 rows and y has 79"),
        ({"y": da.from_array(targets(rows(79)), chunks=10)}, "X has 80 rows and y has 79"),
        ({"y": da.from_array(np.where(np.arange(80) == 7, np.nan, 1.0), chunks=10)}, r"of y hold NaN .* 7"),
        ({"y": np.where(np.arange(80) == 7, np.nan, 1.0)}, "NaN"),
        ({"sample_weight": -np.ones(80)}, r"weight of row 0 is -1\.0"),
        ({"sample_weight": np.zeros(80)}, "every sample weight is zero"),
        ({"sample_weight": np.ones(79)}, "sample_weight|could not be broadcast"),
        ({"ridge": 0.0}, "ridge must be positive"),
        ({"ridge": [1e-3, 1e-2]}, "a model has one ridge, got"),
        ({"kernel": Gaussian((1.0, 2.0))}, "length_scale has 2 entries, the rows have 3 features"),
    ],
)
def test_fit__refuses_bad_input(change, message):
    X = rows()
    arguments = {"X": X, "y": targets(X)} | change
    with pytest.raises(ValueError, match=message):
        fitted(**arguments)


@pytest.mark.parametrize("dtype", ["float32", np.float32, np.float64])
def test_fit__takes_every_way_to_name_a_dtype(dtype):
    X = rows()
    y = targets(X)
    model = fitted(X, y, dtype=dtype, fit_intercept=True)
    tolerance = 1e-9 if np.dtype(dtype) == np.float64 else 1e-2
    np.testing.assert_allclose(model.predict(X), fitted(X, y, fit_intercept=True).predict(X), atol=tolerance)


def test_fit__refuses_a_gram_matrix_that_round_off_decides():
    sums = Sums(np.array([[1e8]]), np.ones((1, 2)), 50.0 * np.eye(2), np.zeros(1), np.zeros(1), height=0)
    with pytest.raises(RidgeTooSmall, match="round-off may change scores"):
        solve(sums, [1e-12], np.dtype(float), intercept=False)


def test_fit__checks_that_workers_can_read_targets_and_weights(client):
    X = rows()
    with pytest.raises(SourceUnreachable, match="in the memory of this process"):
        fitted(X, as_zarr(targets(X), (80,)))
    with pytest.raises(SourceUnreachable, match="in the memory of this process"):
        fitted(X, targets(X), sample_weight=as_zarr(weights(80), (80,)))


def test_predict__refuses_what_overflows():
    model = fitted(rows(), targets(rows()), Polynomial(3), 1.0)
    with pytest.raises(InvalidData, match="overflow"):
        model.predict(np.full((2, 3), 1e200))


def test_fit__refuses_a_ridge_below_round_off():
    with pytest.raises(RidgeTooSmall, match="smallest ridge that works is"):
        fitted(rows(), targets(rows()), ridge=1e-25)


def test_predict__needs_a_fitted_model_and_its_features():
    model = NystromKernelRidge(KERNEL, RIDGE, 10)
    with pytest.raises(ValueError, match="not fitted yet"):
        model.predict(rows())
    model.fit(rows(), targets(rows()))
    for X in (rows(5, 2), da.from_array(rows(5, 2), chunks=2)):
        with pytest.raises(ValueError, match="X has 2 features, but NystromKernelRidge is expecting 3 features"):
            model.predict(X)


# --- scikit-learn -------------------------------------------------------------------------------------

EXPECTED_FAILURES = {
    "check_sample_weight_equivalence_on_dense_data": "landmarks are drawn by row, so that repeating rows draws others; "
    "with fixed landmarks weights equal repeats, which a test of ours shows",
}


CHECKS = parametrize_with_checks(
    [NystromKernelRidge(landmarks=20, random_state=0)], expected_failed_checks=lambda model: EXPECTED_FAILURES
)


def name_of(pair):
    check = (pair.values if hasattr(pair, "values") else pair)[1]
    return getattr(check, "func", check).__name__


# One check wants an environment variable that changes SciPy for the whole process; it would be skipped.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "check"),
    [pair for pair in CHECKS.args[1] if name_of(pair) != "check_array_api_input"],
    ids=lambda value: getattr(getattr(value, "func", value), "__name__", "model"),
)
def test_contract__of_scikit_learn(estimator, check):
    check(estimator)


def test_model__can_be_cloned_piped_and_searched():
    X = rows()
    y = targets(X)
    model = NystromKernelRidge(KERNEL, RIDGE, 40, fit_intercept=True, random_state=0)
    assert clone(model).get_params() == model.get_params()
    pipeline = make_pipeline(StandardScaler(), model).fit(X, y)
    assert pipeline.score(X, y) > 0.9
    search = GridSearchCV(model, {"ridge": [1e-3, 1.0], "kernel": [Gaussian(1.0), Gaussian(2.0)]}, cv=3).fit(X, y)
    assert search.best_params_["ridge"] == 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [Gaussian(50.0), "gaussian", None, {"kernel": "rbf", "gamma": 1e-4}])
def test_model__can_be_searched_over_parameters_of_its_kernel(kernel):
    X = rows(120)
    y = targets(X)
    model = NystromKernelRidge(kernel, RIDGE, 40, fit_intercept=True, random_state=0)
    scales = [50.0, 1.5, (1.0, 2.0, 3.0), "median"]
    search = GridSearchCV(model, {"kernel__length_scale": scales}, cv=3).fit(X, y)
    one_by_one = [GridSearchCV(model, {"kernel": [Gaussian(scale)]}, cv=3).fit(X, y).best_score_ for scale in scales]
    np.testing.assert_allclose(search.cv_results_["mean_test_score"], one_by_one)
    assert search.best_estimator_.kernel == Gaussian(scales[int(np.argmax(one_by_one))])
    assert model.kernel == kernel


@pytest.mark.slow
def test_model__can_be_searched_over_kernels_names_and_what_is_inside():
    X = rows(120)
    y = targets(X)
    pipeline = make_pipeline(StandardScaler(), NystromKernelRidge(Linear() + Gaussian(1.0), RIDGE, 40, random_state=0))
    grid = [
        {"nystromkernelridge__kernel": ["rbf", "linear", {"kernel": "poly", "degree": 3}, Matern(2.0)]},
        {"nystromkernelridge__kernel__parts__1__length_scale": [0.5, 2.0]},
    ]
    search = GridSearchCV(pipeline, grid, cv=3).fit(X, y)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert len(set(search.cv_results_["mean_test_score"])) == 6
    changed = clone(pipeline).set_params(**{"nystromkernelridge__kernel__parts__1": Matern(3.0)})
    assert changed[-1].kernel == Linear() + Matern(3.0)


def test_set_params__leaves_a_fitted_model_as_it_is():
    X = rows()
    model = fitted(X, targets(X), kernel=Gaussian(1.0))
    before = model.predict(X)
    model.set_params(kernel__length_scale=3.0, ridge=1.0)
    assert (model.kernel, model.kernel_) == (Gaussian(3.0), Gaussian(1.0))
    np.testing.assert_array_equal(model.predict(X), before)
    both = model.set_params(kernel__nu=0.5, kernel=Matern(2.0))
    assert both.kernel == Matern(2.0, nu=0.5)


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (NystromKernelRidge(Gaussian(1.0)), "has no parameter 'gamma', only length_scale"),
        (daskrr.NystromKernelRidgeCV(), "Invalid parameter 'kernel' for estimator"),
    ],
)
def test_set_params__refuses_what_there_is_not(model, match):
    with pytest.raises(ValueError, match=match):
        model.set_params(kernel__gamma=1.0)


@pytest.mark.parametrize("kernel", ["gaussian", {"kernel": "rbf", "gamma": 0.1}])
def test_save__keeps_a_kernel_by_name(kernel, tmp_path):
    X = rows()
    model = NystromKernelRidge(kernel, RIDGE, 20, random_state=0).fit(X, targets(X))
    model.save(tmp_path / "model.zarr")
    loaded = daskrr.load(tmp_path / "model.zarr")
    assert (loaded.kernel, loaded.kernel_) == (kernel, model.kernel_)


# --- The weighted kernel ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_weighted__multiplies_by_both_factors(dtype):
    X, Z = rows(9, 4), rows(5, 4, seed=1)
    kernel = Weighted(KERNEL)
    expected = KERNEL(X[:, :3], Z[:, :3]) * np.outer(X[:, 3], Z[:, 3])
    np.testing.assert_allclose(kernel(X, Z), expected, rtol=1e-13)
    np.testing.assert_allclose(kernel.diagonal(X), X[:, 3] ** 2, rtol=1e-13)
    out = np.empty((9, 5), dtype)
    kernel.columns(Z, dtype)(X, out)
    np.testing.assert_allclose(out, expected, atol=1e-12 if dtype == np.float64 else 1e-5)
    assert Weighted(Gaussian("median")).resolve(X).part == Gaussian("median").resolve(X[:, :3])
