"""Do certified intervals hold the exact scores, how wide are they, and what does the estimate gain on the scores?

Validity: random problems with many kernels, clouds, ridges, schemes and both dtypes, each certified with a failure
probability of 1e-6 and of 0. No exact score may be outside its interval by more than the error of the reference itself:
`daskrr.exact` goes through eigenvalues in float64, whose backward error is at most about n·u·‖K‖ with the unit roundoff
u; a change of K by that moves a score l by at most (1 − l)·n·u·‖K‖/(n·λ), and n·u·l is added for the sum that makes l.
Rows outside by less are counted too, as "strictly outside", and so are "loosely checked" scores, of which this error is
more than one part in a hundred. Runs refused with `RidgeTooSmall` are counted, not judged.

Width: upper/lower with residual sampling in three rounds and p = 5·d_eff, the exact effective dimension.

Estimate: its error beside those of the scores and of the self correction 1 − o/(1 + e·o/(n·λ)), which takes a row for
the only one with a residual; o is 1 − score and e the residual.
"""

import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import dask
import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigvalsh
from scipy.spatial.distance import pdist

import daskrr
from benchmarks import harness
from daskrr import exact
from daskrr.errors import DaskrrError, RidgeTooSmall
from daskrr.kernels import Cosine, Gaussian, Kernel, Laplacian, Linear, Matern, Polynomial
from daskrr.synthetic import planted_outliers

SEED = 0
AUDIT_ROWS = 2000
FAILURE_PROBABILITY = 1e-6
UNIT_ROUNDOFF = 2.0**-53
SCHEMES = ("uniform", "diagonal", "leverage", "residual")
TOP = 30
LOOSE = 0.01
COUNTS = ("scores", "loosely_checked", "strictly_outside", "outside")

Rows = NDArray[np.float64]


@dataclass(frozen=True)
class Sizes:
    """How much to run; one in ``large_every`` of the random problems has up to ``n_rows`` rows, the others few."""

    n_problems: int
    large_every: int
    n_rows: int
    features: tuple[int, ...]
    seeds: int


FULL = Sizes(n_problems=240, large_every=24, n_rows=3000, features=(1, 2, 3, 5, 8), seeds=3)
QUICK = Sizes(n_problems=12, large_every=12, n_rows=400, features=(2, 8), seeds=1)


def normal_rows(n: int, d: int, generator: np.random.Generator) -> Rows:
    """A normal cloud."""
    return generator.standard_normal((n, d))


def student_rows(n: int, d: int, generator: np.random.Generator) -> Rows:
    """Every entry has a Student-t distribution with 3 degrees of freedom."""
    return generator.standard_t(3, (n, d))


def heavy_rows(n: int, d: int, generator: np.random.Generator) -> Rows:
    """Normal directions, with lengths that have the tail of a Student-t distribution with 2 degrees of freedom."""
    return generator.standard_normal((n, d)) / np.sqrt(generator.chisquare(2, (n, 1)) / 2)


def cluster_rows(n: int, d: int, generator: np.random.Generator) -> Rows:
    """Clusters, and one row in a hundred far from everything."""
    return planted_outliers(n, d, max(1, n // 100), int(generator.integers(2**31))).block(0, n)


def duplicate_rows(n: int, d: int, generator: np.random.Generator) -> Rows:
    """Every row several times."""
    return generator.standard_normal((max(2, n // 5), d))[generator.integers(max(2, n // 5), size=n)]


def far_rows(n: int, d: int, generator: np.random.Generator) -> Rows:
    """A normal cloud of which some rows are far away."""
    X = generator.standard_normal((n, d))
    X[generator.choice(n, max(1, n // 50), replace=False)] *= 10.0 ** generator.uniform(1, 5)
    return X


def shifted_rows(n: int, d: int, generator: np.random.Generator) -> Rows:
    """A normal cloud far from the origin."""
    return generator.standard_normal((n, d)) + 10.0 ** generator.uniform(1, 4)


CLOUDS: dict[str, Callable[[int, int, np.random.Generator], Rows]] = {
    "normal": normal_rows,
    "Student-t": student_rows,
    "heavy tails": heavy_rows,
    "clusters + outliers": cluster_rows,
    "duplicates": duplicate_rows,
    "far rows": far_rows,
    "shifted": shifted_rows,
}
# Of the length scale; polynomials and linear parts are scaled by it too, lest far rows overflow them.
KERNELS: dict[str, Callable[[float], Kernel]] = {
    "Gaussian": Gaussian,
    "Laplacian": Laplacian,
    "Matern 1/2": partial(Matern, nu=0.5),
    "Matern 3/2": partial(Matern, nu=1.5),
    "Matern 5/2": partial(Matern, nu=2.5),
    "polynomial": lambda scale: Polynomial(degree=3, offset=1.0, scale=1 / scale**2),
    "linear": lambda scale: Linear(),
    "cosine": lambda scale: Cosine(),
    "Gaussian + Laplacian": lambda scale: Gaussian(scale) + 0.5 * Laplacian(scale),
    "Gaussian + linear": lambda scale: Gaussian(scale) + scale**-2 * Linear(),
}


def median_distance(X: Rows) -> float:
    """Median distance of the first thousand rows, or 1 where most of them coincide."""
    return float(np.median(pdist(X[:1000]))) or 1.0


@dataclass(frozen=True)
class RandomProblem:
    """A random problem, given by its number."""

    number: int
    cloud: str
    kernel: str
    n_rows: int
    n_features: int
    length_scale: float
    ridges: list[float]
    n_landmarks: int
    sampling: str
    dtype: str
    options: dict[str, Any]


def random_problem(number: int, sizes: Sizes) -> tuple[RandomProblem, Rows]:
    """Draw everything about a problem; ridges are drawn relative to the mean diagonal of the kernel matrix."""
    generator = np.random.default_rng([SEED, number])
    large = number % sizes.large_every == 0
    most, least = (sizes.n_rows, 0.6 * sizes.n_rows) if large else (0.25 * sizes.n_rows, 40)
    n = int(math.exp(generator.uniform(math.log(least), math.log(most))))
    d = int(math.exp(generator.uniform(0, math.log(65))))
    cloud, kernel = (str(generator.choice(list(names))) for names in (CLOUDS, KERNELS))
    X = CLOUDS[cloud](n, d, generator)
    scale = median_distance(X) * math.exp(generator.uniform(-1, 1))
    dtype = "float32" if generator.random() < 0.2 else "float64"
    # float32 tiles resolve few ridges below 1e-4, and should refuse what they do not resolve.
    exponents = generator.uniform(-5 if dtype == "float32" else -8, 0, 3 if generator.random() < 0.3 else 1)
    mean = float(np.mean(KERNELS[kernel](scale).diagonal(X)))
    options = {"audit_rows": int(generator.choice([200, 2000])), "subset_bound": bool(generator.random() < 0.3)}
    ridges = [float(mean * 10.0**exponent) for exponent in exponents]
    sampling, p = str(generator.choice(SCHEMES)), math.ceil(generator.uniform(0.05, 0.5) * n)
    return RandomProblem(number, cloud, kernel, n, d, scale, ridges, p, sampling, dtype, options), X


def check_validity(problem: RandomProblem, X: Rows) -> list[dict[str, Any]]:
    """Compare the exact scores with the intervals at both failure probabilities."""
    kernel = KERNELS[problem.kernel](problem.length_scale)
    truth, allowed, refused = _reference(X, kernel, problem.ridges)
    found = []
    for probability in (FAILURE_PROBABILITY, 0.0):
        run = {"problem": asdict(problem), "failure_probability": probability, "reference_refused": refused}
        found.append(run | _compare(problem, X, kernel, probability, truth, allowed))
    return found


def _reference(X: Rows, kernel: Kernel, ridges: list[float]) -> tuple[NDArray, NDArray, int]:
    """Exact scores (n, L) and their errors; NaN at the ridges that the reference refuses, and how many those are."""
    norm = float(np.abs(kernel(X, X)).sum(axis=1).max())
    truth = np.full((len(X), len(ridges)), np.nan)
    refused = 0
    for column, ridge in enumerate(ridges):
        try:
            truth[:, column] = exact.leverage_scores(X, kernel, ridge)
        except RidgeTooSmall:
            refused += 1
    roundoff = len(X) * UNIT_ROUNDOFF
    return truth, roundoff * ((1 - truth) * norm / (len(X) * np.array(ridges)) + truth), refused


def _compare(
    problem: RandomProblem, X: Rows, kernel: Kernel, probability: float, truth: NDArray, allowed: NDArray
) -> dict[str, Any]:
    """How many of the scores are outside their intervals, or the name of the refusal."""
    try:
        lower, upper = _intervals(problem, X, kernel, probability)
    except DaskrrError as error:
        return {"refused": type(error).__name__, "message": str(error)}
    outside, known = np.maximum(lower - truth, truth - upper), ~np.isnan(truth)
    return {
        "scores": int(known.sum()),
        "loosely_checked": int(np.sum(allowed[known] > LOOSE * truth[known])),
        "strictly_outside": int(np.sum(outside[known] > 0)),
        "outside": int(np.sum(outside[known] > allowed[known])),
        "furthest_of_allowed": float(np.max(outside[known] / allowed[known], initial=0.0)),
        "median_width": float(np.median(np.log(np.maximum(upper, 1e-300) / np.maximum(lower, 1e-300)))),
    }


def _intervals(problem: RandomProblem, X: Rows, kernel: Kernel, probability: float) -> tuple[NDArray, NDArray]:
    result = daskrr.leverage_scores(
        X, kernel, problem.ridges, problem.n_landmarks, sampling=problem.sampling, certify=True,
        failure_probability=probability, dtype=problem.dtype, random_state=problem.number, progress=False,
        **problem.options,
    )  # fmt: skip
    return dask.compute(result.lower, result.upper)


WIDTH_RIDGES = (1e-4, 1e-3, 1e-2)
JUDGED_RIDGES = (1e-4, 1e-3)


def allowed_widths(n_features: int) -> tuple[float, float]:
    """Largest median and 95 % quantile of upper/lower that are required."""
    return (1.15, 1.25) if n_features <= 5 else (1.5, 1.75)


def measure_widths(cloud: str, n_features: int, sizes: Sizes) -> list[dict[str, Any]]:
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
        X, kernel, ridge, p, sampling="residual", rounds=3, certify=True, failure_probability=FAILURE_PROBABILITY,
        audit_rows=AUDIT_ROWS, random_state=seed, progress=False,
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


def measure_estimates(problem: EstimateProblem, sizes: Sizes) -> list[dict[str, Any]]:
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
        "no refusal but of too small a ridge": all(run.get("refused") in (None, "RidgeTooSmall") for run in validity),
        "median width": all(found["median"] <= median for found, (median, _) in judged),
        "95 % width": all(found["most"] <= most for found, (_, most) in judged),
        "estimate better than scores": average["estimate"] < average["scores"],
        "estimate better than self correction": average["estimate"] < average["self correction"],
    }


def summarize_validity(validity: list[dict[str, Any]]) -> dict[str, Any]:
    """Totals for each failure probability."""
    totals = {}
    for probability in (FAILURE_PROBABILITY, 0.0):
        runs = [run for run in validity if run["failure_probability"] == probability]
        done = [run for run in runs if "refused" not in run]
        counts = {name: sum(run[name] for run in done) for name in COUNTS}
        totals[f"{probability:g}"] = {
            "runs": len(runs),
            "refused": dict(Counter(run["refused"] for run in runs if "refused" in run)),
            "ridges_without_reference": sum(run["reference_refused"] for run in done),
            **counts,
            "most_of_allowed": max((run["furthest_of_allowed"] for run in done), default=0.0),
        }
    return totals


def _show(validity: list[dict[str, Any]], widths: list[dict[str, Any]], estimates: list[dict[str, Any]]) -> None:
    harness.print_table(
        f"Validity: exact scores and certified intervals of {len(validity) // 2} random problems",
        [_validity_line(*item) for item in summarize_validity(validity).items()],
    )
    for run in validity:
        if run.get("outside") or run.get("refused") not in (None, "RidgeTooSmall"):
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


def _validity_line(probability: str, totals: dict[str, Any]) -> dict[str, str]:
    return {
        "failure probability": probability,
        "runs": str(totals["runs"]),
        "refused": ", ".join(f"{count} {name}" for name, count in totals["refused"].items()) or "none",
        "ridges without reference": str(totals["ridges_without_reference"]),
        "scores": f"{totals['scores']:,}",
        "loosely checked": f"{totals['loosely_checked']:,}",
        "strictly outside": str(totals["strictly_outside"]),
        "outside": str(totals["outside"]),
        "furthest, of the reference's error": f"{totals['most_of_allowed']:.2g}",
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
    options = harness.arguments("certificate", __doc__)
    sizes = QUICK if options.quick else FULL
    parameters = {
        "ridge": WIDTH_RIDGES[0],
        "width_ridges": WIDTH_RIDGES,
        "audit_rows": AUDIT_ROWS,
        "failure_probability": FAILURE_PROBABILITY,
        **asdict(sizes),
    }
    content = harness.report("certificate", SEED, options.quick, parameters)
    began = time.perf_counter()
    validity = [run for number in range(sizes.n_problems) for run in check_validity(*random_problem(number, sizes))]
    clouds = [(cloud, d) for cloud in ("normal", "Student-t") for d in sizes.features]
    widths = [found for cloud, d in clouds for found in measure_widths(cloud, d, sizes)]
    estimates = [found for problem in ESTIMATE_PROBLEMS for found in measure_estimates(problem, sizes)]
    _show(validity, widths, estimates)
    checks = judge(validity, widths, estimates)
    harness.print_checks(checks, options.quick)
    results = {
        "validity": summarize_validity(validity),
        "validity_runs": validity,
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
