"""Pictures from small arrays of numbers that were counted elsewhere; imports nothing of ours."""

from daskrr.plots.diagnostics import draw_diagnostics
from daskrr.plots.outliers import outlier_figure
from daskrr.plots.scores import draw_intervals, draw_path, draw_scores, draw_spectrum
from daskrr.plots.style import new_figure, save, save_svg

__all__ = [
    "draw_diagnostics", "draw_intervals", "draw_path", "draw_scores", "draw_spectrum", "new_figure", "outlier_figure",
    "save", "save_svg",
]  # fmt: skip
