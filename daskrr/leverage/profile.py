"""What pictures and reports show of any number of rows: small tables that every block makes, and that add up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.leverage.ranking import AT_CEILING, CERTIFIED, PLAIN, TOP, TopRows, merge_top
from daskrr.numerics.pass2 import ScoredRows
from daskrr.runtime.rows import pieces

# Scores are told apart by 1.2 % of their value, down to 1e-14; the first class holds whatever is smaller, zero too.
PER_DECADE = 200
DECADES = 14
CLASSES = PER_DECADE * DECADES
EDGES = 10.0 ** ((np.arange(CLASSES + 1) - CLASSES) / PER_DECADE)
# Estimates that lie as many classes apart, 12 %, with none between, are drawn as a cliff.
CLIFF = 10
# As many eigenvalues are recorded of any number.
MOST_EIGENVALUES = 200


@dataclass(frozen=True)
class Profile:
    """How large scores and interval ends are, and how they lie about the estimate.

    Attributes
    ----------
    counts
        Of every quantity, (classes,) how many rows have it in a class; EDGES are their ends.
    sums
        Of every quantity, (classes,) the sum over the rows whose *estimate* is in a class.
    lowest, highest
        (classes,) extremes of lower and upper ends of the same rows; of the estimate where nothing is certified.
    top
        The rows of highest estimate.
    """

    counts: dict[str, NDArray[np.int64]]
    sums: dict[str, NDArray[np.float64]]
    lowest: NDArray[np.float64]
    highest: NDArray[np.float64]
    top: TopRows

    def __add__(self, other: "Profile") -> "Profile":
        return Profile(
            {name: mine + other.counts[name] for name, mine in self.counts.items()},
            {name: mine + other.sums[name] for name, mine in self.sums.items()},
            np.minimum(self.lowest, other.lowest),
            np.maximum(self.highest, other.highest),
            merge_top([self.top, other.top], TOP),
        )

    def below(self, ceilings: Any, column: int) -> "Profile":
        """The same, with one of several ceilings of the scores, if there are any."""
        return replace(self, top=self.top.below(ceilings, column))

    @property
    def n_rows(self) -> int:
        """How many rows there are."""
        return int(self.counts["estimate"].sum())

    @property
    def at_ceiling(self) -> tuple[int, float] | None:
        """How many estimates are as good as at their ceiling, and what they are above; None where it is not known."""
        if self.top.ceiling is None:
            return None
        first = int(class_of(np.array([AT_CEILING * self.top.ceiling]))[0])
        return int(self.counts["estimate"][first:].sum()), float(EDGES[first])

    def quantiles(self, name: str, levels: Sequence[float]) -> list[float]:
        """Upper ends of the classes that the quantiles of a quantity are in."""
        counts = np.cumsum(self.counts[name])
        places = np.searchsorted(counts, np.maximum(np.asarray(levels) * counts[-1], 1.0))
        return EDGES[1:][places].tolist()


def class_of(values: NDArray[np.float64]) -> NDArray[np.intp]:
    """The class that each value within [0, 1] is in: above its lower edge, and not above its upper one."""
    return np.minimum(np.searchsorted(EDGES[1:], values), CLASSES - 1)


def profile_of(columns: Mapping[str, NDArray[np.float64]], start: int) -> Profile:
    """Profile of the rows from ``start`` on, of which every quantity (m,) and the residuals are known."""
    names = [name for name in CERTIFIED if name in columns]
    place = class_of(columns["estimate"])
    lowest, highest = np.full(CLASSES, np.inf), np.full(CLASSES, -np.inf)
    np.minimum.at(lowest, place, columns.get("lower", columns["estimate"]))
    np.maximum.at(highest, place, columns.get("upper", columns["estimate"]))
    rows = np.arange(start, start + len(place))
    return Profile(
        {name: np.bincount(class_of(columns[name]), minlength=CLASSES) for name in names},
        {name: np.bincount(place, columns[name], CLASSES).astype(np.float64) for name in names},
        lowest,
        highest,
        merge_top([TopRows(rows, **columns, by="estimate")], TOP),
    )


def scored_profile(column: int, scored: ScoredRows, start: int) -> Profile:
    """Profile of a block that was scored just now, at one of its ridges."""
    names = PLAIN if scored.interval is None else CERTIFIED
    columns = {name: getattr(scored, name)[:, column] for name in names}
    return profile_of(columns | {"residual": scored.residual}, start)


def stored_profile(column: int, names: Sequence[str], first: Any, start: int, *others: Any) -> Profile:
    """Profile of a block of stored scores, at one of their ridges."""
    columns = {}
    for name, source in zip(names, (first, *others), strict=True):
        values = np.concatenate(list(pieces(source)))
        columns[name] = values if values.ndim == 1 else values[:, column]
    return profile_of(columns, start)


@dataclass(frozen=True)
class Ranked:
    """Rows in descending order of their estimate, in groups: of each the ranks, means and extremes.

    Attributes
    ----------
    edges
        (g + 1,) rank of the first row of every group, and n + 1.
    means
        Of every quantity, (g,) its mean.
    lowest, highest
        (g,) extremes of the ends.
    """

    edges: NDArray[np.int64]
    means: dict[str, NDArray[np.float64]]
    lowest: NDArray[np.float64]
    highest: NDArray[np.float64]

    @property
    def width(self) -> NDArray[np.float64]:
        """Relative width upper/lower − 1 of the mean interval, infinite where the lower ends are 0."""
        with np.errstate(divide="ignore"):
            return self.means["upper"] / self.means["lower"] - 1.0


def ranked(profile: Profile, per_decade: int = 30) -> Ranked:
    """Rows in order of their estimate, in groups that are about equally wide on a logarithmic axis of ranks.

    No group has rows on both sides of a cliff.
    """
    order = np.flatnonzero(profile.counts["estimate"])[::-1]
    counts = profile.counts["estimate"][order]
    last = np.cumsum(counts)
    wide = np.diff(np.floor(np.log10(last) * per_decade)) > 0
    group = np.flatnonzero(np.append(True, wide | (np.diff(order) <= -CLIFF)))
    size = np.add.reduceat(counts, group)
    return Ranked(
        edges=np.append(1, np.cumsum(size) + 1),
        means={name: np.add.reduceat(values[order], group) / size for name, values in profile.sums.items()},
        lowest=np.minimum.reduceat(profile.lowest[order], group),
        highest=np.maximum.reduceat(profile.highest[order], group),
    )


@dataclass(frozen=True)
class Bars:
    """A histogram for drawing: edges (b + 1,), and (b,) rows in each bar."""

    edges: NDArray[np.float64]
    counts: dict[str, NDArray[np.int64]]


def bars(counts: Mapping[str, NDArray[np.int64]], wanted: int = 40) -> Bars:
    """Join classes into at least ``wanted`` bars, if there are so many, over the range of all quantities."""
    filled = np.flatnonzero(sum(count[1:] for count in counts.values())) + 1
    low, high = (int(filled[0]), int(filled[-1])) if len(filled) else (CLASSES - 1, CLASSES - 1)
    joined = next((size for size in (40, 20, 10, 8, 5, 4, 2) if (high - low) / size >= wanted), 1)
    low, high = low // joined * joined, -(-(high + 1) // joined) * joined
    # The first class has no lower edge to draw it from.
    trimmed = {
        name: np.append(0, count[1:])[low:high].reshape(-1, joined).sum(axis=1) for name, count in counts.items()
    }
    return Bars(EDGES[low : high + 1 : joined], trimmed)


def thinned(eigenvalues: NDArray[np.float64]) -> dict[str, list[Any]]:
    """Eigenvalues in descending order as a record of at most a few hundred, in equal ratios of their ranks."""
    ranks = np.unique(np.geomspace(1, max(len(eigenvalues), 1), MOST_EIGENVALUES).round().astype(int))
    ranks = ranks[ranks <= len(eigenvalues)]
    return {"ranks": ranks.tolist(), "eigenvalues": eigenvalues[ranks - 1].tolist()}


def added(one: Any, other: Any) -> Any:
    """The sum, as a task."""
    return one + other
