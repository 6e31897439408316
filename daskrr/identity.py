"""What makes two jobs the same, and two inputs."""

import json
import zlib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from daskrr.arguments import Job, Options
from daskrr.engine.places import listing
from daskrr.engine.rows import ConstantRows, JoinedRows, NumpyRows, Rows, ZarrRows
from daskrr.engine.storage import checksum
from daskrr.kernels.weighted import unweighted


def parameters_of(job: Job, options: Options) -> dict[str, Any]:
    """What makes two jobs the same, ready for JSON: the kernel, the ridges, every option, and the input."""
    given = {one.name: getattr(options, one.name) for one in fields(options)}
    given["sampling"] = _described(job.scheme.sampling)
    given["dtype"] = str(job.settings.dtype)
    given["sample_weight"] = None if job.weights is None else _described(job.weights)
    found = {
        "kernel": unweighted(job.settings.kernel).to_spec(),
        "ridges": list(job.settings.ridges),
        "single": job.settings.single,
        "n_landmarks": job.scheme.size if job.target is None else None,
        "options": given,
        "input": described_input(job.rows),
    }
    return json.loads(json.dumps(found, default=lambda number: number.item()))


def _described(sampling: Any) -> Any:
    if isinstance(sampling, str):
        return sampling
    if isinstance(sampling, Rows):
        return {"origin": sampling.origin, "fingerprint": fingerprint(sampling)}
    return {"indices": checksum(sampling)}


def described_input(rows: Rows) -> dict[str, Any]:
    """Where the rows are, how many there are, and what changes if they do."""
    about = rows.rows if isinstance(rows, JoinedRows) else rows
    shape, dtype = list(about.shape), str(about.dtype)
    return {"origin": rows.origin, "shape": shape, "dtype": dtype, "fingerprint": fingerprint(rows)}


def fingerprint(rows: Rows) -> str | None:
    """What changes if the rows do: names, sizes and times of stored chunks, or a checksum; None if nothing tells."""
    if isinstance(rows, JoinedRows):
        both = fingerprint(rows.rows), fingerprint(rows.column)
        return None if None in both else " and ".join(map(str, both))
    if isinstance(rows, ConstantRows):
        return f"{rows.n_rows} times {rows.value}"
    if isinstance(rows, NumpyRows):
        return f"crc32 {checksum(rows.array):08x}"
    found = listing(rows.array.store, rows.array.path) if isinstance(rows, ZarrRows) else None
    return None if found is None else f"chunks {_crc(f'{key} {about}' for key, about in sorted(found.items())):08x}"


def _crc(lines: Iterable[str]) -> int:
    found = 0
    for line in lines:
        found = zlib.crc32(line.encode(), found)
    return found


def is_same(known: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether two jobs are certainly the same."""
    return known == wanted and wanted["input"]["fingerprint"] is not None


def has_grown(known: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether the second is the first job on the same input with more rows."""
    before, now = known["input"], wanted["input"]
    same = {**known, "input": None} == {**wanted, "input": None} and before["origin"] == now["origin"]
    # Scores of new rows by a sketch are not brought up to date: each is for itself.
    return same and now["shape"][0] > before["shape"][0] and "sketch" not in wanted


def difference(known: dict[str, Any], wanted: dict[str, Any]) -> str:
    """What differs, in words."""
    before, now = known["input"], wanted["input"]
    if has_grown(known, wanted):
        return f"scores of {before['shape'][0]} rows of {now['origin']}, which has {now['shape'][0]} now"
    if {**known, "input": None} == {**wanted, "input": None} and before["origin"] == now["origin"]:
        return f"scores of {before['origin']} as it was, and it has changed since"
    names = [name for name in wanted if known.get(name) != wanted[name]]
    return f"scores with another {', '.join(names) or 'input that cannot be told from this one'}"
