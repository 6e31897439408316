"""What was published as a table again: one line for every row, with what identifies it."""

import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import zarr
from numpy.typing import NDArray

from daskrr.errors import InvalidData, InvalidParameter, OutputExists
from daskrr.jobs.fingerprint import fingerprint
from daskrr.jobs.reader import ScoreStore, open_scores
from daskrr.jobs.row_sample import SAMPLE
from daskrr.jobs.row_values import RowValues
from daskrr.leverage.tabulated import ORDER, named_by_ridge
from daskrr.regression.persistence import PREDICTIONS
from daskrr.runtime.progress import Reporter, Stage, reporter
from daskrr.runtime.rows import open_rows
from daskrr.storage.output import Output
from daskrr.storage.saving import kind_of

log = logging.getLogger("daskrr")
ROWS_AT_ONCE = 2**18
WRITERS = {".parquet": pyarrow.parquet.ParquetWriter, ".csv": pyarrow.csv.CSVWriter}


@dataclass(frozen=True)
class PublishedRows:
    """Arrays of n rows that were published, by the names of their columns, and the points that they are about.

    ``places`` are the numbers of these rows among the points, where they are not all of them in order; ``fingerprint``
    is that of the points then, where it was kept.
    """

    arrays: Mapping[str, zarr.Array]
    ridges: list[float]
    origin: str
    places: zarr.Array | None = None
    fingerprint: str | None = None

    @classmethod
    def of_scores(cls, store: ScoreStore) -> "PublishedRows":
        """Scores and their ends."""
        ridges = np.atleast_1d(store.summary["parameters"]["ridge"]).tolist()
        arrays = {name: store[name] for name in ORDER if name in set(store.keys())}
        known = None if store.source is None else store.source["fingerprint"]
        return cls(arrays, ridges, store.summary["parameters"]["input"], fingerprint=known)

    @classmethod
    def at(cls, path: str | os.PathLike) -> "PublishedRows":
        """What a path holds: scores, predictions or a sample.

        Raises
        ------
        InvalidData
            It holds something else, or nothing.
        """
        kind = kind_of(path)
        if kind not in (PREDICTIONS, SAMPLE):
            return cls.of_scores(open_scores(path))
        group, manifest = Output(path).open(kind)
        names = ("predictions", "standard_errors") if kind == PREDICTIONS else ("weights", "probabilities")
        arrays: Any = dict(group.arrays())
        places = arrays["indices"] if kind == SAMPLE else None
        known = {name: arrays[name] for name in names if name in arrays}
        return cls(known, [], manifest["summary"]["input"], places)

    @property
    def n_rows(self) -> int:
        """How many."""
        return next(iter(self.arrays.values())).shape[0]

    def rows(self, start: int, stop: int) -> NDArray[np.int64]:
        """Which of the points some rows are."""
        return np.arange(start, stop) if self.places is None else np.asarray(self.places[start:stop])

    def columns(self, start: int, stop: int) -> dict[str, NDArray[Any]]:
        """What is known of some rows, by name."""
        found: dict[str, NDArray[Any]] = {}
        for name, array in self.arrays.items():
            values = np.asarray(array[start:stop])
            names = named_by_ridge(name, values, self.ridges) if self.ridges else _numbered(name, values)
            found |= dict(zip(names, values.reshape(len(values), -1).T, strict=True))
        return found


def _numbered(name: str, values: NDArray[Any]) -> list[str]:
    """Names of the columns of several targets."""
    return [name] if values.ndim == 1 else [f"{name} of target {number}" for number in range(values.shape[1])]


def export_scores(
    scores: str | os.PathLike | ScoreStore,
    target: str | os.PathLike,
    *,
    points: str | os.PathLike | None = None,
    values: bool = False,
    overwrite: bool = False,
    progress: Reporter | bool | None = None,
) -> dict[str, Any]:
    """Write scores, predictions or a sample as a Parquet or CSV file: row, identifier, and what is known of it.

    Rows come in the order in which they were scored; ``row`` is the number that each has in the table that it came
    from. With several ridges, names of columns end with theirs. Nothing is at ``target`` before it is whole.

    Parameters
    ----------
    points
        The rows that were scored; where they were then by default. Without them there are no identifiers.
    values
        Whether the values of every row are written too.
    overwrite
        Replace a file that is there.

    Raises
    ------
    InvalidParameter
        The name ends neither in ``.parquet`` nor in ``.csv``.
    OutputExists
        The file exists.
    InvalidData
        The points are not those that were scored.
    """
    path, began = Path(target), time.perf_counter()
    if path.suffix.lower() not in WRITERS:
        raise InvalidParameter(f"cannot write {path}: the name must end in {' or '.join(WRITERS)}")
    if path.exists() and not overwrite:
        raise OutputExists(f"{path} exists. Pass overwrite=True (--overwrite) to replace it, or name another target.")
    found = PublishedRows.of_scores(scores) if isinstance(scores, ScoreStore) else PublishedRows.at(scores)
    rows = known_points(found, points, needed=points is not None or values)
    partial = path.with_name(f"{path.name}.partial-{secrets.token_hex(4)}")
    names: list[str] = []
    try:
        with reporter(progress) as report, Stage(report, "export", *_size(found)) as stage:
            for number, table in enumerate(_tables(found, rows, values)):
                if not number:
                    names, writer = table.column_names, WRITERS[path.suffix.lower()](str(partial), table.schema)
                writer.write_table(table)
                stage.advance(rows=table.num_rows)
            writer.close()
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return {"target": str(path), "rows": found.n_rows, "columns": names, "seconds": time.perf_counter() - began}


def _size(found: PublishedRows) -> tuple[int, int]:
    return -(-found.n_rows // ROWS_AT_ONCE), found.n_rows


def points_of(store: ScoreStore, points: Any, needed: bool) -> RowValues | None:
    """The rows that were scored; None if they cannot be read and are not ``needed``."""
    return known_points(PublishedRows.of_scores(store), points, needed)


def known_points(found: PublishedRows, points: Any, needed: bool) -> RowValues | None:
    """The points that something is about; None if they cannot be read and are not ``needed``."""
    origin = found.origin if points is None else points
    try:
        known = RowValues.at(origin)
        if found.places is None and known.points.shape[0] < found.n_rows:
            raise InvalidData(
                f"{origin} has {known.points.shape[0]} rows, and {found.n_rows} were scored; name those that were"
            )
    except InvalidData:
        if needed:
            raise
        return None
    if origin == found.origin and known.points.shape[0] == found.n_rows:
        _warn_of_change(found, known)
    return known


def _warn_of_change(found: PublishedRows, known: RowValues) -> None:
    # Of rows with weights, theirs comes first.
    before = None if found.fingerprint is None else found.fingerprint.partition(" and ")[0]
    # Nothing is read of them: chunks that were never written did not keep them from being scored.
    if before is not None and fingerprint(open_rows(known.points, missing_chunks="fill")) != before:
        log.warning(
            "%s was written to after it was scored: values that are shown or joined with the scores may not be those "
            "that were scored", found.origin,
        )  # fmt: skip


def _tables(found: PublishedRows, rows: RowValues | None, values: bool) -> Iterator[Any]:
    for start in range(0, found.n_rows, ROWS_AT_ONCE):
        stop = min(start + ROWS_AT_ONCE, found.n_rows)
        places = found.rows(start, stop)
        about: dict[str, Any] = {"row": places if rows is None else rows.table_rows(places)}
        ids = None if rows is None else rows.identifiers(places)
        about |= ({} if ids is None else {"id": ids}) | found.columns(start, stop)
        more = rows.columns(places) if values and rows is not None else {}
        yield pa.table(about | {(name if name not in about else f"{name} (value)"): one for name, one in more.items()})
