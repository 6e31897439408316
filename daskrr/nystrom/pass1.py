"""From landmarks to a fitted sketch: their kernel matrix, its factor, and pass 1 over the rows."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from daskrr.engine.journal import Journal
from daskrr.engine.opaque import seal
from daskrr.engine.passes import Run, Superblock, raise_poison, superblocks
from daskrr.engine.progress import Stage
from daskrr.engine.scheduler import algebra, held
from daskrr.errors import PoisonBlock
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
    payload = held(sketch.algebra, "whitener", run.executor) if payload is None else payload
    tasks = partial(sketch.gram_tasks, payload, run.rows, draws=draws, with_gram=with_gram, targets=targets)
    keeps = with_gram and targets is None
    with Stage(run.report, title, total=len(run.blocks), total_rows=run.rows.n_rows) as stage:
        if run.journal is None:
            total, kept = _sum_on_workers(run, tasks, keeps, stage)
        else:
            total, kept = Sums(run, run.journal, label, keeps).make(tasks, stage)
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


@dataclass(frozen=True)
class Sums:
    """Pass 1 by way of the journal, so that a worker that dies takes nothing with it but what it was at.

    Every block's part is laid aside, those of a superblock are added and recorded for good, and the sums of all
    superblocks are added in the end.
    """

    run: Run
    journal: Journal
    label: str
    keeps: bool
    writing: dict[int, Any] = field(default_factory=dict)

    def make(self, tasks: Callable[..., Any], stage: Stage) -> tuple[Any, list[Any]]:
        """Handle of the sum over all rows, and references to what is kept of each block.

        Raises
        ------
        PoisonBlock
            When all other superblocks are recorded.
        """
        groups = superblocks(self.run.blocks)
        known = self.journal.done(f"{self.label}/sums")
        for block in (block for group in groups if group.index in known for block in group.blocks):
            stage.advance(rows=block.n_rows)
        self._record([group for group in groups if group.index not in known], tasks, stage)
        total: list[Any] = []
        for start in range(0, len(groups), ADDENDS):
            numbers = [group.index for group in groups[start : start + ADDENDS]]
            add = partial(_add_recorded, self.journal, self.label, numbers)
            total = [self.run.executor.apply("add-sums", add, *total)]
        references = [
            seal(KeptReference(self.journal, self.label, group.index, number))
            for group in groups
            for number in range(len(group.blocks))
            if self.keeps
        ]
        return total[0], references

    def _record(self, groups: Sequence[Superblock], tasks: Callable[..., Any], stage: Stage) -> None:
        """Sum the blocks of superblocks and record the sums."""
        poison: list[PoisonBlock] = []
        blocks = [block for group in groups for block in group.blocks]
        place = {block.index: (group, number) for group in groups for number, block in enumerate(group.blocks)}
        missing = {group.index: len(group.blocks) for group in groups}
        parts = tasks(blocks, then=lambda block: partial(_lay_aside, *self._address(*place[block.index])))
        for block, found in self.run.executor.window(parts, blocks, in_order=False, spare=True):
            if isinstance(found, PoisonBlock):
                poison.append(found)
                continue
            stage.advance(rows=block.n_rows)
            group, _ = place[block.index]
            missing[group.index] -= 1
            if not missing[group.index]:
                # One behind, so that the workers have blocks to work on meanwhile.
                self._finish()
                add = partial(_record_sums, self.journal, self.label, group.index, len(group.blocks))
                self.writing[group.index] = self.run.executor.apply("write-sums", add)
        self._finish()
        raise_poison(poison)

    def _address(self, group: Superblock, number: int) -> tuple[Journal, str, int]:
        return self.journal, _parts(self.label, group.index), number

    def _finish(self) -> None:
        """Wait until what was added is recorded, and forget its parts."""
        self.run.executor.settle(list(self.writing.values()))
        for number in self.writing:
            self.journal.discard(_parts(self.label, number))
        self.writing.clear()


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
        return Kept(record["residual"], record["checksum"])


def _parts(label: str, group: int) -> str:
    return f"{label}/parts/{group}"


def _lay_aside(journal: Journal, label: str, number: int, part: GramPart) -> None:
    """Put the part of a block where any worker can read it, the matrix as it is, which costs least."""
    kept = None if part.kept is None else vars(part.kept)
    journal.lay_aside(label, number, part.to_record(whole=True) | {"kept": kept})


def _record_sums(journal: Journal, label: str, group: int, count: int) -> None:
    """Add the parts of a superblock from left to right and record the sum, and before it what is kept of each block.

    The sums tell that all is there.
    """
    kept = []
    total: list[GramPart] = []
    for number in range(count):
        record = journal.read(_parts(label, group), number)
        kept.append(record.pop("kept"))
        total = [add_parts(*total, GramPart.from_record(record))]
    journal.write(f"{label}/kept", group, {"blocks": kept})
    journal.write(f"{label}/sums", group, total[0].to_record())


def _add_recorded(journal: Journal, label: str, groups: Sequence[int], *total: GramPart) -> GramPart:
    for number in groups:
        total = (add_parts(*total, GramPart.from_record(journal.read(f"{label}/sums", number))),)
    return total[0]


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
