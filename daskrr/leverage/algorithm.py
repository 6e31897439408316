"""The paper's algorithm: choose landmarks → whiten their kernel matrix → pass 1 → ridge → audit.

One round of it is :func:`fit`. :func:`compute` runs one with the landmarks that were asked for, or adds landmarks round
by round until every interval is tight enough. Pass 2 runs when the scores of the result are asked for.
"""

import logging
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from daskrr.errors import CheckFailed
from daskrr.kernels.weighted import Weighted
from daskrr.leverage.problem import Problem
from daskrr.leverage.result import LeverageResult
from daskrr.leverage.summary import round_record, summary_of_round, verdict
from daskrr.numerics.factorize import check_resolution
from daskrr.nystrom.audit import (
    MAX_AUDIT_ROWS,
    Audit,
    BegunAudit,
    audit_draws,
    begin_audit,
    certainty_of,
    draw_apart,
    make_probe,
    probe_draw,
)
from daskrr.nystrom.certificate import Goal, Proof
from daskrr.nystrom.checkpoints import Earlier, recorded_spans
from daskrr.nystrom.drawing import RowWeights, resolve_kernel
from daskrr.nystrom.factors import Ridged, add_probe, add_ridge, scorer
from daskrr.nystrom.first_pass import Chosen, FirstPass, first_pass, whiten
from daskrr.nystrom.growing import first_landmarks, grow, landmark_draw
from daskrr.nystrom.landmarks import Landmarks
from daskrr.nystrom.ledger import Ledger
from daskrr.nystrom.row_weights import with_unit_mean
from daskrr.nystrom.sketch import NystromSketch
from daskrr.nystrom.strategies import FAST_GROWTH, SLOW_GROWTH, Tolerance
from daskrr.runtime.futures import begun
from daskrr.runtime.map_blocks import Run
from daskrr.runtime.progress import Reporter, Stage
from daskrr.runtime.rows import JoinedRows
from daskrr.runtime.scheduler import Algebra, InProcess
from daskrr.runtime.telemetry import note, reporter
from daskrr.storage.journal import Journal

log = logging.getLogger("daskrr")

# If more than this share of the tolerance is owed to the size of the audit, the next one is larger.
AUDIT_SHARE = 0.5
# An interval that is so many times as wide as it may be needs many more landmarks.
FAR = 4.0


@dataclass(frozen=True)
class Round:
    """Where a run stands: its number, how many landmarks come next, the size of the audit and what it may spend.

    ``audit_apart`` says that the rows of the audit are drawn in a pass of their own, since pass 1 sees new rows alone.
    """

    number: int
    audit_rows: int
    ledger: Ledger
    following: int = 0
    n_rounds: int = 1
    audit_apart: bool = False

    @property
    def label(self) -> str:
        """What its sums are recorded under."""
        return f"fit-{self.number}"

    @property
    def title(self) -> str:
        """What the progress bar says."""
        return "pass 1: gram" if self.n_rounds == 1 else f"round {self.number + 1} of at most {self.n_rounds}: gram"

    @property
    def algebra_title(self) -> str:
        """What it says while the Gram matrix is factored and what is left of the kernel is audited."""
        return self.title.removesuffix("gram") + "algebra"


def compute(
    problem: Problem,
    progress: Reporter | bool | None,
    journal: Journal | None = None,
    earlier: Earlier | None = None,
    round: Round | None = None,
) -> LeverageResult:
    """Everything but pass 2; with a journal, what was finished before is not done again.

    Given landmarks may go on from the sums of an earlier run over fewer rows, whose ``round`` they keep.
    """
    problem.begin()
    problem = _checked(problem)
    for line in problem.notes:
        log.warning(line)
    with reporter(progress) as report:
        note(**problem.facts)
        spans = problem.spans(0 if earlier is None else earlier.n_blocks)
        spans = spans if journal is None else recorded_spans(journal, spans)
        run = Run(problem.name, problem.rows, spans, problem.executor, report, journal, earlier)
        kernel = resolve_kernel(run, problem.settings.kernel, problem.seed)
        problem = replace(problem, settings=replace(problem.settings, kernel=kernel))
        if problem.tolerance is not None and round is None:
            return grow_until_tight(problem, run, problem.tolerance)
        chosen, weighing = problem.sampling.choose(run, problem.settings, problem.drawing)
        round = round or Round(number=0, audit_rows=problem.audit_rows, ledger=problem.ledger)
        return fit(problem, run, chosen, weighing, round)[0]


def fit(
    problem: Problem, run: Run, chosen: Chosen, weighing: RowWeights | None, round: Round
) -> tuple[LeverageResult, FirstPass]:
    """One round with the landmarks that were chosen (Algorithm, steps 2 to 5)."""
    settings, certify = problem.settings, problem.certify is not None
    audit_rows = round.audit_rows if certify and round.ledger.share > 0 else 0
    # Whiten: W of the landmarks, and its inverse factor.
    name = f"{run.name}-{round.number}" if problem.tolerance else run.name
    sketch, whitened = whiten(run, name, settings, chosen)
    keep_landmarks(run, f"landmarks-{round.number}", chosen.landmarks)
    # Pass 1: G = BᵀB and residuals of all rows, of which some are drawn.
    run = _with_base(run, sketch, round)
    draws = _draws(problem, round, len(chosen.landmarks.indices), audit_rows)
    first = first_pass(run, sketch, draws, title=round.title, label=round.label)
    with Stage(run.report, round.algebra_title, total=1) as stage:
        # Ridge: the factors of G + n·λ·I.
        step = partial(add_ridge, dtype=settings.dtype, n_rows=sketch.n_rows, ridges=settings.ridges, leading=certify)
        probe = make_probe(run, sketch, first, problem.seed, round.number)
        elsewhere = sketch.algebra.place != InProcess.place
        factored = begun(partial(_factored, sketch.algebra, step, first.gram, probe), in_background=elsewhere)
        left, share = first.leave(), _roundoff_share(problem, sketch, first)
        # Audit: how large K − L can be. It takes as long as the ridge, and not on the scheduler.
        audit = _begun_audit(problem, run, sketch, first, round, audit_rows) if certify else None
        ridged, held = factored.result(), None
        if run.journal is not None and round.n_rounds == 1:
            # Pass 2 follows: what it needs is on its way while the job prepares for it.
            held = begun(partial(run.executor.hold, sketch.algebra.payload(scorer)), in_background=elsewhere)
        sketch = replace(sketch, gram_error=ridged.gram_error)
        proof, ledger = None, round.ledger
        if audit is not None:
            found = audit.outcome(run.executor, ledger.share)
            # All audits together may spend it.
            found = replace(found, failure_probability=problem.failure_probability if audit_rows else 0.0)
            ledger = ledger.after_audit() if audit_rows else ledger
            sketch = replace(sketch, certainty=certainty_of(sketch, found, ridged.score_errors))
            proof = _proof(problem, sketch, found, first, ridged, weighing)
        result = LeverageResult(
            rows=run.rows,
            spans=run.spans,
            sketch=sketch,
            kept=first.kept,
            executor=run.executor,
            plan=problem.plan,
            summary=summary_of_round(problem, sketch, whitened, ridged, first, share) | {"ledger": ledger.to_record()},
            ledger=ledger,
            proof=proof,
            held=held,
        )
        run.executor.settle(left)
        stage.tell(result.dimension_ends[result.column(None)])
    return result, first


def grow_until_tight(problem: Problem, run: Run, tolerance: Tolerance) -> LeverageResult:
    """Add landmarks by residual until every interval is tight enough; each round spends a share of the ledger."""
    sizes, seed, settings = tolerance.sizes(problem.rows.n_rows), problem.seed, problem.settings
    size, most = sizes[0], sizes[-1]
    chosen = first_landmarks(run, settings, size, seed, replacement=False)
    round = Round(number=0, audit_rows=problem.audit_rows, ledger=problem.ledger, n_rounds=len(sizes))
    history: list[dict[str, Any]] = []
    while True:
        round = replace(round, following=_larger(size, FAST_GROWTH, most) - size)
        result, first = fit(problem, run, chosen, None, round)
        history.append(round_record(result, round.number + 1, round.n_rounds, round.ledger.share, problem.began))
        excess = result.excess_among(first) if round.following else 0.0
        larger, wanted = chosen, _larger(size, FAST_GROWTH if excess > FAR else SLOW_GROWTH, most)
        if wanted > size:
            larger = grow(run, settings, chosen, first, wanted - size, seed, round.number + 1)
        if larger is chosen or excess <= 1.0:
            outcome = verdict(tolerance, settings, result.measure(run.report), len(chosen.landmarks.indices))
            if outcome["met"] or larger is chosen:
                break
        chosen, size = larger, wanted
        audit_rows = _next_audit(result, round.audit_rows, tolerance)
        round = replace(round, number=round.number + 1, audit_rows=audit_rows, ledger=result.ledger)
    if not outcome["met"]:
        log.warning(outcome["text"])
    result.summary |= {"rounds": history, "tolerance": outcome}
    return result


def _checked(problem: Problem) -> Problem:
    """The problem, once every worker can read all of its input, with weights of mean 1, if it has any."""
    rows, kernel = problem.rows, problem.settings.kernel
    if not isinstance(rows, JoinedRows) or not isinstance(kernel, Weighted):
        problem.executor.check(rows)
        return problem
    for source in (rows.column, rows.rows):
        problem.executor.check(source)
    rows, kernel = with_unit_mean(rows, kernel)
    return replace(problem, rows=rows, settings=replace(problem.settings, kernel=kernel))


def _draws(problem: Problem, round: Round, n_landmarks: int, audit_rows: int) -> dict[str, Any]:
    """Rows to be drawn during pass 1: for the probe, the audit, and what may be landmarks in the next round."""
    seed = problem.seed
    draws = probe_draw(seed, round.number)
    if not round.audit_apart:
        draws |= audit_draws(seed, round.ledger.stream, audit_rows)
    if round.following:
        larger = n_landmarks + round.following
        draws |= landmark_draw(seed, round.number + 1, round.following, larger, problem.rows.n_rows)
    return draws


def _factored(algebra: Algebra, step: Any, gram: Any, probe: Any) -> Ridged:
    """What is known of the ridge, once all that pass 2 needs is with the factors."""
    ridged = algebra.perform(step, gram)
    algebra.perform(add_probe, probe)
    return ridged


def _roundoff_share(problem: Problem, sketch: NystromSketch, first: FirstPass) -> float:
    """What share of the smallest ridge round-off is; refused where that is too much."""
    mean, settings = first.totals.diagonal / sketch.n_rows, problem.settings
    return check_resolution(
        sketch.kernel_error, mean, settings.smallest, sketch.rank, first.totals.height, settings.dtype
    )  # fmt: skip


def _begun_audit(
    problem: Problem, run: Run, sketch: NystromSketch, first: FirstPass, round: Round, audit_rows: int
) -> BegunAudit:
    """The audit of a round, whose rows may have to be drawn first."""
    stream, seed = round.ledger.stream, problem.seed
    if round.audit_apart and audit_rows:
        first = draw_apart(run, sketch, first, audit_draws(seed, stream, audit_rows))
    return begin_audit(run, sketch, first, audit_rows, seed, stream)


def _proof(
    problem: Problem,
    sketch: NystromSketch,
    audit: Audit,
    first: FirstPass,
    ridged: Ridged,
    weighing: RowWeights | None,
) -> Proof:
    """What the certificate will rest on."""
    dimensions = tuple(ridged.effective_dimensions)
    n, tolerance, sampling = sketch.n_rows, problem.tolerance, problem.sampling
    floor = None if tolerance is None else tolerance.score_floor
    floors = tuple(floor or value / n for value in dimensions)
    goal = Goal(floors) if tolerance is None else Goal(floors, tolerance.relative, tolerance.absolute)
    chances: Any = None
    total = float(n)
    fidelity = None
    if sampling.replacement and weighing is not None:
        fidelity = weighing.fidelity
        if fidelity is None:
            chances, total = weighing.handles, weighing.total
    elif sampling.replacement and sampling.equal_chances:
        chances = "uniform"  # by the diagonal too, if that is constant
    return Proof(audit, first.totals, dimensions, goal, chances, total, fidelity)


def _with_base(run: Run, sketch: NystromSketch, round: Round) -> Run:
    """Go on from the sums of an earlier run if they are of the same factor, and record what a later one needs."""
    if run.earlier is not None and not np.array_equal(run.earlier.pivots, sketch.pivots):
        log.warning("the sums of the earlier run belong to another factor of the landmarks: all rows are summed again")
        run = replace(run, earlier=None)
    if run.journal is not None:
        whole = run.rows.n_rows // run.height
        about = {"round": round.number, "audit_rows": round.audit_rows, "blocks": whole}
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


def _larger(size: int, growth: float, most: int) -> int:
    return min(math.ceil(growth * size), most)


def _next_audit(result: LeverageResult, audit_rows: int, tolerance: Tolerance) -> int:
    """More audit rows where their number, not the landmarks, would keep the next round from its tolerance."""
    share = result.ledger.share
    if not share:
        return audit_rows
    allowed = AUDIT_SHARE * (tolerance.relative or tolerance.absolute or 1.0) * min(result.sketch.shifts)
    needed = result.audit.weight * math.log(1.0 / share) / allowed
    return max(audit_rows, min(int(needed), MAX_AUDIT_ROWS))
