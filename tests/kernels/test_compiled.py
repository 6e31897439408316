"""Compiled formulas against NumPy and extended precision, at every length of the last strip."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest

from daskrr.kernels import Gaussian, Matern, device, native
from daskrr.kernels.compiled import mended_sweep, padded_columns, pairs, row_sums, sweep
from daskrr.kernels.lanes import exp
from daskrr.kernels.native import LANES, code_of

DTYPES = [np.dtype(np.float64), np.dtype(np.float32)]
LENGTHS = [0, 1, 2, LANES - 1, LANES, LANES + 1, 3 * LANES, 5 * LANES + 7]


def double(v):
    return v + v


def add_product(total, difference, weight):
    return difference.times(weight, plus=total)


def as_it_is(total):
    return total


def weighed_gap(found, weight, limit):
    return ((found[0] - found[1]) * weight()).at_most(limit())


def swept(formula, values):
    out = values.copy()
    sweep(formula, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exp__is_right_to_two_unit_roundoffs_and_never_subnormal(dtype):
    about = np.finfo(dtype)
    low = float(np.log(float(about.tiny)))
    rng = np.random.default_rng(0)
    x = np.concatenate([low * rng.random(200_000), -(10.0 ** rng.uniform(-20, 2, 50_000)), [0.0, -0.0]]).astype(dtype)
    found, expected = swept(exp, x).astype(np.longdouble), np.exp(x.astype(np.longdouble))
    clear = x > low + 1.001
    assert np.max(np.abs(found - expected)[clear] / expected[clear]) <= 2 * about.eps / 2
    assert np.all((found == 0) | (found >= about.tiny))
    assert np.all(found[x < low + 0.999] == 0)
    assert found.max() == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exp__of_infinity_is_zero_and_of_nan_nan(dtype):
    found = swept(exp, np.array([-np.inf, np.nan, np.finfo(dtype).min, 0.0], dtype))
    np.testing.assert_array_equal(found, [0.0, np.nan, 0.0, 1.0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exp__has_the_same_bits_wherever_a_number_is(dtype):
    x = -np.random.default_rng(1).exponential(3.0, 4 * LANES).astype(dtype)
    for shift in range(LANES + 1):
        np.testing.assert_array_equal(swept(exp, x[shift:]), swept(exp, x)[shift:])


@pytest.mark.parametrize("size", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sweep__touches_every_number_and_nothing_else(size, dtype):
    memory = np.arange(size + 2 * LANES, dtype=dtype)
    expected = memory.copy()
    expected[LANES : LANES + size] *= 2
    sweep(double, memory[LANES : LANES + size])
    np.testing.assert_array_equal(memory, expected)


@pytest.mark.parametrize("n_columns", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("n_rows", "n_features", "n_weights"), [(0, 3, 3), (1, 1, 1), (4, 5, 5), (3, 0, 0), (6, 2, 2), (9, 4, 4), (9, 4, 1)]
)
@pytest.mark.parametrize(
    "wide", [pytest.param(False, id="one row at a time", marks=pytest.mark.slow), pytest.param(True, id="several")]
)
def test_pairs__sum_over_features(n_rows, n_features, n_weights, n_columns, dtype, wide, monkeypatch):
    monkeypatch.setattr(native, "has_wide_registers", lambda: wide)
    monkeypatch.setattr(device, "code_of", cache(code_of.__wrapped__))
    rng = np.random.default_rng(2)
    shapes = (n_rows, n_features), (n_columns, n_features), (n_weights,)
    X, Z, w = (rng.integers(-9, 9, shape).astype(float) for shape in shapes)
    memory = np.full((n_rows + 2, n_columns), np.nan, dtype)
    pairs(add_product, 3.0, as_it_is, X, padded_columns(Z), w, memory[1:-1])
    differences = X[:, None] - Z[None]
    expected = 3.0 + differences @ w if n_weights != 1 else (3.0 + differences.sum(axis=-1)) * w
    np.testing.assert_array_equal(memory[1:-1], expected)
    assert np.isnan(memory[[0, -1]]).all()


@pytest.mark.parametrize("n_columns", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_sums__take_weights_and_limits(n_columns, dtype):
    rng = np.random.default_rng(3)
    first, second = rng.integers(-9, 9, (2, 5, n_columns)).astype(dtype)
    weights, limits = rng.integers(1, 9, n_columns).astype(float), rng.integers(0, 9, 5).astype(float)
    found = row_sums(weighed_gap, [first, second], weights, limits)
    expected = np.minimum((first - second).astype(float) * weights, limits[:, None]).sum(axis=1)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("n_columns", LENGTHS)
@pytest.mark.parametrize("n_weights", [3, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mended_sweep__sums_anew_what_is_not_below_its_limit(n_columns, n_weights, dtype):
    rng = np.random.default_rng(5)
    shapes = (6, 3), (n_columns, 3), (n_weights,)
    X, Z, w = (rng.integers(-9, 9, shape).astype(float) for shape in shapes)
    known = rng.integers(-9, 9, (6, n_columns)).astype(dtype)
    known[:, ::5] = np.nan
    limits = np.array([-np.inf, -3.0, 0.0, 4.0, 9.0, np.inf])
    memory = np.full((8, n_columns), np.inf, dtype)
    memory[1:-1] = known
    mended_sweep(add_product, double, memory[1:-1], limits, X, padded_columns(Z), w)
    expected = 2 * np.where(known < limits[:, None], known, (X[:, None] - Z[None]) @ np.broadcast_to(w, 3))
    np.testing.assert_array_equal(memory[1:-1], expected)
    assert np.isinf(memory[[0, -1]]).all()


def test_functions__refuse_arrays_that_do_not_fit():
    _, f4 = DTYPES
    with pytest.raises(ValueError, match="C-contiguous array of float64 is needed"):
        pairs(
            add_product,
            0.0,
            as_it_is,
            np.zeros((4, 3), f4),
            padded_columns(np.zeros((2, 3))),
            np.zeros(3),
            np.zeros((4, 2)),
        )
    with pytest.raises(ValueError, match="C-contiguous"):
        sweep(double, np.zeros((4, 4))[:, ::2])
    Z = padded_columns(np.zeros((2, 3)))
    for X, columns, w, out in [
        (np.zeros((4, 2)), Z, np.zeros(3), np.zeros((4, 2))),
        (np.zeros((4, 3)), Z[:, :2].copy(), np.zeros(3), np.zeros((4, 2))),
        (np.zeros((4, 3)), Z, np.zeros(2), np.zeros((4, 2))),
        (np.zeros((4, 3)), Z, np.zeros(3), np.zeros((5, 2))),
        (np.zeros((4, 3)), Z, np.zeros(3), np.zeros((4, LANES + 1))),
    ]:
        with pytest.raises(ValueError, match="do not fit"):
            pairs(add_product, 0.0, as_it_is, X, columns, w, out)
    with pytest.raises(ValueError, match="do not fit"):
        mended_sweep(add_product, as_it_is, np.zeros((4, 2)), np.zeros(3), np.zeros((4, 3)), Z, np.zeros(3))
    tile = np.zeros((4, 3))
    for tiles, weights, limits in [
        ([tile, np.zeros((4, 2))], np.zeros(3), np.zeros(4)),
        ([tile, tile], np.zeros(2), np.zeros(4)),
        ([tile, tile], np.zeros(3), np.zeros(5)),
    ]:
        with pytest.raises(ValueError, match="do not fit"):
            row_sums(weighed_gap, tiles, weights, limits)


def test_functions__can_be_made_by_several_threads_at_once():
    code_of.cache_clear()
    x = -np.arange(100.0)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: swept(exp, x), range(32)))
    for one in found:
        np.testing.assert_allclose(one, np.exp(x), rtol=1e-15)


def test_formulas__are_the_same_for_kernels_that_differ_in_scale_alone():
    X = np.random.default_rng(4).standard_normal((5, 12))
    made = []
    for scales in ((0.1, 1.0, 30.0), (0.2, 2.0, 40.0)):
        for scale in scales:
            for kernel in (Gaussian(scale), Matern(scale, 2.5)):
                kernel.columns(X, np.float64)(X, np.empty((5, 5)))
                kernel(X, X)
        made.append(code_of.cache_info().currsize)
    assert made[0] == made[1] > 0
