"""What a scheduler knows of the jobs on its cluster, put together from the messages of telemetry."""

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.numerics.histogram import OCTAVES
from daskrr.runtime.progress import Event, without_infinity

RUNNING = "running"
MOST_JOBS = 8
MOST_STAGES = 100
MOST_POINTS = 600
# Between two points of a curve, so that one block that ends early or late does not make it jump.
LEAST_SECONDS = 1.0


@dataclass
class Counts:
    """How large the values of the rows so far are, in octaves; a block that is computed twice counts once."""

    run: str
    blocks: set[int] = field(default_factory=set)
    values: NDArray[np.int64] = field(default_factory=lambda: np.zeros(OCTAVES, np.int64))

    def add(self, start: int, counts: Any) -> None:
        """Take one block."""
        if start not in self.blocks:
            self.blocks.add(start)
            self.values += np.asarray(counts, np.int64)


@dataclass
class JobBoard:
    """One call of daskrr, such as the scoring of a store."""

    name: str
    client: str
    began: float
    state: str = RUNNING
    error: str = ""
    updated: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    runs: set[str] = field(default_factory=set)
    stages: list[Event] = field(default_factory=list)
    rates: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=MOST_POINTS))
    dimensions: list[tuple[float, float]] = field(default_factory=list)
    counts: dict[str, Counts] = field(default_factory=dict)
    _order: int = 0
    _at_point: Event | None = None

    def take(self, message: Mapping[str, Any]) -> None:
        """Take a message of the client; one that was overtaken by a later event says nothing new about a stage."""
        self.updated = message["at"]
        self.state = message.get("state", self.state)
        self.error = message.get("error", self.error)
        self.facts |= message.get("facts", {})
        if "run" in self.facts:
            self.runs.add(self.facts["run"])
        if "event" in message and message["order"] > self._order:
            self._order = message["order"]
            self._proceed(Event(**message["event"]))

    def _proceed(self, event: Event) -> None:
        if event.dimension is not None:
            self.dimensions.append(event.dimension)
        if self.stages and self.stages[-1].stage == event.stage and not self.stages[-1].ended:
            self.stages[-1] = event
        else:
            self.stages = [*self.stages[1 - MOST_STAGES :], event]
            self._at_point = event
            self.rates.append((self.updated, math.nan, math.nan))  # where a curve is broken
        self._measure(event)

    def _measure(self, event: Event) -> None:
        """Add a point to the curve of the speed, by what was done since the last one."""
        before = self._at_point or event
        seconds, rows = event.seconds - before.seconds, event.rows - before.rows
        if before.rows < event.found[1]:
            rows -= event.found[1] - before.rows
        whole = event.ended and before.done == 0  # however short, a stage has one point
        if event.row_flops and rows > 0 and (seconds >= LEAST_SECONDS or (whole and seconds > 0)):
            self.rates.append((self.updated, rows / seconds, rows * event.row_flops / seconds))
            self._at_point = event

    @property
    def stage(self) -> Event | None:
        """The one that it is at, or was at last."""
        return self.stages[-1] if self.stages else None

    @property
    def flops(self) -> float:
        """Operations per second of the last stage that they are counted of."""
        counted = [stage for stage in self.stages if stage.row_flops and stage.rate]
        return counted[-1].rate * counted[-1].row_flops if counted else 0.0

    def to_dict(self, limit: float) -> dict[str, Any]:
        """Everything, ready for JSON; ``limit`` is the speed of matrix multiplies on all workers, 0 if not known."""
        return {
            "job": self.name,
            "state": self.state,
            "error": self.error or None,
            "began": self.began,
            "updated": self.updated,
            **{name: self.facts.get(name) for name in ("input", "output", "lease", "rows", "features", "kernel")},
            **{name: self.facts.get(name) for name in ("ridge", "landmarks", "tolerance")},
            "stages": [_stage_facts(stage, limit) for stage in self.stages],
            "flops_per_second": self.flops,
            "matmul_flops_per_second": limit or None,
            "share_of_matmul": self.flops / limit if limit else None,
            "effective_dimension": without_infinity(self.dimensions),
            "histograms": {
                kind: {"blocks": len(one.blocks), "ends": octave_ends()[1:].tolist(), "counts": one.values.tolist()}
                for kind, one in self.counts.items()
            },
        }


def _stage_facts(stage: Event, limit: float) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        "blocks": [stage.done, stage.total],
        "rows": [stage.rows, stage.total_rows],
        "seconds": stage.seconds,
        "seconds_left": None if stage.ended else stage.remaining,
        "rows_per_second": stage.rate,
        "share_of_matmul": stage.rate * stage.row_flops / limit if limit and stage.row_flops else None,
        "stopped": stage.stopped,
    }


def octave_ends() -> NDArray[np.float64]:
    """Ends of the classes of a histogram, from the smallest on."""
    return np.exp2(np.arange(-OCTAVES, 1, dtype=np.float64))


class Board:
    """All jobs that a scheduler has heard of lately."""

    def __init__(self) -> None:
        self.jobs: dict[str, JobBoard] = {}
        self.speeds: dict[str, float] = {}

    def take(self, message: Mapping[str, Any]) -> None:
        """Take a message of a client or of a worker."""
        if "job" in message:
            self._job(message).take(message)
        else:
            if message["speed"]:
                self.speeds[message["worker"]] = message["speed"]
            self._count(message)

    def _job(self, message: Mapping[str, Any]) -> JobBoard:
        name = message["job"]
        if name not in self.jobs:
            while len(self.jobs) >= MOST_JOBS:
                del self.jobs[min(self.jobs, key=self._age)]
            self.jobs[name] = JobBoard(name, message.get("client", ""), message["at"])
        return self.jobs[name]

    def _age(self, name: str) -> tuple[bool, float]:
        job = self.jobs[name]
        return job.state == RUNNING, job.updated

    def _count(self, message: Mapping[str, Any]) -> None:
        run, kind = message["run"], message["kind"]
        for job in self.jobs.values():
            if run.partition("-")[0] in job.runs:
                if kind not in job.counts or job.counts[kind].run != run:
                    job.counts[kind] = Counts(run)
                job.counts[kind].add(message["start"], message["counts"])

    def leave(self, client: str) -> None:
        """Note that a client has gone, and what it was running with it."""
        for job in self.jobs.values():
            if job.client == client and job.state == RUNNING:
                job.state, job.error = "lost", "the client has left without a word; run the same line again to go on"
                job.updated = time.time()

    @property
    def current(self) -> JobBoard | None:
        """The job to look at: the newest that runs, else the last that did."""
        return max(self.jobs.values(), key=lambda job: (job.state == RUNNING, job.began), default=None)

    def limit(self, threads: Mapping[str, int]) -> float:
        """Speed of matrix multiplies on so many threads of each worker, as far as it was measured; 0 if not at all."""
        known = [self.speeds[address] for address in threads if address in self.speeds]
        return sum(threads.values()) * sum(known) / len(known) if known else 0.0
