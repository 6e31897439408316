"""The benchmarks run to their end on small sizes, report what they promise, and leave no process behind."""

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

from benchmarks.bench_memory import judge
from benchmarks.bench_peers import TOP, errors
from benchmarks.harness import MIB, peak_bytes

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Compiled modules are kept for the module's processes, which import the same packages a dozen times."""
    kept = tmp_path_factory.mktemp("compiled")
    return os.environ | {"PYTHONPYCACHEPREFIX": str(kept), "PYTHONDONTWRITEBYTECODE": ""}


@pytest.fixture
def quick_report(environment, tmp_path):
    def run(question):
        output = tmp_path / "new folder" / "report.json"
        command = [sys.executable, "-m", f"benchmarks.bench_{question}", "--quick", "--output", str(output)]
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
                text, complaints = process.communicate(timeout=250)
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
    assert report["parameters"]["ridge"] > 0


def test_limit(quick_report):
    report, text = quick_report("limit")
    _check_head(report, "limit")
    assert "T_limit/T" in text
    assert report["disturbed"] is ("DISTURBED" in text)
    assert [case["dtype"] for case in report["results"]] == ["float64", "float32"]
    for case in report["results"]:
        assert len(case["matmul_rates"]) == len(case["runs"]) + 1
        assert all(rate > 1e6 for rates in case["matmul_rates"] for rate in (rates["wall"], rates["processor"]))
        for run in case["runs"]:
            assert run["rank"] == case["n_landmarks"]
            assert 0 < run["share_of_limit"] < 1
            assert run["share_by_processor_time"] > 0
            assert_allclose(run["share_of_limit"], run["limit_seconds"] / run["seconds"])
            parts = run["pass_1_seconds"] + run["pass_2_seconds"] + run["other_seconds"]
            assert_allclose(parts, run["seconds"])
            assert 0 < run["algebra_seconds"] < run["pass_1_seconds"]
            assert run["others"] >= 0


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


def test_peers(quick_report):
    report, text = quick_report("peers")
    _check_head(report, "peers")
    (result,) = report["results"]
    for name, found in result["libraries"].items():
        assert name in text
        if "skipped" in found:
            assert not name.startswith("daskrr")
            continue
        assert found["seconds"] > 0
        assert found["n_landmarks"] > 0
        assert min(found["peak_bytes"]) > 16 * MIB
        assert set(found["errors"]) == ({"scores", "estimate"} if name.startswith("daskrr") else {"scores"})
        assert all(math.isfinite(value) for kind in found["errors"].values() for value in kind.values())
    zarr, numpy = result["libraries"]["daskrr, Zarr"], result["libraries"]["daskrr, NumPy"]
    assert len(zarr["peak_bytes"]) == 1 + report["parameters"]["workers"]
    assert zarr["errors"]["estimate"]["median_log_error"] < zarr["errors"]["scores"]["median_log_error"]
    assert_allclose(zarr["errors"]["scores"]["mean_log_error"], numpy["errors"]["scores"]["mean_log_error"], rtol=1e-6)


def test_errors_of_known_scores():
    truth = np.linspace(0.01, 0.9, 100)
    found = errors(2.0 * truth, truth)
    assert_allclose(found["median_log_error"], math.log(2))
    assert_allclose(found["mean_log_error"], math.log(2))
    assert_allclose(found["top_ratio"], 2.0)
    assert found["top_found"] == 1.0
    assert errors(truth[::-1], truth)["top_found"] == 0.0
    assert TOP < 50


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
