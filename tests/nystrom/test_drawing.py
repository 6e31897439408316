"""Fetching some rows of an input."""

import numpy as np
import pytest
import zarr

from daskrr.errors import InvalidData
from daskrr.nystrom.drawing import fetch_rows
from daskrr.runtime.map_blocks import Run
from daskrr.runtime.rows import open_rows
from daskrr.storage.chunk_files import ChunkFiles

N_ROWS, CHUNK = 100, 5


@pytest.fixture
def stored(tmp_path):
    """Rows that know their number, in small chunks, two of which are a block."""
    X = np.arange(3.0 * N_ROWS).reshape(N_ROWS, 3)
    return X, store(tmp_path, X)


def store(folder, X):
    array = zarr.create_array(folder / "X.zarr", shape=X.shape, chunks=(CHUNK, X.shape[1]), dtype=X.dtype)
    array[:] = X
    return folder / "X.zarr"


def fetched(path, indices):
    run = Run.over(open_rows(str(path)), height=2 * CHUNK)
    return run.executor.value(fetch_rows(run, np.array(indices), "some-rows"))


@pytest.mark.parametrize("indices", [[0], [99], [3, 4, 5], [7, 7, 50], list(range(N_ROWS)), [9, 10, 95]])
def test_fetch_rows__gives_them_in_order(stored, indices):
    X, path = stored
    found = fetched(path, indices)
    np.testing.assert_array_equal(found, X[indices])
    assert found.dtype == np.float64


def test_fetch_rows__reads_no_other_chunks(stored, monkeypatch):
    _, path = stored
    read, decoded = set(), ChunkFiles._decoded
    monkeypatch.setattr(ChunkFiles, "_decoded", lambda self, number: read.add(number) or decoded(self, number))
    fetched(path, [2, 41, 42, 77])
    assert read == {0, 8, 15}


def test_fetch_rows__names_a_row_that_is_not_finite(tmp_path):
    X = np.ones((N_ROWS, 3))
    X[[42, 43], 1] = np.nan
    with pytest.raises(InvalidData, match="rows 43–43"):
        fetched(store(tmp_path, X), [41, 43])
