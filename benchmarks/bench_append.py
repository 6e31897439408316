"""What does an update of 5 % more rows cost beside scoring all rows again, and does it give the same bits?

A store is scored, rows are appended, and then, in turn on the same workers: the update, a full run that uses the same
landmarks, and a full run that draws its own.
"""

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zarr

import daskrr
from benchmarks import harness
from daskrr.storage.output import Output

RIDGE, LENGTH_SCALE, SEED = 1e-3, 8.0, 0
SIZE = {"n_rows": 200_000, "added": 10_000, "n_features": 32, "n_landmarks": 1024, "turns": 3}
QUICK = {"n_rows": 4000, "added": 200, "n_features": 8, "n_landmarks": 64, "turns": 1}


def score(store: Path, output: Path, n_landmarks: int | None, **options: Any) -> dict[str, Any]:
    """Score a store as a job."""
    return daskrr.score_to_zarr(
        store, output, daskrr.kernels.Gaussian(LENGTH_SCALE), RIDGE, n_landmarks, random_state=SEED, certify=True,
        progress=False, **options,
    )  # fmt: skip


def append(store: Path, added: int) -> None:
    """Add rows like those that are there."""
    array = zarr.open_array(store, mode="r+")
    before, n_features = array.shape
    array.resize((before + added, n_features))
    array[before:] = np.random.default_rng(SEED + 1).standard_normal((added, n_features)).astype(array.dtype)


def contents(output: Path) -> dict[str, bytes]:
    """The bits of every array."""
    return {name: array[...].tobytes() for name, array in zarr.open_group(output, mode="r").arrays()}


def timed(work: Callable[..., dict[str, Any]], *arguments: Any, **options: Any) -> tuple[float, dict[str, Any]]:
    """Seconds, and the summary."""
    began = time.perf_counter()
    summary = work(*arguments, **options)
    return time.perf_counter() - began, summary


def main() -> int:
    """Run the benchmark; 1 when the bits differ."""
    options = harness.arguments("append", __doc__)
    size = QUICK if options.quick else SIZE
    content = harness.report("append", SEED, options.quick, {"ridge": RIDGE, **size})
    p, turns, same = size["n_landmarks"], [], []
    with tempfile.TemporaryDirectory() as temporary, harness.cluster(), harness.others_load() as load:
        folder = Path(temporary)
        store, first = folder / "points.zarr", folder / "first.zarr"
        harness.write_normal_store(
            store, size["n_rows"], size["n_features"], harness.chunk_rows(size["n_features"]), SEED
        )  # fmt: skip
        score(store, first, p)
        known = Output(first)
        landmarks = known.committed["base"]["indices"]
        append(store, size["added"])
        for turn in range(size["turns"]):
            updated, given, anew = (folder / f"{name}-{turn}.zarr" for name in ("updated", "given", "anew"))
            shutil.copytree(first, updated)
            seconds, summary = timed(daskrr.update_scores, store, updated, refresh="never", progress=False)
            with_given, _ = timed(score, store, given, None, sampling=landmarks)
            in_full, _ = timed(score, store, anew, p)
            same.append(contents(updated) == contents(given))
            turns.append({"update": seconds, "same landmarks": with_given, "anew": in_full})
    full = ("same landmarks", "anew")
    ratios = {name: statistics.median(one["update"] / one[name] for one in turns) for name in full}
    harness.print_table(
        f"{size['n_rows']:,} rows and {size['added']:,} more, p = {p}: seconds",
        [{name: f"{value:.2f}" for name, value in one.items()} for one in turns],
    )
    print(
        f"the update takes {ratios['anew']:.2f} of a full run and {ratios['same landmarks']:.2f} of one with the same "
        f"landmarks; pass 1 read {summary['update']['rows_summed']:,} rows"
    )
    harness.print_checks({"the bits of a full run with the same landmarks": all(same)}, options.quick)
    found = {"turns": turns, "ratios": ratios, "update": summary["update"], "same_bits": all(same)}
    harness.write_report(options.output, content | load | found)
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
