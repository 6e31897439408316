"""What the commands of kernel ridge regression do."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from daskrr.apps import clusters, text
from daskrr.apps.cli.commands import like_points
from daskrr.apps.cli.parsing import make_kernel, model_arguments, refuse_file
from daskrr.apps.cli.telling import emit, silence, told
from daskrr.apps.cli.usage import candidates, numbers
from daskrr.errors import InvalidData
from daskrr.regression.cross_validation import KFold, NystromKernelRidgeCV
from daskrr.regression.loading import load_model
from daskrr.regression.model import KernelRidgeModel
from daskrr.regression.persistence import MODEL, PREDICTIONS
from daskrr.regression.ridge import NystromKernelRidge
from daskrr.storage.saving import Saving


def fit(
    points: str,
    targets: str,
    model_path: str,
    kernel: Mapping[str, Any],
    model: Mapping[str, Any],
    regression: Mapping[str, Any],
    cluster: Mapping[str, Any],
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run ``daskrr fit``."""
    estimator = NystromKernelRidge(
        make_kernel(kernel), progress=not quiet, **model_arguments(model, is_regression=True), **_meaning(regression)
    )  # fmt: skip
    data = points, targets, regression["weights"]
    summary = _fitted(estimator, data, model_path, cluster, overwrite, quiet)
    emit(summary, as_json, text.model)


def _meaning(regression: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a regression as arguments of the library."""
    return {"fit_intercept": regression["intercept"], "weight_meaning": regression["weight_meaning"]}


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
    Saving(model_path, overwrite, MODEL)
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
    search: Mapping[str, Any],
    model: Mapping[str, Any],
    regression: Mapping[str, Any],
    cluster: Mapping[str, Any],
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run ``daskrr select``."""
    choice, ridges = candidates(kernel, search["length_scales"]), search["ridges"]
    estimator = NystromKernelRidgeCV(
        None if choice is None else [make_kernel(one) for one in choice],
        None if ridges is None else numbers("--ridges", ridges),
        scoring=KFold(search["folds"]) if search["scoring"] == KFold.name else search["scoring"],
        progress=not quiet,
        **model_arguments(model, is_regression=True),
        **_meaning(regression),
    )
    data = points, targets, regression["weights"]
    summary = _fitted(estimator, data, model_path, cluster, overwrite, quiet)
    emit(summary, as_json, text.selection)


def predict(
    model_path: str,
    points: str,
    output: str,
    allow_function: Sequence[str],
    std: bool,
    missing_chunks: str | None,
    already_scaled: bool,
    cluster: Mapping[str, Any],
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run ``daskrr predict``."""
    points = like_points(points, output, model_path, overwrite, quiet)
    model = load_model(model_path, allow_function)
    if not isinstance(model, KernelRidgeModel):
        raise InvalidData(f"{model_path} is a {type(model).__name__}: predict with it in Python, by daskrr.load.")
    model.progress = not quiet
    if missing_chunks is not None:
        model.missing_chunks = missing_chunks
    # Mistakes should be told before a cluster is started for them.
    model.check_rows(points, already_scaled)
    Saving(output, overwrite, PREDICTIONS)
    with told(quiet), clusters.connect(**cluster, echo=silence if quiet else None):
        summary = model.predict_to_zarr(
            points, output, return_std=std, overwrite=overwrite, already_scaled=already_scaled
        )
    emit(summary, as_json, text.predictions)
