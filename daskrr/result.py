"""What :func:`daskrr.leverage_scores` returns: lazy scores of every row, and how they are ranked and stored."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from operator import add
from typing import Any

import dask.array as da
import numpy as np
import zarr
from dask.delayed import Delayed
from numpy.typing import NDArray

from daskrr.aggregates import TOP, Profile, added, scored_profile, thinned
from daskrr.dimensions import path_of, ridge_range
from daskrr.engine.feed import reporter
from daskrr.engine.journal import Journal
from daskrr.engine.passes import Block, Executor, Run, as_array, task
from daskrr.engine.places import Staged
from daskrr.engine.plan import Plan
from daskrr.engine.progress import Reporter, interval, without_infinity
from daskrr.engine.rows import JoinedRows, Rows, pieces
from daskrr.engine.storage import OutputStore, column_of, write_part
from daskrr.errors import CheckFailed
from daskrr.kernels.weighted import unweighted
from daskrr.ledger import Ledger
from daskrr.numerics import histogram
from daskrr.numerics.bounds import kernel_noise
from daskrr.numerics.gram import Totals
from daskrr.numerics.reservoir import Reservoir
from daskrr.numerics.score import ScoredRows
from daskrr.nystrom.audit import Audit
from daskrr.nystrom.certificates import (
    Certificate,
    Goal,
    Widths,
    dimension_bounds,
    least_dimension,
    summarize,
    widths_of,
)
from daskrr.nystrom.pass1 import FirstPass
from daskrr.nystrom.reading import Reading, score_drawn_rows
from daskrr.nystrom.sampling import ScoreFidelity
from daskrr.nystrom.saving import SKETCH
from daskrr.nystrom.sketch import NystromSketch, html_table, kept_of
from daskrr.pictures import ScorePictures
from daskrr.receipts import Receipt, ridge_notes, shapes_of, sum_counts, top_of_block, write_missing, write_rows
from daskrr.top import CERTIFIED, PLAIN, TopRows, check_top, merge_top, not_certified

log = logging.getLogger("daskrr")

# Of the quantiles that are told of the scores at the smallest ridge.
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


@dataclass(frozen=True)
class Proof:
    """What a certificate rests on, before all rows have been looked at.

    ``chances`` is what the landmarks were drawn by: ``"uniform"``, handles of weights, or None. ``fidelity`` is what is
    known of draws by upper ends of scores.
    """

    audit: Audit
    totals: Totals
    dimensions: tuple[float, ...]
    goal: Goal
    chances: str | Sequence[Any] | None
    chance_total: float
    fidelity: ScoreFidelity | None = None


class LeverageResult:
    """Scores of every row, lazily; made by :func:`daskrr.leverage_scores`.

    Attributes
    ----------
    sketch
        The fitted small object, which scores new rows too.
    sketch_dimension
        tr(G (G + n·λ·I)⁻¹): what the scores must sum to, and what the effective dimension of the data is not below, up
        to round-off; a list for a list of ridges.
    rank
        Number of landmarks that are linearly independent at working precision.
    plan
        What the run was expected to cost.
    summary
        Every parameter, version and figure, ready for JSON.
    ledger
        What the audits up to this one have spent of the failure probability that was asked for.
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
        ledger: Ledger,
        proof: Proof | None = None,
    ) -> None:
        self.sketch, self.plan, self.ledger = sketch, plan, ledger
        self.sketch_dimension: Any = summary["sketch_dimension"]
        self.rank: int = summary["rank"]
        self.rows, self.blocks, self._kept, self.executor, self._proof = rows, blocks, kept, executor, proof
        self._profiles: dict[int, Profile] = {}
        self.summary = summary | {"effective_dimension": without_infinity(self._dimension_ends(summary))}

    @property
    def audit(self) -> Audit:
        """How ‖K − L‖ was bounded; known without another pass."""
        if self._proof is None:
            raise not_certified("interval")
        return self._proof.audit

    @property
    def effective_dimension_bounds(self) -> list[tuple[float, float]]:
        """For every ridge, what the sum of the exact scores lies between: as the certificate has it, once it is known.

        Before, by the trace of K − L alone.
        """
        if self._proof is None:
            raise not_certified("effective dimension")
        return self.dimension_ends

    @property
    def dimension_ends(self) -> list[tuple[float, float]]:
        """The same, with no end above where nothing is certified."""
        if "certificate" in vars(self):
            return self.certificate.effective_dimension
        return self._dimension_ends(self.summary)

    def _dimension_ends(self, summary: dict[str, Any]) -> list[tuple[float, float]]:
        if self._proof is not None:
            return dimension_bounds(self.sketch, self._proof.audit, self._proof.dimensions)
        noise = kernel_noise(self.sketch.kernel_error, summary["trace"])
        figures = map(np.atleast_1d, (summary["score_error"], summary["sketch_dimension"]))
        return [
            (least_dimension(noise, self.sketch.n_rows, *one), math.inf)
            for one in zip(self.sketch.shifts, *figures, strict=True)
        ]

    def excess_among(self, first: FirstPass) -> float:
        """How many times as wide as it may be the widest interval is, of the rows that pass 1 drew for the audit.

        More than 1 spares a look at all rows.
        """
        if self._proof is None or not self._proof.audit.rows:
            return 0.0
        sketch = self.sketch
        look = partial(_largest_excess, sketch.reading, self._proof.goal, sketch.ridges.index(min(sketch.ridges)))
        payload = self.executor.hold(sketch.algebra.payload("drawn rows"))
        return self.executor.value(self.executor.apply("look-at-drawn-rows", look, payload, first.drawn))

    @property
    def certified(self) -> bool:
        """Whether every score comes with an interval."""
        return self._proof is not None

    @property
    def scores(self) -> da.Array:
        """Lazy (n,), (n, L) for L ridges: the paper's scores l̃, never above the exact ones beyond round-off."""
        return self.sketch.pick(self._pass_2, 0)

    @property
    def estimate(self) -> da.Array:
        """Lazy, like ``scores``: corrected by each row's residual, which sees outliers that no landmark is near."""
        return self.sketch.pick(self._pass_2, 1)

    @property
    def lower(self) -> da.Array:
        """Lazy, like ``scores``: what the exact score is certainly not below, round-off included.

        Raises
        ------
        NotCertified
            The scores were computed without ``certify=True``.
        """
        return self._end("lower")

    @property
    def upper(self) -> da.Array:
        """Lazy, like ``scores``: what the exact score is certainly not above, round-off included.

        Raises
        ------
        NotCertified
            The scores were computed without ``certify=True``.
        """
        return self._end("upper")

    def _end(self, name: str) -> da.Array:
        if not self.certified:
            raise not_certified(name)
        return self.sketch.pick(self._pass_2, CERTIFIED.index(name))

    @cached_property
    def residual(self) -> da.Array:
        """Lazy (n,): k_ii − L_ii, the part of each row that the landmarks do not explain; kept from pass 1."""
        weights = self.rows.anew(f"residual-{self.sketch.run}") if isinstance(self.rows, JoinedRows) else None
        tasks = []
        for block, kept in zip(self.blocks, self._kept, strict=True):
            more = [] if weights is None else [weights.column.source(block.start, block.stop), weights.scale]
            tasks.append(task("residual", self.sketch.run, block.index, _residual_column, kept, *more))
        return as_array(f"residuals-{self.sketch.run}", tasks, self.blocks, 1)[:, 0]

    @property
    def _names(self) -> tuple[str, ...]:
        return CERTIFIED if self.certified else PLAIN

    @cached_property
    def _pass_2(self) -> da.Array:
        width = len(self._names) * len(self.sketch.ridges)
        tasks = list(self.score_tasks("lazy", partial(_side_by_side, self._names)))
        return as_array(f"scores-{self.sketch.run}", tasks, self.blocks, width)

    def score_tasks(
        self,
        use: str,
        then: Callable[..., Any],
        more: Sequence[Any] | None = None,
        blocks: Sequence[Block] | None = None,
    ) -> Iterator[Delayed]:
        """The tasks of pass 2 for one use, on all blocks or some; ``then`` is called with each block's scores."""
        payload = self.sketch.algebra.payload("scorer")
        held = payload if use == "lazy" else self.executor.hold(payload)
        blocks = self.blocks if blocks is None else blocks
        kept = [self._kept[block.index] for block in blocks]
        return self.sketch.score_tasks(held, self.rows, blocks, kept, use, then, more)

    def _all_blocks(
        self, use: str, then: Callable[..., Any], report: Reporter, more: Sequence[Any] | None = None
    ) -> list[Any]:
        """Pass 2 over all rows: what ``then`` makes of each block, in this process."""
        run = Run(self.sketch.run, self.rows, self.blocks, self.executor, report)
        return self.executor.values(
            run.collect("pass 2: scores", self.score_tasks(use, then, more), self.sketch.score_flops)
        )

    @cached_property
    def certificate(self) -> Certificate:
        """What is certain about the scores and how wide the intervals are; runs pass 2 unless something did so before.

        Raises
        ------
        NotCertified
            The scores were computed without ``certify=True``.
        """
        return self.measure()

    def measure(self, progress: Reporter | bool | None = None) -> Certificate:
        """Run pass 2 to find out how wide the intervals are; the certificate is kept."""
        if self._proof is None:
            raise not_certified("interval")
        with reporter(progress) as report:
            found = self._all_blocks("widths", self._measurer, report, self._weights)
        self.certificate = self._summarize(found)
        return self.certificate

    def _summarize(self, widths: Sequence[Widths]) -> Certificate:
        proof = self._proof
        if proof is None:
            raise not_certified("interval")
        return summarize(
            self.sketch, proof.audit, proof.dimensions, proof.totals, reduce(add, widths), proof.goal, proof.fidelity
        )  # fmt: skip

    @property
    def _measurer(self) -> Callable[..., Widths]:
        proof, sketch = self._proof, self.sketch
        if proof is None or sketch.certainty is None:
            raise not_certified("interval")
        uniform = 1.0 / proof.chance_total if proof.chances == "uniform" else None
        return partial(_widths, sketch.shifts, sketch.certainty, proof.goal, uniform, proof.chance_total)

    @property
    def _weights(self) -> Sequence[Any] | None:
        chances = None if self._proof is None else self._proof.chances
        return None if isinstance(chances, str) else chances

    def top(self, k: int = 10, by: str = "estimate", ridge: float | None = None) -> TopRows:
        """The k highest rows by ``"estimate"``, ``"scores"``, ``"lower"`` or ``"upper"``, reduced on the workers.

        Of several ridges the smallest decides unless ``ridge`` names another.

        Raises
        ------
        InvalidParameter
            k below 1, ranked by something else, or at a ridge that was not asked for.
        """
        check_top(k, by, self.certified)
        column = self.column(ridge)
        tasks = self.score_tasks(f"top-{k}-{by}-{column}", partial(top_of_block, k, by, column))
        handles = [handle for _, handle in self.executor.window(tasks, self.blocks)]
        return merge_top(self.executor.values(handles), k)

    def column(self, ridge: float | None) -> int:
        """Which column belongs to a ridge; the smallest ridge by default."""
        return column_of(self.sketch.ridges, ridge)

    @property
    def plot(self) -> ScorePictures:
        """Pictures: ``plot.scores()``, ``plot.intervals()``, ``plot.spectrum()`` and ``plot.path()``."""
        return ScorePictures(self)

    def profile(self, ridge: float | None = None, progress: Reporter | bool | None = None) -> Profile:
        """How large scores and interval ends are, counted on the workers: runs pass 2 the first time."""
        column = self.column(ridge)
        if column not in self._profiles:
            tasks = self.score_tasks(f"profile-{column}", partial(scored_profile, column))
            with reporter(progress) as report:
                run = Run(self.sketch.run, self.rows, self.blocks, self.executor, report)
                self._profiles[column] = run.total("pass 2: profile", tasks, added)
        return self._profiles[column]

    @cached_property
    def eigenvalues(self) -> NDArray[np.float64]:
        """(r,) of G = BᵀB, those of the sketch L other than 0, in descending order; found where the factors are."""
        return self.sketch.algebra.perform("eigenvalues", None, {"shift": self.sketch.shifts[0]})["eigenvalues"]

    def spectrum(self) -> dict[str, list[Any]]:
        """At most a few hundred of the eigenvalues, with their ranks."""
        return thinned(self.eigenvalues)

    def dimension_path(self, ridges: Sequence[float] | None = None) -> dict[str, Any]:
        """Effective dimension of the sketch at any ridges, from its eigenvalues: no pass is run.

        Returns
        -------
        path
            ``ridges``, ``sketch_dimension``, and ``lower`` and ``upper``, between which the sum of the exact scores
            certainly is; None where nothing is certified.

        Raises
        ------
        RidgeTooSmall
            Round-off would decide the result.
        """
        if ridges is None:
            ridges = ridge_range(self.sketch, self.eigenvalues, self.summary["trace"] / self.sketch.n_rows)
        found = None if self._proof is None else self._proof.audit
        return path_of(self.sketch, self.eigenvalues, found, ridges)

    def store(self, path: Any, *, overwrite: bool = False, progress: Reporter | bool | None = None) -> dict[str, Any]:
        """Run pass 2 and write the results to a new Zarr group; return its summary.

        The group holds ``scores``, ``estimate`` and ``residual``, and ``lower`` and ``upper`` where they are certified.
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
            output.create(self.shapes, self.plan.block_rows)
            began = time.perf_counter()
            receipts = self._all_blocks("store", self._writer(output.arrays, 0), report, self._weights)
            summary = self._concluded(receipts, began)
            self.stage_parts(partial(write_part, output.path))
            output.commit(summary)
        return summary | {"output": output.target}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the arrays that are stored."""
        return shapes_of(self._names, self.rows.n_rows, None if self.sketch.single else len(self.sketch.ridges))

    def stage_parts(self, stage: Callable[..., Any]) -> list[Any]:
        """Have ``stage`` write the groups that are stored with the arrays: name, kind, arrays and attributes."""
        return [self.sketch.pack_where_factors_go(self.executor, partial(stage, "sketch", SKETCH))]

    def write(
        self, staged: Staged, report: Reporter, journal: Journal, since: int = 0
    ) -> tuple[dict[str, Any], list[Receipt]]:
        """Run pass 2 into arrays of these shapes, chunked by blocks, and check what it found; summary and receipts.

        Blocks that the journal has a receipt of are not scored again. Scores are counted apart from row ``since`` on.
        """
        began = time.perf_counter()
        run = Run(self.sketch.run, self.rows, self.blocks, self.executor, report)
        receipts = write_missing(
            run, journal, staged, lambda blocks, then: self.score_tasks("store", then, self._weights, blocks),
            self._writer(staged.arrays, since), "pass 2: scores", self.sketch.score_flops,
        )  # fmt: skip
        return self._concluded(receipts, began), receipts

    def _writer(self, arrays: dict[str, zarr.Array], since: int) -> Callable[..., Receipt]:
        measurer = self._measurer if self.certified else None
        return partial(write_rows, arrays, self.sketch.single, self.column(None), measurer, since)

    def _concluded(self, receipts: list[Receipt], began: float) -> dict[str, Any]:
        """Check what all blocks together have, and the summary."""
        totals = np.array([math.fsum(column) for column in zip(*(one.sums for one in receipts), strict=True)])
        self._check_sums(totals)
        if self.certified:
            self.certificate = self._summarize([one.widths for one in receipts if one.widths is not None])
        notes = ridge_notes(
            receipts, self.sketch.ridges, self.sketch.n_rows, self.summary["trace"] / self.sketch.n_rows
        )
        for note in notes:
            log.warning(note)
        return self.summary | {
            "effective_dimension": without_infinity(self.dimension_ends),
            "notes": [*self.summary["notes"], *notes],
            "sum_of_scores": as_given(totals, self.sketch.single),
            "certificate": self.certificate.to_dict() if self.certified else None,
            "top": merge_top([one.top for one in receipts], TOP).to_records(),
            "score_quantiles": {
                "levels": list(LEVELS),
                "values": histogram.quantiles(sum_counts(receipts).sum(axis=0), LEVELS),
            },
            "spectrum": self.spectrum(),
            "path": self.dimension_path(),
            "seconds": self.summary["seconds"] | {"pass 2": time.perf_counter() - began},
        }

    def _check_sums(self, totals: NDArray[np.float64]) -> None:
        """Scores and sketch dimension are two readings of one Gram matrix, which differ by round-off alone."""
        dimensions = np.atleast_1d(self.sketch_dimension)
        errors = np.atleast_1d(self.summary["score_error"])
        for total, dimension, error in zip(totals, dimensions, errors, strict=True):
            if not abs(total - dimension) <= error * dimension:
                raise CheckFailed(
                    f"the scores sum to {total:.12g}, but pass 1 found an effective dimension of {dimension:.12g} "
                    f"(round-off allows a relative difference of {error:.1g}). The input changed between the passes, "
                    "rows were lost, or round-off is larger than its budget. Nothing was published."
                )

    def _facts(self) -> dict[str, str]:
        parameters = self.summary["parameters"]
        facts = {
            "rows": f"{self.summary['n_rows']:,} × {self.summary['n_features']} features, {parameters['input']}",
            "kernel": repr(unweighted(self.sketch.kernel)),
            "ridge λ": self.sketch.ridge_text,
            "landmarks": f"{parameters['n_landmarks']:,} draws ({parameters['sampling']}), "
            f"{self.summary['distinct_landmarks']:,} distinct, rank {self.rank:,}",
            "effective dimension": ", ".join(map(interval, self.dimension_ends)),
            "seed": str(parameters["random_state"]),
            "p × p algebra": self.summary["algebra"]["place"],
        }
        if self._proof is not None:
            deviation = ", ".join(f"{self._proof.audit.delta / shift:.3g}" for shift in self.sketch.shifts)
            facts["certified"] = (
                f"‖K − L‖/nλ ≤ {deviation}, failure probability {self._proof.audit.failure_probability:g}"
            )
        return facts

    def __repr__(self) -> str:
        return "LeverageResult\n" + "\n".join(f"{name:>20}: {text}" for name, text in self._facts().items())

    def _repr_html_(self) -> str:
        return html_table("LeverageResult", self._facts())


def as_given(values: Any, single: bool) -> Any:
    """A number for one ridge, a list for a list of ridges."""
    return float(values[0]) if single else [float(value) for value in values]


def _residual_column(kept: Any, weights: Any = None, scale: float = 1.0) -> NDArray[np.float64]:
    """What was kept of a block; that of weighted rows is as many times as large."""
    residual = kept_of(kept).residual
    if weights is not None:
        residual = residual / (scale * np.concatenate([np.asarray(piece, np.float64) for piece in pieces(weights)]))
    return residual[:, None]


def _largest_excess(
    reading: Reading, goal: Goal, column: int, payload: dict[str, Any], drawn: dict[str, Reservoir]
) -> float:
    scored = score_drawn_rows(reading, payload, [drawn["audit"].X])
    return 0.0 if scored.interval is None else float(goal.excess(scored.interval)[:, column].max(initial=0.0))


def _side_by_side(names: Sequence[str], scored: ScoredRows, start: int) -> NDArray[np.float64]:
    return np.hstack([getattr(scored, name) for name in names])


def _widths(
    shifts: tuple[float, ...],
    certainty: Any,
    goal: Goal,
    uniform: float | None,
    total: float,
    scored: ScoredRows,
    start: int,
    weights: NDArray[np.float64] | None = None,
) -> Widths:
    """Measure one block; rows were drawn uniformly, by weights, or not at random."""
    return widths_of(scored, shifts, certainty, goal, uniform if weights is None else weights / total)
