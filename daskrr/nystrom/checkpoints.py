"""What pass 1 leaves on storage: sums of spans, what is kept of their blocks, and what more rows can go on from.

The sum of a span is a node of the tree by which all blocks are added (:mod:`daskrr.runtime.tree`). So it can be read
where it was recorded instead of being made again, and a run over more rows goes on from the nodes of an earlier one, to
the same bits.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from daskrr.errors import DamagedRecord
from daskrr.numerics import pass1
from daskrr.numerics.pass1 import GramPart, KeptResiduals
from daskrr.runtime import tree
from daskrr.runtime.executors import Executor, batch_size
from daskrr.runtime.sealing import seal
from daskrr.runtime.tree import NodeSums, Partial, Span, partial_nodes
from daskrr.storage.journal import SUMMED, Journal
from daskrr.storage.zarr_arrays import checksum


@dataclass(frozen=True)
class Earlier:
    """Sums of an earlier run over fewer of the rows, and its published residuals.

    Attributes
    ----------
    journal, label
        Where the sums are.
    pivots
        Rows of the landmarks whose factor the sums belong to.
    n_blocks
        Whole blocks that are summed.
    residual, digests, checksums
        What pass 1 kept of every block, and checksums of the residuals themselves.
    record
        Name of one of the sums: without it, nothing goes on from here.
    """

    journal: Journal
    record: str
    label: str
    pivots: NDArray[np.int64]
    n_blocks: int
    residual: zarr.Array
    digests: Sequence[int]
    checksums: Sequence[NDArray[np.uint32]]

    def reference(self, span: Span) -> bytes:
        """What refers to what is kept of the blocks of a span."""
        blocks = slice(span.first_block, span.first_block + span.n_blocks)
        published = Published(
            name=self.record,
            residual=self.residual,
            span=span,
            digests=[int(one) for one in self.digests[blocks]],
            checksums=self.checksums[blocks],
        )
        return seal(published)

    def sums(self, executor: Executor, names: Sequence[str]) -> NodeSums:
        """Sums that begin with those of the blocks before; ``names`` are those of what is drawn meanwhile."""
        return _sums_left(self.journal, self.label, self.n_blocks, executor, names)


@dataclass(frozen=True)
class Published:
    """Residuals of a span that an earlier run has published."""

    name: str
    residual: zarr.Array
    span: Span
    digests: Sequence[int]
    checksums: Sequence[NDArray[np.uint32]]

    def read(self) -> list[KeptResiduals]:
        """What pass 1 kept of the blocks.

        Raises
        ------
        DamagedRecord
            It is not what was published.
        """
        kept = []
        for block, digest, checksums in zip(self.span.blocks, self.digests, self.checksums, strict=True):
            try:
                residual = np.asarray(self.residual[block.start : block.stop])
                intact = checksum(residual) == digest
            except Exception:  # codecs and stores raise errors of many kinds
                intact = False
            if not intact:
                raise DamagedRecord(
                    f"the published residuals of rows {block.start}–{block.stop - 1} are not those that were written.",
                    self.name,
                )
            kept.append(KeptResiduals(residual, checksums))
        return kept


@dataclass(frozen=True)
class Recorded:
    """What pass 1 kept of the blocks of a span, in the journal."""

    journal: Journal
    label: str
    number: int

    def read(self) -> list[KeptResiduals]:
        """One for each block."""
        return [KeptResiduals(**one) for one in self.journal.read(f"{self.label}/kept", self.number)["blocks"]]


@dataclass(frozen=True)
class RecordedSums:
    """Adds the parts of the blocks of a span, unless their sum is recorded: then it is read, and no block is looked at.

    So a worker that dies takes nothing with it but what it was at. The sum is recorded beside what is kept of the
    blocks, if it ``keeps`` that; it counts with that alone. A span is recorded under the number of its first row.
    All spans together have so many whole blocks.
    """

    journal: Journal
    label: str
    keeps: bool
    n_blocks: int

    def __call__(self, span: Span, parts: Iterator[GramPart]) -> GramPart:
        """The sum; what is kept of the blocks is in the journal."""
        record = self.journal.find(f"{self.label}/sums", span.start)
        if record is not None and record["n_rows"] == span.n_rows and self._has_kept(span):
            return GramPart.from_record(record)
        part = sum_span(span, parts)
        contents = {f"{self.label}/sums": part.to_record() | {"n_rows": span.n_rows}}
        if self.keeps:
            contents[f"{self.label}/kept"] = {"blocks": [vars(one) for one in part.kept]}
        self.journal.write_several(contents, span.start)
        return replace(part, kept=())

    def _has_kept(self, span: Span) -> bool:
        return not self.keeps or self.journal.has(f"{self.label}/kept/{span.start}")

    @property
    def is_complete(self) -> bool:
        """Whether what :meth:`leave` records is there, as far as names tell; sums of whole spans may be gone then."""
        bases = [_base(self.label, level) for level, _ in partial_nodes(self.n_blocks)]
        return self.keeps and all(map(self.journal.has, [f"{self.label}/{SUMMED}", *bases]))

    def done(self, spans: Sequence[Span]) -> list[Span]:
        """Those that are recorded, as far as names tell."""
        needed = ["sums"] * (not self.is_complete) + ["kept"] * self.keeps
        known = set.intersection(*(self.journal.done(f"{self.label}/{name}") for name in needed))
        return [span for span in spans if span.start in known]

    def reference(self, span: Span) -> bytes:
        """What refers to what is kept of the blocks of a span."""
        return seal(Recorded(self.journal, self.label, span.start))

    def sums(self, executor: Executor, names: Sequence[str]) -> NodeSums:
        """Sums of all whole spans, of a pass that is complete."""
        return _sums_left(self.journal, self.label, self.n_blocks, executor, names)

    def leave(self, sums: NodeSums, executor: Executor) -> Any:
        """Begin to record what this run and a later one with more rows can go on from; a handle to wait for."""
        bases = [
            executor.apply("write-sums", partial(_write_base, self.journal, self.label, one.level), one.part)
            for one in sums.partials()
        ]
        return executor.apply("close-sums", partial(_close, self.journal, self.label), *bases)


def recorded_spans(journal: Journal, spans: Sequence[Span]) -> list[Span]:
    """The spans of the run that is gone on with, whichever workers it had; these, recorded now, if it is a new one."""
    bounds = journal.once("spans", lambda: {"bounds": np.array([0, *(span.stop for span in spans)])})["bounds"]
    pairs = itertools.pairwise(bounds.tolist())
    return [Span(index, start, stop, spans[0].height) for index, (start, stop) in enumerate(pairs)]


def sum_span(span: Span, parts: Iterator[GramPart]) -> GramPart:
    """The sum of the blocks of a span."""
    return tree.sum_node(span.level, parts, GramPart.__add__)


def summing(executor: Executor) -> NodeSums:
    """Sums of spans, added where they are."""
    return NodeSums(partial(executor.apply_all, "add-grams", add_parts), batch_size(executor))


def _base(label: str, level: int) -> str:
    """Name of the sum of whole nodes of a level which wait for others."""
    return f"base-{label}-{level}"


def _write_base(journal: Journal, label: str, level: int, part: GramPart) -> int:
    return journal.write_one(_base(label, level), part.to_record())


def _close(journal: Journal, label: str, *bases: int) -> int:
    return journal.write_one(f"{label}/{SUMMED}", {"bytes": sum(bases)})


def _sums_left(journal: Journal, label: str, n_blocks: int, executor: Executor, names: Sequence[str]) -> NodeSums:
    """Sums that begin with those of the first ``n_blocks`` blocks; ``names`` are those of what is drawn meanwhile."""
    sums = summing(executor)
    parts = [
        Partial(level, count, executor.apply("read-sums", partial(_read_base, journal, label, level, tuple(names))))
        for level, count in partial_nodes(n_blocks)
    ]
    sums.go_on_from(parts, n_blocks)
    return sums


def _read_base(journal: Journal, label: str, level: int, names: tuple[str, ...]) -> GramPart:
    found = journal.read(_base(label, level))
    drawn = {name: found["drawn"][name] for name in names}
    return GramPart.from_record(found | {"drawn": drawn})


def add_parts(first: GramPart, *parts: GramPart) -> GramPart:
    """Add parts of pass 1 from left to right, without what is kept of them; they stay as they are."""
    total = replace(first, gram=first.gram.copy(), kept=())
    for part in parts:
        total = total + replace(part, kept=())
    return total


def most_additions(n_rows: int, height: int, rank: int, least: int) -> int:
    """At most how many additions a term of the sum over all rows goes through, in blocks of ``height``.

    ``least`` is what the device adds in one chain.
    """
    return pass1.most_additions(min(height, n_rows), rank, least) + tree.most_additions(n_rows, height)
