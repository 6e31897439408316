"""The libraries that `bench_peers` compares, each to be run in a process of its own.

``python -m benchmarks.peers TASK.json`` runs one of them and prints the figures of all its runs as one line of JSON.
Only the computation is timed, all that it takes to get the scores of all rows and nothing else: imports, the start of a
cluster, a first run on few rows, and loading the rows for those that need them in memory come before.

A peer chooses columns, or makes a factor B with B·Bᵀ ≈ K of them, and its scores are diag(B (BᵀB + n·λ·I)⁻¹ Bᵀ), by
Cholesky factors and triangular solves in memory. BLESS has an estimate of its own besides, which is compared too.
Two peers are on no package index: they are imported from the folder that ``DASKRR_PEERS`` names.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import linalg
from threadpoolctl import threadpool_limits

from benchmarks import harness

Rows = NDArray[np.float64]
Scores = NDArray[np.float64]
Run = dict[str, Any]

FOLDER = "DASKRR_PEERS"
IN_PROCESS, CLUSTER = "in process", "cluster"
ENOUGH_SECONDS = 10.0
WARM_ROWS, WARM_LANDMARKS = 400, 20


@dataclass(frozen=True)
class Task:
    """What one process has to run.

    The folder has, for every size, the rows as ``SIZE.npy`` and ``SIZE.zarr``, and where there are few of them the
    exact scores as ``SIZE-exact.npy``. A peer that takes a number of landmarks gets the first. daskrr is run with each
    of them in turn, until its errors are at most the ``targets``, and once more.
    """

    library: str
    folder: str
    sizes: tuple[str, ...]
    landmarks: tuple[int, ...]
    length_scale: float
    ridge: float
    repeats: int
    targets: Mapping[str, float] | None = None

    def path(self, name: str) -> Path:
        """A file of the folder."""
        return Path(self.folder) / name

    def truth(self, size: str) -> Scores | None:
        """The exact scores, where they are known."""
        path = self.path(f"{size}-exact.npy")
        return np.load(path) if path.exists() else None


@dataclass(frozen=True)
class Setting:
    """The kernel, the ridge and the number of landmarks that a peer is given."""

    length_scale: float
    ridge: float
    n_landmarks: int

    @property
    def gamma(self) -> float:
        """The kernel's parameter by another convention: it is exp(-gamma·‖x - z‖²)."""
        return 1 / (2 * self.length_scale**2)

    def shift(self, X: Rows) -> float:
        """The multiple of the identity that is added to the kernel matrix."""
        return len(X) * self.ridge

    def __call__(self, X: Rows, Z: Rows | None = None) -> NDArray[np.float64]:
        """The kernel matrix, by matrix multiplies."""
        from sklearn.metrics.pairwise import rbf_kernel

        return rbf_kernel(X, Z, gamma=self.gamma)

    @staticmethod
    def diag(X: Rows) -> NDArray[np.float64]:
        """The diagonal of the kernel matrix, which BLESS asks a kernel for."""
        return np.ones(len(X))


@dataclass(frozen=True)
class Cost:
    """Seconds on the wall and of the processors."""

    seconds: float
    processor_seconds: float

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.seconds + other.seconds, self.processor_seconds + other.processor_seconds)


def timed(function: Callable[..., Any], *arguments: Any, clock: Callable[[], float] = time.process_time) -> Any:
    """What a function returns, and its cost; ``clock`` tells processor time."""
    wall, processor = time.perf_counter(), clock()
    value = function(*arguments)
    return value, Cost(time.perf_counter() - wall, clock() - processor)


def errors(scores: Scores, truth: Scores) -> dict[str, float]:
    """Root mean square, median and largest of the relative errors of all rows."""
    relative = np.abs(scores / truth - 1)
    return {
        "rms_error": float(np.sqrt(np.mean(relative**2))),
        "median_error": float(np.median(relative)),
        "largest_error": float(np.max(relative)),
    }


def plain_scores(B: NDArray[np.float64], shift: float) -> Scores:
    """diag(B (BᵀB + shift·I)⁻¹ Bᵀ) of an n × p factor, which is overwritten where its layout allows it."""
    gram = B.T @ B
    gram.flat[:: len(gram) + 1] += shift
    factor = linalg.cholesky(gram, lower=True, overwrite_a=True)
    whitened = linalg.solve_triangular(factor, B.T, lower=True, overwrite_b=True, check_finite=False)
    return np.einsum("ij,ij->j", whitened, whitened)


def nystrom_factor(X: Rows, indices: NDArray[np.integer], kernel: Setting) -> NDArray[np.float64]:
    """The n × p factor of chosen columns; what is added to the diagonal is ten roundings of the trace."""
    chosen = X[indices]
    W = kernel(chosen)
    W.flat[:: len(W) + 1] += 10 * np.finfo(float).eps * np.trace(W)
    columns = kernel(X, chosen)
    lower = linalg.cholesky(W, lower=True, overwrite_a=True)
    return linalg.solve_triangular(lower, columns.T, lower=True, overwrite_b=True, check_finite=False).T


def scores_of_factor(B: NDArray[np.float64], X: Rows, setting: Setting) -> Scores:
    """Score a factor the plain way."""
    return plain_scores(B, setting.shift(X))


def sklearn_factor(X: Rows, setting: Setting, seed: int) -> NDArray[np.float64]:
    """scikit-learn's Nystroem features, of uniform columns."""
    from sklearn.kernel_approximation import Nystroem

    features = Nystroem(kernel="rbf", gamma=setting.gamma, n_components=setting.n_landmarks, random_state=seed)
    return features.fit_transform(X)


def bless_dictionary(oversampling: float, X: Rows, setting: Setting, seed: int) -> Any:
    """DPPy's BLESS, which chooses the number of its columns itself.

    The documentation advises an oversampling of 2 to 10, and to begin with a small one; with 5 it has somewhat more
    columns than the others here.
    """
    from dppy.bless import bless

    return bless(X, setting, setting.shift(X), oversampling, random_state=seed, verbose=False)


def bless_estimate(dictionary: Any, X: Rows, setting: Setting) -> Scores:
    """DPPy's own estimate from its dictionary."""
    from dppy.bless import estimate_rls_bless

    return estimate_rls_bless(dictionary, X, setting, setting.shift(X))


def bless_plain(dictionary: Any, X: Rows, setting: Setting) -> Scores:
    """The plain scores of the columns in the dictionary."""
    return scores_of_factor(nystrom_factor(X, dictionary.idx, setting), X, setting)


def recursive_factor(X: Rows, setting: Setting, seed: int) -> NDArray[np.float64]:
    """The factor of columns that recursive ridge leverage score sampling chooses (Musco & Musco).

    The published code asks SciPy for eigenvalues by a name that is gone, and imports tqdm without using it.
    """
    sys.modules.setdefault("tqdm", SimpleNamespace(tqdm=iter))  # type: ignore[arg-type]
    published = _published("recursive Nyström")
    published.spl = SimpleNamespace(eigvalsh=lambda A, eigvals: linalg.eigvalsh(A, subset_by_index=eigvals))
    kernel = partial(published.gauss, gamma=setting.gamma)
    indices = published.recursiveNystrom(X, setting.n_landmarks, kernel, random_state=seed)
    return nystrom_factor(X, indices, setting)


def pivoted_factor(X: Rows, setting: Setting, seed: int) -> NDArray[np.float64]:
    """Randomly pivoted Cholesky in its accelerated form, the default, whose draws cannot be seeded entirely."""
    published = _published("RPCholesky")
    matrix = importlib.import_module("matrix")
    np.random.seed(seed)  # noqa: NPY002
    found = published.rpcholesky(
        matrix.KernelMatrix(X, kernel="gaussian", bandwidth=setting.length_scale), setting.n_landmarks
    )
    return found.get_left_factor()


@dataclass(frozen=True)
class Peer:
    """Chooses columns by rows, setting and seed; its answers are functions of the choice, rows and setting."""

    choose: Callable[[Rows, Setting, int], Any]
    answers: dict[str, Callable[[Any, Rows, Setting], Scores]]
    size: Callable[[Any], int] = lambda factor: factor.shape[1]
    packages: tuple[str, ...] = ("sklearn",)
    module: str | None = None


def _bless(oversampling: float) -> Peer:
    return Peer(
        partial(bless_dictionary, oversampling),
        {"plain": bless_plain, "its estimate": bless_estimate},
        lambda dictionary: len(dictionary.idx),
        ("sklearn", "dppy"),
    )


PLAIN = {"plain": scores_of_factor}
PEERS = {
    "scikit-learn Nystroem": Peer(sklearn_factor, PLAIN),
    "BLESS, q = 2": _bless(2.0),
    "BLESS, q = 5": _bless(5.0),
    "recursive Nyström": Peer(recursive_factor, PLAIN, module="recursive-nystrom/recursive_nystrom"),
    "RPCholesky": Peer(pivoted_factor, PLAIN, module="rpcholesky/rpcholesky"),
}
# By the names of distributions, for other benchmarks.
PACKAGES = {"DPPy BLESS": ("dppy", "scikit-learn")}


def missing(name: str) -> str | None:
    """Why a peer cannot run here, if so."""
    peer = PEERS[name]
    lacking = [package for package in peer.packages if find_spec(package) is None]
    if lacking:
        return f"{' and '.join(lacking)} not installed"
    if peer.module and not (Path(os.environ.get(FOLDER, "")) / f"{peer.module}.py").is_file():
        return f"{FOLDER} names no folder that has {peer.module}.py"
    return None


def _published(name: str) -> ModuleType:
    """Import the module of a peer from the folder of those that are on no package index."""
    path = Path(os.environ[FOLDER]) / str(PEERS[name].module)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    return importlib.import_module(path.name)


def run_peer(task: Task) -> Iterator[Run]:
    """Run a peer at every size, with one thread for its algebra and with one for each core."""
    setting = Setting(task.length_scale, task.ridge, task.landmarks[0])
    cores = len(os.sched_getaffinity(0))
    for size in task.sizes:
        X, truth = np.load(task.path(f"{size}.npy")), task.truth(size)
        warm = Setting(task.length_scale, task.ridge, WARM_LANDMARKS)
        answers_of(task.library, X[:WARM_ROWS], warm, 0, None)
        for threads in sorted({1, cores}):
            with threadpool_limits(threads):
                for seed in repetitions(task.repeats):
                    for run in answers_of(task.library, X, setting, seed, truth):
                        yield {
                            "size": size,
                            "threads": threads,
                            "seed": seed,
                            "peak_bytes": [harness.peak_bytes()],
                        } | run


def answers_of(name: str, X: Rows, setting: Setting, seed: int, truth: Scores | None) -> list[Run]:
    """All answers of a peer from one choice of columns; each has to pay for the choice."""
    peer, found = PEERS[name], []
    chosen, choosing = timed(peer.choose, X, setting, seed)
    n_landmarks = peer.size(chosen)
    for answer, function in peer.answers.items():
        scores, scoring = timed(function, chosen, X, setting)
        found.append({"answer": answer} | _figures(n_landmarks, choosing + scoring, scores, truth))
    return found


def _figures(n_landmarks: int, cost: Cost, scores: Scores, truth: Scores | None) -> Run:
    return {"n_landmarks": n_landmarks} | vars(cost) | ({} if truth is None else errors(scores, truth))


def repetitions(most: int) -> Iterator[int]:
    """Seeds, as many as were asked for, but none after so many seconds that another would tell little."""
    began = time.perf_counter()
    for seed in range(most):
        if seed and time.perf_counter() - began > ENOUGH_SECONDS:
            return
        yield seed


def run_daskrr(task: Task) -> Iterator[Run]:
    """Run daskrr's estimate at every size with every number of landmarks, until it is accurate enough."""
    with place(task.library) as (suffix, clock, peaks), threadpool_limits(1):
        for size in task.sizes:
            source = task.path(f"{size}{suffix}")
            X = np.load(source) if suffix == ".npy" else str(source)
            estimate_of(X, task, WARM_LANDMARKS, 0)
            yield from _climb(X, size, task, clock, peaks)


def _climb(
    X: Rows | str, size: str, task: Task, clock: Callable[[], float], peaks: Callable[[], list[int]]
) -> Iterator[Run]:
    """One number of landmarks after the other; once more after the first that meets the targets."""
    truth, met = task.truth(size), False
    for n_landmarks in task.landmarks:
        runs = []
        for seed in repetitions(task.repeats):
            scores, cost = timed(estimate_of, X, task, n_landmarks, seed, clock=clock)
            run = {"size": size, "threads": 1, "seed": seed, "answer": "estimate"}
            runs.append(run | _figures(n_landmarks, cost, scores, truth) | {"peak_bytes": peaks()})
        yield from runs
        if met:
            return
        met = task.targets is not None and meets(runs, task.targets)


def meets(runs: list[Run], targets: Mapping[str, float]) -> bool:
    """Whether the medians of the runs are at most the targets."""
    return all(np.median([run[name] for run in runs]) <= target for name, target in targets.items())


def estimate_of(X: Rows | str, task: Task, n_landmarks: int, seed: int) -> Scores:
    """daskrr's estimate of all scores, in memory."""
    import daskrr

    kernel = daskrr.kernels.Gaussian(task.length_scale)
    result = daskrr.leverage_scores(X, kernel, task.ridge, n_landmarks, random_state=seed, progress=False)
    return result.estimate.compute()


@contextmanager
def place(name: str) -> Iterator[tuple[str, Callable[[], float], Callable[[], list[int]]]]:
    """Where daskrr runs: which kind of file it reads, its processor time, and the peaks of its processes.

    In this process from a NumPy array on threads, or on workers from a Zarr array; this process, in which the scheduler
    runs, counts as the workers do.
    """
    if name == IN_PROCESS:
        yield ".npy", time.process_time, lambda: [harness.peak_bytes()]
        return
    with harness.cluster() as client:
        pids = [os.getpid(), *harness.worker_pids(client).values()]
        yield ".zarr", lambda: harness.processor_seconds(pids), lambda: [harness.peak_bytes(pid) for pid in pids]


def main() -> None:
    """Run one library."""
    task = Task(**json.loads(Path(sys.argv[1]).read_text()))
    runs = list(run_peer(task) if task.library in PEERS else run_daskrr(task))
    print(json.dumps(runs))


if __name__ == "__main__":
    main()
