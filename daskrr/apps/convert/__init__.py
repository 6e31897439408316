"""Turn tables on disk into Zarr arrays that daskrr reads well.

A source is read in blocks. The array appears under its final name only when it is complete.
"""

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import DTypeLike, NDArray

from daskrr.apps.convert.readers import open_array_file
from daskrr.apps.convert.store import PointStore
from daskrr.apps.convert.tables import CellTable, Scaling, Table, require_finite, sized
from daskrr.errors import InvalidData, InvalidParameter, OutputExists, SourceChanged
from daskrr.runtime.progress import Reporter, Stage, reporter
from daskrr.storage.zarr_input import open_zarr
from daskrr.tables.features import Features
from daskrr.tables.files import is_table, open_tabular
from daskrr.tables.recipe import Encoded, Recipe
from daskrr.tables.survey import TableOptions

MIB = 2**20
_MARKERS = ("zarr.json", ".zarray", ".zgroup")


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    standardize: bool = False,
    like: Features | None = None,
    append: bool = False,
    overwrite: bool = False,
    dtype: DTypeLike | None = None,
    chunk_bytes: int = 8 * MIB,
    key: str | None = None,
    delimiter: str | None = None,
    header: bool | None = None,
    progress: Reporter | bool | None = None,
    **reading: Any,
) -> dict[str, Any]:
    """Write a table as a Zarr array with checksummed chunks that span all features.

    Numbers stay numbers; words become a feature each, dates days since 1970, and what says nothing about a row is left
    out. What became of every column is recorded with the array, so that it can be done again.

    Parameters
    ----------
    source
        File ending in ``.npy``, ``.npz``, ``.csv``, ``.tsv`` or ``.parquet``, or a folder of Parquet files of the same
        columns.
    target
        Directory of the new array. With identifiers or a response, or where rows may be dropped, it is a group:
        ``points``, ``row`` (their numbers in the table), ``id`` and ``response``.
    standardize
        Subtract each feature's mean and divide by its population standard deviation, both found in a first pass over
        the source and kept in the attributes of the array. Constant columns are only centred. Features of words stay 0
        and 1.
    like
        Features of another store, sketch or model (:func:`daskrr.apps.convert.likeness.features_at`): the same is done
        as was done there, and nothing is measured.
    append
        Write rows after those of ``target``, as they were made. Files that it has already are not read again.
    overwrite
        Replace an existing Zarr array or group at ``target``.
    dtype
        Type of the result. By default the type of the source; float64 for text and for standardized integers.
    chunk_bytes
        Size of a chunk before compression.
    key
        Array inside an ``.npz`` file; by default ``X``, or the only two-dimensional one.
    delimiter
        Character between cells of a text table; found from the first line by default.
    header
        Whether the first line of a text table holds names; by default it does when it looks different from the second.
    progress
        Where progress goes, as in :func:`daskrr.runtime.progress.reporter`.
    reading
        The attributes of :class:`daskrr.tables.survey.TableOptions`: ``columns``, ``id``, ``response``, ``missing``,
        ``dates``, ``levels``.

    Returns
    -------
    summary
        What was written: ``target``, ``rows``, ``columns``, ``dtype``, ``chunks``, ``standardized``, ``treatment`` (of
        every column of a table), ``missing``, ``dropped``, ``seconds`` and, when standardized, ``constant_columns``.

    Raises
    ------
    InvalidData
        A cell is not a finite number, or values are missing; the message names them.
    OutputExists
        The target exists and may not be replaced.
    SourceChanged
        The source was written to meanwhile.
    """
    work = _Work(Path(source), key, delimiter, header, reporter(progress), time.perf_counter())
    if append:
        if reading or standardize or overwrite or like is not None or dtype is not None:
            raise InvalidParameter("rows are appended as those before them were made; leave all other options out")
        return work.append(Path(target))
    like = None if like is None else like.without_response()
    made = TableOptions(**{"prunes": standardize and reading.get("columns") is None} | reading)
    asked = {"standardize": standardize} | reading | ({} if like is None else {"like": like.to_attributes()})
    with staged(target, overwrite) as partial:
        return work.write(partial, target, made, standardize, like, dtype, chunk_bytes, asked)


@dataclass(frozen=True)
class _Work:
    """One conversion."""

    source: Path
    key: str | None
    delimiter: str | None
    header: bool | None
    report: Reporter
    began: float

    def write(
        self,
        path: Path,
        target: str | os.PathLike[str],
        reading: TableOptions,
        standardize: bool,
        like: Features | None,
        dtype: DTypeLike | None,
        chunk_bytes: int,
        asked: dict[str, Any],
    ) -> dict[str, Any]:
        """A new store at a path, which will be the target; it remembers what was asked for."""
        before = _fingerprints(self.source)
        table, lacking = self._table(reading, like)
        scaled = standardize if like is None else like.is_scaled
        kind = _result_dtype(table, scaled, dtype)
        rows = _chunk_rows(chunk_bytes, len(table.names) * kind.itemsize)
        scaling = self._measure(table, rows) if standardize and like is None else None
        features = like or _features(table, scaling)
        if features.names != tuple(table.names):
            raise InvalidData(f"{self.source} {features.difference(Features(tuple(table.names)))}")
        is_group = table.recipe is not None and table.recipe.keeps_more
        blocks = table.blocks(rows)
        first = next(blocks, None)
        if first is None:
            raise InvalidData("the source has no rows")
        store = PointStore.made(path, is_group=is_group, dtype=kind, shape=first.values.shape)
        read = self._fill(store, _chained(first, blocks), table, features)
        sources = self._unchanged(before)
        more = {} if scaling is None else {"constant_columns": scaling.constant_columns}
        array = store.finish(features.to_attributes() | more | {"sources": sources, "rows_read": read, "asked": asked})
        summary = _summary(target, array, features, time.perf_counter() - self.began) | more
        return summary | {"missing": lacking, "dropped": read - store.n_rows}

    def append(self, target: Path) -> dict[str, Any]:
        """More rows to a store that is there."""
        features, known = features_of(target), {one["name"]: one for one in sources_of(target)}
        before = _fingerprints(self.source)
        changed = [path for path in before if path.name in known and _has_changed(known[path.name], before[path])]
        if changed:
            raise SourceChanged(f"{changed[0]} has changed since {target} was made of it: make it anew (--overwrite)")
        new = sorted(path for path in before if path.name not in known)
        store = PointStore.reopened(target)
        was, known_rows = store.n_rows, _rows_read(store.array)
        read = known_rows
        for path in new:
            table = replace(self, source=path)._table(TableOptions(), features)[0]
            read += self._fill(store, table.blocks(store.array.chunks[0]), table, features, read)
        sources = [*known.values(), *(one for one in self._unchanged(before) if one["name"] not in known)]
        array = store.finish({"sources": sources, "rows_read": read}) if new else store.array
        appended = store.n_rows - was
        summary = _summary(target, array, features, time.perf_counter() - self.began)
        return summary | {"missing": {}, "dropped": read - known_rows - appended, "appended": appended}

    def _table(self, reading: TableOptions, like: Features | None) -> tuple[Table, dict[str, int]]:
        """The source, and how many values its columns lack."""
        path, recipe = self.source, None if like is None else like.recipe
        if self.key is not None and path.suffix.lower() != ".npz":
            raise InvalidParameter(f"an array name ({self.key!r}) applies to .npz files only, and this is {path}")
        if is_table(path):
            cells = open_tabular(path, self.delimiter, self.header)
            if recipe is not None:
                return CellTable(cells, Recipe.from_record(recipe), str(path)), {}
            if like is not None:
                reading = TableOptions(columns=like.names)
            return CellTable.learned(cells, reading, str(path), self.report)
        if self.delimiter is not None or self.header is not None:
            raise InvalidParameter(f"a delimiter or header applies to .csv and .tsv files only, and this is {path}")
        if recipe is not None:
            raise InvalidParameter(f"{path} has no named columns, and was to be read as a table of such: name a table")
        if reading.id is not None or reading.response is not None or reading.missing != "refuse":
            raise InvalidParameter(f"identifiers, responses and gaps are those of tables, and {path} is an array")
        return open_array_file(path, reading.columns, self.key), {}

    def _measure(self, table: Table, rows: int) -> Scaling:
        scaling = Scaling(table.names, table.units)
        with Stage(self.report, "measure columns", *sized(table.expected_rows, rows)) as stage:
            for block in table.blocks(rows):
                require_finite(block.values, block.rows, table.names)
                scaling.add(block.values)
                stage.advance(rows=len(block.values))
        return scaling

    def _fill(
        self, store: PointStore, blocks: Iterator[Encoded], table: Table, features: Features, offset: int = 0
    ) -> int:
        """Write all blocks, whose rows follow ``offset`` others; how many rows were read."""
        with Stage(self.report, "write rows", *sized(table.expected_rows, store.array.chunks[0])) as stage:
            for block in blocks:
                values = _values(block, features, store.array.dtype)
                store.write(values, offset + block.rows, block.ids, block.targets)
                stage.advance(rows=len(values))
        return table.rows_read

    def _unchanged(self, before: dict[Path, tuple[int, int]]) -> list[dict[str, Any]]:
        if _fingerprints(self.source) != before:
            raise SourceChanged(f"{self.source} changed while it was being read: nothing was written; convert it again")
        return [{"name": path.name, "bytes": size, "modified": at} for path, (size, at) in sorted(before.items())]


@contextmanager
def staged(target: str | os.PathLike[str], overwrite: bool = False) -> Iterator[Path]:
    """Give a temporary path beside ``target`` to write a Zarr directory to, and rename it if all went well.

    Parameters
    ----------
    target
        Final name.
    overwrite
        Whether an existing Zarr array or group there is replaced.
    """
    if "://" in os.fspath(target):
        raise InvalidParameter(f"{target} is not a local directory: write to one and copy it there")
    final = Path(target)
    _refuse_existing(final, overwrite)
    if not final.parent.is_dir():
        raise InvalidParameter(f"there is no folder {final.parent}, so {final} cannot be written: create it first")
    partial = final.with_name(f"{final.name}.partial-{secrets.token_hex(4)}")
    try:
        yield partial
        _refuse_existing(final, overwrite)
        _exchange(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _exchange(new: Path, target: Path) -> None:
    """Rename ``new`` to ``target``; what stood there is moved aside first, and back should this fail."""
    aside = target.with_name(f"{target.name}.replaced-{secrets.token_hex(4)}")
    if target.exists():
        target.rename(aside)
    try:
        new.rename(target)
    except OSError:
        if aside.exists():
            aside.rename(target)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _refuse_existing(target: Path, overwrite: bool) -> None:
    """Raise unless nothing is there, or a Zarr array or group that may be replaced."""
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise OutputExists(f"{target} exists. Pass overwrite=True (--overwrite) to replace it, or name another target.")
    if target.is_symlink() or not any((target / marker).is_file() for marker in _MARKERS):
        raise OutputExists(f"{target} exists and is no Zarr array or group, so it is not replaced; remove it yourself")


def _fingerprints(source: Path) -> dict[Path, tuple[int, int]]:
    """Size and time of the last change of every file of a source."""
    try:
        paths = sorted(source.glob("*.parquet")) if source.is_dir() and is_table(source) else [source]
        found = {path: path.stat() for path in paths}
    except OSError as error:
        raise InvalidData(f"cannot read {source}: {error.strerror}") from error
    if not all(path.is_file() for path in paths):
        raise InvalidData(f"cannot read {source}: it is not a file, nor a folder of Parquet files")
    return {path: (status.st_size, status.st_mtime_ns) for path, status in found.items()}


def _chunk_rows(chunk_bytes: int, row_bytes: int) -> int:
    # Blosc compresses at most 2 GiB at a time.
    if not 1 <= chunk_bytes <= 1024 * MIB:
        raise InvalidParameter(f"chunk_bytes must lie between 1 and {1024 * MIB}, not {chunk_bytes}")
    return max(1, chunk_bytes // row_bytes)


def _chained(first: Encoded, others: Iterator[Encoded]) -> Iterator[Encoded]:
    yield first
    yield from others


def _features(table: Table, scaling: Scaling | None) -> Features:
    if scaling is not None:
        return scaling.features(table.recipe)
    return Features(tuple(table.names), recipe=None if table.recipe is None else table.recipe.to_record())


def features_of(store: str | os.PathLike[str]) -> Features:
    """What the features of a store of rows are.

    Raises
    ------
    InvalidData
        It does not say.
    """
    array = open_zarr(os.fspath(store))
    found = Features.of(dict(array.attrs), array.shape[1], os.fspath(store)) if array.ndim == 2 else None
    if found is None:
        raise InvalidData(f"{store} has no record of its columns; it was not made by daskrr convert")
    return found


def sources_of(store: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The files that a store was made of."""
    found = open_zarr(os.fspath(store)).attrs.get("sources", [])
    return [dict(one) for one in found] if isinstance(found, list) else []


def _rows_read(array: "zarr.Array[Any]") -> int:
    found = array.attrs.get("rows_read")
    return found if isinstance(found, int) else array.shape[0]


def _has_changed(known: dict[str, Any], now: tuple[int, int]) -> bool:
    return (known.get("bytes"), known.get("modified")) != now


def _result_dtype(table: Table, standardize: bool, dtype: DTypeLike | None) -> np.dtype[Any]:
    """The type to write, which must hold what the source does."""
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


def _values(block: Encoded, features: Features, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The rows as they are written, checked before and after."""
    require_finite(block.values, block.rows, features.names)
    values = features.scaled(block.values) if features.is_scaled else block.values
    with np.errstate(over="ignore"):
        cast = values.astype(dtype)
    # A narrower type may turn a large number into infinity or, among integers, into another number.
    if dtype.kind == "f":
        require_finite(cast, block.rows, features.names, f" as {dtype}")
    elif not np.array_equal(cast, values):
        raise InvalidData(f"rows {block.rows[0]} to {block.rows[-1]} hold numbers that {dtype} cannot represent")
    return cast


def _summary(
    target: str | os.PathLike[str], array: "zarr.Array[Any]", features: Features, seconds: float
) -> dict[str, Any]:
    return {
        "target": os.fspath(target),
        "rows": array.shape[0],
        "columns": list(features.names),
        "dtype": str(array.dtype),
        "chunks": list(array.chunks),
        "standardized": features.is_scaled,
        "treatment": [] if features.recipe is None else Recipe.from_record(features.recipe).describe(),
        "seconds": seconds,
    }
