"""What do certified intervals and a path of ridges cost, as a multiple of the plain run?

The same landmarks, rows and cluster; runs from Zarr store to Zarr store, the kinds one after the other and the whole
several times, so that a machine that changes its speed does so for all.
"""

import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import daskrr
from benchmarks import harness

SEED = 0
QUIET = 0.10
RIDGE = 1e-3
PATH = np.logspace(-4, 0, 10).tolist()
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"ridge": RIDGE},
    "certified": {"ridge": RIDGE, "certify": True},
    "10 ridges": {"ridge": PATH},
    "10 ridges, certified": {"ridge": PATH, "certify": True},
    "certified, with the subset bound": {"ridge": RIDGE, "certify": daskrr.Certify(subset_bound=True)},
}
REQUIRED = {"certified": 1.25, "10 ridges": 1.5}


@dataclass(frozen=True)
class Case:
    """One problem to time."""

    n_rows: int
    n_features: int
    n_landmarks: int
    length_scale: float
    chunk_rows: int
    repeats: int


FULL = Case(200_000, 32, 1024, 8.0, harness.chunk_rows(32), 3)
QUICK = Case(4000, 8, 64, 4.0, 500, 1)


def measure(case: Case, folder: Path) -> list[dict[str, Any]]:
    """Time every kind of run, several times in turn."""
    store = folder / "points.zarr"
    harness.write_normal_store(store, case.n_rows, case.n_features, case.chunk_rows, SEED)
    landmarks = np.random.default_rng(SEED).choice(case.n_rows, case.n_landmarks, replace=False)
    _score(case, store, landmarks, KINDS["certified"])
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for _ in range(case.repeats):
        for kind, options in KINDS.items():
            with harness.others_load() as costs:
                run = _score(case, store, landmarks, options)
            found[kind].append(run | costs)
    plain = statistics.median(run["seconds"] for run in found["plain"])
    return [
        {"kind": kind, "runs": runs, "ratio": statistics.median(run["seconds"] for run in runs) / plain}
        for kind, runs in found.items()
    ]


def _score(case: Case, store: Path, landmarks: np.ndarray, options: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=store.parent) as target:
        began = time.perf_counter()
        summary = daskrr.score_to_zarr(
            store,
            Path(target) / "scores.zarr",
            daskrr.kernels.Gaussian(case.length_scale),
            sampling=landmarks,
            random_state=SEED,
            progress=False,
            **options,
        )
        return {"seconds": time.perf_counter() - began, "passes": summary["seconds"], "rank": summary["rank"]}


def _show(results: list[dict[str, Any]]) -> None:
    harness.print_table(
        f"store to store, {harness.WORKERS} worker processes of one thread; medians",
        [
            {
                "run": result["kind"],
                "seconds": " ".join(f"{run['seconds']:.1f}" for run in result["runs"]),
                "pass 1": " ".join(f"{run['passes']['pass 1']:.1f}" for run in result["runs"]),
                "pass 2": " ".join(f"{run['passes']['pass 2']:.1f}" for run in result["runs"]),
                "others": f"{max(run['others'] for run in result['runs']):.0%}",
                "times plain": f"{result['ratio']:.2f}",
                "allowed": f"{REQUIRED[result['kind']]:.2f}" if result["kind"] in REQUIRED else "",
            }
            for result in results
        ],
    )


def main() -> int:
    """Run the benchmark; 1 when a kind costs more than it may."""
    options = harness.arguments("overhead", __doc__)
    case = QUICK if options.quick else FULL
    content = harness.report("overhead", SEED, options.quick, asdict(case) | {"required": REQUIRED, "ridges": PATH})
    with tempfile.TemporaryDirectory() as folder, harness.cluster():
        results = measure(case, Path(folder))
    _show(results)
    ratios = {result["kind"]: result["ratio"] for result in results}
    checks = {
        f"{kind}: {ratios[kind]:.2f} times the plain run, {most:.2f} allowed": ratios[kind] <= most
        for kind, most in REQUIRED.items()
    }
    harness.print_checks(checks, options.quick)
    disturbed = max(run["others"] for result in results for run in result["runs"]) > QUIET
    if disturbed:
        print("DISTURBED: other programs competed with the runs")
    passed = all(checks.values())
    harness.write_report(options.output, content | {"results": results, "passed": passed, "disturbed": disturbed})
    return 0 if passed or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
