"""From landmarks to a fitted sketch: their kernel matrix, its factor, and pass 1 over the rows."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from daskrr.engine.journal import Journal
from daskrr.engine.opaque import seal
from daskrr.engine.passes import Run, Superblock, superblocks
from daskrr.engine.progress import Stage
from daskrr.engine.scheduler import algebra, held
from daskrr.kernels import Kernel
from daskrr.numerics import reservoir
from daskrr.numerics.algebra import check_resolution
from daskrr.numerics.gram import Draw, GramPart, Kept, Totals
from daskrr.numerics.reservoir import Reservoir
from daskrr.nystrom.sampling import Landmarks
from daskrr.nystrom.sketch import NystromSketch, TargetRows, landmark_inputs

# Gram matrices of blocks that one task adds to the sum.
ADDENDS = 4


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
    inputs = run.executor.apply("landmark-kernel", partial(landmark_inputs, kernel, dtype, penalty), chosen.X)
    place = algebra(run.executor, name, settings.scheduler_bytes)
    whitened = place.perform("whiten", inputs, {"dtype": str(dtype), "subset": settings.with_subset})
    rank = len(whitened["pivots"])
    if kernel.constant_diagonal:
        diagonal = float(kernel.diagonal(np.zeros((1, d)))[0])
        # An earlier round should name a ridge that the last one finds large enough too.
        most = max(rank, min(settings.n_landmarks, n))
        check_resolution(whitened["kernel_error"], diagonal, settings.resolved, most, dtype)
    pivots = landmarks.indices[whitened["pivots"]]
    sketch = NystromSketch(
        kernel, settings.ridges, settings.single, n, d, dtype, landmarks, name, place, rank, pivots,
        whitened["kernel_error"],
    )  # fmt: skip
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
    kept: list[Any] = []
    total: list[Any] = []
    payload = held(sketch.algebra, "whitener", run.executor) if payload is None else payload
    journal = Sums(run, label, with_gram and targets is None)
    groups = superblocks(run.blocks)
    missing = [block for group in groups if group.index not in journal.known for block in group.blocks]
    parts = run.executor.window(sketch.gram_tasks(payload, run.rows, missing, draws, with_gram, targets))
    with Stage(run.report, title, total=len(run.blocks), total_rows=run.rows.n_rows) as stage:
        for group in groups:
            part, residuals = journal.known_part(group, stage) or _sum_parts(run, group, parts, stage, journal)
            kept += residuals
            run.executor.settle(total)
            total = [run.executor.apply("add-grams", add_parts, *total, part)]
        journal.finish()
    gram, drawn, totals = (
        run.executor.apply(name, pick, total[0])
        for name, pick in (("gram-sum", _gram), ("drawn-rows", _drawn), ("totals", _totals))
    )
    return FirstPass(payload, gram, kept, drawn, run.executor.value(totals))


@dataclass(frozen=True)
class Sums:
    """Where the sums of superblocks are recorded under a label, if anywhere, with what is kept of each block."""

    run: Run
    label: str
    keeps: bool
    writing: list[Any] = field(default_factory=list)

    @cached_property
    def known(self) -> set[int]:
        """Superblocks that need not be summed again."""
        return set() if self.run.journal is None else self.run.journal.done(f"{self.label}/sums")

    def known_part(self, group: Superblock, stage: Stage) -> tuple[Any, list[Any]] | None:
        """Handles of a superblock that was recorded before."""
        if self.run.journal is None or group.index not in self.known:
            return None
        for block in group.blocks:
            stage.advance(rows=block.n_rows)
        part = self.run.executor.apply("read-sums", partial(_read_part, self.run.journal, self.label, group.index))
        return part, self._references(group)

    def record(self, group: Superblock, part: Any, residuals: list[Any]) -> list[Any]:
        """Have a worker record a superblock; what refers to its residuals from then on."""
        if self.run.journal is None:
            return residuals
        write = partial(_write_part, self.run.journal, self.label, group.index)
        # One behind, so that the workers have blocks to work on meanwhile.
        self.finish()
        self.writing.append(self.run.executor.apply("write-sums", write, part, *residuals))
        return self._references(group)

    def finish(self) -> None:
        """Wait until everything is recorded."""
        self.run.executor.settle(self.writing)
        self.writing.clear()

    def _references(self, group: Superblock) -> list[Any]:
        if not self.keeps or self.run.journal is None:
            return []
        return [
            seal(KeptReference(self.run.journal, self.label, group.index, number))
            for number in range(len(group.blocks))
        ]  # fmt: skip


def _sum_parts(run: Run, group: Superblock, parts: Iterator[Any], stage: Stage, journal: Sums) -> tuple[Any, list[Any]]:
    """Add the next parts, those of one superblock, from left to right, and record the sum."""
    total: list[Any] = []
    waiting: list[Any] = []
    residuals: list[Any] = []
    for block in group.blocks:
        part = next(parts)
        if journal.keeps:
            residuals.append(run.executor.apply("keep-residual", _kept, part))
        waiting.append(part)
        if len(waiting) == ADDENDS or block is group.blocks[-1]:
            # Sums are a chain. Waiting for the last link bounds how many parts lie on the workers.
            run.executor.settle(total)
            total = [run.executor.apply("add-grams", add_parts, *total, *waiting)]
            waiting = []
        stage.advance(rows=block.n_rows)
    return total[0], journal.record(group, total[0], residuals)


@dataclass(frozen=True)
class KeptReference:
    """Where the residuals of a block are recorded."""

    journal: Journal
    label: str
    group: int
    number: int

    def read(self) -> Kept:
        """What pass 1 kept of the block."""
        record = self.journal.read(f"{self.label}/kept", self.group)["blocks"][self.number]
        return Kept(record["residual"], record["checksums"])


def _write_part(journal: Journal, label: str, number: int, part: GramPart, *residuals: Kept) -> int:
    """Record what is kept of the blocks first, since the sums tell that all is there."""
    written = journal.write(f"{label}/kept", number, {"blocks": [vars(one) for one in residuals]})
    return written + journal.write(f"{label}/sums", number, part.to_record())


def _read_part(journal: Journal, label: str, number: int) -> GramPart:
    return GramPart.from_record(journal.read(f"{label}/sums", number))


def _kept(part: GramPart) -> Kept | None:
    return part.kept


def _gram(part: GramPart) -> dict[str, Any]:
    return {"G": part.gram} if part.moments is None else {"G": part.gram} | asdict(part.moments)


def _drawn(part: GramPart) -> dict[str, Reservoir]:
    return part.drawn


def _totals(part: GramPart) -> Totals:
    return part.totals


def add_parts(first: GramPart, *parts: GramPart) -> GramPart:
    """Add parts of pass 1 from left to right."""
    if not parts:
        return GramPart(first.gram, None, first.totals, first.drawn, first.moments)
    gram, totals, moments = first.gram.copy(), first.totals, first.moments
    for part in parts:
        np.add(gram, part.gram, out=gram)
        totals = totals + part.totals
        moments = None if moments is None or part.moments is None else moments + part.moments
    return GramPart(gram, None, totals, _merged([first, *parts]), moments)


def _merged(parts: Sequence[GramPart]) -> dict[str, Reservoir]:
    return {name: reservoir.merge([part.drawn[name] for part in parts]) for name in parts[0].drawn}
