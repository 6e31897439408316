"""λ-ridge leverage scores of every row: the paper's algorithm from end to end.

diagonal → sample landmarks → their kernel matrix W → B with B Bᵀ = L → Gram matrix of B → scores. The call does
everything up to the Gram matrix; scores are computed when they are asked for.
"""

from collections.abc import Sequence
from typing import Any

from numpy.typing import DTypeLike

from daskrr.errors import check_count
from daskrr.kernels import Kernel
from daskrr.leverage.algorithm import compute
from daskrr.leverage.plan import Plan, Workers
from daskrr.leverage.problem import state_problem
from daskrr.leverage.result import LeverageResult
from daskrr.nystrom.strategies import Certify, Tolerance
from daskrr.runtime.progress import Reporter

__all__ = ["LeverageResult", "Plan", "leverage_scores", "plan"]


def leverage_scores(
    X: Any,
    kernel: Kernel | dict | str | Any = None,
    ridge: float | Sequence[float] | None = None,
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
        A kernel of :mod:`daskrr.kernels`, its name (``"gaussian"``, ``"rbf"``), its specification (``{"kernel": "rbf",
        "gamma": 0.1}``), or an importable function k(X, Z); see :func:`daskrr.kernels.as_kernel`. None is a
        Gaussian of the median distance.
    ridge
        λ > 0, or a list of different ones, which cost one pair of passes together. As in the paper, n·λ is added to
        the kernel matrix. Where one ridge must decide, the smallest does. None has a pilot sample of 2000 rows choose
        it, and the landmarks: an effective dimension of about √n, 100 at most, and 5 landmarks for each of it.
    landmarks
        Number p of draws; if it exceeds n, it is cut to n and the log says so. Or a :class:`daskrr.Tolerance`:
        landmarks are added until it is met. None is ``Tolerance(0.5)``, or as many as ``sampling`` has row numbers.
    sampling
        ``"residual"`` or :class:`daskrr.Residual` (rounds of draws by what earlier landmarks do not explain),
        ``"leverage"`` or :class:`daskrr.Leverage` (two rounds, the second by certified upper ends of the scores at
        ridge·epsilon, Theorem 3), ``"diagonal"`` (probabilities k_ii / tr K, Theorem 4), ``"uniform"``, n
        probabilities (floating dtype), or the row numbers of the landmarks (integer dtype). The others as objects are
        in :mod:`daskrr.nystrom.sampling`. All but residuals and row numbers take the ``sketch_ridge`` γ ≥ 0 of the
        regularised approximation L_γ.
    certify
        Give every score an interval [lower, upper]: whether, or a :class:`daskrr.Certify` that says how certain it
        shall be. A tolerance implies it.
    random_state
        Seed. None draws one and records it.
    dtype
        Of the tiles, ``"float64"`` or ``"float32"``; factors and sums are float64.
    missing_chunks
        ``"refuse"`` an input with chunks that were never written, or read them as their ``"fill"`` value.
    block_rows
        Rows of a block, rounded to whole input chunks. The default depends on p, the device and the chunks alone,
        since it changes the last bits of the result.
    sample_weight
        (n,) above zero, or one number for all rows: a weight m counts a row as m repeats of it would, and the score of
        the row is that of one of them. The ridge adds λ·Σw then, the weighted sum of the scores is the effective
        dimension, and rows that repeat can be merged before they are scored. With weights below 1 a score may exceed 1.
    device
        What workers compute on: ``"cpu"``, ``"cuda"`` for GPUs of NVIDIA, which all workers must have then, or
        ``"auto"`` for GPUs where all have one. None is what Dask's configuration has as ``daskrr.device``.
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
    >>> result = daskrr.leverage_scores(X, daskrr.kernels.Gaussian(1.0), ridge=1e-2, landmarks=100, certify=True,
    ...                                 random_state=0)
    >>> exact = daskrr.exact.leverage_scores(X, daskrr.kernels.Gaussian(1.0), 1e-2)
    >>> bool(((result.lower.compute() <= exact) & (exact <= result.upper.compute())).all())
    True
    """
    problem = state_problem(
        X,
        kernel,
        ridge,
        landmarks,
        sampling=sampling,
        certify=certify,
        random_state=random_state,
        dtype=dtype,
        missing_chunks=missing_chunks,
        block_rows=block_rows,
        sample_weight=sample_weight,
        device=device,
    )
    return compute(problem, progress)


def plan(
    X: Any,
    kernel: Kernel | dict | str | Any = None,
    ridge: float | Sequence[float] | None = None,
    landmarks: int | Tolerance | None = None,
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
    problem = state_problem(X, kernel, ridge, landmarks, **options)
    if workers is None:
        return problem.plan
    return problem.planned(Workers.embedded(check_count("workers", workers), problem.executor.device)).plan
