"""Kernels that are functions of the user."""

import copy
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar, cast

import numpy as np

from daskrr.errors import InvalidParameter
from daskrr.kernels.base import Columns, Kernel
from daskrr.kernels.common import Array, as_float64, set_fields
from daskrr.kernels.device import HOST, here, home


@dataclass(frozen=True)
class Function(Kernel):
    """A kernel computed by an importable Python function.

    Parameters
    ----------
    function
        Takes (m, d) and (p, d) float64 rows and the parameters, returns (m, p) kernel values. It may have
        an attribute ``diagonal``, a function of (m, d) rows and the parameters that returns (m,) values. On a GPU it
        is given CuPy arrays and returns one, for which it must say that it can, by a true attribute ``takes_cupy``.
    parameters
        Keyword arguments of the function; JSON values.

    Examples
    --------
    >>> Function(np.inner)([[1.0, 2.0]], [[3.0, 4.0]])
    array([[11.]])
    """

    name: ClassVar[str] = "function"
    function: Callable[..., Any]
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        name = _name_of(self.function)
        if not isinstance(self.parameters, Mapping) or not all(isinstance(k, str) for k in self.parameters):
            raise InvalidParameter(f"parameters of {name} must be a mapping of names, not {self.parameters!r}")
        try:
            # What is evaluated here must be what a spec read elsewhere evaluates.
            set_fields(self, parameters=json.loads(json.dumps(dict(self.parameters), allow_nan=False)))
        except (TypeError, ValueError) as error:
            raise InvalidParameter(f"parameters of {name} must be JSON values: {error}") from None

    def to_spec(self) -> dict[str, Any]:
        parameters = copy.deepcopy(self.parameters)
        return {"kernel": self.name, "function": _name_of(self.function), "parameters": parameters}

    @property
    def takes_gpu_arrays(self) -> bool:
        return bool(getattr(self.function, "takes_cupy", False))

    def _matrix(self, X: Array, Z: Array) -> Array:
        return self._checked(self.function(X, Z, **self.parameters), (len(X), len(Z)))

    def _diagonal(self, X: Array) -> Array:
        diagonal = getattr(self.function, "diagonal", None)
        if callable(diagonal):
            return self._checked(diagonal(X, **self.parameters), (len(X),))
        # Small blocks: all but their diagonals is thrown away.
        blocks = [X[start : start + 16] for start in range(0, len(X), 16)]
        return np.concatenate([np.zeros(0), *(np.diagonal(self._matrix(block, block)) for block in blocks)])

    def _columns(self, Z: Array, dtype: np.dtype[Any]) -> Columns:
        return Columns(self._fill, Z.copy())

    def _fill(self, landmarks: Array, X: Array, out: Array) -> None:
        out[...] = self._checked(self.function(as_float64(X), here(landmarks), **self.parameters), out.shape)

    def _checked(self, values: Any, shape: tuple[int, ...]) -> Array:
        array = values if home(values) is not HOST else np.asarray(values)
        name = _name_of(self.function)
        if array.shape != shape:
            raise InvalidParameter(f"{name} returned values of shape {array.shape} instead of {shape}")
        if array.dtype.kind not in "biuf":
            raise InvalidParameter(f"{name} returned {array.dtype} instead of real numbers")
        return as_float64(array)


def import_function(name: str) -> Callable[..., Any]:
    """Import what the name ``"package.module:function"`` stands for."""
    module, _, path = name.partition(":")
    try:
        function = attrgetter(path)(importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidParameter(f"{name!r} cannot be imported: {error}") from error
    if not callable(function):
        raise InvalidParameter(f"{name!r} is not a function")
    return cast(Callable[..., Any], function)


def _name_of(function: Any) -> str:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not callable(function) or not module or not name or "<" in name or module == "__main__":
        raise InvalidParameter(
            f"{function!r} has no name to import it by: define it at the top of an importable module"
        )
    full = f"{module}:{name}"
    if import_function(full) is not function:
        raise InvalidParameter(f"{full} is another object than {function!r}: workers would import the wrong one")
    return full
