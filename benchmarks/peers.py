"""The libraries that `bench_peers` compares, each to be run in a process of its own.

``python -m benchmarks.peers NAME PROBLEM.json`` computes the scores of the problem's rows by one library, saves them
beside the problem, and prints its figures as one line of JSON. Only the computation is timed: imports, the start of a
cluster and loading the rows for those that need them in memory come before.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from benchmarks import harness

Scores = dict[str, NDArray[np.float64]]


@dataclass(frozen=True)
class Problem:
    """Rows in ``folder`` (as ``rows.npy`` and ``rows.zarr``) and what to compute of them."""

    folder: str
    n_rows: int
    n_landmarks: int
    length_scale: float
    ridge: float
    seed: int

    @property
    def shift(self) -> float:
        """The multiple of the identity that is added to the kernel matrix."""
        return self.n_rows * self.ridge

    def rows(self) -> NDArray[np.float64]:
        """All rows in memory."""
        return np.load(self.path("rows.npy"))

    def path(self, name: str) -> Path:
        """A file of the problem."""
        return Path(self.folder) / name


@dataclass(frozen=True)
class Answer:
    """What one library computed, and what that took; every process that took part counts in the memory."""

    scores: Scores
    seconds: float
    n_landmarks: int
    peak_bytes: list[int]


def daskrr_zarr(problem: Problem) -> Answer:
    """daskrr from Zarr store to Zarr store on worker processes."""
    import daskrr

    target = problem.path("scores.zarr")
    with harness.cluster() as client:
        client.run(_import_engine)
        began = time.perf_counter()
        summary = daskrr.score_to_zarr(
            problem.path("rows.zarr"),
            target,
            daskrr.kernels.Gaussian(problem.length_scale),
            problem.ridge,
            problem.n_landmarks,
            random_state=problem.seed,
            progress=False,
        )
        seconds = time.perf_counter() - began
        peaks = _all_peaks(client)
    found = zarr.open_group(target, mode="r")
    scores = {name: np.asarray(found[name][:]) for name in ("scores", "estimate")}
    return Answer(scores, seconds, summary["distinct_landmarks"], peaks)


def daskrr_numpy(problem: Problem) -> Answer:
    """daskrr from a NumPy array to NumPy arrays on worker processes."""
    import dask

    import daskrr

    X = problem.rows()
    with harness.cluster() as client:
        client.run(_import_engine)
        began = time.perf_counter()
        result = daskrr.leverage_scores(
            X,
            daskrr.kernels.Gaussian(problem.length_scale),
            problem.ridge,
            problem.n_landmarks,
            random_state=problem.seed,
            progress=False,
        )
        scores, estimate = dask.compute(result.scores, result.estimate)
        seconds = time.perf_counter() - began
        found = {"scores": scores, "estimate": estimate}
        return Answer(found, seconds, result.summary["distinct_landmarks"], _all_peaks(client))


def _import_engine() -> None:
    """Import on a worker what its tasks need."""
    import daskrr.jobs  # noqa: F401


def _all_peaks(client: Any) -> list[int]:
    """Peaks of this process, in which the scheduler runs, and of the workers."""
    return [harness.peak_bytes(), *map(harness.peak_bytes, harness.worker_pids(client).values())]


def sklearn_nystroem(problem: Problem) -> Answer:
    """scikit-learn's Nystroem features B, and scores by a Cholesky factor of BᵀB + n·λ·I; BLAS on all cores."""
    from scipy.linalg import cholesky, solve_triangular
    from sklearn.kernel_approximation import Nystroem

    X = problem.rows()
    began = time.perf_counter()
    features = Nystroem(
        kernel="rbf",
        gamma=1 / (2 * problem.length_scale**2),
        n_components=problem.n_landmarks,
        random_state=problem.seed,
    )
    B = features.fit_transform(X)
    gram = B.T @ B
    gram.flat[:: len(gram) + 1] += problem.shift
    whitened = solve_triangular(cholesky(gram, lower=True), B.T, lower=True, check_finite=False)
    scores = np.square(whitened, out=whitened).sum(axis=0)
    seconds = time.perf_counter() - began
    return Answer({"scores": scores}, seconds, len(features.component_indices_), [harness.peak_bytes()])


def dppy_bless(problem: Problem) -> Answer:
    """DPPy's BLESS dictionary and the estimates from it; it chooses the number of landmarks itself."""
    from dppy.bless import bless, estimate_rls_bless
    from sklearn.gaussian_process.kernels import RBF

    X, kernel = problem.rows(), RBF(problem.length_scale)
    began = time.perf_counter()
    dictionary = bless(X, kernel, problem.shift, 2.0, random_state=problem.seed, verbose=False)
    estimate = estimate_rls_bless(dictionary, X, kernel, problem.shift)
    seconds = time.perf_counter() - began
    return Answer({"scores": estimate}, seconds, len(dictionary.idx), [harness.peak_bytes()])


PEERS: dict[str, Callable[[Problem], Answer]] = {
    "daskrr, Zarr": daskrr_zarr,
    "daskrr, NumPy": daskrr_numpy,
    "scikit-learn": sklearn_nystroem,
    "DPPy BLESS": dppy_bless,
}
PACKAGES = {"scikit-learn": ("scikit-learn",), "DPPy BLESS": ("dppy", "scikit-learn")}


def main() -> None:
    """Run one library on one problem."""
    name, path = sys.argv[1:]
    problem = Problem(**json.loads(Path(path).read_text()))
    answer = asdict(PEERS[name](problem))
    np.savez(problem.path("answer.npz"), **answer.pop("scores"))
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
