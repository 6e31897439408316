"""What the commands do: read options, run the library and emit results, worded by :mod:`daskrr.apps.wording`.

The function of a command takes its options by the names that :mod:`daskrr.apps.cli` gives them. Results go to
standard output, everything else to standard error.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from daskrr import applying, errors, outputs, samples, scoring, updating
from daskrr.apps import clusters, wording
from daskrr.apps import convert as conversion
from daskrr.apps.parsing import make_kernel, model_arguments, refuse_file
from daskrr.apps.report import write_report
from daskrr.apps.telling import emit, silence, told
from daskrr.engine.plan import Plan, Workers, check_fits
from daskrr.leverage import plan as make_plan


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
    emit(summary, as_json, wording.conversion)


def _dtype(name: str | None) -> np.dtype[Any] | None:
    try:
        return None if name is None else np.dtype(name)
    except TypeError as error:
        raise errors.InvalidParameter(f"{name!r} is no type of numbers; one is float32") from error


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
    refuse_file(points)
    chosen, arguments = make_kernel(kernel), model_arguments(model)
    # Mistakes should be told, and finished work found, before a cluster is started.
    check_memory(make_plan(points, chosen, **arguments), cluster["memory_limit"])
    summary = scoring.published(points, output, chosen, overwrite=overwrite, **arguments)
    if summary is None:
        with told(quiet), clusters.connect(**cluster, echo=silence if quiet else None):
            summary = scoring.score_to_zarr(
                points, output, chosen, overwrite=overwrite, wait=wait, progress=not quiet, **arguments
            )
    emit(summary, as_json, wording.scores)


def check_memory(plan: Plan, memory_limit: str | None) -> None:
    """Refuse a plan that does not fit the workers that would be started.

    Raises
    ------
    DoesNotFit
        With the memory that it needs.
    """
    if memory_limit is not None:
        check_fits(plan, replace(Workers.embedded(1), limits={"to be started": clusters.memory_bytes(memory_limit)}))


def update(
    points: str,
    output: str,
    refresh: str,
    allow_function: Sequence[str],
    cluster: Mapping[str, Any],
    wait: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run ``daskrr update``."""
    refuse_file(points)
    # Mistakes should be told, and finished work found, before a cluster is started.
    summary = updating.up_to_date(points, output)
    if summary is not None:
        emit(summary, as_json, wording.unchanged)
        return
    with told(quiet), clusters.connect(**cluster, echo=silence if quiet else None):
        summary = updating.update_scores(
            points, output, refresh=refresh, wait=wait, allow_functions=allow_function, progress=not quiet
        )
    emit(summary, as_json, wording.update)


def apply(
    sketch: str,
    points: str,
    output: str,
    missing_chunks: str | None,
    allow_function: Sequence[str],
    cluster: Mapping[str, Any],
    wait: bool,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run ``daskrr apply``."""
    refuse_file(points)
    given: dict[str, Any] = {"overwrite": overwrite, "allow_functions": allow_function}
    given["missing_chunks"] = missing_chunks or "refuse"
    # Mistakes should be told, and finished work found, before a cluster is started.
    summary = applying.already_applied(sketch, points, output, **given)
    if summary is None:
        with told(quiet), clusters.connect(**cluster, echo=silence if quiet else None):
            summary = applying.apply_sketch(sketch, points, output, wait=wait, progress=not quiet, **given)
    emit(summary, as_json, wording.application)


def status(output: str, as_json: bool) -> None:
    """Run ``daskrr status``."""
    emit(outputs.status(output), as_json, wording.status)


def verify(output: str, as_json: bool) -> None:
    """Run ``daskrr verify``."""
    damage = outputs.verify(output)
    emit({"output": output, "damage": damage}, as_json, wording.verification)
    if damage:
        raise errors.CheckFailed(f"{output} is not what was written: {len(damage)} of its parts differ")


def top(scores: str, count: int, by: str, ridge: float | None, as_json: bool) -> None:
    """Run ``daskrr top``."""
    rows = scoring.top_rows(scores, count, by=by, ridge=ridge)
    emit({"by": by, "rows": rows}, as_json, wording.top)


def report(scores: str, output: str, overwrite: bool, as_json: bool, quiet: bool) -> None:
    """Run ``daskrr report``."""
    with told(quiet):
        summary = write_report(scores, output, overwrite=overwrite, progress=not quiet)
    emit(summary, as_json, wording.report)


def sample(
    scores: str,
    output: str,
    size: int,
    points: str | None,
    ridge: float | None,
    random_state: int | None,
    cluster: Mapping[str, Any],
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run ``daskrr sample``."""
    if points is not None:
        refuse_file(points)
    elsewhere = any(cluster.values())
    where = clusters.connect(**cluster, echo=silence if quiet else None) if elsewhere else nullcontext()
    with told(quiet), where:
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
    emit(summary, as_json, wording.sample)


def plan(
    points: str, kernel: Mapping[str, Any], model: Mapping[str, Any], cluster: Mapping[str, Any], as_json: bool
) -> None:
    """Run ``daskrr plan``."""
    refuse_file(points)
    workers = cluster["workers"] or clusters.CPU_COUNT
    made = make_plan(points, make_kernel(kernel), workers=workers, **model_arguments(model))
    emit(made.to_dict() if as_json else made, as_json, str)
