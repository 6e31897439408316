"""Nyström kernel ridge regression on rows that need not fit in memory."""

import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Self

import dask.array as da
import numpy as np
import zarr
from numpy.typing import DTypeLike, NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from daskrr import __version__
from daskrr.arguments import Job, Options, prepare
from daskrr.engine.opaque import seal, unseal
from daskrr.engine.passes import Run, as_array, block_rows, constant, executor, split, task
from daskrr.engine.plan import Workers, check_fits
from daskrr.engine.progress import Reporter, reporter
from daskrr.engine.rows import JoinedRows, Rows, open_rows, pieces
from daskrr.engine.storage import RESULT_KEY, OutputStore, open_stored, write_block
from daskrr.errors import InvalidData, InvalidParameter
from daskrr.growth import grow_until_tight
from daskrr.kernels import Gaussian, Kernel, as_kernel, from_spec
from daskrr.kernels.weighted import Weighted
from daskrr.numerics import blas
from daskrr.numerics.algebra import check_resolution
from daskrr.numerics.tiles import LEGAL_OVERFLOW, BlockReader, check_overflow, fill_tile, scratch_tile, tiles_of
from daskrr.nystrom.audit import audit, audit_draws
from daskrr.nystrom.pass1 import Chosen, Settings, first_pass, whiten
from daskrr.nystrom.rounds import choose_landmarks
from daskrr.nystrom.sampling import check_weights
from daskrr.nystrom.selection import fetch_rows, resolve_kernel, weigh
from daskrr.nystrom.sketch import NystromSketch

MODEL = "a model"
PREDICTIONS = "predictions"
MODEL_VERSION = 1


@dataclass(frozen=True)
class RiskInflation:
    """By which factor the in-sample risk may exceed that of exact kernel ridge regression at the same ridge.

    The noise is taken to have the same variance in every row, or one in inverse proportion to its weight, by which the
    risk is weighted then. ``failure_probability`` is that of the bound.
    """

    factor: float
    failure_probability: float


class NystromKernelRidge(RegressorMixin, BaseEstimator):
    """Kernel ridge regression on the span of sampled kernel columns, fitted in one pass over the rows.

    Minimises Σ_i w_i·(y_i − f(x_i))² + λ·Σw·‖f‖² over f = Σ_j α_j·k(·, x_j) + intercept, with x_j the landmarks. X, y
    and the weights may be NumPy, Dask or Zarr arrays or paths of Zarr arrays, each in chunks of its own; only NumPy
    arrays and what converts to them are held in memory.

    Parameters
    ----------
    kernel
        A kernel of :mod:`daskrr.kernels` or its specification; None is a Gaussian with the median distance.
    ridge
        λ > 0.
    n_landmarks, sampling, tolerance, absolute_tolerance, max_landmarks, rounds, replacement, epsilon, sketch_ridge
        As of :func:`daskrr.leverage_scores`; so are dtype, missing_chunks and block_rows.
    fit_intercept
        Whether f has a constant part that is not penalised.
    certify, failure_probability
        Whether to bound how much is lost to the sampling of columns, and how certain that shall be.
    random_state
        Seed of the landmarks; None draws one.
    progress
        None: a bar on a terminal; False: nothing.

    Attributes
    ----------
    landmarks_, dual_coef_, intercept_
        (r, d), (r,) or (r, t), and a number or (t,): f(x) = k(x, landmarks_) · dual_coef_ + intercept_.
    kernel_
        With every parameter resolved.
    effective_dimension_
        Trace of the smoother.
    risk_inflation_
        Certified :class:`RiskInflation`, or None without ``certify``.
    residual_squares_, target_squares_
        (t,) sums over the training rows, with weights of mean 1: of squared residuals, and of squared targets (about
        their mean with an intercept).
    n_rows_
        Number of training rows.

    Examples
    --------
    >>> import numpy as np, daskrr
    >>> X = np.linspace(0, 6, 200)[:, None]
    >>> model = daskrr.NystromKernelRidge(daskrr.kernels.Gaussian(1.0), 1e-6, n_landmarks=30, random_state=0)
    >>> bool(model.fit(X, np.sin(X[:, 0])).score(X, np.sin(X[:, 0])) > 0.999)
    True
    """

    def __init__(
        self,
        kernel: Kernel | dict | None = None,
        ridge: float = 1e-3,
        n_landmarks: int | None = None,
        *,
        sampling: Any = "residual",
        tolerance: float | None = None,
        absolute_tolerance: float | None = None,
        max_landmarks: int | None = None,
        rounds: int = 2,
        replacement: bool | None = None,
        epsilon: float = 0.1,
        sketch_ridge: float | None = None,
        fit_intercept: bool = False,
        certify: bool = True,
        failure_probability: float = 1e-6,
        dtype: DTypeLike = "float64",
        missing_chunks: str = "refuse",
        block_rows: int | None = None,
        random_state: int | None = None,
        progress: Reporter | bool | None = False,
    ) -> None:
        self.kernel = kernel
        self.ridge = ridge
        self.n_landmarks = n_landmarks
        self.sampling = sampling
        self.tolerance = tolerance
        self.absolute_tolerance = absolute_tolerance
        self.max_landmarks = max_landmarks
        self.rounds = rounds
        self.replacement = replacement
        self.epsilon = epsilon
        self.sketch_ridge = sketch_ridge
        self.fit_intercept = fit_intercept
        self.certify = certify
        self.failure_probability = failure_probability
        self.dtype = dtype
        self.missing_chunks = missing_chunks
        self.block_rows = block_rows
        self.random_state = random_state
        self.progress = progress

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.target_tags.single_output = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the model to rows X (n, d) with targets y, (n,) or (n, t), and weights (n,), by default all 1.

        Raises
        ------
        InvalidParameter, InvalidData, DoesNotFit, SourceUnreachable
            Before any long work, as far as metadata tell.
        KernelNotPositive, RidgeTooSmall, CheckFailed
            When the numbers cannot be trusted.
        """
        rows, kernel, targets, weights = self._checked(X, y, sample_weight)
        for source in (rows, targets, weights):
            if source is not None:
                executor(uuid.uuid4().hex).check(source)
        if weights is not None:
            rows, kernel = _weighted(rows, kernel, weights)
        job = prepare(rows, kernel, self.ridge, self.n_landmarks, self._options())
        check_fits(job.plan, Workers.of(job.executor))
        with reporter(self.progress) as report:
            run = Run(job.name, job.rows, split(rows.n_rows, job.plan.block_rows), job.executor, report)
            settings = replace(job.settings, kernel=resolve_kernel(run, kernel, job.scheme.seed))
            chosen = _choose(job, run, settings)
            self._solve(job, run, settings, chosen, targets)
        self.n_features_in_ = rows.shape[1] - isinstance(kernel, Weighted)
        return self

    def check(self, X: Any, y: Any, sample_weight: Any = None) -> None:
        """Raise what :meth:`fit` would raise before any long work, without a cluster and without reading rows."""
        rows, kernel, *_ = self._checked(X, y, sample_weight)
        prepare(rows, kernel, self.ridge, self.n_landmarks, self._options())

    def _checked(self, X: Any, y: Any, sample_weight: Any) -> tuple[Rows, Kernel, Rows, Rows | None]:
        if np.ndim(self.ridge):
            raise InvalidParameter(f"a model has one ridge, got {self.ridge!r}")
        rows, targets = self._training_rows(X, y)
        weights = None if sample_weight is None else _weight_rows(rows, sample_weight, self.missing_chunks)
        if self.kernel is None and rows.n_rows == 1:
            raise InvalidData("X has 1 sample, of which no median distance can be taken: give a kernel.")
        return rows, Gaussian("median") if self.kernel is None else as_kernel(self.kernel), targets, weights

    def _options(self) -> Options:
        return Options(
            sampling=self.sampling, tolerance=self.tolerance, absolute_tolerance=self.absolute_tolerance,
            max_landmarks=self.max_landmarks, certify=self.certify, failure_probability=self.failure_probability,
            rounds=self.rounds, replacement=self.replacement, epsilon=self.epsilon, sketch_ridge=self.sketch_ridge,
            random_state=self.random_state, dtype=self.dtype, missing_chunks=self.missing_chunks,
            block_rows=self.block_rows,
        )  # fmt: skip

    def _training_rows(self, X: Any, y: Any) -> tuple[Rows, Rows]:
        if not (_is_lazy(X) or _is_lazy(y)):
            X, y = validate_data(self, X, y, multi_output=True, y_numeric=True, dtype=[np.float64, np.float32])
        rows = open_rows(X, missing_chunks=self.missing_chunks)
        targets = open_rows(y, ndim=None, missing_chunks=self.missing_chunks, name="y")
        if targets.n_rows != rows.n_rows:
            raise InvalidData(f"X has {rows.n_rows} rows and y has {targets.n_rows}: one target per row is needed.")
        return rows, targets

    def _solve(self, job: Job, run: Run, settings: Settings, chosen: Chosen, targets: Rows) -> None:
        """Pass 1 with the targets, and the small algebra."""
        seed, rho = job.scheme.seed, job.failure_probability
        audit_rows = job.scheme.audit_rows if job.certify and rho > 0 else 0
        # These landmarks have an audit of their own, with rows that no round has seen.
        number = 0 if job.target is None else len(job.target.sizes)
        sketch, _ = whiten(run, f"{run.name}-fit", settings, chosen)
        first = first_pass(run, sketch, audit_draws(seed, number, audit_rows), title="fit: gram", targets=targets)
        mean = first.totals.diagonal / sketch.n_rows
        check_resolution(sketch.kernel_error, mean, settings.smallest, sketch.rank, settings.dtype)
        parameters = {
            "dtype": str(settings.dtype), "n_rows": sketch.n_rows, "ridges": list(settings.ridges),
            "intercept": bool(self.fit_intercept),
        }  # fmt: skip
        solved = sketch.algebra.perform("regress", first.gram, parameters)
        self._keep(sketch, solved, single=len(targets.shape) == 1)
        self.risk_inflation_ = None
        if job.certify:
            found = audit(run, sketch, first, audit_rows, rho, seed, number)
            factor = (1.0 + found.delta / sketch.shifts[0]) ** 2
            self.risk_inflation_ = RiskInflation(factor, found.failure_probability)

    def _keep(self, sketch: NystromSketch, solved: dict[str, Any], single: bool) -> None:
        """Set what is known after fitting."""
        kernel, landmarks, coefficients = sketch.kernel, solved["landmarks"], solved["coefficients"][0]
        if isinstance(kernel, Weighted):
            kernel, coefficients = kernel.part, coefficients * landmarks[:, -1:]
            landmarks = landmarks[:, :-1]
        self.kernel_, self.landmarks_ = kernel, landmarks
        self.dual_coef_ = coefficients[:, 0] if single else coefficients
        self.intercept_ = float(solved["intercepts"][0, 0]) if single else solved["intercepts"][0]
        self.effective_dimension_ = float(solved["effective_dimensions"][0])
        self.residual_squares_ = solved["residual_squares"][0]
        self.target_squares_ = solved["target_squares"]
        self.n_rows_ = sketch.n_rows

    def predict(self, X: Any) -> Any:
        """Predictions (m,) or (m, t) of rows (m, d): a NumPy array for what is in memory, else a lazy Dask array."""
        check_is_fitted(self)
        if not _is_lazy(X):
            X = validate_data(self, X, reset=False, dtype=[np.float64, np.float32])
            return self._shaped(_predict(self._model(), [X], 0))
        rows = self._new_rows(X)
        name = uuid.uuid4().hex
        blocks = split(rows.n_rows, block_rows(max(1, len(self.landmarks_)), rows))
        rows = rows.anew(f"predict-{name}")
        model = constant(self._model(), f"model-{name}")
        tasks = [
            task("predict", name, b.index, _predict_source, model, rows.source(b.start, b.stop), b.start)
            for b in blocks
        ]
        return self._shaped(as_array(f"predictions-{name}", tasks, blocks, self._coefficients.shape[1]))

    def _new_rows(self, X: Any) -> Rows:
        rows = open_rows(X, missing_chunks=self.missing_chunks)
        if rows.shape[1] != self.n_features_in_:
            raise InvalidData(
                f"X has {rows.shape[1]} features, but NystromKernelRidge is expecting {self.n_features_in_} features"
            )
        return rows

    @property
    def _coefficients(self) -> NDArray[np.float64]:
        return self.dual_coef_.reshape(len(self.landmarks_), -1)

    def _shaped(self, found: Any) -> Any:
        return found[:, 0] if self.dual_coef_.ndim == 1 else found

    def _model(self) -> bytes:
        return seal((self.kernel_, self.landmarks_, self._coefficients, np.atleast_1d(self.intercept_)))

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R² of the predictions, averaged over targets; out of core for Dask and Zarr input."""
        if not (_is_lazy(X) or _is_lazy(y)):
            return super().score(X, y, sample_weight)
        if sample_weight is not None:
            raise InvalidParameter("sample_weight is supported for arrays in memory only.")
        y = da.from_zarr(y) if isinstance(y, (str, os.PathLike, zarr.Array)) else da.asarray(y)
        predicted = da.asarray(self.predict(X))
        y, predicted = (one.reshape(len(one), -1) for one in (y.rechunk({0: predicted.chunks[0]}), predicted))
        squares, total = da.compute(((y - predicted) ** 2).sum(axis=0), ((y - y.mean(axis=0)) ** 2).sum(axis=0))
        return float(np.mean(1.0 - squares / total))

    def predict_to_zarr(self, X: Any, output: str | os.PathLike, *, overwrite: bool = False) -> dict[str, Any]:
        """Predict rows and write them to the array ``predictions`` of a new Zarr group; workers write whole chunks."""
        check_is_fitted(self)
        began = time.perf_counter()
        with OutputStore(output, overwrite, PREDICTIONS) as store, reporter(self.progress) as report:
            rows = self._new_rows(X)
            name, n_targets = uuid.uuid4().hex, self._coefficients.shape[1]
            shape = (rows.n_rows,) if self.dual_coef_.ndim == 1 else (rows.n_rows, n_targets)
            height = block_rows(max(1, len(self.landmarks_)), rows)
            store.create({"predictions": shape}, height, "target")
            run = Run(name, rows, split(rows.n_rows, height), executor(name), report)
            run.executor.check(rows)
            work = partial(_write_predictions, store.arrays, self._model())
            rows = rows.anew(f"predict-{name}")
            sources = ((b, rows.source(b.start, b.stop)) for b in run.blocks)
            tasks = (task("predict", name, b.index, work, source, b.start) for b, source in sources)
            run.executor.settle(run.collect("predict", tasks))
            summary = {"n_rows": rows.n_rows, "n_targets": n_targets, "input": rows.origin}
            store.commit(summary)
        return summary | {"seconds": time.perf_counter() - began, "output": store.target}

    def summary(self) -> dict[str, Any]:
        """What is known about the fitted model, ready for JSON."""
        check_is_fitted(self)
        inflation = self.risk_inflation_
        with np.errstate(divide="ignore", invalid="ignore"):
            r2 = np.where(self.target_squares_ > 0, 1.0 - self.residual_squares_ / self.target_squares_, 1.0)
        return {
            "kernel": self.kernel_.to_spec(),
            "ridge": float(self.ridge),
            "dtype": str(np.dtype(self.dtype)),
            "fit_intercept": bool(self.fit_intercept),
            "n_rows": self.n_rows_,
            "n_features": self.n_features_in_,
            "n_landmarks": len(self.landmarks_),
            "effective_dimension": self.effective_dimension_,
            "residual_squares": self.residual_squares_.tolist(),
            "target_squares": self.target_squares_.tolist(),
            "training_r2": r2.tolist(),
            "risk_inflation": None if inflation is None else asdict(inflation),
        }

    def save(self, path: str | os.PathLike, *, overwrite: bool = False) -> None:
        """Write the fitted model to a Zarr group: arrays and JSON, no pickles; :func:`daskrr.load` reads it."""
        check_is_fitted(self)
        arrays = {"landmarks": self.landmarks_, "dual_coef": self.dual_coef_, "intercept": np.asarray(self.intercept_)}
        with OutputStore(path, overwrite, MODEL) as output:
            output.write(arrays)
            output.commit({"model_version": MODEL_VERSION, "daskrr": __version__} | self.summary())


def load(path: str | os.PathLike, allow_functions: Sequence[str] = ()) -> NystromKernelRidge:
    """Read a model that :meth:`NystromKernelRidge.save` wrote; it predicts, and can be fitted anew.

    Parameters
    ----------
    allow_functions
        Names of Python functions that the model's kernel may import.

    Raises
    ------
    InvalidData
        There is no model, or one of a version that this one does not read.
    """
    group = open_stored(path, MODEL)
    about: Any = group.attrs[RESULT_KEY]
    if about.get("model_version") != MODEL_VERSION:
        raise InvalidData(
            f"the model has version {about.get('model_version')}, and this daskrr reads version {MODEL_VERSION}."
        )
    kernel = from_spec(about["kernel"], allow_functions)
    model = NystromKernelRidge(kernel, about["ridge"], fit_intercept=about["fit_intercept"], dtype=about["dtype"])
    arrays: dict[str, Any] = {
        name: np.asarray(_array(group, name)[...]) for name in ("landmarks", "dual_coef", "intercept")
    }
    model.kernel_, model.landmarks_, model.dual_coef_ = kernel, arrays["landmarks"], arrays["dual_coef"]
    model.intercept_ = float(arrays["intercept"]) if arrays["intercept"].ndim == 0 else arrays["intercept"]
    model.effective_dimension_, model.n_rows_ = about["effective_dimension"], about["n_rows"]
    model.residual_squares_ = np.array(about["residual_squares"])
    model.target_squares_ = np.array(about["target_squares"])
    model.risk_inflation_ = about["risk_inflation"] and RiskInflation(**about["risk_inflation"])
    model.n_features_in_ = model.landmarks_.shape[1]
    return model


def _array(group: zarr.Group, name: str) -> Any:
    return group[name]


def _is_lazy(array: Any) -> bool:
    """Whether an array is not in memory and must not be brought there."""
    return isinstance(array, (da.Array, zarr.Array, str, os.PathLike))


def _weight_rows(rows: Rows, sample_weight: Any, missing_chunks: str) -> Rows:
    if not _is_lazy(sample_weight):
        sample_weight = np.asarray(sample_weight, np.float64)
        if sample_weight.ndim == 0:
            sample_weight = np.full(rows.n_rows, sample_weight)
    weights = open_rows(sample_weight, ndim=1, missing_chunks=missing_chunks, name="sample_weight")
    if weights.n_rows != rows.n_rows:
        raise InvalidData(f"X has {rows.n_rows} rows and sample_weight has {weights.n_rows}: one per row is needed.")
    return weights


def _weighted(rows: Rows, kernel: Kernel, weights: Rows) -> tuple[Rows, Kernel]:
    """Rows with the root of their weight, scaled to a mean of 1, as one more feature; and the kernel that reads it."""
    name = uuid.uuid4().hex
    run = Run(name, weights, split(weights.n_rows, block_rows(1, weights)), executor(name), lambda event: None)
    source = weights.anew(f"weights-{name}")
    sources = ((b, source.source(b.start, b.stop)) for b in run.blocks)
    total = weigh(run, (task("check-weights", name, b.index, _check_block, one, b.start) for b, one in sources)).total
    if not total > 0:
        raise InvalidData("every sample weight is zero: there is nothing to fit.")
    return JoinedRows(rows, weights, rows.n_rows / total), Weighted(kernel)


def _check_block(source: Any, start: int) -> NDArray[np.float64]:
    found = np.concatenate([np.asarray(piece, np.float64) for piece in pieces(source)])
    check_weights(found, start)
    return found


def _choose(job: Job, run: Run, settings: Settings) -> Chosen:
    if job.target is None:
        return choose_landmarks(run, settings, job.scheme)[0]
    landmarks = grow_until_tight(job, run, settings, job.target).sketch.landmarks
    return Chosen(landmarks, fetch_rows(run, landmarks.indices, "sample-rows-again"))


def _write_predictions(arrays: dict[str, zarr.Array], model: bytes, source: Any, start: int) -> None:
    found = _predict(model, pieces(source), start)
    values = found[:, 0] if arrays["predictions"].ndim == 1 else found
    write_block(arrays, {"predictions": values}, start)


def _predict_source(model: bytes, source: Any, start: int) -> NDArray[np.float64]:
    return _predict(model, pieces(source), start)


@LEGAL_OVERFLOW
@blas.one_thread()
def _predict(model: bytes, parts: Any, first_row: int) -> NDArray[np.float64]:
    """k(x, landmarks) · coefficients + intercept of all rows, tile by tile.

    In float64 whatever the fit used: coefficients are large and of both signs.
    """
    kernel, landmarks, coefficients, intercept = unseal(model)
    columns = kernel.columns(landmarks, np.float64) if len(landmarks) else None
    found = []
    for piece in BlockReader(parts, first_row):
        for rows in tiles_of(piece, len(landmarks)):
            C = scratch_tile(rows.stop - rows.start, len(landmarks), np.dtype(np.float64))
            if columns is not None:
                fill_tile(columns, np.ascontiguousarray(piece[rows]), C)
            found.append(C @ coefficients + intercept)
            check_overflow(found[-1], first_row)
    return np.concatenate(found) if found else np.empty((0, coefficients.shape[1]))
