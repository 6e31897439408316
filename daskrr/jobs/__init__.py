"""Scores from store to store, and questions to a store of scores."""

import os
from collections.abc import Sequence
from typing import Any

from daskrr.jobs.job import Job
from daskrr.jobs.new_rows import apply_sketch
from daskrr.jobs.reader import ScoreStore, open_scores, rollback, status, top_rows
from daskrr.jobs.row_sample import RowSample, sample_rows
from daskrr.jobs.update import update_scores
from daskrr.jobs.verification import verify
from daskrr.kernels import Kernel
from daskrr.leverage.problem import state_problem
from daskrr.nystrom.strategies import Tolerance
from daskrr.runtime.progress import Reporter

__all__ = [
    "Job", "RowSample", "ScoreStore", "apply_sketch", "open_scores", "rollback", "sample_rows", "score_to_zarr",
    "status", "top_rows", "update_scores", "verify",
]  # fmt: skip


def score_to_zarr(
    X: Any,
    output: str | os.PathLike,
    kernel: Kernel | dict | Any = None,
    ridge: float | Sequence[float] | None = None,
    landmarks: int | Tolerance | None = None,
    *,
    overwrite: bool = False,
    wait: bool = False,
    keep: int = 1,
    progress: Reporter | bool | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Score the rows of X and write the results to the Zarr group ``output``, a local path or on ``s3://``.

    It holds ``scores``, ``estimate`` and ``residual``, and ``lower`` and ``upper`` where they are certified. The other
    options are those of :func:`daskrr.leverage_scores`. Returns the summary that is stored with the result.

    A job that is killed goes on where it was if the same call is made again, and ends with the same bits; one that is
    done returns at once. Nothing is visible at ``output`` before all of it is there. Dask arrays cannot be told apart,
    so that theirs start over.

    Parameters
    ----------
    overwrite
        Replace what was scored there, with whatever parameters; it stays readable until the new scores are whole.
    wait
        Wait for another job that holds the output, instead of failing.
    keep
        How many generations from before stay with the published one: for readers that have opened one, and for
        :func:`daskrr.jobs.rollback`.

    Raises
    ------
    OutputExists
        Before anything runs, if ``output`` may not be written.
    LeaseHeld
        Another job is at work there.

    Examples
    --------
    >>> import numpy as np, daskrr, tempfile
    >>> X = np.random.default_rng(0).standard_normal((500, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     summary = daskrr.score_to_zarr(X, f"{folder}/scores.zarr", daskrr.kernels.Linear(), 1e-2, 50)
    ...     len(daskrr.jobs.top_rows(f"{folder}/scores.zarr", 3))
    3
    """
    problem = state_problem(X, kernel, ridge, landmarks, **options)
    return Job.of(problem, output).run(overwrite=overwrite, wait=wait, keep=keep, progress=progress)
