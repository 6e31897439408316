"""How far does it scale: on all cores of this machine, in what a task costs, and on hundreds of simulated workers?

Five parts: runs from Zarr store to Zarr store on 1, 2, 4 … workers against the speed of matrix multiplication; the
processor time of tasks that do nothing, and what a small run is made up of; the engine on workers that sleep; stores of
very many chunks, and of one; and one run over as many rows as there is room for. From these the time of large inputs on
large clusters is estimated. A part that is not run is kept as it is in the report.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness, scale_large, scale_shapes, scale_simulated, scale_tasks, scale_workers
from daskrr.runtime.blocks import MAX_BLOCK_ROWS
from daskrr.runtime.tree import blocks_of_a_span, cut

SEED = 0
PARTS = ("workers", "tasks", "simulated", "shapes", "large")
SIMULATED_FOR_COSTS = 64
QUICK_SIMULATED = 4

# Sizes of the estimate.
ROWS, CORES = (10**8, 10**9), (16, 128, 1000)
# What is said to break first: a scheduler that is busy for so much of a pass, or reads of so many bytes a second.
BUSY, READS = 0.5, 2e9


def estimate(case: dict[str, Any], cost: float, n_rows: int, cores: int) -> dict[str, Any]:
    """Seconds of both passes on many cores, from what a core and a task take here; ``cost`` is of the slowest part."""
    height = min(MAX_BLOCK_ROWS, case["block_rows"])
    pass_flops = 2.0 * case["p"] * (case["p"] + case["d"])
    spans = cut(n_rows, height, cores, blocks_of_a_span(height, pass_flops, 8 * case["p"] ** 2, cores))
    work = n_rows * case["seconds_per_row"] / cores
    tasks = 2 * len(spans) * cost
    seconds = max(work, tasks)
    reads = 2 * 8 * n_rows * case["d"] / seconds
    if tasks > BUSY * seconds:
        first = f"the scheduler: busy {min(1.0, tasks / seconds):.0%}"
    elif reads > READS:
        first = f"storage: {reads / 1e9:.1f} GB/s"
    else:
        first = "nothing: arithmetic decides"
    return {
        "case": case["name"],
        "n_rows": n_rows,
        "cores": cores,
        "tasks_of_a_pass": len(spans),
        "seconds": seconds,
        "scheduler_busy": tasks / seconds,
        "bytes_per_second": reads,
        "breaks_first": first,
    }


def estimates(runs: Sequence[dict[str, Any]], loads: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of all sizes, by the largest runs with uniform landmarks, and the cost of a task with the most workers."""
    each = loads[-1]["milliseconds"]
    cost = max(each["client"], each["scheduler"]) / 1e3
    by_name = {case.name: case for case in scale_workers.CASES if case.sampling == "uniform"}
    last = {one["case"]: one for one in runs if one["kind"] == "durable" and one["case"] in by_name}
    cases = [
        {
            "name": f"d = {by_name[name].n_features}, p = {by_name[name].n_landmarks}",
            "p": by_name[name].n_landmarks,
            "d": by_name[name].n_features,
            "block_rows": one["block_rows"],
            "seconds_per_row": one["task_seconds_per_row"],
        }
        for name, one in last.items()
    ]
    return [estimate(case, cost, n_rows, cores) for case in cases for n_rows in ROWS for cores in CORES]


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _show_estimates(found: Sequence[dict[str, Any]]) -> None:
    lines = [
        {
            "case": one["case"],
            "rows": f"{one['n_rows']:.0e}",
            "cores": str(one["cores"]),
            "tasks a pass": f"{one['tasks_of_a_pass']:,}",
            "time": _duration(one["seconds"]),
            "scheduler busy": f"{one['scheduler_busy']:.0%}",
            "reads [GB/s]": f"{one['bytes_per_second'] / 1e9:.2f}",
            "breaks first": one["breaks_first"],
        }
        for one in found
    ]
    harness.print_table("estimated from the time of a row in tasks and the cost of a task, as measured here", lines)


def _before(output: Path) -> dict[str, Any]:
    """Parts that an earlier report has."""
    found = json.loads(output.read_text()) if output.exists() else {}
    return {part: found[part] for part in PARTS if part in found}


def _measure(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """The results of a part and how they are judged."""
    quick = options.quick
    if part == "workers":
        found = scale_workers.run(quick, options.workers)
        scale_workers.show(found)
        checks = scale_workers.checks_of(found)
    elif part == "tasks":
        found = scale_tasks.run(quick, QUICK_SIMULATED if quick else SIMULATED_FOR_COSTS)
        scale_tasks.show(found)
        checks = scale_tasks.checks_of(found)
    elif part == "simulated":
        found = scale_simulated.run(quick, options.simulated, options.seconds)
        scale_simulated.show(found)
        checks = scale_simulated.checks_of(found)
    elif part == "shapes":
        found = scale_shapes.run(quick)
        scale_shapes.show(found)
        checks = scale_shapes.checks_of(found)
    else:
        large = scale_large.run(quick, options.rows)
        scale_large.show(large)
        found, checks = [large], scale_large.checks_of(large)
    harness.print_checks(checks, quick)
    return {"results": found, "checks": checks}


def main() -> int:
    """Run the benchmark; 1 when something misses what is required of it."""
    cores = len(os.sched_getaffinity(0))
    options = harness.arguments(
        "scale", __doc__, PARTS, workers=(cores, "most workers"), simulated=(1000, "most simulated workers"),
        seconds=(2, "seconds of their tasks"), rows=(10**8, "rows of the large run"),
    )  # fmt: skip
    content = harness.report("scale", SEED, options.quick, scale_workers.parameters())
    ran = {}
    for part in options.part or PARTS:
        head = harness.report("scale", SEED, options.quick, {})
        ran[part] = {"date": head["date"], "machine": head["machine"]} | _measure(part, options)
    parts = ({} if options.quick else _before(options.output)) | ran
    if {"workers", "simulated"} <= set(parts) and not options.quick:
        parts["estimates"] = estimates(parts["workers"]["results"], parts["simulated"]["results"])
        _show_estimates(parts["estimates"])
    harness.write_report(options.output, content | parts)
    passed = all(all(one["checks"].values()) for one in ran.values())
    return 0 if passed or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
