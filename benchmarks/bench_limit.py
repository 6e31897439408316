"""How close is a run, from Zarr store to Zarr store, to the speed of matrix multiplication on the same cores?

The limit is the time of the run's floating-point operations, n·(4·p·d + 3·r²) for scores and n·(2·p·d + 2·r²) for the
one pass of a regression, at the rate of large matrix multiplies in as many processes, measured immediately before and
after every timed run; what choosing landmarks takes is not in it. The same share by processor time, which counts
neither waiting nor what other programs take, is told beside it. A case that is not run is kept as it is in the report.
"""

import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from distributed import Client

import daskrr
from benchmarks import harness
from benchmarks.matmul import matmul_rates

QUIET = 0.10
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
    required: float
    work: str = "score"
    sampling: str = "uniform"
    certify: bool = False

    def flops(self, rank: int) -> float:
        """Floating-point operations of all passes."""
        p, d = self.n_landmarks, self.n_features
        return self.n_rows * (4.0 * p * d + 3.0 * rank**2 if self.work == "score" else 2.0 * p * d + 2.0 * rank**2)


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    repeats: int
    matmul_seconds: float
    warm_rows: int


MAIN = Case("uniform", 200_000, 32, 1024, 8.0, "float64", harness.chunk_rows(32), 0.80)
DEFAULT = replace(MAIN, name="default", sampling="residual", required=0.62)
FIT = replace(MAIN, name="fit", work="fit", required=0.78)
SMALL = Case("small", 2_000_000, 8, 256, 4.0, "float64", harness.chunk_rows(32), 0.45)
CASES = [
    MAIN,
    DEFAULT,
    replace(DEFAULT, name="default, certified", certify=True, required=0.58),
    replace(MAIN, name="uniform, float32", dtype="float32", required=0.58),
    FIT,
    replace(FIT, name="fit, certified", certify=True, required=0.0),
    SMALL,
    replace(SMALL, name="small, float32", dtype="float32", required=0.0),
    replace(SMALL, name="small, 8 MiB chunks", chunk_rows=harness.chunk_rows(8), required=0.0),
]
EFFORT = Effort(repeats=3, matmul_seconds=3.0, warm_rows=20_000)

QUICK_CASES = [
    replace(case, n_rows=4000, n_landmarks=64, chunk_rows=500) for case in (FIT, replace(DEFAULT, dtype="float32"))
]
QUICK_EFFORT = Effort(repeats=1, matmul_seconds=0.2, warm_rows=1000)


def measure(case: Case, effort: Effort, client: Client, folder: Path) -> dict[str, Any]:
    """Time the runs of one case, each between two measurements of the matrix-multiply rate."""
    _run(replace(case, n_rows=effort.warm_rows), folder)
    _store(case, folder)
    rates = [matmul_rates(case.dtype, effort.matmul_seconds, harness.WORKERS)]
    runs = []
    for _ in range(effort.repeats):
        seconds, summary, costs = _observe(case, client, folder)
        rates.append(matmul_rates(case.dtype, effort.matmul_seconds, harness.WORKERS))
        mean = {clock: 0.5 * (rates[-2][clock] + rates[-1][clock]) for clock in rates[-1]}
        runs.append(_figures(case, seconds, summary, costs, mean))
    median = statistics.median(run["share_of_limit"] for run in runs)
    return asdict(case) | {"matmul_rates": rates, "runs": runs, "share_of_limit": median}


def _observe(case: Case, client: Client, folder: Path) -> tuple[float, dict[str, Any], dict[str, float]]:
    """Time one run, and what it and other programs took of the processors."""
    pids = harness.worker_pids(client).values()
    before = harness.processor_seconds(pids)
    with harness.others_load() as costs:
        seconds, summary = _run(case, folder)
    return seconds, summary, costs | {"worker_processor_seconds": harness.processor_seconds(pids) - before}


def _store(case: Case, folder: Path) -> Path:
    """The rows of a case, written when they are first asked for."""
    path = folder / f"{case.n_rows}-{case.n_features}-{case.chunk_rows}.zarr"
    if not path.exists():
        harness.write_normal_store(path, case.n_rows, case.n_features, case.chunk_rows, SEED)
    return path


def _run(case: Case, folder: Path) -> tuple[float, dict[str, Any]]:
    return _score(case, folder) if case.work == "score" else _fit(case, folder)


def _settings(case: Case) -> dict[str, Any]:
    """What scores and regressions take alike."""
    return {
        "kernel": daskrr.kernels.Gaussian(case.length_scale),
        "ridge": RIDGE,
        "landmarks": case.n_landmarks,
        "sampling": case.sampling,
        "certify": case.certify,
        "random_state": SEED,
        "dtype": case.dtype,
    }


def _fit(case: Case, folder: Path) -> tuple[float, dict[str, Any]]:
    """Seconds from the call until the model is fitted, and its summary; targets are read from a store too."""
    store, targets = _store(case, folder), _store(replace(case, n_features=1), folder)
    model = daskrr.NystromKernelRidge(**_settings(case))
    began = time.perf_counter()
    model.fit(store, targets)
    return time.perf_counter() - began, model.summary()


def _score(case: Case, folder: Path) -> tuple[float, dict[str, Any]]:
    """Seconds from the call until the scores are on disk, and the summary of the run."""
    store = _store(case, folder)
    with tempfile.TemporaryDirectory(dir=folder) as target:
        began = time.perf_counter()
        summary = daskrr.score_to_zarr(store, Path(target) / "scores.zarr", progress=False, **_settings(case))
        return time.perf_counter() - began, summary


def _figures(
    case: Case, seconds: float, summary: dict[str, Any], costs: dict[str, float], rates: dict[str, float]
) -> dict[str, Any]:
    """What one timed run tells."""
    flops = case.flops(summary["rank"])
    processor_limit = harness.WORKERS * flops / rates["processor"]
    found = {
        "rank": summary["rank"],
        "flops_per_second": rates["wall"],
        "seconds": seconds,
        "limit_seconds": flops / rates["wall"],
        "share_of_limit": flops / rates["wall"] / seconds,
        "share_by_processor_time": processor_limit / costs["worker_processor_seconds"],
        **costs,
    }
    if case.work == "score":
        passes, algebra = summary["seconds"], summary["algebra"]
        found |= {
            "combined_factor": summary["combined_factor"],
            "pass_1_seconds": passes["pass 1"],
            "pass_2_seconds": passes["pass 2"],
            "algebra_seconds": sum(algebra[step]["seconds"] for step in ("whiten", "ridge")),
            "other_seconds": seconds - passes["pass 1"] - passes["pass 2"],
        }
    return found


PARTS = {
    "pass 1": "pass_1_seconds",
    "pass 2": "pass_2_seconds",
    "other": "other_seconds",
    "(algebra)": "algebra_seconds",
}


def _seconds(run: dict[str, Any], part: str) -> str:
    return f"{run[part]:.2f}" if part in run else ""


def _lines(result: dict[str, Any]) -> list[dict[str, str]]:
    """Rows of the printed table, one per run."""
    return [
        {
            "case": result["name"],
            "n": f"{result['n_rows']:,}",
            "d": str(result["n_features"]),
            "p": str(result["n_landmarks"]),
            "dtype": result["dtype"],
            "r": str(run["rank"]),
            "chunk rows": str(result["chunk_rows"]),
            "F [Gflop/s]": f"{run['flops_per_second'] / 1e9:.1f}",
            "T_limit [s]": f"{run['limit_seconds']:.2f}",
            "T [s]": f"{run['seconds']:.2f}",
            **{name: _seconds(run, key) for name, key in PARTS.items()},
            "others": f"{run['others']:.0%}",
            "by processor": f"{run['share_by_processor_time']:.3f}",
            "T_limit/T": f"{run['share_of_limit']:.3f}",
            "median": f"{result['share_of_limit']:.3f}",
            "required": f"{result['required']:.2f}" if result["required"] else "",
        }
        for run in result["runs"]
    ]


def _show(results: list[dict[str, Any]], disturbed: bool) -> None:
    """Print the table and how to read it."""
    harness.print_table(
        f"Store to store, {harness.WORKERS} worker processes of one thread",
        [line for result in results for line in _lines(result)],
    )
    print("pass 1: with fetching the landmarks and the algebra; others: share of the cores that other programs took;")
    print("by processor: the share of the limit in processor time of the workers, so without waiting")
    if disturbed:
        print("DISTURBED: other programs competed with a judged case, which makes T_limit/T meaningless")


def _before(output: Path) -> list[dict[str, Any]]:
    """What an earlier report has of cases."""
    return json.loads(output.read_text())["results"] if output.exists() else []


def main() -> int:
    """Run the benchmark; 1 when a judged case misses what is required of it."""
    options = harness.arguments("limit", __doc__, [case.name for case in CASES])
    cases, effort = (QUICK_CASES, QUICK_EFFORT) if options.quick else (CASES, EFFORT)
    parameters = {"ridge": RIDGE, "workers": harness.WORKERS, **asdict(effort)}
    content = harness.report("limit", SEED, options.quick, parameters)
    about = {"date": content["date"], "machine": content["machine"]}
    found = {} if options.quick else {one["name"]: one for one in _before(options.output)}
    with tempfile.TemporaryDirectory() as folder, harness.cluster() as client:
        for case in cases:
            if not options.part or case.name in options.part:
                found[case.name] = measure(case, effort, client, Path(folder)) | about
    results = [found[case.name] for case in cases if case.name in found]
    judged = [one for one in results if one["required"]]
    checks = {
        f"{one['name']}: {one['share_of_limit']:.3f} of the limit, {one['required']:.2f} required":
        one["share_of_limit"] >= one["required"] for one in judged
    }  # fmt: skip
    disturbed = max(run["others"] for one in judged for run in one["runs"]) > QUIET
    _show(results, disturbed)
    harness.print_checks(checks, options.quick)
    passed = all(checks.values())
    harness.write_report(options.output, content | {"results": results, "passed": passed, "disturbed": disturbed})
    return 0 if passed or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
