"""What a fitted model knows besides its factors."""

import math
from dataclasses import dataclass

from daskrr.regression.fitting import FREQUENCY


@dataclass(frozen=True)
class RiskInflation:
    """By which factor the in-sample risk may exceed that of exact kernel ridge regression at the same ridge.

    The noise is taken to have the same variance in every row, or one in inverse proportion to its weight, by which the
    risk is weighted then. ``failure_probability`` is that of the bound.
    """

    factor: float
    failure_probability: float


@dataclass(frozen=True)
class ModelFacts:
    """What a fitted model knows besides its factors.

    Attributes
    ----------
    weight
        Sum of the weights of all rows, multiplied by ``scale``.
    scale
        What makes the mean weight of the first fit 1.
    n_counted
        Rows with a weight above zero.
    weight_meaning
        Whether weights count repeats of a row ("frequency") or are inverse variances of its noise up to a common factor
        ("precision").
    origin
        (t,) what is subtracted from targets before they are summed.
    intercept, dtype
        Whether there is one, and in what precision tiles are.
    single
        Whether there is one target, given as a vector.
    n_targets
        How many there are.
    n_landmarks, rank, kernel_error
        Of W, on which round-off depends.
    next_stream
        The stream of audit rows that the audit of more rows draws from.
    """

    weight: float
    scale: float
    n_counted: int
    weight_meaning: str
    origin: list[float]
    intercept: bool
    dtype: str
    single: bool
    n_targets: int
    n_landmarks: int
    rank: int
    kernel_error: float
    next_stream: int

    @property
    def repeat(self) -> float:
        """Scaled weight of one repeat of a row; infinite if weights are no repeats."""
        return self.scale if self.weight_meaning == FREQUENCY else math.inf

    @property
    def n_observations(self) -> float:
        """Rows, each as often as it counts."""
        return self.weight / self.scale if self.weight_meaning == FREQUENCY else self.n_counted
