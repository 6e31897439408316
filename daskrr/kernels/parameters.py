"""Parameters by names with ``__`` between, as scikit-learn has them, of kernels and of what is inside kernels."""

from collections.abc import Mapping
from typing import Any

from daskrr.errors import InvalidParameter


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by their names, and what is inside them by ``name__inner``."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found[name] = value
        inside = _inside(value)
        found |= {f"{name}__{inner}": one for inner, one in nested({} if inside is None else inside).items()}
    return found


def replaced(values: Mapping[str, Any], changes: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """The values with some of them changed, whole or inside; what is inside is changed last.

    Raises
    ------
    InvalidParameter
        The ``owner`` has no such name.
    """
    found, inner = dict(values), dict[str, dict[str, Any]]()
    for path, value in changes.items():
        name, _, rest = path.partition("__")
        if name not in values:
            raise InvalidParameter(f"{owner} has no parameter {name!r}, only {', '.join(values) or 'none'}")
        if rest:
            inner.setdefault(name, {})[rest] = value
        else:
            found[name] = value
    for name, more in inner.items():
        found[name] = _changed(found[name], more, f"{name} of {owner}")
    return found


def _inside(value: Any) -> dict[str, Any] | None:
    """What a value has inside by name: the parameters of a kernel, kernels by their number, entries of a mapping."""
    if hasattr(value, "get_params"):
        return value.get_params(deep=False)
    if isinstance(value, Mapping):
        return {name: one for name, one in value.items() if isinstance(name, str)}
    if isinstance(value, tuple) and any(hasattr(one, "get_params") for one in value):
        return {str(number): one for number, one in enumerate(value)}
    return None


def _changed(value: Any, changes: Mapping[str, Any], owner: str) -> Any:
    inside = _inside(value)
    if inside is None:
        raise InvalidParameter(f"{owner} is {value!r}, which has no parameters of its own")
    if hasattr(value, "set_params"):
        return value.set_params(**changes)
    found = replaced(inside, changes, owner)
    return tuple(found.values()) if isinstance(value, tuple) else found
