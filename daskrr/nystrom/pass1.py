"""From landmarks to a fitted sketch: their kernel matrix, its factor, and pass 1 over the rows."""

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from daskrr.engine.passes import ADDENDS, Run, superblocks
from daskrr.engine.progress import Stage
from daskrr.engine.scheduler import algebra, held
from daskrr.kernels import Kernel
from daskrr.kernels.weighted import Weighted
from daskrr.numerics.algebra import check_resolution
from daskrr.numerics.gram import Draw, GramPart, Kept, Totals
from daskrr.numerics.reservoir import Reservoir
from daskrr.nystrom.sampling import Landmarks
from daskrr.nystrom.sketch import NystromSketch, TargetRows, landmark_inputs
from daskrr.nystrom.sums import Sums, add_parts, most_additions


@dataclass(frozen=True)
class Settings:
    """What is fitted to the landmarks, whichever they are."""

    kernel: Kernel
    ridges: tuple[float, ...]
    single: bool
    dtype: np.dtype
    sketch_ridge: float | None
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
    """What pass 1 leaves: handles of the factor, of G, of what is kept of each block, of the rows drawn; and sums."""

    payload: Any
    gram: Any
    kept: list[Any]
    drawn: Any
    totals: Totals


def whiten(run: Run, name: str, settings: Settings, chosen: Chosen) -> tuple[NystromSketch, dict[str, Any]]:
    """Form W where the landmarks are, and factor it on the scheduler (Algorithm, step 2)."""
    n, d = run.rows.shape
    kernel, dtype, landmarks = settings.kernel, settings.dtype, chosen.landmarks
    penalty = None if settings.sketch_ridge is None else landmarks.penalty(n, settings.sketch_ridge)
    form = partial(landmark_inputs, kernel, dtype, penalty, settings.intercept)
    inputs = run.executor.apply("landmark-kernel", form, chosen.X)
    place = algebra(run.executor, name, settings.scheduler_bytes)
    whitened = place.perform("whiten", inputs, {"dtype": str(dtype), "subset": settings.with_subset})
    rank = len(whitened["pivots"])
    if kernel.constant_diagonal:
        diagonal = float(kernel.diagonal(np.zeros((1, d)))[0])
        # An earlier round should name a ridge that the last one finds large enough too.
        most = max(rank, min(settings.n_landmarks, n))
        height = most_additions(run.blocks, most)
        check_resolution(whitened["kernel_error"], diagonal, settings.resolved, most, height, dtype)
    pivots = landmarks.indices[whitened["pivots"]]
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
        kernel_error=whitened["kernel_error"],
    )
    return sketch, whitened


def first_pass(
    run: Run,
    sketch: NystromSketch,
    draws: dict[str, Draw],
    with_gram: bool = True,
    title: str = "pass 1: gram",
    targets: TargetRows | None = None,
    payload: Any = None,
    label: str = "pass-1",
) -> FirstPass:
    """Pass 1: add the blocks' Gram matrices from left to right; keep the residuals where they are; draw rows.

    Residuals are not kept of rows with targets, since no pass 2 follows. ``payload`` is a handle of the factor of W, if
    it is not that of the sketch. A journal has the sums of every superblock under ``label``.
    """
    payload = held(sketch.algebra, "whitener", run.executor) if payload is None else payload
    tasks = partial(sketch.gram_tasks, payload, run.rows, draws=draws, with_gram=with_gram, targets=targets)
    keeps = with_gram and targets is None
    flops = sketch.gram_flops(with_gram)
    with Stage(run.report, title, len(run.blocks), run.rows.n_rows, flops) as stage:
        if run.journal is None:
            total, kept = _sum_on_workers(run, tasks, keeps, stage)
        else:
            total, kept = Sums(run, run.journal, label, keeps, tuple(draws)).make(tasks, stage)
    gram, drawn, totals = (
        run.executor.apply(name, pick, total)
        for name, pick in (("gram-sum", _gram), ("drawn-rows", _drawn), ("totals", _totals))
    )
    return FirstPass(payload, gram, kept, drawn, run.executor.value(totals))


def _sum_on_workers(run: Run, tasks: Callable[..., Any], keeps: bool, stage: Stage) -> tuple[Any, list[Any]]:
    """Add the parts of all superblocks where they are, each from left to right."""
    kept: list[Any] = []
    total: list[Any] = []
    parts = run.executor.window(tasks(run.blocks), run.blocks)
    for group in superblocks(run.blocks):
        sums: list[Any] = []
        waiting: list[Any] = []
        for block, part in itertools.islice(parts, len(group.blocks)):
            if keeps:
                kept.append(run.executor.apply("keep-residual", _kept, part))
            waiting.append(part)
            if len(waiting) == ADDENDS or block is group.blocks[-1]:
                # Sums are a chain. Waiting for the last link bounds how many parts lie on the workers.
                run.executor.settle(sums)
                sums = [run.executor.apply("add-grams", add_parts, *sums, *waiting)]
                waiting = []
            stage.advance(rows=block.n_rows)
        run.executor.settle(total)
        total = [run.executor.apply("add-grams", add_parts, *total, *sums)]
    return total[0], kept


def _kept(part: GramPart) -> Kept | None:
    return part.kept


def _gram(part: GramPart) -> dict[str, Any]:
    moments = {} if part.moments is None else asdict(part.moments)
    return {"G": part.gram, "height": part.totals.height} | moments


def _drawn(part: GramPart) -> dict[str, Reservoir]:
    return part.drawn


def _totals(part: GramPart) -> Totals:
    return part.totals
