"""What becomes of the columns of a table, and whether the same can be done again."""

import json
import math
from datetime import datetime, time

import hard_tables
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from variants import slow_but

from daskrr.errors import InvalidData, InvalidParameter
from daskrr.tables import cells
from daskrr.tables.columns import ABSENT, OTHER, Category, Moment, Number, TimeOfDay, Truth
from daskrr.tables.files import FrameTable, open_tabular
from daskrr.tables.recipe import Recipe, learn
from daskrr.tables.survey import MEDIAN_VALUES, TableOptions, Thinned


def learned(cells_of, rows_at_once=1000, **options):
    table = FrameTable(pa.table(cells_of))
    recipe, lacking = learn(table.batches(rows_at_once), table.names, TableOptions(**options))
    (batch,) = table.batches(10**9, recipe.names)
    return recipe, lacking, batch


def kinds(recipe):
    return {column.name: type(column) for column in recipe.columns}


def test_learn__finds_what_every_column_is(tmp_path):
    table = open_tabular(hard_tables.write(tmp_path / "t.csv", hard_tables.rows()))
    recipe, lacking = learn(table.batches(300), table.names, TableOptions(prunes=True))
    assert lacking == {}
    assert kinds(recipe) == {
        "amount": Number, "rate": Number, "when": Moment, "at": TimeOfDay, "is new": Truth, "town": Category,
        "colour": Category, hard_tables.NAMES[-1]: Number,
    }  # fmt: skip
    assert recipe.left_out["code"] == "its numbers have leading zeros, as identifiers do"
    assert recipe.left_out["one"] == "all its values are the same"
    assert recipe.left_out["again"] == "it is the same as 'amount'"
    assert recipe.left_out["count"] == "it counts the rows"
    assert "as identifiers do" in recipe.left_out["free text"]
    town, colour = (next(one for one in recipe.columns if one.name == name) for name in ("town", "colour"))
    assert set(town.levels[:3]) == {"Ulm", "Köln", "Bonn"}
    assert len(town.levels) == 20
    assert town.pooled == len({line[6] for line in hard_tables.rows()}) - 20
    assert set(colour.levels) == {"red", "None", "blue"}


@pytest.mark.parametrize("at_once", slow_but([1, 7, 1000], 7))
def test_learn__does_not_depend_on_the_batches(at_once, tmp_path):
    table = open_tabular(hard_tables.write(tmp_path / "t.csv", hard_tables.rows(100, gaps=3)))
    options = TableOptions(prunes=True, missing="median")
    expected = learn(table.batches(10**6), table.names, options)
    found = learn(table.batches(at_once), table.names, options)
    assert found[0].describe() == expected[0].describe()
    assert found[0].features == expected[0].features
    assert found[1] == expected[1]


def test_missing__is_counted_for_every_column_before_anything_runs(tmp_path):
    table = open_tabular(hard_tables.write(tmp_path / "t.csv", hard_tables.rows(gaps=9)))
    with pytest.raises(InvalidData, match=r"in 2 of 13 columns of 1000 rows: 'amount' \(9\), 'again' \(9\); drop"):
        learn(table.batches(100), table.names, TableOptions(columns=hard_tables.NAMES))


@pytest.mark.parametrize("missing", ["mean", "median"])
def test_missing__is_filled_by_what_the_column_has(missing):
    values = [1.0, None, 4.0, math.nan, 7.0, 100.0]
    words = ["a", "b", None, "a", "a", "b"]
    truths = [True, None, True, False, True, True]
    recipe, lacking, batch = learned({"x": values, "w": words, "t": truths}, missing=missing)
    assert lacking == {"x": 2, "w": 1, "t": 1}
    found = recipe.encode(batch, 0).values
    known = np.array([1.0, 4.0, 7.0, 100.0])
    fill = known.mean() if missing == "mean" else np.median(known)
    np.testing.assert_allclose(found[:, 0], [1.0, fill, 4.0, fill, 7.0, 100.0])
    assert recipe.features[1:4] == ["w=a", "w=b", f"w={ABSENT}"]
    np.testing.assert_array_equal(found[2, 1:4], [0, 0, 1])
    np.testing.assert_allclose(found[1, 4], 0.8 if missing == "mean" else 1.0)


def test_missing__rows_are_dropped_and_the_others_keep_their_numbers():
    recipe, _, batch = learned(
        {"x": [1.0, None, 3.0], "w": ["a", "b", "a"], "n": ["i", "j", "k"]}, missing="drop", id="n"
    )
    found = recipe.encode(batch, 10)
    assert found.rows.tolist() == [10, 12]
    assert found.ids == ["i", "k"]
    assert found.values[:, 0].tolist() == [1.0, 3.0]


def test_encode__names_a_gap_where_there_was_none_before():
    recipe, *_ = learned({"x": [1.0, 2.0], "w": ["a", "b"]}, columns=["x", "w"])
    with pytest.raises(InvalidData, match=r"row 7, column 'x' has no value; drop such rows"):
        recipe.encode(pa.record_batch({"x": [1.0, 2.0, None], "w": ["a", "a", "a"]}), 5)
    with pytest.raises(InvalidData, match="rows 0–0, column 'x' was to be read as number"):
        recipe.encode(pa.record_batch({"x": ["many"], "w": ["a"]}), 0)


def test_encode__takes_a_word_never_seen_for_one_of_the_others():
    words = ["a"] * 5 + ["b"] * 4 + ["c"] * 2 + ["d"]
    recipe, *_ = learned({"w": words}, levels=2)
    assert recipe.features == ["w=a", "w=b", f"w={OTHER}"]
    new = recipe.encode(pa.record_batch({"w": ["zebra", "d", "a"]}), 0).values
    np.testing.assert_array_equal(new, [[0, 0, 1], [0, 0, 1], [1, 0, 0]])
    every, *_ = learned({"w": words}, levels=4)
    np.testing.assert_array_equal(every.encode(pa.record_batch({"w": ["zebra"]}), 0).values, [[0, 0, 0, 0]])


def test_numbers__among_which_few_are_none_are_refused_by_name():
    words = [str(number) for number in range(20)]
    words[13] = "12.3abc"
    with pytest.raises(InvalidData, match=r"row 13, column 'x': '12.3abc' is not a finite number, and 19 of the 20"):
        learned({"x": words})


def test_dates__can_be_cyclic():
    dates = ["2024-01-01", "2024-07-01 12:00", "2025-01-01"]
    recipe, _, batch = learned({"d": dates}, dates="cyclic")
    found = recipe.encode(batch, 0).values
    assert found.shape == (3, 5)
    assert found[0, 0] == 19723.0
    np.testing.assert_allclose(found[0, 1:3], found[2, 1:3], atol=0.02)
    np.testing.assert_allclose(found[1, 3:], [0.0, -1.0], atol=1e-9)
    assert recipe.decode(found[1]) == {"d": "2024-07-01 12:00:00"}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(-1e6, 1e6, allow_nan=False), st.sampled_from(["a", "b", "c"]), st.booleans(),
            st.datetimes(datetime(1950, 1, 1), datetime(2060, 1, 1)).map(lambda one: one.replace(microsecond=0)),
            st.integers(0, 86_399),
        ), min_size=3, max_size=30,
    )
)  # fmt: skip
def test_decode__gives_back_what_was_encoded(lines):
    clock = [f"{at // 3600:02d}:{at // 60 % 60:02d}:{at % 60:02d}" for *_, at in lines]
    columns = {
        "x": [one[0] for one in lines], "w": [one[1] for one in lines], "t": [one[2] for one in lines],
        "m": [one[3] for one in lines], "c": clock,
    }  # fmt: skip
    recipe, _, batch = learned(columns, columns=list(columns))
    again = Recipe.from_record(json.loads(json.dumps(recipe.to_record())))
    assert again == recipe
    has_times = any(one[3].time().isoformat() != "00:00:00" for one in lines)
    for number, features in enumerate(again.encode(batch, 0).values):
        found = again.decode(features)
        assert found["x"] == pytest.approx(lines[number][0], rel=1e-11)
        assert (found["w"], found["t"], found["c"]) == (lines[number][1], lines[number][2], clock[number])
        assert found["m"] == lines[number][3].strftime("%Y-%m-%d %H:%M:%S" if has_times else "%Y-%m-%d")


def test_recipe__that_is_damaged_is_refused():
    for record in ({}, {"columns": [{"kind": "wrong"}], "left_out": {}, "missing": "refuse", "id": None}, None, []):
        with pytest.raises(InvalidData, match="is damaged"):
            Recipe.from_record(record)


def test_options__that_mean_nothing_are_refused():
    for options in ({"missing": "zero"}, {"dates": "never"}, {"levels": 0}):
        with pytest.raises(InvalidParameter, match="must be"):
            TableOptions(**options)
    with pytest.raises(InvalidParameter, match="no column 'y' to identify rows by"):
        learned({"x": [1.0, 2.0]}, id="y")
    with pytest.raises(InvalidData, match="'x': it has no values"):
        learned({"x": pa.array([None, None], pa.float64())})


def test_texts__are_trimmed_and_gaps_found_in_any_case():
    found = cells.texts(pa.array([" a ", "", "na", "N/A", "#n/a", "none", None, "0"]))
    assert found.to_pylist() == ["a", None, None, None, None, "none", None, "0"]
    assert cells.numbers(pa.array(["1", "None", "-", " 2.5 ", "1e3"])).to_pylist() == [1.0, None, None, 2.5, 1000.0]
    assert cells.truths(pa.array(["Yes", "FALSE", "no", "true", ""])).to_pylist() == [True, False, False, True, None]


@pytest.mark.parametrize("missing", ["refuse", "drop", "median"])
@pytest.mark.parametrize(
    ("kind", "known", "wrong"),
    [
        ("true or false", ["yes", "no", "yes", None], ["yes", "perhaps"]),
        ("true or false", [True, False, True, None], [1, 0]),
        ("time of day", ["10:30", "11:00", "09:15", None], ["10:30", "noon"]),
        ("time of day", ["10:30", "11:00", "09:15", None], ["10:30", "25:99"]),
        ("time of day", [time(10), time(11), time(9), None], [10, 11]),
        ("date", ["2020-01-01", "2020-01-03", "2020-02-01", None], ["2020-01-01", "tomorrow"]),
        ("date", [datetime(2020, 1, 1), datetime(2020, 1, 3), datetime(2020, 2, 1), None], [18_000, 18_001]),
        ("number", [1.5, 2.5, 4.5, None], [datetime(2020, 1, 1), datetime(2020, 1, 3)]),
        ("number", ["1.5", "2.5", "4.5", None], ["1.5", "many"]),
    ],
)
def test_encode__refuses_what_is_of_another_kind_than_what_was_learned(missing, kind, known, wrong):
    known = known[:3] if missing == "refuse" else known
    recipe, _, _ = learned({"x": known}, missing=missing)
    with pytest.raises(InvalidData, match=f"column 'x' was to be read as {kind}"):
        recipe.encode(pa.record_batch({"x": wrong}), 0)


def test_encode__widens_numbers_that_were_narrower():
    recipe, _, _ = learned({"x": pa.array([1, 2, 3], pa.int8())})
    assert recipe.dtype == np.int8
    assert recipe.encode(pa.record_batch({"x": [2.5, 1000.0]}), 0).values.ravel().tolist() == [2.5, 1000.0]
    assert recipe.encode(pa.record_batch({"x": [1000, 7]}), 0).values.ravel().tolist() == [1000, 7]


def test_learn__takes_files_whose_types_differ_for_the_same_reading(tmp_path):
    rows = [
        {"x": pa.array([1, 2], pa.int8()), "w": ["a", "b"], "e": pa.nulls(2), "n": pa.nulls(2)},
        {"x": [2.5, 1000.0], "w": pa.array(["a", "b"]).dictionary_encode(), "e": [7, 9], "n": pa.nulls(2)},
    ]
    for number, one in enumerate(rows):
        pq.write_table(pa.table(one), tmp_path / f"{number}.parquet")
    table = open_tabular(tmp_path)
    recipe, lacking = learn(table.batches(100), table.names, TableOptions(missing="mean"))
    assert kinds(recipe) == {"x": Number, "w": Category, "e": Number}
    assert lacking == {"e": 2}
    found = np.vstack([recipe.encode(one, 0).values for one in table.batches(100, recipe.names)])
    assert found[:, 0].tolist() == [1.0, 2.0, 2.5, 1000.0]
    assert found[:, -1].tolist() == [8.0, 8.0, 7.0, 9.0]
    pq.write_table(pa.table({"x": ["many"], "w": ["a"], "e": [1], "n": pa.nulls(1)}), tmp_path / "2.parquet")
    table = open_tabular(tmp_path)
    with pytest.raises(InvalidData, match=r"'x' holds double at first and string from row 4 on.*--columns"):
        learn(table.batches(100), table.names, TableOptions())


def test_repeats__are_told_by_the_words_of_a_dictionary():
    codes = pa.array([0, 1, 1, 0, 2, 2, 1], pa.int8())
    columns = {name: pa.DictionaryArray.from_arrays(codes, pa.array(words)) for name, words in
               (("a", ["x", "y", "z"]), ("b", ["x", "y", "z"]), ("c", ["u", "v", "w"]))}  # fmt: skip
    recipe, _, _ = learned(columns, prunes=True)
    assert recipe.left_out == {"b": "it is the same as 'a'"}


def test_thinned__keeps_nothing_of_what_it_left_out():
    kept = Thinned()
    for _ in range(40):
        kept.add(np.zeros(50_000))
    assert sum((one if one.base is None else one.base).nbytes for one in kept._values) <= 2 * 8 * MEDIAN_VALUES


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=12))
def test_thinned__keeps_every_kth_value(sizes):
    kept, total = Thinned(), sum(sizes)
    start = 0
    for size in sizes:
        kept.add(np.arange(start, start + size, dtype=np.float64))
        start += size
    assert kept.median() == pytest.approx((total - 1) / 2, abs=max(1.0, total / 20_000))
