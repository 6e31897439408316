"""λ-ridge leverage scores of every row: the paper's algorithm from end to end.

diagonal → sample landmarks → their kernel matrix W → B with B Bᵀ = L → Gram matrix of B → scores. The call does
everything up to the Gram matrix; scores are computed when they are asked for.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import DTypeLike

from daskrr.arguments import Job, Options, prepare
from daskrr.engine.feed import note, reporter
from daskrr.engine.journal import Journal
from daskrr.engine.passes import Run, split
from daskrr.engine.plan import Plan, Workers, check_fits
from daskrr.engine.progress import Reporter
from daskrr.engine.rows import JoinedRows
from daskrr.fitting import Pace, fit
from daskrr.growth import grow_until_tight
from daskrr.kernels import Kernel
from daskrr.kernels.weighted import Weighted
from daskrr.nystrom.audit import AUDIT_ROWS
from daskrr.nystrom.rounds import choose_landmarks
from daskrr.nystrom.row_weights import with_unit_mean
from daskrr.nystrom.selection import resolve_kernel
from daskrr.nystrom.sums import Earlier
from daskrr.result import LeverageResult

log = logging.getLogger("daskrr")


def leverage_scores(
    X: Any,
    kernel: Kernel | dict | Any,
    ridge: float | Sequence[float],
    n_landmarks: int | None = None,
    *,
    sampling: Any = "residual",
    tolerance: float | None = None,
    absolute_tolerance: float | None = None,
    max_landmarks: int | None = None,
    score_floor: float | None = None,
    certify: bool = False,
    failure_probability: float = 1e-6,
    audit_rows: int = AUDIT_ROWS,
    subset_bound: bool = False,
    rounds: int = 2,
    replacement: bool | None = None,
    epsilon: float = 0.1,
    sketch_ridge: float | None = None,
    random_state: int | None = None,
    dtype: DTypeLike = "float64",
    missing_chunks: str = "refuse",
    block_rows: int | None = None,
    sample_weight: Any = None,
    progress: Reporter | bool | None = None,
) -> LeverageResult:
    """Nyström approximation of the λ-ridge leverage scores of the rows of X, with certified intervals.

    Draws the landmarks and runs pass 1 on the current Dask client, or in this process where there is none. Pass 2
    runs when the result's arrays are computed or stored.

    Parameters
    ----------
    X
        (n, d) real: NumPy array, Dask array, Zarr array, or path or URL of a Zarr array; or what converts to the first
        in memory, or is an xarray.DataArray of the second. Sparse matrices, masked values and other lazy frames are
        refused.
    kernel
        A kernel of :mod:`daskrr.kernels`, its specification, or an importable function k(X, Z).
    ridge
        λ > 0, or a list of different ones, which cost one pair of passes together. As in the paper, n·λ is added to
        the kernel matrix. Where one ridge must decide, the smallest does.
    n_landmarks
        Number p of draws; if it exceeds n, it is cut to n and the log says so. Without it, landmarks are added until a
        tolerance is met.
    sampling
        ``"residual"`` (rounds of draws by what earlier landmarks do not explain), ``"leverage"`` (two rounds, the
        second by certified upper ends of the scores at ridge·epsilon, Theorem 3), ``"diagonal"`` (probabilities
        k_ii / tr K, Theorem 4), ``"uniform"``, n probabilities (floating dtype), or the row numbers of the landmarks
        (integer dtype).
    tolerance
        Grow p until upper/lower − 1 is no more than this for every row whose upper end is at least the floor. Without
        n_landmarks and tolerances: 0.5, since importance sampling needs scores up to a constant factor only.
    absolute_tolerance
        Grow p until upper − lower is no more than this. With both, a row has to meet one of them.
    max_landmarks
        Where growing stops even if the tolerance is not met, which the result and the log then say; 2000 by default.
    score_floor
        Scores below it need not meet the relative tolerance; by default their average.
    certify
        Give every score an interval [lower, upper]; implied by a tolerance.
    failure_probability
        With at most this probability some interval misses its exact score; 0 gives the deterministic certificate,
        which is wider.
    audit_rows
        Rows of the audit behind the intervals.
    subset_bound
        Use one more upper bound, from the landmarks as data of their own; costs one more product per ridge.
    rounds
        Of ``sampling="residual"``.
    replacement
        Whether rows are put back after a draw; by default as the theorems demand, and not for ``"residual"``.
    epsilon
        Of ``sampling="leverage"``.
    sketch_ridge
        γ ≥ 0 of the regularised approximation L_γ; needs landmarks drawn with replacement by probabilities.
    random_state
        Seed. None draws one and records it.
    dtype
        Of the tiles, ``"float64"`` or ``"float32"``; factors and sums are float64.
    missing_chunks
        ``"refuse"`` an input with chunks that were never written, or read them as their ``"fill"`` value.
    block_rows
        Rows per task, rounded to whole input chunks. The default depends on p and the chunks alone, since it changes
        the last bits of the result.
    sample_weight
        (n,) above zero, or one number for all rows: a weight m counts a row as m repeats of it would, and the score of
        the row is that of one of them. The ridge adds λ·Σw then, the weighted sum of the scores is the effective
        dimension, and rows that repeat can be merged before they are scored. With weights below 1 a score may exceed 1.
    progress
        None: a bar on a terminal, a widget in a notebook; False: nothing; or a function that receives every event.

    Raises
    ------
    InvalidParameter, InvalidData, MissingChunks, DoesNotFit, SourceUnreachable
        Before any long work.
    KernelNotPositive, RidgeTooSmall, CheckFailed
        When the numbers cannot be trusted.

    Examples
    --------
    >>> import numpy as np, daskrr
    >>> X = np.random.default_rng(0).standard_normal((500, 2))
    >>> result = daskrr.leverage_scores(X, daskrr.kernels.Gaussian(1.0), ridge=1e-2, n_landmarks=100, certify=True,
    ...                                 random_state=0)
    >>> exact = daskrr.exact.leverage_scores(X, daskrr.kernels.Gaussian(1.0), 1e-2)
    >>> bool(((result.lower.compute() <= exact) & (exact <= result.upper.compute())).all())
    True
    """
    options = Options(
        sampling, tolerance, absolute_tolerance, max_landmarks, score_floor, certify, failure_probability, audit_rows,
        subset_bound, rounds, replacement, epsilon, sketch_ridge, random_state, dtype, missing_chunks, block_rows,
        sample_weight,
    )  # fmt: skip
    return score_job(prepare(X, kernel, ridge, n_landmarks, options), progress)


def score_job(
    job: Job,
    progress: Reporter | bool | None,
    journal: Journal | None = None,
    earlier: Earlier | None = None,
    pace: Pace | None = None,
) -> LeverageResult:
    """Everything but pass 2; with a journal, what was finished before is not done again.

    Given landmarks may go on from the sums of an earlier run over fewer rows, whose ``pace`` they keep.
    """
    check_fits(job.plan, Workers.of(job.executor))
    job = _checked(job)
    for line in job.notes:
        log.warning(line)
    with reporter(progress) as report:
        note(**job.facts)
        run = Run(
            job.name, job.rows, split(job.rows.n_rows, job.plan.block_rows), job.executor, report, journal, earlier
        )
        settings = replace(job.settings, kernel=resolve_kernel(run, job.settings.kernel, job.scheme.seed))
        if job.target is not None and pace is None:
            return grow_until_tight(job, run, settings, job.target)
        chosen, weighing = choose_landmarks(run, settings, job.scheme)
        return fit(job, run, settings, chosen, weighing, pace)[0]


def _checked(job: Job) -> Job:
    """The job, once every worker can read all of its input, with weights of mean 1, if it has any."""
    if not isinstance(job.rows, JoinedRows) or not isinstance(job.settings.kernel, Weighted):
        job.executor.check(job.rows)
        return job
    for source in (job.rows.column, job.rows.rows):
        job.executor.check(source)
    rows, kernel = with_unit_mean(job.rows, job.settings.kernel)
    return replace(job, rows=rows, settings=replace(job.settings, kernel=kernel))


def plan(
    X: Any,
    kernel: Kernel | dict | Any,
    ridge: float | Sequence[float],
    n_landmarks: int | None = None,
    *,
    workers: int | None = None,
    **options: Any,
) -> Plan:
    """What :func:`leverage_scores` with the same arguments would cost at most; runs nothing.

    Parameters
    ----------
    workers
        Plan for so many single-threaded worker processes, instead of the current client or this process.
    options
        Of :func:`leverage_scores`.

    Examples
    --------
    >>> import numpy as np, daskrr
    >>> daskrr.plan(np.ones((1000, 4)), daskrr.kernels.Gaussian(1.0), 1e-3, 100).n_blocks
    1
    """
    return prepare(X, kernel, ridge, n_landmarks, Options(**options), workers).plan
