"""Does the memory of a worker depend on the number of rows, and does it stay below what the plan says?

Every run has a cluster of its own, since the largest resident memory of a process never falls again. The last run
gives the workers little more than the memory limit that the plan asks for, and has rows that do not fit in all their
limits together.
"""

import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distributed import Client

import daskrr
from benchmarks import harness

ALLOWED_GROWTH = 0.10
LIMIT_SLACK = 1.1
LENGTH_SCALE = 8.0
RIDGE = 1e-3
SEED = 0


@dataclass(frozen=True)
class Sizes:
    """Rows of the runs, and what they share; ``over_limit`` is the last run's rows in units of all limits together."""

    few_rows: int
    many_rows: int
    n_features: int
    n_landmarks: int
    over_limit: float
    chunk_rows: int


FULL = Sizes(200_000, 3_200_000, 32, 1024, 1.1, harness.chunk_rows(32))
QUICK = Sizes(4000, 16_000, 32, 32, 0.004, 1000)


def measure(sizes: Sizes, n_rows: int, memory_limit: int | None) -> dict[str, Any]:
    """Score ``n_rows`` rows on a fresh cluster; tell the workers' peaks and whether all went through undisturbed."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "rows.zarr"
        harness.write_normal_store(store, n_rows, sizes.n_features, sizes.chunk_rows, SEED)
        problem = (daskrr.kernels.Gaussian(LENGTH_SCALE), RIDGE, sizes.n_landmarks)
        with harness.cluster(memory_limit) as client:
            plan = daskrr.plan(store, *problem, random_state=SEED)
            pids = harness.worker_pids(client)
            began = time.perf_counter()
            daskrr.score_to_zarr(store, Path(folder) / "scores.zarr", *problem, random_state=SEED, progress=False)
            seconds = time.perf_counter() - began
            return {
                "n_rows": n_rows,
                "data_bytes": 8 * n_rows * sizes.n_features,
                "memory_limit": memory_limit,
                "seconds": seconds,
                "peak_bytes": [harness.peak_bytes(pid) for pid in pids.values()],
                "plan_worker_bytes": plan.worker_bytes,
                "plan_memory_limit": plan.memory_limit,
                "restarted": harness.worker_pids(client) != pids,
                "paused": _was_paused(client, list(pids)),
            }


def _was_paused(client: Client, addresses: list[str]) -> bool:
    """Whether the scheduler has seen a worker pause, as one does that runs out of memory."""
    events = [event for address in addresses for _, event in client.get_events(address)]
    return any(event["action"] == "worker-status-change" and event["status"] == "paused" for event in events)


def judge(few: dict[str, Any], many: dict[str, Any], limited: dict[str, Any]) -> dict[str, bool]:
    """What is required of the three runs."""
    return {
        "independent of the rows": max(many["peak_bytes"]) < (1 + ALLOWED_GROWTH) * max(few["peak_bytes"]),
        "below the plan": all(max(run["peak_bytes"]) < run["plan_worker_bytes"] for run in (few, many, limited)),
        "rows exceed the limits": limited["data_bytes"] > harness.WORKERS * limited["memory_limit"],
        "no worker restarted or paused": not (limited["restarted"] or limited["paused"]),
    }


def _line(run: dict[str, Any]) -> dict[str, str]:
    """Row of the printed table; memory in MiB."""
    limit = run["memory_limit"]
    return {
        "rows": f"{run['n_rows']:,}",
        "data": f"{run['data_bytes'] / harness.MIB:.0f}",
        "limits together": f"{harness.WORKERS * limit / harness.MIB:.0f}" if limit else "none",
        "seconds": f"{run['seconds']:.1f}",
        "worker peaks": ", ".join(f"{peak / harness.MIB:.1f}" for peak in run["peak_bytes"]),
        "plan": f"{run['plan_worker_bytes'] / harness.MIB:.1f}",
        "restarted": "yes" if run["restarted"] else "no",
        "paused": "yes" if run["paused"] else "no",
    }


def main() -> int:
    """Run the benchmark; 1 when a requirement is missed."""
    options = harness.arguments("memory", __doc__)
    sizes = QUICK if options.quick else FULL
    parameters = {"ridge": RIDGE, "length_scale": LENGTH_SCALE, "workers": harness.WORKERS, **asdict(sizes)}
    content = harness.report("memory", SEED, options.quick, parameters)
    few = measure(sizes, sizes.few_rows, None)
    many = measure(sizes, sizes.many_rows, None)
    limit = int(LIMIT_SLACK * many["plan_memory_limit"])
    limited = measure(sizes, int(sizes.over_limit * harness.WORKERS * limit / (8 * sizes.n_features)), limit)
    harness.print_table(
        f"{sizes.n_landmarks} landmarks, {sizes.n_features} features, float64; memory in MiB",
        [_line(run) for run in (few, many, limited)],
    )
    growth = max(many["peak_bytes"]) / max(few["peak_bytes"]) - 1
    print(f"growth of the peak: {growth:+.1%}, less than {ALLOWED_GROWTH:+.0%} required")
    checks = judge(few, many, limited)
    harness.print_checks(checks, options.quick)
    results = {"few": few, "many": many, "limited": limited, "growth": growth, "checks": checks}
    harness.write_report(options.output, content | {"results": results, "passed": all(checks.values())})
    return 0 if options.quick or all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
