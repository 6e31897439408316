"""Divide-and-conquer kernel ridge regression against the Nyström method, at equal numbers of kernel evaluations.

Zhang, Duchi & Wainwright average m exact estimators, each fitted to one of m random parts of the rows at the same λ:
m·(n/m)² = n²/m kernel evaluations. The Nyström method takes n for every column that it looks at, also of rounds that
only choose landmarks, so that n/m columns in all cost the same. Training is counted, as in the paper; a prediction
takes n more evaluations of the average, and p more of the Nyström method. Risks are in closed form, over the rows.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator
from scipy.linalg import cho_factor, cho_solve

from benchmarks import harness
from benchmarks.paper import choices
from benchmarks.paper.problems import (
    Matrix,
    Problem,
    Risk,
    Truth,
    add_data,
    data_missing,
    known_function,
    nystrom_spectrum,
    parser,
    rbf,
    risk,
    spread,
    synth,
)
from daskrr import plots
from daskrr.kernels import Gaussian

SEED = 0
PARTS = (2, 4, 8, 16, 32, 64)
CLOUD_ROWS = 1000
CLOUD_RIDGE = 1e-4
PUMADYN = ("Pum-32nh", 1.3e-2, 5)
AVERAGE = "divide and conquer"
# For every choice, the columns that it looks at in units of its landmarks: those of rounds that only choose included.
CHOICES: dict[str, tuple[choices.Choice, float]] = {
    "Nyström, uniform": (choices.uniform, 1.0),
    "Nyström, leverage": (choices.estimated_leverage, 2.0),
    "Nyström, residual": (choices.residual, 1.5),
}


def average_smoother(problem: Problem, m: int, seed: int) -> Matrix:
    """The matrix (n, n) that turns targets into the fit of the average of m estimators at all rows."""
    n = len(problem.X)
    smoother = np.zeros((n, n))
    for part in np.array_split(np.random.default_rng(seed).permutation(n), m):
        columns = problem.kernel(problem.X[part], problem.X)
        ridged = columns[:, part]
        ridged[np.diag_indices_from(ridged)] += len(part) * problem.ridge
        smoother[:, part] = cho_solve(cho_factor(ridged), columns).T / m
    return smoother


def smoother_risk(smoother: Matrix, truth: Truth) -> Risk:
    """The risk of any estimator that is linear in the targets."""
    missed = truth.values - smoother @ truth.values
    variance = truth.noise * np.sum(np.square(smoother)) / len(missed)
    return Risk(float(np.mean(np.square(missed))), float(variance))


def cloud() -> Problem:
    """A heavy-tailed cloud in the plane, whose rare far rows have the high scores."""
    X = np.random.default_rng(SEED).standard_t(3, (CLOUD_ROWS, 2))
    values = np.sin(X[:, 0]) * np.cos(X[:, 1])
    return known_function("Cloud", X, Gaussian(1.0), CLOUD_RIDGE, {"sine": values})


def problems(folder: Path | None) -> list[Problem]:
    """The synthetic problems, and one with data where they are given."""
    found = [synth(), cloud()]
    dataset, ridge, bandwidth = PUMADYN
    if reason := data_missing(dataset, folder):
        print(f"{dataset}: {reason}")
    elif folder is not None:
        found.append(rbf(dataset, ridge, bandwidth, folder))
    return found


def measure(problem: Problem, parts: Sequence[int], seeds: int) -> dict[str, Any]:
    """Risk ratios to exact regression for every method and budget."""
    exact = risk(problem.spectrum, problem.ridge, problem.truth)
    methods = {AVERAGE: _averages(problem, exact)} | {
        name: _sketches(problem, choose, cost) for name, (choose, cost) in CHOICES.items()
    }
    runs = range(SEED, SEED + seeds)
    curves = {name: [spread([ratio(m, seed) for seed in runs]) for m in parts] for name, ratio in methods.items()}
    return {
        "problem": problem.name,
        "n": len(problem.X),
        "ridge": problem.ridge,
        "effective_dimension": float(np.sum(problem.spectrum.filter(problem.ridge))),
        "exact": exact._asdict(),
        "parts": list(parts),
        "evaluations": [len(problem.X) ** 2 // m for m in parts],
        "curves": curves,
    }


def _averages(problem: Problem, exact: Risk) -> Callable[[int, int], float]:
    return lambda m, seed: smoother_risk(average_smoother(problem, m, seed), problem.truth).total / exact.total


def _sketches(problem: Problem, choose: choices.Choice, cost: float) -> Callable[[int, int], float]:
    def ratio(m: int, seed: int) -> float:
        p = max(1, int(len(problem.X) / m / cost))
        return problem.ratio(nystrom_spectrum(problem, choose(problem, p, seed)))

    return ratio


def _lines(result: dict[str, Any]) -> list[dict[str, str]]:
    return [
        {"m": str(m), "evaluations": f"{evaluations:,}"}
        | {name: _text(points[place]) for name, points in result["curves"].items()}
        for place, (m, evaluations) in enumerate(zip(result["parts"], result["evaluations"], strict=True))
    ]


def _text(found: dict[str, Any]) -> str:
    return f"{found['median']:.3f} [{found['least']:.3f}, {found['most']:.3f}]"


# The Okabe-Ito palette, whose colours stay apart for every kind of colour vision; markers tell them apart in print.
STYLES: dict[str, dict[str, Any]] = {
    AVERAGE: {"color": "#000000", "marker": "x", "markersize": 5},
    "Nyström, uniform": {"color": "#D55E00", "marker": "o"},
    "Nyström, leverage": {"color": "#E69F00", "marker": "s"},
    "Nyström, residual": {"color": "#0072B2", "marker": "D"},
}


def picture(results: Sequence[dict[str, Any]], seeds: int) -> Figure:
    """A panel for each problem: the risk ratio against kernel evaluations."""
    figure = Figure(figsize=(2.6 * len(results), 3.0), dpi=300, layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, result in zip(panels, results, strict=True):
        _draw(axes, result)
    panels[0].set_ylabel("risk / risk of exact regression", fontsize=8.5)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    figure.supxlabel(f"kernel evaluations in training, in units of n²; medians and ranges of {seeds} seeds", fontsize=8)
    return figure


def _draw(axes: Axes, result: dict[str, Any]) -> None:
    x = [1 / m for m in result["parts"]]
    for name, points in result["curves"].items():
        style = {"linewidth": 1.4, "markersize": 3.6, **STYLES[name]}
        axes.plot(x, [point["median"] for point in points], label=name, **style)
        ends = [[point[end] for point in points] for end in ("least", "most")]
        axes.fill_between(x, *ends, color=style["color"], alpha=0.13, linewidth=0)
    axes.axhline(1.0, color="#555555", linestyle="--", linewidth=0.9, zorder=1)
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(x, [f"1/{m}" for m in result["parts"]])
    axes.xaxis.set_minor_locator(NullLocator())
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.2, 1.4, 1.6, 1.8) if high < 5 * low else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title(f"{result['problem']}, n = {result['n']}", fontsize=9)
    axes.tick_params(labelsize=7.5)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> int:
    """Compute, print, draw and write the comparison."""
    found = parser("divide_and_conquer", __doc__, 20, "paper_divide_and_conquer.json")
    add_data(found)
    options = found.parse_args()
    content = harness.report("paper_divide_and_conquer", SEED, False, {"parts": PARTS, "seeds": options.seeds})
    results = []
    for problem in problems(options.data):
        results.append(measure(problem, PARTS, options.seeds))
        title = f"{problem.name}, n = {len(problem.X)}, λ = {problem.ridge:g}: risk ratio, median [range]"
        harness.print_table(title, _lines(results[-1]))
    harness.write_report(options.output, content | {"results": results})
    target = options.output.with_suffix(".png")
    plots.save(picture(results, options.seeds), target)
    print(f"picture: {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
