"""A small weighted sample of the rows that stands for all of them."""

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.errors import InvalidData, InvalidParameter, check_count
from daskrr.jobs.reader import open_scores
from daskrr.leverage.result import LeverageResult
from daskrr.numerics.pass2 import ScoredRows
from daskrr.nystrom.drawing import RowWeights, draw_weighted, fetch_rows, weigh
from daskrr.nystrom.landmarks import Landmarks, check_seed
from daskrr.runtime.map_blocks import Run, map_blocks
from daskrr.runtime.progress import Reporter
from daskrr.runtime.rows import JoinedRows, Rows, has_no_path, open_rows, pieces
from daskrr.runtime.telemetry import reporter
from daskrr.storage.saving import Saving
from daskrr.storage.urls import redact

SAMPLE, SAMPLE_CHUNK_ROWS = "a sample", 8192
# Of the draws so many fall on all rows alike: an estimate may overlook a row, and a row of score 0 must be counted too.
# No weight exceeds n/(share·size) then.
UNIFORM_SHARE = {"upper": 0.1, "estimate": 0.5}


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
        What the probabilities follow, but for the share of the draws that falls on all rows alike.
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
        """(size,) 1/(size·p_i), the ``sample_weight`` of others: a weighted sum is the one over all rows on average.

        The weights sum to about n. Where rows have a ``sample_weight`` of their own, they have it besides.
        """
        return 1.0 / (len(self.indices) * self.probabilities)

    @property
    def sketch_scales(self) -> NDArray[np.float64]:
        """(size,) 1/√(size·p_i), the entries of the paper's sampling matrix S, for which E[S·Sᵀ] = I.

        They scale rows or columns that are then multiplied with each other, as in K·S·Sᵀ·K; they weigh no sum.
        """
        return np.sqrt(self.weights)

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

    A sum over the sample, each row times its weight, is the sum over all rows on average: the weights are the
    ``sample_weight`` of estimators and the weights of :func:`numpy.average`. Their square roots, by which a sketch
    scales columns, are ``sketch_scales``.

    Nine tenths of the draws are in proportion to the certified upper ends (Theorem 3, with β at least 0.9 Σl/Σu),
    and one tenth is uniform, so that no weight exceeds 10 n/size. Without upper ends, which cannot overlook a row,
    half of the draws are by the estimate and half are uniform.

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
    >>> sample = daskrr.jobs.sample_rows(result, 50, random_state=0)
    >>> sample.points.shape
    (50, 2)
    >>> mean = np.average(sample.points, axis=0, weights=sample.weights)  # near X.mean(axis=0)
    """
    check_count("size", size)
    seed = check_seed(random_state)
    store = None if output is None else Saving(output, overwrite, SAMPLE)
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
        _write(store, sample, run.rows.origin)
    return sample


def _of_result(result: LeverageResult, ridge: float | None, report: Reporter) -> tuple[Run, RowWeights, str]:
    by = _sampling_by(result.certified)
    rows = result.rows.rows if isinstance(result.rows, JoinedRows) else result.rows
    run = Run(uuid.uuid4().hex, rows, result.spans, result.executor, report)
    weights = result.map_scores(f"weigh-{run.name}", partial(_weights, by, result.column(ridge)), report)
    return run, weigh(weights), by


def _weights(by: str, column: int, scored: ScoredRows, start: int) -> NDArray[np.float64]:
    return scored.whole(by)[:, column]


def _sampling_by(certified: bool) -> str:
    return "upper" if certified else "estimate"


def _mixed(run: Run, weighing: RowWeights, by: str) -> RowWeights:
    """The weights, with what makes a share of the draws uniform.

    Raises
    ------
    InvalidData
        There is nothing to be in proportion to.
    """
    if not weighing.total > 0:
        raise InvalidData("every score is 0, so that no row is more likely than another: there is nothing to sample.")
    uniform = weighing.total * UNIFORM_SHARE[by] / (1.0 - UNIFORM_SHARE[by])
    raised = partial(_raised, uniform / run.rows.n_rows)
    handles = run.executor.apply_all("mix-weights", raised, [[one] for one in weighing.handles])
    return RowWeights(handles, weighing.total + uniform)


def _raised(floor: float, weights: Sequence[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    return [floor + one for one in weights]


def _of_store(path: Any, ridge: float | None, X: Any, report: Reporter) -> tuple[Run, RowWeights, str]:
    scores = open_scores(path)
    attributes, column = scores.summary, scores.column(ridge)
    by = _sampling_by(scores.certified)
    rows = _scored_rows(attributes, X)
    stored = scores[by]
    values = open_rows(stored, ndim=stored.ndim, name=by)
    run = Run.over(rows, stored.chunks[0], report)
    run.executor.check(rows)
    return run, weigh(map_blocks(run, "weigh-rows", partial(_stored_weights, column), values)), by


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


def _stored_weights(column: int, source: Any, start: int) -> NDArray[np.float64]:
    values = np.concatenate(list(pieces(source)))
    return values if values.ndim == 1 else values[:, column]


def _expanded(drawn: Landmarks, points: NDArray[np.float64], by: str, seed: int) -> RowSample:
    """Every draw for itself."""
    if drawn.probabilities is None:
        raise RuntimeError("rows were drawn without probabilities")
    repeated = np.repeat(np.arange(len(drawn.indices)), drawn.counts)
    return RowSample(drawn.indices[repeated], drawn.probabilities[repeated], points[repeated], by, seed)


def _write(store: Saving, sample: RowSample, origin: str) -> None:
    shapes = {name: (len(sample),) for name in ("weights", "probabilities", "indices")}
    with store as output:
        output.create(shapes | {"points": sample.points.shape}, SAMPLE_CHUNK_ROWS, "feature", indices="int64")
        for name, array in output.arrays.items():
            array[...] = getattr(sample, name)
        about = {"by": sample.by, "random_state": sample.random_state, "n_rows": len(sample)}
        output.commit(about | {"input": redact(origin)})
