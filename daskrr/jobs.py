"""Scoring jobs on storage: begun once, continued wherever they were stopped, and published whole."""

import json
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from daskrr.arguments import Options, prepare
from daskrr.engine.addresses import redact
from daskrr.engine.feed import note, reporter
from daskrr.engine.journal import Journal
from daskrr.engine.lease import Lease
from daskrr.engine.passes import Executor
from daskrr.engine.places import Staged
from daskrr.engine.plan import Plan
from daskrr.engine.progress import Event, Reporter
from daskrr.engine.records import Records
from daskrr.engine.rows import Rows
from daskrr.engine.storage import OutputStore
from daskrr.errors import (
    CheckFailed,
    DoesNotFit,
    InputGrown,
    InvalidData,
    InvalidParameter,
    KernelNotPositive,
    LeaseLost,
    OutputExists,
    RidgeTooSmall,
    SourceChanged,
    StoreFailed,
    UnreadableData,
)
from daskrr.fitting import versions
from daskrr.identity import difference, fingerprint, has_grown, is_same, parameters_of
from daskrr.jobstore import BASE, JobStore, StagedGroup
from daskrr.leverage import score_job
from daskrr.receipts import Receipt, sum_counts

log = logging.getLogger("daskrr")

SECONDS_BETWEEN_NOTES = 2.0
ADVICE = "Pass overwrite=True (--overwrite) to replace it, or name another output."


def score_durably(
    X: Any,
    output: str,
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
    job = prepare(X, kernel, ridge, n_landmarks, options)
    wanted = parameters_of(job, options)
    done = check(store, wanted, overwrite)
    if done is not None:
        return done
    with at_work(store, wait) as lease:
        done = check(store, wanted, overwrite)
        if done is not None:
            return done
        generation, seed = begin(store, lease, wanted, job, "score")
        job = prepare(X, kernel, ridge, n_landmarks, replace(options, random_state=seed))
        with reporter(progress) as report, Work(store, generation, lease, wanted, seed, report) as work:
            return work.publish(score_job(job, work.report, work.journal))


def find_published(
    X: Any, output: str, kernel: Any, ridge: Any, n_landmarks: int | None, options: Options, overwrite: bool
) -> dict[str, Any] | None:
    """The summary of what is published, if it is what this job would publish; else what stands in its way is raised."""
    wanted = parameters_of(prepare(X, kernel, ridge, n_landmarks, options), options)
    return check(JobStore(output), wanted, overwrite)


def check(store: JobStore, wanted: dict[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """The summary of what is published already, if it is what is wanted.

    Raises
    ------
    OutputExists
        Something else is there, and may not be replaced; InputGrown if only rows were appended.
    """
    committed = store.committed
    if committed is None:
        try:
            OutputStore(store.target, overwrite)
        except OutputExists:
            if not store.is_of_a_job:
                raise
        for generation in [] if overwrite else store.unfinished:
            begun = store.job(generation)["parameters"]
            if begun != wanted:
                kind = InputGrown if has_grown(begun, wanted) else OutputExists
                raise kind(f"{store} holds an unfinished job: {difference(begun, wanted)}. {ADVICE}")
        return None
    if overwrite or store.is_exchanging:
        return None
    known = committed["parameters"]
    if is_same(known, wanted):
        return summary_of(store, committed)
    found = f"{store} holds {difference(known, wanted)}."
    if has_grown(known, wanted):
        raise InputGrown(f"{found} Score the new rows with daskrr.update_scores (daskrr update). {ADVICE}")
    raise OutputExists(f"{found} {ADVICE}")


def summary_of(store: JobStore, committed: Mapping[str, Any]) -> dict[str, Any]:
    """What is told of published scores."""
    return committed["summary"] | {"output": str(store)}


@contextmanager
def at_work(store: JobStore, wait: bool) -> Iterator[Lease]:
    """Hold the lease of an output, on which nothing is left half published; leave nothing behind without use."""
    lease = Lease(store.records)
    lease.acquire(wait)
    with lease:
        try:
            for generation in store.unfinished:
                store.finish_publishing(generation, lease.check)
            yield lease
        finally:
            with suppress(LeaseLost):
                lease.check()
                store.clear()


class Beginning(Protocol):
    """What a job is begun with."""

    @property
    def rows(self) -> Rows: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def executor(self) -> Executor: ...
    @property
    def seed(self) -> int: ...


def begin(store: JobStore, lease: Lease, wanted: dict[str, Any], job: Beginning, kind: str) -> tuple[str, int]:
    """The generation to work on, and its seed: an unfinished one of this kind with these parameters, or a new one.

    No two have one name, so that what a worker still writes of an earlier one harms nobody.
    """
    committed = {(store.committed or {}).get("generation", ""): BASE}
    found = unfinished(store, wanted, kind)
    job.executor.check(job.rows)
    if found is not None:
        store.sweep({**committed, found: ""})
        _note_processors(store.journal(found), job.executor)
        return found, store.job(found)["seed"]
    store.sweep(committed)
    generation = f"{lease.generation:06d}-{uuid.uuid4().hex[:8]}"
    about = {"parameters": wanted, "kind": kind, "seed": job.seed, "block_rows": job.plan.block_rows}
    store.begin(generation, about | {"versions": versions()})
    _note_processors(store.journal(generation), job.executor)
    return generation, job.seed


def _note_processors(journal: Journal, executor: Executor) -> None:
    """Record on what kinds of processors a job was computed; whoever goes on with another is told."""
    now = executor.workers["processors"]
    known = (journal.read_one("processors") or {"kinds": now})["kinds"]
    if set(known) != set(now):
        log.warning(
            "the job was begun on %s and goes on on %s: last bits may differ from those of one kind of processor",
            " and ".join(known), " and ".join(now),
        )  # fmt: skip
    journal.write_one("processors", {"kinds": sorted({*known, *now})})


def unfinished(store: JobStore, wanted: dict[str, Any], kind: str) -> str | None:
    """The generation that can be continued, if any."""
    now = versions()
    for generation in reversed(store.unfinished):
        begun = store.job(generation)
        if begun["kind"] == kind and is_same(begun["parameters"], wanted):
            if begun["versions"] == now:
                return generation
            log.warning("the unfinished job was begun with %s, and starts over with %s", begun["versions"], now)
    return None


class Publishable(Protocol):
    """Scores that can be written block by block, and published when all are there."""

    @property
    def rows(self) -> Rows: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def write(
        self, staged: Staged, report: Reporter, journal: Journal, since: int = 0
    ) -> tuple[dict[str, Any], list[Receipt]]:
        """Write what has no receipt yet; summary and receipts."""

    def stage_parts(self, stage: Callable[..., StagedGroup]) -> list[StagedGroup]:
        """Have ``stage`` write the groups of small arrays that are published with them."""


@dataclass(frozen=True)
class Work:
    """A job under way; as a context manager, it forgets a job that will fail again, and keeps any other."""

    store: JobStore
    generation: str
    lease: Lease
    wanted: dict[str, Any]
    seed: int
    told: Reporter

    @property
    def journal(self) -> Journal:
        """What it has finished."""
        return self.store.journal(self.generation)

    @property
    def report(self) -> Reporter:
        """Whom to tell how far it is."""
        return Noted(self.store.records, self.generation, self.told)

    def __enter__(self) -> "Work":
        note(output=redact(str(self.store)), lease=self.lease.facts)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        at_fault = (InvalidData, InvalidParameter, KernelNotPositive, RidgeTooSmall, DoesNotFit)
        hopeless = isinstance(error, (CheckFailed, SourceChanged, *at_fault))
        if hopeless and not isinstance(error, UnreadableData):
            self.forget()
        elif isinstance(error, Exception):
            text = redact(f"{type(error).__name__}: {error}")
            with suppress(StoreFailed):  # it may be the very reason
                self.store.records.write(f"{self.generation}/error", {"text": text})

    def forget(self) -> None:
        """Drop what it has finished."""
        self.store.sweep({(self.store.committed or {}).get("generation", ""): BASE})

    def publish(
        self, result: Publishable, since: int = 0, more: Callable[[dict[str, Any], Any], Any] | None = None
    ) -> dict[str, Any]:
        """Run pass 2 from where it was, check the whole, and commit; the summary.

        Scores are counted apart from row ``since`` on; ``more`` is what an update adds, given the summary and counts.
        """
        store, generation = self.store, self.generation
        staged = store.staged(generation, result.shapes, result.plan.block_rows)
        summary, receipts = result.write(staged, self.report, self.journal, since)
        if fingerprint(result.rows) != self.wanted["input"]["fingerprint"]:
            raise SourceChanged(
                f"{result.rows.origin} changed while it was scored. Nothing was published; score it again."
            )
        counts = sum_counts(receipts)
        kinds = (self.journal.read_one("processors") or {})["kinds"]
        summary |= {"checkpoints": store.checkpoints(generation), "workers": summary["workers"] | {"processors": kinds}}
        summary |= {} if more is None else more(summary, counts)
        digests = {name: np.array([one.digests[name] for one in receipts], np.uint32) for name in result.shapes}
        commit = {
            "generation": generation,
            "parameters": self.wanted,
            "seed": self.seed,
            "ledger": summary.get("ledger"),
            "summary": json.loads(json.dumps(summary)),
            "block_rows": result.plan.block_rows,
            "digests": digests,
            "checksums": packed([one.checksums for one in receipts if one.checksums is not None]),
            "counts": counts.sum(axis=0),
        }
        groups = result.stage_parts(partial(store.stage_group, generation))
        store.publish(generation, staged, commit, self.lease.check, groups)
        return summary_of(store, commit)


def packed(arrays: list[Any]) -> dict[str, Any]:
    """Many short arrays as two long ones."""
    return {"values": np.concatenate([*arrays, np.empty(0, np.uint32)]), "sizes": np.array([len(a) for a in arrays])}


def unpacked(record: dict[str, Any]) -> list[Any]:
    """What :func:`packed` made two arrays of."""
    return np.split(record["values"], np.cumsum(record["sizes"])[:-1])


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
