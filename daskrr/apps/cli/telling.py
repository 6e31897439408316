"""What a command tells: its result on standard output, everything else on standard error, and how it failed."""

import json
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any

import click
import distributed
from distributed.comm.core import CommClosedError

from daskrr import errors
from daskrr.errors import printable
from daskrr.storage.urls import redact

# The first class that fits decides; whatever is not listed is a failed run.
_EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (errors.OutputExists, 4),
    (errors.LeaseHeld, 5),
    (errors.LeaseLost, 5),
    (errors.InvalidParameter, 2),
    (errors.InvalidData, 2),
    (errors.NotCertified, 2),
    (errors.SourceUnreachable, 3),
    (errors.StoreFailed, 3),
    (errors.DoesNotFit, 3),
    (distributed.KilledWorker, 3),
    (CommClosedError, 3),
    (CancelledError, 3),
)


def failure(error: Exception) -> tuple[str, int]:
    """Describe a failure and give its exit code."""
    code = next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), 1)
    notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
    if isinstance(error, errors.DaskrrError):
        return str(error), code
    return printable(redact(f"{type(error).__name__}: {error}{notes} (add --debug to see where)")), code


def trace(error: Exception) -> str:
    """Where a failure came from, without secrets; lines stay lines."""
    return printable(redact("".join(traceback.format_exception(error))), keep="\n")


def emit(result: Any, as_json: bool, describe: Callable[[Any], str]) -> None:
    """Write a result to standard output, as JSON, which is plain ASCII, or in words."""
    click.echo(json.dumps(result) if as_json else describe(_printable(result)))


def _printable(value: Any) -> Any:
    """A result whose texts are one line each, so that only :mod:`daskrr.apps.text` makes lines of them."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {_printable(name): _printable(one) for name, one in value.items()}
    return [_printable(one) for one in value] if isinstance(value, (list, tuple)) else value


def silence(line: str) -> None:
    """Print nothing."""


class _Teller(logging.Handler):
    """Write what is logged to standard error, and nothing twice."""

    def __init__(self) -> None:
        super().__init__()
        self._told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Write the message unless it was written before."""
        line = printable(redact(record.getMessage()))
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
