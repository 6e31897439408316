"""Runs from Zarr store to Zarr store on more and more workers: share of the limit, and where the rest of it goes.

A *pass* lasts from the start of its first task to the end of its last; what a run takes besides is serial.
"""

import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client
from distributed.diagnostics.plugin import SchedulerPlugin

import daskrr
from benchmarks import harness
from benchmarks.matmul import matmul_rates

RIDGE, SEED = 1e-3, 0
# The number of rows that a case is named by is that of so many workers.
NAMED_WORKERS = 16
WALKS = re.compile(r"(?P<name>.+?)-[0-9a-f]{32}.*-span-\d+$")
# What reads a few rows is no pass.
FETCHES = {"sample-rows"}


@dataclass(frozen=True)
class Case:
    """One problem, and the share of the limit that is required of 16 workers on 16 cores.

    On all workers it is run ``repeats`` times lazy and durable, in turn, of which medians are judged.
    """

    name: str
    n_rows: int
    n_features: int
    n_landmarks: int
    length_scale: float
    sampling: str
    required: float
    repeats: int = 3

    @property
    def row_flops(self) -> float:
        """Of both passes, at full rank; what choosing landmarks takes is not work."""
        return 4.0 * self.n_landmarks * self.n_features + 3.0 * self.n_landmarks**2

    def rows_for(self, workers: int) -> int:
        """Rows of so many workers, if they grow with them."""
        return self.n_rows * workers // NAMED_WORKERS


CASES = [
    Case("p = 1024, uniform", 1_600_000, 32, 1024, 8.0, "uniform", 0.75),
    Case("p = 1024, default", 1_600_000, 32, 1024, 8.0, "residual", 0.42, repeats=1),
    Case("p = 256, uniform", 6_400_000, 8, 256, 4.0, "uniform", 0.40, repeats=5),
]
QUICK_CASES = [Case("p = 64, default", 64_000, 8, 64, 4.0, "residual", 0.0)]


class TaskTimes(SchedulerPlugin):
    """Begin and end of every task that a scheduler saw end."""

    name = "daskrr-benchmark-times"

    def __init__(self) -> None:
        self.tasks: list[tuple[str, float, float]] = []

    def transition(self, key: Any, start: str, finish: str, *args: Any, startstops: Any = (), **kwargs: Any) -> None:
        """Note what a worker says of a task that has ended."""
        if start == "processing":
            times = [(one["start"], one["stop"]) for one in startstops or () if one["action"] == "compute"]
            self.tasks += [(str(key), *one) for one in times]


@contextmanager
def task_times(client: Client) -> Iterator[TaskTimes]:
    """The times of the tasks of a cluster whose scheduler is in this process."""
    scheduler, found = client.cluster.scheduler, TaskTimes()
    scheduler.add_plugin(found)
    try:
        yield found
    finally:
        scheduler.remove_plugin(found.name)


def passes_of(tasks: Sequence[tuple[str, float, float]], n_workers: int) -> dict[str, dict[str, float]]:
    """Of each kind of task that walks rows: how many, how long, and how busy workers were from first to last."""
    walks: dict[str, list[tuple[float, float]]] = {}
    for key, start, stop in tasks:
        if (match := WALKS.match(key)) and match["name"] not in FETCHES:
            walks.setdefault(match["name"], []).append((start, stop))
    found = {}
    for name, times in walks.items():
        first, last = min(start for start, _ in times), max(stop for _, stop in times)
        overlaps = (min(stop, last) - max(start, first) for _, start, stop in tasks)
        busy = sum(max(0.0, one) for one in overlaps)
        found[name] = {
            "tasks": len(times),
            "seconds": last - first,
            "task_seconds": sum(stop - start for start, stop in times),
            "longest_task": max(stop - start for start, stop in times),
            "busy_seconds": min(busy, n_workers * (last - first)),
        }
    return found


def score(case: Case, kind: str, store: Path, output: Path) -> dict[str, Any]:
    """The summary of one run: ``"durable"`` records what it has finished, ``"lazy"`` nothing until the end."""
    kernel = daskrr.kernels.Gaussian(case.length_scale)
    settings = {"sampling": case.sampling, "random_state": SEED, "progress": False}
    if kind == "durable":
        return daskrr.score_to_zarr(store, output, kernel, RIDGE, case.n_landmarks, **settings)
    return daskrr.leverage_scores(store, kernel, RIDGE, case.n_landmarks, **settings).store(output, progress=False)


class Rates:
    """The matrix-multiply rate in as many processes as there are workers, measured between any two runs."""

    def __init__(self, workers: int, seconds: float) -> None:
        self.workers, self.seconds = workers, seconds
        self.found = [self._measure()]

    def around(self) -> float:
        """The mean of the rates before and after the run that has just ended."""
        self.found.append(self._measure())
        return sum(self.found[-2:]) / 2

    @property
    def median(self) -> float:
        """Of all: one that was measured within a second may be off by a fifth."""
        return statistics.median(self.found)

    def _measure(self) -> float:
        return matmul_rates("float64", self.seconds, self.workers)["wall"]


def measure(case: Case, n_rows: int, kind: str, client: Client, folder: Path, rates: Rates) -> dict[str, Any]:
    """Time one run."""
    workers = len(client.nthreads())
    store = folder / f"{n_rows}-{case.n_features}.zarr"
    if not store.exists():
        harness.write_normal_store(store, n_rows, case.n_features, harness.chunk_rows(32), SEED)
    with tempfile.TemporaryDirectory(dir=folder) as target, task_times(client) as times, harness.others_load() as load:
        began = time.perf_counter()
        summary = score(case, kind, store, Path(target) / "scores.zarr")
        took = time.perf_counter() - began
    rate = rates.around()
    passes = passes_of(times.tasks, workers)
    wall = sum(one["seconds"] for one in passes.values())
    limit = n_rows * case.row_flops / rate
    in_tasks = sum(one["task_seconds"] for one in passes.values())
    return {
        "case": case.name,
        "kind": kind,
        "workers": workers,
        "n_rows": n_rows,
        "block_rows": summary["parameters"]["block_rows"],
        "flops_per_second": rate,
        "seconds": took,
        "share_of_limit": limit / took,
        "busy": sum(one["busy_seconds"] for one in passes.values()) / (workers * wall),
        "task_seconds_per_row": in_tasks / n_rows,
        "serial_seconds": took - wall,
        "passes": passes,
        **load,
    }


def run(quick: bool, most: int) -> list[dict[str, Any]]:
    """Runs on 1, 2, 4 … workers, and how they compare with those on one."""
    cases, seconds = (QUICK_CASES, 0.2) if quick else (CASES, 1.0)
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        for workers in (2**power for power in range(most.bit_length())):
            with harness.cluster(workers=workers) as client:
                rates = Rates(workers, seconds)
                runs = []
                for case in cases:
                    client.run(_first_kernel, case)
                    score(case, "lazy", _warm_store(case, Path(temporary)), Path(temporary) / f"{workers}-{case.name}")
                    for kind, n_rows in _runs(case, case is cases[0], workers, most):
                        runs.append((case, measure(case, n_rows, kind, client, Path(temporary), rates)))
                        print(_line(runs[-1][1]), flush=True)
                found += [one | _in_tasks(case, one, rates.median) for case, one in runs]
    return _against_one_worker(found)


def _first_kernel(case: Case) -> None:
    """What takes a worker longer the first time, and one of them does in every run: nobody knows which."""
    Z = np.zeros((2, case.n_features))
    daskrr.kernels.Gaussian(case.length_scale)(Z, Z)


def _in_tasks(case: Case, one: dict[str, Any], rate: float) -> dict[str, float]:
    """The share of the limit within tasks, by the rate of all measurements with so many workers."""
    limit = case.row_flops * one["workers"] / rate
    return {"median_flops_per_second": rate, "in_task_share": limit / one["task_seconds_per_row"]}


def _runs(case: Case, is_first: bool, workers: int, most: int) -> list[tuple[str, int]]:
    """Rows that grow with the workers, durable, and lazy on one and, often, on all; those of a quarter in one case.

    The default sampling is left out where nothing is judged.
    """
    weak, strong = case.rows_for(workers), case.rows_for(max(1, most // 4))
    if workers in (1, most):
        runs = [("lazy", weak), ("durable", weak)] * (case.repeats if workers == most else 1)
    else:
        runs = [("durable", weak)] * (workers == 2 or case.sampling == "uniform")
    return runs + [("durable", strong)] * (is_first and strong != weak)


def _warm_store(case: Case, folder: Path) -> Path:
    """Few rows, for a first run that nobody times."""
    store = folder / f"warm-{case.n_features}.zarr"
    if not store.exists():
        harness.write_normal_store(store, 4 * case.n_landmarks, case.n_features, 1024, SEED)
    return store


def _against_one_worker(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add how much longer a row takes within tasks than on one worker, in a run of the same kind.

    Cores that are all at work are slower than one alone: ``per_row_ratio`` is of times in units of the multiplications
    that each could have done meanwhile, ``per_row_seconds_ratio`` of seconds.
    """
    alone = {(one["case"], one["kind"]): one for one in reversed(found) if one["workers"] == 1}
    ratios = []
    for one in found:
        first = alone[one["case"], one["kind"]]
        seconds = one["task_seconds_per_row"] / first["task_seconds_per_row"]
        ratios.append(
            {"per_row_ratio": first["in_task_share"] / one["in_task_share"], "per_row_seconds_ratio": seconds}
        )
    return [one | ratio for one, ratio in zip(found, ratios, strict=True)]


def _line(one: dict[str, Any]) -> str:
    what = f"{one['case']}, {one['workers']} workers, {one['n_rows']:,} rows, {one['kind']}"
    return f"  {what}: {one['seconds']:.1f} s, {one['share_of_limit']:.3f} of the limit"


def show(found: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    lines = [
        {
            "case": one["case"],
            "workers": str(one["workers"]),
            "rows": f"{one['n_rows']:,}",
            "run": one["kind"],
            "F [Gflop/s]": f"{one['flops_per_second'] / 1e9:.1f}",
            "seconds": f"{one['seconds']:.2f}",
            "tasks": " + ".join(str(pas["tasks"]) for pas in one["passes"].values()),
            "serial": f"{one['serial_seconds']:.2f}",
            "busy": f"{one['busy']:.2f}",
            "a row in tasks": f"{one['per_row_ratio']:.2f}",
            "in seconds": f"{one['per_row_seconds_ratio']:.2f}",
            "in-task share": f"{one['in_task_share']:.2f}",
            "others": f"{one['others']:.0%}",
            "share of limit": f"{one['share_of_limit']:.3f}",
        }
        for one in found
    ]
    harness.print_table(f"store to store on single-threaded workers of {os.cpu_count()} cores", lines)
    print(
        "busy: of the workers, within the passes; a row in tasks: its time in multiplications, over that on one worker"
    )


def checks_of(found: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """What is required of 16 workers."""
    checks = {}
    judged: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in found:
        if one["n_rows"] == _named_rows(one):
            judged.setdefault((one["case"], one["kind"]), []).append(one)
    for (name, kind), runs in judged.items():
        required = next(case.required for case in CASES if case.name == name)
        share, busy, ratio = (_median(runs, what) for what in ("share_of_limit", "busy", "per_row_ratio"))
        checks[f"{name}, {kind}: {share:.3f} of the limit, {required} required"] = share >= required
        checks[f"{name}, {kind}: busy {busy:.3f}, 0.93 required"] = busy >= 0.93
        checks[f"{name}, {kind}: a row takes {ratio:.2f} times one worker's, 1.15 allowed"] = ratio <= 1.15
        if kind == "durable":
            times = _median(runs, "seconds") / _median(judged[name, "lazy"], "seconds")
            checks[f"{name}: durable in {times:.3f} times lazy, 1.05 allowed"] = times <= 1.05
    return checks


def _median(runs: Sequence[dict[str, Any]], what: str) -> float:
    return statistics.median(one[what] for one in runs)


def _named_rows(one: dict[str, Any]) -> int | None:
    """The rows of a case with 16 workers, if the run has so many."""
    if one["workers"] != NAMED_WORKERS:
        return None
    return next((case.n_rows for case in CASES if case.name == one["case"]), None)


def parameters() -> dict[str, Any]:
    """What was asked for."""
    return {"ridge": RIDGE, "cases": [asdict(case) for case in CASES]}
