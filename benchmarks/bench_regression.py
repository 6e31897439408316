"""How good is the regression for the time that it takes, choice of width and ridge included?

Every method learns from the training rows alone: columns are standardized by them, width and ridge are chosen on them,
and the root mean squared error is that of the test rows, in units of the training targets' standard deviation. All
choose in the same two steps: the width by the leave-one-out error of 10,000 rows with at most 1,000 columns, then the
ridge by the leave-one-out error of all rows with all columns. Exact regression chooses both on 4,000 rows.
``--criteria`` asks instead by which error to choose, see :mod:`benchmarks.criteria`, and adds the answer to the report.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import scipy
from matplotlib.axes import Axes
from numpy.typing import NDArray
from sklearn.kernel_approximation import Nystroem
from sklearn.linear_model import RidgeCV

import daskrr
from benchmarks import criteria, harness
from daskrr.kernels import Gaussian

SEED = 0
COARSE_COLUMNS = 1000
WIDTH_ROWS = 10_000
EXACT_ROWS = 16_000
CHOICE_ROWS = 4000
FEATURE_BYTES = 4.5 * 2**30
WIDTHS = np.geomspace(0.75, 6.0, 7)
RIDGES = np.logspace(-10, -2, 17)
SIZES = (500, 1000, 2000, 4000)
LONG_ENOUGH = 100.0
CHUNK_ROWS = 4096
# Root mean squared errors in the literature, 90 % of the rows for training.
PUBLISHED = {
    "kin40k": {"SGPR, 512 inducing points": 0.286, "SVGP": 0.165, "exact GP": 0.099},
    "elevators": {"SVGP": 0.374, "exact GP": 0.364},
}
# Beyond these, delays in minutes say little of the schedule.
FLIGHT_DELAYS = (-60.0, 120.0)


@dataclass(frozen=True)
class Problem:
    """Standardized rows and targets to learn from, and to be judged by."""

    name: str
    X: NDArray[np.float64]
    y: NDArray[np.float64]
    X_test: NDArray[np.float64]
    y_test: NDArray[np.float64]

    @classmethod
    def of(cls, name: str, X: NDArray, y: NDArray, test: NDArray[np.bool_]) -> "Problem":
        """Split and standardize by the training rows."""
        X, y = X.astype(np.float64), y.astype(np.float64)
        centre, spread = X[~test].mean(axis=0), X[~test].std(axis=0)
        X = (X - centre) / np.where(spread > 0, spread, 1.0)
        y = (y - y[~test].mean()) / y[~test].std()
        return cls(name, X[~test], y[~test], X[test], y[test])

    def error(self, predictions: NDArray[np.float64]) -> float:
        """Root mean squared error of the test rows."""
        return float(np.sqrt(np.mean((predictions.ravel() - self.y_test) ** 2)))


def problems(folder: Path, fold: int) -> Iterator[Problem]:
    """The data sets that the folder has."""
    for name in ("kin40k", "elevators"):
        path = folder / f"uci-{name}.npz"
        if path.exists():
            with np.load(path) as data:
                yield Problem.of(name, data["X"], data["y"], data["test_fold"] == fold)
        else:
            print(f"{name}: there is no {path}")
    path = folder / "nycflights13.npz"
    if path.exists():
        with np.load(path) as data:
            folds = np.random.default_rng(SEED).integers(0, 10, len(data["y"]))
            yield Problem.of("nycflights13", data["X"], np.clip(data["y"], *FLIGHT_DELAYS), folds == fold)
    else:
        print(f"nycflights13: there is no {path}")


def made_up(n_rows: int = 600) -> Problem:
    """A small problem that needs no data."""
    generator = np.random.default_rng(SEED)
    X = generator.standard_normal((n_rows, 3))
    y = np.sin(2 * X[:, 0]) * X[:, 1] + 0.1 * generator.standard_normal(n_rows)
    return Problem.of("made up", X, y, np.arange(n_rows) % 10 == 0)


@dataclass(frozen=True)
class Found:
    """What one method did with one number of columns."""

    method: str
    problem: str
    n_columns: int
    seconds: float
    rmse: float
    width: float
    ridge: float


@dataclass(frozen=True)
class Fit:
    """A fitted model, the error of its choice, and what was chosen."""

    error: float
    width: float
    ridge: float
    predict: Callable[[NDArray[np.float64]], NDArray[np.float64]]


def in_two_steps(
    method: str,
    problem: Problem,
    sizes: tuple[int, ...],
    fit: Callable[[NDArray[np.bool_] | None, tuple[float, ...], int], Fit],
) -> Iterator[Found]:
    """Choose the width on some rows with at most 1,000 columns, then the ridge on all rows with all columns.

    A choice of width that several numbers of columns share is made once and counted for each.
    """
    some = np.random.default_rng(SEED).permutation(len(problem.X)) < WIDTH_ROWS
    known: dict[int, tuple[float, float]] = {}
    for size in sizes:
        coarse = min(size, COARSE_COLUMNS)
        if coarse not in known:
            began = time.perf_counter()
            known[coarse] = fit(some, tuple(WIDTHS), coarse).width, time.perf_counter() - began
        width, seconds = known[coarse]
        began = time.perf_counter()
        found = fit(None, (width,), size)
        predictions = found.predict(problem.X_test)
        seconds += time.perf_counter() - began
        yield Found(method, problem.name, size, seconds, problem.error(predictions), found.width, found.ridge)
        if seconds > LONG_ENOUGH:
            print(f"{problem.name}: {method} stops at {size:,} columns, which took more than {LONG_ENOUGH:.0f} s")
            return


def with_daskrr(problem: Problem, sizes: tuple[int, ...], folder: Path) -> Iterator[Found]:
    """All rows from Zarr stores, some from memory, on the current cluster."""
    stored = _stored(problem, folder)

    def fit(some: NDArray[np.bool_] | None, widths: tuple[float, ...], size: int) -> Fit:
        data: Any = stored if some is None else (problem.X[some], problem.y[some])
        model = daskrr.NystromKernelRidgeCV(
            [Gaussian(width) for width in widths], RIDGES, size, fit_intercept=True, certify=False, random_state=SEED
        ).fit(*data)
        kernel: Any = model.kernel_
        return Fit(model.best_score_, kernel.length_scale, model.ridge_, model.predict)

    return in_two_steps("daskrr", problem, sizes, fit)


def _stored(problem: Problem, folder: Path) -> tuple[Path, Path]:
    paths = folder / f"{problem.name}-X.zarr", folder / f"{problem.name}-y.zarr"
    for path, values in zip(paths, (problem.X, problem.y[:, None]), strict=True):
        harness.create_store(path, *values.shape, CHUNK_ROWS)[:] = values
    return paths


def with_scikit_learn(problem: Problem, sizes: tuple[int, ...], folder: Path) -> Iterator[Found]:
    """Nystroem features of uniformly drawn rows, and a ridge regression that leaves out one row at a time."""

    def fit(some: NDArray[np.bool_] | None, widths: tuple[float, ...], size: int) -> Fit:
        X, y = (problem.X, problem.y) if some is None else (problem.X[some], problem.y[some])
        return min((_pipeline(X, y, width, size) for width in widths), key=lambda one: one.error)

    fits = tuple(size for size in sizes if 8 * size * len(problem.X) <= FEATURE_BYTES)
    if len(fits) < len(sizes):
        print(f"{problem.name}: scikit-learn stops at {fits[-1]:,} columns, more need too much memory")
    return in_two_steps("scikit-learn", problem, fits, fit)


def _pipeline(X: NDArray[np.float64], y: NDArray[np.float64], width: float, size: int) -> Fit:
    features = Nystroem(gamma=0.5 / width**2, n_components=size, random_state=SEED)
    ridge = RidgeCV(alphas=RIDGES * len(X)).fit(features.fit_transform(X), y)
    return Fit(-ridge.best_score_, width, ridge.alpha_ / len(X), lambda new: ridge.predict(features.transform(new)))


def exactly(problem: Problem, sizes: tuple[int, ...], folder: Path) -> Iterator[Found]:
    """The whole kernel matrix, where it fits; no intercept, since the targets are centred."""
    n = len(problem.X)
    if n > EXACT_ROWS:
        print(f"{problem.name}: exact regression is left out, its kernel matrix has {8 * n**2 / 2**30:.0f} GiB")
        return
    began = time.perf_counter()
    chosen = np.random.default_rng(SEED).permutation(n)[:CHOICE_ROWS]
    width, ridge = min(
        ((width, ridge) for width in WIDTHS for ridge in RIDGES),
        key=_left_out(problem.X[chosen], problem.y[chosen]),
    )
    K = Gaussian(width)(problem.X, problem.X)
    K.flat[:: n + 1] += n * ridge
    dual = scipy.linalg.solve(K, problem.y, assume_a="pos", overwrite_a=True, check_finite=False)
    predictions = Gaussian(width)(problem.X_test, problem.X) @ dual
    seconds = time.perf_counter() - began
    yield Found("exact", problem.name, n, seconds, problem.error(predictions), float(width), float(ridge))


def _left_out(X: NDArray[np.float64], y: NDArray[np.float64]) -> Callable[[tuple[float, float]], float]:
    """Mean squared leave-one-out residual of a width and a ridge, from one decomposition per width."""
    known: dict[float, tuple[NDArray, NDArray, NDArray]] = {}

    def error(choice: tuple[float, float]) -> float:
        width, ridge = choice
        if width not in known:
            known.clear()
            S, Q = np.linalg.eigh(Gaussian(width)(X, X))
            known[width] = np.maximum(S, 0.0), Q, Q**2
        S, Q, squares = known[width]
        inverse = 1.0 / (S + len(X) * ridge)
        return float(np.mean((Q @ (inverse * (Q.T @ y)) / (squares @ inverse)) ** 2))

    return error


METHODS = {"daskrr": with_daskrr, "scikit-learn": with_scikit_learn, "exact": exactly}
COLOURS = {"daskrr": "#0072B2", "scikit-learn": "#D55E00", "exact": "#009E73"}
MARKERS = {"daskrr": "o", "scikit-learn": "s", "exact": "D"}


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Error against time, one panel per data set."""
    names = list(dict.fromkeys(one["problem"] for one in found))
    figure, axes = plt.subplots(1, len(names), figsize=(4.2 * len(names), 3.9), squeeze=False, layout="constrained")
    for axis, name in zip(axes[0], names, strict=True):
        _panel(axis, name, [one for one in found if one["problem"] == name])
    axes[0][0].set_ylabel("test RMSE  (standard deviations of y)")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _panel(axis: Axes, name: str, found: list[dict[str, Any]]) -> None:
    for method, colour in COLOURS.items():
        own = sorted((one for one in found if one["method"] == method), key=lambda one: one["n_columns"])
        if own:
            times, errors = ([one[key] for one in own] for key in ("seconds", "rmse"))
            axis.plot(times, errors, marker=MARKERS[method], color=colour, label=method, linewidth=1.6, markersize=5)
        for one in own if method != "exact" else []:
            axis.annotate(
                f"{one['n_columns']:,}", (one["seconds"], one["rmse"]), xytext=(5, 4), textcoords="offset points",
                fontsize=7.5, color=colour,
            )  # fmt: skip
    axis.set_xscale("log")
    axis.set_xticks([10, 20, 50, 100, 200], ["10", "20", "50", "100", "200"])
    axis.minorticks_off()
    for label, value in PUBLISHED.get(name, {}).items():
        axis.axhline(value, color="0.55", linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
        axis.annotate(
            label, (1.0, value), xycoords=("axes fraction", "data"), xytext=(-3, 2), textcoords="offset points",
            ha="right", fontsize=7.5, color="0.35",
        )  # fmt: skip
    axis.set_title(name, fontsize=11)
    axis.set_xlabel("seconds, choice of width and ridge included")
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.12, y=0.1)
    axis.legend(frameon=False, fontsize=8.5)


def _show(found: list[Found]) -> None:
    rows = [
        {
            "data": one.problem, "method": one.method, "columns": f"{one.n_columns:,}", "seconds": f"{one.seconds:.1f}",
            "test RMSE": f"{one.rmse:.4f}", "width": f"{one.width:.3g}", "ridge": f"{one.ridge:.2g}",
        }
        for one in found
    ]  # fmt: skip
    harness.print_table("test error against time", rows)


def _checks(found: list[Found]) -> dict[str, bool]:
    """What is required on kin40k."""
    errors = {one.n_columns: one.rmse for one in found if (one.method, one.problem) == ("daskrr", "kin40k")}
    limits = ((2000, 0.286, "SGPR with 512 inducing points"), (4000, 0.165, "SVGP"))
    return {
        f"kin40k with {size} columns: {errors[size]:.3f}, below {limit} of {name}": errors[size] < limit
        for size, limit, name in limits
        if size in errors
    }


def add_criteria(path: Path, folder: Path | None, quick: bool) -> None:
    """Compare the errors to choose by, and put what was found into the report, which may be there already."""
    began = harness.report("regression", SEED, quick, {"ridges": criteria.RIDGES.tolist()})
    known = json.loads(path.read_text()) if path.exists() else began
    about = {name: began[name] for name in ("date", "machine", "versions")}
    harness.write_report(path, known | {"criteria": about | criteria.study(folder)})


def main() -> int:
    """Run the benchmark; 1 when a published figure is not met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_regression", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a made-up problem that takes seconds; nothing can fail")
    parser.add_argument("--data", type=Path, default=os.environ.get("DASKRR_DATA"), help="folder with the .npz files")
    parser.add_argument(
        "--criteria", action="store_true", help="compare the errors to choose by instead, in the report"
    )
    parser.add_argument("--fold", type=int, default=0, help="which tenth of the rows is for testing")
    default = Path(__file__).parent / "results" / "bench_regression.json"
    parser.add_argument("--output", type=Path, default=default, metavar="FILE", help="JSON report to write")
    options = parser.parse_args()
    if options.data is None and not options.quick:
        parser.error("--data DIR is needed: the folder with uci-kin40k.npz, uci-elevators.npz, nycflights13.npz")
    if options.criteria:
        add_criteria(options.output, None if options.quick else Path(options.data), options.quick)
        return 0
    sizes = (50, 100) if options.quick else SIZES
    given = [made_up()] if options.quick else problems(Path(options.data), options.fold)
    parameters = {"fold": options.fold, "widths": WIDTHS.tolist(), "ridges": RIDGES.tolist(), "sizes": sizes}
    content = harness.report("regression", SEED, options.quick, parameters)
    found: list[Found] = []
    with tempfile.TemporaryDirectory() as folder, harness.cluster(), harness.others_load() as load:
        for problem in given:
            for run in METHODS.values():
                for one in run(problem, sizes, Path(folder)):
                    print(
                        f"{one.problem}, {one.method}, {one.n_columns:,} columns: {one.rmse:.4f}, {one.seconds:.0f} s"
                    )
                    found.append(one)
    results = [asdict(one) for one in found]
    _show(found)
    checks = _checks(found)
    harness.print_checks(checks, options.quick)
    harness.write_report(options.output, content | load | {"results": results, "checks": checks})
    draw(results, options.output.with_suffix(".png"))
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
