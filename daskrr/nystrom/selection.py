"""From a sampling scheme to landmarks: the passes over the rows that a draw needs, and the drawn rows themselves."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import dask.array as da
import numpy as np
import zarr
from dask.delayed import Delayed
from numpy.typing import NDArray

from daskrr.engine.journal import Journal
from daskrr.engine.passes import Executor, Run, split, task
from daskrr.engine.progress import Stage
from daskrr.engine.rows import Rows, open_rows, pieces, readable
from daskrr.engine.storage import checksum
from daskrr.errors import CheckFailed, InvalidData, InvalidParameter, check_count
from daskrr.kernels import Kernel
from daskrr.numerics.reservoir import Order, Reservoir
from daskrr.numerics.reservoir import merge as merge_reservoirs
from daskrr.numerics.tiles import check_finite
from daskrr.nystrom import sampling as draws
from daskrr.nystrom.sampling import Landmarks, ScoreFidelity

SCHEMES = ("residual", "leverage", "diagonal", "uniform")
MEDIAN_SAMPLE = 1000
JOIN_FANIN = 64
PROBABILITY_SUM_TOLERANCE = 1e-6


def check_sampling(sampling: Any, n_rows: int) -> str | NDArray[np.int64] | Rows:
    """Read ``sampling``: a scheme's name, landmark indices, or a view of n probabilities.

    Raises
    ------
    InvalidParameter
        Neither a scheme nor an array that can be read as one or the other.
    """
    if isinstance(sampling, str) and sampling in SCHEMES:
        return sampling
    if isinstance(sampling, str):
        raise InvalidParameter(f"sampling must be one of {', '.join(SCHEMES)} or an array, got {sampling!r}")
    sampling = readable(sampling, "sampling")
    array = sampling if isinstance(sampling, (da.Array, zarr.Array)) else np.asarray(sampling)
    readings = (
        f"sampling as an array is either {n_rows} probabilities (floating dtype, one per row of X) or the row numbers "
        f"of the landmarks (integer dtype); got dtype {array.dtype} and shape {array.shape}."
    )
    if array.dtype.kind in "iu" and array.ndim == 1:
        return np.asarray(array).astype(np.int64)
    if array.dtype.kind != "f" or array.shape != (n_rows,):
        raise InvalidParameter(readings)
    return open_rows(array, ndim=1, name="sampling")


@dataclass(frozen=True)
class Weighing:
    """Sampling weights of every row, on the workers: a handle for each block, and their sum.

    ``fidelity`` is what is certain about draws by upper ends of scores.
    """

    handles: Sequence[Any]
    total: float
    fidelity: ScoreFidelity | None = None


def draw_landmarks(
    run: Run,
    kernel: Kernel,
    sampling: str | NDArray[np.int64] | Rows,
    n_landmarks: int | None,
    seed: int,
    replacement: bool = True,
) -> tuple[Landmarks, Weighing | None]:
    """Draw the landmarks (Algorithm, step 1); only weights that differ from row to row cost a pass."""
    if isinstance(sampling, np.ndarray):
        return draws.given(sampling, run.rows.n_rows, n_landmarks), None
    size = check_count("n_landmarks", n_landmarks)
    if isinstance(sampling, str) and (sampling == "uniform" or kernel.constant_diagonal):
        return draws.draw_uniform(run.rows.n_rows, size, draws.stream(seed, "landmarks"), replacement), None
    source, by = (sampling, None) if isinstance(sampling, Rows) else (run.rows, kernel)
    weighing = _weigh_rows(run, source, by)
    return draw_weighted(run, weighing, size, seed, 0, replacement), weighing


def weigh(run: Run, tasks: Iterable[Delayed]) -> Weighing:
    """Run tasks that weigh the rows of one block each; the weights stay on the workers."""
    handles = run.collect("weigh rows", tasks)
    return Weighing(handles, math.fsum(_each(run.executor, "weights-sum", math.fsum, handles)))


def _weigh_rows(run: Run, source: Rows, kernel: Kernel | None) -> Weighing:
    """One light pass for the weights, which stay on the workers."""
    source = source.anew(f"weigh-rows-{run.name}")
    work = partial(_weigh, kernel)
    tasks = (task("weigh-rows", run.name, b.index, work, source.source(b.start, b.stop), b.start) for b in run.blocks)
    weighing = weigh(run, tasks)
    _check_total(weighing.total, kernel is None)
    return weighing


def draw_weighted(
    run: Run,
    weighing: Weighing,
    size: int,
    seed: int,
    round_number: int = 0,
    replacement: bool = True,
    purpose: str = "landmarks",
) -> Landmarks:
    """Draw ``size`` rows by weights that lie on the workers."""
    if not replacement:
        order = Order.of(draws.child(seed, purpose, round_number))
        firsts = [
            run.executor.apply("first-rows", partial(_first_rows, order, size, block.start), handle)
            for block, handle in zip(run.blocks, weighing.handles, strict=True)
        ]
        rows = run.executor.value(run.executor.apply("first-rows-join", _join_first, *firsts)).rows
        return draws.merge(rows, None)
    largest = max(_each(run.executor, "weights-range", np.max, weighing.handles))
    scale = draws.binary_scale(float(largest), run.rows.n_rows)
    sums = _each(run.executor, "weights-sum", partial(_integer_sum, scale), weighing.handles)
    generator = draws.stream(seed, purpose, round_number)
    return _locate_rows(run, weighing.handles, np.array(sums, np.int64), scale, size, generator)


def _first_rows(order: Order, size: int, start: int, weights: NDArray[np.float64]) -> Reservoir:
    return Reservoir.of(order, size, weights, start, np.empty((len(weights), 0)))


def _join_first(*parts: Reservoir) -> Reservoir:
    return merge_reservoirs(parts)


def _each(executor: Executor, name: str, function: Callable, handles: Sequence[Any]) -> list[Any]:
    """The small results of ``function`` on each handle."""
    return executor.values([executor.apply(name, function, handle) for handle in handles])


def _check_total(total: float, is_probability: bool) -> None:
    if is_probability and abs(total - 1.0) > PROBABILITY_SUM_TOLERANCE:
        raise InvalidParameter(f"the sampling probabilities sum to {total:.9g}, not to 1. Divide them by their sum.")
    if not total > 0:
        raise InvalidData("the kernel is zero on every row: there is nothing to sample, and every score is 0.")


def _weigh(kernel: Kernel | None, source: Any, start: int) -> NDArray[np.float64]:
    """Sampling weights of one block: the kernel's diagonal, or the given probabilities."""
    found: list[NDArray[np.float64]] = []
    first = start
    for piece in pieces(source):
        if kernel is not None:
            check_finite(piece, first)
        found.append(np.asarray(piece if kernel is None else kernel.diagonal(piece), np.float64))
        first += len(piece)
    weights = np.concatenate(found)
    draws.check_weights(weights, start)
    return weights


def _integer_sum(scale: int, weights: NDArray[np.float64]) -> int:
    return int(draws.integer_weights(weights, scale).sum())


def _locate_rows(
    run: Run,
    handles: Sequence[Any],
    sums: NDArray[np.int64],
    scale: int,
    size: int,
    generator: np.random.Generator,
) -> Landmarks:
    """Locate the draws among the blocks here, and within each block where its weights are."""
    total = int(sums.sum())
    places, offsets = draws.locate(draws.draw_integers(total, size, generator), sums)
    hit = np.unique(places)
    found = run.executor.values(
        [run.executor.apply("locate-rows", _locate_in_block, handles[i], scale, offsets[places == i]) for i in hit]
    )
    rows = [positions + run.blocks[i].start for i, (positions, _) in zip(hit, found, strict=True)]
    weights = [integers for _, integers in found]
    return draws.merge(np.concatenate(rows), np.concatenate(weights) / total)


def _locate_in_block(
    weights: NDArray[np.float64], scale: int, offsets: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    integers = draws.integer_weights(weights, scale)
    positions, _ = draws.locate(offsets, integers)
    return positions.astype(np.int64), integers[positions]


def fetch_rows(run: Run, indices: NDArray[np.int64], name: str) -> Any:
    """Handle of the rows ``indices`` (ascending) of X as one float64 array, assembled on a worker.

    With a journal they are recorded, and need not be looked for in the input again.
    """
    if run.journal is None:
        return _assemble_rows(run, indices, name)
    label = f"{name}-{checksum(indices):08x}"
    if not run.journal.has(label):
        found = _assemble_rows(run, indices, name)
        run.executor.settle([run.executor.apply(f"{name}-keep", partial(_keep_rows, run.journal, label), found)])
    return run.executor.apply(f"{name}-kept", partial(_kept_rows, run.journal, label))


def _keep_rows(journal: Journal, label: str, X: NDArray[np.float64]) -> None:
    journal.write_one(label, {"rows": X})


def _kept_rows(journal: Journal, label: str) -> NDArray[np.float64]:
    found = journal.read_one(label)
    if found is None:
        raise CheckFailed(f"the record {label} is gone. What the job had finished is dropped; run it again.")
    return found["rows"]


def _assemble_rows(run: Run, indices: NDArray[np.int64], name: str) -> Any:
    rows = run.rows.anew(f"{name}-{run.name}")
    # Blocks may share a chunk; here each chunk is decoded once.
    blocks = split(rows.n_rows, max(rows.unit_rows, run.blocks[0].n_rows))
    starts = np.array([block.start for block in blocks])
    place = np.searchsorted(starts, indices, side="right") - 1
    needed = [(blocks[i], indices[place == i] - starts[i]) for i in np.unique(place)]
    tasks = (
        task(name, run.name, block.index, _take, rows.source(block.start, block.stop), block.start, positions)
        for block, positions in needed
    )
    parts = []
    with Stage(run.report, name.replace("-", " "), total=len(needed), total_rows=len(indices)) as stage:
        window = run.executor.window(tasks, [block for block, _ in needed])
        for (_, positions), (_, part) in zip(needed, window, strict=True):
            parts.append(part)
            stage.advance(rows=len(positions))
    while len(parts) > 1:
        groups = [parts[i : i + JOIN_FANIN] for i in range(0, len(parts), JOIN_FANIN)]
        parts = [run.executor.apply(f"{name}-join", _join, *group) for group in groups]
    return parts[0]


def _take(source: Any, start: int, positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """The wanted rows of one block, in float64, all finite."""
    taken, first = [], 0
    for piece in pieces(source):
        inside = positions[(positions >= first) & (positions < first + len(piece))] - first
        for row in inside:
            check_finite(piece[row : row + 1], start + first + int(row))
        taken.append(piece[inside].astype(np.float64))
        first += len(piece)
    return np.concatenate(taken)


def _join(*parts: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate(parts)


def resolve_kernel(run: Run, kernel: Kernel, seed: int) -> Kernel:
    """Measure a length scale given as "median" on a seeded sample of rows."""
    if not kernel.needs_sample:
        return kernel
    n_rows = run.rows.n_rows
    generator = draws.stream(seed, "length scale")
    indices = np.sort(generator.choice(n_rows, min(MEDIAN_SAMPLE, n_rows), replace=False, shuffle=False))
    sample = fetch_rows(run, indices, "sample-length-scale")
    return run.executor.value(run.executor.apply("resolve-kernel", kernel.resolve, sample))
