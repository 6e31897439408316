"""Rows with targets and weights, and pass 1 over them: all that a regression learns from."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.errors import InvalidData
from daskrr.kernels import Kernel
from daskrr.kernels.weighted import Weighted
from daskrr.leverage.algorithm import grow_until_tight
from daskrr.leverage.problem import Problem
from daskrr.numerics.factorize import check_resolution
from daskrr.nystrom.audit import audit, audit_draws
from daskrr.nystrom.drawing import fetch_rows
from daskrr.nystrom.first_pass import Chosen, FirstPass, Settings, first_pass, whiten
from daskrr.nystrom.row_weights import open_weights, sum_weights
from daskrr.nystrom.sampling import FIRST_ROUND_STREAM
from daskrr.nystrom.sketch import NystromSketch
from daskrr.regression.factors import add_sums
from daskrr.regression.moments import Folds, TargetRows
from daskrr.runtime.blocks import Block
from daskrr.runtime.executors import executor
from daskrr.runtime.map_blocks import Run
from daskrr.runtime.rows import ConstantRows, JoinedRows, Rows, open_rows, pieces
from daskrr.runtime.scheduler import Algebra
from daskrr.runtime.sealing import sealed_task

# As many targets tell where the others are.
ORIGIN_ROWS = 4096

# What sample weights can mean.
FREQUENCY, PRECISION = "frequency", "precision"


@dataclass(frozen=True)
class Training:
    """Rows (n, d), targets (n,) or (n, t), and weights (n,) if there are any, each in chunks of its own."""

    rows: Rows
    targets: Rows
    weights: Rows | None

    @classmethod
    def open(cls, X: Any, y: Any, sample_weight: Any, missing_chunks: str) -> "Training":
        """View arrays or paths; reads nothing but metadata.

        Raises
        ------
        InvalidData
            They do not belong together.
        """
        rows = open_rows(X, missing_chunks=missing_chunks)
        targets = open_rows(y, ndim=None, missing_chunks=missing_chunks, name="y")
        if targets.n_rows != rows.n_rows:
            raise InvalidData(f"X has {rows.n_rows} rows and y has {targets.n_rows}: one target per row is needed.")
        weights = None if sample_weight is None else open_weights(rows, sample_weight, missing_chunks)
        return cls(rows, targets, weights)

    @property
    def single(self) -> bool:
        """Whether there is one target, given as a vector."""
        return len(self.targets.shape) == 1

    @property
    def n_targets(self) -> int:
        """Targets of a row."""
        return 1 if self.single else self.targets.shape[1]

    def check_reachable(self) -> None:
        """Raise unless every worker can read everything."""
        for source in (self.rows, self.targets, self.weights):
            if source is not None:
                executor(uuid.uuid4().hex).check(source)

    def weighed(self, scale: float | None = None) -> "WeightedRows":
        """Rows that carry the root of their weight, times ``scale``: by default what makes the mean weight 1.

        One light pass checks the weights. Rows without weights have weight 1.
        """
        weights, n_rows = self.weights, self.rows.n_rows
        if weights is None and scale in (None, 1.0):
            return WeightedRows(self.rows, self.targets, False, 1.0, n_rows)
        if weights is None:
            weights = ConstantRows(n_rows, 1.0)
        total, n_counted = sum_weights(weights)
        if scale is None:
            scale = n_rows / total
        return WeightedRows(JoinedRows(self.rows, weights, scale), self.targets, True, scale, n_counted)

    def origin(self) -> NDArray[np.float64]:
        """(t,) somewhere amid the targets: the median of the first few that have a weight."""
        name, stop = uuid.uuid4().hex, min(ORIGIN_ROWS, self.targets.n_rows)
        given = (self.targets,) if self.weights is None else (self.targets, self.weights)
        sources = [one.anew(f"origin-{number}-{name}").source(0, stop) for number, one in enumerate(given)]
        where = executor(name)
        one = sealed_task(f"target-origin-{name}", _middle_target, *sources)
        return where.value(next(where.window([one], [Block(0, 0, stop)]))[1])


@dataclass(frozen=True)
class WeightedRows:
    """Rows whose last feature is the root of a weight times ``scale``, if ``weighted``, and their targets.

    ``n_counted`` of them have a weight above zero.
    """

    rows: Rows
    targets: Rows
    weighted: bool
    scale: float
    n_counted: int

    @property
    def n_targets(self) -> int:
        """Targets of a row."""
        return 1 if len(self.targets.shape) == 1 else self.targets.shape[1]

    def kernel(self, kernel: Kernel) -> Kernel:
        """The kernel of such rows."""
        return Weighted(kernel) if self.weighted else kernel


def _middle_target(source: Any, *weights: Any) -> NDArray[np.float64]:
    """The median; what is not finite is left to pass 1, which names its row."""
    values = np.concatenate([np.asarray(piece, np.float64) for piece in pieces(source)])
    values = values.reshape(len(values), -1)
    kept = np.isfinite(values).all(axis=1)
    for one in weights:
        kept &= np.concatenate([np.asarray(piece, np.float64) for piece in pieces(one)]) > 0
    return np.median(values[kept], axis=0) if kept.any() else np.zeros(values.shape[1])


@dataclass(frozen=True)
class Deviation:
    """Certified bound of the largest eigenvalue of what the landmarks leave of the kernel matrix."""

    delta: float
    failure_probability: float

    def __add__(self, other: "Deviation") -> "Deviation":
        # The norm of a positive matrix is at most the sum of those of its diagonal blocks.
        return Deviation(self.delta + other.delta, self.failure_probability + other.failure_probability)


@dataclass(frozen=True)
class FitSums:
    """Landmarks and the sums of pass 1 over rows and targets; the rest is small algebra."""

    run: Run
    data: WeightedRows
    settings: Settings
    sketch: NystromSketch
    first: FirstPass
    origin: NDArray[np.float64]
    audit_rows: int
    seed: int
    stream: int

    @property
    def next_stream(self) -> int:
        """The stream of the next audit: neither this one nor any that had a say in the landmarks has drawn from it."""
        return max(self.stream, FIRST_ROUND_STREAM) + 1

    @property
    def algebra(self) -> Algebra:
        """Where the factors are."""
        return self.sketch.algebra

    def perform(self, step: Callable[..., Any], ridges: Sequence[float], intercept: bool) -> Any:
        """A step of the algebra at these ridges."""
        how = {"dtype": self.settings.dtype, "ridges": list(ridges), "intercept": bool(intercept)}
        return self.algebra.perform(partial(step, **how))

    def deviation(self, failure_probability: float) -> Deviation:
        """Audit the rows."""
        found = audit(self.run, self.sketch, self.first, self.audit_rows, failure_probability, self.seed, self.stream)
        return Deviation(found.delta, found.failure_probability)


def audited_rows(problem: Problem) -> int:
    """Rows of the audit, if there is one."""
    return problem.audit_rows if problem.certify and problem.failure_probability > 0 else 0


def fresh_stream(problem: Problem) -> int:
    """The stream of the first audit of chosen landmarks: no round that had a say in them has seen its rows.

    So the audit may spend all that was asked for, and theirs cost nothing; see :class:`daskrr.nystrom.ledger.Ledger`.
    """
    return 0 if problem.tolerance is None else len(problem.tolerance.sizes(problem.rows.n_rows))


def train(
    problem: Problem,
    run: Run,
    settings: Settings,
    data: WeightedRows,
    origin: NDArray[np.float64],
    folds: Folds | None = None,
) -> FitSums:
    """Choose landmarks and take the sums of rows and targets."""
    sketch, _ = whiten(run, f"{run.name}-fit", settings, choose(problem, run, settings))
    trained = take_sums(problem, run, settings, data, sketch, origin, folds, fresh_stream(problem))
    totals = trained.first.totals
    mean = totals.diagonal / sketch.n_rows
    check_resolution(sketch.kernel_error, mean, settings.resolved, sketch.rank, totals.height, settings.dtype)
    return trained


def take_sums(
    problem: Problem,
    run: Run,
    settings: Settings,
    data: WeightedRows,
    sketch: NystromSketch,
    origin: NDArray[np.float64],
    folds: Folds | None = None,
    stream: int = 0,
    payload: Any = None,
) -> FitSums:
    """Pass 1 with the targets, whose sums are added to those that the sketch has already; audits draw by a stream."""
    seed, audit_rows = problem.seed, audited_rows(problem)
    targets = TargetRows(data.targets, origin, data.weighted, folds)
    first = first_pass(
        run, sketch, audit_draws(seed, stream, audit_rows), title="fit: gram",
        begin=targets.begin, others=[targets.rows], payload=payload,
    )  # fmt: skip
    sketch.algebra.perform(partial(add_sums, weighted=data.weighted, origin=origin), first.gram)
    return FitSums(
        run=run,
        data=data,
        settings=settings,
        sketch=sketch,
        first=first,
        origin=origin,
        audit_rows=audit_rows,
        seed=seed,
        stream=stream,
    )


def choose(problem: Problem, run: Run, settings: Settings) -> Chosen:
    """The landmarks: as many as asked for, or as many as the tolerance needs."""
    if problem.tolerance is None:
        return problem.sampling.choose(run, settings, problem.drawing)[0]
    landmarks = grow_until_tight(replace(problem, settings=settings), run, problem.tolerance).sketch.landmarks
    return Chosen(landmarks, fetch_rows(run, landmarks.indices, "sample-rows-again"))
