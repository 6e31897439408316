"""Scores from store to store, and questions to a store of scores."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.arguments import Options
from daskrr.engine.addresses import locate
from daskrr.engine.progress import Reporter
from daskrr.engine.storage import stored_column
from daskrr.jobs import find_published, score_durably
from daskrr.jobstore import open_published
from daskrr.kernels import Kernel
from daskrr.top import CERTIFIED, TopRows, check_top, merge_top


def score_to_zarr(
    X: Any,
    output: str | os.PathLike,
    kernel: Kernel | dict | Any,
    ridge: float | Sequence[float],
    n_landmarks: int | None = None,
    *,
    overwrite: bool = False,
    wait: bool = False,
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
    ...     len(daskrr.top_rows(f"{folder}/scores.zarr", 3))
    3
    """
    return score_durably(
        X, locate(output), kernel, ridge, n_landmarks, Options(**options), overwrite=overwrite, wait=wait,
        progress=progress,
    )  # fmt: skip


def published(
    X: Any, output: str | os.PathLike, kernel: Any, ridge: Any, n_landmarks: int | None = None, *,
    overwrite: bool = False, **options: Any,
) -> dict[str, Any] | None:  # fmt: skip
    """The summary of what the same call of :func:`score_to_zarr` has published already, if it has; runs nothing.

    Raises
    ------
    OutputExists
        As :func:`score_to_zarr`.
    """
    return find_published(X, locate(output), kernel, ridge, n_landmarks, Options(**options), overwrite)


def top_rows(
    path: str | os.PathLike, k: int = 10, by: str = "estimate", ridge: float | None = None
) -> list[dict[str, Any]]:
    """The k highest rows of a store of scores, read chunk by chunk; of several ridges the smallest by default.

    Raises
    ------
    InvalidData
        ``path`` holds no finished result.
    """
    group = open_published(path)
    arrays: dict[str, Any] = {name: group[name] for name in (*CERTIFIED, "residual") if name in group}
    check_top(k, by, "upper" in arrays)
    column = stored_column(group, ridge)
    n_rows, height = arrays["scores"].shape[0], arrays["scores"].chunks[0]
    best: list[TopRows] = []
    for start in range(0, n_rows, height):
        parts = {name: _read(array, start, start + height, column) for name, array in arrays.items()}
        rows = np.arange(start, start + len(parts["scores"]))
        best = [merge_top([*best, TopRows(rows, **parts, by=by)], k)]
    return best[0].to_records()


def _read(array: Any, start: int, stop: int, column: int) -> NDArray[np.float64]:
    values = np.asarray(array[start:stop])
    return values if values.ndim == 1 else values[:, column]
