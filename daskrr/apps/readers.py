"""Readers of the tables that people have: ``.npy``, ``.npz``, ``.csv``, ``.tsv`` and ``.parquet`` files."""

import csv
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.apps.tables import Columns, Table, select
from daskrr.errors import InvalidData, InvalidParameter

_DELIMITERS = ",;\t|"
_READ_BYTES = 2**20


def open_table(
    path: Path,
    columns: Columns = None,
    key: str | None = None,
    delimiter: str | None = None,
    header: bool | None = None,
) -> Table:
    """Open a file as a table, by the ending of its name; the options are those of :func:`daskrr.apps.convert.convert`.

    Raises
    ------
    InvalidParameter
        The ending is unknown, or an option does not apply to it.
    InvalidData
        The file does not hold what its ending says.
    """
    suffix = path.suffix.lower()
    if key is not None and suffix != ".npz":
        raise InvalidParameter(f"an array name ({key!r}) applies to .npz files only, and this is {path}")
    if suffix not in (".csv", ".tsv") and (delimiter is not None or header is not None):
        raise InvalidParameter(f"a delimiter or header applies to .csv and .tsv files only, and this is {path}")
    match suffix:
        case ".npy":
            return NpyTable(path, columns)
        case ".npz":
            return NpzTable(path, columns, key)
        case ".csv" | ".tsv":
            return CsvTable(path, columns, "\t" if suffix == ".tsv" and delimiter is None else delimiter, header)
        case ".parquet":
            return ParquetTable(path, columns)
    raise InvalidParameter(f"cannot read {path}: the name must end in .npy, .npz, .csv, .tsv or .parquet")


class NpyTable(Table):
    """Rows of a memory-mapped ``.npy`` file."""

    def __init__(self, path: Path, columns: Columns) -> None:
        super().__init__(path)
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise InvalidData(f"cannot read {path}: {error}") from error
        self._array = array.reshape(_table_shape(array.shape, path))
        self._cut = _cut(self._keep(columns, _numbers(self._array.shape[1])), columns)
        self.dtype = array.dtype
        self.expected_rows = len(array)

    def _read(self, rows: int) -> Iterator[NDArray[Any]]:
        for start in range(0, len(self._array), rows):
            yield np.asarray(self._array[start : start + rows])[:, self._cut]


class NpzTable(Table):
    """Rows of one array in an ``.npz`` archive, streamed; one stored column by column has to be loaded as a whole."""

    def __init__(self, path: Path, columns: Columns, key: str | None) -> None:
        super().__init__(path)
        try:
            with zipfile.ZipFile(path) as archive:
                headers = {name[:-4]: _header(archive, name) for name in archive.namelist() if name[-4:] == ".npy"}
        except (zipfile.BadZipFile, ValueError, EOFError) as error:
            raise InvalidData(f"cannot read {path}: {error}") from error
        self._key = _pick_array(path, headers, key)
        shape, self._fortran, self.dtype = headers[self._key]
        self.expected_rows, self._width = _table_shape(shape, path)
        self._cut = _cut(self._keep(columns, _numbers(self._width)), columns)

    def _read(self, rows: int) -> Iterator[NDArray[Any]]:
        if self._fortran and self._width > 1:
            with np.load(self._path, allow_pickle=False) as archive:
                yield archive[self._key][:, self._cut]
            return
        with zipfile.ZipFile(self._path) as archive, archive.open(self._key + ".npy") as stream:
            _read_header(stream)
            for start in range(0, self.expected_rows, rows):
                count = min(rows, self.expected_rows - start)
                data = stream.read(count * self._width * self.dtype.itemsize)
                if len(data) < count * self._width * self.dtype.itemsize:
                    raise InvalidData(f"{self._path} ends in the middle of the array {self._key!r}")
                yield np.frombuffer(data, self.dtype).reshape(count, self._width)[:, self._cut]


def _header(archive: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    with archive.open(name) as stream:
        return _read_header(stream)


def _read_header(stream: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(stream)


def _pick_array(path: Path, headers: dict[str, Any], key: str | None) -> str:
    if key is not None:
        if key not in headers:
            raise InvalidParameter(f"{path} has no array {key!r}, only {', '.join(headers) or 'none at all'}")
        return key
    if "X" in headers:
        return "X"
    tables = [name for name, (shape, *_) in headers.items() if len(shape) == 2]
    if len(tables) != 1:
        found = ", ".join(tables) or "none"
        raise InvalidParameter(f"{path} must hold one two-dimensional array or one called X, and has {found}: name it")
    return tables[0]


def _table_shape(shape: tuple[int, ...], path: Path) -> tuple[int, int]:
    rows, *rest = shape or (0, 0, 0)
    if len(rest) > 1 or rest == [0]:
        raise InvalidData(f"{path} holds an array of shape {shape}: rows and columns are needed")
    return rows, rest[0] if rest else 1


def _numbers(width: int) -> list[str]:
    return [str(index) for index in range(width)]


def _cut(positions: list[int], columns: Columns) -> list[int] | slice:
    """The index of the columns: a view where all are kept, since a list would copy every block."""
    return slice(None) if columns is None else positions


class CsvTable(Table):
    """Rows of a text table, as float64."""

    dtype = np.dtype(np.float64)

    def __init__(self, path: Path, columns: Columns, delimiter: str | None, header: bool | None) -> None:
        super().__init__(path)
        if delimiter is not None and len(delimiter) != 1:
            raise InvalidParameter(f"the delimiter must be one character, not {delimiter!r}")
        self._delimiter = delimiter or _guess_delimiter(path)
        first = next((cells for _, cells in self._lines()), None)
        if first is None:
            raise InvalidData(f"{path} is empty")
        self._header = not any(map(_is_number, first)) if header is None else header
        self._width = len(first)
        names = [cell.strip() for cell in first] if self._header else _numbers(self._width)
        self._positions = self._keep(columns, names)
        self.expected_rows = max(_count_lines(path) - self._header, 0)

    def _read(self, rows: int) -> Iterator[NDArray[Any]]:
        lines = self._lines()
        if self._header:
            next(lines, None)
        held: list[tuple[int, list[str]]] = []
        # Cells are Python text until parsed, many times larger than the numbers they hold.
        size = max(1, min(rows, 100_000 // len(self._positions)))
        for number, row in lines:
            if len(row) != self._width:
                raise InvalidData(f"{self._path}, line {number} has {len(row)} cells instead of {self._width}")
            held.append((number, [row[index] for index in self._positions]))
            if len(held) == size:
                yield self._parse(held)
                held = []
        if held:
            yield self._parse(held)

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the line number and the cells of every line that is not blank."""
        try:
            with self._path.open(newline="", encoding="utf-8-sig") as stream:
                reader = csv.reader(stream, delimiter=self._delimiter, strict=True)
                yield from ((reader.line_num, row) for row in reader if row)
        except (csv.Error, UnicodeDecodeError) as error:
            raise InvalidData(f"cannot read {self._path} as a table: {error}") from error

    def _parse(self, lines: list[tuple[int, list[str]]]) -> NDArray[np.float64]:
        try:
            values = np.array([cells for _, cells in lines], dtype=np.float64)
        except ValueError:
            values = np.array([np.nan])
        if np.isfinite(values).all():
            return values
        cells = ((number, *pair) for number, row in lines for pair in zip(self.names, row, strict=True))
        number, name, cell = next(place for place in cells if not _is_finite(place[-1]))
        raise InvalidData(
            f"{self._path}, line {number}, column {name!r}: {cell!r} is not a finite number; "
            "correct it, or leave the column out"
        )


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _is_finite(cell: str) -> bool:
    return _is_number(cell) and math.isfinite(float(cell))


def _guess_delimiter(path: Path) -> str:
    with path.open("rb") as stream:
        line = stream.readline(_READ_BYTES).decode("utf-8", errors="replace")
    return max(_DELIMITERS, key=line.count)


def _count_lines(path: Path) -> int:
    count, last = 0, b"\n"
    with path.open("rb") as stream:
        while data := stream.read(_READ_BYTES):
            count, last = count + data.count(b"\n"), data[-1:]
    return count + (last != b"\n")


class ParquetTable(Table):
    """Rows of a Parquet file, read by record batch."""

    def __init__(self, path: Path, columns: Columns) -> None:
        super().__init__(path)
        with self._open() as file:
            schema = file.schema_arrow
            self.expected_rows = file.metadata.num_rows
        positions = self._keep(columns, list(schema.names))
        # Batches are asked for by name, so that every name must be the only one of its kind.
        select(self.names, list(schema.names))
        self.dtype = np.result_type(*(_numpy_type(schema.field(index), path) for index in positions))

    def _read(self, rows: int) -> Iterator[NDArray[Any]]:
        start = 0
        with self._open() as file:
            for batch in file.iter_batches(batch_size=rows, columns=self.names):
                yield self._block(batch, start)
                start += batch.num_rows

    def _block(self, batch: Any, start: int) -> NDArray[Any]:
        block = np.empty((batch.num_rows, len(self.names)), self.dtype)
        for index, name in enumerate(self.names):
            column = batch.column(name)
            if column.null_count:
                row = start + int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
                raise InvalidData(f"{self._path}: row {row}, column {name!r} has no value; fill it first")
            block[:, index] = column.to_numpy(zero_copy_only=False)
        return block

    def _open(self) -> Any:
        try:
            import pyarrow.parquet
        except ImportError as error:
            advice = "Parquet files need pyarrow, which is not installed: pip install 'daskrr[parquet]'"
            raise InvalidParameter(advice) from error
        try:
            return pyarrow.parquet.ParquetFile(self._path)
        except (ValueError, OSError) as error:
            raise InvalidData(f"cannot read {self._path}: {error}") from error


def _numpy_type(field: Any, path: Path) -> np.dtype[Any]:
    try:
        kind = np.dtype(field.type.to_pandas_dtype())
    except (NotImplementedError, TypeError):
        kind = np.dtype(object)
    if kind.kind not in "biuf":
        raise InvalidData(
            f"{path}: column {field.name!r} holds {field.type}, not numbers; choose the columns to convert"
        )
    return kind
