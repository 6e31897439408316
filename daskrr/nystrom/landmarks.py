"""Pure draws: weights in, landmarks out.

A draw depends on the seed and on the weights alone, never on chunks or workers: weights become integers, whose
running sums are exact in any order, and sorted integer uniforms are located in them, first among blocks and then
among the rows of a block.
"""

import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.errors import InvalidData, InvalidParameter, check_positive

# Every purpose has its own stream of random numbers, child of the run's seed.
PURPOSES = {"landmarks": 0, "audit": 1, "probe": 2, "length scale": 3, "sample": 4, "folds": 5, "pilot": 7}


@dataclass(frozen=True)
class Landmarks:
    """Rows drawn with replacement, duplicates merged.

    Attributes
    ----------
    indices
        (p',) distinct row numbers, ascending.
    counts
        (p',) how often each was drawn.
    probabilities
        (p',) probability of each row in one draw, or None for landmarks that were given.
    """

    indices: NDArray[np.int64]
    counts: NDArray[np.int64]
    probabilities: NDArray[np.float64] | None

    @property
    def n_draws(self) -> int:
        """Number of draws, repetitions included."""
        return int(self.counts.sum())

    def penalty(self, n_rows: int, sketch_ridge: float) -> NDArray[np.float64]:
        """What the sketch ridge γ adds to the diagonal of W: n·γ·p·p_j/c_j.

        Raises
        ------
        InvalidParameter
            The landmarks have no probabilities.
        """
        if self.probabilities is None:
            raise without_probabilities()
        return n_rows * sketch_ridge * self.n_draws * self.probabilities / self.counts


@dataclass(frozen=True)
class ScoreFidelity:
    """How well probabilities of draws with replacement follow the exact scores l at one ridge, as Theorem 3 needs it.

    Attributes
    ----------
    ridge
        Of the scores. With ``sampling="leverage"`` it is λ·ε for the smallest ridge λ of the run, of which the theorem
        speaks then; where rows were drawn by anything else it is a ridge of the run itself.
    beta
        Certified: p_i ≥ β·l_i/Σl for every row.
    inflated_dimension
        Certified: no less than Σl/β. It is the largest u_i/p_i for upper ends u, hence Σu where rows were drawn by u.
        :func:`daskrr.theory.columns_for_risk_by_upper_ends` has how many draws suffice then, whatever β is.
    draws
        How many landmarks were drawn by these probabilities; those of an earlier round were not.
    failure_probability
        With at most this probability one of the two is wrong.
    """

    ridge: float
    beta: float
    inflated_dimension: float
    draws: int
    failure_probability: float

    def __str__(self) -> str:
        return (
            f"{self.draws:,} draws with probabilities ≥ β·l/Σl at ridge {self.ridge:.3g}: β = {self.beta:.3g}, "
            f"Σl/β ≤ {self.inflated_dimension:.6g} (failure probability {self.failure_probability:g})"
        )


def without_probabilities() -> InvalidParameter:
    """What to raise where the regularised approximation is asked of landmarks that have no probabilities."""
    return InvalidParameter(
        "sketch_ridge weighs each landmark by its probability, which landmarks given by number, drawn by their "
        "residual or without replacement do not have. Leave sketch_ridge out, or use sampling='diagonal', "
        "'uniform', 'leverage' or probabilities, with replacement."
    )


def check_sketch_ridge(sketch_ridge: Any, has_probabilities: bool) -> float:
    """γ ≥ 0 as a float; above 0 it needs landmarks that have probabilities."""
    found = 0.0 if sketch_ridge == 0 else check_positive("sketch_ridge", sketch_ridge)
    if found and not has_probabilities:
        raise without_probabilities()
    return found


def check_seed(random_state: Any) -> int:
    """The seed as an int; one is drawn, to be recorded, where None is given."""
    if random_state is None:
        return secrets.randbits(63)
    if isinstance(random_state, bool) or not isinstance(random_state, (int, np.integer)) or random_state < 0:
        raise InvalidParameter(f"random_state must be a non-negative int or None, got {random_state!r}")
    return int(random_state)


def child(seed: int, purpose: str, round_number: int = 0, part: int = 0) -> np.random.SeedSequence:
    """The seed of one purpose and round; a round that needs several has them as parts."""
    return np.random.SeedSequence(seed, spawn_key=(PURPOSES[purpose], round_number, part))


def stream(seed: int, purpose: str, round_number: int = 0, part: int = 0) -> np.random.Generator:
    """The random numbers of one purpose and round."""
    return np.random.default_rng(child(seed, purpose, round_number, part))


def draw_integers(total: int, size: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """``size`` sorted uniform integers below ``total``; a total that is hardly larger gives hardly other integers."""
    uniform = generator.integers(0, 2**63, size=size, dtype=np.uint64)
    return np.array(sorted(int(one) * total >> 63 for one in uniform), np.int64)


def binary_scale(largest: float, n_rows: int) -> int:
    """Exponent k such that n weights ⌈w·2^k⌉ with w ≤ ``largest`` sum to less than 2^62."""
    return 61 - n_rows.bit_length() - int(np.frexp(largest)[1])


def integer_weights(weights: NDArray[np.float64], scale: int) -> NDArray[np.int64]:
    """⌈w·2^scale⌉: zero stays zero, anything else is drawn with positive probability."""
    return np.maximum(np.ceil(np.ldexp(weights, scale)), weights > 0).astype(np.int64)


def check_weights(weights: NDArray[np.float64], first_row: int, name: str = "sampling weight") -> float:
    """Largest of the weights (m,) of one block, all of which must be finite and non-negative."""
    bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(bad):
        raise InvalidData(
            f"the {name} of row {first_row + bad[0]} is {weights[bad[0]]}; weights must be finite and not "
            f"negative ({len(bad)} rows of this block are not)."
        )
    return float(weights.max(initial=0.0))


def locate(draws: NDArray[np.int64], sums: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Which of consecutive integer weights ``sums`` each draw falls in, and how far."""
    ends = np.cumsum(sums)
    places = np.searchsorted(ends, draws, side="right")
    return places, draws - (ends - sums)[places]


def merge(drawn: NDArray[np.int64], probabilities: NDArray[np.float64] | None) -> Landmarks:
    """Merge repeated rows: the approximation depends on the set of landmarks only."""
    indices, first, counts = np.unique(drawn, return_index=True, return_counts=True)
    kept = None if probabilities is None else probabilities[first]
    return Landmarks(indices, counts, kept)


def draw_uniform(n_rows: int, size: int, generator: np.random.Generator, replacement: bool = True) -> Landmarks:
    """``size`` draws, all rows equally likely; without replacement no more than there are."""
    if not replacement:
        return merge(generator.choice(n_rows, min(size, n_rows), replace=False, shuffle=False), None)
    drawn = draw_integers(n_rows, size, generator)
    return merge(drawn, np.full(size, 1.0 / n_rows))


def given(indices: NDArray, n_rows: int, size: int | None) -> Landmarks:
    """Landmarks named by row number.

    Raises
    ------
    InvalidParameter
        Not one-dimensional, out of range, none, or not as many as ``size`` says.
    """
    if indices.ndim != 1 or not len(indices):
        raise InvalidParameter(f"landmark indices must be a non-empty 1-D integer array, got shape {indices.shape}")
    outside = indices[(indices < 0) | (indices >= n_rows)]
    if len(outside):
        raise InvalidParameter(
            f"landmark index {outside[0]} is out of range: X has {n_rows} rows, numbered from 0 to {n_rows - 1}."
        )
    if size is not None and size != len(indices):
        raise InvalidParameter(
            f"landmarks={size}, but sampling gives {len(indices)} landmark indices. Leave landmarks out."
        )
    return merge(indices.astype(np.int64), None)
