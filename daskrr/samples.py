"""A small weighted sample of the rows that stands for all of them."""

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from dask.delayed import Delayed
from numpy.typing import NDArray

from daskrr.engine.feed import reporter
from daskrr.engine.passes import Run, executor, split, task
from daskrr.engine.progress import Reporter
from daskrr.engine.rows import JoinedRows, Rows, has_no_path, open_rows, pieces
from daskrr.engine.storage import RESULT_KEY, OutputStore, stored_column
from daskrr.errors import InvalidData, InvalidParameter, check_count
from daskrr.jobstore import open_published
from daskrr.numerics.score import ScoredRows
from daskrr.nystrom.sampling import Landmarks, check_seed
from daskrr.nystrom.selection import Weighing, draw_weighted, fetch_rows, weigh
from daskrr.result import LeverageResult

SAMPLE_CHUNK_ROWS = 8192


@dataclass(frozen=True)
class RowSample:
    """Rows drawn independently and with replacement, ascending.

    Attributes
    ----------
    indices
        (size,) row numbers; a row drawn twice is there twice.
    probabilities
        (size,) probability of each in one draw.
    points
        (size, d) the rows themselves.
    by
        What the probabilities are in proportion to.
    random_state
        The seed.
    """

    indices: NDArray[np.int64]
    probabilities: NDArray[np.float64]
    points: NDArray[np.float64]
    by: str
    random_state: int

    @property
    def weights(self) -> NDArray[np.float64]:
        """(size,) 1/√(size·p_i): with rows so weighted, sums of squares over the sample are right on average."""
        return 1.0 / np.sqrt(len(self.indices) * self.probabilities)

    def __len__(self) -> int:
        return len(self.indices)


def sample_rows(
    result: LeverageResult | str | os.PathLike,
    size: int,
    *,
    random_state: int | None = None,
    ridge: float | None = None,
    X: Any = None,
    output: str | os.PathLike | None = None,
    overwrite: bool = False,
    progress: Reporter | bool | None = None,
) -> RowSample:
    """Draw rows in proportion to their leverage, with the weights that make up for it.

    Probabilities are in proportion to the certified upper ends, which cannot overlook a row (Theorem 3). Without
    these they are half by the estimate and half uniform.

    Parameters
    ----------
    result
        What :func:`daskrr.leverage_scores` returned, or the path of a store of scores.
    size
        Number of draws, with replacement.
    random_state
        Seed. None draws one and records it.
    ridge
        Which of several ridges; the smallest by default.
    X
        The rows that were scored, where ``result`` is a store; by default the input that it names. Rows that were in
        memory then have to be given.
    output
        Also write a Zarr group with ``points``, ``weights``, ``probabilities`` and ``indices``.

    Raises
    ------
    InvalidParameter, InvalidData, OutputExists
        Before any long work.

    Examples
    --------
    >>> import numpy as np, daskrr
    >>> X = np.random.default_rng(0).standard_normal((500, 2))
    >>> result = daskrr.leverage_scores(X, daskrr.kernels.Gaussian(1.0), 1e-2, 100, certify=True, random_state=0)
    >>> sample = daskrr.sample_rows(result, 50, random_state=0)
    >>> sample.points.shape
    (50, 2)
    """
    check_count("size", size)
    seed = check_seed(random_state)
    store = None if output is None else OutputStore(output, overwrite, "a sample")
    with reporter(progress) as report:
        if isinstance(result, LeverageResult):
            if X is not None:
                raise InvalidParameter("X is known to a result in memory; give it with a store of scores only.")
            run, weighing, by = _of_result(result, ridge, report)
        else:
            run, weighing, by = _of_store(result, ridge, X, report)
        drawn = draw_weighted(run, _mixed(run, weighing, by), size, seed, purpose="sample")
        points = run.executor.value(fetch_rows(run, drawn.indices, "fetch-sample"))
    sample = _expanded(drawn, points, by, seed)
    if store is not None:
        _write(store, sample)
    return sample


def _of_result(result: LeverageResult, ridge: float | None, report: Reporter) -> tuple[Run, Weighing, str]:
    by = _sampling_by(result.certified)
    rows = result.rows.rows if isinstance(result.rows, JoinedRows) else result.rows
    run = Run(uuid.uuid4().hex, rows, result.blocks, result.executor, report)
    tasks = result.score_tasks(f"weigh-{run.name}", partial(_weights, by, result.column(ridge)))
    return run, weigh(run, tasks), by


def _weights(by: str, column: int, scored: ScoredRows, start: int) -> NDArray[np.float64]:
    return scored.whole(by)[:, column]


def _sampling_by(certified: bool) -> str:
    return "upper" if certified else "estimate"


def _mixed(run: Run, weighing: Weighing, by: str) -> Weighing:
    """An estimate may overlook a row, so that half of the chance falls on all rows alike.

    Raises
    ------
    InvalidData
        There is nothing to be in proportion to.
    """
    if not weighing.total > 0:
        raise InvalidData("every score is 0, so that no row is more likely than another: there is nothing to sample.")
    if by == "upper":
        return weighing
    floor = weighing.total / run.rows.n_rows
    handles = [run.executor.apply("mix-weights", partial(np.add, floor), handle) for handle in weighing.handles]
    return Weighing(handles, 2.0 * weighing.total)


def _of_store(path: Any, ridge: float | None, X: Any, report: Reporter) -> tuple[Run, Weighing, str]:
    group = open_published(path)
    attributes: Any = group.attrs[RESULT_KEY]
    column = stored_column(group, ridge)
    n_rows = attributes["n_rows"]
    by = _sampling_by("upper" in group)
    rows = _scored_rows(attributes, X)
    stored: Any = group[by]
    values = open_rows(stored, ndim=stored.ndim, name=by)
    name = uuid.uuid4().hex
    run = Run(name, rows, split(n_rows, stored.chunks[0]), executor(name), report)
    run.executor.check(rows)

    def tasks() -> Iterator[Delayed]:
        for b in run.blocks:
            source = values.source(b.start, b.stop)
            yield task("weigh-rows", name, b.index, partial(_stored_weights, column), source)

    return run, weigh(run, tasks()), by


def _scored_rows(attributes: Any, X: Any) -> Rows:
    """The rows that a store has scores of.

    Raises
    ------
    InvalidData
        X is needed and not given, or has another shape; or the rows had weights.
    """
    parameters, n_rows, n_features = (attributes[name] for name in ("parameters", "n_rows", "n_features"))
    origin = parameters["input"]
    if parameters.get("sample_weight") is not None:
        raise InvalidData(
            "the scores are those of weighted rows, each of one repeat, and the store does not hold the weights. "
            "Sample from the result of leverage_scores."
        )
    if X is None and has_no_path(origin):
        raise InvalidData(
            f"the scores were made from an array in memory ({origin}), which the store does not hold. Give the rows "
            "that were scored with X= (--points)."
        )
    rows = open_rows(origin if X is None else X, missing_chunks=parameters["missing_chunks"])
    if rows.shape != (n_rows, n_features):
        raise InvalidData(
            f"the scores are of {n_rows} rows × {n_features} features, and X has {rows.shape[0]} × {rows.shape[1]}. "
            "Give the rows that were scored."
        )
    return rows


def _stored_weights(column: int, source: Any) -> NDArray[np.float64]:
    values = np.concatenate(list(pieces(source)))
    return values if values.ndim == 1 else values[:, column]


def _expanded(drawn: Landmarks, points: NDArray[np.float64], by: str, seed: int) -> RowSample:
    """Every draw for itself."""
    if drawn.probabilities is None:
        raise RuntimeError("rows were drawn without probabilities")
    repeated = np.repeat(np.arange(len(drawn.indices)), drawn.counts)
    return RowSample(drawn.indices[repeated], drawn.probabilities[repeated], points[repeated], by, seed)


def _write(store: OutputStore, sample: RowSample) -> None:
    shapes = {name: (len(sample),) for name in ("weights", "probabilities", "indices")}
    with store as output:
        output.create(shapes | {"points": sample.points.shape}, SAMPLE_CHUNK_ROWS, "feature", indices="int64")
        for name, array in output.arrays.items():
            array[...] = getattr(sample, name)
        output.commit({"by": sample.by, "random_state": sample.random_state, "n_rows": len(sample)})
