"""What estimators with landmarks share: their options, and how they are applied to rows."""

import logging
import uuid
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import validate_data

from daskrr.arguments import Job, Options
from daskrr.engine.feed import note
from daskrr.engine.passes import Run, as_array, block_rows, executor, split, task
from daskrr.engine.plan import Workers, check_fits
from daskrr.engine.rows import Rows, open_rows, readable
from daskrr.engine.scheduler import Algebra, InProcess, held
from daskrr.errors import InvalidData
from daskrr.kernels import Gaussian, Kernel, as_kernel
from daskrr.nystrom.row_weights import is_lazy

log = logging.getLogger("daskrr")


def all_or_nothing(method: Callable[..., Any]) -> Callable[..., Any]:
    """Have a method leave the estimator as it was if it fails."""

    @wraps(method)
    def whole(self: Any, *arguments: Any, **options: Any) -> Any:
        before = dict(vars(self))
        try:
            return method(self, *arguments, **options)
        except BaseException:
            _restore(self, before)
            raise

    return whole


def without_trace(method: Callable[..., Any]) -> Callable[..., Any]:
    """Have a method leave the estimator as it was."""

    @wraps(method)
    def whole(self: Any, *arguments: Any, **options: Any) -> Any:
        before = dict(vars(self))
        try:
            return method(self, *arguments, **options)
        finally:
            _restore(self, before)

    return whole


def _restore(estimator: Any, attributes: dict[str, Any]) -> None:
    vars(estimator).clear()
    vars(estimator).update(attributes)


class SketchedEstimator(BaseEstimator):
    """An estimator whose factors are where they were computed, the scheduler as a rule."""

    kernel_: Kernel
    n_features_in_: int
    _algebra: Algebra

    def _options(self) -> Options:
        return Options(
            sampling=self.sampling, tolerance=self.tolerance, absolute_tolerance=self.absolute_tolerance,
            max_landmarks=self.max_landmarks, certify=self.certify, failure_probability=self.failure_probability,
            rounds=self.rounds, replacement=self.replacement, epsilon=self.epsilon, sketch_ridge=self.sketch_ridge,
            random_state=self.random_state, dtype=self.dtype, missing_chunks=self.missing_chunks,
            block_rows=self.block_rows,
        )  # fmt: skip

    @property
    def landmarks_(self) -> NDArray[np.float64]:
        """(r, d) rows whose kernel columns are used; brought here from where the factors are."""
        return self._fetch("landmarks_", "whitener")["landmarks"]

    def _fetch(self, name: str, kind: str) -> dict[str, Any]:
        if not hasattr(self, "_algebra"):
            raise NotFittedError(f"this {type(self).__name__} is not fitted yet, so that it has no {name}.")
        return self._algebra.fetch(kind)

    def _validated(self, X: Any) -> Any:
        """Rows to fit to: what is in memory is checked by scikit-learn, and nothing else is touched."""
        if hasattr(self, "feature_names_in_"):
            del self.feature_names_in_
        X = readable(X, "X")
        return X if is_lazy(X) else validate_data(self, X, dtype=[np.float64, np.float32])

    def _new_rows(self, X: Any) -> Rows:
        """View rows that the fitted estimator is to be applied to."""
        X = readable(X, "X")
        if not is_lazy(X):
            X = validate_data(self, X, reset=False, dtype=[np.float64, np.float32])
        rows = open_rows(X, missing_chunks=self.missing_chunks)
        self._check_features(rows)
        return rows

    def _check_features(self, rows: Rows) -> None:
        if rows.shape[1] != self.n_features_in_:
            raise InvalidData(
                f"X has {rows.shape[1]} features, but {type(self).__name__} is expecting {self.n_features_in_} features"
            )

    def _apply(self, name: str, kind: str, rank: int, work: Callable[..., Any], n_columns: int, *sources: Rows) -> Any:
        """What ``work`` makes of a payload and blocks of rows: at once if all are in memory, else a lazy array."""
        place, rows = self._algebra, sources[0]
        if all(one.in_memory for one in sources):
            first, *others = (one.source(0, rows.n_rows) for one in sources)
            return work(place.fetch(kind), first, 0, *others)
        run = uuid.uuid4().hex
        blocks = split(rows.n_rows, block_rows(max(1, rank), rows))
        payload = held(place, kind, executor(run)) if isinstance(place, InProcess) else place.payload(kind)
        sources = tuple(one.anew(f"{name}-{number}-{run}") for number, one in enumerate(sources))
        tasks = []
        for b in blocks:
            first, *others = (one.source(b.start, b.stop) for one in sources)
            tasks.append(task(name, run, b.index, work, payload, first, b.start, *others))
        return as_array(f"{name}-{run}", tasks, blocks, n_columns)


def given_kernel(kernel: Any, n_rows: int) -> Kernel:
    """The kernel that was given, or a Gaussian of median width."""
    if kernel is None and n_rows == 1:
        raise InvalidData("X has 1 sample, of which no median distance can be taken: give a kernel.")
    return Gaussian("median") if kernel is None else as_kernel(kernel)


def started(job: Job, report: Any) -> Run:
    """A run whose plan fits the workers."""
    check_fits(job.plan, Workers.of(job.executor))
    for line in job.notes:
        log.warning(line)
    note(**job.facts)
    return Run(job.name, job.rows, split(job.rows.n_rows, job.plan.block_rows), job.executor, report)
