"""Length scales of the features, learned from a sample of rows and targets by the marginal likelihood.

Targets y are taken for a Gaussian process with noise: their covariance is s·A with A = K + τ·diag(1/w), where the scale
s that fits best has a closed form. What is left to be least, over log l_1, …, log l_d and log τ, is

    Σ_t m/2·log(y_tᵀ A⁻¹ y_t) + T/2·log det A,    whose derivative by A is    ½·(T·A⁻¹ − m·Σ_t α_t α_tᵀ/(y_tᵀ α_t)),

with α = A⁻¹y. A step costs the Cholesky factor and the inverse of an m × m matrix.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve, cholesky
from scipy.linalg.lapack import dpotri
from scipy.optimize import minimize
from scipy.spatial.distance import pdist

from daskrr.errors import InvalidData
from daskrr.kernels.distance import DistanceKernel
from daskrr.numerics import blas

# How far length scales may go from the median distance, where they start. A feature of the longest says next to
# nothing. Where they might be longer still, the likelihood of a thousand rows rose and predictions got worse.
SHORTEST, LONGEST = 0.01, 10.0

# Noise τ over the variance of the function: where it starts, and how far it may go.
FIRST_NOISE, LEAST_NOISE, MOST_NOISE = 0.1, 1e-5, 1e3

# A share of the rows finds about where the scales are, in many steps that cost little, and all of them take some more.
# Fewer rows than these are not divided.
STAGES = ((0.25, 100), (1.0, 30))
FEWEST = 200

# Spread of a feature, relative to its size, that is none.
ROUND_OFF = 1e-12


@dataclass(frozen=True)
class Evidence:
    """What length scales are judged by: rows X (m, d), targets Y (m, T) and weights (m,) of mean 1."""

    X: NDArray[np.float64]
    Y: NDArray[np.float64]
    weights: NDArray[np.float64]

    def part(self, share: float) -> "Evidence":
        """A share of the rows, one in so many, if enough are left."""
        step = max(1, min(round(1 / share), len(self.X) // FEWEST))
        return Evidence(self.X[::step], self.Y[::step], self.weights[::step])

    def __call__(self, kernel: DistanceKernel, noise: float) -> tuple[float, NDArray[np.float64]]:
        """The negative logarithm of the marginal likelihood, less a constant, and its gradient (d + 1,)."""
        m, T = self.Y.shape
        A = kernel(self.X, self.X)
        A[np.diag_indices(m)] += noise / self.weights
        factor = cholesky(A, lower=True, overwrite_a=True, check_finite=False)
        alpha = cho_solve((factor, True), self.Y, check_finite=False)
        squares = np.einsum("it,it->t", self.Y, alpha)
        value = m / 2 * np.log(squares).sum() + T * np.log(np.diagonal(factor)).sum()
        half, _ = dpotri(factor, lower=1, overwrite_c=1)
        inverse = np.tril(half) + np.tril(half, -1).T
        V = 0.5 * (T * inverse - m * (alpha / squares) @ alpha.T)
        by_noise = noise * np.sum(np.diagonal(V) / self.weights)
        return float(value), np.append(kernel.scale_gradient(self.X, V), by_noise)


@dataclass(frozen=True)
class LearnedScales:
    """Length scales (d,), the noise τ beside them, and the negative logarithm of the marginal likelihood."""

    scales: tuple[float, ...]
    noise: float
    value: float


@blas.one_thread()
def learn_scales(
    kernel: DistanceKernel, X: NDArray[np.float64], Y: NDArray[np.float64], weights: NDArray[np.float64] | None = None
) -> LearnedScales:
    """Length scales of rows X (m, d) with targets Y (m, T) and weights (m,), all 1 by default.

    Features and targets are brought to the same spread first, so that nothing depends on units. A feature that is
    constant in these rows tells nothing: it keeps the scale at which others start, as if its spread were 1.

    Raises
    ------
    InvalidData
        There are fewer than three rows with a weight, or rows or targets do not differ.
    """
    w = np.ones(len(X)) if weights is None else weights
    X, Y, w = X[w > 0], Y[w > 0], w[w > 0]
    spread, heights = _spread(X), _spread(Y)
    if len(X) < 3 or not spread.any() or not heights.any():
        raise InvalidData(
            f"length scales cannot be learned from {len(X)} sampled rows, {np.count_nonzero(spread)} of whose features "
            f"and {np.count_nonzero(heights)} of whose targets vary: give length_scale as a number."
        )
    units = np.where(spread > 0, spread, 1.0)
    Y = Y[:, heights > 0] / heights[heights > 0]
    return _ascended(kernel, Evidence(X / units, Y - np.average(Y, axis=0, weights=w), w / w.mean()), units)


def _ascended(kernel: DistanceKernel, evidence: Evidence, units: NDArray[np.float64]) -> LearnedScales:
    """Where the likelihood is largest, from the median distance on; ``units`` (d,) are those of the features."""
    start = math.log(float(np.median(pdist(evidence.X, kernel.metric))) or 1.0)
    theta = np.append(np.full(len(units), start), math.log(FIRST_NOISE))
    bounds = [(start + math.log(SHORTEST), start + math.log(LONGEST))] * len(units)
    bounds.append((math.log(LEAST_NOISE), math.log(MOST_NOISE)))
    for share, n_steps in STAGES:
        some = evidence.part(share)

        def objective(theta: NDArray[np.float64], some: Evidence = some) -> tuple[float, NDArray[np.float64]]:
            return some(replace(kernel, length_scale=tuple(np.exp(theta[:-1]))), math.exp(theta[-1]))

        found = minimize(objective, theta, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": n_steps})
        theta = found.x
    scales = tuple((np.exp(theta[:-1]) * units).tolist())
    return LearnedScales(scales=scales, noise=math.exp(theta[-1]), value=float(found.fun))


def _spread(X: NDArray[np.float64]) -> NDArray[np.float64]:
    """(d,) standard deviations; zero where only round-off differs."""
    largest = np.abs(X).max(axis=0, initial=0.0)
    # Divided first, since squares of huge numbers overflow.
    share = (X / np.where(largest > 0, largest, 1.0)).std(axis=0) if len(X) else np.zeros(X.shape[1])
    return np.where(share > ROUND_OFF, share * largest, 0.0)
