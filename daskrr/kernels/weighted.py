"""A kernel of rows that carry a factor of their own: how sample weights enter everything that is done with kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from daskrr.kernels.base import Columns, Kernel
from daskrr.kernels.common import Array, as_rows, contiguous
from daskrr.kernels.device import here


@dataclass(frozen=True)
class Weighted(Kernel):
    """a·b·k(x, z) of rows (x, a) and (z, b), whose last feature is a factor: the root of a sample weight times a scale.

    Examples
    --------
    >>> from daskrr.kernels import Linear
    >>> Weighted(Linear())([[2.0, 0.5]], [[3.0, 10.0]])
    array([[30.]])
    """

    name: ClassVar[str] = "weighted"
    part: Kernel
    scale: float = 1.0

    def repeats(self, X: Array) -> Array:
        """(m,) sample weights of the rows X (m, d + 1): how many repeats each stands for."""
        return X[:, -1].astype(np.float64) ** 2 / self.scale

    @property
    def constant_diagonal(self) -> bool:
        """The factors differ."""
        return False

    @property
    def needs_sample(self) -> bool:
        """As the kernel itself."""
        return self.part.needs_sample

    @property
    def needs_targets(self) -> bool:
        """As the kernel itself."""
        return self.part.needs_targets

    @property
    def takes_gpu_arrays(self) -> bool:
        """As the kernel itself."""
        return self.part.takes_gpu_arrays

    @property
    def landmark_copies(self) -> int:
        """Those of the kernel itself, and the landmarks without their factors."""
        return 1 + self.part.landmark_copies

    def check_features(self, n_features: int) -> None:
        """The kernel itself has one feature less."""
        self.part.check_features(n_features - 1)

    def resolve(self, sample: ArrayLike) -> Kernel:
        """Resolve the kernel itself on the rows without their factors."""
        return Weighted(self.part.resolve(as_rows(sample)[:, :-1]), self.scale)

    def _matrix(self, X: Array, Z: Array) -> Array:
        return self.part._matrix(X[:, :-1], Z[:, :-1]) * X[:, -1:] * Z[:, -1]

    def _diagonal(self, X: Array) -> Array:
        return self.part._diagonal(X[:, :-1]) * X[:, -1] ** 2

    def _columns(self, Z: Array, dtype: np.dtype[Any]) -> Columns:
        return Columns(self._fill, self.part._columns(np.ascontiguousarray(Z[:, :-1]), dtype), Z[:, -1].astype(dtype))

    def _fill(self, part: Columns, factors: Array, X: Array, out: Array) -> None:
        part(contiguous(X[:, :-1]), out)
        np.multiply(out, X[:, -1:].astype(out.dtype), out=out)
        np.multiply(out, here(factors), out=out)


def unweighted(kernel: Kernel) -> Kernel:
    """The kernel of rows without weights."""
    return kernel.part if isinstance(kernel, Weighted) else kernel
