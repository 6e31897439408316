"""The command ``daskrr``, also reached as ``dask daskrr``.

Every ``dask`` command imports this module, so that it holds the options only; what they do is in
:mod:`daskrr.apps.commands`, which is loaded when a command runs.
"""

import importlib
from typing import Any

import click

from daskrr import __version__
from daskrr.apps.interrupts import Terminated, sure_interrupts
from daskrr.apps.options import (
    DEBUG,
    chosen_ridge_option,
    cluster_option,
    cluster_options,
    debug_option,
    grouped,
    interval_options,
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
    seed_option,
    tls_options,
    wait_option,
    weights_option,
    workers_option,
)


def _module(name: str) -> Any:
    return importlib.import_module(f"daskrr.apps.{name}")


class Commands(click.Group):
    """A group that turns every failure into one message and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen command."""
        try:
            with sure_interrupts():
                return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            terminated = isinstance(interrupt, Terminated)
            click.echo(f"daskrr: {'terminated' if terminated else 'interrupted'}", err=True)
            ctx.exit(143 if terminated else 130)
        except (click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError):
            raise
        except Exception as error:
            if ctx.meta.get(DEBUG):
                click.echo(_module("telling").trace(error), err=True)
            message, code = _module("telling").failure(error)
            click.echo(f"daskrr: {message}", err=True)
            ctx.exit(code)


@click.group(name="daskrr", cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="daskrr")
@debug_option
def main() -> None:
    """Kernel ridge leverage scores of data larger than memory.

    \b
    Exit codes:
      0    done
      1    the run failed, or a check did not hold
      2    wrong usage or bad input
      3    cluster or worker problem
      4    the output exists
      5    another job is at work on the output
      130  interrupted
      143  terminated
    """


@main.command()
@click.option("--rows", type=click.IntRange(min=5000), default=500_000, show_default=True, help="Rows to write.")
@click.option("--directory", type=click.Path(file_okay=False), default=".", show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of data and sampling.")
@workers_option
@json_option
@quiet_option
@debug_option
def demo(**options: Any) -> None:
    """Plant outliers in made-up data, score it, and see whether they are found.

    Writes the data, the scores and daskrr-demo.png into the directory. Fails when fewer than 95 % of the
    planted rows are among as many highest estimates.
    """
    _module("demonstration").demo(**options)


@main.command()
@click.argument("source", type=click.Path())
@click.argument("target", type=click.Path())
@click.option("--columns", metavar="A,B,...", help="Names or zero-based positions of the columns to keep.")
@click.option("--standardize", is_flag=True, help="Centre every column and divide it by its standard deviation.")
@click.option("--array", metavar="NAME", help="Array inside an .npz file.")
@click.option("--dtype", help="Type of the result, such as float32; that of the source by default.")
@click.option("--delimiter", help="Character between cells of a .csv file; found by default.")
@click.option("--header/--no-header", default=None, help="Whether a .csv file starts with names; found by default.")
@overwrite_option
@json_option
@quiet_option
@debug_option
def convert(**options: Any) -> None:
    """Write a .npy, .npz, .csv, .tsv or .parquet table as a Zarr array."""
    _module("commands").convert(**options)


@main.command()
@click.argument("points", type=click.Path())
@click.argument("output", type=click.Path())
@kernel_options
@model_options
@weights_option
@interval_options
@cluster_options
@wait_option
@overwrite_option
@json_option
@quiet_option
@debug_option
def score(**options: Any) -> None:
    """Score every row of the Zarr array POINTS and write the result to OUTPUT.

    Without --landmarks, landmarks are added until the intervals of the scores are tight. A job that was stopped goes on
    where it was if the same line is run again; one that is done is left as it is.
    """
    _module("commands").score(**grouped(options, "kernel", "model", "cluster"))


@main.command()
@click.argument("points", type=click.Path())
@click.argument("output", type=click.Path())
@click.option(
    "--refresh",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="Whether landmarks are drawn anew: when they no longer cover the rows, in any case, or not at all.",
)
@click.option("--allow-function", multiple=True, metavar="PACKAGE.MODULE:NAME", help="Function the kernel may import.")
@cluster_options
@wait_option
@json_option
@quiet_option
@debug_option
def update(**options: Any) -> None:
    """Bring the scores in OUTPUT up to date after rows were appended to the Zarr array POINTS.

    Kernel, ridge and all other parameters are those of daskrr score before. Only the new rows are summed, with the
    landmarks that are there, unless these no longer cover the data. Tells how the new rows differ from the old ones.
    Readers see the old scores until the new ones are whole.
    """
    _module("commands").update(**grouped(options, "cluster"))


@main.command()
@click.argument("sketch", metavar="SCORES_OR_SKETCH", type=click.Path())
@click.argument("points", type=click.Path())
@click.argument("output", type=click.Path())
@missing_chunks_option
@click.option("--allow-function", multiple=True, metavar="PACKAGE.MODULE:NAME", help="Function the kernel may import.")
@cluster_options
@wait_option
@overwrite_option
@json_option
@quiet_option
@debug_option
def apply(**options: Any) -> None:
    """Score the rows of the Zarr array POINTS, never seen before, among data that was scored, and write to OUTPUT.

    SCORES_OR_SKETCH is an output of daskrr score, or a sketch that was saved from Python; the data itself is not read.
    Every row gets the score that it would have if it alone were added to the data, with an interval if there was
    --certify or a tolerance. A job that was stopped goes on where it was if the same line is run again.
    """
    _module("commands").apply(**grouped(options, "cluster"))


def _show(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Print what is known of job files, and do nothing else."""
    if value and not ctx.resilient_parsing:
        click.echo(getattr(_module("jobfile"), str(parameter.name))(main.commands))
        ctx.exit()


@main.command()
@click.argument("path", metavar="JOB", type=click.Path())
@click.option("--check", is_flag=True, help="Only tell what is wrong with JOB, or what it would do and cost.")
@click.option("--schema", is_flag=True, is_eager=True, expose_value=False, callback=_show, help="Show all keys.")
@click.option("--example", is_flag=True, is_eager=True, expose_value=False, callback=_show, help="Show a job file.")
@cluster_options
@wait_option
@overwrite_option
@json_option
@quiet_option
@debug_option
def run(**options: Any) -> None:
    """Run the job that the TOML file JOB describes, whatever it needs.

    Scores an input that was not scored yet, goes on with a job that was stopped, brings scores up to date if rows were
    appended, and does nothing if nothing has changed, so that the same line can be run every night. Failures that may
    pass are tried again. Relative paths in JOB start from its folder. --cluster takes the place of the table [cluster].
    """
    _module("runs").run(main.commands, **grouped(options, "cluster"))


@main.command()
@click.argument("output", type=click.Path())
@json_option
@debug_option
def status(**options: Any) -> None:
    """Tell where the job of OUTPUT is, whether it runs here, elsewhere or no more."""
    _module("commands").status(**options)


@main.command()
@click.argument("output", type=click.Path())
@json_option
@debug_option
def verify(**options: Any) -> None:
    """Read the scores in OUTPUT again and compare them with the checksums taken when they were written."""
    _module("commands").verify(**options)


@main.command()
@click.argument("scores", type=click.Path())
@click.option("-k", "count", type=click.IntRange(min=1), default=20, show_default=True, help="How many rows.")
@click.option(
    "--by",
    type=click.Choice(["estimate", "scores", "lower", "upper"]),
    default="estimate",
    show_default=True,
    help="What rows are ranked by; lower and upper need scores with --certify.",
)
@chosen_ridge_option
@json_option
@debug_option
def top(**options: Any) -> None:
    """List the rows with the highest values in SCORES, an output of daskrr score."""
    _module("commands").top(**options)


@main.command()
@click.argument("scores", type=click.Path())
@click.option("-o", "--output", type=click.Path(), default="report.html", show_default=True, help="File to write.")
@overwrite_option
@json_option
@quiet_option
@debug_option
def report(**options: Any) -> None:
    """Write a report of SCORES, an output of daskrr score, as one HTML file that needs no network.

    Histograms, intervals, the highest rows, the spectrum, what is certified, parameters, times and versions.
    """
    _module("commands").report(**options)


@main.command()
@click.argument("scores", type=click.Path())
@click.argument("output", type=click.Path())
@click.option("--size", type=click.IntRange(min=1), required=True, help="Number of draws; a row may come up again.")
@click.option("--points", type=click.Path(), help="The rows that were scored; where they were then by default.")
@chosen_ridge_option
@seed_option
@cluster_option("this process")
@workers_option
@tls_options
@overwrite_option
@json_option
@quiet_option
@debug_option
def sample(**options: Any) -> None:
    """Draw rows by SCORES, an output of daskrr score, and write them with their weights to OUTPUT."""
    _module("commands").sample(**grouped(options, "cluster"))


@main.command()
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
    _module("regressions").fit(**grouped(options, "kernel", "model", "cluster"))


@main.command()
@click.argument("points", type=click.Path())
@click.argument("targets", type=click.Path())
@click.argument("model_path", metavar="MODEL", type=click.Path())
@kernel_option
@click.option(
    "--length-scales",
    metavar="FROM:TO:COUNT|A,B,...",
    help="Length scales to choose from, in equal ratios or one by one; by default, for a Gaussian kernel, a quarter, "
    "half, once and twice the median distance.",
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
    _module("regressions").select(**grouped(options, "kernel", "model", "cluster"))


@main.command()
@click.argument("model_path", metavar="MODEL", type=click.Path())
@click.argument("points", type=click.Path())
@click.argument("output", type=click.Path())
@click.option("--std", is_flag=True, help="Write the standard errors of the predictions too.")
@missing_chunks_option
@click.option("--allow-function", multiple=True, metavar="PACKAGE.MODULE:NAME", help="Function the model may import.")
@cluster_options
@overwrite_option
@json_option
@quiet_option
@debug_option
def predict(**options: Any) -> None:
    """Predict the rows of POINTS with MODEL, an output of daskrr fit or select, and write the result to OUTPUT."""
    _module("regressions").predict(**grouped(options, "cluster"))


@main.command()
@click.argument("points", type=click.Path())
@kernel_options
@model_options
@weights_option
@interval_options
@workers_option
@json_option
@debug_option
def plan(**options: Any) -> None:
    """Show what scoring POINTS would read, hold and compute, without doing it."""
    _module("commands").plan(**grouped(options, "kernel", "model", "cluster"))


if __name__ == "__main__":
    main(prog_name="daskrr")
