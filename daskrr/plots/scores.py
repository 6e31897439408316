"""Pictures of leverage scores: how large they are, how certain, and what they depend on."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator
from numpy.typing import ArrayLike, NDArray

from daskrr.plots.style import (
    BLUE,
    GREEN,
    GUIDE,
    ORANGE,
    PURPLE,
    SKY,
    SMALL,
    VERMILLION,
    axes_for,
    finish,
    legend,
    short_count,
    sparse_log_labels,
    whole,
)

# Of as many highest rows the number is written.
NAMED = 3
# Counts that differ by more than this are drawn on a logarithmic axis.
FAR_APART = 20
# Above the highest bar, as a share of the height.
HEADROOM = 0.06
# Where the highest edge of a legend is that stands below the axes, as a share of their height.
LEGEND_BELOW = -0.2
# Labels on an axis of ranks.
MOST_RANKS = 7
LINES = (VERMILLION, GREEN, PURPLE, ORANGE)


def draw_scores(
    ax: Axes | None,
    edges: NDArray[np.float64],
    counts: NDArray[np.int64],
    outlines: Mapping[str, NDArray[np.int64]],
    mean: NDArray[np.float64],
    top: Mapping[int, float],
    below: int,
    title: str = "",
    subtitle: str = "",
) -> Axes:
    """Histogram of scores on a logarithmic axis.

    Parameters
    ----------
    ax
        Axes to draw on; new ones by default.
    edges, counts
        (b + 1,) and (b,) of the bars.
    outlines
        More counts, drawn as lines: of interval ends.
    mean
        The mean score, and its certified ends if there are any.
    top
        The highest rows and their scores, highest first.
    below
        Rows whose score is too small to be drawn.
    """
    axes = axes_for(ax)
    filled = np.concatenate([counts, *outlines.values()])
    axes.stairs(counts, edges, fill=True, color=SKY, alpha=0.75, label="rows", zorder=2)
    for (name, values), style, colour in zip(outlines.items(), ("-", "--"), (BLUE, GUIDE), strict=False):
        axes.stairs(values, edges, color=colour, linestyle=style, linewidth=1.3, label=f"{name} ends", zorder=3)
    axes.set_xscale("log")
    highest = max(int(filled.max(initial=1)), 1)
    if highest > FAR_APART * filled[filled > 0].min(initial=highest):
        axes.set(yscale="log", ylim=(0.7, highest ** (1.0 + HEADROOM)))
    else:
        axes.set_ylim(0.0, highest * (1.0 + HEADROOM))
    _draw_mean(axes, mean)
    _mark_rows(axes, top)
    note = f"  ({below:,} rows below {edges[0]:.1g} are not drawn)" if below else ""
    axes.yaxis.set_major_formatter(whole)
    sparse_log_labels(axes.xaxis)
    finish(axes, title, "leverage score" + note, "rows", subtitle)
    legend(axes, loc="upper center", bbox_to_anchor=(0.5, LEGEND_BELOW), ncols=2)
    return axes


def _draw_mean(axes: Axes, mean: NDArray[np.float64]) -> None:
    label = "effective dimension / n" if len(mean) == 3 else "effective dimension / n, at least"
    axes.axvline(mean[0], color=GUIDE, linestyle=":", linewidth=1.6, label=label, zorder=4)
    if len(mean) == 3:
        axes.axvspan(mean[1], mean[2], color=GUIDE, alpha=0.2, linewidth=0, zorder=1)


def _mark_rows(axes: Axes, top: Mapping[int, float]) -> None:
    """Triangles at the foot of the picture."""
    values = [max(value, 1e-14) for value in top.values()]
    named = ", ".join(str(row) for row in list(top)[:NAMED]) + (", …" if len(top) > NAMED else "")
    axes.scatter(
        values, np.full(len(values), 0.035), marker="^", s=40, color=VERMILLION, edgecolor="white", linewidth=0.5,
        transform=axes.get_xaxis_transform(), label=f"{len(top)} highest: rows {named}", zorder=5,
    )  # fmt: skip


def draw_intervals(
    ax: Axes | None,
    edges: NDArray[np.int64],
    bands: Mapping[str, NDArray[np.float64]],
    width: NDArray[np.float64],
    title: str = "",
    subtitle: str = "",
) -> Axes:
    """Rows in order of their estimate, highest first, in groups: mean interval, its extremes and its relative width.

    Every group is a step, so that a cliff between two rows is drawn as one.

    Parameters
    ----------
    ax
        Axes to draw on; by default two new panels, the lower one for the width.
    edges
        (g + 1,) rank of the first row of each group, and n + 1.
    bands
        (g,) each: means of ``lower``, ``estimate``, ``upper`` and ``scores``, and extremes ``lowest`` and ``highest``.
    width
        (g,) upper/lower − 1.
    """
    panel = None
    if ax is None:
        _, (ax, panel) = plt.subplots(
            2, 1, figsize=(7.0, 5.4), sharex=True, height_ratios=(3, 1), layout="constrained"
        )  # fmt: skip
    ax.use_sticky_edges = False  # room above and below the steps
    drawn = _lifted(bands)
    for low, high, colour, alpha, label in (
        ("lowest", "highest", SKY, 0.25, "extremes"),
        ("lower", "upper", BLUE, 0.35, "mean interval"),
    ):
        ax.stairs(drawn[high], edges, baseline=drawn[low], fill=True, color=colour, alpha=alpha, label=label)
    ax.stairs(drawn["estimate"], edges, baseline=None, color=BLUE, linewidth=2.0, label="estimate")
    ax.stairs(
        drawn["scores"], edges, baseline=None, color=ORANGE, linewidth=1.4, linestyle="--", label="score of the sketch"
    )  # fmt: skip
    ax.set(xscale="log", yscale="log")
    ax.xaxis.set_major_locator(LogLocator(numticks=MOST_RANKS))
    ax.xaxis.set_major_formatter(short_count)
    sparse_log_labels(ax.yaxis)
    below = "rank by estimate, highest first"
    finish(ax, title, "" if panel is not None else below, "leverage score", subtitle)
    legend(ax, loc="lower left")
    if panel is not None:
        _draw_width(panel, edges, width)
        finish(panel, "", below, "relative width")
    return ax


def _lifted(bands: Mapping[str, NDArray[np.float64]]) -> dict[str, NDArray[np.float64]]:
    """Zeros and what is far below the estimates are lifted to where a logarithmic axis can still show them."""
    estimate = bands["estimate"]
    least = 1e-3 * estimate[estimate > 0].min(initial=1.0)
    return {name: np.maximum(values, least) for name, values in bands.items()}


def _draw_width(axes: Axes, edges: NDArray[np.int64], width: NDArray[np.float64]) -> None:
    finite = np.isfinite(width)
    drawn = np.where(finite, np.maximum(width, 1e-12), np.nan)
    axes.stairs(drawn, edges, baseline=None, color=VERMILLION, linewidth=1.8)
    axes.set_yscale("log")
    if not finite.all():
        axes.set_title(f"unbounded in {1 - finite.mean():.0%} of the groups", fontsize=SMALL, loc="right")


def draw_spectrum(
    ax: Axes | None,
    ranks: ArrayLike,
    eigenvalues: ArrayLike,
    labels: Sequence[str],
    shifts: NDArray[np.float64],
    dimensions: NDArray[np.float64],
    title: str = "",
) -> Axes:
    """Eigenvalues in descending order, with n·λ and the sketch's effective dimension at every ridge, and its label."""
    axes = axes_for(ax)
    x, y = np.asarray(ranks, float), np.asarray(eigenvalues, float)
    kept = y > 1e-16 * y.max(initial=0.0)
    axes.plot(x[kept], y[kept], color=BLUE, linewidth=1.6, marker="o", markersize=3.2, label="eigenvalues", zorder=3)
    axes.set(xscale="log", yscale="log")
    for label, shift, dimension, colour in zip(labels, shifts, dimensions, LINES * len(labels), strict=False):
        axes.axhline(shift, color=colour, linewidth=1.4, label=label, zorder=2)
        axes.axvline(dimension, color=colour, linewidth=1.2, linestyle=":", zorder=2)
    axes.xaxis.set_major_formatter(whole)
    finish(axes, title, "number of the eigenvalue", "eigenvalue")
    legend(axes, loc="lower left")
    return axes


def draw_path(
    ax: Axes | None,
    ridges: Sequence[float],
    dimensions: Sequence[float],
    lower: Sequence[float] | None,
    upper: Sequence[float] | None,
    scored: Mapping[float, tuple[float, tuple[float, float | None]]],
    title: str = "",
) -> Axes:
    """Effective dimension against the ridge, with the interval that the exact one is in, and the ridges scored.

    Of a ridge that was scored, ``scored`` has the sketch's dimension and its own interval.
    """
    axes = axes_for(ax)
    if lower is not None and upper is not None:
        least = 0.1 * min(dimensions)
        axes.fill_between(
            ridges, np.maximum(lower, least), upper, color=BLUE, alpha=0.25, linewidth=0, label="certainly in here"
        )  # fmt: skip
    axes.plot(ridges, dimensions, color=BLUE, linewidth=2.0, label="of the sketch: at least")
    shown = {ridge: found for ridge, found in scored.items() if min(ridges) <= ridge <= max(ridges)}
    values = [value for value, _ in shown.values()]
    for ridge, (_, (low, high)) in shown.items():
        if high is not None and math.isfinite(high):
            axes.vlines(ridge, low, high, color=VERMILLION, linewidth=2.0, zorder=4)
    axes.scatter(list(shown), values, color=VERMILLION, edgecolor="white", s=46, zorder=5, label="scored")
    axes.set(xscale="log", yscale="log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(dimensions) < 1000 * min(dimensions) else (1,)))
    axes.yaxis.set_major_formatter(_short)
    axes.yaxis.set_minor_formatter("")
    finish(axes, title, "ridge λ", "effective dimension")
    legend(axes, loc="upper right")
    return axes


def _short(value: float, _: Any = None) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"
