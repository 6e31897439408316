"""Row 44: inputs in tiny chunks, in one large chunk, and with many features run within plan, to the same bits."""

import numpy as np
import pytest
import zarr
from distributed import Client

import daskrr
from benchmarks.harness import peak_bytes
from daskrr.apps.clusters import local_cluster
from daskrr.kernels import Gaussian, Linear
from daskrr.runtime import executors
from daskrr.storage.zarr_input import open_zarr

pytestmark = pytest.mark.slow

NAMES = ("estimate", "lower", "residual", "scores", "upper")
# Rows, features, rows of a chunk, kernel, landmarks.
SHAPES = {
    "5,000 chunks of 10 rows": (50_000, 1, 10, Gaussian(0.5), 16),
    "one chunk of 100 MB": (1_600_000, 8, 1_600_000, Gaussian(3.0), 32),
    "20,000 features": (600, 20_000, 50, Linear(), 40),
}


def stored(path, n_rows, n_features, chunk_rows):
    array = zarr.create_array(
        str(path), shape=(n_rows, n_features), chunks=(chunk_rows, n_features), dtype="float64", compressors=None
    )
    generator = np.random.default_rng(0)
    step = chunk_rows * max(1, 10_000 // chunk_rows)
    for start in range(0, n_rows, step):
        array[start : start + step] = generator.standard_normal((min(step, n_rows - start), n_features))
    return path


def score(source, output, kernel, n_landmarks):
    daskrr.score_to_zarr(
        source, output, kernel, 1e-3, n_landmarks, certify=True, random_state=0, sampling="uniform", progress=False
    )
    return {name: open_zarr(str(output / name))[...].tobytes() for name in NAMES}


def peak_of_workers(client):
    return max(client.run(peak_bytes).values())


@pytest.mark.parametrize("shape", SHAPES)
def test_shape__has_the_same_bits_on_any_workers_within_plan(shape, tmp_path, monkeypatch):
    n_rows, n_features, chunk_rows, kernel, n_landmarks = SHAPES[shape]
    source = stored(tmp_path / "points.zarr", n_rows, n_features, chunk_rows)
    monkeypatch.setattr(executors, "cpu_count", lambda: 3)
    expected = score(source, tmp_path / "here.zarr", kernel, n_landmarks)
    with local_cluster(2) as cluster, Client(cluster) as client:
        plan = daskrr.plan(source, kernel, 1e-3, n_landmarks, certify=True, sampling="uniform")
        assert score(source, tmp_path / "there.zarr", kernel, n_landmarks) == expected
        assert peak_of_workers(client) <= plan.worker_bytes
