"""Running job files: what there is to do, and doing it again after failures that may pass."""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distributed import KilledWorker
from distributed.comm.core import CommClosedError

from daskrr.apps import clusters, text
from daskrr.apps.cli.commands import check_memory
from daskrr.apps.cli.jobfile import Commands, JobFile, read
from daskrr.apps.cli.telling import emit, failure, silence, told
from daskrr.apps.convert.likeness import is_a_table, stored_points
from daskrr.errors import InputGrown, InvalidParameter, SourceUnreachable, StoreFailed, UnreadableData
from daskrr.jobs import Job, reader, update
from daskrr.leverage.plan import Workers
from daskrr.leverage.problem import state_problem
from daskrr.runtime.progress import duration
from daskrr.storage.urls import redact

log = logging.getLogger("daskrr")

# A lost scheduler shows as a cancelled future or as a closed connection.
_OF_DASK = (KilledWorker, CommClosedError, CancelledError)
MAY_PASS = (SourceUnreachable, StoreFailed, UnreadableData, *_OF_DASK, ConnectionError, TimeoutError)


@dataclass(frozen=True)
class Task:
    """What there is to do now: ``score``, ``resume``, ``update`` or ``nothing``, and why."""

    action: str
    reason: str
    overwrite: bool = False
    summary: dict[str, Any] | None = None


def run(
    commands: Commands,
    path: str,
    check: bool,
    cluster: Mapping[str, Any],
    overwrite: bool,
    wait: bool,
    keep: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run ``daskrr run``."""
    with told(quiet):
        job = read(Path(path), commands, cluster)
        if check:
            emit(_outlook(job, overwrite, as_json), as_json, text.outlook)
            return
        summary = persistently(lambda: _carry_out(job, overwrite, wait, keep, quiet), **job.retries)
    describe = {"nothing": text.unchanged, "update": text.update}.get(summary["action"], text.scores)
    emit(summary, as_json, describe)


def persistently(work: Callable[[], Any], attempts: int, wait: float) -> Any:
    """Do something again after failures that may pass, with longer and longer breaks between."""
    for attempt in range(1, attempts):
        try:
            return work()
        except MAY_PASS as error:
            log.warning(
                "attempt %d of %d failed, the next begins in %s: %s",
                attempt,
                attempts,
                duration(wait),
                redact(failure(error)[0]),
            )
            time.sleep(wait)
            wait *= 2
    return work()


def _carry_out(job: JobFile, overwrite: bool, wait: bool, keep: int, quiet: bool) -> dict[str, Any]:
    """Do once what there is to do; the summary of the scores, and what was done."""
    job = _converted(job)
    scores = _stated(job)
    task = _task(scores, overwrite)
    log.info("%s: %s, since %s", job.path, task.action, task.reason)
    if task.summary is not None:
        return {"action": task.action, **task.summary}
    how: dict[str, Any] = {"wait": wait, "keep": keep, "progress": not quiet}
    with clusters.connect(**job.cluster, echo=silence if quiet else None):
        if task.action == "update":
            summary = update.update_scores(job.points, job.output, **job.update, **how)
        else:
            summary = scores.run(overwrite=task.overwrite, **how)
    return {"action": task.action, **summary}


def _task(job: Job, overwrite: bool) -> Task:
    try:
        done = job.published(overwrite)
    except InputGrown:
        if reader.standing(job.output)["published"] is None:
            return Task("score", "the input has more rows than when the unfinished job was begun", overwrite=True)
        return Task("update", "the input has more rows than were scored")
    if done is not None:
        return Task("nothing", "input and job are those of the scores that are there", summary=done)
    if overwrite:
        return Task("score", "what is there shall be replaced", overwrite)
    if reader.standing(job.output)["unfinished"]:
        return Task("resume", "a job was stopped before it was done")
    return Task("score", "there are no scores yet")


def _converted(job: JobFile) -> JobFile:
    """The job with the store of its table, made or made longer now, if its input is one."""
    if not is_a_table(job.points):
        return job
    return replace(job, points=stored_points(job.points, job.output, progress=False, **job.table))


def _stated(job: JobFile) -> Job:
    """The job that a file describes; the mistakes that only show next to the input are found here."""
    workers = job.cluster["workers"] or (clusters.CPU_COUNT if clusters.is_local(job.cluster["cluster"]) else None)
    try:
        problem = state_problem(job.points, job.kernel, **job.arguments)
    except InvalidParameter as error:
        raise InvalidParameter(f"the job file {job.path} has a mistake", str(error)) from error
    if workers is not None:
        problem = problem.planned(Workers.embedded(workers))
    check_memory(problem.plan, job.cluster["memory_limit"])
    return Job.of(problem, job.output)


def _outlook(job: JobFile, overwrite: bool, as_json: bool) -> dict[str, Any]:
    job = _converted(job)
    scores = _stated(job)
    plan, task = scores.problem.plan, _task(scores, overwrite)
    lease = reader.standing(job.output)["lease"]
    return {
        "job": str(job.path),
        "input": redact(job.points),
        "output": redact(job.output),
        "action": task.action,
        "reason": task.reason,
        "lease": lease if lease is not None and lease["held"] and not lease["dead"] else None,
        "plan": plan.to_dict() if as_json else str(plan).splitlines(),
    }
