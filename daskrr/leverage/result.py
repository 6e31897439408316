"""What :func:`daskrr.leverage_scores` returns: lazy scores of every row, and how they are ranked and stored."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property, partial, reduce
from operator import add
from typing import Any

import dask.array as da
import numpy as np
from numpy.typing import NDArray

from daskrr.kernels.weighted import unweighted
from daskrr.leverage.block_tasks import (
    block_widths,
    largest_excess,
    residual_column,
    side_by_side,
    weighted_residual_column,
)
from daskrr.leverage.plan import Plan
from daskrr.leverage.plotting import ScorePictures
from daskrr.leverage.profile import Profile, added, scored_profile, thinned
from daskrr.leverage.ranking import CERTIFIED, PLAIN, TopRows, check_top, column_of, merge_top, not_certified
from daskrr.leverage.tabulated import Tabulated
from daskrr.leverage.writing import (
    Receipt,
    as_given,
    check_sums,
    highest,
    quantiles_of,
    ridge_notes,
    shapes_of,
    top_of_block,
    write_rows,
)
from daskrr.numerics.bounds import kernel_noise
from daskrr.nystrom import factors
from daskrr.nystrom.audit import Audit
from daskrr.nystrom.certificate import Certificate, Proof, Widths, dimension_bounds, least_dimension, summarize
from daskrr.nystrom.first_pass import FirstPass
from daskrr.nystrom.ledger import Ledger
from daskrr.nystrom.saving import SKETCH
from daskrr.nystrom.sketch import NystromSketch
from daskrr.nystrom.spectrum import path_of, ridge_range
from daskrr.runtime.executors import Executor
from daskrr.runtime.map_blocks import BlockMap, Run, map_blocks
from daskrr.runtime.notebook import html_table
from daskrr.runtime.progress import Reporter, interval, silent, without_infinity
from daskrr.runtime.rows import JoinedRows, Rows
from daskrr.runtime.telemetry import reporter
from daskrr.runtime.tree import Span
from daskrr.storage.saving import Saving
from daskrr.storage.zarr_arrays import Staged

log = logging.getLogger("daskrr")


class LeverageResult(Tabulated):
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
        spans: Sequence[Span],
        sketch: NystromSketch,
        kept: list[Any],
        executor: Executor,
        plan: Plan,
        summary: dict[str, Any],
        ledger: Ledger,
        proof: Proof | None = None,
        held: Future[Any] | None = None,
    ) -> None:
        self.sketch, self.plan, self.ledger, self._held = sketch, plan, ledger, held
        self.sketch_dimension, self.rank = summary["sketch_dimension"], summary["rank"]
        self.rows, self.spans, self._kept, self.executor, self._proof = rows, spans, kept, executor, proof
        self._profiles: dict[int, Profile] = {}
        self._eigenvalues: Future[NDArray[np.float64]] | None = None
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
        look = partial(largest_excess, sketch.reading, self._proof.goal, sketch.ridges.index(min(sketch.ridges)))
        payload = self.executor.hold(sketch.algebra.payload(factors.drawn_rows))
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
        run, rows = self._run(), self.rows
        if isinstance(rows, JoinedRows):
            work = partial(weighted_residual_column, rows.scale)
            return map_blocks(run, "residual", work, rows.column, each=[self._kept]).lazy(1)[:, 0]
        return map_blocks(run, "residual", residual_column, each=[self._kept]).lazy(1)[:, 0]

    def _run(self, report: Reporter = silent) -> Run:
        return Run(self.sketch.run, self.rows, self.spans, self.executor, report)

    @property
    def names(self) -> tuple[str, ...]:
        """Of what is known of every row and ridge."""
        return CERTIFIED if self.certified else PLAIN

    @cached_property
    def _pass_2(self) -> da.Array:
        width = len(self.names) * len(self.sketch.ridges)
        payload, then = self.sketch.algebra.payload(factors.scorer), partial(side_by_side, self.names)
        return self.sketch.map_scores(self._run(), payload, self._kept, then, "lazy").lazy(width)

    def map_scores(
        self,
        use: str,
        then: Callable[..., Any],
        report: Reporter = silent,
        more: Sequence[Any] | None = None,
    ) -> BlockMap:
        """Pass 2 for one use; ``then`` is called with each block's scores. Workers may hold the factors already."""
        held, self._held = self._held, None
        payload = self.executor.hold(self.sketch.algebra.payload(factors.scorer)) if held is None else held.result()
        return self.sketch.map_scores(self._run(report), payload, self._kept, then, use, more)

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
            scores = self.map_scores("widths", self.measurer, report, self.drawn_by)
            found = scores.values("pass 2: scores", self.sketch.score_flops)
        return self.conclude(found)

    def conclude(self, widths: Sequence[Widths]) -> Certificate:
        """The certificate, now that all blocks have been measured; it is kept."""
        proof = self._proof
        if proof is None:
            raise not_certified("interval")
        self.certificate = summarize(
            self.sketch, proof.audit, proof.dimensions, proof.totals, reduce(add, widths), proof.goal, proof.fidelity
        )  # fmt: skip
        return self.certificate

    @property
    def measurer(self) -> Callable[..., Widths]:
        """What finds out how wide the intervals of a block are."""
        proof, sketch = self._proof, self.sketch
        if proof is None or sketch.certainty is None:
            raise not_certified("interval")
        uniform = 1.0 / proof.chance_total if proof.chances == "uniform" else None
        return partial(block_widths, sketch.shifts, sketch.certainty, proof.goal, uniform, proof.chance_total)

    @property
    def drawn_by(self) -> Sequence[Any] | None:
        """Of the blocks of every span the weights that rows were drawn by, if there are any."""
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
        scores = self.map_scores(f"top-{k}-{by}-{column}", partial(top_of_block, k, by, column))
        parts = scores.values("pass 2: highest rows", self.sketch.score_flops)
        return merge_top(parts, k).below(self.sketch.ceilings, column)

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
            with reporter(progress) as report:
                scores = self.map_scores(f"profile-{column}", partial(scored_profile, column), report)
                found = scores.total(added, "pass 2: profile")
            self._profiles[column] = found.below(self.sketch.ceilings, column)
        return self._profiles[column]

    @property
    def eigenvalues(self) -> NDArray[np.float64]:
        """(r,) of G = BᵀB, those of the sketch L other than 0, in descending order; found where the factors are."""
        return self._begin_eigenvalues().result()

    def _begin_eigenvalues(self) -> Future[NDArray[np.float64]]:
        """Look for them, elsewhere while this process goes on."""
        if self._eigenvalues is None:
            self._eigenvalues = self.sketch.begin_eigenvalues(self.executor)
        return self._eigenvalues

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
        with Saving(path, overwrite) as output, reporter(progress) as report:
            output.create(self.shapes, self.plan.block_rows)
            began = time.perf_counter()
            writes = self.writes(output.staged, report)
            parts = self.stage_parts(output.stage)
            receipts = writes.values(self.writing_title, self.writing_flops, output.staged.settle)
            summary = self.concluded(receipts, time.perf_counter() - began)
            output.add(self.executor.values(parts))
            output.commit(summary, {name: [one.digests[name] for one in receipts] for name in self.shapes})
        return summary | {"output": output.target}

    @property
    def writing_title(self) -> str:
        """What the progress bar says while it is written."""
        return "pass 2: scores"

    @property
    def writing_flops(self) -> float:
        """Floating-point operations of a row meanwhile."""
        return self.sketch.score_flops

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the arrays that are stored."""
        return shapes_of(self.names, self.rows.n_rows, None if self.sketch.single else len(self.sketch.ridges))

    def stage_parts(self, stage: Callable[..., Any]) -> list[Any]:
        """Have ``stage`` write the groups that are stored with the arrays: name, kind, arrays, attributes; handles."""
        return [self.sketch.pack_where_factors_go(self.executor, partial(stage, "sketch", SKETCH))]

    def writes(self, staged: Staged, report: Reporter, since: int = 0) -> BlockMap:
        """Pass 2 into arrays, each block of which gives a receipt; rows from ``since`` on are counted apart."""
        measurer = self.measurer if self.certified else None
        write = partial(write_rows, staged, self.sketch.single, self.column(None), measurer, since)
        found = self.map_scores("store", write, report, self.drawn_by)
        self._begin_eigenvalues()  # there is time for them while workers are at pass 2
        return found

    def concluded(self, receipts: Sequence[Receipt], seconds: float) -> dict[str, Any]:
        """The summary, once what all blocks together have is checked against pass 1.

        Raises
        ------
        CheckFailed
            It is not what pass 1 has found.
        """
        totals = np.array([math.fsum(column) for column in zip(*(receipt.sums for receipt in receipts), strict=True)])
        check_sums(totals, self.sketch_dimension, self.summary["score_error"])
        if self.certified:
            self.conclude([receipt.widths for receipt in receipts if receipt.widths is not None])
        mean_diagonal = self.summary["trace"] / self.sketch.n_rows
        notes = ridge_notes(receipts, self.sketch.ridges, self.sketch.n_rows, mean_diagonal)
        for note in notes:
            log.warning(note)
        return self.summary | {
            "effective_dimension": without_infinity(self.dimension_ends),
            "notes": [*self.summary["notes"], *notes],
            "sum_of_scores": as_given(totals, self.sketch.single),
            "certificate": self.certificate.to_dict() if self.certified else None,
            "top": highest(receipts, self.sketch.ceilings, self.column(None)),
            "score_quantiles": quantiles_of(receipts),
            "spectrum": self.spectrum(),
            "path": self.dimension_path(),
            "seconds": self.summary["seconds"] | {"pass 2": seconds},
        }

    def _facts(self) -> dict[str, str]:
        parameters = self.summary["parameters"]
        facts = {
            "rows": f"{self.summary['n_rows']:,} × {self.summary['n_features']} features, {parameters['input']}",
            "kernel": repr(unweighted(self.sketch.kernel)),
            "ridge λ": self.sketch.ridge_text,
            "landmarks": f"{parameters['n_landmarks']:,} draws ({parameters['sampling']}), "
            f"{self.summary['distinct_landmarks']:,} distinct, rank {self.rank:,}",
            "effective dimension": ", ".join(map(interval, self.dimension_ends)),
            "highest score possible": ", ".join(f"{one:.4g}" for one in self.sketch.ceilings or ()) or "differs",
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
        return "LeverageResult\n" + "\n".join(f"{name:>23}: {text}" for name, text in self._facts().items())

    def _repr_html_(self) -> str:
        return html_table("LeverageResult", self._facts())
