"""Kinds of columns of a table, and the features that each becomes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from daskrr.errors import InvalidData
from daskrr.tables import cells

OTHER, ABSENT = "(other)", "(missing)"
YEAR_DAYS = 365.2425
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Rows of different words differ by √2, as much as two rows of a standardized number do on average; so shall truths.
TRUTH_UNIT = math.sqrt(0.5)


@dataclass(frozen=True)
class Column(ABC):
    """A column of a table by its name, and how its cells become features."""

    name: str
    kind: ClassVar[str]

    @property
    def features(self) -> list[str]:
        """Names of the features."""
        return [self.name]

    @property
    def unit(self) -> float | None:
        """What features are divided by where a table is standardized; None to measure their mean and spread."""
        return None

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the features."""
        return np.dtype(np.float64)

    @abstractmethod
    def encode(self, column: Any) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Features (m,) or (m, k) of the cells of an Arrow array, and which rows have no value."""

    @abstractmethod
    def decode(self, features: NDArray[np.float64]) -> Any:
        """The value that features (k,) stand for, to be shown."""

    @abstractmethod
    def describe(self) -> str:
        """What is done to it, in a few words."""

    def to_record(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True)
class Number(Column):
    """Numbers as they are; ``fill`` stands where there is none. ``stored`` is their type."""

    stored: str = "float64"
    fill: float | None = None
    kind: ClassVar[str] = "number"

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of the numbers, if no mean stands among them."""
        return np.dtype(self.stored if self.fill is None else np.result_type(self.stored, np.float32))

    def encode(self, column: Any) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """The numbers, of a wider type where those of other rows were narrower."""
        values, gaps = cells.without_gaps(cells.numbers(column))
        return _filled(values.astype(np.result_type(values.dtype, self.dtype)), gaps, self.fill)

    def decode(self, features: NDArray[np.float64]) -> Any:
        """The number."""
        value = float(features[0])
        return int(value) if value.is_integer() and np.dtype(self.stored).kind in "iu" else value

    def describe(self) -> str:
        """What it is, and what fills its gaps."""
        return "number" if self.fill is None else f"number, {self.fill:.6g} where it is missing"


@dataclass(frozen=True)
class Truth(Column):
    """True or false as 1 or 0; ``fill`` is the share of true ones, where there is no value."""

    fill: float | None = None
    kind: ClassVar[str] = "truth"

    @property
    def unit(self) -> float | None:
        """That which makes true and false differ as two words do."""
        return TRUTH_UNIT

    @property
    def dtype(self) -> np.dtype[Any]:
        """Bytes, unless a share stands among them."""
        return np.dtype(np.uint8 if self.fill is None else np.float64)

    def encode(self, column: Any) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Zeros and ones."""
        return _filled(*cells.without_gaps(cells.truths(column), self.dtype), self.fill)

    def decode(self, features: NDArray[np.float64]) -> Any:
        """True or false."""
        return bool(features[0] > 0.5)

    def describe(self) -> str:
        """What it is, and what fills its gaps."""
        return "true or false" + ("" if self.fill is None else f", {self.fill:.3g} where it is missing")


@dataclass(frozen=True)
class Moment(Column):
    """Dates and times as days since 1970; ``cyclic`` adds where in the year, and in the day if there are times."""

    cyclic: bool = False
    has_times: bool = False
    fill: float | None = None
    kind: ClassVar[str] = "moment"

    @property
    def _periods(self) -> dict[str, float]:
        if not self.cyclic:
            return {}
        return {"year": YEAR_DAYS, "day": 1.0} if self.has_times else {"year": YEAR_DAYS}

    @property
    def features(self) -> list[str]:
        """Days, then a sine and a cosine for every period."""
        return [self.name, *(f"{self.name} {wave} of {period}" for period in self._periods for wave in ("sin", "cos"))]

    def encode(self, column: Any) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Days, and where in their periods they are."""
        days, gaps = _filled(*cells.without_gaps(cells.days(column), np.float64), self.fill)
        return np.column_stack([days, *(_waves(days / period) for period in self._periods.values())]), gaps

    def decode(self, features: NDArray[np.float64]) -> Any:
        """As ISO 8601 writes it."""
        moment = EPOCH + timedelta(seconds=round(float(features[0]) * cells.DAY_SECONDS))
        return moment.strftime("%Y-%m-%d %H:%M:%S" if self.has_times else "%Y-%m-%d")

    def describe(self) -> str:
        """What it is, and what fills its gaps."""
        periods = "".join(f" and where in the {period}" for period in self._periods)
        filled = "" if self.fill is None else f", {self.decode(np.array([self.fill]))} where it is missing"
        return f"date as days since 1970{periods}{filled}"


@dataclass(frozen=True)
class TimeOfDay(Column):
    """Times of day as the sine and cosine of their share of a day; rows without one stand in the middle, at 0."""

    fills: bool = False
    kind: ClassVar[str] = "time of day"

    @property
    def features(self) -> list[str]:
        """A sine and a cosine."""
        return [f"{self.name} {wave} of day" for wave in ("sin", "cos")]

    @property
    def unit(self) -> float | None:
        """They stay as they are."""
        return 1.0

    def encode(self, column: Any) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Where on the circle."""
        shares, gaps = cells.without_gaps(cells.day_shares(column), np.float64)
        return np.where(gaps[:, None], 0.0, _waves(shares)), gaps & (not self.fills)

    def decode(self, features: NDArray[np.float64]) -> Any:
        """As a clock shows it."""
        if not features.any():
            return None
        seconds = round((math.atan2(features[0], features[1]) / (2 * math.pi) % 1.0) * cells.DAY_SECONDS)
        return f"{seconds // 3600 % 24:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"

    def describe(self) -> str:
        """What it is."""
        return "time of day on a circle" + (", its middle where it is missing" if self.fills else "")


@dataclass(frozen=True)
class Category(Column):
    """One of some words as that many features, 1 where it is that word; the rest may share one."""

    levels: tuple[str, ...] = ()
    pooled: int = 0
    fills: bool = False
    kind: ClassVar[str] = "category"

    @property
    def words(self) -> list[str]:
        """Of the features."""
        return [*self.levels, *([OTHER] if self.pooled else []), *([ABSENT] if self.fills else [])]

    @property
    def features(self) -> list[str]:
        """One for each word."""
        return [f"{self.name}={word}" for word in self.words]

    @property
    def unit(self) -> float | None:
        """They stay as they are."""
        return 1.0

    def encode(self, column: Any) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Ones and zeros; a word that was never seen is one of the others, or none at all."""
        words = cells.texts(column)
        gaps = words.is_null().to_numpy(zero_copy_only=False)
        place = pc.fill_null(pc.index_in(words, pa.array(self.levels, pa.string())), -1).to_numpy(zero_copy_only=False)
        if self.pooled:
            place = np.where((place < 0) & ~gaps, len(self.levels), place)
        if self.fills:
            place = np.where(gaps, len(self.words) - 1, place)
        return (place[:, None] == np.arange(len(self.words))).astype(np.float64), gaps & (not self.fills)

    def decode(self, features: NDArray[np.float64]) -> Any:
        """The word."""
        return self.words[int(np.argmax(features))] if features.any() else OTHER

    def describe(self) -> str:
        """How many words, and how many share a feature."""
        others = f", {self.pooled} rarer ones together" if self.pooled else ""
        return f"category of {len(self.levels)} words{others}" + (", missing is one more" if self.fills else "")


KINDS: dict[str, type[Column]] = {one.kind: one for one in (Number, Truth, Moment, TimeOfDay, Category)}


def from_record(record: Mapping[str, Any]) -> Column:
    """What :meth:`Column.to_record` made.

    Raises
    ------
    InvalidData
        It made something else.
    """
    try:
        values: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in record.items()}
        return KINDS[values.pop("kind")](**values)
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidData(f"the record of a column is damaged: {error!r}") from None


def _filled(
    values: NDArray[Any], gaps: NDArray[np.bool_], fill: float | None
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    return (values, gaps) if fill is None else (np.where(gaps, values.dtype.type(fill), values), np.zeros_like(gaps))


def _waves(turns: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.column_stack([np.sin(2 * np.pi * turns), np.cos(2 * np.pi * turns)])
