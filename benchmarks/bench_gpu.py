"""How long does a run take on a GPU, from Zarr store to Zarr store, and how near is that to its matrix multiply?

The limit is the time of the run's floating-point operations, n·(4·p·d + 3·r²), at the rate of large matrix multiplies
on the same GPU, measured in the same worker before and after. The cores of the machine are timed beside it. With
``--quick`` all of it runs on cores, small. Cases of parts that are not run stay as they are in the report.
"""

import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from dask.system import CPU_COUNT
from distributed import Client

import daskrr
from benchmarks import harness
from benchmarks.matmul import matmul_rates
from daskrr.jobs.verification import verify

RIDGE, SEED = 1e-3, 0
MATMUL_SIZE, MATMUL_SECONDS = 8192, 2.0
CHUNK_BYTES = 16 * harness.MIB


@dataclass(frozen=True)
class Case:
    """One run to time; ``required`` is in seconds, 0 for none."""

    name: str
    n_rows: int
    n_features: int
    n_landmarks: int
    length_scale: float
    device: str = "cuda"
    dtype: str = "float64"
    stored: str = "float64"
    sampling: str = "uniform"
    certify: bool = False
    required: float = 0.0
    repeats: int = 2

    @property
    def store(self) -> str:
        """What tells its rows from others."""
        return f"{self.n_rows}-{self.n_features}-{self.stored}.zarr"


WIDE = Case("p = 4096", 10_000_000, 32, 4096, 8.0, required=13.0)
MAIN = Case("p = 1024", 10_000_000, 32, 1024, 8.0, required=3.0)
LARGE = Case(
    "a hundred million rows", 100_000_000, 8, 1024, 4.0, stored="float32", certify=True, required=60.0, repeats=1
)  # fmt: skip
PARTS = {
    "main": [MAIN, WIDE],
    "more": [
        replace(MAIN, name="p = 1024, default, certified", sampling="residual", certify=True, required=0.0),
        replace(MAIN, name="p = 1024, float32", dtype="float32", required=0.0),
        replace(WIDE, name="p = 4096, float32", dtype="float32", required=0.0),
        replace(WIDE, name="p = 4096, default, certified", sampling="residual", certify=True, required=0.0),
    ],
    "cores": [replace(MAIN, name="p = 1024 on cores", device="cpu", required=0.0, repeats=1)],
    "large": [LARGE],
}


def quick(case: Case) -> Case:
    """The same on cores, small."""
    return replace(case, n_rows=case.n_rows // 1000, n_landmarks=64, device="cpu")


def gpu_rate(dtype: str) -> float:
    """Flops per second of matrix multiplies on the GPU of this worker, of random numbers: equal ones are faster."""
    cupy = import_module("cupy")
    A = cupy.asarray(np.random.default_rng(SEED).random((MATMUL_SIZE, MATMUL_SIZE), dtype))
    out, flops = A @ A, 0.0
    cupy.cuda.get_current_stream().synchronize()
    began = time.perf_counter()
    while (passed := time.perf_counter() - began) < MATMUL_SECONDS or not flops:
        cupy.matmul(A, A, out=out)
        cupy.cuda.get_current_stream().synchronize()
        flops += 2.0 * MATMUL_SIZE**3
    return flops / passed


def gpu_bytes() -> int:
    """What this worker has of the memory of its GPU."""
    return int(import_module("cupy").get_default_memory_pool().total_bytes())


def rate(case: Case, client: Client) -> float:
    """Flops per second that the workers can multiply at."""
    if case.device == "cpu":
        seconds = min(MATMUL_SECONDS, case.n_rows / 1e6)
        return matmul_rates(case.dtype, seconds, len(client.nthreads()))["wall"]
    return sum(client.run(gpu_rate, case.dtype).values())


def measure(case: Case, folder: Path, number: int | None) -> dict[str, Any]:
    """Time the last of some runs; seconds, the share of the limit, memory, and whether the result is sound.

    A small run has loaded libraries and code. The first large one has its workers take memory besides, on GPUs too.
    """
    kernel = daskrr.kernels.Gaussian(case.length_scale)
    settings = {
        "sampling": case.sampling, "certify": case.certify, "dtype": case.dtype, "random_state": SEED,
    }  # fmt: skip
    with (
        harness.cluster(workers=number, device=case.device) as client,
        tempfile.TemporaryDirectory(dir=folder) as target,
    ):
        store, small = folder / case.store, folder / f"small-{case.store}"
        daskrr.score_to_zarr(small, f"{target}/small.zarr", kernel, RIDGE, 64, progress=False, **settings)
        before, seconds = rate(case, client), []
        for repeat in range(case.repeats):
            output = Path(target) / f"{repeat}.zarr"
            began = time.perf_counter()
            summary = daskrr.score_to_zarr(store, output, kernel, RIDGE, case.n_landmarks, progress=False, **settings)
            seconds.append(time.perf_counter() - began)
        after = rate(case, client)
        peak = max(harness.peak_bytes(pid) for pid in harness.worker_pids(client).values())
        on_gpu = max(client.run(gpu_bytes).values()) if case.device == "cuda" else 0
        plan = daskrr.plan(store, kernel, RIDGE, case.n_landmarks, **settings)
        problems = verify(output)
    flops = case.n_rows * (4.0 * case.n_landmarks * case.n_features + 3.0 * summary["rank"] ** 2)
    limit = flops / (0.5 * (before + after))
    return asdict(case) | {
        "processors": summary["workers"]["processors"],
        "flops_per_second": [before, after],
        "seconds": seconds[-1],
        "all_seconds": seconds,
        "stages": summary["seconds"],
        "algebra_seconds": sum(summary["algebra"][step]["seconds"] for step in ("whiten", "ridge")),
        "limit_seconds": limit,
        "share_of_limit": limit / seconds[-1],
        "peak_bytes": peak,
        "plan_worker_bytes": plan.worker_bytes,
        "gpu_bytes": on_gpu,
        "plan_gpu_bytes": plan.gpu_bytes,
        "problems": problems,
    }


def write_stores(cases: list[Case], folder: Path, number: int | None) -> None:
    """The rows of all cases, and a few of each kind to begin with."""
    with harness.cluster(workers=number) as client:
        for case in {case.store: case for case in cases}.values():
            for name, n_rows in ((case.store, case.n_rows), (f"small-{case.store}", min(case.n_rows, 2**18))):
                row_bytes = case.n_features * (4 if case.stored == "float32" else 8)
                rows = min(CHUNK_BYTES // row_bytes, n_rows)
                harness.write_store_on(client, folder / name, (n_rows, case.n_features), rows, case.stored, SEED)
    os.sync()  # what was written is not to be under way to the disk while something is timed


def show(results: list[dict[str, Any]]) -> None:
    """Print what they took."""
    lines = [
        {
            "case": one["name"],
            "n": f"{one['n_rows']:,}",
            "on": one["processors"][0][:24],
            "F [Tflop/s]": f"{sum(one['flops_per_second']) / 2e12:.2f}",
            "T_limit [s]": f"{one['limit_seconds']:.2f}",
            "T [s]": f"{one['seconds']:.2f}",
            "first": f"{one['all_seconds'][0]:.2f}",
            "pass 1": f"{one['stages']['pass 1']:.2f}",
            "pass 2": f"{one['stages']['pass 2']:.2f}",
            "(algebra)": f"{one['algebra_seconds']:.2f}",
            "T_limit/T": f"{one['share_of_limit']:.2f}",
            "worker [MiB]": f"{one['peak_bytes'] / harness.MIB:.0f}",
            "GPU [MiB]": f"{one['gpu_bytes'] / harness.MIB:.0f}",
        }
        for one in results
    ]
    harness.print_table("Store to store, one worker for each GPU, or for each core", lines)


def checks_of(results: list[dict[str, Any]]) -> dict[str, bool]:
    """What is required of them."""
    checks = {
        f"{one['name']}: {one['seconds']:.1f} s, at most {one['required']:.0f} s required":
        one["seconds"] <= one["required"] for one in results if one["required"]
    }  # fmt: skip
    checks["nothing is wrong with what was published"] = not any(one["problems"] for one in results)
    checks["no GPU held more than was planned"] = all(one["gpu_bytes"] <= one["plan_gpu_bytes"] for one in results)
    return checks


def earlier(report: Path, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results that a report has of other cases, each with the date of its own."""
    names = {one["name"] for one in found}
    known = json.loads(report.read_text())["results"] if report.exists() else []
    return [one for one in known if one["name"] not in names]


def main() -> int:
    """Run the benchmark; 1 when something that is required does not hold."""
    options = harness.arguments("gpu", __doc__, tuple(PARTS))
    parts = [PARTS[part] for part in options.part or PARTS]
    cases, number = [case for part in parts for case in part], None
    if options.quick:
        cases, number = [quick(part[-1]) for part in parts], harness.WORKERS
    content = harness.report("gpu", SEED, options.quick, {"ridge": RIDGE, "cores": CPU_COUNT})
    with tempfile.TemporaryDirectory() as temporary:
        write_stores(cases, Path(temporary), number)
        found = [measure(case, Path(temporary), number) | {"date": content["date"]} for case in cases]
    show(found)
    results = found if options.quick else found + earlier(options.output, found)
    checks = checks_of(results)
    harness.print_checks(checks, options.quick)
    passed = all(checks.values())
    harness.write_report(options.output, content | {"results": results, "passed": passed})
    return 0 if passed or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
