"""Table 1: d_eff, d_mof and the risk ratio of every data set and kernel, beside the printed values.

Ratios are medians over draws of landmarks, with their range. d_mof is told in two meanings: n times the largest
leverage score, as the text defines it, and n times the largest eigenvalue of K(K + nλεI)⁻¹, which is what was printed.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.paper import choices
from benchmarks.paper.problems import (
    EPSILON,
    SYNTH_RIDGE,
    Problem,
    add_data,
    data_missing,
    linear,
    nystrom_spectrum,
    parser,
    rbf,
    risk,
    spread,
    synth,
)
from daskrr.errors import RidgeTooSmall
from daskrr.nystrom.landmarks import Landmarks

SEED = 0
# d_eff, d_mof and risk ratio as printed. Nothing is computed from these.
PRINTED = {
    ("Bern", "Synth"): (24, 500, 1.01),
    ("Linear", "Gas2"): (126, 1244, 1.10),
    ("Linear", "Gas3"): (125, 1586, 1.09),
    ("Linear", "Pum-32fm"): (31, 2000, 0.99),
    ("Linear", "Pum-32fh"): (31, 2000, 0.99),
    ("Linear", "Pum-32nh"): (32, 2000, 0.99),
    ("RBF", "Gas2"): (1135, 1244, 1.56),
    ("RBF", "Gas3"): (1450, 1586, 1.50),
    ("RBF", "Pum-32fm"): (142, 1897, 1.00),
    ("RBF", "Pum-32fh"): (747, 1989, 1.00),
    ("RBF", "Pum-32nh"): (1337, 1997, 0.99),
}
CHOICES: dict[str, choices.Choice] = {
    "uniform": choices.uniform,
    "diagonal": choices.diagonal,
    "leverage, exact": choices.exact_leverage,
    "leverage, daskrr": choices.estimated_leverage,
    "uniform, distinct": choices.distinct,
    "residual, daskrr": choices.residual,
}
LEVERAGE = "leverage, exact"
SKETCHED = "leverage, exact, L_γ"
AS_IN_PAPER = ("uniform", "diagonal", LEVERAGE, "leverage, daskrr")
BEYOND = (SKETCHED, "uniform, distinct", "residual, daskrr")
NOTES = f"""
Printed values are those of the paper. d_eff and both d_mof are at λε, ε = {EPSILON:g}; the risk is at λ.
Ratios: risk of f_L over risk of f_K in closed form, median [range] of the seeds; p draws with replacement unless said.
f* and noise: Synth sin(2πx), and the noise for which λ has the least risk. Real data (the paper does not say): f* is
  the exact fit of y at λ, the noise variance what its residuals estimate. The tables of other truths have the same
  landmarks with f* ∝ x(x − 1/2)(x − 1); with the noise for which λ has the least risk; and with f* = y.
leverage, exact: draws by exact scores at λε. leverage, daskrr: scores estimated from p columns drawn by k_ii, then p
  draws, half by them and half uniform. uniform, distinct: without replacement. residual, daskrr: sampling="residual",
  two rounds, without replacement too.
L_γ = KS(SᵀKS + nγI)⁻¹SᵀK with γ = λε; all others L = C W⁺ Cᵀ.
= uniform: k_ii is constant. refused: round-off would decide daskrr's scores, which go through kernel values.
Linear rows: p landmarks span all features, so that L is K and the ratio 1 in exact arithmetic.
"""


@dataclass(frozen=True)
class Row:
    """One row of the table: what is printed of the problem itself."""

    kernel: str
    dataset: str
    ridge: float
    bandwidth: float | None = None

    @property
    def printed(self) -> tuple[int, int, float]:
        """d_eff, d_mof and risk ratio of the paper."""
        return PRINTED[self.kernel, self.dataset]

    def missing(self, folder: Path | None) -> str | None:
        """Why the row cannot be computed, if so."""
        return None if self.kernel == "Bern" else data_missing(self.dataset, folder)

    def problem(self, folder: Path | None) -> Problem:
        """Read or generate the data."""
        if folder is None or self.kernel == "Bern":
            return synth()
        if self.bandwidth is None:
            return linear(self.dataset, self.ridge, folder)
        return rbf(self.dataset, self.ridge, self.bandwidth, folder)

    def n_landmarks(self, effective_dimension: float) -> int:
        """The paper's p: d_eff for RBF, twice that for the others."""
        return round(effective_dimension) * (1 if self.kernel == "RBF" else 2)


ROWS = (
    Row("Bern", "Synth", SYNTH_RIDGE),
    *(Row("Linear", dataset, 1e-3) for dataset in ("Gas2", "Gas3", "Pum-32fm", "Pum-32fh", "Pum-32nh")),
    Row("RBF", "Gas2", 4.5e-4, 1),
    Row("RBF", "Gas3", 5e-4, 1),
    Row("RBF", "Pum-32fm", 0.5, 5),
    Row("RBF", "Pum-32fh", 5e-2, 5),
    Row("RBF", "Pum-32nh", 1.3e-2, 5),
)


def dimensions(problem: Problem) -> dict[str, float]:
    """The columns of the table that have no chance in them."""
    n, ridge = len(problem.X), problem.ridge * EPSILON
    return {
        "d_eff": problem.effective_dimension,
        "d_mof": n * float(np.max(problem.spectrum.scores(ridge))),
        "d_mof_as_printed": n * float(np.max(problem.spectrum.filter(ridge))),
        "d_eff_at_ridge": float(np.sum(problem.spectrum.filter(problem.ridge))),
    }


def ratios(problem: Problem, landmarks: Landmarks, sketch_ridge: float | None = None) -> dict[str, float]:
    """The risk ratio of a set of landmarks for every truth."""
    approximate = nystrom_spectrum(problem, landmarks, sketch_ridge)
    return {name: problem.ratio(approximate, truth) for name, truth in problem.truths.items()}


def measure(problem: Problem, p: int, seeds: int) -> dict[str, Any]:
    """Ratios of every choice: by truth, over the seeds; or why there are none."""
    found: dict[str, Any] = {}
    for name, choose in CHOICES.items():
        if name == "diagonal" and choices.constant_diagonal(problem):
            found[name] = found["uniform"] | {"note": "= uniform"}
            continue
        try:
            drawn = [choose(problem, p, seed) for seed in range(SEED, SEED + seeds)]
        except RidgeTooSmall as error:
            found[name] = {"note": "refused", "reason": str(error)}
            continue
        found[name] = _combine(problem, drawn)
        if name == LEVERAGE:
            found[SKETCHED] = _combine(problem, drawn, problem.ridge * EPSILON)
    return found


def _combine(problem: Problem, drawn: list[Landmarks], sketch_ridge: float | None = None) -> dict[str, Any]:
    runs = [ratios(problem, landmarks, sketch_ridge) for landmarks in drawn]
    distinct = float(np.median([len(landmarks.indices) for landmarks in drawn]))
    return {"ratios": {truth: spread([run[truth] for run in runs]) for truth in runs[0]}, "distinct": distinct}


def compute(row: Row, folder: Path | None, seeds: int) -> dict[str, Any]:
    """One row of the report."""
    head: dict[str, Any] = {"kernel": row.kernel, "dataset": row.dataset, "ridge": row.ridge}
    head |= {"bandwidth": row.bandwidth, "printed": dict(zip(("d_eff", "d_mof", "ratio"), row.printed, strict=True))}
    if reason := row.missing(folder):
        return head | {"missing": reason}
    problem = row.problem(folder)
    found = dimensions(problem)
    p = row.n_landmarks(found["d_eff"])
    exact = risk(problem.spectrum, problem.ridge, problem.truth)
    return head | found | {
        "n": len(problem.X),
        "features": problem.X.shape[1],
        "p": p,
        "noise": problem.truth.noise,
        "bias_share": exact.bias_squared / exact.total,
        "choices": measure(problem, p, seeds),
    }  # fmt: skip


def _name(result: dict[str, Any]) -> dict[str, str]:
    return {"kernel": result["kernel"], "dataset": result["dataset"]}


def _dimension_line(result: dict[str, Any]) -> dict[str, str]:
    printed = result["printed"]
    return _name(result) | {
        "n": str(result["n"]),
        "λ": f"{result['ridge']:g}",
        "d_eff": f"{result['d_eff']:.1f}",
        "printed d_eff": str(printed["d_eff"]),
        "n·max score": f"{result['d_mof']:.1f}",
        "n·max eigenvalue": f"{result['d_mof_as_printed']:.1f}",
        "printed d_mof": str(printed["d_mof"]),
    }


def _ratio_line(result: dict[str, Any], names: Sequence[str]) -> dict[str, str]:
    found = {name: _ratio_text(result["choices"][name]) for name in names}
    return _name(result) | {"p": str(result["p"])} | found | {"printed": f"{result['printed']['ratio']:.2f}"}


def _ratio_text(choice: dict[str, Any]) -> str:
    if "note" in choice:
        return choice["note"]
    found = next(iter(choice["ratios"].values()))
    return f"{found['median']:.3f} [{found['least']:.3f}, {found['most']:.3f}]"


def _truth_line(result: dict[str, Any]) -> dict[str, str]:
    found = result["choices"][LEVERAGE]["ratios"]
    medians = {truth: f"{one['median']:.3f}" for truth, one in found.items()}
    return _name(result) | medians | {"printed": f"{result['printed']['ratio']:.2f}"}


def show(results: list[dict[str, Any]]) -> None:
    """Print the table in its parts, and what is missing."""
    there = [result for result in results if "missing" not in result]
    harness.print_table("Table 1, dimensions", [_dimension_line(result) for result in there])
    harness.print_table("Table 1, risk ratios", [_ratio_line(result, AS_IN_PAPER) for result in there])
    harness.print_table("Risk ratios beyond the paper", [_ratio_line(result, BEYOND) for result in there])
    known, measured = there[:1], there[1:]
    harness.print_table(f"{known[0]['dataset']}, {LEVERAGE}, other f*", [_truth_line(result) for result in known])
    if measured:
        harness.print_table(f"Real data, {LEVERAGE}, other truths", [_truth_line(result) for result in measured])
    for result in results:
        if "missing" in result:
            print(f"{result['kernel']} {result['dataset']}: {result['missing']}")
    print(NOTES)


def main() -> int:
    """Compute, print and write the table."""
    found = parser("table1", __doc__, 20, "paper_table1.json")
    add_data(found)
    options = found.parse_args()
    content = harness.report("paper_table1", SEED, False, {"epsilon": EPSILON, "seeds": options.seeds})
    results = []
    for row in ROWS:
        results.append(compute(row, options.data, options.seeds))
        print(f"{row.kernel} {row.dataset}: {results[-1].get('missing', 'done')}", file=sys.stderr, flush=True)
    show(results)
    harness.write_report(options.output, content | {"results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
