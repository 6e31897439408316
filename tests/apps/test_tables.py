"""From a table to scores and back, as a person would go."""

import json
import logging

import hard_tables
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import zarr
from click.testing import CliRunner

import daskrr
from daskrr.apps.cli import main
from daskrr.apps.clusters import local_cluster
from daskrr.apps.convert import convert, features_of
from daskrr.apps.convert.likeness import features_at
from daskrr.errors import InvalidData, InvalidParameter, OutputExists, SourceChanged
from daskrr.jobs.export import export_scores
from daskrr.jobs.row_values import RowValues
from daskrr.kernels import Gaussian


@pytest.fixture(scope="module")
def cluster():
    """One for all commands of the module."""
    with local_cluster(1) as found:
        yield found.scheduler_address


def run(*words, code=0):
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == code, done.output
    return done.stdout if code == 0 else done.output


def small(n_rows=60, seed=0, **more):
    random = np.random.default_rng(seed)
    return pa.table({"x": random.standard_normal(n_rows), "y": 5 + 3 * random.standard_normal(n_rows)} | more)


def stored(path, table, **options):
    pq.write_table(table, path.with_suffix(".parquet"))
    return convert(path.with_suffix(".parquet"), path, progress=False, **options)


def score(points, output, ridge=1e-2, landmarks=30, **options):
    options = {"random_state": 0, "progress": False} | options
    return daskrr.score_to_zarr(points, output, Gaussian(1.0), ridge, landmarks, **options)


# --- One line -------------------------------------------------------------------------------------------


def test_score__of_a_table_finds_what_was_planted_and_says_how_to_do_it_again(cluster, tmp_path):
    table = hard_tables.write(tmp_path / "orders.csv", hard_tables.rows())
    told = json.loads(run("score", table, "--id", "code", "--cluster", cluster, "--json", "--quiet"))
    assert {one["table_row"] for one in told["rows"][:3]} == set(hard_tables.PLANTED)
    first = told["rows"][0]
    assert first["id"] == f"{first['table_row']:05d}"
    assert first["values"]["amount"] == 10_000 + first["table_row"]
    assert {"amount", hard_tables.NAMES[-1]} & {one["column"] for one in first["why"]}
    assert told["output"].endswith("orders.scores.zarr")
    assert (tmp_path / "orders.report.html").stat().st_size > 10_000
    assert 25 < told["choices"]["effective_dimension"] < 40
    again = told["again"].split()
    assert again[:2] == ["daskrr", "score"]
    before = (tmp_path / "orders.scores.zarr" / "zarr.json").read_bytes()
    shown = run(*again[1:], "--cluster", cluster, "--json", "--quiet")
    assert json.loads(shown)["n_rows"] == 1000
    assert (tmp_path / "orders.scores.zarr" / "zarr.json").read_bytes() == before
    (noted,) = json.loads((tmp_path / "orders.choices.json").read_text()).values()
    assert noted == told["choices"]
    repeated = run("score", table, "--id", "code", "--cluster", cluster, "--quiet")
    assert "The same with every choice spelled out:" in repeated
    assert f"row {first['table_row']:,} ({first['id']}): " in repeated


def test_score__refuses_a_table_with_gaps_and_says_what_can_be_done(tmp_path):
    table = hard_tables.write(tmp_path / "orders.csv", hard_tables.rows(gaps=2))
    told = run("score", table, code=2)
    assert "'amount' (2)" in told
    assert "--missing drop" in told
    assert not (tmp_path / "orders.points.zarr").exists()
    assert not (tmp_path / "orders.scores.zarr").exists()


def test_score__refuses_options_of_tables_for_arrays(tmp_path):
    stored(tmp_path / "points.zarr", small())
    assert "--missing is about tables" in run("score", tmp_path / "points.zarr", "--missing", "drop", code=2)


def test_plan__without_a_ridge_tells_what_some_make_of_the_data(tmp_path):
    stored(tmp_path / "points.zarr", small(400), standardize=True)
    told = json.loads(run("plan", tmp_path / "points.zarr", "--json"))
    dimensions = [one["effective_dimension"] for one in told["outlooks"]]
    assert dimensions == sorted(dimensions)
    X = zarr.open_array(tmp_path / "points.zarr")[:]
    exact = daskrr.exact.effective_dimension(X, Gaussian("median").resolve(X), told["outlooks"][1]["ridge"])
    assert dimensions[1] == pytest.approx(exact, rel=1e-6)
    assert dimensions[1] == pytest.approx(20.0, rel=0.05)
    assert "--landmarks" in run("plan", tmp_path / "points.zarr")


def test_plan__of_a_table_leaves_nothing_behind(tmp_path):
    table = hard_tables.write(tmp_path / "orders.csv", hard_tables.rows(200))
    told = run("plan", table, "--id", "code")
    assert f"daskrr score {table} OUTPUT --kernel gaussian" in told
    assert [path.name for path in tmp_path.iterdir()] == ["orders.csv"]


@pytest.mark.slow
def test_response__is_kept_beside_the_rows_and_chooses_the_ridge(cluster, tmp_path):
    table = small(80)
    noise = 0.2 * np.random.default_rng(5).standard_normal(80)
    table = table.append_column("z", pa.array(np.sin(3 * table["x"].to_numpy()) + noise))
    pq.write_table(table, tmp_path / "t.parquet")
    told = json.loads(
        run("score", tmp_path / "t.parquet", "--response", "z", "--cluster", cluster, "--json", "--quiet")
    )
    assert "leave-one-out error of the response" in told["choices"]["criterion"]
    assert list(told["rows"][0]["values"]) == ["x", "y"]
    points = tmp_path / "t.points.zarr"
    np.testing.assert_array_equal(zarr.open_array(points / "response")[:], table["z"].to_numpy())
    X = np.asarray(zarr.open_group(points)["points"])
    kernel = daskrr.kernels.from_spec(told["choices"]["kernel"])
    K, y = kernel(X, X), table["z"].to_numpy() - table["z"].to_numpy().mean()

    def error(ridge):
        left_out = [
            y[i] - K[i, o] @ np.linalg.solve(K[np.ix_(o, o)] + 80 * ridge * np.eye(79), y[o])
            for i in range(80)
            for o in [np.delete(np.arange(80), i)]
        ]
        return np.mean(np.square(left_out))

    chosen = told["choices"]["ridge"]
    assert error(chosen) <= min(error(3 * chosen), error(chosen / 3))
    ridge = ["--ridge", chosen, "--landmarks", "60", "--seed", "0"]
    run("fit", points, points / "response", tmp_path / "m.zarr", *ridge, "--cluster", cluster)
    new = small(20, seed=4)
    pyarrow.csv.write_csv(new, tmp_path / "new.csv")
    run("predict", tmp_path / "m.zarr", tmp_path / "new.csv", tmp_path / "p.zarr", "--cluster", cluster)
    found = zarr.open_array(tmp_path / "p.zarr" / "predictions")[:]
    assert np.corrcoef(found, np.sin(3 * new["x"].to_numpy()))[0, 1] > 0.8
    assert "is to be predicted" in run(
        "convert", tmp_path / "t.parquet", tmp_path / "u", "--response", "z", "--columns", "x,z", code=2
    )


# --- Scaling belongs to the data -------------------------------------------------------------------------


def test_like__does_to_new_rows_what_was_done_before(tmp_path):
    words = pa.array(["a", "b", "c"] * 20)
    stored(tmp_path / "old.zarr", small(w=words), standardize=True)
    stored(tmp_path / "new.zarr", small(9, seed=1, w=words[:9]), like=features_at(tmp_path / "old.zarr"))
    old, new = features_of(tmp_path / "old.zarr"), features_of(tmp_path / "new.zarr")
    assert old == new
    raw = small(9, seed=1)
    expected = (raw["y"].to_numpy() - old.mean[1]) / old.std[1]
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "new.zarr")[:, 1], expected)
    with pytest.raises(InvalidData, match=r"has no column 'w'"):
        stored(tmp_path / "other.zarr", small(9), like=old)


def test_apply__refuses_rows_that_are_scaled_otherwise(tmp_path):
    for name, options in (("old", {"standardize": True}), ("raw", {}), ("other", {"standardize": True})):
        table = small(80, seed=len(name)) if name == "other" else small(80)
        stored(tmp_path / f"{name}.zarr", table, **options)
    scores = tmp_path / "scores.zarr"
    daskrr.score_to_zarr(tmp_path / "old.zarr", scores, Gaussian(2.0), 1e-2, 20, random_state=0, progress=False)
    apply = daskrr.jobs.apply_sketch
    with pytest.raises(InvalidData, match=r"raw\.zarr is not standardized, unlike the rows that the sketch was fit"):
        apply(scores, tmp_path / "raw.zarr", tmp_path / "o.zarr", progress=False)
    with pytest.raises(InvalidData, match=r"is standardized otherwise: 'x' by mean .* --already-scaled"):
        apply(scores, tmp_path / "other.zarr", tmp_path / "o.zarr", progress=False)
    zarr.create_array(tmp_path / "bare.zarr", data=np.ones((3, 2)))
    with pytest.raises(InvalidData, match=r"bare\.zarr has no record of its columns and their scaling"):
        apply(scores, tmp_path / "bare.zarr", tmp_path / "o.zarr", progress=False)
    assert not (tmp_path / "o.zarr").exists()
    apply(scores, tmp_path / "raw.zarr", tmp_path / "o.zarr", already_scaled=True, progress=False)
    apply(scores, tmp_path / "old.zarr", tmp_path / "p.zarr", progress=False)
    assert features_at(scores) == features_of(tmp_path / "old.zarr")


def test_apply__converts_a_table_as_the_data_was(cluster, tmp_path):
    pq.write_table(small(300), tmp_path / "old.parquet")
    run("score", tmp_path / "old.parquet", "--ridge", "1e-2", "--landmarks", "40", "--seed", "0", "--cluster", cluster)
    pyarrow.csv.write_csv(small(20, seed=5), tmp_path / "new.csv")
    run("apply", tmp_path / "old.scores.zarr", tmp_path / "new.csv", tmp_path / "new.scores.zarr", "--cluster", cluster)
    X = features_of(tmp_path / "old.points.zarr").scaled(np.column_stack([*small(20, seed=5).to_pydict().values()]))
    expected = daskrr.load(tmp_path / "old.scores.zarr").estimate(X).compute()
    np.testing.assert_allclose(daskrr.open_scores(tmp_path / "new.scores.zarr")["estimate"][:], expected, rtol=1e-9)


def test_sketch__warns_of_an_array_that_is_far_from_standardized(tmp_path):
    stored(tmp_path / "old.zarr", small(80), standardize=True)
    found = daskrr.leverage_scores(tmp_path / "old.zarr", Gaussian(2.0), 1e-2, 20, random_state=0, progress=False)
    found.sketch.scores([[0.1, -0.2]]).compute()
    with pytest.warns(UserWarning, match="column 'y' of the array given is far from that"):
        found.sketch.scores([[0.1, 2000.0]]).compute()


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A model of a column of a table by two others, and the folder that it is in."""
    folder = tmp_path_factory.mktemp("fitted")
    words = pa.array(["a", "b", "c"] * 50)
    table = small(150, w=words)
    stored(folder / "x.zarr", table, standardize=True)
    target = np.sin(table["x"].to_numpy()) + 0.1 * table["y"].to_numpy()
    zarr.create_array(folder / "y.zarr", data=target)
    model = daskrr.NystromKernelRidge(Gaussian(2.0), 1e-4, 60, random_state=0, progress=False)
    model.fit(folder / "x.zarr", folder / "y.zarr").save(folder / "model.zarr")
    return folder, table, target


def test_predict__refuses_rows_that_are_not_scaled_and_takes_tables_as_they_are(fitted, cluster, tmp_path):
    folder, table, target = fitted
    stored(tmp_path / "raw.zarr", table)
    told = run("predict", folder / "model.zarr", tmp_path / "raw.zarr", tmp_path / "p.zarr", code=2)
    assert "raw.zarr is not standardized, unlike the rows that the model was fitted to" in told
    pyarrow.csv.write_csv(table, tmp_path / "new.csv")
    run("predict", folder / "model.zarr", tmp_path / "new.csv", tmp_path / "p.zarr", "--cluster", cluster)
    found = zarr.open_array(tmp_path / "p.zarr" / "predictions")[:]
    assert np.corrcoef(found, target)[0, 1] > 0.99
    model = daskrr.load(folder / "model.zarr")
    expected = model.predict(zarr.open_array(folder / "x.zarr")[:].view(np.ndarray))
    np.testing.assert_allclose(found, expected, rtol=1e-8)
    for frame in (table, table.to_pandas()):
        np.testing.assert_allclose(model.predict(frame), expected, rtol=1e-8)
    assert model.features_.names == ("x", "y", "w=a", "w=b", "w=c")
    with pytest.raises(InvalidData, match=r"has no column 'w'"):
        model.predict(table.drop_columns(["w"]))
    bad = table.set_column(0, "x", pa.array([None, *table["x"].to_pylist()[1:]]))
    with pytest.raises(InvalidData, match=r"row 0, column 'x' has no value"):
        model.predict(bad)


def test_predict__warns_of_arrays_that_are_far_from_the_scale_of_the_model(fitted):
    folder, table, _ = fitted
    model = daskrr.load(folder / "model.zarr")
    raw = np.column_stack([1e3 * table["x"].to_numpy(), table["y"].to_numpy(), np.zeros((150, 3))])
    with pytest.warns(UserWarning, match="column 'x' of the array given is far from that"):
        model.predict(raw)


def test_fit__learns_more_only_from_rows_that_are_scaled_as_the_first_were(fitted, tmp_path):
    folder, table, _ = fitted
    model = daskrr.load(folder / "model.zarr")
    stored(tmp_path / "raw.zarr", table)
    with pytest.raises(InvalidData, match="is not standardized, unlike the rows that the model was fitted to"):
        model.partial_fit(tmp_path / "raw.zarr", folder / "y.zarr")


# --- Identifiers, rows left out, appending --------------------------------------------------------------


def with_gaps(n_rows=30):
    table = small(n_rows)
    x = [None if number % 10 == 3 else value for number, value in enumerate(table["x"].to_pylist())]
    return table.set_column(0, "x", pa.array(x)).append_column("name", pa.array([f"Ü{n:03d}" for n in range(n_rows)]))


def test_convert__keeps_identifiers_and_numbers_of_the_rows_that_are_left(tmp_path):
    summary = stored(tmp_path / "p.zarr", with_gaps(), missing="drop", id="name", standardize=True)
    assert (summary["rows"], summary["dropped"], summary["missing"]) == (27, 3, {"x": 3})
    values = RowValues.at(tmp_path / "p.zarr")
    (third, fourth) = values.of([2, 3])
    assert (third["table_row"], third["id"]) == (2, "Ü002")
    assert (fourth["table_row"], fourth["id"]) == (4, "Ü004")
    assert fourth["values"] == pytest.approx({one: with_gaps()[one][4].as_py() for one in "xy"})
    scores = tmp_path / "scores.zarr"
    daskrr.score_to_zarr(tmp_path / "p.zarr", scores, Gaussian(1.0), 1e-2, 10, random_state=0, progress=False)
    assert daskrr.open_scores(scores)["scores"].shape == (27,)


def test_append__grows_a_store_by_the_files_that_it_does_not_have(tmp_path):
    folder = tmp_path / "nights"
    folder.mkdir()
    pq.write_table(with_gaps(30), folder / "a.parquet")
    options = {"missing": "drop", "id": "name", "standardize": True, "chunk_bytes": 160}
    convert(folder, tmp_path / "p.zarr", progress=False, **options)
    features = features_of(tmp_path / "p.zarr")
    assert convert(folder, tmp_path / "p.zarr", append=True, progress=False)["appended"] == 0
    long = with_gaps(20).set_column(2, "name", pa.array([f"a very long identifier {n}" for n in range(20)]))
    pq.write_table(long, folder / "b.parquet")
    summary = convert(folder, tmp_path / "p.zarr", append=True, progress=False)
    assert (summary["rows"], summary["appended"], summary["dropped"]) == (45, 18, 2)
    assert features_of(tmp_path / "p.zarr") == features
    values = RowValues.at(tmp_path / "p.zarr")
    assert values.table_rows(np.arange(45)).tolist() == [n for n in range(50) if n % 10 != 3]
    assert values.identifiers(np.array([26, 27])) == ["Ü029", "a very long identifier 0"]
    raw = np.column_stack([with_gaps(20)[one].to_pylist() for one in "xy"])
    kept = [n for n in range(20) if n % 10 != 3]
    np.testing.assert_array_equal(values.points[27:], features.scaled(raw[kept].astype(float)))
    pq.write_table(with_gaps(31), folder / "a.parquet")
    with pytest.raises(SourceChanged, match=r"a\.parquet has changed since .* \(--overwrite\)"):
        convert(folder, tmp_path / "p.zarr", append=True, progress=False)
    with pytest.raises(InvalidParameter, match="leave all other options out"):
        convert(folder, tmp_path / "p.zarr", append=True, standardize=True, progress=False)


def test_append__counts_rows_that_were_dropped_at_the_end_of_a_file(tmp_path):
    folder = tmp_path / "nights"
    folder.mkdir()
    pq.write_table(with_gaps(24), folder / "a.parquet")
    pq.write_table(pa.concat_tables([with_gaps(24), with_gaps(4).slice(3)]), folder / "b.parquet")
    summary = convert(folder, tmp_path / "p.zarr", progress=False, missing="drop", id="name")
    assert (summary["rows"], summary["dropped"]) == (42, 7)
    assert RowValues.at(tmp_path / "p.zarr").dropped == 7
    pq.write_table(with_gaps(2), folder / "c.parquet")
    assert convert(folder, tmp_path / "p.zarr", append=True, progress=False)["dropped"] == 0
    assert RowValues.at(tmp_path / "p.zarr").table_rows(np.array([42, 43])).tolist() == [49, 50]


def test_append__refuses_numbers_that_the_store_cannot_hold(tmp_path):
    folder = tmp_path / "nights"
    folder.mkdir()
    pq.write_table(pa.table({"x": [1, 2, 3]}), folder / "a.parquet")
    convert(folder, tmp_path / "p.zarr", progress=False)
    pq.write_table(pa.table({"x": [1.0, 2.5]}), folder / "b.parquet")
    with pytest.raises(InvalidData, match="hold numbers that int64 cannot represent"):
        convert(folder, tmp_path / "p.zarr", append=True, progress=False)
    assert zarr.open_array(tmp_path / "p.zarr")[:].ravel().tolist() == [1, 2, 3]


def test_id__that_is_too_long_is_refused(tmp_path):
    table = small(3).append_column("name", pa.array(["a", "b", "c" * 257]))
    with pytest.raises(InvalidData, match=r"'c{40}'… has 257 bytes, and 256 at most"):
        stored(tmp_path / "p.zarr", table, id="name")
    assert not (tmp_path / "p.zarr").exists()


def test_score__of_a_table_leaves_alone_what_is_not_its_own(tmp_path):
    pq.write_table(small(50), tmp_path / "t.parquet")
    mine = zarr.create_array(tmp_path / "t.points.zarr", shape=(3, 2), dtype="f8")
    mine[:] = 7.0
    assert "was not made of a table" in run("score", tmp_path / "t.parquet", "--overwrite", code=4)
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "t.points.zarr")[:], 7.0)


@pytest.mark.parametrize("text", ["{", "[1]", '{"x": {"ridge": 1}}', '{"x": {"kernel": {"kernel": "?"}, "ridge": 1}}'])
def test_choices__that_cannot_be_read_are_told(cluster, tmp_path, text):
    pq.write_table(small(50), tmp_path / "t.parquet")
    (tmp_path / "t.choices.json").write_text(text)
    told = run("score", tmp_path / "t.parquet", "--cluster", cluster, code=2)
    assert "t.choices.json does not tell what was chosen" in told
    assert "remove it" in told
    assert (tmp_path / "t.choices.json").read_text() == text
    assert not (tmp_path / "t.scores.zarr").exists()


def test_export__tells_of_points_that_were_written_to_meanwhile(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "daskrr")  # Dask's cluster of this module raises that of all handlers
    stored(tmp_path / "p.zarr", small(40), standardize=True)
    score(tmp_path / "p.zarr", tmp_path / "s.zarr")
    export_scores(tmp_path / "s.zarr", tmp_path / "a.csv", values=True, progress=False)
    assert "was written to after it was scored" not in caplog.text
    zarr.open_array(tmp_path / "p.zarr", mode="r+")[0] = 1.0
    export_scores(tmp_path / "s.zarr", tmp_path / "b.csv", values=True, progress=False)
    assert "p.zarr was written to after it was scored" in caplog.text


def test_export__of_scores_of_a_store_with_chunks_left_out(tmp_path):
    array = zarr.create_array(tmp_path / "p.zarr", shape=(40, 2), chunks=(10, 2), dtype="f8", fill_value=0.0)
    array[:30] = np.random.default_rng(0).standard_normal((30, 2))
    score(tmp_path / "p.zarr", tmp_path / "s.zarr", missing_chunks="fill")
    export_scores(tmp_path / "s.zarr", tmp_path / "t.parquet", values=True, progress=False)
    assert pq.read_table(tmp_path / "t.parquet")["0"].to_pylist()[30:] == [0.0] * 10


def test_append__that_is_stopped_before_its_end_changes_nothing(tmp_path, monkeypatch):
    folder = tmp_path / "nights"
    folder.mkdir()
    pq.write_table(small(30), folder / "a.parquet")
    convert(folder, tmp_path / "p.zarr", progress=False, chunk_bytes=160)
    before = zarr.open_array(tmp_path / "p.zarr")[:]
    pq.write_table(small(25, seed=3), folder / "b.parquet")

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("daskrr.apps.convert.store.PointStore.finish", stop)
        with pytest.raises(KeyboardInterrupt):
            convert(folder, tmp_path / "p.zarr", append=True, progress=False)
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "p.zarr")[:], before)
    convert(folder, tmp_path / "p.zarr", append=True, progress=False)
    whole = np.vstack([np.column_stack([*one.to_pydict().values()]) for one in (small(30), small(25, seed=3))])
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "p.zarr")[:], whole)


def test_update__takes_a_store_from_where_an_append_left_it(tmp_path):
    folder = tmp_path / "nights"
    folder.mkdir()
    pq.write_table(small(200), folder / "a.parquet")
    convert(folder, tmp_path / "p.zarr", progress=False, standardize=True, chunk_bytes=1600)
    daskrr.score_to_zarr(
        tmp_path / "p.zarr", tmp_path / "s.zarr", Gaussian(1.0), 1e-2, 30, random_state=0, progress=False
    )
    pq.write_table(small(50, seed=9), folder / "b.parquet")
    convert(folder, tmp_path / "p.zarr", append=True, progress=False)
    daskrr.update_scores(tmp_path / "p.zarr", tmp_path / "s.zarr", progress=False)
    assert daskrr.open_scores(tmp_path / "s.zarr")["scores"].shape == (250,)


@pytest.mark.slow
def test_run__takes_a_folder_of_tables_every_night(cluster, tmp_path):
    folder, job = tmp_path / "nights", tmp_path / "job.toml"
    folder.mkdir()
    job.write_text(
        'input = "nights"\noutput = "scores.zarr"\n[scores]\nridge = 1e-2\nlandmarks = 30\nseed = 0\n'
        '[table]\nid = "name"\nmissing = "drop"\n'
    )
    found = []
    for number in range(3):
        if number < 2:
            pq.write_table(with_gaps(100 * (number + 1)), folder / f"{number}.parquet")
        found.append(json.loads(run("run", job, "--cluster", cluster, "--json", "--quiet")))
    assert [one["action"] for one in found] == ["score", "update", "nothing"]
    assert daskrr.open_scores(tmp_path / "scores.zarr")["scores"].shape == (270,)
    export_scores(tmp_path / "scores.zarr", tmp_path / "t.parquet", progress=False)
    assert pq.read_table(tmp_path / "t.parquet")["row"].to_pylist() == [n for n in range(300) if n % 10 != 3]
    zarr.create_array(tmp_path / "bare.zarr", data=np.ones((5, 2)))
    job.write_text(job.read_text().replace('"nights"', '"bare.zarr"'))
    assert "[table]: is about tables" in run("run", job, code=2)


# --- Back to the table -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scored")
    stored(folder / "p.zarr", with_gaps(100), missing="drop", id="name", standardize=True)
    options = {"certify": True, "random_state": 0, "progress": False}
    daskrr.score_to_zarr(folder / "p.zarr", folder / "s.zarr", Gaussian(1.0), [1e-1, 1e-2], 30, **options)
    daskrr.score_to_zarr(folder / "p.zarr", folder / "one.zarr", Gaussian(1.0), 1e-2, 30, **options)
    return folder


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_export__joins_scores_and_identifiers(scored, tmp_path, suffix, monkeypatch):
    monkeypatch.setattr("daskrr.jobs.export.ROWS_AT_ONCE", 17)
    target = tmp_path / f"t.{suffix}"
    summary = export_scores(scored / "one.zarr", target, values=True, progress=False)
    table = pq.read_table(target) if suffix == "parquet" else pyarrow.csv.read_csv(target)
    assert table.column_names == summary["columns"]
    assert table.column_names == ["row", "id", "estimate", "lower", "upper", "scores", "residual", "x", "y"]
    found = daskrr.open_scores(scored / "one.zarr")
    np.testing.assert_array_equal(table["estimate"].to_numpy(), found["estimate"][:])
    assert table["row"].to_pylist() == [n for n in range(100) if n % 10 != 3]
    assert table["id"].to_pylist() == [f"Ü{n:03d}" for n in range(100) if n % 10 != 3]
    np.testing.assert_allclose(table["y"].to_numpy(), small(100)["y"].to_numpy()[table["row"].to_numpy()], rtol=1e-9)
    with pytest.raises(OutputExists, match="--overwrite"):
        export_scores(scored / "one.zarr", target, progress=False)
    with pytest.raises(InvalidParameter, match=r"must end in \.parquet or \.csv"):
        export_scores(scored / "one.zarr", tmp_path / "t.txt", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [target.name]


def test_export__names_the_ridges_and_does_without_points(scored, tmp_path):
    text = run("export", scored / "s.zarr", tmp_path / "t.csv")
    assert "90" in text
    assert "scores at ridge 0.01" in pyarrow.csv.read_csv(tmp_path / "t.csv").column_names
    (tmp_path / "gone").mkdir()
    daskrr.score_to_zarr(
        np.eye(5), tmp_path / "gone" / "s.zarr", Gaussian(1.0), 1e-2, 3, random_state=0, progress=False
    )
    export_scores(tmp_path / "gone" / "s.zarr", tmp_path / "u.parquet", progress=False)
    assert pq.read_table(tmp_path / "u.parquet").column_names[0] == "row"
    with pytest.raises(InvalidData, match="no readable Zarr array"):
        export_scores(tmp_path / "gone" / "s.zarr", tmp_path / "v.parquet", values=True, progress=False)


def test_export__of_a_sample_and_of_predictions_has_identifiers_too(scored, tmp_path):
    run("sample", scored / "one.zarr", tmp_path / "sample.zarr", "--size", "12", "--seed", "0")
    export_scores(tmp_path / "sample.zarr", tmp_path / "s.parquet", values=True, progress=False)
    table, sample = pq.read_table(tmp_path / "s.parquet"), zarr.open_group(tmp_path / "sample.zarr", mode="r")
    assert table.column_names == ["row", "id", "weights", "probabilities", "x", "y"]
    assert table["id"].to_pylist() == [f"Ü{row:03d}" for row in table["row"].to_pylist()]
    kept = np.array([n for n in range(100) if n % 10 != 3])
    np.testing.assert_array_equal(table["row"].to_numpy(), kept[sample["indices"][:]])
    model = daskrr.NystromKernelRidge(Gaussian(1.0), 1e-3, 30, random_state=0, progress=False)
    model.fit(scored / "p.zarr", np.ones((90, 2))).predict_to_zarr(scored / "p.zarr", tmp_path / "p.zarr")
    export_scores(tmp_path / "p.zarr", tmp_path / "p.csv", progress=False)
    found = pyarrow.csv.read_csv(tmp_path / "p.csv")
    assert found.column_names == ["row", "id", "predictions of target 0", "predictions of target 1"]
    assert found["id"].to_pylist() == [f"Ü{row:03d}" for row in kept]


def test_top__with_points_shows_values_and_reasons(scored):
    told = json.loads(run("top", scored / "one.zarr", "-k", "3", "--with", scored / "p.zarr", "--json"))
    for one in told["rows"]:
        assert one["id"] == f"Ü{one['table_row']:03d}"
        assert one["values"]["y"] == pytest.approx(small(100)["y"][one["table_row"]].as_py(), rel=1e-9)
        assert sum(why["share"] for why in one["why"]) <= 1.0 + 1e-9
        assert one["why"][0]["share"] >= 0.5
    assert "unlike its neighbours in" in run("top", scored / "one.zarr", "--with", scored / "p.zarr")


def test_reasons__name_the_feature_in_which_a_row_is_alone(tmp_path):
    table = small(200)
    y = table["y"].to_pylist()
    y[77] = 500.0
    stored(tmp_path / "p.zarr", table.set_column(1, "y", pa.array(y)), standardize=True)
    daskrr.score_to_zarr(
        tmp_path / "p.zarr", tmp_path / "s.zarr", Gaussian(1.0), 1e-3, 60, random_state=0, progress=False
    )
    (top,) = daskrr.jobs.top_rows(tmp_path / "s.zarr", 1)
    assert top["row"] == 77
    (why,) = RowValues.at(tmp_path / "p.zarr").reasons([77], daskrr.load(tmp_path / "s.zarr"))
    assert why[0]["column"] == "y"
    assert why[0]["share"] > 0.9
    assert why[0]["value"] == pytest.approx(500.0)
    assert why[0]["nearest"] < 20.0


def test_to_dataframe__has_some_rows_or_all(scored):
    store = daskrr.open_scores(scored / "s.zarr")
    some = store.to_dataframe(rows=[7, 3])
    assert some.index.tolist() == [7, 3]
    assert some["estimate at ridge 0.01"][3] == store["estimate"][3, 1]
    lazy = daskrr.open_scores(scored / "one.zarr").to_dask_dataframe()
    whole = daskrr.open_scores(scored / "one.zarr").to_dataframe()
    np.testing.assert_array_equal(lazy.compute().to_numpy(), whole.to_numpy())
    assert whole.columns.tolist() == ["estimate", "lower", "upper", "scores", "residual"]
    result = daskrr.leverage_scores(
        scored / "p.zarr", Gaussian(1.0), 1e-2, 30, certify=True, random_state=0, progress=False
    )
    np.testing.assert_array_equal(result.to_dataframe().to_numpy(), whole.to_numpy())
    plain = daskrr.leverage_scores(scored / "p.zarr", Gaussian(1.0), 1e-2, 30, random_state=0, progress=False)
    assert plain.to_dask_dataframe().columns.tolist() == ["estimate", "scores", "residual"]


def test_leverage_scores__choose_for_themselves_as_the_command_does(scored):
    found = daskrr.leverage_scores(scored / "p.zarr", random_state=0, progress=False)
    told = json.loads(run("plan", scored / "p.zarr", "--json"))["outlooks"][1]
    assert found.summary["parameters"]["ridge"] == told["ridge"]
    assert found.summary["parameters"]["n_landmarks"] == told["landmarks"]
    X = np.asarray(zarr.open_group(scored / "p.zarr")["points"])
    kernel = Gaussian("median").resolve(X)
    assert found.sketch.kernel == kernel
    dimension = daskrr.exact.effective_dimension(X, kernel, told["ridge"])
    assert dimension == pytest.approx(np.sqrt(90), rel=0.05)
