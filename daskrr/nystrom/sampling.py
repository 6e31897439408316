"""Strategies of sampling: what each allows, what passes it needs, and how it draws the landmarks."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Protocol

import dask.array as da
import numpy as np
import zarr
from numpy.typing import NDArray

from daskrr.errors import InvalidParameter, RidgeTooSmall, check_count, check_positive
from daskrr.kernels import Kernel
from daskrr.numerics.pass2 import ScoredRows
from daskrr.nystrom import factors
from daskrr.nystrom import landmarks as draws
from daskrr.nystrom.audit import PROBE_ROWS, audit, audit_draws, certainty_of
from daskrr.nystrom.drawing import (
    RowWeights,
    draw_by_diagonal,
    draw_by_probabilities,
    draw_weighted,
    fetch_rows,
    of_blocks,
)
from daskrr.nystrom.first_pass import Chosen, Settings, first_pass, whiten
from daskrr.nystrom.growing import first_landmarks, grow, join, landmark_draw, n_candidates, round_sizes
from daskrr.nystrom.landmarks import ScoreFidelity, binary_scale
from daskrr.nystrom.workload import Workload
from daskrr.runtime.inputs import readable
from daskrr.runtime.map_blocks import Run
from daskrr.runtime.rows import Rows, open_rows

# Of the landmarks of leverage sampling, one in so many belongs to its first round.
FIRST_SHARE = 4
FIRST_ROUND_FAILURE = 1e-3
# The stream of the audit of that round; what is drawn by it has an audit with another.
FIRST_ROUND_STREAM = 1


@dataclass(frozen=True)
class Drawing:
    """What a strategy draws with: how many landmarks, the seed of all draws, and the rows of an audit."""

    size: int
    seed: int
    audit_rows: int


class Sampling(Protocol):
    """A strategy that draws landmarks."""

    name: ClassVar[str]

    @property
    def replacement(self) -> bool:
        """Whether rows are put back after a draw."""

    @property
    def finds_number(self) -> bool:
        """Whether it can add landmarks until a tolerance is met."""

    @property
    def sketch_ridge(self) -> float:
        """γ of the regularised approximation L_γ; 0 for the one without."""

    @property
    def equal_chances(self) -> bool:
        """Whether all rows are equally likely, where nothing was weighed."""

    def number(self, landmarks: int | None) -> int:
        """How many landmarks there will be at most, ``landmarks`` being the number that was asked for."""

    def workload(self, base: Workload, kernel: Kernel, n_rows: int, audit_rows: int) -> Workload:
        """The work of a run with what this strategy adds to it."""

    def choose(self, run: Run, settings: Settings, drawing: Drawing) -> tuple[Chosen, RowWeights | None]:
        """Landmarks with their rows, and the weights that they were drawn by, where those differ from row to row."""


class _Drawn:
    """What strategies that draw a given number of rows by weights have in common."""

    name: ClassVar[str]
    finds_number: ClassVar[bool] = False
    equal_chances: ClassVar[bool] = False
    replacement: bool

    def __post_init__(self) -> None:
        if not isinstance(self.replacement, bool):
            raise InvalidParameter(f"replacement must be True or False, got {self.replacement!r}")

    def number(self, landmarks: int | None) -> int:
        """The number that was asked for."""
        if landmarks is None:
            raise InvalidParameter(
                f"landmarks, a number, is needed with sampling={self.name!r}. Only sampling='residual' finds the "
                "number of landmarks by itself, to meet a tolerance."
            )
        return landmarks

    def workload(self, base: Workload, kernel: Kernel, n_rows: int, audit_rows: int) -> Workload:
        """A light pass that weighs rows, unless the diagonal of the kernel is constant."""
        return replace(base, weighs_rows=not kernel.constant_diagonal)


class _DrawnByProbabilities(_Drawn):
    """What strategies have in common whose landmarks have probabilities, where rows are put back."""

    sketch_ridge: float

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "sketch_ridge", draws.check_sketch_ridge(self.sketch_ridge, self.replacement))


@dataclass(frozen=True)
class Residual(_Drawn):
    """Landmarks in rounds of draws by what earlier landmarks do not explain; the first by the kernel's diagonal.

    Parameters
    ----------
    rounds
        In which a given number of landmarks is drawn; with a tolerance there are as many as it takes.
    replacement
        Whether rows are put back after a draw; if not, of the rows that are drawn those are taken that explain most
        together.

    Examples
    --------
    >>> Residual(rounds=3)
    Residual(rounds=3, replacement=False)
    """

    name: ClassVar[str] = "residual"
    finds_number: ClassVar[bool] = True
    # Landmarks have no probabilities: later rounds depend on those of earlier ones.
    sketch_ridge: ClassVar[float] = 0.0
    rounds: int = 2
    replacement: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "rounds", check_count("rounds", self.rounds))

    def workload(self, base: Workload, kernel: Kernel, n_rows: int, audit_rows: int) -> Workload:
        """Every round but the last is a pass for residuals alone, which draws candidates."""
        sizes = round_sizes(base.n_landmarks, self.rounds)
        candidates = ((n_candidates(most - few, most, n_rows) + 1,) for few, most in itertools.pairwise(sizes))
        rounds = replace(base, residual_rounds=tuple(sizes[:-1]), draws=max([base.draws, *candidates], key=sum))
        return super().workload(rounds, kernel, n_rows, audit_rows)

    def choose(self, run: Run, settings: Settings, drawing: Drawing) -> tuple[Chosen, None]:
        """Draw by the diagonal, then by residuals."""
        sizes, seed = round_sizes(drawing.size, self.rounds), drawing.seed
        chosen = first_landmarks(run, settings, sizes[0], seed, self.replacement)
        settings = replace(settings, with_subset=False)
        for number, size in enumerate(sizes[1:], 1):
            wanted = size - sizes[number - 1]
            sketch, _ = whiten(run, f"{run.name}-round{number}", settings, chosen)
            title = f"round {number} of {len(sizes) - 1}: residuals"
            candidates = landmark_draw(seed, number, wanted, size, run.rows.n_rows)
            first = first_pass(run, sketch, candidates, with_gram=False, title=title, label=f"round-{number}")
            larger = grow(run, settings, chosen, first, wanted, seed, number, self.replacement)
            if larger is chosen:
                break
            chosen = larger
        return chosen, None


@dataclass(frozen=True)
class Leverage(_DrawnByProbabilities):
    """Two rounds, the second by certified upper ends of the scores at ridge·epsilon (Theorem 3).

    Parameters
    ----------
    epsilon
        Above 0: how far below the ridge the scores are taken that rows are drawn by.
    replacement
        Whether rows are put back after a draw, as the theorem demands.
    sketch_ridge
        γ ≥ 0 of the regularised approximation L_γ, which needs replacement.
    """

    name: ClassVar[str] = "leverage"
    epsilon: float = 0.1
    replacement: bool = True
    sketch_ridge: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "epsilon", check_positive("epsilon", self.epsilon))

    def workload(self, base: Workload, kernel: Kernel, n_rows: int, audit_rows: int) -> Workload:
        """Both passes and an audit with the landmarks of the first round."""
        first = (max(1, base.n_landmarks // FIRST_SHARE),)
        return super().workload(
            replace(base, full_rounds=first, draws=(PROBE_ROWS, audit_rows)), kernel, n_rows, audit_rows
        )

    def choose(self, run: Run, settings: Settings, drawing: Drawing) -> tuple[Chosen, RowWeights | None]:
        """Draw a first round by the diagonal, and the others by the upper ends that it certifies."""
        size, seed = drawing.size, drawing.seed
        first_size = max(1, size // FIRST_SHARE)
        earlier = first_landmarks(run, settings, first_size, seed, replacement=False)
        if size == first_size and not self.sketch_ridge:
            return earlier, None
        # L_γ weighs each landmark by its probability, and those of the first round have none in this draw.
        keep = not self.sketch_ridge
        n_draws = size - first_size if keep else size
        weighing = _weigh_by_upper(run, settings, settings.smallest * self.epsilon, drawing, earlier, n_draws)
        landmarks = draw_weighted(run, weighing, n_draws, seed, 1, self.replacement)
        X = fetch_rows(run, landmarks.indices, "sample-rows-again")
        if not keep:
            return Chosen(landmarks, X), weighing
        return join(run, earlier, landmarks.indices, landmarks.counts, X), weighing


@dataclass(frozen=True)
class Diagonal(_DrawnByProbabilities):
    """Draws with probabilities k_ii / tr K, those of Theorem 4.

    Parameters
    ----------
    replacement
        Whether rows are put back after a draw, as the theorem demands.
    sketch_ridge
        γ ≥ 0 of the regularised approximation L_γ, which needs replacement.
    """

    name: ClassVar[str] = "diagonal"
    equal_chances: ClassVar[bool] = True
    replacement: bool = True
    sketch_ridge: float = 0.0

    def choose(self, run: Run, settings: Settings, drawing: Drawing) -> tuple[Chosen, RowWeights | None]:
        """Draw by the diagonal of the kernel."""
        landmarks, weighing = draw_by_diagonal(
            run, settings.kernel, drawing.size, drawing.seed, self.replacement
        )  # fmt: skip
        return Chosen(landmarks, fetch_rows(run, landmarks.indices, "sample-rows")), weighing


@dataclass(frozen=True)
class Uniform(_DrawnByProbabilities):
    """Draws in which all rows are equally likely.

    Parameters
    ----------
    replacement
        Whether rows are put back after a draw.
    sketch_ridge
        γ ≥ 0 of the regularised approximation L_γ, which needs replacement.
    """

    name: ClassVar[str] = "uniform"
    equal_chances: ClassVar[bool] = True
    replacement: bool = True
    sketch_ridge: float = 0.0

    def workload(self, base: Workload, kernel: Kernel, n_rows: int, audit_rows: int) -> Workload:
        """Nothing but the draws."""
        return base

    def choose(self, run: Run, settings: Settings, drawing: Drawing) -> tuple[Chosen, None]:
        """Draw row numbers."""
        generator = draws.stream(drawing.seed, "landmarks")
        landmarks = draws.draw_uniform(run.rows.n_rows, drawing.size, generator, self.replacement)
        return Chosen(landmarks, fetch_rows(run, landmarks.indices, "sample-rows")), None


@dataclass(frozen=True, eq=False)
class Probabilities(_DrawnByProbabilities):
    """Draws by n probabilities, an array or a lazy one.

    Parameters
    ----------
    values
        (n,) floating, with sum 1.
    replacement
        Whether rows are put back after a draw.
    sketch_ridge
        γ ≥ 0 of the regularised approximation L_γ, which needs replacement.
    """

    name: ClassVar[str] = "probabilities"
    values: Any
    replacement: bool = True
    sketch_ridge: float = 0.0

    def workload(self, base: Workload, kernel: Kernel, n_rows: int, audit_rows: int) -> Workload:
        """A light pass over the probabilities."""
        return replace(base, weighs_rows=True)

    def choose(self, run: Run, settings: Settings, drawing: Drawing) -> tuple[Chosen, RowWeights]:
        """Draw by the probabilities."""
        values = open_rows(self.values, ndim=1, name="sampling") if not isinstance(self.values, Rows) else self.values
        landmarks, weighing = draw_by_probabilities(run, values, drawing.size, drawing.seed, self.replacement)
        return Chosen(landmarks, fetch_rows(run, landmarks.indices, "sample-rows")), weighing


@dataclass(frozen=True, eq=False)
class RowNumbers:
    """Landmarks that were given.

    Parameters
    ----------
    values
        (p,) integers, the numbers of their rows.
    """

    name: ClassVar[str] = "row numbers"
    replacement: ClassVar[bool] = False
    finds_number: ClassVar[bool] = False
    sketch_ridge: ClassVar[float] = 0.0
    equal_chances: ClassVar[bool] = False
    values: NDArray[np.int64]

    def number(self, landmarks: int | None) -> int:
        """As many as there are, if nothing else was asked for."""
        return max(1, len(self.values)) if landmarks is None else landmarks

    def workload(self, base: Workload, kernel: Kernel, n_rows: int, audit_rows: int) -> Workload:
        """Nothing but to look them up."""
        return base

    def choose(self, run: Run, settings: Settings, drawing: Drawing) -> tuple[Chosen, None]:
        """Look them up."""
        landmarks = draws.given(self.values, run.rows.n_rows, drawing.size)
        return Chosen(landmarks, fetch_rows(run, landmarks.indices, "sample-rows")), None


BY_NAME: dict[str, type[Residual | Leverage | Diagonal | Uniform]] = {
    one.name: one for one in (Residual, Leverage, Diagonal, Uniform)
}


def as_sampling(sampling: Any, n_rows: int) -> Sampling:
    """The strategy that ``sampling`` is or stands for: a name, n probabilities, or the row numbers of the landmarks.

    Raises
    ------
    InvalidParameter
        Neither a strategy nor a name of one nor an array that can be read as probabilities or row numbers.
    """
    if isinstance(sampling, (Residual, Leverage, Diagonal, Uniform)):
        return sampling
    if isinstance(sampling, str) and sampling in BY_NAME:
        return BY_NAME[sampling]()
    if isinstance(sampling, (str, type)):
        raise InvalidParameter(
            f"sampling must be one of {', '.join(BY_NAME)}, such a strategy, or an array, got {sampling!r}"
        )
    given = sampling.values if isinstance(sampling, (Probabilities, RowNumbers)) else sampling
    given = readable(given, "sampling")
    array = given if isinstance(given, (da.Array, zarr.Array)) else np.asarray(given)
    if array.dtype.kind in "iu" and array.ndim == 1 and not isinstance(sampling, Probabilities):
        return RowNumbers(np.asarray(array).astype(np.int64))
    if array.dtype.kind != "f" or array.shape != (n_rows,) or isinstance(sampling, RowNumbers):
        raise InvalidParameter(
            f"sampling as an array is either {n_rows} probabilities (floating dtype, one per row of X) or the row "
            f"numbers of the landmarks (integer dtype); got dtype {array.dtype} and shape {array.shape}."
        )
    values = open_rows(array, ndim=1, name="sampling")
    return replace(sampling, values=values) if isinstance(sampling, Probabilities) else Probabilities(values)


def _weigh_by_upper(
    run: Run, settings: Settings, ridge: float, drawing: Drawing, chosen: Chosen, n_draws: int
) -> RowWeights:
    """Certified upper ends of the scores at a ridge, from a first round of landmarks."""
    small = replace(settings, ridges=(ridge,), single=True, sketch_ridge=0.0, with_subset=False)
    seed, audit_rows = drawing.seed, drawing.audit_rows
    try:
        sketch, _ = whiten(run, f"{run.name}-first", small, chosen)
        first = first_pass(
            run,
            sketch,
            audit_draws(seed, FIRST_ROUND_STREAM, audit_rows),
            title="first round, pass 1: gram",
            label="first-round",
        )
        left = first.leave()
        step = partial(factors.add_ridge, dtype=small.dtype, n_rows=sketch.n_rows, ridges=[ridge], leading=False)
        ridged = sketch.algebra.perform(step, first.gram)
        run.executor.settle(left)
    except RidgeTooSmall as error:
        raise RidgeTooSmall(
            f"sampling='leverage' draws by scores at ridge·epsilon = {ridge:.3g}, where {error} Raise the ridge or "
            "epsilon, or use sampling='residual'."
        ) from None
    # This round decides which rows are drawn, never what is certain about them: its failure harms no interval.
    found = audit(run, sketch, first, audit_rows, FIRST_ROUND_FAILURE, seed, FIRST_ROUND_STREAM)
    sketch = replace(sketch, certainty=certainty_of(sketch, found, ridged.score_errors))
    payload = run.executor.hold(sketch.algebra.payload(factors.scorer))
    ends = sketch.map_scores(run, payload, first.kept, _ends, "first-round").handles("first round, pass 2: upper ends")
    sums = of_blocks(run.executor, "ends-sum", _sum_of_ends, ends)
    lower, upper = (math.fsum(column) for column in zip(*sums, strict=True))
    handles = run.executor.apply_all("upper-ends", _upper, [[handle] for handle in ends])
    return RowWeights(handles, upper, _fidelity(ridge, run.rows.n_rows, lower, upper, n_draws))


def _ends(scored: ScoredRows, start: int) -> NDArray[np.float64]:
    return np.hstack([scored.whole("lower"), scored.whole("upper")])


def _sum_of_ends(ends: NDArray[np.float64]) -> NDArray[np.float64]:
    return ends.sum(axis=0)


def _upper(ends: Sequence[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    return [one[:, 1].copy() for one in ends]


def _fidelity(ridge: float, n_rows: int, lower: float, upper: float, n_draws: int) -> ScoreFidelity:
    """Of draws by upper ends u, given Σ of both ends: u_i/p_i = Σu, but for round-off and integer weights."""
    inflated = upper * (1.0 + 1e-12) + math.ldexp(n_rows, -binary_scale(1.0, n_rows))
    return ScoreFidelity(
        ridge=ridge, beta=min(lower * (1.0 - 1e-12) / inflated, 1.0), inflated_dimension=inflated, draws=n_draws,
        failure_probability=FIRST_ROUND_FAILURE,
    )  # fmt: skip
