"""Landmarks added round by round until every interval is tight enough."""

import logging
import math
import time
from dataclasses import replace
from typing import Any

from daskrr.arguments import FAST_GROWTH, SLOW_GROWTH, Job, Target
from daskrr.engine.passes import Run
from daskrr.fitting import Pace, fit
from daskrr.nystrom.audit import MAX_AUDIT_ROWS
from daskrr.nystrom.certificates import Certificate
from daskrr.nystrom.pass1 import Settings
from daskrr.nystrom.rounds import first_landmarks, grow
from daskrr.result import LeverageResult

log = logging.getLogger("daskrr")

# If more than this share of the tolerance is owed to the size of the audit, the next one is larger.
AUDIT_SHARE = 0.5
# An interval that is so many times as wide as it may be needs many more landmarks.
FAR = 4.0


def grow_until_tight(job: Job, run: Run, settings: Settings, target: Target) -> LeverageResult:
    """Add landmarks by residual until every interval is tight enough; each round spends a share of the ledger."""
    most, n_rounds = target.sizes[-1], len(target.sizes)
    chosen, size = first_landmarks(run, settings, target.sizes[0], job.scheme.seed, replacement=False), target.sizes[0]
    pace = Pace(round=0, following=0, audit_rows=job.scheme.audit_rows, ledger=job.ledger, n_rounds=n_rounds)
    history: list[dict[str, Any]] = []
    while True:
        pace = replace(pace, following=_larger(size, FAST_GROWTH, most) - size)
        result, first = fit(job, run, settings, chosen, None, pace)
        history.append(_log_round(job, result, pace))
        excess = result.excess_among(first) if pace.following else 0.0
        larger, wanted = chosen, _larger(size, FAST_GROWTH if excess > FAR else SLOW_GROWTH, most)
        if wanted > size:
            larger = grow(run, settings, chosen, first, wanted - size, job.scheme.seed, pace.round + 1)
        if larger is chosen or excess <= 1.0:
            found = verdict(target, settings, result.measure(run.report), len(chosen.landmarks.indices))
            if found["met"] or larger is chosen:
                break
        chosen, size = larger, wanted
        audit_rows = _next_audit(result, pace.audit_rows, target)
        pace = replace(pace, round=pace.round + 1, audit_rows=audit_rows, ledger=result.ledger)
    if not found["met"]:
        log.warning(found["text"])
    result.summary |= {"rounds": history, "tolerance": found}
    return result


def _larger(size: int, growth: float, most: int) -> int:
    return min(math.ceil(growth * size), most)


def _log_round(job: Job, result: LeverageResult, pace: Pace) -> dict[str, Any]:
    """Tell where a round stands, by what pass 1 and the audit know."""
    decides = result.sketch.ridges.index(min(result.sketch.ridges))
    deviation = result.audit.delta / result.sketch.shifts[decides]
    low, high = result.effective_dimension_bounds[decides]
    seconds = time.perf_counter() - job.began
    p = len(result.sketch.landmarks.indices)
    log.info(
        "round %d of at most %d: p = %d, delta/nλ = %.3g, effective dimension in [%.6g, %.6g], %d audit rows, %.1f s",
        pace.round + 1, pace.n_rounds, p, deviation, low, high, result.audit.rows, seconds,
    )  # fmt: skip
    return {
        "landmarks": p,
        "deviation": deviation,
        "effective_dimension": [low, high],
        "audit_rows": result.audit.rows,
        "failure_probability": pace.ledger.share,
        "seconds": seconds,
    }


def verdict(
    target: Target, settings: Settings, certificate: Certificate, p: int, met_when_drawn: bool | None = None
) -> dict[str, Any]:
    """Whether the tolerance is met at the smallest ridge by p landmarks, and what to say if not.

    ``met_when_drawn`` tells of landmarks that are kept whether it was met by them at first; if not, there is a limit.
    """
    decides = settings.ridges.index(settings.smallest)
    misses = certificate.misses[decides]
    relative, absolute = certificate.relative_width[decides], certificate.absolute_width[decides]
    forms = (("upper/lower − 1", target.relative), ("upper − lower", target.absolute))
    asked = " or ".join(f"{form} ≤ {value}" for form, value in forms if value is not None)
    if misses:
        text = (
            f"stopped at {p} landmarks with {misses} rows wider than asked ({asked}); the widest interval has "
            f"upper/lower − 1 = {relative:.3g}, upper − lower = {absolute:.3g}. Raise max_landmarks, the ridge or the "
            "tolerance."
        )
    else:
        text = f"every row that the tolerance is about meets {asked}, with {p} landmarks."
    return {
        "met": not misses,
        "met_when_drawn": not misses if met_when_drawn is None else met_when_drawn,
        "relative": target.relative,
        "absolute": target.absolute,
        "relative_width": relative if math.isfinite(relative) else None,
        "absolute_width": absolute,
        "misses": misses,
        "text": text,
    }


def _next_audit(result: LeverageResult, audit_rows: int, target: Target) -> int:
    """More audit rows where their number, not the landmarks, would keep the next round from its tolerance."""
    share = result.ledger.share
    if not share:
        return audit_rows
    allowed = AUDIT_SHARE * (target.relative or target.absolute or 1.0) * min(result.sketch.shifts)
    needed = result.audit.weight * math.log(1.0 / share) / allowed
    return max(audit_rows, min(int(needed), MAX_AUDIT_ROWS))
