"""An interrupt, or a request to end, stops a command for certain."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(KeyboardInterrupt):
    """Someone asked the process to end."""


@contextmanager
def sure_interrupts() -> Iterator[None]:
    """Let an interrupt, or a request to end, stop the command for certain.

    Raised while Python runs a finalizer, it would be printed and forgotten, and the job would go on. It is put off
    until the finalizer has ended.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    reasons = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated}
    reason: list[type[KeyboardInterrupt]] = [KeyboardInterrupt]

    def stop(number: int, frame: FrameType | None) -> None:
        reason[0] = reasons.get(signal.Signals(number), reason[0])
        signal.setitimer(signal.ITIMER_REAL, 0.01 if _in_finalizer(frame) else 0.0)
        if not _in_finalizer(frame):
            raise reason[0]

    before = {number: signal.signal(number, stop) for number in (*reasons, signal.SIGALRM)}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_finalizer(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_globals.get("__name__") in ("weakref", "_weakrefset"):
            return True
        frame = frame.f_back
    return False
