"""How much the chosen columns leave unexplained: the audit, and the probe of what rows share of it.

With rows drawn at random in proportion to their residuals, the largest eigenvalue of a small matrix bounds that of
K − L, whatever the landmarks are and at every ridge. The rows are drawn during pass 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.linalg import ArpackError, eigsh

from daskrr.engine.passes import Run
from daskrr.errors import CheckFailed
from daskrr.kernels import Kernel
from daskrr.numerics import blas
from daskrr.numerics.bounds import Certainty, deviation_bound, kernel_noise
from daskrr.numerics.gram import Draw, any_row, no_less_than_residual, whitened_rows
from daskrr.numerics.reservoir import Order, Reservoir
from daskrr.nystrom.pass1 import FirstPass
from daskrr.nystrom.reading import whitener_of
from daskrr.nystrom.sampling import child, stream
from daskrr.nystrom.sketch import NystromSketch

AUDIT_ROWS = 2000
# More rows make no better estimate, and cost.
PROBE_ROWS = 32

# An iterative eigenvalue is raised by this before a Cholesky factorization confirms it, and by the next until it does.
_RAISED, _STEP = 1.001, 1.01
_SMALL = 200

# Residuals that sum to no more than so many round-off budgets are none: the landmarks' own are up to 8.
NEGLIGIBLE = 8.0


@dataclass(frozen=True)
class Audit:
    """What was found about E = K − L by its trace, and by rows drawn from it.

    Attributes
    ----------
    rows
        Number of draws; 0 for the deterministic certificate.
    failure_probability
        With at most this probability ``delta`` is too small.
    tau
        Σ max(E_ii, 0).
    weight
        Σ of the weights that rows were drawn by: tau with its round-off.
    eigenvalue
        Largest eigenvalue of the matrix of drawn rows, an estimate of ‖E‖.
    delta
        No eigenvalue of E is larger.
    noise
        Round-off of the kernel's entries: L ⪯ K + noise·I.
    exact
        The landmarks explain every row up to round-off.
    """

    rows: int
    failure_probability: float
    tau: float
    weight: float
    eigenvalue: float | None
    delta: float
    noise: float
    exact: bool


def audit_draws(seed: int, round_number: int, size: int) -> dict[str, Draw]:
    """The rows that an audit of ``size`` draws may need, to be drawn during pass 1."""
    if not size:
        return {}
    residual, anything = (Order.of(child(seed, "audit", round_number, part)) for part in (1, 2))
    return {
        "audit": Draw(residual, size, no_less_than_residual),
        "background": Draw(anything, size, any_row),
    }


def probe_draw(seed: int, round_number: int) -> dict[str, Draw]:
    """The rows of the probe, to be drawn during pass 1."""
    return {"probe": Draw(Order.of(child(seed, "probe", round_number, 1)), PROBE_ROWS, no_less_than_residual)}


def audit(
    run: Run,
    sketch: NystromSketch,
    first: FirstPass,
    size: int,
    failure_probability: float,
    seed: int,
    round_number: int,
) -> Audit:
    """Bound the largest eigenvalue of E from the rows that pass 1 drew; 0 draws give the bound by its trace."""
    totals = first.totals
    noise = kernel_noise(sketch.kernel_error, totals.diagonal)
    if totals.smallest < -max(noise, sketch.residual_error * totals.diagonal / sketch.n_rows):
        raise CheckFailed(
            f"a residual of {totals.smallest:.3g} is below zero by more than round-off may be ({noise:.3g}): nothing "
            "can be certified. The kernel may not be positive semi-definite; if it is, use dtype='float64'."
        )
    # float32 noise is too large to be part of the weights: the bounds take it into account instead.
    mixed = noise if sketch.dtype == np.float64 else 0.0
    own = totals.residual + sketch.residual_error * totals.diagonal
    weight = own + sketch.n_rows * mixed
    found = None
    if size:
        look = partial(_look, sketch.kernel, sketch.dtype, sketch.n_rows, noise, mixed, size, seed, round_number)
        found = run.executor.value(run.executor.apply("audit", look, first.payload, first.drawn))
    most = weight if found is None else deviation_bound(found, weight, size, failure_probability)
    delta = min(max(most, totals.largest), weight) + noise
    exact = totals.residual <= NEGLIGIBLE * sketch.residual_error * totals.diagonal
    return Audit(size, failure_probability if size else 0.0, totals.residual, weight, found, delta, noise, exact)


def _look(
    kernel: Kernel,
    dtype: np.dtype,
    n_rows: int,
    noise: float,
    mixed: float,
    size: int,
    seed: int,
    round_number: int,
    payload: dict[str, Any],
    drawn: dict[str, Reservoir],
) -> float:
    """Upper bound of the largest eigenvalue of the matrix of drawn rows; runs where those are."""
    if not drawn["audit"].total + n_rows * mixed > 0:
        return 0.0
    whitener = whitener_of(payload, kernel, dtype)
    X, weights, rows = _audit_rows(drawn, whitener, n_rows, mixed, size, stream(seed, "audit", round_number))
    total = drawn["audit"].total + n_rows * mixed
    _, first, counts = np.unique(rows, return_index=True, return_counts=True)
    X, scale = X[first], counts * total / (size * weights[first])
    with blas.one_thread():
        H = residual_matrix(kernel, X, whitened_rows(whitener, X))
        H *= np.sqrt(scale)
        H *= np.sqrt(scale)[:, None]
        largest = confirmed_largest_eigenvalue(H)
        budget = max(noise, noise * float(scale.max()))
        H.flat[:: len(H) + 1] += 0.01 * (largest + budget) + budget
        if blas.cholesky(H):
            raise CheckFailed(
                "the audit found that the landmarks explain more than there is, beyond round-off: nothing can be "
                "certified. The kernel may not be positive semi-definite; if it is, use dtype='float64'."
            )
    return largest + noise * float(scale.max())


def _audit_rows(
    drawn: dict[str, Reservoir], whitener: Any, n_rows: int, mixed: float, size: int, generator: np.random.Generator
) -> tuple[NDArray, NDArray, NDArray]:
    """Rows, weights and numbers of ``size`` draws by residual plus ``mixed``, the part that all rows have alike."""
    own, anything = drawn["audit"], drawn["background"]
    share = n_rows * mixed / (own.total + n_rows * mixed)
    n_anything = int(generator.binomial(size, min(share, 1.0)))
    by_residual, by_chance = own.draw(size - n_anything, generator), anything.draw(n_anything, generator)
    X = np.concatenate([own.X[by_residual], anything.X[by_chance]])
    diagonal = whitener.diagonal(anything.X[by_chance])
    B = whitened_rows(whitener, anything.X[by_chance])
    others = no_less_than_residual(diagonal - blas.row_norms(B), whitener.residual_error * diagonal)
    weights = np.concatenate([own.weights[by_residual], others]) + mixed
    return X, weights, np.concatenate([own.rows[by_residual], anything.rows[by_chance]])


def residual_matrix(kernel: Kernel, X: NDArray[np.float64], B: NDArray[np.float64]) -> NDArray[np.float64]:
    """E of the rows X (m, d), given their rows of B (m, r)."""
    E = kernel(X, X)
    np.fill_diagonal(E, kernel.diagonal(X))
    E -= B @ B.T
    E += E.T.copy()
    E *= 0.5
    return E


def confirmed_largest_eigenvalue(H: NDArray[np.float64]) -> float:
    """No less than the largest eigenvalue of the symmetric H, and at most about 2 % more.

    A Lanczos iteration comes from below; that the value is an upper bound is confirmed by a Cholesky factorization.
    """
    if not len(H) or not np.abs(H).max() > 0:
        return 0.0
    value = float(np.linalg.eigvalsh(H)[-1]) if len(H) <= _SMALL else _lanczos(H)
    value = _RAISED * max(value, float(np.diagonal(H).max()), 1e-12 * float(np.abs(H).max()))
    while True:
        left = -H
        left.flat[:: len(H) + 1] += value
        if not blas.cholesky(left):
            return value
        value *= _STEP


def _lanczos(H: NDArray[np.float64]) -> float:
    try:
        return float(eigsh(H, 1, which="LA", tol=1e-3, v0=np.sqrt(np.maximum(np.diagonal(H), 1e-300)))[0][0])
    except ArpackError:
        return float(np.linalg.eigvalsh(H)[-1])


def make_probe(run: Run, sketch: NystromSketch, first: FirstPass, seed: int, round_number: int) -> Any:
    """Handle of what pass 2 needs of the probe rows, or None where there is no residual to be shared."""
    if not (first.totals.residual > 0 and sketch.rank):
        return None
    work = partial(_probe, sketch.kernel, seed, round_number)
    return run.executor.apply("probe-rows", work, first.payload, first.drawn)


def _probe(
    kernel: Kernel, seed: int, round_number: int, payload: dict[str, Any], drawn: dict[str, Reservoir]
) -> dict[str, Any]:
    """Q = R⁻ᵀ R⁻¹ C_Aᵀ by two triangular products: by W⁻¹ itself, eight digits would be lost."""
    rows = drawn["probe"]
    chosen = rows.draw(PROBE_ROWS, stream(seed, "probe", round_number))
    inverse = payload["factors"][0]
    with blas.one_thread():
        B = np.ascontiguousarray(kernel(rows.X[chosen], payload["landmarks"]))
        blas.multiply_rows(inverse, B)
        coefficients = np.ascontiguousarray((B @ inverse).T)
    return {
        "X": rows.X[chosen],
        "coefficients": coefficients,
        "rows": rows.rows[chosen],
        "weights": rows.weights[chosen],
        "scale": rows.total / len(chosen),
    }


def certainty_of(sketch: NystromSketch, found: Audit, score_errors: Sequence[float]) -> Certainty:
    """What pass 2 needs of an audit."""
    return Certainty(
        delta=found.delta,
        noise=found.noise,
        residual_error=sketch.residual_error,
        score_errors=np.array(score_errors),
        kernel_error=sketch.kernel_error,
        failure_probability=found.failure_probability,
    )
