"""Rows of many kinds and the kernels that benchmarks give them."""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import pdist

from daskrr.kernels import Bernoulli, Cosine, Gaussian, Kernel, Laplacian, Linear, Matern, Polynomial
from daskrr.synthetic import planted_outliers

Rows = NDArray[np.float64]


def normal_rows(n: int, d: int, generator: np.random.Generator) -> Rows:
    """A normal cloud."""
    return generator.standard_normal((n, d))


def student_rows(n: int, d: int, generator: np.random.Generator) -> Rows:
    """Every entry has a Student-t distribution with 3 degrees of freedom."""
    return generator.standard_t(3, (n, d))


def heavy_rows(n: int, d: int, generator: np.random.Generator) -> Rows:
    """Normal directions, with lengths that have the tail of a Student-t distribution with 2 degrees of freedom."""
    return generator.standard_normal((n, d)) / np.sqrt(generator.chisquare(2, (n, 1)) / 2)


def cluster_rows(n: int, d: int, generator: np.random.Generator) -> Rows:
    """Clusters, and one row in a hundred far from everything."""
    return planted_outliers(n, d, max(1, n // 100), int(generator.integers(2**31))).block(0, n)


def duplicate_rows(n: int, d: int, generator: np.random.Generator) -> Rows:
    """Every row several times."""
    return generator.standard_normal((max(2, n // 5), d))[generator.integers(max(2, n // 5), size=n)]


def far_rows(n: int, d: int, generator: np.random.Generator) -> Rows:
    """A normal cloud of which some rows are far away."""
    X = generator.standard_normal((n, d))
    X[generator.choice(n, max(1, n // 50), replace=False)] *= 10.0 ** generator.uniform(1, 5)
    return X


def shifted_rows(n: int, d: int, generator: np.random.Generator) -> Rows:
    """A normal cloud far from the origin."""
    return generator.standard_normal((n, d)) + 10.0 ** generator.uniform(1, 4)


def repeated_rows(n: int, d: int, m: int, generator: np.random.Generator) -> Rows:
    """Copies of m points that are near to each other or far; half of the time there is one of each but the first."""
    points = 10.0 ** generator.uniform(-1.5, 0.5) * generator.standard_normal((m, d)) + generator.normal(size=d)
    shares = -np.sort(-(n ** generator.uniform(-1, 0, m)))
    others = np.ones(m, int) if generator.random() < 0.5 else np.maximum(1, (n * shares / shares.sum()).astype(int))
    labels = np.concatenate([np.repeat(np.arange(1, m), others[1:]), np.zeros(n - others[1:].sum(), int)])
    return points[generator.permutation(labels) if generator.random() < 0.25 else labels]


CLOUDS: dict[str, Callable[[int, int, np.random.Generator], Rows]] = {
    "normal": normal_rows,
    "Student-t": student_rows,
    "heavy tails": heavy_rows,
    "clusters + outliers": cluster_rows,
    "duplicates": duplicate_rows,
    "far rows": far_rows,
    "shifted": shifted_rows,
}
# Of the length scale; polynomials and linear parts are scaled by it too, lest far rows overflow them.
KERNELS: dict[str, Callable[[float], Kernel]] = {
    "Gaussian": Gaussian,
    "Laplacian": Laplacian,
    "Matern 1/2": partial(Matern, nu=0.5),
    "Matern 3/2": partial(Matern, nu=1.5),
    "Matern 5/2": partial(Matern, nu=2.5),
    "polynomial": lambda scale: Polynomial(degree=3, offset=1.0, scale=1 / scale**2),
    "linear": lambda scale: Linear(),
    "cosine": lambda scale: Cosine(),
    "Gaussian + Laplacian": lambda scale: Gaussian(scale) + 0.5 * Laplacian(scale),
    "Gaussian + linear": lambda scale: Gaussian(scale) + scale**-2 * Linear(),
}
# Products over features that vanish in many of them.
KERNELS_OF_FEW_FEATURES: dict[str, Callable[[float], Kernel]] = KERNELS | {
    "Bernoulli 1": lambda scale: Bernoulli(1),
    "Bernoulli 2": lambda scale: Bernoulli(2),
    "Matern × Laplacian": lambda scale: Matern(scale, 1.5) * Laplacian(scale),
}


def median_distance(X: Rows) -> float:
    """Median distance of the first thousand rows, or 1 where most of them coincide."""
    return float(np.median(pdist(X[:1000]))) or 1.0
