"""What pass 1 leaves on storage: sums of superblocks, what is kept of their blocks, and what more rows can go on from.

Sums are added from left to right, within a superblock and then over superblocks. So a run over more rows goes on from
the sum of the whole superblocks of an earlier one, and from that of the whole blocks after them, to the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from daskrr.engine.journal import Journal
from daskrr.engine.opaque import seal
from daskrr.engine.passes import Block, Run, Superblock
from daskrr.engine.progress import Stage
from daskrr.engine.storage import checksum
from daskrr.errors import InvalidData, PoisonBlock
from daskrr.numerics import reservoir
from daskrr.numerics.gram import GramPart, Kept
from daskrr.numerics.reservoir import Reservoir
from daskrr.nystrom.sketch import kept_of

# Of the whole superblocks, and of the whole blocks after them; see Earlier.
WHOLE, REST = "base-whole", "base-rest"


@dataclass(frozen=True)
class Earlier:
    """Sums of an earlier run over fewer of the rows, and its published residuals.

    Attributes
    ----------
    journal
        Where the sums are.
    pivots
        Rows of the landmarks whose factor the sums belong to.
    superblocks, blocks
        Whole superblocks that are summed, and whole blocks after them.
    residual, digests, checksums
        What pass 1 kept of every block, and checksums of the residuals themselves.
    """

    journal: Journal
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
    """The sums of a pass under a label, recorded if the run has a journal; ``names`` of what is drawn meanwhile.

    A superblock with a block that kills its workers is left out, and the block is noted.
    """

    run: Run
    label: str
    keeps: bool
    names: tuple[str, ...]
    writing: list[Any] = field(default_factory=list)
    poison: list[PoisonBlock] = field(default_factory=list)

    @cached_property
    def known(self) -> set[int]:
        """Superblocks that need not be summed again."""
        return set() if self.run.journal is None else self.run.journal.done(f"{self.label}/sums")

    @property
    def earlier(self) -> Earlier | None:
        """What an earlier run has left, if this pass goes on from it."""
        return self.run.earlier if self.keeps else None

    def missing(self, group: Superblock) -> Sequence[Block]:
        """Blocks of a superblock that have to be computed."""
        if group.index in self.known or (self.earlier and group.index < self.earlier.superblocks):
            return ()
        return group.blocks[self.n_ahead(group) :]

    def n_ahead(self, group: Superblock) -> int:
        """How many of its blocks an earlier run has summed."""
        return self.earlier.blocks if self.earlier and group.index == self.earlier.superblocks else 0

    def ahead(self, group: Superblock) -> tuple[list[Any], list[Any]]:
        """Handles of the sum of those blocks, none or one, and of what is kept of each."""
        if self.earlier is None or not self.n_ahead(group):
            return [], []
        return [self._read(REST)], list(self.earlier.references(group.blocks[: self.n_ahead(group)]))

    def first(self, groups: Sequence[Superblock], stage: Stage) -> tuple[list[Any], list[Any], Sequence[Superblock]]:
        """Handles of the sum of superblocks that are summed already, none or one, and of what is kept; the others."""
        if self.earlier is None or not self.earlier.superblocks:
            return [], [], groups
        done = groups[: self.earlier.superblocks]
        blocks = [block for group in done for block in group.blocks]
        stage.advance(len(blocks), blocks[-1].stop)
        kept: list[Any] = list(self.earlier.references(blocks))
        return [self._read(WHOLE)], kept, groups[len(done) :]

    def _read(self, label: str) -> Any:
        if self.earlier is None:
            raise RuntimeError("there is nothing to go on from")
        return self.run.executor.apply("read-sums", partial(_read_base, self.earlier.journal, label, self.names))

    def known_part(self, group: Superblock, stage: Stage) -> tuple[Any, list[Any]] | None:
        """Handles of a superblock that was recorded before: its sum, and what is kept of its blocks."""
        if self.run.journal is None or group.index not in self.known:
            return None
        stage.advance(len(group.blocks), sum(block.n_rows for block in group.blocks))
        part = self.run.executor.apply("read-sums", partial(_read_part, self.run.journal, self.label, group.index))
        return part, self._references(group)

    def record(self, group: Superblock, part: Any, rest: Any, kept: list[Any]) -> list[Any]:
        """Have a worker record a superblock, and the sum of its whole blocks; what refers to its residuals then."""
        if self.run.journal is None:
            return kept
        write = partial(_write_part, self.run.journal, self.label, group.index)
        # One behind, so that the workers have blocks to work on meanwhile.
        self._settle()
        self.writing.append(self.run.executor.apply("write-sums", write, part, rest if self.keeps else None, *kept))
        return self._references(group)

    def finish(self, whole: list[Any]) -> None:
        """Wait until everything is recorded, the sum of all whole superblocks too."""
        if self.run.journal is not None and self.keeps and whole:
            self.writing.append(self.run.executor.apply("write-sums", partial(_write_base, self.run.journal), *whole))
        self._settle()

    def _settle(self) -> None:
        self.run.executor.settle(self.writing)
        self.writing.clear()

    def _references(self, group: Superblock) -> list[Any]:
        if not self.keeps or self.run.journal is None:
            return []
        numbers = range(len(group.blocks))
        return [seal(Recorded(self.run.journal, self.label, group.index, number)) for number in numbers]


def _write_part(journal: Journal, label: str, number: int, part: GramPart, rest: GramPart | None, *kept: Any) -> int:
    """Record what is kept of the blocks first, since the sums tell that all is there."""
    blocks = [vars(kept_of(one)) for one in kept]
    written = journal.write(f"{label}/kept", number, {"blocks": blocks})
    if rest is not None:
        written += journal.write_one(REST, rest.to_record())
    return written + journal.write(f"{label}/sums", number, part.to_record())


def _write_base(journal: Journal, part: GramPart) -> int:
    return journal.write_one(WHOLE, part.to_record())


def _read_part(journal: Journal, label: str, number: int) -> GramPart:
    return GramPart.from_record(journal.read(f"{label}/sums", number))


def _read_base(journal: Journal, label: str, names: tuple[str, ...]) -> GramPart:
    found = journal.read_one(label)
    if found is None:
        raise RuntimeError(f"record {label} was there and is gone: something else writes to this output.")
    drawn = {name: found["drawn"][name] for name in names}
    return GramPart.from_record(found | {"drawn": drawn})


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


def extent(groups: Sequence[Superblock]) -> tuple[int, int]:
    """How many whole superblocks there are, and whole blocks after them."""
    whole = sum(group.is_whole for group in groups)
    return whole, sum(group.n_whole for group in groups[whole:])
