"""Figure 1: leverage scores of the synthetic problem, and the risk against the number of columns for ways to draw them.

Left, exact λ-ridge leverage scores over x, and daskrr's certified intervals from d_eff columns. Right, medians over
draws of the landmarks with bands between the quartiles, and the risk of exact kernel ridge regression.
"""

import sys
from typing import Any

import dask
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator

import daskrr
from benchmarks import harness
from benchmarks.paper import choices
from benchmarks.paper.problems import (
    EPSILON,
    SYNTH_BETA,
    SYNTH_ORDER,
    Problem,
    Truth,
    nystrom_spectrum,
    parser,
    risk,
    synth,
)
from daskrr import plots

SEED = 0
LANDMARKS = (3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
BAND = (0.25, 0.75)
CHOICES: dict[str, choices.Choice] = {
    "uniform": choices.uniform,
    "leverage, daskrr": choices.estimated_leverage,
    "leverage, rank k": choices.rank_leverage,
    "leverage, exact": choices.exact_leverage,
    "residual, daskrr": choices.residual,
}


def score_panel(problem: Problem) -> dict[str, Any]:
    """Exact scores at λ, and daskrr's intervals from as many columns as the table's d_eff."""
    p = round(problem.effective_dimension)
    result = daskrr.leverage_scores(
        problem.X, problem.kernel, problem.ridge, p, certify=True, random_state=SEED, progress=False
    )
    lower, upper = dask.compute(result.lower, result.upper)
    return {
        "x": problem.X[:, 0].tolist(),
        "scores": problem.spectrum.scores(problem.ridge).tolist(),
        "lower": lower.tolist(),
        "upper": upper.tolist(),
        "columns": p,
        "failure_probability": result.audit.failure_probability,
    }


def risk_panel(problem: Problem, truth: Truth, seeds: int) -> dict[str, Any]:
    """Median and band of the risk for every choice and number of columns."""
    curves = {name: [_risks(problem, truth, choose, p, seeds) for p in LANDMARKS] for name, choose in CHOICES.items()}
    return {"exact": risk(problem.spectrum, problem.ridge, truth).total, "landmarks": LANDMARKS, "curves": curves}


def _risks(problem: Problem, truth: Truth, choose: choices.Choice, p: int, seeds: int) -> dict[str, float]:
    found = [
        risk(nystrom_spectrum(problem, choose(problem, p, seed)), problem.ridge, truth).total
        for seed in range(SEED, SEED + seeds)
    ]
    low, high = np.quantile(found, BAND)
    return {"median": float(np.median(found)), "low": float(low), "high": float(high)}


# The Okabe-Ito palette, whose colours stay apart for every kind of colour vision; markers tell them apart in print.
STYLES: dict[str, dict[str, Any]] = {
    "uniform": {"color": "#D55E00", "marker": "o"},
    "leverage, daskrr": {"color": "#E69F00", "marker": "s"},
    "leverage, rank k": {"color": "#CC79A7", "marker": "o", "markersize": 6.5, "markerfacecolor": "none"},
    "leverage, exact": {"color": "#009E73", "marker": "v"},
    "residual, daskrr": {"color": "#0072B2", "marker": "D"},
}
EXACT = "#000000"
QUIET = "#555555"


def picture(scores: dict[str, Any], risks: dict[str, Any], note: str) -> Figure:
    """Both panels side by side."""
    figure = Figure(figsize=(7.2, 3.5), dpi=300, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    _draw_scores(left, scores)
    _draw_risks(right, risks)
    for axes, title in ((left, "a   Leverage scores"), (right, "b   Risk by the choice of columns")):
        axes.set_title(title, loc="left", fontsize=9.5, fontweight="bold")
        axes.tick_params(labelsize=8)
        axes.xaxis.label.set_size(9)
        axes.yaxis.label.set_size(9)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(note, fontsize=6.5, color=QUIET)
    return figure


def _draw_scores(axes: Axes, scores: dict[str, Any]) -> None:
    x = np.array(scores["x"])
    axes.fill_between(
        x, scores["lower"], scores["upper"], color="#56B4E9", alpha=0.5, linewidth=0,
        label=f"certified by daskrr\nfrom {scores['columns']} columns",
    )  # fmt: skip
    axes.plot(x, scores["scores"], "o", color=EXACT, markersize=1.8, markeredgewidth=0, label="exact score")
    axes.set(yscale="log", xlabel="x", ylabel="ridge leverage score", xlim=(-0.02, 1.02))
    floor = 10 ** np.floor(np.log10(min(scores["lower"])))
    axes.set_ylim(bottom=floor / 2)
    axes.plot(x, np.full_like(x, floor / 1.4), "|", color=QUIET, markersize=5, markeredgewidth=0.4, label="points")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 0.14), fontsize=7.5, frameon=False)


def _draw_risks(axes: Axes, risks: dict[str, Any]) -> None:
    for name, points in risks["curves"].items():
        style = {"linewidth": 1.4, "markersize": 3.6, **STYLES[name]}
        label = "uniform = diagonal" if name == "uniform" else name
        axes.plot(risks["landmarks"], [point["median"] for point in points], label=label, **style)
        if name != "leverage, rank k":  # its band is that of the exact scores
            ends = [[point[end] for point in points] for end in ("low", "high")]
            axes.fill_between(risks["landmarks"], *ends, color=style["color"], alpha=0.2, linewidth=0)
    axes.axhline(risks["exact"], color=EXACT, linestyle="--", linewidth=1.0, label="exact regression", zorder=1)
    axes.set(xscale="log", yscale="log", xlabel="number of columns p", ylabel="risk (mean squared error)")
    axes.set_xticks(risks["landmarks"], [f"{p}" for p in risks["landmarks"]])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(loc="upper right", fontsize=7.5, frameon=False, borderaxespad=0.0)


def _line(risks: dict[str, Any], name: str, place: int) -> dict[str, str]:
    point, exact = risks["curves"][name][place], risks["exact"]
    text = f"{point['median'] / exact:.3f} [{point['low'] / exact:.3f}, {point['high'] / exact:.3f}]"
    return {"p": str(risks["landmarks"][place]), "choice": name, "risk / exact, median [quartiles]": text}


def main() -> int:
    """Compute, print, draw and write the figure."""
    found = parser("figure1", __doc__, 100, "paper_figure1.png")
    found.add_argument("--function", choices=("sine", "Bernoulli"), default="sine", help="f*; the sine by default")
    options = found.parse_args()
    problem = synth()
    truth = problem.truths[options.function]
    parameters = {
        "ridge": problem.ridge, "epsilon": EPSILON, "order": SYNTH_ORDER, "beta": SYNTH_BETA, "seeds": options.seeds,
        "function": options.function, "noise_deviation": truth.noise**0.5, "band": BAND,
        "k": round(problem.effective_dimension),
    }  # fmt: skip
    content = harness.report("paper_figure1", SEED, False, parameters)
    scores, risks = score_panel(problem), risk_panel(problem, truth, options.seeds)
    lines = [_line(risks, name, place) for place in range(len(LANDMARKS)) for name in CHOICES]
    harness.print_table(f"Figure 1, right: {options.seeds} seeds", lines)
    note = (
        f"n = {len(problem.X)}, x: quantiles of Beta({SYNTH_BETA}, {SYNTH_BETA}), f*: {options.function}, "
        f"σ = {truth.noise**0.5:.3f}; Bernoulli kernel of order {SYNTH_ORDER}, whose diagonal is constant; "
        f"λ = {problem.ridge:g}, ε = {EPSILON:g}, k = {parameters['k']}.\n"
        f"b: medians and quartiles of {options.seeds} draws; leverage, daskrr: by scores estimated from p more columns"
    )
    harness.write_report(options.output.with_suffix(".json"), content | {"results": {"scores": scores, "risks": risks}})
    plots.save(picture(scores, risks, note), options.output)
    print(f"picture: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
