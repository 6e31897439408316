"""Blocks of scores as they are written: the check, the receipt, and what a stopped run has written well."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import zarr
from dask.delayed import Delayed
from numpy.typing import NDArray

from daskrr.engine.journal import Journal
from daskrr.engine.passes import Block, Run, task
from daskrr.engine.places import Staged
from daskrr.engine.storage import checksum, write_block
from daskrr.errors import CheckFailed
from daskrr.numerics import histogram
from daskrr.numerics.score import ScoredRows
from daskrr.nystrom.certificates import Widths
from daskrr.top import CERTIFIED, PLAIN, TopRows, merge_top

# An estimate above this is as good as 1; where more than this share of all are, they tell rows apart no more.
SATURATED = 0.99
SATURATED_SHARE = 0.5


@dataclass(frozen=True)
class Receipt:
    """What was written of one block.

    Attributes
    ----------
    sums
        (L,) of the scores, each as often as its row counts.
    top, widths
        Its highest rows, and how wide the intervals are.
    saturated
        (L,) how many estimates are as good as 1.
    counts
        (2, classes) how many scores are how large, of rows before a given one and of the others.
    digests, checksums
        A checksum of every array written, and of every chunk of the input.
    """

    sums: list[float]
    top: TopRows
    widths: Widths | None
    saturated: list[int]
    counts: NDArray[np.int64]
    digests: dict[str, int]
    checksums: NDArray[np.uint32] | None

    def to_record(self) -> dict[str, Any]:
        """As numbers and arrays."""
        return vars(self) | {"top": vars(self.top), "widths": None if self.widths is None else vars(self.widths)}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Receipt":
        """What :meth:`to_record` made."""
        widths = None if record["widths"] is None else Widths(**record["widths"])
        return cls(**record | {"top": TopRows(**record["top"]), "widths": widths})


def sum_counts(receipts: Sequence[Receipt]) -> NDArray[np.int64]:
    """How many scores are how large, of all blocks."""
    return np.sum([one.counts for one in receipts], axis=0)


def ridge_notes(receipts: Sequence[Receipt], ridges: Sequence[float], n_rows: int, mean_diagonal: float) -> list[str]:
    """What to say about ridges so small that most rows decide their own prediction alone."""
    found = np.sum([one.saturated for one in receipts], axis=0).tolist()
    return [
        f"the ridge {ridge:g} is so small that {count:,} of {n_rows:,} estimates are above {SATURATED}: most rows "
        "decide their own predictions alone, and the scores say little about which stand out. Try a larger ridge: at "
        f"{mean_diagonal / n_rows:.2g}, the mean of the kernel's diagonal over the number of rows, a row of that "
        "diagonal has at most 0.5."
        for ridge, count in zip(ridges, found, strict=True)
        if count > SATURATED_SHARE * n_rows
    ]


def top_of_block(k: int, by: str, column: int, scored: ScoredRows, start: int) -> TopRows:
    rows = np.arange(start, start + len(scored.estimate))
    names = PLAIN if scored.interval is None else CERTIFIED
    columns = {name: getattr(scored, name)[:, column] for name in names}
    return merge_top([TopRows(rows, **columns, residual=scored.residual, by=by)], k)


def write_rows(
    arrays: dict[str, zarr.Array],
    single: bool,
    column: int,
    measurer: Callable[..., Widths] | None,
    since: int,
    scored: ScoredRows,
    start: int,
    *weights: NDArray[np.float64],
) -> Receipt:
    """Write one block of results and say what was written."""
    columns = {name: getattr(scored, name) for name in arrays if name != "residual"}
    for name, values in columns.items():
        whole = scored.whole(name)
        if not (np.isfinite(values).all() and (whole >= 0).all() and (whole <= 1).all()):
            raise CheckFailed(
                f"{name} of a row in the block of rows from {start} is not within [0, 1]. Nothing was published."
            )
    written = {name: values[:, 0] if single else values for name, values in columns.items()}
    written["residual"] = scored.residual
    write_block(arrays, written, start)
    before, after = np.split(scored.scores[:, column], [min(max(since - start, 0), len(scored.scores))])
    return Receipt(
        sums=[math.fsum(values) for values in scored.whole("scores").T],
        top=top_of_block(10, "estimate", column, scored, start),
        widths=None if measurer is None else measurer(scored, start, *weights),
        saturated=np.count_nonzero(scored.estimate > SATURATED, axis=0).tolist(),
        counts=np.array([histogram.count(before), histogram.count(after)]),
        digests={name: checksum(values) for name, values in written.items()},
        checksums=scored.checksums,
    )


def shapes_of(names: Sequence[str], n_rows: int, n_ridges: int | None) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays that are stored; ``n_ridges`` is None for a ridge that was given as a number."""
    shape = (n_rows,) if n_ridges is None else (n_rows, n_ridges)
    return dict.fromkeys(names, shape) | {"residual": shape[:1]}


def write_missing(
    run: Run,
    journal: Journal,
    staged: Staged,
    tasks: Callable[[Sequence[Block], Callable[..., None]], Iterable[Delayed]],
    then: Callable[..., Receipt],
    title: str,
    row_flops: float,
) -> list[Receipt]:
    """Run what writes blocks, on those that have no receipt yet; the receipts of all, in row order.

    ``tasks`` makes those of some blocks, each of which is to do with its rows what it is given.
    """
    known = _intact_blocks(run, journal, staged)
    missing = [block for block in run.blocks if block.start not in known]
    written = tasks(missing, partial(write_for_good, journal, staged, then))
    replace(run, blocks=missing).finish(title, written, row_flops)
    return [Receipt.from_record(journal.read("receipts", block.start)) for block in run.blocks]


def _intact_blocks(run: Run, journal: Journal, staged: Staged) -> set[int]:
    """First rows of the blocks that have a receipt and are as it says; the workers look at them."""
    found = staged.complete(journal.done("receipts"))
    blocks = [block for block in run.blocks if block.start in found]
    if not blocks:
        return set()
    checks = (task("check-rows", run.name, b.index, partial(is_intact, journal, staged, b.start)) for b in blocks)
    intact = run.executor.values(replace(run, blocks=blocks).collect("scores of the stopped run", checks))
    return {block.start for block, whole in zip(blocks, intact, strict=True) if whole}


def is_intact(journal: Journal, staged: Staged, start: int) -> bool:
    """Whether a block that was written before the job was stopped is what its receipt says."""
    digests = journal.read("receipts", start)["digests"]
    try:
        return {name: checksum(values) for name, values in staged.read(start).items()} == digests
    except Exception:  # codecs and stores raise errors of many kinds
        return False


def write_for_good(
    journal: Journal,
    staged: Staged,
    then: Callable[..., Receipt],
    scored: ScoredRows,
    start: int,
    *more: Any,
) -> None:
    """Write a block for good, then record that it was written."""
    receipt = then(scored, start, *more)
    staged.settle(start)
    journal.write("receipts", start, receipt.to_record())
