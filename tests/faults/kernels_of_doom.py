"""Kernel functions for jobs that are to be disturbed, imported by drivers and workers."""

import os
import signal
import time
from pathlib import Path

import numpy as np


def gaussian(X, Z, *, seconds=0.0, deadly=None, hanging=None, flag="", log=""):
    """A Gaussian kernel that takes its time; while the file ``flag`` exists it kills its process, or hangs, on a row.

    The row is told by its first feature. How many rows it is asked about is told in the file ``log``.
    """
    time.sleep(seconds)
    if log:
        with Path(log).open("a") as file:
            file.write(f"{len(X)}\n")
    if flag and Path(flag).exists():
        if deadly is not None and (X[:, 0] == deadly).any():
            os.kill(os.getpid(), signal.SIGKILL)
        while hanging is not None and (X[:, 0] == hanging).any() and Path(flag).exists():
            time.sleep(0.1)
    squares = np.sum(X**2, axis=1)[:, None] + np.sum(Z**2, axis=1) - 2.0 * X @ Z.T
    return np.exp(-0.5 * np.maximum(squares, 0.0))


def ones(X, **_parameters):
    return np.ones(len(X))


gaussian.diagonal = ones
