"""Scores from end to end: bounds against extended precision, dense oracles, invariance, laziness and refusals."""

import json
import re
from functools import partial

import dask
import dask.array as da
import numpy as np
import pytest
import strategies
from dask.callbacks import Callback
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import (
    CASES,
    DTYPES,
    KERNELS,
    SOURCES,
    as_zarr,
    certain,
    convert,
    counted,
    extended_scores,
    landmark_choices,
    negative_distance,
    negative_inner,
    problems,
    residual_budget,
    score,
    sigmoid,
)
from variants import examples, slow_but

import daskrr
from daskrr import exact
from daskrr.errors import InvalidData, InvalidParameter, KernelNotPositive, RidgeTooSmall, SourceChanged
from daskrr.kernels import Bernoulli, Cosine, Function, Gaussian, Laplacian, Linear, Matern, Polynomial
from daskrr.kernels.base import panel_rows
from daskrr.nystrom.audit import PROBE_ROWS
from daskrr.nystrom.sampling import Diagonal, Leverage, Probabilities, Uniform

U64 = 2.0**-53
RESOLVED = [
    Gaussian(0.8), Laplacian(1.0), Matern(1.0, 0.5), Matern(0.7, 1.5), Matern(0.7, 2.5), Linear() + Gaussian(0.5),
    2.0 * Laplacian(1.0), Laplacian(2.0) * Matern(2.0, 0.5),
]  # fmt: skip


def rows(n=60, d=3, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d))


def check_bounds(scored, diagonal):
    """What holds of every result, whatever the data."""
    scores, estimate, residual = scored[1:]
    assert np.isfinite(scored[1:]).all()
    assert np.all((scores >= 0) & (scores <= estimate) & (estimate <= 1))
    assert np.all(residual >= -residual_budget(scored, diagonal))
    assert np.all(residual <= diagonal)
    summary = scored.result.summary
    allowed = 10 * summary["score_error"] + (1e-9 if summary["parameters"]["dtype"] == "float64" else 1e-3)
    assert scores.sum() == pytest.approx(scored.result.sketch_dimension, rel=allowed, abs=1e-300)


# --- Bounds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tiles", "smallest", "count"),
    [
        ("float64", -8, 25),
        pytest.param("float64", -8, 80, marks=pytest.mark.slow),
        pytest.param("float32", -3, 60, marks=pytest.mark.slow),
    ],
)
def test_scores__never_exceed_the_exact_ones(tiles, smallest, count, tmp_path):
    @given(data=st.data(), problem=problems(), exponent=st.floats(smallest, 1), source=st.sampled_from(list(SOURCES)))
    @settings(max_examples=count)
    def holds(data, problem, exponent, source):
        X, kernel = problem.X, problem.kernel
        # Sums of the kernel must fit the tiles.
        assume(np.max(problem.diagonal) < 1e30)
        assume(np.any(problem.diagonal > 0))
        ridge = problem.ridge(10**exponent)
        options = data.draw(landmark_choices(len(X)))
        block_rows = data.draw(st.sampled_from([None, 2, 5, 10]))
        scored = score(SOURCES[source](X, tmp_path), kernel, ridge, block_rows=block_rows, dtype=tiles, **options)
        check_bounds(scored, problem.diagonal)
        expected = extended_scores(X.astype(float), kernel, ridge)
        assert np.all(certain(scored) <= expected + 1e-13)

    holds()


@pytest.mark.parametrize("tiles", slow_but(["float64", "float32"], "float64"))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "kernel",
    [
        Polynomial(2),
        *(
            pytest.param(kernel, marks=pytest.mark.slow)
            for kernel in (Linear(), Gaussian(1.5), Laplacian(1.5), Matern(1.5, 0.5))
        ),
    ],
    ids=repr,
)
def test_scores__never_exceed_the_exact_ones_of_more_rows(kernel, case, tiles):
    rng = np.random.default_rng(7)
    X = CASES[case](rng, rng.standard_normal((130, 6)))
    diagonal = kernel.diagonal(X)
    for relative in (1e-4, 1e-2) if tiles == "float64" else (1e-3,):
        ridge = relative * float(diagonal.mean())
        scored = score(X, kernel, ridge, 50, sampling="uniform", block_rows=37, dtype=tiles)
        check_bounds(scored, diagonal)
        oracle = exact.leverage_scores(X, kernel, ridge)
        slack = 1e-12 + 4 * U64 * np.linalg.norm(kernel(X, X), 2) / ridge
        assert np.all(certain(scored) <= oracle + slack)


@pytest.mark.parametrize("kernel", [Gaussian(3.0), Polynomial(3), Matern(4.0, 2.5)], ids=repr)
@pytest.mark.parametrize("relative", slow_but([1e-11, 1e-9], 1e-11))
def test_scores__never_exceed_the_exact_ones_at_tiny_ridges(kernel, relative):
    X = np.concatenate([rows(29, 2), [[60.0, -80.0]]])
    ridge = relative * float(kernel.diagonal(X).mean())
    scored = score(X, kernel, ridge, sampling=np.arange(0, 30, 2), block_rows=7)
    check_bounds(scored, kernel.diagonal(X))
    assert np.all(certain(scored) <= extended_scores(X, kernel, ridge) + 1e-13)


@pytest.mark.parametrize("tiles", ["float64", "float32"])
def test_estimate__is_exact_on_rows_that_nothing_is_near(tiles):
    X = np.concatenate([0.1 * rows(40, 2), [[100.0, 0.0], [0.0, 100.0]]])
    scored = score(X, Gaussian(1.0), 1e-2, sampling=np.arange(40), dtype=tiles, block_rows=9)
    expected = exact.leverage_scores(X, Gaussian(1.0), 1e-2)
    np.testing.assert_allclose(scored.scores[40:], 0, atol=1e-30)
    np.testing.assert_allclose(scored.estimate[40:], expected[40:], rtol=1e-6)
    np.testing.assert_array_equal(scored.residual[40:], 1)


@pytest.mark.parametrize("tiles", ["float64", "float32"])
@pytest.mark.parametrize("kernel", [Linear(), Gaussian(5.0)], ids=repr)
def test_estimate__does_not_take_round_off_for_a_residual(kernel, tiles):
    scored = score(rows(40), kernel, 1e-2, sampling=np.arange(40), block_rows=16, dtype=tiles)
    assert np.any(scored.residual > 0)
    np.testing.assert_array_equal(scored.estimate, scored.scores)


# --- Dense oracles ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_scores__with_every_row_as_a_landmark_are_the_exact_ones(kernel):
    X = rows(40)
    diagonal = kernel.diagonal(X)
    ridge = 1e-3 * float(diagonal.mean())
    scored = score(X, kernel, ridge, sampling=np.arange(40), block_rows=16)
    # What the shift and the dropped pivots take away, relative to the ridge.
    lost = (2 * 40 + 1) * scored.result.summary["diagonal_shift"] * diagonal.max() / (40 * ridge)
    expected = exact.leverage_scores(X, kernel, ridge)
    np.testing.assert_allclose(scored.scores, expected, rtol=0, atol=lost + 1e-7)
    assert lost < 1e-4


@pytest.mark.parametrize("tiles", ["float64", "float32"])
@pytest.mark.parametrize("kernel", RESOLVED, ids=repr)
def test_scores__agree_with_the_dense_approximation(kernel, tiles):
    X = rows(80, 6)
    indices = np.arange(3, 80, 7)
    scored = score(X, kernel, 0.02, sampling=indices, block_rows=17, dtype=tiles)
    tolerance = 1e-10 if tiles == "float64" else 2e-4
    np.testing.assert_allclose(scored.scores, exact.nystrom_scores(X, kernel, 0.02, indices), rtol=0, atol=tolerance)
    np.testing.assert_allclose(
        scored.residual, exact.residual(X, kernel, indices), rtol=0, atol=20 * tolerance * kernel.diagonal(X).max()
    )
    assert scored.result.rank == len(indices)


@pytest.mark.parametrize("kernel", [Linear(), Cosine(), Polynomial(2), Bernoulli(1)], ids=repr)
def test_scores__of_few_features_agree_with_the_dense_approximation(kernel):
    X = rows(80, 4)
    indices = np.array([5, 60, 33])
    scored = score(X, kernel, 0.02, sampling=indices, block_rows=17)
    np.testing.assert_allclose(scored.scores, exact.nystrom_scores(X, kernel, 0.02, indices), rtol=0, atol=1e-10)


@pytest.mark.parametrize("scheme", ["uniform", "diagonal", "probabilities"])
@pytest.mark.parametrize("sketch_ridge", [1e-4, 0.1])
def test_sketch_ridge__gives_the_regularised_approximation(scheme, sketch_ridge):
    X, kernel, n = rows(30), Linear() + Gaussian(1.0), 30
    choice = {
        "uniform": Uniform(sketch_ridge=sketch_ridge),
        "diagonal": Diagonal(sketch_ridge=sketch_ridge),
        "probabilities": Probabilities(np.full(n, 1 / n), sketch_ridge=sketch_ridge),
    }[scheme]
    scored = score(X, kernel, 0.02, 45, sampling=choice, block_rows=8)
    drawn = scored.result.sketch.landmarks
    assert drawn.counts.max() > 1
    probability = kernel.diagonal(X) / kernel.diagonal(X).sum() if scheme == "diagonal" else np.full(n, 1 / n)
    weights = n * sketch_ridge * np.diag(45 * probability[drawn.indices] / drawn.counts)
    C = kernel(X, X[drawn.indices])
    L = C @ np.linalg.solve(C[drawn.indices] + weights, C.T)
    expected = np.diagonal(np.linalg.solve(L + n * 0.02 * np.eye(n), L))
    np.testing.assert_allclose(scored.scores, expected, rtol=0, atol=1e-9)
    np.testing.assert_allclose(scored.residual, kernel.diagonal(X) - np.diagonal(L), rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", [Uniform, Diagonal, Leverage, partial(Probabilities, np.full(60, 1 / 60))])
def test_sketch_ridge__of_zero_is_none(kind):
    plain, zero = (score(rows(), Gaussian(1.0), 0.1, 20, sampling=kind(**more)) for more in ({}, {"sketch_ridge": 0}))
    np.testing.assert_array_equal(plain.scores, zero.scores)


@pytest.mark.parametrize("kind", ["few", "all"])
def test_scores__of_landmarks_at_zero_are_zero(kind):
    X = rows(12)
    X[:4] = 0.0
    X = X if kind == "few" else 0.0 * X
    scored = score(X, Linear(), 0.1, sampling=np.arange(4), block_rows=5)
    diagonal = Linear().diagonal(X)
    np.testing.assert_array_equal(scored.scores, 0)
    np.testing.assert_array_equal(scored.residual, diagonal)
    np.testing.assert_allclose(scored.estimate, diagonal / (diagonal + 1.2), rtol=1e-14)
    assert (scored.result.rank, scored.result.sketch_dimension) == (0, 0.0)
    assert "rank 0" in repr(scored.result)
    np.testing.assert_array_equal(scored.result.sketch.scores(X).compute(), 0)


@pytest.mark.parametrize("tiles", ["float64", "float32"])
@pytest.mark.parametrize("far", [1e3, 1e9, 1e12])
def test_scores__of_a_far_row_keep_what_little_is_explained(far, tiles, tmp_path):
    # The landmark explains 1 of the far row's 1 + far²; the sum of the scores must still hold when they are stored.
    X = np.array([[1.0, 0.0], [1.0, far]])
    ridge = far**2 / 2
    scored = score(X, Linear(), ridge, sampling=[0], dtype=tiles)
    np.testing.assert_allclose(scored.scores, 1 / (2 + 2 * ridge), rtol=1e-4 if tiles == "float32" else 1e-9)
    assert scored.result.store(tmp_path / "out.zarr", progress=False)["n_rows"] == 2


@pytest.mark.parametrize("shape", [(1, 5), (7, 1)])
@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_scores__of_the_smallest_problems(kernel, shape):
    X = rows(*shape)
    ridge = 0.1 * float(kernel.diagonal(X).mean())
    scored = score(X, kernel, ridge, 3 * len(X), block_rows=2)
    check_bounds(scored, kernel.diagonal(X))
    assert np.all(certain(scored) <= exact.leverage_scores(X, kernel, ridge) + 1e-12)


def test_scores__of_one_repeated_row_have_rank_one():
    X = np.repeat(rows(1), 50, axis=0)
    scored = score(X, Gaussian(1.0), 0.1, 20, block_rows=13)
    assert scored.result.rank == 1
    np.testing.assert_allclose(scored.scores, 1 / (50 + 50 * 0.1), rtol=1e-9)


# --- Invariance ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1e-6, 3.0, 2.0**40])
@pytest.mark.parametrize("kernel", [Gaussian(1.0), Linear()], ids=repr)
def test_scores__are_free_of_units(kernel, factor):
    plain = score(rows(), kernel, 1e-2, 12, block_rows=20)
    scaled = score(rows(), factor * kernel, factor * 1e-2, 12, block_rows=20)
    assert plain.result.sketch.landmarks.indices.tolist() == scaled.result.sketch.landmarks.indices.tolist()
    np.testing.assert_allclose(scaled.scores, plain.scores, rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(scaled.estimate, plain.estimate, rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(scaled.residual, factor * plain.residual, rtol=1e-7, atol=1e-11 * factor)


@examples(3, 8, seed=st.integers(0, 1000))
def test_scores__move_with_their_rows(seed):
    X, kernel = rows(), Matern(1.0, 0.5)
    order = np.random.default_rng(seed).permutation(60)
    places = np.argsort(order)
    indices = np.arange(0, 60, 5)
    plain = score(X, kernel, 1e-2, sampling=indices, block_rows=11)
    moved = score(X[order], kernel, 1e-2, sampling=places[indices], block_rows=23)
    np.testing.assert_allclose(moved.scores, plain.scores[order], rtol=0, atol=1e-12)
    np.testing.assert_allclose(moved.residual, plain.residual[order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("block_rows", slow_but([None, 1, 7, 60], None, 7))
@pytest.mark.parametrize("tiles", ["float64", "float32"])
def test_scores__do_not_depend_on_blocks_beyond_round_off(block_rows, tiles):
    plain = score(rows(), Laplacian(1.0), 1e-2, 20, block_rows=16, dtype=tiles)
    other = score(rows(), Laplacian(1.0), 1e-2, 20, block_rows=block_rows, dtype=tiles)
    assert plain.result.sketch.landmarks.indices.tolist() == other.result.sketch.landmarks.indices.tolist()
    np.testing.assert_allclose(other.scores, plain.scores, rtol=0, atol=1e-12 if tiles == "float64" else 1e-5)


def test_scores__do_not_depend_on_the_order_of_landmarks():
    sorted_, reverse, doubled = (
        score(rows(), Gaussian(1.0), 1e-2, sampling=choice, block_rows=16)
        for choice in ([3, 8, 40], [40, 8, 3], [3, 3, 40, 8, 40])
    )
    np.testing.assert_array_equal(reverse.scores, sorted_.scores)
    np.testing.assert_array_equal(doubled.scores, sorted_.scores)
    assert doubled.result.sketch.landmarks.counts.tolist() == [2, 1, 2]


@pytest.mark.parametrize(
    ("dtype", "tiles"),
    [
        ("float64", "float64"),
        pytest.param("float64", "float32", marks=pytest.mark.slow),
        *(pytest.param(dtype, "float64", marks=pytest.mark.slow) for dtype in DTYPES if dtype != "float64"),
    ],
)
def test_scores__have_the_same_bits_of_every_source(dtype, tiles, tmp_path):
    X = convert(rows(47, 3), dtype)
    runs = [
        score(make(X, tmp_path), Gaussian(1.0) + Linear(), 1e-2, 15, block_rows=10, dtype=tiles)
        for make in SOURCES.values()
    ]
    for scored in runs[1:]:
        for found, expected in zip(scored[1:], runs[0][1:], strict=True):
            np.testing.assert_array_equal(found, expected)


def test_scores__repeat_with_their_seed():
    first, second = (score(rows(), Gaussian(1.0), 1e-2, 10, random_state=None, block_rows=16) for _ in range(2))
    seeds = [scored.result.summary["parameters"]["random_state"] for scored in (first, second)]
    assert seeds[0] != seeds[1]
    again = score(rows(), Gaussian(1.0), 1e-2, 10, random_state=seeds[0], block_rows=16)
    for found, expected in zip(again[1:], first[1:], strict=True):
        np.testing.assert_array_equal(found, expected)
    assert not np.array_equal(first.scores, second.scores)


def test_median__is_measured_on_a_seeded_sample():
    X = rows(50)
    results = [score(source, Gaussian("median"), 1e-2, 10).result for source in (X, da.from_array(X, chunks=(7, 3)))]
    scales = [result.sketch.kernel.length_scale for result in results]
    assert scales[0] == scales[1] == Gaussian("median").resolve(X).length_scale
    assert results[0].summary["parameters"]["kernel"]["length_scale"] == scales[0]


# --- The result ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["estimate", "scores"])
@pytest.mark.parametrize("k", [1, 9, 100])
def test_top__equals_sorting(by, k):
    scored = score(np.repeat(rows(20), 3, axis=0), Gaussian(1.0), 1e-2, 10, block_rows=16)
    order = np.argsort(-getattr(scored, by), kind="stable")[:k]
    top = scored.result.top(k, by)
    assert top.rows.tolist() == order.tolist()
    for name in ("scores", "estimate", "residual"):
        np.testing.assert_array_equal(getattr(top, name), getattr(scored, name)[order])
    np.testing.assert_array_equal(top.values, getattr(scored, by)[order])
    *lines, ceiling = str(top).splitlines()
    assert len(lines) == len(top) + 1 == min(k, 60) + 1
    assert ceiling.startswith("No score exceeds k/(k + nλ) = 0.625")


@examples(25, 100, problem=problems(max_rows=9, dtypes=["float64"]), relative=st.sampled_from([1e-6, 1e-2, 10.0]))
def test_ceilings__are_exceeded_by_no_exact_score_and_reached_by_a_lone_row(problem, relative):
    kernel, n_rows = problem.kernel, len(problem.X)
    assume(problem.diagonal.any())
    ridge = problem.ridge(relative)
    ceilings = score(problem.X, kernel, ridge, sampling=np.arange(n_rows)).result.sketch.ceilings
    if not kernel.constant_diagonal:
        assert ceilings is None
        return
    (ceiling,) = ceilings
    assert np.all(daskrr.exact.leverage_scores(problem.X, kernel, ridge) <= ceiling * (1 + 1e-9))
    assert daskrr.exact.leverage_scores(problem.X[:1], kernel, n_rows * ridge) == pytest.approx(ceiling, rel=1e-9)


def test_top__says_how_many_rows_are_at_the_ceiling():
    alone = np.arange(5)[:, None] * [100.0]
    crowd = np.linspace(-60.0, -59.0, 95)[:, None]
    result = score(np.concatenate([crowd, alone]), Gaussian(1.0), 1e-2, 40, certify=True).result
    assert str(result.top(8)).endswith("like no other; 5 of these are within 1 % of it.")
    assert str(result.top(5)).endswith("like no other; 5 of these are within 1 % of it, and further rows may be.")
    assert str(result.top(3, ridge=1e-2)).splitlines()[-1].startswith("No score exceeds k/(k + nλ) = 0.5,")
    assert "k/(k + nλ) = 0.5" in result.top(3)._repr_html_()
    assert result.profile().at_ceiling[0] == 5
    assert "highest score possible: 0.5" in repr(result)
    assert "highest score possible" in result._repr_html_()


def test_top__of_rows_that_differ_in_their_kernel_has_no_ceiling():
    plain = score(rows(), Linear(), 1e-2, 10).result
    weighted = score(rows(), Gaussian(1.0), 1e-2, 10, sample_weight=np.linspace(1, 2, len(rows()))).result
    for result in (plain, weighted):
        assert result.summary["ceiling"] is None
        assert "exceeds" not in str(result.top(3))
        assert "ceiling" not in result.top(3).to_records()[0]
        assert "highest score possible: differs" in repr(result)


@pytest.mark.parametrize("k", [0, -3, 2.5, "3", True, None])
def test_top__needs_a_positive_number(k):
    with pytest.raises(InvalidParameter, match="k must be"):
        score(rows(), Gaussian(1.0), 1e-2, 10).result.top(k)


def test_top__ranks_by_what_there_is():
    with pytest.raises(InvalidParameter, match="scores, estimate, lower, upper, got 'residual'"):
        score(rows(), Gaussian(1.0), 1e-2, 10).result.top(3, "residual")


@pytest.mark.parametrize("ridge", [1e-1, 1e-5])
@pytest.mark.parametrize("tiles", ["float64", "float32"])
def test_sketch__knows_the_rows_it_was_fitted_to(tiles, ridge):
    scored = score(rows(), Matern(1.0, 0.5), ridge, 20, block_rows=16, dtype=tiles)
    sketch, tolerance = scored.result.sketch, 1e-7 if tiles == "float64" else 2e-2
    for source in (rows(), da.from_array(rows(), chunks=(9, 2)), as_zarr(rows(), (7, 3))):
        # In the data already, as a new row it is there twice, and G is that of the data without the second.
        np.testing.assert_allclose(sketch.leverage_function(source).compute(), scored.scores, rtol=0, atol=tolerance)
        expected = scored.scores / (1 + scored.scores)
        np.testing.assert_allclose(sketch.scores(source).compute(), expected, rtol=0, atol=tolerance)
        np.testing.assert_allclose(sketch.residual(source).compute(), scored.residual, rtol=0, atol=tolerance)


def test_sketch__scores_new_rows_by_the_dense_formula():
    X, new, kernel = rows(), 1.5 * rows(31, seed=1), Matern(1.0, 1.5)
    indices, mu = np.arange(0, 60, 6), 60 * 0.05
    sketch = score(X, kernel, 0.05, sampling=indices).result.sketch
    W, C, c = kernel(X[indices], X[indices]), kernel(X, X[indices]), kernel(new, X[indices])
    raw = np.sum(c * np.linalg.solve(C.T @ C + mu * W, c.T).T, axis=1)
    explained = np.sum(c * np.linalg.solve(W, c.T).T, axis=1)
    expected = raw / (1 + raw)
    np.testing.assert_allclose(sketch.scores(new).compute(), expected, rtol=1e-9)
    np.testing.assert_allclose(sketch.leverage_function(new).compute(), raw, rtol=1e-9)
    np.testing.assert_allclose(sketch.residual(new).compute(), 1 - explained, rtol=0, atol=1e-11)
    e, o = 1 - explained, 1 - expected
    estimate = sketch.estimate(new).compute()
    assert (estimate >= expected * (1 - 1e-9)).all()
    assert (estimate <= (1 - o / (1 + e * o / mu)) * (1 + 1e-9)).all()


def test_sketch__keeps_new_rows_apart():
    sketch = score(rows(), Gaussian(1.0), 1e-2, 10).result.sketch
    assert len({sketch.scores(rows() + shift).name for shift in range(100)}) == 100
    lazy = [sketch.scores(rows() + shift) for shift in range(8)]
    for shift, found in enumerate(dask.compute(*lazy)):
        np.testing.assert_array_equal(found, sketch.scores(rows() + shift).compute())


def test_sketch__refuses_other_features():
    sketch = score(rows(), Gaussian(1.0), 1e-2, 10).result.sketch
    with pytest.raises(InvalidData, match="X_new has 2 features; the sketch was fitted to 3"):
        sketch.scores(rows(5, 2))
    with pytest.raises(InvalidData, match="X_new must have 2 dimension"):
        sketch.scores(rows()[0])
    bad = rows(5)
    bad[3, 1] = np.inf
    with pytest.raises(InvalidData, match="in 1 rows: 3"):
        sketch.scores(bad).compute()


def test_repr__tells_rows_kernel_and_rank():
    result = score(rows(), Gaussian(1.0), 1e-2, 10).result
    for text in (repr(result), result._repr_html_(), repr(result.sketch), result.sketch._repr_html_()):
        assert "60" in text
        assert "Gaussian(length_scale=1.0)" in text
        assert f"rank {result.rank}" in text.replace("rank  ", "rank ")
    assert "<table style=" in result._repr_html_()


def test_summary__is_ready_for_json():
    summary = score(rows(), Gaussian((1.0, 2.0, 3.0)), 1e-2, 10, dtype="float32").result.summary
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary["parameters"]["dtype"] == "float32"


# --- Laziness -----------------------------------------------------------------------------------------


class Counter(Callback):
    def __init__(self):
        super().__init__(pretask=self.count)
        self.keys = []

    def count(self, key, *_):
        self.keys.append(key)


def test_scores__are_computed_once_and_only_when_asked():
    strategies.CALLS.clear()
    result = daskrr.leverage_scores(rows(), Function(counted), 1e-2, 5, random_state=0, block_rows=10, progress=False)
    before = len(strategies.CALLS)
    lazy = result.scores, result.estimate, result.residual
    assert len(strategies.CALLS) == before
    assert all(array.chunks == ((10,) * 6,) and array.dtype == np.float64 for array in lazy)
    with Counter() as counter:
        dask.compute(*lazy)
    scored = [key for key in counter.keys if str(key).startswith("score-rows")]
    assert len(scored) == len(set(scored)) == 6
    assert len(strategies.CALLS) > before
    after = len(strategies.CALLS)
    result.residual.compute()
    assert len(strategies.CALLS) == after


def test_scores__can_be_sliced_without_computing_the_rest():
    result = daskrr.leverage_scores(
        rows(), Function(counted), 1e-2, sampling=np.arange(5), block_rows=10, random_state=0, progress=False
    )
    strategies.CALLS.clear()
    part = result.scores[20:25].compute()
    assert sorted(strategies.CALLS) == [(10, 5), (10, 10), (10, PROBE_ROWS)]
    np.testing.assert_array_equal(part, result.scores.compute()[20:25])


def test_kernel__is_never_called_on_all_pairs(monkeypatch):
    monkeypatch.setattr(exact, "leverage_scores", None)
    monkeypatch.setattr(exact, "nystrom_scores", None)
    strategies.CALLS.clear()
    score(rows(2500), Function(counted), 1e-2, sampling=np.arange(12))
    assert max(m * p for m, p in strategies.CALLS) <= panel_rows(12) * PROBE_ROWS
    assert max(p for _, p in strategies.CALLS) <= PROBE_ROWS
    assert max(m for m, _ in strategies.CALLS) <= panel_rows(12) < 2500


# --- A source that changes ----------------------------------------------------------------------------


class Changing:
    """Blocks of rows, the third of which has other values from the given reading on."""

    def __init__(self, first):
        self.first, self.readings = first, 0

    def __call__(self, block, block_info=None):
        if block_info[0]["chunk-location"][0] != 2:
            return block
        self.readings += 1
        return block + (self.readings >= self.first) * 1e-9

    def __dask_tokenize__(self):
        return id(self)


def changing(first):
    return da.from_array(rows(), chunks=(10, 3)).map_blocks(Changing(first), dtype=float, meta=np.empty((0, 0)))


@pytest.mark.parametrize("use", ["scores", "top", "store"])
def test_source__that_changes_between_the_passes_is_caught(use, tmp_path):
    # Readings of the third chunk: landmarks, pass 1, pass 2.
    result = daskrr.leverage_scores(
        changing(3), Gaussian(1.0), 1e-2, sampling=[21, 22], block_rows=10, random_state=0, progress=False
    )
    calls = {
        "scores": lambda: result.scores.compute(),
        "top": lambda: result.top(3),
        "store": lambda: result.store(tmp_path / "out.zarr", progress=False),
    }
    with pytest.raises(SourceChanged, match="rows 20–29 of the input changed between the passes"):
        calls[use]()
    assert list(tmp_path.iterdir()) == []


def test_source__that_stays_is_not_accused():
    scored = score(changing(99), Gaussian(1.0), 1e-2, sampling=[21, 22], block_rows=10)
    np.testing.assert_array_equal(
        scored.scores, score(rows(), Gaussian(1.0), 1e-2, sampling=[21, 22], block_rows=10)[1]
    )


def test_source__in_memory_that_changes_is_caught():
    X = rows()
    result = daskrr.leverage_scores(X, Gaussian(1.0), 1e-2, 5, random_state=0, block_rows=10, progress=False)
    X[33, 1] += 1.0
    with pytest.raises(SourceChanged, match="rows 30–39 of the input changed"):
        result.scores.compute()


# --- Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiles", ["float64", "float32"])
@pytest.mark.parametrize("kernel", [Gaussian(3.0), Polynomial(2), Linear(), Laplacian(0.1)], ids=repr)
@pytest.mark.parametrize("p", [1, 20])
def test_ridge__too_small_is_refused_with_one_that_works(kernel, tiles, p):
    X = rows()
    with pytest.raises(RidgeTooSmall, match="smallest ridge that works is") as caught:
        score(X, kernel, 1e-25, p, dtype=tiles)
    smallest = float(re.search(r"works is (\d[\d.e+-]*\d)", str(caught.value)).group(1))
    check_bounds(score(X, kernel, 1.01 * smallest, p, dtype=tiles), kernel.diagonal(X))


@pytest.mark.parametrize("function", [negative_distance, negative_inner, sigmoid])
@pytest.mark.parametrize("tiles", ["float64", "float32"])
def test_kernel__that_is_not_positive_is_refused(function, tiles):
    with pytest.raises(KernelNotPositive, match=r"landmark number \d+ has the pivot (-\d|0)"):
        score(rows(), function, 1e-2, 20, sampling="uniform", dtype=tiles)


GOOD = {"kernel": Gaussian(1.0), "ridge": 0.1, "landmarks": 5}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ridge": 0.0}, "ridge must be positive and finite"),
        ({"ridge": -1.0}, "ridge must be positive and finite"),
        ({"ridge": np.nan}, "ridge must be positive and finite"),
        ({"ridge": np.inf}, "ridge must be positive and finite"),
        ({"ridge": "0.1"}, "ridge must be a number, got '0.1'"),
        ({"ridge": "small"}, "ridge must be a number"),
        ({"ridge": True}, "ridge must be a number"),
        ({"ridge": []}, "ridge must be a number or a list of numbers, got an empty list"),
        ({"ridge": [0.1, 0.2, 0.1]}, "ridge 0.1 is in the list 2 times"),
        ({"ridge": [0.1, -1.0]}, "every ridge must be positive and finite, got -1.0"),
        ({"landmarks": 0}, "landmarks must be an int of at least 1"),
        ({"landmarks": np.arange(5)}, "landmarks must be an int of at least 1"),
        ({"landmarks": -3}, "landmarks must be an int"),
        ({"landmarks": 5.0}, "landmarks must be an int"),
        ({"landmarks": True}, "landmarks must be an int"),
        ({"landmarks": None, "sampling": "uniform"}, "landmarks, a number, is needed with sampling='uniform'"),
        ({"landmarks": "5"}, "landmarks must be an int"),
        ({"landmarks": None, "sampling": np.full(60, 1 / 60)}, "landmarks, a number, is needed"),
        ({"sampling": "leverages"}, "sampling must be one of residual, leverage, diagonal, uniform"),
        ({"sampling": np.ones(60, bool)}, "either 60 probabilities .* or the row numbers"),
        ({"sampling": np.full(59, 1 / 59)}, "either 60 probabilities .* or the row numbers"),
        ({"dtype": "float16"}, "dtype must be 'float64' or 'float32', got 'float16'"),
        ({"dtype": "int64"}, "dtype must be"),
        ({"dtype": "nonsense"}, "dtype must be"),
        ({"random_state": 0.5}, "random_state must be"),
        ({"block_rows": 0}, "block_rows must be"),
        ({"missing_chunks": "guess"}, "missing_chunks must be"),
        ({"kernel": Gaussian((1.0, 2.0))}, "length_scale has 2 entries, the rows have 3 features"),
        ({"kernel": 3}, "is not a kernel"),
        ({"kernel": {"kernel": "gauss"}}, "unknown kernel 'gauss'"),
        ({"kernel": lambda X, Z: X @ Z.T}, "no name to import it by"),
    ],
)
@pytest.mark.parametrize("call", [daskrr.plan, daskrr.leverage_scores])
def test_arguments__out_of_range_are_refused(change, message, call):
    with pytest.raises(InvalidParameter, match=message):
        call(rows(), **GOOD | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampling": [0, 60]}, "index 60 is out of range: X has 60 rows"),
        ({"sampling": [0, -1]}, "index -1 is out of range"),
        ({"landmarks": 3, "sampling": [0, 1]}, "landmarks=3, but sampling gives 2"),
        ({"sampling": np.empty(0, int)}, "non-empty 1-D integer"),
    ],
)
def test_indices__that_are_no_rows_are_refused(change, message):
    with pytest.raises(InvalidParameter, match=message):
        score(rows(), Gaussian(1.0), 0.1, **change)


@pytest.mark.parametrize("source", ["numpy", "dask", "zarr"])
@pytest.mark.parametrize(("bad", "dtype"), [(np.nan, "float64"), (np.inf, "float32"), (-np.inf, "float16")])
def test_rows__that_are_not_finite_are_named(source, bad, dtype, tmp_path):
    X = rows().astype(dtype)
    X[33, 2] = bad
    source = SOURCES[source](X, tmp_path)
    with pytest.raises(InvalidData, match="NaN or infinity in 1 rows: 33"):
        score(source, Gaussian(1.0), 0.1, sampling=[2, 33], block_rows=10)
    with pytest.raises(InvalidData, match="rows 30–39 of the input hold NaN or infinity in 1 rows: 33"):
        score(source, Gaussian(1.0), 0.1, sampling=[2, 34], block_rows=10)


@pytest.mark.parametrize("tiles", ["float64", "float32"])
@pytest.mark.parametrize(("size", "kernel"), [(1e200, Linear()), (1e60, Polynomial(4))])
@pytest.mark.parametrize("sampling", ["uniform", "diagonal", [0, 1]])
def test_rows__that_overflow_the_kernel_are_refused(tiles, size, kernel, sampling):
    X = rows()
    with pytest.raises(InvalidData, match=r"overflow|not finite|must be finite"):
        score(size * X, kernel, 0.1, None if sampling == [0, 1] else 5, sampling=sampling, dtype=tiles)
    X[40] = size
    with pytest.raises(InvalidData, match=r"overflow|not finite|must be finite"):
        score(X, kernel, 0.1, sampling=[0, 1], dtype=tiles)


@pytest.mark.parametrize(
    ("X", "kernel"),
    [
        (1e6 + rows(), Polynomial(3, 0.5, 2.0)),
        (1e18 * rows(), Linear()),
        (np.vstack([rows(), [[1e6] * 3]]), Polynomial(4)),
    ],
)
def test_rows__that_overflow_float32_alone_are_refused_or_scored(X, kernel):
    ridge = 0.1 * float(kernel.diagonal(X).mean())
    check_bounds(score(X, kernel, ridge, sampling=np.arange(10), block_rows=20), kernel.diagonal(X))
    try:
        scored = score(X, kernel, ridge, sampling=np.arange(10), block_rows=20, dtype="float32")
    except InvalidData as error:
        assert "use dtype='float64'" in str(error)  # noqa: PT017
        return
    check_bounds(scored, kernel.diagonal(X))


def test_rows__that_underflow_float32_are_refused_or_scored():
    X = 1e-25 * rows()
    for ridge in (1e-40, 1e-49, 1e-52):
        try:
            check_bounds(score(X, Linear(), ridge, 5, dtype="float32"), Linear().diagonal(X))
        except (RidgeTooSmall, InvalidData) as error:
            assert "float64" in str(error)  # noqa: PT017


def biased_far_away(X, Z):
    """A Gaussian whose rows with a large first feature claim to be nearer to the others than to themselves."""
    return daskrr.kernels.Gaussian(1.0)(X, Z) + 3.0 * (X[:, :1] > 1.0) * (Z[:, 0] <= 1.0)


def test_kernel__that_is_positive_on_the_landmarks_alone_is_refused():
    X = np.random.default_rng(0).standard_normal((60, 2))
    landmarks = np.flatnonzero(X[:, 0] <= 1.0)[:20]
    with pytest.raises(KernelNotPositive, match=r"landmarks explain .* of row \d+, whose own k\(x, x\) is 1"):
        daskrr.leverage_scores(X, daskrr.kernels.Function(biased_far_away), 1e-2, sampling=landmarks)


# --- What is done otherwise than it was asked for -------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"sampling": "uniform"}, {"sampling": "diagonal", "certify": True}])
def test_n_landmarks__above_the_rows_are_said_to_be_cut(options, caplog):
    X = np.random.default_rng(0).standard_normal((60, 2))
    cut = "landmarks=61 was cut to the 60 rows there are: a row can be a landmark only once."
    found = daskrr.leverage_scores(X, Gaussian(1.0), 1e-2, 61, progress=False, random_state=0, **options)
    assert found.summary["notes"] == [cut]
    assert [record.message for record in caplog.records if record.name == "daskrr"] == [cut]
    assert "61 draws, cut to the 60 rows there are" in str(found.plan)
    caplog.clear()
    assert not daskrr.leverage_scores(X, Gaussian(1.0), 1e-2, 60, progress=False, **options).summary["notes"]
    assert not daskrr.leverage_scores(X, Gaussian(1.0), 1e-2, progress=False).summary["notes"]
    assert "cut" not in caplog.text
    daskrr.NystromKernelRidge(Gaussian(1.0), landmarks=61).fit(X, X[:, 0])
    assert cut in caplog.text


def rows_of_rank(n, rank):
    random = np.random.default_rng(0)
    return random.standard_normal((n, rank)) @ random.standard_normal((rank, 8))


@pytest.mark.parametrize(
    ("X", "kernel", "ridges", "too_small"),
    [
        (rows_of_rank(300, 8), Gaussian(1.0), [1e-12], [1e-12]),
        (rows_of_rank(300, 8), Gaussian(1.0), [1e-1, 1e-12, 1e-10], [1e-12, 1e-10]),
        (rows_of_rank(300, 8), Gaussian(1.0), [1e-3], []),
        (rows_of_rank(300, 3), Linear(), [1e-10], []),  # leverage of least squares, which says much
        (rows_of_rank(300, 8), Gaussian(5.0), [1e-4], []),
    ],
)
def test_store__notes_a_ridge_at_which_most_estimates_are_1(X, kernel, ridges, too_small, tmp_path, caplog):
    found = daskrr.leverage_scores(X, kernel, ridges, 100, progress=False, random_state=0)
    notes = found.store(tmp_path / "out.zarr")["notes"]
    saturated = (found.estimate.compute() > 0.99).mean(axis=0)
    assert [ridge for ridge, share in zip(ridges, saturated, strict=True) if share > 0.5] == too_small
    assert len(notes) == len(too_small)
    for ridge, note in zip(too_small, notes, strict=True):
        assert note.startswith(f"the ridge {ridge:g} is so small that ")
        assert note in caplog.text


def test_ridge_notes__name_a_ridge_that_is_large_enough(tmp_path):
    X = rows_of_rank(200, 8)
    notes = daskrr.leverage_scores(X, Linear() + Gaussian(0.1), 1e-10, 150, progress=False).store(tmp_path / "a")[
        "notes"
    ]
    named = float(re.search(r"larger ridge: at ([^,]+), the mean", notes[0])[1])
    K = (Linear() + Gaussian(0.1))(X, X)
    average = np.abs(np.diagonal(K) - np.diagonal(K).mean()).argmin()
    assert exact.leverage_scores(X, Linear() + Gaussian(0.1), named)[average] <= 0.51
