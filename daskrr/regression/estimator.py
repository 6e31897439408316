"""What estimators with landmarks share: their options, and how they are applied to rows."""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import validate_data

from daskrr.errors import InvalidData
from daskrr.kernels import Gaussian, Kernel, as_kernel
from daskrr.leverage.problem import Problem, state_problem
from daskrr.nystrom.factors import whitener
from daskrr.nystrom.row_weights import is_lazy
from daskrr.nystrom.strategies import Certify, as_certify
from daskrr.runtime.likeness import check_likeness
from daskrr.runtime.map_blocks import Run, map_blocks
from daskrr.runtime.rows import Rows, ZarrRows, open_rows, viewed
from daskrr.runtime.scheduler import Algebra, InProcess, Pick, held
from daskrr.runtime.telemetry import note
from daskrr.tables.encoding import made_like
from daskrr.tables.features import Features
from daskrr.tables.frames import is_frame

log = logging.getLogger("daskrr")

# How the names of a kernel's parameters begin among those of an estimator.
KERNEL_PARAMETER = "kernel__"


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

    kernel: Any
    kernel_: Kernel
    n_features_in_: int
    features_: Features | None = None
    _algebra: Algebra

    def set_params(self, **params: Any) -> Self:
        """Set parameters; those of the kernel, ``kernel__length_scale`` say, by putting another in its place.

        A kernel that is a name, a specification or None is made one first.
        """
        inner = [name for name in params if name.startswith(KERNEL_PARAMETER) and hasattr(self, "kernel")]
        changes = {name.removeprefix(KERNEL_PARAMETER): params.pop(name) for name in inner}
        super().set_params(**params)
        if changes:
            self.kernel = known_kernel(self.kernel).set_params(**changes)
        return self

    def _problem(self, rows: Rows, kernel: Kernel, ridge: float) -> Problem:
        return state_problem(
            rows,
            kernel,
            ridge,
            self.landmarks,
            sampling=self.sampling,
            certify=self.certify,
            random_state=self.random_state,
            dtype=self.dtype,
            missing_chunks=self.missing_chunks,
            block_rows=self.block_rows,
        )

    @property
    def _certainty(self) -> Certify:
        """How certain it is to be, where it is certified."""
        return as_certify(self.certify) or Certify()

    @property
    def saved_parameters(self) -> dict[str, Any]:
        """The parameters that are saved; a function that receives progress cannot be."""
        parameters = self.get_params(deep=False)
        return parameters | {"progress": None} if callable(self.progress) else parameters

    @property
    def saved_names(self) -> list[str] | None:
        """The names of the features, if they have any."""
        names = getattr(self, "feature_names_in_", None)
        return None if names is None else [str(name) for name in names]

    @property
    def landmarks_(self) -> NDArray[np.float64]:
        """(r, d) rows whose kernel columns are used; brought here from where the factors are."""
        return self._fetch("landmarks_", whitener).landmarks

    def _fetch(self, name: str, pick: Pick) -> Any:
        if not hasattr(self, "_algebra"):
            raise NotFittedError(f"this {type(self).__name__} is not fitted yet, so that it has no {name}.")
        return self._algebra.fetch(pick)

    def _validated(self, X: Any) -> Any:
        """Rows to fit to: what is in memory is checked by scikit-learn, and nothing else is touched."""
        if hasattr(self, "feature_names_in_"):
            del self.feature_names_in_
        X = viewed(X, "X")
        return X if is_lazy(X) else validate_data(self, X, dtype=[np.float64, np.float32])

    def _new_rows(self, X: Any, already_scaled: bool = False) -> Rows:
        """View rows that the fitted estimator is to be applied to; a table is made what that of the data was."""
        known = self.features_
        X = made_like(X, known) if known is not None and known.recipe is not None and is_frame(X) else viewed(X, "X")
        if not is_lazy(X):
            X = validate_data(self, X, reset=False, dtype=[np.float64, np.float32])
        rows = open_rows(X, missing_chunks=self.missing_chunks)
        self._check_features(rows)
        check_likeness(rows, self.features_, "the model", already_scaled)
        return rows

    def _remember_features(self, rows: Rows) -> None:
        """Keep what the columns of the rows are that it is fitted to."""
        self.features_ = rows.features
        if rows.features is not None and not isinstance(rows, ZarrRows):
            self.feature_names_in_ = np.array(rows.features.names, object)

    def _check_features(self, rows: Rows) -> None:
        if rows.shape[1] != self.n_features_in_:
            raise InvalidData(
                f"X has {rows.shape[1]} features, but {type(self).__name__} is expecting {self.n_features_in_} features"
            )

    def _apply(self, name: str, pick: Pick, rank: int, work: Callable[..., Any], n_columns: int, *sources: Rows) -> Any:
        """What ``work`` makes of a payload and blocks of rows: at once if all are in memory, else a lazy array."""
        place, rows = self._algebra, sources[0]
        if all(one.in_memory for one in sources):
            first, *others = (one.source(0, rows.n_rows) for one in sources)
            return work(place.fetch(pick), first, 0, *others)
        run = Run.of_columns(rows, max(1, rank))
        payload = held(place, pick, run.executor) if isinstance(place, InProcess) else place.payload(pick)
        return map_blocks(run, name, work, *sources, shared=[payload]).lazy(n_columns)


def known_kernel(kernel: Any) -> Kernel:
    """The kernel that was given, or a Gaussian of median width."""
    return Gaussian() if kernel is None else as_kernel(kernel)


def given_kernel(kernel: Any, n_rows: int) -> Kernel:
    """The same for so many rows."""
    if kernel is None and n_rows == 1:
        raise InvalidData("X has 1 sample, of which no median distance can be taken: give a kernel.")
    return known_kernel(kernel)


def started(problem: Problem, report: Any) -> Run:
    """A run whose plan fits the workers."""
    problem.begin()
    for line in problem.notes:
        log.warning(line)
    note(**problem.facts)
    return Run(problem.name, problem.rows, problem.spans(), problem.executor, report)
