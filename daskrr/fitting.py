"""Pass 1 and the small algebra, up to a result whose scores are computed when they are asked for."""

import logging
import time
from dataclasses import dataclass, replace
from typing import Any

import dask
import distributed
import numpy as np
import scipy
import zarr

from daskrr import __version__
from daskrr.arguments import Job
from daskrr.engine.passes import Run, superblocks
from daskrr.engine.progress import Stage
from daskrr.errors import CheckFailed
from daskrr.kernels.weighted import unweighted
from daskrr.ledger import Ledger
from daskrr.numerics.algebra import check_resolution
from daskrr.numerics.tiles import tile_rows
from daskrr.nystrom.audit import Audit, audit, audit_draws, certainty_of, draw_apart, make_probe, probe_draw
from daskrr.nystrom.certificates import Goal
from daskrr.nystrom.pass1 import Chosen, FirstPass, Settings, first_pass, whiten
from daskrr.nystrom.rounds import landmark_draw
from daskrr.nystrom.sampling import Landmarks
from daskrr.nystrom.selection import Weighing
from daskrr.nystrom.sketch import NystromSketch
from daskrr.nystrom.sums import extent
from daskrr.result import LeverageResult, Proof, as_given

log = logging.getLogger("daskrr")


@dataclass(frozen=True)
class Pace:
    """Where a run stands: the round, how many landmarks come next, the size of the audit and what it may spend.

    ``audit_apart`` says that the rows of the audit are drawn in a pass of their own, since pass 1 sees new rows alone.
    """

    round: int
    following: int
    audit_rows: int
    ledger: Ledger
    n_rounds: int = 1
    audit_apart: bool = False

    @property
    def label(self) -> str:
        """What its sums are recorded under."""
        return f"fit-{self.round}"

    @property
    def title(self) -> str:
        """What the progress bar says."""
        return "pass 1: gram" if self.n_rounds == 1 else f"round {self.round + 1} of at most {self.n_rounds}: gram"

    @property
    def algebra_title(self) -> str:
        """What it says while the Gram matrix is factored and what is left of the kernel is audited."""
        return self.title.removesuffix("gram") + "algebra"


def fit(
    job: Job, run: Run, settings: Settings, chosen: Chosen, weighing: Weighing | None, pace: Pace | None = None
) -> tuple[LeverageResult, FirstPass]:
    """Whiten the landmarks, run pass 1, factor the Gram matrix, and audit what is left."""
    seed = job.scheme.seed
    pace = pace or Pace(round=0, following=0, audit_rows=job.scheme.audit_rows, ledger=job.ledger)
    ledger = pace.ledger
    audit_rows = pace.audit_rows if job.certify and ledger.share > 0 else 0
    sketch, whitened = whiten(run, f"{run.name}-{pace.round}" if job.target else run.name, settings, chosen)
    for_audit = audit_draws(seed, ledger.stream, audit_rows)
    draws = probe_draw(seed, pace.round) | ({} if pace.audit_apart else for_audit)
    if pace.following:
        following = pace.following
        larger = len(chosen.landmarks.indices) + following
        draws |= landmark_draw(seed, pace.round + 1, following, larger, run.rows.n_rows)
    keep_landmarks(run, f"landmarks-{pace.round}", chosen.landmarks)
    run = _with_base(run, sketch, pace)
    first = first_pass(run, sketch, draws, title=pace.title, label=pace.label)
    mean = first.totals.diagonal / sketch.n_rows
    share = check_resolution(
        sketch.kernel_error, mean, settings.smallest, sketch.rank, first.totals.height, settings.dtype
    )
    parameters = {
        "dtype": str(settings.dtype), "n_rows": sketch.n_rows, "ridges": list(settings.ridges), "leading": job.certify,
    }  # fmt: skip
    proof = None
    with Stage(run.report, pace.algebra_title, total=1) as stage:
        ridged = sketch.algebra.perform("add_ridge", first.gram, parameters)
        probe = make_probe(run, sketch, first, seed, pace.round)
        sketch = replace(sketch, probe=probe, gram_error=ridged["gram_error"])
        if job.certify:
            seen = draw_apart(run, sketch, first, for_audit) if pace.audit_apart and audit_rows else first
            found = audit(run, sketch, seen, audit_rows, ledger.share, seed, ledger.stream)
            ledger = ledger.after_audit() if audit_rows else ledger
            # What is stated is what all audits together may spend.
            found = replace(found, failure_probability=job.failure_probability if audit_rows else 0.0)
            sketch = replace(sketch, certainty=certainty_of(sketch, found, ridged["score_errors"]))
            proof = _proof(job, sketch, found, first, ridged, weighing)
        summary = _summary(job, sketch, whitened, ridged, first, share) | {"ledger": ledger.to_record()}
        result = LeverageResult(
            run.rows, run.blocks, sketch, first.kept, run.executor, job.plan, summary, ledger, proof
        )  # fmt: skip
        stage.tell(result.dimension_ends[result.column(None)])
    return result, first


def _with_base(run: Run, sketch: NystromSketch, pace: Pace) -> Run:
    """Go on from the sums of an earlier run if they are of the same factor, and record what a later one needs."""
    if run.earlier is not None and not np.array_equal(run.earlier.pivots, sketch.pivots):
        log.warning("the sums of the earlier run belong to another factor of the landmarks: all rows are summed again")
        run = replace(run, earlier=None)
    if run.journal is not None:
        whole, rest = extent(superblocks(run.blocks))
        about = {"round": pace.round, "audit_rows": pace.audit_rows, "superblocks": whole, "blocks": rest}
        run.journal.write_one("base", about | {"indices": sketch.landmarks.indices, "pivots": sketch.pivots})
    return run


def keep_landmarks(run: Run, label: str, landmarks: Landmarks) -> None:
    """Record the landmarks of a round; a run that goes on must have drawn the same.

    Raises
    ------
    CheckFailed
        It has not: what it was killed on rounds otherwise than what it goes on with.
    """
    if run.journal is None:
        return
    known = run.journal.once(label, lambda: {"indices": landmarks.indices, "counts": landmarks.counts})
    if not (np.array_equal(known["indices"], landmarks.indices) and np.array_equal(known["counts"], landmarks.counts)):
        raise CheckFailed(
            "the landmarks that were drawn now are not those of the unfinished run: its workers had another "
            "kind of processor or other versions of libraries. What it had finished is dropped; run it again."
        )


def _proof(
    job: Job, sketch: NystromSketch, found: Audit, first: FirstPass, ridged: dict[str, Any], weighing: Weighing | None
) -> Proof:
    dimensions = tuple(ridged["effective_dimensions"])
    n, target, scheme = sketch.n_rows, job.target, job.scheme
    floors = tuple(job.score_floor or value / n for value in dimensions)
    goal = Goal(floors) if target is None else Goal(floors, target.relative, target.absolute)
    chances: Any = None
    total = float(n)
    fidelity = weighing.fidelity if scheme.replacement and weighing is not None else None
    if scheme.replacement and weighing is not None and fidelity is None:
        chances, total = weighing.handles, weighing.total
    elif scheme.replacement and isinstance(scheme.sampling, str) and scheme.sampling in ("uniform", "diagonal"):
        chances = "uniform"  # by the diagonal too, if that is constant
    return Proof(found, first.totals, dimensions, goal, chances, total, fidelity)


def _summary(
    job: Job,
    sketch: NystromSketch,
    whitened: dict[str, Any],
    ridged: dict[str, Any],
    first: FirstPass,
    share: float,
) -> dict[str, Any]:
    """Every parameter, version and figure of the run, ready for JSON."""
    scheme, single = job.scheme, sketch.single
    return {
        "parameters": {
            "input": job.rows.origin,
            "kernel": unweighted(sketch.kernel).to_spec(),
            "sample_weight": None if job.weights is None else job.weights.origin,
            "ridge": as_given(sketch.ridges, single),
            "n_landmarks": sketch.landmarks.n_draws,
            "sampling": scheme.sampling if isinstance(scheme.sampling, str) else "given",
            "replacement": scheme.replacement,
            "rounds": scheme.rounds,
            "epsilon": scheme.epsilon,
            "certify": job.certify,
            "failure_probability": job.failure_probability,
            "sketch_ridge": job.settings.sketch_ridge,
            "random_state": scheme.seed,
            "dtype": str(sketch.dtype),
            "missing_chunks": job.missing_chunks,
            "block_rows": job.plan.block_rows,
            "tile_rows": tile_rows(sketch.rank),
        },
        "n_rows": job.rows.n_rows,
        "n_features": job.n_features,
        "distinct_landmarks": len(sketch.landmarks.indices),
        "rank": sketch.rank,
        "sketch_dimension": as_given(ridged["effective_dimensions"], single),
        "trace": first.totals.diagonal,
        "residual_sum": first.totals.residual,
        "diagonal_shift": whitened["shift"],
        "smallest_pivot": whitened["smallest_pivot"] if sketch.rank else None,
        "kernel_error": whitened["kernel_error"],
        "score_error": as_given(ridged["score_errors"], single),
        "roundoff_share_of_ridge": share,
        "gram_norm": ridged["gram_norm"],
        "gram_error": ridged["gram_error"],
        "combined_factor": ridged["combined"],
        "algebra": {"place": sketch.algebra.place, "whiten": whitened["where"], "ridge": ridged["where"]},
        "notes": job.notes,
        "workers": job.executor.workers,
        "versions": versions(),
        "seconds": {"pass 1": time.perf_counter() - job.began},
    }


def versions() -> dict[str, str]:
    """Of everything that decides the last bits of a result."""
    modules = {"numpy": np, "scipy": scipy, "dask": dask, "distributed": distributed, "zarr": zarr}
    return {"daskrr": __version__} | {name: module.__version__ for name, module in modules.items()}
