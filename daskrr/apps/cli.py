"""The command ``daskrr``, also reached as ``dask daskrr``.

Every ``dask`` command imports this module, so that it holds the options only; what they do is in
:mod:`daskrr.apps.commands`, which is loaded when a command runs.
"""

import importlib
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import click

from daskrr import __version__

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
KERNELS = ("linear", "gaussian", "laplacian", "matern", "polynomial", "cosine", "bernoulli")
_DEBUG = "daskrr.debug"
# Options that travel together, by the parameter of the command that takes them.
_GROUPS = {
    "kernel": (
        "kernel",
        "length_scale",
        "nu",
        "degree",
        "offset",
        "scale",
        "order",
        "kernel_spec",
        "allow_function",
    ),
    "model": (
        "ridge",
        "n_landmarks",
        "tolerance",
        "absolute_tolerance",
        "max_landmarks",
        "score_floor",
        "certify",
        "failure_probability",
        "audit_rows",
        "subset_bound",
        "sampling",
        "rounds",
        "replacement",
        "epsilon",
        "sketch_ridge",
        "random_state",
        "dtype",
        "missing_chunks",
        "block_rows",
    ),
    "cluster": ("scheduler", "workers", "memory_limit"),
}


def _commands() -> Any:
    return importlib.import_module("daskrr.apps.commands")


class Terminated(KeyboardInterrupt):
    """Someone asked the process to end."""


@contextmanager
def sure_interrupts() -> Iterator[None]:
    """Let an interrupt, or a request to end, stop the command for certain.

    Raised while Python runs a finalizer, it would be printed and forgotten, and the job would go on. It is put off
    until the finalizer has ended.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    reasons = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated}
    reason: list[type[KeyboardInterrupt]] = [KeyboardInterrupt]

    def stop(number: int, frame: FrameType | None) -> None:
        reason[0] = reasons.get(signal.Signals(number), reason[0])
        signal.setitimer(signal.ITIMER_REAL, 0.01 if _in_finalizer(frame) else 0.0)
        if not _in_finalizer(frame):
            raise reason[0]

    before = {number: signal.signal(number, stop) for number in (*reasons, signal.SIGALRM)}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_finalizer(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_globals.get("__name__") in ("weakref", "_weakrefset"):
            return True
        frame = frame.f_back
    return False


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
            if ctx.meta.get(_DEBUG):
                traceback.print_exc()
            message, code = _commands().failure(error)
            click.echo(f"daskrr: {message}", err=True)
            ctx.exit(code)


def _remember_debug(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[_DEBUG] = True


def _all_of(*decorators: Callable[[Decorated], Decorated]) -> Callable[[Decorated], Decorated]:
    """Combine decorators, so that options appear in the order in which they are written."""

    def decorate(function: Decorated) -> Decorated:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


debug_option = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    callback=_remember_debug,
    help="Show the traceback of a failure.",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on standard output and nothing else there."
)
quiet_option = click.option("--quiet", is_flag=True, help="Show no progress.")
seed_option = click.option(
    "--seed", "random_state", type=click.IntRange(min=0), help="Seed of the draws; a new one by default."
)
chosen_ridge_option = click.option(
    "--ridge", type=float, help="Which ridge, if several were scored; the smallest by default."
)
missing_chunks_option = click.option(
    "--missing-chunks",
    type=click.Choice(["refuse", "fill"]),
    help="What to do about chunks that were never written; refuse by default.",
)
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace what is there already.")
workers_option = click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Processes of the embedded cluster; one per core by default.",
)

kernel_option = click.option("--kernel", type=click.Choice(KERNELS), help="Which kernel.")
kernel_parameters = _all_of(
    click.option("--nu", type=click.Choice(["0.5", "1.5", "2.5"]), help="Smoothness of the Matérn kernel."),
    click.option("--degree", type=int, help="Degree of the polynomial kernel."),
    click.option("--offset", type=float, help="Offset of the polynomial kernel."),
    click.option("--scale", type=float, help="Scale of the polynomial kernel."),
    click.option("--order", type=int, help="Order of the Bernoulli kernel."),
    click.option("--kernel-spec", metavar="FILE|JSON", help="Kernel as JSON instead of the options above."),
    click.option(
        "--allow-function", multiple=True, metavar="PACKAGE.MODULE:NAME", help="Function the spec may import."
    ),
)
kernel_options = _all_of(
    kernel_option,
    click.option("--length-scale", metavar="NUMBER|median|A,B,...", help="Length scale, or one per feature."),
    kernel_parameters,
)
# The defaults are those of the library, which is handed what was given and nothing else.
interval_options = _all_of(
    click.option(
        "--score-floor", type=float, help="Scores below this need not meet --tolerance; their average by default."
    ),
    click.option(
        "--audit-rows", type=int, help="Rows drawn to find what the landmarks do not explain; 2000 by default."
    ),
    click.option(
        "--subset-bound", is_flag=True, default=None, help="Try one more upper bound for every row, at some cost."
    ),
)
ridge_option = click.option(
    "--ridge",
    type=float,
    multiple=True,
    required=True,
    help="Ridge; it is added to the kernel matrix times the number of rows. Repeat it for several at once.",
)
landmark_options = _all_of(
    click.option(
        "--landmarks",
        "n_landmarks",
        type=click.IntRange(min=1),
        help="Number of landmarks. Left out, they are added until a tolerance is met.",
    ),
    click.option(
        "--tolerance",
        type=float,
        help="Add landmarks until upper/lower - 1 is at most this; 0.5 if neither --landmarks nor "
        "--absolute-tolerance is given.",
    ),
    click.option(
        "--absolute-tolerance",
        type=float,
        help="Add landmarks until upper - lower is at most this. With both tolerances, a row has to meet one.",
    ),
    click.option(
        "--max-landmarks", type=int, help="Stop adding landmarks here, tolerance met or not; 2000 by default."
    ),
    click.option(
        "--certify",
        is_flag=True,
        default=None,
        help="Give every score an interval that the exact one lies in. A tolerance implies it.",
    ),
    click.option(
        "--failure-probability",
        type=float,
        help="Chance that some interval misses its exact score; 1e-06 by default, 0 for certain but wider intervals.",
    ),
    click.option(
        "--sampling",
        metavar="residual|leverage|diagonal|uniform|PATH",
        help="How landmarks are drawn, residual by default; or an array, .npy or Zarr, of probabilities or of row "
        "numbers.",
    ),
    click.option("--rounds", type=int, help="Rounds of residual sampling with --landmarks; 2 by default."),
    click.option(
        "--replacement/--no-replacement",
        default=None,
        help="Whether a row may be drawn again; by default not for residual sampling, and for the others yes.",
    ),
    click.option(
        "--epsilon", type=float, help="Leverage sampling draws by scores at so many times the ridge; 0.1 by default."
    ),
    click.option("--sketch-ridge", type=float, help="Ridge of the regularised approximation; none by default."),
    seed_option,
    click.option(
        "--dtype", type=click.Choice(["float64", "float32"]), help="Precision of kernel tiles; float64 by default."
    ),
    missing_chunks_option,
    click.option("--block-rows", type=click.IntRange(min=1), help="Rows per task; chosen by default."),
)
model_options = _all_of(ridge_option, landmark_options)
regression_options = _all_of(
    click.option("--weights", type=click.Path(), help="Zarr array of sample weights; all 1 by default."),
    click.option("--intercept", is_flag=True, help="Fit a constant part that is not penalised."),
)
cluster_options = _all_of(
    click.option("--scheduler", metavar="ADDRESS", help="Running Dask scheduler; embedded cluster by default."),
    workers_option,
    click.option("--memory-limit", metavar="SIZE", help="Memory per embedded worker, such as 2GiB."),
)


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
    _commands().demo(**options)


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
    _commands().convert(**options)


@main.command()
@click.argument("points", type=click.Path())
@click.argument("output", type=click.Path())
@kernel_options
@model_options
@interval_options
@cluster_options
@click.option("--wait", is_flag=True, help="Wait for another job that is at work on OUTPUT, instead of failing.")
@overwrite_option
@json_option
@quiet_option
@debug_option
def score(**options: Any) -> None:
    """Score every row of the Zarr array POINTS and write the result to OUTPUT.

    Without --landmarks, landmarks are added until the intervals of the scores are tight. A job that was stopped goes on
    where it was if the same line is run again; one that is done is left as it is.
    """
    _commands().score(**_grouped(options))


@main.command()
@click.argument("output", type=click.Path())
@json_option
@debug_option
def status(**options: Any) -> None:
    """Tell where the job of OUTPUT is, whether it runs here, elsewhere or no more."""
    _commands().status(**options)


@main.command()
@click.argument("output", type=click.Path())
@json_option
@debug_option
def verify(**options: Any) -> None:
    """Read the scores in OUTPUT again and compare them with the checksums taken when they were written."""
    _commands().verify(**options)


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
    _commands().top(**options)


@main.command()
@click.argument("scores", type=click.Path())
@click.argument("output", type=click.Path())
@click.option("--size", type=click.IntRange(min=1), required=True, help="Number of draws; a row may come up again.")
@click.option("--points", type=click.Path(), help="The rows that were scored; where they were then by default.")
@chosen_ridge_option
@seed_option
@click.option("--scheduler", metavar="ADDRESS", help="Running Dask scheduler; this process by default.")
@overwrite_option
@json_option
@quiet_option
@debug_option
def sample(**options: Any) -> None:
    """Draw rows by SCORES, an output of daskrr score, and write them with their weights to OUTPUT."""
    _commands().sample(**options)


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
    _commands().fit(**_grouped(options))


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
    help="What is to be least: the leave-one-out error, generalized cross-validation, or the error of folds.",
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
    _commands().select(**_grouped(options))


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
    functions, missing = options.pop("allow_function"), options.pop("missing_chunks")
    _commands().predict(**_grouped(options), functions=functions, missing_chunks=missing)


@main.command()
@click.argument("points", type=click.Path())
@kernel_options
@model_options
@interval_options
@workers_option
@json_option
@debug_option
def plan(**options: Any) -> None:
    """Show what scoring POINTS would read, hold and compute, without doing it."""
    _commands().plan(**_grouped(options))


def _grouped(options: dict[str, Any]) -> dict[str, Any]:
    """Put options that belong together under one name."""
    found = {group: {name: options.pop(name) for name in names if name in options} for group, names in _GROUPS.items()}
    return options | {group: values for group, values in found.items() if values}


if __name__ == "__main__":
    main(prog_name="daskrr")
