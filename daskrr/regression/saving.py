"""Models on storage: a Zarr group of arrays, and JSON in its attributes; nothing is pickled."""

import os
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from daskrr import __version__
from daskrr.engine.factors import Factors
from daskrr.engine.storage import RESULT_KEY, OutputStore, open_stored
from daskrr.errors import InvalidData
from daskrr.numerics.algebra import Whitening
from daskrr.numerics.regress import Solution, Sums

MODEL = "a model"
MODEL_VERSION = 2

# Of these square matrices the lower triangle is all there is, and is stored row by row.
TRIANGLES = ("inverse", "gram")

# What the attributes of a model must tell.
NEEDED = (
    "kernel", "ridge", "n_landmarks", "kernel_error", "fit_intercept", "weight_meaning", "dtype", "facts", "deviation",
    "random_state", "failure_probability", "missing_chunks", "block_rows", "effective_dimension", "n_rows",
    "n_features", "intercept", "residual_squares", "target_squares", "noise_variance", "risk_inflation",
    "feature_names",
)  # fmt: skip


def write_model(path: str | os.PathLike, overwrite: bool, factors: Factors, about: dict[str, Any]) -> None:
    """Write the factors of a regression that was solved, and what is known about it."""
    if factors.whitening is None or factors.sums is None or factors.solution is None or factors.landmarks is None:
        raise RuntimeError("only a solved regression can be stored")
    arrays: dict[str, NDArray] = vars(factors.sums) | vars(factors.solution)
    arrays |= {"landmarks": factors.landmarks, "inverse": factors.whitening.inverse}
    for name in TRIANGLES:
        arrays[name] = arrays[name][np.tril_indices(len(arrays[name]))]
    facts = {"n_landmarks": factors.n_landmarks, "kernel_error": factors.whitening.kernel_error}
    with OutputStore(path, overwrite, MODEL) as output:
        output.write(arrays)
        output.commit({"model_version": MODEL_VERSION, "daskrr": __version__} | facts | about)


def read_model(path: str | os.PathLike) -> tuple[Factors, dict[str, Any]]:
    """What :func:`write_model` wrote.

    Raises
    ------
    InvalidData
        There is no model, or one of a version that this one does not read.
    """
    group = open_stored(path, MODEL)
    about: Any = group.attrs[RESULT_KEY]
    if about.get("model_version") != MODEL_VERSION:
        raise InvalidData(
            f"the model has version {about.get('model_version')}, and this daskrr reads version {MODEL_VERSION}."
        )
    lacking = [name for name in NEEDED if name not in about]
    if lacking:
        raise InvalidData(f"the model is damaged: it does not tell its {', '.join(lacking)}.")
    rank, t = about["facts"]["rank"], about["facts"]["n_targets"]
    triangle = (rank * (rank + 1) // 2,)
    shapes = {
        "landmarks": (rank, about["n_features"]), "inverse": triangle, "gram": triangle, "features": (rank, 1 + t),
        "targets": (1 + t, 1 + t), "origin": (t,), "row_origin": (rank,), "theta": (1, rank, t), "intercepts": (1, t),
        "residual_squares": (1, t), "effective_dimensions": (1,), "target_squares": (t,),
    }  # fmt: skip
    arrays = {name: _read(group, name, shape) for name, shape in shapes.items()}
    for name in TRIANGLES:
        arrays[name] = _square(arrays[name], rank)
    unknown = float("nan")
    whitening = Whitening(np.arange(rank), arrays["inverse"], unknown, about["kernel_error"], unknown)
    sums = Sums(**{name: arrays[name] for name in Sums.__dataclass_fields__})
    factors = Factors(
        landmarks=arrays["landmarks"], n_landmarks=about["n_landmarks"], whitening=whitening, sums=sums,
        row_origin=sums.row_origin if about["fit_intercept"] else None,
    )  # fmt: skip
    factors.keep_solution(Solution(**{name: arrays[name] for name in Solution.__dataclass_fields__}))
    return factors, about


def _read(group: zarr.Group, name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    try:
        stored: Any = group[name]
        found = np.asarray(stored[...], np.float64)
    except Exception as error:  # stores and codecs raise errors of many kinds
        raise InvalidData(f"the model is damaged: {name} cannot be read, {type(error).__name__}: {error}") from None
    if found.shape != shape or not np.isfinite(found).all():
        raise InvalidData(
            f"the model is damaged: {name} has shape {found.shape} where {shape} is expected, or was not written whole."
        )
    return found


def _square(triangle: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    full = np.zeros((size, size))
    full[np.tril_indices(size)] = triangle
    return full
