"""Sketches on storage: a Zarr group of arrays, and JSON in its attributes; nothing is pickled.

A sketch is stored by itself, or as the group ``sketch`` of the scores that it belongs to. The attributes hold a
checksum of every array and one of themselves, so that what is read is what was written, or an error.
"""

import json
import os
import zlib
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from daskrr import __version__
from daskrr.errors import InvalidData
from daskrr.numerics.factorize import RidgeFactor
from daskrr.numerics.panels import packed_lower, unpacked_lower
from daskrr.numerics.whitening import Whitening
from daskrr.nystrom.factors import Factors, ProbeRows, TileFactors
from daskrr.storage.output import FORMAT, RESULT_KEY, Output, is_begun
from daskrr.storage.saving import kind_of
from daskrr.storage.urls import locate, redact
from daskrr.storage.zarr_arrays import checksum

SKETCH = "a sketch"
SKETCH_VERSION = 1
PROBE_ARRAYS = ("X", "coefficients", "rows", "weights")

Arrays = dict[str, NDArray]


def packed(payload: TileFactors) -> tuple[Arrays, dict[str, Any]]:
    """Arrays and numbers of what scores new rows."""
    inverse, ridge = payload.factors
    arrays = {"landmarks": payload.landmarks, "inverse": packed_lower(inverse)}
    facts = {"n_landmarks": payload.n_landmarks, "kernel_error": payload.kernel_error}
    if payload.eigenvalues is None:
        arrays |= {"ridge": packed_lower(ridge)}
    else:
        arrays |= {"ridge": ridge, "eigenvalues": payload.eigenvalues}
    if payload.leading is not None:
        arrays["leading"], arrays["leading_eigenvalues"], facts["largest_left"] = payload.leading
    if payload.subset:
        arrays["subset"] = np.stack([packed_lower(one) for one in payload.subset])
    if payload.probe is not None:
        facts["probe_scale"] = payload.probe.scale
        arrays |= {f"probe_{name}": getattr(payload.probe, name) for name in PROBE_ARRAYS}
    return arrays, facts


def unpacked(arrays: Arrays, facts: dict[str, Any]) -> Factors:
    """Factors of which what :func:`packed` was given can be picked."""
    rank, unknown, nothing = len(arrays["landmarks"]), float("nan"), np.empty(0)
    inverse = unpacked_lower(arrays["inverse"])
    single = "eigenvalues" not in arrays
    leading = None
    if "leading" in arrays:
        leading = arrays["leading"], arrays["leading_eigenvalues"], facts["largest_left"]
    probe = None
    if "probe_scale" in facts:
        probe = ProbeRows(**{name: arrays[f"probe_{name}"] for name in PROBE_ARRAYS}, scale=facts["probe_scale"])
    return Factors(
        landmarks=arrays["landmarks"],
        n_landmarks=facts["n_landmarks"],
        whitening=Whitening(np.arange(rank), inverse, unknown, facts["kernel_error"], unknown),
        ridge=RidgeFactor(
            inverse=unpacked_lower(arrays["ridge"]) if single else arrays["ridge"],
            combined=None,
            eigenvalues=arrays.get("eigenvalues"),
            leading=leading,
            spectrum=None,
            effective_dimensions=nothing,
            score_errors=nothing,
            gram_norm=unknown,
            gram_error=unknown,
        ),
        subset=tuple(unpacked_lower(one) for one in arrays.get("subset", ())),
        probe=probe,
    )


def sealed(arrays: Arrays, about: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a stored sketch: what is known of it, and checksums."""
    stored = {name: {"shape": list(values.shape), "crc32": checksum(values)} for name, values in arrays.items()}
    found = {"sketch_version": SKETCH_VERSION, "daskrr": __version__, "arrays": stored} | about
    return found | {"crc32": _signature(found)}


def read_sealed(group: zarr.Group, name: str) -> tuple[Arrays, dict[str, Any]]:
    """Arrays and attributes of a stored sketch, which the caller knows by its ``name``.

    Raises
    ------
    InvalidData
        It is of another version, or is not what was written.
    """
    told: Any = group.attrs.get(RESULT_KEY) or {}
    facts = {key: value for key, value in told.items() if key not in ("format", "kind", "generation")}
    if (told.get("format"), facts.get("sketch_version")) != (FORMAT, SKETCH_VERSION):
        raise InvalidData(
            f"the sketch at {name} has version {facts.get('sketch_version')}, and this daskrr reads version "
            f"{SKETCH_VERSION}."
        )
    if facts.pop("crc32", None) != _signature(facts):
        raise InvalidData(f"the sketch at {name} is damaged: its attributes are not what was written.")
    return {key: _read(group, key, one, name) for key, one in facts["arrays"].items()}, facts


def _signature(about: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())


def _read(group: zarr.Group, key: str, told: dict[str, Any], name: str) -> NDArray:
    try:
        stored: Any = group[key]
        values = np.ascontiguousarray(stored[...])
    except InvalidData:  # it is exchanged for another
        raise
    except Exception as error:  # stores and codecs raise errors of many kinds
        raise InvalidData(
            f"the sketch at {name} is damaged: {key} cannot be read, {type(error).__name__}: {error}"
        ) from None
    if list(values.shape) != told["shape"] or checksum(values) != told["crc32"]:
        raise InvalidData(
            f"the sketch at {name} is damaged: {key}, of shape {values.shape}, is not the array of shape "
            f"{tuple(told['shape'])} that was written."
        )
    return values


def read_stored(path: str | os.PathLike) -> tuple[Any, dict[str, Any]]:
    """The group and the facts of a sketch that was saved, or that stored scores carry.

    Raises
    ------
    InvalidData
        There is none, scores are not finished, or the sketch is damaged.
    """
    name, kind = redact(locate(path)), kind_of(path)
    if kind == SKETCH:
        return read_sealed(Output(path).open(SKETCH)[0], name)
    if kind is None and not is_begun(path):
        raise InvalidData(f"there is no model, no sketch and no scores at {name}.")
    group = Output(path).open("scores")[0]
    if "sketch" not in group:
        raise InvalidData(f"the scores at {name} carry no sketch. Score again to have it.")
    found: Any = group["sketch"]
    return read_sealed(found, name)
