"""Numbered versions of a record in a folder: which are there, what follows what, and which are forgotten."""

import contextlib
import os
import secrets
import time

import numpy as np

from daskrr.storage.record_format import IDENTITY, identity_of

# No name of a record has a plus sign, so nothing below is ever taken for one.
VERSIONS = "+versions"
# Old versions stay until so many have followed and so much time has passed, so that a writer between its link and its
# check still sees them.
KEPT = 16
SECONDS_KEPT = 60.0


def version_of(number: int, identity: str) -> str:
    """What tells a version from any other."""
    return f"{number}-{identity}"


def numbered(path: str, number: int) -> str:
    """Where a version of the record at ``path`` is."""
    return os.path.join(path + VERSIONS, f"{number:012d}")


def numbers_in(folder: str) -> list[int]:
    """Of the versions that are there, in their order."""
    return sorted(int(entry.name) for entry in entries_of(folder) if entry.name.isdecimal())


def entries_of(folder: str) -> list[os.DirEntry[str]]:
    """What a folder holds, in the order of names; nothing if it is not there."""
    try:
        return sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:
        return []


def identity_at(path: str) -> str:
    """Of the frame in a file."""
    with open(path, "rb", buffering=0) as file:
        return identity_of(np.frombuffer(file.read(IDENTITY.stop), np.uint8))


def follows(predecessor: str, identity: str) -> bool:
    """Whether the version before is there.

    They are removed from the lowest on. If it is gone, our number may have been taken, followed and removed long ago,
    and what we linked is no successor of anything.
    """
    try:
        return identity_at(predecessor) == identity
    except FileNotFoundError:
        return False


def forget_old(path: str, newest: int) -> None:
    """Remove old versions from the lowest on; the first is emptied, since its name says that the record was created."""
    young = time.time() - SECONDS_KEPT
    for number in numbers_in(path + VERSIONS):
        old = numbered(path, number)
        with contextlib.suppress(FileNotFoundError):
            about = os.stat(old)
            if number == 1 and not about.st_size:
                continue
            if number > newest - KEPT or about.st_mtime > young:
                return
            if number > 1:
                os.unlink(old)
            else:
                _empty(old)


def _empty(path: str) -> None:
    temporary = f"{path}+{secrets.token_hex(8)}"
    with open(temporary, "xb"):
        os.replace(temporary, path)
