"""How much work is done again by a job that is killed k times, and how much may it be at most?

A job runs in a process group of its own, which is killed at random moments and started again until it is done. Work is
counted by the chunks of the input that are read. A kill may cost the tasks that were in flight, each of which has the
blocks of one span; while the rows of the landmarks are gathered, all that was read for that.
"""

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.storage import LocalStore

import daskrr
from benchmarks import harness
from daskrr.runtime.tree import cut

RIDGE, LENGTH_SCALE, SEED = 1e-3, 8.0, 0
SIZE = {"n_rows": 400_000, "n_features": 32, "n_landmarks": 512, "chunk_rows": 8192, "kills": [1, 2, 4, 8]}
QUICK = {"n_rows": 40_000, "n_features": 8, "n_landmarks": 64, "chunk_rows": 4096, "kills": [1]}


class CountingStore(LocalStore):
    """A store that notes in a file beside it which of its chunks was read."""

    async def get(self, key: str, *arguments: Any, **options: Any) -> Any:
        """Read a key, and note it."""
        if key.startswith("c/"):
            with open(f"{self.root}.reads", "a") as file:
                file.write(f"{key}\n")
        return await super().get(key, *arguments, **options)


def job(points: str, output: str, n_landmarks: int, block_rows: int) -> None:
    """The job itself, in a process that may be killed."""
    array = zarr.open_array(CountingStore(points, read_only=True), mode="r")
    with harness.cluster():
        daskrr.score_to_zarr(
            array, output, daskrr.kernels.Gaussian(LENGTH_SCALE), RIDGE, n_landmarks, random_state=SEED,
            block_rows=block_rows, progress=False,
        )  # fmt: skip


def start(points: Path, output: Path, size: dict[str, Any]) -> subprocess.Popen:
    """The job, as the leader of a process group."""
    words = [str(points), str(output), str(size["n_landmarks"]), str(size["chunk_rows"])]
    return subprocess.Popen([sys.executable, "-m", "benchmarks.bench_restart", "--job", *words], start_new_session=True)


def reads(points: Path) -> int:
    """Chunks that were read since this was asked last."""
    notes = Path(f"{points}.reads")
    found = len(notes.read_text().splitlines()) if notes.exists() else 0
    notes.unlink(missing_ok=True)
    return found


def finished(output: Path) -> list[str]:
    """Records of what a job has finished, while others come and go."""
    found = (os.path.join(folder, name) for folder, _, names in os.walk(output / ".daskrr/records") for name in names)
    return [path for path in found if path.endswith(".record")]


def run(points: Path, output: Path, size: dict[str, Any], moments: list[int]) -> dict[str, Any]:
    """Run a job, killed whenever it has so many records; a kill while landmarks are gathered is counted apart."""
    began, kills, gathering = time.perf_counter(), 0, 0
    for moment in [*moments, math.inf]:
        process = start(points, output, size)
        while process.poll() is None and len(finished(output)) < moment:
            time.sleep(0.002)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
            gathering += not any("/sample-rows-" in path for path in finished(output))
        process.wait()
    seconds = time.perf_counter() - began
    done = process.returncode == 0
    return {"kills": kills, "while_gathering": gathering, "reads": reads(points), "seconds": seconds, "done": done}


def main() -> int:
    """Run the benchmark; 1 when more was done again than may be."""
    options = harness.arguments("restart", __doc__)
    size = QUICK if options.quick else SIZE
    content = harness.report("restart", SEED, options.quick, {"ridge": RIDGE, **size})
    chunks = -(-size["n_rows"] // size["chunk_rows"])
    # One task is under way on each worker; a block has the rows of a chunk.
    in_flight = harness.WORKERS * cut(size["n_rows"], size["chunk_rows"], harness.WORKERS, chunks)[0].n_blocks
    found = []
    with tempfile.TemporaryDirectory() as temporary, harness.others_load() as load:
        folder = Path(temporary)
        points = folder / "points.zarr"
        harness.write_normal_store(points, size["n_rows"], size["n_features"], size["chunk_rows"], SEED)
        undisturbed = run(points, folder / "0.zarr", size, [])
        records = daskrr.open_scores(folder / "0.zarr").summary["checkpoints"]["records"]
        expected = daskrr.open_scores(folder / "0.zarr")["scores"][:].tobytes()
        for kills in size["kills"]:
            moments = np.sort(np.random.default_rng(SEED + kills).integers(1, records, kills)).tolist()
            one = run(points, folder / f"{kills}.zarr", size, moments)
            again = one["reads"] - undisturbed["reads"]
            same = daskrr.open_scores(folder / f"{kills}.zarr")["scores"][:].tobytes() == expected
            bound = one["kills"] * in_flight + one["while_gathering"] * chunks
            found.append(one | {"again": again, "bound": bound, "same_bits": same, "within": again <= bound})
    harness.print_table(
        f"{size['n_rows']:,} rows, {undisturbed['reads']} chunks read by an undisturbed job",
        [
            {
                "kills": f"{one['kills']}",
                "chunks read again": f"{one['again']}",
                "at most": f"{one['bound']}",
                "share of the job": f"{one['again'] / undisturbed['reads']:.2f}",
                "same bits": str(one["same_bits"]),
            }
            for one in found
        ],
    )
    passed = all(one["within"] and one["same_bits"] and one["done"] for one in found)
    harness.print_checks({"no more is done again than may be, to the same bits": passed}, options.quick)
    results = {"undisturbed": undisturbed, "results": found, "passed": passed}
    harness.write_report(options.output, content | load | results)
    return 0 if passed else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        from benchmarks import bench_restart

        bench_restart.job(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    else:
        sys.exit(main())
