"""An interrupt, or a request to end, stops a command for certain, and soon."""

import _thread
import importlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, NamedTuple, NoReturn

SECONDS_UNTIL_AGAIN = 0.01
# Workers, stores and schedulers that take longer to close are not waited for.
SECONDS_TO_END = 8.0


class Terminated(KeyboardInterrupt):
    """Someone asked the process to end."""


# SIGBREAK is what Windows has for the key beside the interrupt key, and for a console that is closed.
REASONS = {"SIGINT": KeyboardInterrupt, "SIGTERM": Terminated, "SIGBREAK": Terminated}
ENDINGS: dict[type[BaseException], tuple[str, int]] = {
    KeyboardInterrupt: ("daskrr: interrupted", 130),
    Terminated: ("daskrr: terminated", 143),
}


class Note(NamedTuple):
    """A signal that came, the time to end after it, and whether it is to be sent again."""

    number: int
    seconds: float = SECONDS_TO_END
    again: bool = False


Notes = SimpleQueue[Note | None]  # None at the end
_notes: Notes | None = None


@contextmanager
def sure_interrupts() -> Iterator[None]:
    """Let an interrupt, or a request to end, stop the command for certain.

    Raised while Python runs a finalizer or collects garbage, it would be printed and forgotten, and the job would go
    on. A thread sends such a one again. The first starts a clock, and those that follow change nothing: what has not
    ended by itself when it runs out is ended as a kill would, which jobs survive.
    """
    global _notes
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reasons, outer, notes, print_ignored = _reasons(), _notes, Notes(), sys.unraisablehook
    stopping: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        notes.put(Note(number))
        if not stopping:
            stopping.append(number)
            raise reasons[number]

    def hear_ignored(ignored: Any) -> None:
        if stopping and issubclass(ignored.exc_type, KeyboardInterrupt):
            notes.put(Note(stopping.pop(), again=True))
        else:
            print_ignored(ignored)

    threading.Thread(target=_watch, args=[notes], name="daskrr-interrupts", daemon=True).start()
    sys.unraisablehook = hear_ignored
    _notes, before = notes, {number: signal.signal(number, stop) for number in reasons}
    try:
        yield
    finally:
        _notes = outer
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = print_ignored
        notes.put(None)


@contextmanager
def held_interrupts(seconds: float = SECONDS_TO_END) -> Iterator[list[int]]:
    """Put interrupts off until the block ends, and give those that came: what is half started cannot be stopped.

    Within :func:`sure_interrupts` the command is ended when it takes longer than some seconds.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def keep(number: int, _: FrameType | None) -> None:
        if _notes is not None:
            _notes.put(Note(number, seconds))
        came.append(number)

    found = {number: signal.getsignal(number) for number in _reasons()}
    held = {number: signal.signal(number, keep) for number, handler in found.items() if callable(handler)}
    try:
        yield came
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


@contextmanager
def deaf_children() -> Iterator[None]:
    """Have processes not hear the interrupt key that are started here, or by threads that are started here.

    The key reaches every process of a terminal, and each would print how it was interrupted. On Windows they hear it.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    _start_resource_tracker()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_resource_tracker() -> None:
    """Start the process that clears up behind others, before Python does with its first child, and lets keys through.

    It is not to print what it clears: after an interrupt there is something as a matter of course.
    """
    sys.warnoptions.append("ignore:resource_tracker")
    try:
        importlib.import_module("multiprocessing.resource_tracker").ensure_running()
    finally:
        sys.warnoptions.pop()


def _reasons() -> dict[int, type[KeyboardInterrupt]]:
    return {getattr(signal, name): reason for name, reason in REASONS.items() if hasattr(signal, name)}


def _watch(notes: Notes) -> None:
    """Send signals again that were forgotten, and end the process when the time since the first has run out."""
    first, deadline = 0, math.inf
    while True:
        try:
            note = notes.get(timeout=None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
        except Empty:
            _end_now(first)
        if note is None:
            return
        first = first or note.number
        deadline = min(deadline, time.monotonic() + note.seconds)
        if note.again:
            time.sleep(SECONDS_UNTIL_AGAIN)
            _send(note.number)


def _send(number: Any) -> None:
    if hasattr(signal, "pthread_kill"):  # which also wakes what it is sent to
        signal.pthread_kill(threading.main_thread().ident or 0, number)
    else:
        _thread.interrupt_main(number)


def _end_now(number: int) -> NoReturn:
    """End this process and those that it has started."""
    message, code = ENDINGS[_reasons()[number]]
    psutil = importlib.import_module("psutil")
    with suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
    with suppress(OSError, ValueError):
        print(message, file=sys.stderr, flush=True)
    os._exit(code)
