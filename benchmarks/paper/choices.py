"""Ways to choose p landmarks: a problem, p and a seed in, landmarks out."""

from collections.abc import Callable

import numpy as np

import daskrr
from benchmarks.paper.problems import EPSILON, Problem, Vector, rank_scores
from daskrr.nystrom.landmarks import Landmarks, merge

Choice = Callable[[Problem, int, int], Landmarks]


def draw(weights: Vector, p: int, seed: int) -> Landmarks:
    """Draw p rows with replacement in proportion to weights."""
    probabilities = weights / weights.sum()
    drawn = np.random.default_rng(seed).choice(len(weights), p, p=probabilities)
    return merge(drawn, probabilities[drawn])


def uniform(problem: Problem, p: int, seed: int) -> Landmarks:
    """All rows alike (Bach)."""
    return draw(np.ones(len(problem.X)), p, seed)


def distinct(problem: Problem, p: int, seed: int) -> Landmarks:
    """All rows alike, without replacement."""
    return merge(np.random.default_rng(seed).choice(len(problem.X), min(p, len(problem.X)), replace=False), None)


def diagonal(problem: Problem, p: int, seed: int) -> Landmarks:
    """By k_ii (Theorem 4)."""
    return draw(problem.kernel.diagonal(problem.X), p, seed)


def exact_leverage(problem: Problem, p: int, seed: int) -> Landmarks:
    """By the exact scores at λε (Theorem 3)."""
    return draw(problem.spectrum.scores(problem.ridge * EPSILON), p, seed)


def rank_leverage(problem: Problem, p: int, seed: int) -> Landmarks:
    """By the scores relative to the best space of rank d_eff (Gittens & Mahoney)."""
    return draw(rank_scores(problem.spectrum, round(problem.effective_dimension)), p, seed)


def estimated_leverage(problem: Problem, p: int, seed: int) -> Landmarks:
    """The paper's two steps with daskrr: scores at λε from p columns by k_ii, then p draws by what was found.

    The draws are half by the estimated scores and half uniform. Columns of the first step do not count in p.
    """
    result = daskrr.leverage_scores(
        problem.X, problem.kernel, problem.ridge * EPSILON, p, sampling="diagonal", random_state=seed, progress=False
    )
    sample = daskrr.jobs.sample_rows(result, p, random_state=seed, progress=False)
    return merge(sample.indices, sample.probabilities)


def residual(problem: Problem, p: int, seed: int) -> Landmarks:
    """daskrr's default: two rounds, the second by what the first leaves unexplained; all count in p."""
    result = daskrr.leverage_scores(problem.X, problem.kernel, problem.ridge, p, random_state=seed, progress=False)
    return result.sketch.landmarks


def constant_diagonal(problem: Problem) -> bool:
    """Whether drawing by k_ii is drawing uniformly."""
    values = problem.kernel.diagonal(problem.X)
    return bool(np.all(values == values[0]))
