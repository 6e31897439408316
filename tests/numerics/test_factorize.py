"""The p × p algebra against dense identities."""

import re

import numpy as np
import pytest
from strategies import CASES, KERNELS, Problem
from variants import slow_but

from daskrr.errors import KernelNotPositive, RidgeTooSmall
from daskrr.kernels import Gaussian, Linear, Matern
from daskrr.numerics import factorize, whitening

F64, F32 = np.dtype(np.float64), np.dtype(np.float32)
U64, U32 = 2.0**-53, 2.0**-24


GAUSSIAN = Gaussian(1.0)


def kernel_matrix(kernel=GAUSSIAN, n=12, d=3, case="plain", seed=0):
    rng = np.random.default_rng(seed)
    X = CASES[case](rng, rng.standard_normal((n, d)))
    W = kernel(X, X)
    W = 0.5 * (W + W.T)
    np.fill_diagonal(W, Problem(X, kernel, case).diagonal)
    return W


def gram(rank, scale=1.0, seed=0):
    B = np.random.default_rng(seed).standard_normal((3 * rank, rank))
    return scale * B.T @ B


def whitened(W, error=U64, dtype=F64, penalty=None):
    return whitening.whiten(W, error, dtype, penalty)


def ridged(G, whitening, shift, dtype=F64):
    return factorize.ridge_factor(G, whitening, 4, [shift / 4], dtype, 0.0)


def resolution(ridge, dtype=F64, error=1e-6, mean_diagonal=3.0, rank=1):
    return factorize.check_resolution(error, mean_diagonal, ridge, rank, 100, dtype)


def smallest_named(error):
    return float(re.search(r"smallest ridge that works is (\d[\d.e+-]*\d)", str(error)).group(1))


# --- Entry error --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "unit"), [(F64, U64), (F32, U32)])
def test_kernel_error__is_at_least_four_roundoffs(dtype, unit):
    W = kernel_matrix()
    assert whitening.kernel_error(W, W, dtype) == 4 * unit


def test_kernel_error__is_twice_the_largest_error_relative_to_the_diagonal():
    W = np.diag([4.0, 100.0, 0.0])
    tile = W.copy()
    tile[0, 1] += 0.2
    tile[2, 2] = 7.0
    assert whitening.kernel_error(tile, W, F64) == pytest.approx(2 * 0.2 / (2 * 10))
    assert whitening.kernel_error(np.zeros((2, 2)), np.zeros((2, 2)), F32) == 4 * U32


# --- Whitening ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
@pytest.mark.parametrize("case", ["plain", "duplicates", "zero rows", "one repeated row", "heavy tails"])
@pytest.mark.parametrize("dtype", [F64, F32])
def test_whiten__inverts_the_shifted_matrix_of_the_kept_landmarks(kernel, case, dtype):
    W = kernel_matrix(kernel, case=case)
    found = whitened(W, 4 * whitening.UNIT_ROUNDOFF[dtype], dtype)
    shifted = W + found.shift * np.diag(np.diagonal(W))
    inside = shifted[np.ix_(found.pivots, found.pivots)]
    size = np.linalg.cond(inside / np.sqrt(np.outer(np.diagonal(inside), np.diagonal(inside))))
    np.testing.assert_allclose(found.inverse @ inside @ found.inverse.T, np.eye(found.rank), atol=100 * U64 * size)
    assert len(set(found.pivots)) == found.rank
    assert np.all(np.triu(found.inverse, 1) == 0)


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
@pytest.mark.parametrize("case", list(CASES))
def test_whiten__never_lifts_the_approximation_above_the_matrix(kernel, case):
    W = kernel_matrix(kernel, case=case)
    found = whitened(W)
    B = W[:, found.pivots] @ found.inverse.T
    scale = np.sqrt(np.diagonal(W))
    scale[scale == 0] = 1
    left = (W - B @ B.T) / scale[:, None] / scale
    assert np.linalg.eigvalsh(left).min() >= -16 * len(W) * U64
    assert np.abs(left).max() <= 4 * found.shift


@pytest.mark.parametrize("n_repeated", slow_but([0, 57], 57))
def test_whiten__of_many_landmarks_keeps_a_multiple_of_four_and_none_twice(n_repeated):
    X = np.random.default_rng(0).standard_normal((1030, 8))
    X = np.concatenate([X, X[:n_repeated]])
    W = Matern(4.0)(X, X)
    found = whitened(W)
    assert found.rank == 1028
    assert len(np.unique(X[found.pivots], axis=0)) == found.rank
    inside = W[np.ix_(found.pivots, found.pivots)] + found.shift * np.eye(found.rank)
    np.testing.assert_allclose(found.inverse @ inside @ found.inverse.T, np.eye(found.rank), atol=1e-9)
    assert not np.triu(found.inverse, 1).any()
    B = W[:, found.pivots] @ found.inverse.T
    assert np.linalg.eigvalsh(W - B @ B.T).min() >= -16 * len(W) * U64
    assert found.smallest_pivot > 3 * found.shift


@pytest.mark.parametrize(("dtype", "factor"), [(F64, 8), (F32, 2)])
def test_whiten__shifts_in_proportion_to_landmarks_and_error(dtype, factor):
    W = kernel_matrix(n=10)
    assert whitened(W, 1e-9, dtype).shift == pytest.approx(factor * 10 * 1e-9)


def test_whiten__is_free_of_units():
    W = kernel_matrix(Linear() + Gaussian(1.0), d=20)
    units = 4.0 ** np.arange(len(W))
    plain, scaled = whitened(W), whitened(W * units[:, None] * units)
    np.testing.assert_array_equal(plain.pivots, scaled.pivots)
    np.testing.assert_array_equal(plain.inverse, scaled.inverse * units[scaled.pivots])
    assert plain.smallest_pivot == scaled.smallest_pivot


def test_whiten__drops_landmarks_that_add_nothing():
    W = kernel_matrix(case="plain", n=6)
    doubled = np.tile(W, (2, 2))
    doubled[3] = doubled[:, 3] = doubled[9] = doubled[:, 9] = 0
    found = whitened(doubled)
    assert sorted(found.pivots % 6) == [0, 1, 2, 4, 5]
    assert 2 * found.shift < found.smallest_pivot < 1


@pytest.mark.parametrize("W", [np.empty((0, 0)), np.zeros((4, 4))])
def test_whiten__may_keep_nothing(W):
    found = whitened(W)
    assert found.rank == 0
    assert found.inverse.shape == (0, 0)
    assert np.isnan(found.smallest_pivot)


def test_whiten__adds_the_penalty_to_the_diagonal():
    W, penalty = kernel_matrix(Linear() + Gaussian(1.0)), np.linspace(0.1, 2.0, 12)
    found = whitened(W, penalty=penalty)
    L = W[:, found.pivots] @ found.inverse.T
    expected = W @ np.linalg.solve(W + np.diag(penalty), W)
    np.testing.assert_allclose(L @ L.T, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("W", "message"),
    [
        (np.diag([1.0, -2.0]), "landmark number 1 has the pivot -2"),
        (np.array([[1.0, 0.5], [0.5, 0.0]]), "landmark number 1 has the pivot"),
        (np.array([[1.0, 2.0], [2.0, 1.0]]), "landmark number [01] has the pivot -3"),
        (np.diag([1.0, np.nan]), "landmark number 1 has the pivot nan"),
    ],
)
def test_whiten__refuses_a_matrix_that_is_not_positive(W, message):
    with pytest.raises(KernelNotPositive, match=message):
        whitened(W)


# --- Ridge --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("shift", [1.0, 30.0, 1e3])
def test_ridge_factor__inverts_gram_plus_ridge(dtype, shift):
    W = kernel_matrix(n=9)
    whitening, G = whitened(W), gram(9)
    found = ridged(np.tril(G) + 77 * np.triu(np.ones((9, 9)), 1), whitening, shift, dtype)
    inside = G + shift * np.eye(9)
    np.testing.assert_allclose(found.inverse @ inside @ found.inverse.T, np.eye(9), atol=1e-11)
    assert found.effective_dimensions[0] == pytest.approx(np.trace(np.linalg.solve(inside, G)), rel=1e-12)
    np.testing.assert_allclose(found.combined, found.inverse @ whitening.inverse, rtol=1e-9, atol=1e-9)
    assert 0.8 * np.linalg.norm(G, 2) <= found.gram_norm <= np.linalg.norm(G, 2) * (1 + 1e-12)


def test_ridge_factor__gives_up_the_combined_factor_at_small_ridges():
    whitening, G = whitened(kernel_matrix(n=9)), gram(9)
    shifts = np.linalg.norm(G, 2) * np.array([1e-1, 1e-6])
    near, far = (ridged(G, whitening, shift) for shift in shifts)
    assert near.combined is not None
    assert far.combined is None
    assert near.score_errors[0] <= factorize.COMBINED_LIMIT[F64] * 1.01


@pytest.mark.parametrize("dtype", [F64, F32])
def test_ridge_factor__refuses_and_names_a_ridge_that_works(dtype):
    whitening, G = whitened(kernel_matrix(n=9)), gram(9)
    with pytest.raises(RidgeTooSmall, match=f"{dtype} round-off") as caught:
        ridged(G, whitening, 1e-20, dtype)
    enough = 4 * smallest_named(caught.value)
    assert ridged(G, whitening, enough, dtype).score_errors[0] <= factorize.MAX_SCORE_ERROR * 1.01
    with pytest.raises(RidgeTooSmall, match="works is"):
        ridged(G, whitening, 0.9 * enough, dtype)


def test_ridge_factor__takes_rank_zero():
    found = ridged(np.zeros((0, 0)), whitened(np.zeros((3, 3))), 1.0)
    assert (found.effective_dimensions[0], found.score_errors[0], found.gram_norm) == (0.0, 0.0, 0.0)
    assert found.combined.shape == (0, 0)


def test_ridge_factor__takes_a_gram_matrix_of_zeros():
    found = ridged(np.zeros((2, 2)), whitened(np.eye(2)), 4.0)
    np.testing.assert_allclose(found.inverse, np.eye(2) / 2)
    assert found.effective_dimensions[0] == 0.0


@pytest.mark.parametrize("rank", [0, 1, 9])
def test_ridge_factor__of_several_ridges_agrees_with_each(rank):
    whitening, G = whitened(np.eye(rank) if rank else np.zeros((2, 2))), gram(rank) if rank else np.zeros((0, 0))
    shifts = [1.0, 30.0, 1e3]
    path = factorize.ridge_factor(np.tril(G), whitening, 4, [shift / 4 for shift in shifts], F64, 0.0)
    b = np.random.default_rng(1).standard_normal(rank)
    squares = (path.inverse @ b) ** 2
    for number, shift in enumerate(shifts):
        alone = ridged(G, whitening, shift)
        assert path.effective_dimensions[number] == pytest.approx(alone.effective_dimensions[0], rel=1e-11, abs=1e-300)
        expected = np.sum((alone.inverse @ b) ** 2)
        assert np.sum(squares / (path.eigenvalues + shift)) == pytest.approx(expected, rel=1e-10, abs=1e-300)
    if path.combined is not None:
        np.testing.assert_allclose(path.combined, path.inverse @ whitening.inverse, rtol=1e-12)


def test_ridge_factor__of_several_ridges_refuses_the_one_that_is_too_small():
    with pytest.raises(RidgeTooSmall, match=r"ridge=1e-22 is too small"):
        factorize.ridge_factor(gram(9), whitened(kernel_matrix(n=9)), 4, [1.0, 1e-22, 1e-3], F64, 0.0)


@pytest.mark.parametrize("shift", [1e-3, 20.0, 1e6])
def test_ridge_factor__leads_with_the_eigenvalues_above_the_ridge(shift):
    whitening, G = whitened(kernel_matrix(n=9)), gram(9)
    found = factorize.ridge_factor(np.tril(G), whitening, 4, [shift / 4], F64, 0.0, with_leading=True)
    coordinates, values, left = found.leading
    S, Q = np.linalg.eigh(G)
    np.testing.assert_allclose(values, S[shift < S], rtol=1e-12)
    assert left == pytest.approx(max(S[shift >= S], default=0.0))
    b = np.random.default_rng(1).standard_normal(9)
    c = np.linalg.solve(whitening.inverse, b)
    np.testing.assert_allclose((coordinates @ c) ** 2, (Q.T @ b)[shift < S] ** 2, rtol=1e-7)


SPECTRA = {
    "even": np.linspace(0.0, 1.0, 300),
    "flat": np.ones(300),
    "decaying": np.exp(-np.arange(300) / 5.0),
    "crowded at the end": 1.0 - np.linspace(0.0, 1.0, 300) ** 2,
    "of rank one": np.eye(300)[0],
    "of one": np.ones(1),
}


@pytest.mark.parametrize("scale", [1.0, 1e-300, 1e300])
@pytest.mark.parametrize("spectrum", SPECTRA.values(), ids=SPECTRA)
def test_largest_eigenvalue__is_a_little_less_at_most(spectrum, scale):
    Q = np.linalg.qr(np.random.default_rng(1).standard_normal((len(spectrum), len(spectrum))))[0]
    G = (Q * spectrum) @ Q.T * scale
    assert 0.96 * scale < factorize.largest_eigenvalue(0.5 * (G + G.T)) < (1 + 1e-12) * scale


@pytest.mark.parametrize("diagonal", [[], [0.0, 0.0], [np.inf, 1.0]], ids=["nothing", "zeros", "overflow"])
def test_largest_eigenvalue__of_what_has_none_is_its_trace(diagonal):
    assert factorize.largest_eigenvalue(np.diag(np.array(diagonal))) == sum(diagonal)


def test_subset_factor__inverts_the_landmarks_kernel_plus_shift():
    W = kernel_matrix(n=9)
    factor = factorize.subset_factor(W, 0.7)
    np.testing.assert_allclose(factor @ (W + 0.7 * np.eye(9)) @ factor.T, np.eye(9), atol=1e-12)
    assert not np.triu(factor, 1).any()


# --- Resolution ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F64, F32])
def test_check_resolution__gives_the_share_and_a_ridge_that_works(dtype):
    assert resolution(6e-4, dtype) == pytest.approx(6e-6 / (6e-6 + 6e-4))
    with pytest.raises(RidgeTooSmall, match="smallest ridge that works is") as caught:
        resolution(1e-9, dtype, error=1e-4)
    smallest = smallest_named(caught.value)
    assert resolution(smallest, dtype, error=1e-4) <= factorize.MAX_RIDGE_SHARE
    with pytest.raises(RidgeTooSmall, match="works is"):
        resolution(0.9 * smallest, dtype, error=1e-4)


@pytest.mark.parametrize("dtype", [F64, F32])
def test_check_resolution__names_a_ridge_that_every_gram_matrix_allows(dtype):
    with pytest.raises(RidgeTooSmall, match="works is") as caught:
        resolution(1e-30, dtype, error=whitening.UNIT_ROUNDOFF[dtype], mean_diagonal=1.0, rank=9)
    worst = 4.0 * np.outer(np.eye(9)[0], np.eye(9)[0])
    assert ridged(worst, whitened(np.eye(9)), 4 * smallest_named(caught.value), dtype).gram_norm == pytest.approx(4.0)


def test_check_resolution__names_float64_where_it_helps():
    with pytest.raises(RidgeTooSmall, match="float64 tiles allow less"):
        resolution(1e-9, F32)
    assert resolution(1e-9, F32, mean_diagonal=0.0) == 0.0


def test_shift_of__is_rows_times_ridge():
    assert factorize.shift_of(40, 0.25) == 10.0
