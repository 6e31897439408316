"""Notebooks: a bar for a running computation, with the pass, the rate and the time left; and tables of results."""

import math
import sys
import time
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

from daskrr.runtime.progress import Display, Event, Lines, amount, describe, duration, interval
from daskrr.storage.urls import escaped as escape

# Least seconds between two drawings of one stage.
EVERY = 0.2
STYLE = "line-height:1.5;font-size:13px"
# Colours of tables are those of the page around them, by day and by night.
LINE = "border:0;border-bottom:1px solid rgba(128,128,128,.3)"
CELL = f"padding:3px 14px 3px 0;vertical-align:top;background:none;{LINE}"
HEAD = f"{CELL};font-weight:500;opacity:.75"


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


def html_table(title: str, rows: dict[str, str]) -> str:
    """A two-column table for notebooks."""
    body = [
        f"<tr><th style='{HEAD};text-align:left;white-space:nowrap'>{escape(name)}</th>"
        f"<td style='{CELL};text-align:left;overflow-wrap:anywhere'>{escape(text)}</td></tr>"
        for name, text in rows.items()
    ]
    return _framed(title, body)


def html_columns(title: str, names: Sequence[str], rows: Iterable[Sequence[str]], foot: str = "") -> str:
    """A table of figures under their names for notebooks, with a line below."""
    cell = f"{CELL};text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap"
    head = "".join(f"<th style='{HEAD};text-align:right'>{escape(name)}</th>" for name in names)
    body = ["".join(f"<td style='{cell}'>{escape(one)}</td>" for one in row) for row in rows]
    return _framed(title, [f"<tr>{one}</tr>" for one in (head, *body)], foot)


def _framed(title: str, rows: Sequence[str], foot: str = "") -> str:
    caption = f"text-align:left;font-weight:600;padding:0 0 4px;color:inherit;{LINE};border-bottom:2px solid #0072b2"
    below = f"<div style='opacity:.75;max-width:46em'>{escape(foot)}</div>" if foot else ""
    return (
        f"<div style='{STYLE};font-family:system-ui,sans-serif;overflow-x:auto'>"
        f"<table style='border-collapse:collapse;margin:4px 0;font-size:inherit'>"
        f"<caption style='{caption}'>{escape(title)}</caption><tbody>{''.join(rows)}</tbody></table>{below}</div>"
    )
