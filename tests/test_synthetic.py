"""Generated data: determinism, independence of chunking, and isolation of what was planted."""

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from daskrr.errors import InvalidParameter
from daskrr.synthetic import (
    clusters_with_outliers,
    planted_outliers,
    write_demo_store,
)

DATA = planted_outliers(n_rows=9000, n_features=3, n_outliers=12, random_state=5)
WHOLE = DATA.block(0, 9000)


@settings(max_examples=40)
@given(st.integers(0, 9000), st.integers(0, 9000))
def test_a_slice_is_the_same_however_it_is_cut(one, other):
    start, stop = sorted((one, other))
    np.testing.assert_array_equal(DATA.block(start, stop), WHOLE[start:stop])


def test_the_seed_decides_everything():
    again = planted_outliers(n_rows=9000, n_features=3, n_outliers=12, random_state=5)
    np.testing.assert_array_equal(again.block(0, 9000), WHOLE)
    np.testing.assert_array_equal(again.planted, DATA.planted)
    other = planted_outliers(n_rows=9000, n_features=3, n_outliers=12, random_state=6)
    assert not np.array_equal(other.planted, DATA.planted)
    assert not np.isclose(other.block(0, 9000), WHOLE).any()


def test_blocks_do_not_repeat():
    assert not np.isclose(WHOLE[:4096], WHOLE[4096:8192]).all(axis=1).any()


@pytest.mark.parametrize("seed", range(5))
def test_planted_rows_are_far_from_every_other_row(seed):
    rows, planted = clusters_with_outliers(5000, 8, n_outliers=40, random_state=seed)
    distances = np.linalg.norm(rows[planted][:, None] - rows[None], axis=2)
    distances[np.arange(40), planted] = np.inf
    ordinary = np.delete(rows, planted, axis=0)[:500]
    spacing = np.linalg.norm(ordinary[:, None] - ordinary[None], axis=2)
    np.fill_diagonal(spacing, np.inf)
    assert distances.min() > 5
    assert distances.min() > 2 * np.median(spacing.min(axis=1))


@pytest.mark.parametrize("chunk_rows", [700, 4096, 100_000])
def test_the_store_holds_the_described_rows(tmp_path, chunk_rows):
    write_demo_store(tmp_path / "demo.zarr", DATA, chunk_rows)
    array = zarr.open_array(tmp_path / "demo.zarr", mode="r")
    np.testing.assert_array_equal(array[:], WHOLE)
    assert array.attrs["planted"] == DATA.planted.tolist()


@pytest.mark.parametrize(
    "arguments",
    [
        {"n_rows": 0},
        {"n_features": 0},
        {"n_rows": 3, "n_outliers": 4},
        {"n_outliers": -1},
        {"random_state": -1},
    ],
)
def test_impossible_sizes_are_refused(arguments):
    with pytest.raises(InvalidParameter, match="no data set of"):
        planted_outliers(**arguments)
