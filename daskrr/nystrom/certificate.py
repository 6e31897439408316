"""The certificate of a run: how wide the intervals of all rows are, measured block by block and put into words."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr import theory
from daskrr.numerics.bounds import LOWER_BOUNDS, UPPER_BOUNDS, Certainty, Interval, certify
from daskrr.numerics.factorize import sum_error
from daskrr.numerics.pass1 import Totals
from daskrr.numerics.pass2 import ScoredRows
from daskrr.nystrom.audit import Audit
from daskrr.nystrom.landmarks import ScoreFidelity
from daskrr.nystrom.sketch import NystromSketch

# Widths upper/lower − 1 are counted in bins, whose edges are these; shares of rows are read off with their resolution.
WIDTH_EDGES = np.logspace(-9, 9, 36 * 18 + 1)


@dataclass(frozen=True)
class Goal:
    """How wide an interval may be: upper/lower − 1 where upper reaches the row's floor, or upper − lower.

    A row misses the goal if it misses every tolerance that is given. ``floors`` has one number per ridge.
    """

    floors: tuple[float, ...]
    relative: float | None = None
    absolute: float | None = None

    def excess(self, interval: Interval) -> NDArray[np.float64]:
        """(m, L): how many times as wide as it may be an interval is; 0 where nothing is asked of it."""
        excess = np.full(interval.lower.shape, np.inf if self.relative or self.absolute else 0.0)
        if self.relative is not None:
            high = interval.upper >= np.array(self.floors)
            excess = np.minimum(excess, np.where(high, ratio_of(interval) / self.relative, 0.0))
        if self.absolute is not None:
            excess = np.minimum(excess, (interval.upper - interval.lower) / self.absolute)
        return excess


@dataclass(frozen=True)
class Proof:
    """What a certificate rests on, before all rows have been looked at.

    ``chances`` is what the landmarks were drawn by: ``"uniform"``, handles of weights, or None. ``fidelity`` is what is
    known of draws by upper ends of scores.
    """

    audit: Audit
    totals: Totals
    dimensions: tuple[float, ...]
    goal: Goal
    chances: str | Sequence[Any] | None
    chance_total: float
    fidelity: ScoreFidelity | None = None


def ratio_of(interval: Interval) -> NDArray[np.float64]:
    """upper/lower − 1, infinite above a lower end of 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(interval.upper > interval.lower, interval.upper / interval.lower - 1.0, 0.0)


@dataclass(frozen=True)
class Widths:
    """How wide the intervals of some rows are; arrays (L,) for L ridges unless said otherwise.

    Attributes
    ----------
    upper_wins, lower_wins
        (L, bounds) how often each bound was the tightest.
    lower_sum, upper_sum, lower_max, upper_max
        Of the ends.
    width, exact_width
        Σ (upper − lower), and what it would be without round-off.
    relative
        Largest upper/lower − 1 among the rows whose upper end reaches the floor.
    absolute
        Largest upper − lower.
    misses
        How many rows miss the goal.
    counts
        (L, bins) rows by upper/lower − 1, between WIDTH_EDGES.
    chance
        Smallest p_i/upper_i, with p_i the probability that row i had in a draw; NaN where there was none.
    """

    upper_wins: NDArray[np.int64]
    lower_wins: NDArray[np.int64]
    lower_sum: NDArray[np.float64]
    upper_sum: NDArray[np.float64]
    lower_max: NDArray[np.float64]
    upper_max: NDArray[np.float64]
    width: NDArray[np.float64]
    exact_width: NDArray[np.float64]
    relative: NDArray[np.float64]
    absolute: NDArray[np.float64]
    misses: NDArray[np.int64]
    counts: NDArray[np.int64]
    chance: NDArray[np.float64]

    def __add__(self, other: "Widths") -> "Widths":
        combined = {name: how(getattr(self, name), getattr(other, name)) for name, how in _COMBINE.items()}
        return Widths(**combined)

    def share_below(self, share: float) -> list[float]:
        """For each ridge, a width that this share of the rows does not exceed, to the resolution of the bins."""
        widths = []
        for counts in self.counts:
            position = int(np.searchsorted(np.cumsum(counts), share * counts.sum()))
            widths.append(0.0 if position == 0 else float(np.append(WIDTH_EDGES, np.inf)[position]))
        return widths


_COMBINE: dict[str, Any] = {
    "upper_wins": np.add, "lower_wins": np.add, "lower_sum": np.add, "upper_sum": np.add, "lower_max": np.maximum,
    "upper_max": np.maximum, "width": np.add, "exact_width": np.add, "relative": np.maximum, "absolute": np.maximum,
    "misses": np.add, "counts": np.add, "chance": np.fmin,
}  # fmt: skip


def widths_of(
    scored: ScoredRows,
    shifts: tuple[float, ...],
    certainty: Certainty,
    goal: Goal,
    chances: NDArray[np.float64] | float | None,
) -> Widths:
    """Measure the intervals of some rows, ``chances`` being the probability that each had in a draw, if any."""
    interval, ridges = scored.interval, np.array(shifts)
    if interval is None:
        raise RuntimeError("these rows were scored without certainty")
    lower, upper = interval.lower, interval.upper
    bare = certify(scored.facts, ridges, certainty.without_roundoff(), check=False)
    ratio = ratio_of(interval)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.broadcast_to(np.nan if chances is None else np.asarray(chances), len(lower))[:, None] / upper
    high = upper >= np.array(goal.floors)
    # Of one repeat in units of the mean weight: n times the largest is the maximal number of degrees of freedom.
    weights = np.reshape(scored.relative_weights, (-1, 1))
    return Widths(
        upper_wins=_tally(interval.upper_winner, len(UPPER_BOUNDS)),
        lower_wins=_tally(interval.lower_winner, len(LOWER_BOUNDS)),
        lower_sum=lower.sum(axis=0),
        upper_sum=upper.sum(axis=0),
        lower_max=(lower / weights).max(axis=0, initial=0.0),
        upper_max=(upper / weights).max(axis=0, initial=0.0),
        width=(upper - lower).sum(axis=0),
        exact_width=(bare.upper - bare.lower).sum(axis=0),
        relative=np.where(high, ratio, 0.0).max(axis=0, initial=0.0),
        absolute=(upper - lower).max(axis=0, initial=0.0),
        misses=(goal.excess(interval) > 1.0).sum(axis=0),
        counts=np.stack([_count(column) for column in ratio.T]),
        chance=np.fmin.reduce(np.where(upper > 0, shares, np.nan), axis=0, initial=np.nan),
    )


def _tally(winner: NDArray[np.int8], n_bounds: int) -> NDArray[np.int64]:
    return np.stack([np.bincount(column, minlength=n_bounds) for column in winner.T])


def _count(ratio: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.bincount(np.searchsorted(WIDTH_EDGES, ratio), minlength=len(WIDTH_EDGES) + 1)


@dataclass(frozen=True)
class Certificate:
    """What is certain about the scores of a run, and how wide that leaves the intervals; lists have an entry per ridge.

    Attributes
    ----------
    failure_probability
        With at most this probability some exact score is outside its interval; with a tolerance, of all rounds and
        updates of a job together.
    audit
        How ‖K − L‖ was bounded.
    deviation
        delta/(n·λ): where a row's own residual is small, the interval is about this wide, relatively.
    effective_dimension, max_degrees_of_freedom
        Intervals of Σ l_i and of n·max l_i.
    relative_width
        Largest upper/lower − 1 of the rows whose upper end reaches ``floor``.
    absolute_width
        Largest upper − lower of all rows.
    median_width, most_width
        Of upper/lower − 1: what half and 95 % of the rows do not exceed.
    misses
        Number of rows wider than the tolerance; 0 where none was given.
    upper_wins, lower_wins
        How often each bound was the tightest.
    roundoff_share
        Share of the width that is there for round-off.
    score_fidelity
        How well the probabilities that landmarks were drawn by follow the exact scores, at the ridge that each entry
        names: every ridge of the run, or ridge·epsilon alone with ``sampling="leverage"``; None without probabilities.
    promised_epsilon
        What Theorem 4 would have promised for as many draws before they were made; infinite where nothing.
    """

    ridges: list[float]
    failure_probability: float
    audit: Audit
    deviation: list[float]
    effective_dimension: list[tuple[float, float]]
    max_degrees_of_freedom: list[tuple[float, float]]
    floor: list[float]
    relative_width: list[float]
    absolute_width: list[float]
    median_width: list[float]
    most_width: list[float]
    misses: list[int]
    upper_wins: list[dict[str, int]]
    lower_wins: list[dict[str, int]]
    roundoff_share: list[float]
    score_fidelity: list[ScoreFidelity] | None
    promised_epsilon: list[float]

    def to_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON; what is not finite is None there."""
        return _finite(asdict(self))

    def __str__(self) -> str:
        audit = self.audit
        how = f"{audit.rows:,} audit rows, failure probability {audit.failure_probability:g}" if audit.rows else (
            "no audit: certain, from the trace alone"
        )  # fmt: skip
        lines = [f"certificate: {how}" + ("; the landmarks explain every row" if audit.exact else "")]
        lines.append(f"{'ridge':>10}  {'effective dimension':>24}  {'delta/nλ':>9}  {'median':>8}  {'95 %':>8}  widest")
        for i, ridge in enumerate(self.ridges):
            low, high = self.effective_dimension[i]
            lines.append(
                f"{ridge:>10.3g}  {f'[{low:.6g}, {high:.6g}]':>24}  {self.deviation[i]:>9.2g}  "
                f"{self.median_width[i]:>8.2g}  {self.most_width[i]:>8.2g}  {self.relative_width[i]:.2g}"
            )
        lines.append("(widths are upper/lower − 1; the widest is among rows whose upper end reaches the floor)")
        lines += map(str, self.score_fidelity or [])
        return "\n".join(lines)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def dimension_bounds(sketch: NystromSketch, audit: Audit, dimensions: Sequence[float]) -> list[tuple[float, float]]:
    """What the exact effective dimension at every ridge lies between, by the trace of E alone."""
    if sketch.certainty is None:
        raise RuntimeError("this sketch was fitted without an audit")
    return [
        dimension_interval(audit, sketch.n_rows, *figures)
        for figures in zip(sketch.shifts, sketch.certainty.score_errors, dimensions, strict=True)
    ]


def least_dimension(noise: float, n_rows: int, shift: float, error: float, dimension: float) -> float:
    """What the exact effective dimension at one n·λ is not below: the sketch's, less round-off (L ⪯ K + noise·I)."""
    return max(float(dimension * (1.0 - error) - n_rows * noise / (noise + shift)), 0.0)


def dimension_interval(found: Audit, n_rows: int, shift: float, error: float, dimension: float) -> tuple[float, float]:
    """The same at one n·λ, the sketch's dimension there being known up to a relative error."""
    low = least_dimension(found.noise, n_rows, shift, error, dimension)
    high = dimension * (1.0 + error) + found.weight / (shift + found.weight / n_rows)
    return low, min(float(high), float(n_rows))


def summarize(
    sketch: NystromSketch,
    audit: Audit,
    dimensions: Sequence[float],
    totals: Totals,
    widths: Widths,
    goal: Goal,
    fidelity: ScoreFidelity | None = None,
) -> Certificate:
    """Put an audit and the widths of all rows together, with the fidelity of the draws where that is known already."""
    if sketch.certainty is None:
        raise RuntimeError("this sketch was fitted without an audit")
    n, shifts = sketch.n_rows, sketch.shifts
    slack = sum_error(1.0, n)
    intervals = [
        (max(low, float(least) * (1.0 - slack)), min(high, float(most) * (1.0 + slack)))
        for (low, high), least, most in zip(
            dimension_bounds(sketch, audit, dimensions), widths.lower_sum, widths.upper_sum, strict=True
        )
    ]
    return Certificate(
        ridges=list(sketch.ridges),
        failure_probability=audit.failure_probability,
        audit=audit,
        deviation=[audit.delta / shift for shift in shifts],
        effective_dimension=intervals,
        max_degrees_of_freedom=[
            (n * float(low), n * float(high)) for low, high in zip(widths.lower_max, widths.upper_max, strict=True)
        ],
        floor=list(goal.floors),
        relative_width=widths.relative.tolist(),
        absolute_width=widths.absolute.tolist(),
        median_width=widths.share_below(0.5),
        most_width=widths.share_below(0.95),
        misses=widths.misses.tolist(),
        upper_wins=[dict(zip(UPPER_BOUNDS, row.tolist(), strict=True)) for row in widths.upper_wins],
        lower_wins=[dict(zip(LOWER_BOUNDS, row.tolist(), strict=True)) for row in widths.lower_wins],
        roundoff_share=[
            float(max(0.0, 1.0 - bare / whole)) if whole > 0 else 0.0
            for bare, whole in zip(widths.exact_width, widths.width, strict=True)
        ],
        score_fidelity=_fidelities(sketch, audit, widths, intervals) if fidelity is None else [fidelity],
        promised_epsilon=[
            _promised(sketch, totals.diagonal, ridge, audit.failure_probability) for ridge in sketch.ridges
        ],
    )


def _fidelities(
    sketch: NystromSketch, audit: Audit, widths: Widths, dimensions: Sequence[tuple[float, float]]
) -> list[ScoreFidelity] | None:
    """At every ridge, by the smallest p_i/upper_i; None where there are no probabilities."""
    if np.isnan(widths.chance).any():
        return None
    return [
        ScoreFidelity(
            ridge=ridge, beta=min(chance * low, 1.0), inflated_dimension=1.0 / chance if chance else math.inf,
            draws=sketch.landmarks.n_draws, failure_probability=audit.failure_probability,
        )
        for ridge, chance, (low, _) in zip(sketch.ridges, widths.chance.tolist(), dimensions, strict=True)
    ]  # fmt: skip


def _promised(sketch: NystromSketch, trace: float, ridge: float, failure_probability: float) -> float:
    """ε of Theorem 4 for as many draws by the diagonal, at a failure probability of at least a billionth."""
    if not trace > 0:
        return math.inf
    return theory.score_accuracy(
        trace=trace, n_rows=sketch.n_rows, ridge=ridge, n_landmarks=sketch.landmarks.n_draws,
        failure_probability=max(failure_probability, 1e-9),
    ).epsilon  # fmt: skip
