"""The benchmarks run to their end on small sizes, report what they promise, and leave no process behind."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from numpy.testing import assert_allclose

import daskrr
from benchmarks import (
    bench_certificate,
    bench_peers,
    bench_regression,
    bench_sampling,
    bench_scale,
    criteria,
    peers,
    scale_workers,
    validity,
)
from benchmarks.bench_memory import judge
from benchmarks.harness import MIB, peak_bytes
from daskrr import exact
from daskrr.kernels import Gaussian, native

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Compiled modules are kept for the module's processes, which import the same packages a dozen times."""
    kept = tmp_path_factory.mktemp("compiled")
    return os.environ | {"PYTHONPYCACHEPREFIX": str(kept), "PYTHONDONTWRITEBYTECODE": ""}


@pytest.fixture
def quick_report(environment, tmp_path):
    def run(question, *more):
        output = tmp_path / "new folder" / "report.json"
        command = [sys.executable, "-m", f"benchmarks.bench_{question}", "--quick", "--output", str(output), *more]
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment | {"TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                text, complaints = process.communicate(timeout=500)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        assert process.returncode == 0, complaints
        assert {entry.name for entry in tmp_path.iterdir()} <= {"new folder", "dask-scratch-space"}
        _, left = psutil.wait_procs(_session(process.pid), timeout=30)
        assert not left
        return json.loads(output.read_text()), text

    return run


def _session(leader):
    """Processes of a session, without those that have ended."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def _check_head(report, question):
    assert report["benchmark"] == question
    assert report["quick"] is True
    assert isinstance(report["seed"], int)
    assert report["date"].startswith("20")
    assert {"cpu", "cores", "memory_bytes", "load_average"} <= set(report["machine"])
    assert report["machine"]["memory_bytes"] > 256 * MIB
    assert {"python", "daskrr", "numpy", "dask", "zarr"} <= set(report["versions"])
    ridges = report["parameters"].get("ridge", report["parameters"].get("ridges"))
    assert question == "products" or np.min(ridges) > 0


@pytest.mark.slow
def test_limit(quick_report):
    report, text = quick_report("limit")
    _check_head(report, "limit")
    assert "T_limit/T" in text
    assert report["disturbed"] is ("DISTURBED" in text)
    assert [case["dtype"] for case in report["results"]] == ["float64", "float32"]
    assert [case["work"] for case in report["results"]] == ["fit", "score"]
    for case in report["results"]:
        assert len(case["matmul_rates"]) == len(case["runs"]) + 1
        assert all(rate > 1e6 for rates in case["matmul_rates"] for rate in (rates["wall"], rates["processor"]))
        for run in case["runs"]:
            assert run["rank"] == case["n_landmarks"]
            assert 0 < run["share_of_limit"] < 1
            assert run["share_by_processor_time"] > 0
            assert_allclose(run["share_of_limit"], run["limit_seconds"] / run["seconds"])
            assert run["others"] >= 0
            if case["work"] == "score":
                parts = run["pass_1_seconds"] + run["pass_2_seconds"] + run["other_seconds"]
                assert_allclose(parts, run["seconds"])
                assert 0 < run["algebra_seconds"] < run["pass_1_seconds"]


@pytest.mark.slow
def test_gpu(quick_report):
    report, text = quick_report("gpu", "--part", "large")
    _check_head(report, "gpu")
    assert "T_limit/T" in text
    assert "not judged" in text
    (case,) = report["results"]
    assert (case["device"], case["stored"], case["certify"]) == ("cpu", "float32", True)
    assert case["gpu_bytes"] == case["plan_gpu_bytes"] == 0
    assert 0 < case["share_of_limit"] < 1
    assert_allclose(case["share_of_limit"], case["limit_seconds"] / case["seconds"])
    assert case["peak_bytes"] <= case["plan_worker_bytes"]
    assert case["problems"] == []


@pytest.mark.slow
def test_products(quick_report):
    report, text = quick_report("products", "--processes", "1")
    _check_head(report, "products")
    assert "Share of a matrix multiply" in text
    assert report["parameters"]["processes"] == 1
    (result,) = report["results"]
    owners = ["BLAS", "own"] if native.has_wide_registers() else ["BLAS"]
    assert set(result["shares"]) == {
        f"{name}, {owner}" for name in ("triangular", "Gram", "columns", "probe") for owner in owners
    }
    assert all(share > 0 for share in result["shares"].values())
    assert (result["p"], result["used"]) == (64, owners[-1])


@pytest.mark.slow
def test_memory(quick_report):
    report, text = quick_report("memory")
    _check_head(report, "memory")
    assert "not judged" in text
    results = report["results"]
    assert results["few"]["n_rows"] < results["many"]["n_rows"]
    assert results["limited"]["memory_limit"] > 0
    for name in ("few", "many", "limited"):
        run = results[name]
        assert len(run["peak_bytes"]) == report["parameters"]["workers"]
        assert all(16 * MIB < peak < run["plan_worker_bytes"] for peak in run["peak_bytes"])
        assert run["plan_worker_bytes"] < run["plan_memory_limit"]
        assert not run["restarted"]
        assert not run["paused"]


@pytest.mark.slow
def test_peers(quick_report):
    report, text = quick_report("peers")
    _check_head(report, "peers")
    assert all(f"{name} left out: {reason}" in text for name, reason in report["left_out"].items())
    (result,) = report["results"].values()
    assert result["failed"] == {}
    assert result["disturbed"] is ("DISTURBED" in text)
    assert {one["peer"] for one in result["comparisons"]} == set(peers.PEERS) - set(report["left_out"])
    for one in result["comparisons"]:
        assert one["peer"] in text
        few = one["small"]
        assert 0 < min(few["median_error"], few["rms_error"]) <= few["largest_error"]
        assert "rms_error" not in one["large"]
        if not one["daskrr"]:
            assert few["rms_error"] < result["ladder"][-1]["rms_error"]
            continue
        assert one["daskrr"]["in process"]["small"]["rms_error"] <= few["rms_error"]
        assert len(one["daskrr"]["cluster"]["large"]["peak_bytes"]) == 1 + report["parameters"]["workers"]
        ratios = [clocks for places in one["ratios"].values() for clocks in places.values()]
        assert sum(ratio < 1 for clocks in ratios for ratio in clocks.values()) == len(one["peer_wins"])


@pytest.mark.parametrize("name", [name for name in peers.PEERS if not peers.missing(name)])
def test_peers__are_near_the_exact_scores_with_many_landmarks(name, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    X = np.random.default_rng(0).standard_normal((300, 3))
    truth = exact.leverage_scores(X, Gaussian(2.0), 1e-3)
    for run in peers.answers_of(name, X, peers.Setting(2.0, 1e-3, 150), 0, truth):
        assert run["rms_error"] < (0.05 if run["answer"] == "plain" else 2)
        assert 0 < run["n_landmarks"] <= 300
        assert run["seconds"] > 0


def test_peers__that_are_on_no_index_are_left_out_without_their_folder(monkeypatch, tmp_path):
    for folder in ("", str(tmp_path)):
        monkeypatch.setenv(peers.FOLDER, folder)
        assert "rpcholesky/rpcholesky.py" in peers.missing("RPCholesky")
    monkeypatch.delenv(bench_peers.DATA, raising=False)
    assert bench_peers.DATA in bench_peers.absent("kin40k")
    assert bench_peers.absent(bench_peers.MADE_UP) is None


def test_peers__data_with_too_few_rows_are_repeated(monkeypatch, tmp_path):
    monkeypatch.setenv(bench_peers.DATA, str(tmp_path))
    np.savez(tmp_path / bench_peers.FILES["kin40k"], X=np.random.default_rng(0).normal(3.0, 2.0, (50, 2)))
    few, _ = bench_peers.rows_of("kin40k", 40)
    many, how = bench_peers.rows_of("kin40k", 400)
    assert len(np.unique(few, axis=0)) == 40
    assert len(np.unique(many, axis=0)) == 400
    assert "repetition" in how
    for X in (few, many):
        assert_allclose(X.mean(axis=0), 0, atol=0.01)
        assert_allclose(X.std(axis=0), 1, atol=0.01)


def test_peers__as_accurate_from_there_on():
    rungs = [{"n_landmarks": p, "rms_error": error} for p, error in [(16, 0.3), (32, 0.1), (64, 0.2), (128, 0.05)]]
    for error, least in [(0.4, 16), (0.25, 32), (0.1, 128), (0.05, 128), (0.04, None)]:
        assert bench_peers.as_accurate(rungs, {"rms_error": error}, "rms_error") == least
    assert bench_peers.FULL.ladder[:5] == (16, 19, 23, 27, 32)
    assert bench_peers.FULL.ladder[-1] == bench_peers.FULL.most


def _timed(seconds, error=0.1):
    return {"seconds": seconds, "processor_seconds": 2 * seconds, "rms_error": error, "median_error": error}


def test_peers__tells_where_a_peer_wins():
    one = {"peer": "peer", "answer": "plain", "small": _timed(1.0), "large": _timed(9.0)}
    rungs = [{"n_landmarks": 64} | _timed(0.5)]
    ours = {
        "in process": {"small": {64: rungs[0]}, "large": {64: _timed(3.0)}},
        "cluster": {"small": {64: _timed(2.0)}, "large": {64: _timed(3.0)}},
    }
    found = bench_peers.compared(one, rungs, ours)
    assert found["ratios"]["large"]["cluster"] == {"processor": 3.0, "wall": 3.0}
    assert found["peer_wins"] == ["small rows, cluster, processor", "small rows, cluster, wall"]
    assert found["by_median"] == {"n_landmarks": 64, "processor_ratio": 2.0}
    (line,) = bench_peers.ranges({"a": {"comparisons": [found]}}, "small")
    assert line["cluster: wall"] == "0.5"
    never = bench_peers.compared(one, [{"n_landmarks": 64} | _timed(0.5, 0.2)], {})
    assert never["daskrr"] is None
    assert never["peer_wins"] == ["daskrr is never as accurate"]


@pytest.mark.slow
def test_certificate(quick_report):
    report, text = quick_report("certificate")
    _check_head(report, "certificate")
    results = report["results"]
    assert "never judged" in text
    assert "not judged" in text
    assert results["problems"] >= 15
    assert results["pairs"] > 500
    assert {totals["family"] for totals in results["validity"]} == {
        "clouds", "large clouds", "two points", "few points",
    }  # fmt: skip
    assert {totals["failure_probability"] for totals in results["validity"]} == {1e-6, 0}
    for totals in results["validity"]:
        assert set(totals["refused"]) <= {"RidgeTooSmall"}
        assert all(1 <= width <= 1e9 for width in totals["widths"].values())
        assert totals["outside"] == 0
    assert results["failures"] == []
    for found in results["widths"]:
        assert 1 <= found["median"] <= found["most"]
        assert found["judged"] is (found["ridge"] < 1e-2)
        assert found["n_landmarks"] == math.ceil(5 * found["effective_dimension"])
    assert {found["sampling"] for found in results["estimates"]} == {"uniform", "diagonal", "leverage", "residual"}
    average = results["average_errors"]
    assert average["estimate"] < min(average["scores"], average["self correction"])


def _checked(problems=2000, pairs=500, **changes):
    family = {"family": "clouds", "dtype": "float64"}
    runs = [{"problem": family | {"number": number}, "pairs": pairs} for number in range(problems)]
    return [runs[0] | changes, *runs[1:]]


def _certified(median=1.1, most=1.2, n_features=5, judged=True):
    return {"median": median, "most": most, "n_features": n_features, "judged": judged}


def _estimated(estimate, scores=0.5, self_correction=0.2):
    values = {"estimate": estimate, "scores": scores, "self correction": self_correction}
    return {"answers": {name: {"mean_log_error": value} for name, value in values.items()}}


@pytest.mark.parametrize(
    ("runs", "width", "estimated", "failed"),
    [
        (_checked(), _certified(), _estimated(0.1), None),
        (_checked(2001, refused="RidgeTooSmall"), _certified(), _estimated(0.1), None),
        (_checked(), _certified(9.0, 9.0, judged=False), _estimated(0.1), None),
        (_checked(), _certified(1.4, 1.7, n_features=8), _estimated(0.1), None),
        (_checked(problems=1999, pairs=1000), _certified(), _estimated(0.1), "enough problems and pairs"),
        (_checked(pairs=499), _certified(), _estimated(0.1), "enough problems and pairs"),
        (_checked(outside=1), _certified(), _estimated(0.1), "every exact score within its interval"),
        (_checked(2001, refused="CheckFailed"), _certified(), _estimated(0.1), "no refusal but of too small a ridge"),
        (_checked(), _certified(median=1.16), _estimated(0.1), "median width"),
        (_checked(), _certified(most=1.26), _estimated(0.1), "95 % width"),
        (_checked(), _certified(), _estimated(0.1, scores=0.05), "estimate better than scores"),
        (_checked(), _certified(), _estimated(0.3), "estimate better than self correction"),
    ],
)
def test_certificate_is_judged(runs, width, estimated, failed):
    checks = bench_certificate.judge(runs, [width], [estimated])
    assert [name for name, passed in checks.items() if not passed] == ([failed] if failed else [])


def test_certificate_counts_equal_rows_once_and_what_is_outside():
    X = np.array([[1.0], [2.0], [1.0], [1.0]])
    distinct = validity.Distinct.of(X)
    np.testing.assert_array_equal(X[distinct.first], [[1.0], [2.0]])
    np.testing.assert_array_equal(distinct.counts, [3, 1])
    lower, upper = distinct.narrowest(np.array([[0.1], [0.2], [0.3], [0.1]]), np.array([[0.5], [0.4], [0.5], [0.4]]))
    np.testing.assert_array_equal([lower, upper], [[[0.3], [0.2]], [[0.4], [0.4]]])
    for truth, outside in [(0.35, 0), (0.29, 1), (0.41, 1), (np.nan, 0)]:
        found = validity.compare(lower, upper, np.array([[truth], [0.3]]), np.full((2, 1), 1e-3))
        assert found["outside"] == found["strictly_outside"] == outside
        assert found["pairs"] == 2 - np.isnan(truth)
        assert (found["worst_violation"] > 0.02) == (found["furthest_of_allowed"] > 9) == bool(outside)
    assert found["widths"] == {"median": 2.0, "most": 2.0}


@pytest.mark.parametrize("sampling", ["residual", "leverage"])
def test_certificate_tries_again_at_the_smallest_ridge_that_works(sampling):
    problem, X = validity.repeated_problem("two points", 2, 2, 2)
    tiny = dataclasses.replace(problem, ridges=(1e-30, 1e-29), sampling=sampling)
    for run in validity.check_validity(tiny, X):
        smallest, larger = run["ridges"]
        assert 1e-20 < smallest < 1
        assert larger == pytest.approx(10 * smallest)


@pytest.mark.slow
def test_sampling(quick_report):
    report, text = quick_report("sampling")
    _check_head(report, "sampling")
    assert "picture: " in text
    assert "winner at equal time" in text
    for result in report["results"]:
        assert set(bench_sampling.SCHEMES) <= set(result["schemes"])
        for points in result["schemes"].values():
            for point in points:
                assert point["processor_seconds"] > 0
                assert 0 <= point["median"] <= point["most"]
                assert point["deviation"] >= 0
                assert (point["error"] is not None) is result["problem"]["exact"]


def _points(*pairs):
    return [{"seconds": seconds, "median": width} for seconds, width in pairs]


@pytest.mark.slow
def test_durable(quick_report):
    report, text = quick_report("durable")
    _check_head(report, "durable")
    assert "checkpoints of" in text
    (pair,) = report["pairs"]
    assert report["overhead"] == pair["ratio"] == pair["durable"] / pair["plain"]
    assert report["checkpoints"]["records"] >= 4


@pytest.mark.slow
def test_scale(quick_report):
    report, text = quick_report("scale")
    _check_head(report, "scale")
    assert "not judged" in text
    runs = report["workers"]["results"]
    assert {one["workers"] for one in runs} == {2**power for power in range(len(os.sched_getaffinity(0)).bit_length())}
    assert {one["kind"] for one in runs} == {"lazy", "durable"}
    for one in runs:
        assert 0 < one["share_of_limit"] < 1
        assert 0 < one["busy"] <= 1
        passes = sum(found["seconds"] for found in one["passes"].values())
        assert_allclose(one["serial_seconds"], one["seconds"] - passes)
        assert all(found["busy_seconds"] <= one["workers"] * found["seconds"] for found in one["passes"].values())
    tasks = report["tasks"]["results"]
    assert all(set(one["milliseconds"]) == {"client", "scheduler", "workers", "wall"} for one in tasks["costs"])
    for one in tasks["small"]:
        assert_allclose(sum(one["steps"].values()), one["seconds"])
        assert one["steps"]["pass 1"] > 0
    assert [one["n_chunks"] for one in report["shapes"]["results"]] == [200, 1]
    assert all(report["shapes"]["checks"].values())
    for one in report["simulated"]["results"]:
        assert 0 < one["efficiency"] <= 1
        assert one["spans_run"] >= one["tasks"] * one["workers"]


def test_scale__a_pass_is_from_its_first_task_to_its_last():
    run = "0123456789abcdef" * 2
    times = [(0.0, 1.0), (0.5, 2.0), (2.0, 3.0)]
    tasks = [(f"gram-{run}-span-{number}", *one) for number, one in enumerate(times)]
    found = scale_workers.passes_of([*tasks, (f"add-grams-{run}-7", 2.5, 4.0), ("other", 9.0, 10.0)], n_workers=2)
    (gram,) = found.values()
    assert gram == {"tasks": 3, "seconds": 3.0, "task_seconds": 3.5, "longest_task": 1.5, "busy_seconds": 4.0}


def test_scale__judges_sixteen_workers_by_what_is_required_of_them():
    case = scale_workers.CASES[0]
    good = {"case": case.name, "workers": 16, "n_rows": case.n_rows, "share_of_limit": case.required, "busy": 0.93}
    good |= {"per_row_ratio": 1.15, "seconds": 10.0, "kind": "lazy"}
    durable = good | {"kind": "durable", "seconds": 10.5}
    assert all(scale_workers.checks_of([good, durable]).values())
    assert scale_workers.checks_of([good | {"workers": 2}, good | {"n_rows": 400_000}]) == {}
    bad = {"share_of_limit": 0.57, "busy": 0.92, "per_row_ratio": 1.16, "seconds": 10.6}
    for name, value in bad.items():
        checks = scale_workers.checks_of([good, durable | {name: value}])
        assert list(checks.values()).count(False) == 1


def test_scale__says_what_breaks_first():
    case = {"name": "", "p": 256, "d": 8, "block_rows": 32_768, "seconds_per_row": 1e-5}
    few = bench_scale.estimate(case, 1e-3, n_rows=10**8, cores=16)
    assert few["seconds"] == pytest.approx(62.5)
    assert few["breaks_first"].startswith("nothing")
    assert bench_scale.estimate(case, 1e-1, n_rows=10**8, cores=1000)["breaks_first"].startswith("the scheduler")
    many = bench_scale.estimate(case, 1e-9, n_rows=10**8, cores=1000)
    assert many["breaks_first"] == "storage: 12.8 GB/s"


@pytest.mark.slow
def test_append(quick_report):
    report, text = quick_report("append")
    _check_head(report, "append")
    assert report["same_bits"]
    (turn,) = report["turns"]
    assert report["ratios"]["anew"] == turn["update"] / turn["anew"]
    assert report["update"]["rows_added"] == 200
    assert "the update takes" in text


@pytest.mark.slow
def test_restart(quick_report):
    report, text = quick_report("restart")
    _check_head(report, "restart")
    (one,) = report["results"]
    assert one["done"]
    assert one["same_bits"]
    assert one["again"] == one["reads"] - report["undisturbed"]["reads"] <= one["bound"]
    assert "chunks read again" in text


@pytest.mark.slow
def test_regression(quick_report):
    report, text = quick_report("regression")
    _check_head(report, "regression")
    assert "test RMSE" in text
    found = {(one["method"], one["n_columns"]): one for one in report["results"]}
    assert set(found) == {("daskrr", 50), ("daskrr", 100), ("scikit-learn", 50), ("scikit-learn", 100), ("exact", 540)}
    exact = found["exact", 540]["rmse"]
    assert 0.05 < exact < 0.4
    assert all(0.9 * exact < one["rmse"] < 1.0 for one in found.values())
    assert report["checks"] == {}


@pytest.mark.slow
def test_regression__compares_the_errors_to_choose_by(quick_report):
    report, text = quick_report("regression", "--criteria")
    _check_head(report, "regression")
    assert "test error above the least" in text
    found = report["criteria"]["charges"]
    assert {one["criterion"] for one in found} == set(criteria.CRITERIA)
    assert all(0 <= one["both"] < 1 and 0 <= one["ridge"] < 1 for one in found)


def test_criteria__judges_by_the_test_errors_of_the_models_themselves():
    _, X, y = criteria.made_up()
    split, kernel = criteria.Split.of(X, y, 150, 0), Gaussian(1.0)
    errors = split.test_errors(kernel, 30, 0)
    for number in (9, 14):
        model = daskrr.NystromKernelRidge(kernel, criteria.RIDGES[number], 30, fit_intercept=True, random_state=0)
        found = model.fit(split.X, split.y).predict(split.X_test)
        assert errors[number] == pytest.approx(np.sqrt(np.mean((found - split.y_test) ** 2)), rel=1e-6)


def test_regression__judges_what_was_published():
    made = [bench_regression.Found("daskrr", "kin40k", size, 1.0, 0.2, 1.0, 1e-3) for size in (2000, 4000)]
    assert list(bench_regression._checks(made).values()) == [True, False]


def test_figures_at_equal_time():
    points = _points((1.0, 4.0), (4.0, 1.0))
    assert_allclose(bench_sampling.at_time(points, 2.0, "seconds", "median"), 2.0)
    assert bench_sampling.at_time(points, 5.0, "seconds", "median") is None
    schemes = dict.fromkeys(bench_sampling.SCHEMES, points) | {"uniform": _points((1.0, 8.0), (4.0, 2.0))}
    schemes["diagonal"] = _points((1.0, 2.0), (4.0, 0.5))
    ranked = bench_sampling.rank_at_equal_time([{"schemes": schemes}], "seconds")
    assert (ranked[0]["scheme"], ranked[-1]["scheme"]) == ("diagonal", "uniform")
    assert_allclose([ranked[0]["relative_to_default"], ranked[-1]["relative_to_default"]], [0.5, 2.0])
    schemes["uniform"] = _points((5.0, 2.0), (6.0, 1.0))
    assert bench_sampling.rank_at_equal_time([{"schemes": schemes}], "seconds") == []


def test_coarse_to_fine_chooses_different_rows():
    X = np.random.default_rng(0).standard_normal((500, 2))
    chosen = bench_sampling.coarse_to_fine(X, Gaussian(0.5), 40, 0)
    assert len(np.unique(chosen)) == len(chosen) == 40
    repeated = bench_sampling.coarse_to_fine(np.repeat(X[:10], 50, axis=0), Gaussian(0.5), 40, 0)
    assert len(np.unique(repeated)) == len(repeated) <= 40


def test_errors_of_known_scores():
    truth = np.linspace(0.01, 0.9, 100)
    found = peers.errors(np.where(np.arange(100) < 10, 0.0, 1.5) * truth, truth)
    assert_allclose(found["rms_error"], math.sqrt(0.1 + 0.9 * 0.25))
    assert_allclose([found["median_error"], found["largest_error"]], [0.5, 1.0])


def _run(peak, data=1000, **changes):
    run = {"peak_bytes": [peak // 2, peak], "plan_worker_bytes": 200, "data_bytes": data, "memory_limit": 300}
    return run | {"restarted": False, "paused": False} | changes


@pytest.mark.parametrize(
    ("runs", "failed"),
    [
        ((_run(100), _run(109), _run(109)), None),
        ((_run(100), _run(111), _run(109)), "independent of the rows"),
        ((_run(190), _run(199), _run(201)), "below the plan"),
        ((_run(100), _run(100), _run(100, data=600)), "rows exceed the limits"),
        ((_run(100), _run(100), _run(100, paused=True)), "no worker restarted or paused"),
        ((_run(100), _run(100), _run(100, restarted=True)), "no worker restarted or paused"),
    ],
)
def test_memory_is_judged(runs, failed):
    assert [name for name, passed in judge(*runs).items() if not passed] == ([failed] if failed else [])


def test_peak_of_a_process():
    before = peak_bytes()
    held = np.ones(64 * MIB // 8)
    assert peak_bytes() >= before
    assert peak_bytes(os.getpid()) > held.nbytes
