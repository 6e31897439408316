"""Landmarks added until every interval is tight enough: what is promised, what is said, and what is refused."""

import inspect
import logging
import math

import numpy as np
import pytest
from threadpoolctl import threadpool_limits
from variants import slow_but

import daskrr
from daskrr import exact
from daskrr.errors import InvalidParameter
from daskrr.kernels import Gaussian, Laplacian, Linear, Matern
from daskrr.leverage.problem import state_problem
from daskrr.nystrom.strategies import DEFAULT_TOLERANCE, FIRST_ROUND, Certify, Tolerance


@pytest.fixture(autouse=True)
def _one_thread():
    """Dense oracles on few cores are fastest without the threads of BLAS."""
    with threadpool_limits(1):
        yield


def rows(n=400, d=2, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d))


def grown(X, kernel, ridge, landmarks=None, **options):
    options = {"random_state": 0, "progress": False} | options
    return daskrr.leverage_scores(X, kernel, ridge, landmarks, **options)


def ends(result):
    return result.lower.compute(), result.upper.compute()


SLOW_TO_LEARN = {"kernel": Laplacian(0.5), "ridge": 1e-3}


# --- Tolerances ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tolerance", slow_but([1.0, 0.1, 0.01], 0.1))
@pytest.mark.parametrize("kernel", [Gaussian(0.5), Matern(1.0, 1.5)], ids=repr)
def test_tolerance__that_is_met_holds_for_every_row_above_the_floor(kernel, tolerance):
    X = rows()
    result = grown(X, kernel, 1e-3, landmarks=Tolerance(tolerance))
    assert result.certified
    verdict = result.summary["tolerance"]
    assert (verdict["met"], verdict["relative"], verdict["misses"]) == (True, tolerance, 0)
    lower, upper = ends(result)
    floor = result.scores.compute().mean()
    high = upper >= floor * (1 + 1e-9)
    assert high.any()
    assert np.max(upper[high] / lower[high] - 1) <= tolerance
    assert verdict["relative_width"] <= tolerance
    expected = exact.leverage_scores(X, kernel, 1e-3)
    assert np.all((lower <= expected + 1e-9) & (expected <= upper + 1e-9))


def test_tolerance__with_a_low_floor_holds_for_every_row():
    X = np.concatenate([rows(), 0.01 * rows(200, seed=1)])
    result = grown(X, Gaussian(0.7), 1e-3, landmarks=Tolerance(0.2, score_floor=1e-12))
    assert result.summary["tolerance"]["met"]
    lower, upper = ends(result)
    assert np.max(upper / lower - 1) <= 0.2


def test_absolute_tolerance__holds_for_every_row():
    result = grown(rows(), Gaussian(0.5), 1e-3, landmarks=Tolerance(absolute=0.02))
    verdict = result.summary["tolerance"]
    assert (verdict["met"], verdict["relative"], verdict["absolute"]) == (True, None, 0.02)
    lower, upper = ends(result)
    assert np.max(upper - lower) <= 0.02
    assert verdict["absolute_width"] == np.max(upper - lower)


def test_tolerances__together_need_one_of_them_met():
    result = grown(rows(), Gaussian(0.5), 1e-3, landmarks=Tolerance(0.05, absolute=0.05))
    lower, upper = ends(result)
    floor = result.scores.compute().mean()
    assert result.summary["tolerance"]["met"]
    assert np.all((upper - lower <= 0.05) | (upper / lower - 1 <= 0.05) | (upper < floor * (1 + 1e-9)))


def test_tolerance__of_several_ridges_is_met_at_the_smallest():
    X, ridges = rows(), [1e-1, 1e-4, 1e-2]
    result = grown(X, Gaussian(0.5), ridges, landmarks=Tolerance(0.05))
    assert result.summary["tolerance"]["met"]
    lower, upper = ends(result)
    floors = result.scores.compute().mean(axis=0)
    high = upper[:, 1] >= floors[1] * (1 + 1e-9)
    assert np.max((upper / lower - 1)[high, 1]) <= 0.05
    alone = grown(X, Gaussian(0.5), 1e-4, landmarks=Tolerance(0.05))
    assert alone.sketch.landmarks.indices.tolist() == result.sketch.landmarks.indices.tolist()
    easy = grown(X, Gaussian(0.5), 1e-1, landmarks=Tolerance(0.05))
    assert len(easy.sketch.landmarks.indices) <= len(alone.sketch.landmarks.indices)


def test_tolerance__is_a_half_by_default():
    result = grown(rows(), Gaussian(0.7), 1e-2)
    assert result.summary["tolerance"]["relative"] == DEFAULT_TOLERANCE == 0.5
    assert result.summary["tolerance"]["met"]
    assert result.summary["parameters"]["sampling"] == "residual"
    assert result.certified


@pytest.mark.slow
def test_tolerance__needs_more_landmarks_the_smaller_it_is():
    found = [
        len(grown(rows(600), Gaussian(0.4), 1e-4, landmarks=Tolerance(one)).sketch.landmarks.indices)
        for one in (10, 0.1, 1e-3)
    ]
    assert found == sorted(found)
    assert found[0] < found[-1]


def test_tolerance__is_met_at_once_where_the_first_round_explains_everything():
    result = grown(rows(300, 3), Linear(), 1e-2, landmarks=Tolerance(1e-3))
    assert len(result.summary["rounds"]) == 1
    assert result.audit.exact
    assert result.summary["tolerance"]["met"]


@pytest.mark.parametrize("n", [1, 5, FIRST_ROUND, FIRST_ROUND + 1])
def test_tolerance__of_few_rows_takes_them_all_if_need_be(n):
    X = rows(n)
    result = grown(X, Laplacian(0.1), 1e-3, landmarks=Tolerance(1e-3))
    assert result.summary["tolerance"]["met"]
    assert len(result.sketch.landmarks.indices) == n


def test_tolerance__without_chance_is_met_by_the_trace_alone():
    result = grown(rows(), Gaussian(1.0), 1e-2, landmarks=Tolerance(0.5), certify=Certify(failure_probability=0))
    assert result.summary["tolerance"]["met"]
    assert (result.audit.rows, result.audit.failure_probability) == (0, 0.0)
    lower, upper = ends(result)
    high = upper >= result.scores.compute().mean() * (1 + 1e-9)
    assert np.max(upper[high] / lower[high] - 1) <= 0.5


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"certify": Certify(subset_bound=True)}, {"block_rows": 64}])
def test_tolerance__is_met_with_every_option(options):
    result = grown(rows(), Gaussian(0.5), 1e-2, landmarks=Tolerance(0.2), **options)
    assert result.summary["tolerance"]["met"]
    lower, upper = ends(result)
    high = upper >= result.scores.compute().mean() * (1 + 1e-6)
    assert np.max(upper[high] / lower[high] - 1) <= 0.2


# --- The limit ----------------------------------------------------------------------------------------


def test_limit__is_reported_and_logged_with_the_width(caplog):
    X = rows(500, 4)
    with caplog.at_level(logging.WARNING, logger="daskrr"):
        result = grown(X, **SLOW_TO_LEARN, landmarks=Tolerance(1e-3, most=200))
    verdict = result.summary["tolerance"]
    assert verdict["met"] is False
    assert len(result.sketch.landmarks.indices) == 200
    lower, upper = ends(result)
    high = upper >= result.certificate.floor[0]
    width = np.max(upper[high] / lower[high] - 1)
    assert verdict["relative_width"] == pytest.approx(width)
    assert verdict["misses"] == np.sum((upper / lower - 1 > 1e-3) & high) > 0
    (record,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    message = record.getMessage()
    assert message == verdict["text"]
    assert f"upper/lower − 1 = {width:.3g}" in message
    assert "stopped at 200 landmarks" in message
    assert "--max-landmarks" in message


def test_limit__that_is_not_reached_is_not_warned_of(caplog):
    with caplog.at_level(logging.INFO, logger="daskrr"):
        result = grown(rows(), Gaussian(0.5), 1e-3, landmarks=Tolerance(0.1))
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
    told = [one.getMessage() for one in caplog.records if one.getMessage().startswith("round ")]
    assert len(told) == len(result.summary["rounds"])
    for line, entry in zip(told, result.summary["rounds"], strict=True):
        assert f"p = {entry['landmarks']}," in line


def test_limit__still_gives_intervals_that_hold():
    X = rows(500, 4)
    result = grown(X, **SLOW_TO_LEARN, landmarks=Tolerance(1e-3, most=150))
    lower, upper = ends(result)
    expected = exact.leverage_scores(X, **SLOW_TO_LEARN)
    assert np.all((lower <= expected + 1e-10) & (expected <= upper + 1e-10))


# --- History ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rho", slow_but([1e-6, 0.1, 0.0], 1e-6))
def test_history__grows_and_pays_no_more_than_was_given(rho):
    X = rows(600, 3)
    result = grown(X, **SLOW_TO_LEARN, landmarks=Tolerance(0.01, most=500), certify=Certify(failure_probability=rho))
    history = result.summary["rounds"]
    sizes = [entry["landmarks"] for entry in history]
    assert sizes[0] == FIRST_ROUND
    assert sizes == sorted(set(sizes))
    assert len(history) > 2
    assert sizes[-1] == len(result.sketch.landmarks.indices)
    assert math.fsum(entry["failure_probability"] for entry in history) <= rho * (1 + 1e-12)
    if rho:
        assert all(entry["failure_probability"] > 0 for entry in history)
        rows_drawn = [entry["audit_rows"] for entry in history]
        assert rows_drawn == sorted(rows_drawn)
    deviations = [entry["deviation"] for entry in history]
    assert deviations == sorted(deviations, reverse=True)
    assert deviations[-1] == pytest.approx(result.audit.delta / (600 * SLOW_TO_LEARN["ridge"]))
    true = exact.leverage_scores(X, **SLOW_TO_LEARN).sum()
    for entry in history:
        low, high = entry["effective_dimension"]
        assert low <= true <= high


def test_certificate__states_what_all_rounds_paid():
    result = grown(
        rows(700, 3), **SLOW_TO_LEARN, landmarks=Tolerance(0.01, most=600), certify=Certify(failure_probability=1e-3)
    )
    paid = math.fsum(entry["failure_probability"] for entry in result.summary["rounds"])
    assert len(result.summary["rounds"]) > 1
    stated = result.certificate.failure_probability
    assert paid * (1 - 1e-12) <= stated <= 1e-3 * (1 + 1e-12)
    assert f"failure probability {stated:g}" in str(result.certificate)


def test_growth__keeps_earlier_landmarks_and_depends_on_the_seed_alone():
    X = rows(700, 3)
    found = [
        set(grown(X, **SLOW_TO_LEARN, landmarks=Tolerance(1e-3, most=most), block_rows=block).sketch.landmarks.indices)
        for most, block in ((128, None), (256, None), (256, 90), (400, 333))
    ]
    assert found[0] < found[1] < found[3]
    assert found[1] == found[2]
    other = grown(X, **SLOW_TO_LEARN, landmarks=Tolerance(1e-3, most=256), random_state=1).sketch.landmarks.indices
    assert set(other) != found[1]


def test_growth__leaves_a_result_like_any_other(tmp_path):
    X = rows(300)
    result = grown(X, Gaussian(0.5), 1e-2, landmarks=Tolerance(0.3), block_rows=100)
    summary = result.store(tmp_path / "out.zarr", progress=False)
    assert summary["tolerance"]["met"]
    assert summary["rounds"]
    landmarks = result.sketch.landmarks.indices
    fixed = grown(X, Gaussian(0.5), 1e-2, sampling=landmarks, certify=True, block_rows=100)
    np.testing.assert_array_equal(result.scores.compute(), fixed.scores.compute())


# --- Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"landmarks": Tolerance(most=127)}, "most .* must be at least 128, the size of the first round; got 127"),
        ({"ridge": []}, "ridge must be a number or a list of numbers, got an empty list"),
        ({"ridge": np.empty(0)}, "ridge must be a number or a list of numbers, got an empty list"),
        ({"ridge": [0.1, 0.2, 0.1]}, "ridge 0.1 is in the list 2 times"),
        ({"ridge": [0.1, 0.0]}, "every ridge must be positive and finite, got 0.0"),
        ({"ridge": (0.1, -1)}, "every ridge must be positive and finite, got -1"),
        ({"ridge": [0.1, "x"]}, "every ridge must be a number, got 'x'"),
        ({"ridge": [[0.1, 0.2]]}, "every ridge must be a number"),
        ({"sampling": [1, 2], "landmarks": Tolerance(absolute=0.1)}, "with sampling='residual' alone"),
        ({"sampling": "uniform", "landmarks": Tolerance(0.1)}, "with sampling='residual' alone, .* is 'uniform'"),
        ({"sampling": "leverage"}, "landmarks, a number, is needed with sampling='leverage'"),
        ({"certify": "yes"}, "certify must be True, False or Certify"),
        ({"certify": Certify}, "certify must be True, False or Certify"),
    ],
)
@pytest.mark.parametrize("call", [daskrr.plan, daskrr.leverage_scores])
def test_arguments__out_of_range_are_refused(change, message, call):
    with pytest.raises(InvalidParameter, match=message):
        call(**{"X": rows(200), "kernel": Gaussian(1.0), "ridge": 0.1} | change)


def test_tolerance__may_stop_at_as_few_as_there_are_rows():
    assert len(grown(rows(20), Gaussian(0.1), 1e-2, landmarks=Tolerance(most=20)).sketch.landmarks.indices) == 20
    with pytest.raises(InvalidParameter, match=r"most .* must be at least 20"):
        grown(rows(20), Gaussian(0.1), 1e-2, landmarks=Tolerance(most=19))


def test_state_problem__repeats_the_signature_in_its_order():
    wanted = [(one.name, one.default) for one in inspect.signature(daskrr.leverage_scores).parameters.values()]
    found = [(one.name, one.default) for one in inspect.signature(state_problem).parameters.values()]
    assert found == [one for one in wanted if one[0] != "progress"]
