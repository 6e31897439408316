"""The fitted small object: landmarks, the factor of their kernel matrix, and the ridge.

A :class:`NystromSketch` is all that is left of the data after pass 1. Its factors stay where they were computed (the
scheduler, as a rule); what it holds itself is small. The functions here are tasks of both passes.
"""

import os
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from typing import Any

import dask.array as da
import distributed
import numpy as np
from dask.delayed import Delayed
from numpy.typing import NDArray

from daskrr.engine import feed
from daskrr.engine.opaque import unseal
from daskrr.engine.passes import Block, Executor, as_array, block_rows, executor, split, task
from daskrr.engine.rows import ConstantRows, JoinedRows, Rows, open_rows, pieces
from daskrr.engine.scheduler import Algebra, InProcess, held
from daskrr.engine.storage import OutputStore
from daskrr.errors import InvalidData, NotCertified
from daskrr.kernels import Kernel, from_spec
from daskrr.kernels.weighted import Weighted, unweighted
from daskrr.numerics import blas
from daskrr.numerics.algebra import kernel_error, residual_error, shift_of
from daskrr.numerics.bounds import Certainty
from daskrr.numerics.gram import Draw, GramPart, Kept, Targets, gram_block
from daskrr.numerics.regress import middle
from daskrr.numerics.reservoir import Order
from daskrr.numerics.score import score_block
from daskrr.numerics.tiles import check_finite, fill_tile
from daskrr.nystrom import saving
from daskrr.nystrom.reading import Reading, new_rows_task, quantity, whitener_of
from daskrr.nystrom.sampling import Landmarks
from daskrr.nystrom.saving import Arrays


@blas.one_thread()
def landmark_inputs(
    kernel: Kernel, dtype: np.dtype, penalty: NDArray[np.float64] | None, intercept: bool, X: NDArray[np.float64]
) -> dict[str, Any]:
    """W of the landmarks X (p, d), by differences and with an exact diagonal, and the tile kernel's error on it.

    For a regression with an intercept, also the kernel column in the middle of the landmarks.
    """
    W = kernel(X, X)
    W = 0.5 * (W + W.T)
    np.fill_diagonal(W, kernel.diagonal(X))
    if not np.isfinite(W).all():
        raise InvalidData("the kernel of the landmarks is not finite: it overflows. Scale the features down.")
    tile = np.empty(W.shape, dtype)
    fill_tile(kernel.columns(X, dtype), X, tile)
    found = {"W": W, "X": X, "error": kernel_error(tile, W, dtype), "penalty": penalty}
    return found | {"middle": _middle_column(kernel, X, W) if intercept else None}


def _middle_column(kernel: Kernel, X: NDArray[np.float64], W: NDArray[np.float64]) -> NDArray[np.float64]:
    """(p,) for rows of weight 1: kernel column in the middle of the landmarks, times their own roots of weights."""
    if not isinstance(kernel, Weighted):
        return middle(W, np.ones(len(W)))
    roots = X[:, -1]
    scale = np.where(roots > 0, roots, 1.0)
    return roots * middle(W / scale / scale[:, None], roots**2)


@dataclass(frozen=True)
class Folds:
    """Rows in ``number`` parts, at random but by their number alone."""

    number: int
    order: Order


@dataclass(frozen=True)
class TargetRows:
    """What is to be predicted: y, one or several per row, about an origin (t,).

    With folds, the sums of each are kept apart.
    """

    rows: Rows
    origin: NDArray[np.float64]
    folds: Folds | None = None


def gram_task(
    run: str,
    kernel: Kernel,
    dtype: np.dtype,
    draws: dict[str, Draw],
    with_gram: bool,
    about: tuple[NDArray[np.float64], Folds | None] | None,
    payload: dict[str, Any],
    source: Any,
    start: int,
    *targets: Any,
) -> GramPart:
    """Pass 1 on one block, with its targets if there are any."""
    found = None
    if about is not None:
        found = _targets(targets[0], start, isinstance(kernel, Weighted), payload["row_origin"], *about)
    part = gram_block(whitener_of(payload, kernel, dtype), pieces(source), start, draws, with_gram, found)
    if part.kept is not None:
        mean = part.totals.diagonal / max(1, len(part.kept.residual))
        feed.count("residual", run, start, part.kept.residual / (mean or 1.0), dtype)
    return part


def _pack(
    arrays: Arrays, about: dict[str, Any], payload: dict[str, Any], probe: dict[str, Any] | None
) -> tuple[Arrays, dict[str, Any]]:
    """What a sketch is stored as: its own arrays and attributes, and those of its factors and probe."""
    more, facts = saving.packed(payload, probe)
    return more | arrays, saving.sealed(more | arrays, facts | about)


def _call_with(then: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return then(*arguments)


def _and_then(then: Callable[[Any], Any], work: Callable[..., Any], *arguments: Any) -> Any:
    return then(work(*arguments))


def _targets(
    source: Any,
    start: int,
    weighted: bool,
    row_origin: NDArray[np.float64] | None,
    origin: NDArray[np.float64],
    folds: Folds | None,
) -> Targets:
    found = Targets(read_targets(source, start) - origin, weighted, row_origin=row_origin)
    if folds is None:
        return found
    number, size = folds.number, len(found.values)
    return replace(found, n_folds=number, folds=folds.order.folds(number, start, size))


def read_targets(source: Any, start: int) -> NDArray[np.float64]:
    """Targets (m, t) of the block of rows from ``start`` on."""
    values = np.concatenate([np.asarray(piece, np.float64) for piece in pieces(source)])
    values = values.reshape(len(values), -1)
    check_finite(values, start, "y")
    return values


def score_task(
    run: str,
    reading: Reading,
    then: Callable[..., Any],
    payload: dict[str, Any],
    probe: dict[str, Any] | None,
    source: Any,
    start: int,
    kept: Any,
    *more: Any,
) -> Any:
    """What ``then`` makes of pass 2 on one block."""
    scored = score_block(reading.scorer(payload, probe), pieces(source), start, kept_of(kept))
    smallest = reading.shifts.index(min(reading.shifts))
    feed.count("score", run, start, scored.scores[:, smallest], reading.dtype)
    return then(scored, start, *more)


def kept_of(kept: Any) -> Kept:
    """What pass 1 kept of a block: at hand, or where it was recorded."""
    return unseal(kept).read() if isinstance(kept, bytes) else kept


@dataclass(frozen=True, repr=False)
class NystromSketch:
    """Landmarks and factors that score any row, also rows that were not in the data.

    Attributes
    ----------
    kernel
        With every parameter resolved.
    ridges, single
        λ, one or several, and whether it was given as a number.
    landmarks
        The rows drawn, duplicates merged.
    rank
        How many of them are linearly independent at working precision.
    certainty
        What is certain about the scores of the data that it was fitted to, or None.
    gram_error
        Bound of the round-off of the Gram matrix, in norm.
    """

    kernel: Kernel
    ridges: tuple[float, ...]
    single: bool
    n_rows: int
    n_features: int
    dtype: np.dtype
    landmarks: Landmarks
    run: str
    algebra: Algebra = field(compare=False)
    rank: int
    pivots: NDArray[np.int64]
    kernel_error: float
    probe: Any = field(default=None, compare=False)
    certainty: Certainty | None = None
    gram_error: float = 0.0

    @property
    def shifts(self) -> tuple[float, ...]:
        """n·λ for every ridge, with the n of the data that the sketch was fitted to."""
        return tuple(shift_of(self.n_rows, ridge) for ridge in self.ridges)

    @property
    def reading(self) -> Reading:
        """What pass 2 shall find out."""
        return Reading(self.kernel, self.dtype, self.shifts, self.certainty, self.pivots)

    @property
    def ridge_text(self) -> str:
        """The ridges, for people."""
        return ", ".join(f"{ridge:g}" for ridge in self.ridges)

    def gram_flops(self, with_gram: bool = True) -> float:
        """Floating-point operations of a row in pass 1: kernel columns, a triangular product, and its Gram matrix."""
        return 2.0 * self.rank * self.n_features + (2.0 if with_gram else 1.0) * self.rank**2

    @property
    def score_flops(self) -> float:
        """Floating-point operations of a row in pass 2: a triangular product, and a full one for several ridges."""
        return 2.0 * self.rank * self.n_features + (1.0 if len(self.ridges) == 1 else 3.0) * self.rank**2

    @property
    def residual_error(self) -> float:
        """Round-off that a residual may carry, as a multiple of k_ii."""
        return residual_error(len(self.landmarks.indices), self.kernel_error)

    def scores(self, X_new: Any) -> da.Array:
        """Lazy scores (m,), (m, L) for a list of ridges, of new rows (m, d): what each has among the data.

        That is as row n + 1, with n·λ kept as it was: s/(1 + s), where s is :meth:`leverage_function`. Every row is
        appended for itself, so that it does not matter which are asked about together. Like the scores of the data they
        are never above the exact ones beyond round-off.

        Examples
        --------
        >>> import numpy as np, daskrr
        >>> X, kernel = np.random.default_rng(0).standard_normal((201, 2)), daskrr.kernels.Gaussian(1.0)
        >>> sketch = daskrr.leverage_scores(X[:200], kernel, 1e-2, 50, certify=True, random_state=0).sketch
        >>> exact = daskrr.exact.leverage_scores(X, kernel, 1e-2 * 200 / 201)[200]
        >>> bool(sketch.lower(X[200:]).compute()[0] <= exact <= sketch.upper(X[200:]).compute()[0])
        True
        """
        return self._evaluate(X_new, "scores")

    def leverage_function(self, X_new: Any) -> da.Array:
        """Lazy s = bᵀ(G + n·λ)⁻¹b of new rows, shaped like :meth:`scores`; may exceed 1.

        b is the row's part in the span of the landmarks. It is a lower bound of the ridge leverage function
        (k(x, x) − k_xᵀ(K + n·λ)⁻¹k_x)/(n·λ), up to round-off, and equals l/(1 − l) where l is the score.
        """
        return self._evaluate(X_new, "leverage_function")

    def estimate(self, X_new: Any) -> da.Array:
        """Lazy point estimates of the scores of new rows, corrected by the part of each that no landmark explains."""
        return self._evaluate(X_new, "estimate")

    def lower(self, X_new: Any) -> da.Array:
        """Lazy, like :meth:`scores`: what the exact score of a new row among the data is certainly not below.

        The failure probability is that of the data's certificate, for all new rows together, however many.

        Raises
        ------
        NotCertified
            The sketch was fitted without ``certify=True``.
        """
        return self._end(X_new, "lower")

    def upper(self, X_new: Any) -> da.Array:
        """Lazy, like :meth:`lower`: what the exact score of a new row among the data is certainly not above."""
        return self._end(X_new, "upper")

    def residual(self, X_new: Any) -> da.Array:
        """Lazy residuals (m,) of new rows: k(x, x) minus what the landmarks explain of it."""
        return self._evaluate(X_new, "residual")

    def _end(self, X_new: Any, name: str) -> da.Array:
        if self.certainty is None:
            raise NotCertified(f"the sketch has no {name}: it was fitted without certify=True (--certify). Fit it so.")
        return self._evaluate(X_new, name)

    def pick(self, array: da.Array, number: int) -> da.Array:
        """One quantity of several that stand side by side, each with a column for every ridge."""
        if self.single:
            return array[:, number]
        return array[:, number * len(self.ridges) : (number + 1) * len(self.ridges)]

    def _evaluate(self, X_new: Any, name: str) -> da.Array:
        rows, run = self.open_new_rows(X_new), uuid.uuid4().hex
        blocks = split(rows.n_rows, block_rows(max(self.rank, 1), rows))
        payload, probe = self.algebra.payload("new rows"), self.probe
        if isinstance(self.algebra, InProcess):
            payload, probe = self.held(executor(run))
        tasks = list(self.new_row_tasks(payload, probe, rows, blocks, run, partial(quantity, name)))
        single = self.single or name == "residual"
        found = as_array(f"new-rows-{run}", tasks, blocks, 1 if single else len(self.ridges))
        return found[:, 0] if single else found

    def open_new_rows(self, X_new: Any, missing_chunks: str = "refuse") -> Rows:
        """View rows as new ones.

        Raises
        ------
        InvalidData
            They have other features than the data that the sketch was fitted to.
        """
        rows = open_rows(X_new, missing_chunks=missing_chunks, name="X_new")
        if rows.shape[1] != self.n_features:
            raise InvalidData(f"X_new has {rows.shape[1]} features; the sketch was fitted to {self.n_features}.")
        if isinstance(self.kernel, Weighted):
            return JoinedRows(rows, ConstantRows(rows.n_rows, 1.0), self.kernel.scale)
        return rows

    def new_row_tasks(
        self, payload: Any, probe: Any, rows: Rows, blocks: Sequence[Block], run: str, then: Callable[..., Any]
    ) -> Iterator[Delayed]:
        """The tasks that score new rows; ``then`` is called with each block's scores and its first row."""
        work, rows = partial(new_rows_task, self.reading, then), rows.anew(f"new-rows-{run}")
        for b in blocks:
            yield task("score-new-rows", run, b.index, work, payload, probe, rows.source(b.start, b.stop), b.start)

    def packed(self) -> tuple[Arrays, dict[str, Any]]:
        """Arrays and attributes of which :meth:`unpacked` makes a sketch again that gives new rows the same bits."""
        probe = self.probe.result() if isinstance(self.probe, distributed.Future) else self.probe
        return self._packer(self.algebra.fetch("new rows"), probe)

    def pack_where_factors_go(self, where: Executor, then: Callable[[Arrays, dict[str, Any]], Any]) -> Any:
        """What ``then`` makes of the same, called by a worker, so that no factor comes to this process."""
        name = uuid.uuid4().hex
        given = self.algebra.payload("new rows"), self.probe
        one = task("store-sketch", name, 0, partial(_and_then, partial(_call_with, then), self._packer), *given)
        return where.value(next(where.window([one], [Block(0, 0, self.n_rows)]))[1])

    @property
    def _packer(self) -> Callable[[dict[str, Any], dict[str, Any] | None], tuple[Arrays, dict[str, Any]]]:
        drawn = {name: values for name, values in vars(self.landmarks).items() if values is not None}
        arrays = {"pivots": self.pivots} | {f"landmark_{name}": values for name, values in drawn.items()}
        certainty = self.certainty
        about = {
            "kernel": unweighted(self.kernel).to_spec(),
            "weight_scale": self.kernel.scale if isinstance(self.kernel, Weighted) else None,
            "ridges": list(self.ridges),
            "single": self.single,
            "n_rows": self.n_rows,
            "n_features": self.n_features,
            "dtype": str(self.dtype),
            "gram_error": self.gram_error,
            "certainty": certainty and vars(certainty) | {"score_errors": certainty.score_errors.tolist()},
        }
        return partial(_pack, arrays, about)

    @classmethod
    def unpacked(cls, arrays: Arrays, about: dict[str, Any], allow_functions: Collection[str] = ()) -> "NystromSketch":
        """What :meth:`packed` was called on, with its factors in this process."""
        factors, probe = saving.unpacked(arrays, about)
        known, scale = about["certainty"], about["weight_scale"]
        kernel = from_spec(about["kernel"], allow_functions)
        return cls(
            kernel=kernel if scale is None else Weighted(kernel, scale),
            ridges=tuple(about["ridges"]),
            single=about["single"],
            n_rows=about["n_rows"],
            n_features=about["n_features"],
            dtype=np.dtype(about["dtype"]),
            landmarks=Landmarks(
                arrays["landmark_indices"], arrays["landmark_counts"], arrays.get("landmark_probabilities")
            ),
            run=uuid.uuid4().hex,
            algebra=InProcess(factors),
            rank=len(arrays["landmarks"]),
            pivots=arrays["pivots"],
            kernel_error=about["kernel_error"],
            probe=probe,
            gram_error=about["gram_error"],
            certainty=known and Certainty(**known | {"score_errors": np.array(known["score_errors"])}),
        )

    def save(self, path: str | os.PathLike, *, overwrite: bool = False) -> None:
        """Write the sketch to a Zarr group: arrays and JSON, no pickles; :func:`daskrr.load` reads it.

        What was fitted to last month's data scores tonight's rows then, without that data and without a cluster.

        Raises
        ------
        OutputExists
            Something is at ``path`` and may not be replaced.

        Examples
        --------
        >>> import numpy as np, daskrr, tempfile
        >>> X = np.random.default_rng(0).standard_normal((200, 2))
        >>> sketch = daskrr.leverage_scores(X, daskrr.kernels.Gaussian(1.0), 1e-2, 50, random_state=0).sketch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sketch.save(f"{folder}/sketch.zarr")
        ...     again = daskrr.load(f"{folder}/sketch.zarr")
        >>> bool((again.scores(X + 1.0) == sketch.scores(X + 1.0)).all().compute())
        True
        """
        with OutputStore(path, overwrite, saving.SKETCH) as output:
            arrays, about = self.packed()
            output.write(arrays)
            output.commit(about)

    @property
    def identity(self) -> str:
        """What tells it from any other sketch: a checksum of all that it is stored as."""
        return f"crc32 {self.packed()[1]['crc32']:08x}"

    def held(self, where: Executor) -> tuple[Any, Any]:
        """Factors and probe, ready as arguments of every task that scores new rows."""
        return held(self.algebra, "new rows", where), None if self.probe is None else where.hold(self.probe)

    def gram_tasks(
        self,
        payload: Any,
        rows: Rows,
        blocks: Sequence[Block],
        draws: dict[str, Draw],
        with_gram: bool,
        targets: TargetRows | None = None,
        then: Callable[[Block], Callable[[GramPart], Any]] | None = None,
    ) -> Iterator[Delayed]:
        """The tasks of pass 1, to which ``payload`` is the factor of W; ``then`` says what each does with its part."""
        about = None if targets is None else (targets.origin, targets.folds)
        work = partial(gram_task, self.run, self.kernel, self.dtype, draws, with_gram, about)
        rows = rows.anew(f"gram-{self.run}")
        name = "gram" if with_gram else "residual"
        y = None if targets is None else targets.rows.anew(f"targets-{self.run}")
        for b in blocks:
            more = [] if y is None else [y.source(b.start, b.stop)]
            call = work if then is None else partial(_and_then, then(b), work)
            yield task(name, self.run, b.index, call, payload, rows.source(b.start, b.stop), b.start, *more)

    def score_tasks(
        self,
        payload: Any,
        rows: Rows,
        blocks: Sequence[Block],
        kept: Sequence[Any],
        use: str,
        then: Callable[..., Any],
        more: Sequence[Any] | None = None,
    ) -> Iterator[Delayed]:
        """The tasks of pass 2 for one use, with the factors in ``payload`` and what pass 1 kept of each block.

        ``then`` is called with a block's :class:`ScoredRows`, its first row and what ``more`` has for it, in the same
        task.
        """
        work = partial(score_task, self.run, self.reading, then)
        rows = rows.anew(f"{use}-{self.run}")
        for b, kept_block in zip(blocks, kept, strict=True):
            source = rows.source(b.start, b.stop)
            extra = [] if more is None else [more[b.index]]
            given = (payload, self.probe, source, b.start, kept_block, *extra)
            yield task("score-rows", f"{self.run}-{use}", b.index, work, *given)

    def __repr__(self) -> str:
        return (
            f"NystromSketch({unweighted(self.kernel)!r}, ridge={self.ridge_text}, {len(self.landmarks.indices)} "
            f"landmarks of rank {self.rank}, fitted to {self.n_rows:,} rows × {self.n_features} features, "
            f"{self.dtype} tiles)"
        )

    def _repr_html_(self) -> str:
        rows = {
            "kernel": repr(unweighted(self.kernel)),
            "ridge λ": self.ridge_text,
            "landmarks": f"{len(self.landmarks.indices):,} distinct, rank {self.rank:,}",
            "fitted to": f"{self.n_rows:,} rows × {self.n_features} features",
            "factors kept by": self.algebra.place,
        }
        return html_table("NystromSketch", rows)


def html_table(title: str, rows: dict[str, str]) -> str:
    """A two-column table for notebooks."""
    body = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th><td style='text-align:left'>{escape(text)}</td></tr>"
        for name, text in rows.items()
    )
    return f"<table><caption style='text-align:left'><b>{escape(title)}</b></caption><tbody>{body}</tbody></table>"
