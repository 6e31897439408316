"""What the commands do: read options, run the library and emit results, worded by :mod:`daskrr.apps.text`.

The function of a command takes its options by the names that :mod:`daskrr.apps.cli` gives them. Results go to
standard output, everything else to standard error.
"""

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import click
import numpy as np

from daskrr import errors, jobs
from daskrr.apps import clusters, table_text, text
from daskrr.apps import convert as conversion
from daskrr.apps.cli import automatic
from daskrr.apps.cli.parsing import make_kernel, model_arguments, refuse_file, table_arguments
from daskrr.apps.cli.telling import emit, silence, told
from daskrr.apps.convert.likeness import features_at, is_a_table, stored_points
from daskrr.apps.report import write_report
from daskrr.jobs import new_rows, reader, row_sample, verification
from daskrr.jobs.export import export_scores
from daskrr.jobs.update import up_to_date, update_scores
from daskrr.kernels import Kernel
from daskrr.leverage import plan as make_plan
from daskrr.leverage.plan import Plan, Workers, check_fits
from daskrr.leverage.problem import state_problem


def convert(
    source: str,
    target: str,
    table: Mapping[str, Any],
    like: str | None,
    append: bool,
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
        standardize=standardize,
        like=None if like is None else features_at(like),
        append=append,
        key=array,
        dtype=_dtype(dtype),
        delimiter=delimiter,
        header=header,
        overwrite=overwrite,
        progress=not quiet,
        **table_arguments(table),
    )
    emit(summary, as_json, table_text.conversion)


def _dtype(name: str | None) -> np.dtype[Any] | None:
    try:
        return None if name is None else np.dtype(name)
    except TypeError as error:
        raise errors.InvalidParameter(f"{name!r} is no type of numbers; one is float32") from error


def score(
    points: str,
    output: str | None,
    kernel: Mapping[str, Any],
    model: Mapping[str, Any],
    table: Mapping[str, Any],
    cluster: Mapping[str, Any],
    wait: bool,
    keep: int,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run ``daskrr score``."""
    asked, arguments = make_kernel(kernel), model_arguments(model)
    output = output or automatic.default_output(points)
    with told(quiet):
        stored = points_given(points, output, table, overwrite, quiet)
        chosen, found = asked, None
        if "ridge" not in arguments:
            chosen, arguments, found = automatic.choose(stored, asked, arguments, is_ours=stored != points)
    # Mistakes should be told, and finished work found, before a cluster is started.
    problem = state_problem(stored, chosen, **arguments)
    check_memory(problem.plan, cluster["memory_limit"])
    expected = problem.planned(Workers.embedded(cluster["workers"] or clusters.CPU_COUNT)).plan.seconds()
    job = jobs.Job.of(problem, output)
    summary = job.published(overwrite)
    if summary is None:
        if found is not None and not quiet:
            click.echo(table_text.choices(found, expected), err=True)
        with told(quiet), clusters.connect(**cluster, echo=silence if quiet else None):
            summary = job.run(overwrite=overwrite, wait=wait, keep=keep, progress=not quiet)
    if found is None:
        emit(summary, as_json, text.scores)
        return
    told_more = automatic.concluded(stored, output, chosen, arguments, quiet)
    told_more |= {"choices": found, "expected_seconds": expected}
    emit(summary | told_more, as_json, lambda one: table_text.scored(one, text.scores(one, with_rows=False)))


def points_given(points: str, output: str, table: Mapping[str, Any], overwrite: bool, quiet: bool) -> str:
    """The store of points: as it is, or made of a table beside the output."""
    options = table_arguments(table)
    if is_a_table(points):
        return stored_points(points, output, overwrite=overwrite, progress=not quiet, **options)
    refuse_file(points)
    if options:
        raise errors.InvalidParameter(f"--{next(iter(options))} is about tables, and {points} is none")
    return points


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
    keep: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run ``daskrr update``."""
    refuse_file(points)
    # Mistakes should be told, and finished work found, before a cluster is started.
    summary = up_to_date(points, output)
    if summary is not None:
        emit(summary, as_json, text.unchanged)
        return
    with told(quiet), clusters.connect(**cluster, echo=silence if quiet else None):
        summary = update_scores(
            points, output, refresh=refresh, wait=wait, keep=keep, allow_functions=allow_function, progress=not quiet
        )
    emit(summary, as_json, text.update)


def apply(
    sketch: str,
    points: str,
    output: str,
    missing_chunks: str | None,
    already_scaled: bool,
    allow_function: Sequence[str],
    cluster: Mapping[str, Any],
    wait: bool,
    keep: int,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run ``daskrr apply``."""
    points = like_points(points, output, sketch, overwrite, quiet)
    given: dict[str, Any] = {
        "overwrite": overwrite,
        "allow_functions": allow_function,
        "already_scaled": already_scaled,
    }
    given["missing_chunks"] = missing_chunks or "refuse"
    # Mistakes should be told, and finished work found, before a cluster is started.
    summary = new_rows.already_applied(sketch, points, output, **given)
    if summary is None:
        with told(quiet), clusters.connect(**cluster, echo=silence if quiet else None):
            summary = new_rows.apply_sketch(sketch, points, output, wait=wait, keep=keep, progress=not quiet, **given)
    emit(summary, as_json, text.application)


def like_points(points: str, output: str, fitted: str, overwrite: bool, quiet: bool) -> str:
    """The store of new points: as it is, or made of a table as those were that something was fitted to."""
    if not is_a_table(points):
        refuse_file(points)
        return points
    with told(quiet):
        return stored_points(points, output, like=features_at(fitted), overwrite=overwrite, progress=not quiet)


def status(output: str, as_json: bool) -> None:
    """Run ``daskrr status``."""
    emit(reader.status(output), as_json, text.status)


def rollback(output: str, generation: str | None, wait: bool, as_json: bool) -> None:
    """Run ``daskrr rollback``."""
    emit({"output": output, **reader.rollback(output, generation, wait)}, as_json, text.rollback)


def verify(output: str, repair: bool, wait: bool, as_json: bool) -> None:
    """Run ``daskrr verify``."""
    repaired = verification.repair(output, wait) if repair else []
    damage = verification.verify(output)
    emit({"output": output, "repaired": repaired, "damage": damage}, as_json, text.verification)
    if damage:
        raise errors.CheckFailed(f"{output} is not what was written: {len(damage)} of its parts differ")


def top(scores: str, count: int, by: str, points: str | None, ridge: float | None, as_json: bool) -> None:
    """Run ``daskrr top``."""
    rows = jobs.top_rows(scores, count, by=by, ridge=ridge)
    rows = automatic.named_rows(scores, rows) if points is None else automatic.highest_rows(scores, rows, points)
    emit({"by": by, "rows": rows}, as_json, table_text.top)


def export(
    scores: str, target: str, points: str | None, values: bool, overwrite: bool, as_json: bool, quiet: bool
) -> None:
    """Run ``daskrr export``."""
    summary = export_scores(
        scores, target, points=points, values=values, overwrite=overwrite, progress=not quiet
    )  # fmt: skip
    emit(summary, as_json, table_text.export)


def report(scores: str, output: str, overwrite: bool, as_json: bool, quiet: bool) -> None:
    """Run ``daskrr report``."""
    with told(quiet):
        summary = write_report(scores, output, overwrite=overwrite, progress=not quiet)
    emit(summary, as_json, text.report)


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
        drawn = row_sample.sample_rows(
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
        "sum_of_weights": float(drawn.weights.sum()),
        "random_state": drawn.random_state,
        "output": output,
    }
    emit(summary, as_json, text.sample)


def plan(
    points: str,
    kernel: Mapping[str, Any],
    model: Mapping[str, Any],
    table: Mapping[str, Any],
    cluster: Mapping[str, Any],
    as_json: bool,
) -> None:
    """Run ``daskrr plan``."""
    chosen, arguments = make_kernel(kernel), model_arguments(model)
    with clusters.configured(cluster["device"]), tempfile.TemporaryDirectory() as folder:
        workers = cluster["workers"] or clusters.default_workers()
        stored = points_given(points, f"{folder}/output", table, overwrite=False, quiet=True)
        _plan(stored, chosen, arguments, workers, as_json, shown=points)


def _plan(points: str, chosen: Kernel, arguments: dict[str, Any], workers: int, as_json: bool, shown: str) -> None:
    if "ridge" in arguments:
        made = make_plan(points, chosen, workers=workers, **arguments)
        emit(made.to_dict() if as_json else made, as_json, str)
        return
    emit(automatic.outlook(points, chosen, arguments, workers, shown), as_json, table_text.outlook)
