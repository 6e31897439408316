"""Many equal rows: round-off of equal addends has one sign, and intervals contain the exact scores all the same."""

import numpy as np
import pytest
from extended import scores_of_repeats
from strategies import KERNELS, extended_scores

from daskrr.kernels import Gaussian

# --- The oracle ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_scores_of_repeats__are_those_of_all_rows(kernel):
    points, counts, ridges = np.random.default_rng(0).standard_normal((3, 2)), [1, 5, 2], [1e-9, 1e-2]
    found = scores_of_repeats(points, counts, kernel, ridges)
    for column, ridge in enumerate(ridges):
        every = extended_scores(np.repeat(points, counts, axis=0), kernel, ridge)
        np.testing.assert_allclose(np.repeat(found[:, column], counts), every, rtol=1e-15)


def score_of_a_lone_row(k, n, ridge):
    """Its exact score among n - 1 rows that are equal, with the kernel k to them and 1 to itself, as theirs."""
    c, mu = n - 1, n * ridge
    return 1 - mu * (c + mu) / ((c + mu) * (1 + mu) - k**2 * c)


@pytest.mark.parametrize("ridge", [1e-3, 1.0])
def test_scores_of_repeats__of_a_lone_row_have_a_closed_form(ridge):
    points, kernel = np.array([[-0.4, -0.6], [-0.3, 1.0]]), Gaussian(1.9)
    found = scores_of_repeats(points, [1, 4095], kernel, [ridge])[0, 0]
    assert found == pytest.approx(score_of_a_lone_row(kernel(points, points)[0, 1], 4096, ridge), rel=1e-12)
