"""A problem: the arguments of a run, checked, with its rows opened and its cost planned, before any long work."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from daskrr.errors import InvalidParameter, check_positive
from daskrr.kernels import Kernel, as_kernel
from daskrr.kernels.weighted import Weighted, unweighted
from daskrr.leverage.pilot import pilot
from daskrr.leverage.plan import Plan, Workers, check_fits, make_plan, spare_bytes
from daskrr.nystrom.audit import PROBE_ROWS
from daskrr.nystrom.first_pass import Settings
from daskrr.nystrom.landmarks import check_seed
from daskrr.nystrom.ledger import Ledger
from daskrr.nystrom.row_weights import open_weights
from daskrr.nystrom.sampling import Drawing, Sampling, as_sampling
from daskrr.nystrom.strategies import Certify, Tolerance, as_certify, as_landmarks
from daskrr.nystrom.workload import Workload
from daskrr.runtime.devices import Choice
from daskrr.runtime.executors import Executor, executor
from daskrr.runtime.map_blocks import spans_of
from daskrr.runtime.rows import JoinedRows, Rows, open_rows
from daskrr.runtime.tree import Span
from daskrr.storage.urls import redact


@dataclass(frozen=True)
class Problem:
    """Checked arguments, opened rows, and what they cost.

    Attributes
    ----------
    settings
        What is fitted to the landmarks, whichever they are.
    landmarks
        How many: a number, a tolerance, or None where row numbers say it.
    random_state, seed
        As asked for, and what all draws begin with.
    block_rows, device
        Rows of a block, and what to compute on, as asked for.
    ledger
        What the audits of the job so far have spent.
    """

    name: str
    rows: Rows
    settings: Settings
    sampling: Sampling
    landmarks: int | Tolerance | None
    certify: Certify | None
    random_state: int | None
    seed: int
    missing_chunks: str
    block_rows: int | None
    ledger: Ledger
    workload: Workload
    plan: Plan
    executor: Executor
    device: str | None = None
    began: float = field(default_factory=time.perf_counter)

    @property
    def tolerance(self) -> Tolerance | None:
        """What intervals are to meet, where that decides the number of landmarks."""
        return self.landmarks if isinstance(self.landmarks, Tolerance) else None

    @property
    def audit_rows(self) -> int:
        """Rows of an audit, where there is one."""
        return (self.certify or Certify()).audit_rows

    @property
    def failure_probability(self) -> float:
        """With what probability an interval may miss its score."""
        return self.ledger.asked

    @property
    def drawing(self) -> Drawing:
        """What landmarks are drawn with."""
        return Drawing(size=self.workload.n_landmarks, seed=self.seed, audit_rows=self.audit_rows)

    @property
    def notes(self) -> list[str]:
        """What is done otherwise than it was asked for."""
        size, n_rows = self.landmarks, self.rows.n_rows
        if not isinstance(size, int) or size <= n_rows:
            return []
        return [f"landmarks={size} was cut to the {n_rows} rows there are: a row can be a landmark only once."]

    @property
    def n_features(self) -> int:
        """Of the rows, without their weights."""
        return self.rows.shape[1] - isinstance(self.settings.kernel, Weighted)

    @property
    def weights(self) -> Rows | None:
        """Of the rows, if they have any."""
        return self.rows.column if isinstance(self.rows, JoinedRows) else None

    def spans(self, cut_at: int = 0) -> list[Span]:
        """What each task works on, on the workers that there are now; see :func:`daskrr.runtime.tree.cut`."""
        flops, sum_bytes = self.workload.pass_flops(self.rows.shape[1]), self.workload.sum_bytes
        return spans_of(self.rows, self.plan.block_rows, self.executor, flops, sum_bytes, cut_at)

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
            "tolerance": None if self.tolerance is None else self.tolerance.relative,
        }

    def begin(self) -> None:
        """Refuse a plan that does not fit the workers; those with a GPU, which wait for rows, keep what they decode.

        Raises
        ------
        DoesNotFit
            With the bytes needed and what to change.
        """
        workers = Workers.of(self.executor)
        check_fits(self.plan, workers)
        spare = spare_bytes(self.plan, workers)
        if self.executor.device.gpu is not None and self.rows.is_stored and spare:
            self.executor.keep_pieces(spare)

    def afresh(self, seed: int | None = None) -> "Problem":
        """The same problem for one more run, on the workers that there are now, whose draws begin with ``seed``."""
        name = uuid.uuid4().hex
        where = executor(name, self.device)
        _check_device(self.settings.kernel, where.device)
        again = replace(self, name=name, executor=where, seed=self.seed if seed is None else seed)
        return replace(again.planned(Workers.of(again.executor)), began=time.perf_counter())

    def planned(self, workers: Workers) -> "Problem":
        """The same problem with the plan for these workers."""
        plan = make_plan(self.rows, self.settings.dtype, self.workload, self.block_rows, workers)
        return replace(self, plan=plan, settings=replace(self.settings, scheduler_bytes=plan.scheduler_bytes))

    def with_sums(self, n_sums: int, n_readings: int) -> "Problem":
        """The same problem with a plan for so many Gram matrices, and results per row where those are more."""
        n_ridges = max(self.workload.n_ridges, n_readings)
        larger = replace(self, workload=replace(self.workload, n_sums=n_sums, n_ridges=n_ridges))
        return larger.planned(Workers.of(self.executor))


def state_problem(
    X: Any,
    kernel: Any = None,
    ridge: Any = None,
    landmarks: int | Tolerance | None = None,
    *,
    sampling: Any = "residual",
    certify: bool | Certify = False,
    random_state: int | None = None,
    dtype: DTypeLike = "float64",
    missing_chunks: str = "refuse",
    block_rows: int | None = None,
    sample_weight: Any = None,
    device: str | None = None,
) -> Problem:
    """Check every argument of :func:`daskrr.leverage_scores` and make the plan.

    Reads nothing but metadata, unless there is no ridge: then a pilot chooses it, and the landmarks if there are none.
    """
    if ridge is None:
        rows, kernel = open_rows(X, missing_chunks=missing_chunks), as_kernel("gaussian" if kernel is None else kernel)
        chosen = pilot(rows, kernel)
        X, kernel, ridge = rows, chosen.kernel, chosen.choice().ridge
        landmarks = chosen.choice().landmarks if landmarks is None and sampling == "residual" else landmarks
    kernel = "gaussian" if kernel is None else kernel
    ridges, single = check_ridges(ridge)
    kernel, tiles = as_kernel(kernel), _check_dtype(dtype)
    if kernel.needs_targets:
        raise InvalidParameter(
            "length_scale='learn' learns from targets, and there are none here. Give a number, one per feature or "
            "'median', or the kernel_ of a regression that has learned it."
        )
    rows = open_rows(X, missing_chunks=missing_chunks)
    if sample_weight is not None:
        weights = open_weights(rows, sample_weight, missing_chunks)
        rows, kernel = JoinedRows(rows, weights, 1.0), Weighted(kernel)
    kernel.check_features(rows.shape[1])
    drawn = as_sampling(sampling, rows.n_rows)
    wanted = as_landmarks(landmarks, drawn.finds_number)
    certain = as_certify(certify)
    if isinstance(wanted, Tolerance):
        _check_finds_number(drawn)
        certain = certain or Certify()
    work = _workload(kernel, drawn, wanted, rows.n_rows, len(ridges), certain)
    name = uuid.uuid4().hex
    where = executor(name, device)
    _check_device(kernel, where.device)
    plan = make_plan(rows, tiles, work, block_rows, Workers.of(where))
    settings = Settings(
        kernel=kernel,
        ridges=ridges,
        single=single,
        dtype=tiles,
        sketch_ridge=drawn.sketch_ridge,
        n_landmarks=work.n_landmarks,
        scheduler_bytes=plan.scheduler_bytes,
        with_subset=certain is not None and certain.subset_bound,
    )
    return Problem(
        name=name,
        rows=rows,
        settings=settings,
        sampling=drawn,
        landmarks=wanted,
        certify=certain,
        random_state=random_state,
        seed=check_seed(random_state),
        missing_chunks=missing_chunks,
        block_rows=block_rows,
        ledger=Ledger(asked=(certain or Certify()).failure_probability, chooses=isinstance(wanted, Tolerance)),
        workload=work,
        plan=plan,
        executor=where,
        device=device,
    )


def check_ridges(ridge: Any) -> tuple[tuple[float, ...], bool]:
    """The ridges, and whether one was given as a number."""
    if not isinstance(ridge, (Sequence, np.ndarray)) or isinstance(ridge, str) or np.ndim(ridge) == 0:
        return (check_positive("ridge", ridge if not isinstance(ridge, np.ndarray) else ridge[()]),), True
    ridges = tuple(check_positive("every ridge", one) for one in ridge)
    if not ridges:
        raise InvalidParameter("ridge must be a number or a list of numbers, got an empty list")
    twice = [one for one in ridges if ridges.count(one) > 1]
    if twice:
        raise InvalidParameter(
            f"ridge {twice[0]:g} is in the list {ridges.count(twice[0])} times; give each ridge once"
        )
    return ridges, False


def _check_dtype(dtype: DTypeLike) -> np.dtype:
    try:
        tiles = np.dtype(dtype)
    except TypeError:
        tiles = np.dtype(object)
    if tiles not in (np.dtype(np.float64), np.dtype(np.float32)):
        raise InvalidParameter(f"dtype must be 'float64' or 'float32', got {dtype!r}")
    return tiles


def _check_device(kernel: Kernel, device: Choice) -> None:
    if device.gpu is not None and not kernel.takes_gpu_arrays:
        raise InvalidParameter(
            f"{unweighted(kernel)!r} is a function that does not say whether it takes CuPy arrays, and device is "
            f"{device.name!r}. If it does, give it an attribute takes_cupy = True; otherwise use device='cpu'."
        )


def _check_finds_number(sampling: Sampling) -> None:
    if not sampling.finds_number:
        raise InvalidParameter(
            f"a tolerance finds the number of landmarks with sampling='residual' alone, and sampling is "
            f"{sampling.name!r}. Give landmarks as a number, or leave it out where row numbers are given."
        )


def _workload(
    kernel: Any,
    sampling: Sampling,
    landmarks: int | Tolerance | None,
    n_rows: int,
    n_ridges: int,
    certify: Certify | None,
) -> Workload:
    """What the plan has to count."""
    audit_rows = certify.audit_rows if certify is not None and certify.failure_probability > 0 else 0
    found = landmarks.sizes(n_rows)[-1] if isinstance(landmarks, Tolerance) else sampling.number(landmarks)
    base = Workload(
        n_landmarks=found,
        n_ridges=n_ridges,
        audit_rows=audit_rows,
        draws=(PROBE_ROWS, audit_rows),
        landmark_copies=kernel.landmark_copies,
    )
    if isinstance(landmarks, Tolerance):
        return landmarks.workload(base, kernel, n_rows)
    return sampling.workload(base, kernel, n_rows, (certify or Certify()).audit_rows)
