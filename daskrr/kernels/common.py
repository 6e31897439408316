"""Checks of parameters and rows, and the arithmetic that several kernels share."""

import math
from numbers import Integral, Real
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from daskrr.errors import InvalidData, InvalidParameter

Array: TypeAlias = NDArray[Any]

# Overflow to infinity and underflow to zero are the right answers for far pairs and huge rows.
quiet = np.errstate(over="ignore", under="ignore", invalid="ignore")


def set_fields(kernel: Any, **values: Any) -> None:
    """Set fields of a frozen dataclass while it is being made."""
    for name, value in values.items():
        object.__setattr__(kernel, name, value)


def checked_number(name: str, value: Any, *, zero: bool = False) -> float:
    """Return a positive finite number, or zero where that is allowed, as a float."""
    if isinstance(value, Real) and not isinstance(value, bool):
        number = float(value)
        if math.isfinite(number) and (number > 0 or (zero and number == 0)):
            return number
    kind = "finite number that is not negative" if zero else "positive finite number"
    raise InvalidParameter(f"{name} must be a {kind}, not {value!r}")


def checked_integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return an integer within inclusive bounds as an int."""
    valid = isinstance(value, Integral) and not isinstance(value, bool)
    if valid and low <= value and (high is None or value <= high):
        return int(value)
    bounds = f"at least {low}" if high is None else f"from {low} to {high}"
    raise InvalidParameter(f"{name} must be an integer {bounds}, not {value!r}")


def as_rows(X: ArrayLike) -> NDArray[np.float64]:
    """Return a real matrix as float64."""
    if isinstance(X, np.ma.MaskedArray) and np.ma.is_masked(X):
        raise InvalidData(f"rows hold {np.ma.count_masked(X)} masked values; drop those rows or fill the values")
    array = np.asarray(X)
    if array.ndim != 2:
        raise InvalidData(f"rows must be a two-dimensional array, not one of shape {array.shape}")
    if array.dtype.kind not in "biuf":
        raise InvalidData(f"rows must be real numbers, not {array.dtype}")
    return as_float64(array)


def as_float64(X: Array) -> NDArray[np.float64]:
    """Return an array as float64, without a copy where it is."""
    return X.astype(np.float64, copy=False)


def contiguous(X: Array) -> Array:
    """Return an array whose rows lie one after the other, without a copy where they do; of any library."""
    return X if X.flags.c_contiguous else X.copy()


def squared_norms(X: Array) -> Array:
    """Return the squared norms of rows, summed in float64."""
    return np.einsum("ij,ij->i", X, X, dtype=np.float64)
