"""Scores from store to store, and questions to a store of scores."""

import os
from typing import Any

import numpy as np

from daskrr.engine.progress import Reporter
from daskrr.engine.storage import OutputStore, open_result
from daskrr.kernels import Kernel
from daskrr.leverage import leverage_scores
from daskrr.result import TopRows, check_top, merge_top


def score_to_zarr(
    X: Any,
    output: str | os.PathLike,
    kernel: Kernel | dict | Any,
    ridge: float,
    n_landmarks: int | None = None,
    *,
    overwrite: bool = False,
    progress: Reporter | bool | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Score the rows of X and write ``scores``, ``estimate`` and ``residual`` to the Zarr group ``output``.

    The other options are those of :func:`daskrr.leverage_scores`. Returns the summary that is stored with the result.

    Raises
    ------
    OutputExists
        Before anything runs, if ``output`` may not be written.

    Examples
    --------
    >>> import numpy as np, daskrr, tempfile
    >>> X = np.random.default_rng(0).standard_normal((500, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     summary = daskrr.score_to_zarr(X, f"{folder}/scores.zarr", daskrr.kernels.Linear(), 1e-2, 50)
    ...     len(daskrr.top_rows(f"{folder}/scores.zarr", 3))
    3
    """
    OutputStore(output, overwrite)
    result = leverage_scores(X, kernel, ridge, n_landmarks, progress=progress, **options)
    return result.store(output, overwrite=overwrite, progress=progress)


def top_rows(path: str | os.PathLike, k: int = 10, by: str = "estimate") -> list[dict[str, Any]]:
    """The k highest rows of a store of scores, read chunk by chunk.

    Raises
    ------
    InvalidData
        ``path`` holds no finished result.
    """
    check_top(k, by)
    group = open_result(path)
    arrays: dict[str, Any] = {name: group[name] for name in ("scores", "estimate", "residual")}
    n_rows, height = arrays["scores"].shape[0], arrays["scores"].chunks[0]
    best: list[TopRows] = []
    for start in range(0, n_rows, height):
        parts = {name: np.asarray(array[start : start + height]) for name, array in arrays.items()}
        rows = np.arange(start, start + len(parts["scores"]))
        best = [merge_top([*best, TopRows(rows, **parts, by=by)], k)]
    top = best[0]
    return [
        {"row": int(row), "score": float(score), "estimate": float(estimate), "residual": float(residual)}
        for row, score, estimate, residual in zip(top.rows, top.scores, top.estimate, top.residual, strict=True)
    ]
