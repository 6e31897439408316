"""Sketches on storage: the same bits for new rows after they were loaded, and no damage goes unnoticed."""

import json
from pathlib import Path

import dask
import numpy as np
import pytest
from distributed import Client
from strategies import as_zarr, counted
from variants import slow_but

import daskrr
from daskrr.errors import InvalidData, InvalidParameter, NotCertified, OutputExists
from daskrr.jobs.verification import verify
from daskrr.kernels import Gaussian, Linear
from daskrr.nystrom.strategies import Certify
from daskrr.storage.output import Output, folder_of

PLAIN = ("scores", "estimate", "residual", "leverage_function")
CERTIFIED = (*PLAIN, "lower", "upper")
NEW = 2.0 * np.random.default_rng(1).standard_normal((70, 3))


def rows(n=300, d=3, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d))


def fitted(ridge=1e-2, landmarks=50, **options):
    options = {"random_state": 0, "progress": False, "certify": True} | options
    return daskrr.leverage_scores(rows(), Gaussian("median"), ridge, landmarks, **options).sketch


def bits(sketch, names=CERTIFIED, new=NEW):
    return [found.tobytes() for found in dask.compute(*(getattr(sketch, name)(new) for name in names))]


@pytest.mark.parametrize("ridge", [1e-2, [1e-2, 1e-4]], ids=["one ridge", "two ridges"])
@pytest.mark.parametrize("tiles", slow_but(["float64", "float32"], "float32"))
@pytest.mark.parametrize("subset_bound", slow_but([False, True], True))
def test_load__gives_new_rows_the_same_bits(tiles, ridge, subset_bound, tmp_path):
    sketch = fitted(ridge, dtype=tiles, certify=Certify(subset_bound=subset_bound))
    sketch.save(tmp_path / "sketch.zarr")
    again = daskrr.load(tmp_path / "sketch.zarr")
    assert bits(again) == bits(sketch)
    assert repr(again) == repr(sketch)
    for name in ("indices", "counts", "probabilities"):
        np.testing.assert_array_equal(getattr(again.landmarks, name), getattr(sketch.landmarks, name))
    again.save(tmp_path / "copy.zarr")
    assert bits(daskrr.load(tmp_path / "copy.zarr")) == bits(sketch)


@pytest.mark.parametrize("sampling", [[0], [7], "uniform"])
def test_load__of_a_sketch_without_certificate_gives_the_same_bits_and_no_ends(sampling, tmp_path):
    sketch = fitted(certify=False, sampling=sampling, landmarks=5 if sampling == "uniform" else None)
    sketch.save(tmp_path / "sketch.zarr")
    again = daskrr.load(tmp_path / "sketch.zarr")
    assert bits(again, PLAIN) == bits(sketch, PLAIN)
    with pytest.raises(NotCertified, match="the sketch has no upper"):
        again.upper(NEW)


def test_load__of_a_sketch_without_landmarks(tmp_path):
    sketch = daskrr.leverage_scores(np.zeros((5, 3)), Linear(), 0.1, sampling=[0], certify=True, progress=False).sketch
    sketch.save(tmp_path / "sketch.zarr")
    assert bits(daskrr.load(tmp_path / "sketch.zarr")) == bits(sketch)


def test_load__works_with_and_without_a_cluster_whichever_it_was_fitted_on(tmp_path, cluster):
    new = as_zarr(NEW, (20, 3), str(tmp_path / "new.zarr"))
    fitted().save(tmp_path / "here.zarr")
    here = daskrr.load(tmp_path / "here.zarr")
    expected = bits(here, new=new)
    with Client(cluster):
        there = fitted()
        there.save(tmp_path / "there.zarr")
        assert bits(there, new=new) == bits(here, new=new) == expected
    assert bits(daskrr.load(tmp_path / "there.zarr"), new=new) == expected


def test_load__of_a_kernel_that_is_a_function_needs_leave(tmp_path):
    sketch = daskrr.leverage_scores(rows(), counted, 1e-2, 20, random_state=0, progress=False).sketch
    sketch.save(tmp_path / "sketch.zarr")
    with pytest.raises(InvalidParameter, match="would import 'strategies:counted': list it in allow_functions"):
        daskrr.load(tmp_path / "sketch.zarr")
    again = daskrr.load(tmp_path / "sketch.zarr", allow_functions=["strategies:counted"])
    assert bits(again, PLAIN) == bits(sketch, PLAIN)


# --- Scores carry their sketch ------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["residual", [0]])
def test_load__of_scores_is_the_sketch_that_they_carry(sampling, tmp_path):
    options = {"sampling": sampling, "certify": True, "random_state": 0, "progress": False}
    n_landmarks = 40 if sampling == "residual" else None
    result = daskrr.leverage_scores(rows(), Gaussian(1.5), [1e-2, 1e-3], n_landmarks, **options)
    result.store(tmp_path / "stored.zarr")
    daskrr.score_to_zarr(rows(), tmp_path / "job.zarr", Gaussian(1.5), [1e-2, 1e-3], n_landmarks, **options)
    for name in ("stored.zarr", "job.zarr"):
        assert bits(daskrr.load(tmp_path / name)) == bits(result.sketch)


def test_load__of_updated_scores_is_the_sketch_of_all_rows(tmp_path):
    X = as_zarr(rows(), (50, 3), str(tmp_path / "X.zarr"))
    daskrr.score_to_zarr(X, tmp_path / "out.zarr", Gaussian(1.5), 1e-2, 40, random_state=0, progress=False)
    before = bits(daskrr.load(tmp_path / "out.zarr"), PLAIN)
    X.resize((350, 3))
    X[300:] = rows(50, seed=2)
    daskrr.update_scores(X, tmp_path / "out.zarr", progress=False)
    again = daskrr.load(tmp_path / "out.zarr")
    assert again.n_rows == 350
    assert bits(again, PLAIN) != before
    assert verify(tmp_path / "out.zarr") == []


def published(path):
    """Where the published arrays are."""
    return path / folder_of(Output(path).commit.current)


def damaged(path, kind):
    content = path.read_bytes()
    if kind == "gone":
        path.unlink()
    elif kind == "flipped":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        path.write_bytes(content[:-3])
    return content


@pytest.mark.parametrize("kind", ["gone", "flipped", "cut"])
@pytest.mark.slow
def test_verify__finds_damage_of_the_sketch_and_load_refuses_it(kind, tmp_path):
    daskrr.score_to_zarr(rows(), tmp_path / "out.zarr", Gaussian(1.5), 1e-2, 9, certify=True, progress=False)
    files = [path for path in (published(tmp_path / "out.zarr") / "sketch").rglob("*") if path.is_file()]
    assert len(files) > 20
    for path in files:
        content = damaged(path, kind)
        name = path.relative_to(tmp_path / "out.zarr")
        assert verify(tmp_path / "out.zarr") == [f"{name}: is not what was written"]
        if path.name == "zarr.json":
            daskrr.load(tmp_path / "out.zarr")  # which has metadata from elsewhere
        else:
            with pytest.raises(InvalidData, match=r"damaged|is gone"):
                daskrr.load(tmp_path / "out.zarr")
        path.write_bytes(content)
    assert verify(tmp_path / "out.zarr") == []


# --- What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", slow_but(["gone", "flipped", "cut"], "gone", "flipped"))
def test_load__refuses_a_damaged_chunk(kind, tmp_path):
    fitted(landmarks=9).save(tmp_path / "sketch.zarr")
    folder = published(tmp_path / "sketch.zarr")
    chunks = [path for path in folder.rglob("*") if path.is_file() and path.name != "zarr.json"]
    assert len(chunks) > 8
    for path in chunks:
        content = damaged(path, kind)
        name = path.relative_to(folder).parts[0]
        found = rf"the chunk {name}/c" if kind == "gone" else rf"the sketch at .*sketch\.zarr is damaged: {name}"
        with pytest.raises(InvalidData, match=found):
            daskrr.load(tmp_path / "sketch.zarr")
        path.write_bytes(content)


def forge(path, key, change):
    """Change metadata as the manifest has them, in both copies."""
    output = Output(path)
    generation = output.commit.current
    manifest = output.manifest(generation)
    about = json.loads(manifest["metadata"][key])
    change(about)
    metadata = manifest["metadata"] | {key: json.dumps(about)}
    for name in ("manifest", "manifest-copy"):
        output.records.write(f"{generation}/{name}", manifest | {"metadata": metadata})
    return manifest


def turned(about):
    """As many numbers in another shape."""
    about.update(shape=[3, 9])
    about["chunk_grid"]["configuration"].update(chunk_shape=[3, 9])


def test_load__refuses_changed_metadata(tmp_path):
    root = tmp_path / "sketch.zarr"
    fitted(landmarks=9).save(root)
    whole = forge(root, "landmarks/zarr.json", turned)
    with pytest.raises(InvalidData, match=r"damaged: landmarks, of shape \(3, 9\), is not .* of shape \(9, 3\)"):
        daskrr.load(root)
    forge(root, "landmarks/zarr.json", lambda about: about.update(json.loads(whole["metadata"]["landmarks/zarr.json"])))
    forge(root, "zarr.json", lambda about: about["attributes"]["daskrr"]["certainty"].update(delta=0.0))
    with pytest.raises(InvalidData, match="damaged: its attributes are not what was written"):
        daskrr.load(root)
    forge(root, "zarr.json", lambda about: about["attributes"]["daskrr"].update(sketch_version=9))
    with pytest.raises(InvalidData, match="has version 9, and this daskrr reads version 1"):
        daskrr.load(root)


def test_load__believes_no_metadata_but_those_of_the_manifest(tmp_path):
    root, sketch = tmp_path / "sketch.zarr", fitted(landmarks=9)
    sketch.save(root)
    for path in (published(root) / "zarr.json", published(root) / "landmarks" / "zarr.json"):
        path.write_text("{")
    assert bits(daskrr.load(root)) == bits(sketch)
    assert len(verify(root)) == 2


def test_load__refuses_what_is_nothing_or_something_else(tmp_path):
    with pytest.raises(InvalidData, match=r"there is no model, no sketch and no scores at .*nothing.zarr"):
        daskrr.load(tmp_path / "nothing.zarr")
    result = daskrr.leverage_scores(rows(), Linear(), 1e-2, 9, certify=True, random_state=0, progress=False)
    daskrr.jobs.sample_rows(result, 5, output=tmp_path / "sample.zarr", progress=False)
    with pytest.raises(InvalidData, match="holds a sample"):
        daskrr.load(tmp_path / "sample.zarr")


def test_save__replaces_a_sketch_only_if_asked_and_nothing_else_ever(tmp_path):
    sketch = fitted(landmarks=9)
    sketch.save(tmp_path / "sketch.zarr")
    with pytest.raises(OutputExists, match=r"holds a sketch already"):
        sketch.save(tmp_path / "sketch.zarr")
    fitted(landmarks=8).save(tmp_path / "sketch.zarr", overwrite=True)
    assert daskrr.load(tmp_path / "sketch.zarr").rank == 8
    daskrr.score_to_zarr(rows(), tmp_path / "scores.zarr", Linear(), 1e-2, 9, progress=False)
    with pytest.raises(OutputExists, match="holds scores, not a sketch"):
        sketch.save(tmp_path / "scores.zarr", overwrite=True)
    assert not [path for path in Path(tmp_path).iterdir() if "partial" in path.name]


def test_stage_group__of_a_worker_that_was_left_at_work_touches_no_other(tmp_path):
    store = Output(tmp_path / "out.zarr")
    given = "000001-job", "sketch", "a sketch", {"landmarks": np.ones(3)}, {"n_rows": 7}
    ours, theirs = store.stage_group(*given), store.stage_group(*given)
    assert ours.folder != theirs.folder
    assert ours.digests == theirs.digests
