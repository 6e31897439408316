"""Hundreds of workers whose tasks sleep, so that the client, the scheduler and the tree of sums are what is measured.

They are workers of Dask, a few processes with many each, and their tasks are those of the engine: spans of blocks,
launched through its window and added by its tree. A sum says that it takes 8p² bytes, which is what the scheduler goes
by, and takes that many only where ``carried``: a thousand workers' real sums would measure the memory of one machine.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import harness
from benchmarks.cluster_apart import ClusterApart, cluster_apart
from daskrr.runtime.executors import executor
from daskrr.runtime.map_blocks import Run, map_blocks
from daskrr.runtime.progress import silent
from daskrr.runtime.rows import open_rows
from daskrr.runtime.tree import cut

LANDMARKS = 1024
REQUIRED = {256: 0.9}
# Blocks of a task of full length, if spans become shorter at the end.
BLOCKS = 16


@dataclass(frozen=True)
class SimulatedSum:
    """As large as it says, as far as the scheduler knows."""

    values: NDArray[np.float64]
    nbytes: int

    def __sizeof__(self) -> int:
        return self.nbytes

    def __add__(self, other: "SimulatedSum") -> "SimulatedSum":
        return SimulatedSum(self.values + other.values, self.nbytes)


@dataclass(frozen=True)
class Load:
    """So many tasks of so many seconds for every worker; ``"even"`` ones, or ``"cut"`` as those of a run are."""

    workers: int
    spans: str
    carried: bool
    tasks: int = 20
    seconds: float = 2.0

    @property
    def blocks_of_a_task(self) -> int:
        """Of one that is not shortened."""
        return BLOCKS if self.spans == "cut" else 1


LOADS = [
    Load(64, "even", carried=True),
    Load(64, "cut", carried=False),
    Load(256, "cut", carried=False),
    Load(1000, "cut", carried=False),
]
QUICK_LOADS = [Load(8, spans, carried, tasks=4, seconds=0.1) for spans, carried in (("even", True), ("cut", False))]


def asleep(seconds: float, side: int, start: int) -> SimulatedSum:
    """A block whose work is sleep."""
    time.sleep(seconds)
    return SimulatedSum(np.ones((side, side)), 8 * LANDMARKS**2)


def measure(load: Load, cluster: ClusterApart) -> dict[str, Any]:
    """Run it; how busy the workers were, and the processor time of a task."""
    n_blocks = load.workers * load.tasks * load.blocks_of_a_task
    name = uuid.uuid4().hex
    where = executor(name)
    spans = cut(n_blocks, 1, where.n_threads, load.blocks_of_a_task)
    run = Run(name, open_rows(np.zeros((n_blocks, 1))), spans, where, silent)
    work = partial(asleep, load.seconds / load.blocks_of_a_task, LANDMARKS if load.carried else 1)
    with harness.others_load() as others:
        before, began = cluster.processor_seconds(), time.perf_counter()
        total = map_blocks(run, "asleep", work).total(_add)
        wall = time.perf_counter() - began
        after = cluster.processor_seconds()
    if total.values[0, 0] != n_blocks:
        raise RuntimeError(f"the sum of {n_blocks} blocks is {total.values[0, 0]}")
    each = {who: (after[who] - before[who]) / len(spans) for who in after}
    mean = load.workers * load.tasks * load.seconds / len(spans)
    return vars(load) | {
        "spans_run": len(spans),
        "wall": wall,
        "efficiency": load.tasks * load.seconds / wall,
        "milliseconds": {who: 1e3 * value for who, value in each.items()},
        "most_workers": mean / max(each["client"], each["scheduler"]),
        **others,
    }


def _add(one: SimulatedSum, other: SimulatedSum) -> SimulatedSum:
    return one + other


def run(quick: bool, most: int, seconds: int) -> list[dict[str, Any]]:
    """Every load of at most so many workers and of tasks of so many seconds, on a cluster for each number of them."""
    wanted = [replace(load, seconds=seconds) for load in LOADS if load.workers <= most]
    loads = QUICK_LOADS if quick else wanted
    found = []
    for workers in sorted({load.workers for load in loads}):
        with cluster_apart(workers, simulated=True) as cluster:
            for load in (one for one in loads if one.workers == workers):
                found.append(measure(load, cluster))
                print(f"  {workers} workers, {load.spans}: {found[-1]['efficiency']:.3f}", flush=True)
    return found


def show(found: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    lines = [
        {
            "workers": str(one["workers"]),
            "spans": one["spans"],
            "sums": "8p² bytes" if one["carried"] else "8 bytes",
            "tasks": f"{one['spans_run']:,}",
            "wall [s]": f"{one['wall']:.1f}",
            **{f"{who} [ms]": f"{value:.2f}" for who, value in one["milliseconds"].items()},
            "others": f"{one['others']:.0%}",
            "efficiency": f"{one['efficiency']:.3f}",
            "carries": f"{one['most_workers']:,.0f}",
        }
        for one in found
    ]
    first = found[0]
    harness.print_table(f"simulated workers, {first['tasks']} tasks of {first['seconds']:g} s each", lines)
    print("ms: processor time per task; carries: workers at which the slower of client and scheduler is always busy")


def checks_of(found: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """What is required of the simulation."""
    return {
        f"{one['workers']} workers, {one['spans']}: efficiency {one['efficiency']:.3f}, {required} required": (
            one["efficiency"] >= required
        )
        for one in found
        if (required := REQUIRED.get(one["workers"])) is not None
    }
