"""What a task costs that does nothing, and of what the fixed costs of a small run are made up."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import zarr

import daskrr
from benchmarks import harness
from benchmarks.cluster_apart import ClusterApart, cluster_apart
from daskrr.jobs import job
from daskrr.leverage import algorithm, problem
from daskrr.nystrom.sampling import Uniform
from daskrr.runtime import executors, scheduler, tree
from daskrr.runtime.map_blocks import BlockMap, Run, map_blocks
from daskrr.runtime.rows import open_rows
from daskrr.storage.lease import Lease
from daskrr.storage.saving import Saving
from daskrr.storage.writing import HeldOutput

RIDGE, SEED = 1e-3, 0
# Of a store whose rows take next to no time.
CHUNK_ROWS = 100
# Milliseconds of processor time that a task may cost.
ALLOWED = {"client": 1.0, "scheduler": 1.0, "workers": 3.0}
SMALL = {"n_rows": 10_000, "n_features": 8, "n_landmarks": 100}

# Steps of a run, and the functions that do them; what one calls of the others is counted there.
STEPS: list[tuple[str, Any, str]] = [
    ("opening", problem, "open_rows"),
    ("listing", job, "parameters_of"),
    ("listing", job, "fingerprint"),
    ("asking workers", executors.ClusterExecutor, "check"),
    ("asking workers", executors.LocalExecutor, "check"),
    ("beginning", job, "begin"),
    ("beginning", HeldOutput, "staged"),
    ("beginning", Saving, "create"),
    ("lease", Lease, "acquire"),
    ("lease", Lease, "__exit__"),
    ("lease", HeldOutput, "fence"),
    ("lease", HeldOutput, "clear"),
    ("sampling", Uniform, "choose"),
    ("algebra", scheduler.OnScheduler, "perform"),
    ("algebra", scheduler.InProcess, "perform"),
    ("pass 1", algorithm, "first_pass"),
    ("pass 2", job, "write_missing"),
    ("pass 2", BlockMap, "values"),
    ("publishing", HeldOutput, "publish"),
    ("publishing", Saving, "commit"),
]


def nothing(start: int) -> int:
    """A block without work."""
    return 0


def _run_of(n_tasks: int) -> Run:
    """Of rows that are not stored: a span for each, which is all that there is of it."""
    return Run.over(open_rows(np.zeros((n_tasks, 1))), height=1)


def _values(n_tasks: int, store: Path) -> None:
    map_blocks(_run_of(n_tasks), "empty", nothing).values()


def _total(n_tasks: int, store: Path) -> None:
    map_blocks(_run_of(n_tasks), "empty", nothing).total(int.__add__)


def _passes(n_tasks: int, store: Path) -> None:
    """Both passes of 16 landmarks over a store, each chunk of which is a task; half of the tasks are of pass 2."""
    with patch.object(tree, "SPAN_FLOPS", 0):
        result = daskrr.leverage_scores(
            store, daskrr.kernels.Gaussian(1.0), RIDGE, 16, sampling="uniform", random_state=SEED,
            block_rows=CHUNK_ROWS, progress=False,
        )  # fmt: skip
        result.store(store.with_name("scores.zarr"), progress=False)


WAYS: dict[str, Callable[[int, Path], None]] = {"values": _values, "total": _total, "two passes, p = 16": _passes}
# Tasks that add results, for each of those whose results they are; runs that compute something are not judged.
ADDING = {"values": 0.0, "total": 1 / (tree.FAN_IN - 1), "two passes, p = 16": 0.5 / (tree.FAN_IN - 1)}
JUDGED = ("values", "total")


def measure(way: str, few: int, many: int, cluster: ClusterApart) -> dict[str, Any]:
    """Processor time and wall time that each task adds, those included that add sums; of runs with few and many."""
    costs = []
    for n_tasks in (few, many):
        with tempfile.TemporaryDirectory() as folder:
            store = Path(folder) / "points.zarr"
            harness.write_normal_store(store, CHUNK_ROWS * n_tasks // 2, 2, CHUNK_ROWS, SEED)
            before, began = cluster.processor_seconds(), time.perf_counter()
            WAYS[way](n_tasks, store)
            after = cluster.processor_seconds() | {"wall": time.perf_counter() - began}
            costs.append({name: value - before.get(name, 0.0) for name, value in after.items()})
    n_tasks = (1 + ADDING[way]) * (many - few)
    each = {name: 1e3 * (costs[1][name] - costs[0][name]) / n_tasks for name in costs[0]}
    return {"way": way, "few": few, "many": many, "milliseconds": each}


@contextmanager
def stopwatch() -> Iterator[dict[str, float]]:
    """Seconds of each step meanwhile, without those of other steps within it."""
    found = dict.fromkeys([step for step, _, _ in STEPS], 0.0)
    within: list[float] = []

    def timed(step: str, function: Callable) -> Callable:
        @wraps(function)
        def call(*arguments: Any, **settings: Any) -> Any:
            began = time.perf_counter()
            within.append(0.0)
            try:
                return function(*arguments, **settings)
            finally:
                whole = time.perf_counter() - began
                found[step] += whole - within.pop()
                if within:
                    within[-1] += whole

        return call

    with ExitStack() as patches:
        for step, owner, name in STEPS:
            patches.enter_context(patch.object(owner, name, timed(step, getattr(owner, name))))
        yield found


def _in_memory(store: Path, output: Path, **settings: Any) -> None:
    daskrr.leverage_scores(np.asarray(zarr.open_array(store)), **settings).scores.compute()


def _lazy(store: Path, output: Path, **settings: Any) -> None:
    daskrr.leverage_scores(store, **settings).store(output, progress=False)


SMALL_RUNS: dict[str, tuple[bool, Callable[..., Any]]] = {
    "in process, NumPy to NumPy": (False, _in_memory),
    "in process, store to store": (False, _lazy),
    "in process, durable": (False, daskrr.score_to_zarr),
    "cluster, store to store": (True, _lazy),
    "cluster, durable": (True, daskrr.score_to_zarr),
}


def small_run(name: str, repeats: int) -> dict[str, Any]:
    """Seconds of the steps of the fastest of some small runs."""
    runs = []
    on_cluster, score = SMALL_RUNS[name]
    settings = {"kernel": daskrr.kernels.Gaussian(4.0), "ridge": RIDGE, "landmarks": SMALL["n_landmarks"]}
    settings |= {"sampling": "uniform", "random_state": SEED, "progress": False}
    with tempfile.TemporaryDirectory() as folder, harness.cluster() if on_cluster else harness.computing_on():
        store = Path(folder) / "points.zarr"
        harness.write_normal_store(store, SMALL["n_rows"], SMALL["n_features"], 1250, SEED)
        for number in range(repeats + 1):
            with stopwatch() as steps:
                began = time.perf_counter()
                score(store, Path(folder) / f"{number}.zarr", **settings)
                seconds = time.perf_counter() - began
            runs.append({"seconds": seconds, "steps": steps | {"other": seconds - sum(steps.values())}})
    best = min(runs[1:], key=lambda one: one["seconds"])
    return {"name": name} | best | {"runs": len(runs) - 1}


def run(quick: bool, simulated: int) -> dict[str, Any]:
    """The cost of a task on two workers and on many simulated ones, and what a small run is made up of."""
    few, many, repeats = (8, 24, 1) if quick else (100, 600, 5)
    costs = []
    for workers in (harness.WORKERS, simulated):
        with cluster_apart(workers, simulated=workers > harness.WORKERS) as cluster:
            for way in WAYS:
                measure(way, 8, 16, cluster)
                costs.append({"workers": workers} | measure(way, few, many, cluster))
    return {"costs": costs, "small": [small_run(name, repeats) for name in SMALL_RUNS]}


def show(found: dict[str, Any]) -> None:
    """Print both tables."""
    lines = [
        {"run": f"{one['way']}, {one['workers']} workers"}
        | {name: f"{value:.2f}" for name, value in one["milliseconds"].items()}
        for one in found["costs"]
    ]
    harness.print_table("milliseconds of processor time that a task adds (wall: of time)", lines)
    steps = [
        {"run": one["name"], "seconds": f"{one['seconds']:.3f}"}
        | {name: f"{value:.3f}" for name, value in one["steps"].items()}
        for one in found["small"]
    ]
    title = "{n_rows:,} rows, d = {n_features}, p = {n_landmarks}, seconds (workers: 2)".format(**SMALL)
    harness.print_table(title, steps)


def checks_of(found: dict[str, Any]) -> dict[str, bool]:
    """What a task may cost."""
    return {
        f"{one['way']}, {one['workers']} workers: {one['milliseconds'][who]:.2f} ms of {who}, {most} allowed": (
            one["milliseconds"][who] <= most
        )
        for one in found["costs"]
        for who, most in ALLOWED.items()
        if one["way"] in JUDGED
    }
