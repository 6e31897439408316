"""Readers of arrays of numbers in files: ``.npy`` and ``.npz``."""

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.apps.convert.tables import ArrayTable, Columns
from daskrr.errors import InvalidData, InvalidParameter


def open_array_file(path: Path, columns: Columns = None, key: str | None = None) -> ArrayTable:
    """Open a file by the ending of its name; the options are those of :func:`daskrr.apps.convert.convert`.

    Raises
    ------
    InvalidParameter
        The ending is unknown.
    InvalidData
        The file does not hold what its ending says.
    """
    match path.suffix.lower():
        case ".npy":
            return NpyTable(path, columns)
        case ".npz":
            return NpzTable(path, columns, key)
    raise InvalidParameter(
        f"cannot read {path}: the name must end in .npy, .npz, .csv, .tsv or .parquet, or be a folder of Parquet files"
    )


class NpyTable(ArrayTable):
    """Rows of a memory-mapped ``.npy`` file."""

    def __init__(self, path: Path, columns: Columns) -> None:
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise InvalidData(f"cannot read {path}: {error}") from error
        self._array = array.reshape(_table_shape(array.shape, path))
        super().__init__(path, array.dtype, self._array.shape, columns)

    def _arrays(self, rows: int) -> Iterator[NDArray[Any]]:
        for start in range(0, len(self._array), rows):
            yield np.asarray(self._array[start : start + rows])


class NpzTable(ArrayTable):
    """Rows of one array in an ``.npz`` archive, streamed; one stored column by column has to be loaded as a whole."""

    def __init__(self, path: Path, columns: Columns, key: str | None) -> None:
        try:
            with zipfile.ZipFile(path) as archive:
                headers = {name[:-4]: _header(archive, name) for name in archive.namelist() if name[-4:] == ".npy"}
        except (zipfile.BadZipFile, ValueError, EOFError) as error:
            raise InvalidData(f"cannot read {path}: {error}") from error
        self._key = _pick_array(path, headers, key)
        shape, self._fortran, dtype = headers[self._key]
        self._path, (n_rows, self._width) = path, _table_shape(shape, path)
        super().__init__(path, dtype, (n_rows, self._width), columns)

    def _arrays(self, rows: int) -> Iterator[NDArray[Any]]:
        if self._fortran and self._width > 1:
            with np.load(self._path, allow_pickle=False) as archive:
                yield archive[self._key]
            return
        with zipfile.ZipFile(self._path) as archive, archive.open(self._key + ".npy") as stream:
            _read_header(stream)
            for start in range(0, self.expected_rows, rows):
                count = min(rows, self.expected_rows - start)
                data = stream.read(count * self._width * self.dtype.itemsize)
                if len(data) < count * self._width * self.dtype.itemsize:
                    raise InvalidData(f"{self._path} ends in the middle of the array {self._key!r}")
                yield np.frombuffer(data, self.dtype).reshape(count, self._width)


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
