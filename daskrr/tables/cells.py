"""Cells of a column of a table, as Arrow arrays: which have no value, and which numbers or moments the others spell."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

# How tables spell that there is no value, in lower case; in a column of numbers or dates some more words do.
MISSING = ("", "na", "n/a", "#n/a", "nan", "null", "?")
MISSING_NUMBER = (*MISSING, "none", "-", "--", ".", "missing", "unknown")
NUMBER = r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$"
TRUTHS = ("false", "no", "true", "yes")
TIME_OF_DAY = r"^([01]?\d|2[0-3]):[0-5]\d(:[0-5]\d(\.\d+)?)?$"
LEADING_ZEROS = r"^0\d+$"
DAY_SECONDS = 86_400.0


def is_text(cells: Any) -> bool:
    """Whether an Arrow type is one of texts."""
    kind = cells.value_type if pa.types.is_dictionary(cells) else cells
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def texts(cells: Any, missing: tuple[str, ...] = MISSING) -> Any:
    """Texts without spaces around them; null where there is no value."""
    trimmed = pc.utf8_trim_whitespace(cells.cast(pa.string()))
    return pc.if_else(pc.is_in(pc.utf8_lower(trimmed), pa.array(missing)), None, trimmed)


def numbers(cells: Any) -> Any:
    """Numbers (Arrow, of their own type); null where there is no value.

    Raises
    ------
    ArrowInvalid
        A text is no number, or the cells are something else.
    """
    if is_text(cells.type):
        cells = texts(cells, MISSING_NUMBER).cast(pa.float64())
    elif pa.types.is_decimal(cells.type):
        cells = cells.cast(pa.float64())
    _check_kind(cells, "number", pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    return pc.if_else(pc.is_nan(cells), None, cells) if pa.types.is_floating(cells.type) else cells


def truths(cells: Any) -> Any:
    """True or false (Arrow); null where there is no value.

    Raises
    ------
    ArrowInvalid
        A text is none of the words for them, or the cells are something else.
    """
    if is_text(cells.type):
        words = texts(cells, MISSING_NUMBER)
        found = pc.index_in(pc.utf8_lower(words), pa.array(TRUTHS))
        _check_words(words, found.is_valid(), "neither true nor false")
        # The first two are false.
        return pc.greater_equal(found, 2)
    _check_kind(cells, "truth value", pa.types.is_boolean)
    return cells


def days(cells: Any) -> Any:
    """Days since 1970 (Arrow, float64) of dates and times; null where there is no value.

    Raises
    ------
    ArrowInvalid
        A text is no date as ISO 8601 writes it, or the cells are something else.
    """
    if is_text(cells.type):
        cells = _moments(texts(cells, MISSING_NUMBER))
    _check_kind(cells, "date", pa.types.is_date, pa.types.is_timestamp)
    moments = cells.cast(pa.timestamp("us"), safe=False)
    return pc.divide(moments.cast(pa.int64()).cast(pa.float64()), 1e6 * DAY_SECONDS)


def _moments(words: Any) -> Any:
    try:
        return words.cast(pa.timestamp("us"))
    except pa.ArrowInvalid:  # they may name a zone
        return words.cast(pa.timestamp("us", "UTC"))


def day_shares(cells: Any) -> Any:
    """Times of day as shares of a day (Arrow, float64); null where there is no value.

    Raises
    ------
    ArrowInvalid
        A text is no time of day, or the cells are something else.
    """
    if not is_text(cells.type):
        _check_kind(cells, "time of day", pa.types.is_time)
        return pc.divide(cells.cast(pa.time64("us")).cast(pa.int64()).cast(pa.float64()), 1e6 * DAY_SECONDS)
    words = texts(cells, MISSING_NUMBER)
    _check_words(words, pc.match_substring_regex(words, TIME_OF_DAY), "no time of day")
    return pa.array([_clock(one) for one in words.to_pylist()], pa.float64())


def _check_kind(cells: Any, what: str, *kinds: Callable[[Any], bool]) -> None:
    if not any(is_kind(cells.type) for is_kind in kinds):
        raise pa.ArrowInvalid(f"{cells.type} is no {what}")


def _check_words(words: Any, are: Any, told: str) -> None:
    wrong = pc.and_(words.is_valid(), pc.invert(pc.fill_null(are, False)))
    if pc.any(wrong).as_py():
        raise pa.ArrowInvalid(f"{words.filter(wrong)[0].as_py()!r} is {told}")


def _clock(text: str | None) -> float | None:
    if text is None:
        return None
    hours, minutes, *seconds = map(float, text.split(":"))
    return (3600 * hours + 60 * minutes + sum(seconds)) / DAY_SECONDS


def without_gaps(cells: Any, dtype: Any = None) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Values as NumPy has them, with zeros where there are none, and where that is."""
    gaps = cells.is_null().to_numpy(zero_copy_only=False)
    values = pc.fill_null(cells, False if pa.types.is_boolean(cells.type) else 0) if gaps.any() else cells
    found = values.to_numpy(zero_copy_only=False)
    return (found if dtype is None else found.astype(dtype)), gaps
