"""How close is a run, from Zarr store to Zarr store, to the speed of matrix multiplication on the same cores?

The limit is the time of the run's n·(4·p·d + 3·r²) floating-point operations at the rate of large matrix multiplies
in as many processes, measured immediately before and after every timed run.
"""

import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import daskrr
from benchmarks import harness
from benchmarks.matmul import matmul_rate

REQUIRED = 0.60
RIDGE = 1e-3
SEED = 0


@dataclass(frozen=True)
class Case:
    """One problem to time."""

    name: str
    n_rows: int
    n_features: int
    n_landmarks: int
    length_scale: float
    dtype: str
    chunk_rows: int


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    repeats: int
    matmul_seconds: float
    warm_rows: int


MAIN = Case("main", 200_000, 32, 1024, 8.0, "float64", harness.chunk_rows(32))
SMALL = Case("small", 200_000, 8, 256, 4.0, "float64", harness.chunk_rows(32))
COARSE = replace(SMALL, name="small, 8 MiB chunks", chunk_rows=harness.chunk_rows(8))
CASES = [MAIN, replace(MAIN, dtype="float32"), SMALL, replace(SMALL, dtype="float32"), COARSE]
EFFORT = Effort(repeats=3, matmul_seconds=3.0, warm_rows=20_000)

QUICK_CASES = [replace(case, n_rows=4000, n_landmarks=64, chunk_rows=500) for case in CASES[:2]]
QUICK_EFFORT = Effort(repeats=1, matmul_seconds=0.2, warm_rows=1000)


def measure(case: Case, effort: Effort, folder: Path) -> dict[str, Any]:
    """Time the runs of one case on the current client, each between two measurements of the matrix-multiply rate."""
    _score(replace(case, n_rows=effort.warm_rows), folder)
    _store(case, folder)
    rates = [_rate(case, effort)]
    runs = []
    for _ in range(effort.repeats):
        with harness.others_load() as load:
            seconds, summary = _score(case, folder)
        rates.append(_rate(case, effort))
        runs.append(_figures(case, seconds, summary, 0.5 * (rates[-2] + rates[-1])) | load)
    median = statistics.median(run["share_of_limit"] for run in runs)
    return asdict(case) | {"matmul_rates": rates, "runs": runs, "share_of_limit": median}


def _rate(case: Case, effort: Effort) -> float:
    return matmul_rate(case.dtype, effort.matmul_seconds, harness.WORKERS)


def _store(case: Case, folder: Path) -> Path:
    """The rows of a case, written when they are first asked for."""
    path = folder / f"{case.n_rows}-{case.n_features}-{case.chunk_rows}.zarr"
    if not path.exists():
        harness.write_normal_store(path, case.n_rows, case.n_features, case.chunk_rows, SEED)
    return path


def _score(case: Case, folder: Path) -> tuple[float, dict[str, Any]]:
    """Seconds from the call until the scores are on disk, and the summary of the run."""
    landmarks = np.random.default_rng(SEED).choice(case.n_rows, case.n_landmarks, replace=False)
    store = _store(case, folder)
    with tempfile.TemporaryDirectory(dir=folder) as target:
        began = time.perf_counter()
        summary = daskrr.score_to_zarr(
            store,
            Path(target) / "scores.zarr",
            daskrr.kernels.Gaussian(case.length_scale),
            RIDGE,
            sampling=landmarks,
            random_state=SEED,
            dtype=case.dtype,
            progress=False,
        )
        return time.perf_counter() - began, summary


def _figures(case: Case, seconds: float, summary: dict[str, Any], rate: float) -> dict[str, Any]:
    """What one timed run tells."""
    rank, passes = summary["rank"], summary["seconds"]
    flops = case.n_rows * (4.0 * case.n_landmarks * case.n_features + 3.0 * rank**2)
    return {
        "rank": rank,
        "combined_factor": summary["combined_factor"],
        "seconds": seconds,
        "limit_seconds": flops / rate,
        "share_of_limit": flops / rate / seconds,
        "pass_1_seconds": passes["pass 1"],
        "pass_2_seconds": passes["pass 2"],
        "algebra_seconds": sum(summary["algebra"][step]["seconds"] for step in ("whiten", "ridge")),
        "other_seconds": seconds - passes["pass 1"] - passes["pass 2"],
    }


def _lines(result: dict[str, Any]) -> list[dict[str, str]]:
    """Rows of the printed table, one per run."""
    rates = result["matmul_rates"]
    return [
        {
            "case": result["name"],
            "d": str(result["n_features"]),
            "p": str(result["n_landmarks"]),
            "dtype": result["dtype"],
            "r": str(run["rank"]),
            "chunk rows": str(result["chunk_rows"]),
            "Gflop/s": f"{(before + after) / 2e9:.1f}",
            "T_limit [s]": f"{run['limit_seconds']:.2f}",
            "T [s]": f"{run['seconds']:.2f}",
            "pass 1": f"{run['pass_1_seconds']:.2f}",
            "pass 2": f"{run['pass_2_seconds']:.2f}",
            "other": f"{run['other_seconds']:.2f}",
            "(algebra)": f"{run['algebra_seconds']:.2f}",
            "others": f"{run['others']:.0%}",
            "T_limit/T": f"{run['share_of_limit']:.3f}",
            "median": f"{result['share_of_limit']:.3f}",
        }
        for run, before, after in zip(result["runs"], rates[:-1], rates[1:], strict=True)
    ]


def main() -> int:
    """Run the benchmark; 1 when the main case misses what is required of it."""
    options = harness.arguments("limit", __doc__)
    cases, effort = (QUICK_CASES, QUICK_EFFORT) if options.quick else (CASES, EFFORT)
    parameters = {"ridge": RIDGE, "workers": harness.WORKERS, "required": REQUIRED, **asdict(effort)}
    content = harness.report("limit", SEED, options.quick, parameters)
    with tempfile.TemporaryDirectory() as folder, harness.cluster():
        results = [measure(case, effort, Path(folder)) for case in cases]
    passed = results[0]["share_of_limit"] >= REQUIRED
    harness.print_table(
        f"{cases[0].n_rows:,} rows, store to store, {harness.WORKERS} worker processes of one thread",
        [line for result in results for line in _lines(result)],
    )
    print(
        "pass 1 includes fetching the landmarks and the algebra; others: share of the cores that other processes took"
    )
    share = results[0]["share_of_limit"]
    harness.print_checks({f"main case: {share:.3f} of the limit, {REQUIRED:.2f} required": passed}, options.quick)
    harness.write_report(options.output, content | {"results": results, "passed": passed})
    return 0 if passed or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
