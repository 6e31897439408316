"""A look at all of a table before anything is made of it: what its columns are, and what they lack."""

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from daskrr.errors import InvalidData, InvalidParameter
from daskrr.tables import cells
from daskrr.tables.columns import Category, Column, Moment, Number, TimeOfDay, Truth

MISSING = ("refuse", "drop", "mean", "median")
DATES = ("number", "cyclic")
# Different words of a column that are counted at most, and values that a median is found from.
MOST_WORDS, MEDIAN_VALUES = 20_000, 100_000
# A column with so many numbers among its values is one of numbers, and the others are mistakes.
MOSTLY = 0.9


@dataclass(frozen=True)
class TableOptions:
    """How a table is to be read.

    Attributes
    ----------
    columns
        Names or zero-based positions of the columns to keep, in this order. All that say something about a row by
        default: the others are left out, and it is told why.
    id
        Column that tells which row is which; it is kept beside the rows.
    response
        Column of numbers that a regression is to predict: no feature, and kept beside the rows too.
    missing
        What to do about rows without some value: ``"refuse"`` the table, ``"drop"`` the row, or take the ``"mean"`` or
        ``"median"`` of the column, and one more word for categories.
    dates
        ``"number"``, days since 1970, or ``"cyclic"``: where in the year and in the day too.
    levels
        Words of a category that become features of their own at most; rarer ones share one.
    prunes
        Whether columns of numbers that are all the same, repeat another column or count the rows are left out too,
        unless columns are named.
    """

    columns: Sequence[str | int] | None = None
    id: str | None = None
    response: str | None = None
    missing: str = "refuse"
    dates: str = "number"
    levels: int = 20
    prunes: bool = False

    def __post_init__(self) -> None:
        if self.missing not in MISSING:
            raise InvalidParameter(f"missing must be one of {', '.join(MISSING)}, got {self.missing!r}")
        if self.dates not in DATES:
            raise InvalidParameter(f"dates must be one of {', '.join(DATES)}, got {self.dates!r}")
        if not isinstance(self.levels, int) or self.levels < 1:
            raise InvalidParameter(f"levels must be a number of words of at least 1, got {self.levels!r}")


class Thinned:
    """Every k-th value of a stream, k as small as memory allows."""

    def __init__(self) -> None:
        self._values: list[NDArray[np.float64]] = []
        self._step, self._seen = 1, 0

    def add(self, values: NDArray[np.float64]) -> None:
        """Take in more."""
        # A copy: a view would keep all values.
        self._values.append(values[-self._seen % self._step :: self._step].copy())
        self._seen += len(values)
        while sum(map(len, self._values)) > MEDIAN_VALUES:
            self._step, self._values = 2 * self._step, [np.concatenate(self._values)[::2]]

    def median(self) -> float:
        """Of what was kept."""
        return float(np.median(np.concatenate(self._values)))


@dataclass
class Quantity:
    """What is known of numbers: their mean, ends and median, and whether they count the rows."""

    count: int = 0
    mean: float = 0.0
    low: float = np.inf
    high: float = -np.inf
    counts_rows: bool = True
    thinned: Thinned = field(default_factory=Thinned)

    def add(self, values: NDArray[Any]) -> None:
        """Take in more."""
        if not len(values):
            return
        numbers = values.astype(np.float64)
        expected = numbers[0] + np.arange(len(numbers)) if not self.count else self.high + 1 + np.arange(len(numbers))
        self.counts_rows = self.counts_rows and np.array_equal(numbers, expected)
        self.count += len(numbers)
        with np.errstate(over="ignore"):
            self.mean += float(((numbers - self.mean) / self.count).sum())
        self.low, self.high = min(self.low, float(numbers.min())), max(self.high, float(numbers.max()))
        self.thinned.add(numbers)

    def fill(self, missing: str) -> float:
        """What stands for a value that is missing."""
        return self.mean if missing == "mean" else self.thinned.median()


class Looked:
    """What was seen of one column."""

    def __init__(self, name: str, kind: Any, wanted: bool) -> None:
        self.name, self.kind, self.wanted = name, kind, wanted
        self.rows = self.missing = self.missing_numbers = self.numbers = self.digest = 0
        self.words: Counter[str] = Counter()
        self.has_leading_zeros = self.has_times = False
        self.quantity = Quantity()
        self.first_other: tuple[int, str] | None = None
        self._may_be = {"number", "truth", "moment", "time of day"}

    @property
    def values(self) -> int:
        """How many cells have one."""
        return self.rows - self.missing

    def add(self, column: Any) -> None:
        """Look at more of its cells.

        Raises
        ------
        InvalidData
            They are of another kind than those before, as they may be in another file.
        """
        if pa.types.is_null(column.type):
            self.missing += len(column)
            self.missing_numbers += len(column)
        else:
            self.kind = self._joined_kind(column.type)
            plain = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
            # As one piece, so that buffers hold these cells and no others.
            whole = pa.concat_arrays([plain])
            for buffer in whole.buffers():
                self.digest = zlib.crc32(buffer, self.digest) if buffer is not None else self.digest
            if cells.is_text(self.kind):
                self._add_texts(whole)
            else:
                self._add_values(whole)
        self.rows += len(column)

    def _joined_kind(self, kind: Any) -> Any:
        """What holds these cells and those before."""
        if pa.types.is_null(self.kind) or kind == self.kind:
            return kind
        if _is_number(kind) and _is_number(self.kind):
            both = [np.float64 if pa.types.is_decimal(one) else one.to_pandas_dtype() for one in (kind, self.kind)]
            return pa.from_numpy_dtype(np.result_type(*both))
        alike = (cells.is_text, pa.types.is_time, lambda one: pa.types.is_date(one) or pa.types.is_timestamp(one))
        if any(are(kind) and are(self.kind) for are in alike):
            return self.kind
        raise InvalidData(
            f"column {self.name!r} holds {self.kind} at first and {kind} from row {self.rows} on: give all files of a "
            "table the same type, or leave the column out (--columns)"
        )

    def _add_values(self, column: Any) -> None:
        found = None
        if pa.types.is_boolean(self.kind):
            found = column
        elif _is_number(self.kind):
            found = cells.numbers(column)
        elif pa.types.is_temporal(self.kind) and not pa.types.is_duration(self.kind):
            found = cells.day_shares(column) if pa.types.is_time(self.kind) else cells.days(column)
            self.has_times |= _have_times(found)
        if found is not None:
            self.missing += found.null_count
            self.quantity.add(found.drop_null().to_numpy(zero_copy_only=False))

    def _add_texts(self, column: Any) -> None:
        words = cells.texts(column)
        strict = cells.texts(column, cells.MISSING_NUMBER).drop_null()
        self._count_words(words.drop_null())
        self.missing += words.null_count
        self.missing_numbers += len(column) - len(strict)
        self.numbers += self._count_numbers(strict, column)
        for kind, read in (("number", cells.numbers), ("moment", cells.days), ("time of day", cells.day_shares)):
            if kind in self._may_be and not self._are(kind, strict):
                self._may_be.discard(kind)
                self.quantity = Quantity()
            if kind in self._may_be and len(strict):
                self._may_be &= {kind}
                found = read(strict)
                self.has_times |= kind == "moment" and _have_times(found)
                self.quantity.add(found.to_numpy(zero_copy_only=False))
        if "truth" in self._may_be and not self._are("truth", strict):
            self._may_be.discard("truth")

    def _are(self, kind: str, words: Any) -> bool:
        """Whether texts are all of a kind."""
        if kind in ("moment", "truth"):
            try:
                cells.days(words) if kind == "moment" else cells.truths(words)
            except pa.ArrowInvalid:
                return False
            return True
        pattern = cells.NUMBER if kind == "number" else cells.TIME_OF_DAY
        return bool(pc.all(pc.match_substring_regex(words, pattern)).as_py() in (None, True))

    def _count_words(self, words: Any) -> None:
        counted = pc.value_counts(words)
        if len(self.words) >= MOST_WORDS:
            counted = counted.filter(pc.is_in(counted.field("values"), pa.array(list(self.words))))
        for one in counted:
            self.words[one["values"].as_py()] += one["counts"].as_py()

    def _count_numbers(self, words: Any, column: Any) -> int:
        are = pc.match_substring_regex(words, cells.NUMBER)
        self.has_leading_zeros |= bool(pc.any(pc.match_substring_regex(words, cells.LEADING_ZEROS)).as_py())
        if self.first_other is None and pc.all(are).as_py() is False:
            word = words[pc.index(are, False).as_py()].as_py()
            place = pc.index(pc.utf8_trim_whitespace(column.cast(pa.string())), word).as_py()
            self.first_other = self.rows + place, word
        return int(pc.sum(are).as_py() or 0)

    # --- What it is ---------------------------------------------------------------------------------------

    def decided(self, reading: TableOptions) -> Column | str:
        """What becomes of it, or why it is left out."""
        if not self.values:
            return "it has no values"
        column = self._as_text(reading) if cells.is_text(self.kind) else self._as_values(reading)
        if reading.prunes and isinstance(column, (Number, Truth, Moment)) and self.quantity.count:
            if self.quantity.low == self.quantity.high:
                return "all its values are the same"
            if isinstance(column, Number) and self.quantity.counts_rows and self._is_whole and self.values > 2:
                return "it counts the rows"
        if isinstance(column, str) or not self.missing or reading.missing not in ("mean", "median"):
            return column
        return self._with_fill(column, reading.missing)

    @property
    def _is_whole(self) -> bool:
        return pa.types.is_integer(self.kind) or cells.is_text(self.kind)

    def _as_values(self, reading: TableOptions) -> Column | str:
        if pa.types.is_boolean(self.kind):
            return Truth(self.name)
        if pa.types.is_integer(self.kind) or pa.types.is_floating(self.kind):
            return Number(self.name, np.dtype(self.kind.to_pandas_dtype()).name)
        if pa.types.is_decimal(self.kind):
            return Number(self.name)
        if pa.types.is_time(self.kind):
            return TimeOfDay(self.name)
        if pa.types.is_temporal(self.kind) and not pa.types.is_duration(self.kind):
            return Moment(self.name, reading.dates == "cyclic", self.has_times)
        return f"it holds {self.kind}"

    def _as_text(self, reading: TableOptions) -> Column | str:
        only_missing = self.missing_numbers == self.rows
        if "number" in self._may_be and not only_missing:
            if self.has_leading_zeros and not self.wanted:
                return "its numbers have leading zeros, as identifiers do"
            return self._strictly(Number(self.name))
        if "truth" in self._may_be and not only_missing:
            return self._strictly(Truth(self.name))
        if "time of day" in self._may_be and not only_missing:
            return self._strictly(TimeOfDay(self.name))
        if "moment" in self._may_be and not only_missing:
            return self._strictly(Moment(self.name, reading.dates == "cyclic", self.has_times))
        if self.numbers >= MOSTLY * self.values and self.first_other is not None:
            row, word = self.first_other
            raise InvalidData(
                f"row {row}, column {self.name!r}: {word!r} is not a finite number, and {self.numbers} of the "
                f"{self.values} values of the column are. Correct it, or leave the column out."
            )
        return self._as_category(reading)

    def _strictly(self, column: Column) -> Column:
        """The column, where more words say that a value is missing."""
        self.missing = self.missing_numbers
        return column

    def _as_category(self, reading: TableOptions) -> Column | str:
        ranked = sorted(self.words.items(), key=lambda one: (-one[1], one[0]))
        levels = [word for word, _ in ranked[: reading.levels]]
        # A word that alone would share a feature has one of its own.
        levels = [word for word, _ in ranked] if len(ranked) == reading.levels + 1 else levels
        covered = sum(count for _, count in ranked[: len(levels)]) / self.values
        many = f"{len(ranked)}{' and more' if len(ranked) >= MOST_WORDS else ''} different words"
        if not self.wanted:
            if len(ranked) == 1:
                return "all its values are the same"
            if len(ranked) > self.values / 2 and len(ranked) > 2:
                return f"it has {many} in {self.values} rows, as identifiers do"
            if covered < 0.5:
                return f"it has {many}, and the {len(levels)} commonest are in only {covered:.0%} of the rows"
        return Category(self.name, tuple(levels), len(ranked) - len(levels))

    def _with_fill(self, column: Column, missing: str) -> Column:
        if isinstance(column, (Category, TimeOfDay)):
            return replace(column, fills=True)
        if isinstance(column, Truth) and cells.is_text(self.kind):
            share = sum(self.words[word] for word in self.words if word.lower() in cells.TRUTHS[2:]) / self.values
            return replace(column, fill=share if missing == "mean" else float(share > 0.5))
        assert isinstance(column, (Number, Truth, Moment))
        return replace(column, fill=self.quantity.fill(missing))


def _is_number(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def look(batches: Iterator[Any], wanted: Sequence[str], is_asked: bool) -> dict[str, Looked]:
    """Look at the wanted columns of all record batches."""
    found: dict[str, Looked] = {}
    for batch in batches:
        for name in wanted:
            column = batch.column(name)
            if name not in found:
                found[name] = Looked(name, column.type, is_asked)
            found[name].add(column)
    return found


def _have_times(days: Any) -> bool:
    values = days.drop_null().to_numpy(zero_copy_only=False)
    return bool(np.any(values != np.floor(values)))
