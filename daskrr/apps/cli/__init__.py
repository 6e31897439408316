"""The command ``daskrr``, also reached as ``dask daskrr``.

Every ``dask`` command imports this module, so that it holds the options only; what they do is in
:mod:`daskrr.apps.cli.commands`, which is loaded when a command runs.
"""

from typing import Any

import click

from daskrr import __version__
from daskrr.apps.cli.group import Commands, module, run_command
from daskrr.apps.cli.options import (
    already_scaled_option,
    chosen_ridge_option,
    cluster_option,
    cluster_options,
    debug_option,
    device_option,
    grouped,
    interval_options,
    json_option,
    keep_option,
    kernel_options,
    missing_chunks_option,
    overwrite_option,
    quiet_option,
    score_options,
    seed_option,
    table_options,
    tls_options,
    wait_option,
    weights_option,
    workers_option,
)
from daskrr.apps.cli.regression_commands import fit, predict, select


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
    run_command("demonstration", "demo", options)


@main.command()
@click.argument("source", type=click.Path())
@click.argument("target", type=click.Path())
@table_options
@click.option(
    "--like",
    type=click.Path(),
    help="Store, scores, sketch or model: do to columns what was done there, with the same means and scales.",
)
@click.option("--append", is_flag=True, help="Write rows after those of TARGET; files that it has are not read again.")
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
    """Write a .npy, .npz, .csv, .tsv or .parquet table, or a folder of Parquet files, as a Zarr array.

    Words become a feature each, dates days since 1970; what says nothing about a row is left out. It is told, and
    recorded with the array, what became of every column.
    """
    run_command("commands", "convert", options, "table")


@main.command()
@click.argument("points", type=click.Path())
@click.argument("output", type=click.Path(), required=False)
@kernel_options
@score_options
@weights_option
@interval_options
@table_options
@cluster_options
@wait_option
@keep_option
@overwrite_option
@json_option
@quiet_option
@debug_option
def score(**options: Any) -> None:
    """Score every row of POINTS and write the result to OUTPUT, NAME.scores.zarr beside NAME by default.

    POINTS is a Zarr array, or a table: .csv, .tsv, .parquet or a folder of Parquet files. A table is converted first,
    standardized, to NAME.points.zarr beside OUTPUT.

    Without --ridge, a pilot sample chooses it and the number of landmarks, scores are certified, the highest rows are
    shown with their values, and a report is written. With --ridge and without --landmarks, landmarks are added until
    the intervals of the scores are tight. The kernel is a Gaussian of median length scale by default.

    A job that was stopped goes on where it was if the same line is run again; one that is done is left as it is.
    """
    run_command("commands", "score", options, "kernel", "model", "table", "cluster")


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
@keep_option
@json_option
@quiet_option
@debug_option
def update(**options: Any) -> None:
    """Bring the scores in OUTPUT up to date after rows were appended to the Zarr array POINTS.

    Kernel, ridge and all other parameters are those of daskrr score before. Only the new rows are summed, with the
    landmarks that are there, unless these no longer cover the data. Tells how the new rows differ from the old ones.
    Readers see the old scores until the new ones are whole.
    """
    run_command("commands", "update", options, "cluster")


@main.command()
@click.argument("sketch", metavar="SCORES_OR_SKETCH", type=click.Path())
@click.argument("points", type=click.Path())
@click.argument("output", type=click.Path())
@missing_chunks_option
@already_scaled_option
@click.option("--allow-function", multiple=True, metavar="PACKAGE.MODULE:NAME", help="Function the kernel may import.")
@cluster_options
@wait_option
@keep_option
@overwrite_option
@json_option
@quiet_option
@debug_option
def apply(**options: Any) -> None:
    """Score the rows of POINTS, never seen before, among data that was scored, and write to OUTPUT.

    POINTS is a Zarr array, or a table, which is converted as that of the data was, to NAME.points.zarr beside OUTPUT.

    SCORES_OR_SKETCH is an output of daskrr score, or a sketch that was saved from Python; the data itself is not read.
    Every row gets the score that it would have if it alone were added to the data, with an interval if there was
    --certify or a tolerance. A job that was stopped goes on where it was if the same line is run again.
    """
    run_command("commands", "apply", options, "cluster")


def _show(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Print what is known of job files, and do nothing else."""
    if value and not ctx.resilient_parsing:
        click.echo(getattr(module("jobfile"), str(parameter.name))(main.commands))
        ctx.exit()


@main.command()
@click.argument("path", metavar="JOB", type=click.Path())
@click.option(
    "--check",
    is_flag=True,
    help="Only tell what is wrong with JOB, or what it would do and cost; a table is converted to know.",
)
@click.option("--schema", is_flag=True, is_eager=True, expose_value=False, callback=_show, help="Show all keys.")
@click.option("--example", is_flag=True, is_eager=True, expose_value=False, callback=_show, help="Show a job file.")
@cluster_options
@wait_option
@keep_option
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
    module("runs").run(main.commands, **grouped(options, "cluster"))


@main.command()
@click.argument("output", type=click.Path())
@json_option
@debug_option
def status(**options: Any) -> None:
    """Tell where the job of OUTPUT is, whether it runs here, elsewhere or no more."""
    run_command("commands", "status", options)


@main.command()
@click.argument("output", type=click.Path())
@click.option("--to", "generation", metavar="GENERATION", help="Which one, as daskrr status lists them; the last one.")
@wait_option
@json_option
@debug_option
def rollback(**options: Any) -> None:
    """Publish the generation of OUTPUT again that was published before.

    The one that is left is kept until the next is published, so that this can be undone.
    """
    run_command("commands", "rollback", options)


@main.command()
@click.argument("output", type=click.Path())
@click.option(
    "--repair", is_flag=True, help="First put right what can be: copies of records, plain paths, our own metadata."
)
@wait_option
@json_option
@debug_option
def verify(**options: Any) -> None:
    """Read OUTPUT and all state that a later job stands on again, and tell what is not as it was written."""
    run_command("commands", "verify", options)


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
@click.option("--with", "points", type=click.Path(), help="The rows that were scored: show their values too.")
@chosen_ridge_option
@json_option
@debug_option
def top(**options: Any) -> None:
    """List the rows with the highest values in SCORES, an output of daskrr score.

    With --with, the values of every row, and in what it is farthest from the landmarks that are nearest to it.
    """
    run_command("commands", "top", options)


@main.command()
@click.argument("scores", type=click.Path())
@click.argument("target", type=click.Path())
@click.option("--with", "points", type=click.Path(), help="The rows that were scored; where they were then by default.")
@click.option("--values", is_flag=True, help="Write the values of every row too.")
@overwrite_option
@json_option
@quiet_option
@debug_option
def export(**options: Any) -> None:
    """Write SCORES, an output of daskrr score, apply, predict or sample, to TARGET, a .parquet or .csv file.

    One line for every row: its number in the table, what identifies it, estimate, interval, score and residual; or its
    predictions, or its weight.
    """
    run_command("commands", "export", options)


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
    run_command("commands", "report", options)


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
    """Draw rows by SCORES, an output of daskrr score, and write them with their weights to OUTPUT.

    A weight is 1/(size · probability): sums over the sample, so weighted, are those over all rows on average.
    """
    run_command("commands", "sample", options, "cluster")


@main.command()
@click.argument("points", type=click.Path())
@kernel_options
@score_options
@weights_option
@interval_options
@table_options
@workers_option
@device_option
@json_option
@debug_option
def plan(**options: Any) -> None:
    """Show what scoring POINTS would read, hold and compute, without doing it.

    Without --ridge, a pilot sample tells what some ridges make of the data. A table is converted for that and the
    result forgotten.
    """
    run_command("commands", "plan", options, "kernel", "model", "table", "cluster")


for _command in (fit, select, predict):
    main.add_command(_command)
