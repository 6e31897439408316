"""Blocks of scores written for good, with a receipt for each, so that a stopped job writes only what is missing."""

import itertools
import logging
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from daskrr.leverage.writing import Receipt
from daskrr.runtime.map_blocks import BlockMap, map_blocks, settled
from daskrr.runtime.tree import Span
from daskrr.storage.journal import Journal
from daskrr.storage.zarr_arrays import Staged, checksum

log = logging.getLogger("daskrr")


@dataclass(frozen=True)
class RecordedReceipts:
    """Has the blocks of a span written for good and records that they were, unless this attempt has done so.

    So a worker that dies takes nothing with it but what it was at, though nobody was told yet of what it had ended.
    The sum of a whole span in passes that are ``summed`` goes meanwhile: all at the end would keep workers waiting.
    """

    journal: Journal
    staged: Staged
    attempt: str
    summed: tuple[str, ...]

    def __call__(self, span: Span, receipts: Iterator[Receipt]) -> None:
        """Walk the blocks, if need be."""
        record = self.journal.find("receipts", span.start)
        if record is not None and record["attempt"] == self.attempt:
            return
        blocks = [receipt.to_record() for receipt in settled(self.staged.settle, span, receipts)]
        self.journal.write("receipts", span.start, {"attempt": self.attempt, "blocks": blocks})
        for label in self.summed if span.is_whole else ():
            self.journal.forget(f"{label}/sums", span.start)


def write_missing(writes: BlockMap, journal: Journal, staged: Staged, title: str, row_flops: float) -> list[Receipt]:
    """Run what writes blocks and returns their receipts, on those that have none yet; the receipts of all, in order."""
    intact = _intact_spans(writes, journal, staged)
    missing = writes.only([span for span in writes.spans if span.index not in intact])
    summed = tuple(label for label, whole in journal.labels().items() if whole)
    missing.finish(RecordedReceipts(journal, staged, uuid.uuid4().hex, summed), title, row_flops)
    found = [journal.read("receipts", span.start)["blocks"] for span in writes.spans]
    return [Receipt.from_record(record) for records in found for record in records]


def _intact_spans(writes: BlockMap, journal: Journal, staged: Staged) -> set[int]:
    """Those whose blocks have receipts and are as these say; the workers look at them."""
    recorded = journal.done("receipts")
    found = [span for span in writes.spans if span.start in recorded]
    there = staged.complete(block.start for span in found for block in span.blocks)
    spans = [span for span in found if there.issuperset(block.start for block in span.blocks)]
    if not spans:
        return set()
    looks = map_blocks(writes.run, "check-rows", partial(_stored_digests, staged)).only(spans)
    stored = iter(looks.values("scores of the stopped run"))
    damaged = [span for span in spans if not _is_intact(journal, span, list(itertools.islice(stored, span.n_blocks)))]
    if damaged:
        log.warning(
            "%d of %d spans of blocks of the stopped run, from rows %d–%d on, or what is recorded of them, are "
            "damaged: they are scored again",
            len(damaged), len(spans), damaged[0].start, damaged[0].stop - 1,
        )  # fmt: skip
    return {span.index for span in spans} - {span.index for span in damaged}


def _stored_digests(staged: Staged, start: int) -> dict[str, int] | None:
    """Of a block that was written before the job was stopped; None where it cannot be read."""
    try:
        return {name: checksum(values) for name, values in staged.read(start).items()}
    except Exception:  # codecs and stores raise errors of many kinds
        return None


def _is_intact(journal: Journal, span: Span, stored: list[dict[str, int] | None]) -> bool:
    """Whether blocks are what their receipts say."""
    record = journal.find("receipts", span.start)
    return record is not None and [receipt["digests"] for receipt in record["blocks"]] == stored
