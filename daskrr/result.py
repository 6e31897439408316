"""What :func:`daskrr.leverage_scores` returns: lazy scores of every row, and how they are ranked and stored."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import dask.array as da
import numpy as np
import zarr
from dask.delayed import Delayed
from numpy.typing import NDArray

from daskrr.engine.passes import Block, Executor, as_array, task
from daskrr.engine.plan import Plan
from daskrr.engine.progress import Reporter, Stage, reporter
from daskrr.engine.rows import Rows
from daskrr.engine.storage import OutputStore, write_block
from daskrr.errors import CheckFailed, InvalidParameter, check_count
from daskrr.numerics.tiles import Kept
from daskrr.nystrom.sketch import NystromSketch, html_table

# Least relative difference between the sum of the scores and the effective dimension that is reported as a failure.
SUM_TOLERANCE = {"float64": 1e-9, "float32": 1e-3}


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


def _top_of_block(k: int, by: str, values: NDArray, kept: Kept, start: int) -> TopRows:
    rows = np.arange(start, start + len(values))
    return merge_top([TopRows(rows, values[:, 0], values[:, 1], kept.residual, by)], k)


class LeverageResult:
    """Scores of every row, lazily; made by :func:`daskrr.leverage_scores`.

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
        return as_array(f"residuals-{self.sketch.run}", tasks, self._blocks, 1)[:, 0]

    @cached_property
    def _pass_2(self) -> da.Array:
        return as_array(f"scores-{self.sketch.run}", list(self._score_tasks("lazy")), self._blocks, 2)

    def _score_tasks(self, use: str, then: Callable | None = None) -> Iterator[Delayed]:
        payload = self.sketch.algebra.payload("scorer")
        held = payload if use == "lazy" else self._executor.hold(payload)
        return self.sketch.score_tasks(held, self._rows, self._blocks, self._kept, use, then)

    def top(self, k: int = 10, by: str = "estimate") -> TopRows:
        """The k highest rows by ``"estimate"`` or ``"scores"``, reduced on the workers.

        Raises
        ------
        InvalidParameter
            k below 1, or ranked by something else.
        """
        check_top(k, by)
        tasks = self._score_tasks(f"top-{k}-{by}", partial(_top_of_block, k, by))
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
        with OutputStore(path, overwrite) as output, reporter(progress) as report:
            output.create(("scores", "estimate", "residual"), self._rows.n_rows, self.plan.block_rows)
            began = time.perf_counter()
            total, top = self._write(output, report)
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
        tasks = self._score_tasks("store", partial(_write_scores, output.arrays))
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


def _write_scores(
    arrays: dict[str, zarr.Array], values: NDArray[np.float64], kept: Kept, start: int
) -> tuple[float, TopRows]:
    """Write one block of results; what comes back is a receipt: the block's sum and its highest rows."""
    if not (np.isfinite(values).all() and (values >= 0).all() and (values <= 1).all()):
        raise CheckFailed(f"a score in the block of rows from {start} is not within [0, 1]. Nothing was published.")
    write_block(arrays, {"scores": values[:, 0], "estimate": values[:, 1], "residual": kept.residual}, start)
    return math.fsum(values[:, 0]), _top_of_block(10, "estimate", values, kept, start)
