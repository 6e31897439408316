"""Standard errors, diagnostics, more rows and selection against models fitted anew, row by row, fold by fold."""

import itertools
import pickle

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.utils.estimator_checks import parametrize_with_checks
from strategies import as_zarr
from variants import examples, slow_but

import daskrr
from daskrr import NystromKernelRidge, NystromKernelRidgeCV, NystromTransformer
from daskrr.errors import InvalidData, InvalidParameter, RidgeTooSmall, SourceUnreachable
from daskrr.kernels import Gaussian, Linear, Matern
from daskrr.leverage import algorithm
from daskrr.numerics.reservoir import Order
from daskrr.nystrom import audit, sampling
from daskrr.nystrom.landmarks import child
from daskrr.nystrom.strategies import Tolerance
from daskrr.regression import fitting
from daskrr.regression.cross_validation import KFold

KERNEL, RIDGE = Matern(1.5, 1.5), 1e-3
RIDGES = (1e-4, 1e-2, 1.0)
LANDMARKS = np.arange(0, 60, 3)


def data(n=60, d=2, t=None, seed=0):
    generator = np.random.default_rng(seed)
    X = generator.standard_normal((n, d))
    y = np.sin(2 * X[:, :1] * np.arange(1, (t or 1) + 1)) + 2.0 + 0.3 * generator.standard_normal((n, t or 1))
    return X, y if t else y[:, 0], generator.uniform(0.2, 3.0, n)


class Refit:
    """The model from its normal equations, with given landmarks and a given shift of the identity."""

    def __init__(self, X, y, w, landmarks, shift, intercept, kernel=KERNEL):
        self.landmarks, self.kernel, self.intercept = landmarks, kernel, intercept
        A, penalty = self.design(X), np.zeros((len(landmarks) + intercept,) * 2)
        penalty[: len(landmarks), : len(landmarks)] = shift * kernel(landmarks, landmarks)
        self.solution = np.linalg.solve(A.T @ (w[:, None] * A) + penalty, A.T @ (w[:, None] * y.reshape(len(y), -1)))

    def design(self, X):
        columns = self.kernel(X, self.landmarks)
        return np.column_stack([columns, np.ones(len(X))]) if self.intercept else columns

    def predict(self, X):
        return self.design(X) @ self.solution


def fitted(X, y, w=None, ridge=RIDGE, kernel=KERNEL, chosen=LANDMARKS, **options):
    options = {"weight_meaning": "precision", "sampling": chosen, "random_state": 0} | options
    return NystromKernelRidge(kernel, ridge, **options).fit(X, y, w)


cases = pytest.mark.parametrize(
    ("intercept", "weighted", "t"),
    slow_but(itertools.product([False, True], [False, True], [None, 2]), (False, False, None), (True, True, 2)),
)


# --- Standard errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [None, 2])
def test_predict__has_the_standard_errors_of_a_gaussian_process(t):
    X, y, _ = data(t=t)
    model = fitted(X, y, kernel=Gaussian(0.7), chosen=np.arange(60))
    new = np.vstack([X[:5], data(20, seed=4)[0] * 2])
    mean, std = model.predict(new, return_std=True)
    np.testing.assert_allclose(mean, model.predict(new), atol=1e-7)
    for target, noise in enumerate(np.atleast_1d(model.noise_variance_)):
        scale = noise / (60 * RIDGE)
        process = GaussianProcessRegressor(ConstantKernel(scale, "fixed") * RBF(0.7, "fixed"), alpha=noise)
        expected = process.fit(X, y.reshape(60, -1)[:, target]).predict(new, return_std=True)[1]
        np.testing.assert_allclose(std.reshape(len(new), -1)[:, target], expected, rtol=1e-5)


def test_predict__has_the_standard_errors_of_least_squares():
    X, y, w = data(t=None)
    model = fitted(X, y, w, ridge=1e-10, kernel=Linear(), chosen=np.arange(10), fit_intercept=True)
    new, w = data(7, seed=3)[0], w / w.mean()
    A, N = (np.column_stack([one, np.ones(len(one))]) for one in (X, new))
    residuals = y - LinearRegression().fit(X, y, w).predict(X)
    noise = np.sum(w * residuals**2) / (60 - 3)
    assert model.noise_variance_ == pytest.approx(noise, rel=1e-6)
    expected = np.sqrt(noise * np.einsum("ij,jk,ik->i", N, np.linalg.inv(A.T @ (w[:, None] * A)), N))
    np.testing.assert_allclose(model.predict(new, return_std=True)[1], expected, rtol=1e-6)


def test_predict__is_as_uncertain_as_the_prior_far_away():
    X, y, _ = data()
    model = fitted(X, y, kernel=Gaussian(0.5))
    std = model.predict(np.full((1, 2), 1e3), return_std=True)[1]
    assert std[0] == pytest.approx(np.sqrt(model.noise_variance_ / (60 * RIDGE)))


# --- Diagnostics --------------------------------------------------------------------------------------


@cases
def test_diagnose__is_what_fits_without_the_row_find(intercept, weighted, t):
    X, y, w = data(t=t)
    w = w if weighted else np.ones(60)
    model = fitted(X, y, w if weighted else None, fit_intercept=intercept)
    found = model.diagnose(X, y, w if weighted else None)
    w, Y, shift = w / w.mean(), y.reshape(60, -1), 60 * RIDGE
    whole = Refit(X, y, w, X[LANDMARKS], shift, intercept).predict(X)
    dimension = model.effective_dimension_ + intercept
    for row in range(0, 60, 7):
        keep = np.arange(60) != row
        without = Refit(X[keep], y[keep], w[keep], X[LANDMARKS], shift, intercept).predict(X)
        changes = whole - without
        expected = {
            "fitted": whole[row],
            "residuals": Y[row] - whole[row],
            "loo_residuals": Y[row] - without[row],
            "influence": changes[row],
            "cooks_distance": (w @ changes**2) / (dimension * np.atleast_1d(model.noise_variance_)),
        }
        for name, values in expected.items():
            np.testing.assert_allclose(np.atleast_1d(getattr(found, name)[row]), values, rtol=1e-6, atol=1e-9)
    assert found.leverage.sum() == pytest.approx(dimension, rel=1e-9)
    assert found.fitted.shape == y.shape
    spread = np.sqrt(np.atleast_1d(model.noise_variance_) * (1 - found.leverage[:, None]) / w[:, None])
    np.testing.assert_allclose(found.studentized.reshape(60, -1), found.residuals.reshape(60, -1) / spread, rtol=1e-6)


@cases
def test_diagnose__studentizes_by_the_deviation_of_residuals_about_a_fixed_function(intercept, weighted, t):
    X, y, w = data(t=t)
    w = w if weighted else np.ones(60)
    model = fitted(X, y, w if weighted else None, fit_intercept=intercept)
    found = model.diagnose(X, y, w if weighted else None)
    w = w / w.mean()
    H = Refit(X, np.eye(60), w, X[LANDMARKS], 60 * RIDGE, intercept).predict(X)
    np.testing.assert_allclose(found.leverage, np.diagonal(H), rtol=1e-6)
    # Targets have the variances σ²/w, of which residuals are (I − H)y.
    left = np.eye(60) - H
    variances = np.diagonal(left @ np.diag(1 / w) @ left.T)[:, None] * np.atleast_1d(model.noise_variance_)
    expected = found.residuals.reshape(60, -1) / np.sqrt(variances)
    np.testing.assert_allclose(found.studentized_fixed.reshape(60, -1), expected, rtol=1e-6)
    assert (np.abs(found.studentized_fixed) >= np.abs(found.studentized) * (1 - 1e-9)).all()


# --- Weights that count repeats -----------------------------------------------------------------------

NUMBERS = ("residual_squares_", "target_squares_", "noise_variance_", "effective_dimension_", "intercept_")


def repeated(seed, t=None):
    """Rows with weights that are whole numbers, 0 among them; the same repeated; and where each repeat is from."""
    X, y, _ = data(40, t=t, seed=seed)
    m = np.random.default_rng(seed).integers(0, 5, 40)
    m[[3, 7, 11]] = (1, 2, 4)
    return X, y, m, np.repeat(np.arange(40), m)


@settings(max_examples=12)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([None, 2]))
@pytest.mark.slow
def test_weights__of_whole_numbers_are_repeats_in_all_that_is_said(seed, intercept, t):
    X, y, m, rows = repeated(seed, t)
    kept = np.flatnonzero(m)[::2]
    whole = np.searchsorted(rows, kept)
    options = {"weight_meaning": "frequency", "fit_intercept": intercept}
    model = fitted(X, y, m, chosen=kept, **options)
    expected = fitted(X[rows], y[rows], chosen=whole, **options)
    for name in NUMBERS:
        np.testing.assert_allclose(getattr(model, name), getattr(expected, name), rtol=1e-8, atol=1e-10)
    new = np.vstack([X, 2 * X])
    np.testing.assert_allclose(model.predict(new, return_std=True), expected.predict(new, return_std=True), rtol=1e-7)
    np.testing.assert_allclose(model.summary()["training_r2"], expected.summary()["training_r2"], rtol=1e-8)
    assert model.risk_inflation_.failure_probability == expected.risk_inflation_.failure_probability
    found, each = (one.diagnose(*given) for one, given in ((model, (X, y, m)), (expected, (X[rows], y[rows]))))
    for name, values in vars(found).items():
        np.testing.assert_allclose(values[rows], getattr(each, name), rtol=1e-6, atol=1e-9, err_msg=name)
    for scoring in ("loo", "gcv"):
        weighed = selected(X, y, m, scoring=scoring, sampling=kept, **options).cv_results_["errors"]
        apart = selected(X[rows], y[rows], scoring=scoring, sampling=whole, **options).cv_results_["errors"]
        np.testing.assert_allclose(weighed, apart, rtol=1e-6)


def test_weights__are_repeats_by_default_and_in_parts(tmp_path):
    X, y, m, rows = repeated(1)
    kept = np.flatnonzero(m[:20])
    whole = np.searchsorted(rows, kept)
    first = NystromKernelRidge(KERNEL, RIDGE, sampling=kept, random_state=0).fit(X[:20], y[:20], m[:20])
    first.save(tmp_path / "model.zarr")
    expected = fitted(X[rows], y[rows], chosen=whole)
    for model in (first, daskrr.load(tmp_path / "model.zarr")):
        assert model.weight_meaning == "frequency"
        model.partial_fit(X[20:], y[20:], m[20:])
        np.testing.assert_allclose(model.noise_variance_, expected.noise_variance_, rtol=1e-8)
        std = model.predict(X, return_std=True)[1]
        np.testing.assert_allclose(std, expected.predict(X, return_std=True)[1], rtol=1e-7)


def test_weights__below_one_leave_out_the_row_itself():
    X, y, w = data()
    w = w / 10
    found = fitted(X, y, w, weight_meaning="frequency").diagnose(X, y, w)
    expected = fitted(X, y, w, weight_meaning="precision").diagnose(X, y, w)
    for name in ("leverage", "loo_residuals", "influence"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-9)


def test_weights__that_are_precisions_have_no_scale():
    X, y, w = data()
    one, other = (fitted(X, y, scale * w) for scale in (1.0, 1e3))
    np.testing.assert_allclose(other.predict(X, return_std=True), one.predict(X, return_std=True), rtol=1e-7)
    with pytest.raises(InvalidParameter, match="weight_meaning must be 'frequency' or 'precision', got 'analytic'"):
        fitted(X, y, w, weight_meaning="analytic")


def test_diagnose__has_cooks_distance_of_least_squares():
    X, y, _ = data()
    model = fitted(X, y, ridge=1e-11, kernel=Linear(), chosen=np.arange(10), fit_intercept=True)
    A = np.column_stack([X, np.ones(60)])
    leverage = np.einsum("ij,jk,ik->i", A, np.linalg.inv(A.T @ A), A)
    residuals = y - A @ np.linalg.lstsq(A, y)[0]
    cook = residuals**2 * leverage / ((1 - leverage) ** 2 * 3 * (residuals @ residuals) / 57)
    np.testing.assert_allclose(model.diagnose(X, y).cooks_distance, cook, rtol=1e-5)


def test_diagnose__leverage_is_the_score_of_a_row():
    X, y, _ = data(200)
    model = NystromKernelRidge(KERNEL, RIDGE, 40, random_state=0).fit(X, y)
    scores = daskrr.leverage_scores(X, KERNEL, RIDGE, 40, random_state=0, progress=False).scores.compute()
    np.testing.assert_allclose(model.diagnose(X, y).leverage, scores, rtol=1e-8)


@examples(12, 40, st.integers(0, 10**6))
def test_diagnose__keeps_what_is_left_in_its_bounds_on_hard_cases(seed):
    """Far rows, duplicates, tiny ridges, heavy weights: leverage never above 1, and what is left never below zero."""
    generator = np.random.default_rng(seed)
    n = int(generator.integers(2, 40))
    X = generator.standard_normal((n, 2)) * 10.0 ** generator.integers(-2, 3)
    X[generator.integers(0, n, n // 3)] = X[0]
    y = generator.standard_normal(n)
    w = 10.0 ** generator.uniform(-6, 3, n) if generator.random() < 0.5 else None
    intercept = bool(generator.random() < 0.5)
    kernel = Gaussian(1.0) if generator.random() < 0.5 else Linear()
    try:
        model = fitted(X, y, w, 10.0 ** generator.uniform(-9, 0), kernel, np.arange(n), fit_intercept=intercept)
    except RidgeTooSmall:
        return
    found = model.diagnose(X, y, w)
    assert (found.leverage >= -1e-12).all()
    assert (found.leverage <= 1 + 1e-6).all()
    assert (np.abs(found.loo_residuals) >= np.abs(found.residuals) * (1 - 1e-9))[np.isfinite(found.loo_residuals)].all()
    assert (model.predict(X, return_std=True)[1] >= 0).all() or not np.isfinite(model.noise_variance_)


def test_diagnose__is_lazy_for_lazy_input_and_reads_it_once(tmp_path):
    X, y, w = data(300, t=2)
    model = fitted(X, y, w, fit_intercept=True)
    expected = model.diagnose(X, y, w)
    assert isinstance(expected.leverage, np.ndarray)
    as_zarr(X, (50, 2), str(tmp_path / "X"))
    as_zarr(y, (70, 1), str(tmp_path / "y"))
    found = model.diagnose(str(tmp_path / "X"), tmp_path / "y", da.from_array(w, chunks=31))
    values = dask.compute(*vars(found).values())
    for name, value in zip(vars(found), values, strict=True):
        np.testing.assert_allclose(value, getattr(expected, name), rtol=1e-9, atol=1e-12)


def test_diagnose__refuses_other_rows():
    X, y, _ = data()
    model = fitted(X, y)
    with pytest.raises(InvalidData, match="X has 60 rows and y has 59"):
        model.diagnose(da.from_array(X), da.from_array(y[:-1]))
    with pytest.raises(ValueError, match="X has 1 features, but NystromKernelRidge is expecting 2"):
        model.diagnose(X[:, :1], y)
    with pytest.raises(InvalidData, match=r"fitted to 1 target\(s\), and y has shape \(60, 2\)"):
        model.diagnose(X, np.column_stack([y, y]))


# --- More rows ----------------------------------------------------------------------------------------


@cases
def test_partial_fit__is_a_fit_to_all_rows(intercept, weighted, t):
    X, y, w = data(150, t=t)
    w = w if weighted else None
    part = slice(0, 60), slice(60, 100), slice(100, 150)
    model = NystromKernelRidge(KERNEL, RIDGE, sampling=LANDMARKS, fit_intercept=intercept, random_state=0)
    for rows in part:
        assert model.partial_fit(X[rows], y[rows], None if w is None else w[rows]) is model
    whole = fitted(X, y, w, fit_intercept=intercept)
    np.testing.assert_allclose(model.predict(X), whole.predict(X), rtol=1e-9, atol=1e-10)
    assert model.n_rows_ == 150
    assert model.effective_dimension_ == pytest.approx(whole.effective_dimension_, rel=1e-9)


def test_partial_fit__takes_rows_without_weights_for_rows_of_weight_one():
    X, y, w = data(100)
    model = fitted(X[:60], y[:60], w[:60]).partial_fit(X[60:], y[60:])
    whole = fitted(X, y, np.concatenate([w[:60], np.ones(40)]))
    np.testing.assert_allclose(model.predict(X), whole.predict(X), rtol=1e-9)
    model = fitted(X[:60], y[:60]).partial_fit(X[60:], y[60:], w[60:])
    whole = fitted(X, y, np.concatenate([np.ones(60), w[60:]]))
    np.testing.assert_allclose(model.predict(X), whole.predict(X), rtol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_partial_fit__certifies_all_rows(seed):
    X, y, _ = data(200, seed=seed)
    model = fitted(X[:120], y[:120]).partial_fit(X[120:], y[120:])
    Z = model.landmarks_
    E = KERNEL(X, X) - KERNEL(X, Z) @ np.linalg.solve(KERNEL(Z, Z), KERNEL(Z, X))
    exact = (1 + np.linalg.eigvalsh(E)[-1] / (200 * RIDGE)) ** 2
    assert exact <= model.risk_inflation_.factor < 10 * exact
    assert model.risk_inflation_.failure_probability == 2e-6
    assert fitted(X[:120], y[:120], certify=False).partial_fit(X[120:], y[120:]).risk_inflation_ is None


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": "leverage", "landmarks": 40},
        {"sampling": "residual", "landmarks": 40},
        {"sampling": "residual", "landmarks": Tolerance(0.5, most=200)},
    ],
    ids=["leverage", "residual", "tolerance"],
)
def test_partial_fit__audits_with_rows_of_a_stream_that_nothing_has_seen(options, tmp_path, monkeypatch):
    X, y, _ = data(400)
    streams, draws = [], audit.audit_draws

    def noted(seed, stream, size):
        streams.append((seed, stream))
        return draws(seed, stream, size)

    for module in (algorithm, sampling, fitting):
        monkeypatch.setattr(module, "audit_draws", noted)
    model = NystromKernelRidge(KERNEL, RIDGE, random_state=0, **options).fit(X[:250], y[:250])
    model.partial_fit(X[250:300], y[250:300]).partial_fit(X[300:350], y[300:350]).save(tmp_path / "model")
    assert daskrr.load(tmp_path / "model").partial_fit(X[350:], y[350:]).risk_inflation_.failure_probability == 4e-6
    assert len(streams) >= 4
    assert len(set(streams)) == len(streams)


def test_partial_fit__does_not_change_what_was_made_before():
    X, y, _ = data(100)
    model = fitted(X[:60], y[:60])
    before, lazy = model.predict(X), model.predict(da.from_array(X, chunks=(30, 2)))
    model.partial_fit(X[60:], y[60:])
    np.testing.assert_array_equal(lazy.compute(), before)
    with pytest.raises(InvalidData, match="hold NaN"):
        model.partial_fit(da.from_array(X), da.from_array(np.full(100, np.nan)))
    assert model.n_rows_ == 100


# --- Selection ----------------------------------------------------------------------------------------


def selected(X, y, w=None, **options):
    options = {"kernels": [KERNEL, Gaussian(0.5)], "ridges": RIDGES, "sampling": LANDMARKS, "random_state": 0} | options
    return NystromKernelRidgeCV(**{"weight_meaning": "precision"} | options).fit(X, y, w)


@cases
def test_selection__by_leaving_out_one_row_is_fitting_without_it(intercept, weighted, t):
    X, y, w = data(t=t)
    w = w if weighted else np.ones(60)
    model = selected(X, y, w if weighted else None, fit_intercept=intercept)
    Y, scaled = y.reshape(60, -1), w / w.mean()
    for number, kernel in enumerate((KERNEL, Gaussian(0.5))):
        for column, ridge in enumerate(RIDGES):
            squares = np.empty(Y.shape)
            for row in range(60):
                keep = np.arange(60) != row
                arguments = (scaled[keep], X[LANDMARKS], 60 * ridge, intercept, kernel)
                squares[row] = (Y[row] - Refit(X[keep], y[keep], *arguments).predict(X[row : row + 1])[0]) ** 2
            errors = model.cv_results_["errors"][number, column]
            assert errors == pytest.approx(np.mean(scaled @ squares / 60), rel=1e-6)
            others = np.setdiff1d(np.arange(60), LANDMARKS)
            apart = model.cv_results_["errors_without_landmarks"][number, column]
            assert apart == pytest.approx(np.mean(scaled[others] @ squares[others] / scaled[others].sum()), rel=1e-6)


@cases
def test_selection__by_folds_is_fitting_without_each(intercept, weighted, t):
    X, y, w = data(t=t)
    w = w if weighted else np.ones(60)
    model = selected(X, y, w if weighted else None, fit_intercept=intercept, scoring=KFold(3))
    folds = Order.of(child(0, "folds")).folds(3, 0, 60)
    Y = y.reshape(60, -1)
    assert model.cv_results_["errors_without_landmarks"] is None
    for number, kernel in enumerate((KERNEL, Gaussian(0.5))):
        for column, ridge in enumerate(RIDGES):
            squares = np.empty(Y.shape)
            for fold in range(3):
                keep = folds != fold
                arguments = (w[keep], X[LANDMARKS], w[keep].sum() * ridge, intercept, kernel)
                squares[~keep] = (Y[~keep] - Refit(X[keep], y[keep], *arguments).predict(X[~keep])) ** 2
            errors = model.cv_results_["errors"][number, column]
            assert errors == pytest.approx(np.mean(w @ squares / w.sum()), rel=1e-6)


@pytest.mark.parametrize(("scoring", "same"), [(KFold(), True), (KFold(5), True), (KFold(4), False)])
def test_selection__by_kfold_is_that_by_its_default_folds(scoring, same):
    X, y, _ = data()
    short, long = (selected(X, y, scoring=one) for one in ("kfold", scoring))
    assert np.array_equal(short.cv_results_["errors"], long.cv_results_["errors"]) == same
    assert short.summary()["selection"]["scoring"] == long.summary()["selection"]["scoring"] == "kfold"


@cases
def test_selection__by_generalized_cross_validation_is_its_formula(intercept, weighted, t):
    X, y, w = data(t=t)
    model = selected(X, y, w if weighted else None, fit_intercept=intercept, scoring="gcv")
    for number, kernel in enumerate((KERNEL, Gaussian(0.5))):
        for column, ridge in enumerate(RIDGES):
            one = fitted(X, y, w if weighted else None, ridge, kernel, fit_intercept=intercept)
            left = 1 - (one.effective_dimension_ + intercept) / 60
            expected = np.mean(one.residual_squares_) / 60 / left**2
            assert model.cv_results_["errors"][number, column] == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("scoring", ["loo", "gcv", "kfold"])
def test_selection__keeps_the_model_of_the_least_error(scoring):
    X, y, _ = data(200)
    model = selected(X, y, scoring=scoring, fit_intercept=True)
    errors = model.cv_results_["errors"]
    best = np.unravel_index(np.argmin(errors), errors.shape)
    assert (model.kernel_, model.ridge_) == ((KERNEL, Gaussian(0.5))[best[0]], RIDGES[best[1]])
    assert model.best_score_ == errors.min()
    again = fitted(X, y, ridge=model.ridge_, kernel=model.kernel_, fit_intercept=True)
    np.testing.assert_allclose(model.predict(X), again.predict(X), rtol=1e-9)
    assert model.risk_inflation_.factor == pytest.approx(again.risk_inflation_.factor, rel=1e-9)
    assert model.summary()["selection"]["best_error"] == model.best_score_


@pytest.mark.parametrize(("n_landmarks", "chosen_by"), [(10, "errors_without_landmarks"), (11, "errors_all_rows")])
def test_selection__leaves_few_landmarks_out_of_the_error(n_landmarks, chosen_by):
    X, y, _ = data(200)
    model = selected(X, y, sampling="residual", landmarks=n_landmarks)
    found = model.cv_results_
    assert not np.allclose(found["errors_all_rows"], found["errors_without_landmarks"])
    np.testing.assert_array_equal(found["errors"], found[chosen_by])
    assert model.best_score_ == found[chosen_by].min()
    assert model.summary()["selection"]["errors_all_rows"] == found["errors_all_rows"].tolist()


@pytest.mark.parametrize("seed", range(3))
def test_selection__is_not_swayed_by_landmarks_that_are_outliers(seed):
    """On heavy tails the error over all rows wants a larger ridge, at which test rows are predicted worse."""

    def tailed(seed):
        generator = np.random.default_rng(seed)
        X = generator.standard_t(3, (2000, 2))
        return X, np.sin(2 * X[:, 0]) * np.cos(X[:, 1]) + 0.02 * generator.standard_normal(2000)

    (X, y), (new, truth) = tailed(seed), tailed(100 + seed)
    options = {"landmarks": 100, "sampling": "residual", "certify": False}
    model = selected(X, y, kernels=[Gaussian(1.0)], ridges=np.logspace(-9, 0, 19), **options)
    swayed = model.cv_results_["ridges"][np.argmin(model.cv_results_["errors_all_rows"])]
    other = fitted(X, y, ridge=swayed, kernel=Gaussian(1.0), **options)
    assert model.ridge_ < swayed
    assert np.mean((model.predict(new) - truth) ** 2) < np.mean((other.predict(new) - truth) ** 2)


def test_selection__by_leaving_out_falls_back_on_all_rows_where_landmarks_have_all_the_weight():
    X, y, _ = data()
    w = np.zeros(60)
    w[:3] = 1.0
    model = selected(X, y, w, sampling=np.arange(3), fit_intercept=True)
    np.testing.assert_array_equal(model.cv_results_["errors"], model.cv_results_["errors_all_rows"])


def test_selection__has_defaults_that_work():
    X, y, _ = data(300)
    model = NystromKernelRidgeCV(landmarks=60, random_state=0).fit(X, y)
    assert model.score(X, y) > 0.7
    assert model.cv_results_["errors"].shape == (4, 30)
    assert len({kernel.length_scale for kernel in model.cv_results_["kernels"]}) == 4


def test_selection__leaves_out_ridges_that_round_off_decides(caplog):
    X, y, _ = data()
    model = selected(X, y, dtype="float32", ridges=[1e-12, 1e-3, 1e-1])
    assert np.isnan(model.cv_results_["errors"][:, 0]).all()
    assert np.isfinite(model.cv_results_["errors"][:, 1:]).all()
    assert "are left out, since round-off would decide" in caplog.text
    assert model.summary()["selection"]["errors"][0][0] is None
    with pytest.raises(RidgeTooSmall, match=r"below what float32 tiles resolve|is above round-off"):
        selected(X, y, dtype="float32", ridges=[1e-14, 1e-12])


def test_selection__tells_of_a_choice_at_the_end_of_the_ridges(caplog):
    X, y, _ = data()
    selected(X, y, ridges=[1.0, 10.0, 100.0])
    assert "the best ridge, 1, is the smallest of those given" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring": "aic"}, r"scoring must be one of loo, gcv, kfold or KFold\(…\), got 'aic'"),
        ({"scoring": KFold}, r"scoring must be one of loo, gcv, kfold or KFold\(…\), got <class"),
        ({"scoring": 5}, r"scoring must be one of loo, gcv, kfold or KFold\(…\), got 5"),
        ({"ridges": []}, "got an empty list"),
        ({"ridges": [1e-3, -1.0]}, "every ridge must be positive"),
        ({"kernels": []}, "kernels must be a list of at least one kernel"),
        ({"kernels": KERNEL}, "kernels must be a list of at least one kernel"),
    ],
)
def test_selection__refuses_bad_input(change, message):
    X, y, _ = data()
    with pytest.raises(InvalidParameter, match=message):
        selected(X, y, **change)


@pytest.mark.slow
def test_selection__serves_every_sampling_scheme():
    X, y, _ = data(200)
    for scheme in ("residual", "leverage", "diagonal", "uniform"):
        assert selected(X, y, sampling=scheme, landmarks=40).score(X, y) > 0.6
    model = selected(X, y, sampling="residual", landmarks=Tolerance(0.5, most=150))
    assert len(model.landmarks_) >= 128


# --- Features -----------------------------------------------------------------------------------------


def test_transformer__makes_features_whose_products_are_the_kernel():
    X, _, _ = data(90)
    model = NystromTransformer(KERNEL, sampling=np.arange(90)).fit(X)
    B = model.transform(X)
    np.testing.assert_allclose(B @ B.T, KERNEL(X, X), atol=1e-9)
    assert model.get_feature_names_out()[0] == "nystromtransformer0"


def test_transformer__and_ridge_regression_are_the_model():
    X, y, _ = data(200)
    features = NystromTransformer(KERNEL, 40, random_state=0).fit(X)
    model = NystromKernelRidge(KERNEL, RIDGE, 40, fit_intercept=True, random_state=0).fit(X, y)
    np.testing.assert_array_equal(features.landmarks_, model.landmarks_)
    ridge = Ridge(200 * RIDGE).fit(features.transform(X), y)
    np.testing.assert_allclose(ridge.predict(features.transform(X[:50])), model.predict(X[:50]), rtol=1e-7)


@pytest.mark.parametrize("seed", range(4))
def test_transformer__certifies_how_far_it_is_from_the_kernel(seed):
    X, _, _ = data(200, seed=seed)
    model = NystromTransformer(KERNEL, 50, certify=True, random_state=seed).fit(X)
    B = model.transform(X)
    exact = np.linalg.eigvalsh(KERNEL(X, X) - B @ B.T)[-1]
    assert exact <= model.deviation_.delta < 10 * exact
    assert model.deviation_.failure_probability == 1e-6
    assert NystromTransformer(KERNEL, 50).fit(X).deviation_ is None


def test_transformer__is_lazy_for_lazy_input(tmp_path):
    X, _, _ = data(100)
    model = NystromTransformer(KERNEL, 30, random_state=0).fit(X)
    as_zarr(X, (40, 2), str(tmp_path / "X"))
    lazy = model.transform(tmp_path / "X")
    assert isinstance(lazy, da.Array)
    np.testing.assert_allclose(lazy.compute(), model.transform(X), atol=1e-12)
    other = NystromTransformer(KERNEL, 30, random_state=0).fit(da.from_array(X, chunks=(30, 1)))
    np.testing.assert_allclose(other.transform(X), model.transform(X), atol=1e-9)
    with pytest.raises(ValueError, match="X has 3 features, but NystromTransformer is expecting 2"):
        model.transform(da.zeros((5, 3)))


# --- Clusters and storage -----------------------------------------------------------------------------


def answers(store, X, y, w):
    """Everything that a model and its relatives can say about stored rows."""
    chosen = selected(store, y, w, fit_intercept=True, landmarks=None)
    folded = selected(store, y, w, scoring="kfold")
    model = fitted(store, y, w).partial_fit(X[:50], y[:50])
    features = NystromTransformer(KERNEL, 30, certify=True, random_state=0).fit(store)
    mean, std = model.predict(store, return_std=True)
    lazy = (mean, std, *vars(model.diagnose(store, y, w)).values(), features.transform(store))
    arrays = [*dask.compute(*lazy), chosen.cv_results_["errors"], folded.cv_results_["errors"]]
    return [*arrays, chosen.predict(X), np.array([model.risk_inflation_.factor, features.deviation_.delta])]


@pytest.mark.slow
def test_models__have_the_same_bits_on_a_cluster(request, tmp_path):
    X, y, w = data(600, t=2)
    store = as_zarr(X, (100, 2), str(tmp_path / "X"))
    expected = answers(store, X, y, w)
    request.getfixturevalue("client")
    for found, value in zip(answers(store, X, y, w), expected, strict=True):
        np.testing.assert_array_equal(found, value)


def test_models__survive_their_cluster_if_they_are_pickled_or_saved(cluster, tmp_path):
    X, y, _ = data(100)
    with Client(cluster):
        model = fitted(X, y)
        features = NystromTransformer(KERNEL, 30, random_state=0).fit(X)
        expected, B = model.predict(X), features.transform(X)
        copies = pickle.loads(pickle.dumps((model, features)))
        model.save(tmp_path / "model.zarr")
    np.testing.assert_array_equal(copies[0].predict(X), expected)
    np.testing.assert_array_equal(copies[1].transform(X), B)
    np.testing.assert_array_equal(daskrr.load(tmp_path / "model.zarr").predict(X), expected)
    with pytest.raises(SourceUnreachable, match="are gone with the scheduler that held them"):
        model.predict(X)


@pytest.mark.parametrize("on_cluster", [False, True])
@pytest.mark.slow
def test_load__gives_back_all_that_the_model_can_do(on_cluster, request, tmp_path):
    X, y, w = data(100, t=2)
    if on_cluster:
        request.getfixturevalue("client")
    model = selected(X[:60], y[:60], w[:60], fit_intercept=True)
    model.save(tmp_path / "model.zarr")
    loaded = daskrr.load(tmp_path / "model.zarr")
    assert (loaded.kernel_, loaded.ridge_) == (model.kernel_, model.ridge_)
    store = da.from_array(X, chunks=(30, 2))
    for one, other in zip(model.predict(store, return_std=True), loaded.predict(store, return_std=True), strict=True):
        np.testing.assert_array_equal(one.compute(), other.compute())
    np.testing.assert_array_equal(
        model.diagnose(X[:60], y[:60], w[:60]).cooks_distance, loaded.diagnose(X[:60], y[:60], w[:60]).cooks_distance
    )
    for one in (model, loaded):
        one.partial_fit(X[60:], y[60:], w[60:])
    np.testing.assert_allclose(loaded.predict(X), model.predict(X), rtol=1e-12)
    assert loaded.risk_inflation_ == model.risk_inflation_


def test_predict_to_zarr__writes_standard_errors_too(tmp_path):
    X, y, _ = data(100, t=2)
    model = fitted(X, y)
    mean, std = model.predict(X, return_std=True)
    about = model.predict_to_zarr(X, tmp_path / "out.zarr", return_std=True)
    assert about["arrays"] == ["predictions", "standard_errors"]
    group = da.from_zarr(str(tmp_path / "out.zarr"), component="standard_errors").compute()
    np.testing.assert_allclose(group, std, rtol=1e-12)
    found = da.from_zarr(str(tmp_path / "out.zarr"), component="predictions").compute()
    np.testing.assert_allclose(found, mean, rtol=1e-12)


# --- scikit-learn -------------------------------------------------------------------------------------

EXPECTED_FAILURES = {
    "NystromKernelRidgeCV": {
        "check_sample_weight_equivalence_on_dense_data": "landmarks and medians are drawn by row, so that repeating "
        "rows draws others",
    },
    "NystromTransformer": {},
}
MODELS = [
    NystromKernelRidgeCV(ridges=[1e-3, 1e-1], landmarks=20, random_state=0),
    NystromTransformer(landmarks=20, random_state=0),
]
CHECKS = parametrize_with_checks(MODELS, expected_failed_checks=lambda model: EXPECTED_FAILURES[type(model).__name__])


def name_of(pair):
    check = (pair.values if hasattr(pair, "values") else pair)[1]
    return getattr(check, "func", check).__name__


# One check wants an environment variable that changes SciPy for the whole process; it would be skipped.
@pytest.mark.parametrize(
    ("estimator", "check"),
    [pair for pair in CHECKS.args[1] if name_of(pair) != "check_array_api_input"],
    ids=lambda value: getattr(getattr(value, "func", value), "__name__", type(value).__name__),
)
@pytest.mark.slow
def test_contract__of_scikit_learn(estimator, check):
    check(estimator)
