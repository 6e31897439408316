"""Scores as frames: one row each, a column for every quantity and ridge."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import dask.array as da
import numpy as np

from daskrr.errors import InvalidParameter

ORDER = ("estimate", "lower", "upper", "scores", "residual")


class Tabulated(ABC):
    """What has lazy arrays of scores, and can be made a frame of."""

    summary: dict[str, Any]

    @property
    @abstractmethod
    def certified(self) -> bool:
        """Whether every score comes with an interval."""

    @property
    def lazy_arrays(self) -> Mapping[str, da.Array]:
        """(n,), or (n, L) for a list of ridges, of every quantity there is."""
        return {name: getattr(self, name) for name in ORDER if self.certified or name not in ("lower", "upper")}

    def to_dataframe(self, rows: Sequence[int] | None = None) -> Any:
        """A pandas DataFrame of some rows, by their numbers, or of all; only what they need is computed or read.

        Examples
        --------
        >>> import numpy as np, daskrr
        >>> X = np.random.default_rng(0).standard_normal((300, 2))
        >>> found = daskrr.leverage_scores(X, daskrr.kernels.Gaussian(1.0), 1e-2, 50, random_state=0)
        >>> found.to_dataframe(rows=[7, 3]).index.tolist()
        [7, 3]
        """
        pandas = _module("pandas", "to_dataframe")
        arrays = list(self.lazy_arrays.values())
        numbers = np.arange(arrays[0].shape[0]) if rows is None else np.asarray(rows, np.int64)
        whole = da.concatenate([one.reshape((one.shape[0], -1)) for one in arrays], axis=1)
        values = whole[numbers].compute() if rows is not None else whole.compute()
        return pandas.DataFrame(values, columns=self._names, index=pandas.Index(numbers, name="row"))

    def to_dask_dataframe(self) -> Any:
        """A Dask DataFrame of all rows, with a partition for every chunk; nothing is computed or read yet."""
        _module("pandas", "to_dask_dataframe")
        frames = _module("dask.dataframe", "to_dask_dataframe")
        arrays = [one.reshape((one.shape[0], -1)) for one in self.lazy_arrays.values()]
        whole = da.concatenate(arrays, axis=1).rechunk({1: -1})
        return frames.from_dask_array(whole, columns=self._names)

    @property
    def _names(self) -> list[str]:
        ridges = np.atleast_1d(self.summary["parameters"]["ridge"]).tolist()
        return [name for one, array in self.lazy_arrays.items() for name in named_by_ridge(one, array, ridges)]


def named_by_ridge(name: str, array: Any, ridges: Sequence[float]) -> list[str]:
    """Names of the columns of a quantity."""
    return [name] if array.ndim == 1 else [f"{name} at ridge {ridge:g}" for ridge in ridges]


def _module(name: str, method: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise InvalidParameter(f"{method} needs pandas, which is not installed: pip install pandas") from None
