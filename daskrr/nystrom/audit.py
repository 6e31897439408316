"""How much the chosen columns leave unexplained: the audit, and the probe of what rows share of it.

With rows drawn at random in proportion to their residuals, the largest eigenvalue of a small matrix bounds that of
K − L, whatever the landmarks are and at every ridge. The rows are drawn during pass 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh

from daskrr.errors import CheckFailed
from daskrr.kernels import Kernel
from daskrr.numerics import blas, panels
from daskrr.numerics.bounds import Certainty, deviation_bound, kernel_noise
from daskrr.numerics.factorize import sum_error
from daskrr.numerics.pass1 import Draw, KeptResiduals, Totals, no_less_than_residual, whitened_rows
from daskrr.numerics.reservoir import Order, Reservoir, merge
from daskrr.numerics.tiles import BlockReader
from daskrr.nystrom.drawing import fetch_rows
from daskrr.nystrom.factors import ProbeRows, TileFactors
from daskrr.nystrom.first_pass import FirstPass
from daskrr.nystrom.landmarks import child, stream
from daskrr.nystrom.reading import whitener_of
from daskrr.nystrom.sketch import NystromSketch
from daskrr.runtime.executors import Executor
from daskrr.runtime.map_blocks import Run, map_blocks
from daskrr.runtime.rows import pieces

AUDIT_ROWS = 2000
# Where their number would keep the intervals from a tolerance there may be so many.
MAX_AUDIT_ROWS = 4000
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
    return {"audit": Draw(Order.of(child(seed, "audit", round_number, 1)), size, no_less_than_residual)}


def draw_apart(run: Run, sketch: NystromSketch, first: FirstPass, draws: dict[str, Draw]) -> FirstPass:
    """Draw rows by the residuals that pass 1 has kept, in a light pass over all rows; earlier draws are gone.

    A pass 1 that goes on from the sums of fewer rows can only go on with the draws of those.
    """
    work = partial(_draw_block, sketch.kernel, sketch.residual_error, draws)
    parts = map_blocks(replace(run, name=sketch.run), "audit-rows", work, run.rows, each=[first.kept])
    return replace(first, drawn=parts.total_handle(_joined, "audit rows"))


def _draw_block(
    kernel: Kernel, error: float, draws: dict[str, Draw], source: Any, start: int, kept: KeptResiduals
) -> dict[str, Reservoir]:
    residual, reader = kept.residual, BlockReader(pieces(source), start)
    parts = []
    for piece in reader:
        first = reader.n_rows - len(piece)
        known, allowed = residual[first : reader.n_rows], error * kernel.diagonal(piece)
        parts.append(
            {
                name: Reservoir.of(draw.order, draw.size, draw.weigh(known, allowed), start + first, piece)
                for name, draw in draws.items()
            }
        )
    return _joined(*parts)


def _joined(*parts: dict[str, Reservoir]) -> dict[str, Reservoir]:
    return {name: merge([part[name] for part in parts]) for name in parts[0]}


def probe_draw(seed: int, round_number: int) -> dict[str, Draw]:
    """The rows of the probe, to be drawn during pass 1."""
    return {"probe": Draw(Order.of(child(seed, "probe", round_number, 1)), PROBE_ROWS, no_less_than_residual)}


@dataclass(frozen=True)
class BegunAudit:
    """An audit whose drawn rows, if there are any, are being looked at on a worker: a handle of the eigenvalue."""

    sketch: NystromSketch
    totals: Totals
    rows: int
    weight: float
    noise: float
    look: Any

    def outcome(self, executor: Executor, failure_probability: float) -> Audit:
        """What it found, once it has; no rows give the bound by the trace."""
        totals, most, eigenvalue = self.totals, self.weight, None
        if self.rows:
            eigenvalue = 0.0 if self.look is None else executor.value(self.look)
            most = deviation_bound(eigenvalue, self.weight, self.rows, failure_probability)
        return Audit(
            rows=self.rows,
            failure_probability=failure_probability if self.rows else 0.0,
            tau=totals.residual,
            weight=self.weight,
            eigenvalue=eigenvalue,
            delta=min(max(most, totals.largest), self.weight) + self.noise,
            noise=self.noise,
            exact=totals.residual <= NEGLIGIBLE * self.sketch.residual_error * totals.diagonal,
        )


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
    return begin_audit(run, sketch, first, size, seed, round_number).outcome(run.executor, failure_probability)


def begin_audit(
    run: Run, sketch: NystromSketch, first: FirstPass, size: int, seed: int, round_number: int
) -> BegunAudit:
    """The same, for whoever has something else to do meanwhile."""
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
    own += sum_error(own, totals.height)
    weight = own + sketch.n_rows * mixed
    looked = None
    if size and weight > 0:
        others = _rows_by_chance(sketch.n_rows, size, sketch.n_rows * mixed / weight, seed, round_number)
        look = partial(_look, sketch.kernel, sketch.dtype, noise, mixed, weight, size, others, seed, round_number)
        # Seldom any, and few, unless the landmarks explain all there is.
        X = [fetch_rows(run, np.unique(others), "sample-audit-rows")] if len(others) else []
        looked = run.executor.apply("audit", look, first.payload, first.drawn, *X)
    return BegunAudit(sketch, totals, size, weight, noise, looked)


def _rows_by_chance(n_rows: int, size: int, share: float, seed: int, round_number: int) -> NDArray[np.int64]:
    """Which rows the audit draws by the part of their weight that all rows have alike, which is a ``share`` of all."""
    generator = stream(seed, "audit", round_number, 2)
    return np.sort(generator.integers(n_rows, size=generator.binomial(size, min(share, 1.0))))


def _look(
    kernel: Kernel,
    dtype: np.dtype,
    noise: float,
    mixed: float,
    total: float,
    size: int,
    others: NDArray[np.int64],
    seed: int,
    round_number: int,
    payload: TileFactors,
    drawn: dict[str, Reservoir],
    *X_others: NDArray[np.float64],
) -> float:
    """Upper bound of the largest eigenvalue of the matrix of drawn rows; runs where those are."""
    whitener = whitener_of(payload, kernel, dtype)
    own = _counted_rows(drawn["audit"], size - len(others), stream(seed, "audit", round_number))
    X, weights, counts = own if not X_others else _with_others(own, drawn["audit"].rows, whitener, others, X_others[0])
    scale = counts * total / (size * (weights + mixed))
    with blas.one_thread():
        H = residual_matrix(kernel, X, whitened_rows(whitener, X))
        H *= np.sqrt(scale)
        H *= np.sqrt(scale)[:, None]
        largest = confirmed_largest_eigenvalue(H)
        budget = max(noise, noise * float(scale.max()))
        if not _is_positive(1.0, H, 0.01 * (largest + budget) + budget):
            raise CheckFailed(
                "the audit found that the landmarks explain more than there is, beyond round-off: nothing can be "
                "certified. The kernel may not be positive semi-definite; if it is, use dtype='float64'."
            )
    return largest + noise * float(scale.max())


def _counted_rows(
    rows: Reservoir, size: int, generator: np.random.Generator
) -> tuple[NDArray, NDArray[np.float64], NDArray[np.int64]]:
    """Rows of ``size`` draws, their weights, and how often each was drawn; a draw takes the first rows, so no copy."""
    counts = np.bincount(rows.draw(size, generator))
    return rows.X[: len(counts)], rows.weights[: len(counts)], counts


def _with_others(
    own: tuple[NDArray, NDArray[np.float64], NDArray[np.int64]],
    own_rows: NDArray[np.int64],
    whitener: Any,
    others: NDArray[np.int64],
    X_others: NDArray[np.float64],
) -> tuple[NDArray, NDArray[np.float64], NDArray[np.int64]]:
    """Rows drawn by their residual and rows drawn by chance, each once, with their weights and counts."""
    X, weights, counts = own
    diagonal = whitener.diagonal(X_others)
    residual = diagonal - blas.row_norms(whitened_rows(whitener, X_others))
    other_weights = no_less_than_residual(residual, whitener.residual_error * diagonal)
    numbers, other_counts = np.unique(others, return_counts=True)
    _, twice, again = np.intersect1d(own_rows[: len(X)], numbers, assume_unique=True, return_indices=True)
    new = np.setdiff1d(np.arange(len(numbers)), again)
    counts[twice] += other_counts[again]
    joined = np.empty((len(X) + len(new), X.shape[1]))
    joined[: len(X)] = X
    np.take(X_others, new, axis=0, out=joined[len(X) :], mode="clip")  # other modes make a copy
    return joined, np.append(weights, other_weights[new]), np.append(counts, other_counts[new])


def residual_matrix(kernel: Kernel, X: NDArray, B: NDArray[np.float64]) -> NDArray[np.float64]:
    """E of the rows X (m, d), given their rows of B (m, r), on all cores."""
    X = X.astype(np.float64, copy=False)
    E, diagonal = np.empty((len(X), len(X))), kernel.diagonal(X)

    def fill(rows: slice) -> None:
        some = kernel(X[rows], X[: rows.stop])
        np.fill_diagonal(some[:, rows.start :], diagonal[rows])
        some -= B[rows] @ B[: rows.stop].T
        E[rows, : rows.stop] = some

    panels.side_by_side(fill, panels.cut(0, len(X), panels.PRODUCT_ROWS))
    return panels.mirrored(E)


def confirmed_largest_eigenvalue(H: NDArray[np.float64]) -> float:
    """No less than the largest eigenvalue of the symmetric H, and at most about 2 % more.

    A Lanczos iteration comes from below; that the value is an upper bound is confirmed by a Cholesky factorization.
    """
    if not len(H) or not np.abs(H).max() > 0:
        return 0.0
    value = float(np.linalg.eigvalsh(H)[-1]) if len(H) <= _SMALL else _lanczos(H)
    value = _RAISED * max(value, float(np.diagonal(H).max()), 1e-12 * float(np.abs(H).max()))
    while not _is_positive(-1.0, H, value):
        value *= _STEP
    return value


def _is_positive(sign: float, H: NDArray[np.float64], shift: float) -> bool:
    """Whether the Cholesky factorization of sign·H + shift·I finds no bad pivot."""
    shifted = panels.lower(H)
    shifted *= sign
    shifted.flat[:: len(H) + 1] += shift
    return not panels.cholesky(shifted)


def _lanczos(H: NDArray[np.float64]) -> float:
    start = np.sqrt(np.maximum(np.diagonal(H), 1e-300))
    by_panels = LinearOperator(H.shape, matvec=partial(panels.times, H), dtype=H.dtype)
    try:
        return float(eigsh(by_panels, 1, which="LA", tol=1e-3, v0=start)[0][0])
    except ArpackError:
        return float(np.linalg.eigvalsh(H)[-1])


def make_probe(run: Run, sketch: NystromSketch, first: FirstPass, seed: int, round_number: int) -> Any:
    """Handle of what pass 2 needs of the probe rows; that is None where there is no residual to be shared."""
    work = partial(_probe, sketch.kernel, seed, round_number)
    return run.executor.apply("probe-rows", work, first.payload, first.drawn, first.sums)


def _probe(
    kernel: Kernel, seed: int, round_number: int, payload: TileFactors, drawn: dict[str, Reservoir], totals: Totals
) -> ProbeRows | None:
    """Q = R⁻ᵀ R⁻¹ C_Aᵀ by two triangular products: by W⁻¹ itself, eight digits would be lost."""
    if not (totals.residual > 0 and len(payload.landmarks)):
        return None
    rows = drawn["probe"]
    chosen = rows.draw(PROBE_ROWS, stream(seed, "probe", round_number))
    inverse = payload.factors[0]
    with blas.one_thread():
        B = np.ascontiguousarray(kernel(rows.X[chosen], payload.landmarks))
        B = blas.multiply_rows(inverse, B)
        coefficients = np.ascontiguousarray((B @ inverse).T)
    return ProbeRows(
        X=rows.X[chosen],
        coefficients=coefficients,
        rows=rows.rows[chosen],
        weights=rows.weights[chosen],
        scale=rows.total / len(chosen),
    )


def certainty_of(sketch: NystromSketch, outcome: Audit, score_errors: Sequence[float]) -> Certainty:
    """What pass 2 needs of an audit."""
    return Certainty(
        delta=outcome.delta,
        noise=outcome.noise,
        residual_error=sketch.residual_error,
        score_errors=np.array(score_errors),
        kernel_error=sketch.kernel_error,
        failure_probability=outcome.failure_probability,
    )
