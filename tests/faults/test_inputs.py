"""Input that is damaged, lost or changed before a job, during it, or between a job and its continuation."""

import json
import os
import re
import shutil
import subprocess
import sys

import dask.array as da
import numpy as np
import pytest
import zarr
from damage import (
    KERNEL,
    N_LANDMARKS,
    RIDGE,
    Saboteur,
    chunk_files,
    contents,
    flip,
    key_of,
    nothing_published,
    points,
    score,
    shorten_pauses,
    stored,
)
from processes import stop_when
from variants import slow_but
from zarr.codecs import Crc32cCodec, ZstdCodec

import daskrr
from daskrr.errors import InvalidData, MissingChunks, OutputExists, SourceChanged
from daskrr.jobs import reader, verification
from daskrr.storage.output import Output, folder_of

CHECKSUMMED = {"compressors": [ZstdCodec(level=1), Crc32cCodec()]}
GENEROUS = 120
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    shorten_pauses(monkeypatch)


# --- Bit flips: rows 13 and 14 ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [(50, 2), pytest.param((50, 3), marks=SLOW), pytest.param((90, 3), marks=SLOW)])
def test_bit_flip__in_any_checksummed_chunk_is_detected_and_the_chunk_named(chunks, tmp_path):
    source = stored(tmp_path / "X", points(), chunks, **CHECKSUMMED)
    for number, file in enumerate(chunk_files(source)):
        output = tmp_path / f"{number}.zarr"
        shutil.copytree(source, tmp_path / "damaged")
        key = key_of(file, source)
        flip(tmp_path / "damaged" / key)
        with pytest.raises(InvalidData, match=rf"cannot read rows \d+–\d+ of .*damaged \(chunk '{key}'\): .*checksum"):
            score(tmp_path / "damaged", output)
        nothing_published(output)
        shutil.rmtree(tmp_path / "damaged")
    assert score(source, tmp_path / "whole.zarr")["n_rows"] == 250


@pytest.mark.parametrize("block_rows", [100, pytest.param(30, marks=SLOW)])
def test_bit_flip__between_the_passes_is_detected_and_the_chunk_named(block_rows, tmp_path):
    source, output = stored(tmp_path / "X", points()), tmp_path / "out.zarr"
    for number, file in enumerate(chunk_files(source)):
        key = key_of(file, source)
        saboteur = Saboteur("pass 2", lambda file=file: flip(file))
        with pytest.raises(SourceChanged) as caught:
            score(source, output, progress=saboteur, block_rows=block_rows)
        assert saboteur.fired
        first, last, named = re.match(r"rows (\d+)–(\d+) of .*X \(chunk '(.*)'\) changed", str(caught.value)).groups()
        assert named == key
        assert 50 * number <= int(first) <= int(last) < 50 * (number + 1)
        # Zarr itself has noticed nothing.
        assert not np.array_equal(zarr.open_array(source, mode="r")[...], points())
        nothing_published(output)
        flip(file)
    assert score(source, output, block_rows=block_rows)["n_rows"] == 250


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [(50, 2), (1, 3)])
def test_bit_flip__between_the_passes_is_detected_in_chunks_of_other_shapes(chunks, tmp_path):
    source = stored(tmp_path / "X", points(100), chunks)
    for number, file in enumerate(chunk_files(source)[:: 1 if len(chunk_files(source)) < 10 else 17]):
        output = tmp_path / f"{number}.zarr"
        saboteur = Saboteur("pass 2", lambda file=file: flip(file, 0.9))
        with pytest.raises((SourceChanged, InvalidData), match=r"rows \d+–\d+ of .* \(chunk .*(changed|Zstd)"):
            score(source, output, progress=saboteur, block_rows=50)
        assert saboteur.fired
        flip(file, 0.9)
        nothing_published(output)


@pytest.mark.slow
def test_bit_flip__between_the_passes_is_detected_by_workers_and_in_lazy_scores(client, tmp_path):
    source = stored(tmp_path / "X", points())
    file = chunk_files(source)[3]
    with pytest.raises(SourceChanged, match=r"rows 150–199 of .*X \(chunk 'c/3/0'\)"):
        score(source, tmp_path / "out.zarr", progress=Saboteur("pass 2", lambda: flip(file)))
    nothing_published(tmp_path / "out.zarr")
    flip(file)
    result = daskrr.leverage_scores(source, KERNEL, RIDGE, N_LANDMARKS, random_state=0, progress=False)
    expected = result.scores.compute()
    flip(file)
    with pytest.raises(SourceChanged, match=r"chunk 'c/3/0'"):
        result.scores.compute()
    flip(file)
    np.testing.assert_array_equal(result.scores.compute(), expected)


# --- Chunks that are gone: row 15 ---------------------------------------------------------------------


@pytest.mark.parametrize("fill", [0.0, pytest.param(np.nan, marks=SLOW)])
def test_missing_chunk__is_refused_before_anything_runs(fill, tmp_path):
    source, output = stored(tmp_path / "X", points(), fill_value=fill), tmp_path / "out.zarr"
    for file in chunk_files(source):
        file.rename(tmp_path / "lost")
        with pytest.raises(MissingChunks, match=rf"1 of 5 chunks .* the first is '{key_of(file, source)}' \(rows"):
            score(source, output)
        assert not output.exists()
        (tmp_path / "lost").rename(file)
    assert score(source, output)["n_rows"] == 250


@pytest.mark.parametrize("stage", slow_but(["pass 1: gram", "pass 2"], "pass 2"))
@pytest.mark.parametrize("fill", [0.0, pytest.param(np.nan, marks=SLOW)])
def test_missing_chunk__is_noticed_whenever_it_goes(stage, fill, tmp_path):
    source, output = stored(tmp_path / "X", points(), fill_value=fill), tmp_path / "out.zarr"
    for number, file in enumerate(chunk_files(source)):
        saboteur = Saboteur(stage, lambda file=file: file.rename(tmp_path / "lost"))
        with pytest.raises(MissingChunks, match=rf"the chunk with row {50 * number} of .*X was never written"):
            score(source, output, progress=saboteur)
        assert saboteur.fired
        assert np.array_equal(zarr.open_array(source, mode="r")[50 * number], np.full(3, fill), equal_nan=True)
        nothing_published(output)
        (tmp_path / "lost").rename(file)


def test_missing_chunk__is_noticed_between_the_passes_even_where_fill_values_are_allowed(tmp_path):
    source, output = stored(tmp_path / "X", points()), tmp_path / "out.zarr"
    saboteur = Saboteur("pass 2", chunk_files(source)[4].unlink)
    with pytest.raises(SourceChanged, match=r"rows 200–249 of .*X \(chunk 'c/4/0'\) changed between the passes"):
        score(source, output, progress=saboteur, missing_chunks="fill")
    nothing_published(output)


def test_missing_inner_chunk_of_a_shard__is_noticed(tmp_path):
    source = tmp_path / "X"
    array = zarr.create_array(source, shape=(200, 3), chunks=(10, 3), shards=(50, 3), dtype=float, fill_value=0.0)
    array[:] = np.where(np.arange(200)[:, None] // 10 == 7, 0.0, points(200))
    with pytest.raises(MissingChunks, match="the chunk with row 70 "):
        score(source, tmp_path / "out.zarr", block_rows=50)
    assert not (tmp_path / "out.zarr").exists()


# --- Changes between a run and its continuation: row 16 -----------------------------------------------


@pytest.fixture
def one_core():
    """One core for this process, so that few blocks are in flight."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


def interrupt():
    raise KeyboardInterrupt


def interrupted(source, output, **options):
    """Score until a few blocks of pass 2 are done."""
    with pytest.raises(KeyboardInterrupt):
        score(source, output, progress=Saboteur("pass 2", interrupt, done=2), block_rows=50, **options)
    assert 2 <= reader.status(output)["unfinished"][0]["scored"] < 5


def rewrite(source):
    zarr.open_array(source, mode="r+")[7] = 1.0


def append(source):
    array = zarr.open_array(source, mode="r+")
    array.resize((300, 3))
    array[250:] = 1.0


@pytest.mark.parametrize(
    ("change", "complaint"),
    slow_but([(rewrite, "has changed since"), (append, "which has 300 now")], (rewrite, "has changed since")),
)
def test_input__that_changed_before_the_job_went_on_is_refused_until_it_is_overwritten(
    change, complaint, one_core, tmp_path
):
    source, output = stored(tmp_path / "X", points()), tmp_path / "out.zarr"
    interrupted(source, output)
    change(source)
    with pytest.raises(OutputExists, match=rf"unfinished job: .*{complaint}\. Pass overwrite=True"):
        score(source, output, block_rows=50)
    nothing_published(output)
    score(source, output, block_rows=50, overwrite=True)
    score(source, tmp_path / "anew.zarr", block_rows=50)
    assert contents(output) == contents(tmp_path / "anew.zarr")


@pytest.mark.slow
def test_bit_flip__before_the_job_goes_on_is_detected_or_harmless(one_core, tmp_path):
    source = stored(tmp_path / "X", points())
    score(source, tmp_path / "reference.zarr", block_rows=50)
    expected, detected = contents(tmp_path / "reference.zarr"), []
    for number, file in enumerate(chunk_files(source)):
        output = tmp_path / f"{number}.zarr"
        interrupted(source, output)
        scored = [50 * block in store_of(output).done("receipts") for block in range(5)]
        flip(file)
        try:
            score(source, output, block_rows=50)
            assert contents(output) == expected
        except SourceChanged as error:
            assert f"(chunk '{key_of(file, source)}') changed" in str(error)  # noqa: PT017
            detected.append(number)
        # A block that was scored before the flip was scored from what pass 1 saw.
        assert (number in detected) != scored[number]
        flip(file)
    assert detected


def store_of(output):
    store = Output(output)
    return store.journal(store.unfinished[0])


@pytest.mark.slow
def test_input__that_changed_while_a_killed_job_lay_is_refused_by_the_command(tmp_path):
    source, output = stored(tmp_path / "X", points(30_000), (500, 3)), tmp_path / "out.zarr"
    command = [sys.executable, "-m", "daskrr.apps.cli", "score", str(source), str(output), "--kernel", "gaussian"]
    command += ["--length-scale", "1.5", "--ridge", "1e-2", "--landmarks", "40", "--seed", "0", "--workers", "1"]
    command += ["--block-rows", "500", "--quiet"]
    stop_when(
        lambda: len(list(output.glob(".daskrr/records/*/receipts/*"))) > 3,
        lambda: subprocess.Popen(command, stderr=subprocess.PIPE, text=True),
        output,
    )
    rewrite(source)
    refused = subprocess.run(command, capture_output=True, text=True, timeout=GENEROUS)
    assert refused.returncode == 4
    assert "has changed since" in refused.stderr
    nothing_published(output)
    again = subprocess.run([*command, "--overwrite", "--json"], capture_output=True, text=True, timeout=GENEROUS)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["n_rows"] == 30_000
    assert verification.verify(output) == []


# --- Outputs that would not fit the input: row 26 -----------------------------------------------------

SOURCES = {
    "chunks": lambda folder, X: stored(folder, X, (20, 3)),
    "one chunk": lambda folder, X: stored(folder, X, (60, 3)),
    "chunks of 7 rows": lambda folder, X: stored(folder, X, (7, 3)),
    "chunks of features": lambda folder, X: stored(folder, X, (16, 1)),
    "shards": lambda folder, X: stored(folder, X, (5, 3), shards=(25, 3)),
    "ragged": lambda folder, X: da.from_array(X, chunks=((1, 20, 9, 30), -1)),
    "ragged both ways": lambda folder, X: da.from_array(X, chunks=((50, 1, 9), (1, 2))),
}


@pytest.mark.parametrize("block_rows", [13, *(pytest.param(one, marks=SLOW) for one in (None, 1, 10_000))])
@pytest.mark.parametrize("kind", slow_but(SOURCES, "chunks of features", "ragged both ways"))
def test_output__is_aligned_whatever_the_chunks_of_the_input_and_the_blocks_asked_for(kind, block_rows, tmp_path):
    X, output = points(60), tmp_path / "out.zarr"
    options = {"sampling": np.arange(0, 60, 3), "random_state": 0, "progress": False}
    reference = daskrr.leverage_scores(X, KERNEL, RIDGE, **options)
    daskrr.score_to_zarr(SOURCES[kind](tmp_path / "X", X), output, KERNEL, RIDGE, block_rows=block_rows, **options)
    found = daskrr.open_scores(output)
    for name in ("scores", "estimate", "residual"):
        np.testing.assert_allclose(found[name][...], getattr(reference, name).compute(), rtol=1e-9, atol=1e-12)
        assert found[name].shards is None
        assert len(chunk_files(output / name)) == -(-60 // found[name].chunks[0])
    assert verification.verify(output) == []


@pytest.mark.slow
def test_output__of_another_chunking_is_replaced_whole(client, tmp_path):
    source, output = stored(tmp_path / "X", points(), (10, 3), shards=(60, 3)), tmp_path / "out.zarr"
    for block_rows in (60, 25, 250):
        score(source, output, block_rows=block_rows, overwrite=True)
        score(source, tmp_path / "anew.zarr", block_rows=block_rows, overwrite=True)
        assert contents(output) == contents(tmp_path / "anew.zarr")
        assert verification.verify(output) == []


def test_output__that_is_a_sharded_array_of_others_is_refused_and_left_alone(tmp_path):
    source, output = stored(tmp_path / "X", points()), tmp_path / "out.zarr"
    group = zarr.create_group(output)
    theirs = group.create_array("scores", shape=(250,), chunks=(10,), shards=(250,), dtype=float, fill_value=0.0)
    theirs[:] = 7.0
    for overwrite in (False, True):
        with pytest.raises(OutputExists, match="not a result of daskrr; it is left alone"):
            score(source, output, overwrite=overwrite)
    assert np.all(theirs[:] == 7.0)
    assert sorted(path.name for path in output.iterdir()) == ["scores", "zarr.json"]


def test_staged_write__refuses_rows_that_are_not_whole_chunks(tmp_path):
    staged = Output(tmp_path / "out.zarr").staged("000001-00000000", {"scores": (450,)}, 100)
    folder = tmp_path / "out.zarr" / folder_of("000001-00000000") / "scores"
    for start, stop in ((0, 50), (50, 150), (0, 430), (399, 450)):
        with pytest.raises(RuntimeError, match="are not whole chunks of 100 rows"):
            staged.write({"scores": np.zeros(stop - start)}, start)
    assert chunk_files(folder) == []
    staged.write({"scores": np.zeros(50)}, 400)
    staged.settle([400])
    assert len(chunk_files(folder)) == 1
