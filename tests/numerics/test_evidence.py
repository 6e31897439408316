"""Learned length scales against finite differences, the normal distribution, and data with a known answer."""

import numpy as np
import pytest
from hypothesis import strategies as st
from scipy.optimize import check_grad
from scipy.stats import multivariate_normal
from variants import examples

from daskrr.errors import InvalidData
from daskrr.kernels import Gaussian, Laplacian, Matern
from daskrr.numerics.evidence import LONGEST, Evidence, learn_scales

KERNELS = [Gaussian("learn"), Laplacian("learn"), *(Matern("learn", nu=nu) for nu in (0.5, 1.5, 2.5))]


def ident(kernel):
    return f"{kernel.name}-{getattr(kernel, 'nu', '')}"


def data(m=60, d=3, T=1, seed=0):
    """Rows and targets that the first feature decides most and the last not at all."""
    generator = np.random.default_rng(seed)
    X = generator.standard_normal((m, d))
    f = np.sin(2 * X[:, :1] * np.arange(1, T + 1)) + 0.5 * X[:, [1 % d]] * (d > 2)
    return X, f + 0.1 * generator.standard_normal((m, T)), generator.uniform(0.2, 3.0, m)


@pytest.mark.parametrize("kernel", KERNELS, ids=ident)
def test_scale_gradient__is_the_derivative_of_the_kernel(kernel):
    X, _, _ = data(12)
    X[3] = X[4]
    V = np.random.default_rng(1).standard_normal((12, 12))
    V = V + V.T

    def weighed(theta):
        return np.sum(V * kernel.set_params(length_scale=np.exp(theta))(X, X))

    for theta in (np.zeros(3), np.array([-0.5, 1.0, 2.0])):
        found = kernel.set_params(length_scale=np.exp(theta)).scale_gradient(X, V)
        steps = [1e-6 * unit for unit in np.eye(3)]
        expected = [(weighed(theta + step) - weighed(theta - step)) / 2e-6 for step in steps]
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@examples(6, 20, st.sampled_from(KERNELS), st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_evidence__has_the_gradient_of_its_values(kernel, seed, d, T, weighted):
    X, Y, w = data(40, d, T, seed)
    X[5] = X[6]
    evidence = Evidence(X, Y, w / w.mean() if weighted else np.ones(40))

    def at(theta):
        return evidence(kernel.set_params(length_scale=np.exp(theta[:-1])), np.exp(theta[-1]))

    theta = np.random.default_rng(seed).uniform(-1, 1, d + 1)
    error = check_grad(lambda one: at(one)[0], lambda one: at(one)[1], theta, epsilon=1e-6)
    assert error < 1e-4 * max(1.0, np.linalg.norm(at(theta)[1]))


@pytest.mark.parametrize("T", [1, 2])
def test_evidence__is_the_likelihood_of_a_normal_distribution(T):
    """At the scale that fits best, and up to a constant that no parameter changes."""
    X, Y, w = data(30, T=T)
    w = w / w.mean()
    evidence = Evidence(X, Y, w)

    def directly(kernel, noise):
        A = kernel(X, X) + noise * np.diag(1 / w)
        scales = np.einsum("it,ij,jt->t", Y, np.linalg.inv(A), Y) / 30
        return -sum(multivariate_normal(cov=scale * A).logpdf(y) for scale, y in zip(scales, Y.T, strict=True))

    one, other = (Gaussian((1.0, 2.0, 3.0)), 0.1), (Gaussian((0.5, 5.0, 3.0)), 0.7)
    assert evidence(*one)[0] - evidence(*other)[0] == pytest.approx(directly(*one) - directly(*other))


@pytest.mark.parametrize("kernel", KERNELS, ids=ident)
def test_learn_scales__finds_which_features_matter(kernel):
    X, Y, _ = data(250, 4)
    first, second, *others = learn_scales(kernel, X, Y).scales
    median = kernel.set_params(length_scale="median").resolve(X).length_scale
    assert first < median
    assert first < second / 2
    assert min(others) > 3 * median
    assert max(others) < 1.1 * LONGEST * median


def test_learn_scales__knows_no_units():
    X, Y, w = data(150)
    units = np.array([1e-6, 1.0, 1e4])
    found = learn_scales(Gaussian("learn"), X, Y, w)
    other = learn_scales(Gaussian("learn"), X * units + 7 * units, 1e200 * Y - 3e200, 5 * w)
    np.testing.assert_allclose(other.scales, found.scales * units, rtol=1e-3)
    assert other.noise == pytest.approx(found.noise, rel=1e-2)


def test_learn_scales__raises_the_likelihood_from_where_it_starts():
    X, Y, _ = data(300)
    found = learn_scales(Matern("learn"), X, Y)
    evidence = Evidence(X / X.std(axis=0), (Y - Y.mean(axis=0)) / Y.std(axis=0), np.ones(300))
    median = Matern("median").resolve(evidence.X)
    assert found.value < min(evidence(median, noise)[0] for noise in (1e-3, 1e-2, 0.1, 1.0)) - 10
    value, gradient = evidence(Matern(np.array(found.scales) / X.std(axis=0)), found.noise)
    assert value == pytest.approx(found.value)
    # At rest, but for what is held by a bound.
    assert np.abs(gradient[[0, 1, 3]]).max() < 0.5


def test_learn_scales__leaves_constant_features_and_rows_without_weight_alone():
    X, Y, w = data(120)
    w[60:] = 0.0
    Y[60:] = 1e6
    X = np.column_stack([X, np.full(120, 0.1)])
    found = learn_scales(Gaussian("learn"), X, Y, w)
    np.testing.assert_allclose(found.scales, learn_scales(Gaussian("learn"), X[:60], Y[:60], w[:60]).scales)
    assert found.scales[3] == pytest.approx(
        Gaussian("median").resolve((X / X.std(axis=0))[:60, :3]).length_scale, rel=0.2
    )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"X": np.ones((60, 3))}, "60 sampled rows, 0 of whose features and 1 of whose targets vary"),
        ({"Y": np.full((60, 1), 0.1)}, "60 sampled rows, 3 of whose features and 0 of whose targets vary"),
        ({"weights": np.eye(60)[0]}, "from 1 sampled rows"),
        ({"weights": np.zeros(60)}, "from 0 sampled rows"),
    ],
)
def test_learn_scales__refuses_what_tells_nothing(change, match):
    X, Y, _ = data()
    with pytest.raises(InvalidData, match=match):
        learn_scales(Gaussian("learn"), **({"X": X, "Y": Y} | change))
