"""A sketch applied to a store of rows never seen: their scores among the data that it was fitted to, durably."""

import os
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from daskrr import jobs
from daskrr.aggregates import TOP
from daskrr.engine.addresses import locate, redact
from daskrr.engine.feed import note, reporter
from daskrr.engine.journal import Journal
from daskrr.engine.passes import Executor, Run, executor, split
from daskrr.engine.places import Staged
from daskrr.engine.plan import Plan, Work, Workers, check_fits, make_plan
from daskrr.engine.progress import Reporter
from daskrr.engine.rows import Rows
from daskrr.engine.storage import column_of
from daskrr.fitting import versions
from daskrr.identity import described_input
from daskrr.jobstore import JobStore
from daskrr.kernels.weighted import unweighted
from daskrr.loading import load_sketch
from daskrr.numerics import histogram
from daskrr.nystrom.sketch import NystromSketch
from daskrr.receipts import Receipt, shapes_of, sum_counts, write_missing, write_rows
from daskrr.result import LEVELS, as_given
from daskrr.top import CERTIFIED, PLAIN, merge_top


def apply_sketch(
    sketch: NystromSketch | str | os.PathLike,
    X_new: Any,
    output: str | os.PathLike,
    *,
    overwrite: bool = False,
    wait: bool = False,
    missing_chunks: str = "refuse",
    block_rows: int | None = None,
    allow_functions: Collection[str] = (),
    progress: Reporter | bool | None = None,
) -> dict[str, Any]:
    """Score rows never seen among the data that a sketch was fitted to, and write them to the Zarr group ``output``.

    It holds ``scores``, ``estimate`` and ``residual`` of every row as row n + 1 of that data, and ``lower`` and
    ``upper`` where the sketch is certified; see :class:`daskrr.NystromSketch`. The data itself is not read. It survives
    being killed as :func:`daskrr.score_to_zarr` does: the same call goes on where it was, to the same bits, and nothing
    is visible before all of it is there. Returns the summary that is stored with the result.

    Parameters
    ----------
    sketch
        A sketch, or the path of one that was saved, or of stored scores, which carry theirs.
    X_new
        (m, d) rows: NumPy array, Dask array, Zarr array, or path or URL of a Zarr array.
    overwrite
        Replace what was scored there; it stays readable until the new scores are whole.
    wait
        Wait for another job that holds the output, instead of failing.
    missing_chunks
        ``"refuse"`` an input with chunks that were never written, or read them as their ``"fill"`` value.
    block_rows
        Rows per task, rounded to whole input chunks.
    allow_functions
        Names ``"package.module:function"`` that the stored kernel may import.

    Raises
    ------
    InvalidData
        There is no sketch, the scores are not finished, or the rows have other features.
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
    ...     summary = daskrr.apply_sketch(f"{folder}/scores.zarr", X[:7] + 1.0, f"{folder}/tonight.zarr")
    ...     daskrr.open_scores(f"{folder}/tonight.zarr")["scores"].shape
    (7,)
    """
    found = Application.of(sketch, X_new, missing_chunks, block_rows, allow_functions)
    store = JobStore(output)
    done = jobs.check(store, found.parameters, overwrite)
    if done is not None:
        return done
    with jobs.at_work(store, wait) as lease:
        done = jobs.check(store, found.parameters, overwrite)
        if done is not None:
            return done
        check_fits(found.plan, Workers.of(found.executor))
        generation, seed = jobs.begin(store, lease, found.parameters, found, "apply")
        with reporter(progress) as report:
            note(**found.facts)
            with jobs.Work(store, generation, lease, found.parameters, seed, report) as work:
                return work.publish(found)


def already_applied(
    sketch: str | os.PathLike,
    X_new: Any,
    output: str | os.PathLike,
    *,
    overwrite: bool = False,
    missing_chunks: str = "refuse",
    allow_functions: Collection[str] = (),
) -> dict[str, Any] | None:
    """The summary of what the same call of :func:`apply_sketch` has published already, if it has; runs nothing.

    Raises
    ------
    InvalidData, OutputExists
        As :func:`apply_sketch`.
    """
    found = Application.of(sketch, X_new, missing_chunks, None, allow_functions)
    return jobs.check(JobStore(output), found.parameters, overwrite)


@dataclass(frozen=True)
class Application:
    """A sketch, and the new rows that it is applied to; no random number has a say in what it gives."""

    name: str
    sketch: NystromSketch
    origin: str
    parameters: dict[str, Any]
    rows: Rows
    plan: Plan
    executor: Executor
    seed: int = 0

    @classmethod
    def of(
        cls, sketch: Any, X_new: Any, missing_chunks: str, block_rows: int | None, allow_functions: Collection[str]
    ) -> "Application":
        """Check every argument; reads the sketch, and nothing of the rows but metadata."""
        origin = "a sketch in memory"
        if not isinstance(sketch, NystromSketch):
            origin = redact(locate(sketch))
            sketch = load_sketch(sketch, allow_functions)
        rows = sketch.open_new_rows(X_new, missing_chunks)
        name = uuid.uuid4().hex
        where = executor(name)
        plan = make_plan(
            rows, sketch.dtype, Work(max(sketch.rank, 1), len(sketch.ridges)), block_rows, Workers.of(where)
        )  # fmt: skip
        parameters = {
            "sketch": sketch.identity,
            "ridges": list(sketch.ridges),
            "single": sketch.single,
            "options": {"missing_chunks": missing_chunks, "block_rows": block_rows},
            "input": described_input(rows),
        }
        return cls(name, sketch, origin, parameters, rows, plan, where)

    @property
    def facts(self) -> dict[str, Any]:
        """What a page about it says at its head."""
        return {
            "run": self.name,
            "input": redact(self.rows.origin),
            "rows": self.rows.n_rows,
            "features": self.sketch.n_features,
            "kernel": repr(unweighted(self.sketch.kernel)),
            "ridge": min(self.sketch.ridges),
            "landmarks": len(self.sketch.landmarks.indices),
            "tolerance": None,
        }

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the arrays that are stored."""
        names = PLAIN if self.sketch.certainty is None else CERTIFIED
        return shapes_of(names, self.rows.n_rows, None if self.sketch.single else len(self.sketch.ridges))

    def stage_parts(self, stage: Callable[..., Any]) -> list[Any]:
        """Nothing else is stored: whoever needs the sketch has it."""
        return []

    def write(
        self, staged: Staged, report: Reporter, journal: Journal, since: int = 0
    ) -> tuple[dict[str, Any], list[Receipt]]:
        """Score the blocks that have no receipt yet; summary and receipts."""
        began, sketch = time.perf_counter(), self.sketch
        shared = sketch.held(self.executor)
        run = Run(self.name, self.rows, split(self.rows.n_rows, self.plan.block_rows), self.executor, report)
        receipts = write_missing(
            run, journal, staged, lambda blocks, then: sketch.new_row_tasks(*shared, run.rows, blocks, run.name, then),
            partial(write_rows, staged.arrays, sketch.single, column_of(sketch.ridges, None), None, since),
            "new rows: scores", sketch.gram_flops(False) + sketch.score_flops,
        )  # fmt: skip
        return self._summary(receipts, time.perf_counter() - began), receipts

    def _summary(self, receipts: list[Receipt], seconds: float) -> dict[str, Any]:
        """Every parameter, version and figure, ready for JSON."""
        sketch, options = self.sketch, self.parameters["options"]
        return {
            "parameters": {
                "input": self.rows.origin,
                "kernel": unweighted(sketch.kernel).to_spec(),
                "ridge": as_given(sketch.ridges, sketch.single),
                "dtype": str(sketch.dtype),
                "missing_chunks": options["missing_chunks"],
                "block_rows": self.plan.block_rows,
            },
            "sketch": {
                "origin": self.origin,
                "identity": self.parameters["sketch"],
                "n_rows": sketch.n_rows,
                "n_landmarks": len(sketch.landmarks.indices),
                "rank": sketch.rank,
                "failure_probability": None if sketch.certainty is None else sketch.certainty.failure_probability,
            },
            "n_rows": self.rows.n_rows,
            "n_features": sketch.n_features,
            "certificate": None,
            "top": merge_top([one.top for one in receipts], TOP).to_records(),
            "score_quantiles": {
                "levels": list(LEVELS),
                "values": histogram.quantiles(sum_counts(receipts).sum(axis=0), LEVELS),
            },
            "workers": self.executor.workers,
            "versions": versions(),
            "seconds": {"apply": seconds},
        }
