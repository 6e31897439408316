"""Landmarks whose products are machine code of our own, against the dense oracle and against BLAS."""

import itertools

import numpy as np
import pytest
from variants import slow_but

import daskrr
from daskrr import exact
from daskrr.kernels import Gaussian, Laplacian, native, products


def rows_of(case):
    X = np.random.default_rng(0).standard_normal((900, 3))
    if case == "repeated":
        X[300:] = X[np.random.default_rng(1).integers(0, 300, 600)]
    if case == "far":
        X[800:] *= 30.0
    if case == "zero":
        X[::5] = 0.0
    return X


@pytest.mark.parametrize(
    ("case", "dtype"),
    slow_but(
        itertools.product(["repeated", "far", "zero"], ["float64", "float32"]),
        ("repeated", "float32"),
        ("far", "float64"),
    ),
)
@pytest.mark.parametrize(
    ("kernel", "n_landmarks"),
    [(Laplacian(3.0), 301), pytest.param(Gaussian(2.0), 200, marks=pytest.mark.slow)],
    ids=repr,
)
def test_scores__are_inside_their_intervals_whoever_multiplies(kernel, n_landmarks, case, dtype, monkeypatch):
    X = rows_of(case)
    exactly = exact.leverage_scores(X, kernel, 1e-3)
    scores, calls = [], []
    for name in ("multiply_rows", "add_gram"):
        done = getattr(products, name)
        monkeypatch.setattr(products, name, lambda *given, done=done, name=name: calls.append(name) or done(*given))
    for wide in (True, False):
        monkeypatch.setattr(native, "has_wide_registers", lambda wide=wide: wide)
        before = len(calls)
        found = daskrr.leverage_scores(
            X, kernel, 1e-3, sampling=np.arange(n_landmarks), certify=True, dtype=dtype, progress=False
        )
        lower, upper = np.asarray(found.lower), np.asarray(found.upper)
        assert np.all(lower <= exactly * (1 + 1e-9))
        assert np.all(exactly <= upper * (1 + 1e-9))
        scores.append(np.asarray(found.scores))
        assert products.LEAST_COLUMNS <= found.summary["rank"] <= products.MOST_COLUMNS
        assert set(calls[before:]) == ({"multiply_rows", "add_gram"} if wide else set())
    np.testing.assert_allclose(*scores, rtol=1e-6 if dtype == "float64" else 1e-2)
