"""Kernels from their names and descriptions."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from typing import Any, cast

from daskrr.errors import MOST_LEVELS, InvalidParameter, is_too_deep
from daskrr.kernels.base import Kernel, Product, Scaled, Sum
from daskrr.kernels.bernoulli import Bernoulli
from daskrr.kernels.common import checked_number
from daskrr.kernels.distance import Laplacian
from daskrr.kernels.dot import Cosine, Linear, Polynomial
from daskrr.kernels.function import Function, import_function
from daskrr.kernels.radial import Gaussian, Matern

_LEAVES: list[type[Kernel]] = [Linear, Gaussian, Laplacian, Matern, Polynomial, Cosine, Bernoulli]
_OTHERS: list[type[Kernel]] = [Scaled, Sum, Product, Function]
KINDS: dict[str, type[Kernel]] = {kind.name: kind for kind in _LEAVES + _OTHERS}
"""Every kernel class by the name its specs carry."""

# What scikit-learn calls some of them, and some of their parameters.
_SYNONYMS = {"rbf": Gaussian.name, "poly": Polynomial.name}
_TRANSLATIONS: dict[str, dict[str, tuple[str, Callable[[float], float]]]] = {
    Gaussian.name: {"gamma": ("length_scale", lambda gamma: math.sqrt(0.5 / gamma))},
    Laplacian.name: {"gamma": ("length_scale", lambda gamma: 1.0 / gamma)},
    Polynomial.name: {"gamma": ("scale", float), "coef0": ("offset", float)},
}


def from_spec(spec: Mapping[str, Any], allow_functions: Collection[str] = ()) -> Kernel:
    """Make a kernel from the description that `Kernel.to_spec` gives, or from one in scikit-learn's words.

    Parameters
    ----------
    spec
        The description. ``"rbf"`` and ``"poly"`` are other names of ``"gaussian"`` and ``"polynomial"``. ``gamma`` of
        these and of ``"laplacian"``, and ``coef0``, are the parameters of :mod:`sklearn.metrics.pairwise`. What is left
        out is as this library has it: the median length scale, not a ``gamma`` of 1/d; degree 2 and scale 1.
    allow_functions
        Names ``"package.module:function"`` which the description may import and call.

    Raises
    ------
    InvalidParameter
        If the description is not one of a kernel, is nested too deep, or names a function that is not allowed.

    Examples
    --------
    >>> from_spec({"kernel": "matern", "length_scale": 2.0, "nu": 0.5})
    Matern(length_scale=2.0, nu=0.5)
    >>> from_spec({"kernel": "rbf", "gamma": 0.125})
    Gaussian(length_scale=2.0)
    """
    _check_depth(spec)
    if not isinstance(spec, Mapping):
        raise InvalidParameter(f"a kernel spec is a mapping with the key 'kernel', not {spec!r}")
    values = dict(spec)
    name = values.pop("kernel", None)
    kind = _SYNONYMS.get(name, name) if isinstance(name, str) else name
    if not isinstance(kind, str) or kind not in KINDS:
        raise InvalidParameter(f"unknown kernel {name!r}: choose one of {', '.join([*KINDS, *_SYNONYMS])}")
    values = _translated(kind, values)
    known = {f.name: f for f in fields(cast(Any, KINDS[kind]))}
    if unknown := [key for key in values if key not in known]:
        raise InvalidParameter(f"kernel {kind!r} has no parameter {unknown[0]!r}, only {', '.join(known)}")
    for key, parameter in known.items():
        if key not in values and parameter.default is MISSING and parameter.default_factory is MISSING:
            raise InvalidParameter(f"kernel {kind!r} needs the parameter {key!r}")
    return KINDS[kind](**{key: _parsed(key, value, allow_functions) for key, value in values.items()})


def as_kernel(
    obj: Kernel | Mapping[str, Any] | str | Callable[..., Any], allow_functions: Collection[str] = ()
) -> Kernel:
    """Make a kernel from a kernel, its name, a description of one, or an importable function.

    Parameters
    ----------
    obj
        A kernel, a name, a spec (see :func:`from_spec`), or a function of (m, d) and (p, d) rows. A name is a spec
        without parameters: ``"gaussian"`` and ``"rbf"`` are the Gaussian of median length scale.
    allow_functions
        Names ``"package.module:function"`` which a spec may import and call.

    Raises
    ------
    InvalidParameter
        If it is none of these.

    Examples
    --------
    >>> as_kernel("gaussian")
    Gaussian(length_scale='median')
    >>> as_kernel({"kernel": "poly", "degree": 3, "gamma": 0.5})
    Polynomial(degree=3, offset=1.0, scale=0.5)
    """
    if isinstance(obj, Kernel):
        return obj
    _check_depth(obj)
    if isinstance(obj, (str, Mapping)):
        return from_spec({"kernel": obj} if isinstance(obj, str) else obj, allow_functions)
    if isinstance(obj, type) or not callable(obj):
        raise InvalidParameter(f"{obj!r} is not a kernel, a name or spec of one, or a function of two sets of rows")
    return Function(obj)


def _translated(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters with scikit-learn's names replaced by ours."""
    found = dict(values)
    for theirs, (ours, translate) in _TRANSLATIONS.get(kind, {}).items():
        if theirs not in found:
            continue
        if ours in found:
            raise InvalidParameter(f"kernel {kind!r} takes {theirs!r} or {ours!r}, not both")
        found[ours] = translate(checked_number(theirs, found.pop(theirs), zero=theirs == "coef0"))
    return found


def _check_depth(spec: Any) -> None:
    if is_too_deep(spec):
        raise InvalidParameter(
            f"the kernel spec is nested deeper than {MOST_LEVELS} levels. Put parts of sums and products into one list."
        )


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
