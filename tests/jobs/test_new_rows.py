"""Sketches applied to stores of new rows: durably, to the bits of the sketch itself, or refused in words."""

import contextlib
import json
import subprocess
import sys

import dask
import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from distributed import Client
from processes import stop_when
from strategies import as_zarr, counted
from test_jobs import Stop, stop_at

import daskrr
from daskrr.apps.cli import main
from daskrr.apps.report import write_report
from daskrr.errors import InvalidData, InvalidParameter, LeaseHeld, OutputExists, SourceChanged
from daskrr.jobs import reader
from daskrr.jobs.verification import verify
from daskrr.kernels import Gaussian
from daskrr.storage.output import Output
from daskrr.storage.writing import hold

CERTIFIED = ("estimate", "lower", "residual", "scores", "upper")
PLAIN = ("estimate", "residual", "scores")


def data(n=300, d=3, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d))


def scored(output, ridge=1e-2, **options):
    options = {"certify": True, "random_state": 0, "progress": False} | options
    daskrr.score_to_zarr(data(), output, Gaussian(1.5), ridge, 40, **options)
    return output


def stored(path, n=250, height=50, **options):
    as_zarr(2.0 * data(n, seed=1), (height, 3), str(path), **options)
    return path


def applied(sketch, new, output, **options):
    return daskrr.jobs.apply_sketch(sketch, new, output, **{"block_rows": 50, "progress": False} | options)


def contents(output, names=CERTIFIED):
    return {name: zarr.open_array(output / name, mode="r")[...].tobytes() for name in names}


def check_values(output, sketch, new, names=CERTIFIED):
    """What was applied is what the sketch says of all rows at once: another block, whose last bits may differ."""
    for name, values in zip(names, dask.compute(*(getattr(sketch, name)(new) for name in names)), strict=True):
        np.testing.assert_allclose(zarr.open_array(output / name, mode="r")[...], values, rtol=1e-9)


@pytest.mark.parametrize(
    ("certify", "ridge"),
    [
        pytest.param(False, 1e-2, id="False-one ridge", marks=pytest.mark.slow),
        pytest.param(False, [1e-2, 1e-3], id="False-two ridges", marks=pytest.mark.slow),
        pytest.param(True, 1e-2, id="True-one ridge", marks=pytest.mark.slow),
        pytest.param(True, [1e-2, 1e-3], id="True-two ridges"),
    ],
)
def test_apply_sketch__writes_what_the_sketch_says(certify, ridge, tmp_path):
    scores, names = scored(tmp_path / "scores.zarr", ridge, certify=certify), CERTIFIED if certify else PLAIN
    new = zarr.open_array(stored(tmp_path / "new.zarr"))
    sketch = daskrr.load(scores)
    sketch.save(tmp_path / "sketch.zarr")
    for number, source in enumerate([scores, tmp_path / "sketch.zarr", sketch]):
        summary = applied(source, new, tmp_path / f"{number}.zarr")
        assert contents(tmp_path / f"{number}.zarr", names) == contents(tmp_path / "0.zarr", names)
        check_values(tmp_path / f"{number}.zarr", sketch, np.asarray(new[...]), names)
        assert sorted(daskrr.open_scores(tmp_path / f"{number}.zarr").keys()) == sorted(names)
        assert verify(tmp_path / f"{number}.zarr") == []
        assert summary["sketch"]["n_rows"] == 300
        assert summary["sketch"]["failure_probability"] == (1e-6 if certify else None)
        assert daskrr.jobs.top_rows(tmp_path / f"{number}.zarr", 3) == summary["top"][:3]
    assert json.loads(json.dumps(summary)) == summary


UNPUBLISHED = "there are no scores at|unfinished job and no finished scores"


def read(output):
    """The published bytes, as our own readers see them."""
    scores = daskrr.open_scores(output)
    return {name: scores[name][...].tobytes() for name in CERTIFIED}


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_apply_sketch__goes_on_from_every_durable_write_to_the_same_bits(stride, tmp_path, monkeypatch):
    scores, new = scored(tmp_path / "scores.zarr"), stored(tmp_path / "new.zarr")
    with monkeypatch.context() as patch:
        writes = stop_at(patch, 10**9, before=False)
        applied(scores, new, tmp_path / "reference.zarr")
    whole = contents(tmp_path / "reference.zarr")
    assert len(writes) > 7
    for number in range(0, len(writes), stride):
        output = tmp_path / f"{number}.zarr"
        with monkeypatch.context() as patch:
            stop_at(patch, number, before=True)
            with pytest.raises(Stop):
                applied(scores, new, output)
        committed = bool(Output(output).committed)
        with contextlib.nullcontext() if committed else pytest.raises(InvalidData, match=UNPUBLISHED):
            assert read(output) == whole
        jobs = reader.status(output)["unfinished"] if Output(output).is_begun else []
        done = sum(job["scored"] for job in jobs)
        with monkeypatch.context() as patch:
            again = stop_at(patch, 10**9, before=False)
            applied(scores, new, output)
        assert read(output) == whole, writes[number]
        assert sum("/receipts/" in name for name in again) == (0 if committed else 5 - done)
        assert contents(output) == whole


APPLY = "import sys, daskrr; daskrr.jobs.apply_sketch(*sys.argv[1:], block_rows=500, progress=False)"


@pytest.mark.slow
def test_apply_sketch__goes_on_after_a_kill_to_the_same_bits(tmp_path):
    scores, new, output = scored(tmp_path / "scores.zarr"), stored(tmp_path / "new.zarr", 60_000, 500), tmp_path / "out"
    command = [sys.executable, "-c", APPLY, str(scores), str(new), str(output)]

    def is_amid() -> bool:
        return 3 < len(list(output.glob(".daskrr/records/*/receipts/*.record"))) < 20

    stop_when(is_amid, lambda: subprocess.Popen(command, stderr=subprocess.PIPE, text=True), output)
    (job,) = reader.status(output)["unfinished"]
    assert 0 < job["scored"] < job["tasks"] < 120
    applied(scores, new, output, block_rows=500)
    applied(scores, new, tmp_path / "reference", block_rows=500)
    assert contents(output) == contents(tmp_path / "reference")
    assert verify(output) == []


def test_apply_sketch__on_a_cluster_gives_the_same_bits(tmp_path, cluster):
    scores, new = scored(tmp_path / "scores.zarr"), stored(tmp_path / "new.zarr")
    applied(scores, new, tmp_path / "here.zarr")
    with Client(cluster):
        applied(scores, new, tmp_path / "there.zarr")
        fitted = daskrr.leverage_scores(
            data(), Gaussian(1.5), 1e-2, 40, certify=True, random_state=0, progress=False
        ).sketch  # fmt: skip
        applied(fitted, new, tmp_path / "directly.zarr")
    assert contents(tmp_path / "there.zarr") == contents(tmp_path / "here.zarr")
    for name in CERTIFIED:
        here, directly = (zarr.open_array(tmp_path / one / name)[...] for one in ("here.zarr", "directly.zarr"))
        np.testing.assert_allclose(directly, here, rtol=1e-9)


def test_apply_sketch__of_fewer_rows_than_landmarks(tmp_path):
    scores, new = scored(tmp_path / "scores.zarr"), 2.0 * data(2, seed=3)
    applied(scores, new, tmp_path / "out.zarr", block_rows=None)
    check_values(tmp_path / "out.zarr", daskrr.load(scores), new)


def test_apply_sketch__finds_what_is_done_and_refuses_to_replace_other_work(tmp_path):
    scores, new, output = scored(tmp_path / "scores.zarr"), stored(tmp_path / "new.zarr"), tmp_path / "out.zarr"
    first = applied(scores, new, output)
    assert applied(scores, new, output) == first
    scored(tmp_path / "other.zarr", ridge=1e-1)
    with pytest.raises(OutputExists, match=r"that differ in sketch, ridge \(0\.01, not 0\.1\)\. Pass overwrite"):
        applied(tmp_path / "other.zarr", new, output)
    zarr.open_array(new).resize((251, 3))
    zarr.open_array(new)[250:] = 1.0
    with pytest.raises(OutputExists, match=r"as it was, and it has changed since\. Pass overwrite"):
        applied(scores, new, output)
    assert applied(scores, new, output, overwrite=True)["n_rows"] == 251
    with pytest.raises(OutputExists, match="holds scores that differ in kernel"):
        scored(output)
    daskrr.load(scores).save(tmp_path / "sketch.zarr")
    with pytest.raises(OutputExists, match="holds a sketch, not scores"):
        applied(scores, new, tmp_path / "sketch.zarr")


def test_apply_sketch__refuses_what_cannot_be(tmp_path, monkeypatch):
    scores, new = scored(tmp_path / "scores.zarr"), stored(tmp_path / "new.zarr")
    with pytest.raises(InvalidData, match="X_new has 2 features; the sketch was fitted to 3"):
        applied(scores, data(5, 2), tmp_path / "out.zarr")
    with pytest.raises(InvalidData, match="there is no model, no sketch and no scores at"):
        applied(tmp_path / "nothing.zarr", new, tmp_path / "out.zarr")
    applied(scores, new, tmp_path / "applied.zarr")
    with pytest.raises(InvalidData, match=r"the scores at .*applied.zarr carry no sketch"):
        applied(tmp_path / "applied.zarr", new, tmp_path / "out.zarr")
    with monkeypatch.context() as patch:
        stop_at(patch, 8, before=True)
        with pytest.raises(Stop):
            scored(tmp_path / "unfinished.zarr")
    with pytest.raises(InvalidData, match="has an unfinished job and no finished scores"):
        applied(tmp_path / "unfinished.zarr", new, tmp_path / "out.zarr")
    bad = data(120)
    bad[70, 1] = np.nan
    with pytest.raises(InvalidData, match="in 1 rows: 70"):
        applied(scores, bad, tmp_path / "out.zarr")
    assert not (tmp_path / "out.zarr").exists()
    with hold(tmp_path / "held.zarr"), pytest.raises(LeaseHeld, match=r"held\.zarr"):
        applied(scores, new, tmp_path / "held.zarr")
    assert not (tmp_path / "held.zarr").exists()


def test_apply_sketch__notices_rows_that_change_meanwhile(tmp_path, monkeypatch):
    scores, new = scored(tmp_path / "scores.zarr"), stored(tmp_path / "new.zarr")
    array = zarr.open_array(new)

    def changing(event):
        array[0] = event.seconds

    with pytest.raises(SourceChanged, match=r"changed while it was scored\. Nothing was published"):
        applied(scores, new, tmp_path / "out.zarr", progress=changing)
    assert not (tmp_path / "out.zarr").exists()


def test_apply_sketch__of_a_kernel_that_is_a_function_needs_leave(tmp_path):
    daskrr.score_to_zarr(data(), tmp_path / "scores.zarr", counted, 1e-2, 20, random_state=0, progress=False)
    with pytest.raises(InvalidParameter, match="list it in allow_functions"):
        applied(tmp_path / "scores.zarr", data(9), tmp_path / "out.zarr")
    allowed = ["strategies:counted"]
    assert applied(tmp_path / "scores.zarr", data(9), tmp_path / "out.zarr", allow_functions=allowed)["n_rows"] == 9


def test_outputs__of_a_sketch_are_neither_updated_nor_reported(tmp_path):
    scores, new, output = scored(tmp_path / "scores.zarr"), stored(tmp_path / "new.zarr"), tmp_path / "out.zarr"
    applied(scores, new, output)
    with pytest.raises(InvalidData, match=r"has scores of new rows by a sketch\. Apply that again instead"):
        daskrr.update_scores(new, output, progress=False)
    with pytest.raises(InvalidData, match="they sum to nothing that a report or a picture could show"):
        write_report(output, tmp_path / "report.html", progress=False)
    with pytest.raises(InvalidData, match="they sum to nothing that a report or a picture could show"):
        _ = daskrr.open_scores(output).plot


# --- The command --------------------------------------------------------------------------------------


def invoke(*arguments):
    return CliRunner().invoke(main, [str(one) for one in arguments])


@pytest.mark.slow
def test_command__applies_the_sketch_of_scores(tmp_path):
    scores, new, output = scored(tmp_path / "scores.zarr"), stored(tmp_path / "new.zarr"), tmp_path / "out.zarr"
    result = invoke("apply", scores, new, output, "--workers", 1, "--quiet", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["n_rows"] == 250
    again = invoke("apply", scores, new, output, "--quiet")
    assert again.exit_code == 0
    assert "certified, but for a chance of at most 1e-06" in again.stdout
    assert "of 300 rows, rank 40" in again.stdout
    assert "highest rows by estimate" in again.stdout
    check_values(output, daskrr.load(scores), zarr.open_array(new)[...])
    assert invoke("verify", output).exit_code == 0
    assert "250 rows" in invoke("status", output).stdout
    assert "estimate" in invoke("top", output, "-k", 3).stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("nothing.zarr", "new.zarr", "out.zarr"), 2, "there is no model, no sketch and no scores at"),
        (("scores.zarr", "wide.zarr", "out.zarr"), 2, "X_new has 4 features; the sketch was fitted to 3"),
        (("scores.zarr", "nothing.zarr", "out.zarr"), 2, "nothing.zarr"),
        (("scores.zarr", "new.zarr", "scores.zarr"), 4, "holds scores that differ in sketch"),
    ],
)
def test_command__tells_mistakes_before_a_cluster_is_started(arguments, code, message, tmp_path, monkeypatch):
    scored(tmp_path / "scores.zarr")
    stored(tmp_path / "new.zarr")
    as_zarr(data(20, 4), (10, 4), str(tmp_path / "wide.zarr"))
    monkeypatch.setattr("daskrr.apps.clusters.connect", lambda **_: pytest.fail("a cluster was started"))
    result = invoke("apply", *(tmp_path / name for name in arguments), "--quiet")
    assert result.exit_code == code, result.output
    assert message in result.output
