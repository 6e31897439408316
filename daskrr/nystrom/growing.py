"""Landmarks in rounds: each looks at what the landmarks so far leave unexplained, and adds to them."""

import math
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.kernels import Kernel
from daskrr.numerics import blas
from daskrr.numerics.greedy import most_explaining
from daskrr.numerics.pass1 import Draw, clear_residual, whitened_rows
from daskrr.numerics.reservoir import Order, Reservoir
from daskrr.nystrom.audit import residual_matrix
from daskrr.nystrom.drawing import draw_by_diagonal, fetch_rows
from daskrr.nystrom.factors import TileFactors
from daskrr.nystrom.first_pass import Chosen, FirstPass, Settings
from daskrr.nystrom.landmarks import Landmarks, child, stream
from daskrr.nystrom.reading import whitener_of
from daskrr.runtime.map_blocks import Run

# New landmarks are chosen among so many times as many rows, as long as those are not too many to compare. A choice may
# take this share of the operations of the pass that follows; it runs a few times as slowly as that, on one core.
CANDIDATES = 6
ENOUGH_CANDIDATES = 2000
CHOICE_SHARE = 0.02


def round_sizes(size: int, rounds: int) -> list[int]:
    """Landmarks after each round: equal steps, as many rounds as there are landmarks for."""
    return sorted({max(1, size * number // rounds) for number in range(1, rounds + 1)})


def first_landmarks(run: Run, settings: Settings, size: int, seed: int, replacement: bool) -> Chosen:
    """The landmarks of a first round, by the diagonal of the kernel."""
    landmarks, _ = draw_by_diagonal(run, settings.kernel, size, seed, replacement)
    return Chosen(landmarks, fetch_rows(run, landmarks.indices, "sample-rows"))


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
    size: int, seed: int, round_number: int, payload: TileFactors, drawn: dict[str, Reservoir]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    found = drawn["landmarks"]
    chosen = found.draw(size, stream(seed, "landmarks", round_number))
    return found.rows[chosen], found.X[chosen]


def _most_explaining(
    size: int, kernel: Kernel, dtype: np.dtype, payload: TileFactors, drawn: dict[str, Reservoir]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    candidates, stands_for = drawn["landmarks"].candidates()
    if len(candidates) <= size:
        return candidates.rows, candidates.X
    with blas.one_thread():
        B = whitened_rows(whitener_of(payload, kernel, dtype), candidates.X)
        E = residual_matrix(kernel, candidates.X, B)
        # Units do not matter to the choice, and float32 is precise enough for it, if nothing overflows.
        scale = float(np.diagonal(E).max())
        chosen = most_explaining((E / scale).astype(np.float32), stands_for / stands_for.max(), size)
    return candidates.rows[chosen], candidates.X[chosen]


def _rows(picked: tuple[NDArray, NDArray]) -> NDArray[np.int64]:
    return picked[0]


def _points(picked: tuple[NDArray, NDArray]) -> NDArray[np.float64]:
    return picked[1]


def _stack(order: NDArray[np.intp], *parts: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate(parts)[order]
