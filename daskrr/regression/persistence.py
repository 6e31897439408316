"""Models on storage: a Zarr group of arrays, and JSON in its attributes; nothing is pickled."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dask.array as da
import numpy as np
import zarr
from numpy.typing import NDArray

from daskrr import __version__
from daskrr.errors import InvalidData
from daskrr.kernels import Kernel, as_kernel, from_spec
from daskrr.numerics.panels import packed_lower, unpacked_lower
from daskrr.numerics.ridge import Solution, Sums
from daskrr.numerics.whitening import Whitening
from daskrr.nystrom.strategies import from_plain, is_strategy, plain
from daskrr.regression.factors import FitFactors, with_solution
from daskrr.storage.output import Output
from daskrr.storage.saving import Saving

# What is saved, by name.
MODEL, PREDICTIONS = "a model", "predictions"
MODEL_VERSION = 3

# Of these square matrices the lower triangle is all there is, and is stored row by row.
TRIANGLES = ("inverse", "gram")

# Arrays of the sums.
SUMMED = ("gram", "features", "targets", "origin", "row_origin")

# What the attributes of a model must tell.
MORE = ("parameters", "found", "around")
NEEDED = (
    "estimator", *MORE, "kernel", "ridge", "n_landmarks", "kernel_error", "height", "facts", "deviation",
    "effective_dimension", "n_rows", "n_features", "intercept", "residual_squares", "target_squares", "noise_variance",
    "risk_inflation", "feature_names", "features",
)  # fmt: skip


def pack(value: Any, name: str, arrays: dict[str, NDArray]) -> Any:
    """A value as JSON knows it; kernels, strategies, dtypes, tuples leave a note of what they are; arrays go aside.

    Lazy arrays are computed: what comes back is a NumPy array of the same values.
    """
    if isinstance(value, (np.ndarray, da.Array, zarr.Array)) and value.ndim:
        arrays[name] = np.asarray(value)
        return {"$array": name}
    if isinstance(value, (np.ndarray, np.generic)):
        return value.item()
    if isinstance(value, (np.dtype, type)):
        return {"$dtype": np.dtype(value).name}
    if isinstance(value, Kernel):
        return {"$kernel": value.to_spec()}
    if is_strategy(value):
        return {"$strategy": pack(plain(value), name, arrays)}
    if isinstance(value, Mapping) and not all(isinstance(key, str) for key in value):
        return {"$pairs": pack([[*pair] for pair in value.items()], name, arrays)}
    if isinstance(value, Mapping):
        return {key: pack(one, f"{name}_{key}", arrays) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        packed = [pack(one, f"{name}_{number}", arrays) for number, one in enumerate(value)]
        return packed if isinstance(value, list) else {"$tuple": packed}
    return {"$function": as_kernel(value).to_spec()} if callable(value) else value


def unpack(value: Any, read: Callable[[str], NDArray], allow_functions: Sequence[str]) -> Any:
    """What :func:`pack` was given; ``read`` finds an array by its name."""
    if isinstance(value, list):
        return [unpack(item, read, allow_functions) for item in value]
    if not isinstance(value, dict):
        return value
    makers: dict[str, Callable[[Any], Any]] = {
        "$array": read,
        "$dtype": np.dtype,
        "$kernel": lambda spec: from_spec(spec, allow_functions),
        "$function": lambda spec: from_spec(spec, allow_functions).function,  # type: ignore[attr-defined]
        "$strategy": lambda record: from_plain(unpack(record, read, allow_functions)),
        "$pairs": lambda items: dict(unpack(items, read, allow_functions)),
        "$tuple": lambda items: tuple(unpack(items, read, allow_functions)),
    }
    for note, make in makers.items():
        if note in value:
            return make(value[note])
    return {key: unpack(item, read, allow_functions) for key, item in value.items()}


def write_model(
    path: str | os.PathLike, overwrite: bool, factors: FitFactors, summary: dict[str, Any], more: Mapping[str, Any]
) -> None:
    """Write the factors of a regression that was solved, and what is known about it; ``more`` of any kind."""
    if factors.solution is None:
        raise RuntimeError("only a solved regression can be stored")
    arrays: dict[str, NDArray] = {name: getattr(factors.sums, name) for name in SUMMED} | vars(factors.solution)
    arrays |= {"landmarks": factors.landmarks, "inverse": factors.whitening.inverse}
    for name in TRIANGLES:
        arrays[name] = packed_lower(arrays[name])
    facts = {
        "n_landmarks": factors.n_landmarks,
        "kernel_error": factors.whitening.kernel_error,
        "height": factors.sums.height,
    }
    packed = {name: pack(value, name, arrays) for name, value in more.items()}
    with Saving(path, overwrite, MODEL) as output:
        output.write(arrays)
        output.commit({"model_version": MODEL_VERSION, "daskrr": __version__} | facts | summary | packed)


def read_model(path: str | os.PathLike, allow_functions: Sequence[str] = ()) -> tuple[FitFactors, dict[str, Any]]:
    """What :func:`write_model` wrote; kernels may import functions of these names.

    Raises
    ------
    InvalidData
        There is no model, or one of a version that this one does not read.
    """
    group, manifest = Output(path).open(MODEL)
    summary = manifest["summary"]
    if summary.get("model_version") != MODEL_VERSION:
        raise InvalidData(
            f"the model has version {summary.get('model_version')}, and this daskrr reads version {MODEL_VERSION}."
        )
    lacking = [name for name in NEEDED if name not in summary]
    if lacking:
        raise InvalidData(f"the model is damaged: it does not tell its {', '.join(lacking)}.")
    rank, t = summary["facts"]["rank"], summary["facts"]["n_targets"]
    triangle = (rank * (rank + 1) // 2,)
    shapes = {
        "landmarks": (rank, summary["n_features"]), "inverse": triangle, "gram": triangle, "features": (rank, 1 + t),
        "targets": (1 + t, 1 + t), "origin": (t,), "row_origin": (rank,), "theta": (1, rank, t), "intercepts": (1, t),
        "residual_squares": (1, t), "effective_dimensions": (1,), "target_squares": (t,),
    }  # fmt: skip
    arrays = {name: _read(group, name, shape) for name, shape in shapes.items()}
    for name in TRIANGLES:
        arrays[name] = unpacked_lower(arrays[name])
    more = {name: unpack(summary[name], lambda array: _stored(group, array), allow_functions) for name in MORE}
    unknown = float("nan")
    whitening = Whitening(np.arange(rank), arrays["inverse"], unknown, summary["kernel_error"], unknown)
    sums = Sums(**{name: arrays[name] for name in SUMMED}, height=summary["height"])
    factors = FitFactors(
        landmarks=arrays["landmarks"], n_landmarks=summary["n_landmarks"], whitening=whitening, sums=sums,
        row_origin=sums.row_origin if more["parameters"]["fit_intercept"] else None,
    )  # fmt: skip
    factors = with_solution(factors, Solution(**{name: arrays[name] for name in Solution.__dataclass_fields__}))
    summary["kernel"] = from_spec(summary["kernel"], allow_functions)
    return factors, summary | more


def _stored(group: zarr.Group, name: str) -> NDArray:
    try:
        stored: Any = group[name]
        return np.asarray(stored[...])
    except Exception as error:  # stores and codecs raise errors of many kinds
        raise InvalidData(f"the model is damaged: {name} cannot be read, {type(error).__name__}: {error}") from None


def _read(group: zarr.Group, name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    array = _stored(group, name).astype(np.float64)
    if array.shape != shape or not np.isfinite(array).all():
        raise InvalidData(
            f"the model is damaged: {name} has shape {array.shape} where {shape} is expected, or was not written whole."
        )
    return array
