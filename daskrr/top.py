"""The highest rows of a result, as a list and as a table."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.errors import InvalidParameter, NotCertified, check_count

PLAIN = ("scores", "estimate")
CERTIFIED = ("scores", "estimate", "lower", "upper")


@dataclass(frozen=True)
class TopRows:
    """The highest rows of a result, highest first; the ends are None where nothing was certified."""

    rows: NDArray[np.int64]
    scores: NDArray[np.float64]
    estimate: NDArray[np.float64]
    residual: NDArray[np.float64]
    by: str
    lower: NDArray[np.float64] | None = None
    upper: NDArray[np.float64] | None = None

    @property
    def values(self) -> NDArray[np.float64]:
        """What the rows are ranked by."""
        return getattr(self, self.by)

    @property
    def quantities(self) -> list[str]:
        """Names of what is known of each row."""
        return [
            one.name for one in fields(self) if one.name not in ("rows", "by") and getattr(self, one.name) is not None
        ]

    def to_records(self) -> list[dict[str, Any]]:
        """One dict per row, ready for JSON."""
        columns = {"row": self.rows.tolist()} | {name: getattr(self, name).tolist() for name in self.quantities}
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        return describe_rows(self.to_records())


def describe_rows(records: Sequence[dict[str, Any]]) -> str:
    """A table of rows, each with its interval where there is one."""
    certified = bool(records) and "lower" in records[0]
    lines = [f"{'row':>12}  {'estimate':>10}  " + (f"{'certainly between':>23}  " if certified else "")]
    lines[0] += f"{'score':>10}  {'residual':>10}"
    for record in records:
        ends = f"{record['lower']:>10.3e} – {record['upper']:>10.3e}  " if certified else ""
        line = f"{record['row']:>12}  {record['estimate']:>10.3e}  {ends}{record['scores']:>10.3e}"
        lines.append(f"{line}  {record['residual']:>10.3e}")
    return "\n".join(lines)


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
    order = np.lexsort((joined["rows"], -joined[by]))[:k]
    return TopRows(**{name: values[order] for name, values in joined.items()}, by=by)
