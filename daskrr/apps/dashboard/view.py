"""The page itself: passes, speed, effective dimension, and how large residuals and scores are, as a job proceeds."""

import math
from datetime import datetime
from typing import Any

import numpy as np
from bokeh.layouts import column, row
from bokeh.models import ColumnDataSource, FactorRange, NumeralTickFormatter, Range1d
from bokeh.models.widgets.markups import Div
from bokeh.plotting import figure

from daskrr.apps.dashboard.state import Board, Counts, JobBoard, octave_ends
from daskrr.runtime.progress import Event, amount, duration, interval
from daskrr.storage.urls import escaped as escape

BLUE, GREEN, ORANGE, RED, GREY = "#3b7dd8", "#2c9f6b", "#d98a1f", "#c8413b", "#e4e4e4"
STATE_COLORS = {"running": BLUE, "done": GREEN, "interrupted": ORANGE}
SHOWN_STAGES = 10
LEAST_WIDTH = 340
# Seconds that an axis of time shows at least.
LEAST_SPAN = 10.0
STYLE = """
:host { font-family: Helvetica, Arial, sans-serif; color: #222; }
.bk-clearfix { display: block; width: 100%; }
h2 { font-size: 17px; margin: 2px 0 2px; font-weight: 600; overflow-wrap: anywhere; }
.state { color: white; border-radius: 3px; padding: 1px 8px; font-size: 12px; font-weight: 600; margin-left: 6px; }
.about { color: #555; font-size: 13px; overflow-wrap: anywhere; }
.cards { display: flex; flex-wrap: wrap; gap: 8px; margin-top: 8px; }
.card { background: white; border: 1px solid #ddd; border-radius: 4px; padding: 6px 12px; flex: 1 1 120px; }
.card b { display: block; font-size: 19px; font-weight: 600; white-space: nowrap; }
.card span { color: #666; font-size: 12px; }
.error { border-left: 4px solid #c8413b; background: #fdf1f0; padding: 6px 10px; margin-top: 8px; font-size: 13px;
  overflow-wrap: anywhere; }
.lease { color: #555; font-size: 13px; margin-top: 8px; }
"""
WAITING = (
    "<h2>daskrr</h2><div class='about'>No job has run on this cluster yet. The page fills in when one starts, such as "
    "<code>daskrr.score_to_zarr(…)</code> in Python or <code>daskrr score … --cluster …</code>.</div>"
)


class Page:
    """Everything that is shown of the job to look at; :meth:`update` brings it up to date."""

    def __init__(self) -> None:
        self.head = Div(text=WAITING, sizing_mode="stretch_width", stylesheets=[STYLE])
        self.parts: list[Any] = [
            Passes(), RowsPerSecond(), ShareOfMatmul(), Dimension(), Histogram("residual", "Residuals / k(x, x)"),
            Histogram("score", "Leverage scores"),
        ]  # fmt: skip
        figures: list[Any] = [part.figure for part in self.parts]
        self.figures = row(
            figures, sizing_mode="stretch_width", styles={"flex-wrap": "wrap", "row-gap": "12px"}, visible=False
        )
        self.root = column([self.head, self.figures], sizing_mode="stretch_width")

    def update(self, board: Board, limit: float) -> None:
        """Show how the job stands; ``limit`` is the speed of matrix multiplies on all workers."""
        job = board.current
        text = WAITING if job is None else head(job, limit, len(board.jobs) - 1)
        if text != self.head.text:
            self.head.text = text
        if job is not None:
            self.figures.visible = True
            for part in self.parts:
                part.update(job, limit)


def head(job: JobBoard, limit: float, others: int = 0) -> str:
    """What the job is and how it stands, as HTML."""
    color = STATE_COLORS.get(job.state, RED)
    state = f"<span class='state' style='background:{color}'>{escape(job.state)}</span>"
    more = f" <span class='about'>and {others} more on this cluster</span>" if others else ""
    cards = "".join(
        f"<div class='card'><b>{escape(value)}</b><span>{escape(name)}</span></div>"
        for name, value in cards_of(job, limit)
    )
    error = f"<div class='error'><b>Last error.</b> {escape(job.error)}</div>" if job.error else ""
    return (
        f"<h2 title='{escape(_title(job))}'>{escape(_title(job, short=True))}{state}{more}</h2>"
        f"<div class='about'>{escape(_about(job))}</div>"
        f"<div class='cards'>{cards}</div>{error}{_lease(job)}"
    )


def _title(job: JobBoard, short: bool = False) -> str:
    """Where rows come from and scores go; short, without the folders."""
    places = [str(job.facts[name]) for name in ("input", "output") if job.facts.get(name)]
    return " → ".join(place.rpartition("/")[2] if short else place for place in places) or "daskrr"


def _about(job: JobBoard) -> str:
    facts = job.facts
    if "rows" not in facts:
        return "preparing"
    wanted = facts.get("tolerance")
    size = f"{facts['landmarks']:,} landmarks" if wanted is None else f"at most {facts['landmarks']:,} landmarks"
    parts = [f"{facts['rows']:,} rows × {facts['features']} features", facts["kernel"], f"λ = {facts['ridge']:g}", size]
    return " · ".join([*parts, *([] if wanted is None else [f"tolerance {wanted:g}"])])


def cards_of(job: JobBoard, limit: float) -> list[tuple[str, str]]:
    """Names and values of the figures that matter most."""
    stage = job.stage
    if stage is None:
        return [("stage", "preparing")]
    running = job.state == "running"
    cards = [("stage" if running else "last stage", stage.stage)]
    over_rows = next((one for one in reversed(job.stages) if one.row_flops), None)
    if over_rows is not None:
        cards.append(("rows per second", amount(over_rows.rate)))
    if job.flops and limit:
        cards.append(("of matrix-multiply speed", f"{job.flops / limit:.0%}"))
    left = stage.remaining
    if running:
        cards.append(("left of this stage", "–" if left is None else duration(left)))
    else:
        cards.append(("in all", duration(job.updated - job.began)))
    if job.dimensions:
        cards.append(("effective dimension", interval(job.dimensions[-1])))
    return cards


def _lease(job: JobBoard) -> str:
    lease = job.facts.get("lease")
    if not lease:
        return ""
    verb = "holds" if job.state == "running" else "held"
    pid, host, generation = (escape(str(lease[name])) for name in ("pid", "host", "generation"))
    return (
        f"<div class='lease'>Lease: process {pid} on {host} {verb} the output as its generation {generation}, renewed "
        f"every {lease['renewed_every']:g} s; last word from the job at "
        f"{datetime.fromtimestamp(job.updated):%H:%M:%S}.</div>"
    )


def _figure(title: str, height: int = 260, **options: Any) -> Any:
    made = figure(
        title=title, height=height, min_width=LEAST_WIDTH, sizing_mode="stretch_width", toolbar_location=None, tools="",
        styles={"flex": f"1 1 {LEAST_WIDTH + 100}px"}, **options,
    )  # fmt: skip
    made.xgrid.visible = False
    made.outline_line_color = made.xaxis.minor_tick_line_color = made.yaxis.minor_tick_line_color = None
    made.axis.axis_line_color = made.axis.major_tick_line_color = "#bbbbbb"
    return made


class Passes:
    """A bar for every stage."""

    def __init__(self) -> None:
        self.source = ColumnDataSource({"stage": [], "share": [], "color": [], "text": []})
        self.figure = _figure("Passes", y_range=FactorRange(), x_range=Range1d(start=0, end=1))
        self.figure.hbar(y="stage", right=1, height=0.7, color=GREY, source=self.source)
        self.figure.hbar(y="stage", right="share", height=0.7, color="color", source=self.source)
        self.figure.text(
            x=0.01, y="stage", text="text", source=self.source, text_baseline="middle", text_font_size="11px"
        )
        self.figure.xaxis.visible = self.figure.ygrid.visible = False

    def update(self, job: JobBoard, limit: float) -> None:
        """Draw the last stages."""
        shown = job.stages[-SHOWN_STAGES:]
        # Stages of one name, such as two looks at all rows, have bars of their own.
        names = [stage.stage + "\u200b" * number for number, stage in enumerate(shown)]
        self.figure.y_range.factors = names[::-1]
        self.source.data = {
            "stage": names,
            "share": [stage.done / stage.total if stage.total else 1.0 for stage in shown],
            "color": [_stage_color(stage) for stage in shown],
            "text": [_stage_text(stage) for stage in shown],
        }


def _stage_color(stage: Event) -> str:
    return "#f0b6b3" if stage.stopped else "#a9d8c3" if stage.ended else "#a8c8f0"


def _stage_text(stage: Event) -> str:
    parts = [f"{stage.done:,}/{stage.total:,}"]
    parts += [f"{amount(stage.rate)} rows/s"] if stage.total_rows and stage.rate else []
    parts += [duration(stage.seconds)]
    return " · ".join(parts)


class Speed:
    """Rows per second, or what share of the speed of matrix multiplies that is, over time."""

    def __init__(self, title: str, unit: str) -> None:
        self.source = ColumnDataSource({"at": [], "value": []})
        self.figure = _figure(
            title, x_axis_type="datetime", x_range=Range1d(start=0, end=1), y_range=Range1d(start=0, end=1)
        )
        self.figure.line("at", "value", source=self.source, color=BLUE, line_width=2)
        self.figure.scatter("at", "value", source=self.source, color=BLUE, size=5)
        self.figure.yaxis.formatter = NumeralTickFormatter(format=unit)
        self.figure.xaxis.ticker.desired_num_ticks = 4

    def draw(self, job: JobBoard, values: list[float]) -> None:
        """Draw the curve over the time of the job."""
        self.source.data = {"at": [1000.0 * at for at, _, _ in job.rates], "value": values}
        self.figure.y_range.end = max([1.0, *(1.05 * one for one in values if one > 0)])
        self.figure.x_range.start = 1000.0 * job.began
        self.figure.x_range.end = 1000.0 * max(job.updated, job.began + LEAST_SPAN)


class RowsPerSecond(Speed):
    """Rows per second over time."""

    def __init__(self) -> None:
        super().__init__("Rows per second", "0.[0]a")

    def update(self, job: JobBoard, limit: float) -> None:
        """Draw the curve."""
        self.draw(job, [rows for _, rows, _ in job.rates])


class ShareOfMatmul(Speed):
    """What share of the speed of matrix multiplies the passes have, over time."""

    def __init__(self) -> None:
        super().__init__("Share of matrix-multiply speed", "0 %")

    def update(self, job: JobBoard, limit: float) -> None:
        """Draw the curve, once the limit is known."""
        self.draw(job, [flops / limit if limit else math.nan for _, _, flops in job.rates])


class Dimension:
    """The interval of the effective dimension after each round."""

    def __init__(self) -> None:
        self.source = ColumnDataSource({"round": [], "low": [], "high": []})
        self.figure = _figure(
            "Effective dimension by round", x_range=Range1d(start=0.5, end=1.5), y_range=Range1d(start=0, end=1)
        )
        self.figure.segment("round", "low", "round", "high", source=self.source, color=BLUE, line_width=3)
        for end in ("low", "high"):
            self.figure.scatter("round", end, marker="dash", source=self.source, color=BLUE, size=18, line_width=3)

    def update(self, job: JobBoard, limit: float) -> None:
        """Draw the intervals; of one without an upper end, the lower end."""
        rounds = list(range(1, len(job.dimensions) + 1))
        low = [ends[0] for ends in job.dimensions]
        high = [ends[1] if math.isfinite(ends[1]) else ends[0] for ends in job.dimensions]
        self.source.data = {"round": rounds, "low": low, "high": high}
        self.figure.visible = bool(rounds)
        self.figure.xaxis.ticker = rounds
        self.figure.x_range.end = max(1, len(rounds)) + 0.5
        if rounds:
            room = 0.1 * (max(high) - min(low)) or 0.1 * max(high) or 1.0
            self.figure.y_range.start, self.figure.y_range.end = min(low) - room, max(high) + room


class Histogram:
    """How large the residuals or the scores of the rows so far are."""

    def __init__(self, kind: str, title: str) -> None:
        self.kind, self.title = kind, title
        self.source = ColumnDataSource({"left": [], "right": [], "rows": []})
        self.figure = _figure(
            title, x_axis_type="log", x_range=Range1d(start=1e-6, end=1.0), y_range=Range1d(start=0, end=1)
        )
        self.figure.quad(
            left="left", right="right", top="rows", bottom=0, source=self.source, fill_color=BLUE, line_color="white"
        )
        self.figure.yaxis.formatter = NumeralTickFormatter(format="0.[0]a")

    def update(self, job: JobBoard, limit: float) -> None:
        """Draw the classes that hold any rows."""
        left, right, rows = _shown_classes(job.counts.get(self.kind))
        self.source.data = {"left": left, "right": right, "rows": rows}
        self.figure.visible = bool(rows)
        if rows:
            self.figure.x_range.start, self.figure.x_range.end = left[0] / 2.0, right[-1] * 2.0
            self.figure.y_range.end = 1.05 * max(rows)
        self.figure.title.text = f"{self.title}, {sum(rows):,} rows" if rows else self.title


def _shown_classes(counts: Counts | None) -> tuple[Any, Any, Any]:
    """Ends and counts of the classes from the first to the last that holds any rows."""
    filled = np.flatnonzero(counts.values) if counts is not None else np.empty(0, np.int64)
    if counts is None or not len(filled):
        return [], [], []
    shown, ends = slice(filled[0], filled[-1] + 1), octave_ends()
    return ends[:-1][shown].tolist(), ends[1:][shown].tolist(), counts.values[shown].tolist()
