"""Certified intervals from end to end: they contain the exact scores, and the certificate says how wide they are."""

import json
from dataclasses import asdict

import dask
import numpy as np
import pytest
from dask.callbacks import Callback
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import CASES, as_zarr, extended_scores, problems
from threadpoolctl import threadpool_limits
from variants import slow_but

import daskrr
from daskrr import exact, theory
from daskrr.errors import CheckFailed, NotCertified, RidgeTooSmall
from daskrr.kernels import Bernoulli, Cosine, Gaussian, Laplacian, Linear, Matern, Polynomial
from daskrr.nystrom import sampling as landmark_rounds
from daskrr.nystrom.certificate import WIDTH_EDGES, Goal
from daskrr.nystrom.sampling import BY_NAME, Leverage, Uniform
from daskrr.nystrom.strategies import Certify, Tolerance

U64 = 2.0**-53
SCHEMES = ["uniform", "diagonal", "leverage", "residual"]


@pytest.fixture(autouse=True)
def _one_thread():
    """Dense oracles on few cores are fastest without the threads of BLAS."""
    with threadpool_limits(1):
        yield


def rows(n=60, d=3, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d))


def mixed_rows(n, seed=0):
    """A cloud, a tight cluster, heavy tails and some rows twice."""
    rng = np.random.default_rng(seed)
    parts = [rng.standard_normal((n // 2, 3)), 0.05 * rng.standard_normal((n // 4, 3)) + 2]
    parts.append(rng.standard_t(2, (n - sum(map(len, parts)) - 8, 3)))
    parts.append(parts[0][:8])
    return np.concatenate(parts)


def certified(X, kernel, ridge, landmarks=None, **options):
    options = {"random_state": 0, "progress": False, "certify": True} | options
    return daskrr.leverage_scores(X, kernel, ridge, landmarks, **options)


def arrays(result):
    """Scores, estimate, lower and upper, with a column for each ridge."""
    found = dask.compute(result.scores, result.estimate, result.lower, result.upper)
    return [array.reshape(len(array), -1) for array in found]


def check_interval(result, expected, slack):
    scores, estimate, lower, upper = arrays(result)
    assert np.all((lower >= 0) & (lower <= upper) & (upper <= 1))
    assert np.all((lower <= estimate) & (estimate <= upper))
    assert np.max(lower - expected) <= slack
    assert np.max(expected - upper) <= slack
    return scores, estimate, lower, upper


def oracle(X, kernel, ridges):
    return np.stack([exact.leverage_scores(X, kernel, ridge) for ridge in ridges], axis=1)


def oracle_error(X, kernel, ridges):
    """Round-off of float64 in the dense scores."""
    return 1e-12 + 4 * U64 * np.linalg.norm(kernel(X, X), 2) / min(ridges)


# --- Every interval contains the exact score ----------------------------------------------------------


@st.composite
def choices(draw, n_rows):
    """The arguments that choose landmarks; leverage sampling has rows for two rounds."""
    kind = draw(st.sampled_from([*SCHEMES, "given"]))
    n_landmarks = draw(st.sampled_from(sorted({1 + (kind == "leverage"), max(2, n_rows // 2), 3 * n_rows})))
    if kind == "given":
        order = np.random.default_rng(draw(st.integers(0, 1000))).permutation(n_rows)
        return {"sampling": order[:n_landmarks]}
    strategy = draw(st.sampled_from([kind, kind, BY_NAME[kind](replacement=True), BY_NAME[kind](replacement=False)]))
    return {"sampling": strategy, "landmarks": n_landmarks}


@pytest.mark.parametrize(
    ("tiles", "subset_bound", "count"),
    [
        ("float64", False, 10),
        ("float32", True, 10),
        *(
            pytest.param(tiles, subset_bound, 30, marks=pytest.mark.slow)
            for tiles in ("float64", "float32")
            for subset_bound in (False, True)
        ),
    ],
)
def test_interval__contains_the_exact_scores(tiles, subset_bound, count):
    smallest = -8 if tiles == "float64" else -3

    @given(
        data=st.data(),
        problem=problems(max_rows=9),
        exponents=st.lists(st.floats(smallest, 1), min_size=1, max_size=3, unique_by=lambda one: round(one, 3)),
        failure_probability=st.sampled_from([1e-6, 0.0]),
        audit_rows=st.sampled_from([5, 60, 2000]),
        seed=st.integers(0, 10**6),
    )
    @settings(max_examples=count)
    def holds(data, problem, exponents, failure_probability, audit_rows, seed):
        X, kernel = problem.X, problem.kernel
        assume(np.max(problem.diagonal) < 1e30)
        options = data.draw(choices(len(X)))
        ridges = [problem.ridge(10**exponent) for exponent in exponents]
        assume(np.any(problem.diagonal > 0))
        try:
            result = certified(
                X,
                kernel,
                ridges if len(ridges) > 1 or seed % 2 else ridges[0],
                dtype=tiles,
                random_state=seed,
                certify=Certify(
                    subset_bound=subset_bound, failure_probability=failure_probability, audit_rows=audit_rows
                ),
                block_rows=data.draw(st.sampled_from([None, 2, 5])),
                **options,
            )
            arrays(result)
        except RidgeTooSmall:
            return
        except CheckFailed as error:
            assert tiles == "float32"
            assert "use dtype='float64'" in str(error)  # noqa: PT017
            return
        expected = np.stack([extended_scores(X.astype(float), kernel, ridge) for ridge in ridges], axis=1)
        check_interval(result, expected, 1e-13)
        by_trace, certificate = result.effective_dimension_bounds, result.certificate
        for column, sums in enumerate(expected.sum(axis=0)):
            low, high = certificate.effective_dimension[column]
            assert low * (1 - 1e-12) - 1e-13 <= sums <= high * (1 + 1e-12) + 1e-13
            low, high = certificate.max_degrees_of_freedom[column]
            assert low - 1e-11 <= len(X) * expected[:, column].max() <= high + 1e-11
            low, high = by_trace[column]
            assert low * (1 - 1e-12) - 1e-13 <= sums <= high * (1 + 1e-12) + 1e-13

    holds()


@pytest.mark.parametrize("sampling", SCHEMES)
@pytest.mark.parametrize(
    "kernel",
    slow_but(
        [Gaussian(0.7), Laplacian(1.0), Matern(1.0, 1.5), Linear() + Gaussian(0.5)],
        Matern(1.0, 1.5),
        Linear() + Gaussian(0.5),
    ),
    ids=repr,
)
def test_interval__contains_the_exact_scores_of_more_rows(kernel, sampling):
    X, ridges = mixed_rows(300), [1e-2, 1e-4]
    result = certified(
        X, kernel, ridges, 60, sampling=sampling, certify=Certify(failure_probability=1e-3), block_rows=77
    )
    check_interval(result, oracle(X, kernel, ridges), oracle_error(X, kernel, ridges))


@pytest.mark.parametrize("tiles", slow_but(["float64", "float32"], "float64"))
@pytest.mark.parametrize("case", CASES)
def test_interval__contains_the_exact_scores_of_hard_rows(case, tiles):
    rng = np.random.default_rng(3)
    for kernel in (Gaussian(1.5), Polynomial(2)):
        X = CASES[case](rng, rng.standard_normal((130, 5)))
        ridge = 1e-3 * float(kernel.diagonal(X).mean())
        result = certified(
            X, kernel, ridge, 40, dtype=tiles, certify=Certify(subset_bound=tiles == "float64"), block_rows=64
        )
        check_interval(result, oracle(X, kernel, [ridge]), oracle_error(X, kernel, [ridge]))


@pytest.mark.parametrize("ridge", [0.3, [0.3, 0.01]], ids=["one ridge", "two ridges"])
@pytest.mark.parametrize("tiles", ["float64", "float32"])
@pytest.mark.parametrize("failure_probability", [0.0, 1e-6])
def test_interval__of_one_landmark_contains_the_exact_scores(failure_probability, tiles, ridge):
    X = np.array([[0, 1, 0], [1, 0, 0], [0, 1, 1], [0, 1, 0]] * 3, float)
    result = certified(
        X, Linear(), ridge, sampling=[0], dtype=tiles, certify=Certify(failure_probability=failure_probability)
    )
    check_interval(result, oracle(X, Linear(), np.atleast_1d(ridge)), 1e-12)
    np.testing.assert_allclose(
        result.sketch.residual(X).compute(),
        exact.residual(X, Linear(), [0]),
        atol=1e-12 if tiles == "float64" else 1e-6,
    )


@pytest.mark.parametrize("kernel", [Bernoulli(2), Gaussian(1.0), 0.5 * Laplacian(3.0)], ids=repr)
def test_interval__of_a_single_row_is_a_point(kernel):
    X = np.full((1, 3), 0.25)
    k = float(kernel.diagonal(X)[0])
    result = certified(X, kernel, 0.1 * k, 1, sampling="uniform")
    check_interval(result, np.array([[1 / 1.1]]), 1e-13)
    assert result.certificate.relative_width[0] < 1e-6
    assert result.audit.exact


@pytest.mark.parametrize("exponent", slow_but([-7, -5, -3], -7))
@pytest.mark.parametrize("kernel", [Matern(1.5, 0.5), 3.0 * Linear(), Polynomial(3)], ids=repr)
def test_interval__with_the_subset_bound_budgets_for_round_off_at_small_ridges(kernel, exponent):
    for seed in range(6):
        X = np.array([[1e4, 1.0]]) if seed == 0 else rows(1 + seed % 3, 2, seed)
        ridges = [c * 10.0**exponent * float(kernel.diagonal(X).mean()) for c in (1.0, 2.3)]
        result = certified(X, kernel, ridges, sampling=np.arange(len(X)), certify=Certify(subset_bound=True))
        expected = np.stack([extended_scores(X, kernel, ridge) for ridge in ridges], axis=1)
        check_interval(result, expected, 1e-13)


@pytest.mark.parametrize("tiles", ["float64", "float32"])
def test_interval__of_repeated_landmarks_contains_the_exact_scores(tiles):
    X = np.concatenate([np.repeat(rows(6), 15, axis=0), rows(10, seed=1)])
    kernel, ridges = Gaussian(1.0), [1e-1, 1e-3]
    result = certified(X, kernel, ridges, sampling=np.arange(0, 90), dtype=tiles)
    assert result.rank == 6
    check_interval(result, oracle(X, kernel, ridges), 1e-10)


def test_interval__sees_outliers_that_no_landmark_is_near():
    X = np.concatenate([0.1 * rows(200), 50 * np.eye(3)])
    result = certified(X, Gaussian(1.0), 1e-3, sampling=np.arange(60))
    scores, estimate, lower, _ = check_interval(result, oracle(X, Gaussian(1.0), [1e-3]), 1e-10)
    assert np.all(scores[200:] < 1e-9)
    assert np.all(lower[200:] > 0.5)
    assert np.all(estimate[200:] > 0.8)


@pytest.mark.parametrize("name", ["lower", "upper", "certificate", "audit", "effective_dimension_bounds"])
def test_interval__that_was_not_asked_for_is_refused(name):
    result = certified(rows(), Gaussian(1.0), 1e-2, 10, certify=False)
    assert not result.certified
    with pytest.raises(NotCertified, match="certify=True"):
        getattr(result, name)
    with pytest.raises(NotCertified, match="certify=True"):
        result.top(3, by="upper")


# --- What it depends on -------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [Gaussian(1.0), Matern(1.0, 0.5)], ids=repr)
def test_ridges__of_a_list_agree_with_single_ones(kernel):
    X, ridges = mixed_rows(150), [1e-3, 1e-1, 1e-2]
    together = certified(X, kernel, ridges, 50, sampling="diagonal", block_rows=40)
    found = arrays(together)
    expected = oracle(X, kernel, ridges)
    check_interval(together, expected, oracle_error(X, kernel, ridges))
    for column, ridge in enumerate(ridges):
        alone = certified(X, kernel, ridge, 50, sampling="diagonal", block_rows=40)
        single = check_interval(alone, expected[:, column : column + 1], oracle_error(X, kernel, ridges))
        np.testing.assert_allclose(found[0][:, column], single[0][:, 0], rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(found[1][:, column], single[1][:, 0], rtol=1e-6, atol=1e-8)
        assert together.sketch_dimension[column] == pytest.approx(alone.sketch_dimension, rel=1e-9)
        assert together.audit == alone.audit
        # The path knows l̃ at the shifted ridge and all that is captured: never wider but for round-off.
        assert np.all(found[3][:, column] <= single[3][:, 0] + 1e-6)
        assert together.certificate.deviation[column] == pytest.approx(alone.certificate.deviation[0])


def test_ridges__keep_the_order_they_were_given_in():
    X = rows()
    one, other = (arrays(certified(X, Gaussian(1.0), ridges, 20)) for ridges in ([1e-1, 1e-2], [1e-2, 1e-1]))
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b[:, ::-1], rtol=1e-9)
    alone = certified(X, Gaussian(1.0), [1e-1], 20)
    assert alone.scores.shape == alone.upper.shape == (60, 1)
    assert len(alone.sketch_dimension) == 1


# Draws by leverage have the round-off of float32 in their weights, and that depends on blocks.
@pytest.mark.parametrize(
    ("sampling", "tiles"),
    [
        ("residual", "float64"),
        pytest.param("leverage", "float64", marks=pytest.mark.slow),
        pytest.param("diagonal", "float64", marks=pytest.mark.slow),
        ("diagonal", "float32"),
    ],
)
def test_interval__does_not_depend_on_blocks(sampling, tiles):
    X, kernel = mixed_rows(130), Linear() + Gaussian(1.0)
    options = {"sampling": sampling, "dtype": tiles, "certify": Certify(audit_rows=60)}
    plain = certified(X, kernel, 1e-2, 30, **options)
    tolerance = 1e-8 if tiles == "float64" else 2e-3
    for source, block_rows in ((X, 17), (as_zarr(X, (25, 2)), None), (X, 64)):
        other = certified(source, kernel, 1e-2, 30, block_rows=block_rows, **options)
        assert other.sketch.landmarks.indices.tolist() == plain.sketch.landmarks.indices.tolist()
        assert other.audit.delta == pytest.approx(plain.audit.delta, rel=1e-6 if tiles == "float64" else 1e-2)
        for a, b in zip(arrays(plain), arrays(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


@pytest.mark.slow
def test_interval__has_the_same_bits_on_a_cluster(request, tmp_path):
    X, options = mixed_rows(120), {"block_rows": 30, "certify": Certify(subset_bound=True)}
    local = certified(X, Gaussian(1.0), [1e-2, 1e-3], 24, **options)
    expected, certificate = arrays(local), local.certificate
    as_zarr(X, (30, 3), tmp_path / "X.zarr")
    request.getfixturevalue("client")
    distributed = certified(tmp_path / "X.zarr", Gaussian(1.0), [1e-2, 1e-3], 24, **options)
    for one, other in zip(expected, arrays(distributed), strict=True):
        np.testing.assert_array_equal(one, other)
    assert distributed.certificate == certificate


def test_interval__depends_on_the_seed_alone():
    one, same, other = (certified(rows(), Gaussian(1.0), 1e-2, 10, random_state=seed) for seed in (1, 1, 2))
    assert one.audit == same.audit != other.audit
    for a, b in zip(arrays(one), arrays(same), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("failure_probability", [0.5, 1e-3, 1e-9])
def test_interval__is_wider_the_less_may_fail(failure_probability):
    X = mixed_rows(150)
    wide, tight = (
        certified(X, Gaussian(0.5), 1e-3, 40, certify=Certify(failure_probability=rho))
        for rho in (0.0, failure_probability)
    )
    (_, _, low, high), (_, _, lower, upper) = arrays(wide), arrays(tight)
    assert tight.audit.delta <= wide.audit.delta
    assert np.all((low <= lower) & (upper <= high))


def test_scores__are_the_same_with_and_without_a_certificate():
    X = mixed_rows(100)
    plain, with_ends = (certified(X, Gaussian(1.0), 1e-2, 20, certify=one) for one in (False, True))
    np.testing.assert_array_equal(plain.scores.compute(), with_ends.scores.compute())
    np.testing.assert_array_equal(plain.residual.compute(), with_ends.residual.compute())
    _, estimate, lower, upper = arrays(with_ends)
    np.testing.assert_array_equal(np.clip(plain.estimate.compute()[:, None], lower, upper), estimate)


class Counter(Callback):
    def __init__(self):
        super().__init__(pretask=self.count)
        self.keys = []

    def count(self, key, *_):
        self.keys.append(key)


@pytest.mark.parametrize("ridge", [1e-2, [1e-2, 1e-3]], ids=["one ridge", "two ridges"])
def test_pass_2__runs_once_for_everything(ridge):
    result = certified(rows(), Gaussian(1.0), ridge, 10, block_rows=10)
    with Counter() as counter:
        dask.compute(result.scores, result.lower, result.upper, result.estimate, result.residual)
    scored = [key for key in counter.keys if str(key).startswith("score-rows")]
    assert len(scored) == len(set(scored)) == 6


# --- The certificate ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["uniform", "diagonal", "leverage", "residual", "given"])
@pytest.mark.parametrize("ridges", [[1e-2], [1e-1, 1e-3]], ids=["one ridge", "two ridges"])
def test_certificate__agrees_with_the_arrays(ridges, sampling):
    X, kernel = mixed_rows(180), Linear() + Gaussian(0.5)
    chosen = {"sampling": np.arange(0, 180, 5)} if sampling == "given" else {"sampling": sampling, "landmarks": 36}
    result = certified(X, kernel, ridges, block_rows=50, certify=Certify(subset_bound=True), **chosen)
    scores, _, lower, upper = arrays(result)
    by_trace = result.effective_dimension_bounds
    found, expected = result.certificate, oracle(X, kernel, ridges)
    assert found.ridges == ridges
    assert found.deviation == pytest.approx([result.audit.delta / (180 * ridge) for ridge in ridges])
    for i in range(len(ridges)):
        ratio = upper[:, i] / lower[:, i] - 1
        floor = scores[:, i].sum() / 180
        assert found.floor[i] == pytest.approx(floor)
        assert found.relative_width[i] == pytest.approx(ratio[upper[:, i] >= floor].max())
        assert found.absolute_width[i] == (upper - lower)[:, i].max()
        assert found.misses[i] == 0
        assert sum(found.upper_wins[i].values()) == sum(found.lower_wins[i].values()) == 180
        assert 0 <= found.roundoff_share[i] <= 1
        low, high = found.effective_dimension[i]
        assert low <= expected[:, i].sum() <= high
        assert lower[:, i].sum() * (1 - 1e-11) <= low <= high <= upper[:, i].sum() * (1 + 1e-11)
        wide = by_trace[i]
        assert wide[0] <= low
        assert high <= wide[1]
        assert found.max_degrees_of_freedom[i] == (180 * lower[:, i].max(), 180 * upper[:, i].max())
        assert found.max_degrees_of_freedom[i][0] <= 180 * expected[:, i].max() <= found.max_degrees_of_freedom[i][1]
        for share, width in ((0.5, found.median_width[i]), (0.95, found.most_width[i])):
            assert np.mean(ratio <= max(width, WIDTH_EDGES[0])) >= share
            assert np.mean(ratio <= width / (WIDTH_EDGES[1] / WIDTH_EDGES[0]) * (1 - 1e-9)) < share
    if sampling in ("given", "residual"):
        assert found.score_fidelity is None
    else:
        expected = [1e-1 * min(ridges)] if sampling == "leverage" else ridges
        assert [one.ridge for one in found.score_fidelity] == pytest.approx(expected)
        assert all(0 < one.beta <= 1 for one in found.score_fidelity)
        assert all(str(one) in str(found) for one in found.score_fidelity)


@pytest.mark.parametrize("tiles", ["float64", "float32"])
@pytest.mark.parametrize("ridges", [[2e-2], [8e-2, 3e-3, 3.6]], ids=["one ridge", "three ridges"])
def test_certificate__of_intervals_that_are_round_off_alone_is_made(ridges, tiles):
    X = np.clip(np.round(rows(24, 2)), -1, 1)
    result = certified(X, Gaussian(1.5), ridges, sampling=np.arange(24), dtype=tiles)
    found = result.certificate
    assert result.audit.exact
    assert all(0 <= share <= 1 for share in found.roundoff_share)
    assert max(found.relative_width) < (1e-6 if tiles == "float64" else 0.05)


@pytest.mark.parametrize("sampling", ["uniform", "diagonal", "probabilities"])
@pytest.mark.parametrize("kernel", [Gaussian(0.5), Linear() + Gaussian(0.5)], ids=repr)
def test_certificate__never_promises_more_fidelity_than_there_is(kernel, sampling):
    X = mixed_rows(120)
    by = {
        "uniform": np.ones(120),
        "diagonal": kernel.diagonal(X),
        "probabilities": np.random.default_rng(0).random(120) + 0.1,
    }[sampling]
    probabilities = by / by.sum()
    chosen = probabilities if sampling == "probabilities" else sampling
    result = certified(X, kernel, [1e-1, 1e-2], 80, sampling=chosen)
    for found, scores in zip(result.certificate.score_fidelity, oracle(X, kernel, [1e-1, 1e-2]).T, strict=True):
        true = theory.score_fidelity(probabilities, scores)
        assert 0 < found.beta <= true * (1 + 1e-9)
        assert found.inflated_dimension >= np.max(scores / probabilities) * (1 - 1e-9)
        assert (found.draws, found.failure_probability) == (80, 1e-6)
        _, _, lower, upper = arrays(result)
        assert found.beta >= true * (lower / upper).min() ** 2 * (1 - 1e-9)


@pytest.mark.parametrize("sketch_ridge", [0.0, 1e-4])
@pytest.mark.parametrize("epsilon", [0.5, 0.01])
@pytest.mark.parametrize("kernel", [Gaussian(0.5), Linear() + Gaussian(0.5)], ids=repr)
def test_certificate__of_draws_by_upper_ends_speaks_of_the_ridge_that_they_were_drawn_at(
    kernel, epsilon, sketch_ridge, monkeypatch
):
    X, drawn, draw = mixed_rows(120), [], landmark_rounds.draw_weighted

    def noted(run, weighing, *arguments):
        drawn.append(np.concatenate([one for part in run.executor.values(weighing.handles) for one in part]))
        return draw(run, weighing, *arguments)

    monkeypatch.setattr(landmark_rounds, "draw_weighted", noted)
    result = certified(X, kernel, [1e-1, 1e-2], 80, sampling=Leverage(epsilon=epsilon, sketch_ridge=sketch_ridge))
    (found,), (ends,) = result.certificate.score_fidelity, drawn
    scores = oracle(X, kernel, [1e-2 * epsilon])[:, 0]
    assert found.ridge == 1e-2 * epsilon
    assert found.draws == (80 if sketch_ridge else 60)
    assert 0 < found.beta <= theory.score_fidelity(ends / ends.sum(), scores)
    assert ends.sum() < found.inflated_dimension <= ends.sum() * (1 + 1e-9)
    assert scores.sum() / found.beta >= found.inflated_dimension * (1 - 1e-9)
    assert (scores <= ends + oracle_error(X, kernel, [1e-2 * epsilon])).all()
    assert json.loads(json.dumps(result.certificate.to_dict()))["score_fidelity"] == [asdict(found)]


def test_certificate__of_draws_without_replacement_speaks_of_no_fidelity():
    result = certified(rows(), Gaussian(1.0), 1e-2, 20, sampling=Uniform(replacement=False))
    assert result.certificate.score_fidelity is None


def test_certificate__promises_what_theorem_4_does():
    X, kernel = rows(400), Gaussian(1.0)
    result = certified(X, kernel, [1.0, 1e-6], 300, sampling="diagonal", certify=Certify(failure_probability=1e-3))
    found = result.certificate
    expected = theory.score_accuracy(trace=400.0, n_rows=400, ridge=1.0, n_landmarks=300, failure_probability=1e-3)
    assert found.promised_epsilon[0] == pytest.approx(expected.epsilon)
    assert found.promised_epsilon[0] < 0.5 < found.promised_epsilon[1]


@pytest.mark.parametrize("options", [{}, {"certify": Certify(failure_probability=0.0)}, {"sampling": "uniform"}])
@pytest.mark.parametrize("X", [rows(), np.zeros((20, 3)), np.vstack([np.zeros((5, 3)), rows(15)])])
def test_certificate__is_ready_for_json(X, options):
    options = {"sampling": "uniform"} | options if not X.any() else options
    result = certified(X, Linear(), [1e-1, 1e-3], 2, **options)
    found = result.certificate.to_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["audit"]["rows"] == (0 if "certify" in options else 2000)
    text = str(result.certificate)
    assert "0.001" in text
    assert ("from the trace alone" in text) == ("certify" in options)


def test_certificate__is_stored_with_the_ends(tmp_path):
    X = mixed_rows(100)
    result = certified(X, Gaussian(1.0), [1e-2, 1e-3], 20, block_rows=30)
    summary = result.store(tmp_path / "out.zarr", progress=False)
    assert summary["certificate"] == certified(X, Gaussian(1.0), [1e-2, 1e-3], 20, block_rows=30).certificate.to_dict()
    group = daskrr.open_scores(tmp_path / "out.zarr")
    for name, values in zip(("scores", "estimate", "lower", "upper"), arrays(result), strict=True):
        np.testing.assert_array_equal(group[name][...], values)


def test_certificate__of_zero_rows_is_certain():
    X = np.vstack([np.zeros((5, 3)), rows(20)])
    result = certified(X, Linear(), 1e-2, 2)
    _, _, lower, upper = arrays(result)
    np.testing.assert_array_equal(upper[:5], 0)
    np.testing.assert_array_equal(lower[:5], 0)
    assert np.isfinite(result.certificate.relative_width[0])


def test_goal__is_missed_where_every_tolerance_is():
    result = certified(mixed_rows(100), Gaussian(0.5), 1e-2, 20)
    _, _, lower, upper = arrays(result)
    interval = daskrr.numerics.bounds.Interval(lower, upper, np.zeros_like(lower), np.zeros_like(upper))
    ratio, width = upper / lower - 1, upper - lower
    floor = float(np.median(upper))
    relative, absolute = float(np.median(ratio)), float(np.median(width))
    np.testing.assert_array_equal(Goal((floor,)).excess(interval) > 1, False)
    wide = (ratio > relative) & (upper >= floor)
    np.testing.assert_array_equal(Goal((floor,), relative).excess(interval) > 1, wide)
    np.testing.assert_array_equal(Goal((floor,), None, absolute).excess(interval) > 1, width > absolute)
    np.testing.assert_array_equal(Goal((floor,), relative, absolute).excess(interval) > 1, wide & (width > absolute))
    assert wide.any()


def test_score_floor__decides_which_rows_count():
    X = mixed_rows(200)
    result = certified(X, Laplacian(0.5), 1e-2, Tolerance(1e-9, most=128))
    lower, upper = result.lower.compute(), result.upper.compute()
    for floor in (float(upper.min()), float(np.median(upper)), 1.0):
        found = certified(X, Laplacian(0.5), 1e-2, Tolerance(1e-9, most=128, score_floor=floor)).certificate
        expected = np.max((upper / lower - 1)[upper >= floor], initial=0.0)
        assert found.floor == [floor]
        assert found.relative_width[0] == pytest.approx(expected)


@pytest.mark.parametrize("kernel", [Cosine(), Linear()], ids=repr)
def test_interval__is_tight_where_the_landmarks_explain_everything(kernel):
    X = rows(100, 3)
    result = certified(X, kernel, 1e-2, 6)
    assert result.audit.exact
    assert "explain every row" in str(result.certificate)
    _, _, lower, upper = check_interval(result, oracle(X, kernel, [1e-2]), 1e-11)
    assert np.max(upper / lower - 1) < 1e-6
