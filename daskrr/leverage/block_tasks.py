"""What is done with the scores of a block where they are, and with what pass 1 has kept of it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.numerics.pass1 import KeptResiduals
from daskrr.numerics.pass2 import ScoredRows
from daskrr.numerics.reservoir import Reservoir
from daskrr.nystrom.certificate import Goal, Widths, widths_of
from daskrr.nystrom.factors import TileFactors
from daskrr.nystrom.reading import Reading, score_drawn_rows
from daskrr.runtime.rows import pieces


def residual_column(start: int, kept: KeptResiduals) -> NDArray[np.float64]:
    """What was kept of a block."""
    return kept.residual[:, None]


def weighted_residual_column(scale: float, weights: Any, start: int, kept: KeptResiduals) -> NDArray[np.float64]:
    """What was kept of a block of weighted rows is as many times as large."""
    weight = scale * np.concatenate([np.asarray(piece, np.float64) for piece in pieces(weights)])
    return (kept.residual / weight)[:, None]


def largest_excess(
    reading: Reading, goal: Goal, column: int, payload: TileFactors, drawn: dict[str, Reservoir]
) -> float:
    """How many times as wide as it may be the widest interval of the rows drawn for the audit is."""
    scored = score_drawn_rows(reading, payload, [drawn["audit"].X])
    return 0.0 if scored.interval is None else float(goal.excess(scored.interval)[:, column].max(initial=0.0))


def side_by_side(names: Sequence[str], scored: ScoredRows, start: int) -> NDArray[np.float64]:
    """What is known of the rows of a block, in columns."""
    return np.hstack([getattr(scored, name) for name in names])


def block_widths(
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
