"""What factors become where a block is: the payload of :class:`daskrr.engine.factors.Factors`, ready for kernels."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.engine.rows import pieces
from daskrr.kernels import Kernel
from daskrr.kernels.weighted import Weighted
from daskrr.numerics.algebra import residual_error
from daskrr.numerics.bounds import Certainty
from daskrr.numerics.gram import Whitener
from daskrr.numerics.score import Leading, Probe, ScoredRows, Scorer, Subset, drawn_rows_block, new_rows_block
from daskrr.numerics.tiles import Columns, Pieces


def columns_of(landmarks: NDArray[np.float64], kernel: Kernel, dtype: np.dtype) -> Columns:
    """The kernel columns of the landmarks."""
    return kernel.columns(landmarks, dtype) if len(landmarks) else _no_columns


def _no_columns(X: NDArray, out: NDArray) -> None:
    """The kernel columns of no landmark at all, which is what is left when the kernel vanishes on all of them."""


def _cast(factor: NDArray[np.float64], dtype: np.dtype) -> NDArray:
    """A factor in the dtype of the tiles; what overflows there is found in the first block."""
    with np.errstate(over="ignore"):
        return factor.astype(dtype, copy=False)


def whitener_of(payload: dict[str, Any], kernel: Kernel, dtype: np.dtype) -> Whitener:
    """What pass 1 applies."""
    return Whitener(
        columns=columns_of(payload["landmarks"], kernel, dtype),
        diagonal=kernel.diagonal,
        inverse=_cast(payload["factors"][0], dtype),
        residual_error=residual_error(payload["n_landmarks"], payload["kernel_error"]),
    )


@dataclass(frozen=True)
class Reading:
    """What pass 2 shall find out: the kernel, the ridges as n·λ, and how certain one may be about the result."""

    kernel: Kernel
    dtype: np.dtype
    shifts: tuple[float, ...]
    certainty: Certainty | None = None
    landmark_rows: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def scorer(self, payload: dict[str, Any], probe: dict[str, Any] | None) -> Scorer:
        """What pass 2 applies."""
        kernel, dtype, shifts = self.kernel, self.dtype, np.array(self.shifts)
        leading, subset = payload.get("leading"), payload.get("subset")
        return Scorer(
            columns=columns_of(payload["landmarks"], kernel, dtype),
            diagonal=kernel.diagonal,
            factors=tuple(_cast(factor, dtype) for factor in payload["factors"]),
            readings=self._readings(payload["eigenvalues"], shifts),
            shifts=shifts,
            residual_error=residual_error(payload["n_landmarks"], payload["kernel_error"]),
            probe=None if probe is None else Probe(
                kernel.columns(probe["X"], dtype), _cast(probe["coefficients"], dtype), probe["rows"],
                probe["weights"], probe["scale"],
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


def score_drawn_rows(reading: Reading, payload: dict[str, Any], parts: Pieces) -> ScoredRows:
    """Everything about rows of the data whose residuals are not at hand."""
    return drawn_rows_block(whitener_of(payload, reading.kernel, reading.dtype), reading.scorer(payload, None), parts)


def new_rows_task(
    reading: Reading,
    then: Callable[..., Any],
    payload: dict[str, Any],
    probe: dict[str, Any] | None,
    source: Any,
    start: int,
) -> Any:
    """What ``then`` makes of the scores that one block of new rows has among the data."""
    whitener = whitener_of(payload, reading.kernel, reading.dtype)
    return then(new_rows_block(whitener, reading.scorer(payload, probe), pieces(source), start), start)


def quantity(name: str, scored: ScoredRows, start: int) -> NDArray[np.float64]:
    """One of the quantities that are known of new rows, with a column for every ridge."""
    return scored.residual[:, None] if name == "residual" else getattr(scored, name)
