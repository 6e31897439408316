"""Blocks of scores as they are written: the check, the receipt, and what all receipts together say."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.errors import CheckFailed
from daskrr.leverage.ranking import CERTIFIED, PLAIN, TOP, TopRows, merge_top
from daskrr.numerics import histogram
from daskrr.numerics.pass2 import ScoredRows
from daskrr.nystrom.certificate import Widths
from daskrr.storage.zarr_arrays import Staged, checksum

log = logging.getLogger("daskrr")

# Of the quantiles that are told of the scores at the smallest ridge.
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)

# An estimate above this is as good as 1; where more than this share of all are, they tell rows apart no more.
SATURATED = 0.99
SATURATED_SHARE = 0.5


@dataclass(frozen=True)
class Receipt:
    """What was written of one block.

    Attributes
    ----------
    start
        Its first row.
    sums
        (L,) of the scores, each as often as its row counts.
    top, widths
        Its highest rows, and how wide the intervals are.
    saturated
        (L,) how many estimates are as good as 1.
    counts
        (2, k) which classes of scores there are, of rows before a given one and then of the others, and how many: of
        all classes few have any.
    digests, checksums
        A checksum of every array written, and of every chunk of the input.
    """

    start: int
    sums: list[float]
    top: TopRows
    widths: Widths | None
    saturated: list[int]
    counts: NDArray[np.int32]
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
    """(2, classes) how many scores are how large, of all blocks: of rows before a given one, and of the others."""
    total = np.zeros(2 * histogram.CLASSES, np.int64)
    for classes, numbers in (one.counts for one in receipts):
        total[classes] += numbers
    return total.reshape(2, -1)


def ridge_notes(receipts: Sequence[Receipt], ridges: Sequence[float], n_rows: int, mean_diagonal: float) -> list[str]:
    """What to say about ridges so small that most rows decide their own prediction alone."""
    saturated = np.sum([one.saturated for one in receipts], axis=0).tolist()
    return [
        f"the ridge {ridge:g} is so small that {count:,} of {n_rows:,} estimates are above {SATURATED}: most rows "
        "decide their own predictions alone, and the scores say little about which stand out. Try a larger ridge: at "
        f"{mean_diagonal / n_rows:.2g}, the mean of the kernel's diagonal over the number of rows, a row of that "
        "diagonal has at most 0.5."
        for ridge, count in zip(ridges, saturated, strict=True)
        if count > SATURATED_SHARE * n_rows
    ]


def top_of_block(k: int, by: str, column: int, scored: ScoredRows, start: int) -> TopRows:
    rows = np.arange(start, start + len(scored.estimate))
    names = PLAIN if scored.interval is None else CERTIFIED
    columns = {name: getattr(scored, name)[:, column] for name in names}
    return merge_top([TopRows(rows, **columns, residual=scored.residual, by=by)], k)


def write_rows(
    staged: Staged,
    single: bool,
    column: int,
    measurer: Callable[..., Widths] | None,
    since: int,
    scored: ScoredRows,
    start: int,
    *weights: NDArray[np.float64],
) -> Receipt:
    """Write one block of results and say what was written."""
    columns = {name: getattr(scored, name) for name in staged.arrays if name != "residual"}
    for name, values in columns.items():
        whole = scored.whole(name)
        inside = whole.min(initial=1.0) >= 0.0 and whole.max(initial=0.0) <= 1.0
        if not (inside and (values is whole or np.isfinite(values).all())):
            raise CheckFailed(
                f"{name} of a row in the block of rows from {start} is not within [0, 1]. Nothing was published."
            )
    written = {name: values[:, 0] if single else values for name, values in columns.items()}
    written["residual"] = scored.residual
    staged.write(written, start)
    return Receipt(
        start=start,
        sums=[float(np.sum(values)) for values in np.ascontiguousarray(scored.whole("scores").T)],
        top=top_of_block(TOP, "estimate", column, scored, start),
        widths=None if measurer is None else measurer(scored, start, *weights),
        saturated=np.count_nonzero(scored.estimate > SATURATED, axis=0).tolist(),
        counts=few_counts(scored.scores[:, column], since - start),
        digests={name: checksum(values) for name, values in written.items()},
        checksums=scored.checksums,
    )


def few_counts(scores: NDArray[np.float64], n_before: int) -> NDArray[np.int32]:
    """The classes that have scores, and how many: see :class:`Receipt`; the first so many rows are counted apart."""
    n_before = min(max(n_before, 0), len(scores))
    counts = np.concatenate([histogram.count(scores[:n_before]), histogram.count(scores[n_before:])])
    classes = np.flatnonzero(counts)
    return np.array([classes, counts[classes]], np.int32)


def shapes_of(names: Sequence[str], n_rows: int, n_ridges: int | None) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays that are stored; ``n_ridges`` is None for a ridge that was given as a number."""
    shape = (n_rows,) if n_ridges is None else (n_rows, n_ridges)
    return dict.fromkeys(names, shape) | {"residual": shape[:1]}


def as_given(values: Any, single: bool) -> Any:
    """A number for one ridge, a list for a list of ridges."""
    return float(values[0]) if single else [float(value) for value in values]


# Relative error of a sum of one block as NumPy adds it, in pairs of groups of 128: no term goes through more additions.
SUM_ERROR = 64 * 2.0**-53


def check_sums(totals: NDArray[np.float64], dimensions: Any, errors: Any) -> None:
    """Scores and sketch dimension are two readings of one Gram matrix, which differ by round-off alone.

    Raises
    ------
    CheckFailed
        They differ by more.
    """
    for total, dimension, error in zip(totals, np.atleast_1d(dimensions), np.atleast_1d(errors), strict=True):
        if not abs(total - dimension) <= (error + SUM_ERROR) * dimension:
            raise CheckFailed(
                f"the scores sum to {total:.12g}, but pass 1 found an effective dimension of {dimension:.12g} "
                f"(round-off allows a relative difference of {error:.1g}). The input changed between the passes, "
                "rows were lost, or round-off is larger than its budget. Nothing was published."
            )


def highest(receipts: Sequence[Receipt], ceilings: Any, column: int) -> list[dict[str, Any]]:
    """Records of the highest rows of all blocks, at one of several ridges."""
    return merge_top([one.top for one in receipts], TOP).below(ceilings, column).to_records()


def quantiles_of(receipts: Sequence[Receipt]) -> dict[str, Any]:
    """Of all scores at the smallest ridge."""
    return {"levels": list(LEVELS), "values": histogram.quantiles(sum_counts(receipts).sum(axis=0), LEVELS)}
