"""A running computation in a notebook: a bar with the pass, the rate, the time left and the effective dimension."""

import math
import sys
import time
from html import escape
from importlib import import_module
from typing import Any

from daskrr.engine.progress import Display, Event, Lines, amount, describe, duration, interval

# Least seconds between two drawings of one stage.
EVERY = 0.2
STYLE = "line-height:1.5;font-size:13px"


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook; nothing is imported to find out."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def notebook_display() -> Display:
    """A widget where ipywidgets is installed, else lines of text in the output of the cell."""
    try:
        return Widget(import_module("ipywidgets"), import_module("IPython.display").display)
    except ImportError:
        return Lines(sys.stdout)


class Widget(Display):
    """One line for every stage that has ended, and a bar for the one that runs.

    Parameters
    ----------
    widgets
        The module ipywidgets.
    display
        What shows a widget in the output of the cell.
    """

    def __init__(self, widgets: Any, display: Any) -> None:
        self._ended: list[str] = []
        self._running, self._next, self._dimension = False, -math.inf, ""
        self._lines = widgets.HTML()
        self._bar = widgets.FloatProgress(value=0.0, max=1.0, layout=widgets.Layout(width="240px"))
        self._figures = widgets.HTML()
        self._box = widgets.VBox([self._lines, widgets.HBox([self._bar, self._figures])])
        self._display: Any = display

    def __call__(self, event: Event) -> None:
        """Draw the event if it is time."""
        self._show()
        now = time.monotonic()
        if event.dimension is not None:
            self._dimension = f"effective dimension {interval(event.dimension)}"
        if event.ended:
            self._end(event)
        elif event.done == 0 or now >= self._next:
            self._next = now + EVERY
            self._draw(event)

    def close(self) -> None:
        """Take the bar away; what has ended stays to be read."""
        if self._running:
            self._running = False
            self._bar.layout.display = "none"
            self._figures.value = ""

    def _show(self) -> None:
        """Put the widget below the cell when there is something to show."""
        if self._display is not None:
            self._display(self._box)
            self._display = None

    def _draw(self, event: Event) -> None:
        self._running = True
        self._bar.layout.display = ""
        self._bar.bar_style = ""
        self._bar.value = event.done / event.total if event.total else 1.0
        self._figures.value = _line(" · ".join(filter(None, [*_figures(event), self._dimension])))

    def _end(self, event: Event) -> None:
        """Turn the stage into a line of text; a bar that was stopped stays where it is."""
        self._ended.append(_line(describe(event), "#b3261e" if event.stopped else "#555"))
        self._lines.value = "".join(self._ended)
        if event.stopped:
            self._bar.bar_style = "danger"
            self._running = False
        else:
            self._draw(event)


def _figures(event: Event) -> list[str]:
    parts = [event.stage, f"{event.done}/{event.total}"]
    parts += [f"{amount(event.rate)} rows/s"] if event.rows else []
    return parts + ([] if event.remaining is None else [f"{duration(event.remaining)} left"])


def _line(text: str, color: str = "inherit") -> str:
    return f"<div style='{STYLE};color:{color}'>{escape(text)}</div>"
