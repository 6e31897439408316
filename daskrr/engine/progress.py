"""One stream of events that every display of a running computation is fed from.

A computation announces its stages with :class:`Stage`, which sends an :class:`Event` to one callable, the
reporter. Bars, log lines and anything a caller writes are all reporters, so the engine knows none of them.
"""

import atexit
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

LOGGER = logging.getLogger("daskrr.progress")


@dataclass(frozen=True)
class Event:
    """State of one stage at one moment.

    Parameters
    ----------
    stage : str
        Readable name of the stage, such as ``"pass 1 gram"``.
    done, total : int
        Blocks finished and blocks in the stage. ``done=0`` announces a stage, ``done=total`` ends it.
    rows, total_rows : int
        Rows finished and rows in the stage; ``total_rows=0`` for a stage that does not go over rows.
    seconds : float
        Time since the stage was announced.
    message : str, optional
        Anything worth telling beside the numbers.
    stopped : bool, optional
        Whether the stage ends here without being complete, after an error or an interrupt.
    """

    stage: str
    done: int
    total: int
    rows: int
    total_rows: int
    seconds: float
    message: str = ""
    stopped: bool = False

    @property
    def ended(self) -> bool:
        """Whether no further event of this stage follows."""
        return self.stopped or self.done >= self.total

    @property
    def rate(self) -> float:
        """Rows per second so far, 0 before the first block."""
        return self.rows / self.seconds if self.seconds > 0 else 0.0

    @property
    def remaining(self) -> float | None:
        """Estimated seconds left, or None before the first block."""
        if self.done <= 0:
            return None
        return self.seconds * max(self.total - self.done, 0) / self.done


Reporter = Callable[[Event], None]


class Stage:
    """Send the events of one stage: the announcement, one per advance, and the end.

    Parameters
    ----------
    report : Reporter
        Where the events go.
    name : str
        Readable name of the stage.
    total : int
        Number of blocks.
    total_rows : int, optional
        Number of rows, 0 for a stage that does not go over rows.

    Examples
    --------
    >>> seen = []
    >>> with Stage(seen.append, "pass 1 gram", total=2, total_rows=20) as stage:
    ...     stage.advance(rows=10)
    ...     stage.advance(rows=10)
    >>> [event.done for event in seen]
    [0, 1, 2]
    """

    def __init__(self, report: Reporter, name: str, total: int, total_rows: int = 0) -> None:
        self._report = report
        self._name = name
        self._total = total
        self._total_rows = total_rows
        self._done = 0
        self._rows = 0
        self._started = 0.0
        # Blocks may finish on several threads; a reporter is never called twice at the same time.
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        with self._lock:
            self._send()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            if self._done >= self._total:
                return
            if kind is None:
                self._done = self._total
                self._send()
            else:
                self._send(message=kind.__name__, stopped=True)

    def advance(self, blocks: int = 1, rows: int = 0, message: str = "") -> None:
        """Report that more blocks are finished.

        Parameters
        ----------
        blocks, rows : int, optional
            What was finished since the last call.
        message : str, optional
            Anything worth telling beside the numbers.
        """
        with self._lock:
            self._done = min(self._done + blocks, self._total)
            self._rows += rows
            self._send(message)

    def _send(self, message: str = "", stopped: bool = False) -> None:
        seconds = time.perf_counter() - self._started
        done, rows = self._done, self._rows
        self._report(Event(self._name, done, self._total, rows, self._total_rows, seconds, message, stopped))


class Display:
    """A reporter with something to put away at the end; this one shows nothing.

    Calling it takes an event. Leaving a ``with`` block closes it.
    """

    def __call__(self, event: Event) -> None:
        """Take an event."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Put everything away; safe to call at any time and more than once."""


def reporter(progress: Reporter | bool | None = None) -> Display:
    """Choose where events go.

    Parameters
    ----------
    progress : callable, bool or None
        A callable receives every event. None shows a bar when standard error is a terminal and writes log
        records otherwise. True shows plain lines on standard error in the second case. False is silent.

    Returns
    -------
    Display
        To be called with events, and closed or used as a context manager.
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
    """Hand every event on to a function.

    Parameters
    ----------
    receive : callable
        Takes an :class:`Event`.
    """

    def __init__(self, receive: Reporter) -> None:
        self._receive = receive

    def __call__(self, event: Event) -> None:
        """Hand the event on."""
        self._receive(event)


class Lines(Display):
    """Write the start and the end of each stage, and a line every few seconds in between.

    Parameters
    ----------
    stream : text stream, optional
        Where the lines go; without one they become INFO records of the logger ``daskrr.progress``.
    every : float, optional
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

    Parameters
    ----------
    console : rich.console.Console, optional
        Where to draw, standard error by default.

    Notes
    -----
    The terminal is given back at the end of every stage, by :meth:`close`, on leaving a ``with`` block, and
    at the latest when the interpreter exits.
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
        live.update(self._task, completed=event.done, total=event.total, figures=_short(event))

    def close(self) -> None:
        """Take the bar off the terminal; safe to call at any time and more than once."""
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
        self._task = live.add_task(event.stage, total=event.total, figures="")
        # An exit in the middle of a stage must still bring the cursor back.
        atexit.register(self.close)
        self._live = live
        live.start()
        return live


def describe(event: Event) -> str:
    """Put an event into one line of text.

    Parameters
    ----------
    event : Event

    Returns
    -------
    str

    Examples
    --------
    >>> describe(Event("pass 1 gram", 2, 4, 2000, 4000, 10.0))
    'pass 1 gram, 2/4 blocks, 2,000 rows, 200 rows/s, 10 s left'
    """
    note = f" ({event.message})" if event.message else ""
    if event.stopped:
        return f"{event.stage}, stopped at {event.done}/{event.total} blocks{note}"
    if event.ended:
        rows = f", {event.rows:,} rows, {amount(event.rate)} rows/s" if event.rows else ""
        return f"{event.stage}, done in {duration(event.seconds)}{rows}{note}"
    if event.done == 0:
        rows = f", {event.total_rows:,} rows" if event.total_rows else ""
        return f"{event.stage}, {_blocks(event.total)}{rows}{note}"
    return f"{event.stage}, {_figures(event)}{note}"


def _figures(event: Event) -> str:
    parts = [f"{event.done}/{event.total} blocks"]
    if event.rows:
        parts += [f"{event.rows:,} rows", f"{amount(event.rate)} rows/s"]
    if event.remaining is not None:
        parts.append(f"{duration(event.remaining)} left")
    return ", ".join(parts)


def _short(event: Event) -> str:
    # Eighty columns must hold the name, the bar and the elapsed time beside this.
    left = "" if event.remaining is None else f"{duration(event.remaining)} left"
    rate = f"{amount(event.rate)} rows/s" if event.rows else ""
    return "  ".join(part for part in (f"{event.done}/{event.total}", rate, left) if part)


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"


def amount(value: float) -> str:
    """Shorten a number to three digits and a suffix.

    Parameters
    ----------
    value : float

    Returns
    -------
    str

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

    Parameters
    ----------
    seconds : float

    Returns
    -------
    str

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
