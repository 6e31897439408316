"""Pictures of how training rows fit a model: ``model.plot``; rows are counted on the workers."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from daskrr.errors import InvalidData, InvalidParameter
from daskrr.leverage.plotting import drawings
from daskrr.leverage.profile import TOP, added

# Residuals are counted in cells up to so many standard deviations; what is beyond is in the last.
REACH, CELLS = 8.0, 96
# Their quantiles need finer classes.
FINE_REACH, FINE_CLASSES = 10.0, 4000
# Cells of fitted values at most.
MOST_CELLS = 128
# What equal values, or none, are taken to span.
LEAST_SPAN = 1e-280
LEVERAGE_EDGES = np.logspace(-8, 0, 81)
QUANTILES = 81


@dataclass(frozen=True)
class CellSums:
    """Sums over the rows whose value is in a cell; cells are 2**exponent wide, so that joined cells fit any others.

    Attributes
    ----------
    exponent, first
        Cell i is from (first + i)·2**exponent to (first + i + 1)·2**exponent.
    sums
        (cells, columns).
    """

    exponent: int
    first: int
    sums: NDArray[np.float64]

    @classmethod
    def of(cls, values: NDArray[np.float64], cells: NDArray[np.intp], n: int, added: NDArray[np.float64]) -> "CellSums":
        """Count rows by their value and by one of n ``cells``; the last column is the sum of ``added``."""
        low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)
        span = max(high - low, 1e-9 * max(abs(low), abs(high)), LEAST_SPAN)
        exponent = int(np.ceil(np.log2(span / MOST_CELLS)))
        place = np.floor(np.ldexp(values, -exponent)).astype(np.int64)
        first = int(np.floor(np.ldexp(low, -exponent)))
        sums = np.zeros((int(place.max(initial=first)) - first + 1, n + 1))
        np.add.at(sums, (place - first, cells), 1.0)
        np.add.at(sums[:, n], place - first, added)
        return cls(exponent, first, sums)

    def joined(self, exponent: int) -> "CellSums":
        """The same with wider cells."""
        places = (np.arange(len(self.sums)) + self.first) >> (exponent - self.exponent)
        sums = np.zeros((int(places[-1] - places[0]) + 1, self.sums.shape[1]))
        np.add.at(sums, places - places[0], self.sums)
        return CellSums(exponent, int(places[0]), sums)

    def __add__(self, other: "CellSums") -> "CellSums":
        exponent = max(self.exponent, other.exponent)
        while True:
            left, right = self.joined(exponent), other.joined(exponent)
            first = min(left.first, right.first)
            stop = max(left.first + len(left.sums), right.first + len(right.sums))
            if stop - first <= MOST_CELLS + 1:
                break
            exponent += 1
        sums = np.zeros((stop - first, self.sums.shape[1]))
        for table in (left, right):
            sums[table.first - first : table.first - first + len(table.sums)] += table.sums
        return CellSums(exponent, first, sums)

    @property
    def edges(self) -> NDArray[np.float64]:
        """(cells + 1,) ends of the cells."""
        return np.ldexp(self.first + np.arange(len(self.sums) + 1.0), self.exponent)


@dataclass(frozen=True)
class Fit:
    """What the pictures of a fit show.

    Attributes
    ----------
    fitted
        By fitted values: rows in every cell of residuals, and the sum of residuals.
    leverage
        (80, CELLS) rows by leverage and studentized residual.
    studentized
        (FINE_CLASSES,) rows by studentized residual.
    top
        Columns ``rows``, ``cooks_distance``, ``leverage`` and ``studentized`` of the rows of largest distance.
    skipped
        Rows that are fitted exactly, whose studentized residual is 0/0.
    """

    fitted: CellSums
    leverage: NDArray[np.int64]
    studentized: NDArray[np.int64]
    top: dict[str, NDArray[Any]]
    skipped: int

    def __add__(self, other: "Fit") -> "Fit":
        top = {name: np.concatenate([mine, other.top[name]]) for name, mine in self.top.items()}
        return Fit(
            self.fitted + other.fitted,
            self.leverage + other.leverage,
            self.studentized + other.studentized,
            _highest(top),
            self.skipped + other.skipped,
        )


def fit_of(target: int, n_targets: int, sigma: float, found: NDArray[np.float64], start: int) -> Fit:
    """What is counted of the diagnostics (m, 1 + 7·t) of a block of rows."""
    leverage = found[:, 0]
    fitted, residuals, _, studentized, cook, _ = (found[:, 1 + i * n_targets + target] for i in range(6))
    known = np.isfinite(studentized) & np.isfinite(cook)
    rows = start + np.flatnonzero(known)
    leverage, fitted, residuals, studentized, cook = (
        values[known] for values in (leverage, fitted, residuals, studentized, cook)
    )
    across = np.clip(np.searchsorted(LEVERAGE_EDGES, leverage) - 1, 0, len(LEVERAGE_EDGES) - 2)
    plane = np.zeros((len(LEVERAGE_EDGES) - 1, CELLS), np.int64)
    np.add.at(plane, (across, cell_of(studentized, REACH, CELLS)), 1)
    return Fit(
        CellSums.of(fitted, cell_of(residuals / sigma, REACH, CELLS), CELLS, residuals),
        plane,
        np.bincount(cell_of(studentized, FINE_REACH, FINE_CLASSES), minlength=FINE_CLASSES),
        _highest({"rows": rows, "cooks_distance": cook, "leverage": leverage, "studentized": studentized}),
        int(len(known) - known.sum()),
    )


def cell_of(values: NDArray[np.float64], reach: float, number: int) -> NDArray[np.intp]:
    """Which of ``number`` equal cells between −reach and reach each value is in; the first and last have no end."""
    return np.clip(np.floor((values + reach) * (number / (2.0 * reach))), 0, number - 1).astype(np.intp)


def _highest(top: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    order = np.lexsort((top["rows"], -top["cooks_distance"]))[:TOP]
    return {name: values[order] for name, values in top.items()}


def normal_quantiles(counts: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Quantiles of the normal distribution, and of the values that were counted, to the width of a class."""
    total = int(counts.sum())
    reach = float(ndtri(1.0 - 0.5 / total))
    normal = np.linspace(-reach, reach, QUANTILES)
    edges = np.linspace(-FINE_REACH, FINE_REACH, FINE_CLASSES + 1)
    below = np.concatenate([[0], np.cumsum(counts)]) / total
    kept = np.concatenate([[True], np.diff(below) > 0])
    return normal, np.interp(ndtr(normal), below[kept], edges[kept])


class Diagnosed(Protocol):
    """A fitted regression."""

    noise_variance_: Any

    def sum_diagnostics(self, X: Any, y: Any, sample_weight: Any, then: Any, add: Any) -> Any:
        """Add up on the workers what is made of the diagnostics of every block."""


class RegressionPictures:
    """Pictures of a fitted regression."""

    def __init__(self, model: Diagnosed) -> None:
        self._model = model

    def diagnostics(self, X: Any, y: Any, sample_weight: Any = None, *, target: int = 0, figure: Any = None) -> Any:
        """Four panels on how the training rows fit; give what ``fit`` was given.

        Residuals against fitted values, quantiles of studentized residuals, residuals against leverage, and the rows of
        largest Cook's distance. One pass over the rows, which are counted on the workers.

        Parameters
        ----------
        target
            Which of several.
        figure
            Matplotlib figure to draw on; a new one by default.

        Returns
        -------
        figure

        Raises
        ------
        InvalidParameter
            There is no such target.
        InvalidData
            Residuals have no standard deviation: the rows are fitted exactly, or are no more than the parameters.
        """
        variances = np.atleast_1d(self._model.noise_variance_)
        if not 0 <= target < len(variances):
            raise InvalidParameter(f"target={target!r} is none of the {len(variances)} that were fitted, from 0 on.")
        variance = float(variances[target])
        if not (np.isfinite(variance) and variance > 0):
            raise InvalidData(
                f"the noise variance of this fit is {variance:g}, so that residuals cannot be compared with it. Use a "
                "larger ridge, or more rows than the effective number of parameters."
            )
        sigma = np.sqrt(variance)
        work = partial(fit_of, target, len(variances), sigma)
        return _drawn(figure, self._model.sum_diagnostics(X, y, sample_weight, work, added), sigma)


def _drawn(figure: Any, fit: Fit, sigma: float) -> Any:
    cells = np.linspace(-REACH, REACH, CELLS + 1)
    counts, residual_sums = fit.fitted.sums[:, :-1], fit.fitted.sums[:, -1]
    with np.errstate(invalid="ignore", divide="ignore"):
        trend = residual_sums / counts.sum(axis=1)
    filled = np.flatnonzero(fit.leverage.sum(axis=1))
    low, high = filled[0], filled[-1] + 1
    left_out = f", {fit.skipped:,} of them fitted exactly and left out" if fit.skipped else ""
    return drawings().draw_diagnostics(
        figure,
        (fit.fitted.edges, sigma * cells, counts),
        trend,
        normal_quantiles(fit.studentized),
        (LEVERAGE_EDGES[low : high + 1], cells, fit.leverage[low:high]),
        fit.top,
        f"Fit of {int(counts.sum()) + fit.skipped:,} training rows{left_out}",
    )
