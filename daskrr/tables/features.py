"""What the columns of an array of numbers are, kept with the array, with sketches, scores and models."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.errors import InvalidData

# Names that a message shows at most.
MOST_NAMES = 8


@dataclass(frozen=True)
class Features:
    """Names of features in their order, and how they were made.

    Attributes
    ----------
    mean, std
        What was subtracted, and what was divided by then; None where nothing was.
    recipe
        What became of the columns of a table, as :meth:`daskrr.tables.recipe.Recipe.to_record` has it; None of arrays.
    """

    names: tuple[str, ...]
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    recipe: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, attributes: Mapping[str, Any], n_features: int, what: str) -> "Features | None":
        """What the attributes of an array say of its columns; None if they say nothing.

        Raises
        ------
        InvalidData
            What they say does not fit the array.
        """
        names = attributes.get("columns")
        if names is None:
            return None
        mean, std = (attributes.get(name) for name in ("mean", "std"))
        if not (isinstance(names, list) and len(names) == n_features and all(isinstance(one, str) for one in names)):
            raise InvalidData(
                f"the attribute 'columns' of {what} must be {n_features} names, as many as it has columns"
            )
        for name, values in (("mean", mean), ("std", std)):
            if (mean is None) != (std is None) or not (values is None or _are_numbers(values, n_features)):
                raise InvalidData(
                    f"the attribute {name!r} of {what} must be {n_features} numbers, with mean and std both"
                )
        recipe = attributes.get("recipe")
        if mean is None or std is None:
            return cls(tuple(names), recipe=recipe)
        return cls(tuple(names), tuple(map(float, mean)), tuple(map(float, std)), recipe)

    def to_attributes(self) -> dict[str, Any]:
        """What :meth:`of` reads."""
        found: dict[str, Any] = {"columns": list(self.names)}
        if self.mean is not None and self.std is not None:
            found |= {"mean": list(self.mean), "std": list(self.std)}
        return found if self.recipe is None else found | {"recipe": dict(self.recipe)}

    @property
    def is_scaled(self) -> bool:
        """Whether they were centred and divided."""
        return self.mean is not None

    def scaled(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Rows (m, d) of the source, as the features are."""
        if self.mean is None:
            return np.asarray(values, np.float64)
        return (np.asarray(values, np.float64) - self.mean) / self._divisors

    def unscaled(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Rows (m, d) of the features, as they were in the source, to twelve digits of what is usual in a column."""
        if self.mean is None:
            return np.asarray(values, np.float64)
        plain = np.asarray(values, np.float64) * self._divisors + self.mean
        usual = np.maximum(np.abs(self.mean), self._divisors)
        unit = 10.0 ** (np.floor(np.log10(usual)) - 11)
        return np.where(np.abs(plain) < 1e3 * usual, np.round(plain / unit) * unit, plain)

    @property
    def _divisors(self) -> NDArray[np.float64]:
        std = np.array(self.std)
        return np.where(std > 0, std, 1.0)

    def without_response(self) -> "Features":
        """The same of tables whose response is not known yet."""
        return self if self.recipe is None else replace(self, recipe={**self.recipe, "response": None})

    def difference(self, other: "Features | None") -> str | None:
        """What differs in others, in words; None if nothing does that changes a number."""
        if other is None:
            return "has no record of its columns and their scaling" if self.is_scaled else None
        if self.names != other.names:
            unknown = [name for name in other.names if name not in self.names]
            lacking = [name for name in self.names if name not in other.names]
            told = [f"lacks {_listed(lacking)}"] * bool(lacking) + [f"has {_listed(unknown)} instead"] * bool(unknown)
            return " and ".join(told) or f"has its columns in another order, {_listed(list(other.names))}"
        if self.is_scaled != other.is_scaled:
            return "is not standardized" if self.is_scaled else "is standardized"
        if self.is_scaled and (self.mean, self.std) != (other.mean, other.std):
            pairs = zip(self.names, self.mean or (), self.std or (), other.mean or (), other.std or (), strict=True)
            name, *numbers = next(one for one in pairs if one[1:3] != one[3:])
            return "is standardized otherwise: {!r} by mean {:.6g} and deviation {:.6g}, not {:.6g} and {:.6g}".format(
                name, *numbers[2:], *numbers[:2]
            )
        return None


def _are_numbers(values: Any, count: int) -> bool:
    return isinstance(values, list) and len(values) == count and bool(np.all(np.isfinite(_floats(values))))


def _floats(values: list[Any]) -> NDArray[np.float64]:
    try:
        return np.array(values, np.float64)
    except (TypeError, ValueError):
        return np.array([np.nan])


def _listed(names: list[str]) -> str:
    more = ", …" if len(names) > MOST_NAMES else ""
    return ", ".join(map(repr, names[:MOST_NAMES])) + more
