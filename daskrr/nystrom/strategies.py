"""Strategies besides those of sampling: how many landmarks, how certain, how many folds; and the plain form of all."""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np

from daskrr.errors import InvalidParameter, check_count, check_positive
from daskrr.kernels import Kernel
from daskrr.nystrom.audit import AUDIT_ROWS, MAX_AUDIT_ROWS, PROBE_ROWS
from daskrr.nystrom.growing import most_candidates
from daskrr.nystrom.sampling import BY_NAME, Probabilities, RowNumbers
from daskrr.nystrom.workload import Workload

# Importance sampling wants scores up to a constant factor, and this is one.
DEFAULT_TOLERANCE = 0.5
FIRST_ROUND = 128
# By what p is multiplied from one round to the next: less where the tolerance is almost met.
SLOW_GROWTH, FAST_GROWTH = 1.5, 2.0


@dataclass(frozen=True)
class Tolerance:
    """Landmarks are added until every interval is tight enough, or until there are so many.

    Parameters
    ----------
    relative
        upper/lower − 1 is to be no more than this for every row whose upper end is at least the floor. 0.5 if neither
        this nor ``absolute`` is given, since importance sampling needs scores up to a constant factor only.
    absolute
        upper − lower is to be no more than this. With both, a row has to meet one of them.
    most
        Landmarks at which growing stops even if the tolerance is not met, which the result and the log then say.
    score_floor
        Scores below it need not meet the relative tolerance; by default their average.

    Examples
    --------
    >>> Tolerance()
    Tolerance(relative=0.5, absolute=None, most=2000, score_floor=None)
    """

    name: ClassVar[str] = "tolerance"
    relative: float | None = None
    _: KW_ONLY
    absolute: float | None = None
    most: int = 2000
    score_floor: float | None = None

    def __post_init__(self) -> None:
        told = {
            "relative": "the relative tolerance",
            "absolute": "the absolute tolerance",
            "score_floor": "score_floor",
        }
        for name, words in told.items():
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else check_positive(words, value))
        object.__setattr__(self, "most", check_count("most (--max-landmarks)", self.most))
        if self.relative is None and self.absolute is None:
            object.__setattr__(self, "relative", DEFAULT_TOLERANCE)

    def sizes(self, n_rows: int) -> tuple[int, ...]:
        """Landmarks of every round if each adds as few as it may.

        Raises
        ------
        InvalidParameter
            The first round has more than there may be.
        """
        first = min(FIRST_ROUND, n_rows)
        if self.most < first:
            raise InvalidParameter(
                f"most (--max-landmarks) must be at least {first}, the size of the first round; got {self.most}"
            )
        sizes = [first]
        while sizes[-1] < min(self.most, n_rows):
            sizes.append(min(math.ceil(SLOW_GROWTH * sizes[-1]), self.most, n_rows))
        return tuple(sizes)

    def workload(self, base: Workload, kernel: Kernel, n_rows: int) -> Workload:
        """Both passes and an audit in every round, which draws candidates for the next one."""
        sizes = self.sizes(n_rows)
        audit_rows = max(base.audit_rows, MAX_AUDIT_ROWS) if base.audit_rows else 0
        most = (PROBE_ROWS, audit_rows, most_candidates(-(-sizes[-1] // 2)))
        weighs = not kernel.constant_diagonal
        return replace(base, weighs_rows=weighs, full_rounds=sizes[:-1], audit_rows=audit_rows, draws=most)


@dataclass(frozen=True)
class Certify:
    """Every score has an interval [lower, upper] that the exact one lies in.

    Parameters
    ----------
    failure_probability
        With at most this probability some interval misses its exact score; 0 gives the deterministic certificate,
        which is wider.
    audit_rows
        Rows of the audit behind the intervals.
    subset_bound
        Use one more upper bound, from the landmarks as data of their own; costs one more product per ridge.

    Examples
    --------
    >>> Certify(failure_probability=1e-9)
    Certify(failure_probability=1e-09, audit_rows=2000, subset_bound=False)
    """

    name: ClassVar[str] = "certify"
    failure_probability: float = 1e-6
    audit_rows: int = AUDIT_ROWS
    subset_bound: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "failure_probability", _check_probability(self.failure_probability))
        object.__setattr__(self, "audit_rows", check_count("audit_rows", self.audit_rows))
        if not isinstance(self.subset_bound, bool):
            raise InvalidParameter(f"subset_bound must be True or False, got {self.subset_bound!r}")


@dataclass(frozen=True)
class KFold:
    """Every row is predicted from those of the other folds.

    Parameters
    ----------
    folds
        How many there are, at least 2; rows are assigned at random.

    Examples
    --------
    >>> KFold()
    KFold(folds=5)
    """

    name: ClassVar[str] = "kfold"
    folds: int = 5

    def __post_init__(self) -> None:
        object.__setattr__(self, "folds", check_count("folds", self.folds))
        if self.folds < 2:
            raise InvalidParameter("folds must be at least 2 to predict each from the others, got 1")


def _check_probability(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)) or not 0 <= value < 1:
        raise InvalidParameter(f"failure_probability must be a number from 0 up to, not including, 1; got {value!r}")
    return float(value)


def as_landmarks(landmarks: Any, finds_number: bool) -> int | Tolerance | None:
    """How many landmarks: a number, a tolerance, or None for what the sampling says, which may find it."""
    if isinstance(landmarks, Tolerance):
        return landmarks
    if landmarks is None:
        return Tolerance() if finds_number else None
    return check_count("landmarks", landmarks)


def as_certify(certify: Any) -> Certify | None:
    """What ``certify`` is or stands for: whether, or how, scores have intervals."""
    if isinstance(certify, Certify):
        return certify
    if not isinstance(certify, (bool, np.bool_)):
        raise InvalidParameter(f"certify must be True, False or Certify(…), got {certify!r}")
    return Certify() if certify else None


OTHERS = (Probabilities, RowNumbers, Tolerance, Certify, KFold)
STRATEGIES: dict[str, Any] = BY_NAME | {one.name: one for one in OTHERS}


def is_strategy(value: Any) -> bool:
    """Whether a value is a strategy of any kind."""
    return isinstance(value, tuple(STRATEGIES.values()))


def plain(strategy: Any) -> dict[str, Any]:
    """A strategy as a table of plain values, or arrays where it has any."""
    return {"strategy": strategy.name} | {one.name: getattr(strategy, one.name) for one in fields(strategy)}


def from_plain(record: Mapping[str, Any]) -> Any:
    """The strategy that :func:`plain` was given.

    Raises
    ------
    InvalidParameter
        There is no such strategy, or it has other parameters.
    """
    given = dict(record)
    known = STRATEGIES.get(given.pop("strategy", None))
    if known is None or set(given) != {one.name for one in fields(known)}:
        raise InvalidParameter(f"there is no strategy {dict(record)}; there are {', '.join(STRATEGIES)}")
    return known(**given)
