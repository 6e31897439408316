"""A thousand landmarks and more, whose algebra is done in panels, against the dense oracle."""

import numpy as np
import pytest

import daskrr
from daskrr import exact
from daskrr.kernels import Gaussian, Laplacian, Matern
from daskrr.numerics import panels

CASES = [(Laplacian(4.0), True), (Matern(3.0), True), (Gaussian(6.0), False)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("kernel", "kept"), CASES, ids=repr)
def test_scores__of_many_landmarks_are_inside_their_intervals(kernel, kept, dtype):
    """With landmarks that are all kept, and with a kernel so smooth that some fall; rows repeat, some are far off."""
    X = np.random.default_rng(0).standard_normal((2500, 4))
    X[2000:2300] = X[:300]
    X[2400:] *= 4.0
    rows = np.arange(1, 1031 if kept else 1200)
    found = daskrr.leverage_scores(X, kernel, 1e-3, sampling=rows, certify=True, dtype=dtype, progress=False)
    exactly = exact.leverage_scores(X, kernel, 1e-3)
    lower, upper, scores = (np.asarray(getattr(found, name)) for name in ("lower", "upper", "scores"))
    assert np.all(lower <= exactly * (1 + 1e-9))
    assert np.all(exactly <= upper * (1 + 1e-9))
    assert np.all(scores <= exactly * (1 + (1e-9 if dtype == "float64" else 1e-2)))
    if kept and dtype == "float64":
        assert found.summary["rank"] == 1028 >= panels.SMALLEST
        assert np.median(np.abs(np.asarray(found.estimate) / exactly - 1)) < 0.1
    if not kept:
        assert found.summary["rank"] < len(rows)
