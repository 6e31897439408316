"""Points and scores on an S3-compatible store, over HTTP."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest
import s3fs
import zarr

import daskrr
from daskrr.errors import OutputExists

OPTIONS = {
    "kernel": daskrr.kernels.Gaussian(1.0),
    "ridge": 1e-2,
    "n_landmarks": 50,
    "random_state": 0,
    "block_rows": 250,
    "progress": False,
}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _answers(url: str, deadline: float) -> bool:
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return True
        except OSError:
            time.sleep(0.1)
    return False


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a bucket on a server of our own; its credentials are in the environment alone."""
    address = f"http://127.0.0.1:{_free_port()}"
    settings = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": address,
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    command = [sys.executable, "-c", "from moto.server import main; main()", "-H", "127.0.0.1", "-p"]
    log = (tmp_path_factory.mktemp("s3") / "server.log").open("wb")
    with pytest.MonkeyPatch.context() as patch, log:
        for name, value in settings.items():
            patch.setenv(name, value)
        server = subprocess.Popen([*command, address.rpartition(":")[2]], stdout=log, stderr=log, env=dict(os.environ))
        try:
            assert _answers(f"{address}/moto-api/", time.monotonic() + 120)
            s3fs.S3FileSystem().mkdir("points")
            yield "s3://points"
        finally:
            server.terminate()
            server.wait(60)


def test_score_to_zarr__reads_and_writes_s3(bucket: str) -> None:
    X = np.random.default_rng(0).standard_normal((1000, 3))
    array = zarr.create_array(f"{bucket}/x.zarr", shape=X.shape, chunks=(250, 3), dtype=X.dtype)
    array[:] = X
    summary = daskrr.score_to_zarr(f"{bucket}/x.zarr", f"{bucket}/scores.zarr", **OPTIONS)
    assert summary["parameters"]["input"] == f"{bucket}/x.zarr"
    assert "secret-of-the-test" not in repr(summary)
    stored = zarr.open_array(f"{bucket}/scores.zarr/scores", mode="r")[:]
    np.testing.assert_array_equal(stored, daskrr.leverage_scores(X, **OPTIONS).scores.compute())
    with pytest.raises(OutputExists, match="holds scores already"):
        daskrr.score_to_zarr(f"{bucket}/x.zarr", f"{bucket}/scores.zarr", **OPTIONS)
    assert daskrr.top_rows(f"{bucket}/scores.zarr", 1)[0]["row"] == summary["top"][0]["row"]
