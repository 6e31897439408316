"""Kernels: a formula, its accurate values, and its fast columns against fixed landmarks.

A kernel is a frozen dataclass. Calling it evaluates the formula from the differences of rows, which is
accurate everywhere and slow. `Kernel.columns` prepares the same formula for a fixed set of landmarks:
one matrix product and a few sweeps over a tile, with the few pairs that a matrix product cannot resolve
evaluated again from their differences.
"""

from daskrr.kernels.base import Columns, Kernel, Product, Scaled, Sum
from daskrr.kernels.bernoulli import Bernoulli
from daskrr.kernels.distance import Laplacian
from daskrr.kernels.dot import Cosine, Linear, Polynomial
from daskrr.kernels.function import Function
from daskrr.kernels.radial import Gaussian, Matern
from daskrr.kernels.specs import KINDS, as_kernel, from_spec

__all__ = [
    "KINDS",
    "Bernoulli",
    "Columns",
    "Cosine",
    "Function",
    "Gaussian",
    "Kernel",
    "Laplacian",
    "Linear",
    "Matern",
    "Polynomial",
    "Product",
    "Scaled",
    "Sum",
    "as_kernel",
    "from_spec",
]
