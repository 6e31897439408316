"""Pictures of how training rows fit a regression."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from daskrr.plots.style import BLUE, GUIDE, SMALL, VERMILLION, blues, finish, legend, whole

# Of as many rows of largest Cook's distance the number is written into the picture.
NAMED = 3


def draw_diagnostics(
    figure: Figure | None,
    plane: tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]],
    trend: NDArray[np.float64],
    quantiles: tuple[NDArray[np.float64], NDArray[np.float64]],
    leverage: tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]],
    top: Mapping[str, Any],
    title: str = "",
) -> Figure:
    """Four panels: residuals against fitted values, their quantiles, leverage, and the rows that decide most.

    Parameters
    ----------
    figure
        Figure to draw on; a new one by default.
    plane, leverage
        Edges (a + 1,) and (b + 1,) and counts (a, b): of fitted values and residuals; of leverage and studentized
        residuals.
    trend
        (a,) mean residual in every class of fitted values, NaN where there is none.
    quantiles
        Of the normal distribution and of the studentized residuals.
    top
        ``rows``, ``cooks_distance``, ``leverage`` and ``studentized`` of the rows of largest distance, largest first.
    """
    figure = plt.figure(figsize=(11.0, 8.2), layout="constrained") if figure is None else figure
    panels = figure.subplots(2, 2).ravel()
    _draw_counts(panels[0], *plane)
    middle = 0.5 * (plane[0][1:] + plane[0][:-1])
    panels[0].plot(middle, trend, color=VERMILLION, linewidth=1.8, label="mean residual")
    panels[0].axhline(0.0, color=GUIDE, linewidth=0.8)
    finish(panels[0], "Residuals against fitted values", "fitted value", "residual", _beyond(plane[2]))
    legend(panels[0], loc="upper right")
    _draw_quantiles(panels[1], *quantiles)
    _draw_leverage(panels[2], leverage, top)
    _draw_influence(panels[3], top)
    figure.suptitle(title, fontsize=14, fontweight="bold")
    return figure


def _draw_counts(axes: Axes, x: NDArray[np.float64], y: NDArray[np.float64], counts: NDArray[np.int64]) -> None:
    """Rows per cell in shades, on axes that are no larger than what is there."""
    shown = np.ma.masked_equal(counts.T, 0)
    shade = axes.pcolormesh(x, y, shown, norm="log", cmap=blues(), rasterized=True)
    filled = np.flatnonzero(counts.sum(axis=0))
    if len(filled):
        axes.set_ylim(y[filled[0]], y[filled[-1] + 1])
    bar = axes.figure.colorbar(shade, ax=axes, pad=0.02)
    bar.set_label("rows per cell", fontsize=SMALL)
    bar.ax.tick_params(labelsize=SMALL)
    bar.ax.yaxis.set_major_formatter(whole)
    bar.ax.yaxis.set_minor_formatter("")


def _beyond(counts: NDArray[np.int64]) -> str:
    """That the first and last cells of residuals have no end, if any row is there."""
    found = int(counts[:, 0].sum() + counts[:, -1].sum())
    return f"{found:,} rows of larger residuals are at the edge" if found else ""


def _draw_quantiles(axes: Axes, normal: NDArray[np.float64], found: NDArray[np.float64]) -> None:
    ends = [min(normal.min(), found.min()), max(normal.max(), found.max())]
    axes.plot(ends, ends, color=GUIDE, linestyle="--", linewidth=1.2, label="normal distribution")
    axes.plot(normal, found, color=BLUE, linewidth=0, marker="o", markersize=4, label="rows")
    finish(axes, "Quantiles of studentized residuals", "of the normal distribution", "of the rows")
    legend(axes, loc="upper left")


def _draw_leverage(axes: Axes, leverage: tuple[Any, Any, Any], top: Mapping[str, Any]) -> None:
    axes.set_xscale("log")
    _draw_counts(axes, *leverage)
    low, high = axes.get_ylim()
    height = np.clip(top["studentized"], low, high)
    label = f"{len(height)} rows of largest Cook's distance"
    axes.scatter(
        top["leverage"], height, s=40, color=VERMILLION, edgecolor="white", linewidth=0.6, label=label, zorder=4,
        clip_on=False,
    )  # fmt: skip
    named = zip(top["rows"][:NAMED], top["leverage"], height, (5, -12, 5), strict=False)
    for row, x, y, above in named:
        axes.annotate(
            str(row), (x, y), xytext=(-5, above), textcoords="offset points", ha="right", fontsize=SMALL,
            color=VERMILLION,
        )  # fmt: skip
    axes.axhline(0.0, color=GUIDE, linewidth=0.8)
    finish(axes, "Residuals against leverage", "leverage", "studentized residual", _beyond(leverage[2]))
    legend(axes, loc="lower left")


def _draw_influence(axes: Axes, top: Mapping[str, Any]) -> None:
    places = np.arange(len(top["rows"]))[::-1]
    axes.hlines(places, 0.0, top["cooks_distance"], color=BLUE, linewidth=2.0)
    axes.plot(top["cooks_distance"], places, color=BLUE, marker="o", markersize=7, linewidth=0)
    axes.set_yticks(places, [str(row) for row in top["rows"]])
    axes.set_xlim(left=0.0)
    finish(axes, "Rows that move the predictions most", "Cook's distance", "row")
