"""Do certified intervals hold the exact scores, how wide are they, and what does the estimate gain on the scores?

Validity: random clouds and copies of a few points with many kernels, ridges, schemes and both dtypes, each certified
with a failure probability of 1e-6 and of 0, see `benchmarks/validity.py`. Runs refused with `RidgeTooSmall` are
counted, not judged.

Width: upper/lower with residual sampling in three rounds and p = 5·d_eff, the exact effective dimension.

Estimate: its error beside those of the scores and of the self correction 1 − o/(1 + e·o/(n·λ)), which takes a row for
the only one with a residual; o is 1 − score and e the residual.
"""

import itertools
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import dask
import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigvalsh

import daskrr
from benchmarks import harness
from benchmarks.clouds import CLOUDS, Rows, median_distance
from benchmarks.validity import (
    FEW_POINTS,
    PROBABILITIES,
    SCHEMES,
    SEED,
    check_validity,
    cloud_problem,
    count,
    repeated_problem,
    summarize,
)
from daskrr import exact
from daskrr.kernels import Gaussian, Kernel

AUDIT_ROWS = 2000
FAILURE_PROBABILITY = 1e-6
TOP = 30
LEAST = {"problems": 2000, "pairs": 10**6}


@dataclass(frozen=True)
class Sizes:
    """How much to run: problems of every family, rows of large clouds, rows whose widths and estimates are measured."""

    clouds: int
    large_clouds: int
    large_rows: int
    two_points: int
    few_points: int
    n_rows: int
    features: tuple[int, ...]
    seeds: int


FULL = Sizes(
    clouds=2400, large_clouds=60, large_rows=5000, two_points=600, few_points=600,
    n_rows=3000, features=(1, 2, 3, 5, 8), seeds=3,
)  # fmt: skip
QUICK = Sizes(
    clouds=10, large_clouds=1, large_rows=400, two_points=4, few_points=4, n_rows=400, features=(2, 8), seeds=1
)  # fmt: skip


def check_families(sizes: Sizes, percent: int, apply: Callable) -> list[dict[str, Any]]:
    """Check the problems of all families, or the first ``percent`` of each."""
    families = {
        "clouds": (sizes.clouds, cloud_problem, 40, 0.15 * sizes.large_rows),
        "large clouds": (sizes.large_clouds, cloud_problem, 0.6 * sizes.large_rows, sizes.large_rows),
        "two points": (sizes.two_points, repeated_problem, 2, 2),
        "few points": (sizes.few_points, repeated_problem, 3, FEW_POINTS),
    }
    checks = [
        partial(_check, draw, family, number, *limits)
        for family, (problems, draw, *limits) in families.items()
        for number in range(math.ceil(problems * percent / 100))
    ]
    return list(itertools.chain(*apply(_call, checks)))


def _check(draw: Callable, *arguments: Any) -> list[dict[str, Any]]:
    return check_validity(*draw(*arguments))


def _call(check: Callable[[], Any]) -> Any:
    return check()


WIDTH_RIDGES = (1e-4, 1e-3, 1e-2)
JUDGED_RIDGES = (1e-4, 1e-3)


def allowed_widths(n_features: int) -> tuple[float, float]:
    """Largest median and 95 % quantile of upper/lower that are required."""
    return (1.15, 1.25) if n_features <= 5 else (1.5, 1.75)


def measure_widths(sizes: Sizes, cloud: str, n_features: int) -> list[dict[str, Any]]:
    """Widths of the intervals of one cloud at every ridge; medians over the seeds."""
    X = CLOUDS[cloud](sizes.n_rows, n_features, np.random.default_rng([SEED, n_features]))
    kernel = Gaussian(median_distance(X))
    eigenvalues = np.maximum(eigvalsh(kernel(X, X), driver="evd"), 0)
    found = []
    for ridge in WIDTH_RIDGES:
        dimension = float(np.sum(eigenvalues / (eigenvalues + len(X) * ridge)))
        p = math.ceil(5 * dimension)
        runs = [_ratio_quantiles(X, kernel, ridge, p, seed) for seed in range(sizes.seeds)]
        median, most = np.median(runs, axis=0).tolist()
        found.append({
            "cloud": cloud, "n_features": n_features, "ridge": ridge, "effective_dimension": dimension,
            "n_landmarks": p, "median": median, "most": most, "worst": np.max(runs, axis=0).tolist(),
            "judged": ridge in JUDGED_RIDGES,
        })  # fmt: skip
    return found


def _ratio_quantiles(X: Rows, kernel: Kernel, ridge: float, p: int, seed: int) -> NDArray[np.float64]:
    """Median and 95 % quantile of upper/lower over the rows."""
    result = daskrr.leverage_scores(
        X, kernel, ridge, p, sampling=daskrr.Residual(rounds=3),
        certify=daskrr.Certify(FAILURE_PROBABILITY, audit_rows=AUDIT_ROWS), random_state=seed, progress=False,
    )  # fmt: skip
    lower, upper = dask.compute(result.lower, result.upper)
    return np.quantile(upper / np.maximum(lower, np.finfo(float).tiny), [0.5, 0.95])


@dataclass(frozen=True)
class EstimateProblem:
    """Rows whose scores are estimated with a Gaussian kernel of the median distance."""

    cloud: str
    n_features: int
    ridge: float


ESTIMATE_PROBLEMS = (
    EstimateProblem("normal", 5, 1e-3),
    EstimateProblem("clusters + outliers", 5, 1e-3),
    EstimateProblem("heavy tails", 16, 1e-2),
    EstimateProblem("Student-t", 3, 1e-4),
)


def measure_estimates(sizes: Sizes, problem: EstimateProblem) -> list[dict[str, Any]]:
    """Errors of the answers by every scheme, with p about 3·d_eff; means over the seeds."""
    X = CLOUDS[problem.cloud](sizes.n_rows, problem.n_features, np.random.default_rng([SEED, problem.n_features]))
    kernel = Gaussian(median_distance(X))
    truth = exact.leverage_scores(X, kernel, problem.ridge)
    p = math.ceil(3 * truth.sum())
    found = []
    for scheme in SCHEMES:
        runs = [_errors_of_answers(X, kernel, problem.ridge, p, scheme, seed, truth) for seed in range(sizes.seeds)]
        answers = {
            name: {figure: float(np.mean([run[name][figure] for run in runs])) for figure in runs[0][name]}
            for name in runs[0]
        }
        found.append(asdict(problem) | {"n_landmarks": p, "sampling": scheme, "answers": answers})
    return found


def _errors_of_answers(
    X: Rows, kernel: Kernel, ridge: float, p: int, scheme: str, seed: int, truth: NDArray
) -> dict[str, dict[str, float]]:
    result = daskrr.leverage_scores(X, kernel, ridge, p, sampling=scheme, random_state=seed, progress=False)
    scores, estimate, residual = dask.compute(result.scores, result.estimate, result.residual)
    answers = {"estimate": estimate, "scores": scores}
    answers["self correction"] = self_correction(scores, residual, len(X) * ridge)
    return {name: errors_of(values, truth) for name, values in answers.items()}


def self_correction(scores: NDArray, residual: NDArray, shift: float) -> NDArray:
    """What the exact score would be were every row the only one with a residual."""
    others = 1 - scores
    return 1 - others / (1 + np.maximum(residual, 0) * others / shift)


def errors_of(values: NDArray, truth: NDArray) -> dict[str, float]:
    """Mean |log(value/exact)|, and mean value/exact over the highest exact scores."""
    highest = np.argsort(-truth)[:TOP]
    return {
        "mean_log_error": float(np.mean(np.abs(np.log(np.maximum(values, np.finfo(float).tiny) / truth)))),
        "top_ratio": float(np.mean(values[highest] / truth[highest])),
    }


def average_errors(estimates: list[dict[str, Any]]) -> dict[str, float]:
    """Mean error of every answer over the problems and schemes."""
    return {
        name: float(np.mean([found["answers"][name]["mean_log_error"] for found in estimates]))
        for name in estimates[0]["answers"]
    }


def judge(
    validity: list[dict[str, Any]], widths: list[dict[str, Any]], estimates: list[dict[str, Any]]
) -> dict[str, bool]:
    """What is required."""
    average = average_errors(estimates)
    judged = [(found, allowed_widths(found["n_features"])) for found in widths if found["judged"]]
    return {
        "every exact score within its interval": not any(run.get("outside") for run in validity),
        "enough problems and pairs": all(number >= LEAST[name] for name, number in count(validity).items()),
        "no refusal but of too small a ridge": all(run.get("refused") in (None, "RidgeTooSmall") for run in validity),
        "median width": all(found["median"] <= median for found, (median, _) in judged),
        "95 % width": all(found["most"] <= most for found, (_, most) in judged),
        "estimate better than scores": average["estimate"] < average["scores"],
        "estimate better than self correction": average["estimate"] < average["self correction"],
    }


def failures(validity: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs with scores outside their intervals, and refusals for another reason than too small a ridge."""
    return [run for run in validity if run.get("outside") or run.get("refused") not in (None, "RidgeTooSmall")]


def _show(validity: list[dict[str, Any]], widths: list[dict[str, Any]], estimates: list[dict[str, Any]]) -> None:
    harness.print_table(
        "Validity: {problems:,} problems and {pairs:,} pairs of distinct rows and ridges".format(**count(validity)),
        [_validity_line(totals) for totals in summarize(validity)],
    )
    for run in failures(validity):
        print(f"FAILED: {run}")
    harness.print_table(
        "Width: upper/lower with p = 5·d_eff, residual sampling in three rounds", [_width_line(w) for w in widths]
    )
    print(f"λ = {WIDTH_RIDGES[-1]:g} is shown beside the others and never judged.")
    harness.print_table(
        f"Estimate: mean |log(value/exact)|, and mean value/exact of the {TOP} highest, with p = 3·d_eff",
        [_estimate_line(found) for found in estimates],
    )
    print("Where the diagonal is constant, as here, draws by it are uniform draws.")
    print("on average: " + ", ".join(f"{name} {value:.4f}" for name, value in average_errors(estimates).items()))


def _validity_line(totals: dict[str, Any]) -> dict[str, str]:
    return {
        "family": totals["family"],
        "dtype": totals["dtype"],
        "failure probability": f"{totals['failure_probability']:g}",
        "problems": str(totals["problems"]),
        "at the line": str(totals["raised_to_the_line"]),
        "refused": ", ".join(f"{number} {name}" for name, number in totals["refused"].items()) or "none",
        "pairs": f"{totals['pairs']:,}",
        "loosely checked": f"{totals['loosely_checked']:,}",
        "strictly outside": str(totals["strictly_outside"]),
        "outside": str(totals["outside"]),
        "worst, of the score": f"{totals['worst_violation']:.2g}",
        "upper/lower": " ".join(f"{value:.4g}" for value in totals["widths"].values()),
    }


def _width_line(found: dict[str, Any]) -> dict[str, str]:
    median, most = allowed_widths(found["n_features"])
    return {
        "cloud": found["cloud"],
        "d": str(found["n_features"]),
        "λ": f"{found['ridge']:g}",
        "d_eff": f"{found['effective_dimension']:.1f}",
        "p": str(found["n_landmarks"]),
        "median": f"{found['median']:.4f}",
        "95 %": f"{found['most']:.4f}",
        "worst seed": " ".join(f"{value:.3f}" for value in found["worst"]),
        "required": f"{median} {most}" if found["judged"] else "not judged",
    }


def _estimate_line(found: dict[str, Any]) -> dict[str, str]:
    line = {
        "cloud": found["cloud"],
        "d": str(found["n_features"]),
        "λ": f"{found['ridge']:g}",
        "p": str(found["n_landmarks"]),
        "sampling": found["sampling"],
    }
    for name, errors in found["answers"].items():
        line[name] = f"{errors['mean_log_error']:.4f}"
        line[f"top {TOP}, {name}"] = f"{errors['top_ratio']:.3f}"
    return line


def main() -> int:
    """Run the benchmark; 1 when a requirement is missed."""
    options = harness.arguments(
        "certificate", __doc__, workers=(1, "processes to work in"), percent=(100, "share of the random problems")
    )
    sizes = QUICK if options.quick else FULL
    parameters = {
        "ridge": WIDTH_RIDGES[0],
        "width_ridges": WIDTH_RIDGES,
        "audit_rows": AUDIT_ROWS,
        "failure_probabilities": PROBABILITIES,
        "percent": options.percent,
        **asdict(sizes),
    }
    content = harness.report("certificate", SEED, options.quick, parameters)
    began = time.perf_counter()
    clouds = [(cloud, d) for cloud in ("normal", "Student-t") for d in sizes.features]
    with harness.processes(options.workers) as apply:
        validity = check_families(sizes, options.percent, apply)
        widths = list(itertools.chain(*apply(partial(measure_widths, sizes), *zip(*clouds, strict=True))))
        estimates = list(itertools.chain(*apply(partial(measure_estimates, sizes), ESTIMATE_PROBLEMS)))
    _show(validity, widths, estimates)
    checks = judge(validity, widths, estimates)
    harness.print_checks(checks, options.quick)
    results = {
        **count(validity),
        "validity": summarize(validity),
        "failures": failures(validity),
        "widths": widths,
        "estimates": estimates,
        "average_errors": average_errors(estimates),
        "checks": checks,
        "seconds": time.perf_counter() - began,
    }
    harness.write_report(options.output, content | {"results": results, "passed": all(checks.values())})
    return 0 if options.quick or all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
