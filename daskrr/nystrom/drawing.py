"""From weights to landmarks: the passes over the rows that a draw needs, and the drawn rows themselves."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.errors import InvalidData, InvalidParameter
from daskrr.kernels import Kernel
from daskrr.numerics.reservoir import Order, Reservoir
from daskrr.numerics.reservoir import merge as merge_reservoirs
from daskrr.numerics.tiles import check_finite
from daskrr.nystrom import landmarks as draws
from daskrr.nystrom.landmarks import Landmarks, ScoreFidelity
from daskrr.runtime.blocks import Block
from daskrr.runtime.devices import within_call
from daskrr.runtime.executors import Executor
from daskrr.runtime.map_blocks import BlockMap, Run, map_blocks
from daskrr.runtime.rows import Rows, for_one_task, narrowed, pieces
from daskrr.storage.journal import Journal
from daskrr.storage.zarr_arrays import checksum

MEDIAN_SAMPLE = 1000
JOIN_FANIN = 64
TAKEN_BY_A_THREAD = 4
PROBABILITY_SUM_TOLERANCE = 1e-6


@dataclass(frozen=True)
class RowWeights:
    """Sampling weights of every row, on the workers: a handle for each span, of those of its blocks; and their sum.

    ``fidelity`` is what is certain about draws by upper ends of scores.
    """

    handles: Sequence[Any]
    total: float
    fidelity: ScoreFidelity | None = None


def draw_by_diagonal(
    run: Run, kernel: Kernel, size: int, seed: int, replacement: bool
) -> tuple[Landmarks, RowWeights | None]:
    """Draw by the diagonal of the kernel (Algorithm, step 1); only one that differs from row to row costs a pass."""
    if kernel.constant_diagonal:
        return draws.draw_uniform(run.rows.n_rows, size, draws.stream(seed, "landmarks"), replacement), None
    weighing = _weigh_rows(run, run.rows, kernel)
    return draw_weighted(run, weighing, size, seed, 0, replacement), weighing


def draw_by_probabilities(
    run: Run, probabilities: Rows, size: int, seed: int, replacement: bool
) -> tuple[Landmarks, RowWeights]:
    """Draw by probabilities (n,) of the rows, which one light pass checks."""
    weighing = _weigh_rows(run, probabilities, None)
    return draw_weighted(run, weighing, size, seed, 0, replacement), weighing


def weigh(weights: BlockMap) -> RowWeights:
    """Weigh the rows of every block; the weights stay on the workers."""
    handles = weights.handles("weigh rows")
    return RowWeights(handles, math.fsum(of_blocks(weights.run.executor, "weights-sum", math.fsum, handles)))


def _weigh_rows(run: Run, source: Rows, kernel: Kernel | None) -> RowWeights:
    """One light pass for the weights, which stay on the workers."""
    weighing = weigh(map_blocks(run, "weigh-rows", partial(_weigh, kernel), source))
    _check_total(weighing.total, kernel is None)
    return weighing


def draw_weighted(
    run: Run,
    weighing: RowWeights,
    size: int,
    seed: int,
    round_number: int = 0,
    replacement: bool = True,
    purpose: str = "landmarks",
) -> Landmarks:
    """Draw ``size`` rows by weights that lie on the workers."""
    if not replacement:
        order = Order.of(draws.child(seed, purpose, round_number))
        starts = [span.start for span in run.spans]
        first_rows = partial(_first_rows, order, size)
        firsts = run.executor.apply_all("first-rows", first_rows, list(zip(starts, weighing.handles, strict=True)))
        rows = run.executor.value(run.executor.apply("first-rows-join", _join_first, *firsts)).rows
        return draws.merge(rows, None)
    largest = max(of_blocks(run.executor, "weights-range", np.max, weighing.handles))
    scale = draws.binary_scale(float(largest), run.rows.n_rows)
    handles = run.executor.apply_all("weights-sum", partial(_integer_sum, scale), [[one] for one in weighing.handles])
    sums = np.array(run.executor.values(handles), np.int64)
    return _locate_rows(run, weighing.handles, sums, scale, size, draws.stream(seed, purpose, round_number))


def _first_rows(order: Order, size: int, start: int, weights: Sequence[NDArray[np.float64]]) -> Reservoir:
    joined = np.concatenate(weights)
    return Reservoir.of(order, size, joined, start, np.empty((len(joined), 0)))


def _join_first(*parts: Reservoir) -> Reservoir:
    return merge_reservoirs(parts)


def of_blocks(executor: Executor, name: str, function: Callable, handles: Sequence[Any]) -> list[Any]:
    """The small results of ``function`` on what handles of spans have of each block."""
    found = executor.values(executor.apply_all(name, partial(_on_each, function), [[handle] for handle in handles]))
    return [value for values in found for value in values]


def _on_each(function: Callable, parts: Sequence[Any]) -> list[Any]:
    return [function(part) for part in parts]


def _check_total(total: float, is_probability: bool) -> None:
    if is_probability and abs(total - 1.0) > PROBABILITY_SUM_TOLERANCE:
        raise InvalidParameter(f"the sampling probabilities sum to {total:.9g}, not to 1. Divide them by their sum.")
    if not total > 0:
        raise InvalidData("the kernel is zero on every row: there is nothing to sample, and every score is 0.")


def _weigh(kernel: Kernel | None, source: Any, start: int) -> NDArray[np.float64]:
    """Sampling weights of one block: the kernel's diagonal, or the given probabilities."""
    parts: list[NDArray[np.float64]] = []
    first = start
    for piece in pieces(source):
        if kernel is not None:
            check_finite(piece, first)
        parts.append(np.asarray(piece if kernel is None else kernel.diagonal(piece), np.float64))
        first += len(piece)
    weights = np.concatenate(parts)
    draws.check_weights(weights, start)
    return weights


def _integer_sum(scale: int, weights: Sequence[NDArray[np.float64]]) -> int:
    return int(draws.integer_weights(np.concatenate(weights), scale).sum())


def _locate_rows(
    run: Run,
    handles: Sequence[Any],
    sums: NDArray[np.int64],
    scale: int,
    size: int,
    generator: np.random.Generator,
) -> Landmarks:
    """Locate the draws among the spans here, and within each span where its weights are."""
    total = int(sums.sum())
    places, offsets = draws.locate(draws.draw_integers(total, size, generator), sums)
    hit = np.unique(places)
    wanted = [(handles[i], scale, offsets[places == i]) for i in hit]
    located = run.executor.values(run.executor.apply_all("locate-rows", _locate_in_span, wanted))
    rows = [positions + run.spans[i].start for i, (positions, _) in zip(hit, located, strict=True)]
    weights = [integers for _, integers in located]
    return draws.merge(np.concatenate(rows), np.concatenate(weights) / total)


def _locate_in_span(
    weights: Sequence[NDArray[np.float64]], scale: int, offsets: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    integers = draws.integer_weights(np.concatenate(weights), scale)
    positions, _ = draws.locate(offsets, integers)
    return positions.astype(np.int64), integers[positions]


def fetch_rows(run: Run, indices: NDArray[np.int64], name: str, called: str = "the input") -> Any:
    """Handle of the rows ``indices`` (ascending) of X as one float64 array, assembled on a worker.

    With a journal they are recorded, and need not be looked for in the input again. Errors tell what X is ``called``.
    """
    if run.journal is None:
        return _assemble_rows(run, indices, name, called, _join)
    label = f"{name}-{checksum(indices):08x}"
    if run.journal.has(label):
        return run.executor.apply(f"{name}-kept", partial(_kept_rows, run.journal, label))
    return _assemble_rows(run, indices, name, called, partial(_join_and_keep, run.journal, label))


def _join_and_keep(journal: Journal, label: str, *parts: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """The rows once they are recorded; those of before if this is done again, since a worker was lost."""
    if not journal.has(label):
        journal.write_one(label, {"rows": _join(*parts)})
    return _kept_rows(journal, label)


def _kept_rows(journal: Journal, label: str) -> NDArray[np.float64]:
    return journal.read(label)["rows"]


def _assemble_rows(
    run: Run, indices: NDArray[np.int64], name: str, called: str, join: Callable[..., NDArray[np.float64]]
) -> Any:
    # Blocks may share a chunk, or have several; here each that has one of these rows is decoded once, unless chunks
    # are not all of one height.
    unit = run.rows.unit_rows
    height = unit if run.rows.is_stored and unit > 1 else max(unit, run.height)
    needed = np.unique(indices // height)
    # What is stored is read by a few tasks; of anything else, no more is sent or made than is needed.
    n_tasks = min(len(needed), TAKEN_BY_A_THREAD * run.executor.n_threads) if run.rows.is_stored else len(needed)
    stretches = [
        Block(int(group[0]), int(group[0]) * height, min(int(group[-1] + 1) * height, run.rows.n_rows))
        for group in np.array_split(needed, n_tasks)
    ]
    bounds = np.searchsorted(indices, [(one.start, one.stop) for one in stretches])
    wanted = [[indices[low:high] - one.start] for one, (low, high) in zip(stretches, bounds, strict=True)]
    each: list[list[Any]] = [wanted, [[one.n_rows] for one in stretches]]
    parts = map_blocks(
        run, name, partial(_take, height, called, run.rows.shape[1:]), run.rows, each=each, blocks=stretches
    ).handles()
    if len(parts) > JOIN_FANIN:
        groups = [parts[i : i + JOIN_FANIN] for i in range(0, len(parts), JOIN_FANIN)]
        parts = run.executor.apply_all(f"{name}-join", _as_one_part, groups)
    return run.executor.apply(f"{name}-join", join, *parts)


def _take(
    height: int, called: str, shape: tuple[int, ...], source: Any, start: int, positions: NDArray[np.int64], n_rows: int
) -> NDArray[np.float64]:
    """The wanted rows of some blocks of so many rows, in float64, all finite; blocks without any are not read."""
    # Room for all: small results between large chunks would keep what these leave from being used again.
    taken = np.empty((len(positions), *shape))

    def take(first: int) -> None:
        stop = min(first + height, n_rows)
        low, high = np.searchsorted(positions, [first, stop])
        block = source if n_rows <= height else narrowed(source, first, stop)
        # For itself, so that the block that follows, of which nothing may be wanted, is not read ahead.
        parts = pieces(for_one_task(block))
        _take_from(parts, called, start, first, positions[low:high], taken[low:high])

    firsts = (np.unique(positions // height) * height).tolist()
    deque(within_call(partial(take, first) for first in firsts), maxlen=0)
    return taken


def _take_from(
    parts: Iterable[NDArray], called: str, start: int, first: int, positions: NDArray[np.int64], taken: NDArray
) -> None:
    for piece in parts:
        low, high = np.searchsorted(positions, [first, first + len(piece)])
        inside = positions[low:high] - first
        for row in inside:
            check_finite(piece[row : row + 1].reshape(1, -1), start + first + int(row), called)
        taken[low:high] = piece[inside]
        first += len(piece)


def _join(*parts: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.concatenate([rows for part in parts for rows in part])


def _as_one_part(*parts: Sequence[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    return [_join(*parts)]


def resolve_kernel(run: Run, kernel: Kernel, seed: int) -> Kernel:
    """Measure a length scale given as "median" on a seeded sample of rows."""
    if not kernel.needs_sample:
        return kernel
    n_rows = run.rows.n_rows
    generator = draws.stream(seed, "length scale")
    indices = np.sort(generator.choice(n_rows, min(MEDIAN_SAMPLE, n_rows), replace=False, shuffle=False))
    sample = fetch_rows(run, indices, "sample-length-scale")
    return run.executor.value(run.executor.apply("resolve-kernel", kernel.resolve, sample))
