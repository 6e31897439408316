"""Classification by kernel ridge regression on targets of plus and minus one."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

import dask.array as da
import numpy as np
from numpy.typing import DTypeLike, NDArray
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from daskrr.errors import InvalidData
from daskrr.kernels import Kernel
from daskrr.nystrom.row_weights import is_lazy, open_weights
from daskrr.nystrom.strategies import Certify, Tolerance
from daskrr.regression.block_tasks import predict_task
from daskrr.regression.cross_validation import NystromKernelRidgeCV
from daskrr.regression.estimator import SketchedEstimator, all_or_nothing
from daskrr.regression.factors import Coefficients, predictor
from daskrr.regression.fitting import FREQUENCY, PRECISION
from daskrr.regression.labels import Labels, check_class_weight, codes_of, open_labels
from daskrr.runtime.inputs import readable
from daskrr.runtime.progress import Reporter
from daskrr.runtime.rows import ConstantRows, NumpyRows, Rows, open_rows, pieces, viewed


class NystromKernelRidgeClassifier(ClassifierMixin, SketchedEstimator):
    """Least-squares classification on the span of sampled kernel columns: one regression for all classes.

    Every class is a target of :class:`daskrr.NystromKernelRidgeCV`, 1 on its rows and -1 on the others (two classes are
    one target), and a row belongs to the class of the largest prediction. All targets share landmarks, passes, factors
    and the ridge, whose mean squared leave-one-out error is least.

    There is no ``predict_proba``: values of a least-squares fit are no probabilities, and rows that were fitted to say
    nothing of how far they are from being some. ``sklearn.calibration.CalibratedClassifierCV`` makes some of
    :meth:`decision_function` on rows held out.

    Parameters
    ----------
    kernel
        A kernel of :mod:`daskrr.kernels`, its name or its specification; None chooses, by leave-one-out too, among
        Gaussians of a quarter, half, once and twice the median distance.
    ridges
        λ > 0 to choose from, or one; None: 30 from 1e-8 to 1.
    landmarks, sampling
        As of :func:`daskrr.leverage_scores`; so are dtype, missing_chunks and block_rows.
    class_weight
        By which the weights of the rows of a class are multiplied: None, a dict of weights by class (1 where one is
        left out), or ``"balanced"``, with which every class has the same weight in all. With class weights
        leave-one-out leaves out whole rows; without, where sample weights count repeats, one of them.
    fit_intercept, certify, random_state, progress
        As of :class:`daskrr.NystromKernelRidge`.

    Attributes
    ----------
    classes_
        (k,) labels, ascending.
    regression_
        The fitted :class:`daskrr.NystromKernelRidgeCV`: ``cv_results_``, ``risk_inflation_`` and all else.
    kernel_, ridge_, landmarks_
        Of the regression.

    Examples
    --------
    >>> import numpy as np, daskrr
    >>> X = np.random.default_rng(0).standard_normal((300, 2))
    >>> y = np.where(X[:, 0] * X[:, 1] > 0, "same", "other")
    >>> model = daskrr.NystromKernelRidgeClassifier("gaussian", landmarks=40, random_state=0).fit(X, y)
    >>> bool(model.score(X, y) > 0.9)
    True
    """

    classes_: NDArray
    regression_: NystromKernelRidgeCV

    def __init__(
        self,
        kernel: Kernel | dict | str | None = None,
        ridges: float | Sequence[float] | None = None,
        landmarks: int | Tolerance | None = None,
        *,
        class_weight: Mapping[Any, float] | str | None = None,
        sampling: Any = "residual",
        fit_intercept: bool = True,
        certify: bool | Certify = True,
        dtype: DTypeLike = "float64",
        missing_chunks: str = "refuse",
        block_rows: int | None = None,
        random_state: int | None = None,
        progress: Reporter | bool | None = False,
    ) -> None:
        self.kernel = kernel
        self.ridges = ridges
        self.landmarks = landmarks
        self.class_weight = class_weight
        self.sampling = sampling
        self.fit_intercept = fit_intercept
        self.certify = certify
        self.dtype = dtype
        self.missing_chunks = missing_chunks
        self.block_rows = block_rows
        self.random_state = random_state
        self.progress = progress

    @all_or_nothing
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the model to rows X (n, d) with labels y (n,) and weights (n,), by default all 1.

        Labels in memory may be of any kind; of Dask and Zarr arrays they are whole numbers, of which one light pass
        finds the classes.

        Raises
        ------
        InvalidParameter, InvalidData, DoesNotFit, SourceUnreachable
            Before any long work, as far as metadata tell.
        KernelNotPositive, RidgeTooSmall, CheckFailed
            When the numbers cannot be trusted.
        """
        check_class_weight(self.class_weight)
        X, y = self._checked(X, y)
        rows = open_rows(X, missing_chunks=self.missing_chunks)
        weights = None if sample_weight is None else open_weights(rows, sample_weight, self.missing_chunks)
        labels = self._labels(rows, y, weights)
        regression = self._regression()
        regression.fit(X, labels.targets, labels.weighted(self.class_weight, weights))
        self.classes_, self.regression_ = labels.classes, regression
        self.n_features_in_ = rows.shape[1]
        self._remember_features(rows)
        return self

    def _checked(self, X: Any, y: Any) -> tuple[Any, Any]:
        """Rows and labels: what is in memory is checked by scikit-learn."""
        X, y = viewed(X, "X"), readable(y, "y")
        if is_lazy(X) or is_lazy(y):
            X = self._validated(X)
            y = y if is_lazy(y) else column_or_1d(y, warn=True)
        else:
            X, y = validate_data(self, X, y, dtype=[np.float64, np.float32])
        if not is_lazy(y):
            check_classification_targets(y)
        return X, y

    def _labels(self, rows: Rows, y: Any, weights: Rows | None) -> Labels:
        n_labels = open_rows(y, ndim=1, name="y").n_rows if is_lazy(y) else len(y)
        if n_labels != rows.n_rows:
            raise InvalidData(f"X has {rows.n_rows} rows and y has {n_labels}: one label per row is needed.")
        return open_labels(y, self.missing_chunks, weights)

    def _regression(self) -> NystromKernelRidgeCV:
        """The regression of the targets, not fitted yet."""
        shared = {name: value for name, value in self.get_params(deep=False).items() if name not in OWN}
        return NystromKernelRidgeCV(
            kernels=None if self.kernel is None else [self.kernel],
            weight_meaning=FREQUENCY if self.class_weight is None else PRECISION,
            **shared,
        )

    # --- Using ------------------------------------------------------------------------------------------

    @property
    def kernel_(self) -> Kernel:  # type: ignore[override]
        """With every parameter resolved."""
        return self.regression_.kernel_

    @property
    def ridge_(self) -> float:
        """The ridge that was chosen."""
        return self.regression_.ridge_

    @property
    def landmarks_(self) -> NDArray[np.float64]:
        """(r, d) rows whose kernel columns are used; brought here from where the factors are."""
        check_is_fitted(self)
        return self.regression_.landmarks_

    def decision_function(self, X: Any) -> Any:
        """Predictions of the targets, (m,) of two classes, above zero for the second, else (m, k); lazy for lazy X."""
        check_is_fitted(self)
        return self.regression_.predict(self._new_rows(X))

    def predict(self, X: Any) -> Any:
        """Labels (m,) of rows (m, d): a NumPy array for what is in memory, else a lazy Dask array."""
        values = self.decision_function(X)
        if not isinstance(values, da.Array):
            return self.classes_[decided(values)]
        find = partial(_labels_of, self.classes_)
        return da.map_blocks(find, values, dtype=self.classes_.dtype, drop_axis=list(range(1, values.ndim)))

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The share of rows, or of their weight, with the right label; out of core for Dask and Zarr input."""
        check_is_fitted(self)
        X, y, sample_weight = viewed(X, "X"), readable(y, "y"), readable(sample_weight, "sample_weight")
        if not any(is_lazy(one) for one in (X, y, sample_weight)):
            return super().score(X, y, sample_weight)
        rows, values = self._new_rows(X), self.classes_
        if is_lazy(y):
            labels = open_rows(y, ndim=1, missing_chunks=self.missing_chunks, name="y")
        else:
            labels, values = NumpyRows(codes_of(column_or_1d(y), self.classes_)), np.arange(len(self.classes_))
        if labels.n_rows != rows.n_rows:
            raise InvalidData(f"X has {rows.n_rows} rows and y has {labels.n_rows}: one label per row is needed.")
        weights: Rows = ConstantRows(rows.n_rows, 1.0)
        if sample_weight is not None:
            weights = open_weights(rows, sample_weight, self.missing_chunks)
        work = partial(_count_right, self.kernel_, values)
        right, whole = sum(self.regression_._map("score", predictor, work, rows, labels, weights).values())
        return float(right / whole)

    def summary(self) -> dict[str, Any]:
        """What is known about the fitted model, ready for JSON."""
        check_is_fitted(self)
        return self.regression_.summary() | {"classes": self.classes_.tolist()}

    def save(self, path: str | os.PathLike, *, overwrite: bool = False) -> None:
        """Write the fitted model to a Zarr group: arrays and JSON, no pickles; :func:`daskrr.load` reads it.

        Its parameters are part of it, as of a regression's.
        """
        check_is_fitted(self)
        around = {
            "estimator": type(self).__name__,
            "parameters": self.saved_parameters,
            "classes": self.classes_.tolist(),
            "dtype": self.classes_.dtype.str,
            "feature_names": self.saved_names,
        }
        self.regression_.save_within(around, path, overwrite=overwrite)

    @classmethod
    def around(cls, regression: NystromKernelRidgeCV, saved: Mapping[str, Any]) -> Self:
        """What was saved, with its regression."""
        model = cls(**saved["parameters"])
        model.regression_, model.n_features_in_ = regression, regression.n_features_in_
        model.features_ = regression.features_
        model.classes_ = np.array(saved["classes"], np.dtype(saved["dtype"]))
        if saved["feature_names"] is not None:
            model.feature_names_in_ = np.array(saved["feature_names"], object)
        return model


# Parameters that a regression does not have.
OWN = ("kernel", "class_weight")


def decided(values: NDArray[np.float64]) -> NDArray[np.intp]:
    """(m,) number of the class of every row of (m,) or (m, k) predictions."""
    return (values > 0).astype(np.intp) if values.ndim == 1 else np.argmax(values, axis=1)


def _labels_of(classes: NDArray, values: NDArray[np.float64]) -> NDArray:
    return classes[decided(values)]


def _count_right(
    kernel: Kernel, classes: NDArray, payload: Coefficients, source: Any, start: int, labels: Any, weights: Any
) -> NDArray[np.float64]:
    """(2,) weight of the rows that are predicted right, and of all."""
    found = predict_task(kernel, payload, source, start)
    codes = decided(found[:, 0] if len(classes) == 2 else found)
    right = codes == codes_of(np.concatenate(list(pieces(labels))), classes)
    w = np.concatenate([np.asarray(piece, np.float64) for piece in pieces(weights)])
    return np.array([w[right].sum(), w.sum()])
