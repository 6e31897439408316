"""How do time, memory and error compare with other libraries on the same rows and the same cores?

Every library runs in a fresh process with the settings that its documentation recommends and may use all cores. At a
small size the scores are compared with the exact ones; at a large size only time and memory are measured.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import harness
from benchmarks.peers import PACKAGES, PEERS, Problem
from daskrr import exact
from daskrr.kernels import Gaussian
from daskrr.synthetic import planted_outliers

LENGTH_SCALE = 4.0
N_FEATURES = 10
RIDGE = 1e-3
SEED = 0
TOP = 30


@dataclass(frozen=True)
class Size:
    """Number of rows and of landmarks, and whether the exact scores are computed too."""

    n_rows: int
    n_landmarks: int
    exact: bool


FULL = [Size(5000, 500, True), Size(100_000, 1000, False)]
QUICK = [Size(600, 60, True)]


def compare(size: Size, installed: dict[str, str]) -> dict[str, Any]:
    """Run every library on the same rows."""
    with tempfile.TemporaryDirectory() as folder:
        X = write_rows(Path(folder), size.n_rows)
        truth = exact.leverage_scores(X, Gaussian(LENGTH_SCALE), RIDGE) if size.exact else None
        problem = Problem(folder, size.n_rows, size.n_landmarks, LENGTH_SCALE, RIDGE, SEED)
        found = {name: run(name, problem, truth, installed) for name in PEERS}
    return asdict(size) | {"libraries": found}


def write_rows(folder: Path, n_rows: int) -> NDArray[np.float64]:
    """Write the same rows as a NumPy file and as a Zarr store; clusters and as many isolated rows as are looked for."""
    X = planted_outliers(n_rows, N_FEATURES, TOP, SEED).block(0, n_rows)
    np.save(folder / "rows.npy", X)
    harness.create_store(folder / "rows.zarr", *X.shape, min(8192, n_rows))[:] = X
    return X


def run(name: str, problem: Problem, truth: NDArray | None, installed: dict[str, str]) -> dict[str, Any]:
    """Run one library in a process of its own; a reason under ``"skipped"`` where it cannot run."""
    lacking = [package for package in PACKAGES.get(name, ()) if package not in installed]
    if lacking:
        return {"skipped": f"{', '.join(lacking)} not installed"}
    task = Path(problem.folder) / "problem.json"
    task.write_text(json.dumps(asdict(problem)))
    command = [sys.executable, "-m", "benchmarks.peers", name, str(task)]
    with harness.others_load() as load:
        done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return {"skipped": reason[0]}
    figures = json.loads(done.stdout.splitlines()[-1]) | load
    return figures | ({} if truth is None else {"errors": _errors(problem, truth)})


def _errors(problem: Problem, truth: NDArray) -> dict[str, dict[str, float]]:
    """Compare each of a library's answers with the exact scores."""
    with np.load(Path(problem.folder) / "answer.npz") as found:
        return {kind: errors(found[kind], truth) for kind in found.files}


def errors(scores: NDArray, truth: NDArray) -> dict[str, float]:
    """Logarithmic errors over all rows; share of the score and of the rows found among the highest exact ones."""
    logs = np.abs(np.log(np.maximum(scores, np.finfo(float).tiny) / truth))
    highest = np.argsort(-truth)[:TOP]
    return {
        "median_log_error": float(np.median(logs)),
        "mean_log_error": float(np.mean(logs)),
        "top_ratio": float(scores[highest].sum() / truth[highest].sum()),
        "top_found": len(np.intersect1d(np.argsort(-scores)[:TOP], highest)) / TOP,
    }


def _lines(name: str, figures: dict[str, Any]) -> list[dict[str, str]]:
    """Rows of the printed table, one for each kind of score of a library."""
    peaks = figures["peak_bytes"]
    cost = {
        "seconds": f"{figures['seconds']:.2f}",
        "landmarks": str(figures["n_landmarks"]),
        "peak MiB, largest": f"{max(peaks) / harness.MIB:.0f}",
        "sum": f"{sum(peaks) / harness.MIB:.0f}",
        "processes": str(len(peaks)),
        "others": f"{figures['others']:.0%}",
    }
    if "errors" not in figures:
        return [{"library": name} | cost]
    return [
        {"library": name, "answer": kind}
        | cost
        | {
            "median |log|": f"{found['median_log_error']:.4f}",
            "mean |log|": f"{found['mean_log_error']:.4f}",
            f"top {TOP} ratio": f"{found['top_ratio']:.3f}",
            f"top {TOP} found": f"{found['top_found']:.0%}",
        }
        for kind, found in figures["errors"].items()
    ]


def _show(result: dict[str, Any]) -> None:
    """Print the table of one size."""
    libraries = result["libraries"]
    lines = [line for name, found in libraries.items() if "skipped" not in found for line in _lines(name, found)]
    harness.print_table(f"{result['n_rows']:,} rows, p = {result['n_landmarks']}, d = {N_FEATURES}, λ = {RIDGE}", lines)
    for name, found in libraries.items():
        if "skipped" in found:
            print(f"{name} skipped: {found['skipped']}")


def main() -> int:
    """Run the comparison."""
    options = harness.arguments("peers", __doc__)
    parameters = {"length_scale": LENGTH_SCALE, "ridge": RIDGE, "n_features": N_FEATURES, "workers": harness.WORKERS}
    content = harness.report("peers", SEED, options.quick, parameters)
    results = [compare(size, content["versions"]) for size in (QUICK if options.quick else FULL)]
    for result in results:
        _show(result)
    harness.write_report(options.output, content | {"results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
