"""Choosing a ridge and a number of landmarks by a pilot: the exact spectrum of a small sample of the rows."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.errors import InvalidData
from daskrr.kernels import Kernel
from daskrr.nystrom import landmarks as draws
from daskrr.nystrom.drawing import fetch_rows
from daskrr.runtime.blocks import block_rows
from daskrr.runtime.map_blocks import Run
from daskrr.runtime.rows import Rows

PILOT_ROWS, SEED = 2000, 0
# The effective dimension that a ridge is chosen for at most, and landmarks for each of it.
MOST_DIMENSIONS, LANDMARKS_EACH, FEWEST_LANDMARKS, MOST_LANDMARKS = 100, 5, 50, 2000
CRITERION = (
    "the largest ridge at which the effective dimension of a pilot sample reaches the square root of the "
    f"number of rows, {MOST_DIMENSIONS} at most; {LANDMARKS_EACH} landmarks for each of it"
)
BY_LEAVE_ONE_OUT = (
    "the ridge whose leave-one-out error of the response is the least on a pilot sample; "
    f"{LANDMARKS_EACH} landmarks for each effective dimension, {MOST_LANDMARKS} at most"
)
# Ridges are told from the kernel's mean diagonal down to what float64 resolves.
LARGEST, SMALLEST, RIDGES = 10.0, 1e-9, 51


@dataclass(frozen=True)
class Outlook:
    """What a ridge makes of the data, by the pilot."""

    ridge: float
    effective_dimension: float
    landmarks: int


@dataclass(frozen=True)
class Pilot:
    """The spectrum of the kernel matrix of a sample, over its size, and how many rows there are in all.

    ``loo_ridge`` is the ridge with the least leave-one-out error, where there is a target.
    """

    kernel: Kernel
    eigenvalues: NDArray[np.float64]
    n_rows: int
    loo_ridge: float | None = None

    @property
    def target(self) -> float:
        """The effective dimension that a ridge is chosen for."""
        return min(float(MOST_DIMENSIONS), math.sqrt(self.n_rows))

    def outlook(self, ridge: float) -> Outlook:
        """At a ridge."""
        dimension = float(np.sum(self.eigenvalues / (self.eigenvalues + ridge)))
        wanted = max(FEWEST_LANDMARKS, LANDMARKS_EACH * dimension)
        return Outlook(ridge, dimension, min(self.n_rows, MOST_LANDMARKS, _rounded_up(wanted)))

    def choice(self) -> Outlook:
        """The ridge by :data:`CRITERION`, or by :data:`BY_LEAVE_ONE_OUT`."""
        if self.loo_ridge is not None:
            return self.outlook(self.loo_ridge)
        scale = float(self.eigenvalues.sum())
        low, high = math.log10(SMALLEST * scale), math.log10(LARGEST * scale)
        for _ in range(60):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if self.outlook(10**middle).effective_dimension >= self.target else (low, middle)
        return self.outlook(float(f"{10**low:.1e}"))

    def outlooks(self) -> list[Outlook]:
        """At the chosen ridge, and at ten times and a tenth of it."""
        chosen = self.choice().ridge
        return [self.outlook(float(f"{times * chosen:.1e}")) for times in (10.0, 1.0, 0.1)]

    def to_record(self) -> dict[str, Any]:
        """The choice, ready for JSON."""
        return asdict(self.choice()) | {
            "kernel": self.kernel.to_spec(),
            "pilot_rows": len(self.eigenvalues),
            "n_rows": self.n_rows,
            "criterion": CRITERION if self.loo_ridge is None else BY_LEAVE_ONE_OUT,
        }


def pilot(rows: Rows, kernel: Kernel, targets: Rows | None = None) -> Pilot:
    """Look at a sample of the rows, always the same, and at their targets (n,); a median distance is measured on it.

    Raises
    ------
    InvalidData
        The rows are all the same to the kernel.
    """
    run = Run.over(rows, block_rows(FEWEST_LANDMARKS, rows))
    size = min(PILOT_ROWS, rows.n_rows)
    indices = np.sort(draws.stream(SEED, "pilot").choice(rows.n_rows, size, replace=False, shuffle=False))
    X = run.executor.value(fetch_rows(run, indices, "pilot"))
    resolved = kernel.resolve(X) if kernel.needs_sample else kernel
    K = resolved(X, X)
    eigenvalues, vectors = np.linalg.eigh(0.5 * (K + K.T))
    eigenvalues = np.maximum(eigenvalues, 0.0) / size
    if not np.isfinite(eigenvalues).all() or eigenvalues.sum() <= 0.0:
        raise InvalidData("the kernel is 0 on all rows of a pilot sample, so that no ridge can be chosen: give one")
    if targets is None:
        return Pilot(resolved, eigenvalues, rows.n_rows)
    beside = Run.over(targets, run.height)
    y = beside.executor.value(fetch_rows(beside, indices, "pilot-targets"))
    return Pilot(resolved, eigenvalues, rows.n_rows, least_loo(eigenvalues, vectors, y))


def least_loo(eigenvalues: NDArray[np.float64], vectors: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """The ridge, with two digits, whose leave-one-out error is the least, of targets about their mean.

    The kernel matrix over its size has these eigenvalues; a row that is left out is one of the same kernel matrix.
    """
    scale, centred = float(eigenvalues.sum()), y - y.mean()
    turned = vectors.T @ centred
    ridges = [float(f"{scale * one:.1e}") for one in np.geomspace(SMALLEST, LARGEST, RIDGES)]
    errors = []
    for ridge in ridges:
        shrunk = eigenvalues / (eigenvalues + ridge)
        residual = centred - vectors @ (shrunk * turned)
        errors.append(float(np.mean((residual / (1.0 - (vectors**2) @ shrunk)) ** 2)))
    return ridges[int(np.argmin(errors))]


def _rounded_up(number: float) -> int:
    """To two digits."""
    step = 10 ** max(0, math.floor(math.log10(number)) - 1)
    return math.ceil(number / step) * step
