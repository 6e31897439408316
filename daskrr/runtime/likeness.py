"""Whether new rows are made as those were that something was fitted to."""

import warnings

import numpy as np

from daskrr.errors import InvalidData
from daskrr.runtime.rows import NumpyRows, Rows, ZarrRows
from daskrr.tables.features import Features

# Rows of an array in memory that are looked at, and how far from 0 and 1 the mean and spread of standardized ones are.
LOOKED_AT, FAR = 10_000, 30.0


def check_likeness(rows: Rows, known: Features | None, what: str, already_scaled: bool = False) -> None:
    """Refuse a store whose record says that its rows are not made as those of ``what`` were; warn of arrays.

    Arrays have no record. Those in memory are looked at where ``what`` was fitted to standardized rows.

    Raises
    ------
    InvalidData
        The columns or their scaling are not the same, or it is not known.
    """
    if known is None or already_scaled:
        return
    told = known.difference(rows.features) if isinstance(rows, ZarrRows) or rows.features is not None else None
    if told is not None:
        raise InvalidData(
            f"{rows.origin} {told}, unlike the rows that {what} was fitted to. Convert it as those were (daskrr "
            "convert --like), or say that it is already as they are (already_scaled=True, --already-scaled)."
        )
    if rows.features is None and known.is_scaled and isinstance(rows, NumpyRows):
        _warn_of_scale(rows, known, what)


def _warn_of_scale(rows: NumpyRows, known: Features, what: str) -> None:
    values = np.asarray(rows.array[:LOOKED_AT], np.float64)
    with np.errstate(all="ignore"):
        far = np.flatnonzero(np.abs(values).mean(axis=0) > FAR)
    if far.size:
        warnings.warn(
            f"the rows that {what} was fitted to were standardized, and column {known.names[far[0]]!r} of the array "
            f"given is far from that, {np.abs(values[:, far[0]]).mean():.3g} on average: pass rows that were centred "
            "and divided as those were.",
            stacklevel=5,
        )
