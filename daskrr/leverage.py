"""λ-ridge leverage scores of every row: the paper's algorithm from end to end.

diagonal → sample landmarks → their kernel matrix W → B with B Bᵀ = L → Gram matrix of B → scores. The call does
everything up to the Gram matrix; scores are computed when they are asked for.
"""

import math
import time
import uuid
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import dask
import distributed
import numpy as np
import scipy
import zarr
from numpy.typing import DTypeLike, NDArray

from daskrr import __version__
from daskrr.engine.passes import Executor, Run, executor, split
from daskrr.engine.plan import Plan, Workers, check_fits, make_plan
from daskrr.engine.progress import Reporter, Stage, reporter
from daskrr.engine.rows import Rows, open_rows
from daskrr.engine.scheduler import algebra
from daskrr.errors import InvalidParameter, check_count
from daskrr.kernels import Kernel, as_kernel
from daskrr.numerics.algebra import check_resolution, shift_of
from daskrr.numerics.tiles import GramPart, Kept
from daskrr.nystrom.sampling import Landmarks, check_seed
from daskrr.nystrom.selection import check_sampling, draw_landmarks, fetch_rows, resolve_kernel
from daskrr.nystrom.sketch import NystromSketch, landmark_inputs
from daskrr.result import LeverageResult

# Gram matrices of blocks that one task adds to the sum.
ADDENDS = 4


def leverage_scores(
    X: Any,
    kernel: Kernel | dict | Any,
    ridge: float,
    n_landmarks: int | None = None,
    *,
    sampling: Any = "diagonal",
    sketch_ridge: float | None = None,
    random_state: int | None = None,
    dtype: DTypeLike = "float64",
    missing_chunks: str = "refuse",
    block_rows: int | None = None,
    progress: Reporter | bool | None = None,
) -> LeverageResult:
    """Nyström approximation of the λ-ridge leverage scores of the rows of X (El Alaoui & Mahoney, Section 3.5).

    Draws the landmarks and runs pass 1 on the current Dask client, or in this process where there is none. Pass 2
    runs when the result's arrays are computed or stored.

    Parameters
    ----------
    X
        (n, d) real: NumPy array, Dask array, Zarr array, or path or URL of a Zarr array.
    kernel
        A kernel of :mod:`daskrr.kernels`, its specification, or an importable function k(X, Z).
    ridge
        λ > 0. As in the paper, n·λ is added to the kernel matrix.
    n_landmarks
        Number p of draws; may exceed n.
    sampling
        ``"diagonal"`` (probabilities k_ii / tr K, Theorem 4), ``"uniform"``, n probabilities (floating dtype), or the
        row numbers of the landmarks (integer dtype).
    sketch_ridge
        γ ≥ 0 of the regularised approximation L_γ.
    random_state
        Seed. None draws one and records it.
    dtype
        Of the tiles, ``"float64"`` or ``"float32"``; factors and sums are float64.
    missing_chunks
        ``"refuse"`` an input with chunks that were never written, or read them as their ``"fill"`` value.
    block_rows
        Rows per task, rounded to whole input chunks. The default depends on p and the chunks alone, since it changes
        the last bits of the result.
    progress
        None: a bar on a terminal; False: nothing; or a function that receives every event.

    Raises
    ------
    InvalidParameter, InvalidData, MissingChunks, DoesNotFit, SourceUnreachable
        Before any long work.
    KernelNotPositive, RidgeTooSmall
        When the numbers cannot be trusted.

    Examples
    --------
    >>> import numpy as np, daskrr
    >>> X = np.random.default_rng(0).standard_normal((500, 2))
    >>> result = daskrr.leverage_scores(X, daskrr.kernels.Gaussian(1.0), ridge=1e-2, n_landmarks=100, random_state=0)
    >>> bool(abs(result.scores.sum().compute() - result.effective_dimension) < 1e-9)
    True
    """
    job = _prepare(
        X, kernel, ridge, n_landmarks, sampling, sketch_ridge, random_state, dtype, missing_chunks, block_rows
    )
    check_fits(job.plan, Workers.of(job.executor))
    job.executor.check(job.rows)
    with reporter(progress) as report:
        return _run_pass_1(
            job, Run(job.name, job.rows, split(job.rows.n_rows, job.plan.block_rows), job.executor, report)
        )


def plan(
    X: Any,
    kernel: Kernel | dict | Any,
    ridge: float,
    n_landmarks: int | None = None,
    *,
    sampling: Any = "diagonal",
    sketch_ridge: float | None = None,
    random_state: int | None = None,
    dtype: DTypeLike = "float64",
    missing_chunks: str = "refuse",
    block_rows: int | None = None,
    workers: int | None = None,
) -> Plan:
    """What :func:`leverage_scores` with the same arguments would cost; runs nothing.

    Parameters
    ----------
    workers
        Plan for so many single-threaded worker processes, instead of the current client or this process.

    Examples
    --------
    >>> import numpy as np, daskrr
    >>> daskrr.plan(np.ones((1000, 4)), daskrr.kernels.Gaussian(1.0), 1e-3, 100).n_blocks
    1
    """
    return _prepare(
        X, kernel, ridge, n_landmarks, sampling, sketch_ridge, random_state, dtype, missing_chunks, block_rows, workers
    ).plan


@dataclass(frozen=True)
class _Job:
    """Checked arguments of a run."""

    name: str
    rows: Rows
    kernel: Kernel
    ridge: float
    n_landmarks: int | None
    sampling: str | NDArray[np.int64] | Rows
    sketch_ridge: float | None
    seed: int
    dtype: np.dtype
    plan: Plan
    executor: Executor
    began: float = field(default_factory=time.perf_counter)


def _prepare(
    X: Any,
    kernel: Any,
    ridge: float,
    n_landmarks: int | None,
    sampling: Any,
    sketch_ridge: float | None,
    random_state: int | None,
    dtype: DTypeLike,
    missing_chunks: str,
    block_rows: int | None,
    workers: int | None = None,
) -> _Job:
    """Check every argument and make the plan; reads nothing but metadata."""
    ridge = _check_positive("ridge", ridge)
    if sketch_ridge is not None and sketch_ridge != 0:
        sketch_ridge = _check_positive("sketch_ridge", sketch_ridge)
    tile_dtype = _check_dtype(dtype)
    kernel = as_kernel(kernel)
    seed = check_seed(random_state)
    rows = open_rows(X, missing_chunks=missing_chunks)
    kernel.check_features(rows.shape[1])
    scheme = check_sampling(sampling, rows.n_rows)
    size = _check_landmarks(n_landmarks, scheme)
    name = uuid.uuid4().hex
    where = executor(name)
    by_diagonal = isinstance(scheme, str) and scheme == "diagonal" and not kernel.constant_diagonal
    on = Workers.of(where) if workers is None else Workers.embedded(check_count("workers", workers))
    made = make_plan(rows, size, tile_dtype, by_diagonal or isinstance(scheme, Rows), block_rows, on)
    return _Job(
        name, rows, kernel, ridge, n_landmarks, scheme, sketch_ridge or None, seed, tile_dtype, made, where
    )  # fmt: skip


def _check_positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise InvalidParameter(f"{name} must be a number, got {value!r}")
    number = float(value)
    if not (number > 0 and math.isfinite(number)):
        raise InvalidParameter(f"{name} must be positive and finite, got {value!r}")
    return number


def _check_dtype(dtype: DTypeLike) -> np.dtype:
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = np.dtype(object)
    if found not in (np.dtype(np.float64), np.dtype(np.float32)):
        raise InvalidParameter(f"dtype must be 'float64' or 'float32', got {dtype!r}")
    return found


def _check_landmarks(n_landmarks: Any, scheme: str | NDArray[np.int64] | Rows) -> int:
    if n_landmarks is None and isinstance(scheme, np.ndarray):
        return max(1, len(scheme))
    return check_count("n_landmarks", n_landmarks)


def _run_pass_1(job: _Job, run: Run) -> LeverageResult:
    kernel = resolve_kernel(run, job.kernel, job.seed)
    landmarks = draw_landmarks(run, kernel, job.sampling, job.n_landmarks, job.seed)
    sketch, whitened = _whiten(job, run, kernel, landmarks)
    gram, kept, trace = _sum_grams(run, sketch)
    share = check_resolution(whitened["kernel_error"], trace / sketch.n_rows, job.ridge, sketch.rank, job.dtype)
    parameters = {"dtype": str(job.dtype), "n_rows": sketch.n_rows, "ridge": job.ridge}
    ridged = sketch.algebra.perform("add_ridge", gram, parameters)
    summary = _summary(job, sketch, whitened, ridged, trace, share)
    return LeverageResult(run.rows, run.blocks, sketch, kept, run.executor, job.plan, summary)


def _whiten(job: _Job, run: Run, kernel: Kernel, landmarks: Landmarks) -> tuple[NystromSketch, dict[str, Any]]:
    """Fetch the landmarks, form W where they are, and factor it on the scheduler (Algorithm, step 2)."""
    n, d = run.rows.shape
    penalty = None if job.sketch_ridge is None else landmarks.penalty(n, job.sketch_ridge)
    X = fetch_rows(run, landmarks.indices, "sample-rows")
    inputs = run.executor.apply("landmark-kernel", partial(landmark_inputs, kernel, job.dtype, penalty), X)
    place = algebra(run.executor, job.plan.scheduler_bytes)
    whitened = place.perform("whiten", inputs, {"dtype": str(job.dtype)})
    rank = len(whitened["pivots"])
    if kernel.constant_diagonal:
        diagonal = float(kernel.diagonal(np.zeros((1, d)))[0])
        check_resolution(whitened["kernel_error"], diagonal, job.ridge, rank, job.dtype)
    shift = shift_of(n, job.ridge)
    return NystromSketch(kernel, job.ridge, shift, n, d, job.dtype, landmarks, run.name, place, rank), whitened


def _sum_grams(run: Run, sketch: NystromSketch) -> tuple[Any, list[Any], float]:
    """Pass 1: add the blocks' Gram matrices from left to right; keep the residuals where they are."""
    kept: list[Any] = []
    total: list[Any] = []
    waiting: list[Any] = []
    payload = run.executor.hold(sketch.algebra.payload("whitener"))
    tasks = sketch.gram_tasks(payload, run.rows, run.blocks)
    with Stage(run.report, "pass 1: gram", total=len(run.blocks), total_rows=run.rows.n_rows) as stage:
        for block, part in zip(run.blocks, run.executor.window(tasks), strict=True):
            kept.append(run.executor.apply("keep-residual", _kept, part))
            waiting.append(part)
            if len(waiting) == ADDENDS or block is run.blocks[-1]:
                # Sums are a chain. Waiting for the last link bounds how many parts lie on the workers.
                run.executor.settle(total)
                total = [run.executor.apply("add-grams", _add_grams, len(total), *total, *waiting)]
                waiting = []
            stage.advance(rows=block.n_rows)
    return total[0], kept, run.executor.value(run.executor.apply("trace", itemgetter("trace"), total[0]))


def _kept(part: GramPart) -> Kept:
    return part.kept


def _add_grams(n_totals: int, *addends: Any) -> dict[str, Any]:
    """Add parts from left to right to the total so far, if there is one."""
    if n_totals:
        total, *parts = addends
        G, trace = total["G"].copy(), total["trace"]
    else:
        first, *parts = addends
        G, trace = first.gram.copy(), first.kept.diagonal_sum
    for part in parts:
        np.add(G, part.gram, out=G)
        trace += part.kept.diagonal_sum
    return {"G": G, "trace": trace}


def _summary(
    job: _Job,
    sketch: NystromSketch,
    whitened: dict[str, Any],
    ridged: dict[str, Any],
    trace: float,
    share: float,
) -> dict[str, Any]:
    """Every parameter, version and figure of the run, ready for JSON."""
    return {
        "parameters": {
            "input": job.rows.origin,
            "kernel": sketch.kernel.to_spec(),
            "ridge": job.ridge,
            "n_landmarks": sketch.landmarks.n_draws,
            "sampling": job.sampling if isinstance(job.sampling, str) else "given",
            "sketch_ridge": job.sketch_ridge,
            "random_state": job.seed,
            "dtype": str(job.dtype),
            "block_rows": job.plan.block_rows,
            "tile_rows": job.plan.tile_rows,
        },
        "n_rows": job.rows.n_rows,
        "n_features": job.rows.shape[1],
        "distinct_landmarks": len(sketch.landmarks.indices),
        "rank": sketch.rank,
        "effective_dimension": ridged["effective_dimension"],
        "trace": trace,
        "diagonal_shift": whitened["shift"],
        "smallest_pivot": whitened["smallest_pivot"] if sketch.rank else None,
        "kernel_error": whitened["kernel_error"],
        "score_error": ridged["score_error"],
        "roundoff_share_of_ridge": share,
        "gram_norm": ridged["gram_norm"],
        "combined_factor": ridged["combined"],
        "algebra": {"place": sketch.algebra.place, "whiten": whitened["where"], "ridge": ridged["where"]},
        "versions": _versions(),
        "seconds": {"pass 1": time.perf_counter() - job.began},
    }


def _versions() -> dict[str, str]:
    modules = {"numpy": np, "scipy": scipy, "dask": dask, "distributed": distributed, "zarr": zarr}
    return {"daskrr": __version__} | {name: module.__version__ for name, module in modules.items()}
