"""What is certain about a score, and the best guess between: bounds and estimates from a few numbers per row.

With E = K − L, the part of the kernel matrix that the landmarks do not explain, and delta ≥ ‖E‖, the exact score of a
row lies between functions of its approximate score, its residual E_ii and delta. Every bound budgets for round-off.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

UPPER_BOUNDS = ("diagonal", "deviation", "residual", "subset")
LOWER_BOUNDS = ("score", "residual")

# The formulas of the ends are rounded as well, by a few of their last digits: ends are moved apart by more than that.
ROUNDING = 16.0 * np.finfo(np.float64).eps

# Ends that cross by more than this are not an interval, so that something else is wrong.
CROSSING = 1e-9


@dataclass(frozen=True)
class Certainty:
    """What the bounds of all rows share.

    Attributes
    ----------
    delta
        No eigenvalue of K − L is larger, round-off included, with the probability that the audit states.
    noise
        Round-off of the kernel's entries may lift L above K by this multiple of the identity.
    residual_error
        Round-off of a residual, as a multiple of the row's k_ii.
    score_errors
        (L,) relative round-off of a score, for each ridge.
    kernel_error
        Round-off of the kernel's entries, relative to the diagonal; ``noise`` is that of all rows.
    failure_probability
        With at most this probability ``delta`` is too small.
    """

    delta: float
    noise: float
    residual_error: float
    score_errors: NDArray[np.float64]
    kernel_error: float = 0.0
    failure_probability: float = 0.0

    def without_roundoff(self) -> "Certainty":
        """The same with exact arithmetic."""
        return Certainty(max(0.0, self.delta - self.noise), 0.0, 0.0, np.zeros_like(self.score_errors))

    @property
    def appended_errors(self) -> NDArray[np.float64]:
        """(L,) relative round-off of a new row's score: that of G, and of the products that read it.

        Of a row of the data the latter is less than ``noise``, which k_ii ≤ ‖K‖ is a part of; a new row may be larger
        than all of them.
        """
        return self.score_errors + self.residual_error


@dataclass(frozen=True)
class RowFacts:
    """What the passes know about some rows, for each of L ridges.

    Attributes
    ----------
    scores
        (m, L) approximate scores l̃.
    captured
        (m, L) Σ_j z_j² S_j/(S_j + n·λ)², or an upper bound of it.
    shifted
        (m, L) l̃ at the ridge n·λ + delta, or None where it is not known.
    subset
        (m, L) the bound from the landmarks as data of their own, or None.
    residual, diagonal
        (m,) E_ii and k_ii.
    """

    scores: NDArray[np.float64]
    captured: NDArray[np.float64]
    shifted: NDArray[np.float64] | None
    subset: NDArray[np.float64] | None
    residual: NDArray[np.float64]
    diagonal: NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """Certified ends (m, L), and which of ``UPPER_BOUNDS`` and ``LOWER_BOUNDS`` gave each."""

    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    lower_winner: NDArray[np.int8]
    upper_winner: NDArray[np.int8]


def kernel_noise(kernel_error: float, diagonal: NDArray[np.float64] | float) -> Any:
    """What round-off of the entries of a kernel matrix may lift L above it by, for rows with k_ii of this sum."""
    return 2.0 * kernel_error * diagonal


def certify(facts: RowFacts, shifts: NDArray[np.float64], certainty: Certainty, check: bool = True) -> Interval:
    """The tightest of all bounds for each row and ridge, ``shifts`` being n·λ; ends that cross are an error.

    Write o = 1 − l̃ and s for ``captured``. Above: k_ii/(k_ii + nλ); x + (1 − x)·delta/(delta + nλ) with x = l̃, or l̃ at
    the ridge nλ + delta; and 1 − o²/(o + t) with t = (√e + √(delta·s))²/(nλ). Below: l̃, and
    l̃ + max(0, √e − √(delta·s))²/(nλ + delta).
    """
    return _interval(facts, shifts, certainty, certainty.delta, certainty.noise, certainty.score_errors, check)


def append(facts: RowFacts, errors: NDArray[np.float64]) -> RowFacts:
    """What is known about new rows, each for itself appended to the data as row n + 1 with n·λ kept.

    ``facts`` are those of a row b of B with the Gram matrix G of the data: ``scores`` is s = b(G + nλ)⁻¹b, the ridge
    leverage function, ``captured`` c = gᵀGg with g = (G + nλ)⁻¹b, or a bound of it, and ``shifted`` is s at the ridge
    nλ + delta. The appended Gram matrix is G + bbᵀ, and (G + bbᵀ + nλ)⁻¹b = g/(1 + s) (Sherman and Morrison). So its
    score is l̃ = s/(1 + s), and its captured part gᵀ(G + bbᵀ)g/(1 + s)² = (c + s²)/(1 + s)², which is at most l̃, since
    c ≤ s, and for the same reason grows with both: it is taken at their upper ends, where c errs by a share of s.
    """
    s = facts.scores * (1.0 + errors)
    captured = np.minimum(facts.captured + errors * facts.scores, s)
    return replace(
        facts,
        scores=facts.scores / (1.0 + facts.scores),
        captured=captured / (1.0 + s) / (1.0 + s) + (s / (1.0 + s)) ** 2,
        shifted=None if facts.shifted is None else facts.shifted / (1.0 + facts.shifted),
    )


def certify_appended(facts: RowFacts, shifts: NDArray[np.float64], certainty: Certainty) -> Interval:
    """The tightest of all bounds for new rows x, each as row n + 1 of the data with n·λ kept; see :func:`append`.

    E' = K' − L' of the data and x is positive semi-definite, since L' is the Nyström approximation of K' by the same
    landmarks. Its diagonal blocks are E and e = k(x, x) − ‖b‖², and for a positive matrix vᵀE'v ≤ (√(v₁ᵀEv₁) +
    |v₂|√e)² ≤ (‖E‖ + e)·‖v‖² (Cauchy and Schwarz, twice): ‖E'‖ ≤ delta + e. Every bound of :func:`certify` is one of
    any kernel matrix and its approximation, and holds for K' and L' with that, given the facts of the appended problem;
    l̃ at the ridge nλ + delta is no less than at nλ + delta + e, so that it serves. The failure probability is that of
    the data's delta, however many rows are looked at.

    Round-off lifts L' above K' by at most ``noise`` with k(x, x) added to the trace that it is a multiple of: what is
    positive is E' plus so much of the identity, in both blocks.

    Raises
    ------
    ArithmeticError
        Ends cross, or the landmarks explain more of a row than there is of it, beyond round-off.
    """
    budget = certainty.residual_error * facts.diagonal
    more_noise = kernel_noise(certainty.kernel_error, facts.diagonal)
    noise = certainty.noise + more_noise
    worst = float(np.max(-facts.residual - np.maximum(budget, noise), initial=0.0))
    if worst > 0.0:
        raise ArithmeticError(f"a residual is below zero by {worst:.2g} more than round-off may be")
    delta = certainty.delta + more_noise + np.maximum(facts.residual, 0.0) + budget + noise
    return _interval(facts, shifts, certainty, delta[:, None], noise[:, None], certainty.appended_errors)


def _interval(
    facts: RowFacts,
    shifts: NDArray[np.float64],
    certainty: Certainty,
    delta: NDArray[np.float64] | float,
    noise: NDArray[np.float64] | float,
    error: NDArray[np.float64],
    check: bool = True,
) -> Interval:
    """The ends where ‖K − L‖ ≤ ``delta`` and L ⪯ K + ``noise``, numbers or (m, 1), and scores err by ``error`` (L,)."""
    diagonal, residual = facts.diagonal[:, None], facts.residual[:, None]
    budget = certainty.residual_error * diagonal
    diagonal = diagonal * (1.0 + 4.0 * np.finfo(np.float64).eps)
    most = np.sqrt(np.maximum(residual, 0.0) + budget + noise)
    least = np.sqrt(np.maximum(residual - budget, 0.0))
    high = np.minimum(facts.scores * (1.0 + error), 1.0)
    low = facts.scores * (1.0 - error)
    # Where ``captured`` is small beside the score, an error of G is a share of the score.
    spread = np.sqrt(delta * np.minimum(facts.captured * (1.0 + error) + error * facts.scores, high))
    share = delta / (delta + shifts)
    x = high if facts.shifted is None else np.minimum(facts.shifted * (1.0 + error), high)
    excess = (most + spread) ** 2 / shifts
    others = 1.0 - high
    with np.errstate(invalid="ignore"):
        by_residual = (others * high + excess) / (others + excess)  # 1 − o²/(o + t) without losing digits
    candidates = [
        diagonal / (diagonal + shifts),
        x + share * (1.0 - x),
        np.where(others + excess > 0, by_residual, 1.0),
    ]
    if facts.subset is not None:
        candidates.append(facts.subset)
    upper, upper_winner = _smallest(candidates)
    raised = low + np.maximum(0.0, least - spread) ** 2 / (shifts + delta) - noise / (noise + shifts)
    negated, lower_winner = _smallest([(1.0 - low) * (noise / shifts) - low, -raised])
    lower, upper = np.maximum(-negated, 0.0) * (1.0 - ROUNDING), upper * (1.0 + ROUNDING)
    if check:
        _check_order(lower, upper)
    return Interval(np.minimum(lower, upper), np.minimum(upper, 1.0), lower_winner, upper_winner)


def _smallest(candidates: list[NDArray[np.float64]]) -> tuple[NDArray[np.float64], NDArray[np.int8]]:
    """Element by element the smallest of the candidates, and its number."""
    best = np.broadcast_to(candidates[0], np.broadcast_shapes(*(c.shape for c in candidates))).copy()
    winner = np.zeros(best.shape, np.int8)
    for number, candidate in enumerate(candidates[1:], 1):
        better = candidate < best
        winner[better] = number
        np.minimum(best, candidate, out=best)
    return best, winner


def _check_order(lower: NDArray[np.float64], upper: NDArray[np.float64]) -> None:
    crossing = float(np.max(lower - upper, initial=0.0))
    if crossing > CROSSING:
        raise ArithmeticError(f"a certified lower end is {crossing:.2g} above its upper end")


def estimate(
    scores: NDArray[np.float64],
    residual: NDArray[np.float64],
    shared: NDArray[np.float64] | float,
    shifts: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Scores (m, L) corrected by the row's residual e (m,), of which other rows share (E²)_ii/e − e = ``shared``.

    Were row i the only one with a residual, its exact score would be 1 − o/(1 + g) with o = 1 − l̃ and g = e·o/(nλ);
    neighbours with the same residual act like a larger ridge. Written as l̃ + o·g/(1 + g), which loses no digits.
    """
    others = 1.0 - scores
    gain = residual[:, None] * others / (shifts + np.reshape(shared, (-1, 1)))
    return np.minimum(scores + others * (gain / (1.0 + gain)), 1.0)


def deviation_bound(mean: float, total: float, size: int, failure_probability: float) -> float:
    """Upper bound of the expectation of variables in [0, total], from the ``mean`` of ``size`` independent ones.

    Chernoff and Hoeffding: the y ≥ mean/total with kl(mean/total, y) = log(1/ρ)/size, times the total; found by
    bisection from above, so that it is never too small.
    """
    if failure_probability == 0 or size == 0 or mean >= total or total == 0:
        return total
    x, allowed = max(mean, 0.0) / total, math.log(1.0 / failure_probability) / size
    low, high = x, 1.0
    for _ in range(100):
        middle = 0.5 * (low + high)
        if middle < 1.0 and _divergence(x, middle) < allowed:
            low = middle
        else:
            high = middle
    return total * high


def _divergence(x: float, y: float) -> float:
    """Kullback–Leibler divergence of coins with chances x and y."""
    first = x * math.log(x / y) if x > 0 else 0.0
    return first + (1.0 - x) * (math.log1p(-x) - math.log1p(-y))
