"""How far planted outliers stand out."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

from daskrr.plots.style import BLUE, GRID, GUIDE, LABEL, TITLE, VERMILLION, blues, new_figure, whole


def outlier_figure(scores: ArrayLike, estimate: ArrayLike, planted: ArrayLike, title: str = "") -> Figure:
    """Show how far known outliers stand out in leverage scores and in their estimates.

    Parameters
    ----------
    scores, estimate
        (n,) leverage score and estimate of every row.
    planted
        Numbers of the rows that are known to be outliers.
    title
        Line above both panels.

    Returns
    -------
    figure
        Left the estimates in descending order, right every row by score and estimate.
    """
    values, heights = np.asarray(scores, float), np.asarray(estimate, float)
    marked = np.zeros(len(values), bool)
    marked[np.asarray(planted, int)] = True
    figure = new_figure(12.5, 5.4)
    left, right = figure.subplots(1, 2)
    _draw_ranks(left, heights, marked)
    _draw_plane(right, values, heights, marked)
    figure.suptitle(title, fontsize=14, fontweight="bold")
    return figure


def _draw_ranks(axes: Axes, heights: NDArray[np.float64], marked: NDArray[np.bool_]) -> None:
    order = np.argsort(-heights, kind="stable")
    ranks = np.arange(1, len(order) + 1)
    hit = marked[order]
    count = int(marked.sum())
    axes.plot(ranks, heights[order], color=BLUE, linewidth=2.2, label="all rows", zorder=2)
    _mark(axes, ranks[hit], heights[order][hit], f"planted rows ({count})")
    axes.axvline(count + 0.5, color=GUIDE, linestyle="--", linewidth=1)
    axes.text(count * 1.15, 0.04, f"rank {count}", transform=axes.get_xaxis_transform(), color=GUIDE)
    axes.set(xscale="log", yscale="log", xlim=(0.8, 1.3 * len(order)))
    axes.xaxis.set_major_formatter(whole)
    found = int(hit[:count].sum())
    _finish(axes, f"{found} of {count} planted rows are among the {count} highest", "rank by estimate", "estimate")
    axes.legend(loc="upper right", frameon=False, fontsize=LABEL)


def _draw_plane(
    axes: Axes, values: NDArray[np.float64], heights: NDArray[np.float64], marked: NDArray[np.bool_]
) -> None:
    x, y = _positive(values), _positive(heights)
    # Half a million dots would hide each other and how many there are; hexagons count them.
    shade = axes.hexbin(
        x[~marked], y[~marked], xscale="log", yscale="log", gridsize=60, bins="log", cmap=blues(), mincnt=1
    )
    _mark(axes, x[marked], y[marked], "planted rows")
    bar = axes.figure.colorbar(shade, ax=axes, pad=0.02)
    bar.set_label("ordinary rows per cell", fontsize=LABEL)
    _guide(axes, x, y)
    _finish(axes, "Ordinary by score alone, outstanding by estimate", "leverage score of the sketch", "estimate")
    axes.legend(loc="lower right", frameon=False, fontsize=LABEL)


def _mark(axes: Axes, x: NDArray[Any], y: NDArray[Any], label: str) -> None:
    """Dots of the planted rows, above everything else."""
    axes.scatter(x, y, s=34, facecolor=VERMILLION, edgecolor="white", linewidth=0.6, label=label, zorder=3)


def _guide(axes: Axes, x: NDArray[np.float64], y: NDArray[np.float64]) -> None:
    ends = [min(x.min(), y.min()), max(x.max(), y.max())]
    axes.plot(ends, ends, color=GUIDE, linestyle="--", linewidth=1, zorder=1, label="estimate = score")
    axes.set(xlim=(x.min() / 1.6, x.max() * 1.6), ylim=(y.min() / 1.6, y.max() * 1.6))


def _positive(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Lift zeros and round-off below them to where a logarithmic axis can still show them."""
    return np.maximum(values, 1e-6 * np.max(values))


def _finish(axes: Axes, title: str, xlabel: str, ylabel: str) -> None:
    axes.set_title(title, fontsize=TITLE)
    axes.set_xlabel(xlabel, fontsize=LABEL)
    axes.set_ylabel(ylabel, fontsize=LABEL)
    axes.grid(True, which="major", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
