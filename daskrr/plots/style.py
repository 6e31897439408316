"""How all pictures look: colours that stay apart for every kind of colour vision, sizes, and axes without clutter."""

import io
from os import PathLike
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

# The Okabe-Ito palette, and greys.
BLUE = "#0072B2"
SKY = "#56B4E9"
VERMILLION = "#D55E00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
ORANGE = "#E69F00"
GUIDE = "#595959"
GRID = "#DDDDDD"
LABEL = 11
TITLE = 12.5
SMALL = 9.5


def axes_for(ax: Axes | None, width: float = 7.0, height: float = 4.4) -> Axes:
    """The axes that were given, or new ones in a figure that notebooks show."""
    return plt.subplots(figsize=(width, height), layout="constrained")[1] if ax is None else ax


def new_figure(width: float, height: float) -> Figure:
    """A figure that no window and no notebook shows."""
    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def save(figure: Figure, path: str | PathLike[str]) -> None:
    """Write a figure as a PNG file."""
    FigureCanvasAgg(figure).print_png(path)


def save_svg(figure: Figure) -> str:
    """A figure as SVG, its text as text; the same figure gives the same bytes."""
    written = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "daskrr"}):
        FigureCanvasSVG(figure).print_svg(written, metadata={"Date": None, "Creator": None})
    return written.getvalue()


def finish(axes: Axes, title: str, xlabel: str, ylabel: str, subtitle: str = "") -> None:
    """Titles, labels and a quiet grid."""
    axes.set_title(title, fontsize=TITLE, loc="left", pad=24 if subtitle else 9, fontweight="bold")
    if subtitle:
        axes.text(0.0, 1.025, subtitle, transform=axes.transAxes, fontsize=SMALL, color=GUIDE, va="bottom")
    axes.set_xlabel(xlabel, fontsize=LABEL)
    axes.set_ylabel(ylabel, fontsize=LABEL)
    axes.tick_params(labelsize=SMALL)
    axes.grid(True, which="major", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def sparse_log_labels(axis: Axis) -> None:
    """Labels at 1, 2 and 5 times powers of ten, as plain numbers, where an axis spans few of them; else at powers."""
    low, high = axis.get_view_interval()
    axis.set_minor_formatter(NullFormatter())
    if low > 0 and high < 300 * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def legend(axes: Axes, **where: Any) -> None:
    """A legend that lets the picture through a little."""
    axes.legend(**{"loc": "best", "frameon": True, "framealpha": 0.85, "edgecolor": "none", "fontsize": SMALL} | where)


def blues() -> Colormap:
    """The part of the map that can be told from the white background."""
    return LinearSegmentedColormap.from_list("blues", colormaps["Blues"](np.linspace(0.25, 1, 256)))


def whole(value: float, _: Any = None) -> str:
    """A count, for an axis."""
    return f"{value:,.0f}" if value >= 1 else ""


def short_count(value: float, _: Any = None) -> str:
    """A count in few signs, for an axis that has many: 300, 10k, 3M."""
    for size, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:,.0f}{sign}"
    return whole(value)
