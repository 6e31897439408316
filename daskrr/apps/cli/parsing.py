"""Options of the command line as arguments of the library."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from daskrr import errors, kernels
from daskrr.apps.cli.options import CERTAINTY, TOLERANCE
from daskrr.apps.cli.usage import check_kernel, check_model
from daskrr.nystrom.landmarks import check_sketch_ridge
from daskrr.nystrom.sampling import BY_NAME, Probabilities
from daskrr.nystrom.strategies import Certify, Tolerance
from daskrr.storage.trust import parse_json
from daskrr.storage.urls import excerpt, locate
from daskrr.storage.zarr_input import open_zarr


def model_arguments(model: Mapping[str, Any], is_regression: bool = False) -> dict[str, Any]:
    """Turn the options of the model that were given into arguments of the library."""
    check_model(model, is_regression)
    given = {name: value for name, value in model.items() if value is not None}
    ridges, size, certify = (given.pop(name, None) for name in ("ridge", "n_landmarks", "certify"))
    tolerance = {TOLERANCE[name]: given.pop(name) for name in TOLERANCE if name in given}
    certainty = {name: given.pop(name) for name in CERTAINTY if name in given}
    read = {
        "ridge": None if not ridges else ridges[0] if len(ridges) == 1 else list(ridges),
        "landmarks": Tolerance(**tolerance) if tolerance else size,
        "sampling": _sampling(given),
        "certify": Certify(**certainty) if certainty else certify,
    }
    return {name: value for name, value in (given | read).items() if value is not None}


def table_arguments(table: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a table that were given, as arguments of the library."""
    given = {name: value for name, value in table.items() if value is not None}
    if "columns" in given:
        given["columns"] = [column.strip() for column in given["columns"].split(",")]
    return given


def refuse_file(points: str) -> None:
    """Tell what to do about a table that is no Zarr array yet."""
    if Path(points).is_file():
        raise errors.InvalidData(f"{points} is a file, not a Zarr array: turn it into one with 'daskrr convert'")


def make_kernel(options: Mapping[str, Any]) -> kernels.Kernel:
    """Make the kernel that the options of the command line describe.

    Parameters
    ----------
    options
        Values of ``kernel``, ``kernel_spec`` and ``allow_function``, and of every parameter of a kernel, None where the
        option was not given.
    """
    kind, text, allowed = options["kernel"], options["kernel_spec"], options["allow_function"]
    extra = ("kernel", "kernel_spec", "allow_function")
    given = {name: value for name, value in options.items() if value is not None and name not in extra}
    check_kernel(options)
    if text is not None:
        return kernels.from_spec(_load_spec(text), allowed)
    if "nu" in given:
        given["nu"] = float(given["nu"])
    return kernels.from_spec({"kernel": kind, **given})


def _load_spec(text: str) -> Any:
    name = f"the kernel spec {excerpt(text)}"
    try:
        found = text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise errors.InvalidParameter(f"cannot read {name}: {error}") from error
    return parse_json(found, name)


def _sampling(given: dict[str, Any]) -> Any:
    """Take the options of sampling out, and make a strategy or an array of them; None if there are none."""
    value = given.pop("sampling", None)
    names = ("rounds", "epsilon", "replacement", "sketch_ridge")
    settings = {name: given.pop(name) for name in names if name in given}
    array = None if value is None or value in BY_NAME else _read_array(value)
    has_numbers = array is not None and array.dtype.kind != "f"
    if value in (None, "residual") or has_numbers:
        check_sketch_ridge(settings.pop("sketch_ridge", 0.0), has_probabilities=False)
    if array is None:
        return BY_NAME[value or "residual"](**settings) if value or settings else None
    return Probabilities(array, **settings) if settings and not has_numbers else array


def _read_array(path: str) -> Any:
    try:
        return np.load(path, mmap_mode="r") if path.endswith(".npy") else open_zarr(locate(path))
    except (OSError, ValueError) as error:
        raise errors.InvalidParameter(
            f"--sampling is {', '.join(BY_NAME)}, or the path of an array; {path!r} is none of them ({error})"
        ) from error
