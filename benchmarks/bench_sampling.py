"""Which way to choose landmarks gives the narrowest certified intervals for the same number of landmarks, and for
the same time?

Every scheme of the library, a coarse-to-fine candidate that is none of it, and the dictionary of DPPy's BLESS are
certified with the same audit. Small problems have exact scores, which the estimates are compared with. Time is compared
on a larger problem too, where passes over the rows weigh what they do in earnest. Times are the smallest of the seeds,
since other processes only add to them; all else is the median of the seeds.

Equal time means processor time of the whole computation, the choice of landmarks included: what the machine does beside
disturbs it far less than time on the wall, by which the large problem is ranked too. BLAS has one thread, since threads
that wait for each other would count as work. The winner is the scheme with the
smallest median, over problems and time budgets, of the logarithm of the median upper/lower. Between the numbers of
landmarks that were run, this is interpolated as a power of time; budgets are those that every scheme has runs on both
sides of.
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import dask
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from numpy.typing import NDArray
from scipy.linalg import cholesky, solve_triangular
from threadpoolctl import threadpool_limits

import daskrr
from benchmarks import harness
from benchmarks.bench_certificate import errors_of
from benchmarks.clouds import CLOUDS, Rows, median_distance
from benchmarks.peers import PACKAGES
from daskrr import exact, plots
from daskrr.kernels import Gaussian, Kernel, Linear

SEED = 0
AUDIT_ROWS = 2000
FAILURE_PROBABILITY = 1e-6
COARSE_ROWS = 8
OVERSAMPLING = (1.0, 2.0, 4.0)
BUDGETS = 4
PEER = "DPPy BLESS"
DEFAULT = "residual, 2 rounds"
CANDIDATE = "coarse to fine"


@dataclass(frozen=True)
class Problem:
    """Rows, a ridge, and numbers of landmarks; the kernel is Gaussian, plus a linear one where the diagonal varies."""

    cloud: str
    n_features: int
    ridge: float
    n_rows: int
    landmarks: tuple[int, ...]
    linear_part: bool = False
    exact: bool = True

    @property
    def title(self) -> str:
        """What tables and panels call it."""
        kernel = " + linear" if self.linear_part else ""
        return f"{self.cloud}, d = {self.n_features}{kernel}, λ = {self.ridge:g}, n = {self.n_rows:,}"

    def rows(self) -> Rows:
        """The rows, the same in every run."""
        return CLOUDS[self.cloud](self.n_rows, self.n_features, np.random.default_rng([SEED, self.n_features]))

    def kernel(self, length_scale: float) -> Kernel:
        """The library's kernel."""
        gaussian = Gaussian(length_scale)
        return gaussian + length_scale**-2 * Linear() if self.linear_part else gaussian

    def peer_kernel(self, length_scale: float) -> Any:
        """The same kernel for the peer."""
        from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct

        gaussian = RBF(length_scale)
        return gaussian + ConstantKernel(length_scale**-2) * DotProduct(0.0) if self.linear_part else gaussian


def problems(quick: bool) -> list[Problem]:
    """The small problems, and last the one that time is compared on."""
    n, landmarks = (300, (20, 160)) if quick else (3000, (100, 200, 400, 800))
    large, fewer = (1000, (20, 160)) if quick else (50_000, (200, 400, 800))
    return [
        Problem("normal", 3, 1e-4, n, landmarks),
        Problem("Student-t", 8, 1e-3, n, landmarks, linear_part=True),
        Problem("clusters + outliers", 5, 1e-4, n, landmarks),
        Problem("normal", 32, 1e-2, n, landmarks),
        Problem("Student-t", 8, 1e-3, large, fewer, exact=False),
    ]


def coarse_to_fine(X: Rows, kernel: Kernel, p: int, seed: int) -> NDArray[np.int64]:
    """Choose p rows by three rounds of residual sampling on a random subset of 8·p rows."""
    generator = np.random.default_rng([SEED, seed])
    subset = np.sort(generator.choice(len(X), min(COARSE_ROWS * p, len(X)), replace=False))
    rows = X[subset]
    chosen = generator.choice(len(rows), p // 3, replace=False)
    for size in (2 * p // 3, p):
        left = _residuals(rows, rows[chosen], kernel)
        left[chosen] = 0.0
        more = min(size - len(chosen), int(np.count_nonzero(left)))
        if not more:
            break
        chosen = np.append(chosen, generator.choice(len(rows), more, replace=False, p=left / left.sum()))
    return subset[chosen]


def _residuals(rows: Rows, landmarks: Rows, kernel: Kernel) -> NDArray[np.float64]:
    """What the landmarks leave of the diagonal, round-off cut off."""
    W = kernel(landmarks, landmarks)
    W.flat[:: len(W) + 1] += 1e-12 * np.trace(W)
    columns = np.empty((len(rows), len(landmarks)))
    kernel.columns(landmarks, columns.dtype)(rows, columns)
    B = solve_triangular(cholesky(W, lower=True), columns.T, lower=True, check_finite=False, overwrite_b=True)
    diagonal = kernel.diagonal(rows)
    left = diagonal - np.einsum("ij,ij->j", B, B)
    return np.where(left > 1e-9 * diagonal, left, 0.0)


SCHEMES: dict[str, dict[str, Any]] = {
    "uniform": {"sampling": "uniform"},
    "diagonal": {"sampling": "diagonal"},
    "leverage": {"sampling": "leverage"},
    "residual, 1 round": {"sampling": daskrr.Residual(rounds=1)},
    DEFAULT: {"sampling": daskrr.Residual(rounds=2)},
    "residual, 3 rounds": {"sampling": daskrr.Residual(rounds=3)},
    "residual, 5 rounds": {"sampling": daskrr.Residual(rounds=5)},
    CANDIDATE: {},
}


@dataclass(frozen=True)
class Data:
    """The rows of a problem with what is computed of them once."""

    problem: Problem
    X: Rows
    length_scale: float
    truth: NDArray[np.float64] | None

    @property
    def kernel(self) -> Kernel:
        """The library's kernel."""
        return self.problem.kernel(self.length_scale)


def prepare(problem: Problem) -> Data:
    """Generate the rows, and their exact scores where they are few."""
    X = problem.rows()
    scale = median_distance(X)
    truth = exact.leverage_scores(X, problem.kernel(scale), problem.ridge) if problem.exact else None
    return Data(problem, X, scale, truth)


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[Any, dict[str, float]]:
    """What a function returns, and what it took."""
    wall, processor = time.perf_counter(), time.process_time()
    value = function(*arguments)
    return value, {"seconds": time.perf_counter() - wall, "processor_seconds": time.process_time() - processor}


def _together(*costs: dict[str, float]) -> dict[str, float]:
    return {name: sum(cost[name] for cost in costs) for name in costs[0]}


def run_scheme(data: Data, scheme: str, p: int, seed: int) -> dict[str, Any]:
    """Choose landmarks, certify all rows, and measure."""
    if scheme != CANDIDATE:
        return run_certified(data, p, {"random_state": seed} | SCHEMES[scheme])
    chosen, cost = timed(coarse_to_fine, data.X, data.kernel, p, seed)
    found = run_certified(data, None, {"random_state": seed, "sampling": chosen})
    return found | _together(cost, {name: found[name] for name in cost})


def run_certified(data: Data, p: int | None, options: dict[str, Any]) -> dict[str, Any]:
    """Certify all rows: time, widths of the intervals, and the error of the estimate."""
    (result, lower, upper, estimate), cost = timed(_certify, data, p, options)
    logs = np.log(upper / np.maximum(lower, np.finfo(float).tiny))
    return cost | {
        "n_landmarks": result.summary["distinct_landmarks"],
        "median": float(np.median(logs)),
        "most": float(np.quantile(logs, 0.95)),
        "deviation": result.audit.delta / (len(data.X) * data.problem.ridge),
        "error": None if data.truth is None else errors_of(estimate, data.truth)["mean_log_error"],
    }


def _certify(data: Data, p: int | None, options: dict[str, Any]) -> tuple[Any, ...]:
    result = daskrr.leverage_scores(
        data.X, data.kernel, data.problem.ridge, p,
        certify=daskrr.Certify(FAILURE_PROBABILITY, audit_rows=AUDIT_ROWS), progress=False, **options,
    )  # fmt: skip
    return result, *dask.compute(result.lower, result.upper, result.estimate)


def run_peer(data: Data, oversampling: float, seed: int) -> dict[str, Any]:
    """BLESS with its own scores, and the intervals with its dictionary as landmarks."""
    from dppy.bless import bless, estimate_rls_bless

    kernel, shift = data.problem.peer_kernel(data.length_scale), len(data.X) * data.problem.ridge
    select = partial(bless, random_state=seed, verbose=False)
    dictionary, selecting = timed(select, data.X, kernel, shift, oversampling)
    own, scoring = timed(estimate_rls_bless, dictionary, data.X, kernel, shift)
    found = run_certified(data, None, {"random_state": seed, "sampling": dictionary.idx})
    return (
        found
        | _together(selecting, {name: found[name] for name in selecting})
        | {f"own_{name}": value for name, value in _together(selecting, scoring).items()}
        | {"own_error": None if data.truth is None else errors_of(own, data.truth)["mean_log_error"]}
    )


def measure(data: Data, seeds: int, with_peer: bool) -> dict[str, Any]:
    """Run everything on one problem, scheme after scheme for each seed, so that all meet the same disturbances."""
    problem = data.problem
    run_scheme(data, DEFAULT, min(problem.landmarks), 0)  # the first run pays for imports
    runs: dict[str, dict[Any, list]] = {name: {p: [] for p in problem.landmarks} for name in SCHEMES}
    peer: dict[float, list] = {oversampling: [] for oversampling in OVERSAMPLING}
    for seed in range(seeds):
        for p in problem.landmarks:
            for scheme in SCHEMES:
                runs[scheme][p].append(run_scheme(data, scheme, p, seed))
        for oversampling in OVERSAMPLING if with_peer else ():
            peer[oversampling].append(run_peer(data, oversampling, seed))
    found = {name: [{"p": p} | _combine(ones) for p, ones in by_p.items()] for name, by_p in runs.items()}
    if with_peer:
        found[PEER] = [{"oversampling": q} | _combine(ones) for q, ones in peer.items()]
    return {"problem": asdict(problem), "title": problem.title, "schemes": found}


def _combine(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The smallest of the times, and medians of the rest."""
    combined = {}
    for name in runs[0]:
        values = [run[name] for run in runs]
        how = np.min if name.endswith("seconds") else np.median
        combined[name] = None if values[0] is None else float(how(values))
    return combined


def at_time(points: Sequence[dict[str, Any]], seconds: float, clock: str, figure: str) -> float | None:
    """A figure after so many seconds, interpolated as a power of time; None outside the times that were run."""
    ordered = sorted(points, key=lambda point: point[clock])
    times = np.array([point[clock] for point in ordered])
    if not times[0] <= seconds <= times[-1]:
        return None
    values = np.log([point[figure] for point in ordered])
    return math.exp(np.interp(math.log(seconds), np.log(times), values))


def budgets(schemes: dict[str, list[dict[str, Any]]], clock: str) -> list[float]:
    """Times that every scheme has runs on both sides of; none where one was always slower than another."""
    times = [[point[clock] for point in schemes[name]] for name in SCHEMES]
    low, high = max(map(min, times)), min(map(max, times))
    return np.geomspace(low, high, BUDGETS + 2)[1:-1].tolist() if low < high else []


def rank_at_equal_time(results: Sequence[dict[str, Any]], clock: str) -> list[dict[str, Any]]:
    """The schemes by their logarithmic width relative to the default's, on average over problems and budgets.

    Widths of different problems lie orders of magnitude apart, so that each is compared with the default's on the same
    problem in the same time; the median over all is told beside it.

    Empty where no two schemes ever took the same time.
    """
    pairs = [(result["schemes"], seconds) for result in results for seconds in budgets(result["schemes"], clock)]
    if not pairs:
        return []
    widths = {
        name: np.array([at_time(schemes[name], seconds, clock, "median") for schemes, seconds in pairs])
        for name in SCHEMES
    }
    ranked = [
        {
            "scheme": name,
            "median_log_width": float(np.median(values)),
            "relative_to_default": float(np.exp(np.mean(np.log(values / widths[DEFAULT])))),
            "budgets": len(values),
        }
        for name, values in widths.items()
    ]
    return sorted(ranked, key=lambda one: one["relative_to_default"])


def candidate_gain(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Time and log width of coarse to fine in units of the default's, for the same number of landmarks; medians."""
    pairs = [pair for r in results for pair in zip(r["schemes"][CANDIDATE], r["schemes"][DEFAULT], strict=True)]
    figures = ("processor_seconds", "median", "most")
    return {figure: float(np.median([ours[figure] / default[figure] for ours, default in pairs])) for figure in figures}


def _show(result: dict[str, Any]) -> None:
    lines = [_line(name, point) for name, points in result["schemes"].items() for point in points]
    harness.print_table(result["title"], lines)
    for point in result["schemes"].get(PEER, ()):
        _show_peer(point, result["schemes"][DEFAULT])


def _line(name: str, point: dict[str, Any]) -> dict[str, str]:
    return {
        "scheme": name,
        "p": f"{point['p']}" if "p" in point else f"{point['n_landmarks']:.0f}",
        "seconds": f"{point['seconds']:.2f}",
        "processor": f"{point['processor_seconds']:.2f}",
        "median upper/lower": _factor(point["median"]),
        "95 %": _factor(point["most"]),
        "delta/nλ": f"{point['deviation']:.3g}",
        "error of estimate": "" if point["error"] is None else f"{point['error']:.4f}",
    }


def _factor(logarithm: float) -> str:
    return f"{math.exp(logarithm):.4g}" if logarithm < 20 else "unbounded"


def _show_peer(point: dict[str, Any], default: Sequence[dict[str, Any]]) -> None:
    """What BLESS alone gives in its processor time, and the default at that time, or its fastest run."""
    own, seconds = point["own_error"], point["own_processor_seconds"]
    text = f"{PEER}, oversampling {point['oversampling']:g}: {seconds:.2f} s of processor time alone"
    if own is not None:
        same = at_time(default, seconds, "processor_seconds", "error")
        fastest = min(default, key=lambda one: one["processor_seconds"])
        ours = f"{fastest['error']:.4f} in {fastest['processor_seconds']:.2f} s"
        text += f", error of its scores {own:.4f}; {DEFAULT}: " + (f"{same:.4f} in the same time" if same else ours)
    print(text)


def _show_ranking(title: str, ranked: Sequence[dict[str, Any]]) -> None:
    if not ranked:
        print(f"\n{title}: no time that every scheme has runs on both sides of")
        return
    lines = [
        {
            "scheme": one["scheme"],
            "median log width": f"{one['median_log_width']:.4f}",
            "log width / default's": f"{one['relative_to_default']:.3f}",
            "budgets": str(one["budgets"]),
        }
        for one in ranked
    ]
    harness.print_table(title, lines)


# The Okabe-Ito palette, whose colours stay apart for every kind of colour vision; markers tell them apart in print.
STYLES: dict[str, dict[str, Any]] = {
    "uniform": {"color": "#999999", "marker": "o"},
    "diagonal": {"color": "#000000", "marker": "x", "linestyle": ":"},
    "leverage": {"color": "#E69F00", "marker": "s"},
    "residual, 1 round": {"color": "#56B4E9", "marker": "v", "linestyle": "--"},
    "residual, 3 rounds": {"color": "#56B4E9", "marker": "^"},
    DEFAULT: {"color": "#0072B2", "marker": "D", "linewidth": 2.8, "zorder": 4},
    "residual, 5 rounds": {"color": "#CC79A7", "marker": "p"},
    CANDIDATE: {"color": "#009E73", "marker": "P", "linestyle": "--"},
    PEER: {"color": "#D55E00", "marker": "*", "linestyle": "-.", "markersize": 9},
}


def picture(results: Sequence[dict[str, Any]]) -> Figure:
    """Width against landmarks for every problem, and against processor time for the large one."""
    figure = Figure(figsize=(16, 9.6), dpi=110, layout="constrained")
    panels = figure.subplots(2, 3).ravel()
    for result, axes in zip(results, panels[:-1], strict=True):
        _draw(axes, result, lambda point: point.get("p", point["n_landmarks"]), "landmarks")
    _draw(panels[-1], results[-1], lambda point: point["processor_seconds"], "processor seconds of everything")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=12)
    figure.suptitle("Width of certified intervals by the choice of landmarks; lower is better", fontsize=15)
    return figure


def _draw(axes: Axes, result: dict[str, Any], by: Callable[[dict[str, Any]], float], label: str) -> None:
    for name, points in result["schemes"].items():
        ordered = sorted(points, key=by)
        x, y = [by(point) for point in ordered], [math.expm1(min(point["median"], 20.0)) for point in ordered]
        axes.plot(x, y, label=name, **{"linewidth": 1.6, "markersize": 6.5, "zorder": 3, **STYLES[name]})
    axes.set(xscale="log", yscale="log")
    axes.set_title(result["title"], fontsize=12)
    axes.set_xlabel(label, fontsize=12)
    axes.set_ylabel("median of upper/lower − 1", fontsize=12)
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=11)
    axes.grid(True, which="major", color="#DDDDDD", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> int:
    """Run the benchmark; 1 when the default is not the winner."""
    options = harness.arguments("sampling", __doc__)
    seeds = 1 if options.quick else 3
    asked = problems(options.quick)
    parameters = {
        "ridge": asked[0].ridge,
        "audit_rows": AUDIT_ROWS,
        "failure_probability": FAILURE_PROBABILITY,
        "oversampling": OVERSAMPLING,
        "seeds": seeds,
    }
    content = harness.report("sampling", SEED, options.quick, parameters)
    with_peer = all(package in content["versions"] for package in PACKAGES[PEER])
    began = time.perf_counter()
    results = []
    for problem in asked:
        data = prepare(problem)
        with threadpool_limits(1, "blas"):
            results.append(measure(data, seeds, with_peer))
        _show(results[-1])
    if not with_peer:
        print(f"{PEER} skipped: {' or '.join(PACKAGES[PEER])} not installed")
    summary = _conclude(results, options.quick)
    harness.write_report(options.output, content | summary | {
        "results": results, "seconds": time.perf_counter() - began,
    })  # fmt: skip
    target = options.output.with_suffix(".png")
    plots.save(picture(results), target)
    print(f"picture: {target}")
    return 0 if options.quick or summary["passed"] else 1


def _conclude(results: Sequence[dict[str, Any]], quick: bool) -> dict[str, Any]:
    """Rank the schemes, and say whether the default wins and the candidate pays."""
    rankings = {
        "all problems, processor time": rank_at_equal_time(results, "processor_seconds"),
        "large problem, processor time": rank_at_equal_time(results[-1:], "processor_seconds"),
        "large problem, wall time": rank_at_equal_time(results[-1:], "seconds"),
    }
    for name, ranked in rankings.items():
        _show_ranking(f"Equal time, {name}", ranked)
    gain = candidate_gain(results)
    print(
        f"\n{CANDIDATE}, for the same p: {gain['processor_seconds']:.2f} times the processor time of {DEFAULT}, "
        f"{gain['median']:.2f} times its median log width, {gain['most']:.2f} times that of 95 %"
    )
    decisive = rankings["all problems, processor time"]
    winner = decisive[0]["scheme"] if decisive else None
    if winner != CANDIDATE:
        print(f"{CANDIDATE} does not pay: at equal time it is not the narrowest")
    print(f"winner at equal time: {winner}")
    checks = {"the default wins": winner == DEFAULT}
    harness.print_checks(checks, quick)
    return {
        "rankings": rankings, "candidate_gain": gain, "winner": winner, "checks": checks,
        "passed": all(checks.values()),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
