"""Tables that can be read more than once, as record batches: text files, Parquet files and folders of them, frames."""

import csv
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from daskrr.errors import InvalidData, InvalidParameter
from daskrr.tables import cells

DELIMITERS = ",;\t|"
READ_BYTES = 2**20
TEXT, PARQUET = (".csv", ".tsv"), (".parquet", ".pq")


class Tabular(ABC):
    """Named columns of cells of any kind.

    Attributes
    ----------
    names
        Of all columns.
    expected_rows
        Number of rows, estimated from the lines where the table is text.
    files
        What it is read from.
    """

    names: list[str]
    expected_rows: int
    files: Sequence[Path] = ()

    @abstractmethod
    def batches(self, rows: int, names: Sequence[str] | None = None) -> Iterator[Any]:
        """Record batches of at most ``rows`` rows with some of the columns."""


def is_table(path: Path) -> bool:
    """Whether a path is a table of cells, and not an array: by its ending, or a folder of Parquet files."""
    return path.suffix.lower() in (*TEXT, *PARQUET) or (path.is_dir() and not (path / "zarr.json").exists()
                                                         and any(path.glob("*.parquet")))  # fmt: skip


def open_tabular(path: Path, delimiter: str | None = None, header: bool | None = None) -> Tabular:
    """Open a text file, a Parquet file or a folder of Parquet files.

    Raises
    ------
    InvalidData
        It does not hold what its ending says.
    InvalidParameter
        An option does not apply to it.
    """
    if path.suffix.lower() in TEXT:
        is_tabs = path.suffix.lower() == ".tsv" and delimiter is None
        return TextFile(path, "\t" if is_tabs else delimiter, header)
    if delimiter is not None or header is not None:
        raise InvalidParameter(f"a delimiter or header applies to .csv and .tsv files only, and this is {path}")
    return ParquetFiles(sorted(path.glob("*.parquet")) if path.is_dir() else [path])


class TextFile(Tabular):
    """Lines of cells, all of them text."""

    def __init__(self, path: Path, delimiter: str | None, header: bool | None) -> None:
        if delimiter is not None and len(delimiter) != 1:
            raise InvalidParameter(f"the delimiter must be one character, not {delimiter!r}")
        self.files = [path]
        self._path, self._delimiter = path, delimiter or _guess_delimiter(path)
        first, second = self._first_lines()
        if not first:
            raise InvalidData(f"{path} is empty")
        self._header = _is_header(first, second) if header is None else header
        self.names = [cell.strip() for cell in first] if self._header else [str(place) for place in range(len(first))]
        self.expected_rows = max(_count_lines(path) - self._header, 0)

    def _first_lines(self) -> tuple[list[str], list[str]]:
        try:
            with self._path.open(newline="", encoding="utf-8-sig") as stream:
                lines = (row for row in csv.reader(stream, delimiter=self._delimiter, strict=True) if row)
                return next(lines, []), next(lines, [])
        except (csv.Error, UnicodeDecodeError) as error:
            raise InvalidData(f"cannot read {self._path} as a table: {error}") from error

    def batches(self, rows: int, names: Sequence[str] | None = None) -> Iterator[Any]:
        """Blocks of lines, cut into record batches."""
        # Names may repeat, and are given back in the end.
        places = [str(place) for place in range(len(self.names))]
        kept = places if names is None else [str(self.names.index(name)) for name in names]
        try:
            reader = pyarrow.csv.open_csv(
                self._path,
                read_options=pyarrow.csv.ReadOptions(column_names=places, skip_rows=0, block_size=4 * READ_BYTES),
                parse_options=pyarrow.csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True),
                convert_options=pyarrow.csv.ConvertOptions(
                    column_types=dict.fromkeys(places, pa.string()), strings_can_be_null=False, include_columns=kept
                ),
            )
            skip = int(self._header)
            for block in reader:
                block = block.slice(skip) if skip else block
                skip = 0
                for start in range(0, block.num_rows, rows):
                    part = block.slice(start, rows)
                    yield pa.RecordBatch.from_arrays(part.columns, [self.names[int(place)] for place in kept])
        except pa.ArrowInvalid as error:
            raise InvalidData(f"cannot read {self._path} as a table: {error}") from None


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _is_header(first: list[str], second: list[str]) -> bool:
    """Whether no cell of the first line is a number, or one that is none stands above a number."""
    if not any(map(_is_number, first)):
        return True
    pairs = zip(first, second, strict=False)
    return any(not _is_number(name) and name.strip().lower() not in cells.MISSING_NUMBER and _is_number(cell)
               for name, cell in pairs)  # fmt: skip


def _guess_delimiter(path: Path) -> str:
    with path.open("rb") as stream:
        line = stream.readline(READ_BYTES).decode("utf-8", errors="replace")
    return max(DELIMITERS, key=line.count)


def _count_lines(path: Path) -> int:
    count, last = 0, b"\n"
    with path.open("rb") as stream:
        while data := stream.read(READ_BYTES):
            count, last = count + data.count(b"\n"), data[-1:]
    return count + (last != b"\n")


class ParquetFiles(Tabular):
    """Parquet files of the same columns, one after the other in the order of their names."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.files = paths
        schemas = []
        self.expected_rows = 0
        for path in paths:
            with _opened(path) as file:
                schemas.append(file.schema_arrow)
                self.expected_rows += file.metadata.num_rows
        self.names = list(schemas[0].names)
        for path, schema in zip(paths, schemas, strict=True):
            if list(schema.names) != self.names:
                raise InvalidData(
                    f"{path} has the columns {', '.join(schema.names[:20])}, and {paths[0]} has "
                    f"{', '.join(self.names[:20])}; tables of one folder must have the same."
                )

    def batches(self, rows: int, names: Sequence[str] | None = None) -> Iterator[Any]:
        """Row groups, cut into record batches."""
        for path in self.files:
            with _opened(path) as file:
                # Columns are asked for by place: names may repeat.
                kept = list(range(len(self.names))) if names is None else [self.names.index(name) for name in names]
                for batch in file.iter_batches(batch_size=rows, columns=[self.names[place] for place in kept]):
                    yield pa.RecordBatch.from_arrays(
                        [batch.column(self.names[place]) for place in kept], [self.names[place] for place in kept]
                    )


def _opened(path: Path) -> Any:
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (ValueError, OSError) as error:
        raise InvalidData(f"cannot read {path}: {error}") from error


class FrameTable(Tabular):
    """A table in memory: of pandas, polars or Arrow."""

    def __init__(self, frame: Any) -> None:
        self._table = arrow_table(frame)
        self.names = list(self._table.column_names)
        self.expected_rows = self._table.num_rows

    def batches(self, rows: int, names: Sequence[str] | None = None) -> Iterator[Any]:
        """Its own, cut."""
        table = self._table if names is None else self._table.select(list(names))
        yield from table.combine_chunks().to_batches(max_chunksize=rows)


def arrow_table(frame: Any) -> Any:
    """A frame of pandas, polars or Arrow as an Arrow table."""
    if isinstance(frame, (pa.Table, pa.RecordBatch)):
        return frame if isinstance(frame, pa.Table) else pa.Table.from_batches([frame])
    if type(frame).__module__.startswith("polars"):
        return frame.to_arrow()
    return pa.Table.from_pandas(frame, preserve_index=False)
