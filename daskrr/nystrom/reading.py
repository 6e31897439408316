"""The tasks of both passes: what :class:`daskrr.nystrom.factors.TileFactors` become and do where a block is."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.kernels import Kernel
from daskrr.kernels.device import Companions
from daskrr.kernels.weighted import Weighted
from daskrr.numerics.bounds import Certainty
from daskrr.numerics.factorize import residual_error
from daskrr.numerics.pass1 import BlockSums, Draw, GramPart, GramSum, KeptResiduals, Whitener, gram_block
from daskrr.numerics.pass2 import (
    Leading,
    Probe,
    ScoredRows,
    Scorer,
    Subset,
    drawn_rows_block,
    new_rows_block,
    score_block,
)
from daskrr.numerics.tiles import Columns, Pieces
from daskrr.nystrom.factors import TileFactors
from daskrr.runtime import telemetry
from daskrr.runtime.rows import pieces

# What tasks make of factors that stay with their worker, once for all of them.
_MADE = Companions()


def columns_of(landmarks: NDArray[np.float64], kernel: Kernel, dtype: np.dtype) -> Columns:
    """The kernel columns of the landmarks."""
    if not len(landmarks):
        return _no_columns
    return _MADE.of(landmarks, (kernel, dtype), lambda: kernel.columns(landmarks, dtype))


def _no_columns(X: NDArray, out: NDArray) -> None:
    """The kernel columns of no landmark at all, which is what is left when the kernel vanishes on all of them."""


def _cast(factor: NDArray[np.float64], dtype: np.dtype) -> NDArray:
    """A factor in the dtype of the tiles; what overflows there is found in the first block."""
    if factor.dtype == dtype:
        return factor
    with np.errstate(over="ignore"):
        return _MADE.of(factor, dtype, lambda: factor.astype(dtype))


def whitener_of(payload: TileFactors, kernel: Kernel, dtype: np.dtype) -> Whitener:
    """What pass 1 applies."""
    return Whitener(
        columns=columns_of(payload.landmarks, kernel, dtype),
        diagonal=kernel.diagonal,
        inverse=_cast(payload.factors[0], dtype),
        residual_error=residual_error(payload.n_landmarks, payload.kernel_error),
    )


@dataclass(frozen=True)
class Reading:
    """What pass 2 shall find out: the kernel, the ridges as n·λ, and how certain one may be about the result."""

    kernel: Kernel
    dtype: np.dtype
    shifts: tuple[float, ...]
    certainty: Certainty | None = None
    landmark_rows: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def scorer(self, payload: TileFactors) -> Scorer:
        """What pass 2 applies."""
        kernel, dtype, shifts = self.kernel, self.dtype, np.array(self.shifts)
        leading, subset, probe = payload.leading, payload.subset, payload.probe
        return Scorer(
            columns=columns_of(payload.landmarks, kernel, dtype),
            diagonal=kernel.diagonal,
            factors=tuple(_cast(factor, dtype) for factor in payload.factors),
            readings=self._readings(payload.eigenvalues, shifts),
            shifts=shifts,
            residual_error=residual_error(payload.n_landmarks, payload.kernel_error),
            probe=None if probe is None else Probe(
                columns=columns_of(probe.X, kernel, dtype),
                coefficients=_cast(probe.coefficients, dtype),
                rows=probe.rows,
                inverse_weights=_MADE.of(probe.weights, "inverse", lambda: 1.0 / probe.weights),
                scale=probe.scale,
            ),
            leading=None if leading is None else Leading(_cast(leading[0], dtype), *leading[1:]),
            subset=Subset(tuple(_cast(one, dtype) for one in subset), self.landmark_rows) if subset else None,
            certainty=self.certainty,
            repeats=kernel.repeats if isinstance(kernel, Weighted) else None,
            residual_unit=kernel.scale if isinstance(kernel, Weighted) else 1.0,
        )  # fmt: skip

    def _readings(self, eigenvalues: NDArray[np.float64] | None, shifts: NDArray[np.float64]) -> NDArray | None:
        """By what the squares of a row's coordinates are multiplied: l̃, and what the bounds need besides."""
        if eigenvalues is None:
            return None
        S = eigenvalues[:, None]
        columns = [1.0 / (S + shifts)]
        if self.certainty is not None:
            columns += [S / (S + shifts) ** 2, 1.0 / (S + shifts + self.certainty.delta)]
        return _cast(np.hstack(columns), self.dtype)


def score_drawn_rows(reading: Reading, payload: TileFactors, parts: Pieces) -> ScoredRows:
    """Everything about rows of the data whose residuals are not at hand."""
    return drawn_rows_block(whitener_of(payload, reading.kernel, reading.dtype), reading.scorer(payload), parts)


def new_rows_task(
    reading: Reading,
    then: Callable[..., Any],
    payload: TileFactors,
    source: Any,
    start: int,
) -> Any:
    """What ``then`` makes of the scores that one block of new rows has among the data."""
    whitener = whitener_of(payload, reading.kernel, reading.dtype)
    return then(new_rows_block(whitener, reading.scorer(payload), pieces(source), start), start)


def quantity(name: str, scored: ScoredRows, start: int) -> NDArray[np.float64]:
    """One of the quantities that are known of new rows, with a column for every ridge."""
    return scored.residual[:, None] if name == "residual" else getattr(scored, name)


# Makes what is summed of a block where it is, of the factor of W, the block's first row and what else it is given.
BeginSums = Callable[..., BlockSums]


def plain_sums(payload: TileFactors, start: int) -> GramSum:
    """The Gram matrix alone."""
    return GramSum(len(payload.factors[0]))


def gram_task(
    run: str,
    kernel: Kernel,
    dtype: np.dtype,
    draws: dict[str, Draw],
    begin: BeginSums | None,
    payload: TileFactors,
    source: Any,
    start: int,
    *more: Any,
) -> GramPart:
    """Pass 1 on one block; ``more`` is what its sums need besides."""
    sums = None if begin is None else begin(payload, start, *more)
    part = gram_block(whitener_of(payload, kernel, dtype), pieces(source), start, draws, sums)
    (kept,) = part.kept
    mean = part.totals.diagonal / max(1, len(kept.residual))
    telemetry.count("residual", run, start, kept.residual / (mean or 1.0), dtype)
    return part


def score_task(
    run: str,
    reading: Reading,
    then: Callable[..., Any],
    payload: TileFactors,
    source: Any,
    start: int,
    kept: KeptResiduals,
    *more: Any,
) -> Any:
    """What ``then`` makes of pass 2 on one block."""
    scored = score_block(reading.scorer(payload), pieces(source), start, kept)
    smallest = reading.shifts.index(min(reading.shifts))
    telemetry.count("score", run, start, scored.scores[:, smallest], reading.dtype)
    return then(scored, start, *more)
