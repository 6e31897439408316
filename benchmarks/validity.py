"""Random problems whose exact scores are held against certified intervals, and how wide those are.

Families: clouds of up to some hundred rows, large clouds of thousands, and up to 200,000 rows that are copies of two or
of a few points. A ridge that is refused is raised to the smallest that the refusal names, and tried again there.

The exact scores of few points come in many digits. Those of clouds go through eigenvalues in float64, whose backward
error is at most about n·u·‖K‖ with the unit roundoff u; a change of K by that moves a score l by at most
(1 − l)·n·u·‖K‖/(n·λ), and n·u·l is added for the sum that makes l. No score may be outside its interval by more than
that. Rows outside by less are counted too, as "strictly outside", and so are "loosely checked" scores, of which this
error is more than one part in a hundred. Equal rows count once, with the highest of their lower bounds and the lowest
of their upper ones.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import dask
import numpy as np
from numpy.typing import NDArray

import daskrr
from benchmarks.clouds import CLOUDS, KERNELS, KERNELS_OF_FEW_FEATURES, Rows, median_distance, repeated_rows
from daskrr import exact
from daskrr.errors import DaskrrError, RidgeTooSmall
from daskrr.kernels import Kernel
from tests.helpers.extended import scores_of_repeats

SEED = 0
PROBABILITIES = (1e-6, 0.0)
UNIT_ROUNDOFF = 2.0**-53
SCHEMES = ("uniform", "diagonal", "leverage", "residual")
# Powers of ten, relative to the mean diagonal; repeats are hard near the smallest ridges that a dtype resolves, and
# where an interval is so narrow that an error of their sum would show.
CLOUD_RIDGES = {"float32": (-5, 0), "float64": (-8, 0)}
REPEATED_RIDGES = {"float32": ((-7, -4), (-4, -1)), "float64": ((-16, -10), (-10, -2))}
FEWEST_REPEATED, MOST_REPEATED = 4096, 200_000
FEW_POINTS = 12
MOST_RAISES = 3
LOOSE = 0.01
# Stands for every larger upper/lower, and for those without a lower bound.
WIDEST = 1e9
COUNTS = ("pairs", "loosely_checked", "strictly_outside", "outside")
WORST = ("furthest_of_allowed", "worst_violation")
QUANTILES = {"median": 0.5, "most": 0.95}


@dataclass(frozen=True)
class Problem:
    """A random problem, given by its family and number."""

    family: str
    number: int
    rows: str
    kernel: str
    n_rows: int
    n_features: int
    length_scale: float
    ridges: tuple[float, ...]
    n_landmarks: int
    sampling: str
    dtype: str
    certainty: dict[str, Any]
    block_rows: int | None = None


def cloud_problem(family: str, number: int, least: float, most: float) -> tuple[Problem, Rows]:
    """Draw everything about a cloud; ridges are drawn relative to the mean diagonal of the kernel matrix."""
    generator = _generator(family, number)
    n = int(math.exp(generator.uniform(math.log(least), math.log(most))))
    d = int(math.exp(generator.uniform(0, math.log(65))))
    cloud, name = (str(generator.choice(list(names))) for names in (CLOUDS, KERNELS))
    X = CLOUDS[cloud](n, d, generator)
    scale = median_distance(X) * math.exp(generator.uniform(-1, 1))
    dtype = "float32" if generator.random() < 0.2 else "float64"
    ridges = _ridges(KERNELS[name](scale), X, *CLOUD_RIDGES[dtype], 3 if generator.random() < 0.3 else 1, generator)
    return Problem(
        family=family, number=number, rows=cloud, kernel=name, n_rows=n, n_features=d, length_scale=scale,
        ridges=ridges, n_landmarks=math.ceil(generator.uniform(0.05, 0.5) * n),
        sampling=str(generator.choice(SCHEMES)), dtype=dtype, certainty=_certainty(generator),
    ), X  # fmt: skip


def repeated_problem(family: str, number: int, least: int, most: int) -> tuple[Problem, Rows]:
    """Draw everything about copies of ``least`` to ``most`` points; half of the problems are in float32, rows too."""
    generator = _generator(family, number)
    n = int(math.exp(generator.uniform(math.log(FEWEST_REPEATED), math.log(MOST_REPEATED))))
    d, m = int(generator.integers(1, 5)), int(generator.integers(least, most + 1))
    dtype = str(generator.choice(["float32", "float64"]))
    X = repeated_rows(n, d, m, generator).astype(dtype)
    name, scale = str(generator.choice(list(KERNELS_OF_FEW_FEATURES))), math.exp(generator.uniform(-1, 1))
    span, count = REPEATED_RIDGES[dtype][generator.integers(2)], int(generator.choice([1, 5]))
    ridges = _ridges(KERNELS_OF_FEW_FEATURES[name](scale), X, *span, count, generator)
    block_rows = int(generator.choice([700, 5000, 60_000])) if generator.random() < 0.5 else None
    return Problem(
        family=family, number=number, rows=f"{m} points", kernel=name, n_rows=n, n_features=d, length_scale=scale,
        ridges=ridges, n_landmarks=int(generator.choice([2, 10, 100, 100, 400])),
        sampling=str(generator.choice([*SCHEMES, "residual", "residual"])), dtype=dtype,
        certainty=_certainty(generator), block_rows=block_rows,
    ), X  # fmt: skip


def _generator(family: str, number: int) -> np.random.Generator:
    return np.random.default_rng([SEED, number, *family.encode()])


def _ridges(
    kernel: Kernel, X: Rows, least: float, most: float, count: int, generator: np.random.Generator
) -> tuple[float, ...]:
    mean = float(np.mean(kernel.diagonal(X))) or 1.0
    exponents = generator.uniform(least, most, count)
    return tuple(float(mean * 10.0**exponent) for exponent in exponents)


def _certainty(generator: np.random.Generator) -> dict[str, Any]:
    return {"audit_rows": int(generator.choice([200, 2000])), "subset_bound": bool(generator.random() < 0.3)}


@dataclass(frozen=True)
class Distinct:
    """Rows that differ: the first of each among all rows, which of them every row equals, and how often it is there."""

    first: NDArray[np.intp]
    labels: NDArray[np.intp]
    counts: NDArray[np.intp]

    @classmethod
    def of(cls, X: Rows) -> "Distinct":
        """Find them."""
        _, first, labels, counts = np.unique(X, axis=0, return_index=True, return_inverse=True, return_counts=True)
        return cls(first, labels.reshape(-1), counts)

    def narrowest(self, lower: NDArray, upper: NDArray) -> tuple[NDArray, NDArray]:
        """(m, L) highest lower and lowest upper bounds of the copies."""
        highest, lowest = np.zeros((len(self.first), lower.shape[1])), np.ones((len(self.first), lower.shape[1]))
        np.maximum.at(highest, self.labels, lower)
        np.minimum.at(lowest, self.labels, upper)
        return highest, lowest


Reference = Callable[[tuple[float, ...]], tuple[NDArray, NDArray]]


def check_validity(problem: Problem, X: Rows, probabilities: Sequence[float] = PROBABILITIES) -> list[dict[str, Any]]:
    """Compare the exact scores with the intervals at every failure probability."""
    kernel, distinct = KERNELS_OF_FEW_FEATURES[problem.kernel](problem.length_scale), Distinct.of(X)
    few = len(distinct.first) <= FEW_POINTS
    reference = functools.cache(functools.partial(_many_digits if few else _eigenvalues, X, distinct, kernel))
    found = []
    for probability in probabilities:
        run = {"problem": asdict(problem), "failure_probability": probability}
        found.append(run | _judged(problem, X, kernel, probability, distinct, reference))
    return found


def _many_digits(X: Rows, distinct: Distinct, kernel: Kernel, ridges: tuple[float, ...]) -> tuple[NDArray, NDArray]:
    """Exact scores (m, L) of the distinct rows, and what their rounding to float64 may change."""
    truth = scores_of_repeats(X[distinct.first], distinct.counts.tolist(), kernel, ridges)
    return truth, 2 * UNIT_ROUNDOFF * truth


def _eigenvalues(X: Rows, distinct: Distinct, kernel: Kernel, ridges: tuple[float, ...]) -> tuple[NDArray, NDArray]:
    """Exact scores (m, L) of the distinct rows and their errors; NaN at the ridges that the reference refuses."""
    norm = float(np.abs(kernel(X, X)).sum(axis=1).max())
    truth = np.full((len(distinct.first), len(ridges)), np.nan)
    for column, ridge in enumerate(ridges):
        try:
            truth[:, column] = exact.leverage_scores(X, kernel, ridge)[distinct.first]
        except RidgeTooSmall:
            continue
    roundoff = len(X) * UNIT_ROUNDOFF
    return truth, roundoff * ((1 - truth) * norm / (len(X) * np.array(ridges)) + truth)


def _judged(
    problem: Problem, X: Rows, kernel: Kernel, probability: float, distinct: Distinct, reference: Reference
) -> dict[str, Any]:
    """How many of the scores are outside their intervals, or the name of the refusal."""
    try:
        ridges, lower, upper = _intervals(problem, X, kernel, probability, problem.ridges, MOST_RAISES)
    except DaskrrError as error:
        return {"refused": type(error).__name__, "message": str(error)}
    truth, allowed = reference(ridges)
    return {"ridges": ridges} | compare(*distinct.narrowest(lower, upper), truth, allowed)


def compare(lower: NDArray, upper: NDArray, truth: NDArray, allowed: NDArray) -> dict[str, Any]:
    """How many scores are outside their intervals, and how wide these are; scores that are NaN are not known."""
    known = ~np.isnan(truth)
    lower, upper, truth, allowed = lower[known], upper[known], truth[known], allowed[known]
    outside, tiny = np.maximum(lower - truth, truth - upper), np.finfo(float).tiny
    ratios = np.minimum(np.maximum(upper, tiny) / np.maximum(lower, tiny), WIDEST)
    return {
        "without_reference": int(np.sum(~known)),
        "pairs": len(truth),
        "loosely_checked": int(np.sum(allowed > LOOSE * truth)),
        "strictly_outside": int(np.sum(outside > 0)),
        "outside": int(np.sum(outside > allowed)),
        "furthest_of_allowed": float(np.max(outside / np.maximum(allowed, tiny), initial=0.0)),
        "worst_violation": float(np.max((outside - allowed) / np.maximum(truth, tiny), initial=0.0)),
        "widths": {name: _quantile(ratios, share) for name, share in QUANTILES.items()},
    }


def _quantile(values: NDArray, share: float) -> float:
    return float(np.quantile(values, share, method="nearest")) if len(values) else math.nan


def _intervals(
    problem: Problem, X: Rows, kernel: Kernel, probability: float, ridges: tuple[float, ...], raises_left: int
) -> tuple[tuple[float, ...], NDArray, NDArray]:
    """The ridges, raised together as far as refusals ask for, and (n, L) bounds."""
    try:
        result = daskrr.leverage_scores(
            X, kernel, list(ridges), problem.n_landmarks, sampling=problem.sampling,
            certify=daskrr.Certify(failure_probability=probability, **problem.certainty), dtype=problem.dtype,
            random_state=problem.number, block_rows=problem.block_rows, progress=False,
        )  # fmt: skip
    except RidgeTooSmall as error:
        if not raises_left:
            raise
        raised = tuple(raise_to_the_line(error) * ridge for ridge in ridges)
        return _intervals(problem, X, kernel, probability, raised, raises_left - 1)
    return ridges, *dask.compute(result.lower, result.upper)


def raise_to_the_line(error: RidgeTooSmall) -> float:
    """By what to multiply a ridge that is refused, so that it is the smallest that works, but for the digits told."""
    found = re.search(r"ridge=([0-9.e+-]+) is .* smallest ridge that works is ([0-9.e+-]*[0-9])", str(error))
    if found is None:
        raise error
    return 1.006 * float(found[2]) / float(found[1])


def count(validity: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Problems that were not refused, and pairs of distinct rows and ridges; each counts once."""
    pairs: dict[tuple[str, int], int] = {}
    for run in validity:
        if "refused" not in run:
            pairs[run["problem"]["family"], run["problem"]["number"]] = run["pairs"]
    return {"problems": len(pairs), "pairs": sum(pairs.values())}


def summarize(validity: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Totals for each family, dtype and failure probability; widths are medians over the problems."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for run in validity:
        key = run["problem"]["family"], run["problem"]["dtype"], run["failure_probability"]
        groups.setdefault(key, []).append(run)
    return [
        dict(zip(("family", "dtype", "failure_probability"), key, strict=True)) | _totals(runs)
        for key, runs in sorted(groups.items())
    ]


def _totals(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    done = [run for run in runs if "refused" not in run]
    return {
        "problems": len(runs),
        "refused": dict(Counter(run["refused"] for run in runs if "refused" in run)),
        "raised_to_the_line": sum(run["ridges"] != run["problem"]["ridges"] for run in done),
        "without_reference": sum(run["without_reference"] for run in done),
        **{name: sum(run[name] for run in done) for name in COUNTS},
        **{name: max((run[name] for run in done), default=0.0) for name in WORST},
        "widths": {
            f"{name} of {inner}": _quantile(np.array([run["widths"][inner] for run in done if run["pairs"]]), share)
            for inner in QUANTILES
            for name, share in QUANTILES.items()
        },
    }
