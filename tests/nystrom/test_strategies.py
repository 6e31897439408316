"""Strategies: what is legal, that shorthand means the object, and their plain form."""

import copy
import json
import math
import pickle
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import score

import daskrr
from daskrr.errors import InvalidParameter
from daskrr.kernels import Gaussian, Linear
from daskrr.nystrom.sampling import (
    BY_NAME,
    Diagonal,
    Leverage,
    Probabilities,
    Residual,
    RowNumbers,
    Uniform,
    as_sampling,
)
from daskrr.nystrom.strategies import (
    DEFAULT_TOLERANCE,
    FIRST_ROUND,
    STRATEGIES,
    Certify,
    KFold,
    Tolerance,
    as_certify,
    as_landmarks,
    from_plain,
    plain,
)

EQUAL = np.full(200, 1 / 200)
POSITIVE = st.floats(1e-300, 1e300)
ANY = st.one_of(
    st.builds(Residual, rounds=st.integers(1, 50), replacement=st.booleans()),
    st.builds(Leverage, epsilon=POSITIVE, replacement=st.booleans()),
    st.builds(Leverage, epsilon=POSITIVE, sketch_ridge=st.just(0) | POSITIVE),
    st.builds(Diagonal, replacement=st.booleans()),
    st.builds(Diagonal, sketch_ridge=st.just(0) | POSITIVE),
    st.builds(Uniform, replacement=st.booleans()),
    st.builds(Uniform, sketch_ridge=st.just(0) | POSITIVE),
    st.builds(KFold, folds=st.integers(2, 10**6)),
    st.builds(
        Tolerance,
        st.none() | POSITIVE,
        absolute=st.none() | POSITIVE,
        most=st.integers(1, 10**9),
        score_floor=st.none() | POSITIVE,
    ),
    st.builds(
        Certify,
        failure_probability=st.floats(0, 1, exclude_max=True),
        audit_rows=st.integers(1, 10**6),
        subset_bound=st.booleans(),
    ),
)


def rows(n=200, d=2):
    return np.random.default_rng(0).standard_normal((n, d))


# --- Plain form ---------------------------------------------------------------------------------------


@given(ANY)
def test_plain__comes_back_from_json_as_it_was(strategy):
    assert from_plain(json.loads(json.dumps(plain(strategy)))) == strategy


@given(ANY)
def test_strategy__is_a_value(strategy):
    assert copy.deepcopy(strategy) == pickle.loads(pickle.dumps(strategy)) == strategy
    assert hash(copy.deepcopy(strategy)) == hash(strategy)
    assert eval(repr(strategy)) == strategy
    with pytest.raises(FrozenInstanceError, match="cannot assign"):
        strategy.name = "other"


def test_plain__has_the_arrays_of_given_landmarks():
    values = np.arange(5)
    assert from_plain(plain(RowNumbers(values))).values is values
    found = from_plain(plain(Probabilities(values / 10, False)))
    assert (found.values.tolist(), found.replacement) == ((values / 10).tolist(), False)
    assert from_plain(plain(Probabilities(values / 10, sketch_ridge=0.1))).sketch_ridge == 0.1


def test_strategies__are_told_apart_by_name():
    assert {name: one.name for name, one in STRATEGIES.items()} == {name: name for name in STRATEGIES}


@pytest.mark.parametrize(
    "record", [{}, {"strategy": "other"}, {"strategy": "uniform"}, {"strategy": "uniform", "replacement": True, "x": 1}]
)
def test_from_plain__refuses_what_is_no_strategy(record):
    with pytest.raises(InvalidParameter, match=r"there is no strategy .* there are residual, leverage"):
        from_plain(record)


# --- What is legal ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Residual(rounds=0), "rounds must be an int of at least 1"),
        (lambda: Residual(replacement=None), "replacement must be True or False, got None"),
        (lambda: Leverage(epsilon=0), "epsilon must be positive and finite"),
        (lambda: Leverage(epsilon="1"), "epsilon must be a number"),
        (lambda: Leverage(replacement=1), "replacement must be True or False, got 1"),
        (lambda: Uniform(replacement="no"), "replacement must be True or False"),
        (lambda: Diagonal(replacement=0), "replacement must be True or False"),
        (lambda: Tolerance(0), "the relative tolerance must be positive and finite"),
        (lambda: Tolerance(-0.1), "the relative tolerance must be positive"),
        (lambda: Tolerance(math.nan), "the relative tolerance must be positive"),
        (lambda: Tolerance("0.1"), "the relative tolerance must be a number"),
        (lambda: Tolerance(absolute=0.0), "the absolute tolerance must be positive"),
        (lambda: Tolerance(absolute=True), "the absolute tolerance must be a number"),
        (lambda: Tolerance(score_floor=0), "score_floor must be positive"),
        (lambda: Tolerance(most=0), r"most \(--max-landmarks\) must be an int of at least 1"),
        (lambda: Tolerance(most=200.0), r"most \(--max-landmarks\) must be an int"),
        (lambda: KFold(1), "folds must be at least 2 to predict each from the others, got 1"),
        (lambda: KFold(0), "folds must be an int of at least 1"),
        (lambda: KFold(2.5), "folds must be an int"),
        (lambda: Certify(-1e-9), "failure_probability must be a number from 0 up to, not including, 1"),
        (lambda: Certify(1), "failure_probability must be a number from 0"),
        (lambda: Certify(math.nan), "failure_probability must be a number from 0"),
        (lambda: Certify("0.1"), "failure_probability must be a number from 0"),
        (lambda: Certify(audit_rows=0), "audit_rows must be an int of at least 1"),
        (lambda: Certify(audit_rows=2.5), "audit_rows must be an int"),
        (lambda: Certify(subset_bound="yes"), "subset_bound must be True or False"),
    ],
)
def test_strategy__refuses_what_is_out_of_range(make, message):
    with pytest.raises(InvalidParameter, match=message):
        make()


def test_tolerance__has_its_default_where_none_is_given():
    assert Tolerance() == Tolerance(DEFAULT_TOLERANCE)
    assert Tolerance(absolute=0.1).relative is None


@pytest.mark.parametrize("n_rows", [1, 20, FIRST_ROUND, 1000, 10**6])
def test_tolerance__has_rounds_up_to_its_limit(n_rows):
    sizes = Tolerance(most=700).sizes(n_rows)
    assert sizes[0] == min(FIRST_ROUND, n_rows)
    assert sizes[-1] == min(700, n_rows)
    assert list(sizes) == sorted(set(sizes))


# --- Shorthand ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BY_NAME)
def test_as_sampling__reads_names_as_defaults(name):
    assert as_sampling(name, 5) == BY_NAME[name]() == as_sampling(BY_NAME[name](), 5)


def test_as_sampling__tells_arrays_apart():
    assert isinstance(as_sampling([1, 2], 5), RowNumbers)
    assert as_sampling(RowNumbers([1, 2]), 5).values.tolist() == [1, 2]
    assert isinstance(as_sampling(np.full(5, 0.2), 5), Probabilities)
    assert as_sampling(Probabilities(np.full(5, 0.2), False), 5).replacement is False
    assert as_sampling(Probabilities(np.full(5, 0.2), sketch_ridge=0.1), 5).sketch_ridge == 0.1


@pytest.mark.parametrize("bad", [Probabilities([1, 2]), Probabilities(np.full(4, 0.25)), RowNumbers(np.full(5, 0.2))])
def test_as_sampling__refuses_arrays_of_another_kind(bad):
    with pytest.raises(InvalidParameter, match=r"either 5 probabilities .* or the row numbers"):
        as_sampling(bad, 5)


@pytest.mark.parametrize("bad", [Uniform, "Uniform", Tolerance])
def test_as_sampling__refuses_classes_and_unknown_names(bad):
    with pytest.raises(InvalidParameter, match="sampling must be one of residual, leverage, diagonal, uniform"):
        as_sampling(bad, 5)


def test_as_certify__reads_truth_as_defaults():
    assert as_certify(True) == as_certify(np.True_) == Certify()
    assert as_certify(False) is None
    assert as_certify(Certify(0.1)) == Certify(0.1)
    with pytest.raises(InvalidParameter, match="certify must be True, False or Certify"):
        as_certify(1e-6)


def test_as_landmarks__reads_nothing_as_the_default_tolerance():
    assert as_landmarks(None, finds_number=True) == Tolerance()
    assert as_landmarks(None, finds_number=False) is None
    assert as_landmarks(np.int64(7), finds_number=True) == 7
    with pytest.raises(InvalidParameter, match=r"landmarks must be an int of at least 1, got 0\.1"):
        as_landmarks(0.1, finds_number=True)


@pytest.mark.parametrize(
    ("shorthand", "strategies"),
    [
        ({"sampling": "residual", "landmarks": 30}, {"sampling": Residual(), "landmarks": 30}),
        ({"sampling": "leverage", "landmarks": 30}, {"sampling": Leverage(), "landmarks": 30}),
        ({"sampling": "diagonal", "landmarks": 30}, {"sampling": Diagonal(), "landmarks": 30}),
        ({"sampling": "uniform", "landmarks": 30}, {"sampling": Uniform(), "landmarks": 30}),
        ({"sampling": EQUAL, "landmarks": 9}, {"sampling": Probabilities(EQUAL), "landmarks": 9}),
        ({"sampling": np.arange(9)}, {"sampling": RowNumbers(np.arange(9))}),
        ({}, {"landmarks": Tolerance(0.5)}),
        ({"landmarks": 30, "certify": True}, {"landmarks": 30, "certify": Certify()}),
    ],
)
@pytest.mark.parametrize("kernel", [Gaussian(1.0), Linear() + Gaussian(1.0)], ids=repr)
def test_leverage_scores__of_shorthand_are_those_of_the_object(shorthand, strategies, kernel):
    short, long = (score(rows(), kernel, 1e-2, **options) for options in (shorthand, strategies))
    np.testing.assert_array_equal(short.scores, long.scores)
    assert short.result.certified == long.result.certified
    plans = [daskrr.plan(rows(), kernel, 1e-2, **options) for options in (shorthand, strategies)]
    assert plans[0] == plans[1]
