"""Scoring jobs on storage: begun once, continued wherever they were stopped, and published whole.

The output OUT is a Zarr group. What a job has finished is under OUT/.daskrr: a lease, so that two jobs never share an
output, and a *generation* for every begun job, with its parameters, its journal and its arrays. When all rows are there
and the checks hold, the arrays are moved into the group, its metadata last, and a commit record says so.
"""

import json
import logging
import math
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from daskrr.arguments import Job, Options, prepare
from daskrr.engine.folder import sync_folder
from daskrr.engine.journal import Journal
from daskrr.engine.lease import Lease
from daskrr.engine.progress import Event, Reporter, reporter
from daskrr.engine.records import Records
from daskrr.engine.rows import NumpyRows, Rows, ZarrRows, redact
from daskrr.engine.storage import FORMAT, RESULT_KEY, OutputStore, checksum, create_arrays
from daskrr.errors import (
    CheckFailed,
    DoesNotFit,
    InvalidData,
    InvalidParameter,
    KernelNotPositive,
    OutputExists,
    RidgeTooSmall,
    SourceChanged,
)
from daskrr.fitting import versions
from daskrr.leverage import score_job
from daskrr.result import LeverageResult, Receipt

log = logging.getLogger("daskrr")

STATE = ".daskrr"
COMMIT = "commit"
METADATA = "zarr.json"
SECONDS_BETWEEN_NOTES = 2.0


@dataclass(frozen=True)
class JobStore:
    """The state of the jobs of one local output."""

    target: Path

    @property
    def state(self) -> Path:
        """The folder of all that is not published."""
        return self.target / STATE

    @property
    def records(self) -> Records:
        """Its records."""
        return Records(self.state / "records")

    def journal(self, generation: str) -> Journal:
        """What a generation has finished."""
        return Journal(self.records, generation)

    def arrays(self, generation: str) -> Path:
        """Where a generation's arrays are until they are published."""
        return self.state / f"arrays-{generation}"

    def job(self, generation: str) -> dict[str, Any] | None:
        """Parameters of a generation that was begun."""
        return self.records.read(f"{generation}/job")

    @property
    def unfinished(self) -> list[str]:
        """Generations that were begun and not committed, oldest first."""
        found = {name.split("/")[0] for name in self.records.names() if name.endswith("/job")}
        return sorted(found - {(self.committed or {}).get("generation")})

    @property
    def committed(self) -> dict[str, Any] | None:
        """The commit record, if anything was published."""
        return self.records.read(COMMIT)

    def discard(self, generation: str) -> None:
        """Forget a generation."""
        self.records.delete(generation + "/")
        shutil.rmtree(self.arrays(generation), ignore_errors=True)

    def publish(self, generation: str, commit: Mapping[str, Any]) -> None:
        """Move the arrays of a generation into the output, metadata last, and commit; it can be finished if stopped."""
        self.records.write(f"{generation}/publish", commit)
        self.finish_publishing(generation)

    def finish_publishing(self, generation: str) -> None:
        """Carry out what was decided, if anything was; only for who holds the lease.

        Every step is harmless if it was done before.
        """
        commit = self.records.read(f"{generation}/publish")
        if commit is None:
            return
        staged, retired = self.arrays(generation), self.state / f"retired-{generation}"
        retired.mkdir(exist_ok=True)
        if (staged / METADATA).exists():
            # Without its metadata the group is none, so that nobody reads a mixture of two generations.
            for name in sorted({path.name for path in self.target.iterdir()} - {STATE}, key=METADATA.__ne__):
                if name not in commit["digests"] or (staged / name).exists():
                    os.replace(self.target / name, retired / name)
            for name in [*commit["digests"], METADATA]:
                if (staged / name).exists():
                    os.replace(staged / name, self.target / name)
        sync_folder(self.target)
        self.records.write(COMMIT, commit)
        shutil.rmtree(retired, ignore_errors=True)
        for old in [*self.unfinished, generation]:
            self.discard(old)


def parameters_of(job: Job, options: Options) -> dict[str, Any]:
    """What makes two jobs the same: the kernel, the ridges, every option, and the input."""
    given = {one.name: getattr(options, one.name) for one in fields(options)}
    given["sampling"] = _described(job.scheme.sampling)
    given["dtype"] = str(job.settings.dtype)
    return {
        "kernel": job.settings.kernel.to_spec(),
        "ridges": list(job.settings.ridges),
        "single": job.settings.single,
        "n_landmarks": job.scheme.size,
        "options": given,
        "input": {
            "origin": job.rows.origin,
            "shape": list(job.rows.shape),
            "dtype": str(job.rows.dtype),
            "fingerprint": fingerprint(job.rows),
        },
    }


def _described(sampling: Any) -> Any:
    if isinstance(sampling, str):
        return sampling
    if isinstance(sampling, Rows):
        return {"origin": sampling.origin, "fingerprint": fingerprint(sampling)}
    return {"indices": checksum(sampling)}


def fingerprint(rows: Rows) -> str | None:
    """What changes if the rows do: names, sizes and times of stored chunks, or a checksum; None if nothing tells."""
    if isinstance(rows, NumpyRows):
        return f"crc32 {checksum(rows.array):08x}"
    root = getattr(getattr(rows.array, "store", None), "root", None) if isinstance(rows, ZarrRows) else None
    if root is None or not isinstance(rows, ZarrRows):
        return None
    found = 0
    for path in sorted(_files(Path(root) / rows.array.path)):
        about = path.stat()
        found = zlib.crc32(f"{path} {about.st_size} {about.st_mtime_ns}".encode(), found)
    return f"files {found:08x}"


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def score_durably(
    X: Any,
    output: Path,
    kernel: Any,
    ridge: Any,
    n_landmarks: int | None,
    options: Options,
    *,
    overwrite: bool,
    wait: bool,
    progress: Any,
) -> dict[str, Any]:
    """Begin or continue the job of an output, or find that it is done; the summary that is stored with the result."""
    store = JobStore(output)
    job, wanted = _wanted(X, kernel, ridge, n_landmarks, options)
    done = check(store, wanted, overwrite)
    if done is not None:
        return done
    lease = Lease(store.records)
    number = lease.acquire(wait)
    with lease, _swept(store):
        # The one who held it before may have got further, and may have died while it published.
        for generation in store.unfinished:
            store.finish_publishing(generation)
        done = check(store, wanted, overwrite)
        if done is not None:
            return done
        generation, seed = _begin(store, wanted, job, number)
        job = prepare(X, kernel, ridge, n_landmarks, replace(options, random_state=seed))
        with _kept_unless_hopeless(store, generation), reporter(progress) as report:
            return _carry_out(store, generation, wanted, job, lease, Noted(store.records, generation, report))


def find_published(
    X: Any, output: Path, kernel: Any, ridge: Any, n_landmarks: int | None, options: Options, overwrite: bool
) -> dict[str, Any] | None:
    """The summary of what is published, if it is what this job would publish; else what stands in its way is raised."""
    return check(JobStore(output), _wanted(X, kernel, ridge, n_landmarks, options)[1], overwrite)


def _wanted(X: Any, kernel: Any, ridge: Any, n_landmarks: int | None, options: Options) -> tuple[Job, dict[str, Any]]:
    job = prepare(X, kernel, ridge, n_landmarks, options)
    return job, json.loads(json.dumps(parameters_of(job, options), default=lambda number: number.item()))


def check(store: JobStore, wanted: dict[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """The summary of what is published already, if it is what is wanted.

    Raises
    ------
    OutputExists
        Something else is there, and may not be replaced.
    """
    committed = store.committed
    if committed is None:
        if not store.state.is_dir():
            OutputStore(store.target, overwrite)
        _check_unfinished(store, wanted, overwrite)
        return None
    if overwrite:
        return None
    if committed["parameters"] == wanted and wanted["input"]["fingerprint"] is not None:
        return committed["summary"] | {"output": str(store.target)}
    raise OutputExists(f"{store.target} holds {_difference(committed['parameters'], wanted)}")


def _check_unfinished(store: JobStore, wanted: dict[str, Any], overwrite: bool) -> None:
    for generation in store.unfinished:
        begun = (store.job(generation) or {}).get("parameters")
        if not overwrite and begun is not None and begun != wanted:
            raise OutputExists(f"{store.target} holds an unfinished job: {_difference(begun, wanted)}")


def _difference(known: dict[str, Any], wanted: dict[str, Any]) -> str:
    """What differs, in words."""
    advice = "Pass overwrite=True (--overwrite) to replace it, or name another output."
    before, now = known["input"], wanted["input"]
    if {**known, "input": None} == {**wanted, "input": None} and before["origin"] == now["origin"]:
        if now["shape"][0] > before["shape"][0]:
            return f"scores of {before['shape'][0]} rows of {now['origin']}, which has {now['shape'][0]} now. {advice}"
        return f"scores of {before['origin']} as it was, and it has changed since. {advice}"
    names = [name for name in wanted if known.get(name) != wanted[name]]
    return f"scores with another {', '.join(names) or 'input that cannot be told from this one'}. {advice}"


def _begin(store: JobStore, wanted: dict[str, Any], job: Job, number: int) -> tuple[str, int]:
    """The generation to work on, and its seed: an unfinished one with these parameters, or a new one.

    No two have one name, so that what a worker still writes of an earlier one harms nobody.
    """
    now = versions()
    for earlier in reversed(store.unfinished):
        begun = store.job(earlier)
        if begun is not None and begun["parameters"] == wanted and wanted["input"]["fingerprint"] is not None:
            if begun["versions"] == now:
                return earlier, begun["seed"]
            log.warning("the unfinished job was begun with %s, and starts over with %s", begun["versions"], now)
        store.discard(earlier)
    generation = f"{number:06d}-{uuid.uuid4().hex[:8]}"
    about = {"parameters": wanted, "seed": job.scheme.seed, "block_rows": job.plan.block_rows, "versions": now}
    # As a group, it does not astonish those who list the output with Zarr.
    zarr.open_group(store.state, mode="a")
    store.records.write(f"{generation}/job", about)
    return generation, job.scheme.seed


@contextmanager
def _swept(store: JobStore) -> Iterator[None]:
    """Leave nothing behind where there is nothing to go on with."""
    try:
        yield
    finally:
        if store.committed is None and not store.unfinished:
            shutil.rmtree(store.state, ignore_errors=True)
            with suppress(OSError):
                store.target.rmdir()


@contextmanager
def _kept_unless_hopeless(store: JobStore, generation: str) -> Iterator[None]:
    """Forget a job that will fail again, since its input or parameters are at fault; keep any other for another try."""
    try:
        yield
    except (CheckFailed, InvalidData, InvalidParameter, KernelNotPositive, RidgeTooSmall, SourceChanged, DoesNotFit):
        store.discard(generation)
        raise
    except Exception as error:
        store.records.write(f"{generation}/error", {"text": redact(f"{type(error).__name__}: {error}")})
        raise


class Noted:
    """A reporter that also notes on storage where the job is, so that others can ask."""

    def __init__(self, records: Records, generation: str, report: Reporter) -> None:
        self._records, self._name, self._report = records, f"{generation}/progress", report
        self._next = -math.inf

    def __call__(self, event: Event) -> None:
        """Pass the event on, and note it now and then."""
        self._report(event)
        if event.ended or time.monotonic() >= self._next:
            self._next = time.monotonic() + SECONDS_BETWEEN_NOTES
            self._records.write(self._name, asdict(event) | {"at": time.time()})


def _carry_out(
    store: JobStore, generation: str, wanted: dict[str, Any], job: Job, lease: Lease, report: Reporter
) -> dict[str, Any]:
    """Both passes, each from where it was, and the commit."""
    journal = store.journal(generation)
    result = score_job(job, report, journal)
    group = _staged(store.arrays(generation), result)
    arrays: dict[str, Any] = {name: group[name] for name in result.shapes}
    summary, receipts = result.write(arrays, report, journal)
    if fingerprint(job.rows) != wanted["input"]["fingerprint"]:
        raise SourceChanged(f"{job.rows.origin} changed while it was scored. Nothing was published; score it again.")
    lease.check()
    summary["checkpoints"] = _checkpoints(store.state / "records" / generation)
    about: Any = {"format": FORMAT, "kind": "scores", "generation": generation} | summary
    group.attrs[RESULT_KEY] = about
    store.publish(generation, _commit(generation, wanted, summary, receipts, result))
    return summary | {"output": str(store.target)}


def _checkpoints(folder: Path) -> dict[str, int]:
    """How many records a generation has, and their bytes."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return {"records": len(sizes), "bytes": sum(sizes)}


def _staged(path: Path, result: LeverageResult) -> zarr.Group:
    """The arrays of a generation, created when they are first needed."""
    if not (path / "zarr.json").exists():
        shutil.rmtree(path, ignore_errors=True)
        create_arrays(path, result.shapes, result.plan.block_rows)
    return zarr.open_group(path, mode="r+")


def _commit(
    generation: str, wanted: dict[str, Any], summary: dict[str, Any], receipts: list[Receipt], result: LeverageResult
) -> dict[str, Any]:
    digests = {name: np.array([one.digests[name] for one in receipts], np.uint32) for name in result.shapes}
    return {
        "generation": generation,
        "parameters": wanted,
        "summary": json.loads(json.dumps(summary)),
        "block_rows": result.plan.block_rows,
        "digests": digests,
    }
