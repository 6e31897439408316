"""What is wrong with a command line by itself: told at once, since nothing but click is loaded to find it."""

from collections.abc import Mapping
from typing import Any

import click

from daskrr.apps.cli.options import CERTAINTY, KERNELS, LEARN, SAMPLINGS, TOLERANCE

_ABOUT_SPECS = ("kernel", "kernel_spec", "allow_function")


def check(options: Mapping[str, Any]) -> None:
    """Look at the groups of options that several commands have."""
    search = options.get("search")
    if search is not None:
        candidates(options["kernel"], search["length_scales"])
    elif "kernel" in options:
        check_kernel(options["kernel"])
    if "model" in options:
        check_model(options["model"], is_regression="regression" in options)
    if search is not None and search["ridges"] is not None:
        numbers("--ridges", search["ridges"])


def fill_in_kernel(options: Mapping[str, Any]) -> None:
    """Where no kernel is given at all, take a Gaussian, of the median distance if no length scale is given either."""
    kernel = options.get("kernel")
    if kernel is None or "search" in options or kernel["kernel"] is not None or kernel["kernel_spec"] is not None:
        return
    if all(value is None for name, value in kernel.items() if name not in (*_ABOUT_SPECS, "length_scale")):
        kernel["kernel"] = "gaussian"
        kernel["length_scale"] = "median" if kernel["length_scale"] is None else kernel["length_scale"]


def check_kernel(options: Mapping[str, Any]) -> None:
    """Refuse options that describe no kernel, or one and something else."""
    kind, spec = options["kernel"], options["kernel_spec"]
    given = [name for name, value in options.items() if value is not None and name not in _ABOUT_SPECS]
    if (kind is None) == (spec is None):
        raise click.UsageError("give one of --kernel and --kernel-spec")
    if spec is not None and given:
        raise click.UsageError(f"{_option(given[0])} does not go with --kernel-spec")
    if kind is not None:
        if options["allow_function"]:
            raise click.UsageError("--allow-function goes with --kernel-spec only")
        _check_parameters(kind, given)


def _check_parameters(kind: str, given: list[str]) -> None:
    known = KERNELS[kind]
    takes = ", ".join(map(_option, known)) or "no parameters"
    for name in given:
        if name not in known:
            raise click.UsageError(f"{_option(name)} does not apply to the {kind} kernel, which takes {takes}")
    for name, needed in known.items():
        if needed and name not in given:
            advice = ": a number, or median for that of the data" if name == "length_scale" else ""
            raise click.UsageError(f"the {kind} kernel needs {_option(name)}{advice}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_model(model: Mapping[str, Any], is_regression: bool = False) -> None:
    """Refuse options of the model that contradict each other; a regression has one ridge, and is certified."""
    given = [name for name, value in model.items() if value is not None]
    tolerances = [name for name in given if name in TOLERANCE]
    if "n_landmarks" in given and tolerances:
        raise click.UsageError(
            f"--landmarks is a number, and {_option(tolerances[0])} is there to find it; leave one out"
        )
    if "n_landmarks" not in given and model["sampling"] in SAMPLINGS and model["sampling"] != "residual":
        raise click.UsageError("only residual sampling finds the number of landmarks; give it with --landmarks")
    _check_sampling(model["sampling"], given)
    grows = "n_landmarks" not in given and model["sampling"] in (None, "residual")
    if grows and "rounds" in given:
        raise click.UsageError("--rounds goes with --landmarks: a tolerance has as many rounds as it needs")
    if not (is_regression or grows or "certify" in given):
        for name in given:
            if name in CERTAINTY:
                raise click.UsageError(f"{_option(name)} goes with --certify or with a tolerance")
    if is_regression and len(model.get("ridge", ())) > 1:
        raise click.UsageError("a model has one --ridge")


def _check_sampling(sampling: str | None, given: list[str]) -> None:
    kind = sampling or "residual"
    known = SAMPLINGS.get(kind, ("replacement", "sketch_ridge"))
    for name in ("rounds", "epsilon"):
        if name in given and name not in known:
            words = f"{kind} sampling" if kind in SAMPLINGS else "a given array"
            raise click.UsageError(
                f"{_option(name)} does not apply to {words}, which takes {', '.join(map(_option, known))}"
            )


def candidates(kernel: Mapping[str, Any], length_scales: str | None) -> list[dict[str, Any]] | None:
    """The options of every kernel to choose from; None for the library's own, Gaussians about the median distance."""
    if kernel["kernel"] is None and kernel["kernel_spec"] is None:
        kernel = {**kernel, "kernel": "gaussian"}
    given = [name for name, value in kernel.items() if value and name != "kernel"]
    if length_scales == LEARN:
        kernels = [{**kernel, "length_scale": LEARN}]
    elif length_scales is not None:
        kernels = [{**kernel, "length_scale": scale} for scale in numbers("--length-scales", length_scales)]
    elif kernel["kernel"] == "gaussian" and not given:
        return None
    elif "length_scale" in KERNELS.get(kernel["kernel"], ()):
        raise click.UsageError(f"the {kernel['kernel']} kernel needs --length-scales, such as 0.5:8:5 or 1,2,4")
    else:
        kernels = [dict(kernel)]
    for one in kernels:
        check_kernel(one)
    return kernels


def numbers(option: str, text: str) -> list[float]:
    """Read FROM:TO:COUNT, whose ratios are equal, or numbers with commas between."""
    try:
        if ":" not in text:
            return [float(part) for part in text.split(",")]
        first, last, count = (kind(part) for kind, part in zip((float, float, int), text.split(":"), strict=True))
        if count < 1 or not (0 < first < float("inf") and 0 < last < float("inf")):
            raise ValueError
    except ValueError:
        raise click.UsageError(
            f"{option} must be FROM:TO:COUNT with positive numbers, or numbers with commas between, not {text!r}"
        ) from None
    shares = [step / (count - 1) for step in range(1, count - 1)]
    return [first, *(first ** (1 - share) * last**share for share in shares), last][:count]
