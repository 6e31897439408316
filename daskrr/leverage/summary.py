"""What is told of a run: every parameter, version and figure, ready for JSON, and whether a tolerance was met."""

import logging
import math
import time
from typing import Any

import dask
import distributed
import numpy as np
import scipy
import zarr

from daskrr import __version__
from daskrr.kernels.weighted import unweighted
from daskrr.leverage.problem import Problem
from daskrr.leverage.result import LeverageResult
from daskrr.leverage.writing import as_given
from daskrr.nystrom.certificate import Certificate
from daskrr.nystrom.factors import Ridged, Whitened
from daskrr.nystrom.first_pass import FirstPass, Settings
from daskrr.nystrom.sketch import NystromSketch
from daskrr.nystrom.strategies import Tolerance

log = logging.getLogger("daskrr")


def summary_of_round(
    problem: Problem,
    sketch: NystromSketch,
    whitened: Whitened,
    ridged: Ridged,
    first: FirstPass,
    share: float,
) -> dict[str, Any]:
    """Every parameter, version and figure of a run."""
    single = sketch.single
    return {
        "parameters": _parameters(problem, sketch),
        "n_rows": problem.rows.n_rows,
        "n_features": problem.n_features,
        "features": problem.rows.features and problem.rows.features.to_attributes(),
        "distinct_landmarks": len(sketch.landmarks.indices),
        "rank": sketch.rank,
        "sketch_dimension": as_given(ridged.effective_dimensions, single),
        "ceiling": as_given(sketch.ceilings, single) if sketch.ceilings else None,
        "trace": first.totals.diagonal,
        "residual_sum": first.totals.residual,
        "diagonal_shift": whitened.shift,
        "smallest_pivot": whitened.smallest_pivot if sketch.rank else None,
        "kernel_error": whitened.kernel_error,
        "score_error": as_given(ridged.score_errors, single),
        "roundoff_share_of_ridge": share,
        "gram_norm": ridged.gram_norm,
        "gram_error": ridged.gram_error,
        "combined_factor": ridged.combined,
        "algebra": {
            "place": sketch.algebra.place,
            "whiten": sketch.algebra.steps["whiten"],
            "ridge": sketch.algebra.steps["add_ridge"],
        },
        "notes": problem.notes,
        "workers": problem.executor.workers,
        "versions": versions(),
        "seconds": {"pass 1": time.perf_counter() - problem.began},
    }


def _parameters(problem: Problem, sketch: NystromSketch) -> dict[str, Any]:
    sampling = problem.sampling
    given = {name: value for name, value in vars(sampling).items() if name != "values"}
    return {
        "input": problem.rows.origin,
        "kernel": unweighted(sketch.kernel).to_spec(),
        "sample_weight": None if problem.weights is None else problem.weights.origin,
        "ridge": as_given(sketch.ridges, sketch.single),
        "n_landmarks": sketch.landmarks.n_draws,
        "sampling": sampling.name,
        **given,
        "certify": problem.certify is not None,
        "failure_probability": problem.failure_probability,
        "random_state": problem.seed,
        "dtype": str(sketch.dtype),
        "device": problem.executor.device.name,
        "missing_chunks": problem.missing_chunks,
        "block_rows": problem.plan.block_rows,
        "tile_rows": problem.plan.tile_rows,
    }


def versions() -> dict[str, str]:
    """Of everything that decides the last bits of a result."""
    modules = {"numpy": np, "scipy": scipy, "dask": dask, "distributed": distributed, "zarr": zarr}
    return {"daskrr": __version__} | {name: module.__version__ for name, module in modules.items()}


def round_record(result: LeverageResult, number: int, n_rounds: int, share: float, began: float) -> dict[str, Any]:
    """Where a round stands, by what pass 1 and the audit know; it is logged too."""
    decides = result.sketch.ridges.index(min(result.sketch.ridges))
    deviation = result.audit.delta / result.sketch.shifts[decides]
    low, high = result.effective_dimension_bounds[decides]
    seconds = time.perf_counter() - began
    p = len(result.sketch.landmarks.indices)
    log.info(
        "round %d of at most %d: p = %d, delta/nλ = %.3g, effective dimension in [%.6g, %.6g], %d audit rows, %.1f s",
        number, n_rounds, p, deviation, low, high, result.audit.rows, seconds,
    )  # fmt: skip
    return {
        "landmarks": p,
        "deviation": deviation,
        "effective_dimension": [low, high],
        "audit_rows": result.audit.rows,
        "failure_probability": share,
        "seconds": seconds,
    }


def verdict(
    tolerance: Tolerance, settings: Settings, certificate: Certificate, p: int, met_when_drawn: bool | None = None
) -> dict[str, Any]:
    """Whether the tolerance is met at the smallest ridge by p landmarks, and what to say if not.

    ``met_when_drawn`` tells of landmarks that are kept whether it was met by them at first; if not, there is a limit.
    """
    decides = settings.ridges.index(settings.smallest)
    misses = certificate.misses[decides]
    relative, absolute = certificate.relative_width[decides], certificate.absolute_width[decides]
    forms = (("upper/lower − 1", tolerance.relative), ("upper − lower", tolerance.absolute))
    asked = " or ".join(f"{form} ≤ {value}" for form, value in forms if value is not None)
    if misses:
        text = (
            f"stopped at {p} landmarks with {misses} rows wider than asked ({asked}); the widest interval has "
            f"upper/lower − 1 = {relative:.3g}, upper − lower = {absolute:.3g}. Raise the most landmarks there may be "
            "(most, --max-landmarks), the ridge or the tolerance."
        )
    else:
        text = f"every row that the tolerance is about meets {asked}, with {p} landmarks."
    return {
        "met": not misses,
        "met_when_drawn": not misses if met_when_drawn is None else met_when_drawn,
        "relative": tolerance.relative,
        "absolute": tolerance.absolute,
        "relative_width": relative if math.isfinite(relative) else None,
        "absolute_width": absolute,
        "misses": misses,
        "text": text,
    }
