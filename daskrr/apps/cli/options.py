"""The options of the commands, and which of them travel together; they load nothing but click."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
# The options of every kind of sampling by name; those by an array have the last two.
SAMPLINGS: dict[str, tuple[str, ...]] = {
    "residual": ("rounds", "replacement"),
    "leverage": ("epsilon", "replacement", "sketch_ridge"),
    "diagonal": ("replacement", "sketch_ridge"),
    "uniform": ("replacement", "sketch_ridge"),
}
SCHEMES = tuple(SAMPLINGS)
# The options that strategies of the library are made of, and what they are called there.
TOLERANCE = {
    "tolerance": "relative",
    "absolute_tolerance": "absolute",
    "max_landmarks": "most",
    "score_floor": "score_floor",
}
CERTAINTY = ("failure_probability", "audit_rows", "subset_bound")
CLUSTERS = ("local", "slurm", "slurm-runner", "gateway", "kubernetes")
# The parameters of every kernel, and whether it needs them.
KERNELS: dict[str, dict[str, bool]] = {
    "linear": {},
    "gaussian": {"length_scale": True},
    "laplacian": {"length_scale": True},
    "matern": {"length_scale": True, "nu": False},
    "polynomial": {"degree": False, "offset": False, "scale": False},
    "cosine": {},
    "bernoulli": {"order": False},
}
DEBUG = "daskrr.debug"
# The length scale that a regression finds.
LEARN = "learn"
# Options that travel together, by the parameter of the command that takes them.
GROUPS = {
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
        "sample_weight",
    ),
    "table": ("columns", "id", "response", "missing", "dates", "levels"),
    "regression": ("weights", "weight_meaning", "intercept"),
    "search": ("length_scales", "ridges", "scoring", "folds"),
    "cluster": ("cluster", "workers", "memory_limit", "device", "tls_ca_file", "tls_cert", "tls_key", "require_tls"),
}


class PathOr(click.ParamType):
    """A path, unless it is one of some words, or JSON."""

    name = "path"

    def __init__(self, *words: str) -> None:
        self._words = words

    def is_path(self, value: str) -> bool:
        """Whether this value is a path."""
        return value not in self._words and not value.lstrip().startswith("{")


class Cluster(click.ParamType):
    """A kind of cluster to start, or the address of a scheduler."""

    name = "cluster"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read the text of an option."""
        if value not in CLUSTERS and ":" not in value:
            self.fail(f"{value!r} is neither {', '.join(CLUSTERS)} nor an address such as tls://host:8786", param, ctx)
        return value


class LengthScale(click.ParamType):
    """A number, one for each feature with commas between, or one of the words median and learn."""

    name = "length scale"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read the text of an option."""
        if value in ("median", LEARN):
            return value
        try:
            scales = [float(part) for part in str(value).split(",")]
        except ValueError:
            self.fail(f"must be a number, numbers with commas between, median or learn, not {value!r}", param, ctx)
        return scales[0] if len(scales) == 1 else scales


def _remember_debug(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[DEBUG] = True


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
keep_option = click.option(
    "--keep",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    metavar="N",
    help="Generations kept from before, for readers that have one open and for daskrr rollback.",
)
wait_option = click.option(
    "--wait", is_flag=True, help="Wait for another job that is at work on the output, instead of failing."
)
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace what is there already.")
workers_option = click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Workers of the cluster to start; on this machine one per core by default.",
)

kernel_option = click.option("--kernel", type=click.Choice(list(KERNELS)), help="Which kernel.")
kernel_parameters = _all_of(
    click.option("--nu", type=click.Choice(["0.5", "1.5", "2.5"]), help="Smoothness of the Matérn kernel."),
    click.option("--degree", type=int, help="Degree of the polynomial kernel."),
    click.option("--offset", type=float, help="Offset of the polynomial kernel."),
    click.option("--scale", type=float, help="Scale of the polynomial kernel."),
    click.option("--order", type=int, help="Order of the Bernoulli kernel."),
    click.option(
        "--kernel-spec", type=PathOr(), metavar="FILE|JSON", help="Kernel as JSON instead of the options above."
    ),
    click.option(
        "--allow-function", multiple=True, metavar="PACKAGE.MODULE:NAME", help="Function the spec may import."
    ),
)
kernel_options = _all_of(
    kernel_option,
    click.option(
        "--length-scale",
        type=LengthScale(),
        metavar="NUMBER|median|learn|A,B,...",
        help="Length scale, median for the median distance of rows of a sample, or one per feature; learn: one per "
        "feature from the targets of daskrr fit.",
    ),
    kernel_parameters,
)
# The defaults are those of the library, which is handed what was given and nothing else.
table_options = _all_of(
    click.option(
        "--columns",
        metavar="A,B,...",
        help="Names or zero-based positions of the columns to keep; by default all that say something about a row.",
    ),
    click.option("--id", metavar="COLUMN", help="Column that identifies rows; it is kept beside them."),
    click.option(
        "--response",
        metavar="COLUMN",
        help="Column that a regression is to predict: no feature, and kept beside the rows.",
    ),
    click.option(
        "--missing",
        type=click.Choice(["refuse", "drop", "mean", "median"]),
        help="What to do about rows without some value: refuse the table, which is the default, leave the row out, or "
        "take the mean or median of the column, and one more word for categories.",
    ),
    click.option(
        "--dates",
        type=click.Choice(["number", "cyclic"]),
        help="Dates as days, which is the default, or also by where in the year and in the day they are.",
    ),
    click.option(
        "--levels",
        type=click.IntRange(min=1),
        help="Words of a category with a feature of their own, 20 by default; rarer ones share one.",
    ),
)
already_scaled_option = click.option(
    "--already-scaled", is_flag=True, help="The rows are made as those before were, whatever their records say."
)
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
    help="Ridge; it is added to the kernel matrix times the number of rows.",
)
ridges_option = click.option(
    "--ridge",
    type=float,
    multiple=True,
    help="Ridge; it is added to the kernel matrix times the number of rows. Repeat it for several at once. Left out, "
    "a pilot sample chooses it.",
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
        type=PathOr(*SCHEMES),
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
    click.option("--block-rows", type=click.IntRange(min=1), help="Rows of a block; chosen by default."),
)
model_options = _all_of(ridge_option, landmark_options)
score_options = _all_of(ridges_option, landmark_options)
weights_option = click.option(
    "--weights",
    "sample_weight",
    type=click.Path(),
    help="Zarr array of sample weights above zero, each of which counts its row so many times; all 1 by default.",
)
regression_options = _all_of(
    click.option("--weights", type=click.Path(), help="Zarr array of sample weights; all 1 by default."),
    click.option(
        "--weight-meaning",
        type=click.Choice(["frequency", "precision"]),
        default="frequency",
        show_default=True,
        help="Whether a weight says how often a row counts, or how exact its target is, up to a common factor.",
    ),
    click.option("--intercept", is_flag=True, help="Fit a constant part that is not penalised."),
)


def cluster_option(default: str) -> Callable[[Decorated], Decorated]:
    """Where to compute; ``default`` says it in words."""
    return click.option(
        "--cluster",
        type=Cluster(),
        metavar="|".join([*CLUSTERS, "ADDRESS"]),
        help=f"Cluster to start for the run, or address of a running Dask scheduler; {default} by default.",
    )


tls_options = _all_of(
    click.option(
        "--tls-ca-file",
        type=click.Path(),
        help="Authority that signed the scheduler's certificate, for tls:// and slurm; PEM.",
    ),
    click.option("--tls-cert", type=click.Path(), help="Certificate of this client, for tls:// and slurm; PEM."),
    click.option("--tls-key", type=click.Path(), help="Private key of --tls-cert; PEM."),
    click.option(
        "--require-tls", is_flag=True, help="Refuse a cluster elsewhere that is not encrypted, instead of warning."
    ),
)
device_option = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    help="What workers compute on: cpu, GPUs of NVIDIA (cuda), or those where all workers have one (auto); what "
    "Dask's configuration says by default, which is auto. A local cluster has one worker for each GPU; of more workers "
    "than that, none has one.",
)
cluster_options = _all_of(
    cluster_option("local"),
    workers_option,
    click.option("--memory-limit", metavar="SIZE", help="Memory of each worker of a local cluster, such as 2GiB."),
    device_option,
    tls_options,
)


def grouped(options: dict[str, Any], *groups: str) -> dict[str, Any]:
    """Put options that belong together under one name."""
    found = {group: {name: options.pop(name) for name in GROUPS[group] if name in options} for group in groups}
    return options | found
