"""What makes two jobs the same, and two inputs."""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from daskrr.kernels.weighted import unweighted
from daskrr.leverage.problem import Problem
from daskrr.nystrom.sampling import Probabilities, RowNumbers, Sampling
from daskrr.nystrom.strategies import from_plain, is_strategy, plain
from daskrr.runtime.rows import ConstantRows, JoinedRows, NumpyRows, Rows, ZarrRows
from daskrr.storage.zarr_arrays import checksum, listing


def parameters_of(problem: Problem) -> dict[str, Any]:
    """What makes two jobs the same, ready for JSON: the kernel, the ridges, every option, and the input."""
    settings, landmarks = problem.settings, problem.landmarks
    parameters = {
        "kernel": unweighted(settings.kernel).to_spec(),
        "ridges": list(settings.ridges),
        "single": settings.single,
        "landmarks": plain(landmarks) if is_strategy(landmarks) else landmarks,
        "options": {
            "sampling": _described_sampling(problem.sampling),
            "certify": False if problem.certify is None else plain(problem.certify),
            "random_state": problem.random_state,
            "dtype": str(settings.dtype),
            "missing_chunks": problem.missing_chunks,
            "block_rows": problem.block_rows,
            "sample_weight": None if problem.weights is None else _described_rows(problem.weights),
        },
        "input": described_input(problem.rows),
    }
    return json.loads(json.dumps(parameters, default=lambda number: number.item()))


def options_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a job that :func:`parameters_of` has recorded, but for arrays, of which it knows no more."""
    options = parameters["options"]
    read = {name: from_plain(options[name]) if options[name] else False for name in ("sampling", "certify")}
    landmarks = parameters["landmarks"]
    return options | read | {"landmarks": from_plain(landmarks) if isinstance(landmarks, dict) else landmarks}


def _described_sampling(sampling: Sampling) -> dict[str, Any]:
    if isinstance(sampling, Probabilities):
        return plain(sampling) | {"values": _described_rows(sampling.values)}
    return plain(sampling) | ({"values": checksum(sampling.values)} if isinstance(sampling, RowNumbers) else {})


def _described_rows(rows: Rows) -> dict[str, Any]:
    return {"origin": rows.origin, "fingerprint": fingerprint(rows)}


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
    return f"scores that differ in {', '.join(_differing(_by_name(known), _by_name(wanted)))}"


def _by_name(parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters by the names of the arguments."""
    given = {name: value for name, value in parameters.items() if name not in ("options", "ridges", "single")}
    ridges = parameters["ridges"]
    return given | parameters["options"] | {"ridge": ridges[0] if parameters["single"] else ridges}


def _differing(known: dict[str, Any], wanted: dict[str, Any]) -> Iterator[str]:
    """The names of what differs, with both values where these are numbers."""
    for name, now in wanted.items():
        before = known.get(name)
        if before != now:
            plain = all(isinstance(one, int | float | list) for one in (before, now))
            yield f"{name} ({before}, not {now})" if plain else name
