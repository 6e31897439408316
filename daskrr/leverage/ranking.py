"""The highest rows of a result, as a list and as a table."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.errors import InvalidParameter, NotCertified, check_count
from daskrr.runtime.notebook import html_columns

PLAIN = ("scores", "estimate")
CERTIFIED = ("scores", "estimate", "lower", "upper")
# Highest rows that are told of.
TOP = 10
# A score above this share of its ceiling is as good as at it.
AT_CEILING = 0.99
CEILING = "No score exceeds k/(k + nλ) = {:.4g}, that of a row which is like no other"


@dataclass(frozen=True)
class TopRows:
    """The highest rows of a result, highest first; the ends are None where nothing was certified.

    ``ceiling`` is what no exact score exceeds, where that is the same for every row, and None elsewhere.
    """

    rows: NDArray[np.int64]
    scores: NDArray[np.float64]
    estimate: NDArray[np.float64]
    residual: NDArray[np.float64]
    by: str
    lower: NDArray[np.float64] | None = None
    upper: NDArray[np.float64] | None = None
    ceiling: Any = None

    def below(self, ceilings: Any, column: int) -> "TopRows":
        """The same rows, below one of several ceilings, if there are any."""
        return self if ceilings is None else replace(self, ceiling=float(np.atleast_1d(ceilings)[column]))

    @property
    def values(self) -> NDArray[np.float64]:
        """What the rows are ranked by."""
        return getattr(self, self.by)

    @property
    def quantities(self) -> list[str]:
        """Names of what is known of each row."""
        others = ("rows", "by", "ceiling")
        return [one.name for one in fields(self) if one.name not in others and getattr(self, one.name) is not None]

    def to_records(self) -> list[dict[str, Any]]:
        """One dict per row, ready for JSON."""
        columns = {"row": self.rows.tolist()} | {name: getattr(self, name).tolist() for name in self.quantities}
        same = {} if self.ceiling is None else {"ceiling": self.ceiling}
        return [dict(zip(columns, values, strict=True)) | same for values in zip(*columns.values(), strict=True)]

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        return describe_rows(self.to_records())

    def _repr_html_(self) -> str:
        records = self.to_records()
        names = [name for name in ("row", "estimate", "lower", "upper", "scores", "residual") if name in records[0]]
        rows = [[str(one["row"]), *(f"{one[name]:.4g}" for name in names[1:])] for one in records]
        return html_columns(f"{len(self)} highest rows by {self.by}", names, rows, describe_ceiling(records))


def describe_rows(records: Sequence[dict[str, Any]]) -> str:
    """A table of rows, each with its interval where there is one, and their ceiling."""
    certified = bool(records) and "lower" in records[0]
    lines = [f"{'row':>12}  {'estimate':>10}  " + (f"{'certainly between':>23}  " if certified else "")]
    lines[0] += f"{'score':>10}  {'residual':>10}"
    for record in records:
        ends = f"{record['lower']:>10.3e} – {record['upper']:>10.3e}  " if certified else ""
        row = record.get("table_row", record["row"])
        line = f"{row:>12}  {record['estimate']:>10.3e}  {ends}{record['scores']:>10.3e}"
        lines.append(f"{line}  {record['residual']:>10.3e}")
    return "\n".join([*lines, *filter(None, [describe_ceiling(records)])])


def describe_ceiling(records: Sequence[dict[str, Any]]) -> str:
    """What no row can exceed, and how many of these rows are there, in a sentence; nothing where it is not known."""
    if not records or "ceiling" not in records[0]:
        return ""
    ceiling = records[0]["ceiling"]
    reached = sum(record["estimate"] > AT_CEILING * ceiling for record in records)
    some = "this row is" if len(records) == 1 else f"{reached} of these {'is' if reached == 1 else 'are'}"
    found = some if reached else "none of these rows is"
    more = ", and further rows may be" if reached == len(records) else ""
    return f"{CEILING.format(ceiling)}; {found} within 1 % of it{more}."


def check_top(k: Any, by: Any, certified: bool = True) -> None:
    """Raise :class:`InvalidParameter` unless k rows can be ranked by ``by``."""
    check_count("k", k)
    if by not in CERTIFIED:
        raise InvalidParameter(f"by must be one of {', '.join(CERTIFIED)}, got {by!r}")
    if by not in PLAIN and not certified:
        raise not_certified(by)


def not_certified(name: str) -> NotCertified:
    """What to raise where an interval is asked for that there is not."""
    return NotCertified(f"there is no certified {name} in this result: score with certify=True (--certify) to have it.")


def merge_top(parts: Sequence[TopRows], k: int) -> TopRows:
    """The k highest of several lists; equal values in row order."""
    by = parts[0].by
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ("rows", *parts[0].quantities)}
    values = joined[by]
    # Sorting costs more than finding those that are worth it.
    high = np.flatnonzero(values >= np.partition(values, -k)[-k]) if len(values) > k else np.arange(len(values))
    order = high[np.lexsort((joined["rows"][high], -values[high]))][:k]
    return TopRows(**{name: values[order] for name, values in joined.items()}, by=by)


def column_of(ridges: Sequence[float], ridge: float | None) -> int:
    """Which of several ridges is meant; the smallest by default.

    Raises
    ------
    InvalidParameter
        The ridge is none of those that were scored.
    """
    if ridge is not None and ridge not in ridges:
        listed = ", ".join(f"{one:g}" for one in ridges)
        raise InvalidParameter(f"ridge={ridge!r} is none of those that were scored: {listed}")
    return ridges.index(min(ridges) if ridge is None else ridge)
