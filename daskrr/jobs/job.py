"""Scoring jobs on storage: begun once, continued wherever they were stopped, and published whole."""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from daskrr.errors import (
    CheckFailed,
    DamagedRecord,
    DaskrrError,
    DoesNotFit,
    InputGrown,
    InvalidData,
    InvalidParameter,
    KernelNotPositive,
    LeaseHeld,
    LeaseLost,
    OutputExists,
    RidgeTooSmall,
    SourceChanged,
    StoreFailed,
    UnreadableData,
)
from daskrr.jobs.fingerprint import difference, fingerprint, has_grown, is_same, parameters_of
from daskrr.jobs.writer import write_missing
from daskrr.leverage.algorithm import compute
from daskrr.leverage.plan import Plan
from daskrr.leverage.problem import Problem
from daskrr.leverage.ranking import CERTIFIED
from daskrr.leverage.summary import versions
from daskrr.leverage.writing import Receipt, sum_counts
from daskrr.runtime.executors import Executor
from daskrr.runtime.futures import only_while
from daskrr.runtime.map_blocks import BlockMap
from daskrr.runtime.progress import Event, Reporter
from daskrr.runtime.rows import Rows
from daskrr.runtime.telemetry import note, reporter
from daskrr.storage.journal import Journal
from daskrr.storage.output import BASE, Output, StagedGroup
from daskrr.storage.records import Records
from daskrr.storage.saving import check_target, known
from daskrr.storage.urls import locate, redact
from daskrr.storage.writing import HeldOutput, hold
from daskrr.storage.zarr_arrays import Staged

log = logging.getLogger("daskrr")

SECONDS_BETWEEN_NOTES = 2.0
ADVICE = "Pass overwrite=True (--overwrite) to replace it, or name another output."


T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """A problem whose result survives: what is to be published where.

    ``wanted`` is what makes two jobs the same, taken when the input was opened.
    """

    problem: Problem
    output: str
    wanted: dict[str, Any]

    @classmethod
    def of(cls, problem: Problem, output: str | os.PathLike) -> "Job":
        """The job of a problem; lists the input."""
        return cls(problem, locate(output), parameters_of(problem))

    def published(self, overwrite: bool = False) -> dict[str, Any] | None:
        """The summary of what is published, if it is what this job would publish; runs nothing.

        Raises
        ------
        OutputExists
            Something else is there, and may not be replaced; InputGrown if only rows were appended.
        """
        return found_done(self.output, self.wanted, overwrite)

    def run(
        self, *, overwrite: bool = False, wait: bool = False, keep: int = 1, progress: Reporter | bool | None = None
    ) -> dict[str, Any]:
        """Begin or continue the job on the workers there are now, or find that it is done; the summary."""
        check_keep(keep)
        done = self.published(overwrite)
        if done is not None:
            return done
        with hold(self.output, wait) as held:
            done = check(held, self.wanted, overwrite)
            if done is not None:
                return done
            with reporter(progress) as report:
                return healed(held, partial(self._attempt, held, report, keep))

    def _attempt(self, held: HeldOutput, report: Reporter, keep: int) -> dict[str, Any]:
        problem = self.problem.afresh()
        generation, seed = begin(held, self.wanted, problem, "score")
        with ActiveJob(held, generation, self.wanted, seed, report, keep) as active:
            return active.publish(compute(replace(problem, seed=seed), active.report, active.journal))


def healed(held: HeldOutput, attempt: Callable[[], T]) -> T:
    """What ``attempt`` returns; a record that it finds damaged or gone is dropped, and it goes on without.

    Raises
    ------
    DamagedRecord
        One is damaged again after it was computed anew: something else writes there, or the disk is not sound.
    """
    dropped: set[str] = set()
    while True:
        try:
            return attempt()
        except DamagedRecord as error:
            if not error.name or error.name in dropped:
                raise
            dropped.add(error.name)
            log.warning("%s What it held is computed again.", error)
            held.lease.confirm()
            held.records.delete(error.name)


def found_done(output: str | os.PathLike, wanted: dict[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """What :func:`check` finds, with plain paths that are right."""
    done = check(Output(output), wanted, overwrite)
    if done is not None:
        put_right(Output(output))
    return done


def put_right(output: Output) -> None:
    """Mend the plain paths, should a job have been killed after it had published and before it showed that."""
    if not output.is_shown:
        with suppress(LeaseHeld), hold(output.target):
            log.info("the plain paths of %s are put right", output)


def check(output: Output, wanted: dict[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """The summary of what is published already, if it is what is wanted.

    Raises
    ------
    OutputExists
        Something else is there, and may not be replaced; InputGrown if only rows were appended.
    """
    committed = known(output, overwrite)
    check_target(output, overwrite or (committed is not None and committed["kind"] == "scores"), "scores")
    if overwrite:
        return None
    if committed is None:
        for generation in output.unfinished:
            begun = (output.job(generation) or {"parameters": wanted})["parameters"]
            if begun != wanted:
                kind = InputGrown if has_grown(begun, wanted) else OutputExists
                raise kind(f"{output} holds an unfinished job: {difference(begun, wanted)}. {ADVICE}")
        return None
    published = committed.get("parameters")
    if published is None:
        raise OutputExists(f"{output} holds scores of a result in memory. {ADVICE}")
    if is_same(published, wanted):
        return summary_of(output, committed)
    found = f"{output} holds {difference(published, wanted)}."
    if has_grown(published, wanted):
        raise InputGrown(f"{found} Score the new rows with daskrr.update_scores (daskrr update). {ADVICE}")
    raise OutputExists(f"{found} {ADVICE}")


def check_keep(keep: Any) -> None:
    """Refuse a number of generations that cannot be kept."""
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
        raise InvalidParameter(f"keep must be an int of at least 0, the generations kept from before, got {keep!r}")


def summary_of(output: Output, committed: Mapping[str, Any]) -> dict[str, Any]:
    """What is told of published scores."""
    return committed["summary"] | {"output": str(output)}


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


def begin(held: HeldOutput, wanted: dict[str, Any], job: Beginning, kind: str) -> tuple[str, int]:
    """The generation to work on, and its seed: an unfinished one of this kind with these parameters, or a new one."""
    held.refuse_foreign([*CERTIFIED, "residual", "sketch"])
    device = job.executor.device.name
    begun = unfinished(held, wanted, kind, device)
    job.executor.check(job.rows)
    held.sweep(begun and begun[0])
    if begun is None:
        about = {"parameters": wanted, "kind": kind, "seed": job.seed, "block_rows": job.plan.block_rows}
        begun = held.begin(about | {"versions": versions(), "device": device}), job.seed
    _note_processors(held.journal(begun[0]), job.executor)
    return begun


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


def unfinished(output: Output, wanted: dict[str, Any], kind: str, device: str | None) -> tuple[str, int] | None:
    """The generation that can be continued on a device, whichever if it is None, if any, and its seed."""
    for generation in reversed(output.unfinished):
        begun = output.job(generation)
        if begun is not None and begun["kind"] == kind and is_same(begun["parameters"], wanted):
            before = begun["versions"], begun["device"]
            now = versions(), device or begun["device"]
            if before == now:
                return generation, begun["seed"]
            log.warning("the unfinished job was begun with %s on %s, and starts over with %s on %s", *before, *now)
    return None


class Publishable(Protocol):
    """Scores that can be written block by block, and published when all are there."""

    @property
    def rows(self) -> Rows: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def executor(self) -> Executor: ...
    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    @property
    def writing_title(self) -> str: ...
    @property
    def writing_flops(self) -> float: ...

    def writes(self, staged: Staged, report: Reporter, since: int = 0) -> BlockMap:
        """What writes every block, and gives its receipt."""

    def concluded(self, receipts: Sequence[Receipt], seconds: float) -> dict[str, Any]:
        """The summary, once all that was written is found right."""

    def stage_parts(self, stage: Callable[..., StagedGroup]) -> list[Any]:
        """Handles of the groups of small arrays that ``stage`` writes and that are published with them."""


@dataclass(frozen=True)
class ActiveJob:
    """A job under way; as a context manager, it forgets a job that will fail again, and keeps any other.

    It stops as soon as the lease is lost, and changes nothing any more then.
    """

    held: HeldOutput
    generation: str
    wanted: dict[str, Any]
    seed: int
    told: Reporter
    keep: int
    exits: ExitStack = field(default_factory=ExitStack)

    @property
    def journal(self) -> Journal:
        """What it has finished."""
        return self.held.journal(self.generation)

    @property
    def report(self) -> Reporter:
        """Whom to tell how far it is."""
        return Noted(self.held.records, self.generation, self.told)

    def __enter__(self) -> "ActiveJob":
        note(output=redact(str(self.held)), lease=self.held.lease.facts)
        self.exits.enter_context(only_while(self.held.lease.check))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self.exits.close()
        at_fault = (InvalidData, InvalidParameter, KernelNotPositive, RidgeTooSmall, DoesNotFit)
        hopeless = isinstance(error, (CheckFailed, SourceChanged, *at_fault)) and not isinstance(error, UnreadableData)
        if not isinstance(error, Exception) or isinstance(error, (LeaseLost, DamagedRecord)):
            return
        with suppress(StoreFailed, LeaseLost):  # it may be the very reason
            if hopeless:
                self.forget()
            else:
                self.held.lease.confirm()
                text = redact(f"{type(error).__name__}: {error}")
                self.held.records.write(f"{self.generation}/error", {"text": text})

    def forget(self) -> None:
        """Drop what it has finished."""
        self.held.forget(self.generation)

    def publish(
        self, result: Publishable, since: int = 0, more: Callable[[dict[str, Any], Any], Any] | None = None
    ) -> dict[str, Any]:
        """Run pass 2 from where it was, check the whole, and commit; the summary.

        Scores are counted apart from row ``since`` on; ``more`` is what an update adds, given the summary and counts.
        """
        held, generation = self.held, self.generation
        staged = held.staged(generation, result.shapes, result.plan.block_rows)
        began = time.perf_counter()
        writes = result.writes(staged, self.report, since)
        parts = result.stage_parts(partial(Output(held.target).stage_group, generation))
        receipts = write_missing(writes, self.journal, staged, result.writing_title, result.writing_flops)
        summary = result.concluded(receipts, time.perf_counter() - began)
        if fingerprint(result.rows) != self.wanted["input"]["fingerprint"]:
            raise SourceChanged(
                f"{result.rows.origin} changed while it was scored. Nothing was published; score it again."
            )
        counts = sum_counts(receipts)
        kinds = (self.journal.read_one("processors") or {})["kinds"]
        summary |= {"checkpoints": held.checkpoints(generation), "workers": summary["workers"] | {"processors": kinds}}
        summary |= {} if more is None else more(summary, counts)
        digests = {name: np.array([receipt.digests[name] for receipt in receipts], np.uint32) for name in result.shapes}
        content = {
            "parameters": self.wanted,
            "seed": self.seed,
            "ledger": summary.get("ledger"),
            "summary": json.loads(json.dumps(summary)),
            "block_rows": result.plan.block_rows,
            "digests": digests,
            "checksums": packed([receipt.checksums for receipt in receipts if receipt.checksums is not None]),
            "counts": counts.sum(axis=0),
            "base": self.journal.read_one("base"),
            "base_records": base_records(self.journal),
        }
        held.publish(generation, "scores", staged, content, result.executor.values(parts), self.keep)
        return summary_of(held, content)


def base_records(journal: Journal) -> list[str] | None:
    """Names of the sums that a run has left for a later one with more rows; None if one of them is damaged."""
    names = journal.records.names(journal.prefix)
    found = [name for name in names if name.startswith(f"{journal.prefix}/{BASE}")]
    with ThreadPoolExecutor() as threads:
        return found if all(threads.map(journal.records.has, found)) else None


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
            try:
                self._records.write(self._name, asdict(event) | {"at": time.time()})
            except DaskrrError as error:  # what is only told is no reason to stop
                log.warning("how far the job is could not be noted: %s", error)
