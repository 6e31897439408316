"""What every fitted regression can do, however its kernel and ridge were found."""

import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from daskrr.errors import InvalidData, InvalidParameter
from daskrr.kernels import Kernel
from daskrr.kernels.weighted import unweighted
from daskrr.leverage.problem import Problem, state_problem
from daskrr.numerics.factorize import check_resolution, shift_of
from daskrr.numerics.ridge import noise_variance
from daskrr.nystrom.factors import TileFactors, whitener
from daskrr.nystrom.landmarks import Landmarks
from daskrr.nystrom.row_weights import is_lazy
from daskrr.nystrom.sketch import NystromSketch
from daskrr.regression.block_tasks import (
    F64,
    diagnose_and_then,
    diagnose_task,
    predict_task,
    r_squared,
    score_task,
    spread_task,
    write_task,
)
from daskrr.regression.diagnostics import Diagnostics
from daskrr.regression.estimator import SketchedEstimator, all_or_nothing, started
from daskrr.regression.factors import diagonalise, predictor, regress, smoother
from daskrr.regression.facts import ModelFacts, RiskInflation
from daskrr.regression.fitting import FREQUENCY, PRECISION, Deviation, FitSums, Training, take_sums
from daskrr.regression.learning import stand_in
from daskrr.regression.persistence import PREDICTIONS, write_model
from daskrr.regression.plotting import RegressionPictures
from daskrr.runtime.inputs import readable
from daskrr.runtime.likeness import check_likeness
from daskrr.runtime.map_blocks import BlockMap, Run, map_blocks
from daskrr.runtime.progress import Reporter, silent
from daskrr.runtime.rows import Rows, viewed
from daskrr.runtime.scheduler import Pick, everything, held
from daskrr.runtime.telemetry import reporter
from daskrr.storage.saving import Saving


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
    _facts: ModelFacts
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
        return self._shaped(self._fetch("dual_coef_", predictor).coefficients)

    def _shaped(self, found: Any) -> Any:
        return found[:, 0] if self._facts.single else found

    # --- Fitting ----------------------------------------------------------------------------------------

    def _problem(self, rows: Rows, kernel: Kernel, ridge: float) -> Problem:
        if not kernel.needs_targets:
            return super()._problem(rows, kernel, ridge)
        problem = super()._problem(rows, stand_in(kernel), ridge)
        return replace(problem, settings=replace(problem.settings, kernel=kernel))

    def _open(self, X: Any, y: Any, sample_weight: Any, reset: bool = True) -> Training:
        """View rows, targets and weights, checked as far as metadata tell."""
        if self.weight_meaning not in (FREQUENCY, PRECISION):
            raise InvalidParameter(
                f"weight_meaning must be {FREQUENCY!r} or {PRECISION!r}, got {self.weight_meaning!r}"
            )  # fmt: skip
        X, y = viewed(X, "X"), readable(y, "y")
        if is_lazy(X) or is_lazy(y):
            X = self._validated(X) if reset else X
        else:
            X, y = validate_data(
                self, X, y, reset=reset, multi_output=True, y_numeric=True, dtype=[np.float64, np.float32]
            )  # fmt: skip
        data = Training.open(X, y, sample_weight, self.missing_chunks)
        if not reset:
            self._check_features(data.rows)
            check_likeness(data.rows, self.features_, "the model")
            self._check_targets(data)
        return data

    def _check_targets(self, data: Training) -> None:
        if (data.single, data.n_targets) != (self._facts.single, self._facts.n_targets):
            raise InvalidData(
                f"the model was fitted to {self._facts.n_targets} target(s), and y has shape {data.targets.shape}."
            )

    def _keep(
        self,
        trained: FitSums,
        ridge: float,
        data: Training,
        deviation: Deviation | None,
        known: ModelFacts | None = None,
    ) -> None:
        """Solve for one ridge, and set what is known then; ``known`` is what was known of other rows before."""
        sketch, weighed = trained.sketch, trained.data
        intercept = bool(self.fit_intercept) if known is None else known.intercept
        solved = trained.perform(regress, [ridge], intercept)
        self.kernel_ = unweighted(sketch.kernel)
        self._facts = ModelFacts(
            weight=solved.weight,
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
        if known is None:
            self._remember_features(data.rows)
        self.effective_dimension_ = float(solved.effective_dimensions[0])
        self.residual_squares_ = solved.residual_squares[0] / self._unit_weight
        self.target_squares_ = solved.target_squares / self._unit_weight
        noise = noise_variance(
            self.residual_squares_, self.effective_dimension_, self._facts.n_observations, intercept
        )  # fmt: skip
        self.intercept_, self.noise_variance_ = (
            float(values[0]) if data.single else values for values in (solved.intercepts[0], noise)
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
        problem = state_problem(
            weighed.rows, weighed.kernel(self.kernel_), self.ridge_, known.n_landmarks, sampling="uniform",
            certify=self._deviation is not None and self._certainty, random_state=self.random_state, dtype=known.dtype,
            missing_chunks=self.missing_chunks, block_rows=self.block_rows,
        )  # fmt: skip
        with reporter(self.progress) as report:
            run = started(problem, report)
            trained = self._add_rows(problem, run, weighed)
            deviation = self._deviation and self._deviation + trained.deviation(problem.failure_probability)
        self._keep(trained, self.ridge_, data, deviation, known)
        return self

    def _add_rows(self, problem: Problem, run: Run, weighed: Any) -> FitSums:
        """The sums of more rows on top of those that there are; nothing of this model is changed."""
        known, settings = self._facts, problem.settings
        place = self._algebra.fork(f"{run.name}-fit")
        payload = held(place, whitener, run.executor)
        if weighed.weighted:
            payload = run.executor.hold(run.executor.apply("weigh-landmarks", _with_unit_weights, payload))
        numbers = np.arange(known.n_landmarks)
        sketch = NystromSketch(
            kernel=settings.kernel, ridges=settings.ridges, single=True, n_rows=weighed.rows.n_rows,
            n_features=weighed.rows.shape[1], dtype=settings.dtype, run=f"{run.name}-fit", algebra=place,
            landmarks=Landmarks(numbers, np.ones_like(numbers), None), rank=known.rank, pivots=numbers[:0],
            kernel_error=known.kernel_error,
        )  # fmt: skip
        trained = take_sums(
            problem, run, settings, weighed, sketch, np.array(known.origin), stream=known.next_stream, payload=payload
        )  # fmt: skip
        mean = trained.first.totals.diagonal / sketch.n_rows
        height = trained.first.totals.height
        check_resolution(known.kernel_error, mean, self.ridge_, known.n_landmarks, height, settings.dtype)
        return trained

    # --- Using ------------------------------------------------------------------------------------------

    def predict(self, X: Any, return_std: bool = False, already_scaled: bool = False) -> Any:
        """Predictions (m,) or (m, t) of rows (m, d): a NumPy array for what is in memory, else a lazy Dask array.

        Parameters
        ----------
        X
            As those of :meth:`fit`; or, if they came from a table that was converted, a frame with its columns. Arrays
            have no record of their scaling: they must be centred and divided as those were (``features_``).
        return_std
            Whether to return the standard errors of the fitted function too, by the deterministic training conditional:
            for a row x, with b(x) its whitened kernel columns, the variance is σ²·(1/Σw + z(x)ᵀ(G + λΣw·I)⁻¹z(x)
            + (k(x, x) − ‖b(x)‖²)/(λΣw)), where G and z = b − b̄ are centred, and 1/Σw is there, if there is an
            intercept. σ² is ``noise_variance_``; add it to the squares for the spread of a new observation.
        already_scaled
            The rows are made as those of the fit were, whatever the records of their columns say.
        """
        check_is_fitted(self)
        rows, known, t = self._new_rows(X, already_scaled), self._facts, self._facts.n_targets
        if not return_std:
            work = partial(predict_task, self.kernel_)
            return self._shaped(self._apply("predict", predictor, known.rank, work, t, rows))
        found = self._apply("predict", smoother, known.rank, self._spread(), 2 * t, rows)
        return self._shaped(found[:, :t]), self._shaped(found[:, t:])

    def check_rows(self, X: Any, already_scaled: bool = False) -> None:
        """Raise what :meth:`predict` would raise before it reads any of the rows X."""
        check_is_fitted(self)
        self._new_rows(X, already_scaled)

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
        ridges = [self.ridge_]
        self._algebra.perform(partial(diagonalise, dtype=F64, ridges=ridges, intercept=self._facts.intercept))

    def diagnose(self, X: Any, y: Any, sample_weight: Any = None) -> Diagnostics:
        """How the training rows fit the model, and how much each decides: give what :meth:`fit` was given.

        Lazy for Dask and Zarr input, NumPy arrays for what is in memory.
        """
        check_is_fitted(self)
        data = self._open(X, y, sample_weight, reset=False)
        weighed = data.weighed(self._facts.scale)
        n_columns, rank = 1 + 7 * data.n_targets, self._facts.rank
        found = self._apply(
            "diagnose", smoother, rank, self._diagnosis(weighed), n_columns, weighed.rows, weighed.targets
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
            return self._map("diagnose", smoother, work, weighed.rows, weighed.targets, report=report).total(
                add, "diagnostics"
            )

    def _map(self, name: str, pick: Pick, work: Callable[..., Any], *rows: Rows, report: Reporter = silent) -> BlockMap:
        """``work`` on blocks of rows, with a payload of the fitted factors."""
        run = Run.of_columns(rows[0], max(1, self._facts.rank), report)
        return map_blocks(run, name, work, *rows, shared=[held(self._algebra, pick, run.executor)])

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R² of the predictions, averaged over targets; out of core for Dask and Zarr input."""
        check_is_fitted(self)
        X, y, sample_weight = viewed(X, "X"), readable(y, "y"), readable(sample_weight, "sample_weight")
        if not any(is_lazy(one) for one in (X, y, sample_weight)):
            return super().score(X, y, sample_weight)
        data = self._open(X, y, sample_weight, reset=False)
        weighed = data.weighed()
        work = partial(score_task, self.kernel_, weighed.weighted, data.origin())
        parts = self._map("score", predictor, work, weighed.rows, weighed.targets).values()
        return r_squared(sum(parts, start=np.zeros((4, 1))))

    def predict_to_zarr(
        self,
        X: Any,
        output: str | os.PathLike,
        *,
        return_std: bool = False,
        overwrite: bool = False,
        already_scaled: bool = False,
    ) -> dict[str, Any]:
        """Predict rows and write them to a new Zarr group; workers write whole chunks.

        The array is called ``predictions``; with ``return_std`` there is ``standard_errors`` too.
        """
        check_is_fitted(self)
        began = time.perf_counter()
        with Saving(output, overwrite, PREDICTIONS) as store, reporter(self.progress) as report:
            rows = self._new_rows(X, already_scaled)
            n_targets = self._facts.n_targets
            shape = (rows.n_rows,) if self._facts.single else (rows.n_rows, n_targets)
            height = Run.of_columns(rows, max(1, self._facts.rank)).height
            names = ["predictions", "standard_errors"] if return_std else ["predictions"]
            store.create(dict.fromkeys(names, shape), height, "target")
            find = self._spread() if return_std else partial(predict_task, self.kernel_)
            pick, work = smoother if return_std else predictor, partial(write_task, find, store.staged)
            writes = self._map("predict", pick, work, rows, report=report)
            writes.run.executor.check(rows)
            digests = writes.values(settle=store.staged.settle)
            summary = {"n_rows": rows.n_rows, "n_targets": n_targets, "input": rows.origin, "arrays": names}
            store.commit(summary, {one: [found[one] for found in digests] for one in names})
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
            "failure_probability": self._certainty.failure_probability,
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
        self.save_within(None, path, overwrite=overwrite)

    def save_within(self, around: dict[str, Any] | None, path: str | os.PathLike, *, overwrite: bool) -> None:
        """The same with a record of what the model is a part of."""
        state = self.summary() | {"facts": asdict(self._facts), "estimator": type(self).__name__}
        state["deviation"] = None if self._deviation is None else asdict(self._deviation)
        state["feature_names"] = self.saved_names
        state["features"] = self.features_ and self.features_.to_attributes()
        found = {name: getattr(self, name) for name in self._found}
        more = {"parameters": self.saved_parameters, "found": found, "around": around}
        write_model(path, overwrite, self._algebra.fetch(everything), state, more)


def _with_unit_weights(payload: TileFactors) -> TileFactors:
    """The factor of W for rows that carry a weight: landmarks have weight 1."""
    return replace(payload, landmarks=np.column_stack([payload.landmarks, np.ones(len(payload.landmarks))]))
