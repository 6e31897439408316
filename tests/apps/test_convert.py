"""Conversion of tables into Zarr arrays."""

import csv
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from daskrr.apps.convert import convert, staged
from daskrr.errors import InvalidData, InvalidParameter, OutputExists, SourceChanged
from daskrr.tables.recipe import select

TABLE = np.random.default_rng(3).standard_normal((1000, 3)) * [1, 10, 100] + [5, 0, -7]


def read(path):
    return zarr.open_array(path, mode="r")


def write_csv(path, rows, header=("a", "b", "c"), delimiter=","):
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream, delimiter=delimiter)
        writer.writerows(([header] if header else []) + [[repr(float(v)) for v in row] for row in rows])
    return path


def write_any(path, rows):
    """Write the rows in the format that the ending of the path names."""
    if path.suffix == ".npy":
        np.save(path, rows)
    elif path.suffix == ".npz":
        np.savez_compressed(path, X=rows, y=rows[:, 0])
    elif path.suffix == ".csv":
        write_csv(path, rows)
    else:
        pq.write_table(pa.table(dict(zip("abc", rows.T, strict=True))), path, row_group_size=130)
    return path


@pytest.fixture(params=["t.npy", "t.npz", "t.csv", "t.parquet"])
def source(request, tmp_path):
    return write_any(tmp_path / request.param, TABLE)


def leftovers(folder):
    return [path.name for path in folder.iterdir() if "partial" in path.name or "replaced" in path.name]


class TestEveryFormat:
    def test_the_values_survive_exactly(self, source, tmp_path):
        summary = convert(source, tmp_path / "out.zarr", chunk_bytes=24 * 170, progress=False)
        array = read(tmp_path / "out.zarr")
        np.testing.assert_array_equal(array[:], TABLE)
        assert array.chunks == (170, 3)
        assert summary["rows"] == 1000
        assert summary["chunks"] == [170, 3]
        assert summary["dtype"] == "float64"
        json.dumps(summary)
        assert leftovers(tmp_path) == []

    def test_columns_by_position_and_order(self, source, tmp_path):
        convert(source, tmp_path / "out.zarr", columns=[2, "0"], progress=False)
        np.testing.assert_array_equal(read(tmp_path / "out.zarr")[:], TABLE[:, [2, 0]])

    def test_one_column_stays_a_table(self, source, tmp_path):
        convert(source, tmp_path / "out.zarr", columns=[1], progress=False)
        np.testing.assert_array_equal(read(tmp_path / "out.zarr")[:], TABLE[:, [1]])

    def test_standardize(self, source, tmp_path):
        convert(source, tmp_path / "out.zarr", standardize=True, chunk_bytes=24 * 170, progress=False)
        array = read(tmp_path / "out.zarr")
        np.testing.assert_allclose(array[:], (TABLE - TABLE.mean(0)) / TABLE.std(0), rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(array.attrs["mean"], TABLE.mean(0), rtol=1e-12)
        np.testing.assert_allclose(array.attrs["std"], TABLE.std(0), rtol=1e-12)
        assert array.attrs["constant_columns"] == []

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_the_first_bad_value_is_named_and_nothing_is_left(self, tmp_path, bad, source):
        rows = TABLE.copy()
        rows[[700, 900], [1, 0]] = bad
        write_any(source, rows)
        where = "row 700, column '[1b]'"
        if np.isnan(bad) and source.suffix in (".csv", ".parquet"):
            where = r"values are missing in 2 of 3 columns of 1000 rows: 'a' \(1\), 'b' \(1\); drop such rows"
        if source.suffix == ".csv" and not np.isnan(bad):
            where = "row 900, column 'a': '-?inf' is not a finite number, and 999 of the 1000 values of the column are"
        with pytest.raises(InvalidData, match=where):
            convert(source, tmp_path / "out.zarr", chunk_bytes=24 * 170, progress=False)
        assert [path.name for path in tmp_path.iterdir()] == [source.name]

    def test_float32_result_on_request(self, source, tmp_path):
        convert(source, tmp_path / "out.zarr", dtype="float32", progress=False)
        np.testing.assert_array_equal(read(tmp_path / "out.zarr")[:], TABLE.astype("float32"))

    def test_an_unknown_column_is_named(self, source, tmp_path):
        with pytest.raises(InvalidParameter, match="no column 'wrong' among the 3"):
            convert(source, tmp_path / "out.zarr", columns=["wrong"])

    def test_progress_counts_every_row(self, source, tmp_path):
        seen = []
        convert(source, tmp_path / "out.zarr", standardize=True, chunk_bytes=24 * 170, progress=seen.append)
        stages = ["measure columns", "write rows"]
        if source.suffix in (".csv", ".parquet"):
            stages = ["look at columns", *stages]
        assert [event.stage for event in seen if event.ended] == stages
        assert [event.rows for event in seen if event.ended] == [1000] * len(stages)


class TestStore:
    def test_chunks_are_checksummed_and_empty_ones_written(self, tmp_path):
        np.save(tmp_path / "z.npy", np.zeros((10, 2)))
        convert(tmp_path / "z.npy", tmp_path / "z.zarr", chunk_bytes=16 * 4, progress=False)
        metadata = json.loads((tmp_path / "z.zarr" / "zarr.json").read_text())
        assert metadata["zarr_format"] == 3
        assert [codec["name"] for codec in metadata["codecs"]] == ["bytes", "blosc", "crc32c"]
        chunks = [path for path in (tmp_path / "z.zarr" / "c").rglob("*") if path.is_file()]
        assert len(chunks) == 3

    def test_a_flipped_bit_is_noticed(self, tmp_path):
        convert(write_any(tmp_path / "t.npy", TABLE), tmp_path / "t.zarr", progress=False)
        chunk = tmp_path / "t.zarr" / "c" / "0" / "0"
        data = bytearray(chunk.read_bytes())
        data[len(data) // 2] ^= 1
        chunk.write_bytes(data)
        with pytest.raises(ValueError, match="checksum"):
            read(tmp_path / "t.zarr")[:]

    def test_a_chunk_is_no_longer_than_the_data(self, tmp_path):
        convert(write_any(tmp_path / "t.npy", TABLE), tmp_path / "t.zarr", progress=False)
        assert read(tmp_path / "t.zarr").chunks == (1000, 3)

    @pytest.mark.parametrize("dtype", ["float32", "int16", "uint8", "int64", ">f4"])
    def test_the_type_is_kept(self, tmp_path, dtype):
        rows = np.arange(24).reshape(8, 3).astype(dtype)
        np.save(tmp_path / "t.npy", rows)
        convert(tmp_path / "t.npy", tmp_path / "t.zarr", progress=False)
        array = read(tmp_path / "t.zarr")
        assert array.dtype == np.dtype(dtype).newbyteorder("=")
        np.testing.assert_array_equal(array[:], rows)

    def test_standardized_integers_become_float64_and_float32_stays(self, tmp_path):
        for dtype, wanted in (("int32", "float64"), ("float32", "float32")):
            np.save(tmp_path / "t.npy", np.arange(24).reshape(8, 3).astype(dtype))
            convert(tmp_path / "t.npy", tmp_path / "t.zarr", standardize=True, overwrite=True, progress=False)
            assert read(tmp_path / "t.zarr").dtype == wanted

    def test_booleans_become_bytes_and_text_is_refused(self, tmp_path):
        np.save(tmp_path / "b.npy", np.eye(3, dtype=bool))
        convert(tmp_path / "b.npy", tmp_path / "b.zarr", progress=False)
        assert read(tmp_path / "b.zarr").dtype == "uint8"
        for rows in (np.array([["a", "b"]]), np.ones((2, 2), complex)):
            np.save(tmp_path / "s.npy", rows)
            with pytest.raises(InvalidData, match="integers or floats"):
                convert(tmp_path / "s.npy", tmp_path / "s.zarr")

    def test_narrowing_that_changes_values_is_refused(self, tmp_path):
        np.save(tmp_path / "f.npy", np.array([[1.0], [1e300]]))
        with pytest.raises(InvalidData, match="row 1, column '0' is inf as float32"):
            convert(tmp_path / "f.npy", tmp_path / "f.zarr", dtype="float32")
        np.save(tmp_path / "i.npy", np.array([[1], [300]]))
        with pytest.raises(InvalidData, match="int8 cannot represent"):
            convert(tmp_path / "i.npy", tmp_path / "i.zarr", dtype="int8")
        with pytest.raises(InvalidParameter, match="float64 values to int32"):
            convert(tmp_path / "f.npy", tmp_path / "f.zarr", dtype="int32")

    @pytest.mark.parametrize("size", [0, -1, 2**31])
    def test_chunk_sizes_out_of_range(self, tmp_path, size):
        with pytest.raises(InvalidParameter, match="chunk_bytes"):
            convert(write_any(tmp_path / "t.npy", TABLE), tmp_path / "t.zarr", chunk_bytes=size)

    def test_memory_does_not_grow_with_the_file(self, tmp_path):
        rows = np.lib.format.open_memmap(tmp_path / "big.npy", "w+", shape=(400_000, 8), dtype="float64")
        rows[:] = 1.5
        rows.flush()
        tracemalloc.start()
        try:
            convert(tmp_path / "big.npy", tmp_path / "big.zarr", chunk_bytes=2**20, progress=False)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 12 * 2**20


class TestStandardize:
    def test_constant_columns_are_centred_and_reported(self, tmp_path):
        rows = TABLE.copy()
        rows[:, 1] = 0.1
        write_any(tmp_path / "t.csv", rows)
        options = {"standardize": True, "columns": ["a", "b", "c"], "chunk_bytes": 24 * 7, "progress": False}
        summary = convert(tmp_path / "t.csv", tmp_path / "t.zarr", **options)
        array = read(tmp_path / "t.zarr")
        assert summary["constant_columns"] == ["b"] == array.attrs["constant_columns"]
        assert array.attrs["std"][1] == 0
        np.testing.assert_array_equal(array[:, 1], 0)
        np.testing.assert_allclose(array[:, 0].std(), 1)

    def test_a_large_offset_does_not_spoil_the_spread(self, tmp_path):
        rows = TABLE[:, :1] + 1e9
        np.save(tmp_path / "t.npy", rows)
        convert(tmp_path / "t.npy", tmp_path / "t.zarr", standardize=True, chunk_bytes=8 * 33, progress=False)
        assert read(tmp_path / "t.zarr").attrs["std"][0] == pytest.approx(rows.std(), rel=1e-9)

    def test_overflow_is_refused(self, tmp_path):
        np.save(tmp_path / "t.npy", np.array([[1e300], [-1e300]]))
        with pytest.raises(InvalidData, match="overflows"):
            convert(tmp_path / "t.npy", tmp_path / "t.zarr", standardize=True)


class TestNpyAndNpz:
    def test_a_vector_is_one_column(self, tmp_path):
        for name in ("t.npy", "t.npz"):
            path = tmp_path / name
            np.save(path, TABLE[:, 0]) if path.suffix == ".npy" else np.savez(path, X=TABLE[:, 0])
            convert(path, tmp_path / f"{name}.zarr", progress=False)
            np.testing.assert_array_equal(read(tmp_path / f"{name}.zarr")[:], TABLE[:, :1])

    @pytest.mark.parametrize("name", ["t.npy", "t.npz"])
    def test_column_order_in_memory_does_not_matter(self, tmp_path, name):
        write_any(tmp_path / name, np.asfortranarray(TABLE))
        convert(tmp_path / name, tmp_path / "t.zarr", chunk_bytes=24 * 170, progress=False)
        np.testing.assert_array_equal(read(tmp_path / "t.zarr")[:], TABLE)

    def test_arrays_of_an_archive(self, tmp_path):
        np.savez(tmp_path / "t.npz", points=TABLE, y=TABLE[:, 0])
        convert(tmp_path / "t.npz", tmp_path / "points.zarr", progress=False)
        assert read(tmp_path / "points.zarr").shape == (1000, 3)
        convert(tmp_path / "t.npz", tmp_path / "y.zarr", key="y", progress=False)
        assert read(tmp_path / "y.zarr").shape == (1000, 1)
        with pytest.raises(InvalidParameter, match="no array 'z', only points, y"):
            convert(tmp_path / "t.npz", tmp_path / "z.zarr", key="z")
        np.savez(tmp_path / "two.npz", one=TABLE, two=TABLE)
        with pytest.raises(InvalidParameter, match="one, two: name it"):
            convert(tmp_path / "two.npz", tmp_path / "z.zarr")

    @pytest.mark.parametrize("shape", [(), (2, 2, 2), (3, 0), (0, 3)])
    def test_arrays_that_are_no_tables(self, tmp_path, shape):
        np.save(tmp_path / "t.npy", np.ones(shape))
        with pytest.raises(InvalidData, match=r"rows and columns are needed|no rows"):
            convert(tmp_path / "t.npy", tmp_path / "t.zarr")
        assert not (tmp_path / "t.zarr").exists()

    @pytest.mark.parametrize("name", ["t.npy", "t.npz", "t.parquet"])
    def test_files_that_are_something_else(self, tmp_path, name):
        (tmp_path / name).write_bytes(b"nonsense" * 20)
        with pytest.raises(InvalidData, match="cannot read"):
            convert(tmp_path / name, tmp_path / "t.zarr")

    def test_pickled_objects_are_refused(self, tmp_path):
        np.save(tmp_path / "t.npy", np.array([[{}]], dtype=object), allow_pickle=True)
        with pytest.raises(InvalidData, match="cannot read"):
            convert(tmp_path / "t.npy", tmp_path / "t.zarr")

    def test_a_key_for_another_format_is_refused(self, source, tmp_path):
        if source.suffix != ".npz":
            with pytest.raises(InvalidParameter, match=r"\.npz files only"):
                convert(source, tmp_path / "t.zarr", key="X")


class TestCsv:
    def convert_text(self, folder, text, **options):
        (folder / "t.csv").write_text(text, newline="")
        convert(folder / "t.csv", folder / "t.zarr", progress=False, overwrite=True, **options)
        return read(folder / "t.zarr")

    @pytest.mark.parametrize(
        ("text", "names"),
        [
            ("a,b\n1,2\n3,4\n", ["a", "b"]),
            ("1,2\n3,4\n", ["0", "1"]),
            ("a;b\r\n1;2\r\n\r\n3;4", ["a", "b"]),
            ("\ufeffa\tb\n1\t2\n3\t4\n\n", ["a", "b"]),
            (' a ,"b,c"\n1,"2"\n 3 , 4e0\n', ["a", "b,c"]),
            ("1|2\n3|4\n", ["0", "1"]),
        ],
    )
    def test_headers_and_delimiters(self, tmp_path, text, names):
        array = self.convert_text(tmp_path, text)
        np.testing.assert_array_equal(array[:], [[1, 2], [3, 4]])
        assert array.attrs["columns"] == names

    def test_header_and_delimiter_by_order(self, tmp_path):
        array = self.convert_text(tmp_path, "id,2010\n1,2\n", header=True)
        assert array.attrs["columns"] == ["id", "2010"]
        assert self.convert_text(tmp_path, "1 2\n3 4\n", delimiter=" ").shape == (2, 2)
        with pytest.raises(InvalidParameter, match="one character"):
            self.convert_text(tmp_path, "1,2\n", delimiter="::")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("a,b\n" + 9 * "1,2\n" + "3,x\n", "row 9, column 'b': 'x' is not a finite number, and 9 of the 10 values"),
            ("1,2\n\n3,\n", r"1 of 2 columns of 2 rows: '1' \(1\); drop such rows"),
            ("1,2\n3,nan\n", r"1 of 2 columns of 2 rows: '1' \(1\); drop such rows"),
            ('a,b\n"1\n",2\n3,1e999\n', "row 1, column 'b' is inf"),
            ("a,b\n1,2\n3\n", "Expected 2 columns, got 1"),
            ("a,b\n", "no rows"),
            ("", "is empty"),
            ('a,b\n"1,2\n', "cannot read"),
        ],
    )
    def test_what_is_wrong_is_named(self, tmp_path, text, message):
        with pytest.raises(InvalidData, match=message):
            self.convert_text(tmp_path, text)

    def test_text_columns_can_be_left_out(self, tmp_path):
        array = self.convert_text(tmp_path, "name,x,y\nfoo,1,2\nbar,3,4\n", columns=["y", "x"])
        np.testing.assert_array_equal(array[:], [[2, 1], [4, 3]])

    def test_other_encodings_are_refused(self, tmp_path):
        (tmp_path / "t.csv").write_bytes("größe,b\n1,2\n".encode("latin-1"))
        with pytest.raises(InvalidData, match="cannot read"):
            convert(tmp_path / "t.csv", tmp_path / "t.zarr")

    @settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        hnp.arrays(
            "float64",
            st.tuples(st.integers(1, 40), st.integers(1, 4)),
            elements=st.floats(width=64, allow_nan=False, allow_infinity=False),
        ),
        st.integers(1, 2000),
        st.sampled_from([",", ";", "\t"]),
    )
    def test_any_finite_numbers_survive(self, tmp_path, rows, chunk_bytes, delimiter):
        path = write_csv(tmp_path / "t.csv", rows, header=None, delimiter=delimiter)
        convert(path, tmp_path / "t.zarr", chunk_bytes=chunk_bytes, overwrite=True, progress=False)
        np.testing.assert_array_equal(read(tmp_path / "t.zarr")[:], rows)


class TestParquet:
    def write(self, path, **columns):
        pq.write_table(pa.table(columns), path)
        return path

    def test_types_meet_in_one_that_holds_all(self, tmp_path):
        path = self.write(tmp_path / "t.parquet", a=pa.array([1, 2], pa.int32()), b=pa.array([True, False]))
        convert(path, tmp_path / "t.zarr", progress=False)
        array = read(tmp_path / "t.zarr")
        assert array.dtype == "int32"
        np.testing.assert_array_equal(array[:], [[1, 1], [2, 0]])

    def test_missing_values_are_named(self, tmp_path):
        path = self.write(tmp_path / "t.parquet", a=[1, 2, 3], b=[1, None, 3])
        with pytest.raises(InvalidData, match=r"'b' \(1\); drop such rows \(--missing drop\)"):
            convert(path, tmp_path / "t.zarr", progress=False)

    def test_columns_of_lists_are_left_out_unless_they_are_named(self, tmp_path):
        path = self.write(tmp_path / "t.parquet", a=[1.0, 2.0], n=[[1], [2]])
        with pytest.raises(InvalidData, match="'n': it holds list<"):
            convert(path, tmp_path / "t.zarr", columns=["a", "n"], progress=False)
        summary = convert(path, tmp_path / "t.zarr", progress=False)
        assert dict(summary["treatment"])["n"].startswith("left out: it holds list<")
        np.testing.assert_array_equal(read(tmp_path / "t.zarr")[:], [[1], [2]])


class TestTarget:
    @pytest.fixture
    def table(self, tmp_path):
        return write_any(tmp_path / "t.npy", TABLE)

    def test_an_existing_target_is_refused_untouched(self, table, tmp_path):
        convert(table, tmp_path / "t.zarr", progress=False)
        with pytest.raises(OutputExists, match=r"exists\. Pass overwrite=True \(--overwrite\)"):
            convert(table, tmp_path / "t.zarr", columns=[0])
        assert read(tmp_path / "t.zarr").shape == (1000, 3)

    def test_overwrite_replaces_arrays_only(self, table, tmp_path):
        convert(table, tmp_path / "t.zarr", progress=False)
        convert(table, tmp_path / "t.zarr", columns=[0], overwrite=True, progress=False)
        assert read(tmp_path / "t.zarr").shape == (1000, 1)
        assert leftovers(tmp_path) == []
        (tmp_path / "notes").mkdir()
        (tmp_path / "notes" / "a.txt").write_text("keep me")
        with pytest.raises(OutputExists, match="no Zarr array"):
            convert(table, tmp_path / "notes", overwrite=True)
        assert (tmp_path / "notes" / "a.txt").read_text() == "keep me"

    def test_a_failed_overwrite_keeps_the_old_array(self, table, tmp_path):
        convert(table, tmp_path / "t.zarr", progress=False)
        (tmp_path / "bad.csv").write_text("a,b\n1,2\nx\n")
        with pytest.raises(InvalidData):
            convert(tmp_path / "bad.csv", tmp_path / "t.zarr", overwrite=True)
        assert read(tmp_path / "t.zarr").shape == (1000, 3)
        assert leftovers(tmp_path) == []

    def test_a_target_that_appears_meanwhile_is_not_replaced(self, tmp_path):
        def write_while_another_does(final):
            with staged(final) as partial:
                partial.mkdir()
                final.mkdir()

        with pytest.raises(OutputExists):
            write_while_another_does(tmp_path / "t.zarr")
        assert leftovers(tmp_path) == []

    def test_a_source_that_changes_is_noticed(self, table, tmp_path):
        def change(event):
            table.touch()

        with pytest.raises(SourceChanged, match="changed while"):
            convert(table, tmp_path / "t.zarr", progress=change)
        assert not (tmp_path / "t.zarr").exists()

    def test_wrong_sources_and_targets(self, table, tmp_path):
        with pytest.raises(InvalidData, match="No such file"):
            convert(tmp_path / "none.npy", tmp_path / "t.zarr")
        with pytest.raises(InvalidData, match="not a file"):
            convert(tmp_path, tmp_path / "t.zarr")
        with pytest.raises(InvalidParameter, match=r"must end in \.npy"):
            convert(Path(__file__), tmp_path / "t.zarr")
        with pytest.raises(InvalidParameter, match="not a local directory"):
            convert(table, "s3://bucket/t.zarr")
        with pytest.raises(InvalidParameter, match="no folder"):
            convert(table, tmp_path / "nowhere" / "t.zarr")
        with pytest.raises(InvalidParameter, match=r"\.csv and \.tsv files only"):
            convert(table, tmp_path / "t.zarr", delimiter=",")
        assert [path.name for path in tmp_path.iterdir()] == ["t.npy"]


class TestSelect:
    def test_names_come_before_positions(self):
        assert select(["0", 0], ["x", "0"]) == [1, 0]
        assert select(None, ["x", "y"]) == [0, 1]

    @pytest.mark.parametrize("columns", [[], ["x", 0], ["y"], [2], [-1], ["-1"], ["d"]])
    def test_impossible_choices(self, columns):
        with pytest.raises(InvalidParameter):
            select(columns, ["x", "d", "d"] if columns == ["d"] else ["x", "z"])
