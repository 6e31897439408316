"""The theorems of El Alaoui & Mahoney as calculators: columns from an accuracy, and an accuracy from columns.

The theorems of *Fast Randomized Kernel Methods With Statistical Guarantees* (2015) speak of p landmarks, columns of
the n × n kernel matrix K that are drawn independently and with replacement: p may exceed n. A calculator returns a
frozen object with what is promised, and under which conditions; print it to read both.

In formulas n is ``n_rows``, p ``n_landmarks``, λ ``ridge``, γ ``sketch_ridge``, ε ``epsilon``, ρ
``failure_probability``, t ``deviation`` and β ``score_fidelity``. Ridges are multiplied by n. Every calculator
raises InvalidParameter if a number is out of its range.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from daskrr.errors import InvalidParameter, check_count

__all__ = [
    "BiasGuarantee", "DeviationGuarantee", "RiskGuarantee", "ScoreGuarantee", "bias_inflation", "columns_for_deviation",
    "columns_for_risk", "columns_for_risk_by_upper_ends", "columns_for_risk_uniform", "columns_for_scores",
    "deviation_probability", "effective_dimension_covered", "risk_inflation", "score_accuracy", "score_fidelity",
    "sketch_ridge_for_bias",
]  # fmt: skip

_EPSILON_LIMIT = 0.5
# Relative round-off of a number of columns, which must not ask for one more, and the most by which a sum may grow.
_SLACK, _ROUNDING = 1e-13, 1 + 1e-6
# An epsilon is looked for among the powers 2^(k / _STEPS) for these k.
_STEPS = 2**21
_POWERS = range(-40 * _STEPS, 40 * _STEPS + 1)


@dataclass(frozen=True)
class ScoreGuarantee:
    """What Theorem 4 promises about the approximate scores l̃ of landmarks drawn with probabilities k_ii / tr K.

    All rows at once satisfy l - 2 ε (1 - l) ≤ l̃ ≤ l, where l is the exact score. ``epsilon`` is infinite with fewer
    than ``least_landmarks`` draws, for which nothing is promised. ``multiplicative_factor`` is the largest known c
    with c l ≤ l̃, or None if the smallest eigenvalue of K was not given.
    """

    n_landmarks: int
    epsilon: float
    failure_probability: float
    least_landmarks: int
    multiplicative_factor: float | None = None

    @property
    def promises(self) -> bool:
        """Whether the theorem says anything about this number of draws."""
        return self.epsilon < math.inf

    @property
    def additive_error(self) -> float:
        """2 ε: an approximate score misses the exact score l by this much at most, times 1 - l."""
        return 2 * self.epsilon

    def largest_score(self, approximation: ArrayLike) -> NDArray[np.float64]:
        """The largest exact scores that the promise allows for approximate scores."""
        return 1 - (1 - np.asarray(approximation, np.float64)) / (1 + self.additive_error)

    def __str__(self) -> str:
        rows = {"columns": f"{self.n_landmarks:,} draws with replacement, probabilities k_ii / tr K"}
        if not self.promises:
            return _table(4, rows | {"promise": f"none with fewer than {self.least_landmarks:,} draws"})
        rows["promise"] = f"l - {self.additive_error:.4g} (1 - l) ≤ l̃ ≤ l for all rows at once"
        if self.multiplicative_factor:
            rows["and"] = f"{self.multiplicative_factor:.4g} l ≤ l̃"
        return _table(4, rows | {"failure probability": f"at most {self.failure_probability:.3g}"})


@dataclass(frozen=True)
class RiskGuarantee:
    """What Theorem 3 promises about landmarks drawn with probabilities of at least β l_i / Σ l.

    The scores l are those at the ridge λ ε, and ``effective_dimension`` is their sum. The in-sample risk is at most
    ``risk_ratio`` times that of the regression with all columns; ``epsilon`` is infinite if nothing is promised.
    ``drawn_by`` says what the probabilities are: l / Σ l, or upper ends u / Σ u.

    The published proof needs a ridge of at least ``smallest_ridge`` and fails with probability 2 ρ. Any ridge and ρ
    will do: 0 ⪯ K - L ⪯ 2 n λ ε I alone bounds the bias of the approximation L, and its variance is that of K at most.
    """

    n_landmarks: int
    epsilon: float
    failure_probability: float
    effective_dimension: float
    score_fidelity: float = 1.0
    ridge: float | None = None
    smallest_ridge: float | None = None
    drawn_by: str = "l / Σ l"

    @property
    def promises(self) -> bool:
        """Whether the theorem says anything about this number of draws."""
        return self.epsilon < math.inf

    @property
    def risk_ratio(self) -> float:
        """(1 + 2 ε)²."""
        return (1 + 2 * self.epsilon) ** 2

    @property
    def published_failure_probability(self) -> float:
        """2 ρ: what the published proof gives where its condition on the ridge is met."""
        return 2 * self.failure_probability

    @property
    def ridge_condition(self) -> Literal["met", "not met", "unknown"]:
        """Whether the ridge is as large as the published proof needs it."""
        if self.ridge is None or self.smallest_ridge is None:
            return "unknown"
        return "met" if self.ridge >= self.smallest_ridge else "not met"

    def __str__(self) -> str:
        rows = {"columns": _draws(self.n_landmarks, self.drawn_by, self.score_fidelity)}
        if not self.promises:
            return _table(3, rows | {"promise": "none: too few draws"})
        asked = "" if self.smallest_ridge is None else f": ridge ≥ {self.smallest_ridge:.4g}"
        published = f"{self.ridge_condition}{asked}; failure probability then {self.published_failure_probability:.3g}"
        rows["promise"] = f"risk ≤ {self.risk_ratio:.4g} × the risk with all columns"
        rows["failure probability"] = f"at most {self.failure_probability:.3g}"
        return _table(3, rows | {"published condition": published})


@dataclass(frozen=True)
class BiasGuarantee:
    """What Theorem 1 promises about the bias: at most ``factor`` times the bias with all columns.

    The condition is λ_max(Φ - Φ^½ Uᵀ S Sᵀ U Φ^½) ≤ t with K = U Σ Uᵀ, Φ = Σ (Σ + n γ I)⁻¹ and S the scaled choice of
    columns. It gives 0 ⪯ K - L ⪯ n γ / (1 - t) I, so the bound holds without the published condition on λ.
    """

    factor: float
    sketch_ridge: float
    ridge: float
    deviation: float

    def __str__(self) -> str:
        condition = f"sampling deviation ≤ {self.deviation:.4g} at the ridge {self.sketch_ridge:.4g}"
        promise = f"bias ≤ {self.factor:.6g} × the bias with all columns, ridge {self.ridge:.4g}"
        return _table(1, {"condition": condition, "promise": promise})


@dataclass(frozen=True)
class DeviationGuarantee:
    """What Theorem 2 promises about columns ψ_i of Ψ drawn with probabilities of at least β ‖ψ_i‖² / ‖Ψ‖².

    With S scaled so that Ψ S Sᵀ Ψᵀ has the mean Ψ Ψᵀ, ``failure_probability`` bounds the probability that
    λ_max(Ψ Ψᵀ - Ψ S Sᵀ Ψᵀ) ≥ t; 1 says nothing.
    """

    n_landmarks: int
    deviation: float
    failure_probability: float
    score_fidelity: float = 1.0

    def __str__(self) -> str:
        columns = _draws(self.n_landmarks, "‖ψ‖² / ‖Ψ‖²", self.score_fidelity)
        promise = f"λ_max(Ψ Ψᵀ - Ψ S Sᵀ Ψᵀ) < {self.deviation:.4g}"
        failure = f"at most {self.failure_probability:.3g}"
        return _table(2, {"columns": columns, "promise": promise, "failure probability": failure})


def columns_for_scores(
    *, trace: float, n_rows: int, ridge: float, epsilon: float, failure_probability: float,
    smallest_eigenvalue: float | None = None,
) -> ScoreGuarantee:  # fmt: skip
    """Compute how many columns make every approximate score accurate: ⌈8 (tr K / (n λ ε) + 1/6) log(n / ρ)⌉.

    Theorem 4 needs ε below 1/2. The smallest eigenvalue of K gives a multiplicative bound too, which is above 0 only
    for more than 8 n log(n / ρ) draws. The inverse is `score_accuracy`.

    >>> columns_for_scores(trace=1e6, n_rows=10**6, ridge=0.1, epsilon=0.1, failure_probability=0.01).n_landmarks
    14762
    """
    log = _log_failures(n_rows, failure_probability)
    ratio = _number("trace", trace) / check_count("n_rows", n_rows) / _number("ridge", ridge)
    epsilon = _number("epsilon", epsilon, below=_EPSILON_LIMIT)
    factor = _multiplicative_factor(smallest_eigenvalue, n_rows, ridge, epsilon)
    count = _whole(8 * (ratio / epsilon + 1 / 6) * log)
    return ScoreGuarantee(count, epsilon, failure_probability, _least(ratio, log), factor)


def score_accuracy(
    *, trace: float, n_rows: int, ridge: float, n_landmarks: int, failure_probability: float,
    smallest_eigenvalue: float | None = None,
) -> ScoreGuarantee:  # fmt: skip
    """Compute how accurate columns make every approximate score: ε = tr K / (n λ (p / (8 log(n / ρ)) - 1/6)).

    Where that is not between 0 and 1/2, Theorem 4 promises nothing. The inverse is `columns_for_scores`.

    >>> problem = {"trace": 1e6, "n_rows": 10**6, "ridge": 0.1, "failure_probability": 0.01}
    >>> round(score_accuracy(n_landmarks=14_762, **problem).epsilon, 4)
    0.1
    """
    log = _log_failures(n_rows, failure_probability)
    ratio = _number("trace", trace) / check_count("n_rows", n_rows) / _number("ridge", ridge)
    covered = _covered(n_landmarks, log)
    epsilon = ratio / covered if covered > 0 and ratio / covered < _EPSILON_LIMIT else math.inf
    factor = _multiplicative_factor(smallest_eigenvalue, n_rows, ridge, epsilon)
    return ScoreGuarantee(int(n_landmarks), epsilon, failure_probability, _least(ratio, log), factor)


def columns_for_risk(
    *, effective_dimension: float, n_rows: int, epsilon: float, failure_probability: float,
    score_fidelity: float = 1.0, ridge: float | None = None, largest_eigenvalue: float | None = None,
    smallest_score: float | None = None,
) -> RiskGuarantee:  # fmt: skip
    """Compute how many columns keep the risk within (1 + 2 ε)²: ⌈8 (d_eff / β + 1/6) log(n / ρ)⌉.

    ``effective_dimension`` d_eff is the sum of the leverage scores at the ridge λ ε, not λ, and `score_fidelity`
    computes β from them. Theorem 3 needs n of at least 2 and ρ below 1/2. Its published condition
    λ ≥ 2 (1 + 1 / smallest_score) λ_max(K) / n, where no score at λ ε is below ``smallest_score``, is checked if all
    three are given. The inverse is `risk_inflation`, or `effective_dimension_covered`.

    >>> columns_for_risk(effective_dimension=50, n_rows=10**6, epsilon=0.1, failure_probability=0.01).n_landmarks
    7393
    """
    log = _log_failures(n_rows, failure_probability, theorem=3)
    dimension = _number("effective_dimension", effective_dimension, most=n_rows * _ROUNDING)
    beta, epsilon = _number("score_fidelity", score_fidelity, most=1), _number("epsilon", epsilon)
    count = _whole(8 * (dimension / beta + 1 / 6) * log)
    ridge = None if ridge is None else _number("ridge", ridge)
    smallest_ridge = _smallest_ridge(largest_eigenvalue, smallest_score, n_rows)
    return RiskGuarantee(count, epsilon, failure_probability, dimension, beta, ridge, smallest_ridge)


def columns_for_risk_uniform(
    *, effective_dimension: float, max_degrees_of_freedom: float, n_rows: int, epsilon: float,
    failure_probability: float,
) -> RiskGuarantee:  # fmt: skip
    """Compute how many uniformly drawn columns keep the risk: those of Theorem 3 with β = d_eff / d_mof.

    ``effective_dimension`` d_eff is the sum of the scores at λ ε, ``max_degrees_of_freedom`` d_mof n times the largest.

    >>> problem = {"effective_dimension": 24, "n_rows": 500, "epsilon": 0.1, "failure_probability": 0.01}
    >>> columns_for_risk_uniform(max_degrees_of_freedom=500, **problem).n_landmarks
    43294
    """
    largest = _number("max_degrees_of_freedom", max_degrees_of_freedom, most=check_count("n_rows", n_rows) * _ROUNDING)
    dimension = _number("effective_dimension", effective_dimension, most=largest * _ROUNDING)
    return columns_for_risk(
        effective_dimension=dimension, n_rows=n_rows, epsilon=epsilon, failure_probability=failure_probability,
        score_fidelity=min(1.0, dimension / largest),
    )  # fmt: skip


def columns_for_risk_by_upper_ends(
    *, upper_sum: float, n_rows: int, epsilon: float, failure_probability: float
) -> RiskGuarantee:
    """Compute how many columns drawn by upper ends u of the scores at λ ε keep the risk: ⌈8 (Σu + 1/6) log(n / ρ)⌉.

    As p_i = u_i / Σu, d_eff / β is at most Σu, which stands for the effective dimension in the guarantee. Any bound of
    d_eff / β will do, such as ``inflated_dimension`` in the ``score_fidelity`` of a certificate.

    >>> columns_for_risk_by_upper_ends(upper_sum=50, n_rows=10**6, epsilon=0.1, failure_probability=0.01).n_landmarks
    7393
    """
    total, epsilon = _number("upper_sum", upper_sum), _number("epsilon", epsilon)
    count = _whole(8 * (total + 1 / 6) * _log_failures(n_rows, failure_probability, theorem=3))
    return RiskGuarantee(count, epsilon, failure_probability, total, drawn_by="u / Σ u")


def risk_inflation(
    *, effective_dimension: Callable[[float], float], ridge: float, n_rows: int, n_landmarks: int,
    failure_probability: float, score_fidelity: float = 1.0,
) -> RiskGuarantee:  # fmt: skip
    """Compute how much a number of columns may increase the risk of kernel ridge regression (Theorem 3).

    The smallest ε with d_eff(λ ε) ≤ β (p / (8 log(n / ρ)) - 1/6) is found by bisection, to six digits and not below
    2⁻⁴⁰. ``effective_dimension`` is the function d_eff of a ridge, or an upper bound that decreases with the ridge;
    it is called some 30 times, and β must hold for the scores at any of these ridges.

    >>> problem = {"effective_dimension": lambda ridge: min(1000, 1 / ridge), "ridge": 0.1, "n_rows": 1000}
    >>> round(risk_inflation(**problem, n_landmarks=9_226, failure_probability=0.01).epsilon, 4)
    0.1
    """
    ridge, beta = _number("ridge", ridge), _number("score_fidelity", score_fidelity, most=1)
    covered = beta * _covered(n_landmarks, _log_failures(n_rows, failure_probability, theorem=3))
    found = bisect_left(_POWERS, True, key=lambda k: effective_dimension(ridge * 2 ** (k / _STEPS)) <= covered)
    epsilon = 2 ** (_POWERS[found] / _STEPS) if found < len(_POWERS) else math.inf
    dimension = effective_dimension(ridge * epsilon) if epsilon < math.inf else 0.0
    return RiskGuarantee(int(n_landmarks), epsilon, failure_probability, dimension, beta, ridge)


def effective_dimension_covered(
    *, n_landmarks: int, n_rows: int, failure_probability: float, score_fidelity: float = 1.0
) -> float:
    """Compute the largest effective dimension at λ ε that columns cover: β (p / (8 log(n / ρ)) - 1/6), Theorem 3.

    >>> round(effective_dimension_covered(n_landmarks=7_393, n_rows=10**6, failure_probability=0.01), 2)
    50.0
    """
    log = _log_failures(n_rows, failure_probability, theorem=3)
    return _number("score_fidelity", score_fidelity, most=1) * max(0.0, _covered(n_landmarks, log))


def bias_inflation(*, sketch_ridge: float, ridge: float, deviation: float) -> BiasGuarantee:
    """Compute how much the bias of kernel ridge regression may grow: 1 + (γ / λ) / (1 - t), Theorem 1.

    >>> bias_inflation(sketch_ridge=0.01, ridge=0.1, deviation=0.5).factor
    1.2
    """
    gamma, ridge = _number("sketch_ridge", sketch_ridge), _number("ridge", ridge)
    deviation = _number("deviation", deviation, below=1)
    return BiasGuarantee(1 + gamma / ridge / (1 - deviation), gamma, ridge, deviation)


def sketch_ridge_for_bias(*, factor: float, ridge: float, deviation: float) -> BiasGuarantee:
    """Compute the largest sketch ridge that keeps the bias within a factor: (factor - 1) (1 - t) λ, Theorem 1.

    >>> round(sketch_ridge_for_bias(factor=1.2, ridge=0.1, deviation=0.5).sketch_ridge, 12)
    0.01
    """
    factor = _number("factor", factor, above=1)
    ridge, deviation = _number("ridge", ridge), _number("deviation", deviation, below=1)
    return BiasGuarantee(factor, (factor - 1) * (1 - deviation) * ridge, ridge, deviation)


def deviation_probability(
    *, n_landmarks: int, frobenius_squared: float, largest: float, n_rows: int, deviation: float,
    score_fidelity: float = 1.0,
) -> DeviationGuarantee:  # fmt: skip
    """Bound the probability that a matrix product on drawn columns is too small by t or more (Theorem 2).

    It is n exp(-(p t² / 2) / (λ_max(Ψ Ψᵀ) (‖Ψ‖² / β + t / 3))), and 1 at most, where ``frobenius_squared`` is ‖Ψ‖²,
    ``largest`` λ_max(Ψ Ψᵀ) and n the number of rows of Ψ. The inverse is `columns_for_deviation`.

    >>> matrix = {"frobenius_squared": 3, "largest": 1, "n_rows": 20}
    >>> round(deviation_probability(**matrix, n_landmarks=400, deviation=0.5).failure_probability, 7)
    2.8e-06
    """
    scale = _draws_per_log(frobenius_squared, largest, deviation, score_fidelity)
    exponent = math.log(check_count("n_rows", n_rows)) - check_count("n_landmarks", n_landmarks) / scale
    return DeviationGuarantee(int(n_landmarks), deviation, math.exp(min(0.0, exponent)), score_fidelity)


def columns_for_deviation(
    *, frobenius_squared: float, largest: float, n_rows: int, deviation: float, failure_probability: float,
    score_fidelity: float = 1.0,
) -> DeviationGuarantee:  # fmt: skip
    """Compute how many columns keep a matrix product from being too small by t or more (Theorem 2).

    They are ⌈2 λ_max(Ψ Ψᵀ) (‖Ψ‖² / β + t / 3) log(n / ρ) / t²⌉. The inverse is `deviation_probability`.

    >>> matrix = {"frobenius_squared": 3, "largest": 1, "n_rows": 20}
    >>> columns_for_deviation(**matrix, deviation=0.5, failure_probability=0.01).n_landmarks
    193
    """
    scale = _draws_per_log(frobenius_squared, largest, deviation, score_fidelity)
    count = _whole(scale * _log_failures(n_rows, failure_probability))
    return DeviationGuarantee(count, deviation, failure_probability, score_fidelity)


def score_fidelity(probabilities: ArrayLike, scores: ArrayLike) -> float:
    """Compute the β of probabilities for scores: the smallest p_i Σ l / l_i (Theorems 2 and 3).

    It is 1 for probabilities proportional to the scores (leverage scores at λ ε, or squared norms of columns), and 0,
    which no theorem allows, where a row with a positive score is never drawn.

    >>> score_fidelity([0.25, 0.25, 0.25, 0.25], [0.5, 0.25, 0.25, 0.0])
    0.5
    """
    weights, values = _vector("probabilities", probabilities), _vector("scores", scores)
    if weights.shape != values.shape:
        raise InvalidParameter(f"one probability per score is needed, got {weights.size} for {values.size} scores")
    if not 1 / _ROUNDING <= weights.sum() <= _ROUNDING:
        raise InvalidParameter(f"probabilities must sum to 1, got {weights.sum():.9g}: divide them by their sum")
    shares = values / values.max()
    with np.errstate(all="ignore"):
        smallest = np.min(weights / shares, where=shares > 0, initial=np.inf)
    return min(1.0, float(smallest * shares.sum()))


def _log_failures(n_rows: int, failure_probability: float, theorem: int = 2) -> float:
    least, limit = (2, 0.5) if theorem == 3 else (1, 1)
    if check_count("n_rows", n_rows) < least:
        raise InvalidParameter(f"Theorem 3 needs n_rows of at least 2, got {n_rows!r}")
    return math.log(n_rows) - math.log(_number("failure_probability", failure_probability, below=limit))


def _draws_per_log(frobenius_squared: float, largest: float, deviation: float, beta: float) -> float:
    """Return p / log(n / ρ) of Theorem 2; Theorems 3 and 4 are it for t = 1/2 and a largest eigenvalue of 1."""
    total, t = _number("frobenius_squared", frobenius_squared), _number("deviation", deviation)
    top, beta = _number("largest", largest, most=total * _ROUNDING), _number("score_fidelity", beta, most=1)
    return 2 * top * (total / beta + t / 3) / t / t


def _least(ratio: float, log: float) -> int:
    """Return the smallest number of columns that is above the one for the excluded limit of epsilon."""
    return _whole(8 * (ratio / _EPSILON_LIMIT + 1 / 6) * log * (1 + 2 * _SLACK))


def _covered(n_landmarks: int, log: float) -> float:
    """Return the d_eff / β that n_landmarks columns cover; negative if they cover none."""
    return check_count("n_landmarks", n_landmarks) / log / 8 - 1 / 6


def _whole(draws: float) -> int:
    if not math.isfinite(draws):
        raise InvalidParameter("the theorem asks for more columns than a float can count: ask for less, or raise ridge")
    return max(1, math.ceil(draws * (1 - _SLACK)))


def _multiplicative_factor(eigenvalue: float | None, n_rows: int, ridge: float, epsilon: float) -> float | None:
    """Return (σ - n λ ε) / (σ + n λ ε), or 0 where that is negative."""
    if eigenvalue is None or eigenvalue == 0:
        return eigenvalue
    return max(0.0, 1 - 2 / (1 + _number("smallest_eigenvalue", eigenvalue) / n_rows / ridge / epsilon))


def _smallest_ridge(largest: float | None, score: float | None, n_rows: int) -> float | None:
    if largest is None or score is None:
        return None
    if score == 0:
        return math.inf
    return 2 * (1 + 1 / _number("smallest_score", score, most=1)) * _number("largest_eigenvalue", largest) / n_rows


def _vector(name: str, values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values)
    numbers = array.ndim == 1 and array.dtype.kind in "biuf"
    if not (numbers and np.all((array >= 0) & (array < np.inf)) and array.any()):
        raise InvalidParameter(f"{name} must be a list of finite numbers, none negative and not all 0")
    return array.astype(np.float64)


def _number(name: str, value: float, above: float = 0, below: float = math.inf, most: float = math.inf) -> float:
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not (above < number < below and number <= most):
        limit = f"below {below}" if most == math.inf else f"at most {most:.6g}"
        raise InvalidParameter(f"{name} must be a number above {above} and {limit}, got {value!r}")
    return number


def _draws(n_landmarks: int, shares: str, beta: float) -> str:
    return f"{n_landmarks:,} draws with replacement, probabilities ≥ β {shares}, β = {beta:.4g}"


def _table(theorem: int, rows: dict[str, str]) -> str:
    rows = {"theorem": f"El Alaoui & Mahoney, Theorem {theorem}"} | rows
    return "\n".join(f"{name:>21}  {text}" for name, text in rows.items())
