"""λ-ridge leverage scores of every row: the paper's algorithm from end to end.

diagonal → sample landmarks → their kernel matrix W → B with B Bᵀ = L → Gram matrix of B → scores. The call does
everything up to the Gram matrix; scores are computed when they are asked for.
"""

import math
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import dask
import dask.array as da
import distributed
import numpy as np
import scipy
import zarr
from dask.delayed import Delayed
from numpy.typing import DTypeLike, NDArray

from daskrr import __version__
from daskrr.engine.passes import Block, Executor, as_array, executor, split, task
from daskrr.engine.plan import Plan, check_fits, make_plan
from daskrr.engine.progress import Reporter, Stage, reporter
from daskrr.engine.rows import Rows, open_rows
from daskrr.engine.scheduler import algebra
from daskrr.engine.storage import OutputStore, write_block
from daskrr.errors import CheckFailed, InvalidParameter, check_count
from daskrr.kernels import Kernel, as_kernel
from daskrr.numerics.algebra import check_resolution, shift_of
from daskrr.numerics.tiles import GramPart, Kept
from daskrr.nystrom.sampling import Landmarks, check_seed
from daskrr.nystrom.selection import check_sampling, draw_landmarks, fetch_rows, resolve_kernel
from daskrr.nystrom.sketch import NystromSketch, html_table, landmark_inputs

# Least relative difference between the sum of the scores and the effective dimension that is reported as a failure.
SUM_TOLERANCE = {"float64": 1e-9, "float32": 1e-3}


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
) -> "LeverageResult":
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
    check_fits(job.plan, job.executor)
    job.executor.check(job.rows)
    return _run_pass_1(job, reporter(progress))


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
) -> Plan:
    """What :func:`leverage_scores` with the same arguments would cost; runs nothing.

    Examples
    --------
    >>> import numpy as np, daskrr
    >>> daskrr.plan(np.ones((1000, 4)), daskrr.kernels.Gaussian(1.0), 1e-3, 100).n_blocks
    1
    """
    return _prepare(
        X, kernel, ridge, n_landmarks, sampling, sketch_ridge, random_state, dtype, missing_chunks, block_rows
    ).plan


@dataclass(frozen=True)
class _Job:
    """Checked arguments of a run."""

    run: str
    rows: Rows
    kernel: Kernel
    ridge: float
    n_landmarks: int | None
    sampling: str | NDArray[np.int64] | Rows
    sketch_ridge: float | None
    seed: int
    dtype: np.dtype
    blocks: list[Block]
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
    run = uuid.uuid4().hex
    where = executor(run)
    weighs = isinstance(scheme, Rows) or (
        isinstance(scheme, str) and scheme == "diagonal" and not kernel.constant_diagonal
    )
    made = make_plan(rows, size, tile_dtype, weighs, block_rows, where)
    blocks = split(rows.n_rows, made.block_rows)
    return _Job(
        run,
        rows,
        kernel,
        ridge,
        n_landmarks,
        scheme,
        sketch_ridge or None,
        seed,
        tile_dtype,
        blocks,
        made,
        where,
    )


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


def _run_pass_1(job: _Job, report: Reporter) -> "LeverageResult":
    kernel = resolve_kernel(job.executor, job.run, job.rows, job.blocks, job.kernel, job.seed, report)
    landmarks = draw_landmarks(
        job.executor, job.run, job.rows, job.blocks, kernel, job.sampling, job.n_landmarks, job.seed, report
    )  # fmt: skip
    sketch, whitened = _whiten(job, kernel, landmarks, report)
    gram, kept, trace = _sum_grams(job, sketch, report)
    share = check_resolution(whitened["kernel_error"], trace / job.rows.n_rows, job.ridge, sketch.rank, job.dtype)
    ridged = sketch.algebra.perform(
        "add_ridge", gram, {"dtype": str(job.dtype), "n_rows": sketch.n_rows, "ridge": job.ridge}
    )
    return LeverageResult(
        job.rows,
        job.blocks,
        sketch,
        kept,
        job.executor,
        job.plan,
        _summary(job, sketch, whitened, ridged, trace, share),
    )


def _whiten(job: _Job, kernel: Kernel, landmarks: Landmarks, report: Reporter) -> tuple[NystromSketch, dict[str, Any]]:
    """Fetch the landmarks, form W where they are, and factor it on the scheduler (Algorithm, step 2)."""
    penalty = None
    if job.sketch_ridge is not None:
        penalty = landmarks.penalty(job.rows.n_rows, job.sketch_ridge)
    X = fetch_rows(job.executor, job.run, job.rows, job.blocks, landmarks.indices, "sample-rows", report)
    inputs = job.executor.apply("landmark-kernel", landmark_inputs, X, kernel, job.dtype, penalty)
    place = algebra(job.executor, job.plan.scheduler_bytes)
    whitened = place.perform("whiten", inputs, {"dtype": str(job.dtype)})
    if kernel.constant_diagonal:
        diagonal = float(kernel.diagonal(np.zeros((1, job.rows.shape[1])))[0])
        check_resolution(whitened["kernel_error"], diagonal, job.ridge, len(whitened["pivots"]), job.dtype)
    n, d = job.rows.shape
    shift = shift_of(n, job.ridge)
    rank = len(whitened["pivots"])
    return NystromSketch(kernel, job.ridge, shift, n, d, job.dtype, landmarks, job.run, place, rank), whitened


def _sum_grams(job: _Job, sketch: NystromSketch, report: Reporter) -> tuple[Any, list[Any], float]:
    """Pass 1: add the blocks' Gram matrices from left to right; keep the residuals where they are."""
    kept: list[Any] = []
    total: Any = None
    with Stage(report, "pass 1: gram", total=len(job.blocks), total_rows=job.rows.n_rows) as stage:
        for block, part in zip(job.blocks, job.executor.window(sketch.gram_tasks(job.rows, job.blocks)), strict=True):
            kept.append(job.executor.apply("keep-residual", _kept, part))
            total = job.executor.apply("add-grams", _add_grams, part, *([] if total is None else [total]))
            stage.advance(rows=block.n_rows)
    traces = [job.executor.apply("sum-diagonal", _diagonal_sums, *kept[i : i + 256]) for i in range(0, len(kept), 256)]
    trace = math.fsum(value for group in traces for value in job.executor.value(group))
    return total, kept, trace


def _kept(part: GramPart) -> Kept:
    return part.kept


def _add_grams(part: GramPart, total: dict[str, NDArray] | None = None) -> dict[str, NDArray]:
    return {"G": part.gram if total is None else total["G"] + part.gram}


def _diagonal_sums(*kept: Kept) -> list[float]:
    return [one.diagonal_sum for one in kept]


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


@dataclass(frozen=True)
class TopRows:
    """The highest rows of a result, highest first."""

    rows: NDArray[np.int64]
    scores: NDArray[np.float64]
    estimate: NDArray[np.float64]
    residual: NDArray[np.float64]
    by: str

    @property
    def values(self) -> NDArray[np.float64]:
        """What the rows are ranked by."""
        return getattr(self, self.by)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        head = f"{'row':>12}  {'score':>10}  {'estimate':>10}  {'residual':>10}"
        lines = [
            f"{row:>12}  {score:>10.6f}  {estimate:>10.6f}  {residual:>10.3e}"
            for row, score, estimate, residual in zip(self.rows, self.scores, self.estimate, self.residual, strict=True)
        ]
        return "\n".join([head, *lines])


def check_top(k: Any, by: Any) -> None:
    """Raise :class:`InvalidParameter` unless k rows can be ranked by ``by``."""
    check_count("k", k)
    if by not in ("estimate", "scores"):
        raise InvalidParameter(f"by must be 'estimate' or 'scores', got {by!r}")


def merge_top(parts: Sequence[TopRows], k: int) -> TopRows:
    """The k highest of several lists; equal values in row order."""
    by = parts[0].by
    joined = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("rows", "scores", "estimate", "residual")
    }
    order = np.lexsort((joined["rows"], -joined[by]))[:k]
    return TopRows(**{name: values[order] for name, values in joined.items()}, by=by)


def _top_of_block(values: NDArray, kept: Kept, start: int, k: int, by: str) -> TopRows:
    rows = np.arange(start, start + len(values))
    return merge_top([TopRows(rows, values[:, 0], values[:, 1], kept.residual, by)], k)


class LeverageResult:
    """Scores of every row, lazily; made by :func:`leverage_scores`.

    Attributes
    ----------
    sketch
        The fitted small object, which scores new rows too.
    effective_dimension
        tr(G (G + n·λ·I)⁻¹): what the scores must sum to.
    rank
        Number of landmarks that are linearly independent at working precision.
    plan
        What the run was expected to cost.
    summary
        Every parameter, version and figure, ready for JSON.
    """

    def __init__(
        self,
        rows: Rows,
        blocks: list[Block],
        sketch: NystromSketch,
        kept: list[Any],
        executor: Executor,
        plan: Plan,
        summary: dict[str, Any],
    ) -> None:
        self.sketch, self.plan, self.summary = sketch, plan, summary
        self.effective_dimension: float = summary["effective_dimension"]
        self.rank: int = summary["rank"]
        self._rows, self._blocks, self._kept, self._executor = rows, blocks, kept, executor

    @property
    def scores(self) -> da.Array:
        """Lazy (n,): the paper's approximate scores l̃, never above the exact ones beyond round-off."""
        return self._pass_2[:, 0]

    @property
    def estimate(self) -> da.Array:
        """Lazy (n,): scores corrected by each row's own residual, which sees outliers that no landmark is near."""
        return self._pass_2[:, 1]

    @cached_property
    def residual(self) -> da.Array:
        """Lazy (n,): k_ii − L_ii, the part of each row that the landmarks do not explain; kept from pass 1."""
        tasks = [
            task("residual", self.sketch.run, block.index, _residual_column, kept)
            for block, kept in zip(self._blocks, self._kept, strict=True)
        ]
        return as_array(tasks, self._blocks, 1)[:, 0]

    @cached_property
    def _pass_2(self) -> da.Array:
        return as_array(list(self._score_tasks("lazy")), self._blocks, 2)

    def _score_tasks(self, use: str) -> Iterator[Delayed]:
        return self.sketch.score_tasks(self._rows, self._blocks, self._kept, use)

    def top(self, k: int = 10, by: str = "estimate") -> TopRows:
        """The k highest rows by ``"estimate"`` or ``"scores"``, reduced on the workers.

        Raises
        ------
        InvalidParameter
            k below 1, or ranked by something else.
        """
        check_top(k, by)
        tasks = (
            task(
                "top-rows",
                f"{self.sketch.run}-{k}-{by}",
                block.index,
                _top_of_block,
                scored,
                kept,
                block.start,
                k,
                by,
            )
            for block, scored, kept in zip(self._blocks, self._score_tasks("top"), self._kept, strict=True)
        )
        return merge_top(self._executor.values(list(self._executor.window(tasks))), k)

    def store(self, path: Any, *, overwrite: bool = False, progress: Reporter | bool | None = None) -> dict[str, Any]:
        """Run pass 2 and write ``scores``, ``estimate`` and ``residual`` to a new Zarr group; return its summary.

        Workers write whole chunks. The sum of the scores is checked against the effective dimension before the
        result is put in its place; until then nothing is visible at ``path``.

        Raises
        ------
        OutputExists
            Something is at ``path`` and may not be replaced.
        CheckFailed, SourceChanged
            The scores do not add up, or the input changed since pass 1; nothing is published.
        """
        with OutputStore(path, overwrite) as output:
            output.create(("scores", "estimate", "residual"), self._rows.n_rows, self.plan.block_rows)
            began = time.perf_counter()
            total, top = self._write(output, reporter(progress))
            self._check_sum(total)
            summary = self.summary | {
                "sum_of_scores": total,
                "top": [{"row": int(row), "score": score, "estimate": estimate, "residual": residual}
                        for row, score, estimate, residual in zip(
                            top.rows, top.scores.tolist(), top.estimate.tolist(), top.residual.tolist(), strict=True)],
                "seconds": self.summary["seconds"] | {"pass 2": time.perf_counter() - began},
            }  # fmt: skip
            output.commit(summary)
        return summary | {"output": output.target}

    def _write(self, output: OutputStore, report: Reporter) -> tuple[float, TopRows]:
        tasks = (
            task(
                "write-scores",
                self.sketch.run,
                block.index,
                _write_scores,
                scored,
                kept,
                output.path,
                block.start,
            )
            for block, scored, kept in zip(self._blocks, self._score_tasks("store"), self._kept, strict=True)
        )
        receipts: list[Any] = []
        with Stage(report, "pass 2: scores", total=len(self._blocks), total_rows=self._rows.n_rows) as stage:
            for block, handle in zip(self._blocks, self._executor.window(tasks), strict=True):
                receipts.append(handle)
                stage.advance(rows=block.n_rows)
        sums, tops = zip(*self._executor.values(receipts), strict=True)
        return math.fsum(sums), merge_top(tops, 10)

    def _check_sum(self, total: float) -> None:
        allowed = max(10.0 * self.summary["score_error"], SUM_TOLERANCE[str(self.sketch.dtype)])
        difference = abs(total - self.effective_dimension)
        if not difference <= allowed * max(self.effective_dimension, np.finfo(float).tiny):
            raise CheckFailed(
                f"the scores sum to {total:.12g}, but pass 1 found an effective dimension of "
                f"{self.effective_dimension:.12g} (allowed relative difference {allowed:.1g}). The input changed "
                "between the passes, or rows were lost. Nothing was published."
            )

    def _facts(self) -> dict[str, str]:
        parameters = self.summary["parameters"]
        return {
            "rows": f"{self.summary['n_rows']:,} × {self.summary['n_features']} features, {parameters['input']}",
            "kernel": repr(self.sketch.kernel),
            "ridge λ": f"{parameters['ridge']:g}",
            "landmarks": f"{parameters['n_landmarks']:,} draws ({parameters['sampling']}), "
            f"{self.summary['distinct_landmarks']:,} distinct, rank {self.rank:,}",
            "effective dimension": f"{self.effective_dimension:.6g}",
            "seed": str(parameters["random_state"]),
            "p × p algebra": self.summary["algebra"]["place"],
        }

    def __repr__(self) -> str:
        return "LeverageResult\n" + "\n".join(f"{name:>20}: {text}" for name, text in self._facts().items())

    def _repr_html_(self) -> str:
        return html_table("LeverageResult", self._facts())


def _residual_column(kept: Kept) -> NDArray[np.float64]:
    return kept.residual[:, None]


def _write_scores(values: NDArray[np.float64], kept: Kept, path: str, start: int) -> tuple[float, TopRows]:
    """Write one block of results; what comes back is a receipt: the block's sum and its highest rows."""
    if not (np.isfinite(values).all() and (values >= 0).all() and (values <= 1).all()):
        raise CheckFailed(f"a score in the block of rows from {start} is not within [0, 1]. Nothing was published.")
    write_block(path, {"scores": values[:, 0], "estimate": values[:, 1], "residual": kept.residual}, start)
    return math.fsum(values[:, 0]), _top_of_block(values, kept, start, 10, "estimate")
