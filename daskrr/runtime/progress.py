"""One stream of events that every display of a running computation is fed from.

A computation announces its stages with :class:`Stage`, which sends an :class:`Event` to one callable, the reporter.
Bars, log lines and anything a caller writes are all reporters, so the engine knows none of them.
"""

import atexit
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

LOGGER = logging.getLogger("daskrr.progress")


@dataclass(frozen=True)
class Event:
    """State of one stage at one moment.

    Attributes
    ----------
    stage
        Readable name of the stage.
    done, total
        Tasks finished and tasks in the stage. ``done=0`` announces a stage, ``done=total`` ends it.
    rows, total_rows
        Rows finished and rows in the stage; ``total_rows=0`` for a stage that does not go over rows.
    seconds
        Time since the stage was announced.
    message
        Anything worth telling beside the numbers.
    stopped
        Whether the stage ends here without being complete, after an error or an interrupt.
    row_flops
        Floating-point operations that a row takes, 0 where they are not counted.
    dimension
        What the effective dimension at the smallest ridge lies between, once that is known; up to infinity if it is
        not certified.
    found
        Tasks and rows among the finished ones that were there before the stage began.
    """

    stage: str
    done: int
    total: int
    rows: int
    total_rows: int
    seconds: float
    message: str = ""
    stopped: bool = False
    row_flops: float = 0.0
    dimension: tuple[float, float] | None = None
    found: tuple[int, int] = (0, 0)

    @property
    def ended(self) -> bool:
        """Whether no further event of this stage follows."""
        return self.stopped or self.done >= self.total

    @property
    def rate(self) -> float:
        """Rows per second so far, 0 before the first task ends."""
        return (self.rows - self.found[1]) / self.seconds if self.seconds > 0 else 0.0

    @property
    def remaining(self) -> float | None:
        """Estimated seconds left, or None before the first task ends; by rows, since tasks differ in size."""
        done, total, found = self.measure
        return self.seconds * max(total - done, 0) / (done - found) if done > found else None

    @property
    def measure(self) -> tuple[int, int, int]:
        """How much is done, of how much, and how much of that was found: rows, or tasks where rows are not counted."""
        if self.total_rows:
            return self.rows, self.total_rows, self.found[1]
        return self.done, self.total, self.found[0]


Reporter = Callable[[Event], None]


def silent(event: "Event") -> None:
    """Report nothing."""


class Stage:
    """Send the events of one stage: the announcement, one per advance, and the end.

    Parameters
    ----------
    report
        Where the events go.
    name
        Readable name of the stage.
    total
        Number of tasks.
    total_rows
        Number of rows, 0 for a stage that does not go over rows.
    row_flops
        Floating-point operations that a row takes, 0 where they are not counted.

    Examples
    --------
    >>> seen = []
    >>> with Stage(seen.append, "pass 1: gram", total=2, total_rows=20) as stage:
    ...     stage.advance(rows=10)
    ...     stage.advance(rows=10)
    >>> [event.done for event in seen]
    [0, 1, 2]
    """

    def __init__(self, report: Reporter, name: str, total: int, total_rows: int = 0, row_flops: float = 0.0) -> None:
        self._report = report
        self._state = Event(name, 0, total, 0, total_rows, 0.0, row_flops=row_flops)
        self._started = 0.0

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        self._send()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._state.ended:
            return
        if kind is None:
            self.advance(self._state.total)
        else:
            self._send(message=kind.__name__, stopped=True)

    def advance(self, tasks: int = 1, rows: int = 0) -> None:
        """Report that so many more tasks and rows are finished."""
        state = self._state
        self._send(done=min(state.done + tasks, state.total), rows=state.rows + rows)

    def find(self, tasks: int, rows: int) -> None:
        """Report that so many tasks and rows were finished before, which says nothing about the speed."""
        self._state = replace(self._state, found=(tasks, rows))
        self.advance(tasks, rows)

    def tell(self, dimension: tuple[float, float]) -> None:
        """Have the next event say what the effective dimension lies between."""
        self._state = replace(self._state, dimension=dimension)

    def _send(self, **changes: Any) -> None:
        self._state = replace(self._state, seconds=time.perf_counter() - self._started, **changes)
        self._report(self._state)


class Display:
    """A reporter with something to put away at the end, when a ``with`` block is left; this one shows nothing."""

    def __call__(self, event: Event) -> None:
        """Take an event."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Put everything away; safe to call at any time and more than once."""


def reporter(progress: Reporter | bool | None = None) -> Display:
    """Choose where events go.

    Parameters
    ----------
    progress
        A callable receives every event. None shows a bar when standard error is a terminal and writes log records
        otherwise. True shows plain lines on standard error in the second case. False is silent.
    """
    if isinstance(progress, Display):
        return progress
    if callable(progress):
        return Relay(progress)
    if progress is False:
        return Display()
    if sys.stderr is not None and sys.stderr.isatty():
        return Bar()
    return Lines(sys.stderr if progress else None)


class Relay(Display):
    """Hand every event on to a function."""

    def __init__(self, receive: Reporter) -> None:
        self._receive = receive

    def __call__(self, event: Event) -> None:
        """Hand the event on."""
        self._receive(event)


class Lines(Display):
    """Write the start and the end of each stage, and a line every few seconds in between.

    Parameters
    ----------
    stream
        Where the lines go; without one they become INFO records of the logger ``daskrr.progress``.
    every
        Least number of seconds between two lines within a stage.
    """

    def __init__(self, stream: TextIO | None = None, every: float = 5.0) -> None:
        self._stream = stream
        self._every = every
        self._last = 0.0

    def __call__(self, event: Event) -> None:
        """Write a line about the event if one is due."""
        if event.done == 0 or event.ended or event.seconds - self._last >= self._every:
            self._last = event.seconds
            self._write(describe(event))

    def _write(self, line: str) -> None:
        if self._stream is None:
            LOGGER.info("%s", line)
        else:
            self._stream.write(line + "\n")
            self._stream.flush()


class Bar(Display):
    """Show the running stage as a bar on a terminal and leave one line per finished stage.

    The terminal is given back at the end of every stage, by :meth:`close`, and at the latest when the interpreter
    exits.

    Parameters
    ----------
    console
        Where to draw, standard error by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._live: Progress | None = None
        self._task = TaskID(0)
        self._stage = ""

    def __call__(self, event: Event) -> None:
        """Draw the event."""
        if event.ended:
            self.close()
            self._console.print(describe(event), highlight=False, markup=False)
            return
        live = self._live
        if live is None or event.stage != self._stage:
            live = self._open(event)
        done, total, _ = event.measure
        live.update(self._task, completed=done, total=total, figures=_short(event))

    def close(self) -> None:
        """Take the bar off the terminal."""
        live, self._live = self._live, None
        if live is not None:
            atexit.unregister(self.close)
            live.stop()

    def _open(self, event: Event) -> Progress:
        self.close()
        live = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._stage = event.stage
        self._task = live.add_task(event.stage, total=event.measure[1], figures="")
        # An exit in the middle of a stage must still bring the cursor back.
        atexit.register(self.close)
        self._live = live
        live.start()
        return live


def describe(event: Event) -> str:
    """Put an event into one line of text.

    Examples
    --------
    >>> describe(Event("pass 1: gram", 2, 4, 2000, 4000, 10.0))
    'pass 1: gram, 2/4 tasks, 2,000 rows, 200 rows/s, 10 s left'
    """
    tasks = f"{event.done}/{event.total} tasks"
    rate = [f"{event.rows:,} rows", f"{amount(event.rate)} rows/s"] if event.rows else []
    if event.stopped:
        parts = [f"stopped at {tasks}"]
    elif event.ended:
        parts = [f"done in {duration(event.seconds)}", *rate]
    elif event.remaining is None:
        parts = ["1 task" if event.total == 1 else f"{event.total} tasks"]
        parts += [f"{event.total_rows:,} rows"] if event.total_rows else []
    else:
        parts = [tasks, *rate, f"{duration(event.remaining)} left"]
    parts += [] if event.dimension is None else [f"effective dimension {interval(event.dimension)}"]
    return ", ".join([event.stage, *parts]) + (f" ({event.message})" if event.message else "")


def _short(event: Event) -> str:
    """The figures beside a bar; eighty columns must hold the name, the bar and the elapsed time too."""
    left = "" if event.remaining is None else f"{duration(event.remaining)} left"
    rate = f"{amount(event.rate)} rows/s" if event.rows else ""
    return "  ".join(part for part in (f"{event.done}/{event.total}", rate, left) if part)


def without_infinity(ends: Iterable[tuple[float, float]]) -> list[Any]:
    """Intervals for JSON: None where there is no upper end."""
    return [[low, high if math.isfinite(high) else None] for low, high in ends]


def interval(ends: tuple[float, float | None]) -> str:
    """Two ends with as many decimals as tell them apart, and one more; without an upper end, a lower bound.

    Examples
    --------
    >>> interval((376.2913, 377.3815)), interval((41.52, math.inf)), interval((0.0123, None))
    ('376.3–377.4', 'at least 41.5', 'at least 0.0123')
    """
    low, high = ends
    if high is None or high == math.inf:
        return f"at least {low:,.1f}" if low >= 10.0 else f"at least {low:.3g}"
    decimals = min(max(1 - math.floor(math.log10(max(high - low, 1e-5))), 0), 6)
    return f"{low:,.{decimals}f}–{high:,.{decimals}f}"


def amount(value: float) -> str:
    """Shorten a number to three digits and a suffix.

    Examples
    --------
    >>> amount(1234567)
    '1.23 M'
    """
    for size, suffix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= 0.9995 * size:
            return f"{value / size:#.3g}".rstrip(".") + suffix
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """Write a time span the way people read it.

    Examples
    --------
    >>> duration(0.25), duration(75), duration(7320)
    ('0.25 s', '1 min 15 s', '2 h 02 min')
    """
    if seconds < 9.95:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
