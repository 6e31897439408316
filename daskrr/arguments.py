"""The arguments of a run, checked before any long work."""

import itertools
import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from daskrr.engine.addresses import redact
from daskrr.engine.passes import Executor, executor
from daskrr.engine.plan import Plan, Work, Workers, make_plan
from daskrr.engine.rows import JoinedRows, Rows, open_rows
from daskrr.errors import InvalidParameter, check_count, check_positive
from daskrr.kernels import Kernel, as_kernel
from daskrr.kernels.weighted import Weighted, unweighted
from daskrr.ledger import Ledger
from daskrr.nystrom.audit import AUDIT_ROWS, MAX_AUDIT_ROWS, PROBE_ROWS
from daskrr.nystrom.pass1 import Settings
from daskrr.nystrom.rounds import FIRST_SHARE, Scheme, most_candidates, n_candidates, round_sizes
from daskrr.nystrom.row_weights import open_weights
from daskrr.nystrom.sampling import check_seed, without_probabilities
from daskrr.nystrom.selection import check_sampling

# Importance sampling wants scores up to a constant factor, and this is one.
DEFAULT_TOLERANCE = 0.5
DEFAULT_MAX_LANDMARKS = 2000
FIRST_ROUND = 128
# By what p is multiplied from one round to the next: less where the tolerance is almost met.
SLOW_GROWTH, FAST_GROWTH = 1.5, 2.0


@dataclass(frozen=True)
class Options:
    """The keyword arguments of :func:`leverage_scores`, with their defaults."""

    sampling: Any = "residual"
    tolerance: float | None = None
    absolute_tolerance: float | None = None
    max_landmarks: int | None = None
    score_floor: float | None = None
    certify: bool = False
    failure_probability: float = 1e-6
    audit_rows: int = AUDIT_ROWS
    subset_bound: bool = False
    rounds: int = 2
    replacement: bool | None = None
    epsilon: float = 0.1
    sketch_ridge: float | None = None
    random_state: int | None = None
    dtype: DTypeLike = "float64"
    missing_chunks: str = "refuse"
    block_rows: int | None = None
    sample_weight: Any = None


@dataclass(frozen=True)
class Target:
    """When to stop adding landmarks: when every interval is tight, or when there are so many.

    ``sizes`` are the landmarks of every round if each adds as few as it may.
    """

    sizes: tuple[int, ...]
    relative: float | None
    absolute: float | None


@dataclass(frozen=True)
class Job:
    """Checked arguments of a run; ``ledger`` is that of the job so far."""

    name: str
    rows: Rows
    settings: Settings
    scheme: Scheme
    target: Target | None
    certify: bool
    ledger: Ledger
    score_floor: float | None
    missing_chunks: str
    plan: Plan
    executor: Executor
    began: float = field(default_factory=time.perf_counter)

    @property
    def failure_probability(self) -> float:
        """With what probability an interval may miss its score."""
        return self.ledger.asked

    @property
    def seed(self) -> int:
        """Of all random numbers."""
        return self.scheme.seed

    @property
    def notes(self) -> list[str]:
        """What is done otherwise than it was asked for."""
        size, n_rows = self.scheme.size, self.rows.n_rows
        if self.target is not None or size is None or size <= n_rows:
            return []
        return [f"n_landmarks={size} was cut to the {n_rows} rows there are: a row can be a landmark only once."]

    @property
    def n_features(self) -> int:
        """Of the rows, without their weights."""
        return self.rows.shape[1] - isinstance(self.settings.kernel, Weighted)

    @property
    def weights(self) -> Rows | None:
        """Of the rows, if they have any."""
        return self.rows.column if isinstance(self.rows, JoinedRows) else None

    @property
    def facts(self) -> dict[str, Any]:
        """What a page about it says at its head."""
        return {
            "run": self.name,
            "input": redact(self.rows.origin),
            "rows": self.rows.n_rows,
            "features": self.n_features,
            "kernel": repr(unweighted(self.settings.kernel)),
            "ridge": self.settings.smallest,
            "landmarks": self.settings.n_landmarks,
            "tolerance": None if self.target is None else self.target.relative,
        }


def prepare(
    X: Any,
    kernel: Any,
    ridge: Any,
    n_landmarks: int | None,
    options: Options,
    workers: int | None = None,
    n_sums: int = 1,
    n_readings: int = 0,
) -> Job:
    """Check every argument and make the plan; reads nothing but metadata.

    The plan allows for ``n_sums`` Gram matrices, and ``n_readings`` results per row where those are more than ridges.
    """
    ridges, single = check_ridges(ridge)
    gamma = options.sketch_ridge
    if gamma is not None and gamma != 0:
        gamma = check_positive("sketch_ridge", gamma)
    kernel, dtype = as_kernel(kernel), _check_dtype(options.dtype)
    rows = open_rows(X, missing_chunks=options.missing_chunks)
    if options.sample_weight is not None:
        weights = open_weights(rows, options.sample_weight, options.missing_chunks)
        rows, kernel = JoinedRows(rows, weights, 1.0), Weighted(kernel)
    kernel.check_features(rows.shape[1])
    target = _check_target(options, n_landmarks, rows.n_rows)
    scheme = _check_scheme(options, n_landmarks, rows.n_rows, target)
    if gamma:
        _check_probabilities(scheme)
    name = uuid.uuid4().hex
    where = executor(name)
    on = Workers.of(where) if workers is None else Workers.embedded(check_count("workers", workers))
    certify = bool(options.certify) or target is not None
    rho = _check_probability(options.failure_probability)
    work = _work(kernel, scheme, target, rows.n_rows, max(len(ridges), n_readings), certify and rho > 0, n_sums)
    made = make_plan(rows, dtype, work, options.block_rows, on)
    settings = Settings(
        kernel, ridges, single, dtype, gamma or None, work.n_landmarks, made.scheduler_bytes,
        with_subset=bool(options.subset_bound) and certify,
    )  # fmt: skip
    floor = None if options.score_floor is None else check_positive("score_floor", options.score_floor)
    ledger = Ledger(asked=rho, chooses=target is not None)
    return Job(name, rows, settings, scheme, target, certify, ledger, floor, options.missing_chunks, made, where)


def check_ridges(ridge: Any) -> tuple[tuple[float, ...], bool]:
    """The ridges, and whether one was given as a number."""
    if not isinstance(ridge, (Sequence, np.ndarray)) or isinstance(ridge, str) or np.ndim(ridge) == 0:
        return (check_positive("ridge", ridge if not isinstance(ridge, np.ndarray) else ridge[()]),), True
    found = tuple(check_positive("every ridge", one) for one in ridge)
    if not found:
        raise InvalidParameter("ridge must be a number or a list of numbers, got an empty list")
    twice = [one for one in found if found.count(one) > 1]
    if twice:
        raise InvalidParameter(f"ridge {twice[0]:g} is in the list {found.count(twice[0])} times; give each ridge once")
    return found, False


def _check_probability(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)) or not 0 <= value < 1:
        raise InvalidParameter(f"failure_probability must be a number from 0 up to, not including, 1; got {value!r}")
    return float(value)


def _check_dtype(dtype: DTypeLike) -> np.dtype:
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = np.dtype(object)
    if found not in (np.dtype(np.float64), np.dtype(np.float32)):
        raise InvalidParameter(f"dtype must be 'float64' or 'float32', got {dtype!r}")
    return found


def _check_target(options: Options, n_landmarks: int | None, n_rows: int) -> Target | None:
    """The tolerance to be met, or None where the number of landmarks is given."""
    relative, absolute = (
        None if value is None else check_positive(name, value)
        for name, value in (("tolerance", options.tolerance), ("absolute_tolerance", options.absolute_tolerance))
    )
    wanted = relative is not None or absolute is not None
    if n_landmarks is not None or not isinstance(options.sampling, str):
        if wanted or options.max_landmarks is not None:
            raise InvalidParameter(
                "tolerance and max_landmarks choose the number of landmarks; leave n_landmarks and given landmarks out."
            )
        return None
    if options.sampling != "residual":
        raise InvalidParameter(
            f"n_landmarks is needed with sampling={options.sampling!r}. Only sampling='residual' finds the number of "
            "landmarks by itself, to meet a tolerance."
        )
    most = (
        DEFAULT_MAX_LANDMARKS if options.max_landmarks is None else check_count("max_landmarks", options.max_landmarks)
    )
    first = min(FIRST_ROUND, n_rows)
    if most < first:
        raise InvalidParameter(f"max_landmarks must be at least {first}, the size of the first round; got {most}")
    sizes = [first]
    while sizes[-1] < min(most, n_rows):
        sizes.append(min(math.ceil(SLOW_GROWTH * sizes[-1]), most, n_rows))
    return Target(tuple(sizes), relative if wanted else DEFAULT_TOLERANCE, absolute)


def _check_scheme(options: Options, n_landmarks: int | None, n_rows: int, target: Target | None) -> Scheme:
    sampling = check_sampling(options.sampling, n_rows)
    size: int | None
    if target is not None:
        size = target.sizes[-1]
    elif n_landmarks is None and isinstance(sampling, np.ndarray):
        size = None
    elif n_landmarks is None:
        raise InvalidParameter("n_landmarks, the number of draws, is needed with probabilities.")
    else:
        size = check_count("n_landmarks", n_landmarks)
    replacement = options.replacement
    if replacement is None:
        replacement = not (isinstance(sampling, str) and sampling == "residual")
    epsilon = check_positive("epsilon", options.epsilon)
    return Scheme(
        sampling, size, check_count("rounds", options.rounds), bool(replacement), epsilon,
        check_count("audit_rows", options.audit_rows), check_seed(options.random_state),
    )  # fmt: skip


def _check_probabilities(scheme: Scheme) -> None:
    """Refuse landmarks without probabilities, which L_γ needs."""
    if isinstance(scheme.sampling, np.ndarray) or scheme.sampling == "residual" or not scheme.replacement:
        raise without_probabilities()


def _work(
    kernel: Kernel, scheme: Scheme, target: Target | None, n_rows: int, n_ridges: int, audited: bool, n_sums: int
) -> Work:
    """What the plan has to count."""
    size = scheme.size if scheme.size is not None else max(1, len(scheme.sampling))  # type: ignore[arg-type]
    by_name = scheme.sampling if isinstance(scheme.sampling, str) else None
    weighs = isinstance(scheme.sampling, Rows) or (
        by_name is not None and by_name != "uniform" and not kernel.constant_diagonal
    )
    audit_rows = scheme.audit_rows if audited else 0
    work = Work(
        size, n_ridges, weighs, audit_rows=audit_rows, draws=(PROBE_ROWS, audit_rows), n_sums=n_sums,
        landmark_copies=kernel.landmark_copies,
    )  # fmt: skip
    if target is not None:
        audit_rows = max(audit_rows, MAX_AUDIT_ROWS) if audited else 0
        most = (PROBE_ROWS, audit_rows, most_candidates(-(-size // 2)))
        return replace(work, full_rounds=target.sizes[:-1], audit_rows=audit_rows, draws=most)
    if by_name == "residual":
        sizes = round_sizes(size, scheme.rounds)
        candidates = ((n_candidates(most - few, most, n_rows) + 1,) for few, most in itertools.pairwise(sizes))
        draws = max([work.draws, *candidates], key=sum)
        return replace(work, residual_rounds=tuple(sizes[:-1]), draws=draws)
    if by_name == "leverage":
        return replace(work, full_rounds=(max(1, size // FIRST_SHARE),), draws=(PROBE_ROWS, scheme.audit_rows))
    return work
