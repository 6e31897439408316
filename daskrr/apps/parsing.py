"""Options of the command line as arguments of the library."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
import zarr

from daskrr import errors, kernels
from daskrr.nystrom.selection import SCHEMES


def model_arguments(model: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the options of the model that were given into arguments of the library."""
    ridges, sampling = model.get("ridge"), model["sampling"]
    if model["n_landmarks"] is None and sampling in SCHEMES and sampling != "residual":
        raise click.UsageError("only residual sampling finds the number of landmarks; give it with --landmarks")
    read: dict[str, Any] = {"sampling": None if sampling is None else _sampling(sampling)}
    if ridges is not None:
        read["ridge"] = ridges[0] if len(ridges) == 1 else list(ridges)
    return {name: value for name, value in {**model, **read}.items() if value is not None}


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
    if (kind is None) == (text is None):
        raise click.UsageError("give one of --kernel and --kernel-spec")
    if text is not None:
        if given:
            raise click.UsageError(f"{_option(next(iter(given)))} does not go with --kernel-spec")
        return kernels.from_spec(_load_spec(text), allowed)
    if allowed:
        raise click.UsageError("--allow-function goes with --kernel-spec only")
    _check_parameters(kind, given)
    if "nu" in given:
        given["nu"] = float(given["nu"])
    return kernels.from_spec({"kernel": kind, **given})


def parameters_of(kind: str) -> dict[str, dataclasses.Field]:
    """What a kernel of this kind can be given."""
    return {field.name: field for field in dataclasses.fields(kernels.KINDS[kind])}  # type: ignore[arg-type]


def _check_parameters(kind: str, given: Mapping[str, Any]) -> None:
    known = parameters_of(kind)
    takes = ", ".join(map(_option, known)) or "no parameters"
    for name in given:
        if name not in known:
            raise click.UsageError(f"{_option(name)} does not apply to the {kind} kernel, which takes {takes}")
    for name, field in known.items():
        if name not in given and field.default is dataclasses.MISSING:
            raise click.UsageError(f"the {kind} kernel needs {_option(name)}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _load_spec(text: str) -> Any:
    try:
        return json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise errors.InvalidParameter(f"cannot read the kernel spec {text!r} as JSON: {error}") from error


def _sampling(value: str) -> Any:
    """Turn the option into the name of a rule or an array of weights."""
    if value in SCHEMES:
        return value
    try:
        return np.load(value, mmap_mode="r") if value.endswith(".npy") else zarr.open_array(value, mode="r")
    except (OSError, ValueError, KeyError) as error:
        raise errors.InvalidParameter(
            f"--sampling is {', '.join(SCHEMES)}, or the path of an array; {value!r} is none of them ({error})"
        ) from error
