"""A sketch applied to a store of rows never seen: their scores among the data that it was fitted to, durably."""

import os
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from daskrr.jobs import job
from daskrr.jobs.fingerprint import described_input
from daskrr.kernels.weighted import unweighted
from daskrr.leverage.plan import Plan, Workers, check_fits, make_plan
from daskrr.leverage.ranking import CERTIFIED, PLAIN, column_of
from daskrr.leverage.summary import versions
from daskrr.leverage.writing import Receipt, as_given, highest, quantiles_of, shapes_of, write_rows
from daskrr.nystrom.checkpoints import recorded_spans
from daskrr.nystrom.sketch import NystromSketch, load_sketch
from daskrr.nystrom.workload import Workload
from daskrr.runtime.executors import Executor, executor
from daskrr.runtime.map_blocks import BlockMap, Run, spans_of
from daskrr.runtime.progress import Reporter
from daskrr.runtime.rows import Rows
from daskrr.runtime.telemetry import note, reporter
from daskrr.storage.journal import Journal
from daskrr.storage.urls import locate, redact
from daskrr.storage.writing import hold
from daskrr.storage.zarr_arrays import Staged


def apply_sketch(
    sketch: NystromSketch | str | os.PathLike,
    X_new: Any,
    output: str | os.PathLike,
    *,
    overwrite: bool = False,
    wait: bool = False,
    keep: int = 1,
    missing_chunks: str = "refuse",
    block_rows: int | None = None,
    allow_functions: Collection[str] = (),
    already_scaled: bool = False,
    progress: Reporter | bool | None = None,
) -> dict[str, Any]:
    """Score rows never seen among the data that a sketch was fitted to, and write them to the Zarr group ``output``.

    It holds ``scores``, ``estimate`` and ``residual`` of every row as row n + 1 of that data, and ``lower`` and
    ``upper`` where the sketch is certified; see :class:`daskrr.nystrom.sketch.NystromSketch`. The data itself is not
    read. It survives being killed as :func:`daskrr.score_to_zarr` does: the same call goes on where it was, to the same
    bits, and nothing is visible before all of it is there. Returns the summary that is stored with the result.

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
    keep
        How many generations from before stay with the published one.
    missing_chunks
        ``"refuse"`` an input with chunks that were never written, or read them as their ``"fill"`` value.
    block_rows
        Rows of a block, rounded to whole input chunks.
    allow_functions
        Names ``"package.module:function"`` that the stored kernel may import.
    already_scaled
        The rows are made as those were that were scored, whatever the records of their columns say.

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
    ...     summary = daskrr.jobs.apply_sketch(f"{folder}/scores.zarr", X[:7] + 1.0, f"{folder}/tonight.zarr")
    ...     daskrr.open_scores(f"{folder}/tonight.zarr")["scores"].shape
    (7,)
    """
    application = Application.of(sketch, X_new, missing_chunks, block_rows, allow_functions, already_scaled)
    job.check_keep(keep)
    done = job.found_done(output, application.parameters, overwrite)
    if done is not None:
        return done
    with hold(output, wait) as held:
        done = job.check(held, application.parameters, overwrite)
        if done is not None:
            return done
        check_fits(application.plan, Workers.of(application.executor))

        def attempt(report: Reporter) -> dict[str, Any]:
            generation, seed = job.begin(held, application.parameters, application, "apply")
            with job.ActiveJob(held, generation, application.parameters, seed, report, keep) as active:
                return active.publish(replace(application, journal=active.journal))

        with reporter(progress) as report:
            note(**application.facts)
            return job.healed(held, partial(attempt, report))


def already_applied(
    sketch: str | os.PathLike,
    X_new: Any,
    output: str | os.PathLike,
    *,
    overwrite: bool = False,
    missing_chunks: str = "refuse",
    allow_functions: Collection[str] = (),
    already_scaled: bool = False,
) -> dict[str, Any] | None:
    """The summary of what the same call of :func:`apply_sketch` has published already, if it has; runs nothing.

    Raises
    ------
    InvalidData, OutputExists
        As :func:`apply_sketch`.
    """
    found = Application.of(sketch, X_new, missing_chunks, None, allow_functions, already_scaled)
    return job.found_done(output, found.parameters, overwrite)


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
    journal: Journal | None = None
    seed: int = 0

    @classmethod
    def of(
        cls,
        sketch: Any,
        X_new: Any,
        missing_chunks: str,
        block_rows: int | None,
        allow_functions: Collection[str],
        already_scaled: bool = False,
    ) -> "Application":
        """Check every argument; reads the sketch, and nothing of the rows but metadata."""
        origin = "a sketch in memory"
        if not isinstance(sketch, NystromSketch):
            origin = redact(locate(sketch))
            sketch = load_sketch(sketch, allow_functions)
        rows = sketch.open_new_rows(X_new, missing_chunks, already_scaled)
        name = uuid.uuid4().hex
        where = executor(name)
        work = Workload(n_landmarks=max(sketch.rank, 1), n_ridges=len(sketch.ridges))
        plan = make_plan(rows, sketch.dtype, work, block_rows, Workers.of(where))
        parameters = {
            "sketch": sketch.identity,
            "ridges": list(sketch.ridges),
            "single": sketch.single,
            "options": {"missing_chunks": missing_chunks, "block_rows": block_rows},
            "input": described_input(rows),
        }
        return cls(
            name=name, sketch=sketch, origin=origin, parameters=parameters, rows=rows, plan=plan, executor=where
        )  # fmt: skip

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

    @property
    def writing_title(self) -> str:
        """What the progress bar says while they are written."""
        return "new rows: scores"

    @property
    def writing_flops(self) -> float:
        """Floating-point operations of a row meanwhile."""
        return self.sketch.gram_flops(False) + self.sketch.score_flops

    def writes(self, staged: Staged, report: Reporter, since: int = 0) -> BlockMap:
        """What scores and writes every block, and gives its receipt."""
        sketch = self.sketch
        spans = spans_of(self.rows, self.plan.block_rows, self.executor, self.writing_flops)
        spans = spans if self.journal is None else recorded_spans(self.journal, spans)
        run = Run(self.name, self.rows, spans, self.executor, report)
        write = partial(write_rows, staged, sketch.single, column_of(sketch.ridges, None), None, since)
        return sketch.map_new_rows(run, sketch.held(self.executor), write)

    def concluded(self, receipts: Sequence[Receipt], seconds: float) -> dict[str, Any]:
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
            "ceiling": as_given(sketch.ceilings, sketch.single) if sketch.ceilings else None,
            "top": highest(receipts, sketch.ceilings, column_of(sketch.ridges, None)),
            "score_quantiles": quantiles_of(receipts),
            "workers": self.executor.workers,
            "versions": versions(),
            "seconds": {"apply": seconds},
        }
