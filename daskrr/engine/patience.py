"""Stores and networks fail for a moment: what may pass is tried again, with longer and longer pauses."""

import errno
import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from daskrr.errors import DaskrrError, MissingChunks

log = logging.getLogger("daskrr")

PAUSES = (0.1, 0.3, 0.8, 2.0)
# That something is not there is probably true, and should be told soon.
PAUSES_IF_ABSENT = (0.1, 0.3)
# No pause makes room on a disk or opens a locked door.
FINAL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR}
ABSENT = (MissingChunks, FileNotFoundError, KeyError)
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
            log.warning("cannot %s, trying again: %s", what, type(error).__name__)
        time.sleep(pauses[tried] * JITTER.uniform(0.5, 1.0))
        tried += 1


def _pauses_after(error: Exception) -> tuple[float, ...]:
    if isinstance(error, ABSENT):
        return PAUSES_IF_ABSENT
    final = isinstance(error, (DaskrrError, MemoryError)) or getattr(error, "errno", None) in FINAL
    return () if final else PAUSES
