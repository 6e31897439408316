"""By which error should a regression choose its ridge? Every criterion against the test error that it leads to.

Residual landmarks are outliers by construction, and leave-one-out with landmarks kept says little of them. Here every
data set gives some training rows, others for testing, and few or many landmarks; every criterion chooses among the
default kernels and the ridges, and is charged with the test error at its choice over the least test error of all.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import daskrr
from benchmarks import harness
from daskrr.regression.cross_validation import KFold

# Training rows and landmarks: few, some, and half of the rows.
CASES = ((2000, 100), (2000, 400), (600, 300))
SEEDS = 3
RIDGES = np.logspace(-9, 0, 19)
FOLDS = 5
DATA = (
    "uci-kin40k", "uci-elevators", "uci-keggdirected", "pumadyn-32fm", "pumadyn-32fh", "pumadyn-32nh", "nycflights13",
)  # fmt: skip
# Beyond these, delays in minutes say little of the schedule.
FLIGHT_DELAYS = (-60.0, 120.0)
ALL, APART = "errors_all_rows", "errors_without_landmarks"
# The scoring, and by which of its errors the kernel and the ridge are chosen.
CRITERIA = {
    "loo, all rows": ("loo", ALL, ALL),
    "loo, no landmarks": ("loo", APART, APART),
    "loo, kernel by all rows, ridge by no landmarks": ("loo", ALL, APART),
    "gcv": ("gcv", "errors", "errors"),
    "folds": ("kfold", "errors", "errors"),
}

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Split:
    """Training and test rows, standardized by the former."""

    X: Matrix
    y: Matrix
    X_test: Matrix
    y_test: Matrix

    @classmethod
    def of(cls, X: Matrix, y: Matrix, n_rows: int, seed: int) -> "Split":
        """At most ``n_rows`` of either, drawn at random."""
        chosen = np.random.default_rng(seed).permutation(len(X))[: 2 * n_rows]
        train, test = np.array_split(chosen, 2)
        centre, spread = X[train].mean(axis=0), X[train].std(axis=0)
        X = (X - centre) / np.where(spread > 0, spread, 1.0)
        y = (y - y[train].mean()) / y[train].std()
        return cls(X[train], y[train], X[test], y[test])

    def test_errors(self, kernel: daskrr.kernels.Kernel, n_landmarks: int, seed: int) -> Matrix:
        """(L,) root mean squared errors of the test rows at every ridge, with the landmarks that a model has."""
        features = daskrr.NystromTransformer(kernel, n_landmarks, random_state=seed).fit(self.X)
        B, T = features.transform(self.X), features.transform(self.X_test)
        mean = B.mean(axis=0)
        B -= mean
        sizes, vectors = np.linalg.eigh(B.T @ B)
        coordinates = vectors.T @ (B.T @ (self.y - self.y.mean()))
        shrunk = coordinates[:, None] / (np.maximum(sizes, 0.0)[:, None] + len(B) * RIDGES)
        found = self.y.mean() + (T - mean) @ (vectors @ shrunk) - self.y_test[:, None]
        return np.sqrt(np.mean(found**2, axis=0))


@dataclass(frozen=True)
class Charge:
    """What a criterion's choice costs: test error over the least one, less 1.

    ``both`` for the choice among kernels and ridges, ``ridge`` for that of the ridge alone, the mean over kernels.
    """

    data: str
    n_rows: int
    n_landmarks: int
    seed: int
    criterion: str
    best: float
    both: float
    ridge: float


def charges(name: str, split: Split, n_landmarks: int, seed: int) -> Iterator[Charge]:
    """Every criterion on one problem."""
    models = {
        scoring: daskrr.NystromKernelRidgeCV(
            None, RIDGES, n_landmarks, scoring=KFold(FOLDS) if scoring == KFold.name else scoring, fit_intercept=True,
            certify=False, random_state=seed,
        ).fit(split.X, split.y)
        for scoring in dict.fromkeys(scoring for scoring, _, _ in CRITERIA.values())
    }  # fmt: skip
    kernels = models["gcv"].cv_results_["kernels"]
    tested = np.array([split.test_errors(kernel, n_landmarks, seed) for kernel in kernels])
    # A ridge that round-off would decide is no choice.
    tested[np.isnan(models["gcv"].cv_results_["errors"])] = np.nan
    for criterion, (scoring, kernel_key, ridge_key) in CRITERIA.items():
        found = models[scoring].cv_results_
        kernel = int(np.argmin(np.nanmin(found[kernel_key], axis=1)))
        at_choice = tested[np.arange(len(kernels)), np.nanargmin(found[ridge_key], axis=1)]
        yield Charge(
            data=name, n_rows=len(split.X), n_landmarks=n_landmarks, seed=seed, criterion=criterion,
            best=float(np.nanmin(tested)),
            both=float(at_choice[kernel] / np.nanmin(tested) - 1.0),
            ridge=float(np.mean(at_choice / np.nanmin(tested, axis=1) - 1.0)),
        )  # fmt: skip


def problems(folder: Path) -> Iterator[tuple[str, Matrix, Matrix]]:
    """The data sets that the folder has."""
    for name in DATA:
        path = folder / f"{name}.npz"
        if not path.exists():
            print(f"{name}: there is no {path}")
            continue
        with np.load(path) as data:
            X, y = data["X"].astype(np.float64), data["y"].astype(np.float64)
        yield name, X, np.clip(y, *FLIGHT_DELAYS) if name == "nycflights13" else y


def made_up() -> tuple[str, Matrix, Matrix]:
    """A small problem that needs no data."""
    generator = np.random.default_rng(0)
    X = generator.standard_normal((400, 2))
    return "made up", X, np.sin(2 * X[:, 0]) + 0.3 * generator.standard_normal(400)


def study(folder: Path | None) -> dict[str, Any]:
    """Charges of every criterion on every data set, or on a made-up one that takes seconds; printed and for JSON."""
    quick = folder is None
    cases, seeds = (((150, 30),), 1) if quick else (CASES, SEEDS)
    found: list[Charge] = []
    for name, X, y in [made_up()] if folder is None else problems(folder):
        for seed in range(seeds):
            for n_rows, n_landmarks in cases:
                found += charges(name, Split.of(X, y, n_rows, seed), n_landmarks, seed)
        print(f"{name}: {', '.join(f'{key} {value}' for key, value in _row(found, name).items())}", flush=True)
    _show(found)
    parameters = {"cases": cases, "seeds": seeds, "ridges": RIDGES.tolist(), "folds": FOLDS}
    return {"parameters": parameters, "charges": [asdict(one) for one in found]}


def _row(found: list[Charge], name: str | None, size: int | None = None, part: str = "both") -> dict[str, str]:
    """Mean and worst charge of every criterion, in percent, on one data set or with one number of landmarks."""
    chosen = [one for one in found if name in (None, one.data) and size in (None, one.n_landmarks)]
    cells = {}
    for criterion in CRITERIA:
        values = [100 * getattr(one, part) for one in chosen if one.criterion == criterion]
        cells[criterion] = f"{np.mean(values):.2f} ({max(values):.1f})"
    return cells


def _show(found: list[Charge]) -> None:
    names = list(dict.fromkeys(one.data for one in found))
    sizes = list(dict.fromkeys(one.n_landmarks for one in found))
    for title, part in (("kernel and ridge", "both"), ("ridge alone, mean over kernels", "ridge")):
        rows = [{"data": name} | _row(found, name, None, part) for name in names]
        rows += [{"data": f"all, {size} landmarks"} | _row(found, None, size, part) for size in sizes]
        rows += [{"data": "all"} | _row(found, None, None, part)]
        harness.print_table(f"test error above the least, %: mean (worst); choice of {title}", rows)
