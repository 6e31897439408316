"""The output store: created apart, written by whole chunks, checked, and only then put in its place.

A result is a Zarr group with one array per quantity, NaN as the fill value and a checksummed codec. Its attributes
hold the parameters, versions and summary under ``"daskrr"``; they are written last, so that a group without them is
not a result.
"""

import errno
import os
import shutil
import uuid
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import Crc32cCodec, ZstdCodec

from daskrr.engine.addresses import is_local, locate, redact
from daskrr.engine.patience import patiently
from daskrr.engine.places import blueprint, zarr_store
from daskrr.errors import DaskrrError, InvalidData, InvalidParameter, OutputExists, StoreFailed

RESULT_KEY = "daskrr"
FORMAT = 1


class OutputStore:
    """A result being written; use as a context manager and call :meth:`commit` when all rows are there.

    On a local path everything is written under a temporary name beside the target and renamed at the commit. On a
    URL it is written in place, and the attributes written last make it a result.
    """

    def __init__(self, target: str | os.PathLike, overwrite: bool, kind: str = "scores") -> None:
        self.target = locate(target)
        self.overwrite, self.kind = overwrite, kind
        self.local = is_local(self.target)
        _check_target(self.target, overwrite, kind)
        suffix = f".partial-{uuid.uuid4().hex[:8]}" if self.local else ""
        self.path = self.target + suffix
        self.committed = False
        self.arrays: dict[str, zarr.Array] = {}

    def __enter__(self) -> "OutputStore":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.local and not self.committed:
            shutil.rmtree(self.path, ignore_errors=True)

    def create(
        self, shapes: Mapping[str, tuple[int, ...]], chunk_rows: int, second: str = "ridge", **dtypes: str
    ) -> None:
        """Create the named arrays; see :func:`daskrr.engine.places.blueprint`."""
        try:
            group: Any = blueprint(shapes, chunk_rows, second, zarr_store(self.path), **dtypes)
            self.arrays = {name: group[name] for name in shapes}
        except OSError as error:
            raise InvalidParameter(f"cannot create {redact(self.target)}: {error}") from None

    def write(self, arrays: Mapping[str, NDArray]) -> None:
        """Write small arrays of any shape, each as one chunk."""
        write_group(zarr_store(self.path), "", arrays)

    def commit(self, attributes: dict[str, Any]) -> None:
        """Write the attributes, then put the result in its place, unless something else has come there meanwhile."""
        if self.local:
            _check_target(self.target, self.overwrite, self.kind)
        group = zarr.open_group(zarr_store(self.path), mode="r+")
        group.attrs[RESULT_KEY] = stamped(self.kind, attributes)
        if self.local:
            publish(Path(self.path), Path(self.target))
        self.committed = True


def stamped(kind: str, attributes: Mapping[str, Any]) -> Any:
    """Attributes of what is finished, by which it is known again."""
    return {"format": FORMAT, "kind": kind} | dict(attributes)


def write_part(path: str, name: str, kind: str, arrays: Mapping[str, NDArray], attributes: Mapping[str, Any]) -> None:
    """Write small arrays as a group of its own within the one at ``path``, with attributes."""
    write_group(zarr_store(path), name, arrays).attrs[RESULT_KEY] = stamped(kind, attributes)


def write_group(store: Any, path: str, arrays: Mapping[str, NDArray]) -> zarr.Group:
    """Write small arrays of any shape as a new group, each as one chunk."""
    group = zarr.open_group(store, path=path, mode="w")
    for name, values in arrays.items():
        group.create_array(
            name,
            data=np.asarray(values),
            chunks=tuple(max(1, size) for size in np.shape(values)),
            fill_value=np.nan if np.asarray(values).dtype.kind == "f" else -1,
            compressors=(ZstdCodec(level=1), Crc32cCodec()),
        )
    return group


def checksum(values: NDArray) -> int:
    """Of the bytes of an array in row order."""
    return zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def publish(new: Path, target: Path) -> None:
    """Rename ``new`` to ``target``; what stood there is moved aside first, and back should this fail."""
    aside = target.with_name(f"{target.name}.replaced-{uuid.uuid4().hex[:8]}")
    if target.exists():
        target.rename(aside)
    try:
        new.rename(target)
    except OSError:
        if aside.exists():
            aside.rename(target)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _check_target(target: str, overwrite: bool, kind: str) -> None:
    """Refuse to replace anything that was not asked to be replaced, or is not a result of daskrr of the same kind."""
    existing = _open_group(target)
    ours = existing is not None and RESULT_KEY in existing.attrs
    occupied = existing is not None or (is_local(target) and os.path.lexists(target))
    if occupied and not ours:
        raise OutputExists(f"{redact(target)} exists and is not a result of daskrr; it is left alone. Name another.")
    found: Any = existing.attrs[RESULT_KEY] if ours and existing is not None else {}
    if ours and found.get("kind") != kind:
        raise OutputExists(f"{redact(target)} holds {found.get('kind')}, not {kind}; it is left alone. Name another.")
    if ours and not overwrite:
        raise OutputExists(f"{redact(target)} holds {kind} already. Pass overwrite=True (--overwrite) to replace it.")
    parent = os.path.dirname(target)
    if is_local(target) and not os.path.isdir(parent):
        raise InvalidParameter(f"there is no folder {parent}, so {target} cannot be written. Create it first.")


def _open_group(path: str) -> zarr.Group | None:
    try:
        found = zarr.open(zarr_store(path), mode="r")
    except (FileNotFoundError, KeyError, ValueError, NotADirectoryError):
        return None
    except DaskrrError:
        raise
    except Exception as error:  # stores raise errors of many kinds
        raise StoreFailed(f"cannot open {redact(path)}: {type(error).__name__}: {redact(str(error), path)}") from None
    return found if isinstance(found, zarr.Group) else None


def write_block(arrays: dict[str, zarr.Array], columns: dict[str, NDArray[np.float64]], start: int) -> None:
    """Write the rows from ``start`` of each named array; the block must be whole chunks.

    Raises
    ------
    RuntimeError
        The block is not aligned with the chunks: two writers of one chunk would lose rows.
    StoreFailed
        The store is full, or refused several times.
    """
    for name, values in columns.items():
        array = arrays[name]
        stop, height = start + len(values), array.chunks[0]
        if start % height or (stop % height and stop != array.shape[0]):
            raise RuntimeError(f"rows {start}–{stop} are not whole chunks of {height} rows")
        what = f"write rows {start}–{stop - 1} of {redact(str(array.store_path))}"
        try:
            patiently(partial(array.__setitem__, slice(start, stop), values), what)
        except Exception as error:  # stores raise errors of many kinds
            raise _write_failure(what, error, columns, arrays) from None


def _write_failure(
    what: str, error: Exception, columns: dict[str, NDArray[np.float64]], arrays: dict[str, zarr.Array]
) -> StoreFailed:
    found = f"{type(error).__name__}: {redact(str(error))}"
    code = getattr(error, "errno", None)
    if code in (errno.ENOSPC, errno.EDQUOT):
        block, whole = sum(one.nbytes for one in columns.values()), sum(one.nbytes for one in arrays.values())
        found = (
            f"the disk is full ({error}). This block needs up to {block:,} bytes, the whole output up to {whole:,}. "
            "Make room and run the same line again: it goes on where it was"
        )
    failure = StoreFailed(f"cannot {what}: {found}.")
    failure.errno = code
    return failure


def kind_of(path: str | os.PathLike) -> str | None:
    """What kind of result is finished at an address; None if there is none."""
    group = _open_group(locate(path))
    attributes: Any = None if group is None else group.attrs.get(RESULT_KEY)
    return None if attributes is None else attributes.get("kind")


def open_stored(path: str | os.PathLike, kind: str) -> zarr.Group:
    """Open what was finished and stored, of the given kind, for reading.

    Raises
    ------
    InvalidData
        Nothing there, not a result, or one of a later format.
    """
    name = locate(path)
    group = _open_group(name)
    if group is None:
        what = "are no scores" if kind == "scores" else f"is not {kind}"
        raise InvalidData(f"there {what} at {redact(name)}.")
    attributes: Any = group.attrs.get(RESULT_KEY)
    if attributes is None:
        raise InvalidData(f"{redact(name)} is not a finished result of daskrr. Score again, then read it.")
    if attributes.get("kind") != kind:
        raise InvalidData(f"{redact(name)} holds {attributes.get('kind')}, not {kind}.")
    if attributes.get("format") != FORMAT:
        raise InvalidData(
            f"{redact(name)} has format {attributes.get('format')}; this version reads format {FORMAT}. Upgrade daskrr."
        )
    return group


def stored_column(group: zarr.Group, ridge: float | None) -> int:
    """Which column of a result belongs to a ridge; the smallest ridge by default."""
    attributes: Any = group.attrs[RESULT_KEY]
    return column_of(np.atleast_1d(attributes["parameters"]["ridge"]).tolist(), ridge)


def column_of(ridges: Sequence[float], ridge: float | None) -> int:
    """Which of several ridges is meant; the smallest by default.

    Raises
    ------
    InvalidParameter
        The ridge is none of those that were scored.
    """
    if ridge is not None and ridge not in ridges:
        listed = ", ".join(f"{one:g}" for one in ridges)
        raise InvalidParameter(f"ridge={ridge!r} is none of those that were scored: {listed}")
    return ridges.index(min(ridges) if ridge is None else ridge)
