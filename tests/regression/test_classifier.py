"""The classifier against the regression of its targets, dense algebra, scikit-learn's weights and its contract."""

import dask.array as da
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import strategies as st
from sklearn.calibration import CalibratedClassifierCV
from sklearn.kernel_ridge import KernelRidge
from sklearn.model_selection import GridSearchCV
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.estimator_checks import parametrize_with_checks
from strategies import as_zarr
from variants import examples, slow_but

import daskrr
from daskrr import NystromKernelRidgeClassifier, NystromKernelRidgeCV
from daskrr.apps.cli import main
from daskrr.errors import InvalidData, InvalidParameter, SourceUnreachable
from daskrr.kernels import Gaussian

KERNEL, RIDGE = Gaussian(1.0), 1e-3
NAMES = np.array(["ant", "bee", "cat", "dog"])


def data(n=120, k=3, seed=0):
    """Rows, and codes of their classes, which overlap."""
    generator = np.random.default_rng(seed)
    X = generator.standard_normal((n, 2))
    angle = np.arctan2(X[:, 1], X[:, 0]) + 0.3 * generator.standard_normal(n)
    return X, np.floor((angle % (2 * np.pi)) / (2 * np.pi) * k).astype(int) % k, generator.uniform(0.2, 3.0, n)


def fitted(X, y, w=None, kernel=KERNEL, ridges=RIDGE, landmarks=30, **options):
    return NystromKernelRidgeClassifier(kernel, ridges, landmarks, random_state=0, **options).fit(X, y, w)


def signs(codes, k):
    """Targets of plus and minus one."""
    return 2.0 * (codes == 1) - 1 if k == 2 else 2.0 * (codes[:, None] == np.arange(k)) - 1


# --- What is fitted -----------------------------------------------------------------------------------


@examples(5, 15, st.integers(0, 10**6), st.integers(2, 4), st.floats(-4, 0))
def test_decision_function__with_every_row_as_a_landmark_is_exact(seed, k, exponent):
    X, codes, _ = data(60, k, seed)
    codes[:k] = np.arange(k)
    ridge = 10.0**exponent
    model = fitted(X, NAMES[codes], ridges=ridge, landmarks=None, sampling=np.arange(60), fit_intercept=False)
    dense = KernelRidge(alpha=60 * ridge, kernel="rbf", gamma=0.5).fit(X, signs(codes, k))
    new = np.vstack([X, 2 * X])
    found, expected = model.decision_function(new), dense.predict(new)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    decided = (found > 0).astype(int) if k == 2 else found.argmax(axis=1)
    assert (model.predict(new) == NAMES[decided]).all()


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_fit__chooses_the_ridge_of_the_regression_by_leave_one_out(k, weighted):
    X, codes, w = data(k=k)
    w = w if weighted else None
    ridges = np.logspace(-6, 0, 7)
    model = fitted(X, codes, w, ridges=ridges)
    expected = NystromKernelRidgeCV([KERNEL], ridges, 30, fit_intercept=True, random_state=0)
    expected.fit(X, signs(codes, k), w)
    assert model.ridge_ == expected.ridge_
    assert ridges[0] < model.ridge_ < ridges[-1]
    np.testing.assert_allclose(model.regression_.cv_results_["errors"], expected.cv_results_["errors"])
    np.testing.assert_allclose(model.decision_function(X), expected.predict(X), atol=1e-9)


def test_fit__chooses_a_width_where_no_kernel_is_given():
    X, codes, _ = data()
    model = NystromKernelRidgeClassifier(landmarks=30, random_state=0).fit(X, codes)
    assert len(model.regression_.cv_results_["kernels"]) == 4
    assert model.kernel_ in model.regression_.cv_results_["kernels"]


@pytest.mark.parametrize("labels", [NAMES, np.array([7, -2, 3]), np.array([0.0, 5.0, 2.0]), NAMES.astype(object)])
def test_predict__gives_labels_as_they_were(labels):
    X, codes, _ = data()
    y = labels[codes]
    model = fitted(X, y)
    assert model.classes_.tolist() == sorted(set(y))
    assert model.classes_.dtype == model.predict(X).dtype == y.dtype
    assert model.score(X, y) == (model.predict(X) == y).mean() > 0.7
    assert (model.predict(X) == labels[fitted(X, codes).predict(X)]).all()


# --- Weights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("class_weight", ["balanced", {"ant": 5.0, "cat": 0.1}, {}])
def test_class_weight__is_a_weight_of_rows(class_weight):
    X, codes, _ = data()
    y = NAMES[np.where(codes == 1, codes, 0) + codes // 2 * 2]
    model = fitted(X, y, class_weight=class_weight)
    expected = fitted(X, y, compute_sample_weight(class_weight, y))
    np.testing.assert_allclose(model.decision_function(X), expected.decision_function(X), atol=1e-8)


def test_class_weight__multiplies_sample_weights_and_balances_their_sums():
    X, codes, w = data()
    sums = np.bincount(codes, w)
    whole = w * (w.sum() / (3 * sums))[codes]
    model = fitted(X, codes, w, class_weight="balanced")
    np.testing.assert_allclose(model.decision_function(X), fitted(X, codes, whole).decision_function(X), atol=1e-8)
    np.testing.assert_allclose(np.bincount(codes, whole), w.sum() / 3)


def test_class_weight__leaves_whole_rows_out():
    """A row of a class of weight 3 is one row, not three of which two are left."""
    X, codes, _ = data()
    ridges = np.logspace(-6, 0, 7)
    model = fitted(X, codes, ridges=ridges, class_weight={0: 3.0})
    expected = NystromKernelRidgeCV(
        [KERNEL], ridges, 30, fit_intercept=True, weight_meaning="precision", random_state=0
    )
    expected.fit(X, signs(codes, 3), np.where(codes == 0, 3.0, 1.0))
    np.testing.assert_allclose(model.regression_.cv_results_["errors"], expected.cv_results_["errors"])


# --- Sources ------------------------------------------------------------------------------------------


def sources(X, y, w, folder):
    yield da.from_array(X, chunks=(30, 2)), da.from_array(y, chunks=17), da.from_array(w, chunks=11)
    yield as_zarr(X, (25, 2)), as_zarr(y, (7,)), as_zarr(w, (80,))
    for name, values, chunks in (("X", X, (25, 2)), ("y", y, (7,)), ("w", w, (9,))):
        as_zarr(values, chunks, str(folder / name))
    yield str(folder / "X"), folder / "y", str(folder / "w")
    yield X, da.from_array(y, chunks=17), w
    yield da.from_array(X, chunks=(30, 2)), y, w


@pytest.mark.parametrize("class_weight", slow_but([None, "balanced"], "balanced"))
def test_fit__takes_every_source_in_chunks_of_its_own(class_weight, tmp_path):
    X, codes, w = data()
    y = 10 * codes - 5
    model = fitted(X, y, w, class_weight=class_weight)
    for rows, labels, weights in sources(X, y, w, tmp_path):
        other = fitted(rows, labels, weights, class_weight=class_weight)
        assert other.classes_.tolist() == [-5, 5, 15]
        np.testing.assert_allclose(other.decision_function(X), model.decision_function(X), atol=1e-8)
        found = other.predict(rows)
        assert isinstance(found, np.ndarray if rows is X else da.Array)
        np.testing.assert_array_equal(found, model.predict(X))
        assert other.score(rows, labels, weights) == pytest.approx(model.score(X, y, w))


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.float32])
def test_fit__takes_lazy_labels_of_every_kind_of_number(dtype):
    X, codes, _ = data(k=2)
    y = codes.astype(dtype)
    model = fitted(X, da.from_array(y, chunks=50))
    assert model.classes_.dtype == dtype
    np.testing.assert_array_equal(model.predict(X), fitted(X, y).predict(X))


def test_score__counts_labels_that_are_not_known_as_wrong():
    X, codes, _ = data()
    model, lazy = fitted(X, NAMES[codes]), da.from_array(X, chunks=(50, 2))
    y = NAMES[codes]
    assert model.score(lazy, y) == pytest.approx(model.score(X, y))
    y[:60] = "emu"
    assert model.score(lazy, y) == pytest.approx((model.predict(X)[60:] == y[60:]).mean() / 2)


@pytest.mark.slow
def test_fit__has_the_same_bits_on_a_cluster(request, tmp_path):
    X, codes, w = data(600)
    rows, labels, weights = (
        as_zarr(values, (100, *values.shape[1:]), str(tmp_path / name))
        for name, values in (("X", X), ("y", codes), ("w", w))
    )
    local = fitted(rows, labels, weights, class_weight="balanced")
    expected = local.decision_function(rows).compute()
    request.getfixturevalue("client")
    remote = fitted(rows, labels, weights, class_weight="balanced")
    np.testing.assert_array_equal(remote.decision_function(rows).compute(), expected)
    assert remote.score(rows, labels) == local.score(X, codes)
    with pytest.raises(SourceUnreachable, match="in the memory of this process"):
        fitted(rows, as_zarr(codes, (100,)))


# --- Saving -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "class_weight"),
    [
        (NAMES, {"bee": 2.0}),
        (NAMES.astype(object), None),
        (np.array([3, 1, 2]), {1: 2.0, 3: 0.5}),
        (np.array([True, False, True]), "balanced"),
        (np.array([0.0, 1.0, 2.0], np.float32), {0.0: 2.0}),
    ],
)
def test_load__gives_back_classes_and_parameters(labels, class_weight, tmp_path):
    X, codes, _ = data()
    model = fitted(X, labels[codes], class_weight=class_weight)
    model.save(tmp_path / "model.zarr")
    loaded = daskrr.load(tmp_path / "model.zarr")
    assert type(loaded) is NystromKernelRidgeClassifier
    assert loaded.get_params() == model.get_params()
    assert loaded.classes_.dtype == model.classes_.dtype
    assert loaded.classes_.tolist() == model.classes_.tolist()
    np.testing.assert_array_equal(loaded.decision_function(X), model.decision_function(X))
    np.testing.assert_array_equal(loaded.landmarks_, model.landmarks_)
    assert loaded.summary() == model.summary()
    assert loaded.set_params(class_weight=None).fit(X, codes).classes_.tolist() == [0, 1, 2]


def test_predict_command__refuses_a_classifier(tmp_path):
    X, codes, _ = data()
    fitted(X, codes).save(tmp_path / "model.zarr")
    as_zarr(X, (50, 2), str(tmp_path / "X"))
    found = CliRunner().invoke(main, ["predict", *(str(tmp_path / name) for name in ("model.zarr", "X", "out.zarr"))])
    assert found.exit_code != 0
    assert "is a NystromKernelRidgeClassifier: predict with it in Python" in found.output


def test_save__needs_a_fitted_model(tmp_path):
    with pytest.raises(ValueError, match="is not fitted yet"):
        NystromKernelRidgeClassifier().save(tmp_path / "model.zarr")


# --- Bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": np.zeros(120)}, "y has one class only, 0: a classifier needs at least 2 classes"),
        ({"y": da.zeros(120, dtype=int)}, "y has one class only, 0"),
        ({"y": np.linspace(0, 1, 120)}, "Unknown label type: continuous"),
        ({"y": da.linspace(0, 1, 120, chunks=50)}, "hold 0.00.*: labels are whole"),
        ({"y": da.arange(120).astype(float) / da.where(da.arange(120) == 7, 0, 1)}, "of y hold NaN or infinity"),
        ({"y": np.zeros(119, int)}, "inconsistent numbers of samples"),
        ({"y": da.zeros(119, dtype=int)}, "X has 120 rows and y has 119: one label per row"),
        ({"y": da.zeros((120, 2), dtype=int)}, r"y must have 1 dimension\(s\)"),
        ({"class_weight": "heavy"}, "class_weight must be None, 'balanced' or a dict of weights, got 'heavy'"),
        ({"class_weight": {0: -1.0}}, "the weight of class 0 must be finite and not negative, got -1.0"),
        ({"class_weight": {9: 1.0}}, r"class_weight has 9, which is none of the classes \[0, 1, 2\]"),
        ({"class_weight": {0: 0.0, 1: 0.0, 2: 0.0}}, "every sample weight is zero"),
        ({"kernel": "sigmoid"}, "unknown kernel 'sigmoid'"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
def test_fit__refuses_bad_input(change, message):
    X, codes, _ = data()
    with pytest.raises((InvalidData, InvalidParameter, ValueError), match=message):
        fitted(**({"X": X, "y": codes} | change))


def test_fit__refuses_a_quantity_for_labels():
    with pytest.raises(InvalidData, match="y has 3000 different labels or more, and a classifier takes up to 1000"):
        fitted(np.zeros((3000, 1)), da.arange(3000, chunks=3000))


# --- scikit-learn -------------------------------------------------------------------------------------


def test_predict_proba__is_absent_and_made_by_calibration():
    X, codes, _ = data(300)
    model = NystromKernelRidgeClassifier(KERNEL, RIDGE, 30, random_state=0)
    assert not hasattr(model, "predict_proba")
    found = CalibratedClassifierCV(model, cv=3).fit(X, codes).predict_proba(X)
    np.testing.assert_allclose(found.sum(axis=1), 1.0)
    assert (found.argmax(axis=1) == codes).mean() > 0.7


@pytest.mark.slow
def test_model__can_be_searched_over_parameters_of_its_kernel():
    X, codes, _ = data()
    model = NystromKernelRidgeClassifier("gaussian", RIDGE, 30, random_state=0)
    search = GridSearchCV(model, {"kernel__length_scale": [100.0, 1.0], "class_weight": [None, "balanced"]}, cv=3)
    assert search.fit(X, NAMES[codes]).best_estimator_.kernel == Gaussian(1.0)


EXPECTED_FAILURES = {
    "check_sample_weight_equivalence_on_dense_data": "landmarks are drawn by row, so that repeating rows draws others",
}
CHECKS = parametrize_with_checks(
    [NystromKernelRidgeClassifier(ridges=[1e-3, 1e-1], landmarks=20, random_state=0)],
    expected_failed_checks=lambda model: EXPECTED_FAILURES,
)


def name_of(pair):
    check = (pair.values if hasattr(pair, "values") else pair)[1]
    return getattr(check, "func", check).__name__


# One check wants an environment variable that changes SciPy for the whole process; it would be skipped.
@pytest.mark.parametrize(
    ("estimator", "check"),
    [pair for pair in CHECKS.args[1] if name_of(pair) != "check_array_api_input"],
    ids=lambda value: getattr(getattr(value, "func", value), "__name__", "model"),
)
@pytest.mark.slow
def test_contract__of_scikit_learn(estimator, check):
    check(estimator)
