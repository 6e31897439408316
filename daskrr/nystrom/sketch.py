"""The fitted small object: landmarks, the factor of their kernel matrix, and the ridge.

A :class:`NystromSketch` is all that is left of the data after pass 1. Its factors stay where they were computed (the
scheduler, as a rule); what it holds itself is small. The functions here are the tasks of both passes.
"""

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from typing import Any

import dask.array as da
import numpy as np
from dask.delayed import Delayed
from numpy.typing import NDArray

from daskrr.engine.passes import Block, as_array, block_rows, split, task
from daskrr.engine.rows import Rows, open_rows, pieces
from daskrr.engine.scheduler import Algebra
from daskrr.errors import InvalidData
from daskrr.kernels import Kernel
from daskrr.numerics import blas
from daskrr.numerics.algebra import kernel_error
from daskrr.numerics.tiles import (
    Columns,
    GramPart,
    Kept,
    Scorer,
    Whitener,
    fill_tile,
    gram_block,
    new_rows_block,
    score_block,
)
from daskrr.nystrom.sampling import Landmarks


@blas.one_thread()
def landmark_inputs(
    kernel: Kernel, dtype: np.dtype, penalty: NDArray[np.float64] | None, X: NDArray[np.float64]
) -> dict[str, Any]:
    """W of the landmarks X (p, d), by differences and with an exact diagonal, and the tile kernel's error on it."""
    W = kernel(X, X)
    W = 0.5 * (W + W.T)
    np.fill_diagonal(W, kernel.diagonal(X))
    if not np.isfinite(W).all():
        raise InvalidData("the kernel of the landmarks is not finite: it overflows. Scale the features down.")
    tile = np.empty(W.shape, dtype)
    fill_tile(kernel.columns(X, dtype), X, tile)
    return {"W": W, "X": X, "error": kernel_error(tile, W, dtype), "penalty": penalty}


def _columns(landmarks: NDArray[np.float64], kernel: Kernel, dtype: np.dtype) -> Columns:
    return kernel.columns(landmarks, dtype) if len(landmarks) else _no_columns


def _no_columns(X: NDArray, out: NDArray) -> None:
    """The kernel columns of no landmark at all, which is what is left when the kernel vanishes on all of them."""


def _cast(factor: NDArray[np.float64], dtype: np.dtype) -> NDArray:
    """A factor in the dtype of the tiles; what overflows there is found in the first block."""
    with np.errstate(over="ignore"):
        return factor.astype(dtype, copy=False)


def _whitener(payload: dict[str, Any], kernel: Kernel, dtype: np.dtype) -> Whitener:
    return Whitener(
        columns=_columns(payload["landmarks"], kernel, dtype),
        diagonal=kernel.diagonal,
        inverse=_cast(payload["factors"][0], dtype),
        residual_error=2.0 * payload["n_landmarks"] * payload["kernel_error"],
    )


def _scorer(payload: dict[str, Any], kernel: Kernel, dtype: np.dtype, shift: float) -> Scorer:
    return Scorer(
        columns=_columns(payload["landmarks"], kernel, dtype),
        diagonal=kernel.diagonal,
        factors=tuple(_cast(factor, dtype) for factor in payload["factors"]),
        shift=shift,
        residual_error=2.0 * payload["n_landmarks"] * payload["kernel_error"],
    )


def gram_task(kernel: Kernel, dtype: np.dtype, payload: dict[str, Any], source: Any, start: int) -> GramPart:
    """Pass 1 on one block."""
    return gram_block(_whitener(payload, kernel, dtype), pieces(source), start)


def score_task(
    kernel: Kernel,
    dtype: np.dtype,
    shift: float,
    then: Callable[[NDArray[np.float64], Kept, int], Any] | None,
    payload: dict[str, Any],
    source: Any,
    start: int,
    kept: Kept,
) -> Any:
    """Pass 2 on one block: scores and estimate, (m, 2), or what ``then`` makes of them."""
    values = score_block(_scorer(payload, kernel, dtype, shift), pieces(source), start, kept)
    return values if then is None else then(values, kept, start)


def new_rows_task(
    kernel: Kernel, dtype: np.dtype, shift: float, payload: dict[str, Any], source: Any, start: int
) -> NDArray[np.float64]:
    """Scores, estimate and residual (m, 3) of rows that pass 1 has not seen."""
    whitener, scorer = _whitener(payload, kernel, dtype), _scorer(payload, kernel, dtype, shift)
    return new_rows_block(whitener, scorer, pieces(source), start)


@dataclass(frozen=True, repr=False)
class NystromSketch:
    """Landmarks and factors that score any row, also rows that were not in the data.

    Attributes
    ----------
    kernel
        With every parameter resolved.
    ridge, shift
        λ, and n·λ with the n of the data that it was fitted to.
    landmarks
        The rows drawn, duplicates merged.
    rank
        How many of them are linearly independent at working precision.
    """

    kernel: Kernel
    ridge: float
    shift: float
    n_rows: int
    n_features: int
    dtype: np.dtype
    landmarks: Landmarks
    run: str
    algebra: Algebra = field(compare=False)
    rank: int

    def scores(self, X_new: Any) -> da.Array:
        """Lazy scores (m,) of new rows (m, d): the Nyström score that each would have among the data.

        Examples
        --------
        >>> import numpy as np, daskrr
        >>> X = np.random.default_rng(0).standard_normal((200, 2))
        >>> result = daskrr.leverage_scores(X, daskrr.kernels.Gaussian(1.0), 1e-2, 50, random_state=0)
        >>> result.sketch.scores(X[:3] + 0.1).compute().shape
        (3,)
        """
        return self._evaluate(X_new)[:, 0]

    def estimate(self, X_new: Any) -> da.Array:
        """Lazy point estimates (m,) of new rows, corrected by the part of each that no landmark explains."""
        return self._evaluate(X_new)[:, 1]

    def residual(self, X_new: Any) -> da.Array:
        """Lazy residuals (m,) of new rows: k(x, x) minus what the landmarks explain of it."""
        return self._evaluate(X_new)[:, 2]

    def _evaluate(self, X_new: Any) -> da.Array:
        rows = open_rows(X_new, name="X_new")
        if rows.shape[1] != self.n_features:
            raise InvalidData(f"X_new has {rows.shape[1]} features; the sketch was fitted to {self.n_features}.")
        blocks = split(rows.n_rows, block_rows(max(self.rank, 1), rows))
        payload = self.algebra.payload("new rows")
        work = partial(new_rows_task, self.kernel, self.dtype, self.shift)
        reading = uuid.uuid4().hex
        rows = rows.anew(f"new-rows-{reading}")
        tasks = [
            task(
                "score-new-rows", reading, b.index, work, payload, rows.source(b.start, b.stop), b.start,
            )
            for b in blocks
        ]  # fmt: skip
        return as_array(f"new-rows-{reading}", tasks, blocks, 3)

    def gram_tasks(self, payload: Any, rows: Rows, blocks: Sequence[Block]) -> Iterator[Delayed]:
        """The tasks of pass 1, to which ``payload`` is the factor of W."""
        work = partial(gram_task, self.kernel, self.dtype)
        rows = rows.anew(f"gram-{self.run}")
        for b in blocks:
            yield task("gram", self.run, b.index, work, payload, rows.source(b.start, b.stop), b.start)

    def score_tasks(
        self,
        payload: Any,
        rows: Rows,
        blocks: Sequence[Block],
        kept: Sequence[Any],
        use: str,
        then: Callable[[NDArray[np.float64], Kept, int], Any] | None = None,
    ) -> Iterator[Delayed]:
        """The tasks of pass 2 for one use, with the factors in ``payload`` and what pass 1 kept of each block.

        ``then`` is called with a block's scores and estimate, what was kept of it, and its first row, in the same task.
        """
        work = partial(score_task, self.kernel, self.dtype, self.shift, then)
        rows = rows.anew(f"{use}-{self.run}")
        for b, kept_block in zip(blocks, kept, strict=True):
            source = rows.source(b.start, b.stop)
            yield task("score-rows", f"{self.run}-{use}", b.index, work, payload, source, b.start, kept_block)

    def __repr__(self) -> str:
        return (
            f"NystromSketch({self.kernel!r}, ridge={self.ridge:g}, {len(self.landmarks.indices)} landmarks of rank "
            f"{self.rank}, fitted to {self.n_rows:,} rows × {self.n_features} features, {self.dtype} tiles)"
        )

    def _repr_html_(self) -> str:
        rows = {
            "kernel": repr(self.kernel),
            "ridge λ": f"{self.ridge:g}",
            "landmarks": f"{len(self.landmarks.indices):,} distinct, rank {self.rank:,}",
            "fitted to": f"{self.n_rows:,} rows × {self.n_features} features",
            "factors kept by": self.algebra.place,
        }
        return html_table("NystromSketch", rows)


def html_table(title: str, rows: dict[str, str]) -> str:
    """A two-column table for notebooks."""
    body = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th><td style='text-align:left'>{escape(text)}</td></tr>"
        for name, text in rows.items()
    )
    return f"<table><caption style='text-align:left'><b>{escape(title)}</b></caption><tbody>{body}</tbody></table>"
