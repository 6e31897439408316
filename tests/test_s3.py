"""Points and scores on an S3-compatible store, over HTTP."""

import numpy as np
import pytest
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
