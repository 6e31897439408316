"""What pass 1 leaves on storage: sums of superblocks, what is kept of their blocks, and what more rows can go on from.

Sums are added from left to right, within a superblock and then over superblocks. So a run over more rows goes on from
the sum of the whole superblocks of an earlier one, and from that of the whole blocks after them, to the same bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from daskrr.engine.journal import Journal
from daskrr.engine.opaque import seal
from daskrr.engine.passes import ADDENDS, Block, Run, Superblock, raise_poison, superblocks
from daskrr.engine.progress import Stage
from daskrr.engine.storage import checksum
from daskrr.errors import CheckFailed, InvalidData, PoisonBlock
from daskrr.numerics import gram, reservoir
from daskrr.numerics.gram import GramPart, Kept
from daskrr.numerics.reservoir import Reservoir
from daskrr.nystrom.sketch import kept_of


@dataclass(frozen=True)
class Earlier:
    """Sums of an earlier run over fewer of the rows, and its published residuals.

    Attributes
    ----------
    journal, label
        Where the sums are.
    pivots
        Rows of the landmarks whose factor the sums belong to.
    superblocks, blocks
        Whole superblocks that are summed, and whole blocks after them.
    residual, digests, checksums
        What pass 1 kept of every block, and checksums of the residuals themselves.
    """

    journal: Journal
    label: str
    pivots: NDArray[np.int64]
    superblocks: int
    blocks: int
    residual: zarr.Array
    digests: Sequence[int]
    checksums: Sequence[NDArray[np.uint32]]

    def references(self, blocks: Sequence[Block]) -> list[bytes]:
        """What refers to what is kept of some of its blocks."""
        return [
            seal(Published(self.residual, b.start, b.stop, int(self.digests[b.index]), self.checksums[b.index]))
            for b in blocks
        ]


@dataclass(frozen=True)
class Published:
    """Residuals of a block that an earlier run has published."""

    residual: zarr.Array
    start: int
    stop: int
    digest: int
    checksums: NDArray[np.uint32]

    def read(self) -> Kept:
        """What pass 1 kept of the block.

        Raises
        ------
        InvalidData
            It is not what was published.
        """
        residual = np.asarray(self.residual[self.start : self.stop])
        if checksum(residual) != self.digest:
            raise InvalidData(
                f"the published residuals of rows {self.start}–{self.stop - 1} are not those that were written. "
                "Score all rows again with --overwrite."
            )
        return Kept(residual, self.checksums)


@dataclass(frozen=True)
class Recorded:
    """Residuals of a block in the journal."""

    journal: Journal
    label: str
    group: int
    number: int

    def read(self) -> Kept:
        """What pass 1 kept of the block."""
        record = self.journal.read(f"{self.label}/kept", self.group)["blocks"][self.number]
        return Kept(record["residual"], record["checksums"])


@dataclass(frozen=True)
class Sums:
    """Pass 1 by way of the journal, so that a worker that dies takes nothing with it but what it was at.

    Every block's part is laid aside, those of a superblock are added and recorded for good, and the sums of all
    superblocks are added in the end. ``names`` are those of what is drawn meanwhile.
    """

    run: Run
    journal: Journal
    label: str
    keeps: bool
    names: tuple[str, ...]
    writing: dict[int, Any] = field(default_factory=dict)

    @property
    def earlier(self) -> Earlier | None:
        """What this pass goes on from, if anything."""
        return self.run.earlier if self.keeps else None

    def make(self, tasks: Callable[..., Any], stage: Stage) -> tuple[Any, list[Any]]:
        """Handle of the sum over all rows, and references to what is kept of each block.

        Raises
        ------
        PoisonBlock
            When all other superblocks are recorded.
        """
        groups = superblocks(self.run.blocks)
        done = 0 if self.earlier is None else self.earlier.superblocks
        known = self.journal.done(f"{self.label}/sums")
        missing = [group for group in groups[done:] if group.index not in known]
        blocks = [block for group in missing for block in group.blocks[self._n_ahead(group) :]]
        if len(blocks) < len(self.run.blocks):
            stage.find(len(self.run.blocks) - len(blocks), self.run.rows.n_rows - sum(b.n_rows for b in blocks))
        self._record(missing, blocks, tasks, stage)
        return self._total(groups[done:]), self._references(groups, done) if self.keeps else []

    def _n_ahead(self, group: Superblock) -> int:
        """How many of its blocks an earlier run has summed."""
        return self.earlier.blocks if self.earlier is not None and group.index == self.earlier.superblocks else 0

    def _record(
        self, groups: Sequence[Superblock], blocks: Sequence[Block], tasks: Callable[..., Any], stage: Stage
    ) -> None:
        """Sum the blocks of superblocks and record the sums."""
        poison: list[PoisonBlock] = []
        place = {block.index: (group, number) for group in groups for number, block in enumerate(group.blocks)}
        missing = {group.index: len(group.blocks) - self._n_ahead(group) for group in groups}
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
                self.writing[group.index] = self.run.executor.apply("write-sums", self._sum_of(group))
        self._finish()
        raise_poison(poison)

    def _address(self, group: Superblock, number: int) -> tuple[Journal, str, int]:
        return self.journal, _parts(self.label, group.index), number

    def _sum_of(self, group: Superblock) -> "SuperblockSum":
        ahead = self._n_ahead(group)
        before = [] if self.earlier is None else self.earlier.references(group.blocks[:ahead])
        rest = group.n_whole if self.keeps and not group.is_whole else 0
        return SuperblockSum(
            self.journal, self.label, group.index, len(group.blocks), before, self.earlier, rest, self.names
        )

    def _finish(self) -> None:
        """Wait until what was added is recorded, and forget its parts."""
        self.run.executor.settle(list(self.writing.values()))
        for number in self.writing:
            self.journal.discard(_parts(self.label, number))
        self.writing.clear()

    def _total(self, groups: Sequence[Superblock]) -> Any:
        """Handle of the sum over all rows; that of all whole superblocks is recorded for a later run."""
        apply = self.run.executor.apply
        total: list[Any] = []
        if self.earlier is not None and self.earlier.superblocks:
            total = [apply("read-sums", partial(_read_base, self.earlier, _whole, self.names))]
        whole = [group.index for group in groups if group.is_whole]
        for start in range(0, len(whole), ADDENDS):
            add = partial(_add_recorded, self.journal, self.label, whole[start : start + ADDENDS])
            total = [apply("add-sums", add, *total)]
        if total and self.keeps:
            self.run.executor.settle([apply("write-sums", partial(_write_base, self.journal, self.label), *total)])
        rest = [group.index for group in groups if not group.is_whole]
        return apply("add-sums", partial(_add_recorded, self.journal, self.label, rest), *total)

    def _references(self, groups: Sequence[Superblock], done: int) -> list[Any]:
        before = [block for group in groups[:done] for block in group.blocks]
        kept: list[Any] = [] if self.earlier is None else list(self.earlier.references(before))
        return kept + [
            seal(Recorded(self.journal, self.label, group.index, number))
            for group in groups[done:]
            for number in range(len(group.blocks))
        ]


@dataclass(frozen=True)
class SuperblockSum:
    """Adds the parts of a superblock from left to right and records the sum, and before it what is kept of each block.

    Attributes
    ----------
    before, earlier
        References to what is kept of the first blocks, and the earlier run that has their sum, if there is one.
    rest
        How many blocks, if any, a later run with more rows will go on from.
    """

    journal: Journal
    label: str
    group: int
    count: int
    before: Sequence[bytes]
    earlier: Earlier | None
    rest: int
    names: tuple[str, ...]

    def __call__(self) -> None:
        """Do so; the sums tell that all is there."""
        kept = [vars(kept_of(one)) for one in self.before]
        total: list[GramPart] = []
        if self.before and self.earlier is not None:
            total = [_read_base(self.earlier, _rest, self.names)]
            self._note(total, len(self.before))
        for number in range(len(self.before), self.count):
            record = self.journal.read(_parts(self.label, self.group), number)
            kept.append(record.pop("kept"))
            total = [add_parts(*total, GramPart.from_record(record))]
            self._note(total, number + 1)
        self.journal.write(f"{self.label}/kept", self.group, {"blocks": kept})
        self.journal.write(f"{self.label}/sums", self.group, total[0].to_record())

    def _note(self, total: list[GramPart], count: int) -> None:
        if count == self.rest:
            self.journal.write_one(_rest(self.label), total[0].to_record())


def _whole(label: str) -> str:
    """Name of the sum of all whole superblocks."""
    return f"base-{label}-whole"


def _rest(label: str) -> str:
    """Name of the sum of the whole blocks after those."""
    return f"base-{label}-rest"


def _parts(label: str, group: int) -> str:
    return f"{label}/parts/{group}"


def _lay_aside(journal: Journal, label: str, number: int, part: GramPart) -> None:
    """Put the part of a block where any worker can read it, the matrix as it is, which costs least."""
    kept = None if part.kept is None else vars(part.kept)
    journal.lay_aside(label, number, part.to_record(whole=True) | {"kept": kept})


def _add_recorded(journal: Journal, label: str, groups: Sequence[int], *total: GramPart) -> GramPart:
    for number in groups:
        total = (add_parts(*total, GramPart.from_record(journal.read(f"{label}/sums", number))),)
    return total[0]


def _write_base(journal: Journal, label: str, part: GramPart) -> int:
    return journal.write_one(_whole(label), part.to_record())


def _read_base(earlier: Earlier, name: Callable[[str], str], names: tuple[str, ...]) -> GramPart:
    found = earlier.journal.read_one(name(earlier.label))
    if found is None:
        raise CheckFailed(
            f"the record {name(earlier.label)} of the published run is gone. "
            "Sum all rows again with --refresh always, or score anew."
        )
    drawn = {name: found["drawn"][name] for name in names}
    return GramPart.from_record(found | {"drawn": drawn})


def add_parts(first: GramPart, *parts: GramPart) -> GramPart:
    """Add parts of pass 1 from left to right."""
    if not parts:
        return GramPart(first.gram, None, first.totals, first.drawn, first.moments)
    matrix, totals, moments = first.gram.copy(), first.totals, first.moments
    for part in parts:
        np.add(matrix, part.gram, out=matrix)
        totals = totals + part.totals
        moments = None if moments is None or part.moments is None else moments + part.moments
    return GramPart(matrix, None, totals, _merged([first, *parts]), moments)


def most_additions(blocks: Sequence[Block], rank: int) -> int:
    """At most how many additions a term of the sum over all blocks goes through."""
    groups = superblocks(blocks)
    within = gram.most_additions(max(block.n_rows for block in blocks), rank)
    return within + max(len(group.blocks) for group in groups) + len(groups)


def _merged(parts: Sequence[GramPart]) -> dict[str, Reservoir]:
    return {name: reservoir.merge([part.drawn[name] for part in parts]) for name in parts[0].drawn}


def extent(groups: Sequence[Superblock]) -> tuple[int, int]:
    """How many whole superblocks there are, and whole blocks after them."""
    whole = sum(group.is_whole for group in groups)
    return whole, sum(group.n_whole for group in groups[whole:])
