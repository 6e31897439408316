"""Turn tables on disk into Zarr arrays that daskrr reads well.

A source is read in blocks and never as a whole. The array appears under its final name only when it is
complete.
"""

import csv
import math
import os
import secrets
import shutil
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import zarr
from numpy.typing import DTypeLike, NDArray
from zarr.codecs import BloscCodec, Crc32cCodec

from daskrr.engine.progress import Reporter, Stage, reporter
from daskrr.errors import InvalidData, InvalidParameter, OutputExists, SourceChanged

MIB = 2**20
_MARKERS = ("zarr.json", ".zarray", ".zgroup")
_DELIMITERS = ",;\t|"


class Table(Protocol):
    """A table that can be read more than once, in blocks of rows."""

    names: list[str]
    dtype: np.dtype[Any]
    expected_rows: int

    def blocks(self, rows: int) -> Iterator[NDArray[Any]]:
        """Yield all rows from the first one on, in blocks of at most ``rows``."""


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    columns: Sequence[str | int] | None = None,
    standardize: bool = False,
    chunk_bytes: int = 8 * MIB,
    overwrite: bool = False,
    dtype: DTypeLike | None = None,
    key: str | None = None,
    delimiter: str | None = None,
    header: bool | None = None,
    progress: Reporter | bool | None = None,
) -> dict[str, Any]:
    """Write a table as a Zarr array with checksummed chunks that span all columns.

    Parameters
    ----------
    source : path
        File ending in ``.npy``, ``.npz``, ``.csv``, ``.tsv`` or ``.parquet``.
    target : path
        Directory of the new array.
    columns : sequence of str or int, optional
        Names or zero-based positions of the columns to keep, in this order; all by default.
    standardize : bool, optional
        Subtract each column's mean and divide by its population standard deviation, both found in a first
        pass over the source and kept in the attributes of the array. Constant columns are only centred.
    chunk_bytes : int, optional
        Size of a chunk before compression.
    overwrite : bool, optional
        Replace an existing Zarr array or group at ``target``.
    dtype : dtype, optional
        Type of the result. By default the type of the source; float64 for text and for standardized
        integers.
    key : str, optional
        Array inside an ``.npz`` file; by default ``X``, or the only two-dimensional one.
    delimiter : str, optional
        Character between cells of a text table; found from the first line by default.
    header : bool, optional
        Whether the first line of a text table holds names; by default it does when none of its cells is a
        number.
    progress : Reporter, bool or None, optional
        Where progress goes, as in :func:`daskrr.engine.progress.reporter`.

    Returns
    -------
    dict
        What was written: ``target``, ``rows``, ``columns``, ``dtype``, ``chunks``, ``seconds`` and, when
        standardized, ``constant_columns``.

    Raises
    ------
    InvalidData
        If a cell is not a finite number; the message names it.
    OutputExists
        If the target exists and may not be replaced.
    """
    started = time.perf_counter()
    path = Path(source)
    before = _fingerprint(path)
    with staged(target, overwrite) as partial:
        table = open_table(path, columns, key, delimiter, header)
        kind = _result_dtype(table, standardize, dtype)
        rows = _chunk_rows(chunk_bytes, len(table.names) * kind.itemsize)
        report = reporter(progress)
        scaling = _measure(table, rows, report) if standardize else None
        array = _write(partial, table, kind, rows, scaling, report)
        if _fingerprint(path) != before:
            raise SourceChanged(f"{path} changed while it was being read: nothing was written; convert it again")
    return _summary(target, array, table, scaling, time.perf_counter() - started)


def open_table(
    path: Path,
    columns: Sequence[str | int] | None = None,
    key: str | None = None,
    delimiter: str | None = None,
    header: bool | None = None,
) -> Table:
    """Open a file as a table, by the ending of its name.

    Parameters
    ----------
    path : pathlib.Path
        The file.
    columns, key, delimiter, header : optional
        As in :func:`convert`.

    Returns
    -------
    Table
    """
    suffix = path.suffix.lower()
    if key is not None and suffix != ".npz":
        raise InvalidParameter(f"an array name ({key!r}) applies to .npz files only, and this is {path}")
    if suffix not in (".csv", ".tsv") and (delimiter is not None or header is not None):
        raise InvalidParameter(f"a delimiter or header applies to .csv and .tsv files only, and this is {path}")
    if suffix == ".npy":
        return _NpyTable(path, columns)
    if suffix == ".npz":
        return _NpzTable(path, columns, key)
    if suffix in (".csv", ".tsv"):
        return _CsvTable(path, columns, "\t" if suffix == ".tsv" and delimiter is None else delimiter, header)
    if suffix == ".parquet":
        return _ParquetTable(path, columns)
    raise InvalidParameter(f"cannot read {path}: the name must end in .npy, .npz, .csv, .tsv or .parquet")


@contextmanager
def staged(target: str | os.PathLike[str], overwrite: bool = False) -> Iterator[Path]:
    """Give a path to write a Zarr directory to, and move it to its final name if all went well.

    Parameters
    ----------
    target : path
        Final name.
    overwrite : bool, optional
        Whether an existing Zarr array or group there is replaced.

    Yields
    ------
    pathlib.Path
        Temporary name beside ``target``; removed if the block fails.
    """
    if "://" in os.fspath(target):
        raise InvalidParameter(f"{target} is not a local directory: write to one and copy it there")
    final = Path(target)
    refuse_existing(final, overwrite)
    if not final.parent.is_dir():
        raise InvalidParameter(f"there is no folder {final.parent}, so {final} cannot be written: create it first")
    mark = secrets.token_hex(4)
    partial = final.with_name(f"{final.name}.partial-{mark}")
    try:
        yield partial
        refuse_existing(final, overwrite)
        _publish(partial, final, final.with_name(f"{final.name}.replaced-{mark}"))
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def refuse_existing(target: Path, overwrite: bool) -> None:
    """Raise unless something may be written at ``target``.

    Parameters
    ----------
    target : pathlib.Path
        Where something is going to be written.
    overwrite : bool
        Whether a Zarr array or group may be replaced.

    Raises
    ------
    OutputExists
    """
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise OutputExists(f"{target} exists: choose another name, or ask for it to be overwritten")
    if target.is_symlink() or not any((target / marker).is_file() for marker in _MARKERS):
        raise OutputExists(f"{target} exists and is no Zarr array or group, so it is not replaced; remove it yourself")


def _publish(partial: Path, final: Path, aside: Path) -> None:
    if final.exists():
        final.rename(aside)
    try:
        partial.rename(final)
    except OSError:
        if aside.exists():
            aside.rename(final)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _fingerprint(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise InvalidData(f"cannot read {path}: {error.strerror}") from error
    if not path.is_file():
        raise InvalidData(f"cannot read {path}: it is not a file")
    return status.st_size, status.st_mtime_ns


def _chunk_rows(chunk_bytes: int, row_bytes: int) -> int:
    # Blosc compresses at most 2 GiB at a time.
    if not 1 <= chunk_bytes <= 1024 * MIB:
        raise InvalidParameter(f"chunk_bytes must lie between 1 and {1024 * MIB}, not {chunk_bytes}")
    return max(1, chunk_bytes // row_bytes)


def _result_dtype(table: Table, standardize: bool, dtype: DTypeLike | None) -> np.dtype[Any]:
    source = np.dtype(np.uint8) if table.dtype.kind == "b" else table.dtype.newbyteorder("=")
    if source.kind not in "iuf" or source.itemsize > 8:
        raise InvalidData(f"cannot convert values of type {table.dtype}: integers or floats up to 64 bits are needed")
    if standardize and source.kind != "f":
        source = np.dtype(np.float64)
    if dtype is None:
        return source
    wanted = np.dtype(dtype)
    if wanted.kind not in "iuf" or not np.can_cast(source, wanted, "same_kind"):
        raise InvalidParameter(f"cannot convert {source} values to {wanted} without spoiling them")
    return wanted


class _Scaling:
    """Mean and standard deviation of every column, gathered block by block."""

    def __init__(self, width: int) -> None:
        self.rows = 0
        self.mean = np.zeros(width)
        self._squares = np.zeros(width)
        self._low = np.full(width, np.inf)
        self._high = np.full(width, -np.inf)

    def add(self, block: NDArray[Any]) -> None:
        """Take in more rows."""
        values = block.astype(np.float64)
        total = self.rows + len(values)
        with np.errstate(over="ignore", invalid="ignore"):
            mean = values.mean(axis=0)
            step = mean - self.mean
            between = step**2 * (self.rows * len(values) / total)
            self._squares += ((values - mean) ** 2).sum(axis=0) + between
            self.mean += step * (len(values) / total)
        self.rows = total
        self._low = np.minimum(self._low, values.min(axis=0))
        self._high = np.maximum(self._high, values.max(axis=0))

    def finish(self, names: list[str]) -> None:
        """Check the result once all rows are in."""
        # The mean of equal numbers need not be that number in floating point.
        self.mean = np.where(self.constant, self._low, self.mean)
        bad = np.flatnonzero(~np.isfinite(self.std) | ~np.isfinite(self.mean))
        if bad.size:
            raise InvalidData(f"cannot standardize column {names[bad[0]]!r}: its spread overflows float64")

    @property
    def constant(self) -> NDArray[np.bool_]:
        """Columns that hold a single value."""
        return self._low == self._high

    @property
    def std(self) -> NDArray[np.float64]:
        """Population standard deviation of every column."""
        return np.where(self.constant, 0.0, np.sqrt(self._squares / self.rows))

    @property
    def scale(self) -> NDArray[np.float64]:
        """What every column is divided by."""
        std = self.std
        return np.where(std > 0, std, 1.0)

    def apply(self, block: NDArray[Any]) -> NDArray[np.float64]:
        """Standardize rows."""
        return (block.astype(np.float64) - self.mean) / self.scale


def _measure(table: Table, rows: int, report: Reporter) -> _Scaling:
    scaling = _Scaling(len(table.names))
    blocks = math.ceil(table.expected_rows / rows)
    with Stage(report, "measure columns", blocks, table.expected_rows) as stage:
        for block in _whole(table.blocks(rows), rows):
            _require_finite(block, scaling.rows, table.names)
            scaling.add(block)
            stage.advance(rows=len(block))
    if scaling.rows:
        scaling.finish(table.names)
    return scaling


def _write(
    path: Path, table: Table, dtype: np.dtype[Any], rows: int, scaling: _Scaling | None, report: Reporter
) -> zarr.Array[Any]:
    blocks = _whole(table.blocks(rows), rows)
    first = next(blocks, None)
    if first is None:
        raise InvalidData("the source has no rows")
    array = _create(path, (len(first), len(table.names)), dtype, _attributes(table, scaling))
    done, count = 0, math.ceil(table.expected_rows / rows)
    with Stage(report, "write rows", count, table.expected_rows) as stage:
        for block in _chain(first, blocks):
            if done:
                array.resize((done + len(block), len(table.names)))
            array[done : done + len(block)] = _values(block, done, table.names, dtype, scaling)
            done += len(block)
            stage.advance(rows=len(block))
    return array


def _chain(first: NDArray[Any], rest: Iterator[NDArray[Any]]) -> Iterator[NDArray[Any]]:
    yield first
    yield from rest


def _create(path: Path, shape: tuple[int, int], dtype: np.dtype[Any], attributes: dict[str, Any]) -> zarr.Array[Any]:
    return zarr.create_array(
        str(path),
        shape=shape,
        chunks=shape,
        dtype=dtype,
        # A chunk of zeros must exist on disk, or it could not be told from one that was never written.
        config={"write_empty_chunks": True},
        compressors=(BloscCodec(cname="lz4", shuffle="shuffle"), Crc32cCodec()),
        attributes=attributes,
    )


def _attributes(table: Table, scaling: _Scaling | None) -> dict[str, Any]:
    attributes: dict[str, Any] = {"columns": table.names}
    if scaling is not None:
        attributes |= {
            "mean": scaling.mean.tolist(),
            "std": scaling.std.tolist(),
            "constant_columns": _constant_names(table, scaling),
        }
    return attributes


def _constant_names(table: Table, scaling: _Scaling) -> list[str]:
    return [table.names[index] for index in np.flatnonzero(scaling.constant)]


def _values(
    block: NDArray[Any], start: int, names: list[str], dtype: np.dtype[Any], scaling: _Scaling | None
) -> NDArray[Any]:
    _require_finite(block, start, names)
    values = block if scaling is None else scaling.apply(block)
    with np.errstate(over="ignore"):
        cast = values.astype(dtype)
    # A narrower type may turn a large number into infinity or, among integers, into another number.
    if dtype.kind == "f":
        _require_finite(cast, start, names, f" as {dtype}")
    elif not np.array_equal(cast, values):
        raise InvalidData(f"rows {start} to {start + len(block) - 1} hold integers that {dtype} cannot represent")
    return cast


def _require_finite(block: NDArray[Any], start: int, names: list[str], note: str = "") -> None:
    if block.dtype.kind != "f":
        return
    bad = np.argwhere(~np.isfinite(block))
    if len(bad):
        row, column = bad[0]
        raise InvalidData(
            f"row {start + row}, column {names[column]!r} is {block[row, column]}{note}: "
            "every value must be a finite number; remove or fill the row first"
        )


def _whole(blocks: Iterator[NDArray[Any]], rows: int) -> Iterator[NDArray[Any]]:
    """Cut blocks of any length into blocks of exactly ``rows`` rows, the last one excepted."""
    held: list[NDArray[Any]] = []
    count = 0
    for block in blocks:
        held.append(block)
        count += len(block)
        if count >= rows:
            joined = np.concatenate(held) if len(held) > 1 else block
            cut = count - count % rows
            yield from (joined[start : start + rows] for start in range(0, cut, rows))
            held, count = [joined[cut:]], count - cut
    if count:
        yield np.concatenate(held)


def _summary(
    target: str | os.PathLike[str],
    array: zarr.Array[Any],
    table: Table,
    scaling: _Scaling | None,
    seconds: float,
) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "target": os.fspath(target),
        "rows": array.shape[0],
        "columns": table.names,
        "dtype": str(array.dtype),
        "chunks": list(array.chunks),
        "standardized": scaling is not None,
        "seconds": seconds,
    }
    if scaling is not None:
        summary["constant_columns"] = _constant_names(table, scaling)
    return summary


def select(columns: Sequence[str | int] | None, names: list[str]) -> list[int]:
    """Find the positions of the wanted columns.

    Parameters
    ----------
    columns : sequence of str or int, or None
        Names or zero-based positions. Text that is no name but a number is a position. None means all.
    names : list of str
        Names of the columns there are.

    Returns
    -------
    list of int

    Examples
    --------
    >>> select(["b", 0], ["a", "b", "c"])
    [1, 0]
    """
    if columns is None:
        return list(range(len(names)))
    positions = [_position(column, names) for column in columns]
    if not positions or len(set(positions)) < len(positions):
        raise InvalidParameter(f"the columns {list(columns)} must be at least one, and each only once")
    return positions


def _position(column: str | int, names: list[str]) -> int:
    if isinstance(column, str) and column in names:
        if names.count(column) > 1:
            raise InvalidParameter(f"several columns are called {column!r}: give the position instead")
        return names.index(column)
    text = str(column)
    if text.isdecimal() and int(text) < len(names):
        return int(text)
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    raise InvalidParameter(f"there is no column {column!r} among the {len(names)} columns {shown}")


class _NpyTable:
    """Rows of a memory-mapped ``.npy`` file."""

    def __init__(self, path: Path, columns: Sequence[str | int] | None = None) -> None:
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise InvalidData(f"cannot read {path}: {error}") from error
        self._array = array.reshape(_table_shape(array.shape, path))
        self.names, self._keep = _numbered(self._array.shape[1], columns)
        self.dtype = array.dtype
        self.expected_rows = len(array)

    def blocks(self, rows: int) -> Iterator[NDArray[Any]]:
        for start in range(0, len(self._array), rows):
            yield np.asarray(self._array[start : start + rows])[:, self._keep]


class _NpzTable:
    """Rows of one array in an ``.npz`` archive, read as a stream.

    An array stored column by column cannot be streamed by rows and is loaded as a whole.
    """

    def __init__(self, path: Path, columns: Sequence[str | int] | None = None, key: str | None = None) -> None:
        self._path = path
        try:
            with zipfile.ZipFile(path) as archive:
                headers = {name[:-4]: _header(archive, name) for name in archive.namelist() if name[-4:] == ".npy"}
        except (zipfile.BadZipFile, ValueError, EOFError) as error:
            raise InvalidData(f"cannot read {path}: {error}") from error
        self._key = _pick_array(path, headers, key)
        shape, self._fortran, self.dtype = headers[self._key]
        self.expected_rows, self._width = _table_shape(shape, path)
        self.names, self._keep = _numbered(self._width, columns)

    def blocks(self, rows: int) -> Iterator[NDArray[Any]]:
        if self._fortran and self._width > 1:
            with np.load(self._path, allow_pickle=False) as archive:
                yield archive[self._key][:, self._keep]
            return
        with zipfile.ZipFile(self._path) as archive, archive.open(self._key + ".npy") as stream:
            _read_header(stream)
            for start in range(0, self.expected_rows, rows):
                count = min(rows, self.expected_rows - start)
                data = stream.read(count * self._width * self.dtype.itemsize)
                if len(data) < count * self._width * self.dtype.itemsize:
                    raise InvalidData(f"{self._path} ends in the middle of the array {self._key!r}")
                yield np.frombuffer(data, self.dtype).reshape(count, self._width)[:, self._keep]


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


def _numbered(width: int, columns: Sequence[str | int] | None) -> tuple[list[str], list[int] | slice]:
    names = [str(index) for index in range(width)]
    keep = select(columns, names)
    # A slice is a view; a list of positions would copy every block of a table that is kept as it is.
    return [names[index] for index in keep], slice(None) if columns is None else keep


class _CsvTable:
    """Rows of a text table, as float64."""

    dtype: np.dtype[Any] = np.dtype(np.float64)

    def __init__(
        self,
        path: Path,
        columns: Sequence[str | int] | None = None,
        delimiter: str | None = None,
        header: bool | None = None,
    ) -> None:
        self._path = path
        if delimiter is not None and len(delimiter) != 1:
            raise InvalidParameter(f"the delimiter must be one character, not {delimiter!r}")
        self._delimiter = delimiter or _guess_delimiter(path)
        first = next((cells for _, cells in self._lines()), None)
        if first is None:
            raise InvalidData(f"{path} is empty")
        self._header = not any(map(_is_number, first)) if header is None else header
        self._width = len(first)
        names = [cell.strip() for cell in first] if self._header else [str(i) for i in range(len(first))]
        self._keep = select(columns, names)
        self.names = [names[index] for index in self._keep]
        self.expected_rows = max(_count_lines(path) - self._header, 0)

    def blocks(self, rows: int) -> Iterator[NDArray[Any]]:
        lines = self._lines()
        if self._header:
            next(lines, None)
        numbers: list[int] = []
        cells: list[list[str]] = []
        # Cells are Python text until parsed, many times larger than the numbers they hold.
        size = max(1, min(rows, 100_000 // len(self._keep)))
        for number, row in lines:
            if len(row) != self._width:
                raise InvalidData(f"{self._path}, line {number} has {len(row)} cells instead of {self._width}")
            numbers.append(number)
            cells.append([row[index] for index in self._keep])
            if len(cells) == size:
                yield self._parse(cells, numbers)
                numbers, cells = [], []
        if cells:
            yield self._parse(cells, numbers)

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the line number and the cells of every line that is not blank."""
        try:
            with self._path.open(newline="", encoding="utf-8-sig") as stream:
                reader = csv.reader(stream, delimiter=self._delimiter, strict=True)
                yield from ((reader.line_num, row) for row in reader if row)
        except (csv.Error, UnicodeDecodeError) as error:
            raise InvalidData(f"cannot read {self._path} as a table: {error}") from error

    def _parse(self, cells: list[list[str]], numbers: list[int]) -> NDArray[np.float64]:
        try:
            values = np.array(cells, dtype=np.float64)
        except ValueError:
            values = None
        if values is None or not np.isfinite(values).all():
            self._raise_bad_cell(cells, numbers)
        assert values is not None
        return values

    def _raise_bad_cell(self, cells: list[list[str]], numbers: list[int]) -> None:
        for number, row in zip(numbers, cells, strict=True):
            for name, cell in zip(self.names, row, strict=True):
                if not _is_number(cell) or not math.isfinite(float(cell)):
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


def _guess_delimiter(path: Path) -> str:
    with path.open("rb") as stream:
        line = stream.readline(MIB).decode("utf-8", errors="replace")
    return max(_DELIMITERS, key=line.count)


def _count_lines(path: Path) -> int:
    count, last = 0, b"\n"
    with path.open("rb") as stream:
        while data := stream.read(MIB):
            count, last = count + data.count(b"\n"), data[-1:]
    return count + (last != b"\n")


class _ParquetTable:
    """Rows of a Parquet file, read by record batch."""

    def __init__(self, path: Path, columns: Sequence[str | int] | None = None) -> None:
        self._path = path
        file = self._open()
        schema = file.schema_arrow
        keep = select(columns, list(schema.names))
        self.names = [schema.names[index] for index in keep]
        for name in self.names:
            _position(name, list(schema.names))
        kinds = [_numpy_type(schema.field(index), path) for index in keep]
        self.dtype = np.result_type(*kinds)
        self.expected_rows = file.metadata.num_rows
        file.close()

    def blocks(self, rows: int) -> Iterator[NDArray[Any]]:
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
        parquet = _pyarrow_parquet()
        try:
            return parquet.ParquetFile(self._path)
        except (ValueError, OSError) as error:
            raise InvalidData(f"cannot read {self._path}: {error}") from error


def _pyarrow_parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise InvalidParameter(
            "Parquet files need pyarrow, which is not installed: pip install 'daskrr[parquet]'"
        ) from error
    return pyarrow.parquet


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
