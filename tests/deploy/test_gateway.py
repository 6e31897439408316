"""The recipe of deploy/gateway, with a gateway whose clusters are processes of this machine."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import pytest
import zarr

import daskrr
from daskrr import kernels

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.skipif(find_spec("dask_gateway_server") is None, reason="dask-gateway-server is not installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="the gateway starts processes for others, and has to run as root"),
]
RECIPE = Path(__file__).parents[2] / "deploy" / "gateway"
GENEROUS = 120


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with points and recipe, a gateway, and the environment of its users."""
    folder = tmp_path_factory.mktemp("site")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    rows = np.random.default_rng(0).standard_normal((2000, 3))
    zarr.create_array(folder / "points.zarr", shape=rows.shape, chunks=(500, 3), dtype=rows.dtype)[:] = rows
    job = (RECIPE / "job.toml").read_text().replace("127.0.0.1:8000", address)
    job = (
        job.replace('"median"', "2").replace("landmarks = 300", "landmarks = 40").replace("minimum = 2", "minimum = 1")
    )
    (folder / "job.toml").write_text(
        job.replace("worker_memory = 2", "worker_memory = 1") + "[retries]\nattempts = 1\n"
    )
    environment = os.environ | {
        "GATEWAY_PASSWORD": "password of the test",
        "GATEWAY_ADDRESS": address,
        "PYTHONPATH": str(Path(daskrr.__file__).parents[1]),
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
        "DASK_GATEWAY__AUTH__KWARGS__PASSWORD": "password of the test",
    }
    with gateway(folder, environment):
        until(lambda: answers(f"http://{address}/api/health"), folder)
        yield folder, environment


@contextlib.contextmanager
def gateway(folder, environment):
    """A gateway; it is stopped at the end, and what it has started with it."""
    config = shutil.copy(RECIPE / "dask_gateway_config.py", folder)
    command = [sys.executable, "-m", "dask_gateway_server", "--config", str(config)]
    with (folder / "gateway.log").open("wb") as log:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            yield
        finally:
            everyone = psutil.Process(server.pid).children(recursive=True)
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(GENEROUS)
            for one in [*everyone, server]:
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    one.kill()
            server.wait()


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def until(happened, folder):
    deadline = time.monotonic() + GENEROUS
    while not (found := happened()):
        assert time.monotonic() < deadline, (folder / "gateway.log").read_text()
        time.sleep(0.1)
    return found


@contextlib.contextmanager
def daskrr_run(site, *words, **settings):
    folder, environment = site
    command = [sys.executable, "-m", "daskrr.apps.cli", "run", "job.toml", *words]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=folder, env=environment | settings, **streams)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def clusters(site):
    """Schedulers and workers that the gateway has started for somebody."""
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            words, settings = one.cmdline(), one.environ()
            ours = site[1]["GATEWAY_ADDRESS"] in settings.get("DASK_GATEWAY_API_URL", "")
            if ours and "dask" in words and {"scheduler", "worker"} & set(words):
                found.append(one)
    return found


def test_run__on_a_cluster_of_the_gateway(site):
    with daskrr_run(site, "--require-tls") as process:
        output, complaints = process.communicate(timeout=GENEROUS)
    assert process.returncode == 0, complaints + (site[0] / "gateway.log").read_text()
    assert "gateway: waiting for the first of 1 to 8 workers" in complaints
    assert "written to" in output
    expected = daskrr.leverage_scores(
        site[0] / "points.zarr", kernels.Gaussian(2.0), 1e-3, 40, certify=True, random_state=0
    ).scores.compute()  # fmt: skip
    np.testing.assert_array_equal(zarr.open_array(site[0] / "scores.zarr" / "scores", mode="r")[:], expected)
    until(lambda: not clusters(site), site[0])


def test_run__stops_its_cluster_when_it_is_terminated(site):
    with daskrr_run(site, "--overwrite", "--quiet") as process:
        until(lambda: clusters(site) or process.poll() is not None, site[0])
        process.send_signal(signal.SIGTERM)
        _, complaints = process.communicate(timeout=GENEROUS)
    assert process.returncode == 143, complaints
    assert complaints.startswith("daskrr: terminated\n")
    until(lambda: not clusters(site), site[0])


def test_run__without_the_password(site):
    with daskrr_run(site, "--overwrite", DASK_GATEWAY__AUTH__KWARGS__PASSWORD="wrong") as process:
        _, complaints = process.communicate(timeout=GENEROUS)
    assert process.returncode == 3, complaints
    assert "the gateway cluster did not start" in complaints
