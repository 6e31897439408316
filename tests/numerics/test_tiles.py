"""One block of rows, tile by tile, against dense algebra."""

import itertools
from dataclasses import replace

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskrr.errors import InvalidData, SourceChanged
from daskrr.kernels import Gaussian, Polynomial
from daskrr.numerics import factorize, panels, pass1, pass2, tiles
from daskrr.numerics.whitening import UNIT_ROUNDOFF, whiten

F64, F32 = np.dtype(np.float64), np.dtype(np.float32)
MU = 3.0
SHIFTS = np.array([MU])


def rows(n=30, d=2, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d))


GAUSSIAN = Gaussian(1.0)


def prepared(X, Z, kernel=GAUSSIAN, dtype=F64, combined=False):
    """Whitener and scorer for landmarks Z, the ridge from the Gram matrix of X."""
    W = kernel(Z, Z)
    whitening = whiten(W, UNIT_ROUNDOFF[dtype], dtype)
    assert whitening.rank == len(Z)
    landmarks = Z[whitening.pivots]
    columns = kernel.columns(landmarks, dtype)
    B = kernel(X, landmarks) @ whitening.inverse.T
    ridge = factorize.ridge_factor(B.T @ B, whitening, len(X), [MU / len(X)], dtype, 0.0)
    factors = (ridge.combined,) if combined else (whitening.inverse, ridge.inverse)
    error = 2.0 * len(Z) * whitening.kernel_error
    whitener = pass1.Whitener(columns, kernel.diagonal, whitening.inverse.astype(dtype), error)
    scorer = pass2.Scorer(columns, kernel.diagonal, tuple(f.astype(dtype) for f in factors), None, SHIFTS, error)
    return whitener, scorer, B


def both(scored):
    return np.column_stack([scored.scores, scored.estimate])


def cut(X, heights):
    return np.split(X, np.cumsum(heights)[:-1])


# --- Sizes --------------------------------------------------------------------------------------------


def test_tile_rows__are_powers_of_two_that_bound_the_work():
    heights = [tiles.tile_rows(p) for p in range(0, 30000, 97)]
    assert all(height & (height - 1) == 0 and height >= 32 for height in heights)
    assert all(a >= b for a, b in itertools.pairwise(heights))
    assert all(tiles.tile_rows(p) * p**2 <= tiles.TILE_FLOPS for p in (1, 500, 4000, 11000))


def gram_part(whitener, pieces, first_row):
    """Pass 1 on a block, with its Gram matrix."""
    return pass1.gram_block(whitener, pieces, first_row, sums=pass1.GramSum(len(whitener.inverse)))


# --- Pass 1 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("n", [30, 9000])
def test_gram_block__agrees_with_dense_algebra(dtype, n):
    X = rows(n)
    whitener, _, B = prepared(X, X[:6], dtype=dtype)
    part = gram_part(whitener, [X], 0)
    unit = 100 * UNIT_ROUNDOFF[dtype] / np.linalg.eigvalsh(Gaussian(1.0)(X[:6], X[:6])).min()
    np.testing.assert_allclose(np.tril(panels.matrix_of(part.gram, 6)), np.tril(B.T @ B), atol=unit * n)
    np.testing.assert_allclose(part.kept[0].residual, 1 - np.sum(B**2, axis=1), atol=unit)
    assert part.gram.dtype == part.kept[0].residual.dtype == np.float64
    assert part.totals.diagonal == n
    assert part.totals.largest == part.kept[0].residual.max()
    assert part.totals.smallest == part.kept[0].residual.min()
    assert part.totals.residual == pytest.approx(np.maximum(part.kept[0].residual, 0).sum())


@given(heights=st.lists(st.integers(1, 40), min_size=1, max_size=5))
@settings(max_examples=25)
def test_gram_block__does_not_depend_on_the_pieces(heights):
    X = rows(sum(heights))
    whitener, _, _ = prepared(X, rows(5, seed=1))
    whole, parts = (gram_part(whitener, pieces, 0) for pieces in ([X], cut(X, heights)))
    np.testing.assert_allclose(parts.gram, whole.gram, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(parts.kept[0].residual, whole.kept[0].residual, rtol=0, atol=1e-13)
    assert parts.kept[0].checksums == whole.kept[0].checksums == [google_crc32c.value(X.tobytes())]


class Chunked(list):
    """Pieces that know their chunks."""

    unit_rows = 7

    def describe(self, first, last):
        return f"chunk {first}-{last}"


@given(heights=st.lists(st.integers(1, 20), min_size=1, max_size=5), first=st.integers(0, 20))
@settings(max_examples=25)
def test_block_reader__takes_a_checksum_of_every_chunk(heights, first):
    X, stop = rows(sum(heights)), first + sum(heights)
    reader = tiles.BlockReader(Chunked(cut(X, heights)), first)
    assert sum(map(len, reader)) == len(X)
    bounds = sorted({first, stop, *range(first + -first % 7, stop, 7)})
    chunks = list(itertools.pairwise(bounds))
    assert reader.checksums == [google_crc32c.value(X[a - first : b - first].tobytes()) for a, b in chunks]
    assert [reader.name(number) for number in range(len(chunks))] == [f"chunk {a}-{b - 1}" for a, b in chunks]


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8", "uint8", "bool", ">f8"])
def test_gram_block__takes_every_input_dtype(dtype):
    X = (4 * rows()).astype(dtype) if dtype != "uint8" else np.abs(4 * rows()).astype(dtype)
    whitener, _, B = prepared(X.astype(float), rows(5, seed=1))
    kept = gram_part(whitener, [X], 0).kept[0]
    np.testing.assert_allclose(kept.residual, 1 - np.sum(B**2, axis=1), atol=1e-11)
    assert kept.checksums == [google_crc32c.value(X.tobytes())]


def test_gram_block__names_rows_that_are_not_finite():
    X = rows(40)
    X[[3, 5, 7, 9, 11, 13], 1] = np.nan
    X[30, 0] = np.inf
    whitener, _, _ = prepared(rows(), rows(5, seed=1))
    with pytest.raises(InvalidData, match=r"rows 100–119 .* in 6 rows: 103, 105, 107, 109, 111, …. Remove"):
        gram_part(whitener, cut(X, [20, 20]), 100)
    with pytest.raises(InvalidData, match=r"rows 120–139 .* in 1 rows: 130. Remove"):
        gram_part(whitener, cut(np.concatenate([rows(20), X[20:]]), [20, 20]), 100)


def test_gram_block__names_the_block_where_the_kernel_overflows():
    X = rows(20)
    whitener, _, _ = prepared(X, X[:3], Polynomial(4), F32)
    X[7] = 1e12
    with pytest.raises(InvalidData, match=r"rows from 50.*overflow.*float64"):
        gram_part(whitener, [X], 50)


# --- Pass 2 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("combined", [False, True])
def test_score_block__agrees_with_dense_algebra(dtype, combined):
    X = rows(200, 3)
    whitener, scorer, B = prepared(X, X[:8], dtype=dtype, combined=combined)
    kept = gram_part(whitener, [X], 0).kept[0]
    scores, estimate = both(pass2.score_block(scorer, [X], 0, kept)).T
    expected = np.sum(B * np.linalg.solve(B.T @ B + MU * np.eye(8), B.T).T, axis=1)
    np.testing.assert_allclose(scores, expected, atol=1e-12 if dtype == F64 else 1e-5)
    o, e = 1 - expected, np.maximum(1 - np.sum(B**2, axis=1), 0)
    np.testing.assert_allclose(estimate, 1 - o / (1 + e * o / MU), atol=1e-11 if dtype == F64 else 1e-4)


def test_score_block__caps_a_score_by_what_one_row_can_have():
    X = rows(5)
    whitener, scorer, _ = prepared(X, X[:2])
    kept = gram_part(whitener, [X], 0).kept[0]
    blown = replace(scorer, factors=(1e3 * scorer.factors[0], scorer.factors[1]), residual_error=0.0)
    scores = pass2.score_block(blown, [X], 0, kept).scores[:, 0]
    explained = 1 - kept.residual
    np.testing.assert_allclose(scores, explained / (explained + MU), rtol=1e-14)


def test_score_block__corrects_nothing_where_the_residual_is_round_off():
    X = rows(5)
    whitener, scorer, _ = prepared(X, X[:2])
    kept = gram_part(whitener, [X], 0).kept[0]
    scores, estimate = both(pass2.score_block(scorer, [X], 0, kept)).T
    assert np.all(estimate[:2] == scores[:2])
    assert np.all(estimate[2:] > scores[2:])


@pytest.mark.parametrize("combined", [False, True])
def test_score_block__notices_a_block_that_changed(combined):
    X = rows(20)
    whitener, scorer, _ = prepared(X, X[:3], combined=combined)
    kept = gram_part(whitener, [X], 40).kept[0]
    with pytest.raises(SourceChanged, match=r"rows from 40 changed.*pass 1 read 20 rows, pass 2 19"):
        pass2.score_block(scorer, [X[:-1]], 40, kept)
    X[11, 1] = np.nextafter(X[11, 1], 9)
    with pytest.raises(
        SourceChanged,
        match=r"^rows 40–59 of the input changed .* was [0-9a-f]{8} in pass 1 and is [0-9a-f]{8} in pass 2",
    ):
        pass2.score_block(scorer, [X], 40, kept)


@pytest.mark.parametrize("dtype", [F64, F32])
def test_drawn_rows_block__agrees_with_the_passes(dtype):
    X = rows(50)
    whitener, scorer, _ = prepared(X, X[:5], dtype=dtype)
    kept = gram_part(whitener, [X], 0).kept[0]
    seen = pass2.score_block(scorer, [X], 0, kept)
    drawn = pass2.drawn_rows_block(whitener, scorer, cut(X, [9, 41]))
    np.testing.assert_allclose(both(drawn), both(seen), atol=1e-6)
    np.testing.assert_allclose(drawn.facts.residual, kept.residual, atol=1e-6)


@pytest.mark.parametrize("dtype", [F64, F32])
def test_new_rows_block__divides_by_what_the_row_adds(dtype):
    X = rows(50)
    whitener, scorer, _ = prepared(X, X[:5], dtype=dtype)
    drawn = pass2.drawn_rows_block(whitener, scorer, [X])
    new = pass2.new_rows_block(whitener, scorer, cut(X, [9, 41]), 0)
    # A row of the data is in G already: as a new one it is there twice.
    s = drawn.scores
    np.testing.assert_allclose(new.leverage_function, s, atol=1e-6)
    np.testing.assert_allclose(new.scores, s / (1 + s), atol=1e-6)


def test_new_rows_block__names_rows_that_are_not_finite():
    X = rows(10)
    whitener, scorer, _ = prepared(X, X[:3])
    X[4] = np.inf
    with pytest.raises(InvalidData, match="in 1 rows: 14"):
        pass2.new_rows_block(whitener, scorer, [X], 10)


def test_blocks__may_be_empty():
    whitener, scorer, _ = prepared(rows(), rows(3, seed=1))
    part = gram_part(whitener, [], 0)
    assert not part.gram.any()
    assert both(pass2.score_block(scorer, [], 0, *part.kept)).shape == (0, 2)
    assert both(pass2.new_rows_block(whitener, scorer, [], 0)).shape == (0, 2)
