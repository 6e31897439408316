"""Row 42: many jobs at once on one scheduler, and many calls in one process, leave nothing behind."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from distributed import Client
from scenes import GENEROUS, digest, make_points, score_here, until

import daskrr
from daskrr.kernels import Gaussian

N_JOBS, N_CALLS, N_FIRST_CALLS = 50, 300, 50
# What other tests have left in this process may open one meanwhile; 250 calls that leak open more.
FEW = 10
MIB = 2**20


def left_on_scheduler(dask_scheduler: Any) -> dict[str, int]:
    plugin = dask_scheduler.plugins["daskrr"]
    found = {"runs": plugin.runs, "owners": plugin.owners, "ending": plugin.ending, "tasks": dask_scheduler.tasks}
    return {name: len(some) for name, some in found.items()}


@pytest.mark.slow
@pytest.mark.timeout(10 * GENEROUS)
def test_jobs__fifty_at_once_on_one_scheduler_leave_nothing_there(client: Client, tmp_path: Path) -> None:
    points = make_points(tmp_path / "points.zarr", 1500)
    outputs = [tmp_path / f"{number}.zarr" for number in range(N_JOBS)]
    before = {thread.name for thread in threading.enumerate()}
    with ThreadPoolExecutor(N_JOBS) as pool:
        list(pool.map(lambda output: score_here(points, output), outputs))
    assert len({digest(output) for output in outputs}) == 1
    gc.collect()
    until(lambda: not any(client.run_on_scheduler(left_on_scheduler).values()))
    until(lambda: not client.futures)
    until(lambda: not [name for name in started_since(before) if name != "daskrr-algebra_0"])


def started_since(before: set[str]) -> set[str]:
    """Our threads that were not there before."""
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("daskrr-")} - before


def held() -> tuple[int, int, int]:
    """Threads, descriptors and bytes of this process."""
    gc.collect()
    this = psutil.Process()
    return threading.active_count(), this.num_fds(), this.memory_info().rss


@pytest.mark.slow
def test_calls__three_hundred_in_one_process_take_no_more_than_fifty(tmp_path: Path) -> None:
    X = np.random.default_rng(0).standard_normal((2000, 4))

    def call(number: int) -> None:
        found = daskrr.leverage_scores(X, Gaussian(1.0), 1e-2, 60, random_state=number, block_rows=500, progress=False)
        assert np.isfinite(found.scores.compute()).all()

    for number in range(N_FIRST_CALLS):
        call(number)
    threads, descriptors, memory = held()
    for number in range(N_FIRST_CALLS, N_CALLS):
        call(number)
    now = held()
    assert now[0] <= threads + FEW
    assert now[1] <= descriptors + FEW
    assert now[2] < memory + 16 * MIB
