"""Sums over rows: how their Gram matrix is added, what its round-off may be, and that no certificate forgets it."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from posing import PosingDevice

import daskrr
from daskrr.errors import CheckFailed, KernelNotPositive, RidgeTooSmall
from daskrr.kernels import Gaussian, products
from daskrr.kernels.device import HOST, using
from daskrr.leverage.writing import check_sums
from daskrr.numerics import factorize, panels, pass1
from daskrr.numerics.pass1 import GramPart, GramSum, Totals, Whitener, gram_block
from daskrr.numerics.whitening import whiten
from daskrr.nystrom.checkpoints import add_parts, most_additions
from daskrr.runtime.tree import NodeSums, cut

F64 = np.dtype(np.float64)


def summed(B, heights):
    """The sum of the rows B, handed over in tiles of these heights, over and over."""
    total, start, number = GramSum(B.shape[1]), 0, 0
    while start < len(B):
        stop = min(len(B), start + heights[number % len(heights)])
        total.add(np.ascontiguousarray(B[start:stop]))
        start, number = stop, number + 1
    return total


def gram_of(total, rank):
    """The lower triangle that was summed."""
    return np.tril(panels.matrix_of(total.sums(), rank))


# Ranks whose products are left to BLAS, and that are our own on processors that have wide registers.
RANKS = [5, products.LEAST_COLUMNS + 13]


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("n_rows", [0, 1, 100, 8192, 8193, 30_000])
def test_gram_sum__is_the_gram_matrix(n_rows, rank):
    B = np.random.default_rng(n_rows).standard_normal((n_rows, rank))
    np.testing.assert_allclose(gram_of(summed(B, [4096]), rank), np.tril(B.T @ B), rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("n_rows", [3000, 20_000])
def test_gram_sum__adds_float32_rows_in_float64(n_rows, rank):
    B = np.random.default_rng(0).standard_normal((n_rows, rank)).astype(np.float32)
    wide = B.astype(np.float64)
    np.testing.assert_allclose(gram_of(summed(B, [512]), rank), np.tril(wide.T @ wide), rtol=1e-13, atol=1e-10)


@settings(max_examples=30)
@given(st.integers(0, 60_000), st.lists(st.integers(1, 20_000), min_size=1, max_size=5), st.sampled_from([1, 3, 50]))
def test_gram_sum__ends_its_chains(n_rows, heights, rank):
    n_rows = min(n_rows, 500 * max(heights))
    total = summed(np.ones((n_rows, rank)), heights)
    assert (gram_of(total, rank) == n_rows * np.tril(np.ones((rank, rank)))).all()
    assert total.height <= pass1.most_additions(n_rows, rank, HOST.chain_rows)
    assert total.height <= min(n_rows, pass1.chain_rows(rank, HOST.chain_rows)) + n_rows // 2048


@pytest.mark.parametrize(("chain", "height"), [(48, 48), (16, 18)])
def test_gram_sum__has_chains_that_are_as_long_as_the_device_allows(chain, height):
    B = np.random.default_rng(0).standard_normal((48, 2))
    device = PosingDevice()
    device.chain_rows = chain
    with using(device):
        total = GramSum(2)
        total.add(device.put(B))
        found = gram_of(total, 2)
    np.testing.assert_allclose(found, np.tril(B.T @ B), rtol=1e-13)
    assert total.height == height <= pass1.most_additions(48, 2, chain)


class Watched(PosingDevice):
    """Notes who computes."""

    def __init__(self):
        super().__init__()
        self.computing = self.turns = 0

    @contextmanager
    def turn(self):
        self.computing, self.turns = self.computing + 1, self.turns + 1
        try:
            yield
        finally:
            self.computing -= 1

    def multiply_rows(self, A, B):
        assert self.computing == 1
        return super().multiply_rows(A, B)


def test_gram_block__computes_when_it_is_its_turn():
    X, kernel, device = np.random.default_rng(0).standard_normal((200, 3)), Gaussian(1.0), Watched()
    whitening = whiten(kernel(X[:5], X[:5]), 1e-15, F64)
    columns = kernel.columns(X[whitening.pivots], F64)
    whitener = Whitener(columns, kernel.diagonal, whitening.inverse, 1e-12)
    with using(device):
        gram_block(whitener, [X[:150], X[150:]], 0)
        assert (device.turns, device.computing) == (2, 0)
        with pytest.raises(KernelNotPositive):
            gram_block(replace(whitener, inverse=100.0 * whitening.inverse), [X], 0)
        with pytest.raises(ValueError, match="do not fit"):
            gram_block(whitener, [X[:, :2]], 0)
    assert (device.turns, device.computing) == (4, 0)


def test_totals__go_through_one_addition_more_than_their_parts():
    low, high = (Totals(diagonal=1.0, residual=0.0, largest=0.0, smallest=0.0, height=h) for h in (3, 8))
    assert (low + high).height == (high + low).height == 9


@pytest.mark.parametrize("n_rows", [3, 10, 77, 640, 641, 5000])
def test_most_additions__is_no_less_than_what_the_tree_adds(n_rows):
    def part(rows):
        height = pass1.most_additions(rows, 50, 8192)
        totals = Totals(diagonal=1.0, residual=0.0, largest=0.0, smallest=0.0, height=height)
        return GramPart(np.zeros(0), (), totals, {})

    sums = NodeSums(lambda lists: [add_parts(*parts) for parts in lists])
    for span in cut(n_rows, 10, 1, 1.0):
        sums.push(span, part(span.n_rows))
    assert 0 <= most_additions(n_rows, 10, 50, 8192) - sums.total().totals.height <= 12


@pytest.mark.parametrize("n_rows", [100, 5000, 100_000])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7])
def test_sum_error__bounds_the_sum_of_equal_rows(n_rows, value):
    b = np.array([1.0, value, -value])
    total = summed(np.tile(b, (n_rows, 1)), [4096])
    found = gram_of(total, 3)
    exact = np.outer(b, b).astype(np.longdouble) * n_rows
    error = np.abs(np.tril(found - exact)).astype(np.float64)
    allowed = factorize.sum_error(float(np.trace(found)), total.height)
    assert np.linalg.norm(error + np.tril(error, -1).T, 2) <= allowed


def test_ridge_factor__budgets_for_the_sum():
    G = np.diag([4.0, 1.0])
    whitening = whiten(np.eye(2), 1e-15, F64)
    bare, summed_up = (factorize.ridge_factor(G, whitening, 1, [2.0], F64, error) for error in (0.0, 0.02))
    assert summed_up.score_errors[0] - bare.score_errors[0] == pytest.approx(0.02 / 1.98, rel=1e-3)
    with pytest.raises(RidgeTooSmall, match=r"smallest ridge that works is 2\.2"):
        factorize.ridge_factor(G, whitening, 1, [0.1], F64, 0.2)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("ridge", [1.0, 1e-3])
def test_ridge_factor__names_a_ridge_that_works_whatever_was_summed(dtype, ridge):
    G, error = np.diag([1e3, 1.0]), 30.0
    least = factorize.gram_ridge(2, 1e3, error, 10, np.dtype(dtype))
    factorize.gram_errors(2, 1e3, error, 10, [1.001 * least], np.dtype(dtype))
    with pytest.raises(RidgeTooSmall, match="too small"):
        factorize.ridge_factor(G, None, 10, [0.999 * least], np.dtype(dtype), error)


def two_points(n_rows=4096):
    """One row among many that are equal."""
    X = np.tile([-0.3, 1.0], (n_rows, 1))
    X[0] = -0.4, -0.6
    return X


@pytest.mark.parametrize("ridge", [2e-14, 5e-14, 1e-13])
def test_leverage_scores__refuse_a_ridge_that_the_sum_over_rows_does_not_resolve(ridge):
    with pytest.raises(RidgeTooSmall, match="smallest ridge that works"):
        daskrr.leverage_scores(two_points(), Gaussian(1.9), ridge, 100, random_state=0)


def test_store__holds_the_sum_of_scores_to_round_off(tmp_path):
    found = daskrr.leverage_scores(two_points(), Gaussian(1.9), 1e-3, 100, dtype="float32", random_state=0)
    dimension, error = found.sketch_dimension, found.summary["score_error"]
    assert error < 1e-3
    check_sums(np.array([dimension * (1 + 0.9 * error)]), dimension, error)
    with pytest.raises(CheckFailed, match="larger than its budget"):
        check_sums(np.array([dimension * (1 + 1.1 * error)]), dimension, error)
    assert found.store(tmp_path / "scores.zarr")["sum_of_scores"] == pytest.approx(dimension, rel=error)
