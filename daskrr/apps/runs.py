"""Running job files: what there is to do, and doing it again after failures that may pass."""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed import KilledWorker
from distributed.comm.core import CommClosedError

from daskrr import outputs, scoring, updating
from daskrr.apps import clusters, wording
from daskrr.apps.commands import check_memory
from daskrr.apps.jobfile import Commands, JobFile, read
from daskrr.apps.telling import emit, failure, silence, told
from daskrr.engine.addresses import redact
from daskrr.engine.plan import Plan
from daskrr.engine.progress import duration
from daskrr.errors import InputGrown, InvalidParameter, SourceUnreachable, StoreFailed, UnreadableData
from daskrr.leverage import plan as make_plan

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
    as_json: bool,
    quiet: bool,
) -> None:
    """Run ``daskrr run``."""
    with told(quiet):
        job = read(Path(path), commands, cluster)
        if check:
            emit(_outlook(job, overwrite, as_json), as_json, wording.outlook)
            return
        summary = persistently(lambda: _carry_out(job, overwrite, wait, quiet), **job.retries)
    describe = {"nothing": wording.unchanged, "update": wording.update}.get(summary["action"], wording.scores)
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


def _carry_out(job: JobFile, overwrite: bool, wait: bool, quiet: bool) -> dict[str, Any]:
    """Do once what there is to do; the summary of the scores, and what was done."""
    _plan(job)
    task = _task(job, overwrite)
    log.info("%s: %s, since %s", job.path, task.action, task.reason)
    if task.summary is not None:
        return {"action": task.action, **task.summary}
    how: dict[str, Any] = {"wait": wait, "progress": not quiet}
    with clusters.connect(**job.cluster, echo=silence if quiet else None):
        if task.action == "update":
            summary = updating.update_scores(job.points, job.output, **job.update, **how)
        else:
            summary = scoring.score_to_zarr(
                job.points, job.output, job.kernel, overwrite=task.overwrite, **how, **job.arguments
            )
    return {"action": task.action, **summary}


def _task(job: JobFile, overwrite: bool) -> Task:
    try:
        done = scoring.published(job.points, job.output, job.kernel, overwrite=overwrite, **job.arguments)
    except InputGrown:
        if outputs.status(job.output)["published"] is None:
            return Task("score", "the input has more rows than when the unfinished job was begun", overwrite=True)
        return Task("update", "the input has more rows than were scored")
    if done is not None:
        return Task("nothing", "input and job are those of the scores that are there", summary=done)
    if overwrite:
        return Task("score", "what is there shall be replaced", overwrite)
    if outputs.status(job.output)["unfinished"]:
        return Task("resume", "a job was stopped before it was done")
    return Task("score", "there are no scores yet")


def _plan(job: JobFile) -> Plan:
    """What the job costs at most; the mistakes that only show next to the input are found here."""
    workers = job.cluster["workers"] or (clusters.CPU_COUNT if clusters.is_local(job.cluster["cluster"]) else None)
    try:
        made = make_plan(job.points, job.kernel, workers=workers, **job.arguments)
    except InvalidParameter as error:
        raise InvalidParameter(f"the job file {job.path} has a mistake\n  {error}") from error
    check_memory(made, job.cluster["memory_limit"])
    return made


def _outlook(job: JobFile, overwrite: bool, as_json: bool) -> dict[str, Any]:
    plan, task = _plan(job), _task(job, overwrite)
    lease = outputs.status(job.output)["lease"]
    return {
        "job": str(job.path),
        "input": redact(job.points),
        "output": redact(job.output),
        "action": task.action,
        "reason": task.reason,
        "lease": lease if lease is not None and lease["held"] and not lease["dead"] else None,
        "plan": plan.to_dict() if as_json else str(plan),
    }
