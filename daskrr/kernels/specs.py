"""Kernels from their descriptions."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from typing import Any, cast

from daskrr.errors import InvalidParameter
from daskrr.kernels.base import Kernel, Product, Scaled, Sum
from daskrr.kernels.bernoulli import Bernoulli
from daskrr.kernels.distance import Laplacian
from daskrr.kernels.dot import Cosine, Linear, Polynomial
from daskrr.kernels.function import Function, import_function
from daskrr.kernels.radial import Gaussian, Matern

_LEAVES: list[type[Kernel]] = [Linear, Gaussian, Laplacian, Matern, Polynomial, Cosine, Bernoulli]
_OTHERS: list[type[Kernel]] = [Scaled, Sum, Product, Function]
KINDS: dict[str, type[Kernel]] = {kind.name: kind for kind in _LEAVES + _OTHERS}
"""Every kernel class by the name its specs carry."""


def from_spec(spec: Mapping[str, Any], allow_functions: Collection[str] = ()) -> Kernel:
    """Make a kernel from the description that `Kernel.to_spec` gives.

    Parameters
    ----------
    spec
        The description.
    allow_functions
        Names ``"package.module:function"`` which the description may import and call.

    Raises
    ------
    InvalidParameter
        If the description is not one of a kernel, or names a function that is not allowed.

    Examples
    --------
    >>> from_spec({"kernel": "matern", "length_scale": 2.0, "nu": 0.5})
    Matern(length_scale=2.0, nu=0.5)
    """
    if not isinstance(spec, Mapping):
        raise InvalidParameter(f"a kernel spec is a mapping with the key 'kernel', not {spec!r}")
    values = dict(spec)
    kind = values.pop("kernel", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise InvalidParameter(f"unknown kernel {kind!r}: choose one of {', '.join(KINDS)}")
    known = {f.name: f for f in fields(cast(Any, KINDS[kind]))}
    if unknown := [key for key in values if key not in known]:
        raise InvalidParameter(f"kernel {kind!r} has no parameter {unknown[0]!r}, only {', '.join(known)}")
    for key, parameter in known.items():
        if key not in values and parameter.default is MISSING and parameter.default_factory is MISSING:
            raise InvalidParameter(f"kernel {kind!r} needs the parameter {key!r}")
    return KINDS[kind](**{key: _parsed(key, value, allow_functions) for key, value in values.items()})


def as_kernel(obj: Kernel | Mapping[str, Any] | Callable[..., Any], allow_functions: Collection[str] = ()) -> Kernel:
    """Make a kernel from a kernel, a description of one, or an importable function.

    Parameters
    ----------
    obj
        A kernel, a spec, or a function of (m, d) and (p, d) rows.
    allow_functions
        Names ``"package.module:function"`` which a spec may import and call.

    Raises
    ------
    InvalidParameter
        If it is none of these.

    Examples
    --------
    >>> as_kernel({"kernel": "linear"})
    Linear()
    """
    if isinstance(obj, Kernel):
        return obj
    if isinstance(obj, Mapping):
        return from_spec(obj, allow_functions)
    if isinstance(obj, type) or not callable(obj):
        raise InvalidParameter(f"{obj!r} is not a kernel, a kernel spec or a function of two sets of rows")
    return Function(obj)


def _parsed(key: str, value: Any, allow_functions: Collection[str]) -> Any:
    """Make a parameter from its JSON value: kernels and functions inside a spec are described, too."""
    if key == "part":
        return from_spec(value, allow_functions)
    if key == "parts":
        if not isinstance(value, list | tuple):
            raise InvalidParameter(f"parts must be a list of kernel specs, not {value!r}")
        return tuple(from_spec(part, allow_functions) for part in value)
    if key == "function":
        if not isinstance(value, str) or value.count(":") != 1:
            raise InvalidParameter(f"function must be named 'package.module:function', not {value!r}")
        if value not in allow_functions:
            raise InvalidParameter(f"the kernel would import {value!r}: list it in allow_functions to allow this")
        return import_function(value)
    return value
