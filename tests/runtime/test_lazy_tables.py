"""Tables of the ecosystem as rows: never pulled into this process, and with the names of their columns."""

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

import daskrr
from daskrr.errors import InvalidData
from daskrr.kernels import Gaussian
from daskrr.runtime.rows import DaskRows, NumpyRows, open_rows

X = np.random.default_rng(0).standard_normal((90, 3))
NAMES = ("a", "b", "c")
FRAME = pd.DataFrame(X, columns=NAMES)


@pytest.fixture
def folder(tmp_path):
    """Two Parquet files of two row groups each."""
    for number, part in enumerate((FRAME[:40], FRAME[40:])):
        pq.write_table(
            pa.Table.from_pandas(part, preserve_index=False), tmp_path / f"{number}.parquet", row_group_size=25
        )
    return tmp_path


LAZY = {
    "Dask DataFrame": lambda folder: dd.from_pandas(FRAME, npartitions=4),
    "data set": lambda folder: pyarrow.dataset.dataset(folder),
    "folder": str,
}
IN_MEMORY = {
    "pandas": lambda: FRAME,
    "polars": lambda: pl.DataFrame(FRAME.to_dict("list")),
    "Arrow": lambda: pa.Table.from_pandas(FRAME, preserve_index=False),
}


@pytest.mark.parametrize("kind", LAZY)
def test_open_rows__of_a_lazy_table_reads_nothing_but_how_long_it_is(kind, folder):
    rows = open_rows(LAZY[kind](folder))
    assert isinstance(rows, DaskRows)
    assert rows.shape == (90, 3)
    assert rows.features.names == NAMES
    np.testing.assert_array_equal(rows.array.compute(), X)


@pytest.mark.parametrize("kind", IN_MEMORY)
def test_open_rows__of_a_frame_keeps_its_names(kind):
    rows = open_rows(IN_MEMORY[kind]())
    assert isinstance(rows, NumpyRows)
    assert rows.features.names == NAMES
    np.testing.assert_array_equal(rows.array, X)


@pytest.mark.parametrize("kind", [*LAZY, *IN_MEMORY])
def test_scores__of_every_kind_of_table_are_those_of_the_array(kind, folder):
    table = LAZY[kind](folder) if kind in LAZY else IN_MEMORY[kind]()
    options = {"random_state": 0, "block_rows": 30, "progress": False}
    expected = daskrr.leverage_scores(X, Gaussian(1.0), 1e-2, 20, **options).scores.compute()
    found = daskrr.leverage_scores(table, Gaussian(1.0), 1e-2, 20, **options)
    # Chunks decide where blocks begin, and these the last bits.
    np.testing.assert_allclose(found.scores.compute(), expected, rtol=1e-12)
    assert found.sketch.features.names == NAMES


@pytest.mark.parametrize("kind", ["Dask DataFrame", "data set", "pandas", "polars"])
def test_estimators__keep_the_names_of_a_table(kind, folder):
    table = LAZY[kind](folder) if kind in LAZY else IN_MEMORY[kind]()
    y = np.sin(X[:, 0])
    target = da.from_array(y, chunks=30) if kind in LAZY else y
    model = daskrr.NystromKernelRidge(Gaussian(1.0), 1e-3, 40, random_state=0, progress=False).fit(table, target)
    assert tuple(model.feature_names_in_) == NAMES
    plain = daskrr.NystromKernelRidge(Gaussian(1.0), 1e-3, 40, random_state=0, progress=False).fit(X, y)
    np.testing.assert_allclose(np.asarray(model.predict(table)), plain.predict(X), rtol=1e-9, atol=1e-12)
    with pytest.raises((InvalidData, ValueError), match=r"order|lacks 'a'|feature names"):
        model.predict(pd.DataFrame(X, columns=("b", "a", "c")))


def test_open_rows__names_a_column_that_holds_no_numbers(tmp_path):
    table = pa.table({"a": [1.0, 2.0], "w": ["x", "y"]})
    pq.write_table(table, tmp_path / "t.parquet")
    for given in (tmp_path / "t.parquet", dd.from_pandas(table.to_pandas(), npartitions=1)):
        with pytest.raises(InvalidData, match=r"column 'w' of X holds str.*daskrr convert"):
            open_rows(given)


def test_open_rows__of_a_file_that_is_none_is_told(tmp_path):
    (tmp_path / "t.parquet").write_text("no")
    with pytest.raises(InvalidData, match=r"cannot read .*t\.parquet"):
        open_rows(tmp_path / "t.parquet")
    with pytest.raises(InvalidData, match="no readable Zarr array"):
        open_rows(tmp_path / "missing.zarr")
    with pytest.raises(InvalidData, match="all of which would be read into this process"):
        open_rows(pl.LazyFrame({"a": [1.0]}))


def test_scores__of_a_data_set_with_gaps_name_the_column(tmp_path):
    pq.write_table(pa.table({"a": [1.0, None, 3.0], "b": [1.0, 2.0, 3.0]}), tmp_path / "t.parquet")
    with pytest.raises(InvalidData, match="1 values of column 'a' are missing"):
        daskrr.leverage_scores(tmp_path / "t.parquet", Gaussian(1.0), 1e-2, 2, random_state=0, progress=False)
