"""What a command tells: its result on standard output, everything else on standard error, and how it failed."""

import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any

import click
import distributed
from distributed.comm.core import CommClosedError

from daskrr import errors

# The first class that fits decides; whatever is not listed is a failed run.
_EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (errors.OutputExists, 4),
    (errors.LeaseHeld, 5),
    (errors.LeaseLost, 5),
    (errors.InvalidParameter, 2),
    (errors.InvalidData, 2),
    (errors.NotCertified, 2),
    (errors.SourceUnreachable, 3),
    (errors.DoesNotFit, 3),
    (distributed.KilledWorker, 3),
    (CommClosedError, 3),
    (CancelledError, 3),
)


def failure(error: Exception) -> tuple[str, int]:
    """Describe a failure and give its exit code."""
    code = next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), 1)
    if isinstance(error, errors.DaskrrError):
        return str(error), code
    return f"{type(error).__name__}: {error} (add --debug to see where)", code


def emit(result: Any, as_json: bool, describe: Callable[[Any], str]) -> None:
    click.echo(json.dumps(result) if as_json else describe(result))


def silence(line: str) -> None:
    """Print nothing."""


class _Teller(logging.Handler):
    """Write what is logged to standard error, and nothing twice."""

    def __init__(self) -> None:
        super().__init__()
        self._told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Write the message unless it was written before."""
        line = record.getMessage()
        if line not in self._told:
            self._told.add(line)
            click.echo(line, err=True)


@contextmanager
def told(quiet: bool) -> Iterator[None]:
    """Show what the library logs; warnings only where it should be quiet."""
    log, teller = logging.getLogger("daskrr"), _Teller()
    level = log.level
    log.setLevel(logging.WARNING if quiet else logging.INFO)
    log.addHandler(teller)
    try:
        yield
    finally:
        log.removeHandler(teller)
        log.setLevel(level)
