"""Named failures of daskrr.

Every failure a user can cause or cure has its own class here. Each one also inherits the built-in
exception that Python code would expect in its place, and says what was asked, what was found and what
to do about it.
"""

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any


def printable(text: str, keep: str = "") -> str:
    """Text that does nothing where it is shown: what is not printed becomes its Python escape.

    So do control characters, line breaks, marks that turn the direction of writing, and halves of characters, but for
    those in ``keep``. Text that comes from elsewhere must not be written to a terminal, a log or a page without it.

    Examples
    --------
    >>> print(printable("a\x1b[2Jb\\nc"))
    a\\x1b[2Jb\\nc
    """
    return "".join(one if one.isprintable() or one in keep else ascii(one)[1:-1] for one in text)


class DaskrrError(Exception):
    """Base class of every failure that daskrr raises on purpose.

    Its text is one line for every argument, whatever the paths, names and messages in them hold.
    """

    def __str__(self) -> str:
        return "\n  ".join(printable(str(line)) for line in self.args)


class InvalidParameter(DaskrrError, ValueError):
    """An argument is outside its range, or two arguments contradict each other."""


class InvalidData(DaskrrError, ValueError):
    """The input rows cannot be used: wrong shape or dtype, NaN or infinity, unreadable chunks."""


class UnreadableData(InvalidData):
    """A chunk of the input cannot be read: it is damaged, or its store cannot be reached."""


class MissingChunks(InvalidData):
    """Chunks of the input were never written; Zarr would read them as fill values."""


class SourceChanged(DaskrrError, RuntimeError):
    """The input changed between two passes, so the scores would belong to no data set at all."""


class SourceUnreachable(DaskrrError, OSError):
    """A worker cannot open the input, or runs without daskrr or with another version of it."""


class PoisonBlock(SourceUnreachable):
    """A task ends every worker that it runs on, or does not end itself; what else there was to do is done and kept."""


class KernelNotPositive(DaskrrError, ArithmeticError):
    """The kernel matrix of the landmarks has a negative eigenvalue beyond round-off."""


class RidgeTooSmall(DaskrrError, ArithmeticError):
    """Round-off would decide the scores: the ridge is below what this dtype resolves."""


class DoesNotFit(DaskrrError, MemoryError):
    """The plan needs more memory than the workers have."""


class OutputExists(DaskrrError, FileExistsError):
    """The output exists and was not asked to be replaced, or is not ours to replace."""


class InputGrown(OutputExists):
    """The input of finished scores has more rows now."""


class NotCertified(DaskrrError, RuntimeError):
    """An interval was asked of a result that was computed without one."""


class StoreFailed(DaskrrError, OSError):
    """The storage of a job refused to read or write, is full, or did not answer after several tries."""


class DamagedRecord(DaskrrError, RuntimeError):
    """A record of a job is gone, truncated, changed, another one, or not a record at all; it is computed again."""

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message, name)
        self.name = name

    def __str__(self) -> str:
        return str(self.args[0])


class LeaseHeld(DaskrrError, RuntimeError):
    """Another job that may still be running writes to this output."""


class LeaseLost(DaskrrError, RuntimeError):
    """This job no longer owns its output: another one took over, or its heartbeat could not be written in time."""


class CheckFailed(DaskrrError, RuntimeError):
    """A post-condition of the run does not hold; nothing was published."""


# Lists and tables inside one another, of what others wrote; everything here has a few.
MOST_LEVELS = 64


def is_too_deep(value: Any) -> bool:
    """Whether lists and tables are nested deeper than :data:`MOST_LEVELS`, found without recursion."""
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [inner for one in level for inner in _inside(one) if isinstance(inner, (Mapping, list, tuple))]
        if not level:
            return False
    return True


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()


def install(extra: str) -> str:
    """How what is optional is installed: there are checkouts of daskrr only."""
    return f"pip install '.[{extra}]' in a checkout of daskrr"


def check_count(name: str, value: Any) -> int:
    """``value`` as an int of at least 1; raise :class:`InvalidParameter` otherwise."""
    if isinstance(value, bool) or bool(getattr(value, "shape", ())) or not hasattr(value, "__index__") or value < 1:
        raise InvalidParameter(f"{name} must be an int of at least 1, got {value!r}")
    return int(value)


def check_positive(name: str, value: Any) -> float:
    """``value`` as a positive, finite float; raise :class:`InvalidParameter` otherwise."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidParameter(f"{name} must be a number, got {value!r}")
    number = float(value)
    if not (number > 0 and math.isfinite(number)):
        raise InvalidParameter(f"{name} must be positive and finite, got {value!r}")
    return number
