"""Processes that end or stop just before one of their changes of a folder, as if the power had gone at that moment.

As a program: ``exits.py NUMBER FOLDER ...`` ends before its n-th change, ``exits.py PATTERN FOLDER ...`` is stopped
before the first one that gives a file a name in which the pattern is found.
"""

import itertools
import os
import re
import signal
import sys
from typing import Any

EXIT = 99
WRITES = os.O_WRONLY | os.O_RDWR
# Python tells of each just before it does it, so that a process can end before and after every one of them.
CHANGES = {"os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir"}


def exit_before(number: int, folder: str) -> None:
    """End this process, without a goodbye, before the n-th time that it changes something in a folder."""
    count = itertools.count()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if _changes(event, arguments, folder) and next(count) == number:
            os._exit(EXIT)

    sys.addaudithook(hook)


def stop_before(pattern: str, folder: str) -> None:
    """Stop this process before it first gives a file in a folder a name in which a pattern is found."""
    done = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        named = event in ("os.rename", "os.link") and _is_below(arguments[1], folder)
        if named and not done and re.search(pattern, os.fspath(arguments[1])):
            done.append(event)
            os.kill(os.getpid(), signal.SIGSTOP)

    sys.addaudithook(hook)


def _changes(event: str, arguments: tuple[Any, ...], folder: str) -> bool:
    if event == "open":
        return bool(arguments[2] & WRITES) and _is_below(arguments[0], folder)
    # Whole folders are deleted by names that are relative to a handle.
    return event in CHANGES and (_is_below(arguments[0], folder) or (event == "os.remove" and arguments[1] != -1))


def _is_below(path: Any, folder: str) -> bool:
    return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(folder)


if __name__ == "__main__":
    if sys.argv[1].isdecimal():
        exit_before(int(sys.argv[1]), sys.argv[2])
    else:
        stop_before(sys.argv[1], sys.argv[2])
    from daskrr.apps.cli import main

    main(sys.argv[3:], prog_name="daskrr")
