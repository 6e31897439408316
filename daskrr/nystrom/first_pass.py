"""From landmarks to a fitted sketch: their kernel matrix, its factor, and pass 1 over the rows."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.errors import InvalidData, PoisonBlock
from daskrr.kernels import Kernel
from daskrr.kernels.device import current
from daskrr.kernels.weighted import Weighted
from daskrr.numerics import blas, panels
from daskrr.numerics.factorize import check_resolution
from daskrr.numerics.pass1 import Draw, GramPart, Totals
from daskrr.numerics.reservoir import Reservoir
from daskrr.numerics.ridge import middle
from daskrr.numerics.whitening import kernel_error
from daskrr.nystrom import factors
from daskrr.nystrom.checkpoints import Earlier, RecordedSums, most_additions, sum_span, summing
from daskrr.nystrom.factors import GramMatrix, LandmarkMatrix, Whitened
from daskrr.nystrom.landmarks import Landmarks
from daskrr.nystrom.reading import BeginSums, plain_sums
from daskrr.nystrom.sketch import NystromSketch
from daskrr.runtime.executors import Executor, batch_size
from daskrr.runtime.map_blocks import BlockMap, Run, raise_poison
from daskrr.runtime.on_disk import put_aside
from daskrr.runtime.progress import Stage
from daskrr.runtime.rows import Rows
from daskrr.runtime.scheduler import algebra, held
from daskrr.runtime.tree import Span


@dataclass(frozen=True)
class Settings:
    """What is fitted to the landmarks, whichever they are."""

    kernel: Kernel
    ridges: tuple[float, ...]
    single: bool
    dtype: np.dtype
    sketch_ridge: float
    n_landmarks: int
    scheduler_bytes: int
    with_subset: bool = False
    largest_tried: float = 0.0
    intercept: bool = False

    @property
    def smallest(self) -> float:
        """The ridge that decides where one must."""
        return min(self.ridges)

    @property
    def resolved(self) -> float:
        """The ridge that must be above round-off: the largest, where those below can be left out."""
        return max(self.smallest, self.largest_tried)


@dataclass(frozen=True)
class Chosen:
    """Landmarks, and a handle of their rows (p, d) in the order of their numbers."""

    landmarks: Landmarks
    X: Any


@dataclass(frozen=True)
class FirstPass:
    """What pass 1 leaves: handles of the factor, of G, of what is kept of each block, of rows drawn, and of sums."""

    payload: Any
    gram: Any
    kept: list[Any]
    drawn: Any
    sums: Any
    executor: Executor
    begin_to_leave: Callable[[], list[Any]]

    @cached_property
    def totals(self) -> Totals:
        """Sums over all rows."""
        return self.executor.value(self.sums)

    def leave(self) -> list[Any]:
        """Begin to write what a later run can go on from; handles to wait for.

        Not before sums are known, since workers have time for it while the scheduler is at the ridge.
        """
        self.executor.settle([self.sums])
        return self.begin_to_leave()


@blas.one_thread()
def landmark_inputs(
    kernel: Kernel, dtype: np.dtype, penalty: NDArray[np.float64] | None, intercept: bool, X: NDArray[np.float64]
) -> LandmarkMatrix:
    """W of the landmarks X (p, d), by differences and with an exact diagonal, and the tile kernel's error on it.

    For a regression with an intercept, also the kernel column in the middle of the landmarks.
    """
    W = panels.symmetric(_kernel_matrix(kernel, X))
    np.fill_diagonal(W, kernel.diagonal(X))
    if not np.isfinite(W).all():
        raise InvalidData("the kernel of the landmarks is not finite: it overflows. Scale the features down.")
    device = current()
    tile = device.empty(W.shape, dtype)
    kernel.columns(X, dtype)(device.put(X), tile)
    return LandmarkMatrix(
        W=W,
        X=X,
        error=kernel_error(device.get(tile), W, dtype),
        penalty=penalty,
        middle=_middle_column(kernel, X, W) if intercept else None,
    )


def _kernel_matrix(kernel: Kernel, X: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of all pairs of rows, on all cores."""
    W = np.empty((len(X), len(X)))

    def fill(rows: slice) -> None:
        W[rows] = kernel(X[rows], X)

    panels.side_by_side(fill, panels.cut(0, len(X)))
    return W


def _middle_column(kernel: Kernel, X: NDArray[np.float64], W: NDArray[np.float64]) -> NDArray[np.float64]:
    """(p,) for rows of weight 1: kernel column in the middle of the landmarks, times their own roots of weights."""
    if not isinstance(kernel, Weighted):
        return middle(W, np.ones(len(W)))
    roots = X[:, -1]
    scale = np.where(roots > 0, roots, 1.0)
    return roots * middle(W / scale / scale[:, None], roots**2)


def whiten(run: Run, name: str, settings: Settings, chosen: Chosen) -> tuple[NystromSketch, Whitened]:
    """Form W where the landmarks are, and factor it on the scheduler (Algorithm, step 2)."""
    n, d = run.rows.shape
    kernel, dtype, landmarks = settings.kernel, settings.dtype, chosen.landmarks
    penalty = landmarks.penalty(n, settings.sketch_ridge) if settings.sketch_ridge else None
    form = partial(landmark_inputs, kernel, dtype, penalty, settings.intercept)
    inputs = run.executor.apply("landmark-kernel", form, chosen.X)
    place = algebra(run.executor, name, settings.scheduler_bytes)
    whitened = place.perform(partial(factors.whiten, dtype=dtype, subset=settings.with_subset), inputs)
    rank = len(whitened.pivots)
    if kernel.constant_diagonal:
        diagonal = float(kernel.diagonal(np.zeros((1, d)))[0])
        # An earlier round should name a ridge that the last one finds large enough too.
        most = max(rank, min(settings.n_landmarks, n))
        height = most_additions(n, run.height, most, run.executor.device.chain_rows)
        check_resolution(whitened.kernel_error, diagonal, settings.resolved, most, height, dtype)
    pivots = landmarks.indices[whitened.pivots]
    sketch = NystromSketch(
        kernel=kernel,
        ridges=settings.ridges,
        single=settings.single,
        n_rows=n,
        n_features=d - isinstance(kernel, Weighted),
        dtype=dtype,
        landmarks=landmarks,
        run=name,
        algebra=place,
        rank=rank,
        pivots=pivots,
        kernel_error=whitened.kernel_error,
        features=run.rows.features,
    )
    return sketch, whitened


def first_pass(
    run: Run,
    sketch: NystromSketch,
    draws: dict[str, Draw],
    with_gram: bool = True,
    title: str = "pass 1: gram",
    begin: BeginSums = plain_sums,
    others: Sequence[Rows] = (),
    payload: Any = None,
    label: str = "pass-1",
) -> FirstPass:
    """Pass 1: add the blocks' Gram matrices by the tree; keep the residuals where they are; draw rows.

    ``begin`` sums something else besides, of ``others`` beside the rows; residuals are not kept then, since no pass 2
    follows. ``payload`` is a handle of the factor of W, if it is not that of the sketch. A journal has the sums of
    every span under ``label``.
    """
    payload = held(sketch.algebra, factors.whitener, run.executor) if payload is None else payload
    grams = sketch.map_gram(run, payload, draws, begin if with_gram else None, *others)
    keeps = with_gram and not others
    flops = sketch.gram_flops(with_gram)
    leave: Callable[[], list[Any]] = list
    with Stage(run.report, title, len(run.spans), run.rows.n_rows, flops) as stage:
        if run.journal is None:
            total, kept = _sum_on_workers(grams, keeps, stage)
        else:
            recorded = RecordedSums(run.journal, label, keeps, run.rows.n_rows // run.height)
            total, kept, leave = _sum_for_good(grams, recorded, tuple(draws), stage)
    gram, drawn, sums = (
        run.executor.apply(name, pick, total)
        for name, pick in (("gram-sum", _gram), ("drawn-rows", _drawn), ("totals", _totals))
    )
    return FirstPass(payload, gram, kept, drawn, sums, run.executor, leave)


def _sum_on_workers(grams: BlockMap, keeps: bool, stage: Stage) -> tuple[Any, list[Any]]:
    """Handles of the sum over all rows, and of what is kept of the blocks of each span."""
    executor = grams.run.executor
    kept: dict[int, Any] = {}
    sums = summing(executor)
    for group in batched(grams.window(_sum_and_put_aside if keeps else sum_span), batch_size(executor)):
        if keeps:
            handles = executor.apply_all("keep-residual", _kept, [[part] for _, part in group])
            kept |= {span.index: handle for (span, _), handle in zip(group, handles, strict=True)}
        for span, part in group:
            sums.push(span, part)
            stage.advance(rows=span.n_rows)
    return sums.total(), [kept[index] for index in sorted(kept)]


def _sum_for_good(
    grams: BlockMap, recorded: RecordedSums, names: tuple[str, ...], stage: Stage
) -> tuple[Any, list[Any], Callable[[], list[Any]]]:
    """The same by way of the journal: handle of the sum, references to what is kept, and what leaves something.

    Raises
    ------
    PoisonBlock
        When all other spans are recorded.
    """
    run = grams.run
    earlier: Earlier | None = run.earlier if recorded.keeps else None
    n_before = 0 if earlier is None else earlier.n_blocks
    before = [span for span in run.spans if span.first_block < n_before]
    own = run.spans[len(before) :]
    kept = [earlier.reference(span) for span in before] if earlier is not None else []
    kept += [recorded.reference(span) for span in own if recorded.keeps]
    known = {span.index for span in recorded.done(own)}
    found = [*before, *(span for span in own if span.index in known)]
    if found:
        stage.find(len(found), sum(span.n_rows for span in found))
    complete = recorded.is_complete
    begun = recorded if complete else earlier
    sums = summing(run.executor) if begun is None else begun.sums(run.executor, names)
    needed = [span for span in own if not (complete and span.is_whole and span.index in known)]
    for span, part in _recorded_parts(grams.only(needed), recorded):
        if not (complete and span.is_whole):
            sums.push(span, part)
        if span.index not in known:
            stage.advance(rows=span.n_rows)
    total = sums.total()

    def leave() -> list[Any]:
        return [recorded.leave(sums, run.executor)] if recorded.keeps and not complete else []

    return total, kept, leave


def _recorded_parts(grams: BlockMap, recorded: RecordedSums) -> Iterator[tuple[Span, Any]]:
    """Handles of the sums of spans as these are recorded; raises what ails some of them when all others are."""
    poison = []
    for span, part in grams.window(recorded, spare=True):
        if isinstance(part, PoisonBlock):
            poison.append(part)
        else:
            yield span, part
    raise_poison(poison)


def batched(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """So many at a time; the last may be fewer."""
    while group := list(itertools.islice(items, size)):
        yield group


def _sum_and_put_aside(span: Span, parts: Iterator[GramPart]) -> GramPart:
    """The sum of the blocks of a span; what is kept of them goes to the disk of the worker, as sums wait for others."""
    part = sum_span(span, parts)
    return replace(part, kept=(put_aside(part.kept, sum(one.__sizeof__() for one in part.kept)),))


def _kept(part: GramPart) -> Any:
    """What is kept of the blocks of a span."""
    return part.kept[0]


def _gram(part: GramPart) -> GramMatrix:
    return GramMatrix(part.gram, part.totals.height, part.moments)


def _drawn(part: GramPart) -> dict[str, Reservoir]:
    return part.drawn


def _totals(part: GramPart) -> Totals:
    return part.totals
