"""One certified run over as many rows as there is room for, from a float32 store to scores that are verified."""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import daskrr
from benchmarks import harness
from daskrr.jobs.verification import verify

N_FEATURES, N_LANDMARKS, LENGTH_SCALE, RIDGE, SEED = 8, 256, 4.0, 1e-3, 0
CHUNK_ROWS = 2**18
QUICK_ROWS = 2**16


def run(quick: bool, n_rows: int) -> dict[str, Any]:
    """Score and verify; seconds of each, and the largest memory of a worker beside its plan."""
    workers = harness.WORKERS if quick else len(os.sched_getaffinity(0))
    n_rows, chunk_rows = (QUICK_ROWS, QUICK_ROWS // 8) if quick else (n_rows, CHUNK_ROWS)
    problem = (daskrr.kernels.Gaussian(LENGTH_SCALE), RIDGE, N_LANDMARKS)
    settings = {"sampling": "uniform", "certify": True, "random_state": SEED}
    with tempfile.TemporaryDirectory() as temporary:
        store, output = Path(temporary) / "rows.zarr", Path(temporary) / "scores.zarr"
        with harness.cluster(workers=workers) as client:
            harness.write_store_on(client, store, (n_rows, N_FEATURES), chunk_rows, "float32", SEED)
        with harness.cluster(workers=workers) as client:
            idle = [harness.peak_bytes(pid) for pid in harness.worker_pids(client).values()]
            plan = daskrr.plan(store, *problem, **settings)
            began = time.perf_counter()
            summary = daskrr.score_to_zarr(store, output, *problem, progress=False, **settings)
            seconds = time.perf_counter() - began
            peaks = [harness.peak_bytes(pid) for pid in harness.worker_pids(client).values()]
        began = time.perf_counter()
        problems = verify(output)
        return {
            "n_rows": n_rows,
            "workers": workers,
            "seconds": seconds,
            "stages": summary["seconds"],
            "store_bytes": 4 * n_rows * N_FEATURES,
            "idle_bytes": max(idle),
            "peak_bytes": max(peaks),
            "plan_worker_bytes": plan.worker_bytes,
            "deviation": summary["certificate"]["deviation"],
            "median_width": summary["certificate"]["median_width"],
            "verify_seconds": time.perf_counter() - began,
            "problems": problems,
        }


def show(found: dict[str, Any]) -> None:
    """Print what it took."""
    line = {
        "rows": f"{found['n_rows']:,}",
        "workers": str(found["workers"]),
        "seconds": f"{found['seconds']:.1f}",
        "rows/s": f"{found['n_rows'] / found['seconds']:,.0f}",
        "idle worker [MiB]": f"{found['idle_bytes'] / harness.MIB:.0f}",
        "at its peak": f"{found['peak_bytes'] / harness.MIB:.0f}",
        "plan [MiB]": f"{found['plan_worker_bytes'] / harness.MIB:.0f}",
        "median width": f"{found['median_width'][0]:.2g}",
        "verify [s]": f"{found['verify_seconds']:.1f}",
    }
    harness.print_table(f"certified, d = {N_FEATURES}, p = {N_LANDMARKS}, float32 store", [line])


def checks_of(found: dict[str, Any]) -> dict[str, bool]:
    """What is required of it."""
    return {
        "nothing is wrong with what was published": not found["problems"],
        "no worker took more memory than planned": found["peak_bytes"] <= found["plan_worker_bytes"],
    }
