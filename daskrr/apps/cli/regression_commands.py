"""The commands of kernel ridge regression: their options only, as in :mod:`daskrr.apps.cli`."""

from typing import Any

import click

from daskrr.apps.cli.group import run_command
from daskrr.apps.cli.options import (
    already_scaled_option,
    cluster_options,
    debug_option,
    json_option,
    kernel_option,
    kernel_options,
    kernel_parameters,
    landmark_options,
    missing_chunks_option,
    model_options,
    overwrite_option,
    quiet_option,
    regression_options,
)


@click.command()
@click.argument("points", type=click.Path())
@click.argument("targets", type=click.Path())
@click.argument("model_path", metavar="MODEL", type=click.Path())
@kernel_options
@model_options
@regression_options
@cluster_options
@overwrite_option
@json_option
@quiet_option
@debug_option
def fit(**options: Any) -> None:
    """Fit kernel ridge regression of TARGETS on the rows of POINTS, and write it to MODEL."""
    run_command("regressions", "fit", options, "kernel", "model", "regression", "cluster")


@click.command()
@click.argument("points", type=click.Path())
@click.argument("targets", type=click.Path())
@click.argument("model_path", metavar="MODEL", type=click.Path())
@kernel_option
@click.option(
    "--length-scales",
    metavar="FROM:TO:COUNT|A,B,...|learn",
    help="Length scales to choose from, in equal ratios or one by one; learn: one per feature, learned from TARGETS; "
    "by default, for a Gaussian kernel, a quarter, half, once and twice the median distance.",
)
@kernel_parameters
@click.option(
    "--ridges",
    metavar="FROM:TO:COUNT|A,B,...",
    help="Ridges to choose from, in equal ratios or one by one; 1e-8:1:30 by default.",
)
@click.option(
    "--scoring",
    type=click.Choice(["loo", "gcv", "kfold"]),
    default="loo",
    show_default=True,
    help="What is to be least: the leave-one-out error (of rows that are no landmarks, if these are at most a "
    "twentieth of all), generalized cross-validation, or the error of folds.",
)
@click.option("--folds", type=click.IntRange(min=2), default=5, show_default=True, help="Folds of --scoring kfold.")
@landmark_options
@regression_options
@cluster_options
@overwrite_option
@json_option
@quiet_option
@debug_option
def select(**options: Any) -> None:
    """Choose length scale and ridge of a kernel ridge regression by cross-validation, and write it to MODEL.

    Landmarks are chosen anew for every length scale, at the geometric mean of the ridges if that matters.
    """
    run_command("regressions", "select", options, "kernel", "search", "model", "regression", "cluster")


@click.command()
@click.argument("model_path", metavar="MODEL", type=click.Path())
@click.argument("points", type=click.Path())
@click.argument("output", type=click.Path())
@click.option("--std", is_flag=True, help="Write the standard errors of the predictions too.")
@missing_chunks_option
@already_scaled_option
@click.option("--allow-function", multiple=True, metavar="PACKAGE.MODULE:NAME", help="Function the model may import.")
@cluster_options
@overwrite_option
@json_option
@quiet_option
@debug_option
def predict(**options: Any) -> None:
    """Predict the rows of POINTS with MODEL, an output of daskrr fit or select, and write the result to OUTPUT.

    POINTS is a Zarr array, or a table, which is converted as that of the model was, to NAME.points.zarr beside OUTPUT.
    """
    run_command("regressions", "predict", options, "cluster")
