"""Lazy arrays of a result on a cluster, whose keys share a scheduler with those of the run that made it."""

import dask.array as da
import numpy as np
import pytest

import daskrr
from daskrr.kernels import Gaussian

X = np.random.default_rng(0).standard_normal((300, 2))


def computed(rows, weight=None):
    result = daskrr.leverage_scores(
        rows, Gaussian(1.0), 1e-2, 30, certify=True, random_state=0, block_rows=20, sample_weight=weight
    )
    arrays = (result.residual, result.scores, result.estimate, result.lower, result.upper)
    return [array.compute() for array in arrays], result.top(5).rows


WEIGHT = np.linspace(0.5, 2.0, 300)
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("lazy", "weight"),
    [
        pytest.param(False, None, id="in memory-plain"),
        pytest.param(False, WEIGHT, id="in memory-weighted", marks=SLOW),
        pytest.param(True, None, id="lazy-plain", marks=SLOW),
        pytest.param(True, WEIGHT, id="lazy-weighted", marks=SLOW),
    ],
)
def test_arrays__of_many_blocks_have_the_same_bits_on_a_cluster(lazy, weight, request):
    expected, highest = computed(X, weight)
    request.getfixturevalue("client")
    rows = da.from_array(X, chunks=(20, 2)) if lazy else X
    found, rows_found = computed(rows, weight)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(highest, rows_found)
