"""The output store: whole chunks, checksums, and nothing visible before it is finished."""

import json

import numpy as np
import pytest
import zarr
from strategies import as_zarr, score

import daskrr
from daskrr.engine.storage import OutputStore, write_block
from daskrr.errors import CheckFailed, InvalidData, InvalidParameter, OutputExists
from daskrr.jobstore import open_published
from daskrr.kernels import Gaussian, Linear

NAMES = ("scores", "estimate", "residual")


def rows(n=47, d=2):
    return np.random.default_rng(0).standard_normal((n, d))


def run(X=None, **options):
    options = {"block_rows": 10} | options
    return score(rows() if X is None else X, Gaussian(1.0), 0.01, 12, **options)


def stored(folder, **options):
    scored = run(**options)
    return scored, scored.result.store(folder / "out.zarr", progress=False)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def chunk_file(folder, name):
    return folder / "out.zarr" / name / "c" / "2"


# --- Results ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["numpy", "zarr"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_store__writes_what_is_computed(source, dtype, tmp_path):
    X = rows() if source == "numpy" else as_zarr(rows(), (5, 2))
    scored, _ = stored(tmp_path, X=X, dtype=dtype)
    group = open_published(tmp_path / "out.zarr")
    for name in NAMES:
        np.testing.assert_array_equal(group[name][...], getattr(scored, name))
    assert names(tmp_path) == ["out.zarr"]


@pytest.mark.parametrize(("block_rows", "height"), [(10, 10), (20, 20), (None, 47), (1000, 47)])
def test_store__aligns_chunks_with_blocks(block_rows, height, tmp_path):
    stored(tmp_path, block_rows=block_rows)
    group = open_published(tmp_path / "out.zarr")
    assert {(group[name].shape, group[name].chunks) for name in NAMES} == {((47,), (height,))}
    assert all(group[name].dtype == np.float64 and np.isnan(group[name].fill_value) for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_store__checksums_every_chunk(name, tmp_path):
    scored, _ = stored(tmp_path)
    path = chunk_file(tmp_path, name)
    intact = path.read_bytes()
    for position in range(0, len(intact), 5):
        damaged = bytearray(intact)
        damaged[position] ^= 1
        path.write_bytes(bytes(damaged))
        with pytest.raises(ValueError, match="checksum"):
            open_published(tmp_path / "out.zarr")[name][...]
    path.unlink()
    with pytest.raises(InvalidData, match=f"the chunk {name}/c/2 of .* is gone"):
        open_published(tmp_path / "out.zarr")[name][...]
    found = zarr.open_array(tmp_path / "out.zarr" / name, mode="r")[...]
    assert np.isnan(found[20:30]).all()
    assert np.isfinite(np.delete(found, slice(20, 30))).all()
    assert np.isfinite(scored.scores).all()


def test_store__keeps_parameters_versions_and_figures(tmp_path):
    X = as_zarr(rows(), (5, 2), str(tmp_path / "in.zarr"))
    scored, summary = stored(tmp_path, X=X, sampling="uniform", random_state=8, sketch_ridge=1e-3)
    kept = dict(zarr.open_group(tmp_path / "out.zarr", mode="r").attrs["daskrr"])
    parameters = kept["parameters"]
    assert {key: parameters[key] for key in ("ridge", "n_landmarks", "sampling", "sketch_ridge", "random_state")} == {
        "ridge": 0.01, "n_landmarks": 12, "sampling": "uniform", "sketch_ridge": 1e-3, "random_state": 8,
    }  # fmt: skip
    assert (parameters["dtype"], parameters["block_rows"]) == ("float64", 10)
    assert "in.zarr" in parameters["input"]
    assert daskrr.kernels.from_spec(parameters["kernel"]) == Gaussian(1.0)
    assert set(kept["versions"]) >= {"daskrr", "numpy", "scipy", "dask", "distributed", "zarr"}
    assert kept["versions"]["zarr"] == zarr.__version__
    assert (kept["n_rows"], kept["n_features"], kept["rank"]) == (47, 2, scored.result.rank)
    assert kept["sum_of_scores"] == pytest.approx(scored.scores.sum(), rel=1e-12)
    assert kept["sketch_dimension"] == scored.result.sketch_dimension
    assert summary["output"] == str(tmp_path / "out.zarr")
    assert (kept.pop("format"), kept.pop("kind")) == (1, "scores")
    assert json.loads(json.dumps({key: summary[key] for key in kept})) == kept


def test_store__lists_the_highest_rows(tmp_path):
    scored, summary = stored(tmp_path)
    order = np.argsort(-scored.estimate, kind="stable")[:10]
    assert [one["row"] for one in summary["top"]] == order.tolist()
    assert [one["scores"] for one in summary["top"]] == scored.scores[order].tolist()


def test_store__can_be_repeated(tmp_path):
    result = run().result
    result.store(tmp_path / "a.zarr", progress=False)
    result.store(tmp_path / "b.zarr", progress=False)
    for name in NAMES:
        np.testing.assert_array_equal(*(open_published(tmp_path / path)[name][...] for path in ("a.zarr", "b.zarr")))


def test_store__refuses_scores_that_do_not_add_up(tmp_path):
    result = run().result
    result.sketch_dimension *= 1 + 1e-6
    with pytest.raises(CheckFailed, match=r"sum to .* effective dimension"):
        result.store(tmp_path / "out.zarr", progress=False)
    assert names(tmp_path) == []


# --- Targets ------------------------------------------------------------------------------------------


def foreign(kind, path):
    if kind == "file":
        path.write_text("mine")
    elif kind == "folder":
        path.mkdir()
        (path / "mine.txt").write_text("mine")
    elif kind == "group":
        zarr.create_group(str(path)).attrs["mine"] = True
    elif kind == "array":
        as_zarr(rows(), (5, 2), str(path))
    elif kind == "link":
        path.symlink_to(path.parent / "nowhere")
    elif kind == "broken":
        path.mkdir()
        (path / "zarr.json").write_text("{")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", ["file", "folder", "group", "array", "link", "broken"])
def test_output_store__never_touches_what_is_not_ours(kind, overwrite, tmp_path):
    target = tmp_path / "out.zarr"
    foreign(kind, target)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OutputExists, match="is not a result of daskrr"):
        run().result.store(target, overwrite=overwrite, progress=False)
    assert sorted(tmp_path.rglob("*")) == before


def test_output_store__leaves_what_appeared_meanwhile(tmp_path):
    target = tmp_path / "out.zarr"
    with OutputStore(target, overwrite=False) as output:
        output.create({"scores": (4,)}, 2)
        foreign("folder", target)
        with pytest.raises(OutputExists, match=r"out\.zarr"):
            output.commit({})
    assert (target / "mine.txt").read_text() == "mine"
    assert names(tmp_path) == ["out.zarr"]


def test_output_store__replaces_ours_only_when_asked(tmp_path):
    stored(tmp_path)
    other = score(rows(30), Linear(), 0.1, 5, block_rows=10)
    with pytest.raises(OutputExists, match=r"holds scores already.*overwrite=True"):
        other.result.store(tmp_path / "out.zarr", progress=False)
    assert open_published(tmp_path / "out.zarr")["scores"].shape == (47,)
    other.result.store(tmp_path / "out.zarr", overwrite=True, progress=False)
    np.testing.assert_array_equal(open_published(tmp_path / "out.zarr")["scores"][...], other.scores)
    assert names(tmp_path) == ["out.zarr"]


def test_output_store__needs_the_folder(tmp_path):
    with pytest.raises(InvalidParameter, match=r"there is no folder .*nowhere"):
        OutputStore(tmp_path / "nowhere" / "out.zarr", overwrite=False)


def test_output_store__leaves_nothing_behind_an_error(tmp_path):
    def fail():
        with OutputStore(tmp_path / "out.zarr", overwrite=False) as output:
            output.create({"scores": (4,)}, 2)
            assert len(names(tmp_path)) == 1
            assert not (tmp_path / "out.zarr").exists()
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        fail()
    assert names(tmp_path) == []


# --- Blocks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "size"), [(0, 10), (10, 3), (0, 13), (5, 5)])
def test_write_block__writes_whole_chunks(start, size, tmp_path):
    with OutputStore(tmp_path / "out.zarr", overwrite=False) as output:
        output.create({"scores": (13,)}, 5)
        write_block(output.arrays, {"scores": np.arange(size, dtype=float)}, start)
        found = zarr.open_array(f"{output.path}/scores", mode="r")[...]
    np.testing.assert_array_equal(found[start : start + size], np.arange(size))
    assert np.isnan(np.delete(found, slice(start, start + size))).all()


@pytest.mark.parametrize(("start", "size"), [(1, 4), (0, 4), (0, 12), (5, 7), (3, 10)])
def test_write_block__refuses_parts_of_chunks(start, size, tmp_path):
    with OutputStore(tmp_path / "out.zarr", overwrite=False) as output:
        output.create({"scores": (13,)}, 5)
        with pytest.raises(RuntimeError, match=f"rows {start}–{start + size} are not whole chunks of 5"):
            write_block(output.arrays, {"scores": np.zeros(size)}, start)


# --- Opening ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "message"),
    [(None, "no scores at"), ("folder", "no scores at"), ("array", "no scores at"), ("group", "not a finished result")],
)
def test_open_published__refuses_what_is_no_result(kind, message, tmp_path):
    if kind:
        foreign(kind, tmp_path / "out.zarr")
    with pytest.raises(InvalidData, match=message):
        open_published(tmp_path / "out.zarr")


def test_open_published__refuses_a_later_format(tmp_path):
    stored(tmp_path)
    group = zarr.open_group(tmp_path / "out.zarr", mode="r+")
    group.attrs["daskrr"] = dict(group.attrs["daskrr"]) | {"format": 99}
    with pytest.raises(InvalidData, match="format 99"):
        open_published(tmp_path / "out.zarr")
