"""What every fitted regression can do, however its kernel and ridge were found."""

import math
import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
from dask.delayed import Delayed
from numpy.typing import NDArray
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from daskrr.arguments import Job, Options, prepare
from daskrr.engine.feed import reporter
from daskrr.engine.passes import Run, block_rows, executor, split, task
from daskrr.engine.rows import Rows, readable
from daskrr.engine.scheduler import held
from daskrr.engine.storage import OutputStore
from daskrr.errors import InvalidData, InvalidParameter
from daskrr.kernels.weighted import unweighted
from daskrr.numerics.algebra import check_resolution, shift_of
from daskrr.numerics.regress import noise_variance
from daskrr.nystrom.row_weights import is_lazy
from daskrr.nystrom.sampling import Landmarks
from daskrr.nystrom.sketch import NystromSketch
from daskrr.regression.diagnostics import Diagnostics
from daskrr.regression.estimator import SketchedEstimator, all_or_nothing, started
from daskrr.regression.evaluation import (
    diagnose_and_then,
    diagnose_task,
    predict_task,
    r_squared,
    score_task,
    spread_task,
    write_task,
)
from daskrr.regression.pictures import RegressionPictures
from daskrr.regression.saving import write_model
from daskrr.regression.training import FREQUENCY, PRECISION, Deviation, Trained, Training, take_sums

PREDICTIONS = "predictions"


@dataclass(frozen=True)
class RiskInflation:
    """By which factor the in-sample risk may exceed that of exact kernel ridge regression at the same ridge.

    The noise is taken to have the same variance in every row, or one in inverse proportion to its weight, by which the
    risk is weighted then. ``failure_probability`` is that of the bound.
    """

    factor: float
    failure_probability: float


@dataclass(frozen=True)
class Facts:
    """What a fitted model knows besides its factors.

    Attributes
    ----------
    weight
        Sum of the weights of all rows, multiplied by ``scale``.
    scale
        What makes the mean weight of the first fit 1.
    n_counted
        Rows with a weight above zero.
    weight_meaning
        Whether weights count repeats of a row ("frequency") or are inverse variances of its noise up to a common factor
        ("precision").
    origin
        (t,) what is subtracted from targets before they are summed.
    intercept, dtype
        Whether there is one, and in what precision tiles are.
    single
        Whether there is one target, given as a vector.
    n_targets
        How many there are.
    n_landmarks, rank, kernel_error
        Of W, on which round-off depends.
    next_stream
        The stream of audit rows that the audit of more rows draws from.
    """

    weight: float
    scale: float
    n_counted: int
    weight_meaning: str
    origin: list[float]
    intercept: bool
    dtype: str
    single: bool
    n_targets: int
    n_landmarks: int
    rank: int
    kernel_error: float
    next_stream: int

    @property
    def repeat(self) -> float:
        """Scaled weight of one repeat of a row; infinite if weights are no repeats."""
        return self.scale if self.weight_meaning == FREQUENCY else math.inf

    @property
    def n_observations(self) -> float:
        """Rows, each as often as it counts."""
        return self.weight / self.scale if self.weight_meaning == FREQUENCY else self.n_counted


class KernelRidgeModel(RegressorMixin, SketchedEstimator):
    """A kernel ridge regression on the span of sampled kernel columns."""

    ridge_: float
    n_rows_: int
    effective_dimension_: float
    intercept_: Any
    residual_squares_: NDArray[np.float64]
    target_squares_: NDArray[np.float64]
    noise_variance_: Any
    risk_inflation_: RiskInflation | None
    _facts: Facts
    _deviation: Deviation | None
    # What a fit sets besides, to be saved with the model.
    _found: ClassVar[tuple[str, ...]] = ()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.target_tags.single_output = True
        return tags

    @property
    def dual_coef_(self) -> NDArray[np.float64]:
        """(r,) or (r, t): f(x) = k(x, landmarks_) · dual_coef_ + intercept_."""
        return self._shaped(self._fetch("dual_coef_", "predictor")["coefficients"][0])

    def _shaped(self, found: Any) -> Any:
        return found[:, 0] if self._facts.single else found

    # --- Fitting ----------------------------------------------------------------------------------------

    def _open(self, X: Any, y: Any, sample_weight: Any, reset: bool = True) -> Training:
        """View rows, targets and weights, checked as far as metadata tell."""
        if self.weight_meaning not in (FREQUENCY, PRECISION):
            raise InvalidParameter(
                f"weight_meaning must be {FREQUENCY!r} or {PRECISION!r}, got {self.weight_meaning!r}"
            )  # fmt: skip
        X, y = readable(X, "X"), readable(y, "y")
        if is_lazy(X) or is_lazy(y):
            X = self._validated(X) if reset else X
        else:
            X, y = validate_data(
                self, X, y, reset=reset, multi_output=True, y_numeric=True, dtype=[np.float64, np.float32]
            )  # fmt: skip
        data = Training.open(X, y, sample_weight, self.missing_chunks)
        if not reset:
            self._check_features(data.rows)
            self._check_targets(data)
        return data

    def _check_targets(self, data: Training) -> None:
        if (data.single, data.n_targets) != (self._facts.single, self._facts.n_targets):
            raise InvalidData(
                f"the model was fitted to {self._facts.n_targets} target(s), and y has shape {data.targets.shape}."
            )

    def _keep(
        self, trained: Trained, ridge: float, data: Training, deviation: Deviation | None, known: Facts | None = None
    ) -> None:
        """Solve for one ridge, and set what is known then; ``known`` is what was known of other rows before."""
        sketch, weighed = trained.sketch, trained.data
        intercept = bool(self.fit_intercept) if known is None else known.intercept
        solved = trained.perform("regress", [ridge], intercept)
        self.kernel_ = unweighted(sketch.kernel)
        self._facts = Facts(
            weight=solved["weight"],
            scale=weighed.scale,
            n_counted=weighed.n_counted + (0 if known is None else known.n_counted),
            weight_meaning=self.weight_meaning if known is None else known.weight_meaning,
            origin=trained.origin.tolist(),
            intercept=intercept,
            dtype=str(sketch.dtype),
            single=data.single,
            n_targets=data.n_targets,
            n_landmarks=len(sketch.landmarks.indices),
            rank=sketch.rank,
            kernel_error=sketch.kernel_error,
            next_stream=trained.next_stream,
        )
        self._algebra, self._deviation = trained.algebra, deviation
        self.ridge_ = float(ridge)
        self.n_rows_ = data.rows.n_rows + (0 if known is None else self.n_rows_)
        self.n_features_in_ = data.rows.shape[1]
        self.effective_dimension_ = float(solved["effective_dimensions"][0])
        self.residual_squares_ = solved["residual_squares"][0] / self._unit_weight
        self.target_squares_ = solved["target_squares"] / self._unit_weight
        noise = noise_variance(
            self.residual_squares_, self.effective_dimension_, self._facts.n_observations, intercept
        )  # fmt: skip
        self.intercept_, self.noise_variance_ = (
            float(values[0]) if data.single else values for values in (solved["intercepts"][0], noise)
        )
        self.risk_inflation_ = None
        if deviation is not None:
            factor = (1.0 + deviation.delta / shift_of(self._facts.weight, self.ridge_)) ** 2
            self.risk_inflation_ = RiskInflation(factor, deviation.failure_probability)

    @all_or_nothing
    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from more rows, with kernel, ridge and landmarks as they are; the first call is :meth:`fit`.

        The result is that of one fit to all rows with these landmarks. It takes one pass over the new rows alone. What
        is certified afterwards allows for both parts, each with audit rows of its own stream, and the probabilities of
        failure add up.
        """
        if not hasattr(self, "_algebra"):
            return self.fit(X, y, sample_weight)
        data = self._open(X, y, sample_weight, reset=False)
        known = self._facts
        data.check_reachable()
        weighed = data.weighed(known.scale)
        options = Options(
            "uniform", certify=self._deviation is not None, failure_probability=self.failure_probability,
            random_state=self.random_state, dtype=known.dtype, missing_chunks=self.missing_chunks,
            block_rows=self.block_rows,
        )  # fmt: skip
        job = prepare(weighed.rows, weighed.kernel(self.kernel_), self.ridge_, known.n_landmarks, options)
        with reporter(self.progress) as report:
            run = started(job, report)
            trained = self._add_rows(job, run, weighed)
            deviation = self._deviation and self._deviation + trained.deviation(job.failure_probability)
        self._keep(trained, self.ridge_, data, deviation, known)
        return self

    def _add_rows(self, job: Job, run: Run, weighed: Any) -> Trained:
        """The sums of more rows on top of those that there are; nothing of this model is changed."""
        known, settings = self._facts, job.settings
        place = self._algebra.fork(f"{run.name}-fit")
        payload = held(place, "whitener", run.executor)
        if weighed.weighted:
            payload = run.executor.hold(run.executor.apply("weigh-landmarks", _with_unit_weights, payload))
        numbers = np.arange(known.n_landmarks)
        sketch = NystromSketch(
            settings.kernel, settings.ridges, True, weighed.rows.n_rows, weighed.rows.shape[1], settings.dtype,
            Landmarks(numbers, np.ones_like(numbers), None), f"{run.name}-fit", place, known.rank, numbers[:0],
            known.kernel_error,
        )  # fmt: skip
        trained = take_sums(
            job, run, settings, weighed, sketch, np.array(known.origin), stream=known.next_stream, payload=payload
        )  # fmt: skip
        mean = trained.first.totals.diagonal / sketch.n_rows
        height = trained.first.totals.height
        check_resolution(known.kernel_error, mean, self.ridge_, known.n_landmarks, height, settings.dtype)
        return trained

    # --- Using ------------------------------------------------------------------------------------------

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Predictions (m,) or (m, t) of rows (m, d): a NumPy array for what is in memory, else a lazy Dask array.

        Parameters
        ----------
        return_std
            Whether to return the standard errors of the fitted function too, by the deterministic training conditional:
            for a row x, with b(x) its whitened kernel columns, the variance is σ²·(1/Σw + z(x)ᵀ(G + λΣw·I)⁻¹z(x)
            + (k(x, x) − ‖b(x)‖²)/(λΣw)), where G and z = b − b̄ are centred, and 1/Σw is there, if there is an
            intercept. σ² is ``noise_variance_``; add it to the squares for the spread of a new observation.
        """
        check_is_fitted(self)
        rows, known, t = self._new_rows(X), self._facts, self._facts.n_targets
        if not return_std:
            work = partial(predict_task, self.kernel_)
            return self._shaped(self._apply("predict", "predictor", known.rank, work, t, rows))
        found = self._apply("predict", "smoother", known.rank, self._spread(), 2 * t, rows)
        return self._shaped(found[:, :t]), self._shaped(found[:, t:])

    def check_rows(self, X: Any) -> None:
        """Raise what :meth:`predict` would raise before it reads any of the rows X."""
        check_is_fitted(self)
        self._new_rows(X)

    def _spread(self) -> Callable[..., Any]:
        self._diagonalise()
        return partial(spread_task, self.kernel_, self.ridge_, self._noise)

    @property
    def _unit_weight(self) -> float:
        """Scaled weight of what ``noise_variance_`` speaks of: one repeat, or a row of mean precision."""
        known = self._facts
        return known.scale if known.weight_meaning == FREQUENCY else known.weight / self.n_rows_

    @property
    def _noise(self) -> NDArray[np.float64]:
        """(t,) noise variance of a row whose weight times the scale is 1."""
        return np.atleast_1d(self.noise_variance_) * self._unit_weight

    def _diagonalise(self) -> None:
        parameters = {"intercept": self._facts.intercept, "ridges": [self.ridge_], "dtype": "float64"}
        self._algebra.perform("diagonalise", None, parameters)

    def diagnose(self, X: Any, y: Any, sample_weight: Any = None) -> Diagnostics:
        """How the training rows fit the model, and how much each decides: give what :meth:`fit` was given.

        Lazy for Dask and Zarr input, NumPy arrays for what is in memory.
        """
        check_is_fitted(self)
        data = self._open(X, y, sample_weight, reset=False)
        weighed = data.weighed(self._facts.scale)
        n_columns, rank = 1 + 7 * data.n_targets, self._facts.rank
        found = self._apply(
            "diagnose", "smoother", rank, self._diagnosis(weighed), n_columns, weighed.rows, weighed.targets
        )
        return Diagnostics.of(found, self._facts.single)

    def _diagnosis(self, weighed: Any) -> Callable[..., Any]:
        """What finds the diagnostics of a block."""
        self._diagonalise()
        return partial(
            diagnose_task, self.kernel_, self.ridge_, weighed.weighted, self._facts.repeat, self._noise,
            self.effective_dimension_ + self._facts.intercept,
        )  # fmt: skip

    @property
    def plot(self) -> RegressionPictures:
        """Pictures: ``plot.diagnostics(X, y)``."""
        check_is_fitted(self)
        return RegressionPictures(self)

    def sum_diagnostics(
        self, X: Any, y: Any, sample_weight: Any, then: Callable[..., Any], add: Callable[[Any, Any], Any]
    ) -> Any:
        """Add up on the workers what ``then`` makes of the diagnostics (m, 1 + 7·t) of every block and its first row.

        The columns are those of :meth:`diagnose`.
        """
        data = self._open(X, y, sample_weight, reset=False)
        weighed = data.weighed(self._facts.scale)
        work = partial(diagnose_and_then, then, self._diagnosis(weighed))
        with reporter(self.progress) as report:
            run = self._reading(weighed.rows, report)
            tasks = self._reading_tasks(run, "diagnose", "smoother", work, weighed.targets)
            return run.total("diagnostics", tasks, add)

    def _reading(self, rows: Rows, report: Any) -> Run:
        """One reading of rows, by blocks."""
        name = uuid.uuid4().hex
        return Run(name, rows, split(rows.n_rows, block_rows(max(1, self._facts.rank), rows)), executor(name), report)

    def _reading_tasks(
        self, run: Run, name: str, kind: str, work: Callable[..., Any], targets: Rows
    ) -> Iterator[Delayed]:
        payload = held(self._algebra, kind, run.executor)
        rows, targets = run.rows.anew(f"{name}-{run.name}"), targets.anew(f"{name}-targets-{run.name}")
        for b in run.blocks:
            sources = rows.source(b.start, b.stop), targets.source(b.start, b.stop)
            yield task(name, run.name, b.index, work, payload, sources[0], b.start, sources[1])

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R² of the predictions, averaged over targets; out of core for Dask and Zarr input."""
        check_is_fitted(self)
        X, y, sample_weight = readable(X, "X"), readable(y, "y"), readable(sample_weight, "sample_weight")
        if not any(is_lazy(one) for one in (X, y, sample_weight)):
            return super().score(X, y, sample_weight)
        data = self._open(X, y, sample_weight, reset=False)
        weighed = data.weighed()
        work = partial(score_task, self.kernel_, weighed.weighted, data.origin())
        run = self._reading(weighed.rows, _silent)
        tasks = self._reading_tasks(run, "score", "predictor", work, weighed.targets)
        sums = sum(run.executor.values(run.collect("score", tasks)), start=np.zeros((4, 1)))
        return r_squared(sums)

    def predict_to_zarr(
        self, X: Any, output: str | os.PathLike, *, return_std: bool = False, overwrite: bool = False
    ) -> dict[str, Any]:
        """Predict rows and write them to a new Zarr group; workers write whole chunks.

        The array is called ``predictions``; with ``return_std`` there is ``standard_errors`` too.
        """
        check_is_fitted(self)
        began = time.perf_counter()
        with OutputStore(output, overwrite, PREDICTIONS) as store, reporter(self.progress) as report:
            rows = self._new_rows(X)
            name, n_targets = uuid.uuid4().hex, self._facts.n_targets
            shape = (rows.n_rows,) if self._facts.single else (rows.n_rows, n_targets)
            height = block_rows(max(1, self._facts.rank), rows)
            names = ["predictions", "standard_errors"] if return_std else ["predictions"]
            store.create(dict.fromkeys(names, shape), height, "target")
            run = Run(name, rows, split(rows.n_rows, height), executor(name), report)
            run.executor.check(rows)
            find = self._spread() if return_std else partial(predict_task, self.kernel_)
            work = partial(write_task, find, store.arrays)
            payload = held(self._algebra, "smoother" if return_std else "predictor", run.executor)
            rows = rows.anew(f"predict-{name}")
            sources = ((b, rows.source(b.start, b.stop)) for b in run.blocks)
            tasks = (task("predict", name, b.index, work, payload, source, b.start) for b, source in sources)
            run.executor.settle(run.collect("predict", tasks))
            summary = {"n_rows": rows.n_rows, "n_targets": n_targets, "input": rows.origin, "arrays": names}
            store.commit(summary)
        return summary | {"seconds": time.perf_counter() - began, "output": store.target}

    def summary(self) -> dict[str, Any]:
        """What is known about the fitted model, ready for JSON."""
        check_is_fitted(self)
        inflation = self.risk_inflation_
        with np.errstate(divide="ignore", invalid="ignore"):
            r2 = np.where(self.target_squares_ > 0, 1.0 - self.residual_squares_ / self.target_squares_, 1.0)
        noise = np.atleast_1d(self.noise_variance_)
        return {
            "kernel": self.kernel_.to_spec(),
            "ridge": self.ridge_,
            "dtype": self._facts.dtype,
            "fit_intercept": self._facts.intercept,
            "weight_meaning": self._facts.weight_meaning,
            "random_state": None if self.random_state is None else int(self.random_state),
            "failure_probability": float(self.failure_probability),
            "missing_chunks": self.missing_chunks,
            "block_rows": self.block_rows,
            "n_rows": self.n_rows_,
            "n_features": self.n_features_in_,
            "n_landmarks": self._facts.n_landmarks,
            "rank": self._facts.rank,
            "effective_dimension": self.effective_dimension_,
            "residual_squares": self.residual_squares_.tolist(),
            "target_squares": self.target_squares_.tolist(),
            "noise_variance": [float(one) if np.isfinite(one) else None for one in noise],
            "intercept": np.atleast_1d(self.intercept_).tolist(),
            "training_r2": r2.tolist(),
            "risk_inflation": None if inflation is None else asdict(inflation),
        }

    def save(self, path: str | os.PathLike, *, overwrite: bool = False) -> None:
        """Write the fitted model to a Zarr group: arrays and JSON, no pickles; :func:`daskrr.load` reads it.

        Its parameters are part of it. Lazy arrays among them come back as NumPy arrays, and a function that receives
        ``progress`` as None.
        """
        about = self.summary() | {"facts": asdict(self._facts), "estimator": type(self).__name__}
        about["deviation"] = None if self._deviation is None else asdict(self._deviation)
        names = getattr(self, "feature_names_in_", None)
        about["feature_names"] = None if names is None else [str(name) for name in names]
        parameters = self.get_params(deep=False)
        if callable(self.progress):
            parameters["progress"] = None
        found = {name: getattr(self, name) for name in self._found}
        write_model(path, overwrite, self._algebra.bring(), about, {"parameters": parameters, "found": found})


def _with_unit_weights(payload: dict[str, Any]) -> dict[str, Any]:
    """The factor of W for rows that carry a weight: landmarks have weight 1."""
    landmarks = payload["landmarks"]
    return payload | {"landmarks": np.column_stack([landmarks, np.ones(len(landmarks))])}


def _silent(event: Any) -> None:
    """Report nothing."""
