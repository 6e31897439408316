"""What the commands do: run the library and put the result into words.

The function of a command takes its options by the names that :mod:`daskrr.apps.cli` gives them. Results go to
standard output, everything else to standard error.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import distributed
import numpy as np
import zarr
from distributed.comm.core import CommClosedError

from daskrr import errors, kernels, plots, scoring, synthetic
from daskrr.apps import clusters
from daskrr.apps import convert as conversion
from daskrr.engine.progress import duration
from daskrr.engine.storage import OutputStore
from daskrr.leverage import plan as make_plan

# The first class that fits decides; whatever is not listed is a failed run.
_EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (errors.OutputExists, 4),
    (errors.InvalidParameter, 2),
    (errors.InvalidData, 2),
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
    _emit(summary, as_json, _describe_conversion)


def _dtype(name: str | None) -> np.dtype[Any] | None:
    try:
        return None if name is None else np.dtype(name)
    except TypeError as error:
        raise errors.InvalidParameter(f"{name!r} is no type of numbers; one is float32") from error


def _describe_conversion(summary: Mapping[str, Any]) -> str:
    names = summary["columns"]
    pairs = [
        ("rows", f"{summary['rows']:,}"),
        ("columns", f"{len(names)}: {_listed(names)}"),
        ("type", summary["dtype"]),
        ("chunks", " x ".join(f"{size:,}" for size in summary["chunks"])),
        ("standardized", "yes" if summary["standardized"] else "no"),
    ]
    if summary.get("constant_columns"):
        pairs.append(("constant, only centred", _listed(summary["constant_columns"])))
    return _table([*pairs, ("written to", summary["target"]), ("time", duration(summary["seconds"]))])


def _listed(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _table(pairs: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in pairs)


def _emit(result: Any, as_json: bool, describe: Callable[[Any], str]) -> None:
    click.echo(json.dumps(result) if as_json else describe(result))


def score(
    points: str,
    output: str,
    kernel: Mapping[str, Any],
    model: Mapping[str, Any],
    cluster: Mapping[str, Any],
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run ``daskrr score``."""
    chosen, arguments = make_kernel(kernel), _arguments(points, model)
    # Mistakes should be told before a cluster is started for them.
    make_plan(points, chosen, **arguments)
    OutputStore(output, overwrite)
    with clusters.connect(**cluster, echo=_silence if quiet else None):
        summary = scoring.score_to_zarr(points, output, chosen, overwrite=overwrite, progress=not quiet, **arguments)
    _emit(summary, as_json, _describe_scores)


def _silence(line: str) -> None:
    """Print nothing."""


def _arguments(points: str, model: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the options of the model into arguments of the library."""
    if Path(points).is_file():
        raise errors.InvalidData(f"{points} is a file, not a Zarr array: turn it into one with 'daskrr convert'")
    if model["n_landmarks"] is None and model["sampling"] in ("uniform", "diagonal"):
        raise click.UsageError("give the number of landmarks to draw with --landmarks")
    return {**model, "sampling": _sampling(model["sampling"])}


def _describe_scores(summary: Mapping[str, Any]) -> str:
    parameters, seconds = summary["parameters"], summary["seconds"]
    landmarks = f"{parameters['n_landmarks']:,} draws ({parameters['sampling']})"
    pairs = [
        ("rows", f"{summary['n_rows']:,} x {summary['n_features']} features"),
        ("kernel", _described_kernel(parameters["kernel"])),
        ("ridge", f"{parameters['ridge']:g}"),
        ("landmarks", f"{landmarks}, {summary['distinct_landmarks']:,} distinct"),
        ("rank", f"{summary['rank']:,}"),
        ("effective dimension", f"{summary['effective_dimension']:.6g}"),
        ("seed", str(parameters["random_state"])),
        *((name, duration(value)) for name, value in seconds.items()),
        ("written to", summary["output"]),
    ]
    return f"{_table(pairs)}\n\nhighest rows by estimate\n{_describe_rows(summary['top'])}"


def _described_kernel(spec: Mapping[str, Any]) -> str:
    values = ", ".join(f"{name}={json.dumps(value)}" for name, value in spec.items() if name != "kernel")
    return f"{spec['kernel']}({values})"


def _describe_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"{'row':>12}  {'estimate':>10}  {'score':>10}  {'residual':>10}"]
    for row in rows:
        figures = f"{row['estimate']:>10.3e}  {row['score']:>10.3e}  {row['residual']:>10.3e}"
        lines.append(f"{row['row']:>12}  {figures}")
    return "\n".join(lines)


def top(scores: str, count: int, by: str, as_json: bool) -> None:
    """Run ``daskrr top``."""
    rows = scoring.top_rows(scores, count, by=by)
    _emit({"by": by, "rows": rows}, as_json, lambda result: _describe_rows(result["rows"]))


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
    _emit(result | _paths(points=points, scores=scores, picture=picture), as_json, _describe_demo)
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
    title = (
        f"{data.n_rows:,} rows, {len(data.planted)} of them planted far from the others, "
        f"scored with {summary['distinct_landmarks']:,} landmarks"
    )
    plots.save(plots.outlier_figure(score, estimate, data.planted, title), picture)


def _describe_demo(result: Mapping[str, Any]) -> str:
    seconds = result["seconds"]
    pairs = [
        ("rows", f"{result['rows']:,}, {result['planted']} of them planted"),
        ("found", f"{result['found']} of {result['planted']} planted rows among as many highest estimates"),
        ("rank", f"{result['rank']:,}"),
        ("effective dimension", f"{result['effective_dimension']:.6g}"),
        *((name, duration(value)) for name, value in seconds.items()),
        ("dashboard was", str(result["dashboard"])),
        ("points", result["points"]),
        ("scores", result["scores"]),
        ("picture", result["picture"]),
    ]
    return _table(pairs)


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


def _check_parameters(kind: str, given: Mapping[str, Any]) -> None:
    known = {field.name: field for field in dataclasses.fields(kernels.KINDS[kind])}  # type: ignore[arg-type]
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
    if value in ("uniform", "diagonal"):
        return value
    try:
        return np.load(value, mmap_mode="r") if value.endswith(".npy") else zarr.open_array(value, mode="r")
    except (OSError, ValueError, KeyError) as error:
        raise errors.InvalidParameter(
            f"--sampling is uniform, diagonal, or the path of an array; {value!r} is none of them ({error})"
        ) from error
