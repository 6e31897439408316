"""Stores that nobody would choose: very many tiny chunks, and one chunk that is larger than what most workers have.

As many workers are started as the memory of the machine allows by the plan, and each must stay within it.
"""

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import zarr

import daskrr
from benchmarks import harness

N_LANDMARKS, RIDGE, SEED = 64, 1e-3, 0
# Of the rows of a large chunk that are made at a time.
MADE_AT_ONCE = 2**18


@dataclass(frozen=True)
class Shape:
    """A store by its rows, features and the rows of a chunk."""

    name: str
    n_rows: int
    n_features: int
    chunk_rows: int

    @property
    def n_chunks(self) -> int:
        """How many there are."""
        return -(-self.n_rows // self.chunk_rows)

    @property
    def chunk_bytes(self) -> int:
        """Of one, decoded."""
        return 8 * self.chunk_rows * self.n_features

    @property
    def problem(self) -> tuple[Any, ...]:
        """Kernel, ridge and landmarks."""
        return daskrr.kernels.Gaussian(self.n_features**0.5), RIDGE, N_LANDMARKS


SHAPES = [Shape("tiny chunks", 1_000_000, 8, 10), Shape("one chunk", 2**22, 64, 2**22)]
QUICK_SHAPES = [replace(SHAPES[0], n_rows=2000), replace(SHAPES[1], n_rows=2**14, chunk_rows=2**14)]


def write_store(path: Path, shape: Shape) -> None:
    """Standard normal rows."""
    harness.check_disk(path.parent, 8 * shape.n_rows * shape.n_features)
    chunks = (shape.chunk_rows, shape.n_features)
    array = zarr.create_array(str(path), shape=(shape.n_rows, shape.n_features), chunks=chunks, dtype="float64")
    generator = np.random.default_rng(SEED)
    step = max(shape.chunk_rows, MADE_AT_ONCE // shape.chunk_rows * shape.chunk_rows)
    for start in range(0, shape.n_rows, step):
        height = min(step, shape.n_rows - start)
        array[start : start + height] = generator.standard_normal((height, shape.n_features))


def workers_for(store: Path, shape: Shape) -> tuple[int, int]:
    """As many as there are cores and room for, and the memory of each."""
    room = int(0.9 * psutil.virtual_memory().total)
    plan = daskrr.plan(store, *shape.problem, sampling="uniform", workers=1)
    workers = max(1, min(len(os.sched_getaffinity(0)), room // plan.memory_limit))
    return workers, room // workers


def measure(shape: Shape, folder: Path) -> dict[str, Any]:
    """Seconds of a durable run, and the largest memory of a worker beside its plan."""
    store, output = folder / f"{shape.name}.zarr", folder / f"{shape.name} scores.zarr"
    settings = {"sampling": "uniform", "random_state": SEED}
    began = time.perf_counter()
    write_store(store, shape)
    written = time.perf_counter() - began
    workers, memory_limit = workers_for(store, shape)
    with harness.cluster(memory_limit, workers) as client:
        plan = daskrr.plan(store, *shape.problem, **settings)
        began = time.perf_counter()
        summary = daskrr.score_to_zarr(store, output, *shape.problem, progress=False, **settings)
        seconds = time.perf_counter() - began
        peaks = [harness.peak_bytes(pid) for pid in harness.worker_pids(client).values()]
    return vars(shape) | {
        "chunk_bytes": shape.chunk_bytes,
        "n_chunks": shape.n_chunks,
        "workers": workers,
        "tasks": plan.n_tasks,
        "writing_seconds": written,
        "seconds": seconds,
        "stages": summary["seconds"],
        "peak_bytes": max(peaks),
        "plan_worker_bytes": plan.worker_bytes,
    }


def run(quick: bool) -> list[dict[str, Any]]:
    """Every shape."""
    with tempfile.TemporaryDirectory() as temporary:
        return [measure(shape, Path(temporary)) for shape in (QUICK_SHAPES if quick else SHAPES)]


def show(found: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    lines = [
        {
            "store": one["name"],
            "rows": f"{one['n_rows']:,}",
            "chunks": f"{one['n_chunks']:,}",
            "bytes of a chunk": f"{one['chunk_bytes']:,}",
            "workers": str(one["workers"]),
            "tasks": f"{one['tasks']:,}",
            "seconds": f"{one['seconds']:.1f}",
            "chunks/s": f"{one['n_chunks'] / one['seconds']:,.2f}",
            "at its peak [MiB]": f"{one['peak_bytes'] / harness.MIB:.0f}",
            "plan [MiB]": f"{one['plan_worker_bytes'] / harness.MIB:.0f}",
        }
        for one in found
    ]
    harness.print_table(f"p = {N_LANDMARKS}, durable runs", lines)


def checks_of(found: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """What is required of them."""
    return {
        f"{one['name']}: no worker took more memory than planned": one["peak_bytes"] <= one["plan_worker_bytes"]
        for one in found
    }
