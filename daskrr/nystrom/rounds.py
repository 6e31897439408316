"""Landmarks chosen in rounds: each looks at what the landmarks so far leave unexplained, and adds to them."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.engine.passes import Run
from daskrr.engine.rows import Rows
from daskrr.errors import RidgeTooSmall
from daskrr.kernels import Kernel
from daskrr.numerics import blas
from daskrr.numerics.gram import Draw, clear_residual, whitened_rows
from daskrr.numerics.pivots import most_explaining
from daskrr.numerics.reservoir import Order, Reservoir
from daskrr.numerics.score import ScoredRows
from daskrr.nystrom.audit import audit, audit_draws, certainty_of, residual_matrix
from daskrr.nystrom.pass1 import Chosen, FirstPass, Settings, first_pass, whiten
from daskrr.nystrom.reading import whitener_of
from daskrr.nystrom.sampling import Landmarks, ScoreFidelity, binary_scale, child, stream
from daskrr.nystrom.selection import Weighing, draw_landmarks, draw_weighted, fetch_rows

# Of the landmarks of "leverage" sampling, one in so many belongs to its first round.
FIRST_SHARE = 4
# New landmarks are chosen among so many times as many rows, as long as those are not too many to compare. A choice may
# take this share of the operations of the pass that follows; it runs about ten times as slowly as that, on one core.
CANDIDATES = 6
ENOUGH_CANDIDATES = 2000
CHOICE_SHARE = 0.02
FIRST_ROUND_FAILURE = 1e-3
# The stream of the audit of that round; what is drawn by it has an audit with another.
FIRST_ROUND_STREAM = 1


@dataclass(frozen=True)
class Scheme:
    """How landmarks are chosen.

    Attributes
    ----------
    sampling
        ``"residual"``, ``"leverage"``, ``"diagonal"``, ``"uniform"``, probabilities, or row numbers.
    size
        Number of landmarks, or None where row numbers say it.
    rounds
        Of ``"residual"``.
    replacement
        Whether rows are put back after a draw.
    epsilon
        ``"leverage"`` draws by scores at ridge·epsilon.
    audit_rows
        Of the audit of the first round of ``"leverage"``.
    """

    sampling: str | NDArray[np.int64] | Rows
    size: int | None
    rounds: int
    replacement: bool
    epsilon: float
    audit_rows: int
    seed: int


def choose_landmarks(run: Run, settings: Settings, scheme: Scheme) -> tuple[Chosen, Weighing | None]:
    """Landmarks with their rows, and the weights that they were drawn by, where those differ from row to row."""
    if isinstance(scheme.sampling, str) and scheme.sampling == "residual":
        return _by_residual(run, settings, scheme), None
    if isinstance(scheme.sampling, str) and scheme.sampling == "leverage":
        return _by_leverage(run, settings, scheme)
    landmarks, weighing = draw_landmarks(
        run, settings.kernel, scheme.sampling, scheme.size, scheme.seed, scheme.replacement
    )
    return Chosen(landmarks, fetch_rows(run, landmarks.indices, "sample-rows")), weighing


def round_sizes(size: int, rounds: int) -> list[int]:
    """Landmarks after each round: equal steps, as many rounds as there are landmarks for."""
    return sorted({max(1, size * number // rounds) for number in range(1, rounds + 1)})


def first_landmarks(run: Run, settings: Settings, size: int, seed: int, replacement: bool) -> Chosen:
    """The landmarks of a first round, by the diagonal of the kernel."""
    landmarks, _ = draw_landmarks(run, settings.kernel, "diagonal", size, seed, replacement)
    return Chosen(landmarks, fetch_rows(run, landmarks.indices, "sample-rows"))


def _by_residual(run: Run, settings: Settings, scheme: Scheme) -> Chosen:
    sizes = round_sizes(scheme.size or 1, scheme.rounds)
    chosen = first_landmarks(run, settings, sizes[0], scheme.seed, scheme.replacement)
    settings = replace(settings, sketch_ridge=None, with_subset=False)
    for number, size in enumerate(sizes[1:], 1):
        wanted = size - sizes[number - 1]
        sketch, _ = whiten(run, f"{run.name}-round{number}", settings, chosen)
        title = f"round {number} of {len(sizes) - 1}: residuals"
        draws = landmark_draw(scheme.seed, number, wanted, size, run.rows.n_rows)
        first = first_pass(run, sketch, draws, with_gram=False, title=title, label=f"round-{number}")
        larger = grow(run, settings, chosen, first, wanted, scheme.seed, number, scheme.replacement)
        if larger is chosen:
            break
        chosen = larger
    return chosen


def n_candidates(size: int, n_landmarks: int, n_rows: int) -> int:
    """How many rows are drawn for a round of ``size`` new landmarks, which makes ``n_landmarks`` in all.

    A choice costs size·c² operations for c candidates, and the pass that follows n_rows·n_landmarks².
    """
    affordable = math.isqrt(int(CHOICE_SHARE * n_rows * n_landmarks**2 / size))
    return max(min(CANDIDATES * size, ENOUGH_CANDIDATES, affordable), 2 * size)


def most_candidates(size: int) -> int:
    """No round of up to ``size`` new landmarks draws more rows, whatever else it depends on."""
    return max(min(CANDIDATES * size, ENOUGH_CANDIDATES), 2 * size) + 1


def landmark_draw(seed: int, round_number: int, size: int, n_landmarks: int, n_rows: int) -> dict[str, Draw]:
    """Rows that may become landmarks in the next round, to be drawn during a pass."""
    order = Order.of(child(seed, "landmarks", round_number, 1))
    return {"landmarks": Draw(order, n_candidates(size, n_landmarks, n_rows) + 1, clear_residual)}


def grow(
    run: Run,
    settings: Settings,
    chosen: Chosen,
    first: FirstPass,
    size: int,
    seed: int,
    round_number: int,
    replacement: bool = False,
) -> Chosen:
    """Add ``size`` of the rows that pass 1 drew by their residual; the same landmarks if no row has any.

    With replacement they are drawn independently; without, those are taken that explain most together.
    """
    if replacement:
        pick = partial(_draw_again, size, seed, round_number)
    else:
        pick = partial(_most_explaining, size, settings.kernel, settings.dtype)
    picked = run.executor.apply("new-landmarks", pick, first.payload, first.drawn)
    rows = run.executor.value(run.executor.apply("new-landmark-rows", _rows, picked))
    if not len(rows):
        return chosen
    points = run.executor.apply("new-landmark-points", _points, picked)
    return join(run, chosen, rows, np.ones_like(rows), points)


def join(run: Run, chosen: Chosen, rows: NDArray[np.int64], counts: NDArray[np.int64], X: Any) -> Chosen:
    """The landmarks with more rows, whose points are X; how often a row was drawn adds up."""
    indices, first, place = np.unique(
        np.concatenate([chosen.landmarks.indices, rows]), return_index=True, return_inverse=True
    )
    total = np.zeros(len(indices), np.int64)
    np.add.at(total, place, np.concatenate([chosen.landmarks.counts, counts]))
    points = run.executor.apply("join-landmarks", partial(_stack, first), chosen.X, X)
    return Chosen(Landmarks(indices, total, None), points)


def _draw_again(
    size: int, seed: int, round_number: int, payload: dict[str, Any], drawn: dict[str, Reservoir]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    found = drawn["landmarks"]
    chosen = found.draw(size, stream(seed, "landmarks", round_number))
    return found.rows[chosen], found.X[chosen]


def _most_explaining(
    size: int, kernel: Kernel, dtype: np.dtype, payload: dict[str, Any], drawn: dict[str, Reservoir]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    found, stands_for = drawn["landmarks"].candidates()
    if len(found) <= size:
        return found.rows, found.X
    with blas.one_thread():
        B = whitened_rows(whitener_of(payload, kernel, dtype), found.X)
        E = residual_matrix(kernel, found.X, B)
        # Units do not matter to the choice, and float32 is precise enough for it, if nothing overflows.
        scale = float(np.diagonal(E).max())
        chosen = most_explaining((E / scale).astype(np.float32), stands_for / stands_for.max(), size)
    return found.rows[chosen], found.X[chosen]


def _rows(picked: tuple[NDArray, NDArray]) -> NDArray[np.int64]:
    return picked[0]


def _points(picked: tuple[NDArray, NDArray]) -> NDArray[np.float64]:
    return picked[1]


def _stack(order: NDArray[np.intp], *parts: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate(parts)[order]


def _by_leverage(run: Run, settings: Settings, scheme: Scheme) -> tuple[Chosen, Weighing | None]:
    """Theorem 3: draw by certified upper ends of the scores at ridge·epsilon, from a first round of fewer landmarks."""
    size = scheme.size or 1
    first_size = max(1, size // FIRST_SHARE)
    earlier = first_landmarks(run, settings, first_size, scheme.seed, replacement=False)
    if size == first_size and settings.sketch_ridge is None:
        return earlier, None
    # L_γ weighs each landmark by its probability, and those of the first round have none in this draw.
    keep = settings.sketch_ridge is None
    draws = size - first_size if keep else size
    weighing = _weigh_by_upper(run, settings, scheme, earlier, draws)
    landmarks = draw_weighted(run, weighing, draws, scheme.seed, 1, scheme.replacement)
    X = fetch_rows(run, landmarks.indices, "sample-rows-again")
    if not keep:
        return Chosen(landmarks, X), weighing
    return join(run, earlier, landmarks.indices, landmarks.counts, X), weighing


def _weigh_by_upper(run: Run, settings: Settings, scheme: Scheme, chosen: Chosen, draws: int) -> Weighing:
    ridge = settings.smallest * scheme.epsilon
    small = replace(settings, ridges=(ridge,), single=True, sketch_ridge=None, with_subset=False)
    try:
        sketch, _ = whiten(run, f"{run.name}-first", small, chosen)
        first = first_pass(
            run,
            sketch,
            audit_draws(scheme.seed, FIRST_ROUND_STREAM, scheme.audit_rows),
            title="first round, pass 1: gram",
            label="first-round",
        )
        parameters = {"dtype": str(small.dtype), "n_rows": sketch.n_rows, "ridges": [ridge], "leading": False}
        ridged = sketch.algebra.perform("add_ridge", first.gram, parameters)
    except RidgeTooSmall as error:
        raise RidgeTooSmall(
            f"sampling='leverage' draws by scores at ridge·epsilon = {ridge:.3g}, where {error} Raise the ridge or "
            "epsilon, or use sampling='residual'."
        ) from None
    # This round decides which rows are drawn, never what is certain about them: its failure harms no interval.
    found = audit(run, sketch, first, scheme.audit_rows, FIRST_ROUND_FAILURE, scheme.seed, FIRST_ROUND_STREAM)
    sketch = replace(sketch, certainty=certainty_of(sketch, found, ridged["score_errors"]))
    payload = run.executor.hold(sketch.algebra.payload("scorer"))
    tasks = sketch.score_tasks(payload, run.rows, run.blocks, first.kept, "first-round", _ends)
    ends = run.collect("first round, pass 2: upper ends", tasks)
    sums = run.executor.values([run.executor.apply("ends-sum", _sum_of_ends, handle) for handle in ends])
    lower, upper = (math.fsum(column) for column in zip(*sums, strict=True))
    handles = [run.executor.apply("upper-ends", _upper, handle) for handle in ends]
    return Weighing(handles, upper, _fidelity(ridge, run.rows.n_rows, lower, upper, draws))


def _ends(scored: ScoredRows, start: int) -> NDArray[np.float64]:
    return np.hstack([scored.whole("lower"), scored.whole("upper")])


def _sum_of_ends(ends: NDArray[np.float64]) -> NDArray[np.float64]:
    return ends.sum(axis=0)


def _upper(ends: NDArray[np.float64]) -> NDArray[np.float64]:
    return ends[:, 1].copy()


def _fidelity(ridge: float, n_rows: int, lower: float, upper: float, draws: int) -> ScoreFidelity:
    """Of draws by upper ends u, given Σ of both ends: u_i/p_i = Σu, but for round-off and integer weights."""
    inflated = upper * (1.0 + 1e-12) + math.ldexp(n_rows, -binary_scale(1.0, n_rows))
    return ScoreFidelity(
        ridge=ridge, beta=min(lower * (1.0 - 1e-12) / inflated, 1.0), inflated_dimension=inflated, draws=draws,
        failure_probability=FIRST_ROUND_FAILURE,
    )  # fmt: skip
