"""The audit: the largest eigenvalue of what the landmarks leave unexplained, never underestimated."""

import math
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import sigmoid
from threadpoolctl import threadpool_limits
from variants import slow_but

import daskrr
from daskrr import exact
from daskrr.errors import DaskrrError
from daskrr.kernels import Gaussian, Laplacian, Linear, Matern, Polynomial
from daskrr.leverage import algorithm
from daskrr.numerics.bounds import deviation_bound
from daskrr.numerics.reservoir import Order, Reservoir
from daskrr.nystrom import audit
from daskrr.nystrom.audit import audit_draws, confirmed_largest_eigenvalue, draw_apart, probe_draw
from daskrr.nystrom.factors import whitener
from daskrr.nystrom.growing import landmark_draw
from daskrr.nystrom.landmarks import child, stream
from daskrr.nystrom.reading import whitener_of
from daskrr.nystrom.strategies import Certify


@pytest.fixture(autouse=True)
def _one_thread():
    """Dense oracles on few cores are fastest without the threads of BLAS."""
    with threadpool_limits(1):
        yield


def rows(n=60, d=3, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d))


def certified(X, kernel, ridge, landmarks=None, **options):
    options = {"random_state": 0, "progress": False, "certify": True} | options
    return daskrr.leverage_scores(X, kernel, ridge, landmarks, **options)


def residual_matrix(X, kernel, indices):
    K, C = kernel(X, X), kernel(X, X[indices])
    return K - C @ np.linalg.pinv(C[indices], hermitian=True) @ C.T


def symmetric(n, seed, rank=None):
    rng = np.random.default_rng(seed)
    A = rng.standard_normal((n, rank or n))
    return A @ A.T


# --- Eigenvalues --------------------------------------------------------------------------------------


def check_eigenvalue(H):
    found, largest = confirmed_largest_eigenvalue(H), float(np.linalg.eigvalsh(H)[-1])
    norm = float(np.abs(np.linalg.eigvalsh(H)).max())
    assert found >= largest - 1e-14 * norm
    assert found <= 1.03 * max(largest, 0.0) + 1e-10 * norm
    return found


@given(n=st.integers(1, 60), rank=st.integers(1, 60), seed=st.integers(0, 2**32), exponent=st.floats(-30, 30))
@settings(max_examples=50)
def test_confirmed_largest_eigenvalue__is_a_tight_upper_bound(n, rank, seed, exponent):
    check_eigenvalue(10.0**exponent * symmetric(n, seed, rank))


@pytest.mark.parametrize("n", [199, 200, 201, 450])
@pytest.mark.parametrize("rank", [1, 5, None])
def test_confirmed_largest_eigenvalue__of_larger_matrices_is_a_tight_upper_bound(n, rank):
    check_eigenvalue(symmetric(n, n, rank))


@pytest.mark.parametrize("n", [5, 150, 260])
def test_confirmed_largest_eigenvalue__allows_for_a_negative_part(n):
    H = symmetric(n, 1, 3) - 0.5 * symmetric(n, 2, 3)
    check_eigenvalue(0.5 * (H + H.T))
    negative = confirmed_largest_eigenvalue(-symmetric(n, 3))
    assert 0 <= negative < 1e-9 * n


@pytest.mark.parametrize("n", [0, 1, 3, 300])
def test_confirmed_largest_eigenvalue__of_zero_is_zero(n):
    assert confirmed_largest_eigenvalue(np.zeros((n, n))) == 0.0


@pytest.mark.parametrize("n", [40, 300])
def test_confirmed_largest_eigenvalue__finds_vectors_of_both_signs(n):
    """The eigenvector is orthogonal to the start of the iteration, and its neighbours are near."""
    block = np.array([[1.0, -0.9], [-0.9, 1.0]])
    check_eigenvalue(np.kron(np.eye(n // 2), block))
    check_eigenvalue(np.kron(np.diag(1 + 1e-9 * np.arange(n // 2)), block))


@pytest.mark.parametrize("n", [100, 300])
def test_confirmed_largest_eigenvalue__of_one_entry(n):
    H = np.zeros((n, n))
    H[7, 7] = 3.0
    assert 3.0 <= check_eigenvalue(H) <= 3.03
    assert check_eigenvalue(np.eye(n)) >= 1.0


# --- The draws ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiles", ["float64", "float32"])
@pytest.mark.parametrize("kernel", [Gaussian(0.8), Linear() + Gaussian(0.5)], ids=repr)
def test_draw_apart__has_the_rows_that_pass_1_would_have_drawn(kernel, tiles, monkeypatch):
    pairs, made = [], algorithm.begin_audit

    def drawn_twice(run, sketch, first, size, seed, stream):
        apart = draw_apart(run, sketch, first, audit_draws(seed, stream, size))
        pairs.append([run.executor.value(one.drawn) for one in (first, apart)])
        return made(run, sketch, apart, size, seed, stream)

    monkeypatch.setattr(algorithm, "begin_audit", drawn_twice)
    options = {"sampling": "uniform", "certify": Certify(audit_rows=70), "dtype": tiles, "block_rows": 32}
    found = certified(rows(200), kernel, 1e-2, 20, **options)
    monkeypatch.undo()
    ((during, after),) = pairs
    for field in fields(during["audit"]):
        ours, theirs = (getattr(one["audit"], field.name) for one in (after, during))
        np.testing.assert_allclose(ours, theirs, rtol=1e-12 if field.name == "total" else 0)
    assert found.audit == certified(rows(200), kernel, 1e-2, 20, **options).audit


# --- The deviation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiles", slow_but(["float64", "float32"], "float64"))
@pytest.mark.parametrize("audit_rows", slow_but([50, 400], 50))
def test_audit__deviation_is_never_below_the_truth(audit_rows, tiles):
    X, kernel, landmarks = np.concatenate([rows(70), 0.01 * rows(30, seed=1)]), Gaussian(0.8), np.arange(0, 100, 8)
    true = np.linalg.eigvalsh(residual_matrix(X, kernel, landmarks))[-1]
    tau = exact.residual(X, kernel, landmarks).sum()
    found = [
        certified(
            X,
            kernel,
            1e-2,
            sampling=landmarks,
            certify=Certify(audit_rows=audit_rows, failure_probability=1e-3),
            random_state=seed,
            dtype=tiles,
        ).audit
        for seed in range(50)
    ]
    deltas = np.array([one.delta for one in found])
    assert np.sum(deltas < true) == 0
    assert len(set(deltas)) == 50
    for one in found:
        assert (one.rows, one.failure_probability) == (audit_rows, 1e-3)
        assert one.tau == pytest.approx(tau, rel=1e-5 if tiles == "float64" else 0.1)  # float32 drops near twins
        assert one.delta <= one.weight + one.noise
        assert one.eigenvalue <= one.weight * 1.02
    # Not loose for nothing: what was seen is near the truth, and the bound is what so many rows can tell.
    seen = np.mean([one.eigenvalue for one in found])
    assert 0.9 * true <= seen <= true + 2.5 * math.sqrt(true * tau * math.log(1e3) / audit_rows)
    allowed = 2 * tau * math.log(1e3) / audit_rows
    bound = ((math.sqrt(allowed) + np.sqrt(allowed + 4 * np.array([one.eigenvalue for one in found]))) / 2) ** 2
    assert np.all(deltas <= 1.001 * bound + 1e-6)


@pytest.mark.slow
def test_audit__fails_no_more_often_than_it_says():
    """At a failure probability that can be seen, few audits of few rows are too low."""
    X, kernel, landmarks = rows(40), Gaussian(0.5), np.arange(4)
    true = np.linalg.eigvalsh(residual_matrix(X, kernel, landmarks))[-1]
    low = [
        certified(
            X,
            kernel,
            1e-2,
            sampling=landmarks,
            certify=Certify(audit_rows=50, failure_probability=0.2),
            random_state=seed,
        ).audit.delta
        < true
        for seed in range(80)
    ]
    assert np.mean(low) <= 0.2


def test_audit__without_chance_is_the_trace():
    X, kernel, landmarks = rows(), Gaussian(0.7), np.arange(10)
    found = certified(X, kernel, 1e-2, sampling=landmarks, certify=Certify(failure_probability=0)).audit
    assert (found.rows, found.failure_probability, found.eigenvalue) == (0, 0.0, None)
    assert found.delta == pytest.approx(exact.residual(X, kernel, landmarks).sum(), rel=1e-9)
    assert found.delta == found.weight + found.noise
    assert found.weight >= found.tau
    other = certified(X, kernel, 1e-2, sampling=landmarks, certify=Certify(failure_probability=0), random_state=1).audit
    assert other == found


def test_audit__is_no_larger_than_the_trace():
    X, kernel = rows(), Gaussian(0.7)
    few = certified(
        X, kernel, 1e-2, sampling=np.arange(10), certify=Certify(audit_rows=1, failure_probability=1e-9)
    ).audit
    assert few.delta <= few.weight + few.noise
    assert not few.exact


@pytest.mark.parametrize("tiles", ["float64", "float32"])
@pytest.mark.parametrize("kernel", [Gaussian(0.3), Laplacian(1.0), Linear(), Polynomial(2)], ids=repr)
def test_audit__of_all_rows_as_landmarks_is_exact(kernel, tiles):
    X = rows(50)
    ridge = 1e-2 * float(kernel.diagonal(X).mean())
    result = certified(X, kernel, ridge, sampling=np.arange(50), dtype=tiles)
    assert result.audit.exact
    lower, upper = result.lower.compute(), result.upper.compute()
    assert np.max(upper / lower - 1) < (1e-5 if tiles == "float64" else 0.2)
    assert result.audit.delta < (1e-6 if tiles == "float64" else 1e-2) * 50 * ridge


def test_audit__is_not_exact_where_one_row_is_left():
    X = np.concatenate([rows(50), [[30.0, 0.0, 0.0]]])
    found = certified(X, Gaussian(1.0), 1e-2, sampling=np.arange(50)).audit
    assert not found.exact
    assert 1.0 <= found.delta <= 1.01


@pytest.mark.parametrize("rho", [0.0, 1e-6])
@pytest.mark.parametrize("ridge", [0.1, [0.1, 0.2]], ids=["one ridge", "two ridges"])
def test_audit__of_a_kernel_that_vanishes_finds_nothing(ridge, rho):
    result = certified(
        np.zeros((12, 2)), Linear(), ridge, 3, sampling="uniform", certify=Certify(failure_probability=rho)
    )
    found = result.audit
    assert (found.tau, found.delta, found.noise, found.exact) == (0.0, 0.0, 0.0, True)
    np.testing.assert_array_equal(result.lower.compute(), 0)
    np.testing.assert_array_equal(result.upper.compute(), 0)
    assert result.certificate.relative_width == [0.0] * np.size(ridge)
    assert result.certificate.effective_dimension == [(0.0, 0.0)] * np.size(ridge)


@pytest.mark.parametrize("rho", [0.0, 1e-6])
def test_audit__where_the_landmarks_vanish_is_of_the_whole_kernel(rho):
    X = np.concatenate([np.zeros((5, 2)), rows(20, 2)])
    result = certified(X, Linear(), 0.1, sampling=np.arange(5), certify=Certify(failure_probability=rho))
    assert result.rank == 0
    true = np.linalg.norm(X, 2) ** 2
    assert true <= result.audit.delta <= 1.001 * np.sum(X**2)
    expected = exact.leverage_scores(X, Linear(), 0.1)
    assert np.all(result.lower.compute() <= expected + 1e-12)
    assert np.all(expected <= result.upper.compute() + 1e-12)


def test_audit__of_rows_without_residual_divides_by_nothing():
    X = np.repeat(rows(3), 10, axis=0)
    result = certified(X, Linear(), 0.1, sampling=np.arange(0, 30, 10))
    assert result.audit.exact
    assert result.audit.delta < 1e-10
    assert np.isfinite(result.upper.compute()).all()


@pytest.mark.slow
def test_audit__does_not_refuse_repeated_rows_in_float32():
    row = [-0.77770545, 1.18090472, 0.56410555, 0.5843167, 1.54021832, -0.89230561]
    for kernel in (Polynomial(3, 0.5, 2.0), Polynomial(2), Linear(), Gaussian(1.0)):
        for scale in np.linspace(0.5, 2, 12):
            X = np.repeat([row], 5, axis=0) * scale
            result = certified(X, kernel, float(kernel.diagonal(X)[0]), sampling=[0], dtype="float32", block_rows=2)
            assert result.audit.exact


@pytest.mark.parametrize("tiles", ["float64", "float32"])
def test_audit__refuses_kernels_that_are_not_positive(tiles):
    with pytest.raises(DaskrrError, match=r"not positive|may not be positive"):
        certified(3 * rows(), sigmoid, 1e-2, sampling=[0, 1], dtype=tiles).upper.compute()


# --- Where its rows come from -------------------------------------------------------------------------


def test_audit_draws__differ_from_all_other_draws():
    orders = [
        draw.order
        for number in range(6)
        for drawn in (audit_draws(7, number, 10), probe_draw(7, number), landmark_draw(7, number, 10, 20, 400))
        for draw in drawn.values()
    ]
    orders += [Order.of(child(7, "landmarks", number)) for number in range(6)]
    assert len(set(orders)) == len(orders) == 6 * 4
    other = [draw.order for draw in audit_draws(8, 0, 10).values()]
    assert not set(other) & set(orders)
    firsts = {tuple(np.argsort(order.keys(np.ones(50), 0))[:10]) for order in orders}
    assert len(firsts) == len(orders)


def test_audit_draws__are_none_without_rows():
    assert audit_draws(0, 0, 0) == {}
    assert {draw.size for draw in audit_draws(0, 0, 17).values()} == {17}


@pytest.mark.parametrize("n_others", [0, 1, 40, 100])
def test_audit_rows__are_drawn_by_residual_and_by_chance_and_each_counted(n_others):
    X, kernel, generator = rows(60), Gaussian(1.0), np.random.default_rng(1)
    drawn = Reservoir.of(Order.of(child(3, "audit", 0, 1)), 100, generator.random(60), 0, X)
    payload = certified(X, kernel, 1e-2, 10).sketch.algebra.fetch(whitener)
    others = np.sort(generator.integers(60, size=n_others))
    again = drawn.draw(100 - n_others, stream(3, "audit"))
    own = audit._counted_rows(drawn, 100 - n_others, stream(3, "audit"))
    found, weights, counts = audit._with_others(
        own, drawn.rows, whitener_of(payload, kernel, np.dtype(float)), others, X[np.unique(others)]
    )
    expected, times = np.unique(np.concatenate([drawn.rows[again], others]), return_counts=True)
    numbers = np.array([int(np.flatnonzero((one == X).all(axis=1))[0]) for one in found])
    np.testing.assert_array_equal(np.sort(numbers), expected)
    np.testing.assert_array_equal(counts[np.argsort(numbers)], times)
    assert (weights > 0).all()


def test_audit__draws_by_chance_where_round_off_is_all_there_is():
    X = rows(300)
    found = certified(X, Linear(), 1e-3, sampling=np.arange(20))
    totals = found.audit
    assert 300 * totals.noise > 0.1 * totals.weight
    K = X @ X.T
    B = found.sketch.algebra.fetch(whitener).factors[0] @ X[found.sketch.pivots] @ X.T
    assert np.linalg.norm(K - B.T @ B, 2) <= totals.delta


def test_audit__does_not_depend_on_blocks():
    X, kernel = rows(200), Matern(0.5, 0.5)
    found = [
        certified(X, kernel, 1e-2, sampling=np.arange(20), certify=Certify(audit_rows=80), block_rows=size).audit
        for size in (200, 7, 64)
    ]
    for one in found[1:]:
        assert one.delta == pytest.approx(found[0].delta, rel=1e-10)
        assert one.eigenvalue == pytest.approx(found[0].eigenvalue, rel=1e-10)


def test_audit__is_the_same_for_every_ridge():
    X = rows(100)
    found = [certified(X, Gaussian(0.5), ridge, sampling=np.arange(20)).audit for ridge in (1e-1, 1e-4, [1e-2, 1e-3])]
    assert found[0] == found[1] == found[2]


def test_audit__bounds_by_as_many_rows_as_it_looked_at():
    result = certified(rows(400, 6), Gaussian(1.0), 1e-3, 60, certify=Certify(audit_rows=100))
    found = result._proof.audit
    most = deviation_bound(found.eigenvalue, found.weight, 100, 1e-6)
    assert (found.rows, found.failure_probability) == (100, 1e-6)
    assert most < found.weight
    assert found.delta == pytest.approx(most + found.noise, rel=1e-12)
