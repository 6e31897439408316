"""Turn tables on disk into Zarr arrays that daskrr reads well.

A source is read in blocks. The array appears under its final name only when it is complete.
"""

import itertools
import math
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import DTypeLike, NDArray
from zarr.codecs import BloscCodec, Crc32cCodec

from daskrr.apps.readers import open_table
from daskrr.apps.tables import Columns, Scaling, Table, require_finite
from daskrr.engine.progress import Reporter, Stage, reporter
from daskrr.engine.storage import publish
from daskrr.errors import InvalidData, InvalidParameter, OutputExists, SourceChanged

MIB = 2**20
_MARKERS = ("zarr.json", ".zarray", ".zgroup")


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    columns: Columns = None,
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
    source
        File ending in ``.npy``, ``.npz``, ``.csv``, ``.tsv`` or ``.parquet``.
    target
        Directory of the new array.
    columns
        Names or zero-based positions of the columns to keep, in this order; all by default.
    standardize
        Subtract each column's mean and divide by its population standard deviation, both found in a first pass over
        the source and kept in the attributes of the array. Constant columns are only centred.
    chunk_bytes
        Size of a chunk before compression.
    overwrite
        Replace an existing Zarr array or group at ``target``.
    dtype
        Type of the result. By default the type of the source; float64 for text and for standardized integers.
    key
        Array inside an ``.npz`` file; by default ``X``, or the only two-dimensional one.
    delimiter
        Character between cells of a text table; found from the first line by default.
    header
        Whether the first line of a text table holds names; by default it does when none of its cells is a number.
    progress
        Where progress goes, as in :func:`daskrr.engine.progress.reporter`.

    Returns
    -------
    summary
        What was written: ``target``, ``rows``, ``columns``, ``dtype``, ``chunks``, ``standardized``, ``seconds`` and,
        when standardized, ``constant_columns``.

    Raises
    ------
    InvalidData
        A cell is not a finite number; the message names it.
    OutputExists
        The target exists and may not be replaced.
    SourceChanged
        The source was written to meanwhile.
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
        publish(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _refuse_existing(target: Path, overwrite: bool) -> None:
    """Raise unless nothing is there, or a Zarr array or group that may be replaced."""
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise OutputExists(f"{target} exists: choose another name, or ask for it to be overwritten")
    if target.is_symlink() or not any((target / marker).is_file() for marker in _MARKERS):
        raise OutputExists(f"{target} exists and is no Zarr array or group, so it is not replaced; remove it yourself")


def _fingerprint(path: Path) -> tuple[int, int]:
    """Size and time of the last change."""
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


def _measure(table: Table, rows: int, report: Reporter) -> Scaling:
    scaling = Scaling(table.names)
    with Stage(report, "measure columns", math.ceil(table.expected_rows / rows), table.expected_rows) as stage:
        for block in table.blocks(rows):
            require_finite(block, scaling.rows, table.names)
            scaling.add(block)
            stage.advance(rows=len(block))
    if scaling.rows:
        scaling.finish()
    return scaling


def _write(
    path: Path, table: Table, dtype: np.dtype[Any], rows: int, scaling: Scaling | None, report: Reporter
) -> zarr.Array[Any]:
    blocks = table.blocks(rows)
    first = next(blocks, None)
    if first is None:
        raise InvalidData("the source has no rows")
    attributes = {"columns": table.names} | ({} if scaling is None else scaling.attributes())
    array = _create(path, first.shape, dtype, attributes)
    done = 0
    with Stage(report, "write rows", math.ceil(table.expected_rows / rows), table.expected_rows) as stage:
        for block in itertools.chain([first], blocks):
            if done:
                array.resize((done + len(block), block.shape[1]))
            array[done : done + len(block)] = _values(block, done, table.names, dtype, scaling)
            done += len(block)
            stage.advance(rows=len(block))
    return array


def _create(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], attributes: dict[str, Any]) -> zarr.Array[Any]:
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


def _values(
    block: NDArray[Any], start: int, names: list[str], dtype: np.dtype[Any], scaling: Scaling | None
) -> NDArray[Any]:
    """The rows as they are written, checked before and after."""
    require_finite(block, start, names)
    values = block if scaling is None else scaling.apply(block)
    with np.errstate(over="ignore"):
        cast = values.astype(dtype)
    # A narrower type may turn a large number into infinity or, among integers, into another number.
    if dtype.kind == "f":
        require_finite(cast, start, names, f" as {dtype}")
    elif not np.array_equal(cast, values):
        raise InvalidData(f"rows {start} to {start + len(block) - 1} hold integers that {dtype} cannot represent")
    return cast


def _summary(
    target: str | os.PathLike[str],
    array: zarr.Array[Any],
    table: Table,
    scaling: Scaling | None,
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
        summary["constant_columns"] = scaling.constant_columns
    return summary
