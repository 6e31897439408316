"""What the commands do: read options, run the library and emit results, worded by :mod:`daskrr.apps.wording`.

The function of a command takes its options by the names that :mod:`daskrr.apps.cli` gives them. Results go to
standard output, everything else to standard error.
"""

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click
import distributed
import numpy as np
import zarr
from distributed.comm.core import CommClosedError

from daskrr import errors, kernels, outputs, plots, samples, scoring, synthetic
from daskrr.apps import clusters, wording
from daskrr.apps import convert as conversion
from daskrr.engine.storage import OutputStore
from daskrr.leverage import plan as make_plan
from daskrr.nystrom.selection import SCHEMES
from daskrr.regression.model import PREDICTIONS
from daskrr.regression.ridge import NystromKernelRidge, load
from daskrr.regression.saving import MODEL
from daskrr.regression.selection import NystromKernelRidgeCV

# The first class that fits decides; whatever is not listed is a failed run.
_EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (errors.OutputExists, 4),
    (errors.LeaseHeld, 5),
    (errors.LeaseLost, 5),
    (errors.InvalidParameter, 2),
    (errors.InvalidData, 2),
    (errors.NotCertified, 2),
    (errors.SourceUnreachable, 3),
    (errors.DoesNotFit, 3),
    (distributed.KilledWorker, 3),
    (CommClosedError, 3),
)
_DEMO_MODEL: dict[str, Any] = {
    "kernel": kernels.Gaussian(5.0),
    "ridge": 1e-5,
    "n_landmarks": 500,
    # Every row is as likely as any other to become a landmark; nothing hints at what was planted.
    "sampling": "uniform",
}
# Small enough to keep every worker busy to the end, which chunks of the usual size would not.
_DEMO_CHUNK_ROWS = 16_384
_DEMO_SHARE = 0.95


def failure(error: Exception) -> tuple[str, int]:
    """Describe a failure and give its exit code."""
    code = next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), 1)
    if isinstance(error, errors.DaskrrError):
        return str(error), code
    return f"{type(error).__name__}: {error} (add --debug to see where)", code


def convert(
    source: str,
    target: str,
    columns: str | None,
    standardize: bool,
    array: str | None,
    dtype: str | None,
    delimiter: str | None,
    header: bool | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run ``daskrr convert``."""
    summary = conversion.convert(
        source,
        target,
        columns=None if columns is None else [column.strip() for column in columns.split(",")],
        standardize=standardize,
        key=array,
        dtype=_dtype(dtype),
        delimiter=delimiter,
        header=header,
        overwrite=overwrite,
        progress=not quiet,
    )
    _emit(summary, as_json, wording.conversion)


def _dtype(name: str | None) -> np.dtype[Any] | None:
    try:
        return None if name is None else np.dtype(name)
    except TypeError as error:
        raise errors.InvalidParameter(f"{name!r} is no type of numbers; one is float32") from error


def _emit(result: Any, as_json: bool, describe: Callable[[Any], str]) -> None:
    click.echo(json.dumps(result) if as_json else describe(result))


def score(
    points: str,
    output: str,
    kernel: Mapping[str, Any],
    model: Mapping[str, Any],
    cluster: Mapping[str, Any],
    wait: bool,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run ``daskrr score``."""
    chosen, arguments = make_kernel(kernel), _arguments(points, model)
    # Mistakes should be told, and finished work found, before a cluster is started.
    make_plan(points, chosen, **arguments)
    summary = scoring.published(points, output, chosen, overwrite=overwrite, **arguments)
    if summary is None:
        with _told(quiet), clusters.connect(**cluster, echo=_silence if quiet else None):
            summary = scoring.score_to_zarr(
                points, output, chosen, overwrite=overwrite, wait=wait, progress=not quiet, **arguments
            )
    _emit(summary, as_json, wording.scores)


def status(output: str, as_json: bool) -> None:
    """Run ``daskrr status``."""
    _emit(outputs.status(output), as_json, wording.status)


def verify(output: str, as_json: bool) -> None:
    """Run ``daskrr verify``."""
    damage = outputs.verify(output)
    _emit({"output": output, "damage": damage}, as_json, wording.verification)
    if damage:
        raise errors.CheckFailed(f"{output} is not what was written: {len(damage)} of its parts differ")


def _silence(line: str) -> None:
    """Print nothing."""


class _Teller(logging.Handler):
    """Write what is logged to standard error, and nothing twice."""

    def __init__(self) -> None:
        super().__init__()
        self._told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Write the message unless it was written before."""
        line = record.getMessage()
        if line not in self._told:
            self._told.add(line)
            click.echo(line, err=True)


@contextmanager
def _told(quiet: bool) -> Iterator[None]:
    """Show what the library logs; warnings only where it should be quiet."""
    log, teller = logging.getLogger("daskrr"), _Teller()
    level = log.level
    log.setLevel(logging.WARNING if quiet else logging.INFO)
    log.addHandler(teller)
    try:
        yield
    finally:
        log.removeHandler(teller)
        log.setLevel(level)


def _arguments(points: str, model: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the options of the model that were given into arguments of the library."""
    _refuse_file(points)
    ridges, sampling = model.get("ridge"), model["sampling"]
    if model["n_landmarks"] is None and sampling in SCHEMES and sampling != "residual":
        raise click.UsageError("only residual sampling finds the number of landmarks; give it with --landmarks")
    read: dict[str, Any] = {"sampling": None if sampling is None else _sampling(sampling)}
    if ridges is not None:
        read["ridge"] = ridges[0] if len(ridges) == 1 else list(ridges)
    return {name: value for name, value in {**model, **read}.items() if value is not None}


def _refuse_file(points: str) -> None:
    if Path(points).is_file():
        raise errors.InvalidData(f"{points} is a file, not a Zarr array: turn it into one with 'daskrr convert'")


def top(scores: str, count: int, by: str, ridge: float | None, as_json: bool) -> None:
    """Run ``daskrr top``."""
    rows = scoring.top_rows(scores, count, by=by, ridge=ridge)
    _emit({"by": by, "rows": rows}, as_json, wording.top)


def sample(
    scores: str,
    output: str,
    size: int,
    points: str | None,
    ridge: float | None,
    random_state: int | None,
    scheduler: str | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run ``daskrr sample``."""
    if points is not None:
        _refuse_file(points)
    where = nullcontext() if scheduler is None else clusters.connect(scheduler, echo=_silence if quiet else None)
    with _told(quiet), where:
        drawn = samples.sample_rows(
            scores,
            size,
            random_state=random_state,
            ridge=ridge,
            X=points,
            output=output,
            overwrite=overwrite,
            progress=not quiet,
        )
    summary = {
        "size": len(drawn),
        "distinct": len(np.unique(drawn.indices)),
        "by": drawn.by,
        "smallest_weight": float(drawn.weights.min()),
        "largest_weight": float(drawn.weights.max()),
        "random_state": drawn.random_state,
        "output": output,
    }
    _emit(summary, as_json, wording.sample)


def fit(
    points: str,
    targets: str,
    model_path: str,
    kernel: Mapping[str, Any],
    model: Mapping[str, Any],
    cluster: Mapping[str, Any],
    weights: str | None,
    intercept: bool,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run ``daskrr fit``."""
    if len(model["ridge"]) > 1:
        raise click.UsageError("a model has one --ridge")
    arguments = {"certify": True} | _arguments(points, model)
    estimator = NystromKernelRidge(make_kernel(kernel), fit_intercept=intercept, progress=not quiet, **arguments)
    summary = _fitted(estimator, (points, targets, weights), model_path, cluster, overwrite, quiet)
    _emit(summary, as_json, wording.model)


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
            _refuse_file(path)
    # Mistakes should be told before a cluster is started for them.
    estimator.check(*data)
    OutputStore(model_path, overwrite, MODEL)
    began = time.perf_counter()
    with _told(quiet), clusters.connect(**cluster, echo=_silence if quiet else None):
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
    intercept: bool,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run ``daskrr select``."""
    arguments = {"certify": True} | _arguments(points, model)
    estimator = NystromKernelRidgeCV(
        _candidates(kernel, length_scales), None if ridges is None else _numbers("--ridges", ridges), scoring=scoring,
        folds=folds, fit_intercept=intercept, progress=not quiet, **arguments,
    )  # fmt: skip
    summary = _fitted(estimator, (points, targets, weights), model_path, cluster, overwrite, quiet)
    _emit(summary, as_json, wording.selection)


def _candidates(kernel: Mapping[str, Any], length_scales: str | None) -> list[kernels.Kernel] | None:
    """The kernels to choose from; None for the library's own, Gaussians about the median distance."""
    if kernel["kernel"] is None and kernel["kernel_spec"] is None:
        kernel = {**kernel, "kernel": "gaussian"}
    if length_scales is not None:
        scales = _numbers("--length-scales", length_scales)
        return [make_kernel({**kernel, "length_scale": str(scale)}) for scale in scales]
    given = [name for name, value in kernel.items() if value and name != "kernel"]
    if kernel["kernel"] == "gaussian" and not given:
        return None
    if kernel["kernel"] is not None and "length_scale" in _parameters(kernel["kernel"]):
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
    functions: Sequence[str],
    std: bool,
    missing_chunks: str | None,
    cluster: Mapping[str, Any],
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run ``daskrr predict``."""
    _refuse_file(points)
    model = load(model_path, functions)
    model.progress = not quiet
    if missing_chunks is not None:
        model.missing_chunks = missing_chunks
    # Mistakes should be told before a cluster is started for them.
    model.check_rows(points)
    OutputStore(output, overwrite, PREDICTIONS)
    with _told(quiet), clusters.connect(**cluster, echo=_silence if quiet else None):
        summary = model.predict_to_zarr(points, output, return_std=std, overwrite=overwrite)
    _emit(summary, as_json, wording.predictions)


def plan(
    points: str, kernel: Mapping[str, Any], model: Mapping[str, Any], cluster: Mapping[str, Any], as_json: bool
) -> None:
    """Run ``daskrr plan``."""
    workers = cluster["workers"] or clusters.CPU_COUNT
    made = make_plan(points, make_kernel(kernel), workers=workers, **_arguments(points, model))
    click.echo(json.dumps(made.to_dict()) if as_json else str(made))


def demo(rows: int, directory: str, seed: int, workers: int | None, as_json: bool, quiet: bool) -> None:
    """Run ``daskrr demo``."""
    began = time.perf_counter()
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    points, scores, picture = (folder / f"daskrr-demo{end}" for end in ("-points.zarr", "-scores.zarr", ".png"))
    data = synthetic.planted_outliers(rows, random_state=seed)
    with conversion.staged(points, overwrite=True) as partial:
        synthetic.write_demo_store(partial, data, chunk_rows=_DEMO_CHUNK_ROWS)
    result: dict[str, Any] = {
        "rows": rows,
        "planted": len(data.planted),
        "seconds": {"write rows": time.perf_counter() - began},
    }
    summary = _score_demo(points, scores, seed, workers, quiet)
    _draw(scores, picture, data, summary)
    result |= {name: summary[name] for name in ("rank", "effective_dimension", "dashboard")}
    result["found"] = _count_found(scores, data)
    result["seconds"] |= summary["seconds"] | {"all": time.perf_counter() - began}
    _emit(result | _paths(points=points, scores=scores, picture=picture), as_json, wording.demo)
    if result["found"] < _DEMO_SHARE * len(data.planted):
        raise errors.CheckFailed(f"only {result['found']} of {len(data.planted)} planted rows were found")


def _score_demo(points: Path, scores: Path, seed: int, workers: int | None, quiet: bool) -> dict[str, Any]:
    with clusters.connect(workers=workers, echo=_silence if quiet else None) as client:
        summary = scoring.score_to_zarr(
            points, scores, random_state=seed, overwrite=True, progress=not quiet, **_DEMO_MODEL
        )
        return summary | {"dashboard": client.dashboard_link}


def _paths(**paths: Path) -> dict[str, str]:
    return {name: str(path) for name, path in paths.items()}


def _count_found(scores: Path, data: synthetic.PlantedOutliers) -> int:
    best = scoring.top_rows(scores, len(data.planted), by="estimate")
    return len({row["row"] for row in best} & set(data.planted.tolist()))


def _draw(scores: Path, picture: Path, data: synthetic.PlantedOutliers, summary: Mapping[str, Any]) -> None:
    score, estimate = (np.asarray(zarr.open_array(scores / name, mode="r")[:]) for name in ("scores", "estimate"))
    title = wording.demo_title(data.n_rows, len(data.planted), summary["distinct_landmarks"])
    plots.save(plots.outlier_figure(score, estimate, data.planted, title), picture)


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
    return kernels.from_spec({"kernel": kind, **{name: _parsed(name, value) for name, value in given.items()}})


def _parameters(kind: str) -> dict[str, dataclasses.Field]:
    return {field.name: field for field in dataclasses.fields(kernels.KINDS[kind])}  # type: ignore[arg-type]


def _check_parameters(kind: str, given: Mapping[str, Any]) -> None:
    known = _parameters(kind)
    takes = ", ".join(map(_option, known)) or "no parameters"
    for name in given:
        if name not in known:
            raise click.UsageError(f"{_option(name)} does not apply to the {kind} kernel, which takes {takes}")
    for name, field in known.items():
        if name not in given and field.default is dataclasses.MISSING:
            raise click.UsageError(f"the {kind} kernel needs {_option(name)}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parsed(name: str, value: Any) -> Any:
    if name == "nu":
        return float(value)
    if name != "length_scale" or value == "median":
        return value
    try:
        scales = [float(part) for part in value.split(",")]
    except ValueError as error:
        raise click.UsageError(
            f"--length-scale must be a number, numbers with commas between, or median, not {value!r}"
        ) from error
    return scales[0] if len(scales) == 1 else scales


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
