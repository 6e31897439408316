"""The reproduction of the paper: its formulas against identities, its commands on small runs, its table on the data."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from benchmarks.paper import choices, divide_and_conquer, figure1, problems, table1
from daskrr import exact
from daskrr.errors import RidgeTooSmall
from daskrr.kernels import Gaussian, Linear
from daskrr.nystrom.landmarks import merge

RIDGE = 1e-3
KERNELS = {"linear": Linear(), "gaussian": Gaussian(1.0)}
REPLACED = ("uniform", "diagonal", "exact_leverage", "rank_leverage", "estimated_leverage")


@pytest.fixture(scope="module")
def synth():
    return problems.synth()


@pytest.fixture(params=KERNELS)
def small(request):
    generator = np.random.default_rng(0)
    X = generator.standard_normal((60, 3))
    y = np.sin(X[:, 0]) + 0.3 * generator.standard_normal(60)
    return problems.measured("small", X, KERNELS[request.param], RIDGE, y)


def _dense_risk(K, ridge, truth):
    n = len(K)
    inverse = np.linalg.inv(K + n * ridge * np.eye(n))
    bias = n * ridge**2 * np.sum(np.square(inverse @ truth.values))
    return bias, truth.noise / n * np.trace(K @ K @ inverse @ inverse)


def test_risk__equals_the_dense_formula(small):
    K = small.kernel(small.X, small.X)
    for truth in small.truths.values():
        assert_allclose(problems.risk(small.spectrum, RIDGE, truth), _dense_risk(K, RIDGE, truth), rtol=1e-6)


def test_risk__is_the_error_of_simulated_fits(small):
    truth = small.truths["targets"]
    noise = np.random.default_rng(1).standard_normal((4000, 60)) * truth.noise**0.5
    fits = np.array([small.spectrum.smooth(RIDGE, truth.values + one) for one in noise])
    simulated = np.mean(np.square(fits - truth.values))
    assert_allclose(problems.risk(small.spectrum, RIDGE, truth).total, simulated, rtol=0.05)


def test_spectrum__has_the_scores_of_the_oracle(small):
    assert_allclose(small.spectrum.scores(RIDGE), exact.leverage_scores(small.X, small.kernel, RIDGE), atol=1e-10)


@pytest.mark.parametrize("sketch_ridge", [None, 1e-2])
def test_nystrom_spectrum__has_the_scores_of_the_oracle(small, sketch_ridge):
    landmarks = choices.uniform(small, 12, 0)
    weights = None if sketch_ridge is None else landmarks.penalty(60, sketch_ridge)
    expected = exact.nystrom_scores(small.X, small.kernel, RIDGE, landmarks.indices, weights)
    found = problems.nystrom_spectrum(small, landmarks, sketch_ridge).scores(RIDGE)
    assert_allclose(found, expected, atol=1e-8)


def check_spectrum_of_all_columns(problem):
    everything = merge(np.arange(len(problem.X)), None)
    for truth in problem.truths.values():
        assert_allclose(problem.ratio(problems.nystrom_spectrum(problem, everything), truth), 1.0, rtol=1e-6)


def test_nystrom_spectrum__of_all_columns_is_exact(small):
    check_spectrum_of_all_columns(small)


@pytest.mark.slow
def test_nystrom_spectrum__of_all_columns_is_exact_for_the_paper_s_points(synth):
    check_spectrum_of_all_columns(synth)


def test_nystrom_spectrum__of_the_linear_kernel_is_exact_once_the_landmarks_span_the_features():
    generator = np.random.default_rng(0)
    X = generator.standard_normal((50, 4)) * 10.0 ** np.array([0, 2, 5, 7])
    problem = problems.measured("scaled", X, Linear(), RIDGE, generator.standard_normal(50))
    landmarks = merge(np.arange(6), None)
    assert_allclose(problem.ratio(problems.nystrom_spectrum(problem, landmarks)), 1.0, rtol=1e-6)


def test_optimal_noise__makes_the_ridge_the_best(synth):
    for truth in synth.truths.values():
        risks = [problems.risk(synth.spectrum, synth.ridge * factor, truth).total for factor in (0.95, 1.0, 1.05)]
        assert min(risks) == risks[1]


def test_residual_noise__is_the_mean_square_where_nothing_is_fitted(small):
    y = np.random.default_rng(2).standard_normal(60)
    assert_allclose(problems.residual_noise(small.spectrum, 1e9, y), np.mean(np.square(y)), rtol=1e-6)


def test_rank_scores__sum_to_the_rank(synth):
    for k in (1, 24, 500):
        assert_allclose(np.sum(problems.rank_scores(synth.spectrum, k)), k)
    assert_allclose(problems.rank_scores(synth.spectrum, 500), 1.0)


def test_synth_points__are_symmetric_and_rare_in_the_middle():
    points = problems.synth_points()
    assert_allclose(points + points[::-1], 1.0, atol=1e-12)
    assert np.sum(abs(points - 0.5) < 0.25) < 0.1 * len(points)


@pytest.mark.parametrize("name", REPLACED)
def test_choices__draw_p_rows_with_replacement(synth, name):
    choose = getattr(choices, name)
    landmarks = choose(synth, 40, 3)
    assert landmarks.n_draws == 40
    assert landmarks.probabilities is not None
    assert_allclose(choose(synth, 40, 3).indices, landmarks.indices)


@pytest.mark.parametrize("name", ["distinct", "residual"])
def test_choices__take_p_different_rows(synth, name):
    assert len(getattr(choices, name)(synth, 40, 3).indices) == 40


def test_constant_diagonal__tells_kernels_apart(small, synth):
    assert choices.constant_diagonal(synth)
    assert choices.constant_diagonal(small) is isinstance(small.kernel, Gaussian)


def test_estimated_leverage__refuses_what_round_off_decides():
    X = np.random.default_rng(0).standard_normal((50, 4)) * 10.0 ** np.array([0, 2, 5, 7])
    problem = problems.measured("scaled", X, Linear(), RIDGE, X[:, 0])
    with pytest.raises(RidgeTooSmall, match="smallest ridge that works"):
        choices.estimated_leverage(problem, 10, 0)
    found = table1.measure(problem, 10, 1)
    assert found["leverage, daskrr"]["note"] == found["residual, daskrr"]["note"] == "refused"
    assert found["leverage, exact"]["ratios"]["fit"]["median"] > 0


def test_average_smoother__of_one_part_is_exact_regression(small):
    smoother = divide_and_conquer.average_smoother(small, 1, 0)
    found = divide_and_conquer.smoother_risk(smoother, small.truth)
    assert_allclose(found, problems.risk(small.spectrum, RIDGE, small.truth), rtol=1e-6)


def test_average_smoother__averages_the_fits_of_its_parts(small):
    y = np.random.default_rng(3).standard_normal(60)
    parts = np.array_split(np.random.default_rng(5).permutation(60), 3)
    fits = []
    for part in parts:
        K = small.kernel(small.X[part], small.X[part]) + len(part) * RIDGE * np.eye(len(part))
        fits.append(small.kernel(small.X, small.X[part]) @ np.linalg.solve(K, y[part]))
    assert_allclose(divide_and_conquer.average_smoother(small, 3, 5) @ y, np.mean(fits, axis=0), atol=1e-8)


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    def command(module, name, *options):
        monkeypatch.delenv("DASKRR_DATA", raising=False)
        target = tmp_path / "new folder" / name
        monkeypatch.setattr(sys, "argv", ["", "--output", str(target), *options])
        assert module.main() == 0
        return json.loads(target.with_suffix(".json").read_text()), capsys.readouterr().out

    return command


def test_table1__needs_no_data_for_synth(run):
    report, text = run(table1, "table.json", "--seeds", "2")
    first, *others = report["results"]
    assert first["choices"]["diagonal"]["note"] == "= uniform"
    assert first["choices"]["leverage, exact"]["ratios"]["sine"]["median"] < 1.05
    assert all(len(one["ratios"]["sine"]["values"]) == 2 for one in first["choices"].values())
    assert len(others) == 10
    assert all("--data" in row["missing"] for row in others)
    assert text.count("no data folder") == 10


def test_table1__computes_the_rows_whose_data_are_there(tmp_path):
    generator = np.random.default_rng(0)
    X = generator.standard_normal((2100, 2))
    np.savez(tmp_path / "pumadyn-32fm.npz", X=X, y=X[:, 0] + 0.1 * generator.standard_normal(2100))
    linear = next(row for row in table1.ROWS if (row.kernel, row.dataset) == ("Linear", "Pum-32fm"))
    found = table1.compute(linear, tmp_path, 1)
    assert (found["n"], found["features"]) == (2000, 2)
    assert_allclose(found["d_eff"], 2.0, rtol=1e-3)
    assert_allclose(found["choices"]["leverage, daskrr"]["ratios"]["fit"]["median"], 1.0, rtol=1e-4)
    absent = next(row for row in table1.ROWS if row.dataset == "Gas2")
    assert table1.compute(absent, tmp_path, 1)["missing"] == "gas-batch2.npz is not in the data folder"


@pytest.mark.slow
def test_figure1__draws_and_reports(run, tmp_path, monkeypatch):
    monkeypatch.setattr(figure1, "LANDMARKS", (8, 48))
    report, text = run(figure1, "figure.png", "--seeds", "2")
    scores, risks = report["results"]["scores"], report["results"]["risks"]
    lower, value, upper = (np.array(scores[name]) for name in ("lower", "scores", "upper"))
    assert np.all((lower <= value) & (value <= upper))
    assert risks["curves"]["uniform"][0]["median"] > risks["curves"]["leverage, exact"][0]["median"]
    assert_allclose(risks["curves"]["residual, daskrr"][1]["median"], risks["exact"], rtol=0.02)
    assert (tmp_path / "new folder" / "figure.png").stat().st_size > 10_000
    assert "picture: " in text


@pytest.mark.slow
def test_divide_and_conquer__draws_and_reports(run, tmp_path, monkeypatch):
    monkeypatch.setattr(divide_and_conquer, "PARTS", (2, 16))
    monkeypatch.setattr(divide_and_conquer, "CLOUD_ROWS", 200)
    report, text = run(divide_and_conquer, "comparison.json", "--seeds", "2")
    first, second = report["results"]
    assert (first["problem"], second["problem"]) == ("Synth", "Cloud")
    assert first["evaluations"] == [500**2 // 2, 500**2 // 16]
    for points in first["curves"].values():
        assert len(points[0]["values"]) == 2
    assert "Pum-32nh: no data folder" in text
    assert (tmp_path / "new folder" / "comparison.png").stat().st_size > 10_000


def _slow_if_large(row):
    is_large = row.kernel == "RBF" and row.dataset != "Gas2"
    return pytest.param(row, marks=pytest.mark.slow) if is_large else row


ROWS = [_slow_if_large(row) for row in table1.ROWS]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.kernel}-{row.dataset}")
def test_dimensions__are_the_printed_ones(row):
    folder = os.environ.get("DASKRR_DATA")
    if reason := row.missing(Path(folder) if folder else None):
        pytest.skip(reason)
    found = table1.dimensions(row.problem(Path(folder) if folder else None))
    d_eff, d_mof, _ = row.printed
    assert abs(found["d_eff"] - d_eff) <= 1
    assert abs(found["d_mof_as_printed"] - d_mof) <= 1
    assert found["d_eff"] <= found["d_mof"] <= found["d_mof_as_printed"] + 1e-6
