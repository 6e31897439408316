"""The interface of kernels, and the kernels that its operators make: multiples, sums and products."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import reduce
from numbers import Real
from typing import Any, ClassVar, Self, cast

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from daskrr.errors import InvalidData, InvalidParameter
from daskrr.kernels.common import Array, as_rows, checked_number, quiet, set_fields
from daskrr.kernels.device import HOST, home, using
from daskrr.kernels.parameters import nested, replaced

# Elements of rows that are compared at a time: kernels make copies of them.
_PANEL = 1 << 21

# A panel of kernel columns is computed and goes through its formula in a core's own cache.
PANEL_BYTES = 2**21

# Kernels make copies of the rows of a panel, so that wide rows are few at a time; with fewer still, reading the
# landmarks would take longer than the products.
PANEL_INPUT_BYTES = 32 * 2**20


def panel_rows(n_columns: int, n_features: int = 1) -> int:
    """Rows of a panel of kernel columns that fits in cache, and whose rows of X fit in a few copies."""
    return max(16, min(1024, PANEL_BYTES // (8 * max(n_columns, 1)), PANEL_INPUT_BYTES // (8 * n_features)))


def panels(X: Array, out: Array, at_once: bool = False) -> Iterator[slice]:
    """Which rows of a tile to compute next: a GPU takes all of them, a processor those of a panel.

    What is written ``at_once`` need not stay in its cache: all rows of which there is room for copies.
    """
    height = max(1, len(X))
    if home(out).is_host:
        height = max(16, PANEL_INPUT_BYTES // (8 * X.shape[1])) if at_once else panel_rows(out.shape[1], X.shape[1])
    for start in range(0, len(X), height):
        yield slice(start, start + height)


class Columns:
    """The columns of a kernel against fixed landmarks, ready to be evaluated for a tile of rows.

    Objects of this class come from `Kernel.columns`. They can be pickled and hold no scratch memory, so
    that several threads may share one. Values of the distance kernels are right to about 100 unit
    roundoffs of the tile's dtype, and zero where they would not be normal numbers.

    Examples
    --------
    >>> from daskrr.kernels import Linear
    >>> columns = Linear().columns(np.eye(3), np.float64)
    >>> out = np.empty((1, 3))
    >>> columns(np.array([[1, 2, 3]]), out)
    >>> out
    array([[1., 2., 3.]])
    """

    def __init__(self, fill: Callable[..., None], *prepared: Any, at_once: bool = False) -> None:
        self._fill = fill
        self._prepared = prepared
        self._at_once = at_once

    @quiet
    def __call__(self, X: Array, out: Array) -> None:
        """Fill ``out`` with the kernel between rows and the landmarks, panel by panel.

        Parameters
        ----------
        X
            (m, d) rows of any real dtype.
        out
            (m, p) C-contiguous tile of the dtype the columns were prepared for; overwritten. Both are arrays of the
            device that the calling thread computes on.
        """
        for rows in panels(X, out, self._at_once):
            self._fill(*self._prepared, X[rows], out[rows])


class Kernel(ABC):
    """A symmetric positive semi-definite function of two rows.

    Kernels can be multiplied by positive numbers, added and multiplied with each other.

    Raises
    ------
    InvalidParameter
        When it is made, if a parameter is outside its range. When it is used, if its length scale is not
        resolved or has another number of features.
    InvalidData
        When it is used, if rows are not two-dimensional and real, or differ in their number of features.

    Examples
    --------
    >>> from daskrr.kernels import Gaussian, Linear
    >>> 2.0 * Gaussian(3.0) + Linear()
    Sum(parts=(Scaled(factor=2.0, part=Gaussian(length_scale=3.0)), Linear()))
    """

    name: ClassVar[str]

    @quiet
    def __call__(self, X: ArrayLike, Z: ArrayLike) -> NDArray[np.float64]:
        """Evaluate the kernel between two sets of rows, accurately.

        Parameters
        ----------
        X, Z
            (m, d) and (p, d) rows of any real dtype.

        Returns
        -------
        values
            (m, p) kernel values.
        """
        rows, others = as_rows(X), as_rows(Z)
        if rows.shape[1] != others.shape[1]:
            raise InvalidData(f"rows with {rows.shape[1]} and {others.shape[1]} features cannot be compared")
        self._check_ready(rows.shape[1])
        values = np.empty((len(rows), len(others)))
        height = max(16, _PANEL // max(1, rows.shape[1]))
        with using(HOST):
            for start in range(0, len(rows), height):
                values[start : start + height] = self._matrix(rows[start : start + height], others)
        return values

    @quiet
    def diagonal(self, X: ArrayLike) -> NDArray[np.float64]:
        """Evaluate the kernel of every row with itself.

        Parameters
        ----------
        X
            (m, d) rows of any real dtype.

        Returns
        -------
        values
            (m,) kernel values.
        """
        rows = as_rows(X)
        self._check_ready(rows.shape[1])
        return self._diagonal(rows)

    @quiet
    def columns(self, Z: ArrayLike, dtype: DTypeLike) -> Columns:
        """Prepare fast columns against fixed landmarks.

        Parameters
        ----------
        Z
            (p, d) landmarks of any real dtype, at least one and all finite.
        dtype
            Dtype of the tiles to fill: float64 or float32.
        """
        landmarks, tile = as_rows(Z), np.dtype(dtype)
        if tile not in (np.dtype(np.float64), np.dtype(np.float32)):
            raise InvalidParameter(f"kernel columns are float64 or float32, not {tile}")
        if len(landmarks) == 0 or not np.isfinite(landmarks).all():
            raise InvalidData("kernel columns need at least one landmark, and finite ones")
        self._check_ready(landmarks.shape[1])
        with using(HOST):
            return self._columns(landmarks, tile)

    @property
    def constant_diagonal(self) -> bool:
        """Whether the kernel of a row with itself is the same for every row."""
        return bool(self._parts) and all(part.constant_diagonal for part in self._parts)

    @property
    def takes_gpu_arrays(self) -> bool:
        """Whether its columns can be computed on a GPU."""
        return all(part.takes_gpu_arrays for part in self._parts)

    @property
    def landmark_copies(self) -> int:
        """How many copies of the landmarks in float64 there are at most while columns are prepared and evaluated."""
        return 1 + sum(part.landmark_copies for part in self._parts)

    @property
    def needs_sample(self) -> bool:
        """Whether `resolve` must replace a length scale before the kernel can be evaluated."""
        return any(part.needs_sample for part in self._parts)

    @property
    def needs_targets(self) -> bool:
        """Whether a length scale is to be learned, which takes a regression."""
        return any(part.needs_targets for part in self._parts)

    def check_features(self, n_features: int) -> None:
        """Raise `InvalidParameter` if a length scale per feature has another number of features."""
        for part in self._parts:
            part.check_features(n_features)

    def resolve(self, sample: ArrayLike) -> Kernel:
        """Replace every length scale ``"median"`` by the median distance between rows of a sample.

        Parameters
        ----------
        sample
            (m, d) rows; all m (m - 1) / 2 distances are computed.

        Raises
        ------
        InvalidData
            If there are fewer than two rows, or the median is zero or not finite.

        Examples
        --------
        >>> from daskrr.kernels import Gaussian
        >>> Gaussian("median").resolve([[0.0], [1.0], [3.0]])
        Gaussian(length_scale=2.0)
        """
        return self

    def to_spec(self) -> dict[str, Any]:
        """Describe the kernel by JSON values, from which `daskrr.kernels.from_spec` makes it again.

        Examples
        --------
        >>> from daskrr.kernels import Gaussian
        >>> Gaussian(5.0).to_spec()
        {'kernel': 'gaussian', 'length_scale': 5.0}
        """
        return {"kernel": self.name, **{f.name: _plain(getattr(self, f.name)) for f in fields(cast(Any, self))}}

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The parameters by name, as scikit-learn asks for them.

        Parameters
        ----------
        deep
            Whether to give those of kernels inside too: ``part__length_scale`` of a scaled kernel,
            ``parts__0__length_scale`` of a sum or product.

        Examples
        --------
        >>> from daskrr.kernels import Gaussian
        >>> (2.0 * Gaussian(5.0)).get_params()
        {'factor': 2.0, 'part': Gaussian(length_scale=5.0), 'part__length_scale': 5.0}
        """
        own = {f.name: getattr(self, f.name) for f in fields(cast(Any, self))}
        return nested(own) if deep else own

    def set_params(self, **parameters: Any) -> Self:
        """A kernel with other parameters, by the names of `get_params`; this one stays as it is.

        Raises
        ------
        InvalidParameter
            It has no such parameter, or the value is outside its range.

        Examples
        --------
        >>> from daskrr.kernels import Gaussian, Linear
        >>> (Gaussian(5.0) + Linear()).set_params(parts__0__length_scale=3.0)
        Sum(parts=(Gaussian(length_scale=3.0), Linear()))
        """
        return replace(cast(Any, self), **replaced(self.get_params(deep=False), parameters, repr(self)))

    def __sklearn_clone__(self) -> Self:
        # A kernel cannot change, so that nothing is gained by a copy.
        return self

    def __mul__(self, other: Kernel | float) -> Kernel:
        if isinstance(other, Kernel):
            return Product((self, other))
        return Scaled(other, self) if isinstance(other, Real) else NotImplemented

    def __rmul__(self, other: float) -> Kernel:
        return Scaled(other, self) if isinstance(other, Real) else NotImplemented

    def __add__(self, other: Kernel) -> Kernel:
        return Sum((self, other)) if isinstance(other, Kernel) else NotImplemented

    @property
    def _parts(self) -> tuple[Kernel, ...]:
        return ()

    def _check_ready(self, n_features: int) -> None:
        if self.needs_sample:
            raise InvalidParameter(f"{self!r} has a length scale to be resolved: call resolve(sample) first")
        self.check_features(n_features)

    def _matrix(self, X: Array, Z: Array) -> Array:
        out = np.empty((len(X), len(Z)))
        self._columns(Z, out.dtype)(X, out)
        return out

    @abstractmethod
    def _diagonal(self, X: Array) -> Array: ...

    @abstractmethod
    def _columns(self, Z: Array, dtype: np.dtype[Any]) -> Columns: ...


@dataclass(frozen=True)
class Scaled(Kernel):
    """A kernel multiplied by a positive number.

    Parameters
    ----------
    factor
        Positive and finite.
    part
        The kernel to multiply; the factor of a scaled kernel is merged.

    Examples
    --------
    >>> from daskrr.kernels import Linear
    >>> 2 * Linear() * 3
    Scaled(factor=6.0, part=Linear())
    """

    name: ClassVar[str] = "scaled"
    factor: float
    part: Kernel

    def __post_init__(self) -> None:
        part = _checked_kernels("part", [self.part])[0]
        if isinstance(part, Scaled):
            set_fields(self, factor=self.factor * part.factor, part=part.part)
        set_fields(self, factor=checked_number("factor", self.factor))

    @property
    def _parts(self) -> tuple[Kernel, ...]:
        return (self.part,)

    def resolve(self, sample: ArrayLike) -> Kernel:
        return Scaled(self.factor, self.part.resolve(sample))

    def _matrix(self, X: Array, Z: Array) -> Array:
        return self.factor * self.part._matrix(X, Z)

    def _diagonal(self, X: Array) -> Array:
        return self.factor * self.part._diagonal(X)

    def _columns(self, Z: Array, dtype: np.dtype[Any]) -> Columns:
        return Columns(self._fill, self.part._columns(Z, dtype))

    def _fill(self, part: Columns, X: Array, out: Array) -> None:
        part(X, out)
        np.multiply(out, self.factor, out=out)


@dataclass(frozen=True)
class _Combination(Kernel):
    parts: tuple[Kernel, ...]
    _combine: ClassVar[np.ufunc]

    def __post_init__(self) -> None:
        flat: list[Kernel] = []
        for part in _checked_kernels("parts", self.parts):
            flat.extend(part.parts if isinstance(part, type(self)) else (part,))
        if len(flat) < 2:
            raise InvalidParameter(f"a {self.name} needs at least two kernels, not {len(flat)}")
        set_fields(self, parts=tuple(flat))

    @property
    def _parts(self) -> tuple[Kernel, ...]:
        return self.parts

    def resolve(self, sample: ArrayLike) -> Kernel:
        return type(self)(tuple(part.resolve(sample) for part in self.parts))

    def _matrix(self, X: Array, Z: Array) -> Array:
        return reduce(self._combine, (part._matrix(X, Z) for part in self.parts))

    def _diagonal(self, X: Array) -> Array:
        return reduce(self._combine, (part._diagonal(X) for part in self.parts))

    def _columns(self, Z: Array, dtype: np.dtype[Any]) -> Columns:
        return Columns(self._fill, [part._columns(Z, dtype) for part in self.parts])

    def _fill(self, parts: list[Columns], X: Array, out: Array) -> None:
        parts[0](X, out)
        scratch = np.empty_like(out)
        for part in parts[1:]:
            part(X, scratch)
            self._combine(out, scratch, out=out)


@dataclass(frozen=True)
class Sum(_Combination):
    """The sum of two or more kernels; sums among its parts are flattened.

    Examples
    --------
    >>> from daskrr.kernels import Cosine, Linear
    >>> (Linear() + Cosine() + Linear())([[2.0]], [[3.0]])
    array([[13.]])
    """

    name: ClassVar[str] = "sum"
    _combine: ClassVar[np.ufunc] = np.add


@dataclass(frozen=True)
class Product(_Combination):
    """The product of two or more kernels; products among its parts are flattened.

    Examples
    --------
    >>> from daskrr.kernels import Cosine, Linear
    >>> (Linear() * Cosine() * Linear())([[2.0]], [[3.0]])
    array([[36.]])
    """

    name: ClassVar[str] = "product"
    _combine: ClassVar[np.ufunc] = np.multiply


def _checked_kernels(name: str, values: Any) -> list[Kernel]:
    if not isinstance(values, list | tuple) or not all(isinstance(value, Kernel) for value in values):
        raise InvalidParameter(f"{name} must be made of kernels, not {values!r}")
    return list(values)


def _plain(value: Any) -> Any:
    if isinstance(value, Kernel):
        return value.to_spec()
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value
