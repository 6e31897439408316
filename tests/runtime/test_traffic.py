"""What passes the client: neither rows, nor scores, nor factors, until they are asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from conftest import command_line_cluster
from tornado.iostream import IOStream

import daskrr

N_ROWS, N_LANDMARKS = 60_000, 300


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes of every read from and write to a socket of this process, which has no scheduler and no worker."""
    moved: list[int] = []
    read, write = IOStream.read_from_fd, IOStream.write_to_fd

    def note(found: int | None) -> int | None:
        moved.append(found or 0)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IOStream, "read_from_fd", lambda self, buffer: note(read(self, buffer)))
        patch.setattr(IOStream, "write_to_fd", lambda self, data: note(write(self, data)))
        yield moved


def stored(path: Path, values: np.ndarray) -> Path:
    array = zarr.create_array(path, shape=values.shape, chunks=(16_384, *values.shape[1:]), dtype=values.dtype)
    array[:] = values
    return path


@pytest.mark.slow
def test_client__sees_neither_rows_nor_factors_until_a_model_is_saved(tmp_path: Path) -> None:
    X = np.random.default_rng(0).standard_normal((N_ROWS, 4))
    points, targets = stored(tmp_path / "X", X), stored(tmp_path / "y", X[:, 0])
    kernel, options = daskrr.kernels.Gaussian(1.0), {"landmarks": N_LANDMARKS, "random_state": 0}
    durable: dict[str, Any] = options | {"sampling": "uniform", "progress": False}
    with command_line_cluster(tmp_path):
        with counted() as scoring:
            daskrr.score_to_zarr(points, tmp_path / "scores", kernel, 1e-3, **durable)
        with counted() as fitting:
            model = daskrr.NystromKernelRidge(kernel, 1e-3, sampling="uniform", **options).fit(points, targets)
            model.predict(zarr.open_array(points, mode="r")).mean().compute()
        with counted() as saving:
            model.save(tmp_path / "model")
    factor = 8 * N_LANDMARKS**2
    assert 0 < sum(scoring) < 8 * N_ROWS
    assert 0 < sum(fitting) < 8 * N_ROWS
    assert sum(scoring) < factor
    assert sum(fitting) < factor
    assert sum(saving) > factor / 2
