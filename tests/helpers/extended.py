"""Scores and kernels in extended precision, as references for float64."""

from collections.abc import Sequence
from typing import Any

import mpmath
import numpy as np

from daskrr.kernels import (
    Bernoulli,
    Cosine,
    Gaussian,
    Kernel,
    Laplacian,
    Linear,
    Matern,
    Polynomial,
    Product,
    Scaled,
    Sum,
)


def scores_of_matrix(K: Any, ridge: float, digits: int = 50) -> np.ndarray:
    """Compute diag(K (K + n ridge I)⁻¹) of an (n, n) matrix of floats or extended numbers."""
    with mpmath.workdps(digits):
        matrix = K if isinstance(K, mpmath.matrix) else mpmath.matrix(np.asarray(K).tolist())
        n = matrix.rows
        mu = n * mpmath.mpf(float(ridge))
        inverse = mpmath.inverse(matrix + mu * mpmath.eye(n))
        return np.array([float(1 - mu * inverse[i, i]) for i in range(n)])


def scores_extended(X: Any, kernel: Kernel, ridge: float, digits: int = 50) -> np.ndarray:
    """Compute the scores of (n, d) rows with the kernel itself in extended precision."""
    return scores_of_matrix(kernel_extended(X, X, kernel, digits), ridge, digits)


def scores_of_repeats(
    points: Any, counts: Sequence[int], kernel: Kernel, ridges: Sequence[float], digits: int = 60
) -> np.ndarray:
    """Compute the (m, L) scores of one copy of each of m points among ``counts[a]`` copies of point a.

    With D = diag(counts) and S = D^½ K D^½ all copies of point a have the scores [S (S + n ridge I)⁻¹]_aa in sum.
    """
    with mpmath.workdps(digits):
        K, m, n = kernel_extended(points, points, kernel, digits), len(counts), int(sum(counts))
        roots = [mpmath.sqrt(int(count)) for count in counts]
        S = mpmath.matrix([[roots[a] * K[a, b] * roots[b] for b in range(m)] for a in range(m)])
        found = np.empty((m, len(ridges)))
        for column, ridge in enumerate(ridges):
            mu = n * mpmath.mpf(float(ridge))
            inverse = mpmath.inverse(S + mu * mpmath.eye(m))
            found[:, column] = [float((1 - mu * inverse[a, a]) / int(counts[a])) for a in range(m)]
        return found


def kernel_extended(X: Any, Z: Any, kernel: Kernel, digits: int = 50) -> mpmath.matrix:
    """Evaluate a kernel between (m, d) and (p, d) rows in extended precision."""
    with mpmath.workdps(digits):
        rows, others = _extended(X), _extended(Z)
        return mpmath.matrix([[_value(kernel, x, z) for z in others] for x in rows])


def _extended(X: Any) -> list[list[Any]]:
    return [[mpmath.mpf(float(entry)) for entry in row] for row in np.asarray(X)]


def _value(kernel: Kernel, x: Sequence[Any], z: Sequence[Any]) -> Any:
    if isinstance(kernel, Scaled):
        return mpmath.mpf(kernel.factor) * _value(kernel.part, x, z)
    if isinstance(kernel, Sum):
        return mpmath.fsum(_value(part, x, z) for part in kernel.parts)
    if isinstance(kernel, Product):
        return mpmath.fprod(_value(part, x, z) for part in kernel.parts)
    return _simple_value(kernel, x, z)


def _simple_value(kernel: Kernel, x: Sequence[Any], z: Sequence[Any]) -> Any:
    if isinstance(kernel, Linear):
        return mpmath.fdot(x, z)
    if isinstance(kernel, Polynomial):
        return (mpmath.mpf(kernel.scale) * mpmath.fdot(x, z) + mpmath.mpf(kernel.offset)) ** kernel.degree
    if isinstance(kernel, Cosine):
        return mpmath.fdot(x, z) / ((mpmath.norm(x) or 1) * (mpmath.norm(z) or 1))
    if isinstance(kernel, Bernoulli):
        return mpmath.fprod(_periodic(kernel.order, a - b) for a, b in zip(x, z, strict=True))
    if not isinstance(kernel, Gaussian | Matern | Laplacian):
        raise TypeError(f"no extended precision for {kernel!r}")
    return _of_distance(kernel, [a - b for a, b in zip(x, z, strict=True)])


def _periodic(order: int, difference: Any) -> Any:
    fraction = difference - mpmath.floor(difference)
    return (-1) ** (order - 1) * mpmath.bernpoly(2 * order, fraction) / mpmath.factorial(2 * order)


def _of_distance(kernel: Gaussian | Matern | Laplacian, differences: list[Any]) -> Any:
    scales = np.broadcast_to(np.asarray(kernel.length_scale), len(differences))
    scaled = [value / mpmath.mpf(float(scale)) for value, scale in zip(differences, scales, strict=True)]
    if isinstance(kernel, Laplacian):
        return mpmath.exp(-sum(abs(value) for value in scaled))
    square = sum(value * value for value in scaled)
    if isinstance(kernel, Gaussian):
        return mpmath.exp(-square / 2)
    a = mpmath.sqrt(2 * mpmath.mpf(kernel.nu) * square)
    polynomial = {0.5: 1, 1.5: 1 + a, 2.5: 1 + a + a * a / 3}[kernel.nu]
    return polynomial * mpmath.exp(-a)
