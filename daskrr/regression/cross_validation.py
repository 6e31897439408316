"""Kernel ridge regression whose kernel and ridge are chosen by cross-validation."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray
from sklearn.utils.validation import check_is_fitted

from daskrr.errors import CheckFailed, InvalidData, InvalidParameter, RidgeTooSmall
from daskrr.kernels import Gaussian, Kernel, as_kernel
from daskrr.kernels.weighted import unweighted
from daskrr.leverage.problem import Problem, check_ridges
from daskrr.numerics.bounds import kernel_noise
from daskrr.numerics.reservoir import Order
from daskrr.numerics.ridge import generalized_errors
from daskrr.numerics.smoother import LeftOutSums
from daskrr.nystrom.drawing import resolve_kernel
from daskrr.nystrom.landmarks import child
from daskrr.nystrom.strategies import Certify, KFold, Tolerance
from daskrr.regression.block_tasks import left_out_task
from daskrr.regression.estimator import all_or_nothing, started, without_trace
from daskrr.regression.factors import cross_validate, diagonalise, find_least_ridge, quick_smoother, regress
from daskrr.regression.fitting import FREQUENCY, FitSums, Training, WeightedRows, train
from daskrr.regression.learning import resolve_with_targets
from daskrr.regression.model import KernelRidgeModel
from daskrr.regression.moments import Folds
from daskrr.runtime.map_blocks import Run, map_blocks
from daskrr.runtime.progress import Reporter
from daskrr.runtime.scheduler import held
from daskrr.runtime.telemetry import reporter

__all__ = ["KFold", "NystromKernelRidgeCV"]

log = logging.getLogger("daskrr")

SCORINGS = ("loo", "gcv", KFold.name)
DEFAULT_RIDGES = tuple(np.logspace(-8, 0, 30))
DEFAULT_WIDTHS = (0.25, 0.5, 1.0, 2.0)

# Landmarks that are no more than this share of the rows are left out of the leave-one-out error. They are outliers, and
# say little of other rows; but if they are many, what is left without them says little of the data.
FEW_LANDMARKS = 0.05

# By how much the smoother's diagonal may sum to something else than its trace, relative to that.
SUM_TOLERANCE = {np.dtype(np.float64): 1e-3, np.dtype(np.float32): 5e-2}


@dataclass(frozen=True)
class Candidate:
    """One kernel: what pass 1 found, if any ridge could be judged, and mean squared errors (L,), NaN where not.

    ``scores`` are those to choose by; of leave-one-out, there are those over all rows and over those that are no
    landmarks.
    """

    trained: FitSums | None
    scores: NDArray[np.float64]
    all_rows: NDArray[np.float64]
    without_landmarks: NDArray[np.float64]

    @property
    def least(self) -> float:
        """At the best ridge; infinite if no ridge could be judged."""
        scores = self.scores[np.isfinite(self.scores)]
        return float(scores.min(initial=math.inf))


class NystromKernelRidgeCV(KernelRidgeModel):
    """Kernel ridge regression that chooses its kernel and ridge by the error on rows that it did not learn from.

    For every kernel the landmarks are chosen anew. Leave-one-out then takes one pair of passes for all ridges,
    generalized cross-validation and k folds one pass. The model itself costs no further pass.

    Parameters
    ----------
    kernels
        Kernels, their names or specifications; None: Gaussians of a quarter, half, once and twice the median distance.
    ridges
        λ > 0, each once; None: 30 from 1e-8 to 1. Those that round-off would decide at a kernel are left out there.
    scoring
        What is to be least: ``"loo"``, the mean squared leave-one-out residual, with λ·Σw and the landmarks as they
        are, over the rows that are no landmarks, or over all if more than a twentieth are landmarks; ``"gcv"``, that of
        all rows with every row's leverage replaced by their mean; ``"kfold"`` or :class:`KFold`, the mean squared
        error of rows predicted from the other folds. Landmarks serve as features even of a fold that they are not in.
        Folds are of rows, also of those that stand for repeats.
    landmarks, sampling
        As of :func:`daskrr.leverage_scores`, at the geometric mean of the ridges; so are dtype, missing_chunks and
        block_rows.
    fit_intercept, weight_meaning, certify, random_state, progress
        As of :class:`daskrr.NystromKernelRidge`.

    Attributes
    ----------
    kernel_, ridge_, best_score_
        The choice, and its mean squared error.
    cv_results_
        ``kernels`` (list), ``ridges`` (L,), ``errors`` (kernels, L) with NaN where a ridge was left out; for
        leave-one-out also ``errors_without_landmarks``, over rows that are no landmarks, and ``errors_all_rows``, one
        of which ``errors`` is (else None).
    landmarks_, dual_coef_, intercept_, effective_dimension_, noise_variance_, risk_inflation_, residual_squares_,
    target_squares_, n_rows_
        As of :class:`daskrr.NystromKernelRidge`.

    Examples
    --------
    >>> import numpy as np, daskrr
    >>> X = np.linspace(0, 6, 300)[:, None]
    >>> y = np.sin(X[:, 0]) + 0.1 * np.random.default_rng(0).standard_normal(300)
    >>> model = daskrr.NystromKernelRidgeCV(ridges=np.logspace(-6, 0, 7), landmarks=40, random_state=0).fit(X, y)
    >>> bool(0.008 < model.best_score_ < 0.012)
    True
    """

    _found = ("best_score_", "cv_results_")

    def __init__(
        self,
        kernels: Sequence[Kernel | dict | str] | None = None,
        ridges: Sequence[float] | None = None,
        landmarks: int | Tolerance | None = None,
        *,
        scoring: str | KFold = "loo",
        sampling: Any = "residual",
        fit_intercept: bool = False,
        weight_meaning: str = "frequency",
        certify: bool | Certify = True,
        dtype: DTypeLike = "float64",
        missing_chunks: str = "refuse",
        block_rows: int | None = None,
        random_state: int | None = None,
        progress: Reporter | bool | None = False,
    ) -> None:
        self.kernels = kernels
        self.ridges = ridges
        self.landmarks = landmarks
        self.scoring = scoring
        self.sampling = sampling
        self.fit_intercept = fit_intercept
        self.weight_meaning = weight_meaning
        self.certify = certify
        self.dtype = dtype
        self.missing_chunks = missing_chunks
        self.block_rows = block_rows
        self.random_state = random_state
        self.progress = progress

    @all_or_nothing
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Choose among the kernels and ridges, and fit the model, to rows X, targets y and weights.

        Raises
        ------
        InvalidParameter, InvalidData, DoesNotFit, SourceUnreachable
            Before any long work, as far as metadata tell.
        KernelNotPositive, RidgeTooSmall, CheckFailed
            When the numbers cannot be trusted; the second only if no ridge is left at any kernel.
        """
        data, kernels, ridges = self._checked(X, y, sample_weight)
        data.check_reachable()
        weighed = data.weighed()
        problems = [self._stated(weighed.rows, weighed.kernel(kernel), ridges, data.n_targets) for kernel in kernels]
        with reporter(self.progress) as report:
            if self.kernels is None:
                problems = self._of_widths(problems[0], weighed, started(problems[0], report))
            results, best, trained, problem = self._search(problems, weighed, data.origin(), ridges, report)
            deviation = trained.deviation(problem.failure_probability) if problem.certify else None
        ridge = ridges[int(np.nanargmin(best.scores))]
        self._keep(trained, ridge, data, deviation)
        self.best_score_, self.cv_results_ = best.least, results
        return self

    @without_trace
    def check(self, X: Any, y: Any, sample_weight: Any = None) -> None:
        """Raise what :meth:`fit` would raise before any long work, without a cluster and without reading rows."""
        data, kernels, ridges = self._checked(X, y, sample_weight)
        for kernel in kernels:
            self._stated(data.rows, kernel, ridges, data.n_targets)

    def _checked(self, X: Any, y: Any, sample_weight: Any) -> tuple[Training, list[Kernel], tuple[float, ...]]:
        as_scoring(self.scoring)
        ridges, _ = check_ridges(DEFAULT_RIDGES if self.ridges is None else self.ridges)
        one = isinstance(self.kernels, (str, dict, Kernel))
        kernels = [Gaussian()] if self.kernels is None else [] if one else [*self.kernels]
        if not kernels:
            raise InvalidParameter(f"kernels must be a list of at least one kernel, got {self.kernels!r}")
        data = self._open(X, y, sample_weight)
        if data.rows.n_rows < 2:
            raise InvalidData("X has 1 sample, and at least 2 are needed to predict one from the others.")
        return data, [as_kernel(kernel) for kernel in kernels], ridges

    def _stated(self, rows: Any, kernel: Kernel, ridges: Sequence[float], n_targets: int) -> Problem:
        """The run of one kernel, whose landmarks are chosen at the geometric mean of the ridges."""
        middle = math.exp(math.fsum(map(math.log, ridges)) / len(ridges))
        scoring = as_scoring(self.scoring)
        n_sums = scoring.folds if isinstance(scoring, KFold) else 1
        return self._problem(rows, kernel, middle).with_sums(n_sums, n_readings=len(ridges) * n_targets)

    def _of_widths(self, problem: Problem, weighed: WeightedRows, run: Run) -> list[Problem]:
        """The run of a Gaussian of median width, once for every default width."""
        resolved: Any = unweighted(resolve_kernel(run, problem.settings.kernel, problem.seed))
        kernels = [Gaussian(width * resolved.length_scale) for width in DEFAULT_WIDTHS]
        return [replace(problem, settings=replace(problem.settings, kernel=weighed.kernel(one))) for one in kernels]

    def _search(
        self,
        problems: list[Problem],
        weighed: WeightedRows,
        origin: NDArray[np.float64],
        ridges: tuple[float, ...],
        report: Any,
    ) -> tuple[dict[str, Any], Candidate, FitSums, Problem]:
        """Errors of every kernel and ridge, and the best candidate; the factors of the others are let go."""
        best: tuple[Candidate, FitSums, Problem] | None = None
        kernels: list[Kernel] = []
        tried: list[Candidate] = []
        for number, problem in enumerate(problems, 1):
            problem = replace(problem, name=f"{problem.name}-{number}")
            run = started(problem, partial(_numbered, report, f"kernel {number} of {len(problems)}, "))
            kernel = resolve_with_targets(run, problem.settings.kernel, weighed, problem.seed)
            kernels.append(unweighted(kernel))
            candidate = self._try(problem, run, kernel, weighed, origin, ridges)
            log.info(
                "kernel %d of %d: %r, mean squared error %.6g", number, len(problems), kernels[-1], candidate.least
            )
            tried.append(candidate)
            if candidate.trained is not None and (best is None or candidate.least < best[0].least):
                best = candidate, candidate.trained, problem
        if best is None:
            raise RidgeTooSmall(
                f"no ridge up to {max(ridges):.3g} is above round-off at any kernel. Give larger ridges."
            )
        if not math.isfinite(best[0].least):
            raise InvalidData(
                f"the error by {_name(self.scoring)} is not finite at any kernel and ridge: some row alone decides its "
                "prediction, or y is too large to be squared. Look at the weights and targets."
            )
        _warn_of_ends(ridges, int(np.nanargmin(best[0].scores)))
        both = self.scoring == "loo"
        results = {
            "kernels": kernels,
            "ridges": np.array(ridges),
            "errors": np.array([one.scores for one in tried]),
            "errors_all_rows": np.array([one.all_rows for one in tried]) if both else None,
            "errors_without_landmarks": np.array([one.without_landmarks for one in tried]) if both else None,
        }
        return results, *best

    def _try(
        self,
        problem: Problem,
        run: Run,
        kernel: Kernel,
        weighed: WeightedRows,
        origin: NDArray[np.float64],
        ridges: tuple[float, ...],
    ) -> Candidate:
        """Pass 1 of one kernel, and what follows for every ridge that round-off does not decide."""
        scoring, folds = as_scoring(self.scoring), None
        if isinstance(scoring, KFold):
            folds = Folds(scoring.folds, Order.of(child(problem.seed, "folds")))
        settings = replace(
            problem.settings, kernel=kernel, largest_tried=max(ridges), intercept=bool(self.fit_intercept)
        )  # fmt: skip
        unknown = np.full(len(ridges), np.nan)
        try:
            trained = train(problem, run, settings, weighed, origin, folds)
        except RidgeTooSmall as error:
            log.warning("%r is left out: %s", kernel, error)
            return Candidate(None, scores=unknown, all_rows=unknown, without_landmarks=unknown)
        sketch = trained.sketch
        noise = kernel_noise(sketch.kernel_error, trained.first.totals.diagonal / sketch.n_rows)
        least = max(noise, trained.algebra.perform(partial(find_least_ridge, dtype=sketch.dtype)))
        judged = [number for number, ridge in enumerate(ridges) if ridge >= least]
        if len(judged) < len(ridges):
            log.warning("%r: ridges below %.3g are left out, since round-off would decide", kernel, least)
        whole, apart = unknown.copy(), unknown.copy()
        if judged:
            whole[judged], apart[judged] = self._errors(trained, tuple(ridges[number] for number in judged))
        few = problem.settings.n_landmarks <= FEW_LANDMARKS * weighed.rows.n_rows and np.isfinite(apart).any()
        return Candidate(
            trained if judged else None, scores=apart if few else whole, all_rows=whole, without_landmarks=apart
        )  # fmt: skip

    def _errors(self, trained: FitSums, ridges: tuple[float, ...]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean squared errors (L,) over all rows, and over those that are no landmarks, NaN but for leave-one-out."""
        intercept = bool(self.fit_intercept)
        if self.scoring == "loo":
            whole, apart = left_out_errors(trained, ridges, intercept, self._repeats)
            return whole.mean(axis=1), apart.mean(axis=1)
        if _name(self.scoring) == KFold.name:
            errors = trained.perform(cross_validate, ridges, intercept)
        else:
            regressed = trained.perform(regress, ridges, intercept)
            weight, data = regressed.weight, trained.data
            n_rows = weight / data.scale if self._repeats else data.n_counted
            errors = generalized_errors(
                regressed.residual_squares / weight, regressed.effective_dimensions, n_rows, intercept
            )  # fmt: skip
        return errors.mean(axis=1), np.full(len(ridges), np.nan)

    @property
    def _repeats(self) -> bool:
        return self.weight_meaning == FREQUENCY

    def summary(self) -> dict[str, Any]:
        """What is known about the fitted model and its choice, ready for JSON."""
        check_is_fitted(self)
        results = self.cv_results_
        selection = {
            "scoring": _name(self.scoring),
            "kernels": [kernel.to_spec() for kernel in results["kernels"]],
            "ridges": results["ridges"].tolist(),
            **{name: _for_json(results[name]) for name in ("errors", "errors_all_rows", "errors_without_landmarks")},
            "best_error": self.best_score_,
        }
        return super().summary() | {"selection": selection}


def as_scoring(scoring: Any) -> str | KFold:
    """What ``scoring`` is or stands for.

    Raises
    ------
    InvalidParameter
        Neither folds nor the name of a criterion.
    """
    if isinstance(scoring, KFold):
        return scoring
    if not isinstance(scoring, str) or scoring not in SCORINGS:
        raise InvalidParameter(f"scoring must be one of {', '.join(SCORINGS)} or KFold(…), got {scoring!r}")
    return KFold() if scoring == KFold.name else scoring


def _name(scoring: str | KFold) -> str:
    return scoring.name if isinstance(scoring, KFold) else scoring


def left_out_errors(
    trained: FitSums, ridges: tuple[float, ...], intercept: bool, repeats: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean squared leave-one-out residuals (L, t): of all rows, and of those that are no landmarks; one pass.

    Where weights count ``repeats``, one of them is left out at a time.

    Raises
    ------
    CheckFailed
        The rows are not those of pass 1.
    """
    run, sketch, data = trained.run, trained.sketch, trained.data
    expected = trained.perform(diagonalise, ridges, intercept) + intercept
    payload = held(trained.algebra, quick_smoother, run.executor)
    kernel = unweighted(sketch.kernel)
    repeat = data.scale if repeats else math.inf
    work = partial(left_out_task, kernel, sketch.dtype, ridges, data.weighted, repeat, sketch.pivots)
    first, *others = map_blocks(run, "leave-one-out", work, data.rows, data.targets, shared=[payload]).values()
    sums: LeftOutSums = sum(others, first)
    if np.abs(sums.diagonal - expected).max() > SUM_TOLERANCE[sketch.dtype] * max(1.0, expected.max()):
        raise CheckFailed(
            f"the smoother's diagonal sums to {sums.diagonal[0]:.6g} where its trace is {expected[0]:.6g}: the rows "
            "changed between the passes. Fit a source that does not change while it is read."
        )
    weights = np.where(sums.weights > 0, sums.weights, np.nan)
    return sums.squares[0] / weights[0], sums.squares[1] / weights[1]


def _for_json(errors: NDArray[np.float64] | None) -> list[list[float | None]] | None:
    if errors is None:
        return None
    return [[float(one) if np.isfinite(one) else None for one in row] for row in errors]


def _numbered(report: Any, prefix: str, event: Any) -> None:
    report(replace(event, stage=prefix + event.stage))


def _warn_of_ends(ridges: tuple[float, ...], best: int) -> None:
    for end, name in ((min(ridges), "smallest"), (max(ridges), "largest")):
        if len(ridges) > 2 and ridges[best] == end:
            log.warning("the best ridge, %.3g, is the %s of those given: a better one may lie beyond", end, name)
