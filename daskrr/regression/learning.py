"""Length scales that are learned from targets, on a sample of the rows."""

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.errors import InvalidParameter
from daskrr.kernels import Kernel
from daskrr.kernels.distance import DistanceKernel
from daskrr.kernels.weighted import Weighted, unweighted
from daskrr.numerics.evidence import LearnedScales, learn_scales
from daskrr.nystrom.drawing import fetch_rows, resolve_kernel
from daskrr.nystrom.landmarks import stream
from daskrr.regression.fitting import WeightedRows
from daskrr.runtime.map_blocks import Run

log = logging.getLogger("daskrr")

# A dense matrix of so many rows is factorised at every step.
LEARNING_SAMPLE = 2000


def stand_in(kernel: Kernel) -> Kernel:
    """A kernel that costs as much as one that is to be learned.

    Raises
    ------
    InvalidParameter
        It is a part of another kernel.
    """
    inside = unweighted(kernel)
    if not isinstance(inside, DistanceKernel):
        raise InvalidParameter(
            f"length_scale='learn' is for a kernel by itself, not inside {inside!r}. Learn it alone, and combine the "
            "kernel_ of the fitted model."
        )
    measured = inside.set_params(length_scale="median")
    return replace(kernel, part=measured) if isinstance(kernel, Weighted) else measured


def resolve_with_targets(run: Run, kernel: Kernel, data: WeightedRows, seed: int) -> Kernel:
    """Learn or measure the length scales of a kernel of these rows on a seeded sample."""
    if not kernel.needs_targets:
        return resolve_kernel(run, kernel, seed)
    n_rows, generator = run.rows.n_rows, stream(seed, "length scale")
    indices = np.sort(generator.choice(n_rows, min(LEARNING_SAMPLE, n_rows), replace=False, shuffle=False))
    rows = fetch_rows(run, indices, "sample-to-learn-from")
    targets = fetch_rows(replace(run, rows=data.targets), indices, "sample-targets-to-learn-from", "y")
    inside: Any = unweighted(kernel)
    work = partial(_learn, inside, data.weighted)
    found: LearnedScales = run.executor.value(run.executor.apply("learn-length-scales", work, rows, targets))
    scales = ", ".join(f"{one:.3g}" for one in found.scales)
    log.info("length scales learned on %d rows: %s; noise %.3g", len(indices), scales, found.noise)
    return data.kernel(replace(inside, length_scale=found.scales))


def _learn(
    kernel: DistanceKernel, weighted: bool, rows: NDArray[np.float64], targets: NDArray[np.float64]
) -> LearnedScales:
    Y = targets.reshape(len(targets), -1)
    return learn_scales(kernel, rows[:, :-1], Y, rows[:, -1] ** 2) if weighted else learn_scales(kernel, rows, Y)
