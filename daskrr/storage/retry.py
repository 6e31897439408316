"""Stores and networks fail for a moment: what may pass is tried again, with longer and longer pauses.

There is one policy, for records and arrays, on files and on S3, and one way to say that it did not help.
"""

import errno
import logging
import random
import re
import time
from collections.abc import Callable
from typing import TypeVar

from daskrr.errors import DaskrrError, MissingChunks, StoreFailed
from daskrr.storage.urls import redact

log = logging.getLogger("daskrr")

PAUSES = (0.1, 0.3, 0.8, 2.0)
# That something is not there is probably true, and should be told soon.
PAUSES_IF_ABSENT = (0.1, 0.3)
# No pause makes room on a disk or opens a locked door.
FULL = {errno.ENOSPC, errno.EDQUOT}
FINAL = FULL | {
    errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP,
}  # fmt: skip
ABSENT = (MissingChunks, FileNotFoundError, KeyError)
# Requests that time out, are under way elsewhere, or are too many at once; all other refusals stay what they are.
PASSING_REFUSALS = {"408", "409", "412", "425", "429"}
REFUSED = re.compile(r"status code: (4\d\d)")
ROOM = "Make room and run the same line again: it goes on where it was."
# Of its own, so that the caller's random numbers stay as they are.
JITTER = random.SystemRandom()

T = TypeVar("T")


def patiently(operation: Callable[[], T], what: str) -> T:
    """Do ``operation``, again and again within a few seconds if it fails; then its last error is raised.

    It must do no harm if it is done twice. ``what`` tells in the log what was tried: "read rows 0–99 of …".
    """
    tried = 0
    while True:
        try:
            return operation()
        except Exception as error:  # codecs, stores and networks raise errors of many kinds
            pauses = _pauses_after(error)
            if tried >= len(pauses):
                raise
            log.warning("cannot %s, trying again: %s", what, reason(error))
        time.sleep(pauses[tried] * JITTER.uniform(0.5, 1.0))
        tried += 1


def insist(operation: Callable[[], T], what: str) -> T:
    """Do ``operation`` as :func:`patiently` does.

    Raises
    ------
    StoreFailed
        It did not help; the message says what was tried, what went wrong, and what to do about a full disk.
    """
    try:
        return patiently(operation, what)
    except DaskrrError:
        raise
    except Exception as error:
        raise failure(what, error) from None


def failure(what: str, error: Exception, needs: str = "") -> StoreFailed:
    """The error to raise for a store that failed for good; ``needs`` tells how much room would do."""
    code = getattr(error, "errno", None)
    found = f"the disk is full ({reason(error)}). {needs}{ROOM}" if code in FULL else reason(error)
    failed = StoreFailed(f"cannot {what}: {found}")
    failed.errno = code
    return failed


def reason(error: Exception) -> str:
    """What went wrong, in a few words; the answer of a store may quote the request and its key, and is cut short."""
    text = str(getattr(error, "strerror", None) or error)
    status = re.search(r"status code: (\d+[\w ]*)", text)
    code = re.search(r"<Code>(\w+)</Code>", text)
    if status:
        return f"{status[1].strip()} ({code[1]})" if code else status[1].strip()
    found, kind = redact(text.partition("\n")[0])[:300], type(error).__name__
    return (found if isinstance(error, OSError) else f"{kind}: {found}") if found else kind


def _pauses_after(error: Exception) -> tuple[float, ...]:
    refused = REFUSED.search(str(error))
    if isinstance(error, ABSENT):
        return PAUSES_IF_ABSENT
    final = isinstance(error, (DaskrrError, MemoryError)) or getattr(error, "errno", None) in FINAL
    return () if final or (refused and refused[1] not in PASSING_REFUSALS) else PAUSES
