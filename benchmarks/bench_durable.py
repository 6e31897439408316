"""What does it cost that a job can be killed: checkpoints, checksums and the lease, beside the same run without them?

Both run from Zarr store to Zarr store on the same workers, in turn; the overhead is the median of the ratios of pairs.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import daskrr
from benchmarks import harness

REQUIRED = 1.05
RIDGE, LENGTH_SCALE, SEED = 1e-3, 8.0, 0
SIZE = {"n_rows": 200_000, "n_features": 32, "n_landmarks": 1024, "pairs": 5}
QUICK = {"n_rows": 4000, "n_features": 8, "n_landmarks": 64, "pairs": 1}


def plain(store: Path, output: Path, landmarks: Any) -> dict[str, Any]:
    """Keep nothing until the end."""
    result = daskrr.leverage_scores(
        store, daskrr.kernels.Gaussian(LENGTH_SCALE), RIDGE, sampling=landmarks, random_state=SEED, progress=False
    )
    return result.store(output, progress=False)


def durable(store: Path, output: Path, landmarks: Any) -> dict[str, Any]:
    """Keep what is finished."""
    return daskrr.score_to_zarr(
        store, output, daskrr.kernels.Gaussian(LENGTH_SCALE), RIDGE, sampling=landmarks, random_state=SEED,
        progress=False,
    )  # fmt: skip


def timed(
    run: Callable[..., dict[str, Any]], store: Path, folder: Path, landmarks: Any
) -> tuple[float, dict[str, Any]]:
    """Seconds of one run, and its summary."""
    with tempfile.TemporaryDirectory(dir=folder) as target:
        began = time.perf_counter()
        summary = run(store, Path(target) / "scores.zarr", landmarks)
        return time.perf_counter() - began, summary


def main() -> int:
    """Run the benchmark; 1 when the overhead is more than it may be."""
    options = harness.arguments("durable", __doc__)
    size = QUICK if options.quick else SIZE
    content = harness.report("durable", SEED, options.quick, {"ridge": RIDGE, "required": REQUIRED, **size})
    landmarks = np.random.default_rng(SEED).choice(size["n_rows"], size["n_landmarks"], replace=False)
    pairs = []
    with tempfile.TemporaryDirectory() as temporary, harness.cluster(), harness.others_load() as load:
        folder = Path(temporary)
        store = folder / "points.zarr"
        rows = harness.chunk_rows(size["n_features"])
        harness.write_normal_store(store, size["n_rows"], size["n_features"], rows, SEED)
        timed(durable, store, folder, landmarks)
        for _ in range(size["pairs"]):
            without, _ = timed(plain, store, folder, landmarks)
            seconds, summary = timed(durable, store, folder, landmarks)
            pairs.append({"plain": without, "durable": seconds, "ratio": seconds / without})
    harness.print_table(
        f"{size['n_rows']:,} rows, p = {size['n_landmarks']}",
        [{name: f"{value:.3f}" for name, value in pair.items()} for pair in pairs],
    )
    overhead, checkpoints = statistics.median(pair["ratio"] for pair in pairs), summary["checkpoints"]
    print(f"{checkpoints['records']} checkpoints of {checkpoints['bytes'] / 2**20:.1f} MiB together")
    passed = overhead <= REQUIRED
    harness.print_checks({f"{overhead:.3f} times the plain run, {REQUIRED} allowed": passed}, options.quick)
    found = {"pairs": pairs, "overhead": overhead, "checkpoints": checkpoints, "passed": passed}
    harness.write_report(options.output, content | load | found)
    return 0 if passed or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
