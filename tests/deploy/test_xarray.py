"""Arrays of xarray as rows, and workers of an environment that has it."""

import dask.array as da
import numpy as np
import pytest
import zarr
from distributed import Client

import daskrr
from benchmarks.harness import peak_bytes, worker_pids
from daskrr.apps.clusters import local_cluster
from daskrr.kernels import Gaussian
from daskrr.runtime.rows import DaskRows, open_rows

xarray = pytest.importorskip("xarray", reason="pip install '.[deploy]'")
pytestmark = pytest.mark.deploy

X = np.random.default_rng(0).standard_normal((90, 3))


def test_scores__of_a_chunked_array_are_those_of_its_values() -> None:
    rows = xarray.DataArray(da.from_array(X, chunks=(20, 3)), dims=("row", "column"))
    assert isinstance(open_rows(rows), DaskRows)
    options = {"random_state": 0, "block_rows": 30, "progress": False}
    expected = daskrr.leverage_scores(X, Gaussian(1.0), 1e-2, 20, **options).scores.compute()
    found = daskrr.leverage_scores(rows, Gaussian(1.0), 1e-2, 20, **options).scores.compute()
    # Chunks decide where blocks begin, and these the last bits.
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_worker_bytes__count_what_dask_imports(tmp_path) -> None:
    zarr.create_array(tmp_path / "x.zarr", data=np.random.default_rng(0).standard_normal((12_000, 8)))
    given = (str(tmp_path / "x.zarr"), Gaussian(8**0.5), 1e-3, 200)
    planned = daskrr.plan(*given, workers=1, random_state=0)
    with local_cluster(1, planned.memory_limit) as cluster, Client(cluster) as client:
        daskrr.leverage_scores(*given, random_state=0, progress=False).scores.sum().compute()
        (pid,) = worker_pids(client).values()
        assert peak_bytes(pid) <= planned.worker_bytes
