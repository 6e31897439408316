"""How many scores there are of each size, by which quantiles of any number of rows are known to a few per cent."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PER_DECADE = 40
DECADES = 14
# Upper ends of all classes but the last; the first holds whatever is smaller, zero too.
ENDS = 10.0 ** (np.arange(1 - PER_DECADE * DECADES, 1) / PER_DECADE)
CLASSES = len(ENDS) + 1


def count(scores: NDArray[np.float64]) -> NDArray[np.int64]:
    """How many of the scores, all within [0, 1], are in each class."""
    return np.bincount(np.searchsorted(ENDS, scores), minlength=CLASSES)


def quantiles(counts: NDArray[np.int64], levels: Sequence[float]) -> list[float] | None:
    """Upper ends of the classes that the quantiles are in: not below these, and less than 6 % above; None of no rows.

    Examples
    --------
    >>> quantiles(count(np.linspace(0.0, 1.0, 1001)), [0.5])
    [0.5011872336272722]
    """
    total = int(counts.sum())
    if not total:
        return None
    places = np.searchsorted(np.cumsum(counts), np.maximum(np.array(levels) * total, 1.0))
    return np.minimum(np.append(ENDS, 1.0)[places], 1.0).tolist()


# Octaves below 1 that :func:`octaves` tells apart; the first holds whatever is smaller, the last whatever is larger.
OCTAVES = 40


def octaves(values: NDArray) -> NDArray[np.int64]:
    """How many of the values are in each octave from 2^-k up to 2^(1-k), the smallest first.

    Coarser than :func:`count` and an order of magnitude faster: to look at while rows pass by.

    Examples
    --------
    >>> octaves(np.array([1.0, 0.6, 0.5, 0.3, 1e-30, 0.0]))[-3:]
    array([0, 1, 3])
    """
    exponents = np.frexp(np.maximum(values, 2.0**-OCTAVES))[1]
    return np.bincount(np.minimum(exponents + OCTAVES - 1, OCTAVES - 1), minlength=OCTAVES)
