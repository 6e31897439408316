"""Lazy arrays of a result on a cluster, whose keys share a scheduler with those of its run; and what it stores."""

import dask.array as da
import numpy as np
import pytest

import daskrr
from daskrr.kernels import Gaussian
from daskrr.storage.local import Files
from daskrr.storage.writing import HeldOutput

X = np.random.default_rng(0).standard_normal((300, 2))


def computed(rows, weight=None):
    result = daskrr.leverage_scores(
        rows, Gaussian(1.0), 1e-2, 30, certify=True, random_state=0, block_rows=20, sample_weight=weight
    )
    arrays = (result.residual, result.scores, result.estimate, result.lower, result.upper)
    return [array.compute() for array in arrays], result.top(5).rows


WEIGHT = np.linspace(0.5, 2.0, 300)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lazy", "weight"),
    [
        pytest.param(False, None, id="in memory-plain"),
        pytest.param(False, WEIGHT, id="in memory-weighted"),
        pytest.param(True, None, id="lazy-plain"),
        pytest.param(True, WEIGHT, id="lazy-weighted"),
    ],
)
def test_arrays__of_many_blocks_have_the_same_bits_on_a_cluster(lazy, weight, request):
    expected, highest = computed(X, weight)
    request.getfixturevalue("client")
    rows = da.from_array(X, chunks=(20, 2)) if lazy else X
    found, rows_found = computed(rows, weight)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(highest, rows_found)


def write_scores(output):
    daskrr.leverage_scores(X, Gaussian(1.0), 1e-2, 30, random_state=0, block_rows=20, progress=False).store(output)


def write_predictions(output):
    model = daskrr.NystromKernelRidge(Gaussian(1.0), 1e-2, landmarks=30, random_state=0, progress=False)
    model.fit(X, X[:, 0]).predict_to_zarr(X, output)


def write_sample(output):
    found = daskrr.leverage_scores(X, Gaussian(1.0), 1e-2, 30, random_state=0, block_rows=20, progress=False)
    daskrr.jobs.sample_rows(found, 40, random_state=0, output=output)


@pytest.mark.parametrize("write", [write_scores, write_predictions, write_sample])
def test_chunks__reach_the_disk_once_each_before_anything_is_published(write, tmp_path, monkeypatch):
    settled, missing = [], []
    settle, publish = Files.settle, HeldOutput.publish

    def note(self, keys):
        keys = list(keys)
        settled.extend(keys)
        settle(self, keys)

    def look(self, generation, kind, staged, *more):
        stored = {key for array in staged.arrays.values() for key in staged.medium.keys(array.path)}
        missing.extend({key for key in stored if "/c/" in key} - set(settled))
        return publish(self, generation, kind, staged, *more)

    monkeypatch.setattr(Files, "settle", note)
    monkeypatch.setattr(HeldOutput, "publish", look)
    write(tmp_path / "out.zarr")
    assert len(settled) == len(set(settled)) > 0
    assert missing == []
