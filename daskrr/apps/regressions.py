"""What the commands of kernel ridge regression do."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import click
import numpy as np

from daskrr import kernels
from daskrr.apps import clusters, wording
from daskrr.apps.parsing import make_kernel, model_arguments, parameters_of, refuse_file
from daskrr.apps.telling import emit, silence, told
from daskrr.engine.storage import OutputStore
from daskrr.regression.loading import load
from daskrr.regression.model import PREDICTIONS
from daskrr.regression.ridge import NystromKernelRidge
from daskrr.regression.saving import MODEL
from daskrr.regression.selection import NystromKernelRidgeCV


def fit(
    points: str,
    targets: str,
    model_path: str,
    kernel: Mapping[str, Any],
    model: Mapping[str, Any],
    cluster: Mapping[str, Any],
    weights: str | None,
    weight_meaning: str,
    intercept: bool,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run ``daskrr fit``."""
    if len(model["ridge"]) > 1:
        raise click.UsageError("a model has one --ridge")
    arguments = {"certify": True} | model_arguments(model)
    estimator = NystromKernelRidge(
        make_kernel(kernel), fit_intercept=intercept, weight_meaning=weight_meaning, progress=not quiet, **arguments
    )  # fmt: skip
    summary = _fitted(estimator, (points, targets, weights), model_path, cluster, overwrite, quiet)
    emit(summary, as_json, wording.model)


def _fitted(
    estimator: NystromKernelRidge | NystromKernelRidgeCV,
    data: tuple[str, str, str | None],
    model_path: str,
    cluster: Mapping[str, Any],
    overwrite: bool,
    quiet: bool,
) -> dict[str, Any]:
    """Fit a model to rows, targets and weights, and write it."""
    for path in data:
        if path is not None:
            refuse_file(path)
    # Mistakes should be told before a cluster is started for them.
    estimator.check(*data)
    OutputStore(model_path, overwrite, MODEL)
    began = time.perf_counter()
    with told(quiet), clusters.connect(**cluster, echo=silence if quiet else None):
        estimator.fit(*data)
        estimator.save(model_path, overwrite=overwrite)
    return estimator.summary() | {"seconds": time.perf_counter() - began, "output": model_path}


def select(
    points: str,
    targets: str,
    model_path: str,
    kernel: Mapping[str, Any],
    length_scales: str | None,
    ridges: str | None,
    scoring: str,
    folds: int,
    model: Mapping[str, Any],
    cluster: Mapping[str, Any],
    weights: str | None,
    weight_meaning: str,
    intercept: bool,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run ``daskrr select``."""
    arguments = {"certify": True} | model_arguments(model)
    estimator = NystromKernelRidgeCV(
        _candidates(kernel, length_scales), None if ridges is None else _numbers("--ridges", ridges), scoring=scoring,
        folds=folds, fit_intercept=intercept, weight_meaning=weight_meaning, progress=not quiet, **arguments,
    )  # fmt: skip
    summary = _fitted(estimator, (points, targets, weights), model_path, cluster, overwrite, quiet)
    emit(summary, as_json, wording.selection)


def _candidates(kernel: Mapping[str, Any], length_scales: str | None) -> list[kernels.Kernel] | None:
    """The kernels to choose from; None for the library's own, Gaussians about the median distance."""
    if kernel["kernel"] is None and kernel["kernel_spec"] is None:
        kernel = {**kernel, "kernel": "gaussian"}
    if length_scales is not None:
        scales = _numbers("--length-scales", length_scales)
        return [make_kernel({**kernel, "length_scale": scale}) for scale in scales]
    given = [name for name, value in kernel.items() if value and name != "kernel"]
    if kernel["kernel"] == "gaussian" and not given:
        return None
    if kernel["kernel"] is not None and "length_scale" in parameters_of(kernel["kernel"]):
        raise click.UsageError(f"the {kernel['kernel']} kernel needs --length-scales")
    return [make_kernel(kernel)]


def _numbers(option: str, text: str) -> list[float]:
    """Read FROM:TO:COUNT, whose ratios are equal, or numbers with commas between."""
    try:
        if ":" in text:
            first, last, count = text.split(":")
            if int(count) < 1 or not (0 < float(first) < np.inf and 0 < float(last) < np.inf):
                raise ValueError
            return np.geomspace(float(first), float(last), int(count)).tolist()
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise click.UsageError(
            f"{option} must be FROM:TO:COUNT with positive numbers, or numbers with commas between, not {text!r}"
        ) from None


def predict(
    model_path: str,
    points: str,
    output: str,
    allow_function: Sequence[str],
    std: bool,
    missing_chunks: str | None,
    cluster: Mapping[str, Any],
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run ``daskrr predict``."""
    refuse_file(points)
    model = load(model_path, allow_function)
    model.progress = not quiet
    if missing_chunks is not None:
        model.missing_chunks = missing_chunks
    # Mistakes should be told before a cluster is started for them.
    model.check_rows(points)
    OutputStore(output, overwrite, PREDICTIONS)
    with told(quiet), clusters.connect(**cluster, echo=silence if quiet else None):
        summary = model.predict_to_zarr(points, output, return_std=std, overwrite=overwrite)
    emit(summary, as_json, wording.predictions)
